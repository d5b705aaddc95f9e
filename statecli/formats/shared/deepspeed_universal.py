"""DeepSpeed's universal checkpoint: `zero/` has a folder for each parameter, with a file for each of its states.

`zero/NAME/fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` hold a dict whose `param` is the whole tensor, merged over all
ranks; `step.pt` holds a number or a tensor. `zero/optimizer_state.pt` has the optimizer's settings. The ranks' model
files lie next to `zero/`. Source: deepspeed/checkpoint/ds_to_universal.py and constants.py of deepspeed 0.19.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import Evidence, Kind, TensorInfo
from statecli.formats import torch_legacy, torch_zip
from statecli.formats.shared.deepspeed_zero import MASTER
from statecli.formats.shared.rank_folders import build_missing_row
from statecli.formats.torch.objects import build_info
from statecli.formats.torch.reading import DecodedTensor
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import as_mapping
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource

FOLDER = "zero"
_SUFFIX = ".pt"
_PARAM = "param"
#: End of the folder name that ds_to_universal.py recommends for its output.
NAME_END = "_universal"
_MASTER_FILE = f"{MASTER}{_SUFFIX}"
#: Files that identify a parameter's folder: it has at least one of them, even if another is missing.
_STATE_FILES = frozenset([_MASTER_FILE, f"exp_avg{_SUFFIX}"])
#: Number of folders that are checked to recognise `zero/` as DeepSpeed's.
_MAX_CHECKED_FOLDERS = 4


def is_universal(path: str) -> bool:
    """Return whether the folder has a subfolder `zero` with parameters."""
    names = _list_parameters(path)[:_MAX_CHECKED_FOLDERS]
    return any(
        not _STATE_FILES.isdisjoint(checkpoint_folder.list_files(files.join(path, FOLDER, name))) for name in names
    )


def _list_parameters(path: str) -> list[str]:
    has_folder = FOLDER in checkpoint_folder.list_folders(path)
    return checkpoint_folder.list_folders(files.join(path, FOLDER)) if has_folder else []


def members(path: str) -> Iterator[str]:
    """Yield the files below `zero/`, relative to the folder."""
    if not is_universal(path):
        return
    for name in checkpoint_folder.list_files(files.join(path, FOLDER)):
        if name.endswith(_SUFFIX):
            yield files.join(FOLDER, name)
    for parameter in _list_parameters(path):
        for name in checkpoint_folder.list_files(files.join(path, FOLDER, parameter)):
            yield files.join(FOLDER, parameter, name)


def find_missing_files(path: str, trained: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each missing file below `zero/`: the parameter's name, and the file's path relative to the folder.

    Each folder and each `trained` parameter should have a float32 copy. A parameter with some of the usual states
    should have all of them.
    """
    files_by_parameter = {
        name: frozenset(
            file for file in checkpoint_folder.list_files(files.join(path, FOLDER, name)) if file.endswith(_SUFFIX)
        )
        for name in _list_parameters(path)
    }
    counts = Counter(files_by_parameter.values())
    usual_files = max(counts, key=lambda names: (counts[names], len(names)), default=frozenset())
    for name in dict.fromkeys((*files_by_parameter, *trained)):
        present_files = files_by_parameter.get(name, frozenset())
        expected_files = {_MASTER_FILE} | (
            usual_files if present_files - {_MASTER_FILE} and present_files < usual_files else frozenset()
        )
        yield from ((name, files.join(FOLDER, name, file)) for file in sorted(expected_files - present_files))


def read_states(target: str, path: str) -> Iterator[TensorInfo]:
    """Yield a tensor row for each state of each parameter in `path`. A row may say why a state is unreadable."""
    state_files = [member for member in members(path) if member.count("/") > 1 and member.endswith(_SUFFIX)]
    files.prefetch(files.join(path, member) for member in state_files)
    for member in state_files:
        _, parameter, name = member.split("/")
        section = f"optimizer.{name.removesuffix(_SUFFIX)}"
        try:
            tensor = _read_tensor(files.join(path, member), parameter)
        except UnreadableError as error:
            row = replace(build_missing_row(parameter, section, f"{target}: {member}: {error}"), kind=Kind.OPTIMIZER)
        else:
            if tensor is None:
                continue
            tensor.storage = f"{member}:{tensor.storage}"
            row = build_info(DecodedTensor(parameter, tensor, Kind.OPTIMIZER, Evidence.OPTIMIZER), section, target)
        yield replace(row, evidence=Evidence.OPTIMIZER, belongs_to=parameter)


def _read_tensor(path: str, parameter: str) -> Tensor | None:
    """Return the tensor in the file, or None for a number. Raises UnreadableError for an unreadable file."""
    with ByteSource(path) as source:
        format = torch_legacy if torch_legacy.sniff(path, source.head) else torch_zip
    pickle, storages, _ = format.read_contents(path)
    items = as_mapping(pickle.root)
    tensor = TensorDecoder(storages, persistent=pickle.persistent).tensor(
        pickle.root if items is None else items.get(_PARAM), parameter
    )
    if items is not None and tensor is None:
        raise MalformedError(f"contains no tensor {_PARAM!r}: convert the checkpoint again")
    return tensor
