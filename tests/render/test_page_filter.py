"""Run the filter script of the page in node, with the test cases of browse."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources

import pytest
from msgspec.structs import replace

from statecli.commands.inspect.run import Inspection
from statecli.core.json_text import encode_json
from statecli.core.unstored_ties import mark_unstored_ties
from statecli.report import RowView
from statecli.report.inspect import build_inspect_report
from tests.filter_cases import CASES, PROBLEMS, SECTION_CASES, build_sections, build_state

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def find(state, texts):
    """Return the rows and the problem that the script of the page returns for each text."""
    script = resources.files("statecli.render").joinpath("filter.js").read_text("utf-8")
    data = encode_json(build_inspect_report(Inspection(state), RowView()).tensor_list()).decode()
    run = f"const own = Filters.create({data}); console.log(JSON.stringify({json.dumps(texts)}.map(own.find)))"
    code = f"{script}\n{run}"
    return json.loads(subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True).stdout)


def test_a_filter_finds_the_tensors():
    """The filter matches name, glob, dtype, kind, shape, number, statistic, problem and remark."""
    state = build_state()
    for (text, keep), actual in zip(CASES, find(state, [text for text, _ in CASES]), strict=True):
        expected = [tensor.fqn for tensor in state.tensors if keep(tensor)]
        assert [state.tensors[row].fqn for row in actual["rows"]] == expected, text


def test_problem_of_a_wrong_word_is_shown():
    """A wrong word is ignored; for a word without matches, the values of its field are listed."""
    for (text, count, problem), actual in zip(
        PROBLEMS, find(build_state(), [case[0] for case in PROBLEMS]), strict=True
    ):
        assert (len(actual["rows"]), actual["problem"]) == (count, problem), text


def test_names_have_their_section():
    """If a file has several sections, names have the form that `-i` takes."""
    state = build_sections()
    for (_, expected), actual in zip(SECTION_CASES, find(state, [case[0] for case in SECTION_CASES]), strict=True):
        assert [(state.tensors[row].section, state.tensors[row].fqn) for row in actual["rows"]] == expected


def test_filter_by_values_names_the_option_that_reads_them():
    """The message names the option that reads the values."""
    for actual in find(build_state(with_stats=False), ["nan>0", "problem"]):
        assert "the report has no statistics; run statecli report --stats" in actual["problem"]


def test_a_tied_name_that_is_not_stored_finds_the_stored_tensor():
    """A part of the name and a glob match; names that do not exist still do not match."""
    state = mark_tied_name(build_state())
    texts = ["lm_head", "LM_head.weight", "lm_head.*", "{lm_head,typo}.weight", "tied_head"]
    assert [[state.tensors[row].fqn for row in actual["rows"]] for actual in find(state, texts)] == [
        *[["embed.weight"]] * 4,
        [],
    ]


def mark_tied_name(state):
    tensors = (mark_unstored_ties(t, ["lm_head.weight"]) if t.fqn == "embed.weight" else t for t in state.tensors)
    return replace(state, tensors=tuple(tensors))
