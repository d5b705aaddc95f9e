"""Text of the panel: facts, values and bytes of a tensor, totals of a module, the difference with a second target."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING

import msgspec

from statecli import values
from statecli.browse.editor import describe_editor
from statecli.browse.peek import find_data, reads_automatically
from statecli.browse.screen_state import ListRow, ScreenModel
from statecli.core import record_dtypes, sizes
from statecli.core.errors import StateError
from statecli.core.escaping import escape_name, escape_sentence
from statecli.core.model_state import ByteRange, Stats, TensorInfo
from statecli.core.units import (
    format_count,
    format_fqn,
    format_kind,
    format_number,
    format_origin,
    format_shape,
    format_size,
    format_yes_no,
    plural,
)
from statecli.report.change_text import STATUS_LETTERS, describe_change

if TYPE_CHECKING:
    from statecli.browse.difference import Difference
    from statecli.values.preview import ValueHistogram

#: Smallest width of the panel in cells -> number of bytes on a line.
_HEX_WIDTHS = ((77, 16), (41, 8), (0, 4))
#: Fields of Stats for each line.
_STATS_LINES = (("min", "max"), ("mean", "std"), ("zeros",))
_BAR = "▏▎▍▌▋▊▉█"
#: Smallest size in bytes that is rounded in other lines.
_MIN_ROUNDED_BYTES = 1000
#: Largest number of names of a list in the panel.
_MAX_NAMES = 6


class PanelLine(msgspec.Struct, frozen=True):
    """A line of the panel: its text, without line breaks, and its style (`bold`, `dim`, `bad`, `good` or "")."""

    text: str
    style: str = ""


def describe_row(model: ScreenModel, row: ListRow, width: int, *, is_reading: bool = False) -> list[PanelLine]:
    """Return the lines of the panel for a row. No line is wider than the panel."""
    if row.tensor is None:
        lines = _describe_module(model, row)
    else:
        lines = _describe_tensor(model, row.tensor, width, is_reading=is_reading)
    return [part for line in lines for part in _wrap(line, width)]


def _wrap(line: PanelLine, width: int) -> Iterator[PanelLine]:
    if len(line.text) <= width:
        yield line
        return
    indent = "  " if line.style != "bold" else ""
    for text in textwrap.wrap(line.text, max(width, 8), subsequent_indent=indent, break_on_hyphens=False):
        yield PanelLine(text, line.style)


def _describe_module(model: ScreenModel, row: ListRow) -> Iterator[PanelLine]:
    node = row.node
    is_module = node is not None and node.prefix and not node.members
    yield PanelLine(escape_name(f"{node.prefix}*" if node is not None and is_module else row.label), "bold")
    if node is not None and node.members:
        of_each = len(node.members[0].positions)
        is_tensor = node.members[0].tensor is not None
        equal_noun = "tensors" if is_tensor else f"modules of {plural(of_each, 'tensor')} each"
        yield PanelLine(f"{len(node.members)} equal {equal_noun}")
    marked_count = model.count_marked(row.positions)
    if marked_count:
        yield PanelLine(f"{marked_count:,} marked")
    for sentence in model.unusual.list_sentences(row.positions):
        yield PanelLine(escape_sentence(sentence.text), "bad")
    if model.difference is not None and model.difference.summary and row.depth == 0:
        yield PanelLine(f"difference with {escape_name(model.difference.other_target)}", "bold")
        yield PanelLine(escape_sentence(model.difference.summary))
        yield PanelLine("")
    yield from model.remember(row, lambda: tuple(_describe_contents(model, row)))
    if model.difference is not None and model.difference.only_after:
        yield PanelLine("")
        yield PanelLine(f"only in {escape_name(model.difference.other_target)}", "bold")
        yield PanelLine(_list_names(model.difference.only_after))


def _describe_contents(model: ScreenModel, row: ListRow) -> Iterator[PanelLine]:
    tensors = [model.tensors[position] for position in row.positions]
    size = sizes.sum_bytes(tensors)
    share = size / model.total_bytes if model.total_bytes else None
    percent = "" if share is None else f", {'<0.1%' if 0 < share < 0.0005 else f'{share:.1%}'} of all"
    yield PanelLine(f"{plural(len(tensors), 'tensor')}, {format_size(size)}{percent}")
    kinds = {kind: sums for kind, sums in sizes.sum_by_kind(tensors).items() if sums.tensors}
    if len(kinds) > 1:
        yield PanelLine(f"{size:,} B")
    if size < sum(tensor.nbytes for tensor in tensors):
        yield PanelLine("(shared storage is counted once)", "dim")
    yield PanelLine("")
    for kind, sums in kinds.items():
        yield PanelLine(f"{kind:<12}{sums.tensors:>7,}{format_count(sums.elements):>7}{format_size(sums.bytes):>9}")
        if sums.bytes >= _MIN_ROUNDED_BYTES:
            yield PanelLine(f"{sums.bytes:>33,} B", "dim")
    yield PanelLine("")
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.nbytes
    for dtype, size in by_dtype.most_common():
        yield PanelLine(f"{escape_name(dtype):<26}{format_size(size):>9}")
    yield PanelLine("")
    yield PanelLine("largest", "bold")
    start = row.node.prefix if row.node is not None and not row.node.members else ""
    for tensor in nsmallest(_MAX_NAMES, tensors, key=lambda tensor: -tensor.nbytes):
        yield PanelLine(f"{format_size(tensor.nbytes):>8}  {escape_name(format_fqn(tensor.fqn.removeprefix(start)))}")


def _describe_tensor(model: ScreenModel, position: int, width: int, *, is_reading: bool) -> Iterator[PanelLine]:
    tensor = model.tensors[position]
    yield PanelLine(escape_name(model.get_name(position)), "bold")
    kind = format_kind(tensor)
    assumption_text = " (kind assumed)" if kind.endswith("?") else ""
    yield PanelLine(f"{kind.rstrip('?')}{assumption_text}, {escape_name(tensor.dtype)}, {format_shape(tensor.shape)}")
    exact = f" ({tensor.nbytes:,} B)" if tensor.nbytes >= _MIN_ROUNDED_BYTES else ""
    yield PanelLine(f"{plural(tensor.elements, 'element')}, {format_size(tensor.nbytes)}{exact}")
    owner = model.get_owner(position)
    if owner is not None and tensor.belongs_to is None:
        yield PanelLine(f"belongs to: {escape_name(format_fqn(owner))} (matched by order and shape)")
    yield from _describe_facts(tensor, is_class=model.state.traits.is_class)
    if model.difference is not None:
        yield PanelLine("")
        yield from _describe_difference(model.difference, position, is_reading=is_reading)
    yield PanelLine("")
    yield from _describe_values(model, position, width, is_reading=is_reading)


def _describe_facts(tensor: TensorInfo, *, is_class: bool) -> Iterator[PanelLine]:
    if tensor.damage is not None:
        yield PanelLine(f"unreadable: {escape_sentence(tensor.damage)}", "bad")
    facts = [
        ("layout", tensor.layout if tensor.layout != "strided" else None),
        ("device", tensor.device),
        ("requires_grad", format_yes_no(tensor.requires_grad)),
        ("persistent", format_yes_no(tensor.persistent)),
        ("in state_dict", format_yes_no(tensor.saved) if is_class else None),
        ("moves with model", format_yes_no(tensor.moves)),
        ("belongs to", tensor.belongs_to),
        ("note", tensor.note),
        ("computed from", tensor.derived),
    ]
    for name, value in facts:
        if value is not None:
            yield PanelLine(f"{name}: {escape_sentence(value)}")
    if tensor.tied_to:
        yield PanelLine(f"shares storage with: {_list_names(tensor.tied_to)}")
    if tensor.aliases:
        yield PanelLine(f"also reached as: {_list_names(tensor.aliases)}")
    if tensor.origin is not None:
        yield PanelLine(f"assigned at {escape_sentence(format_origin(tensor.origin))} (e: open in {describe_editor()})")
    if tensor.fix is not None:
        yield PanelLine("fix:", "bold")
        for text in tensor.fix.splitlines():
            yield PanelLine(f"  {escape_sentence(text)}")
    yield from _describe_places(tensor)


def _describe_places(tensor: TensorInfo) -> Iterator[PanelLine]:
    ranges = tensor.ranges
    for byte_range in ranges[:_MAX_NAMES]:
        if byte_range.path:
            yield PanelLine(f"file: {escape_name(byte_range.path)}", "dim")
            yield PanelLine(f"  {_describe_range(byte_range, tensor)}", "dim")
    if len(ranges) > _MAX_NAMES:
        yield PanelLine(f"  and {len(ranges) - _MAX_NAMES:,} more pieces", "dim")


def _describe_range(byte_range: ByteRange, tensor: TensorInfo) -> str:
    place = byte_range.place
    if place is None:
        return "in several pieces"
    packing_text = ", compressed" if byte_range.packing is not None and byte_range.packing.how == "deflate" else ""
    packing_text = ", inside a nested archive" if byte_range.is_archive else packing_text
    text = f"bytes {place.offset:,} to {place.offset + place.length:,} (0x{place.offset:x}){packing_text}"
    if tensor.data is not None and tensor.data.offset and byte_range == tensor.data.storage:
        text += f", from element {tensor.data.offset:,} on"
    return text


def _list_names(names: Sequence[str]) -> str:
    names_text = ", ".join(escape_name(format_fqn(name)) for name in names[:_MAX_NAMES])
    return names_text + (f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else "")


# --- values -----------------------------------------------------------------------------------------------------------


def _describe_values(model: ScreenModel, position: int, width: int, *, is_reading: bool) -> Iterator[PanelLine]:
    tensor, peek = model.tensors[position], model.peeks.get(position)
    if not tensor.ranges and tensor.data is None:
        yield PanelLine(explain_no_values(model, tensor), "dim")
        return
    stats = model.stats.get(position)
    if stats is not None:
        yield from _describe_stats(stats, peek.first_unusual if peek is not None else {})
        if position in model.unusual.outliers:
            yield PanelLine(escape_sentence(model.unusual.outliers[position]), "bad")
        if peek is not None and peek.histogram is not None:
            yield PanelLine("")
            yield from draw_histogram(peek.histogram, width)
    elif is_reading:
        yield PanelLine("reading …", "dim")
    elif not reads_automatically(tensor):
        yield PanelLine(f"s: read the statistics ({format_size(tensor.nbytes)})", "dim")
    if peek is None:
        return
    part = find_data(tensor)
    of_part = f" of its {part[0]}" if part is not None and part[0] else ""
    if peek.error is not None:
        yield PanelLine(escape_sentence(peek.error), "bad" if peek.raw is None else "dim")
    if peek.values:
        yield PanelLine("")
        yield PanelLine(f"first values{of_part}", "bold")
        yield from _format_values(peek.values, width)
    if peek.raw:
        yield PanelLine("")
        yield PanelLine(f"first bytes{of_part}", "bold")
        yield from format_hex(peek.raw, width)


def explain_no_values(model: ScreenModel, tensor: TensorInfo) -> str:
    """Return why a tensor has no values to read."""
    if model.state.traits.is_class:
        return "a class has only initial values; to see statistics, run statecli inspect --stats"
    if tensor.device == "meta":
        return "a meta tensor has no data"
    if record_dtypes.has_objects(tensor.dtype):
        return "the elements are Python objects, which statecli does not read"
    return "the values are not in the file"


def _describe_stats(stats: Stats, first_unusual: Mapping[str, tuple[int, ...]]) -> Iterator[PanelLine]:
    if stats.reason is not None:
        yield PanelLine(f"statistics: {escape_sentence(stats.reason)}", "dim")
    # Only a count above zero is red, so both counts share a line only if both are zero.
    counts = (("nan",), ("inf",)) if stats.nan or stats.inf else (("nan", "inf"),)
    for names in (*_STATS_LINES, *counts):
        texts = [f"{name} {_format_statistic(value)}" for name in names if (value := getattr(stats, name)) is not None]
        is_bad = len(names) == 1 and names != ("zeros",) and bool(getattr(stats, names[0]))
        if is_bad and names[0] in first_unusual:
            word = "NaN" if names[0] == "nan" else "Inf"
            texts.append(f"first {word} at {list(first_unusual[names[0]])}")
        if texts:
            yield PanelLine("".join(f"{text:<18}" for text in texts).rstrip(), "bad" if is_bad else "")


def _format_statistic(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def draw_histogram(histogram: ValueHistogram, width: int) -> Iterator[PanelLine]:
    """Yield a line for each bin: its lower edge, its number of values, and a bar."""
    largest = max(histogram.counts)
    room = max(4, min(width - 20, 60))
    for edge, count in zip(histogram.edges, histogram.counts, strict=False):
        eighths = -(-count * room * 8 // largest) if largest else 0
        bar = _BAR[-1] * (eighths // 8) + (_BAR[eighths % 8 - 1] if eighths % 8 else "")
        yield PanelLine(f"{format_number(edge, 3):>10} {format_count(count):>7} {bar}")


def _format_values(values: Sequence[int | float | complex], width: int) -> Iterator[PanelLine]:
    texts = [f"{value:.5g}" if isinstance(value, complex) else format_number(value, 5) for value in values]
    cell = max(map(len, texts)) + 2
    columns = max(1, width // cell)
    for start in range(0, len(texts), columns):
        yield PanelLine("".join(f"{text:>{cell}}" for text in texts[start : start + columns]))


def format_hex(raw: bytes, width: int) -> Iterator[PanelLine]:
    """Yield lines of bytes: offset, hexadecimal, and ASCII with a dot for any other byte."""
    size = next(size for min_width, size in _HEX_WIDTHS if width >= min_width)
    for start in range(0, len(raw), size):
        piece = raw[start : start + size]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        yield PanelLine(f"{start:04x}  {piece.hex(' '):<{size * 3 - 1}}  {text}")


# --- the difference ---------------------------------------------------------------------------------------------------


def _describe_difference(difference: Difference, position: int, *, is_reading: bool) -> Iterator[PanelLine]:
    yield PanelLine(f"difference with {escape_name(difference.other_target)}", "bold")
    change = difference.changes.get(position)
    if change is None or change.after is None:
        yield PanelLine("D removed: not in the second target", "bad")
        return
    if change.renamed_from is not None:
        yield PanelLine(f"R renamed to {escape_name(change.fqn)}")
    text = describe_change(change)
    if text:
        yield PanelLine(f"{STATUS_LETTERS[change.status]} {escape_sentence(text)}", "bad")
    outcome = difference.outcomes.get(position)
    if outcome is None:
        yield PanelLine("comparing …" if is_reading else "d: compare the values", "dim")
    elif isinstance(outcome, StateError):
        yield PanelLine(escape_sentence(str(outcome)), "bad")
    elif isinstance(outcome, values.pair_plan.NotCompared):
        yield PanelLine(f"values not compared: {escape_sentence(outcome.reason)}", "dim")
    elif not outcome.changed:
        yield PanelLine("values: identical", "good")
    else:
        yield PanelLine(f"values: {outcome.changed:,} of {outcome.elements:,} differ", "bad")
        numbers = [
            ("relative L2", outcome.relative_l2),
            ("max |Δ|", outcome.max_abs),
            ("mean |Δ|", outcome.mean_abs),
            ("cosine", outcome.cosine),
        ]
        share = difference.get_share_of_layer(position)
        if share is not None:
            numbers.insert(1, ("‖Δ‖/‖layer‖", share))
        for name, value in numbers:
            if value is not None:
                yield PanelLine(f"{name:<13}{format_number(value)}")
        if outcome.nan_before or outcome.nan_after:
            yield PanelLine(f"{'nan':<13}{outcome.nan_before:,} → {outcome.nan_after:,}", "bad")
        if outcome.inf_before or outcome.inf_after:
            yield PanelLine(f"{'inf':<13}{outcome.inf_before:,} → {outcome.inf_after:,}", "bad")
        if outcome.first is not None:
            yield PanelLine(f"{'first at':<13}{list(outcome.first)}")
        if outcome.reason is not None:
            yield PanelLine(escape_sentence(outcome.reason), "dim")
