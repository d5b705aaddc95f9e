"""Measure the tensors that follow a move, are saved or break, and compare the results with torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.core.errors import ModelError, UsageError
from statecli.core.model_state import After, Kind

PLAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.t = torch.ones(3)
"""
OVERRIDES_APPLY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.ones(3)
        self.u = torch.ones(3)
    def _apply(self, fn, recurse=True):
        super()._apply(fn)
        self.t = fn(self.t)
        return self
"""
OVERRIDES_TO = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.ones(3)
    def to(self, *a, **k):
        super().to(*a, **k); self.t = self.t.to(*a, **k); return self
"""
ROTARY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)
        self.original_inv_freq = self.inv_freq
"""
TIED_BUFFERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", self.a)
"""
CLEARS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = torch.ones(3)
    def _apply(self, fn, recurse=True):
        self.cache = None
        return super()._apply(fn)
"""


def test_plain_tensor_attribute_does_not_move(inspect, rows):
    """A parameter follows and a plain tensor does not; the origin of each tensor is the line of its assignment."""
    actual_rows = rows(inspect(PLAIN))
    assert (actual_rows["w"].moves, actual_rows["t"].moves) == (True, False)
    assert (actual_rows["w"].origin.line, actual_rows["t"].origin.line) == (7, 8)
    assert actual_rows["t"].origin.file == "net0.py"


def test_tensor_that_own_apply_moves_needs_no_fix(inspect, rows):
    """A tensor that the class's own `_apply` moves needs no fix; a tensor that `_apply` forgets does not follow."""
    actual_rows = rows(inspect(OVERRIDES_APPLY))
    assert (actual_rows["t"].moves, actual_rows["t"].fix) == (True, None)
    assert (actual_rows["u"].moves, actual_rows["u"].fix is None) == (False, False)


@pytest.mark.parametrize("to", [None, "meta"])
def test_a_second_name_of_a_buffer_is_left_pointing_at_the_old_storage(inspect, rows, to):
    """A move leaves the plain second name of a buffer on the old device (the rotary pattern), as on CUDA."""
    state = inspect(ROTARY, to=to)
    assert rows(state)["inv_freq"].aliases == ("original_inv_freq",)
    (oddity,) = state.oddities
    assert (oddity.name, oddity.fqn) == ("stale-view", "original_inv_freq")
    assert "inv_freq" in oddity.message


def test_a_plain_list_of_parameters_is_not_stale(inspect):
    """On CUDA a Parameter keeps its identity and swaps its data, so a list of registered parameters follows."""
    source = PLAIN.replace("self.t = torch.ones(3)", "self.l = [self.w]")
    assert inspect(source).oddities == ()
    assert inspect(source, to="meta").oddities == ()


def test_a_view_of_a_parameter_is_stale(inspect):
    """A view of a parameter's data, kept as an attribute, does not move with the parameter."""
    (oddity,) = inspect(PLAIN.replace("self.t = torch.ones(3)", "self.v = self.w.data[:1]")).oddities
    assert (oddity.name, oddity.fqn) == ("stale-view", "v")


@pytest.mark.parametrize("to", [None, "meta"])
def test_move_separates_tied_buffers(inspect, rows, to):
    """After a move, two names of a buffer have separate storages; two names of a parameter still share a storage."""
    state = inspect(TIED_BUFFERS, to=to)
    assert rows(state)["b"].tied_to == ("a",)
    assert [(o.name, o.fqn) for o in state.oddities] == [("untied-by-move", "b")]
    tied = TIED_BUFFERS.replace('register_buffer("a", torch.ones(4))', "a = nn.Parameter(torch.ones(4))")
    assert inspect(tied.replace('register_buffer("b", self.a)', "b = self.a"), to=to).oddities == ()


