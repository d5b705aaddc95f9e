"""The rank of a difference: known updates of several sizes, in the dtypes of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def rank(diff) -> Callable[..., int | None]:
    """Return the estimated rank of after - before."""

    def estimate(before: torch.Tensor, after: torch.Tensor, **options: Any) -> int | None:
        (change,) = diff({"weight": before}, {"weight": after}, **{"ranks": True, **options}).changes
        return change.values.rank if change.values is not None else None

    return estimate


def build_update(shape: tuple[int, int], rank: int, norm: float) -> torch.Tensor:
    """Return a matrix of a rank and a Frobenius norm."""
    product = torch.randn(shape[0], rank).double() @ torch.randn(rank, shape[1]).double()
    return product / product.norm() * norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(60, 80), (500, 200), (64, 3000), (700, 700)])
@pytest.mark.parametrize(("true_rank", "size"), [(1, 0.3), (16, 0.02)])
def test_rank_of_a_low_rank_update_is_exact(rank, dtype, shape, true_rank, size):
    """Rounding fills all directions, but less than the update of a merged adapter."""
    torch.manual_seed(true_rank)
    before = (torch.randn(shape) * 0.02).to(dtype)
    after = (before.double() + build_update(shape, true_rank, size * float(before.norm()))).to(dtype)
    assert rank(before, after) == true_rank


@pytest.mark.parametrize("exponent", [-1000, -600, 600, 1000])
@pytest.mark.parametrize("shape", [(60, 80), (3000, 300)])
def test_the_scale_of_the_values_does_not_change_the_rank(rank, shape, exponent):
    """The matrix of 3000 rows is read in blocks, and the first block is zero."""
    torch.manual_seed(0)
    before = torch.randn(shape).double()
    after = before + build_update(shape, 3, float(before.norm()))
    before[: shape[0] * 2 // 3] = after[: shape[0] * 2 // 3] = 0
    assert rank(before * 2.0**exponent, after * 2.0**exponent) == 3


def test_a_full_update_has_a_full_rank(rank):
    """From 128 on, the rank is a lower bound."""
    before = torch.randn(300, 200)
    assert rank(before, before + 0.01 * torch.randn(300, 200)) == 128
    assert rank(before[:, :50], before[:, :50] + 0.01 * torch.randn(300, 50)) == 50


def test_outliers_do_not_hide_rounding(rank):
    """A column of large weights has large rounding errors, which are not directions of the update."""
    before = torch.randn(400, 400) * 0.02
    before[:, 7] *= 200
    after = (before.bfloat16().double() + build_update((400, 400), 3, 2.0)).bfloat16()
    assert rank(before.bfloat16(), after) == 3


def test_a_kernel_is_a_matrix_of_its_output_channels(rank):
    before = torch.randn(40, 8, 3, 3)
    assert rank(before, before + build_update((40, 72), 2, 5.0).reshape(before.shape).float()) == 2


def test_cast_has_rank_zero(rank):
    before = torch.randn(300, 300)
    assert rank(before, before.bfloat16()) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_have_no_rank(rank, value):
    before = torch.randn(20, 20)
    after = before.clone()
    after[3, 4] = value
    assert rank(before, after) is None


def test_vectors_and_integers_have_no_rank(rank):
    assert rank(torch.randn(20), torch.randn(20)) is None
    assert rank(torch.arange(20).reshape(4, 5), torch.zeros(4, 5, dtype=torch.int64)) is None


def test_rank_appears_only_in_verbose_output_and_html(rank, statecli, save):
    """The rank is shown with `-v` and on a page, not in other outputs."""
    before = torch.randn(40, 30)
    paths = save({"w": before}, "c.pt"), save({"w": before + build_update((40, 30), 2, 9.0).float()}, "d.pt")
    assert rank(before, before + 1, ranks=False) is None
    assert "rank of Δ" not in statecli("diff", *paths).out
    document = json.loads(statecli("diff", *paths, "-v", "-f", "json").out)
    assert [change["values"]["rank"] for change in document["changes"]] == [2]
    assert "rank of Δ 2" in statecli("diff", *paths, "-f", "html").out


def test_a_setting_with_the_words_of_the_rank_needs_no_legend(statecli, save):
    """The legend explains the rank if a change has one."""
    before, after = {"w": torch.ones(3), "note": "rank of Δ 2"}, {"w": torch.zeros(3), "note": "rank of Δ 3"}
    result = statecli("diff", save(before, "a.pt"), save(after, "b.pt"), "-f", "html")
    assert "rank of Δ 3" in result.out
    assert "directions" not in result.out
