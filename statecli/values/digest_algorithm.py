"""The digest algorithms of `lock`."""

from __future__ import annotations

from enum import Enum


class Algorithm(str, Enum):
    """A digest algorithm; digests have 256 bits."""

    BLAKE3 = "blake3"
    SHA256 = "sha256"
