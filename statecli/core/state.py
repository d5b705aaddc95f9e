"""The first waist: what was read, from a file or from a live module, as plain frozen data.

Readers (`formats/`, `modules/`) make a `ModelState`; commands look at it and never at a file or a module.
This module imports nothing of ours but two modules that import nothing, and neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from statecli.core.format_traits import FormatTraits
from statecli.core.oddity_kind import OddityKind

#: A value beside the tensors that JSON can hold. NaN and infinities are kept as text.
Scalar = str | int | float | bool | None


class Kind(str, Enum):
    """What a tensor is to its model. The words and their meaning: the JSON contract, "kind"."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    UNREGISTERED = "unregistered"
    OPTIMIZER = "optimizer"
    #: A tensor of a training checkpoint that belongs to no model and no optimizer: an RNG state, a scheduler's table.
    OTHER = "other"


class Evidence(str, Enum):
    """How `Kind` is known, strongest first."""

    REGISTERED = "registered"
    TYPE = "type"
    OPTIMIZER = "optimizer"
    CONVENTION = "convention"
    ASSUMED = "assumed"


class Packing(msgspec.Struct, frozen=True, gc=False):
    """How a storage is packed into `length` bytes of its file.

    `how` is "deflate" (a zip's method 8), or "torch-zip": the bytes are a whole archive of torch.save that holds one
    tensor, whose place in it is looked up when it is read.
    """

    how: str
    length: int


