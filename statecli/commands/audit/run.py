"""One run of `audit`: targets are read one after the other, each is given to the rules that can judge it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from statecli.commands.audit import lock_check, references, unreadable_values
from statecli.commands.audit.baseline import accepting, made, written
from statecli.commands.audit.config import of_rules
from statecli.commands.audit.references import Side
from statecli.commands.audit.request import Request
from statecli.commands.audit.result import Audit
from statecli.commands.audit.values_budget import ValuesBudget
from statecli.core import sizes
from statecli.core.errors import BarePickle, FilteredOut, MissingShard, StateError, UnreadableError
from statecli.core.finding import Finding, Severity
from statecli.core.float_mode import with_denormals
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.core.scope import NotChecked
from statecli.core.selection import Selection, matches_any, select
from statecli.core.state import ModelState, Oddity, ScannedPickle
from statecli.file_scan.scan import scan_pickles
from statecli.live import hf_auto
from statecli.rules import RULES, run_notes
from statecli.rules.digest_names import CheckedFile, compute_digest, named_files
from statecli.rules.rule import AuditRule, Issue
from statecli.rules.subject import Subject, needs_digest_as_name, needs_values
from statecli.storage import files
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load as target
from statecli.targets.expand import SAME, Homes, expand, is_called_weights
from statecli.targets.location import located, named
from statecli.targets.outcome import Accepted, Skipped, Status, Target
from statecli.values.require_numpy import require_numpy


@files.read_strictly()
def audit(
    request: Request,
    done: Callable[[Target], None] = lambda _: None,
    progress: Progress | None = None,
) -> Audit:
    """Run the rules over each target; `done` is called after each. What cannot be read is a target that failed.

    `progress` is told of the values that are read, target by target.
    """
    run = _Run(request, progress)
    targets = []
    models = () if request.model in (None, hf_auto.AUTO) else (request.model,)
    texts = (*models, *request.targets)
    for one in expand(texts, allow_empty=request.allow_empty, homes=run.homes):
        targets.append(run.of(one) if isinstance(one, str) else one)
        done(targets[-1])
    for one in (*run.gone(targets), *run.pipelines(targets)):
        targets = [*(known for known in targets if known.target != one.target), one]
        done(one)
    left_out = len(RULES) - len(request.rules)
    targets = [run.without_compared(one) for one in targets]
    found = Audit(tuple(targets), request.fail_on, run.unheld(targets), request.configuration, left_out)
    return found if request.baseline is None else accepting(found, request.baseline, whole=request.whole)


def accept(found: Audit, path: str, reason: str, request: Request) -> tuple[Audit, Iterator[bytes]]:
    """Return the audit with all its findings accepted, and the pieces of the baseline to be written to `path`."""
    baseline = made(found, request.baseline, reason, whole=request.whole, targets=request.targets)
    return accepting(found, baseline, whole=request.whole), written(baseline, os.path.dirname(path) or ".")


class _Run:
    """What one run has in common for all of its targets: its rules, and what targets are held to, each read once."""

    def __init__(self, request: Request, progress: Progress | None) -> None:
        self.request, self.progress = request, progress
        self.rules = request.rules
        self.budget = ValuesBudget(request.values, self.rules)
        #: Targets that are held whatever they are: whoever names one means that one.
        self.named = () if request.as_found else request.targets
        self.homes = Homes(as_found=request.as_found, is_locked=self._is_locked if self._has_named_lock() else None)
        self.reference = request.against or request.policy.reference
        self.sides: dict[str, Side | StateError] = {}
        #: The folders of the models that were targets so far; the walk comes to a folder before what lies in it.
        self.folders: set[str] = set()
        #: Why targets were held to nothing, by their names, until one was held.
        self.alone: dict[str, str] | None = {}
        #: Why targets were not held to the lock, by their names.
        self.unlocked: dict[str, str] = {}
        #: Targets of which the filters left nothing.
        self.left_out: set[str] = set()
        #: The files of the target that is being audited whose names are digests.
        self.named_by_digest: tuple[CheckedFile, ...] = ()
        #: Files of folders that were compared with the lock.
        self.compared: set[str] = set()
        #: What was read of the target that is being audited, until something fails.
        self.read: ModelState | None = None

    def of(self, text: str) -> Target:
        """What becomes of one target: a file that changes while it is audited makes the target fail."""
        pickles: tuple[ScannedPickle, ...] = ()
        unscanned = None
        self.read = None
        self.named_by_digest = ()
        try:
            with refuse_files_that_change():
                self.named_by_digest = tuple(self._named_by_digest(text))
                pickles, unscanned = self._pickles(text)
                subject = self._subject(text)
                subject = lock_check.of(self._with_values(subject), self.request, self.progress)
                subject = dataclasses.replace(
                    subject, pickles=pickles, unscanned=unscanned, named_by_digest=self.named_by_digest
                )
                found = _judged(subject, self.rules, self.request.severity)
        except StateError as error:
            if isinstance(error, BarePickle) and unscanned is None and self._may_judge_pickle(text):
                return _accepted(self._judge_pickle(text, pickles), self.request)
            return _accepted(self._failed(text, error, pickles), self.request)
        if subject.unlocked is not None:
            self.unlocked[text] = subject.unlocked
        if subject.companions is not None and lock_check.SETTINGS_RULE in found.ran:
            self.compared.update(subject.companions.compared)
        return _accepted(found, self.request)

    def without_compared(self, found: Target) -> Target:
        """A file that is not a checkpoint was checked all the same if a lock holds its content."""
        if found.status is not Status.SKIPPED or found.target not in self.compared:
            return found
        return replace(found, reason=f"{found.reason}, compared with the lock", not_checked=())

    def _named_by_digest(self, text: str) -> Iterator[CheckedFile]:
        """Yield the files of a target whose names are digests, hashed as far as the budget goes."""
        if not any(needs_digest_as_name in rule.needs for rule in self.rules) or target.spec_of(text) is not None:
            return
        for file in named_files(text):
            why = self.budget.why_not_hashed(file.size)
            yield CheckedFile(file, unread_because=why) if why else compute_digest(file)

    def _has_named_lock(self) -> bool:
        return self.request.lock is not None and self.request.is_locking and not self.request.lock.has_no_names

    def _is_locked(self, text: str) -> bool:
        lock = self.request.lock
        return lock is not None and lock.of(text, self.request.lock_folder, by_name=True) is not None

    def gone(self, targets: Sequence[Target]) -> Iterator[Target]:
        """What was locked and not found, each with a finding; of a shard that is there its model says more."""
        met = {one.target for one in targets if one.status is not Status.SKIPPED} | self.left_out
        rule = next((rule for rule in self.rules if rule.name == lock_check.RULE), None)
        if rule is None:
            return
        models = {files.make_absolute(text) for text in met}
        same = {one.target: one.reason for one in targets if one.reason and one.reason.startswith(SAME)}
        for text, one in lock_check.gone(self.request, met, same):
            if files.exists(text) and any(files.make_absolute(model.path) in models for model in self.homes.of(text)):
                continue
            found = _finding(rule, one, text, self.request.severity.get(rule.name))
            reason = same.get(text, "is locked and was not found")
            yield _accepted(Target(text, Status.SKIPPED, reason, findings=(found,), ran=(rule.name,)), self.request)

    def pipelines(self, targets: Sequence[Target]) -> Iterator[Target]:
        """Compare the files of diffusers pipelines with the lock; their components are targets of their own."""
        rules = [rule for rule in self.rules if rule.name == lock_check.SETTINGS_RULE]
        audited = [one.target for one in targets if one.status is not Status.SKIPPED]
        try:
            subjects = list(lock_check.pipelines(self.request, audited)) if rules else []
        except StateError as error:  # one folder that cannot be compared must not lose what others have
            yield Target(self.request.targets[0], Status.FAILED, files.remove_secrets(str(error)))
            return
        for subject in subjects:
            judged = _judged(subject, rules, self.request.severity)
            if subject.companions is not None:
                self.compared.update(subject.companions.compared)
            reason = "is a pipeline of diffusers, whose files were compared with the lock"
            yield _accepted(replace(judged, status=Status.SKIPPED, reason=reason), self.request)

    def unheld(self, targets: Sequence[Target]) -> str | None:
        """Why --model, --against or --lock was in vain; None where a target was held, or failed to be.

        A part of what there is need not have what is held.
        """
        asked = self.request
        if asked.as_found:
            return None
        if (asked.model or asked.against) and self.alone:
            option = f"--model {asked.model}" if asked.model else f"--against {asked.against}"
            first, why = next(iter(self.alone.items()))
            return f"{option}: nothing was held to it: {first} {why}"
        if self.unlocked and not any(lock_check.RULE in one.ran for one in targets):
            first, why = next(iter(self.unlocked.items()))
            return f"the lock: nothing was held to it: {first} {why}"
        return None

    def _pickles(self, text: str) -> tuple[tuple[ScannedPickle, ...], str | None]:
        """Every pickle of a target that is a file or a folder, where a rule about them is asked for; why not."""
        path, _ = target.split(text)
        there = files.is_remote(path) or files.exists(path)
        try:
            return scan_pickles(path) if there and any(map(_is_about_pickles, self.rules)) else (), None
        except UnreadableError as error:
            return (), str(error)

    def _may_judge_pickle(self, text: str) -> bool:
        """Whether a rule about pickles was requested, and the file is not called a checkpoint, which it is not."""
        return any(map(_is_about_pickles, self.rules)) and not is_called_weights(text)

    def _judge_pickle(self, text: str, pickles: tuple[ScannedPickle, ...]) -> Target:
        """Judge a pickle that is not a checkpoint by what loading it runs; the other rules have nothing to look at."""
        what = "is a pickle that is not a checkpoint"
        if self.alone is not None:
            self.alone[text] = what
        if self.request.lock is not None and self.request.is_locking:
            self.unlocked[text] = what
        oddity = Oddity(OddityKind.NO_TENSORS.value, f"{what}: only what loading it runs was checked")
        state = ModelState(text, "pickle", (), oddities=(oddity,))
        subject = Subject(text, state, self.request.policy, pickles=pickles)
        judged = _judged(subject, [rule for rule in self.rules if _is_about_pickles(rule)], self.request.severity)
        others = (rule.name for rule in self.rules if not _is_about_pickles(rule))
        skipped = (Skipped(name, "a pickle that is not a checkpoint has no tensors", text) for name in others)
        return replace(judged, skipped=(*judged.skipped, *skipped))

    def _failed(self, text: str, error: StateError, pickles: tuple[ScannedPickle, ...]) -> Target:
        """What could not be read or is left out, with a finding of the rule that the error breaks, if it is asked for.

        Its pickles are judged all the same: what loading it would run does not depend on what its tensors are. Shards
        that are missing are told where only what it is held to cannot be.
        """
        severity = self.request.severity
        broken = [rule for rule in self.rules if rule.name == error.rule]
        found = [_finding(rule, Issue(str(error), help=error.help), text, severity.get(rule.name)) for rule in broken]
        ran = [rule.name for rule in broken]
        subject = Subject(
            text, ModelState(text, "", ()), self.request.policy, pickles=pickles, named_by_digest=self.named_by_digest
        )
        for rule in (rule for rule in self.rules if _judges_unreadable(rule, subject)):
            found.extend(_found(rule, subject, severity.get(rule.name)))
            ran.append(rule.name)
        if self.read is not None:
            for rule in (rule for rule in self.rules if rule.name == MissingShard.rule and rule not in broken):
                missing = list(_found(rule, Subject(text, self.read, self.request.policy), severity.get(rule.name)))
                found += missing
                ran += [rule.name] if missing else []
        # Filters are of some of the files in a folder, and need not be of each.
        left_out = isinstance(error, FilteredOut) and text not in self.named
        self.left_out |= {text} if left_out else set()
        is_other = isinstance(error, BarePickle) and text not in self.named and not is_called_weights(text)
        status = Status.SKIPPED if left_out or is_other else Status.FAILED
        unchecked = (NotChecked("file", 1, "no tensor matches the filters"),) if left_out else ()
        if is_other:
            unchecked = (NotChecked("file", 1, "bare pickle"),)
        return Target(
            files.remove_secrets(text),
            status,
            files.remove_secrets(str(error)),
            findings=tuple(found),
            ran=tuple(ran),
            not_checked=unchecked,
        )

    # --- what a target is, and what it is held to -------------------------------------------------------------------

    def _subject(self, text: str) -> Subject:
        policy = self.request.policy
        if target.spec_of(text) is not None:
            side = self._side(text) if text == self.request.model else references.read(text, self.request.init_device)
            return Subject(text, self._filtered(side.state, text), policy, side.state, whole=side.state)
        if files.is_folder(text):
            self.folders.add(files.make_absolute(text))
        if self.request.as_found:
            self.folders |= {files.make_absolute(model.path) for model in self.homes.around(text)}
        with files.record_opened_files() as opened:
            self.read = whole = target.whole(text)
        side = Side(text, target.part(whole, text), None, opened)
        module = side.state if side.state.whole_modules else None
        beside = self._beside(text, whole)
        return self._held(Subject(text, self._filtered(side.state, text), policy, module, beside, whole), side)

    def _filtered(self, state: ModelState, text: str) -> ModelState:
        """A file without tensors has none that a filter could leave."""
        if not state.tensors:
            return state
        return select(state, Selection(self.request.include, self.request.exclude, self.request.kind), text)

    def _beside(self, text: str, state: ModelState) -> str | None:
        """Why it is held to nothing; whoever names it, and whoever keeps a model in a folder, means that one."""
        if text in self.named:
            return None
        own = next(self.homes.of(text), None) if self.request.as_found and not files.is_folder(text) else None
        home = text if files.is_folder(text) else own and own.path
        if home is not None:
            return (
                references.INNER if references.is_inside(home, self.folders) and not references.is_step(home) else None
            )
        return references.why_not(state, beside=references.is_inside(text, self.folders))

    def _held(self, subject: Subject, side: Side) -> Subject:
        """The checkpoint beside what it is held to."""
        policy, model, reference = self.request.policy, self.request.model, self.reference
        if subject.beside is not None:
            if self.alone is not None:
                self.alone[subject.target] = subject.beside
            return subject
        self.alone = None
        load = references.to_class(side, self._side(target.class_for(model, subject.target))) if model else None
        values = bool(policy.must_change or policy.must_not_change)
        against = references.to_checkpoint(side, self._side(reference), values=values) if reference else None
        return dataclasses.replace(subject, load=load, reference=against)

    def _side(self, text: str) -> Side:
        """The class or the checkpoint that targets are held to; what is wrong with it is so for all of them."""
        if text not in self.sides:
            try:
                self.sides[text] = references.read(text, self.request.init_device)
            except StateError as error:
                self.sides[text] = type(error)(f"{self._option(text)} {error}")
        found = self.sides[text]
        if isinstance(found, StateError):
            raise found
        if found.is_lazy:
            del self.sides[text]
        return found

    def _option(self, text: str) -> str:
        """By what the class or the checkpoint that targets are held to was asked for."""
        if text != self.reference:
            return "--model"
        return "--against" if self.request.against else "policy.reference"

    def _with_values(self, subject: Subject) -> Subject:
        """Return the subject with facts of its values, or why they are not read; a class's are its constructor's."""
        jobs = self.request.jobs
        if subject.state.traits.is_class or not (self.request.values or self.budget.is_needed):
            return subject
        unread_because = self.budget.why_unread(subject.target, subject.state.tensors)
        if unread_because is not None:
            return dataclasses.replace(subject, unread_because=unread_because)
        with require_numpy():
            from statecli.values.compare import check_checksums
            from statecli.values.facts import read_facts
        tensors = subject.state.tensors
        size = sum(tensor.nbytes for tensor in tensors)
        tell = self.progress(size) if self.progress and self.request.values else None
        facts = read_facts(tensors, jobs=jobs, progress=tell)
        errors = tuple(check_checksums(tensors, jobs=jobs))
        values = tuple(unreadable_values.known(*one) for one in zip(tensors, facts, errors, strict=True))
        requested = bool(self.request.values)
        return dataclasses.replace(subject, values=values, damages=errors, values_requested=requested)


def _judges_unreadable(rule: AuditRule, subject: Subject) -> bool:
    """Whether the rule judges a target whose tensors cannot be listed: by its pickles, or its files' digests."""
    if _is_about_pickles(rule):
        return bool(subject.pickles)
    return needs_digest_as_name in rule.needs and rule.why_not(subject) is None


