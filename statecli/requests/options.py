"""Every option of every command, once: its name, type, default, help and group.

A class has the options of a command, a field for each. The annotation of a field has the flags, the type and the help
of the option, and the default of a field is the default of the option. The parsers of the command line, the arguments
of the Python API and the tables of the documents are derived from these classes (`parameters`).
"""

import enum
from typing import Annotated, Any

import msgspec

from statecli.commands.diff.fields import Field
from statecli.commands.verify.proof_names import Name
from statecli.core.finding import Severity
from statecli.core.model_state import Kind
from statecli.core.output import ChangeOrder, Output, TensorOrder
from statecli.core.selection import Selection
from statecli.values.digest_algorithm import Algorithm

#: How a GPU is named, as a regular expression.
CUDA = r"cuda(?::(?:0|[1-9]\d{0,3}))?"


class Color(str, enum.Enum):
    """When to use colours. `auto`: on a terminal, unless NO_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Shell(str, enum.Enum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


class Group(str, enum.Enum):
    """Headings of options in the help, in their order there."""

    TASK = "Main options"
    VALUES = "Reading values"
    TENSORS = "Which tensors"
    ROWS = "Contents of the output"
    OUTPUT = "Output"
    PROCESS = "How it runs"
    DISTRIBUTION = "Distribution"


class Option(msgspec.Struct, frozen=True):
    """Flags and help of an option.

    Attributes:
        flags: Spellings, the full spelling first.
        help: A phrase.
        metavar: Placeholder of the value in the help; None for a flag, a number or a choice of few words.
        group: Heading in the help.
        type: Type of a value on the command line, if the field has a wider type for Python.
        argument: Name of the argument in Python, if not the name of the field.
        suggestions: Values that completion offers, if others are possible too.
        aliases: Older spellings, which still work and are not listed.
        hidden: True for an option that is accepted and not listed.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str | None = None
    group: Group = Group.TASK
    type: Any = None
    argument: str | None = None
    suggestions: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    hidden: bool = False


class Target(msgspec.Struct, frozen=True):
    """Placeholder and help of a target, a word of the command line without a flag."""

    metavar: str
    help: str | None = None


# Options of several commands.

