"""Find out why leaf tensors got no gradient: watch another forward and backward of a trained instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from statecli.commands.verify import inputs as inputs_of, training_rounds
from statecli.commands.verify.training_loss import compute_loss, find_floating_outputs
from statecli.commands.verify.training_record import Training
from statecli.core.errors import ModelError
from statecli.live.tensors import identify_storage

#: Operators that depend on values: item() and bool(), and indexing by a mask.
_VALUE_READERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@dataclass(frozen=True)
class GradientPaths:
    """Observations about leaf tensors that got no gradient, from a second forward and backward.

    `used`: leaves that an operator of forward reads. `reached`: leaves in the graph of the output. `late_names`: leaves
    that got a gradient this time. `idle`: leaves that an operator reads together with an empty tensor, like the weight
    of an expert without rows. `reads_values`: forward reads values of tensors, so that it may choose between branches.
    """

    used: frozenset[str]
    reached: frozenset[str]
    late_names: frozenset[str]
    idle: frozenset[str]
    reads_values: bool


def trace_gradients(run: Training) -> GradientPaths | None:
    """Watch another forward and backward without an optimizer step. Return None if either raises.

    Errors are ignored, because they may come from the dispatch mode instead of the model.
    """
    missing = {name: leaf.tensor for name, leaf in run.leaf_records.items() if leaf.is_missing}
    uses = _Uses()
    try:
        with training_rounds.start_round(run):
            with uses:
                output = training_rounds.call_forward(run)
            loss = compute_loss(find_floating_outputs(output))
            leaf_ids = {id(node.variable) for node in _iter_nodes(loss.grad_fn) if hasattr(node, "variable")}
            if loss.requires_grad:
                with run.subject.user_code("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
    except ModelError:
        return None
    return GradientPaths(
        frozenset(name for name, tensor in missing.items() if identify_storage(tensor) in uses.read_storages),
        frozenset(name for name, tensor in missing.items() if id(tensor) in leaf_ids),
        frozenset(name for name, tensor in missing.items() if tensor.grad is not None),
        frozenset(name for name, tensor in missing.items() if identify_storage(tensor) in uses.idle_storages),
        uses.reads_values,
    )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records which storages are read by an operator, and which together with an empty tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read_storages: set[int | str] = set()
        self.idle_storages: set[int | str] = set()
        self.reads_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = inputs_of.iter_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if issubclass(type(leaf), torch.Tensor)]
        storages = {identify_storage(tensor) for tensor in tensors}
        self.read_storages |= storages
        if not all(tensor.numel() for tensor in tensors):
            self.idle_storages |= storages
        self.reads_values = self.reads_values or func in _VALUE_READERS
        return func(*args, **(kwargs or {}))


def _iter_nodes(root: Any) -> Iterator[Any]:
    """Yield the autograd nodes from which a gradient may flow to `root`, and `root` itself."""
    pending = [root] if root is not None else []
    visited = set(pending)
    for node in pending:
        children = [child for child, _ in node.next_functions if child is not None and child not in visited]
        visited.update(children)
        pending += dict.fromkeys(children)
        yield node
