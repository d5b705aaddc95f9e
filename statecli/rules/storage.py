"""Rules about storages and dtypes: unused bytes, shared bytes, and dtypes or sizes that the policy forbids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, is_floating, nbytes
from statecli.core.finding import Severity
from statecli.core.model_state import Evidence, Kind, TensorData, TensorInfo, TensorKey
from statecli.core.move_rules import map_broken_ties
from statecli.core.oddity_kind import OddityKind
from statecli.core.parameter_or_buffer import MODEL_KINDS
from statecli.core.quantized_weights import find_quantized_by_section
from statecli.core.tied_tensors import SAVE_TIES_AS_SAFETENSORS, find_tie_line
from statecli.core.units import plural
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject, needs_file
from statecli.rules.storage_views import Storage, StorageView, group_by_storage, have_common_byte

#: Smallest reported number of unused bytes: a page of memory.
MIN_UNUSED_BYTES = 4096
#: Smallest reported unused fraction of a storage, because libraries pad shared buffers.
MIN_UNUSED_SHARE = 0.1

#: Largest number of steps of the search for common bytes in a target: some tenths of a second. About 400 interleaved
#: views take as many steps.
MAX_SEARCH_STEPS = 100_000


def _needs_all_tensors(subject: Subject) -> str | None:
    """Return why unused bytes are not reported: an unreadable tensor may use the bytes. Otherwise return None."""
    state = subject.full_state
    has_unread_tensors = any(oddity.kind is OddityKind.TOO_DEEP for oddity in state.oddities) or any(
        tensor.damage for tensor in state.tensors
    )
    return "not all tensors of the file can be read" if has_unread_tensors else None


def _select_storages(subject: Subject) -> Iterator[Storage]:
    """Yield the storages with a selected tensor that are shared by several tensors or not fully used."""
    shared = subject.divided_storages
    if subject.full_state.tensors is subject.state.tensors:
        yield from shared
        return
    selected_names = {tensor.key for tensor in subject.state.tensors}
    for storage in shared:
        if any(tensor.key in selected_names for tensor, _ in storage.users):
            yield storage


@rule(Severity.WARNING, _needs_all_tensors)
def oversized_storage(subject: Subject) -> Iterator[Issue]:
    """A saved storage is much larger than its tensors, which are views.

    Why: torch saves the whole storage of a tensor. So a row of a large matrix takes the space of the matrix on disk, in
    every copy and in memory. The data that you meant to leave out is in the file for everyone to read.

    Example: `state["w"] = big[:1024]` saves all of `big`: 4 MB for 4 KB.

    Fix: save a copy of a slice: `state["w"] = state["w"].clone()`.
    """
    for storage in _select_storages(subject):
        unused = storage.unused_bytes
        if unused < max(MIN_UNUSED_BYTES, storage.size * MIN_UNUSED_SHARE):
            continue
        tensor, _ = storage.users[0]
        if all(user.saved is False for user, _ in storage.users):
            continue
        views = len(storage.views)
        users_text = f" by {views:,} tensors" if views > 1 else ""
        usage = f"only {storage.size - unused:,} are used{users_text}"
        text = f"all {storage.size:,} bytes of its storage are saved, but {usage}"
        yield report_tensor(subject, tensor, text, "save a copy with .clone()", place=storage.place)


@rule(Severity.NOTE)
def tied_tensors(subject: Subject) -> Iterator[Issue]:
    """Several names refer to the same tensor (tied weights).

    Why: a change to one name changes all names, also after loading. `safetensors.torch.save_model` stores only one of
    the names, and the class must tie the other names again after the load. A tool that copies tensor by tensor unties
    the weights and doubles their bytes. The rule reports only tensors of models, not tensors of an optimizer, a
    scheduler or a callback.

    Example: `lm_head.weight` and `embed.weight` of a language model with tied embeddings.

    Fix: no action is needed if the weights are tied on purpose; otherwise `.clone()` one of the weights. Write
    safetensors with `safetensors.torch.save_model` and read the file with `load_model`, because `save_file` refuses
    tied weights.
    """
    broken_ties = map_broken_ties(subject.module) if subject.module and subject.state.traits.is_class else {}
    for storage in _select_storages(subject):
        for view, tensors in storage.named_views.items():
            model_tensors = [tensor for tensor in tensors if tensor.kind in MODEL_KINDS]
            names = list(dict.fromkeys(map(subject.name_of, model_tensors)))
            if len(names) > 1 and view.byte_count and not any(tensor.fqn in broken_ties for tensor in model_tensors):
                first = model_tensors[0]
                message = f"{names[0]}: shares all of its {first.nbytes:,} bytes with {quoting.names(names[1:])}"
                line, help = find_tie_line(model_tensors), _build_tie_help(subject, model_tensors)
                yield Issue(message, first.fqn, first.section, help, origin=line, place=storage.place)


def _build_tie_help(subject: Subject, tied_rows: Sequence[TensorInfo]) -> str:
    """Return the remedy for tied weights, with safetensors' `save_model` if `save_file` refuses the state_dict."""
    help = "intentional for tied weights; otherwise save a copy with .clone()"
    in_state_dict = {row.key for row in tied_rows if row.is_in_state_dict}
    names_by_section = Counter(section for section, _ in in_state_dict)
    if subject.state.traits.drops_tied_names or max(names_by_section.values(), default=0) < 2:
        return help
    return f"{help}; for safetensors, {SAVE_TIES_AS_SAFETENSORS}"


