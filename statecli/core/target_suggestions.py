"""Suggest targets to type in place of a missing target, or of a target that is not a model class."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import TypeVar

import msgspec

from statecli.core import python_names
from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import StateError
from statecli.core.installed_package import MODEL_LIBRARIES, install_module
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.python_names import ModelClass
from statecli.core.quoting import quote_for_shell
from statecli.core.similar_paths import list_names, suggest_similar_paths
from statecli.core.units import join_names

_CLASS_ADVICE = "write a model class as file.py:Class"
#: `package.Class`, perhaps with a call. In a target, a colon comes before the class.
_DOTTED = compile_on_use(r"(?P<path>[A-Za-z_]\w*(?:\.\w+)*)(?P<call>\(.*\))?\Z", re.DOTALL)
#: `net.py.Class` or `net.py Class`, perhaps with a call.
_FILE_ATTRIBUTE = compile_on_use(
    r"(?P<file>.+\.py)(?:[./ ]|::)(?P<name>[A-Za-z_]\w*(?:\.\w+)*)(?P<call>\(.*\))?\Z", re.DOTALL
)
#: Name of a repository: `organization/name`, or a name with a hyphen.
_REPOSITORY = compile_on_use(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|[A-Za-z0-9]\w*-[\w.-]*", re.ASCII)
#: End of a repository's name after the last dot: `3b`, `1-8B`, `a1_in1k`. No file has such an extension.
_VERSION_ENDING = compile_on_use(r"\d.*|.*[_-].*")
#: Example of a model in a library: a function, or a class with plain arguments.
_EXAMPLES = {
    "diffusers": "diffusers:UNet2DModel",
    "kornia": "kornia.feature:HardNet(pretrained=False)",
    "monai": "monai.networks.nets:DenseNet121(2, 1, 2)",
    "peft": "peft:get_peft_model(transformers.BertModel(BertConfig()), LoraConfig())",
    "sentence_transformers": "sentence_transformers:SentenceTransformer(modules=[torch.nn.Linear(2, 3)])",
    "timm": "timm:resnet18",
    "torch": "torch.nn:Linear(2, 3)",
    "torch_geometric": "torch_geometric.nn:GCNConv(16, 32)",
    "torchmetrics": "torchmetrics:MeanMetric",
    "torchvision": "torchvision.models:resnet18",
    "transformers": "transformers:BertModel(config=BertConfig())",
}
#: Packages that build models by name, such as `resnet50` and `vit_b_16`.
_REGISTRIES = ("timm", "torchvision")
_MODEL_NAME = compile_on_use(r"[a-z][a-z_]*\d\w*")
_CLASS_NAME = compile_on_use(r"[A-Z]\w*")
#: Largest number of Python files of a folder that are parsed for names.
_MAX_FILES = 50
#: Largest number of classes whose required arguments are named.
_MAX_NEEDS = 3


_Error = TypeVar("_Error", bound=StateError)


class Suggestion(msgspec.Struct, frozen=True):
    """Suggestion for the user: a sentence, targets to type, and advice on how to build other classes."""

    text: str = ""
    choices: tuple[str, ...] = ()
    advice: str | None = None

    def build_error(self, error_class: type[_Error], target: str = "", problem: str = "") -> _Error:
        """Return the error `target: problem; suggestion`."""
        text = "; ".join(filter(None, [problem, self.text]))
        return error_class(f"{target}: {text}" if target else text, choices=self.choices, advice=self.advice)


def suggest_for_missing(path: str) -> Suggestion:
    """Suggest a similar path or how to name a class, for a nonexistent path. The suggestion may be empty."""
    module, colon, name = path.partition(":")
    if colon and os.path.isfile(f"{module}.py"):
        target = f"{module}.py:{name.lstrip(':')}"
        return Suggestion(f"did you mean {quote_for_shell(target)}?")
    attribute = _FILE_ATTRIBUTE.match(path)
    if attribute is not None and os.path.isfile(attribute["file"]):
        return _suggest_for_attribute(attribute["file"], attribute["name"], attribute["call"] or "")
    dotted_match = _DOTTED.match(path)
    suggestion = _suggest_name(dotted_match["path"].split("."), dotted_match["call"] or "") if dotted_match else None
    if suggestion is not None:
        return suggestion
    if os.path.isfile(f"{path}.py"):
        return _suggest_names_of_file(f"{path}.py")
    if similar_paths := suggest_similar_paths(path):
        return Suggestion(similar_paths)
    if dotted_match is None:
        is_class = bool(colon and _DOTTED.match(module)) and not set("/\\@") & set(name)
        class_advice = f"{_CLASS_ADVICE} or package.module:Class(argument=...)" if is_class else ""
        return Suggestion(suggest_repository(path.rstrip("/")) or _describe_missing_folder(path) or class_advice)
    return _suggest_for_unknown_name(dotted_match["path"], dotted_match["call"] or "")


def _describe_missing_folder(path: str) -> str:
    """Describe the first missing folder of the path, or return "" if only the file is missing."""
    folder, missing = os.path.dirname(path), ""
    while folder and not os.path.isdir(folder):
        folder, missing = os.path.dirname(folder), folder
    # Something like `me:password@host` or `https:/host` is a URL with a wrong scheme.
    return f"the folder {missing} does not exist" if missing and not {"@", ":"} & set(missing) else ""


def suggest_repository(path: str) -> str:
    """Return how to name a repository of the Hugging Face hub, if the text may be a repository's name, else ""."""
    dot, extension = path.rpartition(".")[1:]
    if not _REPOSITORY.fullmatch(path) or (dot and not _VERSION_ENDING.fullmatch(extension)):
        return ""
    if os.path.isdir(os.path.dirname(path)):
        return ""
    registry, slash, name = path.partition("/")
    in_registry = f"for a model of {registry}, write {registry}:{name}; " if slash and registry in _REGISTRIES else ""
    organization = "" if slash else "ORGANIZATION/"
    return f"{in_registry}for a repository of the Hugging Face hub, write hf://{organization}{path}"


