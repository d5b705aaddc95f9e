"""A pretended GPU with data: the same rules, for code that looks at values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from statecli.live import fake_gpu, fake_gpu_values  # noqa: E402
from statecli.live.device_rules import DeviceWatch  # noqa: E402

from .mixes import ILLEGAL, LEGAL, READS  # noqa: E402


def ones(*shape):
    """On the CPU."""
    return torch.ones(shape)


def fake_ones(*shape):
    """On the pretended GPU."""
    return torch.ones(shape).to(fake_gpu.DEVICE)


def watch_call(call):
    """What the watch says of one call, and what the call gives."""
    watch = DeviceWatch(fake_gpu.DEVICE)
    with fake_gpu_values.use_fake_gpu_with_values(watch):
        return watch.mismatches, call(ones, fake_ones)


@pytest.mark.parametrize("name", LEGAL)
def test_what_cuda_allows_is_allowed(name):
    """A legal mix of devices is no mismatch, and runs."""
    assert watch_call(LEGAL[name])[0] == []


@pytest.mark.parametrize("name", READS)
def test_values_can_be_read(name):
    """What needs data has it."""
    assert watch_call(READS[name])[0] == []


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_cuda_refuses_is_noted(name):
    """An illegal mix is noted, with this file's line, and the call goes on."""
    found, _ = watch_call(ILLEGAL[name])
    assert found
    assert found[0].place[0].endswith("mixes.py")


@pytest.mark.parametrize(
    "name", [name for name in LEGAL if name not in ("autocast", "dropout", "rand", "assign a slice")]
)
def test_the_values_are_those_of_the_cpu(name):
    """The oracle: the same call made on the CPU alone. (Dropout is random, and autocast is off on a pretended GPU.)"""
    _, out = watch_call(LEGAL[name])
    torch.testing.assert_close(
        out.cpu_data if isinstance(out, fake_gpu_values.FakeGpuTensor) else out, LEGAL[name](ones, ones)
    )


def test_a_moved_model_gives_what_it_gives():
    """A Transformer moved and called gives the CPU's values, and its parameters claim to be on the device."""
    torch.manual_seed(0)
    module = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    expected = module(x, x).detach()
    with fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)):
        module.to(fake_gpu.DEVICE)
        out = module(x.to(fake_gpu.DEVICE), x.to(fake_gpu.DEVICE))
    assert {parameter.device for parameter in module.parameters()} == {fake_gpu.DEVICE}
    torch.testing.assert_close(out.cpu_data, expected)


def test_in_place_gives_the_same_object():
    """`x.add_(1)` is x, a view shares its memory, and `out=` is what was given."""
    with fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)):
        x = fake_ones(3)
        view = x[:2]
        assert x.add_(1) is x
        assert view.cpu_data.tolist() == [2, 2]
        out = fake_ones(3)
        assert torch.add(x, 1, out=out) is out
        assert out.cpu_data.tolist() == [3, 3, 3]


def test_a_shape_that_changes_in_place_is_refused():
    """A wrapper cannot change its shape: it says so, and does not go on with a wrong one."""
    with (
        fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)),
        pytest.raises(NotImplementedError, match="a fake CUDA device cannot do"),
    ):
        fake_ones(2, 3).t_()
