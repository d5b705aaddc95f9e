"""One package a command: its request, its result and the steps between.

They lie below this package because statecli.inspect, statecli.diff and statecli.verify are functions of the Python API.
"""
