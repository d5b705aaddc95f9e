"""Suggest a model spec that needs no download: the class with random values, or the tensors of the repository."""

from __future__ import annotations

import traceback
from typing import Any

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live import hf_auto
from statecli.live.downloads import ALLOW, iter_causes
from statecli.live.spec import ModelSpec
from statecli.live.suggested_arguments import is_module_class

#: Argument of transformers' functions with the name of a repository.
_REPOSITORY_ARGUMENT = "pretrained_model_name_or_path"
#: `organization/name`.
_REPOSITORY = compile_on_use(r"[\w.-]+/[\w.-]+")


def advise(spec: ModelSpec, callee: Any, error: BaseException) -> str:
    """Return advice for a call that started a download: a model spec without downloads, and how to allow downloads."""
    repository = _find_repository(error)
    owner = getattr(callee, "__self__", None)  # the class of `from_pretrained`
    line = hf_auto.find_example(owner, repository or "")
    if line is None and is_module_class(owner):
        line = f"{spec.module}:{spec.attribute.rpartition('.')[0]}"
    if line is not None:
        return f"for random values, write {quote_for_shell(line)}, or {ALLOW}"
    if repository is not None and _REPOSITORY.fullmatch(repository):
        return f"to list the tensors of the repository, write hf://{repository}, or {ALLOW}"
    return ALLOW


def _find_repository(error: BaseException) -> str | None:
    """Return the repository in the arguments of the calls that raised the error, or None if there is none."""
    for cause in iter_causes(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            name = frame.f_locals.get(_REPOSITORY_ARGUMENT)
            if isinstance(name, str):
                return name
    return None
