"""Tensors with a shared storage, compared with the definition and with torch."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, strategies as st

from statecli import formats
from statecli.core import tied_tensors
from statecli.core.model_state import ModelState, TensorInfo


def row(
    fqn: str, storage: int | str | None, nbytes: int = 4, section: str = "model", note: str | None = None
) -> TensorInfo:
    """Return a tensor of one storage."""
    return TensorInfo(fqn, "float32", (nbytes // 4,), nbytes // 4, nbytes, section=section, storage=storage, note=note)


def list_ties(*rows: TensorInfo) -> dict[str, tuple[str, ...]]:
    """Return the names tied to each tensor."""
    state = tied_tensors.fill_tied_to(ModelState("t", "f", rows))
    return {tensor.fqn: tensor.tied_to for tensor in state.tensors}


@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 3) | st.sampled_from(["0", "1"]), st.sampled_from([0, 4])), max_size=12
    )
)
def test_tensors_of_one_storage_are_tied(spec):
    """Tensors of the same storage are tied, in order, unless one has no byte or an unknown storage."""
    rows = [row(f"t{n}", storage, nbytes) for n, (storage, nbytes) in enumerate(spec)]
    expected = {
        a.fqn: tuple(
            b.fqn
            for b in rows
            if b is not a and a.storage is not None and a.storage == b.storage and a.nbytes and b.nbytes
        )
        for a in rows
    }
    assert list_ties(*rows) == expected


def test_fill_changes_only_the_field_tied_to():
    """Order, other fields and an untied state are left as they are."""
    untied = ModelState("t", "f", (row("a", 1), row("b", 2), row("c", None)))
    assert tied_tensors.fill_tied_to(untied) is untied
    rows = (row("a", 1, note="x"), row("b", 2), row("c", 1))
    tensors = tied_tensors.fill_tied_to(ModelState("t", "f", rows)).tensors
    assert [tensor.fqn for tensor in tensors] == ["a", "b", "c"]
    assert [tensor.note for tensor in tensors] == ["x", None, None]
    assert tensors[1] is rows[1]


def test_other_sections_are_named():
    """A tensor of another section is named with its section, a tensor of the same section without."""
    rows = (row("w", 1), row("v", 1), row("w", 1, section="ema"))
    tensors = tied_tensors.fill_tied_to(ModelState("t", "f", rows, ("model", "ema"))).tensors
    assert [tensor.tied_to for tensor in tensors] == [("v", "ema#w"), ("w", "ema#w"), ("model#w", "model#v")]


@pytest.mark.parametrize("count", [64, 65, 66, 200])
def test_a_long_list_is_cut(count):
    """With more than 64 other tensors, one is named and the note has their number; a tensor never names itself."""
    rows = [row(f"t{n:03}", 0, note="view") for n in range(count)]
    tensors = tied_tensors.fill_tied_to(ModelState("t", "f", tuple(rows))).tensors
    for tensor in tensors:
        others = [other.fqn for other in rows if other.fqn != tensor.fqn]
        assert list(tensor.tied_to) == (others if count <= 65 else others[:1])
        note = f"view; shares its storage with {count - 1} other tensors"
        assert tensor.note == (note if count > 65 else "view")


def test_many_views_of_one_storage_take_linear_time():
    """20,000 views of one flat storage are listed in a second of processor time."""
    rows = tuple(row(f"layers.{n}.weight", 0) for n in range(20_000))
    before = time.process_time()
    tensors = tied_tensors.fill_tied_to(ModelState("t", "f", rows)).tensors
    assert time.process_time() - before < 1
    assert len(tensors) == 20_000


@pytest.mark.parametrize("zipped", [True, False])
def test_ties_agree_with_shared_storages_in_torch(zipped, tmp_path):
    """Two entries of a loaded checkpoint share a storage if and only if we say they are tied."""
    flat = torch.arange(12.0)
    entries = {
        "whole": flat,
        "head": flat[:4],
        "tail": flat[8:].view(2, 2),
        "turned": flat.view(3, 4).t(),
        "copy": flat.clone(),
        "empty": flat[:0],
        "other": torch.zeros(3),
    }
    entries["again"] = entries["other"]
    torch.save(entries, tmp_path / "views.pt", _use_new_zipfile_serialization=zipped)
    loaded = torch.load(tmp_path / "views.pt", weights_only=True)
    listed = {tensor.fqn: set(tensor.tied_to) for tensor in formats.read(str(tmp_path / "views.pt")).tensors}
    for a, b in itertools.permutations(entries, 2):
        shared = loaded[a].untyped_storage()._cdata == loaded[b].untyped_storage()._cdata
        assert (b in listed[a]) == (shared and "empty" not in (a, b)), (a, b)
