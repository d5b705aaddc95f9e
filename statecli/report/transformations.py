"""Transformations of the tensors of a diff, in sentences: one for each cast, moved layer or fused weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from statecli.commands.diff.expectations import describe_lost_values, explain_beyond_merge, name_merged
from statecli.commands.diff.result import (
    Change,
    Quantization,
    Rounding,
    RowOrder,
    Status,
    Transformation,
    TransformationKind,
)
from statecli.commands.diff.transformations.layers import split_moved_layer
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quantized_layout_names import QuantizedLayout
from statecli.core.units import format_fqn, format_number, format_shape, plural
from statecli.report import Group, Line, fold
from statecli.report.change_text import describe_not_finite, has_new_not_finite

#: Heading of the group of recognised changes.
GROUP_HEADING = "recognised changes"
#: Largest number of named tensors with exceptions, and of lines of the group.
_MAX_NAMED = 3
_MAX_LINES = 24
#: Smallest ratio between the error of a quantized weight and the median for which the weight is named.
_OUTLIER_RATIO = 3
_LAYER_NUMBER = compile_on_use(r"(?<![^.])[0-9]+(?![^.])")
_ROUNDINGS = {
    Rounding.NEAREST: "exactly rounded",
    Rounding.TRUNCATED: "rounded towards zero",
    Rounding.STOCHASTIC: "rounded up or down",
    None: "represented without rounding",
}


def build_transformation_group(changes: Sequence[Change], unfold: bool, *, has_sections: bool) -> Group | None:
    """Return the group of all transformations, a line each; None if none was recognised."""
    if all(change.transformation is None for change in changes):
        return None
    if has_sections:  # names are unique only within a section, and equal names of two sections are different layers
        changes = [_name_with_section(change) for change in changes]
    by_kind = group_by(changes, _get_kind)
    modules = _find_moved_layers(changes)
    overview = _Overview(changes, modules, _list_new_layers(modules), _list_base_only(changes))
    lines = [line for kind in TransformationKind for line in _LINES[kind](by_kind.get(kind, ()), overview, unfold)]
    if not unfold and len(lines) > _MAX_LINES + 1:
        further_count = len(lines) - _MAX_LINES
        lines = [*lines[:_MAX_LINES], Line((f"… and {further_count:,} more (--all lists each)",), "", "dim")]
    parts = {name for change in changes for name in _list_sources(change)}
    named_changes = set(map(id, (*overview.base_only, *_list_removed_layers(changes, modules))))
    different_changes = [change for change in changes if change.status is not Status.IDENTICAL]
    explained_count = sum(
        (_is_explained(change, parts) or id(change) in named_changes) and not overview.hides(change)
        for change in different_changes
    )
    share = (
        f"{explained_count:,} of {plural(len(different_changes), 'differing tensor')}"
        if different_changes
        else "no tensor differs"
    )
    return Group(GROUP_HEADING, f"{share}, checked on every element", tuple(lines))


#: Kinds whose line covers several tensors, so that the rows of these tensors are omitted.
_SUMMARIZED = frozenset(
    [
        TransformationKind.CAST,
        TransformationKind.MOVED,
        TransformationKind.REORDERED,
        TransformationKind.JOINED,
        TransformationKind.SPLIT,
        TransformationKind.STACKED,
        TransformationKind.UNSTACKED,
        TransformationKind.ADAPTER,
        TransformationKind.MERGED,
        TransformationKind.QUANTIZED,
        TransformationKind.DEQUANTIZED,
    ]
)


def select_summarized(changes: Sequence[Change]) -> frozenset[int]:
    """Return the `id` of each change about which the lines of `build_transformation_group` say all.

    A tensor with exceptions keeps its row.
    """
    summarized_changes = [change for change in changes if _is_summarized(change)]
    parts = {(change.section, name) for change in summarized_changes for name in _list_sources(change)}
    unpaired = [change for change in changes if change.status in (Status.ADDED, Status.REMOVED)]
    named_parts = [change for change in unpaired if (change.section, change.fqn) in parts]
    sections = group_by(changes, lambda change: change.section).values()
    removed_layers = [
        change
        for section_changes in sections
        for change in _list_removed_layers(section_changes, _find_moved_layers(section_changes))
    ]
    return frozenset(map(id, [*summarized_changes, *named_parts, *_list_base_only(changes), *removed_layers]))


def _is_summarized(change: Change) -> bool:
    is_whole = _get_kind(change) in _SUMMARIZED and not _has_exceptions(change)
    return is_whole and not _lost_values(change) and not has_new_not_finite(change)


def _lost_values(change: Change) -> bool:
    return _get_kind(change) is TransformationKind.CAST and describe_lost_values(change) is not None


def _get_kind(change: Change) -> TransformationKind | None:
    return change.transformation.kind if change.transformation is not None else None


def _get_transformation(change: Change) -> Transformation:
    """Return the transformation of a recognised change."""
    assert change.transformation is not None  # noqa: S101 - checked by the callers
    return change.transformation


def _is_explained(change: Change, parts: Container[str]) -> bool:
    """Return True if the tensor was recognised, or is only on one side and belongs to a recognised tensor."""
    is_part = change.status in (Status.ADDED, Status.REMOVED) and change.fqn in parts
    return change.transformation is not None or is_part


def _name_with_section(change: Change) -> Change:
    """Return the change with its section in front of all names."""
    start = f"{change.section}." if change.section else ""
    transformation = change.transformation
    if transformation is not None:
        origin = (
            start
            if transformation.source_section is None
            else f"{transformation.source_section}."
            if transformation.source_section
            else ""
        )
        sources = tuple(origin + name for name in transformation.sources)
        differing = tuple(origin + name for name in transformation.differing)
        transformation = replace(transformation, sources=sources, differing=differing)
    return replace(change, fqn=start + change.fqn, section="", transformation=transformation)


def describe_transformation(change: Change) -> str:
    """Describe the transformation of a tensor, without its name; the dtypes say all about a cast without exceptions."""
    return "" if change.transformation is None or _is_exact_cast(change) else _describe(change)


def make_fold_key(change: Change) -> str:
    """Return a text by which rows with other transformations, or with exceptions, stay separate."""
    transformation = change.transformation
    if transformation is None:
        return ""
    kind, rounding = transformation.kind.value, transformation.rounding
    return f"{kind} {rounding} {bool(transformation.exceptions)} {transformation.factor}"


def _describe(change: Change) -> str:
    transformation = _get_transformation(change)
    kind, cosine, factor = transformation.kind, transformation.cosine, transformation.factor
    rounding, exceptions = _format_rounding(transformation), _format_exceptions(transformation)
    source = format_fqn(transformation.sources[0]) if transformation.sources else ""
    if kind is TransformationKind.CAST:
        is_exact = not transformation.exceptions
        return _ROUNDINGS[transformation.rounding] if is_exact else _format_beyond_rounding(change, transformation)
    if kind is TransformationKind.RESIZED:
        return _describe_resize(change, transformation)
    if kind is TransformationKind.MOVED:
        if cosine is not None:
            return f"similar to {source} in the first checkpoint (cosine {cosine:.4f})"
        of = "transpose of " if transformation.is_transposed else ""
        return f"= {of}{source} before{rounding}{exceptions}"
    if kind is TransformationKind.SWAPPED:
        return f"swapped with {source}{exceptions}"
    if kind is TransformationKind.SCALED:
        return f"= {format_number(factor, 6)} × before{exceptions}"
    if kind is TransformationKind.TRANSPOSED:
        if cosine is not None:
            return f"transposed, then changed (cosine {cosine:.4f})"
        scale = "" if factor is None else f"= {format_number(factor, 6)} × "
        return f"{scale}transposed{exceptions or rounding}"
    if kind is TransformationKind.PERMUTED:
        return _describe_permutation(change, transformation)
    if kind is TransformationKind.REORDERED:
        orders = (
            ("interleaved", "rotated halves")
            if transformation.order is RowOrder.HALVES
            else ("rotated halves", "interleaved")
        )
        heads = plural(transformation.heads or 0, "head")
        return f"= {' → '.join(orders)} ({heads}){exceptions or rounding or ', exactly'}"
    if kind is TransformationKind.ADAPTER:
        return f"LoRA update of {source}, ‖ΔW‖/‖W‖ {format_number(transformation.relative_l2, 2)}"
    if kind is TransformationKind.MERGED:
        return explain_beyond_merge(change) or _describe_merged(transformation)
    if kind in (TransformationKind.QUANTIZED, TransformationKind.DEQUANTIZED):
        return _describe_quantized(transformation)
    if kind is TransformationKind.CODES:
        sides = [side.dtype for side in (change.after, change.before) if side is not None]
        codes = next((dtype for dtype in sides if "int" in dtype or "float8" in dtype), sides[0])
        return f"{codes} quantized values, not compared as numbers"
    if kind is TransformationKind.UNRELATED:
        value_cosine = change.values.cosine if change.values is not None else None
        return f"unrelated (cosine {value_cosine or 0:.2f})"
    return _describe_join(change, transformation)


def _describe_permutation(change: Change, transformation: Transformation) -> str:
    shape = change.after.shape if change.after is not None and change.after.shape else ()
    noun, count = ("column" if transformation.axis else "row"), shape[transformation.axis or 0] if shape else 0
    noun = "item" if noun == "row" and len(shape) > 2 else noun  # an item of a stack
    if not transformation.exceptions:
        return f"{noun}s permuted: same {count:,} {noun}s in another order{_format_rounding(transformation)}"
    text = f"{noun}s permuted: same {count - transformation.rows:,} of {count:,} {noun}s in another order"
    rows_text = f"{noun if transformation.rows == 1 else f'{noun}s'} {_list_first_rows(transformation)}"
    return f"{text}, but {_count_exceptions(transformation)} in {rows_text}"


def _list_first_rows(transformation: Transformation) -> str:
    return ", ".join(map(str, transformation.first_rows)) + (
        ", …" if transformation.rows > len(transformation.first_rows) else ""
    )


def _format_rounding(transformation: Transformation) -> str:
    return "" if transformation.rounding is None else f", {_ROUNDINGS[transformation.rounding]}"


def _format_exceptions(transformation: Transformation) -> str:
    return f", but {_count_exceptions(transformation)}" if transformation.exceptions else ""


def _count_exceptions(transformation: Transformation) -> str:
    verb = "differs" if transformation.exceptions == 1 else "differ"
    return f"{transformation.exceptions:,} of {transformation.elements:,} elements {verb}"


def _format_named_exceptions(changes: Sequence[Change]) -> str:
    """Return `, but layers.1.up.weight: 1 of 8,192 elements differs`, for each tensor; empty without exceptions."""
    texts = [
        f"{format_fqn(change.fqn)}: {_count_exceptions(_get_transformation(change))}{_format_new_not_finite(change)}"
        for change in changes
        if _has_exceptions(change)
    ]
    further_text = [f"{len(texts) - _MAX_NAMED:,} more tensors differ"] if len(texts) > _MAX_NAMED else []
    return f", but {'; '.join([*texts[:_MAX_NAMED], *further_text])}" if texts else ""


# --- casts -----------------------------------------------------------------------------------------------------------


def _build_cast_lines(changes: Sequence[Change], _: _Overview, __: bool) -> Iterator[Line]:
    by_types: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        if change.before is not None and change.after is not None:
            by_types.setdefault((change.before.dtype, change.after.dtype), []).append(change)
    for (before, after), rows in by_types.items():
        inexact_rows = [row for row in rows if _has_exceptions(row)]
        exact_rows = [row for row in rows if not _has_exceptions(row)]
        exact = Counter(_get_transformation(row).rounding for row in exact_rows)
        parts = [f"{count:,} {_ROUNDINGS[rounding]}" for rounding, count in exact.items()]
        if inexact_rows:
            parts.append(f"{len(inexact_rows):,} not")
        text = f"{len(rows):,} cast {before} → {after}"
        yield Line((text,), "; ".join(parts) if len(parts) > 1 else parts[0].partition(" ")[2])
        rows_with_lost_values = [row for row in exact_rows if _lost_values(row)]
        for kind, exceptions in (("not rounded", inexact_rows), ("out of range", rows_with_lost_values)):
            for row in exceptions[:_MAX_NAMED]:
                text = _describe(row) if kind == "not rounded" else describe_lost_values(row) or ""
                yield Line((f"  {kind}: {format_fqn(row.fqn)}",), text, "bad")
            if len(exceptions) > _MAX_NAMED:
                yield Line((f"  … and {len(exceptions) - _MAX_NAMED:,} more {kind}",), "", "dim")


def _format_beyond_rounding(change: Change, transformation: Transformation) -> str:
    relative = change.values.relative_l2 if change.values is not None else None
    size = f", rel. change {format_number(relative, 2)}" if relative is not None else ""
    return f"{_count_exceptions(transformation)} by more than rounding{size}"


# --- sizes -----------------------------------------------------------------------------------------------------------


def _describe_resize(change: Change, transformation: Transformation) -> str:
    before, after = (side.shape or () for side in (change.before, change.after) if side is not None)
    axis = transformation.axis or 0
    changed_axes = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    texts = [
        f"{_count_indexes(n, abs(after[n] - before[n]))} {'added' if after[n] > before[n] else 'removed'}"
        for n in changed_axes
    ]
    if transformation.place is not None:
        texts = [f"{texts[0]} {_format_places(transformation, is_added=after[axis] > before[axis])}"]
    common = min(before[axis], after[axis])
    common_text = _count_indexes(axis, common, "common ")
    if transformation.cosine is not None:
        size = (
            f"rel. change {format_number(transformation.relative_l2, 2)}, cosine {_floor_cosine(transformation.cosine)}"
        )
        return f"{', '.join(texts)}; {size} in the {common_text}"
    if not transformation.exceptions:
        state = "equal" if transformation.rounding is None else _ROUNDINGS[transformation.rounding]
        return f"{', '.join(texts)}; the {common_text} {'is' if common == 1 else 'are'} {state}"
    return f"{', '.join(texts)}; of the {common_text} {_format_rows(transformation, _name_index(axis))}"


def _format_places(transformation: Transformation, *, is_added: bool) -> str:
    """Return `before row 50`, `from row 50 on`, or `in 2 places (5 before row 50, 7 before row 200)`"""
    noun = _name_index(transformation.axis or 0)
    place_format = f"before {noun} {{}}" if is_added else f"from {noun} {{}} on"
    if not transformation.places:
        return place_format.format(transformation.place)
    place_texts = [
        f"{count:,} {place_format.format(place)}"
        for place, count in zip(transformation.places, transformation.counts, strict=True)
    ]
    ellipsis = ", …" if len(place_texts) > _MAX_NAMED else ""
    return f"in {len(place_texts):,} places ({', '.join(place_texts[:_MAX_NAMED])}{ellipsis})"


def _name_index(axis: int) -> str:
    return ("row", "column")[axis] if axis < 2 else "index"


def _count_indexes(axis: int, count: int, prefix: str = "") -> str:
    """Return `32 rows`, `64 common columns`, `2 indexes of dimension 2`"""
    if axis < 2:
        return plural(count, prefix + _name_index(axis))
    return f"{count:,} {prefix}{'index' if count == 1 else 'indexes'} of dimension {axis}"


def _format_rows(transformation: Transformation, noun: str = "row") -> str:
    verb = "differs" if transformation.rows == 1 else "differ"
    nouns = noun if transformation.rows == 1 else f"{noun}es" if noun == "index" else f"{noun}s"
    return f"{transformation.rows:,} {verb} ({nouns} {_list_first_rows(transformation)})"


# --- names -----------------------------------------------------------------------------------------------------------


class _MovedLayer(NamedTuple):
    """A numbered layer of a module with most of its tensors from a single other layer.

    Attributes:
        new, old: Numbers of the layer after and before.
        cosines: Cosine of each moved tensor, None if equal bit for bit.
        rounding: Rounding of the values of equal tensors; None without rounding.
        wrong: The moved tensors with exceptions.
        others: The differing tensors of the layer from elsewhere.
    """

    new: int
    old: int
    cosines: list[float | None]
    rounding: Rounding | None
    wrong: list[Change]
    others: list[Change]


class _Layers(NamedTuple):
    """The moved layers of a module, and the numbers of layers on a single side."""

    moved: list[_MovedLayer]
    lost_numbers: list[int]
    new_numbers: list[int]


class _Overview(NamedTuple):
    """All changes, their modules with moved layers, the names of new layers, and the tensors that only a base has."""

    changes: Sequence[Change]
    modules: Mapping[str, _Layers]
    new_layers: tuple[str, ...]
    base_only: Sequence[Change]

    def hides(self, change: Change) -> bool:
        """Return True for an unrelated tensor of a new layer, without a layer before."""
        return _get_kind(change) is TransformationKind.UNRELATED and change.fqn.startswith(self.new_layers)


def _find_moved_layers(changes: Sequence[Change]) -> dict[str, _Layers]:
    """Return the layers of each module, by its name with a dot at its end; modules without a moved layer are left out.

    A single tensor does not move a layer: more than half of its tensors must come from the same other layer.
    """
    old_numbers_by_layer: dict[tuple[str, int], Counter[int]] = {}
    for change in changes:
        names = _split_move(change)
        if names is not None:
            (stem, _, source), (_, _, number) = (name.rpartition(".") for name in names)
            old_numbers_by_layer.setdefault((f"{stem}." if stem else "", int(number)), Counter())[int(source)] += 1
    layers: dict[str, list[_MovedLayer]] = {}
    tensors_of = {start: _group_by_layer(changes, start) for start, _ in old_numbers_by_layer}
    for (start, new), olds in old_numbers_by_layer.items():
        tensors = [change for change in tensors_of[start][new] if change.after is not None]
        weights = _select_weights(tensors)
        tensors = [change for change in tensors if change.status is not Status.IDENTICAL]
        (old, _), *_ = olds.most_common(1)
        if 2 * sum(_comes_from(change, start, old) for change in weights) > len(weights):
            moved_tensors = [change for change in tensors if _comes_from(change, start, old)]
            other_changes = [c for c in tensors if not (_comes_from(c, start, old) or _is_exact_cast(c))]
            cosines = [_get_transformation(change).cosine for change in moved_tensors]
            rounding = _find_rounding(moved_tensors)
            inexact_changes = [change for change in moved_tensors if _has_exceptions(change)]
            layers.setdefault(start, []).append(
                _MovedLayer(new, old, cosines, rounding, inexact_changes, other_changes)
            )
    return {start: _build_layers(tensors_of[start], sorted(moved_layers)) for start, moved_layers in layers.items()}


def _build_layers(tensors_of: Mapping[int, Sequence[Change]], moved_layers: list[_MovedLayer]) -> _Layers:
    olds, news = {layer.old for layer in moved_layers}, {layer.new for layer in moved_layers}
    lost_numbers, new_numbers = [], []
    for number, tensors in sorted(tensors_of.items()):
        weights_before = _select_weights([c for c in tensors if c.before is not None])
        weights_after = _select_weights([c for c in tensors if c.after is not None])
        if number not in olds and 2 * sum(c.after is None or _has_other_values(c) for c in weights_before) > len(
            weights_before
        ):
            lost_numbers.append(number)
        if number not in news and 2 * sum(c.before is None or _has_other_values(c) for c in weights_after) > len(
            weights_after
        ):
            new_numbers.append(number)
    return _Layers(moved_layers, lost_numbers, new_numbers)


def _select_weights(changes: list[Change]) -> list[Change]:
    """Return the matrices: biases and norms of a new model are equal in all layers. All tensors without matrices."""
    return [c for c in changes if (row := c.after or c.before) and len(row.shape or ()) > 1] or changes


def _group_by_layer(changes: Sequence[Change], start: str) -> dict[int, list[Change]]:
    """Return the tensors of each numbered layer of a module, by the number."""
    tensors: dict[int, list[Change]] = {}
    for change in changes:
        if change.fqn.startswith(start):
            number, dot, _ = change.fqn[len(start) :].partition(".")
            if dot and number.isascii() and number.isdecimal() and len(number) < 10:
                tensors.setdefault(int(number), []).append(change)
    return tensors


def _is_exact_cast(change: Change) -> bool:
    """Return True for a norm whose values are all rounded to 1, in the old layer and in the new layer."""
    return _get_kind(change) is TransformationKind.CAST and not _has_exceptions(change)


def _comes_from(change: Change, start: str, old: int) -> bool:
    names = _split_move(change)
    return names is not None and names[0] == f"{start}{old}"


def _split_move(change: Change) -> tuple[str, str] | None:
    is_move = _get_kind(change) in (TransformationKind.MOVED, TransformationKind.SWAPPED)
    return split_moved_layer(_list_sources(change)[0], change.fqn) if is_move else None


def _build_move_lines(changes: Sequence[Change], overview: _Overview, unfold: bool) -> Iterator[Line]:
    for start, layers in overview.modules.items():
        lines = [_build_layers_line(start, run) for run in _split_into_runs(layers.moved)]
        ends = [
            f"{_name_layers(start, numbers)} {'is' if len(numbers) == 1 else 'are'} {word}"
            for numbers, word in ((layers.lost_numbers, "removed"), (layers.new_numbers, "new"))
            if numbers
        ]
        lines[-1] = replace(lines[-1], remark="; ".join([lines[-1].remark, *ends]))
        yield from lines
    other_changes = [change for change in changes if not _is_in_moved_layer(change, overview.modules)]
    yield from _build_named_lines(other_changes, overview, unfold)


def _build_layers_line(start: str, run: Sequence[_MovedLayer]) -> Line:
    other_changes = [change for layer in run for change in layer.others]
    cosines = [cosine for layer in run for cosine in layer.cosines]
    inexact_changes = [change for layer in run for change in layer.wrong]
    remark = f"{plural(len(cosines), 'tensor')}, {_format_likeness(cosines, run[0].rounding)}"
    remark += _format_named_exceptions(inexact_changes)
    if other_changes:
        remark += f"; not {format_fqn(other_changes[0].fqn)}" + (
            f" and {len(other_changes) - 1:,} more" if len(other_changes) > 1 else ""
        )
    olds, news = ([getattr(layer, side) for layer in run] for side in ("old", "new"))
    return Line(
        (f"{_name_layers(start, olds)} → {_name_layers(start, news)}",),
        remark,
        "bad" if other_changes or inexact_changes else "",
    )


def _is_in_moved_layer(change: Change, modules: Mapping[str, _Layers]) -> bool:
    names = _split_move(change)
    if names is None:
        return False
    (stem, _, old), (_, _, new) = (name.rpartition(".") for name in names)
    layers = modules.get(f"{stem}." if stem else "")
    return layers is not None and any((layer.old, layer.new) == (int(old), int(new)) for layer in layers.moved)


def _split_into_runs(layers: Sequence[_MovedLayer]) -> Iterator[list[_MovedLayer]]:
    """Yield layers that kept their order, so that two lists of numbers pair them; exceptions stay separate."""
    run: list[_MovedLayer] = []
    for layer in layers:
        if run and (layer.old <= run[-1].old or layer.others or run[-1].others):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _name_layers(start: str, numbers: Sequence[int]) -> str:
    """Return `model.layers.{2,3}`"""
    return (format_fqn(start) if start else "") + fold.format_numbers(numbers)


def _format_likeness(cosines: Sequence[float | None], rounding: Rounding | None) -> str:
    """Return `bit for bit`, `exactly rounded`, or `similar (cosine 0.9794 or more)`"""
    exactly = "bit for bit" if rounding is None else _ROUNDINGS[rounding]
    similar = [cosine for cosine in cosines if cosine is not None]
    if not similar:
        return exactly
    equal = len(cosines) - len(similar)
    return f"similar (cosine {_floor_cosine(min(similar))} or more)" + (
        f", {equal:,} of them {exactly}" if equal else ""
    )


def _floor_cosine(cosine: float) -> str:
    """Format a cosine, not rounded up to 1."""
    return f"{math.floor(cosine * 10_000) / 10_000:.4f}"


def _build_unrelated_lines(changes: Sequence[Change], overview: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for each tensor outside of new layers, which have nothing before them, or for repeated layers."""
    rows = [change for change in changes if not overview.hides(change)]
    largest: dict[int, float] = {}
    for group in group_by(() if unfold else rows, lambda change: _LAYER_NUMBER.sub("#", change.fqn)).values():
        cosine = max(abs(change.values.cosine or 0.0) for change in group if change.values is not None)
        largest |= {id(change): math.ceil(cosine * 100) / 100 for change in group if len(group) > 1}
    lines = []
    for row in rows:
        text = f"unrelated (|cosine| {largest[id(row)]:.2f} or less)" if id(row) in largest else _describe_alone(row)
        lines.append(Line((format_fqn(row.fqn),), text, _choose_mood(row)))
    yield from lines if unfold else fold.fold_lines(lines)


