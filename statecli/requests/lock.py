"""Run `statecli lock` with its options and return an outcome that contains the lock file."""

from __future__ import annotations

from statecli.commands.lock import lock_file, run as lock_run
from statecli.commands.lock.lock_file import Lock
from statecli.core.quoting import quote_for_shell
from statecli.core.units import plural
from statecli.requests.options import LockOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome
from statecli.requests.parameters import refuse_division
from statecli.targets.load import find_class_spec


def prepare(options: LockOptions, caller: Caller, extra: ExtraInputs) -> lock_run.Request:  # noqa: ARG001 - every command has the same signature
    """Build the request from the options, without reading a target.

    The lock names targets relative to its own folder. Shards name targets relative to the current folder, because all
    shards need the targets in the same order.
    """
    if all(map(find_class_spec, options.targets)):
        refuse_division(options, "the targets are model classes, whose values are not locked")
    path = options.output if options.shard is None and options.output != "-" else None
    return lock_run.Request(
        options.targets,
        options.digest,
        options.jobs,
        options.init_device,
        options.selection,
        path,
        options.tensors_only,
    )


def run(options: LockOptions, request: lock_run.Request, caller: Caller, extra: ExtraInputs) -> Outcome[Lock]:  # noqa: ARG001
    """Lock all targets. If one of them cannot be locked, nothing is written."""
    with caller.progress(values=False):
        targets = lock_run.read_targets(request)
    caller.check_states(*(target.state for target in targets))
    with caller.progress(values=True) as progress:
        lock = lock_run.build_lock(targets, request, progress)
    caller.check_files(list(lock_run.list_companion_files(targets, lock, request)))
    notes = list(lock_run.report_unlocked(targets, lock))
    count = plural(sum(len(target.tensors) for target in lock.targets), "tensor")
    words = " ".join(map(quote_for_shell, ["statecli", "audit", *options.targets, "--lock", str(options.output)]))
    return Outcome(lock, content=lock_file.encode_lock(lock), notes=notes, saved=f"{count} locked; check: {words}")
