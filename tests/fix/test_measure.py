"""The outputs of a model before and after an edit are compared tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from statecli.commands.fix.measure import _list_tensors


@dataclass
class Output:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, torch.Tensor]


def test_all_tensors_of_an_output_are_compared():
    """In tuples, dicts and dataclasses, inside one another."""
    first, second, third = (torch.full((1,), float(n)) for n in range(3))
    for output in (
        Output(first, (second, third)),
        Pair(first, {"x": [second, Output(third, ())]}),
        {"x": (first, second), "y": third},
    ):
        assert [tensor.item() for tensor in _list_tensors(output)] == [0, 1, 2]
    assert _list_tensors("text") == []
