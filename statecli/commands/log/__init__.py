"""`statecli log`: the checkpoints of a training run, one after the other.

    targets ──▶ checkpoints in the order of their steps ──▶ figures of each, changes since the last ──▶ rows, modules

`checkpoints.py` finds and orders the checkpoints, `steps.py` reads their steps, `measure.py` reads values, `cache.py`
keeps the figures for the next run, `follow.py` adds one checkpoint after the other, `run.py` does these steps.
"""
