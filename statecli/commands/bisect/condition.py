"""Conditions of `--condition`: `nan`, `inf`, `changed GLOB`, `cosine<0.9`."""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from statecli.core.errors import UsageError, option
from statecli.core.lazy_pattern import compile_on_use

_COSINE = compile_on_use(r"cosine\s*<\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
#: Forms of a condition, for a message.
FORMS = "nan, inf, 'changed GLOB' or 'cosine<0.9'"


class ConditionFigure(str, Enum):
    """What a condition measures in a checkpoint."""

    NAN = "nan"
    INF = "inf"
    CHANGED = "changed"
    COSINE = "cosine"


class Condition(msgspec.Struct, frozen=True):
    """Condition on a single checkpoint, or on a checkpoint and the first checkpoint of the run.

    Attributes:
        text: The condition as typed.
        measure: The needed figure.
        glob: Names of the measured tensors; None for all tensors of the model.
        limit: Of a cosine, the exclusive upper limit of the condition.
    """

    text: str
    measure: ConditionFigure
    glob: str | None = None
    limit: float | None = None

    @property
    def compares(self) -> bool:
        """True if the checkpoint is compared with the first checkpoint."""
        return self.measure in (ConditionFigure.CHANGED, ConditionFigure.COSINE)


def parse_condition(text: str) -> Condition:
    """Parse the text of `--condition`. Raises UsageError if it is not a condition."""
    condition_text = text.strip()
    option_text = option("--condition", text, quoted=True)
    if match := _COSINE.match(condition_text):
        limit, glob = float(match[1]), condition_text[match.end() :]
        if glob and not glob[0].isspace():
            raise UsageError(
                f"{option_text}: unexpected {glob!r} after the number; write 'cosine<0.9' or 'cosine<0.9 GLOB'"
            )
        if not -1 < limit <= 1:
            raise UsageError(
                f"{option_text}: a cosine is between -1 and 1, so the answer is the same for every checkpoint; "
                "write another number"
            )
        return Condition(text, ConditionFigure.COSINE, glob.strip() or None, limit)
    name, _, glob = condition_text.partition(" ")
    measure = next((measure for measure in ConditionFigure if measure.value == name.lower()), None)
    if measure is ConditionFigure.COSINE or (measure is None and name.lower().startswith("cosine")):
        raise UsageError(f"{option_text}: write a number from -1 to 1 after <, such as 'cosine<0.9'")
    if measure is None:
        raise UsageError(f"{option_text}: is not a condition; write {FORMS}")
    if measure is ConditionFigure.CHANGED and not glob.strip():
        example = option("--condition", "changed layers.*", quoted=True)
        raise UsageError(f"{option_text}: the glob is missing; write the glob inside the quotes: {example}")
    return Condition(text, measure, glob.strip() or None)
