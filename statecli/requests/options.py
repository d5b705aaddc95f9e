"""Define every option of every command once: its name, type, default, help and group.

A class has the options of a command, a field for each. The annotation of a field has the flags, the type and the help
of the option, and the default of a field is the default of the option. The parsers of the command line, the arguments
of the Python API and the tables of the documents are derived from these classes (`parameters`).
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from statecli.core.compared_fields import Field
from statecli.core.digest_algorithm import Algorithm
from statecli.core.finding import Severity
from statecli.core.model_state import Kind
from statecli.core.option_defaults import (
    AUDIT_FAIL_ON,
    DEFAULT_VALUE_BYTES,
    DEFAULT_VALUE_TENSORS,
    RESUME_OPTIMIZER,
    STEP_OPTIMIZER,
)
from statecli.core.output import ChangeOrder, Color, Output, TensorOrder
from statecli.core.proof_names import DEFAULT_PROOFS, Name
from statecli.core.selection import Selection

#: Regular expression for the name of a GPU.
CUDA_PATTERN = r"cuda(?::(?:0|[1-9]\d{0,3}))?"


class Shell(str, enum.Enum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


class OptionGroup(str, enum.Enum):
    """Headings of the groups of options, in the order in which the help shows them."""

    TASK = "Main options"
    VALUES = "Reading values"
    TENSORS = "Which tensors"
    ROWS = "Contents of the output"
    OUTPUT = "Output"
    PROCESS = "How it runs"
    DISTRIBUTION = "Distribution"


class NamedKind(enum.Enum):
    """Kinds of files and objects that a target or the value of an option can name."""

    TARGET = "a checkpoint or a model class"
    FUNCTION = "a function of a Python file"
    INPUT = "another file that the command reads"
    OUTPUT = "a file or folder that the command writes"
    RULE = "a rule or a group of rules"
    SCHEMA = "a command with JSON output"


class Option(msgspec.Struct, frozen=True):
    """Flags and help of an option, or of a target.

    Attributes:
        help: A phrase.
        command_help: Phrases for the commands for which `help` is not exact, by the name of the command.
        metavar: Placeholder of the value in the help; "" for a flag, a number or a choice of few words.
        group: Heading in the help.
        argument: Name of the argument in Python, if not the name of the field.
        python_type: Annotation of the argument in Python, if Python takes other types than the command line.
        shell_only: Commands whose function in Python has no such argument, although the option is not about the output.
        suggestions: Values that completion offers; other values are possible too.
        aliases: Older spellings, which still work and are not listed.
        hidden: True for an accepted but unlisted option.
        short: Short flag, such as -i. The full flag is the name of the field, with dashes.
        flag: Full flag, if not the name of the field.
        is_target: True for a word of the command line without a flag.
        minimum: Smallest number; None for any number.
        names: What the value names, for completion. An output never replaces a file that the command reads.
        may_be_empty: True for a glob or an expression on names of tensors, where an empty name is possible.
        contradicts_shard: True if a value other than the default contradicts `--shard`.
    """

    help: str
    metavar: str = ""
    group: OptionGroup = OptionGroup.TASK
    short: str = ""
    flag: str = ""
    is_target: bool = False
    argument: str | None = None
    python_type: str = ""
    shell_only: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    hidden: bool = False
    names: NamedKind | None = None
    minimum: int | None = None
    may_be_empty: bool = False
    contradicts_shard: bool = False
    command_help: dict[str, str] = {}


#: Commands with a function in Python.
COMMANDS_WITH_FUNCTION = ("inspect", "diff", "lock", "audit", "merge", "verify")


def build_target(
    metavar: str,
    help_text: str = "",
    names: NamedKind | None = NamedKind.TARGET,
    argument: str | None = None,
    python_type: str = "",
    *,
    may_be_empty: bool = False,
) -> Option:
    """Return the `Option` of a target, which is a word of the command line without a flag."""
    return Option(
        help_text,
        metavar,
        is_target=True,
        names=names,
        argument=argument,
        python_type=python_type,
        may_be_empty=may_be_empty,
    )


# Options of several commands.

Include = Annotated[
    tuple[str, ...],
    Option(
        "Use only tensors whose name matches GLOB, such as 'encoder.*' (repeatable).",
        "GLOB",
        OptionGroup.TENSORS,
        may_be_empty=True,
        shell_only=("audit",),
        short="-i",
    ),
]
Exclude = Annotated[
    tuple[str, ...],
    Option(
        "Leave out tensors whose name matches GLOB (repeatable).",
        "GLOB",
        OptionGroup.TENSORS,
        may_be_empty=True,
        shell_only=("audit",),
        short="-x",
    ),
]
Kinds = Annotated[
    tuple[Kind, ...],
    Option(
        "Use only tensors of this kind: parameter, buffer, unregistered, optimizer or other (repeatable).",
        "KIND",
        OptionGroup.TENSORS,
        shell_only=("audit",),
    ),
]
_DTYPE = Option("Use only tensors of this dtype, such as bf16 or float8* (repeatable).", "GLOB", OptionGroup.TENSORS)
Dtypes = Annotated[tuple[str, ...], _DTYPE]
Shapes = Annotated[
    tuple[str, ...],
    Option("Use only tensors of this shape, such as 768x3072 or *x768 (repeatable).", "SHAPE", OptionGroup.TENSORS),
]
_DEVICE = Option(
    "Compare values on DEVICE: cpu, cuda or cuda:N.", "DEVICE", OptionGroup.VALUES, suggestions=("cpu", "cuda")
)
InitDevice = Annotated[
    str | None,
    Option(
        "Build the model on DEVICE. Use meta for a model that does not fit in memory. "
        "[default: cpu; meta for a model that is built from a config.json]",
        "DEVICE",
        OptionGroup.PROCESS,
        suggestions=("cpu", "cuda", "meta"),
        shell_only=("audit", "verify"),
    ),
]
FromConfig = Annotated[
    bool,
    Option(
        "Build the model from config.json, without its weights. Use this for a folder or repository that has both a "
        "config.json and weights.",
        argument="as_class",
        group=OptionGroup.PROCESS,
        aliases=("--class",),
        shell_only=COMMANDS_WITH_FUNCTION,
    ),
]
ConfigJson = Annotated[
    str | None,
    Option(
        "Build the model with the settings in FILE (JSON). Use this for a class whose constructor takes a config "
        "object: a dataclass or a config class.",
        "FILE",
        OptionGroup.PROCESS,
        names=NamedKind.INPUT,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    Option(
        "Run the Python files that come with a checkpoint (auto_map in its config.json). Use this only if you trust "
        "the author; without this option, such files never run.",
        group=OptionGroup.PROCESS,
    ),
]
All = Annotated[
    bool,
    Option(
        "Show each tensor and each finding on its own line. By default, similar ones share a line.",
        group=OptionGroup.ROWS,
    ),
]
Tree = Annotated[
    bool, Option("Show a tree of modules, each with its number of tensors and its size.", group=OptionGroup.ROWS)
]
Unchanged = Annotated[bool, Option("Also list the tensors that did not change.", group=OptionGroup.ROWS)]
NameOnly = Annotated[
    bool,
    Option(
        "Print only the names of the changed tensors. With --unchanged, print only the names of the others.",
        group=OptionGroup.ROWS,
    ),
]
NameStatus = Annotated[
    bool,
    Option(
        "Print only the name of each changed tensor, after a letter: A added, D deleted, M modified, R renamed.",
        group=OptionGroup.ROWS,
    ),
]
Lines = Annotated[
    int | None,
    Option(
        "For each section and each kind of tensor, show at most N lines, the largest first.",
        "N",
        OptionGroup.ROWS,
        minimum=0,
        short="-n",
    ),
]
Top = Annotated[
    int | None,
    Option(
        "Show only the N largest tensors, in one list; in diff, the N largest changes.",
        "N",
        OptionGroup.ROWS,
        minimum=1,
        command_help={"log": "Show only the N modules that changed most during the run."},
    ),
]
_SORT = Option("Sort tensors by name, or by size with the largest first.", group=OptionGroup.ROWS)
Quiet = Annotated[
    bool,
    Option(
        "Print only the reasons for a failure, and what was not checked. The formats json, jsonl, csv, sarif, junit "
        "and gitlab are always complete.",
        group=OptionGroup.ROWS,
        command_help={"lock": "Do not print notes on standard error."},
        short="-q",
    ),
]
_TENSOR_DETAILS = "Also show why each tensor counts as parameter or buffer, its other names and its source line."
Verbose = Annotated[
    bool,
    Option(
        "Show all notes, even if there are many of the same kind.",
        group=OptionGroup.ROWS,
        command_help={
            "inspect": _TENSOR_DETAILS,
            "report": _TENSOR_DETAILS,
            "diff": "Also show for each change the first index that differs; the mean, L2 norm and rank of the "
            "difference; and the cosine of both values.",
            "verify": "Also show the comparisons of each check, and all notes.",
            "audit": "Also show notes about the files, and the rules that did not run.",
            "log": "Also show which settings changed from each checkpoint to the next.",
            "merge": "Show the details that -v shows in the command that you ran with --shard.",
        },
        short="-v",
    ),
]


class ListOutput(str, enum.Enum):
    """Output formats of `rules` and `config`, which list facts and not findings."""

    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MARKDOWN = "markdown"
    HTML = "html"


#: Format by the suffix of the output file.
_FORMAT_OF_SUFFIX = {
    **{form.value: form.value for form in (Output.HTML, Output.JSON, Output.JSONL, Output.CSV, Output.SARIF)},
    "md": Output.MARKDOWN.value,
}


def _set_format_of_suffix(options: OutputOptions | ReferenceOptions, forms: type[enum.Enum]) -> None:
    """Set the output format from the suffix of the output file, unless `-f` gives a format."""
    _, dot, suffix = (options.output or "").rpartition(".")
    form = _FORMAT_OF_SUFFIX.get(suffix.lower()) if dot else None
    is_part = getattr(options, "shard", None) is not None  # a part has a fixed format
    if options.output_format is None and form in {choice.value for choice in forms} and not is_part:
        msgspec.structs.force_setattr(options, "output_format", forms(form))


class WatchFormat(str, enum.Enum):
    """Formats of the lines that `watch` prints."""

    PLAIN = "plain"
    JSONL = "jsonl"


_FORMAT = Option(
    "Write the result in this format. By default, the suffix of -o FILE decides (html, json, jsonl, csv, md, sarif); "
    "otherwise a terminal gets a table, and a pipe gets plain rows.",
    "FORMAT",
    OptionGroup.OUTPUT,
    command_help={"watch": "Write each line in this format."},
    short="-f",
)
OutputFormat = Annotated[Output | None, _FORMAT]
ListFormat = Annotated[ListOutput | None, replace(_FORMAT, help=_FORMAT.help.replace(", md, sarif)", ", md)"))]
OutputFile = Annotated[
    str | None,
    Option("Write to FILE instead of standard output.", "FILE", OptionGroup.OUTPUT, names=NamedKind.OUTPUT, short="-o"),
]
Reports = Annotated[
    tuple[str, ...],
    Option(
        "Also write the result to FILE in FORMAT, such as sarif=out.sarif (repeatable).",
        "FORMAT=FILE",
        OptionGroup.OUTPUT,
        suggestions=tuple(f"{output.value}=" for output in Output),
    ),
]
Colors = Annotated[
    Color,
    Option("Use colours: auto (on a terminal, unless NO_COLOR is set), always or never.", group=OptionGroup.OUTPUT),
]
NoProgress = Annotated[
    bool,
    Option(
        "Do not show a progress bar on standard error.", group=OptionGroup.PROCESS, shell_only=COMMANDS_WITH_FUNCTION
    ),
]
Timeout = Annotated[
    float | None,
    Option(
        "Stop the command after SECONDS, with exit status 2.",
        "SECONDS",
        OptionGroup.PROCESS,
        shell_only=COMMANDS_WITH_FUNCTION,
    ),
]
Debug = Annotated[
    bool, Option("Show the Python traceback of an error.", group=OptionGroup.PROCESS, shell_only=COMMANDS_WITH_FUNCTION)
]
Jobs = Annotated[
    int,
    Option(
        "Read tensor values with N processes (threads for URLs); 0 means one per core.",
        "N",
        OptionGroup.VALUES,
        minimum=0,
        short="-j",
    ),
]
Executor = Annotated[
    Any,
    Option(
        "Read tensor values with ENGINE: threads, processes:4, dask:tcp://HOST:PORT, mpi or ray. Use dask, mpi or ray "
        "to read on several machines.",
        "ENGINE",
        OptionGroup.DISTRIBUTION,
        suggestions=("threads", "processes", "dask:", "mpi", "ray"),
        python_type="str | Executor | None",
    ),
]
Shard = Annotated[
    str | None,
    Option(
        "Read only part I of N of the tensor values, and write a part file. Run the N parts as separate jobs, then "
        "join the files with statecli merge.",
        "I/N",
        OptionGroup.DISTRIBUTION,
        shell_only=COMMANDS_WITH_FUNCTION,
    ),
]
Config = Annotated[
    str | None,
    Option(
        "Use this configuration file instead of the nearest statecli.toml or pyproject.toml.",
        "FILE",
        names=NamedKind.INPUT,
    ),
]
NoConfig = Annotated[bool, Option("Ignore all configuration files.")]
Plugins = Annotated[
    tuple[str, ...],
    Option(
        "Also use your own rules in MODULE, a Python module or file (repeatable).",
        "MODULE",
        argument="plugins",
        names=NamedKind.INPUT,
    ),
]
TensorsOnly = Annotated[
    bool,
    Option(
        "Check only the tensors against the lock file, not settings and other files.",
        argument="weights_only",
        aliases=("--weights-only",),
        command_help={"lock": "Lock only tensors, not settings and other files of the folder."},
        shell_only=("audit",),
    ),
]
Targets = Annotated[
    tuple[str, ...],
    build_target("TARGET", "Checkpoints, folders, globs or model classes.", python_type="Target | Iterable[Target]"),
]


_FAIL_ON = Option(
    "Exit with status 1 if a finding has this severity or a higher one.", shell_only=("inspect", "verify")
)
FailOn = Annotated[Severity, _FAIL_ON]
_IGNORE = Option(
    "Do not report findings of this rule or rule group (repeatable).",
    "RULE",
    names=NamedKind.RULE,
    command_help={"audit": "Skip this rule or rule group (repeatable)."},
)
IgnoredRules = Annotated[tuple[str, ...], _IGNORE]
BaselineFile = Annotated[
    str | None,
    Option(
        "Accept the findings listed in FILE: they do not make the command fail.",
        "FILE",
        names=NamedKind.INPUT,
        shell_only=COMMANDS_WITH_FUNCTION,
    ),
]
WriteBaseline = Annotated[
    str | None,
    Option(
        "Write all findings of this run to FILE (requires --reason). Give later runs --baseline FILE to accept them.",
        "FILE",
        names=NamedKind.OUTPUT,
        contradicts_shard=True,
        shell_only=COMMANDS_WITH_FUNCTION,
    ),
]
ForwardInputs = Annotated[
    tuple[str, ...],
    Option(
        "Call forward with a tensor of SHAPE, such as 2x3x224x224 (repeatable: one per argument). Write "
        "'int64:2x16<30522' for integers below 30522, and name=2x3 for the argument called name.",
        "SHAPE",
        argument="inputs",
        command_help={
            "inspect": "Call forward with a tensor of SHAPE, such as 2x3, and also list the tensors that forward "
            "creates (repeatable: one per argument). Write 'int64:2x16<30522' for integers below 30522."
        },
        python_type="Any",
    ),
]
ForwardInputsFrom = Annotated[
    str | None,
    Option(
        "Call forward with the arguments that the function MAKE in FILE.PY returns. Use this if --input cannot "
        "describe the arguments.",
        "FILE.PY:MAKE",
        argument="inputs",
        aliases=("--inputs",),
        names=NamedKind.FUNCTION,
        command_help={
            "inspect": "Call forward with the arguments that the function MAKE in FILE.PY returns, and also list the "
            "tensors that forward creates. Use this if --input cannot describe the arguments."
        },
        python_type="Any",
    ),
]
Reason = Annotated[
    str | None, Option("Reason to record with --write-baseline.", "TEXT", shell_only=COMMANDS_WITH_FUNCTION)
]


InspectedTarget = Annotated[
    str,
    build_target(
        "TARGET",
        "A checkpoint, a folder with a checkpoint, or - for standard input. Or a model: file.py:Class, "
        "package.module:Class(arg=1), file.py:make (a function that builds the model), timm:resnet50, or a folder "
        "or config.json that names the class.",
        python_type="Target",
    ),
]
ModelClass = Annotated[
    str | None,
    Option(
        "Compare the checkpoint with this model class, which also shows which tensors are parameters and which are "
        "buffers. auto: the class named in config.json.",
        "SPEC",
        suggestions=("auto",),
        names=NamedKind.TARGET,
        command_help={
            "audit": "Check that each checkpoint fits this model class. auto: the class named in config.json."
        },
    ),
]
Stats = Annotated[
    bool,
    Option(
        "Read the values, and show min, max, mean, std and the number of zeros, NaN and Inf.",
        command_help={
            "report": "Read the values, and show a histogram, quantiles and the first values of each tensor. The "
            "report also compares how large the values are in each layer."
        },
    ),
]
Spectra = Annotated[
    bool,
    Option(
        "Add the singular values of the model's matrices to JSON and HTML. Starts with the smallest matrix, and "
        "leaves out the matrices that are not done after about a minute. Includes --stats.",
        command_help={
            "report": "Show the singular values of the matrices. Starts with the smallest matrix, and leaves out the "
            "matrices that are not done after about a minute. Includes --stats."
        },
        shell_only=COMMANDS_WITH_FUNCTION,
    ),
]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the options of each command."""


