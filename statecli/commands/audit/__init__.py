"""`statecli audit`: rules over checkpoints and model classes.

    targets ──▶ Subject (what rules may look at) ──▶ rules ──▶ Audit

`run.py` is one run of it, `subject.py` and `rule.py` what a rule is given and what it is, `config.py` and `policy.py`
what a project asks for, `result.py` the types of the answer. The rules themselves are in `statecli/rules/`.
"""
