"""Count the values in a container, with a shared value counted once for each path that leads to it.

Forty levels of `[x, x]` are a few hundred bytes of pickle, but 2**40 values for a program that hashes them or writes
them into an error message. Each container is measured once, so the work is linear in the size of the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Key, Obj, SetOf, Value

CONTAINER_TYPES = frozenset([Obj, list, tuple, dict, SetOf])
#: Largest size that is counted.
MAX_SIZE = 2**62
#: Values of a container that cost one step.
_VALUES_PER_STEP = 16
#: Characters of a text that count as one value.
_CHARACTERS_PER_VALUE = 8


class Expansion(NamedTuple):
    """Number of values in a container and its nesting depth. A shared value counts once for each path to it."""

    size: int
    depth: int


class Expansions:
    """Cache of the expansions of a pickle's containers (see `Expansion`).

    `reads_contents`: whether the contents of an object count. `counts_texts`: whether long texts count as many values,
    and a container that contains itself counts as endless, because the number of paths through such containers grows
    with the factorial of their number.
    """

    def __init__(self, steps: Steps, reads_contents: Callable[[Obj], bool], *, counts_texts: bool = False) -> None:
        self._steps, self._reads_contents, self._counts_texts = steps, reads_contents, counts_texts
        self._measured: dict[int, Expansion] = {}
        #: Number of objects around each container that is being measured, by the id of the container.
        self._open_containers: dict[int, int] = {}

    def measure(self, root: Value) -> Expansion:
        """Return the expansion of a value. The result is cached by id, so keep the value alive. Raises OutOfSteps."""
        measured, open_containers = self._measured, self._open_containers
        waiting: list[tuple[Value, Sequence[Value] | None]] = [(root, None)]
        object_count = 0
        while waiting:
            value, parts = waiting.pop()
            key, is_object = id(value), type(value) is Obj
            if parts is None:
                if key in measured or key in open_containers:
                    continue
                parts = self._list_parts(value)
                self._steps.take(Budget.FLOW, len(parts) // _VALUES_PER_STEP)
                open_containers[key] = object_count
                object_count += is_object
                waiting.append((value, parts))
                waiting += [
                    (part, None) for part in parts if type(part) in CONTAINER_TYPES and id(part) not in measured
                ]
                continue
            measured[key] = self._add_up(parts, object_count)
            del open_containers[key]
            object_count -= is_object
        return measured[id(root)]

    def _add_up(self, parts: Sequence[Value], object_count: int) -> Expansion:
        size, depth = 1, 0
        for part in parts:
            if type(part) not in CONTAINER_TYPES:
                is_text = self._counts_texts and type(part) in (str, bytes)
                size += 1 + len(part) // _CHARACTERS_PER_VALUE if is_text else 1
            elif (expansion := self._measured.get(id(part))) is not None:
                size += expansion.size
                depth = max(depth, expansion.depth)
            else:
                contains_itself = type(part) is not Obj and self._open_containers[id(part)] == object_count
                size += MAX_SIZE if self._counts_texts and contains_itself else 1
        return Expansion(min(size, MAX_SIZE), depth + 1)

    def _list_parts(self, value: Value) -> Sequence[Value]:
        match value:
            case list() | tuple():
                return value
            case dict():
                return [*(key.value if type(key) is Key else key for key in value), *value.values()]
            case SetOf():
                return value.elems
            case Obj() if self._reads_contents(value):
                return (value.args, value.elems, value.items, value.kwargs, value.state)
        return ()
