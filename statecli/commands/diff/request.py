"""The request for a diff."""

from __future__ import annotations

import msgspec

from statecli.commands.diff.result import Field
from statecli.core.selection import Selection
from statecli.values.delta import CompareOptions


class Request(msgspec.Struct, frozen=True):
    """A request for a diff. An option with several globs selects each name that any of the globs matches.

    Attributes:
        before, after: The targets.
        jobs: Number of workers; 0 for a worker per core.
        histograms: Number of most changed tensors that get a histogram of their differences.
        prefixes: Strip prefixes of wrappers even if no renames are detected.
        only, frozen, changed: Globs of `--may-change`, `--must-not-change` and `--must-change`.
    """

    before: str
    after: str
    how: CompareOptions = CompareOptions()
    values: bool = True
    renames: bool = True
    prefixes: bool = False
    map: tuple[str, ...] = ()
    ignore: tuple[Field, ...] = ()
    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    cast: bool = False
    adapter: str | None = None
    selection: Selection = Selection()
    init_device: str | None = None
    jobs: int = 0
    ranks: bool = False
    histograms: int = 0

    @property
    def has_expectations(self) -> bool:
        """True if expectations decide the exit status. Otherwise, any difference decides."""
        return bool(self.only or self.frozen or self.changed or self.cast or self.adapter is not None)
