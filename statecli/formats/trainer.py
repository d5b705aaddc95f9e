"""A folder of a training loop: the model's weights, and the files needed to resume the training.

transformers' Trainer (`checkpoint-500`) writes optimizer.pt, scheduler.pt, scaler.pt, training_args.bin and
rng_state.pth (or one for each rank). accelerate's `save_state` writes optimizer.bin, scheduler.bin, sampler.bin,
random_states_0.pkl and custom_checkpoint_0.pkl. Its further files have numbers (`model_1.safetensors`,
`optimizer_1.bin`). All are archives of torch.save. Each file is a section, with the name of its file without the
suffix. Under FSDP the model and the optimizer are folders of torch.distributed.checkpoint, numbered from 0
(`pytorch_model_fsdp_0`, `optimizer_0`), or whole in one file (`pytorch_model_fsdp.bin`). Sources:
`Trainer._save_checkpoint` of transformers 5, `save_accelerator_state` and `save_fsdp_model` of accelerate 1.
"""

from __future__ import annotations

import os

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import BarePickle, UnreadableError
from statecli.core.format_traits import FormatTraits, combine_traits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import (
    REGISTERED_KINDS,
    Evidence,
    Kind,
    ModelState,
    Oddity,
    ReadFile,
    Settings,
    TensorInfo,
)
from statecli.core.oddity_kind import OddityKind
from statecli.core.setting_paths import add_file, rename
from statecli.formats import dcp, sharded
from statecli.formats.shared import config_files
from statecli.formats.shared.joined_states import join_states, rename_sections
from statecli.formats.shared.rank_folders import merge_oddities
from statecli.storage import checkpoint_folder, files
from statecli.storage.checkpoint_names import SINGLE

NAME = "trainer"
TRAITS = FormatTraits(is_training_folder=True)

#: File names of accelerate's further models, and of the first model next to them.
_FURTHER_MODEL = compile_on_use(r"(?:pytorch_)?model(?:_fsdp)?_(?P<number>\d{1,3})\.(?:safetensors|bin)")
_FIRST_MODELS = frozenset(["model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin"])
#: Folder names of models and optimizers that FSDP saves in shards.
_SHARDED_FOLDER = compile_on_use(
    r"(?:pytorch_(?=model))?(?P<what>model(?=_fsdp)|optimizer)(?:_fsdp)?_(?P<number>0|[1-9]\d{0,2})"
)
_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
#: Names of the section in a file with a single section.
_SINGLE_SECTIONS = frozenset(["model", "optimizer", "rng"])


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the folder has a model's weights next to training files, or FSDP's shards."""
    if not files.is_folder(path):
        return False
    return "model" in _find_folders(path).values() or (_has_weights(path) and bool(_find_parts(path)))


def _has_weights(path: str) -> bool:
    return any(map(_is_weights, checkpoint_folder.list_files(path)))


def _is_weights(name: str) -> bool:
    if name in SINGLE or checkpoint_folder.INDEX.search(name):
        return True
    return bool(checkpoint_folder.SERIES.match(name)) and not checkpoint_folder.COMPANIONS.match(name)


def _find_parts(path: str) -> dict[str, str]:
    """Return the section for each file and folder next to the model. Files of further models come first."""
    names = checkpoint_folder.list_files(path)
    parts = {name: section for name, section in _find_folders(path).items() if section != "model"}
    for name in names:
        stem, suffix = os.path.splitext(name)
        if (model := _FURTHER_MODEL.fullmatch(name)) and _FIRST_MODELS.intersection(names):
            parts[name] = f"model_{model['number']}"
        elif suffix in _SUFFIXES and "." not in stem and checkpoint_folder.COMPANIONS.match(name):
            parts[name] = stem
    return dict(sorted(parts.items(), key=lambda part: not part[1].startswith("model_")))


def _find_folders(path: str) -> dict[str, str]:
    """Return the section of each folder that FSDP saved with torch.distributed.checkpoint."""
    matches = ((name, _SHARDED_FOLDER.fullmatch(name)) for name in checkpoint_folder.list_folders(path))
    return {
        name: match["what"] if match["number"] == "0" else f"{match['what']}_{match['number']}"
        for name, match in matches
        if match and dcp.sniff(files.join(path, name), b"")
    }


def members(path: str) -> tuple[str, ...]:
    """List the files of the model and of the training, relative to the folder. Raises as `sharded.members` does."""
    model = sharded.members(path) if _has_weights(path) else _list_within(path, _find_sharded_model(path))
    return (*model, *(member for name in _find_parts(path) for member in _list_within(path, name))) if model else ()


def _list_within(path: str, name: str) -> tuple[str, ...]:
    file_path = files.join(path, name)
    return (
        tuple(files.join(name, member) for member in dcp.members(file_path)) if files.is_folder(file_path) else (name,)
    )


def _find_sharded_model(path: str) -> str:
    return next(name for name, section in _find_folders(path).items() if section == "model")


def read(path: str, read_file: ReadFile) -> ModelState:
    """Read the model and the files next to the model. An unreadable file becomes a tensor row with `damage`.

    Raises UnreadableError and MalformedError if the model cannot be read.
    """
    parts = _find_parts(path)
    files.prefetch(files.join(path, name) for name in parts if name in checkpoint_folder.list_files(path))
    model = _read_from_files(path, read_file, parts) if _has_weights(path) else _read_from_shards(path, read_file)
    return _join_states(model, [(name, _read_part(path, name, section, read_file)) for name, section in parts.items()])


def _read_from_files(path: str, read_file: ReadFile, parts: dict[str, str]) -> ModelState:
    """Read the model from its files. If the folder also has FSDP's shards, add an oddity that these were not read."""
    state = sharded.read_folder(path, read_file, parts)
    if "model" not in _find_folders(path).values():
        return state
    oddity = Oddity(
        "other-weights", f"statecli did not read other weights in the same folder: {_find_sharded_model(path)}"
    )
    return replace(state, oddities=(*state.oddities, oddity))


