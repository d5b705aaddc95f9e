"""Run `statecli diff`: options in, outcome out."""

from __future__ import annotations

import math
import re

from msgspec.structs import replace

from statecli.commands.diff.result import Field
from statecli.commands.diff.run import Request, compare_targets
from statecli.core.errors import UsageError
from statecli.render import Output
from statecli.report.diff import DiffView, NameList, build_diff_report, list_broken
from statecli.requests.options import CUDA, DiffOptions
from statecli.requests.outcome import Caller, Given, Outcome, describe_failures
from statecli.targets import load
from statecli.values.delta import CompareOptions
from statecli.workers import executors

#: The tensors that changed most whose Δ a page draws.
HISTOGRAMS = 6

_DEVICE = re.compile(rf"cpu|{CUDA}")
#: Outputs that have every change whatever is asked of the rows for people.
_WHOLE = (Output.JSON, Output.JSONL, Output.CSV)


def check(options: DiffOptions, given: Given) -> None:  # noqa: ARG001 - every command has the same signature
    """Raise UsageError for options that contradict each other, before anything is read."""
    for name in ("atol", "rtol"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"--{name} {value:g}: a tolerance is a finite number, 0 or more")
    for name, count in (("--jobs", options.jobs), ("--lines", options.lines)):
        if count is not None and count < 0:
            raise UsageError(f"{name} {count}: must be 0 or more")
    if not _DEVICE.fullmatch(options.device):
        raise UsageError(f"--device {options.device}: cpu, cuda or cuda:N")
    executors.check_executor(options.executor, jobs=options.jobs, device=options.device)
    for one, other in _contradictions(options):
        raise UsageError(f"{one} and {other} contradict each other; leave one of them out")
    _check_classes(options)


def _contradictions(options: DiffOptions) -> list[tuple[str, str]]:
    """Pairs of options, both given, of which one would be ignored."""
    names = "--name-only" if options.name_only else "--name-status" if options.name_status else ""
    output = f"-f {options.output_format.value}"
    rows = f"-n {options.lines}" if options.lines is not None else "--tree" if options.tree else ""
    ignored = "--ignore values" if Field.VALUES in options.ignore else ""
    pairs = [
        ("--bitwise" if options.bitwise else "", _tolerance(options)),
        ("--metadata-only" if options.metadata_only else ignored, _of_values(options)),
        ("--name-only" if options.name_only else "", "--name-status" if options.name_status else ""),
        (names, output if options.output_format not in (Output.TABLE, Output.PLAIN) else ""),
        (names, "--quiet" if options.quiet else rows),
        (rows or ("--all" if options.all else ""), output if options.output_format in _WHOLE else ""),
    ]
    return [(one, other) for one, other in pairs if one and other]


def _tolerance(options: DiffOptions) -> str:
    return "--atol" if options.atol else "--rtol" if options.rtol else ""


def _of_values(options: DiffOptions) -> str:
    """What says how values are compared, or by whom."""
    executor = "" if options.executor is None else f"--executor {executors.executor_name(options.executor)}"
    shard = "" if options.shard is None else f"--shard {options.shard}"
    return "--bitwise" if options.bitwise else _tolerance(options) or executor or shard


def _check_classes(options: DiffOptions) -> None:
    """What is of classes alone needs one; what is of values is of files alone."""
    both = (options.before, options.after)
    classes = [text for text in both if load.find_class_spec(text) is not None]
    if options.init_device != "cpu" and not classes:
        raise UsageError(f"--init-device {options.init_device}: neither {' nor '.join(both)} is a class to be built")
    device = f"--device {options.device}" if options.device != "cpu" else ""
    how = _of_values(options) or device
    if classes and how:
        raise UsageError(f"{how}: values are not compared, {classes[0]} is a class; leave it out")


def reads_values(options: DiffOptions, given: Given) -> bool:  # noqa: ARG001 - every command has the same signature
    """Return True: what does not read values contradicts --executor and --shard in `check`."""
    return True


#: Never shown, because `reads_values` is always true.
VALUES_ARE_READ = ""


def prepare(options: DiffOptions, caller: Caller) -> Request:  # noqa: ARG001 - as above
    """Return the request, before anything is read."""
    return build_request(options)


def run(options: DiffOptions, request: Request, caller: Caller, given: Given) -> Outcome:
    """Compare both sides. What could be compared is reported, whatever could not."""
    with caller.progress(values=not options.metadata_only) as progress:
        diff = compare_targets(request, progress)
    caller.check_states(diff.before, diff.after)
    if given.name is not None:
        sides = replace(diff.before, target=f"a/{given.name}"), replace(diff.after, target=f"b/{given.name}")
        diff = replace(diff, before=sides[0], after=sides[1])
    view = build_view(options)
    report = build_diff_report(diff, view)
    failures = describe_failures(list_broken(diff), "compared")
    notes = report.describe_findings_without_row() if view.names is not None else ()
    return Outcome(diff, report, failures=failures, notes=notes, plain=view.names is not None)


def build_request(options: DiffOptions) -> Request:
    """Return what to compare, and how."""
    return Request(
        before=options.before,
        after=options.after,
        how=CompareOptions(options.bitwise, options.atol, options.rtol, options.device),
        values=not options.metadata_only,
        renames=not options.no_renames,
        map=options.map,
        ignore=options.ignore,
        only=options.only,
        frozen=options.frozen,
        changed=options.changed,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
        init_device=options.init_device,
        jobs=options.jobs,
        histograms=HISTOGRAMS if _is_drawn(options) else 0,
    )


def _is_drawn(options: DiffOptions) -> bool:
    """Whether an output shows pictures."""
    return options.output_format is Output.HTML or any(text.startswith("html=") for text in options.report)


def build_view(options: DiffOptions) -> DiffView:
    """Return how people want to see the diff."""
    overlooked = [f"--{name} {getattr(options, name):g}" for name in ("atol", "rtol") if getattr(options, name)]
    overlooked += [f"--ignore {field.value}" for field in dict.fromkeys(options.ignore)]
    return DiffView(
        unfold=options.all,
        tree=options.tree,
        verbose=options.verbose,
        lines=options.lines,
        names=NameList.ONLY if options.name_only else NameList.STATUS if options.name_status else None,
        within=f" with {' '.join(overlooked)}" if overlooked else "",
    )
