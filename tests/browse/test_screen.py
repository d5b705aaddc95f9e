"""The screen of browse: keys and mouse, simulated by the pilot of textual, and the text on the screen."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.inspect.run import Request, inspect
from statecli.core.errors import MissingDependency, UsageError
from statecli.core.model_state import ModelState, Origin, Stats, TensorInfo
from statecli.core.selection import Selection, select
from statecli.requests import browse
from statecli.requests.outcome import Caller

pytest.importorskip("textual")

from textual import events

from statecli.browse import editor, run
from statecli.browse.app import Browser
from statecli.browse.columns import ListColumn
from statecli.browse.help import format_help
from statecli.browse.panel import _describe_stats
from statecli.browse.peek import Versions
from statecli.browse.screen_state import ScreenModel

from .conftest import open_model

#: Columns and lines.
SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.fixture
def in_folder(first, second, monkeypatch):
    """Run in the folder of both checkpoints."""
    monkeypatch.chdir(first.parent)


def show(app):
    """The text of the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def drive(path, *keys, **options):
    """Return the result of `look` after the keys; a callable among the keys is called with the pilot."""
    (result,) = drive_in_steps(path, keys, **options)
    return result


def drive_in_steps(path, *steps, size=(80, 24), other=None, look=show):
    """Return the result of `look` after the keys of each step, in one screen."""

    async def run_keys():
        second = None if other is None else inspect(Request(str(other))).state
        app = Browser(open_model(path), Versions({}), run_read_other, second)
        results = []
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            for keys in steps:
                for key in keys:
                    await (key(pilot) if callable(key) else press(pilot, key))
                await settle(pilot)
                results.append(look(app))
        assert app.failure is None
        return results

    return asyncio.run(run_keys())


def run_read_other(text):
    """Read a second target, as the command does."""
    return run._read_other(Versions({}), text)


@pytest.fixture(autouse=True)
def short_rest(monkeypatch):
    """The cursor rests for a shorter time before values are read."""
    monkeypatch.setattr("statecli.browse.app.CURSOR_REST_S", 0.01)


async def press(pilot, *keys):
    """Press keys, each after the previous key was handled. `pilot.press` sleeps 0.04 s for each instead."""
    for key in keys:
        name = key if len(key) > 1 or key.isalnum() else KEY_NAMES[key]
        pilot.app.post_message(events.Key(name, CHARACTERS.get(name, name if len(name) == 1 else None)))
        await pilot.pause(0)


async def settle(pilot):
    """Wait until nothing is read: the rest of the cursor, then the thread."""
    await pilot.pause(0.03)
    for _ in range(1000):
        app = pilot.app
        rest = app._rest_timer._task
        rests = rest is not None and not rest.done()  # a busy machine needs longer
        if not (rests or app._reader.is_busy or app._progress or app._position_being_read is not None):
            break
        await pilot.pause(0.005)
    await pilot.pause(0)


KEY_NAMES = {
    " ": "space",
    ".": "full_stop",
    "*": "asterisk",
    "/": "slash",
    ">": "greater_than_sign",
    ":": "colon",
    "!": "exclamation_mark",
    "_": "underscore",
    "-": "minus",
    "[": "left_square_bracket",
    "]": "right_square_bracket",
}
CHARACTERS = {name: character for character, name in KEY_NAMES.items()}


def list_keys(text):
    """The keys of a text."""
    return [KEY_NAMES.get(character, character) for character in text]


# --- the screen ---------------------------------------------------------------------------------------------------


def check_screen(name, screen):
    """Compare with the stored screen; GOLDEN=write stores the screen."""
    path = Path(__file__).parent / "screens" / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{screen}\n")
    assert f"{screen}\n" == path.read_text()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_screen_of_a_module_is_as_recorded(in_folder, size):
    """The tree left, the totals right, the keys below; each line fits."""
    screen = drive("first.safetensors", size=size)
    check_screen(f"module-{size[0]}", screen)
    assert all(len(line) <= size[0] for line in screen.splitlines())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_screen_of_a_tensor_is_as_recorded(in_folder, size):
    """Facts, place in the file, statistics, histogram, first values and bytes, and the difference."""
    screen = drive("first.safetensors", *list_keys("/q_proj"), "enter", "D", size=size, other="second.safetensors")
    check_screen(f"tensor-{size[0]}", screen)


def test_narrow_screen_shows_the_panel_only_after_v(in_folder):
    """60 columns are for the list."""
    assert ["│" in screen for screen in drive_in_steps("first.safetensors", [], "v", size=(60, 20))] == [False, True]
    assert "│" not in drive("first.safetensors", "v", size=(80, 24))


def test_a_tiny_screen_does_not_fail(in_folder):
    """20 columns and 5 lines."""
    assert "bias" in drive("first.safetensors", "down", "end", "home", "v", "v", size=(20, 5))


