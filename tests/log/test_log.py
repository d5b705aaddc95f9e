"""`statecli log`: a line for each checkpoint, checked against figures computed by torch."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

LAYOUTS = ["plain", "safetensors", "trainer", "lightning", "dcp"]


def flatten(state):
    """Return all parameters in a float64 vector."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def compute_norm(state):
    return flatten(state).nan_to_num(0.0).norm().item()


@pytest.fixture(scope="module")
def results():
    """The results of `log_run` by layout."""
    return {}


@pytest.fixture
def log_run(statecli, saved_runs, results):
    """Return a function that returns the result of `log` for a layout; each layout is read once."""

    def find(layout):
        if layout not in results:
            results[layout] = statecli("log", saved_runs(layout), "-f", "json")
        return results[layout]

    return find


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_and_changes_equal_torch(log_run, training, layout):
    """The figures agree in every layout of a run, in the order of the steps."""
    result = log_run(layout)
    assert result.code == 0, result
    rows = result.json["checkpoints"][:12]
    assert [row["norm"] for row in rows] == pytest.approx([compute_norm(state) for state in training.states], rel=1e-12)
    pairs = zip(training.states, training.states[1:], strict=False)
    changes = [compute_norm({name: new[name] - old[name] for name in old}) / compute_norm(old) for old, new in pairs]
    assert [row["relative_change"] for row in rows[1:]] == pytest.approx(changes, rel=1e-6)


def test_cosines_equal_torch(log_run, training):
    """The cosine covers the tensors that are finite in both checkpoints."""
    rows = log_run("plain").json["checkpoints"]
    for row, old, new in zip(rows[1:9], training.states, training.states[1:], strict=False):
        cosine = torch.nn.functional.cosine_similarity(flatten(old), flatten(new), dim=0).item()
        assert row["cosine"] == pytest.approx(cosine, abs=1e-9)


