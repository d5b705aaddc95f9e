"""Report -> text: one module an output, each with `write(report, sink, look)`. A renderer never knows the command."""

from __future__ import annotations

from enum import Enum
from types import ModuleType
from typing import Protocol

import msgspec

from statecli.core.float_mode import with_denormals
from statecli.render import csv, github, gitlab, html, json, jsonl, junit, markdown, plain, sarif, table
from statecli.report import Report


class Output(str, Enum):
    """What `-f` takes."""

    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MARKDOWN = "markdown"
    HTML = "html"
    SARIF = "sarif"
    JUNIT = "junit"
    GITHUB = "github"
    GITLAB = "gitlab"


class Look(msgspec.Struct, frozen=True):
    """How it will be seen: on a terminal or not, how many columns wide, in colour or not, with findings alone."""

    terminal: bool = False
    width: int = 80
    color: bool = False
    quiet: bool = False


class Sink(Protocol):
    """Where a renderer writes: text for people, encoded as the stream wants it, or bytes that are UTF-8 already."""

    def text(self, text: str) -> None: ...

    def utf8(self, raw: bytes) -> None: ...


#: A completeness test holds the folder against this table.
OUTPUTS: dict[Output, ModuleType] = {
    Output.TABLE: table,
    Output.PLAIN: plain,
    Output.JSON: json,
    Output.JSONL: jsonl,
    Output.CSV: csv,
    Output.MARKDOWN: markdown,
    Output.HTML: html,
    Output.SARIF: sarif,
    Output.JUNIT: junit,
    Output.GITHUB: github,
    Output.GITLAB: gitlab,
}


@with_denormals
def write(report: Report, output: Output, sink: Sink, look: Look) -> None:
    """Render. A table that goes to no terminal is plain."""
    if output is Output.TABLE and not look.terminal:
        output = Output.PLAIN
    OUTPUTS[output].write(report, sink, look)
