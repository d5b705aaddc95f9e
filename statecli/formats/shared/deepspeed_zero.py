"""Partitions of a ZeRO optimizer: float32 copies and moments, which are joined again for each parameter.

Each rank has one flat vector for each state of each group of parameters. Stages 1 and 2 concatenate a group's
parameters and split the whole at equal lengths; stage 3 splits each parameter, padded to equal lengths. Source:
deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`) of deepspeed 0.19.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from math import prod
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import nbytes
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import Box, Boxes, ByteRange, Evidence, Kind, ModelState, TensorData, TensorInfo
from statecli.formats import torch_legacy, torch_zip
from statecli.formats.torch.arguments import MAX_DIMENSIONS, MAX_ELEMENTS
from statecli.formats.torch.objects import build_info, build_state
from statecli.formats.torch.reading import DecodedTensor
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import as_mapping, as_sequence, get_text_items
from statecli.pickles.nodes import Obj
from statecli.storage import files
from statecli.storage.byte_source import ByteSource

#: Maximum number of pieces of all parameters; a 70B model on 512 ranks has 400,000.
MAX_PIECES = 3_000_000
#: Exclusive maximum of the number of ranks that a file may record.
MAX_RANKS = 1_000_000
#: Name of the float32 copies among the optimizer's states, as in DeepSpeed's universal checkpoints.
MASTER = "fp32"

Shape = tuple[int, ...]


class VectorView(NamedTuple):
    """Range of elements in a rank's vector, beginning at element `start`."""

    vector: Tensor
    start: int
    elements: int


class Owner(msgspec.Struct, frozen=True):
    """Checkpoint to which tensors belong: its path as typed by the user, and the prefix of its section names."""

    target: str
    prefix: str


class Rank(msgspec.Struct, frozen=True):
    """Parsed file of one rank: file name, root dict of the pickle, decoder of the tensors, and the whole state."""

    name: str
    items: Mapping[Any, Any]
    decoder: TensorDecoder
    state: ModelState

    def read_vectors(self, node: object, label: str) -> list[Tensor]:
        """Return the one-dimensional tensors in a list. Raises MalformedError if the list has any other item."""
        tensors = [self.decoder.tensor(element, label) for element in as_sequence(node) or ()]
        flat_tensors = [tensor for tensor in tensors if tensor is not None and len(tensor.shape or ()) == 1]
        vectors = [tensor for tensor in flat_tensors if tensor.data is not None and not tensor.data.strides]
        if len(vectors) != len(tensors):
            raise MalformedError(f"{label} contains an entry that is not a one-dimensional tensor")
        return vectors


def read_rank(folder: str, name: str, imported: set[str]) -> Rank:
    """Read the file of one rank. The message of an UnreadableError begins with the file's name.

    `state` is whole for the first file, and for a file that imports a name not yet in `imported`. For other files it
    has only the imports and the oddities of the archive, because the states of ranks are large and similar.
    """
    path = files.join(folder, name)
    try:
        with ByteSource(path) as source:
            format = torch_legacy if torch_legacy.sniff(path, source.head) else torch_zip
        pickle, storages, oddities = format.read_contents(path)
        items = as_mapping(pickle.root)
        if items is None:
            raise MalformedError("does not contain a dict, so DeepSpeed did not write this file")
        imports = tuple((mention.qualified, mention.position) for mention in pickle.globals)
        names = {qualified for qualified, _ in imports}
        state = ModelState(path, format.NAME, (), oddities=tuple(oddities), globals=imports, traits=format.TRAITS)
        if not imported or names - imported:
            state = build_state(
                pickle, storages, target=path, format=format.NAME, traits=format.TRAITS, oddities=oddities
            )
            imported |= names
    except UnreadableError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    return Rank(name, items, TensorDecoder(storages, persistent=pickle.persistent), state)


def read_shapes(node: object, label: str) -> dict[str, Shape]:
    """Read a dict of names and shapes. Raises MalformedError for other content. `label` names the dict in messages."""
    shapes = {}
    for name, size in (as_mapping(node) or {}).items():
        dims = as_sequence(size)
        if type(name) is not str or dims is None or len(dims) > MAX_DIMENSIONS or not all(map(_is_size, dims)):
            raise MalformedError(f"{label} is not a dict with one shape for each parameter name")
        shape = tuple(dims)
        if prod(shape) > MAX_ELEMENTS:
            raise MalformedError(
                f"{quoting.name(name)}: {label} records shape {quoting.shape(shape)}, which is "
                "impossible: 2^63 elements or more"
            )
        shapes[name] = shape
    return shapes


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


