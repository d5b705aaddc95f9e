"""The lines of source around a problem, on pages."""

from __future__ import annotations

import html
import re

import pytest

from statecli.core.model_state import Origin
from statecli.report.source_lines import LINES_AROUND, read_lines_around

SOURCE = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.table = torch.ones(3)
        self.name = "<script>&"

    def forward(self, x):
        return self.fc(x)
"""


@pytest.fixture(autouse=True)
def source_folder(tmp_path, in_tmp_path):
    (tmp_path / "net_around.py").write_text(SOURCE)


def test_lines_around_an_origin_are_read_from_the_file():
    """The line of the problem and its neighbours, less their common indentation."""
    lines = read_lines_around(Origin("net_around.py", 9))
    assert [line.number for line in lines] == [*range(6, 13)]
    assert [line.number for line in lines if line.is_origin] == [9]
    assert lines[3].text == "    self.table = torch.ones(3)"


@pytest.mark.parametrize(("line", "numbers"), [(1, [*range(1, 2 + LINES_AROUND)]), (13, [10, 11, 12, 13])])
def test_the_file_has_no_lines_before_the_first_and_after_the_last(line, numbers):
    """At both ends of the file there are fewer neighbours."""
    assert [source_line.number for source_line in read_lines_around(Origin("net_around.py", line))] == numbers


@pytest.mark.parametrize(
    "origin", [Origin("gone.py", 1), Origin("net_around.py", 99), Origin("\ud800", 1), Origin("\0", 1)]
)
def test_a_line_that_cannot_be_read_has_no_neighbours(origin):
    """The file is missing, the line is after the end, or the text names no file."""
    assert read_lines_around(origin) == ()


@pytest.mark.parametrize("command", [("verify",), ("audit",), ("inspect",)])
def test_pages_show_the_lines_around_a_problem(statecli, command):
    """The line of the problem is marked, and the text of the file stays text."""
    page = statecli(*command, "net_around.py:Net", "-f", "html").out
    (source,) = re.findall(r'<pre class="source"[^>]*>(.*?)</pre>', page, re.S)
    assert re.search(r'<span class="origin">.*?self\.table = torch\.ones\(3\)</span>', source)
    assert 'self.name = "<script>&"' in html.unescape(source)
    assert "<script" not in source
