"""A fake CUDA device with data: the same rules, for code that reads values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from statecli.live import fake_gpu, fake_gpu_values  # noqa: E402
from statecli.live.device_rules import DeviceWatch  # noqa: E402

from .mixes import ILLEGAL, LEGAL, VALUE_READS  # noqa: E402


def build_ones(*shape):
    """A tensor on the CPU."""
    return torch.ones(shape)


def build_fake_ones(*shape):
    """A tensor on the fake CUDA device."""
    return torch.ones(shape).to(fake_gpu.DEVICE)


def watch_call(call):
    """Return the mismatches that the watch reports for a call, and the result of the call."""
    watch = DeviceWatch(fake_gpu.DEVICE)
    with fake_gpu_values.use_fake_gpu_with_values(watch):
        return watch.mismatches, call(build_ones, build_fake_ones)


@pytest.mark.parametrize("name", VALUE_READS)
def test_reading_values_is_not_a_mismatch(name):
    """Calls that read values run without a mismatch."""
    assert watch_call(VALUE_READS[name])[0] == []


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_device_mix_is_recorded(name):
    """An illegal mix is recorded with the line of `mixes.py`, and the call continues."""
    mismatches, _ = watch_call(ILLEGAL[name])
    assert mismatches
    assert mismatches[0].place.file.endswith("mixes.py")


@pytest.mark.parametrize("name", LEGAL)
def test_legal_device_mix_gives_the_values_of_the_cpu(name):
    """A legal mix of devices is not a mismatch. The oracle of the values: the same call on the CPU alone. (Dropout is
    random, and autocast is off on a fake CUDA device.)
    """
    mismatches, out = watch_call(LEGAL[name])
    assert mismatches == []
    if name not in ("autocast", "dropout", "rand", "assign a slice"):
        torch.testing.assert_close(
            out.cpu_data if isinstance(out, fake_gpu_values.FakeGpuTensor) else out, LEGAL[name](build_ones, build_ones)
        )


def test_moved_model_gives_the_values_of_the_cpu():
    """A moved Transformer returns the values of the CPU, and its parameters report the fake device."""
    torch.manual_seed(0)
    module = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    expected = module(x, x).detach()
    with fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)):
        module.to(fake_gpu.DEVICE)
        out = module(x.to(fake_gpu.DEVICE), x.to(fake_gpu.DEVICE))
    assert {parameter.device for parameter in module.parameters()} == {fake_gpu.DEVICE}
    torch.testing.assert_close(out.cpu_data, expected)


def test_operator_missing_on_the_cpu_raises_the_error_of_torch():
    """There is no dtype of an argument to compute in another dtype."""
    with (
        fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)),
        pytest.raises((NotImplementedError, RuntimeError), match="not implemented for 'ComplexFloat'"),
    ):
        torch.randperm(4, dtype=torch.complex64)


def test_in_place_operator_returns_the_same_object():
    """`x.add_(1)` returns x, a view shares memory with its base, and `out=` returns the given tensor."""
    with fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)):
        x = build_fake_ones(3)
        view = x[:2]
        assert x.add_(1) is x
        assert view.cpu_data.tolist() == [2, 2]
        out = build_fake_ones(3)
        assert torch.add(x, 1, out=out) is out
        assert out.cpu_data.tolist() == [3, 3, 3]


def test_shape_that_changes_in_place_is_refused():
    """The wrapper cannot change its shape, so the call raises instead of continuing with a wrong shape."""
    with (
        fake_gpu_values.use_fake_gpu_with_values(DeviceWatch(fake_gpu.DEVICE)),
        pytest.raises(NotImplementedError, match="a fake CUDA device cannot do"),
    ):
        build_fake_ones(2, 3).t_()
