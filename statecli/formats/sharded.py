"""A checkpoint in several files: an index (`*.index.json`), or the folder that holds one.

Format: `save_pretrained` of transformers: {"metadata": {"total_size"}, "weight_map": {FQN: file name}}. The file names
come from the index, so they are untrusted: one path component each, or the run stops. A shard must be a regular file.
Where a symbolic link leads is not asked: the Hugging Face cache is made of links into `../../blobs`, an index cannot
make one, and whoever can put a link into the folder can put the file there. Only headers are read through it.

A shard that is missing or cannot be read costs only its own tensors: each name that the index gives it is a row with
its `damage`; without an index, a row stands for the shard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import IndexMismatch, MalformedError, MissingShard, PlaceUnreadable, UnreadableError
from statecli.core.state import ModelState, Oddity, Settings, StateDict, TensorInfo
from statecli.formats import deepspeed
from statecli.formats.safetensors import DROPPED
from statecli.formats.shared import config_files, rank_folders
from statecli.formats.torch.settings import is_same_setting, join, put_below, select
from statecli.storage import checkpoint_folder, files, json_object
from statecli.storage.checkpoint_names import SINGLE
from statecli.storage.source import Source

NAME = "sharded"

#: 350,000 tensors at 90 bytes a line; Python's JSON takes up to thirty times the text in memory.
MAX_INDEX = 32 * 1024 * 1024
#: What makes a path, a drive or a URL of a name, and what breaks a line.
_NO_NAME = re.compile("[/\\\\:\x00-\x1f\x7f-\x9f\u2028\u2029]")

#: What to do about a shard that is not there.
AGAIN = "copy or download it again"

ReadFile = Callable[[str], ModelState]


class Index(NamedTuple):
    """An index as read: its `folder` as the user wrote it, the FQN -> shard map, the shards in order of first mention.

    `metadata` is what stands beside the map.
    """

    folder: str
    weight_map: dict[str, str]
    shards: list[str]
    metadata: dict[str, Any]


class Shards(NamedTuple):
    """What was read of the shards in a folder, by their names, and why others could not be, in words without a path.

    `missing` is one line of all that are `absent`.
    """

    states: list[tuple[str, ModelState]]
    failed: dict[str, str]
    absent: list[str]
    missing: str

    @property
    def lost(self) -> frozenset[str]:
        """Those of which nothing was read."""
        return frozenset((*self.failed, *self.absent))


def sniff(path: str, head: bytes) -> bool:
    """Whether this is a folder, or a JSON file with a weight_map or the name of an index."""
    if files.isdir(path):
        return True
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return start.startswith(b"{") and (
        checkpoint_folder.INDEX.search(files.name(path)) is not None or b'"weight_map"' in head
    )


def read(path: str, read_file: ReadFile) -> ModelState:
    """The union of all shards. `read_file` reads one of them; its errors already name the shard's path.

    Raises UnreadableError and MalformedError, without the path where they are about the index or the folder: where the
    index lies, and where no shard can be read.
    """
    if files.isdir(path):
        return in_folder(path, read_file)
    index = _index(path, "the index")
    state, beside = _indexed(index, path, "the index", read_file), _unnamed(index)
    if not beside:
        return state
    return _noted(
        state, Oddity("unnamed-shards", f"beside its shards, not named and not read: {quoting.names(beside)}")
    )


def in_folder(path: str, read_file: ReadFile, others: Collection[str] = ()) -> ModelState:
    """The model of the folder `path`, with the settings beside it; of `others` nothing is said, for they are read too.

    Raises as `read` does.
    """
    choice = checkpoint_folder.choose(path)
    where = files.join(path, choice.name)
    files.ahead((where, *config_files.beside(path, choice.names)))
    used: list[str] = []
    if checkpoint_folder.INDEX.search(choice.name):
        index = _index(where, choice.name)
        used, state = index.shards, _indexed(index, path, choice.name, read_file)
    elif match := checkpoint_folder.SERIES.match(choice.name):
        used = _numbered(match)
        state = _in_series(path, used, read_file)
    else:
        state = replace(read_file(where), target=path)
    beside = sorted({*choice.others, *checkpoint_folder.FOREIGN.intersection(choice.names)}.difference(used, others))
    if beside:
        state = _noted(state, Oddity("other-weights", f"beside what was read, and not read: {quoting.names(beside)}"))
    companions = [name for name in choice.names if checkpoint_folder.COMPANIONS.match(name) and name not in others]
    if unread := [name for name in companions if not name.endswith(".json")]:
        state = _noted(state, Oddity("companions", f"of the training run, and not read: {quoting.names(unread)}"))
    if steps := deepspeed.tags(path):
        said = f"of the same training, by DeepSpeed, and not read: {quoting.names(steps)}; name one of these folders"
        state = _noted(state, Oddity("other-weights", said))
    return config_files.noted(path, state)


def _numbered(match: re.Match[str]) -> list[str]:
    """All shards of a numbered series, by what is there of it and what is not."""
    count = match["count"]
    return [f"{match['stem']}-{n:05d}-of-{count}{match['suffix']}" for n in range(1, int(count) + 1)]


def _in_series(path: str, names: list[str], read_file: ReadFile) -> ModelState:
    """The union of a numbered series without an index; nobody knows what a shard held that cannot be read."""
    shards = _shards(path, names, "by their numbers", read_file)
    state = _whole(_merged(path, shards.states), len(names), whole=not shards.lost)
    if not shards.lost:
        return _noted(state, Oddity("no-index", f"no index: all {len(names)} numbered shards were read"))
    rows = [rank_folders.lost(name, "model", f"{files.join(path, name)}: {why}") for name, why in shards.failed.items()]
    if shards.absent:
        rows.append(rank_folders.lost(quoting.names(shards.absent), "model", f"{path}: {shards.missing}; {AGAIN}"))
    return _with_lost(state, shards, rows)


def _with_lost(state: ModelState, shards: Shards, rows: list[TensorInfo]) -> ModelState:
    """The state with rows for what is missing of it, and what a rule says of missing shards."""
    odd = (Oddity("missing-shard", shards.missing),) if shards.absent else ()
    sections = tuple(dict.fromkeys((*state.sections, *(row.section for row in rows))))
    return replace(_noted(state, *odd), tensors=(*state.tensors, *rows), sections=sections)


def _whole(state: ModelState, count: int, *, whole: bool) -> ModelState:
    """The state without what says which part of a split GGUF a file is.

    Raises IndexMismatch where that is not what is here: how many parts, and how many tensors they have together, where
    the `whole` of them was read.
    """
    parts, tensors = (state.metadata.values.get(f"split.{key}") for key in ("count", "tensors.count"))
    if type(parts) is int and parts != count:
        raise IndexMismatch(f"its files are numbered up to {count}, and say that they are {parts} parts")
    if whole and type(tensors) is int and tensors != len(state.tensors):
        raise IndexMismatch(f"its parts say that they have {tensors} tensors together, and have {len(state.tensors)}")
    of_parts = ("split.count", "split.tensors.count", "split.no")
    if type(parts) is not int:
        return state
    return replace(state, metadata=select(state.metadata, lambda key: not key.endswith(of_parts)))


def _missing(missing: list[str], count: int, why: str) -> str:
    subject = f"shard {quoting.names(missing)} is" if len(missing) == 1 else f"shards {quoting.names(missing)} are"
    return f"{subject} missing: {count - len(missing)} of {count} are here, {why}"


def _refuse_absent(folder: str, shards: list[str], why: str) -> list[str]:
    """The shards that are not there. Raises MissingShard where none is."""
    files.ahead(files.join(folder, shard) for shard in shards)
    absent = [shard for shard in shards if not files.has_file(files.join(folder, shard))]
    if len(absent) == len(shards):
        raise MissingShard(f"{_missing(absent, len(shards), why)}; {AGAIN}")
    return absent


def _index(path: str, what: str) -> Index:
    """The index at `path`, all it names checked; `what` is what messages call it."""
    document = _document(path, what)
    weight_map = _weight_map(document, what)
    metadata = document.get("metadata")
    index = Index(
        files.folder(path),
        weight_map,
        list(dict.fromkeys(weight_map.values())),
        metadata if type(metadata) is dict else {},
    )
    for shard in index.shards:
        _check_name(shard, what)
    return index


def _document(path: str, what: str) -> dict[str, Any]:
    try:
        with Source(path) as source:
            if source.size > MAX_INDEX:
                raise MalformedError(f"has {source.size} bytes, more than the {MAX_INDEX} that an index may have")
            raw = source.read(0, source.size)
    except UnreadableError as error:
        raise type(error)(quoting.with_reason(what, error)) from error.__cause__
    document, repeats = json_object.object_of(raw, what)
    json_object.refuse(repeats, what)
    return document


def _weight_map(document: dict[str, Any], what: str) -> dict[str, str]:
    weight_map = document.get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        raise MalformedError(f"{what} has no weight_map that names a tensor")
    for fqn, shard in weight_map.items():
        if type(shard) is not str:
            raise MalformedError(f"{quoting.name(fqn)}: {what} maps it to {quoting.value(shard)}, no file name")
    # transformers joins what Flax nests with slashes.
    return {fqn.replace("/", ".") if shard.endswith(".msgpack") else fqn: shard for fqn, shard in weight_map.items()}


def _check_name(shard: str, what: str) -> None:
    """Refuse what is no plain file name on every system: no path, no drive, no URL, no home folder."""
    if shard in ("", ".", "..") or shard[0] == "~" or _NO_NAME.search(shard):
        raise MalformedError(f"{what} points outside its folder: {quoting.quoted(shard)} is no plain file name")


def _indexed(index: Index, target: str, what: str, read_file: ReadFile) -> ModelState:
    shards = _shards(index.folder, index.shards, f"as {what} names them", read_file)
    state = _merged(target, shards.states)
    odd = _disagreements(index, shards, read_file)
    odd += [] if shards.lost else _totals(index.metadata, state)
    if shards.lost:
        state = _with_lost(state, shards, _lost_rows(index, target, shards))
    beside = {key: value for key, value in index.metadata.items() if type(value) in (str, int, float, bool)}
    metadata = replace(state.metadata, values={**state.metadata.values, **beside})
    return replace(_noted(state, *odd), metadata=metadata)


def _lost_rows(index: Index, target: str, shards: Shards) -> list[TensorInfo]:
    """A row for each name that the index gives to a shard that is missing or cannot be read."""
    rows, lost = [], shards.lost
    for fqn, shard in index.weight_map.items():
        if shard in lost:
            why = shards.failed.get(shard)
            file = target if why is None else files.join(index.folder, shard)
            wrong = f"{shards.missing}; {AGAIN}" if why is None else _of_its_shard(why)
            damage = f"{file}: {quoting.name(fqn)}: {wrong}"
            rows.append(TensorInfo(fqn, "unknown", None, 0, 0, saved=True, note=wrong, damage=damage))
    return rows


def _of_its_shard(why: str) -> str:
    return f"its shard {why}" if why.startswith(("is ", "cannot ")) else f"its shard cannot be read: {why}"


def _shards(folder: str, names: list[str], why: str, read_file: ReadFile) -> Shards:
    """Each shard read. Raises UnreadableError where none can be: MissingShard, or what the first one says."""
    absent = _refuse_absent(folder, names, why)
    states: list[tuple[str, ModelState]] = []
    errors: dict[str, UnreadableError] = {}
    gone = frozenset(absent)
    for name in names:
        try:
            if name not in gone:
                states.append((name, _shard(folder, name, read_file)))
        except PlaceUnreadable:
            raise
        except UnreadableError as error:
            errors[name] = error
    if not states:
        raise next(iter(errors.values()))
    failed = {name: _own(str(one), folder, name) for name, one in errors.items()}
    return Shards(states, failed, absent, _missing(absent, len(names), why))


def _own(why: str, folder: str, name: str) -> str:
    """The reason without the shard's path or name."""
    return why.removeprefix(f"{files.join(folder, name)}: ").removeprefix(f"shard {quoting.name(name)} ")


