"""The command audit: rules over checkpoints and model classes.

    targets ──▶ Subject (what rules may look at) ──▶ rules ──▶ Audit

`run.py` is one run, `request.py` what it is asked to do, `config.py` what a project configures, `result.py` the types
of the answer. `references.py`, `lock_check.py` and `baseline.py` compare targets with a class or another checkpoint,
with a lock, and with what was accepted. The rules and what they are given are in `statecli/rules/`.
"""
