"""Expand the targets that the user gives: walk folders and expand globs, in natural order, each target once.

A model's folder is one target, with its shards and the files of its training. Every other checkpoint in the folder is a
separate target. Any other file is a target with status `skipped` and a reason, so nothing is left out silently.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from typing import TypeAlias

import msgspec

from statecli import formats, pickle_scan
from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.natural_order import make_natural_key
from statecli.core.run_scope import NotChecked
from statecli.formats import unsupported
from statecli.formats.shared import tar_archive
from statecli.storage import checkpoint_folder, files, zip_archive
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import CHECKPOINT_SUFFIXES, PICKLE_SUFFIXES, WEIGHT_BIN_NAME
from statecli.storage.store import ListingBudget
from statecli.targets import packed_files, tool_folders
from statecli.targets.target_result import TargetResult, TargetStatus

#: Suffixes of compressed files, because joblib and `pickle.load(gzip.open(...))` load `model.pkl.gz` directly.
_COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".z", ".zst", ".lz4")

#: File that torch.package requires in an unpacked package, as parts of a path.
TORCH_PACKAGE_FILE = (".data", "extern_modules")

#: Number of folders above a file that are searched for the model that it belongs to.
MAX_PARENT_FOLDERS = 3
#: Number of remote files that are fetched together.
PREFETCHED_PATHS = 256


class _ModelFolder(msgspec.Struct, frozen=True):
    """Folder with a model, and the files of the model."""

    path: str
    members: frozenset[str]


_Candidate: TypeAlias = str | _ModelFolder | TargetResult


class ModelFolders:
    """Find the model folders above files. Each folder is read only once.

    `is_locked` returns whether the lock names a path. With `as_found`, a file is replaced by the target that a walk
    over its folder finds.
    """

    def __init__(self, *, as_found: bool = False, is_locked: Callable[[str], bool] | None = None) -> None:
        self.as_found, self.is_locked = as_found, is_locked
        self._members = cache(list_members)

    def iter_around(self, path: str) -> Iterator[_ModelFolder]:
        """Yield the folders above `path` that have a model, nearest first. The model need not contain `path`."""
        above = islice(files.iter_parents(path), MAX_PARENT_FOLDERS)
        yield from (_ModelFolder(folder, members) for folder in above if (members := self._members(folder)))

    def iter_containing(self, path: str) -> Iterator[_ModelFolder]:
        """Yield the model folders whose model includes `path`."""
        return (model for model in self.iter_around(path) if files.make_relative(path, model.path) in model.members)

    def find_replacement(self, path: str) -> _Candidate | None:
        """Return the target that replaces the file, such as its model folder, or None to keep the file.

        With a lock: the folder or index that the lock names. With `as_found`: the file's model, if it has several
        files.
        """
        if not files.is_file(path) or not (self.as_found or self.is_locked):
            return None
        models = [] if self.is_locked and self.is_locked(path) else list(self.iter_containing(path))
        for model in models if self.is_locked else ():
            indexes = filter(checkpoint_folder.INDEX.search, model.members)
            candidates: list[_Candidate] = [model, *(files.join(model.path, index) for index in indexes)]
            for candidate in candidates:
                if self.is_locked and self.is_locked(_get_path(candidate)):
                    return candidate
        return next((model for model in models if len(model.members) > 1), None) if self.as_found else None


def expand_targets(
    texts: Sequence[str], *, allow_empty: bool = False, model_folders: ModelFolders | None = None
) -> Iterator[str | TargetResult]:
    """Yield each target: its text, or a `TargetResult` if it has already failed or was skipped.

    A file with several names is audited in the model folder around the file, or else under its own name, or else
    under a link's name. Its other names are skipped. An unmatched glob is a failed target, or a skipped target with
    `allow_empty`.
    """
    candidates: dict[str, _Candidate] = {}
    empty_status = TargetStatus.SKIPPED if allow_empty else TargetStatus.FAILED
    for text in _prefetch(texts):
        for candidate in _expand_text(text, empty_status, model_folders or ModelFolders()):
            candidates.setdefault(_get_key(_get_path(candidate)), candidate)
    names = _choose_names(candidates.values())
    prefetched = _prefetch(
        "" if isinstance(candidate, TargetResult) else _get_path(candidate) for candidate in candidates.values()
    )
    for key, candidate in candidates.items():
        next(prefetched)
        path = _get_path(candidate)
        if isinstance(candidate, TargetResult):
            yield candidate
        elif _get_key(name := names[_get_use(path)]) == key:
            yield path
        else:
            yield TargetResult(path, TargetStatus.SKIPPED, f"is the same file as {name}", same_as=name)


def is_reached(path: str, texts: Sequence[str]) -> bool:
    """Return whether a walk over the folders or globs in `texts` reaches this path. The path need not exist."""
    parts = _split_path(path)
    return any(glob_covers(_split_path(text), parts) for text in texts if files.is_folder(text) or files.is_glob(text))


def list_folders_without_checkpoints(texts: Sequence[str], targets: Iterable[str | TargetResult]) -> list[str]:
    """Return the typed folders in which `expand_targets` found no checkpoint."""
    found_paths = [
        target if isinstance(target, str) else target.target
        for target in targets
        if isinstance(target, str) or target.status is TargetStatus.FAILED or target.same_as is not None
    ]
    parents = {tuple(parts[:n]) for parts in map(_split_path, found_paths) for n in range(len(parts) + 1)}
    return [text for text in texts if tuple(_split_path(text)) not in parents and files.is_folder(text)]


def _split_path(path: str) -> list[str]:
    if files.is_remote(path):
        scheme, path_in_store, rest = files.split_url(path)
        return [scheme, rest, *path_in_store.strip("/").split("/")]
    return os.path.abspath(path).strip(os.sep).split(os.sep)


def glob_covers(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the glob in `pattern` matches the path in `parts` or one of its parent folders."""
    if not pattern or pattern == [""]:
        return True
    first, remaining_pattern = pattern[0], pattern[1:]
    if first == "**":
        return any(glob_covers(remaining_pattern, parts[n:]) for n in range(len(parts) + 1))
    return (
        bool(parts)
        and (first == parts[0] or fnmatchcase(parts[0], first))
        and glob_covers(remaining_pattern, parts[1:])
    )


