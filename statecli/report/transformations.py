"""Transformations of the tensors of a diff, in sentences: one sentence for each cast, moved layer or fused weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from statecli.commands.diff.expectations import describe_lost_values
from statecli.commands.diff.result import Change, Rounding, Status, TransformationKind
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quantized_layout_names import QuantizedLayout
from statecli.core.units import format_fqn, format_number, format_shape, plural
from statecli.report import Group, Line, fold
from statecli.report.change_text import describe_not_finite, has_new_not_finite
from statecli.report.moved_layers import (
    ModuleLayers,
    MovedLayer,
    find_moved_layers,
    is_in_moved_layer,
    list_new_layers,
    list_removed_layers,
)
from statecli.report.transformation_text import (
    MAX_NAMED,
    ROUNDING_TEXTS,
    count_exceptions,
    describe_merged,
    describe_recognised_change,
    describe_rule,
    find_rounding,
    floor_cosine,
    get_kind,
    get_transformation,
    has_exceptions,
    list_sources,
    name_dense_side,
)

#: Heading of the group of recognised changes.
GROUP_HEADING = "recognised changes"
#: Largest number of lines of the group.
_MAX_LINES = 24
#: Smallest ratio between the error of a quantized weight and the median for which the weight is named.
_OUTLIER_RATIO = 3
_LAYER_NUMBER = compile_on_use(r"(?<![^.])[0-9]+(?![^.])")


def build_transformation_group(changes: Sequence[Change], unfold: bool, *, has_sections: bool) -> Group | None:
    """Return the group of lines about all transformations, or None if no transformation was recognised."""
    if all(change.transformation is None for change in changes):
        return None
    if has_sections:  # names are unique only within a section, and equal names of two sections are different layers
        changes = [_name_with_section(change) for change in changes]
    by_kind = group_by(changes, get_kind)
    modules = find_moved_layers(changes)
    overview = _Overview(changes, modules, list_new_layers(modules), _list_base_only(changes))
    lines = [line for kind in TransformationKind for line in _LINES[kind](by_kind.get(kind, ()), overview, unfold)]
    if not unfold and len(lines) > _MAX_LINES + 1:
        further_count = len(lines) - _MAX_LINES
        lines = [*lines[:_MAX_LINES], Line((f"… and {further_count:,} more (--all lists each)",), "", "dim")]
    parts = {name for change in changes for name in list_sources(change)}
    named_changes = set(map(id, (*overview.base_only, *list_removed_layers(changes, modules))))
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
    scope = "" if TransformationKind.CODES in by_kind else ", checked on every element"
    return Group(GROUP_HEADING, f"{share}{scope}", tuple(lines))


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
    """Return `id(change)` for each change that the lines of `build_transformation_group` describe completely.

    A tensor with exceptions keeps its row.
    """
    summarized_changes = [change for change in changes if _is_summarized(change)]
    parts = {(change.section, name) for change in summarized_changes for name in list_sources(change)}
    unpaired = [change for change in changes if change.status in (Status.ADDED, Status.REMOVED)]
    named_parts = [change for change in unpaired if change.key in parts]
    sections = group_by(changes, lambda change: change.section).values()
    removed_layers = [
        change
        for section_changes in sections
        for change in list_removed_layers(section_changes, find_moved_layers(section_changes))
    ]
    return frozenset(map(id, [*summarized_changes, *named_parts, *_list_base_only(changes), *removed_layers]))


def _is_summarized(change: Change) -> bool:
    is_whole = get_kind(change) in _SUMMARIZED and not has_exceptions(change)
    return is_whole and not _lost_values(change) and not has_new_not_finite(change)


def _lost_values(change: Change) -> bool:
    return get_kind(change) is TransformationKind.CAST and describe_lost_values(change) is not None


def _is_explained(change: Change, parts: Container[str]) -> bool:
    """Return True if the tensor's change was recognised, or if the tensor is part of a recognised tensor."""
    is_part = change.status in (Status.ADDED, Status.REMOVED) and change.fqn in parts
    return change.transformation is not None or is_part


def _name_with_section(change: Change) -> Change:
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


