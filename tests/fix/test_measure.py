"""The outputs of a model before and after an edit are compared tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from statecli.commands.fix.measure import _list_values, is_same_output


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
        assert [tensor.item() for tensor in _list_values(output)] == [0, 1, 2]
    assert _list_values("text") == []
    assert _list_values((0.5, True, None)) == [0.5, True]


def test_numbers_of_an_output_are_compared_exactly():
    """A whole number has no rounding, and a bool is no number; a float has the precision of Python."""
    for output in (2**2000, 20_000, True, 1 / 3, float("nan")):
        assert is_same_output(_list_values(output), _list_values(output))
    for first, second in (
        (20_000, 20_001),
        (True, 1.0),
        (True, 1),
        (1, 1.0),
        (1 / 3, 1 / 3 + 1e-9),
        (2**60, 2**60 + 1),
    ):
        assert not is_same_output(_list_values(first), _list_values(second))


def test_outputs_are_compared_in_their_own_precision():
    """Rounding of the last digits is equal; a lost precision, another dtype or another whole number is not."""
    thirds = torch.ones(4, dtype=torch.float64) / 3
    assert is_same_output((thirds,), (thirds * (1 + 1e-15),))
    assert is_same_output((torch.tensor([torch.nan]),), (torch.tensor([torch.nan]),))
    for first, second in (
        (thirds, thirds.float().double()),
        (thirds, thirds.float()),
        (thirds * 1j, thirds.float().double() * 1j),
        (torch.tensor(1_000_000), torch.tensor(1_000_001)),
        (thirds, thirds[:2]),
    ):
        assert not is_same_output((first,), (second,))
    assert not is_same_output((thirds,), ())
    for layout in (torch.sparse_coo, torch.sparse_csr):
        first, second = (torch.eye(2, layout=torch.strided).mul(n).to_sparse(layout=layout) for n in (1, 2))
        assert is_same_output((first,), (first.clone(),))
        assert not is_same_output((first,), (second,))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_compared_part_by_part(layout):
    """Their parts differ in shape, so a nested tensor has no shape of its own."""
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    first, second, third = (
        torch.nested.nested_tensor(tensors, layout=layout) for tensors in (parts, parts, [parts[0], parts[1] * 2])
    )
    assert is_same_output((first,), (second,))
    for other in (third, torch.nested.nested_tensor(parts[:1], layout=layout), parts[0]):
        assert not is_same_output((first,), (other,))
        assert not is_same_output((other,), (first,))
