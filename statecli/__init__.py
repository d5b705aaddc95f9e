"""Inspect, compare, verify and audit the state of PyTorch models and checkpoints.

    statecli.inspect("net.pt")                      # list the tensors of a checkpoint
    statecli.diff("before.pt", "after.pt")          # compare two checkpoints
    statecli.verify(model, inputs="2x3")            # test a model

Each function has the arguments of the command with the same name, and returns the result as data. Errors are
`StateError` or a subclass, with the line that the command would print. Importing this package does not import torch.
"""

import os
import sys

# `python -m statecli` puts the current folder first on the path, where a downloaded typing.py would be imported instead
# of Python's own. So nothing is imported before this, `__future__` included; os and sys are loaded when Python starts.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] in (["statecli"], ["-mstatecli"]):
    _home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        if sys.path[0] == os.getcwd() != _home:  # statecli's own folder may also have the packages that it needs
            del sys.path[0]
    except OSError:  # the current folder has been removed, and Python has not put it on the path
        pass

from statecli import api as _api
from statecli.core.errors import (
    MalformedError,
    MissingDependency,
    ModelError,
    NothingMatched,
    StateError,
    UnreadableError,
    UsageError,
)
from statecli.core.installed_package import check_import
from statecli.core.version import __version__

check_import()

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Executor
    from typing import Any, Literal

    import torch
    from torch import nn

    from statecli.api.snapshot import Snapshot
    from statecli.commands.audit.result import Audit
    from statecli.commands.diff.result import Change, Diff, Field
    from statecli.commands.inspect.run import Inspection
    from statecli.commands.lock.lock_file import Lock
    from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, Verification
    from statecli.core.digest_algorithm import Algorithm
    from statecli.core.finding import Finding, Severity
    from statecli.core.model_state import Kind, ModelState, Stats, TensorInfo
    from statecli.values.delta import Delta

    # The values of the enumerations, so that a type checker finds a misspelt word.
    CheckName = Literal[
        "move", "cast", "save", "copy", "step", "forward", "materialize", "export", "compile", "shard", "resume"
    ]
    KindName = Literal["parameter", "buffer", "unregistered", "optimizer", "other"]
    FieldName = Literal["dtype", "shape", "kind", "requires_grad", "device", "layout", "tying", "values"]
    SeverityName = Literal["note", "warning", "error"]
    DigestName = Literal["blake3", "sha256"]
    #: An object with tensors.
    LiveObject = nn.Module | torch.optim.Optimizer | Mapping[str, Any]
    #: What the functions take: a path, a URL, a spec or a live object.
    Target = str | os.PathLike[str] | LiveObject

#: Modules of the result types; each is imported on first use.
_TYPES = {
    "statecli.api.snapshot": ("Snapshot",),
    "statecli.commands.audit.result": ("Audit",),
    "statecli.commands.lock.lock_file": ("Lock",),
    "statecli.commands.diff.result": ("Change", "Diff", "Field"),
    "statecli.core.finding": ("Finding", "Severity"),
    "statecli.commands.inspect.run": ("Inspection",),
    "statecli.commands.verify.result": ("Cell", "Check", "Column", "Name", "Verdict", "Verification"),
    "statecli.core.model_state": ("Kind", "ModelState", "Stats", "TensorInfo"),
    "statecli.values.delta": ("Delta",),
}

__all__ = [
    "Audit",
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
    "Lock",
    "MalformedError",
    "MissingDependency",
    "ModelError",
    "ModelState",
    "Name",
    "NothingMatched",
    "Severity",
    "Snapshot",
    "StateError",
    "Stats",
    "TensorInfo",
    "UnreadableError",
    "UsageError",
    "Verdict",
    "Verification",
    "__version__",
    "audit",
    "diff",
    "inspect",
    "lock",
    "merge",
    "verify",
]

__tracebackhide__ = True  # pytest shows the caller's line


