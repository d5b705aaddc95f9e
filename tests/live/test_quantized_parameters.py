"""Parameters of quantization libraries, and shards of DTensor and FSDP2, in a live model."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

import statecli

torch = pytest.importorskip("torch")


@pytest.fixture
def params4bit(monkeypatch):
    """A Linear whose weight has the attributes and the `.to` of `Params4bit` of bitsandbytes 0.50, nn/modules.py."""

    class Params4bit(torch.nn.Parameter):
        def to(self, *args, **kwargs):
            self.quant_state.absmax = self.quant_state.absmax.to(*args, **kwargs)
            return super().to(*args, **kwargs)

    module = ModuleType("bitsandbytes.nn.modules")
    Params4bit.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", module)
    layer = torch.nn.Linear(64, 32)
    weight = Params4bit(torch.zeros(1024, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = SimpleNamespace(absmax=torch.ones(32), shape=torch.Size([32, 64]), quant_type="nf4")
    layer.weight = weight
    return torch.nn.Sequential(layer)


def test_a_parameter_of_bitsandbytes_is_one_weight(params4bit):
    """Its shape is that of its quant_state; the tensors in its attributes are its parts, and no finding."""
    result = statecli.inspect(params4bit)
    (weight,) = result.weights
    assert (weight.fqn, weight.dtype, weight.shape, weight.bits) == ("0.weight", "nf4", (32, 64), 4)
    assert weight.names == ("weight", "quant_state.absmax")
    assert result.findings == ()
    (absmax,) = [tensor for tensor in result.state.tensors if tensor.fqn.endswith("absmax")]
    assert absmax.moves is None


def test_a_class_with_its_own_to_may_move_its_attributes(params4bit, read_live, rows):
    """The stand-in for a move does not call it, so that nothing is claimed."""
    absmax = rows(read_live(lambda: params4bit))["0.weight.quant_state.absmax"]
    assert (absmax.moves, absmax.note) == (None, "cannot tell whether Params4bit.to moves the tensor")


def test_an_attribute_of_a_plain_parameter_is_still_reported(inspect):
    """Only a class with a `.to` of its own may move what its attributes hold."""
    state = inspect(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))
                self.weight.scale = torch.ones(3)
        """
    )
    (scale,) = [tensor for tensor in state.tensors if tensor.fqn == "weight.scale"]
    assert scale.moves is False


def test_real_parameters_of_bitsandbytes():
    """`Linear4bit` and `Linear8bitLt`, quantized on the CPU."""
    bnb = pytest.importorskip("bitsandbytes")
    four = bnb.nn.Linear4bit(64, 32, bias=False)
    four.weight = bnb.nn.Params4bit(torch.randn(32, 64), requires_grad=False, quant_type="nf4")
    eight = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    eight.weight = bnb.nn.Int8Params(torch.randn(32, 64), requires_grad=False, has_fp16_weights=False)
    result = statecli.inspect(torch.nn.Sequential(four.to("cpu"), eight.to("cpu")))
    assert [(weight.dtype, weight.shape) for weight in result.weights] == [("nf4", (32, 64)), ("int8", (32, 64))]
    assert result.findings == ()


def test_real_parameters_of_torchao():
    """Their dtype is that of the dense weight; the size is that of the inner tensors."""
    ao = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    ao.quantize_(model, ao.IntxWeightOnlyConfig(weight_dtype=torch.int4))
    (weight,) = statecli.inspect(model).weights
    own = model[0].weight
    assert (weight.dtype, weight.bits, weight.shape) == ("int4", 4, (32, 64))
    assert weight.nbytes == sum(t.numel() * t.element_size() for t in (own.qdata, own.scale, own.zero_point))


@pytest.mark.parametrize("sizes", [[32, 64], [32, 65], [-1, 64], []])
def test_a_live_layer_of_compressed_tensors(sizes):
    """`weight_shape` is read from the model; sizes that the words cannot hold give no shape."""
    model = torch.nn.Module()
    parts = {"weight_packed": torch.zeros(32, 8, dtype=torch.int32), "weight_scale": torch.ones(32, 2)}
    for name, tensor in (parts | {"weight_shape": torch.tensor(sizes, dtype=torch.int64)}).items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    (weight,) = statecli.inspect(model).weights
    assert weight.shape == ((32, 64) if sizes == [32, 64] else None)
    assert bool(weight.defect) == (sizes != [32, 64])


def test_a_live_layer_of_gptq_counts_as_its_weight(statecli, tmp_path, monkeypatch):
    """gptqmodel registers four buffers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('qweight', torch.zeros(8, 32, dtype=torch.int32))\n"
        "        self.register_buffer('qzeros', torch.zeros(2, 4, dtype=torch.int32))\n"
        "        self.register_buffer('scales', torch.ones(2, 32))\n"
    )
    document = json.loads(statecli("inspect", "net.py:Net", "-f", "json").out)
    assert document["weights"]["parameters"] == 2048
    assert {row["kind"] for row in document["tensors"]} == {"buffer"}


@pytest.fixture
def mesh():
    """A mesh of four ranks on torch's fake process group."""
    dist = pytest.importorskip("torch.distributed")
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", rank=0, world_size=4, store=store)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_a_dtensor_says_what_this_rank_holds(mesh):
    """The shape is that of the whole; a pickled DTensor has the same note."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    placed = [
        torch.nn.Parameter(distribute_tensor(tensor.data, mesh, [placement], src_data_rank=None))
        for tensor, placement in ((model[0].weight, Shard(0)), (model[0].bias, Replicate()))
    ]
    model[0].weight, model[0].bias = placed
    weight, bias = statecli.inspect(model).state.tensors
    assert (weight.shape, weight.note) == ((32, 64), "DTensor: local shape [8, 64], Shard(0)")
    assert (bias.shape, bias.note) == ((32,), "DTensor: local shape [32], Replicate")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_of_fully_shard_is_no_tensor_of_the_model(mesh, device):
    """`fully_shard` keeps shards and gather buffers in objects of torch: FSDP moves them itself."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    result = statecli.inspect(model)
    assert [tensor.fqn for tensor in result.state.tensors] == list(model.state_dict())
    assert result.findings == ()
