"""Check operator arguments in a torch.export program, because torch's kernels use some arguments unchecked.

The sizes are stated by the graph for its values (`tensor_values`). For weights the reader of the format compares the
sizes with the tensors in the file; for other values the graph is believed. Sources: torch/_export/serde/schema.py,
aten/src/ATen/native (RNN.cpp, Normalization.cpp, WeightNorm.cpp, EmbeddingBag.cpp, SpectralOps.cpp) of torch 2.13.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import script_enumerations
from statecli.pickle_scan.export_numbers import ARITHMETIC, Misuse, find_huge_numbers
from statecli.pickle_scan.module_attributes import find_module_attribute
from statecli.pickle_scan.program_schema import DictOf, ListOf, ProgramValue, iter_values
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.storage.json_object import get_field

_Sizes = tuple[int | None, ...]
#: Number of gates of a recurrent cell: rows of its weights for each element of its hidden state.
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_MAX_NUMBER = 2**31
_ATEN = "torch.ops.aten."
_FACTORIES = ("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty")


class _Node(msgspec.Struct, frozen=True):
    """Call of an operator in a graph, with the sizes that the graph states for tensors."""

    arguments: Mapping[str, Any]
    results: list[str | None]
    sizes: Mapping[str, _Sizes]
    user_inputs: frozenset[str]

    def get_name(self, argument: str) -> str | None:
        return _get_name(self.arguments.get(argument), "as_tensor")

    def get_sizes(self, argument: str) -> _Sizes | None:
        return self.sizes.get(self.get_name(argument) or "")

    def list_sizes(self, argument: str) -> list[_Sizes | None]:
        tensors = get_field(self.arguments, argument, "as_tensors")
        names = [child.get("name") for child in tensors if type(child) is dict] if type(tensors) is list else []
        return [self.sizes.get(name) if type(name) is str else None for name in names]

    def get_number(self, argument: str) -> int | None:
        number = get_field(self.arguments, argument, "as_int")
        return number if type(number) is int else None

    def is_true(self, argument: str) -> bool:
        return get_field(self.arguments, argument, "as_bool") is True


def find_misuses(document: object, steps: Steps) -> Iterator[Misuse]:
    """Yield the operator calls of a program whose arguments are unsafe and not checked by torch. Raises OutOfSteps."""
    yield from _check_other_objects(document, steps)
    if why := _find_wrong_type(document, steps):
        yield Misuse("torch.export.load", why)
    specs = get_field(document, "graph_module", "signature", "input_specs")
    user_arguments = [get_field(input_spec, "user_input", "arg") for input_spec in specs] if type(specs) is list else []
    user_inputs = frozenset(filter(None, (_get_name(argument, "as_tensor") for argument in user_arguments)))
    main = get_field(document, "graph_module", "graph")
    for place in iter_values(document, steps):
        graph = place.value
        if not place.may_be("Graph") or type(graph.get("nodes")) is not list:
            continue
        yield from find_huge_numbers(graph, graph is not main, steps)
        given_objects = _list_given_objects(graph)
        tensor_values = graph.get("tensor_values")
        sizes = {name: _read_sizes(meta) for name, meta in tensor_values.items()} if type(tensor_values) is dict else {}
        for node in graph["nodes"]:
            steps.take(Budget.TEXT)
            target = node.get("target") if type(node) is dict else None
            if type(target) is not str:
                continue
            inputs = node.get("inputs")
            entries = [entry for entry in inputs if type(entry) is dict] if type(inputs) is list else []
            if why := _explain_unexpected_object(target, inputs, given_objects, steps):
                yield Misuse(target, why)
            for check in (_check_callees, _check_messages, _check_enumerations):
                yield from (Misuse(target, why) for why in check(target, entries))
            name = target.removeprefix(_ATEN).partition(".")[0]
            if target.startswith(_ATEN) and name in _CHECKS:
                outputs = node.get("outputs")
                results = [_get_name(output, "as_tensor") for output in outputs] if type(outputs) is list else []
                arguments = {entry["name"]: entry.get("arg") for entry in entries if type(entry.get("name")) is str}
                if why := _CHECKS[name](_Node(arguments, results, sizes, user_inputs)):
                    yield Misuse(target, f"{why}; the call may read or overwrite memory outside the tensors")


#: Kinds of arguments that are not numbers. Python functions format and evaluate texts; operators of torch check their
#: types.
_TEXT_AND_OBJECT_FIELDS = frozenset(
    ["as_string", "as_strings", "as_string_to_argument", "as_operator", "as_custom_obj", "as_graph"]
)


def _explain_unexpected_object(target: str, inputs: object, given_objects: frozenset[str], steps: Steps) -> str | None:
    """Return the problem of an operator with arguments that torch never writes; None for usual arguments.

    If an object is not a value of the graph, torch takes the object from the constants of the file. torch writes its
    `repr`, possibly any text, into the source of `forward`. An operator that another operator calls gets unchecked
    arguments.
    """
    stack = [ProgramValue(ListOf("NamedArgument"), inputs)]
    while stack:
        place = stack.pop()
        steps.take(Budget.TEXT)
        if place.kind != "Graph":  # `find_misuses` checks this graph by itself
            stack.extend(place.list_children())
        if not place.may_be("Argument"):
            continue
        value = place.value
        if target.startswith(ARITHMETIC) and not _TEXT_AND_OBJECT_FIELDS.isdisjoint(value):
            return "gets a string or an object from the file instead of a number, and may evaluate this value as code"
        if "as_custom_obj" in value and target.startswith(_CALLER_PREFIX) and target not in _TAKERS_OF_OBJECTS:
            return "gets an object from the file instead of a graph, and calls this object"
        if "as_custom_obj" in value and _get_name(value, "as_custom_obj") not in given_objects:
            return (
                "gets an object from the file that is not an input of the graph; torch compiles the object's repr() "
                "as code"
            )
        operator = value.get("as_operator")
        if type(operator) is str and not _is_custom_operator(operator):
            return f"calls {operator} with arguments that statecli cannot check"
    return None


#: Prefix of operators that call their arguments. The operators in the set pass an object only to a method or an
#: operator of the object.
_CALLER_PREFIX = "torch.ops.higher_order."
_TAKERS_OF_OBJECTS = frozenset(
    f"{_CALLER_PREFIX}{name}"
    for name in ("call_torchbind", "with_effects", "auto_functionalized", "auto_functionalized_v2")
)
#: Positions of the graphs that an operator calls.
_GRAPH_PLACES = {
    "wrap_with_set_grad_enabled": (1,),
    "wrap_with_autocast": (4,),
    "cond": (1, 2),
    **dict.fromkeys(("while_loop", "while_loop_stack_output"), (0, 1)),
    **dict.fromkeys(("associative_scan", "hints_wrapper", "invoke_subgraph", "local_map_hop", "map", "map_impl"), (0,)),
    **dict.fromkeys(("scan", "strict_mode", "tag_activation_checkpoint", "wrap_activation_checkpoint"), (0,)),
}
#: Kinds of arguments with texts; and positions of the text that torch writes for an operator: a device type, a name.
_TEXT_FIELDS = frozenset(["as_string", "as_strings", "as_string_to_argument"])
_TEXT_PLACES = {"wrap_with_autocast": 0, "invoke_subgraph": 1}
#: Positions of the operator that another operator calls.
_OPERATOR_PLACES = {
    **dict.fromkeys(("auto_functionalized", "auto_functionalized_v2", "out_dtype", "run_and_save_rng_state"), 0),
    **dict.fromkeys(("graphsafe_run_with_rng_state",), 0),
    **dict.fromkeys(("run_with_rng_state", "with_effects"), 1),
}
#: Operators of activation checkpoints: torch calls the functions among their arguments, such as `context_fn`.
_CHECKPOINT_OPERATORS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_DETERMINISM_CHECKS = ({"as_string": "default"}, {"as_string": "none"})
#: Operators on graphs -> keyword arguments that torch writes.
_KEYWORDS = {"hints_wrapper": ("hints",)}
#: Names with another meaning in the source of a graph. torch gives none of them to a value.
TAKEN_NAMES = frozenset(
    [
        *keyword.kwlist,
        "self",
        "torch",
        "device",
        "inf",
        "nan",
        "NoneType",
        "getattr",
        "math_trunc",
        "fx_pytree",
        "pytree",
        "_operator",
        "operator",
    ]
)
#: Keys of numbers. torch does not check their types, and sympy evaluates a text.
_NUMBER_FIELDS = frozenset(["as_int", "as_ints", "as_int_lists", "as_bool", "as_bools"])


def _check_callees(target: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the problems of an operator that calls its arguments. These arguments must be graphs or operators."""
    if not target.startswith(_CALLER_PREFIX):
        return
    name = target.removeprefix(_CALLER_PREFIX)
    if any(entry.get("name") and _is_positional(entry) for entry in entries):
        yield (
            "gets a positional argument that has a name; torch never writes this, so statecli cannot check the "
            "arguments"
        )
    positional = [entry.get("arg") for entry in entries if _is_positional(entry)]
    for place in _GRAPH_PLACES.get(name, ()):
        if not _is_kind(positional[place : place + 1], "as_graph"):
            yield "calls a value that is not a graph of the program"
    callee = _OPERATOR_PLACES.get(name)
    if callee is not None and not _is_kind(positional[callee : callee + 1], "as_operator"):
        yield "calls a value that is not an operator"
    for place, value in enumerate(positional if name in _GRAPH_PLACES else ()):
        is_text = type(value) is dict and not _TEXT_FIELDS.isdisjoint(value)
        if is_text and _TEXT_PLACES.get(name) != place:
            yield "gets a string as an input of its graph, and the graph can compute source code from the string"
    if any(_is_kind([value], "as_operator") for place, value in enumerate(positional) if place != callee):
        yield "gets an operator as an argument in a place where torch never writes an operator"
    for entry in entries:
        if not _is_positional(entry) and not _is_keyword(name, entry):
            yield f"gets the keyword argument {entry.get('name')}, which torch never writes for this operator"