# --- keys ---------------------------------------------------------------------------------------------------------


def list_rows(app):
    return [app.model.get_row(number).label for number in range(app.model.count)]


def test_filter_applies_during_typing(in_folder):
    """Enter keeps the filter, escape removes the filter."""
    steps = (list_keys("/norm"), ["enter"], ["escape"], list_keys("/norm"), ["escape"])
    typed, kept, removed, again, left = drive_in_steps("first.safetensors", *steps, look=list_rows)
    assert len(typed) == len(kept) == len(again) == 4
    assert "{0..3}" in removed
    assert "{0..3}" in left


def test_arrow_down_moves_from_the_filter_to_the_list(in_folder):
    """After the arrow, a key is a command again, not text of the filter."""
    assert drive("first.safetensors", *list_keys("/norm"), "down", "space", look=lambda app: len(app.model.marked)) == 1


def test_typing_replaces_the_previous_filter(in_folder):
    """The old text is selected: a letter replaces the text, an arrow keeps it, and enter changes nothing."""
    steps = (
        [*list_keys("/norm"), "enter", "slash", "enter"],
        ["slash", "end", "x", "enter"],
        ["slash", *"embed", "enter"],
        ["slash", "backspace"],
    )
    texts = drive_in_steps("first.safetensors", *steps, look=lambda app: app.model.filter_text)
    assert texts == ["norm", "normx", "embed", ""]


def test_filter_without_a_match_shows_a_message(in_folder):
    """The keys of the filter are shown during typing, then the keys of the list; every key is harmless."""
    every_key = [*"jkhltoOrsSdDae[]*", "space", "y", "enter", "escape"]
    typing, kept, screen = drive_in_steps("first.safetensors", list_keys("/zzz"), ["enter"], every_key)
    assert typing.splitlines()[-3:] == [
        "zzz",
        "zzz: no tensor matches",
        "enter: keep the filter   esc: remove it   ↓: list",
    ]
    assert kept.splitlines()[-1].startswith("/ filter  space mark")
    assert "no tensor matches" in kept
    assert "first.safetensors" in screen


def test_modules_open_and_close(in_folder):
    """Modules open and close with enter, with the arrows, and all at once."""
    steps = ([], [*["down"] * 5, "right"], ["left"], ["enter"], ["enter"], ["asterisk"])
    before, opened, closed, entered, left, everything = drive_in_steps("first.safetensors", *steps, look=list_rows)
    assert opened[6:10] == ["0", "1", "2", "3"]
    assert entered == opened
    assert closed == left == before
    assert everything.count("q_proj.weight") == 4


def test_o_sorts_and_r_reverses(in_folder):
    """The first order is by size, largest first, then smallest first; in the tree, and in the list."""
    views = drive_in_steps("first.safetensors", [], "o", "O", "to", "r", look=lambda app: (list_rows(app), show(app)))
    (before, _), (tree, screen), (back, _), (largest, _), (smallest, _) = views
    assert tree[0] == "model"
    assert re.search("{0..3} .* 4 × 288 B", screen)
    assert back == before
    assert largest[0] in ("lm_head.weight", "model.embed.weight")
    assert "norm.weight" in smallest[0]


def test_all_statistics_find_the_nan(in_folder):
    """S reads the statistics of all listed tensors; sorted by nan, the tensor is first."""
    read, first = drive_in_steps("second.safetensors", "S", "oo", size=(120, 40))
    assert "statistics of 15 read: 1 NaN in model.layers.3.norm.weight" in read
    assert "› model.layers.3.norm.weight" in first


def test_last_line_names_unusual_tensors(tmp_path, in_folder):
    """One tensor of each kind is named, truncated so that its number stays; no comma is left at the end."""
    path = save_layers(tmp_path)
    wide = drive(path, "S", size=(200, 24)).splitlines()[-1]
    assert wide == (
        "statistics of 39 read: 1 NaN in model.h.2.norm.weight; 1 Inf in model.h.4.attn.q.weight; "
        "1 outlier in model.h.7.attn.v.weight"
    )
    assert " ".join(drive(path, "S", size=(90, 24)).splitlines()[-2:]) == wide
    narrow = drive(path, "S", size=(90, 12)).splitlines()[-1]
    assert re.fullmatch(r"statistics of 39 read: 1 NaN in …2\..*; 1 Inf in …4\..*; 1 outlier in …7\..*", narrow)
    assert drive("first.safetensors", "S").splitlines()[-1] == "statistics of 15 read: no NaN, Inf or outlier"


