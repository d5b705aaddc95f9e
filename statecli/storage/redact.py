"""Remove known secrets from text: the last filter before standard error, after URLs were masked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import lifetime

#: Replacement for a secret.
MARK = "…"
#: Minimum length in characters of a secret that is replaced in any text. Shorter secrets are masked only in URLs.
MIN_SECRET_CHARS = 6
#: Minimum length in characters of a secret that is also replaced inside a longer word.
MIN_INNER_CHARS = 10

#: Names of environment variables with secret values, and the minimum length of these values in characters.
_SECRET_VARIABLE = compile_on_use(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_KEY|_SAS", re.IGNORECASE)
_MIN_VALUE_CHARS = 8

#: Libraries whose loggers write URLs and headers.
_LOGGER_NAMES = (
    "urllib3 fsspec s3fs aiobotocore botocore boto3 gcsfs google aiohttp huggingface_hub "
    "adlfs azure msal requests requests_oauthlib httpx httpcore paramiko"
)
_LOGGERS = frozenset(_LOGGER_NAMES.split())

_VALUE_CHARACTER = r"[^\s\"'<>&;,()\[\]{}…]"
#: Text that looks like a secret; the group before the secret is kept.
_SECRET_PATTERNS = (
    re.compile(r"((?<![\w+.-])[a-z][\w+.-]*://)[^\s\"'<>/?@…]+(?=@)", re.IGNORECASE),
    re.compile(rf"((?:[?&]|%3F|%26)[\w.%~-]{{1,64}}?(?:=|%3D)){_VALUE_CHARACTER}+", re.IGNORECASE),
    re.compile(
        r"([\w-]*(?:signature|credential|token|secret|secret_?access_?key|password|passwd|api_?key)"
        rf"['\"]?\s*[=:>]\s*(?:b?['\"])?){_VALUE_CHARACTER}+",
        re.IGNORECASE,
    ),
    re.compile(r"(\b(?:Basic|Bearer|Digest|AWS4-HMAC-SHA256)\s+)[\w.~+/=-]{6,}"),
    re.compile(r"((?:set-)?cookie['\"]?\s*:\s*['\"]?)[^\r\n'\"]+", re.IGNORECASE),
    re.compile(r"()\b(?:hf_|ghp_|gho_|github_pat_|glpat-|ya29\.|AKIA|ASIA|eyJ)[\w.-]{12,}"),
)


class Secrets:
    """Secrets of this process.

    Attributes:
        certain: Words that are certainly secret.
        possible: Words that may be secret, because of their position.
        masked: URLs with secrets, and their masked names.
    """

    def __init__(self) -> None:
        self.certain: set[str] = set()
        self.possible: set[str] = set()
        self.masked: dict[str, str] = {}


def secrets() -> Secrets:
    """Return the secrets of this process."""
    return lifetime.for_process(Secrets)


def hide(*words: str, sure: bool = True) -> None:
    """Remove the words and their percent-encoded forms from later text; if not `sure`, from libraries' text only."""
    from urllib.parse import quote, unquote

    stored = secrets()
    for word in words:
        forms = (word, unquote(word), quote(word, safe=""))
        (stored.certain if sure else stored.possible).update(form for form in forms if len(form) >= MIN_SECRET_CHARS)


def mask_everywhere(url: str, name: str) -> None:
    """Replace the URL by the masked name in all text from now on."""
    secrets().masked[url] = name


def remove_secrets(text: str) -> str:
    """Return statecli's own text without known secrets."""
    masked = secrets().masked
    for url in sorted(masked, key=len, reverse=True):
        text = text.replace(url, masked[url])
    return _replace(text, secrets().certain)


def filter_logs() -> None:
    """Remove secrets from all logs of network libraries from now on, for every handler.

    Filters the records, because most loggers do not exist before the first request, and a filter applies to one logger.
    """
    import logging

    create = logging.getLogRecordFactory()
    if getattr(create, "is_filtered", False):
        return

    def create_filtered(*args: Any, **keywords: Any) -> logging.LogRecord:
        record = create(*args, **keywords)
        if record.name.partition(".")[0] in _LOGGERS:
            _clean(record)
        return record

    create_filtered.is_filtered = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(create_filtered)
    # Without a handler of the user, discard the logs, because statecli reports errors on stderr in one line.
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(logging.NullHandler())


def _clean(record: Any) -> None:
    import traceback

    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 - the error of another handler would show the arguments
        record.msg, record.args = f"{MARK} (a log message with wrong arguments)", ()
        return
    if record.exc_info and record.exc_info[1] is not None:
        text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    clean = scrub(text)
    if clean != text:
        record.msg, record.args, record.exc_info = clean, (), None


def _replace(text: str, words: Iterable[str]) -> str:
    for word in sorted(words, key=len, reverse=True):
        if word not in text:
            continue
        # A short secret is replaced only as a whole word: `format=models` hides no part of a longer word.
        pattern = re.escape(word) if len(word) >= MIN_INNER_CHARS else rf"(?<!\w){re.escape(word)}(?!\w)"
        text = re.sub(pattern, MARK, text)
    return text


def scrub(text: str) -> str:
    """Return a library's text without known secrets, secret environment variables and words that look secret."""
    values = [
        value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name) and len(value) >= _MIN_VALUE_CHARS
    ]
    text = _replace(remove_secrets(text), {*secrets().possible, *values})
    for pattern in _SECRET_PATTERNS:
        text = pattern.sub(rf"\1{MARK}", text)
    return text
