"""Describe the transformation of a tensor, such as `transposed` or `= 0.5 × before`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from statecli.commands.diff.expectations import explain_beyond_merge, name_merged
from statecli.commands.diff.result import (
    Change,
    Quantization,
    Rounding,
    RowOrder,
    Status,
    Transformation,
    TransformationKind,
)
from statecli.core.quantized_layout_names import QuantizedLayout
from statecli.core.units import format_fqn, format_number, plural
from statecli.report import fold

ROUNDING_TEXTS = {
    Rounding.NEAREST: "exactly rounded",
    Rounding.TRUNCATED: "rounded towards zero",
    Rounding.STOCHASTIC: "rounded up or down",
    None: "represented without rounding",
}
#: Largest number of tensors that a line names.
MAX_NAMED = 3


def get_kind(change: Change) -> TransformationKind | None:
    """Return the kind of the recognised transformation, or None if none was recognised."""
    return change.transformation.kind if change.transformation is not None else None


def get_transformation(change: Change) -> Transformation:
    """Return the transformation of a recognised change."""
    assert change.transformation is not None  # noqa: S101 - checked by the callers
    return change.transformation


def has_exceptions(change: Change) -> bool:
    """Return True for a recognised change in which some elements do not fit the transformation."""
    return change.transformation is not None and bool(change.transformation.exceptions)


def is_exact_cast(change: Change) -> bool:
    """Return True for a recognised cast that fits all elements."""
    return get_kind(change) is TransformationKind.CAST and not has_exceptions(change)


def list_sources(change: Change) -> tuple[str, ...]:
    """Return the names of the tensors from which the tensor was made, or into which it was split."""
    return change.transformation.sources if change.transformation is not None else ()


def find_rounding(changes: Sequence[Change]) -> Rounding | None:
    """Return the rounding of the first change that was rounded, or None if no change was rounded."""
    roundings = (get_transformation(change).rounding for change in changes)
    return next((rounding for rounding in roundings if rounding is not None), None)


def describe_transformation(change: Change) -> str:
    """Describe the transformation of a tensor, without its name. Return "" for an exact cast, as a row shows dtypes."""
    return "" if change.transformation is None or is_exact_cast(change) else describe_recognised_change(change)


def make_fold_key(change: Change) -> str:
    """Return a text that is different for rows that must not share a line, because their transformations differ."""
    transformation = change.transformation
    if transformation is None:
        return ""
    kind, rounding = transformation.kind.value, transformation.rounding
    return f"{kind} {rounding} {bool(transformation.exceptions)} {transformation.factor}"


def describe_recognised_change(change: Change) -> str:
    """Describe the transformation of a recognised change, without the name of the tensor."""
    transformation = get_transformation(change)
    kind, cosine, factor = transformation.kind, transformation.cosine, transformation.factor
    rounding, exceptions = _format_rounding(transformation), _format_exceptions(transformation)
    source = format_fqn(transformation.sources[0]) if transformation.sources else ""
    if kind is TransformationKind.CAST:
        is_exact = not transformation.exceptions
        return ROUNDING_TEXTS[transformation.rounding] if is_exact else _format_beyond_rounding(change, transformation)
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
        return explain_beyond_merge(change) or describe_merged(transformation)
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
    return f"{text}, but {count_exceptions(transformation)} in {rows_text}"


def _list_first_rows(transformation: Transformation) -> str:
    return ", ".join(map(str, transformation.first_rows)) + (
        ", …" if transformation.rows > len(transformation.first_rows) else ""
    )


def _format_rounding(transformation: Transformation) -> str:
    return "" if transformation.rounding is None else f", {ROUNDING_TEXTS[transformation.rounding]}"


def _format_exceptions(transformation: Transformation) -> str:
    return f", but {count_exceptions(transformation)}" if transformation.exceptions else ""


def count_exceptions(transformation: Transformation) -> str:
    """Format the number of exceptions, as in `2 of 8,192 elements differ`."""
    verb = "differs" if transformation.exceptions == 1 else "differ"
    return f"{transformation.exceptions:,} of {transformation.elements:,} elements {verb}"


def _format_beyond_rounding(change: Change, transformation: Transformation) -> str:
    relative = change.values.relative_l2 if change.values is not None else None
    size = f", rel. change {format_number(relative, 2)}" if relative is not None else ""
    return f"{count_exceptions(transformation)} by more than rounding{size}"


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
            f"rel. change {format_number(transformation.relative_l2, 2)}, cosine {floor_cosine(transformation.cosine)}"
        )
        return f"{', '.join(texts)}; {size} in the {common_text}"
    if not transformation.exceptions:
        state = "equal" if transformation.rounding is None else ROUNDING_TEXTS[transformation.rounding]
        return f"{', '.join(texts)}; the {common_text} {'is' if common == 1 else 'are'} {state}"
    return f"{', '.join(texts)}; of the {common_text} {_format_rows(transformation, _name_index(axis))}"


def _format_places(transformation: Transformation, *, is_added: bool) -> str:
    """Format where rows were added or removed: `before row 50`, `from row 50 on`, or `in 2 places (…)`."""
    noun = _name_index(transformation.axis or 0)
    place_format = f"before {noun} {{}}" if is_added else f"from {noun} {{}} on"
    if not transformation.places:
        return place_format.format(transformation.place)
    place_texts = [
        f"{count:,} {place_format.format(place)}"
        for place, count in zip(transformation.places, transformation.counts, strict=True)
    ]
    ellipsis = ", …" if len(place_texts) > MAX_NAMED else ""
    return f"in {len(place_texts):,} places ({', '.join(place_texts[:MAX_NAMED])}{ellipsis})"


def _name_index(axis: int) -> str:
    return ("row", "column")[axis] if axis < 2 else "index"


def _count_indexes(axis: int, count: int, prefix: str = "") -> str:
    """Format a number of indexes of an axis: `32 rows`, `64 common columns`, `2 indexes of dimension 2`."""
    if axis < 2:
        return plural(count, prefix + _name_index(axis))
    return f"{count:,} {prefix}{'index' if count == 1 else 'indexes'} of dimension {axis}"


def _format_rows(transformation: Transformation, noun: str = "row") -> str:
    verb = "differs" if transformation.rows == 1 else "differ"
    nouns = noun if transformation.rows == 1 else f"{noun}es" if noun == "index" else f"{noun}s"
    return f"{transformation.rows:,} {verb} ({nouns} {_list_first_rows(transformation)})"


def floor_cosine(cosine: float) -> str:
    """Format a cosine rounded down, because rounding up could show 1."""
    return f"{math.floor(cosine * 10_000) / 10_000:.4f}"


def describe_merged(transformation: Transformation) -> str:
    """Format the sum that a merged tensor is equal to: `= before + 2 × B·A (r 8)`."""
    rank = "" if transformation.rank is None else f" (r {transformation.rank})"
    return f"= {name_merged(transformation)}{rank}"


def _describe_quantized(transformation: Transformation) -> str:
    assert transformation.quantization is not None  # noqa: S101 - set for these kinds
    side, rule = name_dense_side(transformation), describe_rule(transformation.quantization)
    deviation_text = f"is very different from the weight {side}: " if transformation.exceptions else ""
    return f"{deviation_text}{rule}: rel. error {format_number(transformation.relative_l2, 2)}"


def name_dense_side(transformation: Transformation) -> str:
    """Return the text that says in which checkpoint the weight is not quantized: `in the first checkpoint`."""
    return (
        "in the first checkpoint" if transformation.kind is TransformationKind.QUANTIZED else "in the second checkpoint"
    )


def describe_rule(quantization: Quantization) -> str:
    """Describe how a weight is dequantized: `dequantized with scales (a scale for each 128 values of a row)`."""
    if quantization.layout is QuantizedLayout.GGUF:
        return f"dequantized in blocks of {quantization.block[0]} values"
    factors = " and a factor for each input channel" if quantization.has_channel_factors else ""
    block = _format_block(quantization.block, quantization.shape)
    return f"dequantized with {quantization.scales} ({block}){factors}"


def _format_block(block: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Describe the values that share a scale: `one scale`, `a scale for each row`, `a scale for each 128 × 128`."""
    if len(block) == 1:
        return f"a scale for each {block[0]} values"
    if block == shape:
        return "one scale"
    if block[0] > 1:
        return f"a scale for each {block[0]} × {block[1]}"
    return "a scale for each row" if block[1] == shape[-1] else f"a scale for each {block[1]} values of a row"


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
    """Format the numbers of rows in alternating blocks: `64`, or `128, 64 and 64`."""
    if len(set(blocks)) == 1:
        return str(blocks[0])
    return f"{', '.join(map(str, blocks[:-1]))} and {blocks[-1]}"


def _shorten(joined_name: str, names: Sequence[str]) -> list[str]:
    """Shorten names: remove the first modules and the last part that all of them share with the joined tensor."""
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
    """Format the names of a stack: `experts.{0..7}.w2.weight`, or several such names in brackets."""
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
    """Fold names whose numbers do not ascend: `experts.{0,1,10,11,2..9}.w1.weight`. Return None for other names."""
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
