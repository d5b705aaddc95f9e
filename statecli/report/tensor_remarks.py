"""Text about a tensor next to its name: its remark, its problems in words, and its colour."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.core.model_state import Kind, NoteKind, TensorInfo
from statecli.core.units import COUNT_FIELDS, format_fix_in_line, format_origin, join_names
from statecli.report import RowView

#: Words for tensors with unusual values, in `list_problem_words` and in the verdict.
NAN, INF, OUTLIER = "NaN", "Inf", "outlier"
#: All words of `list_problem_words`, the worst first.
PROBLEM_WORDS = ("unreadable", "not registered", "not moved", NAN, INF, OUTLIER)


def list_problem_words(tensor: TensorInfo, *, is_outlier: bool) -> tuple[str, ...]:
    """Return the problems of a tensor in words, the worst first: `("NaN", "outlier")`."""
    stats, after = tensor.stats, tensor.after
    has_problem = (
        tensor.damage is not None,
        tensor.kind is Kind.UNREGISTERED and tensor.moves is False,
        after is not None and after.followed is not True,
        stats is not None and bool(stats.nan),
        stats is not None and bool(stats.inf),
        is_outlier,
    )
    return tuple(word for word, has in zip(PROBLEM_WORDS, has_problem, strict=True) if has)


def describe_list_remark(tensor: TensorInfo, outlier: str, view: RowView, *, is_live: bool, is_reported: bool) -> str:
    """Return why a tensor is an outlier, then its remarks. Ties are left out, because the list links tied tensors."""
    remark = describe_remark(
        replace(tensor, tied_to=()), describe_status(tensor, is_live), view, is_reported=is_reported
    )
    return ", ".join(filter(None, (outlier, remark)))


def choose_mood(tensor: TensorInfo) -> str:
    """Return "bad" or "warn" for a tensor that does not move with its model, or else ""."""
    if tensor.after is not None and tensor.after.followed is not True:
        return "bad"
    if tensor.kind is Kind.UNREGISTERED and tensor.moves is False:
        return "bad" if tensor.fix else "warn"
    return ""


def describe_status(tensor: TensorInfo, is_live: bool) -> str:
    """Describe whether the tensor is saved and, for a live model, moved."""
    parts = []
    if tensor.kind is Kind.UNREGISTERED:
        if not is_live:
            unknown = "not saved, unless the class itself saves the tensor"
            return {False: "not in a state_dict", True: "unexpected", None: unknown}[tensor.saved]
        parts.append(
            {False: "not saved", True: "saved", None: "statecli does not know whether the tensor is saved"}[
                tensor.saved
            ]
        )
    elif tensor.persistent is False:
        parts.append("non-persistent, but in the file" if tensor.saved else "not saved (non-persistent)")
    elif tensor.saved is False:
        parts.append("not saved")
    if tensor.after is None and is_live:
        if tensor.moves is not True:
            parts.append(
                {
                    False: "left on the old device by .to()",
                    None: "statecli does not know whether .to() moves the tensor",
                }[tensor.moves]
            )
        elif tensor.kind is Kind.UNREGISTERED:
            parts.append("moved by .to()")
    return ", ".join(parts)


def describe_remark(tensor: TensorInfo, status: str, view: RowView, *, is_reported: bool) -> str:
    """Return the facts about a tensor that have no column, with the most important first.

    For a reported tensor, leave out source line, unregistered module and fix, because its problem shows them.
    """
    parts = [status]
    if tensor.stats is not None:
        counts = ((name, getattr(tensor.stats, name)) for name in COUNT_FIELDS)
        parts.extend(f"{count:,} {name}" for name, count in counts if count)
        parts.append(tensor.stats.reason or "")
    if tensor.layout not in ("strided", "numpy"):
        parts.append(tensor.layout)
    if tensor.tied_to:
        parts.append(f"= {join_names(tensor.tied_to)}")
    if tensor.belongs_to and tensor.belongs_to != tensor.fqn:
        parts.append(f"of {tensor.belongs_to}")
    if tensor.note and not (is_reported and tensor.note_kind is NoteKind.IN_UNREGISTERED_MODULE):
        parts.append(tensor.note)
    if view.verbose:
        parts.extend(_describe_details(tensor, is_reported=is_reported))
    elif tensor.kind is Kind.UNREGISTERED and tensor.origin and not is_reported:
        parts.append(format_origin(tensor.origin))
    return ", ".join(part for part in parts if part)


def _describe_details(tensor: TensorInfo, *, is_reported: bool) -> list[str]:
    parts = [f"evidence: {tensor.evidence.value}"]
    if tensor.aliases:
        parts.append(f"also {join_names(tensor.aliases)}")
    if tensor.origin:
        parts.append(format_origin(tensor.origin))
    if tensor.fix and not is_reported:
        parts.append(f"fix: {format_fix_in_line(tensor.fix)}")
    place = tensor.data.storage.place if tensor.data is not None else None
    if place is not None:
        parts.append(f"bytes {place.offset}+{place.length}")
    return parts
