"""Decide which tool folders (such as .git) a walk skips: folders without a file that loaders select by name.

Loaders that choose a folder themselves (the newest step, the folder in a tracker file) also choose a hidden or tool
folder. They select files by name, so a tool folder with a file named like a checkpoint is walked.
"""

from __future__ import annotations

from collections.abc import Callable

from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import files

#: Maximum number of names that are searched in a folder and below it.
MAX_SEARCHED_NAMES = 100_000
#: Packages in a tool's virtual environment; their test data has names of checkpoints.
_PACKAGES = compile_on_use(
    r"(?P<environment>(?:.*/)?(?:\.venv|\.(?:tox|nox)/[^/]+))/(?:lib(?:64)?/python[^/]+|Lib)/site-packages"
)
#: File that Python writes into a virtual environment.
_ENVIRONMENT_FILE = "pyvenv.cfg"


def are_installed_packages(root: str, path: str) -> bool:
    """Return whether `path` is the folder of packages in a virtual environment (.venv, tox) below `root`.

    Both paths are resolved.
    """
    match = None if files.is_remote(path) else _PACKAGES.fullmatch(path[len(root) :].lstrip("/"))
    return match is not None and files.is_file(files.join(root, match["environment"], _ENVIRONMENT_FILE))


def holds_checkpoint_name(
    path: str, root: str, *, is_named: Callable[[str], bool], list_names: Callable[[str], list[str]]
) -> bool:
    """Return whether a file below the folder `path` has, or may have, a name that loaders select.

    Also returns True for too many names, and for a link that leads out of the walk's folder `root`. All other links
    lead to folders that are walked anyway. `list_names` may raise UnreadableError or OSError.
    """
    pending, count = [(files.resolve_links(path), 0)], 0
    while pending:
        folder, depth = pending.pop()
        names = list_names(folder)
        count += len(names)
        if count > MAX_SEARCHED_NAMES or depth > files.MAX_FOLDER_DEPTH:
            return True
        for name in names:
            inner = files.join(folder, name)
            if files.is_link(inner) and files.is_folder(inner):
                if not files.resolve_links(inner).startswith(f"{root}/"):
                    return True
            elif not files.is_folder(inner):
                if is_named(inner):
                    return True
            elif not are_installed_packages(root, inner):
                pending.append((inner, depth + 1))
    return False
