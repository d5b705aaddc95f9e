"""State of a model or checkpoint as plain frozen data, read from a file or a live module.

Readers (`formats/`, `live/`) build a `ModelState`; commands look only at the state, never at a file or a module. This
module imports neither torch nor numpy, and only statecli modules that import nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from statecli.core.format_traits import FormatTraits
from statecli.core.oddity_kind import OddityKind

#: A setting of a checkpoint, as a JSON scalar. NaN and infinities are stored as text.
Scalar = str | int | float | bool | None


class Kind(str, Enum):
    """Role of a tensor in its model, as defined in the JSON contract under "kind"."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    UNREGISTERED = "unregistered"
    OPTIMIZER = "optimizer"
    #: A tensor of a training checkpoint that belongs to no model and no optimizer: an RNG state, a scheduler's table.
    OTHER = "other"


#: Kinds of the tensors that a module registers.
REGISTERED_KINDS = (Kind.PARAMETER, Kind.BUFFER)


class NoteKind(Enum):
    """Kind of a note on a tensor. Commands act on notes with a kind; they only show all other notes."""

    #: torchmetrics keeps the tensor in a plain attribute, and moves it by its own code.
    METRIC_STATE = "metric-state"
    #: `save_model` stored a shared tensor under another name, so no entry of the file has this name.
    STORED_ELSEWHERE = "stored-elsewhere"
    #: A lazy parameter or buffer without shape and values.
    UNINITIALIZED = "uninitialized"
    #: A sparse tensor that may have several values at one index.
    UNCOALESCED = "uncoalesced"
    #: The note says only that an unregistered module registers the tensor.
    IN_UNREGISTERED_MODULE = "in-unregistered-module"


class Evidence(str, Enum):
    """How statecli knows a tensor's `Kind`; the strongest evidence comes first."""

    REGISTERED = "registered"
    TYPE = "type"
    OPTIMIZER = "optimizer"
    CONVENTION = "convention"
    ASSUMED = "assumed"


#: `Packing.how` of a torch.save archive with a single tensor.
ARCHIVE = "torch-zip"


class Packing(msgspec.Struct, frozen=True, gc=False):
    """How a storage is packed in `length` bytes of its file.

    `how` is "deflate" (a zip's method 8), or `ARCHIVE`: the bytes are a whole archive of torch.save with a single
    tensor. The tensor's offset is looked up when the tensor is read.
    """

    how: str
    length: int