@rule(Severity.WARNING, needs_file, cases={"inconclusive": Severity.NOTE})
def shared_slices(subject: Subject) -> Iterator[Issue]:
    """Different views of a storage share some of their bytes.

    Why: a write to one view also changes the other view, but the names do not show the link. safetensors refuses to
    save the views, and a tool that copies tensor by tensor separates the views. Views without a common byte are not
    reported, even if they are interleaved like the columns of a matrix. If a storage has too many interleaved views for
    a full check (more than 400), the finding is a note.

    Example: `w` next to `w_t = w.t()`, or `table[:10]` next to `table[5:]`.

    Fix: save copies (`.clone()`), or save the whole tensor and slice the tensor after loading.
    """
    work = [MAX_SEARCH_STEPS]
    for storage in _select_storages(subject):
        views = {view: tensors[0] for view, tensors in storage.named_views.items() if view.byte_count}
        pairs = list(_find_clashes(sorted(views, key=lambda view: (view.start, -view.end)), work))
        clashes = [(first, second) for first, second in pairs if first is not None]
        if clashes:
            first, second = clashes[0]
            others = len(clashes) - 1
            more = f"; {plural(others, 'more view')} {'overlap' if others > 1 else 'overlaps'}" if others else ""
            extents = f"({_describe_extents(second, first)} of one storage)"
            text = f"shares bytes with {subject.name_of(views[first])} {extents}{more}"
            help = "save a copy with .clone()"
            yield report_tensor(subject, views[second], text, help, place=storage.place)
        if len(clashes) < len(pairs):
            yield _report_inconclusive(subject, storage, len(views))


def _describe_extents(view: StorageView, other: StorageView) -> str:
    extents = [f"bytes {each.start:,} to {each.end:,}" for each in (view, other)]
    return f"both are {extents[0]}" if extents[0] == extents[1] else " and ".join(extents)


def _find_clashes(views: list[StorageView], work: list[int]) -> Iterator[tuple[StorageView | None, StorageView]]:
    """Yield (earlier view, view) for each view that shares a byte with an earlier view; `views` are sorted by start.

    (None, view) is the last pair if the search ran out of `work`: then nothing is known about the following views.
    """
    reaching: list[tuple[int, int]] = []
    for n, view in enumerate(views):
        while reaching and reaching[0][0] <= view.start:
            heappop(reaching)
        for _, before in reaching:
            has_common_byte = have_common_byte(views[before], view, work)
            if has_common_byte is None:
                yield None, view
                return
            if has_common_byte:
                yield views[before], view
                break
        heappush(reaching, (view.end, n))


def _report_inconclusive(subject: Subject, storage: Storage, count: int) -> Issue:
    text = (
        f"statecli does not know whether the {count:,} views of its storage share bytes: too many views are interleaved"
    )
    help, severity = "save copies with .clone()", shared_slices.cases["inconclusive"]
    return report_tensor(subject, storage.users[0][0], text, help, severity, place=storage.place)


def _needs_uniform_dtypes(subject: Subject) -> str | None:
    return subject.state.traits.mixed_dtypes


@rule(Severity.NOTE, _needs_uniform_dtypes)
def mixed_dtypes(subject: Subject) -> Iterator[Issue]:
    """The parameters of a model have several floating-point dtypes.

    Why: an operator with operands of two dtypes raises an error or computes in the wider dtype, and `load_state_dict`
    silently casts to the dtype of the model. Usual mixed precision is not reported: norms and biases in float32 next to
    matrices of 16 bits or fewer, and the codes and scales of quantized weights.

    Example: an adapter saved in float32 among weights of float16.

    Fix: no action is needed if different dtypes are intended; otherwise call `model.to(dtype)` before saving. To
    enforce a single dtype, set `policy.dtype`.
    """
    if sum(map(is_floating, {tensor.dtype for tensor in subject.state.tensors})) < 2:
        return
    of_class, copies = _pair_with_class(subject), _find_optimizer_copies(subject)
    quantized = find_quantized_by_section(subject.state.tensors)
    parts = {part.key for weight in quantized for part in weight.parts.values()}
    for section in subject.state.sections:
        rows = [row for row in subject.state.tensors if row.section == section and is_floating(row.dtype)]
        rows = [row for row in rows if row.data not in copies] if copies else rows
        rows = [row for row in rows if row.key not in parts] if parts else rows
        rows = [row for row in rows if (of_class.get(row.key, row) if of_class else row).kind is Kind.PARAMETER]
        rows = _drop_float32_vectors(rows)
        counts = Counter(row.dtype for row in rows)
        if len(counts) > 1:
            counts_text = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())
            rare = min(counts, key=lambda dtype: counts[dtype])
            first = next(row for row in rows if row.dtype == rare)
            is_certain = all(of_class.get(row.key, row).evidence is not Evidence.ASSUMED for row in rows)
            noun = "parameters" if is_certain else "tensors"
            message = f"{section}: {noun} have several dtypes: {counts_text}; {first.fqn} is {rare}"
            help = "no action is needed if different dtypes are intended; otherwise call model.to(dtype) before saving"
            yield Issue(message, None, section, help)


