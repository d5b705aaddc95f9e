"""Parse the arguments in a model spec: `(32, act=nn.GELU, cfg=Config(depth=2))`. Nothing is evaluated.

A class of another package is `transformers:BertModel(...)` or `transformers.BertModel(...)`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import UsageError
from statecli.core.lazy_pattern import compile_on_use
from statecli.live.spec_objects import ObjectCall, ObjectName
from statecli.storage import files

#: A string, or a module and a name with a colon between them.
_STRING_OR_COLON = compile_on_use(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![\w.])(?!(?:True|False|None)\b)[^\W\d][\w.]*:(?=[^\W\d])""", re.DOTALL
)
#: Name that replaces the colon in the syntax tree.
_COLON_NAME = "__colon__"


class _CodeArgument(Exception):
    """Error: an argument is neither a literal nor a name."""


def parse_arguments(text: str, arguments_text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse `arguments_text`, the part of the spec `text` after its first parenthesis. Raises UsageError."""
    try:
        return _convert_arguments(text, _parse_call(text, arguments_text))
    except _CodeArgument as error:
        raise UsageError(f"{text}: {error}; put a text in quotes; for code, {BUILD_ADVICE}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text}: the arguments cannot be read: {type(error).__name__}") from error


def _convert_arguments(text: str, call: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _CodeArgument("** is not a literal")
        if keyword.arg in kwargs:
            raise UsageError(f"{text}: the argument {keyword.arg} is given twice")
        kwargs[keyword.arg] = _convert_value(text, keyword.arg, keyword.value)
    return tuple(_convert_value(text, f"argument {n}", node) for n, node in enumerate(call.args, 1)), kwargs


def _parse_call(text: str, arguments_text: str) -> ast.Call:
    code = f"f({_STRING_OR_COLON.sub(_replace_colon, arguments_text.strip())}"
    try:
        node = ast.parse(code, mode="eval").body
    except SyntaxError as error:
        problem = f"the arguments are not Python literals: {error.msg}"
        if not arguments_text.rstrip().endswith(")"):
            problem = "the parenthesis after the class name is not closed"
        raise UsageError(f"{text}: {problem}") from error
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node
    raise UsageError(f"{text}: write one pair of parentheses with literal values, such as Net(hidden=32)")


def _replace_colon(match: re.Match[str]) -> str:
    return f"{match[0][:-1]}.{_COLON_NAME}." if match[0].endswith(":") else match[0]


def _convert_value(text: str, name: str, node: ast.expr) -> Any:
    """Return the value of an argument: a literal, a name, a class with arguments, or a list, tuple, set or dict."""
    if isinstance(node, ast.Constant) and node.value is ...:
        raise UsageError(f"{text}: write a value in place of `...` ({name}): a number, a string or a list")
    object_name = _find_name(node.func if isinstance(node, ast.Call) else node)
    if object_name is not None and isinstance(node, ast.Call):
        return ObjectCall(object_name.name, *_convert_arguments(text, node), object_name.module)
    if object_name is not None:
        return object_name
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_convert_value(text, name, item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {_read_literal(name, key): _convert_value(text, name, value) for key, value in pairs if key}
    return _read_literal(name, node)


def _find_name(node: ast.expr) -> ObjectName | None:
    """Return the name in code such as `nn.GELU`, or None for other code and for private names such as `nn._x`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    dotted_name = ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""
    module, colon, name = dotted_name.rpartition(f".{_COLON_NAME}.")
    if not name or any(part.startswith("_") for part in f"{module}.{name}".strip(".").split(".")):
        return None
    return ObjectName(name, module if colon else None)


def _read_literal(name: str, node: ast.expr) -> Any:
    try:
        return _restore_urls(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError) as error:
        raise _CodeArgument(f"{name} is code, not a literal") from error


def _restore_urls(value: Any) -> Any:
    """Replace masked names in a literal with the URLs that the user typed."""
    if isinstance(value, str):
        return files.unmask_urls(value)
    if type(value) in (list, tuple, set):
        return type(value)(map(_restore_urls, value))
    return (
        {_restore_urls(key): _restore_urls(item) for key, item in value.items()} if isinstance(value, dict) else value
    )
