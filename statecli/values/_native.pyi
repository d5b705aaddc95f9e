"""The kernel in C (`_native.c`), where there was a compiler when statecli was installed."""

from typing import Any

def tally(
    before: Any, after: Any, before_type: str, after_type: str, bits: bool, /
) -> tuple[int, int, float, float, float, float, float, float] | None:
    """Two blocks of bytes, each of float32, bfloat16 or float16, as stored and of equally many elements.

    How many changed (with `bits`, differ in a bit), the first of them or -1, the largest |Δ|, the sums of |Δ|, Δ²,
    before², after² and before · after; None where there is an infinity or a NaN on either side. A sum may have
    overflowed to infinity, or a square vanished. Raises `ValueError` for other types and for blocks of unequal length.
    """
