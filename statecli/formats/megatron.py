"""A Megatron-LM checkpoint: a folder for each iteration, in it one for each model-parallel rank.

`latest_checkpointed_iteration.txt` says which iteration ("10", or "release"); `iter_0000010/mp_rank_TT[_PPP[_EEE]]/`
is tensor-parallel rank TT of pipeline stage PPP and holds `model_optim_rng.pt`, or `model_rng.pt` where the optimizer's
states lie apart. Which part of a tensor a tensor-parallel rank has is in Megatron's code and in no file: ranks are
shown side by side. Source: megatron/training/checkpointing.py (`get_checkpoint_name`, `read_metadata`) of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, MissingShard, UnreadableError
from statecli.core.state import Kind, ModelState, Oddity, Settings
from statecli.formats.shared.rank_folders import lost, noted, small
from statecli.formats.torch.settings import join, put_below, without_same
from statecli.storage import checkpoint_folder, files

NAME = "megatron"

TRACKER = "latest_checkpointed_iteration.txt"
#: Bytes of it: a number or a word.
MAX_TRACKER = 64
#: What a rank's folder calls its model, and what lies beside it that is not read: flat buffers of the optimizer.
MODELS = ("model_optim_rng.pt", "model_rng.pt")
BESIDE = ("distrib_optim.pt", "optim.pt")
#: What a distributed checkpoint has next to its arrays: what is not sharded, and which library wrote the rest.
COMMON, BACKEND = "common.pt", "metadata.json"
_ARRAY = ".zarray"

_RANK = re.compile(r"mp_rank_(?P<tensor>\d{2,5})(?:_(?P<stage>\d{3,5}))?(?:_\d{3,5})?")
#: Sizes by which a checkpoint's own arguments say how many ranks there are.
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Whether it is a folder of iterations, or of ranks."""
    return files.isdir(path) and (TRACKER in checkpoint_folder.files(path) or bool(_ranks(path)) or bool(_arrays(path)))


def _arrays(path: str) -> list[str]:
    """The folders that are zarr arrays, of a distributed checkpoint that keeps each tensor in such a folder."""
    if not {COMMON, BACKEND} <= set(checkpoint_folder.files(path)):
        return []
    return [name for name in checkpoint_folder.folders(path) if files.exists(files.join(path, name, _ARRAY))]


def _ranks(path: str) -> dict[str, str]:
    """The name of each rank's folder, and its model's file from `path` on; "" where there is none."""
    found = {}
    ranks = [name for name in checkpoint_folder.folders(path) if _RANK.fullmatch(name)]
    files.ahead(files.join(path, name) for name in ranks)
    for name in ranks:
        held = checkpoint_folder.files(files.join(path, name))
        model = next((one for one in MODELS if one in held), None)
        found[name] = files.join(name, model) if model else ""
    return found if any(found.values()) else {}


def _iteration(path: str) -> str:
    """The folder in `path` that its ranks are in, "" for itself. Raises MalformedError where it is not there."""
    if _ranks(path) or _arrays(path):
        return ""
    raw = small(files.join(path, TRACKER), TRACKER, MAX_TRACKER)
    word = raw.decode("utf-8", "backslashreplace").strip()
    if word != "release" and not (word.isascii() and word.isdecimal()):
        raise MalformedError(f"{TRACKER} says {quoting.quoted(word)}, neither a number nor 'release'")
    name = word if word == "release" else f"iter_{int(word):07d}"
    if _ranks(files.join(path, name)):
        return name
    if ".metadata" in checkpoint_folder.files(files.join(path, name)) or _arrays(files.join(path, name)):
        raise UnreadableError(f"is a folder of Megatron iterations; name the last of them: {files.join(path, name)}")
    raise MissingShard(f"{TRACKER} says {word}, and no folder {name} has a rank's files; name one that is here")


def members(path: str) -> tuple[str, ...]:
    """The files of the iteration, by their ways from the folder. Raises UnreadableError as `read` does."""
    where = _iteration(path)
    if not where and _arrays(path):
        return (COMMON, BACKEND)
    found: list[str] = [TRACKER] if where else []
    for name in _ranks(files.join(path, where)):
        held = checkpoint_folder.files(files.join(path, where, name))
        found += [files.join(where, name, one) for one in (*MODELS, *BESIDE) if one in held]
    return tuple(found)


def read(path: str, read_file: Callable[[str], ModelState]) -> ModelState:
    """Every rank's sections, behind its name. A rank that cannot be read is a row that says why.

    Raises UnreadableError where none can.
    """
    where = _iteration(path)
    if not where and (arrays := _arrays(path)):
        return _with_arrays(path, arrays, read_file(files.join(path, COMMON)))
    states: dict[str, ModelState] = {}
    failed: dict[str, str] = {}
    ranks = _ranks(files.join(path, where))
    files.ahead(files.join(path, where, model) for model in ranks.values() if model)
    for name, model in ranks.items():
        way = files.join(path, where, model)
        try:
            if not model:
                raise MissingShard(f"{files.join(path, where, name)}: holds no {MODELS[0]}: copy it again")
            states[name] = _of_rank(name, read_file(way))
        except UnreadableError as error:
            failed[name] = str(error)
    if not states:
        raise MalformedError(f"no rank can be read: {next(iter(failed.values()))}")
    return _together(path, states, failed, files.join(path, where))


