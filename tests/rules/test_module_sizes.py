"""Weights of whole modules whose sizes torch's kernels trust."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from statecli.commands.audit.run import Request, audit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

RULE = "inconsistent-module"


class Encoder(nn.Module):
    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


def build_normalized(dim: int | None) -> tuple[nn.Module, nn.Module]:
    """A layer with its weight split in two, by the old function and by the new function."""
    return (
        nn.utils.weight_norm(nn.Linear(4, 8), dim=dim),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8), dim=dim),
    )


def save_pickle(module: nn.Module, path: Path) -> Path:
    torch.save(module, path)
    return path


def save_script(module: nn.Module, path: Path) -> Path:
    torch.jit.save(torch.jit.script(module), path)
    return path


def save_trace(module: nn.Module, path: Path) -> Path:
    torch.jit.save(torch.jit.trace(module.eval(), torch.ones(3, 1, 4)), path)
    return path


def list_messages(path: Path) -> list[str]:
    result = audit(Request((str(path),), select=(RULE,)))
    assert result.targets[0].ran == (RULE,)
    return [finding.message for finding in result.findings]


def shorten(module: nn.Module, name: str, *sizes: int) -> nn.Module:
    module._parameters[name] = nn.Parameter(torch.zeros(*sizes))
    module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]
    return module


CELLS = {
    "LSTM": lambda: nn.LSTM(4, 6),
    "two layers": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "projection": lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True),
    "no biases": lambda: nn.GRU(4, 6, bias=False),
    "GRU": lambda: nn.GRU(4, 6, 3),
    "RNN": lambda: nn.RNN(4, 1, 2, bidirectional=True),
}


@pytest.mark.parametrize("save", [save_pickle, save_script, save_trace])
@pytest.mark.parametrize("name", CELLS)
def test_inconsistent_module_spares_unchanged_modules(name, save, tmp_path):
    """Each writer saves each cell."""
    assert list_messages(save(Encoder(CELLS[name]()), tmp_path / "x.pt")) == []


def test_a_state_dict_has_no_modules_to_check(save_checkpoint):
    """The rule does not run."""
    path = save_checkpoint(Encoder(CELLS["LSTM"]()).state_dict())
    assert audit(Request((str(path),), select=(RULE,))).targets[0].ran == ()


SHORT_MODULES = {
    "inputs": (lambda: shorten(nn.LSTM(4, 6), "weight_ih_l0", 1, 4), "weight_ih_l0: has shape [1, 4]"),
    "columns": (lambda: shorten(nn.LSTM(4, 6), "weight_ih_l0", 24, 1), "weight_ih_l0: has shape [24, 1]"),
    "states": (lambda: shorten(nn.GRU(4, 6), "weight_hh_l0", 1, 6), "weight_hh_l0: has shape [1, 6]"),
    "biases": (lambda: shorten(nn.LSTM(4, 6, 2), "bias_hh_l1", 1), "bias_hh_l1: has shape [1]"),
    "second layer": (lambda: shorten(nn.LSTM(4, 6, 2), "weight_ih_l1", 24, 1), "weight_ih_l1: has shape [24, 1]"),
    "reverse": (
        lambda: shorten(nn.LSTM(4, 6, bidirectional=True), "weight_hh_l0_reverse", 1, 6),
        "weight_hh_l0_reverse: has shape [1, 6]",
    ),
}


@pytest.mark.parametrize(
    ("save", "name"),
    [
        *((save_pickle, name) for name in SHORT_MODULES),
        *((save_script, name) for name in ("states", "second layer", "reverse")),
    ],
)
def test_inconsistent_module_finds_a_short_weight(name, save, tmp_path):
    """The weight in the file has another shape than the constructor creates."""
    build, expected_text = SHORT_MODULES[name]
    (message,) = list_messages(save(Encoder(build()), tmp_path / "x.pt"))
    assert f"cell.{expected_text}" in message


def test_other_list_of_weights_is_an_error(tmp_path):
    """forward passes the list to the kernel, not the parameters."""
    module = nn.LSTM(4, 6, bias=False)
    module._flat_weights = [torch.zeros(1, 4), torch.zeros(24, 6), torch.zeros(1)]
    first, last = list_messages(save_pickle(Encoder(module), tmp_path / "x.pt"))
    assert first == "cell._flat_weights[0]: has shape [1, 4], but its module needs [24, 4]"
    assert last == "cell._flat_weights[2]: has shape [1], but its module does not have this weight"


def test_weights_too_short_for_the_hidden_size_are_an_error(tmp_path, forked_python):
    """TorchScript may compile the hidden size into the class. The kernel reads by the hidden size of the states."""
    lstm = nn.LSTM(4, 6)
    lstm.hidden_size = 4096
    for save in (save_pickle, save_script):
        assert "its module needs [16384, 4]" in list_messages(save(Encoder(lstm), tmp_path / "x.pt"))[0]
    code = f"import torch\nwith torch.no_grad(): torch.jit.load({str(tmp_path / 'x.pt')!r})(torch.ones(3, 1, 4))"
    assert forked_python(code).returncode < 0


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_weight_norm_is_clean(dim, tmp_path):
    """The norm is of rows, of columns, or of the whole weight. A parametrized module cannot be pickled."""
    old, new = build_normalized(dim)
    assert list_messages(save_pickle(old, tmp_path / "x.pt")) == list_messages(save_trace(old, tmp_path / "y.pt")) == []
    assert list_messages(save_trace(new, tmp_path / "z.pt")) == []


def test_a_short_norm_is_an_error(tmp_path):
    """The kernel reads a norm for each row."""
    old, new = build_normalized(0)
    old.weight_g = nn.Parameter(torch.ones(1, 1))
    (message,) = list_messages(save_pickle(old, tmp_path / "x.pt"))
    assert message == "weight_g: has shape [1, 1], which does not fit its weight of shape [8, 4]"
    path = save_trace(new, tmp_path / "y.pt")
    assert list_messages(path) == []
    program = torch.jit.load(path)
    program.parametrizations.weight.original0 = nn.Parameter(torch.ones(1, 1))
    torch.jit.save(program, path)
    assert "original0: has shape [1, 1], which does not fit its weight" in list_messages(path)[0]


def test_attention_without_heads_is_an_error(tmp_path):
    """A call of the module divides by zero."""
    module = nn.TransformerEncoderLayer(8, 2, 16)
    assert list_messages(save_pickle(module, tmp_path / "x.pt")) == []
    module.self_attn.num_heads = 0
    (message,) = list_messages(save_pickle(module, tmp_path / "x.pt"))
    assert "_modules.self_attn.num_heads is 0: the module divides by this number, so a call fails" in message
