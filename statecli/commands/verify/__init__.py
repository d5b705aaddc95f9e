"""`statecli verify`: follow each tensor while the model is moved, cast, saved, copied, trained and run.

The modules are imported only when another command first uses them, because most of them import torch
(`verify.live_model.build_copy(…)` after `from statecli.commands import verify`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.verify import (
        first_forward as first_forward,
        forward_effects as forward_effects,
        inputs as inputs,
        live_model as live_model,
        model_under_test as model_under_test,
        rules as rules,
    )
else:
    __getattr__ = import_on_use(__name__)