Include = Annotated[
    tuple[str, ...],
    Option(
        ("--include", "-i"),
        "Use only tensors whose name matches GLOB (repeatable).",
        "GLOB",
        Group.TENSORS,
    ),
]
Exclude = Annotated[
    tuple[str, ...],
    Option(("--exclude", "-x"), "Ignore tensors whose name matches GLOB (repeatable).", "GLOB", Group.TENSORS),
]
Kinds = Annotated[
    tuple[Kind, ...],
    Option(("--kind",), "Use only tensors of this kind (repeatable).", "KIND", Group.TENSORS),
]
Dtypes = Annotated[
    tuple[str, ...],
    Option(
        ("--dtype",), "Use only tensors of this dtype, such as bf16 or float8* (repeatable).", "GLOB", Group.TENSORS
    ),
]
Shapes = Annotated[
    tuple[str, ...],
    Option(
        ("--shape",),
        "Use only tensors of this shape, such as 768x3072 or *x768 (repeatable).",
        "SHAPE",
        Group.TENSORS,
    ),
]
InitDevice = Annotated[
    str | None,
    Option(
        ("--init-device",),
        "Build the model on DEVICE; use meta for models that do not fit in memory. "
        "[default: cpu; meta for a model that is built from a config.json]",
        "DEVICE",
        Group.PROCESS,
        suggestions=("cpu", "cuda", "meta"),
    ),
]
AsClass = Annotated[
    bool,
    Option(
        ("--class",),
        "Build the model class that the config.json of a folder or repository names, even if there are weights.",
        argument="as_class",
        group=Group.PROCESS,
    ),
]
ConfigJson = Annotated[
    str | None,
    Option(
        ("--config-json",),
        "Give the constructor a config object (a dataclass or a config class) with the fields in FILE.",
        "FILE",
        Group.PROCESS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    Option(
        ("--trust-remote-code",),
        "Run the Python files that the auto_map of a config.json names. Without this option, code that comes with a "
        "checkpoint never runs.",
        group=Group.PROCESS,
    ),
]
All = Annotated[
    bool,
    Option(
        ("--all",), "List each tensor and finding on its own line instead of grouping similar ones.", group=Group.ROWS
    ),
]
Tree = Annotated[
    bool,
    Option(("--tree",), "Show a tree of modules with the number of tensors and the size of each.", group=Group.ROWS),
]
Unchanged = Annotated[bool, Option(("--unchanged",), "Also list the tensors that did not change.", group=Group.ROWS)]
NameOnly = Annotated[bool, Option(("--name-only",), "Print only the names of changed tensors.", group=Group.ROWS)]
NameStatus = Annotated[
    bool,
    Option(
        ("--name-status",),
        "Print only the letter (A added, D deleted, M modified, R renamed) and name of each changed tensor.",
        group=Group.ROWS,
    ),
]
Lines = Annotated[
    int | None,
    Option(
        ("--lines", "-n"), "Show at most N lines of each section and kind of tensor, largest first.", "N", Group.ROWS
    ),
]
Top = Annotated[
    int | None,
    Option(
        ("--top",), "Show only the N largest tensors (in diff: the N largest changes), in one list.", "N", Group.ROWS
    ),
]
Quiet = Annotated[
    bool,
    Option(
        ("--quiet", "-q"),
        "Print only what makes the command fail, and what was not checked. Does not shorten json, jsonl, csv, sarif, "
        "junit and gitlab.",
        group=Group.ROWS,
    ),
]
Verbose = Annotated[
    bool,
    Option(
        ("--verbose", "-v"),
        "Also show why each tensor counts as parameter or buffer, its other names and its source line.",
        group=Group.ROWS,
    ),
]


class ListOutput(str, enum.Enum):
    """Formats of a list without findings."""

    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MARKDOWN = "markdown"
    HTML = "html"


#: Formats that the suffix of an output file names.
_FORMAT_OF_SUFFIX = {
    **{form.value: form.value for form in (Output.HTML, Output.JSON, Output.JSONL, Output.CSV, Output.SARIF)},
    "md": Output.MARKDOWN.value,
}


def _set_format_of_suffix(options: "OutputOptions | RulesOptions | ConfigOptions", forms: type[enum.Enum]) -> None:
    """Take the format from the suffix of the output file, unless `-f` names it."""
    _, dot, suffix = (options.output or "").rpartition(".")
    form = _FORMAT_OF_SUFFIX.get(suffix.lower()) if dot else None
    is_part = getattr(options, "shard", None) is not None  # a part has a format of its own
    if options.output_format is None and form in {known.value for known in forms} and not is_part:
        msgspec.structs.force_setattr(options, "output_format", forms(form))


_OUTPUT_FORMAT = Option(
    ("--output-format", "-f"),
    "Write the result in this format. Default: the suffix of -o FILE names it (html, json, jsonl, csv, md, sarif); "
    "else a table on a terminal, and plain rows in a pipe.",
    "FORMAT",
    Group.OUTPUT,
)
OutputFormat = Annotated[Output | None, _OUTPUT_FORMAT]
ListFormat = Annotated[ListOutput | None, _OUTPUT_FORMAT]
OutputFile = Annotated[
    str | None, Option(("--output", "-o"), "Write to FILE instead of standard output.", "FILE", Group.OUTPUT)
]
Reports = Annotated[
    tuple[str, ...],
    Option(
        ("--report",),
        "Also write the result to FILE in FORMAT, such as sarif=out.sarif (repeatable).",
        "FORMAT=FILE",
        Group.OUTPUT,
    ),
]
Colors = Annotated[
    Color,
    Option(
        ("--color",), "Use colours: auto (on a terminal, unless NO_COLOR is set), always or never.", group=Group.OUTPUT
    ),
]
NoProgress = Annotated[
    bool, Option(("--no-progress",), "Do not show a progress bar on standard error.", group=Group.PROCESS)
]
Timeout = Annotated[
    float | None,
    Option(("--timeout",), "Exit with status 2 if the command takes longer than SECONDS.", "SECONDS", Group.PROCESS),
]
Debug = Annotated[bool, Option(("--debug",), "Show the Python traceback of an error.", group=Group.PROCESS)]
Jobs = Annotated[
    int,
    Option(
        ("--jobs", "-j"),
        "Number of processes (threads for URLs) that read tensor values; 0 means one per core.",
        "N",
        Group.VALUES,
    ),
]
Executor = Annotated[
    Any,
    Option(
        ("--executor",),
        "Read tensor values with ENGINE: threads, processes:4, dask:tcp://HOST:PORT, mpi or ray.",
        "ENGINE",
        Group.DISTRIBUTION,
        type=str,
        suggestions=("threads", "processes", "dask:", "mpi", "ray"),
    ),
]
Shard = Annotated[
    str | None,
    Option(
        ("--shard",),
        "Read only part I of N of the tensor values, and write a part file for statecli merge.",
        "I/N",
        Group.DISTRIBUTION,
    ),
]
Config = Annotated[
    str | None,
    Option(
        ("--config",), "Use this configuration file instead of the nearest statecli.toml or pyproject.toml.", "FILE"
    ),
]
NoConfig = Annotated[bool, Option(("--no-config",), "Ignore all configuration files.")]
Plugins = Annotated[
    tuple[str, ...],
    Option(
        ("--plugin",), "Add the rules of MODULE, a module or a Python file (repeatable).", "MODULE", argument="plugins"
    ),
]
Targets = Annotated[tuple[str, ...], Target("TARGET", "Checkpoints, folders, globs or model classes.")]


FailOn = Annotated[
    Severity,
    Option(("--fail-on",), "Exit with status 1 if a finding has this severity or a higher one.", group=Group.TASK),
]
IgnoredRules = Annotated[
    tuple[str, ...],
    Option(("--ignore",), "Do not report findings of this rule or rule group (repeatable).", "RULE", Group.TASK),
]
BaselineFile = Annotated[str | None, Option(("--baseline",), "Accept the findings listed in FILE.", "FILE", Group.TASK)]
WriteBaseline = Annotated[
    str | None,
    Option(
        ("--write-baseline",),
        "Write all findings of this run to FILE as accepted; requires --reason.",
        "FILE",
        Group.TASK,
    ),
]
ForwardInputs = Annotated[
    tuple[str, ...],
    Option(
        ("--input",),
        "Call forward with a tensor of this shape: 2x3x224x224, 'int64:2x16<30522' (integers below 30522), or "
        "name=2x3 for the argument name (repeatable: one per argument).",
        "SHAPE",
        argument="inputs",
    ),
]
ForwardInputsFrom = Annotated[
    str | None,
    Option(
        ("--input-from",),
        "Call forward with the arguments that the function MAKE of FILE.PY returns.",
        "FILE.PY:MAKE",
        argument="inputs",
        aliases=("--inputs",),
    ),
]
Reason = Annotated[str | None, Option(("--reason",), "Reason to record with --write-baseline.", "TEXT", Group.TASK)]


InspectedTarget = Annotated[
    str,
    Target(
        "TARGET",
        "A checkpoint, a folder with one, - for standard input, or a model: file.py:Class, "
        "package.module:Class(arg=1), file.py:make, a function that builds the model, timm:resnet50, or a folder "
        "or config.json that names the class.",
    ),
]
KindsFromModel = Annotated[
    str | None,
    Option(
        ("--model",),
        "Use this model class to tell parameters from buffers. auto: the class named in config.json.",
        "SPEC",
        suggestions=("auto",),
    ),
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

    def __post_init__(self) -> None:
        """Set the format."""
        _set_format_of_suffix(self, Output)


class SharedOptions(OutputOptions, frozen=True, kw_only=True):
    """Options of commands that read targets and show tensors."""

    init_device: InitDevice = None
    config_json: ConfigJson = None
    trust_remote_code: TrustRemoteCode = False
    include: Include = ()
    exclude: Exclude = ()
    kind: Kinds = ()

    @property
    def selection(self) -> Selection:
        """The tensors to read."""
        return Selection(self.include, self.exclude, self.kind)


class ListOptions(SharedOptions, frozen=True, kw_only=True):
    """Options of commands that show a row for each tensor."""

    dtype: Dtypes = ()
    shape: Shapes = ()
    top: Top = None
    lines: Lines = None
    tree: Tree = False

    @property
    def selection(self) -> Selection:
        """The tensors to show."""
        return Selection(self.include, self.exclude, self.kind, self.dtype, self.shape)


class InspectOptions(ListOptions, frozen=True, kw_only=True):
    """List tensors of a checkpoint or model, with kinds and devices."""

    target: InspectedTarget
    to: Annotated[
        str | None,
        Option(
            ("--to",),
            "Move the tensors to DEVICE and report those that do not follow.",
            "DEVICE",
            suggestions=("cuda", "cpu", "meta"),
        ),
    ] = None
    cuda: Annotated[bool, Option(("--cuda",), "Same as --to cuda.")] = False
    as_class: AsClass = False
    model: KindsFromModel = None
    stats: Annotated[
        bool,
        Option(("--stats",), "Read the values and show min, max, mean, std, and the numbers of zeros, NaN and Inf."),
    ] = False
    distributions: Annotated[
        bool,
        Option(
            ("--distributions",),
            "Read the values twice, and write the histogram, the quantiles and the first values of each tensor to JSON "
            "and HTML (includes --stats).",
        ),
    ] = False
    spectra: Annotated[
        bool,
        Option(
            ("--spectra",),
            "Compute singular values of the model's matrices for about a minute at most, the smallest matrices first. "
            "Write them to JSON and HTML (includes --stats).",
        ),
    ] = False
    parts: Annotated[
        bool,
        Option(("--parts",), "List the tensors of each quantized weight below the weight.", group=Group.ROWS),
    ] = False
    input: Annotated[
        tuple[str, ...],
        Option(
            ("--input",),
            "List the tensors that forward creates, too: call forward once, with a tensor of this shape: 2x3, or "
            "'int64:2x16<30522' for integers below 30522 (repeatable: one per argument).",
            "SHAPE",
            argument="inputs",
        ),
    ] = ()
    input_from: Annotated[
        str | None,
        Option(
            ("--input-from",),
            "List the tensors that forward creates, too: call forward once, with the arguments that the function MAKE "
            "of FILE.PY returns.",
            "FILE.PY:MAKE",
            argument="inputs",
            aliases=("--inputs",),
        ),
    ] = None
    fail_on: FailOn = Severity.ERROR
    ignore: IgnoredRules = ()
    baseline: BaselineFile = None
    write_baseline: WriteBaseline = None
    reason: Reason = None
    executor: Executor = None
    shard: Shard = None
    sort: Annotated[
        TensorOrder | None,
        Option(("--sort",), "Sort tensors by name or, largest first, by size.", group=Group.ROWS),
    ] = None


class ReportOptions(SharedOptions, frozen=True, kw_only=True):
    """Write a page to browse a checkpoint or model. -o FILE.html saves it; --stats adds the values."""

    target: InspectedTarget
    model: KindsFromModel = None
    stats: Annotated[
        bool,
        Option(
            ("--stats",),
            "Read the values, and show a histogram, quantiles and the first values of each tensor, and how large the "
            "values are from layer to layer.",
        ),
    ] = False
    spectra: Annotated[
        bool,
        Option(
            ("--spectra",),
            "Compute singular values of the matrices for about a minute at most, the smallest matrices first, and show "
            "them (includes --stats).",
        ),
    ] = False


class DiffOptions(ListOptions, frozen=True, kw_only=True):
    """Compare two checkpoints: names, dtypes, shapes and values. Exit with status 1 if they differ."""

    before: Annotated[str, Target("BEFORE", "A checkpoint, a folder with one, or a model class: file.py:Class.")]
    after: Annotated[str, Target("AFTER", "The checkpoint or class to compare with, in any format.")]
    map: Annotated[
        tuple[str, ...],
        Option(
            ("--map",),
            "Replace REGEX by REPLACEMENT in the tensor names of BEFORE, then compare (repeatable).",
            "REGEX=REPLACEMENT",
        ),
    ] = ()
    ignore: Annotated[
        tuple[Field, ...], Option(("--ignore",), "Ignore differences in this field (repeatable).", "FIELD")
    ] = ()
    bitwise: Annotated[
        bool, Option(("--bitwise",), "Compare bits: -0.0 differs from 0.0, and a NaN from a NaN with other bits.")
    ] = False
    atol: Annotated[
        float,
        Option(("--atol",), "Absolute tolerance: treat values as equal if |after - before| <= ATOL + RTOL * |before|."),
    ] = 0.0
    rtol: Annotated[float, Option(("--rtol",), "Relative tolerance; see --atol.")] = 0.0
    metadata_only: Annotated[
        bool, Option(("--metadata-only",), "Read no values; compare only names, dtypes, shapes and other metadata.")
    ] = False
    no_renames: Annotated[bool, Option(("--no-renames",), "Do not detect renamed tensors.")] = False
    only: Annotated[
        tuple[str, ...],
        Option(("--only",), "Fail if a tensor outside GLOB changed (repeatable).", "GLOB"),
    ] = ()
    frozen: Annotated[
        tuple[str, ...],
        Option(("--frozen",), "Fail if a tensor whose name matches GLOB changed (repeatable).", "GLOB"),
    ] = ()
    changed: Annotated[
        tuple[str, ...],
        Option(
            ("--changed",), "Fail if no tensor that matches GLOB changed (repeatable: each GLOB is checked).", "GLOB"
        ),
    ] = ()
    cast: Annotated[
        bool, Option(("--cast",), "Fail if a tensor that differs is more than an exactly rounded cast of the old one.")
    ] = False
    adapter: Annotated[
        str | None,
        Option(
            ("--adapter",),
            "Fail if AFTER is not BEFORE with this LoRA adapter merged into it, up to rounding.",
            "ADAPTER",
        ),
    ] = None
    sort: Annotated[
        ChangeOrder | None,
        Option(("--sort",), "Sort tensors by name or, largest first, by size or change.", group=Group.ROWS),
    ] = None
    unchanged: Unchanged = False
    name_only: NameOnly = False
    name_status: NameStatus = False
    verbose: Annotated[
        bool,
        Option(
            ("--verbose", "-v"),
            "Also show of each change: the first index that differs, the mean difference, L2 norm, cosine and rank.",
            group=Group.ROWS,
        ),
    ] = False
    device: Annotated[
        str,
        Option(
            ("--device",),
            "Compare values on DEVICE: cpu, cuda or cuda:N.",
            "DEVICE",
            Group.VALUES,
            suggestions=("cpu", "cuda"),
        ),
    ] = "cpu"
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None


class VerifyOptions(SharedOptions, frozen=True, kw_only=True):
    """Test that tensors are moved, saved and trained with the model. An error sets exit status 1."""

    target: Annotated[
        str,
        Target(
            "MODEL",
            "A model: file.py:Class, package.module:Class(arg=1), file.py:make, a function that builds it, "
            "timm:resnet50, or a folder or config.json that names the class.",
        ),
    ]
    check: Annotated[
        tuple[Name, ...],
        Option(
            ("--check",),
            "Run only this test, called a proof (repeatable). [default: move, cast, save, copy, step, forward]",
            "PROOF",
            argument="checks",
        ),
    ] = ()
    device: Annotated[
        str | None,
        Option(
            ("--device",),
            "Move the model to DEVICE: cuda, cuda:N, cpu, meta, or fake-cuda, which needs no GPU. "
            "[default: cuda if torch has a GPU, else fake-cuda]",
            "DEVICE",
            suggestions=("cuda", "fake-cuda", "cpu", "meta"),
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            ("--dtype",),
            "Cast the model to DTYPE. [default: float64, float16 and bfloat16 in turn]",
            "DTYPE",
            suggestions=("float64", "float32", "float16", "bfloat16"),
        ),
    ] = None
    optimizer: Annotated[
        Any,
        Option(
            ("--optimizer",),
            "Train with this optimizer of torch.optim, such as adamw. [default: sgd in step, adamw in resume]",
            "NAME",
            type=str,
            suggestions=("sgd", "adam", "adamw"),
        ),
    ] = None
    input: ForwardInputs = ()
    input_from: ForwardInputsFrom = None
    fail_on: FailOn = Severity.ERROR
    ignore: IgnoredRules = ()
    baseline: BaselineFile = None
    write_baseline: WriteBaseline = None
    reason: Reason = None
    verbose: Annotated[
        bool, Option(("--verbose", "-v"), "Also show what each proof compared, and all notes.", group=Group.ROWS)
    ] = False


class FixOptions(OutputOptions, frozen=True, kw_only=True):
    """Find and fix bugs in the source of a model class. Each edit passes verify; --write writes the edits."""

    target: Annotated[
        str, Target("MODEL", "A model class in a file that you can edit: file.py:Class, package.module:Class.")
    ]
    write: Annotated[bool, Option(("--write",), "Write the edits to the files.")] = False
    input: ForwardInputs = ()
    input_from: ForwardInputsFrom = None
    init_device: InitDevice = None
    config_json: ConfigJson = None
    trust_remote_code: TrustRemoteCode = False


class AuditOptions(SharedOptions, frozen=True, kw_only=True):
    """Check checkpoints and model classes against rules. Exit with status 1 for findings, 2 for unreadable targets."""

    targets: Targets
    model: Annotated[
        str | None,
        Option(
            ("--model",),
            "Check that each checkpoint fits this model class. auto: the class named in config.json.",
            "SPEC",
            suggestions=("auto",),
        ),
    ] = None
    select: Annotated[
        tuple[str, ...], Option(("--select",), "Run only this rule or rule group (repeatable).", "RULE")
    ] = ()
    ignore: Annotated[tuple[str, ...], Option(("--ignore",), "Skip this rule or rule group (repeatable).", "RULE")] = ()
    plugin: Plugins = ()
    fail_on: Annotated[
        Severity | None,
        Option(("--fail-on",), "Exit with status 1 if a finding has this severity or a higher one. [default: warning]"),
    ] = None
    values: Annotated[
        bool,
        Option(
            ("--values",),
            "Read the values of all tensors. [default: only of local files with at most 256 MB and 5,000 tensors]",
            group=Group.VALUES,
        ),
    ] = False
    no_values: Annotated[bool, Option(("--no-values",), "Do not read the values of tensors.", group=Group.VALUES)] = (
        False
    )
    lock: Annotated[str | None, Option(("--lock",), "Check the targets against this lock file.", "FILE")] = None
    frozen_only: Annotated[
        bool,
        Option(
            ("--frozen-only",),
            "Compare only frozen tensors with the lock file: parameters with requires_grad=False, and those that the "
            "key policy.frozen of the configuration names.",
        ),
    ] = False
    weights_only: Annotated[
        bool, Option(("--weights-only",), "Check only tensors against the lock file, not settings and other files.")
    ] = False
    against: Annotated[
        str | None,
        Option(
            ("--against",), "Check that each target has the tensors, dtypes and shapes of CHECKPOINT.", "CHECKPOINT"
        ),
    ] = None
    baseline: BaselineFile = None
    write_baseline: WriteBaseline = None
    reason: Reason = None
    config: Config = None
    no_config: NoConfig = False
    allow_empty: Annotated[bool, Option(("--allow-empty",), "Exit with status 0 if there is nothing to audit.")] = False
    as_found: Annotated[
        bool,
        Option(
            ("--as-found",),
            "Audit each file with its folder: for a shard, the whole model (for pre-commit).",
            hidden=True,
        ),
    ] = False
    verbose: Annotated[
        bool,
        Option(
            ("--verbose", "-v"), "Also show notes about the files, and the rules that did not run.", group=Group.ROWS
        ),
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None


class ExplainOptions(OutputOptions, frozen=True, kw_only=True):
    """Explain why a checkpoint does not load into a class. Prints the lines of Python that load the checkpoint."""

    model: Annotated[
        str,
        Target(
            "MODEL",
            "Model class: file.py:Class. Without it, an error message of load_state_dict is read from standard input.",
        ),
    ] = "-"
    checkpoint: Annotated[str | None, Target("CHECKPOINT", "Checkpoint to load into the class.")] = None
    config_json: ConfigJson = None
    trust_remote_code: TrustRemoteCode = False


class LockOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print a lock file: the digest of each tensor. -o FILE saves the lock file."""

    targets: Targets
    digest: Annotated[Algorithm, Option(("--digest",), "Hash algorithm for tensor values.")] = Algorithm.BLAKE3
    weights_only: Annotated[
        bool, Option(("--weights-only",), "Lock only tensors, not settings and other files of the folder.")
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None
    include: Include = ()
    exclude: Exclude = ()
    kind: Kinds = ()
    output: OutputFile = None
    color: Colors = Color.AUTO
    quiet: Annotated[bool, Option(("--quiet", "-q"), "Do not print notes on standard error.", group=Group.ROWS)] = False
    init_device: InitDevice = None
    config_json: ConfigJson = None
    trust_remote_code: TrustRemoteCode = False
    no_progress: NoProgress = False
    timeout: Timeout = None
    debug: Debug = False

    @property
    def selection(self) -> Selection:
        """The tensors to lock."""
        return Selection(self.include, self.exclude, self.kind)


NoCache = Annotated[
    bool,
    Option(("--no-cache",), "Read all values; do not use or update the cache of statistics.", group=Group.VALUES),
]
RunTargets = Annotated[
    tuple[str, ...], Target("RUN", "Folders with the checkpoints of a run, globs in quotes, or checkpoints.")
]


class LogOptions(OutputOptions, frozen=True, kw_only=True):
    """Print a line for each checkpoint of a training run. It has the norm, what changed, and new NaN."""

    targets: RunTargets
    fail_on: FailOn = Severity.ERROR
    no_cache: NoCache = False
    top: Annotated[
        int | None,
        Option(("--top",), "Show only the N modules that changed most during the run.", "N", Group.ROWS),
    ] = None
    verbose: Annotated[
        bool,
        Option(
            ("--verbose", "-v"), "Also show which settings changed from each checkpoint to the next.", group=Group.ROWS
        ),
    ] = False


class BisectOptions(OutputOptions, frozen=True, kw_only=True):
    """Find the first checkpoint of a run where a condition holds. Assumes that it then stays true, and reads few."""

    targets: RunTargets
    first: Annotated[
        str | None,
        Option(
            ("--first",),
            "Condition: nan, inf, 'changed GLOB' (a tensor differs from the first checkpoint), or 'cosine<0.9' (the "
            "cosine of all weights with those of the first checkpoint is smaller). Required.",
            "CONDITION",
            suggestions=("nan", "inf", "changed *", "cosine<0.9"),
        ),
    ] = None
    no_cache: NoCache = False


class ResumeCheckOptions(OutputOptions, frozen=True, kw_only=True):
    """Check that a resumed training equals an uninterrupted one. Names the state that the script loses."""

    target: Annotated[
        str,
        Target(
            "SCRIPT::FUNCTION",
            "Function of a training script, called as main(steps=4, save_every=2, save_to=FOLDER, checkpoint=FILE or "
            "None).",
        ),
    ]
    steps: Annotated[
        int,
        Option(
            ("--steps",),
            "Train N optimizer steps, and again from the checkpoint of step N/2 (N is even).",
            "N",
            Group.TASK,
        ),
    ] = 4


class WatchFormat(str, enum.Enum):
    """Formats of the lines of watch."""

    PLAIN = "plain"
    JSONL = "jsonl"


class WatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print a line for each new checkpoint once it is fully written. Runs until Ctrl-C or --count."""

    targets: RunTargets
    interval: Annotated[float, Option(("--interval",), "Look for new files every SECONDS.", "SECONDS", Group.TASK)] = (
        5.0
    )
    count: Annotated[int | None, Option(("--count",), "Exit after N lines.", "N", Group.TASK)] = None
    history: Annotated[
        bool,
        Option(
            ("--history",),
            "Also print the checkpoints that exist already, not only the last of them.",
            group=Group.TASK,
        ),
    ] = False
    fail_on_nan: Annotated[
        bool,
        Option(
            ("--fail-on-nan",),
            "Exit with status 1 as soon as a tensor has NaN or an infinity that it did not have before.",
            group=Group.TASK,
        ),
    ] = False
    no_cache: NoCache = False
    output_format: Annotated[
        WatchFormat, Option(("--output-format", "-f"), "Write each line in this format.", "FORMAT", Group.OUTPUT)
    ] = WatchFormat.PLAIN
    debug: Debug = False


class BrowseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Look at the tensors of a checkpoint or model in the terminal. Writes nothing."""

    target: Annotated[str, Target("TARGET", "A file, a folder, a URL or a model class.")]
    other: Annotated[str | None, Target("[OTHER]", "A second target, to compare TARGET with.")] = None
    init_device: InitDevice = None
    debug: Debug = False


class MergeOptions(OutputOptions, frozen=True, kw_only=True):
    """Merge the parts that --shard wrote. Output and exit status are those of the command without --shard."""

    parts: Annotated[tuple[str, ...], Target("PART", "The N files that --shard 1/N to N/N wrote.")]
    code: Annotated[
        tuple[str, ...],
        Option(
            ("--code",),
            "Allow merge to run this model class or plugin, which the parts name (repeatable).",
            "SPEC",
            Group.DISTRIBUTION,
        ),
    ] = ()
    url: Annotated[
        tuple[str, ...],
        Option(
            ("--url",),
            "Full URL of a checkpoint that the parts read (repeatable). Parts do not store passwords and signatures.",
            "URL",
            Group.DISTRIBUTION,
        ),
    ] = ()
    copies: Annotated[
        bool,
        Option(
            ("--copies",),
            "Accept parts made from separate copies of the files; compare only their sizes and some of their bytes.",
            group=Group.DISTRIBUTION,
        ),
    ] = False
    verbose: Annotated[
        bool, Option(("--verbose", "-v"), "Also show what -v of the merged command shows.", group=Group.ROWS)
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    tree: Tree = False
    unchanged: Unchanged = False
    name_only: NameOnly = False
    name_status: NameStatus = False
    lines: Lines = None


class RulesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """List the rules of all commands or of a group, or explain a rule."""

    name: Annotated[str | None, Target("RULE", "A rule to explain, or a group such as pickles to list.")] = None
    plugin: Plugins = ()
    output_format: ListFormat = None
    output: OutputFile = None
    color: Colors = Color.AUTO
    debug: Debug = False

    def __post_init__(self) -> None:
        """Set the format."""
        _set_format_of_suffix(self, ListOutput)


class ConfigOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print the configuration of audit, and which file sets each key."""

    config: Config = None
    no_config: NoConfig = False
    output_format: ListFormat = None
    output: OutputFile = None
    color: Colors = Color.AUTO
    debug: Debug = False

    def __post_init__(self) -> None:
        """Set the format."""
        _set_format_of_suffix(self, ListOutput)


class SchemaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print the JSON Schema of a command's JSON output."""

    command: Annotated[
        str,
        Target(
            "COMMAND",
            "A command with JSON output: inspect, diff, verify, fix, audit, explain, rules, config, lock, log, bisect "
            "or resume-check.",
        ),
    ]
    debug: Debug = False


class CompletionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print a script that completes statecli in your shell."""

    shell: Annotated[Shell, Target("SHELL", "Shell to complete in: bash, zsh, fish or powershell.")]
    debug: Debug = False


class SamplesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Write the sample models of the tutorial into a folder."""

    folder: Annotated[str, Target("DIR", "Folder to write to. It is made if it does not exist.")]
    debug: Debug = False


class GitSetupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Set up git diff for checkpoints in this repository. Writes .gitattributes and .git/config."""

    everywhere: Annotated[bool, Option(("--global",), "Set up git for all your repositories.")] = False
    remove: Annotated[bool, Option(("--remove",), "Remove what the setup wrote.")] = False
    debug: Debug = False


class GitTextconvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Print a line for each tensor, for git diff. If the file cannot be read, print the error as a line."""

    path: Annotated[str, Target("FILE")]
    made_by: Annotated[
        str,
        Option(
            ("--made-by",),
            "Set by statecli git setup: the version of statecli. If TEXT changes, git discards its cached lines.",
            "TEXT",
        ),
    ] = ""


class GitExternalDiffOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Compare two versions of a file for git diff. If a file cannot be read, print the error as a line."""

    arguments: Annotated[
        tuple[str, ...],
        Target("ARGUMENT", "Path, then file, hash and mode of the old version and of the new version, as git gives."),
    ]


class GitDifftoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Compare two versions of a file for git difftool. If a file cannot be read, print the error as a line."""

    before: Annotated[str, Target("LOCAL", "The old version of the file.")]
    after: Annotated[str, Target("REMOTE", "The new version of the file.")]
    name: Annotated[str, Target("[NAME]", "Path of the file in the repository.")] = ""


#: Options of any command.
Options = (
    InspectOptions
    | DiffOptions
    | VerifyOptions
    | FixOptions
    | AuditOptions
    | ExplainOptions
    | ReportOptions
    | LockOptions
    | LogOptions
    | BisectOptions
    | ResumeCheckOptions
    | WatchOptions
    | BrowseOptions
    | MergeOptions
    | RulesOptions
    | ConfigOptions
    | SchemaOptions
    | CompletionOptions
    | SamplesOptions
    | GitSetupOptions
    | GitTextconvOptions
    | GitExternalDiffOptions
    | GitDifftoolOptions
)

#: Every command by its name, in the order of the help.
COMMANDS: dict[str, type[Options]] = {
    "inspect": InspectOptions,
    "report": ReportOptions,
    "diff": DiffOptions,
    "verify": VerifyOptions,
    "fix": FixOptions,
    "audit": AuditOptions,
    "explain": ExplainOptions,
    "lock": LockOptions,
    "log": LogOptions,
    "bisect": BisectOptions,
    "resume-check": ResumeCheckOptions,
    "watch": WatchOptions,
    "browse": BrowseOptions,
    "merge": MergeOptions,
    "git setup": GitSetupOptions,
    "git textconv": GitTextconvOptions,
    "git external-diff": GitExternalDiffOptions,
    "git difftool": GitDifftoolOptions,
    "rules": RulesOptions,
    "config": ConfigOptions,
    "schema": SchemaOptions,
    "samples": SamplesOptions,
    "completion": CompletionOptions,
}
