"""A training step: which tensors get a gradient, which the optimizer updates, which forward changes by itself."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field

import torch

from statecli.errors import UsageError
from statecli.finding import Finding, Severity
from statecli.state import Kind, TensorInfo
from statecli.verify import training
from statecli.verify.result import Cell, Check, Column, Name, Verdict
from statecli.verify.subject import Subject
from statecli.verify.training import Seen, Training

_DIGITS = re.compile(r"\d+")


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of torch.optim by its name in whatever case. Raises UsageError where there is none."""
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key != "Optimizer"
    }
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
    raise UsageError(f"--optimizer {name}: torch.optim has no such class; {hint}")


@dataclass
class _Verdicts:
    """What is said of the tensors of one training."""

    run: Training
    rows: dict[str, TensorInfo]
    used: frozenset[str] | None = None
    gradient: dict[str, Cell] = field(default_factory=dict)
    updated: dict[str, Cell] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def fail(self, rule: str, fqn: str, why: str, help: str, severity: Severity = Severity.ERROR) -> Cell:
        """A failed cell and its finding; the help ends with the line that assigned the tensor."""
        row = self.rows.get(fqn)
        origin = f" ({row.origin.file}:{row.origin.line})" if row and row.origin else ""
        target = self.run.subject.target
        self.findings.append(Finding(rule, severity, f"{fqn} {why}", target, fqn, f"{help}{origin}"))
        return Cell(Verdict.FAILED, reason=why)


def prove(subject: Subject, optimizer: str = "sgd") -> Check:
    """Train a fresh instance for up to three rounds in train mode, and look at each tensor before and after.

    `optimizer` is a class of torch.optim by its name in lower case. Columns: `gradient` and `updated` of what requires
    grad, `forward updates` of what forward changes. Raises UsageError for an unknown optimizer, ModelError where the
    model's own code raises.
    """
    made_by = optimizer_class(optimizer)
    if subject.inputs is None:
        return Check(Name.STEP, Verdict.SKIPPED, reason=subject.no_inputs)
    if any(row.device == "meta" for row in subject.state.tensors):
        return Check(Name.STEP, Verdict.SKIPPED, reason="it was built on meta and holds no values to train")
    run, why_not = training.train(subject, made_by)
    if why_not:
        return Check(Name.STEP, Verdict.INCONCLUSIVE, _how(run), why_not, _forward_updates(run))
    return _judged(run)


def _how(run: Training) -> str:
    inputs = run.subject.inputs
    given = f"on {inputs.text}" if inputs else ""
    if not run.seen:
        return f"forward in train mode {given}"
    rounds = f"{run.rounds} round{'s' if run.rounds != 1 else ''}"
    return f"{rounds} of forward, backward and {run.made_by.__name__} in train mode {given}"


def _judged(run: Training) -> Check:
    verdicts = _Verdicts(run, run.subject.rows())
    if any(_is_without(seen) for seen in run.seen.values()):
        verdicts.used = training.used_in_forward(run)
    for name, seen in run.seen.items():
        verdicts.gradient[name] = _gradient(verdicts, name, seen)
        verdicts.updated[name] = _updated(verdicts, name, seen)
    for name in sorted(run.frozen - set(run.seen)):
        verdicts.updated[name] = _frozen(verdicts, name)
    judged = (Column("gradient", verdicts.gradient), Column("updated", verdicts.updated))
    columns = (*(column for column in judged if column.cells), *_forward_updates(run))
    verdict, reason = _verdict(verdicts)
    return Check(Name.STEP, verdict, _how(run), reason, columns, tuple(verdicts.findings))


def _verdict(verdicts: _Verdicts) -> tuple[Verdict, str | None]:
    if verdicts.findings:
        return Verdict.FAILED, None
    unclear = _unclear(verdicts)
    if unclear:
        return Verdict.INCONCLUSIVE, unclear
    if verdicts.run.seen:
        return Verdict.PASSED, None
    return Verdict.SKIPPED, "no parameter requires grad, so there is nothing to train"


def _unclear(verdicts: _Verdicts) -> str | None:
    """The first tensor of which it cannot be told, and how many more there are."""
    cells = [*verdicts.gradient.items(), *verdicts.updated.items()]
    found = {name: cell.reason for name, cell in reversed(cells) if cell.verdict is Verdict.INCONCLUSIVE}
    if not found:
        return None
    name, reason = list(found.items())[-1]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{name}{more}: {reason}"


# --- gradient -----------------------------------------------------------------------------------------------


def _is_without(seen: Seen) -> bool:
    return seen.trained and seen.peak is None and seen.broken is None


