"""The parts that are built: the compiled kernel and the manual pages. Everything else is in pyproject.toml."""

import os
import sys

from setuptools import Command, Extension, setup

ROOT = os.path.dirname(os.path.abspath(__file__))


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
        sys.path.insert(0, ROOT)
        from statecli.cli.man_page import write_man_pages

        self.paths = write_man_pages(os.path.join(self.install_dir, "share", "man", "man1"))

    def get_inputs(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return self.paths


setup(
    cmdclass={"install_data": InstallManPages},
    # Empty, so that setuptools runs install_data.
    data_files=[("share/man/man1", [])],
    ext_modules=[
        Extension(
            "statecli.values._native",
            ["statecli/values/_native.c"],
            # Products fused with sums, as some compilers do by themselves, would make the last digit depend on them.
            extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"],
            # Without a compiler numpy does the same work in more passes.
            optional=True,
        )
    ],
)
