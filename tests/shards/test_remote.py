"""Shards of URLs: each shard fetches only its own values, and no part file contains a secret."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ..storage.server import After, Headers, Refuse, Server, Signed

SECRET = "wJalrXUtnFEMI-that-no-part-may-have"  # noqa: S105 - it opens nothing


@pytest.fixture
def server(tmp_path):
    """A server with two different checkpoints, which counts the bytes that it sends."""
    folder = tmp_path / "served"
    folder.mkdir()
    for n, name in enumerate(("a.safetensors", "b.safetensors")):
        state = {f"w{i}": torch.full((500, 100), float(i + n * (i % 2))) for i in range(24)}
        save_file(state, folder / name)
    with Server(folder) as actual_server:
        yield actual_server


def test_shards_of_urls_are_merged(server, check_merge):
    """The document is the same as without shards, and nothing is computed twice."""
    assert check_merge(3, "diff", server.url("a.safetensors"), server.url("b.safetensors")) == []
    assert check_merge(2, "inspect", server.url("a.safetensors"), "--stats") == []


def test_shard_fetches_only_its_own_values(server, statecli):
    """A shard fetches a quarter of the bytes, and the headers; the merge fetches headers and samples."""
    line = ("diff", server.url("a.safetensors"), server.url("b.safetensors"))
    size = sum(path.stat().st_size for path in server.folder.iterdir())
    for n in range(1, 5):
        server.forget()
        assert statecli(*line, "--shard", f"{n}/4", "-o", f"{n}.jsonl").code == 0
        assert server.sent < 0.3 * size + 200_000
    server.forget()
    assert statecli("merge", *(f"{n}.jsonl" for n in range(1, 5))).code == 1
    assert server.sent < 300_000


def test_changed_remote_target_is_named(server, statecli, run_shards):
    """ETag and size identify the version, so the merge reads no values."""
    url = server.url("a.safetensors")
    paths, _ = run_shards(2, "inspect", url, "--stats")
    save_file({"w0": torch.ones(3)}, server.folder / "a.safetensors")
    result = statecli("merge", *paths)
    expected_message = f"statecli: {url}: has changed since {paths[0]} was made; run all shards again\n"
    assert (result.code, result.out, result.err) == (2, "", expected_message)


def test_target_without_a_version_is_refused(server, statecli, run_shards):
    """The file may have been replaced between two shards; the user may vouch for the file with --copies."""
    server.behave("*", Headers(ETag=None, Last_Modified=None))
    url = server.url("a.safetensors")
    paths, codes = run_shards(2, "inspect", url, "--stats")
    assert codes == [0, 0]
    result = statecli("merge", *paths)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"statecli: {url}: the storage reports no version")
    assert statecli("merge", *paths, "--copies").code == 0


def test_same_error_of_many_tensors_is_a_single_line(server, statecli):
    """The message is a single line, however many tensors of the shard cannot be read."""
    save_file({f"l.{n}.w": torch.full((9_000,), 1.0) for n in range(40)}, server.folder / "c.safetensors")
    server.behave("c.safetensors", After(1, Refuse(403)))
    result = statecli("inspect", server.url("c.safetensors"), "--stats", "--shard", "1/2", "-o", "1.jsonl")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "more tensors: access is refused (HTTP 403)" in result.err


def test_merge_asks_for_the_whole_url_of_an_adapter(server, statecli, run_shards):
    """The URL of an option such as --adapter needs its secret too."""
    save_file({"w": torch.ones(2)}, "base.safetensors")
    server.behave("a.safetensors", Signed("X-Amz-Signature", SECRET))
    url = server.url("a.safetensors") + f"?X-Amz-Signature={SECRET}"
    paths, _ = run_shards(1, "diff", "base.safetensors", "base.safetensors", "--adapter", url)
    masked_url = server.url("a.safetensors") + "?X-Amz-Signature=…"
    expected_message = (
        f"statecli: {masked_url}: the part files do not contain passwords; give the whole URL with --url URL\n"
    )
    result = statecli("merge", *paths)
    assert (result.code, result.out, result.err) == (2, "", expected_message)


def test_part_contains_no_secret_and_merge_asks_for_it(server, statecli, run_shards):
    """A signed URL is given again; otherwise the merge names the URL."""
    server.behave("a.safetensors", Signed("X-Amz-Signature", SECRET))
    url = server.url("a.safetensors") + f"?X-Amz-Signature={SECRET}"
    masked_url = server.url("a.safetensors") + "?X-Amz-Signature=…"
    assert "403" in statecli("inspect", server.url("a.safetensors"), "--stats").err
    paths, codes = run_shards(2, "inspect", url, "--stats")
    assert codes == [0, 0]
    assert all(SECRET not in Path(path).read_text() for path in paths)
    unsharded = statecli("inspect", url, "--stats", "-f", "json")
    from statecli.storage import masked_url as names

    names.typed_urls().clear()  # the merge runs in another process
    result = statecli("merge", *paths)
    expected_message = (
        f"statecli: {masked_url}: the part files do not contain passwords; give the whole URL with --url URL\n"
    )
    assert (result.code, result.out, result.err) == (2, "", expected_message)
    merged = statecli("merge", *paths, "--url", url, "-f", "json")
    assert (merged.code, merged.out) == (unsharded.code, unsharded.out)
    refused = statecli("merge", *paths, "--url", "https://elsewhere/x")
    assert (
        refused.err
        == f"statecli: --url https://elsewhere/x: the part files do not contain this URL; give one of {masked_url}\n"
    )
