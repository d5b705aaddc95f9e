"""Small pairs are compared without numpy, with numpy's result to the byte, or are left to numpy and tasks."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st

from statecli.values import compare, compiled_kernel
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions
from statecli.values.pair_plan import Pair
from statecli.values.plain_pairs import compare_plain_pairs

from .conftest import save_rows

pytestmark = pytest.mark.skipif(compiled_kernel.native is None, reason="no compiled kernel")

FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, "bool", "int8", "uint8", "int16", "int32", "int64", "complex64")
OPTIONS = (CompareOptions(), CompareOptions(bitwise=True), CompareOptions(atol=1e-3), CompareOptions(rtol=0.5))
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 3e-39, 1e-30, 3e38)


def draw_tensor(rng, dtype, size, special):
    numbers = torch.randn(size) * 10.0 ** rng.randint(-3, 3)
    tensor = numbers.to(torch.float32).to(getattr(torch, dtype))
    if special and dtype in FLOATS:
        flat = tensor.view(-1)
        for _ in range(3):
            flat[rng.randrange(flat.numel())] = torch.tensor(rng.choice(SPECIAL)).to(tensor.dtype)
    return tensor


def assert_same(before, after, options):
    """Check that the documents are the same to the byte; return whether numpy was not needed."""
    deltas = compare_plain_pairs(before, after, options)
    if deltas is None:
        return False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "compare_small_pairs", lambda *_: {})
        pairs = [Pair(old, new) for old, new in zip(before, after, strict=True)]
        assert msgspec.json.encode(deltas) == msgspec.json.encode(compare_pairs(pairs, options))
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.sampled_from(OPTIONS), st.booleans())
def test_differences_equal_those_of_tasks(tmp_path_factory, seed, dtype, options, special):
    """Each type and tolerance, with NaN, infinities, -0.0, denormals, tails, scalars and equal tensors."""
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("pairs")  # noqa: S311  # reproducible, no secret
    torch.manual_seed(seed)
    shapes = [(), (1,), (7,), (4, 5), (16, 8), (127,), (3, 43)]
    before = {f"t{n}": draw_tensor(rng, dtype, shape, special) for n, shape in enumerate(shapes)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in rng.sample(sorted(after), 4):
        after[name] = draw_tensor(rng, dtype, after[name].shape, special)
    rows = [save_rows(folder / f"{side}.safetensors", state) for side, state in (("a", before), ("b", after))]
    is_compared = assert_same(*rows, options)
    assert is_compared or special or options.bitwise  # bits of a type with two codes for a value are left to numpy


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_tensors_of_several_blocks_have_the_same_result(tmp_path, dtype, suffix):
    """Sums of blocks are added in their order; a pair with equal blocks is left to numpy."""
    torch.manual_seed(1)
    before = {"w": torch.randn(70_000).mul(9).to(getattr(torch, dtype)), "b": torch.zeros(3)}
    changed = {"w": before["w"] + 1, "b": before["b"]}
    start = {"w": before["w"].clone(), "b": before["b"]}
    start["w"][0] = 5000
    old = save_rows(tmp_path / f"a.{suffix}", before)
    assert assert_same(old, save_rows(tmp_path / f"b.{suffix}", changed), CompareOptions())
    assert not assert_same(old, save_rows(tmp_path / f"c.{suffix}", start), CompareOptions())


def test_damaged_zip_record_is_left_to_another_reader(tmp_path):
    """The checksum of a zip record is verified, because damage must not be reported as training."""
    tensors = {"w": torch.full((8,), 7.0)}
    old = save_rows(tmp_path / "a.pt", tensors)
    new = save_rows(tmp_path / "b.pt", {"w": torch.full((8,), 9.0)})
    assert compare_plain_pairs(old, new, CompareOptions())[0].changed == 8
    content = (tmp_path / "b.pt").read_bytes()
    right, wrong = (torch.full((8,), value).numpy().tobytes() for value in (9.0, 9.5))
    (tmp_path / "b.pt").write_bytes(content.replace(right, wrong))
    assert compare_plain_pairs(old, new, CompareOptions()) is None


def test_pairs_of_two_types_or_shapes_are_left_to_numpy(tmp_path):
    """Tensors that need more than one read are left to numpy too."""
    old = save_rows(tmp_path / "a.pt", {"w": torch.ones(4, 5)})
    for n, other in enumerate((torch.ones(4, 5).half(), torch.ones(20), torch.ones(5, 4).t())):
        new = save_rows(tmp_path / f"{n}.pt", {"w": other})
        assert compare_plain_pairs(old, new, CompareOptions()) is None
