"""Decide which differences make `statecli diff` exit with status 1.

Without expectations every difference is a finding. With the options below, a finding is a failed expectation:

- `--may-change GLOB`: a tensor or setting outside the globs differs.
- `--must-not-change GLOB`: a tensor or setting inside the globs differs.
- `--must-change GLOB`: no tensor or setting inside the glob changed.
- `--cast`: a tensor differs by more than an exactly rounded cast.
- `--adapter`: a tensor is not, up to rounding, the old tensor with the adapter merged.

A glob whose answer depends on values that were not compared is inconclusive: neither passed nor failed, exit status 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from statecli.commands.diff import changed_fields, rules, settings
from statecli.commands.diff.pairing import list_names
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import (
    Broken,
    Change,
    Field,
    MetExpectation,
    Rounding,
    ScalarChange,
    Status,
    Transformation,
    TransformationKind,
)
from statecli.core.errors import NothingMatched, option
from statecli.core.finding import Finding, Wording
from statecli.core.rule import Rule
from statecli.core.selection import glob_names, matches_any, suggest_glob
from statecli.core.setting_paths import MORE
from statecli.core.units import plural


class ExpectationResults(msgspec.Struct, frozen=True):
    """Findings that set exit status 1, inconclusive expectations that set exit status 2, and met expectations."""

    findings: list[Finding]
    inconclusive: list[Broken] = []
    met: tuple[MetExpectation, ...] = ()


class ExpectationEntry(msgspec.Struct, frozen=True):
    """A compared tensor or setting, with the facts that expectations check.

    Attributes:
        name: FQN of a tensor, dotted path of a setting.
        section: Section of a tensor; None for a setting.
        target: The file named in a finding.
        names_by_side: The names a glob may match, a tuple for each side with a different name.
        rule: The rule that reports the difference if no expectations are given.
        difference: How the two sides differ; empty for equal sides.
        trained: True if the value or shape changed or the entry was added, None if the values were not compared.
        renamed: True if the two sides use different names for the same bytes.
        beyond_cast: Why a differing tensor is not an exactly rounded cast; empty for such a cast and for equal sides.
        beyond_merge: The same for a merge of an adapter; an unchanged tensor may lack its update.
    """

    name: str
    section: str | None
    target: str
    names_by_side: tuple[tuple[str, ...], ...]
    rule: Rule | None = None
    difference: str = ""
    trained: bool | None = False
    renamed: bool = False
    beyond_cast: str = ""
    beyond_merge: str = ""

    def matches(self, globs: Sequence[str]) -> bool:
        """Return True if a glob matches the name on either side."""
        return any(matches_any(names, globs) for names in self.names_by_side)

    def stays_within(self, globs: Sequence[str]) -> bool:
        """Return True if a glob matches the name. For a renamed tensor, globs must match both the old and the new name.

        A tensor moved out of the allowed part of a model is a change outside of this part.
        """
        sides = [matches_any(names, globs) for names in self.names_by_side]
        return all(sides) if self.renamed else any(sides)

    def build_finding(self, rule: Rule, reason: str = "") -> Finding:
        """Build a finding from `reason`. If `reason` is empty or ends in a colon, add the difference."""
        difference = self.difference if not reason or reason.endswith(": ") else ""
        return self._build_finding(rule, Wording(f"{reason}{difference}", self.name))

    def build_forbidden_change(self, rule: Rule, relation: str, option: str) -> Finding:
        """Build the finding for a change that `option` forbids. `relation` is `matches` or `does not match`."""
        text = f"changed, but {relation} {option}: {self.difference}"
        return self._build_finding(rule, Wording(text, self.name, owner=option, short=self.difference))

    def _build_finding(self, rule: Rule, wording: Wording) -> Finding:
        return rule.finding(wording, target=self.target, fqn=self.name, section=self.section)


def iter_tensor_entries(
    changes: Iterable[Change],
    broken_pairs: Iterable[Broken],
    targets: tuple[str, str],
    *,
    sectioned: bool,
    values: bool,
) -> Iterator[ExpectationEntry]:
    """Yield an entry for each compared tensor, then for each tensor that could not be compared.

    `sectioned`: globs may name a tensor together with its section. `values`: False if values were not compared.
    """
    broken_pairs = tuple(broken_pairs)
    unchecked = {(tensor.fqn, tensor.section) for tensor in broken_pairs}
    for change in changes:
        removed = change.status is Status.REMOVED
        sides = [glob_names(change.fqn, change.section, by_section=sectioned)]
        if change.renamed_from is not None or (change.before and change.before.section != change.section):
            section = change.before.section if change.before else change.section
            sides.append(glob_names(change.renamed_from or change.fqn, section, by_section=sectioned))
        yield ExpectationEntry(
            change.fqn,
            change.section,
            targets[0] if removed else targets[1],
            tuple(sides),
            rules.BY_STATUS.get(change.status.value),
            "" if change.status is Status.IDENTICAL else changed_fields.describe_change(change),
            _was_trained(change, values),
            change.status is Status.RENAMED,
            _explain_beyond_cast(change),
            "" if (change.fqn, change.section) in unchecked else explain_beyond_merge(change),
        )
    for tensor in broken_pairs:
        names = glob_names(tensor.fqn, tensor.section, by_section=sectioned)
        yield ExpectationEntry(tensor.fqn, tensor.section, targets[1], (names,), trained=None)


#: Beginnings of the names of dtypes with rounded values.
_FLOATS = ("float", "bfloat", "complex")
#: Fields that a cast changes.
_CAST_FIELDS = frozenset((Field.DTYPE, Field.VALUES))


def _explain_beyond_cast(change: Change) -> str:
    """Return "" for an exactly rounded cast. Otherwise return why the change is not one, as the start of a message."""
    if change.status is Status.IDENTICAL:
        return ""
    transformation = change.transformation
    if transformation is None or transformation.kind is not TransformationKind.CAST:
        is_exact = change.values is None and change.not_compared is None and change.status is Status.CHANGED
        are_floats = all(side and side.dtype.startswith(_FLOATS) for side in (change.before, change.after))
        return "" if is_exact and are_floats and _CAST_FIELDS.issuperset(change.fields) else "is not a cast: "
    if transformation.exceptions:
        return f"{_count_exceptions(transformation)} to {_name_dtype(change)}"
    if not _CAST_FIELDS.issuperset(change.fields):
        return "changed by more than a cast: "
    if (description := describe_lost_values(change)) is not None:
        return description
    return (
        ""
        if transformation.rounding in (None, Rounding.NEAREST)
        else "is not rounded to the nearest value of the new dtype"
    )


#: Largest relative error of a rounded value within the range of the dtype: half of the spacing next to 1.
_ROUNDING_ERRORS = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}


def describe_lost_values(change: Change) -> str | None:
    """Describe the values beyond the dtype's range that an exactly rounded cast lost. Return None if it lost none."""
    values, dtype = change.values, _name_dtype(change)
    if values is None:
        return None
    new = values.inf_after + values.nan_after - values.inf_before - values.nan_before
    if new > 0:
        verb = "is" if new == 1 else "are"
        return f"{new:,} of {values.elements:,} elements {verb} beyond the range of {dtype} and became NaN or infinite"
    if values.relative_l2 is not None and values.relative_l2 > 2 * _ROUNDING_ERRORS.get(dtype, 1.0):
        return f"values are beyond the range of {dtype} (relative change {values.relative_l2:.2g})"
    return None


