"""The values that a proof writes into tensors: each bit of a value has to survive a round trip."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from statecli.commands.verify import check_builder  # noqa: E402
from statecli.commands.verify.result import Name  # noqa: E402
from statecli.live import tensor_bits  # noqa: E402

from .proving import map_rules, prove_source  # noqa: E402

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOSSY = [
    (torch.float64, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]


def perturb_zeros(dtype, *, phase=0, elements=2 * tensor_bits.PATTERN_PERIOD):
    """Return a tensor of zeros after `perturb` has overwritten its values."""
    tensor = torch.zeros(elements, dtype=dtype)
    tensor_bits.perturb([tensor], phase=phase)
    return tensor


@pytest.mark.parametrize(("dtype", "narrow"), LOSSY, ids=str)
def test_rounding_changes_every_value(dtype, narrow):
    """A cast to a narrower type and back changes every element (bfloat16: over half)."""
    tensor = perturb_zeros(dtype)
    rounded = tensor.to(narrow).to(dtype)
    unchanged_count = (rounded == tensor).sum()
    assert not unchanged_count if dtype is not torch.bfloat16 else unchanged_count < len(tensor) / 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_last_bit_of_the_values_is_set(dtype):
    """The last bit of every value is set; in bfloat16, whose bits are all in use, of over a third of the values."""
    tensor = perturb_zeros(dtype)
    integers = tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
    odd_count = int((integers & 1).sum())
    assert odd_count == len(tensor) if dtype is not torch.bfloat16 else odd_count > len(tensor) / 3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_are_between_0_and_1_and_differ(dtype):
    """The values are between 0 and 1, all different in a period, and different in each place under another phase."""
    tensor, other = (
        perturb_zeros(dtype, elements=tensor_bits.PATTERN_PERIOD),
        perturb_zeros(dtype, elements=tensor_bits.PATTERN_PERIOD, phase=1),
    )
    assert bool(((tensor > 0) & (tensor < 1)).all())
    assert len(tensor.unique()) == tensor_bits.PATTERN_PERIOD
    assert bool((tensor != other).all())


ROUNDING = {
    "loading": (
        Name.SAVE,
        "not-restored",
        "def _load_from_state_dict(self, state, *rest):\n"
        "    for key in state: state[key] = state[key].half().float()\n"
        "    super()._load_from_state_dict(state, *rest)",
    ),
    "saving": (
        Name.SAVE,
        "changed-by-saving",
        "def state_dict(self, *args, **kwargs):\n"
        "    return {key: tensor.bfloat16() for key, tensor in super().state_dict(*args, **kwargs).items()}",
    ),
    "pickling": (
        Name.COPY,
        "changed-by-copy",
        "def __setstate__(self, state):\n"
        "    super().__setstate__(state)\n"
        "    self.fc.weight.data = self.fc.weight.data.half().float()",
    ),
    "moving": (
        Name.MOVE,
        "changed-by-move",
        "def _apply(self, fn, recurse=True):\n"
        "    super()._apply(fn, recurse)\n"
        "    self.fc.weight.data = self.fc.weight.data.half().float()\n"
        "    return self",
    ),
}


class Refusing(torch.Tensor):
    """A tensor whose class refuses every operator with an AssertionError, as a quantized tensor may."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_tensor_whose_operators_raise_cannot_be_compared():
    """The other tensors of the model are compared all the same."""
    tensor = Refusing()
    assert tensor_bits.is_same(tensor, tensor) is None
    assert tensor_bits.get_flat_memory(tensor) is None
    assert check_builder.copy_values(tensor) is None


@pytest.mark.parametrize("rounding", ROUNDING)
@pytest.mark.parametrize("lossy", [True, False])
def test_rounding_is_reported(rounding, lossy, in_tmp_path):
    """A cast of float32 to float16 or bfloat16 and back loses values; a cast to float64 and back does not."""
    name, rule, method = ROUNDING[rounding]
    if not lossy:
        method = method.replace(".half()", ".double()").replace(".bfloat16()", ".double()")
    check = prove_source(name, f"self.fc = nn.Linear(4, 4, bias=False)\n---\n{method}", device="cpu")
    assert map_rules(check) == ({"fc.weight": rule} if lossy else {})


def test_message_names_the_dtype_of_the_saved_tensor(in_tmp_path):
    """If state_dict() contains the tensor in another type, the message names the type."""
    name, _, method = ROUNDING["saving"]
    (finding,) = prove_source(name, f"self.fc = nn.Linear(4, 4, bias=False)\n---\n{method}").findings
    assert finding.message == "fc.weight: state_dict() contains the tensor cast to bfloat16, with other values"
