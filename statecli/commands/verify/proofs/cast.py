"""Run the proof `cast`: cast the model to other dtypes, and check each tensor's dtype and the integer values.

The casts are `.to(torch.float64)`, `.half()` and `.bfloat16()` in turn, or only the requested dtype. The casts share an
instance, but a cast after a fault gets a new instance. Floating-point tensors must follow each cast, integers and bools
must stay unchanged, and complex numbers must stay complex. The same holds for the aliases of a tensor.

Not tested: tensors recomputed by torch before each forward; tensors of the first forward that forward does not read in
another dtype; tensors held by a parameter whose class has its own `.to` (bitsandbytes keeps scales in float32). Not
tested either: unregistered tensors that the class's own `_apply` moves but does not cast. The class keeps their dtype
on purpose, for example by a `half()` without effect (torchmetrics keeps its sums out of half precision).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.commands.verify import check_builder, read_by_forward, recast_by_forward, rules
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError, UsageError, option
from statecli.core.finding import Consequence, Finding, Wording
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.move_rules import STALE_VIEW, map_stale_views
from statecli.core.rule import Rule
from statecli.core.severity import decide_tensor_severity, is_trainable, measure_effect
from statecli.live import measure, tensor_bits
from statecli.live.move_model import get_moved_model
from statecli.live.object_attributes import is_scripted
from statecli.live.object_contents import has_own_to
from statecli.live.quantized_parameters import find_holding_tensor
from statecli.live.tensors import is_lazy
from statecli.live.walk import walk

#: A cast: the call as users write it, the dtype of floating-point tensors after the call, and the function.
_Cast = tuple[str, torch.dtype, Callable[[nn.Module], object]]
_CASTS: tuple[_Cast, ...] = (
    (".to(torch.float64)", torch.float64, lambda module: module.to(torch.float64)),
    (".half()", torch.float16, lambda module: module.half()),
    (".bfloat16()", torch.bfloat16, lambda module: module.bfloat16()),
)


def prove(subject: ModelUnderTest, dtype: str | None = None) -> Check:
    """Cast an instance to `dtype` (None: to three dtypes in turn). Raises UsageError for a wrong `dtype`."""
    casts = _CASTS if dtype is None else (_parse_dtype(dtype),)
    return check_builder.check_empty_model(subject, Name.CAST) or _Proof(subject, casts).check()


def _parse_dtype(text: str) -> _Cast:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    known_dtypes = "use float64, float32, float16 or bfloat16"
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{option('--dtype', text)}: torch does not have this dtype; {known_dtypes}")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{option('--dtype', text)}: a model cannot be cast to integers; {known_dtypes}")
    return f".to({dtype})", dtype, lambda module: module.to(dtype)


@dataclass
class _TensorCasts:
    """Dtypes of a tensor after each cast. `wrong` maps a cast to the rule that the tensor broke, and an explanation.

    `declined`: the cast for which the module has its own method, which keeps the dtype.
    """

    before: torch.dtype
    values: torch.Tensor | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    wrong: dict[str, tuple[Rule, str]] = field(default_factory=dict)
    declined: str | None = None

    def format_dtypes(self) -> str:
        """Return the sequence of different dtypes, such as `float64 → float16`."""
        return " → ".join(_format_dtype(dtype) for dtype in dict.fromkeys(self.dtypes.values()))

    def find_fault(self) -> tuple[Rule, str] | None:
        """Return the first broken rule and its explanation, or None if the tensor followed all casts."""
        if not self.wrong:
            return None
        rule, explanation = next(iter(self.wrong.values()))
        followed_casts = [
            call_text for call_text in self.dtypes if call_text not in self.wrong and call_text != self.declined
        ]
        if followed_casts and rule == rules.KEEPS_DTYPE:
            explanation = f"{explanation}, although {followed_casts[0]} changes its dtype"
        return rule, explanation


class _Proof(Proof):
    def __init__(self, subject: ModelUnderTest, ways: tuple[_Cast, ...]) -> None:
        super().__init__(subject, Name.CAST, "", "casts")
        self._ways = ways
        self._steps: dict[str, _TensorCasts] = {}
        self._casts_done: list[str] = []
        self._excuses = read_by_forward.Excuses(subject, "dtype", self._find_reads)
        self._cast_model = nn.Module()
        self._tensors: dict[str, torch.Tensor] = {}
        self._stand_in = check_builder.measure_stand_in_move(subject)
        self._recomputed = self._stand_in.recomputed

    def _run(self) -> None:
        module: nn.Module | None = None
        for cast in self._ways:
            module = self._cast(module, cast)
        self._how = ", ".join(self._casts_done or [call_text for call_text, _, _ in self._ways])
        for row in self._subject.state.tensors:
            self._cells[row.fqn] = self._build_cell(row)
        for row in self._subject.state.tensors:
            if self._cells[row.fqn].verdict is Verdict.PASSED:
                self._fail_stale_aliases(row)

    # --- one cast --------------------------------------------------------------------------------------------------

    def _cast(self, module: nn.Module | None, cast: _Cast) -> nn.Module | None:
        """Cast `module` (None: a new instance). Return the result, or None if the next cast needs a new instance."""
        try:
            start = self._build_fresh() if module is None else module
        except ModelError as error:
            self._reasons.append(check_builder.get_reason(self._subject, error))
            return None
        if is_scripted(start) and cast[0] == ".bfloat16()":  # a ScriptModule has no method bfloat16
            cast = _parse_dtype("bfloat16")
        before = {name: tensor.dtype for name, tensor in self._tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the cells report what torch warns about
            returned_object, error_text = check_builder.run_user_code(
                self._subject, f"{cast[0]} of the model", lambda: cast[2](start)
            )
        if error_text:
            self._reasons.append(error_text)
            return None
        self._cast_model = get_moved_model(start, returned_object)
        self._tensors = measure.map_tensors(self._cast_model)
        faults = self._find_faults(cast, before)
        if faults and module is not None:
            return self._cast(None, cast)  # an earlier cast may have caused the faults
        self._record(cast[0], faults)
        return None if faults else self._cast_model

    def _build_fresh(self) -> nn.Module:
        start = self._subject.build_used()
        self._tensors = measure.map_tensors(start)
        for name, tensor in self._tensors.items():
            self._steps.setdefault(name, _TensorCasts(tensor.dtype)).values = _copy_integers(tensor)
        return start

    def _find_faults(self, cast: _Cast, before: dict[str, torch.dtype]) -> dict[str, tuple[Rule, str]]:
        """Return, for each tensor that broke a rule, the rule and an explanation."""
        call_text, dtype, _ = cast
        tensors = {name: tensor for name, tensor in self._tensors.items() if name in self._steps}
        cast_names = [name for name, tensor in tensors.items() if tensor.dtype != before.get(name)]
        declining = _find_declining_modules(self._cast_model, call_text, cast_names)
        faults: dict[str, tuple[Rule, str]] = {}
        for name, tensor in tensors.items():
            if name.rpartition(".")[0] in declining:
                self._steps[name].declined = call_text
            elif fault := _find_fault(self._steps[name], tensor, dtype, call_text):
                faults[name] = fault
        return faults

    def _record(self, call_text: str, faults: dict[str, tuple[Rule, str]]) -> None:
        self._casts_done.append(call_text)
        for name, tensor in self._tensors.items():
            if name in self._steps:
                self._steps[name].dtypes[call_text] = tensor.dtype
        for name, fault in faults.items():
            self._steps[name].wrong[call_text] = fault

    # --- one tensor ------------------------------------------------------------------------------------------------

    def _build_cell(self, row: TensorInfo) -> Cell:
        steps = self._steps.get(row.fqn)
        if steps is None:
            return check_builder.build_inconclusive_cell("; ".join(self._reasons) or check_builder.ABSENT_REASON)
        before = _format_dtype(steps.before)
        if not steps.dtypes:
            return (
                check_builder.build_inconclusive_cell("the tensor could not be cast", before=before)
                if not self._casts_done
                else check_builder.skip_cell("the model removes the tensor during the cast", before=before)
            )
        fault = steps.find_fault()
        if fault is None:
            reason = f"the class's own {steps.declined} keeps the dtype" if steps.declined else None
            return Cell(Verdict.PASSED, before, steps.format_dtypes(), reason)
        rule, explanation = fault
        excused_cell = self._build_excused_cell(row, steps) if rule == rules.KEEPS_DTYPE else None
        return excused_cell or self._fail(rule, row, explanation, steps)

    def _fail(self, rule: Rule, row: TensorInfo, explanation: str, steps: _TensorCasts) -> Cell:
        severity = None
        if rule == rules.KEEPS_DTYPE:
            effect = measure_effect(row, is_harmless=lambda: row.fqn in self._recast)
            severity = decide_tensor_severity(row, effect)
            explanation = f"{explanation}; {recast_by_forward.RECAST_REASON}" if effect else explanation
        message, help = f"{row.fqn}: {explanation}", self._choose_help(rule, row, steps)
        self.report(rule, message, row.fqn, severity=severity, help=help)
        return Cell(Verdict.FAILED, _format_dtype(steps.before), steps.format_dtypes(), explanation)

    @functools.cached_property
    def _recast(self) -> frozenset[str]:
        """Return the unregistered tensors that forward casts at each call."""
        names = [row.fqn for row in self._subject.state.tensors if row.kind is Kind.UNREGISTERED]
        dtypes = [dtype for _, dtype, _ in self._ways]
        some = [dtype for dtype in dtypes if dtype is not torch.float16]  # the CPU lacks some operators in float16
        return recast_by_forward.find_recast(self._subject, names, some or dtypes)

    def _choose_help(self, rule: Rule, row: TensorInfo, steps: _TensorCasts) -> check_builder.Help:
        """Return the fix for a tensor that broke `rule`, or None if the fix recorded for the tensor applies."""
        if rule == rules.IMAGINARY_LOST:
            return _AS_REAL_HELP
        if row.fqn in self._subject.created_by_forward:
            return read_by_forward.suggest_recreation(self._subject, row.fqn, "dtype")
        if row.kind is Kind.UNREGISTERED:
            return None if row.fix else _IN_APPLY_HELP
        methods = [call_text.lstrip(".").partition("(")[0] for call_text in steps.wrong]
        return check_builder.suggest_in_own_method(
            self._subject, self._cast_model, row.fqn, (*methods, "_apply"), _OWN_METHOD_HELP[rule.name]
        )

    def _build_excused_cell(self, row: TensorInfo, steps: _TensorCasts) -> Cell | None:
        """Return the cell of a tensor that may keep its dtype, or None if keeping the dtype is a fault."""
        dtypes = {"before": _format_dtype(steps.before), "after": steps.format_dtypes()}
        cell = self._excuses.build_cell(row.fqn, self._recomputed, **dtypes)
        if cell is not None:
            return cell
        if row.kind is Kind.UNREGISTERED and row.moves and check_builder.has_own_apply(self._cast_model, row.fqn):
            return check_builder.skip_cell("the class's own _apply moves the tensor and keeps its dtype", **dtypes)
        if kind := self._held_by_tensors.get(row.fqn):
            reason = f"the .to() of the model calls {kind}.to, which keeps the dtype"
            return check_builder.skip_cell(reason, **dtypes)
        return None

    @functools.cached_property
    def _held_by_tensors(self) -> dict[str, str]:
        """Map each tensor held by a tensor subclass to the subclass's name, if the subclass overrides `.to`."""
        entries = [(entry.fqn, find_holding_tensor(entry)) for entry in walk(self._cast_model).unregistered]
        return {
            fqn: type(holder).__name__ for fqn, holder in entries if holder is not None and has_own_to(type(holder))
        }

    def _find_reads(self) -> read_by_forward.Reads:
        created = self._subject.created_by_forward & {*self._steps}
        doubles = any(self._steps[name].before is torch.float64 for name in created)
        dtype = torch.float32 if doubles else torch.float64
        return read_by_forward.find_reads_as(self._subject, dtype)

    # --- further names -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _stale_views(self) -> dict[str | None, Finding]:
        return map_stale_views(self._stand_in)

    def _fail_stale_aliases(self, row: TensorInfo) -> None:
        """Report other names of a cast tensor as failed if they still refer to the old memory."""
        for name in row.aliases:
            steps = self._steps.get(name)
            fault = steps.find_fault() if steps else None
            if steps is None or fault is None or fault[0] != rules.KEEPS_DTYPE or name in self._recomputed:
                continue
            stale_view = self._stale_views.get(name)
            cause = stale_view.message if stale_view else f"{name} is another name of {row.fqn}"
            explanation = f"{cause}; {name} {fault[1]}"
            wording = Wording(explanation, consequence=Consequence(fault[1]))
            if stale_view:
                self._findings.append(stale_view.reword(wording))
            else:
                severity = STALE_VIEW.cases["trained"] if is_trainable(row) else None
                self.report(STALE_VIEW, wording, name, severity=severity)
            self._cells[name] = Cell(Verdict.FAILED, _format_dtype(steps.before), steps.format_dtypes(), explanation)


