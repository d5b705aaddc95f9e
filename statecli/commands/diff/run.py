"""Run `statecli diff`: read, pair, compare and check expectations, in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.commands import explain
from statecli.commands.diff import (
    change_details,
    changed_fields,
    expectations,
    load_check,
    pairing,
    renames,
    settings as scalars,
    suggest_map,
)
from statecli.commands.diff.optimizer_names import OptimizerPair, pair_optimizer_states, pair_optimizers, unify_settings
from statecli.commands.diff.pairing import Match, MatchedBy
from statecli.commands.diff.read_targets import StatePair, list_target_paths, read_both
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import (
    Broken,
    Change,
    Diff,
    Field,
    Inconclusive,
    ScalarChange,
    Status,
    TransformationKind,
)
from statecli.commands.diff.snapshot import NOTE, SnapshotDigests, StateDigests
from statecli.commands.diff.value_comparison import PairResult, ValueComparison
from statecli.core import quoting
from statecli.core.denormals import with_denormals
from statecli.core.errors import NothingMatched, StateError
from statecli.core.finding import Finding
from statecli.core.garbage_collector import pause_gc
from statecli.core.model_state import Kind, ModelState, Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.core.selection import glob_names, suggest_glob
from statecli.core.units import plural
from statecli.storage import files
from statecli.storage.file_version import RESULT_NOT_VALID, FileVersion, find_changed, read_versions
from statecli.targets import load
from statecli.targets.section_of_target import split_section
from statecli.values.delta import CompareOptions
from statecli.workers import pool

if TYPE_CHECKING:
    from statecli.commands.explain.result import Explanation
    from statecli.live.built_model import BuiltModel


def compare_targets(
    request: Request, progress: Progress | None = None, snapshots: Mapping[str, StateDigests] | None = None
) -> Diff:
    """Read both targets, pair their tensors, and return their differences.

    `snapshots`: snapshots by the text of their target. `progress` gets the number of compared bytes of the old tensors.
    Raises `StateError` if an error prevents every comparison, `NothingMatched` if nothing is left to compare. An error
    of a single pair is in `Diff.broken`.
    """
    built_models: dict[str, BuiltModel] = {}
    # Versions are recorded beforehand, because another process opens the files of the second target.
    initial_versions = read_versions(list_target_paths(request))
    with files.record_opened_files() as opened_files:
        states = read_both(request, built_models, snapshots or {})
    digests = SnapshotDigests([*(snapshots or {}).values()])
    versions = {**initial_versions, **opened_files}
    return compare_states(request, states.before, states.after, built_models, versions, progress, digests)


@with_denormals
def compare_states(
    request: Request,
    before: ModelState,
    after: ModelState,
    built_models: dict[str, BuiltModel],
    initial_versions: Mapping[str, FileVersion | None],
    progress: Progress | None = None,
    digests: SnapshotDigests | None = None,
) -> Diff:
    """Compare two states that were already read.

    `built_models` has the module of each target that is a class, by its text; `initial_versions` the versions of files
    before they were read; `digests` the digests of snapshots.
    """
    with pause_gc():
        return _Comparison(request, before, after, built_models, initial_versions, digests or SnapshotDigests([])).diff(
            progress
        )


class _Comparison:
    """Comparison of two states in a run of `statecli diff`, which produces a `Diff`."""

    def __init__(
        self,
        request: Request,
        before: ModelState,
        after: ModelState,
        built_models: dict[str, BuiltModel],
        initial_versions: Mapping[str, FileVersion | None],
        digests: SnapshotDigests,
    ) -> None:
        self.digests = digests
        self.request, self.before, self.after, self.built_models, self.initial_versions = (
            request,
            before,
            after,
            built_models,
            initial_versions,
        )
        self.selection, self.targets = request.selection, (before.target, after.target)
        classes = before.traits.is_class, after.traits.is_class
        self.any_class, self.loads = any(classes), classes[0] is not classes[1]
        self.model, self.checkpoint = (before, after) if classes[0] else (after, before)
        #: True if prefixes are stripped. A class that would not load a prefix gets a finding about the prefix, not
        #: about all entries.
        self.prefixes = request.renames or request.prefixes or self.loads
        self.values = request.values and not self.any_class and Field.VALUES not in request.ignore
        self.notes: list[Oddity] = []
        self.sections: dict[str, str] = {}
        self.stripped: tuple[pairing.StrippedPrefix, ...] = ()
        self.optimizers: list[OptimizerPair] = []
        #: By `id`, tensors that may be renamed, with the reason why this is inconclusive.
        self.inconclusive: dict[int, StateError] = {}
        #: Files that changed while they were compared, and are reported.
        self.changed_files: set[str] = set()
        #: True if names are prefixed by sections, because there are several.
        self.sectioned = False
        #: The adapter that should be merged into the old checkpoint.
        self.adapter = load.read_checkpoint(request.adapter) if request.adapter is not None else None

    def diff(self, progress: Progress | None) -> Diff:
        self._note_values()
        states = self._select_states()
        all_matches = self._pair_tensors(states.before, states.after)
        matches = [match for match in all_matches if self._is_wanted(match)]
        setting_changes, settings = self._compare_settings()
        has_settings_alone = bool(self.before.optimizers and self.after.optimizers)
        if not matches and not (settings and (all_matches or has_settings_alone)):
            raise NothingMatched(self._describe_nothing_compared(len(all_matches)))
        if not matches:
            reason = "the filters exclude all tensors" if all_matches else "neither side contains a tensor"
            self._note("settings-alone", f"{reason}; statecli compared only {plural(len(settings), 'setting')}")
        differing = changed_fields.find_changed_fields(matches, self.request.ignore, devices=not self.any_class)
        outcomes = self._compare_values(matches, progress)
        changes, broken_pairs = self._build_changes(matches, differing, outcomes)
        merged = change_details.check_merge(changes, self.before, self.adapter, self.request.jobs)
        changes = merged.changes
        if self.values and not self.digests:
            changes = change_details.explain_changes(changes, self.request, self.sections, self.after.metadata.values)
        settled = change_details.settle_codes(changes, self.targets)
        broken_pairs += [*merged.broken, *settled.broken]
        changes = change_details.estimate_ranks(settled.changes, self.request)
        setting_changes = self._drop_explained_settings(setting_changes, changes)
        load_result = self._check_load(all_matches, states, changes)
        loading = self._explain_load() if load_result.findings else None
        if loading is not None and loading.covers_names:
            self.notes = [note for note in self.notes if note.kind not in suggest_map.NOTE_KINDS]
        del all_matches, matches, differing, outcomes  # free memory before building the findings
        verdict = self._build_findings(load_result.findings, changes, broken_pairs, setting_changes, settings)
        histograms = change_details.compute_difference_histograms(changes, self.request.histograms)
        return Diff(
            before=self.before,
            after=self.after,
            changes=tuple(changes),
            scalars=tuple(setting_changes),
            findings=tuple(verdict.findings),
            notes=tuple(
                dict.fromkeys(
                    (*self.notes, *load_result.notes, *_list_oddities(self.before), *_list_oddities(self.after))
                )
            ),
            broken=(
                *broken_pairs,
                *load_result.broken_pairs,
                *verdict.inconclusive,
                *_list_unread_settings(self.before),
                *_list_unread_settings(self.after),
                *self._list_changed_files(),
            ),
            changed_files=tuple(sorted(self.changed_files)),
            histograms=histograms,
            met=verdict.met,
            expected=self.request.has_expectations,
            how=self._get_comparison(),
            ignored=self.request.ignore,
            loading=loading,
            stripped=self.stripped,
        )

    def _get_comparison(self) -> CompareOptions | None:
        """Return the options of the value comparison (bitwise for digests), or None if values were not compared."""
        if not self.values:
            return None
        return CompareOptions(bitwise=True) if self.digests else self.request.how

    def _note_values(self) -> None:
        if self.any_class:
            reason = f"{self.model.target} is a class, and a new model has only initial values"
            self._note(OddityKind.VALUES_NOT_COMPARED.value, f"statecli did not compare values and devices: {reason}")
        elif not self.values:
            option = "--ignore values" if self.request.values else "--metadata-only"
            self._note(OddityKind.VALUES_NOT_COMPARED.value, f"values are not compared: {option}")
        elif self.digests:
            self._note("snapshot", NOTE)

    def _note(self, name: str, message: str) -> None:
        self.notes.append(Oddity(name, message))

    # --- pairs of tensors -------------------------------------------------------------------------------------------

    def _select_states(self) -> StatePair:
        """Return both states without the tensors that cannot exist on the other side.

        For example, drop the optimizer state if the other side is a model class.
        """
        if not self.loads:
            return self._select_from_files()
        loaded = load_check.select_model(self.checkpoint, self.model)
        checkpoint = load_check.select_expected(loaded.state)
        if not checkpoint.state.tensors:
            raise NothingMatched(f"{self.checkpoint.target}: contains no tensor that {self.model.target} would load")
        model = load_check.select_expected(self.model)
        self.notes += [*loaded.notes, *checkpoint.notes, *model.notes]
        sides = (model, checkpoint) if self.model is self.before else (checkpoint, model)
        return StatePair(*(side.state for side in sides))

    def _select_from_files(self) -> StatePair:
        """Return both states. A pickled module is reduced to its state_dict unless both sides are pickled modules."""
        matched = load_check.match_folders(self.before, self.after)
        self.notes += matched.notes
        states = (matched.before, matched.after)
        if self.any_class or all(state.whole_modules for state in states):
            return StatePair(*states)
        sides = [
            load_check.select_expected(state) if state.whole_modules else load_check.NotedState(state, [])
            for state in states
        ]
        self.notes += [note for side in sides for note in side.notes]
        return StatePair(*(side.state for side in sides))

    def _pair_tensors(self, before: ModelState, after: ModelState) -> list[Match]:
        paired_tensors = pairing.pair_tensors(before, after, self.request.map, prefixes=self.prefixes)
        self.sections, self.stripped = paired_tensors.sections, paired_tensors.stripped
        # The section of a class has no name, so the pairing of sections is not reported for a load.
        self.notes += [
            note for note in paired_tensors.notes if not (self.loads and note.kind is OddityKind.SECTIONS_PAIRED)
        ]
        self.optimizers = pair_optimizers(before, after, paired_tensors.sections) if self.prefixes else []
        paired_states = pair_optimizer_states(paired_tensors.matches, self.optimizers)
        matches = paired_states.matches
        self.notes += paired_states.notes
        if paired_states.notes:
            matches = pairing.sort_matches(matches, before, after)
        if self.loads:
            model = before if self.model is self.before else after
            pairs_as_loaded = load_check.pair_as_loaded(matches, model, self.built_models.get(model.target))
            matches = pairing.sort_matches(pairs_as_loaded.matches, before, after)
            self.notes += pairs_as_loaded.notes
        self.sectioned = len({match.output_row.section for match in matches}) > 1
        if self.values and self.request.renames and not self.digests:
            is_selected = partial(self.selection.selects, by_section=self.sectioned)
            rename_search = renames.find_renames(matches, paired_tensors.sections, is_selected, jobs=self.request.jobs)
            # Results of renames are ignored in a shard, which knows only its own tensors, because all shards need the
            # same pairs.
            if not pool.is_partial():
                self.inconclusive = rename_search.inconclusive
                if rename_search.matches:
                    matches = pairing.sort_matches(_merge_renames(matches, rename_search.matches), before, after)
        if any(match.before is None for match in matches) and any(match.after is None for match in matches):
            arguments = matches, paired_tensors.sections, before, after, self.request.map
            self.notes += suggest_map.suggest_rules(*arguments, prefixes=self.prefixes)
        return matches

    def _is_wanted(self, match: Match) -> bool:
        if not self.selection:
            return True
        rows = [row for row in (match.before, match.after) if row]
        names = (name for row in rows for name in glob_names(row.fqn, row.section, by_section=self.sectioned))
        return (
            self.selection.selects_kind(self._get_kind(match))
            and any(map(self.selection.selects_layout, rows))
            and self.selection.selects_name(tuple(names))
        )

    def _get_kind(self, match: Match) -> Kind:
        """Return the kind that the output shows for a pair. If the old side is a class, return the class's kind.

        A class declares the kind; for a checkpoint, the kind may be a guess.
        """
        by_class = match.before if self.loads and self.model is self.before else None
        return (by_class or match.output_row).kind

    def _describe_nothing_compared(self, count: int) -> str:
        targets_text = f"{self.request.before} and {self.request.after}"
        if not count:
            return f"{targets_text}: neither side contains a tensor, so nothing was compared"
        names = {tensor.fqn for state in (self.before, self.after) for tensor in state.tensors}
        suggestion = next(filter(None, (suggest_glob(glob, names) for glob in self.selection.include)), "")
        return f"{targets_text}: none of their {count} tensors matches {self.selection.name_options()}{suggestion}"

    # --- differences ------------------------------------------------------------------------------------------------

    def _compare_values(self, matches: Sequence[Match], progress: Progress | None) -> list[PairResult]:
        if not self.values:
            return [PairResult()] * len(matches)
        comparison = ValueComparison(self.request, self.targets, self.initial_versions, self.digests, self.inconclusive)
        return comparison.compare(matches, progress)

    def _build_changes(
        self, matches: Sequence[Match], differing: Sequence[tuple[Field, ...]], outcomes: Sequence[PairResult]
    ) -> tuple[list[Change], list[Broken]]:
        changes: list[Change] = []
        broken_pairs: list[Broken] = []
        for match, fields, outcome in zip(matches, differing, outcomes, strict=True):
            row = match.output_row
            before, after = match.before, match.after
            damage = (before and before.damage) or (after and after.damage)
            if error := damage or outcome.error:
                broken_pairs.append(Broken(row.fqn, row.section, error))
                if not damage and outcome.changed_file is not None:
                    self.changed_files.add(outcome.changed_file)
            elif outcome.inconclusive:
                broken_pairs.append(Inconclusive(row.fqn, row.section, outcome.inconclusive))
            if damage or (not fields and (outcome.error or outcome.inconclusive)):
                continue
            changes.append(self._build_change(match, fields, outcome))
        return changes, broken_pairs

    def _build_change(self, match: Match, fields: tuple[Field, ...], outcome: PairResult) -> Change:
        row, before, after = match.output_row, match.before, match.after
        if outcome.delta is not None or outcome.has_codes or outcome.differs:
            fields = _add_values(fields)
        if outcome.reshaped:
            fields = tuple(field for field in Field if field is Field.SHAPE or field in fields)
        return Change(
            row.fqn,
            row.section,
            _find_status(match, fields),
            self._get_kind(match),
            fields,
            before.fqn if before and after and before.fqn != after.fqn else None,
            before,
            after,
            outcome.delta,
            outcome.not_compared,
        )

    def _drop_explained_settings(self, settings: list[ScalarChange], changes: Sequence[Change]) -> list[ScalarChange]:
        """Return `settings` without the differences that quantized tensors or an adapter cause.

        If expectations are given, all settings are returned.
        """
        if self.request.has_expectations:
            return settings
        if any(c.transformation is not None and c.transformation.kind is TransformationKind.ADAPTER for c in changes):
            note, noun, qualifier = "adapter-settings", "setting", "that only the model or only the adapter has"
            kept_changes = [change for change in settings if change.status is Status.CHANGED]
        else:
            note, noun, qualifier = "quantized-attributes", "attribute", "of quantized tensors (torch subclasses)"
            kinds = (TransformationKind.QUANTIZED, TransformationKind.DEQUANTIZED)
            quantized_changes = [c for c in changes if c.transformation is not None and c.transformation.kind in kinds]
            quantized = {name for c in quantized_changes for name in (c.fqn, f"{c.section}.{c.fqn}")}
            kept_changes = [
                change for change in settings if not quantized or quantized.isdisjoint(_list_stems(change.key))
            ]
        if len(kept_changes) < len(settings):
            self._note(note, f"statecli does not list {plural(len(settings) - len(kept_changes), noun)} {qualifier}")
        return kept_changes

    def _compare_settings(self) -> tuple[list[ScalarChange], list[str]]:
        """Return the selected settings that differ, and the names of all compared settings. Report omitted settings."""
        if self.any_class:
            return [], []
        selected_sections = split_section(self.request.before)[1], split_section(self.request.after)[1]
        old_settings, new_settings = unify_settings(self.before, self.after, self.optimizers)
        states = replace(self.before, metadata=old_settings), replace(self.after, metadata=new_settings)
        comparison = scalars.compare_settings(*states, selected_sections, self.sections)
        old, new = selected_sections
        versions = list(scalars.compare_versions(self.before, self.after, {old: new} if old and new else self.sections))
        changes = [*comparison.changes, *versions]
        paths = [*comparison.paths, *(change.key for change in versions)]
        left_out = [change.key for change in changes if not self._is_wanted_setting(change.key)]
        if left_out:
            differ = "setting differs but is" if len(left_out) == 1 else "settings differ but are"
            message = f"{len(left_out)} {differ} not selected"
            comparison.notes.append(Oddity("settings-left-out", f"{message}: {quoting.names(left_out)}"))
        self.notes += comparison.notes
        selected_changes = [change for change in changes if self._is_wanted_setting(change.key)]
        return selected_changes, [path for path in paths if self._is_wanted_setting(path)]

    def _is_wanted_setting(self, name: str) -> bool:
        return not self.selection.selects_by_tensor and self.selection.selects_name((name,))

    def _list_changed_files(self) -> list[Broken]:
        """Return an error for each file that changed during the run and was not reported yet."""
        paths = [path for path in find_changed(self.initial_versions) if path not in self.changed_files]
        self.changed_files.update(paths)
        return [Broken("(file)", "", f"{path}: {RESULT_NOT_VALID}") for path in sorted(paths)]

    # --- findings ---------------------------------------------------------------------------------------------------

    def _check_load(
        self, all_matches: Sequence[Match], states: StatePair, changes: Sequence[Change]
    ) -> load_check.LoadCheck:
        if not self.loads:
            return load_check.LoadCheck()
        result = load_check.check_load(
            all_matches,
            states.before,
            states.after,
            self.model,
            self.built_models[self.model.target],
            self.request.ignore,
        )
        if len(changes) == len(all_matches) and not self.selection.exclude:
            return result
        rows = {name for match in all_matches for name in match.names}
        compared_names = {name for change in changes for name in (change.fqn, change.renamed_from)}
        selects_name = self.selection.selects_name
        selected_findings = (
            item
            for item in result.findings
            if item.fqn is None or item.fqn in compared_names or (item.fqn not in rows and selects_name((item.fqn,)))
        )
        return replace(result, findings=tuple(selected_findings))

    def _explain_load(self) -> Explanation | None:
        """Return why the checkpoint does not load into the class, or None if filters or expectations are given."""
        if not self.loads or self.selection or self.request.has_expectations or self.request.map:
            return None
        return explain.run.explain_states(self.model, self.built_models[self.model.target], self.checkpoint)

    def _build_findings(
        self,
        load_findings: Sequence[Finding],
        changes: Sequence[Change],
        broken_pairs: Sequence[Broken],
        setting_changes: Sequence[ScalarChange],
        settings: Sequence[str],
    ) -> expectations.ExpectationResults:
        """Check the expectations. Without expectations, each difference is a finding."""
        if not self.request.has_expectations:
            changes, settings = self._select_differing(changes), ()
        tensors = expectations.iter_tensor_entries(
            changes, broken_pairs, self.targets, sectioned=self.sectioned, values=self.values
        )
        entries = chain(tensors, expectations.iter_setting_entries(setting_changes, settings, self.targets))
        if not self.request.has_expectations:
            differing = (entry.build_finding(entry.rule) for entry in entries if entry.difference and entry.rule)
            return expectations.ExpectationResults([*load_findings, *differing])
        verdict = expectations.check_expectations(self.request, list(entries), self.targets)
        reported = {item.fqn for item in broken_pairs}
        inconclusive = [item for item in verdict.inconclusive if item.fqn not in reported]
        return replace(verdict, inconclusive=inconclusive)

    def _select_differing(self, changes: Sequence[Change]) -> list[Change]:
        differing = [change for change in changes if change.status is not Status.IDENTICAL]
        if not self.loads:
            return differing
        # The load check already reports added tensors, removed tensors and other shapes.
        remaining_fields = [
            (c, tuple(f for f in c.fields if f is not Field.SHAPE)) for c in differing if c.before and c.after
        ]
        return [replace(c, fields=fields) for c, fields in remaining_fields if fields]


def _list_stems(key: str) -> list[str]:
    """Return the parents of a dotted path: `a` and `a.b` for `a.b.c`."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


