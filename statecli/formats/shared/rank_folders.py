"""What folders of ranks share: which one is meant, what was odd, told once, a row for a rank that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import Evidence, Kind, Oddity, TensorInfo
from statecli.storage.source import Source


def noted(oddities: Mapping[str, Iterable[Oddity]]) -> list[Oddity]:
    """What was odd, by the names of ranks or files; told once where it is the same in several."""
    where: dict[Oddity, list[str]] = {}
    for name, found in oddities.items():
        for odd in found:
            where.setdefault(odd, []).append(name)
    more = {odd: f" and {len(names) - 1} more" if len(names) > 1 else "" for odd, names in where.items()}
    return [replace(odd, message=f"{names[0]}{more[odd]}: {odd.message}") for odd, names in where.items()]


def small(path: str, what: str, most: int) -> bytes:
    """A file that says which folder is meant. Raises UnreadableError for one of more than `most` bytes."""
    try:
        with Source(path) as source:
            if source.size > most:
                raise MalformedError(f"has {source.size} bytes, and names no folder")
            return source.read(0, source.size)
    except UnreadableError as error:
        raise type(error)(quoting.with_reason(what, error)) from error.__cause__


def lost(fqn: str, section: str, why: str) -> TensorInfo:
    """A row in place of all that a rank has. `why` is one line that begins with the file or the folder."""
    note = f"cannot be read: {why}"
    return TensorInfo(fqn, "unknown", None, 0, 0, section, Kind.OTHER, Evidence.CONVENTION, note=note, damage=why)
