"""Check the states that an object gets while the pickle is loaded, if its class uses the state unchecked."""

from __future__ import annotations

from collections.abc import Callable

from statecli.pickle_scan import expected_calls, kept_functions, packed_weights, random_states
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Obj, Value


class RestoredStates:
    """Checker of the states of hook handles, modules, random generators and other classes.

    `get_root_name` returns the name of the function or class from whose call an object results.
    """

    def __init__(self, get_root_name: Callable[[Value], str | None], steps: Steps) -> None:
        self._get_root_name, self._steps = get_root_name, steps

    def is_expected(self, name: str, state: Value) -> bool:
        """Return True for a state that picklers write, and for a class that checks its state itself."""
        if name.startswith(expected_calls.RECURRENT_MODULE_PREFIXES) and ".rnn." in name and type(state) is dict:
            layers = state.get("num_layers")
            if not expected_calls.is_layer_count(layers):
                return False
        is_module = kept_functions.is_module_class(name) and not packed_weights.is_convolution(name)
        if is_module and not kept_functions.has_modules(state, self._get_root_name):
            return False
        if name == expected_calls.HOOK_HANDLE_CLASS:
            return self._is_handle_state(state)
        if name == expected_calls.POLYNOMIAL_CLASS:
            return self._is_polynomial_state(state)
        if name in expected_calls.GENERATOR_CLASSES:
            return self._is_generator_state(state)
        if name.startswith(expected_calls.NUMPY_RANDOM_PREFIX):
            return random_states.is_numpy_state(name, state, self._get_root_name)
        if name == "random.Random":
            return random_states.is_python_state(state)
        return not expected_calls.has_unexpected_state(name, state)

    def _is_handle_state(self, state: Value) -> bool:
        """Return True for a valid state of a hook handle: a tuple (dict of hooks, number of the hook, other dicts).

        The next hook of any module gets the next number. After infinity all hooks have the same number, so removing any
        hook removes the last one.
        """
        if type(state) is not tuple or len(state) not in (2, 3) or type(state[1]) is not int:
            return False
        others = state[2] if len(state) == 3 and state[2] is not None else ()
        if type(others) is not tuple or not 0 <= state[1] < expected_calls.MAX_HOOKS:
            return False
        self._steps.take(Budget.FLOW, len(others))
        dicts = (hooks for hooks in (state[0], *others) if hooks is not None)
        return all(type(hooks) is Obj and self._get_root_name(hooks) == "collections.OrderedDict" for hooks in dicts)

    def _is_polynomial_state(self, state: Value) -> bool:
        """Return True for a dict of arrays and texts, because numpy.poly1d calls methods of any other value."""
        values = list(state.values()) if type(state) is dict else [state]
        self._steps.take(Budget.FLOW, len(values))
        return all(
            type(value) is str or self._get_root_name(value) in expected_calls.ARRAY_RECONSTRUCTORS for value in values
        )

    def _is_generator_state(self, state: Value) -> bool:
        """Return True for (seed, offset, tensor), because torch reads three values without checking their number."""
        if type(state) is not tuple or len(state) != 3 or type(state[0]) is not int:
            return False
        name = self._get_root_name(state[2]) if type(state[2]) is Obj else None
        rebuilt = (name or "").startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_"))
        return type(state[1]) in (int, type(None)) and rebuilt
