"""What can be asked on the command line, as plain data: what every parser makes and `cli` acts on."""

from __future__ import annotations

from enum import Enum

import msgspec

from statecli.render import Output
from statecli.state import Kind


class Color(str, Enum):
    """`auto` is on a terminal, unless NO_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class InspectOptions(msgspec.Struct, frozen=True):
    """`statecli inspect`; a field an option, by the option's name."""

    target: str
    to: str | None = None
    cuda: bool = False
    model: str | None = None
    stats: bool = False
    all: bool = False
    tree: bool = False
    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    output_format: Output = Output.TABLE
    output: str | None = None
    color: Color = Color.AUTO
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False
    debug: bool = False
