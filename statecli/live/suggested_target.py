"""Find a suggested model spec that builds, because some suggestions fail to build.

Each spec is tried by building it. The error of a failed spec may suggest another spec, which is tried next.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from statecli.core.errors import ModelError, StateError
from statecli.live.downloads import ALLOW

#: Beginning of the advice to install a package.
INSTALL_ADVICE = "install the package: "
#: Largest number of builds after an error.
_MAX_BUILDS = 12


class Advice(NamedTuple):
    """Advice at the end of an error, with model specs to try. The first spec that builds replaces the advice.

    `question` comes before the advice: `did you mean Linear?`.
    """

    text: str
    lines: tuple[str, ...] = ()
    question: str = ""

    def build_error(self, problem: str) -> ModelError:
        """Return the error that consists of the problem and this advice."""
        message = "; ".join(filter(None, [problem, self.question]))
        return ModelError(message, advice=self.text, lines=self.lines)


def advise_line(word: str, *, question: str = "") -> Advice:
    """Return the advice to write a model spec. `word` is the spec quoted for a shell."""
    return Advice(f"write {word}", (word,), question)


def correct_advice(error: ModelError, build: Callable[[str], object]) -> ModelError:
    """Return the error with better advice, or unchanged if its advice works or no better advice is known.

    `build` builds the model of a spec, without values, or raises StateError.
    """
    trial = _Trial(build)
    advice = trial.find_advice(error)
    if advice is None or "..." in advice:
        advice = trial.install or advice
    if advice is None or advice == error.advice:
        return error
    return ModelError(error.message, choices=error.choices, advice=advice)


@dataclass
class _Trial:
    build: Callable[[str], object]
    tried: set[str] = field(default_factory=set)
    #: Advice to install a package, from the error of a spec that needs only this package.
    install: str | None = None

    def find_advice(self, error: ModelError) -> str | None:
        """Return advice that works, or else the advice in the error of a failed model spec, or else None."""
        for line in error.lines:
            # False if the advice shows another spec, or a spec with `...`.
            is_written = len(error.lines) == 1 and f"write {line}" in (error.advice or "")
            if len(self.tried) == _MAX_BUILDS:
                break
            if line in self.tried:
                continue
            refusal = self._try_line(line)
            if refusal is None:
                return error.advice if is_written else f"write {line}"
            if (refusal.advice or "").startswith(INSTALL_ADVICE):
                self.install = self.install or refusal.advice
            # The specs of a refusal without advice are only guesses, so the next spec comes first.
            advice = self.find_advice(refusal) if refusal.advice or len(error.lines) == 1 else None
            if advice is None and is_written and refusal.advice:
                advice = f"write {line}, and {ALLOW}" if refusal.advice == ALLOW else refusal.advice
            if advice is not None:
                is_line = is_written and advice.startswith("write ")
                return (error.advice or "").replace(f"write {line}", advice) if is_line else advice
        return None

    def _try_line(self, line: str) -> ModelError | None:
        """Build the model of a suggested model spec. Return the error, or None if there is no error."""
        self.tried.add(line)
        try:
            self.build(" ".join(shlex.split(line)))
        except ModelError as error:
            return error
        except StateError as error:
            return ModelError(error.message, advice=error.advice)
        return None
