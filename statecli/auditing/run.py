"""One run of `audit`: targets are read one after the other, each is given to the rules that can judge it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from statecli import inspection, modules, target
from statecli.auditing import held
from statecli.auditing.baseline import Baseline, accepting
from statecli.auditing.config import Ignored, of_rules
from statecli.auditing.policy import Policy
from statecli.auditing.result import Accepted, Audit, Skipped, Status, Target
from statecli.auditing.rule import Found, Rule
from statecli.auditing.subject import Subject
from statecli.auditing.targets import expand
from statecli.errors import StateError
from statecli.finding import Finding, Severity
from statecli.formats._scan import scan
from statecli.locking import holding
from statecli.locking.file import Lock
from statecli.places import located, named
from statecli.rules import RULES
from statecli.state import Kind, ModelState, ScannedPickle


class Request(msgspec.Struct, frozen=True):
    """What the user asked of `audit`. `select` () is every rule.

    `model` is the class that the checkpoints are held to, and a target itself; `against` another checkpoint.
    `ignored` are rules whose findings are accepted, by globs of targets as they lie from the folder `ignored_from`;
    `severity` what a rule's own is replaced by. With `allow_empty` a glob that matches nothing is none that failed.
    """

    targets: tuple[str, ...]
    model: str | None = None
    against: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    ignored: Mapping[str, Ignored] = {}
    ignored_from: str = "."
    severity: Mapping[str, Severity] = {}
    fail_on: Severity = Severity.WARNING
    policy: Policy = Policy()
    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    values: bool = False
    jobs: int = 0
    lock: Lock | None = None
    lock_folder: str = "."
    frozen_only: bool = False
    baseline: Baseline | None = None
    allow_empty: bool = False

    @property
    def whole(self) -> bool:
        """Whether no filter hides a tensor."""
        return not (self.include or self.exclude or self.kind)


def audit(
    request: Request,
    done: Callable[[Target], None] = lambda _: None,
    progress: inspection.Progress | None = None,
) -> Audit:
    """Run the rules over each target; `done` is called after each. What cannot be read is a target that failed.

    `progress` is told of the values that are read, target by target.
    """
    targets = []
    for one in expand((*filter(None, (request.model,)), *request.targets), allow_empty=request.allow_empty):
        targets.append(_one(one, request, progress) if isinstance(one, str) else one)
        done(targets[-1])
    found = Audit(tuple(targets), request.fail_on)
    return found if request.baseline is None else accepting(found, request.baseline, whole=request.whole)


def _one(text: str, request: Request, progress: inspection.Progress | None) -> Target:
    pickles = _pickles(text, request)
    try:
        subject = _with_values(_subject(text, request), request, progress)
        subject = dataclasses.replace(_locked(subject, request, progress), pickles=pickles)
    except StateError as error:
        return _accepted(_failed(text, error, request, pickles), request)
    return _accepted(_judged(subject, _chosen(request), request.severity), request)


def _pickles(text: str, request: Request) -> tuple[ScannedPickle, ...]:
    """Every pickle of a target that is a file or a folder, where a rule about them is asked for."""
    path, _ = target.split(text)
    return scan(path) if os.path.exists(path) and any(map(_is_about_pickles, _chosen(request))) else ()


def _is_about_pickles(rule: Rule) -> bool:
    return rule.about == "pickles"


def _failed(text: str, error: StateError, request: Request, pickles: tuple[ScannedPickle, ...]) -> Target:
    """What could not be read, with a finding of the rule that the error breaks, where that rule is asked for.

    Its pickles are judged all the same: what loading it would run does not depend on what its tensors are.
    """
    broken = [rule for rule in _chosen(request) if rule.name == error.rule]
    found = [_finding(rule, Found(str(error)), text, request.severity.get(rule.name)) for rule in broken]
    ran = [rule.name for rule in broken]
    subject = Subject(text, ModelState(text, "", ()), request.policy, pickles=pickles)
    for rule in filter(_is_about_pickles, _chosen(request) if pickles else ()):
        found.extend(_found(rule, subject, request.severity.get(rule.name)))
        ran.append(rule.name)
    return Target(text, Status.FAILED, str(error), findings=tuple(found), ran=tuple(ran))


def _subject(text: str, request: Request) -> Subject:
    spec = target.spec_of(text)
    module: ModelState | None = None
    if spec is not None:
        state = module = whole = modules.read(target.model(spec, init_device=request.init_device, values=False), text)
    else:
        whole = target.whole(text)
        state = target.part(whole, text)
        module = state if state.whole_modules else None
    asked = inspection.Request(text, include=request.include, exclude=request.exclude, kind=request.kind)
    subject = Subject(text, inspection.filtered(state, asked), request.policy, module, whole)
    return subject if spec is not None else _held(subject, request)


def _held(subject: Subject, request: Request) -> Subject:
    """The checkpoint beside what it is held to."""
    policy, reference = request.policy, request.against or request.policy.reference
    load = held.to_class(subject.target, request.model, request.init_device) if request.model else None
    values = bool(policy.must_change or policy.must_not_change)
    against = held.to_checkpoint(subject.target, reference, values=values) if reference else None
    return dataclasses.replace(subject, load=load, reference=against)


def _with_values(subject: Subject, request: Request, progress: inspection.Progress | None) -> Subject:
    """The same with facts of its values, where they are asked for; a class's are those of its constructor."""
    if not request.values or subject.state.format == "module":
        return subject
    with inspection.numpy_needed():
        from statecli.values.compare import damages
        from statecli.values.facts import read_all
    tensors = subject.state.tensors
    tell = progress(sum(tensor.nbytes for tensor in tensors)) if progress else None
    values = tuple(read_all(tensors, jobs=request.jobs, progress=tell))
    return dataclasses.replace(subject, values=values, damages=tuple(damages(tensors, jobs=request.jobs)))


