"""Suggest a model class for an error of `transformers.pipeline`, by the task that the user typed."""

from __future__ import annotations

import difflib
import sys
from typing import Any

from statecli.core.quoting import quote_for_shell
from statecli.live import hf_auto
from statecli.live.exception_text import get_exception_text
from statecli.live.spec import ModelSpec
from statecli.live.suggested_target import Advice

#: Task whose model an error names if no task is more similar.
_DEFAULT_TASK = "text-generation"
#: Least similarity of a suggested task, from 0 to 1.
_SIMILARITY = 0.7


def suggest_model(spec: ModelSpec, error: BaseException) -> Advice | None:
    """Return advice with a model of the task most similar to the typed task, or None if no model is known."""
    library: Any = sys.modules.get("transformers.pipelines")
    if library is None or (spec.module, spec.attribute) != ("transformers", "pipeline"):
        return None

    tasks, text = library.SUPPORTED_TASKS, get_exception_text(error)
    typed_task = spec.kwargs.get("task", spec.args[0] if spec.args else "")
    similar_tasks = difflib.get_close_matches(typed_task, tasks, 1, _SIMILARITY) if type(typed_task) is str else []
    task = next(iter([*similar_tasks, *(task_name for task_name in tasks if f"`{task_name}`" in text)]), _DEFAULT_TASK)
    example = next(filter(None, map(hf_auto.find_example, tasks[task]["pt"])), None)
    if example is None:
        return None
    line = quote_for_shell(example)
    return Advice(f"for a model of {task}, write {line}", (line,))