def test_panel_counts_shared_storage_once(tmp_path):
    """A size below 1,000 is written once; sums count a storage once, and say so."""
    weight = torch.ones(400, 2)
    torch.save({"a.w": weight, "a.v": weight, "n": torch.ones(1)}, tmp_path / "tied.pt")
    screen, last = drive_in_steps(tmp_path / "tied.pt", [], ["end"], size=(160, 40))
    assert "1 element, 4 B\n" in last.replace("  ", "")
    assert "2 tensors, 3.2 kB" in screen
    assert "(shared storage is counted once)" in screen
    assert re.search(r"a +float32 +2 tensors +800 +3.2 kB", screen)


def test_last_line_names_the_order_and_esc_restores_the_tree(in_folder):
    """The last line names the order and its neighbours; esc shows the tree, with the same selected row."""
    steps = ([*["down"] * 3, "o"], ["O"], ["o"], ["escape"], ["o", "r"])
    views = drive_in_steps("first.safetensors", *steps, look=lambda app: (app.model.cursor, show(app).splitlines()))
    (_, ordered), (by_key, _), _, (by_escape, _), (_, reverse) = views
    assert ordered[-1] == "by size, largest first  o: by name  O: tree  r: reverse  esc: tree"
    assert "by size, largest first" in ordered[0]
    assert by_key == by_escape == 3
    assert "by size, smallest first" in reverse[0]
    before, _, after = drive_in_steps(
        "first.safetensors", [*list_keys("/norm"), "enter"], "o", ["escape"], look=list_rows
    )
    assert after == before


def test_without_numpy_names_are_compared_with_a_second_target(in_folder, monkeypatch):
    """The panel says what to install, and the screen stays."""
    from statecli.values import compare

    def refuse(*_, **__):
        raise MissingDependency("reading values needs numpy, which is not installed: pip install numpy")

    monkeypatch.setattr(compare, "compare_pairs", refuse)
    screen = drive("first.safetensors", "t", "down", other="second.safetensors", size=(200, 40))
    assert "needs numpy" in screen


def test_result_after_the_screen_closes_raises_no_error(in_folder):
    """The widgets are gone then, but a result or the timer of the cursor may still wait in the queue."""

    async def close_and_deliver():
        app = Browser(open_model("second.safetensors"), Versions({}), run_read_other)
        async with app.run_test() as pilot:
            await settle(pilot)
        arrived = []
        with app._context():
            app.on_browser_read(Browser.Read(lambda: arrived.append(1)))
            app._read_current()
            app.on_tensor_list_moved()
        return arrived

    assert asyncio.run(close_and_deliver()) == [1]


def test_closed_module_shows_the_nan_of_its_tensors(in_folder):
    """After the statistics were read: NaN of a layer, in the tree and in the panel."""
    steps = ([], ["S", *["down"] * 3], ["right"], ["t", "end"])
    before, closed, opened, flat = drive_in_steps("second.safetensors", *steps, size=(120, 40))
    assert "! NaN" not in before
    assert "▸ {0..3} ! NaN" in closed
    assert "1 tensor contains NaN:" in closed
    assert "▾ {0..3} !  " in opened
    assert "▸ 3 ! NaN" in opened
    assert "model.layers.3.norm.weight ! NaN" in flat
    assert "▸ {0..3} ! " in drive("second.safetensors", "S")


def save_layers(folder):
    """Twelve layers with an outlier, a NaN and an infinity, and an optimizer."""
    generator = torch.Generator().manual_seed(0)
    model = {}
    for n in range(12):
        for name in ("q", "v"):
            scale = 40 if (n, name) == (7, "v") else 1
            model[f"h.{n}.attn.{name}.weight"] = torch.randn(8, 8, generator=generator) * scale
        model[f"h.{n}.norm.weight"] = torch.ones(8)
    model["h.2.norm.weight"][0] = float("nan")
    model["h.4.attn.q.weight"][1, 1] = float("-inf")
    optimizer = {"state": {n: {"exp_avg": torch.zeros(50, 50)} for n in range(3)}, "param_groups": []}
    torch.save({"model": model, "optimizer": optimizer}, folder / "layers.pt")
    return folder / "layers.pt"


def test_the_table_of_layers_begins_at_the_outlier(tmp_path):
    """A row for each layer; enter goes to the tensor, m shows the largest value, esc goes back."""
    path = save_layers(tmp_path)
    steps = (["L", settle], "m", ["escape"], ["L", "m", "enter"], ["L", settle, "down", "left", "enter"])
    views = drive_in_steps(path, *steps, look=lambda app: (show(app), app.model.current.label))
    (screen, _), (by_largest, _), (left, _), (_, tensor), (_, neighbour) = views
    lines = screen.splitlines()
    assert lines[0].startswith("h: RMS of 12 layers; 1 outlier, 1 nan, 1 inf: layer 7 v, layer 2 norm, layer")
    assert lines[1].split() == ["layer", "q", "v", "norm"]
    assert lines[3].split()[0] == "0"
    assert lines[10].startswith("›!7 ")
    assert lines[5].endswith("! nan")
    assert lines[7].split()[1:3] == ["!", "inf"]
    assert lines[-3].strip() == "model.h.7.attn.v.weight"
    assert lines[-2].startswith("outlier: RMS 37")
    assert all(len(line) <= 80 for line in lines)
    assert (tensor, neighbour) == ("v.weight", "q.weight")
    largest = torch.load(path)["model"]["h.7.attn.v.weight"].abs().max().item()
    assert f"! {largest:.3g}" in by_largest
    assert "RMS of" not in left
    assert all(len(line) <= 20 for line in drive(path, "L", settle, size=(20, 5)).splitlines())


