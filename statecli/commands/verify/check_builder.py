"""Helpers shared by all proofs: emulate a move, run the model's code, and build findings and cells of the table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import UNSET, structs
from torch import nn

from statecli import live
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, find_worst, summarize_reasons
from statecli.commands.verify.rules import UNTIED_BY_COPY
from statecli.core import move_rules
from statecli.core.errors import ModelError
from statecli.core.finding import Finding, Severity, Wording
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import SAMPLE_INPUT_NOTE, ModelState, Origin, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.units import format_origin
from statecli.live import measure, registration_code, tensor_sources
from statecli.live.assignment_lines import Origins
from statecli.live.installed_code import is_installed_file
from statecli.live.tensors import identify_storage, is_lazy, split_disjoint
from statecli.live.walk import walk
from statecli.targets.location import is_installed


def copy_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of the tensor, or None if the tensor is not on the CPU or cannot be copied."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if is_lazy(tensor) or tensor.device.type != "cpu":
            return None
        try:
            return tensor.detach().clone()
        except Exception:  # noqa: BLE001 - operators of a tensor subclass may raise anything
            return None


@contextmanager
def keep_class_attributes(module: nn.Module) -> Iterator[None]:
    """After the `with` block, restore dicts and lists of tensors in class attributes, which all instances share."""
    containers = [
        step.value
        for container in walk(module).unregistered
        if container.steps[0].how == "class"
        for step in container.steps
    ]
    copies = [(container, container.copy()) for container in containers if type(container) in (dict, list)]
    try:
        yield
    finally:
        for container, entries in copies:
            container.clear()
            container.update(entries) if type(container) is dict else container.extend(entries)


def list_storage_keys(tensors: Iterable[torch.Tensor]) -> set[int | str]:
    """Return the keys that identify the tensors' storages. Tensors that share a storage have the same key."""
    return {identify_storage(tensor) for tensor in tensors}