def _get_path(candidate: _Candidate) -> str:
    if isinstance(candidate, str):
        return candidate
    return candidate.path if isinstance(candidate, _ModelFolder) else candidate.target


def _get_key(text: str) -> str:
    """Return a key that identifies a target: the absolute path, or the typed name of a class or a section.

    The key of a folder ends in `/`, because an object store may have a file and a folder with the same name.
    """
    if not files.exists(text):
        return text
    return f"{files.make_absolute(text)}/" if files.is_folder(text) else files.make_absolute(text)


def _choose_names(candidates: Collection[_Candidate]) -> dict[tuple[str, str], str]:
    """Map the real path and suffix of each file or model folder to the path under which statecli audits it."""
    names: dict[tuple[str, str], str] = {}
    for model in candidates:
        if isinstance(model, _ModelFolder):
            paths = (files.join(model.path, member) for member in model.members)
            names.update((_get_use(path), path) for path in paths)
    typed = [_get_path(candidate) for candidate in candidates if not isinstance(candidate, TargetResult)]
    for path in sorted(typed, key=files.is_link):
        names.setdefault(_get_use(path), path)
    named = {use[0]: path for use, path in names.items() if use[1]}
    return {use: path if use[1] else named.get(use[0], path) for use, path in names.items()}


def _get_use(path: str) -> tuple[str, str]:
    """Return the real path and the suffix of a file, because libraries choose a loader by the suffix.

    A name without a suffix, for example of a blob in a hub cache, does not count as another use.
    """
    return files.resolve_links(path), files.get_name(path).rpartition(".")[2].lower() if "." in path else ""


def _expand_text(text: str, empty_status: TargetStatus, model_folders: ModelFolders) -> Iterator[_Candidate]:
    """Yield the targets for a text that the user typed. `empty_status`: the status if a glob matches nothing."""
    if text.partition("#")[0] == files.STANDARD_INPUT and os.path.lexists(files.STANDARD_INPUT):
        reason = f"{text}: means standard input, but a file of this name exists too; to read the file, write ./{text}"
        yield TargetResult(text, TargetStatus.FAILED, reason)
    elif files.is_folder(text):
        yield from _expand_folder(text)
    elif (model := model_folders.find_replacement(text)) is not None:
        yield model
    elif model_folders.as_found and files.is_file(text):
        yield from _expand_file(text)
    elif files.exists(text) or not files.is_glob(text) or "(" in text:
        yield text
    else:
        try:
            paths = sorted(files.match_glob(text), key=make_natural_key)
        except UnreadableError as error:
            yield TargetResult(text, TargetStatus.FAILED, str(error))
            return
        passed_paths = [path for path in paths if _is_passed_by_glob(path, files.get_name(text))]
        yield from (skip_folder(path, "a hidden folder", "hidden") for path in passed_paths)
        for path in (path for path in paths if path not in passed_paths):
            model = model_folders.find_replacement(path)
            yield from (
                _expand_folder(path) if files.is_folder(path) else _expand_file(path) if model is None else (model,)
            )
        if len(paths) == len(passed_paths):
            yield TargetResult(text, empty_status, f"{text}: no file matches this glob")