if not TYPE_CHECKING:

    def __getattr__(name: str) -> "Any":
        home = next((module for module, names in _TYPES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'statecli' has no attribute {name!r}")
        import importlib  # not above, because `from statecli import live` looks for `live` here first

        return getattr(importlib.import_module(home), name)


def inspect(
    target: "Target",
    *,
    to: "str | torch.device | None" = None,
    model: str | None = None,
    stats: bool = False,
    inputs: "Any" = None,
    ignore: "Iterable[str] | None" = (),
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | KindName] | KindName | None" = (),
    dtype: "Iterable[str] | None" = (),
    shape: "Iterable[str] | None" = (),
    init_device: str | None = None,
    config_json: "str | os.PathLike[str] | None" = None,
    trust_remote_code: bool = False,
    executor: "str | Executor | None" = None,
) -> "Inspection":
    """List every tensor of a checkpoint, a model class or a live model.

    A live model is not changed: statecli lists its own tensors, and moves and calls copies without its values. A model
    that cannot be copied is listed without the results of a move.

    Args:
        target: A path, a URL, "train.ckpt#optimizer", "file.py:Class", "package.module:Class(hidden=32)", an
            nn.Module, an optimizer or a state_dict. The last two are first written to a file, as in `diff`.
        to: Device to move the tensors to, such as "meta" or "cuda:0"; `findings` then has the tensors that were not
            moved. Without `to`, `findings` has the unregistered tensors of a model that may do harm.
        model: Spec of a class; the kinds of a checkpoint's tensors are taken from it.
        stats: Read the values and compute min, max, mean, std (divided by n - 1) and the numbers of zeros, NaN and
            Inf of each tensor, in float64.
        inputs: Arguments of forward, as in `verify`. The result then includes tensors that forward creates or
            changes. None: forward is not called.
        ignore: Rules or rule groups that are not reported.
        include: Globs; only tensors whose name matches one are listed.
        exclude: Globs; tensors whose name matches one are left out.
        kind: Kinds to list: "parameter", "buffer", "unregistered", "optimizer" or "other".
        dtype: Globs of dtypes to list, such as "float8*".
        shape: Shapes to list, such as "768x3072" or "*x768".
        init_device: Device on which a class is built; None for "cpu", and for "meta" if a config.json names the class.
        config_json: JSON file with the settings of a class whose constructor takes a config object.
        trust_remote_code: Run the Python files that come with a checkpoint. Use this only if you trust the author.
        executor: Engine that reads values for `stats`, as in `diff`.

    Returns:
        The state and the findings. `state.tensors` has one entry for each tensor: `shape` in elements, `nbytes` in
            bytes, and `fqn`, the name as Python reaches it ("blocks.0.weight", "cache['cos']").

    Raises:
        UsageError: The arguments contradict each other, or name something that does not exist.
        NothingMatched: The filters left no tensor.
        UnreadableError: The file cannot be read.
        ModelError: The class cannot be built, its forward raises, or a live model cannot be copied.
        MissingDependency: An optional package is missing.
    """
    arguments = dict(locals())
    del target, model
    return _api.errors.call(_api.calls.inspect, arguments)


def diff(
    before: "Target | Snapshot",
    after: "Target | Snapshot",
    *,
    map: "Iterable[str] | None" = (),
    ignore: "Iterable[Field | FieldName] | FieldName | None" = (),
    bitwise: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    metadata_only: bool = False,
    no_renames: bool = False,
    only: "Iterable[str] | None" = (),
    frozen: "Iterable[str] | None" = (),
    changed: "Iterable[str] | None" = (),
    cast: bool = False,
    adapter: "str | os.PathLike[str] | None" = None,
    device: str = "cpu",
    jobs: int = 0,
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | KindName] | KindName | None" = (),
    dtype: "Iterable[str] | None" = (),
    shape: "Iterable[str] | None" = (),
    init_device: str | None = None,
    config_json: "str | os.PathLike[str] | None" = None,
    trust_remote_code: bool = False,
    executor: "str | Executor | None" = None,
) -> "Diff":
    """Compare two checkpoints, live objects or model classes, in any pair.

    By default two elements are equal if their values are equal. With a tolerance they are equal if
    |after - before| <= `atol` + `rtol` * |before|.

    A live object (an nn.Module, an optimizer, a state_dict) is compared as the file that `torch.save` of its state_dict
    writes. This file is written to memory (/dev/shm), or to the temporary folder if /dev/shm does not have enough free
    memory, and removed after the call. So a live object needs as much additional memory as its tensors.

    Args:
        before: First target: a path, a URL, a spec or a live object, as in `inspect`, or a `Snapshot`.
        after: Second target, of any kind.
        map: "REGEX=REPLACEMENT" texts that rename the tensors of `before` first.
        ignore: Fields whose differences do not count: "dtype", "shape", "kind", "requires_grad", "device", "layout",
            "tying" or "values".
        bitwise: Compare bits: -0.0 differs from 0.0, and a NaN from a NaN with other bits.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        metadata_only: Read no values.
        no_renames: Do not detect renamed tensors.
        only: Globs; only these tensors may change.
        frozen: Globs; these tensors must not change.
        changed: Globs; for each, at least one tensor must change.
        cast: A tensor that differs must be a cast of the old tensor, each value rounded to the nearest.
        adapter: Path of a LoRA adapter: `after` must equal `before` plus the adapter, up to rounding.
        device: Device that compares values: "cpu" or "cuda:0".
        jobs: Number of processes (threads for URLs) that read values; 0 means one per core.
        include: Globs; only tensors whose name matches one are compared.
        exclude: Globs; tensors whose name matches one are left out.
        kind: Kinds to compare, as in `inspect`.
        dtype: Globs of dtypes to compare.
        shape: Shapes to compare.
        init_device: Device on which a class is built; None for "cpu", and for "meta" if a config.json names the class.
        config_json: File with the settings of a class, as in `inspect`.
        trust_remote_code: Run the Python files of a checkpoint, as in `inspect`.
        executor: Engine that reads values: "threads:2", "processes:4", "dask:tcp://HOST:PORT", "mpi", "ray", or an
            Executor of concurrent.futures, which stays open.

    Returns:
        The differences. `changes` has each pair of tensors, with statistics of after - before such as
            `values.max_abs`, within 1e-6 of their values in float64. `broken` has the pairs that could not be compared.
            `findings` has every difference; with `only`, `frozen`, `changed` or `cast` it has the differences that
            they forbid. `transformation` of a change says what was done to the tensor, if that was recognised.

    Raises:
        UsageError: The arguments contradict each other, or name something that does not exist.
        NothingMatched: The filters left no tensor.
        UnreadableError: A file cannot be read.
        ModelError: A class cannot be built.
        EngineError: `executor` does not answer.
    """
    arguments = dict(locals())
    del before, after
    return _api.errors.call(_api.calls.diff, arguments)


