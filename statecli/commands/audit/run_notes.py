"""What is told beside the findings of an audit, being of no one target: nothing that was asked for is undone unsaid."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator

from statecli.commands.audit import baseline, config, references, required_rules
from statecli.commands.audit.baseline import Baseline
from statecli.commands.audit.request import Request
from statecli.commands.audit.result import Audit
from statecli.commands.audit.run import is_meant
from statecli.core.finding import Finding
from statecli.core.units import join_names, plural
from statecli.rules import run_notes as rules
from statecli.storage import files
from statecli.targets.location import named


def told(found: Audit, request: Request) -> list[Finding]:
    """Notes of what is asked for and no rule judges or could, and of what is accepted nowhere."""
    left_out = (rules.NOT_JUDGED.finding(message, target="") for message in required_rules.left_out(request))
    known = () if request.baseline is None else _gone(request.baseline, found, request)
    return [*left_out, *_unjudged(found, request), *known, *_of_nothing(found, request), *_not_listed(found, request)]


def _unjudged(found: Audit, request: Request) -> Iterator[Finding]:
    """A line a rule and reason; of a class that others are held to nothing was asked."""
    where: dict[tuple[str, str], list[str]] = {}
    for target in found.targets:
        if target.target == request.model and request.model not in request.targets:
            continue
        for one in target.skipped:
            where.setdefault((one.rule, one.reason), []).append(target.target)
    asked = [key for key in required_rules.policy(request) if key != "reference"]
    for (rule, reason), targets in where.items():
        keys = [f"policy.{key}" for key in asked if rule in required_rules.POLICY[key]]
        # That what is no model is not judged as one is told where nothing else was.
        if keys and not (reason in references.WHYS and rule in found.ran):
            message = f"{' and '.join(keys)}: {rule} did not run on {join_names(targets)}: {reason}"
            yield rules.POLICY_NOT_JUDGED.finding(message, target=targets[0])


def _gone(known: Baseline, found: Audit, request: Request) -> Iterator[Finding]:
    met = {named(one.target) for one in found.targets}
    gone = (one.target for one in baseline.gone(known, request.targets) if one.target not in met)
    for target, count in Counter(gone).items():
        accepted = f"the baseline accepts {plural(count, 'finding')} of it, which --write-baseline drops"
        yield rules.BASELINE_FIXED.finding(f"{target}: is no longer there; {accepted}", target=target)


def _of_nothing(found: Audit, request: Request) -> Iterator[Finding]:
    """Globs of per-target-ignore that match no target, nor any file from where they are meant."""
    folder = request.ignored_from
    known = [named(one.target, folder) for one in found.targets] if request.ignored else []
    for pattern in request.ignored:
        # Nobody asked what else lies behind a URL.
        there = (
            [] if files.is_remote(pattern) else glob.iglob(os.path.join(glob.escape(folder), pattern), recursive=True)
        )
        if not any(is_meant(name, pattern, folder) for name in known) and next(iter(there), None) is None:
            message = f"per-target-ignore.{pattern}: matches no target, and no file"
            yield rules.IGNORED_NOTHING.finding(message, target="")


def _not_listed(found: Audit, request: Request) -> Iterator[Finding]:
    """Yield a note for each finding that per-target-ignore would accept if it listed the content."""
    for target in found.targets if request.ignored else ():
        name = named(target.target, request.ignored_from)
        for pattern, ignored in request.ignored.items():
            if not is_meant(name, pattern, request.ignored_from):
                continue
            accepted = config.expand(ignored.rules, "per-target-ignore")
            contents = {one.content: one.rule for one in target.findings if one.rule in accepted and one.content}
            for content, rule in contents.items():
                if isinstance(content, str):
                    message = f'per-target-ignore.{pattern}: {rule} is accepted only with its content: "{content}"'
                    message = f"{message}; review it, then add it to contents"
                    yield rules.CONTENT_NOT_LISTED.finding(message, target=target.target)


def _is_there(pattern: str, folder: str) -> bool:
    """Whether a file in the folder matches; what else lies behind a URL nobody asked for."""
    if files.is_remote(pattern):
        return False
    return next(glob.iglob(os.path.join(glob.escape(folder), pattern), recursive=True), None) is not None
