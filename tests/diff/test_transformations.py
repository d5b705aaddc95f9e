"""Changes to the tensors of a checkpoint are recognised, and each test also checks a copy with one wrong element."""

from __future__ import annotations

import copy
import functools
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Diff, Field, Rounding, Status, TransformationKind
from statecli.commands.diff.run import compare_targets
from statecli.commands.diff.transformations.views import locate, narrow, take_rows
from statecli.core.model_state import ByteRange, TensorData
from statecli.core.part_rows import replace_data
from statecli.report.transformation_text import describe_transformation
from statecli.targets.load import read_checkpoint
from statecli.values import element_checks

from .conftest import list_findings, map_changes

KIND = TransformationKind


@pytest.fixture(scope="module")
def llama() -> dict[str, torch.Tensor]:
    """The weights of a small Llama, trained a little: norms are near 1."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    state = transformers.LlamaForCausalLM(config).state_dict()
    return {name: tensor + 0.001 * torch.randn_like(tensor) for name, tensor in state.items()}


def compare_saved(folder: Path, before: Any, after: Any) -> Diff:
    """Save two checkpoints in the folder and compare them; the examples of a property share no fixture."""
    paths = str(folder / "a.pt"), str(folder / "b.pt")
    for path, state in zip(paths, (before, after), strict=True):
        torch.save(state, path)
    return compare_targets(Request(*paths, jobs=1))


def list_transformations(diff) -> dict[str, tuple]:
    """Kind, exceptions and sources of each transformation, by the name after."""
    return {
        name: (change.transformation.kind, change.transformation.exceptions, change.transformation.sources)
        for name, change in map_changes(diff).items()
        if change.transformation is not None
    }


def list_kinds(diff) -> set[TransformationKind]:
    return {kind for kind, *_ in list_transformations(diff).values()}


# --- rounding --------------------------------------------------------------------------------------------------------

FLOATS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
CASTS = [
    (before, after) for before in FLOATS for after in FLOATS if element_checks.can_cast(str(before)[6:], str(after)[6:])
]


def draw_floats(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits, limits of narrower types, and values halfway between two values of a narrower type."""
    width = dtype.itemsize
    bits = torch.randint(0, 256, (4000 * width,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    ends = [0.0, -0.0, 1e-45, 6e-8, 2**-9, 2**-17, 447.9, 448, 464, 480, 57344, 61440, 65504, 65519, 65520, 3.4e38]
    special = torch.tensor([*ends, *(-end for end in ends), float("inf"), -float("inf"), float("nan")])
    halves = (torch.randint(0, 2**16, (4000,)) << 15).to(torch.int32).view(torch.float32)
    return torch.cat([bits.view(dtype), special.to(dtype), halves.to(dtype)])


@pytest.mark.parametrize(("before", "after"), CASTS, ids=str)
def test_a_cast_of_torch_is_exactly_rounded(diff, before, after):
    """The values are all codes of the wider type: NaN, infinities, denormals, values beyond the narrower type."""
    values = draw_floats(before, 1)
    few_values = values[:5].clone()
    result = diff({"w": values, "v": few_values}, {"w": values.to(after), "v": few_values.to(after)}, cast=True)
    assert [(c.transformation.kind, c.transformation.exceptions) for c in result.changes] == [(KIND.CAST, 0)] * 2
    limits = torch.finfo(after)
    size = values.double().abs()
    normal_values = values[(size <= limits.max) & (size >= limits.smallest_normal)]
    assert list_findings(diff({"w": normal_values}, {"w": normal_values.to(after)}, cast=True)) == []


COMPLEX = (torch.complex128, torch.complex64, torch.complex32)


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in COMPLEX for b in COMPLEX if a.itemsize > b.itemsize])
def test_a_complex_cast_is_exactly_rounded_in_both_parts(diff, before, after):
    """Rotary tables are complex. An element with a wrong part is one exception; floats from complex are not a cast."""
    torch.manual_seed(0)
    values = torch.randn(40, 8, dtype=torch.complex128).to(before)
    result = diff(
        {"w": values, "v": values[0].real.clone()}, {"w": values.to(after), "v": values[0].real.clone()}, cast=True
    )
    transformation = map_changes(result)["w"].transformation
    assert (transformation.kind, transformation.elements, transformation.exceptions, transformation.rounding) == (
        KIND.CAST,
        320,
        0,
        Rounding.NEAREST,
    )
    assert list_findings(result) == []
    wrong_parts = torch.view_as_real(values.to(after)).clone()
    wrong_parts[3, 4, 0] += 0.5
    wrong_parts[5, 6] += 0.5
    after_wrong = {"w": torch.view_as_complex(wrong_parts), "v": values.to(after)}
    result = diff({"w": values, "v": values.clone()}, after_wrong, cast=True)
    assert map_changes(result)["w"].transformation.exceptions == 2
    assert list_findings(result) == [("inexact-cast", "w")]
    assert list_findings(diff({"w": values}, {"w": values.real.clone()}, cast=True)) == [("inexact-cast", "w")]


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (torch.float16, "1 of 300 elements is beyond the range of float16 and became NaN or infinite"),
        (torch.float8_e4m3fn, "values are beyond the range of float8_e4m3fn (relative change 1)"),
    ],
    ids=str,
)
def test_values_beyond_the_range_are_not_an_exact_cast(diff, statecli, save, after, message):
    """torch rounds these values to infinity or to the largest value, so they are lost."""
    torch.manual_seed(0)
    state = {f"w{n}": torch.randn(300) for n in range(5)}
    state["w3"][7] = 1e6
    cast = {name: tensor.to(after) for name, tensor in state.items()}
    result = diff(state, cast, cast=True)
    assert list_findings(result) == [("inexact-cast", "w3")]
    lines = run_diff(statecli, save(state, "c.pt"), save(cast, "d.pt"))
    assert any(line.startswith("out of range: w3: ") and message in line for line in lines)
    assert any(line.startswith("changed") and " w3 " in line for line in lines)


def test_each_way_to_round_is_named(diff):
    """Truncation and stochastic rounding are not exact casts."""
    torch.manual_seed(0)
    values = torch.randn(50, 40)
    truncated = (values.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    noise = torch.randint(0, 65536, values.shape, dtype=torch.int32)
    stochastic = ((values.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()
    for rounded, name in (
        (values.bfloat16(), Rounding.NEAREST),
        (truncated, Rounding.TRUNCATED),
        (stochastic, Rounding.STOCHASTIC),
    ):
        result = diff({"w": values}, {"w": rounded}, cast=True)
        (change,) = result.changes
        assert (change.transformation.rounding, change.transformation.exceptions) == (name, 0)
        assert list_findings(result) == ([] if name is Rounding.NEAREST else [("inexact-cast", "w")])


def test_a_cast_without_rounding_has_no_rounding(diff):
    (change,) = diff({"w": torch.ones(5)}, {"w": torch.ones(5).half()}, cast=True).changes
    assert (change.transformation.kind, change.transformation.rounding) == (KIND.CAST, None)


# --- scenes ----------------------------------------------------------------------------------------------------------


def test_stale_tensor_of_an_export_is_an_inexact_cast(diff, llama):
    stale = "model.layers.2.mlp.up_proj.weight"
    exported = {name: tensor.bfloat16() for name, tensor in llama.items()}
    assert list_findings(diff(llama, exported, cast=True)) == []
    exported[stale] = (llama[stale] + 0.01 * torch.randn_like(llama[stale])).bfloat16()
    result = diff(llama, exported, cast=True)
    transformations = {name: change.transformation for name, change in map_changes(result).items()}
    assert {name for name, cast in transformations.items() if cast.exceptions} == {stale}
    assert all(cast.rounding is Rounding.NEAREST for name, cast in transformations.items() if name != stale)
    assert list_findings(result) == [("inexact-cast", stale)]


def test_cast_fails_for_every_other_difference(diff):
    torch.manual_seed(0)
    values = {"a": torch.randn(8), "b": torch.randn(8), "n": torch.arange(8)}
    cast = {name: tensor.half() if name != "n" else tensor for name, tensor in values.items()}
    assert list_findings(diff(values, cast, cast=True)) == []
    assert list_findings(diff(values, {**cast, "c": torch.ones(2)}, cast=True)) == [("inexact-cast", "c")]
    assert list_findings(diff(values, {**cast, "n": torch.arange(8) + 1}, cast=True)) == [("inexact-cast", "n")]
    assert list_findings(diff(values, {**cast, "b": values["b"].half() + 1}, cast=True)) == [("inexact-cast", "b")]
    widened = {name: tensor.double() if name != "n" else tensor for name, tensor in values.items()}
    assert list_findings(diff(values, widened, cast=True)) == []


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wrong_row", [None, 7])
def test_added_rows_are_recognised_next_to_a_wrong_row(diff, axis, wrong_row):
    torch.manual_seed(0)
    before = torch.randn(320, 330)
    new = torch.randn(32, 330) if axis == 0 else torch.randn(320, 32)
    after = torch.cat([before, new], axis)
    if wrong_row is not None:
        after.select(axis, wrong_row)[3] += 1
    for old, new in ((before, after), (after, before)):
        (change,) = diff({"w": old}, {"w": new}).changes
        transformation = change.transformation
        assert (transformation.kind, transformation.axis, transformation.exceptions) == (
            KIND.RESIZED,
            axis,
            0 if wrong_row is None else 1,
        )
        assert transformation.first_rows == (() if wrong_row is None else (wrong_row,))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 40),
    extra=st.integers(1, 9),
    place=st.integers(0, 39),
    axis=st.integers(0, 2),
    wrong_row=st.integers(-1, 39),
    is_removed=st.booleans(),
)
def test_rows_added_or_removed_in_one_place_are_located(
    tmp_path_factory, count, extra, place, axis, wrong_row, is_removed
):
    """The place is found anywhere, also next to a wrong row; every element is different, so the place is unique."""
    place, wrong_row = place % count, wrong_row % count if wrong_row >= 0 and count > 2 else None
    shape = [3, 4, 5]
    shape[axis] = count + extra
    long_tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    kept_rows = [*range(place), *range(place + extra, count + extra)]
    short_tensor = long_tensor.index_select(axis, torch.tensor(kept_rows)).clone()
    before, after = (long_tensor, short_tensor.clone()) if is_removed else (short_tensor, long_tensor.clone())
    if wrong_row is not None:  # `after` has another value in a common row
        row = wrong_row if is_removed else kept_rows[wrong_row]
        after.select(axis, row)[0, 0] = -1.0
    (change,) = compare_saved(tmp_path_factory.mktemp("rows"), {"w": before}, {"w": after}).changes
    transformation = change.transformation
    assert (transformation.kind, transformation.axis) == (KIND.RESIZED, axis)
    wrong_rows = () if wrong_row is None else ((kept_rows[wrong_row] if is_removed else wrong_row),)
    if wrong_row is None or not place - 1 <= wrong_row <= place:
        assert (transformation.place, transformation.first_rows, transformation.exceptions) == (
            place,
            wrong_rows,
            len(wrong_rows),
        )
    else:  # a wrong row at the place may be on either side
        assert transformation.rows == 1
    assert transformation.elements == short_tensor.numel()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=2, max_size=5, unique_by=lambda gap: gap[0]),
    st.lists(st.integers(0, 59), max_size=3, unique=True),
    st.booleans(),
)
def test_rows_added_or_removed_in_several_places_are_located(tmp_path_factory, gaps, wrong_rows, is_removed):
    """A vocabulary trimmed to a subset, or extended here and there, with wrong rows; a row of zeros is anywhere."""
    gaps = sorted(gaps)
    torch.manual_seed(len(gaps))
    rows = torch.randn(60, 8)
    rows[[5, 40]] = 0
    new = {place: torch.randn(count, 8) for place, count in gaps}
    longer_tensor = torch.cat([part for n in range(61) for part in (new.get(n, rows[:0]), rows[n : n + 1])])
    before, after = (longer_tensor, rows.clone()) if is_removed else (rows, longer_tensor)
    shifts = [sum(count for place, count in gaps if place <= row) for row in range(60)]
    for row in wrong_rows:
        after[row if is_removed else row + shifts[row]] += 1
    (change,) = compare_saved(tmp_path_factory.mktemp("rows"), {"w": before}, {"w": after}).changes
    transformation = change.transformation
    assert transformation.kind is KIND.RESIZED
    assert transformation.rows <= len(wrong_rows)  # a wrong row next to a place may be an added row
    edges = {place - distance for place, _ in gaps for distance in (0, 1)}
    if edges.isdisjoint(wrong_rows):
        starts = [
            place + (sum(count for other, count in gaps if other < place) if is_removed else 0) for place, _ in gaps
        ]
        assert (transformation.places, transformation.counts) == (tuple(starts), tuple(count for _, count in gaps))
        assert transformation.first_rows == tuple(sorted(row + shifts[row] * is_removed for row in wrong_rows))


