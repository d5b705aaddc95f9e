"""Names of module attributes that torch uses (`_graph`). A program must not give such a name to a tensor or submodule.

torch assigns the constants of a program to the module by the names in the signature, over any other attribute. The
modules of `torch.export.unflatten` call each other by their paths. A test compares the list with the installed torch.
Sources: torch/export/_unlift.py (`_register_attrs_to_new_gm`), torch/export/unflatten.py of torch 2.13.
"""

from __future__ import annotations

from statecli.pickle_scan import name_lists

MODULE_ATTRIBUTES = name_lists.read_operators("modules")["attributes"]


def find_module_attribute(name: str) -> str | None:
    """Return the first part of a dotted name that is an attribute of modules; None without such a part."""
    parts = name.split(".")
    return next((part for part in parts if part in MODULE_ATTRIBUTES or part.startswith("__")), None)