def explain_beyond_merge(change: Change) -> str:
    """Describe how a change differs from the adapter's merge, as the start of a message. Return "" if it does not."""
    transformation = change.transformation
    if transformation is None or transformation.kind is not TransformationKind.MERGED:
        is_cast = _explain_beyond_cast(change) == ""
        return "" if is_cast else "differs, although the adapter does not change this tensor: "
    if change.status is Status.IDENTICAL:
        return "is unchanged: the update of the adapter is not merged"
    if not _CAST_FIELDS.issuperset(change.fields):
        return "changed by more than the merge of the adapter: "
    if not transformation.exceptions:
        return ""
    fitting = "" if transformation.fitting_factor is None else f"; {transformation.fitting_factor:.6g} × B·A fits"
    return f"{_count_exceptions(transformation)} from {name_merged(transformation)}{fitting}"


def _count_exceptions(transformation: Transformation) -> str:
    verb = "differs" if transformation.exceptions == 1 else "differ"
    return f"{transformation.exceptions:,} of {transformation.elements:,} elements {verb} by more than rounding"


def name_merged(transformation: Transformation) -> str:
    """Describe the expected value of a merged tensor: `before + 2 × B·A`, or the adapter's replacement tensor."""
    return (
        f"{transformation.sources[0]} of the adapter"
        if transformation.rank is None
        else f"before + {transformation.factor or 0:.6g} × B·A"
    )