@pytest.mark.parametrize(
    "lines",
    [
        'self.register_buffer("b", torch.ones(2)); self.__dict__["b"] = torch.zeros(5)',
        'self.b = torch.zeros(5); self._buffers["b"] = torch.ones(2)',
        'self.register_parameter("b", nn.Parameter(torch.ones(2))); object.__setattr__(self, "b", torch.zeros(5))',
    ],
)
@pytest.mark.parametrize("to", [None, "meta"])
def test_hiding_attribute_and_registered_tensor_have_two_rows(inspect, rows, lines, to):
    """Python reads the hiding attribute, state_dict and moves use the registered tensor: both have a row."""
    actual_rows = rows(
        inspect(f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); {lines}", to=to)
    )
    registered, hiding = actual_rows["b"], actual_rows["__dict__['b']"]
    assert (registered.shape, registered.saved, registered.moves) == ((2,), True, True)
    assert (hiding.shape, hiding.saved, hiding.moves, hiding.kind) == ((5,), False, False, Kind.UNREGISTERED)
    assert "hides the registered tensor" in hiding.note
    assert "two tensors have the name __dict__['b']" in hiding.fix
    follows_device = [row.after and row.after.followed for row in (registered, hiding)]
    assert follows_device == ([True, False] if to else [None, None])


def test_state_dict_has_the_buffer_with_the_name_of_a_parameter(inspect, rows):
    """state_dict() holds the buffer, so the parameter is not saved; both move."""
    actual_rows = rows(inspect(PLAIN + '        self._buffers["w"] = torch.ones(7)\n'))
    assert (actual_rows["w"].kind, actual_rows["w"].saved, actual_rows["w"].moves) == (Kind.PARAMETER, False, True)
    assert (actual_rows["w (2)"].shape, actual_rows["w (2)"].saved, actual_rows["w (2)"].moves) == ((7,), True, True)


def test_tensor_from_numpy_is_an_alias_of_the_parameter(inspect):
    """torch.from_numpy makes a new storage around the parameter's own memory; a move separates the two."""
    state = inspect(PLAIN.replace("self.t = torch.ones(3)", "self.t = torch.from_numpy(self.w.detach().numpy())"))
    assert [t.fqn for t in state.tensors] == ["w"]
    assert state.tensors[0].aliases == ("t",)
    assert ("stale-view", "t") in [(oddity.name, oddity.fqn) for oddity in state.oddities]


def test_note_reports_a_class_with_special_code_for_meta(inspect, rows):
    """The fake move and the real move may differ; the row shows the real move, and a note reports the difference."""
    source = PLAIN + (
        "    def _apply(self, fn, recurse=True):\n"
        "        return self if fn(torch.zeros(1)).is_meta else super()._apply(fn, recurse)\n"
    )
    assert rows(inspect(source))["w"].moves is True
    moved = rows(inspect(source, to="meta"))["w"]
    assert (moved.moves, moved.after.followed) == (False, False)
    assert "the class has special code for meta" in moved.note


def test_move_that_removes_a_tensor_is_inconclusive(inspect, rows):
    """A cache that `_apply` drops neither follows nor stays, and the note says so."""
    row = rows(inspect(CLEARS))["cache"]
    assert row.moves is None
    assert "the model removes the tensor during the move" in row.note


def test_a_failing_move_says_why(inspect, rows):
    """If `_apply` raises, moves is null and an oddity has the reason."""
    source = CLEARS.replace("self.cache = None", "raise RuntimeError('not movable')")
    state = inspect(source)
    assert rows(state)["cache"].moves is None
    (oddity,) = state.oddities
    assert oddity.name == "not-measured"
    assert "not movable" in oddity.message


