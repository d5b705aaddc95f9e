"""`-f json`: a document with a line for each tensor, so that people can read, grep and diff it too."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec

from statecli.core.json_text import encode_json, encode_json_lines
from statecli.render import RenderOptions, Sink
from statecli.report import Report, Rows

#: Number of rows that are encoded and written at once.
_ROWS_AT_ONCE = 128


def write(report: Report, sink: Sink, options: RenderOptions) -> None:  # noqa: ARG001  # every output has the same signature
    document = report.document()
    separator = b"{"
    for field, key in zip(document.__struct_fields__, document.__struct_encode_fields__, strict=True):
        value = getattr(document, field)
        if value is msgspec.UNSET:
            continue
        sink.utf8(separator + encode_json(key) + b": ")
        _write_value(value, sink)
        separator = b",\n "
    sink.utf8(b"}\n")


def _write_value(value: Any, sink: Sink) -> None:
    separator = b"[\n  "
    items = iter(value if is_list_of_structs(value) else ())
    while batch := list(islice(items, _ROWS_AT_ONCE)):
        sink.utf8(separator + encode_json_lines(batch, b",\n  "))
        separator = b",\n  "
    sink.utf8(b"]" if separator[:1] == b"," else encode_json([] if isinstance(value, Rows) else value))


def is_list_of_structs(value: object) -> bool:
    """Return whether each item of the value gets its own line. True for an empty tuple, whose item type is unknown."""
    first = next(iter(value), None) if isinstance(value, tuple) else None
    return isinstance(value, Rows) or value == () or isinstance(first, msgspec.Struct)
