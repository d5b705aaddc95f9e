"""Build the files of a release, install them in every way that users do, and run the smoke script each time.

    make release-check          all cells; the table is written into docs/reference/platforms.md
    make release-check CELL=uv  only the cells whose name contains `uv`; nothing is written

A cell is one way to install, in its own environment below build/release. Cells whose interpreter this machine lacks are
reported as not run. Exits with 1 if a build, a check of the metadata or a cell fails.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "release"
PAGE = ROOT / "docs" / "reference" / "platforms.md"
SMOKE = ROOT / "tools" / "smoke.py"
CONSTRAINTS = ROOT / "constraints.txt"
#: Python versions in the classifiers of pyproject.toml, oldest first.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Extras for users; `torch` and `remote` include `values` and the other extras.
EXTRAS = ("torch", "gguf", "remote", "gs", "hf", "fix", "tui", "dask", "mpi", "ray")
#: Tests that run from the source archive alone, in less than a minute.
SOURCE_TESTS = ("tests/test_package.py", "tests/test_samples.py", "tests/test_cli.py", "tests/lock")
SOURCE_TESTS_NAME = "tests of the source archive"
#: An installation without extras must not be larger: numpy would more than double it.
MAX_INSTALLED_MB = 60


class Failed(Exception):
    """A command failed; the text is the end of its output."""


@dataclasses.dataclass(frozen=True)
class Built:
    """The files of a release."""

    sdist: Path
    wheel: Path
    pure_wheel: Path


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to install statecli. `install` returns the command that runs the smoke script, without the script."""

    name: str
    install: Callable[[Built, Path], list[str]]
    python: str | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """Row of the table: `outcome` is `passed`, `failed` or why the cell was not run."""

    name: str
    outcome: str
    details: str = ""
    schemas: str = ""
    size_mb: float | None = None


def run(command: Sequence[str | Path], *, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command; return its output. Raises Failed with the end of the output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=cwd,
        env={**clean, **(env or {})},
    )
    if done.returncode:
        raise Failed(f"$ {' '.join(map(str, command))}\n{done.stdout[-3000:]}")
    return done.stdout


def module(name: str) -> list[str]:
    """Return the command that runs a tool of `.venv/release` as a module."""
    code = f"import sys, runpy; sys.path.insert(0, {str(ROOT / '.venv' / 'release')!r}); sys.argv[0] = {name!r}"
    return [sys.executable, "-c", f"{code}; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"]


def program(name: str) -> str:
    """Return the path of a program of `.venv/release` that is not written in Python."""
    return str(ROOT / ".venv" / "release" / ("Scripts" if os.name == "nt" else "bin") / name)


# --- build ------------------------------------------------------------------------------------------------------------


def build() -> Built:
    """Build the source archive, and both wheels from it, as a release does."""
    folder = WORK / "dist"
    tools = {"PYTHONPATH": str(ROOT / ".venv" / "release")}
    run([sys.executable, "-m", "build", "--sdist", "--outdir", folder], env=tools)
    (sdist,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        compare_with_repository(source)
        run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, source], env=tools)
        run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, source], env={**tools, "STATECLI_PURE": "1"})
    wheels = {path.name.endswith("-none-any.whl"): path for path in folder.glob("*.whl")}
    return Built(sdist, wheels[False], wheels[True])


def compare_with_repository(source: Path) -> None:
    """Raise Failed for a file of the repository that the source archive lacks."""
    if (ROOT / ".git").exists():
        tracked = run(["git", "ls-files"]).splitlines()
        missing = [name for name in tracked if not (source / name).exists()]
        if missing:
            raise Failed(f"the source archive lacks {len(missing)} files: {', '.join(missing[:5])}")


def check_metadata(built: Built) -> list[Result]:
    """Check the metadata and the contents of the files with the usual tools for packages on PyPI."""
    files = [built.sdist, built.wheel, built.pure_wheel]
    checks: dict[str, Callable[[], str]] = {
        "twine check --strict": lambda: run([*module("twine"), "check", "--strict", *files]),
        "validate-pyproject": lambda: run([*module("validate_pyproject"), ROOT / "pyproject.toml"]),
        "check-wheel-contents": lambda: run([*module("check_wheel_contents"), *files[1:]]),
        "pyroma, 10 of 10": lambda: run([*module("pyroma"), "--min", "10", built.sdist]),
        "zizmor: the release workflow": lambda: run(
            [program("zizmor"), "--offline", ROOT / ".github", ROOT / "action.yml"]
        ),
        "links of the documents": lambda: run(["make", "--no-print-directory", "site"]),
        "tags of the wheels": lambda: check_tags(built),
    }
    return [attempt(name, check) for name, check in checks.items()]


