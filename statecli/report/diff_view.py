"""Options for showing a diff, and the changes that are shown with these options."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from statecli.commands.diff.result import Change, Diff, Status
from statecli.core.error_causes import Failure
from statecli.core.model_state import TensorInfo
from statecli.report import RowView
from statecli.report.change_text import format_name


class NameList(str, Enum):
    """Forms of a list of names, as in git: the names only, or each name with its status."""

    ONLY = "only"
    STATUS = "status"


class DiffView(RowView, frozen=True):
    """Options for showing a diff. `unchanged` lists identical tensors too."""

    names: NameList | None = None
    unchanged: bool = False


def needs_sections(diff: Diff) -> bool:
    """Return whether the diff has several sections, so that names need their section in front."""
    sections = {change.section for change in diff.changes}
    return len(sections | {failure.section for failure in diff.broken if failure.section}) > 1


def list_damaged(diff: Diff) -> list[TensorInfo]:
    """Return the tensors of the second checkpoint that could not be compared, because reading a file failed."""
    if not diff.broken:
        return []
    compared_names = {change.key for change in diff.changes}
    missing = {failure.key for failure in diff.broken} - compared_names
    return [tensor for tensor in diff.after.tensors if tensor.key in missing]


def list_broken(diff: Diff) -> list[Failure]:
    """Return name and reason of each tensor that could not be compared."""
    has_sections = needs_sections(diff)
    names = [(format_name(broken.fqn, broken.section, has_sections), broken) for broken in diff.broken]
    return [Failure(name, broken.message.replace(f": {broken.fqn}: ", f": {name}: ", 1)) for name, broken in names]


def select_different(diff: Diff) -> list[Change]:
    """Return the changes of all tensors that differ."""
    return [change for change in diff.changes if change.status is not Status.IDENTICAL]


def select_listed(diff: Diff, view: DiffView) -> Sequence[Change]:
    """Return the changes that get a row: the differences or, with `--unchanged`, all changes."""
    return diff.changes if view.unchanged else select_different(diff)
