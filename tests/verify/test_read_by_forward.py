"""Tensors of the first forward that later forwards do not read; the oracle is the model after a cast and a call."""

from __future__ import annotations

import pytest

from statecli.commands.verify.read_by_forward import NOT_READ_REASON
from statecli.commands.verify.result import Name
from statecli.commands.verify.run import Request, run

from .proving import find_cell, map_rules, map_verdicts, prove_source

pytestmark = pytest.mark.usefixtures("in_tmp_path")

CACHE = """
self.a, self.c = nn.Linear(3, 3), {start}
---
{rest}
def forward(self, x):
    {forward}
    return self.a(x) + {read}
"""
NEW_TENSOR = "torch.ones(3, device=x.device, dtype=x.dtype)"
REPLACE_IF_CHANGED = f"if self.c is None or self.c.device != x.device or self.c.dtype != x.dtype: self.c = {NEW_TENSOR}"
REPLACED_CACHES = {
    "a history": ("[]", "self.c.append(self.a(x).detach())", "self.c[-1]"),
    "checked": ("None", REPLACE_IF_CHANGED, "self.c"),
    "by device and dtype": ("{}", f"k = (x.device, x.dtype); self.c.setdefault(k, {NEW_TENSOR})", "self.c[k]"),
    "in pairs": ("{}", f"k = (x.device, x.dtype); self.c.setdefault(k, ({NEW_TENSOR}, {NEW_TENSOR}))", "self.c[k][1]"),
    "where values decide": ("None", f"assert x.sum().item() < 1e9\n    {REPLACE_IF_CHANGED}", "self.c"),
}
KEPT_CACHES = {
    "made once": ("None", f"self.c = {NEW_TENSOR} if self.c is None else self.c", "self.c"),
    "copied on": ("None", "self.c = torch.ones(3) if self.c is None else self.c.to(x)", "self.c"),
}


def prove_cache(name: Name, start: str, forward: str, read: str, rest: str = "", device: str = "fake-cuda"):
    body = CACHE.format(start=start, forward=forward, read=read, rest=rest)
    return prove_source(name, body, "2x3", device=device)


def find_cache_cell(check, column: str):
    """Return the cell of the tensors in `self.c`, which all have the same verdict and reason."""
    actual_verdicts = [
        find_cell(check, column, name) for name in map_verdicts(check, column) if not name.startswith("a.")
    ]
    assert len({(check.verdict, check.reason) for check in actual_verdicts}) == 1
    return actual_verdicts[0]


@pytest.mark.parametrize("device", ["fake-cuda", "meta", "cpu"])
@pytest.mark.parametrize("cache", REPLACED_CACHES)
def test_cache_per_device_is_skipped(cache, device):
    """A forward on a fake CUDA device replaces the cache, whatever the names of its entries."""
    check = find_cache_cell(prove_cache(Name.MOVE, *REPLACED_CACHES[cache], device=device), "moves")
    assert (check.verdict.value, check.reason) == (
        "skipped",
        NOT_READ_REASON.format("device"),
    )


def test_reason_says_that_forward_replaces_the_cache():
    """Forward reads the new value, and no code reads the old value."""
    check = find_cache_cell(prove_cache(Name.FORWARD, "None", "self.c = self.a(x).detach()", "self.c"), "forward")
    reason = "left on cpu; forward replaces the tensor without reading the old value"
    assert (check.verdict.value, check.reason) == ("skipped", reason)


@pytest.mark.parametrize("cache", REPLACED_CACHES)
def test_cache_per_dtype_is_skipped(cache):
    """The oracle: a forward after .double() creates a float64 tensor."""
    check = find_cache_cell(prove_cache(Name.CAST, *REPLACED_CACHES[cache]), "casts")
    assert (check.verdict.value, check.reason) == (
        "skipped",
        NOT_READ_REASON.format("dtype"),
    )


def test_cache_without_the_dtype_in_its_key_fails_the_cast():
    """The entry has the device in its name but not the dtype, so a cast model still reads the old entry."""
    check = prove_cache(Name.CAST, "{}", f"k = str(x.device); self.c.setdefault(k, {NEW_TENSOR})", "self.c[k]")
    assert map_rules(check) == {"c['cpu']": "keeps-dtype"}
    assert check.findings[0].help == (
        "create the tensor again in forward when the dtype changes, or keep one tensor per dtype; assigned at net.py:7"
    )


