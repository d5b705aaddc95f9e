"""Check that each option and policy key is used by a selected rule."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec.structs import replace

from statecli.commands.audit import config, lock_check
from statecli.commands.audit.config import LoadedConfig
from statecli.commands.audit.request import Request
from statecli.core.errors import UsageError, option
from statecli.core.units import join_names
from statecli.rules.audit_rule import Need
from statecli.rules.audit_subject import needs_class_or_reference, needs_module, needs_values

#: Rules, or their groups, that use a policy key.
RULES_BY_POLICY_KEY: Mapping[str, tuple[str, ...]] = {
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
#: Rules, or their groups, that use an option.
RULES_BY_OPTION: Mapping[str, tuple[str, ...]] = {
    "lock": (lock_check.LOCK_RULE,),
    "against": RULES_BY_POLICY_KEY["reference"],
    "model": ("registration", "against", "trainable-mismatch", "mixed-dtypes"),
    "values": ("values", "weights", "checksum-mismatch", "digest-mismatch", "broken-tie"),
}


#: Needs of a plugin's rules that use an option.
NEEDS_BY_OPTION: Mapping[str, tuple[Need, ...]] = {
    "against": (needs_class_or_reference,),
    "model": (needs_class_or_reference, needs_module),
    "values": (needs_values,),
}


def check_required_rules(request: Request, given_options: Collection[str], loaded_config: LoadedConfig) -> None:
    """Raise UsageError if no rule is selected, or if no selected rule uses an option in `given_options`.

    Unused configuration is reported by `describe_unused`, except a lock whose rules the configuration itself disables.
    """
    if not request.rules:
        filters = f"{option('--select')}, {option('--ignore')} and the configuration"
        raise UsageError(f"no rule is selected: {filters} together exclude all rules; select at least one rule")
    for key, rules in RULES_BY_OPTION.items():
        if key in given_options and not _is_used(key, request):
            raise UsageError(
                f"{option(f'--{key}')}: {_describe_unselected(rules)}; select a rule that uses the option, or leave "
                "the option out"
            )
    configured = replace(
        request,
        select=config.expand_rules(loaded_config.config.select, "", loaded_config.rules),
        ignore=config.expand_rules(loaded_config.config.ignore, "", loaded_config.rules),
    )
    if (
        loaded_config.config.lock
        and "lock" not in given_options
        and not _is_any_selected(RULES_BY_OPTION["lock"], configured)
    ):
        raise UsageError(
            f"{loaded_config.path}: the key lock: {_describe_unselected(RULES_BY_OPTION['lock'])}; select a rule "
            "that uses the key, or remove the key"
        )


def describe_unused(request: Request) -> Iterator[str]:
    """Yield a line for each configured or requested setting that no selected rule uses."""
    requested = {"lock": request.lock is not None, "values": request.values}
    for key in (key for key, is_requested in requested.items() if is_requested):
        if not _is_used(key, request):
            yield f"{key}: {_describe_unselected(RULES_BY_OPTION[key])}"
    for key in list_policy_keys(request):
        # With --frozen-only, the globs of `frozen` select the locked tensors to check.
        if not _is_any_selected(RULES_BY_POLICY_KEY[key], request) and not (key == "frozen" and request.frozen_only):
            yield f"policy.{key}: {_describe_unselected(RULES_BY_POLICY_KEY[key])}"


def list_policy_keys(request: Request) -> list[str]:
    """Return the keys set in the policy."""
    keys = zip(request.policy.__struct_encode_fields__, request.policy.__struct_fields__, strict=True)
    return [key for key, field in keys if getattr(request.policy, field) not in (None, ())]


def _is_used(key: str, request: Request) -> bool:
    """Return whether a selected rule uses an option.

    For statecli's rules, the name or the group decides; for plugin rules also the inputs that a rule declares.
    """
    plugin_needs = {need for rule in request.rules if rule.plugin is not None for need in rule.needs}
    is_needed = not plugin_needs.isdisjoint(NEEDS_BY_OPTION.get(key, ()))
    return is_needed or _is_any_selected(RULES_BY_OPTION[key], request)


def _is_any_selected(rules: Collection[str], request: Request) -> bool:
    return any(rule.name in rules or rule.group in rules for rule in request.rules)


def _describe_unselected(rules: Collection[str]) -> str:
    return f"has no effect, because --select, --ignore or the configuration excludes {join_names(list(rules))}"
