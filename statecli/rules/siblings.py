"""Rules about a layer of a stack that differs from its siblings."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec

from statecli.commands.inspect.quantized import list_weights
from statecli.core.dtypes import is_floating
from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.logical_weights import LogicalWeight
from statecli.core.model_state import Kind, TensorInfo, TensorKey
from statecli.core.quantized_weights import LostCodes, find_lost_codes
from statecli.core.units import format_shape, join_names, plural
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject

if TYPE_CHECKING:
    from statecli.values.summary import Facts

#: Smallest number of layers of a stack. In a smaller stack, two kinds of layers look like a single different layer.
MIN_LAYERS = 8
#: Smallest number of elements of a tensor with a typical size, which is its fourth largest absolute value.
MIN_ELEMENTS = 64
#: Smallest number of tensors in all layers for which a missing number is a missing layer, because `nn.Sequential` has
#: numbers without tensors. The second constant is for layers of the same names and shapes.
MIN_TENSORS_OF_BLOCK = 4
MIN_TENSORS_OF_EQUAL_BLOCK = 3
#: Smallest number of layers of a stack of which two layers may lack a tensor.
MIN_LAYERS_FOR_TWO_GAPS = 32
#: Smallest reported factor between the values of a layer and the median of its siblings.
MIN_SCALE_FACTOR = 50.0
#: Exponent: the deviation of the layer must exceed the second largest deviation of the stack to this power.
ISOLATION_EXPONENT = 3.0
#: Largest factor between the scales of the siblings, for a scale of 0 or less to be reported.
MAX_SCALE_RANGE = 10.0
#: Parts of names of tensors that start at 0, and may stay 0 in a layer that is not trained.
_STARTS_AT_ZERO = compile_on_use(r"bias|lora_|zero_point")
#: Number of a layer; no list of layers has a longer number.
_INDEX = compile_on_use(r"(?:(?<=\.)|^)\d{1,9}(?=\.)")
#: Start of a name up to its last possible number, which many names of a layer share.
_TO_LAST_INDEX = compile_on_use(r".*\d\.", re.DOTALL)

_T = TypeVar("_T", bound=Hashable)


class Stack(msgspec.Struct, frozen=True, dict=True):
    """Layers of a module list: layer index -> tensor name inside the layer -> position of the tensor in the state."""

    section: str
    prefix: str
    layers: Mapping[int, Mapping[str, int]]

    @property
    def inner(self) -> list[int]:
        """The indices of all layers except the first and the last, because these differ in many models."""
        return sorted(self.layers)[1:-1]

    @cached_property
    def positions(self) -> dict[str, dict[int, int]]:
        """Positions of tensors by layer index, for each tensor name inside a layer."""
        positions: dict[str, dict[int, int]] = {}
        for index, layer_positions in self.layers.items():
            for name, position in layer_positions.items():
                positions.setdefault(name, {})[index] = position
        return positions


@rule(Severity.WARNING)
def sibling_gap(subject: Subject) -> Iterator[Issue]:
    """One layer of a stack differs from all the other layers: in its tensors, a dtype, a shape, or the size of values.

    Why: the layers of a stack (`layers.0`, `layers.1`, …) have the same code, so they have the same tensors, dtypes and
    shapes. A filter or a merge may lose a layer or a tensor, or leave an extra tensor. A conversion may forget a layer
    or apply a scale twice: the layer has another dtype or shape, a weight of zeros, or values a hundred times as large.
    The checkpoint loads silently with `strict=False`, or is cast.
    The rule checks stacks of 8 layers or more. The first and the last layer are not checked, because they differ in
    many models. In a stack of 32 layers or more, the rule also reports two layers that lack a tensor. A layer with
    other tensors in place of the missing tensors has another architecture (attention among state-space layers) and is
    not reported. Factors of a LoRA in a single layer are not reported either.
    If values were read, the rule compares the fourth largest absolute value of each tensor of 64 elements or more, and
    the value of each tensor with a single element. The finding needs a factor of 50 from the median, and a deviation
    (as a logarithm) three times as large as the deviation of any other layer. A scale of a single element that is 0 or
    negative is reported if the other scales are positive and at most a factor of 10 apart.
    A quantized weight with a missing tensor (scales, zero points), or with tensors that do not fit each other, is
    always reported, because its codes mean nothing without the rest. Some tensors are only needed if present for other
    weights of the layout: `quant_state`, `weight_shape`, `g_idx`, and the scales of a float8 `weight`.
    GGUF files are not checked, because they choose a dtype for each tensor on purpose. The rule has no finding on 204
    sound checkpoints of transformers and torch, with random weights and after three steps of training
    (`benchmarks/honest_checkpoints.py`).

    Example: `model.layers.17.mlp.up_proj.weight` is float32, in the other 31 layers bfloat16.

    Fix: convert or save the layer again; if the difference is intended, accept the finding with a reason.
    """
    if subject.state.traits.mixed_dtypes:
        return
    weights = list_weights(subject.state)
    yield from _report_incomplete_weights(weights)
    lost_codes = find_lost_codes(subject.state.tensors)
    yield from _report_lost_codes(lost_codes)
    missing = {TensorKey(weight.codes.section, name) for weight in weights for name in weight.missing}
    missing |= {TensorKey(lost_code.scales.section, lost_code.codes) for lost_code in lost_codes}
    parts = [part for weight in weights for part in weight.parts]
    misfits = {part.key for weight in weights if weight.defect for part in weight.parts}
    owners = {part.key: weight.fqn for weight in weights for part in weight.parts}
    stacks = find_stacks(subject.state.tensors, owners.keys())
    for stack in stacks:
        yield from _report_odd_names(stack, missing, owners)
        yield from _report_odd_dtypes(subject, stack)
    # Only floating-point tensors have a size of values, and texts have no usual length.
    numbers = {part.key for part in parts if is_floating(part.dtype)}
    for stack in stacks if numbers == owners.keys() else find_stacks(subject.state.tensors, numbers):
        yield from _report_missing_layer(subject, stack)
        yield from _report_odd_shapes(subject, stack, misfits)
        if subject.values is not None:
            yield from _report_odd_scales(subject, subject.values, stack)
            yield from _report_lost_values(subject, subject.values, stack)


def find_stacks(tensors: tuple[TensorInfo, ...], parts: Set[TensorKey] = frozenset()) -> list[Stack]:
    """Return the stacks of at least `MIN_LAYERS` layers: groups of parameters whose names differ only in one number.

    `parts`: (section, name) of the tensors that belong to quantized weights.
    """
    layers_by_stack: defaultdict[tuple[str, str], defaultdict[int, dict[str, int]]]
    layers_by_stack = defaultdict(lambda: defaultdict(dict))
    #: Layers by the beginning of names, each with the length of the layer's own name and dot.
    layers_by_beginning: dict[tuple[str, str], list[tuple[dict[str, int], int]]] = {}
    parameter, match_beginning = Kind.PARAMETER, _TO_LAST_INDEX.match
    for position, tensor in enumerate(tensors):
        section, fqn = tensor.section, tensor.fqn
        if tensor.kind is not parameter and (section, fqn) not in parts:
            continue
        beginning = match_beginning(fqn)
        if beginning is None:
            continue
        key = section, beginning[0]
        layers = layers_by_beginning.get(key)
        if layers is None:
            layers = layers_by_beginning[key] = [
                (layers_by_stack[section, fqn[: match.start()]][int(match[0])], match.end() + 1)
                for match in _INDEX.finditer(beginning[0])
            ]
        for layer, length in layers:
            layer[fqn[length:]] = position
    return [Stack(*key, layers) for key, layers in layers_by_stack.items() if len(layers) >= MIN_LAYERS]


def _report_missing_layer(subject: Subject, stack: Stack) -> Iterator[Issue]:
    indexes = sorted(stack.layers)
    if indexes[-1] - indexes[0] != len(indexes):  # not a single missing layer
        return
    holes = sorted(set(range(indexes[0], indexes[-1])) - set(indexes))
    common_names = frozenset.intersection(*map(frozenset, stack.layers.values()))
    kinds = {
        tuple((name, subject.state.tensors[n].shape) for name, n in sorted(layer.items()))
        for layer in stack.layers.values()
    }
    is_block = len(kinds) == 1 and any("." in name for name in common_names)
    if len(common_names) >= (MIN_TENSORS_OF_EQUAL_BLOCK if is_block else MIN_TENSORS_OF_BLOCK):
        name = f"{stack.prefix}{holes[0]}"
        message = (
            f"{name}: layer is missing; the other {len(indexes)} layers have {len(common_names)} tensors in common"
        )
        yield Issue(message, None, stack.section, "save the missing layer too", about=name)


def _report_incomplete_weights(weights: Sequence[LogicalWeight]) -> Iterator[Issue]:
    """Yield an issue for each quantized weight that lacks a tensor, or whose tensors do not fit each other."""
    complete_counts = Counter(weight.layout for weight in weights if not weight.defect)
    for weight in weights:
        if not weight.defect:
            continue
        others = (
            f"; {plural(complete_counts[weight.layout], 'other weight')} of this layout"
            if complete_counts[weight.layout]
            else ""
        )
        have = " have all their tensors" if complete_counts[weight.layout] > 1 else " has all its tensors"
        is_missing = f"{others}{have}" if weight.missing and others else ""
        message = f"{weight.fqn}: {weight.defect}{is_missing}"
        help = "save the missing tensors too" if weight.missing else "quantize the weight again"
        yield Issue(message, weight.codes.fqn, weight.codes.section, help)


def _report_lost_codes(lost_codes: Sequence[LostCodes]) -> Iterator[Issue]:
    for lost_code in lost_codes:
        have = "has all its" if lost_code.whole == 1 else "have all their"
        others = f"{plural(lost_code.whole, 'other weight')} of this layout {have} tensors"
        message = f"{lost_code.codes}: is missing, but {lost_code.scales.fqn} is its scale; {others}"
        yield Issue(
            message,
            lost_code.scales.fqn,
            lost_code.scales.section,
            "save the missing tensor too",
            about=lost_code.codes,
        )


def _report_odd_names(stack: Stack, reported: Set[TensorKey], owners: Mapping[TensorKey, str]) -> Iterator[Issue]:
    """Yield an issue for layers that lack tensors of the other layers, and for a layer with additional tensors.

    `reported` are the sections and names of missing tensors in earlier findings. `owners` are the names of quantized
    weights by section and name of their tensors: a layer whose weight is not quantized needs no scales.
    """
    if all(len(positions) == len(stack.layers) for positions in stack.positions.values()):
        return
    names = {name for section, name in reported if section == stack.section and name.startswith(stack.prefix)}
    left_out = {name[len(stack.prefix) :].partition(".")[2] for name in names}
    kinds = {index: frozenset(layer_names) - left_out for index, layer_names in stack.layers.items()}
    usual, _ = Counter(kinds[index] for index in stack.inner).most_common(1)[0]
    ends = {kinds[min(kinds)], kinds[max(kinds)]}
    odd_layers = [index for index in stack.inner if kinds[index] != usual]
    if len(odd_layers) > 1 + (len(kinds) >= MIN_LAYERS_FOR_TWO_GAPS):
        return
    for index in odd_layers:
        missing_names, added_names = usual - kinds[index], kinds[index] - usual
        missing_names -= {name for name in missing_names if _is_of_plain_weight(stack, index, name, owners)}
        if not (missing_names or added_names):
            continue
        has_only_one_difference = not (missing_names and added_names) and kinds[index] not in ends
        is_adapter = any("lora_" in name for name in added_names)
        if not has_only_one_difference or (added_names and (len(odd_layers) > 1 or is_adapter)):
            continue
        name, differing_names = f"{stack.prefix}{index}", missing_names or added_names
        count = sum(
            (differing_names <= kind) if missing_names else differing_names.isdisjoint(kind) for kind in kinds.values()
        )
        verb, others, help = "lacks", "have", "save the missing tensors too"
        if added_names:
            verb, others, help = "has", "lack", "save these tensors for all layers, or remove them"
        message = f"{name}: {verb} {join_names(sorted(differing_names))}, which {count} other layers {others}"
        yield Issue(message, None, stack.section, help, about=name)


def _is_of_plain_weight(stack: Stack, index: int, name: str, owners: Mapping[TensorKey, str]) -> bool:
    """Return True if the missing tensor belongs to a weight that is quantized in other layers, but not in this one."""
    for other_index, layer in stack.layers.items():
        start = f"{stack.prefix}{other_index}."
        owner = owners.get(TensorKey(stack.section, start + name)) if name in layer else None
        if owner is not None:
            weight = owner.removeprefix(start)
            return weight in stack.layers[index] and (stack.section, f"{stack.prefix}{index}.{weight}") not in owners
    return False


def _report_odd_dtypes(subject: Subject, stack: Stack) -> Iterator[Issue]:
    for inner_name, positions in _list_common(stack):
        dtypes = [subject.state.tensors[n].dtype for n in positions.values()]
        if (odd_layer := _find_odd_layer(stack, positions, dtypes)) is not None:
            tensor = subject.state.tensors[positions[odd_layer]]
            others = f"{_get_most_common_value(dtypes)} in the other {len(dtypes) - 1} layers ({inner_name})"
            help = "convert the tensor to the dtype that it has in the other layers"
            yield report_tensor(subject, tensor, f"dtype is {tensor.dtype}, but {others}", help)


def _report_odd_shapes(subject: Subject, stack: Stack, reported: Set[TensorKey]) -> Iterator[Issue]:
    """Yield an issue for a shape that only one layer has. Skip layers without submodules: their widths often differ.

    `reported` are the sections and names of tensors in earlier findings.
    """
    for inner_name, positions in _list_common(stack):
        shapes = [subject.state.tensors[n].shape for n in positions.values()] if "." in inner_name else [None]
        if None not in shapes and (odd_layer := _find_odd_layer(stack, positions, shapes)) is not None:
            tensor, usual = subject.state.tensors[positions[odd_layer]], format_shape(_get_most_common_value(shapes))
            if tensor.key in reported:
                continue
            others = f"{usual} in the other {len(shapes) - 1} layers"
            help = "save the tensor again with the shape that it has in the other layers"
            yield report_tensor(subject, tensor, f"shape is {format_shape(tensor.shape)}, but {others}", help)


def _get_most_common_value(values: Iterable[_T]) -> _T:
    return Counter(values).most_common(1)[0][0]


def _find_odd_layer(stack: Stack, positions: Mapping[int, int], values: Sequence[Hashable]) -> int | None:
    """Return the index of the only layer with a different value, unless it is the first or the last layer.

    `values` are the values of the layers in `positions`.
    """
    usual, count = Counter(values).most_common(1)[0]
    if count != len(values) - 1:
        return None
    odd_layer = next(index for index, value in zip(positions, values, strict=True) if value != usual)
    return odd_layer if odd_layer in stack.inner else None


def _report_odd_scales(subject: Subject, values: Sequence[Facts], stack: Stack) -> Iterator[Issue]:
    from statistics import median

    for _, positions in _list_common(stack):
        sizes = {index: _get_typical_size(values[n]) for index, n in positions.items()}
        nonzero = {index: size for index, size in sizes.items() if size}
        if len(nonzero) < MIN_LAYERS or len(nonzero) < len(positions):
            continue
        middle = median(nonzero.values())
        factors = sorted((max(size / middle, middle / size), index) for index, size in nonzero.items())
        (second, _), (largest, odd_layer) = factors[-2:]
        if largest >= MIN_SCALE_FACTOR and largest >= second**ISOLATION_EXPONENT and odd_layer in stack.inner:
            tensor = subject.state.tensors[positions[odd_layer]]
            comparison = "larger" if nonzero[odd_layer] > middle else "smaller"
            text = f"values are {largest:,.0f} times {comparison} than in the other layers"
            help = "check whether a scale was applied twice or not at all"
            yield report_tensor(subject, tensor, text, help)


def _get_typical_size(facts: Facts) -> float | None:
    if facts.elements == 1 and facts.reason is None and isinstance(facts.high, float):
        return abs(facts.high)
    return facts.typical if facts.reason is None and facts.elements >= MIN_ELEMENTS else None


def _report_lost_values(subject: Subject, values: Sequence[Facts], stack: Stack) -> Iterator[Issue]:
    """Yield an issue for a weight that is zero in one layer only, or a one-element scale that is not positive."""
    for inner_name, positions in _list_common(stack):
        facts = {index: values[n] for index, n in positions.items()}
        odd_layer = _find_odd_layer(
            stack, positions, [_is_lost(layer_facts, inner_name) for layer_facts in facts.values()]
        )
        if odd_layer is None or not _is_lost(facts[odd_layer], inner_name):
            continue
        tensor, others = (
            subject.state.tensors[positions[odd_layer]],
            [facts[index] for index in facts if index != odd_layer],
        )
        in_others = f"in the other {len(others)} layers"
        if facts[odd_layer].elements > 1:
            message = f"all {facts[odd_layer].elements:,} values are 0, unlike {in_others}"
        else:
            low = min(layer_facts.low or 0 for layer_facts in others)
            high = max(layer_facts.high or 0 for layer_facts in others)
            if low <= 0 or high > low * MAX_SCALE_RANGE or any(layer_facts.elements != 1 for layer_facts in others):
                continue
            message = f"value is {facts[odd_layer].high:.3g}, but {low:.3g} to {high:.3g} {in_others}"
        help = "check whether the values were lost, and save the layer again"
        yield report_tensor(subject, tensor, message, help)


def _is_lost(facts: Facts, inner_name: str) -> bool:
    if facts.reason is not None:
        return False
    if facts.elements == 1:
        return facts.zeros == 1 or ("scale" in inner_name and facts.high is not None and facts.high < 0)
    return facts.zeros == facts.elements >= MIN_ELEMENTS and not _STARTS_AT_ZERO.search(inner_name)


def _list_common(stack: Stack) -> Iterator[tuple[str, dict[int, int]]]:
    return ((name, positions) for name, positions in stack.positions.items() if len(positions) >= MIN_LAYERS)


RULES = (sibling_gap,)
