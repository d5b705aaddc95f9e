"""Pairs of tensors -> how their values differ: a plan of independent tasks, whose small results are added up.

    pair ──▶ tasks (path, ranges, dtype, a few million elements each) ──▶ tallies ──▶ Delta

Where both tensors lie in one piece, their bytes are read into two small buffers and compared as 64-bit words; only
blocks that differ are decoded, and of tensors that differ the norms of all other blocks too. Everything else (strides,
quantization, byte order) goes through `read.values`, a tensor a task. Blocks and tasks are cut at fixed places and
added up in order, so that the result is the same, bit for bit, whoever computes it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter

import msgspec
import numpy as np

from statecli.core.errors import StateError, UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.state import ByteRange, TensorData, TensorInfo
from statecli.storage import files
from statecli.storage.file_version import CHANGED, FileVersion, find_changed, read_versions
from statecli.values import kernels, pool, sparse
from statecli.values.compare_task import TASK, Found, Piece, Task, run_batch
from statecli.values.delta import Delta, How
from statecli.values.elements import element
from statecli.values.ggml_blocks import as_stored, quantized, readable, why_no_numbers
from statecli.values.ranges import (
    check_crc,
    contiguous_strides,
    in_file_order,
    is_run,
    located,
    looking_up,
    reading,
    resolved,
    width,
)
from statecli.values.read import no_numbers, opened, overlap, packed, stored
from statecli.values.small_pairs import compare_small_pairs
from statecli.values.tally import Tally

#: Pairs of which the archives that hold them, where each is an archive of its own, are looked into together.
PLANNED = 512


class Pair(msgspec.Struct, frozen=True, gc=False):
    """Two tensors of equal shape whose values are to be compared."""

    before: TensorInfo
    after: TensorInfo


class NotCompared(msgspec.Struct, frozen=True, gc=False):
    """Why the values of a pair cannot be compared: neither equal nor different. `reshaped`: their shapes differ."""

    reason: str
    reshaped: bool = False


Outcome = Delta | NotCompared | StateError
#: Called with a name and the bytes of one side that were compared.
Progress = Callable[[str, int], None]


# --- all of it ---------------------------------------------------------------------------------------------------


@with_denormals
def compare_all(
    pairs: Sequence[Pair],
    how: How,
    *,
    jobs: int = 0,
    progress: Progress | None = None,
    seen: Mapping[str, FileVersion | None] | None = None,
    derived: bool = False,
) -> list[Outcome]:
    """The outcome of each pair, in order. What goes wrong with one file is the outcome of its pairs alone.

    `seen`: the stamps of files when their headers were read; a file that has another by the end fails its pairs.
    Checksums that a container recorded are verified for what differs, so that damage is not taken for training.
    `progress` is called with bytes of `before`. `jobs` 0: the cores. `derived`: as in `pool.run`, of the pairs.
    """
    paths = {storage.path for pair in pairs for one in (pair.before, pair.after) for storage in one.ranges}
    before = {**read_versions(path for path in paths if path not in (seen or {})), **(seen or {})}
    tallies = _small_tallies(pairs, how, progress)
    rest = [pair for n, pair in enumerate(pairs) if n not in tallies]
    compared = iter(_compare(rest, how, jobs, progress, derived=derived))
    outcomes = [_outcome(tallies[n], pair) if n in tallies else next(compared) for n, pair in enumerate(pairs)]
    stale: dict[str | ByteRange, StateError] = {
        path: UnreadableError(CHANGED) for path in find_changed({path: before[path] for path in paths})
    }
    if not stale:
        return outcomes
    return [_unless_damaged(pair, outcome, stale) for pair, outcome in zip(pairs, outcomes, strict=True)]


def _small_tallies(pairs: Sequence[Pair], how: How, progress: Progress | None) -> dict[int, Tally]:
    """The tallies of small pairs that lie next to each other, by the number of the pair: they need no tasks."""
    if how.device != "cpu" or pool.is_divided():
        return {}
    tallies = compare_small_pairs([(pair.before, pair.after) for pair in pairs], _place, partial(_small_tally, how))
    if tallies and progress:
        progress(pairs[max(tallies)].after.fqn, sum(pairs[n].before.nbytes for n in tallies))
    return tallies


def _small_tally(how: How, before: bytes, after: bytes, dtype: str) -> Tally | None:
    """What a task of one block would find; None if that takes more than the compiled kernel."""
    kind = element(dtype)
    if kind is None or how.atol or how.rtol or dtype not in kernels.STORED:
        return None
    one, two = np.frombuffer(before, kind.stored), np.frombuffer(after, kind.stored)
    return kernels.stored(one, two, (dtype, dtype), how.bitwise)


def _place(data: TensorData) -> tuple[str, int] | None:
    piece = _piece(data)
    return (piece.path, piece.offset) if piece else None


def _outcome(total: Tally, pair: Pair) -> Delta:
    shape = pair.after.shape or ()
    return Delta(elements=math.prod(shape)) if not total.changed else _delta(total, pair, shape)


def _compare(
    pairs: Sequence[Pair], how: How, jobs: int, progress: Progress | None, *, derived: bool
) -> Iterator[Outcome]:
    """The outcome of each pair, in order, by tasks of its own."""
    plans = list(_plans(pairs, how))
    results = _Results(len(pairs), how)
    results.add(
        _run([task for plan in plans if isinstance(plan, list) for task in plan], how, jobs, progress, derived=derived)
    )
    numbers = [task for n, pair in enumerate(pairs) for task in results.in_numbers(n, pair)]
    results.instead(_run(numbers, how, jobs, derived=True))
    results.add(_run(list(results.norms()), how, jobs, derived=True))
    suspects = [
        pair
        for n, (pair, plan) in enumerate(zip(pairs, plans, strict=True))
        if results.differ(n) or _is_suspect(plan) or (results.are_here(n) and _checksums_differ(pair))
    ]
    damaged = _damaged([tensor for pair in suspects for tensor in (pair.before, pair.after)], jobs, derived=True)
    for n, (pair, plan) in enumerate(zip(pairs, plans, strict=True)):
        yield _unless_damaged(pair, results.outcome(n, pair) if isinstance(plan, list) else plan, damaged)


def _unless_damaged(pair: Pair, outcome: Outcome, errors: Mapping[str | ByteRange, StateError]) -> Outcome:
    return outcome if isinstance(outcome, NotCompared) else _first_error(pair, errors) or outcome


#: What stands for a task that is not done here.
ABSENT = Found(Tally())
Ran = list[tuple[Task, Found | StateError]]


class _Results:
    """What the tasks found, by pair."""

    def __init__(self, pairs: int, how: How) -> None:
        self._ran: list[Ran] = [[] for _ in range(pairs)]
        self._how = how
        self._elsewhere: set[int] = set()

    def add(self, ran: Ran) -> None:
        for task, found in ran:
            if found is ABSENT:
                self._elsewhere.add(task.pair)
            self._ran[task.pair].append((task, found))

    def differ(self, pair: int) -> bool:
        return any(isinstance(found, Found) and found.tally.changed for _, found in self._ran[pair])

    def are_here(self, pair: int) -> bool:
        """Whether no other share of the command has the pair."""
        return pair not in self._elsewhere

    def in_numbers(self, number: int, pair: Pair) -> Iterator[Task]:
        """What is left to do for blocks that differ, where it can be read what they are worth."""
        before, after = pair.before.data, pair.after.data
        if before and after and self.differ(number) and self._blocks(number) and readable(after) is after:
            yield Task(number, pair.after.fqn, 0, math.prod(after.shape), before, after)

    def instead(self, ran: Ran) -> None:
        """Takes what was found of numbers for what was found of their blocks, unless it is bits that count."""
        for task, found in ran:
            if not (self._how.bitwise and isinstance(found, Found) and not found.tally.changed):
                self._ran[task.pair] = [(task, found)]

    def _blocks(self, number: int) -> str | None:
        """The type of the blocks that were compared; None where other elements were."""
        dtype = self._ran[number][0][0].before.dtype if self._ran[number] else ""
        return dtype if dtype in BLOCK_SIZES else None

    def norms(self) -> Iterator[Task]:
        """What is left to do for pairs that differ: the blocks that do not, of which only bytes were compared."""
        for pair, ran in enumerate(self._ran):
            for task, found in ran if self.differ(pair) else ():
                for start, count in found.equal if isinstance(found, Found) else ():
                    yield msgspec.structs.replace(task, start=start, count=count, norm=True)

    def outcome(self, number: int, pair: Pair) -> Outcome:
        total = Tally()
        # Added up in the order of the elements, whatever the order in which they were done.
        for _, found in sorted(self._ran[number], key=lambda one: (one[0].what, one[0].start)):
            if isinstance(found, StateError):
                return found
            total = total.plus(found.tally)
        shape, blocks = pair.after.shape or (), self._blocks(number)
        if blocks and total.changed:
            return _of_blocks(total, blocks, shape, self._how)
        return _outcome(total, pair)


def _of_blocks(total: Tally, dtype: str, shape: tuple[int, ...], how: How) -> Delta | NotCompared:
    """Of blocks that differ, and are worth the same or nobody knows what."""
    why = why_no_numbers(dtype) or "the values are the same, in other bytes"
    if how.atol or how.rtol:
        return NotCompared(f"its bytes differ, and {why}")
    values, elements = BLOCK_SIZES[dtype][0], math.prod(shape)
    reason = f"all {values} values of a block that differs are counted: {why}"
    return Delta(elements, total.changed * values, left_out=elements, reason=reason)


def _delta(total: Tally, pair: Pair, shape: tuple[int, ...]) -> Delta:
    if pair.after.data is not None:
        return total.delta(shape, _no_values(pair.after.data))
    parts = dict(pair.after.parts)
    together = f"of its parts taken together: {', '.join(parts)}"
    reason = _no_values(parts["values"]) if pair.after.layout in RAGGED else together
    delta = total.delta((total.finite + total.left_out,), reason)
    return msgspec.structs.replace(delta, elements=pair.after.elements, first=None)


def _run(tasks: list[Task], how: How, jobs: int, progress: Progress | None = None, *, derived: bool = False) -> Ran:
    def done(batch: Sequence[Task]) -> None:
        if progress:
            progress(batch[-1].what, sum(map(_bytes, batch)))

    pairs = [task.pair for task in tasks]
    tasks = in_file_order(tasks, _first_side)
    if how.device != "cpu":
        found = _run_on_device(how, tasks, done)
    else:
        found = pool.run(
            run_batch, how, tasks, size_of=_bytes, jobs=jobs, done=done, absent=ABSENT, derived=derived, together=pairs
        )
    return list(zip(tasks, found, strict=True))


def _first_side(task: Task) -> Iterator[ByteRange | TensorData]:
    for side in (task.after, task.before):
        if isinstance(side, TensorData):
            if files.reads_are_requests(side.storage.path):
                yield side
        elif files.reads_are_requests(side.path):
            yield ByteRange(side.path, side.offset + task.start * width(side.dtype), 0)


def _run_on_device(how: How, tasks: list[Task], done: Callable[[Sequence[Task]], None]) -> list[Found | StateError]:
    from statecli.values import gpu_kernel

    device = gpu_kernel.device(how.device)
    results = []
    for batch in pool.batches(tasks, _bytes):
        results += gpu_kernel.run_on(how, batch, device)
        done(batch)
    return results


def _bytes(task: Task) -> int:
    dtype = task.before.dtype
    kind = element(dtype)
    return task.count * kind.size if kind else task.count


# --- whether the files can be trusted -------------------------------------------------------------------------------


def _checksums_differ(pair: Pair) -> bool:
    """Equal bytes under different recorded checksums: one of the two files is damaged."""
    one, two = pair.before.ranges, pair.after.ranges
    return len(one) == len(two) and any(
        a.length == b.length and None not in (sums := (_recorded(a), _recorded(b))) and sums[0] != sums[1]
        for a, b in zip(one, two, strict=True)
    )


def _recorded(where: ByteRange) -> int | None:
    """The checksum that its container has of it; None where there is none, or it cannot be read."""
    try:
        return located(where, "storage").crc32
    except StateError:
        return None


def _datas(tensor: TensorInfo) -> list[TensorData]:
    return ([as_stored(tensor.data)] if tensor.data else []) + [data for _, data in tensor.parts]


def damages(tensors: Sequence[TensorInfo], *, jobs: int = 0) -> list[tuple[StateError, ...]]:
    """Of each tensor, what is wrong with its bytes where a container recorded their checksum, in each of its ranges."""
    errors = _damaged(tensors, jobs)
    return [
        tuple(dict.fromkeys(errors[one] for one in tensor.ranges if one in errors)) if errors else ()
        for tensor in tensors
    ]


def _damaged(tensors: Sequence[TensorInfo], jobs: int, *, derived: bool = False) -> dict[str | ByteRange, StateError]:
    """The storages of these tensors whose bytes are not those that were written, with what to say of each."""
    ranges: dict[ByteRange, str] = {}
    for tensor in tensors:
        for storage in tensor.ranges:
            if storage.crc32 is not None or storage.packing is not None:
                ranges.setdefault(storage, tensor.fqn)
    storages = in_file_order(list(ranges.items()), lambda one: (one[0],))
    errors = pool.run(
        check_batch,
        None,
        storages,
        size_of=lambda one: one[0].length,
        jobs=jobs,
        absent=None,
        derived=derived,
    )
    return {
        where: error for where, error in zip((one for one, _ in storages), errors, strict=True) if error is not None
    }


@with_denormals
def check_batch(_: None, storages: Sequence[tuple[ByteRange, str]]) -> list[StateError | None]:
    """What is wrong with each storage, under its name; None where its bytes are those that were written."""
    with reading(*(where for where, _ in storages)):
        return [_crc_error(*one) for one in storages]


def _crc_error(where: ByteRange, what: str) -> StateError | None:
    try:
        check_crc(where, what)
    except StateError as error:
        return error
    return None


def _first_error(pair: Pair, errors: Mapping[str | ByteRange, StateError]) -> StateError | None:
    if not errors:
        return None
    both = [*pair.before.ranges, *pair.after.ranges]
    for storage in both:
        if storage.path in errors:
            return UnreadableError(f"{storage.path}: {pair.after.fqn}: {errors[storage.path]}")
        if storage in errors:
            return errors[storage]
    return None


Plan = list[Task] | Delta | NotCompared | StateError


def _is_suspect(plan: Plan) -> bool:
    """Of what was compared or refused while planning: whether damage can have done it."""
    return isinstance(plan, StateError) or (isinstance(plan, Delta) and plan.changed > 0)


def _plans(pairs: Sequence[Pair], how: How) -> Iterator[Plan]:
    for at in range(0, len(pairs), PLANNED):
        some = pairs[at : at + PLANNED]
        datas = [data for pair in some for one in (pair.before, pair.after) for data in _datas(one)]
        with looking_up(*datas):
            yield from (_plan(at + n, pair, how) for n, pair in enumerate(some))


def _plan(number: int, pair: Pair, how: How) -> Plan:
    try:
        return _planned(number, pair, how)
    except StateError as error:
        # Malformed is a kind of unreadable, and means that a file is damaged.
        return NotCompared(str(error)) if type(error) is UnreadableError else error


def _planned(number: int, pair: Pair, how: How) -> Plan:
    if pair.before.layout.startswith("sparse") and pair.before.layout == pair.after.layout:
        return _sparse(pair, how)
    parts = _parts(pair)
    if isinstance(parts, NotCompared):
        return parts
    tasks: list[Task] = []
    for what, before, after in parts:
        reason = _incomparable(before, after)
        if reason:
            return NotCompared(reason)
        tasks += _tasks(number, what, before, after)
    return tasks


def _sparse(pair: Pair, how: How) -> Delta | NotCompared:
    needed = sparse.PARTS.get(pair.after.layout, ("values",))
    if not all({name for name, _ in tensor.parts}.issuperset(needed) for tensor in (pair.before, pair.after)):
        return NotCompared("its stored values are not in the file")
    return sparse.delta(pair.before, pair.after, how)


#: Tensors of tensors of several shapes -> the parts that say which, and those that say where they lie in the values.
RAGGED = {"nested": (("sizes",), ("strides", "offsets")), "jagged": (("offsets", "lengths"), ())}


def _ragged(pair: Pair) -> list[tuple[str, TensorData, TensorData]] | NotCompared:
    """The values alone, where both sides lay them out alike."""
    before, after = dict(pair.before.parts), dict(pair.after.parts)
    if "values" not in after:
        return NotCompared("its values are not in the file")
    for names, outcome in zip(RAGGED[pair.after.layout], (_RESHAPED, _REORDERED), strict=True):
        for name in after.keys() & set(names):
            if not sparse.same(before[name], after[name], f"{pair.after.fqn}: {name}"):
                return outcome
    return [(pair.after.fqn, before["values"], after["values"])]


_RESHAPED = NotCompared("the shapes of its inner tensors differ", reshaped=True)
_REORDERED = NotCompared("its values lie in another order")


def _parts(pair: Pair) -> list[tuple[str, TensorData, TensorData]] | NotCompared:
    """The strided pieces to compare: the tensor itself, or what a sparse tensor or a subclass is made of."""
    before, after = pair.before, pair.after
    if before.dtype != after.dtype and "numpy" in (before.dtype + after.dtype):
        return NotCompared(f"{before.dtype} and {after.dtype} are not compared with each other")
    if before.data is not None and after.data is not None:
        return [(after.fqn, *_alike(before.data, after.data))]
    names = [name for name, _ in before.parts]
    if before.parts and after.parts and before.layout == after.layout and names == [name for name, _ in after.parts]:
        if before.layout in RAGGED:
            return _ragged(pair)
        both = zip(names, before.parts, after.parts, strict=True)
        return [(f"{after.fqn}: {name}", one, two) for name, (_, one), (_, two) in both]
    if before.layout != after.layout:
        return NotCompared(f"{before.layout} before, {after.layout} after")
    return NotCompared(next(filter(None, map(_why_no_values, (before, after))), "made of different parts"))


def _alike(before: TensorData, after: TensorData) -> tuple[TensorData, TensorData]:
    """Both as their blocks where they are quantized alike; else as numbers, where these can be read."""
    how = as_stored if quantized(before.storage) == quantized(after.storage) else readable
    return how(before), how(after)


def _why_no_values(tensor: TensorInfo) -> str | None:
    if tensor.data is not None or tensor.parts:
        return None
    if tensor.device == "meta":
        return "meta holds no data"
    return "uninitialized" if tensor.shape is None else "its values are not in the file"


def _incomparable(before: TensorData, after: TensorData) -> str | None:
    """Why nothing can be said of two pieces; elements that are no numbers can be equal, bit for bit."""
    if before.dtype != after.dtype and BLOCK_SIZES.keys() & {before.dtype, after.dtype}:
        return _no_values(before) or _no_values(after)
    if before.shape != after.shape:
        return f"made of parts of other shapes, {list(before.shape)} and {list(after.shape)}"
    kinds = element(before.dtype), element(after.dtype)
    reason = _no_values(before) or _no_values(after)
    if before.dtype == after.dtype and None not in kinds and (before.quantizer is None) is (after.quantizer is None):
        return None
    if reason is None and kinds[0] and kinds[1] and kinds[0].values != kinds[1].values:
        return f"{before.dtype} and {after.dtype} have other numbers of values in an element"
    return reason


def _no_values(data: TensorData) -> str | None:
    return no_numbers(data.dtype, data.quantizer is not None)


def _tasks(number: int, what: str, before: TensorData, after: TensorData) -> Iterator[Task]:
    elements = math.prod(after.shape)
    one, two = _pieces(before, what), _pieces(after, what)
    if not one or not two:
        yield Task(number, what, 0, elements, before, after)
        return
    starts = sorted({*one, *two, *range(0, elements, TASK)})
    a, b = one[0], two[0]
    for start, stop in zip(starts, [*starts[1:], elements], strict=True):
        a, b = one.get(start, a), two.get(start, b)
        yield Task(number, what, start, stop - start, a, b)


def _pieces(data: TensorData, what: str) -> dict[int, Piece]:
    """The pieces that its elements lie in one after another, by their first element, as if each began at element 0.

    Empty where they lie in another order, or their bytes are not the elements themselves.
    """
    data = resolved(data, what)
    boxes = data.storage.boxes
    if boxes is None:
        piece = _piece(data)
        return {0: piece} if piece and math.prod(data.shape) else {}
    if not _is_plain(data) or data.offset or math.prod(data.shape) != math.prod(boxes.shape):
        return {}
    found: dict[int, Piece] = {}
    strides = contiguous_strides(boxes.shape)
    for box in sorted(boxes.boxes, key=lambda box: box.start):
        start, count = sum(at * step for at, step in zip(box.start, strides, strict=True)), math.prod(box.data.shape)
        inner = _piece(resolved(box.data, what)) if is_run(box.data.shape, boxes.shape) else None
        if count and inner is None:
            return {}
        if count and inner:
            found[start] = Piece(inner.path, inner.offset - start * width(data.dtype), data.dtype)
    return found


def _is_plain(data: TensorData) -> bool:
    """Whether its elements are its storage's, in their order and as they lie there."""
    in_order = data.strides is None or data.strides == contiguous_strides(data.shape) or 0 in data.shape
    lazy = data.conjugate or data.negative or data.quantizer is not None
    return in_order and not lazy and not data.storage.big_endian and data.inline is None and not packed(data.dtype)


