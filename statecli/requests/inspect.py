"""Run `statecli inspect` with its options and return its outcome."""

from __future__ import annotations

from msgspec.structs import replace

from statecli import requests
from statecli.commands.inspect.run import Inspection, Request, inspect, inspect_live_model
from statecli.core.errors import UsageError, option
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.report.inspect import build_inspect_report
from statecli.requests.accepted_findings import check_options, list_accepted
from statecli.requests.options import InspectOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome, describe_failures
from statecli.requests.parameters import refuse_contradictions, refuse_division
from statecli.requests.row_options import build_row_view, check_rows
from statecli.targets.load import find_class_spec
from statecli.targets.target_result import drop_accepted


def prepare(options: InspectOptions, caller: Caller, extra: ExtraInputs) -> Request:  # noqa: ARG001 - every command has the same signature
    """Build the request of the inspection from the options. Raises UsageError for contradictory options."""
    check_rows(options)
    if options.cuda and options.to not in (None, "cuda"):
        refuse_contradictions([(option("--cuda"), option("--to", options.to))])
    for name, is_given in (("--distributions", options.distributions), ("--spectra", options.spectra)):
        if not is_given or (extra.model is None and options.shard is None):
            continue
        reason = "does not work with a model in memory" if extra.model is not None else "does not work with --shard"
        raise UsageError(f"{option(name)}: {reason}; use {option('--stats')}, or give the file of a checkpoint")
    check_options(options)
    if extra.model is not None and options.model is not None:
        raise UsageError(
            f"{option('--model')}: needs a checkpoint, and {options.target} is a model; leave the option out"
        )
    reads_values = options.stats or options.distributions or options.spectra
    if not reads_values or extra.model is not None or find_class_spec(options.target) is not None:
        refuse_division(
            options, f"inspect reads values only if the target is a checkpoint and {option('--stats')} is given"
        )
    return Request(
        target=options.target,
        to="cuda" if options.cuda else options.to,
        model=options.model,
        stats=reads_values,
        distributions=options.distributions,
        spectra=options.spectra,
        selection=options.selection,
        init_device=options.init_device,
        input=options.input,
        inputs=options.input_from,
    )


def run(options: InspectOptions, request: Request, caller: Caller, extra: ExtraInputs) -> Outcome[Inspection]:
    """Inspect the target, or a live model."""
    with caller.progress(values=request.stats or request.to is not None) as progress:
        inspection = _inspect(request, progress, extra)
    caller.check_states(inspection.state)
    accepted_findings = list_accepted(inspection.findings, inspection.state, options)
    accepted = accepted_findings.accepted
    inspection = replace(inspection, findings=drop_accepted(inspection.findings, accepted), accepted=accepted)
    report = build_inspect_report(inspection, build_row_view(options), options.fail_on)
    if report.findings and extra.model is None and (spec := find_class_spec(options.target)) is not None:
        report = requests.suggested_fix_command.add_fix_command(report, inspection.state, spec, options)
    return Outcome(
        inspection,
        report,
        failures=describe_failures(inspection.broken, "read"),
        files=accepted_findings.files,
        warning=requests.match_accepted.describe_former_names(options) if options.ignore else None,
    )


def _inspect(request: Request, progress: Progress | None, extra: ExtraInputs) -> Inspection:
    if extra.model is not None:
        return inspect_live_model(extra.model, request, extra.inputs)
    inspection = inspect(request, progress, extra.inputs)
    has_foreign_names = any(oddity.kind is OddityKind.FOREIGN_GLOBALS for oddity in inspection.state.oddities)
    return requests.unsafe_calls.add_unsafe_calls(inspection) if has_foreign_names else inspection
