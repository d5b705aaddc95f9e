"""One run of `statecli diff`: what is read, paired, compared and expected, in this order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain

import msgspec

from statecli import formats, live
from statecli.commands.diff import changed_fields, expectations, load_check, pairing, renames, suggest_map
from statecli.commands.diff import settings as scalars
from statecli.commands.diff.pairing import Match, Way
from statecli.commands.diff.result import Broken, Change, Diff, Field, Histogram, ScalarChange, Status
from statecli.core import quoting
from statecli.core.errors import NothingMatched, StateError
from statecli.core.finding import Finding
from statecli.core.float_mode import with_denormals
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.core.selection import Selection, glob_names
from statecli.core.state import Kind, ModelState, Oddity, TensorInfo
from statecli.live.build import Built
from statecli.pickles.machine import pause_gc
from statecli.storage import files
from statecli.storage.file_version import CHANGED, FileVersion, find_changed, read_versions
from statecli.targets import load
from statecli.values import pool
from statecli.values.delta import Delta, How
from statecli.values.require_numpy import require_numpy


class Request(msgspec.Struct, frozen=True):
    """What the user asked of `diff`; both sides as the targets they are. Globs are unions; `jobs` 0 is the cores.

    `histograms` is of how many tensors (those that changed most) the spread of the differences is wanted. `prefixes`:
    those of wrappers are looked through though no renames are looked for.
    """

    before: str
    after: str
    how: How = How()
    values: bool = True
    renames: bool = True
    prefixes: bool = False
    map: tuple[str, ...] = ()
    ignore: tuple[Field, ...] = ()
    only: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    init_device: str = "cpu"
    jobs: int = 0
    histograms: int = 0

    @property
    def expected(self) -> expectations.Expected:
        """What decides the exit code, rather than any difference."""
        return expectations.Expected(self.only, self.frozen, self.changed)


def compare(request: Request, progress: Progress | None = None) -> Diff:
    """Read both targets, pair their tensors, and say what differs.

    `progress` is told the bytes of before whose values are compared. Raises `StateError` for what cannot be done at
    all, `NothingMatched` where nothing is left to compare; a file that fails for one pair is in `Diff.broken`.
    """
    built: dict[str, Built] = {}
    # What another process reads is opened there.
    seen = read_versions(_paths(request))
    with files.record_opened_files() as opened:
        before, after = _read_both(request, built)
    return of_states(request, before, after, built, {**seen, **opened}, progress)


@with_denormals
def of_states(
    request: Request,
    before: ModelState,
    after: ModelState,
    built: dict[str, Built],
    seen: Mapping[str, FileVersion | None],
    progress: Progress | None = None,
) -> Diff:
    """`compare`, of two targets that were read already; `built` has the module of each that is a class, by its text.

    `seen` are the stamps of their files from before they were read.
    """
    with pause_gc():
        return _Comparison(request, before, after, built, seen).diff(progress)


#: Bytes of both files from which on the second is read by a process of its own. What takes time is a long pickle, and
#: how long it is only reading tells; a process more costs a fiftieth of a second.
WORTH_A_PROCESS = 8 << 20


def _read_both(request: Request, built: dict[str, Built]) -> tuple[ModelState, ModelState]:
    sides = (request.before, request.after), (request.after, request.before)
    both = [one if os.path.lexists(one) else load.class_for(one, other) for one, other in sides]
    paths = _paths(request)
    large = all(os.path.isfile(path) and os.path.getsize(path) >= WORTH_A_PROCESS for path in paths)
    if not large or request.jobs == 1 or not pool.forks() or formats.is_quick_to_read(paths[1]):
        return _read(both[0], request, built), _read(both[1], request, built)
    with pool.beside(pack_checkpoint, both[1]) as after:
        before, raw = _read(both[0], request, built), after()
    return before, unpack_checkpoint(raw) or _read(both[1], request, built)


def _paths(request: Request) -> list[str]:
    return [load.split(text)[0] for text in (request.before, request.after)]


def pack_checkpoint(text: str) -> bytes:
    """Read a checkpoint and return its state as bytes; b"" where msgpack cannot hold a 65-bit integer, a surrogate."""
    try:
        return msgspec.msgpack.encode(load.checkpoint(text))
    except (OverflowError, UnicodeEncodeError):
        return b""


def unpack_checkpoint(packed: bytes) -> ModelState | None:
    """Return the state that `pack_checkpoint` packed; None for b""."""
    return msgspec.msgpack.decode(packed, type=ModelState) if packed else None


def _read(text: str, request: Request, built: dict[str, Built]) -> ModelState:
    """The state of one target; the module of a class is kept in `built`."""
    spec = load.spec_of(text)
    if spec is None:
        return load.checkpoint(text)
    built[text] = load.model(spec, init_device=request.init_device, values=False)
    return live.read(built[text], text)


#: Pairs whose values are compared together: their tasks and results take a kilobyte a pair.
PAIRS_AT_ONCE = 1 << 15
#: What is said of a pair whose values are there, and not comparable.
VALUES_UNTOLD = "cannot tell whether its values differ"
#: What stands for the settings in the place of a name.
SETTINGS = "(settings)"


class _Outcome(msgspec.Struct, frozen=True, gc=False):
    """What comparing a pair's values gave; nothing where that was not asked or they are equal.

    `reshaped`: a shape differs that only reading them told, that of a nested tensor's inner ones.
    """

    delta: Delta | None = None
    not_compared: str | None = None
    error: str | None = None
    reshaped: bool = False


_EQUAL = _Outcome()


class _Comparison:
    """One run, from two states to a `Diff`."""

    def __init__(
        self,
        request: Request,
        before: ModelState,
        after: ModelState,
        built: dict[str, Built],
        seen: Mapping[str, FileVersion | None],
    ) -> None:
        self.request, self.before, self.after, self.built, self.seen = request, before, after, built, seen
        self.selection = Selection(request.include, request.exclude, request.kind)
        classes = load_check.is_class(before), load_check.is_class(after)
        self.any_class, self.loads = any(classes), classes[0] is not classes[1]
        self.model = before if classes[0] else after
        #: A wrapper's prefix is another name; that a class would not load it is said, not that all is missing.
        self.prefixes = request.renames or request.prefixes or self.loads
        self.values = request.values and not self.any_class and Field.VALUES not in request.ignore
        self.notes: list[Oddity] = []
        self.sections: dict[str, str] = {}
        #: By `id`, the tensors that may be another under a new name, and why that cannot be told.
        self.untold: dict[int, StateError] = {}
        #: Whether there are tensors of more than one, whose names then stand before theirs.
        self.sectioned = False

    def diff(self, progress: Progress | None) -> Diff:
        self._note_values()
        compared = self._compared()
        every = self._matches(*compared)
        matches = [match for match in every if self._is_wanted(match)]
        beside, settings = self._settings()
        if not matches and not (every and settings):
            raise NothingMatched(self._nothing(len(every)))
        if not matches:
            self._note("settings-alone", f"only settings were asked for: {len(settings)} compared")
        differing = changed_fields.differing(matches, self.request.ignore, devices=not self.any_class)
        outcomes = self._outcomes(matches, progress)
        changes, broken = self._changes(matches, differing, outcomes)
        loaded = self._loaded(every, compared, changes)
        del every, matches, differing, outcomes  # as large as the changes, of which the findings are made next
        findings, untold = self._findings(loaded.findings, changes, broken, beside, settings)
        histograms = self._histograms(changes)
        return Diff(
            before=self.before,
            after=self.after,
            changes=tuple(changes),
            scalars=tuple(beside),
            findings=tuple(findings),
            notes=tuple(dict.fromkeys((*self.notes, *loaded.notes, *_told(self.before), *_told(self.after)))),
            broken=(*broken, *loaded.broken, *untold, *_cut(self.before), *_cut(self.after), *self._moving(broken)),
            histograms=histograms,
            expected=bool(self.request.expected),
            how=self.request.how if self.values else None,
            ignored=self.request.ignore,
        )

    def _note_values(self) -> None:
        if self.any_class:
            why = f"{self.model.target} is a class: its values are only initial ones, and its device where it was built"
            self._note(OddityKind.VALUES_NOT_COMPARED.value, f"values are not compared: {why}")
        elif not self.values:
            option = "--ignore values" if self.request.values else "--metadata-only"
            self._note(OddityKind.VALUES_NOT_COMPARED.value, f"values are not compared: {option}")

    def _note(self, name: str, message: str) -> None:
        self.notes.append(Oddity(name, message))

    # --- what is compared with what ---------------------------------------------------------------------------------

    def _compared(self) -> tuple[ModelState, ModelState]:
        """Both states without what the other cannot have."""
        if not self.loads:
            return self._of_files()
        checkpoint = self.after if self.model is self.before else self.before
        checkpoint, notes = load_check.of_model(checkpoint, self.model)
        checkpoint, more = load_check.expected(checkpoint)
        if not checkpoint.tensors:
            raise NothingMatched(f"{checkpoint.target}: holds no tensor that {self.model.target} would load")
        model, most = load_check.expected(self.model)
        self.notes += [*notes, *more, *most]
        return (model, checkpoint) if self.model is self.before else (checkpoint, model)

    def _of_files(self) -> tuple[ModelState, ModelState]:
        """Both; of a module pickled whole what its state_dict would hold, where the other side has no such module."""
        both, apart = load_check.of_folders(self.before, self.after)
        self.notes += apart
        if self.any_class or all(state.whole_modules for state in both):
            return both
        (before, notes), (after, more) = (load_check.expected(one) if one.whole_modules else (one, []) for one in both)
        self.notes += [*notes, *more]
        return before, after

    def _matches(self, before: ModelState, after: ModelState) -> list[Match]:
        found = pairing.matched(before, after, self.request.map, prefixes=self.prefixes)
        self.sections = found.sections
        # A class has one section, whatever a checkpoint calls it.
        self.notes += [note for note in found.notes if not (self.loads and note.kind is OddityKind.SECTIONS_PAIRED)]
        matches = found.matches
        if self.loads:
            model = before if self.model is self.before else after
            matches, notes = load_check.as_loaded(matches, model, self.built.get(model.target))
            matches = pairing.in_order(matches, before, after)
            self.notes += notes
        self.sectioned = len({match.shown.section for match in matches}) > 1
        if self.values and self.request.renames:
            with require_numpy():
                same = renames.found(matches, found.sections, self._is_wanted_row, jobs=self.request.jobs)
            # A share knows the renames of its own tensors alone: it leaves the pairs as all others have them.
            if not pool.is_share():
                self.untold = same.untold
                matches = pairing.in_order(_joined(matches, same.matches), before, after) if same.matches else matches
        self.notes += suggest_map.of_prefix(
            matches, found.sections, before, after, self.request.map, prefixes=self.prefixes
        )
        return matches

    def _is_wanted(self, match: Match) -> bool:
        asked = self.request
        if not (asked.include or asked.exclude or asked.kind):
            return True
        if asked.kind and self._kind(match) not in asked.kind:
            return False
        return self._is_wanted_name(*(name for row in (match.before, match.after) if row for name in self._names(row)))

    def _kind(self, match: Match) -> Kind:
        """The kind after, or before where it was removed. A checkpoint's is guessed, a class's is not."""
        by_class = match.before if self.loads and self.model is self.before else None
        return (by_class or match.shown).kind

    def _is_wanted_row(self, row: TensorInfo) -> bool:
        return self.selection.selects(row, by_section=self.sectioned)

    def _names(self, row: TensorInfo) -> tuple[str, ...]:
        return glob_names(row.fqn, row.section, by_section=self.sectioned)

    def _is_wanted_name(self, *names: str) -> bool:
        return self.selection.selects_name(names)

    def _nothing(self, count: int) -> str:
        both = f"{self.request.before} and {self.request.after}"
        if not count:
            return f"{both}: neither holds a tensor, so nothing was compared"
        return f"{both}: none of their {count} tensors matches {self.selection}"

    # --- what differs -----------------------------------------------------------------------------------------------

    def _outcomes(self, matches: Sequence[Match], progress: Progress | None) -> list[_Outcome]:
        found = [_EQUAL] * len(matches)
        wanted: list[int] = []
        alone: list[tuple[int, TensorInfo]] = []
        for n, match in enumerate(matches if self.values else ()):
            if match.before is None or match.after is None:
                alone.append((n, match.shown))
            elif changed_fields.shape(match.before) != changed_fields.shape(match.after):
                found[n] = self._of_two_shapes(match.shown)
                alone += [(n, match.before), (n, match.after)]
            elif match.way is Way.BYTES:
                continue  # equal bit for bit: that is how they were found
            elif _is_hollow(match.before) and _is_hollow(match.after):
                found[n] = _Outcome(not_compared="neither side holds values")
            else:
                wanted.append(n)
        if wanted:
            self._compare(wanted, matches, found, progress)
        if alone:
            self._check(alone, found)
        return found

    def _compare(
        self,
        wanted: Sequence[int],
        matches: Sequence[Match],
        found: list[_Outcome],
        progress: Progress | None,
    ) -> None:
        with require_numpy():
            from statecli.values.compare import Pair, compare_all

        total = sum(before.nbytes for n in wanted if (before := matches[n].before))
        advance = progress(total) if progress else None
        for at in range(0, len(wanted), PAIRS_AT_ONCE):
            numbers = wanted[at : at + PAIRS_AT_ONCE]
            pairs = [Pair(one, two) for n in numbers if (one := matches[n].before) and (two := matches[n].after)]
            results = compare_all(pairs, self.request.how, jobs=self.request.jobs, progress=advance, seen=self.seen)
            for n, pair, result in zip(numbers, pairs, results, strict=True):
                found[n] = self._outcome(result, pair.before, pair.after)

    def _check(self, alone: Sequence[tuple[int, TensorInfo]], found: list[_Outcome]) -> None:
        """What is compared with nothing may be damaged all the same: that is no way to be added."""
        with require_numpy():
            from statecli.values.compare import damages

        errors = damages([row for _, row in alone], jobs=self.request.jobs)
        for (n, row), wrong in zip(alone, errors, strict=True):
            if wrong:
                found[n] = _Outcome(not_compared="could not be read", error=str(wrong[0]))
            elif id(row) in self.untold:
                found[n] = _Outcome(error=str(self.untold[id(row)]))

    def _of_two_shapes(self, after: TensorInfo, why: str = "the shapes differ", *, reshaped: bool = False) -> _Outcome:
        if Field.SHAPE not in self.request.ignore:
            return _Outcome(not_compared=why, reshaped=reshaped)
        # The shape is said not to count, and what of the values is then the same nobody has said.
        return _Outcome(not_compared=why, error=self._cannot_tell(after, why))

    def _outcome(self, result: object, before: TensorInfo, after: TensorInfo) -> _Outcome:
        """A pair that cannot be told equal or different is broken, unless both are the same bytes of the same file."""
        if isinstance(result, Delta):
            return _Outcome(result) if result.changed else _EQUAL
        if isinstance(result, StateError):
            return _Outcome(not_compared="could not be read", error=str(result))
        reason = str(getattr(result, "reason", result))
        if getattr(result, "reshaped", False):
            return self._of_two_shapes(after, reason, reshaped=True)
        if before.data == after.data and before.parts == after.parts and (before.data or before.parts):
            return _EQUAL
        return _Outcome(not_compared=reason, error=self._cannot_tell(after, reason))

    def _cannot_tell(self, row: TensorInfo, why: str) -> str:
        files = " and ".join(dict.fromkeys((self.before.target, self.after.target)))
        said = f"{files}: {row.fqn}: {VALUES_UNTOLD}: {why}"
        return f"{said}; leave it out with -x, or --ignore values"

    def _changes(
        self, matches: Sequence[Match], differing: Sequence[tuple[Field, ...]], outcomes: Sequence[_Outcome]
    ) -> tuple[list[Change], list[Broken]]:
        changes: list[Change] = []
        broken: list[Broken] = []
        for match, known, outcome in zip(matches, differing, outcomes, strict=True):
            row = match.shown
            damage = (one.damage for one in (match.before, match.after) if one and one.damage)
            if (error := next(damage, outcome.error)) is not None:
                broken.append(Broken(row.fqn, row.section, error))
                if not known or error is not outcome.error:
                    continue
            changes.append(self._change(match, known, outcome))
        return changes, broken

    def _change(self, match: Match, known: tuple[Field, ...], outcome: _Outcome) -> Change:
        row = match.shown
        if outcome.delta is not None:
            known = _with_values(known)
        if outcome.reshaped:
            known = tuple(field for field in Field if field is Field.SHAPE or field in known)
        return Change(
            row.fqn,
            row.section,
            _status(match, known),
            self._kind(match),
            known,
            match.before.fqn if match.before and match.after and match.before.fqn != match.after.fqn else None,
            match.before,
            match.after,
            outcome.delta,
            outcome.not_compared,
        )

    def _settings(self) -> tuple[list[ScalarChange], list[str]]:
        """The settings asked for that differ, and the names of all that were; what was not asked for is noted."""
        if self.any_class:
            return [], []
        cut = load.split(self.request.before)[1], load.split(self.request.after)[1]
        paired = {} if any(cut) else self.sections
        found, names, notes = scalars.changed_scalars(self.before, self.after, cut, paired)
        left_out = [one.key for one in found if not self._is_wanted_setting(one.key)]
        if left_out:
            differ = "setting differs" if len(left_out) == 1 else "settings differ"
            message = f"{len(left_out)} {differ} and {'was' if len(left_out) == 1 else 'were'} not asked for"
            notes.append(Oddity("settings-left-out", f"{message}: {quoting.names(left_out)}"))
        self.notes += notes
        wanted = [one for one in found if self._is_wanted_setting(one.key)]
        return wanted, [name for name in names if self._is_wanted_setting(name)]

    def _is_wanted_setting(self, name: str) -> bool:
        return not self.request.kind and self._is_wanted_name(name)

    def _histograms(self, changes: Sequence[Change]) -> tuple[Histogram, ...]:
        if not self.request.histograms:
            return ()
        from statecli.values.compare import Pair
        from statecli.values.histogram import histograms

        spread = (c for c in changes if c.values and c.before and c.after and c.values.elements > 1)
        # A counter or a moment changes most of all: what is learned comes first.
        most = sorted(spread, key=lambda c: (c.kind is Kind.PARAMETER, _by_how_much(c)), reverse=True)
        most = most[: self.request.histograms]
        pairs = [Pair(c.before, c.after) for c in most if c.before and c.after]
        spreads = histograms(pairs, [c.values for c in most if c.values])
        return tuple(Histogram(c.fqn, c.section, *one) for c, one in zip(most, spreads, strict=True) if one)

    def _moving(self, told: Sequence[Broken]) -> list[Broken]:
        """Files that changed while they were read, where no pair has said so."""
        paths = (path for path in find_changed(self.seen) if not any(_is_of(path, one.message) for one in told))
        return [Broken("(file)", "", f"{path}: {CHANGED}") for path in sorted(paths)]

    # --- what it means ----------------------------------------------------------------------------------------------

    def _loaded(
        self, every: Sequence[Match], compared: tuple[ModelState, ModelState], changes: Sequence[Change]
    ) -> load_check.Loaded:
        if not self.loads:
            return load_check.Loaded()
        found = load_check.loaded(every, *compared, self.model, self.built[self.model.target], self.request.ignore)
        if len(changes) == len(every) and not self.request.exclude:
            return found
        rows = {name for match in every for name in match.names}
        left = {name for change in changes for name in (change.fqn, change.renamed_from)}
        return found.only(lambda name: name in left or (name not in rows and self._is_wanted_name(name)))

    def _findings(
        self,
        loaded: Sequence[Finding],
        changes: Sequence[Change],
        broken: Sequence[Broken],
        beside: Sequence[ScalarChange],
        settings: Sequence[str],
    ) -> tuple[list[Finding], list[Broken]]:
        """What makes it exit 1, and of which expectations nobody can tell."""
        targets = self.before.target, self.after.target
        expected = self.request.expected
        if not expected:
            changes, settings = self._differing(changes), ()
        tensors = expectations.of_tensors(changes, broken, targets, sectioned=self.sectioned, values=self.values)
        entries = chain(tensors, expectations.of_settings(beside, settings, targets))
        if not expected:
            return [*loaded, *expectations.differences(entries)], []
        found, untold = expectations.failures(expected, list(entries), targets)
        return found, [one for one in untold if one.fqn not in {other.fqn for other in broken}]

    def _differing(self, changes: Sequence[Change]) -> list[Change]:
        differing = [change for change in changes if change.status is not Status.IDENTICAL]
        if not self.loads:
            return differing
        # Added, removed and another shape are said in the words of load_state_dict.
        rest = [(c, tuple(f for f in c.fields if f is not Field.SHAPE)) for c in differing if c.before and c.after]
        return [msgspec.structs.replace(c, fields=known) for c, known in rest if known]


@lru_cache(maxsize=128)
def _with_values(known: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return one tuple for all changes of these fields, of which there may be a million."""
    return (*known, Field.VALUES)


