"""The rules that `audit` runs, one module a subject; `dictionary` joins them with the rules of the other commands.

Importing this package imports nothing.
"""
