"""Run of `audit`: read the targets in order, and run the rules on each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from statecli import values
from statecli.commands.audit import lock_check, references, unreadable_values
from statecli.commands.audit.baseline import accept_findings, build_baseline, encode_baseline
from statecli.commands.audit.config import map_to_rules
from statecli.commands.audit.dtype_texts import check_dtype_texts
from statecli.commands.audit.extra_states import scan_extra_states
from statecli.commands.audit.generator_states import check_generator_states
from statecli.commands.audit.plugins import list_entries
from statecli.commands.audit.references import ReferenceSide
from statecli.commands.audit.request import Request
from statecli.commands.audit.result import Audit
from statecli.commands.audit.rule_run import run_rule, run_rules
from statecli.commands.audit.settings_files import list_settings_files, read_settings_file
from statecli.commands.audit.values_budget import ValuesBudget
from statecli.core.errors import BarePickle, FilteredOut, MissingShard, StateError, UnreadableError
from statecli.core.garbage_collector import pause_gc
from statecli.core.model_state import ModelState, Oddity, ScannedPickle
from statecli.core.oddity_kind import OddityKind
from statecli.core.progress import Progress
from statecli.core.run_scope import NotChecked
from statecli.core.selection import matches_any, select
from statecli.file_scan.adjacent_modules import ModuleFinder
from statecli.file_scan.scan import scan_pickles
from statecli.live.spec import AUTO
from statecli.rules import model_code
from statecli.rules.audit_rule import AuditRule, Issue
from statecli.rules.audit_subject import Subject, needs_digest_as_name
from statecli.rules.contents import needs_unchecked_indices
from statecli.rules.digest_names import CheckedFile, compute_digest, list_named_files
from statecli.storage import checkpoint_names, files
from statecli.storage.file_version import refuse_files_that_change
from statecli.targets import load
from statecli.targets.expand import ModelFolders, expand_targets, is_named_as_checkpoint
from statecli.targets.location import has_repository, make_relative_name
from statecli.targets.section_of_target import split_section
from statecli.targets.target_result import Accepted, Skipped, TargetResult, TargetStatus, drop_accepted


@files.read_strictly()
def audit(request: Request, progress: Progress | None = None) -> Audit:
    """Run the rules over each target. An unreadable target has status `failed`.

    `progress` is called for the values read, target by target.
    """
    run = _Run(request, progress)
    targets = []
    models = () if request.model in (None, AUTO) else (request.model,)
    texts = (*models, *request.targets)
    for target in expand_targets(texts, allow_empty=request.allow_empty, model_folders=run.model_folders):
        targets.append(run.audit_target(target) if isinstance(target, str) else target)
    for target in (*run.report_missing(targets), *run.audit_pipelines(targets)):
        targets = [*(earlier for earlier in targets if earlier.target != target.target), target]
    disabled = len(request.known_rules) - len(request.rules)
    adjacent = run.check_adjacent_settings(targets)
    targets = [*(run.check_settings_file(run.mark_compared(result)) for result in targets), *adjacent]
    result = Audit(
        tuple(targets),
        request.fail_on,
        run.explain_unused_reference(targets),
        request.configuration,
        disabled,
        list_entries(request.plugins),
        request.lock_file,
        None if request.model in (AUTO, *request.targets) else request.model,
    )
    if request.baseline is None:
        return result
    return accept_findings(result, request.baseline, unfiltered=not request.selection)


def accept_all(result: Audit, path: str, reason: str, request: Request) -> tuple[Audit, Iterator[bytes]]:
    """Accept all findings of the audit. Return the new audit, and the bytes of the baseline file `path` in pieces."""
    unfiltered = not request.selection
    baseline = build_baseline(result, request.baseline, reason, unfiltered=unfiltered, targets=request.targets)
    return accept_findings(result, baseline, unfiltered=unfiltered), encode_baseline(baseline, path)


class _Run:
    """State shared by the targets of a run: the rules, and the references, read once."""

    def __init__(self, request: Request, progress: Progress | None) -> None:
        self.request, self.progress = request, progress
        self.rules = request.rules
        self.budget = ValuesBudget(request.values, self.rules)
        #: Targets named by the user, which are compared with the reference whatever they contain.
        self.user_targets = () if request.as_found else request.targets
        has_named_lock = request.lock is not None and request.checks_lock and not request.lock.has_no_names
        is_locked = self._is_in_lock if has_named_lock else None
        self.model_folders = ModelFolders(as_found=request.as_found, is_locked=is_locked)
        self.module_finder = ModuleFinder(request.targets, in_repository=has_repository(os.getcwd()))
        self.reference = request.against or request.policy.reference
        self.sides: dict[str, ReferenceSide | StateError] = {}
        #: Folders of the models audited so far, because a walk yields a folder before its files.
        self.folders: set[str] = set()
        #: Reason by target that was not compared with a reference; None once a target was compared.
        self.not_compared: dict[str, str] | None = {}
        #: Reason by target that was not compared with the lock.
        self.not_locked: dict[str, str] = {}
        #: Targets without a tensor that matches the filters.
        self.filtered_out: set[str] = set()
        #: Files of the present target whose names are digests.
        self.digest_files: tuple[CheckedFile, ...] = ()
        #: Files of folders that were compared with the lock.
        self.compared_files: set[str] = set()
        #: State of the present target; None until it is read.
        self.read_state: ModelState | None = None

    def audit_target(self, text: str) -> TargetResult:
        """Audit a target. The target fails if its files change meanwhile."""
        pickles: tuple[ScannedPickle, ...] = ()
        pickles_unread_because = None
        self.read_state = None
        self.digest_files = ()
        try:
            with refuse_files_that_change():
                self.digest_files = tuple(self._iter_digest_files(text))
                pickles, pickles_unread_because = self._scan_pickles(text)
                subject = self._build_subject(text)
                if self.read_state is not None and any(map(_is_about_pickles, self.rules)):
                    # A storage of torch.save that begins like a pickle was scanned already.
                    scanned = {pickle.digest for pickle in pickles} - {""}
                    extra = self.module_finder.mark_pickles(scan_extra_states(self.read_state))
                    pickles += tuple(pickle for pickle in extra if pickle.digest not in scanned)
                    pickles += tuple(check_generator_states(self.read_state))
                    pickles += tuple(check_dtype_texts(self.read_state))
                subject = lock_check.check_lock(self._read_values(subject), self.request, self.progress)
                subject = replace(
                    subject,
                    pickles=pickles,
                    pickles_unread_because=pickles_unread_because,
                    digest_files=self.digest_files,
                )
                with pause_gc():  # otherwise the collector would look through all tensors again for each rule
                    result = run_rules(subject, self.rules, self.request.severity)
        except StateError as error:
            if isinstance(error, BarePickle) and pickles_unread_because is None and self._may_judge_pickle(text):
                return _accept_ignored(self._judge_pickle(text, pickles), self.request)
            return _accept_ignored(self._build_failed(text, error, pickles), self.request)
        if subject.not_locked_because is not None:
            self.not_locked[text] = subject.not_locked_because
        if subject.companions is not None and lock_check.SETTINGS_RULE in result.ran:
            self.compared_files.update(subject.companions.compared)
        return _accept_ignored(result, self.request)

    def mark_compared(self, result: TargetResult) -> TargetResult:
        """Count a skipped file as checked if its content was compared with the lock, or if the file is the lock."""
        lock_file = self.request.lock_file
        if result.status is not TargetStatus.SKIPPED:
            return result
        if lock_file and files.resolve_links(result.target) == files.resolve_links(lock_file):
            return replace(result, reason="is the lock of this audit", not_checked=())
        if result.target not in self.compared_files:
            return result
        reason = f"{result.reason}; statecli compared only the content of the file with the lock"
        return replace(result, reason=reason, not_checked=())

    def check_settings_file(self, result: TargetResult) -> TargetResult:
        """Check the Python code and chat templates in a skipped settings file. The file's status stays `skipped`."""
        rules = [rule for rule in self.rules if rule in model_code.RULES]
        if result.status is not TargetStatus.SKIPPED or result.same_as or not rules:
            return result
        settings_file = read_settings_file(result.target)
        if settings_file is None:
            return result
        state = ModelState(result.target, "", ())
        subject = Subject(result.target, state, self.request.policy, settings_file=settings_file)
        findings = run_rules(subject, rules, self.request.severity).findings
        return _accept_ignored(replace(result, findings=(*result.findings, *findings)), self.request)

    def check_adjacent_settings(self, targets: Sequence[TargetResult]) -> list[TargetResult]:
        """Check the settings files next to weights that the user named as files. Return the results with findings.

        `from_pretrained` loads the weights of these names together with the settings.
        """
        named = [split_section(target.target)[0] for target in targets]
        paths = set(map(files.make_absolute, named))
        weights = [path for path in named if files.get_name(path) in checkpoint_names.SINGLE]
        folders = [files.get_folder(path) for path in weights if not files.reads_are_requests(path)]
        adjacent = [path for folder in dict.fromkeys(folders) for path in list_settings_files(folder)]
        results = [
            self.mark_compared(TargetResult(path, TargetStatus.SKIPPED, "is a settings file next to the weights"))
            for path in adjacent
            if files.make_absolute(path) not in paths
        ]
        return [checked for result in results if (checked := self.check_settings_file(result)) != result]

    def _iter_digest_files(self, text: str) -> Iterator[CheckedFile]:
        """Yield the target's files whose names are digests. Hash their contents as long as the budget lasts."""
        if not any(needs_digest_as_name in rule.needs for rule in self.rules) or load.find_class_spec(text) is not None:
            return
        for file in list_named_files(text):
            reason = self.budget.explain_unhashed(file.size)
            yield CheckedFile(file, unread_because=reason) if reason else compute_digest(file)

    def _is_in_lock(self, text: str) -> bool:
        lock = self.request.lock
        return lock is not None and lock.find_target(text, self.request.lock_folder, by_name=True) is not None

    def report_missing(self, targets: Sequence[TargetResult]) -> Iterator[TargetResult]:
        """Yield a result for each missing locked target. A shard that exists in an audited model is not missing."""
        audited = {target.target for target in targets if target.status is not TargetStatus.SKIPPED} | self.filtered_out
        rule = next((rule for rule in self.rules if rule.name == lock_check.LOCK_RULE), None)
        if rule is None:
            return
        audited_paths = {files.make_absolute(text) for text in audited}
        duplicates = {target.target: target.reason for target in targets if target.reason and target.same_as}
        for text, issue in lock_check.find_missing(self.request, audited, duplicates):
            if files.exists(text) and any(
                files.make_absolute(model.path) in audited_paths for model in self.model_folders.iter_containing(text)
            ):
                continue
            finding = rule.build_finding(issue, text, self.request.severity.get(rule.name))
            reason = duplicates.get(text, "is in the lock but was not found")
            missing = TargetResult(text, TargetStatus.SKIPPED, reason, findings=(finding,), ran=(rule.name,))
            yield _accept_ignored(missing, self.request)

    def audit_pipelines(self, targets: Sequence[TargetResult]) -> Iterator[TargetResult]:
        """Compare the files of diffusers pipelines with the lock; the models inside are audited as separate targets."""
        rules = [rule for rule in self.rules if rule.name == lock_check.SETTINGS_RULE]
        audited = [target.target for target in targets if target.status is not TargetStatus.SKIPPED]
        try:
            subjects = list(lock_check.compare_pipelines(self.request, audited)) if rules else []
        except StateError as error:  # an unreadable folder must not lose the findings of other targets
            yield TargetResult(self.request.targets[0], TargetStatus.FAILED, files.remove_secrets(str(error)))
            return
        for subject in subjects:
            result = run_rules(subject, rules, self.request.severity)
            if subject.companions is not None:
                self.compared_files.update(subject.companions.compared)
            reason = "is a diffusers pipeline; statecli compared the files of the pipeline with the lock"
            yield _accept_ignored(replace(result, status=TargetStatus.SKIPPED, reason=reason), self.request)

    def explain_unused_reference(self, targets: Sequence[TargetResult]) -> str | None:
        """Return why no target was compared with --model, --against or --lock, or None if a target was compared.

        With `as_found` the targets are a part of a project, not necessarily with a model.
        """
        request = self.request
        if request.as_found:
            return None
        if (request.model or request.against) and self.not_compared:
            option = f"--model {request.model}" if request.model else f"--against {request.against}"
            first, reason = next(iter(self.not_compared.items()))
            return f"{option}: was not compared with any target: {first} {reason}"
        if self.not_locked and not any(lock_check.LOCK_RULE in target.ran for target in targets):
            first, reason = next(iter(self.not_locked.items()))
            return f"no target was compared with the lock: {first} {reason}"
        return None

    def _scan_pickles(self, text: str) -> tuple[tuple[ScannedPickle, ...], str | None]:
        """Return the pickles of a target, and the error if they are unreadable. Read them only if a rule needs them."""
        path, _ = split_section(text)
        exists = files.is_remote(path) or files.exists(path)
        try:
            is_needed = any(_is_about_pickles(rule) or needs_unchecked_indices in rule.needs for rule in self.rules)
            pickles = scan_pickles(path) if exists and is_needed else ()
            return self.module_finder.mark_pickles(pickles), None
        except UnreadableError as error:
            return (), str(error)

    def _may_judge_pickle(self, text: str) -> bool:
        return any(map(_is_about_pickles, self.rules)) and not is_named_as_checkpoint(text)

    def _judge_pickle(self, text: str, pickles: tuple[ScannedPickle, ...]) -> TargetResult:
        """Check which code runs when a pickle that is not a checkpoint is loaded. Skip all other rules."""
        reason = "is a pickle that is not a checkpoint"
        if self.not_compared is not None:
            self.not_compared[text] = reason
        if self.request.lock is not None and self.request.checks_lock:
            self.not_locked[text] = reason
        oddity = Oddity(
            OddityKind.NO_TENSORS.value,
            f"{reason}: statecli checked only which code runs when the file is loaded, not the contents",
        )
        state = ModelState(text, "pickle", (), oddities=(oddity,))
        subject = Subject(text, state, self.request.policy, pickles=pickles)
        result = run_rules(subject, [rule for rule in self.rules if _is_about_pickles(rule)], self.request.severity)
        other_rules = (rule.name for rule in self.rules if not _is_about_pickles(rule))
        skipped = (Skipped(name, "a pickle that is not a checkpoint has no tensors", text) for name in other_rules)
        return replace(result, skipped=(*result.skipped, *skipped))

    def _build_failed(self, text: str, error: StateError, pickles: tuple[ScannedPickle, ...]) -> TargetResult:
        """Return the failed result, with a finding, of an unreadable target or of a target without selected tensors.

        Its pickles are checked nevertheless, because their danger does not depend on the tensors. Missing shards are
        reported if only the comparison failed.
        """
        severity = self.request.severity
        violated_rules = [rule for rule in self.rules if rule.name == error.rule]
        findings = [
            rule.build_finding(Issue(str(error), help=error.help), text, severity.get(rule.name))
            for rule in violated_rules
        ]
        ran = [rule.name for rule in violated_rules]
        subject = Subject(
            text, ModelState(text, "", ()), self.request.policy, pickles=pickles, digest_files=self.digest_files
        )
        for rule in (rule for rule in self.rules if _can_check_unreadable(rule, subject)):
            findings.extend(run_rule(rule, subject, severity.get(rule.name)))
            ran.append(rule.name)
        if self.read_state is not None:
            for rule in (rule for rule in self.rules if rule.name == MissingShard.rule and rule not in violated_rules):
                missing = list(
                    run_rule(rule, Subject(text, self.read_state, self.request.policy), severity.get(rule.name))
                )
                findings += missing
                ran += [rule.name] if missing else []
        # Filters need not match every file of a folder.
        is_filtered_out = isinstance(error, FilteredOut) and text not in self.user_targets
        self.filtered_out |= {text} if is_filtered_out else set()
        is_other_pickle = (
            isinstance(error, BarePickle) and text not in self.user_targets and not is_named_as_checkpoint(text)
        )
        skip_reason = "no tensor matches the filters" if is_filtered_out else "bare pickle" if is_other_pickle else None
        return TargetResult(
            files.remove_secrets(text),
            TargetStatus.SKIPPED if skip_reason else TargetStatus.FAILED,
            files.remove_secrets(str(error)),
            findings=tuple(findings),
            ran=tuple(ran),
            not_checked=(NotChecked("file", 1, skip_reason),) if skip_reason else (),
        )

    # --- the subject, and its comparisons ---------------------------------------------------------------------------

    def _build_subject(self, text: str) -> Subject:
        policy = self.request.policy
        if load.find_class_spec(text) is not None:
            is_model = text == self.request.model
            side = self._get_side(text) if is_model else references.read_side(text, self.request.init_device)
            return Subject(text, self._filter(side.state, text), policy, side.state, unfiltered_state=side.state)
        if files.is_folder(text):
            self.folders.add(files.make_absolute(text))
        if self.request.as_found:
            self.folders |= {files.make_absolute(model.path) for model in self.model_folders.iter_around(text)}
        with files.record_opened_files() as opened_files:
            self.read_state = full_state = load.read_whole_checkpoint(text)
        side = ReferenceSide(text, load.select_section(full_state, text), None, opened_files)
        module_state = side.state if side.state.whole_modules else None
        reason = self._explain_not_compared(text, full_state)
        subject = Subject(text, self._filter(side.state, text), policy, module_state, reason, full_state)
        return self._compare(subject, side)

    def _filter(self, state: ModelState, text: str) -> ModelState:
        if not state.tensors:
            return state
        return select(state, self.request.selection, text)

    def _explain_not_compared(self, text: str, state: ModelState) -> str | None:
        """Return why the target is not compared with the reference. A target that the user named is always compared."""
        if text in self.user_targets:
            return None
        folder = text if files.is_folder(text) else None
        if folder is None and self.request.as_found:
            folder = next((model.path for model in self.model_folders.iter_containing(text)), None)
        is_inside = references.is_in_any_folder(text if folder is None else folder, self.folders)
        if folder is None:
            return references.explain_not_compared(state, in_model_folder=is_inside)
        return references.INSIDE_MODEL_FOLDER if is_inside and not references.is_training_step(folder) else None

    def _compare(self, subject: Subject, side: ReferenceSide) -> Subject:
        policy, model = self.request.policy, self.request.model
        if subject.not_compared_because is not None:
            if self.not_compared is not None:
                self.not_compared[subject.target] = subject.not_compared_because
            return subject
        self.not_compared = None
        if model:
            class_side = self._get_side(load.resolve_auto_class(model, subject.target))
            subject = replace(subject, load_diff=references.compare_with_class(side, class_side))
        if self.reference:
            needs_values = bool(policy.must_change or policy.must_not_change)
            diff = references.compare_with_checkpoint(side, self._get_side(self.reference), values=needs_values)
            subject = replace(subject, reference_diff=diff)
        return subject

    def _get_side(self, text: str) -> ReferenceSide:
        """Return a reference, read once for all targets. Raises the same error for each target if it cannot be read."""
        if text not in self.sides:
            try:
                self.sides[text] = references.read_side(text, self.request.init_device)
            except StateError as error:
                self.sides[text] = type(error)(f"{self._name_option(text)} {error}")
        side = self.sides[text]
        if isinstance(side, StateError):
            raise side
        if side.is_lazy:
            del self.sides[text]
        return side

    def _name_option(self, text: str) -> str:
        if text != self.reference:
            return "--model"
        return "--against" if self.request.against else "policy.reference"

    def _read_values(self, subject: Subject) -> Subject:
        """Add facts about the values to the subject, or the reason why the values are not read."""
        jobs = self.request.jobs
        if subject.state.traits.is_class or not (self.request.values or self.budget.is_needed):
            return subject
        unread_because = self.budget.explain_unread(subject.target, subject.state.tensors)
        if unread_because is not None:
            return replace(subject, unread_because=unread_because)
        tensors = subject.state.tensors
        size = sum(tensor.nbytes for tensor in tensors)
        progress = self.progress(size) if self.progress and self.request.values else None
        facts = values.audit_facts.read_facts(tensors, jobs=jobs, progress=progress)
        errors = tuple(values.recorded_checksums.check_checksums(tensors, jobs=jobs))
        sound_facts = tuple(
            unreadable_values.discard_corrupt_facts(*entry) for entry in zip(tensors, facts, errors, strict=True)
        )
        requested = bool(self.request.values)
        return replace(subject, values=sound_facts, checksum_errors=errors, values_requested=requested)


