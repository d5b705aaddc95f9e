"""Pair the names of a checkpoint with the names of a model by shape, by their words and by their order.

Both lists of names are trees of modules. The trees are compared from the root: children with the same name are paired,
then children with the same shapes inside. `certainty.py` decides which pairs are certain and which are guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec

from statecli.commands.explain.name_words import count_shared_words, measure_similarity
from statecli.core.lazy_pattern import compile_on_use

Shape = tuple[int, ...] | None

#: Largest number of components of a name that are compared one by one; the rest counts as one component.
MAX_COMPONENTS = 48
#: Largest number of children of a module that are compared with each other.
MAX_CANDIDATES = 200
#: Largest number of comparisons between the numbered children of two modules.
MAX_COMPARISONS = 1 << 20


class Alignment(msgspec.Struct, frozen=True):
    """Result of pairing names: the model's name for each name in the checkpoint, and the unpaired names."""

    names: dict[str, str]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]


class _Node:
    """Node in a tree of tensor names: a module with children, or a tensor with a `shape`."""

    __slots__ = ("children", "count", "name", "position", "shape", "signature", "tail")

    def __init__(self, name: str, position: int) -> None:
        self.name, self.position = name, position
        self.children: dict[str, _Node] = {}
        self.shape: Shape | str = ""
        self.signature, self.count = 0, 0
        self.tail: frozenset[tuple[str, Shape | str]] | None = None

    @property
    def is_tensor(self) -> bool:
        return not self.children

    def list_tensors(self) -> list[_Node]:
        """Return the tensors below this node, in order."""
        stack, tensors = [self], []
        while stack:
            node = stack.pop()
            if node.is_tensor:
                tensors.append(node)
            stack.extend(reversed(node.children.values()))
        return tensors


def align_names(checkpoint: Mapping[str, Shape], model: Mapping[str, Shape], *, has_order: bool) -> Alignment:
    """Pair the names of a checkpoint with those of a model. Equal names are paired even if their shapes differ.

    Args:
        checkpoint: Shape of each name in the checkpoint, in the order of saving if `has_order`.
        model: Shape of each name that the model registers, in its order.
        has_order: Whether the order may decide between equal candidates.
    """
    aligner = _Aligner(has_order=has_order)
    if checkpoint and model:
        aligner.align(_build_tree(checkpoint), _build_tree(model))
    names, filled = aligner.names, set(aligner.names.values())
    return Alignment(
        {name: names[name] for name in checkpoint if name in names},
        tuple(name for name in checkpoint if name not in names),
        tuple(name for name in model if name not in filled),
    )


def _build_tree(names: Mapping[str, Shape]) -> _Node:
    root = _Node("", 0)
    for position, (name, shape) in enumerate(names.items()):
        node = root
        path = [root]
        for component in name.split(".", MAX_COMPONENTS - 1):
            child = node.children.get(component)
            if child is None:
                child_name = f"{node.name}.{component}" if node is not root else component
                child = node.children[component] = _Node(child_name, position)
            node = child
            path.append(node)
        node.shape = shape
        mixed = hash((shape, "tensor")) & ((1 << 61) - 1)
        for above in path:
            above.count += 1
            above.signature = (above.signature + mixed) & ((1 << 61) - 1)
    return root


