"""A DeepSpeed checkpoint: a folder of rank files, or its parent folder with a file `latest` that names the folder.

`mp_rank_XX_model_states.pt` holds the module's state_dict and DeepSpeed's records: the shapes of trained parameters
(`param_shapes`, a dict for each group of the optimizer), `frozen_param_shapes`, `buffer_names`, `shared_params`. ZeRO
splits the optimizer's float32 copies and moments across the ranks, each a flat vector for each group, in
`*zero_pp_rank_R_mp_rank_XX_optim_states.pt`. Stages 1 and 2 concatenate a group's parameters and split the whole at
equal lengths. Stage 3 splits each parameter and stores the values nowhere else. Each rank then has a
`zero_pp_rank_R_mp_rank_XX_model_states.pt` with empty tensors. Source: deepspeed/utils/zero_to_fp32.py,
runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`) of deepspeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.errors import MalformedError, MissingShard, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Evidence, Kind, ModelState, Oddity, ReadFile, Settings, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.setting_paths import join, put_below, rename, select
from statecli.formats.shared import deepspeed_universal
from statecli.formats.shared.deepspeed_zero import (
    MASTER,
    Optimizer,
    Owner,
    ParameterPart,
    Rank,
    Shape,
    VectorPiece,
    VectorView,
    build_row,
    read_rank,
    read_shapes,
)
from statecli.formats.shared.rank_folders import build_missing_row, merge_oddities, note_separate_ranks, read_small
from statecli.pickles.graph import as_mapping, as_sequence, get_text_items
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import SINGLE

NAME = "deepspeed"
TRAITS = FormatTraits(is_partitioned=True, is_in_pieces=True, has_own_loader=True)

#: Newest supported version of DeepSpeed.
NEWEST_VERSION = (0, 19)
#: Tracker files, each with the name of the folder to load: of the saved checkpoint, and of a universal checkpoint.
TRACKERS = ("latest", "latest_universal")
#: Maximum size of `latest` in bytes; it holds the name of a folder.
MAX_LATEST_BYTES = 512

#: Maximum size of `latest` in bytes including surrounding blanks, because DeepSpeed strips them.
_MAX_PADDED_LATEST_BYTES = 2**20
_STATES = "_states.pt"

#: Note for a parameter in no group of the optimizer: stage 1 does not record frozen parameters.
NOT_TRAINED_NOTE = "not trained by the optimizer"

_MODEL = compile_on_use(r"(?:zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<mp>\d{2,6})_model_states\.pt")
_OPTIMIZER = compile_on_use(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<mp>\d{2,6})_?optim_states\.pt")
#: Names of files of experts and of pipeline stages, which statecli does not read.
_UNREAD_FILE = compile_on_use(r"(?:layer|expp_rank)_.+_(?:model|optim)_states\.pt")
#: Character of a glob pattern, or a control character, in a tag.
_GLOB_CHARACTER = compile_on_use(r"[*?[\x00-\x1f\x7f]")
_VERSION = compile_on_use(r"(\d{1,6})\.(\d{1,6})")


class Files(NamedTuple):
    """Files of one model-parallel rank, by data-parallel rank. The key -1 is a model file that all ranks share."""

    model: dict[int, str]
    optimizer: dict[int, str]


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the folder or its subfolders have rank files. Subfolders next to a whole model do not count."""
    if not files.is_folder(path):
        return False
    if _has_ranks(path) or _find_misleading_tracker(path) is not None:
        return True
    names = checkpoint_folder.list_files(path)
    if any(name in names or f"{name}.index.json" in names for name in SINGLE):
        return False
    if "zero_to_fp32.py" in names:
        return True
    may_hold_steps = "latest" in names or not any(name.endswith(checkpoint_folder.WEIGHTS) for name in names)
    return may_hold_steps and bool(list_steps(path))


def list_steps(path: str) -> list[str]:
    """List the saved steps: the subfolders that have a rank's model file or a universal checkpoint (`zero/`)."""
    return [name for name in checkpoint_folder.list_inner_folders(path) if _is_step(files.join(path, name))]


def _is_step(path: str) -> bool:
    return any(map(_MODEL.fullmatch, checkpoint_folder.list_files(path))) or deepspeed_universal.is_universal(path)


