"""Run `statecli inspect`: options in, outcome out."""

from __future__ import annotations

from statecli.commands.inspect.run import Inspection, Request, inspect, inspect_live_model
from statecli.core.errors import UsageError
from statecli.core.progress import Progress
from statecli.report import View
from statecli.report.inspect import build_inspect_report
from statecli.requests.options import InspectOptions
from statecli.requests.outcome import Caller, Given, Outcome, describe_failures
from statecli.targets.load import find_class_spec


def check(options: InspectOptions, given: Given) -> None:
    """Raise UsageError for options that contradict each other, before anything is read."""
    if options.input and options.inputs:
        raise UsageError("--input and --inputs contradict each other; leave one of them out")
    if options.cuda and options.to not in (None, "cuda"):
        raise UsageError(f"--cuda and --to {options.to} contradict each other")
    if given.model is not None and options.model is not None:
        raise UsageError(f"--model groups a checkpoint; {options.target} is a model already")


def reads_values(options: InspectOptions, given: Given) -> bool:
    """Return True if the options have the values of a checkpoint read, which --executor and --shard are for."""
    return options.stats and given.model is None and find_class_spec(options.target) is None


#: What reads the values of tensors, as an error says it.
VALUES_ARE_READ = "inspect reads values only for --stats of a checkpoint"


def run(options: InspectOptions, request: Request, caller: Caller, given: Given) -> Outcome:
    """Inspect the target, or the live model that is given."""
    with caller.progress(values=request.stats or request.to is not None) as progress:
        inspection = _inspect(request, progress, given)
    caller.check_states(inspection.state)
    report = build_inspect_report(inspection, View(unfold=options.all, tree=options.tree, verbose=options.verbose))
    return Outcome(inspection, report, failures=describe_failures(inspection.broken, "read"))


def _inspect(request: Request, progress: Progress | None, given: Given) -> Inspection:
    if given.model is not None:
        return inspect_live_model(given.model, request, given.inputs)
    return inspect(request, progress, given.inputs)


def prepare(options: InspectOptions, caller: Caller) -> Request:  # noqa: ARG001 - every command has the same signature
    """Return the request, before anything is read."""
    return build_request(options)


def build_request(options: InspectOptions) -> Request:
    """Return what the options ask for."""
    return Request(
        target=options.target,
        to="cuda" if options.cuda else options.to,
        model=options.model,
        stats=options.stats,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
        init_device=options.init_device,
        input=options.input,
        inputs=options.inputs,
    )
