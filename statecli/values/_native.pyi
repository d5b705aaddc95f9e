"""The kernel in C (`_native.c`), where there was a compiler when statecli was installed."""

from typing import Any

#: Number of this interface: `compiled_kernel` uses no other.
VERSION: int

def tally(
    before: Any, after: Any, before_type: str, after_type: str, bits: bool, atol: float, rtol: float, /
) -> tuple[int, int, int, float, float, float, float, float, float] | None:
    """Two blocks of bytes as stored, of equally many elements: bool, integers, floats of 8 to 64 bits, or complex.

    64-bit integers are compared with the same type only, and complex numbers with complex numbers.

    How many elements, how many of them changed (differ by more than atol + rtol * |before|; with `bits`, in a bit of a
    float of at most 32 bits), the first of these or -1, the largest |Δ|, the sums of |Δ|, Δ², before², after² and
    before · after: in float32 where that holds them, else in float64. None where a number is not finite, or its square
    is beyond float64. Raises `ValueError` for other types and for blocks of unequal length.
    """

def floats(block: Any, size: int, infinity: int, normal: int, /) -> tuple[int, int, int, int, int, int, int]:
    """A block of IEEE floats of `size` bytes (2, 4 or 8); the bits of infinity and of the smallest normal number.

    How many are NaN, infinite, -inf, zero, and below the smallest normal number (zeros too); the bits of the lowest and
    of the highest finite one, as signed integers, which mean nothing where none is finite. Raises `ValueError` for
    another size, and a block that is not of whole floats or not aligned.
    """

def codes(block: Any, /) -> bytes:
    """How often each of the 256 bytes occurs: 256 int64 in the byte order of the machine."""

def digest(block: Any, /) -> int:
    """64 bits of the block, as `scan.py` has it."""

def instruction_set(name: str = ..., /) -> str:
    """Which of "baseline", "avx2" and "avx512f" the loops are compiled for; with a name, they are from now on.

    Raises `ValueError` if the processor does not have that set.
    """
