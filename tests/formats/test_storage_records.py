"""Storages larger than their records: torch's reader in C++ uses other memory of the process for the elements."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest
import torch

from statecli.file_scan.scan import scan_pickles

from .torch_archives import read_archive, write_archive

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

#: Number of int64 elements that the pickle claims, and number of elements in the short record.
CLAIMED, RECORDED = 64, 2


class Keyed(torch.nn.Module):
    """A program with a tensor as key of a dict, where no reader looks for rows."""

    def __init__(self):
        super().__init__()
        self.table = {torch.arange(CLAIMED): 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return list(self.table.keys())[0] + x  # noqa: RUF015  # TorchScript has no next()


class Constant(torch.nn.Module):
    """A program with a tensor that is not a parameter."""

    def __init__(self):
        super().__init__()
        self.c = torch.arange(CLAIMED)

    def forward(self, x):
        return self.c + x


def shorten(records: dict[str, bytes]) -> dict[str, bytes]:
    """Return the records with fewer elements in each storage than its pickle claims."""
    size = CLAIMED * 8
    return {name: content[: RECORDED * 8] if len(content) == size else content for name, content in records.items()}


def find_hazards(path: Path) -> list[str]:
    return [hazard.text for finding in scan_pickles(str(path)) for hazard in finding.hazards]


#: Record of an exported program with the entries of its constants.
CONFIG = "data/constants/model_constants_config.json"
EXPECTED_HAZARD = f"has {CLAIMED * 8} bytes, but its record has {RECORDED * 8}"


@pytest.mark.parametrize("folder", ["data", "DATA"])
def test_short_record_of_a_dict_key_is_found(tmp_path, statecli, folder):
    """torch.jit.load creates a tensor of all claimed elements from any record, in a folder of either case."""
    path = tmp_path / "a.pt"
    torch.jit.save(torch.jit.script(Keyed()), path)
    records = {name.replace("data/", f"{folder}/"): content for name, content in read_archive(path).items()}
    write_archive(records, str(path))
    assert find_hazards(path) == []
    write_archive(shorten(records), str(path))
    (key,) = torch.jit.load(path).table
    assert key.untyped_storage().nbytes() == CLAIMED * 8
    (hazard,) = find_hazards(path)
    assert EXPECTED_HAZARD in hazard
    audit = statecli("audit", str(path), "--no-config")
    assert (audit.code, "unsafe-data" in audit.out) == (1, True)


def test_short_record_of_a_lite_constant_is_found(tmp_path):
    """Records of the lite interpreter are in `constants`, or their names end with `.storage`."""
    path = tmp_path / "a.ptl"
    torch.jit.script(Keyed())._save_for_lite_interpreter(str(path))
    records = read_archive(path)
    assert not any(EXPECTED_HAZARD in hazard for hazard in find_hazards(path))
    write_archive(shorten(records), str(path))
    assert records != shorten(records)
    assert any(EXPECTED_HAZARD in hazard for hazard in find_hazards(path))


def test_short_record_of_an_exported_object_is_found(script_records, exported_records, tmp_path):
    """torch.export.load reads the constant `custom_obj_0` with the reader in C++, even if the constant is a tensor."""
    for change, expected in ((dict, False), (shorten, True)):
        inner = io.BytesIO()
        write_archive(change(script_records), inner)
        constant = change_constant(
            exported_records, "custom_obj_0", inner.getvalue(), use_pickle=True, tensor_meta=None
        )
        write_archive(constant, str(tmp_path / "a.pt2"))
        assert any(EXPECTED_HAZARD in hazard for hazard in find_hazards(tmp_path / "a.pt2")) == expected


def test_equal_pickle_with_a_short_record_is_checked_again(tmp_path):
    """A pickle that is harmless in one archive is checked again in an archive with a shorter record."""
    path = tmp_path / "a.pt2"
    torch.save(torch.arange(CLAIMED), tmp_path / "inner")
    inner = read_archive(tmp_path / "inner")
    for order in ((dict, shorten), (shorten, dict)):
        records = {}
        for number, change in enumerate(order):
            content = io.BytesIO()
            write_archive(change(inner), content)
            records[f"data/weights/weight_{number}"] = content.getvalue()
        write_archive(records, str(path))
        assert [EXPECTED_HAZARD in hazard for hazard in find_hazards(path)] == [True]


@pytest.fixture(scope="module")
def script_records(tmp_path_factory) -> dict[str, bytes]:
    """The records of a program whose data.pkl the tests change."""
    path = tmp_path_factory.mktemp("script") / "honest.pt"
    torch.jit.save(torch.jit.script(Keyed()), path)
    return read_archive(path)


@pytest.fixture(scope="module")
def exported_records(tmp_path_factory) -> dict[str, bytes]:
    """The records of an exported program with a constant `c`."""
    path = tmp_path_factory.mktemp("exported") / "a.pt2"
    torch.export.save(torch.export.export(Constant(), (torch.ones(CLAIMED, dtype=torch.int64),)), path)
    records = read_archive(path)
    if CONFIG not in records:
        pytest.skip("needs a newer torch")
    return records


def change_constant(exported_records: dict[str, bytes], record: str, content: bytes, **changes) -> dict[str, bytes]:
    """Return the records of the exported program with another entry and record for the constant `c`."""
    document = json.loads(exported_records[CONFIG])
    document["config"]["c"] |= {"path_name": record, **changes}
    return {**exported_records, CONFIG: json.dumps(document).encode(), f"data/constants/{record}": content}


def test_empty_record_outside_the_example_inputs_is_found(script_records, tmp_path):
    """A storage key may look like an example input: torch makes a storage at address 0 from an empty record."""
    key = b"traced_inputs/0"
    data = script_records["data.pkl"].replace(b"X\x01\0\0\x000", b"X" + bytes([len(key), 0, 0, 0]) + key)
    assert key in data
    write_archive({**script_records, "data.pkl": data, "data/traced_inputs/0": b""}, str(tmp_path / "a.pt"))
    assert any("but its record has 0" in hazard for hazard in find_hazards(tmp_path / "a.pt"))


@pytest.mark.parametrize("name", [b"torch\nper_channel_affine_float_qparams", b"__torch__\nLongStorage"])
def test_storage_of_another_class_is_found(script_records, tmp_path, name):
    """torch's reader in C++ takes the number of a quantization scheme, or of a class, for a dtype."""
    data = script_records["data.pkl"].replace(b"ctorch\nLongStorage\n", b"c" + name + b"\n")
    assert data != script_records["data.pkl"]
    write_archive({**script_records, "data.pkl": data}, str(tmp_path / "a.pt"))
    assert any("not a storage class of torch" in hazard for hazard in find_hazards(tmp_path / "a.pt"))


