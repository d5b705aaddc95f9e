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
from statecli.requests.outcome import Caller, ExtraInputs, Outcome
from statecli.storage.files import STANDARD_INPUT
from statecli.targets import load


def prepare(options: ExplainOptions, caller: Caller, extra: ExtraInputs) -> Request | None:  # noqa: ARG001 - every command has the same signature
    """Return the request, or None for an error text on stdin. Raises UsageError without a class and a checkpoint."""
    if options.checkpoint is None:
        if options.model == STANDARD_INPUT:
            return None
        is_class = load.find_class_spec(options.model) is not None
        instruction = "give the checkpoint after the class" if is_class else "give a class and a checkpoint"
        raise UsageError(f"{options.model}: {instruction}: statecli explain net.py:Net model.pt")
    targets = options.model, options.checkpoint
    texts = [load.resolve_auto_class(text, other_text) for text, other_text in (targets, targets[::-1])]
    classes = [text for text in texts if load.find_class_spec(text) is not None]
    if len(classes) != 1:
        problem = "both are model classes" if classes else "neither is a model class"
        raise UsageError(f"{options.model} and {options.checkpoint}: {problem}; give a class and a checkpoint")
    model = classes[0]
    return Request(model, next(text for text in texts if text != model))


def run(options: ExplainOptions, request: Request | None, caller: Caller, extra: ExtraInputs) -> Outcome[Explanation]:  # noqa: ARG001
    """Explain why the checkpoint does not load, and return the report."""
    explanation = _explain_standard_input() if request is None else _explain(request, caller)
    return Outcome(explanation, build_explain_report(explanation, View(unfold=options.all, verbose=options.verbose)))


def _explain(request: Request, caller: Caller) -> Explanation:
    spec = load.find_class_spec(request.model)
    assert spec is not None  # noqa: S101 - checked by `prepare`
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