def test_rows_added_to_a_trained_vocabulary_are_recognised(diff, statecli, save):
    """The common rows are measured like any trained tensor; other values near 1 are not equal."""
    torch.manual_seed(0)
    before = 0.02 * torch.randn(320, 64)
    common = before + 0.001 * torch.randn(320, 64)
    after = torch.cat([common, torch.randn(32, 64)])
    transformation = diff({"w": before}, {"w": after}).changes[0].transformation
    assert (transformation.kind, transformation.exceptions, transformation.elements) == (KIND.RESIZED, 0, 320 * 64)
    relative, cosine = (
        (common - before).norm() / before.norm(),
        torch.cosine_similarity(before.view(1, -1), common.view(1, -1)),
    )
    assert (transformation.relative_l2, transformation.cosine) == (
        pytest.approx(relative.item(), rel=1e-4),
        pytest.approx(cosine.item(), rel=1e-6),
    )
    text = f"32 rows added; rel. change {relative:.2g}, cosine 0.998"
    assert text in statecli("diff", save({"w": before}, "a.pt"), save({"w": after}, "b.pt")).out
    near_one = {"w": 1 + 0.01 * torch.randn(320, 64)}, {"w": 1 + 0.01 * torch.randn(352, 64)}
    assert list_transformations(diff(*near_one)) == {}


def test_places_of_added_and_removed_rows_are_listed(statecli, save):
    torch.manual_seed(0)
    rows = torch.randn(60, 8)
    extended_rows = torch.cat([rows[:20], torch.randn(5, 8), rows[20:30], torch.randn(7, 8), rows[30:]])
    paths = save({"w": rows}, "a.pt"), save({"w": extended_rows}, "b.pt")
    text = "12 rows added in 2 places (5 before row 20, 7 before row 30); the 60 common rows are equal"
    assert text in statecli("diff", *paths).out
    text = "12 rows removed in 2 places (5 from row 20 on, 7 from row 35 on); the 60 common rows are equal"
    assert text in statecli("diff", *paths[::-1]).out


def test_section_copied_over_another_is_recognised(diff):
    """The averaged weights replace the weights of the model; each tensor is described, with its wrong elements."""
    model = {f"layers.{n}.{leaf}": torch.randn(8, 8) for n in range(3) for leaf in ("q", "k")}
    average = {name: tensor + 0.05 * torch.randn(8, 8) for name, tensor in model.items()}
    copied = {name: tensor.clone() for name, tensor in average.items()}
    copied["layers.1.q"][3, 3] += 1
    changes = diff({"model": model, "ema": average}, {"model": copied, "ema": average}).changes
    moved = {change.fqn: change.transformation for change in changes if change.transformation is not None}
    assert moved.keys() == model.keys()
    for name, transformation in moved.items():
        assert transformation.exceptions == (name == "layers.1.q")
        assert (transformation.kind, transformation.sources, transformation.source_section) == (
            KIND.MOVED,
            (name,),
            "ema",
        )


def test_tensors_copied_under_another_prefix_are_recognised(diff):
    """In a flat checkpoint the first part of the name differs; copies in both directions are a swap."""
    parts = {f"{part}.layers.{n}.q": torch.randn(8, 8) for part in ("model", "ema") for n in range(3)}
    close = {name: parts[name.replace("ema.", "model.")] + 0.05 * torch.randn(8, 8) for name in parts}
    before = {name: close[name] if name.startswith("ema.") else parts[name] for name in parts}
    swapped_tensors = {
        name: before[name.replace("model.", "x.").replace("ema.", "model.").replace("x.", "ema.")] for name in parts
    }
    copied = {name: before[f"ema.{name.partition('.')[2]}"].clone() for name in parts}
    assert list_transformations(diff(before, copied)) == {
        f"model.layers.{n}.q": (KIND.MOVED, 0, (f"ema.layers.{n}.q",)) for n in range(3)
    }
    assert list_kinds(diff(before, {name: tensor.clone() for name, tensor in swapped_tensors.items()})) == {
        KIND.SWAPPED
    }


def test_unrelated_rows_are_not_a_resize(diff):
    torch.manual_seed(0)
    assert list_transformations(diff({"w": torch.randn(32, 8)}, {"w": torch.randn(40, 8)})) == {}


def renumber(state: dict[str, torch.Tensor], new_number) -> dict[str, torch.Tensor]:
    """Rename layers; None leaves a layer out."""
    renamed = {}
    for name, tensor in state.items():
        match = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        number = new_number(int(match[1])) if match else None
        if match is None or number is not None:
            renamed[f"model.layers.{number}.{match[2]}" if match else name] = tensor
    return renamed


def prune(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove layer 1 and renumber the layers after it."""
    return renumber(state, lambda n: n if n < 1 else n - 1 if n > 1 else None)


@pytest.mark.parametrize("has_constants", [False, True])
def test_a_removed_layer_renumbers_the_others(diff, llama, has_constants):
    """Norms differ little between layers, and may be all ones, so they follow the layer's other tensors."""
    if has_constants:
        llama = {name: torch.ones_like(t) * len(name) if "norm" in name else t for name, t in llama.items()}
        llama["model.layers.1.input_layernorm.weight"] = llama["model.layers.1.input_layernorm.weight"] * 2
    pruned = prune(llama)
    result = diff(llama, pruned)
    assert list_kinds(result) == {KIND.MOVED}
    for name, (_, exceptions, sources) in list_transformations(result).items():
        assert exceptions == 0
        assert sources == (re.sub(r"layers\.(\d)", lambda match: f"layers.{int(match[1]) + 1}", name),)
    # Tensors that are equal in both layers are equal under their own name.
    unexplained_changes = [
        c for c in map_changes(result).values() if c.status is Status.CHANGED and c.transformation is None
    ]
    assert unexplained_changes == []


def test_changed_tensor_of_a_moved_layer_is_only_similar(diff, llama, statecli, save):
    pruned = prune(llama)
    wrong_name = "model.layers.1.mlp.up_proj.weight"
    pruned[wrong_name] = pruned[wrong_name] + 0.001
    result = diff(llama, pruned)
    assert map_changes(result)[wrong_name].transformation.cosine < 1  # the tensor moved, and changed since
    assert map_changes(result)["model.layers.1.mlp.down_proj.weight"].transformation.cosine is None
    lines = run_diff(statecli, save(llama, "a.pt"), save(pruned, "b.pt"))
    assert any("18 tensors, similar (cosine 0.99" in line and "17 of them bit for bit" in line for line in lines)


def test_removed_layers_are_named_once(statecli, save, llama):
    """The last removed layer is named too, although no other layer took its tensors."""
    pruned = renumber(llama, lambda n: {0: 0, 3: 1}.get(n))
    lines = run_diff(statecli, save(llama, "a.safetensors"), save(pruned, "b.safetensors"), "-f", "table")
    text = " ".join(" ".join(lines).split())
    assert "model.layers.{1,2} are removed" in text
    assert "recognised changes 27 of 27 differing tensors" in text
    assert "D model.layers" not in text


@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (700, 0.5), (-1, 1e6)])
def test_wrong_weight_of_a_moved_or_swapped_tensor_is_named(diff, statecli, save, llama, place, value):
    """The tensor is named, wherever the wrong weight is and whatever its value; its layer moved bit for bit."""
    wrong_name = "model.layers.1.mlp.up_proj.weight"
    pruned = prune(llama)
    pruned[wrong_name] = pruned[wrong_name].clone()
    pruned[wrong_name].view(-1)[place] = value
    source = wrong_name.replace("1", "2")
    assert list_transformations(diff(llama, pruned))[wrong_name] == (KIND.MOVED, 1, (source,))
    lines = run_diff(statecli, save(llama, "a.safetensors"), save(pruned, "b.safetensors"))
    assert any(f"18 tensors, bit for bit, but {wrong_name}: 1 of 1,536 elements differs" in line for line in lines)
    assert any(
        line.startswith("changed") and wrong_name in line and f"= {source} before, but 1 of" in line for line in lines
    )
    swapped_state = {**llama, wrong_name: llama[source].clone(), source: llama[wrong_name].clone()}
    swapped_state[source].view(-1)[place] = value
    assert list_transformations(diff(llama, swapped_state)) == {
        wrong_name: (KIND.SWAPPED, 0, (source,)),
        source: (KIND.SWAPPED, 1, (wrong_name,)),
    }
    lines = run_diff(statecli, save(llama, "a.safetensors"), save(swapped_state, "b.safetensors"))
    text = f"{wrong_name}: swapped with {source}, bit for bit, but {source}: 1 of 1,536 elements differs"
    assert any(text in line for line in lines)


