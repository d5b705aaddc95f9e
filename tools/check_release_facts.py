"""Check that no fact about a release is missing or contradicts another.

    python tools/check_release_facts.py v0.1.0      the tag that is released

Prints a line for each wrong fact; exits with 1 if it finds any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_problems(tag: str) -> list[str]:
    """Return a line for each fact that is missing or contradicts another."""
    version = read(r'^__version__ = "(.*)"', "statecli/core/version.py")
    problems = []
    if tag != f"v{version}":
        problems.append(f"statecli/core/version.py: the version is {version}, and the tag is {tag}")
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        problems.append(f"CHANGELOG.md: has no section [{version}]: rename [Unreleased], with the date")
    for path in ("pyproject.toml", "statecli/core/documentation.py"):
        for host in re.findall(r'"(?:https://|authors@)([^/"]*\.example)\b', (ROOT / path).read_text("utf-8")):
            problems.append(f"{path}: {host} is a placeholder: write the real address")
    return problems


def read(pattern: str, path: str) -> str:
    """Return the first group of the pattern in a file."""
    found = re.search(pattern, (ROOT / path).read_text("utf-8"), re.MULTILINE)
    assert found is not None, path
    return found[1]


if __name__ == "__main__":
    problems = find_problems(sys.argv[1])
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    raise SystemExit(1 if problems else 0)
