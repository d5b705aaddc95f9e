"""`--shard i/n` and `statecli merge`: one command's work on the values, done by `n` processes that never meet.

    statecli diff A B --shard 1/2 ──▶ part 1 ┐
    statecli diff A B --shard 2/2 ──▶ part 2 ┴──▶ statecli merge ──▶ what `statecli diff A B` gives

Each share reads the headers of everything, plans all tasks of the value passes as the whole command does, and does its
own (`cut.py`); a part (`part.py`) has what came of them. `merge` (`merge.py`) runs the command once more, and looks up
each result where the command would have computed it. A share is no shard: those are files of a checkpoint.
"""
