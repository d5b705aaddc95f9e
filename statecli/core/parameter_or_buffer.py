"""Decide whether each entry of a checkpoint is a parameter or a buffer, for formats without a record of kinds.

A bare state_dict is a flat list of names. The order of the evidence is that of `Evidence`: the class given with
`--model`, the pickled type, the optimizer in the same file, naming conventions. Without evidence, an entry is assumed
to be a parameter and shown as assumed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from msgspec.structs import replace

from statecli import core
from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import (
    Evidence,
    Kind,
    ModelState,
    Oddity,
    OptimizerFacts,
    OptimizerGroup,
    TensorInfo,
    TensorKey,
)
from statecli.core.quantized_codes import may_be_quantized

#: Last components of names that are buffers in every model seen: of torch's norms and spectral_norm, and of persistent
#: buffers in transformers, timm, diffusers and vector-quantize-pytorch.
BUFFER_NAMES = frozenset(
    [
        "running_mean",
        "running_var",
        "running_std",
        "num_batches_tracked",
        "position_ids",
        "token_type_ids",
        "inv_freq",
        "relative_position_index",
        "relative_coords_table",
        "attn_mask",
        "causal_mask",
        "masked_bias",
        "cos_cached",
        "sin_cached",
        "freqs_cis",
        "freqs_cos",
        "freqs_sin",
        "alphas_cumprod",
        "alphas_cumprod_prev",
        "sqrt_alphas_cumprod",
        "sqrt_recip_alphas_cumprod",
        "sqrt_recipm1_alphas_cumprod",
        "sqrt_one_minus_alphas_cumprod",
        "log_one_minus_alphas_cumprod",
        "betas",
        "posterior_variance",
        "posterior_log_variance_clipped",
        "posterior_mean_coef1",
        "posterior_mean_coef2",
        "cluster_size",
        "embed_avg",
        "codebook_usage",
        "positional_encoding_gaussian_matrix",
        "mel_filters",
        "pe",
    ]
)
#: Ends of names of buffers that may follow any prefix.
_BUFFER_SUFFIXES = ("_position_ids", "_inv_freq")

#: Attributes in which only wrappers store the wrapped module: torch.compile; FSDP; activation checkpointing; Lightning
#: around DeepSpeed and others; fairscale's and XLA's FSDP; torchrec's model parallelism.
WRAPPER_ATTRIBUTES = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_fpw_module",
    "_dmp_wrapped_module",
)
#: Prefixes that wrappers put before every name. The last prefix is also the name of a submodule in half of all models.
WRAPPER_PREFIXES = ("module.", *(f"{name}." for name in WRAPPER_ATTRIBUTES), "model.")
_UNAMBIGUOUS_PREFIXES = WRAPPER_PREFIXES[:-1]

#: Kinds of tensors that belong to a model.
MODEL_KINDS = (Kind.PARAMETER, Kind.BUFFER, Kind.UNREGISTERED)

Shape = tuple[int, ...] | None


def list_model_sections(state: ModelState) -> list[str]:
    """Return the sections with tensors of a model."""
    return list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in MODEL_KINDS))


def classify_tensors(state: ModelState) -> ModelState:
    """Decide the kind of each tensor whose kind was only assumed, by the best evidence. Return the new state."""
    tensors = list(state.tensors)
    parameter, assumed = Kind.PARAMETER, Evidence.ASSUMED
    unclassified = [
        row for row, tensor in enumerate(tensors) if tensor.kind is parameter and tensor.evidence is assumed
    ]
    if not unclassified:
        return _fill_belongs_to(state, tensors)
    by_convention = _find_buffers_by_convention(unclassified, tensors)
    group_count = sum(len(optimizer.groups) for optimizer in state.optimizers)
    if (
        len(state.optimizers) * len(unclassified) > MAX_OPTIMIZER_ENTRY_PAIRS
        or group_count * len(unclassified) > MAX_GROUP_ENTRY_PAIRS
    ):
        of_groups = f" with {group_count} groups" if group_count > len(state.optimizers) else ""
        message = (
            f"too many optimizers ({len(state.optimizers)}{of_groups}), so statecli does not determine which tensors "
            "each optimizer trains"
        )
        state = replace(state, oddities=(*state.oddities, Oddity("many-optimizers", message)), optimizers=())
    trained_rows = _find_all_trained(state, unclassified, by_convention, tensors)
    quantized = _find_registered_parts(tensors)
    for row in unclassified if trained_rows or quantized else sorted(by_convention):
        if row in trained_rows:
            tensors[row] = replace(tensors[row], kind=Kind.PARAMETER, evidence=Evidence.OPTIMIZER)
        elif quantized.get(tensors[row].key) is Kind.PARAMETER:
            tensors[row] = replace(tensors[row], evidence=Evidence.CONVENTION)
        elif row in by_convention or (tensors[row].section, tensors[row].fqn) in quantized:
            tensors[row] = replace(tensors[row], kind=Kind.BUFFER, evidence=Evidence.CONVENTION, persistent=True)
    return _fill_belongs_to(state, tensors)


def _find_registered_parts(tensors: Sequence[TensorInfo]) -> dict[TensorKey, Kind]:
    """Map each tensor of a quantized weight to the kind that libraries register: parameter or buffer.

    bitsandbytes registers the codes as a parameter and saves the rest with the state_dict; gptqmodel and autoawq
    register buffers; compressed-tensors, transformers and torchao register parameters.
    """
    if not may_be_quantized(tensors):
        return {}
    layouts = core.quantized_layouts
    kinds = {}
    for weight in core.quantized_weights.find_quantized_by_section(tensors):
        for part, row in weight.parts.items():
            is_buffer = weight.layout in (layouts.QuantizedLayout.GPTQ, layouts.QuantizedLayout.AWQ) or (
                part is not layouts.QuantizedPart.CODES
                and (weight.layout is layouts.QuantizedLayout.BITSANDBYTES or weight.divisor != 1)
            )
            kinds[row.key] = Kind.BUFFER if is_buffer else Kind.PARAMETER
    return kinds


def _find_buffers_by_convention(rows: list[int], tensors: Sequence[TensorInfo]) -> set[int]:
    """Return the positions of tensors that are buffers by dtype, by name, or as vectors of spectral_norm.

    The vectors of spectral_norm stand next to `weight_orig`; the `weight_v` of weight_norm is trained.
    """
    names = [tensors[row].fqn for row in rows]
    last_names = {name[name.rfind(".") + 1 :] for name in names}
    is_named = any(last.endswith(("_u", "_v")) or _is_buffer_name(last) for last in last_names)
    if not is_named and INTEGER_DTYPES.isdisjoint({tensors[row].dtype for row in rows}):
        return set()
    buffers: set[int] = set()
    vectors: list[int] = []
    for row in rows:
        tensor = tensors[row]
        fqn = tensor.fqn
        last = fqn[fqn.rfind(".") + 1 :]
        if last.endswith(("_u", "_v")):
            vectors.append(row)
        elif tensor.dtype in INTEGER_DTYPES or _is_buffer_name(last):
            buffers.add(row)
    if vectors:
        weight_orig_names = {tensor.key for tensor in tensors if tensor.fqn.endswith("weight_orig")}
        for row in vectors:
            section, fqn = tensors[row].section, tensors[row].fqn
            is_vector = fqn.endswith(("weight_u", "weight_v")) and (section, f"{fqn[:-2]}_orig") in weight_orig_names
            if is_vector or tensors[row].dtype in INTEGER_DTYPES or _SPECTRAL_NORM_VECTOR.search(fqn):
                buffers.add(row)
    return buffers


#: Names of the vectors of power iteration in torch.nn.utils.parametrizations.spectral_norm.
_SPECTRAL_NORM_VECTOR = compile_on_use(r"(?:^|\.)parametrizations\.\w+\.\d+\._[uv]$")


@lru_cache(maxsize=1024)
def _is_buffer_name(last: str) -> bool:
    prefix = next((last.removesuffix(suffix) for suffix in _BUFFER_SUFFIXES if last.endswith(suffix)), "")
    return last in BUFFER_NAMES or prefix.replace("_", "a").isalnum()


#: Largest number of optimizers times entries to compare. With more, the optimizers are ignored.
MAX_OPTIMIZER_ENTRY_PAIRS = 200_000
#: Largest number of groups of optimizers times entries to compare: at most a second of work.
MAX_GROUP_ENTRY_PAIRS = 20_000_000


def _find_all_trained(
    state: ModelState, candidates: list[int], by_convention: set[int], tensors: Sequence[TensorInfo]
) -> set[int]:
    """Return the positions of the tensors that are trained by an optimizer saved in the same checkpoint.

    An optimizer is matched to a single model, and to the model's copies (EMA, AveragedModel's `module.`), by name and
    shape. No row is returned for an optimizer that fits two models. Conventions are weaker evidence than an optimizer:
    if the optimizer does not fit without the buffers by convention, these buffers are included.
    """
    if not state.optimizers:
        return set()
    sections: dict[str, list[int]] = defaultdict(list)
    for row in candidates:
        if tensors[row].dtype not in INTEGER_DTYPES:
            sections[tensors[row].section].append(row)
    copies = [rows for section, rows in sections.items() if is_copy(section)]
    originals = [rows for section, rows in sections.items() if not is_copy(section)]
    rows_without_buffers = [set(rows) - by_convention for rows in sections.values()]
    trained_rows: set[int] = set()
    merged_optimizers = _merge_optimizers(state.optimizers)
    for optimizer in (*state.optimizers, *merged_optimizers):
        matches = [match for rows in originals if (match := _match_section(optimizer, rows, by_convention, tensors))]
        matches = (
            matches
            or [match for rows in copies if (match := _match_section(optimizer, rows, by_convention, tensors))][:1]
        )
        if len(matches) == 1 and (optimizer not in merged_optimizers or matches[0] in rows_without_buffers):
            trained_entries = {_name_and_shape(tensors[row]) for row in matches[0]}
            copied_rows = [
                row
                for rows in copies
                if trained_entries <= {_name_and_shape(tensors[row]) for row in rows}
                for row in rows
            ]
            trained_rows |= matches[0] | {
                row for row in copied_rows if _name_and_shape(tensors[row]) in trained_entries
            }
    return trained_rows


def _merge_optimizers(optimizers: tuple[OptimizerFacts, ...]) -> list[OptimizerFacts]:
    """Return a list with all optimizers merged into one. Return [] if there is only one optimizer or too many.

    The merged optimizer counts only if it trains a whole model: a single optimizer may train too few to match.
    """
    if not 1 < len(optimizers) <= MAX_MERGED_OPTIMIZERS:
        return []
    return [
        OptimizerFacts(optimizers[0].section, tuple(group for optimizer in optimizers for group in optimizer.groups))
    ]


#: Largest number of optimizers of a model: for a generator, a discriminator, a few heads.
MAX_MERGED_OPTIMIZERS = 8


def _match_section(
    optimizer: OptimizerFacts, rows: list[int], by_convention: set[int], tensors: Sequence[TensorInfo]
) -> set[int]:
    unconventional = [row for row in rows if row not in by_convention]
    without_statistics = [row for row in rows if not _RUNNING_STATISTICS.search(tensors[row].fqn)]
    return find_trained(optimizer, unconventional, tensors) or find_trained(optimizer, without_statistics, tensors)


#: Names of the statistics that norm layers collect. Other names of buffers may be names of parameters in a user's
#: class.
_RUNNING_STATISTICS = compile_on_use(r"(?:^|\.)running_(?:mean|var|std)$")


def _name_and_shape(tensor: TensorInfo) -> tuple[str, Shape]:
    return _strip_wrappers(tensor.fqn), tensor.shape


#: Words in the names of sections with a copy of the model. Equal names and shapes are not enough, because two networks
#: can share them. Lightning stores the weights before averaging in `current_model_state` and the averages in
#: `state_dict`.
_COPY_WORDS = ("ema", "swa", "averag", "avg", "shadow", "polyak", "current_model_state")
_COPY_NAME = compile_on_use(
    r"(?:^|[_.])(?:ema|swa|averaged?|avg|shadow|polyak)(?:$|[_.\d])|^current_model_state$", re.IGNORECASE
)


def is_copy(section: str) -> bool:
    """Return True if the section's name stands for averaged weights, or for the weights before averaging."""
    lowercase_section = section.casefold()
    may_match = any(word in lowercase_section for word in _COPY_WORDS)
    return may_match and _COPY_NAME.search(section) is not None


