"""Run the proof `shard`: wrap the model for two ranks, and find tensors that DDP or FSDP leaves out of sync.

The process group is torch's fake group: this process is rank 0 of 2, and no collective sends anything. DDP broadcasts
its parameters and buffers from rank 0 when it wraps a model. All memory is filled with 0 before, and a broadcast writes
1, so a tensor of ones has been synchronized. `fully_shard` makes a DTensor of each sharded parameter. Buffers stay on
each rank under `fully_shard`. They differ between ranks if forward in train mode computes their next values from the
data, or if the constructor draws the values. Both are measured on equal instances with different inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from statecli.commands.verify import check_builder, rules
from statecli.commands.verify.compiler_output import silence
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.running_state import call_once, describe_unknown_updates, find_running_state
from statecli.core import registration_rules
from statecli.core.errors import ModelError
from statecli.core.finding import Consequence
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.move_rules import STALE_VIEW, STALE_VIEW_HELP
from statecli.core.severity import decide_tensor_severity, measure_effect
from statecli.live import measure, tensor_bits
from statecli.live.metric_states import SYNCHRONIZED_REASON, MetricStates
from statecli.live.rebuild import Rebuild, compare_builds
from statecli.live.tensors import identify_storage, is_lazy
from statecli.live.walk import walk

HOW = "fully_shard() and DistributedDataParallel on rank 0 of 2 (fake process group)"
#: Ranks of the fake process group.
RANKS = 2
#: Part of the error of DDP for a model without a trainable parameter.
_NOTHING_TO_TRAIN_ERROR = "doesn't have any parameter that requires a gradient"


def prove(subject: ModelUnderTest) -> Check:
    """Wrap one instance with DDP and another with fully_shard, and decide the verdict of each tensor."""
    missing = check_builder.check_without_values(subject, Name.SHARD, HOW, "synchronize")
    return missing or _Proof(subject).check()


class _Proof(Proof):
    def __init__(self, subject: ModelUnderTest) -> None:
        super().__init__(subject, Name.SHARD, HOW, "sharded", "replicated")
        self._fsdp, self._ddp = self._columns.values()
        self._random: frozenset[str] = frozenset()
        self._unseen: set[str] = set()
        self._metrics: MetricStates | None = None

    def _run(self) -> None:
        if any(map(is_lazy, measure.map_tensors(self._subject.build_fresh()).values())):
            self._reasons.append("the model has lazy parameters without a shape, which cannot be sharded")
            return
        with _use_fake_group(), silence():
            broadcast = self._find_broadcast()
            sharded = self._find_sharded()
        other_rows = [row for row in self._subject.state.tensors if row.kind is not Kind.PARAMETER]
        try:
            diverging = find_diverging(self._subject, [row.fqn for row in other_rows])
        except ModelError as error:
            diverging = frozenset()
            self._reasons.append(describe_unknown_updates(self._subject, error))
        self._random = self._find_random(other_rows)
        for row in self._subject.state.tensors:
            self._judge(row, broadcast, sharded, diverging)

    # --- wrapping ------------------------------------------------------------------------------------------------

    def _find_broadcast(self) -> frozenset[str] | None:
        """Return the names of the tensors that DDP broadcasts, or None if DDP refuses the model."""
        module = self._subject.build_fresh()
        self._metrics = MetricStates(module)
        tensors = measure.map_tensors(module)
        put_back = tensor_bits.build_restore(tensors.values())
        try:
            for name, tensor in tensors.items():
                if not _fill_with_zeros(tensor):
                    self._unseen.add(name)
            with self._subject.user_code("DistributedDataParallel()"), _MarkBroadcasts():
                nn.parallel.DistributedDataParallel(module)
            filled_tensors = ((name, tensor) for name, tensor in tensors.items() if name not in self._unseen)
            return frozenset(name for name, tensor in filled_tensors if tensor.numel() and bool((tensor == 1).all()))
        except ModelError as error:
            if _NOTHING_TO_TRAIN_ERROR not in str(error):
                self._reasons.append(check_builder.get_reason(self._subject, error))
            return None
        finally:
            put_back()

    def _find_sharded(self) -> frozenset[str]:
        """Return the names of the parameters that fully_shard turns into DTensors, and report refused parameters."""
        try:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard
            from torch.distributed.tensor import DTensor
        except ImportError:
            raise ModelError("fully_shard() needs torch 2.6 or later") from None
        module = self._subject.build_fresh()
        aliases = _list_aliases(module)
        refusals = {name: reason for name, tensor in module.named_parameters() if (reason := _explain_refusal(tensor))}
        ignored = {tensor for name, tensor in module.named_parameters() if name in refusals}
        for name, reason in refusals.items():
            message = f"{name}: fully_shard() refuses {reason.description}"
            self.report(rules.NOT_SHARDABLE, message, name, help=reason.advice)
            self._fsdp[name] = Cell(Verdict.FAILED, reason=f"fully_shard() refuses {reason.description}")
        with self._subject.user_code("fully_shard()"):
            fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)), ignored_params=ignored)
        for entry in walk(module).unregistered:
            if entry.fqn in aliases and not isinstance(entry.tensor, DTensor):
                message = f"{entry.fqn}: still uses the memory that {aliases[entry.fqn]} had before fully_shard()"
                effect = "training changes the sharded parameter, but not this tensor"
                severity = STALE_VIEW.cases["trained"]
                self.report(STALE_VIEW, f"{message}: {effect}", entry.fqn, help=STALE_VIEW_HELP, severity=severity)
        sharded = (name for name, tensor in measure.map_tensors(module).items() if isinstance(tensor, DTensor))
        return frozenset(sharded) | frozenset(refusals)

    def _find_random(self, rows: Iterable[TensorInfo]) -> frozenset[str]:
        """Return the names of tensors to which each call of the constructor gives different values."""
        random = {row.fqn for row in rows if row.rebuilt is False}
        saved_elements = {row.fqn: row.elements for row in rows if row.kind is Kind.BUFFER and row.rebuilt is None}
        if saved_elements and self._subject.rebuilds:
            rebuilds = compare_builds(lambda seed: self._subject.build_fresh(values=True, seed=seed), saved_elements)
            random |= {name for name, rebuild in rebuilds.items() if rebuild is Rebuild.DIFFERENT}
        return frozenset(random)

    # --- verdicts ------------------------------------------------------------------------------------------------

    def _judge(
        self, row: TensorInfo, broadcast: frozenset[str] | None, sharded: frozenset[str], diverging: frozenset[str]
    ) -> None:
        reason = self._find_exemption(row)
        if reason is not None:
            self._fsdp[row.fqn] = self._ddp[row.fqn] = check_builder.skip_cell(reason)
            return
        left_out = {
            wrapper: cells
            for wrapper, cells, names in (
                ("fully_shard()", self._fsdp, sharded),
                ("DistributedDataParallel", self._ddp, broadcast),
            )
            if names is not None and row.fqn not in names and not (names is broadcast and row.fqn in self._unseen)
        }
        if broadcast is not None and row.fqn in self._unseen and row.kind is not Kind.UNREGISTERED:
            self._ddp[row.fqn] = check_builder.build_inconclusive_cell(
                "statecli cannot check whether the ranks are synchronized, because it cannot write test values into "
                "the tensor",
            )
        for cells in (self._fsdp, *((self._ddp,) if broadcast is not None else ())):
            cells.setdefault(row.fqn, Cell(Verdict.PASSED))
        if left_out:
            self._judge_left_out(row, left_out, is_diverging=row.fqn in diverging)

    def _find_exemption(self, row: TensorInfo) -> str | None:
        if row.fqn in self._subject.state.recomputed:
            return check_builder.RECOMPUTED_REASON
        if row.kind is Kind.UNREGISTERED and self._metrics and self._metrics.is_synchronized(row.fqn):
            return SYNCHRONIZED_REASON
        if row.fqn in self._subject.created_by_forward and row.kind is not Kind.PARAMETER:
            return "the first forward creates the tensor on each rank"
        return None if row.elements else "the tensor is empty"

    def _judge_left_out(self, row: TensorInfo, left_out: Mapping[str, dict[str, Cell]], *, is_diverging: bool) -> None:
        wrappers = " and ".join(left_out)
        if row.kind is Kind.UNREGISTERED:
            effect = _describe_effect(row, is_diverging=is_diverging, is_random=row.fqn in self._random)
            wording = registration_rules.build_wording(
                row, Consequence(f"left out by {wrappers}: {effect}", of_worst=True)
            )
            rule = registration_rules.choose_rule(row)
            measured_effect = measure_effect(row, is_lost=lambda: is_diverging, is_harmless=lambda: bool(row.rebuilt))
            self.report(rule, wording, row.fqn, severity=decide_tensor_severity(row, measured_effect))
        elif row.kind is Kind.PARAMETER:
            effect = "its gradients are not averaged, so the ranks differ" if row.requires_grad else _OWN_VALUES
            message = f"{row.fqn}: left out by {wrappers}: {effect}"
            is_late = row.fqn in self._subject.created_by_forward
            help = check_builder.REGISTER_EARLIER_HELP if is_late else _STOP_IGNORING
            self.report(rules.NOT_SYNCHRONIZED, message, row.fqn, help=help)
        elif is_diverging or row.fqn in self._random:
            self._report_buffer(row, wrappers, is_diverging=is_diverging)
        else:
            return  # each rank has the same values
        for cells in left_out.values():
            cells[row.fqn] = Cell(Verdict.FAILED, reason="not synchronized between ranks")

    def _report_buffer(self, row: TensorInfo, wrappers: str, *, is_diverging: bool) -> None:
        effect = _describe_effect(row, is_diverging=is_diverging, is_random=row.fqn in self._random)
        message = f"{row.fqn}: not synchronized by {wrappers}: {effect}"
        help, case = _AVERAGE if is_diverging else _BROADCAST, "updated by forward"
        if is_diverging and self._is_of_torch(row):
            help = "call nn.SyncBatchNorm.convert_sync_batchnorm(model) to share the values between the ranks"
            case = "module of torch"
        elif not is_diverging:
            case = "random" if row.persistent is False else "random, in the checkpoint"
        severity = rules.NOT_SYNCHRONIZED.cases[case]
        self.report(rules.NOT_SYNCHRONIZED, message, row.fqn, help=help, severity=severity)

    def _is_of_torch(self, row: TensorInfo) -> bool:
        """Return True for a buffer of a torch module. torch documents how BatchNorm buffers differ between ranks."""
        path = row.fqn.rpartition(".")[0]
        try:
            return _is_torch_module(self._subject.build_fresh().get_submodule(path))
        except AttributeError:
            return False


_STOP_IGNORING = "remove the name from _ddp_params_and_buffers_to_ignore"
_AVERAGE = "average the tensor over the ranks in forward, with torch.distributed.all_reduce"
_BROADCAST = "use the same seed on all ranks, or send the values of rank 0 with torch.distributed.broadcast"
_OWN_VALUES = "each rank keeps its own values"


def _describe_effect(row: TensorInfo, *, is_diverging: bool, is_random: bool) -> str:
    if row.requires_grad:
        return "its gradients are not averaged, so the ranks differ"
    if is_diverging:
        return "forward in train mode computes different values on each rank"
    if is_random:
        return "the constructor sets different values on each rank"
    return "the constructor gives each rank the same values" if row.rebuilt else _OWN_VALUES


def _fill_with_zeros(tensor: torch.Tensor) -> bool:
    """Fill a tensor with zeros. Return False if that is impossible, as for expanded and sparse tensors."""
    try:
        with torch.no_grad():
            tensor.fill_(0)
            return bool((tensor == 0).all())
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def _list_aliases(module: nn.Module) -> dict[str, str]:
    """Map each unregistered name that shares memory with a parameter to the name of this parameter.

    Names in modules of torch are left out, because their forward reads the parameters again: LSTM, hooks of norms.
    """
    names = {identify_storage(tensor): name for name, tensor in module.named_parameters() if tensor.numel()}
    entries = (entry for entry in walk(module).unregistered if not _is_torch_module(entry.owner))
    aliases = ((entry.fqn, names.get(identify_storage(entry.tensor))) for entry in entries)
    return {fqn: name for fqn, name in aliases if name is not None}


def _is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


@dataclass(frozen=True)
class _Refusal:
    """Reason why fully_shard refuses a parameter, and advice."""

    description: str
    advice: str


def _explain_refusal(tensor: torch.Tensor) -> _Refusal | None:
    """Return why fully_shard refuses a parameter, or None if it accepts the parameter."""
    if tensor.dim() == 0:
        return _Refusal(
            "a scalar parameter (0 dimensions)", "register a parameter with one dimension: nn.Parameter(torch.ones(1))"
        )
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        return _Refusal("a parameter that is not contiguous", "register the result of .contiguous()")
    return None


def find_diverging(subject: ModelUnderTest, names: Iterable[str]) -> frozenset[str]:
    """Return the names of tensors whose updates by forward in train mode depend on the inputs."""
    running = find_running_state(subject, names)
    if not running:
        return frozenset()
    first, second = (call_once(subject, running, seed=seed)[1] for seed in (0, 1))
    return frozenset(
        name for name in first if name in second and tensor_bits.is_same(first[name], second[name]) is False
    )


# --- the fake process group ------------------------------------------------------------------------------------------


@contextmanager
def _use_fake_group() -> Iterator[None]:
    """Make this process rank 0 of a group whose collectives send nothing. Raises ModelError if a real group exists."""
    if not torch.distributed.is_available():
        raise ModelError("this build of torch has no torch.distributed")
    if torch.distributed.is_initialized():
        raise ModelError("this process already has a process group; run this check in another process")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class _MarkBroadcasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fill with ones each tensor that DDP broadcasts, except the sizes that DDP compares between ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compares_sizes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name == "broadcast_" and not self._compares_sizes:
                for tensor in tree_leaves(args[0]):
                    tensor.fill_(1)
            # DDP gathers the numbers of parameters, then broadcasts the sizes of the parameters.
            self._compares_sizes = name == "allgather_"
        return result
