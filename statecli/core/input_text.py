"""Parse the texts of `--input`, such as `int64:2x16<30522`, without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from statecli.core.errors import UsageError, option
from statecli.core.lazy_pattern import compile_on_use

_FLOATS = ("float32", "float16", "bfloat16", "float64")
COMPLEX_DTYPES = ("complex64", "complex128")
#: Largest value of each integer dtype.
LARGEST_INTEGERS = {"int64": 2**63 - 1, "int32": 2**31 - 1, "int16": 2**15 - 1, "int8": 2**7 - 1, "uint8": 2**8 - 1}
_DTYPES = (*_FLOATS, *COMPLEX_DTYPES, *LARGEST_INTEGERS, "bool")
#: dtypes by torch's other names for them.
_ALIASES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}
#: Default bound: integers are 0 or 1, because every embedding table has these two rows.
DEFAULT_BOUND = 2
_SHAPE = compile_on_use(r"[0-9]+([x×][0-9]+)*")
#: Largest number of elements of an input: 8 GB of float32. A mistyped size is reported, not tried.
_MAX_ELEMENTS = 2**31
_EXAMPLES = "2x3, 'int64:2x16<30522' or name=2x3"
#: Texts that surely describe an input tensor: nobody would pass them to forward as strings.
_CLEAR_INPUT_TEXT = compile_on_use(r"(\w+=)?([\w.]+:)?[0-9]+([x×][0-9]+)+(<[0-9]+)?")


@dataclass(frozen=True)
class InputSpec:
    """One `--input` option: a tensor of this `shape` (() for a scalar) and `dtype` (torch's name).

    `name`: the keyword argument, None for a positional argument. Integers are 0 ≤ i < `bound`; other dtypes have no
    bound.
    """

    name: str | None
    dtype: str
    shape: tuple[int, ...]
    bound: int | None

    @property
    def text(self) -> str:
        """Description in a few words: "ids int64 2×16 below 30522"."""
        size = "×".join(map(str, self.shape)) or "scalar"
        bound_text = f"below {self.bound}" if self.bound is not None else None
        return " ".join(filter(None, [self.name, self.dtype, size, bound_text]))


def parse_inputs(texts: Sequence[str]) -> list[InputSpec]:
    """Parse the texts of all inputs. Raises UsageError, also for an argument that is given twice."""
    inputs = [parse_input(text) for text in texts]
    names = [input_spec.name for input_spec in inputs if input_spec.name]
    repeated_name = next((name for name in names if names.count(name) > 1), None)
    if repeated_name:
        raise UsageError(f"{option('--input')}: the argument {repeated_name} is given twice")
    return inputs


def parse_input(text: str) -> InputSpec:
    """Parse `[NAME=][DTYPE:][SHAPE][<BOUND]`, where a bound alone means int64. Raises UsageError."""
    name, equals, type_and_shape = text.rpartition("=")
    if equals and not name.strip().isidentifier():
        raise UsageError(f"{option('--input', text)}: {name!r} is not an argument name; write name=2x3")
    type_and_shape, less_sign, limit = type_and_shape.partition("<")
    dtype, colon, shape = type_and_shape.rpartition(":")
    kind = _parse_dtype(text, dtype.strip()) if colon else ("int64" if less_sign else "float32")
    sizes = _parse_shape(text, shape.strip(), may_be_scalar=bool(colon))
    bound = (
        _parse_bound(text, kind, limit.strip()) if less_sign else (DEFAULT_BOUND if kind in LARGEST_INTEGERS else None)
    )
    return InputSpec(name.strip() or None, kind, sizes, bound)


def is_input_text(value: object) -> bool:
    """Return True for a text readable by `parse_input` with a shape of two dimensions or more."""
    return isinstance(value, str) and _CLEAR_INPUT_TEXT.fullmatch(value) is not None


def _parse_dtype(text: str, name: str) -> str:
    plain_name = name.removeprefix("torch.")
    dtype = _ALIASES.get(plain_name, plain_name)
    if dtype in _DTYPES:
        return dtype
    import difflib  # only an error needs the nearest name

    similar_names = difflib.get_close_matches(plain_name, [*_DTYPES, *_ALIASES], 1)
    hint = f"did you mean {similar_names[0]}?" if similar_names else f"write one of {', '.join(_DTYPES)}"
    if _SHAPE.fullmatch(name):
        hint = "write the dtype before the shape, as in int64:2x16"
    raise UsageError(f"{option('--input', text)}: {name!r} is not a dtype; {hint}")


def _parse_shape(text: str, shape_text: str, *, may_be_scalar: bool) -> tuple[int, ...]:
    if not shape_text and may_be_scalar:
        return ()
    if not _SHAPE.fullmatch(shape_text):
        problem = f"{shape_text!r} is not a shape" if shape_text else "the shape is missing"
        raise UsageError(f"{option('--input', text)}: {problem}; write {_EXAMPLES}")
    # A number of more than 20 digits is too large anyway, and Python converts at most 4,300 digits.
    sizes = tuple(int(size.lstrip("0")[:20] or "0") for size in re.split("[x×]", shape_text))
    elements = math.prod(sizes)
    if elements > _MAX_ELEMENTS:
        count = f"{elements:,}" if elements < 1 << 63 else "2^63 or more"
        problem = f"the input would have {count} elements, more than the limit of {_MAX_ELEMENTS:,}"
        raise UsageError(f"{option('--input', text)}: {problem}")
    return sizes


def _parse_bound(text: str, dtype: str, bound_text: str) -> int:
    digits = bound_text.lstrip("0")  # Python converts at most 4,300 digits
    if dtype not in LARGEST_INTEGERS:
        problem = f"the bound needs an integer dtype, not {dtype}; write int64:2x16<{bound_text}"
    elif not (digits.isascii() and digits.isdecimal()):
        problem = f"the bound {bound_text!r} is not a positive integer; write int64:2x16<30522"
    elif len(digits) > 30 or int(digits) - 1 > LARGEST_INTEGERS[dtype]:
        advice = "a smaller bound" if dtype == "int64" else f"int64 instead of {dtype}"
        problem = (
            f"the bound {bound_text} is too large: the largest {dtype} is {LARGEST_INTEGERS[dtype]}; write {advice}"
        )
    else:
        return int(digits)
    raise UsageError(f"{option('--input', text)}: {problem}")