def lock(
    targets: "Target | Iterable[Target]",
    *,
    digest: "Algorithm | DigestName" = "blake3",
    weights_only: bool = False,
    jobs: int = 0,
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | KindName] | KindName | None" = (),
    init_device: str | None = None,
    config_json: "str | os.PathLike[str] | None" = None,
    trust_remote_code: bool = False,
    executor: "str | Executor | None" = None,
) -> "Lock":
    """Compute a digest of each tensor of one target or of several targets.

    Args:
        targets: A target as in `inspect`, or several targets. Live objects are saved as in `diff`.
        digest: Hash algorithm for tensor values: "blake3" or "sha256".
        weights_only: Lock only tensors, not settings and other files of a folder.
        jobs: Number of processes that read values, as in `diff`.
        include: Globs; only tensors whose name matches one are locked.
        exclude: Globs; tensors whose name matches one are left out.
        kind: Kinds to lock, as in `inspect`.
        init_device: Device on which a class is built, as in `inspect`.
        config_json: File with the settings of a class, as in `inspect`.
        trust_remote_code: Run the Python files of a checkpoint, as in `inspect`.
        executor: Engine that reads values, as in `diff`.

    Returns:
        The lock. `str(lock)` is the text of the lock file, for `statecli audit --lock FILE`.

    Raises:
        UsageError: The arguments contradict each other, or a live object cannot be saved.
        NothingMatched: There is no tensor to lock.
        UnreadableError: A file cannot be read.
        ModelError: A class cannot be built.
    """
    arguments = dict(locals())
    del targets
    return _api.errors.call(_api.calls.lock, arguments)


def audit(
    targets: "Target | Iterable[Target]",
    *,
    model: str | None = None,
    select: "Iterable[str] | None" = (),
    ignore: "Iterable[str] | None" = (),
    plugins: "Iterable[str] | None" = (),
    fail_on: "Severity | SeverityName | None" = None,
    lock: "str | os.PathLike[str] | None" = None,
    against: "Target | None" = None,
    config: "str | os.PathLike[str] | None" = None,
    no_config: bool = False,
    allow_empty: bool = False,
    values: bool | None = None,
    jobs: int = 0,
    config_json: "str | os.PathLike[str] | None" = None,
    trust_remote_code: bool = False,
    executor: "str | Executor | None" = None,
) -> "Audit":
    """Check checkpoints, live objects and model classes against rules.

    A live model is audited as the file that saves its state_dict, as in `diff`; `inspect` and `verify` report its
    unregistered tensors.

    Args:
        targets: A target as in `inspect`, or several targets; a text may be a folder or a glob.
        model: Spec of a class; each checkpoint must fit the class. "auto": the class that config.json names.
        select: The only rules or rule groups to run.
        ignore: Rules or rule groups that do not run.
        plugins: Modules or Python files with further rules. They are imported.
        fail_on: Lowest severity in `Audit.failing`: "note", "warning" or "error"; None for the configured one.
        lock: Lock file; the targets are checked against it.
        against: Target with the expected tensors, dtypes and shapes.
        config: File of the configuration; None for the nearest statecli.toml or pyproject.toml.
        no_config: Use no configuration.
        allow_empty: Accept that there is nothing to audit.
        values: True reads the values of all tensors, False of none; None only of small local files.
        jobs: Number of processes that read values, as in `diff`.
        config_json: File with the settings of a class, as in `inspect`.
        trust_remote_code: Run the Python files of a checkpoint, as in `inspect`.
        executor: Engine that reads values, as in `diff`.

    Returns:
        The results of the targets. `findings` has all findings, `failing` those of `fail_on` or a higher severity.

    Raises:
        UsageError: The arguments contradict each other, or a live object cannot be saved.
        UnreadableError: The lock or the configuration cannot be read. A target that cannot be read is in `targets`
            with the status "failed".
        ModelError: The class cannot be built.
    """
    arguments = dict(locals())
    del targets, against
    return _api.errors.call(_api.calls.audit, arguments)


