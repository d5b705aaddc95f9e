"""Encode a value as JSON, safe to print on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from statecli.core import escaping

_ENCODER = msgspec.json.Encoder()


def encode_json(value: object) -> bytes:
    """Return JSON with escapes for terminal control characters and for lone surrogates, which UTF-8 cannot encode."""
    try:
        encoded = _ENCODER.encode(value)
    except UnicodeEncodeError:
        import json

        return json.dumps(msgspec.to_builtins(value), ensure_ascii=True, separators=(",", ":")).encode("ascii")
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded
    return escaping.escape_json(encoded.decode("utf-8")).encode("utf-8")


def encode_json_lines(values: Sequence[Any], separator: bytes) -> bytes:
    """Return the JSON of one or more values as `encode_json` writes it, with `separator` between the values."""
    try:
        lines = _ENCODER.encode_lines(values)
    except UnicodeEncodeError:
        lines = b""
    if lines and lines.isascii() and b"\x7f" not in lines:
        return lines[:-1].replace(b"\n", separator)  # JSON itself has no line break
    return separator.join(map(encode_json, values))
