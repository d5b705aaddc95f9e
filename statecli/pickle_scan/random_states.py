"""Check that the states of random generators in a pickle are as numpy and Python write them.

numpy accepts any number as a position in a table, and the next draw reads memory there. numpy looks up positions in any
given object: a mapping of any class, a record of an array, a key computed by a call. So a state is sound only if
numpy's own `__reduce__`, of 1.16 to 2.4, writes each of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from statecli.pickle_scan import numpy_dtype_states
from statecli.pickles.keys import wrap_key
from statecli.pickles.nodes import Key, Obj, Value

#: Function that returns the plain name whose call built a value.
RootName: TypeAlias = Callable[[Value], str | None]

#: Lengths of the table of MT19937 and of the buffer of Philox, by the key of the position in them.
_TABLE_LENGTHS = {"pos": 624, "buffer_pos": 4}
_NUMBER_KEYS = frozenset(["has_gauss", "gauss", "has_uint32", "uinteger", "state", "inc"])
_ARRAY_KEYS = frozenset(["key", "counter", "buffer", "state"])
_LONGEST_STATE = 8
_OLD_NAMES = ("MT19937", b"MT19937")
#: Largest pool of a seed, because each new seed mixes the whole pool; numpy's own pool has 4 numbers.
_MAX_SEED_POOL = 1024
_SEED = "SeedSequence"
#: Count of the numbers in the state of Python's generator: a table of 624, and the position in the table.
_PYTHON_NUMBERS = 625
#: Smallest number of values in a state as a tuple (a name, a table and a position). Limit of the positions that a
#: message shows.
_SHORTEST_OLD_STATE, _MAX_SHOWN = 3, 10**15


def is_numpy_state(name: str, state: Value, root_name: RootName) -> bool:
    """Return True if numpy writes this state for a class of `numpy.random`: a generator, a bit generator or a seed."""
    if name.endswith(_SEED):
        return type(state) is tuple and len(state) == 5 and _is_seed_state(state, root_name)
    match state:
        case (dict() as parts, seed):
            seed_name = root_name(seed) or ""
            is_seed = seed is None or (seed_name.startswith("numpy.random.") and seed_name.endswith(_SEED))
            return type(state) is tuple and is_seed and _is_generator_dict(parts, root_name)
        case (name_of_table, table, position, *numbers):
            is_old = type(state) is tuple and type(name_of_table) in (str, bytes) and name_of_table in _OLD_NAMES
            is_sound = is_old and _is_integer_array(table, root_name) and _is_position(position, "pos")
            return is_sound and len(numbers) in (0, 2) and all(map(_is_number, numbers))
    return type(state) is dict and _is_generator_dict(state, root_name)


def is_python_state(state: Value) -> bool:
    """Return True if Python writes this state for `random.Random`. Python computes with a version 2 state unchecked."""
    match state:
        case (2 | 3, tuple(numbers), None | float()):
            is_plain = type(state) is tuple and type(state[0]) is int
            return is_plain and len(numbers) == _PYTHON_NUMBERS and all(type(number) is int for number in numbers)
    return False


def explain_unsafe_sequence(state: Sequence[Value]) -> str | None:
    """Return why numpy's `set_state` with these values reads memory outside its table; None if it does not."""
    if len(state) < _SHORTEST_OLD_STATE or not _may_equal_old_name(state[0]):
        return None
    return _explain_unsafe_position(state[2], "pos")


def explain_unsafe_dict(
    state: Mapping[Value, Value], get_items: Callable[[Value], Mapping[Any, Any] | None]
) -> str | None:
    """Return why a numpy generator with this state is unsafe (it reads other memory or calls an object); else None."""
    inner = state.get("state")
    parts = get_items(inner) if type(inner) in (dict, Obj) else {}
    if parts is None:
        return "the state of a numpy random generator is an object, not a dict; numpy calls methods of this object"
    positions = [(key, part[key]) for part in (state, parts) for key in _TABLE_LENGTHS if key in part]
    return next(filter(None, (_explain_unsafe_position(position, key) for key, position in positions)), None)


