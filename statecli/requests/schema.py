"""Run `statecli schema`: print the JSON schema of a command's output."""

from __future__ import annotations

from statecli.report.documents.schema_texts import read_schema
from statecli.requests.options import SchemaOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: SchemaOptions, caller: Caller) -> Outcome[str]:  # noqa: ARG001 - the parameters of all commands
    """Return the schema of the command's JSON document."""
    return Outcome(options.command, content=(read_schema(options.command),))
