"""Run the proof `materialize`: build on meta, call `to_empty`, initialize, load, and find uninitialized values.

Large models are built on meta and get memory afterwards. Then a tensor outside of `state_dict()`, such as a buffer with
`persistent=False`, keeps the old contents of the memory, unless an init method writes it. Two instances decide: their
memory is filled with different patterns (NaN in the first), and the same code runs on both. A differing element comes
from the pattern.

Init methods run before the load, as in torchtitan: `reset_parameters()` of each module, `_init_weights(module)` of the
nearest module with this method, and `init_weights()` of the outermost modules with this method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from statecli.commands.verify import check_builder, rules
from statecli.commands.verify.init_methods import INIT_METHODS, is_inside, list_init_methods
from statecli.commands.verify.inputs import use_seed
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.read_by_forward import ReadRecorder
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core import move_rules
from statecli.core.errors import ModelError
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.rule import Rule
from statecli.live import measure, tensor_bits
from statecli.live.rebuild import Rebuild, compare_builds
from statecli.live.tensors import is_lazy

HOW = "build on meta, to_empty(), init methods, load_state_dict()"


def prove(subject: ModelUnderTest) -> Check:
    """Materialize two instances built on meta, and compare them with each other and with an ordinary instance."""
    return check_builder.check_without_values(subject, Name.MATERIALIZE, HOW, "load") or _Proof(subject).check()


@dataclass(frozen=True)
class _Pattern:
    """Values with which memory is filled. `byte` is for dtypes that cannot be filled with a number."""

    number: float
    integer: int
    byte: int

    def fill(self, tensor: torch.Tensor) -> None:
        """Fill all the memory of `tensor`, if the tensor has memory."""
        memory = tensor_bits.get_flat_memory(tensor)
        if memory is None:
            return
        if memory.dtype is torch.bool:
            memory.fill_(self.integer % 2)
        elif not (memory.is_floating_point() or memory.is_complex()):
            memory.fill_(self.integer)
        elif memory.element_size() > 1:
            memory.fill_(self.number)
        else:
            memory.view(torch.uint8).fill_(self.byte)


_NAN = _Pattern(float("nan"), 110, 0x7F)
#: Fill values with which forward can compute: the index 1 is valid in most tables.
_ONES = _Pattern(1.0, 1, 0x38)


class _FillMemory(TorchFunctionMode):
    """Fill the memory that `to_empty()` allocates, before the class can write values."""

    def __init__(self, pattern: _Pattern) -> None:
        super().__init__()
        self._pattern = pattern

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty_like:
            self._pattern.fill(result)
        return result


@dataclass
class _Materialized:
    """An instance that was built on meta, allocated by `to_empty`, initialized, and loaded.

    Attributes:
        module: The instance.
        tensors: Its tensors by name.
        errors: The error of an init method, by the path of its module.
    """

    module: nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class _Proof(Proof):
    def __init__(self, subject: ModelUnderTest) -> None:
        super().__init__(subject, Name.MATERIALIZE, HOW, "materialized")
        self._built_tensors: dict[str, torch.Tensor] = {}
        self._rebuilds: dict[str, Rebuild] | None = None
        self._state: Mapping[str, object] = {}
        self._repeated_tensors: dict[str, torch.Tensor] | None = None

    def _run(self) -> None:
        module = self._subject.build_fresh(values=not self._subject.rebuilds)
        self._built_tensors = measure.map_tensors(module)
        if any(map(is_lazy, self._built_tensors.values())):
            self._reasons.append(
                "the model has lazy parameters without a shape, for which to_empty() cannot allocate memory"
            )
            return
        self._state = check_builder.read_state_dict(self._subject, module)
        first, second = (self._materialize(pattern) for pattern in (_NAN, _ONES))
        if first is None or second is None:
            return
        faults = self._find_faults(first, second)
        unread_names = self._find_unread_names(second, faults) if faults else frozenset()
        for name, (rule, message) in faults.items():
            self._fail(rule, name, message, first.module, is_read=name not in unread_names)

    # --- the operation -------------------------------------------------------------------------------------------

    def _build_on_meta(self) -> nn.Module | None:
        """Build an instance on the meta device. If the constructor fails there, add a finding and return None."""
        if not self._subject.rebuilds:
            module = self._subject.build_fresh()
            with self._subject.user_code("moving the model to meta"):
                return module.to("meta")
        if self._findings:
            return None
        try:
            with torch.device("meta"):
                return self._subject.build_fresh()
        except ModelError as error:
            rule, reason = rules.NOT_BUILT_ON_META, check_builder.get_reason(self._subject, error)
            message = f"the constructor fails on meta: {reason.removeprefix('building the model raised ')}"
            self.report(rule, message, None, help=rule.fix)
            return None

    def _materialize(self, pattern: _Pattern) -> _Materialized | None:
        """Return an instance materialized in memory filled with `pattern`, or None if it cannot be built on meta."""
        module = self._build_on_meta()
        if module is None:
            return None
        result = _Materialized(module)
        with check_builder.keep_class_attributes(module), use_seed(0, module), torch.no_grad():
            with self._subject.user_code("to_empty()"), _FillMemory(pattern):
                module.to_empty(device="cpu")
            for path, name, method in list_init_methods(module, self._state):
                _, error_text = check_builder.run_user_code(self._subject, f"{name} of {path or 'the model'}", method)
                if error_text is not None:
                    result.errors.setdefault(path, error_text)
            with self._subject.user_code("load_state_dict(strict=True) with the model's state_dict"):
                module.load_state_dict(self._state, strict=True)
            result.tensors = measure.map_tensors(module)
        return result

    # --- verdicts ------------------------------------------------------------------------------------------------

    def _find_faults(self, first: _Materialized, second: _Materialized) -> dict[str, tuple[Rule, str]]:
        """Fill the cells of tensors without a fault. For each other tensor, return the broken rule and a message."""
        recomputed = check_builder.measure_stand_in_move(self._subject).recomputed
        faults: dict[str, tuple[Rule, str]] = {}
        for row in self._subject.state.tensors:
            name = row.fqn
            if name in recomputed:
                self._cells[name] = check_builder.skip_cell(check_builder.RECOMPUTED_REASON)
            elif name in self._subject.created_by_forward:
                self._cells[name] = check_builder.skip_cell("the first forward creates the tensor")
            elif name not in first.tensors or name not in second.tensors or name not in self._built_tensors:
                reason = check_builder.ABSENT_REASON
                self._cells[name] = check_builder.build_inconclusive_cell(reason)
            else:
                fault = self._judge(row, first, second)
                if fault is not None:
                    faults[name] = fault
        # Aliases have no row of their own. The fix for an unregistered tensor also repairs its aliases.
        rows = (row for row in self._subject.state.tensors if row.kind is not Kind.UNREGISTERED)
        aliases = (alias for row in rows for alias in row.aliases)
        for alias in (alias for alias in aliases if alias in first.tensors and first.tensors[alias].is_meta):
            faults[alias] = rules.LEFT_ON_META, _LEFT_ON_META
        return faults

    def _judge(self, row: TensorInfo, first: _Materialized, second: _Materialized) -> tuple[Rule, str] | None:
        """Return the rule that a tensor breaks, and a message. Without a broken rule, fill the cell and return None."""
        name = row.fqn
        tensors = first.tensors[name], second.tensors[name]
        if any(tensor.is_meta for tensor in tensors):
            needs_init = "persistent=False" in (row.fix or "")
            return rules.LEFT_ON_META, _LEFT_ON_META + (_NEEDS_INIT if needs_init else "")
        has_same_bits = tensor_bits.is_same(*tensors)
        if has_same_bits is None:
            self._cells[name] = check_builder.build_inconclusive_cell("the values cannot be compared")
        elif has_same_bits:
            if not self._subject.rebuilds and row.kind is Kind.UNREGISTERED and not row.moves:
                self._cells[name] = check_builder.build_inconclusive_cell(_NOT_ON_META_REASON)
                return None
            if not self._is_built_otherwise(row, tensors[0]):
                self._cells[name] = Cell(Verdict.PASSED)
                return None
            return rules.CHANGED_BY_MATERIALIZING, "an init method writes other values than the constructor"
        else:
            error_text = next((reason for path, reason in first.errors.items() if is_inside(name, path)), None)
            if error_text is None and self._is_reproduced(name, tensors[0]):
                return rules.LOST_BY_MATERIALIZING, _UNWRITTEN + (_NOT_COMPUTED if row.persistent is False else "")
            reason = (
                "the init methods write different values each time"
                if error_text is None
                else f"not initialized, because {error_text}"
            )
            self._cells[name] = check_builder.build_inconclusive_cell(reason)
        return None

    def _is_reproduced(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if a third instance, filled with the same pattern as the first instance, has the same values."""
        if self._repeated_tensors is None:
            repetition = self._materialize(_NAN)
            self._repeated_tensors = {} if repetition is None else repetition.tensors
        return name in self._repeated_tensors and tensor_bits.is_same(tensor, self._repeated_tensors[name]) is True

    def _is_built_otherwise(self, row: TensorInfo, tensor: torch.Tensor) -> bool:
        """Return True if the constructor always sets the same values, but `tensor` has different values."""
        built_tensor = self._built_tensors[row.fqn]
        if (
            not self._subject.rebuilds
            or tensor_bits.is_same(built_tensor, tensor) is not False
            or _is_close(built_tensor, tensor)
        ):
            return False
        if self._rebuilds is None:
            rows = self._subject.state.tensors
            self._rebuilds = compare_builds(
                lambda seed: self._subject.build_fresh(values=True, seed=seed),
                {other.fqn: other.elements or 0 for other in rows},
            )
        return self._rebuilds.get(row.fqn) is Rebuild.IDENTICAL

    def _find_unread_names(self, instance: _Materialized, names: Mapping[str, object]) -> frozenset[str]:
        """Return the tensors that forward does not read, or an empty set if forward cannot be called."""
        if self._subject.inputs is None:
            return frozenset()
        read_names: set[str] = set()
        try:
            with ReadRecorder({name: instance.tensors[name] for name in names}, read_names):
                self._subject.call(instance.module)
        except ModelError:
            return frozenset()
        return frozenset(names) - read_names

    def _fail(self, rule: Rule, name: str, message: str, module: nn.Module, *, is_read: bool) -> None:
        row = self._subject.rows_by_fqn.get(name)
        severity = None
        if not is_read:
            message, severity = f"{message}; forward does not read the tensor", rule.cases["not read"]
        elif rule is rules.LEFT_ON_META and self._subject.inputs is None:
            severity = rule.cases["without an input"]
        if row is None:
            help: str | None = move_rules.STALE_VIEW_HELP
        else:
            help = None if row.kind is Kind.UNREGISTERED else _describe_fix(module, name, rule)
        self.report(rule, f"{name}: {message}", name, help=help, severity=severity)
        self._cells[name] = Cell(Verdict.FAILED, reason=message)