def _explain_unsafe_position(position: Value, key: str) -> str | None:
    number, length = read_number(position), _TABLE_LENGTHS[key]
    if number is not None and 0 <= number <= length:
        return None
    position_text = f"{number:.10g}" if number is not None and abs(number) < _MAX_SHOWN else "not a short number"
    return (
        f"the position of a numpy random generator is {position_text}, but its table has {length} numbers; the next "
        "random draw reads memory outside the table"
    )


def read_number(value: Value) -> int | float | None:
    """Return a value, such as a scalar of numpy, as a number; None for a value that is not a number."""
    key = wrap_key(value) if type(value) is Obj else value
    number = key.plain if type(key) is Key else key
    return number if type(number) in (int, float, bool) else None


def _may_equal_old_name(value: Value) -> bool:
    """Return True for a value that numpy may find equal to the name MT19937: the name, or an array of a single text."""
    if type(value) is not Obj:
        return type(value) is str and value == _OLD_NAMES[0]
    parts = value.state
    if type(parts) is not tuple or len(parts) not in (4, 5) or type(parts[-4]) is not tuple:
        return bool(wrap_key(value) == _OLD_NAMES[0])
    code = parts[-3].args[0] if type(parts[-3]) is Obj and parts[-3].args else None
    has_texts = type(code) is str and code.lstrip("<>=|")[:1] in ("U", "T", "O")
    return has_texts and all(type(length) is int and length == 1 for length in parts[-4])


def _is_generator_dict(state: dict[Value, Value], root_name: RootName, is_inner: bool = False) -> bool:
    return len(state) <= _LONGEST_STATE and all(
        _is_part(key, value, root_name, is_inner) for key, value in state.items()
    )


def _is_part(key: Value, value: Value, root_name: RootName, is_inner: bool) -> bool:
    if type(key) is not str:
        return False
    if key in _TABLE_LENGTHS:
        return _is_position(value, key)
    if type(value) is dict:
        return key == "state" and not is_inner and _is_generator_dict(value, root_name, is_inner=True)
    if key == "bit_generator":
        return type(value) is str
    return (key in _NUMBER_KEYS and _is_number(value)) or (key in _ARRAY_KEYS and _is_integer_array(value, root_name))


def _is_seed_state(state: tuple[Any, ...], root_name: RootName) -> bool:
    """Return True for the state of a SeedSequence: `(entropy, children, pool, size of the pool, key)`."""
    entropy, children, pool, size, key = state
    is_entropy = entropy is None or _is_integers(entropy) or _is_integer_array(entropy, root_name)
    is_sized = type(size) is int and 0 <= size <= _MAX_SEED_POOL
    is_pool = pool is None or _is_integer_array(pool, root_name)
    return is_entropy and type(children) is int and is_pool and is_sized and type(key) is tuple and _is_integers(key)


def _is_integers(value: Value) -> bool:
    return all(type(number) is int for number in (value if type(value) in (list, tuple) else (value,)))


def _is_number(value: Value) -> bool:
    return type(value) in (int, float, bool)


def _is_position(value: Value, key: str) -> bool:
    return type(value) is int and 0 <= value <= _TABLE_LENGTHS[key]


def _is_integer_array(value: Value, root_name: RootName) -> bool:
    """Return True for an array of integers, rebuilt by numpy's own functions."""
    if type(value) is not Obj:
        return False
    name = root_name(value) or ""
    if name.endswith(".multiarray._reconstruct") and type(value.state) is tuple and len(value.state) in (4, 5):
        dtype = value.state[-3]
    elif name.endswith(".numeric._frombuffer") and len(value.args) > 1:
        dtype = value.args[1]
    else:
        return False
    is_integer = numpy_dtype_states.is_dtype(dtype) and numpy_dtype_states.get_code(dtype) in ("i", "u")
    return name.startswith("numpy.") and is_integer
