"""What the command line says of its options, in the words of Python's arguments."""

from __future__ import annotations

import pytest

from statecli.api.errors import in_python, told
from statecli.core.errors import ModelError, UsageError


@pytest.mark.parametrize(
    ("message", "given", "wanted"),
    [
        ("--device gpu: no such device", {"device": "gpu"}, "device='gpu': no such device"),
        ("--input 2y3: no shape", {"inputs": ("2x3", "2y3")}, "inputs='2y3': no shape"),
        ("--atol -1: a tolerance", {"atol": -1.0}, "atol=-1: a tolerance"),
        ("--optimizer : none", {"optimizer": ""}, "optimizer='': none"),
        ("--bitwise and --atol contradict", {"bitwise": True, "atol": 1.0}, "bitwise and atol contradict"),
        ("--map makes 'a' of both", {"map": "b=a"}, "map makes 'a' of both"),
        ("as in --map '^model[.]='", {"map": "b"}, "as in map='^model[.]='"),
        ("--to x: no such; --to meta does", {"to": "x"}, "to='x': no such; to='meta' does"),
        ("--init-device cuda: no class", {"init_device": "cuda"}, "init_device='cuda': no class"),
        (
            "none matches -i 'a*' and -x 'b'",
            {"include": "a*", "exclude": "b"},
            "none matches include='a*' and exclude='b'",
        ),
        ("--jobs 2 and my--to.py, -inf", {"to": "x"}, "--jobs 2 and my--to.py, -inf"),
    ],
)
def test_an_option_becomes_the_argument(message, given, wanted):
    """With its value where it has one; what is no option of this call stays as it is."""
    assert in_python(message, given) == wanted


def raising(error):
    raise error


def test_only_what_is_said_of_options_is_retold():
    """What a model's own code raised may have options of its own."""
    with pytest.raises(UsageError, match=r"^to='x'$"):
        told({"to": "x"}, lambda: raising(UsageError("--to x")))
    with pytest.raises(ModelError, match=r"^--to x$"):
        told({"to": "x"}, lambda: raising(ModelError("--to x")))
