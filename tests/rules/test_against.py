"""Rules about what a checkpoint is held to: a class, or another checkpoint."""

from __future__ import annotations

import pytest
import torch

LIN = "torch.nn:Linear(2, 2)"


@pytest.fixture
def pt(tmp_path):
    """A checkpoint of these tensors."""

    def write(name="a", **tensors):
        torch.save(tensors, tmp_path / f"{name}.pt")
        return tmp_path / f"{name}.pt"

    return write


def linear(**others):
    return {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)} | others


def without(name):
    return {key: value for key, value in linear().items() if key != name}


def test_missing_entry_finds_what_the_class_registers(held, pt):
    """And what another checkpoint has."""
    assert held("missing-entry", pt(**without("bias")), model=LIN) == ["bias"]
    assert held("missing-entry", pt(**without("bias")), against=str(pt("b", **linear()))) == ["bias"]


def test_missing_entry_spares_an_entry_that_is_new(held, pt):
    """That is unexpected, not missing."""
    assert held("missing-entry", pt(**linear(new=torch.zeros(1))), model=LIN) == []


def test_unexpected_entry_finds_what_nobody_registers(held, pt):
    """Or what the other checkpoint lacks."""
    more = pt(**linear(new=torch.zeros(1)))
    assert held("unexpected-entry", more, model=LIN) == ["new"]
    assert held("unexpected-entry", more, against=str(pt("b", **linear()))) == ["new"]


def test_unexpected_entry_spares_one_that_is_missing(held, pt):
    """The other way round."""
    assert held("unexpected-entry", pt(**without("bias")), model=LIN) == []


def test_shape_mismatch_finds_another_shape(held, pt):
    """Of a class and of a checkpoint."""
    other = pt(**linear(bias=torch.zeros(3)))
    assert held("shape-mismatch", other, model=LIN) == ["bias"]
    assert held("shape-mismatch", other, against=str(pt("b", **linear()))) == ["bias"]


def test_shape_mismatch_spares_other_values(held, pt):
    """Values are another rule's."""
    other = pt(**linear(bias=torch.ones(2)))
    assert held("shape-mismatch", other, against=str(pt("b", **linear()))) == []


def test_dtype_mismatch_finds_one_layer_in_another_dtype(held, pt):
    """Against a checkpoint."""
    other = pt(**linear(bias=torch.zeros(2, dtype=torch.float64)))
    assert held("dtype-mismatch", other, against=str(pt("b", **linear()))) == ["bias"]


def test_dtype_mismatch_spares_the_same_dtypes(held, pt):
    """Of another shape, even."""
    other = pt(**linear(bias=torch.zeros(3)))
    assert held("dtype-mismatch", other, against=str(pt("b", **linear()))) == []


def test_broken_tie_finds_tied_weights_that_were_parted(held, pt):
    """Both names are told."""
    one = torch.zeros(2, 2)
    tied = pt("b", embed=one, head=one)
    assert held("broken-tie", pt(embed=one, head=one.clone()), against=str(tied)) == ["embed", "head"]


def test_broken_tie_spares_ties_that_are_kept(held, pt):
    """In another checkpoint's storage."""
    one = torch.zeros(2, 2)
    other = torch.ones(2, 2)
    assert held("broken-tie", pt(embed=other, head=other), against=str(pt("b", embed=one, head=one))) == []
