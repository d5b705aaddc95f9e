"""`statecli inspect`: one target's tensors, filtered, measured where asked, and what must be said against them."""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from statecli import kinds, modules, target
from statecli.errors import FilteredOut, MissingDependency, ModelError, UsageError
from statecli.finding import Finding, Severity
from statecli.modules.spec import Spec
from statecli.stamps import unchanged_files
from statecli.state import Kind, ModelState, Stats, TensorInfo

if TYPE_CHECKING:
    from torch import nn

    from statecli.modules.build import Built
    from statecli.options import InspectOptions
    from statecli.proofs.appearing import Ran

#: Takes the bytes there will be in all; gives what is called with each tensor's FQN and its bytes.
Progress = Callable[[int], Callable[[str, int], None]]


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


def requested(options: InspectOptions) -> Request:
    """What the command line asks for. Raises UsageError where `--cuda` and `--to` contradict each other."""
    return Request(
        target=options.target,
        to=device(options.to, options.cuda),
        model=options.model,
        stats=options.stats,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
        init_device=options.init_device,
        input=options.input,
        inputs=options.inputs,
    )


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


def device(to: str | None, cuda: bool) -> str | None:
    """The device that `--to` and `--cuda` ask for together."""
    if cuda and to not in (None, "cuda"):
        raise UsageError(f"--cuda and --to {to} contradict each other")
    return "cuda" if cuda else to


#: Oddities that the move itself brought out; with `--to` they are what stayed behind.
MOVE_RULES = ("broken-tie", "stale-view", "left-behind")


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
    with unchanged_files():
        return _of_checkpoint(request, progress)


def _of_module(request: Request, spec: Spec, handed: Any) -> Inspection:
    if request.model is not None:
        raise UsageError(f"--model groups a checkpoint; {request.target} is a class already")
    return of_built(target.model(spec, init_device=request.init_device, values=request.stats), request, handed)


def of_live(module: nn.Module, request: Request, handed: Any = None) -> Inspection:
    """Inspect a live model, to which nothing is written: a copy is moved and called.

    A model that cannot be copied is listed all the same, and what moves is not measured.
    """
    from statecli.proofs import live, subject

    try:
        built = live.copied(module)
    except ModelError as error:
        if request.to is not None or request.input or request.inputs is not None or handed is not None:
            raise
        why = str(error).removeprefix(f"{request.target}: ")
        stats_of = _stats_of_tensor if request.stats else None
        state = modules.listed(subject.built_of(module), request.target, why, stats_of=stats_of)
        return Inspection(filtered(state, request))
    return of_built(built, request, handed)


def of_built(built: Built, request: Request, handed: Any = None) -> Inspection:
    """Inspect a model that is ours: its values are overwritten where `request.stats` has not asked for them first.

    Raises ModelError for a freed storage where forward or a move would read it.
    """
    calls_forward = request.input or request.inputs is not None or handed is not None
    if calls_forward or request.to not in (None, "meta"):
        from statecli.modules.measure import refuse_freed

        refuse_freed(built.module, request.target)
    ran = _ran(built, request, handed)
    built = ran.built if ran else built
    measure = _stats_of_tensor if request.stats else None
    if request.to is None:
        state = modules.read(built, request.target, stats_of=measure)
    else:
        state = modules.move(built, request.target, request.to, stats_of=measure)
    state = filtered(ran.marked(state) if ran else state, request)
    left_behind = _left_behind(state, request.to) if request.to else ()
    return Inspection(state, left_behind, request.to, ran.text if ran else None)


def _ran(built: Built, request: Request, handed: Any) -> Ran | None:
    """The model after its first forward; None where nothing is given to call it with."""
    if not request.input and request.inputs is None and handed is None:
        return None
    from statecli.proofs import appearing

    return appearing.run(built, request.target, request.input, request.inputs, handed)


def _stats_of_tensor(tensor: Any) -> Stats:
    with numpy_needed():
        from statecli.values.stats import stats_of_tensor

    return stats_of_tensor(tensor)


@contextmanager
def numpy_needed() -> Iterator[None]:
    """Import what reads values in this block. Raises MissingDependency if numpy is not installed."""
    if "numpy" not in sys.modules and not _can_start_thread():
        # OpenBLAS raises SIGINT if it cannot start its threads, as if the user had pressed Ctrl-C.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise MissingDependency("reading values needs numpy, which is not installed: pip install numpy") from error


def _can_start_thread() -> bool:
    """Whether the system has room for a thread (`ulimit -u`)."""
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        return False
    return True