def _list_new_layers(modules: Mapping[str, _Layers]) -> tuple[str, ...]:
    """Return the names of the new layers, with a dot at the end."""
    return tuple(f"{start}{number}." for start, layers in modules.items() for number in layers.new_numbers)


def _list_removed_layers(changes: Sequence[Change], modules: Mapping[str, _Layers]) -> list[Change]:
    """Return the removed tensors of layers that the line of the moved layers names."""
    names = tuple(f"{start}{number}." for start, layers in modules.items() for number in layers.lost_numbers)
    return [change for change in changes if change.status is Status.REMOVED and change.fqn.startswith(names)]


def _has_other_values(change: Change) -> bool:
    return _get_kind(change) in (TransformationKind.MOVED, TransformationKind.UNRELATED)


def _build_adapter_lines(changes: Sequence[Change], overview: _Overview, _: bool) -> Iterator[Line]:
    """Yield a line for the updates of each rank and scale: `q_proj, v_proj of 4 layers`."""
    make_key = attrgetter("transformation.rank", "transformation.alpha", "transformation.factor")
    for (rank, alpha, scale), rows in group_by(changes, make_key).items():
        updates = [_get_transformation(row) for row in rows]
        paths = [update.sources[0].split(".")[:-1] for update in updates]
        modules = ", ".join(map(format_fqn, dict.fromkeys(path[-1] for path in paths)))
        sizes = [update.relative_l2 for update in updates if update.relative_l2 is not None]
        ends = "..".join(dict.fromkeys(format_number(size, 2) for size in (min(sizes), max(sizes)))) if sizes else "-"
        text = f"r {rank}{_format_alpha(rank or 0, alpha, scale)}"
        unscaled = "" if scale is not None else " without the scale, which is not in adapter_config.json"
        text = f"{text}, ‖ΔW‖/‖W‖ {ends}{unscaled}"
        yield Line((f"LoRA on {modules} ({plural(len(updates), 'weight')})",), text)
        for row in rows:
            if _get_transformation(row).relative_l2 is None:
                yield Line((f"  {format_fqn(row.fqn)}",), f"has no norm{_format_new_not_finite(row)}", "bad")
    updated_names = {name for change in changes for name in _list_sources(change)}
    unadapted = [change for change in overview.base_only if change.fqn not in updated_names]
    if unadapted:
        is_paired = any(change.before is not None and change.after is not None for change in overview.changes)
        content = "updates and replaced tensors" if is_paired else "updates"
        yield Line(
            (f"{plural(len(unadapted), 'other tensor')} of the base",),
            f"not in the adapter, which holds only {content}",
        )


