"""`--tree`: sums by module, equal siblings folded."""

from __future__ import annotations

from statecli.report import Column, Group, Line, documents, fold
from statecli.report.text import count_text, kind_text, plural, shape_text, size_text
from statecli.state import ModelState, TensorInfo

COLUMNS = (
    Column("module"),
    Column("kind"),
    Column("dtype"),
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
    found = []
    for section in dict.fromkeys(tensor.section for tensor in state.tensors):
        root = grown([tensor for tensor in state.tensors if tensor.section == section])
        summary = f"{plural(len(root.tensors), 'tensor')}, {size_text(_bytes(root.tensors))}"
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
        together = [tensor for name in names for tensor in node.children[name].tensors]
        name = fold.span([int(n) for n in names]) if len(names) > 1 else names[0]
        lines.append(_line("  " * depth + name, child, together, len(names)))
        lines.extend(_lines(child, depth + 1, unfold))
    return lines


def _siblings(node: Node, unfold: bool) -> list[tuple[list[str], Node]]:
    """Children in order, numbered ones of equal shape together."""
    found: dict[object, tuple[list[str], Node]] = {}
    for name, child in node.children.items():
        numbered = name.isdecimal() and name.isascii() and not unfold
        key = child.shape() if numbered else name
        found.setdefault((numbered, key), ([], child))[0].append(name)
    return list(found.values())


def _line(name: str, node: Node, together: list[TensorInfo], count: int) -> Line:
    total = documents.totals(together)
    elements = sum(one.elements for one in total.values())
    size = size_text(_bytes(together))
    tensor = node.tensor
    remark = f"×{count}" if count > 1 else ""
    if tensor is not None and not node.children:
        cells = (name, kind_text(tensor), tensor.dtype, shape_text(tensor.shape), count_text(elements), size)
        return Line(cells, remark)
    kinds = ", ".join(plural(one.tensors, kind) for kind, one in total.items() if one.tensors)
    return Line((name, "", "", "", count_text(elements), size), ", ".join(filter(None, (remark, kinds))), "strong")