def _of_checkpoint(request: Request, progress: Progress | None) -> Inspection:
    state = target.checkpoint(request.target)
    findings: list[Finding] = []
    if request.model is not None:
        text = target.class_for(request.model, request.target)
        names = [tensor.fqn for tensor in state.tensors if tensor.kind in kinds.MODEL_KINDS]
        model, renamed = target.registered_by(text, init_device=request.init_device, names=names)
        state, findings = kinds.by_model(state, model, renamed)
    whole, sectioned = state, len(state.sections) > 1
    state = filtered(state, request)
    if state is not whole:
        left = {tensor.fqn for tensor in state.tensors}
        findings = [f for f in findings if f.fqn in left or _is_wanted(f.fqn, f.section, sectioned, request)]
    size = sum(tensor.nbytes for tensor in state.tensors)
    if request.stats:
        with numpy_needed():
            from statecli.values.stats import stats_all

        state = stats_all(state, progress(size) if progress else None)
    if request.to:
        with numpy_needed():
            from statecli.values.place import place

        state = place(state, request.to, progress(size) if progress else None)
        findings.extend(_left_behind(state, request.to))
    return Inspection(state, tuple(findings), request.to)


def filtered(state: ModelState, request: Request) -> ModelState:
    """The tensors that the globs and kinds leave; the same object where nothing was asked."""
    if not (request.include or request.exclude or request.kind):
        return state
    sectioned = len(state.sections) > 1
    kept = tuple(
        tensor
        for tensor in state.tensors
        if (not request.kind or tensor.kind in request.kind)
        and _is_wanted(tensor.fqn, tensor.section, sectioned, request)
    )
    if not kept:
        raise FilteredOut(f"{request.target}: {_nothing(request, len(state.tensors))}")
    sections = {tensor.section for tensor in kept}
    return replace(state, tensors=kept, sections=tuple(s for s in state.sections if s in sections))


def asked_for(include: Sequence[str], exclude: Sequence[str], kinds: Sequence[Kind]) -> str:
    """The filters as they were typed."""
    globs = [f"-i {glob!r}" for glob in include] + [f"-x {glob!r}" for glob in exclude]
    return " ".join(globs + [f"--kind {kind.value}" for kind in kinds])


def _nothing(request: Request, count: int) -> str:
    asked = asked_for(request.include, request.exclude, request.kind)
    wider = [f"*{glob.strip('*')}*" for glob in request.include[:1] if glob != f"*{glob.strip('*')}*"]
    hint = f"; a glob matches the whole name: try {wider[0]!r}" if wider else ""
    return f"none of its {count} tensors matches {asked}{hint}"


def _is_wanted(fqn: str | None, section: str | None, sectioned: bool, request: Request) -> bool:
    return fqn is None or is_wanted(called(fqn, section, sectioned=sectioned), request.include, request.exclude)


def called(fqn: str, section: str | None, *, sectioned: bool) -> tuple[str, ...]:
    """The names by which a glob may know a tensor: its FQN, and among several sections the one behind its section."""
    return (fqn, f"{section}.{fqn}") if sectioned and section else (fqn,)


def is_wanted(names: tuple[str, ...], include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the globs leave what goes by these names: any of them may match."""
    return (not include or matches_any(names, include)) and not matches_any(names, exclude)


def matches_any(names: tuple[str, ...], globs: Sequence[str]) -> bool:
    """Whether a glob matches one of the names as a whole. Brackets may be meant as they stand: names have them."""
    return any(_matches(name, glob) for glob in globs for name in names)


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or ("[" in glob and fnmatchcase(name, glob.replace("[", "[[]")))


def _left_behind(state: ModelState, to: str) -> tuple[Finding, ...]:
    recomputed = {odd.fqn for odd in state.oddities if odd.name == "recomputed"}
    stayed = [
        _stayed(tensor, state, to)
        for tensor in state.tensors
        if tensor.after and tensor.after.followed is not True and not (tensor.fqn in recomputed or tensor.is_input)
    ]
    names = {tensor.fqn for tensor in state.tensors} | {a for tensor in state.tensors for a in tensor.aliases}
    broken = [
        Finding(odd.name, Severity.ERROR, odd.message, state.target, odd.fqn, section="model")
        for odd in state.oddities
        if odd.name in MOVE_RULES and (odd.fqn is None or odd.fqn in names)
    ]
    return (*stayed, *broken)


def _stayed(tensor: TensorInfo, state: ModelState, to: str) -> Finding:
    followed = tensor.after.followed if tensor.after else None
    if followed is None:
        message = (
            f"{tensor.fqn}: cannot tell whether it follows to {to}: {tensor.note or 'it was not found after the move'}"
        )
        return Finding("cannot-tell", Severity.WARNING, message, state.target, tensor.fqn, None, tensor.section)
    if state.format != "module":
        message = f"{tensor.fqn}: the bytes that arrived on {to} are not those of the file"
        return Finding("bytes-differ", Severity.ERROR, message, state.target, tensor.fqn, None, tensor.section)
    where = tensor.after.device if tensor.after else tensor.device
    message = f"{tensor.fqn}: stays on {where} when the model moves to {to}"
    return Finding("left-behind", Severity.ERROR, message, state.target, tensor.fqn, tensor.fix, tensor.section)
