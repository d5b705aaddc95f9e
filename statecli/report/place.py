"""Where a finding is, as other programs have it: a file, and a line or bytes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET

from statecli import target
from statecli.finding import Finding
from statecli.modules import spec
from statecli.state import Place


class Located(msgspec.Struct, frozen=True):
    """`path` is as the user typed it, or as Python found the module; `line`, `bytes`: None where there is none."""

    path: str
    line: int | None = None
    bytes: Place | None = None


def of(finding: Finding) -> Located:
    """The source line, else the bytes, else the file of its target."""
    if finding.origin is not UNSET:
        return Located(finding.origin.file, finding.origin.line)
    if finding.place is not UNSET:
        return Located(finding.place.path, None, finding.place)
    return Located(file_of(finding.target))


def file_of(text: str) -> str:
    """The file that a target's text names: `net.py` of `net.py:Net(4)`, `pkg/mod.py` of `pkg.mod:Net`."""
    head = text.partition("(")[0]
    known = spec.parse(head) if ":" in head else None
    if known is not None:
        return known.module if known.is_file else known.module.replace(".", "/") + ".py"
    return target.split(text)[0]


def fingerprinted(findings: Iterable[Finding]) -> Iterator[tuple[Finding, str, int]]:
    """Each with its fingerprint and, as several may have the same, which of them it is, from 1."""
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.fingerprint] += 1
        yield finding, finding.fingerprint, seen[finding.fingerprint]