@lru_cache(maxsize=128)
def _add_values(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Add `Field.VALUES` to the fields. The cache lets equal changes share one tuple in memory."""
    return (*fields, Field.VALUES)


def _merge_renames(matches: Sequence[Match], renames: Sequence[Match]) -> list[Match]:
    """Replace the two unpaired matches of each renamed tensor by the renamed pair."""
    renamed_ids = {id(row) for match in renames for row in (match.before, match.after)}
    kept_matches = (
        match for match in matches if (match.before and match.after) or id(match.output_row) not in renamed_ids
    )
    return [*kept_matches, *renames]


def _find_status(match: Match, fields: tuple[Field, ...]) -> Status:
    if match.before is None:
        return Status.ADDED
    if match.after is None:
        return Status.REMOVED
    if match.matched_by is MatchedBy.BYTES:
        return Status.RENAMED
    return Status.CHANGED if fields else Status.IDENTICAL


#: Oddities about tensors that a reader left out.
_UNREAD_TENSOR_KINDS = (
    OddityKind.TOO_DEEP,
    OddityKind.NOT_SEARCHED,
    OddityKind.OPAQUE_CLASS,
    OddityKind.PACKED_PARAMS,
    OddityKind.SCRIPT_MODULE,
)
#: Oddities that are already in `Diff.broken`, or that any module may have.
_UNREPORTED_KINDS = (OddityKind.METADATA_CUT, OddityKind.NONE_PARAMETER)


def _list_unread_settings(state: ModelState) -> list[Broken]:
    """Return an error if a file has more settings than were read, because the rest may differ."""
    reason = "statecli does not know whether the remaining settings differ"
    return [
        Inconclusive("(settings)", "", f"{state.target}: {oddity.message}: {reason}")
        for oddity in state.oddities
        if oddity.kind is OddityKind.METADATA_CUT
    ]


def _list_oddities(state: ModelState) -> Iterator[Oddity]:
    """Yield the oddities of a file, including unread tensors, because many users run only `diff`."""
    for oddity in state.oddities:
        if oddity.kind in _UNREAD_TENSOR_KINDS:
            yield Oddity(oddity.name, f"{state.target}: {oddity.message}: not compared", oddity.fqn)
        elif oddity.kind not in _UNREPORTED_KINDS and not state.traits.is_class:
            yield Oddity(oddity.name, f"{state.target}: {oddity.message}", oddity.fqn)
