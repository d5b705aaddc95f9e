"""Decode numpy arrays in pickles of torch.save."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import msgspec

from statecli.core.dtypes import ELEMENT_BITS
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
    """State that a pickle gives to a numpy array."""

    version: Any
    shape: Any
    dtype: Any
    is_fortran: Any
    content: Any


def is_array(node: Obj) -> bool:
    """Return whether the pickled object becomes a numpy array."""
    name = get_name(node.cls)
    if not name.startswith("numpy.") or not name.endswith("._reconstruct"):
        return False
    return type(node.state) is tuple and len(node.state) >= 5 and type(node.state[1]) is tuple


def decode_array(node: Obj) -> Tensor | None:
    """Decode a numpy array. Return None for any other pickled object."""
    if not is_array(node):
        return None
    state = _ArrayState(*node.state[:5])
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
    return TensorData(storage, dtype, shape, strides=strides, inline=raw)
