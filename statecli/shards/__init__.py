"""`--shard i/n` and `statecli merge`: split a command's work on values over `n` separate processes.

    statecli diff A B --shard 1/2 ──▶ shard file 1 ┐
    statecli diff A B --shard 2/2 ──▶ shard file 2 ┴──▶ statecli merge ──▶ the output of `statecli diff A B`

Each shard reads all headers, plans the tasks of the whole command that read values, and does only its own tasks
(`partition.py`). A shard file (`shard_file.py`) contains their results. `merge` runs the command again, and takes these
results instead of computing them. This has nothing to do with the shards of a checkpoint, the files of
`formats/sharded.py`.
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use
from statecli.values.require_numpy import require_numpy

if not TYPE_CHECKING:
    __getattr__ = import_on_use(__name__, require_numpy)
