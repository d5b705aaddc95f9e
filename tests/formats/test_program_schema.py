"""Each text field of torch's schema of exported programs has a judgement, and texts without a field are reported."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from typing import Any

import pytest

from statecli.pickle_scan import export_expressions, program_schema, program_texts
from statecli.pickle_scan.export_expressions import ProgramCall, UnknownText, find_program_calls
from statecli.pickle_scan.program_schema import SCHEMA, DictOf, Kind, ListOf, TextRequirement
from statecli.pickle_scan.step_budget import Steps

schema = pytest.importorskip("torch._export.serde.schema")
serialize = pytest.importorskip("torch._export.serde.serialize")

#: Class of the table -> class of torch with the same fields, or the dict of texts that torch reads by these keys.
ALIASES = {"InputArgument": "Argument"}
METADATA = {"NodeMetadata": "serialize_metadata", "GraphMetadata": "serialize_graph_module_metadata"}
#: Classes of torch's schema outside of programs. torch looks up a payload by the names in the signature and by the
#: name of its record, and statecli reports compiled models as code.
COMPILED_RECORDS = {"AOTInductorModelPickleData", "ExternKernelNodes", "ExternKernelNode"}
OTHER_RECORDS = {"PayloadConfig", "PayloadMeta", *COMPILED_RECORDS}
TEXTS = frozenset(TextRequirement) - {TextRequirement.NUMBER, TextRequirement.FLOAT}


def list_classes() -> dict[str, type]:
    return {name: value for name, value in vars(schema).items() if dataclasses.is_dataclass(value)}


def differences(annotation: Any, kind: Kind, place: str) -> list[str]:
    """Return the differences between the table and the annotation of a field."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (choice for choice in typing.get_args(annotation) if choice is not type(None))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list and isinstance(kind, ListOf):
        return differences(arguments[0], kind.item, place)
    if origin is dict and isinstance(kind, DictOf):
        return [*differences(arguments[0], kind.key, place), *differences(arguments[1], kind.value, place)]
    if annotation is str:
        is_same = kind in TEXTS
    elif annotation is float:
        is_same = kind is TextRequirement.FLOAT
    elif annotation in (int, bool) or (isinstance(annotation, type) and issubclass(annotation, enum.IntEnum)):
        is_same = kind is TextRequirement.NUMBER
    elif dataclasses.is_dataclass(annotation):
        is_same = isinstance(kind, str) and ALIASES.get(kind, kind) == annotation.__name__
    else:
        is_same = annotation == dict[str, str] and kind in METADATA
    return [] if is_same else [f"{place}: {annotation} and {kind}"]


def test_each_field_of_the_schema_has_a_judgement():
    """The table has the classes and fields of the installed torch, and a judgement for each text."""
    actual_differences = []
    for name, fields in SCHEMA.items():
        if name in METADATA:
            continue
        hints = typing.get_type_hints(list_classes()[ALIASES.get(name, name)], vars(schema), include_extras=True)
        assert hints.keys() - {"_type"} <= fields.keys(), name
        for field, annotation in hints.items():
            if field != "_type":
                actual_differences += differences(annotation, fields[field], f"{name}.{field}")
    assert actual_differences == []


def test_each_class_of_the_schema_is_in_a_program_or_named():
    """The test fails on a class that torch adds to the schema and statecli does not list."""
    assert list_classes().keys() == SCHEMA.keys() - METADATA.keys() - ALIASES.keys() | OTHER_RECORDS
    stack, reached_names = ["ExportedProgram"], set()
    while stack:
        name = stack.pop()
        if name not in reached_names:
            reached_names.add(name)
            stack += [kind for field in SCHEMA[name].values() for kind in _list_names(field)]
    assert reached_names == SCHEMA.keys()


def _list_names(kind: Kind) -> list[str]:
    if isinstance(kind, ListOf):
        return _list_names(kind.item)
    if isinstance(kind, DictOf):
        return _list_names(kind.value)
    return [kind] if isinstance(kind, str) else []


@pytest.mark.parametrize("name", METADATA)
def test_metadata_keys_equal_the_keys_of_torch(name):
    """torch declares the metadata as a dict of texts, and reads the texts by name."""
    source = inspect.getsource(getattr(serialize.GraphModuleSerializer, METADATA[name]))
    assert set(re.findall(r"ret\[\"(\w+)\"\]", source)) == SCHEMA[name].keys()


def test_each_judgement_has_a_check():
    """Nested arguments are checked by their texts, and expressions by `is_plain_expression`."""
    checked = program_texts.CHECKS.keys() | export_expressions.CHECKS.keys()
    assert set(TextRequirement) - checked == {TextRequirement.SPEC, TextRequirement.EXPRESSION}


