"""A project's requirements on its checkpoints, as plain data: `[tool.statecli.policy]`."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: A size in bytes; readers of JSON know no larger whole number.
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Policy(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """Requirements on checkpoints. A field that is None or empty requires nothing. Globs match full tensor names.

    `dtype` are the allowed dtypes of floating-point tensors, `device` the allowed devices of all tensors; `frozen`
    tensors must not require grad, `trainable` tensors must; `max_bytes` bounds the whole checkpoint; `require_metadata`
    are keys; `must_change` and `must_not_change` compare with the checkpoint `reference`.
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