def _format_alpha(rank: int, alpha: float | None, scale: float | None) -> str:
    """Return `, alpha 8`, and the scale unless this is alpha / rank, as with `use_rslora`."""
    if alpha is None or scale is None:
        return ""
    is_usual = math.isclose(alpha, rank * scale)
    return f", alpha {format_number(alpha, 6)}{'' if is_usual else f', scale {format_number(scale, 4)}'}"


def _build_merged_lines(changes: Sequence[Change], overview: _Overview, __: bool) -> Iterator[Line]:
    """Yield a line for the merged updates of each rank and scale, and for each weight that is not as merged."""
    inexact_changes = [change for change in changes if _has_exceptions(change)]
    exact = [change for change in changes if not _has_exceptions(change)]
    for text, rows in group_by(exact, lambda change: _describe_merged(_get_transformation(change))).items():
        modules = ", ".join(dict.fromkeys(format_fqn(row.fqn.split(".")[-2 if "." in row.fqn else -1]) for row in rows))
        largest = max(_get_transformation(row).max_abs or 0.0 for row in rows)
        deviation_text = f", within {format_number(largest, 1)}" if largest else ", exactly"
        yield Line((f"{modules} ({plural(len(rows), 'weight')})",), f"{text}{deviation_text}")
    yield from _build_named_lines(inexact_changes, overview, False)


