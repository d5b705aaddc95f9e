"""Describe live models as `ModelState`: build a class, list its tensors, and measure which tensors move or are saved.

Importing this package imports no torch. Most of its modules import torch, so they are imported when they are first used
(`live.build.build(…)` after `from statecli import live`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.live import (
        assignment_lines as assignment_lines,
        build as build,
        config_document as config_document,
        configured_model as configured_model,
        fake_gpu as fake_gpu,
        fake_gpu_values as fake_gpu_values,
        hf_auto as hf_auto,
        import_model as import_model,
        load_state_dict as load_state_dict,
        measure as measure,
        model_reader as model_reader,
        quantized_parameters as quantized_parameters,
        rebuild as rebuild,
        skip_random_init as skip_random_init,
        spec_arguments as spec_arguments,
        tensors as tensors,
        torch_settings as torch_settings,
        weights_only as weights_only,
    )
else:
    __getattr__ = import_on_use(__name__)
