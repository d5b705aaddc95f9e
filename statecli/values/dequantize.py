"""Dequantize rows of a weight. Each layout follows the rule of the library that writes it.

scaled              (q - z) * s / divisor                                    compressed-tensors, torchao, bitsandbytes
bitsandbytes 4-bit  values[q] * absmax, high nibble first                    bitsandbytes, functional.dequantize_4bit
GPTQ                (q - z - 1) * s, codes of a column in one bit stream      gptqmodel, qlinear.pack_original
                    (q - z) * s with `checkpoint_format` gptq_v2
AWQ                 (q - z) * s, eight columns in the order 0 2 4 6 1 3 5 7   autoawq, WQLinear_GEMM.from_linear
packed              (q - z) * s, codes of a row in one bit stream             compressed-tensors, pack_to_int32
NVFP4               e2m1[q] * s / global, low nibble first                    compressed-tensors, nvfp4
                    e2m1[q] * s * factor                                      ModelOpt, NVFP4QTensor.dequantize
MXFP4               e2m1[q] * 2 ** (s - 127), low nibble first                compressed-tensors, mxfp4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import MalformedError
from statecli.core.model_state import TensorData
from statecli.core.quantized_layouts import QuantizedLayout, QuantizedPart
from statecli.values.elements import Array
from statecli.values.ranges import resolve_data
from statecli.values.read import read_all_values, read_rows

#: Function that returns the values of rows [start, stop) of a weight as float64 [stop - start, in].
Rows = Callable[[int, int], Array]
#: Columns of the eight codes in an AWQ word, lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_E8M0_BIAS = 127.0
#: Maximum size in bytes of the JSON text that bitsandbytes stores with a weight.
_MAX_STATE_BYTES = 4096


class DequantizeRule(msgspec.Struct, frozen=True, gc=False):
    """Rule for converting the codes of a weight [out, in] to values.

    Attributes:
        block: Shape of the block of one scale, for scaled codes.
        divisor: Divisor of the scales, for scaled codes.
        zero_offset: Number added to the stored zero points of GPTQ: 1, or 0 in `gptq_v2`.
    """

    layout: QuantizedLayout
    shape: tuple[int, int]
    block: tuple[int, int] | None = None
    divisor: float = 1.0
    zero_offset: int = 1


class _NestedState(msgspec.Struct):
    """Block sizes and offset of quantized scales, from the JSON text that bitsandbytes stores with a weight."""

    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def open_rows(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    """Return a function that reads rows of the weight. Raises MalformedError if the shapes do not fit the layout."""
    with np.errstate(all="ignore"):  # a file may have any scales, even zero
        return _OPEN[rule.layout](rule, parts, name)


def _open_scaled(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    assert rule.block is not None  # noqa: S101 - the layout has a block
    height, width = rule.block
    grid = tuple(-(-size // block) for size, block in zip(rule.shape, rule.block, strict=True))
    scales = _read_part(parts[QuantizedPart.SCALES], name, grid) / rule.divisor
    zeros = _read_part(parts[QuantizedPart.ZEROS], name, grid) if QuantizedPart.ZEROS in parts else np.zeros(grid)
    columns = np.arange(rule.shape[1]) // width
    codes = _locate(parts[QuantizedPart.CODES], name, rule.shape)

    def dequantize_rows(start: int, stop: int) -> Array:
        groups = np.arange(start, stop)[:, None] // height
        return (read_rows(codes, name, start, stop) - zeros[groups, columns]) * scales[groups, columns]

    return dequantize_rows


def _open_bitsandbytes(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    values = _read_part(parts[QuantizedPart.VALUES], name, (16,))
    state = _read_state(parts.get(QuantizedPart.STATE), name)
    scales = _read_part(parts[QuantizedPart.SCALES], name).reshape(-1)
    if QuantizedPart.NESTED_SCALES in parts:
        scales = _dequantize_scales(scales, parts, state, name)
    width, total = rule.shape[1], math.prod(rule.shape)
    if state.blocksize < 1 or scales.size * state.blocksize < total:
        raise MalformedError(
            f"{name}: has {scales.size} scales for {state.blocksize} values each, too few for its {total} values"
        )
    blocksize = min(state.blocksize, total)  # a file may state any number
    codes = _locate(parts[QuantizedPart.CODES], name, ((total + 1) // 2, 1))

    def dequantize_rows(start: int, stop: int) -> Array:
        first, last = start * width, stop * width
        packed_codes = read_rows(codes, name, first // 2, (last + 1) // 2).astype(np.uint8).reshape(-1)
        nibbles = np.stack([packed_codes >> 4, packed_codes & 15], axis=1).reshape(-1)[first % 2 :][: last - first]
        return (values[nibbles] * scales[np.arange(first, last) // blocksize]).reshape(-1, width)

    return dequantize_rows


def _dequantize_scales(
    codes: Array, parts: Mapping[QuantizedPart, TensorData], state: _NestedState, name: str
) -> Array:
    """Dequantize the scales of a weight, because bitsandbytes may quantize scales too."""
    table = _read_part(parts[QuantizedPart.NESTED_VALUES], name, (256,))
    nested_scales = _read_part(parts[QuantizedPart.NESTED_SCALES], name).reshape(-1)
    blocksize = min(max(state.nested_blocksize, 1), max(codes.size, 1))  # a file may state any number
    if nested_scales.size * blocksize < codes.size:
        raise MalformedError(
            f"{name}: its scales are quantized too, but the file has second-level scales for only "
            f"{nested_scales.size * blocksize} of its {codes.size} scales"
        )
    positions = codes.astype(np.uint8)
    if (positions != codes).any():
        raise MalformedError(f"{name}: its scales are quantized too, but their codes are not numbers from 0 to 255")
    scales: Array = table[positions] * nested_scales[np.arange(codes.size) // blocksize] + state.nested_offset
    return scales


def _read_state(data: TensorData | None, name: str) -> _NestedState:
    if data is None:
        return _NestedState(blocksize=64)
    text = _read_part(data, name).astype(np.uint8).tobytes()
    try:
        return msgspec.json.decode(text[:_MAX_STATE_BYTES], type=_NestedState)
    except msgspec.MsgspecError as error:
        raise MalformedError(f"{name}: quant_state: {error}") from error


def _open_gptq(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    height, width = rule.shape
    words = _read_words(parts[QuantizedPart.CODES], name)
    scales = _read_part(parts[QuantizedPart.SCALES], name)
    if words.ndim != 2 or scales.ndim != 2 or words.shape[1] != height or width < 1 or words.shape[0] * 32 % width:
        raise MalformedError(
            f"{name}: quantized codes of shape {list(words.shape)} do not fit a weight of {list(rule.shape)}"
        )
    bits = words.shape[0] * 32 // width
    zeros = _unpack_zeros(_read_words(parts[QuantizedPart.ZEROS], name), bits, scales, name)
    groups = _read_groups(parts.get(QuantizedPart.GROUPS), name, scales.shape[0], width)
    zeros = zeros.astype(np.float64) + rule.zero_offset

    def dequantize_rows(start: int, stop: int) -> Array:
        codes = _unpack(words[:, start:stop].T, bits, width, name)
        return (codes - zeros[groups, start:stop].T) * scales[groups, start:stop].T

    return dequantize_rows


def _open_awq(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    height, width = rule.shape
    words = _read_words(parts[QuantizedPart.CODES], name, (width, height // 8))
    scales = _read_part(parts[QuantizedPart.SCALES], name)
    if scales.ndim != 2 or scales.shape[1] != height:
        raise MalformedError(f"{name}: scales of shape {list(scales.shape)} do not fit a weight of {list(rule.shape)}")
    zeros = _unpack_awq(_read_words(parts[QuantizedPart.ZEROS], name, (scales.shape[0], height // 8)))
    groups = _read_groups(None, name, scales.shape[0], width)

    def dequantize_rows(start: int, stop: int) -> Array:
        first, last = start // 8, -(-stop // 8)
        codes = _unpack_awq(words[:, first:last])[:, start - first * 8 : stop - first * 8]
        return ((codes - zeros[groups, start:stop].astype(np.float64)) * scales[groups, start:stop]).T

    return dequantize_rows


def _open_packed(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    height, width = rule.shape
    count = parts[QuantizedPart.CODES].shape[1]
    bits = count * 32 // max(width, 1)
    if not 1 <= bits <= 8 or -(-width * bits // 32) != count:
        raise MalformedError(
            f"{name}: quantized codes of shape {[height, count]} do not fit a weight of {list(rule.shape)}"
        )
    scales = _read_scales(parts, name, height)
    groups = _read_groups(parts.get(QuantizedPart.GROUPS), name, scales.shape[1], width)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if QuantizedPart.ZEROS in parts:
        zeros = _unpack_zeros(_read_words(parts[QuantizedPart.ZEROS], name).T, bits, scales.T, name).T
    codes = _locate(parts[QuantizedPart.CODES], name, (height, count))

    def dequantize_rows(start: int, stop: int) -> Array:
        words = read_rows(codes, name, start, stop).astype(np.int32).view(np.uint32)
        return (_unpack(words, bits, width, name) - zeros[start:stop, groups].astype(np.float64)) * scales[
            start:stop, groups
        ]

    return dequantize_rows


def _open_nvfp4(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    scales = _read_scales(parts, name, rule.shape[0])
    if QuantizedPart.GLOBAL_SCALE in parts:
        scales = scales / _read_part(parts[QuantizedPart.GLOBAL_SCALE], name, (1,))
    else:
        scales = scales * _read_part(parts[QuantizedPart.GLOBAL_FACTOR], name, (1,))
    return _open_fp4(rule, parts, name, scales)


def _open_mxfp4(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str) -> Rows:
    scales = _read_scales(parts, name, rule.shape[0])
    is_exponent = parts[QuantizedPart.SCALES].dtype == "uint8"
    return _open_fp4(rule, parts, name, np.exp2(scales - _E8M0_BIAS) if is_exponent else scales)


def _open_fp4(rule: DequantizeRule, parts: Mapping[QuantizedPart, TensorData], name: str, scales: Array) -> Rows:
    height, width = rule.shape
    groups = _read_groups(None, name, scales.shape[1], width)
    codes = _locate(parts[QuantizedPart.CODES], name, (height, width // 2))

    def dequantize_rows(start: int, stop: int) -> Array:
        packed_codes = read_rows(codes, name, start, stop).astype(np.uint8)
        nibbles = np.stack([packed_codes & 15, packed_codes >> 4], axis=2).reshape(stop - start, -1)
        return _E2M1[nibbles] * scales[start:stop, groups]

    return dequantize_rows


_OPEN: dict[QuantizedLayout, Callable[[DequantizeRule, Mapping[QuantizedPart, TensorData], str], Rows]] = {
    QuantizedLayout.SCALED: _open_scaled,
    QuantizedLayout.BITSANDBYTES: _open_bitsandbytes,
    QuantizedLayout.GPTQ: _open_gptq,
    QuantizedLayout.AWQ: _open_awq,
    QuantizedLayout.PACKED: _open_packed,
    QuantizedLayout.NVFP4: _open_nvfp4,
    QuantizedLayout.MXFP4: _open_mxfp4,
}


# --- parts -----------------------------------------------------------------------------------------------------------


def _read_part(data: TensorData, name: str, shape: tuple[int, ...] | None = None) -> Array:
    """Return one tensor of a quantized weight as float64. Raises MalformedError for a wrong number of values."""
    values = read_all_values(data, name).astype(np.float64)
    if shape is not None and values.size != math.prod(shape):
        raise MalformedError(f"{name}: has {values.size} values, but its quantization method needs {math.prod(shape)}")
    return values.reshape(data.shape if shape is None else shape)


def _read_scales(parts: Mapping[QuantizedPart, TensorData], name: str, height: int) -> Array:
    """Return the scales as a matrix with a row per weight row. Raises MalformedError if the rows differ in length."""
    scales = _read_part(parts[QuantizedPart.SCALES], name)
    if scales.size % max(height, 1) or not scales.size:
        raise MalformedError(f"{name}: {scales.size} scales cannot be divided equally among {height} rows")
    return scales.reshape(height, -1)


def _read_words(data: TensorData, name: str, shape: tuple[int, ...] | None = None) -> Array:
    """Return packed codes as uint32 words, in the shape of their tensor. Raises MalformedError for a wrong shape."""
    if shape is not None and data.shape != shape:
        raise MalformedError(
            f"{name}: quantized codes have shape {list(data.shape)}, but its quantization method needs {list(shape)}"
        )
    values = read_all_values(data, name)
    return values.astype(np.int64).astype(np.uint32).reshape(data.shape)


def _locate(data: TensorData, name: str, shape: tuple[int, int]) -> TensorData:
    """Return the quantized codes as a matrix of `shape`. Raises MalformedError if their size or strides do not fit."""
    data = resolve_data(data, name)
    if math.prod(data.shape) != math.prod(shape) or len(data.shape) > 2:
        raise MalformedError(
            f"{name}: quantized codes have shape {list(data.shape)}, but its quantization method needs {list(shape)}"
        )
    if data.shape != shape and data.strides not in (None, contiguous_strides(data.shape)):
        raise MalformedError(
            f"{name}: quantized codes have strides {list(data.strides or ())}, but statecli reads only contiguous codes"
        )
    return replace(
        data,
        shape=shape,
        strides=contiguous_strides(shape) if data.strides is None or data.shape != shape else data.strides,
    )


def _read_groups(data: TensorData | None, name: str, count: int, width: int) -> Array:
    """Return the group number of each input channel. Raises MalformedError if a group does not exist."""
    if data is None:
        if count < 1 or width % count:
            raise MalformedError(f"{name}: {width} input channels cannot be divided equally into {count} groups")
        return np.arange(width) // max(width // count, 1)
    groups = _read_part(data, name, (width,)).astype(np.intp)
    if width and not 0 <= groups.min() <= groups.max() < count:
        raise MalformedError(
            f"{name}: its input channels refer to groups {groups.min()} to {groups.max()}, but the file has scales for "
            f"only {count} groups"
        )
    return groups


def _unpack_zeros(words: Array, bits: int, scales: Array, name: str) -> Array:
    """Return the zero points. Raises MalformedError unless each scale has a zero point."""
    if words.ndim != 2 or words.shape[0] != scales.shape[0]:
        raise MalformedError(
            f"{name}: zero points of shape {list(words.shape)} do not fit scales of {list(scales.shape)}"
        )
    return _unpack(words, bits, scales.shape[1], name)


def _unpack(words: Array, bits: int, count: int, name: str) -> Array:
    """Return the first `count` codes of each row of words. A row is a stream of bits, lowest bits first."""
    if not 1 <= bits <= 8 or words.shape[1] * 32 < count * bits:
        raise MalformedError(
            f"{name}: {words.shape[1]} packed words are too few for {count} quantized codes of {bits} bits"
        )
    wide = words.astype(np.uint64)
    following = np.concatenate([wide[..., 1:], np.zeros_like(wide[..., :1])], axis=-1)
    pairs = wide | following << np.uint64(32)
    places = np.arange(count) * bits
    codes = pairs[..., places // 32] >> (places % 32).astype(np.uint64)
    return (codes & np.uint64((1 << bits) - 1)).astype(np.uint8)


def _unpack_awq(words: Array) -> Array:
    """Return the codes of AWQ words; each word holds the codes of eight columns."""
    nibbles = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    codes = np.empty(nibbles.shape, np.uint8)
    codes[..., list(_AWQ_ORDER)] = nibbles
    return codes.reshape(*words.shape[:-1], -1)
