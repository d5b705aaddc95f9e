"""The line of `statecli lock -o FILE` for a person at a terminal."""

from __future__ import annotations

import shlex

import pytest

torch = pytest.importorskip("torch")

from statecli.cli import console  # noqa: E402 - after the check for torch


@pytest.mark.parametrize(("words", "lines"), [(("-o", "a.lock.json"), 1), ((), 0)])
def test_a_saved_lock_is_confirmed_with_the_command_that_checks_it(tmp_path, monkeypatch, statecli, words, lines):
    """The line is printed on a terminal only, and its command works; a printed lock needs no line."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "b": torch.ones(1)}, "a.pt")
    printed: list[str] = []
    monkeypatch.setattr(console, "print_on_terminal", printed.append)
    assert statecli("lock", "a.pt", *words).code == 0
    assert len(printed) == lines
    for line in printed:
        text, _, command = line.partition("; check: ")
        assert text == "2 tensors locked"
        assert statecli(*shlex.split(command)[1:]).code == 0
