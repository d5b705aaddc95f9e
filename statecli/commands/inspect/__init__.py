"""The command inspect: the tensors of a target, and findings about them."""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.inspect import forward_harm as forward_harm, quantized as quantized
else:
    __getattr__ = import_on_use(__name__)
