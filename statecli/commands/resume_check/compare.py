"""Compare two recorded trainings at the first step after the resume, and name each state that was not resumed.

Each state is compared separately, so each finding names a cause. Random states are reported only if gradients differ,
because a script without random numbers needs no random state in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from statecli.commands.resume_check.record import UNREADABLE, RunRecord, StepRecord
from statecli.commands.resume_check.result import State, StateRow
from statecli.commands.resume_check.saved_keys import SavedKeys
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import join_names, plural

#: Largest number of names in a message.
_MAX_NAMES = 3
#: Number of a model of the same class, if the models have no variables.
_NUMBER = compile_on_use(r" \d+$")
#: Settings of an optimizer that a scheduler changes.
_SCHEDULED_SETTINGS = ("lr", "initial_lr", "momentum", "betas")
#: Generator -> the call that returns its state, and the function that sets its state.
_RANDOM_CALLS = {
    "torch": ("torch.get_rng_state()", "torch.set_rng_state"),
    "random": ("random.getstate()", "random.setstate"),
    "numpy": ("numpy.random.get_state()", "numpy.random.set_state"),
    "cuda": ("torch.cuda.get_rng_state_all()", "torch.cuda.set_rng_state_all"),
}


def compare_runs(full_run: RunRecord, resumed: RunRecord, saved_at: int) -> list[StateRow]:
    """Compare two runs at step `saved_at` + 1, and return a row for each kind of state."""
    expected = len(full_run.steps) - saved_at
    is_step_count_equal = len(resumed.steps) == expected
    before, after = full_run.steps[saved_at], resumed.steps[0]
    evidence = f"the resumed training takes {plural(len(resumed.steps), 'step')} instead of {expected}"
    rows = [
        StateRow(State.STEP, is_step_count_equal, "" if is_step_count_equal else evidence),
        _compare_model(before, after),
        _compare_optimizer(before, after),
        _compare_named(State.SCHEDULER, before.schedulers, after.schedulers),
        _compare_named(State.SCALER, before.scalers, after.scalers),
        _compare_averages(before, after),
    ]
    if not is_step_count_equal:  # a different number of steps causes different batches and random numbers
        return [*rows, StateRow(State.DATA, None), StateRow(State.RANDOM, None)]
    return [*rows, *_compare_chance(full_run.steps, before, after, is_model_equal=rows[1].resumed is True)]


def find_run_difference(first: RunRecord, second: RunRecord) -> str | None:
    """Return where two uninterrupted runs differ, or None if they are equal."""
    if len(first.steps) != len(second.steps):
        return f"the first run takes {plural(len(first.steps), 'step')}, but the second run takes {len(second.steps)}"
    for step, (first_step, second_step) in enumerate(zip(first.steps, second.steps, strict=True), 1):
        for quantity in ("parameters", "batches", "gradients"):
            if getattr(first_step, quantity) != getattr(second_step, quantity):
                return f"the {quantity} differ at step {step}"
    return None


def list_unreadable(step: StepRecord) -> list[str]:
    """Return the states whose values cannot be read, such as `buffers['scale'] (MyTensor)`."""
    return list(dict.fromkeys(_iter_unreadable("", msgspec.structs.asdict(step))))


def _iter_unreadable(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _iter_unreadable(f"{name}[{key!r}]" if name else key, item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _iter_unreadable(name, item)
    elif UNREADABLE in value:
        yield f"{name} {value.partition(UNREADABLE)[2].partition(')')[0].lstrip()})"


def describe_missing(row: StateRow, full_run: RunRecord, keys: SavedKeys, saved_at: int) -> str:
    """Return advice on how the script can resume a state, and where the checkpoint has the state."""
    if row.state is State.RANDOM:
        return _describe_missing_random(row, full_run, keys, saved_at)
    generator_keys = {name: key for name in _list_own_generators(full_run) if (key := keys.find_generator(name))}
    if row.state is State.DATA and generator_keys:
        calls = " and ".join(f"{name}.set_state({key.expression})" for name, key in generator_keys.items())
        return _format_help(
            saved_at, [key.text for key in generator_keys.values()], "", f"call {calls} before the first batch"
        )
    object_name = _name_object(row, full_run)
    if row.state is State.DATA:
        key = keys.find_data(is_order=not row.evidence.endswith(tuple("0123456789")))
    elif row.state is State.MODEL and object_name != full_run.model_name:
        key = keys.find_named(object_name)
    else:
        key = keys.find(row.state, object_name)
    load_argument = key.expression if key else ""
    if row.state is State.STEP:
        instruction = "start the loop at this step" if key else "save the step number, and start the resumed loop there"
    elif row.state is State.DATA:
        skip = "skip the batches that were already used"
        sampler = "save the state of the sampler, for example with StatefulDataLoader of torchdata"
        instruction = f"continue with the next batch: {skip}{'' if key else f', or {sampler}'}"
    elif object_name in full_run.dict_averages:
        instruction = f"{'' if key else f'save {object_name}, and '}copy the saved tensors into {object_name}"
    elif key:
        instruction = (
            f"call {object_name}.load_state_dict({load_argument})"
            if load_argument
            else f"load it with {object_name}.load_state_dict()"
        )
    else:
        instruction = f"save {object_name}.state_dict(), and load it"
    lack_clause = keys.describe_lack(_WORDS[row.state], saved_at)
    return _format_help(saved_at, [key.text] if key else [], lack_clause, instruction)


def _list_own_generators(full_run: RunRecord) -> list[str]:
    return list(dict.fromkeys(name for step in full_run.steps for name in step.random if name not in _RANDOM_CALLS))


def _describe_missing_random(row: StateRow, full_run: RunRecord, keys: SavedKeys, saved_at: int) -> str:
    """Describe the call that restores each generator, and the key that may contain its state."""
    generators = row.evidence.partition(": ")[2].split(", ")
    own_generators = _list_own_generators(full_run)
    used_keys = {key for name in own_generators if (key := keys.find_generator(name))}
    free_keys = {name: key for name, key in keys.generators.items() if key not in used_keys}
    if "torch" not in free_keys and (unused_states := [key for key in keys.torch_states if key not in used_keys]):
        free_keys["torch"] = unused_states[0]
    vague = keys.find_vague_random()
    saved_texts: list[str] = []
    set_calls: list[str] = []
    get_calls: list[str] = []
    for generator in generators:
        if generator in own_generators:
            key, calls = keys.find_generator(generator), (f"{generator}.get_state()", f"{generator}.set_state")
        else:
            key, calls = free_keys.get(generator, vague), _RANDOM_CALLS[generator]
        if key is None:
            get_calls.append(calls[0])
        else:
            saved_texts.append(key.text)
            set_calls.append(f"{calls[1]}({key.expression if generator in (*free_keys, *own_generators) else ''})")
    moment = f"right before step {saved_at + 1}"
    instructions = [f"call {' and '.join(set_calls)} {moment}"] if set_calls else []
    instructions += [f"save {' and '.join(get_calls)}, and set the state again {moment}"] if get_calls else []
    lack_clause = keys.describe_lack(_WORDS[State.RANDOM], saved_at)
    return _format_help(saved_at, saved_texts, lack_clause, "; ".join(instructions))


def _format_help(saved_at: int, saved_texts: Sequence[str], lack_clause: str, instruction: str) -> str:
    """Format the advice for a state that was not resumed, depending on whether the checkpoint contains the state."""
    if not saved_texts:
        return f"{lack_clause}: {instruction}"
    texts = " and ".join(dict.fromkeys(saved_texts))
    return (
        f"the checkpoint of step {saved_at} has {texts}; the script does not load this state, or changes this state "
        f"before step {saved_at + 1}: {instruction}"
    )


_WORDS = {
    State.STEP: "step number",
    State.MODEL: "model",
    State.OPTIMIZER: "optimizer",
    State.SCHEDULER: "scheduler",
    State.SCALER: "scaler",
    State.AVERAGE: "average of the weights",
    State.DATA: "position in the data",
    State.RANDOM: "random state",
}


def _name_object(row: StateRow, full_run: RunRecord) -> str:
    if row.state is State.MODEL and ": " not in row.evidence:
        return full_run.model_name
    if row.state is State.OPTIMIZER:
        return full_run.optimizer_name
    return row.evidence.partition(": ")[0].partition(",")[0]


# --- states -----------------------------------------------------------------------------------------------------------


def _list_differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [name for name in dict.fromkeys((*first, *second)) if first.get(name) != second.get(name)]


def _compare_model(before: StepRecord, after: StepRecord) -> StateRow:
    """Compare the models of both runs. Buffers are compared only after equal forward calls, which update buffers."""
    names = [name for name in before.parameters if name in after.parameters]
    if not names:
        return StateRow(State.MODEL, None)
    has_equal_calls = _has_equal_calls(before, after)
    for name in names:
        same_name = _find_same(name, before.parameters[name], after.parameters)
        differing = _list_differing(before.parameters[name], after.parameters[same_name])
        if not differing and has_equal_calls:
            differing = _list_differing(before.buffers[name], after.buffers[same_name])
        if differing:
            prefix = "" if name == next(iter(before.parameters)) else f"{name}: "
            return StateRow(State.MODEL, resumed=False, evidence=prefix + join_names(differing, _MAX_NAMES))
    return StateRow(State.MODEL, resumed=True)


def _find_same(name: str, model: object, models: Mapping[str, object]) -> str:
    """Return the name of an equal model of the same class, because the number in names such as `Net 2` may change."""
    kind = _NUMBER.sub("", name)
    return next((other for other in models if _NUMBER.sub("", other) == kind and models[other] == model), name)


def _end_alike(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return True if the last calls of both runs are equal. One run may have made more calls before the equal calls."""
    count = min(len(first), len(second))
    return first == second or (count > 0 and first[-count:] == second[-count:])


