"""Recognise the storages of tensors that `pickle.dump` wrote, not `torch.save`.

Such a pickle calls `torch.storage._load_from_bytes` with the bytes of a file of torch.save, in the format from before
torch 1.6: five pickles and the values. Source: `UntypedStorage.__reduce__` in torch/storage.py of torch 2.13.
"""

from __future__ import annotations

from statecli.core.errors import MalformedError
from statecli.pickles.machine import read_pickle
from statecli.pickles.nodes import Global, Persistent, Value
from statecli.storage.checkpoint_names import LEGACY_MAGIC_NUMBER

LOAD_FUNCTION = "torch.storage._load_from_bytes"
MISUSE = "unpickles its argument without any restriction, and the argument is not the storage of a tensor"
#: Maximum size in bytes of the first four pickles; torch writes about 300.
_MAX_HEAD_BYTES = 4096


def holds_storage(data: bytes) -> bool:
    """Return True if the bytes begin like a legacy file of torch.save that holds one storage."""
    head, end = data[:_MAX_HEAD_BYTES], 0
    roots: list[Value] = []
    if head[:1] != b"\x80":  # only such bytes are always scanned as a pickle
        return False
    try:
        for _ in ("magic number", "version", "machine", "object"):
            pickle = read_pickle(head, start=end)
            roots.append(pickle.root)
            end = pickle.end
    except MalformedError:
        return False
    magic, _version, _machine, root = roots
    pid = root.pid if type(root) is Persistent else ()
    is_storage = type(pid) is tuple and len(pid) > 1 and pid[0] == "storage" and type(pid[1]) is Global
    return is_storage and type(magic) is int and magic == LEGACY_MAGIC_NUMBER
