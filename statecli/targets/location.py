"""Where a finding is, as every output has it: a file, and a line or bytes of it."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from statecli.core.finding import Finding
from statecli.core.rule import FORMER_NAMES
from statecli.core.state import Place, TensorInfo
from statecli.live import spec
from statecli.storage import files
from statecli.targets import load


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


def shown(finding: Finding) -> str | None:
    """`net.py:9`, `net.pt: bytes 64+128`; None where only the target is known."""
    if finding.origin is not UNSET:
        return f"{finding.origin.file}:{finding.origin.line}"
    if finding.place is not UNSET:
        return f"{finding.place.path}: bytes {finding.place.offset}+{finding.place.length}"
    return None


def named(text: str, folder: str = ".") -> str:
    """A target's name in a file that lies in `folder`: of a path the way to it from there, with `/`, however typed.

    `pkg.mod:Net` is no path and stays as it is. What is not there any more has the name that it had.
    """
    path = path_of(text)
    return text if path is None else _way(path or os.curdir, folder) + text[len(path) :]


def is_in(path: str, folder: str) -> bool:
    """Whether it lies in the folder, however deep."""
    if files.is_remote(path) or files.is_remote(folder):
        return files.make_relative(path, folder) != path
    return named(path, folder).split("/")[0] != os.pardir


def unnamed(name: str, folder: str) -> str:
    """The target that a file in `folder` calls `name`, as one types it here."""
    if not path_of(name) or files.is_remote(name):
        return name
    return _below(folder, name) if files.is_remote(folder) else named(os.path.join(folder, name))


def _below(folder: str, name: str) -> str:
    """What a file behind a URL calls `name`; above its host there is nothing."""
    path = load.split(name)[0]
    for step in path.split("/"):
        above = files.get_folder(files.make_absolute(folder))
        folder = folder if step == os.curdir else above if step == os.pardir else files.join(folder, step)
    return folder + name[len(path) :]


def in_repository(text: str) -> str:
    """`named` from the root of the git repository that one is in; from here where one is in none."""
    return _in_repository(text, os.getcwd())


@functools.lru_cache(maxsize=1)
def _in_repository(text: str, here: str) -> str:
    """Kept for the next: the findings of one target stand together."""
    return named(text, _root(here))


@functools.lru_cache(maxsize=1)
def _root(folder: str) -> str:
    above = folder
    while not os.path.lexists(os.path.join(above, ".git")):
        if above == os.path.dirname(above):
            return folder
        above = os.path.dirname(above)
    return above


def path_of(text: str) -> str | None:
    """The start of the text that is a path; None where it names a module by dots."""
    known = None if os.path.lexists(text) or files.is_remote(text) else spec.parse_spec(text.partition("(")[0])
    if known is not None:
        return known.module if known.is_file else None
    return load.split(text)[0]


def _way(path: str, folder: str) -> str:
    """Through links as they were typed, unless the real way climbs less."""
    if files.is_remote(path) or files.is_remote(folder):
        return files.make_relative(path, folder)
    parent, name = os.path.split(os.path.abspath(path))
    typed = os.path.relpath(path, folder or os.curdir)
    parent = os.path.realpath(parent) if os.path.isdir(parent) else parent
    real = os.path.relpath(os.path.join(parent, name), os.path.realpath(folder))
    return min(typed, real, key=lambda way: way.split(os.sep).count(os.pardir)).replace(os.sep, "/")


def file_of(text: str) -> str:
    """The file that a target's text names: `net.py` of `net.py:Net(4)`, `pkg/mod.py` of `pkg.mod:Net`."""
    head = text.partition("(")[0]
    known = spec.parse_spec(head) if ":" in head and not files.is_remote(text) else None
    if known is not None:
        return known.module if known.is_file else known.module.replace(".", "/") + ".py"
    return load.split(text)[0]


def located(findings: Iterable[Finding], tensors: Iterable[TensorInfo]) -> tuple[Finding, ...]:
    """The same findings, those of a tensor at the line that assigned it or at its bytes, unless they say it.

    A finding that names no section is of any tensor of its name.
    """
    findings = tuple(findings)
    names = {finding.fqn for finding in findings}
    rows: dict[tuple[str | None, str], TensorInfo] = {}
    for tensor in tensors if names else ():
        if tensor.fqn in names:
            rows[tensor.section, tensor.fqn] = tensor
            rows.setdefault((None, tensor.fqn), tensor)
    return tuple(_placed(finding, rows.get((finding.section, finding.fqn or ""))) for finding in findings)


def _placed(finding: Finding, row: TensorInfo | None) -> Finding:
    if row is None or finding.fqn is None or finding.origin is not UNSET or finding.place is not UNSET:
        return finding
    if row.origin is not None:
        return replace(finding, origin=row.origin)
    where = bytes_of(row)
    return finding if where is None else replace(finding, place=where)


def bytes_of(tensor: TensorInfo) -> Place | None:
    """A tensor's bytes in its file, those of its storage where it is not one piece; None where no one file has it."""
    data = tensor.data
    if data is None or data.inline is not None:
        return None
    whole = data.storage.place
    if whole is None or data.storage.packing is not None or data.strides is not None or not tensor.elements:
        return whole
    size = tensor.nbytes // tensor.elements
    return Place(data.storage.path, data.storage.offset + data.offset * size, tensor.nbytes)


def fingerprint(finding: Finding) -> str:
    """Return a digest that is the same in every run: of the rule, target, section, tensor, `about` and content.

    A target counts as it lies in its repository, from wherever and however it was typed.
    """
    import hashlib  # loads OpenSSL, which no other use of a finding has to wait for

    rule = FORMER_NAMES.get(finding.rule, finding.rule)  # else an alert that is known would be reported as new
    parts = [rule, in_repository(finding.target), finding.section or "", finding.fqn or ""]
    parts += [part for part in (finding.about, finding.content) if isinstance(part, str)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def fingerprinted(findings: Iterable[Finding]) -> Iterator[tuple[Finding, str, int]]:
    """Each with its fingerprint and, as several may have the same, which of them it is, from 1."""
    seen: Counter[str] = Counter()
    for finding in findings:
        digest = fingerprint(finding)
        seen[digest] += 1
        yield finding, digest, seen[digest]
