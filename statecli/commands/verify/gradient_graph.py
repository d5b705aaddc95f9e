"""Find out why leaf tensors got no gradient: watch another forward and backward of a trained instance."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from statecli.commands.verify import inputs as inputs_of, training_rounds
from statecli.commands.verify.training_loss import compute_loss, find_floating_outputs
from statecli.commands.verify.training_record import Training
from statecli.core.errors import ModelError
from statecli.live.tensors import identify_storage

Storages = set[int | str]
Gradients = tuple[torch.Tensor | None, ...]
#: Operators that depend on values: item() and bool(), and indexing by a mask.
_VALUE_READERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@dataclass(frozen=True)
class GradientPaths:
    """Observations about leaf tensors that got no gradient, from a second forward and backward.

    `used`: leaves that an operator of forward reads. `reentrant`: leaves read only in a reentrant checkpoint whose
    inputs do not require grad. `reached` maps each leaf in the graph of the output to the operation that stops its
    gradient, or None. `late_names`: leaves that got a gradient this time. `reads_values`: forward reads values of
    tensors, so that it may choose between branches.
    """

    used: frozenset[str]
    reentrant: frozenset[str]
    reached: dict[str, str | None]
    late_names: frozenset[str]
    reads_values: bool


def trace_gradients(run: Training) -> GradientPaths | None:
    """Watch another forward and backward without an optimizer step. Return None if either raises.

    Errors are ignored, because they may come from the dispatch mode instead of the model.
    """
    missing = {name: leaf.tensor for name, leaf in run.leaf_records.items() if leaf.is_missing}
    uses = _Uses({identify_storage(tensor) for tensor in missing.values()})
    try:
        with training_rounds.start_round(run):
            with uses:
                output = training_rounds.call_forward(run)
            graph = _run_backward(run, output)
    except ModelError:
        return None
    leaves = {id(node.variable): node for node in graph.parents if type(node).__name__ == "AccumulateGrad"}
    return GradientPaths(
        frozenset(name for name, tensor in missing.items() if identify_storage(tensor) in uses.read_storages),
        frozenset(name for name, tensor in missing.items() if identify_storage(tensor) in uses.reentrant),
        {
            name: graph.find_blocking_node(leaves[id(tensor)])
            for name, tensor in missing.items()
            if id(tensor) in leaves
        },
        frozenset(name for name, tensor in missing.items() if tensor.grad is not None),
        uses.reads_values,
    )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records which storages in `storage_keys` are read by an operator."""

    def __init__(self, storage_keys: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage_keys = storage_keys
        self.read_storages: Storages = set()
        self.reentrant: Storages = set()
        self.reads_values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read_keys = {
            identify_storage(leaf) for leaf in inputs_of.iter_leaves((args, kwargs or {})) if _is_tensor(leaf)
        } & self._storage_keys
        self.read_storages |= read_keys
        if read_keys and _is_in_dead_checkpoint():
            self.reentrant |= read_keys
        self.reads_values = self.reads_values or func in _VALUE_READERS
        return func(*args, **(kwargs or {}))


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def _is_in_dead_checkpoint() -> bool:
    """Return True inside a reentrant checkpoint whose inputs do not require grad."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is CheckpointFunction.forward.__code__:
            return not any(_is_tensor(argument) and argument.requires_grad for argument in frame.f_locals["args"])
    return False


@dataclass
class _Graph:
    """Autograd graph. In backward, a node receives its gradients from the (node, input index) pairs in `parents`.

    `gives_gradient` maps each node that received a gradient to a bool per input: did backward return a gradient?
    """

    parents: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    gives_gradient: dict[Any, tuple[bool, ...]] = field(default_factory=dict)

    def record(self, node: object, input_gradients: Gradients, output_gradients: Gradients) -> None:
        """Record which inputs got a gradient from the node's backward, if the node itself received a gradient."""
        if any(gradient is not None for gradient in output_gradients):
            self.gives_gradient[node] = tuple(gradient is not None for gradient in input_gradients)

    def find_blocking_node(self, node: object) -> str | None:
        """Return the name of the nearest operation whose backward stops the gradient to `node`, or None if unknown."""
        pending, visited_nodes = [node], {node}
        for current in pending:
            for parent, index in self.parents[current]:
                if parent in self.gives_gradient:
                    if not self.gives_gradient[parent][index]:
                        return _get_node_name(parent)
                elif parent not in visited_nodes:
                    visited_nodes.add(parent)
                    pending.append(parent)
        return None


def _get_node_name(node: Any) -> str:
    function = getattr(type(node), "_forward_cls", None)
    return f"{function.__name__}.backward" if function else str(node.name())


def _run_backward(run: Training, output: object) -> _Graph:
    graph = _Graph()
    loss = compute_loss(find_floating_outputs(output))
    if not loss.requires_grad:
        return graph
    graph.parents[loss.grad_fn] = []
    for node in _iter_nodes(loss.grad_fn, graph):
        node.register_hook(functools.partial(graph.record, node))
    with run.subject.user_code("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    return graph


def _iter_nodes(root: Any, graph: _Graph) -> Iterator[Any]:
    pending = [root]
    for node in pending:
        for index, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in graph.parents:
                pending.append(child)
            if child is not None:
                graph.parents.setdefault(child, []).append((node, index))
        yield node
