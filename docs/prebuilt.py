"""Write the files that are generated from tables of the package, so that a command does not import the tables.

`make docs` runs this, and tests compare the files with the tables.
"""

from __future__ import annotations

from pathlib import Path

import python_signatures

from statecli.cli import help_table
from statecli.report import rule_texts
from statecli.report.documents import schemas
from statecli.rules.dictionary import DICTIONARY

PACKAGE = Path(__file__).parents[1] / "statecli"


def main() -> None:
    """Write every file."""
    for path, text in build_files().items():
        path.write_text(text, "utf-8", newline="\n")


def build_files() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        PACKAGE / "cli" / "help_pages.txt": help_table.encode_pages(),
        PACKAGE / "report" / "rule_texts.json": rule_texts.encode_rule_texts(DICTIONARY.values()),
        PACKAGE / "report" / "documents" / "schemas.txt": schemas.encode_schemas(),
        **python_signatures.build_sources(PACKAGE),
    }


if __name__ == "__main__":
    main()
