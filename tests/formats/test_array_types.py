"""Which states of a numpy dtype are those that numpy writes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from statecli.formats._names import Scanner

CODES = ["?", "i1", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G", "S3", "U5", "V7", "O", "M8[ns]", "m8[D]", "l", "p"]
#: Each makes a type of another one.
SHAPES = {
    "itself": np.dtype,
    "the other byte order": lambda code: np.dtype(code).newbyteorder(),
    "aligned": lambda code: np.dtype([("a", code), ("b", "u1")], align=True),
    "nested": lambda code: np.dtype([("a", code, (2, 3)), ("b", [("c", code), ("d", "O")])]),
    "subarray": lambda code: np.dtype((code, (2,))),
    "titled": lambda code: np.dtype([(("title", "name"), code)]),
    "empty": lambda _: np.dtype([]),
}


def misused(value, protocol):
    """The names of its pickle that are put to another use than to hold data."""
    scanner = Scanner(pickle.dumps(value, protocol), "it")
    scanner.run(0)
    return [one.qualified for one in scanner.mentions() if one.misuse]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_what_numpy_writes_is_sound(shape, protocol):
    """The type alone, an array, a scalar of it."""
    for code in CODES:
        dtype = SHAPES[shape](code)
        array = np.zeros(2, dtype)
        assert [misused(one, protocol) for one in (dtype, array, array[0])] == [[], [], []], code


@pytest.mark.parametrize("protocol", range(6))
def test_what_numpy_derives_is_sound(protocol):
    """Record arrays, masked arrays, fields that overlap, which share their bytes."""
    fields = [("a", "i4"), ("b", "f4")]
    shared = np.zeros(2, {"names": ["a", "b"], "formats": ["f8", "i2"], "offsets": [0, 4]})
    arrays = [np.rec.array([(1, 2.0)], dtype=fields), np.ma.zeros(2, fields), shared]
    assert [misused(one, protocol) for one in arrays] == [[], [], []]


@pytest.mark.parametrize("place", range(8))
def test_a_state_with_one_thing_changed_is_not_sound(place):
    """Of a record of objects and numbers: each part that says where and what the objects are."""
    function, args, state = np.dtype([("a", "O"), ("b", "i4")]).__reduce__()
    version, order, subarray, names, fields, size, alignment, flags = state
    objects, numbers = np.dtype("O"), np.dtype("i4")
    other = [
        (version, order, subarray, names, fields, size, alignment, 0),
        (version, order, subarray, names, fields, size - 1, alignment, flags),
        (version, order, subarray, names, {**fields, "b": (numbers, 9)}, size, alignment, flags),
        (version, order, subarray, names, {**fields, "b": (numbers, -1)}, size, alignment, flags),
        (version, order, subarray, names, {"a": (numbers, 0)}, size, alignment, flags),
        (version, order, (objects, (2,)), None, None, size, alignment, flags),
        (version, order, (numbers, (2,)), None, None, size, alignment, flags),
        (version, order, (numbers, (-2,)), None, None, size, alignment, 0),
    ][place]
    assert misused(_Made(function, args, state), 4) == []
    assert misused(_Made(function, args, other), 4) == ["numpy.dtype"]


class _Made:
    """Is pickled as this call and this state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced
