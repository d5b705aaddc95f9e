"""Build what pyproject.toml cannot declare: the kernel, the manual pages, the samples and the description."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
from site_pages import build_description  # noqa: E402

#: One wheel for Python 3.11 and newer: the limited API has buffers since 3.11, and is not there without the GIL.
IS_LIMITED = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
#: Set to build the wheel without compiled parts, for systems that no other wheel is built for.
IS_PURE = bool(os.environ.get("STATECLI_PURE"))


class BuildPackage(build_py):
    """Put the sample models into the package, from which `statecli samples` copies them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "statecli", "samples")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(ROOT / "sample_models", folder, ignore=shutil.ignore_patterns("__pycache__"))


class BuildWheel(bdist_wheel):
    """Call a wheel without the kernel, because there was no compiler, one for every system."""

    def run(self) -> None:
        self.run_command("build")
        kernels = [Path(path) for path in self.get_finalized_command("build_ext").get_outputs()]
        if not any(path.exists() for path in kernels):
            self.root_is_pure = True
            self.py_limited_api = False
            # The files lie where compiled ones would.
            self.get_finalized_command("install").install_lib = None
        super().run()


class InstallManPages(Command):
    """Write the manual pages, from the table of options, where data files of the wheel are installed."""

    description = "write the manual pages"
    user_options = [("install-dir=", "d", "folder above share/man")]  # noqa: RUF012 - as setuptools declares it

    def initialize_options(self) -> None:
        self.install_dir = None
        self.paths: list[str] = []

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_data", "install_dir"))

    def run(self) -> None:
        from statecli.cli.man_page import write_man_pages

        self.paths = write_man_pages(os.path.join(self.install_dir, "share", "man", "man1"))

    def get_inputs(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return self.paths


KERNEL = Extension(
    "statecli.values._native",
    ["statecli/values/_native.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if IS_LIMITED else [],
    py_limited_api=IS_LIMITED,
    # Products fused with sums, as some compilers do by themselves, would make the last digit depend on them.
    extra_compile_args=[]
    if sys.platform == "win32"
    else ["-O3", "-g0", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"],
    # Without a compiler numpy does the same work in more passes.
    optional=True,
)
RECORDS = Extension(
    "statecli.pickles._native",
    ["statecli/pickles/_native.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if IS_LIMITED else [],
    py_limited_api=IS_LIMITED,
    extra_compile_args=[] if sys.platform == "win32" else ["-O2", "-g0"],
    # Without a compiler the machine reads these opcodes too.
    optional=True,
)

setup(
    # The links of README.md are those of the repository; on the page of a package index they would be dead.
    long_description=build_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel, "install_data": InstallManPages},
    # Empty, so that setuptools runs install_data.
    data_files=[("share/man/man1", [])],
    ext_modules=[] if IS_PURE else [KERNEL, RECORDS],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_LIMITED and not IS_PURE else {},
)
