"""The list of tensors on the page of `inspect`, in a real Chromium."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch

from tests.forked_python import run_python
from tests.render.browser import CHROMEDRIVER, CHROMIUM, Browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(CHROMEDRIVER is None, reason="chromedriver is not installed"),
]

#: Texts of the rows in view, one for each cell.
ROWS = """return [...document.querySelectorAll('#tensors-body .row')].map((row) => [...row.children].map((cell) =>
  cell.classList.contains('name') ? cell.querySelector('.label').textContent : cell.textContent))"""
TYPE = """const box = document.getElementById('tensors-filter');
  box.value = arguments[0]; box.dispatchEvent(new Event('input'));"""
STATUS = "return document.getElementById('tensors-status').textContent"
#: The texts with a contrast below 4.5 (WCAG 2.2, 1.4.3), and the ground of the page.
CONTRASTS = """
  const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((part) => linear(part / 255))
    .reduce((sum, part, n) => sum + part * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = (e) => {
    const color = getComputedStyle(e).backgroundColor;
    return color.endsWith(', 0)') ? e.parentElement ? ground(e.parentElement) : 'rgb(255, 255, 255)' : color;
  };
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const poor = [...document.querySelectorAll('body *')].filter((e) => {
    if (!hasText(e) || !e.getClientRects().length || e.disabled) return false;
    const [a, b] = [getComputedStyle(e).color, ground(e)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  });
  return [poor.map((e) => e.textContent), ground(document.body)]"""
HOSTILE = [
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=document.title='taken'>",
    "\"'><svg onload=document.title='taken'>",
    "a\u202eb\x1b[31m",
    "x" * 10_000,
    "__proto__",
    "constructor",
    "",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def save_page(target, path, *options):
    command = ["-m", "statecli", "inspect", target, "-f", "html", "-o", path, *options]
    assert run_python(command, "statecli").returncode == 0
    return path


@pytest.fixture(scope="module")
def state():
    state = {"wte.weight": torch.ones(50, 8)}
    for layer in range(12):
        state[f"h.{layer}.attn.weight"] = torch.full((8, 24), float(layer))
        state[f"h.{layer}.attn.bias"] = torch.zeros(24, dtype=torch.bfloat16)
    state["h.12.attn.weight"] = torch.ones(16, 24)
    state["ids"] = torch.arange(3)
    return state | {"head.weight": state["wte.weight"]}


@pytest.fixture(scope="module")
def page(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    torch.save(state, folder / "net.pt")
    return save_page(folder / "net.pt", folder / "net.html")


@pytest.fixture
def opened_page(browser, page):
    browser.show(page)
    yield browser
    assert browser.list_errors() == []


def filter_rows(browser, text):
    browser.run(TYPE, text)
    browser.wait("setTimeout(done, 0)")
    return browser.run("document.getElementById('tensors-flat').click();" + ROWS)


def test_equal_layers_share_a_row_that_opens(opened_page):
    """Twelve equal layers are one row with the sums of a layer; a click shows each layer."""
    rows = opened_page.run(ROWS)
    assert [row[0] for row in rows] == ["wte.weight", "h", "{0..11}.attn", "12.attn.weight", "ids", "head.weight"]
    assert rows[2][1:] == ["parameter", "2 dtypes", "12 × 2 tensors", "12 × 216", "12 × 816 B", "76 %"]
    opened = opened_page.run("document.querySelectorAll('#tensors-body .row')[2].click();" + ROWS)
    assert [row[0] for row in opened[3:15]] == [f"{layer}.attn" for layer in range(12)]


def test_shared_storage_counts_once_and_is_a_link(opened_page, state):
    """The sums of the page are the sums of the checkpoint, and the link of a tied tensor leads to the other tensor."""
    distinct = {tensor.data_ptr(): tensor for tensor in state.values()}.values()
    elements, size = (sum(measure(tensor) for tensor in distinct) for measure in (torch.numel, lambda t: t.nbytes))
    totals = """const data = JSON.parse(document.getElementById('tensor-data').textContent);
      return [data.elements, data.bytes]"""
    assert opened_page.run(totals) == [elements, size]
    assert opened_page.run(STATUS) == "28 tensors"
    went = opened_page.run(
        "document.querySelector('#tensors-body .link').click();"
        "return [document.getElementById('tensors-title').textContent,"
        " document.querySelector('[aria-selected=true] .label').textContent]"
    )
    assert went == ["head.weight", "head.weight"]


def test_a_filter_keeps_the_tensors_that_match(opened_page, state):
    """The list and the count in the status follow the filter; the status names a wrong word, which is ignored.

    tests/render/test_page_filter.py has the cases of the filter itself.
    """
    for text, keep in (
        ("*.weight", lambda name, t: name.endswith(".weight")),
        ("dtype:bfloat16 h.1", lambda name, t: t.dtype == torch.bfloat16 and "h.1" in name),
        ("size>0.5kB -head", lambda name, t: t.nbytes > 500 and "head" not in name),
    ):
        expected = [name for name, tensor in state.items() if keep(name, tensor)]
        assert [row[0] for row in filter_rows(opened_page, text)] == expected
        assert opened_page.run(STATUS).startswith(f"{len(expected)} of 28 tensors, ")
    assert len(filter_rows(opened_page, "size>big")) == 28
    assert opened_page.run(STATUS).startswith("size>big: write a number after >, such as size>1MB")
    assert [row[0] for row in filter_rows(opened_page, "size>big head")] == ["head.weight"]


def test_every_column_sorts(opened_page, state):
    """Numbers are sorted from the largest, then from the smallest, then in the order of the file."""
    press = "[...document.querySelectorAll('#tensors-head button')].find((b) => b.textContent === 'bytes').click();"
    filter_rows(opened_page, "")
    sizes = [tensor.nbytes for tensor in state.values()]
    by_size = sorted(range(28), key=lambda n: -sizes[n])
    for order in (by_size, sorted(range(28), key=lambda n: sizes[n]), range(28)):
        assert [row[0] for row in opened_page.run(press + ROWS)] == [[*state][n] for n in order]


def test_keys_walk_the_tree(opened_page):
    """Tab reaches the tree; arrows move, open and close; Enter shows a tensor."""
    active = (
        "const row = document.getElementById(document.activeElement.getAttribute('aria-activedescendant'));"
        "return [row.querySelector('.label').textContent, row.getAttribute('aria-level'), row.ariaExpanded]"
    )
    opened_page.run("document.querySelector('#tensors-head .cell:last-child button').focus()")
    opened_page.run("document.getElementById('tensors-grid').focus()")
    opened_page.press("Down", "Down")
    assert opened_page.run(active) == ["{0..11}.attn", "2", "false"]
    opened_page.press("Right", "Right", "Right", "Right")
    assert opened_page.run(active) == ["weight", "4", None]
    opened_page.press("Enter")
    assert opened_page.run("return document.getElementById('tensors-title').textContent") == "h.0.attn.weight"
    opened_page.press("Left", "Left")
    assert opened_page.run(active) == ["0.attn", "3", "false"]


def test_controls_are_labelled_and_reached_in_order(opened_page):
    """Each control has a name; Tab goes from the filter to the tree in the order of the page."""
    names = "return [...document.querySelectorAll('input, button')].map((e) => (e.ariaLabel || e.textContent).trim())"
    assert all(opened_page.run(names))
    opened_page.run("document.getElementById('tensors-filter').focus()")
    reached = []
    for _ in range(12):
        opened_page.press("Tab")
        reached.append(opened_page.run("return document.activeElement.id || document.activeElement.textContent"))
    assert reached[:4] == ["tensors-tree", "tensors-flat", "tensors-open", "tensors-close"]
    assert "tensors-grid" in reached
    roles = opened_page.run("return [...document.querySelectorAll('[role=treegrid] [role]')].map((e) => e.role)")
    assert {"rowgroup", "row", "columnheader", "rowheader", "gridcell"} == set(roles)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_legible_and_fit_a_phone(browser, page, scheme):
    """Each text has a contrast of 4.5 to 1 on its ground, in both themes; a phone has no sideways scroll."""
    browser.show(page, width=375, height=800, scheme=scheme)
    assert browser.run("return document.documentElement.scrollWidth") == 375
    assert browser.run("return document.getElementById('tensors-grid').scrollWidth <= 351") is True
    poor, ground = browser.run(CONTRASTS)
    assert poor == []
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]


def test_a_print_has_the_rows_and_no_controls(browser, page):
    """On paper, the list is as long as its rows."""
    browser.show(page, media="print")
    sizes = browser.run(
        "dispatchEvent(new Event('beforeprint')); const list = document.getElementById('tensors-grid');"
        "return [list.scrollHeight - list.clientHeight, document.querySelectorAll('#tensors-body .row').length,"
        " document.getElementById('tensors-filter').getClientRects().length]"
    )
    assert sizes == [0, 6, 0]


def test_hostile_names_are_text(browser, tmp_path):
    """No name becomes an element, runs as code, or takes another tensor's row."""
    state = {f"{name}.{n}": torch.ones(2) for n, name in enumerate(HOSTILE)} | {"<b>.é😀": torch.ones(3)}
    torch.save(state, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html"))
    tags = "return [...document.querySelectorAll('#tensors-body *, #tensors-title *, dl *')].map((e) => e.localName)"
    filter_rows(browser, "")
    browser.run("document.querySelector('#tensors-body .row').click()")
    rows = browser.run(ROWS)
    assert len(rows) == len(state)
    assert rows[0][0] == f"{HOSTILE[0]}.0"
    assert "\\u202e" in rows[3][0]
    assert set(browser.run(tags)) == {"div", "span", "dt", "dd"}
    assert browser.run("return [document.title, document.documentElement.scrollWidth]") == [
        str(tmp_path / "net.pt"),
        1280,
    ]
    assert browser.list_errors() == []


@pytest.fixture(scope="module")
def large_page(tmp_path_factory):
    """20,000 tensors with different names and shapes."""
    folder = tmp_path_factory.mktemp("large")
    header, end = {}, 0
    for n in range(20_000):
        size = 4 * (n % 977 + 1)
        name = f"model.part{n % 2999}.expert_{n % 977}.layers.{n % 64}.proj{n}.weight"
        header[name] = {"dtype": "F32", "shape": [n % 977 + 1], "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with open(folder / "large.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return save_page(folder / "large.safetensors", folder / "large.html")


def test_many_thousand_tensors_are_shown_at_once(browser, large_page):
    """The page has at most 600 bytes a tensor, draws only rows in view, and finds a tensor by its name."""
    assert large_page.stat().st_size < 20_000 * 600
    browser.show(large_page)
    assert browser.run("return document.querySelectorAll('#tensors-body .row').length") < 60
    browser.run(TYPE, "proj19999.")
    browser.wait("setTimeout(done, 300)")
    assert browser.run(STATUS).startswith("1 of 20,000 tensors")
    assert browser.run("document.getElementById('tensors-flat').click();" + ROWS)[0][0].endswith(".proj19999.weight")
    browser.run(TYPE, "size>3kB")
    browser.wait("setTimeout(done, 300)")
    browser.run("document.getElementById('tensors-copy').click()")
    message, text = browser.run(GLOBS)
    assert re.fullmatch(
        r"These [\d,]+ tensors need [\d,]+ globs, too many for a command line: change the filter\.", message
    )
    assert text == ""
    browser.run(
        "const box = document.getElementById('tensors-filter'); box.value = ''; box.dispatchEvent(new Event('input'))"
    )
    browser.wait("setTimeout(done, 300)")
    browser.wait("document.getElementById('tensors-grid').scrollTop = 1e9; setTimeout(done, 100)")
    assert browser.run(ROWS)[-1][0].startswith("model.part2998.")
    assert browser.list_errors() == []


def test_a_tensor_shows_its_values(browser, tmp_path):
    """With --distributions: the bins, quantiles and first values of JSON; a module counts its outliers."""
    state = {f"h.{n}.w": torch.linspace(-1, 1, 50) * (40 if n == 4 else 1) for n in range(9)}
    torch.save(state, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--distributions"))
    assert browser.run("return document.querySelector('#tensors-body .problems').textContent") == "1 outlier"
    for text in ("remark:*outlier*", "problem", "outlier"):
        assert [row[0] for row in filter_rows(browser, text)] == ["h.4.w"]
    browser.run("document.querySelector('#tensors-body .row').click()")
    texts_of = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    names, values = (browser.run(texts_of, f"#tensors-facts {tag}") for tag in ("dt", "dd"))
    texts = dict(zip(names, values, strict=True))
    bars = browser.run(texts_of, ".histogram title")
    assert (texts["min"], texts["max"], texts["nan"]) == ("-40", "40", "0")
    assert texts["first values"].startswith("-40, -38.37, ")
    assert "50\u00a0%:\u00a0-0.8" in texts["quantiles"]
    assert len(bars) == 40
    assert sum(int(bar.split(": ")[1].split()[0]) for bar in bars) == 50
    assert browser.run("return document.querySelectorAll('.charts figure').length") == 1
    assert browser.list_errors() == []


TITLE = "return document.getElementById('tensors-title').textContent"
GLOBS = "return [document.getElementById('tensors-told').textContent, document.getElementById('tensors-globs').value]"


def test_links_of_the_verdict_show_the_tensors(browser, tmp_path):
    """A link shows the outlier and opens its modules; `2 more` filters; the address of a tensor is a link."""
    state = {f"h.{n}.w": torch.full((4,), 40.0 if n == 4 else 1.0) for n in range(9)}
    state |= {f"n.{n}": torch.tensor([1.0, float("nan")]) for n in range(5)}
    torch.save(state, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--stats"))
    click = "[...document.querySelectorAll('.verdict a')].find((a) => a.textContent === arguments[0]).click()"
    for _ in range(2):  # the second time, the address stays the same
        browser.run("document.getElementById('tensors-hide').click()")
        browser.run(click, "h.4.w")
        browser.wait("setTimeout(done, 50)")
        assert browser.run(TITLE) == "h.4.w"
        assert browser.run("return document.getElementById('tensors-detail').hidden") is False
    edges = browser.run(
        "return ['[aria-selected=true]', '#tensors-detail']"
        ".map((selector) => document.querySelector(selector).getBoundingClientRect())"
    )
    assert edges[0]["bottom"] <= edges[1]["top"] + 1
    assert browser.run(STATUS).endswith(", 6 problems: 5 NaN, 1 outlier")
    browser.run("document.getElementById('tensors-flat').click()")
    badges = browser.run("return [...document.querySelectorAll('.row .problems')].map((e) => e.textContent)")
    assert badges == ["outlier", *["1 NaN"] * 5]
    browser.run(click, "2 more")
    browser.wait("setTimeout(done, 50)")
    assert browser.run(STATUS).startswith("5 of 14 tensors")
    browser.post("/url", url=(tmp_path / "net.html").as_uri() + "#tensor=h.7.w")
    browser.run("location.reload()")
    browser.wait("setTimeout(done, 100)")
    assert browser.run(TITLE) == "h.7.w"
    assert browser.list_errors() == []


SHOWN_DETAIL = """const detail = document.getElementById('tensors-detail');
  return detail.hidden ? null : document.getElementById('tensors-title').textContent"""


def test_facts_close_if_the_tensor_leaves_the_list(browser, tmp_path):
    """The facts close if a filter or an order hides the tensor; they never cover the selected row."""
    torch.save({f"h.{n}.w": torch.ones(n + 1) for n in range(90)} | {"a": torch.ones(2)}, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--stats"), height=700)
    click = (
        "[...document.querySelectorAll('#tensors-body .row')].find((e) => e.textContent.includes(arguments[0])).click()"
    )
    sort = "[...document.querySelectorAll('#tensors-head button')].find((b) => b.textContent === 'bytes').click()"
    covered = """const row = document.querySelector('[aria-selected=true]').getBoundingClientRect();
      return row.bottom > document.getElementById('tensors-detail').getBoundingClientRect().top + 1"""
    filter_rows(browser, "h.")
    browser.run(click, "h.3.w")
    assert filter_rows(browser, "h.{3,4}.")
    assert browser.run(SHOWN_DETAIL) == "h.3.w"
    filter_rows(browser, "h.5.")
    assert browser.run(SHOWN_DETAIL) is None
    filter_rows(browser, "")
    browser.run(click, "h.3.w")
    browser.run(sort)
    assert browser.run(SHOWN_DETAIL) is None
    browser.run(click, "h.89.w")
    assert browser.run(SHOWN_DETAIL) == "h.89.w"
    for at in (0, 6, *range(10, 14)):  # the facts cover the last rows
        browser.run("scrollTo(0, 0)")
        browser.run("document.querySelectorAll('#tensors-body .row')[arguments[0]].click()", at)
        assert browser.run(covered) is False
        browser.run("document.getElementById('tensors-grid').focus()")
        browser.press("Down", "Down", "Down")
        assert browser.run(covered) is False
    assert browser.list_errors() == []


def test_listed_rows_are_copied_as_globs(opened_page):
    """The button and y both copy; the text is shown, because a browser may refuse to copy."""
    for entered, globs in (
        ("bias", "-i 'h.*.attn.bias'"),
        ("h.{0..1}.", "-i 'h.{0,1}.*'"),
        ("{wte,head}.weight", "-i wte.weight -i head.weight"),
    ):
        opened_page.run(TYPE, entered)
        opened_page.run("document.getElementById('tensors-copy').focus()")
        opened_page.press("Enter")
        opened_page.wait("setTimeout(done, 50)")
        message, text = opened_page.run(GLOBS)
        assert text == globs
        assert message.endswith(f"for {opened_page.run(STATUS).split()[0]} tensors:")
    opened_page.run(TYPE, "")
    opened_page.wait("setTimeout(done, 50)")
    opened_page.run("document.getElementById('tensors-grid').focus()")
    opened_page.press("Down", "y")
    opened_page.wait("setTimeout(done, 50)")
    assert opened_page.run(GLOBS)[1] == "-i 'h.*'"


@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_name_shows_its_number(browser, tmp_path, width):
    """The common part of names is cut; the whole name is below the list for the row at the cursor, and in its title."""
    start = "base_model.model.model.language_model.layers"
    names = [f"{start}.{n}.experts.{n}.{name}.weight" for n in (2, 3, 30) for name in ("up_projection", "x" * 60)]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--stats"), width=width)
    filter_rows(browser, "")
    labels = browser.run(
        "return [...document.querySelectorAll('.row .label')].map((e) => [e.scrollWidth <= e.clientWidth,"
        " [...e.children].map((part) => part.className === 'cut' ? '…' : part.textContent).join('')])"
    )
    assert [whole for whole, _ in labels] == [True] * 6
    assert all(label.startswith(f"…{n}.") for (_, label), n in zip(labels, (2, 2, 3, 3, 30, 30), strict=True))
    assert any("up_projection" in label for _, label in labels)
    assert [row[0] for row in browser.run(ROWS)] == names
    titles = browser.run("return [...document.querySelectorAll('.row .name')].map((e) => e.title)")
    assert titles == names
    browser.press("Down")
    assert browser.run("return document.getElementById('tensors-whole').textContent") == names[0]


def test_singular_values_are_drawn(browser, tmp_path):
    """--spectra adds a bar for each value, the ranks, words for the filter, and the reason for a missing spectrum."""
    state = {
        "w": torch.diag(torch.tensor([4.0, 2.0, 1.0])),
        "odd": torch.tensor([[1.0, float("inf")]]),
        "b": torch.ones(3),
    }
    torch.save(state, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--spectra"))
    facts = (
        "location.hash = `tensor=${arguments[0]}`; const done = arguments[arguments.length - 1];"
        "setTimeout(() => done([document.getElementById('tensors-facts').textContent,"
        " [...document.querySelectorAll('.histogram title')].map((e) => e.textContent)]), 50)"
    )
    texts, titles = browser.post("/execute/async", script=facts, args=["w"])
    assert "rank3 of 3" in texts
    assert "stable rank1.313" in texts
    assert titles == ["singular value 1: 4", "singular value 2: 2", "singular value 3: 1"]
    assert "not computed: it has NaN or Inf" in browser.post("/execute/async", script=facts, args=["odd"])[0]
    assert "singular" not in browser.post("/execute/async", script=facts, args=["b"])[0]
    assert [row[0] for row in filter_rows(browser, "sigma>=4")] == ["w"]
    assert browser.list_errors() == []


def test_a_wide_table_keeps_its_remarks_legible(browser, tmp_path):
    """The page of verify: a remark is not squeezed into many lines, and a phone keeps the names in view."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.fc = nn.Linear(2, 2)\n"
        "        self.scale = nn.Parameter(torch.ones(1)) * 2\n"
        "    def forward(self, x):\n        return self.fc(x) * self.scale\n"
    )
    command = ["-m", "statecli", "verify", "net.py:Net", "--input", "4x2", "-o", "net.html"]
    assert run_python(command, cwd=tmp_path).returncode == 1
    widths = "return [...document.querySelectorAll('td.remark')].map((e) => e.offsetWidth)"
    browser.show(tmp_path / "net.html")
    assert browser.run("const t = document.querySelector('.scroll'); return t.scrollWidth - t.clientWidth") == 0
    assert min(browser.run(widths)) > 200
    browser.show(tmp_path / "net.html", width=390, height=844)
    assert browser.run("return document.documentElement.scrollWidth") == 390
    assert browser.run("const t = document.querySelector('.scroll'); return t.scrollWidth - t.clientWidth") == 0
    assert browser.run("return [...document.querySelectorAll('pre')].every((e) => e.scrollWidth <= e.clientWidth)")


SORT = "[...document.querySelectorAll('#tensors-head button')].find((b) => b.textContent === arguments[0]).click();"


def test_equal_layers_sort_by_the_size_of_a_layer(browser, tmp_path):
    """The sum of equal layers does not outrank a larger layer; the share does, because it is computed from the sum."""
    state = {f"h.{n}.w": torch.ones(10) for n in range(36)} | {"h.36.w": torch.ones(20), "wte": torch.ones(40)}
    torch.save(state, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html"))
    browser.run(SORT, "bytes")
    rows = [row for row in browser.run(ROWS) if row[0] != "h"]
    assert [(row[0], row[3]) for row in rows] == [("36.w", "80 B"), ("{0..35}.w", "36 × 40 B"), ("wte", "160 B")]
    browser.run(SORT, "share")
    assert [row[0] for row in browser.run(ROWS) if row[0] != "h"] == ["{0..35}.w", "36.w", "wte"]


def test_numbers_are_in_natural_order(browser, tmp_path):
    """The numbers are sorted in an open group and in the list, for any order of the file; other names stay in order."""
    names = [*sorted(f"h.{n}.{part}" for n in range(12) for part in ("b", "a")), "z", "f.x", "h.w"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html"))
    browser.run("document.getElementById('tensors-open').click()")
    labels = [row[0] for row in browser.run(ROWS)]
    assert labels[:2] == ["h", "{0..11}"]
    assert [label for label in labels if label.isdecimal()] == [str(n) for n in range(10)]  # in view
    flat = [row[0] for row in filter_rows(browser, "")]
    assert flat == [*(f"h.{n}.{part}" for n in range(12) for part in "ab"), "h.w", "z", "f.x"]


def test_a_page_without_values_says_so(browser, tmp_path):
    """The head and each tensor have the command that reads the values; after --stats they do not."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a net.pt")
    command = f"statecli report '{tmp_path / 'a net.pt'}' --stats -o report.html"
    browser.show(save_page(tmp_path / "a net.pt", tmp_path / "net.html"))
    browser.run("document.querySelector('#tensors-body .row').click()")
    texts = "return ['header', '#tensors-facts'].map((part) => document.querySelector(part).textContent)"
    header, facts = browser.run(texts)
    assert f"The values were not read. To read them: {command}" in header
    assert f"not read; to read them: {command}" in facts
    browser.show(save_page(tmp_path / "a net.pt", tmp_path / "net.html", "--stats"))
    browser.run("document.querySelector('#tensors-body .row').click()")
    assert "not read" not in "".join(browser.run(texts))
    assert browser.list_errors() == []


FACTS = """const done = arguments[arguments.length - 1]; location.hash = `tensor=${encodeURIComponent(arguments[0])}`;
  setTimeout(() => done(document.getElementById('tensors-facts').textContent), 50)"""


def test_the_first_nan_and_the_parameter_of_a_moment_are_shown(browser, tmp_path):
    """The index of the first NaN and Inf, and the parameter next to `state[1]`."""
    model = {"a": torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]]), "b": torch.ones(3)}
    moments = {n: {"exp_avg": torch.ones_like(tensor)} for n, tensor in enumerate(model.values())}
    optimizer = {"state": moments, "param_groups": [{"params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "net.pt")
    command = ["-m", "statecli", "report", tmp_path / "net.pt", "--stats", "-o", tmp_path / "net.html"]
    assert run_python(command, "statecli").returncode == 0
    browser.show(tmp_path / "net.html")
    facts = browser.post("/execute/async", script=FACTS, args=["model: a"])
    assert "first NaN at[1,0]" in facts
    assert "first Inf at[1,1]" in facts
    facts = browser.post("/execute/async", script=FACTS, args=["optimizer: state[1]['exp_avg']"])
    assert "of b (matched by order and shape)" in facts
    assert browser.list_errors() == []


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """Write the page of a diff with a layer that changed more than the other layers."""
    folder = tmp_path_factory.mktemp("changes")
    before = {f"h.{n}.{name}": torch.ones(8, 8) for n in range(12) for name in ("up.weight", "down.weight")}
    after = {name: tensor * (1.5 if name.startswith("h.3.") else 1.001) for name, tensor in before.items()}
    torch.save(before, folder / "a.pt")
    torch.save(after, folder / "b.pt")
    command = ["-m", "statecli", "diff", "a.pt", "b.pt", "-f", "html", "-o", "diff.html"]
    assert run_python(command, "statecli", cwd=folder).returncode == 1
    return folder / "diff.html"


def test_a_bar_of_the_chart_leads_to_its_row(browser, changes):
    """The unusual layer has a colour of its own; a click on its bar marks its row."""
    browser.show(changes)
    fills = "return [...document.querySelectorAll('.charts .wide a .bar')].map((e) => getComputedStyle(e).fill)"
    colours = browser.run(fills)
    assert [n for n, colour in enumerate(colours) if colour != colours[0]] == [3]
    click = "document.querySelectorAll('.charts .wide a')[3].dispatchEvent(new MouseEvent('click', {bubbles: true}));"
    browser.run(click)
    browser.wait("setTimeout(done, 50)")
    assert browser.run("return document.querySelector(':target td').textContent").startswith("M h.3.")
    assert browser.run("return document.querySelector('.charts .wide svg').getAttribute('role')") == "group"
    assert browser.list_errors() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_diff_on_a_phone_is_a_list(browser, changes, scheme):
    """Each row is a few lines with the names of its columns; nothing scrolls sideways but the chart."""
    browser.show(changes, width=390, height=844, scheme=scheme)
    assert browser.run("return document.documentElement.scrollWidth") == 390
    assert browser.run("const t = document.querySelector('.facts'); return t.scrollWidth <= t.clientWidth")
    labels = """return [...document.querySelector('.facts tbody tr:nth-child(2)').cells].map((e) =>
      getComputedStyle(e, '::before').content)"""
    assert browser.run(labels)[1:4] == ['"values "', '"max |Δ| "', '"rel. change "']
    poor, _ = browser.run(CONTRASTS)
    assert poor == []


def test_the_legend_of_a_diff_explains_the_visible_signs(browser, changes):
    """The bars are those of the terminal, with their scale as the name of their column, which does not sort."""
    browser.show(changes)
    legend = browser.run("return document.querySelector('.legend').textContent")
    assert legend.startswith("M changed; rel. change: ‖Δ‖/‖w‖")
    assert browser.run("return document.querySelector('th.sign').textContent") == "1e-8 to 1 (log)"
    assert browser.run("return document.querySelectorAll('th.sign button').length") == 0


def test_empty_filter_result_is_reported_only_in_the_status(opened_page):
    """The status has the reason; no empty row is drawn, and the copy bar has a small button."""
    filter_rows(opened_page, "typo")
    texts = opened_page.run("return document.getElementById('tensors-section').innerText")
    assert texts.count("no tensor matches") == 1
    assert opened_page.run("return document.getElementById('tensors-body').offsetHeight") == 0
    opened_page.run("document.getElementById('tensors-copy').click()")
    opened_page.wait("setTimeout(done, 50)")
    assert opened_page.run(GLOBS)[0] == "No tensor is listed."
    assert opened_page.run("return document.getElementById('tensors-forget').offsetWidth") < 100


def test_remark_does_not_repeat_the_problem(browser, tmp_path):
    """The remark leaves out the words of the problem."""
    state = {f"h.{n}.w": torch.full((4,), 40.0 if n == 4 else 1.0) for n in range(9)}
    state["n"] = torch.tensor([0.0, float("nan"), float("nan"), 1.0])
    torch.save(state, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--stats"))
    filter_rows(browser, "problem")
    names = browser.run("return [...document.querySelectorAll('.row .cell.name')].map((e) => e.textContent)")
    assert names[0].startswith("h.4.woutlierRMS 40, ")
    assert names[1] == "n2 NaN1 zeros"


def test_column_names_stay_in_view_and_facts_cover_no_row(browser, tmp_path):
    """The names of the columns stay in view; the facts cover no row, and the selected row is in view above them."""
    torch.save({f"h.{n}.w": torch.ones(n + 1) for n in range(90)}, tmp_path / "net.pt")
    browser.show(save_page(tmp_path / "net.pt", tmp_path / "net.html", "--stats"))
    filter_rows(browser, "")
    browser.wait("document.getElementById('tensors-grid').scrollTop = 900; setTimeout(done, 100)")
    browser.run("[...document.querySelectorAll('#tensors-body .row')].at(-9).click()")
    boxes = browser.run(
        "return ['.head', '[aria-selected=true]', '#tensors-grid', '#tensors-detail']"
        ".map((selector) => document.querySelector(selector).getBoundingClientRect())"
    )
    head, row, grid, detail = boxes
    assert abs(head["top"] - grid["top"]) <= 2
    assert head["bottom"] <= row["top"] + 1
    assert row["bottom"] <= grid["bottom"] <= detail["top"]
    assert detail["bottom"] <= 900
