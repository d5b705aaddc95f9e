"""Decide whether an audit reads the values of a target if no option sets this."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import prod

from statecli.core.dtypes import ELEMENT_BITS, nbytes
from statecli.core.model_state import TensorInfo
from statecli.core.option_defaults import DEFAULT_VALUE_BYTES, DEFAULT_VALUE_TENSORS
from statecli.core.units import format_size
from statecli.rules.audit_rule import AuditRule
from statecli.rules.audit_subject import needs_values
from statecli.storage import files
from statecli.targets.section_of_target import split_section


class ValuesBudget:
    """Bytes and tensors that a run may still read by default. Each target uses up a part of the budget.

    `values` is True to read values of any size, False to read no values, None for the default.
    """

    def __init__(self, values: bool | None, rules: Sequence[AuditRule]) -> None:
        self.values = values
        self.is_needed = any(needs_values in rule.needs for rule in rules)
        self.bytes_left = DEFAULT_VALUE_BYTES
        self.tensors_left = DEFAULT_VALUE_TENSORS
        self.hash_bytes_left = DEFAULT_VALUE_BYTES

    def explain_unread(self, text: str, tensors: Sequence[TensorInfo]) -> str | None:
        """Return why the values of this target are not read. If they are read, reduce the budget and return None."""
        if self.values is not None:
            return None if self.values else "values not read, because of --no-values"
        size = sum(map(_count_value_bytes, tensors))
        if files.reads_are_requests(split_section(text)[0]):
            return "values not read: the file is remote; add --values"
        if size > self.bytes_left:
            limit = format_size(DEFAULT_VALUE_BYTES)
            return f"values not read: the target is larger than the default limit of {limit}; add --values"
        if len(tensors) > self.tensors_left:
            limit = f"{DEFAULT_VALUE_TENSORS:,} tensors"
            return f"values not read: the target is larger than the default limit of {limit}; add --values"
        if find_spec("numpy") is None:
            return "values not read: numpy is not installed"
        self.bytes_left -= size
        self.tensors_left -= len(tensors)
        return None

    def explain_unhashed(self, size: int) -> str | None:
        """Return why a local file of this size is not hashed. If it is hashed, reduce the budget and return None."""
        if self.values is not None:
            return None if self.values else "digest not computed, because of --no-values"
        if size > self.hash_bytes_left:
            limit = format_size(DEFAULT_VALUE_BYTES)
            return f"digest not computed: the file is larger than the default limit of {limit}; add --values"
        self.hash_bytes_left -= size
        return None


def _count_value_bytes(tensor: TensorInfo) -> int:
    """Return the bytes to read for a tensor's values, including inner tensors and quantization scales."""
    if not tensor.parts and (tensor.data is None or tensor.data.quantizer is None):
        return tensor.nbytes
    pieces = (nbytes(piece.dtype, prod(piece.shape)) for piece in tensor.pieces if piece.dtype in ELEMENT_BITS)
    return max(tensor.nbytes, sum(pieces))
