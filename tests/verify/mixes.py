"""Calls that mix devices, some legal on CUDA and some not, and models to check.

In each call, `c` creates a tensor on the CPU and `g` creates a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from statecli.commands.verify import first_forward, model_under_test as subjects
from statecli.commands.verify.inputs import Inputs
from statecli.live.assignment_lines import Origins
from statecli.live.build import build
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec, parse_spec

#: A variable of this file that no model registers.
TABLE = torch.ones(3)
SAMPLES = Path(__file__).parents[2] / "sample_models"


def _index(*values):
    return torch.tensor(values)


LEGAL = {
    "scalar": lambda c, g: g(3) + 2,
    "0-dim of the CPU": lambda c, g: g(3) + c(1)[0],
    "0-dim of the CPU first": lambda c, g: c(1)[0] * g(3),
    "CPU indices into a device table": lambda c, g: g(3)[_index(0, 1)],
    "a CPU mask into a device table": lambda c, g: g(3)[_index(True, False, True)],
    "0-dim value put": lambda c, g: g(3).index_put_((_index(0),), c(1)[0]),
    "where with a 0-dim": lambda c, g: torch.where(g(3) > 0, g(3), c(1)[0]),
    "copy_": lambda c, g: g(3).copy_(c(3)),
    "copy_ back": lambda c, g: c(3).copy_(g(3)),
    "assign a slice": lambda c, g: g(3).__setitem__(slice(0, 2), c(2)),
    "fill_": lambda c, g: g(3).fill_(c(1)[0]),
    "to": lambda c, g: g(3) + c(3).to(g(1).device),
    "to by tensor": lambda c, g: g(3) + c(3).to(g(1)),
    "type_as": lambda c, g: g(3) + c(3).type_as(g(1)),
    "cpu": lambda c, g: c(3) + g(3).cpu(),
    "zeros_like": lambda c, g: torch.zeros_like(c(3), device=g(1).device) + g(3),
    "new_zeros": lambda c, g: g(1).new_zeros(3) + g(3),
    "new_tensor": lambda c, g: g(1).new_tensor([1.0, 2.0, 3.0]) + g(3),
    "arange": lambda c, g: torch.arange(3, device=g(1).device) + g(3),
    "tensor": lambda c, g: torch.tensor([1.0, 2.0, 3.0], device=g(1).device) + g(3),
    "full": lambda c, g: torch.full((3,), 2.0, device=g(1).device) + g(3),
    "masked_fill by a 0-dim": lambda c, g: g(3).masked_fill(g(3) > 0, c(1)[0]),
    "matmul": lambda c, g: g(2, 3) @ g(3, 2),
    "conv": lambda c, g: F.conv2d(g(1, 1, 4, 4), g(1, 1, 2, 2)),
    "batch_norm": lambda c, g: F.batch_norm(g(2, 3), g(3), g(3).abs()),
    "attention": lambda c, g: F.scaled_dot_product_attention(g(1, 1, 4, 2), g(1, 1, 4, 2), g(1, 1, 4, 2)),
    "autocast": lambda c, g: _autocast(g(2, 2)),
    "no grad": lambda c, g: torch.no_grad()(lambda: g(3) * 2)(),
    "inference mode": lambda c, g: torch.inference_mode()(lambda: F.linear(g(1, 3), g(2, 3)))(),
    "only the CPU": lambda c, g: (c(3) + c(3)) @ c(3),
    "dropout": lambda c, g: F.dropout(g(3)),
    "interpolate": lambda c, g: F.interpolate(g(1, 1, 4), scale_factor=2),
    "einsum": lambda c, g: torch.einsum("ij,jk->ik", g(2, 3), g(3, 2)),
    "rand": lambda c, g: torch.rand(3, device=g(1).device) + g(3),
    "checkpoint": lambda c, g: torch.utils.checkpoint.checkpoint(torch.exp, g(3), use_reentrant=False),
    "lerp by a 0-dim weight": lambda c, g: torch.lerp(g(3), g(3), c(1)[0]),
    "addcmul by a 0-dim": lambda c, g: torch.addcmul(g(3), g(3), c(1)[0]),
    "where with two 0-dim": lambda c, g: torch.where(g(3) > 0, c(1)[0], c(1)[0]),
    "foreach, each on its own": lambda c, g: torch._foreach_add([g(3), c(3)], [g(3), c(3)])[0],
    "foreach with a 0-dim": lambda c, g: torch._foreach_mul([g(3)], c(1)[0])[0],
    "pow of a 0-dim": lambda c, g: c(1)[0] ** g(3),
}
#: Legal too, but the calls need data.
VALUE_READS = {
    "split": lambda c, g: torch.tensor_split(g(4), _index(1, 2)),
    "item": lambda c, g: g(3) * int(g(3).sum().item()) + len(range(int(g(1)))),
    "tolist": lambda c, g: [1 / number for number in g(3).tolist()],
    "a branch": lambda c, g: g(3) if g(3).sum() > 2 else c(3) + g(3),
    "nonzero": lambda c, g: g(3)[[g(3).nonzero()[0, 0].item()]],
    "numpy of a copy": lambda c, g: g(3).cpu().numpy().sum(),
    "ctc_loss, lengths of the CPU": lambda c, g: F.ctc_loss(g(5, 1, 3), g(1, 1).long(), _index(5), _index(1)),
    "packed sequence": lambda c, g: (
        nn.utils.rnn.pad_packed_sequence(nn.utils.rnn.pack_padded_sequence(g(3, 2, 4), _index(3, 2)))[0] + g(3, 2, 4)
    ),
}
#: Illegal, because the calls need an argument on the CPU; the calls need data.
NEEDS_CPU_ARGUMENT = {
    "packed sequence, lengths": lambda c, g: nn.utils.rnn.pack_padded_sequence(g(3, 2, 4), 3 * g(2).long()),
    "unsorted": lambda c, g: nn.utils.rnn.pack_padded_sequence(g(3, 2, 4), 3 * g(2).long(), enforce_sorted=False),
    "split": lambda c, g: torch.tensor_split(g(4), g(2).long()),
    "split in inference mode": lambda c, g: torch.inference_mode()(lambda: torch.tensor_split(g(4), g(2).long()))(),
}
ILLEGAL = {
    "add": lambda c, g: g(3) + c(3),
    "add, CPU first": lambda c, g: c(3) + g(3),
    "add_": lambda c, g: g(3).add_(c(3)),
    "add_ to the CPU": lambda c, g: c(3).add_(g(3)),
    "0-dim of the device": lambda c, g: c(3) + g(1)[0],
    "one element with a dimension": lambda c, g: g(3) + c(1),
    "comparison": lambda c, g: g(3) > c(3),
    "where, condition": lambda c, g: torch.where(c(3) > 0, g(3), g(3)),
    "where, value": lambda c, g: torch.where(g(3) > 0, g(3), c(3)),
    "matmul": lambda c, g: g(2, 3) @ c(3, 2),
    "mv": lambda c, g: g(2, 3) @ c(3),
    "bmm": lambda c, g: torch.bmm(g(1, 2, 3), c(1, 3, 2)),
    "linear, weight": lambda c, g: F.linear(g(1, 3), c(2, 3)),
    "linear, bias": lambda c, g: F.linear(g(1, 3), g(2, 3), c(2)),
    "conv, weight": lambda c, g: F.conv2d(g(1, 1, 4, 4), c(1, 1, 2, 2)),
    "conv, bias": lambda c, g: F.conv2d(g(1, 1, 4, 4), g(1, 1, 2, 2), c(1)),
    "embedding, index": lambda c, g: F.embedding(_index(0, 1), g(3, 2)),
    "embedding, table": lambda c, g: F.embedding(g(2).long().abs() * 0, c(3, 2)),
    "a CPU table indexed from the device": lambda c, g: c(3)[g(2).long() * 0],
    "a CPU table and a device mask": lambda c, g: c(3).masked_fill(g(3) > 0, 0.0),
    "values put": lambda c, g: g(3).index_put_((_index(0, 1),), c(2)),
    "index_select": lambda c, g: g(3).index_select(0, _index(0, 1)),
    "index_select, 0-dim": lambda c, g: g(3).index_select(0, torch.tensor(1)),
    "embedding, 0-dim index": lambda c, g: F.embedding(torch.tensor(1), g(3, 2)),
    "gather": lambda c, g: g(3).gather(0, _index(0, 1)),
    "scatter": lambda c, g: g(3).scatter(0, _index(0, 1), g(2)),
    "scatter_add, source": lambda c, g: g(3).scatter_add(0, g(2).long() * 0, c(2)),
    "index_add": lambda c, g: g(3).index_add(0, _index(0, 1), g(2)),
    "cat": lambda c, g: torch.cat([g(3), c(3)]),
    "stack": lambda c, g: torch.stack([g(3), c(3)]),
    "layer_norm": lambda c, g: F.layer_norm(g(2, 3), (3,), c(3), c(3)),
    "batch_norm": lambda c, g: F.batch_norm(g(2, 3), c(3), c(3).abs()),
    "attention mask": lambda c, g: F.scaled_dot_product_attention(*[g(1, 1, 4, 2)] * 3, attn_mask=c(4, 4)),
    "masked_fill": lambda c, g: g(3).masked_fill(c(3) > 0, 0.0),
    "cross entropy": lambda c, g: F.cross_entropy(g(2, 3), _index(0, 1)),
    "einsum": lambda c, g: torch.einsum("ij,jk->ik", g(2, 3), c(3, 2)),
    "lerp": lambda c, g: torch.lerp(g(3), g(3), c(3)),
    "addcmul": lambda c, g: torch.addcmul(g(3), g(3), c(3)),
    "addcmul by two 0-dim": lambda c, g: torch.addcmul(g(3), c(1)[0], c(1)[0]),
    "addcdiv by a 0-dim": lambda c, g: torch.addcdiv(g(3), g(3), c(1)[0]),
    "lerp to a 0-dim": lambda c, g: torch.lerp(g(3), c(1)[0], g(3)),
    "clamp by 0-dim": lambda c, g: torch.clamp(g(3), c(1)[0], g(1)[0]),
    "0-dim of the CPU in place": lambda c, g: c(1)[0].add_(g(3).sum()),
    "0-dim of the CPU as out": lambda c, g: torch.mul(g(1)[0], 2.0 * g(1)[0], out=c(1)[0]),
    "a 0-dim stacked": lambda c, g: torch.stack([g(1)[0], c(1)[0]]),
    "a 0-dim bias": lambda c, g: torch.addmm(c(1)[0], g(2, 3), g(3, 2)),
    "isin": lambda c, g: torch.isin(g(3), c(1)[0]),
    "foreach": lambda c, g: torch._foreach_add([g(3)], [c(3)]),
    "in inference mode": lambda c, g: torch.inference_mode()(lambda: F.linear(g(1, 3), c(2, 3)))(),
}


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return x @ x


class SingleCall(nn.Module):
    """A module whose forward makes a single call of `LEGAL` or `ILLEGAL`."""

    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> object:
        """Run the call with tensors filled with 1.0."""
        return self.call(lambda *shape: torch.ones(shape), lambda *shape: x.new_ones(shape))


def build_inputs(*shapes: object) -> Inputs:
    """Inputs of the given shapes, filled with 1.0; a tensor in `shapes` is cloned."""

    def create_inputs(seed: int = 0):
        return tuple(shape.clone() if isinstance(shape, torch.Tensor) else torch.ones(shape) for shape in shapes), {}

    return Inputs("ones", create_inputs)


def build_live_subject(
    build_model: Callable[[], nn.Module], *shapes: object, target: str = "live:Net"
) -> subjects.ModelUnderTest:
    """The model under test that the factory `build_model` builds."""
    spec = ModelSpec(target, "live", False, "Net")
    built = BuiltModel(spec, build_model(), Origins(), "cpu", True, lambda _, __: build_model())
    return _add_inputs(subjects.prepare_built_model(built, target), shapes)


def build_sample_subject(
    name: str, *shapes: object, folder: Path = SAMPLES, init_device: str = "cpu"
) -> subjects.ModelUnderTest:
    """The model under test of `file:Class` in `folder`."""
    target = f"{folder}/{name.replace(':', '.py:')}"
    return _add_inputs(subjects.prepare_built_model(build(parse_spec(target), init_device=init_device), target), shapes)


def _add_inputs(subject: subjects.ModelUnderTest, shapes: tuple) -> subjects.ModelUnderTest:
    return first_forward.add_inputs(subject, build_inputs(*shapes), None) if shapes else subject