def select_loaded_sections(sections: Sequence[str]) -> list[str]:
    """Return the model sections that a training loop would load: a single section if one has a known name.

    Training loops load `model`, or else `state_dict` (Lightning stores the weights before averaging in
    `current_model_state`). Otherwise, return all sections that are not an average of another section.
    """
    for name in ("model", "state_dict"):
        if name in sections:
            return [name]
    return [section for section in sections if not is_copy(section)] or list(sections)


def find_trained(optimizer: OptimizerFacts, rows: list[int], tensors: Sequence[TensorInfo]) -> set[int]:
    """Return the positions of the tensors that the optimizer certainly trains, or an empty set if this is unclear.

    If the optimizer saved names, all names must be in the file. Otherwise shapes decide. The optimizer's ids follow the
    order of `parameters()`, so each group is a subsequence of the entries. The assignment is unique if the leftmost and
    the rightmost placement agree. Safetensors sorts entries; for its files the number of tensors of each shape decides.

    To avoid chance matches, the ids must cover at least half of the entries. At least half of the ids, and two or more,
    must have a shape. A group that follows another group but fits only before that group is not evidence. A loss with
    parameters may own the group, whose ids would turn buffers of the model into parameters. Shapes cannot reveal ids
    that fit the entries in order and belong partly to another model.
    """
    names = {name for group in optimizer.groups for name in group.names or group.params if isinstance(name, str)}
    if names:
        by_name = {row for row in rows if tensors[row].fqn in names or _strip_wrappers(tensors[row].fqn) in names}
        present_names = {tensors[row].fqn for row in by_name} | {_strip_wrappers(tensors[row].fqn) for row in by_name}
        return by_name if names <= present_names else set()
    rows, ties = _split_tied_rows(rows, tensors)
    shapes = [shape for group in optimizer.groups for shape in group.shapes]
    known_shapes = [shape for shape in shapes if shape is not None]
    is_too_small = len(shapes) < len(rows) and (2 * len(shapes) < len(rows) or len(known_shapes) < 2)
    if not shapes or 2 * len(known_shapes) < len(shapes) or is_too_small:
        return set()
    if not any(tensors[row].device for row in rows):
        trained_rows = _match_shape_counts(optimizer, rows, tensors)
        return trained_rows | {second for first in trained_rows for second in ties.get(first, ())}
    row_shapes = [tensors[row].shape for row in rows]
    placements = [_find_placements(group, row_shapes) for group in optimizer.groups if group.shapes]
    found_placements = [placement for placement in placements if placement is not None]
    if len(found_placements) < len(placements):
        return set()
    furthest_before = accumulate((leftmost[0] for leftmost, _ in found_placements), max, initial=0)
    in_order = [
        placement
        for placement, first in zip(found_placements, furthest_before, strict=False)
        if placement[1][-1] >= first
    ]
    if len(shapes) == len(rows) and in_order == found_placements and _has_shapes(known_shapes, row_shapes):
        trained_rows = set(rows)
    else:
        pairs = (pair for left, right in in_order for pair in zip(left, right, strict=True))
        trained_rows = {rows[left] for left, right in pairs if left == right}
    return trained_rows | {second for first in trained_rows for second in ties.get(first, ())}


