"""The unified diff of an edit has the format of difflib and git, even in files with many equal lines."""

from __future__ import annotations

import difflib
import subprocess

import pytest
from hypothesis import given, strategies as st

from statecli.commands.fix.line_diff import format_unified_diff, list_blocks

LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "    return x\n"]), max_size=40)


@given(LINES, LINES)
def test_blocks_cover_both_versions(before, after):
    """The blocks cover both versions, and the blocks called equal are equal."""
    blocks = list_blocks(before, after)
    rebuilt = [line for kind, a, b, c, d in blocks for line in (before[a:b] if kind == "equal" else after[c:d])]
    assert rebuilt == after
    assert [line for _, a, b, _, _ in blocks for line in before[a:b]] == before


@given(LINES)
def test_equal_files_have_no_diff(lines):
    """Not even a header."""
    assert list(format_unified_diff(lines, lines, "a", "b")) == []


@pytest.mark.parametrize("start", [0, 1, 10, 499])
def test_a_long_file_has_only_its_changes(start):
    """Frequent lines in a file of over 200 lines are context; difflib shows such lines as removed and added."""
    before = [line for n in range(100) for line in (f"def f{n}(x):\n", "    y = 1\n", "    return x\n", "\n", "\n")]
    after = [*before[:start], "    z = 2\n", "    return x\n", *before[start + 1 :]]
    lines = list(format_unified_diff(before, after, "a", "b"))[2:]
    assert sum(line.startswith("-") for line in lines) == 1
    assert sum(line.startswith("+") for line in lines) <= 2


@given(LINES, LINES)
def test_git_applies_the_diff(tmp_path_factory, before, after):
    """`git apply` of the diff turns the first file into the second."""
    lines = list(format_unified_diff(before, after, "a/f", "b/f"))
    assert bool(lines) == (before != after)
    if before and after and lines:
        folder = tmp_path_factory.mktemp("diff")
        (folder / "f").write_text("".join(before))
        subprocess.run(["git", "apply", "-"], input="".join(lines).encode(), cwd=folder, check=True)
        assert (folder / "f").read_text() == "".join(after)


def test_short_files_have_the_diff_of_difflib():
    """Byte for byte."""
    before, after = ["a\n", "b\n", "c\n"], ["a\n", "x\n", "c\n", "d\n"]
    assert list(format_unified_diff(before, after, "a", "b")) == list(difflib.unified_diff(before, after, "a", "b"))
    assert list(format_unified_diff([], after, "a", "b")) == list(difflib.unified_diff([], after, "a", "b"))
