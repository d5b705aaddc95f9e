"""Import plugins, and check their rules, because a faulty rule must not run and then seem to pass."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.commands.audit import plugin_trust
from statecli.commands.audit.plugins import Plugin, PluginRequest
from statecli.core.errors import StateError, UsageError, option
from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.rule import FORMER_NAMES
from statecli.live import search_path
from statecli.live.user_code import protect_streams
from statecli.rules.audit_rule import AuditRule, Find, Issue
from statecli.rules.audit_subject import Subject
from statecli.rules.dictionary import DICTIONARY

_RULE_NAME = compile_on_use(r"(?P<prefix>[a-z][a-z0-9]*)(-[a-z0-9]+)+")
#: First words of the names of statecli's own rules, and names of their groups, which a plugin must not use as prefix.
_RESERVED_PREFIXES = frozenset(name.partition("-")[0] for name in (*DICTIONARY, *FORMER_NAMES.values())) | frozenset(
    rule.group for rule in DICTIONARY.values()
)
_file_numbers = itertools.count()
#: Lock for importing plugins and running their rules, because both replace the search path and the streams of the
#: process.
_PROCESS_LOCK = threading.RLock()


def import_plugins(request: PluginRequest) -> tuple[Plugin, ...]:
    """Import each plugin once, the configuration's plugins first. Raises UsageError for a plugin that cannot be used.

    A configured name that is also typed is trusted like a typed name.
    """
    configured = [name for name in dict.fromkeys(request.configured) if name not in request.typed]
    with _PROCESS_LOCK:
        # Every name is checked before any code runs.
        for name in configured:
            plugin_trust.check_configured(name, request)
        for name in request.typed:
            if not plugin_trust.is_file(name):
                plugin_trust.check_typed(name)
        plugins = [_load_plugin(name, f"{request.config_path}: plugins: {name!r}") for name in configured]
        plugins += [_load_plugin(name, option("--plugin", name)) for name in dict.fromkeys(request.typed)]
    _check_unique(plugins)
    return tuple(plugins)


def _load_plugin(name: str, origin: str) -> Plugin:
    if not plugin_trust.is_file(name):
        module = _import(lambda: importlib.import_module(name), search_path.use_installed_only(), origin)
    elif os.path.isfile(name):
        module = _import(lambda: _import_file(name), search_path.use_folder_last(os.path.dirname(name)), origin)
    else:
        raise UsageError(f"{origin}: no such file; check the path")
    return _build_plugin(name, module, origin)


def _import(run: Callable[[], ModuleType], path: AbstractContextManager[None], origin: str) -> ModuleType:
    """Run the code of a module. Raises UsageError for any exception of the code."""
    try:
        with path, protect_streams():
            return run()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{origin}: cannot be imported: {_describe_error(error)}") from error


def _import_file(path: str) -> ModuleType:
    # A unique name, so that the file replaces no module.
    name = f"_statecli_plugin_{next(_file_numbers)}"
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(path))
    if spec is None or spec.loader is None:
        raise ImportError("Python cannot import this file as a module")
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        _forget_siblings(set(sys.modules) - before - {name}, os.path.dirname(os.path.abspath(path)))
    return module


def _forget_siblings(names: set[str], folder: str) -> None:
    """Remove modules of the plugin's folder from `sys.modules`, because another plugin may use the same names."""
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and os.path.abspath(file).startswith(os.path.join(folder, "")):
            del sys.modules[name]


def _describe_error(error: BaseException) -> str:
    """Return the error in one line, with the file and line in the code of the plugin."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames or frames[-1].filename.startswith("<frozen"):
        return text
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})"


# --- the rules of a plugin --------------------------------------------------------------------------------------------


def _build_plugin(name: str, module: ModuleType, origin: str) -> Plugin:
    """Return the plugin. Its rules form a group that is named after the rules' prefix. Raises UsageError."""
    rules: Any = getattr(module, "RULES", None)
    if not isinstance(rules, (tuple, list)) or not rules:
        raise UsageError(
            f"{origin}: the module does not define a tuple RULES with at least one rule; write RULES = (rule, …)"
        )
    for rule in rules:
        if not isinstance(rule, AuditRule):
            raise UsageError(
                f"{origin}: RULES contains {rule!r:.60}, which is not a rule; decorate the function with @rule(…)"
            )
        problem = _find_problem(rule)
        if problem is not None:
            raise UsageError(f"{origin}: rule {rule.name!r}: {problem}")
    prefixes = list(dict.fromkeys(rule.name.partition("-")[0] for rule in rules))
    if len(prefixes) > 1:
        raise UsageError(
            f"{origin}: rule names begin with {prefixes[0]}- and {prefixes[1]}-; use one prefix for all rules"
        )
    changed_fields = {"group": prefixes[0], "commands": ("audit",), "plugin": name}
    return Plugin(name, tuple(replace(rule, find=_protect(rule.find), **changed_fields) for rule in rules))


def _find_problem(rule: AuditRule) -> str | None:
    """Return why the rule cannot run, or None if the rule can run."""
    match = _RULE_NAME.fullmatch(rule.name) if isinstance(rule.name, str) else None
    if match is None:
        return "the name is not valid; use a prefix of your organisation and lower-case words: acme-missing-license"
    if match["prefix"] in _RESERVED_PREFIXES:
        return f"the prefix {match['prefix']}- belongs to statecli; use a prefix of your organisation, such as acme-"
    if not isinstance(rule.severity, Severity):
        return f"the severity is {rule.severity!r:.60}; use Severity.NOTE, Severity.WARNING or Severity.ERROR"
    if not all(isinstance(text, str) and text for text in (rule.summary, rule.why, rule.example, rule.fix)):
        return "summary, why, example and fix must be non-empty strings"
    if not callable(rule.find) or not isinstance(rule.needs, tuple) or not all(map(callable, rule.needs)):
        return "the rule, and each element of `needs`, must be a function that takes a Subject"
    return None


def _check_unique(plugins: list[Plugin]) -> None:
    owners: dict[str, str] = {}
    for plugin in plugins:
        for rule in plugin.rules:
            if rule.name in owners:
                owner_names = (
                    f"{owners[rule.name]} and {plugin.name}" if owners[rule.name] != plugin.name else plugin.name
                )
                raise UsageError(f"rule {rule.name!r} is defined twice, in {owner_names}; rename one of the two rules")
            owners[rule.name] = plugin.name


def _protect(find: Find) -> Find:
    """Wrap a rule's function: send its prints to standard error, and check each issue that it yields.

    An exception of the function is raised after the issues yielded before. `sys.exit` and errors of statecli are raised
    as RuntimeError, because they have a meaning for the whole run.
    """

    def find_issues(subject: Subject) -> Iterator[Issue]:
        issues: list[Issue] = []
        failure: BaseException | None = None
        try:
            with _PROCESS_LOCK, protect_streams():
                for issue in find(subject):
                    _check_issue(issue)
                    issues.append(issue)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # reported below: no error lets an audit pass
            failure = error
        yield from issues
        if isinstance(failure, (StateError, SystemExit)):
            raise RuntimeError(f"{type(failure).__name__}: {failure}") from failure
        if failure is not None:
            raise failure

    return find_issues


def _check_issue(issue: object) -> None:
    """Raise TypeError or ValidationError unless the object is an Issue with fields of the right types."""
    if not isinstance(issue, Issue) or not issue.message:
        raise TypeError(f"the rule yielded {issue!r:.60}, which is not an Issue with a message")
    msgspec.convert(msgspec.to_builtins(issue), Issue)
