"""Run the proof `save`: write a checkpoint, load it into a freshly built model, and compare.

Every element of an instance A is overwritten. The `state_dict()` goes through `torch.save` and
`torch.load(weights_only=True)` into a fresh instance B with `strict=True`. Then A and B are compared path by path and
bit by bit. The same is repeated with safetensors. Hooks, extra state and overridden `state_dict`s run as usual.

A tensor missing after the load is harmless if the constructor rebuilds it identically (a position table). It is lost if
the constructor draws it at random. Two builds with different seeds decide. Memory never written by the constructor is
equal in both, because torch is set to fill such memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from statecli.commands.verify import check_builder, rules, running_state, save_roundtrip
from statecli.commands.verify.check_builder import Help
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError
from statecli.core.finding import Severity
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.registration_rules import PERSISTENT_HELP, RANDOM_VALUE_REMARK
from statecli.core.rule import Rule
from statecli.core.tied_tensors import SAVE_TIES_AS_SAFETENSORS
from statecli.live import measure, tensor_bits
from statecli.live.rebuild import Rebuild, compare_builds
from statecli.live.tensors import identify_storage, is_lazy

HOW = "save state_dict() (torch.save, safetensors), load in a new instance"


def prove(subject: ModelUnderTest) -> Check:
    """Save an instance and load the checkpoint into another instance."""
    return check_builder.check_without_values(subject, Name.SAVE, HOW, "save") or _Proof(subject).check()


class _Proof(Proof):
    def __init__(self, subject: ModelUnderTest) -> None:
        super().__init__(subject, Name.SAVE, HOW, "saved", "restored", "safetensors")
        self._saved, self._restored, self._plain = self._columns.values()
        self._recomputed = check_builder.measure_stand_in_move(subject).recomputed
        #: Tensors that B should hold after the load, by name. Names of tensors that prove nothing, because B held the
        #: values before the load.
        self._expected: dict[str, torch.Tensor] = {}
        self._unproved: set[str] = set()
        self._overwritten_storages: set[int | str] = set()
        self._unloadable: str | None = None
        #: Whether a strict load succeeded. Names of the tensors with other values after the load.
        self._is_loaded = False
        self._different: set[str] = set()
        self._target = nn.Module()

    def _run(self) -> None:
        source, target = self._subject.build_used(), self._subject.build_fresh()
        self._target = target
        with _restore_shared(source, target) as put_back:
            target_tensors = measure.map_tensors(target)
            loaded_state = self._write(source, target_tensors)
            put_back()
            self._unproved = self._find_unproved(target_tensors)
            self._is_loaded = self._load(target, loaded_state)
            restored = measure.map_tensors(target)
            unsaved_rows = [
                row for row in self._subject.state.tensors if not self._judge_restored(row, restored, loaded_state)
            ]
            put_back()  # the load into B also wrote to memory shared with the next instances
            self._judge_not_saved(unsaved_rows)
            _Safetensors(self, target, loaded_state).prove(self._is_loaded)

    def _write(self, source: nn.Module, target_tensors: Mapping[str, torch.Tensor]) -> Any:
        """Write test values into the saved instance (A). Return its state_dict after `torch.save` and `torch.load`."""
        tensors = measure.map_tensors(source)
        shared = check_builder.list_storage_keys(tensors.values()) & check_builder.list_storage_keys(
            target_tensors.values()
        )
        self._overwritten_storages = tensor_bits.perturb(tensors.values())
        self._expected = {name: _copy_if_shared(tensor, shared) for name, tensor in tensors.items()}
        with self._subject.user_code("state_dict()"):
            state = source.state_dict()
        with self._subject.user_code("torch.save and torch.load of the state_dict"):
            loaded_state, refused_type = save_roundtrip.copy_state_dict(state)
        # A lazy module before its first forward has values that torch itself refuses, so this is not a finding.
        if refused_type is not None and "Uninitialized" not in refused_type:
            refused_text = f", which contains a {refused_type}" if refused_type else ""
            message = f"torch.load(weights_only=True) refuses the model's own state_dict{refused_text}"
            self.report(rules.NOT_PLAIN_DATA, message, None, help=_PLAIN_DATA_HELP)
        return loaded_state

    def _find_unproved(self, target_tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the tensors that are equal in both instances before the load: a load proves nothing about these."""
        small_tensors = {
            name: tensor
            for name, tensor in self._expected.items()
            if name in target_tensors
            and not is_lazy(tensor)
            and tensor.numel() > 0
            and (tensor.numel() <= _MAX_CHANCE_ELEMENTS or identify_storage(tensor) not in self._overwritten_storages)
        }
        return {name for name, tensor in small_tensors.items() if tensor_bits.is_same(tensor, target_tensors[name])}

    def _load(self, target: nn.Module, loaded_state: Any) -> bool:
        """Load the state_dict into the second instance (B). Return True on success; otherwise report the error."""
        activity = "load_state_dict(strict=True) with the model's state_dict"
        _, error_text = check_builder.run_user_code(
            self._subject, activity, lambda: target.load_state_dict(loaded_state, strict=True)
        )
        if error_text is None:
            return True
        by_torch = re.search(r"Error\(s\) in loading state_dict for \w+: (.*)", error_text)
        reason = by_torch[1] if by_torch else error_text.removeprefix(f"{activity} raised ")
        new = (row for row in self._subject.state.tensors if row.appeared and f'"{row.fqn}"' in reason)
        places = (row.origin for row in new if row.origin)
        help = next((check_builder.place_at_line(place, check_builder.REGISTER_EARLIER_HELP) for place in places), None)
        message = f"load_state_dict(strict=True) refuses the model's own state_dict: {reason}"
        self.report(rules.NOT_LOADABLE, message, None, help=help)
        self._unloadable = None if by_torch else f"load_state_dict raised {reason}"
        return False

    # --- restored tensors ----------------------------------------------------------------------------------------

    def _judge_restored(self, row: TensorInfo, restored: Mapping[str, torch.Tensor], loaded_state: object) -> bool:
        """Fill the cells of a saved tensor. Return False if the state_dict has no entry for the tensor."""
        name, expected = row.fqn, self._expected.get(row.fqn)
        if expected is None:
            self._saved[name] = check_builder.build_inconclusive_cell(check_builder.ABSENT_REASON)
            return True
        if is_lazy(expected):
            self._saved[name] = check_builder.skip_cell("uninitialized: no values before the first forward")
            return True
        restored_tensor = restored.get(name)
        has_same_bits = False if restored_tensor is None else tensor_bits.is_same(expected, restored_tensor)
        if has_same_bits and name not in self._unproved:
            self._saved[name] = self._restored[name] = Cell(Verdict.PASSED)
            return True
        if has_same_bits is False:
            self._different.add(name)
        entry = loaded_state.get(name) if isinstance(loaded_state, Mapping) else None
        if not isinstance(entry, torch.Tensor):
            return False
        self._judge_different(row, expected, entry, restored_tensor)
        return True

    def _judge_different(
        self, row: TensorInfo, expected: torch.Tensor, entry: torch.Tensor, restored_tensor: torch.Tensor | None
    ) -> None:
        """Fill the cells of a saved tensor that the load did not restore, or perhaps did not restore."""
        name = row.fqn
        has_same_bits = False if restored_tensor is None else tensor_bits.is_same(expected, restored_tensor)
        self._saved[name] = Cell(Verdict.PASSED)
        if self._unloadable:
            self._restored[name] = check_builder.build_inconclusive_cell(self._unloadable)
        elif has_same_bits is not False:
            reason = (
                "the values cannot be compared"
                if has_same_bits is None
                else "statecli cannot check this tensor, because it cannot write test values into the tensor"
            )
            self._restored[name] = check_builder.build_inconclusive_cell(reason)
        elif tensor_bits.is_same(expected, entry) is False:
            cast = f"the tensor cast to {entry.dtype}, with other values".replace("torch.", "")
            entry_text = "other values under this name" if entry.dtype == expected.dtype else cast
            message = f"{name}: state_dict() contains {entry_text}"
            help = self._suggest_in_own_method(name, _SAVE_METHODS, _KEEP_HELP)
            self._saved[name] = self._build_failed_cell(rules.CHANGED_BY_SAVING, row, message, help)
        else:
            message = f"{name}: {_NOT_RESTORED}"
            help = self._suggest_in_own_method(name, _LOAD_METHODS, "in {}, pass the saved entry on to super()")
            if name in self._subject.created_by_forward and not help:
                help = check_builder.REGISTER_EARLIER_HELP
            self._restored[name] = self._build_failed_cell(rules.NOT_RESTORED, row, message, help)

    def _suggest_in_own_method(self, fqn: str, methods: tuple[str, ...], remedy: str) -> Help:
        return check_builder.suggest_in_own_method(self._subject, self._target, fqn, methods, remedy)

    # --- tensors that were not saved -----------------------------------------------------------------------------

    def _judge_not_saved(self, rows: list[TensorInfo]) -> None:
        rebuilds: dict[str, Rebuild] | None = None
        try:
            running = running_state.find_running_state(self._subject, self._list_possible_states(rows))
        except ModelError as error:
            running = frozenset()
            self._reasons.append(running_state.describe_unknown_updates(self._subject, error))
        for row in rows:
            cell = self._judge_without_rebuilding(row)
            if cell is None:
                rebuilds = self._compare_rebuilds(rows) if rebuilds is None else rebuilds
                cell = self._judge_by_rebuilding(row, rebuilds[row.fqn])
            is_lost = row.fqn in running and cell.verdict is not Verdict.FAILED
            self._saved[row.fqn] = self._fail_running_state(row) if is_lost else cell

    def _list_possible_states(self, rows: list[TensorInfo]) -> list[str]:
        """Return the unsaved tensors that may hold a running state: buffers and unregistered tensors."""
        possible = (row for row in rows if row.kind is not Kind.PARAMETER and not row.persistent)
        excluded = self._recomputed | self._subject.created_by_forward
        return [
            row.fqn
            for row in possible
            if row.fqn not in excluded and not row.requires_grad and not (row.kind is Kind.UNREGISTERED and row.moves)
        ]

    def _fail_running_state(self, row: TensorInfo) -> Cell:
        """Report an unsaved tensor that forward updates in training. For persistent=False, report only a warning."""
        is_declined = row.persistent is False
        reason = "the buffer has persistent=False" if is_declined else "the tensor is not registered"
        message = (
            f"{row.fqn}: forward updates the tensor in train mode, but state_dict() lacks the tensor, because {reason}"
        )
        help = PERSISTENT_HELP if is_declined else check_builder.build_saved_fix(row)
        severity = rules.LOST_BY_SAVING.cases["not persistent"] if is_declined else None
        return self._build_failed_cell(rules.LOST_BY_SAVING, row, message, help, severity=severity)

    def _compare_rebuilds(self, rows: list[TensorInfo]) -> dict[str, Rebuild]:
        """Build the model twice with different seeds, and compare the tensors of both builds."""
        dtypes = [getattr(torch, row.dtype, torch.float32) for row in rows]
        values = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
        return compare_builds(
            lambda seed: self._subject.build_fresh(values=values, seed=seed),
            {row.fqn: row.elements or 0 for row in rows},
        )

    def _judge_without_rebuilding(self, row: TensorInfo) -> Cell | None:
        """Return the cell of a tensor if the verdict needs no second build, else None."""
        if row.fqn in self._recomputed:
            return check_builder.skip_cell(f"{check_builder.describe_unsaved(row)}; {check_builder.RECOMPUTED_REASON}")
        if row.fqn in self._subject.created_by_forward:
            reason = "the first forward creates the tensor again; the check `resume` compares the values"
            return check_builder.skip_cell(f"{check_builder.describe_unsaved(row)}; {reason}")
        if row.kind is Kind.PARAMETER or row.persistent:
            message = f"{row.fqn}: registered, but not in state_dict(), so a checkpoint lacks the tensor"
            help = self._suggest_in_own_method(row.fqn, _SAVE_METHODS, _KEEP_HELP) or _OWN_STATE_DICT
            return self._build_failed_cell(rules.LOST_BY_SAVING, row, message, help)
        if row.requires_grad and row.kind is Kind.UNREGISTERED and row.derived is None:
            message = f"{row.fqn}: requires grad but is not in state_dict(), so a checkpoint lacks the trained values"
            return self._build_failed_cell(rules.LOST_BY_SAVING, row, message)
        if self._subject.rebuilds:
            return None
        if row.saved:  # in an entry of another name, such as the extra state
            is_lost = self._is_loaded and row.fqn in self._different
            return self._fail_not_restored(row) if is_lost else check_builder.build_inconclusive_cell(_UNKNOWN_ENTRY)
        return check_builder.judge_unsaved_in_copy(row)

    def _judge_by_rebuilding(self, row: TensorInfo, rebuild: Rebuild) -> Cell:
        if rebuild in (Rebuild.IDENTICAL, Rebuild.SHARED):
            is_shared = rebuild is Rebuild.SHARED
            reason = _SHARED_REASON if is_shared else "the constructor creates an equal tensor"
            return check_builder.skip_cell(f"{check_builder.describe_unsaved(row)}; {reason}")
        if rebuild in (Rebuild.ABSENT, Rebuild.UNKNOWN):
            reason = "the tensors of two instances cannot be compared"
            return check_builder.build_inconclusive_cell(f"{check_builder.describe_unsaved(row)}; {reason}")
        if row.saved and row.fqn in self._different:
            return self._fail_not_restored(row)
        message = f"{row.fqn}: {RANDOM_VALUE_REMARK}"
        help = PERSISTENT_HELP if row.persistent is False else None
        return self._build_failed_cell(rules.LOST_BY_SAVING, row, message, help)

    def _fail_not_restored(self, row: TensorInfo) -> Cell:
        message = f"{row.fqn}: {_NOT_RESTORED}"
        help = self._suggest_in_own_method(row.fqn, _LOAD_METHODS, "restore the tensor in {}")
        return self._build_failed_cell(rules.NOT_RESTORED, row, message, help)

    # --- failures ------------------------------------------------------------------------------------------------

    def _build_failed_cell(
        self, rule: Rule, row: TensorInfo, message: str, help: Help = None, *, severity: Severity | None = None
    ) -> Cell:
        self.report(rule, message, row.fqn, help=help, severity=severity)
        return Cell(Verdict.FAILED, reason=message.removeprefix(f"{row.fqn}: "))


