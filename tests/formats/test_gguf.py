"""GGUF files: files of the package gguf are read as by the package, and invalid files are refused in one line."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from statecli import formats
from statecli.core import ggml_types
from statecli.core.errors import MalformedError
from statecli.core.model_state import Evidence, Kind
from statecli.values import ggml_blocks
from statecli.values.read import read_all_values

#: Values of a small matrix, whose rows are whole blocks of every type.
VALUES = np.random.default_rng(3).standard_normal((6, 512)).astype(np.float32)


@pytest.fixture
def without_gguf(monkeypatch):
    """An installation without the package gguf."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    ggml_blocks.explain_unreadable_blocks.cache_clear()
    yield
    ggml_blocks.explain_unreadable_blocks.cache_clear()


def write_gguf(path: Path, tensors: dict[str, object], big=False, split=0, **keys: object) -> Path:
    """Write a file with the package gguf. A tensor is an array, or a pair of float array and quantization type."""
    gguf = pytest.importorskip("gguf")
    order = gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, "llama", endianess=order, split_max_tensors=split)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(*value if type(value) is tuple else (value,))
    for name, content in tensors.items():
        array, kind = content if type(content) is tuple else (content, None)
        raw_dtype = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, array if kind is None else pack_blocks(array, kind), raw_dtype=raw_dtype)
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    return path


