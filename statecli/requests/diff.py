"""Run `statecli diff` with its options and return its outcome."""

from __future__ import annotations

import math

from msgspec.structs import asdict, replace

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Diff, Field
from statecli.commands.diff.run import compare_targets
from statecli.commands.diff.snapshot import refuse_value_options
from statecli.core.errors import UsageError, option
from statecli.core.lazy_pattern import compile_on_use
from statecli.render import Output
from statecli.report.diff import build_diff_report
from statecli.report.diff_view import DiffView, NameList, list_broken
from statecli.requests.options import CUDA_PATTERN, DiffOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome, describe_failures
from statecli.requests.parameters import name_division, refuse_contradictions
from statecli.requests.row_options import COMPLETE_OUTPUTS, build_row_view, check_rows, name_row_options
from statecli.targets import load
from statecli.values.delta import CompareOptions

#: Number of histograms of Δ on a page. They show the tensors with the largest changes.
HISTOGRAM_COUNT = 6

_DEVICE = compile_on_use(rf"cpu|{CUDA_PATTERN}")


def prepare(options: DiffOptions, caller: Caller, extra: ExtraInputs) -> Request:  # noqa: ARG001 - every command has the same signature
    """Build the request of the comparison from the options. Raises UsageError for contradictory options."""
    if extra.snapshots:
        refuse_value_options(
            [
                ("--atol", options.atol),
                ("--rtol", options.rtol),
                ("--cast", options.cast),
                ("--adapter", options.adapter),
                ("--device", options.device != "cpu"),
            ]
        )
    for flag, value in (("--atol", options.atol), ("--rtol", options.rtol)):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{option(flag, value)}: must be a finite number, 0 or more")
    check_rows(options)
    if not _DEVICE.fullmatch(options.device):
        raise UsageError(f"{option('--device', options.device)}: must be cpu, cuda or cuda:N")
    refuse_contradictions(_find_contradictions(options))
    _check_classes(options)
    return Request(
        before=options.before,
        after=options.after,
        how=CompareOptions(options.bitwise, options.atol, options.rtol, options.device),
        values=not options.metadata_only,
        renames=not options.no_renames,
        map=options.map,
        ignore=options.ignore,
        only=options.may_change,
        frozen=options.must_not_change,
        changed=options.must_change,
        cast=options.cast,
        adapter=options.adapter,
        selection=options.selection,
        init_device=options.init_device,
        jobs=options.jobs,
        ranks=options.verbose or _has_page(options),
        histograms=HISTOGRAM_COUNT if _has_page(options) else 0,
    )


def _find_contradictions(options: DiffOptions) -> list[tuple[str, str]]:
    """Return pairs of options that contradict each other. "" stands for an option that is not given."""
    name_only, name_status = _name_if(options.name_only, "--name-only"), _name_if(options.name_status, "--name-status")
    names = name_only or name_status
    output = option("-f", options.output_format.value) if options.output_format is not None else ""
    tree_option, unchanged_option = _name_if(options.tree, "--tree"), _name_if(options.unchanged, "--unchanged")
    cast_option, tolerance = _name_if(options.cast, "--cast"), _name_tolerance(options)
    tolerance_or_dtype = tolerance or (option("--ignore", "dtype") if Field.DTYPE in options.ignore else "")
    without_values = _name_if(options.metadata_only, "--metadata-only")
    if not without_values and Field.VALUES in options.ignore:
        without_values = option("--ignore", "values")
    rows = next(filter(None, name_row_options(options)), "")
    is_complete = options.output_format in COMPLETE_OUTPUTS
    return [
        (_name_if(options.bitwise, "--bitwise"), tolerance),
        (without_values, _name_value_option(options)),
        (cast_option, tolerance_or_dtype),
        (_name_adapter(options), cast_option or tolerance_or_dtype),
        (name_only, name_status),
        (names, output if options.output_format not in (None, Output.TABLE, Output.PLAIN) else ""),
        (tree_option, unchanged_option),
        (names, _name_if(options.quiet, "--quiet") or tree_option or rows),
        (name_status, unchanged_option),
        (tree_option or _name_if(options.all, "--all"), output if is_complete else ""),
    ]


def _name_if(value: object, flag: str) -> str:
    """Return the text of an option for a message, or "" if the option is not given."""
    return option(flag) if value else ""


def _name_adapter(options: DiffOptions) -> str:
    return option("--adapter", options.adapter) if options.adapter is not None else ""


def _name_tolerance(options: DiffOptions) -> str:
    return _name_if(options.atol, "--atol") or _name_if(options.rtol, "--rtol")


def _name_value_option(options: DiffOptions) -> str:
    """Return the first given option that affects the comparison of values, or "" if none is given."""
    option_text = _name_if(options.bitwise, "--bitwise") or _name_tolerance(options) or _name_if(options.cast, "--cast")
    return option_text or _name_adapter(options) or name_division(options)


def _check_classes(options: DiffOptions) -> None:
    """Raise UsageError for --init-device without a class, and for options about values if a side is a class."""
    target_texts = (options.before, options.after)
    classes = [text for text in target_texts if load.find_class_spec(text) is not None]
    if options.init_device is not None and not classes:
        problem = (
            f"{' and '.join(target_texts)} are not model classes, so statecli builds no model; leave the option out"
        )
        raise UsageError(f"{option('--init-device', options.init_device)}: {problem}")
    device = option("--device", options.device) if options.device != "cpu" else ""
    value_option = _name_value_option(options) or device
    if classes and value_option:
        raise UsageError(
            f"{value_option}: values are not compared with the class {classes[0]}, which has only initial values; "
            "leave this option out"
        )


def run(options: DiffOptions, request: Request, caller: Caller, extra: ExtraInputs) -> Outcome[Diff]:
    """Compare both checkpoints. Tensors that could not be compared are failures."""
    with caller.progress(values=not options.metadata_only) as progress:
        diff = compare_targets(request, progress, extra.snapshots)
    caller.check_states(diff.before, diff.after)
    if extra.name is not None:
        sides = replace(diff.before, target=f"a/{extra.name}"), replace(diff.after, target=f"b/{extra.name}")
        diff = replace(diff, before=sides[0], after=sides[1])
    view = build_view(options)
    report = build_diff_report(diff, view)
    failures = describe_failures(list_broken(diff), "compared")
    notes = report.describe_findings_without_row() if view.names is not None else ()
    return Outcome(diff, report, failures=failures, notes=notes, plain=view.names is not None)


def _has_page(options: DiffOptions) -> bool:
    """Return True if an output is an HTML page, because only a page shows histograms."""
    return options.output_format is Output.HTML or any(text.startswith("html=") for text in options.report)


def build_view(options: DiffOptions) -> DiffView:
    """Return the options of the human-readable diff."""
    return DiffView(
        **asdict(build_row_view(options)),
        unchanged=options.unchanged,
        names=NameList.ONLY if options.name_only else NameList.STATUS if options.name_status else None,
    )
