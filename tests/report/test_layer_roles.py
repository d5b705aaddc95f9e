"""The size of the values of each role over the layers."""

from __future__ import annotations

import json
import re

import pytest
import torch


@pytest.fixture
def read_roles(statecli, tmp_path):
    def read(state):
        torch.save(state, tmp_path / "net.pt")
        return json.loads(statecli("inspect", tmp_path / "net.pt", "--stats", "-f", "json").out).get("roles", [])

    return read


def layers(**scales):
    """Twelve layers; the values of some are scaled: `l3=30`."""
    generator = torch.Generator().manual_seed(1)
    return {f"h.{n}.q.weight": torch.randn(8, 9, generator=generator) * scales.get(f"l{n}", 1) for n in range(12)}


def test_rms_is_that_of_torch(read_roles):
    """Root mean square of each layer, and the median of the layers."""
    state = layers()
    (role,) = read_roles(state)
    expected = [tensor.double().pow(2).mean().sqrt().item() for tensor in state.values()]
    assert role["name"] == "h.{0..11}.q.weight"
    assert role["layers"] == [*range(12)]
    assert role["rms"] == pytest.approx(expected)
    assert role["median_rms"] == pytest.approx(torch.tensor(expected, dtype=torch.float64).quantile(0.5).item())


@pytest.mark.parametrize(("scales", "names"), [({}, []), ({"l3": 30}, ["h.3.q.weight"]), ({"l7": 0}, ["h.7.q.weight"])])
def test_a_layer_that_stands_out_is_an_outlier(read_roles, scales, names):
    """30 times the usual size, or only zeros; layers of a usual size are not outliers."""
    assert read_roles(layers(**scales))[0]["outliers"] == names


def test_sizes_whose_ratio_is_beyond_float64_are_compared(read_roles):
    state = {name: tensor.double() * 1e154 for name, tensor in layers().items()}
    state["h.3.q.weight"] *= 1e-308
    state["h.3.q.weight"] *= 1e-154
    assert read_roles(state)[0]["outliers"] == ["h.3.q.weight"]


def test_layers_that_grow_have_no_outlier(read_roles):
    """A trend over the depth is not an outlier."""
    assert read_roles(layers(**{f"l{n}": 1.2**n for n in range(12)}))[0]["outliers"] == []


def test_a_layer_without_finite_values_has_no_rms(read_roles):
    """The other layers keep theirs."""
    (role,) = read_roles(layers() | {"h.2.q.weight": torch.full((8, 9), float("nan"))})
    assert role["rms"][2] is None
    assert None not in role["rms"][3:]


def test_the_chart_shows_the_layer_with_nan(statecli, tmp_path):
    """The layer with NaN is red, next to the outlier, although its other values are usual; its chart is first."""
    state = {f"a.{n}.w": torch.ones(8) for n in range(5)} | layers(l3=30)
    state["h.2.q.weight"][0, 0] = float("nan")
    state["h.9.q.weight"][:2, 0] = float("inf")
    torch.save(state, tmp_path / "net.pt")
    page = statecli("inspect", tmp_path / "net.pt", "--stats", "-f", "html").out
    note = next(line for line in page.splitlines() if line.startswith("<figcaption>"))
    assert "h.{0..11}.q.weight" in note
    assert "12 values; 3 alarms (red)" in note
    assert re.search(r"<title>h\.2\.q\.weight: [\d.]+; 1 NaN</title>.*<circle class=\"point odd\"", page)
    assert '<a href="#tensor=h.2.q.weight"' in page
    assert re.search(r"<title>h\.9\.q\.weight: [\d.]+; 2 Inf</title>", page)


def test_four_layers_are_too_few_for_a_role(read_roles):
    """Four layers are too few for a usual value."""
    assert read_roles({f"h.{n}.w": torch.ones(2) for n in range(4)}) == []


def test_the_chart_of_an_outlier_comes_first(statecli, tmp_path):
    """A page has charts of some roles; the role with the outlier is among them."""
    state = {f"h.{n}.w{role}": torch.full((2,), 1 + n / 20) for role in range(30) for n in range(5)}
    state["h.3.w29"] *= 9
    torch.save(state, tmp_path / "net.pt")
    page = statecli("inspect", tmp_path / "net.pt", "--stats", "-f", "html").out
    titles = [line for line in page.splitlines() if line.startswith("<figcaption>")]
    assert len(titles) == 24
    assert "h.{0..4}.w29" in titles[0]
