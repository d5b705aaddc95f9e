"""Remove relative entries from Python's search path at the start, because the current folder may be hostile.

The start of every command imports this module, so it imports only what Python has loaded.
"""

from __future__ import annotations

import os
import sys

#: Folder that contains the package `statecli`: site-packages, or a checkout.
HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Entries that `drop_relative_entries` removed from the path. Code named by the user may still import from them.
DROPPED_ENTRIES: list[str] = []


def drop_relative_entries() -> None:
    """Remove relative entries of `sys.path` and PYTHONPATH from `sys.path`, for the rest of the process."""
    setting = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    try:
        relative = {
            os.path.abspath(entry) for entry in setting.split(os.pathsep) if setting and not os.path.isabs(entry)
        }
        # PYTHONPATH is compared too, because Python has made its entries absolute in sys.path.
        dropped_entries = [
            entry for entry in sys.path if not os.path.isabs(entry) or os.path.abspath(entry) in relative - {HOME}
        ]
    except OSError:  # the current folder has been removed, and a relative entry leads nowhere
        return
    sys.path[:] = [entry for entry in sys.path if entry not in dropped_entries]
    DROPPED_ENTRIES.extend(dropped_entries)