class OutputOptions(Options, frozen=True, kw_only=True):
    """Output options of every command that writes a report. `timeout` is in seconds."""

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
        """Set the output format from the suffix of the output file, unless `-f` gives a format."""
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
            "Move the tensors to DEVICE, and report each tensor that does not move. Use meta to check without a GPU.",
            "DEVICE",
            suggestions=("cuda", "cpu", "meta"),
            contradicts_shard=True,
            python_type="str | torch.device | None",
        ),
    ] = None
    cuda: Annotated[bool, Option("Same as --to cuda.", contradicts_shard=True, shell_only=COMMANDS_WITH_FUNCTION)] = (
        False
    )
    from_config: FromConfig = False
    model: ModelClass = None
    stats: Stats = False
    distributions: Annotated[
        bool,
        Option(
            "Add a histogram, quantiles and the first values of each tensor to JSON and HTML. Reads the values twice, "
            "and includes --stats.",
            shell_only=COMMANDS_WITH_FUNCTION,
        ),
    ] = False
    spectra: Spectra = False
    parts: Annotated[
        bool,
        Option(
            "Below each quantized weight, list its tensors: codes, scales, zero points and others.",
            group=OptionGroup.ROWS,
        ),
    ] = False
    input: ForwardInputs = ()
    input_from: ForwardInputsFrom = None
    fail_on: FailOn = Severity.ERROR
    ignore: IgnoredRules = ()
    baseline: BaselineFile = None
    write_baseline: WriteBaseline = None
    reason: Reason = None
    executor: Executor = None
    shard: Shard = None
    sort: Annotated[TensorOrder | None, _SORT] = None


