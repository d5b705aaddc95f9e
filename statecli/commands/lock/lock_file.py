"""The lock file: JSON, one tensor a line, sorted, without times and absolute paths: of equal weights the same bytes.

Nothing in it depends on how the weights are stored. What only some formats record (`kind`, `requires_grad`, `tied`) is
written where the checkpoint says it and is null, or left out, where it does not; null agrees with everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError, UsageError
from statecli.core.json_text import encode_json
from statecli.core.state import Kind, Scalar
from statecli.storage import files, json_object
from statecli.storage.source import Source
from statecli.targets.load import split
from statecli.targets.location import named
from statecli.values.algorithm import Algorithm

SCHEMA = "statecli.lock/1"
#: Bytes of the longest lock file that is read: of a million tensors.
LONGEST = 1 << 30
#: What git writes around a conflict; no line of JSON begins so.
MARKERS = (b"<<<<<<<", b"|||||||", b"=======", b">>>>>>>")


class LockedTensor(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor. `digest` is null where there are no values: in a class, on the meta device.

    `tied` is the first name, in order, of those that are one and the same tensor; `persistent` is there where it is
    false: no state_dict has this one.
    """

    fqn: str
    section: str
    kind: Kind | None
    dtype: str
    shape: tuple[int, ...] | None
    requires_grad: bool | None
    digest: str | None
    tied: str | None = None
    persistent: bool = True


class LockedSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of a checkpoint, in the terms of `state.Settings`; all empty where it has none.

    `format` is the reader's name. `modules` are the sections that are modules pickled whole, whose attributes are
    settings.
    """

    format: str = ""
    values: dict[str, Scalar] = {}
    types: dict[str, str] = {}
    kinds: dict[str, str] = {}
    beside: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


class LockedTarget(msgspec.Struct, frozen=True):
    """One target. `target` is null where it is the only one: a lock knows weights, not where they lie.

    `settings` is absent in a lock of weights only. `files` are the digests of the files of a folder that change the
    model, by their paths in the folder; absent where the target is not a folder. A pipeline of diffusers has files and
    no tensors: its components are targets of their own.
    """

    target: str | None
    tensors: tuple[LockedTensor, ...]
    settings: LockedSettings | None = None
    files: dict[str, str] | None = None

    @property
    def is_pipeline(self) -> bool:
        return not self.tensors and self.files is not None


class Lock(msgspec.Struct, frozen=True):
    """A lock file. `digest` is the algorithm."""

    schema: str
    digest: Algorithm
    targets: tuple[LockedTarget, ...]

    @property
    def has_no_names(self) -> bool:
        """Whether it is of one target alone, whichever that is."""
        return self.targets[0].target is None

    def of(self, text: str, folder: str = ".", *, by_name: bool = False) -> LockedTarget | None:
        """What a lock in `folder` has of the target that was typed so; None where that is nothing.

        The only one of a lock has no name and is of any target, unless that is looked for `by_name`. A link is also
        what it leads to: a lock of a folder has that file once, under its own name.
        """
        if self.has_no_names:
            return None if by_name else self.targets[0]
        path, section = split(text)
        real = files.resolve_links(path) + ("" if section is None else f"#{section}")
        found = {one.target: one for one in self.targets}
        return found.get(named(text, folder)) or (found.get(named(real, folder)) if files.is_link(path) else None)


def written(lock: Lock) -> Iterator[bytes]:
    """The file, piece by piece."""
    yield b'{"schema": %b, "digest": %b, "targets": [' % (encode_json(lock.schema), encode_json(lock.digest))
    for n, target in enumerate(lock.targets):
        yield b'%b\n{"target": %b, %b"tensors": [' % (
            b"," if n else b"",
            encode_json(target.target),
            _companions(target),
        )
        for m, tensor in enumerate(target.tensors):
            yield b"%b\n%b" % (b"," if m else b"", encode_json(tensor))
        yield b"\n]}"
    yield b"\n]}\n"


def _companions(target: LockedTarget) -> bytes:
    """The settings and files of a target, one a line, so that a review shows which of them changed."""
    lines = []
    if target.settings is not None:
        fields = msgspec.to_builtins(target.settings)
        lines += [b'"settings": ' + _one_a_line({key: value for key, value in fields.items() if value}) + b", "]
    if target.files:
        lines += [b'"files": ' + _one_a_line(target.files) + b", "]
    return b"".join(lines)


def _one_a_line(entries: Mapping[str, object]) -> bytes:
    """A JSON object with an entry a line; `values` of settings, an object in it, too."""
    if not entries:
        return b"{}"
    shown = (
        encode_json(key)
        + b": "
        + (_one_a_line(value) if key == "values" and isinstance(value, dict) else encode_json(value))
        for key, value in entries.items()
    )
    return b"{\n" + b",\n".join(shown) + b"}"


def read(path: str) -> Lock:
    """The lock file. Raises `UnreadableError` where there is none, `MalformedError` for what is no lock file."""
    found = document(path, "the lock file")
    schema = found.get("schema")
    if schema != SCHEMA:
        raise MalformedError(f"{path}: is no lock file that this version reads: its schema is {schema!r}, not {SCHEMA}")
    try:
        lock = msgspec.convert(found, Lock)
    except msgspec.ValidationError as why:
        raise MalformedError(f"{path}: is no lock file: {why}; lock again") from why
    _check(lock, path)
    return lock


def document(path: str, what: str) -> dict[str, object]:
    """A JSON file of ours, which `what` names; it may have been merged by git. Raises as `read` does."""
    try:
        with Source(path) as source:
            if source.size > LONGEST:
                raise MalformedError(f"has {source.size:,} bytes, more than the {LONGEST:,} that one may have")
            raw = source.read(0, source.size)
    except UnreadableError as why:
        raise type(why)(f"{path}: {quoting.append_reason(what, why)}") from why
    if raw.startswith(MARKERS) or any(b"\n" + marker in raw for marker in MARKERS):
        raise MalformedError(f"{path}: {what} has conflict markers of a merge: write it again")
    found, repeats = json_object.parse_object(raw, f"{path}: {what}")
    json_object.refuse_repeats(repeats, f"{path}: {what}")
    return found


def _check(lock: Lock, path: str) -> None:
    """What JSON's types do not say. Raises `MalformedError`."""
    names = [one.target for one in lock.targets]
    if not names or (None in names and len(names) > 1):
        raise MalformedError(f"{path}: has {len(names)} targets, not all of them named; lock again")
    refuse_twins([str(name) for name in names], f"{path}: locks the target")
    for target in lock.targets:
        refuse_twins([_called(tensor) for tensor in target.tensors], f"{path}: locks")
        for tensor in target.tensors:
            _check_tensor(tensor, path)


def _check_tensor(tensor: LockedTensor, path: str) -> None:
    if tensor.shape is not None and any(size < 0 for size in tensor.shape):
        raise MalformedError(f"{path}: {tensor.fqn}: has shape {list(tensor.shape)}; lock again")
    if tensor.digest is not None and (len(tensor.digest) != 64 or set(tensor.digest) - set("0123456789abcdef")):
        raise MalformedError(f"{path}: {tensor.fqn}: {tensor.digest[:80]!r} is no digest of 64 digits; lock again")


def _called(tensor: LockedTensor) -> str:
    return f"{tensor.section}.{tensor.fqn}"


def refuse_twins(names: Sequence[str], what: str) -> None:
    """Raises `UsageError` for the first name that comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{what} {name} twice: which of the two is meant cannot be told")
        seen.add(name)
