"""Proof `copy`: the model is deep-copied and pickled, and each copy compared with it.

Each tensor has to be there again with the same bits, in memory of its own, and what was tied has to be tied. A tensor
that was computed from others (a non-leaf) breaks `copy.deepcopy`, and with it EMA, swapped weights and every library
that copies models; it is found by copying it alone, and so is any other attribute that cannot be copied (a lock).
Where forward leaves tensors behind, the model is called before, with gradients as a user calls it.

A class attribute is one tensor for all instances, and no copy is made of it. What the class itself leaves out of its
pickles is not judged, nor is a class that cannot be pickled for a reason that is no tensor (a local class, a lambda).
"""

from __future__ import annotations

import copy
from collections import ChainMap
from typing import Any

import torch
from torch import nn

from statecli.commands.verify import judging, rules, save_roundtrip, tensor_bits
from statecli.commands.verify.model_under_test import Subject
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError
from statecli.core.finding import Finding, Severity
from statecli.core.rule import Rule
from statecli.core.state import TensorInfo
from statecli.live.tensors import derived_by, storage
from statecli.live.walk import walk


def prove(subject: Subject) -> Check:
    """Copy an instance both ways."""
    return judging.nothing(subject, Name.COPY) or _Proof(subject).check()


_NON_LEAF_HELP = "compute it in forward, or store it with .detach()"
_RECOMPUTED_HELP = (
    "use torch.nn.utils.parametrizations, or make it plain (remove_weight_norm, prune.remove) before copying"
)
_REFRESHED_HELP = (
    "copy it before its first forward, or make it plain (parametrize.remove_parametrizations) before copying"
)
_OBSTACLE_HELP = "leave it out in a __getstate__ of the class's own, and make it anew in __setstate__"
#: What torch.save raises of modules that it leaves out of pickles on purpose, and what that means.
_BY_DESIGN = {
    "Serialization of parametrized modules is only": "torch.save takes no parametrized module, only its state_dict()",
    "Tried to serialize object __torch__": "torch.save takes no ScriptModule in another module, only its state_dict()",
}