def _resolve_step(path: str) -> str:
    """Return the subfolder with the rank files ("" for `path` itself). Raises UnreadableError if none can be chosen."""
    if (misled := _find_misleading_tracker(path)) is not None:
        raise MalformedError(
            f"{misled[0]} points to {misled[1]}, which is not a plain folder in the checkpoint folder; DeepSpeed "
            "would load files that statecli did not check"
        )
    if _has_ranks(path):
        return ""
    folders = list_steps(path)
    if (tracker := _find_tracker(path)) is not None:
        return _resolve_latest(path, folders, tracker)
    if len(folders) == 1:
        return folders[0]
    if not folders:
        raise MalformedError(
            "is a DeepSpeed checkpoint, but the folder with the files of its ranks is missing; "
            "copy the checkpoint again"
        )
    raise UnreadableError(
        f"contains {len(folders)} checkpoints, but no file `latest` that selects one of them; give one of these "
        f"folders: {quoting.names(folders)}"
    )


def _find_tracker(path: str) -> str | None:
    names = checkpoint_folder.list_files(path)
    return next((name for name in TRACKERS if name in names), None)


def _has_ranks(path: str) -> bool:
    return _is_step(path) or any(map(_OPTIMIZER.fullmatch, checkpoint_folder.list_files(path)))


def _find_misleading_tracker(path: str) -> tuple[str, str] | None:
    """Find a tracker file (`latest`) that makes DeepSpeed load files unknown to statecli. Return its name and text."""
    for name in TRACKERS:
        if name not in checkpoint_folder.list_files(path):
            continue
        try:
            tag = checkpoint_folder.decode_tracker(read_small(files.join(path, name), name, _MAX_PADDED_LATEST_BYTES))
        except UnreadableError:
            if _is_padded(files.join(path, name)):
                return name, f"a string of more than {_MAX_PADDED_LATEST_BYTES} bytes"
            continue
        is_subfolder = tag in checkpoint_folder.list_folders(path)
        is_walked = is_subfolder and checkpoint_folder.explain_skipped_folder(files.join(path, tag)) is None
        if not tag or "\0" in tag or (is_walked and not _GLOB_CHARACTER.search(tag)):
            continue
        # zero_to_fp32 uses the path as a glob pattern, so the files may be in another folder than the folder of that
        # name.
        is_pattern = _GLOB_CHARACTER.search(tag) is not None and files.is_folder(files.join(path, tag))
        if is_pattern or _may_hold_ranks(files.join(path, tag)):
            return name, quoting.quote(tag)
    return None


def _may_hold_ranks(path: str) -> bool:
    """Return whether DeepSpeed may take a file in the folder for a rank file, because of the end of its name."""
    return files.is_folder(path) and (
        any(name.endswith(_STATES) for name in checkpoint_folder.list_files(path))
        or deepspeed_universal.is_universal(path)
    )


def _is_padded(path: str) -> bool:
    """Return whether a large tracker file begins or ends with whitespace, which DeepSpeed removes (`str.strip`)."""
    try:
        with ByteSource(path) as source:
            ends = (
                source.read(0, MAX_LATEST_BYTES),
                source.read(max(0, source.size - MAX_LATEST_BYTES), MAX_LATEST_BYTES),
            )
            first, last = (text.decode("utf-8", "ignore") for text in ends)
            return first[:1].isspace() or last[-1:].isspace()
    except UnreadableError:
        return False


def _resolve_latest(path: str, folders: list[str], tracker: str) -> str:
    raw = read_small(files.join(path, tracker), tracker, MAX_LATEST_BYTES)
    tag = checkpoint_folder.decode_tracker(raw)
    if tag in ("", ".", "..") or any(char in "/\\:" or not char.isprintable() for char in tag):
        raise MalformedError(f"{tracker} contains {quoting.quote(tag)}, which is not a plain folder name")
    if tag not in folders:
        advice = f"; give one of these folders: {quoting.names(folders)}" if folders else "; copy the checkpoint again"
        raise MissingShard(
            f"{tracker} points to {quoting.quote(tag)}, but this folder is missing or has no rank files{advice}"
        )
    return tag


