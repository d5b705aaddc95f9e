"""Write Python code that builds a model class, and list the integer arguments that may explain shape differences."""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator
from keyword import iskeyword
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.commands.explain.recipe import ModelCode
from statecli.commands.explain.renaming import format_text
from statecli.live import configured_model, model_registries
from statecli.live.config_document import Library, find_config_file, read_document
from statecli.live.configuration_argument import describe_configuration
from statecli.live.import_model import LoadedObject, find_import_folder, load_with_module
from statecli.live.object_scope import Scope
from statecli.live.spec import ModelSpec, split_class_options
from statecli.live.spec_objects import ObjectCall, ObjectName, format_call, map_items
from statecli.storage import files
from statecli.storage.checkpoint_folder import CONFIG, MODULES


def build_model_code(spec: ModelSpec, loaded_object: LoadedObject | None = None) -> ModelCode:
    """Return the lines that import the class and its arguments, and the expression that builds the model.

    `loaded_object`: the object of the spec, if it was imported before.
    """
    if spec.config is not None:
        return _build_configured_code(spec)
    loaded_object = loaded_object or load_with_module(spec)
    is_instance = (
        not spec.called
        and not isinstance(loaded_object.value, type)
        and hasattr(loaded_object.value, "load_state_dict")
    )
    if not spec.is_file and model_registries.find_builder(spec, loaded_object.module) is not None:
        module, function = model_registries.format_builder(spec)
        return ModelCode((f"import {module}",), f"{function}({format_call((spec.attribute, *spec.args), spec.kwargs)})")
    names = _Names(spec, loaded_object)
    names.add(loaded_object.module, spec.attribute)
    scope, lines = Scope.around(spec, loaded_object.module, loaded_object.value), list[str]()
    args = tuple(names.add_objects(scope, value) for value in spec.args)
    kwargs = {name: names.add_objects(scope, value) for name, value in spec.kwargs.items()}
    if spec.options.config_json is not None:
        argument, value = _add_configuration(spec, loaded_object, names, lines)
        kwargs[argument] = value
    expression = spec.attribute if is_instance else f"{spec.attribute}({format_call(args, kwargs)})"
    return ModelCode(tuple(names.format_imports()), expression, tuple(lines), names.doubt)


class _Names:
    """The names that the printed code imports, grouped by module."""

    def __init__(self, spec: ModelSpec, loaded_object: LoadedObject) -> None:
        self._spec, self._own_module = spec, loaded_object.module
        self._imported: dict[str, dict[str, None]] = {}
        self._packages: dict[str, None] = {}
        self.doubt = ""

    def add(self, module: types.ModuleType, dotted: str) -> None:
        """Add a name of the module to the imports; for `Outer.Inner`, add `Outer`."""
        self._imported.setdefault(module.__name__, {})[dotted.partition(".")[0]] = None

    def add_objects(self, scope: Scope, value: object) -> Any:
        """Add the names in an argument to the imports. Return the argument as Python code."""
        if isinstance(value, ObjectName):
            return self._add_object(scope, value)
        if isinstance(value, ObjectCall):
            inner = scope.enter(scope.find(value.callee))
            call = map_items(value, lambda item: self.add_objects(inner, item))
            return ObjectCall(self._add_object(scope, value.callee).name, call.args, call.kwargs)
        return map_items(value, lambda item: self.add_objects(scope, item))

    def _add_object(self, scope: Scope, named: ObjectName) -> ObjectName:
        package = scope.find(named).imported
        if package is None:
            self.add(scope.find_namespace(named) or self._own_module, named.name)
            return named
        self._packages[package] = None
        return ObjectName(named.name if named.module is None else f"{named.module}.{named.name}")

    def add_class(self, class_: type) -> str:
        """Add a class to the imports, from the spec's own module if possible. Return the name of the class."""
        first = class_.__qualname__.partition(".")[0]
        owner = sys.modules.get(class_.__module__, self._own_module)
        module_attribute = getattr(self._own_module, first, None)
        module = (
            self._own_module
            if module_attribute is not None and module_attribute is getattr(owner, first, None)
            else owner
        )
        self.add(module, first)
        if "<locals>" in class_.__qualname__:
            self.doubt = f"{class_.__qualname__} is defined in a function, so no other file can import this class"
        return class_.__qualname__

    def format_imports(self) -> Iterator[str]:
        """Yield the import lines, and a line that adds the folder of the user's file to sys.path if needed."""
        file = _ImportedFile.from_path(self._spec.module) if self._spec.is_file else None
        if file is not None and file.folder:
            yield "import sys"
        if file is not None and not file.is_importable:
            yield "import runpy"
        if file is not None and file.folder:
            yield f"sys.path.insert(0, {format_text(file.folder)})"
        for package in self._packages:
            yield f"import {package}"
        own_module_name = file.module if file is not None and file.is_importable else self._own_module.__name__
        imported: dict[str, set[str]] = {}
        for module, names in self._imported.items():
            imported.setdefault(own_module_name if module == self._own_module.__name__ else module, set()).update(names)
        for module, names_of_module in imported.items():
            names_text = ", ".join(sorted(names_of_module))
            if file is None or file.is_importable or module != own_module_name:
                yield f"from {module} import {names_text}"
            else:
                texts = ", ".join(map(format_text, sorted(names_of_module)))
                yield f"names = runpy.run_path({format_text(self._spec.module)})"
                yield f"{names_text} = " + (
                    f"(names[name] for name in ({texts}))" if len(names_of_module) > 1 else f"names[{texts}]"
                )


