"""Table of layers: a row for each layer, a column for each tensor that all layers have, and the outliers."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from statecli.browse.screen_state import ScreenModel
from statecli.core.escaping import escape_name
from statecli.core.model_state import Stats, TensorInfo, TensorKey
from statecli.core.units import format_number, join_names, plural
from statecli.report import fold
from statecli.report.layer_roles import Role

#: Widths in cells of the narrowest and of the widest column, and of the column with the numbers of the layers.
MIN_CELLS, MAX_CELLS, LAYER_CELLS = 9, 18, 8
#: Width in cells of ` ›`, the sign of hidden columns.
MORE_SIGN_CELLS = 2


class LayerMeasure(str, enum.Enum):
    """Quantity that the cells of the table show."""

    RMS = "RMS"
    MAX = "largest |value|"
    CHANGE = "change"


#: Measures of a single target.
VALUE_MEASURES = (LayerMeasure.RMS, LayerMeasure.MAX)


class LayerColumn(msgspec.Struct, frozen=True):
    """Column of the table: a tensor that each layer has.

    Attributes:
        name: Name after the number of the layer: `attn.q.weight`.
        title: The distinguishing part of the name: `q`.
        positions: Position of the tensor of each layer; None if the layer lacks it.
        rms: Root mean square by position, or the relative change.
        median_rms: Median of the layers.
        outliers: Text of each outlier, by position.
    """

    name: str
    title: str
    positions: tuple[int | None, ...]
    rms: dict[int, float | None]
    median_rms: float
    outliers: dict[int, str]


class UnusualCell(msgspec.Struct, frozen=True):
    """A cell of the table. Its kind is `outlier`, `nan`, `inf` or `nan/inf`, or "" if its values are usual."""

    row: int
    column: int
    kind: str


class LayerTable(msgspec.Struct, frozen=True):
    """Table of the layers whose names have the same start, such as `model.layers`."""

    title: str
    layers: tuple[int, ...]
    columns: tuple[LayerColumn, ...]
    measures: tuple[LayerMeasure, ...]

    def list_unusual(self, stats: Mapping[int, Stats]) -> list[UnusualCell]:
        """Return the unusual cells in the order of the layers: first all outliers, then all NaN and infinities."""
        cells = (
            UnusualCell(row, number, describe_unusual(column, row, stats))
            for row in range(len(self.layers))
            for number, column in enumerate(self.columns)
        )
        return sorted((cell for cell in cells if cell.kind), key=lambda cell: cell.kind != "outlier")

    def describe(self, cells: Sequence[UnusualCell]) -> str:
        """Return `1 outlier, 1 inf: layer 17 v_proj, layer 9 up`. The counts come first, as a line may be cut."""
        if not cells:
            return "no outlier, NaN or Inf"
        counts = Counter(cell.kind for cell in cells)
        numbers = ", ".join(
            plural(count, kind) if kind == "outlier" else f"{count:,} {kind}" for kind, count in counts.items()
        )
        names = [f"layer {self.layers[cell.row]} {self.columns[cell.column].title}" for cell in cells]
        return f"{numbers}: {join_names(names, 3)}"


def build_tables(
    tensors: Sequence[TensorInfo], roles: Iterable[Role], measures: tuple[LayerMeasure, ...] = VALUE_MEASURES
) -> tuple[LayerTable, ...]:
    """Return the tables of all roles (tensors that each layer has). Encoder and decoder layers get separate tables."""
    by_name = {tensor.key: position for position, tensor in enumerate(tensors)}
    groups: dict[tuple[str, str], list[tuple[str, Role]]] = {}
    for role in roles:
        _, numbers = fold.split_numbers(role.tensors[0])
        start, _, name_in_layer = fold.insert_numbers(role.tensors[0], ["\0", *map(str, numbers[1:])]).partition("\0")
        groups.setdefault((role.section, start), []).append((name_in_layer.lstrip("."), role))
    has_sections = len({section for section, _ in groups}) > 1
    return tuple(
        _build_table(f"{section}: {start}" if has_sections else start, entries, by_name, measures)
        for (section, start), entries in groups.items()
    )


def _build_table(
    title: str,
    entries: Sequence[tuple[str, Role]],
    by_name: Mapping[TensorKey, int],
    measures: tuple[LayerMeasure, ...],
) -> LayerTable:
    layers = sorted({layer for _, role in entries for layer in role.layers})
    titles = _shorten([name for name, _ in entries])
    columns = []
    for (name, role), short in zip(entries, titles, strict=True):
        position_by_layer = {
            layer: by_name[TensorKey(role.section, fqn)] for layer, fqn in zip(role.layers, role.tensors, strict=True)
        }
        columns.append(
            LayerColumn(
                name,
                short,
                tuple(position_by_layer.get(layer) for layer in layers),
                dict(zip(position_by_layer.values(), role.rms, strict=True)),
                role.median_rms,
                {by_name[key]: _describe_outlier(text, measures) for key, text in role.describe_outliers().items()},
            )
        )
    return LayerTable(title.rstrip("."), tuple(layers), tuple(columns), measures)


def _describe_outlier(text: str, measures: tuple[LayerMeasure, ...]) -> str:
    return text.replace(LayerMeasure.RMS.value, "change", 1) if LayerMeasure.CHANGE in measures else text


def _shorten(names: Sequence[str]) -> list[str]:
    """Shorten the names: cut their common end, then keep the fewest last components that distinguish the names."""
    parts = [name.split(".") for name in names]
    while len({entry[-1] for entry in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [entry[:-1] for entry in parts]
    for count in range(1, max(map(len, parts)) + 1):
        short = [".".join(entry[-count:]) for entry in parts]
        if len(set(short)) == len(short):
            break
    return short


def list_widths(table: LayerTable) -> list[int]:
    """Return the width of each column in terminal cells, including the space before the column."""
    return [min(max(MIN_CELLS, len(escape_name(column.title))), MAX_CELLS) + 1 for column in table.columns]


def choose_columns(table: LayerTable, width: int, cursor: int) -> range:
    """Return a range of columns that fits into `width` and contains `cursor`, with room for the hidden-columns sign."""
    width -= MORE_SIGN_CELLS
    widths = list_widths(table)
    first = 0
    while sum(widths[first : cursor + 1]) > width - LAYER_CELLS and first < cursor:
        first += 1
    last = first + 1
    while last < len(widths) and sum(widths[first : last + 1]) <= width - LAYER_CELLS:
        last += 1
    return range(first, last)


def format_cell(model: ScreenModel, column: LayerColumn, row: int, measure: LayerMeasure) -> str:
    """Return the text of a cell: a number, `nan` or `inf`. `!` comes before unusual values."""
    position = column.positions[row]
    if position is None:
        return ""
    kind = describe_unusual(column, row, model.stats)
    if measure is LayerMeasure.CHANGE:
        text = model.format_change(position)
    elif kind not in ("", "outlier"):
        text = kind
    else:
        text = format_number(_measure(column, position, measure, model.stats[position]), 3)
    return f"! {text}" if kind else text


def describe_unusual(column: LayerColumn, row: int, stats: Mapping[int, Stats]) -> str:
    """Return `outlier`, `nan`, `inf` or `nan/inf`, or "" for usual values."""
    position = column.positions[row]
    if position is None:
        return ""
    words = [name for name in ("nan", "inf") if getattr(stats.get(position), name, 0)]
    return "/".join(words) or ("outlier" if position in column.outliers else "")


def _measure(column: LayerColumn, position: int, measure: LayerMeasure, stats: Stats) -> float | None:
    if measure is LayerMeasure.RMS:
        return column.rms[position]
    ends = [abs(value) for value in (stats.min, stats.max) if value is not None]
    return max(ends, default=None)


def iter_medians(
    table: LayerTable, column_numbers: range, measure: LayerMeasure, stats: Mapping[int, Stats]
) -> Iterator[str]:
    """Yield the median of each shown column."""
    for number in column_numbers:
        column = table.columns[number]
        if measure is not LayerMeasure.MAX:
            yield format_number(column.median_rms, 3)
            continue
        values = sorted(
            value
            for position in column.positions
            if position is not None and (value := _measure(column, position, measure, stats[position])) is not None
        )
        yield format_number(values[len(values) // 2], 3) if values else ""
