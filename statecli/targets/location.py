"""Location of a finding, the same for every output: a file, and a line or a byte range."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from statecli.core.finding import Finding
from statecli.core.model_state import Origin, Place, TensorInfo
from statecli.core.rule import FORMER_NAMES
from statecli.live import spec
from statecli.live.installed_code import is_installed_file
from statecli.storage import files
from statecli.targets.section_of_target import split_section


class Location(msgspec.Struct, frozen=True):
    """Location in a file. `path` is as typed by the user, or as found by Python for a module."""

    path: str
    line: int | None = None
    bytes: Place | None = None


def locate(finding: Finding) -> Location:
    """Return the location of a finding: its source line, or else its bytes, or else the file of its target."""
    if finding.origin is not UNSET:
        return Location(finding.origin.file, finding.origin.line)
    if finding.place is not UNSET:
        return Location(finding.place.path, None, finding.place)
    return Location(find_file(finding.target))


def format_place(finding: Finding) -> str | None:
    """Return `net.py:9` or `net.pt: bytes 64+128`, or None if only the target is known."""
    if finding.origin is not UNSET:
        return f"{finding.origin.file}:{finding.origin.line}"
    if finding.place is not UNSET:
        return f"{finding.place.path}: bytes {finding.place.offset}+{finding.place.length}"
    return None


def make_relative_name(text: str, folder: str = ".") -> str:
    """Return the target as a path relative to `folder`, with `/`. The way in which the user typed it has no effect.

    A class (`pkg.mod:Net`) is returned unchanged, and so is the name of a missing file.
    """
    path = find_path(text)
    return text if path is None else _make_relative_path(path or os.curdir, folder) + text[len(path) :]


def is_in_folder(path: str, folder: str) -> bool:
    """Return whether the path lies in the folder, at any depth."""
    if files.is_remote(path) or files.is_remote(folder):
        return files.make_relative(path, folder) != path
    return make_relative_name(path, folder).split("/")[0] != os.pardir


def resolve_name(name: str, folder: str) -> str:
    """Return the target for a name in a file of `folder`. A local path becomes relative to the current folder."""
    if not find_path(name) or files.is_remote(name):
        return name
    if files.is_remote(folder):
        return _resolve_remote_name(folder, name)
    return make_relative_name(os.path.join(folder, name))


def _resolve_remote_name(folder: str, name: str) -> str:
    """Resolve `name` relative to a remote folder. `..` cannot leave the host."""
    path = split_section(name)[0]
    for step in path.split("/"):
        parent = files.get_folder(files.make_absolute(folder))
        folder = folder if step == os.curdir else parent if step == os.pardir else files.join(folder, step)
    return folder + name[len(path) :]


def make_repository_name(text: str) -> str:
    """Return the target's name relative to the root of the current git repository, or else to the current folder."""
    return _make_repository_name(text, os.getcwd())


@functools.lru_cache(maxsize=1)
def _make_repository_name(text: str, current_folder: str) -> str:
    """See `make_repository_name`. The last result is cached, because the findings of a target are consecutive."""
    return make_relative_name(text, find_repository_root(current_folder))


def has_repository(folder: str) -> bool:
    """Return whether an absolute folder is in a git repository."""
    return os.path.lexists(os.path.join(find_repository_root(folder), ".git"))


def find_repository_root(folder: str) -> str:
    """Return the root of the git repository that contains an absolute folder, or the folder itself if there is none."""
    root = folder
    while not os.path.lexists(os.path.join(root, ".git")):
        if root == os.path.dirname(root):
            return folder
        root = os.path.dirname(root)
    return root


def find_path(text: str) -> str | None:
    """Return the path at the start of a target's text, or None for a class in a dotted module (`pkg.mod:Net`)."""
    spec_of_class = None if os.path.lexists(text) or files.is_remote(text) else spec.parse_spec(text.partition("(")[0])
    if spec_of_class is not None:
        return spec_of_class.module if spec_of_class.is_file else None
    return split_section(text)[0]