def _group_files(path: str, tag: str) -> tuple[dict[int, Files], list[str]]:
    """Group the files by model-parallel rank, and list other files of DeepSpeed. Paths are relative to `path`."""
    files_by_rank: dict[int, Files] = {}
    others = []
    for name in checkpoint_folder.list_files(files.join(path, tag)):
        optimizer, member = _OPTIMIZER.fullmatch(name), files.join(tag, name)
        match = optimizer or _MODEL.fullmatch(name)
        if match is None:
            others += [member] if _UNREAD_FILE.fullmatch(name) else []
            continue
        ranks = files_by_rank.setdefault(int(match["mp"]), Files({}, {}))
        (ranks.optimizer if match is optimizer else ranks.model)[int(match["rank"] or -1)] = member
    return dict(sorted(files_by_rank.items())), others


def members(path: str) -> tuple[str, ...]:
    """List the ranks' files, relative to the folder. Raises UnreadableError as `read` does.

    If a tracker file misleads DeepSpeed, list only this file: the folder is an unreadable checkpoint.
    """
    if (misled := _find_misleading_tracker(path)) is not None:
        return (misled[0],)
    tag = _resolve_step(path)
    files_by_rank, others = _group_files(path, tag)
    universal = (files.join(tag, member) for member in deepspeed_universal.members(files.join(path, tag)))
    ranks = (name for parts in files_by_rank.values() for part in parts for name in part.values())
    tracker = _find_tracker(path)
    return (*([tracker] if tracker else []), *ranks, *others, *universal)


