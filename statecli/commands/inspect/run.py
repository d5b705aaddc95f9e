"""`statecli inspect`: one target's tensors, filtered, measured where asked, and what must be said against them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from statecli import live as modules
from statecli.commands.inspect import rules
from statecli.core import kinds, model_kinds, move_rules
from statecli.core.errors import ModelError, UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.core.selection import Selection, glob_names, select
from statecli.core.state import Kind, ModelState, Stats, TensorInfo
from statecli.live.spec import Spec
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load as target
from statecli.values.require_numpy import require_numpy

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.forward_effects import Ran
    from statecli.live.build import Built


class Request(msgspec.Struct, frozen=True):
    """What the user asked of `inspect`; field names are the options'.

    `input` are texts such as `int64:2x16<30522`, `inputs` names a function that makes what forward is called with; with
    neither, forward is not called.
    """

    target: str
    to: str | None = None
    model: str | None = None
    stats: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    init_device: str = "cpu"
    input: tuple[str, ...] = ()
    inputs: str | None = None


def selection_of(request: Request) -> Selection:
    """Return which tensors are asked for."""
    return Selection(request.include, request.exclude, request.kind)


class Inspection(msgspec.Struct, frozen=True):
    """The answer: the state as asked for, what was found against it, and the device it was moved to.

    `inputs` says what forward was called with before, in words; None where it was not called.
    """

    state: ModelState
    findings: tuple[Finding, ...] = ()
    to: str | None = None
    inputs: str | None = None

    @property
    def broken(self) -> list[tuple[str, str]]:
        """Each tensor that cannot be read, and a line that says why."""
        return [(tensor.fqn, tensor.damage) for tensor in self.state.tensors if tensor.damage]


#: Oddities that the move itself brought out; with `--to` they are what stayed behind.
MOVE_RULES = {
    OddityKind.UNTIED_BY_MOVE: move_rules.UNTIED_BY_MOVE,
    OddityKind.STALE_VIEW: move_rules.STALE_VIEW,
}


def inspect(request: Request, progress: Progress | None = None, handed: Any = None) -> Inspection:
    """Read, group, filter, and where asked move and measure one target. `handed`: inputs as Python has them.

    Raises `StateError` for whatever could not be done; `FilteredOut` when the filters leave no tensor.
    """
    spec = target.spec_of(request.target)
    if spec is not None:
        return _of_module(request, spec, handed)
    if request.init_device != "cpu" and request.model is None:
        raise UsageError(f"--init-device {request.init_device}: {request.target} is no class to be built")
    if request.input or request.inputs is not None or handed is not None:
        asked = f"--input {request.input[0]}" if request.input else f"--inputs {request.inputs or ''}".rstrip()
        raise UsageError(f"{asked}: {request.target} is a checkpoint and has no forward to be called")
    if not (request.stats or request.to):
        return _of_checkpoint(request, progress)
    with refuse_files_that_change():
        return _of_checkpoint(request, progress)


def _of_module(request: Request, spec: Spec, handed: Any) -> Inspection:
    if request.model is not None:
        raise UsageError(f"--model groups a checkpoint; {request.target} is a class already")
    return of_built(target.model(spec, init_device=request.init_device, values=request.stats), request, handed)


def of_live(module: nn.Module, request: Request, handed: Any = None) -> Inspection:
    """Inspect a live model, to which nothing is written: a copy is moved and called.

    A model that cannot be copied is listed all the same, and what moves is not measured.
    """
    from statecli.commands.verify import live_model, model_under_test

    try:
        built = live_model.copied(module)
    except ModelError as error:
        if request.to is not None or request.input or request.inputs is not None or handed is not None:
            raise
        why = str(error).removeprefix(f"{request.target}: ")
        stats_of = _stats_of_tensor if request.stats else None
        state = modules.listed(model_under_test.built_of(module), request.target, why, stats_of=stats_of)
        return Inspection(select(state, selection_of(request), request.target))
    return of_built(built, request, handed)


def of_built(built: Built, request: Request, handed: Any = None) -> Inspection:
    """Inspect a model that is ours: its values are overwritten where `request.stats` has not asked for them first.

    Raises ModelError for a freed storage where forward or a move would read it.
    """
    calls_forward = request.input or request.inputs is not None or handed is not None
    if calls_forward or request.to not in (None, "meta"):
        from statecli.live.measure import refuse_freed

        refuse_freed(built.module, request.target)
    ran = _ran(built, request, handed)
    built = ran.built if ran else built
    measure = _stats_of_tensor if request.stats else None
    if request.to is None:
        state = modules.read(built, request.target, stats_of=measure)
    else:
        state = modules.move(built, request.target, request.to, stats_of=measure)
    state = select(ran.marked(state) if ran else state, selection_of(request), request.target)
    left_behind = _left_behind(state, request.to) if request.to else ()
    return Inspection(state, left_behind, request.to, ran.text if ran else None)


def _ran(built: Built, request: Request, handed: Any) -> Ran | None:
    """The model after its first forward; None where nothing is given to call it with."""
    if not request.input and request.inputs is None and handed is None:
        return None
    from statecli.commands.verify import forward_effects

    return forward_effects.run(built, request.target, request.input, request.inputs, handed)


def _stats_of_tensor(tensor: Any) -> Stats:
    with require_numpy():
        from statecli.values.stats import compute_live_stats

    return compute_live_stats(tensor)


def _of_checkpoint(request: Request, progress: Progress | None) -> Inspection:
    state = target.checkpoint(request.target)
    findings: list[Finding] = []
    if request.model is not None:
        text = target.class_for(request.model, request.target)
        names = [tensor.fqn for tensor in state.tensors if tensor.kind in kinds.MODEL_KINDS]
        model, renamed = target.registered_by(text, init_device=request.init_device, names=names)
        state, findings = model_kinds.classify_by_model(state, model, renamed)
    whole = state
    state = select(state, selection_of(request), request.target)
    if state is not whole:
        findings = list(_of_selected(findings, whole, state, request))
    size = sum(tensor.nbytes for tensor in state.tensors)
    if request.stats:
        with require_numpy():
            from statecli.values.stats import fill_stats

        state = fill_stats(state, progress(size) if progress else None)
    if request.to:
        with require_numpy():
            from statecli.values.to_device import place_on_device

        state = place_on_device(state, request.to, progress(size) if progress else None)
        findings.extend(_left_behind(state, request.to))
    return Inspection(state, tuple(findings), request.to)


def _of_selected(
    findings: Iterable[Finding], whole: ModelState, state: ModelState, request: Request
) -> Iterator[Finding]:
    """Yield the findings about no tensor, about a selected tensor, or about a selected name that has no tensor."""
    fqns, by_section, selection = (
        {tensor.fqn for tensor in state.tensors},
        len(whole.sections) > 1,
        selection_of(request),
    )
    for finding in findings:
        fqn = finding.fqn
        if (
            fqn is None
            or fqn in fqns
            or selection.selects_name(glob_names(fqn, finding.section, by_section=by_section))
        ):
            yield finding


def _left_behind(state: ModelState, to: str) -> tuple[Finding, ...]:
    recomputed = {odd.fqn for odd in state.oddities if odd.kind is OddityKind.RECOMPUTED}
    stayed = [
        _stayed(tensor, state, to)
        for tensor in state.tensors
        if tensor.after and tensor.after.followed is not True and not (tensor.fqn in recomputed or tensor.is_input)
    ]
    names = {tensor.fqn for tensor in state.tensors} | {a for tensor in state.tensors for a in tensor.aliases}
    broken = [
        MOVE_RULES[odd.kind].finding(
            odd.message, target=state.target, fqn=odd.fqn, section="model", severity=Severity.ERROR
        )
        for odd in state.oddities
        if odd.kind in MOVE_RULES and (odd.fqn is None or odd.fqn in names)
    ]
    return (*stayed, *broken)


def _stayed(tensor: TensorInfo, state: ModelState, to: str) -> Finding:
    followed = tensor.after.followed if tensor.after else None
    if followed is None:
        message = (
            f"{tensor.fqn}: cannot tell whether it follows to {to}: {tensor.note or 'it was not found after the move'}"
        )
        return rules.CANNOT_TELL.finding(message, target=state.target, fqn=tensor.fqn, section=tensor.section)
    if not state.traits.is_class:
        message = f"{tensor.fqn}: the bytes that arrived on {to} are not those of the file"
        return rules.BYTES_DIFFER.finding(message, target=state.target, fqn=tensor.fqn, section=tensor.section)
    where = tensor.after.device if tensor.after else tensor.device
    message = f"{tensor.fqn}: stays on {where} when the model moves to {to}"
    return move_rules.LEFT_BEHIND.finding(
        message, target=state.target, fqn=tensor.fqn, section=tensor.section, help=tensor.fix
    )
