"""What is asked of a module's `load_state_dict`, and what it answers. torch is not imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from statecli.core.state import TensorInfo


class Entries(msgspec.Struct, frozen=True):
    """A state_dict in words: its tensors by name, the keys of other values, and its `_metadata`.

    `as_saved`: metadata and extra state are those that a `state_dict()` of the module itself has.
    """

    tensors: Mapping[str, TensorInfo]
    others: Sequence[str] = ()
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    as_saved: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What a strict load says: names it misses, does not expect, and whose shapes do not fit; then torch's other words,
    with the name they are about where there is one. All empty where it loads.

    `extra` are the modules' extra states that were there; whether `set_extra_state` takes them is not tried. Of a model
    of transformers: `unsaved` are names that it neither saves nor misses, `unread` those that it passes over,
    `converted` names that it makes into others, which were missing, on load.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    refused: tuple[tuple[str | None, str], ...] = ()
    extra: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    converted: Mapping[str, tuple[str, ...]] = {}
