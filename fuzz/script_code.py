"""torch's lexer and parser of TorchScript against the scan: a call of `torch.save` that torch compiles is reported.

A function of the same name is defined, as a hostile archive would, so that the name of a method alone says nothing.
Nothing is executed: the text is compiled, and the graph of the function is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch.jit.frontend import FrontendError

from statecli.pickle_scan import script_code
from statecli.pickle_scan.step_budget import Steps

CALL = 'torch.save("a", "b")'
#: Statements with the call, in which a piece may stand before it.
STATEMENTS = (
    CALL,
    f"y = x is not {CALL}",
    f"y = (1., {CALL})",
    'y = (x, ops.aten.save("a", "b"))',
    f"y = 1.0\n    {CALL}",
    f'y = {{"k": 1}}\n    {CALL}',
    f'assert True, "m"\n    {CALL}',
    f'y = "s" "t"\n    {CALL}',
    'y = x if 1 == 1. else x\n    torch . save ("a", "b")',
    f"if 1 not in [1]:\n        {CALL}",
    'y = getattr(torch, "save")("a", "b")',
    f"y = x[0:1]\n    {CALL}",
    f"y = 5 # type: int\n    {CALL}",
    'torch.autograd.save("a", "b")',
    f"y = torch.zeros([1], dtype=1 is not {CALL})",
    f"dtype = 1. is not {CALL}",
    f"layout = 1. if 1 is not {CALL} else 2.",
)
#: Tokens, and pieces of tokens, that may hide where the next one begins.
PIECES = (
    *(
        " ",
        "  ",
        "\t",
        "\n",
        "\n    ",
        "\\\n",
        "\r",
        "\f",
        "\v",
        "\x1c",
        "\xa0",
        "\0",
        "# c\n",
        "# type: int\n",
        "# type:",
    ),
    *("1", "0.", "1.", ".5", "1e5", "2j", "1.j", "0x1", "1_0", "nan", "_", "a1", "é", "...", ".", ",", ":", "=", ";"),
    *('"', "'", '"a"', "''", '""', "'''", '"""', "(", ")", "[", "]", "{", "}", "+", "-", "*", "**", "//", "@", "->"),
    *("is not", "not in", " is not", " not in ", "is", "not", "in", "and", "or", "if", "else", "lambda", "for", "as"),
    *(
        "None",
        "True",
        "pass",
        "del",
        "return",
        "global",
        "torch",
        "ops",
        "aten",
        "autograd",
        "x",
        "y",
        "<=>",
        "!=",
        "<<",
    ),
)
#: Where pieces are put most: next to these.
_PLACES = ("torch", "save", "ops", ".", "y", "not", "1")


def seeds() -> Iterator[bytes]:
    """Each statement, and each with each piece right before the call."""
    for statement in STATEMENTS:
        yield statement.encode()
        for piece in PIECES:
            yield statement.replace("torch", f"{piece}torch", 1).encode()
    for before in (
        "1.",
        "x.",
        "dtype = 1.",
        "memory_format=-1.",
        "layout = 1.e1",
        "(1.)",
        "[1.][0]",
        "torch.e.",
        "1.5e5",
    ):
        for word in ("is not", "not in", "is", "in", "and", "or"):
            yield f"y = {before} {word}{CALL}".encode()
            yield f"{before} {word}{CALL}".encode()
            yield f"{before} {word} {CALL}".encode()


def mutate(data: bytes, dice: random.Random, _: list[bytes]) -> bytes:
    """Insert a piece, drop some characters, or repeat a part, up to three times."""
    text = data.decode("utf-8", "replace")
    for _ in range(dice.choice((1, 1, 2, 2, 3))):
        at = dice.randrange(len(text) + 1)
        if dice.random() < 0.6:
            at = max(0, min(len(text), text.find(dice.choice(_PLACES)) + dice.choice((0, 0, 0, -1, 1, 4, 5))))
        kind = dice.random()
        if kind < 0.6:
            text = text[:at] + dice.choice(PIECES) + text[at:]
        elif kind < 0.8:
            text = text[:at] + text[at + dice.choice((1, 1, 2, 4)) :]
        else:
            start, end = sorted((at, dice.randrange(len(text) + 1)))
            text = text[:at] + text[start:end] + text[at:]
    return text.encode("utf-8", "replace")


def check(data: bytes) -> None:
    """Raise AssertionError if torch compiles a call of save in the statements, and the scan finds none."""
    text = data.decode("utf-8", "replace")
    source = f"def save(x):\n    return x\ndef f(x: int):\n    {text}\n    return 1\n"
    if compiles_save(source):
        assert list(script_code.find_calls(source.encode(), Steps())), f"torch calls save in {text!r}"


def compiles_save(source: str) -> bool:
    """Return True if torch's compiler takes the source and `f` calls torch.save."""
    try:
        return "aten::save" in str(torch.jit.CompilationUnit(source).f.graph)
    except (RuntimeError, AttributeError, UnicodeError, ValueError, FrontendError):
        return False
