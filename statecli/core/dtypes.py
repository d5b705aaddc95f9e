"""Element types of checkpoints, and their sizes.

Names are torch's own without `torch.`. Sizes are in bits because float4 packs two values in a byte. Sources: the
`ScalarType` table of torch 2.13 (c10/core/ScalarType.h) and the safetensors format description, version 0.8.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Bits of an element, as torch counts elements, by dtype (float4_e2m1fn_x2: an element is a byte with two values).
ELEMENT_BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8,
    "complex128": 128,
    "complex64": 64,
    "complex32": 32,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "uint8": 8,
    "bool": 8,
    "qint8": 8,
    "quint8": 8,
    "qint32": 32,
    "quint4x2": 8,
    "quint2x4": 8,
    "bits8": 8,
    "bits16": 16,
    "bits1x8": 8,
    "bits2x4": 8,
    "bits4x2": 8,
    # Only wrapper tensors have these dtypes; torch itself cannot save such a storage.
    **{f"int{n}": 8 for n in range(1, 8)},
    **{f"uint{n}": 8 for n in range(1, 8)},
}

#: dtype of the elements by the class name in a persistent id; UntypedStorage counts bytes.
STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}

#: STORAGE_DTYPES and the storage classes that only torch.jit.save writes: one per element type, by the name in C++.
#: Python has no such classes; torch.save writes an untyped storage and the dtype.
SCRIPT_STORAGE_DTYPES: dict[str, str] = {
    **STORAGE_DTYPES,
    "ComplexHalfStorage": "complex32",
    "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e5m2Storage": "float8_e5m2",
    "Float8_e4m3fnuzStorage": "float8_e4m3fnuz",
    "Float8_e5m2fnuzStorage": "float8_e5m2fnuz",
    "Float8_e8m0fnuStorage": "float8_e8m0fnu",
    "Float4_e2m1fn_x2Storage": "float4_e2m1fn_x2",
    **{f"Bits{kind}Storage": f"bits{kind}" for kind in ("8", "16", "1x8", "2x4", "4x2")},
    **{f"UInt{bits}Storage": f"uint{bits}" for bits in (*range(1, 8), 16, 32, 64)},
    **{f"Int{bits}Storage": f"int{bits}" for bits in range(1, 8)},
}

#: Number of values in a byte, by name of a quantized type that packs several values.
VALUES_PER_BYTE: dict[str, int] = {"quint4x2": 2, "quint2x4": 4}

INTEGER_DTYPES = frozenset(
    ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
    + [f"int{n}" for n in range(1, 8)]
    + [f"uint{n}" for n in range(1, 8)]
)

#: Distance between neighbouring values: the largest distance relative to the value, and the absolute distance of the
#: smallest values.
SPACING = {
    "float64": (2.0**-52, 2.0**-1074),
    "float32": (2.0**-23, 2.0**-149),
    "float16": (2.0**-10, 2.0**-24),
    "bfloat16": (2.0**-7, 2.0**-133),
}


def is_floating(dtype: str) -> bool:
    """Return True for real floating-point types. Complex types are not floating."""
    return dtype.startswith(("float", "bfloat"))


def nbytes(dtype: str, elements: int) -> int:
    """Return the size in bytes of `elements` consecutive elements of `dtype`."""
    values_per_byte = VALUES_PER_BYTE.get(dtype)
    if values_per_byte:
        return -(-elements // values_per_byte)
    return elements * ELEMENT_BITS[dtype] // 8


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous tensor. As in torch, a size of 0 counts as 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def unravel_index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element, one number per dimension, from its position in the flattened tensor."""
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
