"""Options of a command with `--shard`. Options that affect the result go into the part files."""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

import msgspec

from statecli.core.errors import UsageError, option
from statecli.requests.options import (
    COMMAND_NAMES,
    AuditOptions,
    DiffOptions,
    InspectOptions,
    LockOptions,
    MergeOptions,
)
from statecli.requests.parameters import list_given, parameters_of, refuse_contradictions
from statecli.shards.partition import parse_shard

ShardedOptions: TypeAlias = InspectOptions | DiffOptions | AuditOptions | LockOptions
#: Commands with the option `--shard`.
SHARDED_COMMANDS: dict[str, type[ShardedOptions]] = {
    COMMAND_NAMES[options]: options for options in get_args(ShardedOptions)
}
#: Options that only decide who does the work and how the output is written. `merge` has these options too.
OUTPUT_OPTIONS = frozenset(
    each.field
    for each in parameters_of(MergeOptions)
    if not each.is_target and any(each.field in options.__struct_fields__ for options in SHARDED_COMMANDS.values())
) | {"shard"}
#: Options of a report. A part file has a fixed format, as does a lock file.
_REPORT_OPTIONS = OUTPUT_OPTIONS.difference(LockOptions.__struct_fields__)


def check_options(options: ShardedOptions, shard: str) -> None:
    """Raise UsageError for an invalid `--shard`, and for options that contradict `--shard`."""
    parse_shard(shard)
    parameters = list_given(options)
    for each in parameters:
        if each.field in _REPORT_OPTIONS:
            raise UsageError(
                f"{option(each.flags[0])}: part files have a fixed format; give this option to statecli merge instead"
            )
    contradictory = [option(each.flags[0]) for each in parameters if each.contradicts_shard]
    if isinstance(options, DiffOptions) and options.device != "cpu":
        contradictory.append(option("--device", options.device))
    refuse_contradictions([(contradicted, option("--shard", shard)) for contradicted in contradictory])


def select_options(options: ShardedOptions) -> dict[str, Any]:
    """Return the given options that affect the result."""
    fields = [each.field for each in list_given(options) if each.field not in OUTPUT_OPTIONS]
    return {field: msgspec.to_builtins(getattr(options, field)) for field in fields}
