"""Blobs of a content-addressed cache whose bytes do not match the digest in their names."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
import torch
from safetensors.torch import save

from statecli.commands.audit import values_budget
from statecli.commands.audit.run import Request, audit
from statecli.targets.target_result import TargetStatus

RULE = "digest-mismatch"
WEIGHTS = save({"w": torch.arange(12.0).reshape(3, 4)})
CONFIG = b'{"architectures": ["Net"]}'


def compute_git_digest(data):
    """Digest of a file as computed by git."""
    process = subprocess.run(["git", "hash-object", "--stdin"], input=data, capture_output=True, check=True)
    return process.stdout.decode().strip()


@pytest.fixture
def snapshot(tmp_path):
    """A model in the cache layout of huggingface_hub: blobs named by digest, and a snapshot with links to the blobs."""
    root = tmp_path / "models--org--net"
    folder, blobs = root / "snapshots" / "0a1b", root / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    digests = {"model.safetensors": (hashlib.sha256(WEIGHTS).hexdigest(), WEIGHTS), "config.json": (None, CONFIG)}
    for name, (digest, data) in digests.items():
        blob = blobs / (digest or compute_git_digest(data))
        blob.write_bytes(data)
        (folder / name).symlink_to(blob)
    return folder


def change_last_byte(path):
    """Change the last byte of the blob behind the link."""
    data = path.read_bytes()
    path.resolve().write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_digest_mismatch_finds_a_changed_blob_of_a_snapshot(run_rule, snapshot, name):
    """The name of weights is their SHA-256, and the name of a small file is its git digest."""
    change_last_byte(snapshot / name)
    (finding,) = run_rule(RULE, snapshot)
    assert finding.message.startswith(f"{name}: the file name is the digest {(snapshot / name).resolve().name[:12]}…")


def test_digest_mismatch_spares_an_unchanged_cache(run_rule, snapshot):
    """The folder, the link to the weights, and the blob itself."""
    for path in (snapshot, snapshot / "model.safetensors", (snapshot / "model.safetensors").resolve()):
        assert not run_rule(RULE, path)


def test_the_name_of_a_blob_of_ollama_is_a_digest(run_rule, tmp_path):
    """The digest follows the prefix `sha256-`."""
    blob = tmp_path / "blobs" / f"sha256-{'0' * 64}"
    blob.parent.mkdir()
    blob.write_bytes(WEIGHTS)
    assert len(run_rule(RULE, blob)) == 1


def test_unreadable_blob_is_reported(snapshot):
    """The target fails, and the finding reports that the bytes do not match the digest."""
    (snapshot / "model.safetensors").resolve().write_bytes(WEIGHTS[:40])
    targets = audit(Request((str(snapshot / "model.safetensors"),), select=(RULE,))).targets
    assert [(target.status, [finding.rule for finding in target.findings]) for target in targets] == [
        (TargetStatus.FAILED, [RULE])
    ]


def test_a_blob_beyond_the_limit_is_not_checked(snapshot, statecli, monkeypatch):
    """The verdict mentions the unchecked file. `--values` hashes the file."""
    change_last_byte(snapshot / "model.safetensors")
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_BYTES", 30)
    result = statecli("audit", str(snapshot), "--ignore", "values", "--ignore", "weights")
    assert "1 file (digest not computed: the file is larger than the default limit of 30 B" in result.out
    assert statecli("audit", str(snapshot), "--values").code == 1


def test_file_without_a_digest_as_its_name_is_not_hashed(tmp_path):
    """The rule is skipped, and the reason describes the required file name."""
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (target,) = audit(Request((str(tmp_path / "model.safetensors"),), select=(RULE,))).targets
    assert target.skipped[0].reason.startswith("no file of the target is stored under the digest of its content")
