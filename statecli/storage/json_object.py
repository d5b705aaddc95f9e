"""JSON objects from untrusted files: safetensors headers and shard indexes.

As strict as serde_json, the parser of safetensors, because Python's parser is lenient: no repeated key, no lone
surrogate, no NaN or infinity. Other readers would refuse such a document or read it differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isfinite
from typing import Any

import msgspec

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use

#: Maximum number of lists and objects together. A safetensors header of 100 MB contains 5 million; 100 MB of `[],`
#: contain 33 million and take 2.5 GB of memory.
MAX_CONTAINERS = 6_000_000
#: Maximum number of values in a document. The largest header has 8 million; parsing a program of torch.export takes
#: half a microsecond for each value.
MAX_VALUES = 20_000_000
#: Escape sequence. Group 1 matches half a surrogate pair without its other half.
_ESCAPE = compile_on_use(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F]..)|.)", re.DOTALL)

#: Names of JSON types for a message without the value, because it may be secret.
_TYPE_NAMES = {list: "list", str: "string", bool: "boolean", type(None): "null"}


class Repeat(msgspec.Struct, frozen=True):
    """A repeated key, and the object in which the key is repeated."""

    owner: dict[str, Any]
    key: str


class ParsedObject(msgspec.Struct, frozen=True):
    """A JSON object, and all repeated keys in it and in inner objects. The last value of a repeated key counts."""

    document: dict[str, Any]
    repeats: list[Repeat]


def parse_unique_object(raw: bytes, label: str, *, allow_lone_surrogates: bool = False) -> dict[str, Any]:
    """Parse a JSON object like `parse_object`. Also raises MalformedError for a repeated key."""
    parsed = parse_object(raw, label, allow_lone_surrogates=allow_lone_surrogates)
    refuse_repeats(parsed.repeats, label)
    return parsed.document


def parse_object(raw: bytes, label: str, *, allow_lone_surrogates: bool = False) -> ParsedObject:
    """Parse a JSON object strictly, because Python's parser is lenient.

    With `allow_lone_surrogates`, a string may be a name that UTF-8 cannot encode, as statecli writes it. Raises
    MalformedError, with a message that begins with `label`, for another document.
    """
    import json

    repeats: list[Repeat] = []
    check_brackets(raw, label)
    try:
        text = raw.decode("utf-8")
        del raw
        document = json.loads(
            text,
            object_pairs_hook=lambda pairs: _build_object(pairs, repeats),
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
        )
    except UnicodeDecodeError as error:
        raise MalformedError(f"{label} is not valid UTF-8 near its byte {error.start}") from error
    except RecursionError as error:
        raise MalformedError(
            f"{label} has lists and objects that are nested too deeply for statecli to read"
        ) from error
    except ValueError as error:
        raise MalformedError(f"{label} is not valid JSON: {_describe_error(error)}") from error
    if type(document) is not dict:
        raise MalformedError(f"{label} is not a JSON object but a JSON {_TYPE_NAMES.get(type(document), 'number')}")
    if not allow_lone_surrogates:
        _refuse_lone_surrogate(text, label)
    return ParsedObject(document, repeats)


def check_brackets(raw: bytes, label: str) -> None:
    """Raise MalformedError for too many lists, objects or values, because these take memory and time."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MAX_CONTAINERS:
        raise MalformedError(
            f"{label} has {brackets} lists and objects in total, more than statecli's limit of {MAX_CONTAINERS}"
        )
    values = raw.count(b",")
    if values > MAX_VALUES:
        raise MalformedError(f"{label} has {values} values in total, more than statecli's limit of {MAX_VALUES}")


def refuse_repeats(repeats: Iterable[Repeat], label: str) -> None:
    """Raise MalformedError for the first repeated key."""
    for repeat in repeats:
        raise MalformedError(f"{label} has the key {quoting.quote(repeat.key)} twice; programs may read either value")


def get_field(document: object, *keys: str) -> Any:
    """Return the value at a path of keys in nested objects; None if a key is missing."""
    for key in keys:
        document = document.get(key) if type(document) is dict else None
    return document


def is_deeper(node: object, levels: int) -> bool:
    """Return whether lists and dicts in `node` are nested more than `levels` deep."""
    level = [node]
    for _ in range(levels + 1):
        level = [part for node in level for part in _list_parts(node)]
        if not level:
            return False
    return True


def _list_parts(node: object) -> Iterable[Any]:
    """Return the items of a list or dict; (None,) for an empty container, which counts as a level of nesting too."""
    if type(node) is dict:
        return node.values() or (None,)
    if type(node) is list:
        return node or (None,)
    return ()


def _build_object(pairs: list[tuple[str, Any]], repeats: list[Repeat]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeats.append(Repeat(result, key))
            seen.add(key)
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON value")


def _parse_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a float64, and some JSON readers refuse such a number")
    return number


def _describe_error(error: ValueError) -> str:
    text = str(error)
    if "BOM" in text:
        return "the text begins with a byte order mark"
    return "a number has more digits than Python reads" if "digits" in text else text


def _refuse_lone_surrogate(text: str, label: str) -> None:
    if "\\ud" not in text and "\\uD" not in text:
        return
    for escape in _ESCAPE.finditer(text):
        if escape[1]:
            raise MalformedError(f"{label} contains only half of a surrogate pair: the escape \\{escape[1]}")
