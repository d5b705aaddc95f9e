"""What ZeRO parts among ranks: an optimizer's float32 copies and moments, put together again parameter by parameter.

Each rank has, for each group of parameters, one flat vector of each state. Stages 1 and 2 lay a group's parameters one
behind another and cut the whole at equal lengths; stage 3 cuts each parameter by itself, and pads it to equal lengths.
Source: deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`) of deepspeed 0.19.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import nbytes
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import Box, Boxes, ByteRange, Evidence, Kind, ModelState, Oddity, TensorData, TensorInfo
from statecli.formats import torch_legacy, torch_zip
from statecli.formats.torch.objects import state_of
from statecli.formats.torch.tensors import MAX_DIMENSIONS, MAX_ELEMENTS, Decoder, Tensor
from statecli.pickles.graph import mapping, named, sequence
from statecli.pickles.machine import Obj
from statecli.storage import files
from statecli.storage.source import Source

#: Pieces that all parameters together may lie in; a 70B model on 512 ranks has 400,000.
MAX_PIECES = 3_000_000
#: Ranks that a file may say there are.
MAX_RANKS = 1_000_000
#: The name of the float32 copies among the states of an optimizer, as DeepSpeed's universal checkpoints have it.
MASTER = "fp32"

Shape = tuple[int, ...]
#: A rank's vector, and how many elements of it from where on.
View = tuple[Tensor, int, int]


class Owner(NamedTuple):
    """Whose files these are: the folder as the user named it, and what the sections' names begin with."""

    target: str
    prefix: str


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


def rank_of(folder: str, name: str, known: set[str]) -> Rank:
    """One file. Raises UnreadableError with its name.

    The state of the first one is whole, and that of others which import a name that is not `known` yet. Of the rest, as
    large and as alike as ranks are, it has no more than what was odd of their archives.
    """
    path = files.join(folder, name)
    try:
        with Source(path) as source:
            format = torch_legacy if torch_legacy.sniff(path, source.head) else torch_zip
        pickle, storages, oddities = format.contents(path)
        items = mapping(pickle.root)
        if items is None:
            raise MalformedError("holds no dict, as DeepSpeed saves one")
        found = tuple((one.qualified, one.position) for one in pickle.globals)
        names = {qualified for qualified, _ in found}
        state = ModelState(path, format.NAME, (), oddities=tuple(oddities), globals=found)
        if not known or names - known:
            state = state_of(pickle, storages, target=path, format=format.NAME, oddities=oddities)
            known |= names
    except UnreadableError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    return Rank(name, items, Decoder(storages), state)


def shapes_of(node: Any, what: str) -> dict[str, Shape]:
    """A dict of names and shapes. Raises MalformedError for anything else; `what` is what the message calls it."""
    found = {}
    for name, held in (mapping(node) or {}).items():
        dims = sequence(held)
        if type(name) is not str or dims is None or len(dims) > MAX_DIMENSIONS or not all(map(_is_size, dims)):
            raise MalformedError(f"{what} holds something else than a shape for each name")
        shape = tuple(dims)
        if prod(shape) > MAX_ELEMENTS:
            raise MalformedError(f"{quoting.name(name)}: {what} says {quoting.shape(shape)}, which is impossible")
        found[name] = shape
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


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


def _shard(rank: Rank) -> Shard:
    """Raises MalformedError for what is no part of a ZeRO optimizer."""
    held = named(rank.items.get("optimizer_state_dict"))
    stage, count = _integer(held.get("zero_stage")), held.get("partition_count")
    if stage not in (1, 2, 3):
        raise UnreadableError(f"{rank.name}: zero_stage is {quoting.value(stage)}, and 1 to 3 are known")
    counts = [one for one in sequence(count) or (count,) if type(one) is int]
    count = max(counts, default=0)
    if not 0 < count < MAX_RANKS:
        raise MalformedError(f"{rank.name}: partition_count is {count}, no number of ranks")
    last = stage == 3
    key = "fp32_flat_groups" if last else "single_partition_of_fp32_groups"
    masters = rank.flat(held.get(key), f"{rank.name}: {key}")
    lengths = [one.elements for one in masters]
    vectors, loose = _states(rank, held.get("optimizer_state_dict" if last else "base_optimizer_state"), lengths)
    paddings = _paddings(held.get("group_paddings"))
    padded = [one + (paddings[n] if n < len(paddings) else 0) for n, one in enumerate(lengths)]
    aligned = [_paddings(group) for group in sequence(held.get("param_alignment_paddings")) or ()]
    slices = [_slices(one) for one in sequence(held.get("param_slice_mappings")) or ()]
    uneven = len(set(counts)) > 1
    return Shard(stage, count, uneven, {MASTER: [*masters], **vectors}, loose, lengths, padded, aligned, slices)


