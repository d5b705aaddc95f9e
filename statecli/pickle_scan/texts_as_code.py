"""Judge texts of plain data that a loader imports, calls or runs as Python.

LightningCLI merges the hyperparameters of a checkpoint into its configuration, and jsonargparse imports and calls the
name at each `class_path`; `load_from_checkpoint` calls the function at `_instantiator`. MMEngine runs the configuration
that it saves as text. Sources: lightning/pytorch/cli.py and core/saving.py of 2.6; mmengine/infer/infer.py,
runner/runner.py and config/config.py of 0.10.
"""

from __future__ import annotations

import ast
import re

from statecli.core import quoting
from statecli.core.model_state import Hazard
from statecli.pickle_scan import known_names

#: Keys of the hyperparameters in a checkpoint of Lightning; and keys in them, at any depth, whose texts are called.
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams")
CLASS_PATHS, INSTANTIATOR = ("class_path", "_class_path"), "_instantiator"
#: Keys of the mappings in which MMEngine saves its configuration, and its keys there.
CONFIG_PARENTS, CONFIGS = ("meta", "runtime_info"), ("cfg", "config")

_INSTANTIATORS = re.compile(r"(?:lightning\.pytorch|pytorch_lightning)\.cli\.instantiate_module")
#: Classes of layers, optimizers and schedulers, whose calls only compute.
_CLASS = re.compile(r"torch\.(?:nn|optim)\.(?:[a-z_]\w*\.)*[A-Z]\w*")
_CLASS_HELP = "check the name before you give the file to LightningCLI"

#: What a configuration that MMEngine writes is made of; `dict(...)` is its only call.
_CONFIG_NODES = (
    *(ast.Module, ast.Assign, ast.Name, ast.Load, ast.Store, ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set),
    *(ast.Call, ast.keyword, ast.UnaryOp, ast.USub, ast.UAdd, ast.Expr),
)
#: Variables by which a configuration reads other files or imports modules.
_LOADING_NAMES = frozenset(("_base_", "custom_imports"))
_MAX_CONFIG_CHARACTERS = 2**20
_CONFIG_HELP = "do not give the file to MMEngine unless you trust its author"


def check_class_path(where: str, name: str) -> Hazard | None:
    """Return the hazard of a name that LightningCLI calls; None for classes of torch that compute."""
    if _CLASS.fullmatch(name):
        return None
    module, _, attribute = name.rpartition(".")
    harm = known_names.describe_harm(module, attribute, called=True)
    why = f"it {harm}" if harm else "statecli does not know what it does"
    text = f"{where} is {quoting.name(name)}, which LightningCLI imports and calls; {why}"
    return Hazard(text, is_error=harm is not None, needs_review=True, help=_CLASS_HELP)


def check_instantiator(where: str, name: str) -> Hazard | None:
    """Return the hazard of a function that `load_from_checkpoint` calls; None for Lightning's own."""
    if _INSTANTIATORS.fullmatch(name):
        return None
    return Hazard(f"{where} is {quoting.name(name)}, which load_from_checkpoint imports and calls", help=_CLASS_HELP)


def check_config(where: str, text: str) -> Hazard | None:
    """Return the hazard of a configuration that MMEngine runs; None for assignments of plain values."""
    why = _explain_config(text)
    return Hazard(f"{where} {why}; MMEngine runs the text as Python", help=_CONFIG_HELP) if why else None


def _explain_config(text: str) -> str | None:
    # MMEngine replaces `{{ ... }}` in the text before it is parsed.
    if len(text) > _MAX_CONFIG_CHARACTERS or "{{" in text:
        return "is a configuration that statecli cannot check"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not a valid configuration"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _LOADING_NAMES:
            return f"sets {node.id}, by which a configuration loads other files or modules"
        is_dict = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
        if not isinstance(node, _CONFIG_NODES) or (isinstance(node, ast.Call) and not is_dict):
            return "has code other than assignments of plain values"
    # `dict` may be given another meaning before it is called.
    if any(
        isinstance(node, ast.Name) and node.id == "dict" and isinstance(node.ctx, ast.Store) for node in ast.walk(tree)
    ):
        return "gives dict another meaning"
    return None
