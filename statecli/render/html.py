"""`-f html`: a page in a single file. The page loads nothing else, and shows names as text, never as markup.

The page's content security policy admits only the page's own style and script, by their hashes. Even if a name were
taken for markup, a browser would not run the name. A browser without scripts shows a table of the tensors instead of
the filter list.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from statecli.core import escaping
from statecli.core.json_text import encode_json
from statecli.core.model_state import TensorKey
from statecli.core.units import format_fqn
from statecli.core.version import __version__
from statecli.render import RenderOptions, Sink, _chart_geometry, _curve_geometry
from statecli.report import Bars, Curve, Line, Page, Report, ReportColumn, Spread
from statecli.report.source_lines import read_lines_around
from statecli.report.tensor_list import TensorList

if TYPE_CHECKING:
    import jinja2

#: Number of template events that are written together: a page of 40,000 rows is never in memory as a whole.
BUFFERED_EVENTS = 2_000


#: Largest number of lines of a group in the table for browsers without scripts, next to a list of tensors.
MAX_LINES_WITHOUT_SCRIPT = 5_000

#: Scripts of a list of tensors, each after the scripts that it uses.
LIST_SCRIPTS = ("filter.js", "globs.js", "names.js", "tensors.js")

#: Largest number of settings of a group on the page, and of a group that the page shows open at first.
MAX_SETTINGS = 1_000
MAX_OPEN_SETTINGS = 12

#: Class of the element around a fragment; the style of the fragment applies only inside.
FRAGMENT_CLASS = "statecli-result"


def format_fragment(report: Report) -> str:
    """Return the content of the page for a notebook: an element with its own style, without scripts and charts.

    The style is that of the page, nested in a rule for the element.
    """
    style = re.sub(r"(?m)^( *)(?::root|body) {", r"\1& {", _read_resource("page.css"))
    prefix = f"{FRAGMENT_CLASS}-{id(report)}-"  # ids must be unique in a notebook with several results
    content = "".join(_stream(report, fragment=prefix, quiet=False))
    inset = ".title { margin: 0; font-weight: 600; }\n& { padding: 0.5rem 0.75rem; max-width: none; }\n"
    return f'<style>.{FRAGMENT_CLASS} {{\n{style}{inset}}}</style>\n<div class="{FRAGMENT_CLASS}">\n{content}</div>\n'


def write(report: Report, sink: Sink, options: RenderOptions) -> None:
    stream = _stream(report, fragment="", quiet=options.quiet)
    stream.enable_buffering(BUFFERED_EVENTS)
    for part in stream:
        sink.utf8(part.encode("utf-8"))


def _stream(report: Report, *, fragment: str, quiet: bool) -> jinja2.environment.TemplateStream:
    """Return the page in pieces. `fragment` is "" for a whole page, or the prefix of ids in a part of another page."""
    page = report.page()
    has_list = report.tensor_list is not None and not (quiet or fragment)
    tensor_list = report.tensor_list() if report.tensor_list is not None and has_list else None
    charts = () if quiet or fragment else report.charts()
    links = _Links(page, charts, tensor_list)
    return _load_template().stream(
        report=report,
        page=page,
        fragment=fragment,
        quiet=quiet,
        charts=[_build_picture(chart) for chart in charts],
        values_command=tensor_list.values_command if tensor_list is not None else "",
        find_row=links.find_row,
        find_row_id=links.find_row_id,
        has_links=links.has_links,
        remarks=any(line.remark for group in page.groups for line in group.lines),
        tensor_list=_encode_tensor_list(tensor_list) if tensor_list is not None else "",
        max_lines=MAX_LINES_WITHOUT_SCRIPT if has_list else None,
        settings=report.settings() if has_list else (),
        max_settings=MAX_SETTINGS,
        max_open_settings=MAX_OPEN_SETTINGS,
        style=_read_resource("page.css")
        + _label_cells(page.columns)
        + (_read_resource("tensors.css") if has_list else ""),
        scripts=[_read_resource(name) for name in ("page.js", *(LIST_SCRIPTS if has_list else ()))],
        version=__version__,
    )


class _Links:
    """Links from the charts of a page to the tensors on the page."""

    def __init__(self, page: Page, charts: Iterable[Bars | Curve | Spread], tensor_list: TensorList | None) -> None:
        drawn_tensors = {tensor for chart in charts if not isinstance(chart, Spread) for tensor in chart.tensors}
        self._by_section = tensor_list is not None and len(tensor_list.sections.values) > 1
        self._has_list = tensor_list is not None
        self._row_ids: dict[int, str] = {}
        self._targets: dict[TensorKey, str] = {}
        for line in (
            (line for group in page.groups for line in group.lines) if drawn_tensors and not self._has_list else ()
        ):
            tensors_of_line = drawn_tensors.intersection(line.tensors)
            if tensors_of_line:
                self._row_ids[id(line)] = f"row-{len(self._row_ids) + 1}"
                self._targets |= dict.fromkeys(tensors_of_line, self._row_ids[id(line)])

    def find_row_id(self, line: Line) -> str:
        """Return the id of the row if a chart links to the row, or "" otherwise."""
        return self._row_ids.get(id(line), "")

    def find_row(self, tensor: TensorKey | None) -> str:
        """Return the address of a tensor on the page, without `#`, or "" if the page does not list the tensor."""
        if tensor is None or not self._has_list:
            return "" if tensor is None else self._targets.get(tensor, "")
        section, fqn = tensor
        name = escaping.escape(format_fqn(fqn))
        label = f"{escaping.escape(section or '(top level)')}: {name}" if self._by_section else name
        return f"tensor={quote(label, safe='')}"

    def has_links(self, picture: _chart_geometry.Picture) -> bool:
        tensors = [*(mark.tensor for mark in picture.marks), *(point.tensor for point in picture.points)]
        return any(map(self.find_row, tensors))


def _label_cells(columns: Sequence[ReportColumn]) -> str:
    """Return CSS that puts the name of the column before each cell on a phone, where a row takes several lines."""
    rules = (
        f".facts td:nth-child({n}):not(:empty)::before {{ content: {_quote_css(column.name + ' ')}; }}"
        for n, column in enumerate(columns, 1)
        if n > 1 and column.name and not column.optional
    )
    return "@media (max-width: 46rem) {\n" + "\n".join(rules) + "\n}\n"


def _quote_css(text: str) -> str:
    return '"' + "".join(c if c.isalnum() or c in " .|" else f"\\{ord(c):x} " for c in text) + '"'


def _encode_tensor_list(tensor_list: TensorList) -> str:
    """Return the list as JSON without `<`, so that the JSON cannot end the element of the page that contains it."""
    return encode_json(tensor_list).decode().replace("<", "\\u003c")


def _build_picture(chart: Bars | Curve | Spread) -> _chart_geometry.Picture:
    if isinstance(chart, Curve):
        return _curve_geometry.build_curve_picture(chart)
    return _chart_geometry.build_picture(chart)


@cache
def _load_template() -> jinja2.Template:
    """Return the page's template, which escapes every value and makes invisible characters visible."""
    import jinja2
    from markupsafe import Markup

    def escape_value(value: object) -> Any:
        return value if isinstance(value, Markup) else escaping.escape(str(value))

    environment = jinja2.Environment(
        autoescape=True,
        finalize=escape_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["name"] = partial(escaping.truncate_middle, width=escaping.MAX_NAME_CHARACTERS)
    environment.filters["sentence"] = partial(escaping.truncate_middle, width=escaping.MAX_SENTENCE_CHARACTERS)
    environment.filters["lines_around"] = read_lines_around
    environment.filters["csp_hash"] = _compute_csp_hash
    environment.filters["visible"] = escaping.escape
    environment.filters["px"] = _format_length
    environment.filters["trusted"] = Markup
    return environment.from_string(_read_resource("page.html.j2"))


def _format_length(length: float) -> str:
    """Format a length in pixels with at most one decimal."""
    return f"{length:.1f}".removesuffix(".0")


def _read_resource(name: str) -> str:
    """Return the text of a file in this folder."""
    return resources.files("statecli.render").joinpath(name).read_text("utf-8")


def _compute_csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
