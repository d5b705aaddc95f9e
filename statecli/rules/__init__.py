"""The rules of `audit`, a module for each topic; `dictionary` joins them with the rules of the other commands.

Importing this package imports no rule.
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.rules import audit_subject as audit_subject, pickles as pickles
else:
    __getattr__ = import_on_use(__name__)
