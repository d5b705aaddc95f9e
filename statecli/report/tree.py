"""`--tree`: sums by module, equal siblings folded."""

from __future__ import annotations

from statecli.report import Column, Group, Line, documents, fold
from statecli.report.text import count_text, kind_text, plural, shape_text, size_text
from statecli.state import ModelState, TensorInfo

COLUMNS = (
    Column("module"),
    Column("holds"),
    Column("shape"),
    Column("elements", right=True),
    Column("size", right=True),
)

#: Levels of the tree; a longer name stays whole below the last of them.
MAX_LEVELS = 32


class Node:
    """A module, or a tensor where `tensor` is set; `tensors` is all that lies below."""

    def __init__(self) -> None:
        self.children: dict[str, Node] = {}
        self.tensor: TensorInfo | None = None
        self.tensors: list[TensorInfo] = []

    def shape(self) -> tuple[object, ...]:
        """Equal for siblings that differ in nothing but their name."""
        own = (self.tensor.kind, self.tensor.dtype, self.tensor.shape) if self.tensor else None
        return (own, tuple((name, child.shape()) for name, child in self.children.items()))


def groups(state: ModelState, unfold: bool) -> tuple[Group, ...]:
    """One tree a section."""
    sections: dict[str, list[TensorInfo]] = {}
    for tensor in state.tensors:
        sections.setdefault(tensor.section, []).append(tensor)
    found = []
    for section, tensors in sections.items():
        root = grown(tensors)
        summary = f"{plural(len(tensors), 'tensor')}, {size_text(_bytes(tensors))}"
        found.append(Group(section or "(top level)", summary, tuple(_lines(root, 0, unfold))))
    return tuple(found)


def grown(tensors: list[TensorInfo]) -> Node:
    """The tree that the dots of the names make."""
    root = Node()
    for tensor in tensors:
        node = root
        node.tensors.append(tensor)
        for part in tensor.fqn.split(".", MAX_LEVELS):
            node = node.children.setdefault(part, Node())
            node.tensors.append(tensor)
        node.tensor = tensor
    return root


def _bytes(tensors: list[TensorInfo]) -> int:
    return sum(total.bytes for total in documents.totals(tensors).values())


def _lines(node: Node, depth: int, unfold: bool) -> list[Line]:
    lines: list[Line] = []
    for names, child in _siblings(node, unfold):
        same = [node.children[name] for name in names]
        name = "  " * depth + (fold.span([int(n) for n in names]) if len(names) > 1 else names[0])
        own = [one.tensor for one in same if one.tensor is not None]
        if own:
            lines.append(_tensor_line(name, own))
        if child.children:
            held = {id(tensor) for tensor in own}
            below = [tensor for one in same for tensor in one.tensors if id(tensor) not in held]
            lines.append(_module_line(name, below))
            lines.extend(_lines(child, depth + 1, unfold))
    return lines


def _siblings(node: Node, unfold: bool) -> list[tuple[list[str], Node]]:
    """Children in order, numbered ones of equal shape together."""
    numbered = {name for name in node.children if _is_number(name)}
    found: dict[object, tuple[list[str], Node]] = {}
    for name, child in node.children.items():
        together = not unfold and name in numbered and len(numbered) > 1
        key = (True, child.shape()) if together else (False, name)
        found.setdefault(key, ([], child))[0].append(name)
    return list(found.values())


def _is_number(name: str) -> bool:
    return name.isdecimal() and name.isascii() and (name == "0" or name[0] != "0")


def _tensor_line(name: str, together: list[TensorInfo]) -> Line:
    tensor = together[0]
    elements = sum(total.elements for total in documents.totals(together).values())
    holds = f"{kind_text(tensor)} {tensor.dtype}"
    return Line((name, holds, shape_text(tensor.shape), count_text(elements), size_text(_bytes(together))))


def _module_line(name: str, together: list[TensorInfo]) -> Line:
    total = documents.totals(together)
    elements = sum(one.elements for one in total.values())
    holds = ", ".join(_counted(one.tensors, kind) for kind, one in total.items() if one.tensors)
    return Line((name, holds, "", count_text(elements), size_text(_bytes(together))), mood="strong")


def _counted(count: int, kind: str) -> str:
    return plural(count, kind) if kind in ("parameter", "buffer") else f"{count:,} {kind}"
