"""The result of `statecli explain`: causes, each in one line, and Python code with the result of its test."""

from __future__ import annotations

from enum import Enum

import msgspec

from statecli.core.model_state import ModelState

#: Start of `Diagnosis.proof` without code; a reason or a remedy follows.
NO_CODE = "no code to load the file"


class Cause(str, Enum):
    """Reason why a checkpoint does not load.

    `prefix`: the names have a prefix unknown to the class, or the reverse. `nested`: the file has the state_dict under
    a key. `renamed`: tensors have other names. `width`, `depth`: the class was built with other sizes, or another
    number of layers. `other-part`: a side has a module that is missing on the other, such as another head.
    `transposed`: rows and columns of weights are exchanged. `averaged`: the file has an average of the weights (EMA).
    `quantized`: the weights are stored in a quantised form. `weight-norm`: the other form of `weight_norm`, or weights
    computed on a single side (also spectral_norm, prune). `tied`: names of tied weights were left out. `adapter`: the
    file has an adapter (LoRA). `optimizer`: the file has no model. `whole-module`: the file is a pickled module.
    `unsafe-file`: `weights_only=True` refuses the file. `git-lfs`, `truncated`, `not-a-checkpoint`: the file is
    not usable. `refused`: code of the class raises an error. `other-model`: class and checkpoint have too little in
    common. `other-names`: the names differ in a way that no short lines can express.
    """

    PREFIX = "prefix"
    NESTED = "nested"
    RENAMED = "renamed"
    WIDTH = "width"
    DEPTH = "depth"
    OTHER_PART = "other-part"
    AVERAGED = "averaged"
    QUANTIZED = "quantized"
    TRANSPOSED = "transposed"
    WEIGHT_NORM = "weight-norm"
    TIED = "tied"
    ADAPTER = "adapter"
    OPTIMIZER = "optimizer"
    WHOLE_MODULE = "whole-module"
    UNSAFE_FILE = "unsafe-file"
    GIT_LFS = "git-lfs"
    TRUNCATED = "truncated"
    NOT_A_CHECKPOINT = "not-a-checkpoint"
    REFUSED = "refused"
    OTHER_MODEL = "other-model"
    OTHER_NAMES = "other-names"


class CauseEvidence(msgspec.Struct, frozen=True):
    """A cause in one line, with the number of names that the cause concerns.

    `example` is a name or shape on each side: `module.embed.weight → embed.weight`.
    """

    cause: Cause
    message: str
    names: int = 0
    example: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """Causes why a checkpoint does not load, and the code that loads the checkpoint.

    Attributes:
        causes: The causes, the most important first.
        code: Lines of Python; () if there are no short lines.
        maps: Rules of `--map`, from the checkpoint's names to the class's names.
        strict: Whether the lines load with strict=True.
        initial: Names that keep their initial values.
        unused: Names of the checkpoint left out by the lines.
        loads: A load on meta accepted the lines.
        proved: A load on meta accepted the lines, and each pair of names is certain by shape and words.
        proof: The result of the test load, or why the lines were not tested or are not certain.
        warnings: Why the loaded model differs from the saved model: initial weights or random values.
    """

    causes: tuple[CauseEvidence, ...]
    code: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    strict: bool = True
    initial: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    loads: bool = False
    proved: bool = False
    proof: str = ""
    warnings: tuple[str, ...] = ()


#: Causes that explain less than the differing names and shapes.
_UNSPECIFIC_CAUSES = frozenset((Cause.OTHER_MODEL, Cause.OTHER_NAMES, Cause.REFUSED))


class Explanation(msgspec.Struct, frozen=True):
    """Result of `statecli explain`.

    Attributes:
        model: Text of the class; None for an error text.
        checkpoint: Text of the checkpoint; None for an error text.
        loads: The class loads the unchanged checkpoint by a strict load.
        diagnosis: None if the class loads the checkpoint, or nothing is known.
        alternatives: Other lines that load the checkpoint.
        untied: Names of each tensor of the class that a loadable checkpoint stores as several tensors.
    """

    model: str | None = None
    checkpoint: str | None = None
    loads: bool = False
    diagnosis: Diagnosis | None = None
    alternatives: tuple[Diagnosis, ...] = ()
    states: tuple[ModelState, ...] = ()
    untied: tuple[tuple[str, ...], ...] = ()

    @property
    def covers_names(self) -> bool:
        """Return True if the causes explain every differing name and shape."""
        causes = {evidence.cause for evidence in self.diagnosis.causes} if self.diagnosis else set()
        return bool(causes) and not causes & _UNSPECIFIC_CAUSES
