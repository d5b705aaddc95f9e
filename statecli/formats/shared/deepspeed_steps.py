"""Folder of a DeepSpeed checkpoint: its saved steps, the tracker file that selects a step, and the ranks' files."""

from __future__ import annotations

from typing import NamedTuple

from statecli.core import quoting
from statecli.core.errors import MalformedError, MissingShard, UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.formats.shared import deepspeed_universal
from statecli.formats.shared.rank_folders import read_small
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource

#: Tracker files, each with the name of the folder to load: of the saved checkpoint, and of a universal checkpoint.
TRACKERS = ("latest", "latest_universal")
#: Maximum size of `latest` in bytes; it holds the name of a folder.
MAX_LATEST_BYTES = 512
#: Maximum size of `latest` in bytes including surrounding blanks, because DeepSpeed strips them.
_MAX_PADDED_LATEST_BYTES = 2**20
_STATES = "_states.pt"
_MODEL = compile_on_use(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<mp>\d{2,6})_model_states\.pt")
_OPTIMIZER = compile_on_use(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_?optim_states\.pt")
#: Names of files of experts and of pipeline stages, which statecli does not read.
_UNREAD_FILE = compile_on_use(r"(?:layer|expp_rank)_.+_(?:model|optim)_states\.pt")
#: Character of a glob pattern, or a control character, in a tag.
_GLOB_CHARACTER = compile_on_use(r"[*?[\x00-\x1f\x7f]")


class RankFiles(NamedTuple):
    """Files of one model-parallel rank, by data-parallel rank. The key -1 is a model file that all ranks share."""

    model: dict[int, str]
    optimizer: dict[int, str]


def list_steps(path: str) -> list[str]:
    """List the saved steps: the subfolders that have a rank's model file or a universal checkpoint (`zero/`)."""
    return [name for name in checkpoint_folder.list_inner_folders(path) if _is_step(files.join(path, name))]


def _is_step(path: str) -> bool:
    return any(map(_MODEL.fullmatch, checkpoint_folder.list_files(path))) or deepspeed_universal.is_universal(path)


def resolve_step(path: str) -> str:
    """Return the subfolder with the rank files ("" for `path` itself). Raises UnreadableError if none can be chosen."""
    if (misled := find_misleading_tracker(path)) is not None:
        raise MalformedError(
            f"{misled[0]} points to {misled[1]}, which is not a plain folder in the checkpoint folder; DeepSpeed "
            "would load files that statecli did not check"
        )
    if has_ranks(path):
        return ""
    folders = list_steps(path)
    if (tracker := find_tracker(path)) is not None:
        return _resolve_latest(path, folders, tracker)
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise MalformedError(
            "is a DeepSpeed checkpoint, but the folder with the files of its ranks is missing; "
            "copy the checkpoint again"
        )
    raise UnreadableError(
        f"contains {len(folders)} checkpoints, but no file `latest` that selects one of them; give one of these "
        f"folders: {quoting.names(folders)}"
    )


def find_tracker(path: str) -> str | None:
    """Return the name of the tracker file in the folder, or None."""
    names = checkpoint_folder.list_files(path)
    return next((name for name in TRACKERS if name in names), None)


def has_ranks(path: str) -> bool:
    """Return True if the folder has a file of a rank or a universal checkpoint."""
    return _is_step(path) or any(map(_OPTIMIZER.fullmatch, checkpoint_folder.list_files(path)))


def find_misleading_tracker(path: str) -> tuple[str, str] | None:
    """Find a tracker file (`latest`) that makes DeepSpeed load files unknown to statecli. Return its name and text."""
    for name in TRACKERS:
        if name not in checkpoint_folder.list_files(path):
            continue
        try:
            tag = checkpoint_folder.decode_tracker(read_small(files.join(path, name), name, _MAX_PADDED_LATEST_BYTES))
        except UnreadableError:
            if _is_padded(files.join(path, name)):
                return name, f"a string of more than {_MAX_PADDED_LATEST_BYTES} bytes"
            continue
        is_subfolder = tag in checkpoint_folder.list_folders(path)
        is_walked = is_subfolder and checkpoint_folder.explain_skipped_folder(files.join(path, tag)) is None
        if not tag or "\0" in tag or (is_walked and not _GLOB_CHARACTER.search(tag)):
            continue
        # zero_to_fp32 uses the path as a glob pattern, so the files may be in another folder than the folder of that
        # name.
        is_pattern = _GLOB_CHARACTER.search(tag) is not None and files.is_folder(files.join(path, tag))
        if is_pattern or _may_hold_ranks(files.join(path, tag)):
            return name, quoting.quote(tag)
    return None


def _may_hold_ranks(path: str) -> bool:
    """Return whether DeepSpeed may take a file in the folder for a rank file, because of the end of its name."""
    return files.is_folder(path) and (
        any(name.endswith(_STATES) for name in checkpoint_folder.list_files(path))
        or deepspeed_universal.is_universal(path)
    )


def _is_padded(path: str) -> bool:
    """Return whether a large tracker file begins or ends with whitespace, which DeepSpeed removes (`str.strip`)."""
    try:
        with ByteSource(path) as source:
            ends = (
                source.read(0, MAX_LATEST_BYTES),
                source.read(max(0, source.size - MAX_LATEST_BYTES), MAX_LATEST_BYTES),
            )
            first, last = (text.decode("utf-8", "ignore") for text in ends)
            return first[:1].isspace() or last[-1:].isspace()
    except UnreadableError:
        return False


def _resolve_latest(path: str, folders: list[str], tracker: str) -> str:
    raw = read_small(files.join(path, tracker), tracker, MAX_LATEST_BYTES)
    tag = checkpoint_folder.decode_tracker(raw)
    if tag in ("", ".", "..") or any(char in "/\\:" or not char.isprintable() for char in tag):
        raise MalformedError(f"{tracker} contains {quoting.quote(tag)}, which is not a plain folder name")
    if tag not in folders:
        advice = f"; give one of these folders: {quoting.names(folders)}" if folders else "; copy the checkpoint again"
        raise MissingShard(
            f"{tracker} points to {quoting.quote(tag)}, but this folder is missing or has no rank files{advice}"
        )
    return tag


def group_files(path: str, tag: str) -> tuple[dict[int, RankFiles], list[str]]:
    """Group the files by model-parallel rank, and list other files of DeepSpeed. Paths are relative to `path`."""
    files_by_rank: dict[int, RankFiles] = {}
    others = []
    for name in checkpoint_folder.list_files(files.join(path, tag)):
        optimizer, member = _OPTIMIZER.fullmatch(name), files.join(tag, name)
        match = optimizer or _MODEL.fullmatch(name)
        if match is None:
            others += [member] if _UNREAD_FILE.fullmatch(name) else []
            continue
        ranks = files_by_rank.setdefault(int(match["mp"]), RankFiles({}, {}))
        (ranks.optimizer if match is optimizer else ranks.model)[int(match["rank"] or -1)] = member
    return dict(sorted(files_by_rank.items())), others
