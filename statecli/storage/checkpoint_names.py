"""Usual names of the files in a checkpoint folder."""

from __future__ import annotations

from statecli.core.lazy_pattern import compile_on_use

#: Characters that are not allowed in a file name in an index or in metadata: they form a path, a drive or a URL, or
#: break a line.
_NOT_IN_NAME = compile_on_use("[/\\\\:\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: Beginning of a path that names the folder itself.
_CURRENT_FOLDER = compile_on_use(r"\A(?:\./+)+")
#: Names of weight files, in the order of transformers and diffusers. Each may have an index instead.
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
#: Suffixes of checkpoints: if a file with such a name is unreadable, the target fails. For `.bin` this holds only for
#: names that match WEIGHT_BIN_NAME, and for pointers of Git LFS.
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
#: Prefixes of the `.bin` files that trainers write: weights and companion files.
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
#: Maximum size in bytes of each settings file (key: name without `.json`). trainer_state is larger, because a Trainer
#: logs every few steps.
SETTINGS_FILES = {
    "config": 4 * 2**20,
    "adapter_config": 4 * 2**20,
    "trainer_state": 64 * 2**20,
}
#: File in which torch.distributed.checkpoint pickles the position of each tensor, and pattern for variants with a rank.
METADATA = ".metadata"
METADATA_NAME = compile_on_use(r"(?:__(?P<rank>\d{1,9}))?\.metadata")

#: Last part of the key of a module's extra state; some modules unpickle it.
EXTRA_STATE = "_extra_state"

#: Magic number at the beginning of a legacy file of torch.save; torch compares its value, not its encoding.
LEGACY_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C


def drop_current_folder(name: str) -> str:
    """Return a name from an index without a leading `./`, because loaders join the name with the folder's path."""
    return _CURRENT_FOLDER.sub("", name)


def is_plain_file_name(name: str) -> bool:
    """Return whether the name is only a file name on every system: not a path, drive, URL or home folder."""
    return name not in ("", ".", "..") and name[0] != "~" and not _NOT_IN_NAME.search(name)
