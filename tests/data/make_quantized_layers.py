"""Write quantized_layers.safetensors and quantized_subclass.pt: layers missing in quantized.safetensors.

Needs bitsandbytes 0.50.2, compressed-tensors 0.20.1 and torchao 0.18.0. Each layer is saved as its library saves
layers.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes as bnb
import torch
import torchao.quantization as ao
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from safetensors.torch import save_file
from torch import nn

FOLDER = Path(__file__).parent


def linear(height: int = 32, width: int = 64) -> nn.Module:
    """Return a model of one layer, with the same weight each time."""
    torch.manual_seed(3)
    return nn.ModuleDict({"proj": nn.Linear(width, height, bias=False)})


def llm_int8() -> dict[str, torch.Tensor]:
    """Return the state_dict of a `Linear8bitLt`."""
    dense = linear()["proj"]
    layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(dense.weight.data, requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu").state_dict()


def nf4_in_bfloat16() -> dict[str, torch.Tensor]:
    """Return the state_dict of a `Linear4bit` whose codes FSDP can shard."""
    options = {"quant_type": "nf4", "quant_storage": torch.bfloat16}
    layer = bnb.nn.Linear4bit(64, 32, bias=False, **options)
    layer.weight = bnb.nn.Params4bit(linear()["proj"].weight.data, requires_grad=False, **options)
    return layer.to("cpu").state_dict()


def compress_layer(preset: str, height: int = 32, width: int = 64) -> dict[str, torch.Tensor]:
    """Return the tensors saved by compressed-tensors with one of its presets, and equal scales."""
    model = linear(height, width)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if (scheme.weights.group_size or 0) > width:
        scheme.weights.group_size = 32
    config = QuantizationConfig(config_groups={"group_0": scheme}, quantization_status="frozen")
    apply_quantization_config(model, config)
    for name, parameter in model["proj"].named_parameters():
        if name != "weight":
            parameter.data.fill_(
                0 if "zero" in name else 1 if "global" in name else 2.0 ** (-10 if preset == "W8A8" else -6)
            )
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    return model["proj"].state_dict()


LAYERS = {
    "llm_int8": llm_int8(),
    "nf4_bfloat16": nf4_in_bfloat16(),
    "w4a16_asym": compress_layer("W4A16_ASYM"),
    "w8a8": compress_layer("W8A8"),
    "fp8": compress_layer("FP8"),
    "fp8_dynamic": compress_layer("FP8_DYNAMIC"),
    "fp8_block": compress_layer("FP8_BLOCK", 130, 260),
    "nvfp4": compress_layer("NVFP4"),
    "mxfp4": compress_layer("MXFP4A16"),
}
tensors = {
    f"{form}.{name}": part.detach().contiguous().clone()
    for form, parts in LAYERS.items()
    for name, part in parts.items()
}
save_file(tensors, FOLDER / "quantized_layers.safetensors")

model = linear()
ao.quantize_(model, ao.IntxWeightOnlyConfig(weight_dtype=torch.int4))
torch.save(model.state_dict(), FOLDER / "quantized_subclass.pt")
