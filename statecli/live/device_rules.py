"""Which mixes of devices an operator refuses on CUDA, and which tensor of the model is to blame.

A `Watch` looks at every operator that forward runs, above whatever then runs it: FakeTensorMode, wrapper tensors, a
GPU. Its rules are those of eager CUDA: an elementwise operator of two tensors takes one 0-dim tensor of the CPU as a
number, never one that it writes to; CPU indices into a device's table are legal and the reverse is not; copies go from
anywhere to anywhere. All other operators want every tensor there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from statecli.live import tensor_sources
from statecli.live.tensor_sources import Fault, How, Mismatch, Place, Refused, Source


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that take tensors of any devices: copies, or arguments that only lend a shape, a length or a number.
FREE = _words(
    "copy copy_ _to_copy _copy_from _copy_from_and_resize _foreach_copy_ _foreach_copy lift lift_fresh lift_fresh_copy "
    "device_put resize_as_ resize_as set_ fill fill_ is_same_size is_set_to _has_compatible_shallow_copy_type "
    "_pack_padded_sequence _pad_packed_sequence tensor_split slice_scatter select_scatter diagonal_scatter "
    "as_strided_scatter _ctc_loss ctc_loss record_stream _assert_async _assert_tensor_metadata bernoulli_ "
    "linspace logspace"
)
#: Operators that read `self` at indices, which may be on the CPU while `self` is not.
_INDEXED = _words(
    "index index_put index_put_ _index_put_impl _index_put_impl_ _unsafe_index _unsafe_index_put "
    "_unsafe_masked_index _unsafe_masked_index_put_accumulate"
)
#: Operators whose number of elements per step, `batch_sizes`, lies on the CPU by design.
_PACKED = _words("lstm gru rnn_tanh rnn_relu _cudnn_rnn")
#: Elementwise operators whose CUDA kernels take one 0-dim tensor of the CPU, on either side: `device_check: NoCheck` in
#: torch's native_functions.yaml, and a kernel "with scalars". In place they are the same, with an underscore.
ONE_NUMBER = _words(
    "add sub rsub mul div true_divide floor_divide remainder fmod pow atan2 arctan2 hypot copysign xlogy heaviside "
    "ldexp maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ "
    "__iand__ __ior__ __ixor__ __ilshift__ __irshift__ dist special_zeta special_xlogy special_xlog1py "
    "special_chebyshev_polynomial_t "
    "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w "
    "special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l "
    "special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
    "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w"
)
#: Arguments that may be 0-dim tensors of the CPU, whatever else is: the operator moves them or reads the number.
NUMBERS = {
    "where": _words("condition self other"),
    "masked_fill": _words("value"),
    "index_fill": _words("value"),
    "addcmul": _words("tensor2"),
    "lerp": _words("weight"),
    "binary_cross_entropy_with_logits": _words("weight pos_weight"),
    "soft_margin_loss": _words("target"),
    "allclose": _words("self other"),
}
#: Arguments of the `_foreach_` operators that are a number for each tensor of a list, on the CPU.
_SCALARS = "scalars"

#: torch's own words.
_SAME_DEVICE = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
#: Arguments that an operator reads on the CPU, wherever the rest is, with torch's own words for another device.
ON_CPU = {
    "_pack_padded_sequence": (
        "lengths",
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
    ),
}
#: Operators that are given what Python has just made of a list: nobody can have it by name.
_LIFTS = _words("lift lift_fresh lift_fresh_copy")


@dataclass
class Watch:
    """What the operators of a forward were given. `device` is where the model was moved.

    An operator that CUDA would refuse raises `Refused`, unless it is to be carried over: then it is in `mismatches`.
    `copied` are the model's tensors that forward itself copied to the device, with the line; `touched` all that
    it read while they were not there; `taken` those that an operator takes from elsewhere, and which.
    """

    device: torch.device
    mismatches: list[Mismatch] = field(default_factory=list)
    copied: dict[str, Place | None] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    taken: dict[str, tuple[str, Place | None]] = field(default_factory=dict)
    #: What is carried over so that forward goes on, all else is raised; None: everything is carried but `caught`.
    carried: frozenset[Mismatch] | None = None
    caught: frozenset[Mismatch] = frozenset()
    raised: set[Mismatch] = field(default_factory=set)
    _excused: set[str] = field(default_factory=set)
    # By id, with the tensor, so that no id is given out twice: a weak reference would keep it from being swapped.
    _sources: dict[int, tuple[torch.Tensor, Source]] = field(default_factory=dict)

    def excuse(self, names: Iterable[str]) -> None:
        """These would be on the device, could the move have been pretended of them: they are carried in silence."""
        self._excused.update(names)

    def know(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        """From now on these tensors are known by name; the first name of a tensor counts."""
        for fqn, tensor in names:
            known = self.source(tensor)
            if known is None or known.fqn is None:
                self._sources[id(tensor)] = (tensor, Source(fqn))

    def source(self, tensor: torch.Tensor) -> Source | None:
        """Where `tensor` comes from; None where nobody has told."""
        found = self._sources.get(id(tensor))
        return None if found is None else found[1]

    def _looked_up(self, tensor: torch.Tensor) -> Source | None:
        """`source`; a tensor that nobody has told may be a variable of the model's file."""
        found = self.source(tensor)
        variable = tensor_sources.of_file(tensor) if found is None else None
        if variable is None:
            return found
        return self._sources.setdefault(id(tensor), (tensor, Source(of_file=variable)))[1]

    def refused(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors that CUDA would refuse this operator for; each is noted, or raised as `Refused`."""
        tensors = list(_tensors((args, kwargs)))
        away = [tensor for tensor in tensors if tensor.device != self.device]
        if not away:
            return []
        self._touch(func, away, kwargs)
        wrong = strays(func, args, kwargs, self.device)
        if wrong:
            self._blame(func, wrong, tensors)
        elif len(away) < len(tensors):
            self._take(func, away)
        return wrong

    def off_cpu(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors that this operator wants on the CPU, and which are on the device; noted, or raised."""
        name = name_of(func)
        if name not in ON_CPU:
            return []
        wanted, words = ON_CPU[name]
        given = [one for argument, one in _bound(func, args, kwargs) if argument.name == wanted]
        wrong = [tensor for tensor in _tensors(given) if tensor.device == self.device]
        at = tensor_sources.place(tensor_sources.line())
        found = [self.source(tensor) or Source() for tensor in wrong]
        faults = [Mismatch(one, "", wanted, name.strip("_"), at, Fault.NOT_ON_CPU) for one in found]
        self._object(faults, words)
        return wrong

    def draws(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether CUDA would refuse the generator that this operator is given; it is noted."""
        generator = kwargs.get("generator")
        if generator is None or generator.device.type == self.device.type:
            return False
        asked = kwargs.get("device")
        if asked != self.device and not any(tensor.device == self.device for tensor in _tensors((args, kwargs))):
            return False
        at = tensor_sources.place(tensor_sources.line())
        self._object(
            [Mismatch(Source(), str(generator.device), "", name_of(func).strip("_"), at, Fault.GENERATOR)],
            f"Expected a 'cuda' device type for generator but found '{generator.device.type}'",
        )
        return True

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Where the results come from. What is written to in place comes from what was written to it as well."""
        tensors = list(_tensors(out))
        if not tensors:
            return
        given = [] if name_of(func) in _LIFTS else list(_tensors((args, kwargs)))
        drawn = kwargs.get("generator") is not None
        for tensor in tensors:
            source = self.source(tensor) or self._made(func, tensor, given, drawn)
            if source is not None:
                self._sources[id(tensor)] = (tensor, source)
                others = self._beside(func, args, kwargs, tensor, given)
                if others:
                    self._add(tensor, others, in_place=any(one is tensor for one in given))

    def _add(self, tensor: torch.Tensor, others: list[Source], *, in_place: bool) -> None:
        """`tensor` comes from these too; so does what shares its memory, where it was written to."""
        memory = _memory(tensor) if in_place else None
        for key, (known, source) in list(self._sources.items()) if memory else ():
            if known is not tensor and known.device == tensor.device and _memory(known) == memory:
                self._sources[key] = (known, source.along(others))
        self._sources[id(tensor)] = (tensor, self._sources[id(tensor)][1].along(others))

    def _beside(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor, given: list[torch.Tensor]) -> list[Source]:
        """What of the given has to move with the first of which it is known where it comes from."""
        if out.device == self.device or len(given) < 2:
            return []
        first = next((one for one in given if self.source(one) is not None), None)
        if first is None:
            return []
        wrong = strays(func, args, kwargs, self.device, id(first))
        return [one for one in map(self._looked_up, wrong) if one is not None]

    def _made(self, func: Any, tensor: torch.Tensor, given: list[torch.Tensor], drawn: bool) -> Source | None:
        there = tensor.device == self.device
        ask = self.source if there else self._looked_up
        known = (ask(one) for one in given if one.device == tensor.device)
        named = next((one for one in known if one is not None), None)
        view = getattr(func, "is_view", False)
        if there:
            return named if view else None
        if named is not None:
            return replace(named, derived=named.derived or not view)
        brought = any(one.device == self.device for one in given)
        how = How.BROUGHT if brought else How.COMPUTED if given else How.DRAWN if drawn else How.MADE
        return Source(place=tensor_sources.place(tensor_sources.line()), how=how)

    def _touch(self, func: Any, away: list[torch.Tensor], kwargs: Any) -> None:
        for tensor in away:
            source = self.source(tensor)
            if source is None or source.fqn is None:
                continue
            self.touched.add(source.fqn)
            if name_of(func) == "_to_copy" and kwargs.get("device") == self.device:
                self.copied.setdefault(source.fqn, tensor_sources.place(tensor_sources.line()))

    def _take(self, func: Any, away: list[torch.Tensor]) -> None:
        """Notes what an operator takes from elsewhere while others are on the device."""
        found = [self.source(tensor) for tensor in away]
        names = [one.fqn for one in found if one is not None and one.fqn is not None]
        for name in names:
            self.taken.setdefault(name, (name_of(func).strip("_"), tensor_sources.place(tensor_sources.line())))

    def _blame(self, func: Any, wrong: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        frame = tensor_sources.line()
        other = next(tensor for tensor in tensors if tensor.device == self.device)
        known = self.source(other)
        named = known.fqn if known is not None and known.fqn is not None else tensor_sources.local(frame, other)
        found = []
        for tensor in wrong:
            device = str(tensor.device).replace("meta", "cpu")
            for source in (self._looked_up(tensor) or Source()).each:
                if source.fqn not in self._excused:
                    found.append(
                        Mismatch(source, device, named or "", name_of(func).strip("_"), tensor_sources.place(frame))
                    )
        self._object(found, _SAME_DEVICE)

    def _object(self, found: list[Mismatch], words: str) -> None:
        """Note these, or raise them."""
        if any(self._raises(one) for one in found):
            self.raised.update(found)
            raise Refused(words, found)
        for one in found:
            if not any(one.is_as(before) for before in self.mismatches):
                self.mismatches.append(one)

    def _raises(self, one: Mismatch) -> bool:
        if self.carried is None:
            return one in self.caught
        return not any(one.is_as(known) for known in self.carried)


def strays(func: Any, args: Any, kwargs: Any, device: torch.device, moved: int = 0) -> list[torch.Tensor]:
    """The tensors that are not on `device` although CUDA asks `func` for all of them there; [] for a legal call.

    The tensor of the id `moved` is looked at as if it were there.
    """
    name = name_of(func)
    if name in FREE or name.endswith("_like") or name.startswith("new_"):
        return []
    tensors = list(_tensors((args, kwargs)))
    if name.startswith("_foreach_"):
        return _of_lists(func, args, kwargs, device, moved)
    if name in _INDEXED:
        tensors = _indexed(args, kwargs, device, tensors, moved)
    elif name in _PACKED:
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.int64]
    away = [tensor for tensor in tensors if not _is_there(tensor, device, moved)]
    if len(away) == len(tensors):
        return []
    numbers = _numbers(func, args, kwargs, away)
    return [tensor for tensor in away if id(tensor) not in numbers]


def _is_there(tensor: torch.Tensor, device: torch.device, moved: int) -> bool:
    return tensor.device == device or id(tensor) == moved


def _numbers(func: Any, args: Any, kwargs: Any, away: list[torch.Tensor]) -> set[int]:
    """The ids of those 0-dim tensors that this operator takes as mere numbers. What it writes to is none."""
    name = name_of(func).removeprefix("_foreach_")
    kind = name if name in ONE_NUMBER else name.removesuffix("_")
    given = {argument.name: one for argument, one in _bound(func, args, kwargs) if not _is_written(argument)}
    if func.namespace == "aten" and not name.endswith("_backward"):
        free = given.keys() if kind in ONE_NUMBER else NUMBERS.get(kind, frozenset())
    else:
        free = given.keys()  # what another library's operator takes is not known
    numbers = {id(one) for key in free for one in _tensors(given.get(key)) if not one.dim()}
    found = {id(one) for one in away} & numbers
    return found if kind not in ONE_NUMBER or len(found) < 2 else set()  # "too many CPU scalars"


def _bound(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The operator's arguments as its schema has them, each with what is given for it."""
    declared = func._schema.arguments
    named = {argument.name: argument for argument in declared}
    return [*zip(declared, args, strict=False), *((named[key], one) for key, one in kwargs.items() if key in named)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _of_lists(func: Any, args: Any, kwargs: Any, device: torch.device, moved: int) -> list[torch.Tensor]:
    """A `_foreach_` operator is one call for each place in its lists: the first of all, the second of all, ..."""
    bound = [(argument, one) for argument, one in _bound(func, args, kwargs) if argument.name != _SCALARS]
    lists = [list(_tensors(one)) for _, one in bound if isinstance(one, (list, tuple))]
    wrong: dict[int, torch.Tensor] = {}
    for at in range(max(map(len, lists), default=0)):

        def here(one: Any, at: int = at) -> Any:
            return one[at] if isinstance(one, (list, tuple)) and at < len(one) else one

        call = {argument.name: here(one) for argument, one in bound}
        tensors = [one for one in call.values() if isinstance(one, torch.Tensor)]
        away = [one for one in tensors if not _is_there(one, device, moved)]
        if len(away) < len(tensors):
            numbers = _numbers(func, (), call, away)
            wrong.update({id(one): one for one in away if id(one) not in numbers})
    return list(wrong.values())


def _indexed(
    args: Any, kwargs: Any, device: torch.device, tensors: list[torch.Tensor], moved: int
) -> list[torch.Tensor]:
    """What of an indexing must be on one device: all but the indices where the table is there."""
    table = args[0] if args else kwargs["self"]
    if not _is_there(table, device, moved):
        # The indices are right: it is the table (and what is written to it) that is not there.
        return [table, *(tensor for tensor in tensors if _is_there(tensor, device, moved))]
    values = _tensors((args[2:], kwargs.get("values")))
    return [table, *(tensor for tensor in values if tensor.dim())]


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks `watch` before each operator. What CUDA would refuse raises, or is carried over so that forward goes on."""

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
            args, kwargs = self._carried((args, kwargs), wrong, self._watch.device)
        off = self._watch.off_cpu(func, args, kwargs)
        if off:
            args, kwargs = self._carried((args, kwargs), off, torch.device("cpu"))
        if self._watch.draws(func, args, kwargs):
            kwargs = {**kwargs, "generator": None}
        out = self.run(func, args, kwargs)
        self._watch.note(func, args, kwargs, out)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out what is legal by now."""
        return func(*args, **kwargs)

    def _carried(self, tree: Any, wrong: list[torch.Tensor], device: torch.device) -> Any:
        """`tree` with these tensors copied to `device`."""
        ids = {id(tensor) for tensor in wrong}

        def there(one: torch.Tensor) -> Any:
            # Not `.to`: below autograd that is no copy yet.
            copy = torch.ops.aten._to_copy.default
            return self.run(copy, (one,), {"device": device}) if id(one) in ids else one

        return tree_map_only(torch.Tensor, there, tree)


def _memory(tensor: torch.Tensor) -> int | None:
    """What tells storages apart; None for a layout without one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def name_of(func: Any) -> str:
    """The operator without its overload: `add` of `aten.add.Tensor`."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func.__name__)
