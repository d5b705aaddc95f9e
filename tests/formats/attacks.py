"""Builders of hostile and odd files, byte by byte: pickles from opcodes, zips with any field set wrong.

This module does not need torch. The tests unpickle only files that they wrote themselves.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

PROTO = b"\x80\x02"
STOP = b"."


def text(value: str) -> bytes:
    """BINUNICODE."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Return the opcode that the pickler of protocol 2 chooses for the number."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<i", len(data)) + data


def numbers(*values: int) -> bytes:
    """A tuple of ints."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    key: str = "0",
    numel: int = 4,
    size: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    offset: int = 0,
    kind: str = "FloatStorage",
) -> bytes:
    """Return the opcodes of a single `_rebuild_tensor_v2` call, without memo."""
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    geometry = number(offset) + numbers(*size) + numbers(*stride)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + geometry + b"\x89" + hooks + b"tR"


def build_pickle(body: bytes) -> bytes:
    """Return a complete pickle of protocol 2 whose result is the object that `body` builds."""
    return PROTO + body + STOP


class Called:
    """Object that is pickled as any call, with a state to set or items to append afterwards."""

    def __init__(self, *reduction):
        self.reduction = reduction

    def __reduce__(self):
        return self.reduction


class Call(Called):
    """Object that is pickled as a call of a function."""

    def __init__(self, function, *arguments):
        super().__init__(function, arguments)


def four(body: bytes) -> bytes:
    """A pickle of protocol 4."""
    return b"\x80\x04" + body + b"."


def put(index: int) -> bytes:
    """LONG_BINPUT."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """LONG_BINGET."""
    return b"j" + struct.pack("<I", index)


def short(value: str | bytes) -> bytes:
    """SHORT_BINUNICODE or SHORT_BINBYTES."""
    data = value.encode() if isinstance(value, str) else value
    return (b"\x8c" if isinstance(value, str) else b"C") + bytes([len(data)]) + data


def global_name(module: str, name: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def stack_global(module: str, name: str) -> bytes:
    """STACK_GLOBAL, as protocol 4 names a global; the name may have dots."""
    return short(module) + short(name) + b"\x93"


def call_function(function: bytes, *args: bytes) -> bytes:
    """REDUCE: call the object pushed by `function` with the objects pushed by `args`."""
    return function + b"(" + b"".join(args) + b"tR"


def call_global(module: str, name: str, *args: bytes) -> bytes:
    """REDUCE: call a global with the objects pushed by `args`."""
    return call_function(stack_global(module, name), *args)


def state_dict(**tensors: bytes) -> bytes:
    """A pickled dict of tensors."""
    return build_pickle(b"}(" + b"".join(text(name) + body for name, body in tensors.items()) + b"u")


def hash_bomb() -> bytes:
    """Return a dict whose key is t = (t, t), 64 times over: hashing the key takes 2**64 steps."""
    return build_pickle(b"}" + number(1) + b"".join(b"q\1h\1\x86" for _ in range(64)) + b"Ns")


def deep_key(depth: int) -> bytes:
    """Return a dict whose key is a tuple nested `depth` times: hashing the key recurses in C."""
    return build_pickle(b"})" + b"\x85" * depth + b"Ns")


def colliding_ints(count: int) -> bytes:
    """Return a dict whose keys are integers that all hash to 0."""
    prime = 2**61 - 1
    return build_pickle(b"}(" + b"".join(number(prime * n) + b"N" for n in range(1, count + 1)) + b"u")


@dataclass
class Member:
    """One zip record. Each optional field contradicts the content where the field is not None."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0x0808
    packed: bytes | None = None
    crc: int | None = None
    size: int | None = None
    packed_size: int | None = None
    offset: int | None = None
    disk: int = 0
    marks: int = 0
    zip64: bool = False
    local_name: bytes | None = None
    local_method: int | None = None
    local_flags: int | None = None
    local_signature: bytes = b"PK\3\4"
    local_extra_length: int | None = None

    @property
    def raw_name(self) -> bytes:
        return self.name.encode() if isinstance(self.name, str) else self.name

    @property
    def content(self) -> bytes:
        if self.packed is not None:
            return self.packed
        if self.method != 8:
            return self.data
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return packer.compress(self.data) + packer.flush()

    def local(self, position: int) -> bytes:
        """Return the local header, padding to 64 bytes as in torch's files, content and descriptor."""
        name = self.raw_name if self.local_name is None else self.local_name
        pad = -(position + 30 + len(name) + 4) % 64
        extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
        length = len(extra) if self.local_extra_length is None else self.local_extra_length
        flags = self.flags if self.local_flags is None else self.local_flags
        method = self.method if self.local_method is None else self.local_method
        head = struct.pack("<4sHHHHHIIIHH", self.local_signature, 0, flags, method, 0, 0, 0, 0, 0, len(name), length)
        after = (
            struct.pack("<4sIII", b"PK\7\x08", self._crc, len(self.content), len(self.data)) if self.content else b""
        )
        return head + name + extra + self.content + after

    def central(self, position: int) -> bytes:
        """Return the entry of the central directory."""
        size = len(self.data) if self.size is None else self.size
        packed = len(self.content) if self.packed_size is None else self.packed_size
        offset = position if self.offset is None else self.offset
        extra = b""
        if self.zip64:
            extra = struct.pack("<HHQQQ", 1, 24, size, packed, offset)
            size = packed = offset = 0xFFFFFFFF
        fields = (self.flags, self.method, 0, 0, self._crc, packed, size, len(self.raw_name), len(extra), 0, self.disk)
        return (
            struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 0, *fields, 0, self.marks, offset) + self.raw_name + extra
        )

    @property
    def _crc(self) -> int:
        return zlib.crc32(self.data) if self.crc is None else self.crc


