"""Notes about a whole audit instead of a single target. No requested check may be left out silently."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator

from statecli.commands.audit import baseline, config, lock_check, references, required_rules
from statecli.commands.audit.baseline import Baseline
from statecli.commands.audit.request import Request
from statecli.commands.audit.result import Audit
from statecli.commands.audit.run import matches_target
from statecli.core.finding import Finding
from statecli.core.units import join_names, plural
from statecli.rules import audit_run as rules
from statecli.storage import files
from statecli.targets.location import make_relative_name


def build_notes(audit: Audit, request: Request) -> list[Finding]:
    """Return notes about settings without effect, and about baseline and ignore entries that match no finding."""
    unused = (rules.NOT_JUDGED.finding(message, target="") for message in required_rules.describe_unused(request))
    missing = () if request.baseline is None else _report_missing_targets(request.baseline, audit, request)
    return [
        *unused,
        *_report_unchecked_policy(audit, request),
        *missing,
        *_report_unmatched_globs(audit, request),
        *_report_unlisted_contents(audit, request),
        *_report_lock_of_one_target(audit, request),
    ]


def _report_unchecked_policy(audit: Audit, request: Request) -> Iterator[Finding]:
    """Yield a note for each policy rule that was skipped on some targets, with the reason and these targets.

    A class used only as a reference is left out.
    """
    targets_by_skip: dict[tuple[str, str], list[str]] = {}
    for target in audit.targets:
        if target.target == request.model and request.model not in request.targets:
            continue
        for skipped in target.skipped:
            targets_by_skip.setdefault((skipped.rule, skipped.reason), []).append(target.target)
    keys = [key for key in required_rules.list_policy_keys(request) if key != "reference"]
    for (rule, reason), targets in targets_by_skip.items():
        used_keys = [f"policy.{key}" for key in keys if rule in required_rules.RULES_BY_POLICY_KEY[key]]
        # A target without a model is reported only if the rule ran on no other target.
        if used_keys and not (reason in references.NOT_COMPARED_REASONS and rule in audit.ran):
            message = f"{' and '.join(used_keys)}: {rule} did not run on {join_names(targets)}: {reason}"
            yield rules.POLICY_NOT_JUDGED.finding(message, target=targets[0])


def _report_missing_targets(accepted_findings: Baseline, audit: Audit, request: Request) -> Iterator[Finding]:
    audited = {make_relative_name(target.target) for target in audit.targets}
    entries = baseline.find_missing_entries(accepted_findings, request.targets)
    missing = Counter(entry.target for entry in entries if entry.target not in audited)
    for target, count in missing.items():
        entries_text = f"the baseline accepts {plural(count, 'finding')} of this target"
        remark = f"but {entries_text}; to remove these entries, use --write-baseline FILE --reason TEXT"
        yield rules.BASELINE_FIXED.finding(f"{target}: no longer exists, {remark}", target=target)


def _report_unmatched_globs(audit: Audit, request: Request) -> Iterator[Finding]:
    """Yield a note for each glob of per-target-ignore that matches neither a target nor a local file."""
    folder = request.config_folder
    names = [make_relative_name(target.target, folder) for target in audit.targets] if request.per_target_ignore else []
    for pattern in request.per_target_ignore:
        if not any(matches_target(name, pattern, folder) for name in names) and not _matches_file(pattern, folder):
            message = f"per-target-ignore.{pattern}: has no effect, because no target or file matches the pattern"
            yield rules.IGNORED_NOTHING.finding(message, target="")


def _report_unlisted_contents(audit: Audit, request: Request) -> Iterator[Finding]:
    """Yield a note for each finding that per-target-ignore accepts only if `contents` lists the finding's digest."""
    for target in audit.targets if request.per_target_ignore else ():
        name = make_relative_name(target.target, request.config_folder)
        for pattern, ignored in request.per_target_ignore.items():
            if not matches_target(name, pattern, request.config_folder):
                continue
            ignored_rules = config.expand_rules(ignored.rules, "per-target-ignore", request.known_rules)
            contents = {
                finding.content: finding.rule
                for finding in target.findings
                if finding.rule in ignored_rules and isinstance(finding.content, str) and finding.content
            }
            for content, rule in contents.items():
                message = (
                    f"per-target-ignore.{pattern}: `contents` does not list the digest of the checked bytes, so "
                    f'{rule} is reported: "{content}"; review the file, then add the digest to `contents`'
                )
                yield rules.CONTENT_NOT_LISTED.finding(message, target=target.target)


def _report_lock_of_one_target(audit: Audit, request: Request) -> Iterator[Finding]:
    """Yield a note if several targets were compared with a lock of one target, and differences were found."""
    if request.lock is None or not request.lock.has_no_names:
        return
    compared = [target for target in audit.targets if lock_check.LOCK_RULE in target.ran]
    rules_of_lock = (lock_check.LOCK_RULE, lock_check.SETTINGS_RULE)
    if len(compared) > 1 and any(finding.rule in rules_of_lock for finding in audit.findings):
        message = (
            f"the lock was created from one target, and {plural(len(compared), 'target')} were compared with this "
            "lock; audit only the copies of the locked target, or lock the folder"
        )
        yield rules.LOCK_OF_ONE_TARGET.finding(message, target="")


def _matches_file(pattern: str, folder: str) -> bool:
    """Return whether the pattern matches a local file below the folder. Return False for a URL."""
    if files.is_remote(pattern):
        return False
    return next(glob.iglob(os.path.join(glob.escape(folder), pattern), recursive=True), None) is not None
