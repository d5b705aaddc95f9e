"""The command line as Typer sees it: every option, its help, and what is said of a mistake."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from statecli import __version__, cli
from statecli.options import Color, InspectOptions
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
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A checkpoint, its folder, or file.py:Class / pkg.mod:Class(arg=1).")
    ],
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

    options = InspectOptions(
        target=target,
        to=to,
        cuda=cuda,
        model=model,
        stats=stats,
        all=all,
        tree=tree,
        init_device=init_device,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        kind=tuple(kind or ()),
        output_format=output_format,
        output=output,
        color=color,
        quiet=quiet,
        verbose=verbose,
        no_progress=no_progress,
        debug=debug,
    )
    cli.leave(lambda: cli.inspect(options), debug)


@app.command()
def schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="The command whose JSON is described: inspect.")],
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a command's JSON output."""
    cli.leave(lambda: cli.schema(command), debug)


def run() -> int:
    """Parse `sys.argv` and run what it asks for; the exit code of what Typer itself answered (help, a mistake)."""
    before = sys.stdout
    try:
        app()
    except SystemExit as done:
        # Typer ends a closed pipe with 1 and puts a wrapper in the place of stdout; it is no finding.
        if done.code == 1 and sys.stdout is not before:
            sys.stdout = before
            raise BrokenPipeError from done
        return done.code if isinstance(done.code, int) else 0
    return 0
