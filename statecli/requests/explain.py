"""Run `statecli explain` with its options and return its outcome."""

from __future__ import annotations

import sys

from statecli.commands.explain.result import Explanation
from statecli.commands.explain.run import Request, explain_targets
from statecli.commands.explain.torch_errors import MAX_CHARACTERS, explain_text
from statecli.core.errors import UsageError
from statecli.report import View
from statecli.report.explain import build_explain_report
from statecli.requests.options import ExplainOptions
from statecli.requests.outcome import Caller, Outcome
from statecli.storage.files import STANDARD_INPUT
from statecli.targets import load


def run(options: ExplainOptions, caller: Caller) -> Outcome[Explanation]:
    """Explain why the checkpoint does not load, or an error text on stdin. Raises UsageError for wrong targets."""
    if options.checkpoint is None and options.model == STANDARD_INPUT:
        explanation = _explain_standard_input()
    else:
        explanation = _explain(_build_request(options.model, options.checkpoint), caller)
    return Outcome(explanation, build_explain_report(explanation, View(unfold=options.all, verbose=options.verbose)))


def _build_request(model: str, checkpoint: str | None) -> Request:
    """Return the request for a class and a checkpoint in any order. Raises UsageError for any other targets."""
    if checkpoint is None:
        is_class = load.find_class_spec(model) is not None
        instruction = "give the checkpoint after the class" if is_class else "give a class and a checkpoint"
        raise UsageError(f"{model}: {instruction}: statecli explain net.py:Net model.pt")
    texts = [load.resolve_auto_class(model, checkpoint), load.resolve_auto_class(checkpoint, model)]
    classes = [text for text in texts if load.find_class_spec(text) is not None]
    if len(classes) != 1:
        problem = "both are model classes" if classes else "neither is a model class"
        raise UsageError(f"{model} and {checkpoint}: {problem}; give a class and a checkpoint")
    return Request(classes[0], next(text for text in texts if text != classes[0]))


def _explain(request: Request, caller: Caller) -> Explanation:
    spec = load.find_class_spec(request.model)
    assert spec is not None  # noqa: S101 - checked by `_build_request`
    with caller.progress(values=False):
        explanation = explain_targets(request, spec)
    caller.check_states(*explanation.states)
    return explanation


def _explain_standard_input() -> Explanation:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal; give a class and a checkpoint, or pipe the error text: "
            "python train.py 2>&1 | statecli explain"
        )
    return explain_text(sys.stdin.buffer.read(MAX_CHARACTERS).decode("utf-8", "replace"))
