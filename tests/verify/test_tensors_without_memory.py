"""Tensors with a size but without memory: statecli neither writes to nor reads from an address of 0."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

import statecli  # noqa: E402
from statecli.commands.verify import copy_model  # noqa: E402
from statecli.commands.verify.result import DEFAULT_PROOFS  # noqa: E402
from statecli.commands.verify.run import Request, verify_model  # noqa: E402
from statecli.core.errors import ModelError, UnreadableError  # noqa: E402
from statecli.live import tensor_bits  # noqa: E402
from statecli.live.tensors import has_memory, is_freed  # noqa: E402
from statecli.values.live_tensor import build_view  # noqa: E402

from .mixes import build_live_subject  # noqa: E402


class Int8(torch.Tensor):
    """A quantized weight as torchao writes it: int8 inside, float32 outside, without memory of its own."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in ("detach", "clone", "alias"):
            return cls(func(args[0].data_, **kwargs), func(args[0].scale, **kwargs))

        def dense(value):
            return value.data_.to(value.scale.dtype) * value.scale if isinstance(value, Int8) else value

        return func(*tree_map(dense, args), **tree_map(dense, kwargs))


class Refusing(torch.Tensor):
    """A wrapper whose every operator raises."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (300, 300), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func.overloadpacket.__name__)


def build_int8(*shape):
    return Int8(torch.ones(*shape, dtype=torch.int8), torch.tensor(0.5))


def free_memory(tensor, to=0):
    tensor.untyped_storage().resize_(to)
    return tensor


def build_linear_with(**tensors):
    """A Linear with the given parameters, buffers or plain attributes."""
    module = nn.Linear(4, 4)
    for name, tensor in tensors.items():
        if name.startswith("buffer"):
            module.register_buffer(name, tensor)
        else:
            setattr(module, name, tensor)
    return module


@pytest.mark.parametrize("inputs", [None, "2x4"])
def test_wrapper_subclass_is_verified(inputs):
    """The wrapper is a weight, a buffer and a plain attribute; the proofs that write values skip the wrapper."""
    model = build_linear_with(
        weight=nn.Parameter(build_int8(4, 4), requires_grad=False), buffer=build_int8(40, 40), plain=build_int8(3, 4)
    )
    verification = statecli.verify(model, inputs=inputs)
    assert {row.fqn for row in verification.state.tensors} == {"weight", "bias", "buffer", "plain"}


@pytest.mark.parametrize("name", ["buffer", "plain"])
def test_wrapper_that_refuses_every_operator_is_not_an_internal_error(name):
    """An error of the wrapper's code makes a proof inconclusive, and the other proofs are run."""
    checks = verify_model(build_live_subject(lambda: build_linear_with(**{name: Refusing()})), Request("net")).checks
    assert any("NotImplementedError" in (check.reason or "") for check in checks)
    assert len(checks) == len(DEFAULT_PROOFS)


def test_tensor_without_memory_is_not_accessed():
    """A wrapper has no memory, however many bytes its storage claims."""
    wrapper = build_int8(40, 40)
    assert wrapper.untyped_storage().nbytes() == 6400
    assert not has_memory(wrapper.untyped_storage())
    assert tensor_bits.get_flat_memory(wrapper) is None
    assert tensor_bits.perturb([wrapper]) == set()
    with pytest.raises(UnreadableError, match="has no data in memory"):
        build_view(wrapper)


@pytest.mark.parametrize("bytes_left", [0, 8])
@pytest.mark.parametrize(
    "build_tensor", [torch.ones, lambda n: nn.Parameter(torch.ones(n))], ids=["tensor", "parameter"]
)
def test_freed_storage_is_refused_by_name(build_tensor, bytes_left):
    """FSDP leaves parameters in this state; torch would read past the end of the storage and crash."""
    tensor = free_memory(build_tensor(100), bytes_left)
    model = build_linear_with(p=tensor)
    with pytest.raises(
        ModelError, match=rf"p: its storage was freed: shape \[100\] needs 400 bytes, but the storage has {bytes_left};"
    ):
        statecli.verify(model)


def test_copy_of_a_freed_storage_has_no_statistics():
    """The copy is freed too: a copy with its own memory would show values that were never written."""
    model = build_linear_with(p=free_memory(torch.ones(30)))
    assert is_freed(copy_model.copy_live_model(model, values=True).p)
    state = statecli.inspect(model, stats=True)
    assert next(row.stats for row in state.state.tensors if row.fqn == "p").max is None


def test_freed_storage_cannot_be_read():
    """The statistics would be computed from memory of another object."""
    with pytest.raises(UnreadableError, match="its storage was freed"):
        build_view(free_memory(torch.ones(30)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build_tensor",
    [
        lambda: torch.ones(3),
        lambda: torch.ones(0),
        lambda: torch.ones(4, 4).t()[1:, 1:],
        lambda: torch.ones(1).expand(1000),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.ones(4, 4).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        nn.UninitializedParameter,
        lambda: build_int8(2, 2),
    ],
    ids=["plain", "empty", "view", "expanded", "meta", "coo", "csr", "quantized", "nested", "lazy", "wrapper"],
)
def test_ordinary_tensor_is_not_freed(build_tensor):
    """Each tensor has all the memory for its elements, or needs no memory."""
    assert not is_freed(build_tensor())
