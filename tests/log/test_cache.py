"""The cache of figures: fewer reads, never a wrong result, and no effect of other users' or damaged entries."""

from __future__ import annotations

import json
import os
import stat

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def values_read(monkeypatch):
    """Count the tensors whose values are read, for norms and for changes."""
    from statecli.values import compare, stats

    counts = {"norms": 0, "changes": 0}
    fill, pairs = stats.fill_stats, compare.compare_pairs

    def count_norms(state, *arguments, **options):
        counts["norms"] += len(state.tensors)
        return fill(state, *arguments, **options)

    def count_changes(listed, *arguments, **options):
        counts["changes"] += len(listed)
        return pairs(listed, *arguments, **options)

    monkeypatch.setattr(stats, "fill_stats", count_norms)
    monkeypatch.setattr(compare, "compare_pairs", count_changes)
    return counts


def list_entries(cache_home):
    return sorted((cache_home / "statecli" / "log").glob("*.json"))


def log(statecli, folder, *words):
    return statecli("log", folder, "-f", "json", *words).json


@pytest.fixture
def run(training, tmp_path):
    """Return the folder of a run of three checkpoints with 19 tensors each."""
    folder = tmp_path / "run"
    folder.mkdir()
    for number, state in enumerate(training.states[:3], 1):
        torch.save(state, folder / f"ckpt-{number:04d}.pt")
    return folder


@pytest.fixture
def first(statecli, run):
    """Return the document of a first run, whose entries are in the cache."""
    return log(statecli, run)


def test_a_second_run_reads_no_values(statecli, run, values_read):
    """The first run reads each checkpoint once for its norm and each pair once; the second has the same result."""
    first = log(statecli, run)
    assert values_read == {"norms": 3 * 19, "changes": 2 * 19}
    values_read.update(norms=0, changes=0)
    assert log(statecli, run) == first
    assert values_read == {"norms": 0, "changes": 0}


def test_only_the_added_checkpoint_is_read(statecli, run, values_read):
    """The figures of the other checkpoints come from the previous run."""
    last = run / "ckpt-0003.pt"
    data = last.read_bytes()
    last.unlink()
    log(statecli, run)
    values_read.update(norms=0, changes=0)
    last.write_bytes(data)
    log(statecli, run)
    assert values_read == {"norms": 19, "changes": 19}


def test_no_cache_neither_reads_nor_writes_entries(statecli, run, values_read, cache_home):
    """With --no-cache, neither an entry nor a folder is created."""
    log(statecli, run, "--no-cache")
    log(statecli, run, "--no-cache")
    assert values_read == {"norms": 2 * 3 * 19, "changes": 2 * 2 * 19}
    assert not (cache_home / "statecli").exists()


@pytest.mark.parametrize("has_old_time", [False, True])
def test_a_file_that_was_written_again_is_read_again(statecli, run, first, training, has_old_time):
    """The file keeps its name and size; `cp -p` and rsync restore its modification time, but not the change time."""
    path = run / "ckpt-0003.pt"
    status = path.stat()
    torch.save({name: 2 * tensor for name, tensor in training.states[2].items()}, path)
    if has_old_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert log(statecli, run)["checkpoints"][2]["norm"] == pytest.approx(2 * first["checkpoints"][2]["norm"])


def test_a_file_that_was_just_written_is_not_cached(statecli, run, monkeypatch, cache_home):
    """A second write within the resolution of the clock would leave the same version."""
    from statecli.commands.log import cache

    monkeypatch.setattr(cache, "MIN_AGE_S", 3600.0)
    log(statecli, run)
    assert list_entries(cache_home) == []


def spoil(entry, content):
    data = json.loads(entry.read_text())
    entry.write_bytes(content(data) if callable(content) else content)


HOSTILE_ENTRIES = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95 pickle",
    "a list": b"[]",
    "cut short": lambda data: json.dumps(data).encode()[:-9],
    "other items": lambda data: json.dumps(data | {"items": [{"a": 1}] * len(data["items"])}).encode(),
    "too few items": lambda data: json.dumps(data | {"items": data["items"][1:]}).encode(),
    "negative squares": lambda data: json.dumps(data | {"items": [[-1.0, -1, -1, None]] * len(data["items"])}).encode(),
    "not a number": lambda data: json.dumps(data | {"items": [[float("nan")]] * len(data["items"])}).encode(),
    "texts": lambda data: json.dumps(data | {"items": [["1"]] * len(data["items"])}).encode(),
    "another key": lambda data: json.dumps(data | {"key": "0" * 64}).encode(),
    "deep": b"[" * 200_000,
    "surrogates": b'{"key": "\\ud800", "items": []}',
}


