"""The commands as Python functions: arguments instead of options, result objects instead of output."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.api import calls as calls, errors as errors
else:
    __getattr__ = import_on_use(__name__)
