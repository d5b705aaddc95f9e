"""List the files to scan: the files of a folder's model, shards of an index, and archives listed in metadata."""

from __future__ import annotations

from collections.abc import Iterator

from statecli import formats
from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.formats import dcp, sharded
from statecli.formats.shared.dcp_metadata import Stored
from statecli.storage import files, json_object
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import METADATA, drop_current_folder


def find_stored_archives(path: str) -> dcp.StoredPlaces:
    """Return the archives listed in the metadata of a folder (a dict by file), and the files that cannot be read.

    A metadata file that names an archive outside the folder also counts as unreadable.
    """
    archives: dict[str, list[Stored]] = {}
    unreadable_files: list[dcp.UnreadableFile] = []
    members = ("", *_list_members(path)) if files.is_folder(path) else ()
    for folder_name in dict.fromkeys(map(files.get_folder, members)):
        folder = files.join(path, folder_name) if folder_name else path
        if not dcp.sniff(folder, b""):
            continue
        places, unreadable_metadata = dcp.collect_places(folder)
        archives.update((files.join(path, folder_name, name), places[name]) for name in filter(_is_plain_name, places))
        unreadable_files.extend(
            dcp.UnreadableFile(files.join(path, folder_name, name), why) for name, why in unreadable_metadata
        )
        outside_name = next((name for name in places if not _is_plain_name(name)), None)
        if outside_name is not None:
            why = f"the metadata names an archive outside the folder: {quoting.quote(outside_name)}"
            unreadable_files.append(dcp.UnreadableFile(files.join(path, folder_name, METADATA), why))
    return dcp.StoredPlaces(archives, unreadable_files)


def list_scanned_files(path: str) -> list[str]:
    """Return the file, or the files of a folder's model; include the shards of each index."""
    try:
        paths = [files.join(path, name) for name in _list_members(path)] if files.is_folder(path) else [path]
        return list(dict.fromkeys(file for name in paths for file in (name, *_list_shards(name))))
    except (OSError, UnreadableError) as error:  # the reader of the tensors reports the same error
        if files.reads_are_requests(path) or is_system_error(error):
            raise UnreadableError(f"{path}: {error}") from error
        return []


def _list_members(path: str) -> list[str]:
    """Return the files of the folder's model, or all files if statecli cannot decide which files belong to it."""
    try:
        return list(formats.members(path))
    except UnreadableError:
        return sorted(files.list_names(path))


def _list_shards(path: str) -> list[str]:
    """Return the shards of a file that the tensor reader recognises as an index by its content; [] for other files."""
    try:
        source = ByteSource(path)
    except UnreadableError:  # the scan of the file itself has the same error
        return []
    with source:
        if not sharded.sniff(path, source.head):
            return []
        data = source.read(0, min(source.size, sharded.MAX_INDEX_BYTES))
    try:
        return list(_iter_shards(path, data))
    except MalformedError:  # the reader of the tensors reports the same error
        return []


def _iter_shards(path: str, data: bytes) -> Iterator[str]:
    document = json_object.parse_object(data, path).document
    weight_map = document.get("weight_map")
    shards = weight_map.values() if type(weight_map) is dict else ()
    for name in sorted({drop_current_folder(shard) for shard in shards if type(shard) is str}):
        file = files.join(files.get_folder(path), name)
        if _is_plain_name(name) and files.is_file(file):
            yield file


def _is_plain_name(name: str) -> bool:
    """Return True for a file name without a folder. Readers refuse paths that lead out of the folder."""
    return files.get_name(name) == name and "\0" not in name


def is_system_error(error: Exception) -> bool:
    """Return True for a system error that a retry may avoid. A missing file is not such an error."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def is_empty(path: str) -> bool:
    """Return True for a file of zero bytes, False for a file of unknown size."""
    try:
        return files.get_size(path) == 0
    except UnreadableError:
        return False
