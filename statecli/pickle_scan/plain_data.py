"""Find plain data that makes ordinary loaders do harm: `torch.load(weights_only=True)` returns the data unchecked.

Each value is checked for the library that reads it. numpy accepts any number as a position in its table. Python formats
texts in a state of version 2. torch obeys a flag in `_metadata`, and computes powers of integers exactly. Lightning and
MMEngine remove the paths of their checkpoints (`checkpoint_paths`). A loader that looks up a key or a text takes any
object in its place (`text_values`). Sources: numpy/random/_mt19937.pyx and _philox.pyx, random.py,
torch/nn/modules/module.py, torch/optim/adam.py, asgd.py and lr_scheduler.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard
from statecli.pickle_scan import array_texts, composer_model, evaluated_texts, random_states, texts_as_code
from statecli.pickle_scan.checkpoint_paths import (
    check_lightning_path,
    check_mmengine_path,
    describe_computed_text,
    explain_unsafe_step,
)
from statecli.pickle_scan.data_walk import CONTAINER_TYPES, DataWalk, format_key
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickle_scan.text_values import COMPUTED_TEXT, read_bytearray, read_text, split_call
from statecli.pickles.graph import get_attribute, get_name, is_unknown_mapping, read_raw_bytes
from statecli.pickles.nodes import Global, Key, Obj, SetOf, Value

_TENSOR_AND_DTYPE_PREFIXES = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "numpy.dtype")
#: Keys below which libraries save the state of Python's generator: `python`, `random_state`, `rng_states`.
_RANDOM_KEY = compile_on_use(r"python|rand|rng|seed|generator", re.IGNORECASE)
#: Keys of a module's `_metadata` that torch writes.
_VERSION, _SPECTRAL_NORM, _ASSIGN = "version", "spectral_norm", "assign_to_params_buffers"
#: Keys of the state of Lightning's ModelCheckpoint whose paths are opened or removed. Lightning moves the path of the
#: old key (checkpoints before Lightning 1.2) to this state.
_CHECKPOINT_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")
_OLD_CHECKPOINT_PATH = "checkpoint_callback_best_model_path"
_RANKED_PATHS = "best_k_models"
#: Key of MMEngine's `runtime_info`; prefix of its keys whose paths MMEngine deletes (`best_ckpt_METRIC`); and its key
#: of step numbers, from which MMEngine makes paths.
_RUNTIME_INFO, _BEST_CHECKPOINT, _KEPT_STEPS = "runtime_info", "best_ckpt", "keep_ckpt_ids"
#: Keys of MMCV 1 above the path of the best checkpoint.
_META, _HOOK_MESSAGES = "meta", "hook_msgs"
#: Key of the algorithms in Composer's state, and key of the text of an algorithm.
_ALGORITHMS, _REPRESENTATION = "algorithms", "repr"


#: Characters of a base64 text that are decoded in one step.
_CHARACTERS_PER_STEP = 256
#: Characters that end a string in the source that torch.export compiles.
_TEXT_BREAKS = compile_on_use(r"[\"'\\\n\r]")


def find_hazards(root: Value, steps: Steps, *, keys_are_source: bool = False) -> Iterator[Hazard]:
    """Yield the hazards in the data of a pickle; each container is checked once. Raises OutOfSteps.

    `keys_are_source`: the pickle has the example inputs of a program; torch.export writes their keys into source.
    """
    walk = _Checks(steps)
    yield from walk.check_python_state("", root)
    for node in walk.iter_containers(root):
        items = walk.get_items(node)
        if items is not None:
            yield from walk.check_mapping(node, walk.spell_keys(items))
            if keys_are_source:
                yield from walk.check_keys_of_inputs(node, items)
        elif (elements := walk.get_elements(node)) is not None:
            yield from walk.check_sequence(node, elements)
        if type(node) is Obj and node.state is not None:
            yield from walk.check_metadata(node)
        if type(node) is Obj and is_unknown_mapping(node):
            why = "a dict whose entries are computed during loading, so statecli cannot list the entries"
            yield Hazard(f"{walk.describe_path(node) or 'the root'} is {why}")


class _Checks(DataWalk):
    """Checks of the containers that the walk yields."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        #: Whether a sequence has values other than integers, and texts that Python would format, by the id of the
        #: sequence.
        self._kinds_of_numbers: dict[int, tuple[bool, bool]] = {}

    def check_mapping(self, node: Value, items: Mapping[Any, Any]) -> Iterator[Hazard]:
        """Check the items of a mapping, and whether a random generator can safely take the mapping as its state."""
        if "bit_generator" in items:
            reason = random_states.explain_unsafe_dict(items, self.get_spelled_items)
            if reason:
                yield Hazard(_join_path(self.describe_path(node), reason))
        if Key in set(map(type, items)) and any(type(key) is Key and read_text(key) is COMPUTED_TEXT for key in items):
            yield describe_computed_text(f"a key of {self.describe_path(node) or 'the root'}")
        for key, value in items.items():
            if type(value) in CONTAINER_TYPES:
                yield from self.check_python_state(key, value, node)
            if type(key) is str and texts_as_code.is_dtype_key(key):
                yield from self._check_dtype(node, key, value)
            if type(key) is str and key in evaluated_texts.KEYS:
                yield from self._check_evaluated(node, key, value)
        if len(items) == 2:  # `dict.update` reads the two keys as a key and its value
            yield from self._check_evaluated_pair(node, [*items])
        if "params" in items:
            yield from self._check_param_group(node, items)
        if "milestones" in items:
            yield from self._check_milestones(node, items)
        states = (pair for states in self.find_mappings(items.get("callbacks")) for pair in states.items())
        for state_key, state in states:
            if type(state) in CONTAINER_TYPES and self.is_unchecked("callbacks", state):
                for paths in self.find_mappings(state):
                    yield from self._check_paths(f"callbacks{format_key(state_key)}", paths)
        if _RUNTIME_INFO in items and self.is_unchecked(_RUNTIME_INFO, items[_RUNTIME_INFO]):
            for info in self.find_mappings(items[_RUNTIME_INFO]):
                yield from self._check_runtime_info(info)
        for meta in self.find_mappings(items.get(_META)):
            where = f"[{_META!r}][{_HOOK_MESSAGES!r}][{_BEST_CHECKPOINT!r}]"
            for path in self._find_updates(meta.get(_HOOK_MESSAGES), _BEST_CHECKPOINT):
                yield from check_mmengine_path(where, path, self._steps, library="MMCV")
        if _OLD_CHECKPOINT_PATH in items:
            yield from check_lightning_path(f"[{_OLD_CHECKPOINT_PATH!r}]", items[_OLD_CHECKPOINT_PATH], self._steps)
        if _ALGORITHMS in items and self.is_unchecked(_ALGORITHMS, items[_ALGORITHMS]):
            yield from self._check_algorithms(node, items[_ALGORITHMS])
        integrations = items.get(composer_model.INTEGRATIONS)
        if type(integrations) in CONTAINER_TYPES and self.is_unchecked(composer_model.INTEGRATIONS, integrations):
            for saved in self._find_nested(integrations, composer_model.HUGGINGFACE):
                yield from self._check_composer_model(saved)
        if array_texts.SPACE in items:
            yield from self._check_space(node, items)
        for parent_key in texts_as_code.CONFIG_PARENTS:
            yield from self._check_configs(parent_key, items.get(parent_key))
        for parent_key in texts_as_code.HYPERPARAMETERS:
            root = items.get(parent_key)
            if type(root) in CONTAINER_TYPES and self.is_unchecked(parent_key, root):
                yield from self._check_hyperparameters(parent_key, root)

    def _check_space(self, node: Value, items: Mapping[Any, Any]) -> Iterator[Hazard]:
        """Check the arrays that describe a space of RLlib."""
        for key in array_texts.ARRAYS:
            value = items.get(key)
            text = read_text(value)
            text = _read_bytes(text) if type(text) is Obj else text
            is_array = text is None and _is_bytes(value)
            if isinstance(text, (str, bytes)):  # many spaces can share the text
                self._steps.take(Budget.TEXT, 1 + len(text) // _CHARACTERS_PER_STEP)
            is_unpickled = isinstance(text, (str, bytes)) and array_texts.unpickles_text(text)
            if text is COMPUTED_TEXT or is_array or is_unpickled:
                noun = f"{'an array' if is_array else 'a string'} that RLlib unpacks and unpickles"
                yield Hazard(f"{self.describe_path(node)}[{key!r}] is {noun}", help=array_texts.HELP)

    def _check_dtype(self, node: Value, key: str, value: Value) -> Iterator[Hazard]:
        """Check that numbers, which HQQ reads as letters, spell a dtype's name. `audit` checks numbers in tensors."""
        numbers = self._list_numbers(value)
        where = f"{self.describe_path(node)}[{quoting.quote(key)}]"
        if numbers is None:
            fault, is_safe = "neither the name of a dtype nor a tensor", self._yields_no_numbers(value)
        else:
            is_ascii = all(type(number) is int and 0 <= number < 128 for number in numbers)
            fault, is_safe = "not the name of a dtype", is_ascii and texts_as_code.is_dtype("".join(map(chr, numbers)))
        if not is_safe:
            yield Hazard(f"{where} is {fault}; HQQ evaluates the value as Python code")

    def _yields_no_numbers(self, value: Value) -> bool:
        """Return True if HQQ cannot read numbers from the value. Tensors count too, because `audit` checks them."""
        items = self.get_items(value)
        if items is not None:
            return all(type(key) is str for key in items)
        if type(value) is Obj:
            return get_name(value.cls).startswith(_TENSOR_AND_DTYPE_PREFIXES)
        return type(value) in (str, int, float, bool, type(None), Global)

    def _check_evaluated(self, node: Value, key: str, value: Value) -> Iterator[Hazard]:
        """Check a text that fairseq evaluates. Python also evaluates bytes and arrays of numpy."""
        text, hazard = read_text(value), None
        where = f"{self.describe_path(node)}[{quoting.quote(key)}]"
        if type(text) is str:
            self._steps.take(Budget.TEXT, 1 + len(text))
            hazard = evaluated_texts.check_text(where, key, text)
        elif text is COMPUTED_TEXT:
            hazard = describe_computed_text(where)
        elif (key in evaluated_texts.OWN_KEYS or _read_bytes(value) is not None) and _is_bytes(value):
            hazard = Hazard(
                f"{where} is bytes or an array instead of a string; fairseq evaluates the value as Python code"
            )
        if hazard:
            yield hazard

    def _check_evaluated_pair(self, node: Value, pair: Sequence[Value]) -> Iterator[Hazard]:
        """Check a pair as a key and its value, because `dict.update` accepts a list of pairs."""
        key = read_text(pair[0])
        if type(key) is str and key in evaluated_texts.KEYS:
            yield from self._check_evaluated(node, key, pair[1])

    def _check_algorithms(self, node: Value, algorithms: Value) -> Iterator[Hazard]:
        """Check the text in the mapping of each Composer algorithm, which is a pair (name, mapping)."""
        where = f"{self.describe_path(node)}[{_ALGORITHMS!r}]…[{_REPRESENTATION!r}]"
        for pair in self.find_elements(algorithms):
            for items in (items for value in self.find_elements(pair) for items in self.find_mappings(value)):
                text = read_text(items.get(_REPRESENTATION))
                if type(text) is str:
                    self._steps.take(Budget.TEXT, 1 + len(text))
                    if hazard := evaluated_texts.check_representation(where, text):
                        yield hazard
                elif type(text) in (Obj, Key):  # Composer formats any object as text
                    yield describe_computed_text(where)

    def _find_nested(self, value: Value, key: str) -> Iterator[Mapping[Any, Any]]:
        for items in self.find_mappings(value):
            yield from self.find_mappings(items.get(key))

    def _find_updates(self, value: Value, key: str) -> Iterator[Value]:
        """Yield the values that `dict.update` would set at the key, from a mapping or a sequence of pairs."""
        for items in self.find_mappings(value):
            if key in items:
                yield items[key]
        for element in self.find_elements(value):
            pair = [*(self.get_items(element) or self.count_steps(self.get_elements(element)) or ())]
            if len(pair) == 2 and read_text(pair[0]) == key:
                yield pair[1]

    def _check_composer_model(self, saved: Mapping[Any, Any]) -> Iterator[Hazard]:
        where = f"[{composer_model.TOKENIZER!r}]"
        for name, file in (
            pair for files in self.find_mappings(saved.get(composer_model.TOKENIZER)) for pair in files.items()
        ):
            if type(name) is not str:
                yield Hazard(f"{where} has a file whose name is not a string; Composer may write the file to any path")
                continue
            extensions = [read_text(content.get(composer_model.EXTENSION)) for content in self.find_mappings(file)]
            if hazard := composer_model.check_file(where, name, extensions[0] if extensions else None):
                yield hazard
        where = f"[{composer_model.MODEL!r}][{composer_model.CONFIG!r}]"
        for config in self._find_nested(saved.get(composer_model.MODEL), composer_model.CONFIG):
            name = read_text(config.get(composer_model.CLASS))
            where_class = f"{where}[{composer_model.CLASS!r}]"
            if name is COMPUTED_TEXT:
                yield describe_computed_text(where_class)
            elif type(name) is str and (hazard := composer_model.check_class(where_class, name)):
                yield hazard
            for content in self.find_mappings(config.get(composer_model.CONTENT)):
                if _is_true(content.get(composer_model.TRUST)):
                    yield composer_model.describe_trust(f"{where}[{composer_model.TRUST!r}]")

    def _list_numbers(self, value: Value) -> Sequence[Any] | None:
        """Return the bytes, integer keys or elements over which a loader may iterate; None for other values."""
        if (raw := _read_bytes(value)) is not None:
            return raw
        keys = [*(self.count_steps(self.get_items(value)) or ())]
        return keys if any(type(key) is int for key in keys) else self.count_steps(self.get_elements(value))

    def _check_configs(self, parent_key: str, parent: Value) -> Iterator[Hazard]:
        for items in self.find_mappings(parent):
            for key in texts_as_code.CONFIGS:
                text, where = read_text(items.get(key)), f"[{parent_key!r}][{key!r}]"
                if text is COMPUTED_TEXT:
                    yield describe_computed_text(where)
                elif type(text) is str:
                    self._steps.take(Budget.TEXT, len(text))
                    yield from texts_as_code.check_config(where, text)

    def _check_runtime_info(self, info: Mapping[Any, Any]) -> Iterator[Hazard]:
        """Check the paths deleted by MMEngine, and the numbers in such paths."""
        for key, value in info.items():
            if type(key) is str and key.startswith(_BEST_CHECKPOINT):
                yield from check_mmengine_path(f"[{_RUNTIME_INFO!r}][{quoting.quote(key)}]", value, self._steps)
        yield from self._check_kept_steps(info.get(_KEPT_STEPS))

    def _check_kept_steps(self, kept_steps: Value) -> Iterator[Hazard]:
        """Check that MMEngine's step numbers are integers in a list, tuple or deque: MMEngine makes paths from them."""
        is_deque = type(kept_steps) is Obj and split_call(kept_steps)[0] == "collections.deque"
        where = f"[{_RUNTIME_INFO!r}][{_KEPT_STEPS!r}]"
        if why := next(filter(None, map(explain_unsafe_step, self.find_elements(kept_steps))), None):
            message = f"an element of {where} is {why}"
        elif kept_steps is not None and type(kept_steps) not in (list, tuple) and not is_deque:
            message = f"{where} is not a list of numbers"
        else:
            return
        yield Hazard(
            f"{message}; MMEngine builds a path from each element and deletes the file or the folder at this path"
        )

    def _check_hyperparameters(self, parent_key: str, root: Value) -> Iterator[Hazard]:
        """Check the class names in hyperparameters. This is a separate walk, because containers may be shared."""
        checks = dict.fromkeys(texts_as_code.CLASS_PATHS, texts_as_code.check_class_path)
        checks[texts_as_code.INSTANTIATOR] = texts_as_code.check_instantiator
        is_instantiated = any(texts_as_code.INSTANTIATOR in items for items in self.find_mappings(root))
        seen: set[tuple[str, str]] = set()
        for node in DataWalk(self._steps, skips_texts=True).iter_containers(root):
            self._steps.take(Budget.FLOW)
            items = self.spell_keys(self.count_steps(self.get_items(node)) or {})
            for key, value in items.items():
                # jsonargparse reads `act.class_path` as a key in `act`.
                check = checks.get(key.rpartition(".")[2]) if type(key) is str else None
                name = read_text(value)
                if check and name is COMPUTED_TEXT:
                    yield describe_computed_text(f"[{parent_key!r}]…[{key!r}]")
                if check is None or type(name) is not str or (key, name) in seen:
                    continue
                seen.add((key, name))
                if hazard := check(f"[{parent_key!r}]…[{key!r}]", name):
                    yield hazard
            elements = self.count_steps(self.get_elements(node)) or ()
            for key, value in (*items.items(), *enumerate(elements)):
                is_argument = is_instantiated and not (type(key) is str and key.rpartition(".")[2] in checks)
                yield from self._check_hyperparameter(parent_key, key, value, is_argument=is_argument)

    def _check_hyperparameter(
        self, parent_key: str, key: Value, value: Value, *, is_argument: bool
    ) -> Iterator[Hazard]:
        """Check a text in hyperparameters. `is_argument`: LightningCLI may read the text as the name of a class."""
        text, where = read_text(value), f"[{parent_key!r}]"
        if is_argument and text is COMPUTED_TEXT:
            yield describe_computed_text(f"{where}…{format_key(key)}")
        if type(text) is not str:
            return
        self._steps.take(Budget.TEXT, 1 + len(text) // (1 if is_argument else 8))
        if hazard := texts_as_code.check_text(where, text):
            yield hazard
        elif is_argument:
            yield from texts_as_code.check_argument(f"{where}…{format_key(key)}", text)

    def check_keys_of_inputs(self, node: Value, items: Mapping[Any, Any]) -> Iterator[Hazard]:
        """Check the keys of a program's example inputs, which torch.export writes into the source of guards.

        torch writes the `repr` of a key, and the `repr` of an object is any text.
        """
        for key in items:
            text = read_text(key)
            if type(text) is str and _TEXT_BREAKS.search(text):
                problem = f"[{quoting.quote(text)}]: key with a quote, a backslash or a line break"
            elif type(text) not in (str, int, float, bool, type(None)):
                problem = ": key that is neither a string nor a number"
            else:
                continue
            yield Hazard(
                f"{self.describe_path(node) or 'the root'}{problem}; torch compiles Python code that contains "
                "the key, so the key can run code"
            )
            return

    def _check_param_group(self, node: Value, group: Mapping[Any, Any]) -> Iterator[Hazard]:
        """Check the numbers with which an optimizer computes powers: the betas, and the alpha of ASGD."""
        betas = self.find_elements(group.get("betas"))
        for name, value, limit in (("alpha", group.get("alpha"), _MAX_POWER), *(("betas", beta, 1) for beta in betas)):
            number = random_states.read_number(value)
            if type(number) is int and abs(number) > limit:
                yield Hazard(
                    f"{self.describe_path(node)}[{name!r}]: integer with an absolute value above {limit}; the next "
                    "optimizer step may compute a power with this number for hours"
                )

    def _check_milestones(self, node: Value, scheduler: Mapping[Any, Any]) -> Iterator[Hazard]:
        """Check the counts in a MultiStepLR's milestones, because gamma to the power of a huge count takes hours."""
        counts = [count for counts in self.find_mappings(scheduler["milestones"]) for count in counts.values()]
        gamma = random_states.read_number(scheduler.get("gamma"))
        if type(gamma) is int and any((random_states.read_number(count) or 0) > _MAX_POWER for count in counts):
            yield Hazard(
                f"{self.describe_path(node)}['milestones']: a count is above {_MAX_POWER} and gamma is an integer; "
                "computing gamma to the power of the count may take hours"
            )

    def _check_paths(self, path: str, state: Mapping[Any, Any]) -> Iterator[Hazard]:
        for key in _CHECKPOINT_PATHS:
            yield from check_lightning_path(f"{path}[{key!r}]", state.get(key), self._steps)
        for key in (key for ranked in self.find_unspelled(state.get(_RANKED_PATHS)) for key in ranked):
            yield from check_lightning_path(f"a key of {path}[{_RANKED_PATHS!r}]", key, self._steps)

    def check_sequence(self, node: Value, elements: Sequence[Any]) -> Iterator[Hazard]:
        """Check the elements of a sequence, and whether numpy's generator can safely take the sequence as its state."""
        reason = random_states.explain_unsafe_sequence(elements)
        if reason:
            yield Hazard(_join_path(self.describe_path(node), reason))
        for index, value in enumerate(elements):
            if type(value) in CONTAINER_TYPES:
                yield from self.check_python_state(index, value, node)
        if len(elements) == 2:
            yield from self._check_evaluated_pair(node, elements)

    def check_python_state(self, key: Value, state: Value, parent: Value = None) -> Iterator[Hazard]:
        """Check a value as a state of Python's generator in version 2; Python's C code checks version 3 itself."""
        if type(state) not in (list, tuple, Obj) or (type(state) is not Obj and len(state) != 3):
            return
        parts = self.get_elements(state)
        if parts is None or len(parts) != 3 or random_states.read_number(parts[0]) != 2:
            return
        if id(parts[1]) not in self._kinds_of_numbers:
            numbers = self.get_elements(parts[1]) or ()
            others = [number for number in numbers if type(number) is not int]
            self._kinds_of_numbers[id(parts[1])] = (bool(others), any(map(_is_template, others)))
        has_others, has_templates = self._kinds_of_numbers[id(parts[1])]
        if has_templates or (has_others and type(key) is str and _RANDOM_KEY.search(key)):
            path = self.describe_path(parent) + format_key(key) if parent is not None else ""
            yield Hazard(
                _join_path(path, "the saved state of Python's random module has values that are not integers")
                + "; random.setstate computes `value % 2**32`, which can fill the memory if the value is a string"
            )

    def check_metadata(self, node: Obj) -> Iterator[Hazard]:
        """Check the `_metadata` of a state_dict, which load_state_dict gives to each module."""
        assigned, unknown = [], []
        modules = (pair for mapping in self.find_mappings(get_attribute(node, "_metadata")) for pair in mapping.items())
        for name, values in ((name, values) for name, local in modules for values in self.find_mappings(local)):
            if len(values) == 1 and _VERSION in values:
                continue
            if _is_true(values.get(_ASSIGN, False)):
                assigned.append(name)
            unknown += [key for key in values if key not in (_VERSION, _SPECTRAL_NORM, _ASSIGN)]
        if assigned:
            yield Hazard(
                f"_metadata[{_show_key(assigned[0])}][{_ASSIGN!r}] is set{_count_more(assigned)}, so "
                "load_state_dict replaces the parameters with the file's tensors; an optimizer created "
                "before loading no longer trains the model",
                help=(
                    f"run before load_state_dict: for local in state_dict._metadata.values(): local.pop({_ASSIGN!r}, "
                    "None)"
                ),
            )
        if unknown:
            yield Hazard(
                f"the state_dict's _metadata has {_show_key(unknown[0])}{_count_more(unknown)}, which torch does not "
                "write; a module's own code may read this entry and load other values",
                is_error=False,
            )


#: Prefixes of the classes and functions that create arrays.
_ARRAY_PREFIXES = ("numpy.", "array.")
#: Largest alpha and count in a power of an integer: Python computes the power at once, and trainings use far less.
_MAX_POWER = 1000


def _is_template(value: Value) -> bool:
    """Return True for a text or bytes that `%` may format."""
    text = read_text(value)
    if type(text) is str:
        return "%" in text
    return text is COMPUTED_TEXT or b"%" in (_read_bytes(value) or b"")


def _read_bytes(value: Value) -> bytes | None:
    """Return a bytes or bytearray value, which Python evaluates like a text; None for other values."""
    raw = read_raw_bytes(value)
    return read_bytearray(value) if raw is None else raw


def _is_bytes(value: Value) -> bool:
    """Return True for bytes, and for other objects whose memory Python evaluates as bytes."""
    if type(value) is not Obj or random_states.read_number(value) is not None:
        return type(value) is bytes
    return split_call(value)[0].startswith(_ARRAY_PREFIXES) or _read_bytes(value) is not None


def _is_true(value: Value) -> bool:
    """Return True if the value is true in Python, or is an object that may be true."""
    return type(value) in (Obj, Key, Global) or bool(value.elems if type(value) is SetOf else value)


def _join_path(path: str, reason: str) -> str:
    return f"{path}: {reason}" if path else reason


def _show_key(key: Value) -> str:
    return quoting.quote(key) if type(key) is str else "a key"


def _count_more(keys: list[Any]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""