@pytest.mark.parametrize("cache", KEPT_CACHES)
def test_tensor_read_by_later_forwards_fails(cache):
    """A later forward reads the tensor of the first forward, or copies it."""
    assert set(map_rules(prove_cache(Name.MOVE, *KEPT_CACHES[cache])).values()) == {"left-behind"}
    assert set(map_rules(prove_cache(Name.CAST, *KEPT_CACHES[cache])).values()) == {"keeps-dtype"}


def test_cache_is_inconclusive_if_forward_raises():
    """Forward raises, so statecli does not know whether forward would replace the cache: the cell is inconclusive."""
    forward = "self.c = torch.ones(3) if self.c is None else self.c\n    "
    forward += "assert x.dtype == torch.float32 and x.device.type == 'cpu', 'not here'"
    for name, column in ((Name.MOVE, "moves"), (Name.CAST, "casts")):
        check = prove_cache(name, "None", forward, "self.c")
        assert check.findings == ()
        assert find_cache_cell(check, column).verdict.value == "inconclusive"
        assert (
            "statecli does not know whether forward still reads the tensor: calling the model"
            in find_cache_cell(check, column).reason
        )
        assert "not here (net.py:11)" in find_cache_cell(check, column).reason


def test_class_dict_keeps_no_tensor_of_the_fake_gpu():
    """All instances share the dict: a tensor without data would cause a false mismatch in the next instance."""
    body = CACHE.format(
        start="None", forward=REPLACED_CACHES["by device and dtype"][1], read="self.c[k]", rest="c = {}"
    )
    body = body.replace(", self.c = nn.Linear(3, 3), None", " = nn.Linear(3, 3)")
    assert map_rules(prove_source(Name.FORWARD, body, "2x3", device="fake-cuda")) == {}
    result = run(Request("net.py:Net", device="fake-cuda", input=("2x3",)))
    assert result.findings == ()
    (move_column,) = [column for check in result.checks for column in check.columns if column.name == "moves"]
    assert move_column.cells["c[#0]"].reason == NOT_READ_REASON.format("device")


def test_float64_model_is_cast_to_another_dtype():
    """The model is cast to another dtype, because a cast to its own dtype would show nothing."""
    rest = "example_input_array = property(lambda self: torch.ones(2, 3, dtype=torch.float64))"
    body = CACHE.format(start="None", forward=REPLACED_CACHES["checked"][1], read="self.c", rest=rest)
    body = body.replace("nn.Linear(3, 3)", "nn.Linear(3, 3).double()")
    change = find_cache_cell(prove_source(Name.CAST, body), "casts")
    assert (change.before, change.reason) == (
        "float64",
        NOT_READ_REASON.format("dtype"),
    )


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
def test_noise_drawn_at_each_call_is_not_reported(name, drawn):
    """Two calls draw the same numbers, so the new tensor has the same bits as the replaced tensor."""
    body = "self.a, self.own = nn.Linear(3, 3), torch.Generator()\n---\ndef forward(self, x):\n"
    body += f"    import numpy, random\n    self.noise = {drawn}\n"
    check = prove_source(name, body + "    return self.a(x) + self.noise.sum().to(x)", "2x3")
    assert map_rules(check) == {}


def test_noise_drawn_once_is_reported():
    """The second call does not create the tensor again, whatever its seed."""
    once = "self.c = torch.randn(3) if self.c is None else self.c"
    assert map_rules(prove_cache(Name.MOVE, "None", once, "self.c")) == {"c": "left-behind"}


def test_proof_restores_the_random_generators():
    """Each proof seeds the generators only for itself."""
    import gc
    import random

    import torch

    gc.collect()  # garbage of other tests may put back a state of its own
    body = "self.a = nn.Linear(3, 3)\n---\ndef forward(self, x):\n    return self.a(x) + torch.rand(3)"
    before = torch.get_rng_state(), random.getstate()
    prove_source(Name.FORWARD, body, "2x3")
    assert (torch.get_rng_state() == before[0]).all()
    assert random.getstate() == before[1]


def test_help_for_a_cache_of_the_input_does_not_create_the_cache_again():
    """The first input gave the values, so a later forward cannot create the tensor again."""
    body = "self.fc = nn.Linear(3, 3)\nself.first = None\n---\ndef forward(self, x):\n"
    store = "    if self.first is None:\n        self.first = {}\n    return self.fc(x) - self.first"
    for value, start in (("x.detach().mean(0)", "copy the tensor with .to(x.device)"), ("torch.ones(3)", "create the")):
        (finding,) = prove_source(Name.MOVE, body + store.format(value), "2x3", device="fake-cuda").findings
        assert finding.help.startswith(start)