def test_rebuild_from_type_in_torchscript_is_found(script_records, tmp_path):
    """torch.save writes `_rebuild_from_type_v2` for subclasses of tensors; torch.jit.save never does."""
    data = script_records["data.pkl"][:-1] + b"ctorch._tensor\n_rebuild_from_type_v2\n0."
    write_archive({**script_records, "data.pkl": data}, str(tmp_path / "a.pt"))
    assert any("_rebuild_from_type_v2" in hazard for hazard in find_hazards(tmp_path / "a.pt"))


def test_call_of_a_quantization_scheme_is_found(script_records, tmp_path):
    """A quantization scheme is a number in torch's reader in C++, so a call of the scheme calls another name."""
    data = script_records["data.pkl"][:-1] + b"ctorch\nper_channel_symmetric\n)R0."
    write_archive({**script_records, "data.pkl": data}, str(tmp_path / "a.pt"))
    assert any(mention.misuse for finding in scan_pickles(str(tmp_path / "a.pt")) for mention in finding.names)


def test_tensor_declared_as_an_object_is_found(exported_records, tmp_path, statecli):
    """The sizes of the tensor are not in a tensor_meta, so torch does not compare them with the graph."""
    content, path = io.BytesIO(), str(tmp_path / "a.pt2")
    torch.save(torch.ones(3), content)
    constant = change_constant(exported_records, "custom_obj_0", content.getvalue(), use_pickle=True, tensor_meta=None)
    write_archive(constant, path)
    audit = statecli("audit", path, "--select", "unsafe-data")
    assert (audit.code > 0, "the program declares a tensor as an object" in audit.out) == (True, True)