class OptimizerShard(msgspec.Struct, frozen=True):
    """Optimizer state of one rank: `vectors` by state and parameter group, and `unpartitioned` tensors by name.

    `lengths` are the lengths of the float32 copies; `padded` adds the padding that the last ranks omit.
    """

    stage: int
    ranks: int
    uneven: bool
    vectors: dict[str, list[Tensor | None]]
    unpartitioned: dict[str, Tensor]
    lengths: list[int]
    padded: list[int]
    aligned: list[list[int]]


def _read_shard(rank: Rank) -> OptimizerShard:
    """Read one rank's part of a ZeRO optimizer. Raises UnreadableError for an unknown stage or partition count."""
    optimizer_state = get_text_items(rank.items.get("optimizer_state_dict"))
    stage, count = _read_integer(optimizer_state.get("zero_stage")), optimizer_state.get("partition_count")
    if stage not in (1, 2, 3):
        raise UnreadableError(f"{rank.name}: zero_stage is {quoting.value(stage)}, but statecli knows only 1 to 3")
    counts = [number for number in as_sequence(count) or (count,) if type(number) is int]
    count = max(counts, default=0)
    if not 0 < count < MAX_RANKS:
        raise MalformedError(
            f"{rank.name}: partition_count is {count}; expected the number of ranks, 1 to {MAX_RANKS - 1}"
        )
    is_stage_3 = stage == 3
    key = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
    masters = rank.read_vectors(optimizer_state.get(key), f"{rank.name}: {key}")
    lengths = [master.elements for master in masters]
    vectors, unpartitioned = _read_states(
        rank, optimizer_state.get("optimizer_state_dict" if is_stage_3 else "base_optimizer_state"), lengths
    )
    paddings = _read_paddings(optimizer_state.get("group_paddings"))
    padded = [length + (paddings[n] if n < len(paddings) else 0) for n, length in enumerate(lengths)]
    aligned = [_read_paddings(group) for group in as_sequence(optimizer_state.get("param_alignment_paddings")) or ()]
    uneven = len(set(counts)) > 1
    return OptimizerShard(
        stage, count, uneven, {MASTER: [*masters], **vectors}, unpartitioned, lengths, padded, aligned
    )


def _read_integer(node: object) -> Any:
    """Return the number of a pickled ZeroStageEnum member. Python 3.11.0 to 3.11.2 pickle the member's name instead."""
    args = node.args if type(node) is Obj else ()
    if len(args) == 2 and type(args[1]) is str:
        return _STAGES.index(args[1]) if args[1] in _STAGES else None
    return args[0] if len(args) == 1 else node


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _read_paddings(node: object) -> list[int]:
    return [number if type(number) is int and number >= 0 else 0 for number in as_sequence(node) or ()]


def _read_states(
    rank: Rank, node: object, lengths: list[int]
) -> tuple[dict[str, list[Tensor | None]], dict[str, Tensor]]:
    """Read the states of an optimizer: vectors with one element per element of a parameter group, and others."""
    vectors: dict[str, list[Tensor | None]] = {}
    unpartitioned: dict[str, Tensor] = {}
    for group, state in enumerate(_group_states(node)):
        for name, value in state.items():
            tensor = rank.decoder.tensor(value, f"{rank.name}: {name}")
            if tensor is None:
                continue
            is_dense = tensor.data is not None and not tensor.data.strides
            if group < len(lengths) and is_dense and tensor.shape == (max(tensor.elements, lengths[group], 2),):
                vectors.setdefault(name, [None] * len(lengths))[group] = tensor
            else:
                unpartitioned[f"state[{group}][{name!r}]"] = tensor
    return vectors, unpartitioned


def _group_states(node: object) -> list[dict[str, Any]]:
    """Return a dict of states for each parameter group. Elastic checkpoints store a list of such dicts."""
    items = as_mapping(node)
    if items is None:
        return [get_text_items(child) for child in as_sequence(node) or ()]
    state = as_mapping(items.get("state")) or {}
    groups = (get_text_items(child) for child in as_sequence(items.get("param_groups")) or ())
    ids = [number for group in groups for number in as_sequence(group.get("params")) or () if type(number) is int]
    return [get_text_items(state.get(key)) for key in ids]


class VectorPiece(msgspec.Struct, frozen=True):
    """Part of a parameter in one rank's vector: `elements` elements, beginning at element `at`."""

    rank: int
    group: int
    at: int
    elements: int


