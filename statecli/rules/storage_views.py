"""Which tensors lie in which storage, and what each of them has of it: what the rules about storage judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod

import msgspec

from statecli.core.dtypes import BITS, PACKED, nbytes
from statecli.core.state import ByteRange, ModelState, Place, TensorData, TensorInfo


class View(msgspec.Struct, frozen=True):
    """What a tensor has of a storage: bytes `start` to `end`, of which it holds `held`; expanded ones count once.

    `form` is dtype, shape and strides: tensors of equal views are one tensor under two names. `steps` are (count,
    stride) of its dimensions in bytes, those of an element among them; None where they are not known.
    """

    start: int
    end: int
    held: int
    form: tuple[object, ...]
    steps: tuple[tuple[int, int], ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether it has every byte from its start to its end."""
        return self.steps is not None and len(self.steps) == 1


class Storage(msgspec.Struct):
    """One storage of `size` bytes and the tensors that lie in it, in order, each with the piece of it that does.

    `where` and the pieces are None for a live one.
    """

    size: int
    where: ByteRange | None
    users: list[tuple[TensorInfo, TensorData | None]]

    @property
    def plain(self) -> bool:
        """Whether one tensor has all of it, from its first byte to its last: so nearly all of them are."""
        if len(self.users) > 1:
            return False
        tensor, piece = self.users[0]
        return tensor.nbytes == self.size and (piece is None or (piece is tensor.data and piece.strides is None))

    @property
    def views(self) -> dict[View, list[TensorInfo]]:
        """Each view with the tensors that have it."""
        found: dict[View, list[TensorInfo]] = {}
        for tensor, piece in self.users:
            view = _of_live(tensor, self.size) if piece is None else _of_piece(piece)
            found.setdefault(view, []).append(tensor)
        return found

    @property
    def place(self) -> Place | None:
        """Its bytes in the file, if one file has all of it."""
        return self.where.place if self.where else None

    @property
    def unused(self) -> int:
        """Bytes that are certainly no tensor's: outside all extents, or beyond what all tensors together hold."""
        reach = covered = 0
        views = sorted(self.views, key=lambda view: view.start)
        for view in views:
            covered += max(view.end - max(view.start, reach), 0)
            reach = max(reach, view.end)
        return self.size - min(covered, sum(view.held for view in views))


def storages(state: ModelState) -> list[Storage]:
    """All that hold bytes of its tensors, in order of first mention. What a file has on meta has none."""
    live = state.traits.is_class
    found: dict[object, Storage] = {}
    for tensor in state.tensors:
        if live:
            size = tensor.storage_bytes or 0
            if size and tensor.storage is not None:
                found.setdefault(tensor.storage, Storage(size, None, [])).users.append((tensor, None))
            continue
        for piece in _pieces(tensor):
            where = piece.storage
            if where.length and piece.inline is None:
                known = found.get(where)
                if known is None:
                    found[where] = known = Storage(where.length, where, [])
                known.users.append((tensor, piece))
    return list(found.values())


def _pieces(tensor: TensorInfo) -> Iterator[TensorData]:
    for piece in (tensor.data, *(piece for _, piece in tensor.parts)):
        if piece is not None:
            yield piece
            if piece.quantizer is not None:
                yield from (one for one in (piece.quantizer.scales, piece.quantizer.zero_points) if one)


def _of_live(tensor: TensorInfo, size: int) -> View:
    """Strides are not recorded of a live tensor: where it ends is not known."""
    return View(0, size, tensor.nbytes, (tensor.dtype, tensor.shape, tensor.storage_offset))


def _of_piece(piece: TensorData) -> View:
    held, last = prod(piece.shape), prod(piece.shape) - 1
    if held and piece.strides:
        steps = [(size, stride) for size, stride in zip(piece.shape, piece.strides, strict=True) if stride]
        held, last = prod(size for size, _ in steps), sum((size - 1) * stride for size, stride in steps)
    start, end = nbytes(piece.dtype, piece.offset), nbytes(piece.dtype, piece.offset + last + 1)
    return View(start, end, nbytes(piece.dtype, held), (piece.dtype, piece.shape, piece.strides), _steps(piece, held))


