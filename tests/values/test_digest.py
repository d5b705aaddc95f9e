"""The digest of a tensor depends on its elements and not on their container."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from statecli import formats
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import MalformedError, MissingDependency, UnreadableError
from statecli.storage.local import LocalFile
from statecli.values import digest, open_files, recorded_checksums

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
)


def encode_in_c_order(tensor: torch.Tensor) -> bytes:
    """Return the expected bytes: torch's copy of the tensor in C order."""
    in_order = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.resolve_conj().resolve_neg())
    storage = in_order.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def compute_file_digests(path, algorithm=Algorithm.BLAKE3, jobs=1):
    tensors = formats.read(str(path)).tensors
    return dict(
        zip([tensor.fqn for tensor in tensors], digest.compute_digests(tensors, algorithm, jobs=jobs), strict=True)
    )


@st.composite
def tensors(draw):
    """Draw a tensor with any dtype, shape, strides and bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    seed = draw(st.integers(0, 2**32))
    bits = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    tensor = (bits & 1).bool().reshape(shape) if dtype is torch.bool else bits.view(dtype).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if tensor.ndim and draw(st.booleans()):
        axis = draw(st.integers(0, tensor.ndim - 1))
        start = draw(st.integers(0, tensor.shape[axis]))
        tensor = tensor.narrow(axis, start, tensor.shape[axis] - start)
    return tensor[::2] if tensor.ndim and draw(st.booleans()) else tensor


@settings(max_examples=60)
@given(tensors(), st.booleans())
def test_a_digest_is_that_of_the_elements_in_c_order(tmp_path_factory, tensor, zipped):
    """Strides, offset and container do not change the digest."""
    path = tmp_path_factory.mktemp("a") / "a.pt"
    torch.save({"w": tensor}, path, _use_new_zipfile_serialization=zipped)
    assert compute_file_digests(path) == {"w": blake3(encode_in_c_order(tensor)).hexdigest()}
    assert compute_file_digests(path, Algorithm.SHA256) == {"w": hashlib.sha256(encode_in_c_order(tensor)).hexdigest()}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_digest_of_a_conjugate_view_covers_the_resolved_values(tmp_path, dtype):
    """torch stores the original bits and a flag; the imaginary part is a view with its own flag."""
    base = torch.view_as_complex(torch.tensor([[1.0, -2.0], [float("nan"), float("nan")], [-0.0, 0.0]])).to(dtype)
    views = {"c": base.conj(), "n": base.clone().conj().imag, "both": torch._neg_view(base.conj())}
    torch.save(views, tmp_path / "a.pt")
    actual = compute_file_digests(tmp_path / "a.pt")
    assert actual == {name: blake3(encode_in_c_order(view)).hexdigest() for name, view in views.items()}
    assert actual["c"] != blake3(encode_in_c_order(base)).hexdigest()


def test_digest_of_a_negative_view_of_integers_is_that_of_its_values(tmp_path):
    """The sign of an integer is not a single bit."""
    negated = torch._neg_view(torch.tensor([1, -2, 0, -(2**31)], dtype=torch.int32))
    torch.save({"n": negated}, tmp_path / "a.pt")
    assert compute_file_digests(tmp_path / "a.pt") == {"n": blake3(encode_in_c_order(negated)).hexdigest()}


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_has_the_digest_of_its_parts(tmp_path, layout):
    """A change of a value or an index changes the digest; another container does not."""
    dense = torch.eye(4)
    blocks = {"blocksize": (2, 2)} if layout.startswith("bs") else {}

    def sparse(of):
        return of.to_sparse() if layout == "coo" else of.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks)

    moved, nudged = dense.roll(1, 0), dense * 2
    torch.save({"a": sparse(dense), "moved": sparse(moved), "nudged": sparse(nudged)}, tmp_path / "a.pt")
    torch.save({"a": sparse(dense)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    actual = compute_file_digests(tmp_path / "a.pt")
    assert len(set(actual.values())) == 3
    assert compute_file_digests(tmp_path / "b.pt")["a"] == actual["a"]


@pytest.mark.parametrize("names", [("sparse_csr", "sparse_csc"), ("sparse_bsr", "sparse_bsc")])
def test_the_transposed_matrix_has_another_digest(tmp_path, names):
    """Compressed columns and compressed rows have parts of the same names and shapes."""
    parts = torch.tensor([0, 1, 2]), torch.tensor([1, 1]), torch.arange(1.0, 9).reshape(2, 2, 2)
    parts = parts if "sparse_bsr" in names else (*parts[:2], parts[2][:, 0, 0])
    size = (4, 4) if "sparse_bsr" in names else (2, 2)
    layouts = [getattr(torch, name) for name in names]
    first, two = (torch.sparse_compressed_tensor(*parts, size, layout=layout) for layout in layouts)
    assert not torch.equal(first.to_dense(), two.to_dense())
    torch.save({"rows": first, "columns": two}, tmp_path / "a.pt")
    digests = compute_file_digests(tmp_path / "a.pt")
    assert digests["rows"] != digests["columns"]


def test_digest_of_a_sparse_tensor_covers_a_line_for_each_part(tmp_path):
    """The text is computed without statecli, as the documentation of the format describes."""
    sparse_tensor = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True).coalesce()
    torch.save({"s": sparse_tensor}, tmp_path / "a.pt")
    indices, values = (
        blake3(encode_in_c_order(tensor)).hexdigest() for tensor in (sparse_tensor.indices(), sparse_tensor.values())
    )
    text = f"indices int64 [1, 2] {indices}\nvalues float32 [2] {values}\n"
    assert compute_file_digests(tmp_path / "a.pt") == {"s": blake3(text.encode()).hexdigest()}


@pytest.mark.filterwarnings("ignore")
def test_digest_of_a_quantized_tensor_covers_codes_and_scale(tmp_path):
    """The same codes with another scale are other values."""
    values = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    first, two = (torch.quantize_per_tensor(values * scale, 0.1 * scale, 3, torch.qint8) for scale in (1, 2))
    channels = torch.quantize_per_channel(values, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)
    others = torch.quantize_per_channel(values * 2, torch.tensor([0.2, 0.4]), torch.tensor([0, 1]), 0, torch.qint8)
    assert first.int_repr().equal(two.int_repr())
    assert channels.int_repr().equal(others.int_repr())
    torch.save({"one": first, "two": two, "channels": channels, "others": others}, tmp_path / "a.pt")
    assert len(set(compute_file_digests(tmp_path / "a.pt").values())) == 4


def test_meta_tensor_has_no_digest(tmp_path):
    """A tensor saved on meta has a shape and no data."""
    torch.save({"m": torch.empty(2, device="meta"), "w": torch.ones(2)}, tmp_path / "a.pt")
    actual = compute_file_digests(tmp_path / "a.pt")
    assert actual["m"] is None
    assert actual["w"] is not None


def test_workers_compute_the_same_digests_as_one_process(tmp_path, monkeypatch):
    """Workers and a single process agree, and a shared storage is read once."""
    shared = torch.randn(100)
    state = {f"w{n}": torch.randn(50, 7) for n in range(20)} | {"a": shared, "b": shared}
    torch.save(state, tmp_path / "a.pt")
    monkeypatch.setattr(digest.pool, "MIN_BYTES_FOR_WORKERS", 0)
    monkeypatch.setattr(digest.pool, "MIN_BATCH_BYTES", 1 << 18)
    sizes = []
    digests = digest.compute_digests(
        formats.read(str(tmp_path / "a.pt")).tensors,
        Algorithm.BLAKE3,
        jobs=3,
        progress=lambda _, size: sizes.append(size),
    )
    assert digests == [blake3(encode_in_c_order(tensor)).hexdigest() for tensor in state.values()]
    assert sum(sizes) == 20 * 50 * 7 * 4 + 400


def test_truncated_file_is_named(tmp_path):
    """A digest of the remaining bytes would be wrong."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    tensors = formats.read(str(path)).tensors
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(MalformedError, match=r"a\.pt: w: .*truncated"):
        digest.compute_digests(tensors, Algorithm.BLAKE3)


