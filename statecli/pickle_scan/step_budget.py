"""Limit the work that a scanned file can cause, by budgets of steps.

Steps are counted instead of seconds, so that the result is the same on every machine and tests can check the number. A
scan over a budget ends there, and the file is reported as not read to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

from statecli.core.errors import MalformedError


class Budget(Enum):
    """Kind of step, with the limit for a file. Each limit stands for at most 10 to 30 seconds of work."""

    #: Opcodes of all pickles, 0.5 to 3 million a second. One `.metadata` of the largest models has 40 million, which
    #: count as a quarter of that.
    OPCODES = ("pickle instructions", 12_000_000)
    #: Calls, except calls that rebuild tensors: 50,000 a second. Calls in a `.metadata` are not counted.
    CALLS = ("calls", 1_000_000)
    #: Values that are searched for names, a million a second. A longer pickle may have more such values.
    FLOW = ("values to check", 1_000_000)
    #: Tokens of TorchScript code, and texts of programs of torch.export, 200,000 a second.
    TEXT = ("code tokens", 4_000_000)
    #: Bytes of all pickles and of all code.
    BYTES = ("bytes of pickles and code", 512 * 2**20)
    #: Records, strings and regions that begin like a pickle.
    PIECES = ("records and strings", 1_000_000)
    #: Pickles, including pickles inside strings. A rank's file of torch.distributed.checkpoint has six for each tensor.
    PICKLES = ("pickles", 100_000)

    #: Hash by address, because a budget is looked up for each step, and Enum's own hash is written in Python.
    __hash__ = object.__hash__

    def __init__(self, noun: str, limit: int) -> None:
        self.noun = noun
        self.limit = limit


#: Values that may be followed for each opcode, and for each byte, of the file's pickles. Checkpoints take 0.1 to 2.1
#: for each opcode and 0.1 to 1 for each byte. The smaller limit counts, because long strings add bytes at no cost, and
#: one-byte opcodes add opcodes.
FLOW_PER_OPCODE, FLOW_PER_BYTE = 4, 1.25


class OutOfSteps(MalformedError):
    """Error for a file whose scan takes more steps than a budget allows."""


class Steps:
    """Steps taken by a scan."""

    def __init__(self) -> None:
        self.counts: Counter[Budget] = Counter()
        self._unfinished: Callable[[], int] = int
        #: Limit on `Budget.FLOW` at its last computation; more opcodes can only raise the limit.
        self._flow_limit = 0
        #: Error for the first budget that was exceeded.
        self.exceeded: OutOfSteps | None = None

    def take(self, budget: Budget, count: int = 1) -> None:
        """Count steps of one kind. Raises OutOfSteps if the budget is exceeded."""
        total = self.counts[budget] + count
        self.counts[budget] = total
        if total > budget.limit and (budget is not Budget.FLOW or total > self._flow_limit):
            limit = self.get_limit(budget)
            if total > limit:
                text = f"statecli stopped the scan at its limit of {limit:,} {budget.noun}"
                self.exceeded = self.exceeded or OutOfSteps(text)
                raise self.exceeded

    def set_unfinished(self, count: Callable[[], int]) -> None:
        """Set the function that counts the opcodes of the current pickle; `take` adds them at the pickle's end."""
        self._unfinished, self._flow_limit = count, 0

    def get_limit(self, budget: Budget) -> int:
        """Return how many steps of this kind the file may take. The limit for FLOW grows with the opcodes read."""
        if budget is not Budget.FLOW:
            return budget.limit
        opcodes = self.counts[Budget.OPCODES] + self._unfinished()
        by_length = min(FLOW_PER_OPCODE * opcodes, FLOW_PER_BYTE * self.counts[Budget.BYTES])
        self._flow_limit = budget.limit + int(by_length)
        return self._flow_limit
