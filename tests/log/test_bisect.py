"""`statecli bisect`: the first checkpoint where a condition holds, with few reads."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def reads(monkeypatch):
    """The paths of the opened checkpoints, in order."""
    from statecli.targets import load

    paths: list[str] = []
    read = load.read_checkpoint

    def count(text):
        paths.append(text)
        return read(text)

    monkeypatch.setattr(load, "read_checkpoint", count)
    return paths


@pytest.mark.parametrize(
    ("layout", "steps"), [("plain", (9, 10)), ("trainer", (900, 1000)), ("lightning", (900, 1000))]
)
def test_the_first_nan_is_found(statecli, saved_runs, layout, steps):
    """The NaN starts at step 1000, the tenth of twelve checkpoints."""
    result = statecli("bisect", saved_runs(layout), "--condition", "nan", "-f", "json")
    assert result.code == 0, result
    document = result.json
    assert document["answer"] == "found"
    assert tuple(document[end]["step"]["number"] for end in ("last_before", "first")) == steps
    assert "layers.2.0.weight" in document["first"]["evidence"]


def test_reads_are_logarithmic(statecli, tmp_path, reads):
    """Of 40 checkpoints, the two ends and at most log2(40) others are opened, each once; the answer is exact."""
    for number in range(1, 41):
        torch.save({"weight": torch.ones(2, 2)}, tmp_path / f"ckpt-{number}.pt")
    for first in range(40, 0, -1):
        torch.save({"weight": torch.full((2, 2), float("nan"))}, tmp_path / f"ckpt-{first}.pt")
        reads.clear()
        document = statecli("bisect", tmp_path, "--condition", "nan", "-f", "json", "--no-cache").json
        assert document["first"]["path"].endswith(f"ckpt-{first}.pt")
        assert len(reads) == len(set(reads)) <= 2 + math.ceil(math.log2(40))
        assert len(document["probes"]) == len(reads)


def test_condition_that_never_holds_is_status_1(statecli, saved_runs, reads):
    """The status is the same as of grep without a match."""
    result = statecli("bisect", saved_runs("plain"), "--condition", "inf", "-f", "json")
    assert (result.code, result.json["answer"], len(reads)) == (1, "never", 2)


def test_condition_that_never_holds_is_reported_in_the_last_checkpoint(statecli, tmp_path, monkeypatch):
    """An annotation needs a file; the run has several."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        torch.save({"weight": torch.ones(2)}, f"ckpt-{number}.pt")
    result = statecli("bisect", "ckpt-1.pt", "ckpt-2.pt", "--condition", "nan", "-f", "github")
    assert "::error file=ckpt-2.pt," in result.out


def test_changed_compares_with_the_first_checkpoint(statecli, tmp_path):
    """The run trains only the body at first, and the head from step 6."""
    for number in range(1, 9):
        head = torch.zeros(2) if number < 6 else torch.ones(2)
        torch.save({"body": torch.full((3,), float(number)), "head": head}, tmp_path / f"step_{number}.pt")
    document = statecli("bisect", tmp_path, "--condition", "changed head", "-f", "json").json
    assert document["first"]["step"]["number"] == 6
    assert (
        statecli("bisect", tmp_path, "--condition", "changed body", "-f", "json").json["first"]["step"]["number"] == 2
    )


def test_cosine_counts_the_tensors_left_out(statecli, tmp_path):
    """A tensor with NaN has no cosine, and the other tensors may still be close."""
    for step, value in ((1, 1.0), (2, float("nan"))):
        torch.save({"a": torch.tensor([value, 1.0]), "b": torch.ones(2)}, tmp_path / f"step-{step}.pt")
    result = statecli("bisect", tmp_path, "--condition", "cosine<0.5", "-f", "plain", "--no-cache")
    assert result.code == 1
    assert "cosine 1, 1 tensor with NaN or infinity left out" in result.out


def test_cosine_equals_torch(statecli, saved_runs, training):
    """The answer is the first step whose cosine with the first checkpoint is below the limit."""

    def cosine(state):
        first, now = (
            torch.cat([tensor.flatten().double() for name, tensor in each.items() if tensor.isfinite().all()])
            for each in (training.states[0], state)
        )
        return torch.nn.functional.cosine_similarity(first, now, dim=0).item()

    cosines = [cosine(state) for state in training.states[:9]]
    limit = (cosines[3] + cosines[4]) / 2
    expected = next(n for n, value in enumerate(cosines) if value < limit)
    result = statecli("bisect", saved_runs("plain"), "--condition", f"cosine<{limit}", "-f", "json")
    assert result.json["first"]["step"]["number"] == expected + 1


def test_the_title_does_not_contradict_a_condition_that_never_holds(statecli, saved_runs):
    """The title names the condition; the verdict says that the condition is false."""
    result = statecli("bisect", saved_runs("plain"), "--condition", "cosine<-0.9", "-f", "table")
    title, verdict = result.out.splitlines()[:2]
    assert title.endswith(": condition 'cosine<-0.9'")
    assert verdict == "'cosine<-0.9' is false at the last checkpoint"