def run_user_code(subject: ModelUnderTest, activity: str, action: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run `action` and return (its result, None), or (None, error message) if the model's code raises."""
    try:
        with subject.user_code(activity):
            return action(), None
    except ModelError as error:
        return None, get_reason(subject, error)


def read_state_dict(subject: ModelUnderTest, module: nn.Module) -> Mapping[str, Any]:
    """Return the state_dict of an instance. Raises ModelError if `state_dict()` does not return a dict."""
    with subject.user_code("state_dict()"):
        state = module.state_dict()
    if not issubclass(type(state), Mapping):
        raise ModelError(
            f"state_dict() returned an object of type {type(state).__name__}, not a dict; a hook of state_dict that "
            "returns a value replaces the dict"
        )
    return state


def get_reason(subject: ModelUnderTest, error: ModelError) -> str:
    """Return the message of an error without the name of the model."""
    return str(error).removeprefix(f"{subject.target}: ")


# --- emulated move --------------------------------------------------------------------------------------------------


def measure_stand_in_move(subject: ModelUnderTest) -> ModelState:
    """Call an instance and return its state. Each tensor has the result of a move that is emulated without a GPU.

    The emulation gives fresh memory by `_apply` and keeps Parameter objects, so tied weights and aliases behave as on
    CUDA. The oddities untied-by-move, stale-view and recomputed come from the move; not-measured means that it failed.
    """
    if not subject.created_by_forward:
        return subject.state
    devices = {row.device for row in subject.state.tensors}
    called_model = replace(
        subject.built_model,
        module=subject.build_used(),
        original=None,
        origins=Origins({}),
        init_device="meta" if devices == {"meta"} else "cpu",
        values=False,
        make_instance=lambda values, seed: subject.build_used(values=values, seed=seed),
    )
    return live.model_reader.read(called_model, subject.target)


#: Reason for a tensor that a fresh instance lacks.
ABSENT_REASON = (
    "a second instance of the model lacks this tensor, so statecli cannot compare the tensor between instances"
)
#: Fix for a tensor that forward registers.
REGISTER_EARLIER_HELP = (
    "register the tensor in the constructor with its final shape, because a new instance lacks it before forward"
)
RECOMPUTED_REASON = "torch recomputes the tensor from registered tensors before each forward"


_LRU_CACHE = type(functools.lru_cache(len))
MEMO_REASON = (
    "cached by a function with functools.lru_cache, not by the model; the check `forward` shows whether this is an "
    "error"
)


def has_own_apply(module: nn.Module, fqn: str) -> bool:
    """Return True if a module that contains the tensor `fqn` overrides `_apply`."""
    return any(not measure.is_torch_code(type(parent)._apply) for parent in _iter_parents(module, fqn))


@dataclass(frozen=True)
class PlacedHelp:
    """Help text of a finding, and the source line where the fix belongs. `origin` is None if the line is unknown."""

    text: str
    origin: Origin | None


#: Fix of a finding, or None for the fix recorded for the tensor.
Help = str | PlacedHelp | None


def suggest_in_own_method(
    subject: ModelUnderTest, module: nn.Module, fqn: str, names: Iterable[str], remedy: str
) -> PlacedHelp | None:
    """Return a fix that names the first user-defined method: `net.py:12: let Net._apply call super()`.

    The searched methods are the methods `names` of each module that contains the tensor `fqn`.
    """
    classes = (type(method) for method in _iter_parents(module, fqn))
    methods = ((kind, name, getattr(kind, name, None)) for kind in classes for name in names)
    own_method = next(
        ((kind, name, method) for kind, name, method in methods if method and not measure.is_torch_code(method)), None
    )
    return own_method and place_at_method(
        subject, own_method[2], remedy.format(f"{own_method[0].__name__}.{own_method[1]}")
    )


def place_at_method(subject: ModelUnderTest, method: Callable[..., Any], remedy: str) -> PlacedHelp:
    """Put the location of `method`, such as `net.py:12: `, before `remedy`. A method written in C has no location.

    For an installed library, advise to report the problem to its authors, because users do not edit its files.
    """
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return PlacedHelp(remedy, None)
    origin = Origin(tensor_sources.format_file(code.co_filename, subject.target), code.co_firstlineno)
    if is_installed_file(code.co_filename):
        return PlacedHelp(
            f"report the problem to the authors of the package ({format_origin(origin)}), with this fix: {remedy}", None
        )
    return place_at_line(origin, remedy)


def build_saved_fix(row: TensorInfo) -> PlacedHelp | None:
    """Return the recorded fix without `persistent=False`. Return None if the fix does not contain this argument."""
    if row.fix is None or "persistent=False" not in row.fix:
        return None
    return place_at_line(
        row.origin, row.fix.replace(f"\n{registration_code.SAVING_COMMENT}", "").replace(", persistent=False", "")
    )


def place_at_line(origin: Origin | None, remedy: str) -> PlacedHelp:
    """Put the location, such as `net.py:12: `, before `remedy`. If `origin` is None, add no location."""
    return PlacedHelp(f"{format_origin(origin)}: {remedy}" if origin else remedy, origin)


def address_to_library(owner: type, remedy: str) -> str:
    """Return `remedy`. For a class of an installed package, return advice to report the problem to its authors."""
    file = getattr(inspect.getmodule(owner), "__file__", None)
    is_installed = file and is_installed_file(file)
    return f"report the problem to the authors of the package, with this fix: {remedy}" if is_installed else remedy


def _iter_parents(module: nn.Module, fqn: str) -> Iterator[nn.Module]:
    """Yield `module` and its submodules that contain the tensor `fqn`, outermost first."""
    yield module
    current: nn.Module | None = module
    for part in _NAME_PART.findall(fqn)[:-1]:
        current = current._modules.get(part) if current is not None else None
        if current is None:
            return
        yield current


#: A part of a name between dots and brackets.
_NAME_PART = compile_on_use(r"[^.\[\]]+")


def find_memos(subject: ModelUnderTest) -> frozenset[str]:
    """Return the names of tensors that functools.lru_cache keeps as arguments or results."""
    if not any("__closure__" in row.fqn or "[#" in row.fqn for row in subject.state.tensors):
        return frozenset()  # true of nearly all models, and needs no instance to walk
    unregistered = walk(subject.build_used()).unregistered
    return frozenset(entry.fqn for entry in unregistered if any(type(step.value) is _LRU_CACHE for step in entry.steps))


# --- verdicts -------------------------------------------------------------------------------------------------------


def skip_cell(reason: str, **measured: str | None) -> Cell:
    """Return a table cell with the verdict `skipped`, for a tensor that the proof does not test."""
    return Cell(Verdict.SKIPPED, reason=reason, **measured)


def build_inconclusive_cell(reason: str, **measured: str | None) -> Cell:
    """Return a table cell with the verdict `inconclusive`."""
    return Cell(Verdict.INCONCLUSIVE, reason=reason, **measured)


def describe_unsaved(row: TensorInfo) -> str:
    """Return `not in state_dict()`, followed by `(persistent=False)` for a non-persistent buffer."""
    return "not in state_dict() (persistent=False)" if row.persistent is False else "not in state_dict()"


def judge_unsaved_in_copy(row: TensorInfo) -> Cell:
    """Return the cell of an unsaved tensor if each instance is a copy, which has the value without a load."""
    if row.persistent is False:
        return skip_cell(describe_unsaved(row))
    reason = (
        "statecli built only one instance, and cannot check whether the constructor creates an equal tensor in a new "
        "instance"
    )
    return build_inconclusive_cell(f"{describe_unsaved(row)}; {reason}")


def build_finding(
    subject: ModelUnderTest,
    rule: Rule,
    message: str | Wording,
    fqn: str | None,
    *,
    help: Help = None,
    severity: Severity | None = None,
) -> Finding:
    """Build a finding about a tensor. If `help` is None, the help text is the fix recorded for the tensor.

    The source line of a `PlacedHelp` replaces the line that assigns the tensor. A tensor that a move unties gets the
    line and the help of the broken tie.
    """
    text, origin = (help.text, help.origin) if isinstance(help, PlacedHelp) else (help, None)
    row = None if origin else subject.rows_by_fqn.get(fqn or "")
    tie = move_rules.map_broken_ties(subject.state).get(fqn or "") if row is None or rule is UNTIED_BY_COPY else None
    if tie is not None:
        text, origin = text or tie.help, origin or tie.origin or None
    elif row is not None:
        origin = row.origin
        line = format_origin(origin) if origin and not is_installed(origin) else None
        if text is None and row.fix:
            text = f"{line}: {row.fix}" if line else row.fix
        elif line:
            text = f"{text}; assigned at {line}" if text else f"assigned at {line}"
    return rule.finding(
        message, target=subject.target, fqn=fqn, help=text or None, severity=severity, origin=origin or UNSET
    )


def build_check(
    subject: ModelUnderTest,
    name: Name,
    how: str,
    columns: Mapping[str, Mapping[str, Cell]],
    findings: Iterable[Finding],
    reasons: Iterable[str],
) -> Check:
    """Build the check of a proof from its results, limited to the selected tensors.

    A reason makes the check inconclusive, unless a tensor failed. A tensor whose findings are all notes does not fail.
    """
    kept_findings = tuple(finding for finding in findings if finding.fqn not in subject.excluded)
    harmful = {finding.fqn for finding in kept_findings if finding.severity is not Severity.NOTE}
    harmless = {finding.fqn for finding in kept_findings} - harmful
    kept_columns = _select_cells(subject, columns, harmless)
    verdicts = {cell.verdict for column in kept_columns for cell in column.cells.values()}
    if kept_findings:
        verdicts.add(Verdict.FAILED if harmful else Verdict.PASSED)
    reason = "; ".join(dict.fromkeys(reasons)) or None
    verdict = find_worst(verdicts | {Verdict.INCONCLUSIVE} if reason else verdicts)
    if reason is None and verdict in (Verdict.SKIPPED, Verdict.INCONCLUSIVE):
        is_filtered = any(columns.values()) and not any(column.cells for column in kept_columns)
        reason = _NO_TENSOR_SELECTED if is_filtered else summarize_reasons(kept_columns, verdict)
    return Check(name, verdict, how, reason, kept_columns, kept_findings)


_NO_TENSOR_SELECTED = "the filters exclude all tensors of this check"


def _select_cells(
    subject: ModelUnderTest, columns: Mapping[str, Mapping[str, Cell]], harmless: Collection[str | None]
) -> tuple[Column, ...]:
    """Return the cells of the selected tensors. Cells of harmless tensors do not fail, and doubtful cells do not pass.

    A cell is doubtful if a copy of the model stores the tensor in another way. The first column has a skipped cell for
    each sample input that is stored in the model.
    """
    oddities = (oddity for oddity in subject.state.oddities if oddity.kind is OddityKind.UNLIKE_COPY)
    doubts = {oddity.fqn: oddity.message for oddity in oddities}
    first = next(iter(columns), None)

    def revise(fqn: str, cell: Cell) -> Cell:
        if cell.verdict is Verdict.FAILED:
            return structs.replace(cell, verdict=Verdict.SKIPPED) if fqn in harmless else cell
        if cell.verdict is Verdict.PASSED and fqn in doubts:
            return structs.replace(cell, verdict=Verdict.INCONCLUSIVE, reason=doubts[fqn])
        return cell

    def select(column: str, cells: Mapping[str, Cell]) -> Column:
        inputs = subject.sample_inputs if column == first else ()
        failed = {fqn for fqn, cell in cells.items() if cell.verdict is Verdict.FAILED}
        input_cells = {fqn: skip_cell(SAMPLE_INPUT_NOTE) for fqn in inputs if fqn not in failed}
        all_cells = {**cells, **input_cells}
        return Column(
            column, {fqn: revise(fqn, cell) for fqn, cell in all_cells.items() if fqn not in subject.excluded}
        )

    return tuple(select(column, cells) for column, cells in columns.items())


def check_empty_model(subject: ModelUnderTest, name: Name) -> Check | None:
    """Return a skipped check for a model without tensors, or None for other models."""
    if subject.state.tensors:
        return None
    packed = any(oddity.kind is OddityKind.PACKED_PARAMS for oddity in subject.state.oddities)
    reason = " that statecli can see, because its weights are packed in C++" if packed else ""
    return Check(name, Verdict.SKIPPED, reason=f"the model has no tensors{reason}")


def check_without_values(subject: ModelUnderTest, name: Name, how: str, use: str) -> Check | None:
    """Return a skipped check if the model has no tensors, or if all its tensors are on meta. Otherwise return None."""
    empty_check = check_empty_model(subject, name)
    if empty_check or not all(row.device == "meta" for row in subject.state.tensors):
        return empty_check
    reason = f"the model was built on meta and has no values to {use}; build the model on the cpu: --init-device cpu"
    return Check(name, Verdict.SKIPPED, how, reason)


def list_unreachable_tensors(subject: ModelUnderTest) -> list[str]:
    """Return the messages about tensors in the compiled code of a ScriptModule, which no proof can check."""
    return [oddity.message for oddity in subject.state.oddities if oddity.kind is OddityKind.SCRIPT_MODULE]


def iter_shared_groups(tensors_by_name: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield each group of names whose tensors overlap in memory. Separate chunks of a storage do not overlap."""
    by_storage: dict[int | str, list[str]] = {}
    for name, tensor in tensors_by_name.items():
        if is_lazy(tensor) or tensor.numel():
            by_storage.setdefault(identify_storage(tensor), []).append(name)
    for names in by_storage.values():
        groups = split_disjoint({name: tensors_by_name[name] for name in names})
        yield from (group for group in groups if len(group) > 1)
