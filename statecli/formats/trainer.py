"""A folder that a training loop writes: the model's weights, and beside them what the training goes on from.

transformers' Trainer (`checkpoint-500`): optimizer.pt, scheduler.pt, scaler.pt, rng_state.pth or one for each rank,
training_args.bin; accelerate's `save_state`: optimizer.bin, scheduler.bin, sampler.bin, random_states_0.pkl,
custom_checkpoint_0.pkl, and numbered from the second on (`model_1.safetensors`, `optimizer_1.bin`). All are archives of
torch.save; each is a section, called as its file is without the suffix. Under FSDP the model and the optimizer are
folders of torch.distributed.checkpoint, numbered from 0 (`pytorch_model_fsdp_0`, `optimizer_0`), or whole in one file
(`pytorch_model_fsdp.bin`). Sources: `Trainer._save_checkpoint` of transformers 5, `save_accelerator_state` and
`save_fsdp_model` of accelerate 1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import BarePickle, UnreadableError
from statecli.core.state import Evidence, Kind, ModelState, Oddity, Settings, TensorInfo
from statecli.formats import dcp, sharded
from statecli.formats.shared import config_files
from statecli.formats.torch.settings import add_file
from statecli.pickles import safe_globals
from statecli.storage import checkpoint_folder, files
from statecli.storage.checkpoint_names import SINGLE

NAME = "trainer"

#: The further models of accelerate; a first one is beside them.
_MODEL = re.compile(r"(?:pytorch_)?model(?:_fsdp)?_(?P<number>\d{1,3})\.(?:safetensors|bin)")
_FIRST = frozenset(["model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin"])
#: What FSDP saves in shards, each a folder.
_SHARDED = re.compile(r"(?:pytorch_(?=model))?(?P<what>model(?=_fsdp)|optimizer)(?:_fsdp)?_(?P<number>0|[1-9]\d{0,2})")
_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
#: The sections of a file that is nothing but one.
_LONE = frozenset(["model", "optimizer", "rng"])
_MODELS = (Kind.PARAMETER, Kind.BUFFER)

#: What is said of names that are none of torch's.
FOREIGN = "foreign-globals"

ReadFile = Callable[[str], ModelState]


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Whether it is a folder with a model's weights and something of a training beside them, or FSDP's shards."""
    if not files.isdir(path):
        return False
    return "model" in _folders(path).values() or (_has_weights(path) and bool(_parts(path)))


def _has_weights(path: str) -> bool:
    return any(map(_is_weights, checkpoint_folder.files(path)))


def _is_weights(name: str) -> bool:
    if name in SINGLE or checkpoint_folder.INDEX.search(name):
        return True
    return bool(checkpoint_folder.SERIES.match(name)) and not checkpoint_folder.COMPANIONS.match(name)


def _parts(path: str) -> dict[str, str]:
    """What is beside the model, files and folders, each with the section that it is, further models first."""
    names = checkpoint_folder.files(path)
    found = {name: section for name, section in _folders(path).items() if section != "model"}
    for name in names:
        stem, suffix = os.path.splitext(name)
        if (model := _MODEL.fullmatch(name)) and _FIRST.intersection(names):
            found[name] = f"model_{model['number']}"
        elif suffix in _SUFFIXES and "." not in stem and checkpoint_folder.COMPANIONS.match(name):
            found[name] = stem
    return dict(sorted(found.items(), key=lambda part: not part[1].startswith("model_")))


def _folders(path: str) -> dict[str, str]:
    """The folders of torch.distributed.checkpoint in it, each with the section that it is."""
    named = ((name, _SHARDED.fullmatch(name)) for name in checkpoint_folder.folders(path))
    return {
        name: match["what"] if match["number"] == "0" else f"{match['what']}_{match['number']}"
        for name, match in named
        if match and dcp.sniff(files.join(path, name), b"")
    }


def members(path: str) -> tuple[str, ...]:
    """The files of the model, and of what is beside it, by their ways from the folder. Raises as `sharded.members`."""
    model = sharded.members(path) if _has_weights(path) else _within(path, _sharded_model(path))
    return (*model, *(way for name in _parts(path) for way in _within(path, name))) if model else ()


def _within(path: str, name: str) -> tuple[str, ...]:
    """The file itself, or those that a folder is made of."""
    inner = files.join(path, name)
    return tuple(files.join(name, one) for one in dcp.members(inner)) if files.isdir(inner) else (name,)


def _sharded_model(path: str) -> str:
    return next(name for name, section in _folders(path).items() if section == "model")


def read(path: str, read_file: ReadFile) -> ModelState:
    """The model, and what lies beside it. One of those that cannot be read is a row with its `damage`.

    Raises UnreadableError and MalformedError where the model cannot be read.
    """
    parts = _parts(path)
    files.ahead(files.join(path, name) for name in parts if name in checkpoint_folder.files(path))
    model = _of_files(path, read_file, parts) if _has_weights(path) else _of_shards(path, read_file)
    return _joined(model, [(name, _part(path, name, section, read_file)) for name, section in parts.items()])


