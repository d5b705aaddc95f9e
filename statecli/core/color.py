"""Whether an output has colours."""

from __future__ import annotations

import enum


class Color(str, enum.Enum):
    """When to use colours. `auto`: on a terminal, unless NO_COLOR is set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
