"""The names that the files of a checkpoint folder usually have."""

from __future__ import annotations

#: What a model folder calls its weights, in the order transformers and diffusers look; each may be an index instead.
SINGLE = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model_fsdp.bin",
    "diffusion_pytorch_model.bin",
    "adapter_model.bin",
    "consolidated.safetensors",
    "flax_model.msgpack",
)
#: The files, by what their settings are called, and the bytes of each that are read. A Trainer logs every few steps.
SETTINGS_FILES = {
    "config": 4 * 2**20,
    "adapter_config": 4 * 2**20,
    "trainer_state": 64 * 2**20,
}
#: The pickle in which torch.distributed.checkpoint says where each tensor is; the names of others end so.
METADATA = ".metadata"