def _with_arrays(path: str, arrays: list[str], common: ModelState) -> ModelState:
    """The part that is not sharded, with a row for each array that says that it is not read."""
    why = "is a zarr array, which statecli does not read; convert the checkpoint to torch_dist with Megatron-LM"
    rows = [lost(name, "model", f"{path}: {quoting.name(name)} {why}") for name in arrays]
    sections = dict.fromkeys((*common.sections, "model"))
    oddities = tuple(odd for odd in common.oddities if odd.name != "no-tensors")
    return replace(
        common, target=path, format=NAME, tensors=(*common.tensors, *rows), sections=tuple(sections), oddities=oddities
    )


def _of_rank(name: str, state: ModelState) -> ModelState:
    """The state with the rank before each of its sections."""
    tensors = (
        replace(one, section=f"{name}.{one.section}", storage=None if one.storage is None else f"{name}:{one.storage}")
        for one in state.tensors
    )
    return replace(
        state,
        tensors=tuple(tensors),
        sections=tuple(f"{name}.{section}" for section in state.sections),
        optimizers=tuple(replace(one, section=f"{name}.{one.section}") for one in state.optimizers),
        state_dicts=tuple(replace(one, section=f"{name}.{one.section}") for one in state.state_dicts),
    )


def _together(path: str, states: dict[str, ModelState], failed: dict[str, str], folder: str) -> ModelState:
    held = list(states.values())
    rows = [lost(MODELS[0], name, why) for name, why in {**failed, **_missing(path, states, failed)}.items()]
    tensors = (*(tensor for state in held for tensor in state.tensors), *rows)
    return ModelState(
        path,
        NAME,
        tensors,
        tuple(dict.fromkeys(tensor.section for tensor in tensors)),
        _settings(states),
        (*noted({name: state.oddities for name, state in states.items()}), *_differences(states), *_beside(folder)),
        tuple(dict.fromkeys(one for state in held for one in state.globals)),
        tuple(one for state in held for one in state.optimizers),
        tuple(one for state in held for one in state.state_dicts),
    )


def _settings(states: dict[str, ModelState]) -> Settings:
    """Return the settings of the first rank, and those of another rank that differ, below its name."""
    (_, first), *others = states.items()
    settings = first.metadata
    for name, state in others:
        settings = join((settings, put_below(without_same(state.metadata, first.metadata), f"{name}.")))
    return settings


def _missing(path: str, states: dict[str, ModelState], failed: dict[str, str]) -> dict[str, str]:
    """Of the ranks that the arguments in the file speak of, the first few that are not here."""
    first, state = next(iter(states.items()))
    sizes = [state.metadata.values.get(f"args.{size}") for size in _SIZES]
    tensor, stages = (size if type(size) is int and 0 < size <= 10**5 else 1 for size in sizes)
    here = {*states, *failed}
    match = _RANK.fullmatch(first)
    staged = match is not None and match["stage"] is not None
    if len(here) >= tensor * stages or (stages > 1 and not staged):
        return {}
    named = (f"mp_rank_{t:02d}" + (f"_{p:03d}" if staged else "") for p in range(stages) for t in range(tensor))
    said = f"of {tensor} tensor-parallel ranks in {stages} stages, {len(here)} are here; copy the rest"
    absent = (name for name in named if not any(one.startswith(name) for one in here))
    return {name: f"{path}: {name}: is missing: {said}" for name, _ in zip(absent, range(4), strict=False)}


def _differences(states: dict[str, ModelState]) -> Iterator[Oddity]:
    """Tensor-parallel ranks of one stage have parts of the same tensors."""
    if len(states) > 1:
        yield Oddity(
            "model-parallel", f"{len(states)} model-parallel ranks, each with parts of the tensors: not merged"
        )
    stages: dict[str | None, list[str]] = {}
    for name in states:
        match = _RANK.fullmatch(name)
        stages.setdefault(match["stage"] if match else None, []).append(name)
    for first, *others in stages.values():
        ours = _dtypes(first, states[first])
        for other in others:
            yield from _apart(first, ours, other, _dtypes(other, states[other]))


def _dtypes(name: str, state: ModelState) -> dict[str, str]:
    """Dtypes by section and name, of what is a model's."""
    model = (one for one in state.tensors if one.kind not in (Kind.OPTIMIZER, Kind.OTHER))
    return {f"{one.section.removeprefix(f'{name}.')}.{one.fqn}": one.dtype for one in model}


def _apart(first: str, ours: dict[str, str], other: str, theirs: dict[str, str]) -> Iterator[Oddity]:
    for name, has, lacks in ((first, ours, theirs), (other, theirs, ours)):
        alone = [fqn for fqn in has if fqn not in lacks]
        if alone:
            beside = other if name == first else first
            yield Oddity("ranks-disagree", f"{name} has, and {beside} has not: {quoting.names(alone)}")
    for fqn, dtype in ours.items():
        if theirs.get(fqn, dtype) != dtype:
            both = f"{dtype} in {first}, {theirs[fqn]} in {other}"
            yield Oddity("ranks-disagree", f"{quoting.name(fqn)}: ranks disagree on its dtype: {both}")
            return


def _beside(folder: str) -> Iterator[Oddity]:
    """The distributed optimizer's buffers, whose order only the code knows that wrote them."""
    ranks = _ranks(folder)
    found = [
        files.join(name, one) for name in ranks for one in BESIDE if one in checkpoint_folder.files(f"{folder}/{name}")
    ]
    if found:
        yield Oddity("not-read", f"flat buffers of the optimizer, and not read: {quoting.names(found)}")
