"""The parts of a command -> the command itself, run once more with their results in the place of its work."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from statecli.core.errors import EngineError, StateError, UnreadableError, UsageError
from statecli.core.version import __version__
from statecli.requests.options import AuditOptions, DiffOptions, InspectOptions, LockOptions, MergeOptions
from statecli.shards.shard import OUTPUT_OPTIONS
from statecli.storage import files
from statecli.targets import load
from statecli.values.require_numpy import require_numpy
from statecli.workers.file_identity import identify_files

if TYPE_CHECKING:
    from statecli.shards.shard_file import Head, ShardFile, StoredResult
    from statecli.shards.tasks import Key
    from statecli.workers.pool import Work

#: The commands that have parts.
COMMANDS: dict[str, Any] = {
    "inspect": InspectOptions,
    "diff": DiffOptions,
    "audit": AuditOptions,
    "lock": LockOptions,
}
Options = InspectOptions | DiffOptions | AuditOptions | LockOptions

_AGAIN = "have all shares done again"
_COPIES = "or give --copies if each job had a copy of its own"
#: What stands in the name of a URL for what is secret in it.
_HIDDEN = "…"


@contextmanager
def merging(asked: MergeOptions) -> Iterator[Options]:
    """The command that the parts are of, as it is to be run inside: what the parts know is looked up.

    Raises `UnreadableError` for what is no part, or not all there is, and `UsageError` for an option that the command
    has not.
    """
    with require_numpy():
        from statecli.shards import shard_file as part
        from statecli.workers import pool
    parts = [part.read_file(path) for path in _named(asked.parts)]
    options = _options(parts[0].path, parts[0].head, asked)
    for one in parts:
        _refuse_others(one, parts[0])
        _refuse_other_files(one, parts[0], copies=asked.copies)
    _refuse_incomplete(parts)
    _refuse_code(options, asked.code)
    _refuse_secrets(options, asked.url)
    _refuse_changed(parts[0], copies=asked.copies)
    known = _Known(parts)
    with pool.use_result_store(known):
        yield options
    known.refuse_surplus()


def _named(texts: Sequence[str]) -> list[str]:
    """The files; a glob that a shell has left as it is means what it matches."""
    found: list[str] = []
    for text in texts:
        matches = [] if files.is_remote(text) or os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
        found += matches or [text]
    return found


# --- whether they are the parts of one command ------------------------------------------------------------------------


def _refuse_others(one: ShardFile, first: ShardFile) -> None:
    """Raises for a part that was made by another statecli than this one, or is of another command than the first."""
    from statecli.values import kernels

    head, other = one.head, first.head
    made = f"statecli {head.statecli} with its kernel in {head.kernel}"
    here = f"statecli {__version__} with its kernel in {kernels.kernel_name()}"
    if made != here:
        raise EngineError(f"{one.path}: was made by {made[:200]}, and this is {here}: install the same for all")
    if head.shard[1] != other.shard[1]:
        why = f"is one of {head.shard[1]} parts, and {first.path} one of {other.shard[1]}"
        raise UnreadableError(f"{one.path}: {why}: merge parts of one run")
    if head.command != other.command:
        why = f"is of statecli {head.command[:40]}, and {first.path} of statecli {other.command}"
        raise UnreadableError(f"{one.path}: {why}: merge parts of one run")
    for name in sorted(head.options.keys() | other.options.keys(), key=lambda name: (name not in _TARGETS, name)):
        if head.options.get(name) != other.options.get(name):
            why = f"was made {_asked(head, name)}, and {first.path} {_asked(other, name)}"
            raise UnreadableError(f"{one.path}: {why}: merge parts of one run")


#: What has no dashes on the line.
_TARGETS = ("before", "after", "target", "targets")


def _asked(head: Head, name: str) -> str:
    """What was asked for by an option, in words."""
    if name in _TARGETS:
        found = [head.options.get(one, ()) for one in _TARGETS]
        named = [str(text) for one in found for text in (one if isinstance(one, (list, tuple)) else (one,))]
        return f"of {' and '.join(named)[:200]}"
    option, value = f"--{name[:40].replace('_', '-')}", head.options.get(name)
    if value is None or value is True:
        return f"with {option}" if value else f"without {option}"
    given = value if isinstance(value, (list, tuple)) else (value,)
    return f"with {' '.join(f'{option} {text}' for text in given)[:200]}"


def _refuse_other_files(one: ShardFile, first: ShardFile, *, copies: bool) -> None:
    """Raises for a part that has read other files than the first, or none can tell whether they are."""
    head, other = one.head, first.head
    for path in sorted(head.files.keys() | other.files.keys()):
        here, there = head.files.get(path), other.files.get(path)
        if here is None or there is None or here.is_another(there):
            raise UnreadableError(f"{one.path}: {path}: is another file than the one that {first.path} is of: {_AGAIN}")
        if here != there and not copies:
            why = f"was written at another time than the one that {first.path} is of, and may be another"
            raise UsageError(f"{one.path}: {path}: {why}: {_AGAIN}, {_COPIES}")
    if (head.plan, head.tasks) != (other.plan, other.tasks):
        raise UnreadableError(f"{one.path}: has read another state of the targets than {first.path}: {_AGAIN}")


def _refuse_incomplete(parts: Sequence[ShardFile]) -> None:
    known: dict[int, str] = {}
    count = parts[0].head.shard[1]
    for one in parts:
        index = one.head.shard[0]
        if index in known:
            raise UnreadableError(f"{one.path}: part {index} of {count} is there twice, {known[index]} is it too")
        known[index] = one.path
    missing = [index for index in range(1, count + 1) if index not in known]
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise UnreadableError(f"part{'s' * (len(missing) > 1)} {shown} of {count} {_is(missing)} missing")


def _is(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _refuse_changed(one: ShardFile, *, copies: bool) -> None:
    """Raises for a file that is not here, or is not the one that the parts are of, or none can tell whether it is."""
    for path, now in identify_files(one.head.files).items():
        then = one.head.files[path]
        if then.version is None and then.bytes >= 0 and not copies:
            why = "whoever has it tells no version of it, so that none can tell whether all parts are of one"
            raise UsageError(f"{path}: {why}: give --copies if it has not changed since")
        if now == then or (copies and not now.is_another(then)):
            continue
        if now.bytes < 0:
            where = "" if files.is_remote(path) or os.path.isabs(path) else ": merge where the parts were made"
            raise UnreadableError(f"{path}: cannot be opened, and {one.path} is of it{where}")
        if now.is_another(then):
            raise UnreadableError(f"{path}: has changed since {one.path} was made: {_AGAIN}")
        why = f"was written at another time than the one that {one.path} is of, and may be another"
        raise UsageError(f"{path}: {why}: {_AGAIN}, {_COPIES}")


# --- what they ask for ------------------------------------------------------------------------------------------------


def _options(path: str, head: Head, asked: MergeOptions) -> Options:
    """The command's options: what the parts say of the result, what the line says of its output."""
    kind = COMMANDS.get(head.command)
    if kind is None:
        raise UnreadableError(f"{path}: line 1: is of statecli {head.command[:40]!r}, which has no parts")
    theirs = {field.name: field.default for field in msgspec.structs.fields(kind)}
    for name in head.options:
        if name not in theirs or name in OUTPUT_OPTIONS:
            raise UnreadableError(f"{path}: line 1: says {name[:40]!r}, which is no option of a part")
    try:
        read: Options = msgspec.convert(head.options, kind)
    except (msgspec.ValidationError, ValueError, OverflowError) as why:
        raise UnreadableError(f"{path}: line 1: is not what --shard writes there: {str(why)[:200]}") from why
    return msgspec.structs.replace(read, **_output(asked, head.command, theirs))


