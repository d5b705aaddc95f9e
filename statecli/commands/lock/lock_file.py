"""The lock file: sorted JSON, one line per tensor, no timestamps or absolute paths. Equal weights give equal bytes.

The file does not depend on the storage of the weights. Only some formats record the fields `kind`, `requires_grad` and
`tied`. A field that the checkpoint does not have is null or left out in the lock. Null agrees with every value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from statecli.core import quoting
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import MalformedError, UnreadableError, UsageError
from statecli.core.json_text import encode_json, encode_json_lines
from statecli.core.model_state import Kind, Scalar
from statecli.core.result_views import ResultViews
from statecli.core.similar_paths import append_suggestion
from statecli.storage import files, json_object
from statecli.storage.byte_source import ByteSource
from statecli.targets.location import make_relative_name
from statecli.targets.section_of_target import split_section

SCHEMA = "statecli.lock/1"
_LOCK_AGAIN = "run `statecli lock` again"
#: Largest size of a lock file in bytes: enough for millions of tensors.
MAX_LOCK_BYTES = 1 << 30
#: Number of tensor lines that are encoded together.
_LINES_PER_PIECE = 1 << 14
#: Markers of git around a conflict; no line of JSON begins with them.
CONFLICT_MARKERS = (b"<<<<<<<", b"|||||||", b"=======", b">>>>>>>")


class LockedTensor(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A locked tensor: a line of the lock file.

    Attributes:
        digest: Null without values: in a class, on the meta device.
        tied: The first name, in order, of tied tensors.
        persistent: Written if false: the tensor is not in a state_dict.
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
    """The locked settings of a checkpoint, with the fields of `state.Settings`. Without settings, all fields are empty.

    `format` is the reader's name. `modules` are sections of whole modules, with attributes as settings.
    """

    format: str = ""
    values: dict[str, Scalar] = {}
    types: dict[str, str] = {}
    kinds: dict[str, str] = {}
    beside: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


class LockedTarget(msgspec.Struct, frozen=True):
    """A locked target: its tensors, settings and files.

    Attributes:
        target: Name; null for a single target, because a lock describes weights, not where they are stored.
        settings: Absent in a lock of weights only.
        files: Digests of the files of a folder that change the model, by their paths in the folder; absent if the
            target is not a folder. A diffusers pipeline has files and no tensors: its components are targets
            themselves.
    """

    target: str | None
    tensors: tuple[LockedTensor, ...]
    settings: LockedSettings | None = None
    files: dict[str, str] | None = None

    @property
    def is_pipeline(self) -> bool:
        return not self.tensors and self.files is not None


class Lock(ResultViews, msgspec.Struct, frozen=True):
    """A lock file. `digest` is the hash algorithm."""

    schema: str
    digest: Algorithm
    targets: tuple[LockedTarget, ...]

    @property
    def has_no_names(self) -> bool:
        """True if the lock has a single target without a name."""
        return self.targets[0].target is None

    def find_target(self, text: str, folder: str = ".", *, by_name: bool = False) -> LockedTarget | None:
        """Return the locked target for a target that the user typed, or None. `folder` is the folder of the lock file.

        The single target of a lock is used for any target, unless `by_name`. A link also stands for its file: a lock of
        a folder has the file once, under its own name.
        """
        if self.has_no_names:
            return None if by_name else self.targets[0]
        path, section = split_section(text)
        real = files.resolve_links(path) + ("" if section is None else f"#{section}")
        by_target = {target.target: target for target in self.targets}
        linked = by_target.get(make_relative_name(real, folder)) if files.is_link(path) else None
        return by_target.get(make_relative_name(text, folder)) or linked


def encode_lock(lock: Lock) -> Iterator[bytes]:
    """Yield the bytes of a lock file, piece by piece."""
    yield b'{"schema": %b, "digest": %b, "targets": [' % (encode_json(lock.schema), encode_json(lock.digest))
    for n, target in enumerate(lock.targets):
        yield b'%b\n{"target": %b, %b"tensors": [' % (
            b"," if n else b"",
            encode_json(target.target),
            _encode_companions(target),
        )
        for start in range(0, len(target.tensors), _LINES_PER_PIECE):
            yield b",\n" if start else b"\n"
            yield encode_json_lines(target.tensors[start : start + _LINES_PER_PIECE], b",\n")
        yield b"\n]}"
    yield b"\n]}\n"


def _encode_companions(target: LockedTarget) -> bytes:
    """Encode a target's settings and files with a line for each, so that a review shows the changes."""
    lines = []
    if target.settings is not None:
        fields = msgspec.to_builtins(target.settings)
        lines += [b'"settings": ' + _encode_entries({key: value for key, value in fields.items() if value}) + b", "]
    if target.files:
        lines += [b'"files": ' + _encode_entries(target.files) + b", "]
    return b"".join(lines)


