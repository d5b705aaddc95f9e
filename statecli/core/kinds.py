"""Evidence -> kind, for checkpoints that do not say what is a parameter and what a buffer.

A bare state_dict is a flat list of names. What each entry was registered as is found out in the order of `Evidence`:
a class given with `--model`, the type it was pickled as, the optimizer in the same file, a convention, and where
nothing says anything, it is assumed to be a parameter and shown as assumed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from msgspec.structs import replace

from statecli.core import load_rules
from statecli.core.dtypes import INTEGER
from statecli.core.errors import NothingMatched
from statecli.core.finding import Finding, Severity
from statecli.core.rule import Rule
from statecli.core.state import Evidence, Kind, ModelState, Oddity, OptimizerFacts, OptimizerGroup, TensorInfo

#: Last components of names that are buffers wherever they were met: torch's norms and spectral_norm, and the buffers
#: that transformers, timm, diffusers and vector-quantize-pytorch register as persistent.
BUFFER_NAMES = re.compile(
    r"^(?:running_(?:mean|var|std)|num_batches_tracked|(?:\w+_)?position_ids|token_type_ids|(?:\w+_)?inv_freq"
    r"|relative_position_index|relative_coords_table|attn_mask|causal_mask|masked_bias|(?:cos|sin)_cached|freqs_cis|freqs_(?:cos|sin)"
    r"|alphas_cumprod(?:_prev)?|posterior_(?:variance|log_variance_clipped|mean_coef[12])"
    r"|(?:sqrt_(?:recip_|recipm1_|one_minus_)?|log_one_minus_)alphas_cumprod|betas|cluster_size|embed_avg|codebook_usage"
    r"|positional_encoding_gaussian_matrix|mel_filters|pe)$"
)

#: Names under which wrappers hold what they wrap, and which nobody else gives a module: torch.compile; FSDP; activation
#: checkpointing; Lightning around DeepSpeed and others; fairscale's and XLA's FSDP; torchrec's model parallelism.
INNER = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_fpw_module",
    "_dmp_wrapped_module",
)
#: Prefixes that wrappers put before every name; the last is also what half of all models call a part of their own.
WRAPPERS = ("module.", *(f"{name}." for name in INNER), "model.")

Shape = tuple[int, ...] | None


def classified(state: ModelState) -> ModelState:
    """The same state with the best evidence for each entry that is so far only assumed to be a parameter."""
    tensors = list(state.tensors)
    open_rows = [n for n, tensor in enumerate(tensors) if _is_open(tensor)]
    if not open_rows:
        return _owners(state, tensors)
    names = {(tensor.section, tensor.fqn) for tensor in tensors if tensor.fqn.endswith("weight_orig")}
    by_convention = {n for n in open_rows if is_buffer_by_convention(tensors[n]) or _is_spectral(tensors[n], names)}
    groups = sum(len(optimizer.groups) for optimizer in state.optimizers)
    if len(state.optimizers) * len(open_rows) > MAX_COMPARED or groups * len(open_rows) > MAX_COMPARED_GROUPS:
        of_groups = f" with {groups} groups" if groups > len(state.optimizers) else ""
        many = f"{len(state.optimizers)} optimizer(s){of_groups} are too many to find out what each of them trains"
        state = replace(state, oddities=(*state.oddities, Oddity("many-optimizers", many)), optimizers=())
    trained = _trained(state, open_rows, by_convention, tensors)
    for n in open_rows:
        if n in trained:
            tensors[n] = replace(tensors[n], kind=Kind.PARAMETER, evidence=Evidence.OPTIMIZER)
        elif n in by_convention:
            tensors[n] = replace(tensors[n], kind=Kind.BUFFER, evidence=Evidence.CONVENTION, persistent=True)
    return _owners(state, tensors)


def _is_open(tensor: TensorInfo) -> bool:
    return tensor.kind is Kind.PARAMETER and tensor.evidence is Evidence.ASSUMED


def is_buffer_by_convention(tensor: TensorInfo) -> bool:
    """Integers and bools are never trained; some names are buffers everywhere. A quantized weight is neither."""
    if tensor.dtype in INTEGER or _is_buffer_name(tensor.fqn.rpartition(".")[2]):
        return True
    return _SPECTRAL.search(tensor.fqn) is not None if tensor.fqn.endswith(("._u", "._v")) else False


def _is_spectral(tensor: TensorInfo, names: set[tuple[str, str]]) -> bool:
    """The vectors of the old spectral_norm, beside `weight_orig`; weight_norm's `weight_v` learns."""
    stem = tensor.fqn[:-2]
    return tensor.fqn.endswith(("weight_u", "weight_v")) and (tensor.section, f"{stem}_orig") in names


