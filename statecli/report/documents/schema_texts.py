"""Read the JSON Schema of each document from `schemas.txt`, which `make docs` writes."""

from __future__ import annotations

import os

from statecli.core.errors import UsageError


def read_schemas() -> dict[str, str]:
    """Return the JSON Schema of each command with a document."""
    with open(os.path.join(os.path.dirname(__file__), "schemas.txt"), encoding="utf-8") as file:
        texts = f"\n{file.read()}".split("\n# ")[1:]
    return {command: f"{schema.rstrip()}\n" for command, _, schema in (text.partition("\n") for text in texts)}


def read_schema(command: str) -> bytes:
    """Return the JSON Schema (2020-12) of a command's document. Raises UsageError for a command without a document."""
    schemas = read_schemas()
    if command not in schemas:
        raise UsageError(f"the command {command!r} has no schema; commands with a schema: {', '.join(schemas)}")
    return schemas[command].encode()
