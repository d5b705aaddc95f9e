"""Find every pickle and every piece of code in a file and scan it."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.file_scan import (
        scan as scan,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
