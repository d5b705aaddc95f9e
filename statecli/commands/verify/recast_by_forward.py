"""Find unregistered tensors that forward casts at each call. They may keep their dtype when the model is cast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from statecli.commands.verify import check_builder, read_by_forward
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.errors import ModelError
from statecli.live import measure
from statecli.live.move_model import move_model
from statecli.live.tensors import identify_storage, is_lazy

#: Reason added to the message about a tensor that forward casts.
RECAST_REASON = "forward casts the tensor at each call"


def find_recast(subject: ModelUnderTest, names: Iterable[str], dtypes: Iterable[torch.dtype]) -> frozenset[str]:
    """Return the names of tensors that forward reads only to cast them to the dtype of the model.

    An instance is called with inputs of each dtype, in eval and train mode. Return an empty set if a call raises.
    """
    candidates, recast_names = set(names), set()
    try:
        for dtype in dtypes if subject.inputs is not None else ():
            for training in (False, True):
                recorder = _call_as(subject, dtype, candidates, training=training)
                candidates -= recorder.otherwise_read
                recast_names |= recorder.cast
    except ModelError:
        return frozenset()
    return frozenset(candidates & recast_names)


def _call_as(subject: ModelUnderTest, dtype: torch.dtype, names: set[str], *, training: bool) -> _CastRecorder:
    assert subject.inputs is not None  # noqa: S101 - `find_recast` has looked
    module = subject.build_used(values=True)
    args, kwargs = read_by_forward.convert_inputs(subject.inputs.make_call(seed=0), dtype)
    with check_builder.keep_class_attributes(module), torch.no_grad():
        with subject.user_code("casting the model"):
            module = move_model(module, dtype)
        recorder = _CastRecorder(dtype)
        for name, tensor in measure.map_tensors(module).items():
            if name in names and tensor.dtype != dtype and not is_lazy(tensor):
                recorder.names[identify_storage(tensor)] = name
        with subject.user_code(f"calling the model as {dtype}"), recorder:
            module.train(training)(*args, **kwargs)
    return recorder


class _CastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record which tensors an operator casts to `dtype`, and which tensors other operators read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self.names: dict[int | str, str] = {}
        self.cast: set[str] = set()
        self.otherwise_read: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read_names = self._find_names((args, kwargs)) if func.namespace != "prim" else set()
        if read_names and func.overloadpacket is torch.ops.aten._to_copy and result.dtype == self._dtype:
            self.cast |= read_names
        else:
            self.otherwise_read |= read_names - self._find_names(result)  # a view has the name of its tensor
        return result

    def _find_names(self, tree: object) -> set[str]:
        keys = (identify_storage(leaf) for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))
        return {self.names[key] for key in keys if key in self.names}
