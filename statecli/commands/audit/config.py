"""A project's configuration: the nearest `statecli.toml`, or `[tool.statecli]` of `pyproject.toml`, in the repository.

`load_config` checks the configuration: an unknown key or rule is an error with similar names, because a gate with a
mistyped key would pass everything. Paths are relative to the file's folder; in a file outside of the repository, to the
current folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from statecli.commands import audit
from statecli.commands.audit.audited_folders import is_judged_with
from statecli.commands.audit.plugins import Plugin, PluginRequest, join_rules
from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import UnreadableError, UsageError, option
from statecli.core.finding import Severity
from statecli.core.option_defaults import AUDIT_FAIL_ON
from statecli.core.rule import Rule, find_rules, list_present_names
from statecli.core.similar_paths import append_suggestion
from statecli.rules.audit_rule import AuditRule
from statecli.rules.policy_config import Policy
from statecli.storage import files
from statecli.storage.byte_source import read_small_file
from statecli.targets.location import find_repository_root, has_repository

CONFIG_FILE_NAMES = ("statecli.toml", "pyproject.toml")
#: Groups of rules about code and memory, and a rule of another group. A configuration in an audited folder may weaken
#: none of them. Bytes after the data are read by a second load of the same file.
_CODE_GROUPS, _TRAILING_BYTES_RULE = ("pickles", "model_code"), "trailing-bytes"
#: Largest size of a configuration file, in bytes.
MAX_CONFIG_BYTES = 1 << 22
_LIST_RULES = "; run statecli rules for the list"

T = TypeVar("T")


class IgnoreEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules whose findings on some targets are accepted, with the reason that is shown for these findings.

    If a finding has a digest of the checked content (pickles, code, lock), `contents` must list this digest.
    """

    rules: tuple[str, ...]
    reason: str
    contents: tuple[str, ...] = ()


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """The configuration. Keys are as in the file, with dashes.

    `plugins` names modules with further rules. `select`, `ignore` and `severity` name rules or rule groups.
    `per_target_ignore` maps globs of targets, relative to the file's folder. `lock`, `baseline` and `policy.reference`
    are paths.
    """

    plugins: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_target_ignore: dict[str, IgnoreEntry] = {}
    severity: dict[str, Severity] = {}
    fail_on: Severity = AUDIT_FAIL_ON
    values: bool | None = None
    lock: str | None = None
    baseline: str | None = None
    policy: Policy = Policy()

    @property
    def rule_names(self) -> tuple[str, ...]:
        """All names of rules and groups in the configuration."""
        ignored = (name for entry in self.per_target_ignore.values() for name in entry.rules)
        return (*self.select, *self.ignore, *self.severity, *ignored)


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration, the path of its file (None if there is no file), and the plugins of the audit.

    `plugins` come from the configuration and from the command line.
    """

    config: Config = Config()
    path: str | None = None
    plugins: tuple[Plugin, ...] = ()

    @property
    def rules(self) -> tuple[AuditRule, ...]:
        """The rules of statecli and of the plugins."""
        return join_rules(self.plugins)

    @property
    def protected_rules(self) -> frozenset[str]:
        """Rules (about pickles and code, and of plugins) that a configuration next to audited files cannot weaken."""
        protected_names = {rule.name for rule in join_rules(()) if rule.group in _CODE_GROUPS} | {_TRAILING_BYTES_RULE}
        return frozenset(protected_names | {rule.name for plugin in self.plugins for rule in plugin.rules})

    def source(self, *keys: str) -> str:
        """Return the path of the file that sets a key, or `default`."""
        value: Any = self.raw
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return self.path if self.path is not None and value is not None else "default"

    @property
    def folder(self) -> str:
        """The base folder of relative paths and globs in the configuration."""
        return (os.path.dirname(self.path) if self.path and _is_in_repository(self.path) else "") or "."

    #: The table as written in the file.
    raw: Mapping[str, Any] = {}
    #: Whether the file lies in an audited folder, so that it may not weaken the rules about code.
    is_judged: bool = False


class Setting(msgspec.Struct, frozen=True):
    """Key of the configuration, its value, and its source: the path of the file, or `default`."""

    key: str
    value: object
    source: str


def list_settings(loaded_config: LoadedConfig) -> list[Setting]:
    """Return each key of the configuration, with its value and its source: the file, or `default`."""
    rows: list[Setting] = []
    for field, key in zip(Config.__struct_fields__, Config.__struct_encode_fields__, strict=True):
        value = getattr(loaded_config.config, field)
        if key != "policy":
            rows.append(Setting(key, value, loaded_config.source(key)))
            continue
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        rows += [
            Setting(f"policy.{inner}", getattr(value, name), loaded_config.source("policy", inner))
            for name, inner in names
        ]
    return rows


def load_config(
    path: str | None = None,
    start: str = ".",
    *,
    no_config: bool = False,
    plugins: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> LoadedConfig:
    """Return the configuration in `path`, else the nearest configuration from `start` up to the repository's root.

    Without any file, and with `no_config`, return the defaults. The modules `plugins` are imported, and the modules
    named by the configuration, if allowed by `plugin_trust`. Raises UnreadableError for a file that is not TOML,
    UsageError for an invalid key, rule or value, and for a plugin that cannot be used.
    """
    request = PluginRequest(tuple(plugins))
    if no_config:
        if path is not None:
            options = f"{option('--config', path)} and {option('--no-config')}"
            raise UsageError(f"{options} contradict each other; leave one of them out")
        return LoadedConfig(plugins=_load_plugins(request))
    if path is not None:
        if files.is_remote(path):
            raise UsageError(f"{option('--config', path)}: is a URL; copy the configuration to a local file")
        table = _read_table(path)
        if table is None:
            raise UsageError(
                f"{option('--config', path)}: does not have a table [tool.statecli]; add the table, or give "
                "another file"
            )
        return _parse_table(table, path, request)
    for config_path in map(os.path.relpath, _iter_config_files(start)):
        table = _read_table(config_path)
        if table is not None:
            return _parse_table(table, config_path, replace(request, is_judged=_is_judged(config_path, targets)))
    return LoadedConfig(plugins=_load_plugins(request))


def _load_plugins(request: PluginRequest) -> tuple[Plugin, ...]:
    if not request.typed and not request.configured:
        return ()
    return audit.import_plugin.import_plugins(request)


def _is_judged(path: str, targets: Iterable[str]) -> bool:
    """Return whether the author of an audited target may have written the configuration.

    The author of a download also wrote its configuration. A repository is assumed to be the user's own.
    """
    folder = os.path.realpath(os.path.dirname(path) or os.curdir)
    return not has_repository(folder) and any(is_judged_with(folder, text) for text in targets)


def distrust_judged_config(loaded_config: LoadedConfig, targets: Iterable[str]) -> LoadedConfig:
    """Drop settings that weaken protected rules, if the author of a target may have written the configuration."""
    if loaded_config.path is None or not _is_judged(loaded_config.path, targets):
        return loaded_config
    config, protected = loaded_config.config, loaded_config.protected_rules
    is_complete = not config.select or set(expand_rules(config.select, "select", loaded_config.rules)) >= protected
    groups = {
        rule.group for rule in loaded_config.rules if rule.name in protected and rule.name != _TRAILING_BYTES_RULE
    }
    trusted = replace(
        config,
        select=config.select if is_complete else (*config.select, *sorted(protected)),
        ignore=_remove_protected_rules(config.ignore, loaded_config),
        severity={
            name: level
            for name, level in config.severity.items()
            if level is Severity.ERROR or {*groups, *protected}.isdisjoint((name, *list_present_names(name)))
        },
        per_target_ignore={
            glob: replace(entry, rules=rules)
            for glob, entry in config.per_target_ignore.items()
            if (rules := _remove_protected_rules(entry.rules, loaded_config))
        },
        fail_on=AUDIT_FAIL_ON if config.fail_on is Severity.ERROR else config.fail_on,
    )
    return replace(loaded_config, config=trusted, is_judged=trusted != config or config.baseline is not None)


def _remove_protected_rules(names: tuple[str, ...], loaded_config: LoadedConfig) -> tuple[str, ...]:
    rules, protected = expand_rules(names, "ignore", loaded_config.rules), loaded_config.protected_rules
    return tuple(rule for rule in rules if rule not in protected) if protected & set(rules) else names


def _iter_config_files(start: str) -> Iterable[str]:
    folder = os.path.abspath(start)
    # Only folders of the repository count: anyone may write to a folder above, such as /tmp, and must not configure
    # audits.
    root = find_repository_root(folder)
    while True:
        yield from (path for name in CONFIG_FILE_NAMES if os.path.isfile(path := os.path.join(folder, name)))
        if folder == root:
            return
        folder = os.path.dirname(folder)


def _is_in_repository(path: str) -> bool:
    root = find_repository_root(os.path.realpath(os.curdir))
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def _read_table(path: str) -> Mapping[str, Any] | None:
    """Return the table for statecli in a TOML file, or None if the file has no such table."""
    try:
        raw = read_small_file(path, MAX_CONFIG_BYTES)
    except UnreadableError as error:
        raise UnreadableError(append_suggestion(f"{path}: the configuration {error}", path)) from error
    is_own_file = os.path.basename(path) != "pyproject.toml"
    if not is_own_file and b"statecli" not in raw:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(raw.decode("utf-8-sig"))  # editors of Windows write a byte order mark
    except ValueError as error:  # also for a number with more digits than Python reads
        raise UnreadableError(f"{path}: is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UnreadableError(f"{path}: tables or lists are nested too deeply; use fewer levels") from error
    if is_own_file:
        return table
    tool = table.get("tool", {})
    section = tool.get("statecli") if isinstance(tool, dict) else None
    if section is not None and not isinstance(section, dict):
        raise UsageError(
            f"{path}: tool.statecli: must be a table; write a line [tool.statecli] and the keys below this line"
        )
    return section


# --- checking -------------------------------------------------------------------------------------------------------


def _mask_secrets(value: object) -> Any:
    """Return the value without credentials in URLs. Keys are masked too, because a key may be a target's URL."""
    if isinstance(value, dict):
        return {_mask_secrets(key): _mask_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask_secrets(item) for item in value]
    return files.remove_secrets(files.mask_urls(value)) if isinstance(value, str) else value


