"""Checks that need a real GPU: models on the GPU, and kernels that report wrong arguments after the call."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import statecli  # noqa: E402
from statecli.commands.verify.result import Name, Verdict  # noqa: E402

from .proving import prove_source  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("inputs", ["6x4", torch.ones(6, 4)], ids=["a shape", "a tensor of the CPU"])
def test_model_on_the_gpu_is_checked_on_the_gpu(inputs):
    """Inputs are moved to the model's device, and the model keeps its values and its device."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    values, numbers = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.cuda.get_rng_state()
    verification = statecli.verify(model, inputs=inputs)
    assert {check.check: check.verdict for check in verification.checks} == dict.fromkeys(Name, Verdict.PASSED)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    assert torch.equal(torch.cuda.get_rng_state(), numbers)


def test_tensors_that_forward_creates_on_the_gpu_are_listed():
    """`inspect` with an input calls the model on its own device."""

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.cache = x * self.w
            return self.cache

    state = statecli.inspect(Caching().cuda(), inputs="2x4")
    assert {tensor.fqn: tensor.device for tensor in state.state.tensors} == {"w": "cuda:0", "cache": "cuda:0"}


def test_tensor_created_on_the_gpu_is_reported(in_tmp_path):
    """The constructor created the tensor on this GPU: a move to another GPU would leave the tensor behind."""
    body = 'self.w = nn.Parameter(torch.ones(2)); self.t = torch.ones(2, device="cuda")'
    check = prove_source(Name.MOVE, body, device="cuda")
    assert [finding.fqn for finding in check.findings] == ["t"]
    state = statecli.inspect("net.py:Net", to="cuda")
    assert [(finding.fqn, finding.message) for finding in state.findings] == [
        ("t", check.findings[0].message),
    ]


def test_index_out_of_range_leaves_the_gpu_usable(in_tmp_path):
    """The CPU raises first: an assertion in the CUDA kernel would make the GPU unusable for this process."""
    body = "self.e = nn.Embedding(4, 4)\n---\ndef forward(self, x):\n    return self.e(x)"
    check = prove_source(Name.FORWARD, body, "int64:2x3<99", device="cuda")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "the embedding takes integers from 0 to 3" in check.reason
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_late_error_of_a_kernel_does_not_pass(tmp_path):
    """The error makes the GPU unusable for the process, so the test starts a process."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(4))\n    def forward(self, x):\n        y = self.w * x\n"
        "        if x.is_cuda:\n            torch._assert_async(y.sum() > 1e9)\n        return y\n"
    )
    command = [sys.executable, "-m", "statecli", "verify", "net.py:Net", "--input", "4", "--check", "forward"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, "Traceback" in run.stderr) == (2, False), run.stderr
    assert "device-side assert" in run.stderr.splitlines()[-1]
