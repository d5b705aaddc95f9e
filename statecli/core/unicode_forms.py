"""Normalize Unicode text in time proportional to its length.

`unicodedata.normalize` sorts the combining marks after a letter by insertion, so that 200,000 marks take a minute. A
text with more marks in a row than any language needs is not normalized. Source: Unicode Standard Annex 15, "Stream-Safe
Text Format", whose limit is 30.
"""

from __future__ import annotations

import unicodedata
from typing import Literal

#: Largest number of combining marks in a row in a text to normalize.
MAX_MARKS = 30


def normalize(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return the normalized text, or the text unchanged if too many combining marks follow each other."""
    return text if has_too_many_marks(text) else unicodedata.normalize(form, text)


def is_normalized(form: Literal["NFC", "NFKC"], text: str) -> bool:
    """Return whether normalization leaves the text unchanged. Return False for too many marks in a row."""
    return text.isascii() or (not has_too_many_marks(text) and unicodedata.normalize(form, text) == text)


def has_too_many_marks(text: str) -> bool:
    """Return whether a text has more than MAX_MARKS combining marks in a row."""
    if text.isascii():
        return False
    marks = {character for character in set(text) if _begins_with_mark(character)}
    count = 0
    for character in text if marks else "":
        count = count + 1 if character in marks else 0
        if count > MAX_MARKS:
            return True
    return False


def _begins_with_mark(character: str) -> bool:
    """Return whether a character's decomposition begins with a combining mark, as for U+0F73 and U+FF9E."""
    return unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) != 0
