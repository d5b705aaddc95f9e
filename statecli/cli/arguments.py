"""The command line as Typer sees it: every option, its help, and what is said of a mistake."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from statecli.cli import commands, shortcut
from statecli.commands.diff.result import Field
from statecli.commands.verify.result import Name
from statecli.core.errors import UsageError
from statecli.core.exit_code import Verdict
from statecli.core.finding import Severity
from statecli.core.state import Kind
from statecli.core.version import __version__
from statecli.render import Output
from statecli.report.documents import DOCUMENTS
from statecli.requests.options import (
    AuditOptions,
    Color,
    DiffOptions,
    InspectOptions,
    LockOptions,
    MergeOptions,
    VerifyOptions,
)
from statecli.values.algorithm import Algorithm

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
All = Annotated[bool, typer.Option("--all", help="Every layer on its own line.")]
Tree = Annotated[bool, typer.Option("--tree", help="Sums by module.")]
InitDevice = Annotated[
    str, typer.Option("--init-device", metavar="DEVICE", help="Build a class there; meta for one too big to hold.")
]
Form = Annotated[Output, typer.Option("--output-format", "-f", help="What is written.")]
To = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE, not to stdout.")]
Reports = Annotated[
    list[str] | None,
    typer.Option("--report", metavar="FORMAT=FILE", help="Also write this: sarif=out.sarif (repeatable)."),
]
Colors = Annotated[Color, typer.Option("--color", help="auto: on a terminal, unless NO_COLOR is set.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Print only what makes it exit 1; what programs read (json, csv, sarif...) stays whole."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also evidence, other names, source lines.")]
VerboseVerify = Annotated[bool, typer.Option("--verbose", "-v", help="Also what was measured, and every note.")]
VerboseAudit = Annotated[bool, typer.Option("--verbose", "-v", help="Also what readers noted, and skipped rules.")]
VerboseDiff = Annotated[bool, typer.Option("--verbose", "-v", help="Also where first, mean, L2, cosine.")]
AuditModel = Annotated[
    str | None,
    typer.Option("--model", metavar="SPEC", help="Hold them to what this class registers; auto: their config.json's."),
]
Values = Annotated[
    bool,
    typer.Option(
        "--values", help="Read values whatever their size. [default: up to 256 MB and 5,000 tensors of files on disk]"
    ),
]
NoValues = Annotated[bool, typer.Option("--no-values", help="Do not read the values of tensors.")]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="Compare only tensors with the lock, not settings and files.")
]
Configuration = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="Use this configuration, not the nearest statecli.toml or pyproject.toml."
    ),
]
NoConfiguration = Annotated[bool, typer.Option("--no-config", help="Use no configuration file.")]
Executors = Annotated[
    str | None,
    typer.Option(
        "--executor", metavar="ENGINE", help="Who reads values: threads, processes:4, dask:tcp://HOST:PORT, mpi, ray."
    ),
]
Shares = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Do this share of the work on the values; see statecli merge."),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar on stderr.")]
Targets = Annotated[list[str], typer.Argument(metavar="TARGET", help="Checkpoints, folders or globs of them, classes.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", help="Exit with status 2 if the command takes longer than SECONDS."),
]
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
        str | None,
        typer.Option(
            "--model", metavar="SPEC", help="Group a checkpoint by what this class registers; auto: its config.json's."
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the values: min, max, mean, std, zeros, NaN, Inf.")
    ] = False,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SPEC", help="Call forward first, with 2x3, int64:2x16<30522 (repeatable)."),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="FILE.PY:MAKE", help="Call forward first, with what this gives.")
    ] = None,
    executor: Executors = None,
    shard: Shares = None,
    all: All = False,
    tree: Tree = False,
    init_device: InitDevice = "cpu",
    include: Globs = None,
    exclude: NotGlobs = None,
    kind: Kinds = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    report: Reports = None,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    """Group every tensor of TARGET into parameters, buffers and unregistered tensors, and show where each lives."""

    options = InspectOptions(**_given(locals()))
    commands.leave(lambda: commands.run(options), debug)


#: Typer gives a list of these, or None.
REPEATABLE = (
    *("include", "exclude", "kind", "map", "ignore", "only", "frozen", "changed", "check", "input"),
    *("targets", "select", "report", "parts", "code", "url"),
)


def _given(parameters: dict[str, Any]) -> dict[str, Any]:
    """A command's own parameters as its options have them."""
    return {name: tuple(value or ()) if name in REPEATABLE else value for name, value in parameters.items()}


