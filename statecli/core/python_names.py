"""List the names that a Python file defines, from its syntax tree, without importing the file."""

from __future__ import annotations

import ast
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from statecli.core.class_syntax import find_init, list_ancestors, write_code
from statecli.core.lazy_pattern import compile_on_use

#: Ends of the names of classes that hold settings.
_CONFIGURATION_ENDS = ("Config", "Cfg", "Args")
#: Ends of the names of classes that a function returns, other than models.
_OTHER_ENDS = (*_CONFIGURATION_ENDS, "Tensor", "Dataset", "DataLoader", "Namespace", "Path", "Generator", "Parser")
#: Modules of torch whose classes are not models.
_OTHER_OWNERS = compile_on_use(r"\b(?:optim|lr_scheduler|data)\.")
#: Capitalized names in the annotation of an argument that accepts a literal.
_LITERAL_TYPES = {
    *("Any", "Dict", "Final", "FrozenSet", "Iterable", "List", "Literal", "Mapping", "None", "Number", "Optional"),
    *("Path", "PathLike", "Sequence", "Set", "Tuple", "Union"),
}
#: Examples of objects for base classes that cannot be instantiated.
_EXAMPLES = {
    "AOBaseConfig": "Int8WeightOnlyConfig()",
    "PeftConfig": "LoraConfig()",
    "PreTrainedModel": "transformers.BertModel(BertConfig())",
}
#: Words of an annotation by which an argument takes a class, or a sequence.
CLASS_ANNOTATIONS = {"type", "Type"}
SEQUENCE_ANNOTATIONS = {"list", "List", "Sequence", "Iterable", "tuple", "Tuple"}
#: Names of arguments that take a module, if they have no useful annotation.
_MODULE_NAMES = ("nn", "module", "net", "network", "layer")
#: Largest file that is parsed, in bytes, because a list of numbers of 10 MB takes 40 seconds.
_MAX_SOURCE_BYTES = 1 << 20
#: Errors of reading and parsing a file. Code may be nested too deeply for Python's parser.
_PARSE_ERRORS = (OSError, ValueError, SyntaxError, RecursionError, MemoryError)


class ModelClass(msgspec.Struct, frozen=True):
    """Class of a file that derives from `nn.Module`, and the required arguments of its `__init__`.

    `takes_object`: an argument is an object of a class outside the file, which a command line cannot spell. `call` is
    the code that builds an instance, with `...` for each unknown value: `Net(cfg=Config(size=...))`; `names` are the
    classes of the file in `call`.
    """

    name: str
    required: tuple[str, ...]
    takes_object: bool
    call: str
    names: tuple[str, ...]


class ModelFactory(msgspec.Struct, frozen=True):
    """Public function of a file that needs no arguments and returns a model. `calls`: names called in its body."""

    name: str
    calls: frozenset[str]


def list_model_classes(path: str) -> Iterator[ModelClass]:
    """Yield each class of a file that derives from `nn.Module`."""
    classes = _map_classes(_parse(path))
    for name in _list_module_names(classes):
        required = _list_init_arguments(classes[name], classes)
        writer = _CallWriter(classes)
        call = writer.write_call(name)
        if writer.takes_object:  # the call becomes code of the file, which may not import the package of an example
            writer = _CallWriter(classes, has_examples=False)
            call = writer.write_call(name)
        yield ModelClass(name, tuple(arg.arg for arg in required), writer.takes_object, call, tuple(writer.names))


def list_model_factories(path: str) -> Iterator[ModelFactory]:
    """Yield each public function of a file that needs no arguments and returns a model (`return Net(…)`)."""
    body = _parse(path)
    classes = _map_classes(body)
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    returns = _ReturnedModels(functions, classes, frozenset(_list_module_names(classes)))
    for name in list_factories(path):
        try:
            is_model = returns.has_model(name)
        except RecursionError:  # code with a chain of a thousand variables or functions
            continue
        if is_model:
            calls = (node for node in ast.walk(functions[name]) if isinstance(node, ast.Call))
            yield ModelFactory(name, frozenset(write_code(call.func) for call in calls))


def list_definitions(path: str) -> Iterator[str]:
    """Yield the name of each class and function of a file."""
    yield from (node.name for node in _parse(path) if isinstance(node, (ast.ClassDef, ast.FunctionDef)))