def _locked(subject: Subject, request: Request, progress: inspection.Progress | None) -> Subject:
    """With what became of what the lock has of it; a class that is only there to hold others to has nothing locked."""
    text = subject.target
    asked_for = any(rule.about == "lock" for rule in _chosen(request))
    if request.lock is None or not asked_for or (text == request.model and text not in request.targets):
        return subject
    asked = holding.Request(
        request.lock,
        request.frozen_only,
        request.policy.frozen,
        request.include,
        request.exclude,
        request.kind,
        request.jobs,
        request.lock_folder,
    )
    found = holding.held(target.part(subject.everything, text), holding.lines(text, asked), asked, progress)
    return dataclasses.replace(subject, lock=found)


def _chosen(request: Request) -> Sequence[Rule]:
    chosen = [rule for rule in RULES if not request.select or rule.name in request.select]
    return [rule for rule in chosen if rule.name not in request.ignore]


def _accepted(found: Target, request: Request) -> Target:
    """The target, what the configuration accepts of it set apart with its reason."""
    if not request.ignored:
        return found
    name = named(found.target, request.ignored_from)
    meant = [one for glob, one in request.ignored.items() if _is_meant(name, glob, request.ignored_from)]
    reasons = of_rules(((rule, one.reason) for one in meant for rule in one.rules), "per-target-ignore")
    accepted = tuple(Accepted(one, reasons[one.rule]) for one in found.findings if one.rule in reasons)
    left = tuple(one for one in found.findings if one.rule not in reasons)
    return replace(found, findings=left, accepted=(*found.accepted, *accepted)) if accepted else found


def _is_meant(name: str, glob: str, folder: str) -> bool:
    """Whether the glob of a configuration in `folder` is of that target, by its way from there or its file's name."""
    way = os.path.relpath(os.path.join(folder, glob), folder).replace(os.sep, "/")
    return inspection.matches_any((name, name.rpartition("/")[2]), (way,))


def _judged(subject: Subject, rules: Sequence[Rule], severity: Mapping[str, Severity]) -> Target:
    findings: list[Finding] = []
    ran, skipped = [], []
    for rule in rules:
        why_not = rule.why_not(subject)
        if why_not is not None:
            skipped.append(Skipped(rule.name, why_not, subject.target))
            continue
        ran.append(rule.name)
        findings.extend(_found(rule, subject, severity.get(rule.name)))
    state = subject.state
    size = sum(tensor.nbytes for tensor in state.tensors)
    damaged = [tensor.damage for tensor in state.tensors if tensor.damage]
    return Target(
        subject.target,
        Status.FAILED if damaged else Status.AUDITED,
        _told(damaged),
        state.format,
        len(state.tensors),
        size,
        located(findings, state.tensors),
        (),
        tuple(ran),
        tuple(skipped),
        state.oddities,
    )


def _told(damaged: Sequence[str]) -> str | None:
    """Why a target with these tensors failed: what contradicts its file was audited by no rule."""
    more = f"; {len(damaged) - 1} more of its tensors cannot be read either" if len(damaged) > 1 else ""
    return damaged[0] + more if damaged else None


def _found(rule: Rule, subject: Subject, severity: Severity | None) -> Iterator[Finding]:
    """What the rule says; a bug in it is a finding that names it, and the run goes on."""
    try:
        for one in rule.find(subject):
            yield _finding(rule, one, subject.target, severity)
    except StateError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, no audit passes for it
        message = f"rule {rule.name} failed: {type(error).__name__}: {error} (please report it)"
        yield Finding("internal-error", Severity.ERROR, message, subject.target)


def _finding(rule: Rule, one: Found, target: str, severity: Severity | None) -> Finding:
    origin, place = one.origin or UNSET, one.place or UNSET
    severity = severity or one.severity or rule.severity
    return Finding(
        rule.name, severity, one.message, target, one.fqn, one.help, one.section, origin, place, one.about or UNSET
    )
