"""The options of a diff command line reach the comparison and the report."""

from __future__ import annotations

import pytest

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field
from statecli.core.errors import UsageError
from statecli.core.model_state import Kind
from statecli.core.selection import Selection
from statecli.render import Output
from statecli.report.diff_view import DiffView, NameList
from statecli.requests import diff
from statecli.requests.options import DiffOptions
from statecli.requests.outcome import Caller, ExtraInputs
from statecli.values.delta import CompareOptions

TARGETS = {"before": "a.pt", "after": "b.pt"}


def build_options(**options):
    return DiffOptions(**TARGETS | options)


def prepare(options):
    return diff.prepare(options, Caller(), ExtraInputs())


def test_defaults_equal_those_of_the_library():
    """Without options, the command line and the library have the same defaults."""
    assert prepare(build_options()) == Request("a.pt", "b.pt")
    assert diff.build_view(build_options()) == DiffView()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bitwise": True}, {"how": CompareOptions(bitwise=True)}),
        ({"atol": 1e-6, "rtol": 0.5}, {"how": CompareOptions(atol=1e-6, rtol=0.5)}),
        ({"device": "cuda:1"}, {"how": CompareOptions(device="cuda:1")}),
        ({"metadata_only": True}, {"values": False}),
        ({"no_renames": True}, {"renames": False}),
        ({"verbose": True}, {"ranks": True}),
        ({"output_format": Output.HTML}, {"histograms": diff.HISTOGRAM_COUNT, "ranks": True}),
        ({"may_change": ("x",)}, {"only": ("x",)}),
        ({"must_not_change": ("x",)}, {"frozen": ("x",)}),
        ({"must_change": ("x",)}, {"changed": ("x",)}),
        *(
            (options, options)
            for options in (
                {"map": ("a=b",)},
                {"ignore": (Field.DTYPE,)},
                {"adapter": "lora"},
                {"init_device": "meta", "after": "net.py:Net"},
                {"jobs": 3},
            )
        ),
    ],
)
def test_each_option_reaches_the_comparison(arguments, expected):
    """The request differs from the default only in the given option."""
    assert prepare(build_options(**arguments)) == Request(**TARGETS | expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"all": True}, {"unfold": True}),
        ({"tree": True}, {"tree": True}),
        ({"verbose": True}, {"verbose": True}),
        ({"lines": 0}, {"lines": 0}),
        ({"unchanged": True}, {"unchanged": True}),
        ({"name_only": True}, {"names": NameList.ONLY}),
        ({"name_status": True}, {"names": NameList.STATUS}),
    ],
)
def test_each_option_reaches_the_report(options, expected):
    """The view differs from the default only in the given option."""
    assert diff.build_view(build_options(**options)) == DiffView(**expected)


def test_compute_device_must_be_cpu_or_cuda():
    """The CPU, the current GPU and a GPU with a number are accepted; a misspelt device is an error, not corrected."""
    for device in ("cpu", "cuda", "cuda:0", "cuda:12"):
        prepare(build_options(device=device))
    for device in ("", "CPU", "cuda:", "cuda:-1", "cuda:01", "cuda:0 ", "mps", "meta", "cpu\n"):
        with pytest.raises(UsageError):
            prepare(build_options(device=device))


def test_contradicting_options_are_both_named():
    with pytest.raises(UsageError, match=r"--bitwise and --atol contradict"):
        prepare(build_options(bitwise=True, atol=1.0))


@pytest.mark.parametrize(
    "options",
    [
        {"include": ("x",)},
        {"exclude": ("x",)},
        {"kind": (Kind.BUFFER,)},
        {"dtype": ("float16",)},
        {"shape": ("2x3",)},
    ],
)
def test_each_filter_reaches_the_comparison(options):
    """The five filters form one selection."""
    assert prepare(build_options(**options)) == Request("a.pt", "b.pt", selection=Selection(**options))
