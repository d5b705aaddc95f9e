"""A copy of a model's project, made of symbolic links, in which edited files have their new contents.

Edits are verified there, so the user's files keep their bytes until the end. Only the folders down to a changed file
are real; everything else is a link. Modules of the copy are dropped from sys.modules, because the next copy has others.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType

from statecli.live.import_model import find_import_folder
from statecli.live.spec import ModelSpec


@dataclass(frozen=True)
class Project:
    """The folder to copy, and the model's spec relative to the working folder.

    Attributes:
        root: The copied folder, with all packages of the named file.
        file: Absolute path of the named file.
        start: Working folder of the command, if inside `root`; None: the working folder is not changed.
        text: Spec of the model; relative to `start`, or with the absolute path of the file.
        module: The part of `text` with the file or module.
    """

    root: str
    file: str
    start: str | None
    text: str
    module: str

    def contains(self, path: str) -> bool:
        """Return True if the file is in the copied folder."""
        return path.startswith(self.root.rstrip(os.sep) + os.sep)

    def format_path(self, path: str) -> str:
        """Return a path for output: as the user typed it, or relative to the working folder."""
        if self.start is None and path == self.file:
            return self.module
        relative = os.path.relpath(path)
        return path if relative.startswith(os.pardir) else relative


def find_project(spec: ModelSpec, path: str) -> Project:
    """Return the project around the class of `spec`. `path` is the file that defines the class."""
    working_folder = os.path.abspath(os.getcwd())
    folder = os.path.dirname(path)
    package = find_import_folder(path) or folder
    is_below = os.path.commonpath([working_folder, folder]) == working_folder
    object_text = spec.text.lstrip()[len(spec.module) :]
    if not is_below and spec.is_file:
        return Project(package, path, None, path + object_text, spec.module)
    root = working_folder if os.path.commonpath([working_folder, package]) == working_folder else package
    module = os.path.relpath(path, working_folder) if spec.is_file else spec.module
    return Project(root, path, working_folder, module + object_text, spec.module)


@dataclass(frozen=True)
class ProjectCopy:
    """A copy of a project: its folder, and the spec of the model in the copy."""

    project: Project
    root: str
    text: str

    def locate(self, file: str) -> str:
        """Convert a file name in results about the copy to the absolute path of the original file."""
        if file.startswith(self.root + os.sep):
            return os.path.join(self.project.root, file[len(self.root) + 1 :])
        return os.path.normpath(os.path.join(self.project.start or os.path.dirname(self.project.file), file))

    def hide(self, text: str) -> str:
        """Replace each path of the copy in a message by the original path."""
        return text.replace(self.root, self.project.root)


@contextmanager
def copy_project(project: Project, contents: Mapping[str, bytes]) -> Iterator[ProjectCopy]:
    """Yield a copy of the project, where the files of `contents` have the given bytes.

    The block runs in the copy of the working folder.
    """
    working_folder, writes_bytecode, modules = os.getcwd(), sys.dont_write_bytecode, dict(sys.modules)
    with tempfile.TemporaryDirectory(prefix="statecli-fix-") as temporary:
        copy = os.path.join(os.path.realpath(temporary), "project")
        _link_folder(project.root, copy, {project.file: None, **contents})
        sys.dont_write_bytecode = True  # links in the copy lead to the user's folders
        try:
            if project.start is None:
                yield ProjectCopy(project, copy, project.text.replace(project.root, copy, 1))
            else:
                os.chdir(os.path.join(copy, os.path.relpath(project.start, project.root)))
                yield ProjectCopy(project, copy, project.text)
        finally:
            sys.dont_write_bytecode = writes_bytecode
            os.chdir(working_folder)
            _forget_modules(copy, modules)


def _link_folder(folder: str, copy: str, contents: Mapping[str, bytes | None]) -> None:
    """Fill `copy` with links to the files of `folder`. Copy the files in `contents`, with the new bytes unless None."""
    os.mkdir(copy)
    for name in os.listdir(folder):
        source, target = os.path.join(folder, name), os.path.join(copy, name)
        inside = {path: data for path, data in contents.items() if path.startswith(source + os.sep)}
        if inside:
            _link_folder(source, target, inside)
        elif source in contents:
            data = contents[source]
            shutil.copyfile(source, target)
            if data is not None:
                with open(target, "wb") as file:
                    file.write(data)
        elif name != "__pycache__":
            _link(source, target)


def _link(source: str, target: str) -> None:
    try:
        os.symlink(source, target)
    except (OSError, NotImplementedError):  # Windows requires a privilege
        copy = shutil.copytree if os.path.isdir(source) else shutil.copyfile
        with suppress(OSError):
            copy(source, target)


def _forget_modules(folder: str, before: Mapping[str, ModuleType]) -> None:
    """Drop the modules imported from the copy, because a later import would return them instead of edited modules."""
    for name, module in list(sys.modules.items()):
        if module is before.get(name):  # looking at the files of thousands of modules takes 10 ms
            continue
        path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", None) or ()), None)
        if isinstance(path, str) and path.startswith(folder + os.sep):
            del sys.modules[name]
    importlib.invalidate_caches()
