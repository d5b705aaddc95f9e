"""A training step: which tensors get a gradient, which the optimizer updates, which forward changes by itself."""

from __future__ import annotations

import difflib
import functools
import math
import re
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from statecli.commands.verify import gradient_graph, judging, overwritten_by_forward, rules, training_rounds
from statecli.commands.verify import inputs as inputs_of
from statecli.commands.verify.inputs import Inputs
from statecli.commands.verify.model_under_test import Subject
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.training_rounds import Seen, Training
from statecli.core.errors import UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.rule import Rule
from statecli.core.state import Kind, TensorInfo

_DIGITS = re.compile(r"\d+")
#: Says so in a message; in the column of gradients it goes without saying.
_NONE = "gets no gradient: "
_OTHER_INPUTS = "give inputs that the model is made for"
#: A teacher that follows its student does so on purpose.
_BY_FORWARD = "frozen, and forward changes it"
_FREEZE = "freeze it with requires_grad_(False)"


def optimizer_class(name: str | type) -> type[torch.optim.Optimizer]:
    """The class of torch.optim by its name in whatever case, or itself. Raises UsageError where there is none."""
    if isinstance(name, type):
        return name
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
    watched: gradient_graph.Watched | None = None
    overwritten: overwritten_by_forward.Overwritten = field(default_factory=overwritten_by_forward.Overwritten)
    gradient: dict[str, Cell] = field(default_factory=dict)
    updated: dict[str, Cell] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the trained instance, by FQN."""
        return self.run.tensors()

    @functools.cached_property
    def reached(self) -> dict[str, list[str]]:
        """The tensors that got a gradient, by their name with its numbers left open."""
        names: dict[str, list[str]] = {}
        for name, seen in self.run.seen.items():
            if seen.peak is not None:
                names.setdefault(_DIGITS.sub("#", name), []).append(name)
        return names

    @functools.cached_property
    def reached_at_times(self) -> dict[str, list[str]]:
        """Those of `reached` that got none in some rounds."""
        seen = self.run.seen
        return {key: [name for name in names if None in seen[name].peaks] for key, names in self.reached.items()}

    def fail(self, rule: Rule, fqn: str, why: str, help: str, severity: Severity | None = None) -> Cell:
        """A failed cell and its finding."""
        message = f"{fqn} {why}"
        self.findings.append(judging.finding(self.run.subject, rule, message, fqn, help=help, severity=severity))
        return Cell(Verdict.FAILED, reason=why.removeprefix(_NONE))


def prove(subject: Subject, optimizer: str | type = "sgd") -> Check:
    """Train a fresh instance for some rounds in train mode, and look at each tensor before and after.

    `optimizer` is a class, or the name of one of torch.optim in lower case. Columns: `gradient` and `updated` of what
    requires grad, `forward updates` of what forward changes. Raises UsageError for an unknown optimizer, ModelError
    where the model's own code raises.
    """
    made_by = optimizer_class(optimizer)
    if subject.inputs is None:
        return Check(Name.STEP, Verdict.SKIPPED, reason=subject.no_inputs)
    if any(row.device == "meta" for row in subject.state.tensors):
        return Check(Name.STEP, Verdict.SKIPPED, reason="it was built on meta and holds no values to train")
    if _is_empty(subject.inputs):
        why = f"its inputs have no elements ({subject.inputs.text}), and no gradient comes of nothing"
        return Check(Name.STEP, Verdict.INCONCLUSIVE, reason=why)
    run, why_not = training_rounds.train(subject, made_by)
    if why_not:
        return judging.check(Name.STEP, _how(run), {}, [], [why_not])
    return _judged(run)


def _is_empty(inputs: Inputs) -> bool:
    """Whether forward is called with tensors, and all of them are empty: a batch of none."""
    found = [one for one in inputs_of.leaves(inputs.make(seed=1)) if issubclass(type(one), torch.Tensor)]
    return bool(found) and not any(one.numel() for one in found)


def _how(run: Training) -> str:
    inputs = run.subject.inputs
    given = f"on {inputs.text}" if inputs else ""
    if not run.seen:
        return f"forward in train mode {given}"
    return f"{_rounds(run)} of forward, backward and {run.made_by.__name__} in train mode {given}"


def _rounds(run: Training) -> str:
    return f"{run.rounds} round{'s' if run.rounds != 1 else ''}"


def _judged(run: Training) -> Check:
    verdicts = _Verdicts(run)
    if any(seen.missing for seen in run.seen.values()):
        verdicts.watched = gradient_graph.watch(run)
    if run.written:
        verdicts.overwritten = overwritten_by_forward.overwritten(run)
    for name, seen in run.seen.items():
        verdicts.gradient[name] = _gradient(verdicts, name, seen)
        verdicts.updated[name] = _updated(verdicts, name, seen)
    for name in sorted(run.frozen - set(run.seen)):
        verdicts.updated[name] = _frozen(verdicts, name)
    judged = {"gradient": verdicts.gradient, "updated": verdicts.updated, "forward updates": _by_forward(run)}
    columns = {name: cells for name, cells in judged.items() if cells}
    check = judging.check(Name.STEP, _how(run), columns, verdicts.findings, [])
    if run.seen or check.verdict is Verdict.FAILED:
        return check
    return replace(check, verdict=Verdict.SKIPPED, reason="nothing in it requires grad, so there is nothing to train")


# --- gradient -----------------------------------------------------------------------------------------------


def _gradient(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    if seen.broken is not None:
        return _not_finite(verdicts, name, seen)
    if seen.peak is not None:
        return Cell(Verdict.PASSED, after=f"{seen.peak:.3g}")
    if not seen.trained:
        return judging.skipped("it gets no gradient")
    if any(peak is not None for peak in seen.peaks):
        return _zero(verdicts, name, seen)
    if verdicts.run.is_up_to_chance(name):
        return _by_chance(verdicts.run, name)
    sibling = _chosen_by_inputs(verdicts, name)
    if sibling:
        return judging.unclear(_not_chosen(sibling))
    inputs, watched = verdicts.run.subject.inputs, verdicts.watched
    if watched and name not in watched.used and inputs and not inputs.given:
        reason = (
            "forward does not use it with the inputs that were found: say with --input or --inputs how it is called"
        )
        return judging.unclear(reason)
    return _none(verdicts, name)


def _not_finite(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    what = "NaN" if any(peak is not None and math.isnan(peak) for peak in seen.peaks) else "infinite"
    if not verdicts.run.finite:
        return judging.unclear(f"its gradient is {what}, and so is something in the output: {_OTHER_INPUTS}")
    why = f"gets a gradient with {what} elements in round {seen.broken}, though every output is finite"
    help = (
        "look for sqrt, norm or a division at zero, and for torch.where around them; torch.autograd.set_detect_anomaly"
    )
    return verdicts.fail(rules.NON_FINITE_GRADIENT, name, why, help)


def _not_chosen(sibling: str | None, when: str = "") -> str:
    return f"no input chose it{when}{f', and {sibling} was chosen' if sibling else ''}: give more inputs"


def _zero(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    run = verdicts.run
    if cancelled := run.cancelled(name):
        what = f"{cancelled:.3g} with the batch norms in eval mode: batch statistics cancel what it adds"
        return judging.skipped(f"zero in each of {_rounds(run)}, and {what}")
    if run.is_up_to_chance(name):
        return _by_chance(run, name)
    if reason := _unclear_zero(verdicts, name, seen):
        return judging.unclear(reason)
    why = f"gets a gradient that is zero everywhere, in each of {_rounds(run)}"
    if run.in_eval is not None:
        why += " and in eval mode, where nothing is dropped"
    help = "look for a factor of zero behind it, for what cancels out, and for a hook that changes its gradient"
    return verdicts.fail(rules.ZERO_GRADIENT, name, why, help)


def _unclear_zero(verdicts: _Verdicts, name: str, seen: Seen) -> str | None:
    """Why a gradient that is zero in each round need not be the model's fault, if so."""
    run = verdicts.run
    if not run.finite:
        what = "something in the output is NaN or infinite, which counts for nothing in the loss"
        return f"its gradient is zero, and {what}: {_OTHER_INPUTS}"
    if seen.idle:
        when = f" in {seen.idle} of {_rounds(run)}, and its gradient is zero in the others"
        return _not_chosen(_alike(verdicts, name), when if seen.idle < run.rounds else "")
    if run.growing:
        return f"zero in each of {_rounds(run)}, and the last still gave another its first gradient"
    if run.in_running and run.in_running.why_not:
        return f"its gradient is zero, and whether batch statistics cancel it is not told: {run.in_running.why_not}"
    return None


