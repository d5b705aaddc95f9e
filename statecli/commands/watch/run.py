"""Run `statecli watch`: look at the folders again and again, and yield a row for each finished checkpoint.

A checkpoint is finished if its files do not change between two looks, and can be read. A checkpoint that stays
unreadable for `PATIENCE_S` gets a row with its error, and is read again when its files change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from statecli.commands.log.cache import Cache
from statecli.commands.log.checkpoints import Checkpoint, read_state, shorten_paths
from statecli.commands.log.follow import Follower
from statecli.commands.log.result import CheckpointRow
from statecli.commands.log.steps import choose_steps, find_step_in_name, find_steps
from statecli.core.errors import StateError
from statecli.core.natural_order import make_natural_key
from statecli.storage import files
from statecli.storage.file_version import read_version
from statecli.storage.store import FileVersion
from statecli.targets.expand import expand_targets
from statecli.targets.target_result import TargetResult

#: Seconds for which statecli assumes that an unreadable checkpoint is still being written.
PATIENCE_S = 60.0

#: Path and version of each file of a checkpoint.
Versions = tuple[tuple[str, FileVersion | None], ...]


class Request(msgspec.Struct, frozen=True):
    """The options of `watch`.

    Attributes:
        targets: Folders of runs, and globs. They may be empty at first.
        interval: Seconds between two looks.
        count: Number of rows after which the command ends; None for no end.
        history: Begin with the first checkpoint of the run, not with the last.
    """

    targets: tuple[str, ...]
    interval: float = 5.0
    count: int | None = None
    history: bool = False
    cache: bool = True


class _Candidate(msgspec.Struct):
    """A path that may be a checkpoint, with the versions of its files and the time when their last change was seen."""

    versions: Versions
    since: float
    is_done: bool = False
    is_reported: bool = False


def watch_run(
    request: Request, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> Iterator[CheckpointRow]:
    """Yield a row for each finished checkpoint, for ever or `request.count` times."""
    follower = Follower(Cache(enabled=request.cache), keeps_modules=False)
    candidates: dict[str, _Candidate] = {}
    row_count = 0
    # If the folders are empty at first, each checkpoint is new.
    is_first_look, is_history = True, True
    last: CheckpointRow | None = None
    while True:
        finished = _order(_look(request.targets, candidates, clock()), request.targets)
        if is_first_look:
            is_first_look, is_history = False, request.history or not candidates
        elif finished and not is_history:
            is_history = True
            finished = _skip_earlier(finished, candidates, request.targets)
        for path in finished:
            row = _measure(path, follower, request.targets)
            candidate = candidates[path]
            if row.error is not None:
                if candidate.is_reported or clock() - candidate.since < PATIENCE_S:
                    continue
                candidate.is_reported = True
            else:
                candidate.is_done = True
                if last is not None and last.path == row.path and row.is_copy:
                    continue  # files next to the weights were added to the folder
                last = row
            yield row
            row_count += 1
            if request.count is not None and row_count >= request.count:
                return
        sleep(request.interval)


def _skip_earlier(finished: Sequence[str], candidates: dict[str, _Candidate], targets: Sequence[str]) -> list[str]:
    """Return the last finished checkpoint, if possible one with a step in its name. Mark all others as done."""
    stepped = [path for path in finished if _find_number(path, targets) is not None]
    last_path = (stepped or finished)[-1]
    for path in finished:
        candidates[path].is_done = path != last_path
    return [last_path]


def _look(targets: Sequence[str], candidates: dict[str, _Candidate], now: float) -> list[str]:
    """Look at the folders once. Return paths that are not done and whose files did not change since the last look."""
    present: set[str] = set()
    finished: list[str] = []
    for target in expand_targets(targets, allow_empty=True):
        if isinstance(target, TargetResult) or not files.exists(target):
            continue
        present.add(target)
        versions = _read_versions(target)
        candidate = candidates.get(target)
        if candidate is None or candidate.versions != versions:
            candidates[target] = _Candidate(versions, now)
        elif not candidate.is_done:
            finished.append(target)
    for path in candidates.keys() - present:
        del candidates[path]
    return finished


def _read_versions(path: str) -> Versions:
    if not os.path.isdir(path):
        return ((path, read_version(path)),)
    names = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return tuple(sorted((name, read_version(name)) for name in names))


def _order(paths: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Sort the paths by the numbers in their names."""

    def make_key(path: str) -> tuple[int, str]:
        number = _find_number(path, targets)
        return -1 if number is None else number, make_natural_key(path)

    return sorted(paths, key=make_key)


def _find_number(path: str, targets: Sequence[str]) -> int | None:
    """Return the step that the path names below the folder that the user typed, or None without a step."""
    folder = next((target.rstrip("/") for target in targets if path.startswith(f"{target.rstrip('/')}/")), "")
    return find_step_in_name(path[len(folder) + 1 :] if folder else shorten_paths([path])[0])


def _measure(path: str, follower: Follower, targets: Sequence[str]) -> CheckpointRow:
    by_name = [_find_number(path, targets)]
    try:
        steps = find_steps(read_state(path))
    except StateError as error:
        return CheckpointRow(path, choose_steps(by_name, [None])[0], error=str(error))
    return follower.add(Checkpoint(path, choose_steps(by_name, [steps])[0]))
