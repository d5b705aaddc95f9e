"""Keys of tasks in a shard file, and the result type of each task function."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from statecli.core.errors import StateError
from statecli.core.model_state import Stats
from statecli.values.compare_task import Comparison
from statecli.values.element_checks import CheckResult
from statecli.values.summary import Facts
from statecli.workers.pool import Work

#: Functions for tasks of a shard: name -> type of a result other than an error. Workers run other functions only in a
#: merge, because their tasks follow from the results of all shards.
RESULT_TYPES: dict[str, Any] = {
    "run_batch": Comparison,
    "check_batch": None,
    "check_elements_batch": CheckResult,
    "fingerprint_batch": int | None,
    "facts_of_batch": Facts,
    "digest_batch": str,
    "stats_batch": Stats,
}
#: Functions whose tasks need not be planned for a shard: the first of several tied tensors has the task, and another
#: tensor may be the first if targets are in another order or were found under other names.
UNPLANNED_FUNCTIONS = frozenset(["check_batch", "digest_batch"])


class TaskKey(NamedTuple):
    """Key of a task: the name of its function, and a digest of its arguments."""

    function: str
    digest: str


def compute_keys(work: Work) -> list[TaskKey]:
    """Return the key of each task."""
    name = work.function.__name__
    prefix = hashlib.sha256(_encode((name, work.shared)))
    keys = []
    for task in work.tasks:
        digest = prefix.copy()
        digest.update(_encode(task.identity))
        keys.append(TaskKey(name, digest.hexdigest()[:32]))
    return keys


def _encode(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):  # an integer of 65 bits, or a lone surrogate
        return repr(value).encode("ascii", "backslashreplace")


def compute_pass_digest(keys: Sequence[TaskKey]) -> str:
    """Return a digest of all tasks of one pass over the values."""
    return hashlib.sha256("\n".join(f"{key.function} {key.digest}" for key in keys).encode()).hexdigest()[:32]


def has_failed(result: object) -> bool:
    """Return whether a task failed."""
    return isinstance(result, StateError) or (isinstance(result, Facts) and result.damaged)
