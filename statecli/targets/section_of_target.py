"""Split the text of a target into its path and the section after `#`."""

from __future__ import annotations

import os

from statecli.storage import files


def split_section(text: str) -> tuple[str, str | None]:
    """Return the path and the section in a target's text. The section is None if the target is a whole checkpoint."""
    if os.path.lexists(text) or "#" not in text or files.is_listed(files.make_absolute(text)):
        return text, None
    path, _, section = text.rpartition("#")
    return path, section
