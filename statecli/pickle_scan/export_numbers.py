"""Find numbers too large for Python to compute in a torch.export program: `_operator.pow(7, 10**10)` does not end.

Sizes of inputs and numbers computed from them are Python's integers, without a limit. Each is bounded by its bits,
through chains of nodes. Source: torch/_export/serde/serialize.py of torch 2.13 (`_SYM_OPS`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any

import msgspec

from statecli.pickle_scan.step_budget import Budget, Steps

#: Bits of the largest number that a node may compute, and of all numbers together.
_MAX_BITS, _MAX_TOTAL_BITS = 2**22, 2**28
#: Assumed bits of a size, of a number from a tensor, and of a float that is rounded.
_SIZE_BITS, _ITEM_BITS, _FLOAT_BITS = 20.0, 63.0, 1024.0
#: Prefixes of the Python functions that a graph calls on sizes and numbers.
ARITHMETIC = ("_operator.", "math.", "builtins.", "torch.sym_", "torch._sym_", "torch.utils._sympy.functions.")
#: Functions that raise to a power or shift; only the last part of the name, in lower case.
_POWER_FUNCTIONS, _SHIFT_FUNCTIONS = frozenset(["pow", "powbynatural"]), frozenset(["lshift"])
#: Functions whose result is not larger than their arguments.
_BOUNDED_FUNCTIONS = frozenset(
    ["getitem", "floordiv", "mod", "rshift", "and_", "or_", "xor", "neg", "pos", "abs", "sym_max", "sym_min", "gcd"]
)
_TEST_FUNCTIONS = frozenset(["not_", "gt", "ge", "lt", "le", "eq", "ne", "sym_not"])


class Misuse(msgspec.Struct, frozen=True):
    """Call of an operator with arguments that torch never writes, and why this is unsafe."""

    target: str
    why: str


def find_huge_numbers(graph: dict[str, Any], is_nested: bool, steps: Steps) -> Iterator[Misuse]:
    """Yield the first node of a graph that computes a number too large for Python. Raises OutOfSteps."""
    bits: dict[str, float] = {}
    total = 0.0
    for node in graph["nodes"]:
        steps.take(Budget.TEXT)
        target = node.get("target") if type(node) is dict else None
        if type(target) is not str:
            continue
        if target.startswith(ARITHMETIC):
            result = _bound_result(target.rpartition(".")[2].lower(), _read_operands(node, bits, is_nested))
            total += max(0.0, result - _FLOAT_BITS)
            if result > _MAX_BITS or total > _MAX_TOTAL_BITS:
                why = f"computes numbers of more than {_MAX_BITS:,} bits; the program may hang or fill the memory"
                yield Misuse(target, why)
                return
        else:
            result = _SIZE_BITS if target.startswith("torch.ops.aten.sym_") else _ITEM_BITS
        bits.update((name, result) for name in _list_outputs(node))


def _bound_result(operation: str, operands: list[float]) -> float:
    """Return an upper bound of the bits of an operation's result."""
    first, *others = operands or [1.0]
    if operation in _POWER_FUNCTIONS:
        return first * 2.0 ** min(sum(others), 64)
    if operation in _SHIFT_FUNCTIONS or operation == "round":  # `round(5, -10**10)` computes 10**10**10
        return first + 4 * 2.0 ** min(sum(others), 64) if others else max(first, _FLOAT_BITS)
    if operation in _TEST_FUNCTIONS:
        return 1.0
    if operation in _BOUNDED_FUNCTIONS:
        return max(operands, default=1.0)
    if operation in ("add", "sub"):
        return max(operands, default=1.0) + 1
    return max(sum(operands), _FLOAT_BITS if operation != "mul" else 0.0)


def _read_operands(node: dict[str, Any], bits: dict[str, float], is_nested: bool) -> list[float]:
    operands: list[float] = []
    inputs = node.get("inputs")
    for entry in inputs if type(inputs) is list else ():
        argument = entry.get("arg") if type(entry) is dict else None
        for value in argument.values() if type(argument) is dict else ():
            operands.extend(_measure(child, bits, is_nested) for child in (value if type(value) is list else [value]))
    return operands


def _measure(value: object, bits: dict[str, float], is_nested: bool) -> float:
    """Return the bits of an argument: a number, or the name of an earlier result."""
    if type(value) is dict:
        name = value.get("as_name", value.get("name"))
        if type(name) is str:
            return bits.get(name, _ITEM_BITS if is_nested else _SIZE_BITS)
        value = next((number for number in value.values() if type(number) in (int, float)), 0)
    if type(value) is int:
        return log2(abs(value) + 1)
    if type(value) is not float:
        return 1.0
    return log2(abs(value) + 2) if abs(value) < 2.0**_ITEM_BITS else _FLOAT_BITS


def _list_outputs(node: dict[str, Any]) -> Iterator[str]:
    outputs = node.get("outputs")
    for output in outputs if type(outputs) is list else ():
        for value in output.values() if type(output) is dict else ():
            name = value.get("as_name", value.get("name")) if type(value) is dict else None
            if type(name) is str:
                yield name
