"""The batches sent to a worker: plain data with relative or absolute paths, refused if the worker would read other
files.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

import statecli as package
from statecli import formats
from statecli.core.errors import EngineError, MalformedError, UnreadableError
from statecli.storage import files
from statecli.values import stats as stats_module
from statecli.values.stats import StatsTask, read_stats, stats_batch
from statecli.workers import pool
from statecli.workers.executors import batch, futures, use_executor
from statecli.workers.executors.batch import pack, run_in_worker, run_packed_batch, unpack


@pytest.fixture
def tasks(in_tmp_path):
    """Tasks for a file with a relative path."""
    torch.save({"w": torch.randn(10), "v": torch.ones(3)}, "a.pt")
    return tuple(StatsTask(tensor, tensor.ranges) for tensor in formats.read("a.pt").tensors)


def send_copy(value):
    """Return `value` as another process would receive it."""
    return pickle.loads(pickle.dumps(value))


def test_worker_in_another_folder_reads_relative_paths(tasks, tmp_path, monkeypatch):
    """Relative paths are relative to the command's folder, both for reading and in messages."""
    expected = [read_stats(task.tensor) for task in tasks]
    packed = send_copy(pack(stats_batch, None, tasks))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert unpack(send_copy(run_packed_batch(send_copy(packed)))) == expected
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content.replace(torch.ones(3).numpy().tobytes(), b"\x13" * 12))
    monkeypatch.chdir(tmp_path)
    packed = send_copy(pack(stats_batch, None, tasks))
    monkeypatch.chdir(tmp_path / "elsewhere")
    intact, damaged = unpack(send_copy(run_packed_batch(send_copy(packed))))
    assert intact == expected[0]
    assert isinstance(damaged, MalformedError)
    assert str(damaged).startswith("a.pt: v: checksum wrong")
    assert damaged.place.path == "a.pt"


@pytest.mark.parametrize("name", ["float32", "strided", "parameter", "l.w", "w", "blake3", "a b"])
def test_file_named_like_a_dtype_or_tensor_is_read(name, tmp_path, monkeypatch, statecli):
    """The file has the name of a dtype, a layout, a tensor or an algorithm: only real paths are treated as paths."""
    monkeypatch.chdir(tmp_path)
    for path, seed in ((name, 0), ("other", 1)):
        numbers = torch.Generator().manual_seed(seed)
        values = torch.randn(5000, generator=numbers, dtype=torch.float64)
        state = {"l.w": values.float(), "w": values, "odd": values[::2], "c": values.to(torch.complex64)}
        torch.save({"model": state, "sha256": values.half(), "blake3": values > 0}, path)
    damaged = bytearray((tmp_path / name).read_bytes())
    damaged[damaged.index(read_tensor_bytes(name)) + 9] ^= 1
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / name).write_bytes(damaged)
    commands = [
        ("diff", name, "other", "-f", "json"),
        ("diff", "other", name, "-f", "json"),
        ("inspect", name, "--stats", "-f", "json"),
        ("lock", name, "-o", "-"),
        ("lock", name, "-o", "-", "--digest", "sha256"),
        ("audit", name, "--values", "-f", "json"),
    ]
    for words in (*commands, "in a folder of its own"):
        if isinstance(words, str):  # errors have the command's own message
            monkeypatch.chdir(tmp_path / "broken")
            words = ("inspect", name, "--stats", "-f", "json")
        expected = statecli(*words)
        with ThreadPoolExecutor(2) as threads, use_executor(threads):
            assert statecli(*words) == expected, words
        assert expected.code == (2 if os.path.basename(os.getcwd()) == "broken" else int(words[0] in ("diff", "audit")))


def read_tensor_bytes(path):
    """Return the bytes of `l.w` in the file."""
    return torch.load(path)["model"]["l.w"].numpy().tobytes()


def test_tensor_named_like_a_path_keeps_its_name(tasks, tmp_path):
    """A message has the file's path as typed; a tensor's name is unchanged, even if the name looks like a path."""
    name = str(tmp_path / "a.pt")
    actual = unpack(
        run_packed_batch(pack(stats_batch, None, [StatsTask(replace(task.tensor, fqn=name), ()) for task in tasks]))
    )
    assert actual == [read_stats(task.tensor) for task in tasks]
    shorten_file(tmp_path / "a.pt")
    truncated_tasks = tuple(StatsTask(replace(task.tensor, fqn=name), ()) for task in tasks)
    for error in unpack(run_packed_batch(pack(stats_batch, None, truncated_tasks))):
        assert str(error).startswith(f"a.pt: {name}: ")


