"""Read lists of names: sections of `names.txt` (names in pickles) and `operators.txt` (operators of torch programs).

A line is `module: names` or `names: harm`, and a comment begins with `#`. A module may have several lines.
"""

from __future__ import annotations

import os
from functools import cache


@cache
def _read_sections(file: str) -> dict[str, str]:
    with open(os.path.join(os.path.dirname(__file__), file), encoding="utf-8") as text:
        sections = f"\n{text.read()}".split("\n[")[1:]
    return {name: lines for name, _, lines in (section.partition("]\n") for section in sections)}


def read_lines(file: str, section: str) -> list[tuple[str, str]]:
    """Return the lines of a section, each as a pair: the text before and the text after its colon."""
    lines = (line.partition(":") for line in _read_sections(file)[section].split("\n") if line and line[0] != "#")
    return [(before, after.strip()) for before, _, after in lines]


def read_names(section: str) -> frozenset[str]:
    """Return the names of a section of `names.txt` as `module.name`."""
    return frozenset(f"{module}.{name}" for module, names in read_lines("names.txt", section) for name in names.split())


def read_harms(section: str) -> dict[str, str]:
    """Return the harm of each name in a section of `names.txt`."""
    return {name: harm for names, harm in read_lines("names.txt", section) for name in names.split()}


def read_operators(section: str) -> dict[str, frozenset[str]]:
    """Return the operators of a section of `operators.txt` by namespace."""
    return {namespace: frozenset(names.split()) for namespace, names in read_lines("operators.txt", section)}
