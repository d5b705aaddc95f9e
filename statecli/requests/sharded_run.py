"""Run a command as one shard (`--shard 1/4`): run a part of its tasks, and write a shard file instead of a report."""

from __future__ import annotations

from contextlib import AbstractContextManager

from statecli.commands.diff.result import Diff
from statecli.core.error_causes import group_by_cause
from statecli.core.units import plural
from statecli.requests.options import COMMAND_NAMES
from statecli.requests.outcome import MAX_FAILURE_LINES, Outcome
from statecli.requests.shard_options import ShardedOptions, select_options
from statecli.shards import shard


def use_shard(options: ShardedOptions, text: str) -> AbstractContextManager[shard.Shard]:
    """Return a context in which only the tasks of the shard `text`, such as `1/4`, run."""
    return shard.use_shard(text, COMMAND_NAMES[type(options)], select_options(options))


def build_outcome(own_shard: shard.Shard, outcome: Outcome[object]) -> Outcome[object]:
    """Return the outcome of one shard. Its content is the shard file, because a report needs all shards."""
    changed_files = outcome.result.changed_files if isinstance(outcome.result, Diff) else ()
    causes = [group.line for group in group_by_cause(dict.fromkeys(own_shard.failed))]
    failures = causes[:MAX_FAILURE_LINES]
    if len(causes) > MAX_FAILURE_LINES:
        failures.append(f"and {plural(len(causes) - MAX_FAILURE_LINES, 'more task')} that failed")
    return Outcome(
        outcome.result, content=own_shard.encode_file(changed_files), failures=failures, warning=outcome.warning
    )
