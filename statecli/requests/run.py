"""Run a command: its options in, its outcome out.

The command line, the Python API, git's driver and the documents all run commands here. The steps around the work of
a command are the same for each: refuse empty values, check options, choose the engine or the shard. The module of a
command is imported when the command runs, because a start takes less time without the other modules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

from statecli.core.error_causes import group_by_cause
from statecli.core.errors import UsageError, option
from statecli.core.units import plural
from statecli.requests.class_targets import ClassOptions, name_classes
from statecli.requests.options import (
    AuditOptions,
    BisectOptions,
    ConfigOptions,
    DiffOptions,
    ExplainOptions,
    FixOptions,
    InspectOptions,
    LockOptions,
    LogOptions,
    MergeOptions,
    Options,
    ReportOptions,
    ResumeCheckOptions,
    RulesOptions,
    SchemaOptions,
    VerifyOptions,
)
from statecli.requests.outcome import MAX_FAILURE_LINES, Caller, ExtraInputs, Outcome
from statecli.requests.parameters import check_inputs, check_not_empty, check_standard_input


def run(options: Options, caller: Caller | None = None, extra: ExtraInputs | None = None) -> Outcome:
    """Run the command of the options.

    Raises StateError if the whole command failed; a failed part of the work is in `Outcome.failures`.
    """
    caller, extra = caller or Caller(), extra or ExtraInputs()
    check_not_empty(options)
    check_standard_input(options)
    check_inputs(options)
    if isinstance(options, MergeOptions):
        from statecli.requests.merge import use_parts

        with use_parts(options) as command:
            caller.check_command(command)
            return run(command, caller, extra)
    if isinstance(options, ReportOptions):
        from statecli.requests.report import build_inspect_options

        return run(build_inspect_options(options), caller, extra)
    if isinstance(options, (RulesOptions, ConfigOptions, SchemaOptions)):
        from statecli.requests import reference

        if isinstance(options, RulesOptions):
            return reference.run_rules(options)
        if isinstance(options, ConfigOptions):
            return reference.run_config(options, caller)
        return reference.run_schema(options)
    if isinstance(options, ClassOptions) and extra.model is None:
        options = name_classes(options)
    module = _import_module(options)
    module.check(options, extra)
    executor, shard = getattr(options, "executor", None), getattr(options, "shard", None)
    engine = _use_engine(executor, getattr(options, "jobs", 0))
    share = nullcontext() if shard is None else _use_shard(shard, options)
    divides = executor is not None or shard is not None
    if divides and hasattr(module, "reads_values") and not module.reads_values(options, extra):
        raise UsageError(f"{_describe_division(executor, shard)}: {module.VALUES_ARE_READ}")
    request = module.prepare(options, caller)
    with engine, share as mine:
        outcome: Outcome = module.run(options, request, caller, extra)
    return outcome if mine is None else _build_shard_outcome(mine, outcome)


def _import_module(options: Options) -> ModuleType:
    """Return the module with `check`, `prepare` and `run` of a command.

    If a command may read no values, its module has `reads_values` too.
    """
    return import_module(f"statecli.requests.{_COMMAND_OF[type(options)]}")


#: Commands with a module of the same name here; shard files have these names too.
_COMMAND_OF: dict[type, str] = {
    InspectOptions: "inspect",
    DiffOptions: "diff",
    VerifyOptions: "verify",
    FixOptions: "fix",
    AuditOptions: "audit",
    ExplainOptions: "explain",
    LockOptions: "lock",
    LogOptions: "log",
    BisectOptions: "bisect",
    ResumeCheckOptions: "resume_check",
}


def _use_engine(executor: Any, jobs: int) -> AbstractContextManager[None]:
    """Return a context with the engine of `--executor`. Raises UsageError before anything is read."""
    if executor is None:
        return nullcontext()
    from statecli.workers import executors

    executors.check_executor(executor, jobs=jobs)
    return executors.use_executor(executor)


def _use_shard(text: str, options: Any) -> AbstractContextManager[Any]:
    """Return a context with the work restricted to `--shard`."""
    from statecli.requests import shard_options
    from statecli.shards import shard

    shard_options.check_options(options, text)
    return shard.use_shard(text, _COMMAND_OF[type(options)], shard_options.select_options(options))


def _build_shard_outcome(shard: Any, outcome: Outcome) -> Outcome:
    """Return the outcome of one shard: its shard file, because only all shards together have a report."""
    from statecli.commands.diff.result import Diff

    changed_files = outcome.result.changed_files if isinstance(outcome.result, Diff) else ()
    causes = [message for message, _ in group_by_cause(dict.fromkeys(shard.failed))]
    failures = causes[:MAX_FAILURE_LINES]
    if len(causes) > MAX_FAILURE_LINES:
        failures.append(f"and {plural(len(causes) - MAX_FAILURE_LINES, 'more task')} that failed")
    return Outcome(outcome.result, content=shard.part(changed_files), failures=failures)


def _describe_division(executor: Any, shard: str | None) -> str:
    if executor is None:
        return option("--shard", shard)
    from statecli.workers import executors

    return option("--executor", executors.executor_name(executor))