def _suggest_for_attribute(file: str, name: str, call: str) -> Suggestion:
    """Suggest how to name a class of a file in place of `net.py.Net`."""
    models = {model.name: model for model in python_names.list_model_classes(file)}
    is_defined = name.partition(".")[0] in python_names.list_definitions(file)
    if call or name not in models:
        return _suggest_colon(f"{file}:{name}{call}") if is_defined else _suggest_names_of_file(file)
    return _suggest_colon(_spell(file, models[name])) if models[name].call else _suggest_names_of_file(file)


def describe_python_file(path: str) -> Suggestion:
    """Describe a Python file given as a checkpoint: `is a Python file, not a checkpoint; choose one of …`."""
    if error := python_names.find_syntax_error(path):
        return Suggestion(f"is a Python file with {_describe_syntax_error(error)}")
    problem, names = "is a Python file, not a checkpoint", _list_names(path)
    if names.choices:
        return Suggestion(f"{problem}; choose one of its classes or functions:", names.choices, names.advice)
    return Suggestion(problem, advice=names.advice or BUILD_ADVICE)


def suggest_classes_near(path: str) -> Suggestion:
    """Suggest classes and functions of the Python files in the checkpoint's folder and in the current folder."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return suggest_classes_in(*([""] if os.path.realpath(folder) == os.getcwd() else [folder, ""]))


def suggest_classes_in(*folders: str) -> Suggestion:
    """Suggest classes and functions of the Python files in the folders."""
    names = [_list_names(file) for folder in folders for file in _list_python_files(folder)]
    choices = tuple(dict.fromkeys(choice for part in names for choice in part.choices))
    return Suggestion("", choices, None if choices else next((n.advice for n in names if n.advice), None))


def suggest_models_of(module: str, file: str | None) -> Suggestion:
    """Suggest classes and functions of a Python file; `file` is the file of a dotted module, if known."""
    return _list_names(module) if module.endswith(".py") else _list_names(file, module) if file else Suggestion()


def find_example(module: str) -> str | None:
    """Return an example of a target in the package of a module, or None if the package has no example."""
    example = _EXAMPLES.get(module.partition(".")[0])
    return None if example is None else quote_for_shell(example)


def _list_python_files(folder: str) -> list[str]:
    files = sorted(name for name in list_names(folder) if name.endswith(".py"))
    return [os.path.join(folder, name) for name in files[:_MAX_FILES]]


def _suggest_name(parts: Sequence[str], call: str) -> Suggestion | None:
    """Suggest how to name a class of a local file or module, for a name with dots. Return None if nothing fits."""
    for end in range(len(parts), 0, -1):
        folder, attribute = os.path.join(*parts[:end]), ".".join(parts[end:])
        file = f"{folder}.py"
        if os.path.isfile(file):
            is_defined = attribute and parts[end] in python_names.list_definitions(file)
            if is_defined or attribute[:1].isupper():
                return _suggest_for_attribute(file, attribute, call)
            if not attribute:
                return _suggest_names_of_file(file)
        elif attribute[:1].isupper() and os.path.isdir(folder):
            names = suggest_classes_in(folder)
            if names.choices:
                return Suggestion(f"choose a class or function of the folder {folder}:", names.choices)
    modules = list(_find_modules(parts))
    if not modules:
        return None
    module, attribute = ".".join(parts[: len(modules)]), ".".join(parts[len(modules) :])
    if attribute:
        return _suggest_colon(f"{module}:{attribute}{call}")
    return _suggest_names_of_module(module, modules[-1])


def _suggest_colon(target: str) -> Suggestion:
    return Suggestion(f"write a colon before the class or function: {quote_for_shell(target)}")


def _suggest_names_of_file(path: str) -> Suggestion:
    if error := python_names.find_syntax_error(path):
        return Suggestion(f"{path} is a Python file with {_describe_syntax_error(error)}")
    names = _list_names(path)
    if names.choices:
        return Suggestion(f"choose a class or function of the file {path}:", names.choices, names.advice)
    return Suggestion(f"{path} is a Python file", advice=names.advice or BUILD_ADVICE)


def _describe_syntax_error(error: SyntaxError) -> str:
    line_text = f" in line {error.lineno}" if error.lineno else ""
    return (
        f"a syntax error{line_text}: {error.msg}; correct the error, then give a class or function of the file, "
        "such as net.py:Net"
    )


def _suggest_names_of_module(name: str, spec: ModuleSpec) -> Suggestion:
    description = f"{name} is a Python {'module' if spec.submodule_search_locations is None else 'package'}"
    names = _list_names(spec.origin, name) if spec.origin else Suggestion()
    if names.choices:
        return Suggestion(f"{description}; choose one of its classes or functions:", names.choices, names.advice)
    example = find_example(name)
    if example is not None and names.advice is None:
        return Suggestion(f"{description}: give one of its classes or functions, such as {example}")
    return Suggestion(
        description,
        advice=names.advice or f"add one of its classes or functions after a colon, or {BUILD_ADVICE}",
    )


def _suggest_for_unknown_name(name: str, call: str) -> Suggestion:
    """Suggest how to name a class if neither the file nor the module of the typed name was found."""
    module, _, attribute = name.rpartition(".")
    top = name.partition(".")[0]
    if not module and (call or name[:1].isupper()):
        return _suggest_module(name, call)
    is_model = top in MODEL_LIBRARIES and _MODEL_NAME.fullmatch(attribute)
    if module and not call and not attribute[:1].isupper() and not is_model:
        return Suggestion()  # the name of a file with an extension
    install = install_module(top) if top in MODEL_LIBRARIES else "install the package"
    if module:
        target = quote_for_shell(f"{module}:{attribute}{call}")
        return Suggestion(f"the Python module {top} is not installed; {install}, then give the target {target}")
    if example := find_example(top):
        return Suggestion(f"the Python package {top} is not installed; {install}, then give the target {example}")
    missing = f"the Python module {top} was not found"
    registries = [f"{registry}:{name}" for registry in _REGISTRIES if any(_find_modules([registry]))]
    if registries and _MODEL_NAME.fullmatch(name):
        return Suggestion(f"{missing}; for a model of that name in a library, write {' or '.join(registries)}")
    return Suggestion(f"{missing}; {_CLASS_ADVICE} or package.module:Class")


def _suggest_module(name: str, call: str) -> Suggestion:
    """Suggest the files of the current folder that define a class or function, or torch.nn."""
    problem = f"the file or module of {name}{call and '(...)'} is missing; write"
    modules = [file for file in _list_python_files("") if name in python_names.list_definitions(file)]
    if not modules and _find_layer(name):
        modules = ["torch.nn"]
    if modules:
        return Suggestion(problem, tuple(quote_for_shell(f"{module}:{name}{call}") for module in modules))
    specs = [quote_for_shell(f"{module}:{name}{call}") for module in ("file.py", "package.module")]
    return Suggestion(f"{problem} {' or '.join(specs)}")


def is_layer(name: str) -> bool:
    """Return True for the name of a torch.nn class, unless a Python file of the current folder defines this name."""
    return _find_layer(name) and not any(name in python_names.list_definitions(file) for file in _list_python_files(""))


def _find_layer(name: str) -> bool:
    """Return True for the name of a class in torch.nn. Reads torch's files and does not import torch."""
    spec = next(_find_modules(["torch"]), None)
    path = os.path.join(os.path.dirname(spec.origin), "nn", "modules", "__init__.py") if spec and spec.origin else ""
    return os.path.isfile(path) and name in python_names.list_exported(path)


