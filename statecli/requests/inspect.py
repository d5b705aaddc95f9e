"""Turn the options of `statecli inspect` into a request."""

from __future__ import annotations

from statecli.commands.inspect.run import Request
from statecli.core.errors import UsageError
from statecli.requests.options import InspectOptions


def requested(options: InspectOptions) -> Request:
    """Return what the options ask for. Raises UsageError where `--cuda` and `--to` contradict each other."""
    return Request(
        target=options.target,
        to=device(options.to, options.cuda),
        model=options.model,
        stats=options.stats,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
        init_device=options.init_device,
        input=options.input,
        inputs=options.inputs,
    )


def device(to: str | None, cuda: bool) -> str | None:
    """The device that `--to` and `--cuda` ask for together."""
    if cuda and to not in (None, "cuda"):
        raise UsageError(f"--cuda and --to {to} contradict each other")
    return "cuda" if cuda else to
