"""Names of the layouts of quantized weights. Documents need only the names, not the tensors of each layout."""

from __future__ import annotations

from enum import Enum


class QuantizedLayout(str, Enum):
    """How the tensors of a quantized weight hold its values."""

    SCALED = "scaled"
    BITSANDBYTES = "bitsandbytes-4bit"
    GPTQ = "gptq"
    AWQ = "awq"
    AWQ_GEMV = "awq-gemv"
    PACKED = "packed"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP4_EXPERTS = "mxfp4-experts"
    GGUF = "gguf"