def shorten_file(path):
    path.write_bytes(b"12345")


def change_time(path):
    os.utime(path, (1_700_000_000, 1_700_000_000))


def change_header(path):
    """Change only the header, and keep size and time. Two steps of a training seldom differ so little."""
    then = path.stat()
    path.write_bytes(path.read_bytes().replace(b"data.pkl", b"dada.pkl"))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        (Path.unlink, "is missing on "),
        (shorten_file, ": 5 bytes instead of "),
        (change_time, "its modification time differs: "),
        (change_header, "its bytes differ: "),
    ],
)
def test_file_that_differs_on_the_worker_is_reported(tasks, tmp_path, change, expected_message):
    """The worker has no file of this name, or a different file: the error says how to share the file with workers."""
    packed = pack(stats_batch, None, tasks)
    change(tmp_path / "a.pt")
    error = unpack(send_copy(run_packed_batch(send_copy(packed))))
    assert isinstance(error, UnreadableError)
    assert str(error).startswith("a.pt: is ")
    assert f"on the worker {socket.gethostname()}" in str(error)
    assert expected_message in str(error)
    assert str(error).endswith("on a shared disk, or as a copy with the same modification time (cp -p, rsync -t)")


def test_copy_with_the_same_time_is_accepted(tasks, tmp_path):
    """A copy as made by `cp -p` has another inode."""
    expected = [read_stats(task.tensor) for task in tasks]
    packed = pack(stats_batch, None, tasks)
    shutil.copy2(tmp_path / "a.pt", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "a.pt")
    assert unpack(send_copy(run_packed_batch(send_copy(packed)))) == expected


def test_file_changed_while_the_worker_reads_is_reported(tasks, tmp_path, monkeypatch):
    """The values are of neither the old file nor the new file, so the result is an error."""
    packed = pack(stats_batch, None, tasks)
    real = stats_module.stats_batch

    def read(*words):
        results = real(*words)
        change_time(tmp_path / "a.pt")
        return results

    monkeypatch.setattr(stats_module, "stats_batch", read)
    assert "its modification time differs" in str(unpack(run_packed_batch(packed)))


def test_samples_are_read_once(tasks, monkeypatch):
    """Each batch checks the state of the file, but does not read its sample again."""
    read = []
    real = batch.identify_files
    monkeypatch.setattr(batch, "identify_files", lambda paths: read.extend(paths) or real(paths))
    batch._compute_sample_digest.cache_clear()
    for _ in range(3):
        unpack(run_packed_batch(pack(stats_batch, None, tasks)))
    assert [os.path.basename(path) for path in read] == ["a.pt", "a.pt"]  # by its relative path, and its absolute one


class OtherFiles(Executor):
    """An executor whose worker has another training step of the same size in place of `a.pt`."""

    def submit(self, function, *words):
        """Run the function at once, with the other folder in place of this folder."""
        future = Future()
        folder = os.getcwd()  # whole folders change places: renaming a file would touch it
        for first, second in ((folder, f"{folder}.ours"), (f"{folder}.theirs", folder)):
            os.rename(first, second)
        try:
            future.set_result(function(*words))
        finally:
            for first, second in ((folder, f"{folder}.theirs"), (f"{folder}.ours", folder)):
                os.rename(first, second)
        return future


def test_other_file_on_the_worker_gives_no_values(tasks):
    """A diff of two equal checkpoints, but the worker has another `a.pt`: all tensors are broken, and no value is
    reported.
    """
    shutil.copy2("a.pt", "b.pt")
    theirs = Path(f"{Path.cwd()}.theirs")
    theirs.mkdir()
    shutil.copy2("b.pt", theirs)
    torch.save({"w": torch.randn(10), "v": torch.zeros(3)}, theirs / "a.pt")
    assert os.path.getsize(theirs / "a.pt") == os.path.getsize("a.pt")
    diff = package.diff("a.pt", "b.pt", executor=OtherFiles())
    assert {tensor.fqn for tensor in diff.broken} == {"w", "v"}
    assert all(finding.message.startswith("a.pt: is a different file on the worker ") for finding in diff.broken)
    assert not any(change.values for change in diff.changes)


@pytest.mark.parametrize("build", [("0.0.9", "C"), ("0.1.0", "abacus")])
def test_task_of_another_build_is_refused(tasks, build, monkeypatch):
    """Another version may give fields another meaning, and another kernel rounds differently. The worker does not even
    unpack the tasks.
    """
    packed = pack(stats_batch, None, tasks)
    monkeypatch.setattr(batch, "get_current_build", lambda: build)
    monkeypatch.setattr(batch, "pickle", None)
    answer = run_packed_batch(send_copy(packed))
    monkeypatch.undo()
    with pytest.raises(
        EngineError,
        match=rf"the worker runs statecli {build[0]} with the {build[1]} compute kernel, but this command runs",
    ):
        unpack(send_copy(answer))


