"""Messages and documents use plain words: each phrase below is refused, with a better phrase."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "statecli").rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Phrases refused in every text of the program, also in comments, and the better words. Each begins at a word.
WORST = {
    r"told\b": "reported, shown; 'cannot be told' is 'inconclusive'",
    r"(?<!`)beside\b(?!`)": "next to; in addition to",
    r"held to\b": "checked against, compared with",
    r"anew\b": "again",
    # "there is no" is ordinary English, and None with a capital is a value of Python
    r"(?<!there )(?:is|are|was|were) no (?!longer)": "is not a",
    r"(?<!there )(?:is|are) (?-i:none)\b(?! of)": "is not one; does not exist",
}
#: Phrases refused in messages and documents.
PHRASES = {
    r"tells\b": "shows, reports",
    r"said\b": "reported, shown",
    r"(?:is|are) (?-i:none) of\b": "is not one of",
    r"ends? [012]\b": "exits with status",
    r"pretended\b": "a fake CUDA device",
    r"stays? behind\b": "left on the old device",
    r"looked through\b": "stripped the prefix",
    r"without a word\b": "silently",
    r"parcels?\b": "batch",
    r"in vain\b": "name the failure",
    r"(?:nobody|whoever)\b": "name the person or the program",
    r"whatever\b": "any, every; name the thing",
    r"what is\b": "name the thing",
    r"such a one\b": "name the thing",
    r"that is meant\b": "name the thing",
}


def compile_phrases(phrases):
    return {re.compile(rf"\b{phrase}", re.IGNORECASE): word for phrase, word in phrases.items()}


RULES, WORST_RULES = compile_phrases(WORST | PHRASES), compile_phrases(WORST)
#: Matches in each text where a rule matches: files without a match are not parsed.
ANY_RULE, ANY_WORST = (re.compile(rf"\b(?:{'|'.join(phrases)})", re.IGNORECASE) for phrases in (WORST | PHRASES, WORST))


@functools.cache
def sources():
    """Return (path, text) of the modules that may contain a phrase."""
    texts = [(path, path.read_text("utf-8")) for path in MODULES]
    return [(path, text) for path, text in texts if ANY_RULE.search(text)]


def strings(source):
    """Yield (line, text, whether the text is a docstring) of each string of a module."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in documented


def notes(source):
    """(line, text) of the docstrings and comments of a module."""
    yield from ((line, text) for line, text, is_docstring in strings(source) if is_docstring)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose(path):
    """(line, text) of a document without its blocks and spans of code."""
    in_code = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code:
            yield number, re.sub(r"`[^`]*`", "`code`", line)


def list_refused(path, texts, rules):
    """Return a line for each refused phrase in the texts."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {match[0].strip()!r}: write {word}"
        for line, text in texts
        if " " in text  # one word is a name, such as that of a note in JSON
        for rule, word in rules.items()
        if (match := rule.search(text))
    ]


def test_messages_use_plain_words():
    """Every string of the program but docstrings."""
    for path, source in sources():
        messages = ((line, text) for line, text, is_docstring in strings(source) if not is_docstring)
        assert not list_refused(path, messages, RULES)


def test_docstrings_and_comments_avoid_the_worst_words():
    """Contributors read docstrings and comments, and many of these texts become messages."""
    for path, source in sources():
        if ANY_WORST.search(source):
            assert not list_refused(path, notes(source), WORST_RULES)


def test_documents_use_plain_words():
    """The documents are the README and docs/, including the parts generated from the code."""
    assert not [line for path in DOCUMENTS for line in list_refused(path, prose(path), RULES)]


@pytest.mark.parametrize("text", ["it cannot be told", "x is no file", "lies beside it", "it ends 2", "in vain"])
def test_a_bad_phrase_is_found(text):
    assert list_refused(ROOT / "x", [(1, text)], RULES)


@pytest.mark.parametrize("text", ["x is no longer there", "there is no such file", "`model` is None", "not a file"])
def test_ordinary_phrase_is_not_refused(text):
    assert not list_refused(ROOT / "x", [(1, text)], RULES)
