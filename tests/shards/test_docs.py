"""The examples of docs/how-to/split-the-work.md run unchanged, each shard as its scheduler would start the shard."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from ..forked_python import write_command

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "split-the-work.md").read_text("utf-8")


def list_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs a line as a job's shell does, next to the examples' checkpoints, and returns its
    output.
    """
    for n, name in enumerate(("before", "after")):
        (tmp_path / name).mkdir()
        save_file({f"w{i}": torch.full((9, 9), float(i + n)) for i in range(9)}, tmp_path / name / "model.safetensors")
    (tmp_path / "checkpoints").mkdir()
    save_file({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "checkpoints" / "a.safetensors")
    (tmp_path / "bin").mkdir()
    write_command(tmp_path / "bin" / "statecli", "-m", "statecli")

    def run(line: str, code: int = 0, **env: str) -> str:
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.run(
            ["sh", "-c", line], env={**os.environ, "PATH": path, **env}, capture_output=True, text=True, check=False
        )
        assert process.returncode == code, process
        return process.stdout

    return run


def test_first_example_runs(shell):
    """Each line runs; the last line prints the same as the unsharded command."""
    *shares, merge = list_blocks("sh")[0].splitlines()
    for line in shares:
        assert shell(line) == ""
    assert shell(merge, 1) == shell("statecli diff before after -f json", 1)


def test_slurm_array_runs(shell):
    """The script reads the variables that Slurm sets."""
    script = list_blocks("sh")[1]
    for n in range(1, 5):
        assert shell(script, SLURM_ARRAY_TASK_ID=str(n), SLURM_ARRAY_TASK_COUNT="4") == ""
    assert shell("statecli merge part-*.jsonl", 1) == shell("statecli diff before after", 1)


def test_kubernetes_job_runs(shell):
    """The indexes of Kubernetes count from 0."""
    spec = yaml.safe_load(list_blocks("yaml")[0])["spec"]
    assert spec["completions"] == 4
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    for n in range(spec["completions"]):
        assert shell(container["args"][0], JOB_COMPLETION_INDEX=str(n)) == ""
    assert shell("statecli merge part-*.jsonl", 1) == shell("statecli diff before after", 1)


def test_github_matrix_runs(shell):
    """Each step runs with the number from the matrix; each job has a separate copy of the checkpoints."""
    jobs = yaml.safe_load(list_blocks("yaml")[1])["jobs"]
    (share,) = (step["run"] for step in jobs["share"]["steps"] if step.get("run", "").startswith("statecli"))
    for n in jobs["share"]["strategy"]["matrix"]["share"]:
        os.utime("checkpoints/a.safetensors", (n, n))
        assert shell(share.replace("${{ matrix.share }}", str(n))) == ""
    (merge,) = (step["run"] for step in jobs["merge"]["steps"] if step.get("run", "").startswith("statecli"))
    assert shell(merge, 1) == shell("statecli audit checkpoints --values -f github", 1)
