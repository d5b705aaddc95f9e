"""Every option of every command, once: its name, type, default, help and group.

A class has the options of a command, a field for each. The annotation of a field has the flags, the type and the help
of the option, and the default of a field is the default of the option. The parsers of the command line, the arguments
of the Python API and the tables of the documents are derived from these classes (`parameters`).
"""

import enum
from typing import Annotated, Any

import msgspec

from statecli.commands.diff.result import Field
from statecli.commands.verify.result import Name
from statecli.core.finding import Severity
from statecli.core.state import Kind
from statecli.render import Output
from statecli.values.algorithm import Algorithm

#: How a GPU is named, as a regular expression.
CUDA = r"cuda(?::(?:0|[1-9]\d{0,3}))?"


class Color(str, enum.Enum):
    """When to use colours. `auto`: on a terminal, unless NO_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Group(str, enum.Enum):
    """Headings of options in the help, in their order there."""

    TASK = "What to do"
    VALUES = "Reading values"
    TENSORS = "Which tensors"
    ROWS = "What is shown"
    OUTPUT = "Where it is written"
    PROCESS = "How it runs"


class Option(msgspec.Struct, frozen=True):
    """Flags and help of an option.

    Attributes:
        flags: Spellings, the full spelling first.
        help: A phrase.
        metavar: Placeholder of the value in the help; None for a flag, a number or a choice.
        group: Heading in the help.
        type: Type of a value on the command line, if the field has a wider type for Python.
        argument: Name of the argument in Python, if not the name of the field.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str | None = None
    group: Group = Group.TASK
    type: Any = None
    argument: str | None = None


class Target(msgspec.Struct, frozen=True):
    """Placeholder and help of a target, a word of the command line without a flag."""

    metavar: str
    help: str | None = None


# Options of several commands.

Include = Annotated[
    tuple[str, ...],
    Option(("--include", "-i"), "Only names that match (repeatable).", "GLOB", Group.TENSORS),
]
Exclude = Annotated[
    tuple[str, ...], Option(("--exclude", "-x"), "No names that match (repeatable).", "GLOB", Group.TENSORS)
]
Kinds = Annotated[tuple[Kind, ...], Option(("--kind",), "Only tensors of this kind (repeatable).", group=Group.TENSORS)]
InitDevice = Annotated[
    str, Option(("--init-device",), "Build a class there; meta for one too big to hold.", "DEVICE", Group.PROCESS)
]
All = Annotated[bool, Option(("--all",), "Every layer on its own line.", group=Group.ROWS)]
Tree = Annotated[bool, Option(("--tree",), "Sums by module.", group=Group.ROWS)]
NameOnly = Annotated[bool, Option(("--name-only",), "Just the names, one a line.", group=Group.ROWS)]
NameStatus = Annotated[bool, Option(("--name-status",), "Just A, D, M or R and the names.", group=Group.ROWS)]
Lines = Annotated[int | None, Option(("--lines", "-n"), "At most N lines of each group.", "N", Group.ROWS)]
Quiet = Annotated[
    bool,
    Option(
        ("--quiet", "-q"),
        "Print only what makes it exit 1; what programs read (json, csv, sarif...) stays whole.",
        group=Group.ROWS,
    ),
]
Verbose = Annotated[bool, Option(("--verbose", "-v"), "Also evidence, other names, source lines.", group=Group.ROWS)]
OutputFormat = Annotated[
    Output | None,
    Option(
        ("--output-format", "-f"),
        "Write the result in this format. By default a table on a terminal, plain rows in a pipe.",
        group=Group.OUTPUT,
    ),
]
OutputFile = Annotated[str | None, Option(("--output", "-o"), "Write to FILE, not to stdout.", "FILE", Group.OUTPUT)]
Reports = Annotated[
    tuple[str, ...],
    Option(("--report",), "Also write this: sarif=out.sarif (repeatable).", "FORMAT=FILE", Group.OUTPUT),
]
Colors = Annotated[Color, Option(("--color",), "auto: on a terminal, unless NO_COLOR is set.", group=Group.OUTPUT)]
NoProgress = Annotated[bool, Option(("--no-progress",), "No progress bar on stderr.", group=Group.PROCESS)]
Timeout = Annotated[
    float | None,
    Option(("--timeout",), "Exit with status 2 if the command takes longer than SECONDS.", "SECONDS", Group.PROCESS),
]
Debug = Annotated[bool, Option(("--debug",), "A traceback with every error.", group=Group.PROCESS)]
Jobs = Annotated[int, Option(("--jobs", "-j"), "Processes; 0: one a core.", "N", Group.VALUES)]
Executor = Annotated[
    Any,
    Option(
        ("--executor",),
        "Who reads values: threads, processes:4, dask:tcp://HOST:PORT, mpi, ray.",
        "ENGINE",
        Group.VALUES,
        type=str,
    ),
]
Shard = Annotated[
    str | None,
    Option(("--shard",), "Do this share of the work on the values; see statecli merge.", "I/N", Group.VALUES),
]
Config = Annotated[
    str | None,
    Option(("--config",), "Use this configuration, not the nearest statecli.toml or pyproject.toml.", "FILE"),
]
NoConfig = Annotated[bool, Option(("--no-config",), "Use no configuration file.")]
Targets = Annotated[tuple[str, ...], Target("TARGET", "Checkpoints, folders or globs of them, classes.")]


