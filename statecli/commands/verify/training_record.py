"""Record of a training: what each leaf that requires grad got in each round, and which tensors changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.live import measure
from statecli.live.tensors import is_lazy

#: Largest number of rounds while each round gives a first gradient to a further tensor.
MAX_GROWING_ROUNDS = 8


@dataclass
class LeafRecord:
    """Record of a leaf that requires grad, over all rounds.

    `trained`: the optimizer has the leaf. `peaks`: the largest |gradient| of each round, None without a gradient.
    `updated`: whether a step changed the leaf; None if unknown. `lost_peak`: the largest |value|, if a step of the
    learning rate is too small to change it.
    """

    tensor: torch.Tensor
    trained: bool
    peaks: list[float | None] = field(default_factory=list)
    updated: bool | None = None
    lost_peak: float | None = None

    @property
    def peak(self) -> float | None:
        """Largest finite |gradient| of all rounds, or None if no round gave a gradient other than zero."""
        return max(filter(_is_usable, self.peaks), default=None)  # type: ignore[type-var]

    @property
    def is_new(self) -> bool:
        """Return True if the leaf got its first finite gradient other than zero in the last round."""
        return any(map(_is_usable, self.peaks[-1:])) and not any(map(_is_usable, self.peaks[:-1]))

    @property
    def first_bad_round(self) -> int | None:
        """First round whose gradient had a NaN or an infinity."""
        bad_rounds = (n for n, peak in enumerate(self.peaks, 1) if peak is not None and not peak < float("inf"))
        return next(bad_rounds, None)

    @property
    def is_missing(self) -> bool:
        """Return True if the optimizer trains the leaf, but no round gave a gradient other than zero."""
        return self.trained and self.peak is None and self.first_bad_round is None

    @property
    def is_settled(self) -> bool:
        """True if another round could show nothing new about the leaf."""
        return self.first_bad_round is not None or (
            self.peak is not None and (self.updated is True or not self.trained)
        )


def _is_usable(peak: float | None) -> bool:
    return bool(peak) and peak < float("inf")  # type: ignore[operator]


@dataclass(frozen=True)
class GradientsInMode:
    """Largest |gradient| of each leaf when modules are in eval mode, by FQN. `why_not` is the reason for a failure."""

    peaks: dict[str, float | None]
    why_not: str | None = None


@dataclass
class Training:
    """An instance in training. Leaves that require grad are in `leaf_records`, other parameters in `frozen`.

    `changed_by` maps the FQN of each changed tensor to the causes: "forward" or, for tensors that are not trained,
    "step". `written_names`: trained parameters that forward writes, with or without a change. `is_cut_off`: no output
    required grad. `initial_non_leaves`: names of tensors that the constructor computed from parameters. `finite`: every
    output was finite. `draws`: forward drew random numbers. `in_eval`: the last round repeated in eval mode, if forward
    draws. `in_running`: the last round repeated with only batch norms in eval mode, if the model has batch norms.
    """

    subject: ModelUnderTest
    module: nn.Module
    made_by: type[torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer | None = None
    leaf_records: dict[str, LeafRecord] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    initial_non_leaves: frozenset[str] = frozenset()
    changed_by: dict[str, set[str]] = field(default_factory=dict)
    written_names: set[str] = field(default_factory=set)
    rounds: int = 0
    is_cut_off: bool = False
    finite: bool = True
    draws: bool = False
    in_eval: GradientsInMode | None = None
    in_running: GradientsInMode | None = None
    _trained_ids: frozenset[int] = frozenset()

    def is_up_to_chance(self, name: str) -> bool:
        """Return True if a leaf may get a first gradient in another round, because forward in train mode is random."""
        if self.in_eval is None or self.get_cancelled_gradient(name):
            return False
        in_eval = self.in_eval.peaks.get(name)
        return in_eval != 0 if 0 in self.leaf_records[name].peaks else bool(in_eval)

    def get_cancelled_gradient(self, name: str) -> float | None:
        """Return the leaf's peak gradient with batch norms in eval mode, if batch statistics made the gradient zero."""
        return self.in_running.peaks.get(name) if self.in_running and 0 in self.leaf_records[name].peaks else None

    @property
    def is_still_growing(self) -> bool:
        """True if a tensor got its first gradient only in the last of many rounds."""
        return self.rounds >= MAX_GROWING_ROUNDS and has_new_gradients(self)

    def map_tensors(self) -> dict[str, torch.Tensor]:
        """Map the FQN of each tensor with a known shape to the tensor."""
        rows = self.subject.rows_by_fqn
        tensors = measure.map_tensors(self.module).items()
        return {name: tensor for name, tensor in tensors if name in rows and not is_lazy(tensor)}


def has_new_gradients(run: Training) -> bool:
    """Return True if the last round gave a first gradient to a leaf."""
    return any(leaf.is_new for leaf in run.leaf_records.values())
