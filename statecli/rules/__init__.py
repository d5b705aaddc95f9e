"""The rules of `audit`, a module for each subject; `dictionary` joins them with the rules of the other commands.

Importing this package imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.rules import (
        audit_subject as audit_subject,
        dictionary as dictionary,
        pickles as pickles,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
