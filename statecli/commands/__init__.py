"""A package for each command: its request, its result and the steps between.

The packages lie below this package because statecli.inspect, statecli.diff and statecli.verify are functions of the
Python API.
"""
