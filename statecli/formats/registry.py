"""All formats, in the order in which they are tried. A reader is imported only when a file may have its format."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Protocol, cast

from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ModelState, ReadFile

#: Second argument of `FormatReader.read`: the section of a file, or for a folder the function that reads its files.
ReadArgument = str | ReadFile | None


class FormatReader(Protocol):
    """The module of a format. See `statecli.formats` for its functions and their errors."""

    NAME: str
    TRAITS: FormatTraits

    def sniff(self, path: str, head: bytes) -> bool: ...

    def read(self, path: str, argument: ReadArgument) -> ModelState: ...

    def members(self, path: str) -> tuple[str, ...]: ...


class Format:
    """A format and its reader.

    Attributes:
        name: The `format` of a state; with `_` for `-` the name of the reader's module.
        beginnings: Every file begins with one of these texts; empty if only the reader can decide.
    """

    def __init__(self, name: str, *beginnings: bytes) -> None:
        self.name = name
        self.beginnings = beginnings

    @cached_property
    def reader(self) -> FormatReader:
        """Module that reads the format. Only the module of a folder format has `members`."""
        return cast(FormatReader, import_module(f"statecli.formats.{self.name.replace('-', '_')}"))

    @property
    def traits(self) -> FormatTraits:
        return self.reader.TRAITS

    def sniff(self, path: str, head: bytes) -> bool:
        """Return whether the file or folder `path` is of this format. `head` has the first bytes of a file."""
        return (not self.beginnings or head.startswith(self.beginnings)) and self.reader.sniff(path, head)


_ZIP = b"PK\3\4"
#: In the order in which they are tried: GGUF first, because a GGUF file with 123 tensors begins as a safetensors file
#: may. test_house.py compares the modules of the folder with these tuples.
FILES = (
    Format("gguf", b"GGUF"),
    Format("safetensors"),
    Format("npy", b"\x93NUMPY"),
    Format("npz", _ZIP),
    Format("torch-export", _ZIP),
    Format("torchscript", _ZIP),
    Format("torch-zip", _ZIP),
    Format("torch-legacy"),
    Format("flax-msgpack"),
)
#: The last format accepts every folder.
FOLDERS = tuple(map(Format, ("dcp", "dcp-safetensors", "deepspeed", "megatron", "trainer", "sharded")))
FORMATS = (*FILES, *FOLDERS)


def find_format(path: str, head: bytes, *, is_folder: bool = False) -> Format | None:
    """Return the first format that accepts the file or folder, or None if no format accepts it."""
    return next((format for format in (FOLDERS if is_folder else FORMATS) if format.sniff(path, head)), None)


def is_recognised_folder(path: str) -> bool:
    """Return True if any format but `sharded` recognises the folder. `sharded` accepts every folder."""
    return find_format(path, b"", is_folder=True) is not FOLDERS[-1]
