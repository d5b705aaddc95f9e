"""Read the arguments of a class from the examples in its docstring: `>>> metric = SpeechQuality(8000, 'nb')`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from statecli.core.errors import StateError
from statecli.core.lazy_pattern import compile_on_use
from statecli.live.object_scope import Scope, spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_arguments import parse_example
from statecli.live.spec_objects import ObjectName, map_names

#: Prompt at the start of a line of an example.
_PROMPT = compile_on_use(r"^\s*(?:>>>|\.\.\.)", re.MULTILINE)
#: Largest number of examples, and of characters of a call.
_MAX_EXAMPLES = 3
_MAX_CALL_CHARACTERS = 2000


def list_lines(spec: ModelSpec, callee: Callee, scope: Scope) -> list[str]:
    """Return model specs with arguments from a class's docstring examples. Arguments that the user typed come first."""
    lines = []
    for args, kwargs in _iter_calls(callee):
        with suppress(StateError):
            values = [_resolve(scope, value) for value in args]
            kwargs_by_name = {name: _resolve(scope, value) for name, value in kwargs.items()}
            if spec.args or spec.kwargs:
                names = list(inspect.signature(callee).parameters)
                kwargs_by_name = {
                    **dict(zip(names, values, strict=False)),
                    **kwargs_by_name,
                    **dict(zip(names, spec.args, strict=False)),
                }
                values, kwargs_by_name = [], {**kwargs_by_name, **spec.kwargs}
            lines.append(spell(replace(spec, args=tuple(values), kwargs=kwargs_by_name, called=True)))
    return lines


def _iter_calls(callee: Callee) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    name = getattr(callee, "__name__", "")
    text = _PROMPT.sub("", inspect.getdoc(callee) or "")
    calls = list(re.finditer(rf"(?<![\w.`:]){re.escape(name)}\(", text)) if name else []
    for match in calls[:_MAX_EXAMPLES]:
        example = parse_example(text[match.end() : match.end() + _MAX_CALL_CHARACTERS])
        if example is not None and any(example):
            yield example


def _resolve(scope: Scope, value: object) -> Any:
    """Return the argument with full names. If a list has unknown names, keep only one known item. Raises StateError."""
    if type(value) is list:
        resolved_items = []
        for item in value:
            with suppress(StateError):
                resolved_items.append(_resolve(scope, item))
        return resolved_items if len(resolved_items) == len(value) else resolved_items[:1]
    return map_names(value, lambda object_name: _find_name(scope, object_name))


def _find_name(scope: Scope, object_name: ObjectName) -> ObjectName:
    rewritten = scope.rewrite(object_name)
    full_name: ObjectName = object_name if not isinstance(rewritten, ObjectName) else rewritten
    scope.find(full_name)
    return full_name