def _name_dtype(change: Change) -> str:
    return change.after.dtype if change.after is not None else ""


#: Fields that training or resizing changes. A lossless cast, another device or another requires_grad is not training.
TRAINED_FIELDS = frozenset((Field.SHAPE, Field.VALUES))


def _was_trained(change: Change, values: bool) -> bool | None:
    if change.status is Status.ADDED or not TRAINED_FIELDS.isdisjoint(change.fields):
        return True
    if change.status in (Status.REMOVED, Status.RENAMED):
        return False
    return False if values and change.not_compared is None else None


def iter_setting_entries(
    changes: Iterable[ScalarChange], compared: Iterable[str], targets: tuple[str, str]
) -> Iterator[ExpectationEntry]:
    """Yield an entry for each setting that differs, then for each setting in `compared` that is equal."""
    change_of_key = {change.key: change for change in changes}
    for key in dict.fromkeys((*change_of_key, *compared)):
        change = change_of_key.get(key)
        difference = settings.describe_setting_change(change).removeprefix(f"{key}: ") if change else ""
        is_trained = change is not None and change.status is not Status.REMOVED
        yield ExpectationEntry(key, None, targets[1], ((key,),), rules.METADATA, difference, is_trained)


def check_expectations(
    request: Request, entries: Sequence[ExpectationEntry], targets: tuple[str, str]
) -> ExpectationResults:
    """Return the failed expectations, the globs whose result is inconclusive, and the met expectations.

    Raises:
        NothingMatched: A glob matches no compared tensor or setting.
    """
    _require_matches(request, entries, targets)
    findings: list[Finding] = []
    for entry in entries:
        if request.adapter is not None and entry.beyond_merge:
            findings.append(entry.build_finding(rules.NOT_MERGED, entry.beyond_merge))
        if not entry.difference:
            continue
        if request.only and not entry.stays_within(request.only):
            option = f"--may-change {_quote(request.only)}"
            findings.append(entry.build_forbidden_change(rules.OUTSIDE_ONLY, "does not match", option))
        if entry.matches(request.frozen):
            option = f"--must-not-change {_quote(request.frozen)}"
            findings.append(entry.build_forbidden_change(rules.FROZEN_CHANGED, "matches", option))
        if request.cast and entry.beyond_cast:
            findings.append(entry.build_finding(rules.INEXACT_CAST, entry.beyond_cast))
    inconclusive = list(_find_unlisted_settings(request.frozen, entries))
    for glob in request.changed:
        matching_entries = [entry for entry in entries if entry.matches((glob,))]
        if any(entry.trained for entry in matching_entries):
            continue
        not_compared = [entry for entry in matching_entries if entry.trained is None]
        if not_compared:
            inconclusive.append(_build_inconclusive_glob(glob, not_compared))
        else:
            findings.append(_build_unchanged_finding(glob, matching_entries, targets))
    met = () if inconclusive else tuple(_list_met(request, entries))
    return ExpectationResults(findings, inconclusive, met)


