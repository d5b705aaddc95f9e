"""Find statements and types of TorchScript nested too deep for the stack of torch.jit.load's parser.

The parser and the compiler call themselves for each operator, call, index and bracket of an expression. torch 2.13
crashes at some thousands of them: at 5,000 unary minus signs, at 20,000 additions. Types are texts in the pickles too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Bomb
from statecli.pickle_scan.packed_weights import TYPE_TAG
from statecli.pickle_scan.script_code import CHARACTERS_PER_STEP, Strings
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Global, Obj

#: Largest number of operators, brackets and attributes in a statement; statements that torch writes have some tens.
MAX_LINKS = 2_000
#: Largest nesting of brackets in the text of a type; types that torch writes have fewer than ten.
MAX_TYPE_DEPTH = 200
_TYPE_TEXT = compile_on_use(rf"[\w.,\[\] ]{{{MAX_TYPE_DEPTH},}}", re.ASCII)
_TOKEN = compile_on_use(
    r"(?P<quote>'''|\"\"\"|['\"])|(?P<comment>#[^\n]*)|(?P<joined>\\\n)|(?P<line>\n)"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>[,:;])"
    r"|(?P<word>\b(?:if|and|or|not|is|in)\b)|(?P<operand>\d(?:[eE][-+]|[\w.])*|\w+)"
    r"|(?P<operator>[-+*/%|&^@~<>=!]|\.)"
)
#: Tokens after which an operator joins operands; after other tokens, such as a comma, the operator is the sign of a
#: number.
_JOINED = frozenset(["operand", "close", "quote", "operator", "word"])


def has_deep_statement(code: bytes, steps: Steps) -> bool:
    """Return True if a statement has more than MAX_LINKS operators and brackets. Takes time linear in the code.

    A statement ends at the end of a line outside of brackets, as in the parser of torch. Raises OutOfSteps.
    """
    if len(code) <= MAX_LINKS:
        return False
    steps.take(Budget.TEXT, len(code) // CHARACTERS_PER_STEP)
    text = code.decode("latin-1")
    strings = Strings(text, Steps())
    links = depth = place = 0
    previous = "line"
    while match := _TOKEN.search(text, place):
        kind = match.lastgroup or ""
        place = strings.find_end(match[0], match.start()) if kind == "quote" else match.end()
        if kind == "line" and not depth:
            links = 0
        if kind == "open" or kind == "word" or (kind == "operator" and previous in _JOINED):
            links += 1
        depth = max(0, depth + (kind == "open") - (kind == "close"))
        if links > MAX_LINKS:
            return True
        if kind not in ("comment", "joined") and not (kind == "line" and depth):
            previous = kind
    return False


def has_deep_type(text: str) -> bool:
    """Return True if brackets in the text of a type are nested more than MAX_TYPE_DEPTH deep."""
    for match in _TYPE_TEXT.finditer(text):
        depth = 0
        for bracket in re.findall(r"[\[\]]", match[0]):
            depth = max(0, depth + (1 if bracket == "[" else -1))
            if depth > MAX_TYPE_DEPTH:
                return True
    return False


def find_deep_types(calls: Iterable[Obj]) -> Iterator[Bomb]:
    """Yield the calls of a pickle that give torch.jit.load a too deeply nested type."""
    for call in calls:
        is_tag = type(call.cls) is Global and call.cls.qualified == TYPE_TAG
        if is_tag and any(has_deep_type(text) for text in call.args if type(text) is str):
            why = f"reads a type with more than {MAX_TYPE_DEPTH} nested brackets, which crashes torch.jit.load"
            yield Bomb(why, call.cls.position)