def pack_blocks(array: np.ndarray, kind: str) -> np.ndarray:
    """Return the array quantized; if gguf can only dequantize the type, return blocks of arbitrary bytes.

    Bytes are blocks already.
    """
    gguf = pytest.importorskip("gguf")
    if array.dtype == np.uint8:
        return array
    try:
        return gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        values, size = ggml_types.BLOCK_SIZES[kind.lower()]
        shape = (*array.shape[:-1], array.shape[-1] // values * size)
        # With bytes below 0x40, no half-precision number in the blocks is infinite or NaN.
        return (np.abs(array).view(np.uint8).reshape(-1)[: np.prod(shape)] % 0x40).reshape(shape)


# --- files of the library --------------------------------------------------------------------------------------------

PLAIN = {
    "f32": VALUES,
    "f16": VALUES.astype(np.float16),
    "f64": VALUES.astype(np.float64),
    "i8": (VALUES * 30).astype(np.int8),
    "i16": (VALUES * 3000).astype(np.int16),
    "i32": (VALUES * 3e6).astype(np.int32),
    "i64": (VALUES * 3e9).astype(np.int64),
    "scalar": np.array(3.5, np.float32),
    "four": VALUES.reshape(2, 3, 4, 128),
    "none": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("big", [False, True], ids=["little", "big"])
def test_plain_tensors_equal_the_library(big, tmp_path):
    """Order of names, torch's dtypes and dimensions, and every value agree, in either byte order."""
    path = write_gguf(tmp_path / "m.gguf", PLAIN, big)
    state = formats.read(str(path))
    assert [tensor.fqn for tensor in state.tensors] == list(PLAIN)
    for tensor in state.tensors:
        array = PLAIN[tensor.fqn]
        assert (tensor.dtype, tensor.shape, tensor.elements) == (array.dtype.name, array.shape, array.size)
        assert tensor.nbytes == array.nbytes
        assert np.array_equal(read_all_values(tensor.data).reshape(array.shape), array)


@pytest.mark.parametrize("big", [False, True], ids=["little", "big"])
def test_bfloat16_equals_torch(big, tmp_path):
    """numpy has no bfloat16, so the library writes the bytes."""
    gguf = pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "m.gguf", {"w": (VALUES, "BF16")}, big)
    if big:  # The library leaves the bytes of quantized tensors unchanged.
        raw = bytearray(path.read_bytes())
        start = gguf.GGUFReader(path).tensors[0].data_offset
        raw[start:] = np.frombuffer(raw[start:], "<u2").astype(">u2").tobytes()
        path.write_bytes(raw)
    (tensor,) = formats.read(str(path)).tensors
    expected = gguf.quants.dequantize(pack_blocks(VALUES, "BF16"), gguf.GGMLQuantizationType.BF16)
    assert (tensor.dtype, tensor.nbytes) == ("bfloat16", VALUES.size * 2)
    assert np.array_equal(read_all_values(tensor.data).reshape(VALUES.shape), expected)


def test_block_sizes_equal_the_library():
    """Every type of the installed package agrees, by number; no removed type of ggml has the number of another type."""
    gguf = pytest.importorskip("gguf")
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.value in ggml_types.TORCH_TYPES:
            assert (1, ggml_types.TORCH_TYPES[kind.value][1]) == sizes
        else:
            assert ggml_types.QUANTIZED_TYPES[kind.value] == kind.name.lower()
            assert ggml_types.BLOCK_SIZES[kind.name.lower()] == sizes
    assert set(ggml_types.QUANTIZED_TYPES.values()) == set(ggml_types.BLOCK_SIZES)


@pytest.mark.parametrize("name", [name for name in ggml_types.BLOCK_SIZES if not name.startswith("q4_0_")])
def test_quantized_tensors_equal_the_library(name, tmp_path):
    """Shape and elements count the values, bytes count the blocks; the values equal the output of the library."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    path = write_gguf(tmp_path / "m.gguf", {"a": VALUES[:1], "w": (VALUES, name.upper())})
    tensor = formats.read(str(path)).tensors[1]
    values, size = ggml_types.BLOCK_SIZES[name]
    assert (tensor.dtype, tensor.shape, tensor.elements) == (name, VALUES.shape, VALUES.size)
    assert tensor.nbytes == VALUES.size // values * size == gguf.GGUFReader(path).tensors[1].n_bytes
    assert tensor.note == f"{values} values in {size} bytes"
    assert (tensor.kind, tensor.evidence, tensor.saved) == (Kind.PARAMETER, Evidence.ASSUMED, True)
    stored = ggml_blocks.to_stored_blocks(tensor.data).storage
    assert path.read_bytes()[stored.offset :][: stored.length] == pack_blocks(VALUES, name.upper()).tobytes()
    if name not in ("q8_1", "q8_k", "q1_0"):  # of which the library does not know the way back
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(pack_blocks(VALUES, name.upper()), kind)
        assert np.array_equal(read_all_values(tensor.data).reshape(VALUES.shape), expected, equal_nan=True)


def test_metadata_is_listed_as_values_or_digests(tmp_path):
    """Numbers and texts are shown unchanged, short arrays as JSON, longer arrays as type, length and digest."""
    path = write_gguf(
        tmp_path / "m.gguf",
        {"w": VALUES},
        name="Ünïcode",
        block_count=2,
        layer_norm_rms_eps=1e-5,
        chat_template="{{ x }}" * 900,
        token_list=([f"token {n}" for n in range(500)],),
        token_scores=([0.5] * 500,),
        array=("general.tags", ["a", "b"]),
        bool=("general.ok", True),
        uint64=("general.huge", 2**64 - 1),
        float64=("general.precise", 0.1),
        float32=("general.endless", float("inf")),
    )
    metadata = dict(formats.read(str(path)).metadata.values)
    tokens, scores = metadata.pop("tokenizer.ggml.tokens"), metadata.pop("tokenizer.ggml.scores")
    assert tokens.startswith("array of 500 text, sha256 ")
    assert scores.startswith("array of 500 float32, sha256 ")
    assert metadata == {
        "general.architecture": "llama",
        "general.name": "Ünïcode",
        "llama.block_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.chat_template": "{{ x }}" * 900,
        "general.tags": '["a", "b"]',
        "general.ok": True,
        "general.huge": str(2**64 - 1),
        "general.precise": 0.1,
        "general.endless": "inf",
    }


def test_metadata_does_not_depend_on_the_byte_order(tmp_path):
    """Neither values nor digests of arrays depend on the byte order."""
    keys = {
        "token_list": ([f"token {n}" for n in range(500)],),
        "token_scores": ([n / 7 for n in range(500)],),
        "array": ("general.tags", ["a", "bc"]),
        "block_count": 77,
    }
    little, big = (formats.read(str(write_gguf(tmp_path / "m.gguf", {"w": VALUES}, big, **keys))) for big in (0, 1))
    assert little.metadata == big.metadata


def test_changed_token_is_a_metadata_change(tmp_path, run):
    """Another token among thousands gives another digest, and a diff reports the change."""
    tokens = [f"token {n}" for n in range(5000)]
    before = write_gguf(tmp_path / "one.gguf", {"w": VALUES}, token_list=(tokens,))
    after = write_gguf(tmp_path / "two.gguf", {"w": VALUES}, token_list=([*tokens[:-1], "token x999"],))
    code, output = run("diff", before, after, "-f", "json")
    assert code == 1
    assert [change["key"] for change in json.loads(output)["metadata"]] == ["tokenizer.ggml.tokens"]


def test_long_text_is_shown_with_its_length_and_digest(tmp_path):
    """A text beyond 64 KiB is shown with its beginning, its length and a digest."""
    path = write_gguf(tmp_path / "m.gguf", {"w": VALUES}, chat_template="x" * 70_000)
    template = formats.read(str(path)).metadata.values["tokenizer.chat_template"]
    assert template.startswith("70000 characters, sha256 ")
    assert len(template) < 40_000


def test_gguf_with_123_tensors_is_not_taken_for_safetensors(tmp_path):
    """The file's ninth byte is a brace, as at the start of a safetensors header."""
    path = write_gguf(tmp_path / "m.gguf", {f"t{n}": VALUES[:1] for n in range(123)})
    assert path.read_bytes()[8:9] == b"{"
    assert formats.read(str(path)).format == "gguf"


# --- split files -----------------------------------------------------------------------------------------------------


BLOCKS = {f"blk.{n}.w": (VALUES + n, "Q8_0") for n in range(5)}


@pytest.fixture
def shard_folder(tmp_path) -> Path:
    """A model in three files, in a separate folder."""
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / "m.gguf", BLOCKS, split=2, name="Tiny")
    return tmp_path / "parts"