class ParameterPart(NamedTuple):
    """A parameter and its pieces in the ranks' vectors, in order. If they cannot be joined, `fault` has the reason."""

    name: str
    shape: Shape
    pieces: tuple[VectorPiece, ...]
    fault: str | None = None


def _split_at_ranks(group: int, at: int, elements: int, length: int) -> Iterator[VectorPiece]:
    """Split a range of elements across the ranks' vectors, which have equal length and are concatenated."""
    while elements and length:
        rank, start = divmod(at, length)
        count = min(elements, length - start)
        yield VectorPiece(rank, group, start, count)
        at, elements = at + count, elements - count
    if elements:
        yield VectorPiece(0, group, 0, elements)


def _split_evenly(ends: list[int], at: int, elements: int, elements_per_rank: int) -> Iterator[VectorPiece]:
    """Split a parameter evenly: take `elements_per_rank` elements of each rank's vectors.

    In each rank, the elements start at element `at` of the concatenated groups, which end at `ends`.
    """
    rank = 0
    while elements:
        count = min(elements, elements_per_rank)
        yield from _split_at_groups(ends, rank, at, count)
        rank, elements = rank + 1, elements - count


def _split_at_groups(ends: list[int], rank: int, at: int, count: int) -> Iterator[VectorPiece]:
    while count:
        group = min(bisect_right(ends, at), len(ends) - 1)
        start = ends[group - 1] if group else 0
        length = min(count, ends[group] - at) if at < ends[group] else count
        yield VectorPiece(rank, group, at - start, length)
        at, count = at + length, count - length


def _join_views(folder: str, pieces: list[VectorView], dtype: str, shape: Shape) -> TensorData:
    views = [
        TensorData(tensor.data.storage, dtype, (count,), tensor.data.offset + at)
        for tensor, at, count in pieces
        if tensor.data is not None
    ]
    if len(views) == 1:
        return replace(views[0], shape=shape)
    starts = accumulate((view.shape[0] for view in views), initial=0)
    boxes = tuple(Box((start,), view) for start, view in zip(starts, views, strict=False))
    item = nbytes(dtype, 1)
    storage = ByteRange(folder, 0, prod(shape) * item, boxes=Boxes((prod(shape),), item, boxes))
    return TensorData(storage, dtype, shape)


def build_row(part: ParameterPart, views: list[VectorView], owner: Owner, section: str) -> TensorInfo:
    """Build the tensor row of a parameter whose values are `views` of the ranks' vectors."""
    fault = part.fault or _find_fault(part, views)
    dtype = views[0].vector.dtype if views else "float32"
    devices = {view.vector.device for view in views}
    return TensorInfo(
        part.name,
        dtype,
        part.shape,
        prod(part.shape),
        nbytes(dtype, prod(part.shape)),
        f"{owner.prefix}{section}",
        device=devices.pop() if len(devices) == 1 else None,
        saved=True,
        note=f"cannot be read: {fault}" if fault else _describe_partitions([piece.rank for piece in part.pieces]),
        data=None if fault else _join_views(owner.target, views, dtype, part.shape),
        damage=f"{owner.target}: {part.name}: {fault}" if fault else None,
    )


def _find_fault(part: ParameterPart, views: list[VectorView]) -> str | None:
    """Return the reason why the ranks' vectors cannot be joined to one tensor, or None if they can."""
    if len(views) != len(part.pieces):
        return f"only {len(views)} of its {len(part.pieces)} partitions exist"
    dtypes = sorted({view.vector.dtype for view in views})
    if len(dtypes) > 1:
        return f"its partitions have different dtypes: {' and '.join(dtypes)}"
    for view in views:
        end = view.start + view.elements
        if end > view.vector.elements:
            return f"a partition has only {view.vector.elements} elements, but the parameter ends at element {end}"
    return None


def _describe_partitions(ranks: list[int]) -> str | None:
    ranks = sorted(set(ranks))
    if len(ranks) < 2:
        return f"in the partition of rank {ranks[0]}" if ranks else None
    which = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 2 else f"{ranks[0]}, {ranks[1]}"
    return f"in {len(ranks)} partitions: ranks {which}"


