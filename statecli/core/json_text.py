"""Encode a value as JSON, safe to print on a terminal."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from statecli.core import escaping

_ENCODER = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """Return JSON with escapes for terminal control characters and for lone surrogates, which UTF-8 cannot encode."""
    try:
        encoded = _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=True, separators=(",", ":")).encode("ascii")
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded
    return escaping.escape_json(encoded.decode("utf-8")).encode("utf-8")
