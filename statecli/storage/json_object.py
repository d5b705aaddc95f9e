"""JSON objects from files nobody vouches for: safetensors headers and shard indexes.

As strict as serde_json, which safetensors itself uses, where Python's parser is lenient: no key twice, no lone
surrogate, no NaN or infinity. What is refused here, another reader would refuse or read differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from math import isfinite
from typing import Any

from statecli.core import quoting
from statecli.core.errors import MalformedError

#: Lists and objects together. 100 MB of safetensors header hold 5 million at most; 100 MB of `[],` hold 33 million and
#: take 2.5 GB of memory.
MAX_CONTAINERS = 6_000_000
#: An escape; group 1 where it is half a surrogate pair without its other half.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F]..)|.)", re.DOTALL)

#: What the root of a document is called, whose value may be anybody's secret.
_KINDS = {list: "list", str: "string", bool: "boolean", type(None): "null"}

#: A dict that set a key twice, and the key.
Repeat = tuple[dict[str, Any], str]


def object_of(raw: bytes, what: str) -> tuple[dict[str, Any], list[Repeat]]:
    """The object that `raw` spells, and every key set twice anywhere in it (the last one counts).

    Raises MalformedError, its message begun with `what`, for anything that is no JSON object.
    """
    repeats: list[Repeat] = []
    check_brackets(raw, what)
    try:
        text = raw.decode("utf-8")
        del raw
        document = json.loads(
            text,
            object_pairs_hook=lambda pairs: _pairs(pairs, repeats),
            parse_constant=_constant,
            parse_float=_float,
        )
    except UnicodeDecodeError as error:
        raise MalformedError(f"{what} is no valid UTF-8 near its byte {error.start}") from error
    except RecursionError as error:
        raise MalformedError(f"{what} nests too deep") from error
    except ValueError as error:
        raise MalformedError(f"{what} is no valid JSON: {_reason(error)}") from error
    if type(document) is not dict:
        raise MalformedError(f"{what} is no JSON object but a JSON {_KINDS.get(type(document), 'number')}")
    _no_lone_surrogate(text, what)
    return document, repeats


def check_brackets(raw: bytes, what: str) -> None:
    """Raise MalformedError where lists and objects would take more memory than those of any model."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MAX_CONTAINERS:
        raise MalformedError(f"{what} holds {brackets} brackets, more than the {MAX_CONTAINERS} of the largest model")


def refuse(repeats: Iterable[Repeat], what: str) -> None:
    """MalformedError for the first key that was set twice."""
    for _, key in repeats:
        raise MalformedError(f"{what} names {quoting.quoted(key)} twice: readers disagree on which counts")


def deeper(node: Any, levels: int) -> bool:
    """Whether lists and dicts stand inside one another more than `levels` deep in `node`."""
    level = [node]
    for _ in range(levels + 1):
        level = [part for node in level for part in _parts(node)]
        if not level:
            return False
    return True


def _parts(node: Any) -> Iterable[Any]:
    """Each container gives at least one part, so that an empty one counts as a level too."""
    if type(node) is dict:
        return node.values() or (None,)
    if type(node) is list:
        return node or (None,)
    return ()


def _pairs(pairs: list[tuple[str, Any]], repeats: list[Repeat]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeats.append((found, key))
            seen.add(key)
    return found


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number


def _reason(error: ValueError) -> str:
    text = str(error)
    if "BOM" in text:
        return "it begins with a byte order mark"
    return "a number too long to be one" if "digits" in text else text


def _no_lone_surrogate(text: str, what: str) -> None:
    if "\\ud" not in text and "\\uD" not in text:
        return
    for escape in _ESCAPE.finditer(text):
        if escape[1]:
            raise MalformedError(f"{what} holds \\{escape[1]}, half a surrogate pair, which is no text")
