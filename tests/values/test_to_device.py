"""`--to DEVICE` for a checkpoint: the bytes arrive on the device, or the difference is reported."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from statecli.core.errors import MalformedError, UnreadableError, UsageError
from statecli.core.model_state import After, ModelState, TensorData, TensorInfo
from statecli.values import to_device as module
from statecli.values.to_device import place_on_device, resolve_device

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64]


def build_state(*tensors):
    return ModelState("t", "torch_zip", tensors)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_every_type_arrive_on_the_device(store, monkeypatch, dtype, device):
    """The bytes travel in a single chunk, or in several chunks with a shorter last chunk."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tensor = store(torch.randn(100, 7).to(dtype))
    expected = After("cuda:0" if device == "cuda" else "cpu", True)
    assert place_on_device(build_state(tensor), device).tensors[0].after == expected
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    assert place_on_device(build_state(tensor), device).tensors[0].after == expected


def test_no_chunk_is_bigger_than_the_limit(store, monkeypatch):
    """Memory is bounded by the chunk, not by the tensor; every byte travels once."""
    sent = []
    real = module._copy_back
    monkeypatch.setattr(module, "CHUNK_BYTES", 128)
    monkeypatch.setattr(module, "_copy_back", lambda t, chunk, *rest: sent.append(chunk.size) or real(t, chunk, *rest))
    tensor = store(torch.randn(100))
    place_on_device(build_state(tensor, msgspec.structs.replace(tensor, fqn="tied")), "cpu")
    assert sent == [128, 128, 128, 16]


def test_tensor_with_a_changed_byte_did_not_follow(store, monkeypatch):
    def flip_bit(torch_module, chunk, dtype, device):
        flipped = chunk.copy()
        flipped[5] ^= 1
        return flipped

    monkeypatch.setattr(module, "_copy_back", flip_bit)
    placed = place_on_device(build_state(store(torch.randn(9))), "cpu").tensors[0]
    assert placed.after == After("cpu", False)
    assert "1 bytes differ after the load to" in placed.note


def test_a_type_that_the_device_refuses_did_not_follow(store, monkeypatch):
    """For example, MPS refuses float64: the tensor has a note, and the next tensor is placed."""

    def refuse(torch_module, chunk, dtype, device):
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype. Use float32 instead")
        return chunk

    monkeypatch.setattr(module, "_copy_back", refuse)
    first, second = place_on_device(build_state(store(torch.randn(9).double()), store(torch.randn(9))), "cpu").tensors
    assert first.after == After(None, False)
    assert "refuses the tensor: Cannot convert" in first.note
    assert second.after == After("cpu", True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float4_e2m1fn_x2], ids=str)
def test_move_to_meta_checks_only_the_checksum(store, dtype):
    """The note says that a meta tensor has no bytes to compare."""
    base = torch.zeros(8, 8, dtype=torch.uint8)
    tensor = base.view(dtype) if dtype.itemsize == 1 else torch.zeros(8, 8, dtype=dtype).t()
    placed = place_on_device(build_state(store(tensor)), "meta").tensors[0]
    assert placed.after == After("meta", True)
    assert placed.note == (
        "the checksum is correct; statecli did not compare the bytes on the device, because a meta tensor has no data"
    )


def test_on_meta_without_a_checksum_the_bytes_are_only_read(store):
    info = store(torch.zeros(8))
    storage = msgspec.structs.replace(info.data.storage, crc32=None)
    info = msgspec.structs.replace(info, note="odd", data=msgspec.structs.replace(info.data, storage=storage))
    placed = place_on_device(build_state(info), "meta").tensors[0]
    assert placed.note == (
        "odd; statecli read the bytes, but did not compare them on the device, because a meta tensor has no data"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_quantized_and_multi_part_tensors_travel_part_by_part(store, device):
    """The indices and values of a sparse tensor, and the integers of a quantized tensor, are copied."""
    quantized = store(torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.qint8))
    part = store(torch.rand(5)).data
    sparse = TensorInfo("s", "float32", (9,), 9, 0, layout="sparse_coo", parts=(("indices", part), ("values", part)))
    assert [row.after for row in place_on_device(build_state(quantized, sparse), device).tensors] == [
        After(device, True)
    ] * 2


def test_type_that_torch_lacks_is_inconclusive_on_meta(store):
    """`followed` is null, and the note names the type."""
    data = store(torch.zeros(4, dtype=torch.uint8)).data
    info = TensorInfo("w", "float3", (4,), 4, 4, data=TensorData(data.storage, "float3", (4,)))
    placed = place_on_device(build_state(info), "meta").tensors[0]
    assert placed.after == After(None, None)
    assert "has no float3" in placed.note


def test_tensor_without_bytes_is_inconclusive():
    """The tensor is a lazy parameter or a meta tensor."""
    placed = place_on_device(build_state(TensorInfo("w", "float32", (2,), 2, 8)), "cpu").tensors[0]
    assert placed.after == After(None, None)
    assert placed.note == "no bytes to load"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_wrong_checksum_stops_the_run(store, device):
    """A damaged tensor must not be reported as arrived."""
    info = store(torch.rand(5))
    with open(info.data.storage.path, "r+b") as file:
        file.seek(9)
        file.write(b"\x13\x37")
    with pytest.raises(MalformedError, match="checksum wrong"):
        place_on_device(build_state(info), device)


def test_a_vanished_file_stops_the_run(store, tmp_path):
    info = store(torch.rand(5))
    (tmp_path / "0.bin").unlink()
    with pytest.raises(UnreadableError, match="cannot be opened"):
        place_on_device(build_state(info), "meta")


def test_move_does_not_write_to_the_file(store, tmp_path):
    """The device works on a copy of each chunk."""
    info = store(torch.rand(50))
    before = (tmp_path / "0.bin").read_bytes()
    place_on_device(build_state(info), "cpu")
    assert (tmp_path / "0.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("nonsense", "does not know this device"),
        ("cpu:x", "does not know this device"),
        ("xpu", "not available here"),
        ("", "does not know"),
    ],
)
def test_unknown_and_absent_devices_are_one_line(device, message):
    """The usage error has one line of less than 300 characters."""
    with pytest.raises(UsageError, match=message) as caught:
        resolve_device(device)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_without_cuda_the_line_names_meta(device):
    """The same check runs on any machine."""
    with pytest.raises(UsageError, match="--to cpu to compare every byte without a CUDA device, or --to meta"):
        resolve_device(device)


def test_a_cuda_index_beyond_the_last_is_one_line(monkeypatch):
    """The message gives the number of CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="has 2 CUDA devices, cuda:0 to cuda:1"):
        resolve_device("cuda:2")


def test_error_without_torch_says_what_to_install():
    """The import of torch is blocked in a child process."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from statecli.values.to_device import resolve_device\n"
        "from statecli.core.errors import MissingDependency\n"
        "try: resolve_device('meta')\n"
        "except MissingDependency as why: print(why)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'torch-statecli[torch]'" in process.stdout
