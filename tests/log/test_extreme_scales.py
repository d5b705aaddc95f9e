"""Values near the ends of float64: squares of these values are beyond float64, and the figures are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors.numpy import save_file

#: Powers of two by which a matrix of small numbers is multiplied.
EXPONENTS = st.integers(-1070, 1010)


def scale(value: float, exponent: int) -> float:
    """Return value * 2**exponent; infinite beyond float64."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def is_near(value: float | None, expected: float, error: float = 0.0) -> bool:
    """Whether the value is the expected value, up to rounding also of the smallest numbers; None beyond float64."""
    if value is None:
        return not 1e-307 < expected < 1e307
    return value == pytest.approx(expected, rel=1e-6 + error, abs=1e-321)


@given(EXPONENTS, EXPONENTS, st.integers(0, 2**32 - 1))
@example(-532, 0, 0)
@example(0, 664, 0)
@example(664, 0, 0)
@example(-565, -564, 0)
@example(1010, 1010, 0)
@example(-1070, 1010, 0)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_figures_equal_those_of_scaled_values(tmp_path, statecli, first, second, seed):
    """The norms, the cosine and the relative change are those of small whole numbers, scaled."""
    before, after = np.random.default_rng(seed).integers(-9, 10, (2, 8, 8)).astype(float)
    before[0, 0] = after[0, 0] = 9
    files = [tmp_path / "run" / f"step-{n}.safetensors" for n in (1, 2)]
    files[0].parent.mkdir(exist_ok=True)
    for file, matrix, exponent in zip(files, (before, after), (first, second), strict=True):
        save_file({"w": np.ldexp(matrix, exponent)}, file)
    top = max(first, second)
    change = float(np.linalg.norm(np.ldexp(after, second - top) - np.ldexp(before, first - top)))
    norms = [float(np.linalg.norm(matrix)) for matrix in (before, after)]
    cosine = float(np.vdot(before, after)) / norms[0] / norms[1]

    rows = statecli("log", files[0].parent, "--no-cache", "-f", "json").json["checkpoints"]
    assert all(is_near(row["norm"], scale(norm, n)) for row, norm, n in zip(rows, norms, (first, second), strict=True))
    assert is_near(rows[1]["change"], scale(change, top))
    rounding = scale(1.0, -1075 - first)  # of a norm that has few digits, because it is close to the smallest float64
    assert is_near(rows[1]["relative_change"], scale(change / norms[0], top - first), rounding)
    assert rows[1]["cosine"] == pytest.approx(cosine, abs=1e-6)

    values = statecli("diff", *files, "-v", "-f", "json").json["changes"][0]["values"]
    assert is_near(values["l2"], scale(change, top))
    assert values["cosine"] == pytest.approx(cosine, abs=1e-6)

    row = statecli("inspect", files[0], "--stats", "--distributions", "--spectra", "-f", "json").json["tensors"][0]
    assert is_near(row["stats"]["std"], scale(float(before.std(ddof=1)), first))
    assert is_near(row["spectrum"]["values"][0], scale(float(np.linalg.norm(before, 2)), first))

    bisection = statecli("bisect", files[0].parent, "--condition", f"cosine<{cosine + 1e-5}", "--no-cache")
    assert (bisection.code, bisection.err) == (0, "")


@pytest.mark.parametrize("factor", [1.0, 1e9, 1e10, 1e14, 1e-30])
def test_cosine_of_very_different_norms_is_that_of_the_directions(statecli, tmp_path, factor):
    """The law of cosines would subtract almost equal squares."""
    before, after = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    for step, tensors in enumerate(({"w": before, "b": after[0]}, {"w": factor * after, "b": factor * before[0]})):
        save_file(
            {name: tensor.astype(np.float32) for name, tensor in tensors.items()}, tmp_path / f"{step}.safetensors"
        )
    old, new = (np.concatenate([w.ravel(), b]).astype(float) for w, b in ((before, after[0]), (after, before[0])))
    expected = float(np.vdot(old, new) / np.linalg.norm(old) / np.linalg.norm(new))
    row = statecli("log", tmp_path, "--no-cache", "-f", "json").json["checkpoints"][1]
    assert row["cosine"] == pytest.approx(expected, abs=1e-6)