def test_folder_of_shards_is_one_model(shard_folder, tmp_path, run):
    """The folder has all tensors and the first part's metadata, equals the unsplit file, and has the same lock."""
    whole_path = write_gguf(tmp_path / "m.gguf", BLOCKS, name="Tiny")
    state = formats.read(str(shard_folder))
    assert [tensor.fqn for tensor in state.tensors] == list(BLOCKS)
    assert state.metadata.values == {"general.architecture": "llama", "general.name": "Tiny"}
    assert run("diff", shard_folder, whole_path)[0] == 0
    assert (
        run("lock", shard_folder, "-o", tmp_path / "one")[0] == run("lock", whole_path, "-o", tmp_path / "two")[0] == 0
    )
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_shard_has_a_note_with_its_number(shard_folder):
    """A shard by itself is read, with a note that the file is a shard."""
    state = formats.read(str(shard_folder / "m-00002-of-00003.gguf"))
    assert [tensor.fqn for tensor in state.tensors] == ["blk.2.w", "blk.3.w"]
    (oddity,) = state.oddities
    assert (
        oddity.message
        == "this file is shard 2 of 3 (the shards have 5 tensors in total); give the folder to read all shards as "
        "one model"
    )


def test_missing_shard_is_named(shard_folder, inspect):
    """The file names give the number of parts; the tensors of present parts are shown, and the exit status is 2."""
    (shard_folder / "m-00002-of-00003.gguf").unlink()
    code, out, err = inspect(shard_folder)
    message = (
        "shard m-00002-of-00003.gguf is missing: 2 of 3 exist, according to the numbers in the file names; copy or "
        "download the missing files"
    )
    assert (code, err) == (2, f"statecli: {shard_folder}: {message}\n")
    assert all(f" blk.{n}.w " in out for n in (0, 1, 4))
    assert formats.read(str(shard_folder)).metadata.values == {"general.architecture": "llama", "general.name": "Tiny"}


def test_shards_of_another_split_are_refused(shard_folder, tmp_path, line):
    """The file names count to 3, but the metadata of the files records another number of parts."""
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "m.gguf", BLOCKS, split=1)
    for n in (1, 2, 3):
        (tmp_path / "other" / f"m-0000{n}-of-00005.gguf").replace(shard_folder / f"m-0000{n}-of-00003.gguf")
    assert line(shard_folder) == "the numbers in the file names go up to 3, but the metadata records 5 shards"


# --- quantized values ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized_files(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Return a model in Q8_0, the same model with one value moved, and the first model in float32."""
    folder = tmp_path_factory.mktemp("quantized")
    moved = VALUES.copy()
    moved[2, 100] += 5
    names = ("a.w", "b.w")
    first = write_gguf(folder / "one.gguf", dict.fromkeys(names, (VALUES, "Q8_0")))
    second = write_gguf(folder / "two.gguf", {"a.w": (VALUES, "Q8_0"), "b.w": (moved, "Q8_0")})
    return first, second, write_gguf(folder / "full.gguf", dict.fromkeys(names, VALUES))


def changes(output: str) -> dict[str, dict]:
    return {change["fqn"]: change for change in json.loads(output)["changes"] if change["status"] != "identical"}


def test_change_of_a_quantized_tensor_has_numbers(quantized_files, run):
    """Unchanged tensors are equal by their bytes; for the changed tensor the values give the size of the change."""
    code, output = run("diff", *quantized_files[:2], "-f", "json")
    assert code == 1
    (change,) = changes(output).values()
    assert change["fqn"] == "b.w"
    assert 1 <= change["values"]["changed"] <= 32
    assert change["values"]["max_abs"] == pytest.approx(5, abs=0.1)
    assert change["values"]["elements"] == VALUES.size


def test_quantized_is_compared_with_full_within_a_tolerance(quantized_files, run):
    """Another dtype is a change; a difference of values within the tolerance is not a change."""
    first, _, full = quantized_files
    code, output = run("diff", first, full, "--atol", "0.05", "-f", "json")
    assert code == 1
    assert all(actual["fields"] == ["dtype"] for actual in changes(output).values())
    assert run("diff", first, full, "--atol", "0.05", "--ignore", "dtype")[0] == 0
    assert run("diff", first, full, "--ignore", "dtype")[0] == 1


def test_values_of_another_quantized_tensor_are_a_move(quantized_files, tmp_path, run):
    """The search for moves reads samples of the blocks as float32."""
    swapped = write_gguf(tmp_path / "m.gguf", {"a.w": (VALUES[::-1].copy(), "Q8_0"), "b.w": (VALUES * 2, "Q8_0")})
    other = write_gguf(tmp_path / "n.gguf", {"a.w": (VALUES * 2, "Q8_0"), "b.w": (VALUES[::-1].copy(), "Q8_0")})
    code, output = run("diff", swapped, other, "-f", "json")
    assert code == 1
    kinds = {change["transformation"]["kind"] for change in changes(output).values()}
    assert kinds == {"swapped"}


