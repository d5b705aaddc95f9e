"""Check the options of `inspect` and `diff` that select, sort and limit rows, and build the view of the rows."""

from __future__ import annotations

from statecli.core.errors import option
from statecli.render import Output
from statecli.report import RowView
from statecli.requests.options import DiffOptions, InspectOptions
from statecli.requests.parameters import refuse_contradictions

#: Outputs that contain every tensor, whatever the options for rows.
COMPLETE_OUTPUTS = (Output.JSON, Output.JSONL, Output.CSV)


def check_rows(options: InspectOptions | DiffOptions) -> None:
    """Raise UsageError if the command would ignore an option."""
    options.selection.check()
    top, lines, order = name_row_options(options)
    tree = option("--tree") if options.tree else ""
    complete = option("-f", options.output_format.value) if options.output_format in COMPLETE_OUTPUTS else ""
    refuse_contradictions([(top, lines), (tree, top or order), (top or lines or order, complete)])


def build_row_view(options: InspectOptions | DiffOptions) -> RowView:
    """Return the options of the human-readable rows."""
    return RowView(
        unfold=options.all,
        tree=options.tree,
        verbose=options.verbose,
        sort=options.sort,
        top=options.top,
        lines=options.lines,
        parts=isinstance(options, InspectOptions) and options.parts,
    )


def name_row_options(options: InspectOptions | DiffOptions) -> tuple[str, str, str]:
    """Return `--top`, `-n` and `--sort` with their values, for a message. An option that is not given is ""."""
    return (
        option("--top", options.top) if options.top is not None else "",
        option("-n", options.lines) if options.lines is not None else "",
        option("--sort", options.sort.value) if options.sort is not None else "",
    )
