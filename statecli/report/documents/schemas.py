"""JSON Schema of each document, generated from its type. `make docs` writes the schemas for `schema_texts`."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from statecli.commands.lock.lock_file import Lock
from statecli.core.documentation import schema_url
from statecli.report.documents.audit import AuditDocument
from statecli.report.documents.bisect import BisectDocument
from statecli.report.documents.config import ConfigDocument
from statecli.report.documents.diff import DiffDocument
from statecli.report.documents.explain import ExplainDocument
from statecli.report.documents.fix import FixDocument
from statecli.report.documents.inspect import InspectDocument
from statecli.report.documents.log import LogDocument
from statecli.report.documents.resume_check import ResumeCheckDocument
from statecli.report.documents.rules import RulesDocument
from statecli.report.documents.verify import VerifyDocument

#: Type of the JSON document by command; `statecli schema COMMAND` prints its schema.
DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "inspect": InspectDocument,
    "diff": DiffDocument,
    "verify": VerifyDocument,
    "fix": FixDocument,
    "audit": AuditDocument,
    "explain": ExplainDocument,
    "rules": RulesDocument,
    "config": ConfigDocument,
    "lock": Lock,
    "log": LogDocument,
    "bisect": BisectDocument,
    "resume-check": ResumeCheckDocument,
}


#: Version of each document, as in its key `schema`, unless the version is 1.
_DOCUMENT_VERSIONS: dict[str, int] = {}


_NULL = {"type": "null"}


def get_version(command: str) -> int:
    """Return the version of a command's document. The version grows if a key is removed or changes its meaning."""
    return _DOCUMENT_VERSIONS.get(command, 1)


def encode_schemas() -> str:
    """Return the text of `schemas.txt`: each schema below the name of its command."""
    return "".join(f"# {command}\n{encode_schema(command).decode()}" for command in DOCUMENTS)


def encode_schema(command: str) -> bytes:
    """Return the JSON Schema (2020-12) of a command's document, generated from its type.

    The bytes are the same with every Python.
    """
    made_by = "statecli lock" if command == "lock" else f"statecli {command} -f json"
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": schema_url(command, get_version(command)),
        "title": made_by,
        **msgspec.json.schema(DOCUMENTS[command]),
    }
    return msgspec.json.format(msgspec.json.encode(_normalize(schema)), indent=2) + b"\n"


def _normalize(schema: object) -> Any:
    """Return the schema in a form that does not depend on the release of Python or msgspec.

    Python 3.13 keeps docstrings without the indentation of the source. Releases of msgspec differ in the order of
    alternatives.
    """
    if isinstance(schema, list):
        return [_normalize(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    normal = {key: _normalize(value) for key, value in schema.items()}
    if isinstance(normal.get("description"), str):
        normal["description"] = inspect.cleandoc(normal["description"])
    if "anyOf" in normal:
        normal["anyOf"] = sorted(normal["anyOf"], key=lambda item: (item == _NULL, msgspec.json.encode(item)))
    return normal