def test_move_that_needs_values_is_repeated_with_values(inspect, rows):
    """If `_apply` asserts a value, the move is repeated with clones of the values on a second instance."""
    source = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.full((500_000,), 7.0))
        def _apply(self, fn, recurse=True):
            super()._apply(fn)
            assert self.b[0] == 7
            return self
    """
    assert rows(inspect(source))["b"].moves is True


def test_real_moves_to_meta_show_before_and_after(inspect, rows):
    """`--to meta` fills `after`: a tensor that follows is on meta, a tensor that stays is on cpu."""
    actual_rows = rows(inspect(PLAIN, to="meta"))
    assert (actual_rows["w"].after.device, actual_rows["w"].after.followed) == ("meta", True)
    assert (actual_rows["t"].after.device, actual_rows["t"].after.followed) == ("cpu", False)
    assert actual_rows["t"].device == "cpu"


def test_a_tensor_that_was_on_the_device_before_has_not_followed(inspect, rows):
    """The tensor was built on the target device; a move to another device would leave the tensor there."""
    source = PLAIN.replace("torch.ones(3)", 'torch.ones(3, device="meta")')
    change = rows(inspect(source, to="meta"))["t"]
    assert (change.device, change.after, change.moves, change.note) == ("meta", After("meta", False), False, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_error_without_cuda_suggests_meta():
    """Without CUDA the error suggests the check that works on every machine."""
    from statecli.live.requested_device import parse_device

    with pytest.raises(UsageError, match="--to meta"):
        parse_device("--to", "cuda", devices="", anywhere="meta")


@pytest.mark.parametrize(
    ("device", "options", "expected_text"),
    [
        ("cpu", {}, "--to meta"),
        ("warp", {}, "torch does not know this device"),
        ("meta", {"init_device": "meta"}, "leave --init-device out"),
        ("cpu", {"init_device": "meta"}, "built on meta"),
    ],
)
def test_move_that_cannot_be_checked_is_a_usage_error(inspect, device, options, expected_text):
    """A move to the current device, to an unknown device or out of meta is refused in one line."""
    source = PLAIN.replace("self.t = torch.ones(3)", "pass")
    with pytest.raises(UsageError, match=expected_text) as caught:
        inspect(source, to=device, **options)
    assert "\n" not in str(caught.value)


def test_an_exception_in_to_gives_its_line(inspect):
    """An exception in the model's own `.to` is reported in one line with the line of the user's code."""
    source = OVERRIDES_TO.replace("super().to(*a, **k);", "raise OSError('no disk');")
    with pytest.raises(ModelError, match=r"OSError: no disk \(net0.py:9\)"):
        inspect(source, to="meta")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("source", [PLAIN, OVERRIDES_APPLY, OVERRIDES_TO, ROTARY, TIED_BUFFERS])
def test_real_move_to_cuda_agrees_with_the_fake_move(inspect, source):
    """A real move to CUDA agrees with the fake move."""
    guess, real = inspect(source), inspect(source, to="cuda")
    assert [t.moves for t in guess.tensors] == [t.after.followed for t in real.tensors]
    assert [o.name for o in guess.oddities] == [o.name for o in real.oddities]


# --- saving ----------------------------------------------------------------------------------------------------


SAVES = {
    "self.register_buffer('t', torch.ones(2))": True,
    "self.register_buffer('t', torch.ones(2), persistent=False)": False,
    "self.t = torch.ones(2)": False,
    "self.t = torch.ones(2); self.get_extra_state = lambda: {'deep': [self.t]}": True,
    "self.t = torch.ones(2); self.get_extra_state = lambda: self.t.clone()": None,
    "self.t = torch.ones(2); self.get_extra_state = lambda: torch.ones(9)": False,
    "self.t = torch.ones(2); self.state_dict = lambda: {'renamed': self.t}": True,
    "self.register_buffer('t', torch.ones(2)); self.state_dict = lambda: {}": False,
    "self.t = torch.ones(2); self.state_dict = lambda: 1 / 0": None,
}


@pytest.mark.parametrize("line", SAVES)
def test_saved_follows_the_real_state_dict(inspect, rows, line):
    """The real state_dict() decides: by name, by storage or through extra state; a copy in extra state is unknown."""
    source = f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {line}\n"
    source = source.replace("self.get_extra_state =", "type(self).get_extra_state = lambda self:").replace(
        "lambda self: lambda:", "lambda self:"
    )
    assert rows(inspect(source))["t"].saved is SAVES[line]


def test_a_failing_state_dict_says_why(inspect):
    """If state_dict() raises, the reason is recorded."""
    source = PLAIN + "    def state_dict(self, *a, **k): raise KeyError('nope')\n"
    (oddity,) = inspect(source).oddities
    assert (oddity.name, "nope" in oddity.message) == ("no-state-dict", True)


# --- modules of libraries ------------------------------------------------------------------------------------------


def test_torchmetrics_states_follow(read_live, rows):
    """A metric's plain attributes follow through its own `_apply` and are not saved."""
    torchmetrics = pytest.importorskip("torchmetrics")
    actual_rows = rows(read_live(lambda: torchmetrics.classification.BinaryStatScores()))
    states = [actual_rows[name] for name in ("tp", "fp", "tn", "fn")]
    assert {(t.kind, t.moves, t.saved, t.fix) for t in states} == {(Kind.UNREGISTERED, True, False, None)}


