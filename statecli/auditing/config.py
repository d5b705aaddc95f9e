"""What a project asks for: `statecli.toml`, or `[tool.statecli]` of `pyproject.toml`, the nearest one upwards.

`load` gives it checked: an unknown key or rule is an error with the near names. Paths in it are relative to its folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.auditing.policy import Policy
from statecli.errors import UnreadableError, UsageError
from statecli.finding import Severity
from statecli.formats._dtypes import BITS
from statecli.rules import RULES

FILES = ("statecli.toml", "pyproject.toml")


class Ignored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules that are not run on some targets, and why; the reason is shown with what they find."""

    rules: tuple[str, ...]
    reason: str


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """Keys are as in the file, with dashes. `select`, `ignore` and `severity` name rules, or a subject
    for all of its rules.

    `per_target_ignore` is by globs of targets. `lock`, `baseline` and `policy.reference` are paths.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_target_ignore: dict[str, Ignored] = {}
    severity: dict[str, Severity] = {}
    fail_on: Severity = Severity.WARNING
    values: bool = False
    lock: str | None = None
    baseline: str | None = None
    policy: Policy = Policy()


class Loaded(msgspec.Struct, frozen=True):
    """A configuration, and the file that it was read from; None where there is none."""

    config: Config = Config()
    path: str | None = None

    def source(self, *keys: str) -> str:
        """Where a key's value comes from: the file, or `default`."""
        there: Any = self.raw
        for key in keys:
            there = there.get(key) if isinstance(there, Mapping) else None
        return self.path if self.path is not None and there is not None else "default"

    #: The table as it stands in the file.
    raw: Mapping[str, Any] = {}


def load(path: str | None = None, start: str = ".") -> Loaded:
    """The configuration of `path`, else the nearest one from the folder `start` upwards, else the defaults.

    Raises UnreadableError for a file that is no TOML, UsageError for a key, a rule or a value that makes no sense.
    """
    if path is not None:
        table = _table(path)
        if table is None:
            raise UsageError(f"--config {path}: has no [tool.statecli]")
        return _checked(table, path)
    for found in _upwards(start):
        table = _table(found)
        if table is not None:
            return _checked(table, os.path.relpath(found))
    return Loaded()


def _upwards(start: str) -> Iterable[str]:
    folder = os.path.abspath(start)
    while True:
        yield from (path for name in FILES if os.path.isfile(path := os.path.join(folder, name)))
        parent = os.path.dirname(folder)
        if parent == folder:
            return
        folder = parent


def _table(path: str) -> Mapping[str, Any] | None:
    """What the file has for statecli; None where that is nothing, which most projects' files have."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from error
    own = os.path.basename(path) != "pyproject.toml"
    if not own and b"statecli" not in raw:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path}: is no TOML: {error}") from error
    if own:
        return table
    tool = table.get("tool", {})
    found = tool.get("statecli") if isinstance(tool, dict) else None
    return found if isinstance(found, dict) else None


# --- checking -------------------------------------------------------------------------------------------------------


def _checked(table: Mapping[str, Any], path: str) -> Loaded:
    table = dict(table)
    policy = table.get("policy", {})
    _known_keys(table, Config, path, "")
    if isinstance(policy, dict):
        _known_keys(policy, Policy, path, "policy.")
        table["policy"] = _eased(policy, path)
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        said, _, where = str(error).partition(" - at ")
        raise UsageError(
            f"{path}: {where.strip('`').removeprefix('$.') or 'it'}: {said[:1].lower()}{said[1:]}"
        ) from error
    _known_rules((*config.select, *config.ignore, *config.severity, *_ignored(config)), path)
    _known_dtypes(config.policy.dtype, path)
    return Loaded(_placed(config, os.path.dirname(path)), path, table)


def _known_keys(table: Mapping[str, Any], kind: type[msgspec.Struct], path: str, prefix: str) -> None:
    known = kind.__struct_encode_fields__
    for key in table:
        if key not in known:
            raise UsageError(f"{path}: there is no key {prefix + key!r}{near(key, known)}")


def _ignored(config: Config) -> Iterable[str]:
    return (name for one in config.per_target_ignore.values() for name in one.rules)


def _known_rules(names: Iterable[str], path: str) -> None:
    for name in names:
        expand((name,), path)


def expand(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The rules that these names stand for: a rule's own, or a subject's for all of its rules.

    Raises UsageError for what is neither, with the near names.
    """
    found: dict[str, None] = {}
    for name in names:
        meant = [rule.name for rule in RULES if name in (rule.name, rule.about)]
        if not meant:
            known = [*(rule.name for rule in RULES), *(rule.about for rule in RULES)]
            raise UsageError(f"{where}: there is no rule {name!r}{near(name, known)}; statecli rules lists them")
        found.update(dict.fromkeys(meant))
    return tuple(found)


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean select?`, or nothing."""
    close = get_close_matches(word, list(dict.fromkeys(known)), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known_dtypes(names: Sequence[str], path: str) -> None:
    for name in names:
        if name not in BITS:
            raise UsageError(f"{path}: policy.dtype: there is no dtype {name!r}{near(name, BITS)}")


# --- easing ---------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _eased(policy: Mapping[str, Any], path: str) -> dict[str, Any]:
    """One text where a list of texts is meant is a list of one; sizes may have a unit."""
    eased = {
        key: [value] if isinstance(value, str) and key not in ("reference", "max-bytes") else value
        for key, value in policy.items()
    }
    if isinstance(size := eased.get("max-bytes"), str):
        eased["max-bytes"] = _bytes(size, path)
    if "dtype" in eased and isinstance(eased["dtype"], list):
        eased["dtype"] = [str(name).removeprefix("torch.") for name in eased["dtype"]]
    return eased


def _bytes(text: str, path: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{path}: policy.max-bytes: {text!r} is no size; write 5000000, '500MB' or '2 GiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _placed(config: Config, folder: str) -> Config:
    """Paths in a configuration are meant from its own folder."""

    def placed(path: str | None) -> str | None:
        return path if path is None or not folder else os.path.normpath(os.path.join(folder, path))

    policy = replace(config.policy, reference=placed(config.policy.reference))
    return replace(config, lock=placed(config.lock), baseline=placed(config.baseline), policy=policy)