class _Proof:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._reasons: list[str] = []
        self._findings: dict[tuple[str, str | None], Finding] = {}
        self._columns: dict[str, dict[str, Cell]] = {"copied": {}, "pickled": {}}
        self._found: dict[str, torch.Tensor] = {}
        self._module = nn.Module()
        self._left_behind: frozenset[str] = frozenset()
        self._recomputed = judging.recomputed(subject.state)
        self._how = "copy.deepcopy, torch.save and torch.load of the module"

    def check(self) -> Check:
        try:
            module = self._instance()
        except ModelError as error:
            return judging.check(Name.COPY, "", {}, (), [judging.reason_of(self._subject, error)])
        self._found = judging.tensors(module)
        self._module, self._shared = module, _shared_by_all(module)
        self._refreshed = _refreshed(module)
        if module is not self._subject.original:
            # Parameters are left undrawn, and zeros are no proof of anything. Their ends will do: memory that nobody
            # has written to costs nothing until it is copied.
            tensor_bits.perturb((one for one in self._found.values() if type(one) is nn.Parameter), ends_alone=True)
        self._copy(module)
        self._pickle(module)
        return judging.check(Name.COPY, self._how, self._columns, self._findings.values(), self._reasons)

    def _instance(self) -> nn.Module:
        """An instance, or where the way to one is a copy and there is none the model itself, which is only read."""
        try:
            return self._called() or self._subject.used()
        except ModelError:
            if self._subject.original is None:
                raise
            return self._subject.original

    def _called(self) -> nn.Module | None:
        """One that was called as a user calls it, with a graph, where forward leaves tensors behind; None elsewhere.

        Also where forward works without gradients only: nobody then copies what it leaves behind with a graph.
        """
        if not (self._subject.appeared or self._subject.assigned):
            return None
        module = self._subject.fresh()
        before = _computed(module)
        _, raised = judging.attempt(self._subject, "calling it", lambda: self._subject.call(module, grad=True))
        if raised:
            return None
        self._left_behind = _computed(module) - before
        return module

    def _copy(self, module: nn.Module) -> None:
        copied, raised = judging.attempt(self._subject, "copying it", lambda: copy.deepcopy(module))
        if raised is None:
            self._columns["copied"] = self._compare(copied, "a deep copy")
            return
        if not (self._uncopied() or self._obstacles(module)):
            if any(map(judging.lazy, self._found.values())):
                self._reasons.append(raised)  # a buffer without a shape yet has no deep copy
            else:
                self._fail(rules.NOT_COPYABLE, None, f"copy.deepcopy of the model does not work: {raised}")
        why = next((finding.message for finding in self._findings.values()), raised)
        for row in self._rows():
            self._columns["copied"].setdefault(row.fqn, judging.unclear(why))

    def _uncopied(self) -> bool:
        """Names the tensors that cannot be copied even alone; whether there are any."""
        rows = self._subject.rows()
        broken = {name: one for name, one in self._found.items() if not judging.lazy(one) and not _copies(one)}
        for name, tensor in broken.items():
            operation = derived_by(tensor)
            is_what = f"computed by {operation} and no leaf of the graph" if operation else _form(tensor)
            when = "after a forward " if name in self._left_behind else ""
            what = f"{is_what}, so {when}copy.deepcopy of the model raises"
            if name in rows:
                self._columns["copied"][name] = Cell(Verdict.FAILED, reason=what)
            help = _REFRESHED_HELP if name in self._refreshed else _NON_LEAF_HELP
            help = _RECOMPUTED_HELP if name in self._recomputed else help
            rule = rules.NON_LEAF_ATTRIBUTE if operation else rules.NOT_COPYABLE
            self._fail(rule, name, f"{name} is {what}", help if operation else None)
        return bool(broken)

    def _obstacles(self, module: nn.Module) -> bool:
        """Names the attributes that are no tensors and cannot be copied even alone; whether there are any."""
        found = _uncopyable(self._subject, module)
        for name, why in found.items():
            self._fail(rules.NOT_COPYABLE, name, f"{name}: {why}, so copy.deepcopy of the model raises", _OBSTACLE_HELP)
        return bool(found)

    def _pickle(self, module: nn.Module) -> None:
        pickled, raised = judging.attempt(self._subject, "pickling it", lambda: save_roundtrip.module(module))
        if raised is None:
            self._columns["pickled"] = self._compare(pickled, "a pickled copy")
        elif why := _is_not_pickled(module, raised):
            self._how = f"copy.deepcopy of the module; it is not pickled: {why}"
            self._columns["pickled"] = {row.fqn: judging.skipped(why) for row in self._rows()}
        else:
            self._columns["pickled"] = {row.fqn: judging.unclear(raised) for row in self._rows()}
            self._reasons.append(raised)

    def _rows(self) -> tuple[TensorInfo, ...]:
        return self._subject.state.tensors

    # --- one copy ------------------------------------------------------------------------------------------------

    def _compare(self, module: Any, what: str) -> dict[str, Cell]:
        if not isinstance(module, nn.Module):
            self._reasons.append(f"{what} of the model is a {type(module).__name__}, not a module")
            return {}
        copied = judging.tensors(module)
        cells = {row.fqn: self._cell(row, copied, what) for row in self._rows()}
        self._broken(copied, cells, what)
        return cells

    def _cell(self, row: TensorInfo, copied: dict[str, torch.Tensor], what: str) -> Cell:
        original, other = self._found.get(row.fqn), copied.get(row.fqn)
        if original is None:
            return judging.unclear("it is not there in a second instance of the model")
        if row.fqn in self._shared:
            return judging.skipped("class attribute: one tensor for all instances")
        if other is None:
            return self._absent(row, what)
        if _in_one_storage(original, other):
            message = f"{what} shares its memory with the original: to change the one is to change the other"
            return self._failed(rules.SHARED_WITH_COPY, row, message)
        if judging.lazy(original):
            return judging.skipped("uninitialized: it has no values before a first forward")
        same = tensor_bits.same(original, other)
        if same is None and original.device.type == "meta":
            return Cell(Verdict.PASSED)
        if same is None:
            return judging.unclear("its values cannot be compared")
        return Cell(Verdict.PASSED) if same else self._failed(rules.CHANGED_BY_COPY, row, f"{what} has other values")

    def _absent(self, row: TensorInfo, what: str) -> Cell:
        if row.persistent is not None or row.kind.value == "parameter":
            return self._failed(rules.LOST_BY_COPY, row, f"{what} is without it")
        return judging.skipped(f"the class leaves it out: {what} is without it")

    def _failed(self, rule: Rule, row: TensorInfo, message: str) -> Cell:
        help = judging.in_own_method(self._subject, self._module, row.fqn, _METHODS, "let {} make a copy of its own")
        self._fail(rule, row.fqn, f"{row.fqn}: {message}", help)
        return Cell(Verdict.FAILED, reason=message)

    def _fail(self, rule: Rule, fqn: str | None, message: str, help: str | None = None) -> None:
        """One finding a tensor and rule, whichever copy shows it first."""
        finding = judging.finding(self._subject, rule, message, fqn, help=help, severity=Severity.ERROR)
        self._findings.setdefault((rule.name, fqn), finding)

    def _broken(self, copied: dict[str, torch.Tensor], cells: dict[str, Cell], what: str) -> None:
        """Fails the later name of each tie that the copy has parted, and each further name that points back."""
        for names in judging.groups({n: t for n, t in self._found.items() if n in copied and n not in self._shared}):
            first = names[0]
            for name in names[1:]:
                if name in self._recomputed | self._refreshed or _in_one_storage(copied[first], copied[name]):
                    continue
                back = name not in cells and _in_one_storage(self._found[name], copied[name])
                rule = rules.SHARED_WITH_COPY if back else rules.UNTIED_BY_COPY
                message = "still points at the original's memory" if back else f"no longer tied to {first}"
                if name in cells:
                    cells[name] = Cell(Verdict.FAILED, reason=f"{message} in {what}")
                self._fail(rule, name, f"{name}: {message} in {what}")


