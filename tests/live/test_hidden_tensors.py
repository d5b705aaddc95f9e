"""Test tensors in unusual places, and models without visible tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.core.errors import UsageError

HEADER = """
import numpy as np
class Net(nn.Module):
    def __init__(self):
        super().__init__()
"""


OWN_DICTS = """
class Loud(dict):
    def refuse(self, *arguments):
        raise SystemExit("user code ran")
    __len__ = __bool__ = __iter__ = __contains__ = get = items = keys = values = refuse

class LoudTuple(tuple):
    def refuse(self, *arguments):
        raise SystemExit("user code ran")
    __len__ = __bool__ = __iter__ = refuse

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.__dict__ = Loud(z=torch.ones(3))
        def call(x=None, *, y=None): pass
        call.__defaults__, call.__kwdefaults__ = LoudTuple([torch.ones(4)]), Loud(y=torch.ones(5))
        call.__dict__ = Loud(tag=torch.ones(6))
        self.call = call
        self.hooks = collections.OrderedDict()
        self.hooks.__dict__ = Loud(w=torch.ones(7))
"""


def test_attributes_in_a_dict_of_the_users_class_run_no_code(inspect):
    """`__dict__` and the defaults of a function may be of a class whose methods are the user's."""
    state = inspect("import collections\n" + OWN_DICTS)
    names = ["weight", "weight.z", "call.__defaults__[0]", "call.__kwdefaults__['y']", "call.tag", "hooks.w"]
    assert [row.fqn for row in state.tensors] == names


def test_an_array_of_objects_is_opened(inspect):
    """numpy arrays of Python objects may contain tensors; arrays of numbers are not searched."""
    body = (
        "        self.x = np.empty(2, dtype=object)\n        self.x[1] = torch.ones(3)\n        self.y = np.ones(5)\n"
    )
    (row,) = inspect(HEADER + body).tensors
    assert (row.fqn, row.moves) == ("x.tolist()[1]", False)


CODE = """
class Net(nn.Module):
    def forward(self, x, scale=torch.ones(3), *, shift=torch.ones(4)):
        return x * scale + shift
    made = staticmethod(__import__("functools").partial(print, torch.ones(5)))
    @classmethod
    def other(cls, y=torch.ones(6)): pass
"""


def test_tensors_in_method_defaults_and_static_methods_are_listed(inspect):
    """Tensors in defaults of the class's own methods and in its static methods belong to the model."""
    state = inspect(CODE)
    assert sorted(t.shape for t in state.tensors) == [(3,), (4,), (5,), (6,)]
    assert {t.moves for t in state.tensors} == {False}
    assert "forward.__defaults__[0]" in [t.fqn for t in state.tensors]


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_an_oddity(read_live):
    """A quantized layer keeps its weights in C++: the weights have no rows, but an oddity."""
    quantized = torch.ao.nn.quantized
    (oddity,) = [o for o in read_live(lambda: quantized.Linear(3, 4)).oddities if o.name == "packed-params"]
    assert "weights in C++, where statecli cannot read them" in oddity.message
    assert oddity.fqn == "_packed_params._packed_params"


@pytest.mark.filterwarnings("ignore")
def test_each_dynamically_quantized_layer_is_named(read_live):
    """Linear and LSTM layers of quantize_dynamic are each reported."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no quantization engine")

    def build_quantized_model():
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5)))

    names = [oddity.fqn for oddity in read_live(build_quantized_model).oddities if oddity.name == "packed-params"]
    assert any(name.startswith("0.") for name in names)
    assert any(name.startswith("1.") for name in names)


EMPTY = "class Net(nn.Module): pass\n"


def test_model_without_tensors_is_an_oddity(inspect):
    """A model without tensors is not an error, but is reported."""
    state = inspect(EMPTY)
    assert state.tensors == ()
    assert [o.name for o in state.oddities] == ["no-tensors"]


def test_move_of_a_model_without_tensors_is_refused(inspect):
    """--to has nothing to check without tensors."""
    with pytest.raises(UsageError, match="the model has no tensors, so there is nothing to move"):
        inspect(EMPTY, to="meta")
    with pytest.raises(UsageError, match=r"packed in C\+\+"):
        inspect("def f(): return torch.ao.nn.quantized.Linear(3, 4)", "f", to="meta")


def test_an_object_that_cannot_be_opened_is_named(inspect):
    """A tensor inside an object of C code that cannot be listed has no row, but the place is reported."""
    state = inspect(HEADER + "        self.v = __import__('contextvars').ContextVar('v', default=torch.ones(3))\n")
    (oddity,) = [o for o in state.oddities if o.name == "not-searched"]
    assert (oddity.fqn, "ContextVar" in oddity.message) == ("v", True)
    assert state.tensors == ()