class ReportOptions(SharedOptions, frozen=True, kw_only=True):
    """Write an HTML report to browse a checkpoint or model. -o FILE.html names the file; --stats adds the values."""

    target: InspectedTarget
    model: ModelClass = None
    stats: Stats = False
    spectra: Spectra = False


class DiffOptions(ListOptions, frozen=True, kw_only=True):
    """Compare two checkpoints: names, dtypes, shapes and values. Exit with status 1 if they differ."""

    before: Annotated[
        str,
        build_target(
            "BEFORE",
            "A checkpoint, a folder with a checkpoint, or a model class: file.py:Class.",
            python_type="Target | Snapshot",
        ),
    ]
    after: Annotated[
        str,
        build_target(
            "AFTER", "The checkpoint or class to compare with, in any format.", python_type="Target | Snapshot"
        ),
    ]
    map: Annotated[
        tuple[str, ...],
        Option(
            "Replace REGEX by REPLACEMENT in the tensor names of BEFORE (repeatable). Use this if tensors have other "
            "names in AFTER.",
            "REGEX=REPLACEMENT",
            may_be_empty=True,
        ),
    ] = ()
    ignore: Annotated[
        tuple[Field, ...],
        replace(_IGNORE, help="Ignore differences in this field (repeatable).", metavar="FIELD", names=None),
    ] = ()
    bitwise: Annotated[
        bool, Option("Compare the bits of values: -0.0 differs from 0.0, and NaN differs from a NaN with other bits.")
    ] = False
    atol: Annotated[
        float, Option("Absolute tolerance: treat values as equal if |after - before| <= ATOL + RTOL * |before|.")
    ] = 0.0
    rtol: Annotated[float, Option("Relative tolerance; see --atol.")] = 0.0
    metadata_only: Annotated[
        bool, Option("Compare only names, dtypes, shapes and other metadata; do not read values.")
    ] = False
    no_renames: Annotated[bool, Option("Do not detect renamed tensors; show them as deleted and added.")] = False
    may_change: Annotated[
        tuple[str, ...],
        Option(
            "Let only tensors that match GLOB change, and fail if another tensor changed (repeatable: it is enough to "
            "match one GLOB).",
            "GLOB",
            argument="only",
            may_be_empty=True,
            aliases=("--only",),
        ),
    ] = ()
    must_not_change: Annotated[
        tuple[str, ...],
        Option(
            "Fail if a tensor that matches GLOB changed. Other tensors may change (repeatable).",
            "GLOB",
            argument="frozen",
            may_be_empty=True,
            aliases=("--frozen",),
        ),
    ] = ()
    must_change: Annotated[
        tuple[str, ...],
        Option(
            "Fail if no tensor that matches GLOB changed. Other tensors may change (repeatable: each GLOB must match a "
            "changed tensor).",
            "GLOB",
            argument="changed",
            may_be_empty=True,
            aliases=("--changed",),
        ),
    ] = ()
    cast: Annotated[
        bool, Option("Allow casts, and fail if a tensor differs by more than the rounding to the new dtype.")
    ] = False
    adapter: Annotated[
        str | None,
        Option(
            "Check a merge: fail unless AFTER equals BEFORE plus this LoRA adapter, up to rounding.",
            "ADAPTER",
            names=NamedKind.TARGET,
            python_type="str | os.PathLike[str] | None",
        ),
    ] = None
    sort: Annotated[
        ChangeOrder | None,
        replace(_SORT, help="Sort tensors by name, by size (largest first) or by change (largest first)."),
    ] = None
    unchanged: Unchanged = False
    name_only: NameOnly = False
    name_status: NameStatus = False
    device: Annotated[str, _DEVICE] = "cpu"
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None