#: What a class decides by how it is copied and pickled.
_METHODS = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce_ex__", "__reduce__")


def _computed(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, one in judging.tensors(module).items() if not one.is_leaf)


def _copies(tensor: torch.Tensor) -> bool:
    with torch._C._EnableTorchFunction():
        try:
            copy.deepcopy(tensor)
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return True


def _uncopyable(subject: Subject, module: nn.Module) -> dict[str, str]:
    """What copying each plain attribute of each submodule alone raises, by name; its tensors and modules are let be."""
    memo: dict[int, Any] = {id(one): one for one in (*module.modules(), *judging.tensors(module).values())}
    raised: dict[str, str] = {}
    for prefix, one in module.named_modules():
        for name, value in vars(one).items():
            why = None if name in _OF_TORCH else _why_not_copied(subject, value, ChainMap({}, memo))
            if why:
                raised[f"{prefix}.{name}" if prefix else name] = why
    return raised


_OF_TORCH = frozenset(vars(nn.Module()))


def _why_not_copied(subject: Subject, value: object, memo: ChainMap[int, Any]) -> str | None:
    try:
        with subject.user_code("copying it"):
            copy.deepcopy(value, memo)  # type: ignore[arg-type]  # what it copies goes into the first map alone
    except ModelError as error:
        cause = error.__cause__
        return " ".join(f"{cause}".split()) or type(cause).__name__
    return None


def _is_not_pickled(module: nn.Module, raised: str) -> str | None:
    """Why nobody would expect the model to be pickled, if so: that says nothing of its state."""
    meant = next((meaning for words, meaning in _BY_DESIGN.items() if words in raised), None)
    if meant:
        return meant
    if any("<locals>" in type(one).__qualname__ for one in module.modules()):
        return "a class of the model is local to a function: Python pickles none such"
    return None


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.layout} {tensor.dtype}, which torch does not copy".replace("torch.", "", 2)


def _refreshed(module: nn.Module) -> frozenset[str]:
    """The flat weights of parametrized RNNs, which torch fills anew where forward finds that they have changed."""
    rnns = [(prefix, one) for prefix, one in module.named_modules() if isinstance(one, nn.RNNBase)]
    return frozenset(
        f"{prefix}{'.' if prefix else ''}_flat_weights[{number}]"
        for prefix, one in rnns
        for number, name in enumerate(one._flat_weights_names)
        if name not in one._parameters
    )


def _shared_by_all(module: nn.Module) -> frozenset[str]:
    held = walk(module).held
    return frozenset(one.fqn for one in held if any(step.how == "class" for step in one.steps))


def _in_one_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    if judging.lazy(one) or judging.lazy(other):
        return one is other
    return one.numel() > 0 and storage(one)[0] == storage(other)[0]