def merge(
    parts: "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]",
    *,
    jobs: int = 0,
    code: "Iterable[str] | None" = (),
    url: "Iterable[str] | None" = (),
    copies: bool = False,
    executor: "str | Executor | None" = None,
) -> "Inspection | Diff":
    """Merge the parts that `--shard 1/N` to `--shard N/N` wrote, and return the result of the whole command.

    Call it in the folder in which the parts were made.

    Args:
        parts: The files of all parts in any order, or a glob.
        jobs: Number of processes for the rest of the work, as in `diff`.
        code: Classes and plugins that the parts name and that may be imported.
        url: Full URLs, with their passwords or signatures, of the checkpoints that the parts read.
        copies: Accept parts made from separate copies of the files; check only the sizes and samples of the copies.
        executor: Engine for the rest of the work, as in `diff`.

    Returns:
        An Inspection for parts of `inspect`, a Diff for parts of `diff`.

    Raises:
        UnreadableError: A file is not a part, a part is missing or given twice, or a target has changed.
        EngineError: The parts were written by another version of statecli.
        UsageError: The parts were written by audit or lock; merge them on the command line.
    """
    arguments = dict(locals())
    del parts, code, url
    return _api.errors.call(_api.calls.merge, arguments)


def verify(
    model: "str | nn.Module",
    *,
    checks: "Iterable[Name | CheckName] | CheckName | None" = (),
    device: "str | torch.device | None" = None,
    dtype: "str | torch.dtype | None" = None,
    optimizer: "str | type[torch.optim.Optimizer] | None" = None,
    inputs: "Any" = None,
    ignore: "Iterable[str] | None" = (),
    include: "Iterable[str] | None" = (),
    exclude: "Iterable[str] | None" = (),
    kind: "Iterable[Kind | KindName] | KindName | None" = (),
    config_json: "str | os.PathLike[str] | None" = None,
    trust_remote_code: bool = False,
) -> "Verification":
    """Test what happens to each tensor when a model is moved, cast, saved, copied, trained and called.

    A live model is not changed (device, dtype, mode, gradients, values), and the random generators are restored: every
    operation is done on copies. A move to "meta" copies no values.

    Args:
        model: An nn.Module, or a spec such as "file.py:Class".
        checks: Checks to run: "move", "cast", "save", "copy", "step", "forward", "materialize", "export",
            "compile", "shard" or "resume". () or None: all but the last five.
        device: Device to move to: "fake-cuda" (needs no GPU; the default without one), "meta", "cpu" or "cuda:0".
        dtype: Dtype to cast to.
        optimizer: Optimizer of the training: "sgd" (default of "step"), "adamw" (default of "resume"), or a class.
        inputs: Arguments of forward. A tensor; a tuple or list of positional arguments; a dict of keyword arguments;
            (args, kwargs); a function that returns one of these. Or texts DTYPE:SHAPE<BOUND with the shape in
            elements: "2x3", ("2x3", "ids=int64:2x16<30522"), {"x": "2x3"}. None: the inputs that the model carries
            (`dummy_inputs`, `example_input_array`); without them, step and forward are skipped.
        ignore: Rules or rule groups that are not reported.
        include: Globs; only tensors whose name matches one are shown.
        exclude: Globs; tensors whose name matches one are left out.
        kind: Kinds to show, as in `inspect`.
        config_json: File with the settings of a class, as in `inspect`.
        trust_remote_code: Run the Python files of a checkpoint, as in `inspect`.

    Returns:
        A verdict for each check (passed, failed, skipped or inconclusive) with its reason, and a cell for each tensor.
            `findings` has everything that failed. A forward that raises makes its checks inconclusive.

    Raises:
        UsageError: An argument is wrong, or `device`, `dtype` or `optimizer` is given and `checks` leaves out the
            check that uses this argument.
        NothingMatched: The filters left no tensor.
        ModelError: The class cannot be built, or the function of `inputs` raises.
    """
    arguments = dict(locals())
    del model
    return _api.errors.call(_api.calls.verify, arguments)
