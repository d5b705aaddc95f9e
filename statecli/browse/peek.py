"""Read the values of a tensor for the panel: the first values, the first bytes, statistics and a histogram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from statecli import values
from statecli.core.errors import StateError, UnreadableError
from statecli.core.model_state import Stats, TensorData, TensorInfo
from statecli.storage import files
from statecli.storage.file_version import FileVersion, read_version

if TYPE_CHECKING:
    from statecli.values.preview import ValueHistogram

#: Number of values and of bytes shown from the start of a tensor.
FIRST_VALUES = 24
FIRST_BYTES = 64
#: Largest size in bytes of a local tensor whose statistics are read without a request: a few hundredths of a second.
MAX_AUTOMATIC_BYTES = 16 << 20


class Peek(msgspec.Struct, frozen=True):
    """First values of a tensor, and facts about all values.

    Attributes:
        values: The first values; None if they are not numbers or cannot be read.
        raw: The first stored bytes.
        error: Why values or bytes could not be read; None without an error.
        histogram: Histogram of the values; None before the statistics are read.
        first_unusual: Index of the first `nan`, and of the first `inf`, if the statistics count any.
    """

    values: tuple[int | float | complex, ...] | None = None
    raw: bytes | None = None
    error: str | None = None
    histogram: ValueHistogram | None = None
    first_unusual: Mapping[str, tuple[int, ...]] = {}


class Versions:
    """Versions of local files at the time when their headers were read. `by_path` has a version for each path."""

    def __init__(self, versions: Mapping[str, FileVersion | None]) -> None:
        self.by_path = dict(versions)

    def add(self, versions: Mapping[str, FileVersion | None]) -> None:
        """Add the versions of more files. A file that is recorded already keeps its first version."""
        self.by_path = {**versions, **self.by_path}

    def check(self, tensor: TensorInfo) -> None:
        """Raise UnreadableError if a file of the tensor changed after its header was read."""
        for path in {byte_range.path for byte_range in tensor.ranges if byte_range.path}:
            if path in self.by_path and read_version(path) != self.by_path[path]:
                advice = "quit and run statecli browse again"
                raise UnreadableError(f"{path}: the file changed after statecli read its header; {advice}")


def find_data(tensor: TensorInfo) -> tuple[str, TensorData] | None:
    """Return the data to show and its name: "" for a plain tensor, or the inner tensor `values` for a sparse tensor."""
    if tensor.data is not None:
        return "", tensor.data
    parts = dict(tensor.parts)
    name = "values" if "values" in parts else next(iter(parts), None)
    return None if name is None else (name, parts[name])


def reads_automatically(tensor: TensorInfo) -> bool:
    """Return True if the statistics of the tensor are read when the cursor rests on it."""
    is_cheap = not any(files.reads_are_requests(byte_range.path) for byte_range in tensor.ranges)
    return tensor.nbytes <= MAX_AUTOMATIC_BYTES and is_cheap


def read_peek(tensor: TensorInfo, versions: Versions) -> Peek:
    """Read the first values and bytes. The result contains any error, so that the screen stays open."""
    part = find_data(tensor)
    if tensor.damage is not None or part is None:
        return Peek(error=tensor.damage)
    numbers, raw, error = None, None, None
    try:
        versions.check(tensor)
        raw = values.preview.read_first_bytes(part[1], tensor.fqn, FIRST_BYTES)
        numbers = tuple(values.preview.read_first_values(part[1], tensor.fqn, FIRST_VALUES))
    except StateError as caught:
        error = str(caught)
    return Peek(numbers, raw, error)


def read_statistics(tensor: TensorInfo, versions: Versions) -> Stats:
    """Read the statistics, and verify the checksums of the tensor. An error becomes the result's `reason`."""
    if tensor.damage is not None:
        return Stats(reason=tensor.damage)
    try:
        versions.check(tensor)
        (result,) = values.stats.stats_batch(
            None, [values.stats.StatsTask(tensor, tuple(dict.fromkeys(tensor.ranges)))]
        )
        return Stats(reason=str(result)) if isinstance(result, StateError) else result
    except StateError as error:
        return Stats(reason=str(error))


def read_histogram(tensor: TensorInfo, stats: Stats, versions: Versions) -> ValueHistogram | None:
    """Return the histogram of the values, or None if they cannot be read, cannot be ordered, or are all equal."""
    # The stored values of a sparse tensor are not all of its values.
    if tensor.data is None or stats.min is None or stats.max is None:
        return None
    try:
        versions.check(tensor)
        return values.preview.compute_value_histogram(tensor.data, tensor.fqn, stats.min, stats.max)
    except StateError:
        return None  # the statistics have reported the error


def read_first_unusual(tensor: TensorInfo, stats: Stats, versions: Versions) -> Mapping[str, tuple[int, ...]]:
    """Return the index of the first NaN and of the first infinity. The result is empty if neither is found."""
    if tensor.data is None or not (stats.nan or stats.inf):
        return {}
    try:
        versions.check(tensor)
        return values.preview.find_first_unusual(tensor.data, tensor.fqn)
    except StateError:
        return {}  # the statistics have reported the error