def _has_equal_calls(before: StepRecord, after: StepRecord) -> bool:
    """Return True if both runs made the same forward calls in a step, or ended with the same calls and gradients."""
    if before.batches == after.batches:
        return True
    return _end_alike(before.batches, after.batches) and before.gradients == after.gradients


def _compare_optimizer(before: StepRecord, after: StepRecord) -> StateRow:
    differing = _list_differing(before.optimizer, after.optimizer)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in differing))
    groups = _list_differing(before.groups, after.groups)
    if _list_differing(before.schedulers, after.schedulers):
        groups = [name for name in groups if name.rpartition(".")[2] not in _SCHEDULED_SETTINGS]
    kinds += list(dict.fromkeys(name.rpartition(".")[2] for name in groups))
    if not before.optimizer and not kinds:
        return StateRow(State.OPTIMIZER, None)
    return StateRow(State.OPTIMIZER, not kinds, join_names(kinds, _MAX_NAMES) if kinds else "")


def _compare_named(state: State, before: Mapping[str, str], after: Mapping[str, str]) -> StateRow:
    """Compare the states of named objects. An equal state may have another name after the resume."""
    if not before:
        return StateRow(state, None)
    if sorted(before.values()) == sorted(after.values()):
        return StateRow(state, resumed=True)
    differing = _list_differing(before, after)
    return StateRow(state, resumed=False, evidence=join_names(differing, _MAX_NAMES))