def _piece(data: TensorData) -> Piece | None:
    """None where its elements are not simply one after another, in the byte order of this machine."""
    kind, where = element(data.dtype), data.storage
    if kind is None or where.packing is not None or where.boxes is not None or not _is_plain(data):
        return None
    size = kind.size
    inside = (data.offset + math.prod(data.shape)) * size <= where.length
    return Piece(where.path, where.offset + data.offset * size, data.dtype) if inside else None


# --- equal bytes under another name ----------------------------------------------------------------------------------


def fingerprints(
    tensors: Sequence[TensorInfo], *, jobs: int = 0, together: Sequence[object] | None = None
) -> list[int | StateError | None]:
    """CRC-32 of each tensor's elements in C order, little-endian; None where there are none to read.

    Of a tensor made of parts, of one part after the other. Equal ones are a hint, which `compare_all` has to confirm.
    What a zip recorded of a whole storage is not computed again. What goes wrong with a tensor, or with who was to read
    it, is its result: nobody can tell what it equals. `together`: as in `pool.run`.
    """
    works = [(tensor.nbytes, tensor.fqn, tuple(_datas(tensor))) for tensor in tensors]
    return pool.run(fingerprint_batch, None, works, size_of=itemgetter(0), jobs=jobs, absent=None, together=together)


