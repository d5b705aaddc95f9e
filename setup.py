"""The one part that is compiled; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "statecli.values._native",
            ["statecli/values/_native.c"],
            # Products fused with sums, as some compilers do by themselves, would make the last digit depend on them.
            extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-trapping-math"],
            # Without a compiler numpy does the same work in more passes.
            optional=True,
        )
    ]
)
