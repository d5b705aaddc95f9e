"""Name the option that divides the reading of tensor values."""

from __future__ import annotations

from statecli.core.errors import UsageError, option
from statecli.requests.options import AuditOptions, DiffOptions, InspectOptions, LockOptions


def name_division(options: InspectOptions | DiffOptions | AuditOptions | LockOptions) -> str:
    """Return `--executor` or `--shard` with its value, for a message; "" if neither is given."""
    if options.executor is not None:
        from statecli.workers import executors

        return option("--executor", executors.executor_name(options.executor))
    return "" if options.shard is None else option("--shard", options.shard)


def refuse_division(options: InspectOptions | LockOptions, reason: str) -> None:
    """Raise UsageError for an option that divides the reading of values, if the command reads none."""
    if division := name_division(options):
        raise UsageError(f"{division}: {reason}")
