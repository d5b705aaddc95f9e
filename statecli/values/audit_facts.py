"""Compute facts about each tensor's values for the audit rules (NaN count, range, digest), in one pass.

tensors ──▶ tasks (some megabytes of a tensor, plain data) ──▶ facts of each task ──▶ merged, in any order
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from statecli import values
from statecli.core.denormals import with_denormals
from statecli.core.digest_algorithm import Algorithm
from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.storage.file_version import find_changed, read_versions
from statecli.values import facts_kernel, sparse
from statecli.values.compare_task import rechunk
from statecli.values.elements import Array, Decoder, find_element, require_element
from statecli.values.ggml_blocks import find_ggml_type, to_readable
from statecli.values.ranges import Range, iter_paths, prefetch, prefetch_archive_ends, resolve_data, sort_by_place
from statecli.values.read import (
    Strided,
    explain_not_numeric,
    explain_overlap,
    is_packed,
    open_view,
    read_items,
    skip_expanded,
    to_values,
)
from statecli.values.stats import explain_no_data
from statecli.values.summary import DIGEST_MASK, Facts
from statecli.workers import pool
from statecli.workers.task import WholeTask

#: Number of bytes of a task.
TASK_BYTES = 16 << 20


class FactsTask(WholeTask, frozen=True, gc=False):
    """Compute facts about the values of a whole tensor, or of a range of its contiguous elements.

    Attributes:
        piece: Number of the tensor, or of an inner tensor of a sparse tensor.
        data: Elements of the task.
        block: Number of the block with the first element.
    """

    piece: int
    name: str = msgspec.field(name="what")  # the name in the digests of tasks in shard files
    data: TensorData
    block: int = 0

    @property
    def size(self) -> int:
        """Size of the elements in bytes."""
        element = find_element(self.data.dtype)
        return math.prod(self.data.shape) * (element.size if element else 1)

    @property
    def paths(self) -> Iterable[str]:
        """Files that contain the task's elements."""
        return iter_paths(self.data)


@with_denormals
def read_facts(tensors: Sequence[TensorInfo], *, jobs: int = 0, progress: pool.Progress | None = None) -> list[Facts]:
    """Return facts about the values of each tensor, in order. Tensors that share the same bytes are read once.

    An error in a tensor affects only its own facts. `jobs` is the number of processes, 0 for one per core. Checksums
    are not verified.
    """
    before = read_versions({storage.path for tensor in tensors for storage in tensor.ranges if storage.path})
    pieces: dict[TensorData, int] = {}
    names: list[str] = []
    for tensor in tensors:
        for data in _list_data(tensor):
            if pieces.setdefault(data, len(pieces)) == len(names):
                names.append(tensor.fqn)
    with prefetch_archive_ends(*pieces):
        tasks = [
            task for (data, n), name in zip(pieces.items(), names, strict=True) for task in _build_tasks(n, name, data)
        ]
    facts_of_piece = _run_tasks(tasks, jobs, progress)
    stale = set(find_changed(before))
    facts = [
        _tensor_facts(tensor, [facts_of_piece[pieces[data]] for data in _list_data(tensor)], stale)
        for tensor in tensors
    ]
    return _confirm_digests(tensors, facts, jobs)


def _list_data(tensor: TensorInfo) -> list[TensorData]:
    if tensor.damage is not None:
        return []
    return ([to_readable(tensor.data)] if tensor.data else []) + [data for _, data in tensor.parts]


