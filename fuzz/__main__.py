"""Run one target: `python -m fuzz TARGET --seconds 60` with atheris, `--cases 3000 --seed 1` without.

It runs in a temporary folder, with limited memory. At the first failure it prints the error and exits with a status
that is not 0; atheris keeps the input in `fuzz/found/`, and `--input FILE` checks it again.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import resource
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = ("unpicklers", "scan", "readers", "archives", "script_code")
#: The address space of a run: a memo index of four bytes may ask for 64 GiB.
MAX_MEMORY = 4 * 2**30
#: Seconds for one input.
TIMEOUT_S = 20
FOUND = Path(__file__).resolve().parent / "found"


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="Time for atheris.")
    parser.add_argument("--cases", type=int, help="Check this many random cases instead, without atheris.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the random cases.")
    parser.add_argument("--input", type=Path, help="Check this one input instead.")
    options = parser.parse_args()
    data = options.input.read_bytes() if options.input else None
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if options.cases is None and data is None:
            guide(options.target, options.seconds)
            return
        target = importlib.import_module(f"fuzz.{options.target}")
        if data is not None:
            target.check(data)
        else:
            check_cases(target, options.cases, random.Random(options.seed))  # noqa: S311 - the same cases in every run


def check_cases(target: ModuleType, cases: int, dice: random.Random) -> None:
    """Check the seeds and then that many mutants of them."""
    seeds = list(target.seeds())
    for data in seeds:
        target.check(data)
    for _ in range(cases):
        target.check(target.mutate(dice.choice(seeds), dice, seeds))
    print(f"{cases} cases of {target.__name__}")


def guide(name: str, seconds: int) -> None:
    """Let atheris search from the seeds, guided by the coverage of statecli."""
    import atheris

    with atheris.instrument_imports(include=["statecli"], enable_loader_override=False):
        target = importlib.import_module(f"fuzz.{name}")
        importlib.import_module("statecli.file_scan.scan")
    corpus = Path("corpus")
    corpus.mkdir()
    seeds = list(target.seeds())
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)  # noqa: S311 - libFuzzer gives the seed
        return (target.mutate(data, dice, seeds) if dice.randrange(2) else atheris.Mutate(data, max_size))[:max_size]

    FOUND.mkdir(exist_ok=True)
    longest = max(map(len, seeds)) * 2
    arguments = [f"-max_total_time={seconds}", f"-max_len={longest}", f"-artifact_prefix={FOUND}/{name}-"]
    limits = [f"-timeout={TIMEOUT_S}", "-rss_limit_mb=0", "-print_final_stats=1"]
    own: dict[str, Any] = {"custom_mutator": mutate} if hasattr(target, "mutate") else {}
    atheris.Setup([sys.argv[0], str(corpus), *arguments, *limits], target.check, **own)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
