"""Wrapper of the compiled kernel `_native.c`, which compares blocks of elements without numpy.

`native` is None if statecli was installed without a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statecli.values.delta import CompareOptions
from statecli.values.tally import Tally, Wide

if TYPE_CHECKING:
    from statecli.values.elements import Array

#: Version of the interface that the callers use. An older build is ignored: `pip install -e .` builds the kernel again.
VERSION = 4

native: Any
try:
    from statecli.values import _native as native
except ImportError:
    native = None
else:
    native = native if getattr(native, "VERSION", None) == VERSION else None

#: Types whose blocks the kernel compares. 64-bit integers and complex numbers are compared only with their own kind.
_INTEGERS_64 = frozenset(["int64", "uint64"])
_COMPLEX = frozenset(["complex64", "complex128"])
_COMPARED_TYPES = frozenset(
    [
        *("float64", "float32", "bfloat16", "float16", "bool", *_INTEGERS_64, *_COMPLEX),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    ]
)
#: Types in which several bit patterns have the same value. The kernel does not distinguish these bit patterns.
_COMPARED_BY_VALUE = frozenset(["bool", "float64", *_COMPLEX])
_EXACT_OPTIONS = CompareOptions()


def tally_stored(
    before: bytes | Array, after: bytes | Array, types: tuple[str, str], options: CompareOptions = _EXACT_OPTIONS
) -> Tally | None:
    """Return the `Tally` of two flat blocks of stored elements of equal length. `types` has the dtype of each block.

    Return None if only `kernels.tally_values` can compute it: for other types, for values that are not finite or whose
    squares are beyond float64, or if the kernel is not installed.
    """
    if native is None or not _are_comparable(*types):
        return None
    bits = options.bitwise and types[0] == types[1]
    if bits and types[0] in _COMPARED_BY_VALUE:
        return None
    sums = native.tally(before, after, *types, bits, options.atol, options.rtol)
    if sums is None:
        return None
    elements, changed_count, first, largest, gaps, squares, norm_before, norm_after, product = sums
    return Tally(
        changed=changed_count,
        first=first if changed_count else None,
        finite=elements,
        max_abs=largest,
        sum_abs=Wide(gaps),
        squares=Wide(squares),
        before=Wide(norm_before),
        after=Wide(norm_after),
        product=Wide(product + 0.0),  # + 0.0 converts -0.0 to 0.0, as a sum with other tallies does
    )


def _are_comparable(before: str, after: str) -> bool:
    types = {before, after}
    if not types <= _COMPARED_TYPES:
        return False
    return before == after or (types.isdisjoint(_INTEGERS_64) and (types <= _COMPLEX or types.isdisjoint(_COMPLEX)))
