"""Differences as training makes them skip the search for transformations, and the result is the same as with it."""

from __future__ import annotations

import random

import torch

from statecli.commands.diff import change_details, value_comparison
from statecli.commands.diff.request import Request
from statecli.commands.diff.run import compare_targets
from statecli.commands.diff.transformations.ordinary_training import is_training

KINDS = (
    *("none", "scale", "copy", "zeros", "constant", "transpose", "permute", "cast", "cut", "replace"),
    *("bias", "bias"),
)


def draw_model(rng):
    """Return the tensors before and after some training of a small model, and their names."""
    width = rng.choice([3, 8, 20])
    shapes = {f"layers.{n}.{name}": shape for n in range(3) for name, shape in (("w", (width, width)), ("b", (width,)))}
    shapes |= {"0.weight": (width, 4), "1.weight": (width, 4), "ema.0.weight": (width, 4), "steps": ()}
    before = {name: torch.randn(shape) for name, shape in shapes.items()}
    before["steps"] = torch.tensor(rng.randrange(9))
    after = {name: tensor.clone() for name, tensor in before.items()}
    names = sorted(set(before) - {"steps"})
    for name in rng.sample(names, rng.randint(1, len(names))):
        after[name] += rng.choice([0.0, 1e-3, 0.02]) * torch.randn(after[name].shape)
    after["steps"] = before["steps"] + 1
    return before, after, names


def change_two_tensors(rng, before, after, names):
    first, second = rng.sample(names, 2)
    kind = rng.choice(KINDS)
    if kind == "scale":
        after[first] = before[first] * rng.choice([0.5, 2.0, 1.3])
    elif kind == "copy" and before[first].shape == before[second].shape:
        after[first] = before[second].clone()
    elif kind in ("zeros", "constant"):
        before[first] = torch.zeros_like(before[first])
        after[first] = torch.full_like(before[first], 0.5) if kind == "constant" else after[first]
    elif kind == "transpose" and before[first].ndim == 2:
        after[first] = before[first].t().contiguous()
    elif kind == "permute" and before[first].ndim:
        after[first] = before[first].flip(0)
    elif kind == "cast":
        after[first] = after[first].half()
    elif kind == "cut" and before[first].ndim:
        after[first] = before[first][:-1].clone()
    elif kind == "bias":
        name = rng.choice(["head.bias", "layers.0.b"])
        before.setdefault("head.bias", torch.randn(40))
        after.setdefault("head.bias", before["head.bias"].clone())
        after[name] = after[name] + rng.choice([0.1, 1.0]) * torch.randn(after[name].shape)
        after[name] *= rng.choice([1.0, -1.0])
    elif kind == "replace":
        after[first] = torch.randn(before[first].shape)


def test_skipped_search_gives_the_same_diff(save, monkeypatch):
    """Each diff equals the diff with the search, and 16 to 49 of the 60 diffs skip the search."""
    skipped_searches = []
    for seed in range(60):
        rng = random.Random(seed)  # noqa: S311  # reproducible, no secret
        torch.manual_seed(seed)
        before, after, names = draw_model(rng)
        for _ in range(rng.choice([0, 0, 1, 2])):
            change_two_tensors(rng, before, after, names)
        suffix = ("safetensors", "pt")[seed % 2]
        request = Request(save(before, f"a.{suffix}"), save(after, f"b.{suffix}"), jobs=1)
        with monkeypatch.context() as patch:
            note = lambda changes: skipped_searches.append(is_training(changes)) or skipped_searches[-1]  # noqa: E731
            patch.setattr(change_details, "is_training", note)
            light = compare_targets(request)
            patch.setattr(change_details, "is_training", lambda _: False)
            patch.setattr(value_comparison, "compare_plain_pairs", lambda *_: None)
            assert light == compare_targets(request), seed
    assert 15 < sum(skipped_searches) < 50
