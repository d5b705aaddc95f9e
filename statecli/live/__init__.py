"""Describe live models as `ModelState`: build a class, walk its tensors, measure which follow a move and get saved.

Importing this package imports nothing; calling its functions imports torch. Its modules are imported when they are
first used (`live.build.build(…)` after `from statecli import live`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from statecli.core.model_state import ModelState, Stats
    from statecli.live import (
        build as build,
        config_document as config_document,
        configured_model as configured_model,
        hf_auto as hf_auto,
        import_model as import_model,
        measure as measure,
        quantized_parameters as quantized_parameters,
        rebuild as rebuild,
        weights_only as weights_only,
    )
    from statecli.live.built_model import BuiltModel
    from statecli.live.load_state_dict_api import Answer, Entries
else:

    def __getattr__(name):
        """Import a module of this package."""
        from statecli.core.import_on_use import import_submodule

        return import_submodule(__name__, name)


def read(built: BuiltModel, target: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None) -> ModelState:
    """Describe every tensor of a built model: registered tensors in the order of its state_dict, then the rest.

    Measures `moves` and `saved`, and so overwrites the values of the instance. `stats_of` is called with each tensor
    before. Raises ModelError.
    """
    import torch

    from statecli.live import library_lines, model_reader

    with library_lines.hide_library_lines(), torch._C.DisableTorchFunctionSubclass():
        return model_reader.read(built, target, stats_of=stats_of)


def read_without_move(
    built: BuiltModel, target: str, why_not: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """Describe a live model that a copy would change; `why_not` is noted as the reason without a measured move.

    Raises ModelError.
    """
    import torch

    from statecli.live import library_lines, model_reader

    with library_lines.hide_library_lines(), torch._C.DisableTorchFunctionSubclass():
        return model_reader.read_without_move(built, target, why_not, stats_of=stats_of)


def move(
    built: BuiltModel, target: str, device: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """Describe a built model, call `module.to(device)`, and fill `after` of each tensor.

    Raises UsageError if the move would prove nothing or the device does not exist, ModelError if the model's own code
    fails.
    """
    import torch

    from statecli.live import library_lines, model_reader

    with library_lines.hide_library_lines(), torch._C.DisableTorchFunctionSubclass():
        return model_reader.move(built, target, device, stats_of=stats_of)


def load(built: BuiltModel, entries: Entries, *, by_from_pretrained: bool = True) -> Answer:
    """Return the answer of a strict `load_state_dict` to a state_dict of these names, shapes and dtypes.

    Runs the module's own hooks and overrides; torch's code copies no element. Raises ModelError if the model's code
    fails on tensors without values, or torch cannot create a tensor: the answer is then inconclusive.

    `by_from_pretrained`: leave out the objections overcome by `from_pretrained` of a model of transformers.
    """
    from statecli.live import load_state_dict

    return load_state_dict.load(built, entries, by_from_pretrained=by_from_pretrained)
