"""Errors of TorchScript's interpreter, each raised by torch itself."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from statecli.live.torchscript_errors import parse_script_error

pytestmark = pytest.mark.filterwarnings("ignore")


class Inner(nn.Module):
    def forward(self, x):
        if x.shape[0] > 1:
            raise ValueError("no such luck")
        return x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.w = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return self.inner(x) @ self.w


def line(function, text):
    """Return the number of the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, source in enumerate(lines) if text in source)


def error(module, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - TorchScript chooses the type
        module(*args)
    return caught.value


def parse_raised_error(module, *args, library=lambda _: False):
    return parse_script_error(error(module, *args), library)


def test_exception_of_the_model_is_parsed_with_its_line():
    """The result has the exception as the model raised it, and the deepest line of the model."""
    actual = parse_raised_error(torch.jit.script(Outer()), torch.ones(3, 2))
    assert actual.text == "ValueError: no such luck"
    assert actual.place == (__file__, line(Inner.forward, "raise"))


def test_error_of_an_operator_is_parsed_with_the_calling_line():
    """The result has torch's message, and the line that calls the operator."""
    actual = parse_raised_error(torch.jit.script(Outer()), torch.ones(1, 5))
    assert actual.text == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x5 and 2x2)"
    assert actual.place == (__file__, line(Outer.forward, "@"))


def test_error_of_a_trace_has_the_deepest_line_outside_libraries():
    """The line is the deepest line outside of libraries."""
    module = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    actual = parse_raised_error(module, torch.ones(1, 5), library=lambda file: "site-packages" in file)
    assert actual.text.startswith("RuntimeError: mat1 and mat2")
    assert actual.place.file == __file__
    assert parse_raised_error(module, torch.ones(1, 5)).place.file.endswith("linear.py")


def test_error_without_a_message_gets_a_text():
    """The text says that TorchScript gives no reason."""
    frame = '  File "net.py", line 3, in forward\n    x\n    ~ <--- HERE\n'
    text = f"Traceback of TorchScript (most recent call last):\n{frame}RuntimeError"
    script_error = parse_script_error(RuntimeError(text), lambda _: False)
    assert (script_error.text, script_error.place) == ("RuntimeError: TorchScript gives no reason", ("net.py", 3))


def test_other_exceptions_are_not_parsed():
    """Other exceptions, and classes whose text would run their code, are not parsed."""

    class UnprintableError(Exception):
        def __str__(self):
            raise AssertionError

    for exception in (RuntimeError("no"), UnprintableError()):
        assert parse_script_error(exception, lambda _: False) is None
