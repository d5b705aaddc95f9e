"""docs/reference/urls.md and other pages: their examples of http run, and names are masked as the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.storage import files
from statecli.storage.limits import RequestLimits

pytest.importorskip("urllib3")
DOCUMENTS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCUMENTS / "reference" / "urls.md").read_text("utf-8")
HOST = "https://models.example/"
LINES = [
    line
    for path in sorted(DOCUMENTS.rglob("*.md"))
    for line in path.read_text("utf-8").splitlines()
    if line.startswith("statecli ") and HOST in line
]
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE.partition("## Masked secrets")[2], re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_documented_example_runs(line, file_server, statecli, tmp_path, monkeypatch):
    """The example runs against a server that has the example's files."""
    for name in ("net", "step-100", "step-200"):
        (file_server.folder / name).mkdir()
        save_file({"w": torch.ones(2)}, file_server.folder / name / "model.safetensors")
    net, file_server.listing = file_server.folder / "net", "python"
    weight_map = {"w": "model.safetensors"}
    (net / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    result = statecli(*shlex.split(line.partition(" #")[0].replace(HOST, file_server.url()))[1:])
    assert result.code == (1 if line.endswith(" model.safetensors") else 0), result


def test_examples_are_found():
    """The patterns find the examples and the table's rows."""
    assert len(LINES) >= 8
    assert len(ROWS) >= 5


@pytest.mark.parametrize(("typed", "masked_url"), ROWS)
def test_url_is_masked_as_documented(typed, masked_url):
    """Each row of the table is true."""
    assert files.mask_urls(typed) == masked_url


def test_documented_defaults_are_true():
    """The page states the real defaults of the variables."""
    for variable, default in (("TIMEOUT", 30), ("RETRIES", 4), ("CONNECTIONS", 64)):
        assert getattr(RequestLimits(), variable.lower()) == default
        assert re.search(rf"`STATECLI_{variable}`, (?:by default )?{default}\b", PAGE)