def list_exported(path: str) -> list[str]:
    """Return the names in `__all__` of a file, or [] if the file has no `__all__`."""
    for node in _parse(path):
        if isinstance(node, ast.Assign) and write_code(node.targets[0]) == "__all__":
            return [str(item.value) for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
    return []


def list_functions_that_take(path: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the name of each public function of a file that can be called with exactly these arguments by name."""
    for function in _parse(path):
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
            signature = function.args
            names = {argument.arg for argument in (*signature.args, *signature.kwonlyargs)}
            required = {argument.arg for argument in _list_required_arguments(signature)}
            if required <= set(arguments) and (signature.kwarg is not None or names >= set(arguments)):
                yield function.name


def takes_configuration(name: str, annotation: str) -> bool:
    """Return True if an argument takes a configuration, an object that no command line can spell."""
    return name in ("config", "cfg", "conf", "args", "hparams") or annotation.endswith(_CONFIGURATION_ENDS)


def takes_object(name: str, annotation: str) -> bool:
    """Return True if an argument takes an object that no literal can replace, such as a configuration or a module."""
    words = {word for word in re.findall(r"\w+", annotation) if word[:1].isupper()}
    return takes_configuration(name, annotation) or bool(words - _LITERAL_TYPES)


def write_example(name: str, annotation: str, names: Iterable[str] = ()) -> str | None:
    """Return example code for an argument that takes any module or an object of a known base class, else None.

    `names`: all arguments of the function.
    """
    words = re.findall(r"\w+", annotation)
    if name == "model" and not words and "peft_config" in names:
        return _EXAMPLES["PreTrainedModel"]
    if "Module" in words or (name in _MODULE_NAMES and (words in ([], ["T"]) or "Callable" in words)):
        # peft's configuration fits the layers of models of transformers only.
        if "Module" in words and {*CLASS_ANNOTATIONS, "Callable"}.intersection(words):
            return "torch.nn.Identity"  # Identity accepts any arguments
        example = _EXAMPLES["PreTrainedModel"] if "peft_config" in names else "torch.nn.Linear(2, 3)"
        return f"[{example}]" if SEQUENCE_ANNOTATIONS.intersection(words) else example
    return next((_EXAMPLES[word] for word in words if word in _EXAMPLES), None)


def list_classes(path: str) -> Iterator[str]:
    """Yield the name of each class of a file that has a base class. The base may be a module class of another file."""
    yield from (node.name for node in _parse(path) if isinstance(node, ast.ClassDef) and node.bases)


def list_factories(path: str) -> Iterator[str]:
    """Yield the name of each public function of a file that has no required arguments."""
    functions = (node for node in _parse(path) if isinstance(node, ast.FunctionDef))
    for function in functions:
        if not function.name.startswith("_") and not _list_required_arguments(function.args):
            yield function.name


def find_syntax_error(path: str) -> SyntaxError | None:
    """Return the syntax error of a Python file, or None for a correct or unreadable file."""
    try:
        _parse_file(path)
    except _PARSE_ERRORS as error:
        return error if isinstance(error, SyntaxError) else None
    return None


def _parse(path: str) -> list[ast.stmt]:
    """Return the statements of a file, including statements under `if` and `try`, or [] for invalid Python."""
    try:
        return [*_iter_statements(_parse_file(path))]
    except _PARSE_ERRORS:
        return []


def _parse_file(path: str) -> list[ast.stmt]:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_SOURCE_BYTES:
        raise OSError(f"{path}: is not a regular file, or is too large")
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the file's code, such as an invalid escape
        return ast.parse(file.read()).body


def _iter_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and not re.search("__name__|TYPE_CHECKING", write_code(node.test)):
            yield from _iter_statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _iter_statements(node.body)


def _map_classes(body: Iterable[ast.stmt]) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _list_module_names(classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """Return the classes that derive from a class of torch.nn, or from a class with a name like `...Model`."""
    modules: list[str] = []
    for name, node in classes.items():
        bases = [write_code(base) for base in node.bases]
        if any(base in modules or _is_module(base) for base in bases):
            modules.append(name)
    return modules


def _is_module(base: str) -> bool:
    owner, _, name = base.rpartition(".")
    is_layer = owner in ("nn", "torch.nn") and name not in ("Parameter", "Buffer")
    return is_layer or name.endswith(("Module", "Model"))


class _ReturnedModels(msgspec.Struct, frozen=True):
    """Finder of the functions of a file that return a model, as their `return` statements show."""

    functions: Mapping[str, ast.FunctionDef]
    classes: Mapping[str, ast.ClassDef]
    modules: frozenset[str]

    def has_model(self, name: str, callers: tuple[str, ...] = ()) -> bool:
        function = self.functions[name]
        annotation = write_code(function.returns).strip("'\"") if function.returns is not None else ""
        if annotation in self.modules or _is_module(annotation):
            return True
        values: dict[str, list[ast.expr]] = {}
        for assignment in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
            for target in assignment.targets:
                values.setdefault(write_code(target), []).append(assignment.value)
        returned_values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        return any(self._is_model(value, values, (*callers, name)) for value in returned_values)

    def _is_model(self, value: ast.expr, values: Mapping[str, list[ast.expr]], callers: tuple[str, ...]) -> bool:
        """Return True for `Net(…)`, `Net(…).eval()`, `timm.create_model(…)`, and for variables with such a value."""
        if isinstance(value, ast.Name):
            remaining_values = {name: assigned_values for name, assigned_values in values.items() if name != value.id}
            return any(self._is_model(assigned, remaining_values, callers) for assigned in values.get(value.id, ()))
        if not isinstance(value, ast.Call) or _OTHER_OWNERS.search(write_code(value.func)):
            return False
        callee = value.func
        while isinstance(callee, ast.Attribute):
            if self._names_model(callee.attr, callers):
                return True
            callee = callee.value
        if isinstance(callee, ast.Name) and callee.id not in values:
            return self._names_model(callee.id, callers)
        return self._is_model(callee, values, callers)

    def _names_model(self, name: str, callers: tuple[str, ...]) -> bool:
        if name in self.classes:
            return name in self.modules
        if name in self.functions:
            return name not in callers and self.has_model(name, callers)
        return (name[:1].isupper() and not name.endswith(_OTHER_ENDS)) or "model" in name


def _format_annotation(argument: ast.arg) -> str:
    return write_code(argument.annotation).strip("'\"") if argument.annotation is not None else ""


def _find_class(argument: ast.arg, classes: Mapping[str, ast.ClassDef]) -> str | None:
    """Return the class of the object that a constructor takes as `argument`, or None if it is not in the file.

    The class is the annotation. For an argument such as `cfg`, it is the only class of the file with settings.
    """
    annotation = _format_annotation(argument)
    if annotation or not takes_configuration(argument.arg, annotation):
        words = re.findall(r"\w+", annotation)
        fitting_names = [word for word in words if word in classes]
        if set(words) - {"Optional", "None", "typing"} - SEQUENCE_ANNOTATIONS - CLASS_ANNOTATIONS != set(fitting_names):
            return None
    else:
        fitting_names = [name for name in classes if name.endswith(_CONFIGURATION_ENDS)]
    return fitting_names[0] if len(fitting_names) == 1 else None


class _CallWriter:
    """Writer of the code that calls a class with its required arguments. `names`: classes that the code calls.

    `takes_object`: an argument of the call is an object whose class is not in the file.
    """

    def __init__(self, classes: Mapping[str, ast.ClassDef], *, has_examples: bool = True) -> None:
        self.classes = classes
        self.has_examples = has_examples
        self.names: list[str] = []
        self.takes_object = False

    def write_call(self, name: str, callers: tuple[str, ...] = ()) -> str:
        if name not in self.names:
            self.names.append(name)
        required = _list_init_arguments(self.classes[name], self.classes)
        return f"{name}({', '.join(f'{arg.arg}={self._write_value(arg, (*callers, name))}' for arg in required)})"

    def _write_value(self, argument: ast.arg, callers: tuple[str, ...]) -> str:
        class_name = _find_class(argument, self.classes)
        annotation = _format_annotation(argument)
        words = set(re.findall(r"\w+", annotation))
        if class_name is not None and words & CLASS_ANNOTATIONS:
            return class_name
        if class_name is not None and class_name not in callers:
            call = self.write_call(class_name, callers)
            return f"[{call}]" if words & SEQUENCE_ANNOTATIONS else call
        example = write_example(argument.arg, annotation) if self.has_examples else None
        if example is None and (annotation in self.classes or takes_object(argument.arg, annotation)):
            self.takes_object = True
        return example or "..."


def _list_init_arguments(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.arg]:
    """Return the required arguments of a class, from its `__init__` or dataclass fields, and from its bases."""
    required: list[ast.arg] = []
    for ancestor in list_ancestors(node, classes):
        own_init = find_init(ancestor, {})
        if own_init is not None:
            return [*_list_required_arguments(own_init.args, skip=1), *required]
        if any("dataclass" in write_code(decorator) for decorator in ancestor.decorator_list):
            fields = [part for part in ancestor.body if isinstance(part, ast.AnnAssign) and part.value is None]
            field_arguments = [ast.arg(f.target.id, f.annotation) for f in fields if isinstance(f.target, ast.Name)]
            required = [*(arg for arg in field_arguments if "ClassVar" not in _format_annotation(arg)), *required]
    return required


def _list_required_arguments(arguments: ast.arguments, skip: int = 0) -> list[ast.arg]:
    """Return the arguments without a default, except the first `skip` positional arguments."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[skip : len(positional) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keywords = [argument for argument, default in pairs if not default]
    return [*required, *keywords]
