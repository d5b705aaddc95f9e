"""Run the proof `export`: capture the model by torch.export, and find state that became a constant.

An exported program takes parameters and buffers from its state. Each other tensor read by forward becomes a constant
with its present value, and so does each number. A number is only a finding if forward changes it between calls. Then
the model is captured again with the next value: two different graphs prove that the value is in the program.

The model is called in eval mode with the inputs of the proof forward. A model refused by torch.export proves nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from statecli.commands.verify import check_builder
from statecli.commands.verify.changing_attributes import (
    ChangedAttribute,
    find_changed_attributes,
    report_changed_attribute,
)
from statecli.commands.verify.compiler_output import find_place, format_reader, silence
from statecli.commands.verify.inputs import use_seed
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.running_state import find_running_state
from statecli.core import registration_rules
from statecli.core.errors import ModelError
from statecli.core.finding import Consequence
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.move_rules import STALE_VIEW, STALE_VIEW_HELP
from statecli.core.severity import Effect, decide_tensor_severity, measure_effect
from statecli.core.units import plural
from statecli.live import measure, tensor_sources
from statecli.live.source_line import SourceLine
from statecli.live.tensors import identify_storage

HOW = "torch.export.export() in eval mode"
#: Largest number of attributes, each captured again. Nobody reads a longer list one by one.
MAX_ATTRIBUTES = 8
#: Beginning of the text about a tensor that the program has as a constant.
_EXPORTED = "exported as a constant"
#: Consequence of an unregistered tensor as a constant, by the measured effect.
_CONSEQUENCES = {
    None: "load_state_dict() after the export does not change the exported program",
    Effect.LOSS: "forward in train mode updates the tensor, but the exported program keeps the old values",
    Effect.HARMLESS: "the constructor always sets the same values",
}


def prove(subject: ModelUnderTest) -> Check:
    """Export an instance, and compare the constants of the exported program with the instance's tensors."""
    skipped = check_builder.check_empty_model(subject, Name.EXPORT)
    if skipped is None and subject.inputs is None:
        skipped = subject.skip_without_inputs(Name.EXPORT, HOW)
    return skipped or _Proof(subject, Name.EXPORT, HOW, "exported").check()


class _Difference(msgspec.Struct, frozen=True):
    """First difference between two exported programs. `place` is the operator's source line, or None if unknown."""

    place: SourceLine | None = None