def _by_chance(run: Training, name: str) -> Cell:
    """Of what got no gradient from a forward that draws random numbers, and that eval mode does not say is at fault."""
    got = f"{'zero' if 0 in run.seen[name].peaks else 'none'} in each of {_rounds(run)}"
    if run.in_eval and run.in_eval.peaks.get(name):
        help = "lower its rate, or give a larger input"
        return judging.unclear(f"{got}, and not in eval mode: dropout or drop path may drop it each time; {help}")
    why = (run.in_eval and run.in_eval.why_not) or "it gets none there"
    return judging.unclear(f"{got} with random numbers, and eval mode does not tell whether by chance: {why}")


def _none(verdicts: _Verdicts, name: str) -> Cell:
    watched = verdicts.watched
    if watched and name in watched.late:
        reason = f"none in {_rounds(verdicts.run)}, and one in a further: forward does not always use it"
        return judging.unclear(reason)
    why, help = _cause(watched, name, cut_off=verdicts.run.cut_off)
    return verdicts.fail(rules.NO_GRADIENT, name, _NONE + why, help)


def _cause(watched: gradient_graph.Watched | None, name: str, *, cut_off: bool) -> tuple[str, str]:
    """Why there is no gradient, and what to do."""
    if watched and name in watched.reentrant:
        return (
            "it is used in a reentrant checkpoint, and none of that checkpoint's inputs requires grad",
            "checkpoint(..., use_reentrant=False), or give it an input that requires grad",
        )
    if cut_off:
        return (
            "nothing that forward gives requires grad",
            "forward runs under torch.no_grad() or detaches what it gives",
        )
    if watched is None:
        return "forward does not use it, or nothing of it reaches the output", f"use it in forward, or {_FREEZE}"
    if name in watched.reached:
        return _ends(watched.reached[name])
    if name in watched.used:
        return (
            "forward uses it, and nothing of that reaches the output",
            "its result is thrown away, or look for detach(), .data, torch.no_grad() or an integer step behind it; "
            "if meant, requires_grad_(False)",
        )
    return "forward does not use it", f"use it in forward, delete it, or {_FREEZE}"


