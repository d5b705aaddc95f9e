"""Run `statecli diff`: read, pair, compare and check expectations, in this order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from statecli import formats, live
from statecli.commands.diff import changed_fields, expectations, load_check, pairing, renames, suggest_map
from statecli.commands.diff import settings as scalars
from statecli.commands.diff.module_versions import compare_versions
from statecli.commands.diff.near_zero import find_near_zero
from statecli.commands.diff.optimizer_names import (
    OptimizerPair,
    pair_optimizer_states,
    pair_optimizers,
    unify_settings,
)
from statecli.commands.diff.pairing import Match, MatchedBy
from statecli.commands.diff.result import (
    Broken,
    Change,
    Diff,
    Field,
    Histogram,
    Inconclusive,
    ScalarChange,
    Status,
    TransformationKind,
)
from statecli.commands.diff.snapshot import NOTE, SnapshotDigests, StateDigests
from statecli.commands.diff.transformations.training import is_training
from statecli.core import quoting
from statecli.core.errors import NothingMatched, StateError
from statecli.core.finding import Finding
from statecli.core.float_mode import with_denormals
from statecli.core.garbage_collector import pause_gc
from statecli.core.model_state import Kind, ModelState, NoteKind, Oddity, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.core.selection import Selection, glob_names, suggest_glob
from statecli.core.units import plural
from statecli.storage import files
from statecli.storage.file_version import CHANGED, FileChanged, FileVersion, find_changed, read_versions
from statecli.targets import load
from statecli.targets.section_of_target import split_section
from statecli.values.delta import CompareOptions, Delta
from statecli.values.plain_pairs import compare_plain_pairs
from statecli.values.require_numpy import require_numpy
from statecli.workers import pool

if TYPE_CHECKING:
    from statecli.commands.explain.result import Explanation
    from statecli.live.built_model import BuiltModel


class Request(msgspec.Struct, frozen=True):
    """A request for a diff. Globs of an option are a union.

    Attributes:
        before, after: The targets.
        jobs: Number of workers; 0 for a worker per core.
        histograms: Number of the most changed tensors, with a histogram of the differences each.
        prefixes: Strip prefixes of wrappers even if no renames are detected.
    """

    before: str
    after: str
    how: CompareOptions = CompareOptions()
    values: bool = True
    renames: bool = True
    prefixes: bool = False
    map: tuple[str, ...] = ()
    ignore: tuple[Field, ...] = ()
    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    cast: bool = False
    adapter: str | None = None
    selection: Selection = Selection()
    init_device: str | None = None
    jobs: int = 0
    ranks: bool = False
    histograms: int = 0

    @property
    def expected(self) -> expectations.Expectations:
        """The expectations for the exit status, if there are any."""
        return expectations.Expectations(self.only, self.frozen, self.changed, self.cast, self.adapter)


def compare_targets(
    request: Request, progress: Progress | None = None, snapshots: Mapping[str, StateDigests] | None = None
) -> Diff:
    """Read both targets, pair their tensors, and return their differences.

    `snapshots`: snapshots by the text of their target.
    `progress` gets the compared bytes of before. Raises `StateError` if nothing can be compared because of an error,
    `NothingMatched` if nothing is left to compare; an error of a single pair is in `Diff.broken`.
    """
    built: dict[str, BuiltModel] = {}
    # Files that another process reads are opened there, so their versions are recorded before.
    seen = read_versions(_target_paths(request))
    with files.record_opened_files() as opened:
        before, after = _read_both(request, built, snapshots or {})
    digests = SnapshotDigests([*(snapshots or {}).values()])
    return compare_states(request, before, after, built, {**seen, **opened}, progress, digests)


@with_denormals
def compare_states(
    request: Request,
    before: ModelState,
    after: ModelState,
    built: dict[str, BuiltModel],
    seen: Mapping[str, FileVersion | None],
    progress: Progress | None = None,
    digests: SnapshotDigests | None = None,
) -> Diff:
    """Compare two targets already read.

    `built` has the module of each target that is a class, by its text; `seen` the versions of files before they were
    read; `digests` the digests of snapshots.
    """
    with pause_gc():
        return _Comparison(request, before, after, built, seen, digests or SnapshotDigests([])).diff(progress)


#: Bytes of each file, at least, for reading the second in another process, which costs a fiftieth of a second. A long
#: pickle takes time, but only reading shows its length.
MIN_BYTES_FOR_PROCESS = 8 << 20


def _read_both(
    request: Request, built: dict[str, BuiltModel], snapshots: Mapping[str, StateDigests]
) -> tuple[ModelState, ModelState]:
    if snapshots:
        states = [
            snapshots[text].state if text in snapshots else _read_target(text, request, built)
            for text in (request.before, request.after)
        ]
        return states[0], states[1]
    sides = (request.before, request.after), (request.after, request.before)
    both = [text if os.path.lexists(text) else load.resolve_auto_class(text, other) for text, other in sides]
    paths = _target_paths(request)
    large = all(os.path.isfile(path) and os.path.getsize(path) >= MIN_BYTES_FOR_PROCESS for path in paths)
    if not large or request.jobs == 1 or not pool.can_fork() or formats.read_traits(paths[1]).is_header_and_tensors:
        return _read_target(both[0], request, built), _read_target(both[1], request, built)
    with pool.run_in_background(pack_checkpoint, both[1]) as after:
        before, raw = _read_target(both[0], request, built), after()
    return before, unpack_checkpoint(raw) or _read_target(both[1], request, built)


def _target_paths(request: Request) -> list[str]:
    return [split_section(text)[0] for text in (request.before, request.after)]


def pack_checkpoint(text: str) -> bytes:
    """Read a checkpoint and return its state as bytes; b"" where msgpack cannot hold a 65-bit integer, a surrogate."""
    try:
        return msgspec.msgpack.encode(load.read_checkpoint(text))
    except (OverflowError, UnicodeEncodeError):
        return b""


def unpack_checkpoint(packed: bytes) -> ModelState | None:
    """Return the state packed by `pack_checkpoint`; None for b""."""
    return msgspec.msgpack.decode(packed, type=ModelState) if packed else None


def _read_target(text: str, request: Request, built: dict[str, BuiltModel]) -> ModelState:
    """Return the state of a target; the module of a class is added to `built`."""
    spec = load.find_class_spec(text)
    if spec is None:
        return load.read_checkpoint(text)
    built[text] = load.build_model(spec, init_device=request.init_device, values=False)
    return live.read(built[text], text)


#: Pairs whose values are compared together: their tasks and results take a kilobyte a pair.
PAIRS_AT_ONCE = 1 << 15


class _PairResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of comparing a pair's values; empty for values equal or not compared.

    `reshaped`: the shapes of a nested tensor's inner tensors differ, as only reading shows. `has_codes`: one side holds
    codes and scales, so that it may be compared after dequantizing. `differs`: the digests of the values differ.
    `changed_file`: the file that changed meanwhile, if `error` is about this. `inconclusive`: why it is unknown whether
    the values differ.
    """

    delta: Delta | None = None
    not_compared: str | None = None
    error: str | None = None
    inconclusive: str | None = None
    reshaped: bool = False
    has_codes: bool = False
    differs: bool = False
    changed_file: str | None = None


