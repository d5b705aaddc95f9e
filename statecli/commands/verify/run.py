"""`statecli verify`: what becomes of each tensor when the model is moved, cast, saved, copied, trained and run.

    spec or live model ──▶ Subject ──▶ one proof after the other, each on instances of its own ──▶ Verification

`subject.py` gives the instances, `inputs.py` what forward is called with; one module a proof: `move.py`, `cast.py`,
`save.py`, `copying.py`, `step.py`, `forward.py`. Without a GPU `fake.py` and `pretend.py` stand in for one.
Importing this package imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, Verification
from statecli.core.errors import ModelError, UsageError
from statecli.core.finding import Finding
from statecli.core.oddity_kind import OddityKind
from statecli.core.selection import Selection, select
from statecli.core.state import SAMPLE_INPUT_NOTE, Kind, ModelState
from statecli.live.build import describe_model_error
from statecli.targets import load as target

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.model_under_test import Subject

__all__ = ["Request", "of_live", "run", "verified"]

#: A pretended GPU: tensors that claim to be on CUDA.
FAKE = "fake-cuda"


class Request(msgspec.Struct, frozen=True):
    """What the user asked of `verify`. `checks` () is all of them; `device` None is a GPU, or FAKE without one.

    `optimizer` is a name in torch.optim, or a class; None is "sgd". `input` are texts such as `int64:2x16<30522`,
    `inputs` names a function that makes them. Globs are unions.
    """

    target: str
    checks: tuple[Name, ...] = ()
    device: str | None = None
    dtype: str | None = None
    optimizer: str | type | None = None
    input: tuple[str, ...] = ()
    inputs: str | None = None
    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()


#: A proof of a model as asked for.
Proof = Callable[["Subject", Request], Check]


def _move(subject: Subject, request: Request) -> Check:
    from statecli.commands.verify.proofs import move

    return move.prove(subject, device(request))


def _cast(subject: Subject, request: Request) -> Check:
    from statecli.commands.verify.proofs import cast

    return cast.prove(subject, request.dtype)


def _save(subject: Subject, _: Request) -> Check:
    from statecli.commands.verify.proofs import save

    return save.prove(subject)


def _copy(subject: Subject, _: Request) -> Check:
    from statecli.commands.verify.proofs import copy

    return copy.prove(subject)


def _step(subject: Subject, request: Request) -> Check:
    from statecli.commands.verify.proofs import step

    return step.prove(subject, "sgd" if request.optimizer is None else request.optimizer)


def _forward(subject: Subject, request: Request) -> Check:
    from statecli.commands.verify.proofs import forward

    return forward.prove(subject, device(request))


#: Every proof there is, in the order of `Name`.
PROOFS: dict[Name, Proof] = {
    Name.MOVE: _move,
    Name.CAST: _cast,
    Name.SAVE: _save,
    Name.COPY: _copy,
    Name.STEP: _step,
    Name.FORWARD: _forward,
}


def device(request: Request) -> str:
    """The device of the moves: as asked, else a GPU, else a pretended one."""
    if request.device is not None:
        return request.device
    import torch

    return "cuda" if torch.cuda.is_available() else FAKE


def run(request: Request, done: Callable[[Check], None] = lambda _: None, given: Any = None) -> Verification:
    """Build the model and run the proofs; `done` is called after each. `given`, inputs as Python has them, comes first.

    Raises `StateError` where the model cannot be built, `NothingMatched` where the filters leave no tensor.
    """
    return verified(_subject(request, given), request, done)


def verified(subject: Subject, request: Request, done: Callable[[Check], None] = lambda _: None) -> Verification:
    """`run`, of a subject that is there already."""
    state = select(subject.state, Selection(request.include, request.exclude, request.kind), request.target)
    checks = []
    for name in request.checks or tuple(Name):
        checks.append(_only(_proved(name, subject, request), state, subject.state))
        done(checks[-1])
    return Verification(state, tuple(checks), subject.state.oddities)


def _subject(request: Request, given: Any) -> Subject:
    spec = target.spec_of(request.target)
    if spec is None:
        raise UsageError(f"{request.target}: names no model class; write file.py:Class or package.module:Class")
    built = target.model(spec, init_device=request.init_device, values=False)
    # These import torch, which `target.model` misses in a line.
    from statecli.commands.verify import first_forward, inputs
    from statecli.commands.verify import model_under_test as subject

    if given is None:
        found, why_not = inputs.find(request.input, request.inputs, built)
    else:
        from statecli.commands.verify import live_model

        found, why_not = live_model.inputs_of(given, built)
    return first_forward.with_inputs(subject.of_built(built, request.target), found, why_not)


def of_live(model: nn.Module, request: Request, given: Any = None) -> Verification:
    """`run`, of a live model, which is left as it was; `given` is what forward is called with, see `live.inputs_of`."""
    from statecli.commands.verify import first_forward, live_model
    from statecli.commands.verify import model_under_test as subject

    with live_model.untouched(model, cuda=(request.device or "").startswith("cuda")):
        found = subject.of_module(model)
        inputs, why_not = live_model.inputs_of(given, subject.built_of(model))
        return verified(first_forward.with_inputs(found, inputs, why_not), request)


def _proved(name: Name, subject: Subject, request: Request) -> Check:
    """What the model's own code raises where a proof did not expect it makes that proof inconclusive, and no other."""
    if name is Name.STEP and subject.cut:
        return Check(name, Verdict.INCONCLUSIVE, reason=_CUT.format(subject.cut[0]))
    if subject.renames and name is not Name.FORWARD:  # which calls one instance and compares it with no other
        return Check(name, Verdict.INCONCLUSIVE, reason=subject.renames)
    inputs = [row.fqn for row in subject.state.tensors if row.is_input]
    if inputs and name is not Name.FORWARD:  # which may find that it is read
        state = replace(subject.state, tensors=tuple(row for row in subject.state.tensors if not row.is_input))
        subject = dataclasses.replace(subject, state=state)
    try:
        return _without_unlike(_with(PROOFS[name](subject, request), inputs), subject.state)
    except ModelError as error:
        return Check(name, Verdict.INCONCLUSIVE, reason=str(error).removeprefix(f"{subject.target}: "))
    except Exception as error:
        # A tensor subclass runs code of its own in operators that a proof calls.
        raised = describe_model_error(error)
        if raised is None:
            raise
        return Check(name, Verdict.INCONCLUSIVE, reason=raised)


