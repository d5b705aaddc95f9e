"""What was done to the tensors of a diff, in sentences: one for each cast, moved layer or fused weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from statecli.commands.diff.result import Change, Rounding, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.layers import split_moved_layer
from statecli.core.units import format_fqn, format_number, plural
from statecli.report import Group, Line, fold

#: Tensors with exceptions that are named.
_MAX_NAMED = 3
_ROUNDINGS = {
    Rounding.NEAREST: "exactly rounded",
    Rounding.TRUNCATED: "rounded towards zero",
    Rounding.STOCHASTIC: "rounded up or down (as stochastic rounding does)",
    None: "represented without rounding",
}


def build_transformation_group(changes: Sequence[Change], unfold: bool) -> Group | None:
    """Return the group of all transformations, a line each; None if none was recognised."""
    by_kind: dict[TransformationKind, list[Change]] = {}
    for change in changes:
        if change.transformation is not None:
            by_kind.setdefault(change.transformation.kind, []).append(change)
    if not by_kind:
        return None
    lines = [line for kind in TransformationKind for line in _LINES[kind](by_kind.get(kind, ()), changes, unfold)]
    count = sum(map(len, by_kind.values()))
    return Group("what was done", f"to {plural(count, 'tensor')}, checked on every element", tuple(lines))


def describe_transformation(change: Change) -> str:
    """Describe what was done to one tensor, without its name; the dtypes say all about a cast without exceptions."""
    done = change.transformation
    if done is None or (done.kind is TransformationKind.CAST and not done.exceptions):
        return ""
    return _describe(change)


def make_fold_key(change: Change) -> str:
    """Return a text by which rows with other transformations, or with exceptions, stay separate."""
    done = change.transformation
    return "" if done is None else f"{done.kind.value} {done.rounding} {bool(done.exceptions)} {done.factor}"


def _describe(change: Change) -> str:
    done = change.transformation
    assert done is not None  # noqa: S101 - checked by the callers
    kind = done.kind
    if kind is TransformationKind.CAST:
        return _format_beyond_rounding(change, done) if done.exceptions else _ROUNDINGS[done.rounding]
    if kind is TransformationKind.RESIZED:
        return _describe_resize(change, done)
    if kind is TransformationKind.MOVED:
        since = "" if done.cosine is None else f", changed since (cosine {done.cosine:.4g})"
        return f"= {format_fqn(done.sources[0])} before{since}"
    if kind is TransformationKind.SWAPPED:
        return f"swapped with {format_fqn(done.sources[0])}"
    if kind is TransformationKind.SCALED:
        return f"= {format_number(done.factor, 6)} × before"
    if kind is TransformationKind.TRANSPOSED:
        return "transposed"
    if kind is TransformationKind.ADAPTER:
        return f"LoRA update of {format_fqn(done.sources[0])}, ‖ΔW‖/‖W‖ {format_number(done.relative_l2, 2)}"
    if kind is TransformationKind.QUANTIZED:
        return f"rel. error {format_number(done.relative_l2, 2)} after × {done.sources[0]}"
    if kind is TransformationKind.UNRELATED:
        cosine = change.values.cosine if change.values is not None else None
        return f"unrelated to before (cosine {cosine or 0:.2f})"
    return _describe_join(change, done)


# --- casts -----------------------------------------------------------------------------------------------------------


def _build_cast_lines(changes: Sequence[Change], _: Sequence[Change], __: bool) -> Iterator[Line]:
    by_types: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        if change.before is not None and change.after is not None:
            by_types.setdefault((change.before.dtype, change.after.dtype), []).append(change)
    for (before, after), rows in by_types.items():
        wrong = [row for row in rows if row.transformation and row.transformation.exceptions]
        exact = Counter(row.transformation.rounding for row in rows if row.transformation and row not in wrong)
        parts = [f"{count:,} {_ROUNDINGS[rounding]}" for rounding, count in exact.items()]
        if wrong:
            parts.append(f"{len(wrong):,} not")
        text = f"{len(rows):,} cast {before} → {after}"
        yield Line((text,), "; ".join(parts) if len(parts) > 1 else parts[0].partition(" ")[2])
        for row in wrong[:_MAX_NAMED]:
            yield Line((f"  not rounded: {format_fqn(row.fqn)}",), _describe(row), "bad")
        if len(wrong) > _MAX_NAMED:
            yield Line((f"  … and {len(wrong) - _MAX_NAMED:,} more",), "", "dim")


def _format_beyond_rounding(change: Change, done: Transformation) -> str:
    relative = change.values.relative_l2 if change.values is not None else None
    size = f", rel. change {format_number(relative, 2)}" if relative is not None else ""
    return f"{done.exceptions:,} of {done.elements:,} elements differ by more than rounding{size}"


# --- sizes -----------------------------------------------------------------------------------------------------------


def _describe_resize(change: Change, done: Transformation) -> str:
    before, after = (side.shape or () for side in (change.before, change.after) if side is not None)
    axis = done.axis or 0
    noun = _name_axis(axis)
    changed = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    texts = [
        f"{plural(abs(after[n] - before[n]), _name_axis(n))} {'added' if after[n] > before[n] else 'removed'}"
        for n in changed
    ]
    common = min(before[axis], after[axis])
    if not done.exceptions:
        return f"{', '.join(texts)}; the {plural(common, 'common ' + noun)} {'is' if common == 1 else 'are'} equal"
    return f"{', '.join(texts)}; of the {plural(common, 'common ' + noun)} {_format_rows(done, noun)}"


def _name_axis(axis: int) -> str:
    return ("row", "column")[axis] if axis < 2 else f"index of dimension {axis}"


def _format_rows(done: Transformation, noun: str = "row") -> str:
    listed = ", ".join(map(str, done.first_rows))
    more = ", …" if done.rows > len(done.first_rows) else ""
    verb = "differs" if done.rows == 1 else "differ"
    return f"{done.rows:,} {verb} ({noun if done.rows == 1 else noun + 's'} {listed}{more})"


# --- names -----------------------------------------------------------------------------------------------------------


class _MovedLayers(NamedTuple):
    """Numbered layers of a module whose values came from other layers.

    `layers`: (number after, number before). `cosines`: one for each tensor, None if it is equal bit for bit.
    """

    start: str
    layers: list[tuple[int, int]]
    cosines: list[float | None]
    lost: set[int]
    new: set[int]

    def format_names(self, numbers: Iterable[int]) -> str:
        """`model.layers.{2,3}`"""
        return format_fqn(self.start) * bool(self.start) + fold.format_numbers(list(numbers))


def _find_moved_layers(changes: Sequence[Change]) -> list[_MovedLayers]:
    entries: dict[tuple[str, str], list[tuple[int, int, float | None]]] = {}
    for change in changes:
        names = _split_move(change)
        if names is not None:
            (stem, _, old), (_, _, new) = (name.rpartition(".") for name in names)
            cosine = change.transformation.cosine if change.transformation is not None else None
            entries.setdefault((f"{stem}." if stem else "", change.section), []).append((int(new), int(old), cosine))
    found = []
    for (start, section), moved in entries.items():
        layers = sorted({(new, old) for new, old, _ in moved})
        lost = _list_layers(changes, start, section, "before") - {old for _, old in layers}
        created = _list_layers(changes, start, section, "after") - {new for new, _ in layers}
        found.append(_MovedLayers(start, layers, [cosine for *_, cosine in moved], lost, created))
    return found


def _split_move(change: Change) -> tuple[str, str] | None:
    done = change.transformation
    is_move = done is not None and done.kind is TransformationKind.MOVED
    return split_moved_layer(done.sources[0], change.fqn) if done is not None and is_move else None


def _build_move_lines(changes: Sequence[Change], all_changes: Sequence[Change], unfold: bool) -> Iterator[Line]:
    for moved in _find_moved_layers(all_changes):
        olds, news = (moved.format_names(numbers) for numbers in zip(*[(b, a) for a, b in moved.layers], strict=True))
        remarks = [f"{plural(len(moved.cosines), 'tensor')}, {_format_likeness(moved.cosines)}"]
        if moved.lost:
            verb = "is" if len(moved.lost) == 1 else "are"
            remarks.append(f"{moved.format_names(sorted(moved.lost))} {verb} removed")
        if moved.new:
            verb = "is" if len(moved.new) == 1 else "are"
            remarks.append(f"{moved.format_names(sorted(moved.new))} {verb} new")
        yield Line((f"{olds} → {news}",), "; ".join(remarks))
    yield from _build_named_lines([change for change in changes if _split_move(change) is None], all_changes, unfold)


def _format_likeness(cosines: Sequence[float | None]) -> str:
    """`bit for bit`, or `changed since (cosine 0.97..0.999)`"""
    since = [cosine for cosine in cosines if cosine is not None]
    if not since:
        return "bit for bit"
    ends = "..".join(dict.fromkeys(f"{cosine:.4g}" for cosine in (min(since), max(since))))
    equal = len(cosines) - len(since)
    return f"changed since (cosine {ends})" + (f", {equal:,} of them bit for bit" if equal else "")


def _build_unrelated_lines(changes: Sequence[Change], all_changes: Sequence[Change], unfold: bool) -> Iterator[Line]:
    """Yield a line for each tensor outside of new layers: those have nothing before them."""
    new = tuple(f"{moved.start}{number}." for moved in _find_moved_layers(all_changes) for number in moved.new)
    yield from _build_named_lines([c for c in changes if not c.fqn.startswith(new)], all_changes, unfold)


def _list_layers(changes: Sequence[Change], start: str, section: str, side: str) -> set[int]:
    """Return the numbers of the layers below a module that one side has, and that the other has not or elsewhere."""
    numbers = (
        change.fqn.removeprefix(start).partition(".")[0]
        for change in changes
        if getattr(change, side) is not None
        and change.section == section
        and change.fqn.startswith(start)
        and (change.before is None or change.after is None or _has_other_values(change))
    )
    return {int(number) for number in numbers if number.isdigit()}


def _has_other_values(change: Change) -> bool:
    kinds = (TransformationKind.MOVED, TransformationKind.UNRELATED)
    return change.transformation is not None and change.transformation.kind in kinds


def _build_adapter_lines(changes: Sequence[Change], _: Sequence[Change], __: bool) -> Iterator[Line]:
    """Yield a line for the updates of each rank and scale: `q_proj, v_proj of 4 layers`."""
    groups: dict[tuple[int | None, float | None], list[Transformation]] = {}
    for change in changes:
        if (done := change.transformation) is not None:
            groups.setdefault((done.rank, done.factor), []).append(done)
    for (rank, scale), updates in groups.items():
        paths = [update.sources[0].split(".")[:-1] for update in updates]
        modules = ", ".join(map(format_fqn, dict.fromkeys(path[-1] for path in paths)))
        layers = {tuple(path[:-1]) for path in paths}
        sizes = [update.relative_l2 for update in updates if update.relative_l2 is not None]
        ends = "..".join(dict.fromkeys(format_number(size, 2) for size in (min(sizes), max(sizes))))
        text = f"r {rank}, alpha {format_number((rank or 0) * scale, 6)}" if scale is not None else f"r {rank}"
        unscaled = "" if scale is not None else " without the scale, which adapter_config.json does not say"
        yield Line((f"LoRA on {modules} of {plural(len(layers), 'module')}",), f"{text}, ‖ΔW‖/‖W‖ {ends}{unscaled}")


def _build_quantized_lines(changes: Sequence[Change], _: Sequence[Change], __: bool) -> Iterator[Line]:
    """Yield a line for the weights of each type, scale and shape of block, with the range of their errors."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for change in changes:
        done = change.transformation
        if done is not None and change.before is not None and change.after is not None:
            block = _format_block(done.blocks, change.after.shape or ())
            key = change.before.dtype, change.after.dtype, done.sources[0], block
            groups.setdefault(key, []).append(done.relative_l2 or 0.0)
    for (before, after, scales, block), errors in groups.items():
        ends = "..".join(dict.fromkeys(format_number(size, 2) for size in (min(errors), max(errors))))
        yield Line((f"{len(errors):,} quantized {before} → {after}",), f"rel. error {ends} after × {scales} ({block})")


