"""`--tree`: sums by module, equal siblings folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from statecli.core import sizes
from statecli.core.state import ModelState, TensorInfo
from statecli.core.units import format_count, format_fqn, format_kind, format_shape, format_size, plural
from statecli.report import Column, Group, Line, fold

COLUMNS = (
    Column("module"),
    Column("holds"),
    Column("shape"),
    Column("elements", right=True),
    Column("size", right=True),
)

#: Levels of the tree; a longer name stays whole below the last of them.
MAX_LEVELS = 32


class Named(Protocol):
    """What has a place in the tree: a tensor, or a change of one."""

    @property
    def fqn(self) -> str: ...


T = TypeVar("T", bound=Named)
#: What must be equal for two of them to be shown as one line.
Alike = Callable[[T], object]


class Node(Generic[T]):
    """A module, or a tensor where `own` is set; `held` is all that lies below, its own too."""

    def __init__(self) -> None:
        self.children: dict[str, Node[T]] = {}
        self.own: T | None = None
        self.held: list[T] = []

    def shape(self, alike: Alike[T]) -> tuple[object, ...]:
        """Equal for siblings that differ in nothing but their name."""
        own = alike(self.own) if self.own is not None else None
        return (own, tuple((name, child.shape(alike)) for name, child in self.children.items()))

    def below(self) -> list[T]:
        """What it holds in its children."""
        return [one for one in self.held if one is not self.own]


def groups(state: ModelState, unfold: bool) -> tuple[Group, ...]:
    """One tree a section."""
    sections: dict[str, list[TensorInfo]] = {}
    for tensor in state.tensors:
        sections.setdefault(tensor.section, []).append(tensor)
    found = []
    for section, tensors in sections.items():
        root = grown(tensors)
        summary = f"{plural(len(tensors), 'tensor')}, {format_size(_bytes(tensors))}"
        found.append(Group(section or "(top level)", summary, tuple(_lines(root, 0, unfold))))
    return tuple(found)


def grown(named: Iterable[T]) -> Node[T]:
    """The tree that the dots of the names make."""
    root: Node[T] = Node()
    for one in named:
        node = root
        node.held.append(one)
        for part in one.fqn.split(".", MAX_LEVELS):
            node = node.children.setdefault(part, Node())
            node.held.append(one)
        node.own = one
    return root


def _bytes(tensors: list[TensorInfo]) -> int:
    return sizes.sum_bytes(tensors)


def _alike(tensor: TensorInfo) -> object:
    return (tensor.kind, tensor.dtype, tensor.shape)


def _lines(node: Node[TensorInfo], depth: int, unfold: bool) -> list[Line]:
    lines: list[Line] = []
    for name, together in siblings(node, _alike, unfold):
        same = [node.children[one] for one in together]
        own = [one.own for one in same if one.own is not None]
        if own:
            lines.append(_tensor_line("  " * depth + name, own))
        if same[0].children:
            lines.append(_module_line("  " * depth + name, [tensor for one in same for tensor in one.below()]))
            lines.extend(_lines(same[0], depth + 1, unfold))
    return lines


def siblings(node: Node[T], alike: Alike[T], unfold: bool) -> list[tuple[str, list[str]]]:
    """The children's names in order, those of equal shape whose names differ in one number together: `{0..11}`."""
    found: dict[object, list[str]] = {}
    for name, child in node.children.items():
        template, numbers = fold.template(name)
        together = not unfold and len(numbers) == 1
        found.setdefault((template, child.shape(alike)) if together else name, []).append(name)
    return [(_joined(names), names) for names in found.values()]


def _joined(names: list[str]) -> str:
    if len(names) == 1:
        return format_fqn(names[0])
    return fold.numbered(names[0], [fold.span(sorted(fold.template(name)[1][0] for name in names))])


def _tensor_line(name: str, together: list[TensorInfo]) -> Line:
    tensor = together[0]
    elements = sum(total.elements for total in sizes.sum_by_kind(together).values())
    holds = f"{format_kind(tensor)} {tensor.dtype}"
    return Line((name, holds, format_shape(tensor.shape), format_count(elements), format_size(_bytes(together))))


def _module_line(name: str, together: list[TensorInfo]) -> Line:
    total = sizes.sum_by_kind(together)
    elements = sum(one.elements for one in total.values())
    holds = ", ".join(_counted(one.tensors, kind) for kind, one in total.items() if one.tensors)
    return Line((name, holds, "", format_count(elements), format_size(_bytes(together))), mood="strong")


def _counted(count: int, kind: str) -> str:
    return plural(count, kind) if kind in ("parameter", "buffer") else f"{count:,} {kind}"
