"""What is wrong with the bytes that tensors take: too many of them, shared ones, of another type than was meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from statecli.core import quoting
from statecli.core.dtypes import BITS, is_floating, nbytes
from statecli.core.finding import Severity
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import Evidence, Kind, Place, TensorData, TensorInfo
from statecli.rules.rule import Found, rule
from statecli.rules.storage_views import Storage, View, apart, share
from statecli.rules.subject import Subject

#: Unused bytes of a storage that are worth a line: a page of memory.
UNUSED_BYTES = 4096
#: And the share of the storage that they are at least: libraries round up what many parameters lie in.
UNUSED_SHARE = 0.1

#: Steps in which views are tried for a byte that both have, in all of a target: some tenths of a second.
MAX_TRIES = 100_000

#: What a model loads. An optimizer's moments and a generator's state have dtypes of their own.
MODEL = (Kind.PARAMETER, Kind.BUFFER, Kind.UNREGISTERED)


def _in_file(subject: Subject) -> str | None:
    live = subject.state.traits.is_class
    return "the strides of a live tensor are not read: audit a checkpoint" if live else None


def _all_listed(subject: Subject) -> str | None:
    """A tensor that is not listed, or whose place is not known, may be what uses the bytes."""
    state = subject.everything
    hidden = any(odd.kind is OddityKind.TOO_DEEP for odd in state.oddities) or any(
        tensor.damage for tensor in state.tensors
    )
    return "not all tensors of the file can be read" if hidden else None


def _chosen(subject: Subject) -> Iterator[Storage]:
    """The storages of the tensors that were asked for, with all that lies in them; not those that one tensor fills."""
    shared = (storage for storage in subject.storages if not storage.plain)
    if subject.everything.tensors is subject.state.tensors:
        yield from shared
        return
    asked = {(tensor.section, tensor.fqn) for tensor in subject.state.tensors}
    for storage in shared:
        if any((tensor.section, tensor.fqn) in asked for tensor, _ in storage.users):
            yield storage


@rule(Severity.WARNING, _all_listed)
def oversized_storage(subject: Subject) -> Iterator[Found]:
    """A storage holds far more than the tensors that are views of it.

    Why: torch saves a tensor's whole storage, so that a row of a big matrix takes the matrix's room on disk, in every
    copy and in memory when it is loaded; and what was meant to be left out is in the file for everyone to read.

    Example: `state["w"] = big[:1024]` saves all of `big`: 4 MB for 4 KB.

    Fix: save copies of what is a part of something: `state["w"] = state["w"].clone()`.
    """
    for storage in _chosen(subject):
        unused = storage.unused
        if unused < max(UNUSED_BYTES, storage.size * UNUSED_SHARE):
            continue
        tensor, _ = storage.users[0]
        if all(one.saved is False for one, _ in storage.users):
            continue
        views = len(storage.views)
        using = f"{storage.size - unused:,} are used" + (f" by {views:,} tensors" if views > 1 else "")
        message = f"{subject.called(tensor)}: all {storage.size:,} bytes of its storage are saved, of which {using}"
        yield Found(message, tensor.fqn, tensor.section, "save a copy: .clone()", place=storage.place)


@rule(Severity.NOTE)
def tied_tensors(subject: Subject) -> Iterator[Found]:
    """Several names are one tensor: they share one storage entirely.

    Why: a change to the one is a change to all of them, after loading too. safetensors keeps one of the names and
    needs the class to tie the others again; a tool that copies tensor by tensor unties them and doubles their bytes.
    What an optimizer, a scheduler or a callback holds of a model, or twice of its own, is not told.

    Example: `lm_head.weight` and `embed.weight` of a language model with tied embeddings.

    Fix: nothing, where it is meant; `.clone()` one of them where not.
    """
    for storage in _chosen(subject):
        for view, tensors in storage.views.items():
            own = [tensor for tensor in tensors if tensor.kind in MODEL]
            called = list(dict.fromkeys(map(subject.called, own)))
            if len(called) > 1 and view.held:
                first = own[0]
                message = f"{called[0]}: shares all of its {first.nbytes:,} bytes with {quoting.names(called[1:])}"
                help = "nothing to do where it is meant; else save a copy: .clone()"
                yield Found(message, first.fqn, first.section, help, place=storage.place)


@rule(Severity.WARNING, _in_file)
def shared_slices(subject: Subject) -> Iterator[Found]:
    """Different views of one storage reach into one another's bytes.

    Why: writing to the one changes the other, which nothing in their names says. safetensors refuses to save them, and
    what copies tensor by tensor makes two tensors of them. Slices that lie apart, or in one another's gaps as the
    columns of a matrix do, do no such harm and are not flagged. Where too many lie in gaps for that to be told, a note
    says so.

    Example: `w` beside `w_t = w.t()`, or `table[:10]` beside `table[5:]`.

    Fix: save copies (`.clone()`), or the whole and take the slices after loading.
    """
    work = [MAX_TRIES]
    for storage in _chosen(subject):
        views = {view: tensors[0] for view, tensors in storage.views.items() if view.held}
        pairs = [pair for group in apart(list(views)) for pair in _clashes(group, work)]
        clashes = [(one, other) for one, other in pairs if one is not None]
        if clashes:
            one, other = clashes[0]
            others = len(clashes) - 1
            more = f"; so {'do' if others > 1 else 'does'} {others:,} more" if others else ""
            message = (
                f"{subject.called(views[other])}: bytes {other.start:,} to {other.end:,} of a storage of which "
                f"{subject.called(views[one])} has {one.start:,} to {one.end:,}{more}"
            )
            yield Found(message, views[other].fqn, views[other].section, "save a copy: .clone()", place=storage.place)
        if len(clashes) < len(pairs):
            yield _untold(subject, storage, len(views))


def _clashes(views: list[View], work: list[int]) -> Iterator[tuple[View | None, View]]:
    """Each view, in order of their starts, behind one before it that has a byte of it.

    None stands for that one where it cannot be told whether there is any; nothing is said then of those that follow.
    """
    reaching: list[tuple[int, int]] = []
    for n, view in enumerate(views):
        while reaching and reaching[0][0] <= view.start:
            heappop(reaching)
        for _, before in reaching:
            found = share(views[before], view, work)
            if found is None:
                yield None, view
                return
            if found:
                yield views[before], view
                break
        heappush(reaching, (view.end, n))


def _untold(subject: Subject, storage: Storage, count: int) -> Found:
    first = storage.users[0][0]
    why = "too many lie in one another's gaps"
    message = f"{subject.called(first)}: whether the {count:,} views of its storage share bytes cannot be told: {why}"
    return Found(message, first.fqn, first.section, "save copies: .clone()", Severity.NOTE, place=storage.place)


def _of_one_type(subject: Subject) -> str | None:
    return subject.state.traits.mixed_dtypes


@rule(Severity.NOTE, _of_one_type)
def mixed_dtypes(subject: Subject) -> Iterator[Found]:
    """The parameters of one model have several floating-point types.

    Why: an operator that gets two types raises an error or computes in the wider one, and `load_state_dict` casts to
    what the model has without a word. What mixed precision keeps is not told: norms and biases in float32 beside
    matrices of 16 bits or fewer.

    Example: one adapter saved in float32 among weights of float16.

    Fix: nothing, where it is meant; else `model.to(dtype)` before saving, and policy `dtype` to hold it there.
    """
    known, copies = _of_class(subject), _copies(subject)
    for section in subject.state.sections:
        rows = [one for one in subject.state.tensors if one.section == section and is_floating(one.dtype)]
        rows = [one for one in rows if one.data not in copies]
        rows = [one for one in rows if known.get((section, one.fqn), one).kind is Kind.PARAMETER]
        rows = _without_vectors(rows)
        counts = Counter(one.dtype for one in rows)
        if len(counts) > 1:
            shown = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())
            rare = min(counts, key=lambda dtype: counts[dtype])
            first = next(one for one in rows if one.dtype == rare)
            sure = all(known.get((section, one.fqn), one).evidence is not Evidence.ASSUMED for one in rows)
            what = "parameters" if sure else "tensors"
            message = f"{section}: its {what} have several dtypes: {shown}; {first.fqn} is {rare}"
            help = "nothing to do where it is meant; else model.to(dtype) before saving"
            yield Found(message, None, section, help)


def _without_vectors(rows: list[TensorInfo]) -> list[TensorInfo]:
    """Those of one dimension or none left out that are float32, where the others are narrower."""
    others = [one for one in rows if one.dtype != "float32" or len(one.shape or ()) > 1]
    matrices = {one.dtype for one in others if len(one.shape or ()) > 1}
    narrow = (
        matrices and all(nbytes(dtype, 1) <= 2 for dtype in matrices if dtype in BITS) and "float32" not in matrices
    )
    return others if narrow else rows


def _of_class(subject: Subject) -> dict[tuple[str, str], TensorInfo]:
    """What the class that it is held to registers under each name of it: that knows what is a parameter."""
    changes = subject.load.changes if subject.load else ()
    return {(one.before.section, one.before.fqn): one.after for one in changes if one.before and one.after}


def _copies(subject: Subject) -> set[TensorData | None]:
    """Where ZeRO 3 keeps weights as nothing but the optimizer's float32 copies, these: no dtype of the model's."""
    if not subject.state.traits.weights_are_optimizer_copies:
        return set()
    return {one.data for one in subject.everything.tensors if one.kind is Kind.OPTIMIZER and one.data is not None}


def _a_dtype(subject: Subject) -> str | None:
    return None if subject.policy.dtype else "no policy says which dtypes are meant: set policy.dtype"


@rule(Severity.ERROR, _a_dtype)
def unexpected_dtype(subject: Subject) -> Iterator[Found]:
    """A floating-point tensor of a model has another type than the policy allows.

    Why: a float32 tensor in a release of bfloat16 takes twice the room and time, and a float16 one may have lost
    values that are gone for good. Optimizer state keeps its own precision and is not held to it.

    Example: policy `dtype = ["bfloat16"]`, and `norm.weight` is float32.

    Fix: cast it before saving, or name its type in the policy.
    """
    allowed = {name.removeprefix("torch.") for name in subject.policy.dtype}
    copies = _copies(subject)
    for tensor in (one for one in subject.state.tensors if one.data not in copies):
        if tensor.kind in MODEL and is_floating(tensor.dtype) and tensor.dtype not in allowed:
            message = f"{subject.called(tensor)}: is {tensor.dtype}, the policy says {' or '.join(sorted(allowed))}"
            yield Found(
                message, tensor.fqn, tensor.section, "cast it before saving, or allow its dtype", place=_of(tensor)
            )


def _of(tensor: TensorInfo) -> Place | None:
    return tensor.data.storage.place if tensor.data else None


def _a_limit(subject: Subject) -> str | None:
    return None if subject.policy.max_bytes is not None else "no policy says how big it may be: set policy.max-bytes"


@rule(Severity.ERROR, _a_limit)
def too_large(subject: Subject) -> Iterator[Found]:
    """The tensors take more bytes than the policy allows.

    Why: what a registry, a device or a repository cannot hold is found out late, and an optimizer's state or a second
    copy of the weights that was saved by mistake shows first in the size. Storages count whole, shared ones once.

    Example: policy `max-bytes = 500000000`, and a checkpoint with its optimizer takes three times that.

    Fix: save less of it, in a narrower type, or raise `max-bytes`.
    """
    limit = subject.policy.max_bytes or 0
    state = subject.everything
    total = sum(storage.size for storage in subject.storages)
    total += sum(tensor.nbytes for tensor in state.tensors if tensor.data and tensor.data.inline is not None)
    if total > limit:
        sizes = Counter[str]()
        for tensor in state.tensors:
            sizes[tensor.section] += tensor.nbytes
        most = f", most of it in {sizes.most_common(1)[0][0]}" if len(sizes) > 1 else ""
        message = f"its tensors take {total:,} bytes{most}; the policy allows {limit:,}"
        yield Found(message, help="save less of it or in a narrower dtype, or raise policy.max-bytes")


RULES = (oversized_storage, tied_tensors, shared_slices, mixed_dtypes, unexpected_dtype, too_large)
