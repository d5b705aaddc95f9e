"""Judge texts of plain data that a loader imports, calls or runs as Python.

LightningCLI merges the hyperparameters of a checkpoint into its configuration, and jsonargparse imports and calls the
name at each `class_path`; `load_from_checkpoint` calls the function at `_instantiator`. MMEngine runs the configuration
that it saves as text, and HQQ evaluates the name of a dtype. Sources: lightning/pytorch/cli.py and core/saving.py of
2.6; mmengine/infer/infer.py, runner/runner.py and config/config.py of 0.10; hqq/core/utils.py of 0.2.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator

from statecli.core import quoting
from statecli.core.model_state import Hazard
from statecli.pickle_scan import known_names, torch_classes

#: Keys of the hyperparameters in a checkpoint of Lightning; and keys in them, at any depth, whose texts are called.
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")
CLASS_PATHS, INSTANTIATOR = ("class_path", "_class_path"), "_instantiator"
#: Keys of the mappings in which MMEngine saves its configuration, and its keys there.
CONFIG_PARENTS, CONFIGS = ("meta", "runtime_info"), ("cfg", "config")

_INSTANTIATORS = re.compile(r"(?:lightning\.pytorch|pytorch_lightning)\.cli\.instantiate_module")
#: Where layers, optimizers and schedulers are defined, whose calls only compute, and the module that exports them.
_MODULES = re.compile(r"(torch\.nn)\.modules\.\w+|(torch\.optim)\.\w+")
_CLASS_HELP = "check the name before you give the file to LightningCLI"

#: The key of a dtype that HQQ saves as letters, and the name of a dtype.
_DTYPE_KEY = re.compile(r"(?<![^\W_])(?:compute_dtype|unpack_view_dtype)\W*\Z")
_DTYPE = re.compile(r"torch\.\w{1,30}")
#: A class in the registry of another package of OpenMMLab: the scope and the name.
_MM_CLASS = re.compile(r"mm[a-z0-9]+\.[A-Z]\w*")
#: The beginning of a mapping in YAML, or the end of a key.
_MAPPING = re.compile(r"\{|:\s")
#: What a configuration that MMEngine writes is made of; `dict(...)` is its only call.
_CONFIG_NODES = (
    *(ast.Module, ast.Assign, ast.Name, ast.Load, ast.Store, ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set),
    *(ast.Call, ast.keyword, ast.UnaryOp, ast.USub, ast.UAdd, ast.Expr),
)
#: Variables by which a configuration reads other files or imports modules.
_LOADING_NAMES = frozenset(("_base_", "custom_imports"))
_MAX_CONFIG_CHARACTERS = 2**20
_CONFIG_HELP = "do not give the file to MMEngine unless you trust its author"


def is_dtype_key(name: str) -> bool:
    """Return whether HQQ evaluates the letters at this key; in a list, the name of a tensor ends in a subscript."""
    return _DTYPE_KEY.search(name) is not None


def is_dtype(letters: str) -> bool:
    """Return whether the letters are the name of a dtype of torch, as HQQ writes it."""
    return _DTYPE.fullmatch(letters) is not None


def check_class_path(where: str, name: str) -> Hazard | None:
    """Return the hazard of a name that LightningCLI calls; None for classes of torch that compute."""
    if name in _list_classes():
        return None
    return _judge_call(f"{where} is", name, "LightningCLI", _CLASS_HELP)


def _judge_call(what: str, name: str, loader: str, help: str) -> Hazard:
    """Return the hazard of a name that the loader calls: an error for a known harm, else a warning."""
    module, _, attribute = name.rpartition(".")
    harm = known_names.describe_harm(module, attribute, called=True)
    why = f"it {harm}" if harm else "statecli does not know what it does"
    text = f"{what} {quoting.name(name)}, which {loader} imports and calls; {why}"
    return Hazard(text, is_error=harm is not None, needs_review=True, help=help)


@functools.cache
def _list_classes() -> frozenset[str]:
    names = set()
    for qualified in torch_classes.CLASSES:
        module, _, name = qualified.rpartition(".")
        if match := _MODULES.fullmatch(module):
            names |= {qualified, f"{match[1] or match[2]}.{name}"}
    return frozenset(names)


def check_text(where: str, text: str) -> Hazard | None:
    """Return the hazard of a text in hyperparameters that jsonargparse parses; None without a name to call."""
    if "class_path" in text:
        what = "is a text with a class_path, which LightningCLI parses and calls"
    elif "\\" in text and _MAPPING.search(text):
        what = "is a text with escapes, which may spell a class_path that LightningCLI parses and calls"
    else:
        return None
    return Hazard(f"{where} {what}", help=_CLASS_HELP)


def check_instantiator(where: str, name: str) -> Hazard | None:
    """Return the hazard of a function that `load_from_checkpoint` calls; None for Lightning's own."""
    if _INSTANTIATORS.fullmatch(name):
        return None
    return Hazard(f"{where} is {quoting.name(name)}, which load_from_checkpoint imports and calls", help=_CLASS_HELP)


def check_config(where: str, text: str) -> Iterator[Hazard]:
    """Yield the hazards of a configuration that MMEngine runs; none for assignments of plain values.

    Its registries import and call the name at each `type`. A name without a point is one in a registry, and those of
    MMEngine's packages begin with `mm`.
    """
    why, types = _read_config(text)
    if why:
        yield Hazard(f"{where} {why}; MMEngine runs the text as Python", help=_CONFIG_HELP)
    for name in types:
        if "." in name and not _MM_CLASS.fullmatch(name) and name not in _list_classes():
            yield _judge_call(f"{where} has type", name, "MMEngine", _CONFIG_HELP)


def _read_config(text: str) -> tuple[str | None, Iterable[str]]:
    """Return why the text is more than assignments of plain values, None if it is not, and the texts at `type`."""
    # MMEngine replaces `{{ ... }}` in the text before it is parsed.
    if len(text) > _MAX_CONFIG_CHARACTERS or "{{" in text:
        return "is a configuration that statecli cannot check", ()
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not a valid configuration", ()
    # `dict` may be given another meaning before it is called.
    if any(isinstance(node, ast.Name) and node.id == "dict" and isinstance(node.ctx, ast.Store) for node in nodes):
        return "gives dict another meaning", ()
    loading = next((node.id for node in nodes if isinstance(node, ast.Name) and node.id in _LOADING_NAMES), None)
    if loading:
        return f"sets {loading}, by which a configuration loads other files or modules", ()
    if not all(isinstance(node, _CONFIG_NODES) and _has_plain_keys(node) for node in nodes):
        return "has code other than assignments of plain values", ()
    return None, dict.fromkeys(name for node in nodes for name in _iter_types(node))


def _has_plain_keys(node: ast.AST) -> bool:
    """Return True for a dict whose keys are all written as text, and for any other value."""
    if isinstance(node, ast.Call):
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        return is_dict and not node.args and all(keyword.arg for keyword in node.keywords)
    return not isinstance(node, ast.Dict) or all(isinstance(key, ast.Constant) for key in node.keys)


def _iter_types(node: ast.AST) -> Iterator[str]:
    """Yield the text at `type` of a dict; of a name, that of the variable, which may have any value."""
    pairs: Iterable[tuple[object, ast.expr]] = ()
    if isinstance(node, ast.Call):
        pairs = ((keyword.arg, keyword.value) for keyword in node.keywords)
    elif isinstance(node, ast.Dict):
        pairs = ((getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True))
    for key, value in pairs:
        if key == "type":
            yield str(value.value) if isinstance(value, ast.Constant) else f"a value computed in line {value.lineno}."
