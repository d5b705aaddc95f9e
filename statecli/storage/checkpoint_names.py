"""Usual names of the files in a checkpoint folder."""

from __future__ import annotations

#: Names of weight files, in the order of transformers and diffusers; each may be an index instead.
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
#: Names of settings files, without `.json`, and the largest size in bytes. A Trainer logs every few steps.
SETTINGS_FILES = {
    "config": 4 * 2**20,
    "adapter_config": 4 * 2**20,
    "trainer_state": 64 * 2**20,
}
#: The pickle of torch.distributed.checkpoint with the position of each tensor; other such names end like this.
METADATA = ".metadata"

#: The number that begins a legacy file of torch.save; torch compares its value.
LEGACY_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
