"""Compare a class with a checkpoint, checked against the result of torch's own strict load of the file."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field
from statecli.commands.diff.run import compare_targets

MODELS = '''
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.old = nn.InstanceNorm2d(2)
        self.tracked = nn.InstanceNorm2d(2, track_running_stats=True)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.other = nn.MultiheadAttention(4, 2, kdim=3, vdim=2)
        self.norm = nn.LayerNorm(4)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = parametrizations.weight_norm(nn.Linear(3, 2))
        self.conv = parametrizations.spectral_norm(nn.Conv1d(2, 2, 1))
        self.old = weight_norm(nn.Linear(3, 2))
        self.spectral = spectral_norm(nn.Linear(3, 2))
        self.bn = nn.BatchNorm1d(2)


class State(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        pass


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.number = State({"steps": 3})
        self.tensor = State(torch.ones(3))
        self.nested = State({"scale": torch.ones(2)})
        self.fc = nn.Linear(2, 2)

    def get_extra_state(self):
        return 7

    def set_extra_state(self, state):
        pass


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.LazyLinear(3)
        self.norm = nn.LazyBatchNorm1d()
        self.out = nn.Linear(3, 2)


class Overriding(nn.Module):
    """Old names are renamed, an old layout is turned, and one entry is optional."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.bias = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)
        self.inner.register_load_state_dict_pre_hook(self.turn)
        self.register_load_state_dict_post_hook(self.forgive)

    @staticmethod
    def forgive(module, keys):
        keys.missing_keys[:] = [key for key in keys.missing_keys if key != "bias"]

    @staticmethod
    def turn(module, state_dict, prefix, *rest):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", None) is None and prefix + "weightx" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "weightx")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Lenient(nn.Module):
    """A load_state_dict of its own, that is not strict."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict({k: v for k, v in state_dict.items() if "extra" not in k}, strict=False)
'''
MODEL_NAMES = ["Convolved", "Tied", "Attention", "Normed", "Extra", "Lazy", "Overriding", "Lenient"]
FORMS = ["whole.pt", "plain.pt", "net.safetensors"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "models.py"
    path.write_text(MODELS)
    spec = importlib.util.spec_from_file_location("models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module


def build_net(zoo, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = getattr(zoo[1], name)()
        if name == "Lazy":
            net.out(net.norm(net.fc(torch.ones(2, 4))))
        return net


def save_state(state, path):
    """Save `state` in the form that the path names: with `_metadata`, as a dict, or only the tensors as safetensors."""
    if path.name == "net.safetensors":
        save_file({k: v.clone().contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}, path)
    else:
        torch.save(state if path.name == "whole.pt" else dict(state), path)


def list_torch_findings(net, path) -> set[tuple[str, str]] | None:
    """Return the rules and names of torch's strict load error: empty if the load succeeds, None if its code fails."""
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        text = str(error)
        if not text.startswith("Error(s) in loading state_dict"):
            return None
    except AttributeError:
        return None
    else:
        return set()
    errors: set[tuple[str, str]] = set()
    for rule, start in (("missing-entry", "Missing key(s)"), ("unexpected-entry", "Unexpected key(s)")):
        key_list = re.search(re.escape(start) + r" in state_dict: (.*?)\. $", text, re.MULTILINE)
        errors |= {(rule, name) for name in re.findall('"(.*?)"', key_list[1])} if key_list else set()
    errors |= {("shape-mismatch", name) for name in re.findall(r"size mismatch for (\S+): copying", text)}
    errors |= {("load-refused", name) for name in re.findall(r'parameter named "(\S+)",', text)}
    if "running stats buffer(s)" in text:
        errors.add(("load-refused", ""))
    return errors


def list_statecli_findings(path, target, device="cpu") -> tuple[set[tuple[str, str]] | None, set[str | None]]:
    """Return our findings about load_state_dict, None if they are unknown, and the names dropped for a tie."""
    diff = compare_targets(
        Request(
            str(path), target, init_device=device, ignore=(Field.DTYPE, Field.KIND, Field.REQUIRES_GRAD, Field.TYING)
        )
    )
    if diff.broken:
        assert "cannot call load_state_dict" in diff.broken[0].message
        return None, set()
    assert {f.rule for f in diff.findings} <= RULES
    ties = {note.fqn for note in diff.notes if note.name == "tied-entry-left-out"}
    return {(f.rule, f.fqn or "") for f in diff.findings}, ties


RULES = {"wrapper-prefix", "missing-entry", "unexpected-entry", "shape-mismatch", "load-refused"}


@st.composite
def draw_mutations(draw):
    """Draw changes of a state_dict, each with a number that selects the entry."""
    kinds = ["drop", "drop", "add", "beside", "rename", "reshape", "one", "scalar", "number", "extra", "old"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 99)), max_size=3))


