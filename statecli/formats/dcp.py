"""A folder of `torch.distributed.checkpoint`: `.metadata`, and a `.distcp` file or more for each rank that saved.

`.metadata` says which chunks each tensor was cut into and where they lie (`_dcp_metadata.py`); each item of a `.distcp`
file is a whole archive of torch.save, opened only when its values are read. What is no tensor (an epoch, an lr, the
names in param_groups) is such an archive too, and read, as far as `MAX_ITEMS` goes. The planner's paths put all of it
into the nested dict that was saved, which is then taken as a pickle of torch.save would be. Saved without collectives,
each rank has a `__0.metadata` of its own. Neither devices nor ties are recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from operator import add
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import BITS, nbytes
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import Box, Boxes, ByteRange, ModelState, Oddity, Packing, TensorData
from statecli.formats import torch_zip
from statecli.formats.shared import dcp_ranks
from statecli.formats.shared.dcp_metadata import MAX_METADATA, Chunk, Metadata, SavedTensor, Sizes, Stored, parsed
from statecli.formats.shared.tiling import Box as Region
from statecli.formats.shared.tiling import fault
from statecli.formats.torch.objects import state_of
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import sequence
from statecli.pickles.machine import Global, Pickle
from statecli.storage import checkpoint_folder, files
from statecli.storage.checkpoint_names import METADATA
from statecli.storage.source import Source, small

NAME = "dcp"

#: The names of metadata, one for all or one for each rank.
_METADATA = re.compile(r"(?:__(?P<rank>\d{1,9}))?\.metadata")
SUFFIX = ".distcp"
#: The file in which Lightning keeps what is no tensor of a model or an optimizer that it saves in shards.
BESIDE = "meta.pt"
#: What is at the start of a pickle of metadata, and in how many bytes of it.
_MARK = b"torch.distributed."
MARKED = 64
#: `Packing.how` of an archive of torch.save that holds one tensor.
ARCHIVE = "torch-zip"
#: Values beside the tensors that are read, each an archive of its own, and their bytes in all.
MAX_ITEMS = 2_000
MAX_ITEM_BYTES = 64 * 2**20
#: What makes a path, a drive or a URL of a name, and what breaks a line.
_NO_NAME = re.compile("[/\\\\:\x00-\x1f\x7f-\x9f\u2028\u2029]")

ReadFile = Callable[[str], ModelState]


def sniff(path: str, head: bytes) -> bool:
    """Whether this is such a folder, or a file out of one."""
    if files.isdir(path):
        names = members(path)
        return any(name.endswith(SUFFIX) or _is_metadata(files.join(path, name)) for name in names)
    return files.name(path).endswith(SUFFIX) or _MARK in head[:MARKED] or _is_metadata(path)


def _is_metadata(path: str) -> bool:
    """Whether it is called so and is a pickle: torch.distributed.checkpoint unpickles it, whatever is in it."""
    from statecli.pickle_scan.one_pickle import begins_as_pickle

    if not _METADATA.fullmatch(files.name(path)):
        return False
    try:
        with Source(path) as source:
            return _MARK in source.head[:MARKED] or begins_as_pickle(source)
    except UnreadableError:  # No file of this format's, then; other programs have a `.metadata` too.
        return False


def members(path: str) -> tuple[str, ...]:
    """The names of the folder's metadata and `.distcp` files, whatever these say.

    Raises UnreadableError for a folder that cannot be listed.
    """
    return tuple(name for name in checkpoint_folder.files(path) if name.endswith(SUFFIX) or _METADATA.fullmatch(name))


def places(path: str) -> tuple[dict[str, list[Stored]], list[tuple[str, str]]]:
    """What every metadata of the folder says lies in each file, whether a reader asks for it or not.

    Beside it, each metadata that does not say so, with the reason.
    """
    found: dict[str, list[Stored]] = {}
    unread = []
    for name in members(path):
        if _METADATA.fullmatch(name):
            try:
                metadata = parsed(small(files.join(path, name), MAX_METADATA), name)
            except UnreadableError as error:
                unread.append((name, str(error)))
                continue
            for one in (one for several in metadata.places.values() for one in several):
                found.setdefault(one.file, []).append(one)
    return found, unread


def read(path: str, read_file: ReadFile) -> ModelState:  # noqa: ARG001 - what lies in the files is no file by itself
    """All that the metadata names. Raises UnreadableError for a file of such a folder, and what `Metadata` raises.

    A tensor whose chunks contradict each other, or lie in a file that is missing or bad, is there, with its `damage`.
    """
    if not files.isdir(path):
        folder = files.folder(path) or "."
        raise UnreadableError(f"is one file of a torch.distributed.checkpoint: name its folder, {folder}")
    return _Folder(path).state()


class _Folder:
    """One reading of a folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.oddities: list[Oddity] = []
        self.storages: dict[str, ByteRange] = {}
        found, bad = _metadata(path)
        self.metadata, rivals = dcp_ranks.merged(list(found.values()))
        self.files = _Files(path, self.metadata, [one.theirs for one in rivals], self.oddities)
        _check_apart(self.metadata)
        self.globals: list[Global] = []
        self.instead = self._look_beside(found, bad)
        if len(found) > 1:
            here = [one for one in rivals if self.files.has(one.mine, one.theirs)]
            self.oddities.append(dcp_ranks.told(path, len(found), here))

    def _look_beside(self, found: Mapping[str, Metadata], bad: Mapping[str, UnreadableError]) -> str:
        """Note what lies in the folder, or should, beside what is read; what to say of a hole that comes of it."""
        names = members(self.path)
        others = [name for name in names if _METADATA.fullmatch(name) and name not in found and name not in bad]
        unused = [name for name in names if name.endswith(SUFFIX) and name not in self.files.ends]
        unused = [name for name in unused if _holds_bytes(files.join(self.path, name))]
        missing = [] if METADATA in found else [name for name in dcp_ranks.missing(found, unused) if name not in bad]
        why = [str(error) for error in bad.values()]
        if missing:
            why.append(f"{quoting.names(missing)} {'are' if missing[1:] else 'is'} missing; copy the folder again")
        self.oddities.extend(Oddity("missing-rank", f"what a rank saved is not read: {one}") for one in why)
        if others:
            self.oddities.append(Oddity("other-metadata", f"beside .metadata, and not read: {quoting.names(others)}"))
        lost = dcp_ranks.ranks([*bad, *missing])
        left = [name for name in unused if not dcp_ranks.ranks([name]) & lost]
        if left:
            message = f"named by no metadata, and not read: {quoting.names(left)}; left from another save?"
            self.oddities.append(Oddity("unused-file", message))
        if BESIDE in checkpoint_folder.files(self.path):
            said = f"what Lightning saves beside tensors (epoch, hyper_parameters) is in {BESIDE}: name that file"
            self.oddities.append(Oddity("beside", said))
        return "; ".join(why[:2]) or "save it again"

    def state(self) -> ModelState:
        """What the folder holds, as the nested dict that was saved."""
        items = _Items(self)
        nodes = {fqn: items.node(fqn) for fqn in self.metadata.order if fqn not in self.metadata.tensors}
        nodes = {fqn: nodes[fqn] if fqn in nodes else self._tensor(fqn) for fqn in self.metadata.order}
        root = nested(nodes, self.metadata.paths)
        pickle = Pickle(root, self.globals, 0, [], [], 0)
        state = state_of(pickle, self.storages, target=self.path, format=NAME, oddities=self.oddities)
        return _naming(state, self.metadata.foreign)

    def where(self, one: Stored, length: int) -> ByteRange:
        """The archive that holds an item, of `length` bytes when it is taken out."""
        return ByteRange(files.join(self.path, one.file), one.offset, length, packing=Packing(ARCHIVE, one.length))

    def _tensor(self, fqn: str) -> Tensor:
        """A tensor by its chunks; one that they contradict has `damage`."""
        saved = self.metadata.tensors[fqn]
        if isinstance(saved, str):
            return _damaged(saved)
        try:
            return self._checked(fqn, saved)
        except UnreadableError as error:
            elements = prod(saved.shape)
            size = nbytes(saved.dtype, elements)
            return Tensor(saved.dtype, saved.shape, elements, size, None, saved.requires_grad, damage=str(error))

    def _checked(self, fqn: str, saved: SavedTensor) -> Tensor:
        if saved.wrong:
            raise MalformedError(saved.wrong)
        chunks = [chunk for chunk in saved.chunks if 0 not in chunk.shape]
        places = _placed(chunks, self.metadata.places.get(fqn, ()))
        wrong = fault(saved.shape, _regions(chunks)) if 0 not in saved.shape else None
        if wrong:
            raise MalformedError(f"{wrong}; {self.instead}")
        for one in places:
            self.files.check(one)
        elements = prod(saved.shape)
        size = nbytes(saved.dtype, elements)
        packed = next((one.transforms for one in places if one.transforms), None)
        data = None if packed else self._data(saved, chunks, places, size)
        note = (
            f"values cannot be read: written through {quoting.names(packed)}" if packed else _cut(saved.shape, chunks)
        )
        return Tensor(saved.dtype, saved.shape, elements, size, None, saved.requires_grad, note=note, data=data)

    def _data(self, saved: SavedTensor, chunks: list[Chunk], places: list[Stored], size: int) -> TensorData:
        if len(places) == 1:
            return TensorData(self.where(places[0], size), saved.dtype, saved.shape)
        boxes = tuple(
            Box(start, TensorData(self.where(one, nbytes(saved.dtype, prod(shape))), saved.dtype, shape))
            for (start, shape), one in zip(chunks, places, strict=True)
        )
        whole = ByteRange(self.path, 0, size, boxes=Boxes(saved.shape, BITS[saved.dtype] // 8, boxes))
        return TensorData(whole, saved.dtype, saved.shape)


class _BadFile(MalformedError):
    """A file is missing, cut short, or none that may be read."""


class _Files:
    """The files that the metadata names: the size of each, or why it is not read.

    `others` lie in them too, and are no part of what is shown.
    """

    def __init__(self, path: str, metadata: Metadata, others: Sequence[Stored], oddities: list[Oddity]) -> None:
        self.path = path
        self.places = metadata.places
        self.ends = _ends([*metadata.places.values(), others])
        self.sizes: dict[str, int] = {}
        self.bad: dict[str, str] = {}
        self._refuse_outside()
        if said := self._miss():
            oddities.append(Oddity("missing-rank", said))
        here = [name for name in self.ends if name not in self.bad]
        files.ahead(files.join(path, name) for name in here)
        for name in here:
            try:
                with Source(files.join(path, name)) as source:
                    self.sizes[name] = source.size
            except UnreadableError as error:
                self._give_up([name], quoting.with_reason(quoting.name(name), error), "copy it again")

    def _refuse_outside(self) -> None:
        names = [name for name in self.ends if name in ("", ".", "..") or name[0] == "~" or _NO_NAME.search(name)]
        if names:
            more = f" and {len(names) - 1} more are no plain file names" if names[1:] else " is no plain file name"
            said = f".metadata points outside its folder: {quoting.quoted(names[0])}{more}"
            self._give_up(names, said, "do not load it, and save it again")

    def _miss(self) -> str | None:
        """What is not there."""
        names = [name for name in self.ends if name not in self.bad]
        files.ahead(files.join(self.path, name) for name in names)
        missing = [name for name in names if not files.exists(files.join(self.path, name))]
        if not missing:
            return None
        here = f"{len(self.ends) - len(missing)} of {len(self.ends)} files are here, as .metadata names them"
        said = f"{quoting.names(missing)} {'are' if missing[1:] else 'is'} missing: {here}"
        self._give_up(missing, said, "copy it again" if not missing[1:] else "copy them again")
        return said

    def _give_up(self, names: list[str], why: str, help: str) -> None:
        """One reason for all that needs one of these files."""
        lacking = set(names)
        needed = sum(any(one.file in lacking for one in several) for several in self.places.values())
        it = "them" if names[1:] else "it"
        said = f"{why}; {needed} of {len(self.places)} tensors and values lie in {it}, at least in part: {help}"
        self.bad.update(dict.fromkeys(names, said))

    def has(self, *places: Stored) -> bool:
        """Whether these can be read."""
        return all(one.file in self.sizes and one.offset + one.length <= self.sizes[one.file] for one in places)

    def check(self, one: Stored) -> None:
        """Refuse what lies in a file that is not read, or behind the end of one; all of it for one reason."""
        if one.file in self.bad:
            raise _BadFile(self.bad[one.file])
        if one.offset + one.length > self.sizes[one.file]:
            end, size = self.ends[one.file], self.sizes[one.file]
            raise _BadFile(f"{one.file} is cut short: .metadata needs {end} bytes of it, it has {size}; copy it again")


def _damaged(why: str) -> Tensor:
    return Tensor("unknown", None, 0, 0, None, False, damage=why)


class _Items:
    """Reads what is no tensor, an archive each, as far as the budget goes."""

    def __init__(self, folder: _Folder) -> None:
        self.folder = folder
        names = [fqn for fqn in folder.metadata.order if fqn not in folder.metadata.tensors]
        # What tells which parameters an optimizer trains comes first.
        names.sort(key=lambda fqn: not fqn.endswith((".params", ".param_names")))
        self.chosen: set[str] = set()
        left = MAX_ITEM_BYTES
        for fqn in names[:MAX_ITEMS]:
            places = folder.metadata.places.get(fqn, ())
            left -= sum(one.length for one in places)
            if left >= 0 and not any(one.transforms for one in places):
                self.chosen.add(fqn)
        unread = [fqn for fqn in names if fqn not in self.chosen]
        if unread:
            count = "a value" if len(unread) == 1 else f"{len(unread)} values"
            message = f"{count} beside the tensors not read, {len(self.chosen)} were: {quoting.names(unread)}"
            folder.oddities.append(Oddity("values-not-read", message))
        self._prefetch()

    def _prefetch(self) -> None:
        """All that will be read, where that is a journey."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for one in (one for fqn in self.chosen for one in self.folder.metadata.places.get(fqn, ())):
            wanted.setdefault(one.file, []).append((one.offset, one.length))
        here = {
            files.join(self.folder.path, name): spans
            for name, spans in wanted.items()
            if name in self.folder.files.sizes
        }
        with files.fetched(here):
            pass

    def node(self, fqn: str) -> Any:
        """The object that was saved under this name, None where it is not read; where it cannot be, a row says so."""
        if fqn not in self.chosen:
            return None
        places = self.folder.metadata.places.get(fqn, ())
        if len(places) != 1:
            return _damaged("no tensor, and .metadata does not say where it lies; save it again")
        one = places[0]
        try:
            self.folder.files.check(one)
            return self._opened(fqn, one)
        except UnreadableError as error:
            where = "" if isinstance(error, _BadFile) else f"the archive at byte {one.offset} of {one.file}: "
            return _damaged(f"{where}{error}")

    def _opened(self, fqn: str, one: Stored) -> Any:
        """The root of its pickle; its storages are known by the name as well, for each archive counts from 0."""
        folder = self.folder
        pickle, storages, _ = torch_zip.contents(files.join(folder.path, one.file), one.offset, one.length)
        for node in pickle.persistent:
            if type(node.pid) is tuple and len(node.pid) > 2 and type(node.pid[2]) is str:
                node.pid = (*node.pid[:2], f"{fqn}:{node.pid[2]}", *node.pid[3:])
        folder.storages.update((f"{fqn}:{key}", where) for key, where in storages.items())
        folder.globals.extend(pickle.globals)
        return pickle.root


def _metadata(path: str) -> tuple[dict[str, Metadata], dict[str, UnreadableError]]:
    """The metadata of all, else that of each rank; and those of ranks that cannot be read, if others can."""
    names = [name for name in members(path) if _METADATA.fullmatch(name)]
    if not names:
        raise UnreadableError(
            "is a torch.distributed.checkpoint folder without .metadata: the save did not finish, or it was not copied"
        )
    found: dict[str, Metadata] = {}
    bad: dict[str, UnreadableError] = {}
    for name in [METADATA] if METADATA in names else sorted(names, key=lambda name: (len(name), name)):
        try:
            found[name] = parsed(_bytes_of(path, name), name)
        except UnreadableError as error:
            bad[name] = error
    if not found:
        raise next(iter(bad.values()))
    return found, bad


def _bytes_of(path: str, name: str) -> bytes:
    try:
        return small(files.join(path, name), MAX_METADATA)
    except UnreadableError as error:
        raise type(error)(quoting.with_reason(name, error)) from error.__cause__


def _holds_bytes(path: str) -> bool:
    """Not so the file of a rank that had nothing to save."""
    return files.isfile(path) and files.size(path) > 0


def _naming(state: ModelState, names: Sequence[Global]) -> ModelState:
    """The same, and what reading `.metadata` as torch does would import."""
    if not names:
        return state
    qualified = list(dict.fromkeys(one.qualified for one in names))
    what = "a name" if len(qualified) == 1 else f"{len(qualified)} names"
    message = f"torch.distributed.checkpoint unpickles .metadata, and would import or call {what} from it: "
    odd = Oddity("foreign-globals", message + quoting.names(qualified))
    told = tuple((one.qualified, one.position) for one in names)
    return replace(state, oddities=(*state.oddities, odd), globals=(*told, *state.globals))


def _check_apart(metadata: Metadata) -> None:
    """Refuse items that share bytes, unless all of them: what one of them shows is hidden in another."""
    spans = sorted(
        (one.file, one.offset, one.length, fqn)
        for fqn, places in metadata.places.items()
        for one in places
        if one.length
    )
    last = ("", 0, 0, "")
    for span in spans:
        file, offset, length, fqn = span
        if file == last[0] and offset < last[1] + last[2] and (offset, length) != last[1:3]:
            raise MalformedError(
                f".metadata puts {quoting.name(fqn)} at byte {offset} of {quoting.name(file)}, inside "
                f"{quoting.name(last[3])} (bytes {last[1]} to {last[1] + last[2]}): do not load it; save it again"
            )
        if file != last[0] or offset + length > last[1] + last[2]:
            last = span


def _ends(places: Iterable[Sequence[Stored]]) -> dict[str, int]:
    """How many bytes of each file are needed."""
    found: dict[str, int] = {}
    for several in places:
        for one in several:
            found[one.file] = max(one.offset + one.length, found.get(one.file, 0))
    return found


def _placed(chunks: list[Chunk], places: Sequence[Stored]) -> list[Stored]:
    """Where each chunk lies. Both lists name chunks by where they start, mostly in one order."""
    if len(chunks) <= len(places) and all(map(_is_of, chunks, places)):
        return list(places[: len(chunks)])
    ordered = sorted((one for one in places if one.start is not None), key=_start)
    found = []
    for chunk in chunks:
        at = bisect_left(ordered, chunk.start, key=_start)
        if at == len(ordered) or not _is_of(chunk, ordered[at]):
            raise MalformedError(
                f".metadata does not say where its chunk of {list(chunk.shape)} at {list(chunk.start)} lies; "
                "save it again"
            )
        found.append(ordered[at])
    return found


def _is_of(chunk: Chunk, one: Stored) -> bool:
    return one.start == chunk.start


def _start(one: Stored) -> tuple[int, ...]:
    return one.start or ()


def _cut(shape: Sizes, chunks: Sequence[Chunk]) -> str | None:
    """Along which dimensions a tensor was cut, and into how many pieces."""
    if len(chunks) < 2:
        return None
    axes = [str(axis) for axis, size in enumerate(shape) if any(chunk.shape[axis] < size for chunk in chunks)]
    return f"{len(chunks)} chunks, cut along dimension{'s' * (len(axes) > 1)} {' and '.join(axes)}"


def _regions(chunks: list[Chunk]) -> list[Region]:
    return [Region(start, tuple(map(add, start, shape))) for start, shape in chunks]


def nested(nodes: dict[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    """The dict that was saved: each name's object at its path, dicts under their keys, lists by their indexes.

    What has no path, or one that others contradict, stands under its name.
    """
    root: dict[Any, Any] = {}
    made: dict[int, _Made] = {id(root): _Made(root, None, root)}
    for fqn, node in nodes.items():
        *above, last = paths.get(fqn, (fqn,))
        held = _container(root, above, made)
        if held is None or last in held:
            root[fqn] = node
        else:
            held[last] = node
    # Those below were made after those above them.
    for one in reversed(made.values()):
        indexes = one.held is not root and all(type(key) is int for key in one.held)
        if indexes and sorted(one.held) == list(range(len(one.held))):
            one.above[one.key] = [one.held[n] for n in range(len(one.held))]
    for one in made.values():
        _number(one.held)
    return root


def _number(optimizer: dict[Any, Any]) -> None:
    """Key an optimizer's state by the integers that its groups list, as it was: the planner makes text of all keys.

    And leaves out an empty dict: the state of SGD without momentum.
    """
    groups = optimizer.get("param_groups")
    listed = [group.get("params") for group in groups if type(group) is dict] if type(groups) is list else []
    state = optimizer.setdefault("state", {}) if any(listed) else None
    if type(state) is not dict:
        return
    ids = {one for several in listed for one in sequence(several) or () if type(one) in (int, str)}
    numbers = {str(one): one for one in ids if type(one) is int and str(one) not in ids}
    renamed = {numbers.get(key, key): value for key, value in state.items()}
    state.clear()
    state.update(renamed)


class _Made(NamedTuple):
    """A dict of ours, and where it hangs: what else is at a path was saved as one value."""

    above: dict[Any, Any]
    key: str | int | None
    held: dict[Any, Any]


def _container(root: dict[Any, Any], steps: list[str | int], made: dict[int, _Made]) -> dict[Any, Any] | None:
    """The dict at a path, made where there is none; None where a value stands in the way."""
    held = root
    for step in steps:
        if step not in held:
            below: dict[Any, Any] = {}
            made[id(below)] = _Made(held, step, below)
            held[step] = below
        if id(held[step]) not in made:
            return None
        held = held[step]
    return held