def _format_block(block: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """`one scale`, `a scale for each row` or `a scale for each 128 × 128`"""
    if block == shape:
        return "one scale"
    return "a scale for each row" if block[0] == 1 else f"a scale for each {block[0]} × {block[1]}"


def _build_swap_lines(changes: Sequence[Change], all_changes: Sequence[Change], unfold: bool) -> Iterator[Line]:
    firsts: list[Change] = []
    seen: set[tuple[str, str]] = set()
    for change in changes:
        done = change.transformation
        if done is not None and (change.section, done.sources[0]) not in seen:
            seen.add((change.section, change.fqn))
            firsts.append(change)
    for line in _build_named_lines(firsts, all_changes, unfold):
        yield Line(line.cells, f"{line.remark}, bit for bit")


def _build_named_lines(changes: Sequence[Change], _: Sequence[Change], unfold: bool) -> Iterator[Line]:
    """Yield a line for each tensor, or for equal changes of repeated layers."""
    lines = [
        Line((format_fqn(change.fqn),), _describe(change), "bad" if _has_exceptions(change) else "")
        for change in changes
    ]
    yield from lines if unfold else fold.fold_lines(lines)


def _has_exceptions(change: Change) -> bool:
    return change.transformation is not None and bool(change.transformation.exceptions)


# --- fused tensors ---------------------------------------------------------------------------------------------------


def _describe_join(change: Change, done: Transformation) -> str:
    names = _shorten(change.fqn, done.sources)
    is_stack = done.kind in (TransformationKind.STACKED, TransformationKind.UNSTACKED)
    listed = f"stack of {_format_stack(done.sources)}" if is_stack else f"[{'; '.join(names)}]"
    verb = "=" if change.status is Status.ADDED else "was split into"
    if done.blocks:
        listed += f" alternating, {_format_blocks(done.blocks)} rows each"
    if not done.exceptions:
        return f"{verb} {listed}, exactly"
    if len(done.differing) == 1:
        name = names[done.sources.index(done.differing[0])]
        listed_rows = ", ".join(map(str, done.first_rows)) + (", …" if done.rows > len(done.first_rows) else "")
        text = f"row {listed_rows} of {name} differs" if done.rows == 1 else f"{done.rows:,} rows of {name} differ"
        return f"{verb} {listed}, but {text}" + ("" if done.rows == 1 else f" ({listed_rows})")
    return f"{verb} {listed}, but {done.rows:,} rows of {len(done.differing):,} tensors differ"


def _format_blocks(blocks: Sequence[int]) -> str:
    """`64`, or `128, 64 and 64`"""
    if len(set(blocks)) == 1:
        return str(blocks[0])
    return f"{', '.join(map(str, blocks[:-1]))} and {blocks[-1]}"


def _shorten(whole: str, names: Sequence[str]) -> list[str]:
    """Return the names without the modules and the last component that all share with the whole."""
    paths = [name.split(".") for name in names]
    own = whole.split(".")
    start = 0
    while all(len(path) > start + 1 and path[start] == own[start] for path in paths) and len(own) > start + 1:
        start += 1
    end = 1 if all(path[-1] == own[-1] and len(path) > start + 1 for path in paths) else 0
    return [format_fqn(".".join(path[start : len(path) - end])) for path in paths]


def _format_stack(names: Sequence[str]) -> str:
    lines = fold.fold_lines([Line((format_fqn(name),)) for name in names])
    return lines[0].cells[0] if len(lines) == 1 else f"{format_fqn(names[0])} … {format_fqn(names[-1])}"


_LINES: dict[TransformationKind, Callable[[Sequence[Change], Sequence[Change], bool], Iterator[Line]]] = {
    **dict.fromkeys(TransformationKind, _build_named_lines),
    TransformationKind.CAST: _build_cast_lines,
    TransformationKind.MOVED: _build_move_lines,
    TransformationKind.SWAPPED: _build_swap_lines,
    TransformationKind.ADAPTER: _build_adapter_lines,
    TransformationKind.QUANTIZED: _build_quantized_lines,
    TransformationKind.UNRELATED: _build_unrelated_lines,
}
