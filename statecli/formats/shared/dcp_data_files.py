"""Data files that the metadata of a torch.distributed.checkpoint folder names: which ones can be read, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import plural
from statecli.formats.shared.dcp_metadata import Metadata, Stored
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import is_plain_file_name


class BadFile(MalformedError):
    """Error: a file is missing, truncated or must not be read."""


class DataFiles:
    """Files named by the metadata: the size of each readable file, or the reason why it is not read.

    `others` are items in the same files that are not shown.
    """

    def __init__(self, path: str, metadata: Metadata, others: Sequence[Stored], oddities: list[Oddity]) -> None:
        self.path = path
        self.places = metadata.places
        self.ends = _compute_ends([*metadata.places.values(), others])
        self.sizes: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self._refuse_outside()
        if message := self._find_missing():
            oddities.append(Oddity(OddityKind.MISSING_RANK.value, message))
        existing_names = [name for name in self.ends if name not in self.unreadable]
        files.prefetch(files.join(path, name) for name in existing_names)
        for name in existing_names:
            try:
                with ByteSource(files.join(path, name)) as source:
                    self.sizes[name] = source.size
            except UnreadableError as error:
                self._mark_unreadable([name], quoting.append_reason(quoting.name(name), error), "copy the file again")

    def _refuse_outside(self) -> None:
        names = [name for name in self.ends if not is_plain_file_name(name)]
        if names:
            predicate = (
                f" and {plural(len(names) - 1, 'more name')} that are not plain file names"
                if names[1:]
                else ", which is not a plain file name"
            )
            message = f".metadata names {quoting.quote(names[0])}{predicate}"
            self._mark_unreadable(names, message, "do not load this checkpoint; save the checkpoint again")

    def _find_missing(self) -> str | None:
        names = [name for name in self.ends if name not in self.unreadable]
        files.prefetch(files.join(self.path, name) for name in names)
        missing_names = [name for name in names if not files.exists(files.join(self.path, name))]
        if not missing_names:
            return None
        counts = f"{len(self.ends) - len(missing_names)} of the {len(self.ends)} files that .metadata lists exist"
        message = f"{quoting.names(missing_names)} {'are' if missing_names[1:] else 'is'} missing: {counts}"
        self._mark_unreadable(
            missing_names, message, "copy the file again" if not missing_names[1:] else "copy the files again"
        )
        return message

    def _mark_unreadable(self, names: list[str], why: str, help: str) -> None:
        """Record one message for all unreadable files in `names`, with the number of affected tensors and values."""
        unreadable = set(names)
        affected_count = sum(any(stored.file in unreadable for stored in places) for places in self.places.values())
        contains = "these files contain" if names[1:] else "this file contains"
        message = (
            f"{why}; {contains} data of {affected_count} of the {len(self.places)} tensors and other values; {help}"
        )
        self.unreadable.update(dict.fromkeys(names, message))

    def can_read(self, *places: Stored) -> bool:
        """Return whether each byte range in `places` is inside a readable file."""
        return all(
            stored.file in self.sizes and stored.offset + stored.length <= self.sizes[stored.file] for stored in places
        )

    def check_place(self, stored: Stored) -> None:
        """Raise BadFile for a byte range in an unreadable file or beyond the end of its file."""
        if stored.file in self.unreadable:
            raise BadFile(self.unreadable[stored.file])
        if stored.offset + stored.length > self.sizes[stored.file]:
            end, size = self.ends[stored.file], self.sizes[stored.file]
            raise BadFile(
                f"{stored.file} is truncated: .metadata needs {end} bytes, but the file has {size}; copy the file again"
            )


def _compute_ends(places: Iterable[Sequence[Stored]]) -> dict[str, int]:
    """Return the size in bytes that each file must have to contain all its byte ranges."""
    last_end: dict[str, int] = {}
    for group in places:
        for stored in group:
            last_end[stored.file] = max(stored.offset + stored.length, last_end.get(stored.file, 0))
    return last_end
