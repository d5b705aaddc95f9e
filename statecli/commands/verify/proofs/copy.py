"""Run the proof `copy`: deep-copy and pickle the model, and compare each copy with the model.

Each copied tensor must have the same bits in its own memory, and tied weights must stay tied. A tensor computed from
other tensors (a non-leaf) breaks `copy.deepcopy`, which EMA and every library that copies models use. Non-leaves and
other attributes that cannot be copied (a lock) are found by copying each attribute on its own. If forward creates
tensors, the model is first called with gradients, as a user calls it.

A class attribute is a single tensor for all instances and is not copied. Not tested: values that the class's own
pickling omits, and classes that cannot be pickled for a reason other than tensors (a local class, a lambda).
"""

from __future__ import annotations

import copy
from collections import ChainMap
from typing import Any

import torch
from torch import nn

from statecli.commands.verify import check_builder, rules, save_roundtrip
from statecli.commands.verify.kept_values import OWN_ATTRIBUTES
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core import move_rules
from statecli.core.errors import ModelError
from statecli.core.finding import Consequence, Severity, Wording
from statecli.core.model_state import TensorInfo
from statecli.core.rule import Rule
from statecli.live import measure, tensor_bits
from statecli.live.tensors import get_grad_fn_name, identify_storage, is_lazy
from statecli.live.walk import walk


def prove(subject: ModelUnderTest) -> Check:
    """Copy an instance with `copy.deepcopy` and by pickling, and compare each copy with the instance."""
    return check_builder.check_empty_model(subject, Name.COPY) or _Proof(subject).check()


_NON_LEAF_HELP = "compute the tensor in forward, or store it with .detach()"
#: Remedy for a tensor that an earlier forward has stored.
_STORED_HELP = "store the tensor with .detach(), because copy.deepcopy refuses a tensor with a graph"
_RECOMPUTED_HELP = "use torch.nn.utils.parametrizations, or call remove_weight_norm or prune.remove before copying"
_FLAT_WEIGHTS_HELP = (
    "copy the model before its first forward, or call parametrize.remove_parametrizations before copying"
)
_OBSTACLE_HELP = "remove the attribute in __getstate__ of the class, and create the attribute again in __setstate__"
#: Beginnings of torch.save's errors for modules that torch leaves out of pickles by design, with the meaning.
_PICKLE_ERRORS_BY_DESIGN = {
    "Serialization of parametrized modules is only": "torch.save cannot save parametrized modules, only a state_dict()",
    "Tried to serialize object __torch__": "torch.save cannot save a nested ScriptModule, only a state_dict()",
}