def _output(asked: MergeOptions, command: str, theirs: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(MergeOptions):
        value = getattr(asked, field.name)
        if field.name not in OUTPUT_OPTIONS or value == field.default:
            continue
        if field.name not in theirs:
            option = f"--{field.name.replace('_', '-')}"
            raise UsageError(f"{option}: the parts are of statecli {command}, which has no such option")
        found[field.name] = value
    return found


def _texts(options: Options) -> list[str]:
    """What may name a file, a URL or a class."""
    names = ("target", "before", "after", "targets", "model", "inputs", "against", "lock", "baseline", "config")
    values = [getattr(options, name, None) for name in names]
    return [text for one in values for text in (one if isinstance(one, tuple) else (one,)) if isinstance(text, str)]


def _refuse_code(options: Options, said: Sequence[str]) -> None:
    """Raises UsageError for code that the parts would have run, and the line does not name: a part is a file."""
    texts = _texts(options)
    if isinstance(options, AuditOptions):
        from statecli.requests import audit as asked

        texts.append(asked.load_config(options).config.policy.reference or "")
    named = {text for text in texts if text and load.find_class_spec(text) is not None}
    named |= {text for text in (getattr(options, name, None) for name in ("model", "inputs")) if text}
    for text in sorted(named.difference(said)):
        raise UsageError(f"{text}: the parts name it, and its code would run: if it may, give --code '{text}'")
    for text in said:
        if text not in named:
            raise UsageError(f"--code {text}: the parts name no such class")


def _refuse_secrets(options: Options, said: Sequence[str]) -> None:
    """Raises UsageError for a URL of which the parts have only what may be shown."""
    urls = [text for text in _texts(options) if files.is_remote(text)]
    for text in said:
        if text not in urls:
            raise UsageError(f"--url {text}: the parts name no such URL: {', '.join(urls) or 'they name none'}")
    for text in urls:
        if _HIDDEN in text and text not in said:
            raise UsageError(f"{text}: parts hold no secrets: give it with them once more, as --url URL")


# --- what they know ---------------------------------------------------------------------------------------------------


class _Known:
    """A `pool.ResultStore` of all shard files. Results that only all of them together determine are computed."""

    is_complete = True

    def __init__(self, parts: Sequence[ShardFile]) -> None:
        self._parts = parts
        self._plan = parts[0].head.plan
        self._passes = 0
        self._failed = False
        self._owners: dict[Key, int] = {}
        #: Of tasks that only the command itself can say to be there: those that it has not asked for yet.
        self._unasked: dict[Key, int] = {}
        for n, one in enumerate(parts):
            for key, known in one.results.items():
                self._take(n, key, known)
        planned = sum(not self._known(key).derived for key in self._owners)
        if planned != parts[0].head.tasks:
            why = f"has together with the others the results of {planned} tasks, not of {parts[0].head.tasks}"
            raise UnreadableError(f"{parts[0].path}: {why}: {_AGAIN}")

    def _take(self, part: int, key: Key, known: StoredResult) -> None:
        from statecli.shards import tasks

        other = self._known(key) if key in self._owners else known
        if other is not known and not _is_same(other.result, known.result):
            path = self._parts[part].path
            raise UnreadableError(f"{path}: line {known.line}: says otherwise of a task than another part: {_AGAIN}")
        if not known.derived or other is known:
            self._owners[key] = part
        if known.derived and key.function not in tasks.UNPLANNED:
            self._unasked[key] = part

    def _known(self, key: Key) -> StoredResult:
        return self._parts[self._owners[key]].results[key]

    def results(self, work: Work, do: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """See `pool.ResultStore`."""
        from statecli.shards import tasks

        keys = tasks.compute_keys(work)
        self._passes += not work.derived
        missing = [n for n, key in enumerate(keys) if key not in self._owners]
        if missing and not work.derived and work.function.__name__ not in tasks.UNPLANNED:
            self._refuse_missing(keys, work.tasks[missing[0]])
        if work.on_batch and len(missing) < len(keys):
            work.on_batch([task for key, task in zip(keys, work.tasks, strict=True) if key in self._owners])
        computed = dict(zip(missing, do([work.tasks[n] for n in missing]), strict=True))
        return [computed[n] if n in computed else self._held(key, work.tasks[n]) for n, key in enumerate(keys)]

    def _refuse_missing(self, keys: Sequence[Key], task: Any) -> None:
        """Raises for a task that nothing is known of: the parts are not what they were, or the target is not."""
        from statecli.shards import tasks

        where = ": ".join(filter(None, (next(iter(task.paths), ""), task.name)))
        if tasks.digest_of_pass(keys) in self._plan:
            raise UnreadableError(f"{where}: no part has a result of it, and one has that of no task: {_AGAIN}")
        raise UnreadableError(f"{where}: is not what it was when the parts were made: {_AGAIN}")

    def _held(self, key: Key, task: Any) -> Any:
        """What is known of the task. Raises for what no such task has."""
        from statecli.shards import check_results, tasks

        known = self._known(key)
        result = known.result
        field = check_results.find_invalid_field(key.function, task, result)
        if field is not None:
            path, what = self._parts[self._owners[key]].path, task.name or next(iter(task.paths), "")
            why = f"has a result that {what} cannot have ({field})"
            raise UnreadableError(f"{path}: line {known.line}: {why}: have its share done again")
        self._failed |= tasks.has_failed(result)
        self._unasked.pop(key, None)
        return result

    def refuse_surplus(self) -> None:
        """Raises for a result of no task, once the command is done. What fails has fewer tasks come after it."""
        if self._failed or self._passes < len(self._plan):
            return
        for key, part in self._unasked.items():
            one = self._parts[part]
            line = one.results[key].line
            raise UnreadableError(f"{one.path}: line {line}: is of no task of the command: {_AGAIN}")


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, StateError):
        return type(one) is type(other) and str(one) == str(other)
    return bool(one == other) or repr(one) == repr(other)  # NaN is not NaN
