"""Element types by their numbers in ggml, and the block sizes of the quantized types.

Sources: `enum ggml_type` and the structs of ggml-common.h in llama.cpp; `GGML_QUANT_SIZES` of the package gguf 0.19.
"""

from __future__ import annotations

#: dtype in torch and bytes per element by the number in the file, for the types that torch also has.
TORCH_TYPES: dict[int, tuple[str, int]] = {
    0: ("float32", 4),
    1: ("float16", 2),
    24: ("int8", 1),
    25: ("int16", 2),
    26: ("int32", 4),
    27: ("int64", 8),
    28: ("float64", 8),
    30: ("bfloat16", 2),
}

#: ggml's name of a quantized type, values and bytes of a block, by the number in the file. The rearranged types
#: (q4_0_4_4) were written until the end of 2024.
_QUANTIZED: dict[int, tuple[str, int, int]] = {
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    29: ("iq1_m", 256, 56),
    31: ("q4_0_4_4", 32, 18),
    32: ("q4_0_4_8", 32, 18),
    33: ("q4_0_8_8", 32, 18),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}

#: ggml's name of a quantized type by the number in the file.
QUANTIZED_TYPES = {number: name for number, (name, _, _) in _QUANTIZED.items()}

#: Number of values and of bytes in a block, by the name of the quantized type.
BLOCK_SIZES = {name: (values, size) for name, values, size in _QUANTIZED.values()}

#: Prefix of the type's name in `Packing.how`: the storage is float32 after dequantization.
PACKING_PREFIX = "gguf:"
