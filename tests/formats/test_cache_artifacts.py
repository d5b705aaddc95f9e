"""Files of `torch.compiler.save_cache_artifacts`: loading the file unpickles its content."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.compiler import _cache
from torch.utils import _appending_byte_serializer

from statecli.commands.audit.run import Request, audit
from statecli.targets.target_result import TargetStatus


def save_artifacts(monkeypatch):
    """Return the bytes of a cache with a single pickle, as torch writes them."""

    class Artifact(_cache.CacheArtifact):
        def populate_cache(self):
            pickle.loads(self.content)

        @staticmethod
        def type():
            return "own"

    monkeypatch.setattr(_cache.CacheArtifactFactory, "_artifact_types", {"own": Artifact})
    with _cache.CacheArtifactManager.with_fresh_cache():
        _cache.CacheArtifactManager.record_artifact("own", "key", pickle.dumps({"a": 1}))
        data, _ = _cache.CacheArtifactManager.serialize()
    return data


def test_torch_writes_the_version_that_is_recognised():
    assert _appending_byte_serializer._ENCODING_VERSION == 1
    assert _appending_byte_serializer.CHECKSUM_DIGEST_SIZE == 4


@pytest.mark.parametrize("has_checksum", [True, False], ids=["torch 2.13", "before checksums"])
@pytest.mark.parametrize("name", ["cache", "cache.bin", "cache.pt", "cache.txt"])
def test_compile_cache_fails_the_audit(tmp_path, monkeypatch, name, has_checksum):
    """A cache in a folder fails the audit too, because torch unpickles the cache."""
    data = save_artifacts(monkeypatch)
    (tmp_path / name).write_bytes(data if has_checksum else data[4:])
    (result,) = audit(Request((str(tmp_path),))).targets
    assert result.status is TargetStatus.FAILED
    assert "a torch.compile cache, which statecli does not read" in result.reason
    assert {finding.rule for finding in result.findings} == {"unsafe-data"}


def write_zip(path):
    """Write a file of torch.save whose first header has the bytes of a cache."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    data = bytearray(buffer.getvalue())
    data[4:12] = b"\0\0\0\0\0\0\0\1"
    path.write_bytes(data)


def write_prefixed_zip(path):
    """Write a file of torch.save after the first bytes of a cache."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    path.write_bytes(b"abcd\0\0\0\0\0\0\0\1" + buffer.getvalue())


def write_pickle(path):
    """Write the opcodes of a protocol-0 pickle in place of a cache's checksum, and the version of a cache."""
    path.write_bytes(b"I1\n0" + b"\0\0\0\0\0\0\0\1")


@pytest.mark.parametrize("write", [write_zip, write_prefixed_zip, write_pickle])
@pytest.mark.parametrize("name", ["model.pt", "model"])
def test_checkpoint_that_is_also_a_cache_is_unsafe(tmp_path, write, name):
    """A file can be a checkpoint and a cache, because any four bytes can be the checksum of a cache."""
    write(tmp_path / name)
    if write is write_zip:
        assert torch.load(tmp_path / name)["w"].sum() == 2
    for target in (tmp_path, tmp_path / name):
        (result,) = audit(Request((str(target),))).targets
        assert "unsafe-data" in {finding.rule for finding in result.findings}


@pytest.mark.parametrize(
    "data",
    [b"abcd" + bytes(8), b"ab" + bytes(7) + b"\1abc", b"abcd" + bytes(6) + b"\1\0"],
    ids=["zeros", "shift", "one"],
)
def test_file_of_numbers_is_not_taken_for_a_cache(tmp_path, data):
    (tmp_path / "numbers.dat").write_bytes(data + bytes(range(256)))
    (result,) = audit(Request((str(tmp_path),))).targets
    assert (result.status, result.findings) == (TargetStatus.SKIPPED, ())