class _Proof(Proof):
    def __init__(self, subject: ModelUnderTest) -> None:
        super().__init__(
            subject, Name.COPY, "copy.deepcopy, torch.save and torch.load of the module", "copied", "pickled"
        )
        self._rows = subject.state.tensors
        self._reasons.clear()  # a copy also has the tensors in the compiled code of a ScriptModule
        self._reported: set[tuple[str, str | None]] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._module = nn.Module()
        self._non_leaves_of_forward: frozenset[str] = frozenset()
        self._recomputed = subject.state.recomputed
        self._ties_broken_by_move = move_rules.map_broken_ties(subject.state)
        self._stale_views = move_rules.map_stale_views(subject.state)

    def _run(self) -> None:
        module = self._build_instance()
        self._tensors = measure.map_tensors(module)
        self._module, self._class_attributes = module, _find_class_attributes(module)
        self._flat_weights = _find_flat_weights(module)
        if module is not self._subject.original:
            # Parameters are not drawn in this instance, and zeros would prove nothing. Only the ends are written,
            # because memory without writes costs nothing until it is copied.
            tensor_bits.perturb(
                (tensor for tensor in self._tensors.values() if type(tensor) is nn.Parameter), ends_alone=True
            )
        self._copy(module)
        self._pickle(module)

    def _build_instance(self) -> nn.Module:
        """Build an instance. If the live model cannot be copied, return the live model itself, only for reading."""
        try:
            return self._call_instance() or self._subject.build_used()
        except ModelError:
            if self._subject.original is None:
                raise
            return self._subject.original

    def _call_instance(self) -> nn.Module | None:
        """Return an instance after a call with gradients. Return None if forward creates and reassigns no tensors.

        Also return None if forward works only without gradients, because then no user copies an instance with a graph.
        """
        if not (self._subject.created_by_forward or self._subject.reassigned_by_forward):
            return None
        module = self._subject.build_for_call()
        before = _find_non_leaves(module)
        _, error_text = check_builder.run_user_code(
            self._subject, "calling the model", lambda: self._subject.call(module, grad=True)
        )
        if error_text:
            return None
        self._non_leaves_of_forward = _find_non_leaves(module) - before
        return module

    def _copy(self, module: nn.Module) -> None:
        copied_model, error_text = check_builder.run_user_code(
            self._subject, "copying the model", lambda: copy.deepcopy(module)
        )
        if error_text is None:
            self._columns["copied"] = self._compare(copied_model, "a deep copy")
            return
        reasons = self._fail_uncopyable_tensors() or self._fail_obstacles(module)
        if not reasons:
            if any(map(is_lazy, self._tensors.values())):
                self._reasons.append(error_text)  # a buffer without a shape cannot be deep-copied yet
            else:
                self._fail(rules.NOT_COPYABLE, None, f"copy.deepcopy of the model fails: {error_text}")
        for row in self._rows:
            self._columns["copied"].setdefault(
                row.fqn, check_builder.build_inconclusive_cell(next(iter(reasons), error_text))
            )

    def _fail_uncopyable_tensors(self) -> list[str]:
        """Report each tensor that copy.deepcopy cannot copy. Return the reasons."""
        rows, reasons = self._subject.rows_by_fqn, []
        uncopyable = {
            name: tensor_
            for name, tensor_ in self._tensors.items()
            if not is_lazy(tensor_) and not _is_copyable(tensor_)
        }
        for name, tensor in uncopyable.items():
            operation = get_grad_fn_name(tensor)
            is_what = f"computed by autograd ({operation}), not a leaf tensor" if operation else _describe_form(tensor)
            moment = "after a forward " if name in self._non_leaves_of_forward else ""
            explanation = f"{is_what}, so {moment}copy.deepcopy of the model raises an error"
            if name in rows:
                self._columns["copied"][name] = Cell(Verdict.FAILED, reason=explanation)
            help = _STORED_HELP if name in self._non_leaves_of_forward else _NON_LEAF_HELP
            help = _FLAT_WEIGHTS_HELP if name in self._flat_weights else help
            help = _RECOMPUTED_HELP if name in self._recomputed else help
            rule = rules.NON_LEAF_ATTRIBUTE if operation else rules.NOT_COPYABLE
            stale_view = self._stale_views.get(name)
            if operation and stale_view:  # one mistake: the attribute is a view of a parameter
                wording = Wording(
                    f"{stale_view.message}; {name} is {explanation}", consequence=Consequence(f"is {explanation}")
                )
                self._fail(move_rules.STALE_VIEW, name, wording, move_rules.STALE_VIEW_HELP)
            else:
                self._fail(rule, name, f"{name}: {explanation}", help if operation else None)
            reasons.append(f"{name}: {explanation}")
        return reasons

    def _fail_obstacles(self, module: nn.Module) -> list[str]:
        """Report each attribute, other than tensors, that copy.deepcopy cannot copy. Return the reasons."""
        obstacles = _find_obstacles(self._subject, module)
        reasons = [f"{name}: {why}, so copy.deepcopy of the model raises an error" for name, why in obstacles.items()]
        for name, reason in zip(obstacles, reasons, strict=True):
            self._fail(rules.NOT_COPYABLE, name, reason, _OBSTACLE_HELP)
        return reasons

    def _pickle(self, module: nn.Module) -> None:
        pickled, error_text = check_builder.run_user_code(
            self._subject, "pickling the model", lambda: save_roundtrip.copy_module(module)
        )
        if error_text is None:
            self._columns["pickled"] = self._compare(pickled, "a pickled copy")
        elif reason := _describe_unpicklable(module, error_text):
            self._how = f"copy.deepcopy of the module; the copy with pickle was not checked, because {reason}"
            self._columns["pickled"] = {row.fqn: check_builder.skip_cell(reason) for row in self._rows}
        else:
            self._columns["pickled"] = {
                row.fqn: check_builder.build_inconclusive_cell(error_text) for row in self._rows
            }
            self._reasons.append(error_text)

    # --- one copy ------------------------------------------------------------------------------------------------

    def _compare(self, module: object, copy_kind: str) -> dict[str, Cell]:
        if not isinstance(module, nn.Module):
            self._reasons.append(f"{copy_kind} of the model is a {type(module).__name__}, not a module")
            return {}
        copied_tensors = measure.map_tensors(module)
        cells = {row.fqn: self._build_cell(row, copied_tensors, copy_kind) for row in self._rows}
        self._fail_broken_ties(copied_tensors, cells, copy_kind)
        return cells

    def _build_cell(self, row: TensorInfo, copied_tensors: dict[str, torch.Tensor], copy_kind: str) -> Cell:
        original, copied_tensor = self._tensors.get(row.fqn), copied_tensors.get(row.fqn)
        if original is None:
            return check_builder.build_inconclusive_cell(check_builder.ABSENT_REASON)
        if row.fqn in self._class_attributes:
            return check_builder.skip_cell("class attribute, shared by all instances")
        if copied_tensor is None:
            return self._judge_absent(row, copy_kind)
        if _share_storage(original, copied_tensor):
            message = f"{copy_kind} shares memory with the original, so training the copy also changes the original"
            return self._build_failed_cell(rules.SHARED_WITH_COPY, row, message)
        if is_lazy(original):
            return check_builder.skip_cell("uninitialized: no values before the first forward")
        has_same_bits = tensor_bits.is_same(original, copied_tensor)
        if has_same_bits is None and original.device.type == "meta":
            return Cell(Verdict.PASSED)
        if has_same_bits is None:
            return check_builder.build_inconclusive_cell("the values cannot be compared")
        return (
            Cell(Verdict.PASSED)
            if has_same_bits
            else self._build_failed_cell(rules.CHANGED_BY_COPY, row, f"{copy_kind} of the model has other values")
        )

    def _judge_absent(self, row: TensorInfo, copy_kind: str) -> Cell:
        if row.persistent is not None or row.kind.value == "parameter":
            return self._build_failed_cell(rules.LOST_BY_COPY, row, f"{copy_kind} of the model lacks this tensor")
        return check_builder.skip_cell(f"the class leaves the tensor out of {copy_kind}")

    def _build_failed_cell(self, rule: Rule, row: TensorInfo, message: str) -> Cell:
        help = check_builder.suggest_in_own_method(
            self._subject, self._module, row.fqn, _COPY_METHODS, "copy the tensor in {}"
        )
        self._fail(rule, row.fqn, f"{row.fqn}: {message}", help)
        return Cell(Verdict.FAILED, reason=message)

    def _fail(
        self,
        rule: Rule,
        fqn: str | None,
        message: str | Wording,
        help: check_builder.Help = None,
        *,
        severity: Severity | None = None,
    ) -> None:
        """Add a finding, unless the rule was already reported for the tensor."""
        if (rule.name, fqn) not in self._reported:
            self._reported.add((rule.name, fqn))
            self.report(rule, message, fqn, help=help, severity=severity)

    def _fail_broken_ties(
        self, copied_tensors: dict[str, torch.Tensor], cells: dict[str, Cell], copy_kind: str
    ) -> None:
        """Report each tied tensor that the copy unties, or whose copy still shares memory with the original."""
        for names in check_builder.iter_shared_groups(
            {n: t for n, t in self._tensors.items() if n in copied_tensors and n not in self._class_attributes}
        ):
            first = names[0]
            for name in names[1:]:
                if name in self._recomputed | self._flat_weights or _share_storage(
                    copied_tensors[first], copied_tensors[name]
                ):
                    continue
                points_back = name not in cells and _share_storage(self._tensors[name], copied_tensors[name])
                rule = rules.SHARED_WITH_COPY if points_back else rules.UNTIED_BY_COPY
                message = (
                    "still points to the memory of the original"
                    if points_back
                    else (f"no longer shares memory with {first} (tied weights)")
                )
                cells[name] = Cell(Verdict.FAILED, reason=f"{message} in {copy_kind}")
                tie = self._ties_broken_by_move.get(name)
                severity = tie.severity if tie is not None and rule is rules.UNTIED_BY_COPY else None
                self._fail(rule, name, f"{name}: {message} in {copy_kind}", severity=severity)


