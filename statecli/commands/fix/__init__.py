"""`statecli fix`: edit the source of a model class, and keep an edit only if `verify` proves the edit."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.commands.fix import (
        session as session,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
