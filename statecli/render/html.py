"""`-f html`: one page that stands by itself. Names are text wherever they stand, and nothing is fetched.

The page's content security policy admits exactly its own style and script, by their hashes: were a name ever taken for
markup, a browser would still not run it. Everything is there without the script, which only sorts.
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from statecli.core import escaping
from statecli.core.version import __version__
from statecli.render import _charts
from statecli.report import Report

if TYPE_CHECKING:
    import jinja2

    from statecli.render import Look, Sink

#: Template events that are handed on at once; a page of 40,000 rows is never held whole.
BUFFERED = 2_000


def write(report: Report, sink: Sink, look: Look) -> None:
    style, script = _own("page.css"), _own("page.js")
    page = report.page()
    stream = _template().stream(
        report=report,
        page=page,
        quiet=look.quiet,
        charts=[] if look.quiet else [_charts.drawn(chart) for chart in report.charts()],
        remarks=any(line.remark for group in page.groups for line in group.lines),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        version=__version__,
    )
    stream.enable_buffering(BUFFERED)
    for part in stream:
        sink.utf8(part.encode("utf-8"))


def _template() -> jinja2.Template:
    """The page. Whatever it writes is made visible first and escaped then, with nothing for the template to forget."""
    import jinja2
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else escaping.escape(str(value))

    rules = jinja2.Environment(
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    rules.filters["name"] = partial(_elided, escaping.MAX_NAME_CHARACTERS)
    rules.filters["sentence"] = partial(_elided, escaping.MAX_SENTENCE_CHARACTERS)
    rules.filters["px"] = _px
    rules.filters["own"] = Markup
    return rules.from_string(_own("page.html.j2"))


def _elided(width: int, text: str) -> str:
    return escaping.truncate_middle(text, width)


def _px(length: float) -> str:
    """A length with as many digits as can be seen."""
    return f"{length:.1f}".removesuffix(".0")


def _own(name: str) -> str:
    """The text of a file beside this one."""
    return resources.files("statecli.render").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    """As a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
