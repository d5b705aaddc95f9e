"""`statecli report`: the page of `inspect`."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({f"h.{n}.w": torch.randn(4, 4) for n in range(6)}, "net.pt")
    (tmp_path / "net.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 3)\n")


def test_the_page_is_that_of_inspect(statecli, tmp_path):
    """With --stats the values are read as --distributions reads them."""
    assert statecli("report", "net.pt", "-o", "report.html").code == 0
    statecli("inspect", "net.pt", "-o", "inspect.html")
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "inspect.html").read_bytes()
    statecli("report", "net.pt", "--stats", "-o", "report.html")
    statecli("inspect", "net.pt", "--distributions", "-o", "inspect.html")
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "inspect.html").read_bytes()


def test_json_has_the_numbers_of_the_page(statecli):
    """Statistics, distribution and the size over the layers."""
    document = json.loads(statecli("report", "net.pt", "--stats", "-f", "json").out)
    assert {"stats", "distribution"} <= document["tensors"][0].keys()
    assert document["roles"][0]["name"] == "h.{0..5}.w"


def test_a_class_has_a_page_with_statistics(statecli, tmp_path):
    """The values of a class are initial values: no histogram, and no error."""
    result = statecli("report", "net.py:make", "--stats", "-o", "report.html")
    assert (result.code, result.err) == (0, "")
    assert '"distributions":[]' in (tmp_path / "report.html").read_text()


def test_a_page_needs_a_file(statecli):
    """Without -o, one line says what to add."""
    result = statecli("report", "net.pt")
    assert (result.code, result.err) == (2, "statecli: report writes a page: add --output report.html\n")
