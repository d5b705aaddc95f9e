"""Test whether a checkpoint may have quantized weights. Otherwise no module about quantized weights is imported."""

from __future__ import annotations

from collections.abc import Collection

from statecli.core.model_state import TensorInfo

#: dtypes of the codes of a quantized weight.
CODE_DTYPES = frozenset(["uint8", "int32", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])


def may_be_quantized(tensors: Collection[TensorInfo]) -> bool:
    """Return True if a tensor has a dtype of quantized codes, or is the `quant_map` of bitsandbytes."""
    has_codes = not CODE_DTYPES.isdisjoint({tensor.dtype for tensor in tensors})
    return has_codes or bool([tensor for tensor in tensors if tensor.fqn.endswith(".quant_map")])