def test_huge_expanded_tensor_is_refused(tmp_path):
    """A file of a kilobyte may claim a tensor of terabytes."""
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "a.pt")
    with pytest.raises(UnreadableError, match=r"a\.pt: w: .*repeats.*-x"):
        compute_file_digests(tmp_path / "a.pt")


def test_missing_blake3_package_names_the_command_to_install(tmp_path, monkeypatch):
    """sha256 does not need a package."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(MissingDependency, match="pip install blake3"):
        compute_file_digests(tmp_path / "a.pt")
    assert compute_file_digests(tmp_path / "a.pt", Algorithm.SHA256)


@pytest.mark.parametrize(("name", "save"), [("a.safetensors", save_file), ("a.pt", torch.save)])
def test_small_neighbours_are_read_together(tmp_path, monkeypatch, name, save):
    """A file of many small tensors is read a few times, and each digest covers only the tensor's own bytes."""
    types = (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.float8_e5m2, torch.complex64)
    tensors = {f"t{n}": torch.arange(n % 7, dtype=torch.float32).to(types[n % 6]) for n in range(600)}
    tensors["large"] = torch.ones(40_000)
    save({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / name)
    reads = []
    fill = LocalFile.fill
    monkeypatch.setattr(LocalFile, "fill", lambda file, *args: reads.append(args) or fill(file, *args))
    state = formats.read(str(tmp_path / name))
    digests = digest.compute_digests(state.tensors, Algorithm.SHA256, jobs=1)
    values_by_fqn = {tensor.fqn: value for tensor, value in zip(state.tensors, digests, strict=True)}
    assert recorded_checksums.check_checksums(state.tensors, jobs=1) == [()] * len(tensors)
    for key, tensor in tensors.items():
        assert values_by_fqn[key] == hashlib.sha256(encode_in_c_order(tensor)).hexdigest(), key
    assert 0 < len(reads) < 10


@pytest.mark.parametrize("number", [0, 299, 599])
def test_a_damaged_storage_among_neighbours_is_named(tmp_path, number):
    torch.save({f"t{n}": torch.full((8,), float(n)) for n in range(600)}, tmp_path / "a.pt")
    state = formats.read(str(tmp_path / "a.pt"))
    storage = next(tensor for tensor in state.tensors if tensor.fqn == f"t{number}").data.storage
    with open(tmp_path / "a.pt", "r+b") as file:
        file.seek(storage.offset + 5)
        file.write(b"!")
    errors = recorded_checksums.check_checksums(state.tensors, jobs=1)
    assert [tensor.fqn for tensor, actual in zip(state.tensors, errors, strict=True) if actual] == [f"t{number}"]


def test_number_of_open_files_is_limited(tmp_path):
    """A file with a reader stays open, even if unused for long."""
    paths = [str(tmp_path / f"{n}") for n in range(3 * open_files.MAX_OPEN_FILES)]
    for path in paths:
        Path(path).write_bytes(path.encode())
    before = len(os.listdir("/proc/self/fd"))
    with closing(open_files.OpenFiles()) as opened, opened.borrow(paths[0]) as first:
        for path in paths[1:]:
            with opened.borrow(path) as file:
                assert file.read(0, 1000) == path.encode()
        assert first.read(0, 1000) == paths[0].encode()
        assert len(os.listdir("/proc/self/fd")) <= before + open_files.MAX_OPEN_FILES + 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_error_among_neighbours_names_the_tensor(tmp_path):
    """The file was truncated after its tensors were listed."""
    save_file({f"t{n}": torch.ones(8) for n in range(50)}, tmp_path / "a.safetensors")
    state = formats.read(str(tmp_path / "a.safetensors"))
    with open(tmp_path / "a.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) - 8)
    with pytest.raises(UnreadableError, match=r"a\.safetensors.*t9"):
        digest.compute_digests(state.tensors, Algorithm.SHA256, jobs=1)