def test_the_panel_has_the_index_of_the_first_nan(tmp_path):
    """The first infinity has an index too; only a count above zero is marked."""
    tensor = torch.zeros(3, 4)
    tensor[1, 2] = tensor[2, 0] = float("nan")
    for name, value in (("nan", 0.0), ("both", float("-inf"))):
        tensor[2, 3] = value
        save_file({"a": tensor.clone()}, tmp_path / f"{name}.safetensors")
    screen = drive(tmp_path / "nan.safetensors", size=(120, 40))
    assert re.search(r"nan 2 +first NaN at \[1, 2\]", screen)
    assert re.search(r"inf 0\n", screen)
    assert re.search(r"inf 1 +first Inf at \[2, 3\]", drive(tmp_path / "both.safetensors", size=(120, 40)))
    lines = list(_describe_stats(Stats(nan=2, inf=0, zeros=0), {}))
    assert [(line.text, line.style) for line in lines] == [("zeros 0", ""), ("nan 2", "bad"), ("inf 0", "")]


def test_a_tensor_of_the_optimizer_has_the_name_of_its_parameter(tmp_path):
    """The name is recorded by the optimizer, or derived by order and shape; the panel shows the second case."""
    for is_named in (True, False):
        net = torch.nn.Sequential(torch.nn.Linear(3, 2))
        optimizer = torch.optim.Adam(net.named_parameters() if is_named else net.parameters())
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
        screen = drive(tmp_path / "t.pt", *list_keys("/exp_avg_sq"), "enter", size=(140, 30))
        assert "state[0]['exp_avg_sq'] of 0.weight" in screen
        assert ("belongs to: 0.weight (matched by order and shape)" in screen) is not is_named


def test_target_without_layers_shows_a_message(in_folder):
    """Four layers are too few for a usual value; a class has no values to read."""
    assert "no layers found: a layer table needs 5 or more tensors" in drive("first.safetensors", "L", size=(120, 24))
    Path("net.py").write_text("from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
                              "        super().__init__(*(nn.Linear(2, 2) for _ in range(6)))\n")  # fmt: skip
    for key in ("L", "S"):
        assert "a class has only initial values" in drive("net.py:Net", key, size=(120, 24))


def test_bytes_of_a_module_are_exact(tmp_path):
    """The optimizer has three tensors of 50 x 50 values."""
    assert f"{3 * 50 * 50 * 4:,} B" in drive(save_layers(tmp_path), *["end"], "left")


def test_the_largest_difference_is_found(in_folder):
    """D compares all; the first order is by change."""
    compared, screen = drive_in_steps("first.safetensors", "D", "o", size=(120, 40), other="second.safetensors")
    assert "14 compared: 2 of 14 parameters changed, 1 added, 1 removed; NaN 0 → 1" in compared
    listed = [line.partition("│")[0].split() for line in screen.splitlines()[2:6]]
    assert sorted(words[-1] for words in listed[:2]) == ["D", "nan/inf"]
    assert listed[2][-1] == "1"