def _program(**module: Any) -> dict[str, Any]:
    return {"graph_module": module}


def _node(**fields: Any) -> dict[str, Any]:
    return _program(graph={"nodes": [{"target": "torch.ops.aten.cos.default", **fields}]})


def _text(text: str) -> dict[str, Any]:
    return _node(inputs=[{"name": "msg", "arg": {"as_string": text}, "kind": 1}])


def _stack(*paths: str) -> dict[str, Any]:
    return _node(metadata={"nn_module_stack": ";".join(f"k{n},{path},a.B" for n, path in enumerate(paths))})


def _call(fqn: str) -> dict[str, Any]:
    return _program(module_call_graph=[{"fqn": fqn, "signature": None}])


def _tensors(*names: str) -> dict[str, Any]:
    return {
        "input_specs": [{"buffer": {"arg": {"name": f"b{n}"}, "buffer_name": name}} for n, name in enumerate(names)]
    }


LONG = ".".join(["a"] * 120)
HONEST_PROGRAMS = {
    "a message": _text("Runtime assertion failed for expression u0 >= 0 on node 'ge'\t(a)"),
    "a text in another script": _text("\ufb01"),
    "modules": _stack("", "L['self'].layers[0]", "d.it-s", "d.b c@1", "layers.0@12"),
    "a call": _call("layers.0.lin@1"),
    "the guards of a program that was exported again": _call("_guards_fn"),
    "a class in a function": _node(metadata={"source_fn_stack": "lin_1,__main__.make.<locals>.Lin;a,torch.add"}),
    "a function": _node(metadata={"torch_fn": "__get___1;method-wrapper.__get__"}),
    "origins": _node(metadata={"from_node": '[{"name": "a", "target": "<function f at 0x7f>", "graph_id": 1}]'}),
    "origins in another script": _node(metadata={"from_node": '[{"name": "\\u00e9"}]'}),
    "a note": _node(metadata={"custom": '{"note": "it\'s \\"x\\"", "stage": 0}'}),
    "a message in quotes": _text("'a' is not '', 'b'"),
    "a trace": _node(metadata={"stack_trace": 'File "a.py", line 3, in forward\n    torch._check(u > 0, "(small)")\n'}),
    "a trace with empty texts": _node(metadata={"stack_trace": "f(\"\", '', \"'\", '\"')\n"}),
    "an infinity": _node(inputs=[{"name": "a", "arg": {"as_float": "-Infinity"}, "kind": 1}]),
    "tensors": _program(signature=_tensors("a.p", "a@1.p", "b.p.q", "a.parametrizations.p.original0")),
    "an operator that looks like an attribute": _node(target="torch.ops.aten.__and__.Tensor"),
}


@pytest.mark.parametrize("name", HONEST_PROGRAMS)
def test_texts_that_torch_writes_are_clean(name):
    """Each text is, or could be, in a program of torch."""
    assert list(find_program_calls(HONEST_PROGRAMS[name], Steps())) == []