class ByteRange(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Bytes of one storage on disk: `length` bytes of `path` from `offset`.

    `crc32` is the container's checksum of exactly these bytes, None without a checksum. For a packed storage, `length`
    is the unpacked size. A storage in several pieces has `boxes`; `path` is then the folder of the pieces, and `offset`
    is 0.
    """

    path: str
    offset: int
    length: int
    crc32: int | None = None
    big_endian: bool = False
    packing: Packing | None = None
    boxes: Boxes | None = None

    @property
    def is_archive(self) -> bool:
        """True if the range is a whole archive of torch.save that contains the tensor."""
        return self.packing is not None and self.packing.how == ARCHIVE

    @property
    def place(self) -> Place | None:
        """Range of a file that contains the whole storage, possibly packed. None if no single range does."""
        if not self.path or self.boxes is not None:
            return None
        return Place(self.path, self.offset, self.length if self.packing is None else self.packing.length)


class Boxes(msgspec.Struct, frozen=True, gc=False):
    """Storage assembled from boxes of a C-contiguous array. The array has `shape`; an element has `itemsize` bytes.

    Together the boxes hold each element exactly once.
    """

    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[Box, ...]


class Box(msgspec.Struct, frozen=True, gc=False):
    """Box-shaped part of an array, which begins at the index `start` and has the shape `data.shape`."""

    start: tuple[int, ...]
    data: TensorData


class Quantizer(msgspec.Struct, frozen=True, gc=False):
    """Parameters that turn stored integers into values: (q - zero_point) * scale.

    If `axis` is None, a single scale applies to the whole tensor. Per-channel scales and zero points are tensors in
    `scales` and `zero_points`.
    """

    scheme: str
    scale: float | None = None
    zero_point: int | None = None
    axis: int | None = None
    scales: TensorData | None = None
    zero_points: TensorData | None = None


class TensorData(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Location of a strided tensor's elements: a view into a storage, in elements of `dtype`.

    Element i of the tensor is at byte `(offset + sum(index * stride)) * itemsize` of `storage`. `strides` None means
    C-contiguous. `conjugate` and `negative` are torch's lazy flags: the stored bytes are not yet conjugated or negated.
    """

    storage: ByteRange
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None
    conjugate: bool = False
    negative: bool = False
    quantizer: Quantizer | None = None
    #: The bytes of a storage without a byte range of its own (a numpy array in a pickle); `storage.path` is then "".
    inline: bytes | None = None


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Source line that assigned a tensor to its module. `file` is relative if possible."""

    file: str
    line: int


class After(msgspec.Struct, frozen=True, gc=False):
    """Effect of `--to DEVICE` on a tensor."""

    device: str | None
    followed: bool | None


class Stats(msgspec.Struct, frozen=True, gc=False):
    """Statistics over the finite values of a tensor, accumulated in float64.

    `min` to `std` are null if no value is finite. `std` divides by n - 1, as `torch.std` does. `zeros`, `nan` and `inf`
    count elements. If the values could not be read as numbers, the other fields are null and `reason` says why.
    """

    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int | None = None
    nan: int | None = None
    inf: int | None = None
    reason: str | None = None


#: Note on a tensor that is one of a model's sample inputs (`example_input_array`, `dummy_inputs`).
SAMPLE_INPUT_NOTE = "a sample input stored in the model, not part of its state"


class TensorKey(NamedTuple):
    """Section and name of a tensor, which identify the tensor within a state."""

    section: str
    fqn: str


class TensorInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Facts about one tensor under one of its names.

    `shape` is in elements, None for a lazy parameter without a shape; `nbytes` is `elements` times the element size, in
    bytes, independent of the size of the storage (for a sparse tensor: indices and values). `storage` identifies the
    storage within one state: two tensors with the same `storage` are tied. None: the source does not record the field.
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
    #: Python expressions for the same storage that have no row of their own (`lstm._flat_weights[0]`).
    aliases: tuple[str, ...] = ()
    #: The parameter of the tensor, if an optimizer keeps the tensor.
    belongs_to: str | None = None
    #: Short remark for the reader.
    note: str | None = None
    #: Source lines to paste that would register the tensor.
    fix: str | None = None
    after: After | None = None
    stats: Stats | None = None
    storage: int | str | None = None
    storage_bytes: int | None = None
    #: Position of the tensor in the storage, in elements.
    storage_offset: int = 0
    data: TensorData | None = None
    #: Parts of a tensor that is not a single strided view: sparse indices and values, or the inner tensors of a
    #: subclass.
    parts: tuple[tuple[str, TensorData], ...] = ()
    #: True if the first forward created the tensor, which does not exist when the constructor returns.
    appeared: bool = False
    #: The unregistered module that registers this tensor (`projections[0]`).
    within: str | None = None
    #: Type of the plain container in an attribute that holds an unregistered tensor: `list`, `tuple`, `dict`.
    container: str | None = None
    #: Whether a second run of the constructor gives the same bits; None if the constructor was not run again.
    rebuilt: bool | None = None
    #: Source of a computed tensor: its grad_fn, or the registered names from which it was computed.
    derived: str | None = None
    #: True for a sample input of the model (`example_input_array`), which is not state.
    is_input: bool = False
    #: Why the tensor cannot be read, in one line that names the file. The other fields are then meaningless.
    damage: str | None = None
    #: Kind of a note that changes the behaviour of a command; None for other notes.
    note_kind: NoteKind | None = None

    @property
    def key(self) -> TensorKey:
        """Section and name of the tensor."""
        return TensorKey(self.section, self.fqn)

    @property
    def pieces(self) -> list[TensorData]:
        """Strided views of the tensor, including the scales of a quantized view."""
        if self.data and not self.parts and not self.data.quantizer:
            return [self.data]
        views = ([self.data] if self.data else []) + [data for _, data in self.parts]
        scale_pairs = [(data.quantizer.scales, data.quantizer.zero_points) for data in views if data.quantizer]
        return views + [data for pair in scale_pairs for data in pair if data is not None]

    @property
    def ranges(self) -> list[ByteRange]:
        """All byte ranges that contain data of the tensor."""
        data = self.data
        # Fast path, because a checkpoint may have 300,000 tensors, and nearly every tensor is a single view.
        if data is not None and not self.parts and data.quantizer is None and data.storage.boxes is None:
            return [data.storage]
        return [byte_range for data in self.pieces for byte_range in _iter_file_ranges(data.storage)]

    @property
    def is_in_state_dict(self) -> bool:
        """False for a tensor that exists in a class or whole pickled module but not in its state_dict."""
        return self.kind is not Kind.UNREGISTERED and self.persistent is not False and self.saved is not False


def _iter_file_ranges(byte_range: ByteRange) -> Iterator[ByteRange]:
    if byte_range.boxes is None:
        yield byte_range
        return
    for box in byte_range.boxes.boxes:
        yield from _iter_file_ranges(box.data.storage)


class Place(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a file: `length` bytes from `offset`."""

    path: str
    offset: int
    length: int


class Oddity(msgspec.Struct, frozen=True, gc=False):
    """Unusual but readable fact about a target, recorded by a reader and judged by rules.

    `name` is a stable word (`suffixed`, `key-set-twice`), `message` one line without the target's name. `place` is
    unset if the oddity concerns no bytes, and `origin` if it concerns no source line.
    """

    name: str
    message: str
    fqn: str | None = None
    place: Place | UnsetType = UNSET
    origin: Origin | UnsetType = UNSET

    @property
    def kind(self) -> OddityKind | None:
        """Kind of the oddity, or None if the oddity is only shown and does not change how commands behave."""
        return _KINDS.get(self.name)


_KINDS = {kind.value: kind for kind in OddityKind}


class OptimizerGroup(msgspec.Struct, frozen=True):
    """param_group of an optimizer as saved: its parameter ids (or names) in order.

    `names` is None unless the optimizer was built from `named_parameters()`. `shapes` holds, for each id, the shape of
    a moment with the parameter's shape (`exp_avg`), None without such a moment. `fused`: the group's setting of this
    name, by which `step()` gives all states to a single kernel.
    """

    params: tuple[int | str, ...]
    names: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...] | None, ...]
    fused: bool = False


