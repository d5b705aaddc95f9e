"""The command audit: rules over checkpoints and model classes.

    targets ──▶ Subject (the input of rules) ──▶ rules ──▶ Audit

`run.py` is a run, `request.py` its arguments, `config.py` the project's configuration, `result.py` the types of the
result. `references.py`, `lock_check.py` and `baseline.py` compare targets with a class or another checkpoint, with a
lock, and with accepted findings. The rules are in `statecli/rules/`.
"""
