"""Decide whether a named plugin may be imported, without importing anything.

The user vouches for a typed name. A name stands for an installed module, never for a module of the current folder,
because a download may contain a module with the name of the user's package. A typed file (`./rules.py`) says where it
is, and is imported from any folder.

A configuration may come with an audited checkout. So a module named by a configuration must be in site-packages of the
running Python, where a package declares the module as an entry point of the group `statecli.rules`. PYTHONPATH, the
current folder and an editable installation do not count, because the author of the checkout may have written them.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sysconfig
from contextlib import suppress
from importlib import metadata

from statecli.commands.audit.audited_folders import is_below
from statecli.commands.audit.plugins import PluginRequest
from statecli.core.errors import UsageError, option
from statecli.core.lazy_pattern import compile_on_use
from statecli.live import search_path

#: The group of entry points by which an installed package declares the modules with its rules.
ENTRY_POINT_GROUP = "statecli.rules"

_DOTTED_NAME = compile_on_use(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_file(name: str) -> bool:
    """Return whether the user typed a plugin as a file instead of a module name."""
    return name.endswith(".py")


def check_typed(name: str) -> None:
    """Raise UsageError unless the typed name is the name of an installed module."""
    origin = option("--plugin", name)
    advice = f"give the name of an installed module, or a file, such as {option('--plugin', './rules.py')}"
    if _DOTTED_NAME.fullmatch(name) is None:
        raise UsageError(f"{origin}: is not the name of a module; {advice}")
    if not _find_locations(name):
        raise UsageError(f"{origin}: the module {name.partition('.')[0]} is not installed; {advice}")


def check_configured(name: str, request: PluginRequest) -> None:
    """Raise UsageError if the module is not installed, or if the author of a target may have written its name."""
    origin = f"{request.config_path}: plugins: {name!r}"
    if _DOTTED_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{origin}: is not the name of a module; give the name of a module of an installed package, such as "
            "acme.rules"
        )
    advice = f"use {option('--plugin', name)}"
    refusal = f"{origin}: statecli does not import this plugin, because"
    if request.is_judged:
        raise UsageError(
            f"{refusal} the author of the checkpoints may have written this configuration; if you trust the plugin, "
            f"{advice} or {option('--config', request.config_path)}"
        )
    site_folders = _list_site_folders()
    if not _is_declared(name, site_folders):
        reason = f"no package in site-packages declares this module as an entry point of the group {ENTRY_POINT_GROUP}"
        raise UsageError(f"{refusal} {reason}; install the package, or {advice}")
    locations = _find_locations(name)
    other = next((path for path in locations if not any(is_below(path, folder) for folder in site_folders)), None)
    if other is not None or not locations:
        reason = f"{other or 'the module'} is not in site-packages"
        raise UsageError(f"{refusal} {reason}; install the package as a wheel, or {advice}")


def _list_site_folders() -> list[str]:
    """Return the folders into which pip installs packages for this Python, and for this user."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(map(os.path.realpath, folders)))


def _is_declared(name: str, site_folders: list[str]) -> bool:
    return any(
        entry.group == ENTRY_POINT_GROUP and entry.value.partition(":")[0].strip() == name
        for distribution in metadata.distributions(path=site_folders)
        for entry in distribution.entry_points
    )


def _find_locations(name: str) -> list[str]:
    """Return the files and folders from which Python would import the module's top package. Import nothing."""
    spec = None
    with search_path.use_installed_only(), suppress(ValueError):  # an imported module such as __main__ may lack a spec
        spec = importlib.util.find_spec(name.partition(".")[0])
    paths = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return [os.path.realpath(path) for path in paths if path is not None]
