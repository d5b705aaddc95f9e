"""The list of tensors for a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
import torch

from statecli.core.escaping import escape

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "a\u202eb\n", "x" * 10_000, "\ud800", "__proto__"]


@pytest.fixture
def save_page(statecli, tmp_path):
    """Return the page of a state_dict, and the list of tensors in the page."""

    def save(state, *options):
        torch.save(state, tmp_path / "net.pt")
        page = statecli("inspect", tmp_path / "net.pt", "-f", "html", *options).out
        element = re.search(r'<script type="application/json" id="tensor-data">(.*?)</script>', page, re.S)
        return page, element and json.loads(element[1])

    return save


def test_columns_have_the_facts_of_json(save_page, statecli, tmp_path):
    """Each tensor has the dtype, shape, kind, elements and bytes of `-f json`."""
    state = {"a.weight": torch.ones(2, 3), "a.steps": torch.tensor(3), "b": torch.ones(4, dtype=torch.bfloat16)}
    _, data = save_page(state | {"c": state["b"]})
    rows = json.loads(statecli("inspect", tmp_path / "net.pt", "-f", "json").out)["tensors"]
    text = {name: [data[name]["values"][n] for n in data[name]["indices"]] for name in ("dtypes", "shapes", "kinds")}
    assert data["names"] == [row["fqn"] for row in rows]
    assert text["dtypes"] == [row["dtype"] for row in rows]
    assert [json.loads(shape) for shape in text["shapes"]] == [row["shape"] for row in rows]
    assert [kind.rstrip("?") for kind in text["kinds"]] == [row["kind"] for row in rows]
    assert data["row_elements"] == [row["elements"] for row in rows]
    assert data["row_bytes"] == [row["bytes"] for row in rows]
    assert (data["bytes"], data["shared"]) == (24 + 8 + 8, [[2, 0, 0, 8], [3, 0, 0, 8]])


def test_hostile_names_stay_inside_their_element(save_page):
    """No name ends the element of the data, and the whole name is there with control characters made visible."""
    page, data = save_page({name: torch.ones(1) for name in HOSTILE})
    assert data["names"] == [escape(name) for name in HOSTILE]
    assert page.count("<script") == page.count("</script>") == 6


def test_the_policy_names_each_script(save_page):
    """The content security policy has the hash of the style and of both scripts, and of nothing else."""
    page, _ = save_page({"a": torch.ones(1)})
    texts = [*re.findall(r"<style>(.*?)</style>", page, re.S), *re.findall(r"<script>(.*?)</script>", page, re.S)]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    assert re.findall(r"'sha256-(.*?)'", page.partition(">")[2].partition("<title>")[0]) == hashes
    assert not re.search(r"https?:|@import|url\(|\b(?:src|href)=|fetch\(|XMLHttp|innerHTML|\sstyle=", page)


def test_a_page_without_scripts_has_the_rows(save_page):
    """The table of the tensors is in the element for browsers without scripts."""
    page, _ = save_page({"layer.weight": torch.ones(1)})
    assert "layer.weight" in re.search(r"<noscript>(.*?)</noscript>", page, re.S)[1]


def test_selected_rows_are_a_plain_table(save_page):
    """With --top the page has the chosen rows as a table, not all tensors as a list."""
    page, data = save_page({"a": torch.ones(1), "b": torch.ones(9)}, "--top", "1")
    assert data is None
    assert "<noscript>" not in page
