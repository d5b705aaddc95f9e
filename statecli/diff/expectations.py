"""What makes a diff exit 1: every difference, or where something was expected, each expectation that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from statecli.diff import fields, scalars
from statecli.diff.result import Broken, Change, Field, ScalarChange, Status
from statecli.errors import NothingMatched
from statecli.finding import Finding, Severity
from statecli.inspection import matches_any

#: Names of a glob's tensors that one finding lists.
SHOWN = 3


class Expected(msgspec.Struct, frozen=True):
    """What the user expects: globs, each option a union."""

    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is expected."""
        return bool(self.only or self.frozen or self.changed)


def failures(
    expected: Expected,
    changes: Sequence[Change],
    beside: Sequence[ScalarChange],
    broken: Sequence[Broken],
    targets: tuple[str, str],
    settings: frozenset[str] = frozenset(),
) -> list[Finding]:
    """One finding for what is outside `only` or inside `frozen` and not identical, tensors and numbers beside them,
    and one for each glob of `changed` in which no value changed.

    A tensor goes by both its names where its bytes were found under another one, and is inside only if both are;
    where a prefix was looked through, either name will do. Raises NothingMatched for a glob without any tensor.
    """
    _check(expected, changes, settings | {one.key for one in beside}, broken, targets)
    found: list[Finding] = []
    for change in changes:
        if change.status is Status.IDENTICAL:
            continue
        if expected.only and not _inside(change, expected.only, every=True):
            found.append(_finding("outside-only", change, targets, f"outside --only {_globs(expected.only)}: "))
        if expected.frozen and _inside(change, expected.frozen, every=False):
            found.append(_finding("frozen-changed", change, targets, "expected to be frozen: "))
    for one in beside:
        if expected.only and not matches_any(one.key, expected.only):
            why = f"outside --only {_globs(expected.only)}: "
            found.append(Finding("outside-only", Severity.ERROR, why + scalars.described(one), targets[1]))
        if expected.frozen and matches_any(one.key, expected.frozen):
            message = f"expected to be frozen: {scalars.described(one)}"
            found.append(Finding("frozen-changed", Severity.ERROR, message, targets[1]))
    found.extend(_unchanged(expected, changes, beside, broken, targets))
    return found


def _matching(beside: Sequence[ScalarChange], glob: str) -> Iterator[bool]:
    return (matches_any(one.key, (glob,)) for one in beside)


def _check(
    expected: Expected,
    changes: Sequence[Change],
    settings: frozenset[str],
    broken: Sequence[Broken],
    targets: tuple[str, str],
) -> None:
    held = {name for change in changes for name in names(change)} | {one.fqn for one in broken}
    held |= settings
    for option in ("only", "frozen", "changed"):
        for glob in getattr(expected, option):
            if not any(matches_any(name, (glob,)) for name in held):
                count = len(changes) + len(broken)
                raise NothingMatched(
                    f"--{option} {glob!r}: matches none of the {count} names of {' and '.join(targets)}"
                )


def names(change: Change) -> tuple[str, ...]:
    """The name of a changed tensor, and its name before where that was another."""
    return (change.fqn,) if change.renamed_from is None else (change.fqn, change.renamed_from)


def _inside(change: Change, globs: Sequence[str], *, every: bool) -> bool:
    inside = [matches_any(name, globs) for name in names(change)]
    return all(inside) if every and change.status is Status.RENAMED else any(inside)


def _unchanged(
    expected: Expected,
    changes: Sequence[Change],
    beside: Sequence[ScalarChange],
    broken: Sequence[Broken],
    targets: tuple[str, str],
) -> Iterator[Finding]:
    for glob in expected.changed:
        inside = [change for change in changes if _inside(change, (glob,), every=False)]
        # Of a tensor that could not be read nobody can say that it did not change.
        unknown = any(matches_any(one.fqn, (glob,)) for one in broken)
        if unknown or any(Field.VALUES in change.fields for change in inside) or any(_matching(beside, glob)):
            continue
        more = f" and {len(inside) - SHOWN} more" if len(inside) > SHOWN else ""
        shown = ", ".join(change.fqn for change in inside[:SHOWN]) + more
        one = inside[0] if len(inside) == 1 else None
        yield Finding(
            "unchanged",
            Severity.ERROR,
            f"--changed {glob!r}: no value in it changed: {shown or 'settings'}",
            targets[1],
            one.fqn if one else None,
            None,
            one.section if one else None,
        )


def _globs(globs: Sequence[str]) -> str:
    return " ".join(repr(glob) for glob in globs)


def differences(changes: Sequence[Change], found: Sequence[ScalarChange], targets: tuple[str, str]) -> list[Finding]:
    """One finding for each tensor that is not identical and for each scalar that differs."""
    tensors = [_finding(c.status.value, c, targets, "") for c in changes if c.status is not Status.IDENTICAL]
    return tensors + [Finding("metadata", Severity.ERROR, scalars.described(one), targets[1]) for one in found]


def _finding(rule: str, change: Change, targets: tuple[str, str], why: str) -> Finding:
    target = targets[0] if change.status is Status.REMOVED else targets[1]
    message = f"{change.fqn}: {why}{fields.described(change)}"
    return Finding(rule, Severity.ERROR, message, target, change.fqn, None, change.section)
