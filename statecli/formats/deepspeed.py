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

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MissingShard, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, Oddity, ReadFile, Settings, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.setting_paths import join, put_below, rename, select
from statecli.formats.shared import deepspeed_universal
from statecli.formats.shared.deepspeed_model_file import ModelFileFacts, ModelSection, read_facts
from statecli.formats.shared.deepspeed_steps import (
    RankFiles,
    find_misleading_tracker,
    find_tracker,
    group_files,
    has_ranks,
    list_steps,
    resolve_step,
)
from statecli.formats.shared.deepspeed_zero import (
    MASTER,
    Optimizer,
    Owner,
    ParameterPart,
    Rank,
    VectorPiece,
    VectorView,
    build_row,
    read_rank,
)
from statecli.formats.shared.joined_states import add_rows, join_states
from statecli.formats.shared.rank_folders import build_missing_row, merge_oddities, note_separate_ranks
from statecli.pickles.graph import as_mapping
from statecli.storage import checkpoint_folder, files
from statecli.storage.checkpoint_names import SINGLE

NAME = "deepspeed"
TRAITS = FormatTraits(is_partitioned=True, is_in_pieces=True, has_own_loader=True)


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the folder or its subfolders have rank files. Subfolders next to a whole model do not count."""
    if not files.is_folder(path):
        return False
    if has_ranks(path) or find_misleading_tracker(path) is not None:
        return True
    names = checkpoint_folder.list_files(path)
    if any(name in names or f"{name}.index.json" in names for name in SINGLE):
        return False
    if "zero_to_fp32.py" in names:
        return True
    may_hold_steps = "latest" in names or not any(name.endswith(checkpoint_folder.WEIGHTS) for name in names)
    return may_hold_steps and bool(list_steps(path))


def members(path: str) -> tuple[str, ...]:
    """List the ranks' files, relative to the folder. Raises UnreadableError as `read` does.

    If a tracker file misleads DeepSpeed, list only this file: the folder is an unreadable checkpoint.
    """
    if (misled := find_misleading_tracker(path)) is not None:
        return (misled[0],)
    tag = resolve_step(path)
    files_by_rank, others = group_files(path, tag)
    universal = (files.join(tag, member) for member in deepspeed_universal.members(files.join(path, tag)))
    ranks = (name for parts in files_by_rank.values() for part in parts for name in part.values())
    tracker = find_tracker(path)
    return (*([tracker] if tracker else []), *ranks, *others, *universal)


def read(path: str, read_file: ReadFile) -> ModelState:  # noqa: ARG001
    """Read the module and the optimizer from the ranks' files.

    A tensor with missing parts has `damage`. Raises UnreadableError if no rank's model can be read.
    """
    tag = resolve_step(path)
    files_by_rank, others = group_files(path, tag)
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
    oddities: list[Oddity] = []
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
    return add_rows(state, rows, *oddities)


def _is_universal(path: str, tag: str, files_by_rank: Mapping[int, RankFiles]) -> bool:
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


def _read_rank(owner: Owner, files: RankFiles, universal: Mapping[str, TensorInfo]) -> tuple[ModelState, list[str]]:
    """Return the state of one model-parallel rank and the names of parameters with float32 copies."""
    models, failures = _read_models(owner.target, files.model)
    optimizer = Optimizer(owner.target, files.optimizer)
    rank = next(iter(models.values()))
    facts = read_facts(rank)
    model = ModelSection(rank, facts, owner)
    states = list(optimizer.build_rows(facts.trained, _find_clashes(models), owner))
    masters = {row.fqn: row for row in states if row.section == f"{owner.prefix}optimizer.{MASTER}"} or universal
    frozen = {row.fqn: row for row in _join_frozen(models, failures, facts, optimizer.count, owner)}
    tensors = (*model.build_rows(masters, frozen), *states)
    stage = optimizer.stage
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
    first_shapes, problems = read_facts(first[1]).shapes, {}
    for rank, model in others:
        facts = read_facts(model)
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


def _merge_ranks(states: list[ModelState], ranks: int) -> ModelState:
    if ranks == 1:
        return states[0]
    oddities = (*(oddity for state in states for oddity in state.oddities), note_separate_ranks(ranks))
    return join_states(states, metadata=join(state.metadata for state in states), oddities=oddities)


def _list_missing_ranks(state: ModelState, ranks: int) -> list[TensorInfo]:
    claimed = next((value for key, value in state.metadata.values.items() if key.endswith("mp_world_size")), None)
    if type(claimed) is not int or claimed <= ranks:
        return []
    why = (
        f"mp_world_size is {claimed}, but only {ranks} model-parallel ranks have files here; copy the files of "
        "the other ranks"
    )
    return [build_missing_row("module", "mp_rank", f"{state.target}: {why}")]
