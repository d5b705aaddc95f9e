"""What the proofs have in common: tensors by name, what a stand-in for a move shows, and how a verdict is put."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from statecli import live
from statecli.commands.verify.model_under_test import Subject
from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict
from statecli.core.errors import ModelError
from statecli.core.finding import Finding, Severity
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.state import ModelState, Origin, TensorInfo
from statecli.live import measure, tensor_sources
from statecli.live.build import Built
from statecli.live.origin import Origins
from statecli.live.spec import Spec
from statecli.live.tensors import is_lazy, storage
from statecli.live.walk import walk

#: Worst first.
_ORDER = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of `module` under every name, registered ones first; the names of the rows are among them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in measure.names(walk(module)):
        found.setdefault(name, tensor)
    return found


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the values; None where they cannot be copied, or are not on the CPU."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if is_lazy(tensor) or tensor.device.type != "cpu":
            return None
        try:
            return tensor.detach().clone()
        except (RuntimeError, NotImplementedError):
            return None


@contextmanager
def class_attributes_kept(module: nn.Module) -> Iterator[None]:
    """The dicts and lists of its classes, which all instances share, hold afterwards what they do now."""
    shared = [step.held for one in walk(module).held if one.steps[0].how == "class" for step in one.steps]
    kept = [(one, one.copy()) for one in shared if type(one) in (dict, list)]
    try:
        yield
    finally:
        for one, entries in kept:
            one.clear()
            one.update(entries) if type(one) is dict else one.extend(entries)


def storages(found: Iterable[torch.Tensor]) -> set[int | str]:
    """The storages that these tensors lie in."""
    return {storage(tensor)[0] for tensor in found}


def attempt(subject: Subject, doing: str, action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `action`, code of the model's, gives; or None and what it raised, in one line."""
    try:
        with subject.user_code(doing):
            return action(), None
    except ModelError as error:
        return None, reason_of(subject, error)


def reason_of(subject: Subject, error: ModelError) -> str:
    """The message of an error, without the name of the model in front."""
    return str(error).removeprefix(f"{subject.target}: ")


