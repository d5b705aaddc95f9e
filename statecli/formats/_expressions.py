"""Symbolic sizes in a program of torch.export, which loading it evaluates: are they sizes, or code?

`torch.export.load` gives each `expr_str` of the program's JSON to `sympy.sympify`, which is an `eval` with Python's own
functions at hand: `__import__('os').system(...)` runs there, without any pickle. What torch writes is `srepr` of an
expression, or the expression as text (torch 2.5 and older). Sources: torch/_export/serde/serialize.py of torch 2.13
(`_parse_sym_expr`), torch/utils/_sympy/functions.py, sympy/parsing/sympy_parser.py of sympy 1.14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

#: What expressions are made of, by the names that sympy and torch have for them.
_CALLED = frozenset(
    re.findall(
        r"\w+",
        """
        Symbol Dummy Integer Rational Float Add Mul Pow Mod Max Min Abs And Or Not Xor Piecewise ExprCondPair
        Eq Ne Lt Le Gt Ge Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan floor ceiling
        FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural
        FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt
        RoundDecimal ToFloat Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor
        OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh OpaqueUnaryFn_sin OpaqueUnaryFn_sinh
        OpaqueUnaryFn_tan OpaqueUnaryFn_tanh OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan
        OpaqueUnaryFn_exp OpaqueUnaryFn_log OpaqueUnaryFn_asinh OpaqueUnaryFn_log2
        """,
    )
)
#: A number has no attribute, and so nothing behind its digits.
_TOKEN = re.compile(
    r"[A-Za-z]\w*|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])|'[\w.+-]*'|(?P<operator>[-+*/%<>=!&|~^,(])|\)", re.ASCII
)
_SPACE = re.compile(r"[ \t]*")


def expressions(document: Any) -> Iterator[str]:
    """Every text under an `expr_str`, wherever it stands."""
    stack = [document]
    while stack:
        node = stack.pop()
        if type(node) is dict:
            text = node.get("expr_str")
            if type(text) is str:
                yield text
            stack.extend(node.values())
        elif type(node) is list:
            stack.extend(node)


def is_plain(text: str) -> bool:
    """Whether it calls nothing but what expressions are made of: no attribute, no other function, no text but names."""
    at, opens = 0, True
    while (at := _SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # it matches nothing too
        token = _TOKEN.match(text, at)
        if token is None or (token[0] == "(" and not opens):
            return False
        at, opens = token.end(), token["operator"] is not None or token[0] in _CALLED
    return True
