"""Check texts in plain data, because some loaders treat a text as a name to import or call, or as Python code.

LightningCLI merges the hyperparameters of a checkpoint into its configuration. jsonargparse imports and calls the name
at each `class_path`, and `load_from_checkpoint` calls the function at `_instantiator`. For an argument that takes an
object, a text is a name to call, or the name of a file with a configuration. MMEngine runs the configuration saved as
text, and HQQ evaluates the name of a dtype. Sources: lightning/pytorch/cli.py and core/saving.py of 2.6;
mmengine/infer/infer.py, runner/runner.py and config/config.py of 0.10; hqq/core/utils.py of 0.2.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from statecli.core import quoting, unicode_forms
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard
from statecli.pickle_scan import known_names, name_lists

#: Keys of the hyperparameters in a checkpoint of Lightning; and keys in them, at any depth, whose texts are called.
HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")
CLASS_PATHS, INSTANTIATOR = ("class_path", "_class_path"), "_instantiator"
#: Keys of the mappings in which MMEngine saves its configuration, and keys of the configuration in them.
CONFIG_PARENTS, CONFIGS = ("meta", "runtime_info"), ("cfg", "config")

_INSTANTIATORS = compile_on_use(r"(?:lightning\.pytorch|pytorch_lightning)\.cli\.instantiate_module")
#: Modules that define layers, optimizers and schedulers, whose calls only compute; the groups are the modules that
#: export them.
_COMPUTING_MODULES = compile_on_use(r"(torch\.nn)\.modules\.\w+|(torch\.optim)\.\w+")
_CLASS_HELP = "check the name before you give the file to LightningCLI"
#: Text that is more likely the name of a file than of a class: `train.csv`.
_FILE_NAME = compile_on_use(r"\w+\.[a-z0-9]{1,6}")
#: Name of a configuration file; sign of a list or a mapping in YAML; and separators of the texts in them.
_CONFIG_FILE = compile_on_use(r".*\.(?:ya?ml|json)", re.IGNORECASE | re.DOTALL)
_COLLECTION, _SEPARATORS = re.compile(r"[\[{]|[-:?]\s"), re.compile(r"[\s\[\]{},:'\"]+")
#: Names of dtypes, which are frequent in hyperparameters and are not called.
_PLAIN_DTYPE = compile_on_use(r"torch\.(?:b?float\d*|u?int\d*|complex\d+|bool|half|double|long)")

#: Key of a dtype that HQQ saves as letters, also followed by the path of a tensor in a call; and name of a dtype.
_DTYPE_KEY = compile_on_use(r"(?<![^\W_])(?:compute_dtype|unpack_view_dtype)(?:\W|__args__|__state__|\d)*\Z")
_DTYPE = compile_on_use(r"torch\.\w{1,30}")
#: Packages of OpenMMLab whose names are the scopes of their registries, and that export no classes of their own.
_SCOPE_NAMES = (
    "mmaction mmagic mmcls mmdeploy mmdet mmdet3d mmedit mmeval mmfewshot mmflow mmgen mmhuman3d mmocr mmpose "
    "mmpretrain mmrazor mmrotate mmseg mmselfsup mmtrack mmyolo"
)
_SCOPES = frozenset(_SCOPE_NAMES.split())
#: Scopes whose packages also export classes outside of their registries. One of these classes opens a file for
#: writing, another imports a module.
_EXPORTING_SCOPES = frozenset(["mmengine", "mmcv"])
#: Variable and key of a dict whose text is a scope, because MMEngine imports the module `registry` of the scope.
_SCOPE_VARIABLE, _SCOPE_KEY = "default_scope", "_scope_"
#: Modules without a dot in their names that act when they are imported: modules of Python, and scripts of a project.
_ACTING_MODULES = frozenset(["antigravity", "conftest", "idlelib", "main", "setup", "test", "train", "turtledemo"])
#: Name of a class in a registry.
_CLASS_NAME = compile_on_use(r"[A-Z]\w*")
#: Beginning of a mapping in YAML, or end of a key.
_MAPPING = compile_on_use(r"\{|:\s")
#: Nodes of a configuration that MMEngine writes; `dict(...)` is its only call.
_CONFIG_NODES = (
    *(ast.Module, ast.Assign, ast.Name, ast.Load, ast.Store, ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set),
    *(ast.Call, ast.keyword, ast.UnaryOp, ast.USub, ast.UAdd, ast.Expr),
)
#: Variables by which a configuration reads other files or imports modules.
_LOADING_NAMES = frozenset(("_base_", "custom_imports"))
_MAX_CONFIG_CHARACTERS = 2**20
_CONFIG_HELP = "do not give the file to MMEngine unless you trust its author"


def is_dtype_key(name: str) -> bool:
    """Return True if HQQ evaluates the text at this key. The key may end with a subscript (`compute_dtype[0]`)."""
    return "_dtype" in name and _DTYPE_KEY.search(name) is not None


def is_dtype(letters: str) -> bool:
    """Return True if the text is the name of a torch dtype, as HQQ writes it."""
    return _DTYPE.fullmatch(letters) is not None


def check_class_path(where: str, name: str) -> Hazard | None:
    """Return the hazard of a name that LightningCLI calls; None for classes of torch that only compute."""
    if name in _list_classes():
        return None
    return judge_call(f"{where} is", name, "LightningCLI", _CLASS_HELP)


def check_argument(where: str, text: str) -> Iterator[Hazard]:
    """Yield the hazards of a text that LightningCLI passes as an argument. In a YAML list, check each name.

    Only the type of the argument decides whether jsonargparse imports the text, reads the file or takes the text as is.
    Names of files are reported as notes, because honest hyperparameters contain them.
    """
    names: Iterable[str] = (text,)
    if _COLLECTION.search(text):
        where, names = f"a name in {where}", dict.fromkeys(_SEPARATORS.split(text))
        if "\\" in text:
            why = (
                f"{where} may be hidden by backslash escapes, so statecli cannot check the name; LightningCLI "
                "imports and calls this name"
            )
            yield Hazard(why, is_error=False, needs_review=True, help=_CLASS_HELP)
    for name in names:
        if _CONFIG_FILE.fullmatch(name):
            message = (
                f"{where} is {quoting.quote(name)}, the path of a configuration file; LightningCLI may import and "
                "call functions and classes listed in that file"
            )
            help = "check the file before you give the checkpoint to LightningCLI"
            yield Hazard(message, is_error=False, help=help)
        elif _is_class_name(name) and name not in _list_classes():
            hazard = judge_call(
                f"{where} is", name, "LightningCLI", _CLASS_HELP, " for an argument that takes an object"
            )
            yield replace(hazard, needs_review=hazard.is_error or _FILE_NAME.fullmatch(name) is None)


def _is_class_name(name: str) -> bool:
    """Return True if jsonargparse may import the name: identifiers with dots between them, except dtypes."""
    return "." in name and all(map(str.isidentifier, name.split("."))) and not _PLAIN_DTYPE.fullmatch(name)


def judge_call(what: str, name: str, loader: str, help: str, condition: str = "") -> Hazard:
    """Return the hazard of a name that the loader calls: an error for a known harm, else a warning."""
    module, _, attribute = name.rpartition(".")
    harm = known_names.describe_harm(module, attribute, called=True)
    why = f"{quoting.name(name)} {harm}" if harm else "statecli does not know whether this name is safe"
    text = f"{what} {quoting.name(name)}, which {loader} imports and calls{condition}; {why}"
    return Hazard(text, is_error=harm is not None, needs_review=True, help=help)


@functools.cache
def _list_classes() -> frozenset[str]:
    names = set()
    for qualified in known_names.CLASSES:
        module, _, name = qualified.rpartition(".")
        if match := _COMPUTING_MODULES.fullmatch(module):
            names |= {qualified, f"{match[1] or match[2]}.{name}"}
    return frozenset(names)


def check_text(where: str, text: str) -> Hazard | None:
    """Return the hazard of a text in hyperparameters that jsonargparse parses; None if the text has no name to call."""
    if "class_path" in text:
        message = "is a string with a class_path, and LightningCLI imports and calls the class at this path"
    elif "\\" in text and _MAPPING.search(text):
        message = (
            "is a string with backslash escapes (such as \\x63), which may hide a class_path that LightningCLI "
            "imports and calls"
        )
    else:
        return None
    return Hazard(f"{where} {message}", help=_CLASS_HELP)


def check_instantiator(where: str, name: str) -> Hazard | None:
    """Return the hazard of a function that `load_from_checkpoint` calls; None for `instantiate_module` of Lightning."""
    if _INSTANTIATORS.fullmatch(name):
        return None
    return Hazard(f"{where} is {quoting.name(name)}, which load_from_checkpoint imports and calls", help=_CLASS_HELP)


def check_config(where: str, text: str) -> Iterator[Hazard]:
    """Yield the hazards of a configuration that MMEngine runs as Python code.

    MMEngine's registries import and call the name at each unknown `type`, and import a module of each scope.
    """
    why, types, scopes = _read_config(text)
    if why:
        yield Hazard(f"{where} {why}; MMEngine runs the string as Python code", help=_CONFIG_HELP)
    for name in types:
        if not _is_registered(name):
            yield judge_call(f"{where} has type", name, "MMEngine", _CONFIG_HELP)
    for scope in scopes:
        if scope not in _SCOPES | _EXPORTING_SCOPES:
            why = (
                f"has the scope {quoting.name(scope)}, so MMEngine imports the registry module of the package with "
                "this name"
            )
            help = "check the name before you give the file to MMEngine"
            text = f"{where} {why}; statecli does not know whether this module is safe"
            yield Hazard(text, is_error=False, needs_review=True, help=help)


def _is_registered(name: str) -> bool:
    """Return True if MMEngine finds the name in a registry, or if importing the name runs nothing harmful.

    A name without a dot is in a registry, or else a module. Any other name may be a class outside all registries:
    MMEngine treats `mmengine.MMLogger` as a class of its scope, and then imports the class.
    """
    scope, point, inner_name = name.partition(".")
    if not point:
        return name not in _ACTING_MODULES
    if scope in _EXPORTING_SCOPES:
        return inner_name in _list_registered_names()
    return name in _list_classes() or (scope in _SCOPES and _CLASS_NAME.fullmatch(inner_name) is not None)


@functools.cache
def _list_registered_names() -> frozenset[str]:
    """Return the names in the registries of MMEngine and MMCV, with the classes of torch that MMEngine adds."""
    names = (*name_lists.read_names("registered"), *_list_classes())
    return frozenset(name.rpartition(".")[2] for name in names)


def _read_config(text: str) -> tuple[str | None, Iterable[str], Iterable[str]]:
    """Return (problem, types, scopes) of a configuration. The problem is None if the code only assigns plain values."""
    # MMEngine replaces `{{ ... }}` before Python parses the text, and Python's parser normalizes names.
    if len(text) > _MAX_CONFIG_CHARACTERS or "{{" in text or unicode_forms.has_too_many_marks(text):
        return "is a configuration that statecli cannot check", (), ()
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not valid Python code", (), ()
    if not all(isinstance(node, _CONFIG_NODES) and _is_plain(node) for node in nodes):
        return "has code other than assignments of plain values, or loads other files or modules", (), ()
    types = dict.fromkeys(name for node in nodes for name in _iter_texts(node, "type"))
    scopes = (name for node in nodes for name in (*_iter_texts(node, _SCOPE_KEY), *_iter_default_scopes(node)))
    return None, types, dict.fromkeys(scopes)


def _is_plain(node: ast.AST) -> bool:
    """Return False for a dict with computed keys, a call other than `dict(key=…)`, and a name that loads or calls."""
    if isinstance(node, ast.Call):
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        return is_dict and not node.args and all(keyword.arg for keyword in node.keywords)
    if isinstance(node, ast.Name):  # `dict` may be given another meaning before it is called
        return node.id not in _LOADING_NAMES and not (node.id == "dict" and isinstance(node.ctx, ast.Store))
    return not isinstance(node, ast.Dict) or all(isinstance(key, ast.Constant) for key in node.keys)


def _iter_texts(node: ast.AST, requested_key: str) -> Iterator[str]:
    """Yield the text of each value that a dict has at this key. For a computed value, yield a description."""
    pairs: Iterable[tuple[object, ast.expr]] = ()
    if isinstance(node, ast.Call):
        pairs = ((keyword.arg, keyword.value) for keyword in node.keywords)
    elif isinstance(node, ast.Dict):
        pairs = ((getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True))
    return (_describe_text(value) for key, value in pairs if key == requested_key)


def _iter_default_scopes(node: ast.AST) -> Iterator[str]:
    """Yield the text that a statement assigns to the variable `default_scope`, except None."""
    if isinstance(node, ast.Assign) and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        if _SCOPE_VARIABLE in names:
            yield _describe_text(node.value)


def _describe_text(value: ast.expr) -> str:
    """Return the text of a constant. For another value, return words with a dot, which match no registered name."""
    return str(value.value) if isinstance(value, ast.Constant) else f"a value computed in line {value.lineno}."
