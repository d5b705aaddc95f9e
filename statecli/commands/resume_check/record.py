"""Record of a run of a training script: plain data that the child process writes and the parent reads."""

from __future__ import annotations

from enum import Enum

import msgspec

#: Name of a part of a state -> digest of its values.
Digests = dict[str, str]
#: Start of a digest of values that cannot be read; the class of the values follows in parentheses.
UNREADABLE = "unreadable"


class GeneratorKind(str, Enum):
    """Kinds of random generators that are variables of a script."""

    TORCH = "torch.Generator"
    PYTHON = "random.Random"
    NUMPY = "numpy.random.Generator"
    RANDOM_STATE = "numpy.random.RandomState"


class StepRecord(msgspec.Struct, frozen=True):
    """State right before a step of the optimizer.

    Other optimizers, schedulers, scalers and averages are set only at the compared step.

    Attributes:
        parameters, buffers: Tensors of each called model, by the name of a variable of the script, of its item, or of
            the class; at the compared step also of each model with a parameter of any optimizer.
        gradients: By position in the optimizer.
        optimizer: Moments and other state by position in the optimizer.
        groups: Learning rate and other settings of the optimizer.
        other_optimizers, schedulers, scalers, averages: By the name of a variable of the script, or of the class.
        batches: Digests of the arguments of the forward calls since the last step of any optimizer, a closure included.
        random: State of each random generator: torch, random, numpy, cuda, or a variable of the script.
    """

    parameters: dict[str, Digests]
    buffers: dict[str, Digests]
    gradients: Digests
    optimizer: Digests
    groups: Digests
    other_optimizers: dict[str, Digests]
    schedulers: dict[str, str]
    scalers: dict[str, str]
    averages: dict[str, Digests]
    batches: tuple[str, ...]
    random: Digests


class RunRecord(msgspec.Struct, frozen=True):
    """Record of a run of the training script.

    Attributes:
        steps: A record for each step of the first optimizer.
        optimizer_name: Variable of the script with the optimizer.
        model_name: Variable of the script with the model.
        copied_averages: Names of averages that are dicts or lists of tensors.
        generators: Kind of each random generator of the script, by its variable.
        error: Why the run ended early: the error of the script or its missing part, in one line without its subject.
    """

    steps: tuple[StepRecord, ...] = ()
    optimizer_name: str = "optimizer"
    model_name: str = "model"
    copied_averages: tuple[str, ...] = ()
    generators: dict[str, GeneratorKind] = {}
    error: str | None = None
