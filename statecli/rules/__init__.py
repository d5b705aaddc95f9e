"""The rules of `audit`, a module for each subject; `dictionary` joins them with the rules of the other commands.

Importing this package imports nothing.
"""
