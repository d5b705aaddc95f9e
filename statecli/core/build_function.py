"""Write a function that builds a model whose arguments cannot be written on a command line. Imports no model code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from statecli.core import python_names
from statecli.core.errors import option
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.python_names import ModelClass, ModelFactory
from statecli.core.quoting import quote_for_shell
from statecli.core.similar_paths import list_names
from statecli.core.units import join_names

#: Name of a class, at the start of a line.
_CLASS = compile_on_use(r"^class (\w+)\b", re.MULTILINE)
#: Start of the call of a class that holds settings.
_CONFIGURATION = compile_on_use(r"=[\w.]*(?:Config|Cfg|Args|Configuration|HParams)\(")
#: Advice for a model that a command line cannot express.
BUILD_ADVICE = "write a function make() in build.py that builds the model, then give build.py:make"
#: Folder of transformers with the classes that choose another class by a name or a file.
_AUTO_FOLDER = "auto"


def describe_unspellable(models: Sequence[ModelClass], factories: Sequence[ModelFactory], module: str) -> str | None:
    """Describe the classes whose arguments a command line cannot express, and write a function that builds the first.

    A class that is built by a function of the file needs no other function.
    """
    unspellable = [model for model in models if model.takes_object]
    factory_by_model = {model: name for model in unspellable if (name := _find_factory(model.name, factories))}
    notes = [
        f"{module}:{name} builds {model.name}, which needs {_join(model)}" for model, name in factory_by_model.items()
    ]
    unbuilt_models = [model for model in unspellable if model not in factory_by_model]
    if not unbuilt_models:
        return "; ".join(_truncate(notes)) or None
    need_texts = _truncate([f"{model.name} needs {_join(model)}" for model in unbuilt_models])
    used_names = {factory.name for factory in factories}
    last = write_function(module, unbuilt_models[0].call, unbuilt_models[0].names, used_names)
    return "; ".join([*_truncate(notes), *need_texts, last])


def write_for_class(module: str, name: str, file: str) -> str | None:
    """Return advice on the arguments that build a class of a file. Return None if class or arguments are unknown."""
    model = next((model for model in python_names.list_model_classes(file) if model.name == name), None)
    if model is None:
        return None
    call_with_dots = f"{model.name}({', '.join(f'{argument}=...' for argument in model.required)})"
    if not model.takes_object and model.call == call_with_dots:
        return None
    factories = list(python_names.list_model_factories(file))
    factory = _find_factory(name, factories)
    if factory:
        return f"write {module}:{factory}, which builds {name}"
    if not model.takes_object:
        return spell(f"{module}:{model.call}")
    return write_function(module, model.call, model.names, {factory.name for factory in factories})


def spell(line: str) -> str:
    """Return the advice to type a line that builds a class. In the line, `...` stands for a value to fill in."""
    with_values = ", with a value for each `...`" if "..." in line else ""
    or_file = f", or give {option('--config-json', 'FILE')}" if with_values and _CONFIGURATION.search(line) else ""
    return f"write {quote_for_shell(line)}{with_values}{or_file}"


def write_for_name(module: str, name: str, file: str) -> str | None:
    """Return which arguments a class needs, and advice on building the class. Return None if these are unknown."""
    if module == "transformers":
        config = _find_transformers_config(name, os.path.join(os.path.dirname(file), "models"))
        if config is None:
            return None
        return f"{name} needs the configuration {config}; {spell(f'{module}:{name}(config={config}())')}"
    model = next((model for model in python_names.list_model_classes(file) if model.name == name), None)
    advice_for_class = write_for_class(module, name, file)
    if model is None or advice_for_class is None:
        return None
    return f"{name} needs {_join(model)}; {advice_for_class}"


def write_function(
    module: str, call: str, names: Sequence[str], used_names: Sequence[str] | set[str] = (), imports: str = ""
) -> str:
    """Return advice: add a function that builds a model with `call` to a Python file, and give the function as target.

    `module`: a Python file, to which the function is added, or a dotted module, from which `names` are imported.
    `used_names`: names of functions of the file. `imports`: lines of other imports, which end in "; ".
    """
    with_values = " with a value for each `...`" if "..." in call else ""
    file, name = (module, "make") if module.endswith(".py") else ("build.py", "make")
    if name in used_names:
        name = f"make_{names[0].lower()}"
    imports += "" if file == module else f"from {module} import {', '.join(sorted(names))}; "
    return f"add the line `def {name}(): {imports}return {call}` to {file}{with_values}, and give {file}:{name}"


def _find_factory(name: str, factories: Sequence[ModelFactory]) -> str | None:
    return next((factory.name for factory in factories if name in factory.calls), None)


def _join(model: ModelClass) -> str:
    return join_names(model.required, 3)


def _truncate(notes: Sequence[str]) -> Iterator[str]:
    yield from notes[:3]
    if len(notes) > 3:
        yield f"and {len(notes) - 3} more"


def _find_transformers_config(name: str, models_folder: str) -> str | None:
    """Return the configuration class of a transformers class, such as `BertConfig` for `BertModel`, or None if unknown.

    The class is the annotation in the model's own `__init__`, or the configuration whose name begins like the model's.
    """
    stem, folder = "", ""
    for model in sorted({*list_names(models_folder)} - {_AUTO_FOLDER}):
        candidate = os.path.join(models_folder, model)
        for config in _CLASS.findall(_read_code(candidate, "configuration_")):
            start = config.removesuffix("Config")
            if start != config and name.startswith(start) and len(start) > len(stem):
                stem, folder = start, candidate
    if not stem:
        return None
    code = re.search(rf"^class {re.escape(name)}\b(?:.*\n(?!\S))*", _read_code(folder, "modeling_"), re.MULTILINE)
    if code is None:
        return None
    own_init = re.search(r"def __init__\(\s*self,([^)]*)", code[0])
    if own_init is None:
        return f"{stem}Config"
    annotation = re.match(r"\s*config: (\w+Config)\s*(?:,|$)", own_init[1])
    return annotation[1] if annotation else f"{stem}Config" if re.match(r"\s*config\s*(?:,|$)", own_init[1]) else None


def _read_code(folder: str, start: str) -> str:
    """Return the joined text of the folder's Python files whose names begin with `start`."""
    texts = []
    for name in sorted(list_names(folder)):
        if not (name.startswith(start) and name.endswith(".py")):
            continue
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    return "\n".join(texts)