def _integer(node: Any) -> Any:
    """The number that a member of ZeroStageEnum is pickled as; Python 3.11.0 to 3.11.2 do it by its name."""
    args = node.args if type(node) is Obj else ()
    if len(args) == 2 and type(args[1]) is str:
        return _STAGES.index(args[1]) if args[1] in _STAGES else None
    return args[0] if len(args) == 1 else node


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _paddings(node: Any) -> list[int]:
    return [one if type(one) is int and one >= 0 else 0 for one in sequence(node) or ()]


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


def _assembled(folder: str, pieces: list[View], dtype: str, shape: Shape) -> TensorData:
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
            row = joined(part, found, owner, f"optimizer.{name}")
            yield replace(row, kind=Kind.OPTIMIZER, evidence=Evidence.OPTIMIZER, belongs_to=part.name)


def joined(part: Part, found: list[View], owner: Owner, section: str) -> TensorInfo:
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


def _torn(part: Part, found: list[View]) -> str | None:
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


class Optimizer:
    """The ranks' parts of the optimizer as far as they can be read.

    `lost` says of a rank why it cannot; `odd` is what was odd of how they fit together, known once `rows` are made.
    """

    def __init__(self, folder: str, files: dict[int, str]) -> None:
        self.ranks: dict[int, Rank] = {}
        self.shards: dict[int, Shard] = {}
        self.lost: dict[int, str] = {}
        self.odd: list[Oddity] = []
        known: set[str] = set()
        for rank, name in sorted(files.items()):
            try:
                read = rank_of(folder, name, known)
                self.shards[rank] = _shard(read)
                self.ranks[rank] = read
            except UnreadableError as error:
                self.lost[rank] = f"rank {rank}: {error}"
        self.count = next((shard.ranks for shard in self.shards.values()), 0)
        #: What a save by more ranks has left behind.
        self.stale = [self.ranks.pop(rank).name for rank in list(self.shards) if rank >= self.count]
        self.shards = {rank: shard for rank, shard in self.shards.items() if rank < self.count}
        self.missing = self._missing()

    def _missing(self) -> int:
        """How many ranks are not here; beyond the first that is missing nothing is put together."""
        here = {*self.shards, *self.lost}
        absent = (rank for rank in range(self.count) if rank not in here)
        for rank in islice(absent, len(here) + 1):
            self.lost[rank] = f"rank {rank} is missing: {len(here)} of {self.count} are here; copy its file"
        return max(self.count - sum(rank < self.count for rank in here), 0)

    def rows(self, trained: list[dict[str, Shape]], clashes: Mapping[str, str], owner: Owner) -> Iterator[TensorInfo]:
        """Each state of each parameter that is `trained`, by group, and what is not parted.

        `clashes` says of a name why it cannot be put together.
        """
        if not self.shards:
            why = next(iter(self.lost.values()), None)
            named = ((name, shape) for group in trained for name, shape in group.items()) if why else ()
            yield from (joined(Part(name, shape, (), why), [], owner, f"optimizer.{MASTER}") for name, shape in named)
            return
        layout = Layout(self.shards, self.lost)
        parts = [
            part._replace(pieces=(), wrong=clashes[part.name]) if part.name in clashes else part
            for part in layout.parts(trained)
        ]
        self.odd.extend(islice(self._misplaced(parts), 1))
        names = dict.fromkeys(name for shard in self.shards.values() for name in shard.vectors)
        for name in names:
            yield from _rows_of(name, layout, parts, owner)
        yield from self._loose(owner)

    def _misplaced(self, parts: list[Part]) -> Iterator[Oddity]:
        """Where a rank says itself which part of a parameter it holds, and the order of `param_shapes` says another."""
        for part in parts:
            for piece in part.pieces:
                slices = self.shards[piece.rank].slices
                own = slices[piece.group].get(part.name) if piece.group < len(slices) else None
                if own is not None and own != (piece.at, piece.elements):
                    said = f"rank {piece.rank} says that it has elements {own[0]} to {own[0] + own[1]}"
                    found = f"param_shapes says {piece.at} to {piece.at + piece.elements}"
                    yield Oddity("misplaced-partition", f"{quoting.name(part.name)}: {said}, {found}", part.name)

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
