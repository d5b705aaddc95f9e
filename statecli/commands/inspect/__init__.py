"""The command inspect: the tensors of a target, and findings about them."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.commands.inspect import (
        forward_harm as forward_harm,
        quantized as quantized,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
