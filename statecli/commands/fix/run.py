"""Run `statecli fix`: verify, edit a copy, verify again, and keep the edits that pass.

verify ──▶ defects ──▶ edits on a copy ──▶ verify ──▶ kept: the next round starts from here
                                              └─────▶ refused: the reason
"""

from __future__ import annotations

import os

import msgspec

from statecli.commands import fix
from statecli.commands.fix.project_copy import find_project
from statecli.commands.fix.result import Fixes
from statecli.commands.verify import run as verify_run
from statecli.core.errors import MissingDependency, UsageError
from statecli.core.installed_package import install_extra
from statecli.core.progress import report_stage
from statecli.live.build import import_torch
from statecli.live.import_model import load_with_module
from statecli.live.installed_code import is_installed_file
from statecli.live.spec import ModelSpec
from statecli.targets import load

_NEEDS_LIBCST = f"statecli fix needs the package libcst: {install_extra('fix')}"


class Request(msgspec.Struct, frozen=True):
    """Request for `fix`: the checks to run, and whether the files are written."""

    verify: verify_run.Request
    write: bool = False


def check_libcst() -> None:
    """Raise MissingDependency if libcst is not installed."""
    try:
        import libcst  # noqa: F401 - only whether it can be imported
    except ImportError as error:
        raise MissingDependency(_NEEDS_LIBCST) from error


def run(request: Request) -> Fixes:
    """Propose edits for the model, and verify each edit in a copy. Raises StateError if the model cannot be built."""
    spec = load.find_class_spec(request.verify.target)
    if spec is None:
        raise verify_run.explain_wrong_target(request.verify.target)
    check_libcst()
    project = find_project(spec, find_editable_file(spec))
    import_torch()
    report_stage(f"verifying {spec.text}")
    return fix.session.repair(project, request.verify, write=request.write)


def find_editable_file(spec: ModelSpec) -> str:
    """Return the file that defines a class. Raises UsageError for a class that is not the user's own."""
    if spec.config is not None or spec.is_library:
        raise _refuse_installed(spec.text, "the model is built by an installed package")
    if spec.is_file:
        path = os.path.abspath(spec.module)
        if not os.path.isfile(path):
            load_with_module(spec)  # raises an error that suggests a similar name
    else:
        parts = os.path.join(*spec.module.split("."))
        candidates = [os.path.abspath(name) for name in (f"{parts}.py", os.path.join(parts, "__init__.py"))]
        file = next(filter(os.path.isfile, candidates), None)
        if file is None:
            raise _refuse_installed(spec.text, f"the current folder has no module {spec.module}")
        path = file
    if is_installed_file(path):
        raise _refuse_installed(spec.text, "the class is in an installed package")
    return path


def _refuse_installed(text: str, reason: str) -> UsageError:
    return UsageError(f"{text}: {reason}; statecli fix changes only your own files; name a class such as net.py:Net")
