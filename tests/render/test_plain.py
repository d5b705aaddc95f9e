"""Rows of plain text are aligned, and formatted column by column."""

from __future__ import annotations

import random

import pytest

from statecli.core.escaping import escape_line, escape_lines, escape_name
from statecli.core.units import format_number
from statecli.render import plain
from statecli.report import ReportColumn, Rows, Table

TEXTS = ("a", "été", "x\ny", "\t", "::error", "##[x]", "", "層", "w" * 120, "v" * 1500, "\x1b[1m", " ")
CELLS = (*TEXTS, None, 0, 7, True, 123456789, 0.0, -0.0, 1.0, 1e6, 1000000, float("nan"))


def format_row_by_row(table):
    """Return the lines, each cell formatted on its own."""
    texts = [[column.name for column in table.columns]]
    for row in table.rows:
        cells = ["-" if c is None else escape_name(c) if isinstance(c, str) else format_number(c) for c in row]
        texts.append(
            [cell or plain._EMPTY_NAMES.get(column.name, "") for cell, column in zip(cells, table.columns, strict=True)]
        )
    widths = [min(plain.MAX_PADDING, max(map(len, column))) for column in zip(*texts, strict=True)]
    sides = [">" if column.right else "<" for column in table.columns]
    return ["  ".join(f"{t:{s}{w}}" for t, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in texts]


@pytest.mark.parametrize("seed", range(40))
def test_columns_are_aligned_as_row_by_row(seed, monkeypatch):
    """The result is the same for any types, equal cells and characters in a batch of rows."""
    monkeypatch.setattr(plain, "_ROWS_AT_ONCE", 5)
    rng = random.Random(seed)  # noqa: S311  # reproducible, no secret
    columns = tuple(ReportColumn(name, right=rng.random() < 0.3) for name in ("kind", "fqn", "bytes", "tied_to"))
    pools = [rng.sample(CELLS, rng.randint(1, 3)) for _ in columns]
    rows = tuple(tuple(map(rng.choice, pools)) for _ in range(rng.randint(1, 30)))
    for table in (Table(columns, rows), Table(columns, Rows(tuple, rows))):
        lines = [line for batch in plain.align_rows(table) for line in batch]
        assert lines == format_row_by_row(table)
        assert escape_lines(lines) == "".join(f"{escape_line(line)}\n" for line in lines)
