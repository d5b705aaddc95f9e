"""JSON document of `log`."""

from __future__ import annotations

import msgspec

from statecli.commands.log.result import CheckpointRow, Log, ModuleRow
from statecli.core.finding import Finding
from statecli.core.model_state import Oddity
from statecli.core.version import __version__


class LogDocument(msgspec.Struct, frozen=True):
    """`statecli log -f json`.

    `checkpoints` are in the order of their steps; the lists `norms` and `relative_changes` of a module have an entry
    for each checkpoint. `last_moved` is an index of `checkpoints`. `changing_settings` changed in every checkpoint.
    """

    schema: str
    statecli: str
    target: str
    checkpoints: tuple[CheckpointRow, ...]
    modules: tuple[ModuleRow, ...]
    changing_settings: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...]


def build_log_document(log: Log) -> LogDocument:
    """Return the document of a log."""
    return LogDocument(
        "statecli.log/1",
        __version__,
        log.target,
        log.rows,
        log.modules,
        log.changing,
        log.findings,
        log.notes,
    )
