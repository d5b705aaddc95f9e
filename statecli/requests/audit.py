"""Run `statecli audit` and return its outcome. Options override the settings of the project's configuration."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.commands.audit import baseline, config, required_rules, run as audit_run, unused_settings
from statecli.commands.audit.baseline import Baseline
from statecli.commands.audit.config import Config, LoadedConfig
from statecli.commands.audit.request import Request
from statecli.commands.audit.result import Audit
from statecli.commands.lock import lock_file
from statecli.commands.lock.lock_file import Lock
from statecli.core.errors import UsageError, option
from statecli.core.finding import Severity
from statecli.core.run_scope import Configuration
from statecli.report import View, rules
from statecli.report.audit import build_audit_report, list_inconclusive
from statecli.requests.accepted_findings import check_reason
from statecli.requests.options import AuditOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome, OutputFile
from statecli.requests.parameters import refuse_contradictions, refuse_division
from statecli.targets.load import find_class_spec
from statecli.targets.target_result import TargetStatus


def prepare(options: AuditOptions, caller: Caller, extra: ExtraInputs) -> Request:  # noqa: ARG001 - every command has the same signature
    """Build the request of the audit from the options, without reading a target."""
    loaded = load_config(options)
    caller.check_files(list_configured_files(options, loaded))
    return build_request(options, loaded)


def run(options: AuditOptions, request: Request, caller: Caller, extra: ExtraInputs) -> Outcome[Audit]:  # noqa: ARG001 - as above
    """Audit the targets. Targets that could not be audited, and inconclusive checks, are failures."""
    with caller.progress(values=bool(request.values) or request.lock is not None) as progress:
        result = audit_run.audit(request, progress=progress)
    files: tuple[OutputFile, ...] = ()
    if options.write_baseline is not None:
        result, pieces = audit_run.accept_all(result, options.write_baseline, options.reason or "", request)
        files = (OutputFile(options.write_baseline, pieces),)
    inconclusive_checks = list_inconclusive(result, options.select, allow_empty=options.allow_empty)
    fixed_entries, notes = baseline.report_fixed_entries(result), unused_settings.build_notes(result, request)
    result = replace(result, inconclusive=inconclusive_checks, run_notes=(*fixed_entries, *notes))
    report = build_audit_report(result, View(unfold=options.all, verbose=options.verbose))
    failure_reasons = [
        target.reason or target.target for target in result.targets if target.status is TargetStatus.FAILED
    ]
    return Outcome(
        result,
        report,
        failures=list(dict.fromkeys((*failure_reasons, *inconclusive_checks))),
        reported=True,
        notes=[*([] if options.verbose else fixed_entries), *notes],
        warning=rules.describe_former_names(request.rule_names, request.known_rules, "audit"),
        files=files,
    )


def build_request(options: AuditOptions, loaded: LoadedConfig | None = None) -> Request:
    """Build the request from the options and the configuration. If `loaded` is None, read the configuration first.

    `--select` replaces the configured rules, `--ignore` adds to them. Raises UsageError for options that contradict the
    configuration or each other, UnreadableError for an unreadable lock or baseline.
    """
    loaded = loaded or load_config(options)
    file_config = loaded.config
    _check_policy(options, loaded)
    lock = options.lock or file_config.lock
    request = Request(
        targets=options.targets,
        model=options.model,
        against=options.against,
        select=config.expand_rules(options.select or file_config.select, option("--select"), loaded.rules),
        ignore=config.expand_rules((*file_config.ignore, *options.ignore), option("--ignore"), loaded.rules),
        per_target_ignore=file_config.per_target_ignore,
        config_folder=loaded.folder,
        severity=config.map_to_rules(file_config.severity.items(), "severity", loaded.rules),
        fail_on=options.fail_on or file_config.fail_on,
        policy=file_config.policy,
        init_device=options.init_device,
        selection=options.selection,
        lock=_read_lock(lock, options),
        lock_file=lock,
        frozen_only=options.frozen_only,
        weights_only=options.tensors_only,
        baseline=_read_baseline(options, loaded),
        values=_decide_values(options, file_config),
        jobs=options.jobs,
        allow_empty=options.allow_empty,
        as_found=options.as_found,
        configuration=describe_configuration(options, loaded),
        plugins=loaded.plugins,
        rule_names=(*options.select, *options.ignore, *file_config.rule_names),
    )
    required_rules.check_required_rules(
        request, [key for key in required_rules.RULES_BY_OPTION if getattr(options, key)], loaded
    )
    compares_values = request.policy.must_change or request.policy.must_not_change
    if not (request.values or request.lock or compares_values):
        advice = f"add {option('--values')} or {option('--lock', 'FILE')}"
        refuse_division(
            options, f"splits the reading of tensor values, but this command does not read values; {advice}"
        )
    return request


def _check_policy(options: AuditOptions, loaded: LoadedConfig) -> None:
    """Raise UsageError if the policy needs a reference checkpoint that is not given, or if its reference is a class."""
    policy = loaded.config.policy
    if policy.reference and not options.against and find_class_spec(policy.reference) is not None:
        advice = f"give {option('--against', policy.reference)} instead"
        problem = f"is a model class, and a configuration must not run code; {advice}"
        raise UsageError(f"{loaded.path}: policy.reference: {problem}")
    for key, globs in (("must-change", policy.must_change), ("must-not-change", policy.must_not_change)):
        if globs and not (policy.reference or options.against):
            problem = "needs a checkpoint to compare with: set policy.reference, or give " + option("--against")
            raise UsageError(f"{loaded.path}: policy.{key}: {problem}")


def list_configured_files(options: AuditOptions, loaded: LoadedConfig) -> list[str]:
    """Return the paths of the configuration, and of the lock, baseline and reference checkpoint that the run reads."""
    file_config = loaded.config
    lock, baseline_path = options.lock or file_config.lock, options.baseline or file_config.baseline
    paths = (loaded.path, lock, baseline_path, file_config.policy.reference)
    return [path for path in paths if path is not None]


def _decide_values(options: AuditOptions, file_config: Config) -> bool | None:
    """Return True to read all values, False to read no values, None for the default limit."""
    if options.values and options.no_values:
        refuse_contradictions([(option("--no-values"), option("--values"))])
    return options.values if options.values or options.no_values else file_config.values


def _read_lock(path: str | None, options: AuditOptions) -> Lock | None:
    if path is not None:
        return lock_file.read_lock(path)
    if options.frozen_only or options.tensors_only:
        flag = "--frozen-only" if options.frozen_only else "--tensors-only"
        raise UsageError(f"{option(flag)}: works only with a lock; add {option('--lock', 'FILE')}")
    return None


def _read_baseline(options: AuditOptions, loaded: LoadedConfig) -> Baseline | None:
    check_reason(options.write_baseline, options.reason)
    paths = (options.baseline or loaded.config.baseline, baseline.find_existing_file(options.write_baseline))
    left_out = loaded.protected_rules if loaded.is_judged and options.baseline is None else frozenset()
    plugin_rules = [rule.name for plugin in loaded.plugins for rule in plugin.rules]
    return baseline.join_baselines(paths, left_out, plugin_rules)


def load_config(options: AuditOptions) -> LoadedConfig:
    """Return the configuration of `--config`, or of the nearest file. A file in an audited download is not trusted."""
    loaded = config.load_config(
        options.config, no_config=options.no_config, plugins=options.plugin, targets=options.targets
    )
    return loaded if options.config is not None else config.distrust_judged_config(loaded, options.targets)


def describe_configuration(options: AuditOptions, loaded: LoadedConfig) -> Configuration:
    """Return the path of the configuration and the settings in effect that weaken the audit."""
    file_config = loaded.config
    selected_rules = () if options.select else config.expand_rules(file_config.select, "select", loaded.rules)
    ignored_rules = config.expand_rules(file_config.ignore, "ignore", loaded.rules)
    names = [rule.name for rule in loaded.rules]
    disabled = [name for name in names if (selected_rules and name not in selected_rules) or name in ignored_rules]
    severities = [(name, level) for name, level in file_config.severity.items() if level is not Severity.ERROR]
    weakened = [f"severity.{name} = {level.value}" for name, level in severities]
    ignores = file_config.per_target_ignore.items()
    weakened += [f"per-target-ignore.{glob}: {', '.join(ignore.rules)}" for glob, ignore in ignores]
    if file_config.fail_on is Severity.ERROR and options.fail_on is None:
        weakened.append(f"fail-on = {file_config.fail_on.value}")
    if file_config.values is False and not (options.values or options.no_values):
        weakened.append("values = false")
    if loaded.is_judged:
        weakened.append(
            "cannot weaken rules about pickles and code or rules of plugins, because this file is in the audited "
            "folder and may come from the author of the code; if you trust the file, give it with --config"
        )
    if file_config.baseline is not None and options.baseline is None:
        weakened.append(f"baseline = {file_config.baseline}")
    plugins = tuple(plugin.name for plugin in loaded.plugins)
    return Configuration(loaded.path, tuple(disabled), tuple(weakened), options.no_config, plugins)
