"""Specs of model classes on the command line: `net.py:Net(hidden=32)`. Parsing imports nothing.

The grammar, by example: `net.py:Net`, `path/to/net.py:Net(32, act="gelu")`, `pkg.mod:factory`, `pkg.mod:Outer.Net`.
Arguments are Python literals, read by `ast.literal_eval` and never evaluated as code.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from statecli.core.errors import UsageError
from statecli.storage import files

#: What stands for a class in place of its name: the class that config.json names.
AUTO = "auto"
#: A left side of one letter is a Windows drive (`C:net`), never a module; write `./m.py:Net` for a file of that name.
_DRIVE = re.compile(r"[A-Za-z]")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class ModelSpec:
    """One model class, factory or instance, and the arguments to call it with.

    `module` is the path as typed when `is_file`, else a dotted module name. `called` says whether parentheses were
    written at all.
    """

    text: str
    module: str
    is_file: bool
    attribute: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    called: bool = False


def parse_spec(text: str) -> ModelSpec | None:
    """Parse a spec; return None for any other text (a path, a URL, a Windows drive).

    Raises UsageError for a spec with invalid arguments.
    """
    head, parenthesis, rest = text.partition("(")
    module, colon, attribute = head.strip().rpartition(":")
    attribute = attribute.strip()
    is_file = module.endswith(".py")
    if not colon or "://" in head or _DRIVE.fullmatch(module) or not _DOTTED.fullmatch(attribute):
        return None
    if not is_file and not _DOTTED.fullmatch(module):
        return None
    args, kwargs = _parse_arguments(text, rest) if parenthesis else ((), {})
    return ModelSpec(text, module, is_file, attribute, args, kwargs, bool(parenthesis))


def _parse_arguments(text: str, rest: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = _parse_call(text, rest)
    kwargs: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError(f"{text}: ** is not a literal; write each argument out")
        if keyword.arg in kwargs:
            raise UsageError(f"{text}: the argument {keyword.arg} is given twice")
        kwargs[keyword.arg] = _parse_literal(text, keyword.arg, keyword.value)
    return tuple(_parse_literal(text, f"argument {n}", node) for n, node in enumerate(call.args, 1)), kwargs


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
        raise UsageError(f"{text}: write one pair of parentheses with literals in it, like Net(hidden=32)")
    return node


def _parse_literal(text: str, name: str, node: ast.expr) -> Any:
    if any(isinstance(part, ast.Constant) and part.value is ... for part in ast.walk(node)):
        raise UsageError(f"{text}: write a value in place of ... ({name}): a number, a string or a list")
    try:
        return _restore_urls(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
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
