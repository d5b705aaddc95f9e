"""Compute the singular values of a checkpoint's matrices with numpy, in bounded time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import UnreadableError
from statecli.core.model_state import TensorData, TensorInfo, TensorKey
from statecli.core.parameter_or_buffer import MODEL_KINDS
from statecli.core.value_spectrum import Spectrum
from statecli.values.elements import COMPLEX, Array
from statecli.values.ggml_blocks import to_readable
from statecli.values.read import explain_not_numeric, read_all_values
from statecli.values.stats import explain_no_data

#: Maximum number of singular values that are kept for a matrix.
MAX_VALUES = 64
#: Maximum sum of operations (product of the sides times the smaller side): about a minute on a core of 2024.
MAX_OPERATIONS = 250_000_000_000
#: Maximum number of elements of a matrix: float64 takes 256 MiB, and numpy makes a copy.
MAX_ELEMENTS = 1 << 25


@with_denormals
def compute_spectra(
    tensors: Sequence[TensorInfo], progress: Callable[[str, int], None] | None = None
) -> dict[TensorKey, Spectrum]:
    """Return the spectrum of each matrix of the model, by section and name, in the order of `tensors`.

    Matrices with the fewest operations are computed first, within MAX_OPERATIONS. Tied matrices are computed once.
    """
    matrices = [tensor for tensor in tensors if tensor.kind in MODEL_KINDS and len(tensor.shape or ()) > 1]
    spectra: dict[TensorKey, Spectrum] = {}
    computed: dict[TensorData, Spectrum] = {}
    operations_left = MAX_OPERATIONS
    for tensor in sorted(matrices, key=_count_operations):
        reason = _explain(tensor)
        if reason is not None or tensor.data is None:
            spectrum = Spectrum(reason=reason)
        elif tensor.data in computed:
            spectrum = computed[tensor.data]
        elif (operations := _count_operations(tensor)) > operations_left:
            spectrum = Spectrum(
                reason=(
                    "not computed, because statecli computes singular values for about a minute in a run; to compute "
                    "them for this matrix, select only this matrix with -i"
                )
            )
        else:
            operations_left -= operations
            spectrum = computed[tensor.data] = _compute(tensor, tensor.data)
        spectra[tensor.key] = spectrum
        if progress:
            progress(tensor.fqn, tensor.nbytes)
    return {key: spectra[key] for tensor in matrices if (key := tensor.key) in spectra}


def _get_sides(tensor: TensorInfo) -> tuple[int, int]:
    shape = tensor.shape or ()
    return shape[0], math.prod(shape[1:])


def _count_operations(tensor: TensorInfo) -> int:
    rows, columns = _get_sides(tensor)
    return rows * columns * min(rows, columns)


def _explain(tensor: TensorInfo) -> str | None:
    """Return why statecli cannot compute the spectrum of a matrix, or None if it can. The matrix is not read."""
    if tensor.damage is not None:
        return tensor.damage
    if tensor.data is None:
        return explain_no_data(tensor)
    if not tensor.elements:
        return "it has no elements"
    data = to_readable(tensor.data)
    if data.dtype in COMPLEX:
        return "its values are complex"
    if tensor.elements > MAX_ELEMENTS:
        return f"it has more than {MAX_ELEMENTS:,} elements"
    return explain_not_numeric(data.dtype, data.quantizer is not None)


def _compute(tensor: TensorInfo, data: TensorData) -> Spectrum:
    try:
        values: Array = read_all_values(to_readable(data), tensor.fqn)
    except UnreadableError as error:
        if type(error) is not UnreadableError:  # MalformedError: the file changed while it was read
            raise
        return Spectrum(reason=str(error))
    if values.dtype.kind != "f":
        return Spectrum(reason="its values are integers")
    rows, columns = _get_sides(tensor)
    matrix = values.astype(np.float64).reshape(rows, columns)
    if not np.isfinite(matrix).all():
        return Spectrum(reason="it has NaN or Inf")
    # A power of two, because it scales without rounding; the squares of scaled float64 values are finite.
    exponent = math.frexp(float(np.abs(matrix).max()))[1]
    try:
        singular: Array = np.linalg.svd(np.ldexp(matrix, -exponent), compute_uv=False)
    except np.linalg.LinAlgError:
        return Spectrum(reason="numpy's computation did not converge")
    with np.errstate(all="ignore"):
        is_representable = math.isfinite(np.ldexp(singular[0], exponent))
    if not is_representable:
        return Spectrum(reason="its singular values are too large for float64")
    return _describe(singular, exponent, max(rows, columns))


def _describe(values: Array, exponent: int, longer_side: int) -> Spectrum:
    places = np.unique(np.linspace(0, values.size - 1, min(values.size, MAX_VALUES)).round().astype(np.int64))
    largest = float(values[0])
    smallest_counted = largest * longer_side * np.finfo(np.float64).eps
    return Spectrum(
        count=values.size,
        ranks=tuple((places + 1).tolist()),
        values=tuple(np.ldexp(values[places], exponent).tolist()),
        rank=int(np.count_nonzero(values > smallest_counted)),
        stable_rank=float(np.sum(values**2)) / largest**2 if largest else None,
    )
