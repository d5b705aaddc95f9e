"""Run a command: options in, outcome out.

`options.py` defines each option once, `parameters.py` reads that table, `run.py` does what every command does around
its own work, and a module a command turns its options into a request and its result into an outcome.
"""