def test_equal_values_with_other_bytes_differ_only_bitwise(tmp_path, run):
    """A scale of zero makes any codes zeros: no difference, unless the user compares bits."""
    raw = np.zeros((1, 34), np.uint8)
    other_bytes = raw.copy()
    other_bytes[0, 5] = 9
    first = write_gguf(tmp_path / "one.gguf", {"w": (raw, "Q8_0")})
    second = write_gguf(tmp_path / "two.gguf", {"w": (other_bytes, "Q8_0")})
    assert run("diff", first, second)[0] == 0
    code, output = run("diff", first, second, "--bitwise", "-f", "json")
    assert code == 1
    assert changes(output)["w"]["values"]["reason"].endswith("as 32 changed values, although the values are equal")


def test_statistics_and_rules_see_the_values(quantized_files, run):
    """`--stats` shows the range of the values; an audit of ordinary values reports nothing."""
    code, output = run("inspect", quantized_files[0], "--stats", "-f", "json")
    assert code == 0
    for tensor in json.loads(output)["tensors"]:
        assert tensor["stats"]["max"] == pytest.approx(VALUES.max(), abs=0.05)
        assert tensor["stats"]["mean"] == pytest.approx(VALUES.mean(), abs=0.01)
    code, output = run("audit", quantized_files[0], "--values", "--ignore", "duplicate-values")
    assert code == 0, output


def test_nan_in_a_scale_is_found(tmp_path, run):
    """A block whose scale is NaN has 32 NaN values."""
    raw = pack_blocks(VALUES, "Q8_0")
    raw[1, :2] = (0, 0x7E)
    path = write_gguf(tmp_path / "m.gguf", {"w": (raw, "Q8_0")})
    code, output = run("audit", path, "--values", "-f", "json")
    assert code == 1
    (finding,) = json.loads(output)["findings"]
    assert finding["rule"] == "nan"
    assert "32" in finding["message"]


def test_without_the_package_equal_bytes_are_equal(quantized_files, run, without_gguf):
    """Neither the comparison with a copy nor a lock needs the package."""
    first, second, _ = quantized_files
    assert run("diff", first, first)[0] == 0
    code, output = run("diff", first, second, "-f", "json")
    assert code == 1
    (change,) = changes(output).values()
    delta = change["values"]
    assert change["fqn"] == "b.w"
    assert delta["changed"] == 32
    assert delta["left_out"] == delta["elements"]
    assert delta["max_abs"] is None
    assert delta["first"] is None
    assert delta["reason"] == (
        "statecli counts each block with different bytes as 32 changed values, because reading its numbers needs the "
        "package gguf: pip install 'torch-statecli[gguf]'"
    )


def test_missing_gguf_package_is_named_where_values_are_needed(quantized_files, run, without_gguf):
    """A tolerance, another type and statistics need the package: the result is inconclusive, and names the package."""
    first, second, full = quantized_files
    hint = "reading its numbers needs the package gguf: pip install 'torch-statecli[gguf]'"
    for arguments in ((first, second, "--atol", "9"), (first, full)):
        code, output = run("diff", *arguments)
        assert code == 2
        assert hint in output
    code, output = run("inspect", first, "--stats", "-f", "json")
    assert code == 0
    assert {tensor["stats"]["reason"] for tensor in json.loads(output)["tensors"]} == {hint}
    code, output = run("audit", first, "--values", "-f", "json")
    assert code == 1
    assert {finding["rule"] for finding in json.loads(output)["findings"]} == {"unread-values", "duplicate-values"}


def test_a_lock_does_not_depend_on_the_package(quantized_files, run, tmp_path, request):
    """The digest is computed from the stored bytes."""
    assert run("lock", quantized_files[0], "-o", tmp_path / "with")[0] == 0
    request.getfixturevalue("without_gguf")
    assert run("lock", quantized_files[0], "-o", tmp_path / "without")[0] == 0
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()
    code, output = run("audit", quantized_files[1], "--lock", tmp_path / "with", "--no-values", "-f", "json")
    assert code == 1
    assert [finding["fqn"] for finding in json.loads(output)["findings"]] == ["b.w"]


