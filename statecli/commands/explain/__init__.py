"""The command explain: report why a checkpoint does not load into a class, and print Python code that loads it."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.explain import run as run
else:
    __getattr__ = import_on_use(__name__)
