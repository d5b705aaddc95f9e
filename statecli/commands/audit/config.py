"""What a project asks for: `statecli.toml`, or `[tool.statecli]` of `pyproject.toml`, the nearest in the repository.

`load` gives it checked: an unknown key or rule is an error with the near names. Paths in it are relative to its folder;
those in a file outside of the repository to the current folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import UnreadableError, UsageError
from statecli.core.finding import Severity
from statecli.rules import RULES
from statecli.rules.policy_config import Policy
from statecli.storage import files
from statecli.storage.source import read_small_file

FILES = ("statecli.toml", "pyproject.toml")
#: Bytes of the longest file that is read.
LONGEST = 1 << 22

T = TypeVar("T")


class Ignored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules whose findings are accepted on some targets, and why; the reason is shown with what they find.

    Findings that have a content (of pickles, code, a lock) are accepted only if `contents` lists it.
    """

    rules: tuple[str, ...]
    reason: str
    contents: tuple[str, ...] = ()


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """Keys are as in the file, with dashes. `select`, `ignore` and `severity` name rules, or a subject
    for all of its rules.

    `per_target_ignore` is by globs of targets, as they lie from the file's folder; `lock`, `baseline` and
    `policy.reference` are paths.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_target_ignore: dict[str, Ignored] = {}
    severity: dict[str, Severity] = {}
    fail_on: Severity = Severity.WARNING
    values: bool | None = None
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

    @property
    def folder(self) -> str:
        """Where the file lies, from which its paths and globs are meant."""
        return (os.path.dirname(self.path) if self.path and _is_in_repository(self.path) else "") or "."

    #: The table as it stands in the file.
    raw: Mapping[str, Any] = {}


def load(path: str | None = None, start: str = ".", *, no_config: bool = False) -> Loaded:
    """Return the configuration in `path`, else the nearest one from the folder `start` up to the repository's root.

    Without any file, and with `no_config`, return the defaults. Raises UnreadableError for a file that is not TOML,
    UsageError for a key, a rule or a value that makes no sense.
    """
    if no_config:
        if path is not None:
            raise UsageError(f"--config {path} and --no-config contradict each other; leave one of them out")
        return Loaded()
    if path is not None:
        if files.is_remote(path):
            raise UsageError(f"--config {path}: is a URL, and a configuration is a file here: copy it")
        table = _table(path)
        if table is None:
            raise UsageError(f"--config {path}: has no [tool.statecli]")
        return _checked(table, path)
    for found in map(os.path.relpath, _upwards(start)):
        table = _table(found)
        if table is not None:
            return _checked(table, found)
    return Loaded()


def _upwards(start: str) -> Iterable[str]:
    folder = os.path.abspath(start)
    root = _root_of(folder)
    while True:
        yield from (path for name in FILES if os.path.isfile(path := os.path.join(folder, name)))
        if folder == root:
            return
        folder = os.path.dirname(folder)


def _root_of(folder: str) -> str:
    """Return the root of the repository around an absolute folder; the folder itself where there is no repository.

    Whoever can write to a folder above the repository, such as /tmp, must not configure what is judged inside it.
    """
    root = folder
    while not os.path.lexists(os.path.join(root, ".git")):
        if root == os.path.dirname(root):
            return folder
        root = os.path.dirname(root)
    return root


def _is_in_repository(path: str) -> bool:
    root = _root_of(os.path.realpath(os.curdir))
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def _table(path: str) -> Mapping[str, Any] | None:
    """What the file has for statecli; None where that is nothing, which most projects' files have."""
    try:
        raw = read_small_file(path, LONGEST)
    except UnreadableError as error:
        raise UnreadableError(f"{path}: the configuration {error}") from error
    own = os.path.basename(path) != "pyproject.toml"
    if not own and b"statecli" not in raw:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(raw.decode("utf-8"))
    except ValueError as error:  # also a number of more digits than Python reads
        raise UnreadableError(f"{path}: is no TOML: {error}") from error
    except RecursionError as error:
        raise UnreadableError(f"{path}: nests too deep") from error
    if own:
        return table
    tool = table.get("tool", {})
    found = tool.get("statecli") if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{path}: tool.statecli: expected a table; write its keys below [tool.statecli]")
    return found


# --- checking -------------------------------------------------------------------------------------------------------


