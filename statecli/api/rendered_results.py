"""Convert a result to text, to HTML for notebooks, to a JSON document or to a data frame."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from statecli.commands.audit.result import Audit
from statecli.commands.diff.result import Diff
from statecli.commands.inspect.run import Inspection
from statecli.commands.lock.lock_file import Lock, LockedTensor, encode_lock
from statecli.commands.verify.result import Verification
from statecli.core.errors import MissingDependency
from statecli.core.installed_package import install_packages
from statecli.core.terminal_width import get_terminal_width
from statecli.render import Output, RenderOptions, format_report, html
from statecli.report import Report, RowView, View
from statecli.report.audit import build_audit_report
from statecli.report.diff import build_diff_report
from statecli.report.diff_view import DiffView
from statecli.report.inspect import build_inspect_report
from statecli.report.verify import build_verify_report

if TYPE_CHECKING:
    import pandas

Result = Inspection | Diff | Verification | Audit | Lock

#: Largest number of rows of a table in a notebook, because a browser is slow with more.
_NOTEBOOK_LINES = 500


def format_text(result: Result) -> str:
    """Return the table of a result, as wide as the terminal (or 80 columns). Return a lock as the text of its file."""
    if isinstance(result, Lock):
        return b"".join(encode_lock(result)).decode().rstrip("\n")
    options = RenderOptions(terminal=True, width=get_terminal_width(1))
    return format_report(build_report(result), Output.TABLE, options).rstrip("\n")


def format_html(result: Result) -> str:
    """Return the HTML page of a result as a fragment for another page, such as a notebook."""
    if isinstance(result, Lock):
        from html import escape

        return f"<pre>{escape(format_text(result))}</pre>"
    # A short result gets no limit, because a limit changes the order of the rows.
    is_long = _count_rows(result) > _NOTEBOOK_LINES
    return html.format_fragment(build_report(result, lines=_NOTEBOOK_LINES if is_long else None))


def _count_rows(result: Result) -> int:
    if isinstance(result, Diff):
        return len(result.changes)
    return len(result.state.tensors) if isinstance(result, Inspection) else 0


def to_dict(result: Result) -> dict[str, Any]:
    """Return the JSON document of a result."""
    if isinstance(result, Lock):
        text = format_text(result)
    else:
        text = format_report(build_report(result), Output.JSON, RenderOptions())
    document: dict[str, Any] = json.loads(text)
    return document


def to_pandas(result: Result) -> pandas.DataFrame:
    """Return the flat table of the result as a data frame. Raises MissingDependency."""
    try:
        import pandas
    except ImportError as error:
        raise MissingDependency(f"to_pandas needs the package pandas: {install_packages('pandas')}") from error
    if isinstance(result, Lock):
        names = ("target", *LockedTensor.__struct_fields__)
        rows = [
            (target.target, *msgspec.structs.astuple(tensor)) for target in result.targets for tensor in target.tensors
        ]
        return pandas.DataFrame(rows, columns=names)
    table = build_report(result, unchanged=True).table()
    return pandas.DataFrame(list(table.rows), columns=[column.name for column in table.columns])


def build_report(
    result: Inspection | Diff | Verification | Audit, *, lines: int | None = None, unchanged: bool = False
) -> Report:
    """Return a result's report. `lines` limits the rows of each group; `unchanged` adds the unchanged tensors."""
    if isinstance(result, Inspection):
        return build_inspect_report(result, RowView(lines=lines))
    if isinstance(result, Diff):
        return build_diff_report(result, DiffView(lines=lines, unchanged=unchanged))
    if isinstance(result, Verification):
        return build_verify_report(result, View())
    return build_audit_report(result, View())
