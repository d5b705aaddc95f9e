"""Match names with globs such as `layers.{3,4}.*`, and with joined layers as statecli writes them: `layers.{0..3}`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from statecli.core.lazy_pattern import compile_on_use

_TOKEN = compile_on_use(
    r"\{(?P<items>[^{}]*)\}|(?P<wildcard>[*?])|\[(?P<negation>!?)(?P<set>\]?[^\]]*)\]|(?P<text>.)", re.S
)
_RANGE = compile_on_use(r"(?P<first>\d{1,6})\.\.(?P<last>\d{1,6})")


@lru_cache(maxsize=64)
def compile_name_pattern(pattern: str, *, ignores_case: bool = False) -> re.Pattern[str]:
    """Return the regular expression of a glob with braces. `{3}` matches the whole number 3, not a digit of `30`."""
    return re.compile(_translate(pattern), re.S | (re.I if ignores_case else 0))


def has_braces(pattern: str) -> bool:
    """Return True if a part of the pattern is in braces."""
    start = pattern.find("{")
    return start != -1 and "}" in pattern[start:]


def _translate(pattern: str) -> str:
    return "".join(map(_translate_token, _TOKEN.finditer(pattern)))


def _translate_token(token: re.Match[str]) -> str:
    if token["items"] is not None:
        return f"(?:{'|'.join(map(_translate_item, token['items'].split(',')))})"
    if token["wildcard"] is not None:
        return ".*" if token["wildcard"] == "*" else "."
    if token["set"]:
        characters = re.sub(r"([\\\[\]^&|~])", r"\\\1", token["set"])
        return f"[{'^' if token['negation'] else ''}{characters}]"
    return re.escape(token[0])


def _translate_item(item: str) -> str:
    numbers = _RANGE.fullmatch(item)
    if numbers is not None:
        blocks = _list_blocks(int(numbers["first"]), int(numbers["last"]))
        return rf"(?<![0-9])(?:{'|'.join(blocks) or '(?!)'})(?![0-9])"
    return rf"(?<![0-9]){item}(?![0-9])" if item.isascii() and item.isdigit() else _translate(item)


def _list_blocks(first: int, last: int) -> Iterator[str]:
    """Yield regular expressions that together match the numbers from first to last, in blocks: `8`, `9`, `1[0-9]`."""
    if first == 0 <= last:
        yield "0"
    first = max(first, 1)
    while first <= last:
        zeros = 0
        while first % 10 ** (zeros + 1) == 0 and first + 10 ** (zeros + 1) <= last + 1:
            zeros += 1
        yield f"{first // 10**zeros}{'[0-9]' * zeros}"
        first += 10**zeros