_EQUAL = _PairResult()


class _Comparison:
    """A run, from two states to a `Diff`."""

    def __init__(
        self,
        request: Request,
        before: ModelState,
        after: ModelState,
        built: dict[str, BuiltModel],
        seen: Mapping[str, FileVersion | None],
        digests: SnapshotDigests,
    ) -> None:
        self.digests = digests
        self.request, self.before, self.after, self.built, self.seen = request, before, after, built, seen
        self.selection = request.selection
        classes = load_check.is_class(before), load_check.is_class(after)
        self.any_class, self.loads = any(classes), classes[0] is not classes[1]
        self.model = before if classes[0] else after
        #: If a class would not load a prefix, the prefix is reported, not that all entries are missing.
        self.prefixes = request.renames or request.prefixes or self.loads
        self.values = request.values and not self.any_class and Field.VALUES not in request.ignore
        self.notes: list[Oddity] = []
        self.sections: dict[str, str] = {}
        self.stripped: tuple[pairing.StrippedPrefix, ...] = ()
        self.optimizers: list[OptimizerPair] = []
        #: By `id`, tensors that may be renamed, and the reason why that is inconclusive.
        self.inconclusive: dict[int, StateError] = {}
        #: Files that changed while they were compared, and are reported.
        self.changed_files: set[str] = set()
        #: True if names are prefixed by sections, because there are several.
        self.sectioned = False
        #: The adapter that should be merged into before.
        self.adapter = load.read_checkpoint(request.adapter) if request.adapter is not None else None

    def diff(self, progress: Progress | None) -> Diff:
        self._note_values()
        states = self._select_states()
        all_matches = self._matches(*states)
        matches = [match for match in all_matches if self._is_wanted(match)]
        setting_changes, settings = self._settings()
        has_settings_alone = bool(self.before.optimizers and self.after.optimizers)
        if not matches and not (settings and (all_matches or has_settings_alone)):
            raise NothingMatched(self._describe_nothing_compared(len(all_matches)))
        if not matches:
            why = "the filters exclude all tensors" if all_matches else "neither side contains a tensor"
            self._note("settings-alone", f"{why}; statecli compared only {plural(len(settings), 'setting')}")
        differing = changed_fields.find_changed_fields(matches, self.request.ignore, devices=not self.any_class)
        outcomes = self._outcomes(matches, progress)
        changes, broken = self._changes(matches, differing, outcomes)
        changes, unmerged = self._check_merge(changes)
        changes, undecided = self._settle_codes(self._explain(changes))
        broken += [*unmerged, *undecided]
        changes = self._estimate_ranks(changes)
        setting_changes = self._drop_explained_settings(setting_changes, changes)
        load_result = self._check_load(all_matches, states, changes)
        loading = self._explain_load() if load_result.findings else None
        if loading is not None and loading.covers_names:
            self.notes = [note for note in self.notes if note.kind not in suggest_map.NOTES]
        del all_matches, matches, differing, outcomes  # as large as the changes, of which the findings are made next
        verdict = self._findings(load_result.findings, changes, broken, setting_changes, settings)
        histograms = self._histograms(changes)
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
                *broken,
                *load_result.broken,
                *verdict.inconclusive,
                *_inconclusive_settings(self.before),
                *_inconclusive_settings(self.after),
                *self._moving(),
            ),
            changed_files=tuple(sorted(self.changed_files)),
            histograms=histograms,
            met=verdict.met,
            expected=bool(self.request.expected),
            how=self._get_comparison(),
            ignored=self.request.ignore,
            loading=loading,
            stripped=self.stripped,
        )

    def _get_comparison(self) -> CompareOptions | None:
        """Return how values were compared; digests are of bits."""
        if not self.values:
            return None
        return CompareOptions(bitwise=True) if self.digests else self.request.how

    def _note_values(self) -> None:
        if self.any_class:
            why = f"{self.model.target} is a class, and a new model has only initial values"
            self._note(OddityKind.VALUES_NOT_COMPARED.value, f"statecli did not compare values and devices: {why}")
        elif not self.values:
            option = "--ignore values" if self.request.values else "--metadata-only"
            self._note(OddityKind.VALUES_NOT_COMPARED.value, f"values are not compared: {option}")
        elif self.digests:
            self._note("snapshot", NOTE)

    def _note(self, name: str, message: str) -> None:
        self.notes.append(Oddity(name, message))

    # --- what is compared with what ---------------------------------------------------------------------------------

    def _select_states(self) -> tuple[ModelState, ModelState]:
        """Return both states without tensors that the other cannot have."""
        if not self.loads:
            return self._select_from_files()
        checkpoint = self.after if self.model is self.before else self.before
        checkpoint, notes = load_check.select_model(checkpoint, self.model)
        checkpoint, more = load_check.select_expected(checkpoint)
        if not checkpoint.tensors:
            raise NothingMatched(f"{checkpoint.target}: contains no tensor that {self.model.target} would load")
        model, most = load_check.select_expected(self.model)
        self.notes += [*notes, *more, *most]
        return (model, checkpoint) if self.model is self.before else (checkpoint, model)

    def _select_from_files(self) -> tuple[ModelState, ModelState]:
        """Return both states; of a whole module only its state_dict, if the other side has no whole module."""
        both, apart = load_check.match_folders(self.before, self.after)
        self.notes += apart
        if self.any_class or all(state.whole_modules for state in both):
            return both
        (before, notes), (after, more) = (
            load_check.select_expected(state) if state.whole_modules else (state, []) for state in both
        )
        self.notes += [*notes, *more]
        return before, after

    def _matches(self, before: ModelState, after: ModelState) -> list[Match]:
        paired = pairing.pair_tensors(before, after, self.request.map, prefixes=self.prefixes)
        self.sections, self.stripped = paired.sections, paired.stripped
        # A class has one section, whatever a checkpoint calls it.
        self.notes += [note for note in paired.notes if not (self.loads and note.kind is OddityKind.SECTIONS_PAIRED)]
        self.optimizers = pair_optimizers(before, after, paired.sections) if self.prefixes else []
        matches, notes = pair_optimizer_states(paired.matches, self.optimizers)
        self.notes += notes
        if notes:
            matches = pairing.sort_matches(matches, before, after)
        if self.loads:
            model = before if self.model is self.before else after
            matches, notes = load_check.pair_as_loaded(matches, model, self.built.get(model.target))
            matches = pairing.sort_matches(matches, before, after)
            self.notes += notes
        self.sectioned = len({match.shown.section for match in matches}) > 1
        if self.values and self.request.renames and not self.digests:
            with require_numpy():
                same = renames.find_renames(matches, paired.sections, self._is_wanted_row, jobs=self.request.jobs)
            # A shard knows only the renames of its own tensors, and all shards must have the same pairs.
            if not pool.is_partial():
                self.inconclusive = same.inconclusive
                if same.matches:
                    matches = pairing.sort_matches(_merge_renames(matches, same.matches), before, after)
        if any(match.before is None for match in matches) and any(match.after is None for match in matches):
            arguments = matches, paired.sections, before, after, self.request.map
            self.notes += suggest_map.suggest_prefix_rule(
                *arguments, prefixes=self.prefixes
            ) or suggest_map.suggest_component_rules(*arguments, prefixes=self.prefixes)
        return matches

    def _is_wanted(self, match: Match) -> bool:
        if not self.selection:
            return True
        rows = [row for row in (match.before, match.after) if row]
        return (
            self.selection.selects_kind(self._kind(match))
            and any(map(self.selection.selects_layout, rows))
            and self._is_wanted_name(*(name for row in rows for name in self._names(row)))
        )

    def _kind(self, match: Match) -> Kind:
        """Return the kind after, or before for a removed tensor.

        The kind of a class is known, the kind of a checkpoint guessed.
        """
        by_class = match.before if self.loads and self.model is self.before else None
        return (by_class or match.shown).kind

    def _is_wanted_row(self, row: TensorInfo) -> bool:
        return self.selection.selects(row, by_section=self.sectioned)

    def _names(self, row: TensorInfo) -> tuple[str, ...]:
        return glob_names(row.fqn, row.section, by_section=self.sectioned)

    def _is_wanted_name(self, *names: str) -> bool:
        return self.selection.selects_name(names)

    def _describe_nothing_compared(self, count: int) -> str:
        both = f"{self.request.before} and {self.request.after}"
        if not count:
            return f"{both}: neither side contains a tensor, so nothing was compared"
        names = {tensor.fqn for state in (self.before, self.after) for tensor in state.tensors}
        suggestion = next(filter(None, (suggest_glob(glob, names) for glob in self.selection.include)), "")
        return f"{both}: none of their {count} tensors matches {self.selection.name_options()}{suggestion}"

    # --- what differs -----------------------------------------------------------------------------------------------

    def _outcomes(self, matches: Sequence[Match], progress: Progress | None) -> list[_PairResult]:
        outcomes = [_EQUAL] * len(matches)
        to_compare: list[int] = []
        unpaired: list[tuple[int, TensorInfo]] = []
        for n, match in enumerate(matches if self.values else ()):
            if match.before is None or match.after is None:
                unpaired.append((n, match.shown))
            elif changed_fields.effective_shape(match.before) != changed_fields.effective_shape(match.after):
                outcomes[n] = self._of_two_shapes(match.shown)
                unpaired += [(n, match.before), (n, match.after)]
            elif match.way is MatchedBy.BYTES:
                continue  # equal bit for bit: that is how they were found
            elif _has_no_values(match.before) and _has_no_values(match.after):
                outcomes[n] = _PairResult(not_compared="neither side has values")
            else:
                to_compare.append(n)
        if self.digests:
            self._compare_digests(to_compare, matches, outcomes)
            return outcomes
        if to_compare:
            self._compare(to_compare, matches, outcomes, progress)
        if unpaired:
            self._check(unpaired, outcomes)
        return outcomes

    def _compare(
        self,
        to_compare: Sequence[int],
        matches: Sequence[Match],
        outcomes: list[_PairResult],
        progress: Progress | None,
    ) -> None:
        deltas = self._compare_without_numpy([matches[n] for n in to_compare])
        if deltas is not None:
            for n, delta in zip(to_compare, deltas, strict=True):
                outcomes[n] = _PairResult(delta) if delta.changed else _EQUAL
            return
        with require_numpy():
            from statecli.values.compare import Pair, compare_pairs

        total = sum(before.nbytes for n in to_compare if (before := matches[n].before))
        advance = progress(total) if progress else None
        for start in range(0, len(to_compare), PAIRS_AT_ONCE):
            numbers = to_compare[start : start + PAIRS_AT_ONCE]
            pairs = [Pair(old, new) for n in numbers if (old := matches[n].before) and (new := matches[n].after)]
            results = compare_pairs(pairs, self.request.how, jobs=self.request.jobs, progress=advance, seen=self.seen)
            for n, pair, result in zip(numbers, pairs, results, strict=True):
                outcomes[n] = self._outcome(result, pair.before, pair.after)

    def _compare_without_numpy(self, matches: Sequence[Match]) -> list[Delta] | None:
        """Return how the values of small pairs differ; None if numpy must compare them."""
        if pool.is_distributed():
            return None
        before = [match.before for match in matches if match.before is not None]
        after = [match.after for match in matches if match.after is not None]
        versions = {**read_versions(where.path for tensor in before + after for where in tensor.ranges), **self.seen}
        deltas = compare_plain_pairs(before, after, self.request.how)
        return None if find_changed(versions) else deltas

    def _compare_digests(
        self, to_compare: Sequence[int], matches: Sequence[Match], outcomes: list[_PairResult]
    ) -> None:
        pairs = [(old, new) for n in to_compare if (old := matches[n].before) and (new := matches[n].after)]
        before = self.digests.find_digests([old for old, _ in pairs])
        after = self.digests.find_digests([new for _, new in pairs])
        for n, (old, new), old_digest, new_digest in zip(to_compare, pairs, before, after, strict=True):
            if old_digest is None or new_digest is None:
                why = "one side has no values" if old_digest != new_digest else "neither side has values"
                inconclusive = self._cannot_tell(new, why) if old_digest != new_digest else None
                outcomes[n] = _PairResult(not_compared=why, inconclusive=inconclusive)
            elif old.dtype != new.dtype:
                why = "the dtypes differ, and a snapshot has only digests"
                inconclusive = self._cannot_tell(new, why) if Field.DTYPE in self.request.ignore else None
                outcomes[n] = _PairResult(not_compared=why, inconclusive=inconclusive)
            elif old_digest != new_digest:
                outcomes[n] = _PairResult(differs=True)

    def _check(self, unpaired: Sequence[tuple[int, TensorInfo]], outcomes: list[_PairResult]) -> None:
        """Check unpaired tensors for damage, because a damaged tensor is not an added tensor."""
        with require_numpy():
            from statecli.values.compare import check_checksums

        errors = check_checksums([row for _, row in unpaired], jobs=self.request.jobs)
        for (n, row), row_errors in zip(unpaired, errors, strict=True):
            if row_errors:
                outcomes[n] = _PairResult(not_compared="could not be read", error=str(row_errors[0]))
            elif id(row) in self.inconclusive:
                outcomes[n] = _PairResult(error=str(self.inconclusive[id(row)]))

    def _of_two_shapes(
        self, after: TensorInfo, why: str = "the shapes differ", *, reshaped: bool = False
    ) -> _PairResult:
        if Field.SHAPE not in self.request.ignore:
            return _PairResult(not_compared=why, reshaped=reshaped)
        # If shapes are ignored, it is undefined which values correspond.
        return _PairResult(not_compared=why, inconclusive=self._cannot_tell(after, why))

    def _outcome(self, result: object, before: TensorInfo, after: TensorInfo) -> _PairResult:
        """Return the outcome of a pair.

        An inconclusive pair, neither equal nor different, is an error unless both are the same bytes of a file.
        """
        if isinstance(result, Delta):
            return _PairResult(result) if result.changed else _EQUAL
        if isinstance(result, StateError):
            changed_file = result.path if isinstance(result, FileChanged) else None
            return _PairResult(not_compared="could not be read", error=str(result), changed_file=changed_file)
        reason = str(getattr(result, "reason", result))
        if getattr(result, "reshaped", False):
            return self._of_two_shapes(after, reason, reshaped=True)
        if before.data == after.data and before.parts == after.parts and (before.data or before.parts):
            return _EQUAL
        from statecli.core.quantized_weights import split_codes

        if (split_codes(before) is None) is not (split_codes(after) is None):
            return _PairResult(not_compared=reason, has_codes=True)
        return _PairResult(not_compared=reason, inconclusive=self._cannot_tell(after, reason))

    def _cannot_tell(self, row: TensorInfo, why: str) -> str:
        files = " and ".join(dict.fromkeys((self.before.target, self.after.target)))
        message = f"{files}: {row.fqn}: statecli does not know whether the values differ: {why}"
        return f"{message}; exclude the tensor with -x, or give --ignore values"

    def _changes(
        self, matches: Sequence[Match], differing: Sequence[tuple[Field, ...]], outcomes: Sequence[_PairResult]
    ) -> tuple[list[Change], list[Broken]]:
        changes: list[Change] = []
        broken: list[Broken] = []
        for match, fields, outcome in zip(matches, differing, outcomes, strict=True):
            row = match.shown
            before, after = match.before, match.after
            damage = (before and before.damage) or (after and after.damage)
            if error := damage or outcome.error:
                broken.append(Broken(row.fqn, row.section, error))
                if not damage and outcome.changed_file is not None:
                    self.changed_files.add(outcome.changed_file)
            elif outcome.inconclusive:
                broken.append(Inconclusive(row.fqn, row.section, outcome.inconclusive))
            if damage or (not fields and (outcome.error or outcome.inconclusive)):
                continue
            changes.append(self._change(match, fields, outcome))
        return changes, broken

    def _change(self, match: Match, fields: tuple[Field, ...], outcome: _PairResult) -> Change:
        row, before, after = match.shown, match.before, match.after
        if outcome.delta is not None or outcome.has_codes or outcome.differs:
            fields = _add_values(fields)
        if outcome.reshaped:
            fields = tuple(field for field in Field if field is Field.SHAPE or field in fields)
        return Change(
            row.fqn,
            row.section,
            _find_status(match, fields),
            self._kind(match),
            fields,
            before.fqn if before and after and before.fqn != after.fqn else None,
            before,
            after,
            outcome.delta,
            outcome.not_compared,
        )

    def _check_merge(self, changes: list[Change]) -> tuple[list[Change], list[Broken]]:
        """Return the changes with the effects of a merge of the adapter, and the pairs that could not be checked."""
        if self.adapter is None or pool.is_partial():
            return changes, []
        with require_numpy():
            from statecli.commands.diff.transformations.merges import check_adapter

        merge = check_adapter(changes, self.before, self.adapter, jobs=self.request.jobs)
        for n, transformation in merge.transformations.items():
            changes[n] = replace(changes[n], transformation=transformation)
        return changes, merge.broken

    def _explain(self, changes: list[Change]) -> list[Change]:
        """Return the changes with the transformations of their tensors."""
        if (
            not self.values
            or self.digests
            or not any(change.fields or change.status is not Status.IDENTICAL for change in changes)
            or (not pool.is_distributed() and is_training(changes))
        ):
            return changes
        with require_numpy():
            from statecli.commands.diff.transformations.find import find_transformations

        return find_transformations(
            changes,
            self.sections,
            self.after.metadata.values,
            expects_casts=self.request.cast,
            jobs=self.request.jobs,
        )

    def _estimate_ranks(self, changes: list[Change]) -> list[Change]:
        """Return the changes with the rank of the difference of each matrix, if requested."""
        if not self.request.ranks or pool.is_partial() or all(change.values is None for change in changes):
            return changes
        with require_numpy():
            from statecli.commands.diff.change_ranks import estimate_change_ranks

        ranks = estimate_change_ranks(changes, jobs=self.request.jobs)
        return [
            change
            if n not in ranks or change.values is None
            else replace(change, values=replace(change.values, rank=ranks[n]))
            for n, change in enumerate(changes)
        ]

    def _settle_codes(self, changes: Sequence[Change]) -> tuple[list[Change], list[Broken]]:
        """Return the changes, and an error for each pair of a weight and codes that could not be dequantized."""
        settled: list[Change] = []
        undecided: list[Broken] = []
        for change in changes:
            if change.not_compared is None or Field.VALUES not in change.fields:
                settled.append(change)
            elif change.transformation is not None:
                settled.append(replace(change, not_compared=None))
            else:
                assert change.after is not None  # noqa: S101 - both sides have values
                message = self._cannot_tell(change.after, change.not_compared)
                undecided.append(Inconclusive(change.fqn, change.section, message))
                fields = tuple(field for field in change.fields if field is not Field.VALUES)
                if fields:
                    settled.append(replace(change, fields=fields))
        return settled, undecided

    def _drop_explained_settings(self, settings: list[ScalarChange], changes: Sequence[Change]) -> list[ScalarChange]:
        """Return the settings that differ, without attributes of quantized tensors and settings of an adapter alone.

        An expectation judges all of them.
        """
        if self.request.expected:
            return settings
        if any(c.transformation is not None and c.transformation.kind is TransformationKind.ADAPTER for c in changes):
            note, what, which = "adapter-settings", "setting", "that only the model or only the adapter has"
            kept = [change for change in settings if change.status is Status.CHANGED]
        else:
            note, what, which = "quantized-attributes", "attribute", "of quantized tensors (torch subclasses)"
            kinds = (TransformationKind.QUANTIZED, TransformationKind.DEQUANTIZED)
            done = [c for c in changes if c.transformation is not None and c.transformation.kind in kinds]
            quantized = {name for c in done for name in (c.fqn, f"{c.section}.{c.fqn}")}
            kept = [change for change in settings if not quantized or quantized.isdisjoint(_list_stems(change.key))]
        if len(kept) < len(settings):
            self._note(note, f"statecli does not list {plural(len(settings) - len(kept), what)} {which}")
        return kept

    def _settings(self) -> tuple[list[ScalarChange], list[str]]:
        """Return the selected different settings, and the names of all compared settings; note settings left out."""
        if self.any_class:
            return [], []
        selected_sections = split_section(self.request.before)[1], split_section(self.request.after)[1]
        paired = {} if any(selected_sections) else self.sections
        old_settings, new_settings = unify_settings(self.before, self.after, self.optimizers)
        states = replace(self.before, metadata=old_settings), replace(self.after, metadata=new_settings)
        changes, names, notes = scalars.compare_settings(*states, selected_sections, paired)
        old, new = selected_sections
        versions = list(compare_versions(self.before, self.after, {old: new} if old and new else self.sections))
        changes, names = [*changes, *versions], [*names, *(change.key for change in versions)]
        left_out = [change.key for change in changes if not self._is_wanted_setting(change.key)]
        if left_out:
            differ = "setting differs" if len(left_out) == 1 else "settings differ"
            message = f"{len(left_out)} {differ} but {'is' if len(left_out) == 1 else 'are'} not selected"
            notes.append(Oddity("settings-left-out", f"{message}: {quoting.names(left_out)}"))
        self.notes += notes
        selected = [change for change in changes if self._is_wanted_setting(change.key)]
        return selected, [name for name in names if self._is_wanted_setting(name)]

    def _is_wanted_setting(self, name: str) -> bool:
        return not self.selection.selects_by_tensor and self._is_wanted_name(name)

    def _histograms(self, changes: Sequence[Change]) -> tuple[Histogram, ...]:
        if not self.request.histograms:
            return ()
        from statecli.values.compare import Pair
        from statecli.values.histogram import compute_histograms

        # The values of codes are not numbers, so they have no largest difference.
        spread = (
            c for c in changes if (d := c.values) and d.max_abs is not None and c.before and c.after and d.elements > 1
        )
        # Parameters come first, because counters and moments change most; those that start near zero come last of them.
        most = sorted(spread, key=partial(_order_change, find_near_zero(changes)), reverse=True)
        most = most[: self.request.histograms]
        pairs = [Pair(c.before, c.after) for c in most if c.before and c.after]
        spreads = compute_histograms(pairs, [c.values for c in most if c.values])
        return tuple(Histogram(c.fqn, c.section, *bins) for c, bins in zip(most, spreads, strict=True) if bins)

    def _moving(self) -> list[Broken]:
        """Return errors for files changed during their reading, unless reported by a pair."""
        paths = [path for path in find_changed(self.seen) if path not in self.changed_files]
        self.changed_files.update(paths)
        return [Broken("(file)", "", f"{path}: {CHANGED}") for path in sorted(paths)]

    # --- what it means ----------------------------------------------------------------------------------------------

    def _check_load(
        self, all_matches: Sequence[Match], states: tuple[ModelState, ModelState], changes: Sequence[Change]
    ) -> load_check.LoadCheck:
        if not self.loads:
            return load_check.LoadCheck()
        result = load_check.check_load(
            all_matches, *states, self.model, self.built[self.model.target], self.request.ignore
        )
        if len(changes) == len(all_matches) and not self.selection.exclude:
            return result
        rows = {name for match in all_matches for name in match.names}
        left = {name for change in changes for name in (change.fqn, change.renamed_from)}
        return result.select_names(lambda name: name in left or (name not in rows and self._is_wanted_name(name)))

    def _explain_load(self) -> Explanation | None:
        """Return the cause of all findings about loading, if the options select all tensors."""
        if not self.loads or self.selection or self.request.expected or self.request.map:
            return None
        from statecli.commands.explain.run import explain_states

        checkpoint = self.after if self.model is self.before else self.before
        return explain_states(self.model, self.built[self.model.target], checkpoint)

    def _findings(
        self,
        loaded: Sequence[Finding],
        changes: Sequence[Change],
        broken: Sequence[Broken],
        setting_changes: Sequence[ScalarChange],
        settings: Sequence[str],
    ) -> expectations.ExpectationResults:
        """Check the expectations; without any, each difference is a finding."""
        targets = self.before.target, self.after.target
        expected = self.request.expected
        if not expected:
            changes, settings = self._differing(changes), ()
        tensors = expectations.tensor_entries(changes, broken, targets, sectioned=self.sectioned, values=self.values)
        entries = chain(tensors, expectations.setting_entries(setting_changes, settings, targets))
        if not expected:
            return expectations.ExpectationResults([*loaded, *expectations.report_differences(entries)])
        verdict = expectations.check_expectations(expected, list(entries), targets)
        reported = {item.fqn for item in broken}
        inconclusive = [item for item in verdict.inconclusive if item.fqn not in reported]
        return replace(verdict, inconclusive=inconclusive)

    def _differing(self, changes: Sequence[Change]) -> list[Change]:
        differing = [change for change in changes if change.status is not Status.IDENTICAL]
        if not self.loads:
            return differing
        # The load check reports added and removed tensors and other shapes.
        rest = [(c, tuple(f for f in c.fields if f is not Field.SHAPE)) for c in differing if c.before and c.after]
        return [msgspec.structs.replace(c, fields=fields) for c, fields in rest if fields]


