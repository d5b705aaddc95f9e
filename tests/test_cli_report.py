"""`statecli report`: the page of `inspect`."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture(autouse=True)
def report_folder(tmp_path, in_tmp_path):
    torch.save({f"h.{n}.w": torch.randn(4, 4) for n in range(6)}, "net.pt")
    (tmp_path / "net.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 3)\n")


def test_page_equals_the_html_of_inspect(statecli, tmp_path):
    """The pages of report and inspect are equal; --stats of report equals --distributions of inspect."""
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
    """Without -o, one line names the missing option."""
    result = statecli("report", "net.pt")
    assert (result.code, result.err) == (2, "statecli: report writes an HTML file; add --output report.html\n")


def test_spectra_are_in_json_and_on_the_page(statecli, tmp_path):
    """Singular values as torch computes them; --spectra includes --stats."""
    document = json.loads(statecli("inspect", "net.pt", "--spectra", "-f", "json").out)
    expected = torch.linalg.svdvals(torch.load("net.pt")["h.0.w"].double()).tolist()
    assert document["tensors"][0]["spectrum"]["values"] == pytest.approx(expected)
    assert "stats" in document["tensors"][0]
    assert statecli("report", "net.pt", "--spectra", "-o", "report.html").code == 0
    assert '"ranks":[1,2,3,4]' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("option", ["--distributions", "--spectra"])
def test_a_class_has_no_spectra(statecli, option):
    """A class is refused, because it has only initial values."""
    result = statecli("inspect", "net.py:make", option)
    assert result.err == f"statecli: {option}: needs a checkpoint, and net.py:make is a class; use --stats\n"