def _with(check: Check, inputs: Iterable[str]) -> Check:
    """The proof, and in its first column the inputs that the model carries, unless it is to be told that one fails."""
    if not check.columns:
        return check
    first, *others = check.columns
    failed = {fqn for fqn, cell in first.cells.items() if cell.verdict is Verdict.FAILED}
    carried = {fqn: Cell(Verdict.SKIPPED, reason=SAMPLE_INPUT_NOTE) for fqn in inputs if fqn not in failed}
    return replace(check, columns=(replace(first, cells={**first.cells, **carried}), *others))


def _without_unlike(check: Check, state: ModelState) -> Check:
    """The proof, inconclusive for what a copy of the model holds in another way than the model itself."""
    unlike = {odd.fqn: odd.message for odd in state.oddities if odd.kind is OddityKind.UNLIKE_COPY}
    if not unlike:
        return check

    def judged(fqn: str, cell: Cell) -> Cell:
        passed = cell.verdict is Verdict.PASSED and fqn in unlike
        return replace(cell, verdict=Verdict.INCONCLUSIVE, reason=unlike[fqn]) if passed else cell

    columns = tuple(
        replace(column, cells={fqn: judged(fqn, cell) for fqn, cell in column.cells.items()})
        for column in check.columns
    )
    if columns == check.columns or check.verdict is not Verdict.PASSED:
        return replace(check, columns=columns)
    unsure = Verdict.INCONCLUSIVE
    return replace(check, columns=columns, verdict=unsure, reason=_summed_up(columns, unsure))


_CUT = (
    "{} was computed from other tensors before the model was copied, and no gradient finds its way back through a copy"
)


def _only(check: Check, state: ModelState, whole: ModelState) -> Check:
    """What the filters leave of a proof: cells and findings of tensors that they leave out go."""
    if state is whole:
        return check
    left = {tensor.fqn for tensor in state.tensors}
    columns = tuple(
        replace(column, cells={fqn: cell for fqn, cell in column.cells.items() if fqn in left})
        for column in check.columns
    )
    gone = {tensor.fqn for tensor in whole.tensors} - left
    findings = tuple(finding for finding in check.findings if finding.fqn not in gone)
    return _judged_anew(check, columns, findings)


def _judged_anew(check: Check, columns: tuple[Column, ...], findings: tuple[Finding, ...]) -> Check:
    """The proof with these cells and findings alone: the worst of them, or what kept it from being told as a whole."""
    left = replace(check, columns=columns, findings=findings)
    if check.verdict is Verdict.SKIPPED or findings:
        return left
    unsure = Verdict.INCONCLUSIVE
    of_cells = (None, _summed_up(check.columns, unsure), *_said(check.columns, unsure))
    if check.verdict is not Verdict.PASSED and check.reason not in of_cells:
        return replace(left, verdict=unsure)
    if not any(column.cells for column in check.columns):
        return left
    worst = _worst(columns)
    if worst is Verdict.PASSED:
        return replace(left, verdict=worst, reason=check.reason if check.verdict is worst else None)
    return replace(left, verdict=worst, reason=_summed_up(columns, worst) or _NOTHING_LEFT)


_NOTHING_LEFT = "the filters leave no tensor that it says anything of"


def _said(columns: Iterable[Column], verdict: Verdict) -> list[str]:
    cells = ((fqn, cell) for column in columns for fqn, cell in column.cells.items())
    return [f"{fqn}: {cell.reason}" for fqn, cell in cells if cell.verdict is verdict and cell.reason]


def _summed_up(columns: Iterable[Column], verdict: Verdict) -> str | None:
    """What the cells of this verdict give a proof as its reason; None where there are none."""
    said = _said(columns, verdict)
    return f"{said[0]}, and {len(said) - 1} more" if len(said) > 1 else next(iter(said), None)


def _worst(columns: Iterable[Column]) -> Verdict:
    verdicts = {cell.verdict for column in columns for cell in column.cells.values()}
    order = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)
    return next((one for one in order if one in verdicts), Verdict.SKIPPED)
