"""Tree of the modules and tensors of a state. Equal layers are joined, and only the rows of open modules are built."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable, Sequence

from statecli.core.grouping import group_by
from statecli.core.model_state import TensorInfo
from statecli.core.units import format_fqn, format_section
from statecli.report import fold

#: Identity of a node: its section, the prefix of its tensors' names, and the number of equal modules that it joins.
NodeKey = tuple[str, str, int]
#: Function that returns the relative change of tensors, None if unknown. Equal modules are joined if they changed
#: equally.
Measure = Callable[[Sequence[int]], "float | None"]

#: Equal modules, sorted by their changes, get a new row where the change grows at least by this ratio.
MIN_CHANGE_RATIO = 3.0


class OutlineNode:
    """Node of the tree: a module, several equal modules joined, or a tensor.

    Attributes:
        label: Text of the node: the part of the name below the parent.
        section: Section of the tensors.
        prefix: Start of the names of its tensors, with the last dot; of a tensor, its name.
        positions: Positions of the tensors below the node, in order.
        tensor: Position of the tensor; None for a module.
        members: The equal nodes, joined; () for any other node.
    """

    __slots__ = ("_children", "_measure", "label", "members", "positions", "prefix", "section", "tensor")

    def __init__(
        self,
        label: str,
        section: str,
        prefix: str,
        positions: Sequence[int],
        tensor: int | None = None,
        members: tuple[OutlineNode, ...] = (),
        measure: Measure | None = None,
    ) -> None:
        self.label, self.section, self.prefix, self.positions = label, section, prefix, positions
        self.tensor, self.members, self._measure = tensor, members, measure
        self._children: list[OutlineNode] | None = list(members) if members else [] if tensor is not None else None

    @property
    def key(self) -> NodeKey:
        """Key of the node, the same in each tree of a state."""
        return self.section, self.prefix, len(self.members)

    def list_children(self, tensors: Sequence[TensorInfo]) -> list[OutlineNode]:
        """Return the child nodes. Equal nodes whose labels differ only in a number are joined."""
        if self._children is None:
            self._children = _join_equal(_split_node(self, tensors, self._measure), tensors, self._measure)
        return self._children


def build_roots(
    tensors: Sequence[TensorInfo], positions: Iterable[int], measure: Measure | None = None
) -> list[OutlineNode]:
    """Return the nodes of the first level: the sections, or the modules if there is a single section."""
    by_section = group_by(positions, lambda position: tensors[position].section)
    sections = [
        OutlineNode(format_section(section), section, "", section_positions, measure=measure)
        for section, section_positions in by_section.items()
    ]
    return sections[0].list_children(tensors) if len(sections) == 1 else sections


def _split_node(node: OutlineNode, tensors: Sequence[TensorInfo], measure: Measure | None) -> list[OutlineNode]:
    """Return the child nodes of a module. A module that contains only one module shares a node with it: `h.0`."""
    start = len(node.prefix)
    modules: dict[str, list[int]] = {}
    order: list[OutlineNode | str] = []
    for position in node.positions:
        name = tensors[position].fqn
        part, dot, _ = name[start:].partition(".")
        if not dot:
            order.append(OutlineNode(format_fqn(part), node.section, name, (position,), tensor=position))
        elif part in modules:
            modules[part].append(position)
        else:
            modules[part] = [position]
            order.append(part)
    return [
        entry if isinstance(entry, OutlineNode) else _build(entry, modules[entry], node, tensors, measure)
        for entry in order
    ]


def _build(
    part: str, positions: list[int], parent: OutlineNode, tensors: Sequence[TensorInfo], measure: Measure | None
) -> OutlineNode:
    names = [tensors[position].fqn for position in positions]
    if len(names) == 1:
        label = names[0][len(parent.prefix) :]
        return OutlineNode(format_fqn(label), parent.section, names[0], positions, tensor=positions[0])
    # The names in between share the start, too.
    common = os.path.commonprefix([min(names), max(names)])  # noqa: RUF071 - characters of names, not of paths
    prefix = common[: common.rfind(".") + 1]
    if len(prefix) <= len(parent.prefix):  # a name that is also the start of another
        prefix = f"{parent.prefix}{part}."
    return OutlineNode(prefix[len(parent.prefix) : -1], parent.section, prefix, positions, measure=measure)


def _join_equal(nodes: list[OutlineNode], tensors: Sequence[TensorInfo], measure: Measure | None) -> list[OutlineNode]:
    alike: dict[object, list[OutlineNode]] = {}
    for number, node in enumerate(nodes):
        template, numbers = fold.split_numbers(node.label)
        key = (template, _make_content_key(node, tensors)) if len(numbers) == 1 else number
        alike.setdefault(key, []).append(node)
    groups = [part for group in alike.values() for part in _split_by_change(group, measure)]
    return _order_numbers([group[0] if len(group) == 1 else _join(group) for group in groups])


def _order_numbers(nodes: list[OutlineNode]) -> list[OutlineNode]:
    """Sort nodes whose names differ only in their numbers by these numbers. All other nodes stay at their positions."""
    numbers_by_template: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for index, node in enumerate(nodes):
        template, numbers = fold.split_numbers(node.members[0].label if node.members else node.label)
        if numbers:
            numbers_by_template.setdefault(template, []).append((numbers, index))
    ordered_nodes = list(nodes)
    for entries in numbers_by_template.values():
        for (_, index), (_, target) in zip(sorted(entries), entries, strict=True):
            ordered_nodes[target] = nodes[index]
    return ordered_nodes


def _split_by_change(nodes: list[OutlineNode], measure: Measure | None) -> list[list[OutlineNode]]:
    """Split equal nodes into groups that changed by similar amounts, in the order of their first nodes."""
    if measure is None or len(nodes) == 1:
        return [nodes]
    groups: list[list[OutlineNode]] = []
    before: float | None = None
    changes = [(measure(node.positions), number) for number, node in enumerate(nodes)]
    for change, number in sorted(changes, key=lambda item: (item[0] is not None, item[0] or 0.0, item[1])):
        # Equal values, infinities and unknown changes form groups of their own.
        if not groups or not (change == before or (before and change and change < before * MIN_CHANGE_RATIO)):
            groups.append([])
        groups[-1].append(nodes[number])
        before = change
    order = {id(node): number for number, node in enumerate(nodes)}
    groups = [sorted(group, key=lambda node: order[id(node)]) for group in groups]
    return sorted(groups, key=lambda group: order[id(group[0])])


def _make_content_key(node: OutlineNode, tensors: Sequence[TensorInfo]) -> object:
    """Return a key that is equal for nodes whose tensors have equal names, kinds, dtypes and shapes."""
    start = len(node.prefix)
    rows = (tensors[position] for position in node.positions)
    return node.tensor is None, tuple((row.fqn[start:], row.kind, row.dtype, row.shape) for row in rows)


def _join(nodes: list[OutlineNode]) -> OutlineNode:
    nodes = sorted(nodes, key=lambda node: fold.split_numbers(node.label)[1])
    numbers = [fold.split_numbers(node.label)[1][0] for node in nodes]
    label = fold.insert_numbers(nodes[0].label, [fold.format_numbers(numbers)])
    positions = [position for node in nodes for position in node.positions]
    return OutlineNode(label, nodes[0].section, nodes[0].prefix, positions, members=tuple(nodes))
