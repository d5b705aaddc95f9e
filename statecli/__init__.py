"""statecli: see, prove and audit the state of PyTorch models and checkpoints.

    statecli.inspect("net.pt")                      # what is in it
    statecli.diff("before.pt", "after.pt")          # what differs
    statecli.verify(model, inputs="2x3")            # what becomes of each tensor

Each takes what the command of the same name takes and gives what that shows, as data. Whatever cannot be done raises
`StateError` or a child of it, with the one line that the command would print. Importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statecli.errors import StateError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    import torch
    from torch import nn

    from statecli.comparison.result import Diff, Field
    from statecli.inspection import Inspection
    from statecli.proofs.result import Name, Verification
    from statecli.state import Kind

__all__ = ["StateError", "__version__", "diff", "inspect", "verify"]

__version__ = "0.1.0"


def inspect(
    target: str | os.PathLike[str] | nn.Module,
    *,
    to: str | torch.device | None = None,
    model: str | None = None,
    stats: bool = False,
    inputs: Any = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    kind: Iterable[Kind | str] = (),
    init_device: str = "cpu",
) -> Inspection:
    """Every tensor of a checkpoint, of a model class or of a live model, as `statecli inspect` lists it.

    `target`: a path, "train.ckpt#optimizer", "file.py:Class", "package.module:Class(hidden=32)" or an nn.Module. A live
    module is left as it was: it is copied, without its values unless `stats` asks for them, and the copies are tried.

    `to`: a device ("meta", "cuda:0") to which everything is moved; `findings` then has what stayed behind. `model`:
    a spec by whose registrations a checkpoint is grouped. `stats`: min, max, mean, std (n - 1), zeros, NaN and Inf of
    each tensor, in float64. `include`, `exclude`: globs on names (FQNs). `kind`: "parameter", "buffer", "unregistered",
    "optimizer", "other". `init_device`: where a class is built. `inputs`: what forward is called with, as in `verify`:
    what it adds, shapes and changes is listed too; None: it is not called.

    In the result `state.tensors` has a row a tensor: `shape` in elements, `nbytes` in bytes, `fqn` as Python reaches it
    ("blocks.0.weight", "cache['cos']").

    Raises StateError, with one line: UsageError (a contradiction, or NothingMatched: the filters left no tensor),
    UnreadableError (the file), ModelError (the class, its forward, or a live model that cannot be copied),
    MissingDependency.
    """
    from statecli import api, inspection

    request = inspection.Request(
        target=api.name_of(target),
        to=api.text(to),
        model=None if model is None else api.text(model),
        stats=stats,
        include=api.many(include),
        exclude=api.many(exclude),
        kind=api.kinds(kind),
        init_device=str(init_device),
    )
    return api.inspect(target, request, inputs)


def diff(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    map: Iterable[str] = (),
    ignore: Iterable[Field | str] = (),
    bitwise: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    metadata_only: bool = False,
    no_renames: bool = False,
    only: Iterable[str] = (),
    frozen: Iterable[str] = (),
    changed: Iterable[str] = (),
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    kind: Iterable[Kind | str] = (),
    device: str = "cpu",
    jobs: int = 0,
    init_device: str = "cpu",
) -> Diff:
    """What differs between two checkpoints, or a checkpoint and a model class, as `statecli diff` tells it.

    `before`, `after`: as the target of `inspect`, but no live model. `map`: "REGEX=REPLACEMENT" rewrites names of
    before first. `ignore`: "dtype", "shape", "kind", "requires_grad", "device", "tying", "values". Elements are equal
    exactly, to the bit (`bitwise`), or where |after - before| <= `atol` + `rtol` * |before|. `metadata_only` reads no
    values, `no_renames` looks for no tensor under another name. `only`, `frozen`, `changed`: globs of what alone may
    change, may not, and must; with one of them `findings` is what breaks them, else every difference. `include`,
    `exclude`, `kind`, `init_device`: as in `inspect`. `device`: "cpu" or "cuda:0" computes. `jobs`: processes, 0 for
    one a core.

    In the result `changes` has each pair, `values.max_abs` and the like of Δ = after - before in float64, and `broken`
    the pairs that could not be compared.

    Raises StateError, with one line: UsageError (a contradiction, or NothingMatched), UnreadableError (a file),
    ModelError (a class).
    """
    given = dict(locals())
    from statecli import api

    return api.diff(api.diff_options(**given))


def verify(
    model: str | nn.Module,
    *,
    checks: Iterable[Name | str] = (),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: str = "sgd",
    inputs: Any = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    kind: Iterable[Kind | str] = (),
) -> Verification:
    """Prove what becomes of each tensor when a model is moved, cast, saved, copied, trained and called.

    `model`: an nn.Module, or a spec such as "file.py:Class". A live module is left as it was (device, dtype, mode,
    gradients, values), and so are the random generators: all is done to copies. A move to "meta" copies no values.

    `checks`: some of "move", "cast", "save", "copy", "step", "forward"; () for all. `device`: where it is moved:
    "fake-cuda" (no GPU is needed; the default where there is none), "meta", "cpu", "cuda:0". `dtype`: to which it is
    cast. `optimizer`: that of the step: "sgd", "adamw". `include`, `exclude`: globs on names; `kind`: as in `inspect`.

    `inputs`: what forward is called with: a tensor; a tuple or list (positional), a dict (by keyword) or
    (args, kwargs); a function that gives one of these; or texts, "2x3" or "ids=int64:2x16<30522" (DTYPE:SHAPE<BOUND,
    the shape in elements). None: what the model carries (`dummy_inputs`, `example_input_array`); where there is
    nothing, step and forward are skipped.

    In the result each of `checks` has a verdict (passed, failed, skipped, inconclusive: tried and not told), its reason
    and a cell a tensor; `findings` has all that was proved false. A forward that raises makes its proofs inconclusive.

    Raises StateError, with one line: UsageError (an option, an input's text, or NothingMatched: the filters left no
    tensor), ModelError (a spec whose class cannot be built, a function of inputs that raises).
    """
    from statecli import api, proofs

    request = proofs.Request(
        target=api.name_of(model),
        checks=api.checks(checks),
        device=api.text(device),
        dtype=api.text(dtype),
        optimizer=optimizer,
        include=api.many(include),
        exclude=api.many(exclude),
        kind=api.kinds(kind),
    )
    return api.verify(model, request, inputs)
