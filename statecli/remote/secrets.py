"""What must not be shown, and text without it: the last gate before standard error, behind names that hold none."""

from __future__ import annotations

import os
import re

#: What stands where something is hidden.
MARK = "…"
#: Characters of the shortest word that is looked for in any text; shorter ones are found where a URL has them.
SHORTEST = 6

_known: set[str] = set()

#: Variables of the environment whose values are secret, by their names, and the characters of the shortest one.
_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|_SAS", re.IGNORECASE)
_SHORTEST_VALUE = 8

_END = r"[^\s\"'<>&;,()\[\]{}…]"
#: What looks like a secret wherever it stands; a group before it stays.
_LOOKS = (
    re.compile(r"((?<![\w+.-])[a-z][\w+.-]*://)[^\s\"'<>/?@…]+(?=@)", re.IGNORECASE),
    re.compile(rf"((?:[?&]|%3F|%26)[\w.%~-]{{1,64}}?(?:=|%3D)){_END}+", re.IGNORECASE),
    re.compile(
        rf"([\w-]*(?:signature|credential|token|secret|password|passwd|api_?key)['\"]?\s*[=:]\s*['\"]?){_END}+", re.I
    ),
    re.compile(r"(\b(?:Basic|Bearer|Digest|AWS4-HMAC-SHA256)\s+)[\w.~+/=-]{6,}"),
    re.compile(r"((?:set-)?cookie['\"]?\s*:\s*['\"]?)[^\r\n'\"]+", re.IGNORECASE),
    re.compile(r"()\b(?:hf_|ghp_|gho_|github_pat_|glpat-|ya29\.|AKIA|ASIA|eyJ)[\w.-]{12,}"),
)


def remember(*words: str) -> None:
    """These are shown nowhere from now on, as they are, and as a URL writes them."""
    from urllib.parse import quote, unquote

    for word in words:
        _known.update(one for one in (word, unquote(word), quote(word, safe="")) if one)


def without(text: str) -> str:
    """The text without what is known to be secret."""
    for word in sorted(_known, key=len, reverse=True):
        if len(word) >= SHORTEST and word in text:
            text = text.replace(word, MARK)
    return text


def scrubbed(text: str) -> str:
    """The same, also without the environment's secrets and whatever looks like one: for text that others wrote."""
    values = [value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= _SHORTEST_VALUE]
    text = without(text)
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MARK)
    for looks in _LOOKS:
        text = looks.sub(rf"\1{MARK}", text)
    return text
