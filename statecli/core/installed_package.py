"""The installed package: its name on the package index, and how to install its extras."""

from __future__ import annotations

import os
import sys

from statecli.core.lazy_pattern import compile_on_use

#: Name on the package index. The command and the import package are called `statecli`, but on the index the name
#: `statecli` belongs to another project.
DISTRIBUTION = "torch-statecli"


#: Packages whose models are named by a module; each has the same name on the index.
MODEL_LIBRARIES = (
    *("timm", "torchvision", "transformers", "diffusers", "kornia", "monai", "torch_geometric", "torchmetrics", "peft"),
    *("sentence_transformers", "open_clip_torch", "torchaudio"),
)
#: Pattern of a command in a text that installs packages.
INSTALL_COMMAND = compile_on_use(r"\bpip install (?:-U )?[\w.-]+(?:\[[\w,-]+\])?(?<![.])")
#: Names of packages that differ from the name of their module.
_PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "open_clip": "open_clip_torch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def install_module(module: str) -> str:
    """Return the command to install the package of a module, such as `PIL` or `timm.models`."""
    top = module.partition(".")[0]
    return install_packages(_PACKAGES.get(top, top.replace("_", "-")))


def install_extra(extra: str) -> str:
    """Return the command that installs an extra. In a pre-commit hook, return the key to add to its configuration."""
    if os.environ.get("PRE_COMMIT"):
        return f"add to the hook: additional_dependencies: ['.[{extra}]']"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def install_packages(*names: str, upgrade: bool = False) -> str:
    """Return the command to install packages that no extra of statecli installs."""
    return " ".join(["pip install", *(["-U"] if upgrade else []), *names])


#: Module that only the package `statecli` of the other project has (seen in its release 0.5.0).
_FOREIGN_MODULE = "langchain_tools.py"


def describe_mixed_packages() -> str | None:
    """Return an error if another project's package `statecli` is installed too. Both overwrite each other's files."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(folder, _FOREIGN_MODULE)):
        return None
    return (
        f"{folder}: the package statecli of another project is also installed, and has overwritten files; run: "
        f"pip uninstall statecli {DISTRIBUTION}, then: {install_packages(DISTRIBUTION)}"
    )


def describe_missing_gil() -> str | None:
    """Return an error if Python runs without the global interpreter lock, because no test has run without it."""
    # Before 3.13, every Python has the lock and lacks the function.
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    if is_enabled is None or is_enabled():
        return None
    return (
        "this free-threaded Python runs without the global interpreter lock, and statecli was not tested without this "
        "lock; set PYTHON_GIL=1, or install statecli for another Python"
    )


def describe_unusable_installation() -> str | None:
    """Return why no command can run in this installation, or None if commands can run."""
    return describe_missing_gil() or describe_mixed_packages()


def check_import() -> None:
    """Raise ImportError if the package cannot be used. The command `statecli` prints the same text as an error."""
    program = os.path.basename(sys.argv[0]).partition(".")[0] if sys.argv else ""
    # `-m`: Python has not found the module to run yet.
    problem = None if program in ("statecli", "-m") else describe_unusable_installation()
    if problem is not None:
        raise ImportError(problem)