def _gradient(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    if seen.broken is not None:
        return _not_finite(verdicts, name, seen)
    if seen.peak is not None:
        return Cell(Verdict.PASSED, after=f"{seen.peak:.3g}")
    if not seen.trained:
        return Cell(Verdict.SKIPPED, reason="it gets no gradient")
    if any(peak is not None for peak in seen.peaks):
        return _zero(verdicts, name)
    siblings = _chosen_by_inputs(verdicts.run, name)
    if siblings:
        reason = f"no input chose it; {siblings} got a gradient in some rounds only: give more inputs"
        return Cell(Verdict.INCONCLUSIVE, reason=reason)
    inputs = verdicts.run.subject.inputs
    if verdicts.used is not None and name not in verdicts.used and inputs and not inputs.given:
        reason = (
            "forward does not use it with the inputs that were found: say with --input or --inputs how it is called"
        )
        return Cell(Verdict.INCONCLUSIVE, reason=reason)
    return _none(verdicts, name)


def _not_finite(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    what = "NaN" if any(peak is not None and math.isnan(peak) for peak in seen.peaks) else "infinite"
    if not verdicts.run.finite:
        reason = f"its gradient is {what}, and so is something in the output: give inputs that the model is made for"
        return Cell(Verdict.INCONCLUSIVE, reason=reason)
    why = f"gets a gradient with {what} elements in round {seen.broken}, though every output is finite"
    help = (
        "look for sqrt, norm or a division at zero, and for torch.where around them; torch.autograd.set_detect_anomaly"
    )
    return verdicts.fail("non-finite-gradient", name, why, help)


def _zero(verdicts: _Verdicts, name: str) -> Cell:
    rounds = verdicts.run.rounds
    why = f"gets a gradient that is zero everywhere, in each of {rounds} rounds"
    help = "what comes of it is multiplied by zero, or cancels out, before the output"
    return verdicts.fail("zero-gradient", name, why, help, Severity.WARNING)


def _none(verdicts: _Verdicts, name: str) -> Cell:
    if verdicts.run.cut_off:
        why = "gets no gradient: nothing that forward gives requires grad"
        help = "forward runs under torch.no_grad() or detaches what it gives"
    elif verdicts.used is None:
        why = "gets no gradient: forward does not use it, or cuts it off from the output"
        help = "use it in forward, or freeze it with requires_grad_(False)"
    elif name in verdicts.used:
        why = "gets no gradient: forward uses it and cuts it off from the output"
        help = "look for detach(), .data, torch.no_grad() or an integer step behind it; if meant, requires_grad_(False)"
    else:
        why = "gets no gradient: forward does not use it"
        help = "use it in forward, delete it, or freeze it with requires_grad_(False)"
    return verdicts.fail("no-gradient", name, why, help)


def _chosen_by_inputs(run: Training, name: str) -> str | None:
    """A tensor of the same name but for its numbers that got a gradient in some rounds and none in others."""
    alike = _DIGITS.sub("#", name)
    for other, seen in run.seen.items():
        if other != name and seen.peak is not None and None in seen.peaks and _DIGITS.sub("#", other) == alike:
            return other
    return None


# --- updated ------------------------------------------------------------------------------------------------


def _updated(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    if not seen.trained:
        return _left_out(verdicts, name, seen)
    if seen.updated:
        return Cell(Verdict.PASSED, after="changed")
    if seen.peak is None:
        return Cell(Verdict.SKIPPED, reason="there was no gradient to update it by")
    if seen.updated is None:
        return Cell(Verdict.INCONCLUSIVE, reason="its values cannot be compared")
    if seen.lost is not None:
        dtype = str(seen.tensor.dtype).removeprefix("torch.")
        reason = f"an update of {training.RATE} is lost in the rounding of {dtype} at {seen.lost:.3g}"
        return Cell(Verdict.INCONCLUSIVE, reason=reason)
    why = f"has a gradient, and {verdicts.run.made_by.__name__} does not change it"
    return verdicts.fail("not-updated", name, why, "look for a hook that undoes its update")


def _left_out(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    row = verdicts.rows[name]
    severity = Severity.WARNING if seen.peak is None else Severity.ERROR
    if name in verdicts.run.replaced:
        why = "is replaced in forward by a new tensor, and the optimizer trains the old one"
        return verdicts.fail(
            "not-in-optimizer", name, why, "change its values in place, or compute it under another name"
        )
    if row.kind is Kind.UNREGISTERED:
        why = "requires grad and is not registered: model.parameters() leaves it out, and no optimizer trains it"
    elif row.kind is Kind.BUFFER:
        why = "requires grad and is a buffer: model.parameters() leaves it out, and no optimizer trains it"
    else:
        why = "is a parameter that the model's own parameters() leaves out: no optimizer trains it"
    return verdicts.fail("not-in-optimizer", name, why, row.fix or _made_trainable(row), severity)


def _made_trainable(row: TensorInfo) -> str:
    if row.kind is Kind.BUFFER:
        attribute = row.fqn.rpartition(".")[2]
        return f"self.{attribute} = nn.Parameter(...) to train it; detach() it where it is registered if not"
    return "register it as nn.Parameter to train it; requires_grad_(False) if not"


def _frozen(verdicts: _Verdicts, name: str) -> Cell:
    cause = verdicts.run.changed_by.get(name)
    if cause is None:
        return Cell(Verdict.SKIPPED, reason="frozen, and unchanged")
    if cause == "forward":
        why, help = "is frozen, and forward changes it", "make it a buffer if forward is to change it"
        return verdicts.fail("frozen-changed", name, why, help, Severity.WARNING)
    tied = verdicts.rows[name].tied_to
    shares = f": it shares its memory with {tied[0]}" if tied else ""
    why = f"is frozen, and the optimizer's step changes it{shares}"
    return verdicts.fail("frozen-changed", name, why, "clone() it, or freeze both")


# --- changed by forward -------------------------------------------------------------------------------------


def _forward_updates(run: Training) -> tuple[Column, ...]:
    """Told, not judged: BatchNorm's statistics, a counter, a cache. Without it where nothing changed."""
    changed = {name: Cell(Verdict.PASSED, after="changed") for name, by in run.changed_by.items() if by == "forward"}
    return (Column("forward updates", changed),) if changed else ()
