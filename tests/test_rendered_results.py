"""Views of a result in Python: text, notebook, JSON document, data frame."""

from __future__ import annotations

import html.parser
import json
import sys

import pytest
import torch
from torch import nn

import statecli
from statecli import render
from statecli.cli import parser
from statecli.render import Output, RenderOptions
from statecli.requests.run import run

from .test_live_objects import Tied


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two checkpoints of a model with a difference, and a class in a file."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Tied()
    torch.save(model.state_dict(), "a.pt")
    with torch.no_grad():
        model.norm.weight[0] += 1
        model.norm.bias[1] = float("nan")
    torch.save(model.state_dict(), "b.pt")
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
        "        self.table = torch.ones(2)\n"
    )
    (tmp_path / "policy.toml").write_text('[policy]\ndtype = ["float32"]\n')
    monkeypatch.setenv("COLUMNS", "80")
    return model


IGNORED = "verify net.py:Net --input 2x2 --ignore registration"
POLICY_UNUSED = "audit a.pt --config policy.toml --select names"
CALLS = [
    (lambda: statecli.inspect("a.pt", stats=True), "inspect a.pt --stats"),
    (lambda: statecli.inspect("net.py:Net"), "inspect net.py:Net"),
    (lambda: statecli.diff("a.pt", "b.pt"), "diff a.pt b.pt"),
    (lambda: statecli.diff("a.pt", "b.pt", atol=0.5, ignore="dtype"), "diff a.pt b.pt --atol 0.5 --ignore dtype"),
    (lambda: statecli.diff("a.pt", "b.pt", only="embedding.*"), "diff a.pt b.pt --may-change embedding.*"),
    (lambda: statecli.diff("a.pt", "net.py:Net"), "diff a.pt net.py:Net"),
    (lambda: statecli.inspect("net.py:Net", ignore="registration"), "inspect net.py:Net --ignore registration"),
    (lambda: statecli.verify("net.py:Net", device="fake-cuda"), "verify net.py:Net --device fake-cuda"),
    (lambda: statecli.verify("net.py:Net", inputs="2x2", ignore="registration"), IGNORED),
    (
        lambda: statecli.verify("net.py:Net", inputs="2x2", checks="shard"),
        "verify net.py:Net --input 2x2 --check shard",
    ),
    (lambda: statecli.audit(["a.pt", "b.pt"]), "audit a.pt b.pt"),
    (lambda: statecli.audit("missing.pt"), "audit missing.pt"),
    (lambda: statecli.audit("a.pt", select=["nan", "lock"]), "audit a.pt --select nan --select lock"),
    (lambda: statecli.audit("a.pt", config="policy.toml", select="names"), POLICY_UNUSED),
]


def run_command_line(line):
    """The table of a command on a terminal of 80 columns, and its JSON."""
    report = run(parser.parse(line.split())).report
    look = RenderOptions(terminal=True, width=80)
    return [render.format_report(report, output, look) for output in (Output.TABLE, Output.JSON)]


class Balanced(html.parser.HTMLParser):
    """Collects tags, and fails if they are not balanced."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in ("br", "meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("br", "meta", "rect", "line", "circle", "polyline"):
            assert self.open.pop() == tag


@pytest.mark.parametrize(("call", "line"), CALLS, ids=[line for _, line in CALLS])
def test_views_of_a_result_equal_the_output_of_the_command(files, call, line):
    """print(result) is the terminal's table, without colour, and to_dict is `-f json`. A notebook has a part of a page:
    no document of its own, no script, no heading of the notebook's outline, no id twice.
    """
    result = call()
    text = str(result)
    if "verify" not in line or "--input" in line:  # Python has other words for a missing input
        table, document = run_command_line(line)
        assert text == table.rstrip("\n")
        assert result.to_dict() == json.loads(document)
    assert "\x1b" not in text
    assert result.to_dict()["schema"].startswith("statecli.")
    page_parser = Balanced()
    page = result._repr_html_()
    page_parser.feed(page + result._repr_html_())
    assert not page_parser.open
    assert not {"html", "head", "body", "script", "h1", "meta"} & {*page_parser.tags}
    assert len(page_parser.ids) == len(set(page_parser.ids))
    assert page.startswith("<style>.statecli-result {")
    assert line.split()[1].partition(":")[0] in page


def test_a_name_is_text_in_a_notebook():
    """A tensor may be called like markup."""
    name = "</style></div><script>alert(1)</script>"
    page = statecli.inspect({name: torch.ones(1)})._repr_html_()
    assert "<script" not in page
    assert "&lt;script" in page
    assert "<script" not in statecli.lock({name: torch.ones(1)})._repr_html_()


def test_a_notebook_shows_at_most_500_rows():
    """More rows make a browser slow."""
    state = {f"{chr(97 + n % 26)}{n}.w{n}": torch.ones(n % 7 + 1) for n in range(900)}
    assert statecli.inspect(state)._repr_html_().count("<tr") < 520


def test_text_of_a_lock_is_the_lock_file(files, tmp_path):
    """str(lock) is the output of `statecli lock`, and audit reads it."""
    lock = statecli.lock("a.pt")
    (tmp_path / "lock.json").write_text(f"{lock}\n")
    assert b"".join(run(parser.parse(["lock", "a.pt"])).content).decode() == f"{lock}\n"
    assert not [f for f in statecli.audit("a.pt", lock="lock.json").findings if f.rule == "lock-mismatch"]
    assert "lock-mismatch" in {f.rule for f in statecli.audit(files, lock="lock.json").findings}
    assert lock.to_dict()["schema"] == "statecli.lock/1"


def test_a_data_frame_has_a_row_for_each_tensor(files):
    """Numbers are numbers, and identical tensors of a diff have a row too."""
    pandas = pytest.importorskip("pandas")
    frame = statecli.diff("a.pt", "b.pt").to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert sorted(frame.fqn) == sorted(change.fqn for change in statecli.diff("a.pt", "b.pt").changes)
    assert frame[frame.fqn == "norm.weight"].max_abs.item() == pytest.approx(1)
    sizes = statecli.inspect("a.pt").to_pandas()
    assert sizes.bytes.sum() == sum(tensor.nbytes for tensor in statecli.inspect("a.pt").state.tensors)
    lock = statecli.lock("a.pt")
    assert list(lock.to_pandas().digest) == [tensor.digest for tensor in lock.targets[0].tensors]
    assert set(statecli.audit("b.pt").to_pandas()["rule"]) >= {"nan"}
    assert "moves" in statecli.verify(nn.Linear(2, 2)).to_pandas()


def test_pandas_is_not_needed_for_anything_else(files, monkeypatch):
    """Without pandas, to_pandas names the package to install."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = statecli.inspect("a.pt")
    assert str(result)
    with pytest.raises(statecli.MissingDependency, match=r"^to_pandas needs the package pandas: pip install pandas$"):
        result.to_pandas()
