"""Names with the prefix of a wrapper: the rule, title and fix are the same in inspect, audit and diff."""

from __future__ import annotations

import importlib

import pytest
import torch

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 2)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])


def compiled():
    net = Net()
    net.blocks[1] = torch.compile(net.blocks[1])
    return net


def parallel():
    return nn.DataParallel(Net())
"""
TARGET = "nets.py:Net"


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """The module nets.py in the current directory."""
    (tmp_path / "nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("nets")
    monkeypatch.delitem(importlib.sys.modules, "nets")
    return module


def commands(checkpoint, target=TARGET):
    """Return the three commands that compare a checkpoint with a class."""
    return (
        ("inspect", checkpoint, "--model", target),
        ("audit", checkpoint, "--model", target),
        ("diff", checkpoint, target),
    )


def findings(statecli, arguments):
    """The findings of a command, by rule."""
    return {finding["rule"]: finding for finding in statecli(*arguments, "-f", "json").json["findings"]}


def test_single_prefixed_name_has_the_same_finding_in_all_commands(nets, statecli):
    """The file contains the trained weight: no command calls the weight missing, or advises strict=False."""
    state = nets.Net().state_dict()
    state["module.scale"], state["head.weight"] = state.pop("scale"), torch.zeros(3, 4)
    torch.save(state, "bad.pt")
    for arguments in commands("bad.pt"):
        actual_findings = findings(statecli, arguments)
        assert set(actual_findings) == {"wrapper-prefix", "shape-mismatch"}, arguments
        assert actual_findings["wrapper-prefix"]["message"] == (
            "1 of 9 names has the prefix 'module.' of a wrapper, which nets.py:Net does not have: "
            "load_state_dict cannot match this name"
        ), arguments
        assert "strict=False" not in actual_findings["wrapper-prefix"]["help"], arguments


#: Case -> name in the model -> name in the checkpoint.
RENAMINGS = {
    "all": lambda name: f"module.{name}",
    "a trainer's attribute": lambda name: f"net.{name}",
    "two wrappers": lambda name: f"module._orig_mod.{name}",
    "inside": lambda name: name.replace("blocks.1.", "blocks.1._orig_mod."),
    "at each level": lambda name: "_orig_mod." + name.replace("blocks.1.", "blocks.1._orig_mod."),
    "apart": lambda name: "module." + name.replace("blocks.1.", "blocks.1._orig_mod."),
}


def run(help, state, model):
    """The state after the code of the fix."""
    names = {"state": state, "model": model}
    exec(help, names)  # noqa: S102 - the line to paste, which statecli wrote
    return names["state"]


@pytest.mark.parametrize("case", RENAMINGS)
def test_the_title_and_the_fix_are_the_same_and_the_fix_loads(nets, statecli, case):
    """The line to paste is labelled fix."""
    state = {RENAMINGS[case](name): tensor for name, tensor in nets.Net().state_dict().items()}
    torch.save(state, "net.pt")
    texts = set()
    for arguments in commands("net.pt"):
        (finding,) = findings(statecli, arguments).values()
        texts.add((finding["rule"], finding["severity"], finding["message"], finding["help"]))
        assert "fix:" in statecli(*arguments, "-f", "github").out, arguments
    ((rule, severity, _, help),) = texts
    assert (rule, severity) == ("wrapper-prefix", "error")
    model = nets.Net()
    model.load_state_dict(run(help, state, model))


@pytest.mark.parametrize("case", [case for case in RENAMINGS if case != "a trainer's attribute"])
def test_the_fix_without_a_class_loads_too(nets, statecli, case):
    """The fix loads without a class too, although the class with these names is unknown."""
    state = {RENAMINGS[case](name): tensor for name, tensor in nets.Net().state_dict().items()}
    torch.save(state, "net.pt")
    finding = findings(statecli, ("audit", "net.pt"))["wrapper-prefix"]
    assert "of a wrapper, which the plain model does not have: load_state_dict cannot match" in finding["message"]
    model = nets.Net()
    model.load_state_dict(run(finding["help"], state, model))


@pytest.mark.parametrize("name", ["compiled", "parallel"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_fix_for_a_class_with_a_wrapper_loads(nets, statecli, name, prefix):
    """The checkpoint lacks the prefix, or has another prefix."""
    model = getattr(nets, name)()
    state = {prefix + key: tensor for key, tensor in nets.Net().state_dict().items()}
    torch.save(state, "net.pt")
    for arguments in commands("net.pt", f"nets.py:{name}"):
        actual_findings = findings(statecli, arguments)
        if name == "parallel" and prefix:
            assert not actual_findings
            continue
        assert set(actual_findings) == {"wrapper-prefix"}, arguments
        if name == "compiled" and prefix:
            assert actual_findings["wrapper-prefix"]["help"].startswith(
                "rename the keys before load_state_dict, for example "
            )
        else:
            model.load_state_dict(run(actual_findings["wrapper-prefix"]["help"], state, model))


def test_fix_renames_only_keys_that_the_class_lacks(nets, statecli, tmp_path):
    """A part of the model is called `module`."""
    text = NET.replace("self.scale =", "self.module = nn.Linear(2, 2)\n        self.scale =")
    (tmp_path / "other.py").write_text(text)
    state = {
        f"module.{name}" if name.startswith("head") else name: tensor
        for name, tensor in nets.Net().state_dict().items()
    }
    state |= {"module.weight": torch.zeros(2, 2), "module.bias": torch.zeros(2)}
    torch.save(state, "net.pt")
    for arguments in commands("net.pt", "other.py:Net"):
        (finding,) = findings(statecli, arguments).values()
        assert finding["message"].startswith("2 of 11 names have the prefix 'module.'"), arguments
        assert finding["help"] == (
            "rename the keys before load_state_dict, for example 'module.head.weight' to 'head.weight'"
        )


#: Case -> keys from the loaded object to the state_dict.
NESTINGS = {
    "model": ("model",),
    "state_dict": ("state_dict",),
    "nested twice": ("state_dict", "model"),
    "with a quote": ("the 'best' model",),
}


def nest(state, keys):
    """The state below the keys, next to an epoch."""
    for key in reversed(keys):
        state = {key: state}
    return state | {"epoch": 3}


@pytest.mark.parametrize(
    ("nesting", "case"), [*((nesting, "apart") for nesting in NESTINGS), ("model", "all"), ("model", "inside")]
)
def test_the_fix_names_the_keys_of_a_nested_state_dict(nets, statecli, nesting, case):
    """Without them nothing would be renamed, and strict=False would load nothing."""
    state = {RENAMINGS[case](name): tensor for name, tensor in nets.Net().state_dict().items()}
    torch.save(nest(state, NESTINGS[nesting]), "net.pt")
    for arguments in (("audit", "net.pt"), *commands("net.pt")):
        finding = findings(statecli, arguments)["wrapper-prefix"]
        names = {"checkpoint": torch.load("net.pt")}
        exec(finding["help"], names)  # noqa: S102 - the line to paste, which statecli wrote
        model = nets.Net()
        model.load_state_dict(names["state"])


def test_the_fix_for_a_nested_state_dict_without_the_prefix_names_the_keys(nets, statecli):
    """The names of a compiled part are those of the class."""
    torch.save({"model": nets.Net().state_dict()}, "net.pt")
    for arguments in commands("net.pt", "nets.py:compiled"):
        model = nets.compiled()
        names = {"checkpoint": torch.load("net.pt"), "model": model}
        exec(findings(statecli, arguments)["wrapper-prefix"]["help"], names)  # noqa: S102 - as above
        model.load_state_dict(names["state"])


def test_the_fix_for_names_inside_a_value_is_not_code(nets, statecli):
    """No entry of the state_dict has these names."""
    state = {RENAMINGS["inside"](name): tensor for name, tensor in nets.Net().state_dict().items()}
    torch.save({"nets": {"first": state}}, "net.pt")
    assert findings(statecli, ("audit", "net.pt"))["wrapper-prefix"]["help"] == (
        "rename the keys before load_state_dict, for example \"nets['first']['blocks.1._orig_mod.weight']\" to "
        "\"nets['first']['blocks.1.weight']\""
    )