def _shard(folder: str, name: str, read_file: ReadFile) -> ModelState:
    """One of them. Shards hold tensors: a folder or an index among them could name itself, without end."""
    path = files.join(folder, name)
    if files.isdir(path):
        raise MalformedError(f"shard {quoting.name(name)} is a directory, not a regular file")
    if _is_index(path):
        raise MalformedError(f"shard {quoting.name(name)} is an index itself, not a file of tensors")
    return read_file(path)


def _is_index(path: str) -> bool:
    try:
        with Source(path) as source:
            return sniff(path, source.head)
    except UnreadableError:  # `read_file` meets the same and says so with the shard's path.
        return False


def _noted(state: ModelState, *oddities: Oddity) -> ModelState:
    return replace(state, oddities=(*state.oddities, *oddities))


def _merged(target: str, states: list[tuple[str, ModelState]]) -> ModelState:
    owner: dict[tuple[str, str], str] = {}
    tensors: list[TensorInfo] = []
    oddities: list[Oddity] = []
    for shard, state in states:
        for tensor in state.tensors:
            first = owner.setdefault((tensor.section, tensor.fqn), shard)
            if first != shard:
                raise MalformedError(f"{quoting.name(tensor.fqn)}: is in two shards, {first} and {shard}")
            if tensor.storage is not None:
                # Storage keys count from 0 in each file.
                tensor = replace(tensor, storage=f"{shard}:{tensor.storage}")
            tensors.append(tensor)
        # Here are all parts.
        apart = (odd for odd in state.oddities if odd.name != "one-part")
        oddities.extend(replace(odd, message=f"{shard}: {odd.message}") for odd in apart)
    return ModelState(
        target,
        f"{NAME} {'+'.join(dict.fromkeys(state.format for _, state in states))}",
        tuple(tensors),
        tuple(dict.fromkeys(section for _, state in states for section in state.sections)),
        _common(states),
        tuple(oddities),
        tuple(dict.fromkeys(found for _, state in states for found in state.globals)),
        tuple(facts for _, state in states for facts in state.optimizers),
        _state_dicts(states),
    )


