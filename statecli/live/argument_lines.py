"""Compare the arguments of a model spec with the parameters of its class: missing and misspelt arguments."""

from __future__ import annotations

import difflib
import inspect

from msgspec.structs import replace

from statecli.live.configuration_argument import list_parameters
from statecli.live.spec import Callee, ModelSpec

#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7


def rename_unknown(spec: ModelSpec, callee: Callee) -> ModelSpec:
    """Return the model spec with each unknown argument renamed to the most similar parameter."""
    names = [parameter.name for parameter in list_parameters(callee) if parameter.name not in spec.kwargs]
    unknown = [name for name in spec.kwargs if not has_parameter(callee, name)]
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