class _ImportedFile(msgspec.Struct, frozen=True):
    """A Python file to import: the folder to add to sys.path ("" for the current folder), and the module name.

    `is_importable`: whether `import` finds the file, not a module of Python's standard library.
    """

    folder: str
    module: str
    is_importable: bool

    @classmethod
    def from_path(cls, path: str) -> _ImportedFile:
        """Return the folder and the module name for the path of a file."""
        absolute = os.path.abspath(path)
        import_folder = find_import_folder(absolute) or os.path.dirname(absolute)
        parts = os.path.relpath(absolute, import_folder).removesuffix(".py").split(os.sep)
        folder = (
            ""
            if import_folder == os.getcwd()
            else import_folder
            if os.path.isabs(path)
            else os.path.relpath(import_folder)
        )
        is_importable = all(part.isidentifier() and not iskeyword(part) for part in parts)
        return cls(folder, ".".join(parts), is_importable and parts[0] not in sys.stdlib_module_names)


def _add_configuration(
    spec: ModelSpec, loaded_object: LoadedObject, names: _Names, lines: list[str]
) -> tuple[str, ObjectName]:
    """Add lines that read the file of --config-json. Return the constructor argument and its code."""
    configuration = describe_configuration(spec, loaded_object.module, loaded_object.value)
    path = spec.options.config_json or ""
    if files.is_remote(path):
        names.doubt = f"the code opens {path}, which is not a file on this disk"
    lines += [
        f'with open({format_text(path)}, encoding="utf-8") as file:',
        "    fields = json.load(file)",
    ]
    for keys, inner in configuration.inner:
        expression = "fields" + "".join(f"[{format_text(key)}]" for key in keys)
        lines.append(f"{expression} = {names.add_class(inner)}(**{expression})")
    name = names.add_class(configuration.config_class)
    return configuration.argument, ObjectName(
        f"{name}.from_dict(fields)" if configuration.has_from_dict else f"{name}(**fields)"
    )


def _build_configured_code(spec: ModelSpec) -> ModelCode:
    """Return the lines that build a model from its configuration file."""
    configured_class = configured_model.find_class(spec)
    path, doubt = configured_class.folder, ""
    config = find_config_file(str(spec.config))
    if files.get_name(config) not in (CONFIG, MODULES):
        path = config
    if files.is_remote(config):
        doubt = f"the code reads {path}, which is not on this disk"
    elif spec.options.trusts_code:
        doubt = "statecli built the class with code of the checkpoint, but the code below does not run this code"
    name, arguments, folder = configured_class.name, format_call((), configured_class.arguments), repr(path)
    if configured_class.library is Library.DIFFUSERS:
        configuration = ", ".join(filter(None, [f"{name}.load_config({folder})", arguments]))
        return ModelCode((f"from diffusers import {name}",), f"{name}.from_config({configuration})", (), doubt)
    if configured_class.library is Library.TIMM:
        expression = f"timm.create_model({', '.join(filter(None, [repr(name), arguments]))})"
        return ModelCode(("import timm",), expression, (), doubt)
    if configured_class.library is Library.SENTENCE_TRANSFORMERS:
        line = "from sentence_transformers import SentenceTransformer  # the folder must contain weights"
        return ModelCode((line,), f"SentenceTransformer({folder})", (), doubt)
    replaced = ", ".join(filter(None, [folder, format_call((), configured_class.replaced)]))
    is_automatic = name.startswith("AutoModel")
    builder = f"{name}.from_config" if is_automatic else name
    has_type = is_automatic or "model_type" in read_document(config)
    imports = f"from transformers import {'AutoConfig, ' * has_type}{name}"
    configuration = f"{'AutoConfig' if has_type else f'{name}.config_class'}.from_pretrained({replaced})"
    return ModelCode((imports,), f"{builder}({', '.join(filter(None, [configuration, arguments]))})", (), doubt)


def change_argument(spec: ModelSpec, loaded_object: LoadedObject | None, name: str, value: int) -> ModelSpec:
    """Return the model spec with a new value for an argument."""
    kwargs, args = dict(spec.kwargs), list(spec.args)
    names = _list_positional(_get_parameters(spec, loaded_object))
    position = names.index(name) if name in names else len(args)
    if name not in kwargs and position < len(args):
        args[position] = value
    else:
        kwargs[name] = value
    typed = split_class_options(spec.text)[0]
    text = f"{typed.partition('(')[0].rstrip()}({format_call(args, kwargs)}){spec.text.removeprefix(typed)}"
    return replace(spec, text=text, args=tuple(args), kwargs=kwargs, called=True)


def _list_positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def list_integer_arguments(spec: ModelSpec, loaded_object: LoadedObject | None) -> Iterator[tuple[str, int]]:
    """Yield the integer arguments of the call, each with its given or default value."""
    parameters = _get_parameters(spec, loaded_object)
    call_arguments = dict(zip(_list_positional(parameters), spec.args, strict=False)) | spec.kwargs
    for parameter in parameters:
        value = call_arguments.get(parameter.name, parameter.default)
        if type(value) is int and parameter.kind is not parameter.POSITIONAL_ONLY:
            yield parameter.name, value


def _get_parameters(spec: ModelSpec, loaded_object: LoadedObject | None) -> list[inspect.Parameter]:
    """Return the parameters in the object's signature, or [] if no signature can be read."""
    if spec.config is not None or loaded_object is None:
        return []
    try:
        return list(inspect.signature(loaded_object.value).parameters.values())
    except (TypeError, ValueError):
        return []
