"""One more forward and backward of an instance that was trained, watched: why a leaf got no gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from statecli.commands.verify import inputs as inputs_of
from statecli.commands.verify import training_rounds
from statecli.commands.verify.training_rounds import Training
from statecli.core.errors import ModelError
from statecli.live.tensors import storage

Storages = set[int | str]
#: The operators by which Python gets hold of values: item() and bool(), indices by a mask.
_READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@dataclass(frozen=True)
class Watched:
    """What was seen of the leaves that had got no gradient, by FQN.

    `used`: some operator of forward reads it. `reentrant`: one does so in a reentrant checkpoint none of whose inputs
    requires grad. `reached`: the output's graph goes back to it, with the Function or node that gives no gradient on
    the way, None where each gives one. `late`: it got one this time. `chooses`: forward reads values, by which it may
    choose what it uses.
    """

    used: frozenset[str]
    reentrant: frozenset[str]
    reached: dict[str, str | None]
    late: frozenset[str]
    chooses: bool


def watch(run: Training) -> Watched | None:
    """Watch one more round without a step; None where it raises.

    What a model does under a dispatch mode says nothing of it.
    """
    missing = {name: seen.tensor for name, seen in run.seen.items() if seen.missing}
    uses = _Uses({storage(tensor)[0] for tensor in missing.values()})
    try:
        with training_rounds.round_of(run):
            with uses:
                output = training_rounds.forward(run)
            graph = _backward(run, output)
    except ModelError:
        return None
    leaves = {id(node.variable): node for node in graph.parents if type(node).__name__ == "AccumulateGrad"}
    return Watched(
        frozenset(name for name, tensor in missing.items() if storage(tensor)[0] in uses.read),
        frozenset(name for name, tensor in missing.items() if storage(tensor)[0] in uses.reentrant),
        {name: graph.end(leaves[id(tensor)]) for name, tensor in missing.items() if id(tensor) in leaves},
        frozenset(name for name, tensor in missing.items() if tensor.grad is not None),
        uses.chooses,
    )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of some storages an operator is given."""

    def __init__(self, wanted: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted
        self.read: Storages = set()
        self.reentrant: Storages = set()
        self.chooses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage(one)[0] for one in inputs_of.leaves((args, kwargs or {})) if _is_tensor(one)} & self._wanted
        self.read |= given
        if given and _is_in_dead_checkpoint():
            self.reentrant |= given
        self.chooses = self.chooses or func in _READING
        return func(*args, **(kwargs or {}))


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def _is_in_dead_checkpoint() -> bool:
    """Whether the caller runs in a reentrant checkpoint that gets no gradient: it is a Function of its inputs alone."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is CheckpointFunction.forward.__code__:
            return not any(_is_tensor(one) and one.requires_grad for one in frame.f_locals["args"])
    return False


@dataclass
class _Graph:
    """The nodes of an output's graph. `parents` are those that give a gradient to each, and as which of theirs.

    `gave` says of each node that got a gradient which ones it gave.
    """

    parents: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    gave: dict[Any, tuple[bool, ...]] = field(default_factory=dict)

    def end(self, node: Any) -> str | None:
        """Whose backward gives no gradient on the way to `node`, the nearest; None where there is none."""
        pending, known = [node], {node}
        for one in pending:
            for parent, index in self.parents[one]:
                if parent in self.gave:
                    if not self.gave[parent][index]:
                        return _name(parent)
                elif parent not in known:
                    known.add(parent)
                    pending.append(parent)
        return None


def _name(node: Any) -> str:
    made_by = getattr(type(node), "_forward_cls", None)
    return f"{made_by.__name__}.backward" if made_by else str(node.name())


def _backward(run: Training, output: Any) -> _Graph:
    graph = _Graph()
    loss = training_rounds.loss_of(training_rounds.floating(output))
    if not loss.requires_grad:
        return graph
    graph.parents[loss.grad_fn] = []
    for node in _nodes(loss.grad_fn, graph):
        node.register_hook(_noting(graph, node))
    with run.subject.user_code("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    return graph


def _nodes(root: Any, graph: _Graph) -> Iterator[Any]:
    pending = [root]
    for node in pending:
        for index, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in graph.parents:
                pending.append(child)
            if child is not None:
                graph.parents.setdefault(child, []).append((node, index))
        yield node


def _noting(graph: _Graph, node: Any) -> Any:
    def note(given: tuple[torch.Tensor | None, ...], got: tuple[torch.Tensor | None, ...]) -> None:
        if any(one is not None for one in got):
            graph.gave[node] = tuple(one is not None for one in given)

    return note
