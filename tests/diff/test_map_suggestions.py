"""statecli suggests a `--map` rule if a prefix keeps names apart."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from statecli.commands.diff.result import Status

from .conftest import map_changes


def build_encoder(prefix: str, scale: float, *other_names: str) -> dict[str, torch.Tensor]:
    """Return an encoder of three layers behind a prefix, with values multiplied by `scale`."""
    names = ["embed.weight", *(f"layer.{n}.weight" for n in range(3))]
    state = {f"{prefix}{name}": torch.arange(4.0 + n) * scale + n for n, name in enumerate(names)}
    return state | {name: torch.arange(9.0) * scale for name in other_names}


def find_suggested_rule(result) -> str | None:
    """Return the rule of the note as a shell reads it; None if no rule is suggested."""
    for note in result.notes:
        if note.name == "prefix-apart":
            return shlex.split(re.search(r"add (--map .*)", note.message)[1])[1]
    return None


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (build_encoder("bert.", 1, "head.weight"), build_encoder("", 2), r"^bert\.="),
        (build_encoder("", 1), build_encoder("bert.", 2, "head.weight"), "^=bert."),
        (
            build_encoder("", 1, "head.weight"),
            build_encoder("bert.", 2, "head.weight"),
            "^(?=(embed|layer)([.]|$))=bert.",
        ),
        (build_encoder("a.b.", 1, "head.weight"), build_encoder("", 2, "head.weight"), r"^a\.b\.="),
    ],
    ids=["gone", "new", "beside what has its name", "two deep"],
)
def test_suggested_rule_pairs_all_tensors(before, after, rule, diff):
    """With the suggested rule, every tensor of both sides is compared, and existing pairs stay."""
    assert find_suggested_rule(diff(before, after)) == rule
    mapped = diff(before, after, map=(rule,))
    assert find_suggested_rule(mapped) is None
    pair_count = min(len(before), len(after))
    assert sum(change.status is Status.CHANGED for change in map_changes(mapped).values()) == pair_count


def test_no_rule_is_suggested_without_a_gain(diff):
    """No rule is suggested for equal bytes, other shapes, a single tensor or a minority of the tensors."""
    assert find_suggested_rule(diff(build_encoder("bert.", 1), build_encoder("", 1))) is None
    assert (
        find_suggested_rule(diff({"b.x": torch.ones(2), "c": torch.ones(1)}, {"x": torch.zeros(2), "d": torch.ones(9)}))
        is None
    )
    wider = {name: torch.ones(50) for name in build_encoder("", 2)}
    assert find_suggested_rule(diff(build_encoder("bert.", 1, "head"), wider)) is None
    extra_tensors = (
        {f"o{n}": torch.arange(30.0 + n) for n in range(9)},
        {f"p{n}": torch.arange(60.0 + n) for n in range(9)},
    )
    assert (
        find_suggested_rule(diff(build_encoder("bert.", 1) | extra_tensors[0], build_encoder("", 2) | extra_tensors[1]))
        is None
    )


def test_no_rule_is_suggested_that_breaks_pairs(diff):
    before = {"bert.a.w": torch.ones(2), "bert.b.w": torch.ones(2), "bert.c.w": torch.ones(2)}
    after = {"bert.c.w": torch.zeros(2), "a.w": torch.zeros(2), "b.w": torch.zeros(2)}
    assert find_suggested_rule(diff(before, after)) is None


def build_layers(start: str, norm: tuple[str, str], scale: float) -> dict[str, torch.Tensor]:
    """Four layers whose tensors have the same shapes in pairs, as a norm's weight and bias."""
    generator = torch.Generator().manual_seed(int(scale * 10))
    names = [f"{start}.{n}.{name}" for n in range(4) for name in ("query.weight", *(f"norm.{end}" for end in norm))]
    return {name: torch.randn((8, 8) if "query" in name else (8,), generator=generator) for name in names}


@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [
        (("encoder.layer", ("gamma", "beta")), ("encoder.layer", ("weight", "bias")), 2),
        (("encoder.layer", ("weight", "bias")), ("enc.layer", ("weight", "bias")), 1),
        (("encoder.layer", ("weight", "bias")), ("enc.block", ("weight", "bias")), 1),
        (("model.encoder", ("weight", "bias")), ("model.decoder.blocks", ("weight", "bias")), 1),
    ],
)
def test_suggested_rules_for_components_pair_all_tensors(before, after, rules, statecli, save):
    """With the options of the note, as a shell reads them, no tensor is added or removed."""
    old, new = build_layers(*before, 1), build_layers(*after, 2)
    paths = save(old, "a.pt"), save(new, "b.pt")
    note = next(line for line in statecli("diff", *paths, "-f", "json").out.splitlines() if "components-apart" in line)
    options = shlex.split(re.search(r"add (--map .*?)\"", note.replace("\\\\", "\\"))[1])
    assert options.count("--map") == rules
    output = statecli("diff", *paths, *options).out
    assert f"{len(old)} of {len(new)} parameters changed" in output
    for name in new:
        assert re.search(rf"^changed .*{re.escape(name)} ", output, re.MULTILINE), name


def test_no_rule_is_suggested_for_components_of_other_shapes(diff):
    old = {f"a.{n}.w": torch.ones(n + 1) for n in range(6)}
    new = {f"b.{n}.w": torch.ones(n + 20) for n in range(6)}
    assert "components-apart" not in [note.name for note in diff(old, new).notes]