class ModelFileFacts(msgspec.Struct, frozen=True):
    """DeepSpeed's records in a model file: shapes of trained and frozen parameters, buffer names, shared parameters.

    `trained` has a dict for each optimizer group. `buffers` is None if the file does not list the buffers.
    `shared` maps the name of a shared parameter to the name under which DeepSpeed records its shape.
    """

    trained: list[dict[str, Shape]]
    frozen: dict[str, Shape]
    buffers: frozenset[str] | None
    shared: dict[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each parameter by name. A shared parameter has the shape of the parameter that it shares."""
        own_shapes = {name: shape for shapes in (*self.trained, self.frozen) for name, shape in shapes.items()}
        return own_shapes | {
            name: own_shapes[partner] for name, partner in self.shared.items() if partner in own_shapes
        }


def _read_facts(rank: Rank) -> ModelFileFacts:
    groups = rank.items.get("param_shapes")
    trained = [read_shapes(child, f"{rank.name}: param_shapes") for child in as_sequence(groups) or ()]
    frozen = read_shapes(rank.items.get("frozen_param_shapes"), f"{rank.name}: frozen_param_shapes")
    names = as_sequence(rank.items.get("buffer_names"))
    buffers = None if names is None else frozenset(name for name in names if type(name) is str)
    shared = get_text_items(rank.items.get("shared_params"))
    return ModelFileFacts(trained, frozen, buffers, {alias: two for alias, two in shared.items() if type(two) is str})


class ModelSection:
    """Section `module` of a model file. It sets the kinds of tensors, and adds the values of tensors saved empty."""

    def __init__(self, rank: Rank, facts: ModelFileFacts, owner: Owner) -> None:
        self.rank, self.facts, self.owner = rank, facts, owner
        self.trained = frozenset(name for group in facts.trained for name in group)
        self.shapes = facts.shapes
        of_module = [
            tensor for tensor in rank.state.tensors if tensor.section == "module" and tensor.storage is not None
        ]
        #: Storages that hold a group's parameters, and the positions of trained parameters in them.
        self.flat_storages = {tensor.storage for tensor in of_module if tensor.fqn in self.trained}
        self.learning = {_locate(tensor) for tensor in of_module if tensor.fqn in self.trained}

    @property
    def copied_names(self) -> Iterator[str]:
        """Names of parameters with a float32 copy in the optimizer: the listed names, or else all possible names."""
        if self.facts.trained:
            yield from (name for group in self.facts.trained for name in group)
            return
        uncopied = {*(self.facts.buffers or ()), *self.facts.shared, *self.facts.frozen}
        for tensor in self.rank.state.tensors:
            is_number = tensor.dtype not in INTEGER_DTYPES and not tensor.fqn.endswith("_extra_state")
            if tensor.section == "module" and is_number and tensor.fqn not in uncopied:
                yield tensor.fqn

    def build_rows(self, masters: Mapping[str, TensorInfo], frozen: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
        """Yield all tensors of the file. An empty tensor gets the values of its float32 copy or frozen fragments."""
        for tensor in self.rank.state.tensors:
            if tensor.section == "module":
                tensor = self._classify(self._fill(tensor, masters, frozen))
            if tensor.section != "frozen_param_fragments":
                storage = None if tensor.storage is None else f"{self.rank.name}:{tensor.storage}"
                yield replace(tensor, section=f"{self.owner.prefix}{tensor.section}", storage=storage)

    def _fill(
        self, tensor: TensorInfo, masters: Mapping[str, TensorInfo], frozen: Mapping[str, TensorInfo]
    ) -> TensorInfo:
        """Return the tensor. If ZeRO-3 saved it empty, add its real shape and the values from another file."""
        stored_name = self.facts.shared.get(tensor.fqn, tensor.fqn)
        shape = self.shapes.get(stored_name)
        if tensor.shape != (0,) or shape in (None, (0,)):
            return tensor
        master = masters.get(stored_name)
        source = master or frozen.get(stored_name)
        if source is None:
            reason = "its values are in the missing files of other ranks; copy the missing files"
            damage = f"{self.owner.target}: {tensor.fqn}: {reason}"
            return replace(tensor, shape=shape, data=None, note=f"cannot be read: {reason}", damage=damage)
        copy = f"the optimizer's {source.dtype} copy" if master else None
        trains = f"{tensor.dtype} in training" if tensor.dtype != source.dtype else None
        note = "; ".join(filter(None, (copy, source.note, trains))) or None
        return replace(
            source,
            fqn=tensor.fqn,
            section=tensor.section,
            belongs_to=None,
            note=source.note if source.damage else note,
            storage=stored_name,
            damage=source.damage and source.damage.replace(f" {stored_name}: ", f" {tensor.fqn}: ", 1),
        )

    def _classify(self, tensor: TensorInfo) -> TensorInfo:
        """Set the tensor's kind. If DeepSpeed lists the buffers, other tensors except extra states are parameters."""
        facts, stored_name = self.facts, self.facts.shared.get(tensor.fqn, tensor.fqn)
        if facts.buffers is not None and tensor.fqn in facts.buffers:
            return replace(tensor, kind=Kind.BUFFER, evidence=Evidence.REGISTERED, persistent=True)
        is_trained = stored_name in self.trained or _locate(tensor) in self.learning
        tensor = self._keep_apart(tensor)
        if (
            not is_trained
            and stored_name not in facts.frozen
            and (facts.buffers is None or tensor.fqn.endswith("_extra_state"))
        ):
            return tensor
        grad = True if is_trained else False if stored_name in facts.frozen else None
        note = tensor.note if grad is not None or not self.trained else tensor.note or NOT_TRAINED_NOTE
        return replace(tensor, kind=Kind.PARAMETER, evidence=Evidence.REGISTERED, requires_grad=grad, note=note)

    def _keep_apart(self, tensor: TensorInfo) -> TensorInfo:
        """Give a tensor its own storage, because ZeRO packs tensors together. Tensors at the same place stay tied."""
        if tensor.storage not in self.flat_storages:
            return tensor
        note = None if tensor.nbytes < (tensor.storage_bytes or 0) else tensor.note  # drop the note on the view
        position = f"{tensor.storage}+{tensor.storage_offset}"
        return replace(tensor, storage=position, storage_bytes=tensor.nbytes, note=note)


def _locate(tensor: TensorInfo) -> tuple[object, int, Shape | None]:
    return tensor.storage, tensor.storage_offset, tensor.shape


def read(path: str, read_file: ReadFile) -> ModelState:  # noqa: ARG001
    """Read the module and the optimizer from the ranks' files.

    A tensor with missing parts has `damage`. Raises UnreadableError if no rank's model can be read.
    """
    tag = _resolve_step(path)
    files_by_rank, others = _group_files(path, tag)
    files.prefetch(
        files.join(path, member) for parts in files_by_rank.values() for part in parts for member in part.values()
    )
    states, rows = [], list(deepspeed_universal.read_states(path, files.join(path, tag)))
    masters = {row.fqn: row for row in rows if row.section == f"optimizer.{MASTER}"}
    copied_names: dict[str, None] = {}
    unreadable_count = 0
    for mp, parts in files_by_rank.items():
        prefix = f"mp_rank_{mp:02d}." if len(files_by_rank) > 1 else ""
        try:
            state, names = _read_rank(Owner(path, prefix), parts, masters)
            states.append(state)
            copied_names.update(dict.fromkeys(names))
        except UnreadableError as error:
            rows.append(build_missing_row("module", f"{prefix}module", f"{path}: {error}"))
            unreadable_count += 1
            if unreadable_count == len(files_by_rank):
                raise
    state = _merge_ranks(states, len(files_by_rank)) if states else ModelState(path, NAME, (), traits=TRAITS)
    if masters:
        state = replace(state, format=f"{NAME} universal", traits=TRAITS)
    rows += _list_missing_ranks(state, len(files_by_rank))
    oddities = list(state.oddities)
    if missing_rows := _list_missing_copies(path, tag, copied_names) if _is_universal(path, tag, files_by_rank) else []:
        rows += missing_rows
        parameters = quoting.names([row.fqn for row in missing_rows])
        text = f"zero/ lacks {len(missing_rows)} files of these parameters: {parameters}; copy the missing files"
        oddities.append(Oddity(OddityKind.MISSING_SHARD.value, text))
    if masters and not files_by_rank:
        text = (
            "the *_model_states.pt files are missing, so statecli cannot list the parameters outside zero/; copy the "
            "missing files"
        )
        oddities.append(Oddity(OddityKind.MISSING_RANK.value, text))
    if others:
        text = (
            "statecli does not merge files of experts and pipeline stages, so these files were not read; to read one "
            f"of these files, give its path: {quoting.names(others)}"
        )
        oddities.append(Oddity("not-read", text))
    if steps := [folder for folder in list_steps(path) if folder != tag] if tag else []:
        text = (
            f"statecli read only the checkpoint {quoting.name(tag)}; to read another checkpoint, give its folder: "
            f"{quoting.names(steps)}"
        )
        oddities.append(Oddity("other-checkpoints", text))
    sections = dict.fromkeys((*state.sections, *(row.section for row in rows)))
    return replace(state, tensors=(*state.tensors, *rows), sections=tuple(sections), oddities=tuple(oddities))


def _is_universal(path: str, tag: str, files_by_rank: Mapping[int, Files]) -> bool:
    """Return whether a checkpoint has a folder `zero/`, or a name ending in `_universal` and no optimizer files."""
    is_called = files.get_name(tag or files.make_absolute(path)).endswith(deepspeed_universal.NAME_END)
    is_parted = any(ranks.optimizer for ranks in files_by_rank.values())
    return deepspeed_universal.is_universal(files.join(path, tag)) or (is_called and not is_parted)


def _list_missing_copies(path: str, tag: str, copied_names: Iterable[str]) -> list[TensorInfo]:
    """Return an unreadable tensor row for each file that is missing below `zero/` of a universal checkpoint."""
    rows = []
    for name, member in deepspeed_universal.find_missing_files(files.join(path, tag), copied_names):
        section = f"optimizer.{files.get_name(member).removesuffix('.pt')}"
        why = (
            f"{path}: {member} of parameter {quoting.name(name)} is missing; copy the file, or run "
            "ds_to_universal.py again"
        )
        rows.append(replace(build_missing_row(name, section, why), kind=Kind.OPTIMIZER, belongs_to=name))
    return rows


def _read_rank(owner: Owner, files: Files, universal: Mapping[str, TensorInfo]) -> tuple[ModelState, list[str]]:
    """Return the state of one model-parallel rank and the names of parameters with float32 copies."""
    models, failures = _read_models(owner.target, files.model)
    optimizer = Optimizer(owner.target, files.optimizer)
    rank = next(iter(models.values()))
    facts = _read_facts(rank)
    model = ModelSection(rank, facts, owner)
    states = list(optimizer.build_rows(facts.trained, _find_clashes(models), owner))
    masters = {row.fqn: row for row in states if row.section == f"{owner.prefix}optimizer.{MASTER}"} or universal
    frozen = {row.fqn: row for row in _join_frozen(models, failures, facts, optimizer.count, owner)}
    tensors = (*model.build_rows(masters, frozen), *states)
    stage = next((shard.stage for shard in optimizer.shards.values()), None)
    parts = [*models.values(), *optimizer.ranks.values()]
    first_rank = next(iter(optimizer.ranks.values()), None)
    settings = join(
        (
            _select_model_settings(rank.state.metadata),
            _select_optimizer_settings(first_rank.state.metadata if first_rank else Settings(), stage),
        )
    )
    state = ModelState(
        owner.target,
        f"{NAME} zero-{stage}" if stage else NAME,
        tensors,
        tuple(dict.fromkeys(tensor.section for tensor in tensors)),
        put_below(settings, owner.prefix),
        (
            *merge_oddities({part.name: part.state.oddities for part in parts}),
            *(
                oddity
                for oddity in _report_missing_files(owner, optimizer, models, failures)
                if oddity.kind is not OddityKind.NO_OPTIMIZER or not universal
            ),
            *optimizer.oddities,
            *_check_version(rank),
        ),
        tuple(dict.fromkeys(mention for part in parts for mention in part.state.globals)),
        (),
        tuple(
            replace(state_dict, section=f"{owner.prefix}{state_dict.section}") for state_dict in rank.state.state_dicts
        ),
        replace(TRAITS, weights_are_optimizer_copies=stage == 3),
    )
    return state, list(model.copied_names)


#: Keys of a model file whose content is shown with each tensor, so they are not listed as settings.
_TENSOR_FACTS = frozenset(
    ["param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names", "shared_params"]
)
#: Prefix of the optimizer's settings in a ZeRO file, and settings that only describe the partitioning.
_OPTIMIZER_PREFIX = compile_on_use(r"optimizer_state_dict\.(?:(?:base_)?optimizer_state(?:_dict)?\.)?")
_PARTITION_SETTINGS = compile_on_use(
    r"optimizer\.(?:zero_stage|partition_count|group_paddings|param_slice_mappings|param_alignment_paddings|ds_version"
    r"|param_groups\.\d+\.params)(?:\.|\Z)"
)


def _select_model_settings(settings: Settings) -> Settings:
    """Return the settings of a model file, without records about tensors. Settings without a value come last."""
    selected = select(settings, lambda key: key.partition(".")[0] not in _TENSOR_FACTS)
    return replace(selected, values=dict(sorted(selected.values.items(), key=lambda item: item[1] is None)))


def _select_optimizer_settings(settings: Settings, stage: int | None) -> Settings:
    """Return the optimizer settings of one rank's file, renamed so that all ZeRO stages have the same names."""

    def map_prefix(key: str) -> tuple[str, str]:
        match = _OPTIMIZER_PREFIX.search(key)
        return (key[: match.end()], f"{key[: match.start()]}optimizer.") if match else ("", "")

    selected = select(rename(settings, map_prefix), lambda key: not _PARTITION_SETTINGS.match(key))
    return replace(selected, values={**selected.values, "optimizer.zero_stage": stage}) if stage else selected


def _read_models(folder: str, files: dict[int, str]) -> tuple[dict[int, Rank], dict[int, str]]:
    """Read every readable model file. Raises UnreadableError if there is none."""
    if not files:
        raise MissingShard(
            "the *_model_states.pt files are missing, so the tensors of the optimizer files have no names; copy the "
            "missing files"
        )
    ranks: dict[int, Rank] = {}
    failures: dict[int, str] = {}
    imported: set[str] = set()
    for rank, name in sorted(files.items()):
        try:
            ranks[rank] = read_rank(folder, name, imported)
        except UnreadableError as error:
            failures[rank] = f"rank {rank}: {error}"
            if len(failures) == len(files):
                raise
    return ranks, failures


def _find_clashes(models: dict[int, Rank]) -> dict[str, str]:
    """Map each parameter whose shape differs between ranks to an error message."""
    first, *others = models.items()
    first_shapes, problems = _read_facts(first[1]).shapes, {}
    for rank, model in others:
        facts = _read_facts(model)
        for name, shape in facts.shapes.items():
            if first_shapes.get(name, shape) != shape:
                shapes = (
                    f"{quoting.shape(first_shapes[name])} in rank {first[0]}, {quoting.shape(shape)} in rank {rank}"
                )
                problems[name] = f"its shape differs between ranks: {shapes}"
    return problems


def _join_frozen(
    models: dict[int, Rank], failures: dict[int, str], facts: ModelFileFacts, count: int, owner: Owner
) -> Iterator[TensorInfo]:
    """Join frozen parameters that ZeRO-3 split evenly across the ranks' model files (the last part is padded)."""
    count = count or max(models) + 1
    fragments = {rank: as_mapping(model.items.get("frozen_param_fragments")) or {} for rank, model in models.items()}
    clashes = _find_clashes(models)
    for name, shape in facts.frozen.items() if -1 not in models else ():
        part_elements = max(-(-prod(shape) // count), 1)
        pieces, views, fault = [], [], clashes.get(name)
        for rank, start in enumerate(range(0, prod(shape), part_elements)):
            tensor = models[rank].decoder.tensor(fragments[rank].get(name), name) if rank in models else None
            if tensor is None or tensor.data is None or tensor.data.strides or len(tensor.shape or ()) != 1:
                fault = fault or failures.get(rank) or f"rank {rank} has no part of this frozen parameter"
                break
            pieces.append(VectorPiece(rank, 0, 0, min(part_elements, prod(shape) - start)))
            views.append(VectorView(tensor, 0, pieces[-1].elements))
        yield build_row(ParameterPart(name, shape, tuple(pieces), fault), views, owner, "module")


def _report_missing_files(
    owner: Owner, optimizer: Optimizer, models: dict[int, Rank], failures: dict[int, str]
) -> Iterator[Oddity]:
    where = f" of {owner.prefix[:-1]}" if owner.prefix else ""
    is_trained = any(rank.items.get("param_shapes") for rank in models.values())
    if is_trained and not optimizer.shards and not optimizer.unreadable:
        why = "the folder has no *_optim_states.pt file"
        yield Oddity(OddityKind.NO_OPTIMIZER.value, f"the optimizer's states{where} are missing: {why}")
    if optimizer.missing_count:
        text = f"the optimizer states of {optimizer.missing_count} of {optimizer.count} ranks{where} are missing"
        yield Oddity(OddityKind.MISSING_RANK.value, f"{text}; copy their *_optim_states.pt files")
    expected_count = optimizer.count if -1 not in models else 1
    missing_count = expected_count - len(models) - len(failures)
    if missing_count > 0:
        text = f"the model files of {missing_count} of {expected_count} ranks{where} are missing"
        yield Oddity(OddityKind.MISSING_RANK.value, f"{text}; copy their *_model_states.pt files")
    for why in (*failures.values(), *optimizer.unreadable.values()):
        yield Oddity("unread-rank", why)
    if optimizer.stale_files:
        text = (
            f"this checkpoint has only {optimizer.count} ranks, so files of further ranks were not read; they may be "
            "from another save"
        )
        yield Oddity("stale-rank", f"{text}: {quoting.names(optimizer.stale_files)}")


def _check_version(rank: Rank) -> Iterator[Oddity]:
    version = rank.items.get("ds_version")
    match = _VERSION.match(version) if type(version) is str else None
    if version is not None and (match is None or (int(match[1]), int(match[2])) > NEWEST_VERSION):
        newest = ".".join(map(str, NEWEST_VERSION))
        text = f"ds_version is {quoting.value(version)}, but statecli knows only versions up to {newest}"
        yield Oddity("deepspeed-version", text)


def _merge_ranks(states: list[ModelState], ranks: int) -> ModelState:
    if ranks == 1:
        return states[0]
    return replace(
        states[0],
        tensors=tuple(tensor for state in states for tensor in state.tensors),
        sections=tuple(section for state in states for section in state.sections),
        metadata=join(state.metadata for state in states),
        oddities=(*(oddity for state in states for oddity in state.oddities), note_separate_ranks(ranks)),
        globals=tuple(dict.fromkeys(mention for state in states for mention in state.globals)),
        state_dicts=tuple(state_dict for state in states for state_dict in state.state_dicts),
    )


def _list_missing_ranks(state: ModelState, ranks: int) -> list[TensorInfo]:
    claimed = next((value for key, value in state.metadata.values.items() if key.endswith("mp_world_size")), None)
    if type(claimed) is not int or claimed <= ranks:
        return []
    why = (
        f"mp_world_size is {claimed}, but only {ranks} model-parallel ranks have files here; copy the files of "
        "the other ranks"
    )
    return [build_missing_row("module", "mp_rank", f"{state.target}: {why}")]