@pytest.mark.parametrize("content", HOSTILE_ENTRIES.values(), ids=HOSTILE_ENTRIES)
def test_a_damaged_entry_is_ignored(statecli, run, cache_home, first, content):
    """The values are read again, and the result equals the first run's."""
    for entry in list_entries(cache_home):
        spoil(entry, content)
    result = statecli("log", run, "-f", "json")
    assert (result.json, result.err) == (first, "")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: modes of files")
@pytest.mark.usefixtures("first")
def test_entries_are_private_to_the_user(cache_home):
    """Entries have the mode 0600, in a folder with the mode 0700."""
    entries = list_entries(cache_home)
    assert len(entries) == 3 + 2
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in entries} == {0o600}
    assert stat.S_IMODE(entries[0].parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: modes of files")
@pytest.mark.parametrize("kind", ["link", "group writes", "folder", "fifo"])
def test_untrusted_entry_is_not_read(statecli, run, cache_home, tmp_path, first, kind):
    """A symbolic link, a folder, or a pipe (whose read would block) is not read either."""
    for number, entry in enumerate(list_entries(cache_home)):
        data = json.loads(entry.read_text())
        forged = json.dumps(data | {"items": [[1e6, 0, 0]] * len(data["items"])})
        entry.unlink()
        if kind == "link":
            target = tmp_path / str(number)
            target.write_text(forged)
            entry.symlink_to(target)
        elif kind == "folder":
            entry.mkdir()
        elif kind == "fifo":
            os.mkfifo(entry)
        else:
            entry.write_text(forged)
            entry.chmod(0o666)
    assert log(statecli, run) == first


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: modes of files")
def test_unwritable_cache_folder_is_not_an_error(statecli, run, monkeypatch):
    """The path of the cache folder is a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "ckpt-0001.pt"))
    result = statecli("log", run, "-f", "json")
    assert (result.code, result.err) == (0, "")


def test_the_oldest_entries_are_removed(statecli, saved_runs, run, cache_home, monkeypatch):
    """The cache has a size limit; a run whose entries were removed reads its values again."""
    from statecli.commands.log import cache

    log(statecli, run)
    size = sum(entry.stat().st_size for entry in list_entries(cache_home))
    monkeypatch.setattr(cache, "MAX_CACHE_BYTES", size // 2)
    monkeypatch.setattr(cache, "WRITES_PER_CHECK", 1)
    first = log(statecli, saved_runs("safetensors"))
    assert sum(entry.stat().st_size for entry in list_entries(cache_home)) <= size
    assert log(statecli, saved_runs("safetensors")) == first


def test_gates_do_not_read_the_cache():
    """`audit` and `lock` do not import the cache, because a cached figure is not a proof."""
    import ast
    from pathlib import Path

    import statecli

    root = Path(statecli.__file__).parent
    modules = [path for name in ("audit", "lock") for path in (root / "commands" / name).rglob("*.py")]
    assert modules
    for path in [*modules, *(root / "rules").rglob("*.py")]:
        imported = [
            node.module for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        assert "statecli.commands.log.cache" not in imported, path


def test_concurrent_writers_leave_complete_entries(saved_runs, cache_home):
    """Each writer replaces its entry atomically, and no temporary file remains."""
    from concurrent.futures import ThreadPoolExecutor

    from statecli.commands.log.run import Request, log_run

    request = Request((str(saved_runs("plain")),))
    with ThreadPoolExecutor(4) as executor:
        logs = list(executor.map(lambda _: log_run(request), range(4)))
    assert all(log == logs[0] for log in logs)
    folder = cache_home / "statecli" / "log"
    assert {path.suffix for path in folder.iterdir()} == {".json"}
    assert all(json.loads(path.read_text())["key"] == path.stem for path in folder.iterdir())
