"""Run the proof `compile`: capture the model by torch.compile, and find state that the graph treats as constant.

torch.compile reads tensors and numbers of the model when it captures a graph, and checks the numbers before each call.
So two things go wrong. A number changed by each call is captured again each time, until torch.compile gives up. And a
value computed once at the capture is kept. To find such values, all tensors are changed in place, as load_state_dict
does. Then the outputs of the compiled model in eval mode are compared with the outputs of an equal uncompiled instance.

No compiler runs: the backend "eager" runs the captured graphs unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo import guards
from torch.utils._pytree import tree_leaves

from statecli.commands.verify import check_builder, rules
from statecli.commands.verify.changing_attributes import (
    ChangedAttribute,
    find_changed_attributes,
    report_changed_attribute,
)
from statecli.commands.verify.compiler_output import find_place, format_reader, silence
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError
from statecli.live import measure, tensor_bits

HOW = 'torch.compile(backend="eager")'
#: Number of graphs of a function after which torch.compile gives up: its default `recompile_limit`.
DEFAULT_GRAPH_LIMIT = 8
#: Largest number of graphs of a function in this proof: more than the number of calls.
MAX_GRAPHS = 64
#: Name of the setting with this limit; torch before 2.6 has another name.
_LIMIT_SETTING = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
#: Function of `torch._dynamo.guards` that measures a graph's guards.
_GUARD_TIMER = "profile_guard_manager"
#: Number of calls. A number that changes in each call reaches the limit; a number that repeats does not.
CALL_COUNT = DEFAULT_GRAPH_LIMIT + 1
#: Number of calls that may capture graphs. The first call may set up state, and after the second call torch treats a
#: changed number as a variable.
_CAPTURING_CALLS = 2
#: Largest number of tensors to change one by one, to find the tensors that the compiled model keeps.
MAX_TENSORS = 100


def prove(subject: ModelUnderTest) -> Check:
    """Compare the outputs of a compiled and an uncompiled instance, in several calls and after changes of tensors."""
    missing = check_builder.check_without_values(subject, Name.COMPILE, HOW, "compute with")
    if missing is None and subject.inputs is None:
        missing = subject.skip_without_inputs(Name.COMPILE, HOW)
    return missing or _Proof(subject, Name.COMPILE, HOW, "compiled").check()


@dataclass
class _CompiledPair:
    """A compiled instance and an equal instance that is not compiled.

    Attributes:
        compiled: Calls the compiled instance.
        module: The compiled instance.
        twin: The other instance.
        graphs: Number of captured graphs.
        failures: Reasons of all captures after the first, newest entry first.
    """

    module: nn.Module
    twin: nn.Module
    compiled: Callable[..., Any] = field(init=False)
    graphs: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compiled = torch._dynamo.optimize(
            self._run_graph, guard_fail_fn=lambda failure: self.failures.append(failure.reason)
        )(self.module)

    def _run_graph(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


class _Proof(Proof):
    def _run(self) -> None:
        changed_attributes, reported_attributes = find_changed_attributes(self._subject), list[ChangedAttribute]()
        for training in (False, True):
            if training and not self._runs_in_train_mode():
                return
            # The attributes found so far are put back before each call, because torch names only a single reason.
            while True:
                with _use_compiler():
                    guilty = self._capture(changed_attributes, reported_attributes, training=training)
                if not guilty:
                    break
                reported_attributes += guilty

    def _capture(
        self, changed_attributes: list[ChangedAttribute], reported_attributes: list[ChangedAttribute], *, training: bool
    ) -> list[ChangedAttribute]:
        """Call a compiled instance several times. Return the attributes whose change causes a capture at each call."""
        pair = _CompiledPair(self._subject.build_used(values=True), self._subject.build_used(values=True))
        failures: list[list[str]] = []
        with check_builder.keep_class_attributes(pair.module):
            for number in range(CALL_COUNT):
                start = len(pair.failures)
                for attribute in reported_attributes:
                    attribute.set(pair.module, attribute.initial)
                    attribute.set(pair.twin, attribute.initial)
                if training:  # the values may differ, because torch.compile draws numbers of numpy by itself
                    self._call(pair.compiled, pair.module, training=True, seed=number)
                elif not self._is_same(pair, seed=number):
                    self._reasons.append(self._explain_difference())
                    return []
                failures.append(pair.failures[start:])
            if not pair.graphs:
                self._reasons.append("torch.compile captured no graph, so the model runs uncompiled")
                return []
            guilty = self._judge_captures(
                [attribute for attribute in changed_attributes if attribute not in reported_attributes], failures
            )
            if not training and not reported_attributes:
                self._judge_tensors(pair)
        return guilty

    def _runs_in_train_mode(self) -> bool:
        try:
            self._subject.call(self._subject.build_used(values=True), training=True)
        except ModelError:
            return False
        return True

    # --- calls ---------------------------------------------------------------------------------------------------

    def _is_same(self, pair: _CompiledPair, *, seed: int = 0) -> bool:
        outputs = self._call(pair.compiled, pair.module, seed=seed)
        others = self._call(pair.twin, pair.twin, seed=seed)
        return len(outputs) == len(others) and all(map(_is_close, outputs, others))

    def _call(
        self, function: Callable[..., Any], module: nn.Module, *, seed: int, training: bool = False
    ) -> list[torch.Tensor]:
        with silence():
            outputs = self._subject.call(_Caller(function, module), seed, training=training)
        return [output for output in tree_leaves(outputs) if isinstance(output, torch.Tensor)]

    def _explain_difference(self) -> str:
        others = [self._subject.build_used(values=True) for _ in range(2)]
        first, second = (self._call(instance, instance, seed=0) for instance in others)
        if len(first) == len(second) and all(map(_is_close, first, second)):
            return "the compiled model returns other values than the uncompiled model"
        return (
            "two equal instances return different values, so statecli cannot compare the compiled model with the "
            "uncompiled model"
        )

    # --- numbers -------------------------------------------------------------------------------------------------

    def _judge_captures(
        self, changed_attributes: list[ChangedAttribute], failures: list[list[str]]
    ) -> list[ChangedAttribute]:
        """Report and return the attributes that cause a new capture at each call after the first calls."""
        late_failures = failures[_CAPTURING_CALLS:]
        if not all(late_failures):
            return []
        guilty = [
            attribute
            for attribute in changed_attributes
            if all(_find_reasons(attribute, reasons) for reasons in late_failures)
        ]
        for attribute in guilty:
            self._report_number(attribute, _find_reasons(attribute, late_failures[-1])[0])
        if not guilty:
            condition = _shorten(late_failures[-1][0])
            self._reasons.append(
                f"torch.compile compiles the model again at each call, because this condition changes: {condition}"
            )
        return guilty

    def _report_number(self, attribute: ChangedAttribute, reason: str) -> None:
        place_text = format_reader(self._subject, find_place(reason))
        message = (
            f"{attribute.fqn}: torch.compile compiles the model again for each new value{place_text}; "
            f"after {DEFAULT_GRAPH_LIMIT} compilations, it runs the model uncompiled"
        )
        report_changed_attribute(self, attribute, message)

    # --- tensors -------------------------------------------------------------------------------------------------

    def _judge_tensors(self, pair: _CompiledPair) -> None:
        """Change all tensors in both instances and compare the outputs. If they differ, change one tensor at a time."""
        tensors, others = measure.map_tensors(pair.module), measure.map_tensors(pair.twin)
        names = [name for name, tensor in tensors.items() if name in others and _can_change(tensor)]
        stale_names = self._find_kept(pair, names) if self._differs_after_change(pair, names) else []
        for row in self._subject.state.tensors:
            if row.fqn in stale_names:
                reason = "the compiled model keeps the old values after load_state_dict()"
                self.report(rules.KEPT_BY_COMPILE, f"{row.fqn}: {reason}", row.fqn, help=rules.KEPT_BY_COMPILE.fix)
                self._cells[row.fqn] = Cell(Verdict.FAILED, reason=reason)
            elif row.fqn in names:
                self._cells[row.fqn] = Cell(Verdict.PASSED)
            else:
                self._cells[row.fqn] = check_builder.skip_cell(
                    "not checked: the check sets new values and compares the outputs, and can set new values only in "
                    "plain floating-point tensors",
                )

    def _find_kept(self, pair: _CompiledPair, names: list[str]) -> list[str]:
        stale_names = [name for name in names[:MAX_TENSORS] if self._differs_after_change(pair, [name])]
        if not stale_names:
            self._reasons.append(
                "after statecli set new values in all tensors, the compiled model returns other values than the "
                "uncompiled model"
            )
        return stale_names

    def _differs_after_change(self, pair: _CompiledPair, names: Iterable[str]) -> bool:
        """Return True if the outputs differ after the tensors were changed in place. The change is undone."""
        tensors = [measure.map_tensors(module) for module in (pair.module, pair.twin)]
        changed_tensors = [instance[name] for name in names for instance in tensors if name in instance]
        put_back = tensor_bits.build_restore(changed_tensors)
        try:
            for tensor in {id(tensor): tensor for tensor in changed_tensors}.values():
                _change_values(tensor)
            return not self._is_same(pair)
        finally:
            put_back()


# --- torch.compile ---------------------------------------------------------------------------------------------------


class _Caller(nn.Module):
    """Wrapper of `module` whose forward calls `function`. The training mode of the wrapper applies to `module` too."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.part = module
        vars(self)["function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["function"](*args, **kwargs)


@contextmanager
def _use_compiler() -> Iterator[None]:
    """Reset torch.compile before and after the `with` block. Inside, raise the limit of captured graphs."""
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch({_LIMIT_SETTING: MAX_GRAPHS}), _leave_guards_untimed():
            yield
    finally:
        torch._dynamo.reset()


@contextmanager
def _leave_guards_untimed() -> Iterator[None]:
    """Skip torch's timing of guards, which takes 40 ms for each graph because it empties the processor's cache."""
    measure = getattr(guards, _GUARD_TIMER, None)
    if measure is None:
        yield
        return
    setattr(guards, _GUARD_TIMER, lambda *_: 0.0)
    try:
        yield
    finally:
        setattr(guards, _GUARD_TIMER, measure)


def _find_reasons(attribute: ChangedAttribute, reasons: list[str]) -> list[str]:
    """Return the recompilation reasons in which torch.compile names the attribute."""
    name = re.escape(attribute.slot.name)
    pattern = re.compile(rf"(?:\.{name}|\[['\"]{name}['\"]\])(?!\w)")
    return [reason for reason in reasons if pattern.search(reason.partition("#")[0])]


def _shorten(reason: str) -> str:
    """Shorten a recompilation reason of torch.compile to its condition and source line: `self.n == 2 (net.py:9)`."""
    text = re.sub(r"^\d+/\d+: ", "", reason.partition("\n")[0])
    return re.sub(r"\s+", " ", text.partition(" (HINT")[0]).strip()


def _can_change(tensor: torch.Tensor) -> bool:
    """Return True for a plain floating-point tensor that can be written in place."""
    if not tensor.is_floating_point() or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_inference():
        return False
    if tensor.layout is not torch.strided or any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return False
    try:
        _change_values(tensor.detach().clone())
    except (RuntimeError, NotImplementedError):  # no arithmetic for the dtype
        return False
    return True


def _change_values(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5).add_(0.25)


def _is_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    try:
        return first.shape == second.shape and torch.allclose(first, second, rtol=1e-3, atol=1e-5, equal_nan=True)
    except (RuntimeError, NotImplementedError):
        return tensor_bits.is_same(first, second) is not False