#: The power iteration's vectors of torch.nn.utils.parametrizations.spectral_norm.
_SPECTRAL = re.compile(r"(?:^|\.)parametrizations\.\w+\.\d+\._[uv]$")


@lru_cache(maxsize=1024)
def _is_buffer_name(last: str) -> bool:
    return BUFFER_NAMES.match(last) is not None


#: Optimizers times entries that are compared; beyond this nothing is said by shape.
MAX_COMPARED = 200_000
#: Groups of optimizers times entries that are compared, a second at most.
MAX_COMPARED_GROUPS = 20_000_000


def _trained(
    state: ModelState, candidates: list[int], by_convention: set[int], tensors: Sequence[TensorInfo]
) -> set[int]:
    """An optimizer trains one model, and its copies (EMA, AveragedModel's `module.`) with the same names and shapes.

    Where it fits two models, which of them it trains cannot be told, and nothing is said. Conventions are weaker
    evidence than the optimizer: where it does not fit without what only looks like a buffer, it is tried with that.
    """
    sections: dict[str, list[int]] = defaultdict(list)
    for n in candidates:
        if tensors[n].dtype not in INTEGER:
            sections[tensors[n].section].append(n)
    copies = [rows for section, rows in sections.items() if is_copy(section)]
    originals = [rows for section, rows in sections.items() if not is_copy(section)]
    whole = [set(rows) - by_convention for rows in sections.values()]
    found: set[int] = set()
    together = _all_together(state.optimizers)
    for optimizer in (*state.optimizers, *together):
        fits = [fit for rows in originals if (fit := _fit(optimizer, rows, by_convention, tensors))]
        fits = fits or [fit for rows in copies if (fit := _fit(optimizer, rows, by_convention, tensors))][:1]
        if len(fits) == 1 and (optimizer not in together or fits[0] in whole):
            trained = {_entry(tensors[n]) for n in fits[0]}
            twins = [n for rows in copies if trained <= {_entry(tensors[n]) for n in rows} for n in rows]
            found |= fits[0] | {n for n in twins if _entry(tensors[n]) in trained}
    return found


def _all_together(optimizers: tuple[OptimizerFacts, ...]) -> list[OptimizerFacts]:
    """Several optimizers as one, which counts where it trains all of a model: each by itself may train too little."""
    if not 1 < len(optimizers) <= MAX_TOGETHER:
        return []
    return [OptimizerFacts(optimizers[0].section, tuple(group for one in optimizers for group in one.groups))]


#: Optimizers that may share one model: a generator's, a discriminator's, a few heads'.
MAX_TOGETHER = 8


def _fit(
    optimizer: OptimizerFacts, rows: list[int], by_convention: set[int], tensors: Sequence[TensorInfo]
) -> set[int]:
    without = [n for n in rows if n not in by_convention]
    learnable = [n for n in rows if not _STATISTICS.search(tensors[n].fqn)]
    return trained_by(optimizer, without, tensors) or trained_by(optimizer, learnable, tensors)


#: What a norm collects. Other names of buffers may well be a parameter's in somebody's class.
_STATISTICS = re.compile(r"(?:^|\.)running_(?:mean|var|std)$")


def _entry(tensor: TensorInfo) -> tuple[str, Shape]:
    return _unwrapped(tensor.fqn), tensor.shape


#: Sections that are named as a copy of the model beside them. Two networks may well have the same names and shapes.
#: `current_model_state` is Lightning's of the weights before averaging, beside a `state_dict` of the averages.
_COPY = re.compile(
    r"(?:^|[_.])(?:ema|swa|averaged?|avg|shadow|polyak)(?:$|[_.\d])|^current_model_state$", re.IGNORECASE
)


def is_copy(section: str) -> bool:
    """Whether a section is called a copy of the model beside it: an average of its weights, or what was averaged."""
    return _COPY.search(section) is not None


def meant(sections: Sequence[str]) -> list[str]:
    """Of the sections that hold models those that a load would take: one where their names tell which.

    `model`, or else `state_dict`: so training loops call what they load, whatever lies beside it (Lightning has the
    weights before averaging in `current_model_state`). Else all that are no average of another.
    """
    for name in ("model", "state_dict"):
        if name in sections:
            return [name]
    return [one for one in sections if not is_copy(one)] or list(sections)


