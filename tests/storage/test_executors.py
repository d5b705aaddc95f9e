"""Workers in separate processes, which learn about a URL only from their tasks."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import statecli as package

from .server import After, Basic, Refuse

PASSWORD = "sesame-opens-it"  # noqa: S105 - it opens nothing


@pytest.fixture
def url_with_password(file_server, monkeypatch, one_task_per_batch):
    """Return a function that adds the password to the URL of a file; each task is a separate batch."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    for n, name in enumerate(("a.safetensors", "b.safetensors")):
        save_file({f"w{i}": torch.full((50_000,), float(i + n * (i % 2))) for i in range(8)}, file_server.folder / name)
    file_server.behave("*", Basic("me", PASSWORD))
    return lambda name: file_server.url(name).replace("://", f"://me:{PASSWORD}@")


@pytest.fixture
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
    ) as cluster:
        yield cluster


def test_workers_of_dask_read_urls(url_with_password, file_server, cluster, statecli):
    """Workers use the command's credentials and give the same document; a refusal in a worker fails the command."""
    line = ("diff", url_with_password("a.safetensors"), url_with_password("b.safetensors"), "-f", "json")
    local_result = statecli(*line)
    engine = f"dask:{cluster.scheduler_address}"
    result = statecli(*line, "--executor", engine, "--debug")
    assert result == local_result
    assert local_result.code == 1
    file_server.behave("b.safetensors", After(1, Refuse(403, f"<h1>{PASSWORD}</h1>")))
    failed_result = statecli(*line, "--executor", engine, "--debug")
    assert failed_result.code == 2
    assert "access is refused (HTTP 403)" in failed_result.err
    logs = str(cluster.get_logs())
    assert not [
        text for text in (result.out, result.err, failed_result.out, failed_result.err, logs) if PASSWORD in text
    ]


def test_spawned_processes_read_urls(url_with_password):
    """An Executor of Python with spawned processes, which inherit nothing."""
    urls = url_with_password("a.safetensors"), url_with_password("b.safetensors")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        diff = package.diff(*urls, executor=processes)
    assert msgspec.json.encode(diff) == msgspec.json.encode(package.diff(*urls))
    changed = {change.fqn for change in diff.changes if change.status.value == "changed"}
    assert changed == {"w1", "w3", "w5", "w7"}