# --- words and values -------------------------------------------------------------------------------------------------


_LEFT_ON_META = "left on meta, because to_empty() does not allocate the tensor"
_NOT_ON_META_REASON = (
    "a copy of a live model keeps the tensor on the cpu, so statecli cannot check the tensor of a model built on meta"
)
_UNWRITTEN = "uninitialized after to_empty() and load_state_dict()"
_NOT_COMPUTED = "; state_dict() lacks the tensor, and no init method computes all of its values"
_NEEDS_INIT = "; a buffer also needs an init method such as reset_parameters() that computes the values"


def _describe_fix(module: nn.Module, name: str, rule: Rule) -> str:
    """Return advice on which method should write a registered tensor: an existing init method, or a new method."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = type(module.get_submodule(path))
    except AttributeError:
        return rule.fix
    init_method = next((method for method in INIT_METHODS if method in vars(owner)), None)
    init_method = init_method or next((method for method in INIT_METHODS if hasattr(owner, method)), None)
    if rule is rules.CHANGED_BY_MATERIALIZING:
        remedy = f"compute {attribute} with the same function in __init__ and in the init methods"
    elif init_method is None:
        remedy = (
            f"add a method reset_parameters() to {owner.__name__} that computes {attribute}, and call it in __init__"
        )
    else:
        remedy = f"compute {attribute} also in {owner.__name__}.{init_method}()"
    return check_builder.address_to_library(owner, remedy)


def _is_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True for numbers that differ only by rounding."""
    try:
        return first.shape == second.shape and torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)
    except (RuntimeError, NotImplementedError):
        return False
