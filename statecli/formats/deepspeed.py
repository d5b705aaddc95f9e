"""A DeepSpeed checkpoint: a folder with `latest` that names a folder of ranks' files, or that folder by itself.

`mp_rank_XX_model_states.pt` holds the module's state_dict and what DeepSpeed knows of it: the shapes of what it trains
(`param_shapes`, a dict for each group of the optimizer), `frozen_param_shapes`, `buffer_names`, `shared_params`. ZeRO
parts the optimizer's float32 copies and moments among the ranks, each a flat vector for each group, in
`*zero_pp_rank_R_mp_rank_XX_optim_states.pt`. Stages 1 and 2 lay a group's parameters one behind another and cut the
whole at equal lengths; stage 3 cuts each parameter by itself, and has its values nowhere else: each rank has a
`zero_pp_rank_R_mp_rank_XX_model_states.pt` whose tensors are empty. Source: deepspeed/utils/zero_to_fp32.py,
runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`) of deepspeed 0.19.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.errors import MalformedError, MissingShard, UnreadableError
from statecli.formats import _folder, _shown, torch_zip
from statecli.formats._dtypes import nbytes
from statecli.formats._graph import mapping, named, sequence
from statecli.formats._pickle import Obj
from statecli.formats._source import Source
from statecli.formats._tensors import MAX_DIMENSIONS, MAX_ELEMENTS, Decoder, Tensor
from statecli.formats._torch_objects import state_of
from statecli.state import (
    Box,
    Boxes,
    ByteRange,
    Evidence,
    Kind,
    ModelState,
    Oddity,
    TensorData,
    TensorInfo,
)

NAME = "deepspeed"

#: The newest version whose files are known.
KNOWN = (0, 19)
#: Bytes of `latest`: a folder's name.
MAX_LATEST = 512
#: Pieces that all parameters together may lie in; a 70B model on 512 ranks has 400,000.
MAX_PIECES = 3_000_000

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<mp>\d{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_?optim_states\.pt")
#: Files of experts and of pipeline stages.
_OTHER = re.compile(r"(?:layer|expp_rank)_.+_(?:model|optim)_states\.pt")
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})")

Shape = tuple[int, ...]


# --- which files -----------------------------------------------------------------------------------------------------


class Files(NamedTuple):
    """The files of one model-parallel rank, by data-parallel rank; -1 is that of the model where ranks share one."""

    model: dict[int, str]
    optimizer: dict[int, str]


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Whether it is a folder of ranks' files, or one with such a folder and no weights of its own."""
    names = _folder.files(path) if os.path.isdir(path) else []
    if any(map(_MODEL.fullmatch, names)) or any(map(_OPTIMIZER.fullmatch, names)):
        return True
    if any(one in names or f"{one}.index.json" in names for one in _folder.SINGLE):
        return False
    return "zero_to_fp32.py" in names or bool(_tags(path)) if os.path.isdir(path) else False


def _tags(path: str) -> list[str]:
    """The folders in it that hold a rank's model."""
    found = []
    try:
        with os.scandir(path) as entries:
            inner = sorted(one.name for one in entries if one.is_dir())[: _folder.MAX_INNER]
    except OSError:
        return []
    for name in inner:
        if any(map(_MODEL.fullmatch, _folder.files(os.path.join(path, name)))):
            found.append(name)
    return found


def _tag(path: str) -> str:
    """The folder in `path` that its ranks' files are in, "" for itself. Raises MalformedError where it is not there."""
    names = _folder.files(path)
    if any(map(_MODEL.fullmatch, names)) or any(map(_OPTIMIZER.fullmatch, names)):
        return ""
    tags = _tags(path)
    if "latest" in names:
        return _latest(path, tags)
    if len(tags) == 1:
        return tags[0]
    if not tags:
        raise MalformedError("is a DeepSpeed checkpoint without a folder of its ranks' files; copy it again")
    raise UnreadableError(f"holds {len(tags)} checkpoints and no file latest; name one of: {_shown.names(tags)}")


def _latest(path: str, tags: list[str]) -> str:
    with Source(os.path.join(path, "latest")) as source:
        if source.size > MAX_LATEST:
            raise MalformedError(f"latest has {source.size} bytes, and names no folder")
        tag = source.read(0, source.size).decode("utf-8", "backslashreplace").strip()
    if tag in ("", ".", "..") or _folder_separator(tag):
        raise MalformedError(f"latest points outside its folder: {_shown.quoted(tag)} is no plain folder name")
    if tag not in tags:
        here = f"; here are {_shown.names(tags)}: name one" if tags else "; copy it again"
        raise MissingShard(f"latest names {_shown.quoted(tag)}, and no such folder has a rank's files{here}")
    return tag


