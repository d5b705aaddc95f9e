"""What makes a diff exit 1: every difference, or where something was expected, each expectation that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from statecli.commands.diff import changed_fields, rules
from statecli.commands.diff import settings as scalars
from statecli.commands.diff.result import Broken, Change, Field, ScalarChange, Status
from statecli.core.errors import NothingMatched
from statecli.core.finding import Finding
from statecli.core.rule import Rule
from statecli.core.selection import glob_names, matches_any
from statecli.formats.torch.settings import MORE

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


class Entry(msgspec.Struct, frozen=True):
    """A tensor or a setting that was asked for, as the expectations see it.

    `sides` has the names by which a glob may know it, a tuple for each side that calls it otherwise; `moved`: it is
    inside a glob only if both are. `what` says how it differs, "" where it does not, and `rule` what a finding on that
    is called; `changed` is what counts for `--changed`, None where nobody can tell.
    """

    fqn: str
    section: str | None
    target: str
    sides: tuple[tuple[str, ...], ...]
    rule: Rule | None = None
    what: str = ""
    changed: bool | None = False
    moved: bool = False

    def inside(self, globs: Sequence[str], *, wholly: bool = False) -> bool:
        """Whether one of the globs matches: `wholly`, of what was moved, at both its places."""
        found = [matches_any(names, globs) for names in self.sides]
        return all(found) if wholly and self.moved else any(found)

    def finding(self, rule: Rule, why: str = "") -> Finding:
        """Report under `rule` how it differs, with the reason `why` before it."""
        message = f"{self.fqn}: {why}{self.what}"
        return rule.finding(message, target=self.target, fqn=self.fqn, section=self.section)


def of_tensors(
    changes: Iterable[Change], broken: Iterable[Broken], targets: tuple[str, str], *, sectioned: bool, values: bool
) -> Iterator[Entry]:
    """The tensors that were compared, and those that could not be. `values`: whether their values were, where equal."""
    for change in changes:
        removed = change.status is Status.REMOVED
        sides = [glob_names(change.fqn, change.section, by_section=sectioned)]
        if change.renamed_from is not None or (change.before and change.before.section != change.section):
            section = change.before.section if change.before else change.section
            sides.append(glob_names(change.renamed_from or change.fqn, section, by_section=sectioned))
        yield Entry(
            change.fqn,
            change.section,
            targets[0] if removed else targets[1],
            tuple(sides),
            rules.BY_STATUS.get(change.status),
            "" if change.status is Status.IDENTICAL else changed_fields.described(change),
            _is_changed(change, values),
            change.status is Status.RENAMED,
        )
    for one in broken:
        names = glob_names(one.fqn, one.section, by_section=sectioned)
        yield Entry(one.fqn, one.section, targets[1], (names,), changed=None)


#: What changes when a layer is trained or resized. A cast that keeps all values is no training, nor are a device or
#: requires_grad.
_CHANGED = frozenset((Field.SHAPE, Field.VALUES))


def _is_changed(change: Change, values: bool) -> bool | None:
    if change.status is Status.ADDED or not _CHANGED.isdisjoint(change.fields):
        return True
    if change.status in (Status.REMOVED, Status.RENAMED):
        return False
    return False if values and change.not_compared is None else None


def of_settings(found: Iterable[ScalarChange], names: Iterable[str], targets: tuple[str, str]) -> Iterator[Entry]:
    """The settings that differ, and of those compared (`names`) the others."""
    differing = {one.key: one for one in found}
    for name in dict.fromkeys((*differing, *names)):
        one = differing.get(name)
        what = scalars.described(one).removeprefix(f"{name}: ") if one else ""
        changed = one is not None and one.status is not Status.REMOVED
        yield Entry(name, None, targets[1], ((name,),), rules.METADATA, what, changed)


def differences(entries: Iterable[Entry]) -> list[Finding]:
    """One finding for each tensor that is not identical and for each setting that differs."""
    return [one.finding(one.rule) for one in entries if one.what and one.rule]


def failures(
    expected: Expected, entries: Sequence[Entry], targets: tuple[str, str]
) -> tuple[list[Finding], list[Broken]]:
    """One finding for what is outside `only` or inside `frozen` and differs, and one for each glob of `changed` in
    which nothing changed; beside them, the globs of which that cannot be told.

    Raises NothingMatched for a glob that matches none of the entries.
    """
    _check(expected, entries, targets)
    found: list[Finding] = []
    for one in entries:
        if one.what and expected.only and not one.inside(expected.only, wholly=True):
            found.append(one.finding(rules.OUTSIDE_ONLY, f"outside --only {_globs(expected.only)}: "))
        if one.what and one.inside(expected.frozen):
            found.append(one.finding(rules.FROZEN_CHANGED, "expected to be frozen: "))
    unsure = list(_beyond(expected.frozen, entries))
    for glob in expected.changed:
        inside = [one for one in entries if one.inside((glob,))]
        if any(one.changed for one in inside):
            continue
        untold = [one for one in inside if one.changed is None]
        if untold:
            unsure.append(_untold(glob, untold))
        else:
            found.append(_unchanged(glob, inside, targets))
    return found, unsure


def _beyond(frozen: Sequence[str], entries: Sequence[Entry]) -> Iterator[Broken]:
    """The globs of settings of which some may be among those that are too many to be told one by one, and differ."""
    settings = [one for one in entries if one.section is None]
    more = next((one for one in settings if one.fqn == MORE and one.what), None)
    for glob in frozen if more else ():
        inside = [one for one in settings if one.inside((glob,))]
        if more and inside and glob not in {one.fqn for one in inside}:
            why = "more settings differ than are told one by one; name each that is meant"
            yield Broken(MORE, "", f"{more.target}: cannot tell whether --frozen {glob!r} holds: {why}")


def _check(expected: Expected, entries: Sequence[Entry], targets: tuple[str, str]) -> None:
    for option in ("only", "frozen", "changed"):
        for glob in getattr(expected, option):
            if not any(one.inside((glob,)) for one in entries):
                held = f"the {len(entries)} names that were compared of {' and '.join(targets)}"
                raise NothingMatched(f"--{option} {glob!r}: matches none of {held}")


def _unchanged(glob: str, inside: Sequence[Entry], targets: tuple[str, str]) -> Finding:
    message = f"--changed {glob!r}: nothing in it changed: {_listed(inside)}"
    fqn, section = (inside[0].fqn, inside[0].section) if len(inside) == 1 else (None, None)
    return rules.UNCHANGED.finding(message, target=targets[1], fqn=fqn, section=section)


def _untold(glob: str, untold: Sequence[Entry]) -> Broken:
    why = f"the values of {_listed(untold)} were not compared, and nothing else in it changed"
    message = f"{untold[0].target}: cannot tell whether --changed {glob!r} holds: {why}"
    return Broken(untold[0].fqn, untold[0].section or "", message)


def _listed(entries: Sequence[Entry]) -> str:
    more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return ", ".join(one.fqn for one in entries[:SHOWN]) + more


def _globs(globs: Sequence[str]) -> str:
    return " ".join(repr(glob) for glob in globs)