def _compare_averages(before: StepRecord, after: StepRecord) -> StateRow:
    if not before.averages:
        return StateRow(State.AVERAGE, None)
    differing = [
        f"{name}: {join_names(_list_differing(tensors, after.averages.get(name, {})), _MAX_NAMES)}"
        for name, tensors in before.averages.items()
        if tensors != after.averages.get(name)
    ]
    return StateRow(State.AVERAGE, not differing, differing[0] if differing else "")


def _compare_chance(
    steps: Sequence[StepRecord], before: StepRecord, after: StepRecord, *, is_model_equal: bool
) -> list[StateRow]:
    """Compare the batches and the random numbers of a step. If another step had the same batch, report that step."""
    differing = [name for name in before.random if before.random[name] != after.random.get(name)]
    # Generators without draws are ignored if possible, because they differ between processes too.
    drawn = [name for name in differing if len({step.random.get(name) for step in steps}) > 1]
    differing = drawn or differing
    random_row = StateRow(State.RANDOM, resumed=False, evidence=f"other random numbers: {', '.join(differing)}")
    if not _end_alike(before.batches, after.batches):
        position = next((n for n, step in enumerate(steps, 1) if _end_alike(step.batches, after.batches)), None)
        if position is None and differing:
            return [StateRow(State.DATA, None), random_row]
        batch_text = f"the batch of step {position}" if position else "not a batch of the uninterrupted run"
        evidence = f"the first batch is {batch_text}"
        return [StateRow(State.DATA, resumed=False, evidence=evidence), StateRow(State.RANDOM, None)]
    if not _has_equal_calls(before, after):  # the other calls may be missing batches, or calls before the save
        return [StateRow(State.DATA, None), StateRow(State.RANDOM, None)]
    data = StateRow(State.DATA, True if before.batches else None)
    if is_model_equal and _list_differing(before.gradients, after.gradients) and differing:
        return [data, random_row]
    return [data, StateRow(State.RANDOM, resumed=None if differing else True)]
