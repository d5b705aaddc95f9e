"""The version of statecli: of its results, shard files and workers as well as of the package."""

from __future__ import annotations

__version__ = "0.1.0"
