"""Globs with braces, as `-i` and the filters take them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import example, given, strategies as st

from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.selection import Selection, matches_any, select


@pytest.mark.parametrize(
    ("glob", "name", "is_match"),
    [
        ("layers.{3,4,5}.*", "layers.4.w", True),
        ("layers.{3,4,5}.*", "layers.30.w", False),
        ("layers.{3,4,5}*", "layers.30.w", False),
        ("layers.{3..5}*", "layers.4.w", True),
        ("layers.{3..5}*", "layers.45.w", False),
        ("{q,k}_proj.{weight,bias}", "k_proj.bias", True),
        ("{q,k}_proj.{weight,bias}", "v_proj.bias", False),
        ("a{b*,c?}", "abxx", True),
        ("a{b*,c?}", "acxx", False),
        ("{a}", "{a}", True),
        ("[{]a}", "{a}", True),
        ("[{]a}", "a", False),
        ("x[0].{1,2}", "x[0].2", True),
        ("{5..3}", "4", False),
        ("{}", "", True),
        ("a{", "a{", True),
    ],
)
def test_braces_stand_for_several_names(glob, name, is_match):
    """Alternatives, and whole numbers; braces also match themselves."""
    assert matches_any((name,), (glob,)) is is_match


@given(st.integers(0, 99_999), st.integers(0, 99_999), st.integers(0, 999_999))
@example(0, 2500, 2000)
def test_a_range_has_exactly_its_numbers(first, last, number):
    for tested in (number, first, last, first - 1, last + 1):
        assert matches_any((f"e.{tested}",), (f"e.{{{first}..{last}}}",)) is (first <= tested <= last)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("glob", ["layers.{3,40}.w", "layers.{0..12}.{w,b}", "{layers,x}.{1,2}.w"])
def test_braces_select_the_names_that_bash_expands(glob):
    """The names are those of `echo GLOB` that exist as tensors."""
    expanded = subprocess.run(["bash", "-c", f"echo {glob}"], capture_output=True, text=True, check=True).stdout.split()
    names = [f"{stack}.{n}.{name}" for stack in ("layers", "x") for n in range(50) for name in "wb"]
    state = ModelState("x", "safetensors", tuple(TensorInfo(name, "float32", (), 1, 4) for name in names))
    assert {tensor.fqn for tensor in select(state, Selection(include=(glob,)), "x").tensors} == set(expanded)
