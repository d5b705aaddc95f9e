"""Check the states that an object gets while the pickle is loaded, if its class uses the state unchecked."""

from __future__ import annotations

from statecli.pickle_scan import expected_calls, kept_functions, packed_weights, random_states
from statecli.pickle_scan.deferred_calls import RootLookup
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Obj, Value


def is_expected(name: str, state: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True for a state that picklers write, and for a class that checks its state itself."""
    is_recurrent = name.startswith(expected_calls.RECURRENT_MODULE_PREFIXES) and ".rnn." in name
    if is_recurrent and type(state) is dict and not expected_calls.is_layer_count(state.get("num_layers")):
        return False
    is_module = kept_functions.is_module_class(name) and not packed_weights.is_convolution(name)
    if is_module and not kept_functions.has_modules(state, root):
        return False
    if name == expected_calls.HOOK_HANDLE_CLASS:
        return _is_handle_state(state, root, steps)
    if name == expected_calls.POLYNOMIAL_CLASS:
        return _is_polynomial_state(state, root, steps)
    if name in expected_calls.GENERATOR_CLASSES:
        return _is_generator_state(state, root)
    if name.startswith(expected_calls.NUMPY_RANDOM_PREFIX):
        return random_states.is_numpy_state(name, state, root)
    if name == "random.Random":
        return random_states.is_python_state(state)
    return not expected_calls.has_unexpected_state(name, state)


def _is_handle_state(state: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True for a valid state of a hook handle: a tuple (dict of hooks, number of the hook, other dicts).

    The next hook of any module gets the next number. After infinity all hooks have the same number, so removing any
    hook removes the last one.
    """
    if type(state) is not tuple or len(state) not in (2, 3) or type(state[1]) is not int:
        return False
    others = state[2] if len(state) == 3 and state[2] is not None else ()
    if type(others) is not tuple or not 0 <= state[1] < expected_calls.MAX_HOOKS:
        return False
    steps.take(Budget.FLOW, len(others))
    dicts = (hooks for hooks in (state[0], *others) if hooks is not None)
    return all(type(hooks) is Obj and root(hooks) == "collections.OrderedDict" for hooks in dicts)


def _is_polynomial_state(state: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True for a dict of arrays and texts, because numpy.poly1d calls methods of any other value."""
    values = list(state.values()) if type(state) is dict else [state]
    steps.take(Budget.FLOW, len(values))
    return all(type(value) is str or root(value) in expected_calls.ARRAY_RECONSTRUCTORS for value in values)


def _is_generator_state(state: Value, root: RootLookup) -> bool:
    """Return True for (seed, offset, tensor), because torch reads three values without checking their number."""
    if type(state) is not tuple or len(state) != 3 or type(state[0]) is not int:
        return False
    name = root(state[2]) if type(state[2]) is Obj else None
    rebuilt = (name or "").startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_"))
    return type(state[1]) in (int, type(None)) and rebuilt