class Optimizer:
    """Optimizer that is joined from the readable files of the ranks.

    `unreadable` and `missing_reasons` have a reason for each rank.
    """

    def __init__(self, folder: str, files: dict[int, str]) -> None:
        self.ranks: dict[int, Rank] = {}
        self.shards: dict[int, OptimizerShard] = {}
        self.unreadable: dict[int, str] = {}
        self.missing_reasons: dict[int, str] = {}
        imported: set[str] = set()
        for rank, name in sorted(files.items()):
            try:
                loaded_rank = read_rank(folder, name, imported)
                self.shards[rank] = _read_shard(loaded_rank)
                self.ranks[rank] = loaded_rank
            except UnreadableError as error:
                self.unreadable[rank] = f"rank {rank}: {error}"
        self.count = next((shard.ranks for shard in self.shards.values()), 0)
        #: Names of stale files from an earlier save with more ranks.
        self.stale_files = [self.ranks.pop(rank).name for rank in list(self.shards) if rank >= self.count]
        self.shards = {rank: shard for rank, shard in self.shards.items() if rank < self.count}
        self.stage = next((shard.stage for shard in self.shards.values()), None)
        self.missing_count = self._count_missing()
        #: A reason for each missing or unreadable rank.
        self.reasons = self.unreadable | self.missing_reasons
        self.pieces = 0

    def _count_missing(self) -> int:
        """Count the missing ranks. Store a reason only for the first few, because a file may claim a million ranks."""
        existing_ranks = {*self.shards, *self.unreadable}
        missing_ranks = (rank for rank in range(self.count) if rank not in existing_ranks)
        for rank in islice(missing_ranks, len(existing_ranks) + 1):
            counts = f"the folder has files of {len(existing_ranks)} of {self.count} ranks"
            self.missing_reasons[rank] = f"rank {rank} is missing: {counts}; copy the file of this rank"
        return max(self.count - sum(rank < self.count for rank in existing_ranks), 0)

    def build_rows(
        self, trained: list[dict[str, Shape]], clashes: Mapping[str, str], owner: Owner
    ) -> Iterator[TensorInfo]:
        """Yield the tensor rows of each state for all `trained` parameters, then the rows of the unpartitioned states.

        `clashes` has a reason for each name that cannot be joined.
        """
        if not self.shards:
            why = next(iter(self.unreadable.values()), None)
            parameters = ((name, shape) for group in trained for name, shape in group.items()) if why else ()
            yield from (
                build_row(ParameterPart(name, shape, (), why), [], owner, f"optimizer.{MASTER}")
                for name, shape in parameters
            )
            return
        parts = [
            part._replace(pieces=(), fault=clashes[part.name]) if part.name in clashes else part
            for part in self._iter_parts(trained)
        ]
        names = dict.fromkeys(name for shard in self.shards.values() for name in shard.vectors)
        for name in names:
            yield from self._build_state_rows(name, parts, owner)
        yield from self._build_unpartitioned_rows(owner)

    def _build_state_rows(self, name: str, parts: list[ParameterPart], owner: Owner) -> Iterator[TensorInfo]:
        """Build a tensor row of the state `name` (`fp32`, `exp_avg`) for each parameter that has this state."""
        for part in parts:
            views = []
            for piece in part.pieces:
                vectors = self.shards[piece.rank].vectors.get(name, [])
                vector = vectors[piece.group] if piece.group < len(vectors) else None
                views += [] if vector is None else [VectorView(vector, piece.at, piece.elements)]
            if name == MASTER or views:
                row = build_row(part, views, owner, f"optimizer.{name}")
                yield replace(row, kind=Kind.OPTIMIZER, evidence=Evidence.OPTIMIZER, belongs_to=part.name)

    def _build_unpartitioned_rows(self, owner: Owner) -> Iterator[TensorInfo]:
        """Yield the unpartitioned state of the first rank, for example Adam's `step`."""
        rank, shard = next(iter(self.shards.items()))
        note = f"value of rank {rank}; other ranks may have other values" if self.count > 1 else None
        for name, tensor in shard.unpartitioned.items():
            row = DecodedTensor(name, tensor, Kind.OPTIMIZER, Evidence.OPTIMIZER, saved=True, note=note)
            info = build_info(row, f"{owner.prefix}optimizer", self.ranks[rank].name)
            yield replace(info, storage=f"{self.ranks[rank].name}:{tensor.storage}")

    def _iter_parts(self, trained: list[dict[str, Shape]]) -> Iterator[ParameterPart]:
        """Yield every trained parameter with its pieces, or with the reason why it cannot be joined."""
        fault = self._find_disagreement(trained)
        placements = self._split_parameters(trained) if self.stage == 3 else self._walk_groups(trained)
        for name, shape, places in placements if fault is None else ():
            pieces, why = self._collect_pieces(places)
            yield ParameterPart(name, shape, () if why else pieces, why)
        if fault is not None:
            yield from (ParameterPart(name, shape, (), fault) for group in trained for name, shape in group.items())

    def _collect_pieces(self, places: Iterator[VectorPiece]) -> tuple[tuple[VectorPiece, ...], str | None]:
        pieces = []
        for piece in places:
            if piece.rank not in self.shards:
                beyond = f"the parameter extends beyond the partitions of {self.count} ranks"
                return (), self.reasons.get(piece.rank, beyond)
            available = self.shards[piece.rank].lengths[piece.group]
            if piece.at + piece.elements > available:
                return (), (
                    f"group {piece.group} of rank {piece.rank} has only {available} elements, but the parameter ends "
                    f"at element {piece.at + piece.elements}"
                )
            pieces.append(piece)
            self.pieces += 1
            if self.pieces > MAX_PIECES:
                return (), f"the parameters are split into more than {MAX_PIECES} pieces, the limit of statecli"
        return tuple(pieces), None

    def _find_disagreement(self, trained: list[dict[str, Shape]]) -> str | None:
        """Return the reason why no parameter can be joined, or None if the ranks agree."""
        first, reference = next(iter(self.shards.items()))
        for rank, shard in self.shards.items():
            for quantity, expected, actual in (
                ("ZeRO stage", reference.stage, shard.stage),
                ("number of partitions", reference.ranks, shard.ranks),
                ("number of groups", len(reference.lengths), len(shard.lengths)),
            ):
                if expected != actual:
                    return f"the {quantity} differs between ranks: {expected} in rank {first}, {actual} in rank {rank}"
            if self.stage == 3 and reference.lengths != shard.lengths:
                group = next(n for n, length in enumerate(reference.lengths) if shard.lengths[n] != length)
                lengths = f"{reference.lengths[group]} elements in rank {first}, {shard.lengths[group]} in rank {rank}"
                return f"the length of group {group} differs between ranks: {lengths}"
        if reference.uneven:
            return (
                "parameter groups are split over different numbers of ranks (as for experts); statecli does not "
                "merge such groups"
            )
        if self.stage != 3 and len(trained) != len(reference.lengths):
            return f"param_shapes has {len(trained)} parameter groups, but the optimizer has {len(reference.lengths)}"
        return self._find_size_fault(trained)

    def _find_size_fault(self, trained: list[dict[str, Shape]]) -> str | None:
        """Return a message if the parameters do not fill the ranks' vectors. Allow padding as zero_to_fp32.py does."""
        reference = next(iter(self.shards.values()))
        if self.stage == 3:
            needed_elements = sum(-(-prod(shape) // self.count) for shapes in trained for shape in shapes.values())
            available_elements = sum(reference.lengths)
            why = f"the parameters need {needed_elements} elements in each rank, but each rank has {available_elements}"
            return None if needed_elements == available_elements else why
        step = 2 * self.count
        for group, shapes in enumerate(trained) if not self.reasons else ():
            padding = sum(reference.aligned[group]) if group < len(reference.aligned) else 0
            needed_elements = sum(map(prod, shapes.values())) + padding
            available_elements = sum(shard.lengths[group] for shard in self.shards.values())
            if -(-needed_elements // step) != -(-available_elements // step):
                return (
                    f"the parameters of group {group} need {needed_elements} elements, but its partitions have "
                    f"{available_elements}"
                )
        return None

    def _walk_groups(self, trained: list[dict[str, Shape]]) -> Iterator[tuple[str, Shape, Iterator[VectorPiece]]]:
        """Yield the pieces of ZeRO stages 1 and 2: a group's parameters are concatenated, split evenly and padded."""
        for group, shapes in enumerate(trained):
            length = max(shard.padded[group] for shard in self.shards.values())
            paddings_by_group = next(iter(self.shards.values())).aligned
            group_paddings = paddings_by_group[group] if group < len(paddings_by_group) else []
            at = 0
            for n, (name, shape) in enumerate(shapes.items()):
                yield name, shape, _split_at_ranks(group, at, prod(shape), length)
                at += prod(shape) + (group_paddings[n] if n < len(group_paddings) else 0)

    def _split_parameters(self, trained: list[dict[str, Shape]]) -> Iterator[tuple[str, Shape, Iterator[VectorPiece]]]:
        """Yield the pieces of ZeRO stage 3: each parameter is split evenly, and its last part is padded."""
        ends = list(accumulate(next(iter(self.shards.values())).lengths))
        at = 0
        for shapes in trained:
            for name, shape in shapes.items():
                elements_per_rank = -(-prod(shape) // self.count)
                yield name, shape, _split_evenly(ends, at, prod(shape), elements_per_rank)
                at += elements_per_rank