def _folder_separator(tag: str) -> bool:
    return any(char in "/\\:" or not char.isprintable() for char in tag)


def _files(path: str, tag: str) -> tuple[dict[int, Files], list[str]]:
    """The files by model-parallel rank, and those of a kind that is not read; by their ways from the folder."""
    found: dict[int, Files] = {}
    others = []
    for name in _folder.files(os.path.join(path, tag)):
        match, way = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name), os.path.join(tag, name)
        if match is None:
            others += [way] if _OTHER.fullmatch(name) else []
            continue
        ranks = found.setdefault(int(match["mp"]), Files({}, {}))
        (ranks.model if match.re is _MODEL else ranks.optimizer)[int(match["rank"] or -1)] = way
    return dict(sorted(found.items())), others


def members(path: str) -> tuple[str, ...]:
    """The ranks' files, by their ways from the folder. Raises UnreadableError as `read` does."""
    found, others = _files(path, _tag(path))
    return (*(name for files in found.values() for part in files for name in part.values()), *others)


# --- one rank --------------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """One file as read: what is pickled, how its tensors are decoded, and what was odd."""

    name: str
    items: Mapping[Any, Any]
    decoder: Decoder
    state: ModelState

    def flat(self, node: Any, what: str) -> list[Tensor]:
        """The vectors in a list. Raises MalformedError where one is none."""
        found = [self.decoder.tensor(one, what) for one in sequence(node) or ()]
        vectors = [one for one in found if one is not None and len(one.shape or ()) == 1 and one.data is not None]
        if len(vectors) != len(found) or any(one.data.strides for one in vectors if one.data):
            raise MalformedError(f"{what} holds something else than vectors")
        return vectors


def _read(folder: str, name: str) -> Rank:
    """One file. Raises UnreadableError with its name."""
    path = os.path.join(folder, name)
    try:
        pickle, storages, oddities = torch_zip.contents(path)
        state = state_of(pickle, storages, target=path, format=torch_zip.NAME, oddities=oddities)
        items = mapping(pickle.root)
        if items is None:
            raise MalformedError("holds no dict, as DeepSpeed saves one")
    except UnreadableError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    return Rank(name, items, Decoder(storages), state)


def _shapes(node: Any, what: str) -> dict[str, Shape]:
    found = {}
    for name, held in (mapping(node) or {}).items():
        dims = sequence(held)
        if type(name) is not str or dims is None or len(dims) > MAX_DIMENSIONS or not all(map(_is_size, dims)):
            raise MalformedError(f"{what} holds something else than a shape for each name")
        shape = tuple(dims)
        if prod(shape) > MAX_ELEMENTS:
            raise MalformedError(f"{_shown.name(name)}: {what} says {_shown.shape(shape)}, which is impossible")
        found[name] = shape
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


