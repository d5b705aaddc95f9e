"""One share of a command's work: `--shard 3/8`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from statecli.core.errors import StateError, UnreadableError, UsageError
from statecli.core.version import __version__
from statecli.storage.file_version import CHANGED, FileVersion, find_changed, read_version
from statecli.values.require_numpy import require_numpy
from statecli.workers.shards.partition import MAX_SHARDS, Cut

if TYPE_CHECKING:
    from statecli.values.pool import Work
    from statecli.workers.shards.shard_file import Line
    from statecli.workers.shards.tasks import Key

#: What decides who does the work, and how its result is written: `merge` says so itself.
OF_MERGE = frozenset(
    [
        *("all", "tree", "lines", "name_only", "name_status", "output_format", "output", "report", "color", "quiet"),
        *("verbose", "no_progress", "debug", "jobs", "executor", "shard", "timeout"),
    ]
)
#: Those of an output, which a part is not, with what is asked for in the place of it.
_SHOWN = ("all", "tree", "lines", "name_only", "name_status", "output_format", "report", "verbose")


def parsed(text: str) -> tuple[int, int]:
    """Which share of how many. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count <= MAX_SHARDS:
        raise UsageError(f"--shard {text}: write I/N for the share I of N, from 1/N to N/N (N up to {MAX_SHARDS})")
    return index, count


def check(options: Any) -> None:
    """Raises UsageError for what is no share, and for what a part cannot be."""
    if options.shard is None:
        return
    parsed(options.shard)
    usual = {field.name: field.default for field in msgspec.structs.fields(type(options))}
    for name in (one for one in _SHOWN if one in usual and getattr(options, one) != usual[one]):
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option}: a part has one form; leave it out, and give it to statecli merge")
    for name, value in (("--to", "to"), ("--cuda", "cuda"), ("--write-baseline", "write_baseline")):
        if getattr(options, value, None):
            raise UsageError(f"{name} and --shard {options.shard} contradict each other; leave one of them out")
    if getattr(options, "device", "cpu") != "cpu":
        why = "contradict each other; leave one of them out"
        raise UsageError(f"--device {options.device} and --shard {options.shard} {why}")


def recorded(options: Any) -> dict[str, Any]:
    """The options that decide the result, as far as they are not what they are when nothing is said."""
    usual = {field.name: field.default for field in msgspec.structs.fields(type(options))}
    given = {name: getattr(options, name) for name in usual if name not in OF_MERGE}
    return {name: msgspec.to_builtins(value) for name, value in given.items() if value != usual[name]}


class Share:
    """A ledger (`pool.Ledger`) that has its own tasks done, and keeps what came of them."""

    whole = False

    def __init__(self, text: str, command: str, options: dict[str, Any]) -> None:
        self._shard = parsed(text)
        self._command, self._options = command, options
        self._cut = Cut(*self._shard)
        self._plan: list[str] = []
        self._stamps: dict[str, FileVersion | None] = {}
        self._lines: dict[Key, Line] = {}
        self._tasks: set[Key] = set()
        #: The tensors of the tasks that could not be done, each with what was said.
        self.failed: list[tuple[str, str]] = []

    def results(self, work: Work, do: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """As `pool.Ledger`. What fails is kept, and nothing here ends for it: the passes after it have tasks too."""
        from statecli.workers.shards import tasks

        keys, sizes = tasks.keys(work), [work.size_of(task) for task in work.tasks]
        mine = list(range(len(keys))) if work.derived else self._planned(work, keys, sizes)
        if work.done and len(mine) < len(keys):
            others = set(range(len(keys))).difference(mine)
            work.done([work.tasks[n] for n in sorted(others)])
        found = [work.absent] * len(keys)
        for n, result in zip(mine, do([work.tasks[n] for n in mine]), strict=True):
            # What is planned too is no less so where it is also derived.
            derived = work.derived and getattr(self._lines.get(keys[n]), "derived", True)
            self._keep(keys[n], work.tasks[n], sizes[n], result, derived=derived)
            found[n] = work.absent if isinstance(result, StateError) else result
        return found

    def _planned(self, work: Work, keys: Sequence[Key], sizes: Sequence[int]) -> list[int]:
        from statecli.workers.shards import tasks

        self._plan.append(tasks.plan(keys))
        self._tasks.update(keys)
        known = {path for task in work.tasks for path in tasks.paths(task)}.difference(self._stamps)
        self._stamps.update((path, read_version(path)) for path in known)
        return self._cut.own(sizes, work.together)

    def _keep(self, key: Key, task: Any, size: int, result: Any, *, derived: bool) -> None:
        from statecli.workers.shards import shard_file as part
        from statecli.workers.shards import tasks

        if tasks.is_failed(result):
            self.failed.append((tasks.name_of(task), str(getattr(result, "reason", result))))
        self._lines[key] = part.line(key, tasks.name_of(task), size, result, derived=derived)

    def part(self, broken: Iterable[str] = ()) -> Iterator[bytes]:
        """The file, once the command is done and has found this to be broken.

        Raises `UnreadableError` for a file that changed meanwhile: what came of it is of neither state.
        """
        from statecli.values import kernels
        from statecli.workers.shards import shard_file as part
        from statecli.workers.shards import tasks

        # What changes while it is sampled is told too.
        files = tasks.identities(self._stamps)
        lines = [f"{path}: {CHANGED}" for path in find_changed(self._stamps)]
        for line in (line for line in (*lines, *broken) if line.endswith(CHANGED)):
            raise UnreadableError(line)
        own = sum(not one.derived for one in self._lines.values())
        of = (__version__, kernels.made_of(), self._command, self._options, self._shard)
        head = part.Head(part.SCHEMA, *of, tuple(self._plan), len(self._tasks), own, files)
        return part.written(head, self._lines.values())


@contextmanager
def doing(options: Any, command: str) -> Iterator[Share | None]:
    """Around the work on the values; None where `--shard` was not given, and all of it is done."""
    if options.shard is None:
        yield None
        return
    with require_numpy():
        from statecli.values import pool
    share = Share(options.shard, command, recorded(options))
    with pool.kept(share):
        yield share
