"""Checksums recorded by containers: when statecli verifies them, their conclusions, and their substitutes."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from msgspec.structs import replace

from statecli.core.errors import ChecksumMismatch, UnreadableError
from statecli.core.model_state import TensorInfo
from statecli.storage.file_version import FileChanged
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.fingerprints import compute_fingerprints
from statecli.values.pair_plan import Pair
from statecli.values.recorded_checksums import check_checksums

from .conftest import build_row


def replace_checksum(tensor: TensorInfo, crc32: int | None, fqn: str = "w") -> TensorInfo:
    """Return the same bytes with another recorded checksum."""
    assert tensor.data is not None
    return replace(tensor, fqn=fqn, data=replace(tensor.data, storage=replace(tensor.data.storage, crc32=crc32)))


@pytest.fixture
def tensors_and_copy(store):
    """Two different tensors and a copy of the first; all checksums are right."""
    return store(torch.arange(6.0)), store(torch.arange(6.0) + 1), store(torch.arange(6.0))


def outcome(before: TensorInfo, after: TensorInfo) -> object:
    (pair,) = compare_pairs([Pair(before, after)], CompareOptions(), jobs=1)
    return pair


@pytest.mark.parametrize("side", [0, 1])
def test_damage_on_either_side_of_a_difference_is_an_error(tensors_and_copy, side):
    """A difference caused by damage is not a change by training."""
    pair = [tensors_and_copy[0], tensors_and_copy[1]]
    pair[side] = replace_checksum(pair[side], 1)
    actual_outcome = outcome(*pair)
    assert isinstance(actual_outcome, ChecksumMismatch)
    assert pair[side].data.storage.path in str(actual_outcome)


def test_a_difference_between_good_files_is_a_difference(tensors_and_copy):
    """The files have recorded checksums, or have none."""
    for crcs in ((None, None), (None, ...), (..., None), (..., ...)):
        pair = [
            row if crc is ... else replace_checksum(row, crc)
            for row, crc in zip(tensors_and_copy[:2], crcs, strict=True)
        ]
        actual_outcome = outcome(*pair)
        assert isinstance(actual_outcome, Delta)
        assert actual_outcome.changed == 6


@pytest.mark.parametrize("side", [0, 1])
def test_equal_bytes_under_two_checksums_are_an_error(tensors_and_copy, side):
    """One of the two files is damaged, and its own checksum shows which."""
    pair = [tensors_and_copy[0], tensors_and_copy[2]]
    pair[side] = replace_checksum(pair[side], 1)
    actual_outcome = outcome(*pair)
    assert isinstance(actual_outcome, ChecksumMismatch)
    assert pair[side].data.storage.path in str(actual_outcome)


def test_equal_bytes_under_one_checksum_are_equal(tensors_and_copy):
    """The checksums are the same, or a side has no checksum."""
    for crcs in ((..., ...), (..., None), (None, ...), (None, None)):
        pair = [
            row if crc is ... else replace_checksum(row, crc)
            for row, crc in zip((tensors_and_copy[0], tensors_and_copy[2]), crcs, strict=True)
        ]
        assert outcome(*pair) == Delta(elements=6)


def test_storages_of_other_lengths_have_other_checksums(store):
    """Equal elements in storages of different length have different checksums, and this is not an error."""
    whole, part = store(torch.arange(6.0)), store(torch.arange(9.0)[:6])
    assert outcome(whole, part) == Delta(elements=6)
    assert outcome(part, whole) == Delta(elements=6)


def test_wrong_checksum_fails_only_the_pairs_of_its_tensor(tensors_and_copy):
    damaged = replace_checksum(tensors_and_copy[0], 1)
    pairs = compare_pairs(
        [
            Pair(damaged, tensors_and_copy[1]),
            Pair(tensors_and_copy[1], tensors_and_copy[2]),
            Pair(tensors_and_copy[1], damaged),
        ],
        CompareOptions(),
        jobs=1,
    )
    assert [type(result) for result in pairs] == [ChecksumMismatch, Delta, ChecksumMismatch]


def test_a_changed_file_comes_before_its_checksums(tensors_and_copy):
    """The error names the file and the tensor, whichever side changed."""
    pair = Pair(tensors_and_copy[0], tensors_and_copy[1])
    path = tensors_and_copy[1].data.storage.path
    seen = {path: (0, 0, 0, 0, 0)}
    (actual_pair,) = compare_pairs([pair], CompareOptions(), jobs=1, header_versions=seen)
    assert type(actual_pair) is FileChanged
    assert str(actual_pair).startswith(f"{path}: w: changed while statecli read it")
    (actual_pair,) = compare_pairs(
        [Pair(tensors_and_copy[1], tensors_and_copy[0])], CompareOptions(), jobs=1, header_versions=seen
    )
    assert str(actual_pair).startswith(f"{path}: w: changed while statecli read it")


def test_each_damaged_tensor_has_its_own_errors(tensors_and_copy):
    """A tensor with the right checksum, or without a checksum, has no errors."""
    damaged = replace_checksum(tensors_and_copy[1], 1)
    checksums = check_checksums(
        [tensors_and_copy[0], damaged, replace_checksum(tensors_and_copy[0], None), damaged], jobs=1
    )
    assert [len(errors) for errors in checksums] == [0, 1, 0, 1]
    assert check_checksums([tensors_and_copy[0], replace_checksum(tensors_and_copy[1], None)], jobs=1) == [(), ()]


def test_checksum_of_a_deleted_file_is_an_error(tensors_and_copy):
    """An unreadable file is reported as damaged."""
    os.remove(tensors_and_copy[0].data.storage.path)
    (checksum,) = check_checksums([tensors_and_copy[0]], jobs=1)
    assert "cannot be opened" in str(checksum[0])


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_recorded_checksum_is_used_only_for_a_whole_storage(tensors_and_copy, store):
    """A view of a part, or in another order, is read to compute the fingerprint."""
    numbers = torch.arange(6.0)
    assert compute_fingerprints([replace_checksum(tensors_and_copy[0], 7)], jobs=1) == [7]
    views = (numbers[:5], numbers[1:], numbers.reshape(2, 3).t(), numbers[::2])
    tensors = [replace_checksum(store(view), 7) for view in views]
    expected = [zlib.crc32(view.contiguous().numpy().tobytes()) for view in views]
    assert compute_fingerprints(tensors, jobs=1) == expected


def test_a_fingerprint_without_a_recorded_checksum_is_read(tensors_and_copy):
    """The fingerprint equals the checksum that a zip records."""
    recorded = tensors_and_copy[0].data.storage.crc32
    assert compute_fingerprints([replace_checksum(tensors_and_copy[0], None)], jobs=1) == [recorded]


def test_parts_have_one_fingerprint_together(tensors_and_copy):
    """The fingerprint of a single part is the part's own; the fingerprint of two parts depends on their order."""
    first_data, second_data = tensors_and_copy[0].data, tensors_and_copy[1].data
    bare = replace(build_row(first_data), data=None)
    first, both_parts, swapped = compute_fingerprints(
        [
            replace(bare, parts=(("a", first_data),)),
            replace(bare, parts=(("a", first_data), ("b", second_data))),
            replace(bare, parts=(("a", second_data), ("b", first_data))),
        ],
        jobs=1,
    )
    assert first == first_data.storage.crc32
    assert both_parts == zlib.crc32(repr([first_data.storage.crc32, second_data.storage.crc32]).encode())
    assert len({first, both_parts, swapped}) == 3
    unrecorded = [
        (name, replace_checksum(row, None).data)
        for name, row in (("a", tensors_and_copy[0]), ("b", tensors_and_copy[1]))
    ]
    assert compute_fingerprints([replace(bare, parts=tuple(unrecorded))], jobs=1) == [both_parts]


def test_tensor_without_readable_data_has_no_fingerprint(tensors_and_copy):
    """The tensor has an unknown type, has no data, or has a part of unknown type."""
    unknown = replace(tensors_and_copy[0].data, dtype="uint3")
    bare = replace(tensors_and_copy[0], data=None)
    tensors = [
        replace(tensors_and_copy[0], data=unknown),
        bare,
        replace(bare, parts=(("a", tensors_and_copy[0].data), ("b", unknown))),
    ]
    assert compute_fingerprints(tensors, jobs=1) == [None, None, None]


def test_fingerprint_of_a_deleted_file_is_an_error(tensors_and_copy):
    """Without the file, its values cannot be compared with any other values."""
    row = replace_checksum(tensors_and_copy[0], None)
    os.remove(row.data.storage.path)
    (fingerprint,) = compute_fingerprints([row], jobs=1)
    assert isinstance(fingerprint, UnreadableError)
