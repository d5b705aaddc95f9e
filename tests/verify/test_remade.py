"""Tensors that forward creates again for another device or dtype; the oracle is the model after a cast and a call."""

from __future__ import annotations

import pytest

from statecli.commands.verify.result import Name
from statecli.commands.verify.run import Request, run

from .proving import cell, of_source, rules, verdicts

pytestmark = pytest.mark.usefixtures("in_tmp_path")

CACHE = """
self.a, self.c = nn.Linear(3, 3), {start}
---
{rest}
def forward(self, x):
    {forward}
    return self.a(x) + {read}
"""
MAKE = "torch.ones(3, device=x.device, dtype=x.dtype)"
IF_OTHER = f"if self.c is None or self.c.device != x.device or self.c.dtype != x.dtype: self.c = {MAKE}"
ONCE = {
    "checked": ("None", IF_OTHER, "self.c"),
    "by device and dtype": ("{}", f"k = (x.device, x.dtype); self.c.setdefault(k, {MAKE})", "self.c[k]"),
    "in pairs": ("{}", f"k = (x.device, x.dtype); self.c.setdefault(k, ({MAKE}, {MAKE}))", "self.c[k][1]"),
    "where values decide": ("None", f"assert x.sum().item() < 1e9\n    {IF_OTHER}", "self.c"),
}
KEPT = {
    "made once": ("None", f"self.c = {MAKE} if self.c is None else self.c", "self.c"),
    "copied on": ("None", "self.c = torch.ones(3) if self.c is None else self.c.to(x)", "self.c"),
    "a history": ("[]", "self.c.append(self.a(x).detach())", "self.c[-1]"),
}


def prove_cache(name: Name, start: str, forward: str, read: str, rest: str = "", device: str = "fake-cuda"):
    body = CACHE.format(start=start, forward=forward, read=read, rest=rest)
    return of_source(name, body, "2x3", device=device)


def cache(check, column: str):
    """Return the cell of the tensors in `self.c`, which all have the same verdict and reason."""
    actual_verdicts = [cell(check, column, name) for name in verdicts(check, column) if not name.startswith("a.")]
    assert len({(check.verdict, check.reason) for check in actual_verdicts}) == 1
    return actual_verdicts[0]


@pytest.mark.parametrize("device", ["fake-cuda", "meta", "cpu"])
@pytest.mark.parametrize("way", ONCE)
def test_a_cache_for_each_device_is_not_judged(way, device):
    """A forward on a fake CUDA device replaces the cache, whatever the names of its entries."""
    check = cache(prove_cache(Name.MOVE, *ONCE[way], device=device), "moves")
    assert (check.verdict.value, check.reason) == ("skipped", "forward replaces the tensor when the device changes")


def test_a_cache_that_each_forward_replaces_is_not_said_to_be_unread():
    """Forward reads the new value, and no code reads the old value."""
    check = cache(prove_cache(Name.FORWARD, "None", "self.c = self.a(x).detach()", "self.c"), "forward")
    reason = "left on cpu; forward replaces the tensor without reading the old value"
    assert (check.verdict.value, check.reason) == ("skipped", reason)


@pytest.mark.parametrize("way", ONCE)
def test_a_cache_for_each_dtype_is_not_judged(way):
    """The oracle: a forward after .double() creates a float64 tensor."""
    check = cache(prove_cache(Name.CAST, *ONCE[way]), "casts")
    assert (check.verdict.value, check.reason) == ("skipped", "forward replaces the tensor when the dtype changes")


def test_a_cache_by_device_alone_is_read_after_a_cast():
    """The entry has the device in its name but not the dtype, so a cast model still reads the old entry."""
    check = prove_cache(Name.CAST, "{}", f"k = str(x.device); self.c.setdefault(k, {MAKE})", "self.c[k]")
    assert rules(check) == {"c['cpu']": "keeps-dtype"}
    assert check.findings[0].help == (
        "create the tensor again in forward when the dtype changes, or keep one tensor per dtype; assigned at net.py:7"
    )


