"""`statecli lock`: what tensors a checkpoint has and a digest of each, in a file that git merges and people review.

`file.py` is the lock file, `making.py` a run of the command, `holding.py` what became of a checkpoint since it was
locked, which the rule `lock-mismatch` of `audit --lock` tells.
"""