def _list_names(path: str, module: str | None = None) -> Suggestion:
    """Suggest the classes and functions of a file that build a model, and describe what its other classes need."""
    models = list(python_names.list_model_classes(path))
    module = module or path
    specs = [quote_for_shell(_spell(module, model)) for model in models if model.call]
    functions = [f"{module}:{name}" for name in python_names.list_model_factories(path)]
    needs = [f"{model.name} needs {join_names(model.required, 3)}" for model in models if not model.call]
    if len(needs) > _MAX_NEEDS:
        needs[_MAX_NEEDS:] = [f"and {len(needs) - _MAX_NEEDS} more"]
    return Suggestion("", (*specs, *functions), "; ".join([*needs, BUILD_ADVICE]) if needs else None)


def _spell(module: str, model: ModelClass) -> str:
    return f"{module}:{model.call if model.required else model.name}"


class ModuleName(msgspec.Struct, frozen=True):
    """Module of an installed package, and the rest of a dotted name after the module."""

    module: str
    attribute: str


def split_module_name(name: str) -> ModuleName | None:
    """Split a dotted name after its longest existing module, without importing it. Return None if no module exists."""
    parts = name.split(".")
    count = len(list(_find_modules(parts)))
    return ModuleName(".".join(parts[:count]), ".".join(parts[count:])) if 0 < count < len(parts) else None


