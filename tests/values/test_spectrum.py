"""Singular values of a checkpoint's matrices, compared with torch."""

from __future__ import annotations

import pytest
import torch

from statecli.targets.load import read_checkpoint
from statecli.values import spectrum
from statecli.values.spectrum import MAX_VALUES, compute_spectra


@pytest.fixture
def compute(tmp_path):
    def compute_all(**tensors):
        torch.save(tensors, tmp_path / "a.pt")
        spectra = compute_spectra(read_checkpoint(str(tmp_path / "a.pt")).tensors)
        return {fqn: spectrum for (_, fqn), spectrum in spectra.items()}

    return compute_all


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (1, 1), (64, 64), (200, 300)], ids=str)
def test_singular_values_equal_torch(compute, dtype, shape):
    """A small matrix has all values; a larger matrix has MAX_VALUES, evenly from the largest to the smallest."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = compute(w=tensor)["w"]
    expected = torch.linalg.svdvals(tensor.double()).tolist()
    assert actual.count == len(expected) == min(shape)
    assert len(actual.values) == min(MAX_VALUES, actual.count)
    assert (actual.ranks[0], actual.ranks[-1]) == (1, actual.count)
    assert actual.values == pytest.approx([expected[rank - 1] for rank in actual.ranks], abs=1e-12)
    assert actual.stable_rank == pytest.approx(sum(v * v for v in expected) / expected[0] ** 2)


def test_the_rank_is_that_of_torch(compute):
    """The matrices are a product of two thin matrices, an identity, and zeros."""
    thin = torch.randn(40, 3, dtype=torch.float64) @ torch.randn(3, 60, dtype=torch.float64)
    actual = compute(thin=thin, eye=torch.eye(9), zeros=torch.zeros(4, 5))
    assert [actual[name].rank for name in ("thin", "eye", "zeros")] == [3, 9, 0]
    assert actual["zeros"].stable_rank is None


def test_a_kernel_is_a_matrix_of_its_output_channels(compute):
    """The shape is that of a spectral norm: [out, in * height * width]."""
    kernel = torch.randn(8, 3, 5, 5)
    assert compute(w=kernel)["w"].values == pytest.approx(
        torch.linalg.svdvals(kernel.reshape(8, -1)).tolist(), rel=1e-5
    )


def test_each_matrix_without_values_has_a_reason(compute):
    """NaN, integers, no elements, or a sparse layout; vectors and scalars are not matrices."""
    tensors = {
        "nan": torch.tensor([[1.0, float("nan")]]),
        "integers": torch.ones(2, 2, dtype=torch.int64),
        "empty": torch.ones(0, 3),
        "large": torch.full((8, 8), -1e308, dtype=torch.float64),
        "sparse": torch.eye(3).to_sparse(),
    }
    actual = compute(vector=torch.ones(3), scalar=torch.tensor(1.0), **tensors)
    assert actual.keys() == tensors.keys()
    assert {name: spectrum.reason for name, spectrum in actual.items()} == {
        "nan": "it has NaN or Inf",
        "integers": "its values are integers",
        "empty": "it has no elements",
        "large": "its singular values are too large for float64",
        "sparse": "stored as several tensors (indices, values), so statistics are not available",
    }


def test_large_matrices_are_left_out_with_a_reason(compute, monkeypatch):
    """The smallest matrices come first, so that a large matrix does not use up the limit."""
    monkeypatch.setattr(spectrum, "MAX_OPERATIONS", 10 * 10 * 10 * 3)
    actual = compute(large=torch.randn(20, 20), **{f"small{n}": torch.eye(10) for n in range(4)})
    assert [name for name, entry in actual.items() if entry.reason is None] == ["small0", "small1", "small2"]
    assert actual["large"].reason == actual["small3"].reason
    assert "select only this matrix with -i" in actual["large"].reason
    assert [*actual] == ["large", "small0", "small1", "small2", "small3"]
    monkeypatch.setattr(spectrum, "MAX_ELEMENTS", 99)
    assert "more than 99 elements" in compute(w=torch.eye(10))["w"].reason


def test_tied_matrices_are_computed_once(compute, monkeypatch):
    """Both matrices have the values, and the operations count once."""
    monkeypatch.setattr(spectrum, "MAX_OPERATIONS", 10 * 10 * 10)
    shared = torch.eye(10)
    assert [entry.rank for entry in compute(a=shared, b=shared).values()] == [10, 10]