def test_the_condition_may_hold_at_the_first_checkpoint(statecli, tmp_path):
    """A note says so, and the first checkpoint is the answer."""
    for number in range(3):
        torch.save({"w": torch.tensor([float("nan")])}, tmp_path / f"{number}.pt")
    result = statecli("bisect", tmp_path, "--condition", "nan", "-f", "json")
    assert result.code == 0
    assert result.json["first"]["path"].endswith("0.pt")
    assert any("already true at the first checkpoint" in note["message"] for note in result.json["notes"])


def test_the_condition_may_hold_at_the_first_readable_checkpoint(statecli, tmp_path):
    """The note does not call the checkpoint the first, because an earlier checkpoint is unreadable."""
    (tmp_path / "0.pt").write_bytes(b"PK")
    for number in (1, 2):
        torch.save({"w": torch.tensor([float("nan")])}, tmp_path / f"{number}.pt")
    result = statecli("bisect", tmp_path, "--condition", "nan", "-f", "json")
    assert result.json["answer"] == "inconclusive"
    assert any("already true at the first readable checkpoint" in note["message"] for note in result.json["notes"])


def test_unreadable_checkpoint_in_the_middle_is_skipped(statecli, run_folder):
    """The middle checkpoint is damaged, so its neighbour is read instead."""
    folder = run_folder("plain")
    (folder / "ckpt-0006.pt").write_bytes(b"PK")
    result = statecli("bisect", folder, "--condition", "nan", "-f", "json")
    assert (result.code, result.json["first"]["step"]["number"]) == (0, 10)


def test_unreadable_checkpoint_at_the_boundary_is_status_2(statecli, run_folder):
    """The first NaN may be at checkpoint 9 or 10."""
    folder = run_folder("plain")
    (folder / "ckpt-0009.pt").write_bytes(b"PK")
    result = statecli("bisect", folder, "--condition", "nan", "-f", "json")
    assert (result.code, result.json["answer"]) == (2, "inconclusive")
    assert result.json["between"] == [str(folder / "ckpt-0009.pt")]
    assert "is true at" in result.err
    assert "ckpt-0009.pt" in result.err


def test_steps_in_the_settings_overrule_names_that_contradict_them(statecli, tmp_path):
    """The numbers in the names run backwards; the checkpoints are ordered by step."""
    for number in range(1, 9):
        value = float("nan") if number >= 5 else 1.0
        checkpoint = {"model": {"w": torch.tensor([value])}, "global_step": number}
        torch.save(checkpoint, tmp_path / f"run-{9 - number}.pt")
    document = statecli("bisect", tmp_path, "--condition", "nan", "-f", "json").json
    assert document["first"]["step"] == {"number": 5, "source": "global_step"}
    assert document["first"]["path"].endswith("run-4.pt")


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("changed", "glob is missing"),
        ("changed ", "glob is missing"),
        ("cosine<2", "between -1 and 1"),
        ("cosine", "write a number"),
        ("cosine<0.9x", "unexpected 'x' after the number"),
        ("loss>3", "is not a condition"),
        ("", "empty"),
        ("changed zz*", "no tensor of the model matches 'zz*'"),
        ("nan zz*", "no tensor of the model matches 'zz*'"),
        ("changed layers.0", "matches 'layers.0'; did you mean 'layers.0.*'?"),
    ],
)
def test_wrong_condition_is_an_error_line(statecli, saved_runs, condition, words):
    """The command exits with status 2, and the line says how to write the condition."""
    result = statecli("bisect", saved_runs("plain"), "--condition", condition)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_first_is_required(statecli, saved_runs):
    result = statecli("bisect", saved_runs("plain"))
    assert result.code == 2
    assert "--condition is missing; write --condition and nan, inf" in result.err


@pytest.mark.parametrize(
    ("name", "settings", "step"),
    [
        ("ckpt-{}.pt", {"epoch": 1}, {"number": 500, "source": "name"}),
        ("ckpt-{}.pt", {"epoch": 1, "global_step": 20}, {"number": 100, "source": "global_step"}),
        ("epoch{}.pt", {"iteration": 7}, {"number": 35, "source": "iteration"}),
    ],
)
def test_log_bisect_and_watch_read_the_same_step(statecli, tmp_path, name, settings, step):
    """The step is a counter in the settings, or else the number in the name; an epoch is not a step."""
    for number in range(1, 7):
        value = float("nan") if number > 4 else float(number)
        counters = {key: number * count for key, count in settings.items()}
        torch.save({"model": {"w": torch.tensor([value])}, **counters}, tmp_path / name.format(number * 100))
    actual_json = statecli("bisect", tmp_path, "--condition", "nan", "-f", "json").json
    assert actual_json["condition"] == "nan"
    rows = statecli("log", tmp_path, "-f", "json").json["checkpoints"]
    assert actual_json["first"]["step"] == rows[4]["step"] == step
    watched = statecli("watch", tmp_path, "--history", "--count", "5", "--interval", "0.01", "-f", "jsonl")
    assert json.loads(watched.out.splitlines()[4])["step"] == step