@pytest.fixture
def epochs(tmp_path, monkeypatch):
    """Two epochs: blocks 3 and 8 changed most; the biases start near zero; the state of the optimizer is new."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.chdir(tmp_path)
    before = {"w": {}, "b": {}}
    for n in range(12):
        before["w"][n] = torch.randn(8, 8, generator=generator)
        before["b"][n] = torch.randn(8, generator=generator) * 1e-6
    for name, factor in (("a.pt", 0), ("b.pt", 1)):
        rates = {n: factor * (0.1 if n in (3, 8) else 0.0002) for n in range(12)}
        model = {f"h.{n}.w": before["w"][n] * (1 + rates[n]) for n in range(12)}
        model |= {f"h.{n}.b": before["b"][n] * (1 + 0.9 * factor) for n in range(12)}
        state = {n: {"exp_avg": torch.full((3,), 1.0 + factor)} for n in range(3)}
        torch.save({"model": model, "optimizer": {"state": state, "param_groups": []}}, name)
    return "a.pt", "b.pt"


def test_the_changes_of_equal_layers_are_shown(epochs):
    """After D, layers that changed as much are one row, with the line of `statecli diff` and both targets in the title.

    The order by change begins neither with biases near zero nor with the optimizer's state, and names the measure.
    """
    before, after = epochs
    views = drive_in_steps(before, [], "D", "o", other=after, size=(120, 40), look=lambda a: (list_rows(a), show(a)))
    (rows_without_values, _), (rows, screen), (ordered, ordered_screen) = views
    assert "{0..11}" in rows_without_values
    assert rows[:4] == ["model", "h", "{0..2,4..7,9..11}", "{3,8}"]
    assert screen.startswith("a.pt → b.pt  27 tensors")
    assert "24 of 24 parameters changed" in screen.splitlines()[-2]
    assert re.search(r"; h\.[38].* times as much as the median of 12 layers", " ".join(screen.splitlines()[-2:]))
    assert set(ordered[:2]) == {"model.h.3.w", "model.h.8.w"}
    assert all(row.startswith("optimizer.") for row in ordered[-3:])
    assert "by ‖Δ‖/‖layer‖, largest first" in ordered_screen


def test_the_table_of_layers_shows_the_changes_of_two_targets(epochs):
    """The title has both names; the cursor is on a layer with the largest change, and m offers no other measure."""
    before, after = epochs
    lines = drive(before, "L", settle, other=after, size=(120, 24)).splitlines()
    assert lines[0].startswith("h: change of 12 layers, a.pt → b.pt; 2 outliers: layer 3 w, layer 8 w")
    assert re.fullmatch("›!3 +! 0.1 +0.9", lines[6])
    assert "m: " not in lines[-1]


def test_typed_second_target_is_compared(in_folder):
    """d asks for the target; a wrong target gives an error line, and the screen stays."""
    steps = ([*list_keys("/q_proj"), "enter", "down", "down"], *map(type_target, ("missing.pt", "net.py:Net")))
    *_, missing, of_class, right = drive_in_steps(
        "first.safetensors", *steps, type_target("second.safetensors"), size=(120, 24)
    )
    assert "no such file" in missing
    assert "is a model class" in of_class
    assert "values: 64 of 64 differ" in right


def type_target(name):
    return ["d", *list_keys(name), "enter"]


def test_difference_equals_the_output_of_diff(in_folder, statecli):
    """The same figures as `statecli diff`."""
    changes = statecli("diff", "first.safetensors", "second.safetensors", "-f", "json").json["changes"]
    expected = {change["fqn"]: change["values"] for change in changes if change["before"] and change["after"]}
    app = drive("first.safetensors", "D", other="second.safetensors", look=lambda app: app)
    outcomes = app.model.difference.outcomes
    changed = {app.model.tensors[position].fqn: outcome for position, outcome in outcomes.items() if outcome.changed}
    assert changed.keys() == expected.keys()
    for fqn, outcome in changed.items():
        for field in ("changed", "max_abs", "mean_abs", "relative_l2", "cosine", "nan_after"):
            assert getattr(outcome, field) == expected[fqn][field]


@pytest.mark.parametrize(
    ("keys", "globs"),
    [
        (["y"], ["lm_head.*"]),
        (["down", "space", "space", "y"], ["lm_head.*"]),
        ([*["down"] * 5, "right", "down", *["space"] * 3, "y"], ["model.layers.{0..2}.*"]),
        ([*list_keys("/norm"), "enter", "a", "y"], ["model.layers.*.norm.weight"]),
        ([*list_keys("/norm"), "enter", "y"], ["model.layers.*.norm.weight"]),
        ([*list_keys("/norm"), "enter", "y", "space", "down", "space", "y"], ["model.layers.{0,2}.norm.weight"]),
        ([*list_keys("/q_proj"), "enter", "y", "a", "y"], ["model.layers.*.attn.q_proj.weight"]),
        ([*["down"] * 5, "right", "down", "right", *["space"] * 2, "y"], ["model.layers.{0,1}.*"]),
    ],
)
def test_marked_rows_are_copied_as_globs(in_folder, keys, globs):
    """The globs select exactly these tensors with `statecli inspect -i`."""
    app = drive("first.safetensors", *keys, look=lambda app: app)
    words = shlex.split(app.copied_text)
    assert words[1::2] == globs
    model = app.model
    marked = model.list_copied()
    selected = select(model.state, Selection(include=tuple(globs)), "x").tensors
    assert {tensor.fqn for tensor in selected} == {model.tensors[position].fqn for position in marked}


def test_marks_that_the_filter_hides_stay_in_view(in_folder):
    """The title and a message count hidden marks, and u clears all marks; a marks only shown tensors."""
    hidden = [*list_keys("/norm"), "enter", "a", *list_keys("/"), "ctrl+u", *list_keys("q_proj"), "enter"]
    steps = ("u", hidden, ["down", "space"], ["space", "a", "a"], ["a", "y"], ["x", "u"])
    views = drive_in_steps("first.safetensors", *steps, size=(120, 40), look=lambda app: (show(app), list_marks(app)))
    screens, marks = zip(*views, strict=True)
    assert "nothing is marked" in screens[0]
    assert "4 marked (all hidden)" in screens[1]
    assert "5 marked (4 hidden)" in screens[2]
    assert marks[3] == {"norm"}
    assert "4 shown and 4 hidden tensors are marked; u clears all marks" in screens[4]
    assert " marked" not in screens[5].splitlines()[0]
    assert "8 marks cleared" in screens[5]


def list_marks(app):
    return {app.model.get_name(n).split(".")[-2] for n in app.model.marked}


def test_copied_globs_are_shown_until_a_key(in_folder):
    """The copied text is shown, because some terminals do not support OSC 52; any key closes the text."""
    steps = ("y", "q", "yx", "yo", [*list_keys("/norm"), "enter", "y"])
    views = drive_in_steps("first.safetensors", *steps, look=lambda app: (show(app), app.copied_text, app.model.sort))
    (screen, copied, _), (closed, *_), (again, *_), (*_, sort), (listed, *_) = views
    assert "statecli sent the globs of 2 tensors to the clipboard of the terminal:" in screen
    assert "\n  -i 'lm_head.*'\n" in screen
    assert "│" not in screen  # nothing next to the text, which a mouse selects by lines
    assert copied
    assert "first.safetensors" in closed  # q closes only the text
    assert "first.safetensors" in again
    assert sort is ListColumn.SIZE
    assert re.search(
        r"globs of 4 listed tensors to the clipboard of the terminal:\n +to copy fewer, mark them with space\n", listed
    )


def test_help_fits_on_80_columns_and_24_lines(in_folder):
    """The help lists every key of the screen."""
    screen = drive("first.safetensors", "question_mark")
    assert "quit" in screen
    assert all(len(line) <= 78 for line in format_help().splitlines())
    assert len(format_help().splitlines()) <= 22
    assert "move to another row" in screen


def test_q_quits_without_copying(in_folder):
    """q quits, and no text is copied."""
    assert drive("first.safetensors", "q", look=lambda app: (app.copied_text, app.return_code)) == ("", 0)


def test_the_mouse_selects_opens_sorts_and_marks(in_folder):
    """A click on a row, again, on a heading, and on the gutter."""

    def click(x, y):
        return [lambda pilot: pilot.click("TensorList", offset=(x, y))]

    views = drive_in_steps("first.safetensors", click(8, 6), click(8, 6), click(1, 2), click(38, 0), look=describe)
    assert views[0][0] == "{0..3}"
    assert "0" in views[1][1]
    assert views[2][2] == 1
    assert views[3][3] == "size"


def describe(app):
    return app.model.current.label, list_rows(app), len(app.model.marked), app.model.sort and app.model.sort.value


def test_unusual_tensors_show_their_values(tmp_path):
    """A sparse tensor has no histogram, because only some values are stored; complex values are short."""
    tensors = {"s": torch.eye(3).to_sparse(), "c": torch.tensor([1 + 2j]), "b": torch.tensor(True), "e": torch.zeros(0)}
    torch.save(tensors, tmp_path / "odd.pt")
    steps = ([], ["down"], ["down"], ["end"])
    sparse, complex_, boolean, empty = drive_in_steps(tmp_path / "odd.pt", *steps, size=(120, 40))
    assert "first values of its values" in sparse
    assert "█" not in sparse
    assert "1+2j" in complex_
    assert "bool, []" in boolean
    assert "0 elements" in empty


# --- hostile and large --------------------------------------------------------------------------------------------


def test_hostile_names_are_inert(tmp_path):
    """Escape codes, line breaks, bidirectional marks and markup are text."""
    names = ["a\x1b[31mred", "b[red]bold[/red]", "c\u202eevil", "d\nnewline", "[link=x]y", "e\x9b5m", "x" * 500]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "h.safetensors")
    steps = ((), ("end",), ("a", "y"), ("x", "u", "down", "y"), ("x", "o"), list_keys("/[red]"))
    screens = drive_in_steps(tmp_path / "h.safetensors", *steps)
    assert not {"\x1b", "\u202e", "\x9b"} & set("".join(screens))
    screen = screens[0]
    assert "b[red]bold[/red]" in screen
    assert "a\\x1b[31mred" in screen


def test_a_hundred_thousand_tensors_are_drawn_row_by_row():
    """A key reads and draws only the rows on the screen."""
    tensors = tuple(TensorInfo(f"layers.{n // 10}.w{n % 10}", "float32", (2,), 2, 8) for n in range(100_000))
    model = ScreenModel(ModelState("big", "safetensors", tensors), {})
    model.toggle_flat()
    requested_rows = []
    get_row = model.get_row

    def count(number):
        requested_rows.append(number)
        return get_row(number)

    model.get_row = count

    async def run_keys():
        app = Browser(model, Versions({}), run_read_other)
        async with app.run_test(size=(80, 24)) as pilot:
            await press(pilot, "end", "home", *["pagedown"] * 5)
        assert app.failure is None

    asyncio.run(run_keys())
    assert len(requested_rows) < 5000
    assert model.cursor == 5 * 21


# --- reading ------------------------------------------------------------------------------------------------------


def test_only_the_shown_bytes_are_read(in_folder, monkeypatch):
    """A large tensor: its first values, and no statistics before s."""
    monkeypatch.setattr("statecli.browse.peek.MAX_AUTOMATIC_BYTES", 8)
    read = []
    monkeypatch.setattr("statecli.browse.peek.read_statistics", lambda tensor, _: read.append(tensor.fqn) or Stats())
    keys = [*list_keys("/embed"), "enter"]
    screen = drive("first.safetensors", *keys)
    assert "s: read the statistics (512 B)" in screen
    assert "first bytes" in screen
    assert not read
    drive("first.safetensors", *keys, "s")
    assert read == ["model.embed.weight"]


def test_escape_stops_the_reading_of_a_list(in_folder, monkeypatch):
    """The last line shows the progress; after esc, the rest is not read."""
    read, progress = [], []

    def slow(tensor, _):
        read.append(tensor.fqn)
        time.sleep(0.2)
        return Stats(nan=0)

    async def wait_for_first(pilot):
        while "1 of 15 tensors, " not in show(pilot.app):
            await pilot.pause(0.02)
        progress.append(show(pilot.app).splitlines()[-1])

    monkeypatch.setattr("statecli.browse.peek.read_statistics", slow)
    assert "stopped" in drive("first.safetensors", "S", wait_for_first, "escape")
    assert progress[0].endswith("  esc: stop")
    assert len(read) < 15


# --- the editor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("vim", ["vim", "+7", "/x/net.py"]),
        ("emacs -nw", ["emacs", "-nw", "+7", "/x/net.py"]),
        ("code --wait", ["code", "--wait", "-g", "/x/net.py:7"]),
        ("/usr/bin/hx", ["/usr/bin/hx", "/x/net.py:7"]),
        ("", ["vi", "+7", "/x/net.py"]),
    ],
)
def test_the_editor_opens_the_line(monkeypatch, words, command):
    """The command has the words of $EDITOR."""
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", words)
    assert editor.build_command(Origin("/x/net.py", 7)) == command


def test_a_checkpoint_has_no_source_lines(in_folder):
    """`e` reports the missing source line."""
    assert "this row has no source line" in drive("first.safetensors", "e")


def test_modules_have_the_change_of_their_tensors(in_folder):
    """After D, the change of a layer is that of its changed tensors together, as in `statecli diff --tree`."""
    keys = ["D", settle, *["down"] * 5, "right"]
    screen = drive("first.safetensors", *keys, size=(120, 40), other="second.safetensors")
    changes = {line.split()[1]: line.partition("│")[0].split()[-1] for line in screen.splitlines() if "  ▸ " in line}
    assert changes["0"] == changes["1"] == "="
    assert changes["2"] == "1"
    assert changes["3"] == "nan/inf"


def test_an_error_of_the_thread_ends_the_screen(in_folder, monkeypatch):
    """The screen does not wait for ever."""

    def fail(*_):
        raise ZeroDivisionError("x")

    monkeypatch.setattr("statecli.browse.peek.read_peek", fail)
    app = Browser(open_model("first.safetensors"), Versions({}), run_read_other)

    async def run_keys():
        async with app.run_test() as pilot:
            await pilot.pause()
            app.post_message(events.Key("down", None))  # `press` would wait for the screen that has ended
            for _ in range(500):
                if app.failure is not None:
                    break
                await asyncio.sleep(0.02)

    asyncio.run(run_keys())
    assert isinstance(app.failure, ZeroDivisionError)


def test_a_second_target_that_changed_is_not_compared(in_folder, second):
    """The values would not belong to the header."""
    versions = Versions({})

    async def change(_):
        second.write_bytes(second.read_bytes()[:-1])

    keys = [*list_keys("/embed"), "enter", "d", *list_keys("second.safetensors"), "enter", settle, change, "D", settle]

    async def run_keys():
        app = Browser(open_model("first.safetensors"), versions, lambda text: run._read_other(versions, text))
        async with app.run_test(size=(120, 40)) as pilot:
            for key in keys:
                await (key(pilot) if callable(key) else press(pilot, key))
            app.model.difference.outcomes.clear()
            await press(pilot, "D")
            await settle(pilot)
            return show(app)

    screen = asyncio.run(run_keys())
    assert "changed" in screen.partition("difference with")[2]
    assert "0 changed, 1 not compared" in screen


def test_long_part_of_a_name_keeps_its_end(tmp_path):
    """A long part of a name is not cut to `…` alone."""
    names = [f"model.norms.{name}_layernorm_of_the_whole_block.weight" for name in ("input", "output")]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "x.safetensors")
    cells = [line.split()[0] for line in drive(tmp_path / "x.safetensors").splitlines() if line.startswith("    ")]
    assert len(set(cells[:2])) == 2
    assert all(cell.endswith("e_block.weight") for cell in cells[:2])


def test_hidden_layer_columns_have_a_sign(tmp_path):
    """The sign for hidden columns is at the right, and at the left after the cursor moved."""
    save_file(
        {f"h.{n}.projection_{name}": torch.ones(2) for n in range(5) for name in range(20)}, tmp_path / "x.safetensors"
    )
    screens = drive_in_steps(tmp_path / "x.safetensors", "L", ["right"] * 19)
    first, heading = (screen.splitlines()[1] for screen in screens)
    assert (first.startswith("layer   "), first.endswith(" ›"), len(first) <= 80) == (True, True, True)
    assert (heading.startswith("layer ‹ "), heading.endswith("›")) == (True, False)


def test_statistics_leave_room_for_names(tmp_path):
    """On 200 columns: whole names, and max, mean and std; modules have their dtype, the scroll bar a track."""
    path = save_layers(tmp_path)
    screen = drive(path, "S", *list_keys("/attn"), "enter", size=(200, 20))
    heading, row = screen.splitlines()[1:3]
    assert {"max", "mean", "std"} <= set(heading.partition("│")[0][:-1].split())
    assert "model.h.0.attn.q.weight " in row
    assert "model.h.7.attn.v.weight ! outlier " in screen
    assert {"┃", "┊"} == {line.partition("│")[0][-1] for line in screen.splitlines()[2:-1]}
    assert re.search(r"optimizer +float32 ", drive(path, size=(200, 20)))


# --- the options ---

TIED_NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(4, 2)
        self.lm_head = nn.Linear(2, 4, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("scale", torch.ones(2))
"""


