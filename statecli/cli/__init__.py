"""Command line: parsing, commands, output files, the console."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.cli import (
        command_runner as command_runner,
        completion as completion,
        help_page as help_page,
        import_msgspec as import_msgspec,
        interrupts as interrupts,
        mistakes as mistakes,
        parser as parser,
        process_exit as process_exit,
        streams as streams,
        supervisor as supervisor,
        version_details as version_details,
    )
else:
    __getattr__ = import_on_use(__name__)