def can_train(optimizer: OptimizerFacts, rows: list[int], tensors: Sequence[TensorInfo]) -> bool:
    """Return True if the shapes of the optimizer's moments occur in the same order among the tensors in `rows`.

    If the optimizer saved names, shapes must also fit by name, although its `load_state_dict` matches by order alone.
    """
    claimed_entries = [
        (name, shape) for group in optimizer.groups for name, shape in zip(group.params, group.shapes, strict=True)
    ]
    by_name = {_strip_wrappers(tensors[row].fqn): tensors[row].shape for row in rows}
    shape_pairs = (
        (shape, by_name.get(_strip_wrappers(name))) for name, shape in claimed_entries if isinstance(name, str)
    )
    if any(shape not in (None, row_shape) for shape, row_shape in shape_pairs):
        return False
    rows, _ = _split_tied_rows(rows, tensors)
    row_shapes = [tensors[row].shape for row in rows]
    if not _has_shapes([shape for _, shape in claimed_entries if shape is not None], row_shapes):
        return False
    if not any(tensors[row].device for row in rows):  # safetensors sorts entries, so their order says nothing
        return True
    return all(_find_subsequence(group.shapes, row_shapes) is not None for group in optimizer.groups)


def _match_shape_counts(optimizer: OptimizerFacts, rows: list[int], tensors: Sequence[TensorInfo]) -> set[int]:
    """Return the positions of trained tensors by counting shapes, because safetensors does not keep the order.

    All rows of a shape are returned if the optimizer trains as many tensors of that shape as there are. All rows are
    returned if the optimizer has as many ids as there are rows, some without a shape because they received no gradient.
    """
    claimed_shapes = [shape for group in optimizer.groups for shape in group.shapes]
    trained_counts, row_counts = Counter(claimed_shapes), Counter(tensors[row].shape for row in rows)
    unknown = trained_counts.pop(None, 0)
    if trained_counts - row_counts:
        return set()
    if len(claimed_shapes) == len(rows):
        return set(rows)
    return (
        set()
        if unknown
        else {row for row in rows if trained_counts[tensors[row].shape] == row_counts[tensors[row].shape]}
    )


