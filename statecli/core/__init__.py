"""Modules that all packages use: state, findings, errors, dtypes, kinds of tensors, suggestions, and safe text.

Modules that few runs need are imported when they are first used (`core.input_text.parse_inputs(…)`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.core import (
        input_text as input_text,
        model_kinds as model_kinds,
        python_arguments as python_arguments,
        python_names as python_names,
        quantized_layouts as quantized_layouts,
        quantized_weights as quantized_weights,
        target_suggestions as target_suggestions,
    )
else:
    __getattr__ = import_on_use(__name__)
