"""Arguments in the spec of a model class, as values: `(32, act=nn.GELU, cfg=Config(depth=2))`. Nothing is evaluated.

A class of another package is `transformers:BertModel(...)` or `transformers.BertModel(...)`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from statecli.core.errors import UsageError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live.spec_objects import ObjectCall, ObjectName
from statecli.storage import files

#: A string, or a module and a name with a colon between them.
_STRING_OR_COLON = compile_on_use(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<![\w.])(?!(?:True|False|None)\b)[^\W\d][\w.]*:(?=[^\W\d])""", re.DOTALL
)
#: What stands for the colon in the syntax tree.
_COLON = "__colon__"
#: A whole argument that is the name of a repository or a model without quotes: `bert-base-uncased`.
_UNQUOTED = compile_on_use(r"(?:(?<=\A)|(?<==))(?:[A-Za-z][\w.]*/)?[A-Za-z][\w.]*(?:-[\w.]+)+(?=\)\Z)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def parse_arguments(text: str, rest: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse the arguments of the spec `text`: `rest` begins after the parenthesis. Raises UsageError."""
    quoted = _UNQUOTED.sub(r"'\g<0>'", rest)
    if quoted != rest and text.endswith(rest):
        raise UsageError(f"{text}: a name needs quotes; write {quote_for_shell(text.removesuffix(rest) + quoted)}")
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
    try:
        node = _parse_text(rest)
    except SyntaxError as error:
        problem = f"the arguments are not Python literals: {error.msg}"
        if not rest.rstrip().endswith(")"):
            problem = "the parenthesis after the class name is not closed"
        raise UsageError(f"{text}: {problem}{_suggest_closed(text, rest)}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{text}: the arguments cannot be read: {type(error).__name__}") from error
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        problem = "write one pair of parentheses with literal values, such as Net(hidden=32)"
        raise UsageError(f"{text}: {_suggest_first_call(text, rest, node) or problem}")
    return node


def _parse_text(rest: str) -> ast.expr:
    return ast.parse(f"f({_STRING_OR_COLON.sub(_replace_colon, rest.strip())}", mode="eval").body


def _suggest_closed(text: str, rest: str) -> str:
    """Return the line with the brackets closed that are open; "" if the line is not correct then."""
    if not text.endswith(rest):
        return ""
    open_brackets = [")"]
    for character in _STRING_OR_COLON.sub("", rest):
        if character in _BRACKETS:
            open_brackets.append(_BRACKETS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
    closed = rest.rstrip().rstrip(",") + "".join(reversed(open_brackets))
    try:
        is_call = isinstance(_parse_text(closed), ast.Call)
    except (SyntaxError, ValueError):
        return ""
    return f"; write {quote_for_shell(text.removesuffix(rest) + closed)}" if is_call else ""


def _suggest_first_call(text: str, rest: str, node: ast.expr) -> str:
    """Return the line without the code after the first call: `.cuda()`, `(x)`; "" for other code."""
    while not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        if not isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
            return ""
        node = node.func if isinstance(node, ast.Call) else node.value
    call = ast.get_source_segment(f"f({_STRING_OR_COLON.sub(_replace_colon, rest.strip())}", node) or ""
    call = call.replace(f".{_COLON}.", ":").removeprefix("f(")
    if not text.endswith(rest):
        return ""
    return f"name the class alone, without code after it; write {quote_for_shell(text.removesuffix(rest) + call)}"


def _replace_colon(match: re.Match[str]) -> str:
    return f"{match[0][:-1]}.{_COLON}." if match[0].endswith(":") else match[0]


def _convert_value(text: str, name: str, node: ast.expr) -> Any:
    """Return the value of an argument: a literal, a name, a class with arguments, or a list, tuple, set or dict."""
    if isinstance(node, ast.Constant) and node.value is ...:
        raise UsageError(f"{text}: write a value in place of `...` ({name}): a number, a string or a list")
    named = _find_name(node.func if isinstance(node, ast.Call) else node)
    if named is not None and isinstance(node, ast.Call):
        return ObjectCall(named.name, *_convert_arguments(text, node), named.module)
    if named is not None:
        return named
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_convert_value(text, name, item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {_read_literal(text, name, key): _convert_value(text, name, value) for key, value in pairs if key}
    return _read_literal(text, name, node)


def _find_name(node: ast.expr) -> ObjectName | None:
    """Return `nn.GELU` of a name with dots, without an underscore in front; None for other code."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    dotted = ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""
    module, colon, name = dotted.rpartition(f".{_COLON}.")
    if not name or any(part.startswith("_") for part in f"{module}.{name}".strip(".").split(".")):
        return None
    return ObjectName(name, module if colon else None)


def _read_literal(text: str, name: str, node: ast.expr) -> Any:
    try:
        return _restore_urls(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"{text}: {name} is code, not a literal; write a function that builds the model, and give this function "
            "instead: build.py:make"
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