def _shown(value: Any) -> Any:
    """Return the value without credentials of URLs, also of URLs inside a text; keys are globs of targets."""
    if isinstance(value, dict):
        return {_shown(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return files.remove_secrets(files.mask_urls(value)) if isinstance(value, str) else value


def _checked(table: Mapping[str, Any], path: str) -> Loaded:
    table = _shown(table)
    _known_keys(table, Config, path, "")
    eased = {key: _texts(value) if key in ("select", "ignore") else value for key, value in table.items()}
    if isinstance(policy := table.get("policy"), dict):
        _known_keys(policy, Policy, path, "policy.")
        eased["policy"] = _eased(policy, path)
    for key, kind in (("severity", Severity), ("per-target-ignore", Ignored)):
        if isinstance(inner := table.get(key), dict):
            # One by one: of a table's values msgspec says what is wrong, and not with which.
            eased[key] = {name: _converted(_ruled(one), kind, f"{key}.{name}", path) for name, one in inner.items()}
    config = _converted(eased, Config, "", path)
    _known_rules((*config.select, *config.ignore, *config.severity, *_ignored(config)), path)
    _known_dtypes(config.policy.dtype, path)
    for key, where in (
        ("lock", config.lock),
        ("baseline", config.baseline),
        ("policy.reference", config.policy.reference),
    ):
        if where == "":
            raise UsageError(f"{path}: {key}: is empty; name a file, or leave it out")
    for glob, one in config.per_target_ignore.items():
        if not one.reason.strip():
            raise UsageError(f"{path}: per-target-ignore.{glob}: its reason is empty; say why, it is shown")
    return Loaded(_placed(config, os.path.dirname(path) if _is_in_repository(path) else ""), path, table)


#: What msgspec calls the types of a TOML file, and what its users do.
_CALLED = {"array": "a list", "str": "a text", "object": "a table", "bool": "true or false", "int": "a whole number"}
_CALLED |= {"str | null": "a text", "int | null": "a whole number"}


def _converted(value: Any, kind: type[T], where: str, path: str) -> T:
    """As this type. Raises UsageError that says where in the file it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, _, inner = str(error).partition(" - at ")
        if said.startswith("Invalid enum value"):
            said = f"{said.removeprefix('Invalid enum value ')} is no severity; write {', '.join(Severity)}"
        said = re.sub(r"`([^`]+)`", lambda match: _CALLED.get(match[1], f"`{match[1]}`"), said)
        place = ".".join(filter(None, (where, inner.strip("`").removeprefix("$").removeprefix(".")))) or "it"
        raise UsageError(f"{path}: {place}: {said[:1].lower()}{said[1:]}") from error


def _known_keys(table: Mapping[str, Any], kind: type[msgspec.Struct], path: str, prefix: str) -> None:
    known = kind.__struct_encode_fields__
    for key in table:
        if key == "tool" and not prefix:
            raise UsageError(f"{path}: has no [tool.statecli], which is pyproject.toml's: write its keys at the top")
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
        meant = [rule.name for rule in RULES if name in (rule.name, rule.group)]
        if not meant:
            known = [*(rule.name for rule in RULES), *(rule.group for rule in RULES)]
            raise UsageError(f"{where}: there is no rule {name!r}{near(name, known)}; statecli rules lists them")
        found.update(dict.fromkeys(meant))
    return tuple(found)


def of_rules(said: Iterable[tuple[str, T]], where: str) -> dict[str, T]:
    """What is said of rules, by rule: by its own name before by its subject, of two alike the last."""
    subjects = {rule.group for rule in RULES}
    own_last = sorted(said, key=lambda one: one[0] not in subjects)
    return {rule: what for name, what in own_last for rule in expand((name,), where)}


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean select?`, or nothing."""
    close = get_close_matches(word, list(dict.fromkeys(known)), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known_dtypes(names: Sequence[str], path: str) -> None:
    for name in names:
        if name not in ELEMENT_BITS:
            raise UsageError(f"{path}: policy.dtype: there is no dtype {name!r}{near(name, ELEMENT_BITS)}")


# --- easing ---------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _texts(value: Any) -> Any:
    """One text where a list of texts is meant is a list of one."""
    return [value] if isinstance(value, str) else value


def _ruled(value: Any) -> Any:
    return value | {"rules": _texts(value["rules"])} if isinstance(value, dict) and "rules" in value else value


def _eased(policy: Mapping[str, Any], path: str) -> dict[str, Any]:
    """One text for a list of one; sizes may have a unit."""
    eased = {key: value if key in ("reference", "max-bytes") else _texts(value) for key, value in policy.items()}
    if isinstance(size := eased.get("max-bytes"), str):
        eased["max-bytes"] = _bytes(size, path)
    if "dtype" in eased and isinstance(eased["dtype"], list):
        eased["dtype"] = [str(name).removeprefix("torch.") for name in eased["dtype"]]
    return eased


def _bytes(text: str, path: str) -> int:
    # No size has more digits: Python reads no number of thousands.
    match = re.fullmatch(r"(\d{1,30})(?:\.(\d{1,30}))?\s*([a-zA-Z]*)", text.strip(), re.ASCII)
    if match is None or match[3].lower() not in _UNITS:
        shown = text if len(text) < 40 else text[:40] + "…"
        raise UsageError(f"{path}: policy.max-bytes: {shown!r} is no size; write 5000000, '500MB' or '2 GiB'")
    whole, part = match[1], match[2] or ""
    return int(whole + part) * _UNITS[match[3].lower()] // int("1" + "0" * len(part))


def _placed(config: Config, folder: str) -> Config:
    """Paths in a configuration are meant from its own folder."""

    def placed(path: str | None) -> str | None:
        is_there = path is None or not folder or files.is_remote(path)
        return path if is_there else os.path.normpath(os.path.join(folder, str(path)))

    policy = replace(config.policy, reference=placed(config.policy.reference))
    return replace(config, lock=placed(config.lock), baseline=placed(config.baseline), policy=policy)