def test_statistics_are_computed_before_values_are_overwritten(inspect, write):
    """`stats_of` gets each tensor with its values, before the measurement overwrites them."""
    from statecli.core.model_state import Stats
    from statecli.live.build import build
    from statecli.live.model_reader import read
    from statecli.live.spec import parse_spec

    target = write(PLAIN)
    state = read(build(parse_spec(target), values=True), target, stats_of=lambda t: Stats(max=t.max().item()))
    assert [t.stats.max for t in state.tensors] == [1.0, 1.0]


def test_own_to_is_inconclusive_for_a_model_on_meta(inspect):
    """For a model on meta, a class's own .to cannot be tested: no verdict, no fix, and a note with the reason."""
    (row,) = inspect(OVERRIDES_TO, init_device="meta").tensors
    assert (row.moves, row.fix) == (None, None)
    assert "own .to" in row.note


@pytest.mark.parametrize(
    ("statement", "expected_moves"),
    [("super().to(*a, **k);", True), ("assert a[0] != 'meta';", True), ("assert not a;", None)],
)
def test_an_overridden_to_is_tried_on_meta_then_on_a_fake_gpu(inspect, statement, expected_moves):
    """A class's own .to that fails on meta may still move the tensor to another device; one of the moves decides."""
    (row,) = inspect(OVERRIDES_TO.replace("super().to(*a, **k);", statement)).tensors
    assert (row.moves, row.fix) == (expected_moves, None)


#: Like kornia's augmentations: `_apply` creates the distributions again on the target device, from values.
SAMPLERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.forgotten, self.device = (0.5, 1.5), torch.ones(2), None
        self.make(torch.device("cpu"))
    def make(self, device):
        if device != self.device:
            low, high = (torch.tensor(limit, device=device) for limit in self.factor)
            {check}
            self.device, self.sampler = device, torch.distributions.Uniform(low, high, validate_args={validate})
    def _apply(self, fn, *args):
        super()._apply(fn, *args)
        self.make(fn(torch.zeros(())).device)
        return self
    {to}
"""


@pytest.mark.parametrize("to", ["", "def to(self, *args, **kwargs): return super().to(*args, **kwargs)"])
@pytest.mark.parametrize("check", ["pass", "assert low.item() >= 0"])
@pytest.mark.parametrize("wrap", ["Net", "Wrapped"])
def test_samplers_that_a_move_creates_on_the_device_follow(inspect, rows, to, check, wrap):
    """Neither a move within a device nor meta, if values are read, shows the new samplers; a fake CUDA device does."""
    source = SAMPLERS.format(check=check, validate=check != "pass", to=to)
    source += "\nclass Wrapped(nn.Sequential):\n    def __init__(self): super().__init__(nn.Linear(2, 2), Net())\n"
    actual_rows = rows(inspect(source, wrap))
    prefix = "1." if wrap == "Wrapped" else ""
    moves_by_name = {name: actual_rows[prefix + name].moves for name in ("sampler.low", "sampler.high", "forgotten")}
    assert moves_by_name == {"sampler.low": True, "sampler.high": True, "forgotten": False}


def test_a_model_that_follows_needs_no_fake_gpu(inspect, monkeypatch):
    """The import of the fake device takes a third of a second."""
    from statecli.live import measure

    monkeypatch.setattr(measure, "try_fake_gpu_move", lambda built: pytest.fail("tried"))
    source = OVERRIDES_TO.replace("def to(self, *a, **k)", "def _apply(self, fn)")
    (row,) = inspect(source.replace("super().to(*a, **k); self.t = self.t.to(*a, **k)", "self.t = fn(self.t)")).tensors
    assert row.moves


@pytest.mark.parametrize("to", [None, "meta"])
def test_oddity_says_that_own_cuda_was_not_tried(inspect, to):
    """The check runs .to, and a note says that the class's own .cuda was not tried."""
    state = inspect(OVERRIDES_TO.replace("def to(", "def cuda(").replace("super().to", "super().cuda"), to=to)
    (oddity,) = state.oddities
    assert (oddity.name, "statecli tests only .to and not .cuda" in oddity.message) == ("own-cuda", True)
    assert inspect(OVERRIDES_TO).oddities == ()


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore")
def test_weight_that_weight_norm_recomputes_is_a_note(statecli, tmp_path, wrap):
    """Old weight_norm and spectral_norm leave a plain `weight` on cpu and recompute it before each forward."""
    (tmp_path / "old.py").write_text(
        f"import torch\nfrom torch import nn\ndef net():\n    return nn.utils.{wrap.__name__}(nn.Linear(3, 2))\n"
    )
    result = statecli("inspect", tmp_path / "old.py:net", "--to", "meta", "-f", "json")
    assert result.code == 0
    assert [note["fqn"] for note in result.json["notes"] if note["name"] == "recomputed"] == ["weight"]