def _state_dicts(states: list[tuple[str, ModelState]]) -> tuple[StateDict, ...]:
    """Without `_metadata`: whoever puts the shards together makes one dict of them, and that has none."""
    found: dict[str, list[StateDict]] = {}
    for _, state in states:
        for one in state.state_dicts:
            found.setdefault(one.section, []).append(one)
    return tuple(
        StateDict(
            section,
            None,
            tuple(dict.fromkeys(key for one in ones for key in one.others)),
            tuple(dict.fromkeys(key for one in ones for key in one.holders)),
        )
        for section, ones in found.items()
    )


def _common(states: list[tuple[str, ModelState]]) -> Settings:
    """Return the settings that are the same in all shards that have them; the others below the name of their shard."""
    sides = [state.metadata for _, state in states]
    every = join(reversed(sides))
    agreed = select(
        every,
        lambda key: all(is_same_setting(key, every, side) for side in sides if key in side.values or key in side.kinds),
    )

    def is_own(key: str) -> bool:
        return key not in agreed.values and key not in agreed.kinds

    return join((agreed, *(put_below(select(state.metadata, is_own), f"{shard}.") for shard, state in states)))


def _unnamed(index: Index) -> list[str]:
    """Files beside the shards, of their format, that by their names are of no other checkpoint."""
    named, kinds = set(index.shards), {_series(shard) for shard in index.shards}
    suffixes = {os.path.splitext(shard)[1] for shard in index.shards}.intersection(checkpoint_folder.WEIGHTS)
    found = [name for name in checkpoint_folder.files(index.folder or ".") if os.path.splitext(name)[1] in suffixes]
    return [
        name
        for name in found
        if name not in (*SINGLE, *named)
        and not checkpoint_folder.COMPANIONS.match(name)
        and _series(name) in (None, *kinds)
    ]


