"""The HTML page is complete, inert, and readable without its script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from statecli import render
from statecli.core.escaping import escape
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Oddity, Origin
from statecli.render import Output, RenderOptions
from statecli.report import Bars, Group, Line, Page, Problem, Report, ReportColumn, Spread, Table, build_problem
from statecli.report.problems import group_findings

#: HTML's elements without content.
VOID = {"meta", "link", "img", "br", "hr", "input"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style><b>x",
    "{{ 7 * 7 }}{% raw %}",
    "]]><!--",
    "&lt;b&gt; &amp;",
    "a\x1b[31m\u202eb\x00\n\ud800",
]


class Tree(HTMLParser):
    """The tags, texts and attributes of a page; an unbalanced tag fails at once."""

    def __init__(self, raw):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.rows = [], [], [], [], []
        self.feed(raw.decode("utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def texts_in(self, tag):
        """Return all text directly inside a tag."""
        return [text for where, text in self.texts if where == tag]

    def classes(self, tag):
        return [value for where, name, value in self.attributes if where == tag and name == "class"]


COLUMNS = (ReportColumn("name"), ReportColumn("dtype"), ReportColumn("size", right=True))


def page(**changes):
    lines = (Line(("fc.weight", "float32", "24 B")), Line(("fc.bias", "float32", "8 B"), "= x", "bad"))
    fields = {"subtitle": "2 tensors", "columns": COLUMNS, "groups": (Group("parameters", "2 tensors", lines),)}
    return Page(**{**fields, "totals": ("parameter    2 tensors",), **changes})


def report(content=None, title="net.pt", **changes):
    content = content or page()
    problems = tuple(finding for problem in content.problems for finding in problem.findings)
    return Report(title, msgspec.Struct, lambda: Table((), ()), lambda: content, findings=problems, **changes)


def render_html(about, **look):
    return render.format_report(about, Output.HTML, RenderOptions(**look)).encode()


def tree(about, **look):
    return Tree(render_html(about, **look))


def bars(values, labels=None):
    return Bars("change", tuple(labels or (f"l.{n}.w" for n in range(len(values)))), tuple(values), "relative L2")


def fill_report(text, bar_count=501):
    """Return a report with the text in every place that a file or a user may fill; more than 500 bars are cut."""
    finding = Finding(text, Severity.ERROR, text, text, text, help=text)
    content = Page(
        subtitle=text,
        columns=(ReportColumn(text), ReportColumn(text, right=True)),
        groups=(Group(text, text, (Line((text, text), text, "bad"),)),),
        totals=(text,),
        problems=(Problem(text, Severity.ERROR, text, text, (finding,), (text,), text, Origin(text, 7), text),),
    )
    charts = (Bars(text, (text, text), (1.0, math.nan), text), Spread(text, (-1.0, 0.0, 1.0), (3, 4), text))
    many_bars = bars([0.5] * bar_count, [text] * bar_count)
    return report(content, text, notes=(Oddity(text, text),), charts=lambda: (*charts, many_bars))


def test_page_has_all_texts_of_the_report():
    """Title, subtitle, totals, each cell, remark, finding with its help, and note are texts of the page."""
    finding = Finding("left-behind", Severity.ERROR, "fc.weight: stays", "x", "fc.weight", help="register it")
    content = page(problems=group_findings([finding]))
    actual_tree = tree(report(content, notes=(Oddity("prefix", "module. is looked through"),)))
    page_text = "".join(text for _, text in actual_tree.texts)
    for text in ("net.pt", "2 tensors", "parameter    2 tensors", "error[left-behind]", "fc.weight: stays"):
        assert text in page_text
    assert "module. is looked through" in page_text
    assert actual_tree.texts_in("pre") == ["register it\n"]
    assert actual_tree.rows[0] == ["name", "dtype", "size", "remark"]
    assert actual_tree.rows[1:] == [
        ["parameters 2 tensors"],
        ["fc.weight", "float32", "24 B", ""],
        ["fc.bias", "float32", "8 B", "= x"],
    ]


def test_verdict_is_first_on_the_page_and_not_repeated():
    """The verdict is also one of the totals, which plain text ends with."""
    actual_tree = tree(report(page(verdict="2 changed", totals=("2 changed", "1 more"))))
    assert [text for _, text in actual_tree.texts].count("2 changed") == 1
    assert actual_tree.texts_in("p")[1] == "2 changed"
    assert [text for text in actual_tree.texts_in("li") if text.strip()] == ["1 more"]


@pytest.fixture(scope="module")
def harmless_page():
    """Return a page with a name in each place."""
    return tree(fill_report("harmless"))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_add_no_markup(harmless_page, text):
    """The page has the tags, attributes and script of a harmless name; a reader sees the name, made visible."""
    hostile = tree(fill_report(text))
    assert hostile.rows[2][0] == escape(text)
    assert hostile.tags == harmless_page.tags
    assert [(tag, name) for tag, name, _ in hostile.attributes] == [
        (tag, name) for tag, name, _ in harmless_page.attributes
    ]
    assert hostile.texts_in("script") == harmless_page.texts_in("script")


@pytest.fixture(scope="module")
def harmless_tags():
    """Return the tags of such a page with few bars, which takes a tenth of the time."""
    return tree(fill_report("harmless", bar_count=3)).tags


@given(st.text(min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_any_text_leaves_the_tags_unchanged(harmless_tags, text):
    """Any text leaves the tags unchanged, and the line break is the only control character."""
    raw = render_html(fill_report(text, bar_count=3))
    assert Tree(raw).tags == harmless_tags
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", raw.decode("utf-8"))


def test_page_has_no_address_link_or_import():
    """The page has no address, link, image or import."""
    raw = render_html(fill_report("name")).decode()
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|<img|\bsrc=|\bhref=|srcset|fetch\(|XMLHttp", raw)


def test_policy_allows_only_the_style_and_script_of_the_page():
    """The policy has the hashes of the exact text and no unsafe-inline, and the page has no inline attributes."""
    actual_tree = tree(fill_report("name"))
    policy = next(value for _, name, value in actual_tree.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (text,) = actual_tree.texts_in(tag)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not [name for _, name, _ in actual_tree.attributes if name == "style" or name.startswith("on")]


def test_the_same_report_gives_the_same_bytes():
    """The page does not depend on the clock, the process or the machine."""
    assert render_html(fill_report("name")) == render_html(fill_report("name"))


def test_quiet_page_has_only_the_findings():
    """-q: the page has no table, chart or note, but still the findings that set exit status 1."""
    finding = Finding("left-behind", Severity.ERROR, "fc.weight: stays", "x")
    about = report(
        page(problems=(build_problem(finding),)), notes=(Oddity("n", "a note"),), charts=lambda: (bars([1.0]),)
    )
    raw = render_html(about, quiet=True).decode()
    assert "fc.weight: stays" in raw
    assert not {"table", "svg"} & set(Tree(raw.encode()).tags)
    assert "a note" not in raw


def test_severity_and_mood_are_css_classes():
    """Errors are red, warnings are not; a bad row is marked."""
    findings = (Finding("a", Severity.ERROR, "m", "x"), Finding("b", Severity.WARNING, "m", "x"))
    actual_tree = tree(report(page(problems=tuple(map(build_problem, findings)))))
    assert [value for value in actual_tree.classes("li") if value] == ["error", "warning"]
    assert actual_tree.classes("tr") == ["group", "bad"]


def test_every_mood_and_severity_has_a_style():
    """A style makes the mood of a row and the severity of a finding visible."""
    style = resources.files("statecli.render").joinpath("page.css").read_text("utf-8")
    moods = set(re.findall(r'"(\w+)"', Line.__doc__.rpartition("`mood`")[2]))
    assert {"bad", "warn", "dim", "strong"} <= moods
    assert all(f"tr.{mood} td" in style for mood in moods)
    assert all(f".told .{severity}" in style for severity in ("error", "warning"))


def test_an_outline_is_not_sorted():
    """Sorting the rows of a tree would separate children from their parent."""
    assert [name for tag, name, _ in tree(report()).attributes if tag == "table"] == ["class", "data-sorts"]
    assert [name for tag, name, _ in tree(report(outline=True)).attributes if tag == "table"] == ["class"]


def test_columns_of_numbers_are_marked():
    """Head and cells of a right column have the class that aligns and sorts them as numbers."""
    actual_tree = tree(report())
    assert actual_tree.classes("th") == ["n"]
    assert actual_tree.classes("td").count("n") == 2


def test_a_column_of_bars_is_not_a_column_of_texts():
    """Bars made of blocks are coloured and closed up, and do not sort."""
    columns = (ReportColumn("name"), ReportColumn("bar", optional=True))
    actual_tree = tree(report(page(columns=columns, groups=(Group("g", "", (Line(("w", "██")),)),))))
    assert (actual_tree.classes("th"), actual_tree.classes("td")) == (["sign"], ["name", "sign"])


@pytest.mark.parametrize("count", [1, 40, 41, 500])
def test_chart_has_a_titled_bar_for_each_value(count):
    """Up to 500 values each have a bar, with its name and value to point at."""
    values = [10.0 ** -(n % 7) for n in range(count)]
    actual_tree = tree(report(charts=lambda: (bars(values),)))
    assert actual_tree.classes("rect").count("bar") == count
    titles = [text for text in actual_tree.texts_in("title") if text.startswith("l.")]
    assert titles == [f"l.{n}.w: {value:.6g}" for n, value in enumerate(values)]


def test_thousands_of_values_share_bars_and_stay_small():
    """40,000 values: 500 bars of 80, each with its largest and smallest, in well under 2 MB."""
    raw = render_html(report(charts=lambda: (bars([1.0 + n for n in range(40_000)]),)))
    actual_tree = Tree(raw)
    assert actual_tree.classes("rect").count("bar most") == actual_tree.classes("rect").count("bar least") == 500
    assert any("largest is 40000, for l.39999.w" in text for text in actual_tree.texts_in("title"))
    assert len(raw) < 400_000


def test_histogram_has_a_bar_for_each_bin():
    """The histogram has as many bars as counts."""
    spread = Spread("w", tuple(n / 48 for n in range(49)), tuple(range(48)), "Δ")
    assert tree(report(charts=lambda: (spread,))).classes("rect").count("bar") == 48


def test_page_of_ten_thousand_rows_has_every_row_and_a_size_limit():
    """Each row of the page is a row of the table, with under 100 bytes of markup."""
    lines = tuple(Line((f"layers.{n}.weight", "float32", f"{n} B")) for n in range(10_000))
    raw = render_html(report(page(groups=(Group("parameters", "", lines),))))
    assert [row[0] for row in Tree(raw).rows[2:]] == [line.cells[0] for line in lines]
    assert len(raw) < 10_000 * (100 + 30)


def _palettes():
    """Return (name, variables) of the light, dark and printed palette."""
    style = resources.files("statecli.render").joinpath("page.css").read_text("utf-8")
    matches = [
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    assert len(matches) == 3
    return list(zip(("light", "dark", "print"), matches, strict=True))


def _luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(first, second):
    """Return the contrast ratio by WCAG 2.2, 1.4.3."""
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("name", "colors"), _palettes(), ids=lambda value: value if isinstance(value, str) else "")
def test_colours_of_every_palette_have_enough_contrast(name, colors):
    """WCAG AA requires a contrast of 4.5 to 1 for text and of 3 to 1 for drawings."""
    grounds = [("ground", "text dim bad warn good info"), ("band", "text dim bad warn good info")]
    grounds += [("bad-ground", "text bad"), ("warn-ground", "text warn")]
    for ground, texts in grounds:
        for text in texts.split():
            assert _contrast(colors[ground], colors[text]) >= 4.5, (ground, text)
    assert all(_contrast(colors["ground"], colors[drawn]) >= 3 for drawn in ("bar", "quiet", "bad"))


def test_every_colour_that_is_used_is_in_every_palette():
    """A variable that a palette lacks would have the colour of another palette or none."""
    style = resources.files("statecli.render").joinpath("page.css").read_text("utf-8")
    used = set(re.findall(r"var\(--([\w-]+)\)", style))
    assert all(set(colors) == used for _, colors in _palettes())


def test_no_other_output_imports_jinja():
    """Only this page costs the 30 ms of the import."""
    code = (
        "import sys\nfrom statecli import render\nfrom statecli.report import Page, Report, Table, ReportColumn\n"
        "import msgspec\nclass Document(msgspec.Struct):\n    a: int = 1\n"
        "class Sink:\n    text = utf8 = staticmethod(lambda part: None)\n"
        "columns = (ReportColumn('fqn'),)\n"
        "about = Report('t', Document, lambda: Table(columns, ()), lambda: Page('', columns, (), ()))\n"
        "for output in set(render.Output) - {render.Output.HTML}:\n"
        "    render.write(about, output, Sink, render.RenderOptions(terminal=True))\n"
        "    assert 'jinja2' not in sys.modules, output\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_cells_sort_by_the_number_that_is_drawn():
    """The bar of a folded row shows its largest value, the end of its range."""
    numbers = {
        "0.0069..0.69": 0.69,
        "1e-07..1": 1,
        "all 2.35 M": 2.35e6,
        "12/4,096": 12,
        "-": None,
        "90.9 MB": 90.9e6,
    }
    script = resources.files("statecli.render").joinpath("page.js").read_text("utf-8")
    body = re.search(r"  const units = .*?\n  };\n", script, re.S)[0]
    code = f"{body}console.log(JSON.stringify({json.dumps([*numbers])}.map(numeric)))"
    process = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    assert json.loads(process.stdout) == [*numbers.values()]
