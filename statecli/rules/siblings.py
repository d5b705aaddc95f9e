"""Rules about one layer of a stack that differs from its siblings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from statecli.auditing.rule import Found, rule
from statecli.auditing.subject import Subject
from statecli.finding import Severity
from statecli.report.text import names
from statecli.state import Kind, TensorInfo

if TYPE_CHECKING:
    from statecli.values.scan import Facts

#: Layers of a stack from which on one of them can be said to differ: with fewer, two halves are not told from one gap.
MIN_LAYERS = 8
#: Elements of a tensor from which on its values have a size: without its three largest, one of four is its smallest.
MIN_ELEMENTS = 64
#: Tensors of a layer from which on a missing number is a missing layer. `nn.Sequential` has numbers without tensors.
MIN_TENSORS_OF_BLOCK = 4
#: Factor between the values of one layer and the median of its siblings that is reported.
SCALE_FACTOR = 100.0
#: And the factor, at least, by which its deviation exceeds the second largest of the stack, as a power.
ISOLATION = 3.0
_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


class Stack(msgspec.Struct, frozen=True):
    """The layers of one module list: `layers[index][rest of the name]` is the position of a tensor in the state."""

    section: str
    prefix: str
    layers: Mapping[int, Mapping[str, int]]

    @property
    def inner(self) -> list[int]:
        """The indexes of the layers but the first and the last, which differ in many models."""
        return sorted(self.layers)[1:-1]


@rule(Severity.WARNING)
def sibling_gap(subject: Subject) -> Iterator[Found]:
    """One layer of a stack differs from all of its siblings: in a tensor that it lacks, a dtype, or the size of values.

    Why: layers of a stack are built by the same code. A layer without a tensor that all others have was lost by a
    filter or a merge; another dtype in one layer, or values a hundred times as large, are left by a conversion that
    forgot a layer or applied a scale twice. It loads with `strict=False`, or is cast, without a message.
    Judged are stacks of 8 layers or more, and all but the first and the last layer, which differ in many models. A
    layer of another architecture (attention among state-space layers) lacks some tensors and has others: no finding.
    Values, if they were read, count by the size that all but the three largest do not exceed, in tensors of 64 elements
    or more; the factor is 100, and the deviation from the median three times that of any sibling (as a logarithm).
    Files of GGUF choose a type for each tensor on purpose. On 204 honest checkpoints of transformers and torch, with
    random weights and after three steps of training, it has no finding (`benchmarks/honest_checkpoints.py`).

    Example: `model.layers.17.mlp.up_proj.weight` is float32, in the other 31 layers bfloat16.

    Fix: convert or save that layer again; if it is intended, accept it with a reason.
    """
    if "gguf" in subject.state.format:
        return
    for stack in find_stacks(subject.state.tensors):
        yield from _missing_layer(stack)
        yield from _missing_tensors(stack)
        yield from _odd_dtypes(subject, stack)
        yield from _odd_scales(subject, stack)


def find_stacks(tensors: tuple[TensorInfo, ...]) -> list[Stack]:
    """Return the stacks of at least `MIN_LAYERS` layers: parameters whose names differ in one number."""
    found: dict[tuple[str, str], dict[int, dict[str, int]]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.kind is not Kind.PARAMETER:
            continue
        for match in _INDEX.finditer(tensor.fqn):
            layers = found.setdefault((tensor.section, tensor.fqn[: match.start()]), {})
            layers.setdefault(int(match[0]), {})[tensor.fqn[match.end() + 1 :]] = position
    return [Stack(*key, layers) for key, layers in found.items() if len(layers) >= MIN_LAYERS]


def _missing_layer(stack: Stack) -> Iterator[Found]:
    indexes = sorted(stack.layers)
    holes = sorted(set(range(indexes[0], indexes[-1])) - set(indexes))
    kinds = {frozenset(rest) for rest in stack.layers.values()}
    if len(holes) == 1 and len(kinds) == 1 and len(next(iter(kinds))) >= MIN_TENSORS_OF_BLOCK:
        name = f"{stack.prefix}{holes[0]}"
        message = (
            f"{name}: layer is missing; the other {len(indexes)} layers have {len(next(iter(kinds)))} tensors each"
        )
        yield Found(message, None, stack.section, "save the missing layer too", about=name)


def _missing_tensors(stack: Stack) -> Iterator[Found]:
    kinds = Counter(frozenset(rest) for rest in stack.layers.values())
    usual, count = kinds.most_common(1)[0]
    if count != len(stack.layers) - 1:
        return
    odd = next(index for index, rest in stack.layers.items() if frozenset(rest) != usual)
    missing = sorted(usual - set(stack.layers[odd]))
    if odd in stack.inner and set(stack.layers[odd]) < usual:
        name = f"{stack.prefix}{odd}"
        message = f"{name}: lacks {names(missing)}, which the other {count} layers have"
        yield Found(message, None, stack.section, "save the missing tensors too", about=name)


def _odd_dtypes(subject: Subject, stack: Stack) -> Iterator[Found]:
    for rest, positions in _by_suffix(stack).items():
        dtypes = Counter(subject.state.tensors[n].dtype for n in positions.values())
        usual, count = dtypes.most_common(1)[0]
        if len(dtypes) == 2 and count == len(positions) - 1:
            odd = next(index for index, n in positions.items() if subject.state.tensors[n].dtype != usual)
            if odd in stack.inner:
                tensor = subject.state.tensors[positions[odd]]
                message = f"{subject.called(tensor)}: is {tensor.dtype}, {usual} in the other {count} layers ({rest})"
                yield Found(message, tensor.fqn, tensor.section, "convert it to the dtype of its siblings")


def _odd_scales(subject: Subject, stack: Stack) -> Iterator[Found]:
    if subject.values is None:
        return
    for positions in _by_suffix(stack).values():
        sizes = {index: _size(subject.values[n]) for index, n in positions.items()}
        known = {index: size for index, size in sizes.items() if size}
        if len(known) < MIN_LAYERS or len(known) < len(positions):
            continue
        middle = median(known.values())
        factors = sorted((max(size / middle, middle / size), index) for index, size in known.items())
        (second, _), (largest, odd) = factors[-2:]
        if largest >= SCALE_FACTOR and largest >= second**ISOLATION and odd in stack.inner:
            tensor = subject.state.tensors[positions[odd]]
            much = "larger" if known[odd] > middle else "smaller"
            message = f"{subject.called(tensor)}: its values are {largest:,.0f} times {much} than in the other layers"
            yield Found(message, tensor.fqn, tensor.section, "check whether a scale was applied twice or not at all")


def _size(facts: Facts) -> float | None:
    return facts.typical if facts.reason is None and facts.elements >= MIN_ELEMENTS else None


def _by_suffix(stack: Stack) -> dict[str, dict[int, int]]:
    """Return for each name below the layers its positions by layer, if at least `MIN_LAYERS` layers have it."""
    found: dict[str, dict[int, int]] = {}
    for index, rest in stack.layers.items():
        for name, position in rest.items():
            found.setdefault(name, {})[index] = position
    return {name: positions for name, positions in found.items() if len(positions) >= MIN_LAYERS}


RULES = (sibling_gap,)
