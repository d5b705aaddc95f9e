"""Other filesystems of fsspec: memory, archives behind URLs, caches; and names, globs and folders of URLs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, strategies as st
from safetensors.torch import save_file

from statecli.core.errors import UnreadableError
from statecli.storage import files, object_store as stores, retry
from statecli.storage.fsspec_store import check_length, parse_range

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory():
    """fsspec's in-memory filesystem, empty."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()


def write_checkpoint(folder: Path, name: str = "m.safetensors", size: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.arange(size, dtype=torch.float32)}, folder / name)
    return folder / name


UNSUPPORTED = "chains of URLs (`::`) are not supported: download and unpack the archive first"


# --- filesystems


def test_memory_filesystem_is_read(memory, tmp_path, statecli):
    """A file in memory is inspected, and a folder in memory is audited."""
    memory.pipe("/run/a.safetensors", write_checkpoint(tmp_path).read_bytes())
    memory.pipe("/run/deep/b.safetensors", write_checkpoint(tmp_path).read_bytes())
    assert statecli("inspect", "memory://run/a.safetensors").code == 0
    targets = statecli("audit", "memory://run", "-f", "json").json["targets"]
    assert [target["target"] for target in targets] == ["memory://run/a.safetensors", "memory://run/deep/b.safetensors"]


def test_changed_object_is_reported(memory, tmp_path):
    """Such a filesystem sends no version with the bytes, so the version is requested again after the bytes."""
    path = write_checkpoint(tmp_path)
    memory.pipe("/m.safetensors", path.read_bytes())
    store = stores.open_store("memory://m.safetensors")
    _, version = store.get("memory://m.safetensors", 0, 8, None)
    assert version[0] == path.stat().st_size
    memory.pipe("/m.safetensors", path.read_bytes())
    with pytest.raises(UnreadableError, match="changed while statecli read it"):
        store.get("memory://m.safetensors", 8, 8, version)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("nothing://a/b.pt", "fsspec does not support nothing://"),
        *(
            (url, UNSUPPORTED)
            for url in ("zip://a.pt::https://h/b", "zip://::memory://b", "simplecache::https://h/a.pt")
        ),
        ("memory://a/none.pt", "does not exist"),
    ],
)
def test_unreadable_url_gives_a_single_line(statecli, url, line, memory):
    """An unknown scheme, a chain and a missing file."""
    assert statecli("inspect", url).err == f"statecli: {url}: {line}\n"


def test_missing_package_is_named(statecli, monkeypatch):
    """The message contains fsspec's own words, or names fsspec if fsspec is missing."""
    monkeypatch.setitem(sys.modules, "adlfs", None)
    result = statecli("inspect", "abfs://container/m.pt")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "adlfs" in result.err
    files.forget_command()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    result = statecli("inspect", "memory://m.pt")
    assert (result.code, result.err) == (
        2,
        "statecli: URLs need the package fsspec: pip install 'torch-statecli[remote]'\n",
    )


def test_text_of_a_foreign_exception_is_not_shown(memory, statecli, monkeypatch):
    """An exception may contain a token, so only the class name of a foreign exception is shown, even with --debug."""

    def raise_with_token(*_, **__):
        raise RuntimeError("token=hunter2-hunter2")

    monkeypatch.setattr(type(memory), "info", raise_with_token)
    result = statecli("inspect", "memory://m.pt", "--debug")
    assert result.code == 2
    assert "cannot be read (RuntimeError)" in result.err
    assert "hunter2" not in result.err


# --- answers


@pytest.mark.parametrize(
    ("content_range", "length", "expected"),
    [("bytes 0-9/100", 10, (0, 10, 100)), ("bytes 0-4/5", 5, (0, 5, 5)), (None, 7, (0, 7, 7))],
)
def test_valid_content_range_is_parsed(content_range, length, expected):
    """A range, a range cut by the object's end, and all bytes of a small object."""
    assert parse_range(content_range, length, 0, 10) == expected


@pytest.mark.parametrize(
    ("content_range", "length"),
    [
        ("bytes 1-10/100", 10),
        ("bytes 0-8/100", 9),
        ("bytes 0-9/100", 11),
        ("bytes 0-9/*", 10),
        ("pages 0-9/100", 10),
        (None, None),
        (None, 1 << 30),
    ],
)
def test_invalid_content_range_is_refused(content_range, length):
    """Another range, a shorter range, a contradicting length, no size, no range."""
    with pytest.raises(UnreadableError):
        parse_range(content_range, length, 0, 10)


