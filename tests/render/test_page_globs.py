"""The globs that a page copies are compared with the globs of browse."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from importlib import resources

import pytest

from statecli.browse.globs import write_globs
from statecli.core.escaping import escape
from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.selection import Selection, select

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

LAYERS = [f"layers.{n}.{name}" for n in range(12) for name in ("q.weight", "q.bias")] + ["norm.weight"]
HOSTILE = ["a*b", "axb", "x[0].w", "x[1].w", "w*", "q?", "qa", "a'b", "\x1b[31m", "\u202e.a", "a b.c", "é.0.w", "é.1.w"]
HOSTILE += ["n{0,1}.w", "n0.w", "{a}", "a", "x.{0..1}", "x.0.1", "x.0.2", "x.1.1", "x.1.2", "x.1"]


def build_state(names):
    return ModelState("x", "safetensors", tuple(TensorInfo(name, "float32", (1,), 1, 4) for name in names))


def run_page(cases):
    """Return the globs and the text of each case (names and marked positions) from the script of the page."""
    folder = resources.files("statecli.render")
    script = "\n".join(folder.joinpath(name).read_text("utf-8") for name in ("filter.js", "globs.js"))
    run = (
        "console.log(JSON.stringify(cases.map(([names, marked]) => {"
        "const globs = Globs.write(names, new Map(), marked); return [globs, globs && Globs.format(globs)]; })))"
    )
    code = f"{script}\nconst cases = {json.dumps(cases)};\n{run}"
    return json.loads(subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True).stdout)


def test_page_writes_the_same_globs_as_browse():
    """The cases are whole modules, repeated layers, single tensors, and names with brackets and wildcards."""
    plain = [name for name in HOSTILE if escape(name) == name]
    chosen = [
        set(range(25)),
        {2, 3},
        set(range(0, 24, 2)),
        {0, 1, 2, 3, 4, 5},
        {7},
        {24, 3},
        set(range(24)),
        {0, 1, 6, 7},
        {0, 2, 4, 8},
    ]
    cases = [(LAYERS, marked) for marked in chosen]
    cases += [(plain, {first, second}) for first in range(len(plain)) for second in range(len(plain))]
    page_globs = run_page([(names, sorted(marked)) for names, marked in cases])
    for (names, marked), (globs, text) in zip(cases, page_globs, strict=True):
        browse_globs = write_globs(build_state(names), marked, {})
        assert tuple(globs or ()) == browse_globs.globs, (names, marked)
        assert (text or "") == browse_globs.text


def test_the_globs_of_hostile_names_select_exactly_these_tensors():
    """The globs are given to `-i` as by a shell; a page has only escaped names."""
    cases = [{first, second} for first in range(len(HOSTILE)) for second in range(len(HOSTILE))]
    ours = run_page([([escape(name) for name in HOSTILE], sorted(marked)) for marked in cases])
    state = build_state(HOSTILE)
    for marked, (globs, text) in zip(cases, ours, strict=True):
        if globs is None:
            continue
        selected = select(state, Selection(include=tuple(shlex.split(text)[1::2])), "x").tensors
        assert {tensor.fqn for tensor in selected} == {HOSTILE[n] for n in marked}
    assert sum(globs is not None for globs, _ in ours) > len(cases) * 0.8
