"""Mutation tests: `python mutation/run.py [MODULE ...]`. mutmut mutates a module, the module's own tests must fail.

`modules.toml` lists the modules with their tests. SAMPLE mutants of a module are tried, the same ones in each run:
those whose text has the smallest hashes. Left out are mutants that only change prose (a string literal with a space)
or the `strict=True` of a zip, which is an assertion.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".venv" / "mutants"
MUTMUT = ROOT / ".venv" / "mutmut" / "bin" / "mutmut"
#: Share of the tried mutants that the tests must kill.
WANTED = 0.9
KILLED = {"killed", "timeout", "segfault"}


@dataclass(frozen=True)
class Mutant:
    """One change of one function: the lines it replaces, and by what."""

    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.function}\n    - {self.before}\n    + {self.after}"

    @property
    def order(self) -> str:
        """Key of the sample: a change elsewhere in the module does not move it."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def main(chosen: list[str]) -> int:
    """Try the mutants of the chosen modules, all by default. Return 1 if too few are killed, 2 if it went wrong."""
    table = tomllib.loads((ROOT / "mutation" / "modules.toml").read_text("utf-8"))
    if unknown := set(chosen) - set(table["modules"]):
        print(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(table['modules'])}", file=sys.stderr)
        return 2
    if unknown := set(table["equivalent"]) - set(table["modules"]):
        names = ", ".join(sorted(unknown))
        print(f"modules.toml has equivalent mutants of modules that it does not list: {names}", file=sys.stderr)
        return 2
    sample = int(os.environ.get("SAMPLE", "150"))
    codes = [
        try_module(
            module,
            tests,
            {Mutant(one["function"], one["before"], one["after"]) for one in table["equivalent"].get(module, [])},
            sample,
        )
        for module, tests in table["modules"].items()
        if not chosen or module in chosen
    ]
    return max(codes)


def try_module(module: str, tests: list[str], equivalent: set[Mutant], sample: int) -> int:
    """Print how many mutants of a module its tests kill, and each survivor."""
    source = f"statecli/{module}.py"
    work = prepare(module, source, tests)
    mutants = mutants_of(source)
    if stale := equivalent - set(mutants.values()):
        print(
            f"{module}: modules.toml lists equivalent mutants that mutmut does not make:",
            *stale,
            sep="\n",
            file=sys.stderr,
        )
        return 2
    names = sorted(mutants, key=lambda name: mutants[name].order)[:sample]
    names = [name for name in names if mutants[name] not in equivalent]
    print(f"{module}: trying {len(names)} of {len(mutants)} mutants", file=sys.stderr, flush=True)
    exit_codes = run(work, source, names)
    if exit_codes is None:
        print(f"{module}: mutmut failed, see {work / 'mutmut.log'}", file=sys.stderr)
        return 2
    statuses = {name: status_by_exit_code[exit_codes[name]] for name in names}
    survivors = [name for name in names if statuses[name] not in KILLED]
    for name in survivors:
        print(f"{statuses[name]}: {mutants[name]}")
    share = 1 - len(survivors) / len(names)
    late = sum(status == "timeout" for status in statuses.values())
    print(
        f"{module}: {len(names) - len(survivors)} of {len(names)} mutants killed ({share:.0%}), "
        f"{late} of them because the tests did not end",
        flush=True,
    )
    return 0 if share >= WANTED else 1


def prepare(module: str, source: str, tests: list[str]) -> Path:
    """Go to a new folder with links to what mutmut copies, and mutmut's configuration for the module."""
    work = WORK / module.replace("/", "-")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    linked = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "build"))]
    for folder in linked:
        (work / folder.name).symlink_to(folder)
    settings = {
        "source_paths": ["statecli"],
        "only_mutate": [source],
        "also_copy": [folder.name for folder in linked],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"],
        "pytest_add_cli_args_test_selection": tests,
        # torch has threads, and threads do not live through a fork.
        "process_isolation": "forkserver",
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (work / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]), "utf-8")
    os.chdir(work)
    return work


def mutants_of(source: str) -> dict[str, Mutant]:
    """Return the mutants of a file by mutmut's name."""
    mutated = mutate_file_contents(source, Path(source).read_text("utf-8"))
    functions = {node.name: node for node in ast.walk(ast.parse(mutated.code)) if isinstance(node, ast.FunctionDef)}
    texts = mutated.code.splitlines()
    package = source.removesuffix(".py").replace("/", ".")
    mutants = {}
    for name in mutated.mutant_names:
        function = name.rpartition("__mutmut_")[0]
        original, mutant = functions[f"{function}__mutmut_orig"], functions[name]
        if essence_of(original) != essence_of(mutant):
            shown = function.removeprefix("xǁ").replace("ǁ", ".") if "ǁ" in function else function.removeprefix("x_")
            before, after = (lines_of(node, texts) for node in (original, mutant))
            mutants[f"{package}.{name}"] = Mutant(shown, *changed(before, after))
    return mutants


def essence_of(function: ast.FunctionDef) -> str:
    """Return what counts of a function as text: all strings that have a space in them are alike."""
    body = ast.Module(function.body, [])
    defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
    parts = []
    for part in (body, *defaults):
        copy = ast.parse(ast.unparse(part))
        for node in ast.walk(copy):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                node.value = " "
            if isinstance(node, ast.Call):
                node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        parts.append(ast.dump(copy))
    return "\n".join(parts)


def lines_of(function: ast.FunctionDef, texts: list[str]) -> list[str]:
    text = "\n".join(texts[function.lineno - 1 : function.end_lineno])
    return textwrap.dedent(text.replace(function.name, "", 1)).splitlines()


def changed(before: list[str], after: list[str]) -> tuple[str, str]:
    """Return the lines that differ, each side in one line."""
    diff = list(difflib.ndiff(before, after))
    one, two = (" ".join(line[2:].strip() for line in diff if line.startswith(sign)) for sign in ("- ", "+ "))
    return one, two


def run(work: Path, source: str, names: list[str]) -> dict[str, int] | None:
    """Return the exit code of the tests for each mutant; None if mutmut failed."""
    with (work / "mutmut.log").open("w") as log:
        done = subprocess.run([sys.executable, MUTMUT, "run", *names], stdout=log, stderr=log)
    if done.returncode:
        return None
    codes = json.loads((work / "mutants" / f"{source}.meta").read_text("utf-8"))["exit_code_by_key"]
    return {name: codes[name] for name in names}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
