"""The command line: parse, call, write, exit. No logic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from typing import Annotated

import typer

from statecli import __version__, console
from statecli.errors import StateError
from statecli.render import Output
from statecli.state import Kind

app = typer.Typer(
    name="statecli",
    help="See, prove and audit the state of PyTorch models and checkpoints.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Color(str, Enum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"statecli {__version__}")
        raise typer.Exit


@app.callback()
def statecli(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """See, prove and audit the state of PyTorch models and checkpoints."""


Globs = Annotated[
    list[str] | None, typer.Option("--include", "-i", metavar="GLOB", help="Only names that match (repeatable).")
]
NotGlobs = Annotated[
    list[str] | None, typer.Option("--exclude", "-x", metavar="GLOB", help="No names that match (repeatable).")
]
Kinds = Annotated[list[Kind] | None, typer.Option("--kind", help="Only tensors of this kind (repeatable).")]
Form = Annotated[Output, typer.Option("--output-format", "-f", help="What is written.")]
To = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE, not to stdout.")]
Colors = Annotated[Color, typer.Option("--color", help="auto: on a terminal, unless NO_COLOR is set.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what makes it exit 1.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also evidence, other names, source lines.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="A traceback with every error.")]


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="A checkpoint, its folder, or file.py:Class / pkg.mod:Class(arg=1).")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="DEVICE", help="Move everything there; exit 1 if anything stays.")
    ] = None,
    cuda: Annotated[bool, typer.Option("--cuda", help="The same as --to cuda.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="SPEC", help="Group a checkpoint by what this class registers.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the values: min, max, mean, std, zeros, NaN, Inf.")
    ] = False,
    all: Annotated[bool, typer.Option("--all", help="Every layer on its own line.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Sums by module.")] = False,
    init_device: Annotated[
        str, typer.Option("--init-device", metavar="DEVICE", help="Build a class there; meta for one too big to hold.")
    ] = "cpu",
    include: Globs = None,
    exclude: NotGlobs = None,
    kind: Kinds = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
    debug: Debug = False,
) -> None:
    """Group every tensor of TARGET into parameters, buffers and unregistered tensors, and show where each lives."""

    def run() -> int:
        from statecli import inspection
        from statecli.report import View, inspecting

        request = inspection.Request(
            target=target,
            to=inspection.device(to, cuda),
            model=model,
            stats=stats,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            kind=tuple(kind or ()),
            init_device=init_device,
        )
        with console.progress(enabled=not no_progress and (stats or request.to is not None)) as progress:
            found = inspection.inspect(request, progress)
        report = inspecting.of_inspection(found, View(unfold=all, tree=tree, verbose=verbose))
        return console.publish(report, output_format, output, color.value, quiet)

    _exit(run, debug)


@app.command()
def schema(
    command: Annotated[str, typer.Argument(help="The command whose JSON is described: inspect.")], debug: Debug = False
) -> None:
    """Print the JSON Schema of a command's JSON output."""

    def run() -> int:
        from statecli.report import documents

        console.out(None).utf8(documents.schema(command))
        return 0

    _exit(run, debug)


def _exit(run: Callable[[], int], debug: bool) -> None:
    """Run a command's body and leave with the promised code: a crash is never 1."""
    try:
        code = run()
        sys.stdout.flush()
    except StateError as error:
        code = console.complain(str(error), debug)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit; there is nobody left to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:  # noqa: BLE001  # a bug of ours is told in one line and ends 2
        code = console.complain(
            f"internal error: {type(error).__name__}: {error} (please report it, with --debug)", debug
        )
    raise SystemExit(code)


def main() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