def test_a_class_gives_kinds_and_names_that_the_file_does_not_store(in_folder):
    """--model works as in inspect; the filter finds a tensor by its tied name."""
    Path("net.py").write_text(TIED_NET)
    save_file({"wte.weight": torch.ones(4, 2), "scale": torch.ones(2)}, "tied.safetensors")
    options = run.Request(target="tied.safetensors", model="net.py:Net")
    model = ScreenModel(run._read_target("tied.safetensors", options).state, {})
    assert [model.format_cell(n, ListColumn.KIND) for n in range(2)] == ["buffer", "parameter"]
    tied = msgspec.structs.replace(model.tensors[1], aliases=("lm_head.weight",))
    model = ScreenModel(msgspec.structs.replace(model.state, tensors=(model.tensors[0], tied)), {})
    for text in ("lm_head", "*_head.w*", "lm_{head,x}"):
        model.set_filter(text)
        assert model.filtered_positions == [1]
    with_class = run.Request(target="net.py:Net", other="tied.safetensors", model="net.py:Net", init_device="cpu")
    assert [
        run._read_target(target, with_class).state.tensors[0].kind.value
        for target in ("net.py:Net", "tied.safetensors")
    ]
    with pytest.raises(UsageError, match="--model: needs a checkpoint"):
        run._read_target("net.py:Net", run.Request(target="net.py:Net", model="auto"))


# --- before the screen --------------------------------------------------------------------------------------------


def test_missing_terminal_is_an_error_line(statecli, first):
    """Standard input is not a terminal, as in a pipe or in CI."""
    result = statecli("browse", first)
    assert (result.code, result.out) == (2, "")
    assert result.err == "statecli: browse: standard input is not a terminal; use statecli inspect\n"


def test_missing_textual_is_an_error_with_the_install_command(statecli, first, monkeypatch):
    """The extra tui."""
    monkeypatch.setattr(browse, "_check_terminal", lambda caller: None)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert statecli("browse", first).err == (
        "statecli: statecli browse needs the package textual: pip install 'torch-statecli[tui]'\n"
    )


def test_a_dumb_terminal_is_refused(monkeypatch):
    """A dumb terminal would show escape codes as text."""
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(UsageError, match="TERM=dumb"):
        browse._check_terminal(Caller())


def test_internal_error_is_reported_in_one_line(statecli, first, monkeypatch):
    """The error is one line, not a traceback over the screen."""
    monkeypatch.setattr(browse, "_check_terminal", lambda caller: None)

    def fail(app):
        app.failure = ZeroDivisionError("x")

    monkeypatch.setattr(Browser, "run", fail)
    result = statecli("browse", first)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
