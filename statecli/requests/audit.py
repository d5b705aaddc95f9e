"""Run `statecli audit`: options and the project's configuration in, outcome out. The line's options come first."""

from __future__ import annotations

from statecli.commands.audit import baseline, config, required_rules, run_notes
from statecli.commands.audit import run as audit_run
from statecli.commands.audit.baseline import Baseline
from statecli.commands.audit.config import Config, LoadedConfig
from statecli.commands.audit.request import Request
from statecli.commands.lock import lock_file
from statecli.commands.lock.lock_file import Lock
from statecli.core.errors import UsageError
from statecli.core.finding import Severity
from statecli.core.scope import Configuration
from statecli.report import View
from statecli.report.audit import build_audit_report, list_inconclusive
from statecli.requests.options import AuditOptions
from statecli.requests.outcome import Caller, Given, Outcome, OutputFile
from statecli.rules import RULES
from statecli.storage import files
from statecli.targets.load import find_class_spec
from statecli.targets.target_result import Status


def check(options: AuditOptions, given: Given) -> None:  # noqa: ARG001 - every command has the same signature
    """Raise UsageError for options that contradict each other, before anything is read."""
    if options.jobs < 0:
        raise UsageError(f"--jobs {options.jobs}: must be 0 or more")


def reads_values(options: AuditOptions, given: Given) -> bool:  # noqa: ARG001 - as above
    """Return True: whether an audit reads values depends on the configuration, see `build_request`."""
    return True


#: Never shown, because `build_request` says it.
VALUES_ARE_READ = ""


def prepare(options: AuditOptions, caller: Caller) -> Request:
    """Return the request, by the options and the configuration, before a target is read."""
    configured = load_config(options)
    caller.check_files(configured_files(options, configured))
    return build_request(options, configured)


def run(options: AuditOptions, request: Request, caller: Caller, given: Given) -> Outcome:  # noqa: ARG001 - as above
    """Audit each target; what could not be audited is a failure."""
    with caller.progress(values=bool(request.values) or request.lock is not None) as progress:
        found = audit_run.audit(request, progress=progress)
    files: tuple[OutputFile, ...] = ()
    if options.write_baseline is not None:
        found, pieces = audit_run.accept_all(found, options.write_baseline, options.reason or "", request)
        files = (OutputFile(options.write_baseline, pieces),)
    unjudged = list_inconclusive(found, options.select, allow_empty=options.allow_empty)
    fixed, notes = baseline.report_fixed_entries(found), run_notes.build_notes(found, request)
    report = build_audit_report(found, View(unfold=options.all, verbose=options.verbose), unjudged, [*fixed, *notes])
    failed = [target.reason or target.target for target in found.targets if target.status is Status.FAILED]
    return Outcome(
        found,
        report,
        failures=list(dict.fromkeys((*failed, *unjudged))),
        reported=True,
        notes=[*([] if options.verbose else fixed), *notes],
        files=files,
    )


def build_request(options: AuditOptions, found: LoadedConfig | None = None) -> Request:
    """Return what is asked for, by the configuration `found` or the one that the line names.

    Raises UsageError for what makes no sense, UnreadableError for a file that is not what it is given as.

    `--select` takes the place of the configured one, `--ignore` adds to it.
    """
    found = found or load_config(options)
    asked = found.config
    _check(options, found)
    lock = options.lock or asked.lock
    made = Request(
        targets=options.targets,
        model=options.model,
        against=options.against,
        select=config.expand_rules(options.select or asked.select, "--select"),
        ignore=config.expand_rules((*asked.ignore, *options.ignore), "--ignore"),
        per_target_ignore=asked.per_target_ignore,
        config_folder=found.folder,
        severity=config.map_to_rules(asked.severity.items(), "severity"),
        fail_on=options.fail_on or asked.fail_on,
        policy=asked.policy,
        init_device=options.init_device,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
        lock=_lock(lock, options),
        lock_folder=files.get_folder(lock or "") or ".",
        frozen_only=options.frozen_only,
        weights_only=options.weights_only,
        baseline=_baseline(options, asked),
        values=_values(options, asked),
        jobs=options.jobs,
        allow_empty=options.allow_empty,
        as_found=options.as_found,
        configuration=configuration_of(options, found),
    )
    required_rules.check_required_rules(
        made, [key for key in required_rules.RULES_BY_OPTION if getattr(options, key)], found
    )
    compared = made.policy.must_change or made.policy.must_not_change
    executor = options.executor and f"--executor {options.executor}"
    divided = executor or (options.shard and f"--shard {options.shard}")
    if divided and not (made.values or made.lock or compared):
        raise UsageError(f"{divided}: nothing here reads values; give --values or --lock FILE")
    return made


