"""`statecli lock`: write a digest of each tensor of a checkpoint to a file that git can merge and people review.

`run.py` runs the command, and `lock_file.py` reads and writes the lock file. `companion_files.py` locks settings and
other files of a folder. `compare_lock.py` compares a checkpoint with the lock for `lock-mismatch` of `audit --lock`.
"""