class _Aligner:
    """Search for pairs of matching tensors in two trees of names, a checkpoint's and a model's."""

    def __init__(self, *, has_order: bool) -> None:
        self.has_order = has_order
        self.names: dict[str, str] = {}

    def align(self, checkpoint: _Node, model: _Node) -> None:
        """Pair the tensors inside two matching modules."""
        stack = [(checkpoint, model)]
        while stack:
            stored, registered = stack.pop()
            stored, registered = _skip_levels(stored, registered)
            if _list_tails(stored) == _list_tails(registered):
                self._add_equal(stored, registered)
                continue
            if stored.is_tensor or registered.is_tensor:
                stack.extend(self._pair_tensors([stored], [registered]))
            else:
                stack.extend(self._pair_children(stored, registered))

    def _add_equal(self, stored: _Node, registered: _Node) -> None:
        """Pair tensors by name in two modules that contain the same names and shapes."""
        stack = [(stored, registered)]
        while stack:
            first, second = stack.pop()
            if first.is_tensor:
                self.names[first.name] = second.name
            stack.extend((child, second.children[token]) for token, child in first.children.items())

    def _pair_children(self, stored: _Node, registered: _Node) -> Iterator[tuple[_Node, _Node]]:
        left, right = dict(stored.children), dict(registered.children)
        for token, other in _pair_families(left, right):
            yield left.pop(token), right.pop(other)
        for token in [token for token in left if token in right]:
            yield left.pop(token), right.pop(token)
        if left and right:
            for first, second in self._choose(list(left.values()), list(right.values())):
                left = {token: node for token, node in left.items() if node is not first}
                right = {token: node for token, node in right.items() if node is not second}
                yield first, second
        if left and right:
            yield from self._pair_tensors(left.values(), right.values())

    # --- children without an equal name -----------------------------------------------------------------------------

    def _choose(self, stored: list[_Node], registered: list[_Node]) -> list[tuple[_Node, _Node]]:
        """Pair modules whose tensors have equal shapes, then modules that share at least half of their shapes."""
        groups: dict[tuple[int, int], tuple[list[_Node], list[_Node]]] = {}
        for side, nodes in enumerate((stored, registered)):
            for node in nodes:
                groups.setdefault(_make_key(node), ([], []))[side].append(node)
        node_pairs = [
            pair for left, right in groups.values() if left and right for pair in self._choose_among(left, right)
        ]
        paired_ids = {id(node) for first, second in node_pairs for node in (first, second)}
        unpaired_nodes = [[node for node in nodes if id(node) not in paired_ids] for nodes in (stored, registered)]
        return node_pairs + _choose_similar(*unpaired_nodes)

    def _choose_among(self, stored: list[_Node], registered: list[_Node]) -> Iterator[tuple[_Node, _Node]]:
        """Pair modules with equal tensor shapes by name: first by shared words, then by spelling, then by order."""
        stored, registered = stored[:MAX_CANDIDATES], registered[:MAX_CANDIDATES]
        evidence = {
            (id(first), id(second)): _measure_evidence(first, second) for first, second in product(stored, registered)
        }
        while stored and registered:
            best = _find_mutual_best(stored, registered, evidence)
            if best is None:
                break
            first, second = best
            yield first, second
            stored, registered = [n for n in stored if n is not first], [n for n in registered if n is not second]
        yield from self._choose_by_likeness(stored, registered, evidence)

    def _choose_by_likeness(
        self, stored: list[_Node], registered: list[_Node], evidence: Mapping[tuple[int, int], tuple[int, int]]
    ) -> Iterator[tuple[_Node, _Node]]:
        keeps_count = len(stored) == len(registered)
        rank = {id(node): n for nodes in (stored, registered) for n, node in enumerate(_sort(nodes, self.has_order))}
        scored = sorted(
            product(stored, registered),
            key=lambda pair: (
                *(-number for number in evidence[id(pair[0]), id(pair[1])]),
                -round(measure_similarity(_get_last_part(pair[0]), _get_last_part(pair[1])), 1)
                if not keeps_count
                else 0,
                abs(rank[id(pair[0])] - rank[id(pair[1])]) if self.has_order else 0,
                -measure_similarity(_get_last_part(pair[0]), _get_last_part(pair[1])),
                rank[id(pair[0])],
                rank[id(pair[1])],
            ),
        )
        paired_ids: set[int] = set()
        for first, second in scored:
            if id(first) not in paired_ids and id(second) not in paired_ids:
                paired_ids |= {id(first), id(second)}
                yield first, second

    # --- tensors of modules that have no partner --------------------------------------------------------------------

    def _pair_tensors(self, stored: Iterable[_Node], registered: Iterable[_Node]) -> Iterator[tuple[_Node, _Node]]:
        """Pair single tensors of modules that do not match, by shape and by the words in the tensors' full names."""
        groups: dict[Shape | str, tuple[list[_Node], list[_Node]]] = {}
        for side, nodes in enumerate((stored, registered)):
            for node in nodes:
                for tensor in node.list_tensors():
                    groups.setdefault(tensor.shape, ([], []))[side].append(tensor)
        for left, right in groups.values():
            if left and right:
                yield from self._choose_among(left, right)


def _get_last_part(node: _Node) -> str:
    return node.name.rpartition(".")[2]


def _sort(nodes: Sequence[_Node], has_order: bool) -> list[_Node]:
    return sorted(nodes, key=lambda node: (node.position if has_order else 0, node.name))


# --- evidence --------------------------------------------------------------------------------------------------------


def _measure_evidence(first: _Node, second: _Node) -> tuple[int, int]:
    """Return how many words two names share, and how many tensors inside both modules have equal names and shapes.

    An equal last component of two tensors counts as two words.
    """
    if first.is_tensor and second.is_tensor:
        return count_shared_words(first.name, second.name) + 2 * (_get_last_part(first) == _get_last_part(second)), 0
    return count_shared_words(_get_last_part(first), _get_last_part(second)), _count_inner_names(first, second)


