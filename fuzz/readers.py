"""Every reader, and every file of a folder: a file is read, or refused in one line; nothing else happens.

An input is the number of a file of the seed checkpoints, in two bytes, and what replaces its content.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from statecli import formats
from statecli.core.errors import UnreadableError
from tests.formats.test_any_bytes import SEEDS, damage_bytes

#: Bytes of a file that is replaced; larger ones belong to formats that have a small one too.
MAX_SEED = 50_000


@cache
def places() -> list[tuple[Path, Path]]:
    """The files that inputs replace, each with the checkpoint that it belongs to; written once for a run."""
    found: list[tuple[Path, Path]] = []
    for write in SEEDS:
        folder = Path("seeds", write.__name__).absolute()
        folder.mkdir(parents=True)
        target = write(folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size <= MAX_SEED]
        found.extend((target, path) for path in files)
    return found


@cache
def originals() -> dict[Path, bytes]:
    """What the files hold until an input replaces it."""
    return {path: path.read_bytes() for _, path in places()}


def seeds() -> Iterator[bytes]:
    """Yield each file as it is."""
    for number, (_, path) in enumerate(places()):
        yield number.to_bytes(2, "little") + originals()[path]


def check(data: bytes) -> None:
    """Read the checkpoint of which the file is replaced."""
    target, path = places()[int.from_bytes(data[:2], "little") % len(places())]
    original = originals()[path]
    path.write_bytes(data[2:])
    try:
        formats.read(str(target))
    except UnreadableError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"not one line: {error!s}") from error
    finally:
        path.write_bytes(original)


def mutate(data: bytes, dice: random.Random, others: list[bytes]) -> bytes:  # noqa: ARG001 - one signature for all
    """Damage the content; the file stays the same."""
    return data[:2] + damage_bytes(data[2:], dice)
