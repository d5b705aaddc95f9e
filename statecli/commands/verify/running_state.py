"""Find tensors with a running state: forward in train mode computes the next value from the present value.

An average, a counter and a codebook are running states. A cache is not: forward writes the same elements, whatever the
earlier elements were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from statecli.commands.verify import check_builder
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.errors import ModelError
from statecli.live import measure, tensor_bits

Values = Mapping[str, torch.Tensor]


def find_running_state(subject: ModelUnderTest, names: Iterable[str]) -> frozenset[str]:
    """Return the names of tensors with a running state. Return an empty set if forward cannot be called.

    Forward is called on equal instances, with smaller and with larger values in the tensors changed by forward. Raises
    ModelError if forward raises in train mode for inputs of the user.
    """
    names = frozenset(names)
    if subject.inputs is None or not names:
        return frozenset()
    try:
        before, after = call_once(subject, names)
    except ModelError:
        if subject.inputs.requested:
            raise
        return frozenset()
    changed_names = frozenset(name for name in after if tensor_bits.is_same(before[name], after[name]) is False)
    others = []
    for sign in (-1, 1) if changed_names else ():
        with suppress(ModelError):  # a smaller or a larger index may be out of range
            others.append(call_once(subject, changed_names, sign=sign)[1])
    return frozenset(
        name
        for name in changed_names
        if any(name in other and _depends_on_earlier_values(before[name], after[name], other[name]) for other in others)
    )


def describe_unknown_updates(subject: ModelUnderTest, error: ModelError) -> str:
    """Return the reason why it is unknown which tensors have a running state."""
    return (
        f"statecli cannot check which tensors forward updates in train mode: {check_builder.get_reason(subject, error)}"
    )


def call_once(
    subject: ModelUnderTest, names: frozenset[str], *, sign: int = 0, seed: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Call forward in train mode once. Return the values of the tensors `names` before and after the call.

    `sign` 1 or -1 makes the values larger or smaller before the call. `seed` is for the inputs.
    """
    module = subject.build_fresh(values=True)
    tensors = {name: tensor for name, tensor in measure.map_tensors(module).items() if name in names}
    put_back = tensor_bits.build_restore(tensors.values())  # all instances share class attributes
    try:
        with check_builder.keep_class_attributes(module):
            for tensor in tensors.values() if sign else ():
                _change_values(tensor, sign)
            before = _copy_all(tensors)
            subject.call(module, seed, training=True, grad=True)
            after = _copy_all({name: tensor for name, tensor in measure.map_tensors(module).items() if name in before})
    finally:
        put_back()
    return before, after


def _copy_all(tensors: Values) -> dict[str, torch.Tensor]:
    copies = {name: check_builder.copy_values(tensor) for name, tensor in tensors.items()}
    return {name: values for name, values in copies.items() if values is not None}


def _change_values(tensor: torch.Tensor, sign: int) -> None:
    """Change floats by 100 or more, to exceed a running maximum, and integers by 1, to keep most indexes in range."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.add_(sign * 100 * (1 + tensor.abs()))
        else:
            tensor.add_(sign)


def _depends_on_earlier_values(before: torch.Tensor, after: torch.Tensor, other_after: torch.Tensor) -> bool:
    """Return True if an element changed in forward and its new value depends on the values before forward."""
    if not before.shape == after.shape == other_after.shape:
        return False
    is_same = torch.isclose(after, other_after, rtol=0, atol=0, equal_nan=True)
    return bool(((before != after) & ~is_same).any())
