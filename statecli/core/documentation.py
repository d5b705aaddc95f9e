"""Addresses of pages of the documentation."""

from __future__ import annotations

#: Address of the site of `make site`, with a slash at the end. The host is a placeholder (RFC 2606): set the address
#: here before a release. SARIF, `statecli rules NAME` and the site itself take the address from here; the terminal
#: shows no placeholder.
DOCUMENTATION_URL = "https://statecli.example/"


def is_published() -> bool:
    """Return True if `DOCUMENTATION_URL` is a real address instead of the placeholder."""
    return not DOCUMENTATION_URL.endswith(".example/")


def rule_url(name: str) -> str:
    """Return the address of a rule's documentation page."""
    return f"{DOCUMENTATION_URL}reference/rules/{name}.html"


def schema_url(command: str, version: int) -> str:
    """Return the address of the JSON Schema of a command's output. Each schema version has its own address."""
    return f"{DOCUMENTATION_URL}schemas/{command}-{version}.json"
