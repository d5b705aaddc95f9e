"""The result of a diff: plain frozen data, the same for every output."""

from __future__ import annotations

from enum import Enum

import msgspec

from statecli.commands.diff.pairing import StrippedPrefix
from statecli.commands.explain.result import Explanation
from statecli.core.compared_fields import Field as Field
from statecli.core.finding import Finding
from statecli.core.model_state import Kind, ModelState, Oddity, Scalar, TensorInfo, TensorKey
from statecli.core.quantized_layout_names import QuantizedLayout
from statecli.core.result_views import ResultViews
from statecli.values.delta import CompareOptions, Delta


class Status(str, Enum):
    """Status of a tensor in a diff."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    RENAMED = "renamed"
    IDENTICAL = "identical"


class TransformationKind(str, Enum):
    """Kind of transformation of a tensor.

    `moved` and `swapped` values were in another tensor before. `reordered` rows are in another order within each head,
    `permuted` rows in any other order. A `joined` tensor has the rows of several tensors, a `stacked` tensor has
    several tensors as items, and `split` and `unstacked` are the reverse. An `adapter` adds an update of low rank to an
    old weight. A `merged` weight is the old weight with such an update, or a tensor of the adapter. `quantized` codes
    are dequantized and compared with the old weight, `dequantized` codes with the new weight. `codes` are not compared,
    because their scales are unknown. `unrelated` values are independent of the old values.
    """

    CAST = "cast"
    RESIZED = "resized"
    MOVED = "moved"
    SWAPPED = "swapped"
    SCALED = "scaled"
    TRANSPOSED = "transposed"
    REORDERED = "reordered"
    PERMUTED = "permuted"
    JOINED = "joined"
    SPLIT = "split"
    STACKED = "stacked"
    UNSTACKED = "unstacked"
    ADAPTER = "adapter"
    MERGED = "merged"
    QUANTIZED = "quantized"
    DEQUANTIZED = "dequantized"
    CODES = "codes"
    UNRELATED = "unrelated"


class Rounding(str, Enum):
    """How a cast rounded: to the nearest value (ties to even), towards zero, or to either of the two neighbours."""

    NEAREST = "nearest"
    TRUNCATED = "truncated"
    STOCHASTIC = "stochastic"


class RowOrder(str, Enum):
    """Order of the rows that a rotary embedding rotates in pairs: adjacent rows, or rows half a head apart."""

    INTERLEAVED = "interleaved"
    HALVES = "halves"


class Quantization(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a weight was quantized.

    Attributes:
        dtype: Type of the weight.
        shape: Shape of the weight, [out, in].
        codes: Type of the codes (`int4`, `nf4`, `float8_e4m3fn`).
        scales: Last name of the scales.
        block: Shape of the block of one scale; of bitsandbytes' 4-bit codes, the number of its values.
        has_channel_factors: The error is measured after a factor for each input channel, as in AWQ and SmoothQuant.
    """

    layout: QuantizedLayout
    dtype: str
    shape: tuple[int, ...]
    codes: str
    scales: str
    block: tuple[int, ...]
    has_channel_factors: bool = False


