"""Parse the arguments in a model spec: `(32, act=nn.GELU, cfg=Config(depth=2))`. Nothing is evaluated.

A class of another package is `transformers:BertModel(...)` or `transformers.BertModel(...)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import UsageError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live.misspelt_arguments import MisspeltArguments
from statecli.live.spec_objects import ObjectCall, ObjectName
from statecli.storage import files

#: A string, or a module and a name with a colon between them.
_STRING_OR_COLON = compile_on_use(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![\w.])(?!(?:True|False|None)\b)[^\W\d][\w.]*:(?=[^\W\d])""", re.DOTALL
)
#: Name that replaces the colon in the syntax tree.
_COLON_NAME = "__colon__"
#: A string, or a whole argument that is the name of a repository or a model without quotes: `bert-base-uncased`.
_STRING_OR_NAME = compile_on_use(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|"""
    r"(?:(?<=\A)|(?<=[=,(\[ ]))(?P<name>[A-Za-z][\w.]*(?:-[\w.]+|/[A-Za-z][\w.-]*)+)(?=\s*[,)\]])",
    re.DOTALL,
)
#: An argument with a quote at only one end.
_HALF_QUOTED = compile_on_use(
    r"(?:(?<=\A)|(?<=[=,(\[ ]))(?:['\"](?P<opened>[\w./-]+)|(?P<closed>[\w./-]+)['\"])(?=\s*[,)\]])"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def parse_example(code: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a call in a docstring, or None if unreadable. A list with code keeps only one literal.

    `code` begins after the parenthesis of the call.
    """
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError, UsageError, _CodeArgument):
        call = ast.parse(f"f({_cut_after_call(code)}", mode="eval").body
        for node in ast.walk(call):
            if isinstance(node, ast.List):
                literal_items = [item for item in node.elts if _is_value(item)]
                node.elts = literal_items if len(literal_items) == len(node.elts) else literal_items[:1]
        return _convert_arguments("", call) if isinstance(call, ast.Call) else None
    return None


def _is_value(node: ast.expr) -> bool:
    try:
        _convert_value("", "", node)
    except (UsageError, _CodeArgument):
        return False
    return True


class _CodeArgument(Exception):
    """Error: an argument is neither a literal nor a name."""


def parse_arguments(text: str, arguments_text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse `arguments_text`, the part of the spec `text` after its first parenthesis. Raises UsageError."""
    quoted_arguments = _STRING_OR_NAME.sub(_quote_name, arguments_text)
    if quoted_arguments != arguments_text and text.endswith(arguments_text):
        raise MisspeltArguments(f"{text}: a name needs quotes", _write_line(text, arguments_text, quoted_arguments))
    try:
        return _convert_arguments(text, _parse_call(text, arguments_text))
    except _CodeArgument as error:
        raise UsageError(f"{text}: {error}; {BUILD_ADVICE}") from error
    except (RecursionError, MemoryError) as error:
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
    problem = "write one pair of parentheses with literal values, such as Net(hidden=32)"
    cause: Exception | None = None
    try:
        node = _parse_text(arguments_text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node
    except SyntaxError as error:
        problem, cause = f"the arguments are not Python literals: {error.msg}", error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text}: the arguments cannot be read: {type(error).__name__}") from error
    call = _cut_after_call(arguments_text)
    if call and _is_call(call) and text.endswith(arguments_text):
        problem = "name the class alone, without code after it"
        raise MisspeltArguments(f"{text}: {problem}", _write_line(text, arguments_text, call)) from cause
    if cause is not None and not arguments_text.rstrip().endswith(")"):
        problem = "the parenthesis after the class name is not closed"
    line = _suggest_closed(text, arguments_text) if cause is not None else ""
    raise (MisspeltArguments(f"{text}: {problem}", line) if line else UsageError(f"{text}: {problem}")) from cause


def _quote_name(match: re.Match[str]) -> str:
    return match[0] if match["name"] is None else f"'{match['name']}'"


def _write_line(text: str, arguments_text: str, corrected: str) -> str:
    return quote_for_shell(text.removesuffix(arguments_text) + corrected)


def _parse_text(arguments_text: str) -> ast.expr:
    return ast.parse(f"f({_STRING_OR_COLON.sub(_replace_colon, arguments_text.strip())}", mode="eval").body


def _suggest_closed(text: str, arguments_text: str) -> str:
    """Return the model spec with missing brackets or quotes added, or "" if it still cannot be parsed."""
    if not text.endswith(arguments_text):
        return ""
    with_closed_quote = _HALF_QUOTED.sub(
        lambda match: f"'{match['opened'] or match['closed']}'", f"{arguments_text.rstrip(' ,;)')})"
    )
    if any(arguments_text.count(quote) % 2 for quote in "'\"") and _is_call(with_closed_quote):
        return _write_line(text, arguments_text, with_closed_quote)
    open_brackets = [")"]
    for _, open_brackets in _iter_open_brackets(arguments_text):  # noqa: B007  # the last
        pass
    with_closed_brackets = arguments_text.rstrip(" ,;") + "".join(reversed(open_brackets))
    return _write_line(text, arguments_text, with_closed_brackets) if _is_call(with_closed_brackets) else ""


def _cut_after_call(arguments_text: str) -> str:
    """Return the arguments up to the parenthesis that closes the call, or "" if this parenthesis is missing."""
    return next((arguments_text[:end] for end, brackets in _iter_open_brackets(arguments_text) if not brackets), "")


def _iter_open_brackets(arguments_text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each position in the text, and the closing brackets that are missing there. Ignore brackets in strings."""
    open_brackets = [")"]
    for end, character in enumerate(_STRING_OR_COLON.sub(lambda match: "_" * len(match[0]), arguments_text), 1):
        if character in _BRACKETS:
            open_brackets.append(_BRACKETS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        yield end, open_brackets


def _is_call(arguments_text: str) -> bool:
    try:
        return isinstance(_parse_text(arguments_text), ast.Call)
    except (SyntaxError, ValueError):
        return False


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
