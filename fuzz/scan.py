"""The scan for what loading a file would run: it ends without an error, whatever the file is.

An input is what it is for `readers`: a file of a checkpoint, and what replaces its content.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.readers import mutate, places, seeds
from statecli.core.errors import UnreadableError
from statecli.file_scan import scan

__all__ = ["check", "mutate", "seeds"]


def check(data: bytes) -> None:
    """Scan the bytes under the name that the file has, by themselves."""
    _, path = places()[int.from_bytes(data[:2], "little") % len(places())]
    alone = Path("scanned").absolute() / path.name
    alone.parent.mkdir(exist_ok=True)
    alone.write_bytes(data[2:])
    try:
        scan.scan_pickles(str(alone))
    except UnreadableError as error:
        raise AssertionError(f"a scan of a local file is refused: {error}") from error
    finally:
        alone.unlink()