def _of_files(path: str, read_file: ReadFile, parts: dict[str, str]) -> ModelState:
    """The model in files; FSDP's shards beside it are another that is not read."""
    state = sharded.in_folder(path, read_file, parts)
    if "model" not in _folders(path).values():
        return state
    odd = Oddity("other-weights", f"beside what was read, and not read: {_sharded_model(path)}")
    return replace(state, oddities=(*state.oddities, odd))


def _of_shards(path: str, read_file: ReadFile) -> ModelState:
    """The model that FSDP saved in shards, with the settings beside it."""
    name = _sharded_model(path)
    state = _as_section(read_file(files.join(path, name)), "model", name)
    return config_files.noted(path, replace(state, target=path))


def _part(path: str, name: str, section: str, read_file: ReadFile) -> ModelState:
    """One file, as the section of that name."""
    where = files.join(path, name)
    try:
        state = read_file(where)
    except BarePickle as error:
        reason = str(error).removeprefix(f"{where}: ")
        return ModelState(where, NAME, (), (), oddities=(Oddity("companions", f"not read, for it {reason}"),))
    except UnreadableError as error:
        if section.startswith("model_"):
            raise
        return ModelState(where, NAME, (_unreadable(name, section, error),), (section,))
    return _as_section(state, section, name)


def _unreadable(name: str, section: str, error: UnreadableError) -> TensorInfo:
    kind = Kind.OPTIMIZER if section.startswith("optimizer") else Kind.OTHER
    why = str(error)
    return TensorInfo(name, "unknown", None, 0, 0, section, kind, Evidence.CONVENTION, note=why, damage=why)


def _as_section(state: ModelState, section: str, name: str) -> ModelState:
    def inside(own: str) -> str:
        return section if not own or (own in _LONE and len(state.sections) < 2) else f"{section}.{own}"

    of_model = section.startswith(("model", "custom_checkpoint"))
    return replace(
        state,
        tensors=tuple(_row(tensor, inside(tensor.section), name, of_model) for tensor in state.tensors),
        sections=tuple(map(inside, state.sections)),
        optimizers=tuple(replace(one, section=inside(one.section)) for one in state.optimizers),
        state_dicts=tuple(replace(one, section=inside(one.section)) for one in state.state_dicts if of_model),
        oddities=tuple(odd for odd in state.oddities if odd.name != "no-tensors"),
    )


def _row(tensor: TensorInfo, section: str, name: str, of_model: bool) -> TensorInfo:
    """A tensor of a file beside the model; its storage is known by the file, which all count from 0."""
    storage = None if tensor.storage is None else f"{name}:{tensor.storage}"
    if of_model or tensor.kind not in _MODELS:
        return replace(tensor, section=section, storage=storage)
    other = {"kind": Kind.OTHER, "evidence": Evidence.CONVENTION, "persistent": None}
    return replace(tensor, section=section, storage=storage, **other)


def _joined(model: ModelState, parts: list[tuple[str, ModelState]]) -> ModelState:
    states = [model, *(state for _, state in parts)]
    settings = model.metadata
    for name, state in parts:
        # `format` says the same of each file of safetensors.
        own = state.metadata
        if own.values.get("format") == model.metadata.values.get("format"):
            own = replace(own, values={key: value for key, value in own.values.items() if key != "format"})
        settings = add_file(settings, *_called(name, own))
    formats = dict.fromkeys(state.format for state in states if state.format != NAME)
    return replace(
        model,
        format=f"{NAME} {'+'.join(formats)}",
        tensors=tuple(tensor for state in states for tensor in state.tensors),
        sections=tuple(section for state in states for section in state.sections),
        metadata=settings,
        oddities=(*model.oddities, *_odd(parts)),
        globals=tuple(dict.fromkeys(found for state in states for found in state.globals)),
        optimizers=tuple(one for state in states for one in state.optimizers),
        state_dicts=tuple(one for state in states for one in state.state_dicts),
    )


def _called(name: str, settings: Settings) -> tuple[str, Settings]:
    """What its settings are called, and these; those of a folder stand below what was saved in it."""
    match = _SHARDED.fullmatch(name)
    if match is None:
        return os.path.splitext(name)[0], settings
    cut = len(match["what"]) + 1
    own = Settings(
        {key[cut:]: value for key, value in settings.values.items()},
        {key[cut:]: types[cut:] for key, types in settings.types.items()},
        {key[cut:]: kind for key, kind in settings.kinds.items() if key},
    )
    return match["what"] if match["number"] == "0" else name, own


def _odd(parts: list[tuple[str, ModelState]]) -> Iterator[Oddity]:
    """What is odd about each; of the names that loading them would import, one line."""
    importing = [(name, odd) for name, state in parts for odd in state.oddities if odd.name == FOREIGN]
    if len(importing) > 1:
        names = safe_globals.foreign([found for _, state in parts for found, _ in state.globals])
        shown = quoting.names([name for name, _ in importing])
        message = f"{shown}: torch.load(weights_only=False) would import or call {len(names)} names from them"
        yield Oddity(FOREIGN, f"{message}: {quoting.names(names)}")
    for name, state in parts:
        told = (odd for odd in state.oddities if odd.name != FOREIGN or len(importing) < 2)
        yield from (replace(odd, message=f"{quoting.name(name)}: {odd.message}") for odd in told)
