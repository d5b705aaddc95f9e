"""The same commands from Python: arguments in, results out."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.api import (
        calls as calls,
        errors as errors,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