def _steps(piece: TensorData, held: int) -> tuple[tuple[int, int], ...] | None:
    """Merged where one dimension continues the next; None for elements of less than a byte with gaps between them."""
    size = BITS.get(piece.dtype, 0) // 8
    if not size or piece.dtype in PACKED:
        return None if piece.strides else ((nbytes(piece.dtype, held), 1),)
    steps = [(size, 1)]
    strided = zip(piece.shape, piece.strides, strict=True) if piece.strides else [(held, 1)]
    for count, stride in sorted(((n, by * size) for n, by in strided if n > 1 and by), key=lambda step: step[1]):
        inner, by = steps[-1]
        if inner * by == stride:
            steps[-1] = (inner * count, by)
        else:
            steps.append((count, stride))
    return tuple(steps)


#: How often a group of views is parted again.
_ROUNDS = 8


def apart(views: Sequence[View]) -> Iterator[list[View]]:
    """The views in groups, each in order of their starts, where no view has a byte of another group's.

    They are parted where their extents are, then by what they have of each period of their outermost strides: so all
    columns of a matrix are apart, whose extents are not.
    """
    waiting = [(list(views), 0)]
    while waiting:
        group, rounds = waiting.pop()
        parts = _parted([(view.start, view.end, view) for view in group])
        if len(parts) == 1 and len(group) > 1:
            parts = _by_period(group)
        if len(parts) == 1 or rounds == _ROUNDS:
            yield sorted(group, key=lambda view: (view.start, -view.end))
        else:
            waiting += ((part, rounds + 1) for part in reversed(parts))


def _parted(spans: list[tuple[int, int, View]]) -> list[list[View]]:
    """The views in the fewest groups whose spans lie apart, in order."""
    parts: list[list[View]] = []
    reach = 0
    for start, end, view in sorted(spans, key=lambda span: span[:2]):
        if not parts or start >= reach:
            parts.append([])
        parts[-1].append(view)
        reach = max(reach, end)
    return parts


def _by_period(views: list[View]) -> list[list[View]]:
    period = gcd(*(view.steps[-1][1] for view in views if view.steps and len(view.steps) > 1))
    if not period:
        return [views]
    base = min(view.start for view in views)
    return _parted([(*_within(view, view.start - base, period), view) for view in views])


def _within(view: View, start: int, period: int) -> tuple[int, int]:
    """Between which bytes of any period it has some. All between 0 and `period` where it goes on into the next."""
    inner = sum((count - 1) * stride for count, stride in view.steps or () if stride % period)
    first, end = start % period, start % period + inner + 1
    return (first, end) if view.steps and end <= period else (0, period)


def share(one: View, other: View, work: list[int]) -> bool | None:
    """Whether a byte is in both; None where that cannot be told within `work[0]` tries, which are used up.

    The bytes of a view are its start plus 0 to count - 1 times each stride. So a byte is in both if and only if the
    distance of their starts is a sum of the one's steps less one of the other's; these are turned around, to count up
    from its last byte.
    """
    if one.end <= other.start or other.end <= one.start or not (one.held and other.held):
        return False
    if one.whole and other.whole:
        return True
    work[0] -= 1
    if one.steps is None or other.steps is None or work[0] < 0:
        return None
    reach = sum((count - 1) * stride for count, stride in other.steps)
    most: dict[int, int] = {}
    for count, stride in (*one.steps, *other.steps):
        most[stride] = most.get(stride, 0) + count - 1
    strides = sorted(most.items(), reverse=True)
    return _reaches(other.start + reach - one.start, strides, work)


def _reaches(distance: int, strides: list[tuple[int, int]], work: list[int]) -> bool | None:
    """Whether `distance` is a sum of the strides, each taken at most as often as it says; None where work ran out."""
    (stride, most), *rest = strides
    if not rest:
        return distance % stride == 0 and 0 <= distance // stride <= most
    within = sum(by * count for by, count in rest)
    first, last = max(-((within - distance) // stride), 0), min(distance // stride, most)
    for times in range(first, last + 1):
        work[0] -= 1
        found = None if work[0] < 0 else _reaches(distance - times * stride, rest, work)
        if found is not False:
            return found
    return False