def split_loaded_class(name: str) -> ModuleName | None:
    """Split `AutoModel.from_pretrained` into the module `transformers` and this name. Return None for other names."""
    class_name, _, method = name.partition(".")
    if method not in ("from_pretrained", "from_config") or not _CLASS_NAME.fullmatch(class_name):
        return None
    return split_module_name(f"transformers.{name}")


def split_inner_module(name: str, *, is_called: bool = False) -> ModuleName | None:
    """Split the name of a module into its package and its last part. Return None for other names.

    For the name of a package, return None too, unless a call shows that the last part is a function of the package.
    """
    parts = name.split(".")
    modules = list(_find_modules(parts)) if len(parts) > 1 else []
    if not modules or len(modules) < len(parts):
        return None
    is_package = modules[-1].submodule_search_locations is not None
    return None if is_package and not is_called else ModuleName(".".join(parts[:-1]), parts[-1])


def _find_modules(parts: Sequence[str]) -> Iterator[ModuleSpec]:
    """Yield the module spec (importlib) of a package, then of each inner module in `parts`. Nothing is imported."""
    from importlib.util import find_spec

    try:
        spec = find_spec(parts[0])
    except (ImportError, ValueError):
        return
    for end in range(1, len(parts) + 1):
        if spec is None:
            return
        yield spec
        if end < len(parts):
            locations = spec.submodule_search_locations
            spec = PathFinder.find_spec(".".join(parts[: end + 1]), locations) if locations is not None else None
