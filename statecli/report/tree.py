"""Rows of `--tree`: sums for each module. Equal sibling modules share a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from statecli.core import sizes
from statecli.core.grouping import group_by
from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.units import format_count, format_fqn, format_kind, format_section, format_shape, format_size, plural
from statecli.report import Group, Line, ReportColumn, fold

COLUMNS = (
    ReportColumn("module"),
    ReportColumn("holds"),
    ReportColumn("shape"),
    ReportColumn("elements", right=True),
    ReportColumn("size", right=True),
)

#: Largest number of levels of the tree; the rest of a longer name is an item of the last level.
MAX_LEVELS = 32


class Named(Protocol):
    """A named item of the tree: a tensor, or a change of a tensor."""

    @property
    def fqn(self) -> str: ...


T = TypeVar("T", bound=Named)
#: Function that returns the same key for items that may share a line.
FoldKey = Callable[[T], object]


class TreeNode(Generic[T]):
    """Node of the tree: a module, or a tensor if `own_item` is set. `items` are `own_item` and all items below."""

    def __init__(self) -> None:
        self.children: dict[str, TreeNode[T]] = {}
        self.own_item: T | None = None
        self.items: list[T] = []

    def make_shape_key(self, fold_key: FoldKey[T]) -> tuple[object, ...]:
        """Return a key that is equal for siblings with equal content."""
        own_key = fold_key(self.own_item) if self.own_item is not None else None
        return (own_key, tuple((name, child.make_shape_key(fold_key)) for name, child in self.children.items()))

    def list_descendants(self) -> list[T]:
        """Return the items below this node."""
        return [item for item in self.items if item is not self.own_item]


def build_tree_groups(state: ModelState, unfold: bool, noun: str) -> tuple[Group, ...]:
    """Return the tree of each section as a group. `noun` is the word for a counted item: `row` or `tensor`."""
    groups = []
    for section, tensors in group_by(state.tensors, lambda tensor: tensor.section).items():
        root = build_tree(tensors)
        summary = f"{plural(len(tensors), noun)}, {format_size(sizes.sum_bytes(tensors))}"
        groups.append(Group(format_section(section), summary, tuple(_build_lines(root, 0, unfold))))
    return tuple(groups)


def build_tree(items: Iterable[T]) -> TreeNode[T]:
    """Build a tree from the names of the items. Each name is split at its dots."""
    root: TreeNode[T] = TreeNode()
    for item in items:
        node = root
        node.items.append(item)
        for part in item.fqn.split(".", MAX_LEVELS):
            node = node.children.setdefault(part, TreeNode())
            node.items.append(item)
        node.own_item = item
    return root


def _make_fold_key(tensor: TensorInfo) -> object:
    return (tensor.kind, tensor.dtype, tensor.shape)


def _build_lines(node: TreeNode[TensorInfo], depth: int, unfold: bool) -> list[Line]:
    lines: list[Line] = []
    for name, names in group_siblings(node, _make_fold_key, unfold):
        children = [node.children[child_name] for child_name in names]
        own_items = [child.own_item for child in children if child.own_item is not None]
        if own_items:
            lines.append(_build_tensor_line("  " * depth + name, own_items))
        if children[0].children:
            descendants = [tensor for child in children for tensor in child.list_descendants()]
            lines.append(_build_module_line("  " * depth + name, descendants))
            lines.extend(_build_lines(children[0], depth + 1, unfold))
    return lines


def group_siblings(node: TreeNode[T], fold_key: FoldKey[T], unfold: bool) -> list[tuple[str, list[str]]]:
    """Return the names of the children in order. Siblings with equal content share an entry, such as `{0..11}`."""
    names_by_shape: dict[object, list[str]] = {}
    for name, child in node.children.items():
        template, numbers = fold.split_numbers(name)
        can_fold = not unfold and len(numbers) == 1
        names_by_shape.setdefault((template, child.make_shape_key(fold_key)) if can_fold else name, []).append(name)
    return [(_join_names(names), names) for names in names_by_shape.values()]


def _join_names(names: list[str]) -> str:
    if len(names) == 1:
        return format_fqn(names[0])
    numbers = sorted(fold.split_numbers(name)[1][0] for name in names)
    return fold.insert_numbers(names[0], [fold.format_numbers(numbers)])


def _build_tensor_line(name: str, tensors: list[TensorInfo]) -> Line:
    tensor = tensors[0]
    elements = sum(total.elements for total in sizes.sum_by_kind(tensors).values())
    content_text = f"{format_kind(tensor)} {tensor.dtype}"
    return Line(
        (name, content_text, format_shape(tensor.shape), format_count(elements), format_size(sizes.sum_bytes(tensors)))
    )


def _build_module_line(name: str, tensors: list[TensorInfo]) -> Line:
    totals = sizes.sum_by_kind(tensors)
    elements = sum(total.elements for total in totals.values())
    content_text = ", ".join(format_kind_count(total.tensors, kind) for kind, total in totals.items() if total.tensors)
    return Line((name, content_text, "", format_count(elements), format_size(sizes.sum_bytes(tensors))), mood="strong")


def format_kind_count(count: int, kind: str) -> str:
    """Return `3 parameters`, or `3 unregistered` for a kind that is an adjective."""
    return plural(count, kind) if kind in ("parameter", "buffer") else f"{count:,} {kind}"
