"""Run `statecli bisect`: a binary search over the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from statecli.commands.bisect import rules
from statecli.commands.bisect.condition import Condition, ConditionFigure
from statecli.commands.bisect.result import BisectAnswer, Bisection, Probe
from statecli.commands.log.cache import Cache
from statecli.commands.log.checkpoints import Checkpoint, Run, find_steps_in_names, order_run, order_run_by_names
from statecli.commands.log.measure import Measured, compare_checkpoints, compute_distance, measure_checkpoint
from statecli.commands.log.result import NAME_SOURCE
from statecli.commands.log.steps import STEP_KEYS, choose_steps, find_steps
from statecli.core import quoting
from statecli.core.errors import NothingMatched, StateError, UnreadableError, UsageError
from statecli.core.model_state import Oddity
from statecli.core.selection import suggest_glob
from statecli.core.units import join_names, plural


class Request(msgspec.Struct, frozen=True):
    """The options of `bisect`: folders of runs, globs and checkpoints, and the condition."""

    targets: tuple[str, ...]
    condition: Condition
    cache: bool = True


class _WrongOrder(Exception):
    """Error: the steps in the settings contradict the order by names, which the search assumed at first."""


def bisect_run(request: Request) -> Bisection:
    """Return the first checkpoint where the condition holds.

    The names order the checkpoints, if their numbers differ; then only the checkpoints of the search are read. If a
    setting of a read checkpoint contradicts this order, the settings of all checkpoints decide.

    Raises UnreadableError if there is no checkpoint, NothingMatched if the glob matches no tensor.
    """
    prober = _Prober(request)
    run = order_run_by_names(request.targets)
    if run is not None:
        with suppress(_WrongOrder):
            return _search(request, run, prober)
    run = order_run(request.targets)
    prober.check_order = False
    note = Oddity(
        "all-settings-read",
        f"statecli read the settings of all {len(run.checkpoints)} checkpoints, because the file names do "
        "not show the order of the steps",
    )
    return _search(request, replace(run, notes=(*run.notes, note)), prober)


class _Prober:
    """Decides for each checkpoint whether the condition holds, and reads each checkpoint only once."""

    def __init__(self, request: Request) -> None:
        self._condition = request.condition
        self._cache = Cache(enabled=request.cache)
        self._reference: Measured | None = None
        self.probes: dict[str, Probe] = {}
        #: Whether the names give the order, so that a setting may contradict it.
        self.check_order = True
        self._steps: dict[int, dict[str, int]] = {}
        self.steps_of_path: dict[str, dict[str, int]] = {}

    def decide(self, number: int, checkpoint: Checkpoint) -> Probe:
        """Return the result for the checkpoint at position `number` of the run. Read the checkpoint if not done yet."""
        probe = self.probes.get(checkpoint.path)
        if probe is None:
            probe = self.probes[checkpoint.path] = self._probe(number, checkpoint)
            if self.check_order:
                self._refuse_other_order()
        return probe

    def _probe(self, number: int, checkpoint: Checkpoint) -> Probe:
        if checkpoint.error is not None:
            return Probe(checkpoint.path, checkpoint.step, None, error=checkpoint.error)
        try:
            condition = self._condition
            measured = measure_checkpoint(
                checkpoint.path,
                self._cache,
                glob=condition.glob,
                reads_values=condition.measure is not ConditionFigure.CHANGED,
            )
            steps = self._steps[number] = find_steps(measured.state)
            self.steps_of_path[checkpoint.path] = steps
            holds, evidence = self._decide(measured)
        except UsageError:
            raise
        except StateError as error:
            return Probe(checkpoint.path, checkpoint.step, None, error=str(error))
        return Probe(checkpoint.path, checkpoint.step, holds, evidence)

    def _refuse_other_order(self) -> None:
        for key in STEP_KEYS:
            steps = [self._steps[number][key] for number in sorted(self._steps) if key in self._steps[number]]
            if steps != sorted(steps):
                raise _WrongOrder

    def _decide(self, measured: Measured) -> tuple[bool, str]:
        """Return whether the condition holds for a checkpoint, and the figure that decided."""
        is_reference = self._condition.compares and self._reference is None
        sides = [measured.model] if self._reference is None else [self._reference.model, measured.model]
        if not is_reference and not any(side.tensors for side in sides):
            glob = self._condition.glob or "*"
            problem = f"no tensor of the model matches {quoting.quote(glob)}"
            suggestion = suggest_glob(glob, (tensor.fqn for tensor in measured.state.tensors))
            raise NothingMatched(f"{measured.model.target}: {problem}{suggestion}")
        if not self._condition.compares:
            return self._count(measured)
        if self._reference is None:
            self._reference = measured
            return False, "statecli compares the other checkpoints with this checkpoint"
        if self._condition.measure is ConditionFigure.CHANGED:
            return self._find_changed(self._reference, measured)
        return self._compute_cosine(self._reference, measured)

    def _count(self, measured: Measured) -> tuple[bool, str]:
        is_nan = self._condition.measure is ConditionFigure.NAN
        names = [
            tensor.fqn
            for tensor, figures in zip(measured.model.tensors, measured.figures, strict=True)
            if (figures.nan if is_nan else figures.inf)
        ]
        word = "NaN" if is_nan else "infinities"
        return bool(names), f"{word} in {join_names(list(map(quoting.name, names)), 3)}" if names else f"no {word}"

    def _find_changed(self, first: Measured, current: Measured) -> tuple[bool, str]:
        pairs = compare_checkpoints(first, current, self._cache)
        changed_names, reasons = [], []
        for pair in pairs:
            old, new = pair.match.before, pair.match.after
            if old is None or new is None or old.dtype != new.dtype or pair.change.differs:
                changed_names.append(pair.match.output_row.fqn)
            elif pair.change.differs is None:
                reasons.append(pair.change.reason or pair.match.output_row.fqn)
        if not changed_names and reasons:
            raise UnreadableError(f"{current.model.target}: {reasons[0]}")
        count = f"{len(changed_names)} of {len(pairs)} tensors changed"
        return bool(
            changed_names
        ), f"{count}: {join_names(list(map(quoting.name, changed_names)), 3)}" if changed_names else count

    def _compute_cosine(self, first: Measured, current: Measured) -> tuple[bool, str]:
        distance = compute_distance(first, current, compare_checkpoints(first, current, self._cache))
        cosine = distance.cosine
        if cosine is None:
            raise UnreadableError(
                f"{current.model.target}: cannot compute the cosine with {first.model.target}: "
                "no parameter is finite and nonzero in both"
            )
        limit = self._condition.limit
        skipped = f", {plural(distance.left_out, 'tensor')} with NaN or infinity left out" if distance.left_out else ""
        return limit is not None and cosine < limit, f"cosine {cosine:.6g}{skipped}"


def _search(request: Request, run: Run, prober: _Prober) -> Bisection:
    checkpoints = run.checkpoints
    low, high = _find_ends(checkpoints, prober)
    notes = list(run.notes)
    if low is None or high is None:
        return _build(request, run, prober, BisectAnswer.INCONCLUSIVE, notes)
    first, last = prober.decide(low, checkpoints[low]), prober.decide(high, checkpoints[high])
    if first.holds:
        ordinal = "first" if low == 0 else "first readable"
        text = f"the condition is already true at the {ordinal} checkpoint of the run"
        notes.append(Oddity("holds-at-first", text))
        answer = BisectAnswer.FOUND if low == 0 else BisectAnswer.INCONCLUSIVE
        return _build(request, run, prober, answer, notes, first=first, between=checkpoints[:low])
    if not last.holds:
        answer = BisectAnswer.NEVER if high == len(checkpoints) - 1 else BisectAnswer.INCONCLUSIVE
        return _build(request, run, prober, answer, notes, last_before=last, between=checkpoints[high + 1 :])
    notes.append(Oddity("assumed-monotone", "bisect assumes that the condition stays true after it becomes true"))
    while high - low > 1:
        middle = _find_readable(low, high, checkpoints, prober)
        if middle is None:
            break
        if prober.decide(middle, checkpoints[middle]).holds:
            high = middle
        else:
            low = middle
    answer = BisectAnswer.FOUND if high - low == 1 else BisectAnswer.INCONCLUSIVE
    sides = prober.probes[checkpoints[high].path], prober.probes[checkpoints[low].path]
    between = checkpoints[low + 1 : high]
    return _build(request, run, prober, answer, notes, first=sides[0], last_before=sides[1], between=between)


def _find_ends(checkpoints: Sequence[Checkpoint], prober: _Prober) -> tuple[int | None, int | None]:
    """Return the indexes of the first and the last readable checkpoint, or None and None if all are unreadable."""
    numbers = range(len(checkpoints))
    low = next((n for n in numbers if prober.decide(n, checkpoints[n]).holds is not None), None)
    if low is None:
        return None, None
    high = next((n for n in reversed(numbers) if prober.decide(n, checkpoints[n]).holds is not None), None)
    return low, high


def _find_readable(low: int, high: int, checkpoints: Sequence[Checkpoint], prober: _Prober) -> int | None:
    """Return the index of the readable checkpoint nearest to the middle between two checkpoints, or None."""
    middle = (low + high) // 2
    for number in sorted(range(low + 1, high), key=lambda number: abs(number - middle)):
        if prober.decide(number, checkpoints[number]).holds is not None:
            return number
    return None


def _build(
    request: Request,
    run: Run,
    prober: _Prober,
    answer: BisectAnswer,
    notes: Sequence[Oddity],
    *,
    first: Probe | None = None,
    last_before: Probe | None = None,
    between: Sequence[Checkpoint] = (),
) -> Bisection:
    target, text = ", ".join(request.targets), request.condition.text
    message = f"{quoting.quote(text)} is false at the last checkpoint"
    last = run.checkpoints[-1].path
    findings = (rules.NEVER_HOLDS.finding(message, target=last),) if answer is BisectAnswer.NEVER else ()
    places = {checkpoint.path: checkpoint.step for checkpoint in run.checkpoints}
    if prober.check_order:  # the steps are those of `statecli log`, as far as the settings were read
        settings = [prober.steps_of_path.get(checkpoint.path) for checkpoint in run.checkpoints]
        places = dict(zip(places, choose_steps(find_steps_in_names(run.checkpoints), settings), strict=True))
        counter = next((step.source for path in prober.steps_of_path if (step := places[path])), NAME_SOURCE)
        if counter != NAME_SOURCE:
            note = f"the step is the value of the setting {counter}; the checkpoints are in the order of their names"
            notes = [Oddity("step-source", note), *notes[1:]]  # the first note of a run is its source
    probes = {path: replace(probe, step=places[path]) for path, probe in prober.probes.items()}
    first, last_before = (None if end is None else probes[end.path] for end in (first, last_before))
    paths = tuple(checkpoint.path for checkpoint in between)
    count = len(run.checkpoints)
    ends = (first, last_before)
    return Bisection(target, text, answer, count, tuple(probes.values()), *ends, paths, findings, tuple(notes))