def _is_passed_by_glob(path: str, last_step: str) -> bool:
    """Return whether a glob skips this hidden folder, because no file in it is named like a checkpoint.

    `*` matches a hidden folder, so the walk enters it unless a tool owns it; `*/*.pt` does not enter hidden folders.
    """
    is_hidden = files.get_name(path.rstrip("/")).startswith(".")
    if last_step.startswith(".") or not files.is_folder(path) or not is_hidden:
        return False
    is_entered = last_step in ("*", "**") and not checkpoint_folder.is_of_tool(path)
    return not is_entered and not _holds_checkpoint_name(path, files.resolve_links(path), files.list_names)


def _expand_folder(path: str) -> Iterator[_Candidate]:
    if (reason := files.explain_process_link(path)) is not None:
        yield TargetResult(path, TargetStatus.FAILED, f"{path}: {reason}")
        return
    walk = _Walk(files.resolve_links(path).rstrip("/"), set(), set(), ListingBudget(path))
    yield from list(_walk_folder(path, walk)) or [TargetResult(path, TargetStatus.SKIPPED, "a folder without files")]


class _Walk(msgspec.Struct, frozen=True):
    """State of a walk over `root`: folders entered through links, and the limit on listed names. Paths are resolved.

    `named` are folders that an adjacent file names for a loader; they are walked even if they belong to a tool.
    """

    root: str
    entered: set[str]
    named: set[str]
    budget: ListingBudget

    def skip_folder(self, path: str) -> TargetResult | None:
        """Return the skipped or failed target for a folder that the walk does not enter, or None to enter the folder.

        A loader that follows a link reads the folder behind it, which may belong to a tool or be outside of the walk.
        """
        if not files.is_link(path):
            return None if path in self.named else self._pass_over(path)
        real = files.resolve_links(path)
        if real != self.root and not real.startswith(f"{self.root}/"):
            if path not in self.named and not _holds_checkpoint(real):
                return skip_subfolder(path)
            folder_text = "that loaders read" if path in self.named else "with checkpoints"
            problem = f"is a link to a folder {folder_text} outside of the target, which statecli did not read"
            reason = f"{path}: {problem}; to read the folder, name the link as a target"
            return TargetResult(path, TargetStatus.FAILED, reason)
        is_passed = any(map(checkpoint_folder.is_of_tool, real[len(self.root) + 1 :].split("/")))
        if not is_passed or real in self.entered:
            return TargetResult(path, TargetStatus.SKIPPED, "a link to a folder that statecli reads under another path")
        self.entered.add(real)
        return None

    def _pass_over(self, path: str) -> TargetResult | None:
        """Return the skipped target for a folder of a tool, or None if a file in it is named like a checkpoint."""
        real = files.resolve_links(path)
        if tool_folders.are_installed_packages(self.root, real):
            return skip_folder(path, "installed packages of a virtual environment", "installed packages")
        if not checkpoint_folder.is_of_tool(path):
            return None
        try:
            return None if _holds_checkpoint_name(real, self.root, self.list_names) else skip_subfolder(path)
        except (UnreadableError, OSError) as error:
            return TargetResult(path, TargetStatus.FAILED, f"{path}: {_explain_listing_error(error)}")

    def list_names(self, folder: str) -> list[str]:
        """Return the names in the folder. Raises UnreadableError if there are more names than the budget allows."""
        names = files.list_names(folder)
        self.budget.take(folder, len(names))
        return names


def _holds_checkpoint_name(path: str, root: str, list_names: Callable[[str], list[str]]) -> bool:
    return tool_folders.holds_checkpoint_name(path, root, is_named=_is_loaded_by_name, list_names=list_names)


#: Name of metadata of torch.distributed.checkpoint, for all ranks or one. Tools use the suffix for other files.
_METADATA_NAME = compile_on_use(r"(?:__\d+)?\.metadata")


def _is_loaded_by_name(path: str) -> bool:
    """Return whether loaders select files by this name. An unusual name with the suffix `.bin` does not count."""
    is_metadata = _METADATA_NAME.fullmatch(files.get_name(path)) is not None
    return is_metadata or (_is_named(path) and not _is_ambiguous_bin(path))


def _explain_listing_error(error: UnreadableError | OSError) -> str:
    if isinstance(error, UnreadableError):
        return str(error)
    return f"cannot be listed: {(error.strerror or 'unknown error').lower()}"


