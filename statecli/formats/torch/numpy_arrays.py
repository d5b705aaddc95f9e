"""Decode numpy arrays in pickles of torch.save."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import msgspec

from statecli.core.dtypes import ELEMENT_BITS, contiguous_strides
from statecli.core.errors import MalformedError
from statecli.core.model_state import ByteRange, TensorData
from statecli.formats.torch.arguments import count_elements, decode_ints, truncate_value
from statecli.formats.torch.numpy_dtypes import format_array_dtype
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import get_name, read_raw_bytes
from statecli.pickles.nodes import Obj
from statecli.pickles.numpy_types import read_number_type

_NUMPY_DTYPES: dict[str, str] = {
    "b1": "bool",
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    # longdouble and clongdouble of numpy, whose sizes depend on the machine.
    **{f"f{size}": f"numpy float{8 * size}" for size in (12, 16)},
    **{f"c{size}": f"numpy complex{8 * size}" for size in (24, 32)},
}


class _ArrayState(msgspec.Struct, frozen=True):
    """Facts that a pickle records about a numpy array.

    `axes` is the order of the array's dimensions in `shape`, None for the same order.
    """

    shape: Any
    dtype: Any
    is_fortran: Any
    content: Any
    axes: Any = None


def is_array(node: Obj) -> bool:
    """Return whether the pickled object becomes a numpy array."""
    return _read_state(node) is not None


def _read_state(node: Obj) -> _ArrayState | None:
    """Return what the pickle records about an array; None for any other pickled object."""
    name, args, state = get_name(node.cls), node.args, node.state
    if not name.startswith("numpy."):
        return None
    if name.endswith("._reconstruct") and type(state) is tuple and len(state) >= 5 and type(state[1]) is tuple:
        return _ArrayState(*state[1:5])
    # numpy writes contiguous arrays as this call from protocol 5 on.
    if name.endswith(".numeric._frombuffer") and state is None and len(args) in (4, 5) and type(args[2]) is tuple:
        content, dtype, shape, order, *axes = args
        if order == "K" and axes and type(axes[0]) is tuple:
            return _ArrayState(shape, dtype, False, content, axes[0])
        is_fortran = {"C": False, "F": True}.get(order, order) if type(order) is str else order
        return _ArrayState(shape, dtype, is_fortran, content)
    return None


def decode_array(node: Obj) -> Tensor | None:
    """Decode a numpy array. Return None for any other pickled object."""
    state = _read_state(node)
    if state is None:
        return None
    descr = state.dtype.args[0] if type(state.dtype) is Obj and state.dtype.args else None
    name = descr if type(descr) is str else get_name(descr).removeprefix("numpy.") or "of no name"
    dtype = _NUMPY_DTYPES.get(name) or format_array_dtype(state.dtype)
    if name in _NUMPY_DTYPES and read_number_type(state.dtype) is None:
        raise MalformedError(f"a numpy array has dtype {truncate_value(name)} in a form that numpy does not write")
    shape = decode_ints(state.shape, "shape", "numpy array")
    elements = count_elements(shape, "numpy array")
    raw = read_raw_bytes(state.content)
    size = elements * (ELEMENT_BITS.get(dtype, 0) // 8) if raw is None else len(raw)
    tensor = Tensor(dtype, shape, elements, size, "cpu", False, layout="numpy", note="numpy array")
    if raw is not None:
        tensor.data = _build_inline(raw, dtype, shape, state)
        tensor.shape = tensor.data.shape
    return tensor


def _build_inline(raw: bytes, dtype: str, shape: tuple[int, ...], state: _ArrayState) -> TensorData:
    """Describe the array data in `raw` (bytes of the pickle). Text and records can only be compared for equality."""
    elements = prod(shape)
    if dtype in ELEMENT_BITS and len(raw) * 8 != elements * ELEMENT_BITS[dtype]:
        raise MalformedError(
            f"a numpy array of {elements} {dtype} elements takes "
            f"{elements * ELEMENT_BITS[dtype] // 8} bytes, but has {len(raw)}"
        )
    order = state.dtype.state[1:2] if type(state.dtype) is Obj and type(state.dtype.state) is tuple else ()
    storage = ByteRange("", 0, len(raw), big_endian=order in ((">",), (b">",)))
    if type(state.is_fortran) is not bool:
        raise MalformedError(
            f"a numpy array has memory order {truncate_value(state.is_fortran)}; expected True (Fortran) or False (C)"
        )
    strides = tuple(accumulate(shape, mul, initial=1))[:-1] if state.is_fortran else None
    if state.axes is not None:
        axes = decode_ints(state.axes, "order of dimensions", "numpy array")
        if sorted(axes) != list(range(len(shape))):
            raise MalformedError(
                f"a numpy array of {len(shape)} dimensions has them in the order {truncate_value(list(axes))}; "
                "expected each dimension once"
            )
        steps = contiguous_strides(shape)
        shape, strides = tuple(shape[axis] for axis in axes), tuple(steps[axis] for axis in axes)
    return TensorData(storage, dtype, shape, strides=strides, inline=raw)
