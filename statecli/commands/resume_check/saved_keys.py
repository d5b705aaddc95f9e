"""Find where a checkpoint keeps each state: by a structure that torch or numpy defines, or else by key names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import msgspec

from statecli.commands.resume_check.result import State
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.units import join_names
from statecli.targets import load

#: Keys from a loaded object to a value.
Path = tuple[str | int, ...]
#: Largest number of keys in a message.
_MAX_NAMES = 3
#: Sizes in bytes of the state of torch's CPU generator, and of a CUDA generator.
_TORCH_STATE_BYTES, _CUDA_STATE_BYTES = 5056, 16
#: Parts of keys and file names by the state that they indicate, in the order in which states are tried:
#: `lr_scheduler_state_dict` is a scheduler. A part of fewer than five letters must be a whole word.
_PARTS_BY_STATE = {
    State.SCALER: ("scaler",),
    State.SCHEDULER: ("sched",),
    State.OPTIMIZER: ("optim", "opt"),
    State.AVERAGE: ("ema", "average", "shadow", "swa", "teacher"),
    State.RANDOM: ("rng", "random"),
    State.DATA: (
        "sampler",
        "loader",
        "data",
        "pos",
        "position",
        "offset",
        "cursor",
        "batch",
        "order",
        "indices",
        "perm",
    ),
    State.STEP: ("step", "epoch", "iteration", "trainer_state"),
    State.MODEL: ("model", "state_dict", "weights", "net", "network"),
}
_SHORT_PART_LETTERS = 5
#: Words of keys whose values are settings or results, not a state.
_STATELESS_WORDS = frozenset(
    [
        *("arg", "args", "best", "cfg", "conf", "config", "hparams", "loss", "losses", "metric", "name", "path"),
        *("score", "seed", "size", "version"),
    ]
)
#: Setting that only the state_dict() of one kind of state has -> this kind.
_STATE_BY_FIELD = {"last_epoch": State.SCHEDULER, "growth_interval": State.SCALER}
#: Classes of numpy that only a numpy.random.Generator uses by default, unlike MT19937.
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "Philox", "SFC64")
#: Key of the inner schedulers in the state_dict() of a SequentialLR or a ChainedScheduler.
_INNER_SCHEDULERS = "_schedulers"
#: Parts of keys in files that hold only states of generators.
_GENERATOR_KEY = compile_on_use("python|numpy|cpu|cuda|torch|random|rng|seed")
#: Words of keys of data that indicate an order of the batches, not a position.
_ORDER_WORDS = ("order", "indices", "perm")
#: Ends of the names of files that may hold several states.
_FILE_ENDS = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".tar")


class SavedKey(msgspec.Struct, frozen=True):
    """Path of a value in a checkpoint: the keys that lead to the value and, in a folder, the name of the file.

    The path of a whole file is ().
    """

    path: Path
    file: str = ""

    @property
    def name(self) -> str:
        """The first key of the path, or the file's name for a whole file."""
        return str(self.path[0]) if self.path else self.file

    @property
    def text(self) -> str:
        """The key as messages show it, such as `'optimizer' in state.pt`."""
        if not self.name:
            return "a state_dict"
        file_text = f" in {self.file}" if self.file and self.path else ""
        return f"{self.name!r}{file_text}"

    @property
    def expression(self) -> str:
        """Python expression of the value, such as `checkpoint['rng']`, or "" in a folder of several files."""
        return "" if self.file else "checkpoint" + "".join(f"[{key!r}]" for key in self.path)