@pytest.mark.parametrize("way", KEPT)
def test_what_forward_goes_on_reading_or_adding_to_fails(way):
    """The tensor of the first forward is read by later forwards, or stays in a growing list."""
    assert set(rules(prove_cache(Name.MOVE, *KEPT[way])).values()) == {"left-behind"}
    assert set(rules(prove_cache(Name.CAST, *KEPT[way])).values()) == {"keeps-dtype"}


def test_a_forward_that_raises_there_cannot_tell():
    """Forward raises, so statecli does not know whether forward would replace the cache: the cell is inconclusive."""
    forward = "self.c = torch.ones(3) if self.c is None else self.c\n    "
    forward += "assert x.dtype == torch.float32 and x.device.type == 'cpu', 'not here'"
    for name, column in ((Name.MOVE, "moves"), (Name.CAST, "casts")):
        check = prove_cache(name, "None", forward, "self.c")
        assert check.findings == ()
        assert cache(check, column).verdict.value == "inconclusive"
        assert (
            "statecli does not know whether forward creates the tensor again: calling the model"
            in cache(check, column).reason
        )
        assert "not here (net.py:11)" in cache(check, column).reason


def test_a_dict_of_the_class_keeps_nothing_of_a_pretended_gpu():
    """All instances share the dict: a tensor without data would cause a false mismatch in the next instance."""
    body = CACHE.format(start="None", forward=ONCE["by device and dtype"][1], read="self.c[k]", rest="c = {}")
    body = body.replace(", self.c = nn.Linear(3, 3), None", " = nn.Linear(3, 3)")
    assert rules(of_source(Name.FORWARD, body, "2x3", device="fake-cuda")) == {}
    result = run(Request("net.py:Net", device="fake-cuda", input=("2x3",)))
    assert result.findings == ()
    (moves,) = [column for check in result.checks for column in check.columns if column.name == "moves"]
    assert moves.cells["c[#0]"].reason == "forward replaces the tensor when the device changes"


def test_a_model_of_doubles_is_asked_with_floats():
    """The model is cast to another dtype, because a cast to its own dtype would show nothing."""
    rest = "example_input_array = property(lambda self: torch.ones(2, 3, dtype=torch.float64))"
    body = CACHE.format(start="None", forward=ONCE["checked"][1], read="self.c", rest=rest)
    body = body.replace("nn.Linear(3, 3)", "nn.Linear(3, 3).double()")
    change = cache(of_source(Name.CAST, body), "casts")
    assert (change.before, change.reason) == ("float64", "forward replaces the tensor when the dtype changes")


@pytest.mark.parametrize(
    "drawn",
    [
        "torch.randn(2, 2)",
        "torch.tensor(numpy.random.rand(3))",
        "torch.tensor([random.random()] * 3)",
        "nn.functional.dropout(torch.ones(9), training=True)",
        "torch.randn(2, 2, generator=self.own)",
    ],
)
@pytest.mark.parametrize("name", [Name.MOVE, Name.CAST])
def test_what_forward_draws_anew_each_time_is_not_judged(name, drawn):
    """Two calls draw the same numbers, so the new tensor has the same bits as the replaced tensor."""
    body = "self.a, self.own = nn.Linear(3, 3), torch.Generator()\n---\ndef forward(self, x):\n"
    body += f"    import numpy, random\n    self.noise = {drawn}\n"
    check = of_source(name, body + "    return self.a(x) + self.noise.sum().to(x)", "2x3")
    assert rules(check) == {}


def test_what_is_drawn_once_and_kept_is_judged():
    """The second call does not create the tensor again, whatever its seed."""
    once = "self.c = torch.randn(3) if self.c is None else self.c"
    assert rules(prove_cache(Name.MOVE, "None", once, "self.c")) == {"c": "left-behind"}


def test_a_call_leaves_the_random_generators_as_they_were():
    """Each proof seeds the generators only for itself."""
    import gc
    import random

    import torch

    gc.collect()  # garbage of other tests may put back a state of its own
    body = "self.a = nn.Linear(3, 3)\n---\ndef forward(self, x):\n    return self.a(x) + torch.rand(3)"
    before = torch.get_rng_state(), random.getstate()
    of_source(Name.FORWARD, body, "2x3")
    assert (torch.get_rng_state() == before[0]).all()
    assert random.getstate() == before[1]
