"""`statecli --version -v`: the facts about an installation for a bug report."""

from __future__ import annotations

import platform
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata

from statecli.core.installed_package import DISTRIBUTION
from statecli.core.version import __version__
from statecli.values.compiled_kernel import native

#: Packages whose versions change the results or the speed of statecli.
PACKAGES = (
    *("torch", "numpy", "safetensors", "msgspec", "blake3", "rich", "jinja2", "transformers"),
    # Packages of the extras.
    *("gguf", "fsspec", "urllib3", "s3fs", "gcsfs", "huggingface_hub", "libcst", "textual", "distributed", "mpi4py"),
    "ray",
)
#: Width of the lines in columns, because people paste the lines into reports.
LINE_COLUMNS = 80


def describe_installation() -> Iterator[str]:
    """Yield lines about the installation: the version, the compute kernel, Python, the system, and the packages."""
    yield f"statecli {__version__}"
    yield f"package   {DISTRIBUTION} {_find_version(DISTRIBUTION) or '(not installed: runs from its source)'}"
    yield f"kernel    {_describe_kernel()}"
    system = f"{sys.platform} {platform.machine()}".rstrip()
    yield f"python    {platform.python_implementation()} {platform.python_version()} on {system}"
    versions = ((name, _find_version(name)) for name in PACKAGES)
    packages = ", ".join(f"{name} {version}" for name, version in versions if version)
    yield from textwrap.wrap(packages, LINE_COLUMNS, initial_indent="packages  ", subsequent_indent=" " * 10)


def _describe_kernel() -> str:
    if native is not None:
        return f"compiled, {native.instruction_set()}"
    return "numpy: the compiled kernel is missing" if _find_version("numpy") else "none: numpy is not installed"


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
