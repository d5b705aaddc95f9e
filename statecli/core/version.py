"""Version of statecli: of the package, its results, its shard files and its workers."""

from __future__ import annotations

__version__ = "0.1.0"
