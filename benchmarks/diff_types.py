"""`diff` of every element type, all elements changed, exactly and with a tolerance, against as much bfloat16."""

from __future__ import annotations

from pathlib import Path

from _measure import Row, alternate, python, statecli

SIZE = 512 << 20
#: Types -> how many times the CPU of bfloat16 they may take.
TYPES = {
    **dict.fromkeys(("int8", "int16", "int32", "int64", "bool"), 1.5),
    **dict.fromkeys(("float8_e4m3fn", "float64", "complex64"), 2.0),
    **dict.fromkeys(("float32", "float16"), 1.2),
}
#: One tensor, of which nearly every element changes.
PAIR = """
import sys, torch
from safetensors.torch import save_file
dtype, size = getattr(torch, sys.argv[3]), int(sys.argv[4])
generator = torch.Generator().manual_seed(1)
count = size // dtype.itemsize
numbers = torch.randn(min(count, 1 << 24), generator=generator)
numbers = numbers.repeat(count // numbers.numel())
if dtype is torch.bool:
    before, after = numbers > 0, numbers <= 0
elif dtype.is_floating_point:
    before, after = numbers.to(dtype), (numbers * 1.2).to(dtype)
elif dtype.is_complex:
    before, after = numbers.to(dtype), (numbers * 1.2).to(dtype) + 1j
else:
    before = (numbers * 20).to(dtype)
    after = before + 1
save_file({"weight": before}, sys.argv[1])
save_file({"weight": after}, sys.argv[2])
"""


def rows(folder: Path) -> list[Row]:
    """Each type, in the same run as bfloat16; then the same with a tolerance."""
    base = _make_commands(folder, "bfloat16")
    return [row for dtype, limit in TYPES.items() for row in _measure_type(folder, dtype, limit, base)]


def _make_commands(folder: Path, dtype: str) -> tuple[list[str], list[str]]:
    before, after = (str(folder / f"{dtype}.{side}.safetensors") for side in ("before", "after"))
    alternate(python(PAIR, before, after, dtype, str(SIZE)), rounds=1)
    command = statecli("diff", before, after, "-f", "json", "--jobs", "1")
    return command, [*command, "--atol", "1e-3"]


def _measure_type(folder: Path, dtype: str, limit: float, base: tuple[list[str], list[str]]) -> list[Row]:
    exact, tolerant, bfloat16 = alternate(*_make_commands(folder, dtype), base[0], rounds=5, accept=(0, 1))
    for path in folder.glob(f"{dtype}.*"):
        path.unlink()
    ratio, other = exact.cpu / bfloat16.cpu, tolerant.cpu / exact.cpu
    return [
        Row(
            f"`diff` of 512 MiB of {dtype}, every element changed, one worker",
            f"{exact.cpu:.2f} s CPU",
            f"bfloat16: {bfloat16.cpu:.2f} s CPU",
            f"{ratio:.2f} ×",
            f"≤ {limit} ×",
            ratio <= limit,
        ),
        Row(
            f"the same with `--atol 1e-3` ({dtype})",
            f"{tolerant.cpu:.2f} s CPU",
            f"without: {exact.cpu:.2f} s CPU",
            f"{other:.2f} ×",
            "≤ 1.2 ×",
            other <= 1.2,
        ),
    ]