def _list_stems(key: str) -> list[str]:
    """`a.b` and `a` of `a.b.c`"""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


@lru_cache(maxsize=128)
def _add_values(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the same tuple for all changes of these fields, possibly a million."""
    return (*fields, Field.VALUES)


def _merge_renames(matches: Sequence[Match], renames: Sequence[Match]) -> list[Match]:
    """Return the matches, with matches by bytes in place of their two halves."""
    renamed = {id(row) for match in renames for row in (match.before, match.after)}
    return [match for match in matches if (match.before and match.after) or id(match.shown) not in renamed] + list(
        renames
    )


def _has_no_values(row: TensorInfo) -> bool:
    """Return True on meta or before initialization: there are no values, rather than unreadable values."""
    is_empty = row.device == "meta" or row.note_kind is NoteKind.UNINITIALIZED
    return is_empty and row.data is None and not row.parts


def _find_status(match: Match, fields: tuple[Field, ...]) -> Status:
    if match.before is None:
        return Status.ADDED
    if match.after is None:
        return Status.REMOVED
    if match.way is MatchedBy.BYTES:
        return Status.RENAMED
    return Status.CHANGED if fields else Status.IDENTICAL


def _order_change(near_zero: frozenset[int], change: Change) -> tuple[bool, bool, float, float]:
    """Return a sort key.

    Tensors that were zero before, as most biases, come last: their relative change is undefined.
    """
    delta = change.values or Delta()
    is_parameter = change.kind is Kind.PARAMETER
    return is_parameter, id(change) not in near_zero, delta.relative_l2 or 0.0, delta.max_abs or 0.0


#: Oddities about tensors that a reader left out.
_NOT_READ = (
    OddityKind.TOO_DEEP,
    OddityKind.NOT_SEARCHED,
    OddityKind.OPAQUE_CLASS,
    OddityKind.PACKED_PARAMS,
    OddityKind.SCRIPT_MODULE,
)
#: Oddities that are in `Diff.broken`, and those that any module may have.
_REPORTED_ELSEWHERE = (OddityKind.METADATA_CUT, OddityKind.NONE_PARAMETER)


def _inconclusive_settings(state: ModelState) -> list[Broken]:
    """Return errors for settings too many to read, because the rest may differ."""
    oddities = [oddity for oddity in state.oddities if oddity.kind is OddityKind.METADATA_CUT]
    return [
        Inconclusive(
            "(settings)",
            "",
            f"{state.target}: {oddity.message}: statecli does not know whether the remaining settings differ",
        )
        for oddity in oddities
    ]


def _list_oddities(state: ModelState) -> Iterator[Oddity]:
    """Yield the oddities of a file, and tensors left out by a reader, because often only a diff is run."""
    for oddity in state.oddities:
        if oddity.kind in _NOT_READ:
            yield Oddity(oddity.name, f"{state.target}: {oddity.message}: not compared", oddity.fqn)
        elif oddity.kind not in _REPORTED_ELSEWHERE and not load_check.is_class(state):
            yield Oddity(oddity.name, f"{state.target}: {oddity.message}", oddity.fqn)