#: Methods by which a class decides how it is copied and pickled.
_COPY_METHODS = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce_ex__", "__reduce__")


def _find_non_leaves(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, tensor in measure.map_tensors(module).items() if not tensor.is_leaf)


def _is_copyable(tensor: torch.Tensor) -> bool:
    with torch._C._EnableTorchFunction():
        try:
            copy.deepcopy(tensor)
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return True


def _find_obstacles(subject: ModelUnderTest, module: nn.Module) -> dict[str, str]:
    """Try to copy each attribute that is not a tensor or module. Return the errors by attribute name."""
    memo: dict[int, Any] = {
        id(module_): module_ for module_ in (*module.modules(), *measure.map_tensors(module).values())
    }
    errors: dict[str, str] = {}
    for prefix, module_ in module.named_modules():
        for name, value in vars(module_).items():
            reason = None if name in OWN_ATTRIBUTES else _try_to_copy(subject, value, ChainMap({}, memo))
            if reason:
                errors[f"{prefix}.{name}" if prefix else name] = reason
    return errors


def _try_to_copy(subject: ModelUnderTest, value: object, memo: ChainMap[int, Any]) -> str | None:
    try:
        with subject.user_code("copying the model"):
            copy.deepcopy(value, memo)  # type: ignore[arg-type]  # writes only to the first map
    except ModelError as error:
        cause = error.__cause__
        return " ".join(f"{cause}".split()) or type(cause).__name__
    return None


