"""Output formats by name, colours, and the orders of rows. `render` has a module for each format."""

from __future__ import annotations

from enum import Enum


class Output(str, Enum):
    """Output formats: the values of `-f`."""

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


class Color(str, Enum):
    """When to use colours. `auto`: on a terminal, unless NO_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class TensorOrder(str, Enum):
    """Orders in which `inspect` can list rows."""

    NAME = "name"
    SIZE = "size"


class ChangeOrder(str, Enum):
    """Orders in which `diff` can list rows."""

    NAME = "name"
    SIZE = "size"
    CHANGE = "change"
