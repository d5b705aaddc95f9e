"""Explain errors in the constructor arguments of a model spec (`net.py:Net(3)`): what is missing, unknown or wrong."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from msgspec.structs import replace

from statecli.core import build_function
from statecli.core.errors import ModelError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import join_names
from statecli.live.argument_lines import find_missing_arguments, has_parameter, rename_unknown
from statecli.live.object_scope import spell
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import format_call
from statecli.live.suggested_arguments import write_values

#: Prefix of class names in messages: the module name under which statecli imports a file.
_MODULE_OF_FILE = compile_on_use(r"\b_statecli_\d+_\w+\.")


def explain_arguments(spec: ModelSpec, callee: Callee) -> ModelError | None:
    """Return an error that explains how to pass the arguments of a model spec, or None if they fit the signature."""
    try:
        signature = inspect.signature(callee)
    except (TypeError, ValueError):  # a function of C++
        return None
    try:
        signature.bind(*spec.args, **spec.kwargs)
    except TypeError as mismatch:
        return _explain_mismatch(spec, callee, signature, mismatch)
    return None


def _explain_mismatch(spec: ModelSpec, callee: Callee, signature: inspect.Signature, mismatch: TypeError) -> ModelError:
    renamed_spec = rename_unknown(spec, callee)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    known = {name: value for name, value in renamed_spec.kwargs.items() if takes_any or has_parameter(callee, name)}
    unknown = [name for name in renamed_spec.kwargs if name not in known]
    known_spec = replace(renamed_spec, kwargs=known)
    missing = find_missing_arguments(callee, known_spec)
    if missing:
        callee_kind = "constructor" if isinstance(callee, type) else "function"
        refusal = f" and does not take {join_names(unknown)}" if unknown else ""
        problem = f"{spec.text}: the {callee_kind} needs {join_names(missing)}{refusal}"
        return ModelError(problem, advice=_advise_missing(known_spec, callee, missing))
    new_names = [name for name in known if name not in spec.kwargs]
    if new_names and not unknown:
        advice = f"did you mean {' and '.join(new_names)}? write {spell(renamed_spec)}"
    else:
        advice = f"its signature is {spec.attribute}{_MODULE_OF_FILE.sub('', ' '.join(str(signature).split()))}"
    return ModelError(f"{spec.text}: {' '.join(str(mismatch).split())}", advice=advice)


def _advise_missing(spec: ModelSpec, callee: Callee, missing: Sequence[str]) -> str:
    """Return advice for missing arguments: a model spec with them, or a function to write."""
    values = write_values(spec, callee, missing)
    if values is None:
        return build_function.BUILD_ADVICE
    return build_function.spell(f"{spec.base}({format_call(spec.args, {**spec.kwargs, **values})})")
