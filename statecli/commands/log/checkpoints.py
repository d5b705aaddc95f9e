"""Find the checkpoints of a run, and put them in the order of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec
from msgspec.structs import replace

from statecli.commands.log.result import NAME_SOURCE, Step
from statecli.commands.log.steps import choose_steps, find_step_in_name, find_steps
from statecli.core import quoting
from statecli.core.errors import StateError, UnreadableError
from statecli.core.model_state import ModelState, Oddity
from statecli.core.natural_order import make_natural_key
from statecli.core.units import plural
from statecli.storage import files
from statecli.targets import load
from statecli.targets.expand import expand_targets, list_folders_without_checkpoints
from statecli.targets.target_result import TargetResult, TargetStatus


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint of the run: its target, its step, and the error of an unreadable checkpoint."""

    path: str
    step: Step | None = None
    error: str | None = None


class Run(msgspec.Struct, frozen=True):
    """Checkpoints of a run in the order of their steps, with notes on the order and on files that were left out."""

    checkpoints: tuple[Checkpoint, ...]
    notes: tuple[Oddity, ...] = ()


def list_checkpoints(texts: Sequence[str]) -> list[Checkpoint]:
    """Return the checkpoints named by folders, globs and paths, in natural order, without their steps.

    Raises UnreadableError without any checkpoint, because a run without checkpoints is mostly a wrong path.
    """
    checkpoints: list[Checkpoint] = []
    targets = list(expand_targets(texts))
    for target in targets:
        if not isinstance(target, TargetResult):
            checkpoints.append(Checkpoint(target))
        elif target.status is TargetStatus.FAILED:
            checkpoints.append(Checkpoint(target.target, error=target.reason))
    if not checkpoints:
        targets_text = ", ".join(map(quoting.name, texts))
        raise UnreadableError(
            f"{targets_text}: contains no checkpoint; give the folder with the checkpoints of the run"
        )
    return checkpoints + [
        Checkpoint(text, error=f"{quoting.name(text)}: contains no checkpoint")
        for text in list_folders_without_checkpoints(texts, targets)
    ]


def order_run(texts: Sequence[str]) -> Run:
    """Read the steps of all checkpoints of a run, and return the run in the order of the steps.

    Raises UnreadableError without any checkpoint.
    """
    checkpoints = list_checkpoints(texts)
    settings = [_read_steps(checkpoint) for checkpoint in checkpoints]
    chosen_steps = choose_steps(find_steps_in_names(checkpoints), [steps for steps, _ in settings])
    entries = [
        Checkpoint(checkpoint.path, step, error)
        for checkpoint, step, (_, error) in zip(checkpoints, chosen_steps, settings, strict=True)
    ]
    return _sort(entries, texts)


def order_run_by_names(texts: Sequence[str]) -> Run | None:
    """Order the checkpoints of a run by the numbers in their names, without reading any checkpoint.

    Return None if most names have no number, or if two names have the same number. Then only the settings can decide.
    """
    checkpoints = list_checkpoints(texts)
    numbers = find_steps_in_names(checkpoints)
    present = [number for number in numbers if number is not None]
    if len(set(present)) < len(present) or 2 * len(present) < len(numbers):
        return None
    steps = [None if number is None else Step(number, NAME_SOURCE) for number in numbers]
    return _sort([replace(entry, step=step) for entry, step in zip(checkpoints, steps, strict=True)], texts)


def find_steps_in_names(checkpoints: Sequence[Checkpoint]) -> list[int | None]:
    """Return the step in the name of each checkpoint, below the folder that all of them share."""
    return [find_step_in_name(name) for name in shorten_paths([checkpoint.path for checkpoint in checkpoints])]


def shorten_paths(paths: Sequence[str]) -> list[str]:
    """Return the paths without the folders that all of them share."""
    parts = [path.split("/") for path in paths]
    shared = sum(takewhile(bool, (len(set(step)) == 1 for step in zip(*parts, strict=False))))
    return ["/".join(path[min(shared, len(path) - 1) :]) for path in parts]


def _read_steps(checkpoint: Checkpoint) -> tuple[dict[str, int] | None, str | None]:
    if checkpoint.error is not None:
        return None, checkpoint.error
    try:
        return find_steps(read_state(checkpoint.path)), None
    except StateError as error:
        return None, str(error)


def read_state(path: str) -> ModelState:
    """Read a checkpoint. Raises StateError if the path is a model class or cannot be read."""
    if load.find_class_spec(path) is not None:
        raise UnreadableError(f"{path}: is a model class; give the checkpoints of a run")
    return load.read_checkpoint(path)


def _sort(entries: Sequence[Checkpoint], texts: Sequence[str]) -> Run:
    """Sort checkpoints by step. If only some have a step, leave out the rest, unless the user typed their paths."""
    named = {text for text in texts if not files.is_folder(text) and not files.is_glob(text)}
    has_steps = any(entry.step is not None for entry in entries)
    left_out = [
        entry.path
        for entry in (entries if has_steps else ())
        if entry.step is None and entry.path not in named and entry.error is None
    ]
    kept_paths = {entry.path for entry in entries}.difference(left_out)
    ordered_entries = sorted((entry for entry in entries if entry.path in kept_paths), key=_sort_key)
    notes = [Oddity("step-source", _describe_sources(ordered_entries))]
    if left_out:
        message = f"{plural(len(left_out), 'checkpoint')} left out, because no step is known: {quoting.names(left_out)}"
        notes.append(Oddity("no-step", f"{message}; to include a checkpoint, give its path"))
    return Run(tuple(ordered_entries), tuple(notes))


def _sort_key(entry: Checkpoint) -> tuple[bool, int, str]:
    return entry.step is None, entry.step.number if entry.step else 0, make_natural_key(entry.path)


def _describe_sources(entries: Sequence[Checkpoint]) -> str:
    sources = list(dict.fromkeys(entry.step.source for entry in entries if entry.step is not None))
    if not sources:
        return "no checkpoint has a step, so the checkpoints are ordered by name"
    texts = [
        "the number in the name" if source == NAME_SOURCE else f"the value of the setting {source}"
        for source in sources
    ]
    return f"the step is {' or '.join(texts)}"
