"""Type of the callback that shows the progress of reading values."""

from __future__ import annotations

from collections.abc import Callable

#: Takes the bytes that will be read in all; returns a function to call with each tensor's FQN and size in bytes.
Progress = Callable[[int], Callable[[str, int], None]]
