"""Compare the metadata of a pair, including fields that only one side records."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from statecli.commands.diff import changed_fields
from statecli.commands.diff.pairing import Match
from statecli.commands.diff.result import Field
from statecli.core.model_state import ByteRange, Evidence, Kind, TensorData, TensorInfo

from .conftest import map_changes


def build_row(**fields: object) -> TensorInfo:
    """Return a tensor row with the given fields."""
    return TensorInfo(**{"fqn": "w", "dtype": "float32", "shape": (2,), "elements": 2, "nbytes": 8} | fields)


def list_changed_fields(before: dict, after: dict, *ignore: Field, devices: bool = True) -> tuple[Field, ...]:
    """Return the fields that differ between two rows."""
    return changed_fields.find_changed_fields(
        [Match(build_row(**before), build_row(**after))], ignore, devices=devices
    )[0]


def test_nested_tensors_compare_the_shapes_of_their_parts():
    """A nested tensor has no single shape, so the shapes of its parts are compared."""
    parts = [
        (
            ("t0", TensorData(ByteRange("a", 0, 8), "float32", shape)),
            ("t1", TensorData(ByteRange("a", 8, 4), "float32", (1,))),
        )
        for shape in ((2,), (1, 2))
    ]
    assert list_changed_fields({"shape": None, "parts": parts[0]}, {"shape": None, "parts": parts[1]}) == (Field.SHAPE,)
    assert list_changed_fields({"shape": None, "parts": parts[0]}, {"shape": None, "parts": parts[0]}) == ()


KNOWN_KIND = {"kind": Kind.PARAMETER, "evidence": Evidence.TYPE}


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, Field.DTYPE),
        ({"shape": (2,)}, {"shape": (2, 1)}, Field.SHAPE),
        (KNOWN_KIND, {"kind": Kind.BUFFER, "evidence": Evidence.REGISTERED}, Field.KIND),
        ({"requires_grad": True}, {"requires_grad": False}, Field.REQUIRES_GRAD),
        ({"device": "cpu"}, {"device": "cuda:0"}, Field.DEVICE),
        ({"layout": "strided"}, {"layout": "sparse_coo"}, Field.LAYOUT),
    ],
)
def test_field_that_both_sides_record_differs(before, after, field):
    """The field differs in both directions, unless it is ignored."""
    assert list_changed_fields(before, after) == list_changed_fields(after, before) == (field,)
    assert list_changed_fields(before, after, field) == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"shape": None}, {"shape": (2,)}),
        ({"requires_grad": None}, {"requires_grad": True}),
        ({"device": None}, {"device": "cpu"}),
        (KNOWN_KIND, {"kind": Kind.BUFFER, "evidence": Evidence.ASSUMED}),
        (KNOWN_KIND, {"kind": Kind.BUFFER, "evidence": Evidence.CONVENTION}),
        ({"storage": None}, {"storage": 3}),
    ],
)
def test_field_that_one_side_records_does_not_differ(before, after):
    """A field that one side does not record, or that is guessed from names, is not a difference in either direction."""
    assert list_changed_fields(before, after) == list_changed_fields(after, before) == ()


def test_numpy_array_has_the_layout_of_a_strided_tensor():
    """The same array, saved by numpy or by torch, does not differ."""
    assert list_changed_fields({"layout": "numpy"}, {"layout": "strided"}) == ()


def test_device_of_a_class_is_not_compared():
    """The device of a class is only the device of its construction."""
    assert list_changed_fields({"device": "cpu"}, {"device": "cuda:0"}, devices=False) == ()


def test_changed_fields_are_in_order():
    before = KNOWN_KIND | {"device": "cpu", "requires_grad": True}
    after = {"dtype": "int8", "shape": (3,), "kind": Kind.BUFFER, "evidence": Evidence.TYPE, "device": "meta"}
    assert list_changed_fields(before, after | {"requires_grad": False}) == tuple(Field)[:5]


# --- ties --------------------------------------------------------------------------------------------------------

STORAGES = st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=8)


@given(STORAGES)
def test_tying_differs_if_other_names_share_the_storage(storages):
    """Tying differs if other names share the storage after than before, and both sides record storages."""
    matches = [
        Match(build_row(fqn=str(n), storage=first), build_row(fqn=str(n), storage=second))
        for n, (first, second) in enumerate(storages)
    ]
    recorded = [n for n, pair in enumerate(storages) if None not in pair]

    def sharing(n, side):
        return {other for other in recorded if storages[other][side] == storages[n][side]}

    expected = [n in recorded and sharing(n, 0) != sharing(n, 1) for n in range(len(storages))]
    assert [Field.TYING in field for field in changed_fields.find_changed_fields(matches, (), devices=True)] == expected
    assert not any(changed_fields.find_changed_fields(matches, (Field.TYING,), devices=True))


def test_storage_keys_do_not_change_ties(diff):
    """Other storage keys, from another order of entries, do not change a tie; a tie that is undone is a change."""
    shared = torch.arange(3.0)
    tied = {"a": shared, "b": shared, "c": torch.arange(2.0)}
    assert not diff(tied, {"c": torch.arange(2.0), "a": shared, "b": shared}).findings
    actual = map_changes(diff(tied, {**tied, "b": shared.clone()}))
    assert {name: change.fields for name, change in actual.items()} == {"a": (Field.TYING,), "b": (Field.TYING,)}


def test_prefix_does_not_untie_tensors(diff):
    """Ties are compared by tensors, not by names: a wrapper's prefix does not untie tensors."""
    shared = torch.arange(3.0)
    assert not diff({"a": shared, "b": shared}, {"module.a": shared, "module.b": shared}).findings


def test_ties_are_not_compared_with_safetensors(diff):
    """Two entries with equal values may have been one tensor, so no difference is reported."""
    shared = torch.arange(3.0)
    assert not diff({"a": shared, "b": shared}, {"a": shared, "b": shared}, names=("a.pt", "b.safetensors")).findings


def test_requires_grad_is_compared_only_between_parameters(diff):
    """Frozen and trained parameters differ if the pickle keeps Parameters; a state_dict does not record the flag."""
    trained, frozen = nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.arange(3.0), requires_grad=False)
    assert map_changes(diff({"w": trained}, {"w": frozen}))["w"].fields == (Field.REQUIRES_GRAD,)
    assert not diff({"w": trained}, {"w": frozen.detach()}).findings


# --- in words ----------------------------------------------------------------------------------------------------


def test_change_is_described_in_one_line(diff):
    """A change is one line with both values; "values differ" comes first."""
    before = {"w": torch.ones(2, 2), "gone": torch.arange(4.0), "old.w": torch.arange(5.0)}
    after = {"w": torch.zeros(2, 2).bfloat16(), "new": torch.arange(3), "other.w": torch.arange(5.0)}
    words = {name: changed_fields.describe_change(change) for name, change in map_changes(diff(before, after)).items()}
    assert words == {
        "w": "values differ, dtype float32 → bfloat16",
        "gone": "removed (float32 [4])",
        "new": "added (int64 [3])",
        "other.w": "renamed from old.w",
    }


def test_layout_is_compared_without_values(diff):
    """A tensor that became sparse differs, even if no value is read."""
    dense = torch.eye(3)
    changes = map_changes(diff({"w": dense}, {"w": dense.to_sparse()}, values=False))
    assert changes["w"].fields == (Field.LAYOUT,)
