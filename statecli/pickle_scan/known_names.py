"""Classify a Python name in a pickle as clean (data of an ordinary checkpoint), unsafe or unknown.

Three answers, in this order:

clean torch's own list (`safe_globals.list_allowed_names`), and names of ordinary checkpoints that only build data:
          containers, numbers, dates, paths, enumerations, configurations. Exact names, because every pattern admits
          more than intended; classes of torch where they are defined. Functions may be named and not
          called (`_NAMED_NOT_CALLED`); `call_flow` checks their use.
unsafe    everything else in Python's standard library, functions of torch and numpy, names with a dunder in them, and
          packages whose functions run code. Checkpoints do not need these names; published attacks use them.
unknown   all other names: user classes, which loading imports and runs.

The deny-list alone decides nothing: a name not on the list is unknown, not clean.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from statecli.core.dtypes import SCRIPT_STORAGE_DTYPES
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Mention
from statecli.pickle_scan import name_lists
from statecli.pickle_scan.packed_weights import CPP_CLASSES, is_cpp_class
from statecli.pickles import safe_globals
from statecli.pickles.python2_names import rename_python2


def qualify_names(module: str, words: str) -> list[str]:
    """Return the name `module.word` for each word of a text."""
    return [f"{module}.{name}" for name in words.split()]


_SHARED_DATA = name_lists.read_names("shared")
#: Names in ordinary training checkpoints besides tensors. Each builds a value from its arguments and runs nothing.
DATA_NAMES = name_lists.read_names("data") | _SHARED_DATA | {f"torch.{name}" for name in SCRIPT_STORAGE_DTYPES}
#: Classes of torch that only keep their arguments, as `module.name`.
CLASSES = name_lists.read_names("classes")
#: Functions on tensors that a configuration or a whole module keeps.
_FUNCTIONAL_FUNCTIONS = name_lists.read_names("functional")
_TENSOR_FUNCTIONS = name_lists.read_names("tensor functions") | {
    name.replace("torch.nn.functional", module)
    for module in ("torch.nn.functional", "torch._C._nn", "torch._C._VariableFunctionsClass", "torch")
    for name in _FUNCTIONAL_FUNCTIONS
}
#: Modules whose parameters have no shape yet, and methods that these modules register as hooks.
_LAZY_MODULES = frozenset(name for name in CLASSES if name.startswith("torch.nn.modules.") and ".Lazy" in name)
_HOOKS_OF_LAZY_MODULES = ("_infer_parameters", "_lazy_load_hook")
#: Names that a checkpoint may contain but not call.
_NAMED_NOT_CALLED = (
    _TENSOR_FUNCTIONS
    | name_lists.read_names("named")
    | {f"{module}.{hook}" for module in _LAZY_MODULES for hook in _HOOKS_OF_LAZY_MODULES}
)
#: Functions of torch's C modules that contain only functions of tensors. A checkpoint may name but not call them.
_TENSOR_FUNCTION_PATTERN = compile_on_use(
    r"torch\._C\.(?:_linalg\.linalg|_fft\.fft|_special\.special)_[a-z0-9_]+", re.ASCII
)
#: Classes of numpy's dtypes. Pickle names these classes, and creates a dtype with `numpy.dtype`.
_DTYPE_CLASS_PATTERN = compile_on_use(r"numpy\.dtypes\.\w+DType|numpy\.dtype\[\w+\]", re.ASCII)
#: Further classes that only keep their arguments, too many for a list. Attributes of these classes do not match.
#: `__torch__` is not a package of Python. `rules.pickles` refuses this name outside of TorchScript archives, because
#: Python would import a file of that name.
_DATA_PATTERN = compile_on_use(
    r"transformers\.models\.\w+\.configuration_\w+\.[A-Z]\w*Config"
    rf"|__torch__\.(?!torch\.classes\.)[\w.]+|{CPP_CLASSES}",
    re.ASCII,
)
#: Functions of numpy that call their second argument with the first, or their only argument if it is a class.
GENERATOR_CONSTRUCTORS = tuple(qualify_names("numpy.random._pickle", "__randomstate_ctor __generator_ctor"))
#: Function of numpy that calls its argument if it is a class.
BIT_GENERATOR_CONSTRUCTOR = "numpy.random._pickle.__bit_generator_ctor"
#: Classes of the objects that these functions create.
BIT_GENERATORS = tuple(
    f"numpy.random.{name}"
    for name in ("_mt19937.MT19937", "_pcg64.PCG64", "_pcg64.PCG64DXSM", "_philox.Philox", "_sfc64.SFC64")
)
#: Functions and classes that call an argument -> positions of this argument, where only a plain name is allowed.
CALLEE_POSITIONS = {
    "functools.partial": (0,),
    "copyreg._reconstructor": (0, 1),
    "copyreg.__newobj__": (0,),
    "copyreg.__newobj_ex__": (0,),
    "torch._tensor._rebuild_from_type_v2": (0, 1),
    "collections.defaultdict": (0,),
    "array._array_reconstructor": (0,),
    "numpy.ma.core._mareconstruct": (0, 1),
    **{f"{core}.multiarray._reconstruct": (0,) for core in ("numpy.core", "numpy._core")},
    **dict.fromkeys(GENERATOR_CONSTRUCTORS, (1,)),
    BIT_GENERATOR_CONSTRUCTOR: (0,),
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": (0,),
    "numpy.random._bit_generator.__pyx_unpickle_SeedSequence": (0,),
}
#: Enumerations, because pickle creates their members with a call; objects of other torch classes are created empty.
_CALLED_CLASSES = frozenset(f"torch.{package}amp.grad_scaler.OptState" for package in ("", "cuda."))
#: Names that return an object of the whole process, which a pickle must not change.
SHARED_OBJECTS = _SHARED_DATA | _CALLED_CLASSES | {"torch.serialization._get_layout"}
#: Functions that pickle calls to spell a value without a name; these calls do nothing else.
SPELLING_FUNCTIONS = frozenset(
    ["builtins.getattr", "builtins.type", "operator.getitem", "functools.reduce", "operator.or_"]
)
#: Classes of hooks that set an attribute, whose name is in their state, on any module that calls them.
HOOK_CLASSES = frozenset(
    [
        *qualify_names("torch.nn.utils.weight_norm", "WeightNorm"),
        *qualify_names(
            "torch.nn.utils.spectral_norm", "SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook"
        ),
        *qualify_names("torch.nn.modules.module", "_WrappedHook"),
        *(name for name in CLASSES if name.startswith("torch.nn.utils.prune.")),
    ]
)
#: Classes of settings, whose constructors open connections, create folders and search for devices.
_CONFIGURATION_PATTERN = compile_on_use(
    r"(?:transformers|accelerate|omegaconf|deepspeed|torch\.distributed\.(?:device_mesh|_shard\.sharded_tensor))\.(?:\w+\.)*[A-Z]\w*\Z"
)
#: Names of the standard library that are not data, but harmless.
_HARMLESS_NAMES = frozenset(qualify_names("operator", "itemgetter"))
#: Name of a member of an enumeration, which follows the name of the enumeration.
_MEMBER_NAME = compile_on_use(r"[A-Z][A-Z0-9_]*\Z", re.ASCII)

#: Known harms by the prefix of a name; the longest prefix counts.
_HARMS = name_lists.read_harms("harms")
#: Largest number of parts in these prefixes.
_MAX_HARM_PARTS = max(name.count(".") for name in _HARMS) + 1
#: Largest number of parts in a name that is looked up, because a pickle may have names of any length.
_MAX_NAME_PARTS = 32
#: Packages whose names are all harmful, except names on a list of clean names.
_HARMFUL_PACKAGE_NAMES = (
    "IPython aiohttp celery cloudpickle dill distutils fickling imp jax joblib keras lib2to3 mlflow modelscan"
    " pandas paramiko picklescan pip pkg_resources popen2 requests setuptools sympy tensorflow test urllib2 uv"
    " httplib commands _distutils_hack nbformat numba cffi _cffi_backend pexpect ptyprocess sh fabric invoke"
    " psutil jinja2 mako werkzeug django flask nltk yaml ruamel jsonpickle"
    " torch.utils torch.hub torchvision.io scipy.io"
)
_HARMFUL_PACKAGES = frozenset(_HARMFUL_PACKAGE_NAMES.split())
#: Names in pickled tables of pandas 2 and 3. They are unknown, because only other functions of pandas evaluate
#: expressions or read files.
_PANDAS_TABLES = compile_on_use(
    r"pandas\.(?:(?:core\.)?(?:arrays|dtypes|indexes|internals)\.[\w.]+|core\.frame\.DataFrame|core\.series\.Series"
    r"|_libs\.(?:arrays|internals|interval|missing|sparse|tslibs\.\w+)\.\w+"
    r"|DataFrame|Series|Categorical|Interval|Period|NA|\w*(?:Index|Dtype))",
    re.ASCII,
)
#: Classes of torch.fx, in any module that imports them, because loading compiles their contents as code.
_GRAPH_CLASSES = frozenset(["GraphModule", "Graph", "CodeGen"])
#: Harms of Python classes by the bare name, because other modules import these classes.
_CLASS_HARMS = name_lists.read_harms("aliases")
#: C modules -> public modules that export their names.
_C_MODULE_NAMES = {
    "_operator": "operator",
    "_functools": "functools",
    "_collections": "collections",
    "pathlib._local": "pathlib",
}
#: Standard modules of older and newer Python releases; `sys` lists those of the running Python.
_OTHER_MODULE_NAMES = (
    "__builtin__ nt posix annotationlib compression asynchat asyncore audioop aifc binhex bsddb cgi cgitb chunk"
    " commands crypt distutils dummy_threading formatter imghdr imp lib2to3 macpath mailcap msilib nis nntplib"
    " nturl2path parser pipes popen2 smtpd sndhdr spwd string sunau symbol telnetlib test tkinter turtledemo uu"
    " winreg xdrlib"
)
_STANDARD_LIBRARY = sys.stdlib_module_names | frozenset(_OTHER_MODULE_NAMES.split())


def is_clean(module: str, name: str, *, called: bool = False) -> bool:
    """Return True if a checkpoint may contain `module.name`. If `called`, the call must do no more than build data."""
    qualified = f"{module}.{name}"
    if may_be_named(qualified) or _TENSOR_FUNCTION_PATTERN.fullmatch(qualified):
        return not called
    # The pattern allows no further dot, because the module of a class also gives access to everything that it imports.
    return (
        qualified in DATA_NAMES
        or qualified in safe_globals.list_allowed_names()
        or is_class(qualified)
        or ("." not in name and _DATA_PATTERN.fullmatch(qualified) is not None)
        or is_member(qualified)
    )


def is_member(qualified: str) -> bool:
    """Return True if this is a member of an enumeration that occurs in checkpoints."""
    owner, _, member = qualified.rpartition(".")
    return _MEMBER_NAME.match(member) is not None and owner.partition(".")[0] != "builtins" and owner in DATA_NAMES


@lru_cache(maxsize=1024)
def is_class(qualified: str) -> bool:
    """Return True for a class of torch that only stores its arguments. Names from older releases of torch count too."""
    # Older releases of torch have the contents of torch.ao directly in torch.
    return qualified in CLASSES or qualified.replace("torch.", "torch.ao.", 1) in CLASSES


@lru_cache(maxsize=1024)
def computes_tensors(qualified: str) -> bool:
    """Return True for a function that computes tensors or numbers from tensors and numbers."""
    return qualified in _TENSOR_FUNCTIONS or _TENSOR_FUNCTION_PATTERN.fullmatch(qualified) is not None


@lru_cache(maxsize=1024)
def may_be_named(qualified: str) -> bool:
    """Return True for a name that a checkpoint may contain but must not call."""
    return qualified in _NAMED_NOT_CALLED or _DTYPE_CLASS_PATTERN.fullmatch(qualified) is not None


def is_hook_of_lazy_module(qualified: str, method: str) -> bool:
    """Return True if a lazy module of torch registers this method as a hook. Pickles store it as a `getattr` call."""
    return qualified in _LAZY_MODULES and method in _HOOKS_OF_LAZY_MODULES


@lru_cache(maxsize=1024)
def is_configuration(qualified: str) -> bool:
    """Return True for a class of settings whose constructor may open connections or create folders."""
    return _CONFIGURATION_PATTERN.match(qualified) is not None


def is_created_empty(qualified: str) -> bool:
    """Return True if pickle creates objects of this class empty, without calling the class."""
    if qualified in _CALLED_CLASSES or qualified in SHARED_OBJECTS:
        return False
    return is_class(qualified) or is_configuration(qualified)


def is_clean_mention(mention: Mention) -> bool:
    """Return True if the name, after renaming from Python 2 to 3, only builds checkpoint data."""
    return mention.loads_storages or is_clean(*rename_python2(mention.module, mention.name), called=mention.called)


def find_harm(mention: Mention) -> str | None:
    """Return the known harm of a name that is misused or not known as harmless; None if no harm is known."""
    harm = None
    if not is_clean_mention(mention):
        for module, name in (rename_python2(mention.module, mention.name), (mention.module, mention.name)):
            harm = harm or describe_harm(module, name, called=mention.called)
    return harm or mention.misuse


def may_be_harmful(qualified: str) -> bool:
    """Return True if a pickle may do harm with this dotted name. Any dot may end the name of the module."""
    parts = qualified.split(".")
    if len(parts) > _MAX_NAME_PARTS:
        return True
    divided = ((".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts)))
    return any(find_harm(Mention(module, name, 0, called=True)) for module, name in divided)


def describe_harm(module: str, name: str, *, called: bool = False) -> str | None:
    """Return a short description of the known harm of a name; None if unknown. Do not call this for harmless names."""
    parts = f"{module}.{name}".partition("[")[0].split(".")
    if get_plain_name(module, name) in _HARMLESS_NAMES:
        return None
    reason = _look_up_harm(parts)
    if is_cpp_class(".".join(parts)):
        return reason
    if any(part.startswith("__") and part.endswith("__") for part in parts[1:]):
        return reason or "reads any attribute, which gives access to any function"
    if parts[0] in _STANDARD_LIBRARY or (parts[0].startswith("_") and parts[0] not in ("__main__", "__mp_main__")):
        return reason or "is a part of Python that no checkpoint needs"
    if parts[0] in _HARMFUL_PACKAGES or ".".join(parts[:2]) in _HARMFUL_PACKAGES:
        is_table = "." not in name and _PANDAS_TABLES.fullmatch(f"{module}.{name}")
        return None if is_table else reason or "runs code or programs"
    return _look_up_alias(name.split(".")) or (
        _describe_torch_harm(parts, name, reason, called) if parts[0] in ("torch", "numpy") else None
    )


def _look_up_harm(parts: list[str]) -> str | None:
    longest = min(len(parts), _MAX_HARM_PARTS)
    return next((_HARMS[prefix] for end in range(longest, 0, -1) if (prefix := ".".join(parts[:end])) in _HARMS), None)


def _look_up_alias(parts: list[str]) -> str | None:
    """Return the harm of a standard module or class inside a name, such as `os` in `torch.os.system`; else None."""
    for at, part in enumerate(parts):
        if part in _HARMS and part in _STANDARD_LIBRARY and at + 1 < len(parts):
            return _look_up_harm(parts[at:])
    return _CLASS_HARMS.get(parts[-1])


def _describe_torch_harm(parts: list[str], name: str, reason: str | None, called: bool) -> str | None:
    """Return the harm of a name in torch or numpy; None for most classes, because these are harmless unless called."""
    if parts[0] == "torch" and parts[-1] in _GRAPH_CLASSES:
        return _HARMS["torch.fx"]
    is_class = parts[-1].lstrip("_")[:1].isupper() and "." not in name
    if is_class and reason == _HARMS[parts[0]]:
        return f"is a class of {parts[0]} that no checkpoint needs" if called else None
    return reason


def get_plain_name(module: str, name: str) -> str:
    """Return `module.name` as the tables of this module spell it: Python 3's name, and the public module."""
    module, name = rename_python2(module, name)
    return f"{_C_MODULE_NAMES.get(module, module)}.{name}"
