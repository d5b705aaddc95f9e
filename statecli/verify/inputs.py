"""What forward is called with: as the user says, or as the model carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from statecli.modules.build import Built


@dataclass(frozen=True)
class Inputs:
    """`make(seed=0)` gives (args, kwargs), new tensors on the CPU each time, the same values for the same seed.

    `text` says in a few words what they are: "int64 2×16 below 30522".
    """

    text: str
    make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


def find(input: Sequence[str], inputs: str | None, built: Built) -> tuple[Inputs | None, str]:
    """The inputs that `--input` and `--inputs` ask for, else those that the model carries; or None and why.

    Raises UsageError for what cannot be read.
    """
    raise NotImplementedError