@pytest.mark.parametrize(("size", "code"), [(CLAIMED, 0), (2**40, 1)])
def test_huge_zeros_of_an_empty_record_are_found(size, code, exported_records, tmp_path, statecli):
    """torch.export.load creates zeros of any claimed size for a tensor whose record is empty."""
    meta = {
        "dtype": 5,
        "sizes": [{"as_int": size}],
        "strides": [{"as_int": 1}],
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "storage_offset": {"as_int": 0},
        "layout": 7,
    }
    path = str(tmp_path / "a.pt2")
    write_archive(change_constant(exported_records, "tensor_7", b"", use_pickle=False, tensor_meta=meta), path)
    if size == CLAIMED:
        assert torch.export.load(path).constants["c"].tolist() == [0] * size
    audit = statecli("audit", path, "--select", "allocation-bomb")
    assert (audit.code > 0, f"creates {size:,} zeros" in audit.out) == (code == 1, code == 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict[str, bytes]:
    """The records of a program with one buffer."""
    path = tmp_path_factory.mktemp("model") / "model.pt"

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.zeros(64, dtype=torch.uint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.sum() > 0, "negative"
            return self.w + x

    torch.jit.save(torch.jit.script(Model()), path)
    assert find_hazards(path) == []
    return read_archive(path)


@pytest.mark.parametrize("module", ["torch.cuda", "torch.storage"])
def test_archive_class_named_like_a_storage_is_found(module, model, tmp_path, statecli):
    """torch.jit.load takes the number of the class for a dtype with up to 16 bytes an element."""
    old, new = b"ctorch\nByteStorage\n", f"c{module}\nByteStorage\n".encode()
    assert old in model["data.pkl"]
    code = b"class ByteStorage(Module):\n  __parameters__ = []\n  __buffers__ = []\n"
    names = {"data.pkl": model["data.pkl"].replace(old, new), f"code/{module.replace('.', '/')}.py": code}
    write_archive({**model, **names}, str(tmp_path / "a.pt"))
    hazards = find_hazards(tmp_path / "a.pt")
    assert any("has a class that is not a storage class of torch" in text for text in hazards)
    assert any("outside of code/__torch__" in text for text in hazards)
    assert statecli("audit", tmp_path / "a.pt", "--select", "unsafe-data").code == 1


@pytest.mark.parametrize("opcodes", [b")\x81", b""], ids=["newobj", "class"])
def test_state_for_a_storage_class_is_read_as_a_call(opcodes, tmp_path):
    """BUILD calls the import with the number of the class, and this import may be any function."""
    state = b"\x80\x02ctorch\nFloatStorage\n" + opcodes + b"(K\x00K\x01t" + b"b."
    write_archive({"data.pkl": state, "constants.pkl": b"\x80\x02).", "code/__torch__.py": b""}, str(tmp_path / "a.pt"))
    names = [name.qualified for finding in scan_pickles(str(tmp_path / "a.pt")) for name in finding.names]
    assert "pickle.Unpickler.load_reduce" in names


@pytest.mark.parametrize("number", [-1, 10**9, "count"])
def test_location_outside_the_text_table_is_found(number, model, tmp_path):
    """torch reads memory outside the table for the message of a failed assertion."""
    (record,) = [name for name in model if name.endswith(".debug_pkl")]
    form, texts, locations = pickle.loads(model[record])
    number = len(texts) if number == "count" else number
    content = locations[1]
    source = ((number,), *content[1][0][1:])
    for changed in (
        (*locations[:1], (content[0], (source, *content[1][1:]), *content[2:])),
        (*locations[:1], (content[0], ((content[1][0][0], number, 0), *content[1][1:]), *content[2:])),
    ):
        write_archive({**model, record: pickle.dumps((form, texts, changed), 2)}, str(tmp_path / "a.pt"))
        assert [text for text in find_hazards(tmp_path / "a.pt") if "outside this table" in text]
