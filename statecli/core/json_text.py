"""Encode a value as JSON that is safe to print on a terminal."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from statecli.core import escaping

_ENCODER = msgspec.json.Encoder()


def encoded(value: Any) -> bytes:
    """JSON, with what a terminal would act on escaped. Lone surrogates, which UTF-8 cannot hold, are escaped too."""
    try:
        raw = _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=True, separators=(",", ":")).encode("ascii")
    if raw.isascii() and b"\x7f" not in raw:
        return raw
    return escaping.in_json(raw.decode("utf-8")).encode("utf-8")
