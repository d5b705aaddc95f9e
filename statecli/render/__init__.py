"""Report -> text: a module for each output, with `write(report, sink, options)`. No renderer knows the command."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import msgspec

from statecli.core.denormals import with_denormals
from statecli.core.output import Output as Output
from statecli.report import Report


class RenderOptions(msgspec.Struct, frozen=True):
    """Options of an output: on a terminal or not, width in columns, in colour or not, failures only (`quiet`).

    `exit_status` is the status with which the command will exit; None without a command.
    """

    terminal: bool = False
    width: int = 80
    color: bool = False
    quiet: bool = False
    exit_status: int | None = None


class Sink(Protocol):
    """Target of a renderer: text for people, encoded by the sink, or bytes in UTF-8."""

    def text(self, text: str) -> None: ...

    def utf8(self, raw: bytes) -> None: ...


class Renderer(Protocol):
    """The module of an output in this package."""

    def write(self, report: Report, sink: Sink, options: RenderOptions) -> None: ...


class _TextSink:
    """A sink that keeps the output as text, in `parts`."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, text: str) -> None:
        self.parts.append(text)

    def utf8(self, raw: bytes) -> None:
        self.parts.append(raw.decode())


@with_denormals
def write(report: Report, output: Output | None, sink: Sink, options: RenderOptions) -> None:
    """Write the report in this format; None: a table on a terminal, else plain. Imports the renderer of that name."""
    output = output or (Output.TABLE if options.terminal else Output.PLAIN)
    cast(Renderer, import_module(f"statecli.render.{output.value}")).write(report, sink, options)


def format_report(report: Report, output: Output, options: RenderOptions) -> str:
    """Return the report in this format."""
    sink = _TextSink()
    write(report, output, sink, options)
    return "".join(sink.parts)
