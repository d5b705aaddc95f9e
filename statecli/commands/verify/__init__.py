"""The command verify: the fate of each tensor when the model is moved, cast, saved, copied, trained and run.

Modules that import torch are imported when they are first used (`verify.live_model.build_copy(…)` after
`from statecli.commands import verify`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
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
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
