"""Which rules judge by what is asked for: without any of them it would be asked in vain."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec.structs import replace

from statecli.commands.audit import config, lock_check
from statecli.commands.audit.config import Loaded
from statecli.commands.audit.request import Request
from statecli.core.errors import UsageError
from statecli.core.units import join_names

#: Each key of a policy, and the rules that judge by it.
POLICY: Mapping[str, tuple[str, ...]] = {
    "dtype": ("unexpected-dtype", "overflows-dtype"),
    "device": ("accelerator-device",),
    "frozen": ("trainable-mismatch",),
    "trainable": ("trainable-mismatch",),
    "max-bytes": ("too-large",),
    "require-metadata": ("missing-metadata",),
    "must-change": ("unchanged-tensor",),
    "must-not-change": ("changed-tensor",),
    "reference": ("against", "unchanged-tensor", "changed-tensor"),
}
#: Each option that gives rules what they judge by, and those rules, or their subjects.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "lock": (lock_check.RULE,),
    "against": POLICY["reference"],
    "model": ("registration", "against", "trainable-mismatch", "mixed-dtypes"),
    "values": ("values", "weights", "checksum-mismatch", "digest-mismatch", "broken-tie"),
}


def check(request: Request, given: Collection[str], found: Loaded) -> None:
    """Raises UsageError where no rule is left, and for one of OPTIONS that is `given` and that no rule left judges by.

    What the configuration gives and the line leaves out is told by `left_out`, but for a lock that the configuration
    itself leaves out.
    """
    if not request.rules:
        raise UsageError("no rule is left: --select and --ignore, or those of the configuration, leave all of them out")
    for key, judges in OPTIONS.items():
        if key in given and not _are_left(judges, request):
            raise UsageError(f"--{key}: {_without(judges)}; select it, or leave --{key} out")
    own = replace(request, select=config.expand(found.config.select, ""), ignore=config.expand(found.config.ignore, ""))
    if found.config.lock and "lock" not in given and not _are_left(OPTIONS["lock"], own):
        raise UsageError(f"{found.path}: lock: {_without(OPTIONS['lock'])}; select it there, or leave lock out")


def left_out(request: Request) -> Iterator[str]:
    """What is configured, or was asked for, and is judged by no rule that is left, each in a line."""
    asked = {"lock": request.lock is not None, "values": request.values}
    for key in (key for key, is_asked in asked.items() if is_asked):
        if not _are_left(OPTIONS[key], request):
            yield f"{key}: {_without(OPTIONS[key])}"
    for key in policy(request):
        # With a lock the frozen part of it is what these globs say.
        if not _are_left(POLICY[key], request) and not (key == "frozen" and request.frozen_only):
            yield f"policy.{key}: {_without(POLICY[key])}"


def policy(request: Request) -> list[str]:
    """The keys of the policy that are set."""
    keys = zip(request.policy.__struct_encode_fields__, request.policy.__struct_fields__, strict=True)
    return [key for key, field in keys if getattr(request.policy, field) not in (None, ())]


def _are_left(judges: Collection[str], request: Request) -> bool:
    return any(rule.name in judges or rule.group in judges for rule in request.rules)


def _without(judges: Collection[str]) -> str:
    return f"is judged by {join_names(list(judges))}, which --select, --ignore or the configuration leaves out"