class ByteRange(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where one storage lies on disk: `length` bytes of `path` from `offset`.

    `crc32` is the checksum the container recorded for exactly these bytes, None where it recorded none. What is packed
    has `length` bytes once unpacked. What lies in several pieces has `boxes`; `path` is then the folder of their files,
    and `offset` 0.
    """

    path: str
    offset: int
    length: int
    crc32: int | None = None
    big_endian: bool = False
    packing: Packing | None = None
    boxes: Boxes | None = None

    @property
    def place(self) -> Place | None:
        """The bytes that the storage takes in its file, packed if it is; None where no one file has it."""
        if not self.path or self.boxes is not None:
            return None
        return Place(self.path, self.offset, self.length if self.packing is None else self.packing.length)


class Boxes(msgspec.Struct, frozen=True, gc=False):
    """A storage put together from pieces: the C-contiguous array of `shape`, of elements of `itemsize` bytes.

    Together the boxes hold each element exactly once.
    """

    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[Box, ...]


class Box(msgspec.Struct, frozen=True, gc=False):
    """The elements of an array from `start` on, as many along each dimension as `data.shape` says."""

    start: tuple[int, ...]
    data: TensorData


class Quantizer(msgspec.Struct, frozen=True, gc=False):
    """How stored integers become values: (q - zero_point) * scale. `axis` None: one scale for the whole tensor.

    Per-channel scales and zero points are tensors themselves and lie in `scales` and `zero_points`.
    """

    scheme: str
    scale: float | None = None
    zero_point: int | None = None
    axis: int | None = None
    scales: TensorData | None = None
    zero_points: TensorData | None = None


class TensorData(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where a strided tensor's elements are: a view into one storage, in elements of `dtype`.

    Element i of the tensor lies at byte `(offset + sum(index * stride)) * itemsize` of `storage`.
    `strides` None means C-contiguous. `conjugate` and `negative` are torch's lazy flags: the stored bytes are not
    yet conjugated or negated.
    """

    storage: ByteRange
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None
    conjugate: bool = False
    negative: bool = False
    quantizer: Quantizer | None = None
    #: The storage itself, where it lies in no file by itself: a numpy array inside a pickle. `storage.path` is then "".
    inline: bytes | None = None


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The source line that assigned a tensor to its module. `file` is relative wherever it can be."""

    file: str
    line: int


class After(msgspec.Struct, frozen=True, gc=False):
    """What `--to DEVICE` did to one tensor."""

    device: str | None
    followed: bool | None


class Stats(msgspec.Struct, frozen=True, gc=False):
    """Statistics over the finite values of a tensor, accumulated in float64; null where no value is finite.

    `std` divides by n - 1, as `torch.std` does. `zeros`, `nan` and `inf` count elements. `reason` says why the
    rest is null when the values could not be read as numbers.
    """

    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int | None = None
    nan: int | None = None
    inf: int | None = None
    reason: str | None = None


#: What is said of a tensor that is one of a model's `example_input_array`, `dummy_inputs`.
AN_INPUT = "a sample input that the model carries, and no state"


class TensorInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor under one name.

    `shape` is in elements, None for a lazy parameter that has none yet; `nbytes` is `elements` times the element
    size, in bytes, whatever the storage behind it holds; of a sparse tensor, its indices and values. `storage`
    identifies the storage within one state: two tensors with the same `storage` are tied. None where the source does
    not say.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...] | None
    elements: int
    nbytes: int
    section: str = "model"
    kind: Kind = Kind.PARAMETER
    evidence: Evidence = Evidence.ASSUMED
    persistent: bool | None = None
    device: str | None = None
    requires_grad: bool | None = None
    tied_to: tuple[str, ...] = ()
    saved: bool | None = None
    moves: bool | None = None
    origin: Origin | None = None
    layout: str = "strided"
    #: Names by which Python reaches the same storage that are no rows of their own (`lstm._flat_weights[0]`).
    aliases: tuple[str, ...] = ()
    #: The parameter an optimizer's tensor belongs to.
    belongs_to: str | None = None
    #: What a person should know of this tensor, in a few words.
    note: str | None = None
    #: Source lines to paste that would register it.
    fix: str | None = None
    after: After | None = None
    stats: Stats | None = None
    storage: int | str | None = None
    storage_bytes: int | None = None
    #: Where in the storage the tensor begins, in elements.
    storage_offset: int = 0
    data: TensorData | None = None
    #: The parts of a tensor that is no single strided view: sparse indices and values, a subclass's inner tensors.
    parts: tuple[tuple[str, TensorData], ...] = ()
    #: Whether only the first forward made it; it is not there when the constructor returns.
    appeared: bool = False
    #: The module that registers it and is itself registered nowhere (`projections[0]`).
    within: str | None = None
    #: What it was computed from before it was assigned: its grad_fn, or the registered names.
    derived: str | None = None
    #: Whether it is a sample input that the model carries (`example_input_array`), and no state of it.
    is_input: bool = False
    #: Why it cannot be read, in one line with its file: nothing else that is said of it counts.
    damage: str | None = None

    @property
    def pieces(self) -> list[TensorData]:
        """The strided views that it is made of, those in which a quantized one keeps its scales included."""
        found = ([self.data] if self.data else []) + [data for _, data in self.parts]
        of_scales = [(data.quantizer.scales, data.quantizer.zero_points) for data in found if data.quantizer]
        return found + [data for pair in of_scales for data in pair if data is not None]

    @property
    def ranges(self) -> list[ByteRange]:
        """Every range of a file that holds something of it."""
        data = self.data
        # Nearly every tensor is one view of one range; checkpoints of 300,000 tensors ask each of them several times.
        if data is not None and not self.parts and data.quantizer is None and data.storage.boxes is None:
            return [data.storage]
        return [where for data in self.pieces for where in _ranges(data.storage)]


def _ranges(where: ByteRange) -> Iterator[ByteRange]:
    if where.boxes is None:
        yield where
        return
    for box in where.boxes.boxes:
        yield from _ranges(box.data.storage)


class Place(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a file: `length` of them from `offset`."""

    path: str
    offset: int
    length: int


class Oddity(msgspec.Struct, frozen=True, gc=False):
    """Something odd but readable that a reader met. Readers record, rules judge.

    `name` is a stable word (`suffixed`, `key-set-twice`), `message` one line without the target's name; `place` is
    left out where it is about no bytes, `origin` where it is about no source line.
    """

    name: str
    message: str
    fqn: str | None = None
    place: Place | UnsetType = UNSET
    origin: Origin | UnsetType = UNSET

    @property
    def kind(self) -> OddityKind | None:
        """The kind by which commands decide; None if the oddity is only shown."""
        return _KINDS.get(self.name)


_KINDS = {kind.value: kind for kind in OddityKind}


class OptimizerGroup(msgspec.Struct, frozen=True):
    """One param_group as its optimizer saved it: parameter ids (or names) in order.

    `names` is None unless the optimizer was built from `named_parameters()`. `shapes` holds, for each id, the shape of
    a moment that has its parameter's shape (`exp_avg`), None where there is no such moment.
    """

    params: tuple[int | str, ...]
    names: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...] | None, ...]


