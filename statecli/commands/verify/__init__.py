"""`statecli verify`: follow each tensor while the model is moved, cast, saved, copied, trained and run.

Modules that other commands use, most with torch, are imported when they are first used
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
