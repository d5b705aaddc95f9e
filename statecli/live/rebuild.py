"""Compare two builds of a model, to find the tensors with the same bits in each build."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from statecli.live import measure, tensor_bits
from statecli.live.skip_random_init import LARGE_PARAMETER_ELEMENTS
from statecli.live.tensors import identify_storage


class Rebuild(Enum):
    """Result of comparing the tensors of two builds with different seeds."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    #: The constructor creates no tensor of this name.
    ABSENT = "absent"
    #: Both builds hold the same memory, such as an attribute of the class.
    SHARED = "shared"
    #: The tensors have no bits to read.
    UNKNOWN = "unknown"


def compare_builds(build: Callable[[int], nn.Module], largest_by_name: Mapping[str, int]) -> dict[str, Rebuild]:
    """Build a model twice, with the seeds 0 and 1, and compare the tensors of the given names.

    `largest_by_name` maps the names to their numbers of elements. Raises the errors of `build`.
    """
    names = largest_by_name.keys()
    skip_fills = _SkipLargeFills(max(largest_by_name.values(), default=0))
    with _fill_memory():
        first, second = (_build_tensors(build, seed, names, skip_fills) for seed in (0, 1))
    return {name: _compare(first.get(name), second.get(name)) for name in names}


def _build_tensors(
    build: Callable[[int], nn.Module], seed: int, names: Set[str], skip_fills: _SkipLargeFills
) -> dict[str, torch.Tensor]:
    with skip_fills:
        module = build(seed)
    return {name: tensor for name, tensor in measure.map_tensors(module).items() if name in names}


def _compare(first: torch.Tensor | None, second: torch.Tensor | None) -> Rebuild:
    if first is None or second is None:
        return Rebuild.ABSENT
    is_equal = tensor_bits.is_same(first, second)
    if is_equal and first.numel() and identify_storage(first) == identify_storage(second):
        return Rebuild.SHARED
    return Rebuild.UNKNOWN if is_equal is None else Rebuild.IDENTICAL if is_equal else Rebuild.DIFFERENT


class _SkipLargeFills(TorchFunctionMode):
    """Skip fills of `torch.empty` tensors larger than all compared tensors: such fills dominate a build's time."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._max_elements = max(elements, LARGE_PARAMETER_ELEMENTS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.empty or self._count_elements(*args, **(kwargs or {})) <= self._max_elements:
            return func(*args, **(kwargs or {}))
        was = torch._C._get_deterministic_fill_uninitialized_memory()
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch._C._set_deterministic_fill_uninitialized_memory(was)

    @staticmethod
    def _count_elements(*size: Any, **kwargs: Any) -> int:
        shape = kwargs.get("size", size)
        dims = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return math.prod(size_ if isinstance(size_, int) else 0 for size_ in dims)


@contextmanager
def _fill_memory() -> Iterator[None]:
    """Make `torch.empty` return equal values each time, as torch does only with deterministic algorithms."""
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._C._set_deterministic_algorithms(True, warn_only=True)  # torch's own call imports inductor first, 1.2 s
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(mode, warn_only=warns)