def _strip_wrappers(fqn: str) -> str:
    while fqn.startswith(_UNAMBIGUOUS_PREFIXES):
        fqn = fqn.partition(".")[2]
    return fqn


def _split_tied_rows(rows: list[int], tensors: Sequence[TensorInfo]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the positions that `parameters()` yields, and map each position to the positions of its tied tensors.

    `parameters()` yields a tied tensor once, under its first name.
    """
    first: dict[object, int] = {}
    first_rows: list[int] = []
    ties: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        tensor = tensors[row]
        key = (tensor.storage, tensor.shape, tensor.data.offset if tensor.data else 0)
        if tensor.storage is not None and tensor.tied_to and key in first:
            ties[first[key]].append(row)
            continue
        first[key] = row
        first_rows.append(row)
    return first_rows, ties


def _has_shapes(claimed_shapes: Sequence[Shape], row_shapes: Sequence[Shape]) -> bool:
    return not Counter(claimed_shapes) - Counter(row_shapes)


def _find_placements(group: OptimizerGroup, shapes: list[Shape]) -> tuple[list[int], list[int]] | None:
    """Return the leftmost and the rightmost positions at which the group's shapes occur in order, or None."""
    leftmost = _find_subsequence(group.shapes, shapes)
    rightmost = _find_subsequence(group.shapes[::-1], shapes[::-1])
    if leftmost is None or rightmost is None:
        return None
    return leftmost, [len(shapes) - 1 - at for at in reversed(rightmost)]


def _find_subsequence(shapes: Sequence[Shape], candidates: Sequence[Shape]) -> list[int] | None:
    """Return the leftmost positions in `candidates` at which the shapes occur in order, or None."""
    positions, position = [], 0
    for shape in shapes:
        while position < len(candidates) and shape is not None and candidates[position] != shape:
            position += 1
        if position == len(candidates):
            return None
        positions.append(position)
        position += 1
    return positions


_OPTIMIZER_ENTRY = compile_on_use(r"^state\[(?:(?P<id>\d+)|'(?P<name>[^']*)')\]")


def _fill_belongs_to(state: ModelState, tensors: list[TensorInfo]) -> ModelState:
    """Return the state with `belongs_to` set on optimizer tensors, if the optimizer names its parameters."""
    owners: dict[str, dict[str, str]] = {}
    for optimizer in state.optimizers:
        for group in optimizer.groups:
            if group.names:
                names_by_id = zip(map(str, group.params), group.names, strict=True)
                owners.setdefault(optimizer.section, {}).update(names_by_id)
    kind = Kind.OPTIMIZER
    entries = [row for row, tensor in enumerate(tensors) if tensor.kind is kind]
    for row in entries:
        tensor = tensors[row]
        if match := _OPTIMIZER_ENTRY.match(tensor.fqn):
            owner = match["name"] or owners.get(tensor.section, {}).get(match["id"] or "")
            if owner:
                tensors[row] = replace(tensor, belongs_to=owner)
    return replace(state, tensors=tuple(tensors))


def match_optimizer_entries(state: ModelState) -> dict[TensorKey, str]:
    """Map each unnamed optimizer tensor to the name of its parameter, if order and shapes decide this.

    An optimizer's ids follow the order of `parameters()`, as torch itself assumes when it loads them. The result is
    empty for formats that sort their tensors, and for several models or optimizers.
    """
    rows = [row for row, tensor in enumerate(state.tensors) if tensor.kind is Kind.PARAMETER]
    sections = select_loaded_sections(list(dict.fromkeys(state.tensors[row].section for row in rows)))
    if len(sections) != 1 or len(state.optimizers) != 1 or any(state.tensors[row].device is None for row in rows):
        return {}
    (optimizer,) = state.optimizers
    rows, _ = _split_tied_rows([row for row in rows if state.tensors[row].section == sections[0]], state.tensors)
    shapes = [state.tensors[row].shape for row in rows]
    owners: dict[str, str] = {}
    for group in optimizer.groups:
        placement = _find_placements(group, shapes)
        if placement is None:
            return {}
        for param, left, right in zip(group.params, *placement, strict=True):
            if left == right:
                owners[str(param)] = state.tensors[rows[left]].fqn
    if len(set(owners.values())) < len(owners):
        return {}
    entries = (
        (tensor, match["id"])
        for tensor in state.tensors
        if tensor.section == optimizer.section and not tensor.belongs_to
        if (match := _OPTIMIZER_ENTRY.match(tensor.fqn))
    )
    return {tensor.key: owners[number] for tensor, number in entries if number in owners}
