"""What must not be shown, and text without it: the last gate before standard error, behind names that hold none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

#: What stands where something is hidden.
MARK = "…"
#: Characters of the shortest word that is looked for in any text; shorter ones are found where a URL has them.
SHORTEST = 6
#: Characters from which on a word is one inside others too.
LONG = 10

#: Words that are secret for sure, those that stood where a secret may stand, and URLs by their names.
_sure: set[str] = set()
_maybe: set[str] = set()
_urls: dict[str, str] = {}

#: Variables of the environment whose values are secret, by their names, and the characters of the shortest one.
_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|_SAS", re.IGNORECASE)
_SHORTEST_VALUE = 8

#: Whose loggers tell of URLs and headers.
_LOGS = (
    "urllib3 fsspec s3fs aiobotocore botocore boto3 gcsfs google aiohttp huggingface_hub "
    "adlfs azure msal requests requests_oauthlib httpx httpcore paramiko"
)
_LOGGERS = frozenset(_LOGS.split())

_END = r"[^\s\"'<>&;,()\[\]{}…]"
#: What looks like a secret wherever it stands; a group before it stays.
_LOOKS = (
    re.compile(r"((?<![\w+.-])[a-z][\w+.-]*://)[^\s\"'<>/?@…]+(?=@)", re.IGNORECASE),
    re.compile(rf"((?:[?&]|%3F|%26)[\w.%~-]{{1,64}}?(?:=|%3D)){_END}+", re.IGNORECASE),
    re.compile(
        r"([\w-]*(?:signature|credential|token|secret|secret_?access_?key|password|passwd|api_?key)"
        rf"['\"]?\s*[=:>]\s*(?:b?['\"])?){_END}+",
        re.IGNORECASE,
    ),
    re.compile(r"(\b(?:Basic|Bearer|Digest|AWS4-HMAC-SHA256)\s+)[\w.~+/=-]{6,}"),
    re.compile(r"((?:set-)?cookie['\"]?\s*:\s*['\"]?)[^\r\n'\"]+", re.IGNORECASE),
    re.compile(r"()\b(?:hf_|ghp_|gho_|github_pat_|glpat-|ya29\.|AKIA|ASIA|eyJ)[\w.-]{12,}"),
)


def remember(*words: str, sure: bool = True) -> None:
    """These are shown nowhere from now on, as they are and as URLs write them; the others in foreign text."""
    from urllib.parse import quote, unquote

    for word in words:
        forms = (word, unquote(word), quote(word, safe=""))
        (_sure if sure else _maybe).update(one for one in forms if len(one) >= SHORTEST)


def name(url: str, shown: str) -> None:
    """The URL is shown by its name, in whatever text it stands."""
    _urls[url] = shown


def forget() -> None:
    """Nothing is secret any more."""
    for known in (_sure, _maybe, _urls):
        known.clear()


def without(text: str) -> str:
    """The text, of ours, without what is known to be secret."""
    for url in sorted(_urls, key=len, reverse=True):
        text = text.replace(url, _urls[url])
    return _replaced(text, _sure)


def quiet() -> None:
    """What the libraries that ask servers log, wherever the user sends it, is without secrets from now on.

    Most of their loggers do not exist before the first request does, and a filter is of one logger alone.
    """
    import logging

    make = logging.getLogRecordFactory()
    if getattr(make, "is_quiet", False):
        return

    def made(*args: Any, **named: Any) -> logging.LogRecord:
        record = make(*args, **named)
        if record.name.partition(".")[0] in _LOGGERS:
            _clean(record)
        return record

    made.is_quiet = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(made)
    # What nobody has asked for is not written to stderr: what is wrong is said there in one line, by us.
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(logging.NullHandler())


def _clean(record: Any) -> None:
    import traceback

    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 - whoever writes it would show what they are
        record.msg, record.args = f"{MARK} (a text and arguments that do not fit it)", ()
        return
    if record.exc_info and record.exc_info[1] is not None:
        text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    clean = scrubbed(text)
    if clean != text:
        record.msg, record.args, record.exc_info = clean, (), None


def _replaced(text: str, words: Iterable[str]) -> str:
    for word in sorted(words, key=len, reverse=True):
        if word not in text:
            continue
        # `format=models` hides no part of a longer word.
        whole = re.escape(word) if len(word) >= LONG else rf"(?<!\w){re.escape(word)}(?!\w)"
        text = re.sub(whole, MARK, text)
    return text


def scrubbed(text: str) -> str:
    """The same, also without the environment's secrets and whatever looks like one: for text that others wrote."""
    values = [value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= _SHORTEST_VALUE]
    text = _replaced(without(text), {*_maybe, *values})
    for looks in _LOOKS:
        text = looks.sub(rf"\1{MARK}", text)
    return text
