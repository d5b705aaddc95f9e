"""Results are equal bit for bit on any processor, although BLAS, numpy and compilers select code by processor."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from statecli.values import compiled_kernel

#: Run each command in a fork of a process that has imported statecli, and write its output to a file. With `numpy` as
#: the first word, the C kernel is not imported.
CHILD = """
import json, numpy, os, runpy, sys
kernel, folder, commands = sys.argv[1:]
if kernel == "numpy":
    sys.modules["statecli.values._native"] = None
from statecli.requests import audit, diff, inspect
from statecli.values import compare, stats
for name, words in json.loads(commands).items():
    if os.fork() == 0:
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), 1)
        sys.argv[1:] = words
        runpy.run_module("statecli", run_name="__main__")
    os.wait()
"""
COMMANDS = {
    "diff": ("diff", "before.pt", "after.pt", "-f", "json"),
    "tolerant": ("diff", "before.pt", "after.pt", "-f", "json", "--atol", "0.5", "--rtol", "0.1"),
    "stats": ("inspect", "after.pt", "--stats", "-f", "json"),
    "audit": ("audit", "after.pt", "--values", "-f", "json"),
}
#: CPU features beyond numpy's baseline, as named by numpy 2.4 and earlier versions. numpy warns of unknown names.
WIDE = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
PROCESSORS = (
    {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": WIDE},
    {"OPENBLAS_CORETYPE": "SkylakeX"},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write tensors of types whose sums are rounded, with enough elements that codes are counted."""
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


@pytest.fixture(scope="module", params=["C", "numpy"])
def documents(request, files, tmp_path_factory):
    """Return the outputs of each command in child processes, each with another emulated processor."""
    outputs = {name: set() for name in COMMANDS}
    for processor in PROCESSORS:
        folder = tmp_path_factory.mktemp(request.param)
        line = [sys.executable, "-W", "ignore", "-c", CHILD, request.param, str(folder), json.dumps(COMMANDS)]
        subprocess.run(line, cwd=files, env={**os.environ, **processor}, stderr=subprocess.DEVNULL, check=True)
        for name in COMMANDS:
            outputs[name].add((folder / name).read_text())
    return outputs


@pytest.mark.skipif(
    "openblas" not in str(getattr(np.__config__, "CONFIG", "")),
    reason="numpy is not built on OpenBLAS",
)
@pytest.mark.parametrize("name", COMMANDS)
def test_result_is_the_same_on_all_processors(name, documents):
    (document,) = documents[name]
    assert document.startswith("{")


@pytest.mark.skipif(compiled_kernel.native is None, reason="no compiled kernel")
def test_result_is_the_same_with_all_instruction_sets(files):
    """The compiled kernel computes the same bits with narrow and with wide vectors."""
    native = compiled_kernel.native
    widest = native.instruction_set()
    before, after = (torch.load(files / name) for name in ("before.pt", "after.pt"))
    actual = {}
    try:
        for name in ("baseline", "avx2", "avx512f"):
            with contextlib.suppress(ValueError):  # another processor
                assert native.instruction_set(name) == name
                actual[name] = _run_kernel(native, before, after)
    finally:
        native.instruction_set(widest)
    assert widest in actual
    assert len(set(actual.values())) == 1


def _run_kernel(native, before, after):
    """Return the result of each kernel function as text with every digit."""
    raw = {name: tensor.flatten().view(torch.uint8).numpy() for name, tensor in (before | after).items()}
    tallies = [
        native.tally(
            _bytes(before[name]), block, (dtype := str(after[name].dtype).removeprefix("torch.")), dtype, *options
        )
        for name, block in raw.items()
        if name != "opposite"
        for options in ((False, 0.0, 0.0), (True, 0.0, 0.0), (False, 0.5, 0.1))
    ]
    counts = [
        native.floats(raw[name], size, infinity, normal)
        for name, size, infinity, normal in (
            ("float16", 2, 0x7C00, 0x0400),
            ("float32", 4, 0x7F800000, 0x00800000),
            ("float64", 8, 0x7FF << 52, 1 << 52),
        )
    ]
    return repr((tallies, counts, [native.digest(block) for block in raw.values()]))


def _bytes(tensor):
    return tensor.flatten().view(torch.uint8).numpy()
