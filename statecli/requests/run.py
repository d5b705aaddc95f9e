"""Run a command with its options and return its outcome.

The command line, the Python API, git's driver and the documents all run commands here. The steps around the work of
a command are the same for each: refuse empty values, choose the engine or the shard, build the request. The module of a
command is imported when the command runs, because a start takes less time without the other modules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

from statecli import requests, workers
from statecli.requests.class_targets import ClassOptions, name_classes
from statecli.requests.options import COMMAND_NAMES, MergeOptions, Options, ReportOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome
from statecli.requests.parameters import check_inputs, check_standard_input, check_values
from statecli.requests.report import build_inspect_options

if TYPE_CHECKING:
    from statecli.requests.shard_options import ShardedOptions
    from statecli.shards.shard import Shard


class CommandModule(Protocol):
    """The module of a command in this package. Its functions take the options and the request of the command."""

    def prepare(self, options: Options, caller: Caller, extra: ExtraInputs) -> object: ...

    def run(self, options: Options, request: object, caller: Caller, extra: ExtraInputs) -> Outcome[object]: ...


class PlainCommandModule(Protocol):
    """The module of a command without a request. It has no `prepare`, because it does not use engines or shards."""

    def run(self, options: Options, caller: Caller) -> Outcome[object]: ...


def run(options: Options, caller: Caller | None = None, extra: ExtraInputs | None = None) -> Outcome[Any]:
    """Run the command that the options belong to.

    Raises StateError if the whole command failed; a failed part of the work is in `Outcome.failures`.
    """
    caller, extra = caller or Caller(), extra or ExtraInputs()
    check_values(options)
    check_standard_input(options)
    check_inputs(options)
    if isinstance(options, MergeOptions):
        with requests.merge.use_parts(options) as command:
            caller.check_command(command)
            return run(command, caller, extra)
    if isinstance(options, ReportOptions):
        return run(build_inspect_options(options), caller, extra)
    if isinstance(options, ClassOptions) and extra.model is None:
        options = name_classes(options)
    engine = _use_engine(options)
    if (shard := getattr(options, "shard", None)) is not None:
        requests.shard_options.check_options(cast("ShardedOptions", options), shard)
    name = COMMAND_NAMES[type(options)].replace("-", "_").replace(" ", "_")
    module = getattr(requests, name)
    if not hasattr(module, "prepare"):
        return cast(PlainCommandModule, module).run(options, caller)
    module = cast(CommandModule, module)
    request = module.prepare(options, caller, extra)
    with engine, _use_shard(options) as own_shard:
        outcome = module.run(options, request, caller, extra)
    return outcome if own_shard is None else requests.sharded_run.build_outcome(own_shard, outcome)


def _use_engine(options: Options) -> AbstractContextManager[None]:
    """Return a context in which the executor of `--executor` runs all tasks. Raises UsageError for a wrong executor."""
    executor = getattr(options, "executor", None)
    if executor is None:
        return nullcontext()
    workers.executors.check_executor(
        executor, jobs=getattr(options, "jobs", 0), device=getattr(options, "device", "cpu")
    )
    return workers.executors.use_executor(executor)


def _use_shard(options: Options) -> AbstractContextManager[Shard | None]:
    """Return a context in which only the tasks of the shard run, or all tasks without `--shard`."""
    text = getattr(options, "shard", None)
    return nullcontext() if text is None else requests.sharded_run.use_shard(cast("ShardedOptions", options), text)
