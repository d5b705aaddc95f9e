"""Read the chat templates in the metadata of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core.errors import UnreadableError
from statecli.file_scan.scanned_files import is_system_error, list_scanned_files
from statecli.formats import gguf
from statecli.storage import files
from statecli.storage.byte_source import ByteSource


def read_templates(path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each chat template in a file, or in the files of a folder's model.

    An unreadable file has no templates, because the reader of its tensors reports the error. Raises UnreadableError if
    reading may succeed later.
    """
    for file in list_scanned_files(path):
        try:
            with ByteSource(file) as source:
                is_gguf = gguf.sniff(file, source.head)
            templates = gguf.read_chat_templates(file) if is_gguf else []
        except UnreadableError as error:
            if is_system_error(error):
                raise UnreadableError(f"{file}: {error}") from error
            continue
        shard = "" if file == path else f"{files.get_name(file)}: "
        yield from ((f"{shard}{key}", text) for key, text in templates)