class SavedKeys:
    """Keys of a checkpoint, grouped by the state that they hold, and keys of unknown meaning.

    Attributes:
        states: The keys of each state, certain keys first.
        generators: The state of each random generator, by its name in `StepRecord.random`.
        torch_states: Each value that may be the state of a generator of torch.
        is_readable: False if statecli cannot read the checkpoint, so that all states are possible.
    """

    def __init__(self) -> None:
        self.states: dict[State, list[SavedKey]] = {}
        self.generators: dict[str, SavedKey] = {}
        self.torch_states: list[SavedKey] = []
        self._generator_states: list[SavedKey] = []
        self.is_readable = True
        self._others: dict[SavedKey, None] = {}

    @property
    def others(self) -> tuple[SavedKey, ...]:
        """Keys of values that statecli does not recognise. Each of these values may be a state."""
        generator_lists = {
            SavedKey(key.path[:1], key.file) for key in self.generators.values() if _is_in_list(key.path)
        }
        return tuple(key for key in self._others if key not in generator_lists)

    def find_generator(self, variable: str) -> SavedKey | None:
        """Return the key that has the name of the script's variable and the state of a generator, or None."""
        name = variable.rpartition(".")[2]
        return next((key for key in self._generator_states if key.path and key.path[-1] == name), None)

    def find(self, state: State, variable_name: str, other_variables: Sequence[str] = ()) -> tuple[SavedKey, ...]:
        """Return the keys that may hold the state: if possible the key with the name of the variable, or ().

        A key with the name of one of the other variables holds the state of that variable. With other variables, each
        remaining key may hold the state.
        """
        name, *other_names = (variable.rpartition(".")[2] for variable in (variable_name, *other_variables))
        keys = self.states.get(state, [])
        named_key = next((key for key in (*keys, *self._others) if key.name == name), None)
        if named_key is not None:
            return (named_key,)
        keys = [key for key in keys if key.name not in other_names]
        return tuple(keys if other_names else keys[:1])

    def find_named(self, variable_name: str) -> SavedKey | None:
        """Return the key with the same name as the variable, or None. The key may hold any state."""
        name = variable_name.rpartition(".")[2]
        keys = (key for state_keys in (self._others, *self.states.values()) for key in state_keys)
        return next((key for key in keys if key.name == name), None)

    def find_vague_random(self) -> SavedKey | None:
        """Return a key whose name suggests random numbers, but whose value is not a known generator state."""
        recognized_keys = {*self.generators.values()}
        recognized_keys |= {SavedKey(key.path[:1], key.file) for key in recognized_keys} | {
            SavedKey((), key.file) for key in recognized_keys
        }
        return next((key for key in self.states.get(State.RANDOM, ()) if key not in recognized_keys), None)

    def find_data(self, *, is_order: bool) -> SavedKey | None:
        """Return the key of the batch order (`is_order`) or of the data position, or else the first key about data."""
        keys = self.states.get(State.DATA, ())
        matching_keys = (key for key in keys if is_order == any(part in key.name.lower() for part in _ORDER_WORDS))
        return next(matching_keys, keys[0] if keys else None)

    def list_random_paths(self) -> tuple[str, ...]:
        """Return the dotted paths of the states of random generators, each with a dot at its end."""
        keys = dict.fromkeys((*self.states.get(State.RANDOM, ()), *self._generator_states))
        return tuple("".join(f"{part}." for part in (key.file, *key.path) if part != "") for key in keys)

    def add(self, state: State, key: SavedKey) -> None:
        self.states.setdefault(state, []).append(key)

    def add_generators(self, file_state: ModelState, file: str) -> None:
        """Add the states of random generators in a file."""
        for generator, path in _iter_generators(file_state):
            self.generators.setdefault(generator, SavedKey(path, file))
            self._generator_states.append(SavedKey(path, file))
            if generator == "torch":
                self.torch_states.append(SavedKey(path, file))

    def add_keys(self, file_state: ModelState, file: str = "") -> None:
        """Add the top-level keys of a file, and its states with a known structure."""
        certain = dict(_iter_certain(file_state))
        for path, state in certain.items():
            self.add(state, SavedKey(path, file))
        list_names = {path[0] for path in certain if path and _is_in_list(path)}
        for name in _list_top_keys(file_state):
            key, named_state = SavedKey((name,), file), _classify(name)
            if named_state is not None and name not in list_names:
                self.add(named_state, key)
            elif name not in list_names and _STATELESS_WORDS.isdisjoint(_split_words(name)):
                self._others[key] = None

    def describe_lack(self, word: str, step: int) -> str:
        """Return the start of a message that the checkpoint has no key for the state `word`."""
        checkpoint = f"the checkpoint of step {step}"
        if not self.is_readable:
            return f"statecli cannot read {checkpoint}, and does not know whether the file has the {word}"
        others = join_names([key.text for key in self.others], _MAX_NAMES)
        other_keys_text = f" under a known key (other keys: {others})" if others else ""
        return f"{checkpoint} has no {word}{other_keys_text}"


def read_keys(checkpoint: str) -> SavedKeys:
    """Read the keys of a checkpoint. In a folder, skip files whose names show a state other than random numbers."""
    keys = SavedKeys()
    if not os.path.isdir(checkpoint):
        file_state = _read_file(checkpoint)
        keys.is_readable = file_state is not None
        if file_state is not None:
            keys.add_keys(file_state)
            keys.add_generators(file_state, "")
        return keys
    for name in sorted(os.listdir(checkpoint)):
        state = _classify(name)
        if state is not None:
            keys.add(state, SavedKey((), name))
        may_hold_more = state in (None, State.RANDOM) and name.endswith(_FILE_ENDS)
        file_state = _read_file(os.path.join(checkpoint, name)) if may_hold_more else None
        if file_state is not None:
            keys.add_generators(file_state, name)
        if file_state is not None and state is None:
            keys.add_keys(file_state, name)
    return keys


def _is_in_list(path: Path) -> bool:
    """Return True if all keys after the first key of the path are indexes of lists."""
    return not any(isinstance(key, str) for key in path[1:])


def _read_file(path: str) -> ModelState | None:
    try:
        return load.read_checkpoint(path)
    except UnreadableError:
        return None


def _classify(name: str) -> State | None:
    """Return the state that the name of a key or a file suggests, or None."""
    words = _split_words(name)
    if _STATELESS_WORDS.intersection(words):
        return None
    parts = ((state, part) for state, parts in _PARTS_BY_STATE.items() for part in parts)
    return next((state for state, part in parts if _has_part(name.lower(), words, part)), None)


def _has_part(name: str, words: list[str], part: str) -> bool:
    return part in words if len(part) < _SHORT_PART_LETTERS else part in name


