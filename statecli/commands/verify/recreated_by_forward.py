"""What forward makes anew of what an earlier forward left behind: caches by device, attention maps.

Each is measured. A map: the next forward replaces it, though it had been overwritten. A cache: a forward after a move
to another device, or a cast, does not read what is there, and leaves another in its place or beside it. What every
forward adds (a history) is no cache.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from statecli.commands.verify import judging, tensor_bits
from statecli.commands.verify.model_under_test import Subject
from statecli.core.errors import ModelError
from statecli.live import fake_gpu, fake_gpu_values, measure
from statecli.live.device_rules import Watch, Watching
from statecli.live.tensors import storage

EACH_TIME = "every forward makes it anew, whatever it held"
ELSEWHERE = "forward makes it anew for another {}"
#: What to do about one that forward does not make anew.
MEND = "an earlier forward left it there: keep one for each {0}, or make it again where the {0} is another"


def each_time(subject: Subject) -> frozenset[str]:
    """What appeared, and a second forward replaces by a tensor of the same bits though it had been overwritten."""
    try:
        module = subject.used(values=True)
    except ModelError:
        return frozenset()
    found = judging.tensors(module)
    appeared = {name: found[name] for name in subject.appeared if name in found}
    known = {name: (tensor, judging.values_of(tensor)) for name, tensor in appeared.items()}
    put_back = tensor_bits.keeper(
        appeared.values()
    )  # all instances share some, the user's too: a memo, a dict of the class
    try:
        tensor_bits.perturb(appeared.values())
        subject.call(module)
    except ModelError:
        return frozenset()  # it reads what was overwritten
    finally:
        put_back()
    after = judging.tensors(module)
    return frozenset(
        name
        for name, (tensor, values) in known.items()
        if name in after and after[name] is not tensor and values is not None and tensor_bits.same(values, after[name])
    )


# --- on another device, of another dtype ------------------------------------------------------------------------------


@dataclass
class Again:
    """What a forward on another device or of another dtype did with what the first one had left, by name.

    `made` anew, or `read`; `reason` is why the others cannot be told.
    """

    made: frozenset[str] = frozenset()
    read: set[str] = field(default_factory=set)
    reason: str | None = None


@dataclass(frozen=True)
class _Way:
    """`to` is where the model goes, `shown` in words; `arrived` says it of a tensor, `stage` is where all of it is."""

    to: torch.device | torch.dtype
    shown: str
    arrived: Callable[[torch.Tensor], bool]
    stage: Callable[[], AbstractContextManager[object]]
    values: bool = True

    def moved(self, leaf: Any) -> Any:
        """An input as the model gets it there."""
        if isinstance(self.to, torch.dtype):
            return leaf.to(self.to) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        return leaf.to(self.to) if callable(getattr(leaf, "to", None)) else leaf


def of_dtype(subject: Subject, dtype: torch.dtype) -> Again:
    """By a forward of an instance, and of inputs, that were cast to `dtype`."""
    return _again(subject, [_Way(dtype, f"as {dtype}", lambda tensor: tensor.dtype == dtype, torch.no_grad)])


def on_device(subject: Subject, wanted: str) -> Again:
    """By a forward on `wanted`, if that is a GPU; else on a pretended one, without data and, if need be, with."""
    pretended = wanted in (fake_gpu.SHOWN, "cpu", "meta")
    device = fake_gpu.DEVICE if pretended else torch.device(wanted)
    stages: list[tuple[fake_gpu.Stage, bool]] = [(_watched, True)]
    if pretended:
        stages = [(fake_gpu.faked, False), (fake_gpu_values.pretended, True)]

    def arrived(tensor: torch.Tensor) -> bool:
        return fake_gpu.true_device(tensor) == device

    shown = f"on {fake_gpu.SHOWN if pretended else wanted}"
    return _again(
        subject,
        [_Way(device, shown, arrived, lambda stage=stage: stage(Watch(device)), v) for stage, v in stages],  # type: ignore[misc]
    )


@contextmanager
def _watched(watch: Watch) -> Iterator[fake_gpu.Kept]:
    """Carries over what CUDA refuses, as a pretended GPU does."""
    with Watching(watch):
        yield fake_gpu.Kept(lambda: None)


def _again(subject: Subject, ways: Iterable[_Way]) -> Again:
    """By the first way that comes to its end."""
    again = Again()
    for way in ways:
        again = Again()
        try:
            again.made = _made(subject, way, again.read)
            break
        except ModelError as error:
            again.reason = fake_gpu.why(judging.reason_of(subject, error), error.__cause__)
    again.made -= again.read
    return again


def _made(subject: Subject, way: _Way, read: set[str]) -> frozenset[str]:
    module = subject.used(values=way.values)
    with judging.class_attributes_kept(module), way.stage(), torch.no_grad():
        with subject.user_code("moving it"):
            module = measure.moved(module, module.to(way.to))
        before = judging.tensors(module)
        left = {name: before[name] for name in subject.appeared if name in before and not way.arrived(before[name])}
        with subject.user_code(f"calling it {way.shown}"), _Reading(left, read):
            args, kwargs = tree_map(way.moved, subject.inputs.make(seed=0))  # type: ignore[union-attr]
            module.eval()(*args, **kwargs)
        after = judging.tensors(module)
    known = {id(tensor) for tensor in before.values()}
    new = {name: tensor for name, tensor in after.items() if id(tensor) not in known and way.arrived(tensor)}
    in_place = {name for name in left if name in new}
    beside = Counter(_alike(name, tensor) for name, tensor in new.items() if name not in left)
    wanted = Counter(_alike(name, tensor) for name, tensor in left.items() if name not in in_place)
    growing = _growing(subject) if wanted else frozenset()
    kept = {name for name in left if name not in in_place and _pattern(name) not in growing}
    return frozenset(in_place | {n for n in kept if beside[_alike(n, left[n])] >= wanted[_alike(n, left[n])]})


def _pattern(name: str) -> str:
    """`cache[]` of `cache['cpu']`, and of each other entry."""
    return re.sub(r"\[[^\]]*\]", "[]", name)


def _alike(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return _pattern(name), tuple(tensor.shape)


def _growing(subject: Subject) -> frozenset[str]:
    """The containers that get a new entry with each forward."""
    module = subject.used()
    before = judging.tensors(module)
    subject.call(module)
    return frozenset(_pattern(name) for name in judging.tensors(module) if name not in before)


class _Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds to `read` the names of those tensors, or of views of them, that an operator is given."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], read: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_key(tensor): name for name, tensor in tensors.items()}
        self._read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # a question, no operator
            given = (_key(one) for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor))
            self._read.update(self._names[key] for key in given if key in self._names)
        return func(*args, **(kwargs or {}))


def _key(tensor: torch.Tensor) -> object:
    """What a tensor and its views have in common; of one without data, itself."""
    return (id(tensor), FakeTensor) if isinstance(tensor, FakeTensor) else storage(tensor)[0]
