"""Find every pickle and every piece of code in a file and scan it."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.file_scan import scan as scan
else:
    __getattr__ = import_on_use(__name__)