def mutate_state(state, kind, position):
    """Make one change to `state`; the order and `_metadata` are kept."""
    tensors = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
    name = tensors[position % len(tensors)]
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    if kind == "drop" and len(tensors) > 1:
        del state[name]
    elif kind == "add":
        state[["extra", "mask", "old.running_mean", "fc.bias2", "a.b.c"][position % 5]] = torch.ones(2)
    elif kind == "beside":
        state[f"{prefix}more"] = torch.ones(1)
    elif kind == "rename":
        state[f"{name}x"] = state.pop(name)
    elif kind == "reshape":
        state[name] = torch.ones(*state[name].shape, 2)
    elif kind == "one":
        state[name] = state[name].reshape(-1)[:1].clone()
    elif kind == "scalar":
        state[name] = state[name].reshape(-1)[0].clone()
    elif kind == "number":
        state[[name, "epoch"][position % 2]] = 3
    elif kind == "extra":
        key = f"{prefix}_extra_state"
        state.pop(key) if key in state else state.update({key: [torch.ones(2), 3][position % 2]})
    elif kind == "old":
        rename_keys(state, position)


def rename_keys(state, position):
    """Rename keys to the names that hooks accept: the old names of weight_norm and a transposed kernel."""
    if "fc.parametrizations.weight.original0" in state:
        state["fc.weight_g"] = state.pop("fc.parametrizations.weight.original0")
        if position % 2:
            state["fc.weight_v"] = state.pop("fc.parametrizations.weight.original1", torch.ones(2, 3))
    if "inner.weight" in state:
        state["inner.kernel"] = state.pop("inner.weight")


QUICK = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_findings_equal_those_of_a_strict_load(name, form, zoo, tmp_path):
    """For any change of a state_dict, our findings name the keys of torch's strict load; a clean load has none."""
    net = build_net(zoo, name)
    target = f"{zoo[0]}:{name}"

    @QUICK
    @given(draw_mutations(), st.sampled_from(["cpu", "meta"]))
    def check_findings(changes, device):
        state = net.state_dict()
        if form != "net.safetensors":
            state = OrderedDict(state)
            state._metadata = net.state_dict()._metadata
        for kind, position in changes:
            mutate_state(state, kind, position)
        path = tmp_path / form
        save_state(state, path)
        actual, ties = list_statecli_findings(path, target, device)
        expected = list_torch_findings(build_fresh_net(zoo, name), path)
        if expected is not None:
            expected = {(rule, fqn) for rule, fqn in expected if rule != "missing-entry" or fqn not in ties}
        assert actual == expected
        assert not ties or form == "net.safetensors"

    check_findings()


@pytest.mark.parametrize("form", FORMS)
def test_one_of_two_tied_names_may_be_left_out_of_safetensors(form, zoo, tmp_path):
    """In other formats, the name is missing, as for torch."""
    state = build_net(zoo, "Tied").state_dict()
    del state["head.weight"]
    save_state(state, tmp_path / form)
    actual, ties = list_statecli_findings(tmp_path / form, f"{zoo[0]}:Tied")
    is_safetensors = form == "net.safetensors"
    assert ties == ({"head.weight"} if is_safetensors else set())
    assert actual == (set() if is_safetensors else {("missing-entry", "head.weight")})


def build_fresh_net(zoo, name):
    """Build the class as the command does: a lazy class stays lazy."""
    return getattr(zoo[1], name)()


@pytest.mark.parametrize("name", ["Convolved", "Normed", "Extra"])
def test_wrapper_prefix_adds_only_its_own_finding(name, zoo, tmp_path):
    """A state saved from a wrapper has the same findings as without the wrapper, and a finding for the prefix."""
    net = build_net(zoo, name)

    @settings(QUICK, max_examples=9)
    @given(draw_mutations(), st.sampled_from(FORMS))
    def check_findings(changes, form):
        state = net.state_dict()
        for kind, position in changes:
            mutate_state(state, kind, position)
        wrapped_state = OrderedDict((f"module.{key}", value) for key, value in state.items())
        wrapped_state._metadata = {"": {"version": 1}}
        wrapped_state._metadata |= {
            f"module.{path}".rstrip("."): metadata for path, metadata in state._metadata.items()
        }
        save_state(state, tmp_path / form)
        expected = list_torch_findings(build_fresh_net(zoo, name), tmp_path / form)
        save_state(wrapped_state, tmp_path / form)
        actual, _ = list_statecli_findings(tmp_path / form, f"{zoo[0]}:{name}")
        assert {(rule, fqn.removeprefix("module.")) for rule, fqn in actual} == expected | {("wrapper-prefix", "")}

    check_findings()