def test_a_non_persistent_buffer_tied_to_a_saved_one_is_not_saved_itself(inspect, rows):
    """state_dict() has no entry of that name; the note says that the memory is saved under another name."""
    lines = "self.register_buffer('a', torch.ones(4)); self.register_buffer('b', self.a, persistent=False)"
    actual_rows = rows(inspect(f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); {lines}"))
    assert (actual_rows["a"].saved, actual_rows["b"].saved) == (True, False)
    assert "under the name of a tied tensor" in actual_rows["b"].note


def test_message_names_each_earlier_tensor_of_the_storage(inspect):
    """The message about each later tensor names every earlier tensor of the storage."""
    lines = "self.p = nn.Parameter(torch.ones(4)); self.register_buffer('a', self.p.data); "
    lines += "self.register_buffer('b', self.p.data)"
    state = inspect(f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); {lines}")
    messages = [oddity.message for oddity in state.oddities if oddity.name == "untied-by-move"]
    assert [message.partition(", but")[0] for message in messages] == [
        "a shares memory with p",
        "b shares memory with p, a",
    ]


def test_captured_and_deep_copied_tensors_have_an_origin(inspect, rows):
    """The origin is the function that captured a closure's tensor, and the module around a deep-copied parameter."""
    source = """
import copy
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        k = torch.ones(2)
        self.a.register_forward_hook(lambda module, args, out: out * k)
        self.b = copy.deepcopy(self.a)
"""
    actual_rows = rows(inspect(source))
    assert {fqn: row.origin.line for fqn, row in actual_rows.items() if not fqn.startswith("b._")} == {
        "a.weight": 8,
        "a.bias": 8,
        "b.weight": 11,
        "b.bias": 11,
        "a._forward_hooks[#0].__closure__['k']": 10,
    }


@pytest.mark.parametrize("to", [None, "meta"])
def test_sample_input_is_listed_without_a_fix(inspect, rows, to):
    """A sample input is listed without a fix, because a sample input should not be registered."""
    row = rows(inspect(PLAIN.replace("self.t", "self.example_input_array"), to=to))["example_input_array"]
    assert (row.kind, row.fix, row.is_input) == (Kind.UNREGISTERED, None, True)
    assert "sample input" in row.note
    assert not rows(inspect(PLAIN, to=to))["t"].is_input


def test_tensor_with_a_copy_in_state_dict_is_saved(read_live, rows):
    """A metric of torchmetrics saves copies of its persistent states, including a list."""

    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.total, self.other, self.values = torch.ones(2), torch.ones(2), [torch.ones(3), torch.ones(3)]

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {**state, "total": self.total.clone(), "values": [value.clone() for value in self.values]}

    saved = {name: row.saved for name, row in rows(read_live(Metric)).items()}
    assert saved == {"total": True, "other": False, "values[0]": True, "values[1]": True}


def test_persistent_states_of_torchmetrics_are_saved(read_live, rows):
    """`persistent(True)` puts them into the state_dict."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def build_metric():
        metric = torchmetrics.MeanMetric()
        metric.persistent(True)
        return metric

    actual_rows = rows(read_live(build_metric))
    assert {name: actual_rows[name].saved for name in build_metric().state_dict()} == {
        "mean_value": True,
        "weight": True,
    }
    assert not actual_rows["_defaults['weight']"].saved
