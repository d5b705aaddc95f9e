"""Command line: parsing, commands, output files, the console, the git driver."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.cli import (
        command_runner as command_runner,
        completion as completion,
        git_driver as git_driver,
        git_setup as git_setup,
        help_page as help_page,
        import_msgspec as import_msgspec,
        interrupts as interrupts,
        parser as parser,
        process_exit as process_exit,
        samples as samples,
        streams as streams,
        supervisor as supervisor,
        typer_app as typer_app,
        unknown_word as unknown_word,
        version_details as version_details,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