def _globs(name: str, text: str) -> Any:
    return typer.Option(name, metavar="GLOB", help=f"{text} (repeatable).")


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A checkpoint, its folder, or file.py:Class.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="What it became; of any format.")],
    map: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="REGEX=REPLACEMENT", help="Rewrite names of BEFORE first (repeatable)."),
    ] = None,
    ignore: Annotated[list[Field] | None, typer.Option("--ignore", help="Differences in it are none.")] = None,
    bitwise: Annotated[bool, typer.Option("--bitwise", help="-0.0 is not 0.0, one NaN not another.")] = False,
    atol: Annotated[float, typer.Option("--atol", help="Equal within |after - before| <= ATOL.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", help="... + RTOL * |before|.")] = 0.0,
    metadata_only: Annotated[bool, typer.Option("--metadata-only", help="Read no values.")] = False,
    no_renames: Annotated[bool, typer.Option("--no-renames", help="Look for no tensor under another name.")] = False,
    only: Annotated[list[str] | None, _globs("--only", "Fail if anything else changed")] = None,
    frozen: Annotated[list[str] | None, _globs("--frozen", "Fail if any of these changed")] = None,
    changed: Annotated[list[str] | None, _globs("--changed", "Fail if none of these changed")] = None,
    all: All = False,
    tree: Tree = False,
    name_only: Annotated[bool, typer.Option("--name-only", help="Just the names, one a line.")] = False,
    name_status: Annotated[bool, typer.Option("--name-status", help="Just A, D, M or R and the names.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", help="At most N lines of each group.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Compute on cpu, cuda or cuda:N.")] = "cpu",
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes; 0: one a core.")] = 0,
    executor: Executors = None,
    shard: Shares = None,
    init_device: InitDevice = "cpu",
    include: Globs = None,
    exclude: NotGlobs = None,
    kind: Kinds = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    report: Reports = None,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    verbose: VerboseDiff = False,
    no_progress: NoProgress = False,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    """Show what differs between BEFORE and AFTER: names, dtypes, shapes, kinds and every value. Exit 1 if anything."""

    options = DiffOptions(**_given(locals()))
    commands.leave(lambda: commands.run(options), debug)


@app.command()
def verify(
    target: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:Class / pkg.mod:Class(arg=1).")],
    check: Annotated[list[Name] | None, typer.Option("--check", help="Only this proof (repeatable).")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="DEVICE", help="Move to cuda, cuda:N, cpu, meta, or fake-cuda: no GPU needed."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Cast to this one: float64, bfloat16.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", metavar="NAME", help="Step with this one: sgd, adamw.")
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SPEC", help="2x3x224x224, int64:2x16<30522, name=2x3 (repeatable)."),
    ] = None,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="FILE.PY:MAKE", help="Call this for what forward takes.")
    ] = None,
    all: All = False,
    init_device: InitDevice = "cpu",
    include: Globs = None,
    exclude: NotGlobs = None,
    kind: Kinds = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    report: Reports = None,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    verbose: VerboseVerify = False,
    no_progress: NoProgress = False,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    """Prove on MODEL itself what follows a move, is saved, restored and trained. Exit 1 if anything does not."""

    options = VerifyOptions(**_given(locals()))
    commands.leave(lambda: commands.run(options), debug)