def _can_check_unreadable(rule: AuditRule, subject: Subject) -> bool:
    """Return whether the rule can check a target without readable tensors: by pickles, or by digests in file names."""
    if _is_about_pickles(rule):
        return bool(subject.pickles)
    return needs_digest_as_name in rule.needs and rule.why_not(subject) is None


def _is_about_pickles(rule: AuditRule) -> bool:
    return rule.group == "pickles"


def _accept_ignored(result: TargetResult, request: Request) -> TargetResult:
    """Move findings to `accepted` if per-target-ignore accepts them, and add the reasons."""
    if not request.per_target_ignore:
        return result
    name = make_relative_name(result.target, request.config_folder)
    entries = [
        entry for glob, entry in request.per_target_ignore.items() if matches_target(name, glob, request.config_folder)
    ]
    settings = ((rule, entry.reason) for entry in entries for rule in entry.rules)
    reasons = map_to_rules(settings, "per-target-ignore", request.known_rules)
    contents = {content for entry in entries for content in entry.contents}
    ignored_findings = tuple(
        Accepted(finding, reasons[finding.rule])
        for finding in result.findings
        if finding.rule in reasons and (finding.content is UNSET or finding.content in contents)
    )
    remaining = drop_accepted(result.findings, ignored_findings)
    return replace(result, findings=remaining, accepted=(*result.accepted, *ignored_findings))


def matches_target(name: str, glob: str, folder: str) -> bool:
    """Return whether a glob relative to `folder` matches the relative path or the file name of a target."""
    pattern = glob if files.is_remote(glob) else files.make_relative(os.path.join(folder, glob), folder)
    return matches_any((name, name.rpartition("/")[2]), (pattern,))
