"""A fake CUDA device without data: CUDA's rules for devices, and moves as CUDA performs them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

from statecli.commands.verify.proofs import move  # noqa: E402
from statecli.commands.verify.result import Verdict  # noqa: E402
from statecli.live import fake_gpu  # noqa: E402
from statecli.live.device_rules import CPU_SCALAR_ARGUMENTS, ONE_CPU_SCALAR_OPERATORS, DeviceWatch, DeviceWatchMode  # noqa: E402

from .mixes import ILLEGAL, LEGAL, build_live_subject, build_sample_subject  # noqa: E402
from .proving import map_verdicts  # noqa: E402


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "legal"), [(name, True) for name in LEGAL] + [(name, False) for name in ILLEGAL])
def test_mismatches_agree_with_cuda(name, legal):
    """The oracle: on a GPU, a call raises exactly when the watch reports a mismatch."""
    call = (LEGAL if legal else ILLEGAL)[name]
    cpu, gpu = (lambda *shape: torch.ones(shape)), (lambda *shape: torch.ones(shape, device="cuda:0"))
    with nullcontext() if legal else pytest.raises((RuntimeError, ValueError)):
        call(cpu, gpu)
    watch = DeviceWatch(torch.device("cuda", 0))
    with DeviceWatchMode(watch), torch.no_grad():
        call(cpu, gpu)
    assert bool(watch.mismatches) is not legal


def test_operators_with_cpu_scalars_are_unchecked_by_torch():
    """The oracle is torch's own list: an operator without `device_check: NoCheck` refuses any tensor of the CPU."""
    torchgen = pytest.importorskip("torchgen")
    listed = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    unchecked, composed = set(), set()
    for entry in listed.read_text().split("\n- func: ")[1:]:
        name = entry.partition("(")[0].partition(".")[0]
        if "device_check: NoCheck" in entry:
            unchecked.add(name.removesuffix("_") if not name.endswith("__") else name)
        elif "CompositeExplicitAutograd" in entry:
            composed.add(name.removesuffix("_"))
    # Composed of other operators, which torch checks: 2 ** other, and a loss.
    own = {"ldexp", "soft_margin_loss", "allclose"}
    assert (ONE_CPU_SCALAR_OPERATORS | CPU_SCALAR_ARGUMENTS.keys()) - unchecked <= own & composed


# --- the move --------------------------------------------------------------------------------------------------------


class SecondNames(nn.Module):
    """A model with second names of a parameter and of a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.fc.weight
        self.listed = [self.fc.weight]
        self.register_buffer("buffer", torch.ones(2))
        self.old = self.buffer


def test_parameter_keeps_its_identity_after_a_move():
    """As on CUDA, all other names of a Parameter follow a move; a second name of a buffer keeps the old tensor."""
    module = SecondNames()
    weight = module.fc.weight
    with fake_gpu.use_fake_gpu(DeviceWatch(fake_gpu.DEVICE)):
        module.to(fake_gpu.DEVICE)
    assert module.fc.weight is weight is module.tied.weight is module.listed[0]
    assert (weight.device, module.buffer.device, module.old.device.type) == (fake_gpu.DEVICE, fake_gpu.DEVICE, "cpu")
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad


def test_patched_methods_of_torch_are_restored():
    """After the block, even if it raises, the patched methods of torch are the original methods again."""

    def list_patched():
        patched = vars(FakeTensor)["device"], torch.cuda.is_available, torch.cuda.device_count
        return nn.Module._apply, torch.amp.autocast_mode.autocast.__init__, torch.is_autocast_enabled, *patched

    before = list_patched()
    with pytest.raises(ZeroDivisionError), fake_gpu.use_fake_gpu(DeviceWatch(fake_gpu.DEVICE)):
        _ = 1 / 0
    assert list_patched() == before
    assert type(nn.Linear(2, 2).double().weight) is nn.Parameter


def test_move_reports_the_tensor_left_on_cpu():
    """The plain tensor fails with its line and its fix; the others follow to a device shown as `cuda:0 (fake)`."""
    check = move.prove(build_sample_subject("net:Net"), move.FAKE_CUDA)
    assert map_verdicts(check, "moves") == {"param": "passed", "mybuffer1": "passed", "table": "failed"}
    (finding,) = check.findings
    assert (finding.rule, finding.fqn) == ("left-behind", "table")
    assert "register_buffer" in finding.help
    assert check.columns[0].cells["param"].after == "cuda:0 (fake)"


def test_move_reports_the_stale_view():
    """A second name of a buffer is reported; a second name of a parameter is not."""
    check = move.prove(build_live_subject(SecondNames), move.FAKE_CUDA)
    assert [(finding.rule, finding.fqn) for finding in check.findings] == [("stale-view", "old")]


def test_model_on_meta_has_the_same_verdicts():
    """The move needs no data: a model built on meta has the same verdicts."""
    check = move.prove(build_sample_subject("net:Net", init_device="meta"), move.FAKE_CUDA)
    assert map_verdicts(check, "moves") == {"param": "passed", "mybuffer1": "passed", "table": "failed"}


class OwnApply(nn.Module):
    """A class whose `_apply` moves its plain tensor."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.state = torch.ones(2)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.state = fn(self.state)
        return self


class OwnTo(nn.Module):
    """A class whose `.to` moves its plain tensor."""

    def __init__(self):
        super().__init__()
        self.state = torch.ones(2)

    def to(self, *args, **kwargs):
        self.state = self.state.to(*args, **kwargs)
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(
    "build_module",
    [OwnApply, OwnTo, lambda: nn.LSTM(2, 3), lambda: nn.LazyLinear(2)],
    ids=["_apply", "to", "rnn", "lazy"],
)
def test_overridden_moves_run(build_module):
    """The class's own `_apply` or `.to` moves the plain tensor; an RNN's flat weights and a lazy parameter follow."""
    check = move.prove(build_live_subject(build_module), move.FAKE_CUDA)
    assert set(map_verdicts(check, "moves").values()) == {"passed"}, check


def test_parameter_in_an_autograd_graph_passes():
    """torch cannot swap this parameter, but its other names follow as on CUDA."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.same = [self.weight]
            self.graph = self.weight * 2

    assert map_verdicts(move.prove(build_live_subject(Held), move.FAKE_CUDA), "moves") == {
        "weight": "passed",
        "graph": "failed",
    }


class Sparse(nn.Module):
    """A registered sparse tensor and a plain sparse tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.eye(3).to_sparse())
        self.lost = torch.eye(3).to_sparse()


def test_sparse_model_is_moved_with_data():
    """FakeTensorMode does not support sparse tensors on the fake device, so the model is moved with data."""
    assert map_verdicts(move.prove(build_live_subject(Sparse), move.FAKE_CUDA), "moves") == {
        "kept": "passed",
        "lost": "failed",
    }


def test_move_that_raises_is_inconclusive():
    """The reason has the model's own error, and there is no finding."""

    class Broken(nn.Linear):
        def _apply(self, fn, recurse=True):
            if fn(torch.ones(1)).device.type != "cpu":
                raise ValueError("not to be moved")
            return super()._apply(fn, recurse)

    check = move.prove(build_live_subject(lambda: Broken(2, 2)), move.FAKE_CUDA)
    assert check.findings == ()
    assert "not to be moved" in check.reason
    assert check.verdict is Verdict.INCONCLUSIVE