# --- the stand-in for a move ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Used(Built):
    """An instance that a first forward has filled, as what can be read; its own code runs as the subject's."""

    subject: Subject = field(kw_only=True)

    def again(self, *, values: bool | None = None, seed: int = 0) -> nn.Module:
        return self.subject.used(values=bool(values), seed=seed)

    def user_code(self, doing: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.subject.user_code(doing)


def stand_in(subject: Subject) -> ModelState:
    """The rows and oddities of a used instance, with `moves` as memory given anew by `_apply` shows it.

    That keeps Parameter objects as a move to CUDA does, so ties and further names come out as they do there. Oddities
    untied-by-move, stale-view and recomputed are of the move; not-measured says that it could not be tried.
    """
    if not subject.appeared:
        return subject.state
    devices = {row.device for row in subject.state.tensors}
    spec = Spec(subject.target, "", False, subject.target)
    on = "meta" if devices == {"meta"} else "cpu"
    used = _Used(spec, subject.used(), Origins({}), on, False, lambda _, seed: subject.used(seed=seed), subject=subject)
    return live.read(used, subject.target)


def recomputed(state: ModelState) -> frozenset[str]:
    """Names that torch itself sets anew before each forward: old weight_norm, spectral_norm, pruning."""
    return frozenset(oddity.fqn for oddity in state.oddities if oddity.kind is OddityKind.RECOMPUTED and oddity.fqn)


RECOMPUTED = "torch recomputes it from what is registered before each forward"


_LRU_CACHE = type(functools.lru_cache(len))
MEMO = "remembered by a function (functools.lru_cache), and not the model's: forward tells whether it does harm"


def is_moved_by_its_class(module: nn.Module, fqn: str) -> bool:
    """Whether one of the modules that `fqn` leads through has an `_apply` that is not torch's."""
    return any(not measure.is_of_torch(type(one)._apply) for one in _on_the_way(module, fqn))


def in_own_method(subject: Subject, module: nn.Module, fqn: str, names: Iterable[str], mend: str) -> str | None:
    """`net.py:12: let Net._apply call super()`: `mend` for the first of these methods that is not torch's.

    The methods are those of the modules on the way to `fqn`.
    """
    kinds = (type(one) for one in _on_the_way(module, fqn))
    methods = ((kind, name, getattr(kind, name, None)) for kind in kinds for name in names)
    own = next(((kind, name, one) for kind, name, one in methods if one and not measure.is_of_torch(one)), None)
    return own and at_method(subject, own[2], mend.format(f"{own[0].__name__}.{own[1]}"))


def at_method(subject: Subject, method: Callable[..., Any], mend: str) -> str:
    """`net.py:12: ` and what to do there, in a method; without a line where it is no Python."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f"{tensor_sources.shown(code.co_filename, subject.target)}:{code.co_firstlineno}: {mend}" if code else mend


def _on_the_way(module: nn.Module, fqn: str) -> Iterator[nn.Module]:
    """The registered modules from `module` to the tensor called `fqn`."""
    yield module
    current: nn.Module | None = module
    for part in _PART.findall(fqn)[:-1]:
        current = current._modules.get(part) if current is not None else None
        if current is None:
            return
        yield current


#: What stands between the dots and brackets of a name.
_PART = re.compile(r"[^.\[\]]+")


def memos(subject: Subject) -> frozenset[str]:
    """The arguments and results that functools.lru_cache keeps for a function of the class, by name."""
    if not any("__closure__" in row.fqn or "[#" in row.fqn for row in subject.state.tensors):
        return frozenset()  # nearly all, without an instance to walk
    held = walk(subject.used()).held
    return frozenset(one.fqn for one in held if any(type(step.held) is _LRU_CACHE for step in one.steps))


# --- verdicts -------------------------------------------------------------------------------------------------------


def skipped(reason: str, **measured: str | None) -> Cell:
    """A cell of what does not apply."""
    return Cell(Verdict.SKIPPED, reason=reason, **measured)


def unclear(reason: str, **measured: str | None) -> Cell:
    """A cell of what could not be told."""
    return Cell(Verdict.INCONCLUSIVE, reason=reason, **measured)


#: `net.py:12: ` in front of what to do there.
PLACED = re.compile(r"\S.*?:\d+: ")


def finding(
    subject: Subject,
    rule: Rule,
    message: str,
    fqn: str | None,
    *,
    help: str | None = None,
    severity: Severity | None = None,
) -> Finding:
    """A finding on one tensor. Its help is `help`, else the row's fix, with the line if it is the user's own.

    A `help` that begins with a line of its own is not to be followed where the tensor was assigned.
    """
    row = subject.rows().get(fqn or "")
    if help and PLACED.match(help):
        row = None
    line = f"{row.origin.file}:{row.origin.line}" if row and row.origin and not _is_installed(row.origin) else None
    if help is None and row and row.fix:
        shown = [f"{line}: {row.fix}" if line else row.fix]
    else:
        shown = [said for said in (help, f"assigned at {line}" if line else None) if said]
    return rule.finding(message, target=subject.target, fqn=fqn, help="; ".join(shown) or None, severity=severity)


def _is_installed(origin: Origin) -> bool:
    """Whether the line is of a library, where a user mends nothing: its file is named as it is below sys.path."""
    if os.path.isfile(origin.file):
        return False
    library = os.path.dirname(os.__file__)
    roots = [root for root in sys.path if root.startswith(library) or f"{os.sep}site-packages" in root]
    return any(os.path.isfile(os.path.join(root, origin.file)) for root in roots)


def check(
    name: Name, how: str, columns: Mapping[str, Mapping[str, Cell]], findings: Iterable[Finding], reasons: Iterable[str]
) -> Check:
    """The proof's answer. A reason makes it inconclusive, if nothing was proved false."""
    found, why = tuple(findings), "; ".join(dict.fromkeys(reasons)) or None
    verdicts = {cell.verdict for cells in columns.values() for cell in cells.values()}
    verdicts |= {Verdict.FAILED} if found else set()
    verdicts |= {Verdict.INCONCLUSIVE} if why else set()
    verdict = next((one for one in _ORDER if one in verdicts), Verdict.SKIPPED)
    shown = tuple(Column(column, dict(cells)) for column, cells in columns.items())
    return Check(name, verdict, how, why or _common(verdict, columns.values()), shown, found)


def _common(verdict: Verdict, columns: Iterable[Mapping[str, Cell]]) -> str | None:
    """Why a proof is not simply passed, where its cells say so: the reason of the first that has the verdict."""
    if verdict in (Verdict.PASSED, Verdict.FAILED):
        return None
    said = [f"{fqn}: {cell.reason}" for cells in columns for fqn, cell in cells.items() if cell.verdict is verdict]
    return f"{said[0]}, and {len(said) - 1} more" if len(said) > 1 else next(iter(said), None)


def nothing(subject: Subject, name: Name) -> Check | None:
    """The answer for a model without a tensor in sight; None for all others."""
    if subject.state.tensors:
        return None
    packed = any(oddity.kind is OddityKind.PACKED_PARAMS for oddity in subject.state.oddities)
    why = " that can be seen: its weights are packed in C++" if packed else ""
    return Check(name, Verdict.SKIPPED, reason=f"the model holds no tensor{why}")


def out_of_reach(subject: Subject) -> list[str]:
    """What keeps a proof of every tensor from being one: tensors in the compiled code of a ScriptModule."""
    return [oddity.message for oddity in subject.state.oddities if oddity.kind is OddityKind.SCRIPT_MODULE]


def lazy(tensor: torch.Tensor) -> bool:
    """Whether there is nothing yet to compare; see `statecli.live.tensors.is_lazy`."""
    return is_lazy(tensor)


def groups(found: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names that lie in one storage, of each storage with several. Empty tensors lie in none."""
    by_storage: dict[int | str, list[str]] = {}
    for name, tensor in found.items():
        if is_lazy(tensor) or tensor.numel():
            by_storage.setdefault(storage(tensor)[0], []).append(name)
    return (names for names in by_storage.values() if len(names) > 1)


def dimensionless(row: TensorInfo) -> bool:
    """Whether operators take it beside tensors of another device (0-dim), or it is an empty placeholder."""
    return row.shape == () or row.elements == 0
