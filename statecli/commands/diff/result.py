"""What a diff found: plain frozen data, the same for every output."""

from __future__ import annotations

from enum import Enum

import msgspec

from statecli.core.finding import Finding
from statecli.core.state import Kind, ModelState, Oddity, Scalar, TensorInfo
from statecli.values.delta import Delta, How


class Status(str, Enum):
    """What became of one tensor between before and after."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    RENAMED = "renamed"
    IDENTICAL = "identical"


class Field(str, Enum):
    """What of a tensor can differ; what `--ignore` takes."""

    DTYPE = "dtype"
    SHAPE = "shape"
    KIND = "kind"
    REQUIRES_GRAD = "requires_grad"
    DEVICE = "device"
    TYING = "tying"
    VALUES = "values"


class Change(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the diff. `fqn` and `section` are its name after, or before where it was removed.

    `fields` says what differs, in the order of `Field`. `renamed_from` is its name before wherever that was another
    one, whichever way the two were matched. `values` is None where values were not compared, or are equal.
    `not_compared` says why values of a pair could not be compared.
    """

    fqn: str
    section: str
    status: Status
    kind: Kind
    fields: tuple[Field, ...] = ()
    renamed_from: str | None = None
    before: TensorInfo | None = None
    after: TensorInfo | None = None
    values: Delta | None = None
    not_compared: str | None = None


class ScalarChange(msgspec.Struct, frozen=True):
    """A number or text beside the tensors (epoch, lr, `__metadata__`) that differs; by dotted path.

    `added` and `removed` tell a missing entry from one that is null.
    """

    key: str
    status: Status
    before: Scalar = None
    after: Scalar = None


class Broken(msgspec.Struct, frozen=True):
    """A pair that could not be compared because a file failed: one line, naming file and tensor."""

    fqn: str
    section: str
    message: str


class Histogram(msgspec.Struct, frozen=True):
    """How the Δ of one changed tensor are spread: `counts[i]` of them lie in [edges[i], edges[i + 1])."""

    fqn: str
    section: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Diff(msgspec.Struct, frozen=True):
    """All that `statecli diff` found. `changes` has every pair, identical ones too, in the order of after with the
    removed ones where they stood before.

    `findings` is what makes it exit 1; `notes` what must be known to read the rest (prefixes looked through, what was
    not compared and why, what is odd about a file); `broken` what makes it exit 2.
    """

    before: ModelState
    after: ModelState
    changes: tuple[Change, ...]
    scalars: tuple[ScalarChange, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
    broken: tuple[Broken, ...] = ()
    #: Of the tensors that changed most, where they were asked for.
    histograms: tuple[Histogram, ...] = ()
    #: Whether expectations (--only, --frozen, --changed) decide the exit code, rather than any difference.
    expected: bool = False
    #: How values were compared; None where they were not.
    how: How | None = None
    ignored: tuple[Field, ...] = ()
