"""Read both targets of a diff. A large second file is read in another process at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from statecli import formats, live
from statecli.commands.diff.request import Request
from statecli.commands.diff.snapshot import StateDigests
from statecli.core.model_state import ModelState
from statecli.targets import load
from statecli.targets.section_of_target import split_section
from statecli.workers import pool

if TYPE_CHECKING:
    from statecli.live.built_model import BuiltModel

#: Smallest size in bytes of both files for reading the second file in another process, which costs a fiftieth of a
#: second. A long pickle takes time too, but only reading shows its length.
MIN_BYTES_FOR_PROCESS = 8 << 20


class StatePair(msgspec.Struct, frozen=True):
    """States of the two targets of a diff."""

    before: ModelState
    after: ModelState


def read_both(
    request: Request, built_models: dict[str, BuiltModel], snapshots: Mapping[str, StateDigests]
) -> StatePair:
    """Return the states of both targets. The modules of classes are added to `built_models`."""
    if snapshots:
        states = [
            snapshots[text].state if text in snapshots else _read_target(text, request, built_models)
            for text in (request.before, request.after)
        ]
        return StatePair(*states)
    sides = (request.before, request.after), (request.after, request.before)
    texts = [text if os.path.lexists(text) else load.resolve_auto_class(text, other) for text, other in sides]
    paths = list_target_paths(request)
    are_large = all(os.path.isfile(path) and os.path.getsize(path) >= MIN_BYTES_FOR_PROCESS for path in paths)
    if not are_large or request.jobs == 1 or not pool.can_fork() or formats.read_traits(paths[1]).is_header_and_tensors:
        return StatePair(*(_read_target(text, request, built_models) for text in texts))
    with pool.run_in_background(pack_checkpoint, texts[1]) as after:
        before, raw = _read_target(texts[0], request, built_models), after()
    return StatePair(before, unpack_checkpoint(raw) or _read_target(texts[1], request, built_models))


def list_target_paths(request: Request) -> list[str]:
    """Return the paths of both targets, without the sections."""
    return [split_section(text)[0] for text in (request.before, request.after)]


def pack_checkpoint(text: str) -> bytes:
    """Return the encoded state of a checkpoint, or b"" if msgpack cannot encode it (65-bit integer, surrogate)."""
    try:
        return msgspec.msgpack.encode(load.read_checkpoint(text))
    except (OverflowError, UnicodeEncodeError):
        return b""


def unpack_checkpoint(packed: bytes) -> ModelState | None:
    """Return the state that `pack_checkpoint` encoded, or None for b""."""
    return msgspec.msgpack.decode(packed, type=ModelState) if packed else None


def _read_target(text: str, request: Request, built_models: dict[str, BuiltModel]) -> ModelState:
    """Return the state of a target. The module of a class is added to `built_models`."""
    spec = load.find_class_spec(text)
    if spec is None:
        return load.read_checkpoint(text)
    built_models[text] = live.build.build(spec, init_device=request.init_device)
    return live.model_reader.read(built_models[text], text)