def _check(options: AuditOptions, found: LoadedConfig) -> None:
    """Raises UsageError for a policy that is held to nothing, or that names code: only the command line may do so."""
    policy = found.config.policy
    if policy.reference and not options.against and find_class_spec(policy.reference) is not None:
        why = f"a class is code, which a configuration does not name; give --against {policy.reference}"
        raise UsageError(f"{found.path}: policy.reference: {why}")
    for key, globs in (("must-change", policy.must_change), ("must-not-change", policy.must_not_change)):
        if globs and not (policy.reference or options.against):
            why = "holds against a checkpoint: configure policy.reference, or give --against"
            raise UsageError(f"{found.path}: policy.{key}: {why}")


def configured_files(options: AuditOptions, found: LoadedConfig) -> list[str]:
    """Return the files that are read though no option of the line names them."""
    asked = found.config
    known = (found.path, options.lock or asked.lock, options.baseline or asked.baseline, asked.policy.reference)
    return [path for path in known if path is not None]


def _values(options: AuditOptions, asked: Config) -> bool | None:
    """Return whether values are read: True, False, or None for the default limit."""
    if options.values and options.no_values:
        raise UsageError("--no-values: contradicts --values; give one of them")
    if options.values or options.no_values:
        return options.values
    return asked.values


def _lock(path: str | None, options: AuditOptions) -> Lock | None:
    if options.frozen_only and path is None:
        raise UsageError("--frozen-only: says what part of a lock counts; give --lock FILE")
    if options.weights_only and path is None:
        raise UsageError("--weights-only: applies to a lock; give --lock FILE")
    return None if path is None else lock_file.read_lock(path)


def _baseline(options: AuditOptions, asked: Config) -> Baseline | None:
    path, reason = options.write_baseline, options.reason
    if path is not None and not (reason or "").strip():
        raise UsageError(f"--write-baseline {path}: say why with --reason TEXT; it is shown with what is accepted")
    if path is None and reason is not None:
        raise UsageError("--reason: is that of --write-baseline FILE; give both")
    return baseline.join_baselines((options.baseline or asked.baseline, baseline.find_existing_file(path)))


def load_config(options: AuditOptions) -> LoadedConfig:
    """Return the configuration that the line names, or the nearest one."""
    return config.load_config(options.config, no_config=options.no_config)


def configuration_of(options: AuditOptions, found: LoadedConfig) -> Configuration:
    """Return which file configures the audit and what in it lets more pass, as far as the command line leaves it."""
    asked = found.config
    selected = config.expand_rules(asked.select, "select") if asked.select and not options.select else ()
    ignored = config.expand_rules(asked.ignore, "ignore")
    names = [rule.name for rule in RULES]
    disabled = [name for name in names if (selected and name not in selected) or name in ignored]
    weakened = [f"severity.{name} = {one.value}" for name, one in asked.severity.items() if one is not Severity.ERROR]
    weakened += [f"per-target-ignore.{glob}: {', '.join(one.rules)}" for glob, one in asked.per_target_ignore.items()]
    if asked.fail_on is Severity.ERROR and options.fail_on is None:
        weakened.append(f"fail-on = {asked.fail_on.value}")
    if asked.baseline is not None and options.baseline is None:
        weakened.append(f"baseline = {asked.baseline}")
    return Configuration(found.path, tuple(disabled), tuple(weakened), options.no_config)


def in_force(found: LoadedConfig) -> list[tuple[str, object, str]]:
    """Each key of the configuration, its value, and where that comes from: the file, or `default`."""
    rows: list[tuple[str, object, str]] = []
    for field, key in zip(Config.__struct_fields__, Config.__struct_encode_fields__, strict=True):
        value = getattr(found.config, field)
        if key != "policy":
            rows.append((key, value, found.source(key)))
            continue
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        rows += [(f"policy.{inner}", getattr(value, name), found.source("policy", inner)) for name, inner in names]
    return rows