HOSTILE_PROGRAMS = {
    "a message that ends its text": (_text('a"), 0)); system("id'), "as source code"),
    "a message with an escape": (_text("a\\"), "as source code"),
    "a message that ends a text of three quotes": (_text("a''' + str(f()) + r'''"), "as source code"),
    "a message of two lines": (_text("a\nb"), "as source code"),
    "a message with a trigraph": (_text("a??/"), "as source code"),
    "a key of a message": (
        _node(inputs=[{"name": "", "arg": {"as_string_to_argument": {'a"': {"as_int": 1}}}}]),
        "as source code",
    ),
    "an item of a list": (_node(inputs=[{"name": "", "arg": {"as_strings": ["a", 'b"']}}]), "as source code"),
    "a module that is a method": (_stack("a", "a.__setstate__@1"), "'__setstate__' of a module"),
    "a call that is a method": (_call("a.register_hook.__builtins__@1.get"), "'__builtins__' of a module"),
    "a call of the module's own": (_call("recompile@1"), "'recompile' of a module"),
    "a method below a number": (_call("a@1.b@x"), "stands in place of a name"),
    "a module without a class": (_node(metadata={"nn_module_stack": "a,b"}), "stands in place of a name"),
    "a module that is a tensor": (
        _program(signature=_tensors("a.w"), module_call_graph=[{"fqn": "a@1.w.tofile"}]),
        "'a@1.w.tofile' of an object",
    ),
    "a tensor of another call": (_program(signature=_tensors("a.p", "a@1.p.foo")), "'a@1.p.foo' of an object"),
    "a tensor below long names": (_program(signature=_tensors(f"{LONG}.p", f"{LONG}.p.foo")), "of an object"),
    "a tensor that is a method of a call": (_program(signature=_tensors("a.forward@1")), "replaces the attribute"),
    "a trace that leaves its string": (
        _node(metadata={"stack_trace": '\n)"); system("id"); (void)(R"('}),
        "as source code",
    ),
    "a trace that leaves its string for another": (
        _node(metadata={"stack_trace": '\n)"); system("id"); f(R"abc('}),
        "as source code",
    ),
    "a trace with the longest mark of a string": (
        _node(metadata={"stack_trace": '\n)"); system("id"); f(R"0123456789\u00a0?"[=b('}),
        "as source code",
    ),
    "a trace that ends a text of three double quotes": (
        _node(metadata={"stack_trace": 'a = """ + str(f()) + r"""\n'}),
        "as source code",
    ),
    "a trace that ends a text of three single quotes": (
        _node(metadata={"stack_trace": "f('''a''')"}),
        "as source code",
    ),
    "a version of many marks": ({"torch_version": "a" + "\u0315\u0300" * 100_000}, "stands in place of a name"),
    "a module of many marks": (_call("a" + "\u0315\u0300" * 100_000), "stands in place of a name"),
    "a trace with a carriage return": (_node(metadata={"stack_trace": "a\rb"}), "as source code"),
    "a function with a bracket": (_node(metadata={"source_fn_stack": "a,f(){}"}), "as source code"),
    "an origin that ends a text of three quotes": (_node(metadata={"from_node": "[\"a'''\"]"}), "as source code"),
    "a module that ends a text of three quotes": (_stack("L['''a''']"), "stands in place of a name"),
    "an origin of two lines": (_node(metadata={"from_node": '[{"name": "a\\nb"}]'}), "as source code"),
    "an origin in no JSON": (_node(metadata={"from_node": "[\\"}), "as source code"),
    "options of the compiler": (
        _node(metadata={"custom": '{"compile_with_inductor": {"\\u0069nductor_configs": {"cpp.cxx": 1}}}'}),
        "compiler options",
    ),
    "a stream that is source": (_node(metadata={"custom": '[{"stream": "0) or f(("}]'}), "as source code"),
    "a text for a number": (
        _node(inputs=[{"name": "a", "arg": {"as_scalar_type": "x"}}]),
        ("stands in place of a number"),
    ),
    "a text for a float": (_node(inputs=[{"name": "a", "arg": {"as_float": "nan()"}}]), "stands in place of a number"),
    "an attribute of an operator on graphs": (_node(target="torch.ops.higher_order.cond.dispatch"), "is an attribute"),
    "the name of a namespace": (_node(target="torch.ops.prim.name.x"), "is an attribute of a namespace"),
    "an operator without an overload": (_node(target="torch.ops.aten.zeros"), "has no overload"),
}


@pytest.mark.parametrize("name", HOSTILE_PROGRAMS)
def test_texts_that_become_source_are_found(name):
    """Each text became source or a call in torch 2.13, or resembles a text that did."""
    document, reason = HOSTILE_PROGRAMS[name]
    program_calls = list(find_program_calls(document, Steps()))
    assert any(isinstance(call, ProgramCall) and reason in (call.why or "") for call in program_calls), program_calls


@pytest.mark.parametrize(
    ("document", "key"),
    [
        ({"language": "a"}, "language"),
        (_node(metadata={"note": "a"}), "note"),
        (_node(outputs=[{"as_new": [{"a": 1}]}]), "as_new"),
        (_node(outputs="a"), "outputs"),
        ({"graph_module": "a"}, "graph_module"),
        (_program(graph={"tensor_values": ["a"]}), "tensor_values"),
        (_node(name={"a": 1}), "name"),
    ],
)
def test_a_text_under_an_unknown_key_is_reported(document, key):
    """torch ignores the text, and a later torch may write the text into source."""
    assert [call for call in find_program_calls(document, Steps()) if isinstance(call, UnknownText)] == [
        UnknownText(key, "a")
    ]


def test_each_text_is_listed_with_its_key():
    """Keys of a dict have the judgement of the dict's keys."""
    texts = program_schema.iter_texts({"opset_version": {"aten": 10}, "torch_version": "2.13"}, Steps())
    assert {tuple(text) for text in texts} == {
        (TextRequirement.IDENTIFIER, "aten", "opset_version"),
        (TextRequirement.PLAIN, "2.13", "torch_version"),
    }