@with_denormals
def fingerprint_batch(
    _: None, works: Sequence[tuple[int, str, tuple[TensorData, ...]]]
) -> list[int | StateError | None]:
    """The fingerprint of each tensor, which is so many bytes, has this name and is made of these."""
    with reading(*(data for _, _, datas in works for data in datas)):
        return [_fingerprint(name, datas) for _, name, datas in works]


def _fingerprint(name: str, datas: tuple[TensorData, ...]) -> int | StateError | None:
    try:
        found = [_crc(data, name) for data in datas]
    except StateError as error:
        return error
    if not found or None in found:
        return None
    return found[0] if len(found) == 1 else zlib.crc32(repr(found).encode())


def _crc(data: TensorData, name: str) -> int | None:
    if data.quantizer is not None or element(data.dtype) is None:
        return None
    where = data.storage
    if _piece(data) and where.crc32 is not None and math.prod(data.shape) * width(data.dtype) == where.length:
        return where.crc32
    try:
        with opened(data, name) as view:
            if overlap(view):
                return None
            found = 0
            for block in stored(view):
                found = zlib.crc32(block.data, found)
    except UnreadableError as error:
        # What has a cause is of a file or a store; what has none says that these bytes are not read as elements.
        if type(error) is UnreadableError and error.__cause__ is None:
            return None
        raise
    return found
