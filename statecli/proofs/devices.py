"""Which mixes of devices an operator refuses on CUDA, and which tensor of the model is to blame.

A `Watch` looks at every operator that forward runs, above whatever then runs it: FakeTensorMode, wrapper tensors, a
GPU. Its rules are those of eager CUDA: 0-dim tensors of the CPU mix freely, CPU indices into a device's table are legal
and the reverse is not, copies go from anywhere to anywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from statecli.modules.origin import _passed_over

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that take tensors of any devices: copies, or arguments that only lend a shape, a length or a number.
FREE = _words(
    "copy copy_ _to_copy _copy_from _copy_from_and_resize _foreach_copy_ _foreach_copy lift lift_fresh lift_fresh_copy "
    "device_put resize_as_ resize_as set_ fill fill_ is_same_size is_set_to _has_compatible_shallow_copy_type "
    "_pack_padded_sequence _pad_packed_sequence tensor_split slice_scatter select_scatter diagonal_scatter "
    "as_strided_scatter _ctc_loss ctc_loss record_stream _assert_async _assert_tensor_metadata"
)
#: Operators that read `self` at indices, which may be on the CPU while `self` is not.
_INDEXED = _words(
    "index index_put index_put_ _index_put_impl _index_put_impl_ _unsafe_index _unsafe_index_put "
    "_unsafe_masked_index _unsafe_masked_index_put_accumulate"
)
#: Operators whose number of elements per step, `batch_sizes`, lies on the CPU by design.
_PACKED = _words("lstm gru rnn_tanh rnn_relu _cudnn_rnn")
#: Operators without TensorIterator's leniency: even a 0-dim index must be where the table is.
_STRICT = _words(
    "embedding index_select index_add index_add_ index_copy index_copy_ gather scatter scatter_ scatter_add "
    "scatter_add_ scatter_reduce take mm bmm addmm baddbmm mv dot"
)

Place = tuple[str, int]


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: `fqn` names one of the model's, else forward made it at `place`.

    `derived`: it was computed from that tensor. `brought`: it was on the device, and forward copied it off.
    """

    fqn: str | None = None
    place: Place | None = None
    derived: bool = False
    brought: bool = False


@dataclass(frozen=True)
class Mismatch:
    """One operator that got `source` on a device other than that of `other`, which is a name or "".

    `generator`: it is no tensor but a generator of random numbers that is on the wrong device.
    """

    source: Source
    device: str
    other: str
    operator: str
    place: Place | None
    generator: bool = False


