"""statecli: see, prove and audit the state of PyTorch models and checkpoints.

    statecli.inspect("net.pt")                      # what is in it
    statecli.diff("before.pt", "after.pt")          # what differs
    statecli.verify(model, inputs="2x3")            # what becomes of each tensor

Each takes what the command of the same name takes and gives what that shows, as data. Whatever cannot be done raises
`StateError` or a child of it, with the one line that the command would print. Importing this imports no torch.
"""

import os
import sys

# `python -m statecli` puts the current folder first on the path, where a downloaded typing.py would be imported instead
# of Python's own. So nothing is imported before this, `__future__` included; os and sys are loaded when Python starts.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] in (["statecli"], ["-mstatecli"]):
    _home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        if sys.path[0] == os.getcwd() != _home:  # in its own folder are the packages that it needs
            del sys.path[0]
    except OSError:  # the current folder has been removed, and Python has not put it on the path
        pass

from typing import TYPE_CHECKING, Any

from statecli.core.errors import (
    MalformedError,
    MissingDependency,
    ModelError,
    NothingMatched,
    StateError,
    UnreadableError,
    UsageError,
)
from statecli.core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Executor

    import torch
    from torch import nn

    from statecli.commands.diff.result import Change, Diff, Field
    from statecli.commands.inspect.run import Inspection
    from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, Verification
    from statecli.core.finding import Finding, Severity
    from statecli.core.state import Kind, ModelState, Stats, TensorInfo
    from statecli.values.delta import Delta

#: Where the types of results are; each is imported when it is asked for.
_TYPES = {
    "statecli.commands.diff.result": ("Change", "Diff", "Field"),
    "statecli.core.finding": ("Finding", "Severity"),
    "statecli.commands.inspect.run": ("Inspection",),
    "statecli.commands.verify.result": ("Cell", "Check", "Column", "Name", "Verdict", "Verification"),
    "statecli.core.state": ("Kind", "ModelState", "Stats", "TensorInfo"),
    "statecli.values.delta": ("Delta",),
}

__all__ = [
    "Cell",
    "Change",
    "Check",
    "Column",
    "Delta",
    "Diff",
    "Field",
    "Finding",
    "Inspection",
    "Kind",
    "MalformedError",
    "MissingDependency",
    "ModelError",
    "ModelState",
    "Name",
    "NothingMatched",
    "Severity",
    "StateError",
    "Stats",
    "TensorInfo",
    "UnreadableError",
    "UsageError",
    "Verdict",
    "Verification",
    "__version__",
    "diff",
    "inspect",
    "merge",
    "verify",
]

__tracebackhide__ = True  # pytest shows the caller's line


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        import importlib

        home = next((module for module, names in _TYPES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'statecli' has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)


def inspect(
    target: "str | os.PathLike[str] | nn.Module",
    *,
    to: "str | torch.device | None" = None,
    model: str | None = None,
    stats: bool = False,
    inputs: Any = None,
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | str] | None" = (),
    dtype: "Iterable[str] | None" = (),
    shape: "Iterable[str] | None" = (),
    init_device: str = "cpu",
    ignore: "Iterable[str] | None" = (),
    executor: "str | Executor | None" = None,
) -> "Inspection":
    """Every tensor of a checkpoint, of a model class or of a live model, as `statecli inspect` lists it.

    `target`: a path, "train.ckpt#optimizer", "file.py:Class", "package.module:Class(hidden=32)" or an nn.Module. A live
    module is left as it was: its own tensors are listed, and copies without its values are moved and called. A module
    that cannot be copied is listed too, without what moves.

    `to`: a device ("meta", "cuda:0") to which everything is moved; `findings` then has the tensors that stayed.
    Without `to`, `findings` has the unregistered tensors of a class or module that may do harm. `ignore`: rules or rule
    groups that are not reported. `model`: a spec by whose registrations a checkpoint is grouped. `stats`: min, max,
    mean, std (n - 1), zeros, NaN and Inf of each tensor, in float64.
    `include`, `exclude`: globs on names (FQNs). `kind`: "parameter", "buffer", "unregistered",
    "optimizer", "other". `dtype`: globs such as "float8*"; `shape`: shapes such as "768x3072" or "*x768".
    `init_device`: where a class is built. `inputs`: what forward is called with, as in `verify`:
    what it adds, shapes and changes is listed too; None: it is not called. `executor`: who reads the values of a
    checkpoint for `stats`, as in `diff`.

    In the result `state.tensors` has a row a tensor: `shape` in elements, `nbytes` in bytes, `fqn` as Python reaches it
    ("blocks.0.weight", "cache['cos']").

    Raises StateError, with one line: UsageError (a contradiction, or NothingMatched: the filters left no tensor),
    UnreadableError (the file), ModelError (the class, its forward, or a live model that cannot be copied for `to` or
    `inputs`), MissingDependency.
    """
    arguments = dict(locals())
    del target, model
    from statecli.api import calls, errors

    return errors.call(calls.inspect, arguments)


