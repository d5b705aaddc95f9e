"""Usual names of the files in a checkpoint folder."""

from __future__ import annotations

from statecli.core.lazy_pattern import compile_on_use

#: Characters that no file name in an index or in metadata has: they make a path, a drive or a URL, or break a line.
_NOT_IN_NAME = compile_on_use("[/\\\\:\x00-\x1f\x7f-\x9f\u2028\u2029]")
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
TAR_SUFFIXES = (".pt.tar", ".pth.tar", ".ckpt.tar")
#: Suffixes of pickles, which may contain anything.
PICKLE_SUFFIXES = (".pkl", ".pickle", ".joblib", ".dill")
#: Suffixes of checkpoints: an unreadable file with such a name is a failed target, whatever its content. Of `.bin`
#: files this holds for names that match WEIGHT_BIN_NAME, and for pointers of Git LFS.
CHECKPOINT_SUFFIXES = (
    *PICKLE_SUFFIXES,
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".distcp",
    ".pt2",
    ".gguf",
    ".mar",
    ".npz",
    ".msgpack",
    ".msgpck",
    ".nemo",
    ".ptl",
    *TAR_SUFFIXES,
)
#: Prefixes of `.bin` files that trainers write: weights and the files next to them.
WEIGHT_BIN_PREFIXES = (
    "pytorch_model",
    "diffusion_pytorch_model",
    "adapter_model",
    "consolidated",
    "optimizer",
    "scheduler",
    "scaler",
    "training_args",
    "rng_state",
    "random_states",
)
WEIGHT_BIN_NAME = compile_on_use(rf"(?i)^(?:{'|'.join(WEIGHT_BIN_PREFIXES)})[^/]*\.bin$")
#: Names of settings files, without `.json`, and the largest size in bytes. A Trainer logs every few steps.
SETTINGS_FILES = {
    "config": 4 * 2**20,
    "adapter_config": 4 * 2**20,
    "trainer_state": 64 * 2**20,
}
#: The pickle of torch.distributed.checkpoint with the position of each tensor; other such names end like this.
METADATA = ".metadata"
METADATA_NAME = compile_on_use(r"(?:__(?P<rank>\d{1,9}))?\.metadata")

#: The last part of the key of the extra state of a module, which some modules unpickle.
EXTRA_STATE = "_extra_state"

#: The number that begins a legacy file of torch.save; torch compares its value.
LEGACY_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C


def is_plain_file_name(name: str) -> bool:
    """Return False for a path, a drive, a URL or a home folder of any system, and for a name that breaks a line."""
    return name not in ("", ".", "..") and name[0] != "~" and not _NOT_IN_NAME.search(name)
