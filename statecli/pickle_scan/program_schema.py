"""List each text in a torch.export program with its requirement, which depends on the text's place in the schema.

The schema is torch's own. torch reads only the fields of the schema, each by its place, so the walk follows the schema
instead of the names of keys. A text outside all fields is `TextRequirement.UNKNOWN`: a later torch may write it into
source. A test compares the table with the installed torch, and fails if torch adds a text without a requirement.
Sources: torch/_export/serde/schema.py, torch/_export/serde/serialize.py (`_dict_to_dataclass`) of torch 2.13.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from statecli.pickle_scan.step_budget import Budget, Steps


class TextRequirement(enum.Enum):
    """Requirement that a text in a torch.export program must meet."""

    #: No text at all: a number, a truth value or null.
    NUMBER = enum.auto()
    #: Float; torch writes infinities and NaN as a text.
    FLOAT = enum.auto()
    #: Name of a value, or part of the name of a class, which torch writes into source unchanged.
    IDENTIFIER = enum.auto()
    #: Name in the signature of `forward`, with the stars of `*args`.
    PARAMETER = enum.auto()
    #: Dotted path by which torch assigns a tensor or an object to the module.
    ATTRIBUTE = enum.auto()
    #: Dotted path of a module, called by `torch.export.unflatten`.
    MODULE = enum.auto()
    #: Operator, or function of numbers.
    OPERATOR = enum.auto()
    #: Expression of sizes, given to sympy.
    EXPRESSION = enum.auto()
    #: Symbol of an expression, to whose number torch counts.
    SYMBOL = enum.auto()
    #: Check of inputs, compiled as Python source.
    GUARD = enum.auto()
    #: JSON of nested arguments.
    SPEC = enum.auto()
    #: Class in the JSON of nested arguments, imported by torch.
    CLASS = enum.auto()
    #: JSON that Python cannot read.
    UNREADABLE = enum.auto()
    #: Text without quotes, backslashes and line breaks.
    PLAIN = enum.auto()
    #: Value of an input, written by torch into a guard between quotes.
    INPUT = enum.auto()
    #: Value of an operator: Python source has its `repr`, C++ source has the unchanged text between double quotes.
    VALUE = enum.auto()
    #: Stack trace, written by inductor into a raw string of C++.
    TRACE = enum.auto()
    #: Modules around a node: a key, a path and a class for each.
    MODULES = enum.auto()
    #: Names of the functions that a node comes from, from which inductor builds names of kernels.
    FUNCTIONS = enum.auto()
    #: JSON of the nodes that a node comes from, whose names inductor writes into comments.
    ORIGINS = enum.auto()
    #: JSON of annotations by the author. Only the parts that inductor reads reach source: the number of a stream, and
    #: options of the compiler.
    ANNOTATIONS = enum.auto()
    #: Text under a key that the schema does not have.
    UNKNOWN = enum.auto()


class ListOf(msgspec.Struct, frozen=True):
    """Schema kind of a list. All elements of the list have the kind `item`."""

    item: Kind


class DictOf(msgspec.Struct, frozen=True):
    """Schema kind of a dict with arbitrary keys. All keys must meet the requirement `key`."""

    key: TextRequirement
    value: Kind


#: Kind of a place in the schema; a string is the name of a class of the schema.
Kind = TextRequirement | ListOf | DictOf | str

_NUMBER, _FLOAT, _NAME = TextRequirement.NUMBER, TextRequirement.FLOAT, TextRequirement.IDENTIFIER
_PLAIN, _VALUE, _ATTRIBUTE = TextRequirement.PLAIN, TextRequirement.VALUE, TextRequirement.ATTRIBUTE
_NUMBERS = ListOf(_NUMBER)
_ARGUMENT: dict[str, Kind] = {
    "as_none": _NUMBER,
    "as_tensor": "TensorArgument",
    "as_tensors": ListOf("TensorArgument"),
    "as_int": _NUMBER,
    "as_ints": _NUMBERS,
    "as_float": _FLOAT,
    "as_floats": ListOf(_FLOAT),
    "as_string": _VALUE,
    "as_strings": ListOf(_VALUE),
    "as_sym_int": "SymIntArgument",
    "as_sym_ints": ListOf("SymIntArgument"),
    "as_scalar_type": _NUMBER,
    "as_memory_format": _NUMBER,
    "as_layout": _NUMBER,
    "as_device": "Device",
    "as_bool": _NUMBER,
    "as_bools": _NUMBERS,
    "as_sym_bool": "SymBoolArgument",
    "as_sym_bools": ListOf("SymBoolArgument"),
    "as_graph": "GraphArgument",
    "as_optional_tensors": ListOf("OptionalTensorArgument"),
    "as_custom_obj": "CustomObjArgument",
    "as_operator": TextRequirement.OPERATOR,
    "as_sym_float": "SymFloatArgument",
    "as_sym_floats": ListOf("SymFloatArgument"),
    "as_optional_tensor": "OptionalTensorArgument",
    "as_complex": "ComplexValue",
    "as_nested_tensors": ListOf(ListOf("TensorArgument")),
    "as_int_lists": ListOf(_NUMBERS),
    "as_string_to_argument": DictOf(_VALUE, "Argument"),
    "as_float_lists": ListOf(ListOf(_FLOAT)),
}
#: Class of the schema -> its fields. `InputArgument` is an `Argument` that is the value of an input.
SCHEMA: dict[str, dict[str, Kind]] = {
    "ExportedProgram": {
        "graph_module": "GraphModule",
        "opset_version": DictOf(_NAME, _NUMBER),
        "range_constraints": DictOf(TextRequirement.SYMBOL, "RangeConstraint"),
        "schema_version": "SchemaVersion",
        "verifiers": ListOf(_PLAIN),
        "torch_version": _PLAIN,
        "guards_code": ListOf(TextRequirement.GUARD),
        "dialect": _PLAIN,  # torch 2.4 and older
    },
    "GraphModule": {
        "graph": "Graph",
        "signature": "GraphSignature",
        "module_call_graph": ListOf("ModuleCallEntry"),
        "metadata": "GraphMetadata",
        "treespec_namedtuple_fields": DictOf(_PLAIN, "NamedTupleDef"),
    },
    "GraphMetadata": {"custom": TextRequirement.ANNOTATIONS},
    "NamedTupleDef": {"field_names": ListOf(_NAME)},
    "SchemaVersion": {"major": _NUMBER, "minor": _NUMBER},
    "RangeConstraint": {"min_val": _NUMBER, "max_val": _NUMBER},
    "Graph": {
        "inputs": ListOf("InputArgument"),
        "outputs": ListOf("Argument"),
        "nodes": ListOf("Node"),
        "tensor_values": DictOf(_NAME, "TensorMeta"),
        "sym_int_values": DictOf(_NAME, "SymInt"),
        "sym_bool_values": DictOf(_NAME, "SymBool"),
        "is_single_tensor_return": _NUMBER,
        "custom_obj_values": DictOf(_NAME, "CustomObjArgument"),
        "sym_float_values": DictOf(_NAME, "SymFloat"),
    },
    "Node": {
        "target": TextRequirement.OPERATOR,
        "inputs": ListOf("NamedArgument"),
        "outputs": ListOf("Argument"),
        "metadata": "NodeMetadata",
        "is_hop_single_tensor_return": _NUMBER,
        "name": _NAME,
    },
    "NodeMetadata": {
        "stack_trace": TextRequirement.TRACE,
        "nn_module_stack": TextRequirement.MODULES,
        "source_fn_stack": TextRequirement.FUNCTIONS,
        "torch_fn": TextRequirement.FUNCTIONS,
        "custom": TextRequirement.ANNOTATIONS,
        "from_node": TextRequirement.ORIGINS,
    },
    "NamedArgument": {"name": _NAME, "arg": "Argument", "kind": _NUMBER},
    "Argument": _ARGUMENT,
    "InputArgument": {**_ARGUMENT, "as_string": TextRequirement.INPUT, "as_strings": ListOf(TextRequirement.INPUT)},
    "ConstantValue": {
        "as_none": _NUMBER,
        "as_int": _NUMBER,
        "as_float": _FLOAT,
        "as_string": TextRequirement.INPUT,
        "as_bool": _NUMBER,
    },
    "TensorArgument": {"name": _NAME},
    "TokenArgument": {"name": _NAME},
    "OptionalTensorArgument": {"as_tensor": "TensorArgument", "as_none": _NUMBER},
    "GraphArgument": {"name": _NAME, "graph": "Graph"},
    "CustomObjArgument": {"name": _NAME, "class_fqn": _PLAIN},
    "ComplexValue": {"real": _FLOAT, "imag": _FLOAT},
    "SymIntArgument": {"as_name": _NAME, "as_int": _NUMBER},
    "SymFloatArgument": {"as_name": _NAME, "as_float": _FLOAT},
    "SymBoolArgument": {"as_name": _NAME, "as_bool": _NUMBER},
    "TensorMeta": {
        "dtype": _NUMBER,
        "sizes": ListOf("SymInt"),
        "requires_grad": _NUMBER,
        "device": "Device",
        "strides": ListOf("SymInt"),
        "storage_offset": "SymInt",
        "layout": _NUMBER,
    },
    "Device": {"type": _NAME, "index": _NUMBER},
    "SymInt": {"as_expr": "SymExpr", "as_int": _NUMBER},
    "SymFloat": {"as_expr": "SymExpr", "as_float": _FLOAT},
    "SymBool": {"as_expr": "SymExpr", "as_bool": _NUMBER},
    "SymExpr": {"expr_str": TextRequirement.EXPRESSION, "hint": "SymExprHint"},
    "SymExprHint": {"as_int": _NUMBER, "as_bool": _NUMBER, "as_float": _FLOAT},
    "GraphSignature": {"input_specs": ListOf("InputSpec"), "output_specs": ListOf("OutputSpec")},
    "InputSpec": {
        "user_input": "UserInputSpec",
        "parameter": "InputToParameterSpec",
        "buffer": "InputToBufferSpec",
        "tensor_constant": "InputToTensorConstantSpec",
        "custom_obj": "InputToCustomObjSpec",
        "token": "InputTokenSpec",
        "constant_input": "InputToConstantInputSpec",
    },
    "UserInputSpec": {"arg": "InputArgument"},
    "InputToParameterSpec": {"arg": "TensorArgument", "parameter_name": _ATTRIBUTE},
    "InputToBufferSpec": {"arg": "TensorArgument", "buffer_name": _ATTRIBUTE, "persistent": _NUMBER},
    "InputToTensorConstantSpec": {"arg": "TensorArgument", "tensor_constant_name": _ATTRIBUTE},
    "InputToCustomObjSpec": {"arg": "CustomObjArgument", "custom_obj_name": _ATTRIBUTE},
    "InputTokenSpec": {"arg": "TokenArgument"},
    "InputToConstantInputSpec": {"name": _NAME, "value": "ConstantValue"},
    "OutputSpec": {
        "user_output": "UserOutputSpec",
        "loss_output": "LossOutputSpec",
        "buffer_mutation": "BufferMutationSpec",
        "gradient_to_parameter": "GradientToParameterSpec",
        "gradient_to_user_input": "GradientToUserInputSpec",
        "user_input_mutation": "UserInputMutationSpec",
        "token": "OutputTokenSpec",
        "parameter_mutation": "ParameterMutationSpec",
    },
    "UserOutputSpec": {"arg": "Argument"},
    "LossOutputSpec": {"arg": "TensorArgument"},
    "BufferMutationSpec": {"arg": "TensorArgument", "buffer_name": _ATTRIBUTE},
    "ParameterMutationSpec": {"arg": "TensorArgument", "parameter_name": _ATTRIBUTE},
    "GradientToParameterSpec": {"arg": "TensorArgument", "parameter_name": _ATTRIBUTE},
    "GradientToUserInputSpec": {"arg": "TensorArgument", "user_input_name": _NAME},
    "UserInputMutationSpec": {"arg": "TensorArgument", "user_input_name": _NAME},
    "OutputTokenSpec": {"arg": "TokenArgument"},
    "ModuleCallEntry": {"fqn": TextRequirement.MODULE, "signature": "ModuleCallSignature"},
    "ModuleCallSignature": {
        "inputs": ListOf("InputArgument"),
        "outputs": ListOf("Argument"),
        "in_spec": TextRequirement.SPEC,
        "out_spec": TextRequirement.SPEC,
        "forward_arg_names": ListOf(TextRequirement.PARAMETER),
    },
}


class ProgramValue(NamedTuple):
    """Value in a torch.export program, its kind in the schema, and the key of the field that holds it.

    The author chooses the keys of a `DictOf`, so a value under such a key gets the key of the dict.
    """

    kind: Kind
    value: Any
    key: str = ""

    def list_children(self) -> list[ProgramValue]:
        """Return the values in a dict or list. A value outside the schema has the kind `TextRequirement.UNKNOWN`."""
        kind, value, key = self
        if type(value) is dict and type(kind) is str:
            fields = SCHEMA[kind]
            return [
                ProgramValue(fields.get(name, TextRequirement.UNKNOWN), child, name) for name, child in value.items()
            ]
        if type(value) is dict and isinstance(kind, DictOf):
            return [ProgramValue(kind.value, child, key) for child in value.values()]
        if type(value) is dict:
            return [ProgramValue(TextRequirement.UNKNOWN, child, name) for name, child in value.items()]
        if type(value) is list:
            item = kind.item if isinstance(kind, ListOf) else TextRequirement.UNKNOWN
            return [ProgramValue(item, child, key) for child in value]
        return []

    def may_be(self, *classes: str) -> bool:
        """Return True for a dict if its schema class is one of `classes` or is unknown."""
        if type(self.value) is not dict or isinstance(self.kind, DictOf):
            return False
        return self.kind in classes if type(self.kind) is str else True


def iter_values(document: object, steps: Steps) -> Iterator[ProgramValue]:
    """Yield each value of the program. Raises OutOfSteps."""
    stack = [ProgramValue("ExportedProgram", document)]
    while stack:
        place = stack.pop()
        steps.take(Budget.TEXT)
        yield place
        stack.extend(place.list_children())


class ProgramText(NamedTuple):
    """Text of a program, the requirement on the text, and the key of its field."""

    judgement: TextRequirement
    text: str
    key: str


def iter_texts(document: object, steps: Steps) -> Iterator[ProgramText]:
    """Yield each text of the program, including the keys of its dicts. Raises OutOfSteps."""
    for place in iter_values(document, steps):
        kind, value, key = place
        if type(value) is str:
            yield ProgramText(kind if isinstance(kind, TextRequirement) else TextRequirement.UNKNOWN, value, key)
        elif type(value) is dict and type(kind) is str:
            unknown = [name for name in value if name not in SCHEMA[kind]]
            yield from (ProgramText(TextRequirement.PLAIN, name, key) for name in unknown)
        elif type(value) is dict:
            judgement = kind.key if isinstance(kind, DictOf) else TextRequirement.UNKNOWN
            yield from (ProgramText(judgement, name, key) for name in value)