@pytest.mark.parametrize(
    ("layout", "source", "steps"),
    [
        ("plain", "name", range(1, 13)),
        ("safetensors", "name", range(1, 13)),
        ("trainer", "trainer_state.global_step", range(100, 1300, 100)),
        ("lightning", "global_step", [*range(100, 1300, 100), 1200]),
        ("dcp", "step", range(100, 1300, 100)),
    ],
)
def test_the_step_comes_from_the_checkpoint_or_else_from_its_name(log_run, layout, source, steps):
    rows = log_run(layout).json["checkpoints"]
    assert [row["step"] for row in rows] == [{"number": step, "source": source} for step in steps]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_becomes_nan_is_named_once(log_run, layout):
    rows = log_run(layout).json["checkpoints"]
    born = [(n, row["became_nan"]) for n, row in enumerate(rows) if row["became_nan"]]
    assert born == [(9, ["layers.2.0.weight"])]
    assert [row["nan"] for row in rows[8:12]] == [0, 1, 1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_layer_has_stopped_since_its_last_change(log_run, layout):
    """Both modules of layers.1 last changed at step 600; a copy of the last checkpoint stops no other module."""
    document = log_run(layout).json
    stopped = {module["name"]: module["last_moved"] for module in document["modules"] if module["stopped"]}
    assert stopped == {"layers.1.0": 5, "layers.1.1": 5}
    assert document["checkpoints"][5]["stopped"] == ["layers.1.0", "layers.1.1"]


def test_settings_that_changed_are_in_the_row(statecli, saved_runs, log_run):
    """The halved learning rate is shown; counters that change at each checkpoint are not in the table."""
    result = log_run("trainer")
    changed = {row["step"]["number"]: [entry["key"] for entry in row["settings"]] for row in result.json["checkpoints"]}
    assert "optimizer.param_groups.0.lr" in changed[800]
    assert not any("optimizer.param_groups.0.lr" in keys for step, keys in changed.items() if step != 800)
    assert "trainer_state.global_step" in result.json["changing_settings"]
    table = statecli("log", saved_runs("trainer"), "-f", "table").out
    assert "optimizer.param_groups.0.lr: 0.01 → 0.005" in " ".join(table.split())
    assert "trainer_state.epoch" not in table


def test_optimizer_state_is_not_part_of_the_norm(log_run):
    """A note names the sections left out."""
    document = log_run("lightning").json
    assert {tuple(row["other_sections"]) for row in document["checkpoints"]} == {("optimizer_states.0",)}
    assert "optimizer_states.0" in next(note["message"] for note in document["notes"] if "norm" in note["message"])


def test_an_unreadable_checkpoint_is_a_line_and_status_2(statecli, run_folder):
    """Other checkpoints are shown, and the next checkpoint is compared with the last readable checkpoint."""
    folder = run_folder("safetensors")
    path = folder / "model_4.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    result = statecli("log", folder, "-f", "json")
    assert result.code == 2
    rows = result.json["checkpoints"]
    assert len(rows) == 12
    assert "model_4.safetensors" in rows[3]["error"]
    assert rows[3]["norm"] is None
    assert rows[3]["step"] == {"number": 4, "source": "name"}
    assert rows[4]["compared_with"] == str(folder / "model_3.safetensors")
    assert math.isfinite(rows[4]["relative_change"])
    assert "model_4.safetensors" in result.err


@pytest.mark.parametrize("output", ["table", "markdown", "html"])
def test_table_of_modules_has_column_headings(statecli, saved_runs, output):
    """The numbers are the norm and the change at the last checkpoint, not of a step."""
    text = statecli("log", saved_runs("plain"), "-f", output).out
    after = text[text.index("rel. change from checkpoint to checkpoint") :]
    assert after.index("last norm") < after.index("last change") < after.index("each change") < after.index("embed")


def test_fail_on_warning_makes_nan_status_1(statecli, saved_runs):
    """By default NaN is shown and the status stays 0, because a log is a list."""
    assert statecli("log", saved_runs("plain")).code == 0
    assert statecli("log", saved_runs("plain"), "--fail-on", "warning").code == 1


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
def test_quiet_log_prints_the_reason_of_status_1(statecli, saved_runs, output):
    """The rows, which show the finding otherwise, are left out."""
    result = statecli("log", saved_runs("plain"), "--fail-on", "warning", "-q", "-f", output)
    assert result.code == 1
    assert "warning[became-nan]" in result.out


def test_a_wrapper_prefix_does_not_end_the_history_of_a_module(statecli, run_folder, training):
    """The modules have the figures of the run without the prefix, under the names of the last checkpoint."""
    folder = run_folder("plain")
    plain = statecli("log", folder, "-f", "json").json
    for number in (5, 6, 11, 12):
        state = {f"module.{name}": tensor for name, tensor in training.states[number - 1].items()}
        torch.save(state, folder / f"ckpt-{number:04d}.pt")
    wrapped = statecli("log", folder, "-f", "json").json
    expected = [module | {"name": f"module.{module['name']}"} for module in plain["modules"]]
    assert wrapped["modules"] == expected
    assert wrapped["checkpoints"][5]["stopped"] == ["module.layers.1.0", "module.layers.1.1"]
    born = [(n, row["became_nan"]) for n, row in enumerate(wrapped["checkpoints"]) if row["became_nan"]]
    assert born == [(9, ["layers.2.0.weight"])]  # under another name from step 11 on


def test_a_module_that_is_split_keeps_its_history_once(statecli, tmp_path):
    """The part with the old name keeps the history; the other part has figures from its first checkpoint on."""
    state = {"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)}
    torch.save(state, tmp_path / "step1.pt")
    torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "step2.pt")
    torch.save({"module.fc.weight": state["fc.weight"] + 1, "fc.bias": state["fc.bias"] + 1}, tmp_path / "step3.pt")
    modules = {module["name"]: module for module in statecli("log", tmp_path, "-f", "json").json["modules"]}
    assert modules["fc"]["last_moved"] == 1
    assert modules["module.fc"]["last_moved"] is None


def test_a_named_folder_without_checkpoint_is_a_line_and_status_2(statecli, tmp_path):
    """Such a folder is often an interrupted save; `bisect` does not take an earlier checkpoint for the last one."""
    (tmp_path / "step-2").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "step-1.pt")
    paths = tmp_path / "step-1.pt", tmp_path / "step-2"
    result = statecli("log", *paths, "-f", "json")
    assert result.code == 2
    error = f"{tmp_path}/step-2: contains no checkpoint"
    assert [row["error"] for row in result.json["checkpoints"]] == [None, error]
    assert statecli("bisect", *paths, "--condition", "nan").code == 2


def test_first_nan_of_a_frozen_tensor_keeps_the_relative_change(statecli, tmp_path):
    """Both norms also count the finite values of a tensor that changed only to NaN."""
    before = {"frozen.weight": torch.full((4, 4), 2.0), "w.weight": torch.full((4, 4), 1.0)}
    after = {"frozen.weight": before["frozen.weight"].clone(), "w.weight": before["w.weight"] * 1.25}
    after["frozen.weight"][0, 0] = math.nan
    torch.save(before, tmp_path / "step1.pt")
    torch.save(after, tmp_path / "step2.pt")
    row = statecli("log", tmp_path, "-f", "json").json["checkpoints"][1]
    assert row["relative_change"] == pytest.approx(1 / math.sqrt(80))


def test_a_complex_parameter_has_no_norm(statecli, tmp_path):
    torch.save({"w.weight": torch.ones(2, dtype=torch.complex64)}, tmp_path / "step1.pt")
    result = statecli("log", tmp_path)
    assert result.code == 2
    assert "w.weight: statecli does not compute a norm of complex64 values" in result.err