def _parse_table(table: Mapping[str, Any], path: str, request: PluginRequest) -> LoadedConfig:
    table = _mask_secrets(table)
    _check_keys(table, Config, path, "")
    lists = ("plugins", "select", "ignore")
    normalized = {key: _wrap_text(value) if key in lists else value for key, value in table.items()}
    if isinstance(policy := table.get("policy"), dict):
        _check_keys(policy, Policy, path, "policy.")
        normalized["policy"] = _normalize_policy(policy, path)
    for key, kind in (("severity", Severity), ("per-target-ignore", IgnoreEntry)):
        if isinstance(inner := table.get(key), dict):
            # One by one, because msgspec does not say which value of a table is wrong.
            normalized[key] = {
                name: _convert(_normalize_entry(entry), kind, f"{key}.{name}", path) for name, entry in inner.items()
            }
    config = _convert(normalized, Config, "", path)
    plugins = _load_plugins(replace(request, configured=config.plugins, config_path=path))
    expand_rules(config.rule_names, path, join_rules(plugins))  # raises for an unknown name
    for name in config.policy.dtype:
        if name not in ELEMENT_BITS:
            raise UsageError(f"{path}: policy.dtype: unknown dtype {name!r}{suggest_names(name, ELEMENT_BITS)}")
    for key, target_path in (
        ("lock", config.lock),
        ("baseline", config.baseline),
        ("policy.reference", config.policy.reference),
    ):
        if target_path == "":
            raise UsageError(f"{path}: {key}: is empty; write the path of a file, or remove the key")
    for glob, entry in config.per_target_ignore.items():
        if not entry.reason.strip():
            raise UsageError(
                f"{path}: per-target-ignore.{glob}: reason is empty; write why these findings are accepted"
            )
    resolved_config = _resolve_paths(config, os.path.dirname(path) if _is_in_repository(path) else "")
    return LoadedConfig(resolved_config, path, plugins, table)


