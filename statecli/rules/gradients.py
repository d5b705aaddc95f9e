"""Rules about training: the policy, the optimizer's state, and parameters missing in the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Evidence, Kind, OptimizerFacts, TensorInfo
from statecli.core.parameter_or_buffer import MODEL_KINDS, can_train
from statecli.core.selection import glob_names, matches_any, suggest_glob
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject


def needs_policy(subject: Subject) -> str | None:
    """Return why neither `policy.frozen` nor `policy.trainable` applies; None if a policy applies."""
    if not (subject.policy.frozen or subject.policy.trainable):
        return "policy.frozen and policy.trainable are not configured"
    return None if _select_model_tensors(subject) else "the target has no model tensors"


def needs_optimizer_with_names(subject: Subject) -> str | None:
    """Return why the parameters that the optimizer trains are unknown; None if their names are known."""
    if not any(row.kind is Kind.OPTIMIZER for row in subject.full_state.tensors) and not subject.full_state.optimizers:
        return "the target has no optimizer state"
    is_named = any(_list_parameter_names(optimizer) for optimizer in subject.full_state.optimizers)
    is_named = is_named or any(row.evidence is Evidence.OPTIMIZER for row in _select_model_tensors(subject))
    reason = "the optimizer state does not contain the names of the parameters that the optimizer trains"
    return None if is_named else reason


def _select_model_tensors(subject: Subject) -> list[TensorInfo]:
    return [row for row in subject.state.tensors if row.kind in MODEL_KINDS]


def _list_parameter_names(optimizer: OptimizerFacts) -> set[str]:
    return {
        name
        for group in optimizer.groups
        for name in group.names or [param for param in group.params if isinstance(param, str)]
    }


def _match_tensors(subject: Subject, globs: Sequence[str]) -> list[TensorInfo]:
    by_section = len(subject.state.sections) > 1
    rows = _select_model_tensors(subject)
    return [row for row in rows if matches_any(glob_names(row.fqn, row.section, by_section=by_section), globs)]


@rule(Severity.ERROR, needs_policy, cases={"inconclusive": Severity.WARNING})
def trainable_mismatch(subject: Subject) -> Iterator[Issue]:
    """A tensor's `requires_grad` contradicts `policy.frozen` or `policy.trainable`.

    Why: a backbone that should be frozen drifts, or an adapter that should learn does not. The loss does not reveal the
    mistake.

    Example: `policy.frozen = ["encoder.*"]`, and a later line made a layer of the encoder trainable again.

    Fix: call `requires_grad_(False)` on the frozen part, after the last code that builds or replaces modules. If the
    rule is inconclusive because a state_dict does not record requires_grad, audit the model class. With `--lock`, the
    rule `lock-mismatch` compares the values of frozen tensors.
    """
    inconclusive = _report_inconclusive(subject)
    if inconclusive is not None:
        yield inconclusive
    for key, globs, expected in (
        ("frozen", subject.policy.frozen, False),
        ("trainable", subject.policy.trainable, True),
    ):
        for glob in globs:
            rows = _match_tensors(subject, (glob,))
            if not rows:
                names = [row.fqn for row in _select_model_tensors(subject)]
                suggestion = suggest_glob(glob, names)
                yield Issue(f"policy.{key} {glob!r} matches none of the {len(names)} model tensors{suggestion}")
            for row in rows:
                if row.requires_grad is (not expected) and row.kind is not Kind.BUFFER:
                    text = f"requires_grad is {row.requires_grad}, but policy.{key} {glob!r} requires {expected}"
                    help = f"call requires_grad_({expected})"
                    yield report_tensor(subject, row, text, help, origin=row.origin)


def _report_inconclusive(subject: Subject) -> Issue | None:
    """Return an issue if requires_grad is not recorded. With a lock, frozen tensors are checked by their values."""
    globs = {"frozen": () if subject.lock is not None else subject.policy.frozen, "trainable": subject.policy.trainable}
    keys = [
        f"policy.{key}"
        for key, some in globs.items()
        if any(row.requires_grad is None and row.kind is not Kind.BUFFER for row in _match_tensors(subject, some))
    ]
    if not keys:
        return None
    return Issue(
        f"{' and '.join(keys)}: inconclusive, because a state_dict does not record requires_grad",
        help="audit the model class, or a module that was saved whole",
        severity=trainable_mismatch.cases["inconclusive"],
        about="requires_grad",
    )


@rule(Severity.WARNING, needs_optimizer_with_names)
def optimizer_orphan(subject: Subject) -> Iterator[Issue]:
    """The optimizer has state for a parameter that is missing in the model of the same checkpoint.

    Why: `load_state_dict` of an optimizer matches parameters by their order. So a resumed training fails, or gives the
    momentum of one parameter to another.

    Example: a head was replaced, but the optimizer kept the state of the old head.

    Fix: build the optimizer again after the model changes, and save both together.
    """
    model_names = {row.fqn for row in subject.full_state.tensors if row.kind in MODEL_KINDS}
    if not model_names:
        return
    for optimizer in subject.full_state.optimizers:
        for name in _find_unmatched(sorted(_list_parameter_names(optimizer)), model_names):
            message = f"{optimizer.section}: has state for {name}, which the model in this checkpoint does not have"
            yield Issue(message, name, optimizer.section, "save the optimizer that was built from this model")


def _find_unmatched(names: Iterable[str], others: set[str]) -> Iterator[str]:
    """Yield the names that do not occur in `others`, not even without the prefixes of wrappers."""
    tails = {tail for other in others for tail in _list_tails(other)}
    return (name for name in names if name not in tails and others.isdisjoint(_list_tails(name)))


def _list_tails(name: str) -> list[str]:
    """Return the name without its first 0, 1, 2 … components, because wrappers add components in front."""
    parts = name.split(".")
    return [".".join(parts[n:]) for n in range(len(parts))]


@rule(Severity.WARNING, needs_optimizer_with_names)
def untracked_parameter(subject: Subject) -> Iterator[Issue]:
    """A parameter requires grad, but no optimizer in the same checkpoint trains the parameter.

    Why: the parameter gets gradients but never changes. Usually the parameter was registered or replaced after the
    optimizer was built.

    Example: `model.head = nn.Linear(768, 10)` after `torch.optim.AdamW(model.parameters())`.

    Fix: `optimizer.add_param_group({"params": model.head.parameters()})`, or build the optimizer last.
    """
    trained = set().union(*map(_list_parameter_names, subject.full_state.optimizers))
    rows = _select_model_tensors(subject) if trained else []
    untrained = set(_find_unmatched((row.fqn for row in rows), trained))
    for row in rows:
        is_trainable = row.kind is Kind.PARAMETER and row.requires_grad and row.evidence is not Evidence.OPTIMIZER
        if is_trainable and row.fqn in untrained:
            text = "requires grad, but no optimizer in this checkpoint trains it"
            yield report_tensor(subject, row, text, "add the parameter to the optimizer, or freeze it")


#: States of which torch's fused kernels read and write an element for each element of the parameter.
_FUSED_STATES = frozenset(["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"])
_STATE_KINDS = (Kind.OPTIMIZER, Kind.OTHER)
_STATE = compile_on_use(r"(?P<owner>.+)(?:\['(?P<key>\w+)'\]|\.(?P<word>\w+))", re.DOTALL)


#: Setting `fused` of an optimizer, at any place in the checkpoint.
_FUSED_SETTING = compile_on_use(r"(?P<optimizer>.+)\.param_groups\.\d+\.fused", re.DOTALL)


def _list_nested_optimizers(subject: Subject) -> list[str]:
    """Return the paths of optimizers with fused=True that are nested too deeply to be matched to a model."""
    sections = {optimizer.section for optimizer in subject.full_state.optimizers}
    settings = subject.full_state.metadata.values.items()
    paths = (match["optimizer"] for path, value in settings if value and (match := _FUSED_SETTING.fullmatch(path)))
    return [path for path in dict.fromkeys(paths) if path not in sections]


def needs_fused_optimizer(subject: Subject) -> str | None:
    """Return a reason if no optimizer of the target has fused=True; else None."""
    fused = any(group.fused for optimizer in subject.full_state.optimizers for group in optimizer.groups)
    return None if fused or _list_nested_optimizers(subject) else "the target has no optimizer with fused=True"


@rule(
    Severity.ERROR,
    needs_fused_optimizer,
    cases={"larger model": Severity.WARNING, "without the model": Severity.NOTE},
)
def fused_state_mismatch(subject: Subject) -> Iterator[Issue]:
    """With `fused=True`, an optimizer state has another size than its parameter, or its elements overlap.

    Why: `load_state_dict` takes the states and `fused=True` from the checkpoint and does not check the shapes. The
    fused kernel of `step()` then reads and writes as many elements as the parameter has. If the state is smaller, the
    kernel overwrites other memory of the process.
    The finding is a warning if the optimizer trains fewer parameters than the model has, because the optimizer may
    belong to another model. The finding is a note if the checkpoint does not contain the model, because nothing can be
    compared.

    Example: `exp_avg` of shape [1] for a weight of shape [4096, 4096], with `fused=True` in the parameter group.

    Fix: do not resume from the checkpoint. If the checkpoint is yours, save the optimizer again, together with its
    model.
    """
    for optimizer in subject.full_state.optimizers:
        if any(group.fused for group in optimizer.groups):
            yield from _check_states(subject, optimizer.section)
            yield from _check_model(subject, optimizer)
    for path in _list_nested_optimizers(subject):
        yield from _check_states(subject, path.partition(".")[0])
        yield _build_unchecked_issue(path)


def _build_unchecked_issue(optimizer: str) -> Issue:
    message = (
        f"{optimizer}: the sizes of its states were not checked, because the checkpoint does not contain its model"
    )
    help = "save the optimizer and its model in one dict, or audit their folder"
    severity = fused_state_mismatch.cases["without the model"]
    return Issue(message, help=help, severity=severity, about=optimizer)


def _check_states(subject: Subject, section: str) -> Iterator[Issue]:
    """Check that all states of a parameter have the same shape, and that their elements fill their bytes."""
    first: dict[str, TensorInfo] = {}
    for row in subject.full_state.tensors:
        match = _STATE.fullmatch(row.fqn) if row.kind in _STATE_KINDS and row.section == section else None
        if match is None or (match["key"] or match["word"]) not in _FUSED_STATES or row.shape is None:
            continue
        first_row = first.setdefault(match["owner"], row)
        if first_row.shape != row.shape:
            reason = f"has shape {list(row.shape)}, but {subject.name_of(first_row)} has {list(first_row.shape or ())}"
        elif not _fills_its_bytes(row):
            reason = f"has strides {list(row.data.strides or ()) if row.data else []} for shape {list(row.shape)}"
        else:
            continue
        text = f"{reason}; with fused=True, step() writes outside the memory of the state"
        yield report_tensor(subject, row, text, "do not resume from the checkpoint")


def _fills_its_bytes(row: TensorInfo) -> bool:
    """Return whether the elements fill one range of bytes without gaps, as fused kernels assume."""
    if row.data is None or row.data.strides is None or row.shape is None or 0 in row.shape:
        return True
    span = 1 + sum((size - 1) * stride for size, stride in zip(row.shape, row.data.strides, strict=True))
    return span == prod(row.shape) and all(
        stride for size, stride in zip(row.shape, row.data.strides, strict=True) if size > 1
    )


def _check_model(subject: Subject, optimizer: OptimizerFacts) -> Iterator[Issue]:
    """Check that the shapes of the optimizer's states fit the parameters of a model in the same checkpoint."""
    tensors = subject.full_state.tensors
    sections: dict[str, list[int]] = {}
    for number, row in enumerate(tensors):
        if row.kind is Kind.PARAMETER:
            sections.setdefault(row.section, []).append(number)
    models = [*sections.values()]
    if len(models) > 1:
        models.append([number for rows in models for number in rows])
    count = sum(len(group.params) for group in optimizer.groups)
    models = [rows for rows in models if len(rows) >= count]
    if not models:
        yield _build_unchecked_issue(optimizer.section)
    if not models or any(can_train(optimizer, rows, tensors) for rows in models):
        return
    is_larger = all(len(rows) != count for rows in models)
    severity = fused_state_mismatch.cases["larger model"] if is_larger else None
    shapes = [shape for group in optimizer.groups for shape in group.shapes if shape is not None]
    present = {tensors[number].shape for rows in models for number in rows}
    example = next((f", such as {list(shape)}" for shape in shapes if shape not in present), "")
    message = (
        f"{optimizer.section}: the shapes of its states do not match the shapes of the model parameters in the same "
        f"order{example}; with fused=True, step() writes outside the memory of the states"
    )
    yield Issue(message, section=optimizer.section, help="do not resume from the checkpoint", severity=severity)


RULES = (fused_state_mismatch, trainable_mismatch, optimizer_orphan, untracked_parameter)
