"""Parse, with Typer, the command lines that `parser` leaves to it, and report mistakes on the command line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
import typer.core
import typer.main

from statecli.cli import command_runner, help_page, help_table
from statecli.cli.mistakes import describe_mistake
from statecli.cli.unknown_word import find_ambiguous_word
from statecli.core.early_flags import HELP_FLAGS, VERSION_FLAGS
from statecli.core.errors import UsageError
from statecli.core.exit_code import CommandExit
from statecli.core.terminal_width import get_requested_width, get_terminal_width
from statecli.core.version import __version__
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import Parameter, parameters_of


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"statecli {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option(*VERSION_FLAGS, callback=_print_version, is_eager=True)] = False,
) -> None:
    """Do nothing; Typer calls this before a command, after the callbacks of its options."""


def _format_help(context: Any) -> str:
    """Return a help page for lines that `find_help_request` does not recognise: `-qh`, or no command at all."""
    name = context.command_path.partition(" ")[2]
    page = help_page.read_page("" if name in help_page.OTHER_COMMAND_NAMES else name)
    return help_page.format_help(page, get_requested_width() or get_terminal_width(1)).rstrip()


class _Command(typer.core.TyperCommand):
    def get_help(self, ctx: object) -> str:
        return _format_help(ctx)


class _Group(typer.core.TyperGroup):
    def get_help(self, ctx: object) -> str:
        return _format_help(ctx)


def _refuse_command(context: typer.Context, command: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Report an unknown command after `help`. For a known command, `help_page` answers before Typer runs."""
    root = context.find_root()
    root.command.main([*(command or ()), "--help"], prog_name=root.info_name, standalone_mode=False)


@functools.cache
def build_command() -> Any:
    """Return the Typer group that contains every command of COMMANDS."""
    app = typer.Typer(
        name="statecli",
        cls=_Group,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": [*HELP_FLAGS]},
    )
    app.callback()(_root)
    app.command("version", hidden=True)(lambda: _print_version(True))
    app.command("help", hidden=True)(_refuse_command)
    groups: dict[str, typer.Typer] = {}
    for name, options in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(name=group, cls=_Group, rich_markup_mode=None, no_args_is_help=True)
            app.add_typer(groups[group])
        groups.get(group, app).command(last, cls=_Command)(_build_function(last, options))
    return typer.main.get_command(app)


def _build_function(name: str, options: Any) -> Callable[..., None]:
    """Return a function for Typer that has a parameter for each option."""

    def call(**options_by_name: Any) -> None:
        values = {key: tuple(value or ()) if key in repeatable else value for key, value in options_by_name.items()}
        command_runner.run_and_exit(options(**values))

    parameters = parameters_of(options)
    repeatable = {parameter.field for parameter in parameters if parameter.repeatable}
    call.__name__ = name
    arguments = [_build_argument(parameter) for parameter in parameters]
    call.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    call.__annotations__ = {argument.name: argument.annotation for argument in arguments}
    return call


def _build_argument(parameter: Parameter) -> inspect.Parameter:
    """Return a function parameter from which Typer makes an option or an argument."""
    is_required = parameter.default is msgspec.NODEFAULT
    default = inspect.Parameter.empty if is_required else parameter.default
    kind: Any = parameter.type
    if parameter.repeatable:
        kind = list[parameter.type]  # type: ignore[name-defined]
        default = default if is_required else None
    if not is_required and default is None:
        kind = kind | None
    info = typer.Argument if parameter.is_target else typer.Option
    annotation = Annotated[kind, info(*parameter.spellings, metavar=parameter.metavar or None)]
    return inspect.Parameter(parameter.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


#: Error of Typer's parser for a wrong command line: click's class or a copy of it, which Typer does not export.
_Mistake: type[Exception] = typer.BadParameter.__mro__[1]


def run() -> int:
    """Parse `sys.argv` and run the command. Return the exit code if Typer itself answers, for example with help.

    Raises UsageError for a mistake on the command line.
    """
    word = find_ambiguous_word(sys.argv[1:])
    if word is not None:
        raise UsageError(f"{word}: a file has the name of this option; write ./{word}, or -- before the targets")
    before = sys.stdout
    try:
        code = build_command().main(prog_name="statecli", standalone_mode=False)
    except CommandExit as done:
        return done.code
    except SystemExit as done:
        # Typer exits only before a command runs (help) and for a closed pipe. Model code may raise SystemExit later.
        if "statecli.live.build" in sys.modules:
            raise
        # For a closed pipe Typer replaces stdout by a wrapper and exits with 1, which must not look like a finding.
        if done.code == 1 and sys.stdout is not before:
            sys.stdout = before
            raise BrokenPipeError from done
        return done.code if isinstance(done.code, int) else 0
    except typer.Abort as why:
        raise KeyboardInterrupt from why
    except _Mistake as mistake:
        return _raise_usage_error(mistake)
    return code if isinstance(code, int) else 0


def _raise_usage_error(mistake: Any) -> int:
    if len(sys.argv) == 1 or " ".join(sys.argv[1:]) in help_table.GROUPS:
        typer.echo(mistake.format_message(), err=True)
        return 2
    raise UsageError(describe_mistake(mistake, sys.argv[1:]))
