"""Regular expressions compiled on their first use, because a command uses few of its imported expressions."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    import re
    from typing import Any, AnyStr


class _LazyPattern:
    """Stand-in for a compiled pattern. Its methods become the compiled pattern's methods on their first use."""

    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self.pattern = pattern
        self.flags = flags

    def __getattr__(self, name: str) -> Any:
        import re

        method = getattr(re.compile(self.pattern, self.flags), name)
        setattr(self, name, method)
        return method


def compile_on_use(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a pattern that is compiled on its first use, for module constants. Functions of `re` do not accept it."""
    return _LazyPattern(pattern, flags)  # type: ignore[return-value]
