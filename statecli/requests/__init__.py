"""Run a command with its options and return its outcome.

`options.py` defines each option once, `parameters.py` reads that table, `run.py` does the common
steps of commands, and a module for each command turns its options into a request and its result into an outcome.

Modules that few runs need are imported when they are first used (`requests.shard_options.check_options(…)`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.requests import (
        audit as audit,
        match_accepted as match_accepted,
        merge as merge,
        shard_options as shard_options,
        sharded_run as sharded_run,
        suggested_fix_command as suggested_fix_command,
        unsafe_calls as unsafe_calls,
    )
else:
    __getattr__ = import_on_use(__name__)
