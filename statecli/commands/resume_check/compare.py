"""Compare two recorded trainings at the first step after the resume, and name each state that was not resumed.

Each state is compared separately, so each finding names a cause. Random states are reported only if gradients differ,
because a script without random numbers needs no random state in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from statecli.commands.resume_check.record import UNREADABLE, Digests, GeneratorKind, RunRecord, StepRecord
from statecli.commands.resume_check.result import State, StateRow
from statecli.commands.resume_check.saved_keys import SavedKey, SavedKeys
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import join_names, plural

#: Largest number of names in a message.
_MAX_NAMES = 3
#: Number of a model of the same class, if the models have no variables.
_NUMBER = compile_on_use(r" \d+$")
#: Settings of an optimizer that a scheduler changes.
_SCHEDULED_SETTINGS = ("lr", "initial_lr", "momentum", "betas")


class _GeneratorCalls(msgspec.Struct, frozen=True):
    """Code that returns the state of a generator, and code that sets the state `{}`."""

    get: str
    set: str


_RANDOM_CALLS = {
    "torch": _GeneratorCalls("torch.get_rng_state()", "torch.set_rng_state({})"),
    "random": _GeneratorCalls("random.getstate()", "random.setstate({})"),
    "numpy": _GeneratorCalls("numpy.random.get_state()", "numpy.random.set_state({})"),
    "cuda": _GeneratorCalls("torch.cuda.get_rng_state_all()", "torch.cuda.set_rng_state_all({})"),
}
#: The same for the variable NAME of the script; the code that returns the state follows the variable and a dot.
_OWN_CALLS = {
    GeneratorKind.TORCH: _GeneratorCalls("get_state()", "NAME.set_state({})"),
    GeneratorKind.PYTHON: _GeneratorCalls("getstate()", "NAME.setstate({})"),
    GeneratorKind.RANDOM_STATE: _GeneratorCalls("get_state()", "NAME.set_state({})"),
    GeneratorKind.NUMPY: _GeneratorCalls("bit_generator.state", 'setattr(NAME.bit_generator, "state", {})'),
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
        _compare_averages(before, after, full_run.copied_averages),
    ]
    if not is_step_count_equal:  # a different number of steps causes different batches and random numbers
        return [*rows, StateRow(State.DATA, None), StateRow(State.RANDOM, None)]
    return [*rows, *_compare_chance(full_run.steps, before, after, is_model_resumed=rows[1].resumed)]


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
    generator_keys = {name: key for name in full_run.generators if (key := keys.find_generator(name))}
    if row.state is State.DATA and generator_keys:
        calls = " and ".join(
            _describe_generator(name, full_run).set.format(key.expression) for name, key in generator_keys.items()
        )
        return _format_help(
            saved_at, [key.text for key in generator_keys.values()], "", f"call {calls} before the first batch"
        )
    object_name = _name_object(row, full_run)
    saved_keys = _list_possible_keys(row, object_name, full_run, keys, saved_at)
    load_argument = saved_keys[0].expression if len(saved_keys) == 1 else ""
    if row.state is State.STEP:
        instruction = "start the loop at this step"
        if not saved_keys:
            instruction = "save the step number, and start the resumed loop there"
    elif row.state is State.DATA:
        skip = "skip the batches that were already used"
        sampler = "save the state of the sampler, for example with StatefulDataLoader of torchdata"
        instruction = f"continue with the next batch: {skip}{'' if saved_keys else f', or {sampler}'}"
    elif object_name in full_run.copied_averages:
        instruction = f"{'' if saved_keys else f'save {object_name}, and '}copy the saved tensors into {object_name}"
    elif load_argument:
        instruction = f"call {object_name}.load_state_dict({load_argument})"
    elif saved_keys:
        instruction = f"load it with {object_name}.load_state_dict()"
    else:
        instruction = f"save {object_name}.state_dict(), and load it"
    lack_clause = keys.describe_lack(_WORDS[row.state], saved_at)
    return _format_help(saved_at, [key.text for key in saved_keys], lack_clause, instruction)


def _list_possible_keys(
    row: StateRow, object_name: str, full_run: RunRecord, keys: SavedKeys, saved_at: int
) -> tuple[SavedKey, ...]:
    """Return the keys of the checkpoint that may hold the state."""
    key: SavedKey | None = None
    if row.state is State.DATA:
        key = keys.find_data(is_order=not row.evidence.endswith(tuple("0123456789")))
    elif row.state is State.MODEL:
        key = keys.find_named(object_name)
    if key is not None:
        return (key,)
    return keys.find(row.state, object_name, _list_other_objects(row.state, object_name, full_run, saved_at))


def _describe_generator(name: str, full_run: RunRecord) -> _GeneratorCalls:
    """Return the calls that get and set the state of a generator of a library, or of a variable of the script."""
    kind = full_run.generators.get(name)
    if kind is None:
        return _RANDOM_CALLS[name]
    calls = _OWN_CALLS[kind]
    return _GeneratorCalls(f"{name}.{calls.get}", calls.set.replace("NAME", name))


def _describe_missing_random(row: StateRow, full_run: RunRecord, keys: SavedKeys, saved_at: int) -> str:
    """Describe the call that restores each generator, and the key that may contain its state."""
    generators = row.evidence.partition(": ")[2].split(", ")
    used_keys = {key for name in full_run.generators if (key := keys.find_generator(name))}
    free_keys = {name: key for name, key in keys.generators.items() if key not in used_keys}
    if "torch" not in free_keys and (unused_states := [key for key in keys.torch_states if key not in used_keys]):
        free_keys["torch"] = unused_states[0]
    vague = keys.find_vague_random()
    saved_texts: list[str] = []
    set_calls: list[str] = []
    get_calls: list[str] = []
    for generator in generators:
        is_own = generator in full_run.generators
        key = keys.find_generator(generator) if is_own else free_keys.get(generator, vague)
        calls = _describe_generator(generator, full_run)
        if key is None:
            get_calls.append(calls.get)
        else:
            saved_texts.append(key.text)
            set_calls.append(calls.set.format(key.expression if is_own or generator in free_keys else ""))
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


def _list_other_objects(state: State, name: str, full_run: RunRecord, saved_at: int) -> list[str]:
    """Return the other objects of the script with this kind of state."""
    step = full_run.steps[saved_at]
    names_by_state: dict[State, Collection[str]] = {
        State.MODEL: step.parameters,
        State.OPTIMIZER: (full_run.optimizer_name, *step.other_optimizers),
        State.SCHEDULER: step.schedulers,
        State.SCALER: step.scalers,
        State.AVERAGE: step.averages,
    }
    return [other for other in names_by_state.get(state, ()) if other != name]


def _name_object(row: StateRow, full_run: RunRecord) -> str:
    if row.state is State.MODEL and ": " not in row.evidence:
        return full_run.model_name
    if row.state is State.OPTIMIZER and ": " not in row.evidence:
        return full_run.optimizer_name
    return row.evidence.partition(": ")[0].partition(",")[0]


# --- states -----------------------------------------------------------------------------------------------------------


def _list_differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [name for name in dict.fromkeys((*first, *second)) if first.get(name) != second.get(name)]


def _compare_model(before: StepRecord, after: StepRecord) -> StateRow:
    """Compare the models of both runs. Forward updates buffers, so buffers are compared only after equal calls."""
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
    """Return the name of an equal model of the same class. The number in names such as `Net 2` may differ."""
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
    """Compare the first optimizer; if it was resumed, compare the other optimizers."""
    if not before.optimizer and not before.other_optimizers and before.groups == after.groups:
        return StateRow(State.OPTIMIZER, None)
    has_equal_schedulers = before.schedulers == after.schedulers
    kinds = _list_differing_kinds(before.optimizer, after.optimizer, has_equal_schedulers=True)
    kinds += _list_differing_kinds(before.groups, after.groups, has_equal_schedulers=has_equal_schedulers)
    if kinds:
        return StateRow(State.OPTIMIZER, resumed=False, evidence=join_names(kinds, _MAX_NAMES))
    for name, state in before.other_optimizers.items():
        same_name = _find_same(name, state, after.other_optimizers)
        other_state = after.other_optimizers.get(same_name, state)  # the script may have replaced an older optimizer
        if kinds := _list_differing_kinds(state, other_state, has_equal_schedulers=has_equal_schedulers):
            return StateRow(State.OPTIMIZER, resumed=False, evidence=f"{name}: {join_names(kinds, _MAX_NAMES)}")
    return StateRow(State.OPTIMIZER, resumed=True)


def _list_differing_kinds(before: Digests, after: Digests, *, has_equal_schedulers: bool) -> list[str]:
    """Return the differing parts of an optimizer, such as `exp_avg`, without settings that a lost scheduler changes."""
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in _list_differing(before, after))
    return [kind for kind in kinds if has_equal_schedulers or kind not in _SCHEDULED_SETTINGS]


def _compare_named(state: State, before: Mapping[str, str], after: Mapping[str, str]) -> StateRow:
    """Compare the states of named objects. An equal state may have another name after the resume."""
    if not before:
        return StateRow(state, None)
    if sorted(before.values()) == sorted(after.values()):
        return StateRow(state, resumed=True)
    differing = _list_differing(before, after)
    return StateRow(state, resumed=False, evidence=join_names(differing, _MAX_NAMES))


def _compare_averages(before: StepRecord, after: StepRecord, copied: Sequence[str]) -> StateRow:
    """Compare the averages. A dict that only the uninterrupted run has is a copy made for saving, not an average."""
    averages = {
        name: tensors for name, tensors in before.averages.items() if name in after.averages or name not in copied
    }
    if not averages:
        return StateRow(State.AVERAGE, None)
    differing = [
        f"{name}: {join_names(_list_differing(tensors, after.averages.get(name, {})), _MAX_NAMES)}"
        for name, tensors in averages.items()
        if tensors != after.averages.get(name)
    ]
    return StateRow(State.AVERAGE, not differing, differing[0] if differing else "")


def _compare_chance(
    steps: Sequence[StepRecord], before: StepRecord, after: StepRecord, *, is_model_resumed: bool | None
) -> list[StateRow]:
    """Compare the batches and random numbers of a step. If the batch belongs to a different step, report that step."""
    differing = [name for name in before.random if before.random[name] != after.random.get(name)]
    # Generators without draws are ignored if possible, because they differ between processes too.
    drawn = [name for name in differing if len({step.random.get(name) for step in steps}) > 1]
    differing = drawn or differing
    random_row = StateRow(State.RANDOM, resumed=False, evidence=f"other random numbers: {', '.join(differing)}")
    if not _end_alike(before.batches, after.batches):
        position = next((n for n, step in enumerate(steps, 1) if _end_alike(step.batches, after.batches)), None)
        if (
            position is None and is_model_resumed is False
        ):  # the arguments may be results of a model that was not resumed
            return [StateRow(State.DATA, None), StateRow(State.RANDOM, None)]
        if position is None and differing:
            return [StateRow(State.DATA, None), random_row]
        batch_text = f"the batch of step {position}" if position else "not a batch of the uninterrupted run"
        evidence = f"the first batch is {batch_text}"
        return [StateRow(State.DATA, resumed=False, evidence=evidence), StateRow(State.RANDOM, None)]
    if not _has_equal_calls(before, after):  # the other calls may be missing batches, or calls before the save
        return [StateRow(State.DATA, None), StateRow(State.RANDOM, None)]
    data = StateRow(State.DATA, True if before.batches else None)
    if is_model_resumed and _list_differing(before.gradients, after.gradients) and differing:
        return [data, random_row]
    return [data, StateRow(State.RANDOM, resumed=None if differing else True)]