def _format_named_exceptions(changes: Sequence[Change]) -> str:
    """Format exceptions, as in `, but layers.1.up.weight: 1 of 8,192 elements differs`, or "" if there are none."""
    texts = [
        f"{format_fqn(change.fqn)}: {count_exceptions(get_transformation(change))}{_format_new_not_finite(change)}"
        for change in changes
        if has_exceptions(change)
    ]
    further_text = [f"{len(texts) - MAX_NAMED:,} more tensors differ"] if len(texts) > MAX_NAMED else []
    return f", but {'; '.join([*texts[:MAX_NAMED], *further_text])}" if texts else ""


# --- casts -----------------------------------------------------------------------------------------------------------


def _build_cast_lines(changes: Sequence[Change], _: _Overview, __: bool) -> Iterator[Line]:
    by_types: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        if change.before is not None and change.after is not None:
            by_types.setdefault((change.before.dtype, change.after.dtype), []).append(change)
    for (before, after), rows in by_types.items():
        inexact_rows = [row for row in rows if has_exceptions(row)]
        exact_rows = [row for row in rows if not has_exceptions(row)]
        exact = Counter(get_transformation(row).rounding for row in exact_rows)
        parts = [f"{count:,} {ROUNDING_TEXTS[rounding]}" for rounding, count in exact.items()]
        if inexact_rows:
            verb = "differs" if len(inexact_rows) == 1 else "differ"
            parts.append(f"{len(inexact_rows):,} {verb} by more than rounding")
        text = f"{len(rows):,} cast {before} → {after}"
        yield Line((text,), "; ".join(parts) if len(parts) > 1 else parts[0].partition(" ")[2])
        rows_with_lost_values = [row for row in exact_rows if _lost_values(row)]
        for kind, exceptions in (("not rounded", inexact_rows), ("out of range", rows_with_lost_values)):
            for row in exceptions[:MAX_NAMED]:
                text = describe_recognised_change(row) if kind == "not rounded" else describe_lost_values(row) or ""
                yield Line((f"  {kind}: {format_fqn(row.fqn)}",), text, "bad")
            if len(exceptions) > MAX_NAMED:
                yield Line((f"  … and {len(exceptions) - MAX_NAMED:,} more {kind}",), "", "dim")


# --- names -----------------------------------------------------------------------------------------------------------


class _Overview(msgspec.Struct, frozen=True):
    """Facts for the sentences: all changes, moved layers by module, new layers, and tensors that an adapter lacks."""

    changes: Sequence[Change]
    modules: Mapping[str, ModuleLayers]
    new_layers: tuple[str, ...]
    base_only: Sequence[Change]

    def hides(self, change: Change) -> bool:
        """Return True for an unrelated tensor of a new layer, because such a tensor does not replace an old tensor."""
        return get_kind(change) is TransformationKind.UNRELATED and change.fqn.startswith(self.new_layers)


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
    other_changes = [change for change in changes if not is_in_moved_layer(change, overview.modules)]
    yield from _build_named_lines(other_changes, overview, unfold)


def _build_layers_line(start: str, run: Sequence[MovedLayer]) -> Line:
    other_changes = [change for layer in run for change in layer.others]
    cosines = [cosine for layer in run for cosine in layer.cosines]
    inexact_changes = [change for layer in run for change in layer.wrong]
    remark = f"{plural(len(cosines), 'tensor')}, {_format_likeness(cosines, run[0].rounding)}"
    remark += _format_named_exceptions(inexact_changes)
    if other_changes:
        remark += f"; except {format_fqn(other_changes[0].fqn)}" + (
            f" and {len(other_changes) - 1:,} more" if len(other_changes) > 1 else ""
        )
    olds, news = ([getattr(layer, side) for layer in run] for side in ("old", "new"))
    return Line(
        (f"{_name_layers(start, olds)} → {_name_layers(start, news)}",),
        remark,
        "bad" if other_changes or inexact_changes else "",
    )


def _split_into_runs(layers: Sequence[MovedLayer]) -> Iterator[list[MovedLayer]]:
    """Yield runs of moved layers with ascending old numbers. A layer with other changes is a run of its own."""
    run: list[MovedLayer] = []
    for layer in layers:
        if run and (layer.old <= run[-1].old or layer.others or run[-1].others):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _name_layers(start: str, numbers: Sequence[int]) -> str:
    """Format the names of layers, as in `model.layers.{2,3}`."""
    return (format_fqn(start) if start else "") + fold.format_numbers(numbers)


