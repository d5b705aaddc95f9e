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
    """The shape is the shape in quant_state; the tensors in the attributes are parts of the weight and not findings.

    The fake move does not call the class's own .to, so the result for these tensors is unknown.
    """
    result = statecli.inspect(params4bit)
    (weight,) = result.weights
    assert (weight.fqn, weight.dtype, weight.shape, weight.bits) == ("0.weight", "nf4", (32, 64), 4)
    assert weight.names == ("weight", "quant_state.absmax")
    assert result.findings == ()
    (absmax,) = [tensor for tensor in result.state.tensors if tensor.fqn == "0.weight.quant_state.absmax"]
    assert (absmax.moves, absmax.note) == (None, "statecli does not know whether Params4bit.to moves the tensor")


def test_an_attribute_of_a_plain_parameter_is_still_reported(inspect):
    """Only a class with its own `.to` may move the tensors in its attributes."""
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


@pytest.mark.parametrize("double", [False, True])
def test_a_real_layer_of_four_bits_is_one_weight(double):
    """The layer and its weight hold the same `quant_state`: its tensors are parts of the weight, moved by its class."""
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(bnb.nn.Linear4bit(64, 32, quant_type="nf4", compress_statistics=double)).to("cpu")
    before = model[0].weight.quant_state
    result = statecli.inspect(model)
    (weight,) = result.weights
    assert weight.names[:3] == ("weight", "quant_state.absmax", "quant_state.code")
    assert ("quant_state.state2.absmax" in weight.names) == double
    assert {part.fqn for part in weight.parts} | {"0.bias"} == {tensor.fqn for tensor in result.state.tensors}
    assert [tensor.moves for tensor in result.state.tensors if tensor.fqn == "0.bias"] == [True]
    assert (result.findings, result.state.oddities) == ((), ())
    assert model[0].weight.quant_state is model[0].quant_state is before
    assert model[0].weight.module is model[0]
    assert statecli.verify(model, checks=["cast"]).findings == ()  # `Params4bit.to` decides about its scales


def test_a_real_layer_of_eight_bits_is_one_weight_after_forward():
    """The first forward moves the scales from the weight to the layer, where `.to()` of the model leaves the scales."""
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)).to("cpu")
    model(torch.ones(2, 64))
    result = statecli.inspect(model)
    assert [weight.names for weight in result.weights] == [("weight", "SCB")]
    assert [finding.fqn for finding in result.findings] == ["0.state.SCB", "0.state.CB"]


def test_a_real_pickled_layer_of_eight_bits_is_one_weight(tmp_path):
    """torch.save(model) makes a Parameter of `Int8Params`, so a move leaves the scales: one finding with the cause."""
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)).to("cpu")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded[0].weight) is torch.nn.Parameter
    result = statecli.inspect(loaded)
    assert [weight.names for weight in result.weights] == [("weight", "SCB")]
    (finding,) = result.findings
    assert finding.fqn == "0.weight.SCB"
    assert "save model.state_dict() instead" in finding.help


def test_a_real_pickled_layer_of_four_bits_is_one_weight(tmp_path):
    """The weight is a plain Parameter that still has the `quant_state`."""
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(bnb.nn.Linear4bit(64, 32, quant_type="nf4")).to("cpu")
    torch.save(model, tmp_path / "model.pt")
    result = statecli.inspect(torch.load(tmp_path / "model.pt", weights_only=False))
    assert result.weights[0].names[:2] == ("weight", "quant_state.absmax")
    assert {finding.fqn.rpartition(".")[0] for finding in result.findings} >= {"0.weight.quant_state"}
    assert all("save model.state_dict() instead" in finding.help for finding in result.findings)


@pytest.fixture
def unpickled_layer(monkeypatch):
    """Return a bitsandbytes layer as `torch.load` returns it: a plain Parameter with the attributes of `Int8Params`."""

    class Linear8bitLt(torch.nn.Linear):
        pass

    module = ModuleType("bitsandbytes.nn.modules")
    Linear8bitLt.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", module)
    layer = Linear8bitLt(64, 32)
    layer.weight = torch.nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
    layer.weight.CB, layer.weight.SCB = layer.weight.data, torch.ones(32)
    return torch.nn.Sequential(layer)