def test_quantized_tensors_follow_a_move(quantized_files, run):
    """A loader moves the stored bytes, not floats."""
    code, output = run("inspect", quantized_files[0], "--to", "cpu", "-f", "json")
    assert code == 0
    for tensor in json.loads(output)["tensors"]:
        assert tensor["after"] == {"device": "cpu", "followed": True}
        assert (tensor["dtype"], tensor["bytes"]) == ("q8_0", VALUES.size // 32 * 34)


def test_blocks_in_big_endian_order_are_not_read(tmp_path, run):
    """The writer chooses the bytes to swap, so that statecli shows no value and compares nothing."""
    path = write_gguf(tmp_path / "m.gguf", {"w": (VALUES, "Q8_0")}, big=True)
    (tensor,) = formats.read(str(path)).tensors
    assert tensor.data is None
    assert tensor.note == "32 values in 34 bytes, big-endian: statecli does not read the values"
    assert run("diff", path, write_gguf(tmp_path / "n.gguf", {"w": (VALUES, "Q8_0")}))[0] == 2


# --- bad input -------------------------------------------------------------------------------------------------------


def text(content: str | bytes) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def raw_file(keys=(), tensors=(), data=b"", version=3, counts=None) -> bytes:
    """Return a file, byte by byte; the data begin at a multiple of 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    head += b"".join((*keys, *tensors))
    return head + bytes(-len(head) % 32) + data


def write_raw_file(folder: Path, *arguments, **options) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(raw_file(*arguments, **options))
    return path


U32 = struct.pack("<I", 7)
HUGE = struct.pack("<Q", 2**60)
TRUNCATED_HINT = "but the file has {} bytes: truncated or damaged; copy or download the file again"
#: Defect -> the file and its error line.
INVALID_FILES = {
    "version 1": (
        raw_file(version=1),
        "has GGUF version 1 (August 2023), which current tools do not read: convert the model again with llama.cpp",
    ),
    "version 4": (
        raw_file(version=4),
        "has GGUF version 4, but statecli reads only 2 and 3; a newer llama.cpp may have written the file",
    ),
    "absurd version": (
        raw_file(version=99_999_999),
        "has GGUF version 99999999, but statecli reads only 2 and 3; the header may be damaged",
    ),
    "magic alone": (b"GGUF", "the version number ends at byte 8, " + TRUNCATED_HINT),
    "no counts": (b"GGUF\3\0\0\0", "the number of tensors ends at byte 16, " + TRUNCATED_HINT),
    "2^60 tensors": (
        raw_file(counts=(2**60, 0)),
        f"the header claims {2**60} tensors and 0 metadata keys, but statecli's limits are 1000000 and 100000",
    ),
    "2^60 keys": (
        raw_file(counts=(0, 2**60)),
        f"the header claims 0 tensors and {2**60} metadata keys, but statecli's limits are 1000000 and 100000",
    ),
    "more tensors than lines": (
        raw_file((), [tensor("w", [8])], counts=(9, 0)),
        "entry 2 of 9 in the list of tensors ends at byte 65, " + TRUNCATED_HINT,
    ),
    "endless key": (raw_file([HUGE]), f"metadata key 1 of 1 ends at byte {32 + 2**60}, " + TRUNCATED_HINT),
    "endless text": (raw_file([key("k", 8, HUGE)]), f"metadata 'k' ends at byte {45 + 2**60}, " + TRUNCATED_HINT),
    "endless array": (
        raw_file([key("k", 9, struct.pack("<IQ", 4, 2**60))]),
        f"metadata 'k' ends at byte {49 + 2**62}, " + TRUNCATED_HINT,
    ),
    "endless array of texts": (
        raw_file([key("k", 9, struct.pack("<IQ", 8, 2**60))]),
        "metadata 'k' ends at byte 65, " + TRUNCATED_HINT,
    ),
    "text of an array that ends nowhere": (
        raw_file([key("k", 9, struct.pack("<IQ", 8, 2) + HUGE)]),
        f"metadata 'k' ends at byte {57 + 2**60 + 8}, " + TRUNCATED_HINT,
    ),
    "arrays in arrays": (
        raw_file([key("k", 9, struct.pack("<IQ", 9, 1) * 50)]),
        "metadata 'k' nests arrays more than 8 levels deep, the limit of statecli",
    ),
    "unknown type of a key": (
        raw_file([key("k", 13, U32)]),
        "metadata 'k' has unknown type 13: the file is damaged, or a newer llama.cpp wrote it",
    ),
    "unknown type of an array": (
        raw_file([key("k", 9, struct.pack("<IQ", 77, 99))]),
        "metadata 'k' has unknown type 77: the file is damaged, or a newer llama.cpp wrote it",
    ),
    "name of a key that is no text": (
        raw_file([key(b"\xff\xfe", 4, U32)]),
        "metadata key 1 of 1: the name is not valid UTF-8 near byte 0",
    ),
    "name that is no text": (
        raw_file((), [tensor(b"w\xff", [8])], bytes(32)),
        "entry 1 of 1 in the list of tensors: the name is not valid UTF-8 near byte 1",
    ),
    "alignment 0": (
        raw_file([key("general.alignment", 4, bytes(4))]),
        "the metadata key general.alignment is 0, but must be a power of two",
    ),
    "alignment 24": (
        raw_file([key("general.alignment", 4, struct.pack("<I", 24))]),
        "the metadata key general.alignment is 24, but must be a power of two",
    ),
    "alignment in words": (
        raw_file([key("general.alignment", 8, text("32"))]),
        "the metadata key general.alignment is '32', but must be a power of two",
    ),
    "2^32 dimensions": (
        raw_file((), [text("w") + struct.pack("<I", 2**32 - 1) + bytes(40)]),
        "w: claims 4294967295 dimensions, but ggml has at most 4",
    ),
    "2^66 elements": (
        raw_file((), [tensor("w", [2**33, 2**33])], bytes(32)),
        "w: shape [8589934592, 8589934592] is impossible: 2^63 elements or more",
    ),
    "a dimension of 2^64 - 1": (
        raw_file((), [tensor("w", [2**64 - 1, 0])]),
        "w: shape [0, 18446744073709551615] is impossible: 2^63 elements or more",
    ),
    "escapes in a name": (
        raw_file((), [tensor("w\x1b[31m\n", [2**63])]),
        "w\\x1b[31m\\n: shape [9223372036854775808] is impossible: 2^63 elements or more",
    ),
}


@pytest.mark.parametrize("case", INVALID_FILES)
def test_false_claim_is_refused_in_one_line(case, tmp_path, line):
    """One line has the claim and the real number, and statecli allocates nothing for the claim."""
    raw, expected = INVALID_FILES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    assert line(path) == expected.replace("{}", str(len(raw)))


def test_truncated_file_is_refused_or_damaged(tmp_path, line):
    """A download may stop at any byte: a truncated header is refused, and tensors without their data are damaged."""
    keys = [key("general.name", 8, text("x")), key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))]
    lines = [tensor("v", [8]), tensor("w", [32, 2], 8, 32)]
    content, header = raw_file(keys, lines, bytes(32 + 68)), 24 + sum(map(len, (*keys, *lines)))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert len(formats.read(str(path)).tensors) == 2
    data = len(content) - 100
    for end in range(1, len(content)):
        path.write_bytes(content[:end])
        if end < header:
            assert line(path)
            continue
        v, w = formats.read(str(path)).tensors
        assert (v.damage is None) == (end >= data + 32)
        assert w.damage == (
            f"{path}: w: ends at byte {len(content)}, but the file has {end} bytes: truncated, "
            f"{len(content) - end} bytes are missing; copy or download the file again"
        )


UNREADABLE_TENSORS = {
    "type 99": (tensor("w", [32], 99, 32), "w: type 99 is unknown; a newer llama.cpp may have written the file"),
    "rows": (tensor("w", [33], 8, 32), "w: q8_0 [33]: its last dimension must be a multiple of 32"),
    "scalar": (tensor("w", [], 8, 32), "w: q8_0 []: its last dimension must be a multiple of 32"),
}


@pytest.mark.parametrize("case", UNREADABLE_TENSORS)
def test_unreadable_tensor_spoils_no_other_tensor(case, tmp_path, inspect):
    """The other tensors are listed, and the line about the unreadable tensor sets exit status 2."""
    entry, expected = UNREADABLE_TENSORS[case]
    path = write_raw_file(tmp_path, (), [tensor("v", [8]), entry, tensor("x", [8], 0, 96)], bytes(128))
    code, out, err = inspect(path, "-f", "plain")
    assert code == 2
    assert err == f"statecli: {path}: {expected}\n"
    assert [row.split("\t")[0] if "\t" in row else row.split()[1] for row in out.splitlines()[1:4]] == ["v", "w", "x"]


#: Defect -> the lines of three tensors and the errors of the damaged tensors; the data has 128 bytes.
MISPLACED_TENSORS = {
    "beyond the end": (
        [("v", 800, 0), ("w", 8, 32), ("x", 8, 64)],
        ["v: ends at byte 3328, but the file has 256 bytes: truncated"],
    ),
    "an offset beyond the end": (
        [("v", 8, 0), ("w", 8, 2**63), ("x", 8, 64)],
        [f"w: ends at byte {2**63 + 160}, but the file has 256 bytes: truncated"],
    ),
    "overlap": (
        [("v", 16, 0), ("w", 8, 32), ("x", 8, 64)],
        ["v: its bytes 0 to 64 overlap bytes 32 to 64 of w", "w: its bytes 32 to 64 overlap bytes 0 to 64 of v"],
    ),
    "the same bytes": (
        [("v", 8, 0), ("w", 8, 32), ("x", 8, 32), ("y", 8, 64)],
        ["w: its bytes 32 to 64 overlap bytes 32 to 64 of x", "x: its bytes 32 to 64 overlap bytes 32 to 64 of w"],
    ),
    "one over all": (
        [("v", 32, 0), ("w", 8, 32), ("x", 8, 64)],
        [
            "v: its bytes 0 to 128 overlap bytes 32 to 64 of w",
            "w: its bytes 32 to 64 overlap bytes 0 to 128 of v",
            "x: its bytes 64 to 96 overlap bytes 0 to 128 of v",
        ],
    ),
    "a name twice": (
        [("w", 8, 0), ("w", 8, 32), ("x", 8, 64)],
        [
            "w: the header lists this tensor 2 times; different programs may read different entries: "
            "convert the model again"
        ],
    ),
    "nothing within another": ([("v", 32, 0), ("w", 0, 32), ("x", 0, 128)], []),
}


@pytest.mark.parametrize("case", MISPLACED_TENSORS)
def test_misplaced_tensor_spoils_no_other_tensor(case, tmp_path, inspect):
    """One line reports each tensor outside the file or with shared bytes; all other tensors stay, with their values."""
    lines, expected = MISPLACED_TENSORS[case]
    path = write_raw_file(
        tmp_path, (), [tensor(name, [size], 0, position) for name, size, position in lines], bytes(128)
    )
    code, out, err = inspect(path, "--stats")
    rows = formats.read(str(path)).tensors
    damages = [row.damage for row in rows if row.damage]
    assert (code, len(damages)) == (2 if expected else 0, len(expected))
    assert all(damage.startswith(f"{path}: {text}") for damage, text in zip(damages, expected, strict=True))
    assert err.splitlines()[:1] == [f"statecli: {damage}" for damage in damages[:1]]
    assert [row.fqn for row in rows] == list(dict.fromkeys(name for name, _, _ in lines))
    damaged = {text.partition(":")[0] for text in expected}
    assert all((row.data is None) == (row.fqn in damaged) for row in rows)
    assert all(row.fqn in out for row in rows)


@pytest.mark.parametrize("at", range(1, 32))
def test_a_byte_more_in_the_last_entry_spoils_all_tensors(at, tmp_path):
    """The place of the data follows the list, so the first tensor has moved too, though its own entry is intact."""
    lines = [tensor("v", [32, 3], 1), tensor("w", [32, 2], 0, 192)]
    content = raw_file((), lines, np.ones(96, np.float16).tobytes() + np.ones(64, np.float32).tobytes())
    end = 24 + sum(map(len, lines))
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: end - at] + b"\2" + content[end - at :])
    try:
        rows = formats.read(str(path)).tensors
    except MalformedError:
        return
    for row in rows:
        assert row.data is None
        assert row.damage
        assert f"{row.fqn}: the list of tensors is damaged: w begins at byte " in row.damage


def list_oddities(path: Path) -> list[str]:
    return [oddity.message for oddity in formats.read(str(path)).oddities]


def test_unused_bytes_are_reported(tmp_path, run):
    """An audit finds bytes between the tensors, after the header and after the last tensor."""
    path = write_raw_file(tmp_path, (), [tensor("v", [8], 0, 64), tensor("w", [8], 0, 160)], bytes(192))
    assert list_oddities(path) == ["128 bytes in 2 places, the first after the header, belong to no tensor"]
    path.write_bytes(path.read_bytes() + b"x" * 100)
    assert list_oddities(path)[1] == "100 bytes follow the last tensor, w"
    code, output = run("audit", path, "-f", "json")
    assert code == 1
    assert {finding["rule"] for finding in json.loads(output)["findings"]} == {"unused-bytes", "trailing-bytes"}


def test_padding_is_not_reported(tmp_path):
    """Padding up to the alignment, which the file may set, is allowed after the last tensor too."""
    keys = [key("general.alignment", 4, struct.pack("<I", 64))]
    head = raw_file(keys, [tensor("v", [3]), tensor("w", [3], 0, 64)])
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % 64) + bytes(128))
    assert list_oddities(path) == []


def test_misaligned_tensor_is_read(tmp_path):
    """llama.cpp refuses the tensor; its values are readable all the same."""
    oddity = "these tensors do not start at a multiple of 32 bytes, so llama.cpp refuses them: w"
    path = write_raw_file(tmp_path, (), [tensor("w", [2], 0, 4)], struct.pack("<3f", 0, 1, 2))
    assert list_oddities(path) == [oddity]
    assert read_all_values(formats.read(str(path)).tensors[0].data).tolist() == [1.0, 2.0]
    entries = [tensor("v", [3]), tensor("w", [2], 0, 12)]  # a writer that does not pad
    path = write_raw_file(tmp_path, (), entries, struct.pack("<5f", 0, 1, 2, 3, 4))
    assert list_oddities(path) == [oddity]
    assert [read_all_values(row.data).tolist() for row in formats.read(str(path)).tensors] == [[0, 1, 2], [3, 4]]


def test_tensor_cut_off_after_a_repeated_name_is_truncated(tmp_path):
    """The repeated entry also has a place in the list, so the list is not damaged."""
    entries = [tensor("v", [8]), tensor("v", [8], 0, 32), tensor("w", [8], 0, 64)]
    path = write_raw_file(tmp_path, (), entries, bytes(80))
    v, w = formats.read(str(path)).tensors
    assert "the header lists this tensor 2 times" in v.damage
    assert "truncated, 16 bytes are missing" in w.damage


def test_key_set_twice_is_reported(tmp_path):
    """Readers disagree on the value that counts; statecli takes the last."""
    path = write_raw_file(tmp_path, [key("k", 4, U32), key("k", 4, bytes(4))])
    assert list_oddities(path) == ["the metadata sets 'k' twice; statecli shows the last value"]
    assert formats.read(str(path)).metadata.values == {"k": 0}


def test_file_with_only_metadata_is_shown(tmp_path, run):
    """Some test files of llama.cpp have only metadata, and statecli shows the metadata."""
    path = write_raw_file(tmp_path, [key("k", 4, U32)])
    state = formats.read(str(path))
    assert (state.tensors, dict(state.metadata.values)) == ((), {"k": 7})
    assert run("inspect", path) == (0, "note[no-tensor]: contains no tensors, only metadata: k=7\n")
    many_keys_path = write_raw_file(tmp_path, [key(f"k{n}", 4, U32) for n in range(8)])
    assert run("inspect", many_keys_path)[1].endswith("k4=7, k5=7 and 2 more keys\n")
    assert run("inspect", write_raw_file(tmp_path)) == (0, "note[no-tensor]: contains no tensors\n")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_mixed_types_have_no_finding(kind, tmp_path, run):
    """llama.cpp leaves norms, and some small matrices, in float32 next to any quantization type."""
    tensors = {"blk.0.w": (VALUES, kind), "blk.0.norm": VALUES[0], "blk.0.gate": VALUES}
    path = write_gguf(tmp_path / "m.gguf", tensors)
    code, output = run("audit", path, "-f", "json")
    assert (code, json.loads(output)["findings"]) == (0, [])


def test_text_that_is_not_utf_8_is_escaped(tmp_path):
    """A value is shown even if the bytes are not UTF-8; a name must be UTF-8."""
    state = formats.read(str(write_raw_file(tmp_path, [key("k", 8, text(b"a\xff"))])))
    assert state.metadata.values == {"k": "a\\xff"}


def encode_array(kind: int, *values: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


FOUR, EIGHT = struct.pack("<I", 7), struct.pack("<Q", 7)
VALUE_PAIRS = {
    "integers": (key("k", 4, FOUR), key("k", 5, FOUR)),
    "integers of two sizes": (key("k", 4, FOUR), key("k", 10, EIGHT)),
    "floats of two sizes": (key("k", 6, struct.pack("<f", 0.5)), key("k", 12, struct.pack("<d", 0.5))),
    "a float and an integer": (key("k", 6, struct.pack("<f", 7)), key("k", 4, FOUR)),
    "bytes of a bool": (key("k", 7, b"\1"), key("k", 7, b"\2")),
    "infinity and its text": (key("k", 6, struct.pack("<f", float("inf"))), key("k", 8, text(b"inf"))),
    "an invalid byte and its escape": (key("k", 8, text(b"a\xff")), key("k", 8, text(b"a\\xff"))),
    "invalid bytes at two places": (key("k", 8, text(b"\xff\\xff")), key("k", 8, text(b"\\xff\xff"))),
    "arrays": (key("k", 9, encode_array(4, FOUR)), key("k", 9, encode_array(5, FOUR))),
    "an array and its text": (key("k", 9, encode_array(4, FOUR)), key("k", 8, text(b"[7]"))),
    "arrays of bools": (key("k", 9, encode_array(7, b"\1")), key("k", 9, encode_array(7, b"\2"))),
    "arrays of invalid texts": (
        key("k", 9, encode_array(8, text(b"a\xff"))),
        key("k", 9, encode_array(8, text(b"a\\xff"))),
    ),
}


@pytest.mark.parametrize("case", VALUE_PAIRS)
def test_metadata_values_of_different_types_differ(tmp_path, run, case):
    """llama.cpp refuses a value of another type; a lock has the types too."""
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for path, entry in zip(paths, VALUE_PAIRS[case], strict=True):
        path.write_bytes(raw_file([entry], [tensor("w", [2])], bytes(8)))
    assert [run("diff", *pair)[0] for pair in (paths, paths[::-1], paths[:1] * 2)] == [1, 1, 0]
    assert run("lock", paths[0], "-o", tmp_path / "lock.json")[0] == 0
    assert run("audit", paths[0], "--lock", tmp_path / "lock.json")[0] == 0
    paths[0].write_bytes(paths[1].read_bytes())
    assert run("audit", paths[0], "--lock", tmp_path / "lock.json")[0] == 1


def test_an_attack_in_the_metadata_is_inert(tmp_path, run):
    """A pickle in a text is plain bytes for llama.cpp and for statecli."""
    marker = tmp_path / "ran"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    path = write_raw_file(tmp_path, [key("k", 8, text(payload))], [tensor("w", [8])], struct.pack("<8f", *range(8)))
    assert run("inspect", path)[0] == 0
    assert run("audit", path, "--values")[0] in (0, 1)
    assert not marker.exists()
