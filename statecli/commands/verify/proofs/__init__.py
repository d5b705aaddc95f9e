"""A module for each proof."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.commands.verify.proofs import (
        step as step,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
