"""Run `statecli merge`: repeat the command that wrote the part files, but take the task results from these files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from statecli import requests
from statecli.core.errors import EngineError, StateError, UnreadableError, UsageError, option
from statecli.core.version import __version__
from statecli.requests.options import AuditOptions, MergeOptions
from statecli.requests.parameters import list_given, list_texts
from statecli.requests.shard_options import OUTPUT_OPTIONS, SHARDED_COMMANDS, ShardedOptions
from statecli.shards import check_results, shard_file, tasks
from statecli.storage import files
from statecli.targets import load
from statecli.values import kernels
from statecli.workers import pool
from statecli.workers.file_identity import identify_files

if TYPE_CHECKING:
    from statecli.shards.shard_file import Head, ShardFile, StoredResult
    from statecli.shards.tasks import TaskKey
    from statecli.workers.pool import Work


_REDO_ADVICE = "run all shards again"
_COPIES_ADVICE = f"or give {option('--copies')} if each job read a separate copy of the files"
#: Text in place of a secret in the masked name of a URL.
_MASK = "…"


@contextmanager
def use_parts(merge: MergeOptions) -> Iterator[ShardedOptions]:
    """Yield the options of the command that wrote the part files. Inside the block, results come from these files.

    Raises `UnreadableError` if a file is not a part file or a part is missing. Raises `UsageError` for an option that
    the command does not have.
    """
    parts = [shard_file.read_file(path) for path in _expand_globs(merge.parts)]
    options = _restore_options(parts[0].path, parts[0].head, merge)
    for part in parts:
        _check_same_run(part, parts[0])
        _check_same_files(part, parts[0], copies=merge.copies)
    _check_complete(parts)
    _check_code(options, merge.allow_code)
    _check_urls(options, merge.url)
    _check_unchanged(parts[0], copies=merge.copies)
    store = _MergedResults(parts)
    with pool.use_result_store(store):
        yield options
    store.check_all_used()


def _expand_globs(texts: Sequence[str]) -> list[str]:
    """Expand the globs among the files, because a shell does not expand a quoted glob."""
    paths: list[str] = []
    for text in texts:
        matches = [] if files.is_remote(text) or os.path.lexists(text) else sorted(glob.glob(text, recursive=True))
        paths += matches or [text]
    return paths


# --- consistency of the parts -----------------------------------------------------------------------------------------


def _check_same_run(part: ShardFile, first: ShardFile) -> None:
    """Raise EngineError for a part of another statecli build, and UnreadableError for a part of another run."""
    head, first_head = part.head, first.head
    maker = f"statecli {head.statecli} with the {head.kernel} compute kernel"
    own_version = f"statecli {__version__} with the {kernels.kernel_name()} compute kernel"
    if maker != own_version:
        raise EngineError(
            f"{part.path}: was written by {maker[:200]}, but this machine has {own_version}; install the same version "
            "on all machines"
        )
    facts, first_facts = _list_facts(head), _list_facts(first_head)
    for name in dict.fromkeys((*facts, *first_facts)):
        if facts.get(name) != first_facts.get(name):
            value, first_value = (str(side.get(name, "not given"))[:200] for side in (facts, first_facts))
            problem = f"{name[:40]} is {value}, but {first_value} in {first.path}"
            raise UnreadableError(f"{part.path}: {problem}; merge only part files of the same run")


def _list_facts(head: Head) -> dict[str, object]:
    """Return the facts that are equal in all part files of a run: the number of parts, the command, its options."""
    return {"the number of parts": head.shard.total, "the command": head.command, **head.options}


def _check_same_files(part: ShardFile, first: ShardFile, *, copies: bool) -> None:
    """Raise UnreadableError if two parts read different files, or UsageError if only the modification times differ."""
    head, first_head = part.head, first.head
    for path in sorted(head.files.keys() | first_head.files.keys()):
        file, first_file = head.files.get(path), first_head.files.get(path)
        if file is None or first_file is None or file.is_another(first_file):
            problem = f"was made from different files than {first.path}, for example {path}"
            raise UnreadableError(f"{part.path}: {problem}; {_REDO_ADVICE}")
        if file != first_file and not copies:
            problem = (
                f"records a modification time of {path} that differs from the time in {first.path}, so the file may "
                "have changed"
            )
            raise UsageError(f"{part.path}: {problem}; {_REDO_ADVICE}, {_COPIES_ADVICE}")
    if (head.plan, head.tasks) != (first_head.plan, first_head.tasks):
        problem = f"was made from other versions of the checkpoints than {first.path}"
        raise UnreadableError(f"{part.path}: {problem}; {_REDO_ADVICE}")


def _check_complete(parts: Sequence[ShardFile]) -> None:
    """Raise UnreadableError unless each shard is given exactly once."""
    paths: dict[int, str] = {}
    count = parts[0].head.shard.total
    for part in parts:
        index = part.head.shard.number
        if index in paths:
            raise UnreadableError(
                f"{part.path}: contains part {index} of {count}, and so does {paths[index]}; leave one of "
                "the two files out"
            )
        paths[index] = part.path
    missing = [index for index in range(1, count + 1) if index not in paths]
    if missing:
        numbers_text = ", ".join(map(str, missing[:10])) + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        noun, verb = ("part", "is") if len(missing) == 1 else ("parts", "are")
        raise UnreadableError(f"{noun} {numbers_text} of {count} {verb} missing; give all part files")


def _check_unchanged(part: ShardFile, *, copies: bool) -> None:
    """Raise UnreadableError if a file is missing or has changed. Raise UsageError if a file may have changed."""
    for path, current in identify_files(part.head.files).items():
        recorded = part.head.files[path]
        if recorded.version is None and recorded.bytes >= 0 and not copies:
            problem = (
                "the storage reports no version, so statecli cannot check that all part files were made from "
                "the same version"
            )
            raise UsageError(f"{path}: {problem}; if the file has not changed, give {option('--copies')}")
        if current == recorded or (copies and not current.is_another(recorded)):
            continue
        if current.bytes < 0:
            folder_advice = (
                "" if files.is_remote(path) or os.path.isabs(path) else "; merge in the folder where --shard ran"
            )
            raise UnreadableError(f"{path}: cannot be opened, but {part.path} was made from this file{folder_advice}")
        if current.is_another(recorded):
            raise UnreadableError(f"{path}: has changed since {part.path} was made; {_REDO_ADVICE}")
        problem = f"has a modification time that differs from the time in {part.path}, so the file may have changed"
        raise UsageError(f"{path}: {problem}; {_REDO_ADVICE}, {_COPIES_ADVICE}")


# --- options of the command -------------------------------------------------------------------------------------------


def _restore_options(path: str, head: Head, merge: MergeOptions) -> ShardedOptions:
    """Return the options of the command: the output options of `merge`, and all other options from the part files."""
    kind = SHARDED_COMMANDS.get(head.command)
    if kind is None:
        raise UnreadableError(
            f"{path}: is not a part file: line 1 contains the command {head.command[:40]!r}, which does not "
            "have --shard"
        )
    names = kind.__struct_fields__
    for name in head.options:
        if name not in names or name in OUTPUT_OPTIONS:
            raise UnreadableError(f"{path}: line 1 contains the option {name[:40]!r}, which --shard does not write")
    try:
        options: ShardedOptions = msgspec.convert(head.options, kind)
    except (msgspec.ValidationError, ValueError, OverflowError) as why:
        raise UnreadableError(f"{path}: line 1 does not have the format that --shard writes: {str(why)[:200]}") from why
    return msgspec.structs.replace(options, **_select_output_options(merge, head.command, names))


def _select_output_options(merge: MergeOptions, command: str, names: Collection[str]) -> dict[str, Any]:
    """Return the output options given to `merge`. Raises UsageError for an option that is not in `names`."""
    selected_options = {}
    for each in list_given(merge):
        if each.field not in OUTPUT_OPTIONS:
            continue
        if each.field not in names:
            raise UsageError(
                f"{option(each.flags[0])}: the part files were written by `statecli {command}`, which does not have "
                "this option; leave the option out"
            )
        selected_options[each.field] = getattr(merge, each.field)
    return selected_options


def _list_names(options: ShardedOptions) -> list[str]:
    """Return the option values that name a file, URL or class, except the values of --plugin."""
    return list_texts(options, lambda each: each.reads_file and each.field != "plugin")


def _check_code(options: ShardedOptions, allowed_names: Sequence[str]) -> None:
    """Raise UsageError unless `--allow-code` lists exactly the code that the part files would run."""
    names = _list_names(options)
    plugins = set(options.plugin) if isinstance(options, AuditOptions) else set()
    _refuse_code(plugins.difference(allowed_names))
    if isinstance(options, AuditOptions):
        names.append(requests.audit.load_config(options).config.policy.reference or "")
    specs = {text for text in names if text and load.find_class_spec(text) is not None}
    specs |= {text for text in (getattr(options, name, None) for name in ("model", "input_from")) if text}
    _refuse_code(specs.difference(allowed_names))
    for text in allowed_names:
        if text not in specs | plugins:
            problem = "the part files do not use a class or plugin of this name"
            raise UsageError(f"{option('--allow-code', text)}: {problem}; leave the option out")


def _refuse_code(names: Collection[str]) -> None:
    for text in sorted(names):
        code = option("--allow-code", text, quoted=True)
        raise UsageError(
            f"{text}: merging these part files imports and runs this code; if you trust the code, give {code}"
        )


def _check_urls(options: ShardedOptions, typed_urls: Sequence[str]) -> None:
    """Raise UsageError if `--url` lacks a URL with a masked password, or has a URL that is not in the part files."""
    urls = [text for text in _list_names(options) if files.is_remote(text)]
    for text in typed_urls:
        if text not in urls:
            url_hint = (
                f"give one of {', '.join(urls)}"
                if urls
                else "leave the option out, because the part files contain no URL"
            )
            raise UsageError(f"{option('--url', text)}: the part files do not contain this URL; {url_hint}")
    for text in urls:
        if _MASK in text and text not in typed_urls:
            raise UsageError(
                f"{text}: the part files do not contain passwords; give the whole URL with {option('--url', 'URL')}"
            )


# --- results of the parts ---------------------------------------------------------------------------------------------


class _MergedResults:
    """A `pool.ResultStore` with the results of all part files. It computes results that combine several shards."""

    is_complete = True

    def __init__(self, parts: Sequence[ShardFile]) -> None:
        self._parts = parts
        self._plan = parts[0].head.plan
        self._passes = 0
        self._has_failed = False
        self._owners: dict[TaskKey, int] = {}
        #: Derived tasks (no plan lists them) that the command has not looked up yet.
        self._unused_keys: dict[TaskKey, int] = {}
        for n, part in enumerate(parts):
            for key, stored_result in part.results.items():
                self._add(n, key, stored_result)
        planned_count = sum(not self._get_stored(key).derived for key in self._owners)
        if planned_count != parts[0].head.tasks:
            problem = f"expected {parts[0].head.tasks} results in all part files together, found {planned_count}"
            raise UnreadableError(f"{parts[0].path}: {problem}; {_REDO_ADVICE}")

    def _add(self, part: int, key: TaskKey, stored_result: StoredResult) -> None:
        earlier_result = self._get_stored(key) if key in self._owners else stored_result
        if earlier_result is not stored_result and not _is_same(earlier_result.result, stored_result.result):
            location = f"{self._parts[part].path}: line {stored_result.line}"
            raise UnreadableError(
                f"{location}: another part file has a different result for the same file or tensor; {_REDO_ADVICE}"
            )
        if not stored_result.derived or earlier_result is stored_result:
            self._owners[key] = part
        if stored_result.derived and key.function not in tasks.UNPLANNED_FUNCTIONS:
            self._unused_keys[key] = part

    def _get_stored(self, key: TaskKey) -> StoredResult:
        return self._parts[self._owners[key]].results[key]

    def results(self, work: Work, do: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """See `pool.ResultStore`."""
        keys = tasks.compute_keys(work)
        self._passes += not work.derived
        missing = [n for n, key in enumerate(keys) if key not in self._owners]
        if missing and not work.derived and work.function.__name__ not in tasks.UNPLANNED_FUNCTIONS:
            self._raise_missing(keys, work.tasks[missing[0]])
        if work.on_batch and len(missing) < len(keys):
            work.on_batch([task for key, task in zip(keys, work.tasks, strict=True) if key in self._owners])
        computed = dict(zip(missing, do([work.tasks[n] for n in missing]), strict=True))
        return [computed[n] if n in computed else self._look_up(key, work.tasks[n]) for n, key in enumerate(keys)]

    def _raise_missing(self, keys: Sequence[TaskKey], task: Any) -> NoReturn:
        """Raise UnreadableError for a task without a result: the parts or the target have changed."""
        location = ": ".join(filter(None, (next(iter(task.paths), ""), task.name)))
        if tasks.compute_pass_digest(keys) in self._plan:
            raise UnreadableError(
                f"{location}: the part files do not have a result for this file or tensor; {_REDO_ADVICE}"
            )
        raise UnreadableError(f"{location}: has changed since the part files were made; {_REDO_ADVICE}")

    def _look_up(self, key: TaskKey, task: Any) -> Any:
        """Return the result of the task. Raises UnreadableError if the result is impossible for the task."""
        stored_result = self._get_stored(key)
        result = stored_result.result
        field = check_results.find_invalid_field(task, result)
        if field is not None:
            path, name = self._parts[self._owners[key]].path, task.name or next(iter(task.paths), "")
            problem = f"has an impossible result for {name} (field {field})"
            raise UnreadableError(f"{path}: line {stored_result.line} {problem}; run this shard again")
        self._has_failed |= tasks.has_failed(result)
        self._unused_keys.pop(key, None)
        return result

    def check_all_used(self) -> None:
        """Raise UnreadableError if the command did not use a result. After a failure, unused results are allowed."""
        if self._has_failed or self._passes < len(self._plan):
            return
        for key, index in self._unused_keys.items():
            part = self._parts[index]
            line = part.results[key].line
            raise UnreadableError(
                f"{part.path}: line {line} has a result of a file or tensor that this command does not read; "
                f"{_REDO_ADVICE}"
            )


def _is_same(first: object, second: object) -> bool:
    if isinstance(first, StateError):
        return type(first) is type(second) and str(first) == str(second)
    return bool(first == second) or repr(first) == repr(second)  # NaN does not equal NaN
