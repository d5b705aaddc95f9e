"""For people's own tests: one assertion that a model's state follows, is saved, restored and trained.

    from statecli.testing import assert_state_follows

    def test_state():
        assert_state_follows(Net(), inputs="2x3", device="fake-cuda")

As a pytest fixture it is there without an import: `def test_state(assert_state_follows): …`. torch is imported by the
call alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from statecli.commands.verify.result import Check, Name, Verification
    from statecli.core.state import Kind
    from statecli.report import Report

__all__ = ["assert_state_follows"]


def assert_state_follows(
    model: str | nn.Module,
    *,
    checks: Iterable[Name | str] | None = (),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    inputs: Any = None,
    include: Iterable[str] | None = (),
    exclude: Iterable[str] | None = (),
    kind: Iterable[Kind | str] | None = (),
) -> Verification:
    """Verify `model` and give the result; the parameters are those of `statecli.verify`.

    Raises AssertionError, with the table that `statecli verify` prints, where anything failed or could not be told,
    where a proof that `checks` names was skipped, and where every proof was. A proof that nobody asked for by name may
    be skipped, for want of inputs for instance. Raises StateError where the model could not be tried at all.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    import statecli
    from statecli.api.calls import options_of
    from statecli.requests.options import VerifyOptions

    asked = options_of(VerifyOptions, {"target": "", "check": checks}).check
    found = statecli.verify(
        model,
        checks=asked,
        device=device,
        dtype=dtype,
        optimizer=optimizer,
        inputs=inputs,
        include=include,
        exclude=exclude,
        kind=kind,
    )
    message = failure(found, asked)
    if message:
        raise AssertionError(message)
    return found


def failure(found: Verification, asked: Iterable[Name] = ()) -> str:
    """What is wrong, as text: a line that says which proofs, then the table of a terminal; "" where nothing is."""
    from statecli.report import View, verify

    untold = verify.list_inconclusive(found, tuple(asked))
    bad = bool(found.findings) or any(map(_is_bad, found.checks))
    if not (bad or untold):
        return ""
    report = verify.build_verify_report(found, View())
    verdict = f"{found.state.target}: {report.page().verdict}"
    return "\n".join([verdict, "", _laid_out(report), *(() if bad else untold)]).rstrip()


#: pytest puts four columns in front of each line.
_WIDTH = 100


def _is_bad(check: Check) -> bool:
    return check.verdict.value in ("failed", "inconclusive")


def _laid_out(report: Report) -> str:
    from statecli import render

    class Text:
        def __init__(self) -> None:
            self.parts: list[str] = []

        def text(self, text: str) -> None:
            self.parts.append(text)

        def utf8(self, raw: bytes) -> None:
            self.parts.append(raw.decode())

    sink = Text()
    render.write(report, render.Output.TABLE, sink, render.RenderOptions(terminal=True, width=_WIDTH))
    return "".join(sink.parts)