def _is_of(path: str, message: str) -> bool:
    return message.startswith(f"{path}: ") and message.endswith(CHANGED)


def _joined(matches: Sequence[Match], same: Sequence[Match]) -> list[Match]:
    """The matches with those found later in place of the two halves they were."""
    taken = {id(row) for match in same for row in (match.before, match.after)}
    return [match for match in matches if (match.before and match.after) or id(match.shown) not in taken] + list(same)


def _is_hollow(row: TensorInfo) -> bool:
    """On meta, or not yet initialized: there are no values, rather than none that can be read."""
    return row.data is None and not row.parts and (row.device == "meta" or "uninitialized" in (row.note or ""))


def _status(match: Match, known: tuple[Field, ...]) -> Status:
    if match.before is None:
        return Status.ADDED
    if match.after is None:
        return Status.REMOVED
    if match.way is Way.BYTES:
        return Status.RENAMED
    return Status.CHANGED if known else Status.IDENTICAL


def _by_how_much(change: Change) -> tuple[float, float]:
    """What was zero before, as biases mostly were, comes last: any change of it is beyond measure."""
    delta = change.values or Delta()
    return delta.relative_l2 or 0.0, delta.max_abs or 0.0


#: What a reader left out: nothing can be said of it.
_LEFT_OUT = (
    OddityKind.TOO_DEEP,
    OddityKind.NOT_SEARCHED,
    OddityKind.OPAQUE_CLASS,
    OddityKind.PACKED_PARAMS,
    OddityKind.SCRIPT_MODULE,
)
#: What is in `Diff.broken`, and what any module may have.
_TOLD_ELSEWHERE = (OddityKind.METADATA_CUT, OddityKind.NONE_PARAMETER)


def _cut(state: ModelState) -> list[Broken]:
    """Settings that are too many to be read: whether they differ cannot be told."""
    odd = [odd for odd in state.oddities if odd.kind is OddityKind.METADATA_CUT]
    return [Broken(SETTINGS, "", f"{state.target}: {one.message}: cannot tell whether the rest differs") for one in odd]


def _told(state: ModelState) -> Iterator[Oddity]:
    """What is odd about a file, and what was left out of either side."""
    for odd in state.oddities:
        if odd.kind in _LEFT_OUT:
            yield Oddity(odd.name, f"{state.target}: {odd.message}: not compared", odd.fqn)
        elif odd.kind not in _TOLD_ELSEWHERE and not load_check.is_class(state):
            yield Oddity(odd.name, f"{state.target}: {odd.message}", odd.fqn)
