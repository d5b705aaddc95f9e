"""The package as it is installed: its name on the package index, and how to install its extras."""

from __future__ import annotations

import os
import sys

#: The name on the package index. The command and the import package are `statecli`; on the index, the name `statecli`
#: belongs to another project.
DISTRIBUTION = "torch-statecli"


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of the package."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def install_packages(*names: str, upgrade: bool = False) -> str:
    """Return the command that installs packages that are not in an extra of the package."""
    return " ".join(["pip install", *(["-U"] if upgrade else []), *names])


#: A module that only the package `statecli` of the other project has (seen in its release 0.5.0).
_FOREIGN_MODULE = "langchain_tools.py"


def describe_mixed_packages() -> str | None:
    """Return an error if the other project's package is installed too, because each replaces files of the other."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(folder, _FOREIGN_MODULE)):
        return None
    return (
        f"{folder}: the package statecli of another project is also installed, and has overwritten files; run: "
        f"pip uninstall statecli {DISTRIBUTION}, then: {install_packages(DISTRIBUTION)}"
    )


def check_import() -> None:
    """Raise ImportError if the package cannot be used; the command prints the same text as one line instead."""
    program = os.path.basename(sys.argv[0]).partition(".")[0] if sys.argv else ""
    # `-m`: Python is still looking for the module that it runs.
    problem = None if program in ("statecli", "-m") else describe_mixed_packages()
    if problem is not None:
        raise ImportError(problem)