def _list_met(request: Request, entries: Sequence[ExpectationEntry]) -> Iterator[MetExpectation]:
    """Yield each option whose globs are satisfied, with a text such as `4 tensors did not change`."""
    if request.only:
        others = [entry for entry in entries if not entry.stays_within(request.only)]
        if _are_unchanged(others):
            evidence = f"the other {_count(others)} did not change" if others else "all compared names match"
            yield MetExpectation(f"--may-change {_quote(request.only)}", evidence)
    for glob in request.frozen:
        matching_entries = [entry for entry in entries if entry.matches((glob,))]
        if _are_unchanged(matching_entries):
            yield MetExpectation(f"--must-not-change {glob!r}", f"{_count(matching_entries)} did not change")
    for glob in request.changed:
        matching_entries = [entry for entry in entries if entry.matches((glob,))]
        changed_entries = [entry for entry in matching_entries if entry.trained]
        if changed_entries:
            yield MetExpectation(
                f"--must-change {glob!r}", f"{len(changed_entries):,} of {_count(matching_entries)} changed"
            )


def _are_unchanged(entries: Sequence[ExpectationEntry]) -> bool:
    """Return True if every entry was compared, with its values, and no entry differs."""
    return not any(entry.difference or entry.trained is None for entry in entries)


def _count(entries: Sequence[ExpectationEntry]) -> str:
    settings_count = sum(entry.section is None for entry in entries)
    counts = ((len(entries) - settings_count, "tensor"), (settings_count, "setting"))
    return " and ".join(plural(count, noun) for count, noun in counts if count)


def _find_unlisted_settings(frozen: Sequence[str], entries: Sequence[ExpectationEntry]) -> Iterator[Broken]:
    """Yield an error for each glob that may match unlisted settings. Some are unlisted if too many settings differ."""
    setting_rows = [entry for entry in entries if entry.section is None]
    remainder = next((entry for entry in setting_rows if entry.name == MORE and entry.difference), None)
    for glob in frozen if remainder else ():
        matching_entries = [entry for entry in setting_rows if entry.matches((glob,))]
        if remainder and matching_entries and glob not in {entry.name for entry in matching_entries}:
            reason = (
                "statecli does not list all settings that differ, because there are too many; write the full name of "
                "each setting instead of a glob"
            )
            yield Broken(MORE, "", f"{remainder.target}: cannot check --must-not-change {glob!r}: {reason}")


def _require_matches(request: Request, entries: Sequence[ExpectationEntry], targets: tuple[str, str]) -> None:
    options = (
        ("--may-change", request.only),
        ("--must-not-change", request.frozen),
        ("--must-change", request.changed),
    )
    for flag, globs in options:
        for glob in globs:
            if not any(entry.matches((glob,)) for entry in entries):
                compared = f"the {len(entries)} compared tensors and settings of {' and '.join(targets)}"
                names = (name for entry in entries for side in entry.names_by_side for name in side)
                problem = f"matches none of {compared}{suggest_glob(glob, names)}"
                raise NothingMatched(f"{option(flag, glob, quoted=True)}: {problem}")


def _build_unchanged_finding(
    glob: str, matching_entries: Sequence[ExpectationEntry], targets: tuple[str, str]
) -> Finding:
    message = (
        f"--must-change {glob!r}: no matching tensor changed: {list_names([entry.name for entry in matching_entries])}"
    )
    fqn, section = (
        (matching_entries[0].name, matching_entries[0].section) if len(matching_entries) == 1 else (None, None)
    )
    return rules.UNCHANGED.finding(message, target=targets[1], fqn=fqn, section=section)


def _build_inconclusive_glob(glob: str, not_compared: Sequence[ExpectationEntry]) -> Broken:
    first = not_compared[0]
    names = list_names([entry.name for entry in not_compared])
    reason = f"the values of {names} were not compared, and no other matching tensor changed"
    message = f"{first.target}: cannot check --must-change {glob!r}: {reason}"
    return Broken(first.name, first.section or "", message)


def _quote(globs: Sequence[str]) -> str:
    return " ".join(repr(glob) for glob in globs)
