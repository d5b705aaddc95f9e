"""Recognise transformations of tensors, such as casts and moves. Each claim is checked on every element.

`find.py` runs the modules in turn on the changes left unexplained by the plain diff. Each module forms hypotheses of a
kind from names, shapes and statistics. `values/element_checks.py` reads the tensors to test the hypotheses.
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use
from statecli.values.require_numpy import require_numpy

if TYPE_CHECKING:
    from statecli.commands.diff.transformations import find as find, merges as merges, views as views
else:
    __getattr__ = import_on_use(__name__, require_numpy)