_AS_REAL_HELP = (
    "store the real and the imaginary part in a new last dimension (torch.view_as_real), and call "
    "torch.view_as_complex in forward"
)
_IN_APPLY_HELP = "register the tensor, or cast it in the class's own _apply, which .to(), .half() and .bfloat16() call"
#: Remedy for the class's own method that breaks a rule, by the name of the rule.
_OWN_METHOD_HELP = {
    rules.KEEPS_DTYPE.name: "call super() in {} and cast this tensor too",
    rules.INTEGER_CAST.name: "leave integer tensors unchanged in {}",
    rules.INTEGER_CHANGED.name: "leave integer tensors unchanged in {}",
}


def _find_fault(
    steps: _TensorCasts, tensor: torch.Tensor, dtype: torch.dtype, call_text: str
) -> tuple[Rule, str] | None:
    before = steps.before
    if before.is_floating_point:
        if tensor.dtype == dtype:
            return None
        return rules.KEEPS_DTYPE, f"is {_format_dtype(tensor.dtype)} after {call_text}"
    if before.is_complex:
        if tensor.dtype.is_complex:
            return None
        return rules.IMAGINARY_LOST, f"is {_format_dtype(tensor.dtype)} after {call_text}: the imaginary part is lost"
    if tensor.dtype != before:
        return rules.INTEGER_CAST, f"{_format_dtype(before)} becomes {_format_dtype(tensor.dtype)} after {call_text}"
    if steps.values is not None and tensor_bits.is_same(steps.values, tensor) is False:
        return rules.INTEGER_CHANGED, f"{call_text} changes its {_format_dtype(before)} values"
    return None


def _find_declining_modules(module: nn.Module, call_text: str, cast_names: list[str]) -> frozenset[str]:
    """Return the names of modules whose own `half()` changes nothing, as in torchmetrics.

    `cast_names`: the names of cast tensors. A module that casts some of its tensors is left out: it forgot the others.
    """
    method = call_text.strip(".()")
    torchs = getattr(nn.Module, method, None)
    if torchs is None:  # the cast is a call of `.to(dtype)`
        return frozenset()
    names_with_own_method = [
        name
        for name, module_or_name in module.named_modules()
        if getattr(type(module_or_name), method, None) is not torchs
    ]
    parts = {
        module_or_name[:end] for module_or_name in cast_names for end, sign in enumerate(module_or_name) if sign == "."
    } | ({""} if cast_names else set())
    return frozenset(name for name in names_with_own_method if name not in parts)


def _copy_integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of an integer tensor, or None for other tensors and for tensors that cannot be copied."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or is_lazy(tensor):
            return None
        try:
            return tensor.detach().clone()
        except (RuntimeError, NotImplementedError):
            return None


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