#: Maximum number of names searched below a folder outside of the target.
_MAX_OUTER_NAMES = 10_000


def _holds_checkpoint(path: str) -> bool:
    """Return whether a file below the folder is named like a checkpoint. Does not follow links in the folder."""
    pending, count = deque([path]), 0
    while pending and count < _MAX_OUTER_NAMES:
        folder, names = pending.popleft(), list[str]()
        with suppress(UnreadableError, OSError):
            names = files.list_names(folder)[: _MAX_OUTER_NAMES - count]
        count += len(names)
        for name in names:
            inner = files.join(folder, name)
            if files.is_folder(inner):
                pending.extend([inner] * (not files.is_link(inner)))
            elif _METADATA_NAME.fullmatch(name) or name.lower().endswith(CHECKPOINT_SUFFIXES):
                return True
    return False


def _walk_folder(
    path: str, walk: _Walk, claimed_files: frozenset[str] = frozenset(), depth: int = 0
) -> Iterator[_Candidate]:
    """Yield the targets in a folder, without `claimed_files`, which belong to the model of a parent folder.

    `depth` is the number of folders between this folder and the user's folder. Behind a URL, the walk stops when its
    budget is exceeded.
    """
    if walk.budget.exceeded:
        return
    if depth > files.MAX_FOLDER_DEPTH:
        walk.budget.exhaust(path)
        problem = f"{path}: is more than {files.MAX_FOLDER_DEPTH} folders deep; name this folder as a target"
        yield TargetResult(path, TargetStatus.FAILED, problem)
        return
    try:
        names = sorted(walk.list_names(path), key=make_natural_key)
    except (UnreadableError, OSError) as error:
        yield TargetResult(path, TargetStatus.FAILED, f"{path}: {_explain_listing_error(error)}")
        return
    prefix = "" if path in (os.curdir, files.join(os.curdir, "")) else path
    member_names = list_members(path)
    member_paths = frozenset(files.join(prefix, name) for name in member_names)
    yield from (TargetResult(path, TargetStatus.FAILED, reason) for reason in _find_unread_parts(path, names))
    for folder in checkpoint_folder.list_module_folders(path, names):
        module_folders = checkpoint_folder.split_module_folder(folder) or ()
        walk.named.update(files.join(prefix, *name.split("/")) for name in module_folders)
    walk.named.update(
        files.join(prefix, name) for name in checkpoint_folder.list_tracked_folders(path) if name in names
    )
    # A file belongs to one model only, so skip a model whose files are already claimed.
    if not member_paths <= claimed_files:
        yield _ModelFolder(path, member_names)
    prefetched = _prefetch(files.join(prefix, name) for name in names)
    for inner in prefetched:
        if files.is_link(inner) and (reason := files.explain_process_link(inner)) is not None:
            yield TargetResult(inner, TargetStatus.FAILED, f"{inner}: {reason}")
        elif files.is_folder(inner):
            skipped = walk.skip_folder(inner)
            inner_walk = _walk_folder(inner, walk, claimed_files | member_paths, depth + 1)
            yield from inner_walk if skipped is None else (skipped,)
        elif inner not in claimed_files | member_paths:
            yield from _expand_file(inner)
    if (missing_reason := files.explain_missing_names(path)) is not None:
        # Report it, because files that were not read have not passed.
        reason = f"{path}: the folder may contain other files: {missing_reason}; name the files as targets"
        yield TargetResult(files.join(prefix, "*"), TargetStatus.FAILED, reason)


