"""Texts of Unicode are normalized in a time proportional to their length."""

from __future__ import annotations

import sys
import time
import unicodedata

import pytest

from statecli.core import unicode_forms

#: Marks to be sorted; some are letters for `unicodedata.combining`.
PAIRS = ["\u0315\u0300", "\u0f73", "\u0f75", "\u0f81", "\u0344\u0316", "\u0300\uff9e"]


@pytest.mark.parametrize("marks", PAIRS, ids=ascii)
@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_text_of_marks_is_not_sorted(form, marks):
    """Each pair is decomposed into marks in a wrong order; the text is not changed."""
    text, begin = "a" + marks * 100_000, time.process_time()
    assert unicode_forms.normalize(form, text) == text
    assert not unicode_forms.is_normalized(form, text)
    assert time.process_time() - begin < 5


def test_no_decomposition_begins_with_a_letter_and_goes_on_with_many_marks():
    """A decomposition that begins with a letter has fewer than 5 marks, so many marks begin with a mark."""
    longest = 0
    for number in range(sys.maxunicode + 1):
        if not unicodedata.decomposition(chr(number)):  # itself, or a Hangul syllable of letters
            continue
        decomposed = unicodedata.normalize("NFKD", chr(number))
        if not unicodedata.combining(decomposed[0]):
            longest = max(longest, sum(unicodedata.combining(part) != 0 for part in decomposed))
    assert longest < 5


@pytest.mark.parametrize(
    "text", ["abc", "\xe9", "e\u0301", "\ufb01", "\u212a", "e" + "\u0301" * 30, "\uff9e"], ids=ascii
)
def test_other_texts_are_normalized(text):
    assert unicode_forms.normalize("NFKC", text) == unicodedata.normalize("NFKC", text)
    assert unicode_forms.is_normalized("NFKC", text) == (unicodedata.normalize("NFKC", text) == text)
