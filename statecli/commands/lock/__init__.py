"""`statecli lock`: write a digest of each tensor of a checkpoint to a file that git can merge and people review.

`lock_file.py` is the file, `run.py` a run of the command, `companion_files.py` settings and other files of a folder,
`compare_lock.py` compares a checkpoint with the lock for the rule `lock-mismatch` of `audit --lock`.
"""