def _ends(giver: str | None) -> tuple[str, str]:
    """Of what the output's graph goes back to."""
    if giver is None:
        return "the output depends on it, and after backward its grad is None", "look for a hook that takes it away"
    return f"the output depends on it, and {giver} gives none for it", f"return it from {giver}, or {_FREEZE}"


def _chosen_by_inputs(verdicts: _Verdicts, name: str) -> str | None:
    """A tensor of the same name but for its numbers that got a gradient, where forward may choose among them.

    It does so by values that it reads; or some rounds gave the other a gradient, and others none.
    """
    watched = verdicts.watched
    reads = watched is not None and watched.chooses and name not in watched.used
    return _alike(verdicts, name, always=reads)


def _alike(verdicts: _Verdicts, name: str, *, always: bool = True) -> str | None:
    """Another of the same name but for its numbers that got a gradient; `always`: also if in each round."""
    chosen = verdicts.reached if always else verdicts.reached_at_times
    return next((other for other in chosen.get(_DIGITS.sub("#", name), ()) if other != name), None)


# --- updated ------------------------------------------------------------------------------------------------


def _updated(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    if not seen.trained:
        return _left_out(verdicts, name, seen)
    if seen.peak is None:
        return judging.skipped("no gradient to update it by")
    if name in verdicts.overwritten.names:
        why, help = (
            "is overwritten by forward, so that each update is lost",
            "make it a buffer, or leave it to training",
        )
        return verdicts.fail(rules.OVERWRITTEN_BY_FORWARD, name, why, help)
    if name in verdicts.run.written and verdicts.overwritten.why_not:
        why_not = verdicts.overwritten.why_not
        return judging.unclear(f"forward writes to it, and whether an update outlives that is not told: {why_not}")
    if seen.updated:
        return Cell(Verdict.PASSED, after="changed")
    if seen.updated is None:
        return judging.unclear("its values cannot be compared")
    if seen.lost is not None:
        dtype = str(seen.tensor.dtype).removeprefix("torch.")
        reason = f"an update of {training_rounds.RATE} is lost in the rounding of {dtype} at {seen.lost:.3g}"
        return judging.unclear(reason)
    why = f"has a gradient, and {verdicts.run.made_by.__name__} does not change it"
    return verdicts.fail(rules.NOT_UPDATED, name, why, "look for a hook that undoes its update")


def _left_out(verdicts: _Verdicts, name: str, seen: Seen) -> Cell:
    """A leaf that requires grad and that `model.parameters()` does not give. Without a gradient it does no harm yet."""
    if name in verdicts.run.replaced:
        why = "is replaced by forward, and the optimizer trains the tensor that it was before"
        return verdicts.fail(
            rules.NOT_IN_OPTIMIZER, name, why, "change its values in place, or give the new one another name"
        )
    if seen.peak is None and verdicts.tensors.get(name) is not seen.tensor:
        return judging.skipped("forward puts another tensor in its place, and does not read it")
    row = verdicts.run.subject.rows()[name]
    why = {
        Kind.BUFFER: "requires grad and is a buffer: no optimizer trains it",
        Kind.UNREGISTERED: "requires grad and is not registered: no optimizer trains it",
    }.get(row.kind, "is left out by the model's own parameters(): no optimizer trains it")
    severity = Severity.WARNING if seen.peak is None else None
    return verdicts.fail(rules.NOT_IN_OPTIMIZER, name, why, row.fix or _made_trainable(row), severity)


def _made_trainable(row: TensorInfo) -> str:
    if row.kind is Kind.BUFFER:
        attribute = row.fqn.rpartition(".")[2]
        return f"self.{attribute} = nn.Parameter(...) to train it; detach() it where it is registered if not"
    return "register it as nn.Parameter to train it; requires_grad_(False) if not"


def _frozen(verdicts: _Verdicts, name: str) -> Cell:
    causes = verdicts.run.changed_by.get(name)
    if causes is None:
        return judging.skipped(f"frozen, and unchanged in {_rounds(verdicts.run)}")
    if "step" not in causes:
        return judging.skipped(_BY_FORWARD)
    tied = verdicts.run.subject.rows()[name].tied_to
    shares = f": it shares its memory with {tied[0]}" if tied else ""
    why = f"is frozen, and the optimizer's step changes it{shares}"
    return verdicts.fail(rules.FROZEN_UPDATED, name, why, "clone() it, or freeze both")


# --- changed by forward -------------------------------------------------------------------------------------


def _by_forward(run: Training) -> dict[str, Cell]:
    """Told, not judged: BatchNorm's statistics, a counter, a cache; a mean of others' values; weights put in range."""
    changed = [name for name, causes in run.changed_by.items() if "forward" in causes]
    frozen = run.frozen - set(run.seen)
    return {
        name: Cell(Verdict.PASSED, after="changed", reason=_BY_FORWARD if name in frozen else None) for name in changed
    }
