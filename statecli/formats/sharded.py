"""A checkpoint in several files: a folder of shards, or its index (`*.index.json`).

Format: `save_pretrained` of transformers: {"metadata": {"total_size"}, "weight_map": {FQN: file name}}. The file names
come from the index, so they are untrusted: each must be a plain file name. A shard must be a regular file. Symbolic
links are followed: the Hugging Face cache consists of links into `../../blobs`, an index cannot create a link, and an
attacker able to put a link into the folder could put the file there. Only headers are read through a link.

A missing or unreadable shard affects only its own tensors: each of its names in the index is a row with `damage`;
without an index, one row stands for the shard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import IndexMismatch, MalformedError, MissingShard, PlaceUnreadable, UnreadableError
from statecli.core.format_traits import FormatTraits, combine_traits
from statecli.core.model_state import ModelState, NoteKind, Oddity, ReadFile, StateDict, TensorInfo, TensorKey
from statecli.core.oddity_kind import OddityKind
from statecli.core.setting_paths import select
from statecli.formats.shared import config_files, deepspeed_steps, rank_folders
from statecli.formats.shared.joined_states import add_file, add_rows, join_settings, join_states
from statecli.storage import checkpoint_folder, files, json_object
from statecli.storage.byte_source import ByteSource, add_subject_to_errors
from statecli.storage.checkpoint_names import SINGLE, drop_current_folder, is_plain_file_name

NAME = "sharded"
TRAITS = FormatTraits(own_settings=frozenset(("total_size", "total_parameters")))  # facts about the files

#: Maximum size of an index in bytes: 350,000 tensors at 90 bytes a line. Parsed JSON takes up to thirty times as much
#: memory.
MAX_INDEX_BYTES = 32 * 1024 * 1024

#: Key of the JSON file for `deepspeed.init_inference`; its paths may lead outside of the folder.
_DEEPSPEED_FILES_KEY = "checkpoints"

#: Remedy for a missing shard.
COPY_ADVICE = "copy or download the missing files"


class Index(msgspec.Struct, frozen=True):
    """A parsed index: the folder as typed by the user, the shard of each FQN, and all shards.

    `shards` has the order of first mention. `metadata` is the object of this name in the index.
    """

    folder: str
    weight_map: dict[str, str]
    shards: list[str]
    metadata: dict[str, Any]


class Shards(msgspec.Struct, frozen=True):
    """The readable shards of a folder, and a reason for each unreadable shard, by the name of the shard.

    The reasons do not begin with a path. `missing_message` is one line about all `missing_shards`.
    """

    states: list[tuple[str, ModelState]]
    failures: dict[str, str]
    missing_shards: list[str]
    missing_message: str

    @property
    def unread_shards(self) -> frozenset[str]:
        """Names of the shards that are missing or unreadable."""
        return frozenset((*self.failures, *self.missing_shards))


def sniff(path: str, head: bytes) -> bool:
    """Return whether the path is a folder or an index: a JSON file with a weight_map or the name of an index."""
    if files.is_folder(path):
        return True
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return start.startswith(b"{") and (
        checkpoint_folder.INDEX.search(files.get_name(path)) is not None or b'"weight_map"' in head
    )


def read(path: str, read_file: ReadFile) -> ModelState:
    """Read all shards and merge them into one state. The error of a shard begins with the shard's path.

    Raises UnreadableError and MalformedError, also if no shard can be read. Errors of the index or of the folder do not
    contain the path.
    """
    if files.is_folder(path):
        return read_folder(path, read_file)
    index = _read_index(path, "the index")
    state, unnamed_files = _read_indexed(index, path, "the index", read_file), _find_unnamed(index)
    if not unnamed_files:
        return state
    message = (
        "statecli did not read these weight files next to the shards, because the index does not list them: "
        f"{quoting.names(unnamed_files)}"
    )
    return add_rows(state, (), Oddity(OddityKind.UNNAMED_SHARDS.value, message))


def read_folder(path: str, read_file: ReadFile, others: Collection[str] = ()) -> ModelState:
    """Read the model of the folder `path` and its config files.

    `others`: files that the notes about unread files omit. Raises as `read` does.
    """
    choice = checkpoint_folder.choose_checkpoint(path)
    file_path = files.join(path, choice.name)
    files.prefetch((file_path, *config_files.list_config_files(path, choice.names)))
    if (reason := checkpoint_folder.explain_weights_elsewhere(path, choice.names)) is not None:
        raise UnreadableError(reason)
    used_files: list[str] = []
    oddities: list[Oddity] = []
    if checkpoint_folder.INDEX.search(choice.name):
        index = _read_index(file_path, choice.name)
        used_files, state = index.shards, _read_indexed(index, path, choice.name, read_file)
    elif match := checkpoint_folder.SERIES.match(choice.name):
        used_files = _list_series(match)
        state = _read_series(path, used_files, read_file)
    else:
        state = replace(read_file(file_path), target=path)
    other_weights = sorted(
        {*choice.others, *checkpoint_folder.FOREIGN_WEIGHTS.intersection(choice.names)}.difference(used_files, others)
    )
    if other_weights:
        message = f"statecli did not read other weights in the same folder: {quoting.names(other_weights)}"
        oddities.append(Oddity("other-weights", message))
    companions = [name for name in choice.names if checkpoint_folder.COMPANIONS.match(name) and name not in others]
    if files_not_read := [name for name in companions if not name.endswith(".json")]:
        message = f"statecli did not read other files of the training run: {quoting.names(files_not_read)}"
        oddities.append(Oddity("companions", message))
    if steps := deepspeed_steps.list_steps(path):
        message = (
            f"statecli did not read DeepSpeed checkpoints of the same training run: {quoting.names(steps)}; to read "
            "one of these checkpoints, give its folder"
        )
        oddities.append(Oddity("other-weights", message))
    return config_files.add_config_files(path, add_rows(state, (), *oddities))


def _list_series(match: re.Match[str]) -> list[str]:
    count = match["count"]
    return [f"{match['stem']}-{n:05d}-of-{count}{match['suffix']}" for n in range(1, int(count) + 1)]


def _read_series(path: str, names: list[str], read_file: ReadFile) -> ModelState:
    """Merge a numbered series of shards that has no index. Tensor names in unreadable shards are unknown."""
    shards = _read_shards(path, names, "according to the numbers in the file names", read_file)
    state = _check_parts(_merge_shards(path, shards.states), len(names), is_complete=not shards.unread_shards)
    if not shards.unread_shards:
        return add_rows(
            state, (), Oddity("no-index", f"the folder has no index, so statecli read all {len(names)} numbered shards")
        )
    rows = [
        rank_folders.build_missing_row(name, "model", f"{files.join(path, name)}: {why}")
        for name, why in shards.failures.items()
    ]
    if shards.missing_shards:
        rows.append(
            rank_folders.build_missing_row(
                quoting.names(shards.missing_shards), "model", f"{path}: {shards.missing_message}; {COPY_ADVICE}"
            )
        )
    return _add_missing_rows(state, shards, rows)


def _add_missing_rows(state: ModelState, shards: Shards, rows: list[TensorInfo]) -> ModelState:
    oddities = [Oddity(OddityKind.MISSING_SHARD.value, shards.missing_message)] if shards.missing_shards else []
    return add_rows(state, rows, *oddities)


def _check_parts(state: ModelState, count: int, *, is_complete: bool) -> ModelState:
    """Check the settings `split.*` of a split GGUF against the shards, and remove these settings.

    Raises IndexMismatch if they contradict the number of files or, for a state that `is_complete`, of tensors.
    """
    parts, tensors = (state.metadata.values.get(f"split.{key}") for key in ("count", "tensors.count"))
    if type(parts) is int and parts != count:
        raise IndexMismatch(f"the numbers in the file names go up to {count}, but the metadata records {parts} shards")
    if is_complete and type(tensors) is int and tensors != len(state.tensors):
        raise IndexMismatch(
            f"the metadata records {tensors} tensors in all shards, but the shards contain {len(state.tensors)}"
        )
    of_parts = ("split.count", "split.tensors.count", "split.no")
    if type(parts) is not int:
        return state
    return replace(state, metadata=select(state.metadata, lambda key: not key.endswith(of_parts)))


def _describe_missing(missing: list[str], count: int, why: str) -> str:
    noun, verb = ("shard", "is") if len(missing) == 1 else ("shards", "are")
    return f"{noun} {quoting.names(missing)} {verb} missing: {count - len(missing)} of {count} exist, {why}"


def _refuse_absent(folder: str, shards: list[str], why: str) -> list[str]:
    """List the missing shards. Raises MissingShard if all shards are missing."""
    files.prefetch(files.join(folder, shard) for shard in shards)
    missing_shards = [shard for shard in shards if not files.has_file(files.join(folder, shard))]
    if len(missing_shards) == len(shards):
        raise MissingShard(f"{_describe_missing(missing_shards, len(shards), why)}; {COPY_ADVICE}")
    return missing_shards


def _read_index(path: str, label: str) -> Index:
    """Read and check the index at `path`. `label` names the index in messages."""
    document = _read_document(path, label)
    if _DEEPSPEED_FILES_KEY in document:
        raise MalformedError(
            f"{label} also has the key {_DEEPSPEED_FILES_KEY!r}: deepspeed.init_inference unpickles the files listed "
            "there, and statecli did not check these files; run statecli audit on each file"
        )
    weight_map = _check_weight_map(document, label)
    metadata = document.get("metadata")
    index = Index(
        files.get_folder(path),
        weight_map,
        list(dict.fromkeys(weight_map.values())),
        metadata if type(metadata) is dict else {},
    )
    for shard in index.shards:
        _check_name(shard, label)
    return index


def _read_document(path: str, label: str) -> dict[str, Any]:
    with add_subject_to_errors(label), ByteSource(path) as source:
        if source.size > MAX_INDEX_BYTES:
            raise MalformedError(
                f"has {source.size} bytes, more than statecli's limit of {MAX_INDEX_BYTES} for an index"
            )
        raw = source.read(0, source.size)
    return json_object.parse_unique_object(raw, label)


def _check_weight_map(document: dict[str, Any], label: str) -> dict[str, str]:
    weight_map = document.get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        raise MalformedError(f"{label} has no weight_map, or the weight_map is empty")
    for fqn, shard in weight_map.items():
        if type(shard) is not str:
            raise MalformedError(
                f"{label} maps {quoting.name(fqn)} to {quoting.value(shard)}, which is not a file name"
            )
    # transformers joins the keys of nested Flax maps with slashes, and a shard's name with the path of its folder.
    return {
        fqn.replace("/", ".") if shard.endswith(".msgpack") else fqn: drop_current_folder(shard)
        for fqn, shard in weight_map.items()
    }


def _check_name(shard: str, label: str) -> None:
    if not is_plain_file_name(shard):
        raise MalformedError(f"{label} names {quoting.quote(shard)}, which is not a plain file name")


def _read_indexed(index: Index, target: str, label: str, read_file: ReadFile) -> ModelState:
    shards = _read_shards(index.folder, index.shards, f"according to {label}", read_file)
    state = _merge_shards(target, shards.states)
    oddities = _check_index(index, shards)
    oddities += [] if shards.unread_shards else _check_total(index.metadata, state)
    if shards.unread_shards:
        state = _add_missing_rows(state, shards, _build_missing_rows(index, target, shards))
    index_values = {key: value for key, value in index.metadata.items() if type(value) in (str, int, float, bool)}
    metadata = replace(state.metadata, values={**state.metadata.values, **index_values})
    return replace(add_rows(state, (), *oddities), metadata=metadata)


def _build_missing_rows(index: Index, target: str, shards: Shards) -> list[TensorInfo]:
    """Build a tensor row for each name that the index assigns to a missing or unreadable shard."""
    rows, unread_shards = [], shards.unread_shards
    for fqn, shard in index.weight_map.items():
        if shard in unread_shards:
            why = shards.failures.get(shard)
            file = target if why is None else files.join(index.folder, shard)
            fault = f"{shards.missing_message}; {COPY_ADVICE}" if why is None else _describe_shard_failure(why)
            damage = f"{file}: {quoting.name(fqn)}: {fault}"
            rows.append(TensorInfo(fqn, "unknown", None, 0, 0, saved=True, note=fault, damage=damage))
    return rows


def _describe_shard_failure(why: str) -> str:
    return f"its shard {why}" if why.startswith(("is ", "cannot ")) else f"its shard cannot be read: {why}"


def _read_shards(folder: str, names: list[str], why: str, read_file: ReadFile) -> Shards:
    """Read each shard. Raises UnreadableError (MissingShard, or the first error) if no shard can be read."""
    missing_shards = _refuse_absent(folder, names, why)
    states: list[tuple[str, ModelState]] = []
    errors: dict[str, UnreadableError] = {}
    missing_names = frozenset(missing_shards)
    for name in names:
        try:
            if name not in missing_names:
                states.append((name, _read_shard(folder, name, read_file)))
        except PlaceUnreadable:
            raise
        except UnreadableError as error:
            errors[name] = error
    if not states:
        raise next(iter(errors.values()))
    failures = {name: _strip_folder(str(error), folder, name) for name, error in errors.items()}
    return Shards(states, failures, missing_shards, _describe_missing(missing_shards, len(names), why))


def _strip_folder(why: str, folder: str, name: str) -> str:
    return why.removeprefix(f"{files.join(folder, name)}: ").removeprefix(f"shard {quoting.name(name)} ")


def _read_shard(folder: str, name: str, read_file: ReadFile) -> ModelState:
    """Read a shard. Raises MalformedError for a folder or an index, because these could refer to themselves."""
    path = files.join(folder, name)
    if files.is_folder(path):
        raise MalformedError(f"shard {quoting.name(name)} is a directory, not a regular file")
    if _is_index(path):
        raise MalformedError(f"shard {quoting.name(name)} is itself an index, not a file with tensors")
    return read_file(path)


def _is_index(path: str) -> bool:
    try:
        with ByteSource(path) as source:
            return sniff(path, source.head)
    except UnreadableError:  # `read_file` raises the same error, with the shard's path
        return False


def _merge_shards(target: str, states: list[tuple[str, ModelState]]) -> ModelState:
    owner: dict[TensorKey, str] = {}
    oddities: list[Oddity] = []
    for shard, state in states:
        for tensor in state.tensors:
            first = owner.setdefault(tensor.key, shard)
            if first != shard:
                raise MalformedError(
                    f"{quoting.name(tensor.fqn)}: is in two shards, {first} and {shard}; each tensor must be in one "
                    "shard"
                )
        # Omit the note that a file is one part, because the merged state has all parts.
        apart = (oddity for oddity in state.oddities if oddity.kind is not OddityKind.ONE_PART)
        oddities.extend(replace(oddity, message=f"{shard}: {oddity.message}") for oddity in apart)
    templates = (
        replace(template, name=f"{shard}: {template.name}")
        for shard, state in states
        for template in state.chat_templates
    )
    return join_states(
        [state for _, state in states],
        target=target,
        format=f"{NAME} {'+'.join(dict.fromkeys(state.format for _, state in states))}",
        tensors=tuple(add_file(tensor, shard) for shard, state in states for tensor in state.tensors),
        metadata=join_settings({shard: state.metadata for shard, state in states}),
        oddities=tuple(oddities),
        state_dicts=_merge_state_dicts(states),
        traits=combine_traits((TRAITS, *(state.traits for _, state in states))),
        chat_templates=tuple(templates),
    )


def _merge_state_dicts(states: list[tuple[str, ModelState]]) -> tuple[StateDict, ...]:
    """Merge the state_dicts without `_metadata`, because a loader of shards builds a dict without this attribute."""
    by_section: dict[str, list[StateDict]] = {}
    for _, state in states:
        for state_dict in state.state_dicts:
            by_section.setdefault(state_dict.section, []).append(state_dict)
    return tuple(
        StateDict(
            section,
            None,
            tuple(dict.fromkeys(key for state_dict in ones for key in state_dict.others)),
            tuple(dict.fromkeys(key for state_dict in ones for key in state_dict.holders)),
            keys=ones[0].keys if len({state_dict.keys for state_dict in ones}) == 1 else None,
        )
        for section, ones in by_section.items()
    )


def _find_unnamed(index: Index) -> list[str]:
    """List weight files next to the shards that belong neither to the index nor to another checkpoint."""
    shard_names, kinds = set(index.shards), {_split_series_name(shard) for shard in index.shards}
    suffixes = {os.path.splitext(shard)[1] for shard in index.shards}.intersection(checkpoint_folder.WEIGHTS)
    names = [
        name for name in checkpoint_folder.list_files(index.folder or ".") if os.path.splitext(name)[1] in suffixes
    ]
    return [
        name
        for name in names
        if name not in (*SINGLE, *shard_names)
        and not checkpoint_folder.COMPANIONS.match(name)
        and _split_series_name(name) in (None, *kinds)
    ]


def _split_series_name(name: str) -> tuple[str, str] | None:
    match = checkpoint_folder.SERIES.match(name)
    return (match["stem"], match["suffix"]) if match else None


def _check_index(index: Index, shards: Shards) -> list[Oddity]:
    """Refuse an index that contradicts its shards. Return an oddity for tensors that the index does not list."""
    weight_map, states, unread_shards = index.weight_map, shards.states, shards.unread_shards
    shard_of = {tensor.fqn: shard for shard, state in states for tensor in state.tensors}
    for fqn, shard in weight_map.items():
        if fqn not in shard_of and shard in unread_shards:
            continue
        if fqn not in shard_of:
            raise IndexMismatch(
                f"{quoting.name(fqn)}: the index assigns this tensor to {shard}, but no shard contains the tensor"
            )
        if shard_of[fqn] != shard:
            raise IndexMismatch(
                f"{quoting.name(fqn)}: the index assigns this tensor to {shard}, but the tensor is in {shard_of[fqn]}"
            )
    # Ignore rows for dropped names of tied tensors, because they are not entries of the file.
    rows = [tensor for _, state in states for tensor in state.tensors if tensor.fqn not in weight_map]
    unlisted_names = [tensor.fqn for tensor in rows if tensor.note_kind is not NoteKind.STORED_ELSEWHERE]
    message = f"the index does not list these tensors of the shards: {quoting.names(unlisted_names)}"
    return [Oddity(OddityKind.NOT_IN_INDEX.value, message, unlisted_names[0])] if unlisted_names else []


def _check_total(metadata: dict[str, Any], state: ModelState) -> list[Oddity]:
    recorded_total = metadata.get("total_size")
    if not isinstance(recorded_total, (int, float)):
        return []
    bytes_by_storage: dict[Any, int] = {}
    for n, tensor in enumerate(state.tensors):
        key = n if tensor.storage is None else tensor.storage
        bytes_by_storage[key] = max(tensor.nbytes, bytes_by_storage.get(key, 0))
    total = sum(bytes_by_storage.values())
    if recorded_total in (total, sum(tensor.nbytes for tensor in state.tensors)):
        return []
    difference = f"{abs(recorded_total - total)} {'more' if recorded_total > total else 'fewer'}"
    message = f"the index records a total of {recorded_total} bytes, {difference} than the tensors take ({total})"
    return [Oddity(OddityKind.INDEX_TOTAL.value, message)]


def members(path: str) -> tuple[str, ...]:
    """List the files of the folder's model: one weight file, or all shards and their index.

    The list is empty if the only file may be something other than a model. Missing shards are not listed. Raises
    UnreadableError for a folder without a model, with several models, or with no shard.
    """
    choice = checkpoint_folder.choose_checkpoint(path)
    if checkpoint_folder.INDEX.search(choice.name):
        shards = _read_index(files.join(path, choice.name), choice.name).shards
        return (choice.name, *_list_present(path, shards, f"according to {choice.name}"))
    if match := checkpoint_folder.SERIES.match(choice.name):
        return _list_present(path, _list_series(match), "according to the numbers in the file names")
    return (choice.name,) if choice.is_own else ()


def _list_present(folder: str, shards: list[str], why: str) -> tuple[str, ...]:
    missing_shards = frozenset(_refuse_absent(folder, shards, why))
    return tuple(shard for shard in shards if shard not in missing_shards)
