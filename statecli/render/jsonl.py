"""`-f jsonl`: a JSON object a line, each with a `type`. The `target` comes first, then its rows, findings and notes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from statecli.core.json_text import encode_json
from statecli.render import RenderOptions, Sink
from statecli.render.json import is_list_of_structs
from statecli.report import Report


def write(report: Report, sink: Sink, options: RenderOptions) -> None:  # noqa: ARG001  # every output has the same signature
    document = report.document()
    lists: list[tuple[str, Iterable[msgspec.Struct]]] = []
    head = b'{"type":"target"'
    for field, key in zip(document.__struct_fields__, document.__struct_encode_fields__, strict=True):
        value = getattr(document, field)
        if is_list_of_structs(value):
            lists.append((key.removesuffix("s"), value))
        elif value is not msgspec.UNSET:
            head += b"," + encode_json(key) + b":" + encode_json(value)
    sink.utf8(head + b"}\n")
    for kind, items in lists:
        start = b'{"type":' + encode_json(kind) + b","
        for item in items:
            sink.utf8(start + encode_json(item)[1:] + b"\n")