def _is_about_pickles(rule: AuditRule) -> bool:
    return rule.group == "pickles"


def _accepted(found: Target, request: Request) -> Target:
    """The target, what the configuration accepts of it set apart with its reason."""
    if not request.ignored:
        return found
    name = named(found.target, request.ignored_from)
    meant = [one for glob, one in request.ignored.items() if is_meant(name, glob, request.ignored_from)]
    reasons = of_rules(((rule, one.reason) for one in meant for rule in one.rules), "per-target-ignore")
    listed = {content for one in meant for content in one.contents}
    accepted = tuple(
        Accepted(one, reasons[one.rule])
        for one in found.findings
        if one.rule in reasons and (one.content is UNSET or one.content in listed)
    )
    left = tuple(one for one in found.findings if not any(one is other.finding for other in accepted))
    return replace(found, findings=left, accepted=(*found.accepted, *accepted))


def is_meant(name: str, glob: str, folder: str) -> bool:
    """Whether the glob of a configuration in `folder` is of that target, by its way from there or its file's name."""
    way = glob if files.is_remote(glob) else files.make_relative(os.path.join(folder, glob), folder)
    return matches_any((name, name.rpartition("/")[2]), (way,))


@with_denormals
def _judged(subject: Subject, rules: Sequence[AuditRule], severity: Mapping[str, Severity]) -> Target:
    found: dict[AuditRule, list[Finding]] = {}
    skipped = []
    for rule in rules:
        why_not = rule.why_not(subject)
        if why_not is not None:
            skipped.append(Skipped(rule.name, why_not, subject.target))
        else:
            found[rule] = list(_found(rule, subject, severity.get(rule.name)))
    unjudged = unreadable_values.found(subject, found)
    # What found nothing where it could look has not passed.
    blind = [rule for rule in found if not found[rule] and needs_values in rule.needs] if unjudged else []
    skipped += [Skipped(rule.name, unreadable_values.NOT_ALL, subject.target) for rule in blind]
    state = subject.state
    return Target(
        subject.target,
        Status.FAILED if unjudged else Status.AUDITED,
        unreadable_values.told(unjudged),
        state.format,
        len(state.tensors),
        sizes.sum_bytes(state.tensors),
        located([one for several in found.values() for one in several], state.tensors),
        (),
        tuple(rule.name for rule in found if rule not in blind),
        tuple(skipped),
        (*state.oddities, *subject.chosen, *unjudged),
        (
            *_unread_values(subject),
            *_unhashed_files(subject),
            *(subject.companions.not_checked if subject.companions is not None else ()),
        ),
    )


