"""What can be asked on the command line, as plain data: what every parser makes and `cli` acts on."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from statecli.commands.diff.result import Field
from statecli.commands.verify.result import Name
from statecli.core.errors import UsageError
from statecli.core.finding import Severity
from statecli.core.state import Kind
from statecli.render import Output
from statecli.values.algorithm import Algorithm

#: How a GPU is named, as a regular expression.
CUDA = r"cuda(?::(?:0|[1-9]\d{0,3}))?"


class Color(str, Enum):
    """`auto` is on a terminal, unless NO_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a result is shown, and where; a field an option, by the option's name. `timeout` in seconds."""

    all: bool = False
    output_format: Output = Output.TABLE
    output: str | None = None
    report: tuple[str, ...] = ()
    color: Color = Color.AUTO
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False
    debug: bool = False
    timeout: float | None = None


class SharedOptions(OutputOptions, frozen=True, kw_only=True):
    """What every command that reads a target takes."""

    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()


class InspectOptions(SharedOptions, frozen=True, kw_only=True):
    """`statecli inspect`. `input` () and `inputs` None: forward is not called. `executor` as in `engines`,
    `shard` "3/8" as in `sharing`.
    """

    target: str
    to: str | None = None
    cuda: bool = False
    model: str | None = None
    stats: bool = False
    tree: bool = False
    executor: str | None = None
    shard: str | None = None
    input: tuple[str, ...] = ()
    inputs: str | None = None


class DiffOptions(SharedOptions, frozen=True, kw_only=True):
    """`statecli diff`. `jobs` 0: the cores; `lines` None: every line; `executor`, from Python, may be one."""

    before: str
    after: str
    map: tuple[str, ...] = ()
    ignore: tuple[Field, ...] = ()
    bitwise: bool = False
    atol: float = 0.0
    rtol: float = 0.0
    metadata_only: bool = False
    no_renames: bool = False
    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    tree: bool = False
    name_only: bool = False
    name_status: bool = False
    lines: int | None = None
    device: str = "cpu"
    jobs: int = 0
    executor: Any = None
    shard: str | None = None


class VerifyOptions(SharedOptions, frozen=True, kw_only=True):
    """`statecli verify`. `check` (): every proof; `device` None: a GPU where there is one, else a pretended one."""

    target: str
    check: tuple[Name, ...] = ()
    device: str | None = None
    dtype: str | None = None
    optimizer: str | None = None
    input: tuple[str, ...] = ()
    inputs: str | None = None


class AuditOptions(SharedOptions, frozen=True, kw_only=True):
    """`statecli audit`. `fail_on` None: as the configuration says, else warnings."""

    targets: tuple[str, ...]
    model: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity | None = None
    values: bool = False
    no_values: bool = False
    lock: str | None = None
    frozen_only: bool = False
    weights_only: bool = False
    against: str | None = None
    baseline: str | None = None
    write_baseline: str | None = None
    reason: str | None = None
    config: str | None = None
    no_config: bool = False
    allow_empty: bool = False
    as_found: bool = False
    jobs: int = 0
    executor: str | None = None
    shard: str | None = None


class LockOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`statecli lock`. What a lock looks like is nobody's choice: it has none of the options of outputs."""

    targets: tuple[str, ...]
    digest: Algorithm = Algorithm.BLAKE3
    jobs: int = 0
    executor: str | None = None
    shard: str | None = None
    weights_only: bool = False
    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    output: str | None = None
    color: Color = Color.AUTO
    quiet: bool = False
    no_progress: bool = False
    debug: bool = False
    timeout: float | None = None


class MergeOptions(OutputOptions, frozen=True, kw_only=True):
    """`statecli merge`. Its command has not each of these outputs: what it has not is refused.

    `code` are the classes of the parts that may be imported, `url` the URLs of the parts as they were typed. `copies`:
    each job had a copy of its own of the files.
    """

    parts: tuple[str, ...]
    code: tuple[str, ...] = ()
    url: tuple[str, ...] = ()
    copies: bool = False
    jobs: int = 0
    executor: Any = None
    tree: bool = False
    name_only: bool = False
    name_status: bool = False
    lines: int | None = None


#: Globs of names of tensors: a name may be empty.
_GLOBS = frozenset(["include", "exclude", "map", "only", "frozen", "changed"])
#: What has no dashes on the line.
_TARGETS = frozenset(["target", "targets", "before", "after", "parts"])


def refuse_empty(options: msgspec.Struct) -> None:
    """Raises UsageError for a target or an option that is given as the empty text.

    An unset variable of a script makes one: taken for "not given", `--lock "$LOCK"` would hold nothing to any lock.
    """
    for field in options.__struct_fields__:
        value = getattr(options, field)
        if field not in _GLOBS and (value == "" or (isinstance(value, tuple) and "" in value)):
            refuse_nothing("", "a target" if field in _TARGETS else f"--{field.replace('_', '-')}")


def refuse_nothing(text: str | None, what: str) -> None:
    """Raises UsageError where the text is there and empty."""
    if text == "":
        raise UsageError(f"{what}: is empty; name something, or leave it out")