class VerifyOptions(SharedOptions, frozen=True, kw_only=True):
    """Check that tensors are moved, saved and trained with the model. Exit with status 1 if a check fails."""

    target: Annotated[
        str,
        build_target(
            "MODEL",
            "A model: file.py:Class, package.module:Class(arg=1), file.py:make (a function that builds the model), "
            "timm:resnet50, or a folder or config.json that names the class.",
            argument="model",
            python_type="str | nn.Module",
        ),
    ]
    check: Annotated[
        tuple[Name, ...],
        Option(
            f"Run only this check (repeatable). [default: {', '.join(name.value for name in DEFAULT_PROOFS)}]",
            "CHECK",
            argument="checks",
        ),
    ] = ()
    device: Annotated[
        str | None,
        replace(
            _DEVICE,
            help="Move the model to DEVICE: cuda, cuda:N, cpu, meta, or fake-cuda, which needs no GPU. "
            "[default: cuda if torch has a GPU, else fake-cuda]",
            group=OptionGroup.TASK,
            suggestions=("cuda", "fake-cuda", "cpu", "meta"),
            python_type="str | torch.device | None",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        replace(
            _DTYPE,
            help="Cast the model to DTYPE. [default: float64, float16 and bfloat16 in turn]",
            metavar="DTYPE",
            group=OptionGroup.TASK,
            suggestions=("float64", "float32", "float16", "bfloat16"),
            python_type="str | torch.dtype | None",
        ),
    ] = None
    optimizer: Annotated[
        Any,
        Option(
            f"Train with this optimizer of torch.optim, such as adamw. [default: {STEP_OPTIMIZER} for the check step, "
            f"{RESUME_OPTIMIZER} for the check resume]",
            "NAME",
            suggestions=("sgd", "adam", "adamw"),
            python_type="str | type[torch.optim.Optimizer] | None",
        ),
    ] = None
    input: ForwardInputs = ()
    input_from: ForwardInputsFrom = None
    fail_on: FailOn = Severity.ERROR
    ignore: IgnoredRules = ()
    baseline: BaselineFile = None
    write_baseline: WriteBaseline = None
    reason: Reason = None


class FixOptions(OutputOptions, frozen=True, kw_only=True):
    """Find and fix bugs in the source of a model class. Shows fixes that pass verify; --write writes the fixes."""

    target: Annotated[
        str, build_target("MODEL", "A model class in a file that you can edit: file.py:Class, package.module:Class.")
    ]
    write: Annotated[bool, Option("Write the fixes to the files.")] = False
    input: ForwardInputs = ()
    input_from: ForwardInputsFrom = None
    init_device: InitDevice = None
    config_json: ConfigJson = None
    trust_remote_code: TrustRemoteCode = False


class AuditOptions(SharedOptions, frozen=True, kw_only=True):
    """Check checkpoints and model classes against rules. Exit with status 1 for findings, 2 for unreadable targets."""

    targets: Targets
    model: ModelClass = None
    select: Annotated[
        tuple[str, ...], Option("Run only this rule or rule group (repeatable).", "RULE", names=NamedKind.RULE)
    ] = ()
    ignore: IgnoredRules = ()
    plugin: Plugins = ()
    fail_on: Annotated[Severity | None, replace(_FAIL_ON, help=f"{_FAIL_ON.help} [default: {AUDIT_FAIL_ON.value}]")] = (
        None
    )
    values: Annotated[
        bool,
        Option(
            "Read the values of all tensors. [default: only of local files with at most "
            f"{DEFAULT_VALUE_BYTES // 10**6} MB and {DEFAULT_VALUE_TENSORS:,} tensors]",
            group=OptionGroup.VALUES,
        ),
    ] = False
    no_values: Annotated[
        bool, Option("Do not read the values of tensors.", group=OptionGroup.VALUES, shell_only=COMMANDS_WITH_FUNCTION)
    ] = False
    lock: Annotated[
        str | None,
        Option("Check that the targets match this lock file, written by statecli lock.", "FILE", names=NamedKind.INPUT),
    ] = None
    frozen_only: Annotated[
        bool,
        Option(
            "Compare only frozen tensors with the lock file. These are parameters with requires_grad=False, and "
            "tensors that match policy.frozen in the configuration.",
            shell_only=COMMANDS_WITH_FUNCTION,
        ),
    ] = False
    tensors_only: TensorsOnly = False
    against: Annotated[
        str | None,
        Option(
            "Check that each target has the tensors, dtypes and shapes of CHECKPOINT.",
            "CHECKPOINT",
            names=NamedKind.TARGET,
            python_type="Target | None",
        ),
    ] = None
    baseline: BaselineFile = None
    write_baseline: WriteBaseline = None
    reason: Reason = None
    config: Config = None
    no_config: NoConfig = False
    allow_empty: Annotated[bool, Option("Exit with status 0 if there is nothing to audit.")] = False
    as_found: Annotated[
        bool,
        Option(
            "For pre-commit: if a file is a shard of a model, audit the whole model of its folder, not only the file.",
            hidden=True,
        ),
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None


class ExplainOptions(OutputOptions, frozen=True, kw_only=True):
    """Explain why a checkpoint does not load into a class. Prints the lines of Python that load the checkpoint."""

    model: Annotated[
        str,
        build_target(
            "MODEL",
            "Model class: file.py:Class. Without MODEL, statecli reads an error message of load_state_dict from "
            "standard input.",
        ),
    ] = "-"
    checkpoint: Annotated[str | None, build_target("CHECKPOINT", "Checkpoint to load into the class.")] = None
    config_json: ConfigJson = None
    trust_remote_code: TrustRemoteCode = False


class LockOptions(Options, frozen=True, kw_only=True):
    """Print a lock file: the digest of each tensor. -o FILE saves the lock file. To compare: audit --lock FILE."""

    targets: Targets
    digest: Annotated[Algorithm, Option("Hash algorithm for tensor values.")] = Algorithm.BLAKE3
    tensors_only: TensorsOnly = False
    jobs: Jobs = 0
    executor: Executor = None
    shard: Shard = None
    include: Include = ()
    exclude: Exclude = ()
    kind: Kinds = ()
    output: OutputFile = None
    color: Colors = Color.AUTO
    quiet: Quiet = False
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
    bool, Option("Read all values again; do not use or update the cache of statistics.", group=OptionGroup.VALUES)
]
RunTargets = Annotated[
    tuple[str, ...],
    build_target("RUN", "Folders with the checkpoints of a run, globs in quotes, or checkpoints.", NamedKind.INPUT),
]


class LogOptions(OutputOptions, frozen=True, kw_only=True):
    """Print a line for each checkpoint of a training run. Each line has the norm of the weights and their change."""

    targets: RunTargets
    fail_on: FailOn = Severity.ERROR
    no_cache: NoCache = False
    top: Top = None


class BisectOptions(OutputOptions, frozen=True, kw_only=True):
    """Find the first checkpoint of a run where a condition holds. It must hold in all later checkpoints too."""

    targets: RunTargets
    condition: Annotated[
        str | None,
        Option(
            "Find the first checkpoint where CONDITION is true (required): nan, inf, 'changed GLOB' or 'cosine<0.9'. "
            "'changed GLOB' and 'cosine<0.9' compare with the first checkpoint of the run: true if a matching tensor "
            "changed, or if the cosine of all weights is below 0.9.",
            "CONDITION",
            suggestions=("nan", "inf", "changed *", "cosine<0.9"),
            aliases=("--first",),
        ),
    ] = None
    no_cache: NoCache = False


class ResumeCheckOptions(OutputOptions, frozen=True, kw_only=True):
    """Check that a resumed training equals an uninterrupted one. Reports state that the script does not restore."""

    target: Annotated[
        str,
        build_target(
            "SCRIPT::FUNCTION",
            "Training function of a script. statecli calls this function as main(steps=4, save_every=2, "
            "save_to=FOLDER, checkpoint=FILE or None).",
            NamedKind.FUNCTION,
        ),
    ]
    steps: Annotated[
        int,
        Option("Train N optimizer steps, then resume from the checkpoint of step N/2 and compare (N is even).", "N"),
    ] = 4


class WatchOptions(Options, frozen=True, kw_only=True):
    """Print a line for each new checkpoint once it is fully written. The command runs until Ctrl-C or --count lines."""

    targets: RunTargets
    interval: Annotated[float, Option("Look for new files every SECONDS.", "SECONDS")] = 5.0
    count: Annotated[int | None, Option("Exit after N lines.", "N", minimum=1)] = None
    history: Annotated[bool, Option("First print all checkpoints that exist already, not only the last one.")] = False
    fail_on_nan: Annotated[
        bool, Option("Exit with status 1 as soon as a tensor gets NaN or infinite values for the first time.")
    ] = False
    no_cache: NoCache = False
    output_format: Annotated[WatchFormat, _FORMAT] = WatchFormat.PLAIN
    debug: Debug = False


class BrowseOptions(Options, frozen=True, kw_only=True):
    """Browse the tensors of a checkpoint or model in the terminal. Does not change any file."""

    target: Annotated[str, build_target("TARGET", "A file, a folder, a URL or a model class.")]
    other: Annotated[str | None, build_target("[OTHER]", "A second target, to compare TARGET with.")] = None
    model: ModelClass = None
    init_device: InitDevice = None
    debug: Debug = False


class MergeOptions(OutputOptions, frozen=True, kw_only=True):
    """Merge the parts that --shard wrote. Output and exit status are those of the command without --shard."""

    parts: Annotated[
        tuple[str, ...],
        build_target(
            "PART",
            "The N files that --shard 1/N to N/N wrote.",
            NamedKind.INPUT,
            python_type="str | os.PathLike[str] | Iterable[str | os.PathLike[str]]",
        ),
    ]
    allow_code: Annotated[
        tuple[str, ...],
        Option(
            "Allow merge to import and run this model class or plugin (repeatable). Give this if the command with "
            "--shard used a class or plugin.",
            "SPEC",
            OptionGroup.DISTRIBUTION,
            argument="code",
            aliases=("--code",),
            names=NamedKind.TARGET,
        ),
    ] = ()
    url: Annotated[
        tuple[str, ...],
        Option(
            "Give the full URL of a checkpoint (repeatable). Part files do not contain passwords and signatures, so "
            "give URLs with a password or signature here.",
            "URL",
            OptionGroup.DISTRIBUTION,
        ),
    ] = ()
    copies: Annotated[
        bool,
        Option(
            "Accept parts that were made from separate copies of the files. Compares only the sizes and some bytes of "
            "the copies.",
            group=OptionGroup.DISTRIBUTION,
        ),
    ] = False
    jobs: Jobs = 0
    executor: Executor = None
    tree: Tree = False
    unchanged: Unchanged = False
    name_only: NameOnly = False
    name_status: NameStatus = False
    lines: Lines = None


class ReferenceOptions(Options, frozen=True, kw_only=True):
    """Output options of `rules` and `config`, which list facts about statecli itself."""

    output_format: ListFormat = None
    output: OutputFile = None
    color: Colors = Color.AUTO
    debug: Debug = False

    def __post_init__(self) -> None:
        """Set the output format from the suffix of the output file, unless `-f` gives a format."""
        _set_format_of_suffix(self, ListOutput)


class RulesOptions(ReferenceOptions, frozen=True, kw_only=True):
    """List the rules of all commands or of a group, or explain a rule."""

    name: Annotated[
        str | None, build_target("RULE", "A rule to explain, or a group to list, such as pickles.", NamedKind.RULE)
    ] = None
    plugin: Plugins = ()


class ConfigOptions(ReferenceOptions, frozen=True, kw_only=True):
    """Print the settings of audit, and which file sets each setting."""

    config: Config = None
    no_config: NoConfig = False


class SchemaOptions(Options, frozen=True, kw_only=True):
    """Print the JSON Schema of a command's JSON output."""

    command: Annotated[
        str,
        build_target(
            "COMMAND",
            "A command with JSON output: inspect, diff, verify, fix, audit, explain, rules, config, lock, log, bisect "
            "or resume-check.",
            NamedKind.SCHEMA,
        ),
    ]
    debug: Debug = False


class CompletionOptions(Options, frozen=True, kw_only=True):
    """Print a script that completes statecli in your shell."""

    shell: Annotated[Shell, build_target("SHELL", "Shell to complete in: bash, zsh, fish or powershell.", None)]
    debug: Debug = False


class SamplesOptions(Options, frozen=True, kw_only=True):
    """Write the sample models of the tutorial into a folder."""

    folder: Annotated[
        str,
        build_target("DIR", "Folder to write to. statecli creates the folder if it does not exist.", NamedKind.OUTPUT),
    ]
    debug: Debug = False


class GitSetupOptions(Options, frozen=True, kw_only=True):
    """Set up git diff for checkpoints in this repository. Writes .gitattributes and .git/config."""

    everywhere: Annotated[bool, Option("Set up git for all your repositories.", flag="--global")] = False
    remove: Annotated[bool, Option("Remove the settings that 'statecli git setup' wrote.")] = False
    debug: Debug = False


class GitTextconvOptions(Options, frozen=True, kw_only=True):
    """Print a line for each tensor, for git diff. If the file cannot be read, print the error as a line."""

    path: Annotated[
        str, build_target("FILE", names=NamedKind.INPUT, may_be_empty=True)
    ]  # for an empty path, the command prints a line with the error
    made_by: Annotated[
        str,
        Option(
            "Set by `statecli git setup`, not by hand: the version of statecli. A new version makes git discard its "
            "cached diff text.",
            "TEXT",
            may_be_empty=True,
        ),
    ] = ""


class GitExternalDiffOptions(Options, frozen=True, kw_only=True):
    """Compare two versions of a file for git diff. If a file cannot be read, print the error as a line."""

    arguments: Annotated[
        tuple[str, ...],
        build_target(
            "ARGUMENT",
            "Path, then file, hash and mode of the old version and of the new version, as passed by git.",
            None,  # a file named - is not standard input
            may_be_empty=True,
        ),
    ]


class GitDifftoolOptions(Options, frozen=True, kw_only=True):
    """Compare two versions of a file for git difftool. If a file cannot be read, print the error as a line."""

    before: Annotated[str, build_target("LOCAL", "The old version of the file.", NamedKind.INPUT)]
    after: Annotated[str, build_target("REMOTE", "The new version of the file.", NamedKind.INPUT)]
    name: Annotated[str, build_target("[NAME]", "Path of the file in the repository.", None, may_be_empty=True)] = (
        ""  # git passes an empty text if it compares two folders
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

#: Name of the command by its class of options.
COMMAND_NAMES: dict[type, str] = {options: name for name, options in COMMANDS.items()}
