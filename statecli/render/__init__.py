"""Write a report as text. Each output has a module with `write(report, sink, options)`, the same for all commands."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import msgspec

from statecli.core.denormals import with_denormals
from statecli.core.output import Output as Output
from statecli.report import Report


class RenderOptions(msgspec.Struct, frozen=True):
    """Options of an output: whether it is a terminal, its width in columns, and whether it has colours.

    `quiet` shows only failures. `exit_status` is the status with which the command will exit; None if unknown.
    """

    terminal: bool = False
    width: int = 80
    color: bool = False
    quiet: bool = False
    exit_status: int | None = None


class Sink(Protocol):
    """Target of a renderer. `text` writes text in the output's encoding; `utf8` writes bytes that are UTF-8 already."""

    def text(self, text: str) -> None: ...

    def utf8(self, raw: bytes) -> None: ...


class Renderer(Protocol):
    """Module of this package that writes an output format."""

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
    """Write the report in the format `output`. None means a table on a terminal, and plain rows elsewhere."""
    output = output or (Output.TABLE if options.terminal else Output.PLAIN)
    cast(Renderer, import_module(f"statecli.render.{output.value}")).write(report, sink, options)


def format_report(report: Report, output: Output, options: RenderOptions) -> str:
    """Return the report in this format."""
    sink = _TextSink()
    write(report, output, sink, options)
    return "".join(sink.parts)
