"""`statecli inspect`: list the tensors of a target, and report findings about them."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.inspect import harm_in_forward as harm_in_forward, quantized as quantized
else:
    __getattr__ = import_on_use(__name__)