def _series(name: str) -> tuple[str, str] | None:
    match = checkpoint_folder.SERIES.match(name)
    return (match["stem"], match["suffix"]) if match else None


#: Files beside the shards in which a tensor is looked for that none of them has.
MAX_SEARCHED = 16


def _where(fqn: str, index: Index, read_file: ReadFile) -> str:
    """Where a tensor is that is in no shard."""
    for name in _unnamed(index)[:MAX_SEARCHED]:
        try:
            state = read_file(files.join(index.folder, name))
        except UnreadableError:  # No file of this checkpoint: what is wrong with it is said where it is the target.
            continue
        if any(tensor.fqn == fqn for tensor in state.tensors):
            return f"{quoting.name(name)}, which the index does not name"
    return "no shard"


def _disagreements(index: Index, shards: Shards, read_file: ReadFile) -> list[Oddity]:
    """Refuse what the index says and the shards deny; note what they hold and it does not name."""
    weight_map, states, lost = index.weight_map, shards.states, shards.lost
    found = {tensor.fqn: shard for shard, state in states for tensor in state.tensors}
    for fqn, shard in weight_map.items():
        if fqn not in found and shard in lost:
            continue
        if fqn not in found:
            where = _where(fqn, index, read_file)
            raise IndexMismatch(f"{quoting.name(fqn)}: the index says it is in {shard}, it is in {where}")
        if found[fqn] != shard:
            raise IndexMismatch(f"{quoting.name(fqn)}: the index says {shard}, it is in {found[fqn]}")
    # The dropped name of a tied tensor is a row of ours and no entry of the file.
    rows = (tensor for _, state in states for tensor in state.tensors if tensor.note != DROPPED)
    extra = [tensor.fqn for tensor in rows if tensor.fqn not in weight_map]
    if not extra:
        return []
    return [Oddity("not-in-index", f"in the shards, and not named by the index: {quoting.names(extra)}", extra[0])]


