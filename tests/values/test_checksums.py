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
from statecli.values.compare import Pair, check_checksums, compare_pairs, compute_fingerprints
from statecli.values.delta import CompareOptions, Delta

from .conftest import info_of


def with_crc(tensor: TensorInfo, crc32: int | None, fqn: str = "w") -> TensorInfo:
    """Return the same bytes with another recorded checksum."""
    assert tensor.data is not None
    return replace(tensor, fqn=fqn, data=replace(tensor.data, storage=replace(tensor.data.storage, crc32=crc32)))


@pytest.fixture
def both(store):
    """Two different tensors and a copy of the first; all checksums are right."""
    return store(torch.arange(6.0)), store(torch.arange(6.0) + 1), store(torch.arange(6.0))


def outcome(before: TensorInfo, after: TensorInfo) -> object:
    (pair,) = compare_pairs([Pair(before, after)], CompareOptions(), jobs=1)
    return pair


@pytest.mark.parametrize("side", [0, 1])
def test_damage_on_either_side_of_a_difference_is_an_error(both, side):
    """A difference caused by damage is not a change by training."""
    pair = [both[0], both[1]]
    pair[side] = with_crc(pair[side], 1)
    actual_outcome = outcome(*pair)
    assert isinstance(actual_outcome, ChecksumMismatch)
    assert pair[side].data.storage.path in str(actual_outcome)


def test_a_difference_between_good_files_is_a_difference(both):
    """The files have recorded checksums, or have none."""
    for crcs in ((None, None), (None, ...), (..., None), (..., ...)):
        pair = [row if crc is ... else with_crc(row, crc) for row, crc in zip(both[:2], crcs, strict=True)]
        actual_outcome = outcome(*pair)
        assert isinstance(actual_outcome, Delta)
        assert actual_outcome.changed == 6


@pytest.mark.parametrize("side", [0, 1])
def test_equal_bytes_under_two_checksums_are_an_error(both, side):
    """One of the two files is damaged, and its own checksum shows which."""
    pair = [both[0], both[2]]
    pair[side] = with_crc(pair[side], 1)
    actual_outcome = outcome(*pair)
    assert isinstance(actual_outcome, ChecksumMismatch)
    assert pair[side].data.storage.path in str(actual_outcome)


def test_equal_bytes_under_one_checksum_are_equal(both):
    """The checksums are the same, or a side has no checksum."""
    for crcs in ((..., ...), (..., None), (None, ...), (None, None)):
        pair = [row if crc is ... else with_crc(row, crc) for row, crc in zip((both[0], both[2]), crcs, strict=True)]
        assert outcome(*pair) == Delta(elements=6)


def test_storages_of_other_lengths_have_other_checksums(store):
    """Equal elements in storages of different length have different checksums, and this is not an error."""
    whole, part = store(torch.arange(6.0)), store(torch.arange(9.0)[:6])
    assert outcome(whole, part) == Delta(elements=6)
    assert outcome(part, whole) == Delta(elements=6)


def test_damage_fails_the_pairs_that_lie_in_it_and_no_other(both):
    bad = with_crc(both[0], 1)
    pairs = compare_pairs([Pair(bad, both[1]), Pair(both[1], both[2]), Pair(both[1], bad)], CompareOptions(), jobs=1)
    assert [type(result) for result in pairs] == [ChecksumMismatch, Delta, ChecksumMismatch]


def test_a_changed_file_comes_before_its_checksums(both):
    """The error names the file and the tensor, whichever side changed."""
    pair = Pair(both[0], both[1])
    path = both[1].data.storage.path
    seen = {path: (0, 0, 0, 0, 0)}
    (actual_pair,) = compare_pairs([pair], CompareOptions(), jobs=1, header_versions=seen)
    assert type(actual_pair) is FileChanged
    assert str(actual_pair).startswith(f"{path}: w: changed while statecli read it")
    (actual_pair,) = compare_pairs([Pair(both[1], both[0])], CompareOptions(), jobs=1, header_versions=seen)
    assert str(actual_pair).startswith(f"{path}: w: changed while statecli read it")


def test_each_damaged_tensor_has_its_own_errors(both):
    """A tensor with the right checksum, or without a checksum, has no errors."""
    bad = with_crc(both[1], 1)
    checksums = check_checksums([both[0], bad, with_crc(both[0], None), bad], jobs=1)
    assert [len(errors) for errors in checksums] == [0, 1, 0, 1]
    assert check_checksums([both[0], with_crc(both[1], None)], jobs=1) == [(), ()]


def test_a_file_that_is_gone_has_no_right_checksum(both):
    """An unreadable file is reported as damaged."""
    os.remove(both[0].data.storage.path)
    (checksum,) = check_checksums([both[0]], jobs=1)
    assert "cannot be opened" in str(checksum[0])


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_recorded_checksum_stands_for_a_whole_storage_alone(both, store):
    """A view of a part, or in another order, is read to compute the fingerprint."""
    numbers = torch.arange(6.0)
    assert compute_fingerprints([with_crc(both[0], 7)], jobs=1) == [7]
    views = (numbers[:5], numbers[1:], numbers.reshape(2, 3).t(), numbers[::2])
    tensors = [with_crc(store(view), 7) for view in views]
    expected = [zlib.crc32(view.contiguous().numpy().tobytes()) for view in views]
    assert compute_fingerprints(tensors, jobs=1) == expected


def test_a_fingerprint_without_a_recorded_checksum_is_read(both):
    """The fingerprint equals the checksum that a zip records."""
    recorded = both[0].data.storage.crc32
    assert compute_fingerprints([with_crc(both[0], None)], jobs=1) == [recorded]


def test_parts_have_one_fingerprint_together(both):
    """The fingerprint of a single part is the part's own; the fingerprint of two parts depends on their order."""
    first_data, second_data = both[0].data, both[1].data
    bare = replace(info_of(first_data), data=None)
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
    unrecorded = [(name, with_crc(row, None).data) for name, row in (("a", both[0]), ("b", both[1]))]
    assert compute_fingerprints([replace(bare, parts=tuple(unrecorded))], jobs=1) == [both_parts]


def test_what_is_not_read_has_no_fingerprint(both):
    """The tensor has an unknown type, has no data, or has a part of unknown type."""
    unknown = replace(both[0].data, dtype="uint3")
    bare = replace(both[0], data=None)
    tensors = [replace(both[0], data=unknown), bare, replace(bare, parts=(("a", both[0].data), ("b", unknown)))]
    assert compute_fingerprints(tensors, jobs=1) == [None, None, None]


def test_a_fingerprint_of_a_file_that_is_gone_is_its_error(both):
    """Without the file, its values cannot be compared with any other values."""
    gone = with_crc(both[0], None)
    os.remove(gone.data.storage.path)
    (fingerprint,) = compute_fingerprints([gone], jobs=1)
    assert isinstance(fingerprint, UnreadableError)
