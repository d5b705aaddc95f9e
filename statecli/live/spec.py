"""Specs of model classes on the command line: `net.py:Net(hidden=32)`. Parsing imports nothing.

The grammar, by example: `net.py:Net`, `path/to/net.py:Net(32, act="gelu")`, `pkg.mod:factory`, `pkg.mod:Outer.Net`,
`net.py:Net(cfg=Config(depth=2), act=nn.GELU)`. Arguments are Python literals, names, and classes called with such
arguments; arguments are read from the syntax tree and never evaluated as code (see `constructor_arguments`). Two
options may follow: `net.py:Net --config-json net.json`, `folder --trust-remote-code`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import msgspec

from statecli import live
from statecli.core.installed_package import MODEL_LIBRARIES
from statecli.core.lazy_pattern import compile_on_use

#: Class or function that a spec names, of any arguments and result.
Callee = Callable[..., Any]

#: Text in place of a class name: the class that config.json names.
AUTO = "auto"
#: A left side of one letter is a Windows drive (`C:net`), never a module; write `./m.py:Net` for a file of that name.
_DRIVE = compile_on_use(r"[A-Za-z]")
_DOTTED = compile_on_use(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
#: Options of a class, at the end of its text.
_OPTIONS = compile_on_use(
    r"(?P<model>.*?)(?P<trust> --trust-remote-code)?(?: --config-json (?P<config_json>.+))?\Z", re.DOTALL
)


class ClassOptions(msgspec.Struct, frozen=True):
    """Options at the end of a model spec, such as `--trust-remote-code`.

    `config_json`: a file with the fields of the class's configuration. `trusts_code`: the code of the checkpoint may be
    imported.
    """

    config_json: str | None = None
    trusts_code: bool = False


class ModelSpec(msgspec.Struct, frozen=True):
    """A model class, factory or instance, and the arguments of its call.

    `module` is the path as typed when `is_file`, else a dotted module name. `called`: whether parentheses were written
    at all. `config` is the configuration file for building the model, in place of a call by the user. `is_library`: the
    spec names an installed package, and nothing else is imported.
    """

    text: str
    module: str
    is_file: bool
    attribute: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    called: bool = False
    options: ClassOptions = ClassOptions()
    config: str | None = None
    is_library: bool = False

    @property
    def base(self) -> str:
        """Model spec of the class without arguments: `net.py:Net`."""
        return f"{self.module}:{self.attribute}"


def split_class_options(text: str) -> tuple[str, ClassOptions]:
    """Split a model spec into the text before its options, and the options.

    The path of a file or folder has no options: a stranger may have named a folder `model --trust-remote-code`.
    """
    if " --" not in text or os.path.lexists(text):
        return text, ClassOptions()
    match = _OPTIONS.match(text)
    assert match is not None  # noqa: S101 - the expression matches any text
    return match["model"], ClassOptions(match["config_json"], match["trust"] is not None)


def correct_package(name: str) -> str:
    """Return a module name with the import name of its package: torch_geometric.nn for torch-geometric.nn."""
    top, dot, submodules = name.partition(".")
    module = top.replace("-", "_")
    return f"{module}{dot}{submodules}" if module in MODEL_LIBRARIES else name


def parse_spec(text: str) -> ModelSpec | None:
    """Parse a model spec, or return None for any other text (a path, a URL, a Windows drive).

    Raises UsageError for a spec with invalid arguments.
    """
    model, options = split_class_options(text)
    head, parenthesis, arguments_text = model.partition("(")
    module, colon, attribute = head.strip().rpartition(":")
    attribute = attribute.strip() if parenthesis else attribute.rstrip(" ,;")
    attribute = attribute.removeprefix(f"{module}/")  # timm/resnet18, the repository of timm:resnet18
    is_file = module.endswith(".py")
    module = module if is_file else correct_package(module)
    if not colon or "://" in head or _DRIVE.fullmatch(module) or not _DOTTED.fullmatch(attribute):
        return None
    if not is_file and not _DOTTED.fullmatch(module):
        return None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if parenthesis:
        args, kwargs = live.spec_arguments.parse_arguments(text, arguments_text)
    return ModelSpec(text, module, is_file, attribute, args, kwargs, bool(parenthesis), options)