def _find_unread_parts(path: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a reason for each file or code that loading the folder would use, but that the walk does not check."""
    if TORCH_PACKAGE_FILE[0] in names and files.exists(files.join(path, *TORCH_PACKAGE_FILE)):
        effect = "loading the package runs its Python files"
        yield f"{path}: is an unpacked torch.package: {effect}; pack the folder into one file to check it"
    if (reason := checkpoint_folder.explain_weights_elsewhere(path, names)) is not None:
        yield f"{path}: {reason}"
    tracker = checkpoint_folder.MMENGINE_TRACKER
    try:
        if (foreign_path := checkpoint_folder.find_foreign_checkpoint(path, names)) is not None:
            effect = f"{tracker} makes MMEngine load {quoting.quote(foreign_path)} from another folder"
            yield f"{path}: {effect}; remove {tracker}"
    except UnreadableError as error:
        yield f"{files.join(path, tracker)}: {error}"
    for folder in checkpoint_folder.list_module_folders(path, names):
        if checkpoint_folder.split_module_folder(folder) is None:
            name = quoting.quote(folder)
            yield f"{path}: loading this folder loads the module {name} from outside; move the module into the folder"


def _prefetch(paths: Iterable[str]) -> Iterator[str]:
    """Yield the given paths, and prefetch each group of PREFETCHED_PATHS remote paths first."""
    paths = iter(paths)
    while batch := list(islice(paths, PREFETCHED_PATHS)):
        files.prefetch(path for path in batch if "#" not in path and not files.is_glob(path))
        yield from batch


def list_members(path: str) -> frozenset[str]:
    """Return the names of the files that belong to the folder's own model, or an empty set if it has no model."""
    try:
        return frozenset(formats.members(path))
    except UnreadableError:
        # Claim only the indexes, because a broken index is reported for the folder.
        return frozenset(name for name in files.list_names(path) if checkpoint_folder.INDEX.search(name))


def skip_subfolder(path: str) -> TargetResult | None:
    """Return a skipped target for a tool's subfolder or a link, or None for any other folder."""
    skipped = checkpoint_folder.explain_skipped_folder(path)
    return None if skipped is None else skip_folder(path, skipped.reason, skipped.short)


def _expand_file(path: str) -> Iterator[str | TargetResult]:
    """Yield the file, or a skipped target if it is not a checkpoint by name or content."""
    is_named = _is_named(path)
    if is_named and not _is_ambiguous_bin(path):
        yield path
        return
    try:
        with ByteSource(path) as source:
            is_checkpoint = _is_checkpoint(path, source)
            content = "" if is_checkpoint else unsupported.describe_content(path, source.head, source.size)
    except UnreadableError as error:
        yield _classify_unreadable(path, error)
        return
    yield path if is_checkpoint or (is_named and "pointer" in content) else skip_file(path, content)


def _is_named(path: str) -> bool:
    """Return whether a file has the name of a checkpoint, compressed or not. A `.bin` may still be any file."""
    name = files.get_name(path).lower()
    stem, dot, suffix = name.rpartition(".")
    return (stem if dot + suffix in _COMPRESSION_SUFFIXES else name).endswith(CHECKPOINT_SUFFIXES)


def skip_file(path: str, content: str) -> TargetResult:
    """Return a skipped target for a file that is not checked. `content` may be `a 7z archive: unpack it first`."""
    noun = re.split(r"[,;:(]", content.removeprefix("a ").removeprefix("an "), maxsplit=1)[0].strip()
    return TargetResult(path, TargetStatus.SKIPPED, f"is {content}", not_checked=(NotChecked("file", 1, noun),))


def skip_folder(path: str, reason: str, short_reason: str) -> TargetResult:
    """Return a skipped target for a folder. Skipped folders with the same `short_reason` are counted together."""
    return TargetResult(path, TargetStatus.SKIPPED, reason, not_checked=(NotChecked("folder", 1, short_reason),))


def _classify_unreadable(path: str, error: UnreadableError) -> TargetResult:
    """Return the target of an unreadable file: failed, or skipped if loaders cannot load anything from it.

    A device or a pipe fails, because a loader can read data from it that the audit cannot.
    """
    with suppress(UnreadableError, OSError):
        is_broken = files.is_link(path) and not os.path.exists(path)
        if is_broken and files.explain_process_link(path) is None:
            return skip_file(path, "a broken link")
        if not files.is_remote(path) and not files.is_file(path) and not is_broken:
            return TargetResult(path, TargetStatus.FAILED, f"{path}: {error}; remove this path from the folder")
        if not files.get_size(path):
            return TargetResult(path, TargetStatus.SKIPPED, str(error))
    return TargetResult(path, TargetStatus.FAILED, f"{path}: {error}")


def is_named_as_checkpoint(path: str) -> bool:
    """Return whether the file name alone identifies a checkpoint. A pickle may contain anything."""
    name = files.get_name(path).lower()
    return name.endswith(CHECKPOINT_SUFFIXES) and not name.endswith(PICKLE_SUFFIXES) and not _is_ambiguous_bin(path)


def _is_ambiguous_bin(path: str) -> bool:
    """Return whether the name is a `.bin` that may be firmware or game data. Then the content decides."""
    name = files.get_name(path)
    return name.lower().endswith(".bin") and not WEIGHT_BIN_NAME.search(name)


def _is_checkpoint(path: str, source: ByteSource) -> bool:
    return (
        unsupported.is_code(path, source)
        or formats.find_format(path, source.head) is not None  # this includes zip archives
        or tar_archive.has_pickles(source)
        or packed_files.holds_checkpoint(path, source, _is_named)
        or zip_archive.ends_as_zip(source)
        or pickle_scan.one_pickle.begins_as_pickle(source)
    )
