"""Run tasks on tensor values: `pool` on this machine, `executors` also on other machines."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.workers import executors as executors
else:
    __getattr__ = import_on_use(__name__)
