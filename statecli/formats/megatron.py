"""A Megatron-LM checkpoint: a folder for each iteration, with a folder for each model-parallel rank.

`latest_checkpointed_iteration.txt` names the iteration ("10", or "release"); `iter_0000010/mp_rank_TT[_PPP[_EEE]]/` is
tensor-parallel rank TT of pipeline stage PPP. It contains `model_optim_rng.pt`, or `model_rng.pt` if the optimizer's
states are separate. No file records which part of a tensor each tensor-parallel rank has (only Megatron's code knows),
so ranks are shown next to each other. Source: megatron/training/checkpointing.py (`get_checkpoint_name`,
`read_metadata`) of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, MissingShard, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, Oddity, ReadFile
from statecli.core.oddity_kind import OddityKind
from statecli.formats.shared.joined_states import add_rows, join_settings, join_states, rename_sections
from statecli.formats.shared.rank_folders import build_missing_row, merge_oddities, note_separate_ranks, read_small
from statecli.storage import checkpoint_folder, files

NAME = "megatron"
TRAITS = FormatTraits(is_in_pieces=True, has_own_loader=True)

TRACKER = "latest_checkpointed_iteration.txt"
#: Maximum size of the tracker file in bytes; it contains a number or a word.
MAX_TRACKER_BYTES = 64
#: File names in a rank's folder: the model, and flat buffers of the optimizer, which statecli does not read.
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
UNREAD_OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")
#: Files of a distributed checkpoint next to its arrays: the values that are not sharded, and the name of the library
#: that wrote the arrays.
COMMON_FILE, BACKEND_FILE = "common.pt", "metadata.json"
_ARRAY = ".zarray"

_RANK = compile_on_use(r"mp_rank_(?P<tensor>\d{2,5})(?:_(?P<stage>\d{3,5}))?(?:_\d{3,5})?")
#: Arguments in a checkpoint that record the numbers of tensor-parallel and pipeline ranks.
_SIZE_ARGUMENTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the path is a Megatron-LM checkpoint: a folder of iterations, or a folder of rank folders."""
    return files.is_folder(path) and (
        TRACKER in checkpoint_folder.list_files(path) or bool(_find_ranks(path)) or bool(_list_arrays(path))
    )


def _list_arrays(path: str) -> list[str]:
    """List the subfolders that are zarr arrays. A distributed checkpoint may store each tensor in such a folder."""
    if not {COMMON_FILE, BACKEND_FILE} <= set(checkpoint_folder.list_files(path)):
        return []
    return [name for name in checkpoint_folder.list_folders(path) if files.exists(files.join(path, name, _ARRAY))]


def _find_ranks(path: str) -> dict[str, list[str]]:
    """Map the folder of each rank to the names of its known files. Empty if no rank has a model."""
    ranks = [name for name in checkpoint_folder.list_folders(path) if _RANK.fullmatch(name)]
    files.prefetch(files.join(path, name) for name in ranks)
    files_by_rank = {}
    for rank in ranks:
        existing_files = checkpoint_folder.list_files(files.join(path, rank))
        files_by_rank[rank] = [name for name in (*MODEL_FILES, *UNREAD_OPTIMIZER_FILES) if name in existing_files]
    return files_by_rank if any(map(_find_model, files_by_rank.values())) else {}


def _find_model(names: Iterable[str]) -> str | None:
    return next((name for name in names if name in MODEL_FILES), None)


def _resolve_iteration(path: str) -> str:
    """Return the subfolder with the rank folders ("" for `path` itself). Raises UnreadableError without ranks."""
    if _find_ranks(path) or _list_arrays(path):
        return ""
    raw = read_small(files.join(path, TRACKER), TRACKER, MAX_TRACKER_BYTES)
    word = checkpoint_folder.decode_tracker(raw)
    if word != "release" and not (word.isascii() and word.isdecimal()):
        raise MalformedError(f"{TRACKER} contains {quoting.quote(word)}; expected a number or 'release'")
    name = word if word == "release" else f"iter_{int(word):07d}"
    if _find_ranks(files.join(path, name)):
        return name
    if ".metadata" in checkpoint_folder.list_files(files.join(path, name)) or _list_arrays(files.join(path, name)):
        raise UnreadableError(
            "is a folder of Megatron iterations, not one checkpoint; give the folder of the latest iteration: "
            f"{files.join(path, name)}"
        )
    raise MissingShard(
        f"{TRACKER} points to {word}, but the folder {name} is missing or has no rank files; give the folder of "
        "another iteration"
    )


def members(path: str) -> tuple[str, ...]:
    """List the files of the iteration, relative to the folder. Raises UnreadableError as `read` does."""
    iteration = _resolve_iteration(path)
    if not iteration and _list_arrays(path):
        return (COMMON_FILE, BACKEND_FILE)
    ranks = _find_ranks(files.join(path, iteration)).items()
    tracker = (TRACKER,) if iteration else ()
    return (*tracker, *(files.join(iteration, rank, name) for rank, names in ranks for name in names))