def _unhashed_files(subject: Subject) -> Iterator[NotChecked]:
    """Yield an entry for each file that nobody compared with the digest in its name."""
    for checked in subject.named_by_digest:
        if checked.unread_because is not None:
            yield NotChecked("file", 1, checked.unread_because)


def _unread_values(subject: Subject) -> tuple[NotChecked, ...]:
    """Return the entry for the tensors whose values no rule has looked at."""
    count = sum(bool(tensor.elements) for tensor in subject.state.tensors)
    if subject.unread_because and count:
        return (NotChecked("tensor", count, subject.unread_because),)
    unjudged = sum(facts.reason is not None and not facts.damaged for facts in subject.values or ())
    return (NotChecked("tensor", unjudged, "values that no rule can judge (unread-values)"),) if unjudged else ()


def _found(rule: AuditRule, subject: Subject, severity: Severity | None) -> Iterator[Finding]:
    """What the rule says; a bug in it is a finding that names it, and the run goes on."""
    try:
        for one in rule.find(subject):
            yield _finding(rule, one, subject.target, severity)
    except StateError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, no audit passes for it
        message = f"rule {rule.name} failed: {type(error).__name__}: {error} (please report it)"
        yield run_notes.INTERNAL_ERROR.finding(message, target=subject.target)


def _finding(rule: AuditRule, found: Issue, target: str, configured: Severity | None) -> Finding:
    return rule.finding(
        found.message,
        target=target,
        fqn=found.fqn,
        section=found.section,
        help=found.help,
        severity=found.severity,
        configured=configured,
        origin=found.origin or UNSET,
        place=found.place or UNSET,
        about=found.about or UNSET,
        content=UNSET if found.content is None else found.content,
    )
