"""Decide the severity of a finding from the damage that the problem causes, in the same way in all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from statecli.core.finding import Severity
from statecli.core.model_state import Kind, TensorInfo


def decide_severity(default: Severity, case: Severity | None, configured: Severity | None) -> Severity:
    """Return the configured severity, else the severity of this case, else the default of the rule."""
    return configured or case or default


def find_worst_severity(severities: Iterable[Severity]) -> Severity:
    """Return the highest of the severities. There must be at least one severity."""
    return max(severities, key=lambda severity: severity.rank)


class Effect(Enum):
    """Effect of a tensor that is unregistered or does not move with its model, as measured by a check of `verify`."""

    LOSS = "loss"
    HARMLESS = "harmless"


def is_trainable(tensor: TensorInfo) -> bool:
    """Return True if the tensor requires grad by itself, not as the result of an operation."""
    return bool(tensor.requires_grad) and tensor.derived is None


def measure_effect(
    tensor: TensorInfo,
    *,
    is_lost: Callable[[], bool] = lambda: False,
    is_harmless: Callable[[], bool] = lambda: False,
) -> Effect | None:
    """Return the measured effect of an unregistered or unmoved tensor if it changes the severity, else None.

    Both functions measure, so they are called only if the severity depends on them: `is_lost` unless the tensor is an
    error without a measurement, `is_harmless` for a warning.
    """
    severity = decide_tensor_severity(tensor)
    if severity is not Severity.ERROR and is_lost():
        return Effect.LOSS
    return Effect.HARMLESS if severity is Severity.WARNING and is_harmless() else None


def decide_tensor_severity(tensor: TensorInfo, effect: Effect | None = None) -> Severity:
    """Return the severity of an unregistered tensor, or of a tensor that does not move with the model.

    The measured effect decides, if there is one: a loss is an error, a harmless tensor a note. Without an effect, a
    scalar, an empty tensor, and a tensor that the class's own code moves are notes. An error is a tensor that a
    checkpoint or a training loses: a trainable tensor, a tensor of an unregistered module, or a value that the
    constructor draws at random. A registered tensor that does not move is an error. So is the result of an operation
    that requires grad, because it breaks `copy.deepcopy` and the second backward. All other tensors are warnings: an
    unregistered tensor does not move, and forward may or may not copy the tensor.
    """
    if effect is not None:
        return Severity.ERROR if effect is Effect.LOSS else Severity.NOTE
    is_result = tensor.kind is Kind.UNREGISTERED and bool(tensor.requires_grad) and tensor.derived is not None
    if tensor.within is not None or is_trainable(tensor) or is_result:
        return Severity.ERROR
    if not tensor.shape or not tensor.elements or tensor.moves is True:
        return Severity.NOTE
    is_lost = tensor.kind is not Kind.UNREGISTERED or tensor.rebuilt is False
    return Severity.ERROR if is_lost else Severity.WARNING
