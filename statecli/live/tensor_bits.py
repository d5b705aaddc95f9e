"""Overwrite every element of tensors, and compare two tensors bit by bit.

The comparison is of bits, not numbers: NaNs are compared by their bits, and -0.0 differs from 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from statecli.live.tensors import has_memory, identify_storage, is_lazy, split_parts

#: Number of different values before the pattern of `perturb` repeats. A prime, so that neighbouring rows of a matrix
#: hardly ever begin with the same value.
PATTERN_PERIOD = 251
_SIGNED_DTYPE_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PART_DTYPE_BY_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool | None:
    """Return True if two tensors have equal dtype, shape and bits, or None if their bits cannot be read.

    Lazy, nested and opaque tensors have no bits to read, nor have tensors on meta.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if is_lazy(first) or is_lazy(second):
            return None
        try:
            if first.dtype != second.dtype or first.layout != second.layout or first.shape != second.shape:
                return False
            return all(
                _is_equal(*pair)
                for pair in zip(_get_comparable_parts(first), _get_comparable_parts(second), strict=True)
            )
        except Exception:  # noqa: BLE001 - operators of a tensor subclass may raise anything, such as AssertionError
            return None


def _get_comparable_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_meta or tensor.is_nested:
        raise NotImplementedError
    if tensor.is_quantized:
        return [tensor.int_repr(), *_get_scales(tensor)]
    return [part.resolve_conj().resolve_neg() for part in split_parts(tensor.detach())]


def _get_scales(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([tensor.q_scale(), tensor.q_zero_point()])]
    return [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    flats = [tensor.contiguous().reshape(-1) for tensor in (first, second)]
    compares_words = all(map(_can_view_as_words, flats))
    return torch.equal(*(flat.view(torch.int64) if compares_words else _view_as_integers(flat) for flat in flats))


def _can_view_as_words(flat: torch.Tensor) -> bool:
    """Return True if the memory can be read as eight-byte words. This is three times as fast for small elements."""
    size = flat.element_size()
    return flat.numel() >= 8 and not (flat.numel() * size % 8 or flat.storage_offset() * size % 8)


def _view_as_integers(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_SIGNED_DTYPE_BY_SIZE.get(flat.element_size(), torch.int64))


def perturb(tensors: Iterable[torch.Tensor], *, phase: int = 0, ends_alone: bool = False) -> set[int | str]:
    """Overwrite every element of all tensors. Return the overwritten storages. `phase` selects the written values.

    Floating-point and complex tensors get numbers strictly between 0 and 1 beyond the precision of smaller formats, so
    that rounding changes each number. Integers and bools change in their lowest bit, so that an index stays close. Each
    storage is written once, for ties, views and expanded tensors. Tensors without memory (lazy, meta, opaque, wrapper
    subclasses) are left out. With `ends_alone` only the first and last elements of a long tensor are written.
    """
    overwritten_storages: set[int | str] = set()
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for tensor in tensors:
            key = identify_storage(tensor)
            flat = None if key in overwritten_storages else get_flat_memory(tensor)
            if flat is not None and flat.numel():
                overwritten_storages.add(key)
                for section in _get_ends(flat) if ends_alone else (flat,):
                    _overwrite(section, phase + len(overwritten_storages))
    return overwritten_storages


def get_flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return all memory of `tensor` as a writable one-dimensional tensor, or None if it has no writable memory."""
    try:
        if is_lazy(tensor) or tensor.is_meta or tensor.is_nested:
            return None
        values = split_parts(tensor)[0]
        store = values.untyped_storage()
        if not has_memory(store):
            return None
        dtype = torch.uint8 if tensor.is_quantized else values.dtype
        flat = torch.empty(0, dtype=dtype, device=store.device)
        return flat.set_(store, 0, (store.nbytes() // flat.element_size(),))  # type: ignore[call-overload,no-any-return]
    except Exception:  # noqa: BLE001 - see `is_same`
        return None


def build_restore(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Return a function that restores the present values of all memory of `tensors`."""
    by_storage = {identify_storage(tensor): tensor for tensor in tensors}
    flats = [flat for flat in map(get_flat_memory, by_storage.values()) if flat is not None]
    saved_values = [(flat, flat.clone()) for flat in flats]

    def restore() -> None:
        for flat, values in saved_values:
            flat.copy_(values)

    return restore


def _get_ends(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (flat,) if flat.numel() <= 2 * PATTERN_PERIOD else (flat[:PATTERN_PERIOD], flat[-PATTERN_PERIOD:])


def _overwrite(flat: torch.Tensor, shift: int) -> None:
    if flat.dtype in _PART_DTYPE_BY_COMPLEX:
        flat = flat.view(_PART_DTYPE_BY_COMPLEX[flat.dtype])
    if flat.dtype not in _FLOATS:
        _view_as_integers(flat).bitwise_xor_(1)
        return
    row = _build_row(flat.dtype, flat.device, shift)
    period_end = flat.numel() // PATTERN_PERIOD * PATTERN_PERIOD
    flat[:period_end].view(-1, PATTERN_PERIOD).copy_(row.expand(period_end // PATTERN_PERIOD, PATTERN_PERIOD))
    flat[period_end:].copy_(row[: flat.numel() - period_end])


def _build_row(dtype: torch.dtype, device: torch.device, shift: int) -> torch.Tensor:
    """Return k / 255 for each k from 1 to `PATTERN_PERIOD`, shifted. The last bit is 1, except in bfloat16."""
    row = ((torch.arange(PATTERN_PERIOD, device=device) + shift) % PATTERN_PERIOD + 1).to(dtype) / (PATTERN_PERIOD + 4)
    if dtype is not torch.bfloat16:  # its eight bits are those of k
        _view_as_integers(row).bitwise_or_(1)
    return row
