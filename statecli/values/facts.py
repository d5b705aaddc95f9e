"""A checkpoint's tensors -> `Facts` of each, in one pass over their bytes: what the rules about values judge.

tensors ──▶ tasks (some megabytes of one, plain data) ──▶ facts of each task ──▶ added up, in any order
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from statecli.core.errors import StateError, UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.state import TensorData, TensorInfo
from statecli.storage.file_version import find_changed, read_versions
from statecli.values import facts_kernel, pool
from statecli.values.compare_task import rechunked
from statecli.values.elements import Array, Decoder, Element, element
from statecli.values.facts_kernel import Facts
from statecli.values.ggml_blocks import quantized, readable
from statecli.values.ranges import Range, contiguous_strides, in_file_order, looking_up, reading, resolved
from statecli.values.read import Strided, distinct, no_numbers, opened, overlap, packed, stored, valued
from statecli.values.stats import why_no_data

#: Bytes of a task.
TASK = 16 << 20
#: Called with a name and the bytes of it that were read.
Progress = Callable[[str, int], None]


class Task(msgspec.Struct, frozen=True, gc=False):
    """A tensor, or where its elements lie one after another some of them, the first of block `block`."""

    piece: int
    what: str
    data: TensorData
    block: int = 0


@with_denormals
def read_all(tensors: Sequence[TensorInfo], *, jobs: int = 0, progress: Progress | None = None) -> list[Facts]:
    """Facts of each tensor, in order; what lies in the same place is read once.

    What goes wrong with one is in its own facts alone. `jobs` processes, 0: one a core. Checksums are not verified.
    """
    before = read_versions({storage.path for tensor in tensors for storage in tensor.ranges if storage.path})
    pieces: dict[TensorData, int] = {}
    names: list[str] = []
    for tensor in tensors:
        for data in _datas(tensor):
            if pieces.setdefault(data, len(pieces)) == len(names):
                names.append(tensor.fqn)
    with looking_up(*pieces):
        tasks = [task for (data, n), name in zip(pieces.items(), names, strict=True) for task in _tasks(n, name, data)]
    found = _run(tasks, jobs, progress)
    gone = set(find_changed(before))
    facts = [_of_tensor(tensor, [found[pieces[data]] for data in _datas(tensor)], gone) for tensor in tensors]
    return _confirmed(tensors, facts, jobs)


def _datas(tensor: TensorInfo) -> list[TensorData]:
    if tensor.damage is not None:
        return []
    return ([readable(tensor.data)] if tensor.data else []) + [data for _, data in tensor.parts]


def _tasks(piece: int, what: str, data: TensorData) -> Iterator[Task]:
    per_task = max(TASK // facts_kernel.BLOCK, 1) * facts_kernel.in_block(data.dtype)
    elements = math.prod(data.shape)
    data = data if elements <= per_task else _at_its_bytes(data, what)
    if elements <= per_task or not _sliceable(data):
        yield Task(piece, what, data)
        return
    for start in range(0, elements, per_task):
        shape, offset = (min(per_task, elements - start),), data.offset + start
        part = replace(data, shape=shape, strides=None, offset=offset)
        yield Task(piece, what, part, start // facts_kernel.in_block(data.dtype))


def _at_its_bytes(data: TensorData, what: str) -> TensorData:
    """What lies in an archive of its own can be sliced only in there. What is wrong is said when it is read."""
    try:
        return resolved(data, what)
    except StateError:
        return data


def _sliceable(data: TensorData) -> bool:
    plain = data.strides is None or data.strides == contiguous_strides(data.shape)
    by_channel = data.quantizer is not None and data.quantizer.axis is not None
    # To come to a place in what is deflated, all before it is inflated.
    within_reach = data.storage.packing is None or quantized(data.storage) is not None
    return plain and within_reach and not by_channel and not packed(data.dtype)


def _run(tasks: Sequence[Task], jobs: int, progress: Progress | None) -> list[Facts]:
    def done(batch: Sequence[Task]) -> None:
        if progress:
            progress(batch[-1].what, sum(map(_bytes, batch)))

    tasks = in_file_order(list(tasks), lambda task: (task.data,))
    results = pool.run(facts_of_batch, None, tasks, size_of=_bytes, jobs=jobs, done=done, absent=Facts())
    found: dict[int, Facts] = {}
    for task, one in zip(tasks, results, strict=True):
        facts = _damaged(task, one) if isinstance(one, StateError) else one
        found[task.piece] = found[task.piece].plus(facts) if task.piece in found else facts
    return [found[piece] for piece in sorted(found)]


def _bytes(task: Task) -> int:
    kind = element(task.data.dtype)
    return math.prod(task.data.shape) * (kind.size if kind else 1)


# --- one task, in any process ----------------------------------------------------------------------------------------


@with_denormals
def facts_of_batch(_: None, tasks: Sequence[Task]) -> list[Facts]:
    """Facts of each task; of one that cannot be read, why not."""
    decoder = Decoder()
    with reading(*(task.data for task in tasks)):
        return [_of_task(task, decoder) for task in tasks]


def _of_task(task: Task, decoder: Decoder) -> Facts:
    if element(task.data.dtype) is None:
        return _unread(task.data, no_numbers(task.data.dtype) or "")
    try:
        with opened(task.data, task.what) as view:
            return of_view(view, decoder, task.block)
    except StateError as error:
        return _damaged(task, error)


def _damaged(task: Task, error: StateError) -> Facts:
    return replace(_unread(task.data, str(error)), damaged=True)


def _unread(data: TensorData, reason: str) -> Facts:
    return Facts(math.prod(data.shape), digest=None, reason=reason)


def of_view(view: Strided, decoder: Decoder, block: int = 0) -> Facts:
    """Facts of a strided view, whose first element is the first of that block. Raises as `values.read` does."""
    if not view.elements:
        return Facts()
    times = 1
    if view.affine is None or view.affine.axis is None:
        once, times = distinct(view)
        view = once if times > 1 else view
    reason = overlap(view)
    if reason:
        return Facts(view.elements * times, digest=None, reason=reason)
    reason = no_numbers(view.dtype, view.affine is not None)
    lazy = view.conjugate or view.negative or view.affine is not None
    total, start, items_each = Facts(), 0, _element(view.dtype).items
    for items in _blocks(view, decoder):
        if reason:
            one = facts_kernel.bits(items, view.dtype, block)
        elif lazy:
            one = facts_kernel.worth(items, view.dtype, valued(view, items, start, decoder), block)
        else:
            one = facts_kernel.stored(items, view.dtype, block, decoder)
        total, block, start = total.plus(one), block + 1, start + items.size // items_each
    return replace(total.times(times), reason=reason)


def _blocks(view: Strided, decoder: Decoder) -> Iterator[Array]:
    """The stored items in logical order, in whole blocks but for the last, each valid until the next is asked for."""
    kind = _element(view.dtype)
    per_block = facts_kernel.in_block(view.dtype)
    plain = view.strides == contiguous_strides(view.shape) and not view.big_endian and not packed(view.dtype)
    if not plain or not isinstance(view.memory, Range):
        yield from rechunked(stored(view), per_block * kind.items)
        return
    size, elements = kind.size, view.elements
    raw = decoder.buffer("raw", "u1", min(per_block, elements) * size)
    for start in range(0, elements, per_block):
        part = raw[: min(per_block, elements - start) * size]
        view.memory.read((view.offset + start) * size, part)
        yield part.view(kind.stored)


def _element(dtype: str) -> Element:
    kind = element(dtype)
    if kind is None:
        raise UnreadableError(f"{dtype} elements are not numbers that statecli reads")
    return kind


# --- a tensor ------------------------------------------------------------------------------------------------------


def _of_tensor(tensor: TensorInfo, found: Sequence[Facts], gone: set[str]) -> Facts:
    if tensor.damage is not None:
        return Facts(tensor.elements, digest=None, reason=tensor.damage, damaged=True)
    if not found:
        return Facts(tensor.elements, digest=None, reason=why_no_data(tensor))
    for storage in tensor.ranges:
        if storage.path in gone:
            reason = f"{storage.path}: {tensor.fqn}: changed while it was read: audit it again"
            return Facts(tensor.elements, digest=None, reason=reason, damaged=True)
    return found[0] if not tensor.parts else _of_parts(tensor, found)


def _of_parts(tensor: TensorInfo, found: Sequence[Facts]) -> Facts:
    """Of what a sparse or nested tensor, or a subclass, is made of. Its digest is of all its parts together."""
    names = [name for name, _ in tensor.parts]
    broken = next((one for one in found if one.damaged), None)
    if broken is not None:
        return broken
    digest = _joined([one.digest for one in found])
    if "values" not in names:
        total = Facts()
        for one in found:
            total = total.plus(one)
        return replace(total, low=None, high=None, only=None, digest=digest)
    values = found[names.index("values")]
    implicit = tensor.elements - values.elements if tensor.layout.startswith("sparse") else 0
    if implicit > 0 and values.reason is None:
        ordered = values.low is not None or not values.elements
        zero = 0.0 if ordered else None
        values = values.plus(Facts(implicit, zeros=implicit, low=zero, high=zero))
    return replace(values, only=None, digest=digest)


def _joined(digests: Sequence[int | None]) -> int | None:
    if None in digests:
        return None
    return facts_kernel.mixed(
        sum(facts_kernel.mixed(one or 0) * (2 * n + 1) for n, one in enumerate(digests)) & facts_kernel.MASK
    )


def _confirmed(tensors: Sequence[TensorInfo], facts: Sequence[Facts], jobs: int) -> list[Facts]:
    """The facts, with the SHA-256 of the bytes for a digest where two tensors of a kind have one digest in common."""
    alike: dict[object, list[int]] = {}
    for n, (tensor, one) in enumerate(zip(tensors, facts, strict=True)):
        if one.digest and one.elements and one.only is None:
            alike.setdefault((tensor.section, tensor.dtype, tensor.shape, one.digest), []).append(n)
    again = [n for group in alike.values() if len({_place(tensors[n]) for n in group}) > 1 for n in group]
    if not again:
        return list(facts)
    from statecli.values.algorithm import Algorithm
    from statecli.values.digest import digests

    made = digests([tensors[n] for n in again], Algorithm.SHA256, jobs=jobs, derived=True)
    found = dict(zip(again, made, strict=True))
    return [replace(one, digest=int(found[n] or "0", 16)) if n in found else one for n, one in enumerate(facts)]


def _place(tensor: TensorInfo) -> object:
    return tensor.data, tensor.parts