@dataclass
class Lies:
    """False statements of the end records of a zip."""

    count: int = 0
    directory_at: int = 0
    directory_size: int = 0
    disk: int = 0
    locator: int = 0
    zip64: bool = True
    only_in_zip64: bool = False
    comment: bytes = b""
    missing_locator: bool = False


def build(members: list[Member], lies: Lies | None = None, *, prefix: bytes = b"", suffix: bytes = b"") -> bytes:
    """Return a zip archive of these records, in this order, with the end records of torch."""
    lies = lies or Lies()
    body, directory = b"", b""
    for member in members:
        position = len(body)
        body += member.local(position)
        directory += member.central(position)
    position, size, count = (
        len(body) + lies.directory_at,
        len(directory) + lies.directory_size,
        len(members) + lies.count,
    )
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 30, 0, 0, 0, count, count, size, position)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(body) + len(directory) + lies.locator, 1)
    end_fields = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF) if lies.only_in_zip64 else (count, count, size, position)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", lies.disk, 0, *end_fields, len(lies.comment)) + lies.comment
    middle = end64 + locator if lies.zip64 and not lies.missing_locator else b""
    return prefix + body + directory + middle + end + suffix


def records(
    pickle: bytes | None = None,
    storages: dict[str, bytes] | None = None,
    *,
    folder: str = "archive",
    version: bytes = b"3\n",
) -> list[Member]:
    """Return the records of a small valid archive: a float32 tensor `w` of four elements."""
    pickle = state_dict(w=tensor()) if pickle is None else pickle
    storages = {"0": bytes(range(16))} if storages is None else storages
    return [
        Member(f"{folder}/data.pkl", pickle),
        Member(f"{folder}/.format_version", b"1"),
        Member(f"{folder}/.storage_alignment", b"64"),
        Member(f"{folder}/byteorder", b"little"),
        *(Member(f"{folder}/data/{key}", data) for key, data in storages.items()),
        Member(f"{folder}/version", version),
        Member(f"{folder}/.data/serialization_id", b"0" * 40),
    ]


def change_record(name: str, **fields: object) -> list[Member]:
    """Return the records of the valid archive, with fields of the record `name` replaced."""
    members = records()
    for member in members:
        if member.name == f"archive/{name}":
            for field, value in fields.items():
                assert hasattr(member, field)
                setattr(member, field, value)
            return members
    raise AssertionError(name)


def without(name: str) -> list[Member]:
    """Return the records of the valid archive without the record `name`."""
    return [member for member in records() if member.name != f"archive/{name}"]


def legacy(
    pickle: bytes, storages: list[tuple[str, int, bytes]], *, little: bool = True, magic: int = 0x1950A86A20F9469CFC6C
) -> bytes:
    """Return a stream as torch before 1.6 wrote a stream; each storage is key, number of elements, bytes."""
    machine = b"}" + text("little_endian") + (b"\x88" if little else b"\x89") + b"s"
    keys = b"](" + b"".join(text(key) for key, _, _ in storages) + b"e"
    head = (
        build_pickle(number(magic)) + build_pickle(number(1001)) + build_pickle(machine) + pickle + build_pickle(keys)
    )
    return head + b"".join(struct.pack("<q", count) + data for _, count, data in storages)


def build_mesh(text: str) -> object:
    """Return a DeviceMesh, which is part of ordinary checkpoints, with any text in its repr."""
    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh.__dict__.update(
        _mesh_dim_names=(text,),
        _layout=_MeshLayout.from_sizes_strides((1,), (1,)),
        _device_type="cpu",
        _flatten_rank_map=(0,),
        _thread_id=0,
    )
    return mesh