def diff(
    before: "str | os.PathLike[str]",
    after: "str | os.PathLike[str]",
    *,
    map: "Iterable[str] | None" = (),
    ignore: "Iterable[Field | str] | None" = (),
    bitwise: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    metadata_only: bool = False,
    no_renames: bool = False,
    only: "Iterable[str] | None" = (),
    frozen: "Iterable[str] | None" = (),
    changed: "Iterable[str] | None" = (),
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | str] | None" = (),
    dtype: "Iterable[str] | None" = (),
    shape: "Iterable[str] | None" = (),
    device: str = "cpu",
    jobs: int = 0,
    executor: "str | Executor | None" = None,
    init_device: str = "cpu",
) -> "Diff":
    """Differences between two checkpoints, or a checkpoint and a model class, as `statecli diff` shows them.

    `before`, `after`: as the target of `inspect`, but no live model. `map`: "REGEX=REPLACEMENT" rewrites names of
    before first. `ignore`: "dtype", "shape", "kind", "requires_grad", "device", "tying", "values". Elements are equal
    exactly, to the bit (`bitwise`), or where |after - before| <= `atol` + `rtol` * |before|. `metadata_only` reads no
    values, `no_renames` looks for no tensor under another name. `only`, `frozen`, `changed`: globs of what alone may
    change, may not, and must; with one of them `findings` is what breaks them, else every difference. `include`,
    `exclude`, `kind`, `dtype`, `shape`, `init_device`: as in `inspect`. `device`: "cpu" or "cuda:0" computes.
    `jobs`: number of processes, 0 for one a core. `executor` compares values instead: "threads:2", "processes:4",
    "dask:tcp://HOST:PORT", "mpi", "ray", or an Executor of concurrent.futures, which stays open.

    In the result `changes` has each pair, `values.max_abs` and the like of Δ = after - before in float64, and `broken`
    the pairs that could not be compared.

    Raises StateError, with one line: UsageError (a contradiction, or NothingMatched), UnreadableError (a file),
    ModelError (a class), EngineError (`executor` does not answer).
    """
    arguments = dict(locals())
    del before, after
    from statecli.api import calls, errors

    return errors.call(calls.diff, arguments)


def merge(
    parts: "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]",
    *,
    code: "Iterable[str] | None" = (),
    url: "Iterable[str] | None" = (),
    copies: bool = False,
    jobs: int = 0,
    executor: "str | Executor | None" = None,
) -> "Inspection | Diff":
    """What `inspect` or `diff` gives, from the parts that `statecli … --shard 1/N` to `--shard N/N` wrote.

    `parts`: their files, or a glob; all of them, in any order, read in the folder where they were made. `code`: the
    classes that they name, whose code may run. `url`: URLs that they name, with what is secret in them. `copies`: each
    job had a copy of its own of the files, and they are the same by size and samples alone. `jobs`, `executor`: as in
    `diff`, for what only all parts together make known.

    Raises StateError, with one line: UnreadableError (a file that is not a part, a missing or duplicate part, a target
    that has changed), EngineError (parts of another version), UsageError (parts of an audit or a lock).
    """
    arguments = dict(locals())
    del parts, code, url
    from statecli.api import calls, errors

    return errors.call(calls.merge, arguments)


def verify(
    model: "str | nn.Module",
    *,
    checks: "Iterable[Name | str] | None" = (),
    device: "str | torch.device | None" = None,
    dtype: "str | torch.dtype | None" = None,
    optimizer: "str | type[torch.optim.Optimizer] | None" = None,
    inputs: Any = None,
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | str] | None" = (),
    ignore: "Iterable[str] | None" = (),
) -> "Verification":
    """Prove what becomes of each tensor when a model is moved, cast, saved, copied, trained and called.

    `model`: an nn.Module, or a spec such as "file.py:Class". A live module is left as it was (device, dtype, mode,
    gradients, values), and so are the random generators: all is done to copies. A move to "meta" copies no values.

    `checks`: some of "move", "cast", "save", "copy", "step", "forward"; () or None for all. `device`: where it is
    moved: "fake-cuda" (no GPU is needed; the default without a GPU), "meta", "cpu", "cuda:0". `dtype`: to which
    it is cast. `optimizer`: that of the step: "sgd" (None), "adamw", or a class such as torch.optim.Adam. These three
    are refused where `checks` leaves their proofs out. `include`, `exclude`: globs on names; `kind`: as in `inspect`.

    `inputs`: what forward is called with: a tensor; a tuple or list (positional), a dict (by keyword) or
    (args, kwargs); a function that gives one of these; or texts alone: "2x3", ("2x3", "ids=int64:2x16<30522"),
    {"x": "2x3"} (DTYPE:SHAPE<BOUND, the shape in elements). None: what the model carries (`dummy_inputs`,
    `example_input_array`); where there is nothing, step and forward are skipped.

    `ignore`: rules or rule groups that are not reported.

    In the result each of `checks` has a verdict (passed, failed, skipped or inconclusive), its reason and a cell for
    each tensor; `findings` has all that was proved false, each with its severity. A forward that raises makes its
    proofs inconclusive.

    Raises StateError, with one line: UsageError (an option, an input's text, or NothingMatched: the filters left no
    tensor), ModelError (a spec whose class cannot be built, a function of inputs that raises).
    """
    arguments = dict(locals())
    del model
    from statecli.api import calls, errors

    return errors.call(calls.verify, arguments)
