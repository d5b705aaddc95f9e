"""List the names that a Python file defines, from its syntax tree, without importing the file."""

from __future__ import annotations

import ast
import os
import re
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

#: Ends of the names of classes that hold settings.
_CONFIGURATION_ENDS = ("Config", "Cfg", "Args")
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
#: Methods of a module that return the module.
_SAME_MODULE_METHODS = ("cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "train")
#: Largest file that is parsed, in bytes, because a list of numbers of 10 MB takes 40 seconds.
_MAX_SOURCE_BYTES = 1 << 20
#: Largest number of base classes searched for a class, because odd code could have thousands.
_MAX_ANCESTORS = 50
#: Largest depth of nested calls in a suggested call: `Net(cfg=Config(layer=Layer()))`.
_MAX_DEPTH = 3
#: Errors of reading and parsing a file. Code may be nested too deeply for Python's parser.
_PARSE_ERRORS = (OSError, ValueError, SyntaxError, RecursionError, MemoryError)


class ModelClass(msgspec.Struct, frozen=True):
    """Class of a file that derives from `nn.Module`, and the required arguments of its `__init__`.

    `call` is the code that builds an instance, with `...` for each unknown value: `Net(cfg=Config(size=...))`. It is
    None if an argument is an object of a class outside the file, which a command line cannot spell.
    """

    name: str
    required: tuple[str, ...]
    call: str | None


def list_model_classes(path: str) -> Iterator[ModelClass]:
    """Yield each class of a file that derives from `nn.Module`."""
    classes = _map_classes(_parse(path))
    for name in _list_module_names(classes):
        required = _list_init_arguments(classes[name], classes)
        yield ModelClass(name, tuple(arg.arg for arg in required), _write_call(name, classes))


def list_model_factories(path: str) -> Iterator[str]:
    """Yield the name of each public function of a file that needs no arguments and returns a model."""
    body = _parse(path)
    modules = _list_module_names(_map_classes(body))
    for function in body:
        if isinstance(function, ast.FunctionDef) and _is_factory(function) and _returns_model(function, modules):
            yield function.name


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
    yield from (node.name for node in _parse(path) if isinstance(node, ast.FunctionDef) and _is_factory(node))


def _is_factory(function: ast.FunctionDef) -> bool:
    return not function.name.startswith("_") and not _list_required_arguments(function.args)


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


def _returns_model(function: ast.FunctionDef, modules: Collection[str]) -> bool:
    """Return True if a function returns `Net(…)`, a variable with such a value, or a model as its annotation says."""
    nodes = list(ast.walk(function))
    variables = {
        write_code(target)
        for node in nodes
        if isinstance(node, ast.Assign) and _names_model(_find_callee(node.value), modules)
        for target in node.targets
    }
    returned = [_find_callee(node.value) for node in nodes if isinstance(node, ast.Return) and node.value]
    if any(_names_model(value, modules) or write_code(value) in variables for value in returned):
        return True
    return function.returns is not None and _names_model(function.returns, modules)


def _find_callee(value: ast.expr) -> ast.expr:
    """Return `Net` for `Net(…)` and `Net(…).eval()`, and `model` for `model` and `model.eval()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in _SAME_MODULE_METHODS:
            break
        value = value.func.value
    return value.func if isinstance(value, ast.Call) else value


def _names_model(node: ast.expr, modules: Collection[str]) -> bool:
    name = write_code(node).strip("'\"")
    return name in modules or _is_module(name)


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


def _write_call(name: str, classes: Mapping[str, ast.ClassDef], callers: tuple[str, ...] = ()) -> str | None:
    """Return the code that calls a class with its required arguments, or None if an argument cannot be written."""
    values: list[str] = []
    for argument in _list_init_arguments(classes[name], classes):
        value = _write_value(argument, classes, (*callers, name))
        if value is None:
            return None
        values.append(f"{argument.arg}={value}")
    return f"{name}({', '.join(values)})"


def _write_value(argument: ast.arg, classes: Mapping[str, ast.ClassDef], callers: tuple[str, ...]) -> str | None:
    class_name = _find_class(argument, classes)
    annotation = _format_annotation(argument)
    words = set(re.findall(r"\w+", annotation))
    if class_name is not None and words & CLASS_ANNOTATIONS:
        return class_name
    if class_name is not None and class_name not in callers and len(callers) <= _MAX_DEPTH:
        call = _write_call(class_name, classes, callers)
        return f"[{call}]" if call and words & SEQUENCE_ANNOTATIONS else call
    is_object = annotation in classes or takes_object(argument.arg, annotation)
    return write_example(argument.arg, annotation) or (None if is_object else "...")


def _list_init_arguments(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.arg]:
    """Return the required arguments of a class, from its `__init__` or dataclass fields, and from its bases."""
    required: list[ast.arg] = []
    for ancestor in _list_ancestors(node, classes):
        for part in ancestor.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return [*_list_required_arguments(part.args, skip=1), *required]
        if any("dataclass" in write_code(decorator) for decorator in ancestor.decorator_list):
            fields = [part for part in ancestor.body if isinstance(part, ast.AnnAssign) and part.value is None]
            field_arguments = [ast.arg(f.target.id, f.annotation) for f in fields if isinstance(f.target, ast.Name)]
            required = [*(arg for arg in field_arguments if "ClassVar" not in _format_annotation(arg)), *required]
    return required


def _list_ancestors(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and its base classes in the file, depth first, in the order of the bases."""
    ancestors: dict[str, ast.ClassDef] = {}
    pending = [node]
    while pending and len(ancestors) < _MAX_ANCESTORS:
        ancestor = pending.pop()
        if ancestor.name not in ancestors:
            ancestors[ancestor.name] = ancestor
            bases = map(write_code, reversed(ancestor.bases))
            pending += [classes[base] for base in bases if base in classes]
    return list(ancestors.values())


def _list_required_arguments(arguments: ast.arguments, skip: int = 0) -> list[ast.arg]:
    """Return the arguments without a default, except the first `skip` positional arguments."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[skip : len(positional) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keywords = [argument for argument, default in pairs if not default]
    return [*required, *keywords]


def write_code(node: ast.AST) -> str:
    """Return the source code of a syntax node, or "" if the node is nested too deeply for `ast.unparse`."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""