def _drop_float32_vectors(rows: list[TensorInfo]) -> list[TensorInfo]:
    """Remove float32 vectors and scalars from a list of tensors if all its matrices have narrower dtypes."""
    others = [row for row in rows if row.dtype != "float32" or len(row.shape or ()) > 1]
    matrices = {row.dtype for row in others if len(row.shape or ()) > 1}
    narrow = (
        matrices
        and all(nbytes(dtype, 1) <= 2 for dtype in matrices if dtype in ELEMENT_BITS)
        and "float32" not in matrices
    )
    return others if narrow else rows


def _pair_with_class(subject: Subject) -> dict[TensorKey, TensorInfo]:
    """Map each checkpoint tensor, by (section, name), to the tensor of the class that receives its values."""
    changes = subject.load_diff.changes if subject.load_diff else ()
    return {change.before.key: change.after for change in changes if change.before and change.after}


def _find_optimizer_copies(subject: Subject) -> set[TensorData | None]:
    """Return the data of the float32 weights in the optimizer. ZeRO-3 stores these copies instead of the weights."""
    if not subject.state.traits.weights_are_optimizer_copies:
        return set()
    return {
        tensor.data
        for tensor in subject.full_state.tensors
        if tensor.kind is Kind.OPTIMIZER and tensor.data is not None
    }


def _needs_dtype_policy(subject: Subject) -> str | None:
    return None if subject.policy.dtype else "no allowed dtypes are configured: set policy.dtype"


@rule(Severity.ERROR, _needs_dtype_policy)
def unexpected_dtype(subject: Subject) -> Iterator[Issue]:
    """A floating-point tensor of a model has a dtype that the policy does not allow.

    Why: a float32 tensor in a bfloat16 release takes twice the space and time. A float16 tensor may have lost values:
    large values became infinite, and small values became zero. Optimizer state keeps its own precision and is not
    checked.

    Example: `policy.dtype = ["bfloat16"]`, and `norm.weight` is float32.

    Fix: cast the tensor before saving, or add its dtype to the policy.
    """
    allowed_dtypes = {name.removeprefix("torch.") for name in subject.policy.dtype}
    copies = _find_optimizer_copies(subject)
    for tensor in (row for row in subject.state.tensors if row.data not in copies):
        if tensor.kind in MODEL_KINDS and is_floating(tensor.dtype) and tensor.dtype not in allowed_dtypes:
            allows = f"policy.dtype allows only {' or '.join(sorted(allowed_dtypes))}"
            help = "cast the tensor before saving, or allow its dtype in the policy"
            place = tensor.data.storage.place if tensor.data else None
            yield report_tensor(subject, tensor, f"dtype is {tensor.dtype}, {allows}", help, place=place)


def _needs_size_policy(subject: Subject) -> str | None:
    return None if subject.policy.max_bytes is not None else "no size limit is configured: set policy.max-bytes"


@rule(Severity.ERROR, _needs_size_policy)
def too_large(subject: Subject) -> Iterator[Issue]:
    """The tensors take more bytes than the policy allows.

    Why: a registry, a device or a repository rejects a checkpoint that is too large, but late. The size also reveals an
    optimizer state or a second copy of the weights, saved by mistake. Each storage counts with all its bytes, and a
    shared storage counts once.

    Example: `policy.max-bytes = 500000000`, and a checkpoint with its optimizer takes three times as many bytes.

    Fix: save fewer tensors, use a narrower dtype, or raise `max-bytes`.
    """
    limit = subject.policy.max_bytes or 0
    state = subject.full_state
    total = sum(storage.size for storage in group_by_storage(state))
    total += sum(tensor.nbytes for tensor in state.tensors if tensor.data and tensor.data.inline is not None)
    if total > limit:
        sizes = Counter[str]()
        for tensor in state.tensors:
            sizes[tensor.section] += tensor.nbytes
        largest_section_text = f", most of them in {sizes.most_common(1)[0][0]}" if len(sizes) > 1 else ""
        message = f"tensors take {total:,} bytes{largest_section_text}; policy.max-bytes allows {limit:,}"
        yield Issue(message, help="save fewer tensors, use a narrower dtype, or raise policy.max-bytes")


RULES = (oversized_storage, tied_tensors, shared_slices, mixed_dtypes, unexpected_dtype, too_large)
