"""Specs of model classes on the command line: `net.py:Net(hidden=32)`. Parsing imports nothing.

The grammar, by example: `net.py:Net`, `path/to/net.py:Net(32, act="gelu")`, `pkg.mod:factory`, `pkg.mod:Outer.Net`,
`net.py:Net(cfg=Config(depth=2), act=nn.GELU)`. Arguments are Python literals, names, and classes called with such
arguments; they are read from the syntax tree and never evaluated as code (see `constructor_arguments`). Two options may
follow: `net.py:Net --config-json net.json`, `folder --trust-remote-code`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from statecli.core.errors import UsageError
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import files

#: What stands for a class in place of its name: the class that config.json names.
AUTO = "auto"
#: A left side of one letter is a Windows drive (`C:net`), never a module; write `./m.py:Net` for a file of that name.
_DRIVE = compile_on_use(r"[A-Za-z]")
_DOTTED = compile_on_use(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
#: The options that belong to a class, at the end of its text.
_OPTIONS = compile_on_use(
    r"(?P<model>.*?)(?P<trust> --trust-remote-code)?(?: --config-json (?P<config_json>.+))?\Z", re.DOTALL
)


class ObjectName(msgspec.Struct, frozen=True):
    """A name in the arguments of a class: `nn.GELU`."""

    name: str

    def __repr__(self) -> str:
        return self.name


class ObjectCall(msgspec.Struct, frozen=True):
    """A class in the arguments of a class, and the arguments to call it with: `Config(depth=2)`."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{self.name}({format_call(self.args, self.kwargs)})"


def format_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments as written in a call."""
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


class ClassOptions(msgspec.Struct, frozen=True):
    """The options at the end of a spec.

    `config_json`: a file with the fields of the class's configuration. `trusts_code`: the code of the checkpoint may be
    imported.
    """

    config_json: str | None = None
    trusts_code: bool = False


class ModelSpec(msgspec.Struct, frozen=True):
    """One model class, factory or instance, and the arguments to call it with.

    `module` is the path as typed when `is_file`, else a dotted module name. `called` says whether parentheses were
    written at all. `config` is the configuration file from which the model is built, in place of a call of the user's.
    `is_library`: names an installed package, so that nothing else is imported.
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
        """The class without arguments: `net.py:Net`."""
        return f"{self.module}:{self.attribute}"


def split_class_options(text: str) -> tuple[str, ClassOptions]:
    """Return the text without the options at its end, and the options."""
    match = _OPTIONS.match(text)
    assert match is not None  # noqa: S101 - the expression matches any text
    return match["model"], ClassOptions(match["config_json"], match["trust"] is not None)


def parse_spec(text: str) -> ModelSpec | None:
    """Parse a spec; return None for any other text (a path, a URL, a Windows drive).

    Raises UsageError for a spec with invalid arguments.
    """
    model, options = split_class_options(text)
    head, parenthesis, rest = model.partition("(")
    module, colon, attribute = head.strip().rpartition(":")
    attribute = attribute.strip()
    is_file = module.endswith(".py")
    if not colon or "://" in head or _DRIVE.fullmatch(module) or not _DOTTED.fullmatch(attribute):
        return None
    if not is_file and not _DOTTED.fullmatch(module):
        return None
    args, kwargs = _parse_arguments(text, rest) if parenthesis else ((), {})
    return ModelSpec(text, module, is_file, attribute, args, kwargs, bool(parenthesis), options)


def _parse_arguments(text: str, rest: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return _convert_arguments(text, _parse_call(text, rest))
    except (RecursionError, MemoryError) as error:
        raise UsageError(f"{text}: the arguments cannot be read: {type(error).__name__}") from error


def _convert_arguments(text: str, call: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError(f"{text}: ** is not a literal; write each argument out")
        if keyword.arg in kwargs:
            raise UsageError(f"{text}: the argument {keyword.arg} is given twice")
        kwargs[keyword.arg] = _convert_value(text, keyword.arg, keyword.value)
    return tuple(_convert_value(text, f"argument {n}", node) for n, node in enumerate(call.args, 1)), kwargs


def _parse_call(text: str, rest: str) -> ast.Call:
    if not rest.rstrip().endswith(")"):
        raise UsageError(f"{text}: the parenthesis after the class name is not closed")
    try:
        node = ast.parse(f"f({rest.strip()}", mode="eval").body
    except SyntaxError as error:
        raise UsageError(f"{text}: the arguments are not Python literals: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text}: the arguments cannot be read: {type(error).__name__}") from error
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UsageError(f"{text}: write one pair of parentheses with literal values, such as Net(hidden=32)")
    return node


def _convert_value(text: str, name: str, node: ast.expr) -> Any:
    """Return the value of an argument: a literal, a name, a class with arguments, or a list, tuple, set or dict."""
    if isinstance(node, ast.Constant) and node.value is ...:
        raise UsageError(f"{text}: write a value in place of ... ({name}): a number, a string or a list")
    dotted = _find_dotted_name(node.func if isinstance(node, ast.Call) else node)
    if dotted is not None and isinstance(node, ast.Call):
        return ObjectCall(dotted, *_convert_arguments(text, node))
    if dotted is not None:
        return ObjectName(dotted)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_convert_value(text, name, item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {_read_literal(text, name, key): _convert_value(text, name, value) for key, value in pairs if key}
    return _read_literal(text, name, node)


def _find_dotted_name(node: ast.expr) -> str | None:
    """Return `nn.GELU` of a name with dots, without an underscore in front; None for other code."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    names = [*parts, node.id] if isinstance(node, ast.Name) else []
    return ".".join(reversed(names)) if names and not any(part.startswith("_") for part in names) else None


def _read_literal(text: str, name: str, node: ast.expr) -> Any:
    try:
        return _restore_urls(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"{text}: {name} is code, not a literal; write a function that builds the model, and name it: build.py:make"
        ) from error


def _restore_urls(value: Any) -> Any:
    """Return a literal with the typed URLs in place of their masked names in `text`."""
    if isinstance(value, str):
        return files.unmask_urls(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(_restore_urls, value))
    return (
        {_restore_urls(key): _restore_urls(item) for key, item in value.items()} if isinstance(value, dict) else value
    )