class _Proof(Proof):
    def _run(self) -> None:
        # Find changing attributes first, because torch.export may leave an attribute changed.
        changed_attributes = find_changed_attributes(self._subject)
        module = self._subject.build_used()
        tensors = measure.map_tensors(module)
        program = export_model(self._subject, module)
        self._judge_tensors(module, tensors, program)
        self._judge_numbers(changed_attributes)

    # --- tensors -------------------------------------------------------------------------------------------------

    def _judge_tensors(self, module: nn.Module, tensors: dict[str, torch.Tensor], program: ExportedProgram) -> None:
        constants = _map_constants(program)
        recomputed = self._subject.state.recomputed
        registered = {id(tensor) for _, tensor in (*module.named_parameters(), *module.named_buffers())}
        for row in self._subject.state.tensors:
            tensor = tensors.get(row.fqn)
            if tensor is None:
                self._cells[row.fqn] = check_builder.build_inconclusive_cell(check_builder.ABSENT_REASON)
            elif row.fqn in recomputed:
                self._cells[row.fqn] = check_builder.skip_cell(check_builder.RECOMPUTED_REASON)
            elif row.kind is not Kind.UNREGISTERED or id(tensor) in registered:
                self._cells[row.fqn] = Cell(Verdict.PASSED)
            elif (target := constants.get(_get_key(tensor))) is None:
                self._cells[row.fqn] = check_builder.skip_cell("forward does not read the tensor")
            else:
                self._fail(row, self._find_reader(program, target))
        self._judge_views(module, tensors, program)

    def _judge_views(self, module: nn.Module, tensors: dict[str, torch.Tensor], program: ExportedProgram) -> None:
        """Report constants that share memory with a registered tensor, such as views and results of `detach()`."""
        owners = {
            _get_key(tensors[row.fqn]): row
            for row in self._subject.state.tensors
            if row.fqn in tensors and row.kind is not Kind.UNREGISTERED and row.elements
        }
        for target, constant in _iter_constants(program):
            owner = owners.get(_get_key(constant))
            if owner is None:
                self._report_variable(module, target, constant, program)
                continue
            named = _find_attribute(module, target, constant)
            alias = named or next(iter(owner.aliases), f"a view of {owner.fqn}")
            reader_text = self._format_place(self._find_reader(program, target))
            message = f"{alias}: {_EXPORTED}{reader_text}: loading {owner.fqn} does not change the exported program"
            self.report(STALE_VIEW, message, alias, help=STALE_VIEW_HELP)

    def _report_variable(
        self, module: nn.Module, target: str, constant: torch.Tensor, program: ExportedProgram
    ) -> None:
        variable = tensor_sources.find_module_variable(constant, module)
        if variable is None:
            return
        name, file = variable.name, tensor_sources.format_file(variable.file, self._subject.target)
        reader_text = self._format_place(self._find_reader(program, target))
        consequence = "the exported program keeps the values at the time of the export"
        message = f"{name} of {file}: {_EXPORTED}{reader_text}: {consequence}"
        help = f"register {name} as a buffer, or pass the tensor as an input"
        self.report(registration_rules.UNREGISTERED_TENSOR, message, None, help=help)

    def _is_updated(self, fqn: str) -> bool:
        try:
            return bool(find_running_state(self._subject, (fqn,)))
        except ModelError:  # the program is captured in eval mode, so an error in train mode proves nothing
            return False

    def _fail(self, row: TensorInfo, place: SourceLine | None) -> None:
        rule = registration_rules.choose_rule(row)
        if row.fqn in self._subject.created_by_forward:
            severity, reason = rule.cases["kept"], "the first forward computes the tensor"
        else:
            effect = measure_effect(
                row,
                is_lost=lambda: self._is_updated(row.fqn),
                is_harmless=lambda: bool(row.rebuilt),
            )
            severity, reason = decide_tensor_severity(row, effect), _CONSEQUENCES[effect]
        text = f"{_EXPORTED}{self._format_place(place)}: {reason}"
        self.report(rule, registration_rules.build_wording(row, Consequence(text)), row.fqn, severity=severity)
        self._cells[row.fqn] = Cell(Verdict.FAILED, reason=f"a constant{self._format_place(place)}")

    def _find_reader(self, program: ExportedProgram, target: str) -> SourceLine | None:
        """Return the source line of the first operator that reads a constant, or None."""
        names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.target == target]
        nodes = [node for node in program.graph.nodes if node.name in names]
        return next(filter(None, (_locate(user) for node in nodes for user in node.users)), None)

    # --- numbers -------------------------------------------------------------------------------------------------

    def _judge_numbers(self, changed_attributes: list[ChangedAttribute]) -> None:
        for attribute in changed_attributes[:MAX_ATTRIBUTES]:
            try:
                difference = self._find_difference(attribute)
            except ModelError as error:
                self._reasons.append(f"{attribute.fqn}: {check_builder.get_reason(self._subject, error)}")
                continue
            if difference is not None:
                self._report_number(attribute, difference)
        if len(changed_attributes) > MAX_ATTRIBUTES:
            self._reasons.append(
                f"forward changes {plural(len(changed_attributes) - MAX_ATTRIBUTES, 'more attribute')}; statecli did "
                "not check whether they change the output"
            )

    def _find_difference(self, attribute: ChangedAttribute) -> _Difference | None:
        """Export the model with each of the two values of `attribute`. Return the first difference, or None."""
        programs = []
        for value in (attribute.before, attribute.after):
            module = self._subject.build_used()
            attribute.set(module, value)
            programs.append(export_model(self._subject, module))
        nodes, others = (_describe_nodes(program) for program in programs)
        position = next(
            (number for number, pair in enumerate(zip(nodes, others, strict=False)) if pair[0] != pair[1]), None
        )
        if position is None:
            return None if len(nodes) == len(others) else _Difference()
        located = [_locate(list(program.graph.nodes)[position]) for program in programs]
        return _Difference(next(filter(None, located), None))

    def _report_number(self, attribute: ChangedAttribute, difference: _Difference) -> None:
        place_text = self._format_place(difference.place)
        message = (
            f"{attribute.fqn}: forward changes the attribute, but the exported program has a fixed value{place_text}; "
            "state_dict() does not contain the attribute"
        )
        report_changed_attribute(self, attribute, message)

    def _format_place(self, place: SourceLine | None) -> str:
        return format_reader(self._subject, place)


# --- torch.export -----------------------------------------------------------------------------------------------------


def export_model(subject: ModelUnderTest, module: nn.Module) -> ExportedProgram:
    """Export an instance in eval mode. Raises ModelError with the reason in one line."""
    assert subject.inputs is not None  # noqa: S101 - prove has looked
    args, kwargs = subject.inputs.make_call(seed=0)
    with (
        check_builder.keep_class_attributes(module),
        silence(),
        subject.user_code("torch.export.export()"),
        use_seed(0, module),
        torch.no_grad(),
    ):
        return torch.export.export(_return_tensors(module.eval()), args, kwargs, strict=False)


def _return_tensors(module: nn.Module) -> nn.Module:
    """Make forward of `module` return a list of tensors, because torch.export refuses some classes of outputs."""
    forward = module.forward

    @functools.wraps(forward)
    def return_tensors(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [output for output in tree_leaves(forward(*args, **kwargs)) if isinstance(output, torch.Tensor)]

    vars(module)["forward"] = return_tensors
    return module


def _iter_constants(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in program.graph_signature.input_specs:
        constant = program.constants.get(spec.target or "")
        if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(constant, torch.Tensor):
            yield spec.target or "", constant


def _map_constants(program: ExportedProgram) -> dict[object, str]:
    constants: dict[object, str] = {}
    for target, constant in _iter_constants(program):
        constants.setdefault(_get_key(constant), target)
    return constants


def _get_key(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors that share memory. An empty tensor has a key of its own."""
    return identify_storage(tensor) if tensor.numel() else id(tensor)


def _find_attribute(module: nn.Module, target: str, constant: torch.Tensor) -> str | None:
    """Return `target` if it names an attribute that is the same object as `constant`, else None."""
    path, _, name = target.rpartition(".")
    try:
        value = vars(module.get_submodule(path)).get(name)
    except AttributeError:
        return None
    return target if value is constant else None


def _describe_nodes(program: ExportedProgram) -> list[str]:
    return [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in program.graph.nodes]


def _locate(node: Any) -> SourceLine | None:
    """Return the deepest line of user code that ran the operator of a graph node."""
    return find_place(node.meta.get("stack_trace") or "")
