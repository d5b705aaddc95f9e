"""The text of an exception that model code raised."""

from __future__ import annotations


def get_exception_text(error: BaseException | None) -> str:
    """Return `str(error)`, or a placeholder if the exception's own `__str__` raises (even SystemExit)."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 see above
        return "(its message cannot be shown)"