def _count_inner_names(first: _Node, second: _Node) -> int:
    return len(_list_tails(first) & _list_tails(second))


def _list_tails(node: _Node) -> frozenset[tuple[str, Shape | str]]:
    """Return the names inside a module, relative to the module, with their shapes."""
    if node.tail is None:
        tails = []
        stack = [(child, token) for token, child in node.children.items()]
        while stack:
            current, path = stack.pop()
            if current.is_tensor:
                tails.append((path, current.shape))
            stack.extend((child, f"{path}.{token}") for token, child in current.children.items())
        node.tail = frozenset(tails)
    return node.tail


def _find_mutual_best(
    stored: Sequence[_Node], registered: Sequence[_Node], evidence: Mapping[tuple[int, int], tuple[int, int]]
) -> tuple[_Node, _Node] | None:
    """Return two nodes that match each other better than any other node. Return None if no such pair exists."""
    for first in stored:
        ranked_nodes = sorted(registered, key=lambda node: evidence[id(first), id(node)], reverse=True)
        second = ranked_nodes[0]
        score = evidence[id(first), id(second)]
        if len(ranked_nodes) > 1 and evidence[id(first), id(ranked_nodes[1])] == score:
            continue
        if any(evidence[id(node), id(second)] >= score for node in stored if node is not first):
            continue
        return first, second
    return None


def _choose_similar(stored: list[_Node], registered: list[_Node]) -> list[tuple[_Node, _Node]]:
    """Pair modules that share at least half of their tensor shapes. The most similar modules are paired first."""
    node_pairs: list[tuple[_Node, _Node]] = []
    scores = []
    for first, second in product(stored[:MAX_CANDIDATES], registered[:MAX_CANDIDATES]):
        if first.is_tensor or second.is_tensor:
            continue
        if shared := _count_common_shapes(first, second):
            scores.append((shared + _count_inner_names(first, second), first, second))
    scores.sort(key=lambda score: -score[0])
    for _, first, second in scores:
        if not any(first is pair[0] or second is pair[1] for pair in node_pairs):
            node_pairs.append((first, second))
    return node_pairs


def _count_shapes(node: _Node) -> Counter[Shape | str]:
    return Counter(tensor.shape for tensor in node.list_tensors())


# --- levels ----------------------------------------------------------------------------------------------------------


def _skip_levels(stored: _Node, registered: _Node) -> tuple[_Node, _Node]:
    """Skip outer levels that only one of the two trees has. Return the two modules that match best."""
    for _ in range(MAX_COMPONENTS):
        first, second = _descend(stored, registered)
        current_score = _count_inner_names(first, second)
        lifted = [(node, second) for node in _lift_largest(first)] + [(first, node) for node in _lift_largest(second)]
        better = [pair for pair in lifted if _count_inner_names(*pair) > current_score]
        if not better:
            return first, second
        stored, registered = max(better, key=lambda option: _count_inner_names(*option))
    return stored, registered


def _descend(stored: _Node, registered: _Node) -> tuple[_Node, _Node]:
    """Skip single-child levels below each module, and return the two modules that match best."""
    chains = [_list_only_children(node) for node in (stored, registered)]
    if len(chains[0]) == len(chains[1]) == 1:
        return stored, registered
    options = [(first, second) for first in enumerate(chains[0]) for second in enumerate(chains[1])]
    best = max(options, key=lambda option: (*_fit(option[0][1], option[1][1]), -option[0][0] - option[1][0]))
    return best[0][1], best[1][1]


def _lift_largest(node: _Node) -> Iterator[_Node]:
    """Yield copies of the module in which the children of its largest child replace this child.

    If the largest child has a single child, that child's children are tried too. A copy is skipped if two names clash.
    """
    if len(node.children) < 2:
        return
    token, largest = max(node.children.items(), key=lambda item: (item[1].count, "ema" not in item[0]))
    others = {name: child for name, child in node.children.items() if name != token}
    if 2 * largest.count < node.count:
        return
    for level in _list_only_children(largest):
        if level.is_tensor or others.keys() & level.children.keys():
            continue
        lifted = _Node(node.name, node.position)
        lifted.children = {**level.children, **others}
        lifted.count, lifted.signature = node.count, node.signature
        yield lifted


