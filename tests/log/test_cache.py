"""The cache of figures: fewer reads, never a wrong result, and no effect of other users' or damaged entries."""

from __future__ import annotations

import json
import os
import shutil
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


@pytest.fixture(scope="module")
def first_cache(tmp_path_factory):
    """A folder for the entries of a first run; the document of the run is next to them."""
    return tmp_path_factory.mktemp("first")


@pytest.fixture
def first(statecli, saved_runs, cache_home, first_cache):
    """Return the document of a first run, whose entries are in the cache. The run is made once."""
    document, entries = first_cache / "document.json", first_cache / "statecli"
    if document.exists():
        shutil.copytree(entries, cache_home / "statecli")
    else:
        document.write_text(json.dumps(log(statecli, saved_runs("plain"))))
        shutil.copytree(cache_home / "statecli", entries)
    return json.loads(document.read_text())


def test_each_checkpoint_is_read_once_for_its_norm_and_once_for_the_pair(statecli, saved_runs, values_read):
    """The run has twelve checkpoints of 19 tensors, and eleven pairs."""
    log(statecli, saved_runs("plain"))
    assert values_read == {"norms": 12 * 19, "changes": 11 * 19}


def test_a_second_run_reads_no_values(statecli, saved_runs, values_read):
    """The second run has the same result."""
    first = log(statecli, saved_runs("plain"))
    values_read.update(norms=0, changes=0)
    assert log(statecli, saved_runs("plain")) == first
    assert values_read == {"norms": 0, "changes": 0}


def test_one_more_checkpoint_is_read_alone(statecli, run_folder, values_read):
    """The figures of the other checkpoints come from the previous run."""
    folder = run_folder("plain")
    last = folder / "ckpt-0012.pt"
    data = last.read_bytes()
    last.unlink()
    log(statecli, folder)
    values_read.update(norms=0, changes=0)
    last.write_bytes(data)
    log(statecli, folder)
    assert values_read == {"norms": 19, "changes": 19}


def test_no_cache_reads_and_writes_nothing_there(statecli, saved_runs, values_read, cache_home):
    """With --no-cache, neither an entry nor a folder is created."""
    log(statecli, saved_runs("plain"), "--no-cache")
    log(statecli, saved_runs("plain"), "--no-cache")
    assert values_read == {"norms": 2 * 12 * 19, "changes": 2 * 11 * 19}
    assert not (cache_home / "statecli").exists()


def test_a_file_that_was_written_again_is_read_again(statecli, run_folder, training):
    """The file keeps its name and size."""
    folder = run_folder("plain")
    before = log(statecli, folder)["checkpoints"][2]["norm"]
    torch.save({name: 2 * tensor for name, tensor in training.states[2].items()}, folder / "ckpt-0003.pt")
    assert log(statecli, folder)["checkpoints"][2]["norm"] == pytest.approx(2 * before)


def test_a_file_with_an_old_time_is_read_again(statecli, run_folder, training):
    """`cp -p` and rsync restore the modification time, but the inode's change time is new."""
    folder = run_folder("plain")
    path = folder / "ckpt-0003.pt"
    before = log(statecli, folder)["checkpoints"][2]["norm"]
    status = path.stat()
    torch.save({name: 2 * tensor for name, tensor in training.states[2].items()}, path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert log(statecli, folder)["checkpoints"][2]["norm"] == pytest.approx(2 * before)


def test_a_file_that_was_just_written_is_not_cached(statecli, run_folder, monkeypatch, cache_home):
    """A second write within the resolution of the clock would leave the same version."""
    from statecli.commands.log import cache

    monkeypatch.setattr(cache, "MIN_AGE_S", 3600.0)
    log(statecli, run_folder("plain"))
    assert list_entries(cache_home) == []


def spoil(entry, content):
    data = json.loads(entry.read_text())
    entry.write_bytes(content(data) if callable(content) else content)


HOSTILE = {
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


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_entry_is_ignored(statecli, saved_runs, cache_home, first, content):
    """The values are read again, and the result equals the first run's."""
    for entry in list_entries(cache_home):
        spoil(entry, content)
    result = statecli("log", saved_runs("plain"), "-f", "json")
    assert (result.json, result.err) == (first, "")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: modes of files")
def test_entries_are_the_users_own(statecli, saved_runs, cache_home):
    """Entries have the mode 0600, in a folder with the mode 0700."""
    log(statecli, saved_runs("plain"))
    entries = list_entries(cache_home)
    assert len(entries) == 12 + 11
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in entries} == {0o600}
    assert stat.S_IMODE(entries[0].parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: modes of files")
@pytest.mark.parametrize("kind", ["link", "group writes", "folder", "fifo"])
def test_an_entry_that_others_could_have_written_is_not_read(statecli, saved_runs, cache_home, tmp_path, first, kind):
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
    assert log(statecli, saved_runs("plain")) == first


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: modes of files")
def test_a_folder_that_cannot_be_written_is_no_error(statecli, saved_runs, monkeypatch, tmp_path):
    """The path of the cache folder is a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = statecli("log", saved_runs("plain"), "-f", "json")
    assert (result.code, result.err) == (0, "")


def test_the_oldest_entries_are_removed(statecli, saved_runs, cache_home, monkeypatch):
    """The cache has a size limit; a run whose entries were removed reads its values again."""
    from statecli.commands.log import cache

    log(statecli, saved_runs("plain"))
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


def test_writers_at_the_same_time_leave_whole_entries(statecli, saved_runs, cache_home):
    """Each writer replaces its entry atomically, and no temporary file remains."""
    from concurrent.futures import ThreadPoolExecutor

    from statecli.commands.log.run import Request, log_run

    with ThreadPoolExecutor(4) as executor:
        logs = list(executor.map(lambda _: log_run(Request((str(saved_runs("plain")),))), range(4)))
    assert all(log == logs[0] for log in logs)
    folder = cache_home / "statecli" / "log"
    assert {path.suffix for path in folder.iterdir()} == {".json"}
    assert all(json.loads(path.read_text())["key"] == path.stem for path in folder.iterdir())