#: Operators with a message that inductor writes into source.
_ASSERTION = compile_on_use(r"torch\.ops\.aten\._(?:functional_)?assert_(?:async|scalar)\.\w+")


def _check_messages(target: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the problem of an assertion whose message the graph computes: the message must be a constant text."""
    for place, entry in enumerate(entries if _ASSERTION.fullmatch(target) else ()):
        is_message = entry.get("name") == "assert_msg" or (place == 1 and not entry.get("name"))
        if is_message and not _is_kind([entry.get("arg")], "as_string"):
            yield (
                "has a message that is not a constant string; torch's compiler writes the message into source code "
                "that it runs"
            )


def _check_enumerations(target: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the problem of an operator that gets an invalid number for a dtype, a layout or a memory format.

    torch writes these arguments under keys of their own. A number computed by the graph is unknown.
    """
    operator = target.removeprefix("torch.ops.").split(".")
    places = script_enumerations.POSITIONS.get(operator[1], {}) if len(operator) > 1 else {}
    for place, entry in enumerate(entries):
        name = str(entry.get("name")).removeprefix("out_").removeprefix("output_")
        kind = name if name in script_enumerations.SIZES else places.get(place)
        value = entry.get("arg")
        if kind is None or type(value) is not dict:
            continue
        number = value.get("as_int")
        is_out_of_range = type(number) is int and not 0 <= number < script_enumerations.SIZES[kind]
        if is_out_of_range or "as_sym_int" in value:
            yield script_enumerations.HARM
            return


def _is_positional(entry: Mapping[str, Any]) -> bool:
    """Return True for an argument that torch passes by position, even if the argument has a name."""
    return entry.get("kind") == 1 or entry.get("name") == ""


def _is_keyword(operator: str, entry: Mapping[str, Any]) -> bool:
    """Return True if torch writes this argument of the operator by name."""
    name, value = entry.get("name"), entry.get("arg")
    if operator in _OPERATOR_PLACES:
        return not _is_kind([value], "as_operator") and not _is_kind([value], "as_graph")
    if operator in _CHECKPOINT_OPERATORS and name == "determinism_check":
        return value in _DETERMINISM_CHECKS
    if operator in _CHECKPOINT_OPERATORS:
        return type(value) is dict and not value.keys() - {"as_bool", "as_int", "as_float", "as_none"}
    return name in _KEYWORDS.get(operator, ())


def _is_kind(values: Sequence[Any], kind: str) -> bool:
    return len(values) == 1 and type(values[0]) is dict and kind in values[0]


def _find_wrong_type(document: object, steps: Steps) -> str | None:
    """Return the first problem in a program: a text or object in place of a number, or a reserved name."""
    for place in iter_values(document, steps):
        value = place.value
        if (
            type(value) is not list
            and place.key in _NUMBER_FIELDS
            and type(value) not in (int, bool, float, type(None))
        ):
            return "finds a string or an object in the file instead of a number, and may evaluate this value as code"
        if type(value) is not dict or isinstance(place.kind, DictOf):
            continue
        graph_name = _get_name(value, "as_graph")
        if graph_name is not None and find_module_attribute(graph_name):
            return (
                f"finds a graph named {graph_name}, which is also the name of a module method; the compiled code may "
                "call this method instead of the graph"
            )
        # An argument of a node has the name of a parameter, which may be `self`.
        for name in (value.get("name") if place.kind != "NamedArgument" else None, value.get("as_name")):
            if type(name) is str and name in TAKEN_NAMES:
                return f"finds a value named {name}, which changes the meaning of {name} in the compiled code"
    return None


def _check_other_objects(document: object, steps: Steps) -> Iterator[Misuse]:
    """Yield a misuse if a signature or output has an object stored in the file: torch compiles its repr() as code.

    An object is allowed if the surrounding graph (outside of graphs: the main graph) has an input of the same name.
    The inputs of a graph and the arguments of a node are skipped: the former define the names, `find_misuses` checks
    the latter. A graph among the arguments is checked too. A dict of arguments has free keys, which are not fields.
    """
    main = get_field(document, "graph_module", "graph")
    given_objects = _list_given_objects(main) if type(main) is dict else frozenset()
    stack: list[tuple[ProgramValue, frozenset[str] | None]] = [
        (ProgramValue("ExportedProgram", document), given_objects)
    ]
    while stack:
        place, names = stack.pop()
        kind, value, _ = place
        steps.take(Budget.TEXT)
        may_be_object = place.may_be("Argument", "InputArgument") and "as_custom_obj" in value
        if names is not None and may_be_object and _get_name(value, "as_custom_obj") not in names:
            yield Misuse("torch.export.unflatten", "compiles the repr() of an object from the file as code")
            return
        if kind == "Graph" and type(value) is dict:
            names = _list_given_objects(value)
        is_call = kind in ("Graph", "Node")
        for child in place.list_children():
            stack.append((child, None if is_call and child.key == "inputs" else names))


def _is_custom_operator(name: str) -> bool:
    """Return True for an operator outside of `aten` and `higher_order`. Other operators may take it as an argument."""
    return name.startswith("torch.ops.") and not name.startswith(("torch.ops.aten.", "torch.ops.higher_order."))


def _list_given_objects(graph: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the custom objects among a graph's inputs."""
    inputs = graph.get("inputs")
    names = (_get_name(value, "as_custom_obj") for value in inputs) if type(inputs) is list else ()
    return frozenset(name for name in names if name is not None)


def _get_name(value: object, kind: str) -> str | None:
    """Return the name in an argument of the given kind, such as `as_tensor`; None for an argument of another kind."""
    name = get_field(value, kind, "name")
    return name if type(name) is str else None


def _read_sizes(meta: object) -> _Sizes:
    """Return the sizes of a tensor from its metadata in the graph, with None for each symbolic size."""
    sizes = get_field(meta, "sizes")
    numbers = [get_field(size, "as_int") for size in sizes] if type(sizes) is list else []
    return tuple(number if type(number) is int else None for number in numbers)


def _check_recurrent(gates: int) -> Callable[[_Node], str | None]:
    def check(node: _Node) -> str | None:
        weights, width = node.list_sizes("params"), node.get_sizes("input")
        states = node.list_sizes("hx") or [node.get_sizes("hx")]
        if not weights or None in weights or not width or None in states or not all(states):
            return "has weights whose sizes the graph does not declare, so statecli cannot check the sizes"
        hidden, projected = states[-1][-1], states[0][-1]  # type: ignore[index]  # no size is None
        count = (4 if node.is_true("has_biases") else 2) + (len(states) == 2 and hidden != projected)
        directions = 2 if node.is_true("bidirectional") else 1
        layers = [weights[at : at + count] for at in range(0, len(weights), count)]
        if len(layers) != directions * (node.get_number("num_layers") or 0):
            return f"has {len(weights)} weights in all, which does not match its number of layers"
        for number, layer in enumerate(layers):
            columns = width[-1] if number < directions else _multiply(projected, directions)
            expected = [(_multiply(hidden, gates), columns), (_multiply(hidden, gates), projected)]
            expected += [(_multiply(hidden, gates),)] * 2 if node.is_true("has_biases") else []  # type: ignore[list-item]
            expected += [(projected, hidden)] if len(layer) > len(expected) else []
            if not all(
                _have_sizes(sizes, expected_sizes) for sizes, expected_sizes in zip(layer, expected, strict=True)
            ):
                return f"has weights that do not fit its hidden size of {hidden}"
        return None

    return check


def _multiply(size: int | None, factor: int) -> int | None:
    return None if size is None else size * factor


def _have_sizes(sizes: _Sizes | None, expected: _Sizes) -> bool:
    return (
        sizes is not None
        and len(sizes) == len(expected)
        and all(None in pair or pair[0] == pair[1] for pair in zip(sizes, expected, strict=True))
    )


def _check_batch_norm(node: _Node) -> str | None:
    features = node.get_sizes("input")
    if not features or len(features) < 2:
        return "normalizes a tensor whose sizes the graph does not declare, so statecli cannot check the sizes"
    for argument in ("weight", "bias", "running_mean", "running_var"):
        if node.get_name(argument) and not _have_sizes(node.get_sizes(argument), (features[1],)):
            return f"has a {argument} whose size is not {features[1]}, the number of channels of its input"
    return None


def _check_weight_norm(node: _Node) -> str | None:
    direction, length = node.get_sizes("v"), node.get_sizes("g")
    dim = node.get_number("dim") or 0
    if direction and length and dim in (0, len(direction) - 1) and 0 not in direction:
        expected = tuple(size if at == dim else 1 for at, size in enumerate(direction))
        if _have_sizes(length, expected):
            return None
    return "has a norm whose size does not fit its weight"


def _check_embedding_bag(node: _Node) -> str | None:
    if node.get_name("offsets") not in node.user_inputs:
        return "takes offsets that the program computes or stores, and torch does not check these offsets"
    return None


def _check_factory(node: _Node) -> str | None:
    """Check that a new tensor has the sizes that the graph states for it."""
    value = node.arguments.get("size")
    created_sizes = value.get("as_ints", value.get("as_sym_ints")) if type(value) is dict else None
    declared_sizes = node.sizes.get(node.results[0] or "") if node.results else None
    if type(created_sizes) is not list or declared_sizes is None:
        return None
    sizes = tuple(size.get("as_int") if type(size) is dict else size for size in created_sizes)
    if _have_sizes(declared_sizes, sizes):
        return None
    return "creates a tensor with other sizes than the graph declares"


def _check_fourier(node: _Node) -> str | None:
    sizes, dims = node.get_sizes("self"), get_field(node.arguments, "dim", "as_ints")
    if type(dims) is list and sizes and all(type(dim) is int and 0 <= dim < len(sizes) for dim in dims):
        return None
    return "computes a Fourier transform over dimensions that its input does not have"


def _check_group_norm(node: _Node) -> str | None:
    numbers = [node.get_number(name) for name in ("N", "C", "HxW", "group")]
    if all(number is None or 0 <= number < _MAX_NUMBER for number in numbers) and numbers[-1]:
        return None
    return "has a number of groups or a size that is not valid and that torch does not check"


#: Operators of `aten` -> function that returns why torch does not write their arguments; None if torch does.
_CHECKS: dict[str, Callable[[_Node], str | None]] = {
    **{name: _check_recurrent(gates) for name, gates in _GATES.items()},
    "_native_batch_norm_legit": _check_batch_norm,
    "_native_batch_norm_legit_functional": _check_batch_norm,
    "_native_batch_norm_legit_no_training": _check_batch_norm,
    "_weight_norm": _check_weight_norm,
    "_embedding_bag": _check_embedding_bag,
    "_embedding_bag_forward_only": _check_embedding_bag,
    "_fft_c2c": _check_fourier,
    "_fft_r2c": _check_fourier,
    "_fft_c2r": _check_fourier,
    "native_group_norm": _check_group_norm,
    **dict.fromkeys(_FACTORIES, _check_factory),
}