def check_tags(built: Built) -> str:
    """Raise Failed if the content of a wheel does not fit the tag in its name."""
    names = {path: set(zipfile.ZipFile(path).namelist()) for path in (built.wheel, built.pure_wheel)}
    has_kernel = {
        path: any("_native." in name and not name.endswith((".c", ".pyi")) for name in names[path]) for path in names
    }
    if has_kernel != {built.wheel: True, built.pure_wheel: False}:
        raise Failed(f"the kernel is in the wrong wheel: {has_kernel}")
    if sys.version_info >= (3, 11) and "-cp311-abi3-" not in built.wheel.name:
        raise Failed(f"{built.wheel.name}: expected the tag cp311-abi3")
    if "statecli/samples/net.py" not in names[built.pure_wheel]:
        raise Failed("the samples are not in the wheel")
    return built.wheel.name


def attempt(name: str, check: Callable[[], str]) -> Result:
    """Run a check; return its row."""
    try:
        check()
    except Failed as error:
        sys.stdout.write(f"FAILED  {name}\n{error}\n")
        return Result(name, "failed")
    sys.stdout.write(f"passed  {name}\n")
    return Result(name, "passed")


# --- cells ------------------------------------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of this version; None if this machine has none."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    candidates = [shutil.which(f"python{version}")]
    candidates += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in filter(None, candidates):
        done = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False)
        if done.returncode == 0:
            return path
    return None


def with_pip(
    what: Callable[[Built], Path],
    extra: str = "",
    python: str | None = None,
    env: dict[str, str] | None = None,
    constrained: bool = False,
) -> Callable[[Built, Path], list[str]]:
    """Install with pip into a new environment."""

    def install(built: Built, folder: Path) -> list[str]:
        interpreter = make_environment(folder, python)
        constraints = ["--constraint", CONSTRAINTS] if constrained else []
        run([interpreter, "-m", "pip", "install", "--quiet", *constraints, f"{what(built)}{extra}"], env=env)
        return [interpreter, "-P"] if run([interpreter, "-V"]) >= "Python 3.11" else [interpreter, "-I"]

    return install


def make_environment(folder: Path, python: str | None) -> str:
    """Make a virtual environment; return its interpreter."""
    run([python or sys.executable, "-m", "venv", folder])
    return str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")


def with_lowest(*extras: str) -> Callable[[Built, Path], list[str]]:
    """Install the lowest direct dependencies that pyproject.toml allows, with the oldest interpreter at hand."""

    def install(built: Built, folder: Path) -> list[str]:
        interpreter = make_environment(folder, next(filter(None, map(find_python, PYTHONS))))
        lowest = folder / "lowest.txt"
        options = ["--quiet", "--resolution", "lowest-direct", "--python", interpreter, "--output-file", lowest]
        chosen = [word for extra in extras for word in ("--extra", extra)]
        run([*module("uv"), "pip", "compile", *options, *chosen, ROOT / "pyproject.toml"])
        package = f"{built.pure_wheel}[{','.join(extras)}]"
        run([interpreter, "-m", "pip", "install", "--quiet", "--constraint", lowest, package])
        return [interpreter, "-I"]

    return install


def with_uv_tool(built: Built, folder: Path) -> list[str]:
    """Install as a tool of uv."""
    env = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    run(
        [
            *module("uv"),
            "tool",
            "install",
            "--python",
            sys.executable,
            f"torch-statecli[values] @ {built.wheel.as_uri()}",
        ],
        env=env,
    )
    return [sys.executable, str(SMOKE), str(folder / "bin" / "statecli")]


def with_pipx(built: Built, folder: Path) -> list[str]:
    """Install with pipx."""
    env = {"PIPX_HOME": str(folder / "home"), "PIPX_BIN_DIR": str(folder / "bin"), "PIPX_MAN_DIR": str(folder / "man")}
    run([*module("pipx"), "install", "--python", sys.executable, built.wheel], env=env)
    return [sys.executable, str(SMOKE), str(folder / "bin" / "statecli")]


def list_cells() -> list[Cell]:
    """Return the cells in the order of the table."""
    cells = [
        Cell("wheel, no extra", with_pip(get_wheel)),
        Cell("wheel, torch", with_pip(get_wheel, "[torch]", constrained=True)),
        Cell("wheel without compiled parts, values", with_pip(lambda built: built.pure_wheel, "[values]")),
        Cell("source, values", with_pip(get_sdist, "[values]")),
        Cell("source without a compiler, values", with_pip(get_sdist, "[values]", env={"CC": "false"})),
        Cell("uv tool install", with_uv_tool),
        Cell("pipx install", with_pipx),
        Cell("lowest releases, wheel, all extras", with_lowest(*EXTRAS)),
        Cell("lowest dependencies, wheel, values", with_lowest("values")),
    ]
    for version in PYTHONS:
        python = find_python(version)
        # The wheel with the stable ABI is for 3.11 and newer.
        is_source = version == "3.10" or sys.version_info < (3, 11)
        install = with_pip(get_sdist if is_source else get_wheel, "[values]", python=python)
        name = f"newest dependencies, Python {version}, {'source' if is_source else 'wheel'}, values"
        cells.append(Cell(name, install, python=python or ""))
    return cells