def _read_from_shards(path: str, read_file: ReadFile) -> ModelState:
    """Read FSDP's sharded model, with the config files next to the shards."""
    name = _find_sharded_model(path)
    state = _move_to_section(read_file(files.join(path, name)), "model", name)
    return config_files.add_config_files(path, replace(state, target=path))


def _read_part(path: str, name: str, section: str, read_file: ReadFile) -> ModelState:
    file_path = files.join(path, name)
    try:
        state = read_file(file_path)
    except BarePickle as error:
        reason = str(error).removeprefix(f"{file_path}: ")
        return ModelState(file_path, NAME, (), (), oddities=(Oddity("companions", f"not read, because it {reason}"),))
    except UnreadableError as error:
        if section.startswith("model_"):
            raise
        return ModelState(file_path, NAME, (_build_unreadable_row(name, section, error),), (section,))
    return _move_to_section(state, section, name)


def _build_unreadable_row(name: str, section: str, error: UnreadableError) -> TensorInfo:
    kind = Kind.OPTIMIZER if section.startswith("optimizer") else Kind.OTHER
    why = str(error)
    return TensorInfo(name, "unknown", None, 0, 0, section, kind, Evidence.CONVENTION, note=why, damage=why)


def _move_to_section(state: ModelState, section: str, name: str) -> ModelState:
    def name_section(inner_section: str) -> str:
        return (
            section
            if not inner_section or (inner_section in _SINGLE_SECTIONS and len(state.sections) < 2)
            else f"{section}.{inner_section}"
        )

    moved = rename_sections(state, name_section, name)
    oddities = tuple(oddity for oddity in state.oddities if oddity.kind is not OddityKind.NO_TENSORS)
    if section.startswith(("model", "custom_checkpoint")):
        return replace(moved, oddities=oddities)
    return replace(moved, oddities=oddities, tensors=tuple(map(_mark_as_other, moved.tensors)), state_dicts=())


def _mark_as_other(tensor: TensorInfo) -> TensorInfo:
    """Set the kind of a tensor outside of the models, because no module registers it."""
    if tensor.kind not in REGISTERED_KINDS:
        return tensor
    return replace(tensor, kind=Kind.OTHER, evidence=Evidence.CONVENTION, persistent=None)


def _join_states(model: ModelState, parts: list[tuple[str, ModelState]]) -> ModelState:
    states = [model, *(state for _, state in parts)]
    settings = model.metadata
    for name, state in parts:
        # Omit `format`, because it is the same for each safetensors file.
        part_settings = state.metadata
        if part_settings.values.get("format") == model.metadata.values.get("format"):
            part_settings = replace(
                part_settings, values={key: value for key, value in part_settings.values.items() if key != "format"}
            )
        settings = add_file(settings, *_name_settings(name, part_settings))
    read_states = [state for state in states if state.format != NAME]
    return join_states(
        states,
        format=f"{NAME} {'+'.join(dict.fromkeys(state.format for state in read_states))}",
        traits=combine_traits((TRAITS, *(state.traits for state in read_states))),
        metadata=settings,
        oddities=(*model.oddities, *merge_oddities({quoting.name(name): state.oddities for name, state in parts})),
    )


def _name_settings(name: str, settings: Settings) -> tuple[str, Settings]:
    """Return the prefix and the settings of a file or folder. A folder's paths lose the key of the saved object."""
    match = _SHARDED_FOLDER.fullmatch(name)
    if match is None:
        return os.path.splitext(name)[0], settings
    role = match["what"]
    folder_settings = rename(settings, lambda key: (f"{role}.", "") if key else None)
    return role if match["number"] == "0" else name, folder_settings
