"""Records of tensors in C (`_native.c`), where there was a compiler when statecli was installed."""

from typing import Any

#: Number of this interface: `compiled_records` uses no other.
VERSION: int

def take_records(
    data: bytes,
    position: int,
    end: int,
    limit: int,
    stack: list[Any],
    memo: list[Any],
    persistent: list[Any],
    shapes: Any,
    call: type,
    storage: type,
    function: Any,
    hooks: Any,
    /,
) -> tuple[int, int]:
    """Read entries of a state_dict from byte `position` on, to byte `end` and at most `limit` of them.

    An entry is a name and a tensor exactly as torch writes them, whose calls are those of `function` and `hooks`. The
    values are added to `stack`, `memo` (which has no gaps) and `persistent`; `shapes` maps opcodes to tuples, `call`
    and `storage` are the classes of the nodes.

    Returns the byte after the last whole entry, and the number of entries.
    """
