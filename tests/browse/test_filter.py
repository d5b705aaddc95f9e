"""The filter of browse; `tests/render/test_page_filter.py` has the same cases for the page."""

from __future__ import annotations

import pytest

from statecli.browse.screen_state import ScreenModel
from tests.filter_cases import CASES, PROBLEMS, SECTION_CASES, build_sections, build_state


@pytest.fixture(scope="module")
def model():
    state = build_state()
    model = ScreenModel(state, {})
    for position, tensor in enumerate(state.tensors):
        model.add_stats(position, tensor.stats)
    model.unusual.find_outliers()
    return model


@pytest.mark.parametrize(("text", "keep"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_a_filter_finds_the_tensors(model, text, keep):
    """A filter is a name, glob, dtype, kind, shape, number, statistic, problem or remark."""
    model.set_filter(text)
    fqns = [model.tensors[position].fqn for position in model.filtered_positions]
    assert fqns == [tensor.fqn for tensor in model.tensors if keep(tensor)]


@pytest.mark.parametrize(("text", "count", "problem"), PROBLEMS)
def test_wrong_word_is_reported_with_the_valid_values(model, text, count, problem):
    """A wrong word is ignored; for a word without a match, the values of its field are listed."""
    model.set_filter(text)
    assert (len(model.filtered_positions), model.filter_problem) == (count, problem)


@pytest.mark.parametrize(("text", "expected"), SECTION_CASES)
def test_names_have_their_section(text, expected):
    """If there are several sections, as `-i` takes them."""
    model = ScreenModel(build_sections(), {})
    model.set_filter(text)
    assert [(model.tensors[n].section, model.tensors[n].fqn) for n in model.filtered_positions] == expected


@pytest.mark.parametrize("text", ["nan>0", "problem", "outlier"])
def test_filter_without_statistics_names_the_key(text):
    """The message names the key that reads the statistics."""
    model = ScreenModel(build_state(with_stats=False), {})
    model.set_filter(text)
    assert (
        model.filter_problem
        == f"{text}: only 0 of 84 tensors have statistics; press esc, then S to read all statistics"
    )


def test_word_marked_finds_the_marked_tensors():
    """`marked` finds the tensors that the user marked."""
    model = ScreenModel(build_state(), {})
    model.marked.update({2, 5})
    model.set_filter("marked")
    assert model.filtered_positions == [2, 5]