def read(path: str, read_file: ReadFile) -> ModelState:
    """Read all ranks, and prefix each section with the rank's name. An unreadable rank becomes a damaged tensor row.

    Raises UnreadableError if no rank can be read.
    """
    iteration = _resolve_iteration(path)
    if not iteration and (arrays := _list_arrays(path)):
        return _add_array_rows(path, arrays, read_file(files.join(path, COMMON_FILE)))
    states: dict[str, ModelState] = {}
    failures: dict[str, str] = {}
    ranks = _find_ranks(files.join(path, iteration))
    models = {rank: _find_model(names) for rank, names in ranks.items()}
    files.prefetch(files.join(path, iteration, rank, model) for rank, model in models.items() if model)
    for name, model in models.items():
        folder = files.join(path, iteration, name)
        try:
            if model is None:
                raise MissingShard(f"{folder}: contains no {MODEL_FILES[0]}; copy the folder again")
            states[name] = rename_sections(read_file(files.join(folder, model)), f"{name}.{{}}".format, name)
        except UnreadableError as error:
            failures[name] = str(error)
    if not states:
        raise MalformedError(f"no rank can be read: {next(iter(failures.values()))}")
    return _merge_ranks(path, states, failures, ranks)


def _add_array_rows(path: str, arrays: list[str], common: ModelState) -> ModelState:
    """Add an unreadable tensor row for each zarr array to `common`, the state of the values that are not sharded."""
    why = "is a zarr array, which statecli does not read; convert the checkpoint to torch_dist with Megatron-LM"
    rows = [build_missing_row(name, "model", f"{path}: {quoting.name(name)} {why}") for name in arrays]
    oddities = tuple(oddity for oddity in common.oddities if oddity.kind is not OddityKind.NO_TENSORS)
    return replace(add_rows(common, rows), target=path, format=NAME, traits=TRAITS, oddities=oddities)


def _merge_ranks(
    path: str, states: dict[str, ModelState], failures: dict[str, str], ranks: dict[str, list[str]]
) -> ModelState:
    rows = [
        build_missing_row(MODEL_FILES[0], name, why)
        for name, why in {**failures, **_find_missing_ranks(path, states, failures)}.items()
    ]
    oddities = (
        *merge_oddities({name: state.oddities for name, state in states.items()}),
        *_find_differences(states),
        *_note_optimizer_buffers(ranks),
    )
    joined = join_states(
        list(states.values()),
        metadata=join_settings({name: state.metadata for name, state in states.items()}),
        oddities=oddities,
    )
    return replace(add_rows(joined, rows), target=path, format=NAME, traits=TRAITS)


def _find_missing_ranks(path: str, states: dict[str, ModelState], failures: dict[str, str]) -> dict[str, str]:
    """Return a message for each of the first four missing ranks. The saved arguments give the expected ranks."""
    first, state = next(iter(states.items()))
    sizes = [state.metadata.values.get(f"args.{size}") for size in _SIZE_ARGUMENTS]
    tensor, stages = (size if type(size) is int and 0 < size <= 10**5 else 1 for size in sizes)
    rank_names = {*states, *failures}
    match = _RANK.fullmatch(first)
    has_stages = match is not None and match["stage"] is not None
    if len(rank_names) >= tensor * stages or (stages > 1 and not has_stages):
        return {}
    expected_names = (
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if has_stages else "") for p in range(stages) for t in range(tensor)
    )
    counts = (
        f"the folder has files of {len(rank_names)} of {tensor * stages} ranks ({tensor} tensor-parallel ranks in "
        f"{stages} pipeline stages); copy the missing folders"
    )
    missing_names = (name for name in expected_names if not any(folder.startswith(name) for folder in rank_names))
    return {name: f"{path}: {name} is missing: {counts}" for name, _ in zip(missing_names, range(4), strict=False)}


def _find_differences(states: dict[str, ModelState]) -> Iterator[Oddity]:
    """Yield an `Oddity` if names or dtypes differ between the tensor-parallel ranks of a pipeline stage."""
    if len(states) > 1:
        yield note_separate_ranks(len(states))
    stages: dict[str | None, list[str]] = {}
    for name in states:
        match = _RANK.fullmatch(name)
        stages.setdefault(match["stage"] if match else None, []).append(name)
    for first, *others in stages.values():
        ours = _map_dtypes(first, states[first])
        for other in others:
            yield from _compare_dtypes(first, ours, other, _map_dtypes(other, states[other]))


def _map_dtypes(name: str, state: ModelState) -> dict[str, str]:
    model = (tensor for tensor in state.tensors if tensor.kind not in (Kind.OPTIMIZER, Kind.OTHER))
    return {f"{tensor.section.removeprefix(f'{name}.')}.{tensor.fqn}": tensor.dtype for tensor in model}


def _compare_dtypes(first: str, ours: dict[str, str], other: str, theirs: dict[str, str]) -> Iterator[Oddity]:
    for name, dtypes, counterpart, counterpart_dtypes in ((first, ours, other, theirs), (other, theirs, first, ours)):
        unmatched = [fqn for fqn in dtypes if fqn not in counterpart_dtypes]
        if unmatched:
            difference = f"these tensors are in {name} but not in {counterpart}: {quoting.names(unmatched)}"
            yield Oddity("ranks-disagree", f"{difference}; copy the folder again")
    for fqn, dtype in ours.items():
        if theirs.get(fqn, dtype) != dtype:
            difference = f"{dtype} in {first}, {theirs[fqn]} in {other}"
            yield Oddity("ranks-disagree", f"{quoting.name(fqn)}: its dtype differs between ranks: {difference}")
            return


def _note_optimizer_buffers(ranks: dict[str, list[str]]) -> Iterator[Oddity]:
    """Report that the distributed optimizer's buffers are unread, because only Megatron's code knows their layout."""
    paths = [files.join(rank, name) for rank, names in ranks.items() for name in names if name not in MODEL_FILES]
    if paths:
        yield Oddity(
            "not-read",
            "no file records the positions of the parameters in the flat optimizer buffers, so these files were not "
            f"read: {quoting.names(paths)}",
        )