def trained_by(optimizer: OptimizerFacts, rows: list[int], tensors: Sequence[TensorInfo]) -> set[int]:
    """Those of `rows` that the optimizer must be training; empty where that cannot be told.

    By name, if it saved names, and all of them are there. Else by shape: its ids stand in the order of
    `parameters()`, so a group is a subsequence of the entries. Where the leftmost and the rightmost way to lay it
    agree, there is no other way. safetensors sorts its entries: there the number of each shape must tell. Half of the
    entries at least must be accounted for, and half of the ids must have a shape, more than one of them: an optimizer
    of something else that is not in the file would fit a few entries of any model. A group that comes after another
    and fits only before it is no evidence: it may be of a loss that learns.
    """
    names = {name for group in optimizer.groups for name in group.names or _texts(group.params)}
    if names:
        by_name = {n for n in rows if tensors[n].fqn in names or _unwrapped(tensors[n].fqn) in names}
        held = {tensors[n].fqn for n in by_name} | {_unwrapped(tensors[n].fqn) for n in by_name}
        return by_name if names <= held else set()
    rows, ties = _first_names(rows, tensors)
    shapes = [shape for group in optimizer.groups for shape in group.shapes]
    known = [shape for shape in shapes if shape is not None]
    few = len(shapes) < len(rows) and (2 * len(shapes) < len(rows) or len(known) < 2)
    if not shapes or 2 * len(known) < len(shapes) or few:
        return set()
    if not any(tensors[n].device for n in rows):
        found = _by_count(optimizer, rows, tensors)
        return found | {second for first in found for second in ties.get(first, ())}
    row_shapes = [tensors[n].shape for n in rows]
    laid = [_laid(group, row_shapes) for group in optimizer.groups if group.shapes]
    fits = [ways for ways in laid if ways is not None]
    if len(fits) < len(laid):
        return set()
    furthest = accumulate((leftmost[0] for leftmost, _ in fits), max, initial=0)
    in_order = [ways for ways, first in zip(fits, furthest, strict=False) if ways[1][-1] >= first]
    if len(shapes) == len(rows) and in_order == fits and _same_shapes(known, row_shapes):
        found = set(rows)
    else:
        pairs = (pair for left, right in in_order for pair in zip(left, right, strict=True))
        found = {rows[left] for left, right in pairs if left == right}
    return found | {second for first in found for second in ties.get(first, ())}


def _by_count(optimizer: OptimizerFacts, rows: list[int], tensors: Sequence[TensorInfo]) -> set[int]:
    """Those that it trains of entries whose order says nothing, as in safetensors, which sorts them.

    Of each shape of which it trains as many tensors as there are, all; and all there are, where it trains so many and
    has no shape of some, having met no gradient of theirs.
    """
    claimed = [shape for group in optimizer.groups for shape in group.shapes]
    trained, held = Counter(claimed), Counter(tensors[n].shape for n in rows)
    unknown = trained.pop(None, 0)
    if trained - held:
        return set()
    if len(claimed) == len(rows):
        return set(rows)
    return set() if unknown else {n for n in rows if trained[tensors[n].shape] == held[tensors[n].shape]}


def _texts(params: Iterable[int | str]) -> list[str]:
    return [one for one in params if isinstance(one, str)]


def _unwrapped(fqn: str) -> str:
    changed = True
    while changed:
        changed = False
        for prefix in WRAPPERS[:-1]:
            if fqn.startswith(prefix):
                fqn, changed = fqn[len(prefix) :], True
    return fqn


def _first_names(rows: list[int], tensors: Sequence[TensorInfo]) -> tuple[list[int], dict[int, list[int]]]:
    """`parameters()` gives a tied tensor once, under its first name."""
    first: dict[object, int] = {}
    kept: list[int] = []
    ties: dict[int, list[int]] = defaultdict(list)
    for n in rows:
        tensor = tensors[n]
        key = (tensor.storage, tensor.shape, tensor.data.offset if tensor.data else 0)
        if tensor.storage is not None and tensor.tied_to and key in first:
            ties[first[key]].append(n)
            continue
        first[key] = n
        kept.append(n)
    return kept, ties


def _same_shapes(claimed: Sequence[Shape], held: Sequence[Shape]) -> bool:
    return not Counter(claimed) - Counter(held)


def _laid(group: OptimizerGroup, shapes: list[Shape]) -> tuple[list[int], list[int]] | None:
    """The leftmost and the rightmost places that the group's ids can take; None where they do not fit at all."""
    leftmost = _embed(group.shapes, shapes)
    rightmost = _embed(group.shapes[::-1], shapes[::-1])
    if leftmost is None or rightmost is None:
        return None
    return leftmost, [len(shapes) - 1 - at for at in reversed(rightmost)]


