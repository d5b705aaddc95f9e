"""Pieces of a file to scan, and the pickles and the code found in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from statecli.core.model_state import ScannedPickle
from statecli.file_scan.storage_records import ArchiveRecords
from statecli.pickle_scan.one_pickle import Region
from statecli.pickle_scan.step_budget import Budget, Steps

#: Largest number of bytes of pickles and code of one file that are digested, and bytes read at once for a digest.
_MAX_DIGESTED_BYTES, _DIGEST_READ_BYTES = 1 << 30, 1 << 22


class Piece(NamedTuple):
    """Bytes to scan. `is_pickle`: the name or position shows a pickle. `records`: the records of the archive."""

    region: Region
    where: str
    depth: int
    is_pickle: bool = False
    hidden: bool = True
    is_storage: bool = False
    records: ArchiveRecords | None = None


class ScanResult:
    """The pickles and the code found in a file, within the budgets of the file."""

    def __init__(self, steps: Steps) -> None:
        self.pickles: list[ScannedPickle] = []
        self.steps = steps
        self._digested_bytes = 0

    def add(self, pickle: ScannedPickle) -> None:
        """Add a pickle, or a call in code. Raises OutOfSteps if there are too many."""
        self.pickles.append(pickle)
        self.steps.take(Budget.PICKLES)

    def compute_digest(self, regions: Sequence[Region], names: Sequence[str] = ()) -> str:
        """Return the SHA-256 of the regions; "" if this scan has already digested _MAX_DIGESTED_BYTES bytes.

        `names`: the names of the regions, if the names decide on the code to run.
        """
        self._digested_bytes += sum(region.size for region in regions)
        if self._digested_bytes > _MAX_DIGESTED_BYTES:
            return ""
        return hash_regions(regions, names)

    def add_unread(self, piece: Piece, why: str) -> None:
        """Add a piece that was not scanned to its end."""
        digest = self.compute_digest([piece.region])
        self.add(ScannedPickle(piece.where, piece.region.span, hidden=piece.hidden, unread=why, digest=digest))


def hash_regions(regions: Sequence[Region], names: Sequence[str]) -> str:
    """Return the SHA-256 of the names and the regions' bytes, each after its length."""
    import hashlib  # loads OpenSSL, which no other command has to wait for

    hashed = hashlib.sha256()
    for name in names:
        text = name.encode("utf-8", "surrogatepass")
        hashed.update(len(text).to_bytes(8, "little") + text)
    for region in regions:
        hashed.update(region.size.to_bytes(8, "little"))
        for at in range(0, region.size, _DIGEST_READ_BYTES):
            hashed.update(region.read(at, min(_DIGEST_READ_BYTES, region.size - at)))
    return hashed.hexdigest()
