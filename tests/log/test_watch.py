"""`statecli watch`: print a line for each checkpoint when its files are complete."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")


def to_bytes(value: float) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.full((64, 64), float(value))}, buffer)
    return buffer.getvalue()


class Script:
    """A clock that advances with each sleep, and runs an action before each look at the folder."""

    def __init__(self, *actions):
        self.actions, self.now = list(actions), 0.0

    def sleep(self, seconds):
        self.now += seconds
        assert self.actions, "the run is over, and watch still waits"
        self.actions.pop(0)()

    def clock(self):
        return self.now


def do_nothing():
    """Change nothing between two looks."""


def watch(folder, *actions, **options):
    """Return the rows that watch yields while the actions run, one after each look."""
    from statecli.commands.watch.run import Request, watch_run

    script = Script(*actions)
    rows = []
    try:
        for row in watch_run(Request((str(folder),), **options), sleep=script.sleep, clock=script.clock):
            rows.append(row)
    except AssertionError as error:
        assert "watch still waits" in str(error)  # noqa: PT017 - the end of the script
    return rows


def test_a_file_that_grows_is_not_finished(tmp_path):
    """A file written in four pieces has a single row, after the last piece and two equal looks."""
    data = to_bytes(1.0)
    path = tmp_path / "ckpt-1.pt"
    states = []

    def grow(count):
        def write():
            path.write_bytes(data[:count])
            states.append(count)

        return write

    pieces = [grow(len(data) * part // 4) for part in range(1, 5)]
    rows = watch(tmp_path, *pieces, do_nothing, do_nothing)
    assert [(os.path.basename(row.path), row.error) for row in rows] == [("ckpt-1.pt", None)]
    assert not watch(tmp_path, count=1)  # one look alone is not enough


def test_paused_writer_has_no_early_row(tmp_path):
    """Half of a file, unchanged for a while, is not a checkpoint yet."""
    data, path = to_bytes(1.0), tmp_path / "ckpt-1.pt"
    half = lambda: path.write_bytes(data[: len(data) // 2])  # noqa: E731
    rows = watch(
        tmp_path, half, do_nothing, do_nothing, do_nothing, lambda: path.write_bytes(data), do_nothing, do_nothing
    )
    assert [row.error for row in rows] == [None]


def test_a_file_that_stays_damaged_is_reported_once(tmp_path):
    """The file is reported after a minute, with its error."""
    (tmp_path / "ckpt-1.pt").write_bytes(to_bytes(1.0)[:500])
    rows = watch(tmp_path, *[do_nothing] * 40, history=True)
    assert len(rows) == 1
    assert "ckpt-1.pt" in rows[0].error


def test_a_folder_is_finished_with_its_last_shard(tmp_path):
    """The folder has an index and two shards; without the second shard, the folder has no row."""
    from safetensors.torch import save_file

    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    index = {"metadata": {}, "weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}

    def save_shard(number):
        return lambda: save_file({f"w{number}": torch.ones(8)}, folder / f"model-0000{number}-of-00002.safetensors")

    def save_index():
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert not watch(tmp_path, save_index, do_nothing, save_shard(1), do_nothing, do_nothing)
    rows = watch(tmp_path, save_shard(2), do_nothing, do_nothing)
    assert [(row.step.number, row.tensors) for row in rows] == [(10, 2)]


def test_rows_have_the_change_since_the_row_before(tmp_path):
    """Watching begins with the last existing checkpoint."""
    for number in (1, 2, 10):
        (tmp_path / f"ckpt-{number}.pt").write_bytes(to_bytes(number))
    rows = watch(
        tmp_path, do_nothing, lambda: (tmp_path / "ckpt-11.pt").write_bytes(to_bytes(11)), do_nothing, do_nothing
    )
    assert [row.step.number for row in rows] == [10, 11]
    assert rows[1].relative_change == pytest.approx(0.1)
    assert [row.step.number for row in watch(tmp_path, do_nothing, do_nothing, history=True)] == [1, 2, 10, 11]


def test_a_checkpoint_that_is_written_again_has_a_new_row(tmp_path):
    """Trainers overwrite last.ckpt."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(to_bytes(1.0))
    rows = watch(tmp_path, do_nothing, lambda: path.write_bytes(to_bytes(2.0)), do_nothing, do_nothing)
    assert [row.norm for row in rows] == pytest.approx([64.0, 128.0])


def test_a_deleted_predecessor_is_named(tmp_path):
    """Trainers keep only the last checkpoints; the row has the norm, but not the change."""
    first, second = tmp_path / "ckpt-1.pt", tmp_path / "ckpt-2.pt"
    first.write_bytes(to_bytes(1.0))

    def replace():
        first.unlink()
        second.write_bytes(to_bytes(2.0))

    rows = watch(tmp_path, do_nothing, replace, do_nothing, do_nothing)
    assert [row.norm for row in rows] == pytest.approx([64.0, 128.0])
    assert rows[1].relative_change is None
    assert "deleted" in rows[1].not_compared[0]