def _split_words(name: str) -> list[str]:
    """Return the words of a snake_case or camelCase name. A word that ends in s is also returned without the s."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
    return [*words, *(word[:-1] for word in words if word.endswith("s"))]


# --- values of a known structure --------------------------------------------------------------------------------------


def _list_top_keys(state: ModelState) -> list[str]:
    """Return the top-level keys of a checkpoint. If the whole file is a state_dict, omit its tensor names."""
    models = _list_whole_models(state)
    tensors = [tensor for tensor in state.tensors if tensor.section not in models]
    paths = [_split_tensor_path(tensor, state) for tensor in tensors]
    paths += [_split_path(path, state.metadata.types.get(path)) for path in state.metadata.values]
    paths += [_split_section(facts.section, state) for facts in state.optimizers]
    return list(dict.fromkeys(str(path[0]) for path in paths if path))


def _iter_certain(state: ModelState) -> Iterator[tuple[Path, State]]:
    """Yield (path, kind) of each state with a known structure: optimizer, scheduler, scaler or whole-file model."""
    yield from ((_split_section(facts.section, state), State.OPTIMIZER) for facts in state.optimizers)
    yield from (((), State.MODEL) for _ in _list_whole_models(state))
    for path in state.metadata.values:
        keys = _split_path(path, state.metadata.types.get(path))
        if keys[-1] in _STATE_BY_FIELD and len(keys) > 1:
            outer = keys[: keys.index(_INNER_SCHEDULERS)] if _INNER_SCHEDULERS in keys else keys[:-1]
            yield outer, _STATE_BY_FIELD[str(keys[-1])]


def _list_whole_models(state: ModelState) -> set[str]:
    """Return the sections of models whose state_dict is the whole file, as `_metadata` or dotted names show."""
    dotted = {tensor.section for tensor in state.tensors if "." in tensor.fqn}
    whole_dicts = [facts for facts in state.state_dicts if facts.keys == () and not facts.is_module]
    return {facts.section for facts in whole_dicts if facts.metadata is not None or facts.section in dotted}


def _iter_generators(state: ModelState) -> Iterator[tuple[str, Path]]:
    """Yield each random generator of torch, CUDA, Python and numpy with the path of its state."""
    for tensor in state.tensors:
        if tensor.dtype == "uint8" and tensor.shape is not None and len(tensor.shape) == 1:
            keys = _split_tensor_path(tensor, state)
            is_own = not re.search("sampler|loader", f"{tensor.section}.{tensor.fqn}".lower())
            if tensor.shape[0] == _TORCH_STATE_BYTES and is_own:
                yield "torch", keys
            elif tensor.shape[0] == _CUDA_STATE_BYTES and keys and isinstance(keys[-1], int):
                yield "cuda", keys[:-1]
    values = state.metadata.values
    for path, value in values.items():
        keys = _split_path(path, state.metadata.types.get(path))
        if value == "MT19937" and keys[-1] in (0, "bit_generator"):
            yield "numpy", keys[:-1]
        elif keys[-1] == "bit_generator" and value in _BIT_GENERATORS:
            yield "numpy.random.Generator", keys[:-1]
        elif keys[-1] == 1 and str(value).startswith("list of 625,") and values.get(f"{path[:-1]}0") in (2, 3):
            yield "random", keys[:-1]


def _split_path(path: str, types: str | None = None) -> Path:
    """Split a dotted path into its keys. `types` is the entry of the path in `Settings.types`."""
    if types is None:
        return tuple(int(key) if key.isascii() and key.isdigit() else key for key in path.split("."))
    ends = [position for position, letter in enumerate(types) if letter == "."]
    pairs = zip([0, *(end + 1 for end in ends)], [*ends, len(path)], strict=True)
    return tuple(int(path[a:b]) if types[a] == "i" else path[a:b] for a, b in pairs)


def _split_tensor_path(tensor: TensorInfo, state: ModelState) -> Path:
    """Return the keys that lead to a tensor outside of a model: its section, its name and its subscripts."""
    head, _, subscript_text = tensor.fqn.partition("[")
    steps = re.findall(r"\[(?:(\d+)|'([^']*)')\]", f"[{subscript_text}" if subscript_text else "")
    subscripts = tuple(int(number) if number else text for number, text in steps)
    spelled = {facts.section: facts.keys for facts in state.state_dicts if facts.keys is not None}
    section = spelled.get(tensor.section, _split_section(tensor.section, state))
    return (*section, *((head,) if head else ()), *subscripts)


def _split_section(section: str, state: ModelState) -> Path:
    """Return the keys that lead to a section, or () in a file that contains only an optimizer or generators."""
    top_keys = {path.partition(".")[0] for path in state.metadata.values}
    is_lone_optimizer = section == "optimizer" and "param_groups" in top_keys
    is_lone_generators = (
        state.sections == ("rng",) and not state.state_dicts and all(map(_GENERATOR_KEY.search, top_keys))
    )
    return () if not section or is_lone_optimizer or is_lone_generators else _split_path(section)