@app.command()
def audit(
    targets: Targets,
    model: AuditModel = None,
    select: Annotated[
        list[str] | None, typer.Option("--select", metavar="RULE", help="Only it, or all of a subject (repeatable).")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="RULE", help="Not it, or a whole subject (repeatable).")
    ] = None,
    fail_on: Annotated[
        Severity | None,
        typer.Option("--fail-on", help="End 1 for what is as bad as this: warning, unless configured."),
    ] = None,
    values: Values = False,
    no_values: NoValues = False,
    lock: Annotated[str | None, typer.Option("--lock", metavar="FILE", help="Hold them to this lock file.")] = None,
    frozen_only: Annotated[bool, typer.Option("--frozen-only", help="Only to the frozen part of the lock.")] = False,
    weights_only: WeightsOnly = False,
    against: Annotated[
        str | None, typer.Option("--against", metavar="CHECKPOINT", help="Hold them to another checkpoint.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="FILE", help="Accept the findings that it lists.")
    ] = None,
    write_baseline: Annotated[
        str | None, typer.Option("--write-baseline", metavar="FILE", help="Accept what is found today, for --reason.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why --write-baseline does.")] = None,
    config: Configuration = None,
    no_config: NoConfiguration = False,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Nothing to audit is no error.")] = False,
    as_found: Annotated[
        bool, typer.Option("--as-found", help="Take each file as a walk over its folder does: a shard is its model.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes; 0: one a core.")] = 0,
    executor: Executors = None,
    shard: Shares = None,
    all: All = False,
    init_device: InitDevice = "cpu",
    include: Globs = None,
    exclude: NotGlobs = None,
    kind: Kinds = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    report: Reports = None,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    verbose: VerboseAudit = False,
    no_progress: NoProgress = False,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    """Run rules over checkpoints and model classes. Exit 1 for findings, 2 for what could not be audited."""

    options = AuditOptions(**_given(locals()))
    commands.leave(lambda: commands.run(options), debug)


@app.command()
def lock(
    targets: Targets,
    digest: Annotated[Algorithm, typer.Option("--digest", help="What the values' digests are.")] = Algorithm.BLAKE3,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes; 0: one a core.")] = 0,
    executor: Executors = None,
    shard: Shares = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Lock only tensors, not settings and files of the folder.")
    ] = False,
    init_device: InitDevice = "cpu",
    include: Globs = None,
    exclude: NotGlobs = None,
    kind: Kinds = None,
    output: To = None,
    color: Colors = Color.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes on stderr.")] = False,
    no_progress: NoProgress = False,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    """Write the lock file that audit --lock holds checkpoints to: each tensor's name, dtype, shape and digest."""

    options = LockOptions(**_given(locals()))
    commands.leave(lambda: commands.run(options), debug)


@app.command()
def merge(
    parts: Annotated[list[str], typer.Argument(metavar="PART", help="All that --shard 1/N to N/N wrote.")],
    code: Annotated[
        list[str] | None,
        typer.Option("--code", metavar="SPEC", help="A class that the parts name, and that may be run (repeatable)."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="A URL of the parts with its secrets, as it was typed (repeatable)."),
    ] = None,
    copies: Annotated[
        bool,
        typer.Option("--copies", help="Each job had a copy of its own: the same by size and samples alone."),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes; 0: one a core.")] = 0,
    executor: Executors = None,
    all: All = False,
    tree: Tree = False,
    name_only: Annotated[bool, typer.Option("--name-only", help="Just the names, one a line.")] = False,
    name_status: Annotated[bool, typer.Option("--name-status", help="Just A, D, M or R and the names.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", help="At most N lines of each group.")
    ] = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    report: Reports = None,
    color: Colors = Color.AUTO,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
    timeout: Timeout = None,
    debug: Debug = False,
) -> None:
    """Join the PARTs of a command that was run with --shard: what it gives, and ends with, without."""

    options = MergeOptions(**_given(locals()))
    commands.leave(lambda: commands.run(options), debug)


git_app = typer.Typer(
    name="git",
    help="Checkpoints in git diff, git log -p and git difftool.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(git_app)


@git_app.command("setup")
def git_setup(
    everywhere: Annotated[bool, typer.Option("--global", help="For all of your repositories.")] = False,
    debug: Debug = False,
) -> None:
    """Write the diff driver into this repository: .gitattributes and .git/config."""
    commands.leave(lambda: commands.git_setup(everywhere), debug)


@git_app.command("textconv")
def git_textconv(
    path: Annotated[str, typer.Argument(metavar="FILE")],
    made_by: Annotated[str, typer.Option("--made-by", help="For git, which keeps lines by this command line.")] = "",  # noqa: ARG001
) -> None:
    """What git compares: a line a tensor. Always ends 0."""
    commands.leave(lambda: commands.git_textconv(path), debug=False)


@git_app.command("difftool")
def git_difftool(
    before: Annotated[str, typer.Argument(metavar="LOCAL")],
    after: Annotated[str, typer.Argument(metavar="REMOTE")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="What it is called in the repository.")] = "",
) -> None:
    """What git difftool -t statecli shows. Always ends 0."""
    commands.leave(lambda: commands.git_difftool(before, after, name), debug=False)


@app.command()
def rules(
    name: Annotated[str | None, typer.Argument(metavar="RULE", help="Explain this one.")] = None,
    output_format: Form = Output.TABLE,
    output: To = None,
    color: Colors = Color.AUTO,
    debug: Debug = False,
) -> None:
    """List the rules of audit, or explain RULE: what it flags, why, an example, what to do."""
    commands.leave(lambda: commands.rules(name, output_format, output, color.value), debug)


@app.command()
def config(
    path: Configuration = None,
    no_config: NoConfiguration = False,
    output_format: Form = Output.TABLE,
    output: To = None,
    color: Colors = Color.AUTO,
    debug: Debug = False,
) -> None:
    """Print the configuration that is in force for audit here, and where each key of it comes from."""
    commands.leave(lambda: commands.config(path, no_config, output_format, output, color.value), debug)


@app.command()
def schema(
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", help=f"Whose JSON is described: {', '.join(DOCUMENTS)}.")
    ],
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a command's JSON output."""
    commands.leave(lambda: commands.schema(command), debug)


#: The parser's own kind of mistake. Typer has no name for it: it is click's, or its copy of click's.
_Mistake: type[Exception] = typer.BadParameter.__mro__[1]


def run() -> int:
    """Parse `sys.argv` and run what it asks for; the exit code of what Typer itself answered (help).

    Raises `UsageError` for a mistake on the command line.
    """
    word = shortcut.ambiguous(sys.argv[1:])
    if word is not None:
        raise UsageError(f"{word}: reads as an option and is a file here; write ./{word}, or -- before the targets")
    before = sys.stdout
    try:
        code = app(prog_name="statecli", standalone_mode=False)
    except Verdict as done:
        return done.code
    except SystemExit as done:
        # Typer exits only before a command runs (help), and where a pipe is closed; model code may raise it later.
        if "statecli.live.build" in sys.modules:
            raise
        # Typer ends a closed pipe with 1 and puts a wrapper in the place of stdout; it is no finding.
        if done.code == 1 and sys.stdout is not before:
            sys.stdout = before
            raise BrokenPipeError from done
        return done.code if isinstance(done.code, int) else 0
    except typer.Abort as why:
        raise KeyboardInterrupt from why
    except _Mistake as mistake:
        return _told(mistake)
    return code if isinstance(code, int) else 0


def _told(mistake: Any) -> int:
    command = mistake.ctx.command_path if mistake.ctx else "statecli"
    if len(sys.argv) == 1 or sys.argv[1:] == [git_app.info.name]:
        typer.echo(mistake.format_message(), err=True)
        return 2
    message = mistake.format_message().rstrip(".").replace("Value error, ", "")
    raise UsageError(f"{message}; see {command} --help")