def _list_only_children(node: _Node) -> list[_Node]:
    """Return the module, its child if it has a single child, the child of that child, and so on."""
    chain = [node]
    while len(chain[-1].children) == 1:
        chain.extend(chain[-1].children.values())
    return chain


def _fit(stored: _Node, registered: _Node) -> tuple[int, int, int]:
    """Return how well two modules match, as counts of equal inner names, equal shapes and equal child names."""
    if stored.is_tensor or registered.is_tensor:
        return (0, 0, int(stored.is_tensor is registered.is_tensor))
    signatures = Counter(map(_make_key, stored.children.values()))
    others = Counter(map(_make_key, registered.children.values()))
    shared = sum(key[0] * count for key, count in (signatures & others).items())
    return _count_inner_names(stored, registered), shared, len(stored.children.keys() & registered.children.keys())


# --- numbered children -----------------------------------------------------------------------------------------------

_NUMBERED = compile_on_use(r"(.*?)(\d{1,9})")


def _pair_families(left: Mapping[str, _Node], right: Mapping[str, _Node]) -> list[tuple[str, str]]:
    """Pair numbered children such as `layer1` in order, if the two sides number these children differently.

    Children with the same numbers on both sides are left to the pairing by name.
    """
    pairs: list[tuple[str, str]] = []
    own_families, other_families = _list_families(left), _list_families(right)
    for stem, stored in own_families.items():
        registered = other_families.get(stem)
        if registered is None or stored.keys() == registered.keys():
            continue
        pairs += _pair_numbers(stored, registered, left, right)
    return pairs


def _list_families(children: Iterable[str]) -> dict[str, dict[int, str]]:
    families: dict[str, dict[int, str]] = {}
    for token in children:
        if (match := _NUMBERED.fullmatch(token)) and str(int(match[2])) == match[2]:
            families.setdefault(match[1], {})[int(match[2])] = token
    return families


def _pair_numbers(
    stored: Mapping[int, str],
    registered: Mapping[int, str],
    left: Mapping[str, _Node],
    right: Mapping[str, _Node],
) -> list[tuple[str, str]]:
    """Pair numbered children in order, so that the tensor shapes inside the children agree as well as possible."""
    numbers, others = sorted(stored), sorted(registered)
    rows = [_make_key(left[stored[number]]) for number in numbers]
    columns = [_make_key(right[registered[number]]) for number in others]
    if rows == columns:
        # The numbers of children are equal and all shapes fit: 1 to 12 against 0 to 11, or numbers without gaps.
        return [(stored[a], registered[b]) for a, b in zip(numbers, others, strict=True)]
    common_numbers = [number for number in numbers if number in registered]
    by_name = all(_make_key(left[stored[n]]) == _make_key(right[registered[n]]) for n in common_numbers)
    if by_name and len(common_numbers) == min(len(numbers), len(others)):
        return [(stored[n], registered[n]) for n in common_numbers]
    if len(rows) * len(columns) > MAX_COMPARISONS:
        return []
    common_counts: dict[tuple[object, object], int] = {}
    for n, m in product(numbers, others):
        first, second = left[stored[n]], right[registered[m]]
        key = _make_key(first), _make_key(second)
        if key not in common_counts:
            common_counts[key] = _count_common_shapes(first, second)
    weights = [[common_counts[row, column] for column in columns] for row in rows]
    return [(stored[numbers[a]], registered[others[b]]) for a, b in _find_best_sequence(weights)]


def _count_common_shapes(first: _Node, second: _Node) -> int:
    """Return how many shapes two modules share, or 0 if they share less than half of their shapes."""
    shared = sum((_count_shapes(first) & _count_shapes(second)).values())
    return shared if 2 * shared >= max(first.count, second.count) else 0


def _find_best_sequence(weights: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the (row, column) indexes in `weights` that have the largest sum. Rows and columns both ascend."""
    width = len(weights[0])
    best = [[0] * (width + 1) for _ in range(len(weights) + 1)]
    for row, column in product(reversed(range(len(weights))), reversed(range(width))):
        match = best[row + 1][column + 1] + weights[row][column]
        best[row][column] = max(best[row + 1][column], best[row][column + 1], match)
    row = column = 0
    while row < len(weights) and column < width:
        if weights[row][column] and best[row][column] == best[row + 1][column + 1] + weights[row][column]:
            yield row, column
            row, column = row + 1, column + 1
        elif best[row + 1][column] >= best[row][column + 1]:
            row += 1
        else:
            column += 1


def _make_key(node: _Node) -> tuple[int, int]:
    """Return a key that is equal for two modules with the same shapes inside."""
    return node.count, node.signature