def _describe_unpicklable(module: nn.Module, error_text: str) -> str | None:
    """Return why pickling fails if the model's state is not the cause, for example a local class. Else return None."""
    meaning_ = next((meaning for words, meaning in _PICKLE_ERRORS_BY_DESIGN.items() if words in error_text), None)
    if meaning_:
        return meaning_
    if any("<locals>" in type(submodule).__qualname__ for submodule in module.modules()):
        return "a class of the model is defined inside a function, and Python cannot pickle such a class"
    return None


def _describe_form(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"{kind.__name__}, a tensor subclass that torch does not copy"
    return f"{tensor.layout} {tensor.dtype}, which torch does not copy".replace("torch.", "", 2)


def _find_flat_weights(module: nn.Module) -> frozenset[str]:
    """Return the names of `_flat_weights` entries of parametrized RNNs. torch sets these entries again in forward."""
    rnns = [(prefix, rnn) for prefix, rnn in module.named_modules() if isinstance(rnn, nn.RNNBase)]
    return frozenset(
        f"{prefix}{'.' if prefix else ''}_flat_weights[{number}]"
        for prefix, rnn in rnns
        for number, name in enumerate(rnn._flat_weights_names)
        if name not in rnn._parameters
    )


def _find_class_attributes(module: nn.Module) -> frozenset[str]:
    unregistered = walk(module).unregistered
    return frozenset(entry.fqn for entry in unregistered if any(step.how == "class" for step in entry.steps))


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    if is_lazy(first) or is_lazy(second):
        return first is second
    return first.numel() > 0 and identify_storage(first) == identify_storage(second)
