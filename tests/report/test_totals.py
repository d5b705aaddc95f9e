"""Sums that count tied tensors once."""

from __future__ import annotations

from statecli.core.model_state import Kind, TensorInfo
from statecli.core.sizes import sum_by_kind


def tensor(fqn, shape=(4,), **facts):
    elements = 1
    for size in shape:
        elements *= size
    return TensorInfo(fqn, "float32", shape, elements, elements * 4, **facts)


def test_tied_names_count_their_bytes_once():
    """Two names have the bytes of one tensor."""
    tied = {"storage": 1, "storage_bytes": 16}
    total = sum_by_kind([tensor("a", tied_to=("b",), **tied), tensor("b", tied_to=("a",), **tied)])["parameter"]
    assert (total.tensors, total.elements, total.bytes) == (2, 4, 16)


def test_disjoint_views_are_summed():
    """Slices of one flat storage have the sum of the storage."""
    rows = [tensor(f"v{n}", (2,), tied_to=("x",), storage=1, storage_bytes=32, storage_offset=2 * n) for n in range(4)]
    assert sum_by_kind(rows)["parameter"].bytes == 32


def test_overlapping_views_never_exceed_their_storage():
    """A base and its view are the bytes of the base."""
    base = tensor("base", (8,), tied_to=("view",), storage=1, storage_bytes=32)
    view = tensor("view", (4,), tied_to=("base",), storage=1, storage_bytes=32, storage_offset=2)
    assert sum_by_kind([base, view])["parameter"].bytes == 32


def test_expanded_tensor_counts_only_its_stored_bytes():
    """Stride 0 repeats bytes that exist once."""
    assert sum_by_kind([tensor("e", (1024, 1024), storage=1, storage_bytes=4)])["parameter"].bytes == 4


def test_totals_always_have_the_four_kinds():
    """Scripts can read each kind; `other` appears only if a tensor has this kind."""
    assert list(sum_by_kind([])) == ["parameter", "buffer", "unregistered", "optimizer"]
    assert sum_by_kind([tensor("rng", kind=Kind.OTHER)])["other"].tensors == 1
