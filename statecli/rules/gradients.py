"""What is trained and what is not: the policy, the optimizer's own state, the parameters that it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecli.core.finding import Severity
from statecli.core.kinds import MODEL_KINDS
from statecli.core.selection import glob_names, matches_any
from statecli.core.state import Evidence, Kind, OptimizerFacts, TensorInfo
from statecli.rules.rule import Found, rule
from statecli.rules.subject import Subject


def a_policy(subject: Subject) -> str | None:
    """Needs `policy.frozen` or `policy.trainable`, and tensors that they could be of."""
    if not (subject.policy.frozen or subject.policy.trainable):
        return "no policy.frozen and no policy.trainable is configured"
    return None if _of_model(subject) else "no tensor of a model is in it"


def an_optimizer_with_names(subject: Subject) -> str | None:
    """Needs an optimizer's section that says which parameters it trains."""
    if not any(row.kind is Kind.OPTIMIZER for row in subject.everything.tensors) and not subject.everything.optimizers:
        return "there is no optimizer's state in it"
    known = any(_names(one) for one in subject.everything.optimizers)
    known = known or any(row.evidence is Evidence.OPTIMIZER for row in _of_model(subject))
    return None if known else "which parameters the optimizer trains cannot be told: it saved no names"


def _of_model(subject: Subject) -> list[TensorInfo]:
    return [row for row in subject.state.tensors if row.kind in MODEL_KINDS]


def _names(optimizer: OptimizerFacts) -> set[str]:
    return {
        name
        for group in optimizer.groups
        for name in group.names or [one for one in group.params if isinstance(one, str)]
    }


def _matching(subject: Subject, globs: Sequence[str]) -> list[TensorInfo]:
    several = len(subject.state.sections) > 1
    rows = _of_model(subject)
    return [row for row in rows if matches_any(glob_names(row.fqn, row.section, by_section=several), globs)]


@rule(Severity.ERROR, a_policy)
def trainable_mismatch(subject: Subject) -> Iterator[Found]:
    """A tensor that the policy says is frozen requires grad, or one that it says is trained does not.

    Why: a backbone that should be frozen drifts, or an adapter that should learn does not, and the loss shows neither.

    Example: `policy.frozen = ["encoder.*"]`, and one layer of the encoder was unfrozen by a later line.

    Fix: `requires_grad_(False)` on what is frozen, after everything that builds or replaces modules. A state_dict
    does not say, which is a warning: audit the class. With `--lock` the values of what is frozen are held instead.
    """
    untold = _untold(subject)
    if untold is not None:
        yield untold
    for key, globs, wanted in (("frozen", subject.policy.frozen, False), ("trainable", subject.policy.trainable, True)):
        for glob in globs:
            rows = _matching(subject, (glob,))
            if not rows:
                yield Found(f"policy.{key} {glob!r} matches none of the {len(_of_model(subject))} tensors of the model")
            for row in rows:
                if row.requires_grad is (not wanted) and row.kind is not Kind.BUFFER:
                    what = "requires grad" if row.requires_grad else "does not require grad"
                    message = f"{subject.called(row)}: {what}, and policy.{key} {glob!r} says otherwise"
                    yield Found(message, row.fqn, row.section, f"requires_grad_({wanted})", origin=row.origin)


def _untold(subject: Subject) -> Found | None:
    """That it cannot be judged, once; a lock that is given judges what is frozen by its values."""
    globs = {"frozen": () if subject.lock is not None else subject.policy.frozen, "trainable": subject.policy.trainable}
    rows = {key: [row for row in _matching(subject, some) if _says_nothing(row)] for key, some in globs.items()}
    keys = [f"policy.{key}" for key, unknown in rows.items() if unknown]
    if not keys:
        return None
    return Found(
        f"{' and '.join(keys)}: cannot tell: a state_dict records no requires_grad",
        help="audit the class, or a module saved whole",
        severity=Severity.WARNING,
        about="requires_grad",
    )


def _says_nothing(row: TensorInfo) -> bool:
    return row.requires_grad is None and row.kind is not Kind.BUFFER


@rule(Severity.WARNING, an_optimizer_with_names)
def optimizer_orphan(subject: Subject) -> Iterator[Found]:
    """The optimizer has state for a parameter that the model in the same checkpoint does not have.

    Why: resuming from it fails, or gives the momentum of one parameter to another: `load_state_dict` of an optimizer
    matches parameters by their order.

    Example: a head was replaced and the optimizer's old state kept.

    Fix: build the optimizer anew after the model changed, and save both together.
    """
    held = {row.fqn for row in subject.everything.tensors if row.kind in MODEL_KINDS}
    if not held:
        return
    for optimizer in subject.everything.optimizers:
        for name in sorted(_names(optimizer)):
            if not any(
                fqn == name or fqn.endswith(f".{name}") or name.endswith(f".{fqn}") for fqn in _near(name, held)
            ):
                message = f"{optimizer.section}: trains {name}, which the model in this checkpoint does not have"
                yield Found(message, name, optimizer.section, "save the optimizer that was built from this model")


def _is_same(one: str, other: str) -> bool:
    """Whether they are one name, a wrapper's prefix before either left aside."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _near(name: str, held: set[str]) -> Iterator[str]:
    """The names that could be `name` behind a wrapper's prefix, on either side."""
    last = name.rpartition(".")[2]
    return (fqn for fqn in held if fqn.rpartition(".")[2] == last)


@rule(Severity.WARNING, an_optimizer_with_names)
def untracked_parameter(subject: Subject) -> Iterator[Found]:
    """A parameter requires grad, and no optimizer in the same checkpoint trains it.

    Why: it gets gradients and never changes: it was registered after the optimizer was built, or replaced.

    Example: `model.head = nn.Linear(768, 10)` after `torch.optim.AdamW(model.parameters())`.

    Fix: `optimizer.add_param_group({"params": model.head.parameters()})`, or build the optimizer last.
    """
    trained = set().union(*map(_names, subject.everything.optimizers))
    for row in _of_model(subject):
        if row.kind is not Kind.PARAMETER or not row.requires_grad or row.evidence is Evidence.OPTIMIZER:
            continue
        if trained and not any(_is_same(row.fqn, name) for name in _near(row.fqn, trained)):
            message = f"{subject.called(row)}: requires grad, and no optimizer in this checkpoint trains it"
            yield Found(message, row.fqn, row.section, "give it to the optimizer, or freeze it")


RULES = (trainable_mismatch, optimizer_orphan, untracked_parameter)