def test_worker_runs_only_functions_of_the_table():
    """A worker runs only functions of the table, whatever name the batch has; each function of the table exists."""
    import importlib

    nothing = pickle.dumps(("/", {}, None, pickle.dumps((None, ()))))
    assert unpack(run_in_worker(batch.get_current_build(), "stats_batch", nothing)) == []
    with pytest.raises(RuntimeError, match="KeyError"):
        unpack(run_in_worker(batch.get_current_build(), "system", nothing))
    for name, module in batch.FUNCTIONS.items():
        assert getattr(importlib.import_module(module), name).__module__ == module


def test_bug_in_a_worker_raises_in_the_command(tasks):
    """A bug raises in the command and is not an error of a tensor."""
    with pytest.raises(RuntimeError, match="AttributeError: 'str' object has no attribute"):
        unpack(run_packed_batch(pack(stats_batch, None, ("no task",))))


def test_repr_of_a_batch_shows_no_secret(tasks, monkeypatch):
    """Engines log the repr of a failed batch; the batch contains the access to remote files, and the worker receives
    this access.
    """
    imported_accesses = []
    monkeypatch.setattr(files, "export_access", lambda: {"token": "s3cr3t"})
    monkeypatch.setattr(files, "import_access", imported_accesses.append)
    packed = pack(stats_batch, None, tasks)
    assert "s3cr3t" not in f"{packed!r} {packed} {[packed]}"
    assert "a.pt" not in repr(packed)
    unpack(run_packed_batch(send_copy(packed)))
    assert imported_accesses == [{"token": "s3cr3t"}]


# --- number of batches -----------------------------------------------------------------------------------------------


class CountingExecutor(ThreadPoolExecutor):
    """An executor that counts its batches."""

    batches = 0

    def submit(self, *words):
        """As `Executor.submit`."""
        self.batches += 1
        return super().submit(*words)


def test_small_file_is_split_into_batches_for_all_workers(tmp_path, monkeypatch):
    """Each worker gets about four batches, although the file is small enough for a single batch."""
    monkeypatch.chdir(tmp_path)
    torch.save({f"w{n}": torch.randn(50_000) for n in range(64)}, "a.pt")
    monkeypatch.setattr(pool, "MIN_BATCH_BYTES", 1 << 16)
    with CountingExecutor(3) as counting:
        package.inspect("a.pt", stats=True, executor=counting)
    assert 9 <= counting.batches <= 24


def test_batch_size_has_a_minimum_and_a_maximum():
    """A batch has at least 16 MiB, as for a local process, and at most the size at which the cost of sending is
    negligible.
    """
    engine = futures.ExecutorEngine(Executor(), "x", 2)
    assert [engine.min_batch_bytes(size << 20) for size in (1, 400, 1 << 20)] == [
        16 << 20,
        50 << 20,
        futures.MAX_BATCH_BYTES,
    ]
    unknown = futures.ExecutorEngine(Executor(), "x", 0)
    assert unknown.min_batch_bytes(400 << 20) == 16 << 20


# --- answers that are not from a worker ------------------------------------------------------------------------------


class FixedAnswer(Executor):
    """An executor that returns a fixed answer for any task."""

    def __init__(self, answer):
        self._answer = answer

    def submit(self, function, *words):
        """Return the answer without running the function."""
        future = Future()
        future.set_result(self._answer)
        return future


@pytest.mark.parametrize("answer", [None, b"garbage", b"", pickle.dumps([1, 2]), pickle.dumps(None), 3, b"\x80"])
def test_invalid_answer_of_an_executor_is_reported(tasks, answer):
    """The error names the executor and has no traceback, whatever the answer is."""
    with pytest.raises(EngineError, match="executor='FixedAnswer': the executor did not return a result of statecli"):
        package.inspect("a.pt", stats=True, executor=FixedAnswer(answer))


def test_absolute_paths_work_in_a_removed_folder(tmp_path, monkeypatch):
    """The result equals the result without an executor, and a path with dots is reported as the user wrote it."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    sides = []
    for name, value in (("a", 0.0), ("b", 1.0)):
        save_file({"w": torch.full((3,), value)}, tmp_path / name)
        sides.append(f"{tmp_path}/././{name}")
    with ThreadPoolExecutor(1) as executor:
        assert package.diff(*sides, executor=executor) == package.diff(*sides)
