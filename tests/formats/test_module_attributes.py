"""MODULE_ATTRIBUTES, the attributes that no tensor of a program may replace, agree with the installed torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export.unflatten import InterpreterModule, InterpreterModuleDispatcher, UnflattenedModule

from statecli.pickle_scan.module_attributes import MODULE_ATTRIBUTES, find_module_attribute


def test_every_attribute_of_a_module_is_listed():
    """The attributes are those of a torch.export module, of an unflattened module and of the modules inside."""
    program = torch.export.export(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),))
    unflattened = torch.export.unflatten(program)
    (inner,) = unflattened.children()
    assert isinstance(unflattened, UnflattenedModule)
    assert isinstance(inner, InterpreterModule)
    modules = (program.module(), unflattened, inner, InterpreterModuleDispatcher(set(), [inner]))
    names = {name for module in modules for name in dir(module)} - {"weight", "bias", "0"}
    # Other libraries add methods of their own to nn.Module.
    own_names = [
        name for name in names if "transformers" not in str(getattr(getattr(nn.Module, name, None), "__module__", ""))
    ]
    assert {name for name in own_names if not name.startswith("__")} <= MODULE_ATTRIBUTES


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("_graph", "_graph"), ("a.b.forward", "forward"), ("a.__class__", "__class__"), ("layers.0.weight", None)],
)
def test_each_part_of_a_name_is_checked(name, attribute):
    """torch makes a module of each part but the last."""
    assert find_module_attribute(name) == attribute