def _embed(wanted: Sequence[Shape], held: Sequence[Shape]) -> list[int] | None:
    """The leftmost positions in `held` at which `wanted` is a subsequence; None if it is none."""
    found, at = [], 0
    for shape in wanted:
        while at < len(held) and shape is not None and held[at] != shape:
            at += 1
        if at == len(held):
            return None
        found.append(at)
        at += 1
    return found


_OPTIMIZER_ENTRY = re.compile(r"^state\[(?:(?P<id>\d+)|'(?P<name>[^']*)')\]")


def _owners(state: ModelState, tensors: list[TensorInfo]) -> ModelState:
    """`belongs_to` of the optimizer's tensors, where the optimizer names its parameters."""
    owners: dict[str, dict[str, str]] = {}
    for optimizer in state.optimizers:
        for group in optimizer.groups:
            if group.names:
                named = zip(map(str, group.params), group.names, strict=True)
                owners.setdefault(optimizer.section, {}).update(named)
    for n, tensor in enumerate(tensors):
        if tensor.kind is Kind.OPTIMIZER and (match := _OPTIMIZER_ENTRY.match(tensor.fqn)):
            owner = match["name"] or owners.get(tensor.section, {}).get(match["id"] or "")
            if owner:
                tensors[n] = replace(tensor, belongs_to=owner)
    return replace(state, tensors=tuple(tensors))


def by_model(
    state: ModelState, model: ModelState, renamed: Mapping[str, tuple[str, ...]] = {}
) -> tuple[ModelState, list[Finding]]:
    """A checkpoint grouped by what a class registers, and what `load_state_dict` would object to.

    `model` is the class's own state. Entries of optimizer and other sections are left as they are. A wrapper's prefix
    before every name is looked through, and is a finding, since loading would fail on it. `renamed` are entries that
    the class itself loads under other names, by their own.
    """
    registered = {t.fqn: t for t in model.tensors if t.kind in (Kind.PARAMETER, Kind.BUFFER)}
    findings: list[Finding] = []
    left_out: list[Oddity] = _renamed_note(renamed, model)
    tensors: list[TensorInfo] = list(state.tensors)
    entries = [n for n, t in enumerate(tensors) if t.kind in MODEL_KINDS and not _is_beside(t, state)]
    if not entries:
        raise NothingMatched(f"{state.target}: holds no model's tensors that {model.target} could group")
    for section in dict.fromkeys(tensors[n].section for n in entries):
        rows = [n for n in entries if tensors[n].section == section]
        own = [tensors[n].fqn for n in rows if tensors[n].fqn not in renamed]
        prefix = common_prefix(own, registered)
        if prefix:
            findings.append(_wrapped(state, section, prefix, model.target))
        names = {n: renamed.get(tensors[n].fqn) or (tensors[n].fqn[len(prefix) :],) for n in rows}
        held = {name for several in names.values() for name in several}
        count = Counter(name for several in names.values() for name in several)
        for n in rows:
            known = registered.get(names[n][0])
            if known is not None and (len(names[n]) > 1 or count[names[n][0]] > 1):
                known = replace(known, shape=None)
            tensors[n], problems = _against(tensors[n], known, state, model)
            findings.extend(problems)
        left_out += _left_out(held, registered, section) if not _keeps_ties(tensors) else ()
        dropped = {odd.fqn for odd in left_out}
        missing = {fqn: t for fqn, t in registered.items() if fqn not in held and fqn not in dropped}
        findings.extend(_missing(missing, held, state, model, section))
    return replace(state, tensors=tuple(tensors), oddities=(*state.oddities, *left_out)), findings


def _is_beside(tensor: TensorInfo, state: ModelState) -> bool:
    """Whether a module that is saved whole holds it, and its state_dict does not: no load will ever see it."""
    return tensor.saved is False or (tensor.kind is Kind.UNREGISTERED and tensor.section in state.whole_modules)


def _renamed_note(renamed: Mapping[str, tuple[str, ...]], model: ModelState) -> list[Oddity]:
    for name, targets in renamed.items():
        shown = f"{name} as {' and '.join(targets[:3])}"
        message = f"{model.target} loads {len(renamed)} entries under other names, {shown}"
        return [Oddity("renamed-on-loading", message)]
    return []


