"""A user's code may do harm while statecli imports, builds and reads a model; the caller must not notice the harm."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import pytest

from statecli.core.errors import ModelError
from statecli.live.build import build
from statecli.live.library_output import hide_library_lines
from statecli.live.spec import parse_spec

from ..forked_python import run_python

RAISING = """
class Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("asked")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        tensors = [torch.ones(n).as_subclass(Raising) for n in (1, 2, 3)]
        self.t, self.l, self.s = tensors[0], [tensors[1]], {tensors[2]}
"""


@pytest.mark.parametrize("to", [None, "meta"])
def test_listing_does_not_call_torch_function_of_a_subclass(inspect, to):
    """Tensors of a class whose __torch_function__ raises are listed, in any container."""
    state = inspect(RAISING, to=to)
    assert [(t.fqn, t.shape, t.moves) for t in state.tensors] == [
        ("t", (1,), False),
        ("l[0]", (2,), False),
        ("s[#0]", (3,), False),
    ]


def test_statistics_do_not_call_torch_function(write):
    """The statistics are computed from the stored values of the tensor."""
    from statecli.live.model_reader import read
    from statecli.values.live_tensor import build_view, get_stored_values

    target = write(RAISING)
    sums = []
    read(
        build(parse_spec(target)), target, stats_of=lambda t: sums.append(build_view(get_stored_values(t)).memory.size)
    )
    assert sums == [4, 8, 12]


def test_own_move_runs_with_its_torch_function_active(inspect):
    """A class whose move uses its own __torch_function__ is measured with the function active."""
    source = """
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})
    calls = []
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(2))
            self.t = torch.ones(1).as_subclass(Seen)
        def _apply(self, fn, recurse=True):
            calls.clear()
            self.t.neg()
            if calls:
                self.t = fn(self.t)
            return super()._apply(fn)
    """
    assert [t.moves for t in inspect(source).tensors] == [True, True]


@pytest.mark.parametrize("raised", ["SystemExit(0)", "GeneratorExit", "RuntimeError"])
def test_exception_whose_str_raises_is_a_model_error(write, raised):
    """An exception whose __str__ raises anything at all cannot turn a failure into a success."""
    source = f"""
    class Odd(Exception):
        def __str__(self): raise {raised}
    def f(): raise Odd
    """
    with pytest.raises(ModelError, match=r"Odd: \(its message cannot be shown\)"):
        build(parse_spec(write(source, "f")))


def test_os_exit_in_a_factory_is_a_model_error(write):
    """os._exit(0) would be a silent success; after the build it works again, and in a forked child it always works."""
    before = os._exit
    with pytest.raises(ModelError, match=r"building the model raised SystemExit: 0 \(net0\.py:4\)"):
        build(parse_spec(write("import os\ndef f(): os._exit(0)", "f")))
    assert os._exit is before
    forks = """
    import os
    def f():
        child = os.fork()
        if not child: os._exit(3)
        return nn.Linear(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 1)
    """
    assert build(parse_spec(write(forks, "f"))).module.in_features == 3


@pytest.mark.parametrize(
    ("end", "status"), [("raise SystemExit(3)", 3), ("sys.exit()", 0), ("1 / 0", 1), ("return nn.Linear(1, 1)", 0)]
)
def test_a_forked_child_ends_with_the_code_of_the_model(write, end, status):
    """Otherwise the child would run the proofs too, and fork again in each instance that the proofs build."""
    source = f"""
    import os, sys
    def f():
        child = os.fork()
        if not child: {end}
        return nn.Linear(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 1, 1)
    """
    ours = os.getpid()
    try:
        module = build(parse_spec(write(source, "f"))).module
    finally:
        os.getpid() == ours or os._exit(99)
    assert module.in_features == status + 1


@pytest.mark.parametrize("statement", ["os.chdir('/')", "sys.argv[:] = []", "sys.stdout = sys.stderr = None"])
def test_build_restores_folder_arguments_and_streams(write, statement):
    """After building, the current directory, sys.argv and the standard streams are restored."""
    before = os.getcwd(), list(sys.argv), sys.stdout, sys.stderr
    build(parse_spec(write(f"import os, sys\ndef f():\n    {statement}\n    return nn.Linear(1, 1)", "f")))
    assert (os.getcwd(), list(sys.argv), sys.stdout, sys.stderr) == before


def test_folder_that_a_move_changed_is_restored(inspect):
    """Code that runs during a tried move cannot change the folder of the output."""
    before = Path.cwd()
    source = """
    import os
    class Net(nn.Linear):
        def __init__(self): super().__init__(1, 1)
        def _apply(self, fn, recurse=True):
            os.chdir("/")
            return super()._apply(fn)
    """
    assert inspect(source).tensors
    assert Path.cwd() == before != Path("/")


@pytest.mark.filterwarnings("error")
def test_async_factory_is_an_error_without_a_warning(write):
    """A coroutine is not a model, and the coroutine of the call is closed."""
    with pytest.raises(ModelError, match="f is async"):
        build(parse_spec(write("async def f():\n    return nn.Linear(1, 1)", "f")))


def _run(*args):
    return run_python(["-m", "statecli", *args])


LOUD = """
import atexit, os, threading, time
atexit.register(lambda: print("BYE"))
def chatter():
    for _ in range(3000):
        os.write(1, b"TICK"); print("TOCK"); time.sleep(0.0003)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1)
        threading.Thread(target=chatter, daemon=True).start()
    def __del__(self): print("DEL")
"""


def test_only_the_result_is_on_stdout_until_the_process_ends(write):
    """The output of a model's thread, finalizer and exit handler goes to stderr, and stdout is one JSON document."""
    run = _run("inspect", write(LOUD), "-f", "json")
    assert [t["fqn"] for t in json.loads(run.stdout)["tensors"]] == ["fc.weight", "fc.bias"]
    assert all(word in run.stderr for word in ("BYE", "DEL", "TICK", "TOCK"))
    assert run.returncode == 0


def test_the_stream_that_a_thread_of_the_model_prints_to_is_kept():
    """Python may use a freed stream if another thread replaces it during `print`, which crashes the process."""
    streams = []
    for _ in range(2):
        with hide_library_lines():
            streams.append(weakref.ref(sys.stderr))
            with hide_library_lines():
                assert sys.stderr is streams[-1]()
        gc.collect()
    assert streams[0]() is streams[1]() is not None


def test_chdir_in_a_constructor_does_not_move_the_output_file(write):
    """A constructor that changes the directory does not move the file of -o."""
    run = _run(
        "inspect", write("import os\ndef f():\n    os.chdir('/')\n    return nn.Linear(1, 1)", "f"), "-o", "r.txt"
    )
    assert (run.returncode, run.stdout) == (0, "")
    assert "weight" in Path("r.txt").read_text("utf-8")


def test_closed_pipe_exits_with_141_without_a_message(write):
    """With a separate standard output, a closed pipe still gives exit status 141 without a message."""
    target = write("def f():\n    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(3000)))", "f")
    read_end, write_end = os.pipe()
    os.close(read_end)
    run = run_python(["-m", "statecli", "inspect", target, "-f", "json"], stdout=write_end)
    os.close(write_end)
    assert (run.returncode, run.stderr) == (141, "")


def test_endless_recursion_error_names_the_line_that_recurses(write):
    """The line is not the line at which the stack was full: every level runs this constructor and its base's."""
    source = """
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
    class Net(Base):
        def __init__(self):
            super().__init__()
            Net()
    """
    with pytest.raises(ModelError, match=r"RecursionError: .*\(net0\.py:11\)"):
        build(parse_spec(write(source)))