def _build_tasks(piece: int, name: str, data: TensorData) -> Iterator[FactsTask]:
    per_task = max(TASK_BYTES // facts_kernel.BLOCK_BYTES, 1) * facts_kernel.count_block_elements(data.dtype)
    elements = math.prod(data.shape)
    data = data if elements <= per_task else _resolve_or_keep(data, name)
    if elements <= per_task or not _is_sliceable(data):
        yield FactsTask(piece, name, data)
        return
    for start in range(0, elements, per_task):
        shape, offset = (min(per_task, elements - start),), data.offset + start
        part = replace(data, shape=shape, strides=None, offset=offset)
        yield FactsTask(piece, name, part, start // facts_kernel.count_block_elements(data.dtype))


def _resolve_or_keep(data: TensorData, name: str) -> TensorData:
    """Return the tensor's location in its archive, to slice the tensor. If the archive is unreadable, return `data`.

    Errors are ignored, because the later read reports them.
    """
    try:
        return resolve_data(data, name)
    except StateError:
        return data


def _is_sliceable(data: TensorData) -> bool:
    is_plain = data.strides is None or data.strides == contiguous_strides(data.shape)
    by_channel = data.quantizer is not None and data.quantizer.axis is not None
    # Deflated bytes cannot be sliced, because a slice requires inflating all bytes before it.
    is_seekable = data.storage.packing is None or find_ggml_type(data.storage) is not None
    return is_plain and is_seekable and not by_channel and not is_packed(data.dtype)


def _run_tasks(tasks: Sequence[FactsTask], jobs: int, progress: pool.Progress | None) -> list[Facts]:
    tasks = sort_by_place(list(tasks), lambda task: (task.data,))
    results = pool.run_tasks(
        facts_of_batch, None, tasks, jobs=jobs, on_batch=pool.report_batches(progress), absent=Facts()
    )
    total: dict[int, Facts] = {}
    for task, result in zip(tasks, results, strict=True):
        facts = _damaged_facts(task, result) if isinstance(result, StateError) else result
        total[task.piece] = total[task.piece].merge(facts) if task.piece in total else facts
    return [total[piece] for piece in sorted(total)]


# --- one task, in any process ----------------------------------------------------------------------------------------


@with_denormals
def facts_of_batch(_: None, tasks: Sequence[FactsTask]) -> list[Facts]:
    """Return the `Facts` of each task. If a tensor cannot be read, its `Facts` contain the reason."""
    decoder = Decoder()
    with prefetch(*(task.data for task in tasks)):
        return [_read_task(task, decoder) for task in tasks]


def _read_task(task: FactsTask, decoder: Decoder) -> Facts:
    if find_element(task.data.dtype) is None:
        return _unknown_facts(task.data, explain_not_numeric(task.data.dtype) or "")
    try:
        with open_view(task.data, task.name) as view:
            return read_view_facts(view, decoder, task.block)
    except StateError as error:
        return _damaged_facts(task, error)


def _damaged_facts(task: FactsTask, error: StateError) -> Facts:
    return replace(_unknown_facts(task.data, str(error)), damaged=True)


def _unknown_facts(data: TensorData, reason: str) -> Facts:
    return Facts(math.prod(data.shape), digest=None, reason=reason)


def read_view_facts(view: Strided, decoder: Decoder, block: int = 0) -> Facts:
    """Return the `Facts` about a strided view. `block`: number of its first block. Raises StateError if unreadable."""
    if not view.elements:
        return Facts()
    times = 1
    if view.affine is None or view.affine.axis is None:
        unrepeated_view, times = skip_expanded(view)
        view = unrepeated_view if times > 1 else view
    reason = explain_overlap(view)
    if reason:
        return Facts(view.elements * times, digest=None, reason=reason)
    reason = explain_not_numeric(view.dtype, view.affine is not None)
    lazy = view.conjugate or view.negative or view.affine is not None
    total, start, items_each = Facts(), 0, require_element(view.dtype).items
    for items in _iter_blocks(view, decoder):
        if reason:
            facts = facts_kernel.scan_bits(items, view.dtype, block)
        elif lazy:
            facts = facts_kernel.scan_values(items, view.dtype, to_values(view, items, start, decoder), block)
        else:
            facts = facts_kernel.scan_stored(items, view.dtype, block, decoder)
        total, block, start = total.merge(facts), block + 1, start + items.size // items_each
    return replace(total.repeat(times), reason=reason)


def _iter_blocks(view: Strided, decoder: Decoder) -> Iterator[Array]:
    """Yield the stored items in blocks, of which the last may be shorter. A block may overwrite the previous block."""
    element = require_element(view.dtype)
    per_block = facts_kernel.count_block_elements(view.dtype)
    is_plain = view.strides == contiguous_strides(view.shape) and not view.big_endian and not is_packed(view.dtype)
    if not is_plain or not isinstance(view.memory, Range):
        yield from rechunk(read_items(view), per_block * element.items)
        return
    size, elements = element.size, view.elements
    raw = decoder.buffer("raw", "u1", min(per_block, elements) * size)
    for start in range(0, elements, per_block):
        part = raw[: min(per_block, elements - start) * size]
        view.memory.read((view.offset + start) * size, part)
        yield part.view(element.stored)


# --- a tensor ------------------------------------------------------------------------------------------------------


def _tensor_facts(tensor: TensorInfo, part_facts: Sequence[Facts], stale: set[str]) -> Facts:
    if tensor.damage is not None:
        return Facts(tensor.elements, digest=None, reason=tensor.damage, damaged=True)
    if not part_facts:
        return Facts(tensor.elements, digest=None, reason=explain_no_data(tensor))
    for storage in tensor.ranges:
        if storage.path in stale:
            reason = f"{storage.path}: {tensor.fqn}: changed while statecli read it; audit the file again"
            return Facts(tensor.elements, digest=None, reason=reason, damaged=True)
    if not tensor.parts:
        return part_facts[0]
    facts = _merge_parts(tensor, part_facts)
    return replace(facts, contradiction=_check_indices(tensor)) if tensor.layout.startswith("sparse") else facts


def _check_indices(tensor: TensorInfo) -> str | None:
    try:
        return sparse.explain_invalid_indices(tensor)
    except StateError as error:
        return f"statecli cannot check its indices: {error}"


def _merge_parts(tensor: TensorInfo, part_facts: Sequence[Facts]) -> Facts:
    """Return the `Facts` about a tensor with several parts, such as a sparse tensor. The digest covers all parts."""
    names = [name for name, _ in tensor.parts]
    damaged_part = next((facts for facts in part_facts if facts.damaged), None)
    if damaged_part is not None:
        return damaged_part
    digest = _mix_digests([facts.digest for facts in part_facts])
    if "values" not in names:
        total = Facts()
        for facts in part_facts:
            total = total.merge(facts)
        return replace(total, low=None, high=None, only=None, digest=digest)
    values = part_facts[names.index("values")]
    implicit = tensor.elements - values.elements if tensor.layout.startswith("sparse") else 0
    if implicit > 0 and values.reason is None:
        has_order = values.low is not None or not values.elements
        zero = 0.0 if has_order else None
        values = values.merge(Facts(implicit, zeros=implicit, low=zero, high=zero))
    return replace(values, only=None, digest=digest)


def _mix_digests(digests: Sequence[int | None]) -> int | None:
    if None in digests:
        return None
    return facts_kernel.mix_bits(
        sum(facts_kernel.mix_bits(digest or 0) * (2 * n + 1) for n, digest in enumerate(digests)) & DIGEST_MASK
    )


def _confirm_digests(tensors: Sequence[TensorInfo], facts: Sequence[Facts], jobs: int) -> list[Facts]:
    """Return the facts. Tensors with equal fast digests, dtypes and shapes get SHA-256 digests instead."""
    groups: dict[object, list[int]] = {}
    for n, (tensor, tensor_facts) in enumerate(zip(tensors, facts, strict=True)):
        if tensor_facts.digest and tensor_facts.elements and tensor_facts.only is None:
            key = (tensor.section, tensor.dtype, tensor.shape, tensor_facts.digest)
            groups.setdefault(key, []).append(n)
    contents = [{(tensors[n].data, tensors[n].parts) for n in group} for group in groups.values()]
    suspects = [n for group, content in zip(groups.values(), contents, strict=True) if len(content) > 1 for n in group]
    if not suspects:
        return list(facts)
    digests = values.digest.compute_digests([tensors[n] for n in suspects], Algorithm.SHA256, jobs=jobs, derived=True)
    confirmed_facts = list(facts)
    for n, digest in zip(suspects, digests, strict=True):
        confirmed_facts[n] = replace(facts[n], digest=int(digest or "0", 16))
    return confirmed_facts