def _format_likeness(cosines: Sequence[float | None], rounding: Rounding | None) -> str:
    """Describe how well tensors agree: `bit for bit`, `exactly rounded`, or `similar (cosine 0.9794 or more)`."""
    exactly = "bit for bit" if rounding is None else ROUNDING_TEXTS[rounding]
    similar = [cosine for cosine in cosines if cosine is not None]
    if not similar:
        return exactly
    equal = len(cosines) - len(similar)
    return f"similar (cosine {floor_cosine(min(similar))} or more)" + (
        f", {equal:,} of them {exactly}" if equal else ""
    )


def _build_unrelated_lines(changes: Sequence[Change], overview: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for each unrelated tensor. Repeated layers share a line, and tensors of new layers are left out."""
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


def _build_adapter_lines(changes: Sequence[Change], overview: _Overview, _: bool) -> Iterator[Line]:
    """Yield a line for the LoRA updates of each rank and scale: `LoRA on q_proj, v_proj (8 weights)`."""
    make_key = attrgetter("transformation.rank", "transformation.alpha", "transformation.factor")
    for (rank, alpha, scale), rows in group_by(changes, make_key).items():
        updates = [get_transformation(row) for row in rows]
        paths = [update.sources[0].split(".")[:-1] for update in updates]
        modules = ", ".join(map(format_fqn, dict.fromkeys(path[-1] for path in paths)))
        sizes = [update.relative_l2 for update in updates if update.relative_l2 is not None]
        ends = "..".join(dict.fromkeys(format_number(size, 2) for size in (min(sizes), max(sizes)))) if sizes else "-"
        text = f"r {rank}{_format_alpha(rank or 0, alpha, scale)}"
        unscaled = "" if scale is not None else " without the scale, which is not in adapter_config.json"
        text = f"{text}, ‖ΔW‖/‖W‖ {ends}{unscaled}"
        yield Line((f"LoRA on {modules} ({plural(len(updates), 'weight')})",), text)
        for row in rows:
            if get_transformation(row).relative_l2 is None:
                yield Line((f"  {format_fqn(row.fqn)}",), f"has no norm{_format_new_not_finite(row)}", "bad")
    updated_names = {name for change in changes for name in list_sources(change)}
    unadapted = [change for change in overview.base_only if change.fqn not in updated_names]
    if unadapted:
        is_paired = any(change.before is not None and change.after is not None for change in overview.changes)
        content = "updates and replaced tensors" if is_paired else "updates"
        yield Line(
            (f"{plural(len(unadapted), 'other tensor')} of the base",),
            f"not in the adapter, which contains only {content}",
        )


def _format_alpha(rank: int, alpha: float | None, scale: float | None) -> str:
    """Format `, alpha 8`. Add the scale if the scale is not alpha / rank, as with `use_rslora`."""
    if alpha is None or scale is None:
        return ""
    is_usual = math.isclose(alpha, rank * scale)
    return f", alpha {format_number(alpha, 6)}{'' if is_usual else f', scale {format_number(scale, 4)}'}"


def _build_merged_lines(changes: Sequence[Change], overview: _Overview, __: bool) -> Iterator[Line]:
    """Yield a line for the merged updates of each rank and scale, and for each weight that is not the merged sum."""
    inexact_changes = [change for change in changes if has_exceptions(change)]
    exact = [change for change in changes if not has_exceptions(change)]
    for text, rows in group_by(exact, lambda change: describe_merged(get_transformation(change))).items():
        modules = ", ".join(dict.fromkeys(format_fqn(row.fqn.split(".")[-2 if "." in row.fqn else -1]) for row in rows))
        largest = max(get_transformation(row).max_abs or 0.0 for row in rows)
        deviation_text = f", within {format_number(largest, 1)}" if largest else ", exactly"
        yield Line((f"{modules} ({plural(len(rows), 'weight')})",), f"{text}{deviation_text}")
    yield from _build_named_lines(inexact_changes, overview, False)


#: Start of the names in an adapter saved by peft, and part of names that only a whole model has.
_ADAPTER_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer.weight"


def _list_base_only(changes: Sequence[Change]) -> list[Change]:
    """Return the removed tensors if the second checkpoint is only an adapter, or [] for a model with adapters.

    An adapter may also have tensors that replace tensors of the base (`modules_to_save`).
    """
    adapters = [d for c in changes if (d := c.transformation) is not None and d.kind is TransformationKind.ADAPTER]
    rows = [after for change in changes if (after := change.after) is not None]
    is_adapter = all(change.before is None or change.after is None for change in changes) or (
        all(row.fqn.startswith(_ADAPTER_PREFIX) and _BASE_LAYER not in row.fqn for row in rows)
    )
    return [change for change in changes if change.status is Status.REMOVED] if adapters and is_adapter else []


def _build_quantized_lines(changes: Sequence[Change], _: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for the weights of a type, layout and kind of scales. The line has the range of their errors.

    A line names the weights whose error is much larger than the rest or, if lines are unfolded, each weight.
    """
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        transformation = change.transformation
        if transformation is not None and (quantization := transformation.quantization) is not None:
            groups.setdefault((quantization.dtype, quantization.codes, describe_rule(quantization)), []).append(change)
    for (dense, codes, rule), rows in groups.items():
        transformation = rows[0].transformation
        assert transformation is not None and transformation.quantization is not None  # noqa: S101, PT018 - set here
        inexact_rows = [row for row in rows if has_exceptions(row)]
        exact_rows = [row for row in rows if not has_exceptions(row)]
        errors = [_get_error(row) for row in exact_rows]
        ends = "..".join(dict.fromkeys(format_number(size, 2) for size in (min(errors), max(errors)))) if errors else ""
        library = _LIBRARIES[transformation.quantization.layout]
        coded_type = f"{codes}{f' ({library})' if library else ''}"
        types = (dense, coded_type) if transformation.kind is TransformationKind.QUANTIZED else (coded_type, dense)
        text = f"{len(rows):,} {transformation.kind.value} {' → '.join(types)}"
        deviation_text = f"{len(inexact_rows):,} very different from the weight {name_dense_side(transformation)}"
        parts = [f"{rule}: rel. error {ends}" if errors else rule, deviation_text]
        yield Line((text,), "; ".join(parts[: 2 if inexact_rows else 1]))
        limit = _OUTLIER_RATIO * sorted(errors)[len(errors) // 2] if errors else math.inf
        outliers = [row for row in exact_rows if _get_error(row) > limit]
        bad = [*inexact_rows, *outliers]
        for row in rows if unfold else bad[:MAX_NAMED]:
            mood = "bad" if has_exceptions(row) or _get_error(row) > limit else ""
            yield Line((f"  {format_fqn(row.fqn)}",), f"rel. error {format_number(_get_error(row), 2)}", mood)
        if len(bad) > MAX_NAMED and not unfold:
            yield Line((f"  … and {len(bad) - MAX_NAMED:,} more",), "", "dim")


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
    return get_transformation(change).relative_l2 or 0.0


def _build_swap_lines(changes: Sequence[Change], overview: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for each pair of swapped tensors. Pairs in swapped layers are left out."""
    outside_changes = [change for change in changes if not is_in_moved_layer(change, overview.modules)]
    pairs = group_by(outside_changes, lambda change: (change.section, min(change.fqn, list_sources(change)[0])))
    lines = [
        Line(
            (format_fqn(pair[0].fqn),),
            f"swapped with {format_fqn(name)}, {_format_likeness((), find_rounding(pair))}"
            + _format_named_exceptions(pair),
            "bad" if "bad" in map(_choose_mood, pair) else "",
        )
        for pair in pairs.values()
        for name in list_sources(pair[0])
    ]
    yield from lines if unfold else fold.fold_lines(lines)


def _build_named_lines(changes: Sequence[Change], _: _Overview, unfold: bool) -> Iterator[Line]:
    """Yield a line for each tensor. Equal changes of repeated layers share a line."""
    lines = [Line((format_fqn(change.fqn),), _describe_alone(change), _choose_mood(change)) for change in changes]
    yield from lines if unfold else fold.fold_lines(lines)


def _describe_alone(change: Change) -> str:
    """Describe a change that has no row. For a resized tensor, add the shapes, because no row shows the shapes."""
    text = f"{describe_recognised_change(change)}{_format_new_not_finite(change)}"
    if get_kind(change) is not TransformationKind.RESIZED or change.before is None or change.after is None:
        return text
    return f"{format_shape(change.before.shape)} → {format_shape(change.after.shape)}: {text}"


def _format_new_not_finite(change: Change) -> str:
    """Format new NaN and infinities, as in `, NaN 0 → 1`, or "" if their number did not grow."""
    counts = [change.values] if change.values is not None and has_new_not_finite(change) else []
    return "".join(f", {text}" for text in describe_not_finite(counts))


def _choose_mood(change: Change) -> str:
    return "bad" if has_exceptions(change) or has_new_not_finite(change) else ""


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