class OptimizerFacts(msgspec.Struct, frozen=True):
    """Parameter groups of an optimizer, as its section of the checkpoint records them."""

    section: str
    groups: tuple[OptimizerGroup, ...]


class StateDict(msgspec.Struct, frozen=True):
    """Facts that `load_state_dict` uses about the state_dict in a section, besides the tensors.

    `metadata` is `_metadata`: the version saved for each module path ({"version": 2}), None if missing. `others` are
    the keys of values other than tensors; `holders` are the keys among `others` whose values may contain tensors.
    `is_module`: a module pickled whole; only its class knows these facts. `keys` lead from the loaded object to the
    state_dict: () if the object is the state_dict, None if no keys lead there or they are unknown.
    """

    section: str
    metadata: Mapping[str, Mapping[str, Any]] | None = None
    others: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    is_module: bool = False
    keys: tuple[str | int, ...] | None = None


class Settings(msgspec.Struct, frozen=True):
    """Values that a checkpoint records besides its tensors (`__metadata__`, epoch, lr), by dotted path.

    `types` holds the key types of each path that is ambiguous as text: one letter per character, and a dot between two
    keys. {"a.1": 0} is `a.1` with `ttt`; {"a": {1: 0}} is `a.1` with `t.i`. The default `t.i` is omitted. `kinds` is
    the type of the container at a path: `dict`, `list`, or a class. `companion_names`: names of the files of a folder
    whose settings are stored below these names.
    """

    values: Mapping[str, Scalar] = {}
    types: Mapping[str, str] = {}
    kinds: Mapping[str, str] = {}
    companion_names: frozenset[str] = frozenset()


class ChatTemplate(msgspec.Struct, frozen=True):
    """A chat template, and its name in the settings file or in the metadata."""

    name: str
    text: str


