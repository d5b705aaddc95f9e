"""Run a command: options in, outcome out.

`options.py` defines each option once, `parameters.py` reads that table, `run.py` does the common
steps of commands, and a module for each command turns its options into a request and its result into an outcome.
"""
