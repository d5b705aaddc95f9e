"""Shared functions for folders of rank files: read a tracker file, merge oddities, build rows of missing tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from statecli.core.errors import MalformedError
from statecli.core.model_state import Evidence, Kind, Oddity, TensorInfo
from statecli.storage.byte_source import ByteSource, add_subject_to_errors


def merge_oddities(oddities: Mapping[str, Iterable[Oddity]]) -> list[Oddity]:
    """Merge the oddities (unusual facts) of ranks or files. An oddity of several ranks is listed once, with a count."""
    names_by_oddity: dict[Oddity, list[str]] = {}
    for name, rank_oddities in oddities.items():
        for oddity in rank_oddities:
            names_by_oddity.setdefault(oddity, []).append(name)
    other_counts = {
        oddity: f" and {len(names) - 1} more" if len(names) > 1 else "" for oddity, names in names_by_oddity.items()
    }
    return [
        replace(oddity, message=f"{names[0]}{other_counts[oddity]}: {oddity.message}")
        for oddity, names in names_by_oddity.items()
    ]


def read_small(path: str, label: str, max_bytes: int) -> bytes:
    """Read a small file that names a folder. Raises UnreadableError for a file of more than `max_bytes` bytes."""
    with add_subject_to_errors(label), ByteSource(path) as source:
        if source.size > max_bytes:
            raise MalformedError(
                f"has {source.size} bytes, but should contain only a folder name of at most {max_bytes} bytes"
            )
        return source.read(0, source.size)


def note_separate_ranks(count: int) -> Oddity:
    """Note that model-parallel ranks are shown separately, because no file records how their tensors fit together."""
    text = (
        f"statecli shows the {count} model-parallel ranks separately, because each rank has a different shard of the "
        "tensors"
    )
    return Oddity("model-parallel", text)


def build_missing_row(fqn: str, section: str, why: str) -> TensorInfo:
    """Build a tensor row that stands for a rank's missing tensors. `why` is a message that names the file or folder."""
    note = f"cannot be read: {why}"
    return TensorInfo(fqn, "unknown", None, 0, 0, section, Kind.OTHER, Evidence.CONVENTION, note=note, damage=why)
