"""Decide whether a named plugin may be imported, without importing anything.

A configuration may come with an audited checkout. So a module named by a configuration must be installed: a package in
site-packages of the running Python declares the module as an entry point of the group `statecli.rules`, and its files
lie neither in the current folder or its repository nor at a target. PYTHONPATH and the current folder declare nothing,
because the author of the checkout may have written a `*.dist-info` folder too.

The user vouches for a typed name. But a name does not say where the module is: a download may contain a module with
the name of the user's package. So installed modules come before modules of the current folder, and a module at a target
is refused also here. A typed file (`./rules.py`) says where it is, and is imported from any folder.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec

from statecli.commands.audit.audited_folders import contains_folder, is_at_target, is_below
from statecli.commands.audit.plugins import PluginRequest
from statecli.core.errors import UsageError, option
from statecli.core.lazy_pattern import compile_on_use
from statecli.live import search_path
from statecli.targets.location import find_repository_root

#: The group of entry points by which an installed package declares the modules with its rules.
ENTRY_POINT_GROUP = "statecli.rules"

_DOTTED_NAME = compile_on_use(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_file(name: str) -> bool:
    """Return whether the user typed a plugin as a file instead of a module name."""
    return name.endswith(".py")


def check_typed(name: str, targets: Sequence[str]) -> None:
    """Raise UsageError unless the typed module may be imported."""
    origin = option("--plugin", name)
    _check_name(
        name,
        origin,
        f"give the name of a module, such as acme.rules, or a file, such as {option('--plugin', './rules.py')}",
    )
    with search_path.use_folder_last():
        files = _find_files(name, origin)
    for file in files:
        target = _find_judged_target(file, targets)
        if target is not None:
            raise UsageError(
                f"{origin}: Python would import {_shorten(file)}, which may come from the author of {target}; if you "
                f"trust this file, use {option('--plugin', _shorten(files[-1]))}"
            )


def check_configured(name: str, request: PluginRequest) -> None:
    """Raise UsageError if the module is not installed, or if the author of a target may have written it."""
    origin = f"{request.config_path}: plugins: {name!r}"
    _check_name(name, origin, "give the name of a module of an installed package, such as acme.rules")
    advice = f"use {option('--plugin', name)}"
    refusal = f"{origin}: statecli does not import this plugin, because"
    if request.is_judged:
        raise UsageError(
            f"{refusal} the author of the checkpoints may have written this configuration; if you trust the plugin, "
            f"{advice} or {option('--config', request.config_path)}"
        )
    if not _is_declared(name):
        reason = f"no package in site-packages declares this module as an entry point of the group {ENTRY_POINT_GROUP}"
        raise UsageError(f"{refusal} {reason}; install the package, or {advice}")
    with search_path.use_installed_only():
        files = _find_files(name, origin)
    for file in files:
        if _find_site_folder(file) is None and _is_in_checkout(file):
            reason = f"{_shorten(file)} is in the current folder or its Git repository"
            raise UsageError(f"{refusal} {reason}; install the package as a wheel, or {advice}")
        target = _find_judged_target(file, request.targets)
        if target is not None:
            reason = f"{_shorten(file)} may come from the author of {target}"
            raise UsageError(f"{refusal} {reason}; install the package in another folder")


def _check_name(name: str, origin: str, advice: str) -> None:
    if _DOTTED_NAME.fullmatch(name) is None:
        raise UsageError(f"{origin}: is not the name of a module; {advice}")


# --- what is installed ------------------------------------------------------------------------------------------------


def _list_site_folders() -> list[str]:
    """Return the folders into which pip installs packages for this Python, and for this user."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(map(os.path.realpath, folders)))


def _is_declared(name: str) -> bool:
    installed = metadata.distributions(path=_list_site_folders())
    return any(
        entry.group == ENTRY_POINT_GROUP and entry.value.partition(":")[0].strip() == name
        for distribution in installed
        for entry in distribution.entry_points
    )


# --- which files Python would run -------------------------------------------------------------------------------------


def _find_files(name: str, origin: str) -> list[str]:
    """Return the files that `import name` would run (each parent's `__init__.py`, then the module). Import nothing."""
    files: list[str] = []
    folders: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full_name = ".".join(parts[:count])
        spec = None if count > 1 and folders is None else _find_spec(full_name, folders)
        if spec is None:
            raise UsageError(
                f"{origin}: the module {full_name} was not found; check the spelling, or install the package"
            )
        if spec.has_location and spec.origin is not None:
            files.append(spec.origin)
        # Use the present path of an imported package, which may have changed after the package was found.
        locations = getattr(sys.modules.get(full_name), "__path__", spec.submodule_search_locations)
        folders = None if locations is None else list(locations)
    return files


def _find_spec(full_name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    imported: ModuleSpec | None = getattr(sys.modules.get(full_name), "__spec__", None)
    if imported is not None:
        return imported
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec: ModuleSpec | None = find(full_name, folders, None) if find is not None else None
        except KeyError:  # Python looks up the parent of a namespace package, and the parent is not imported
            return _build_namespace_spec(full_name, folders or ())
        if spec is not None:
            return spec
    return None


def _build_namespace_spec(full_name: str, folders: Sequence[str]) -> ModuleSpec:
    """Return the spec of a namespace package: all folders of this name inside `folders`."""
    paths = (os.path.join(folder, full_name.rpartition(".")[2]) for folder in folders)
    spec = ModuleSpec(full_name, None, is_package=True)
    spec.submodule_search_locations = [path for path in paths if os.path.isdir(path)]
    return spec


# --- what is judged ---------------------------------------------------------------------------------------------------


def _is_in_checkout(file: str) -> bool:
    with suppress(OSError):  # the current folder may have been removed
        root = os.path.realpath(find_repository_root(os.path.realpath(os.curdir)))
        return any(is_below(path, root) for path in (os.path.realpath(file), os.path.abspath(file)))
    return False


def _find_judged_target(file: str, targets: Sequence[str]) -> str | None:
    """Return a target (at, above or below the file's folder) whose author may have written the file, or None.

    A target that contains site-packages does not count: every package of this Python would.
    """
    folders = [os.path.dirname(path) for path in dict.fromkeys((os.path.abspath(file), os.path.realpath(file)))]
    home = _find_site_folder(file)
    for target in targets:
        holds_site_packages = home is not None and contains_folder(target, home)
        if not holds_site_packages and any(is_at_target(folder, target) for folder in folders):
            return target
    return None


def _find_site_folder(file: str) -> str | None:
    path = os.path.realpath(file)
    return next((folder for folder in _list_site_folders() if is_below(path, folder)), None)


def _shorten(file: str) -> str:
    """Shorten the path of a file in the current folder to a relative path with `./`. Return other paths unchanged."""
    with suppress(OSError, ValueError):
        relative = os.path.relpath(file)
        if not relative.startswith(os.pardir):
            return os.path.join(os.curdir, relative)
    return file