def get_sdist(built: Built) -> Path:
    """Return the source archive."""
    return built.sdist


def get_wheel(built: Built) -> Path:
    """Return the wheel with the kernel."""
    return built.wheel


def run_cell(cell: Cell, built: Built) -> Result:
    """Install a cell and run the smoke script in it."""
    if cell.python == "":
        return Result(cell.name, "not run: no such interpreter here")
    folder = WORK / re.sub(r"\W+", "-", cell.name)
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    try:
        command = cell.install(built, folder)
        size = measure_mb(folder, command[0]) if folder.exists() else None
        output = run(command if str(SMOKE) in command else [*command, str(SMOKE)], cwd=WORK)
        if cell.name == "wheel, no extra" and size is not None and size > MAX_INSTALLED_MB:
            raise Failed(f"{size:.0f} MB installed, more than {MAX_INSTALLED_MB}")
    except Failed as error:
        sys.stdout.write(f"FAILED  {cell.name}\n{error}\n")
        return Result(cell.name, "failed")
    kernel, python = (re.search(rf"^{name}\s+(.*)", output, re.MULTILINE)[1] for name in ("kernel", "python"))
    count = re.search(r"(\d+) commands", output)[1]
    sys.stdout.write(f"passed  {cell.name} ({time.monotonic() - started:.0f} s)\n")
    shutil.rmtree(folder, ignore_errors=True)
    schemas = re.search(r"^schemas\s+(.*)", output, re.MULTILINE)[1]
    return Result(cell.name, f"passed, {count} commands", f"{python}; kernel: {kernel}", schemas, size)


def run_source_tests(built: Built) -> Result:
    """Unpack the source archive, and run some of its tests there."""
    folder = WORK / "source-tests"
    with tarfile.open(built.sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    try:
        output = run([sys.executable, "-m", "pytest", *SOURCE_TESTS], cwd=source)
    except Failed as error:
        sys.stdout.write(f"FAILED  {SOURCE_TESTS_NAME}\n{error}\n")
        return Result(SOURCE_TESTS_NAME, "failed")
    sys.stdout.write(f"passed  {SOURCE_TESTS_NAME}\n")
    count = re.search(r"(\d+) passed", output)[1]
    return Result(SOURCE_TESTS_NAME, f"passed, {count} tests")


def measure_mb(folder: Path, interpreter: str) -> float | None:
    """Return the size of the installed packages in MB, without pip and bytecode; None for other environments."""
    if Path(interpreter).parent.parent != folder:
        return None
    packages = next(folder.glob("lib*/python*/site-packages"), folder / "Lib" / "site-packages")
    paths = (path for path in packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    kept = (path for path in paths if not path.relative_to(packages).parts[0].startswith(("pip", "setuptools")))
    return sum(path.stat().st_size for path in kept) / 1e6


# --- report -----------------------------------------------------------------------------------------------------------


def write_page(results: list[Result]) -> None:
    """Replace the table of the page."""
    lines = [
        f"Measured by `make release-check` on {datetime.date.today():%d %B %Y}, {describe_system()}:",
        "",
        "| cell | result | Python and kernel | installed |",
        "| --- | --- | --- | --- |",
    ]
    for result in results:
        size = f"{result.size_mb:.0f} MB" if result.size_mb is not None else ""
        lines.append(f"| {result.name} | {result.outcome} | {result.details} | {size} |")
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- release-check -->", "<!-- end of release-check -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    PAGE.write_text("\n".join([f"{head}{begin}", *lines, f"{end}{tail}"]), "utf-8")


def describe_system() -> str:
    """Return the system in words."""
    import platform

    name = platform.freedesktop_os_release().get("PRETTY_NAME", "") if sys.platform == "linux" else platform.platform()
    return f"{name} on {platform.machine()}"


def main() -> int:
    """Build, check and install; return the exit status."""
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        built = build()
    except Failed as error:
        sys.stdout.write(f"FAILED  build\n{error}\n")
        return 1
    results = check_metadata(built)
    checks = [functools.partial(run_cell, cell, built) for cell in list_cells() if only in cell.name]
    if only in SOURCE_TESTS_NAME:
        checks.insert(0, functools.partial(run_source_tests, built))
    # A check keeps one core busy.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results += pool.map(lambda check: check(), checks)
    digests = {result.schemas for result in results if result.schemas}
    if len(digests) > 1:
        results.append(Result(f"the same schemas in each cell: {', '.join(sorted(digests))}", "failed"))
    if not only:
        write_page(results)
    failed = [result.name for result in results if result.outcome == "failed"]
    sys.stdout.write(f"{len(results)} checks, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