@dataclass
class Watch:
    """What the operators of a forward were given. `device` is where the model was moved.

    `copied` are the model's tensors that forward itself copied to the device, with the line; `touched` all that
    it read while they were not there.
    """

    device: torch.device
    mismatches: list[Mismatch] = field(default_factory=list)
    copied: dict[str, Place | None] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    _excused: set[str] = field(default_factory=set)
    # By id, with the tensor, so that no id is given out twice: a weak reference would keep it from being swapped.
    _sources: dict[int, tuple[torch.Tensor, Source]] = field(default_factory=dict)

    def excuse(self, names: Iterable[str]) -> None:
        """These would be on the device, could the move have been pretended of them: they are carried in silence."""
        self._excused.update(names)

    def know(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        """From now on these tensors are known by name; the first name of a tensor counts."""
        for fqn, tensor in names:
            self._sources.setdefault(id(tensor), (tensor, Source(fqn)))

    def source(self, tensor: torch.Tensor) -> Source | None:
        """Where `tensor` comes from; None where nobody has told."""
        found = self._sources.get(id(tensor))
        return None if found is None else found[1]

    def refused(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors that CUDA would refuse this operator for; each is noted."""
        tensors = list(_tensors((args, kwargs)))
        if all(tensor.device == self.device for tensor in tensors):
            return []
        self._touch(func, tensors, kwargs)
        wrong = strays(func, args, kwargs, self.device)
        if wrong:
            self._blame(func, wrong, tensors)
        return wrong

    def draws(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether CUDA would refuse the generator that this operator is given; it is noted."""
        generator = kwargs.get("generator")
        if generator is None or generator.device.type == self.device.type:
            return False
        asked = kwargs.get("device")
        if asked != self.device and not any(tensor.device == self.device for tensor in _tensors((args, kwargs))):
            return False
        self.mismatches.append(
            Mismatch(Source(), str(generator.device), "", name_of(func).strip("_"), _place(_line()), generator=True)
        )
        return True

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Where the results come from."""
        tensors = list(_tensors(out))
        if not tensors:
            return
        given = list(_tensors((args, kwargs)))
        for tensor in tensors:
            source = None if id(tensor) in self._sources else self._made(func, tensor, given)
            if source is not None:
                self._sources[id(tensor)] = (tensor, source)

    def _made(self, func: Any, tensor: torch.Tensor, given: list[torch.Tensor]) -> Source | None:
        known = [self.source(one) for one in given if one.device == tensor.device]
        named = next((one for one in known if one is not None), None)
        view = getattr(func, "is_view", False)
        if tensor.device == self.device:
            return named if view else None
        if named is not None:
            return Source(named.fqn, named.place, named.derived or not view, named.brought)
        return Source(place=_place(_line()), brought=any(one.device == self.device for one in given))

    def _touch(self, func: Any, tensors: list[torch.Tensor], kwargs: Any) -> None:
        for tensor in tensors:
            source = None if tensor.device == self.device else self.source(tensor)
            if source is None or source.fqn is None:
                continue
            self.touched.add(source.fqn)
            if name_of(func) == "_to_copy" and kwargs.get("device") == self.device:
                self.copied.setdefault(source.fqn, _place(_line()))

    def _blame(self, func: Any, wrong: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        frame = _line()
        other = next(tensor for tensor in tensors if tensor.device == self.device)
        known = self.source(other)
        named = known.fqn if known is not None and known.fqn is not None else _local(frame, other)
        for tensor in wrong:
            source = self.source(tensor) or Source()
            if source.fqn in self._excused:
                continue
            device = str(tensor.device).replace("meta", "cpu")
            one = Mismatch(source, device, named or "", name_of(func).strip("_"), _place(frame))
            if not any(_same(one, before) for before in self.mismatches):
                self.mismatches.append(one)


def strays(func: Any, args: Any, kwargs: Any, device: torch.device) -> list[torch.Tensor]:
    """The tensors that are not on `device` although CUDA asks `func` for all of them there; [] for a legal call."""
    name = name_of(func)
    if name in FREE or name.endswith("_like") or name.startswith("new_"):
        return []
    tensors = list(_tensors((args, kwargs)))
    if name in _INDEXED:
        tensors = _indexed(args, kwargs, device, tensors)
    elif name in _PACKED:
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.int64]
    if not any(tensor.device == device for tensor in tensors):
        return []
    return [tensor for tensor in tensors if tensor.device != device and (tensor.dim() or name in _STRICT)]


def _indexed(args: Any, kwargs: Any, device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What of an indexing must be on one device: all but the indices where the table is there."""
    table = args[0] if args else kwargs["self"]
    if table.device != device:
        # The indices are right: it is the table (and what is written to it) that is not there.
        return [table, *(tensor for tensor in tensors if tensor.device == device)]
    return [table, *_tensors((args[2:], kwargs.get("values")))]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks `watch` before each operator. What CUDA would refuse is noted and carried over, so that forward goes on."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question, no operator
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # only inference mode hands over what is made of other operators
                return func.decompose(*args, **kwargs)
        wrong = self._watch.refused(func, args, kwargs)
        if wrong:
            args, kwargs = self._carried((args, kwargs), {id(tensor) for tensor in wrong})
        if self._watch.draws(func, args, kwargs):
            kwargs = {**kwargs, "generator": None}
        out = self.run(func, args, kwargs)
        self._watch.note(func, args, kwargs, out)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out what is legal by now."""
        return func(*args, **kwargs)

    def _carried(self, tree: Any, wrong: set[int]) -> Any:
        """`tree` with these tensors copied to the device."""

        def there(one: torch.Tensor) -> Any:
            # Not `.to`: below autograd that is no copy yet.
            copy = torch.ops.aten._to_copy.default
            return self.run(copy, (one,), {"device": self._watch.device}) if id(one) in wrong else one

        return tree_map_only(torch.Tensor, there, tree)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def name_of(func: Any) -> str:
    """The operator without its overload: `add` of `aten.add.Tensor`."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func.__name__)


def _same(one: Mismatch, other: Mismatch) -> bool:
    if one.source.fqn is None:
        return one.source == other.source and one.place == other.place
    return one.source.fqn == other.source.fqn


def _line() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def is_theirs(filename: str) -> bool:
    """Whether it is neither torch's nor ours."""
    return not (filename.startswith((_PACKAGE, "<")) or _passed_over(filename))


def _place(frame: FrameType | None) -> Place | None:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _local(frame: FrameType | None, tensor: torch.Tensor) -> str | None:
    """The local variable that holds `tensor` in `frame`."""
    names = {} if frame is None else frame.f_locals
    return next((name for name, value in names.items() if value is tensor), None)