def _totals(metadata: dict[str, Any], state: ModelState) -> list[Oddity]:
    claimed = metadata.get("total_size")
    if not isinstance(claimed, (int, float)):
        return []
    seen: dict[Any, int] = {}
    for n, tensor in enumerate(state.tensors):
        key = n if tensor.storage is None else tensor.storage
        seen[key] = max(tensor.nbytes, seen.get(key, 0))
    total = sum(seen.values())
    if claimed in (total, sum(tensor.nbytes for tensor in state.tensors)):
        return []
    differ = f"{abs(claimed - total)} {'more' if claimed > total else 'fewer'}"
    return [Oddity("index-total", f"the index says {claimed} bytes in all, {differ} than the tensors take ({total})")]


def members(path: str) -> tuple[str, ...]:
    """The names of the files that the model of the folder `path` is in: its weights, or its shards and index.

    None where the folder only happens to hold one file. Those that are there: raises UnreadableError where it holds no
    model, or several, or one of which no shard is.
    """
    choice = checkpoint_folder.choose(path)
    if checkpoint_folder.INDEX.search(choice.name):
        shards = _index(files.join(path, choice.name), choice.name).shards
        return (choice.name, *_present(path, shards, f"as {choice.name} names them"))
    if match := checkpoint_folder.SERIES.match(choice.name):
        return _present(path, _numbered(match), "by their numbers")
    return (choice.name,) if choice.is_own else ()


def _present(folder: str, shards: list[str], why: str) -> tuple[str, ...]:
    absent = frozenset(_refuse_absent(folder, shards, why))
    return tuple(shard for shard in shards if shard not in absent)
