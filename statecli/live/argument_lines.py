"""Lines of a model spec with other arguments: missing ones added, unknown names replaced, numbers without quotes."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live.configuration_argument import list_parameters
from statecli.live.object_scope import spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectName, format_call, map_items
from statecli.live.suggested_arguments import is_module_class, list_factories, write_values
from statecli.live.suggested_target import Advice, advise_line

_NUMBER = compile_on_use(r"-?\d+(\.\d+)?")
#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7
#: End of advice whose line has `...` in place of a value.
VALUES_TEXT = " with a number, a string or a list in place of each `...`"
#: Numbers to try for sizes, the same for all arguments, because channels must often divide another argument.
TRIED_NUMBERS = (3, 2, 8, 64)


def unquote_numbers(value: object) -> Any:
    """Replace each quoted number in an argument ('3') with the number, also inside lists and calls."""
    if type(value) is str:
        return ObjectName(value) if _NUMBER.fullmatch(value) else value
    return map_items(value, unquote_numbers)


def write_call(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> Advice:
    """Return advice to call with the missing arguments, and the model specs to try."""
    line = format_line(spec, dict.fromkeys(missing, ObjectName("...")))
    return Advice(f"write {line}{VALUES_TEXT}", list_lines(spec, callee, missing))


def format_line(spec: ModelSpec, values: Mapping[str, Any]) -> str:
    """Return the model spec with these further arguments, quoted for a shell."""
    return quote_for_shell(f"{spec.base}({format_call(spec.args, {**spec.kwargs, **values})})")


def list_lines(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> tuple[str, ...]:
    """Return model specs to try, with numbers for the missing arguments. Return () for a class in a user's file."""
    if spec.is_file:
        return ()
    values = (write_values(spec, callee, missing, number) for number in TRIED_NUMBERS)
    lines = [format_line(spec, argument_values) for argument_values in values if argument_values is not None]
    return tuple(dict.fromkeys([*lines, *list_factories(callee), *_list_owner(spec)]))


def _list_owner(spec: ModelSpec) -> list[str]:
    """Return [model spec of the class] for a method of a model class (`SchNet.from_qm9_pretrained`), otherwise []."""
    owner: Any = sys.modules.get(spec.module)
    for name in spec.attribute.split(".")[:-1]:
        owner = getattr(owner, name, None)
    attribute = spec.attribute.rpartition(".")[0]
    return [spell(replace(spec, attribute=attribute, called=False))] if is_module_class(owner) else []


def suggest_renamed(spec: ModelSpec, callee: Callee, candidates: Iterable[str]) -> Advice | None:
    """Return advice to rename unknown arguments to the most similar parameters, or None if no parameter is similar."""
    renamed_spec = rename_unknown(spec, callee, candidates)
    new_names = [name for name in renamed_spec.kwargs if name not in spec.kwargs]
    return advise_line(spell(renamed_spec), question=f"did you mean {' and '.join(new_names)}?") if new_names else None


def rename_unknown(spec: ModelSpec, callee: Callee, candidates: Iterable[str]) -> ModelSpec:
    """Return the model spec with each unknown argument in `candidates` renamed to the most similar parameter."""
    names = [parameter.name for parameter in list_parameters(callee) if parameter.name not in spec.kwargs]
    unknown = [name for name in candidates if name in spec.kwargs and not has_parameter(callee, name)]
    new_name_by_old = {
        name: near[0] for name in unknown if (near := difflib.get_close_matches(name, names, 1, _SIMILARITY))
    }
    return replace(spec, kwargs={new_name_by_old.get(name, name): value for name, value in spec.kwargs.items()})


def has_parameter(callee: Callee, name: str) -> bool:
    """Return True if the callee takes an argument of this name."""
    return any(parameter.name == name for parameter in list_parameters(callee))


def find_missing_arguments(callee: Callee, spec: ModelSpec) -> list[str]:
    """Return the names of required arguments that the model spec lacks, or [] if the callee has no signature."""
    try:
        bound = inspect.signature(callee).bind_partial(*spec.args, **spec.kwargs).arguments
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in list_parameters(callee)
        if parameter.default is parameter.empty and parameter.name not in bound
    ]
