"""What several ranks' files share: what was odd of them, told once, and a row for a rank that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from statecli.state import Evidence, Kind, ModelState, Oddity, TensorInfo


def noted(states: Mapping[str, ModelState]) -> list[Oddity]:
    """What was odd of the states, by the names of their ranks or files; once where it is the same in several."""
    where: dict[Oddity, list[str]] = {}
    for name, state in states.items():
        for odd in state.oddities:
            where.setdefault(odd, []).append(name)
    more = {odd: f" and {len(names) - 1} more" if len(names) > 1 else "" for odd, names in where.items()}
    return [replace(odd, message=f"{names[0]}{more[odd]}: {odd.message}") for odd, names in where.items()]


def lost(fqn: str, section: str, why: str) -> TensorInfo:
    """A row in place of all that a rank has. `why` is one line that begins with the file or the folder."""
    note = f"cannot be read: {why}"
    return TensorInfo(fqn, "unknown", None, 0, 0, section, Kind.OTHER, Evidence.CONVENTION, note=note, damage=why)
