"""Regular expressions that are compiled on their first use, because a command uses few of those that it imports."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    import re
    from typing import Any, AnyStr


class _LazyPattern:
    """Stands for a compiled pattern; its methods are those of the compiled pattern from their first use on."""

    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self.pattern = pattern
        self.flags = flags

    def __getattr__(self, name: str) -> Any:
        import re

        method = getattr(re.compile(self.pattern, self.flags), name)
        setattr(self, name, method)
        return method


def compile_on_use(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return the pattern, compiled when it is used. For module constants; `re` itself takes only compiled patterns."""
    return _LazyPattern(pattern, flags)  # type: ignore[return-value]