#: What belongs to a model.
MODEL_KINDS = (Kind.PARAMETER, Kind.BUFFER, Kind.UNREGISTERED)


def common_prefix(names: Sequence[str], registered: Container[str]) -> str:
    """What stands before every name and makes none of them the class's: `module.`, or the attribute of a Trainer."""
    prefix = ""
    while names and not any(name[len(prefix) :] in registered for name in names):
        first, dot, _ = names[0][len(prefix) :].partition(".")
        if not dot or not all(name.startswith(prefix + first + dot) for name in names):
            return ""
        prefix += first + dot
    return prefix


def _wrapped(state: ModelState, section: str, prefix: str, spec: str) -> Finding:
    return load_rules.WRAPPER_PREFIX.finding(
        f"every name in {section} starts with {prefix!r}, those of {spec} do not",
        target=state.target,
        help=f"strip it before load_state_dict: {{k.removeprefix({prefix!r}): v for k, v in state.items()}}",
        severity=Severity.ERROR,
    )


def _against(
    tensor: TensorInfo, known: TensorInfo | None, state: ModelState, model: ModelState
) -> tuple[TensorInfo, list[Finding]]:
    if known is None:
        found = replace(tensor, kind=Kind.UNREGISTERED, evidence=Evidence.REGISTERED, persistent=None)
        message = f"{tensor.fqn}: unexpected: {model.target} registers no such tensor"
        return found, [_finding(load_rules.UNEXPECTED_ENTRY, message, state, tensor.section, tensor.fqn)]
    found = replace(
        tensor,
        kind=known.kind,
        evidence=Evidence.REGISTERED,
        persistent=known.persistent,
        requires_grad=known.requires_grad if tensor.requires_grad is None else tensor.requires_grad,
        origin=known.origin,
    )
    findings = []
    if known.persistent is False:
        message = f"{tensor.fqn}: unexpected: to {model.target} it is non-persistent, and a strict load refuses it"
        findings.append(_finding(load_rules.UNEXPECTED_ENTRY, message, state, tensor.section, tensor.fqn))
    # torch < 0.4 had no scalars, and load_state_dict still takes one element for one.
    if tensor.shape != known.shape and known.shape is not None and (tensor.shape, known.shape) != ((1,), ()):
        message = f"{tensor.fqn}: {state.target} holds {_shown(tensor)}, {model.target} registers {_shown(known)}"
        findings.append(_finding(load_rules.SHAPE_MISMATCH, message, state, tensor.section, tensor.fqn))
    return found, findings


def _finding(rule: Rule, message: str, state: ModelState, section: str, fqn: str) -> Finding:
    where = f"{section}: " if len(state.sections) > 1 else ""
    return rule.finding(where + message, target=state.target, fqn=fqn, section=section)


def _shown(tensor: TensorInfo) -> str:
    return str(list(tensor.shape)) if tensor.shape is not None else "no shape"


def _keeps_ties(tensors: list[TensorInfo]) -> bool:
    """A pickle records which tensors share memory, and their devices; safetensors neither."""
    return any(tensor.device is not None for tensor in tensors)


def _is_expected(tensor: TensorInfo) -> bool:
    return tensor.persistent is not False and tensor.saved is not False


def _left_out(held: set[str], registered: dict[str, TensorInfo], section: str) -> list[Oddity]:
    """Further names of tied tensors: safetensors' save_model and save_pretrained drop them on purpose."""
    found = []
    for fqn, tensor in registered.items():
        tied = next((other for other in tensor.tied_to if other in held), None)
        if fqn not in held and _is_expected(tensor) and tied:
            message = f"{section} leaves {fqn} out, which is tied to {tied}: a strict load_state_dict calls it missing"
            found.append(Oddity("tied-entry-left-out", message, fqn))
    return found


def _holder(state: ModelState, section: str) -> str:
    """What to call a section of a file, which often has but one."""
    return f"{state.target}#{section}" if section and len(state.sections) > 1 else state.target


def _missing(
    missing: dict[str, TensorInfo], held: set[str], state: ModelState, model: ModelState, section: str
) -> list[Finding]:
    found = []
    for fqn, tensor in missing.items():
        if not _is_expected(tensor):
            continue
        tied = next((f", tied to {other}, which is there" for other in tensor.tied_to if other in held), "")
        what = f"{model.target} registers it ({tensor.kind.value} {_shown(tensor)}{tied})"
        message = f"{fqn}: missing: {what}, {_holder(state, section)} lacks it"
        found.append(_finding(load_rules.MISSING_ENTRY, message, state, section, fqn))
    return found