def test_moved_and_trained_layers_are_paired_by_similarity(diff, statecli, save, llama):
    """Layers are paired by cosine similarity, which is shown; norms follow the other tensors of their layer.

    Only the layer that was taken out is removed; no other layer is new.
    """
    torch.manual_seed(0)
    pruned = prune(llama)
    trained = {name: tensor + 0.05 * tensor.std() * torch.randn_like(tensor) for name, tensor in pruned.items()}
    result = diff(llama, trained)
    moved = {name: sources for name, (kind, _, sources) in list_transformations(result).items() if kind is KIND.MOVED}
    layers = {name for name in pruned if re.search(r"layers\.[12]\.", name)}
    assert set(moved) == layers
    for name, sources in moved.items():
        assert sources == (re.sub(r"layers\.(\d)", lambda match: f"layers.{int(match[1]) + 1}", name),)
        assert 0.99 < map_changes(result)[name].transformation.cosine <= 1
    (line,) = [line for line in run_diff(statecli, save(llama, "a.pt"), save(trained, "b.pt")) if " → model" in line]
    ends = r"similar \(cosine 0\.99\d* or more\); model\.layers\.1 is removed"
    assert re.fullmatch(rf".*: 18 tensors, {ends}", line)


def test_swaps_factors_and_transposes_are_recognised(diff):
    torch.manual_seed(0)
    before = {name: torch.randn(40, 40) for name in "abcdefg"}
    before["h"] = torch.randn(10, 30)
    after = {
        "a": before["b"],
        "b": before["a"],
        "c": -before["c"],
        "d": before["d"] * 0.5,
        "e": before["e"] / 3,
        "f": before["f"].t(),
        "g": torch.randn(40, 40),
        "h": before["h"].t(),
    }
    result = diff(before, after)
    expected = {
        "a": (KIND.SWAPPED, 0, ("b",)),
        "b": (KIND.SWAPPED, 0, ("a",)),
        "c": (KIND.SCALED, 0, ()),
        "d": (KIND.SCALED, 0, ()),
        "e": (KIND.SCALED, 0, ()),
        "f": (KIND.TRANSPOSED, 0, ()),
        "g": (KIND.UNRELATED, 0, ()),
        "h": (KIND.TRANSPOSED, 0, ()),
    }
    assert list_transformations(result) == expected
    factors = {name: change.transformation.factor for name, change in map_changes(result).items()}
    assert (factors["c"], factors["d"], round(factors["e"], 9)) == (-1, 0.5, round(1 / 3, 9))
    for name in "abcdefh":  # one wrong element each
        wrong_state = {key: tensor.clone() for key, tensor in after.items()}
        wrong_state[name][-1, -1] += 0.5
        transformation = map_changes(diff(before, wrong_state))[name].transformation
        assert (transformation.kind, transformation.sources) == (expected[name][0], expected[name][2]), name
        # The wrong element of the small tensor is described with the cosine.
        assert (transformation.exceptions, transformation.cosine is not None) == (
            (0, True) if name == "h" else (1, False)
        ), name


WIDE_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", WIDE_FLOATS)
def test_factor_is_recognised_in_each_dtype(diff, dtype):
    torch.manual_seed(0)
    factors = [-1, 2, 0.5, 0.1, 1.7, -0.25, 0.125, 12.5]
    before = {f"w{n}": torch.randn(30, 20).to(dtype) for n in range(len(factors))}
    after = {name: tensor * factor for (name, tensor), factor in zip(before.items(), factors, strict=True)}
    transformations = [change.transformation for change in diff(before, after).changes]
    assert {transformation.kind for transformation in transformations} == {KIND.SCALED}
    assert [transformation.factor for transformation in transformations] == pytest.approx(factors, rel=1e-12)


@pytest.mark.parametrize("dtype", WIDE_FLOATS)
@pytest.mark.parametrize("divides", [False, True])
def test_factor_of_many_digits_is_recognised(diff, dtype, divides):
    """A root is recognised in each type; other digits only if many fit the type. A single wrong element is counted."""
    torch.manual_seed(0)
    roots, decimal_factors = (128**-0.5, -(3**0.5), 96**-0.5), (0.87654321, 12345.678)
    factors = roots + decimal_factors[: 1 if dtype is torch.float16 else 2]  # the other is beyond float16
    before = {f"w{n}": torch.randn(64, 64).to(dtype) for n in range(len(factors))}
    after = {
        name: tensor / (1 / factor) if divides else tensor * factor
        for (name, tensor), factor in zip(before.items(), factors, strict=True)
    }
    unknown = {torch.bfloat16: decimal_factors[:1], torch.float64: decimal_factors}.get(dtype, ())
    precision = 1e-5 if dtype is torch.float16 else 2e-7
    for exceptions in (0, 1):
        for change, factor in zip(diff(before, after).changes, factors, strict=True):
            transformation = change.transformation
            if factor in unknown:
                assert transformation is None
                continue
            assert (transformation.kind, transformation.exceptions) == (KIND.SCALED, exceptions)
            assert transformation.factor == pytest.approx(factor, rel=precision if factor in decimal_factors else 1e-7)
        for tensor in after.values():
            tensor[7, 9] += 1e3


@pytest.mark.parametrize("number", [3, 32, 192, 768])
def test_inverse_root_is_recognised_however_it_was_computed(diff, number):
    """In float64, 1 / sqrt(n), n ** -0.5 and a division by sqrt(n) often differ in their last bits."""
    torch.manual_seed(0)
    values, root = torch.randn(64, 64, dtype=torch.float64), math.sqrt(number)
    before = {"a": values, "b": values, "c": values, "d": values}
    after = {"a": values * (1 / root), "b": values * number**-0.5, "c": values / root, "d": values / -root}
    transformations = [change.transformation for change in diff(before, after).changes]
    assert [(transformation.kind, transformation.exceptions) for transformation in transformations] == [
        (KIND.SCALED, 0)
    ] * 4


def test_product_of_float32_values_in_float64_is_recognised(diff):
    """numpy multiplies so by a float64, and each product is rounded once."""
    torch.manual_seed(0)
    before = torch.randn(64, 64)
    (change,) = diff({"w": before}, {"w": (before.double() * 96**-0.5).float()}).changes
    assert (change.transformation.kind, change.transformation.exceptions) == (KIND.SCALED, 0)


@pytest.mark.parametrize("factor", [5e-324, 1e-310, 1.7e308])
def test_factor_at_the_limit_of_float64_is_recognised(diff, factor):
    torch.manual_seed(0)
    before = torch.randn(40, 40, dtype=torch.float64) * (1e10 if factor < 1 else 1e-10)
    (change,) = diff({"w": before}, {"w": before * factor}).changes
    assert (change.transformation.kind, change.transformation.factor) == (KIND.SCALED, factor)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
@pytest.mark.parametrize("factor", [0.5, -2.0, 1.7, -0.33])
def test_factor_of_float8_is_rounded_as_by_torch(save, dtype, factor):
    """Products of all codes are rounded as by torch; a code that differs by one bit is counted."""
    values = torch.arange(256, dtype=torch.uint8).repeat(40).view(dtype).float()
    before = values.where(values.abs() < 100, 1.0).to(dtype)
    after = (before.float() * factor).to(dtype)
    for exceptions in (0, 1):
        sides = (
            read_checkpoint(save({"w": side}, f"{n}.pt")).tensors[0].data for n, side in enumerate((before, after))
        )
        task = element_checks.CheckTask("w", element_checks.Operation.SCALE, *sides, factor)
        (result,) = element_checks.check_elements([task], jobs=1)
        assert (result.elements, result.exceptions) == (before.numel(), exceptions)
        after.view(torch.uint8)[777] ^= 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_the_check_of_a_wrong_factor_ends_early(save, dtype):
    path = save({name: torch.randn(1 << 21).to(dtype) for name in "ab"}, "both.safetensors")
    before, after = (row.data for row in read_checkpoint(path).tensors)
    task = element_checks.CheckTask("w", element_checks.Operation.SCALE, before, after, 0.5, max_exceptions=2000)
    (result,) = element_checks.check_elements([task], jobs=1)
    assert 2000 < result.exceptions <= result.elements < (1 << 21) / 4


def test_a_factor_with_noise_is_not_a_factor(diff):
    """Each value differs from the exact product by a few units of the last place."""
    torch.manual_seed(0)
    before = torch.randn(64, 64)
    after = before * 0.87654321 * (1 + 1e-6 * torch.randn(64, 64))
    assert list_transformations(diff({"w": before}, {"w": after})) == {}


@pytest.mark.parametrize(
    ("factor", "wrong_value"), [(1.7, 1.0), (1.7, 1e4), (1.7, math.nan), (0.5, math.inf), (-1.0, 1e4)]
)
def test_factor_is_recognised_despite_an_extreme_weight(diff, statecli, save, factor, wrong_value):
    """The wrong weight is larger than all others together, or not finite, at any place."""
    torch.manual_seed(0)
    before = {"w": 0.02 * torch.randn(256, 256)}
    for place in (0, 7 * 256 + 3, 256 * 256 - 1):
        after = {"w": before["w"] * factor}
        after["w"].view(-1)[place] = wrong_value
        transformation = diff(before, after).changes[0].transformation
        assert (transformation.kind, transformation.factor, transformation.exceptions) == (
            KIND.SCALED,
            pytest.approx(factor, rel=1e-12),
            1,
        )
    output = "\n".join(run_diff(statecli, save(before, "a.pt"), save(after, "b.pt")))
    assert f"= {factor:g} × before, but 1 of 65,536 elements differs" in output


def test_factor_is_recognised_despite_wrong_first_rows(diff):
    """A wrong first row does not matter; more than 1 in 1,000 wrong elements are not described as a factor."""
    torch.manual_seed(0)
    before = torch.randn(2048, 128)
    for rows, exceptions in ((2, 256), (3, None)):
        after = 0.5 * before
        after[:rows] = torch.randn(rows, 128)
        transformation = diff({"w": before}, {"w": after}).changes[0].transformation
        assert (transformation and transformation.exceptions) == exceptions


def test_transpose_is_recognised_despite_an_extreme_weight(diff):
    torch.manual_seed(0)
    before = torch.randn(60, 60)
    after = before.t().clone()
    after[0, 1] = 1e6
    transformation = diff({"w": before}, {"w": after}).changes[0].transformation
    assert (transformation.kind, transformation.exceptions) == (KIND.TRANSPOSED, 1)