class Facts(NamedTuple):
    """What a model's file says of its names: shapes by the optimizer's groups, and what DeepSpeed calls the rest.

    `buffers` is None where it does not say.
    """

    trained: list[dict[str, Shape]]
    frozen: dict[str, Shape]
    buffers: frozenset[str] | None
    shared: dict[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of each name; a shared one has its partner's."""
        own = {name: shape for one in (*self.trained, self.frozen) for name, shape in one.items()}
        return own | {name: own[other] for name, other in self.shared.items() if other in own}


def _facts(rank: Rank) -> Facts:
    groups = rank.items.get("param_shapes")
    trained = [_shapes(one, f"{rank.name}: param_shapes") for one in sequence(groups) or ()]
    frozen = _shapes(rank.items.get("frozen_param_shapes"), f"{rank.name}: frozen_param_shapes")
    names = sequence(rank.items.get("buffer_names"))
    buffers = None if names is None else frozenset(one for one in names if type(one) is str)
    shared = named(rank.items.get("shared_params"))
    return Facts(trained, frozen, buffers, {one: two for one, two in shared.items() if type(two) is str})


class Shard(NamedTuple):
    """One rank's part of the optimizer: `vectors` by the name of the state and by group, `loose` what is no part.

    `lengths` are those of the float32 copies, `padded` with what the last ranks leave out; `slices` say for each group
    which name has how many elements from where on.
    """

    stage: int
    ranks: int
    uneven: bool
    vectors: dict[str, list[Tensor | None]]
    loose: dict[str, Tensor]
    lengths: list[int]
    padded: list[int]
    aligned: list[list[int]]
    slices: list[dict[str, tuple[int, int]]]


#: The name of the float32 copies among the states of an optimizer, as DeepSpeed's universal checkpoints have it.
MASTER = "fp32"


def _shard(rank: Rank) -> Shard:
    """Raises MalformedError for what is no part of a ZeRO optimizer."""
    held = named(rank.items.get("optimizer_state_dict"))
    stage, count = _integer(held.get("zero_stage")), held.get("partition_count")
    if stage not in (1, 2, 3):
        raise UnreadableError(f"{rank.name}: zero_stage is {_shown.value(stage)}, and 1 to 3 are known")
    counts = [one for one in sequence(count) or (count,) if type(one) is int]
    count = max(counts, default=0)
    if not 0 < count < 10**6:
        raise MalformedError(f"{rank.name}: partition_count is {count}, no number of ranks")
    last = stage == 3
    key = "fp32_flat_groups" if last else "single_partition_of_fp32_groups"
    masters = rank.flat(held.get(key), f"{rank.name}: {key}")
    lengths = [one.elements for one in masters]
    vectors, loose = _states(rank, held.get("optimizer_state_dict" if last else "base_optimizer_state"), lengths)
    paddings = [one if type(one) is int else 0 for one in sequence(held.get("group_paddings")) or ()]
    padded = [one + (paddings[n] if n < len(paddings) else 0) for n, one in enumerate(lengths)]
    aligned = [
        [one if type(one) is int else 0 for one in sequence(group) or ()]
        for group in sequence(held.get("param_alignment_paddings")) or ()
    ]
    slices = [_slices(one) for one in sequence(held.get("param_slice_mappings")) or ()]
    uneven = len(set(counts)) > 1
    return Shard(stage, count, uneven, {MASTER: [*masters], **vectors}, loose, lengths, padded, aligned, slices)


def _integer(node: Any) -> Any:
    """The number that an enumeration's member is pickled as."""
    return node.args[0] if type(node) is Obj and len(node.args) == 1 else node


def _slices(node: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for name, held in named(node).items():
        fields = named(held.state) if type(held) is Obj else {}
        start, count = fields.get("start"), fields.get("numel")
        if type(start) is int and type(count) is int:
            found[name] = (start, count)
    return found


def _states(rank: Rank, node: Any, lengths: list[int]) -> tuple[dict[str, list[Tensor | None]], dict[str, Tensor]]:
    """The optimizer's own states: vectors as long as their group's, and all other tensors by a name of their own."""
    vectors: dict[str, list[Tensor | None]] = {}
    loose: dict[str, Tensor] = {}
    for group, state in enumerate(_by_group(node)):
        for name, held in state.items():
            tensor = rank.decoder.tensor(held, f"{rank.name}: {name}")
            if tensor is None:
                continue
            dense = tensor.data is not None and not tensor.data.strides
            if group < len(lengths) and dense and tensor.shape == (max(tensor.elements, lengths[group], 2),):
                vectors.setdefault(name, [None] * len(lengths))[group] = tensor
            else:
                loose[f"state[{group}][{name!r}]"] = tensor
    return vectors, loose


def _by_group(node: Any) -> list[dict[str, Any]]:
    """A dict of states for each group; elastic checkpoints have the list itself."""
    items = mapping(node)
    if items is None:
        return [named(one) for one in sequence(node) or ()]
    state = mapping(items.get("state")) or {}
    groups = (named(one) for one in sequence(items.get("param_groups")) or ())
    ids = [one for group in groups for one in sequence(group.get("params")) or () if type(one) is int]
    return [named(state.get(one)) for one in ids]


# --- which parameter lies where --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements of one rank's vector: `elements` of them from `at` on."""

    rank: int
    group: int
    at: int
    elements: int


class Part(NamedTuple):
    """One parameter in the ranks' vectors: its elements in order, or why they cannot be had."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    wrong: str | None = None


class Layout:
    """The ranks' parts of one optimizer. `lost` says of a rank why it is not there."""

    def __init__(self, shards: dict[int, Shard], lost: dict[int, str]) -> None:
        first = next(iter(shards.values()))
        self.shards, self.lost = shards, lost
        self.stage, self.count = first.stage, first.ranks
        self.pieces = 0

    def parts(self, trained: list[dict[str, Shape]]) -> Iterator[Part]:
        """Every parameter that is trained."""
        wrong = self._disagreement(trained)
        laid = self._split(trained) if self.stage == 3 else self._joined(trained)
        for name, shape, places in laid if wrong is None else ():
            pieces, why = self._pieces(places)
            yield Part(name, shape, () if why else pieces, why)
        if wrong is not None:
            yield from (Part(name, shape, (), wrong) for group in trained for name, shape in group.items())

    def _pieces(self, places: Iterator[Piece]) -> tuple[tuple[Piece, ...], str | None]:
        found = []
        for piece in places:
            if piece.rank not in self.shards:
                beyond = f"reaches beyond the partitions of {self.count} ranks"
                return (), self.lost.get(piece.rank, beyond)
            held = self.shards[piece.rank].lengths[piece.group]
            if piece.at + piece.elements > held:
                return (), (
                    f"group {piece.group} of rank {piece.rank} holds {held} elements, "
                    f"and it takes those up to {piece.at + piece.elements}"
                )
            found.append(piece)
            self.pieces += 1
            if self.pieces > MAX_PIECES:
                return (), f"the parameters lie in more than {MAX_PIECES} pieces"
        return tuple(found), None

    def _disagreement(self, trained: list[dict[str, Shape]]) -> str | None:
        """Why nothing can be said of any parameter."""
        first, one = next(iter(self.shards.items()))
        for rank, shard in self.shards.items():
            for what, ours, theirs in (
                ("ZeRO stage", one.stage, shard.stage),
                ("number of partitions", one.ranks, shard.ranks),
                ("number of groups", len(one.lengths), len(shard.lengths)),
            ):
                if ours != theirs:
                    return f"ranks disagree on the {what}: {ours} in rank {first}, {theirs} in rank {rank}"
            if self.stage == 3 and one.lengths != shard.lengths:
                group = next(n for n, length in enumerate(one.lengths) if shard.lengths[n] != length)
                return (
                    f"ranks disagree on the length of group {group}: {one.lengths[group]} elements in rank {first}, "
                    f"{shard.lengths[group]} in rank {rank}"
                )
        if one.uneven:
            return "groups are parted among different numbers of ranks, as experts are, and are not put together"
        if self.stage != 3 and len(trained) != len(one.lengths):
            return f"param_shapes has {len(trained)} groups, the optimizer {len(one.lengths)}"
        return self._unaccounted(trained)

    def _unaccounted(self, trained: list[dict[str, Shape]]) -> str | None:
        """What zero_to_fp32.py checks: the parameters take all that the ranks hold, but for padding."""
        one = next(iter(self.shards.values()))
        if self.stage == 3:
            wanted = sum(-(-prod(shape) // self.count) for shapes in trained for shape in shapes.values())
            held = sum(one.lengths)
            return None if wanted == held else f"the parameters take {wanted} elements of each rank, it holds {held}"
        step = 2 * self.count
        for group, shapes in enumerate(trained) if not self.lost else ():
            padding = sum(one.aligned[group]) if group < len(one.aligned) else 0
            wanted = sum(map(prod, shapes.values())) + padding
            held = sum(shard.lengths[group] for shard in self.shards.values())
            if -(-wanted // step) != -(-held // step):
                return f"the parameters of group {group} take {wanted} elements, its partitions hold {held}"
        return None

    def _joined(self, trained: list[dict[str, Shape]]) -> Iterator[tuple[str, Shape, Iterator[Piece]]]:
        """Stages 1 and 2: one parameter behind another, cut at equal lengths; padding at the end of the last ranks."""
        for group, shapes in enumerate(trained):
            length = max(shard.padded[group] for shard in self.shards.values())
            paddings = next(iter(self.shards.values())).aligned
            behind = paddings[group] if group < len(paddings) else []
            at = 0
            for n, (name, shape) in enumerate(shapes.items()):
                yield name, shape, _cut(group, at, prod(shape), length)
                at += prod(shape) + (behind[n] if n < len(behind) else 0)

    def _split(self, trained: list[dict[str, Shape]]) -> Iterator[tuple[str, Shape, Iterator[Piece]]]:
        """Stage 3: each parameter in equal parts, the last of them padded; groups go on where another ends."""
        ends = list(accumulate(next(iter(self.shards.values())).lengths))
        at = 0
        for shapes in trained:
            for name, shape in shapes.items():
                each = -(-prod(shape) // self.count)
                yield name, shape, _dealt(ends, at, prod(shape), each)
                at += each


def _cut(group: int, at: int, elements: int, length: int) -> Iterator[Piece]:
    """Elements from `at` on of vectors of one length that lie one behind another."""
    while elements and length:
        rank, start = divmod(at, length)
        count = min(elements, length - start)
        yield Piece(rank, group, start, count)
        at, elements = at + count, elements - count
    if elements:
        yield Piece(0, group, 0, elements)


def _dealt(ends: list[int], at: int, elements: int, each: int) -> Iterator[Piece]:
    """`each` elements of every rank, from `at` on of its vectors, which end at `ends` laid one behind another."""
    rank = 0
    while elements:
        count = min(elements, each)
        yield from _within(ends, rank, at, count)
        rank, elements = rank + 1, elements - count


def _within(ends: list[int], rank: int, at: int, count: int) -> Iterator[Piece]:
    while count:
        group = min(bisect_right(ends, at), len(ends) - 1)
        start = ends[group - 1] if group else 0
        here = min(count, ends[group] - at) if at < ends[group] else count
        yield Piece(rank, group, at - start, here)
        at, count = at + here, count - here


# --- tensors ---------------------------------------------------------------------------------------------------------


class Owner(NamedTuple):
    """Whose files these are: the folder as the user named it, and what the sections' names begin with."""

    target: str
    prefix: str


def _assembled(folder: str, pieces: list[tuple[Tensor, int, int]], dtype: str, shape: Shape) -> TensorData:
    """One tensor of what lies in vectors: of each so many elements from some place on."""
    views = [
        TensorData(one.data.storage, dtype, (count,), one.data.offset + at)
        for one, at, count in pieces
        if one.data is not None
    ]
    if len(views) == 1:
        return replace(views[0], shape=shape)
    starts = accumulate((view.shape[0] for view in views), initial=0)
    boxes = tuple(Box((start,), view) for start, view in zip(starts, views, strict=False))
    item = nbytes(dtype, 1)
    where = ByteRange(folder, 0, prod(shape) * item, boxes=Boxes((prod(shape),), item, boxes))
    return TensorData(where, dtype, shape)


def _rows_of(name: str, layout: Layout, parts: list[Part], owner: Owner) -> Iterator[TensorInfo]:
    """One state of all parameters that have it: `fp32`, `exp_avg`."""
    for part in parts:
        vectors = [(layout.shards[one.rank].vectors.get(name, []), one) for one in part.pieces]
        held = [(vector[one.group], one) for vector, one in vectors if one.group < len(vector)]
        found = [(tensor, one.at, one.elements) for tensor, one in held if tensor is not None]
        if name == MASTER or found:
            row = _row(part, found, owner, f"optimizer.{name}")
            yield replace(row, kind=Kind.OPTIMIZER, evidence=Evidence.OPTIMIZER, belongs_to=part.name)


def _row(part: Part, found: list[tuple[Tensor, int, int]], owner: Owner, section: str) -> TensorInfo:
    """A tensor that is put together of what was `found` in the ranks' files."""
    wrong = part.wrong or _torn(part, found)
    dtype = found[0][0].dtype if found else "float32"
    devices = {tensor.device for tensor, _, _ in found}
    return TensorInfo(
        part.name,
        dtype,
        part.shape,
        prod(part.shape),
        nbytes(dtype, prod(part.shape)),
        f"{owner.prefix}{section}",
        device=devices.pop() if len(devices) == 1 else None,
        saved=True,
        note=f"cannot be read: {wrong}" if wrong else _partitions([one.rank for one in part.pieces]),
        data=None if wrong else _assembled(owner.target, found, dtype, part.shape),
        damage=f"{owner.target}: {part.name}: {wrong}" if wrong else None,
    )


def _torn(part: Part, found: list[tuple[Tensor, int, int]]) -> str | None:
    """Why the vectors that are there do not make one tensor."""
    if len(found) != len(part.pieces):
        return f"{len(found)} of its {len(part.pieces)} partitions are there"
    dtypes = sorted({tensor.dtype for tensor, _, _ in found})
    if len(dtypes) > 1:
        return f"its partitions are {' and '.join(dtypes)}"
    short = next((one for one in found if one[1] + one[2] > one[0].elements), None)
    return (
        f"a partition holds {short[0].elements} elements, it takes those up to {short[1] + short[2]}" if short else None
    )


def _partitions(ranks: list[int]) -> str | None:
    ranks = sorted(set(ranks))
    if len(ranks) < 2:
        return f"in the partition of rank {ranks[0]}" if ranks else None
    which = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 2 else f"{ranks[0]}, {ranks[1]}"
    return f"in {len(ranks)} partitions: ranks {which}"


class Model:
    """The module's section: what its file lists, by what DeepSpeed knows of each name, and empty tensors filled."""

    def __init__(self, rank: Rank, facts: Facts, owner: Owner) -> None:
        self.rank, self.facts, self.owner = rank, facts, owner
        self.trained = frozenset(name for group in facts.trained for name in group)
        self.shapes = facts.shapes

    def rows(self, masters: Mapping[str, TensorInfo], frozen: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
        """All tensors of the file; those of an empty one are the float32 copies or the frozen fragments."""
        for tensor in self.rank.state.tensors:
            section = f"{self.owner.prefix}{tensor.section}"
            if tensor.section == "frozen_param_fragments":
                continue
            tensor = replace(tensor, section=section, storage=self._storage(tensor))
            if tensor.section == f"{self.owner.prefix}module":
                tensor = self._grouped(self._filled(tensor, masters, frozen))
            yield tensor

    def _storage(self, tensor: TensorInfo) -> str | None:
        return None if tensor.storage is None else f"{self.rank.name}:{tensor.storage}"

    def _filled(
        self, tensor: TensorInfo, masters: Mapping[str, TensorInfo], frozen: Mapping[str, TensorInfo]
    ) -> TensorInfo:
        """The tensor with its real shape and values, where ZeRO 3 left it without any."""
        own = self.facts.shared.get(tensor.fqn, tensor.fqn)
        shape = self.shapes.get(own)
        if tensor.shape != (0,) or shape in (None, (0,)):
            return tensor
        source = masters.get(own) or frozen.get(own)
        if source is None:
            wrong = "its values are in the ranks' other files, and they are not here"
            damage = f"{self.owner.target}: {tensor.fqn}: {wrong}"
            return replace(tensor, shape=shape, data=None, note=f"cannot be read: {wrong}", damage=damage)
        differs = f"{source.note}; {tensor.dtype} in training" if tensor.dtype != source.dtype else source.note
        return replace(
            source,
            fqn=tensor.fqn,
            section=tensor.section,
            belongs_to=None,
            note=source.note if source.damage else differs,
            storage=f"{self.owner.prefix}{own}",
            damage=source.damage and source.damage.replace(f" {own}: ", f" {tensor.fqn}: ", 1),
        )

    def _grouped(self, tensor: TensorInfo) -> TensorInfo:
        own = self.facts.shared.get(tensor.fqn, tensor.fqn)
        buffers = self.facts.buffers
        if buffers is not None and tensor.fqn in buffers:
            return replace(tensor, kind=Kind.BUFFER, evidence=Evidence.REGISTERED, persistent=True)
        grad = True if own in self.trained else False if own in self.facts.frozen else None
        if grad is None and (buffers is None or tensor.fqn.endswith("_extra_state")):
            return tensor
        if own in self.trained and tensor.data is not None and tensor.data.storage.boxes is None:
            # ZeRO lays the parameters of a group in one storage; only those at the same place in it are tied.
            tensor = replace(tensor, storage=f"{tensor.storage}+{tensor.storage_offset}", storage_bytes=tensor.nbytes)
            tensor = replace(tensor, note=None if (tensor.note or "").startswith("view: ") else tensor.note)
        return replace(tensor, kind=Kind.PARAMETER, evidence=Evidence.REGISTERED, requires_grad=grad)


# --- the whole -------------------------------------------------------------------------------------------------------


class Optimizer:
    """The ranks' parts of the optimizer as far as they can be read."""

    def __init__(self, folder: str, files: dict[int, str]) -> None:
        self.ranks: dict[int, Rank] = {}
        self.shards: dict[int, Shard] = {}
        self.lost: dict[int, str] = {}
        for rank, name in sorted(files.items()):
            try:
                read = _read(folder, name)
                self.shards[rank] = _shard(read)
                self.ranks[rank] = read
            except UnreadableError as error:
                self.lost[rank] = f"rank {rank}: {error}"
        self.count = next((shard.ranks for shard in self.shards.values()), 0)
        self.missing = self._missing()

    def _missing(self) -> int:
        """How many ranks are not here; beyond the first that is missing nothing is put together."""
        here = {*self.shards, *self.lost}
        absent = (rank for rank in range(self.count) if rank not in here)
        for rank in islice(absent, len(here) + 1):
            self.lost[rank] = f"rank {rank} is missing: {len(here)} of {self.count} are here; copy its file"
        return max(self.count - sum(rank < self.count for rank in here), 0)

    def rows(self, facts: Facts, clashes: Mapping[str, str], owner: Owner) -> Iterator[TensorInfo]:
        """Each state of each parameter, and what is not parted."""
        if not self.shards:
            why = next(iter(self.lost.values()), None)
            named = ((name, shape) for group in facts.trained for name, shape in group.items()) if why else ()
            yield from (_row(Part(name, shape, (), why), [], owner, f"optimizer.{MASTER}") for name, shape in named)
            return
        layout = Layout(self.shards, self.lost)
        parts = [
            part._replace(pieces=(), wrong=clashes[part.name]) if part.name in clashes else part
            for part in layout.parts(facts.trained)
        ]
        names = dict.fromkeys(name for shard in self.shards.values() for name in shard.vectors)
        for name in names:
            yield from _rows_of(name, layout, parts, owner)
        yield from self._loose(owner)

    def _loose(self, owner: Owner) -> Iterator[TensorInfo]:
        """What each rank has by itself, an Adam's `step`: that of the first."""
        rank, shard = next(iter(self.shards.items()))
        for name, tensor in shard.loose.items():
            yield TensorInfo(
                name,
                tensor.dtype,
                tensor.shape,
                tensor.elements,
                tensor.nbytes,
                f"{owner.prefix}optimizer",
                Kind.OPTIMIZER,
                Evidence.OPTIMIZER,
                device=tensor.device,
                saved=True,
                note=f"of rank {rank}; each has its own" if self.count > 1 else tensor.note,
                layout=tensor.layout,
                data=tensor.data,
                parts=tensor.parts,
                storage=f"{self.ranks[rank].name}:{tensor.storage}",
                storage_bytes=tensor.storage_bytes,
            )


def read(path: str, read_file: Any) -> ModelState:  # noqa: ARG001
    """The module and the optimizer that the ranks' files hold together.

    Raises UnreadableError where no rank's model can be read; what is missing of the rest is `damage` of its tensors.
    """
    found, others = _files(path, _tag(path))
    states = []
    for mp, files in found.items():
        prefix = f"mp_rank_{mp:02d}." if len(found) > 1 else ""
        states.append(_of_rank(Owner(path, prefix), files))
    state = states[0] if len(states) == 1 else _beside(states)
    oddities = [*state.oddities, *_incomplete(state, len(found))]
    if others:
        what = f"files of experts and of pipeline stages are not put together; name one: {_shown.names(others)}"
        oddities.append(Oddity("not-read", what))
    return replace(state, oddities=tuple(oddities))


def _of_rank(owner: Owner, files: Files) -> ModelState:
    models, failed = _models(owner.target, files.model)
    optimizer = Optimizer(owner.target, files.optimizer)
    rank = next(iter(models.values()))
    facts = _facts(rank)
    model = Model(rank, facts, owner)
    states = list(optimizer.rows(facts, _clashes(models), owner))
    masters = {one.fqn: one for one in states if one.section == f"{owner.prefix}optimizer.{MASTER}"}
    frozen = {one.fqn: one for one in _frozen(models, failed, facts, optimizer.count, owner)}
    tensors = (*model.rows(masters, frozen), *states)
    stage = next((shard.stage for shard in optimizer.shards.values()), None)
    read = [*models.values(), *optimizer.ranks.values()]
    lead = next(iter(optimizer.ranks.values()), None)
    metadata = {**(lead.state.metadata if lead else {}), **rank.state.metadata}
    return ModelState(
        owner.target,
        f"{NAME} zero-{stage}" if stage else NAME,
        tensors,
        tuple(dict.fromkeys(tensor.section for tensor in tensors)),
        {f"{owner.prefix}{key}": value for key, value in metadata.items() if not key.startswith(_TOLD)},
        (*_noted(read), *_missed(owner, optimizer, models, failed), *_version(rank)),
        tuple(dict.fromkeys(one for each in read for one in each.state.globals)),
        (),
        tuple(replace(one, section=f"{owner.prefix}{one.section}") for one in rank.state.state_dicts),
    )


#: What is told of each tensor by itself.
_TOLD = (
    "param_shapes.",
    "frozen_param_shapes.",
    "buffer_names.",
    "shared_params.",
    "optimizer_state_dict.param_slice_mappings.",
    "optimizer_state_dict.param_alignment_paddings.",
)


def _models(folder: str, files: dict[int, str]) -> tuple[dict[int, Rank], dict[int, str]]:
    """Every rank's model that can be read, at least one."""
    if not files:
        raise MissingShard("no *_model_states.pt is here: what the optimizer's files hold has no names; copy it again")
    found: dict[int, Rank] = {}
    failed: dict[int, str] = {}
    for rank, name in sorted(files.items()):
        try:
            found[rank] = _read(folder, name)
        except UnreadableError as error:
            failed[rank] = f"rank {rank}: {error}"
            if len(failed) == len(files):
                raise
    return found, failed


def _clashes(models: dict[int, Rank]) -> dict[str, str]:
    """Names of which the ranks' files say different shapes."""
    first, *others = models.items()
    ours, found = _facts(first[1]).shapes, {}
    for rank, model in others:
        facts = _facts(model)
        for name, theirs in facts.shapes.items():
            if ours.get(name, theirs) != theirs:
                shapes = f"{_shown.shape(ours[name])} in rank {first[0]}, {_shown.shape(theirs)} in rank {rank}"
                found[name] = f"ranks disagree on its shape: {shapes}"
    return found


def _frozen(
    models: dict[int, Rank], failed: dict[int, str], facts: Facts, count: int, owner: Owner
) -> Iterator[TensorInfo]:
    """What is not trained and ZeRO 3 has parted: equal parts in the ranks' model files, the last of them padded."""
    count = count or max(models) + 1
    fragments = {rank: mapping(model.items.get("frozen_param_fragments")) or {} for rank, model in models.items()}
    clashes = _clashes(models)
    for name, shape in facts.frozen.items() if -1 not in models else ():
        each = max(-(-prod(shape) // count), 1)
        pieces, found, wrong = [], [], clashes.get(name)
        for rank, start in enumerate(range(0, prod(shape), each)):
            tensor = models[rank].decoder.tensor(fragments[rank].get(name), name) if rank in models else None
            if tensor is None or tensor.data is None or tensor.data.strides or len(tensor.shape or ()) != 1:
                wrong = wrong or failed.get(rank) or f"rank {rank} has no fragment of it"
                break
            pieces.append(Piece(rank, 0, 0, min(each, prod(shape) - start)))
            found.append((tensor, 0, pieces[-1].elements))
        yield _row(Part(name, shape, tuple(pieces), wrong), found, owner, "module")


def _noted(ranks: list[Rank]) -> list[Oddity]:
    """What was odd of the files, once where it is the same in several."""
    files: dict[Oddity, list[str]] = {}
    for rank in ranks:
        for odd in rank.state.oddities:
            files.setdefault(odd, []).append(rank.name)
    return [replace(odd, message=f"{_shown.names(names)}: {odd.message}") for odd, names in files.items()]


def _missed(owner: Owner, optimizer: Optimizer, models: dict[int, Rank], failed: dict[int, str]) -> Iterator[Oddity]:
    where = f" of {owner.prefix[:-1]}" if owner.prefix else ""
    if optimizer.missing:
        text = f"{optimizer.missing} of {optimizer.count} ranks' optimizer states{where} are missing"
        yield Oddity("missing-rank", f"{text}; copy *_optim_states.pt again")
    wanted = optimizer.count if -1 not in models else 1
    if wanted > len(models) + len(failed):
        text = f"{wanted - len(models) - len(failed)} of {wanted} ranks' models{where} are missing"
        yield Oddity("missing-rank", f"{text}; copy *_model_states.pt again")
    for why in (*failed.values(), *(why for rank, why in optimizer.lost.items() if rank not in optimizer.shards)):
        if "is missing" not in why:
            yield Oddity("unread-rank", why)
    extra = [rank.name for number, rank in optimizer.ranks.items() if number >= optimizer.count]
    if extra:
        text = f"the states are of {optimizer.count} ranks; of a save by more, and not read: {_shown.names(extra)}"
        yield Oddity("stale-rank", text)


def _version(rank: Rank) -> Iterator[Oddity]:
    version = rank.items.get("ds_version")
    match = _VERSION.match(version) if type(version) is str else None
    if version is not None and (match is None or (int(match[1]), int(match[2])) > KNOWN):
        known = ".".join(map(str, KNOWN))
        yield Oddity("deepspeed-version", f"ds_version is {_shown.value(version)}: statecli knows up to {known}")


def _beside(states: list[ModelState]) -> ModelState:
    """Model-parallel ranks: each has its own part of the tensors, which of them is not written anywhere."""
    return replace(
        states[0],
        tensors=tuple(tensor for state in states for tensor in state.tensors),
        sections=tuple(section for state in states for section in state.sections),
        metadata={key: value for state in states for key, value in state.metadata.items()},
        oddities=tuple(odd for state in states for odd in state.oddities),
        globals=tuple(dict.fromkeys(one for state in states for one in state.globals)),
        state_dicts=tuple(one for state in states for one in state.state_dicts),
    )


def _incomplete(state: ModelState, ranks: int) -> Iterator[Oddity]:
    claimed = next((value for key, value in state.metadata.items() if key.endswith("mp_world_size")), None)
    if type(claimed) is int and claimed > ranks:
        yield Oddity("missing-rank", f"mp_world_size is {claimed}, the files of {ranks} model-parallel ranks are here")
    elif ranks > 1:
        yield Oddity("model-parallel", f"each of {ranks} model-parallel ranks has its part of the tensors: not merged")