def test_a_pickled_parameter_has_its_parts(unpickled_layer):
    """The copy that is moved has the attributes, and the move leaves the attributes on the old device."""
    result = statecli.inspect(unpickled_layer)
    assert [weight.names for weight in result.weights] == [("weight", "SCB")]
    assert [finding.fqn for finding in result.findings].count("0.weight.SCB") == 1
    assert [tensor.moves for tensor in result.state.tensors if tensor.fqn == "0.weight.SCB"] == [False]


def test_attribute_shared_by_layer_and_weight_is_one_part(params4bit):
    """The layer holds the same `quant_state`, and the weight a reference to the layer, as in bitsandbytes."""
    layer = params4bit[0]
    layer.quant_state, layer.weight.module = layer.weight.quant_state, layer
    result = statecli.inspect(params4bit)
    assert result.weights[0].names == ("weight", "quant_state.absmax")
    assert result.state.oddities == ()
    assert layer.quant_state is layer.weight.quant_state


def test_attributes_of_a_plain_parameter_are_copied():
    """`copy.deepcopy` drops the attributes of a Parameter, but the copy that is moved has the attributes."""
    from statecli.commands.verify import live_model

    layer = torch.nn.Linear(4, 4)
    layer.weight.scale, layer.weight.owner = torch.ones(3), layer
    copied = live_model.build_copy(layer).module
    assert torch.equal(copied.weight.scale, torch.ones(3))
    assert copied.weight.scale is not layer.weight.scale
    assert copied.weight.owner is copied


def test_real_parameters_of_torchao():
    """The dtype is the dtype of the dense weight; the size is the size of the inner tensors."""
    ao = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    ao.quantize_(model, ao.IntxWeightOnlyConfig(weight_dtype=torch.int4))
    (weight,) = statecli.inspect(model).weights
    layer_weight = model[0].weight
    assert (weight.dtype, weight.bits, weight.shape) == ("int4", 4, (32, 64))
    assert weight.nbytes == sum(
        t.numel() * t.element_size() for t in (layer_weight.qdata, layer_weight.scale, layer_weight.zero_point)
    )


@pytest.mark.parametrize("sizes", [[32, 64], [32, 65], [-1, 64], []])
def test_a_live_layer_of_compressed_tensors(sizes):
    """`weight_shape` is read from the model; sizes that do not fit the packed words give no shape."""
    model = torch.nn.Module()
    parts = {"weight_packed": torch.zeros(32, 8, dtype=torch.int32), "weight_scale": torch.ones(32, 2)}
    for name, tensor in (parts | {"weight_shape": torch.tensor(sizes, dtype=torch.int64)}).items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    (weight,) = statecli.inspect(model).weights
    assert weight.shape == ((32, 64) if sizes == [32, 64] else None)
    assert bool(weight.defect) == (sizes != [32, 64])


def test_a_live_layer_of_gptq_counts_as_its_weight(statecli, tmp_path, in_tmp_path):
    """gptqmodel registers four buffers."""
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


def test_note_of_a_dtensor_has_the_local_shape(mesh, tmp_path):
    """The shape is the shape of the whole tensor; a pickled DTensor has the same note."""
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
    torch.save({"weight": model[0].weight.data}, tmp_path / "a.pt")
    (pickled,) = statecli.inspect(tmp_path / "a.pt").state.tensors
    assert (pickled.shape, pickled.note) == (weight.shape, weight.note)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fully_shard_adds_no_tensor_to_the_model(mesh, device):
    """`fully_shard` keeps shards and gather buffers in its own objects, and FSDP moves the shards and buffers."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    result = statecli.inspect(model)
    assert [tensor.fqn for tensor in result.state.tensors] == list(model.state_dict())
    assert result.findings == ()