def test_truncated_body_raises_transient():
    """A cut body raises Transient, so that the range is requested again."""
    with pytest.raises(retry.Transient, match="after 3 of 10 bytes"):
        check_length(b"abc", 0, 10)


# --- names

NAMES = st.text("abc.-_é ", min_size=1, max_size=5).filter(lambda name: name.strip(". "))
ROOTS = st.sampled_from(["s3://bucket", "https://host:80", "https://[::1]:80", "hf://org/net@v1", "memory://x"])
QUERIES = st.sampled_from(["", "?versionId=3"])


@given(ROOTS, st.lists(NAMES, min_size=1, max_size=4), QUERIES)
def test_joining_and_splitting_are_inverse(root, names, rest):
    """The query stays at the end. (In hf:// URLs, `?` belongs to names.)"""
    assume(not (root.startswith("hf") and rest.startswith("?")))
    folder = root + rest
    path = files.join(folder, *names)
    assert path.endswith(rest)
    assert files.get_name(path) == names[-1]
    assert files.make_relative(path, folder) == "/".join(names)
    assert files.make_absolute(files.get_folder(path)) == files.join(folder, *names[:-1])
    assert files.make_absolute(folder) in (*files.iter_parents(path),)
    assert files.make_relative(folder, folder) == "."


@pytest.mark.parametrize(
    ("path", "folder"), [("s3://b/run2/m", "s3://b/run"), ("s3://c/m", "s3://b"), ("https://h/m?a=1", "https://h/")]
)
def test_path_outside_of_the_folder_is_unchanged(path, folder):
    """A name with the same beginning, another bucket, another query."""
    assert files.make_relative(path, folder) == path


def test_url_glob_matches_listings(memory):
    """Globs match the folders' listings; hidden names match only a pattern with a dot; `**` matches any folders."""
    for name in ("run-1/m.pt", "run-2/m.pt", "run-2/n.pt", "other/m.pt", "run-1/.hidden.pt", "run-1/deep/m.pt"):
        memory.pipe(f"/top/{name}", b"x")

    def match_names(pattern: str) -> list[str]:
        return sorted(path.removeprefix("memory://top/") for path in files.match_glob(pattern))

    assert match_names("memory://top/run-*/m.pt") == ["run-1/m.pt", "run-2/m.pt"]
    assert match_names("memory://top/run-[2]/*.pt") == ["run-2/m.pt", "run-2/n.pt"]
    assert match_names("memory://top/run-1/.*") == ["run-1/.hidden.pt"]
    assert match_names("memory://top/run-1/**/m.pt") == ["run-1/deep/m.pt", "run-1/m.pt"]
    assert match_names("memory://top/none-*/m.pt") == []
    assert match_names("memory://top/run-*/") == ["run-1/", "run-2/"]
    assert match_names("memory://top/*/deep/") == ["run-1/deep/"]
    assert match_names("memory://top/run-1/*/") == ["run-1/deep/"]
    assert match_names("memory://top/run-1/**/") == ["run-1/", "run-1/deep/"]


@pytest.mark.parametrize("pattern", ["run-*/", "*/deep/", "run-1/*/", "run-1/**/", "**/", "*/*", "run-?/"])
def test_url_glob_matches_the_same_names_as_on_disk(memory, tmp_path, pattern):
    """A slash at the end matches folders only, and stays in the name. (`?` is not a wildcard in a URL.)"""
    for name in ("run-1/m.pt", "run-2/m.pt", "other/m.pt", "run-1/deep/m.pt", "run-1/deep/er/m.pt", "m.pt"):
        memory.pipe(f"/top/{name}", b"x")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    local_names = {path.removeprefix(f"{tmp_path}/") for path in files.match_glob(f"{tmp_path}/{pattern}")}
    remote_names = {
        path.removeprefix("memory://top/") for path in files.match_glob(f"memory://top/{pattern.replace('?', '[0-9]')}")
    }
    assert remote_names == local_names
    assert local_names


@pytest.mark.parametrize(
    ("text", "is_glob"),
    [
        ("https://h/m.pt?a=1", False),
        ("https://[::1]/m.pt", False),
        ("https://h/run-*/m.pt?a=1", True),
        ("s3://b/run-[12]/m.pt", True),
    ],
)
def test_query_and_ipv6_address_are_not_globs(text, is_glob):
    """The `?` of a query and the brackets of an IPv6 address are not wildcards."""
    assert files.is_glob(text) is is_glob
