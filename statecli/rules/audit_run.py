"""Rules about a run of `audit`: rules that failed, and entries of configuration or baseline without effect."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule


def _note(name: str, summary: str, why: str, example: str, fix: str) -> Rule:
    return Rule(name, "audit", ("audit",), Severity.NOTE, summary, why, example, fix)


INTERNAL_ERROR = Rule(
    "internal-error",
    "audit",
    ("audit",),
    Severity.ERROR,
    summary="A rule stopped with an internal error, so its findings are unknown.",
    why="this rule did not check the target, so the audit must not pass. A baseline cannot accept this finding.",
    example="a checkpoint with an unusual structure triggers a bug in statecli or in a plugin.",
    fix="open an issue for statecli with this message, or report it to the author of the plugin that the message "
    "names; until the error is fixed, leave the rule out with `--ignore RULE`.",
)
NOT_JUDGED = _note(
    "not-judged",
    summary="An option or a key of the configuration has no effect, because the rules that need it do not run.",
    why="you asked for a check that did not run. The audit can pass although the checkpoint would fail the check.",
    example="`policy.dtype` is configured, and `--select names` leaves out the rules that check dtypes.",
    fix="add the rules that the note names to `--select`, or remove the key from the configuration.",
)
POLICY_NOT_JUDGED = _note(
    "policy-not-judged",
    summary="A `policy` setting was not checked on any tensor of a target, because its rule did not run there.",
    why="the project requires a check that did not run for this target.",
    example="`policy.must-not-change` is configured, and the target is a class, which has no trained values.",
    fix="do what the reason in the note suggests. For example, audit the checkpoint instead of the class.",
)
BASELINE_FIXED = _note(
    "baseline-fixed",
    summary="An entry of the baseline accepts a finding that no longer exists.",
    why="an old entry would accept the same finding again if it comes back.",
    example="a NaN that the baseline accepts was removed from the checkpoint.",
    fix="remove the entry, or write the baseline again with `--write-baseline FILE --reason TEXT`.",
)
IGNORED_NOTHING = _note(
    "ignored-nothing",
    summary="A glob of `per-target-ignore` matches no target and no file.",
    why="the glob has a spelling mistake or names a moved file. The findings that it should accept are reported.",
    example='`per-target-ignore."checkpoint/*"` where the folder is `checkpoints/`.',
    fix="correct the glob, or delete the entry. Globs are relative to the folder of the configuration file.",
)
CONTENT_NOT_LISTED = _note(
    "content-not-listed",
    summary="The file has changed since the review, so `per-target-ignore` no longer accepts findings of this rule.",
    why="the file was changed or replaced after the review, so the review does not cover the present contents.",
    example="`unsafe-global` is accepted for `model.pt`, and somebody replaced the file.",
    fix="review the file. If it is safe, add its digest, which a note of the audit shows, to `contents` in the "
    "configuration.",
)

LOCK_OF_ONE_TARGET = _note(
    "lock-of-one-target",
    summary="Several targets were compared with a lock of one target, and at least one of them differs.",
    why="a lock of one target has no path, so that it also matches a renamed or converted copy. Each audited target is "
    "compared with the lock, and other checkpoints of the same run then differ.",
    example="`statecli audit checkpoints/ --lock step-100.lock.json`, where the lock was created from one file.",
    fix="audit only the copies of the locked target, or lock the folder with `statecli lock FOLDER`.",
)

RULES = (
    INTERNAL_ERROR,
    NOT_JUDGED,
    POLICY_NOT_JUDGED,
    BASELINE_FIXED,
    IGNORED_NOTHING,
    CONTENT_NOT_LISTED,
    LOCK_OF_ONE_TARGET,
)
