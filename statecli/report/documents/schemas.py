"""JSON Schema of each document, generated from its type."""

from __future__ import annotations

import msgspec

from statecli.commands.lock.lock_file import Lock
from statecli.core.errors import UsageError
from statecli.report.documents.audit import AuditDocument
from statecli.report.documents.bisect import BisectDocument
from statecli.report.documents.config import ConfigDocument
from statecli.report.documents.diff import DiffDocument
from statecli.report.documents.explain import ExplainDocument
from statecli.report.documents.inspect import InspectDocument
from statecli.report.documents.log import LogDocument
from statecli.report.documents.rules import RulesDocument
from statecli.report.documents.verify import VerifyDocument

#: Command -> the type of its JSON document; `statecli schema COMMAND` prints it.
DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "inspect": InspectDocument,
    "diff": DiffDocument,
    "verify": VerifyDocument,
    "audit": AuditDocument,
    "explain": ExplainDocument,
    "rules": RulesDocument,
    "config": ConfigDocument,
    "lock": Lock,
    "log": LogDocument,
    "bisect": BisectDocument,
}


def encode_schema(command: str) -> bytes:
    """Return the JSON Schema (2020-12) of a command's document, generated from its type."""
    if command not in DOCUMENTS:
        raise UsageError(f"the command {command!r} has no schema; commands with a schema: {', '.join(DOCUMENTS)}")
    schema = msgspec.json.schema(DOCUMENTS[command])
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"
