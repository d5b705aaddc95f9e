"""Run a command: its options in, its outcome out.

The command line, the Python API, git's driver and the documents all run commands here. What every command does around
its own work is written once: empty values are refused, options are checked, an engine does the work on the values, or
a shard of it is done. Own modules are imported when their command is run, because an inspection starts in less time
without those of the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

from statecli.commands.diff.result import Diff
from statecli.core.error_causes import group_by_cause
from statecli.core.errors import UsageError
from statecli.core.units import plural
from statecli.requests.options import (
    AuditOptions,
    ConfigOptions,
    DiffOptions,
    InspectOptions,
    LockOptions,
    MergeOptions,
    Options,
    RulesOptions,
    SchemaOptions,
    VerifyOptions,
    refuse_empty,
)
from statecli.requests.outcome import MAX_FAILURE_LINES, Caller, Given, Outcome


def run(options: Options, caller: Caller | None = None, given: Given | None = None) -> Outcome:
    """Run the command that these are the options of.

    Raises StateError for what cannot be done at all; what cannot be done in part is one of the outcome's failures.
    """
    caller, given = caller or Caller(), given or Given()
    refuse_empty(options)
    if isinstance(options, MergeOptions):
        from statecli.requests.merge import merging

        with merging(options) as command:
            caller.check_command(command)
            return run(command, caller, given)
    if isinstance(options, (RulesOptions, ConfigOptions, SchemaOptions)):
        from statecli.requests import reference

        if isinstance(options, RulesOptions):
            return reference.run_rules(options)
        return reference.run_config(options) if isinstance(options, ConfigOptions) else reference.run_schema(options)
    module = _module_of(options)
    module.check(options, given)
    executor, shard = getattr(options, "executor", None), getattr(options, "shard", None)
    engine = _engine(executor, getattr(options, "jobs", 0))
    share = nullcontext() if shard is None else _shard(options)
    if (executor is not None or shard is not None) and not module.reads_values(options, given):
        raise UsageError(f"{_describe_division(executor, shard)}: {module.VALUES_ARE_READ}")
    request = module.prepare(options, caller)
    with engine, share as mine:
        outcome: Outcome = module.run(options, request, caller, given)
    return outcome if mine is None else _outcome_of_shard(mine, outcome)


def _module_of(options: Options) -> ModuleType:
    """Return the module with `check`, `reads_values`, `prepare` and `run` of a command."""
    return import_module(f"statecli.requests.{_COMMAND_OF[type(options)]}")


#: The commands that have a module of their own, as shard files call them too.
_COMMAND_OF: dict[type, str] = {
    InspectOptions: "inspect",
    DiffOptions: "diff",
    VerifyOptions: "verify",
    AuditOptions: "audit",
    LockOptions: "lock",
}


def _engine(executor: Any, jobs: int) -> AbstractContextManager[None]:
    """Return the context in which `--executor` does the work. Raises UsageError before anything is read."""
    if executor is None:
        return nullcontext()
    from statecli.workers import executors

    executors.check_executor(executor, jobs=jobs)
    return executors.use_executor(executor)


def _shard(options: Any) -> AbstractContextManager[Any]:
    """Return the context in which only the shard of the work is done that `--shard` names."""
    from statecli.shards import shard

    shard.check_options(options)
    return shard.use_shard(options, _COMMAND_OF[type(options)])


def _outcome_of_shard(shard: Any, outcome: Outcome) -> Outcome:
    """Return the file of a shard, in place of the result that only all shards together have."""
    broken = [pair.message for pair in outcome.result.broken] if isinstance(outcome.result, Diff) else ()
    causes = [message for message, _ in group_by_cause(dict.fromkeys(shard.failed))]
    failures = causes[:MAX_FAILURE_LINES]
    if len(causes) > MAX_FAILURE_LINES:
        failures.append(f"and {plural(len(causes) - MAX_FAILURE_LINES, 'more task')} that could not be done")
    return Outcome(outcome.result, content=shard.part(broken), failures=failures)


def _describe_division(executor: Any, shard: str | None) -> str:
    if executor is None:
        return f"--shard {shard}"
    from statecli.workers import executors

    return f"--executor {executors.executor_name(executor)}"
