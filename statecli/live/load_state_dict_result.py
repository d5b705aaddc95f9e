"""Input and result of trying a module's `load_state_dict`. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from statecli.core.model_state import TensorInfo


class Entries(msgspec.Struct, frozen=True):
    """A state_dict without values: tensors by name, keys of other values, and `_metadata`.

    `as_saved`: metadata and extra state come from the module's own `state_dict()`.
    """

    tensors: Mapping[str, TensorInfo]
    others: Sequence[str] = ()
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    as_saved: bool = False


class LoadReport(msgspec.Struct, frozen=True):
    """Report of a strict load: missing names, unexpected names, names with a wrong shape, and torch's other messages.

    All are empty if the load succeeds. A message in `refused` has its name if it is about a single name. `extra`: extra
    states in the modules, not tested with `set_extra_state`. For a model of transformers: `unsaved`: names that it does
    not save or may lack; `unread`: names that it ignores; `converted`: names converted on load into missing names.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    refused: tuple[tuple[str | None, str], ...] = ()
    extra: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    converted: Mapping[str, tuple[str, ...]] = {}
