"""Find the training step of a checkpoint: in its settings, else in its name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from statecli.commands.log.result import NAME_SOURCE, Step
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, Scalar
from statecli.storage import files

#: Settings with a step, the most specific first: transformers' Trainer, Lightning, DeepSpeed, training loops, Megatron.
STEP_KEYS = ("trainer_state.global_step", "global_step", "global_steps", "step", "iteration", "iter", "steps")
#: Settings that count epochs. Several checkpoints may have the same epoch.
EPOCH_KEYS = ("epoch", "trainer_state.epoch")
#: Largest number of digits of a step.
MAX_DIGITS = 18

_NUMBER = compile_on_use(r"(?<![\d.])\d{1,18}(?![\d])(?!\.\d)")
_INTEGER = compile_on_use(r"-?\d{1,18}")
#: Words before a step in a name, the most specific first: `epoch=3-step=400`, `iter_0000100`, `checkpoint-500`.
_LABELLED = tuple(
    re.compile(rf"(?i)(?<![a-z])(?:{words})[-_=. ]?(\d{{1,18}})(?!\d)(?!\.\d)")
    for words in (
        "global_?steps?|steps?|iterations?|iters?|it",
        "checkpoints?|ckpts?|chkpt|cp",
        "epochs?|ep",
    )
)


def find_steps(state: ModelState) -> dict[str, int]:
    """Return the settings of the checkpoint that count steps or epochs."""
    values = state.metadata.values
    numbers = ((key, _parse_integer(values[key])) for key in (*STEP_KEYS, *EPOCH_KEYS) if key in values)
    return {key: number for key, number in numbers if number is not None}


def _parse_integer(value: Scalar) -> int | None:
    """Convert a setting to an integer, or return None. In safetensors, numbers are strings."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 10**MAX_DIGITS else None
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    return value


def find_step_in_name(path: str) -> int | None:
    """Return the step from the last path component that contains a number, such as 100 for `step_100/model.pt`."""
    parts = [part for part in path.rstrip("/").replace("\\", "/").split("/") if part not in ("", ".", "..")]
    for number, part in enumerate(reversed(parts[-3:])):
        stem = files.get_name(part).rpartition(".")[0] if number == 0 and "." in part.strip(".") else part
        if (step := _find_number(stem or part)) is not None:
            return step
    return None


def _find_number(stem: str) -> int | None:
    for pattern in _LABELLED:
        if matches := pattern.findall(stem):
            return int(matches[-1])
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def choose_steps(by_name: Sequence[int | None], settings: Sequence[dict[str, int] | None]) -> list[Step | None]:
    """Return the step of each checkpoint, from the same source for all checkpoints if possible.

    `by_name`: `find_step_in_name` of each path below the common folder, because the number of a run is not a step.
    `settings`: `find_steps` of each checkpoint, None for an unread checkpoint, whose step is the number in its name.
    The steps come from the first source that fits: a counter of steps that all read checkpoints have; the names, if
    all have different numbers; a counter of epochs with different values; or, for each checkpoint alone, its first
    known step.
    """
    readable = [steps for steps in settings if steps is not None]
    are_named = None not in by_name and len(set(by_name)) == len(by_name)
    for key in (*STEP_KEYS, *(() if are_named else EPOCH_KEYS)):
        numbers = [steps[key] for steps in readable if key in steps]
        is_common = bool(readable) and len(numbers) == len(readable)
        if is_common and (key in STEP_KEYS or len(set(numbers)) == len(numbers)):
            return [
                _build_name_step(number) if steps is None else Step(steps[key], key)
                for steps, number in zip(settings, by_name, strict=True)
            ]
    if are_named:
        return [_build_name_step(number) for number in by_name]
    return [
        Step(*next((count, key) for key, count in steps.items())) if steps else _build_name_step(number)
        for steps, number in zip(settings, by_name, strict=True)
    ]


def _build_name_step(number: int | None) -> Step | None:
    return None if number is None else Step(number, NAME_SOURCE)