#: Names of msgspec for the types of a TOML file -> names that users know.
_TYPE_NAMES = {
    "array": "a list",
    "str": "a text",
    "object": "a table",
    "bool": "true or false",
    "int": "a whole number",
}
_TYPE_NAMES |= {"str | null": "a text", "int | null": "a whole number"}


def _convert(value: object, type_: type[T], key_prefix: str, path: str) -> T:
    """Convert a configuration value to `type_`. The UsageError for a wrong value gives the path of the value."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message, _, inner = str(error).partition(" - at ")
        if message.startswith("Invalid enum value"):
            message = f"{message.removeprefix('Invalid enum value ')} is not a severity; write {', '.join(Severity)}"
        message = re.sub(r"`([^`]+)`", lambda match: _TYPE_NAMES.get(match[1], f"`{match[1]}`"), message)
        key_path = (
            ".".join(filter(None, (key_prefix, inner.strip("`").removeprefix("$").removeprefix("."))))
            or "the top level"
        )
        raise UsageError(f"{path}: {key_path}: {message[:1].lower()}{message[1:]}") from error


def _check_keys(table: Mapping[str, Any], type_: type[msgspec.Struct], path: str, prefix: str) -> None:
    fields = type_.__struct_encode_fields__
    for key in table:
        if key == "tool" and not prefix:
            raise UsageError(
                f"{path}: [tool.statecli] is only for pyproject.toml; in this file, write the keys at the top level"
            )
        if key not in fields:
            raise UsageError(f"{path}: unknown key {prefix + key!r}{suggest_names(key, fields)}")


def expand_rules(
    names: Sequence[str], origin: str, known_rules: Collection[Rule], command: str = "audit"
) -> tuple[str, ...]:
    """Expand names of rules and groups to the names of the rules, as `find_rules` does.

    Raises UsageError, with similar names, for an unknown name.
    """
    rules: dict[str, None] = {}
    for name in names:
        matching = find_rules(name, known_rules, command)
        if not matching:
            known_names = [*(rule.name for rule in known_rules), *(rule.group for rule in known_rules)]
            raise UsageError(f"{origin}: unknown rule {name!r}{suggest_names(name, known_names) or _LIST_RULES}")
        rules.update(dict.fromkeys(rule.name for rule in matching))
    return tuple(rules)


def map_to_rules(settings: Iterable[tuple[str, T]], origin: str, known_rules: Collection[Rule]) -> dict[str, T]:
    """Return the setting of each rule. A rule's own setting overrides its group's, and later settings win."""
    groups = {rule.group for rule in known_rules}
    own_last = sorted(settings, key=lambda setting: setting[0] not in groups)
    return {rule: value for name, value in own_last for rule in expand_rules((name,), origin, known_rules)}


def suggest_names(word: str, candidates: Iterable[str]) -> str:
    """Return similar names as a suggestion, such as `; did you mean select?`. Return "" if no name is similar."""
    from difflib import get_close_matches

    matches = get_close_matches(word, list(dict.fromkeys(candidates)), n=3)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


# --- normalizing ------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _wrap_text(value: object) -> Any:
    return [value] if isinstance(value, str) else value


def _normalize_entry(value: object) -> Any:
    return value | {"rules": _wrap_text(value["rules"])} if isinstance(value, dict) and "rules" in value else value


def _normalize_policy(policy: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the policy with single texts as lists, sizes in bytes, and dtypes without `torch.`."""
    normalized = {
        key: value if key in ("reference", "max-bytes") else _wrap_text(value) for key, value in policy.items()
    }
    if isinstance(size := normalized.get("max-bytes"), str):
        normalized["max-bytes"] = _parse_size(size, path)
    if "dtype" in normalized and isinstance(normalized["dtype"], list):
        normalized["dtype"] = [str(name).removeprefix("torch.") for name in normalized["dtype"]]
    return normalized


def _parse_size(text: str, path: str) -> int:
    # At most 30 digits, because Python refuses to convert numbers of thousands of digits.
    match = re.fullmatch(r"(\d{1,30})(?:\.(\d{1,30}))?\s*([a-zA-Z]*)", text.strip(), re.ASCII)
    if match is None or match[3].lower() not in _UNITS:
        excerpt = text if len(text) < 40 else text[:40] + "…"
        raise UsageError(f"{path}: policy.max-bytes: {excerpt!r} is not a size; write 5000000, '500MB' or '2 GiB'")
    integer, fraction = match[1], match[2] or ""
    return int(integer + fraction) * _UNITS[match[3].lower()] // int("1" + "0" * len(fraction))


def _resolve_paths(config: Config, folder: str) -> Config:
    def resolve(path: str | None) -> str | None:
        is_final = path is None or not folder or files.is_remote(path)
        return path if is_final else os.path.normpath(os.path.join(folder, str(path)))

    policy = replace(config.policy, reference=resolve(config.policy.reference))
    return replace(config, lock=resolve(config.lock), baseline=resolve(config.baseline), policy=policy)