def test_files_added_next_to_the_weights_give_no_second_row(tmp_path):
    """optimizer.pt is written after the model, and the model does not change."""
    from safetensors.torch import save_file

    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    save_file({"w": torch.ones(8)}, folder / "model.safetensors")
    add = lambda: torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")  # noqa: E731
    rows = watch(tmp_path, do_nothing, add, do_nothing, do_nothing)
    assert len(rows) == 1


@pytest.fixture
def start_watch(tmp_path):
    """Start the command in a new process, with a pipe as standard output."""
    processes = []

    def start(*words):
        command = [sys.executable, "-m", "statecli", "watch", str(tmp_path), "--interval", "0.05", *words]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: signals")
def test_pipe_gets_each_line_and_ctrl_c_prints_no_traceback(start_watch, tmp_path):
    """The exit status is 130, as of every interrupted command."""
    process = start_watch()
    assert process.stdout.readline().split() == [b"step", b"norm", b"rel.", b"change", b"checkpoint"]
    (tmp_path / "new").write_bytes(to_bytes(1.0))
    shutil.move(tmp_path / "new", tmp_path / "ckpt-7.pt")
    assert process.stdout.readline().split()[:2] == [b"7", b"64"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (b"", b"", 130)


def test_fail_on_nan_is_status_1(statecli, tmp_path):
    """The command exits after the line with the name of the tensor."""
    (tmp_path / "ckpt-1.pt").write_bytes(to_bytes(1.0))
    (tmp_path / "ckpt-2.pt").write_bytes(to_bytes(float("nan")))
    (tmp_path / "ckpt-3.pt").write_bytes(to_bytes(1.0))
    result = statecli("watch", tmp_path, "--history", "--fail-on-nan", "--interval", "0.01")
    assert result.code == 1
    assert result.out.splitlines()[-1].endswith("ckpt-2.pt; NaN or infinity in w")


def test_a_damaged_checkpoint_is_a_line_and_status_2(statecli, tmp_path, monkeypatch):
    """The line has the error, so that standard error is empty."""
    (tmp_path / "ckpt-1.pt").write_bytes(to_bytes(1.0)[:100])
    monkeypatch.setattr("statecli.commands.watch.run.PATIENCE_S", 0)
    result = statecli("watch", tmp_path, "--count", "1", "--interval", "0.01")
    assert (result.code, result.err) == (2, "")
    assert "ckpt-1.pt: not read: " in result.out


def test_json_lines_are_rows_of_log(statecli, tmp_path):
    (tmp_path / "ckpt-1.pt").write_bytes(to_bytes(1.0))
    line = statecli("watch", tmp_path, "--count", "1", "--interval", "0.01", "-f", "jsonl").json
    assert line == statecli("log", tmp_path, "-f", "json").json["checkpoints"][0]


@pytest.mark.parametrize("words", [("--interval", "0"), ("--interval", "nan"), ("--count", "0")])
def test_wrong_numbers_are_refused(statecli, tmp_path, words):
    """The command exits with status 2 and prints one line."""
    result = statecli("watch", tmp_path, *words)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert words[0] in result.err


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    """The folder may be created later; with a mistyped path, the command would wait silently."""
    from statecli.requests.options import WatchOptions
    from statecli.requests.outcome import Caller
    from statecli.requests.run import run

    lines: list[str] = []

    class Reader(Caller):
        def write_line(self, line):
            lines.append(line)
            if line.startswith(" "):  # the header: the wait begins
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(WatchOptions(targets=(str(tmp_path / "nope"), str(tmp_path))), Reader())
    assert lines[0] == f"waiting for {tmp_path}/nope, which does not exist yet"
    assert len(lines) == 2


def test_a_growing_history_is_shown_once(statecli, tmp_path):
    """The setting changes with each checkpoint, so later lines leave it out as they leave out a counter."""
    for number in (1, 2, 3, 4):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        torch.save({"w": torch.full((4,), float(number))}, folder / "pytorch_model.bin")
        (folder / "config.json").write_text("{}")
        history = [{"step": n, "loss": 2.0 - n / 10} for n in range(1, number + 1)]
        text = json.dumps({"global_step": number, "log_history": [*history, {"eval_loss": 9.0}]})
        (folder / "trainer_state.json").write_text(text)
    lines = statecli("watch", tmp_path, "--history", "--count", "4", "--interval", "0.01").out.splitlines()
    assert ['log_history: "2 entries, loss 1.9, sha2' in line for line in lines[-3:]] == [True, False, False]