def _encode_entries(entries: Mapping[str, object]) -> bytes:
    """Encode a JSON object with a line for each entry, and a line for each entry of its inner object `values`."""
    if not entries:
        return b"{}"
    lines = (
        encode_json(key)
        + b": "
        + (_encode_entries(value) if key == "values" and isinstance(value, dict) else encode_json(value))
        for key, value in entries.items()
    )
    return b"{\n" + b",\n".join(lines) + b"}"


def read_lock(path: str) -> Lock:
    """Read a lock file. Raises `UnreadableError` for a missing file, `MalformedError` for an invalid file."""
    document = read_document(path, "the lock file")
    schema = document.get("schema")
    if schema != SCHEMA:
        raise MalformedError(
            f"{path}: the lock file has the schema {schema!r}, but this version of statecli reads {SCHEMA!r}; "
            f"{_LOCK_AGAIN}"
        )
    try:
        lock = msgspec.convert(document, Lock)
    except msgspec.ValidationError as error:
        raise MalformedError(f"{path}: is not a valid lock file: {error}; {_LOCK_AGAIN}") from error
    _check_lock(lock, path)
    return lock


def read_document(path: str, document_name: str) -> dict[str, object]:
    """Read a JSON file that statecli wrote and git may have merged. `document_name`: type of the file, for messages.

    Raises as `read_lock` does.
    """
    try:
        with ByteSource(path) as source:
            if source.size > MAX_LOCK_BYTES:
                raise MalformedError(f"has {source.size:,} bytes, more than the limit of {MAX_LOCK_BYTES:,}")
            raw = source.read(0, source.size)
    except UnreadableError as error:
        raise type(error)(append_suggestion(f"{path}: {quoting.append_reason(document_name, error)}", path)) from error
    if raw.startswith(CONFLICT_MARKERS) or any(b"\n" + marker in raw for marker in CONFLICT_MARKERS):
        raise MalformedError(f"{path}: {document_name} contains conflict markers of a Git merge; write the file again")
    return json_object.parse_unique_object(raw, f"{path}: {document_name}", allow_lone_surrogates=True)


def _check_lock(lock: Lock, path: str) -> None:
    """Check a lock file beyond its JSON types, such as for repeated names. Raises `MalformedError`."""
    names = [target.target for target in lock.targets]
    if not names or (None in names and len(names) > 1):
        problem = f"has {len(names)} targets, but not all have a name" if names else "has no targets"
        raise MalformedError(f"{path}: {problem}; {_LOCK_AGAIN}")
    refuse_twins([str(name) for name in names], f"{path}: locks the target")
    for target in lock.targets:
        refuse_twins([f"{tensor.section}.{tensor.fqn}" for tensor in target.tensors], f"{path}: locks")
        for tensor in target.tensors:
            _check_tensor(tensor, path)


def _check_tensor(tensor: LockedTensor, path: str) -> None:
    if tensor.shape is not None and any(size < 0 for size in tensor.shape):
        raise MalformedError(
            f"{path}: {tensor.fqn}: has shape {list(tensor.shape)} with a negative size; {_LOCK_AGAIN}"
        )
    if tensor.digest is not None and (len(tensor.digest) != 64 or set(tensor.digest) - set("0123456789abcdef")):
        raise MalformedError(
            f"{path}: {tensor.fqn}: {tensor.digest[:80]!r} is not a digest of 64 hexadecimal digits; {_LOCK_AGAIN}"
        )


def refuse_twins(names: Sequence[str], message_start: str) -> None:
    """Raise `UsageError` if `names` contains a name twice."""
    if len(set(names)) == len(names):
        return
    seen_names: set[str] = set()
    for name in names:
        if name in seen_names:
            raise UsageError(f"{message_start} {name} twice; rename one of the two")
        seen_names.add(name)