def _make_relative_path(path: str, folder: str) -> str:
    """Return the path relative to `folder`: with links as typed, or with resolved links if it then has fewer `..`."""
    if files.is_remote(path) or files.is_remote(folder):
        return files.make_relative(path, folder)
    parent, name = os.path.split(os.path.abspath(path))
    typed = os.path.relpath(path, folder or os.curdir)
    parent = os.path.realpath(parent) if os.path.isdir(parent) else parent
    real = os.path.relpath(os.path.join(parent, name), os.path.realpath(folder))
    return min(typed, real, key=lambda path: path.split(os.sep).count(os.pardir)).replace(os.sep, "/")


def find_file(text: str) -> str:
    """Return the file in a target's text: `a.py` of `a.py:Net(4)` or `a.py::main`, `pkg/mod.py` of `pkg.mod:Net`."""
    script, colons, _ = text.partition("::")
    if colons and script.endswith(".py"):
        return script
    head = text.partition("(")[0]
    spec_of_class = spec.parse_spec(head) if ":" in head and not files.is_remote(text) else None
    if spec_of_class is not None:
        return spec_of_class.module if spec_of_class.is_file else spec_of_class.module.replace(".", "/") + ".py"
    return split_section(text)[0]


def add_places(findings: Iterable[Finding], tensors: Iterable[TensorInfo]) -> tuple[Finding, ...]:
    """Add the tensor's source line, or otherwise its byte range, to each finding that has neither of the two.

    A finding without a section applies to any tensor of its name.
    """
    findings = tuple(findings)
    names = {finding.fqn for finding in findings}
    rows: dict[tuple[str | None, str], TensorInfo] = {}
    for tensor in tensors if names else ():
        if tensor.fqn in names:
            rows[tensor.key] = tensor
            rows.setdefault((None, tensor.fqn), tensor)
    return tuple(_add_place(finding, rows.get((finding.section, finding.fqn or ""))) for finding in findings)


def _add_place(finding: Finding, row: TensorInfo | None) -> Finding:
    if row is None or finding.fqn is None or finding.origin is not UNSET or finding.place is not UNSET:
        return finding
    if row.origin is not None:
        return replace(finding, origin=row.origin)
    place = find_bytes(row)
    return finding if place is None else replace(finding, place=place)


def find_bytes(tensor: TensorInfo) -> Place | None:
    """Return a tensor's bytes in its file, or None if they are not in a single file.

    For a view with gaps, returns the bytes of its storage.
    """
    data = tensor.data
    if data is None or data.inline is not None:
        return None
    storage_place = data.storage.place
    if storage_place is None or data.storage.packing is not None or data.strides is not None or not tensor.elements:
        return storage_place
    size = tensor.nbytes // tensor.elements
    return Place(data.storage.path, data.storage.offset + data.offset * size, tensor.nbytes)


def compute_fingerprint(finding: Finding) -> str:
    """Return a digest of a finding's rule, target, section, tensor, `about` and `content`, the same in every run.

    The target is named relative to its repository, so that neither the current folder nor the spelling matters.
    """
    import hashlib  # loads OpenSSL, which other uses of a finding do not need

    rule = FORMER_NAMES.get(finding.rule, finding.rule)  # the former name, so that a known alert is not reported as new
    parts = [rule, make_repository_name(finding.target), finding.section or "", finding.fqn or ""]
    parts += [part for part in (finding.about, finding.content) if isinstance(part, str)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def number_fingerprints(findings: Iterable[Finding]) -> Iterator[tuple[Finding, str, int]]:
    """Yield each finding with its fingerprint, and its number (from 1) among the findings with this fingerprint."""
    counts: Counter[str] = Counter()
    for finding in findings:
        digest = compute_fingerprint(finding)
        counts[digest] += 1
        yield finding, digest, counts[digest]


def is_installed(origin: Origin) -> bool:
    """Return whether the source line `origin` is in an installed library, where users do not fix code."""
    if os.path.isfile(origin.file):
        return False
    paths = (os.path.join(root, origin.file) for root in sys.path)
    return any(is_installed_file(path) and os.path.isfile(path) for path in paths)