class ModelState(msgspec.Struct, frozen=True):
    """State of one target: its tensors, settings and oddities, in the order of the source.

    `format` is the reader's NAME, or `module`; commands print it and decide by `traits`. `sections` are the dotted
    paths with tensors. `globals` are the Python names that a pickle would import, with the byte offset of their first
    mention. `state_dicts` describe the sections of a model; a format with tensor keys only has none. `chat_templates`
    are the whole texts of the templates in GGUF metadata.
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
    chat_templates: tuple[ChatTemplate, ...] = ()

    @property
    def recomputed(self) -> frozenset[str]:
        """Names of tensors recomputed by torch before each forward pass: old weight_norm, spectral_norm, pruning."""
        return frozenset(oddity.fqn for oddity in self.oddities if oddity.kind is OddityKind.RECOMPUTED and oddity.fqn)

    def find_state_dict(self, section: str) -> StateDict:
        """Return the facts about a section's state_dict, or only the section's name if the format records no facts."""
        return next((item for item in self.state_dicts if item.section == section), StateDict(section))

    @property
    def whole_modules(self) -> tuple[str, ...]:
        """Sections that contain a whole pickled module, with more than its state_dict."""
        return tuple(
            state_dict.section
            for state_dict in self.state_dicts
            if state_dict.is_module and state_dict.section in self.sections
        )


class Mention(msgspec.Struct, frozen=True, gc=False):
    """Python name in a pickle. `position` is the offset in bytes of the first mention.

    `called`: the pickle calls the object of this name. `misuse` describes a use that no serializer of data makes.
    `local_file`: the Python file near the checkpoint from which Python may import the name.
    `loads_storages`: the pickle calls the name only with the storages of tensors, which are scanned as pickles.
    """

    module: str
    name: str
    position: int
    called: bool = False
    misuse: str | None = None
    local_file: str | None = None
    loads_storages: bool = False

    @property
    def qualified(self) -> str:
        """Name as `module.name`."""
        return f"{self.module}.{self.name}"


class Bomb(msgspec.Struct, frozen=True, gc=False):
    """Call that takes more memory or time when a pickle is loaded than the file's size explains.

    `text` is a verb phrase; `position` the byte of the called name in the pickle, 0 without a name.
    """

    text: str
    position: int


class Hazard(msgspec.Struct, frozen=True, gc=False):
    """Plain data that makes a loader do harm. `text` names the data and how the loader uses it.

    `is_error` is False for data that may be correct: a note, or a warning if `needs_review`. `help` is the advice to
    the owner of the data.
    """

    text: str
    is_error: bool = True
    needs_review: bool = False
    help: str | None = None


class ScannedPickle(msgspec.Struct, frozen=True):
    """One pickle of a file, scanned for the code that loading the pickle runs.

    Attributes:
        where: The record of the pickle, in words.
        place: Bytes of the pickle in the file, or of the compressed record around it.
        names: Names in order of first mention.
        modules: Classes of modules pickled whole.
        hidden: No reader of tensors looks for a pickle here.
        exact: The bytes are in the file uncompressed, and a name's position counts from `place.offset`.
        unread: Why the pickle, or the record in `where`, could not be read to the end.
        doer: Subject of `names` for code outside a pickle, such as "loading the file" or "the code of the file".
        by_torch_load: `torch.load(path)` unpickles the pickle.
        protocol: Declared pickle protocol; 0 if the pickle declares none.
        bombs: Calls that take more memory or time to load than the file's size explains.
        hazards: Plain data by which loaders do harm.
        uses_storages: The pickle names storages of the file, and may pass their bytes to its calls.
        sparse_tensors: Number of sparse tensors made by the pickle.
        digest: SHA-256 of its bytes, or of all bytes that may belong to a pickle without an end; "" if there are too
            many. Covers the whole file if loading is harmful and other bytes of the file may decide how.
        refused_opcode: An opcode unknown to the unpickler of `torch.load(path)`.
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
    hazards: tuple[Hazard, ...] = ()
    uses_storages: bool = False
    sparse_tensors: int = 0
    digest: str = ""
    refused_opcode: int | None = None


#: Function that reads a file of a folder, by its path.
ReadFile = Callable[[str], ModelState]
