"""Run one shard of a command's work: `--shard 3/8`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from statecli.core.error_causes import Failure
from statecli.core.errors import StateError, UnreadableError
from statecli.core.version import __version__
from statecli.shards import shard_file, tasks
from statecli.shards.partition import Partition, parse_shard
from statecli.storage.file_version import RESULT_NOT_VALID, FileVersion, find_changed, read_version
from statecli.values import kernels
from statecli.workers import pool
from statecli.workers.file_identity import identify_files

if TYPE_CHECKING:
    from statecli.shards.shard_file import TaskLine
    from statecli.shards.tasks import TaskKey
    from statecli.workers.pool import Work
    from statecli.workers.task import Task


class Shard:
    """Result store of one shard (see `pool.ResultStore`). It runs only the tasks of this shard.

    `failed`: tensors of failed tasks, each with its error.
    """

    is_complete = False

    def __init__(self, text: str, command: str, options: dict[str, Any]) -> None:
        self._shard = parse_shard(text)
        self._command, self._options = command, options
        self._partition = Partition(*self._shard)
        self._pass_digests: list[str] = []
        self._versions: dict[str, FileVersion | None] = {}
        self._lines: dict[TaskKey, TaskLine] = {}
        self._tasks: set[TaskKey] = set()
        self.failed: list[Failure] = []

    def results(self, work: Work, do: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """See `pool.ResultStore`. A failed task gets the result `absent`, so that all shards plan the same later tasks.

        The shard that derived a task also does it, because only this shard has the earlier results.
        """
        keys, sizes = tasks.compute_keys(work), [task.size for task in work.tasks]
        own_numbers = list(range(len(keys))) if work.derived else self._select_tasks(work, keys, sizes)
        if work.on_batch and len(own_numbers) < len(keys):
            others = set(range(len(keys))).difference(own_numbers)
            work.on_batch([work.tasks[n] for n in sorted(others)])
        results = [work.absent] * len(keys)
        for n, result in zip(own_numbers, do([work.tasks[n] for n in own_numbers]), strict=True):
            # A planned task does not become derived, even if a later pass derives it too.
            is_derived = work.derived and getattr(self._lines.get(keys[n]), "derived", True)
            self._record(keys[n], work.tasks[n], result, derived=is_derived)
            results[n] = work.absent if isinstance(result, StateError) else result
        return results

    def _select_tasks(self, work: Work, keys: Sequence[TaskKey], sizes: Sequence[int]) -> list[int]:
        self._pass_digests.append(tasks.compute_pass_digest(keys))
        self._tasks.update(keys)
        new_paths = {path for task in work.tasks for path in task.paths}.difference(self._versions)
        self._versions.update((path, read_version(path)) for path in new_paths)
        return self._partition.select_tasks(sizes, work.group_keys)

    def _record(self, key: TaskKey, task: Task, result: object, *, derived: bool) -> None:
        if tasks.has_failed(result):
            self.failed.append(Failure(task.name, str(getattr(result, "reason", result))))
        self._lines[key] = shard_file.build_line(key, task.name, task.size, result, derived=derived)

    def encode_file(self, changed_files: Sequence[str] = ()) -> Iterator[bytes]:
        """Return the bytes of the shard file. Call this only at the end of a command.

        `changed_files` are the files that changed while the command ran. Raises `UnreadableError` for a changed file,
        because its results belong to neither version.
        """
        # Before the check for changes, so that a file that changes while it is sampled is reported.
        files = identify_files(self._versions)
        for path in (*find_changed(self._versions), *changed_files):
            raise UnreadableError(f"{path}: {RESULT_NOT_VALID}")
        own_count = sum(not line.derived for line in self._lines.values())
        origin = (__version__, kernels.kernel_name(), self._command, self._options, self._shard)
        head = shard_file.Head(
            shard_file.SCHEMA, *origin, tuple(self._pass_digests), len(self._tasks), own_count, files
        )
        return shard_file.encode_file(head, self._lines.values())


@contextmanager
def use_shard(text: str, command: str, options: dict[str, Any]) -> Iterator[Shard]:
    """Do only the tasks of one shard while the block runs. `options` are the options that affect the result."""
    shard = Shard(text, command, options)
    with pool.use_result_store(shard):
        yield shard