_NOT_RESTORED = "saved, but load_state_dict() does not restore the tensor"
_SHARED_REASON = (
    "all instances share the tensor, for example as a class attribute; statecli does not check whether another process "
    "creates an equal tensor"
)
_PLAIN_DATA_HELP = (
    "save only plain data: tensors, numbers, text, and lists and dicts of these; for a tensor subclass, call "
    "torch.serialization.add_safe_globals before torch.load"
)
_UNKNOWN_ENTRY = "saved under another name; statecli cannot check whether load_state_dict() restores the tensor"
_OWN_STATE_DICT = "keep all entries of super().state_dict() in your own state_dict() and in state_dict hooks"
#: Methods of a class that decide what is saved and loaded.
_SAVE_METHODS = ("state_dict", "_save_to_state_dict")
_KEEP_HELP = "let {} keep all entries that super() saves"
_LOAD_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


class _Safetensors:
    """Save the state_dict with safetensors, load it into the second instance (B), and compare."""

    def __init__(self, proof: _Proof, target: nn.Module, loaded_state: object) -> None:
        self._proof, self._target = proof, target
        self._entries: dict[str, Any] = dict(loaded_state) if isinstance(loaded_state, Mapping) else {}
        self._refused: dict[str, str] = {}
        self._why_incomplete: str | None = None
        self._altered: dict[str, torch.Tensor] = {}

    def prove(self, strictly: bool) -> None:
        """Fill the table column of safetensors, with a cell for each tensor that torch.save restored."""
        columns, restored = self._proof._plain, self._proof._restored
        names = [name for name, cell in restored.items() if cell.verdict is Verdict.PASSED]
        try:
            from safetensors.torch import load, save
        except ImportError:
            columns.update((name, check_builder.skip_cell("safetensors is not installed")) for name in names)
            return
        error_text = self._load(lambda entries: load(save(entries)), strictly)
        if error_text:
            self._proof._reasons.append(error_text)
            columns.update((name, check_builder.build_inconclusive_cell(error_text)) for name in names)
            return
        tensors = measure.map_tensors(self._target)
        for name in names:
            columns[name] = self._build_cell(name, tensors)

    def _build_cell(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Cell:
        if name in self._refused:
            return Cell(Verdict.FAILED, reason=self._refused[name])
        if not self._altered:
            return self._build_same_cell()
        restored_tensor = tensors.get(name)
        has_same_bits = (
            False if restored_tensor is None else tensor_bits.is_same(self._proof._expected[name], restored_tensor)
        )
        if has_same_bits:
            return self._build_same_cell()
        if has_same_bits is None:
            return check_builder.build_inconclusive_cell("the values cannot be compared")
        message = "has other values after it is saved as safetensors and loaded"
        self._proof.report(rules.CHANGED_BY_SAFETENSORS, f"{name}: {message}", name)
        return Cell(Verdict.FAILED, reason=message)

    def _build_same_cell(self) -> Cell:
        return check_builder.skip_cell(self._why_incomplete) if self._why_incomplete else Cell(Verdict.PASSED)

    def _load(self, through: Callable[[dict[str, torch.Tensor]], Mapping[str, Any]], strictly: bool) -> str | None:
        """Load the entries that safetensors changes into the second instance (B). Return an error text, or None.

        Entries with the same bits would be restored as before, so only altered entries are loaded again.
        """
        self._refuse_others()
        self._refuse_shared(through)
        self._refuse_odd(through)
        accepted_entries = self._list_accepted()
        subject = self._proof._subject
        activity = "safetensors.torch.save of the state_dict"
        altered_entries, error_text = check_builder.run_user_code(
            subject, activity, lambda: _find_altered(through, accepted_entries)
        )
        if error_text or not altered_entries:
            return error_text
        self._altered = altered_entries
        tensors = measure.map_tensors(self._target)
        tensor_bits.perturb((tensors[name] for name in accepted_entries if name in tensors), phase=100)
        all_entries = {**self._entries, **altered_entries}
        activity = "load_state_dict() with the entries read from safetensors"
        _, error_text = check_builder.run_user_code(
            subject, activity, lambda: self._target.load_state_dict(all_entries, strict=True)
        )
        return error_text if strictly else None  # a load that failed before fails again

    def _list_accepted(self) -> dict[str, torch.Tensor]:
        entries = self._entries.items()
        return {name: value for name, value in entries if name not in self._refused and not is_lazy(value)}

    def _refuse(self, rule: Rule, name: str, problem: str, help: str) -> None:
        self._refused[name] = problem
        self._proof.report(rule, f"{name}: {problem}", name, help=help)

    def _refuse_others(self) -> None:
        """Mark each entry that is not a tensor as refused. Report entries that may contain tensors."""
        for name, value in self._entries.items():
            if isinstance(value, torch.Tensor):
                continue
            problem = f"type is {type(value).__name__}, but safetensors stores only tensors"
            if all(isinstance(leaf, _TYPES_WITHOUT_TENSORS) for leaf in tree_iter(value)):
                self._refused[name], self._why_incomplete = problem, f"{name}: {problem}"
            else:
                self._refuse(rules.NOT_IN_SAFETENSORS, name, problem, "save the entry in a second file, or as a tensor")

    def _refuse_shared(self, through: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = self._list_accepted()
        for names in check_builder.iter_shared_groups(tensors):
            if _is_accepted(through, {name: tensors[name] for name in names}):
                continue
            for name in names[1:]:
                problem = (
                    f"shares memory with {names[0]}; safetensors.torch.save_file refuses tensors that share memory"
                )
                self._refuse(rules.SHARED_IN_SAFETENSORS, name, problem, SAVE_TIES_AS_SAFETENSORS)

    def _refuse_odd(self, through: Callable[[dict[str, torch.Tensor]], object]) -> None:
        for name, tensor in self._entries.items():
            if (
                name in self._refused
                or is_lazy(tensor)
                or not _is_unusual(tensor)
                or _is_accepted(through, {name: tensor})
            ):
                continue
            problem = f"{_describe_unusual(tensor)}, which safetensors does not write"
            if tensor.layout is not torch.strided or tensor.is_contiguous():
                self._refuse(
                    rules.NOT_IN_SAFETENSORS,
                    name,
                    problem,
                    "save the entry as a dense tensor with a dtype that safetensors supports",
                )
                continue
            self._refused[name] = problem  # the line of the tensor needs no change, and may be a line of torch
            target = self._proof._subject.target
            rule = rules.NOT_IN_SAFETENSORS
            self._proof._findings.append(
                rule.finding(f"{name}: {problem}", target=target, fqn=name, help=_CONTIGUOUS_HELP)
            )


#: Types of objects without tensors.
_TYPES_WITHOUT_TENSORS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CONTIGUOUS_HELP = (
    "pass copies to save_file: {name: tensor.contiguous() for name, tensor in model.state_dict().items()}"
)


def _find_altered(
    through: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], entries: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Save and load `entries` with the function `through`. Return the entries that changed or cannot be compared."""
    altered_entries: dict[str, torch.Tensor] = {}
    for piece in _iter_pieces(entries):
        for name, tensor in through(piece).items():
            if type(piece[name]) is not torch.Tensor or not tensor_bits.is_same(piece[name], tensor):
                altered_entries[name] = tensor
    return altered_entries


def _iter_pieces(entries: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the entries in pieces of about `_PIECE_BYTES`, because safetensors holds three copies of a piece."""
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in entries.items():
        piece[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


_PIECE_BYTES = 16 << 20


def _is_accepted(through: Callable[[dict[str, torch.Tensor]], object], entries: dict[str, torch.Tensor]) -> bool:
    try:
        through(entries)
    except Exception:  # noqa: BLE001 - safetensors may raise anything; every error is a refusal
        return False
    return True


_PLAIN_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def _is_unusual(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that safetensors may refuse. Such a tensor is first saved on its own."""
    strided = tensor.layout is torch.strided and tensor.dtype in _PLAIN_DTYPES
    return not strided or type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_contiguous()


def _describe_unusual(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if not tensor.is_contiguous():
        return "not contiguous"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype if type(tensor) in (torch.Tensor, nn.Parameter) else f"a {type(tensor).__name__} of {dtype}"


# --- memory shared by both instances ----------------------------------------------------------------------------------


@contextmanager
def _restore_shared(first: nn.Module, second: nn.Module) -> Iterator[Callable[[], None]]:
    """After the `with` block, restore memory that both instances share, such as a class attribute or a global.

    Yields a function that restores the memory before the end of the block.
    """
    second_keys = check_builder.list_storage_keys(measure.map_tensors(second).values())
    shared = [tensor for tensor in measure.map_tensors(first).values() if identify_storage(tensor) in second_keys]
    restore = tensor_bits.build_restore(shared)
    try:
        yield restore
    finally:
        restore()


def _copy_if_shared(tensor: torch.Tensor, shared: set[int | str]) -> torch.Tensor:
    """Return the tensor, or a copy if its storage is in `shared`, because a load would change shared storages."""
    with torch._C.DisableTorchFunctionSubclass():
        if is_lazy(tensor):
            return tensor
        return tensor.detach().clone() if identify_storage(tensor) in shared else tensor.detach()


#: Largest number of elements of a tensor that may have the same values by chance after a change.
_MAX_CHANCE_ELEMENTS = 4_096
