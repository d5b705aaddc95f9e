"""Every format, in the order in which they are tried."""

from __future__ import annotations

from types import ModuleType

from statecli.formats import (
    dcp,
    dcp_safetensors,
    deepspeed,
    flax_msgpack,
    gguf,
    megatron,
    npy,
    npz,
    safetensors,
    sharded,
    torch_export,
    torch_legacy,
    torch_tar,
    torch_zip,
    torchscript,
    trainer,
)

#: In the order they are asked. A completeness test holds the folder against these tuples.
#: A GGUF file of 123 tensors begins as a safetensors file may.
FILES: tuple[ModuleType, ...] = (
    gguf,
    safetensors,
    npy,
    npz,
    torch_export,
    torchscript,
    torch_zip,
    torch_legacy,
    torch_tar,
    flax_msgpack,
)
#: The last of them takes every folder.
FOLDERS: tuple[ModuleType, ...] = (dcp, dcp_safetensors, deepspeed, megatron, trainer, sharded)
FORMATS = (*FILES, *FOLDERS)
