"""Write quantized.safetensors: a weight, its quantized forms as its libraries write them, and the dequantized values.

Needs torchao 0.18.0, bitsandbytes 0.50.2, compressed-tensors 0.20.1, gptqmodel 7.7.0 and autoawq 0.2.9. The last two do
not import without a GPU, so their functions are taken from the source distributions in the folder of the first
argument.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import types
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import torch
import torchao.quantization as ao
import transformers.pytorch_utils
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

SOURCES = Path(sys.argv[1])
torch.manual_seed(3)
WEIGHT = torch.randn(32, 64) * 0.02
HEIGHT, WIDTH = WEIGHT.shape
Form = tuple[dict[str, torch.Tensor], torch.Tensor]


def take(path: str, start: str, end: str, names: dict[str, object]) -> dict[str, object]:
    """Run the part of a source file from `start` up to the next match of `end`."""
    source = (SOURCES / path).read_text()
    begin = source.index(start)
    stop = re.compile(end).search(source, begin + 1)
    text = source[begin : stop.start() if stop else None]
    exec(("if True:\n" if start.startswith(" ") else "") + text, names)  # noqa: S102 - libraries' own code
    return names


def round_in_groups(weight: torch.Tensor, bits: int, group: int, least: int) -> tuple[torch.Tensor, ...]:
    """Return scales and zero points [out, groups], and the rounded weight."""
    grouped = weight.reshape(HEIGHT, -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-torch.round(low / scales)).clamp(least, 2**bits - 1)
    codes = (torch.round(grouped / scales[..., None]) + zeros[..., None]).clamp(0, 2**bits - 1)
    return scales, zeros, ((codes - zeros[..., None]) * scales[..., None]).reshape(weight.shape)


def linear(weight: torch.Tensor) -> nn.Linear:
    """Return a layer with the weight."""
    layer = nn.Linear(WIDTH, HEIGHT, bias=False)
    layer.weight.data = weight.clone()
    return layer


def gptq(bits: int, group: int, *, less_one: bool = True, act_order: bool = False) -> Form:
    """Return the buffers of gptqmodel's `pack_original`."""
    names = {"t": torch, "nn": nn, "np": np, "math": math, "_ConvNd": nn.modules.conv._ConvNd}
    names |= {"transformers": transformers}
    names["THREADPOOLCTL"] = types.SimpleNamespace(threadpool_limits=lambda _: contextlib.nullcontext())
    path = "gptqmodel-7.7.0/gptqmodel/nn_modules/qlinear/__init__.py"
    pack = take(path, "    def pack_original(", r"\n(?:class |    @|    def )", names)["pack_original"]
    order = torch.randperm(WIDTH) if act_order else torch.arange(WIDTH)
    groups = torch.empty(WIDTH, dtype=torch.int32)
    groups[order] = (torch.arange(WIDTH) // group).int()
    scales, zeros, rounded = round_in_groups(WEIGHT[:, order], bits, group, 1)
    dequantized = torch.empty_like(WEIGHT)
    dequantized[:, order] = rounded

    def run(stored_zeros: torch.Tensor) -> nn.Module:
        module = nn.Module()
        settings = {"bits": bits, "pack_dtype_bits": 32, "pack_factor": 32 // bits, "maxq": 2**bits - 1}
        settings |= {"planar": False, "pack_np_math_dtype": np.uint32, "pack_np_dtype": np.int32}
        vars(module).update(settings, pack_dtype=torch.int32)
        pack(module, linear(dequantized), scales, stored_zeros, groups)
        return module

    module = run(zeros)
    stored = run(zeros - 1).qzeros if less_one else module.qzeros
    return {"qweight": module.qweight, "qzeros": stored, "scales": module.scales, "g_idx": module.g_idx}, dequantized


def awq(factors: torch.Tensor | None = None) -> Form:
    """Return the buffers of autoawq's `WQLinear_GEMM`, of the weight with a factor for each input channel."""
    names = {"torch": torch, "nn": nn, "get_best_device": lambda: "cpu"}
    path = "autoawq-0.2.9/awq/modules/linear/gemm.py"
    cls = take(path, "class WQLinear_GEMM", r"\n    def forward", names)["WQLinear_GEMM"]
    unpack = take("autoawq-0.2.9/awq/utils/packing_utils.py", "import torch", r"\Z", {})["dequantize_gemm"]
    factors = torch.ones(WIDTH) if factors is None else factors
    scales, zeros, rounded = round_in_groups(WEIGHT * factors, 4, 32, 0)
    layer = cls.from_linear(linear(rounded), 4, 32, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    return dict(layer.state_dict()), unpack(layer.qweight, layer.qzeros, layer.scales, 4, 32).t() / factors


def bitsandbytes(kind: str, *, double: bool) -> Form:
    """Return the state_dict of a `Linear4bit`."""
    options = {"quant_type": kind, "compress_statistics": double}
    layer = bnb.nn.Linear4bit(WIDTH, HEIGHT, bias=False, **options)
    layer.weight = bnb.nn.Params4bit(WEIGHT.clone(), requires_grad=False, **options)
    layer = layer.to("cpu")
    return layer.state_dict(), bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def pack_weight(bits: int, group: int | None, *, symmetric: bool) -> Form:
    """Return the tensors of compressed-tensors' format `pack-quantized`."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    grouped = WEIGHT.reshape(HEIGHT, -1, group or WIDTH)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    zeros = {} if symmetric else {"weight_zero_point": zero.to(torch.int8)}
    parts = PackedQuantizationCompressor.compress({"weight": WEIGHT, "weight_scale": scale, **zeros}, scheme)
    return parts, PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]


def nvfp4() -> Form:
    """Return the tensors of compressed-tensors' format `nvfp4-pack-quantized`."""
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    global_scale = (448 * 6 / WEIGHT.abs().amax()).reshape(1)
    scale = (WEIGHT.reshape(HEIGHT, -1, 16).abs().amax(-1) / 6 * global_scale).to(torch.float8_e4m3fn)
    state = {"weight": WEIGHT, "weight_scale": scale.float(), "weight_global_scale": global_scale}
    parts = NVFP4PackedCompressor.compress(state, scheme)
    parts["weight_scale"] = parts["weight_scale"].to(torch.float8_e4m3fn)
    return parts, NVFP4PackedCompressor.decompress(dict(parts), scheme)["weight"]


def torchao(config: object) -> Form:
    """Return the flattened tensors of torchao."""
    model = nn.ModuleDict({"proj": linear(WEIGHT)})
    ao.quantize_(model, config)
    flat, _ = flatten_tensor_state_dict(model.state_dict())
    return {name.removeprefix("proj."): part for name, part in flat.items()}, model.proj.weight.dequantize()


FORMS = {
    "gptq": gptq(4, 32),
    "gptq_v2": gptq(4, 32, less_one=False),
    "gptq_8_act_order": gptq(8, 32, act_order=True),
    "gptq_3": gptq(3, 64),
    "awq": awq(),
    "awq_channels": awq(torch.linspace(0.5, 3, WIDTH)),
    "nf4": bitsandbytes("nf4", double=False),
    "nf4_double": bitsandbytes("nf4", double=True),
    "fp4": bitsandbytes("fp4", double=False),
    "packed_4": pack_weight(4, 32, symmetric=True),
    "packed_4_asymmetric": pack_weight(4, 32, symmetric=False),
    "packed_3": pack_weight(3, 64, symmetric=True),
    "packed_8_channel": pack_weight(8, None, symmetric=True),
    "nvfp4": nvfp4(),
    "torchao_int8": torchao(ao.Int8WeightOnlyConfig()),
    "torchao_fp8": torchao(ao.Float8WeightOnlyConfig()),
}
tensors = {"weight": WEIGHT}
for form, (parts, dequantized) in FORMS.items():
    named = {**parts, "dequantized": dequantized.float()}
    tensors |= {f"{form}.{name}": part.detach().contiguous().clone() for name, part in named.items()}
save_file(tensors, Path(__file__).parent / "quantized.safetensors")