class Transformation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Transformation of a tensor, verified on every element that exists on both sides.

    Attributes:
        elements: Number of checked elements.
        exceptions: Number of checked elements that do not fit.
        sources: Names of other tensors. Of moved, swapped, joined and stacked values, the old tensors. Of a split
            tensor, the new tensors. Of `adapter`, the old weight and A. Of `merged`, the tensors of the adapter. Of
            `quantized` and `dequantized`, the weight and the tensors other than the codes.
        source_section: Section of the sources before; None for the section of the tensor.
        differing: The sources with exceptions.
        factor: Of `scaled`, after is factor × before. Of `transposed`, after is factor × the transpose of before. Of
            `adapter` and `merged`, the scale of the update, None if unknown.
        fitting_factor: Of `merged` with exceptions, another scale of the update that explains the change.
        alpha: Of `adapter`, `lora_alpha` of the configuration, None if unknown.
        rank: Of `adapter` and `merged`, the rank of the update.
        max_abs: Of `merged`, the largest |after - (before + update)| of the elements without exceptions.
        relative_l2: Of `adapter`, the L2 norm of the update, with the scale if known, over the norm of the weight. None
            if the weight is zero or a value is not finite. Of `quantized` and `dequantized`, the relative L2 error
            after dequantizing. Of a resized tensor with a cosine, the relative L2 change of the common part.
        cosine: Of moved and transposed values, and of the common part of a resized tensor, if they changed since: the
            cosine of before and after.
        rounding: Of a cast whose values were rounded without exception; `nearest` if copied values have another dtype.
        axis: Of `resized`, the first dimension of another size; of `permuted`, the dimension of the rows.
        place: Of `resized`, the index along `axis` where indexes were added or removed; None for the end. The first of
            several places.
        places: Of `resized`, all places, if there are several.
        counts: The number of indexes added or removed at each of `places`.
        blocks: Of joined tensors whose rows alternate, the rows of each source in a group.
        is_transposed: Of stacked tensors, the stack has the transposes; of `moved`, the tensor is the transpose.
        order: Of `reordered`, the order of the rows after.
        heads: Of `reordered`, the number of heads.
        rows: Number of indexes with exceptions, along `axis` or along the first dimension.
        first_rows: The first indexes with exceptions.
        quantization: Of `quantized` and `dequantized`, the layout of the codes.
    """

    kind: TransformationKind
    elements: int
    exceptions: int = 0
    sources: tuple[str, ...] = ()
    source_section: str | None = None
    differing: tuple[str, ...] = ()
    factor: float | None = None
    fitting_factor: float | None = None
    rank: int | None = None
    max_abs: float | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    rounding: Rounding | None = None
    axis: int | None = None
    place: int | None = None
    places: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    is_transposed: bool = False
    order: RowOrder | None = None
    heads: int | None = None
    rows: int = 0
    first_rows: tuple[int, ...] = ()
    quantization: Quantization | None = None
    alpha: float | None = None


class Change(msgspec.Struct, frozen=True, gc=False):
    """A tensor of the diff, with its new name and section. A removed tensor has its old name and section.

    Attributes:
        fields: Differing fields, in the order of `Field`.
        renamed_from: Name before, if different, for any way of matching.
        values: How the values differ; None for values equal or not compared. Of an added or resized tensor, only the
            counts of a transformation, if it has new NaN or infinities.
        not_compared: Reason why the values could not be compared.
        transformation: Transformation of the tensor, if recognised.
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
    transformation: Transformation | None = None

    @property
    def key(self) -> TensorKey:
        """Section and name of the tensor."""
        return TensorKey(self.section, self.fqn)


class ScalarChange(msgspec.Struct, frozen=True):
    """A differing setting: a number or string in the checkpoint, such as epoch or lr. `key` is a dotted path.

    `status` distinguishes a missing entry from a null entry. `detail` is null, and kept for readers of the JSON output.
    """

    key: str
    status: Status
    before: Scalar = None
    after: Scalar = None
    detail: str | None = None


class Broken(msgspec.Struct, frozen=True):
    """Pair of tensors that was not compared because of an error in a file. `message` names the file and the tensor."""

    fqn: str
    section: str
    message: str

    @property
    def key(self) -> TensorKey:
        """Section and name of the tensor."""
        return TensorKey(self.section, self.fqn)


class Inconclusive(Broken, frozen=True):
    """Pair whose values or settings cannot be compared, although both files are readable. The pair may differ."""


class MetExpectation(msgspec.Struct, frozen=True):
    """An option that is met, such as `--must-not-change 'layers.0.*'`, and why: `4 tensors did not change`."""

    option: str
    evidence: str


class Histogram(msgspec.Struct, frozen=True):
    """Histogram of a changed tensor's differences: `counts[i]` differences are in [edges[i], edges[i + 1])."""

    fqn: str
    section: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Diff(ResultViews, msgspec.Struct, frozen=True):
    """Result of `statecli diff`.

    Attributes:
        changes: Every pair, also identical, in the order of the new state. Removed tensors keep their old places.
        findings: Reasons for exit status 1.
        notes: Further information: prefixes stripped, tensors not compared and why, oddities of a file.
        broken: Reasons for exit status 2.
    """

    before: ModelState
    after: ModelState
    changes: tuple[Change, ...]
    scalars: tuple[ScalarChange, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
    broken: tuple[Broken, ...] = ()
    #: Histograms of the most changed tensors, if requested.
    histograms: tuple[Histogram, ...] = ()
    #: Whether expectations such as --may-change decide the exit code, rather than any difference.
    expected: bool = False
    #: The expectations about names that are met.
    met: tuple[MetExpectation, ...] = ()
    #: Options of the comparison of values; None if no values were compared.
    how: CompareOptions | None = None
    ignored: tuple[Field, ...] = ()
    #: Why a class does not load a checkpoint; None if it does, or if only some tensors are compared.
    loading: Explanation | None = None
    #: Files that changed while they were compared; `broken` has a line about each.
    changed_files: tuple[str, ...] = ()
    #: The prefixes stripped from names; `notes` has a line about each.
    stripped: tuple[StrippedPrefix, ...] = ()