FailOn = Annotated[
    Severity,
    Option(("--fail-on",), "Exit with status 1 if a finding has this severity or a higher one.", group=Group.TASK),
]
IgnoredRules = Annotated[
    tuple[str, ...],
    Option(("--ignore",), "Do not report findings of this rule or rule group (repeatable).", "RULE", Group.TASK),
]


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of output, of every command with a report. `timeout` in seconds."""

    all: All = False
    output_format: OutputFormat = None
    output: OutputFile = None
    report: Reports = ()
    color: Colors = Color.AUTO
    quiet: Quiet = False
    verbose: Verbose = False
    no_progress: NoProgress = False
    debug: Debug = False
    timeout: Timeout = None


class SharedOptions(OutputOptions, frozen=True, kw_only=True):
    """Options of commands that read targets and show tensors."""

    init_device: InitDevice = "cpu"
    include: Include = ()
    exclude: Exclude = ()
    kind: Kinds = ()


class InspectOptions(SharedOptions, frozen=True, kw_only=True):
    """Group every tensor of TARGET into parameters, buffers and unregistered tensors, and show where each lives."""

    target: Annotated[str, Target("TARGET", "A checkpoint, its folder, or file.py:Class / pkg.mod:Class(arg=1).")]
    to: Annotated[
        str | None, Option(("--to",), "Move the tensors to DEVICE, and report what does not follow.", "DEVICE")
    ] = None
    cuda: Annotated[bool, Option(("--cuda",), "The same as --to cuda.")] = False
    model: Annotated[
        str | None,
        Option(("--model",), "Group a checkpoint by what this class registers; auto: its config.json's.", "SPEC"),
    ] = None
    stats: Annotated[bool, Option(("--stats",), "Read the values: min, max, mean, std, zeros, NaN, Inf.")] = False
    input: Annotated[
        tuple[str, ...],
        Option(("--input",), "Call forward first, with 2x3, int64:2x16<30522 (repeatable).", "SPEC", argument="inputs"),
    ] = ()
    inputs: Annotated[
        str | None, Option(("--inputs",), "Call forward first, with what this gives.", "FILE.PY:MAKE")
    ] = None
    fail_on: FailOn = Severity.ERROR
    ignore: IgnoredRules = ()
    executor: Executor = None
    shard: Shard = None
    tree: Tree = False


class DiffOptions(SharedOptions, frozen=True, kw_only=True):
    """Show what differs between BEFORE and AFTER: names, dtypes, shapes, kinds and every value. Exit 1 if anything."""

    before: Annotated[str, Target("BEFORE", "A checkpoint, its folder, or file.py:Class.")]
    after: Annotated[str, Target("AFTER", "What it became; of any format.")]
    map: Annotated[
        tuple[str, ...], Option(("--map",), "Rewrite names of BEFORE first (repeatable).", "REGEX=REPLACEMENT")
    ] = ()
    ignore: Annotated[tuple[Field, ...], Option(("--ignore",), "Differences in it are none.")] = ()
    bitwise: Annotated[bool, Option(("--bitwise",), "-0.0 is not 0.0, one NaN not another.")] = False
    atol: Annotated[float, Option(("--atol",), "Equal within |after - before| <= ATOL.")] = 0.0
    rtol: Annotated[float, Option(("--rtol",), "... + RTOL * |before|.")] = 0.0
    metadata_only: Annotated[bool, Option(("--metadata-only",), "Read no values.")] = False
    no_renames: Annotated[bool, Option(("--no-renames",), "Look for no tensor under another name.")] = False
    only: Annotated[tuple[str, ...], Option(("--only",), "Fail if anything else changed (repeatable).", "GLOB")] = ()
    frozen: Annotated[tuple[str, ...], Option(("--frozen",), "Fail if any of these changed (repeatable).", "GLOB")] = ()
    changed: Annotated[
        tuple[str, ...], Option(("--changed",), "Fail if none of these changed (repeatable).", "GLOB")
    ] = ()
    tree: Tree = False
    name_only: NameOnly = False
    name_status: NameStatus = False
    lines: Lines = None
    verbose: Annotated[bool, Option(("--verbose", "-v"), "Also where first, mean, L2, cosine.", group=Group.ROWS)] = (
        False
    )
    device: Annotated[str, Option(("--device",), "Compute on cpu, cuda or cuda:N.", "DEVICE", Group.VALUES)] = "cpu"
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None


class VerifyOptions(SharedOptions, frozen=True, kw_only=True):
    """Prove on MODEL itself what follows a move, is saved, restored and trained. Exit 1 if anything does not."""

    target: Annotated[str, Target("MODEL", "file.py:Class / pkg.mod:Class(arg=1).")]
    check: Annotated[tuple[Name, ...], Option(("--check",), "Only this proof (repeatable).", argument="checks")] = ()
    device: Annotated[
        str | None, Option(("--device",), "Move to cuda, cuda:N, cpu, meta, or fake-cuda: no GPU needed.", "DEVICE")
    ] = None
    dtype: Annotated[str | None, Option(("--dtype",), "Cast to this one: float64, bfloat16.", "DTYPE")] = None
    optimizer: Annotated[Any, Option(("--optimizer",), "Step with this one: sgd, adamw.", "NAME", type=str)] = None
    input: Annotated[
        tuple[str, ...],
        Option(("--input",), "2x3x224x224, int64:2x16<30522, name=2x3 (repeatable).", "SPEC", argument="inputs"),
    ] = ()
    inputs: Annotated[str | None, Option(("--inputs",), "Call this for what forward takes.", "FILE.PY:MAKE")] = None
    fail_on: FailOn = Severity.ERROR
    ignore: IgnoredRules = ()
    verbose: Annotated[
        bool, Option(("--verbose", "-v"), "Also what was measured, and every note.", group=Group.ROWS)
    ] = False


class AuditOptions(SharedOptions, frozen=True, kw_only=True):
    """Run rules over checkpoints and model classes. Exit 1 for findings, 2 for what could not be audited."""

    targets: Targets
    model: Annotated[
        str | None,
        Option(("--model",), "Hold them to what this class registers; auto: their config.json's.", "SPEC"),
    ] = None
    select: Annotated[tuple[str, ...], Option(("--select",), "Only it, or all of a subject (repeatable).", "RULE")] = ()
    ignore: Annotated[tuple[str, ...], Option(("--ignore",), "Not it, or a whole subject (repeatable).", "RULE")] = ()
    fail_on: Annotated[
        Severity | None, Option(("--fail-on",), "End 1 for what is as bad as this: warning, unless configured.")
    ] = None
    values: Annotated[
        bool,
        Option(
            ("--values",),
            "Read values whatever their size. [default: up to 256 MB and 5,000 tensors of files on disk]",
            group=Group.VALUES,
        ),
    ] = False
    no_values: Annotated[bool, Option(("--no-values",), "Do not read the values of tensors.", group=Group.VALUES)] = (
        False
    )
    lock: Annotated[str | None, Option(("--lock",), "Hold them to this lock file.", "FILE")] = None
    frozen_only: Annotated[bool, Option(("--frozen-only",), "Only to the frozen part of the lock.")] = False
    weights_only: Annotated[
        bool, Option(("--weights-only",), "Compare only tensors with the lock, not settings and files.")
    ] = False
    against: Annotated[str | None, Option(("--against",), "Hold them to another checkpoint.", "CHECKPOINT")] = None
    baseline: Annotated[str | None, Option(("--baseline",), "Accept the findings that it lists.", "FILE")] = None
    write_baseline: Annotated[
        str | None, Option(("--write-baseline",), "Accept what is found today, for --reason.", "FILE")
    ] = None
    reason: Annotated[str | None, Option(("--reason",), "Why --write-baseline does.", "TEXT")] = None
    config: Config = None
    no_config: NoConfig = False
    allow_empty: Annotated[bool, Option(("--allow-empty",), "Nothing to audit is no error.")] = False
    as_found: Annotated[
        bool, Option(("--as-found",), "Take each file as a walk over its folder does: a shard is its model.")
    ] = False
    verbose: Annotated[
        bool, Option(("--verbose", "-v"), "Also what readers noted, and skipped rules.", group=Group.ROWS)
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None


class LockOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Write the lock file that audit --lock holds checkpoints to: each tensor's name, dtype, shape and digest."""

    targets: Targets
    digest: Annotated[Algorithm, Option(("--digest",), "What the values' digests are.")] = Algorithm.BLAKE3
    weights_only: Annotated[
        bool, Option(("--weights-only",), "Lock only tensors, not settings and files of the folder.")
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None
    include: Include = ()
    exclude: Exclude = ()
    kind: Kinds = ()
    output: OutputFile = None
    color: Colors = Color.AUTO
    quiet: Annotated[bool, Option(("--quiet", "-q"), "No notes on stderr.", group=Group.ROWS)] = False
    init_device: InitDevice = "cpu"
    no_progress: NoProgress = False
    timeout: Timeout = None
    debug: Debug = False


class MergeOptions(OutputOptions, frozen=True, kw_only=True):
    """Join the PARTs of a command that was run with --shard: what it gives, and ends with, without."""

    parts: Annotated[tuple[str, ...], Target("PART", "All that --shard 1/N to N/N wrote.")]
    code: Annotated[
        tuple[str, ...], Option(("--code",), "A class that the parts name, and that may be run (repeatable).", "SPEC")
    ] = ()
    url: Annotated[
        tuple[str, ...],
        Option(("--url",), "A URL of the parts with its secrets, as it was typed (repeatable).", "URL"),
    ] = ()
    copies: Annotated[
        bool, Option(("--copies",), "Each job had a copy of its own: the same by size and samples alone.")
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    tree: Tree = False
    name_only: NameOnly = False
    name_status: NameStatus = False
    lines: Lines = None


class RulesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """List the rules of all commands, or explain RULE: what it flags, why, an example, what to do."""

    name: Annotated[str | None, Target("RULE", "Explain this one.")] = None
    output_format: OutputFormat = None
    output: OutputFile = None
    color: Colors = Color.AUTO
    debug: Debug = False


class ConfigOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print the configuration that is in force for audit here, and where each key of it comes from."""

    config: Config = None
    no_config: NoConfig = False
    output_format: OutputFormat = None
    output: OutputFile = None
    color: Colors = Color.AUTO
    debug: Debug = False


class SchemaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print the JSON Schema of a command's JSON output."""

    command: Annotated[
        str, Target("COMMAND", "Whose JSON is described: inspect, diff, verify, audit, rules, config, lock.")
    ]
    debug: Debug = False


class GitSetupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Write the diff driver into this repository: .gitattributes and .git/config."""

    everywhere: Annotated[bool, Option(("--global",), "For all of your repositories.")] = False
    debug: Debug = False


class GitTextconvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What git compares: a line a tensor. Always ends 0."""

    path: Annotated[str, Target("FILE")]
    made_by: Annotated[str, Option(("--made-by",), "For git, which keeps lines by this command line.")] = ""


class GitDifftoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What git difftool -t statecli shows. Always ends 0."""

    before: Annotated[str, Target("LOCAL")]
    after: Annotated[str, Target("REMOTE")]
    name: Annotated[str, Target("[NAME]", "What it is called in the repository.")] = ""


#: Options of any command.
Options = (
    InspectOptions
    | DiffOptions
    | VerifyOptions
    | AuditOptions
    | LockOptions
    | MergeOptions
    | RulesOptions
    | ConfigOptions
    | SchemaOptions
    | GitSetupOptions
    | GitTextconvOptions
    | GitDifftoolOptions
)

#: Every command by its name, in the order of the help.
COMMANDS: dict[str, type[Options]] = {
    "inspect": InspectOptions,
    "diff": DiffOptions,
    "verify": VerifyOptions,
    "audit": AuditOptions,
    "lock": LockOptions,
    "merge": MergeOptions,
    "git setup": GitSetupOptions,
    "git textconv": GitTextconvOptions,
    "git difftool": GitDifftoolOptions,
    "rules": RulesOptions,
    "config": ConfigOptions,
    "schema": SchemaOptions,
}