def _describe_merged(transformation: Transformation) -> str:
    rank = "" if transformation.rank is None else f" (r {transformation.rank})"
    return f"= {name_merged(transformation)}{rank}"


#: Start of the names in an adapter saved by peft, and part of names that only a whole model has.
_ADAPTER_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer.weight"


def _list_base_only(changes: Sequence[Change]) -> list[Change]:
    """Return the removed tensors, if the checkpoint after is an adapter and not a whole model with adapters.

    An adapter may also have tensors that replace tensors of the base (`modules_to_save`).
    """
    adapters = [d for c in changes if (d := c.transformation) is not None and d.kind is TransformationKind.ADAPTER]
    rows = [after for change in changes if (after := change.after) is not None]
    is_adapter = all(change.before is None or change.after is None for change in changes) or (
        all(row.fqn.startswith(_ADAPTER_PREFIX) and _BASE_LAYER not in row.fqn for row in rows)
    )
    return [change for change in changes if change.status is Status.REMOVED] if adapters and is_adapter else []


def _build_quantized_lines(changes: Sequence[Change], _: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for the weights of each type, layout and scales, with the range of their errors.

    A weight with a much larger error than the rest is named, and each weight if lines are unfolded.
    """
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        transformation = change.transformation
        if transformation is not None and (quantization := transformation.quantization) is not None:
            groups.setdefault((quantization.dtype, quantization.codes, _describe_rule(quantization)), []).append(change)
    for (dense, codes, rule), rows in groups.items():
        transformation = rows[0].transformation
        assert transformation is not None and transformation.quantization is not None  # noqa: S101, PT018 - so are they grouped
        inexact_rows = [row for row in rows if _has_exceptions(row)]
        exact_rows = [row for row in rows if not _has_exceptions(row)]
        errors = [_get_error(row) for row in exact_rows]
        ends = "..".join(dict.fromkeys(format_number(size, 2) for size in (min(errors), max(errors)))) if errors else ""
        library = _LIBRARIES[transformation.quantization.layout]
        coded_type = f"{codes}{f' ({library})' if library else ''}"
        types = (dense, coded_type) if transformation.kind is TransformationKind.QUANTIZED else (coded_type, dense)
        text = f"{len(rows):,} {transformation.kind.value} {' → '.join(types)}"
        deviation_text = f"{len(inexact_rows):,} very different from the weight {_name_dense_side(transformation)}"
        parts = [f"{rule}: rel. error {ends}" if errors else rule, deviation_text]
        yield Line((text,), "; ".join(parts[: 2 if inexact_rows else 1]))
        limit = _OUTLIER_RATIO * sorted(errors)[len(errors) // 2] if errors else math.inf
        outliers = [row for row in exact_rows if _get_error(row) > limit]
        bad = [*inexact_rows, *outliers]
        for row in rows if unfold else bad[:_MAX_NAMED]:
            mood = "bad" if _has_exceptions(row) or _get_error(row) > limit else ""
            yield Line((f"  {format_fqn(row.fqn)}",), f"rel. error {format_number(_get_error(row), 2)}", mood)
        if len(bad) > _MAX_NAMED and not unfold:
            yield Line((f"  … and {len(bad) - _MAX_NAMED:,} more",), "", "dim")


_LIBRARIES = {
    QuantizedLayout.SCALED: "",
    QuantizedLayout.BITSANDBYTES: "bitsandbytes",
    QuantizedLayout.GPTQ: "GPTQ",
    QuantizedLayout.AWQ: "AWQ",
    QuantizedLayout.AWQ_GEMV: "AWQ",
    QuantizedLayout.PACKED: "compressed-tensors",
    QuantizedLayout.NVFP4: "NVFP4",
    QuantizedLayout.MXFP4: "MXFP4",
    QuantizedLayout.MXFP4_EXPERTS: "MXFP4",
    QuantizedLayout.GGUF: "GGUF",
}


def _get_error(change: Change) -> float:
    return _get_transformation(change).relative_l2 or 0.0


def _describe_quantized(transformation: Transformation) -> str:
    assert transformation.quantization is not None  # noqa: S101 - so are they built
    side, rule = _name_dense_side(transformation), _describe_rule(transformation.quantization)
    deviation_text = f"is very different from the weight {side}: " if transformation.exceptions else ""
    return f"{deviation_text}{rule}: rel. error {format_number(transformation.relative_l2, 2)}"


def _name_dense_side(transformation: Transformation) -> str:
    return (
        "in the first checkpoint" if transformation.kind is TransformationKind.QUANTIZED else "in the second checkpoint"
    )


def _describe_rule(quantization: Quantization) -> str:
    """Return `dequantized with scales (a scale for each 128 values of a row)`"""
    if quantization.layout is QuantizedLayout.GGUF:
        return f"dequantized in blocks of {quantization.block[0]} values"
    factors = " and a factor for each input channel" if quantization.has_channel_factors else ""
    block = _format_block(quantization.block, quantization.shape)
    return f"dequantized with {quantization.scales} ({block}){factors}"


def _format_block(block: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return `one scale`, or `a scale for each` of `row`, `128 values of a row` or `128 × 128`."""
    if len(block) == 1:
        return f"a scale for each {block[0]} values"
    if block == shape:
        return "one scale"
    if block[0] > 1:
        return f"a scale for each {block[0]} × {block[1]}"
    return "a scale for each row" if block[1] == shape[-1] else f"a scale for each {block[1]} values of a row"


def _build_swap_lines(changes: Sequence[Change], overview: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for each pair of tensors outside of swapped layers."""
    outside_changes = [change for change in changes if not _is_in_moved_layer(change, overview.modules)]
    pairs = group_by(outside_changes, lambda change: (change.section, min(change.fqn, _list_sources(change)[0])))
    lines = [
        Line(
            (format_fqn(pair[0].fqn),),
            f"swapped with {format_fqn(name)}, {_format_likeness((), _find_rounding(pair))}"
            + _format_named_exceptions(pair),
            "bad" if "bad" in map(_choose_mood, pair) else "",
        )
        for pair in pairs.values()
        for name in _list_sources(pair[0])
    ]
    yield from lines if unfold else fold.fold_lines(lines)


def _list_sources(change: Change) -> tuple[str, ...]:
    return change.transformation.sources if change.transformation is not None else ()


def _find_rounding(changes: Sequence[Change]) -> Rounding | None:
    """Return the rounding of the first recognised changes that were rounded; None without rounding."""
    roundings = (_get_transformation(change).rounding for change in changes)
    return next((rounding for rounding in roundings if rounding is not None), None)


def _build_named_lines(changes: Sequence[Change], _: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for each tensor, or for equal changes of repeated layers."""
    lines = [Line((format_fqn(change.fqn),), _describe_alone(change), _choose_mood(change)) for change in changes]
    yield from lines if unfold else fold.fold_lines(lines)


def _describe_alone(change: Change) -> str:
    """Describe a change outside of its row, which has the shapes."""
    text = f"{_describe(change)}{_format_new_not_finite(change)}"
    if _get_kind(change) is not TransformationKind.RESIZED or change.before is None or change.after is None:
        return text
    return f"{format_shape(change.before.shape)} → {format_shape(change.after.shape)}: {text}"


def _format_new_not_finite(change: Change) -> str:
    """Return `, NaN 0 → 1`; empty without new NaN and infinities."""
    counts = [change.values] if change.values is not None and has_new_not_finite(change) else []
    return "".join(f", {text}" for text in describe_not_finite(counts))


def _choose_mood(change: Change) -> str:
    return "bad" if _has_exceptions(change) or has_new_not_finite(change) else ""


def _has_exceptions(change: Change) -> bool:
    return change.transformation is not None and bool(change.transformation.exceptions)


# --- fused tensors ---------------------------------------------------------------------------------------------------


def _describe_join(change: Change, transformation: Transformation) -> str:
    names = _shorten(change.fqn, transformation.sources)
    is_stack = transformation.kind in (TransformationKind.STACKED, TransformationKind.UNSTACKED)
    of = "the transposes of " if transformation.is_transposed else ""
    of_join = "transpose of " if transformation.is_transposed else ""
    sources_text = (
        f"stack of {of}{_format_stack(change, transformation.sources)}"
        if is_stack
        else f"{of_join}[{'; '.join(names)}]"
    )
    verb = "=" if change.status is Status.ADDED else "was split into"
    if transformation.blocks:
        unit = "row" if set(transformation.blocks) == {1} else "rows"
        sources_text += f" alternating, {_format_blocks(transformation.blocks)} {unit} each"
    if not transformation.exceptions:
        return f"{verb} {sources_text}{_format_rounding(transformation) or ', exactly'}"
    if len(transformation.differing) == 1:
        name = names[transformation.sources.index(transformation.differing[0])]
        listed_rows = _list_first_rows(transformation)
        noun = "column" if transformation.is_transposed and is_stack else "row"
        text = (
            f"{noun} {listed_rows} of {name} differs"
            if transformation.rows == 1
            else f"{transformation.rows:,} {noun}s of {name} differ"
        )
        return f"{verb} {sources_text}, but {text}" + ("" if transformation.rows == 1 else f" ({listed_rows})")
    return (
        f"{verb} {sources_text}, but {transformation.rows:,} rows of {len(transformation.differing):,} tensors differ"
    )


def _format_blocks(blocks: Sequence[int]) -> str:
    """Return `64`, or `128, 64 and 64`"""
    if len(set(blocks)) == 1:
        return str(blocks[0])
    return f"{', '.join(map(str, blocks[:-1]))} and {blocks[-1]}"


def _shorten(joined_name: str, names: Sequence[str]) -> list[str]:
    """Return the names without the modules and the last component that all share with the whole."""
    paths = [name.split(".") for name in names]
    joined_path = joined_name.split(".")
    start = 0
    while (
        all(len(path) > start + 1 and path[start] == joined_path[start] for path in paths)
        and len(joined_path) > start + 1
    ):
        start += 1
    end = 1 if all(path[-1] == joined_path[-1] and len(path) > start + 1 for path in paths) else 0
    return [format_fqn(".".join(path[start : len(path) - end])) for path in paths]


def _format_stack(change: Change, names: Sequence[str]) -> str:
    """Return `experts.{0..7}.w2.weight`, or `[experts.{0..7}.w1.weight; experts.{0..7}.w3.weight]`"""
    stack = change.after or change.before
    parts = len(names) // stack.shape[0] if stack is not None and stack.shape else 1
    if parts > 1:
        return f"[{'; '.join(_format_stack_of(names[n::parts]) for n in range(parts))}]"
    return _format_stack_of(names)


def _format_stack_of(names: Sequence[str]) -> str:
    if (names_text := _list_in_order(names)) is not None:
        return names_text
    folded_names = fold.fold_names(map(format_fqn, names))
    return folded_names[0] if len(folded_names) == 1 else f"{format_fqn(names[0])} … {format_fqn(names[-1])}"


def _list_in_order(names: Sequence[str]) -> str | None:
    """Return `experts.{0,1,10,11,2..9}.w1.weight`; None for names in the order of their only number, or others."""
    paths = [name.split(".") for name in names]
    if len({len(path) for path in paths}) > 1:
        return None
    differing_parts = [n for n, parts in enumerate(zip(*paths, strict=True)) if len(set(parts)) > 1]
    if len(differing_parts) != 1 or not all(path[differing_parts[0]].isdecimal() for path in paths):
        return None
    numbers = [int(path[differing_parts[0]]) for path in paths]
    if numbers == sorted(numbers):
        return None
    path = [
        *paths[0][: differing_parts[0]],
        "{" + ",".join(fold.list_runs(numbers)) + "}",
        *paths[0][differing_parts[0] + 1 :],
    ]
    return ".".join(path[n] if n == differing_parts[0] else format_fqn(path[n]) for n in range(len(path)))


_LINES: dict[TransformationKind, Callable[[Sequence[Change], _Overview, bool], Iterator[Line]]] = {
    **dict.fromkeys(TransformationKind, _build_named_lines),
    TransformationKind.CAST: _build_cast_lines,
    TransformationKind.MOVED: _build_move_lines,
    TransformationKind.SWAPPED: _build_swap_lines,
    TransformationKind.ADAPTER: _build_adapter_lines,
    TransformationKind.MERGED: _build_merged_lines,
    TransformationKind.QUANTIZED: _build_quantized_lines,
    TransformationKind.DEQUANTIZED: _build_quantized_lines,
    TransformationKind.UNRELATED: _build_unrelated_lines,
}
