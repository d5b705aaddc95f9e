"""`statecli log`: report the checkpoints of a training run, in order.

    targets ──▶ checkpoints in the order of their steps ──▶ figures of each, changes since the last ──▶ rows, modules

`checkpoints.py` finds and orders the checkpoints, `steps.py` reads their steps, `measure.py` reads values, `cache.py`
keeps the figures for the next run, `follow.py` adds each checkpoint in turn, `run.py` does these steps.
"""
