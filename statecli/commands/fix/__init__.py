"""`statecli fix`: edit the source of a model class, and keep an edit only if the edited class passes `verify`."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.fix import session as session
else:
    __getattr__ = import_on_use(__name__)