def describe_changes(diff) -> dict[str, str]:
    """Return the change to each tensor in words, by name."""
    return {
        name: describe_transformation(change) for name, change in map_changes(diff).items() if change.transformation
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permuted_vocabulary_is_recognised(diff, axis, dtype):
    """Equal rows in another order are recognised, also with a wrong element; half of the rows drawn again are not."""
    torch.manual_seed(0)
    before = torch.randn(320, 64)
    order = torch.randperm(before.shape[axis])
    after = before.index_select(axis, order).to(dtype)
    rounded = "" if dtype is torch.float32 else ", exactly rounded"
    noun = ("rows", "columns")[axis]
    text = f"{noun} permuted: same {before.shape[axis]} {noun} in another order{rounded}"
    assert describe_changes(diff({"e": before}, {"e": after})) == {"e": text}
    after[7, 5] += 1
    assert describe_changes(diff({"e": before}, {"e": after})) == {
        "e": f"{noun} permuted: same {before.shape[axis] - 1} of {before.shape[axis]} {noun} in another order, "
        f"but 1 of 20,480 elements differs in {noun[:-1]} {(7, 5)[axis]}"
    }
    after.narrow(axis, 0, before.shape[axis] // 2).normal_()
    assert KIND.PERMUTED not in list_kinds(diff({"e": before}, {"e": after}))


@pytest.mark.parametrize("executor", ["threads:2", "processes:2"])
def test_every_engine_finds_the_same(statecli, save, executor):
    """The cases are reordered rows, a changed transpose, a factor of many digits and reordered experts."""
    torch.manual_seed(0)
    matrix, vocabulary = torch.randn(64, 64), torch.randn(320, 64)
    experts = {f"experts.{n}.w": torch.randn(16, 24) for n in range(12)}
    before = {"e": vocabulary, "q": matrix, "f": matrix} | experts
    after = {
        "e": vocabulary[torch.randperm(320)],
        "q": matrix.t() + 0.1 * torch.randn(64, 64),
        "f": matrix * 96**-0.5,
        "w": torch.stack([experts[name] for name in sorted(experts)]),
    }
    paths = save(before, "a.safetensors"), save(after, "b.safetensors")
    serial_output = statecli("diff", *paths, "-f", "json").out
    assert {"permuted", "transposed", "scaled", "stacked"} <= set(re.findall(r'"kind": ?"(\w+)"', serial_output))
    assert statecli("diff", *paths, "-f", "json", "--executor", executor).out == serial_output


def test_swapped_items_of_a_stack_are_recognised(diff):
    """Swapped experts of a fused tensor on both sides are recognised; half of the experts drawn again are not."""
    torch.manual_seed(0)
    before = torch.randn(8, 16, 24)
    after = before[[1, 0, 3, 2, 5, 4, 7, 6]]
    assert describe_changes(diff({"e": before}, {"e": after})) == {"e": "items permuted: same 8 items in another order"}
    after[3, 1, 2] += 1
    text = "items permuted: same 7 of 8 items in another order, but 1 of 3,072 elements differs in item 3"
    assert describe_changes(diff({"e": before}, {"e": after})) == {"e": text}
    after[:4].normal_()
    assert KIND.PERMUTED not in list_kinds(diff({"e": before}, {"e": after}))


@pytest.mark.parametrize("rows", [[17], [5, 9]])
def test_damaged_rows_in_place_are_not_a_permutation(diff, rows):
    """A flipped exponent bit or a scaled row changes the cosine, but moves no row."""
    torch.manual_seed(0)
    before = torch.randn(256, 64)
    after = before.clone()
    after[rows, 3] = 1e30
    assert describe_changes(diff({"e": before}, {"e": after})) == {}
    after[rows] = before[rows] * 1000
    assert KIND.PERMUTED not in list_kinds(diff({"e": before}, {"e": after}))


def test_permuted_masks_are_not_recognised(diff):
    """Rows of a few values are equal by chance, so many orders fit."""
    before = (torch.arange(2048).view(1024, 2) % 3).float() - 1
    after = before.flip(0).contiguous()
    assert KIND.PERMUTED not in list_kinds(diff({"e": before}, {"e": after}))


@pytest.mark.parametrize("shape", [(64, 64), (64, 48)])
def test_scaled_and_changed_transposes_are_recognised(diff, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    assert describe_changes(diff({"q": weight}, {"q": -weight.t()})) == {"q": "= -1 × transposed"}
    assert describe_changes(diff({"q": weight}, {"q": weight.t() * 0.5})) == {"q": "= 0.5 × transposed"}
    wrong_transpose = -weight.t().contiguous()
    wrong_transpose[3, 4] = 9
    count = f"{weight.numel():,}"
    expected = {"q": f"= -1 × transposed, but 1 of {count} elements differs"}
    assert describe_changes(diff({"q": weight}, {"q": wrong_transpose})) == expected
    trained = weight.t() + 0.1 * torch.randn(shape[::-1])
    (text,) = describe_changes(diff({"q": weight}, {"q": trained})).values()
    assert re.fullmatch(r"transposed, then changed \(cosine 0\.99\d\d\)", text)


def test_dissimilar_matrices_are_not_transposes(diff):
    """Positive values resemble any transpose, and a transpose that changed much is not described as a transpose."""
    torch.manual_seed(0)
    positive = torch.rand(64, 64)
    assert KIND.TRANSPOSED not in list_kinds(diff({"q": positive}, {"q": torch.rand(64, 64)}))
    weight = torch.randn(64, 64)
    dissimilar = weight.t() + 0.6 * torch.randn(64, 64)
    assert list_kinds(diff({"q": weight}, {"q": dissimilar})) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_renamed_transposes_of_gpt2_are_recognised(diff, statecli, in_tmp_path, dtype):
    """Conv1D of transformers has [in, out], Linear [out, in]; a new matrix has a wrong weight."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    state = transformers.GPT2Model(transformers.GPT2Config(**options)).state_dict()
    words = {"h.": "layers.", "attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "fc1", "mlp.c_proj": "fc2"}
    matrices = {name for name in state if re.search(r"c_(attn|proj|fc)\.weight", name)}
    new = {name: functools.reduce(lambda text, word: text.replace(word, words[word]), words, name) for name in state}
    after = {
        new[name]: (tensor.t() if name in matrices else tensor).to(dtype).clone() for name, tensor in state.items()
    }
    after["layers.1.fc1.weight"][3, 5] += 1
    result = diff(state, after)
    transformations = {
        name: change.transformation for name, change in map_changes(result).items() if change.before is None
    }
    wrong_counts = {"layers.1.fc1.weight": 1}
    for name in matrices:
        transformation = transformations[new[name]]
        assert (transformation.kind, transformation.sources, transformation.is_transposed) == (
            KIND.MOVED,
            (name,),
            True,
        )
        assert transformation.exceptions == wrong_counts.get(new[name], 0)
    lines = statecli("diff", "a.pt", "b.pt", "-f", "plain").out
    assert "layers.{0,1}.qkv.weight: = transpose of h.{0,1}.attn.c_attn.weight before" in lines


def test_unrelated_matrices_of_reversed_shape_are_not_transposes(diff):
    torch.manual_seed(0)
    before = {f"old.{n}": torch.randn(12, 20) for n in range(8)}
    after = {f"new.{n}": torch.randn(20, 12) for n in range(8)}
    after["zeros"], before["a"] = torch.zeros(20, 12), torch.zeros(12, 20)
    assert list_transformations(diff(before, after)) == {}


@pytest.mark.parametrize("before", [torch.full((9,), 1.0), torch.tensor([10]), torch.tensor([3, 4])])
def test_counters_and_constants_are_not_scaled(diff, before):
    assert list_transformations(diff({"n": before}, {"n": 2 * before})) == {}


@pytest.mark.parametrize(("heads", "size"), [(4, 16), (1, 64), (5, 6)])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_reordered_rotary_heads_are_recognised(diff, statecli, save, heads, size, is_reversed):
    """q and k of LLaMA are converted as by transformers, and back: weights, biases, casts and one wrong element."""
    torch.manual_seed(0)

    def convert(tensor: torch.Tensor) -> torch.Tensor:  # `permute` of convert_llama_weights_to_hf.py
        return tensor.view(heads, size // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)

    original = {"q.weight": torch.randn(heads * size, 20), "q.bias": torch.randn(heads * size)}
    converted = {name: convert(tensor) for name, tensor in original.items()}
    before, after = (converted, original) if is_reversed else (original, converted)
    text = "rotated halves → interleaved" if is_reversed else "interleaved → rotated halves"
    heads_text = f"({heads} head{'s' * (heads > 1)})"
    for dtype, exactly in ((torch.float32, "exactly"), (torch.bfloat16, "exactly rounded")):
        cast = {name: tensor.to(dtype) for name, tensor in after.items()}
        transformation = map_changes(diff(before, cast))["q.weight"].transformation
        assert (transformation.kind, transformation.exceptions, transformation.heads) == (KIND.REORDERED, 0, heads)
        output = statecli("diff", save(before, "a.pt"), save(cast, "b.pt")).out
        assert f"q.weight: = {text} {heads_text}, {exactly}" in output
        if dtype is torch.float32:
            assert map_changes(diff(before, cast))["q.bias"].transformation.kind is KIND.REORDERED
    wrong_state = {name: tensor.clone() for name, tensor in after.items()}
    wrong_state["q.weight"][1, 3] += 1
    transformation = map_changes(diff(before, wrong_state))["q.weight"].transformation
    assert (transformation.kind, transformation.exceptions) == (KIND.REORDERED, 1)


def fuse(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join q, k and v into one tensor and gate and up into another, as vLLM and Phi-3 do."""
    fused = dict(state)
    for layer in {name.split(".self_attn")[0] for name in state if ".self_attn." in name}:
        parts = [fused.pop(f"{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        fused[f"{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [fused.pop(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        fused[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    return fused


def test_fused_and_split_projections_are_recognised(diff, llama):
    fused = fuse(llama)
    for before, after, kind in ((llama, fused, KIND.JOINED), (fused, llama, KIND.SPLIT)):
        result = list_transformations(diff(before, after))
        assert len(result) == 8
        assert {transformation[:2] for transformation in result.values()} == {(kind, 0)}
        attention = "model.layers.3.self_attn"
        assert result[f"{attention}.qkv_proj.weight"][2] == tuple(f"{attention}.{p}_proj.weight" for p in "qkv")


def test_wrong_row_of_a_fused_tensor_is_located(diff, llama):
    fused = fuse(llama)
    name = "model.layers.2.self_attn.qkv_proj.weight"
    fused[name] = fused[name].clone()
    fused[name][32 + 6, 3] += 1
    result = diff(llama, fused)
    transformation = map_changes(result)[name].transformation
    assert (transformation.exceptions, transformation.rows, transformation.first_rows) == (1, 1, (6,))
    assert transformation.differing == ("model.layers.2.self_attn.k_proj.weight",)
    assert sum(exceptions for _, exceptions, _ in list_transformations(result).values()) == 1
    # The first row of a part, which locates the part, may be the wrong row.
    fused[name][32, 0] += 1
    assert map_changes(diff(llama, fused))[name].transformation.first_rows == (0, 6)


def test_another_order_of_the_parts_is_found(diff, llama):
    fused = fuse(llama)
    layer = "model.layers.0.mlp"
    fused[f"{layer}.gate_up_proj.weight"] = torch.cat([llama[f"{layer}.{p}_proj.weight"] for p in ("up", "gate")])
    _, _, sources = list_transformations(diff(llama, fused))[f"{layer}.gate_up_proj.weight"]
    assert sources == (f"{layer}.up_proj.weight", f"{layer}.gate_proj.weight")


@pytest.mark.parametrize("blocks", [(8, 8, 8), (16, 4, 4), (4, 4)])
@pytest.mark.parametrize("wrong_row", [None, 5])
def test_interleaved_heads_are_recognised(diff, blocks, wrong_row):
    """GPT-NeoX interleaves q, k and v by head, Falcon by group; some models alternate gate and up."""
    torch.manual_seed(0)
    parts = [torch.randn(6 * rows, 24) for rows in blocks]
    names = [f"attn.{part}_proj.weight" for part in "qkv"[: len(blocks)]]
    heads = [part.view(6, rows, 24) for part, rows in zip(parts, blocks, strict=True)]
    fused = torch.cat(heads, 1).reshape(-1, 24)
    if wrong_row is not None:
        fused[wrong_row, 3] += 1
    before, after = dict(zip(names, parts, strict=True)), {"attn.qkv.weight": fused}
    for old, new, kind in ((before, after, KIND.JOINED), (after, before, KIND.SPLIT)):
        (transformation,) = (c.transformation for c in diff(old, new).changes if c.transformation is not None)
        assert (transformation.kind, transformation.blocks, transformation.sources) == (kind, blocks, tuple(names))
        assert (transformation.exceptions, transformation.rows) == ((0, 0) if wrong_row is None else (1, 1))
        assert transformation.differing == (() if wrong_row is None else (names[int(wrong_row >= blocks[0])],))
    swapped_heads = torch.cat([heads[0], *(head.flip(0) for head in heads[1:])], 1).reshape(-1, 24)
    assert list_transformations(diff(before, {"attn.qkv.weight": swapped_heads})) == {}


def test_a_constant_part_of_interleaved_heads_takes_the_remaining_place(diff):
    """A part of zeros has no place of its own."""
    torch.manual_seed(0)
    parts = [torch.randn(48, 24), torch.randn(48, 24), torch.zeros(48, 24)]
    fused = torch.cat([part.view(6, 8, 24) for part in parts], 1).reshape(-1, 24)
    before = {f"attn.{part}_proj.weight": tensor for part, tensor in zip("qkv", parts, strict=True)}
    (join,) = list_transformations(diff(before, {"attn.qkv.weight": fused})).values()
    assert join == (KIND.JOINED, 0, tuple(before))


@pytest.mark.parametrize(("rows", "words"), [(1, "alternating, 1 row each"), (2, "alternating, 2 rows each")])
def test_alternating_rows_are_counted(statecli, save, rows, words):
    torch.manual_seed(0)
    parts = [torch.randn(8, 24) for _ in range(2)]
    fused = torch.stack([part.view(8 // rows, rows, 24) for part in parts], 1).reshape(-1, 24)
    old = save({"mlp.gate_proj.weight": parts[0], "mlp.up_proj.weight": parts[1]}, "a.safetensors")
    output = statecli("diff", old, save({"mlp.gate_up_proj.weight": fused}, "b.safetensors"), "-f", "markdown").out
    assert words in " ".join(output.split())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stack_of_gate_and_up_is_recognised(diff, statecli, save, is_transposed):
    """transformers stores the experts of Mixtral and, transposed, of Llama 4 in this way, under other module names."""
    torch.manual_seed(0)
    shapes = {"w1": (6, 4), "w2": (4, 6), "w3": (6, 4)}
    names = [(n, e, w) for n in range(2) for e in range(5) for w in shapes]
    experts = {f"layers.{n}.moe.experts.{e}.{w}.weight": torch.randn(shapes[w]) for n, e, w in names}
    stacks = {}
    for n in range(2):
        items = [[experts[f"layers.{n}.moe.experts.{e}.{w}.weight"] for w in ("w1", "w3")] for e in range(5)]
        stack = torch.stack([torch.cat(item) for item in items])
        stacks[f"layers.{n}.mlp.experts.gate_up_proj"] = stack.mT.contiguous() if is_transposed else stack
        down = torch.stack([experts[f"layers.{n}.moe.experts.{e}.w2.weight"] for e in range(5)])
        stacks[f"layers.{n}.mlp.experts.down_proj"] = down.mT.contiguous() if is_transposed else down
    for before, after, kind in ((experts, stacks, KIND.STACKED), (stacks, experts, KIND.UNSTACKED)):
        result = list_transformations(diff(before, after))
        assert {name: transformation[:2] for name, transformation in result.items()} == dict.fromkeys(stacks, (kind, 0))
        sources = [f"layers.1.moe.experts.{e}.{w}.weight" for e in range(5) for w in ("w1", "w3")]
        assert result["layers.1.mlp.experts.gate_up_proj"][2] == tuple(sources)
    lines = run_diff(statecli, save(experts, "c.pt"), save(stacks, "d.pt"))
    source_prefix = "the transposes of " if is_transposed else ""
    start = "layers.{0,1}.mlp.experts.gate_up_proj: = stack of "
    source_list = "[layers.{0,1}.moe.experts.{0..4}.w1.weight; layers.{0,1}.moe.experts.{0..4}.w3.weight]"
    assert f"{start}{source_prefix}{source_list}, exactly" in lines
    wrong_stack = stacks["layers.1.mlp.experts.gate_up_proj"].clone()
    wrong_stack[3, 2, 2] += 1
    changes = map_changes(diff(experts, stacks | {"layers.1.mlp.experts.gate_up_proj": wrong_stack}))
    transformation = changes["layers.1.mlp.experts.gate_up_proj"].transformation
    assert (transformation.exceptions, transformation.differing) == (1, ("layers.1.moe.experts.3.w1.weight",))


def test_wrong_part_of_a_fused_projection_is_named(diff, llama):
    """The keys are from another run: two of three parts are exact, so the third part has a known place."""
    fused = fuse(llama)
    fused["model.layers.1.self_attn.qkv_proj.weight"] = fused["model.layers.1.self_attn.qkv_proj.weight"].clone()
    fused["model.layers.1.self_attn.qkv_proj.weight"][32:48] = torch.randn(16, 32)
    transformation = map_changes(diff(llama, fused))["model.layers.1.self_attn.qkv_proj.weight"].transformation
    assert (transformation.kind, transformation.differing) == (KIND.JOINED, ("model.layers.1.self_attn.k_proj.weight",))
    assert (transformation.rows, transformation.exceptions) == (16, 16 * 32)
    fused["model.layers.1.self_attn.qkv_proj.weight"][:32] = torch.randn(32, 32)
    mixed_transformation = map_changes(diff(llama, fused))["model.layers.1.self_attn.qkv_proj.weight"].transformation
    assert mixed_transformation is None


@pytest.mark.parametrize("wrong_experts", [(0,), (1,), (7,), (2, 5)])
def test_wrong_experts_of_a_stack_are_named(diff, wrong_experts):
    torch.manual_seed(0)
    experts = {f"experts.{n}.w": torch.randn(6, 4) for n in range(8)}
    items = [torch.randn(6, 4) if n in wrong_experts else tensor for n, tensor in enumerate(experts.values())]
    transformation = map_changes(diff(experts, {"experts.w": torch.stack(items)}))["experts.w"].transformation
    assert (transformation.kind, transformation.differing) == (
        KIND.STACKED,
        tuple(f"experts.{n}.w" for n in wrong_experts),
    )
    unrelated_experts = {f"experts.{n}.w": torch.randn(6, 4) for n in range(8)}
    assert list_transformations(diff(unrelated_experts, {"experts.w": torch.stack(items)})) == {}


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_stack_in_another_order_is_recognised(diff, is_pair, is_reversed):
    """Experts sorted as text, or two swapped experts, are described in their order; a wrong row inside is named."""
    torch.manual_seed(0)
    before = {f"moe.experts.{n}.w1.weight": torch.randn(16, 24) for n in range(12)}
    if is_pair:
        before |= {f"moe.experts.{n}.w3.weight": torch.randn(16, 24) for n in range(12)}

    def stack(numbers):
        parts = ("w1", "w3") if is_pair else ("w1",)
        return torch.stack([torch.cat([before[f"moe.experts.{n}.{part}.weight"] for part in parts]) for n in numbers])

    def run(after):
        sides = [before, {"moe.w1": after}]
        return describe_changes(diff(*(sides[::-1] if is_reversed else sides)))["moe.w1"]

    text_order = sorted(range(12), key=str)
    verb = "was split into" if is_reversed else "="
    for numbers, order_text in ((text_order, "{0,1,10,11,2..9}"), ([0, 1, 3, 2, *range(4, 12)], "{0,1,3,2,4..11}")):
        names = f"moe.experts.{order_text}.w1.weight"
        names = f"[{names}; {names.replace('w1', 'w3')}]" if is_pair else names
        stack_tensor = stack(numbers)
        assert run(stack_tensor) == f"{verb} stack of {names}, exactly"
        stack_tensor[5, 3] += 1
        assert f"{verb} stack of {names}, but row 3 of " in run(stack_tensor)
        assert f"experts.{numbers[5]}.w1" in run(stack_tensor)
    assert describe_changes(diff(before, {"moe.w1": torch.randn_like(stack_tensor)})) == {}


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("parent", ["h", "model.blocks"])
def test_transposed_or_renamed_joins_are_recognised(diff, is_reversed, is_transposed, parent):
    """Parts may be transposed as for GPT-2's Conv1D, and below a module of another name; a wrong row is named."""
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    before = {f"h.{n}.{name}.weight": torch.randn(32, 24) for n in range(2) for name in names}
    after = {
        f"{parent}.{n}.c_attn.weight": torch.cat([before[f"h.{n}.{name}.weight"] for name in names]) for n in range(2)
    }

    def run():
        state = {name: tensor.t().contiguous() if is_transposed else tensor for name, tensor in after.items()}
        sides = [before, state]
        return describe_changes(diff(*(sides[::-1] if is_reversed else sides)))

    verb, source_prefix = "was split into" if is_reversed else "=", "transpose of " if is_transposed else ""
    start = "" if parent == "h" else "h.1."
    source_text = f"{verb} {source_prefix}[{'; '.join(start + name for name in names)}]"
    assert run()[f"{parent}.1.c_attn.weight"] == f"{source_text}, exactly"
    after[f"{parent}.1.c_attn.weight"][32 + 6, 3] += 1
    assert run()[f"{parent}.1.c_attn.weight"] == f"{source_text}, but row 6 of {start}k_proj differs"
    after = {name: torch.randn_like(tensor) for name, tensor in after.items()}
    assert run() == {}


def test_input_projection_of_attention_is_recognised(diff):
    """`nn.MultiheadAttention` has one parameter for the three weights, without a separate module."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(16, 4)
    torch.nn.init.normal_(attention.in_proj_bias)
    fused = {f"layers.{n}.attn.{name}": t.clone() for n in range(2) for name, t in attention.state_dict().items()}
    split = {}
    for n in range(2):
        for leaf in ("weight", "bias"):
            for part, rows in zip("qkv", fused.pop(f"layers.{n}.attn.in_proj_{leaf}").chunk(3), strict=True):
                split[f"layers.{n}.attn.{part}_proj.{leaf}"] = rows.clone()
    whole_state = {f"layers.{n}.attn.{name}": t.clone() for n in range(2) for name, t in attention.state_dict().items()}
    for before, after, kind in ((whole_state, fused | split, KIND.SPLIT), (fused | split, whole_state, KIND.JOINED)):
        result = list_transformations(diff(before, after))
        assert {name: transformation[:2] for name, transformation in result.items()} == {
            f"layers.{n}.attn.in_proj_{leaf}": (kind, 0) for n in range(2) for leaf in ("weight", "bias")
        }


# --- a cast together with another change -----------------------------------------------------------------------------

NARROWING_CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
]


def cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}


@pytest.mark.parametrize(("before", "after"), NARROWING_CASTS, ids=str)
def test_renumbered_and_cast_layers_are_recognised(diff, statecli, save, llama, before, after):
    """In an export of a pruned model, each tensor of the moved layers is the rounded tensor of the old layer."""
    unpruned = cast(llama, before)
    pruned = cast(prune(unpruned), after)
    result = diff(unpruned, pruned)
    assert list_kinds(result) == {KIND.CAST, KIND.MOVED}
    transformations = [change.transformation for change in result.changes if change.transformation is not None]
    assert {transformation.exceptions for transformation in transformations} == {0}
    assert {transformation.rounding for transformation in transformations} <= {Rounding.NEAREST, None}
    assert (
        sum(transformation.kind is KIND.MOVED for transformation in transformations) >= 14
    )  # norms may all be rounded to 1
    assert {change.status for change in result.changes if change.transformation is None} == {Status.REMOVED}
    lines = run_diff(statecli, save(unpruned, "c.pt"), save(pruned, "d.pt"))
    (line,) = [line for line in lines if line.startswith("model.layers.{2,3} → model.layers.{1,2}: ")]
    assert line.endswith(" tensors, exactly rounded; model.layers.1 is removed")
    name = "model.layers.1.mlp.up_proj.weight"
    pruned[name] = pruned[name].float().neg().to(after)
    kind, exceptions, _ = list_transformations(diff(unpruned, pruned))[name]
    assert (kind, exceptions > 48 * 32 / 2) == (KIND.CAST, True)


@pytest.mark.parametrize(("before", "after"), NARROWING_CASTS, ids=str)
def test_fused_or_split_and_cast_projections_are_recognised(diff, llama, before, after):
    split_state = cast(llama, before)
    fused = cast(fuse(split_state), after)
    joined = {name for name in fused if "qkv_proj" in name}
    result = list_transformations(diff(split_state, fused))
    assert {name: result[name][:2] for name in joined} == dict.fromkeys(joined, (KIND.JOINED, 0))
    fused["model.layers.1.self_attn.qkv_proj.weight"][32 + 6] = 0  # a key
    transformation = map_changes(diff(split_state, fused))["model.layers.1.self_attn.qkv_proj.weight"].transformation
    assert (transformation.differing, transformation.rows) == (("model.layers.1.self_attn.k_proj.weight",), 1)
    result = list_transformations(diff(fuse(split_state), cast(split_state, after)))
    assert {name: result[name][:2] for name in joined} == dict.fromkeys(joined, (KIND.SPLIT, 0))


@pytest.mark.parametrize(("before", "after"), NARROWING_CASTS, ids=str)
def test_transformed_and_cast_tensors_are_recognised(diff, before, after):
    torch.manual_seed(0)
    old = {name: torch.randn(24, 40).to(before) for name in "abcdefgh"}
    new = cast(old, after)
    new["a"] = new["a"].t().contiguous()
    new["b"] = torch.cat([new["b"].float(), torch.zeros(8, 40)]).to(after)
    new["c"], new["d"] = new["d"], new["c"]
    new["other"] = new.pop("e")
    result = list_transformations(diff(old, new))
    assert {
        name: transformation[:2] for name, transformation in result.items() if name in ("a", "b", "c", "d", "other")
    } == {
        "a": (KIND.TRANSPOSED, 0),
        "b": (KIND.RESIZED, 0),
        "c": (KIND.SWAPPED, 0),
        "d": (KIND.SWAPPED, 0),
        "other": (KIND.MOVED, 0),
    }
    assert {result[name][0] for name in "fgh"} == {KIND.CAST}
    assert {fqn for _, fqn in list_findings(diff(old, new, cast=True))} == {"a", "b", "c", "d", "other", "e"}
    for name in ("a", "c", "other"):
        new[name] = new[name].float().roll(1).to(after)
    assert list_transformations(diff(old, new)).keys().isdisjoint({"other"})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.lists(st.integers(2, 12), max_size=3), min_size=10, max_size=10))
def test_other_values_of_another_dtype_are_not_a_transformation(tmp_path_factory, seed, shapes):
    """Names and dtypes differ, and the values are similar or independent: no exact transformation is reported."""
    generator = torch.Generator().manual_seed(seed)
    before = {f"layers.{n}.w": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    step = (0.1, 1.0, 30.0)[seed % 3]
    start = ("layers", "blocks")[seed % 2]
    after = {
        name.replace("layers", start): (tensor + step * torch.randn(tensor.shape, generator=generator)).bfloat16()
        for name, tensor in before.items()
    }
    result = compare_saved(tmp_path_factory.mktemp("pairs"), before, after)
    transformations = [change.transformation for change in result.changes if change.transformation is not None]
    assert all(
        transformation.kind is KIND.UNRELATED or transformation.cosine is not None for transformation in transformations
    )


def quantize(weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """Return the codes and scales as the writers of these formats compute them."""
    if scheme == "SCB":  # bitsandbytes: functional.int8_vectorwise_quant
        scales = weight.abs().amax(1)
        return {"weight": (weight * (127 / scales[:, None])).round().to(torch.int8), "SCB": scales}
    if scheme == "weight_scale":  # compressed-tensors, by channel
        scales = weight.abs().amax(1, keepdim=True) / 127
        return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}
    if scheme == "one scale":
        scale = weight.abs().max() / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    rows, columns = weight.shape  # DeepSeek-V3: kernel.py, weight_dequant
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def dequantize(state: dict[str, torch.Tensor], scheme: str) -> torch.Tensor:
    codes = state["weight"].float()
    if scheme == "SCB":
        return codes * state["SCB"][:, None] / 127
    if scheme in ("weight_scale", "one scale"):
        return codes * state["weight_scale"]
    wide = state["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * wide[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("scheme", ["SCB", "weight_scale", "one scale", "weight_scale_inv"])
def test_error_of_a_quantized_weight_uses_its_scales(diff, scheme):
    """The error is computed after the scales are applied; raw codes differ by thousands."""
    torch.manual_seed(0)
    weights = {name: torch.randn(200, 300) * 0.02 for name in ("a", "b")}
    state = {name: quantize(weight, scheme) for name, weight in weights.items()}
    before = {f"{name}.weight": weight.bfloat16() for name, weight in weights.items()} | {"norm": torch.ones(4)}
    after = {f"{name}.{key}": tensor for name, tensors in state.items() for key, tensor in tensors.items()}
    result = diff(before, after | {"norm": torch.ones(4).bfloat16()})
    for name in weights:
        transformation = map_changes(result)[f"{name}.weight"].transformation
        weight = before[f"{name}.weight"].float()
        error = ((weight - dequantize(state[name], scheme)).norm() / weight.norm()).item()
        assert transformation.kind is KIND.QUANTIZED
        assert transformation.relative_l2 == pytest.approx(error, rel=1e-4)
        assert 0 < error < 0.05
    after["b.weight"] = after["b.weight"].roll(1, 0)  # codes of other rows
    transformations = list_transformations(diff(before, after))
    assert transformations["a.weight"][:2] == (KIND.QUANTIZED, 0)
    assert transformations["b.weight"][:2] == (KIND.QUANTIZED, 200 * 300)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_new_nan_and_inf_in_transformed_tensors_are_named(diff, statecli, save, llama, value):
    """The value is in a fused weight, new vocabulary rows or a moved layer; its row comes first, with the counts."""
    fused = fuse(llama)
    embedding = torch.cat([llama["model.embed_tokens.weight"], torch.zeros(8, 32)])
    pruned = prune(llama)
    word = "Inf" if value == math.inf else "NaN"
    for after, name, place in (
        (fused, "model.layers.2.self_attn.qkv_proj.weight", (3, 4)),
        ({**llama, "model.embed_tokens.weight": embedding}, "model.embed_tokens.weight", (321, 0)),
        (pruned, "model.layers.1.mlp.up_proj.weight", (0, 0)),
    ):
        wrong_state = {**after, name: after[name].clone()}
        wrong_state[name][place] = value
        change = map_changes(diff(llama, wrong_state))[name]
        assert (change.values.nan_after, change.values.inf_after) == ((0, 1) if word == "Inf" else (1, 0))
        lines = run_diff(statecli, save(llama, "a.safetensors"), save(wrong_state, "b.safetensors"))
        assert name in lines[1]
        assert any(line.split(": ")[0] != "changed" and f"{word} 0 → 1" in line and name in line for line in lines[2:])
        assert lines[-1].endswith(f"{word} 0 → 1: exit status 1")


# --- sentences -------------------------------------------------------------------------------------------------------


def run_diff(statecli, before: str, after: str, *options: str) -> list[str]:
    return statecli("diff", before, after, *options).out.splitlines()


def test_new_and_removed_layers_are_named(statecli, save, llama):
    unpruned_path = save(llama, "whole.safetensors")
    pruned_path = save(prune(llama), "pruned.safetensors")
    moved = "18 tensors, bit for bit; model.layers.1 is"
    assert f"model.layers.{{2,3}} → model.layers.{{1,2}}: {moved} removed" in run_diff(
        statecli, unpruned_path, pruned_path
    )
    reverse_lines = run_diff(statecli, pruned_path, unpruned_path)
    assert f"model.layers.{{1,2}} → model.layers.{{2,3}}: {moved} new" in reverse_lines
    assert not any(line.startswith("model.layers.1.") and "unrelated" in line for line in reverse_lines)


def test_a_cast_is_one_line_and_its_exceptions_are_named(statecli, save, llama):
    exported = {name: tensor.bfloat16() for name, tensor in llama.items()}
    for n in range(4):
        exported[f"model.layers.{n}.mlp.up_proj.weight"] *= 2
    before, after = save(llama, "a.safetensors"), save(exported, "b.safetensors")
    lines = run_diff(statecli, before, after)
    assert (
        f"{len(llama)} cast float32 → bfloat16: {len(llama) - 4} exactly rounded; 4 differ by more than rounding"
        in lines
    )
    assert sum(line.startswith("not rounded: ") for line in lines) == 3
    assert "… and 1 more not rounded" in lines


def test_equal_layers_share_a_line(statecli, save, llama):
    lines = run_diff(statecli, save(llama, "a.safetensors"), save(fuse(llama), "b.safetensors"), "-f", "markdown")
    assert "- `model.layers.{0..3}.self_attn.qkv_proj.weight`: = `[q_proj; k_proj; v_proj]`, exactly" in lines


def test_unrelated_layers_share_a_line(statecli, save, llama):
    """A model of another seed has a line for each tensor of a layer, with the largest cosine of all layers."""
    torch.manual_seed(7)
    other = {name: tensor if "norm" in name else 0.02 * torch.randn_like(tensor) for name, tensor in llama.items()}
    paths = save(llama, "a.safetensors"), save(other, "b.safetensors")
    lines = [line for line in run_diff(statecli, *paths) if "unrelated" in line and not line.startswith("changed")]
    assert len(lines) == 9
    cosines = [
        torch.cosine_similarity(llama[name].view(1, -1), other[name].view(1, -1)).abs().item()
        for name in llama
        if "up_proj" in name
    ]
    (line,) = [line for line in lines if "up_proj" in line]
    number = float(
        re.fullmatch(r"model\.layers\.\{0\.\.3\}\.mlp\.up_proj\.weight: unrelated \(\|cosine\| (.*) or less\)", line)[1]
    )
    assert max(cosines) <= number < max(cosines) + 0.01


def test_one_layer_that_changed_more_is_named(statecli, save):
    torch.manual_seed(0)
    before = {f"layers.{n}.w": torch.randn(16, 16) for n in range(40)}
    after = {name: tensor + 0.05 * torch.randn(16, 16) for name, tensor in before.items()}
    after["layers.17.w"] = before["layers.17.w"] + 0.6 * torch.randn(16, 16)
    output = "\n".join(run_diff(statecli, save(before, "a.pt"), save(after, "b.pt"), "-f", "table"))
    assert re.search(r"layers\.\{0\.\.16,18\.\.39\}\.w .* 0\.04\d?\.\.0\.05\d?", output)
    assert re.search(r"layers\.17\.w .* 0\.[56]\d? .*changed more than the other layers", output, re.DOTALL)


@pytest.mark.parametrize(("spread", "is_named"), [(1.0, True), (1.6, False)])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_a_layer_that_changed_four_times_as_much_is_named(statecli, save, spread, is_named, place):
    """The layer is named only if the other layers changed about equally: layers of a real fine-tune differ more."""
    torch.manual_seed(0)
    before = {f"layers.{n}.w": torch.randn(16, 16) for n in range(40)}
    sizes = {name: 0.05 * (spread if n % 7 == 3 else 1) for n, name in enumerate(before)}
    sizes[f"layers.{place}.w"] = 0.2
    after = {name: tensor + sizes[name] * torch.randn(16, 16) for name, tensor in before.items()}
    output = "\n".join(run_diff(statecli, save(before, "a.pt"), save(after, "b.pt"), "-f", "table"))
    assert ("changed more than the other layers" in output) is is_named
    assert bool(re.search(rf"layers\.{place}\.w .* 0\.(2|19|2\d)\b", output)) is is_named


# --- no claim without a cause ----------------------------------------------------------------------------------------

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.lists(st.integers(1, 12), max_size=3), min_size=10, max_size=10), dtypes)
def test_training_is_not_described_as_a_transformation(tmp_path_factory, seed, shapes, dtype):
    """A thousand random pairs of tensors, with small to large steps, are never described as a transformation."""
    generator = torch.Generator().manual_seed(seed)
    before = {f"layers.{n}.w": torch.randn(shape, generator=generator).to(dtype) for n, shape in enumerate(shapes)}
    step = 10.0 ** -(seed % 4)
    after = {
        name: (tensor + step * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in before.items()
    }
    result = compare_saved(tmp_path_factory.mktemp("pairs"), before, after)
    assert list_transformations(result) == {}


SMALL_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)


def draw_values(shape: list[int], dtype: torch.dtype, chance: random.Random) -> torch.Tensor:
    """Return values that are often equal by chance: masks, counters, ones with a little noise, a few whole numbers."""
    kind = chance.randrange(6)
    if kind == 0:
        return (torch.rand(shape) < chance.random()).to(dtype)
    if kind == 1:
        return torch.randint(-2 if dtype.is_signed else 0, 3, shape).to(dtype)
    if kind == 2:
        return (1 + 0.01 * torch.randn(shape)).to(dtype)
    if kind == 3:
        return torch.full(shape, chance.choice([0.0, 1.0])).to(dtype)
    return (torch.randn(shape) * chance.choice([0.02, 1, 50])).to(torch.float32).to(dtype)


def draw_shape(chance: random.Random) -> list[int]:
    return [chance.choice([1, 1, 2, 3, 4, 8, 16, 48, 64]) for _ in range(chance.choice([0, 1, 1, 1, 2, 2, 3]))]


def draw_pair(seed: int, tensors: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two checkpoints with unrelated tensors under names that invite every claim."""
    torch.manual_seed(seed)
    chance = random.Random(seed)  # noqa: S311 - not for cryptography
    before, after = {}, {}
    for n in range(tensors):
        layer, part = n // 6, ("q", "k", "v", "gate", "norm", "mask")[n % 6]
        shape, dtype = draw_shape(chance), chance.choice(SMALL_DTYPES)
        before[f"layers.{layer}.{part}.weight"] = draw_values(shape, dtype, chance)
        case = chance.randrange(5)
        if case == 0:
            shape = [chance.choice([size, size, 2 * size, max(1, size - 1)]) for size in shape]
        elif case == 1:
            dtype = chance.choice(SMALL_DTYPES)
        elif case == 2:
            shape = shape[::-1]
        elif case == 3:
            part = chance.choice(["qkv", "gate_up", "mask", "k"])
        after[f"layers.{layer}.{part}.weight"] = draw_values(shape, dtype, chance)
    return before, after


@pytest.mark.parametrize("seed", range(10))
def test_random_pairs_are_not_described_as_transformations(diff, seed):
    """A thousand random pairs of small tensors, of all dtypes, are equal only by chance."""
    before, after = draw_pair(seed, 100)
    assert list_kinds(diff(before, after)) <= {KIND.UNRELATED, KIND.CODES}


@pytest.mark.parametrize(("size", "is_claim"), [(1, False), (2, False), (40, True)])
def test_resize_needs_enough_equal_values(diff, size, is_claim):
    """Forty equal elements of a mask are evidence, two are not; three equal floats are."""
    torch.manual_seed(0)
    mask = torch.rand(64) < 0.5
    mask[:2] = torch.tensor([True, False])
    assert bool(list_transformations(diff({"m": mask}, {"m": mask[:size]}))) is is_claim
    assert list_transformations(diff({"w": torch.randn(8)[:3]}, {"w": torch.randn(9)})) == {}
    values = torch.randn(8)
    assert list_kinds(diff({"w": values[:3]}, {"w": values})) == {KIND.RESIZED}


def test_a_cast_scalar_is_evidence_only_next_to_others(diff):
    """A lone 0.5 in another type may be a different tensor; among casts of many values, the scalar was cast too."""
    torch.manual_seed(0)
    scalar, weights = {"s": torch.tensor([0.5])}, {"w": torch.randn(50)}
    for before, expected in ((scalar, {}), ({**scalar, **weights}, {"s": KIND.CAST, "w": KIND.CAST})):
        after = {name: tensor.bfloat16() for name, tensor in before.items()}
        assert {name: kind for name, (kind, *_) in list_transformations(diff(before, after)).items()} == expected
        assert list_findings(diff(before, after, cast=True)) == []


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 900), st.integers(1, 400), st.lists(st.integers(0, 359_999), max_size=4), st.booleans())
def test_rows_are_counted_across_blocks(tmp_path_factory, rows, columns, places, is_transposed):
    """Rows are counted for any number of elements per row, and the expected result comes from torch."""
    before = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    before = before.t().contiguous().t() if is_transposed else before
    after = before.clone()
    for place in places:
        after[place // columns % rows, place % columns] = -1.0
    longer_tensor = torch.cat([after, after[:1]])
    (change,) = compare_saved(tmp_path_factory.mktemp("rows"), {"w": before}, {"w": longer_tensor}).changes
    wrong_rows = (before != after).any(1).nonzero().flatten().tolist()
    if 2 * len(wrong_rows) > rows:
        claim = change.transformation  # similar rows are described with their cosine
        assert claim is None or claim.kind is not KIND.RESIZED or claim.cosine is not None
        return
    if before.numel() < 8 + 4 * len(places):  # too few equal values for a claim
        return
    assert change.transformation.rows == len(wrong_rows)
    assert list(change.transformation.first_rows) == wrong_rows[: element_checks.MAX_LISTED_ROWS]


# --- regressions -----------------------------------------------------------------------------------------------------


def test_a_stack_of_scalars_needs_enough_values(diff):
    """Four random scales are evidence; two counters are not."""
    torch.manual_seed(0)
    scales = {f"experts.{n}.scale": torch.randn(()) for n in range(4)}
    (stack,) = list_transformations(diff(scales, {"experts.scales": torch.stack(list(scales.values()))})).values()
    assert stack == (KIND.STACKED, 0, tuple(scales))
    steps = {f"experts.{n}.step": torch.tensor(n) for n in range(2)}
    assert list_transformations(diff(steps, {"experts.steps": torch.arange(2)})) == {}


def test_an_ignored_shape_is_no_transformation(diff):
    """A tensor with other rows is not reported as resized if the shape is ignored. A cast still is reported."""
    torch.manual_seed(0)
    before = {"w": torch.randn(40, 8), "v": torch.randn(64)}
    after = {"w": torch.cat([before["w"], torch.randn(8, 8)]), "v": before["v"].half()}
    expected = {"w": (KIND.RESIZED, 0, ()), "v": (KIND.CAST, 0, ())}
    assert list_transformations(diff(before, after)) == expected
    assert list_transformations(diff(before, after, ignore=(Field.SHAPE,))) == {"v": expected["v"]}
    assert list_transformations(diff(before, after, ignore=(Field.DTYPE,))) == {"w": expected["w"]}


def test_superscript_digits_in_names_do_not_fail(diff):
    """Python's int reads no superscript digit: the layers are compared by their names."""
    torch.manual_seed(0)
    values = [torch.randn(9) for _ in range(3)]
    old, new = ("l.1.w", "l.².w", "l.³.w"), ("l.0.w", "l.1.w", "l.².w")
    result = diff(dict(zip(old, values, strict=True)), dict(zip(new, values, strict=True)))
    moved = {after: (KIND.MOVED, 0, (before,)) for before, after in zip(old, new, strict=True)}
    assert list_transformations(result) == moved


def test_equal_layers_do_not_hide_a_swap(diff, statecli, save):
    """Layers 0 and 1 are equal, and 0 and 3 are swapped, so the old layer 0 could also be layer 1."""
    torch.manual_seed(0)
    layers = [torch.randn(8, 8) for _ in range(4)]
    layers[1] = layers[0].clone()
    before = {f"layers.{n}.w": layer for n, layer in enumerate(layers)}
    after = before | {"layers.0.w": before["layers.3.w"], "layers.3.w": before["layers.0.w"]}
    result = list_transformations(diff(before, after))
    assert result == {
        "layers.0.w": (KIND.SWAPPED, 0, ("layers.3.w",)),
        "layers.3.w": (KIND.SWAPPED, 0, ("layers.0.w",)),
    }
    output = "\n".join(run_diff(statecli, save(before, "a.pt"), save(after, "b.pt")))
    assert "removed" not in output
    assert " is new" not in output


def test_layers_of_a_new_model_are_recognised(statecli, save):
    """Biases and norms of a new GPT-2 are equal in all layers, so they do not identify a layer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_positions=20, n_embd=16, n_layer=4, n_head=2)
    state = dict(transformers.GPT2Model(config).state_dict())
    kept_tensors = {name: tensor for name, tensor in state.items() if not name.startswith("h.1.")}
    pruned = {name.replace("h.2.", "h.1.").replace("h.3.", "h.2."): tensor for name, tensor in kept_tensors.items()}
    output = "\n".join(run_diff(statecli, save(state, "a.pt"), save(pruned, "b.pt")))
    assert "h.{2,3} → h.{1,2}: " in output
    assert "h.1 is removed" in output


def test_half_negated_weights_are_not_unrelated(diff):
    """The cosine is zero, and half of the elements are unchanged."""
    torch.manual_seed(0)
    before = torch.randn(64, 64)
    after = torch.cat([before[:32], -before[32:]])
    assert list_transformations(diff({"w": before}, {"w": after})) == {}


def test_moved_tensor_is_not_a_moved_layer(statecli, save, llama):
    changed_state = dict(llama)
    changed_state["model.layers.3.self_attn.q_proj.weight"] = llama["model.layers.1.self_attn.q_proj.weight"]
    output = "\n".join(run_diff(statecli, save(llama, "a.pt"), save(changed_state, "b.pt")))
    assert "model.layers.3.self_attn.q_proj.weight: = model.layers.1.self_attn.q_proj.weight before" in output
    assert "removed" not in output
    assert " new" not in output


def test_copied_layers_are_recognised(statecli, save, llama):
    """Layers 0, 1, 1, 2, 2, 3, as in a merge: the sources of the copies are still in the model."""
    order = (0, 1, 1, 2, 2, 3)
    merged = {name: tensor for name, tensor in llama.items() if ".layers." not in name}
    for number, source in enumerate(order):
        start = f"model.layers.{source}."
        merged |= {f"model.layers.{number}.{n.removeprefix(start)}": t for n, t in llama.items() if n.startswith(start)}
    lines = run_diff(statecli, save(llama, "a.pt"), save(merged, "b.pt"))
    assert "model.layers.{1,2} → model.layers.{2,3}: 18 tensors, bit for bit" in lines
    assert "model.layers.{2,3} → model.layers.{4,5}: 18 tensors, bit for bit" in lines


def test_fine_tune_in_a_narrower_dtype_is_not_a_cast(diff, llama):
    """A step below the spacing of bfloat16 leaves most values the nearest or their neighbours, by chance."""
    torch.manual_seed(0)
    tuned = {name: (tensor + 1e-3 * torch.randn_like(tensor)).bfloat16() for name, tensor in llama.items()}
    assert KIND.CAST not in list_kinds(diff(llama, tuned))
    tuned["ones"], llama = torch.ones(4).bfloat16(), {**llama, "ones": torch.ones(4)}
    assert KIND.CAST not in list_kinds(diff(llama, tuned))


@pytest.mark.parametrize("size", [2, 63, 64, 65, 4096])
def test_small_tensors_at_the_end_of_a_file_do_not_fail(diff, size):
    """A part of a tensor may end where the file ends, and no part is read past this end."""
    before = {"model.1.norm": torch.ones(size), "model.1.w": torch.randn(size, 4), "model.norm": torch.ones(size)}
    after = {name.replace("model", "m"): tensor.half() for name, tensor in before.items()}
    result = diff(before, after, names=("a.safetensors", "b.safetensors"))
    assert {c.status for c in result.changes} == {Status.ADDED, Status.REMOVED}


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.float32, 24), (torch.bool, 6), (torch.complex64, 48)], ids=str)
def test_a_part_of_a_tensor_has_its_own_sizes(save, dtype, nbytes):
    (row,) = read_checkpoint(save({"w": torch.ones(4, 5).to(dtype)}, "a.safetensors")).tensors
    part = replace_data(row, narrow(narrow(locate(row.data, "w"), 0, 1, 2), 1, 0, 3))
    assert (part.shape, part.elements, part.nbytes) == ((2, 3), 6, nbytes)


def test_momentum_is_not_called_unrelated(diff):
    torch.manual_seed(0)
    linear = torch.nn.Linear(40, 40)
    optimizer = torch.optim.Adam(linear.parameters(), 1e-4)
    states = []
    for _ in range(2):
        for _ in range(30):
            optimizer.zero_grad()
            linear(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
        model = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
        states.append({"model": model, "optimizer": copy.deepcopy(optimizer.state_dict())})
    assert list_transformations(diff(*states)) == {}


def test_zeros_are_not_described_as_a_join(diff):
    before = {"attn.q.bias": torch.zeros(4), "attn.k.bias": torch.zeros(4)}
    before |= {f"experts.{n}.bias": torch.zeros(4) for n in range(3)}
    after = {"attn.qk.bias": torch.zeros(8), "experts.biases": torch.zeros(3, 4)}
    assert list_transformations(diff(before, after)) == {}


def test_row_that_became_a_column_is_not_a_transformation(diff):
    """A transpose of one row and zeros of another shape are not transformations."""
    torch.manual_seed(0)
    before = {"w": torch.randn(1, 64), "z": torch.zeros(8, 64)}
    assert list_transformations(diff(before, {"w": before["w"].t(), "z": torch.zeros(64, 8)})) == {}


def test_stack_of_transposes_is_described(statecli, save):
    torch.manual_seed(0)
    experts = {f"experts.{n}.w": torch.randn(6, 4) for n in range(4)}
    stack = torch.stack([tensor.t() for tensor in experts.values()])
    stack[2, 1, 3] += 1
    lines = run_diff(statecli, save(experts, "a.pt"), save({"experts.w": stack}, "b.pt"))
    assert "experts.w: = stack of the transposes of experts.{0..3}.w, but column 1 of 2 differs" in lines


def test_layers_of_two_sections_are_different_layers(statecli, save, llama):
    pruned = prune(llama)
    paths = save({"model": llama, "ema": llama}, "a.pt"), save({"model": pruned, "ema": llama}, "b.pt")
    lines = [line for line in run_diff(statecli, *paths) if "→" in line and "bit for bit" in line]
    assert lines == [
        "model.model.layers.{2,3} → model.model.layers.{1,2}: 18 tensors, bit for bit; model.model.layers.1 is removed"
    ]


@pytest.mark.parametrize("options", [("--atol", "1"), ("--rtol", "1"), ("--ignore", "dtype"), ("--metadata-only",)])
def test_cast_contradicts_options_that_hide_a_cast(statecli, save, options):
    paths = save({"w": torch.randn(4)}, "a.pt"), save({"w": torch.randn(4)}, "b.pt")
    result = statecli("diff", *paths, "--cast", *options)
    assert (result.code, result.out) == (2, "")
    assert "--cast" in result.err


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_cast_to_integers_is_not_exact(diff, dtype):
    assert list_findings(diff({"w": torch.ones(4)}, {"w": torch.ones(4, dtype=dtype)}, cast=True)) == [
        ("inexact-cast", "w")
    ]


def test_both_roundings_from_float64_to_float16_are_exact(diff):
    """torch rounds to float32 first, numpy rounds directly."""
    torch.manual_seed(0)
    values = torch.randn(200_000, dtype=torch.float64)
    rounded_once = torch.from_numpy(values.numpy().astype("float16"))
    assert (rounded_once != values.half()).any()
    for rounded in (rounded_once, values.half()):
        assert list_findings(diff({"w": values}, {"w": rounded}, cast=True)) == []


def test_many_candidates_for_a_join_take_under_ten_seconds(diff):
    """The rows of all candidates are read once, not each combination."""
    torch.manual_seed(0)
    before = {f"m.{n}.f{k}.weight": torch.randn(8, 8) for n in range(20) for k in range(12)}
    after = {f"m.{n}.g{k}.weight": torch.randn(32, 8) for n in range(20) for k in range(3)}
    start = time.process_time()
    assert list_transformations(diff(before, after)) == {}
    assert time.process_time() - start < 10


def test_sample_has_at_most_1024_elements_for_any_shape():
    data = TensorData(ByteRange("a", 0, 2**40), "float32", (2, 1024, 4096), 0, (1024 * 4096, 4096, 1))
    for shape in ((2, 1024, 4096), (1, 10**9), (10**9,), (3,), (), (70_000, 3)):
        strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
        sample = take_rows(replace(data, shape=shape, strides=strides))
        assert 1 <= math.prod(sample.shape) <= 1024


def test_a_complex128_is_compared_by_both_words(diff):
    """numpy has no integer of 16 bytes; the cases are new first rows, a swap and one different imaginary part."""
    torch.manual_seed(0)
    before = {"a": torch.randn(12, 5, dtype=torch.complex128), "b": torch.randn(12, 5, dtype=torch.complex128)}
    after = {"a": before["b"].clone(), "b": before["a"].clone()}
    assert {kind for kind, *_ in list_transformations(diff(before, after)).values()} == {KIND.SWAPPED}
    grown = {"a": torch.cat([torch.randn(2, 5, dtype=torch.complex128), before["a"]]), "b": before["b"]}
    assert list_transformations(diff(before, grown))["a"][0] is KIND.RESIZED
    grown["a"].imag[7, 3] += 1
    assert diff(before, grown).changes[0].transformation.rows == 1