class OptimizerFacts(msgspec.Struct, frozen=True):
    """What an optimizer's section says about the parameters it trains."""

    section: str
    groups: tuple[OptimizerGroup, ...]


class StateDict(msgspec.Struct, frozen=True):
    """What a section of a pickle is to `load_state_dict`, beside its tensors.

    `metadata` is its `_metadata`: what each module path was saved with ({"version": 2}), None where it has none.
    `others` are the keys whose values are no tensors, `holders` those of them below whose values tensors may lie.
    `is_module`: it is a whole module, whose class alone knows all this.
    """

    section: str
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    others: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    is_module: bool = False


class Settings(msgspec.Struct, frozen=True):
    """What a source records besides its tensors (`__metadata__`, epoch, lr), by dotted path.

    `types` has the types of the keys of each path that does not read as what it is: a letter for each character, and a
    dot between two keys. {"a.1": 0} is `a.1` with `ttt`; {"a": {1: 0}} is `a.1` with `t.i`, which is the default and
    is left out. `kinds` is the type of the container at a path: `dict`, `list`, or a class. `beside` are the names of
    a folder's files whose settings stand below these names.
    """

    values: Mapping[str, Scalar] = {}
    types: Mapping[str, str] = {}
    kinds: Mapping[str, str] = {}
    beside: frozenset[str] = frozenset()


class ModelState(msgspec.Struct, frozen=True):
    """All that was read of one target, in the order of the source.

    `format` is the reader's NAME, or `module`; commands print it and decide by `traits`. `sections` are the dotted
    paths that hold tensors. `globals` are the Python names a pickle would import, with the byte offset of their first
    mention. `state_dicts` are of the sections that are a model's; a format without any key but tensors' has none.
    """

    target: str
    format: str
    tensors: tuple[TensorInfo, ...]
    sections: tuple[str, ...] = ("model",)
    metadata: Settings = Settings()
    oddities: tuple[Oddity, ...] = ()
    globals: tuple[tuple[str, int], ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    state_dicts: tuple[StateDict, ...] = ()
    traits: FormatTraits = FormatTraits()

    @property
    def whole_modules(self) -> tuple[str, ...]:
        """The sections that are modules pickled whole, which hold more than their state_dict."""
        return tuple(one.section for one in self.state_dicts if one.is_module and one.section in self.sections)


class Mention(msgspec.Struct, frozen=True, gc=False):
    """A Python name in a pickle: `position` is the byte of the pickle where it first stands.

    `called`: the pickle calls it; `misuse` says what it does with it that nothing does which writes data.
    """

    module: str
    name: str
    position: int
    called: bool = False
    misuse: str | None = None

    @property
    def qualified(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"


class Bomb(msgspec.Struct, frozen=True, gc=False):
    """Memory or time that loading a pickle takes beyond what the file holds.

    `text` is a verb phrase; `position` the byte of the pickle where the name that is called stands, 0 for no name.
    """

    text: str
    position: int


class ScannedPickle(msgspec.Struct, frozen=True):
    """One pickle of a file, read for what loading it would run: `where` it is, in words that name the record.

    `place` are its bytes in the file, or those around it where it is compressed. `names` in order of first mention;
    `modules` are the classes of modules pickled whole. `hidden`: no reader of tensors looks for a pickle there.
    `exact`: its bytes lie in the file as they are, so that a name's position counts from `place.offset`.
    `unread` says why it, or what is in `where`, could not be read to the end. `doer` is set of what is no pickle but
    code in the file, and is who does what `names` say: "loading it", or "its code" when that is called.
    `by_torch_load`: `torch.load(path)` unpickles it. `protocol` is the pickle protocol that it declares, 0 if none.
    `refused_opcode`: an opcode in it that the unpickler of `torch.load(path)` does not know.
    `bombs`: what takes more memory or time to load than the file's size explains.
    `digest` is the SHA-256 of its bytes, of all that could follow where they have no end; "" where that is too much.
    """

    where: str
    place: Place
    names: tuple[Mention, ...] = ()
    modules: tuple[str, ...] = ()
    hidden: bool = False
    exact: bool = False
    unread: str | None = None
    doer: str | None = None
    by_torch_load: bool = False
    protocol: int = 0
    bombs: tuple[Bomb, ...] = ()
    digest: str = ""
    refused_opcode: int | None = None
