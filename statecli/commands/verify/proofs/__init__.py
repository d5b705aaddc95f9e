"""Proofs of `verify`, one module for each."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.verify.proofs import step as step
else:
    __getattr__ = import_on_use(__name__)
