"""Pairs that can be compared, reasons why other pairs cannot, and tensors stored in pieces."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from statecli.core.errors import ChecksumMismatch, MalformedError, StateError
from statecli.core.model_state import ByteRange, TensorData, TensorInfo
from statecli.values import gpu_kernel, pair_plan
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.fingerprints import compute_fingerprints
from statecli.values.pair_plan import NotCompared, Pair

from .conftest import build_row
from .test_ranges import write_boxes


def outcome(before: TensorInfo, after: TensorInfo, options: CompareOptions = CompareOptions()) -> object:  # noqa: B008 - frozen
    (pair,) = compare_pairs([Pair(before, after)], options, jobs=1)
    return pair


# --- why not ---------------------------------------------------------------------------------------------------------

NOTHING = TensorInfo("w", "float32", (6,), 6, 24)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (replace(NOTHING, device="meta"), "a meta tensor has no data"),
        (replace(NOTHING, shape=None), "uninitialized"),
        (NOTHING, "its values are not in the file"),
    ],
)
def test_a_tensor_without_values_is_not_compared(store, row, reason):
    """The tensor is before, after or on both sides; the reason is about the side without values."""
    readable = store(torch.arange(6.0))
    for pair in ((row, readable), (readable, row), (row, row)):
        assert outcome(*pair) == NotCompared(reason)


def test_objects_are_not_compared():
    """The objects of a numpy array are in the file, but statecli does not read them."""
    objects = replace(NOTHING, dtype="numpy O8")
    assert outcome(objects, objects) == NotCompared("its elements are Python objects, which statecli does not read")


def test_the_side_before_is_named_first():
    """If neither side has values, the reason is about the side before."""
    assert outcome(replace(NOTHING, device="meta"), NOTHING) == NotCompared("a meta tensor has no data")
    assert outcome(NOTHING, replace(NOTHING, device="meta")) == NotCompared("its values are not in the file")


def test_tensor_is_not_compared_with_a_tensor_of_parts(store):
    """Two tensors whose parts have different names are not compared either; a changed layout is reported."""
    whole = store(torch.arange(6.0))
    parts, others = (replace(whole, data=None, parts=((name, whole.data),)) for name in "ab")
    for pair in ((whole, parts), (parts, whole), (parts, others)):
        assert outcome(*pair) == NotCompared("the two tensors have different inner tensors")
    assert outcome(whole, replace(parts, layout="jagged")) == NotCompared("the layout changed from strided to jagged")
    assert outcome(replace(parts, layout="jagged"), whole) == NotCompared("the layout changed from jagged to strided")


def test_numpy_type_is_not_compared_with_another_type(store):
    """The numbers of a numpy type are unknown, so the type cannot be compared with float32."""
    plain = store(torch.arange(6.0))
    datetimes = replace(plain, dtype="numpy.datetime64")
    reason = "statecli does not compare numpy.datetime64 with float32"
    assert outcome(datetimes, plain) == NotCompared(reason)
    assert isinstance(outcome(plain, datetimes), NotCompared)


@pytest.mark.parametrize("dtype", ["uint3", "qint8", "q8_0"])
def test_type_without_numbers_is_not_compared_with_another_type(store, dtype):
    """The reason is about the type without numbers, on either side."""
    plain = store(torch.zeros(8, dtype=torch.int8))
    unreadable = build_row(replace(plain.data, dtype=dtype))
    for pair in ((unreadable, plain), (plain, unreadable)):
        actual_outcome = outcome(*pair)
        assert isinstance(actual_outcome, NotCompared)
        assert dtype in actual_outcome.reason
        assert "int8 and" not in actual_outcome.reason


def test_an_unknown_type_is_not_compared_with_itself(store):
    """The number of bytes of an element is unknown."""
    unknown = build_row(replace(store(torch.zeros(8)).data, dtype="uint3"))
    assert outcome(unknown, unknown) == NotCompared("statecli cannot read uint3 elements as numbers")


def test_parts_of_other_shapes_are_named(store):
    rows = [
        replace(NOTHING, parts=(("a", store(torch.ones(size)).data), ("b", store(torch.ones(2)).data)))
        for size in (3, 4)
    ]
    assert outcome(*rows) == NotCompared(
        "its inner tensors have the shape [3] in the first checkpoint, but [4] in the second"
    )


def test_elements_of_other_numbers_of_values_are_not_compared(store):
    """A byte with two float4 values is not comparable with a uint8."""
    plain = store(torch.zeros(8, dtype=torch.uint8))
    packed = build_row(replace(plain.data, dtype="float4_e2m1fn_x2"))
    for tensor, two in ((plain, packed), (packed, plain)):
        assert outcome(tensor, two) == NotCompared(
            f"an element of {tensor.dtype} and an element of {two.dtype} contain different numbers of values"
        )


def test_short_storage_is_an_error_and_not_read_beyond_its_end(tmp_path):
    """The bytes after the storage exist, but belong to another tensor."""
    (tmp_path / "a").write_bytes(bytes(range(64)))
    data = TensorData(ByteRange(str(tmp_path / "a"), 0, 8), "float32", (3,))
    assert isinstance(outcome(build_row(data), build_row(data)), MalformedError)
    assert isinstance(outcome(*[build_row(replace(data, shape=(1,), offset=2))] * 2), MalformedError)
    assert outcome(*[build_row(replace(data, shape=(1,), offset=1))] * 2) == Delta(elements=1)


# --- parts -----------------------------------------------------------------------------------------------------------


def build_tensor_of_parts(store, *tensors: torch.Tensor) -> TensorInfo:
    """Return a tensor subclass of three elements with the given parts."""
    parts = tuple((name, store(tensor).data) for name, tensor in zip("ab", tensors, strict=True))
    return TensorInfo("w", "float32", (3,), 3, 12, parts=parts)


def remove_checksums(row: TensorInfo) -> TensorInfo:
    parts = ((name, replace(data, storage=replace(data.storage, crc32=None))) for name, data in row.parts)
    return replace(row, parts=tuple(parts))


def test_parts_are_compared_together(store):
    """The sums cover all parts, the element count is the tensor's, and there is no first index."""
    before = build_tensor_of_parts(store, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    after = build_tensor_of_parts(store, torch.tensor([1.0, 4.0]), torch.tensor([3.0, 4.0, 8.0]))
    actual_outcome = outcome(before, after)
    assert (actual_outcome.changed, actual_outcome.max_abs, actual_outcome.elements, actual_outcome.first) == (
        2,
        3.0,
        3,
        None,
    )
    assert actual_outcome.l2 == pytest.approx(13**0.5)
    assert actual_outcome.mean_abs == pytest.approx(1.0)
    assert actual_outcome.reason in (None, "computed over all inner tensors together: a, b")
    assert outcome(before, before) == Delta(elements=3)


def test_reason_of_left_out_elements_names_the_parts(store):
    """Elements left out of the sums are counted over all parts together."""
    before = build_tensor_of_parts(store, torch.tensor([1.0, torch.nan]), torch.tensor([3.0]))
    after = build_tensor_of_parts(store, torch.tensor([2.0, 7.0]), torch.tensor([3.0]))
    actual_outcome = outcome(before, after)
    assert (actual_outcome.changed, actual_outcome.left_out) == (2, 1)
    assert actual_outcome.reason == "computed over all inner tensors together: a, b"


def add_attributes(values: TensorInfo, **attributes: TensorInfo) -> TensorInfo:
    return replace(values, parts=tuple((name, row.data) for name, row in attributes.items()))


def test_a_tensor_with_attributes_is_compared_with_them(store):
    """The sums and the left-out elements cover the tensor's own values and each attribute."""
    ones, before, after = store(torch.ones(3)), store(torch.tensor([1.0, 2.0])), store(torch.tensor([1.0, torch.nan]))
    actual_outcome = outcome(add_attributes(ones, scale=before), add_attributes(ones, scale=after))
    assert (actual_outcome.elements, actual_outcome.changed, actual_outcome.left_out) == (3, 1, 1)
    assert actual_outcome.reason == "computed over all inner tensors together: its own values, scale"
    assert outcome(*[add_attributes(ones, scale=before)] * 2) == Delta(elements=3)


def test_an_attribute_of_another_shape_is_named(store):
    """The reason names the first attribute with a different shape, without the name of its tensor."""
    ones, two, three = (store(torch.ones(size)) for size in (3, 2, 3))
    rows = add_attributes(ones, zero=two, scale=two), add_attributes(ones, zero=two, scale=three)
    assert outcome(*rows) == NotCompared("the shape of its attribute scale differs")


def test_a_part_that_cannot_be_read_is_named(store):
    before = build_tensor_of_parts(store, torch.ones(2), torch.ones(3))
    after = build_tensor_of_parts(store, torch.ones(2), torch.zeros(3))
    os.truncate(after.parts[1][1].storage.path, 4)
    actual_outcome = outcome(*map(remove_checksums, (before, after)))
    assert isinstance(actual_outcome, StateError)
    assert "w: b" in str(actual_outcome)


@pytest.mark.parametrize("layout", ["nested", "jagged"])
def test_a_ragged_tensor_without_values_is_not_compared(store, layout):
    """Sizes and offsets alone do not give the values."""
    sizes = store(torch.tensor([1, 2])).data
    row = replace(NOTHING, layout=layout, parts=(("sizes", sizes), ("offsets", sizes)))
    assert outcome(row, row) == NotCompared("its values are not in the file")


def test_an_index_of_a_ragged_tensor_that_cannot_be_read_is_named(store):
    values, ends = store(torch.ones(3)).data, store(torch.tensor([0, 1, 3])).data
    row = replace(NOTHING, layout="jagged", parts=(("values", values), ("offsets", ends)))
    os.truncate(ends.storage.path, 4)
    assert "w: offsets" in str(outcome(*[remove_checksums(row)] * 2))


def test_changed_value_of_a_damaged_sparse_tensor_is_a_checksum_error(store):
    """The checksum of differing parts is verified, even if a single value differs."""
    places = store(torch.tensor([[0, 2]])).data
    sides = [store(torch.tensor([1.0, value])).data for value in (2.0, 3.0)]
    rows = [TensorInfo("w", "float32", (4,), 4, 16, layout="sparse_coo") for _ in sides]
    names = ("indices", "values")
    rows = [
        replace(row, parts=tuple(zip(names, (places, side), strict=True)))
        for row, side in zip(rows, sides, strict=True)
    ]
    assert outcome(*rows).changed == 1
    damaged_values = replace(sides[1], storage=replace(sides[1].storage, crc32=1))
    damaged = replace(rows[1], parts=(("indices", places), ("values", damaged_values)))
    unrecorded = remove_checksums(rows[0])
    for pair in ((unrecorded, damaged), (damaged, unrecorded)):
        assert isinstance(outcome(*pair), ChecksumMismatch)


# --- boxes -----------------------------------------------------------------------------------------------------------

CUTS = {
    "rows": ([1, 3], []),
    "one row after another": ([1, 2, 3, 4, 5], []),
    "columns": ([], [2]),
    "blocks": ([3], [2]),
    "rows and nothing": ([0, 2], [0]),
    "whole": ([], []),
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("task", [1 << 22, 7])
def test_boxes_are_compared_like_the_whole_array(store, tmp_path, monkeypatch, cuts, order, task):
    """Boxes in any order are compared with a single file and with other boxes, with the index of the change."""
    monkeypatch.setattr(pair_plan, "TASK_ELEMENTS", task)
    before = np.arange(30, dtype=np.float32).reshape(6, 5)
    after = before.copy()
    after[2, 4], after[5, 0] = 99, -7
    rows = []
    for name, array in (("a", before), ("b", after)):
        data = write_boxes(array, cuts, tmp_path, name=name)
        listed = replace(data.storage.boxes, boxes=data.storage.boxes.boxes[::order])
        rows.append(build_row(replace(data, storage=replace(data.storage, boxes=listed))))
    other = build_row(write_boxes(after, ([4], [3]), tmp_path, name="c"))
    single = store(torch.from_numpy(after))
    for actual in (outcome(rows[0], rows[1]), outcome(rows[0], single), outcome(rows[0], other)):
        assert (actual.elements, actual.changed, actual.first, actual.max_abs) == (30, 2, (2, 4), 85.0)
    assert outcome(rows[1], rows[1]) == outcome(rows[1], single) == outcome(other, rows[1]) == Delta(elements=30)


def test_contiguous_boxes_are_read_in_place(store, tmp_path):
    """Neither side is assembled: each task names the file of its box and its first element."""
    array = np.arange(12, dtype=np.float32).reshape(6, 2)
    parted, single = build_row(write_boxes(array, ([4], []), tmp_path)), store(torch.from_numpy(array))
    tasks = pair_plan._plan_or_error(0, Pair(parted, single), CompareOptions())
    boxes = [box.data.storage for box in parted.data.storage.boxes.boxes]
    where = single.data.storage
    assert [(task.start, task.count) for task in tasks] == [(0, 8), (8, 4)]
    assert [(task.before.path, task.before.offset + 4 * task.start) for task in tasks] == [
        (box.path, box.offset) for box in boxes
    ]
    assert [(task.after.path, task.after.offset) for task in tasks] == [(where.path, where.offset)] * 2


@pytest.mark.parametrize("view", ["transposed", "a part", "the beginning", "big endian"])
def test_view_of_boxes_is_compared_in_its_c_order(store, tmp_path, view):
    """The elements are compared in the C order of the view."""
    array = np.arange(16, dtype=np.float32).reshape(4, 4)
    data = write_boxes(array.byteswap() if view == "big endian" else array, ([1, 3], []), tmp_path)
    if view == "transposed":
        data, array = replace(data, strides=(1, 4)), array.T
    elif view == "a part":
        data, array = replace(data, shape=(2, 4), offset=4), array[1:3]
    elif view == "the beginning":
        data, array = replace(data, shape=(2, 4)), array[:2]
    else:
        data = replace(data, storage=replace(data.storage, big_endian=True))
    assert outcome(build_row(data), store(torch.tensor(array))) == Delta(elements=array.size)


def test_boxes_have_the_fingerprint_of_the_whole_array(store, tmp_path):
    array = np.arange(30, dtype=np.float32).reshape(6, 5)
    rows = [build_row(write_boxes(array, cuts, tmp_path, name=f"n{n}-")) for n, cuts in enumerate(CUTS.values())]
    assert set(compute_fingerprints([*rows, store(torch.from_numpy(array))], jobs=1)) == set(
        compute_fingerprints([store(torch.from_numpy(array))], jobs=1)
    )


# --- fingerprints, and another device --------------------------------------------------------------------------------


def test_a_quantized_tensor_has_no_fingerprint(store):
    """The stored integers are only half of the values; another scale gives other values."""
    tensor = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8)
    per_channel = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    assert compute_fingerprints([store(tensor), store(per_channel)], jobs=1) == [None, None]
    plain = store(torch.tensor([2, 4], dtype=torch.int8))
    lent = build_row(replace(plain.data, quantizer=store(tensor).data.quantizer))
    assert compute_fingerprints([plain, lent], jobs=1) == [plain.data.storage.crc32, None]


def test_tasks_on_another_device_give_the_same_result(store, monkeypatch):
    """Every pair runs in order on the requested device, and each byte is reported."""
    devices = []
    run_on = gpu_kernel.run_batch_on_device
    monkeypatch.setattr(gpu_kernel, "resolve_device", lambda name: torch.device({"cuda:7": "cpu"}[name]))
    monkeypatch.setattr(
        gpu_kernel,
        "run_batch_on_device",
        lambda options, tasks, device: devices.append(device) or run_on(options, tasks, device),
    )
    tensors = [torch.arange(float(n)) for n in (5, 70_000, 9)]
    pairs = [Pair(store(tensor), store(tensor + (n == 1))) for n, tensor in enumerate(tensors)]
    reported = []
    actual_pairs = compare_pairs(
        pairs, CompareOptions(device="cuda:7"), progress=lambda name, count: reported.append(count)
    )
    expected = compare_pairs(pairs, CompareOptions())
    assert [delta.changed for delta in actual_pairs] == [delta.changed for delta in expected] == [0, 70_000, 0]
    assert actual_pairs[1].l2 == pytest.approx(expected[1].l2)
    assert sum(reported) == sum(4 * len(tensor) for tensor in tensors)
    assert set(devices) == {torch.device("cpu")}
