"""One result, bit for bit, whatever the processor: BLAS and numpy choose what they run by it, and so do compilers."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

#: The command, without the kernel in C where the first word says so.
CHILD = """
import runpy, sys
if sys.argv.pop(1) == "numpy":
    sys.modules["statecli.values._native"] = None
runpy.run_module("statecli", run_name="__main__")
"""
COMMANDS = {
    "diff": ("diff", "before.pt", "after.pt", "-f", "json"),
    "tolerant": ("diff", "before.pt", "after.pt", "-f", "json", "--atol", "0.5", "--rtol", "0.1"),
    "stats": ("inspect", "after.pt", "--stats", "-f", "json"),
    "audit": ("audit", "after.pt", "--values", "-f", "json"),
}
#: What numpy may do beyond its baseline, by the names of 2.4 and of those before it; of those it has not, it warns.
WIDE = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
PROCESSORS = (
    {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": WIDE},
    {"OPENBLAS_CORETYPE": "Haswell"},
    {"OPENBLAS_CORETYPE": "SkylakeX"},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Of every type whose sums have a last bit; of each enough elements for its codes to be counted."""
    folder = tmp_path_factory.mktemp("processors")
    numbers = torch.Generator().manual_seed(0)
    whole = torch.randn(70_001, generator=numbers, dtype=torch.float64)
    for name, added in (("before.pt", 0.0), ("after.pt", 0.3)):
        values = whole + added * torch.randn(70_001, generator=numbers, dtype=torch.float64)
        types = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64")
        state = {dtype: (3 * values).to(getattr(torch, dtype)) for dtype in types}
        state["complex128"] = torch.complex(values, values.flip(0))
        state["complex64"] = state["complex128"].to(torch.complex64)
        state["opposite"] = (values if added else -values).float()
        torch.save(state, folder / name)
    return folder


def said(folder, kernel, words, processor):
    """By a child that takes the processor for that one."""
    line = [sys.executable, "-W", "ignore", "-c", CHILD, kernel, *words]
    return subprocess.run(
        line, cwd=folder, env={**os.environ, **processor}, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.skipif(
    "openblas" not in str(getattr(np.__config__, "CONFIG", "")),
    reason="numpy is not built on OpenBLAS",
)
@pytest.mark.parametrize("kernel", ["C", "numpy"])
@pytest.mark.parametrize("name", COMMANDS)
def test_one_result_on_all_processors(name, kernel, files):
    """Documents are the same, and are there."""
    documents = {said(files, kernel, COMMANDS[name], processor) for processor in PROCESSORS}
    assert len(documents) == 1
    assert documents.pop().startswith("{")
