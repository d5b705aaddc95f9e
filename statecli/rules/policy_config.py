"""What a project asks of its checkpoints, as plain data: `[tool.statecli.policy]`."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: Of a size in bytes; JSON's readers know no larger whole number.
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Policy(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """Each is left alone where it is None or empty. Globs are of FQNs.

    `dtype` and `device` are those that floating-point tensors, and all tensors, may have; `frozen` and `trainable` must
    not and must require grad; `max_bytes` bounds the whole checkpoint; `require_metadata` are keys; `must_change` and
    `must_not_change` hold against `reference`, a checkpoint.
    """

    dtype: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    max_bytes: _Size | None = None
    require_metadata: tuple[str, ...] = ()
    must_change: tuple[str, ...] = ()
    must_not_change: tuple[str, ...] = ()
    reference: str | None = None
