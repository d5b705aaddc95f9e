"""Read the bytes of small tensors without numpy; None for tensors that need another reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from statecli import formats
from statecli.values import plain_bytes
from statecli.values.plain_bytes import read_plain_bytes

from .test_digest import encode_in_c_order

DTYPES = [getattr(torch, name) for name in sorted(plain_bytes._PLAIN_TYPES)]


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_bytes_of_any_type_and_shape_are_read(tmp_path_factory, shapes, dtype):
    """The bytes are right for every type and shape, also for empty tensors."""
    path = tmp_path_factory.mktemp("plain") / "a.pt"
    state = {f"w{n}": (torch.rand(shape) * 100).to(dtype) for n, shape in enumerate(shapes)}
    torch.save(state, path, _use_new_zipfile_serialization=False)  # has every type, and no checksums
    tensors = formats.read(str(path)).tensors
    assert read_plain_bytes(tensors) == [encode_in_c_order(state[tensor.fqn]) for tensor in tensors]


def test_hundreds_of_tensors_are_read_in_any_order(tmp_path, monkeypatch):
    """Hundreds of neighbours with gaps, ties and large tensors between them, over several reads."""
    state = {f"w{n}": torch.randint(0, 255, (n % 100 if n % 50 else 5000,), dtype=torch.uint8) for n in range(600)}
    save_file(state, tmp_path / "a.safetensors")
    monkeypatch.setattr(plain_bytes, "MAX_BYTES", 1 << 15)
    monkeypatch.setattr(plain_bytes, "TENSORS_OF_MAX_BYTES", 128)
    tensors = list(formats.read(str(tmp_path / "a.safetensors")).tensors)
    assert sum(tensor.nbytes for tensor in tensors) > plain_bytes.MAX_BYTES
    expected = {name: encode_in_c_order(tensor) for name, tensor in state.items()}
    for order in (tensors, tensors[::-1], tensors[::7] + tensors[::3], sorted(tensors, key=lambda tensor: tensor.fqn)):
        assert read_plain_bytes(order) == [expected[tensor.fqn] for tensor in order]


def test_tensors_that_need_another_reader_give_none(tmp_path, monkeypatch):
    """A transposed view, a wrong checksum, a truncated file, more bytes than the limit, and a mix of both kinds."""
    save_file({"w": torch.ones(8), "v": torch.ones(3)}, tmp_path / "a.safetensors")
    plain = formats.read(str(tmp_path / "a.safetensors")).tensors
    assert read_plain_bytes(plain) is not None
    torch.save({"t": torch.ones(2, 3).t()}, tmp_path / "t.pt")
    torch.save({"c": torch.full((2,), 7.0), "v": torch.ones(9)[2:5]}, tmp_path / "c.pt")
    whole = formats.read(str(tmp_path / "c.pt")).tensors
    assert read_plain_bytes((*whole, *plain))[:2] == [
        encode_in_c_order(torch.full((2,), 7.0)),
        encode_in_c_order(torch.ones(3)),
    ]
    (tmp_path / "c.pt").write_bytes(
        (tmp_path / "c.pt").read_bytes().replace(encode_in_c_order(torch.tensor(7.0)), b"1234")
    )
    for name in ("t.pt", "c.pt"):
        assert read_plain_bytes((*plain, *formats.read(str(tmp_path / name)).tensors)) is None
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate((tmp_path / "a.safetensors").stat().st_size - 1)
    assert read_plain_bytes(plain) is None
    save_file({"w": torch.ones(8)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(plain_bytes, "MAX_BYTES", 31)
    assert read_plain_bytes(formats.read(str(tmp_path / "a.safetensors")).tensors) is None


@pytest.mark.parametrize(
    "words", [("diff", "a.safetensors", "b.safetensors"), ("lock", "a.safetensors", "-o", "a.lock")]
)
@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_diff_and_lock_do_not_depend_on_the_reader(statecli, in_tmp_path, monkeypatch, words, limit):
    """Two equal files, and two files whose values differ in the last bit."""
    state = {"w": torch.arange(8.0), "n": torch.tensor(float("nan"))}
    save_file(state, "a.safetensors")
    save_file(state, "b.safetensors")
    monkeypatch.setattr(plain_bytes, "MAX_BYTES", limit)
    first = statecli(*words)
    assert first.code == 0
    if words[0] == "lock":
        (target,) = json.loads(Path("a.lock").read_text())["targets"]
        digests = {tensor["fqn"]: tensor["digest"] for tensor in target["tensors"]}
        assert digests == {name: blake3(encode_in_c_order(tensor)).hexdigest() for name, tensor in state.items()}
        return
    assert first.out == "identical: 2 tensors, 36 B: exit status 0\n"
    save_file({**state, "w": state["w"].nextafter(torch.tensor(9.0))}, "b.safetensors")
    assert statecli(*words).code == 1
