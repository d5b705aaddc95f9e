"""Recognise the transformations of the tensors of a checkpoint: each claim is checked on every element.

`find.py` runs the modules in turn on the changes left unexplained by the plain diff; each module forms hypotheses of a
kind from names, shapes and statistics, and `values/element_checks.py` reads the tensors to test them.
"""
