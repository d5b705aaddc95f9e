"""Names truncated to a width, by Python for browse and by the script of the page."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from importlib import resources

import pytest

from statecli.core.short_names import CommonEnds, find_common_ends, shorten_name

NAMES = [
    f"base_model.model.model.language_model.layers.{n}.self_attn.{name}.weight"
    for n in (2, 3, 30)
    for name in ("q_proj", "down_projection")
]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, "base_model.model.model.language_model.layers.3.self_attn.q_proj.weight"),
        (40, "…3.self_attn.q_proj.weight"),
        (25, "…3.self_attn.q_proj…"),
        (12, "…3.…q_proj…"),
        (10, "…3.…proj…"),
    ],
)
def test_common_ends_of_names_are_cut_first(width, expected):
    """The common start, then the common end, then words, never the number of the layer."""
    assert shorten_name(NAMES[2], find_common_ends(NAMES), width) == expected


def test_the_end_of_most_names_is_cut_before_their_words():
    """`.weight` says less than the word before, also in a list with other endings."""
    names = ["model.layers.0.post_attention_layernorm.weight", "optimizer.step"]
    assert shorten_name(names[0], find_common_ends(names), 30) == "…0.post_attention_layernorm…"


def test_the_common_ends_are_whole_parts():
    """`layers.3` and `layers.30` share `layers.`; a single name, and equal names, keep theirs."""
    assert find_common_ends(["layers.3", "layers.30"]) == CommonEnds(7, 0)
    assert find_common_ends(["a.weight", "b.weight"]) == CommonEnds(0, 7)
    assert find_common_ends(["a.b.c"]) == find_common_ends([]) == CommonEnds()
    assert find_common_ends(["a.b", "a.b"]) == CommonEnds(2, 0)


def build_lists():
    source = random.Random(0)  # noqa: S311 - the same lists in each run
    parts = ["model", "layers", "attn", "0", "12", "3x", "", "weight", "q" * 30]
    return [
        (names, source.randint(1, 40))
        for names in ([".".join(source.choices(parts, k=source.randint(1, 8))) for _ in range(4)] for _ in range(300))
    ]


def test_a_cut_name_fits_and_has_its_numbers():
    """The kept parts are in the name, in order; a number is cut only if no other part is left."""
    for names, width in [*build_lists(), ([*NAMES], 20)]:
        for name in names:
            ends = find_common_ends(names)
            short_name = shorten_name(name, ends, width)
            assert re.fullmatch(".*".join(map(re.escape, short_name.split("…"))), name)
            assert len(short_name) <= max(width, 2)
            digits = "".join(re.findall(r"\d", name[ends.start :]))
            if len(digits) * 7 + 7 < width:
                assert set(digits) <= set(short_name)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_cuts_names_as_browse_does():
    """The same names in node."""
    script = resources.files("statecli.render").joinpath("names.js").read_text("utf-8")
    cases = [*build_lists(), *(([*NAMES], width) for width in (10, 12, 25, 40, 80))]
    run = (
        f"const cases = {json.dumps(cases)}; console.log(JSON.stringify(cases.map(([names, width]) =>"
        " names.map((name) => Names.cut(name, Names.findCommonEnds(names), width)"
        ".map(([text, isCut]) => isCut ? '…' : text).join('')))))"
    )
    output = subprocess.run(["node", "-"], input=f"{script}\n{run}", capture_output=True, text=True, check=True).stdout
    for (names, width), actual in zip(cases, json.loads(output), strict=True):
        ends = find_common_ends(names)
        expected = [shorten_name(name, ends, width) for name in names]
        assert actual == expected
