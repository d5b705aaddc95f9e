"""Archives of torch.export: real archives compared with `torch.export.load`, and archives that torch never writes."""

from __future__ import annotations

import base64
import contextlib
import datetime
import io
import json
import logging
import pickle
import re
import signal
import struct
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial

from statecli import formats
from statecli.commands.audit.run import Request, audit
from statecli.core.errors import UnreadableError
from statecli.core.model_state import Evidence, Kind
from statecli.core.oddity_kind import OddityKind
from statecli.file_scan.scan import scan_pickles
from statecli.formats import torch_export, torch_zip
from statecli.formats.torch import exported_metadata
from statecli.pickle_scan.export_expressions import describe_cost, is_plain_expression, is_plain_guard
from statecli.pickle_scan.program_schema import TextRequirement, iter_texts
from statecli.pickle_scan.step_budget import Steps
from statecli.rules.pickles import RULES
from statecli.storage import json_object
from statecli.values.read import read_all_values

from ..forked_python import run_code
from . import attacks
from .test_any_bytes import read_or_refuse
from .torch_archives import build_archive, read_archive

packages = pytest.importorskip("torch.export.pt2_archive._package", reason="needs torch 2.8: archives of torch.export")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _quiet():
    """Disable logging, because torch logs at length about older layouts."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Block(nn.Module):
    """A module with each kind of tensor that a signature distinguishes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).reshape(3, 4).t()[:3], requires_grad=False)
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.register_buffer("scale", torch.full((2,), 2.0))
        self.table = torch.randn(2, 2)

    def forward(self, x):
        return x @ self.w + self.table.sum() + self.steps.sum() + self.scale.sum()


class Net(nn.Module):
    """A module with tied weights, and a tensor that its code creates from a literal."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.block = Block()
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.fc.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.tied(self.block(self.fc(x)))) + torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture(scope="module")
def program():
    """A program, exported once for all tests of this file."""
    torch.manual_seed(5)
    return torch.export.export(Net().eval(), (torch.randn(4, 3),))


def save_current_layout(program, path: Path) -> Path:
    """Save the program in the layout of the installed torch."""
    torch.export.save(program, path)
    return path


def _serialize(program):
    from torch._export.serde.serialize import serialize

    return serialize(program)


def save_2_8_layout(program, path: Path) -> Path:
    """Save weights and constants in two archives of torch.save; torch 2.13 still loads this layout."""
    artifact = _serialize(program)
    with packages.PT2ArchiveWriter(str(path)) as writer:
        writer.write_bytes("models/model.json", artifact.exported_program)
        writer.write_bytes("data/weights/model.pt", artifact.state_dict)
        writer.write_bytes("data/constants/model.pt", artifact.constants)
        writer.write_bytes("data/sample_inputs/model.pt", artifact.example_inputs)
    return path


def save_2_7_layout(program, path: Path, suffix: str = "pt") -> Path:
    """Save the program in a plain zip; torch 2.13 still loads this layout."""
    artifact = _serialize(program)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("serialized_exported_program.json", artifact.exported_program)
        archive.writestr(f"serialized_state_dict.{suffix}", artifact.state_dict)
        archive.writestr(f"serialized_constants.{suffix}", artifact.constants)
        archive.writestr("serialized_example_inputs.pt", artifact.example_inputs)
        archive.writestr("version", "8.20")
    return path


WRITERS = [save_current_layout, save_2_8_layout, save_2_7_layout]
each_layout = pytest.mark.parametrize("writer", WRITERS, ids=lambda function: function.__name__)


def read(path):
    """Return the state of an archive."""
    return formats.read(str(path))


# --- comparison with torch -------------------------------------------------------------------------------------------


@each_layout
def test_archive_agrees_with_torch_in_each_layout(writer, program, tmp_path):
    """Kinds, persistence, shapes, dtypes, requires_grad, values, ties and strides agree with torch in each layout."""
    path = writer(program, tmp_path / "x.pt2")
    loaded = torch.export.load(path)
    signature = loaded.graph_signature
    state = read(path)
    rows = {row.fqn: row for row in state.tensors}
    assert (state.format, state.sections) == ("torch-export", ("model",))
    assert [row.fqn for row in state.tensors if row.kind is Kind.PARAMETER] == list(signature.parameters)
    assert [row.fqn for row in state.tensors if row.kind is Kind.BUFFER] == list(signature.buffers)
    constants = [row for row in state.tensors if row.kind is Kind.UNREGISTERED]
    assert [row.fqn for row in constants] == list(signature.lifted_tensor_constants)
    kept_out = {fqn for fqn, row in rows.items() if row.persistent is False}
    assert kept_out == set(signature.non_persistent_buffers) == {"block.steps"}
    assert (rows["tied.weight"].tied_to, rows["fc.bias"].tied_to) == (("fc.weight",), ())
    assert (rows["block.w"].data.strides, rows["block.w"].requires_grad) == ((1, 4), False)
    for fqn, tensor in {**loaded.state_dict, **loaded.constants}.items():
        row = rows.pop(fqn)
        assert (row.shape, f"torch.{row.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert (row.requires_grad, row.device) == (tensor.requires_grad, "cpu")
        assert (read_all_values(row.data).reshape(row.shape) == tensor.detach().numpy()).all()
        assert row.saved is (fqn in loaded.state_dict)
    assert not rows


def test_program_records_kinds_and_versions(program, tmp_path):
    """The signature records the kinds, but names no attribute for a tensor from a literal in the code."""
    state = read(save_current_layout(program, tmp_path / "x.pt2"))
    rows = {row.fqn: row for row in state.tensors}
    assert {row.evidence for fqn, row in rows.items() if fqn != "lifted_tensor_0"} == {Evidence.REGISTERED}
    literal = rows["lifted_tensor_0"]
    assert (literal.evidence, literal.note) == (Evidence.ASSUMED, "a constant of the code")
    assert rows["block.table"].note is None
    values = state.metadata.values
    assert values["torch_version"] == str(torch.__version__)
    assert values["schema_version"].partition(".")[0].isdecimal()


def test_archive_named_json_by_torch_2_1_is_read(program, tmp_path):
    """torch.export of torch 2.1 used the name `serialized_state_dict.json` for an archive of torch.save."""
    state = read(save_2_7_layout(program, tmp_path / "x.pt2", "json"))
    assert len(state.tensors) == 13


def test_each_program_is_a_section(tmp_path):
    """An archive may contain several programs, whose records share a numbering."""
    programs = {
        name: torch.export.export(module, (torch.randn(2, 3),))
        for name, module in (("encoder", nn.Linear(3, 3)), ("decoder", nn.BatchNorm1d(3)))
    }
    packages.package_pt2(str(tmp_path / "x.pt2"), exported_programs=programs)
    state = read(tmp_path / "x.pt2")
    assert state.sections == ("encoder", "decoder")
    for row in state.tensors:
        tensor = programs[row.section].state_dict[row.fqn]
        assert (read_all_values(row.data).reshape(row.shape) == tensor.detach().numpy()).all()
    assert "encoder.torch_version" in state.metadata.values


def test_dtype_table_equals_the_schema_of_torch(tmp_path):
    """`DTYPES` has each dtype with a number in the schema."""
    from torch._export.serde.schema import ScalarType
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    names = {int(number): str(dtype).removeprefix("torch.") for number, dtype in _SERIALIZE_TO_TORCH_DTYPE.items()}
    assert names == exported_metadata.DTYPES
    assert {int(number) for number in ScalarType} - {0} == set(names)


def test_a_tensor_subclass_is_read_from_its_own_archive(tmp_path):
    """A tensor subclass is pickled; its parts are listed, but the way its class combines the parts is unknown."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(two_tensor.TwoTensor(torch.ones(3, 3), torch.zeros(3, 3)))
            self.b = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + self.b

    path = save_current_layout(torch.export.export(Holder(), (torch.randn(2, 3),)), tmp_path / "x.pt2")
    rows = {row.fqn: row for row in read(path).tensors}
    assert (rows["w"].shape, rows["w"].note, rows["w"].kind) == ((3, 3), "TwoTensor", Kind.PARAMETER)
    assert [name for name, _ in rows["w"].parts] == ["a", "b"]
    assert (read_all_values(rows["w"].parts[0][1]) == 1).all()
    assert rows["b"].shape == (3,)


def test_fake_tensors_have_no_values(tmp_path):
    """torch loads zeros for fake tensors; statecli lists fake tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        program = torch.export.export(nn.Linear(3, 2), (torch.randn(2, 3),))
        save_current_layout(program, tmp_path / "x.pt2")
    rows = read(tmp_path / "x.pt2").tensors
    assert [(row.fqn, row.shape, row.data) for row in rows] == [("weight", (2, 3), None), ("bias", (2,), None)]
    assert rows[0].note == "saved without values (fake tensor)"


def test_weights_of_a_compiled_library_are_noted(tmp_path):
    """Weights next to a compiled library are listed; a note reports weights inside the library."""
    from torch.export.pt2_archive._package_weights import TensorProperties, Weights

    library = tmp_path / "model.wrapper.so"
    library.write_bytes(b"\x7fELF")
    matrix = torch.arange(12.0).reshape(3, 4)
    views = {"a": matrix, "b": matrix[1:], "t": matrix.t()}
    weights = Weights({name: (view, TensorProperties(view)) for name, view in views.items()})
    packages.package_pt2(str(tmp_path / "x.pt2"), aoti_files={"model": [str(library), weights]})
    state = read(tmp_path / "x.pt2")
    assert state.sections == ("aotinductor.model",)
    for row in state.tensors:
        assert (read_all_values(row.data).reshape(row.shape) == views[row.fqn].numpy()).all()
        assert (row.kind, row.evidence) == (Kind.PARAMETER, Evidence.ASSUMED)
    assert [oddity.name for oddity in state.oddities] == ["aotinductor"]
    packages.package_pt2(str(tmp_path / "y.pt2"), aoti_files={"model": [str(library)]})
    assert (
        "has tensors only in the compiled library, which statecli does not read: 1 file is compiled by AOTInductor "
        "(model)" in {oddity.message for oddity in read(tmp_path / "y.pt2").oddities}
    )


def test_program_equals_its_state_dict(program, tmp_path, statecli):
    """A program and its state_dict do not differ, and either passes the lock of the other."""
    path, state_dict_path = save_current_layout(program, tmp_path / "x.pt2"), tmp_path / "sd.pt"
    torch.save(program.state_dict, state_dict_path)
    assert statecli("diff", path, state_dict_path).code == 0
    for locked, audited in ((path, state_dict_path), (state_dict_path, path)):
        lock = tmp_path / f"{locked.name}.json"
        assert statecli("lock", locked, "-o", lock).code == 0
        result = statecli("audit", audited, "--lock", lock, "--select", "lock")
        assert result.code == 0, result


@each_layout
def test_audit_of_an_ordinary_archive_is_clean(writer, tmp_path, statecli):
    """An audit has no findings about an ordinary archive and the archives inside."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    path = writer(torch.export.export(module, (torch.randn(2, 3),)), tmp_path / "x.pt2")
    result = statecli("audit", path, "--values", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, [])


def test_tensor_that_is_not_a_buffer_is_found(program, tmp_path, statecli):
    """`.to` of the loaded module leaves a plain tensor unchanged, so the tensor is found; a literal is not."""
    path = save_current_layout(program, tmp_path / "x.pt2")
    module = torch.export.load(path).module()
    assert module.to(torch.float64).block.table.dtype == torch.float32
    result = statecli("audit", path, "-f", "json", "--select", "unregistered-tensor")
    (finding,) = result.json["findings"]
    assert (finding["fqn"], finding["severity"]) == ("block.table", "note")
    assert finding["help"].startswith("no action is needed if you run the archive as it is")
    assert result.code == 0


def test_class_is_compared_only_with_the_state_dict(program, tmp_path, statecli):
    """Tensors outside the state_dict are not compared with the class, because a strict load ignores them."""
    source = Path(__file__).read_text()
    start, end = source.index("class Block("), source.index('@pytest.fixture(scope="module")')
    (tmp_path / "net.py").write_text("import torch\nfrom torch import nn\n\n\n" + source[start:end])
    words = [
        "inspect",
        save_current_layout(program, tmp_path / "x.pt2"),
        "--model",
        f"{tmp_path / 'net.py'}:Net",
        "-f",
        "json",
    ]
    result = statecli(*words)
    assert (result.code, result.json["findings"]) == (0, [])


# --- archives that torch never writes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The records of a small archive, by name without the folder."""
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(2, 3),))
    return read_archive(save_current_layout(program, tmp_path_factory.mktemp("parts") / "x.pt2"))


CONFIG = "data/weights/model_weights_config.json"
MODEL = "models/model.json"


def write_changed_program(records: dict[str, bytes], path: Path, edit: Callable[[dict], object]) -> Path:
    """Write an archive of the records after `edit` has changed the JSON of the program."""
    program = json.loads(records[MODEL])
    edit(program)
    return build_archive(path, {**records, MODEL: _json(program)})


def change_entry(parts, **changes) -> dict[str, bytes]:
    """Return the records with a changed entry for `weight`; `meta` changes keys of its tensor_meta."""
    config = json.loads(parts[CONFIG])
    config["config"]["weight"]["tensor_meta"].update(changes.pop("meta", {}))
    config["config"]["weight"].update(changes)
    return {**parts, CONFIG: json.dumps(config).encode()}


def test_an_archive_built_by_hand_is_read(parts, tmp_path):
    """The archive from which the tests below build damaged archives is valid."""
    rows = read(build_archive(tmp_path / "y.pt2", parts)).tensors
    assert [(row.fqn, row.shape, row.damage) for row in rows] == [("weight", (2, 3), None), ("bias", (2,), None)]


def test_a_big_endian_archive_is_refused(parts, tmp_path, line):
    """torch.export.load ignores the byteorder record and does not swap bytes."""
    path = build_archive(tmp_path / "x.pt2", {**parts, "byteorder": b"big"})
    weight = torch.export.load(path).state_dict["weight"]
    assert line(path).startswith(
        "the byteorder record is 'big', but torch.jit.load and torch.export.load ignore this record"
    )
    assert torch.equal(weight, torch.export.load(build_archive(tmp_path / "x.pt2", parts)).state_dict["weight"])


def _int(number):
    return {"as_int": number}


#: Invalid entries, and the text of their damage.
WRONG_ENTRIES = {
    "an unknown dtype": ({"meta": {"dtype": 99}}, "its dtype is 99, which torch 2.13 never writes"),
    "a dtype that is a list": ({"meta": {"dtype": []}}, "its dtype is a list"),
    "a dtype that is true": ({"meta": {"dtype": True}}, "its dtype is True"),
    "a symbolic size": (
        {"meta": {"sizes": [{"as_expr": {"expr_str": "s0"}}, _int(3)]}},
        "its sizes must contain integers, but contains a symbol",
    ),
    "sizes that are no list": ({"meta": {"sizes": 3}}, "its sizes are not a list but 3"),
    "a size below zero": (
        {"meta": {"sizes": [_int(-1), _int(3)]}},
        "its shape contains -1; expected integers from 0 to 2^63 - 1",
    ),
    "a huge size": ({"meta": {"sizes": [_int(2**62), _int(2**62)]}}, "2^63 elements or more"),
    "too many dimensions": ({"meta": {"sizes": [_int(1)] * 2000}}, "2000 dimensions"),
    "a shape beyond its storage": ({"meta": {"sizes": [_int(3), _int(3)]}}, "needs 9 elements, but storage"),
    "strides beyond its storage": ({"meta": {"strides": [_int(9), _int(1)]}}, "needs 12 elements"),
    "strides of another length": ({"meta": {"strides": [_int(7)]}}, "its shape has 2 sizes, but there are 1 strides"),
    "an offset beyond its storage": ({"meta": {"storage_offset": _int(1)}}, "at offset 1 needs 7 elements"),
    "an offset below zero": ({"meta": {"storage_offset": _int(-1)}}, "its offset into storage"),
    "an offset that is none": (
        {"meta": {"storage_offset": None}},
        "its storage_offset must contain integers, but contains None",
    ),
    "a layout that is not strided": ({"meta": {"layout": 1}}, "its layout is 1, not 7 (strided)"),
    "no device": ({"meta": {"device": None}}, "its device is None"),
    "a device of many letters": ({"meta": {"device": {"type": "x" * 500}}}, "its device name has 500 characters"),
    "requires_grad in words": ({"meta": {"requires_grad": "yes"}}, "requires_grad is recorded as 'yes'"),
    "a record that is not there": ({"path_name": "weight_9"}, "storage 'data/weights/weight_9' is not in the file"),
    "no record": ({"path_name": None}, "its path_name is None"),
    "an archive that is not there": ({"path_name": "nine", "use_pickle": True}, "'data/weights/nine' is not in the"),
    "an archive that is none": ({"use_pickle": True}, "record 'data/weights/weight_0': "),
    "pickles in a number": ({"use_pickle": 1}, "its use_pickle is 1, not a bool"),
    "a parameter in a number": ({"is_param": 1}, "its is_param is 1, not a bool"),
    "no tensor_meta": ({"tensor_meta": None}, "its tensor_meta is not a JSON object but None"),
}


@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_inconsistent_tensor_spoils_no_other_tensor(case, parts, tmp_path, inspect):
    """Other tensors are listed, and the exit status is 2."""
    changes, message = WRONG_ENTRIES[case]
    changes = {key: dict(value) if key == "meta" else value for key, value in changes.items()}
    path = build_archive(tmp_path / "y.pt2", change_entry(parts, **changes))
    rows = {row.fqn: row for row in read(path).tensors}
    assert rows["bias"].damage is None
    assert message in rows["weight"].damage
    code, out, err = inspect(path, "-f", "plain")
    assert (code, "bias" in out, message in err) == (2, True, True)


def test_use_pickle_that_is_not_a_bool_is_damage(parts, tmp_path):
    """torch accepts any true value for use_pickle: the bytes at the offset are not the weight."""
    out = io.BytesIO()
    torch.save(nn.Parameter(torch.full((2, 3), 9.0)), out)
    path = build_archive(
        tmp_path / "y.pt2", {**change_entry(parts, use_pickle=1), "data/weights/weight_0": out.getvalue()}
    )
    assert torch.export.load(path).state_dict["weight"].tolist() == [[9.0] * 3] * 2
    assert "its use_pickle is 1" in read(path).tensors[0].damage


@pytest.mark.parametrize("meta", [{"dtype": 4}, {"device": {"type": "meta", "index": None}}], ids=["dtype", "device"])
def test_second_dtype_or_device_of_one_record_is_damage(meta, parts, tmp_path):
    """torch gives both tensors of a record the dtype and the device of the first."""
    config = json.loads(parts[CONFIG])
    config["config"]["bias"]["path_name"] = config["config"]["weight"]["path_name"]
    sound = build_archive(tmp_path / "x.pt2", {**parts, CONFIG: _json(config)})
    assert [row.damage for row in read(sound).tensors] == [None, None]
    config["config"]["bias"]["tensor_meta"].update(meta)
    path = build_archive(tmp_path / "y.pt2", {**parts, CONFIG: _json(config)})
    bias = torch.export.load(path).state_dict["bias"]
    assert (bias.dtype, bias.device.type) == (torch.float32, "cpu")
    assert f"its {next(iter(meta))} differs from the {next(iter(meta))} of the first tensor in record 'weight_0'" in (
        read(path).tensors[1].damage
    )


def test_two_descriptions_of_an_inner_storage_are_damage(parts, tmp_path):
    """torch uses the first description for both tensors."""
    inner = {
        "archive/data.pkl": attacks.state_dict(
            weight=attacks.tensor(size=(2, 2), stride=(2, 1)), bias=attacks.tensor(kind="IntStorage")
        ),
        "archive/byteorder": b"little",
        "archive/data/0": bytes(16),
        "archive/version": b"3",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in inner.items():
            archive.writestr(name, data)
    rows = read(build_archive(tmp_path / "y.pt2", {**parts, "data/weights/model.pt": out.getvalue()})).tensors
    assert all("in two ways" in row.damage for row in rows)


def test_record_name_decides_whether_a_constant_is_a_tensor(parts, tmp_path):
    """torch unpickles a constant whose record is not named like a tensor, whatever the entry says."""
    config = json.loads(parts[CONFIG])["config"]["bias"]
    item = {"obj": {**config, "path_name": "opaque_obj_0"}}
    records = {
        "data/constants/model_constants_config.json": _json({"config": item}),
        "data/constants/opaque_obj_0": b"\x80\2K\1.".ljust(8, b"\0"),
    }
    path = build_archive(tmp_path / "y.pt2", {**parts, **records})
    assert torch.export.load(path).constants["obj"] == 1
    state = read(path)
    assert "obj" not in {row.fqn for row in state.tensors}
    assert ("custom-object", "obj") in {(oddity.name, oddity.fqn) for oddity in state.oddities}


def test_missing_or_unknown_record_is_named(parts, tmp_path, line):
    """The error names a required record that is missing or has an unexpected content."""
    for missing_record, message in (
        (CONFIG, f"contains no {CONFIG}: the export did not finish; export the program again"),
        ("data/constants/model_constants_config.json", "contains no data/constants/model_constants_config.json: the "),
    ):
        path = build_archive(tmp_path / "y.pt2", {name: data for name, data in parts.items() if name != missing_record})
        assert line(path).startswith(message)
    for changed_record, data, message in (
        (
            "archive_version",
            b"7",
            "the archive_version record contains '7': a newer torch wrote the file; statecli knows only '0'",
        ),
        ("archive_format", b"pt3", "the archive_format record contains 'pt3'; statecli knows only 'pt2'"),
        (
            ".data/version",
            b"11",
            "the version record says 11: a newer torch wrote the file; statecli knows only versions up to 10",
        ),
        (CONFIG, b"{}", f"{CONFIG} has no JSON object under 'config'"),
        (CONFIG, b"{", f"{CONFIG} is not valid JSON"),
        (CONFIG, b'{"config": {"a": {}, "a": {}}}', f"{CONFIG} has the key 'a' twice"),
        ("models/model.json", b"{}", "its program has no list graph_module.signature.input_specs"),
        ("models/model.json", b"[]", "models/model.json is not a JSON object"),
    ):
        assert line(build_archive(tmp_path / "y.pt2", {**parts, changed_record: data})).startswith(message)


def test_weights_without_a_program_are_refused(parts, program, tmp_path, line, statecli):
    """Without a program, no signature describes the tensors: refused in both layouts, also with constants alone."""
    for folder in ("weights", "constants"):
        other_folder = f"data/{'weights' if folder == 'constants' else 'constants'}/"
        remaining_parts = {
            name: data for name, data in parts.items() if name != MODEL and not name.startswith(other_folder)
        }
        path = build_archive(tmp_path / "y.pt2", remaining_parts)
        assert line(path) == f"contains {folder} of 'model', but no models/model.json; export the program again"
        assert statecli("audit", path).code == 2
    records = read_archive(save_2_8_layout(program, tmp_path / "x.pt2"))
    path = build_archive(tmp_path / "y.pt2", {name: data for name, data in records.items() if name != MODEL})
    assert line(path) == "contains weights of 'model', but no models/model.json; export the program again"
    changed_parts = {**parts, "data/weights/b_weights_config.json": b'{"config": {}}'}
    assert (
        line(build_archive(tmp_path / "y.pt2", changed_parts))
        == "contains weights of 'b', but no models/b.json; export the program again"
    )


def write_schema_version(parts, version, path: Path) -> Path:
    """Write the archive with another schema version of the program; None removes the version."""

    def edit(program: dict) -> None:
        del program["schema_version"]
        if version is not None:
            program["schema_version"] = version

    return write_changed_program(parts, path, edit)


def test_a_newer_schema_is_refused(parts, tmp_path, line):
    """torch.export.load also refuses a newer schema; the same words may have another meaning in the program."""
    torch.export.load(write_schema_version(parts, {"major": 0, "minor": 0}, tmp_path / "y.pt2"))
    path = write_schema_version(parts, {"major": 99, "minor": 1}, tmp_path / "y.pt2")
    with pytest.raises(RuntimeError):
        torch.export.load(path)
    assert (
        line(path)
        == "program 'model' has schema_version 99: a newer torch wrote the program; statecli knows only versions up to "
        "8"
    )


@pytest.mark.parametrize("version", [{"major": 7, "minor": 3}, 1], ids=["7.3", "1"])
def test_an_older_schema_is_read_and_noted(version, parts, tmp_path):
    """torch 2.13 does not load an older schema, but all schemas describe weights in the same way."""
    state = read(write_schema_version(parts, version, tmp_path / "y.pt2"))
    assert len(state.tensors) == 2
    (message,) = [oddity.message for oddity in state.oddities if oddity.name == "schema-version"]
    assert message.endswith("but torch 2.13 loads only 8")


@pytest.mark.parametrize("version", [None, {"major": 0, "minor": 0}, {"major": 8, "minor": 99}], ids=["none", "0", "8"])
def test_schema_version_that_torch_loads_has_no_note(version, parts, tmp_path):
    """Version 0.0 disables the check of torch, and a higher minor version keeps the existing fields."""
    state = read(write_schema_version(parts, version, tmp_path / "y.pt2"))
    assert (len(state.tensors), [oddity.name for oddity in state.oddities]) == (2, [])


@pytest.mark.parametrize("version", ["8", [8, 20], {}, {"major": True}, {"major": -1}, 8.5], ids=repr)
def test_invalid_schema_version_is_refused(version, parts, tmp_path, line):
    """An invalid schema version is refused in one line."""
    assert "expected an integer of 0 or more" in line(write_schema_version(parts, version, tmp_path / "y.pt2"))


def test_archive_without_an_archive_version_is_read(parts, tmp_path):
    """torch takes a missing archive_version for version 0."""
    path = build_archive(tmp_path / "y.pt2", {name: data for name, data in parts.items() if name != "archive_version"})
    assert len(read(path).tensors) == 2


def test_a_name_that_only_the_signature_has_is_damage(parts, tmp_path):
    """The tensor without an entry is damaged; other tensors are listed."""
    config = json.loads(parts[CONFIG])
    del config["config"]["weight"]
    rows = {row.fqn: row for row in read(build_archive(tmp_path / "y.pt2", {**parts, CONFIG: _json(config)})).tensors}
    assert rows["weight"].damage.endswith(
        "the program needs this tensor, but no weight and no constant of the archive has its name"
    )
    assert rows["bias"].damage is None


def test_a_name_that_only_the_entries_have_is_listed(parts, tmp_path):
    """A tensor that the signature does not name is listed as described by its entry."""
    config = json.loads(parts[CONFIG])
    config["config"]["more"] = config["config"]["weight"]
    config["config"]["buffer"] = {**config["config"]["bias"], "is_param": False}
    rows = {row.fqn: row for row in read(build_archive(tmp_path / "y.pt2", {**parts, CONFIG: _json(config)})).tensors}
    assert (rows["more"].kind, rows["more"].tied_to) == (Kind.PARAMETER, ("weight",))
    assert (rows["buffer"].kind, rows["buffer"].persistent) == (Kind.BUFFER, True)


def test_name_in_both_weights_and_constants_is_refused(parts, tmp_path, line):
    """A name in both the weights and the constants is ambiguous."""
    path = build_archive(tmp_path / "y.pt2", {**parts, "data/constants/model_constants_config.json": parts[CONFIG]})
    assert line(path).endswith("is in both the weights and the constants; expected only one of the two")


def _json(document) -> bytes:
    return json.dumps(document).encode()


def test_objects_are_noted(parts, tmp_path):
    """A constant that is not a tensor has no tensor_meta, and is noted as an object."""
    config = {
        "config": {"obj": {"path_name": "custom_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}
    }
    name = "data/constants/model_constants_config.json"
    state = read(build_archive(tmp_path / "y.pt2", {**parts, name: _json(config)}))
    assert [(oddity.name, oddity.fqn) for oddity in state.oddities] == [("custom-object", "obj")]
    assert "(data/constants/custom_obj_0)" in state.oddities[0].message


@pytest.mark.parametrize(
    "name", ["data/sample_inputs/model.pt", "data/constants/custom_obj_0", "data/constants/opaque_obj_0", "extra/x"]
)
def test_call_in_a_record_is_reported_and_not_run(name, parts, tmp_path, statecli):
    """torch.export.load unpickles each of the records; statecli runs nothing, and an audit reports the call."""
    mark = tmp_path / "ran"
    command = f"touch {mark}".encode()
    pickle = b"\x80\x02cos\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R."
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", "3")
    path = build_archive(tmp_path / "y.pt2", {**parts, name: pickle if "opaque" in name else out.getvalue()})
    read(path)
    assert "os.system" in {mention.qualified for finding in scan_pickles(str(path)) for mention in finding.names}
    result = statecli("audit", path, "-f", "json")
    assert result.code == 1
    assert "unsafe-global" in {finding["rule"] for finding in result.json["findings"]}
    assert not mark.exists()


def _write_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(8, np.uint8))
    return out.getvalue()


#: Bytes of other formats before an archive.
PREFIXES = [b"", b"\x80\x02N.", b"N.", b"\x93NUMPY\x01\x00", _write_array(), b"text", b"PK\x01\x02"]


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [*((prefix, "data/constants") for prefix in PREFIXES), (b"", "data/Constants"), (b"text", "DATA/constants")],
    ids=lambda value: repr(value[:9]),
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_an_archive_at_the_end_of_an_object_is_found(prefix, method, folder, parts, tmp_path, statecli):
    """torch.export.load (the oracle) takes the archive that the last end record names."""
    mark, out = tmp_path / "ran", io.BytesIO()
    text = base64.b64encode(f"cbuiltins\nexec\n(Vopen({str(mark)!r}, 'w')\ntR.".encode())
    out.write(prefix)
    with zipfile.ZipFile(out, "w") as archive:
        item = b"\x80\x02c__torch__.torch.classes.aten\nOpaqueObject\nq\x00)\x81X" + struct.pack("<I", len(text)) + text
        archive.writestr("archive/data.pkl", item + b"b.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    declared = _config_record("constants", "custom_obj_0")
    path = build_archive(tmp_path / "a.pt2", {**parts, **declared})
    with zipfile.ZipFile(path, "a", method) as archive:
        archive.writestr(f"x/{folder}/custom_obj_0", out.getvalue())
    result = statecli("audit", path, "-f", "json")
    assert result.code == (1 if method == zipfile.ZIP_STORED else 2)
    rules = {finding["rule"] for finding in result.json["findings"]}
    assert "unsafe-global" in rules
    assert ("unscanned-pickle" in rules) == bool(prefix)
    assert not mark.exists()
    torch.export.load(path)
    assert mark.exists()


@pytest.mark.parametrize(
    ("attribute", "count"),
    [(np.zeros(2, np.uint8), 1), ({"a": torch.ones(2)}, 0), (torch.ones(2), 0), (True, 0)],
    ids=repr,
)
def test_an_object_that_is_an_attribute_of_a_tensor_is_found(attribute, count, parts, tmp_path):
    """An array as attribute of a weight has `ctypes`, through which a program reaches Python's own functions."""
    weight, data = torch.ones(2), io.BytesIO()
    weight.foo = attribute
    torch.save(weight, data)
    path = build_archive(tmp_path / "a.pt2", {**parts, "data/weights/weight_9": data.getvalue()})
    assert len([message for _, message in findings(path) if "a tensor has a Python object" in message]) == count


#: Beginnings of pickles of protocol 0 that a pickler never writes.
UNUSUAL_STARTS = {
    "None": b"N0",
    "a dict": b"(dp0\n0",
    "a list and a tuple": b"]0)0",
    "a number": b"I1\n0",
    "text": b"Vx\n0",
}


def _in_protocol_0(begin: bytes, mark: Path) -> bytes:
    return begin + f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()


def _config_record(folder: str, name: str, **fields) -> dict[str, bytes]:
    item = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None, **fields}
    return {f"data/{folder}/model_{folder}_config.json": _json({"config": {"obj": item}})}


def _assert_reported_and_loaded(path: Path, mark: Path) -> None:
    assert "unsafe-global" in {rule for rule, _ in findings(path)}
    assert not mark.exists()
    with contextlib.suppress(Exception):  # torch may refuse the rest
        torch.export.load(path)
    assert mark.exists()


@pytest.mark.parametrize("begin", UNUSUAL_STARTS)
def test_opaque_object_with_any_start_is_found(begin, parts, tmp_path):
    """torch.export.load unpickles each constant that is named as an opaque object."""
    mark = tmp_path / "ran"
    pickle = _in_protocol_0(UNUSUAL_STARTS[begin], mark)
    records = {**parts, **_config_record("constants", "opaque_obj_0"), "data/constants/opaque_obj_0": pickle}
    _assert_reported_and_loaded(build_archive(tmp_path / "y.pt2", records), mark)


@pytest.mark.parametrize(
    ("folder", "name", "record"),
    [
        ("constants", "opaque_obj_x/y", "data/constants/opaque_obj_x/y"),
        ("constants", "opaque_obj_0", "data/constants/OPAQUE_obj_0"),
        ("constants", "opaque_obj_/../../elsewhere", "data/constants/opaque_obj_/../../elsewhere"),
        ("weights", "weight_0", "data/weights/weight_0"),
        ("weights", "../constants/tensor_0", "data/weights/../constants/tensor_0"),
        ("constants", "tensor_0", "data/constants/tensor_0"),
        ("constants", "opaque_obj_constants_config.json", "data/constants/opaque_obj_constants_config.json"),
        ("weights", "/elsewhere", "/elsewhere"),
    ],
)
def test_an_object_is_found_by_the_name_that_the_loader_joins(folder, name, record, parts, tmp_path):
    """torch's zip reader ignores case, and torch does not normalise names."""
    mark = tmp_path / "ran"
    pickle = _in_protocol_0(b"N0", mark).ljust(100_000, b"\xfe")  # because every small record is scanned
    records = {**parts, **_config_record(folder, name), record: pickle}
    _assert_reported_and_loaded(build_archive(tmp_path / "y.pt2", records), mark)


@pytest.mark.parametrize(
    "name", ["data/weights/model.pt", "data/constants/model.pt", "data/sample_inputs/model.pt"], ids=lambda name: name
)
def test_legacy_stream_in_a_record_is_found(name, parts, tmp_path):
    """torch.load accepts the legacy format for each record that torch.export.load passes on."""
    mark = tmp_path / "ran"
    _assert_reported_and_loaded(build_archive(tmp_path / "y.pt2", {**parts, name: _in_protocol_0(b"N0", mark)}), mark)


def _append_archive(head: bytes, records: dict[str, bytes], tail: bytes) -> bytes:
    """Return an archive between other bytes; its offsets count from the beginning of the file."""
    out = io.BytesIO(head)
    with zipfile.ZipFile(out, "a") as archive:
        for name, data in records.items():
            archive.writestr(f"x/{name}", data)
    return out.getvalue() + tail


def _safetensors_head(size: int) -> bytes:
    header = _json({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("tail", [b"", b"tail", b"t" * 66_000], ids=["at the end", "4 bytes", "66,000 bytes"])
@pytest.mark.parametrize("head", ["safetensors", "GGUF", "a pickle"])
def test_an_archive_between_other_bytes_is_found(head, tail, parts, tmp_path):
    """torch's zip reader uses the last end record in the last 69,632 bytes, whatever bytes follow."""
    mark = tmp_path / "ran"
    pickle = _in_protocol_0(b"N0", mark)
    records = {**parts, **_config_record("constants", "opaque_obj_0"), "data/constants/opaque_obj_0": pickle}
    begin = {"safetensors": _safetensors_head(0), "GGUF": b"GGUF\3\0\0\0" + bytes(16), "a pickle": b"\x80\2}."}[head]
    if head == "safetensors":
        begin = _safetensors_head(
            len(_append_archive(_safetensors_head(10**6), records, tail)) - len(_safetensors_head(10**6))
        )
    path = tmp_path / "y.pt2"
    path.write_bytes(_append_archive(begin, records, tail))
    _assert_reported_and_loaded(path, mark)


def test_end_record_without_a_directory_is_not_an_archive(tmp_path):
    """A tensor may contain the bytes of an end record, but an archive also needs a central directory."""
    data = b"PK\5\6" + bytes(18) + b"tail"
    path = tmp_path / "model.safetensors"
    path.write_bytes(_safetensors_head(len(data)) + data)
    assert findings(path) == []


def test_storage_that_begins_like_a_pickle_is_clean(parts, tmp_path):
    """torch copies a record that a configuration declares as a storage, and never unpickles the record."""
    storage = next(name for name in parts if name.endswith("weights/weight_0"))
    data = b"N0cos\nsystem\n".ljust(len(parts[storage]), b"\0")
    assert findings(build_archive(tmp_path / "y.pt2", {**parts, storage: data})) == []


# --- expressions -----------------------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """A program with computed sizes."""

    def forward(self, x):
        n = x.shape[0]
        return x.sum() + torch.zeros(n // 3 + 1).sum() + torch.zeros(2 * n - 5, n % 7 + 2).sum()


@pytest.fixture(scope="module")
def sized_program():
    """The program of computed sizes, exported for any number of rows."""
    size = torch.export.Dim("n", min=6, max=600)
    return torch.export.export(Sizes(), (torch.randn(12, 4),), dynamic_shapes=({0: size},))


def test_expressions_of_real_programs_are_plain(sized_program, tmp_path):
    """Symbols, sums, products, floor divisions and remainders are plain expressions."""
    path = save_current_layout(sized_program, tmp_path / "x.pt2")
    texts = iter_texts(json.loads(read_archive(path)[MODEL]), Steps())
    expressions = {text.text for text in texts if text.judgement is TextRequirement.EXPRESSION}
    assert any("FloorDiv" in expression for expression in expressions)
    assert [
        expression for expression in expressions if not is_plain_expression(expression) or describe_cost(expression)
    ] == []
    assert scan_pickles(str(path))


PLAIN_EXPRESSIONS = (
    *(
        "s0",
        "2*s0 + 1",
        "s0//3",
        "Max(1, s0 - 5)",
        "-(s0 + u1) ** 2",
        "Eq(s0, 3)",
        "1.5e-3",
        "(s0)",
        "s0 % (2)",
        "",
        "3.",
    ),
    *("Symbol('s77', positive=True, integer=True)", "Add(Integer(-1), Mul(Rational(1, 2), Symbol('s0')))"),
)
CODE_EXPRESSIONS = (
    *("__import__('os').system('id')", "eval('1')", "S('1')", "sympify('1')", "s0.diff(s0)", "1 .real", "1..real()"),
    *("1.__class__.__base__()", "(eval)('x')", "(eval)   ('x')", "eval ('x')", "[s0]", "lambda: 0", "Symbol('a')('b')"),
    *(
        "Symbol('a b')",
        "Max('eval(1)')",
        "floor('1e99999999999+1')",
        "floor('9**9')",
        "floor('9-')",
        "floor('1.2.3')",
        "f's0'",
        'Symbol("x")',
        "'a'('b')",
        "3(4)",
        "x\nimport os",
        "f\u00fcr(1)",
        "_x",
        "a;b",
        "a@b",
        "5!",
        "s0 !",
        "lambda 9^9^9",
        "lambda s0, s1",
        "Max(s0 for s0 in s1)",
        "s0 if s1 else s2",
        "Max(Min(s0) for Min in 1*(exec,))",
        "Max(open)",
        "Max(s0, getattr)",
        "Symbol(exec=1)",
        "Max(1,)) ** (Min(2",
    ),
)


def _polynomial(terms: int, degree: int) -> str:
    """Return a sum of products of three of six symbols."""
    return " + ".join(
        "*".join([str(7 * n + 3), *(f"s{(n + step) % 6}**{1 + n * step % degree}" for step in (1, 2, 4))])
        for n in range(terms)
    )


#: Expressions that sympy evaluates or expands at once, to more bits or terms than a size has.
COSTLY_EXPRESSIONS = (
    *("9**9**9", "Pow(Integer(9), Pow(Integer(9), Integer(9)))", "(2*s0)**99999", "LShift(Integer(1), Integer(99999))"),
    *("9^9^9", "Integer(9)^(Integer(9)^Integer(9))", "Rational('1e0000000000000000000999999')", "Float('1e1_000_000')"),
    *("floor('9')", "Max('s0', 1)", "Integer('9')", "Float('0.5', 99999)", "Symbol('a', '9')"),
    *("9**9**9" + "+1" * 500, "-" * 600 + "9**9**9"),
    f"Max({', '.join(f'a{n} + {n}' for n in range(200))})",
    *("floor(1e999999999)", "floor(Float('1e999999999'))", "Float('1.5', precision=99999)", "floor(E**(10**9))"),
    *("Float('1e5000')", "floor(1/1e-99999999999)", "Max(1, s0**500 - 3*s0)", "FloorDiv(2**(60*s0) + s1, s0**60 + 1)"),
    *(f"{name}({', '.join([_polynomial(19, 6)] * 2)})" for name in ("FloorDiv", "Mod", "CleanDiv")),
    *(f"({_polynomial(60, 1)}) % ({_polynomial(60, 1)})", "FloorDiv(2*(1/(s0**8 + s1) + 1/(s0**7 + s2)), 2*s0)"),
    *("(a + b + c + d + e + f)**60", "*".join(f"(a{n} + b)" for n in range(40)), f"Max({', '.join(['s0'] * 9999)})"),
)
CHEAP_EXPRESSIONS = (
    *("2**s0", "9223372036854775807", "Pow(Symbol('s0', positive=True), Rational(-1, 2))", "s0*(s1 + 1)*(s2 + 1)"),
    *("Float('-1.5e-10', precision=53)", "Mod(s0*s1*s2*s3, s0*s1)", "FloorDiv(s0**2*s1**2*s2 + s0*s1 + 4, s1*s2 + 2)"),
    "Mul(" + ", ".join(f"Symbol('s{n}', positive=True, integer=True)" for n in range(20)) + ")",
)


def test_expression_that_takes_too_long_is_found(parts, tmp_path):
    """An expression of permitted names and functions may still take for ever, here as a size in a program."""
    costly = {"costly": {"as_expr": {"expr_str": COSTLY_EXPRESSIONS[0]}}}
    path = write_changed_program(
        parts, tmp_path / "y.pt2", lambda program: program["graph_module"]["graph"].update(sym_int_values=costly)
    )
    ((_, message),) = findings(path)
    assert "sympy.sympify" in message


def test_costly_expressions_are_recognised():
    """Powers of symbols, the largest size, and as many factors as a tensor has dimensions are cheap."""
    assert [text for text in (*COSTLY_EXPRESSIONS, *CHEAP_EXPRESSIONS) if not is_plain_expression(text)] == []
    assert [text for text in COSTLY_EXPRESSIONS if describe_cost(text) is None] == []
    assert [text for text in CHEAP_EXPRESSIONS if describe_cost(text) is not None] == []


def test_sympy_evaluates_large_powers_at_once():
    """sympy evaluates ten characters to 333,000 bits at once, so statecli checks the size of a number first."""
    sympy = pytest.importorskip("sympy")
    assert int(sympy.sympify("10**100000")).bit_length() > 300_000
    assert describe_cost("10**100000")


def test_plain_expressions_are_distinguished_from_code():
    """A plain expression calls only the functions of sizes, and reads no attribute."""
    assert [
        expression
        for expression in PLAIN_EXPRESSIONS
        if not is_plain_expression(expression) or describe_cost(expression)
    ] == []
    assert [expression for expression in CODE_EXPRESSIONS if is_plain_expression(expression)] == []


@pytest.mark.parametrize("writer", [save_current_layout, save_2_7_layout], ids=lambda function: function.__name__)
def test_code_among_the_expressions_is_found(writer, sized_program, tmp_path, statecli):
    """torch.export.load runs the code without any pickle; statecli runs nothing, and an audit names its byte."""
    pytest.importorskip("sympy")
    path = writer(sized_program, tmp_path / "x.pt2")
    mark = tmp_path / "ran"
    command, place = json.dumps(f"__import__('pathlib').Path('{mark}').touch()").encode(), None
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "y.pt2", "w") as forged:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith(".json"):
                data = re.sub(rb'"expr_str": "(?:[^"\\]|\\.)*"', lambda _: b'"expr_str": ' + command, data)
                place = data.index(command) if command in data else place
            forged.writestr(name, data)
    result = statecli("audit", tmp_path / "y.pt2", "-f", "json")
    assert result.code == 1
    (finding,) = (finding for finding in result.json["findings"] if finding["severity"] == "error")
    assert finding["rule"] == "unsafe-global"
    assert "sympy.sympify, which evaluates text as Python code" in finding["message"]
    assert finding["message"].endswith(f", byte {place})")
    assert not mark.exists()
    with pytest.raises(Exception):  # noqa: B017, PT011  # torch refuses the result, which is not an expression
        torch.export.load(tmp_path / "y.pt2")
    assert mark.exists()


@pytest.mark.parametrize("function", ["exec", "eval"])
def test_a_name_that_an_expression_binds_is_found(function, write_forged, tmp_path):
    """A loop binds names to Python's own functions, so an expression of names and numbers alone runs code."""
    pytest.importorskip("sympy")
    mark = tmp_path / "ran"
    letters = "+".join(f"Abs({ord(letter)})" for letter in f"open('{mark}','w')")
    path = write_forged(
        "Symbol('s77', positive=True, integer=True)",
        f"Max(Min({letters}) for Abs in 1*(chr,) for Min in 1*({function},))",
    )
    ((_, message),) = findings(path)
    assert "sympy.sympify" in message
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert mark.exists()


@pytest.mark.parametrize(("model", "suffix"), [("a/model", ".json"), ("a/b/c", ".JSON"), ("model/x", ".what")])
def test_every_record_below_models_is_a_program(model, suffix, parts, tmp_path):
    """torch.export.load strips any five last characters of the name; an honest program is in the archive as well."""
    pytest.importorskip("sympy")
    mark = tmp_path / "ran"
    program = json.loads(parts[MODEL])
    code = {"as_expr": {"expr_str": f"__import__('pathlib').Path('{mark}').touch()", "hint": None}}
    values = program["graph_module"]["graph"]["tensor_values"]
    values["x" if "x" in values else next(iter(values))]["sizes"][0] = code
    copies = {
        name.replace("/model", f"/{model}"): data
        for name, data in parts.items()
        if name.startswith("data/") and "/model" in name
    }
    path = build_archive(tmp_path / "y.pt2", {**parts, **copies, f"models/{model}{suffix}": _json(program)})
    _assert_reported_and_loaded(path, mark)


def test_the_guards_of_real_programs_are_plain(tmp_path):
    """Guards of real programs compute with and compare sizes of inputs, also of inputs in lists and dicts."""

    class Net(nn.Module):
        def forward(self, x, tables):
            rows = x.shape[0]
            return x.sum() + torch.zeros(rows // 3 + 1).sum() + tables["a"][0].reshape(-1, 4)[:, :2].sum()

    sizes = ({0: torch.export.Dim.AUTO}, {"a": [{0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}]})
    program = torch.export.export(Net(), (torch.randn(12, 4), {"a": [torch.ones(8, 6)]}), dynamic_shapes=sizes)
    path = save_current_layout(program, tmp_path / "x.pt2")
    guards = json.loads(read_archive(path)[MODEL])["guards_code"]
    assert any("L['tables']['a'][0].size()[0]" in guard for guard in guards)
    assert [guard for guard in guards if not is_plain_guard(guard) or describe_cost(guard, has_symbols=False)] == []
    assert findings(path) == []


def test_plain_guards_are_distinguished_from_code():
    """In a guard, the name of an input has no quote, methods return sizes and functions take numbers."""
    plain = ["L['x'].size()[0] == 3", "math.floor(L['a b'][0].stride()[1] / 2) >= 1 and not (True)", "-(3) ** 2 != 1"]
    code = ["__import__('os')", "L['x'].foo()", "L['x']._a", "L['x'].size()[0](1)", 'L["x"]', "L['\\x']", "(L['x'])(1)"]
    code += ["math.__loader__(1)", "eval(1)", "lambda: 0", "x", "'a'", "L['x'][y]", "[1]", "L['x\n']", "3 (4)", "f(1)"]
    code += ["math.factorial(99999999) > 1", "math.comb(99999999, 9999999) > 1"]
    assert [text for text in plain if not is_plain_guard(text)] == []
    assert [text for text in code if is_plain_guard(text)] == []


def test_cost_of_a_guard_ignores_the_number_of_terms():
    """Python evaluates a guard with the sizes of the inputs as numbers, so only the bits of the numbers count."""
    terms = " + ".join(f"L['x'].size()[{n}]*L['y'].size()[{n}]" for n in range(100))
    assert describe_cost(f"({terms}) % ({terms}) == 0", has_symbols=False) is None
    assert describe_cost("L['x'].size()[0] == 9**9**9", has_symbols=False)


def test_code_among_the_guards_is_found(parts, tmp_path):
    """The module of the program compiles the guard, and runs the guard in each call."""
    mark = tmp_path / "ran"
    path = write_changed_program(
        parts, tmp_path / "y.pt2", lambda program: program.update(guards_code=[f"open('{mark}', 'w')"])
    )
    ((rule, message),) = findings(path)
    assert rule == "unsafe-global"
    assert message.startswith("the module of the program calls builtins.exec, which compiles the guard")
    torch.export.load(path).module()(torch.randn(2, 3))
    assert mark.exists()


class Guarded(nn.Module):
    """A program with a dict of tensors, and a text that a guard compares."""

    def forward(self, tensors, mode):
        return next(iter(tensors.values())) * len(mode)


@pytest.fixture
def write_guarded(tmp_path):
    """Return a function that writes a program with a key in its dict and a text; `change` edits the JSON."""

    def write(key: str = "k", text: str = "abc", change: Callable[[dict], None] = lambda program: None) -> Path:
        program = torch.export.export(Guarded(), ({key: torch.ones(2)}, text))
        return write_changed_program(
            read_archive(save_current_layout(program, tmp_path / "x.pt2")), tmp_path / "y.pt2", change
        )

    return write


def test_code_in_the_text_of_an_input_is_found(write_guarded, tmp_path):
    """`.module()` writes the text into a guard between quotes, and compiles the guard."""
    mark = tmp_path / "ran"
    code = f"' #\n,'')\nopen('{mark}', 'w')\ndef h():\n  (1,'"

    def change(program: dict) -> None:
        for value in program["graph_module"]["graph"]["inputs"]:
            if "as_string" in value:
                value["as_string"] = code

    assert findings(write_guarded()) == []
    path = write_guarded(change=change)
    ((rule, message),) = findings(path)
    assert (rule, "builtins.exec" in message) == ("unsafe-global", True)
    with contextlib.suppress(Exception):
        torch.export.load(path).module()
    assert mark.exists()


def test_code_in_the_key_of_an_input_is_found(write_guarded, tmp_path):
    """The key ends the message of a guard: found in the nesting of the arguments and in the example inputs."""
    mark = tmp_path / "ran"
    key = f'" + str(open("{mark}", "w")) + "'
    path = write_guarded(key)
    assert [rule for rule, _ in findings(path)] == ["unsafe-global", "unsafe-data"]
    torch.export.load(path).module()({key: torch.ones(2)}, "abc")
    assert mark.exists()


def test_code_in_a_key_of_the_example_inputs_is_found(parts, tmp_path):
    """torch takes the paths of the inputs from the example inputs; the same pickle elsewhere is not compiled."""
    data = _encode_value((({'" + x + "': torch.ones(2)},), {}))
    inputs = {"data/sample_inputs/model.pt": data}
    same_pickle, other_case = {"data/constants/a.pt": data}, {"DATA/SAMPLE_INPUTS/MODEL.PT": data}
    for other_records in (inputs, {**same_pickle, **inputs}, other_case):
        ((rule, message),) = findings(build_archive(tmp_path / "a.pt2", {**parts, **other_records}))
        assert rule == "unsafe-data"
        assert "torch compiles Python code that contains the key" in message


@pytest.mark.parametrize("key", [datetime.date(2000, 1, 1), (1, "a"), b"a", torch.Size([2])], ids=str)
def test_an_object_as_a_key_of_the_example_inputs_is_found(key, parts, tmp_path):
    """torch writes the repr of a key into a guard; the repr of a DeviceMesh has unescaped dimension names."""
    inputs = _encode_value((({key: torch.ones(2)},), {}))
    actual_findings = findings(build_archive(tmp_path / "a.pt2", {**parts, "data/sample_inputs/model.pt": inputs}))
    assert any("key that is neither a string nor a number" in message for _, message in actual_findings)


@pytest.mark.parametrize(
    "key", [lambda code: attacks.build_mesh(f'0), "{code}", (1='), lambda code: (code,)], ids=["a mesh", "a tuple"]
)
def test_the_repr_of_a_key_of_the_example_inputs_is_compiled(tmp_path, key):
    """torch is the oracle: the module of the program runs code in the repr of a key."""
    mark = tmp_path / "ran"
    records = read_archive(
        save_current_layout(torch.export.export(_AddedHalf(), (torch.ones(2, 2),)), tmp_path / "x.pt2")
    )
    code = f"+str(__import__('os').system('touch {mark}'))+"
    inputs = _encode_value((({key(code): torch.ones(2, 2)},), {}))
    path = build_archive(tmp_path / "a.pt2", {**records, "data/sample_inputs/model.pt": inputs})
    assert "unsafe-data" in {rule for rule, _ in findings(path)}
    with contextlib.suppress(Exception):
        torch.export.load(path).module()(torch.ones(2, 2))
    assert mark.exists()


class _AddedHalf(nn.Module):
    def forward(self, x):
        return x + 1.5


def test_code_in_the_path_of_a_module_is_found(parts, tmp_path):
    """torch.export.unflatten writes the path into double quotes."""
    for path, count in (('x")\rexec(1)', 1), ("a\nb", 1), ("a\\", 1), ('a"b', 1), ("L['self'].layers[0]", 0)):
        stack = {"nn_module_stack": f"a,{path},b"}
        forged = write_changed_program(
            parts,
            tmp_path / "a.pt2",
            lambda program, stack=stack: program["graph_module"]["graph"]["nodes"][0]["metadata"].update(stack),
        )
        assert len(findings(forged)) == count


def test_unflatten_compiles_the_path_of_a_module(tmp_path):
    """torch is the oracle: a line break that is not a line feed leaves the body of the function."""

    class Inner(nn.Module):
        def forward(self, x):
            return x * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) + 1

    records = read_archive(save_current_layout(torch.export.export(Outer(), (torch.ones(2),)), tmp_path / "x.pt2"))
    mark = tmp_path / "ran"
    code = f"(x\")\ropen('{mark}', 'w')\rdef g(self):\r    pass #".replace(".", "\\x2e")
    assert b",inner," in records[MODEL]
    forged = records[MODEL].replace(b",inner,", f",{json.dumps(code)[1:-1]},".encode())
    path = build_archive(tmp_path / "y.pt2", {**records, MODEL: forged})
    assert [rule for rule, _ in findings(path)] == ["unsafe-global"]
    with contextlib.suppress(Exception):
        torch.export.unflatten(torch.export.load(path))
    assert mark.exists()


class Two(nn.Module):
    """A program with two inputs, of which the second is not used."""

    def forward(self, x, y):
        return torch.sin(x), x.shape[0] * 2 + torch.sym_max(x.shape[0], 7)


@pytest.fixture(scope="module")
def two_inputs(tmp_path_factory) -> dict[str, bytes]:
    """The records of the program with two inputs, exported for any number of rows."""
    size = torch.export.Dim("n", min=6, max=600)
    program = torch.export.export(Two(), (torch.randn(12, 4), torch.ones(1)), dynamic_shapes=({0: size}, None))
    return read_archive(save_current_layout(program, tmp_path_factory.mktemp("two") / "x.pt2"))


@pytest.fixture
def write_forged(two_inputs, tmp_path):
    """Return a function that writes a program with a replaced text in its JSON."""

    def write(old: str, forged: str) -> Path:
        assert _json(old) in two_inputs[MODEL]
        model = two_inputs[MODEL].replace(_json(old), _json(forged))
        return build_archive(tmp_path / "y.pt2", {**two_inputs, MODEL: model})

    return write


def findings(path):
    """Return the findings of the rules about pickles."""
    (target,) = audit(Request((str(path),), select=tuple(rule.name for rule in RULES))).targets
    return [(finding.rule, finding.message) for finding in target.findings]


def test_code_in_the_name_of_an_input_is_found(two_inputs, write_forged, tmp_path):
    """torch writes the name into a function's source and runs the default value on load; statecli only reports the
    code.
    """
    pytest.importorskip("sympy")
    assert findings(build_archive(tmp_path / "x.pt2", two_inputs)) == []
    mark = tmp_path / "ran"
    path = write_forged("y", f"y=__import__('pathlib').Path('{mark}').touch()")
    ((rule, message),) = findings(path)
    assert rule == "unsafe-global"
    assert message.startswith("loading the file calls builtins.exec, which compiles a graph in which")
    assert not mark.exists()
    torch.export.load(path)
    assert mark.exists()


@pytest.mark.parametrize(
    ("target", "rule", "expected_text"),
    [
        ("torch.ops.aten.from_file.default", "unsafe-global", "the graph calls torch.ops.aten.from_file, which maps"),
        ("torch.ops.image.write_file.default", "unsafe-global", "which reads or writes a file"),
        ("torch.os.system", "unsafe-global", "the graph calls torch.os.system, which is not an operator of torch"),
        ("torch.ops.mylib.run.default", "unknown-global", "the graph calls torch.ops.mylib.run, which belongs to"),
        ("#mine:run", "unsafe-global", "is not an operator of torch"),
        ("_operator.call", "unsafe-global", "is not an operator of torch"),
        ("math.factorial", "unsafe-global", "is not an operator of torch"),
        ("torch.utils._sympy.functions.sympy.sympify", "unsafe-global", "is not an operator of torch"),
        ("torch.utils._sympy.functions.FloorDiv", None, ""),
        ("torch.ops.aten.cos.default", None, ""),
        ("torch.ops.torchvision.nms.default", None, ""),
        ("_operator.mul", None, ""),
    ],
    ids=lambda value: str(value)[:24],
)
def test_calls_of_a_graph_are_checked(target, rule, expected_text, write_forged):
    """Operators of torch that compute are clean, other functions of torch unsafe, and unknown libraries unknown."""
    actual_findings = findings(write_forged("torch.ops.aten.sin.default", target))
    assert [(name, expected_text in message) for name, message in actual_findings] == ([(rule, True)] if rule else [])


def test_imports_in_the_nesting_of_arguments_are_checked(parts, tmp_path):
    """A text in the JSON names the factory of a dict, or an enumeration; factories of plain data are clean."""

    def spec(**context):
        text = json.dumps([1, {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []}])
        return {**parts, MODEL: _encode_signature({"in_spec": text})}

    def factory(module, name):
        return spec(default_factory_module=module, default_factory_name=name, dict_context=[])

    assert findings(build_archive(tmp_path / "a.pt2", factory("builtins", "int"))) == []
    for records in (factory("os", "system"), spec(__enum__=True, fqn="os:system", name="a")):
        ((rule, message),) = findings(build_archive(tmp_path / "a.pt2", records))
        assert rule == "unsafe-global"
        assert message.startswith("loading the file imports os.system")


def _set_spec(parts, spec, key: str = "in_spec", padding: str = "", **signature) -> dict[str, bytes]:
    """Return the records with a program whose arguments nest like `spec`."""
    return {**parts, MODEL: _encode_signature({key: json.dumps(spec) + padding, **signature})}


def _encode_signature(signature: dict[str, object]) -> bytes:
    """Return a program with a single module call."""
    return _json({"graph_module": {"module_call_graph": [{"fqn": "", "signature": signature}]}})


def _leaf() -> dict[str, object]:
    return {"type": None, "context": None, "children_spec": []}


def _keyword(name: object) -> list[object]:
    """Return a nesting with a keyword argument and without positional arguments."""
    children = [
        {"type": "builtins.tuple", "context": "null", "children_spec": []},
        {"type": "builtins.dict", "context": json.dumps(name), "children_spec": [_leaf()]},
    ]
    return [1, {"type": "builtins.tuple", "context": "null", "children_spec": children}]


def test_code_in_the_name_of_a_keyword_is_found(tmp_path):
    """Without forward_arg_names, torch compiles the parameter names of the nesting as source."""

    class Keyword(nn.Module):
        def forward(self, x, k):
            return x + k

    program_path, mark = tmp_path / "x.pt2", tmp_path / "ran"
    torch.export.save(torch.export.export(Keyword(), (torch.ones(2),), {"k": torch.ones(2)}), program_path)
    assert findings(program_path) == []
    code = f'k=__import__("pathlib").Path("{mark}").touch()):#\':0}}), self._in_spec) #'

    def edit(program: dict) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["in_spec"])
        spec[1]["children_spec"][1]["context"] = json.dumps([code])
        signature |= {"in_spec": json.dumps(spec), "forward_arg_names": None}

    path = write_changed_program(read_archive(program_path), tmp_path / "y.pt2", edit)
    ((rule, message),) = findings(path)
    assert rule == "unsafe-global"
    assert message.startswith("loading the file calls builtins.exec, which compiles a graph in which")
    assert not mark.exists()
    with contextlib.suppress(Exception):
        torch.export.load(path).module()
    assert mark.exists()


def test_keyword_that_is_not_an_identifier_is_found(parts, tmp_path):
    """Names of keywords must be identifiers, in any JSON value."""
    assert findings(build_archive(tmp_path / "a.pt2", _set_spec(parts, _keyword(["k", "_2"])))) == []
    for name in (["a b"], ["k=1"], [["k"]], {"k=1": 0}, "k=", ["k", "k\n"]):
        path = build_archive(tmp_path / "b.pt2", _set_spec(parts, _keyword(name)))
        assert [rule for rule, _ in findings(path)] == ["unsafe-global"], name


@pytest.mark.parametrize("name", ["it's", 'a"b', "\\", "a b", "x.y/z[0]", "\u00e9"])
def test_dict_key_with_a_quote_in_the_nesting_is_found(name, parts, tmp_path):
    """torch writes the keys into guards, between quotes: a key with a quote would end the text."""
    inner = {"type": "builtins.dict", "context": json.dumps([name, "k"]), "children_spec": [_leaf()] * 2}
    spec = [1, {"type": "builtins.tuple", "context": "null", "children_spec": [inner]}]
    for key in ("in_spec", "out_spec"):
        actual_findings = findings(build_archive(tmp_path / "a.pt2", _set_spec(parts, spec, key)))
        assert [rule for rule, _ in actual_findings] == ["unsafe-global"] * any(mark in name for mark in "'\"\\")


@pytest.mark.parametrize("padding", ["", " " * (1 << 20)], ids=["short", "longer than a mebibyte"])
@pytest.mark.parametrize(
    "other_fields", [{}, {"default_factory_module": "collections", "default_factory_name": "OrderedDict"}]
)
def test_enum_in_a_long_or_mixed_nesting_is_found(padding, other_fields, parts, tmp_path):
    """torch reads JSON of any length and looks for an enumeration first, whose member may be the path of a library."""
    context = [{"__enum__": True, "fqn": "ctypes:cdll", "name": "/tmp/evil.so", **other_fields}]
    spec = [1, {"type": "builtins.dict", "context": json.dumps(context), "children_spec": [_leaf()]}]
    actual_findings = findings(build_archive(tmp_path / "a.pt2", _set_spec(parts, spec, "out_spec", padding)))
    assert ("unsafe-global", "loading the file imports ctypes.cdll") in {
        (rule, text.partition(",")[0]) for rule, text in actual_findings
    }
    assert any("'/tmp/evil.so' stands in place of a name" in text for _, text in actual_findings)


#: An enumeration whose class is the loader of shared libraries, and whose member is a path.
LIBRARY = '{"__enum__": true, "fqn": "ctypes:cdll", "name": "/nowhere/evil.so"}'


@pytest.mark.parametrize(
    "context",
    [
        '{"metadata": %s}',
        '[[{"metadata": [%s]}]]',
        '{"nodes": [{"metadata": %s}], "graph_module": 1}',
        '{"graph_module": {"metadata": %s}}',
        '{"a": %s, "a": 1}',
        '{"metadata": {"__enum__": true, "fqn": "http:HTTPMethod", "fqn": %s, "fqn": "http:HTTPMethod"}}',
    ],
)
def test_class_in_the_nesting_is_found_under_any_key(context, parts, tmp_path):
    """torch imports the class for each object of the JSON, also for the value of a repeated key."""
    spec = json.dumps([1, {"type": "builtins.tuple", "context": context % LIBRARY, "children_spec": []}])
    path = write_changed_program(
        parts,
        tmp_path / "a.pt2",
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(out_spec=spec),
    )
    assert any(message.startswith("loading the file imports ctypes.cdll") for _, message in findings(path))
    with pytest.raises(OSError, match=r"/nowhere/evil\.so"):
        torch.export.load(path)


@pytest.mark.parametrize("place", ["a node", "the module", "a value", "an object"])
def test_only_metadata_of_nodes_and_modules_is_not_checked(place, parts, tmp_path):
    """The `metadata` of a node or of the module is text for people; under another key, `metadata` is checked."""
    program = json.loads(parts[MODEL])
    module, remark = program["graph_module"], {"note": "it's\n"}
    if place == "a node":
        module["graph"]["nodes"][0]["metadata"] = {"stack_trace": "it's\n", "custom": json.dumps(remark)}
    elif place == "the module":
        module["metadata"] = {"custom": json.dumps(remark)}
    else:
        module["graph"]["tensor_values" if place == "a value" else "custom_obj_values"] = {"metadata": remark}
    actual_findings = findings(build_archive(tmp_path / "a.pt2", {**parts, MODEL: _json(program)}))
    assert len(actual_findings) == (0 if place in ("a node", "the module") else 1)


#: Symbols with huge numbers, in forms that Python's `int` accepts.
ENDLESS_SYMBOLS = ["u9999999999999", "zuf9999999999999", "u 9_999_999_999_999", "u+9999999999999", "u\uff19" + "9" * 12]


def write_symbol(symbol: str, parts: dict[str, bytes], path: Path) -> Path:
    return write_changed_program(
        parts, path, lambda program: program.update(range_constraints={symbol: {"min_val": 0, "max_val": 5}})
    )


def test_symbols_are_counted_by_their_numbers(parts, tmp_path):
    """torch counts to the number in the symbol in steps of 1; to a small number in less than a second."""
    for symbol in ("u0", "s77", "s0 + 1", "zuf99999"):
        assert findings(write_symbol(symbol, parts, tmp_path / "a.pt2")) == []
    for symbol in ENDLESS_SYMBOLS:
        actual_findings = findings(write_symbol(symbol, parts, tmp_path / "a.pt2"))
        assert any("counts in steps of 1 up to the number in the symbol" in message for _, message in actual_findings)


#: Loads the first file, which imports what a load needs, and then each file within 0.3 seconds of CPU time.
LOAD_EACH = """
import os, signal, sys, torch
torch.export.load(sys.argv[1])
for path in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_PROF, 0.3)
        torch.export.load(path)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_torch_counts_to_the_numbers_of_symbols(parts, tmp_path):
    """torch reads an honest program in 0.1 s, and does not finish programs with endless symbols."""
    symbols = ["u0", *ENDLESS_SYMBOLS]
    paths = [write_symbol(symbol, parts, tmp_path / f"{number}.pt2") for number, symbol in enumerate(symbols)]
    assert run_code(LOAD_EACH, *paths).stdout.split() == ["0"] + [str(-signal.SIGPROF)] * len(ENDLESS_SYMBOLS)


def test_a_text_under_an_unknown_key_is_a_warning(parts, tmp_path):
    """A later torch may define the key, so the finding is a warning, not an error."""
    path = write_changed_program(parts, tmp_path / "a.pt2", lambda program: program.update(language="a"))
    (finding,) = audit(Request((str(path),))).findings
    assert (finding.rule, finding.severity.name) == ("unsafe-data", "WARNING")
    assert "text under the unknown key 'language'" in finding.message


def test_a_nesting_that_cannot_be_read_is_found(parts, tmp_path):
    """torch may read JSON that is nested too deeply for statecli."""
    nested_text = "[" * 200_000 + "]" * 200_000
    program = _encode_signature({"out_spec": nested_text})
    actual_findings = findings(build_archive(tmp_path / "a.pt2", {**parts, MODEL: program}))
    assert [rule for rule, _ in actual_findings] == ["unsafe-global"]


@pytest.mark.parametrize("key", ["any_key", "verifiers", "torch_version"])
def test_text_that_would_end_a_string_is_found_under_any_key(key, parts, tmp_path):
    """A later torch may write the text into source; messages of operators may have single quotes."""

    def edit(program, other_fields):
        program["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = {"as_string": "it's (a) 'b'; <3"}
        return {**program, **other_fields}

    text = ["a'b"] if key == "verifiers" else "a'b"
    for other_fields, count in (({}, 0), ({key: text}, 1), ({"a'b": 1}, 1)):
        program = edit(json.loads(parts[MODEL]), other_fields)
        assert len(findings(build_archive(tmp_path / "a.pt2", {**parts, MODEL: _json(program)}))) == count


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Pow(e=99999999999, b=2)", False),
        ("Pow(*(2, 99999999999))", False),
        ("Pow(**k)", False),
        ("Float(precision=30000000000, num=Rational(1, 3))", False),
        ("Float('0.5', precision=30000000000)", False),
        ("Float('0.5', precision=53)", True),
        ("Symbol('s77', positive=True, integer=True)", True),
        ("Dummy('a', dummy_index=6000000, integer=True)", True),
    ],
)
def test_argument_order_does_not_hide_an_exponent(text, plain):
    """Arguments by name or from a tuple may come in any order; torch writes only assumptions and precision by name."""
    assert (is_plain_expression(text) and describe_cost(text) is None) == plain


#: Records of code -> rule. The loader opens a library among the constants, even without a compiled model; without a
#: library, it compiles the model with commands from the archive, so no other file is harmless.
CODE_RECORDS = {
    "data/aotinductor/m/a.wrapper.so": "unknown-global",
    "data/constants/tensor_0.so": "unknown-global",
    "data/constants/a/b.SO": "unknown-global",
    "data/constants/x.cpp": "unsafe-global",
    "data/aotinductor/m/a.txt": "unsafe-global",
}


@pytest.mark.parametrize("name", CODE_RECORDS)
def test_code_for_the_aotinductor_loader_is_reported(name, parts, tmp_path):
    """Code of a library runs as soon as torch loads the library; statecli cannot check the code and warns."""
    ((rule, message),) = findings(build_archive(tmp_path / "y.pt2", {**parts, name: b"\x7fELF"}))
    assert rule == CODE_RECORDS[name]
    assert name in message
    if name.startswith("data/aotinductor") and rule == "unsafe-global":
        assert "which the AOTInductor loader runs compiler commands from the file" in message


FOLDERS = {
    "two slashes": "archive/data//constants/m.so",
    "a backslash": "archive/data\\constants/m.so",
    "another folder": "other/data/constants/m.so",
    "no folder": "data/constants/m.so",
}


@pytest.mark.parametrize("name", FOLDERS.values(), ids=FOLDERS)
@pytest.mark.parametrize("first", ["archive/data.pkl", "foo"])
def test_a_library_is_found_in_any_spelling_of_its_folder(name, first, tmp_path):
    """The loader of AOTInductor joins slashes, and takes a first record `foo` for the archive's folder."""
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        for record in (first, name):
            archive.writestr(record, b"\x7fELF")
    names = [mention for finding in scan_pickles(str(tmp_path / "a.pt2")) for mention in finding.names]
    assert [(mention.name, mention.called) for mention in names] == [("so", True)]


def flags(mark) -> bytes:
    """Return compiler flags in which the compiler is a line of shell."""
    lists = ("cflags", "definitions", "include_dirs", "ldflags", "libraries_dirs", "libraries", "passthrough_args")
    return _json({"compiler": f"touch {mark};", "compile_only": True, **{name: [] for name in lists}})


@pytest.mark.parametrize("folder", ["data/aotinductor/model", "data/aotinductor/model/deep/er", "data/constants"])
def test_the_commands_of_a_compiled_model_are_found(folder, parts, tmp_path):
    """The loader takes sources from the folder of the model, its subfolders and the folder of the constants."""
    mark = tmp_path / "ran"
    records = {
        "data/aotinductor/model/x.wrapper_metadata.json": _json({"AOTI_DEVICE_KEY": "cpu"}),
        **{f"{folder}/x.wrapper_{tool}_flags.json": flags(mark) for tool in ("compile", "linker")},
        f"{folder}/x.wrapper.cpp": b"",
    }
    path = build_archive(tmp_path / "y.pt2", {**parts, **records})
    assert ("unsafe-global", f"loading the file calls x/{folder}/x.wrapper.cpp") in {
        (rule, message.partition(",")[0]) for rule, message in findings(path)
    }
    assert not mark.exists()
    with pytest.raises(RuntimeError, match="compile"):
        torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    assert mark.exists()


def test_file_outside_the_folder_of_the_loader_is_found(parts, tmp_path):
    """The loader of compiled models joins names with `..` to its temporary folder."""
    name = "data/aotinductor/model/../../../../x.txt"
    path = build_archive(tmp_path / "y.pt2", {**parts, "data/aotinductor/model/x.wrapper.so": b"\x7fELF", name: b""})
    ((rule, message),) = findings(path)
    assert rule == "unsafe-global"
    assert "which the AOTInductor loader unpacks to a path outside its temporary folder" in message


def test_program_with_invalid_json_is_reported_as_unread(parts, tmp_path):
    """Python's own parser accepts NaN, so torch may load a program that statecli refuses."""
    path = build_archive(tmp_path / "y.pt2", {**parts, MODEL: b'{"a": NaN, "expr_str": "eval(1)"}'})
    assert "not valid JSON" in next(
        finding.unread for finding in scan_pickles(str(path)) if finding.where == "x/models/model.json"
    )


def test_entry_with_any_value_is_read_or_refused(parts, tmp_path):
    """A value of another type at any place of an entry is damage, or is read."""
    config = json.loads(parts[CONFIG])["config"]["weight"]
    for place in (*config, *(("tensor_meta", key) for key in config["tensor_meta"])):
        for value in (None, True, -1, 2**70, 1.5, "", "x", [], [[]], {}, {"as_int": "3"}, [{"as_int": None}]):
            changes = {place: value} if isinstance(place, str) else {"meta": {place[1]: value}}
            path = build_archive(tmp_path / "z.pt2", change_entry(parts, **changes))
            read_or_refuse(path)


def test_huge_json_is_refused(parts, tmp_path, line, monkeypatch):
    """The JSON of a program has a limit of length."""
    monkeypatch.setattr(torch_export, "MAX_JSON_BYTES", 100)
    assert "bytes, more than statecli's limit of 100" in line(build_archive(tmp_path / "y.pt2", parts))


def test_record_with_many_names_is_read_once(parts, tmp_path, monkeypatch):
    """A record is unpacked once, however many entries refer to the record."""
    out = io.BytesIO()
    torch.save(torch.ones(2), out)
    meta = json.loads(parts[CONFIG])["config"]["bias"]["tensor_meta"]
    item = {"path_name": "w", "is_param": True, "use_pickle": True, "tensor_meta": meta}
    config = {"config": {f"a{n}": item for n in range(50)}}
    calls = []
    read_contents = torch_export.torch_zip.read_contents
    monkeypatch.setattr(
        torch_export.torch_zip, "read_contents", lambda *arguments: calls.append(arguments) or read_contents(*arguments)
    )
    records = {**parts, CONFIG: _json(config), "data/weights/w": out.getvalue()}
    rows = [row for row in read(build_archive(tmp_path / "y.pt2", records)).tensors if row.fqn.startswith("a")]
    assert (len(rows), len(calls)) == (50, 1)


def test_incomplete_old_layout_is_refused(program, tmp_path, line):
    """A plain zip without its state_dict is refused, and so is a zip with compressed archives."""
    old_path = save_2_7_layout(program, tmp_path / "x.pt2")
    with zipfile.ZipFile(old_path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "y.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", records["serialized_exported_program.json"])
    assert (
        line(tmp_path / "y.pt2")
        == "contains no serialized_state_dict.pt: the export did not finish; export the program again"
    )
    with zipfile.ZipFile(tmp_path / "z.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    assert (
        line(tmp_path / "z.pt2") == "record 'serialized_state_dict.pt' is compressed; save the program again with torch"
    )


def test_records_that_torch_2_7_did_not_write_are_reported(program, tmp_path):
    """Another loader may read the records: torch.jit.load takes the folder of the first record."""
    path = save_2_7_layout(program, tmp_path / "x.pt2")
    assert findings(path) == []
    assert [oddity for oddity in read(path).oddities if oddity.kind is OddityKind.UNUSED_RECORDS] == []
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("extra_files/notes.txt", b"text")
        archive.writestr("a/data.pkl", b"N.")
    (unused,) = [oddity for oddity in read(path).oddities if oddity.kind is OddityKind.UNUSED_RECORDS]
    assert "a/data.pkl" in unused.message
    assert "notes" not in unused.message


@pytest.mark.parametrize(
    ("value", "count"),
    [(types.SimpleNamespace(a=1), 1), ([datetime.timedelta(1)], 1), ({"a": [1, "b", None]}, 0), (OrderedDict(a=1), 0)],
    ids=repr,
)
def test_a_python_object_of_a_program_is_found(value, count, parts, tmp_path):
    """The code of the program may call any method of an object; plain data has no harmful methods."""
    records = {
        **parts,
        **_config_record("constants", "opaque_obj_0"),
        "data/constants/opaque_obj_0": pickle.dumps(value, 2),
    }
    all_findings = findings(build_archive(tmp_path / "a.pt2", records))
    rules = [rule for rule, message in all_findings if "may call methods" in message]
    assert rules == ["unsafe-data"] * count


def _encode_value(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


#: Record of constants in an archive of torch.save -> whether the record holds a dict by name.
RECORDS_OF_CONSTANTS = {"data/constants/model.pt": True, "data/constants/tensor_0": False, "data/constants/T": False}


@pytest.mark.parametrize("name", RECORDS_OF_CONSTANTS)
@pytest.mark.parametrize(
    ("value", "count"),
    [
        (Partial("sum"), 1),
        (types.SimpleNamespace(a=1), 1),
        (torch.ones(2), 0),
        (nn.Parameter(torch.ones(2)), 0),
        (torch.ones(2, 2).to_sparse(), 0),
        (torch.ones(2, device="meta"), 0),
        (torch.device("cpu"), 0),
        (OrderedDict(a=[1, "b"]), 0),
    ],
    ids=repr,
)
def test_a_python_object_among_the_tensors_of_constants_is_found(name, value, count, parts, tmp_path):
    """torch takes any value in a record of constants for a constant, and may compile its repr()."""
    data = _encode_value({"c": value} if RECORDS_OF_CONSTANTS[name] else value)
    actual_findings = findings(build_archive(tmp_path / "a.pt2", {**parts, name: data}))
    assert [rule for rule, message in actual_findings if "may call methods" in message] == ["unsafe-data"] * count


def test_a_python_object_of_a_program_is_found_in_each_of_equal_records(parts, tmp_path):
    """Equal pickles are read once, but an object is reported in each record of constants, not in the weights."""
    data = _encode_value(types.SimpleNamespace(a=1))
    names = ["data/weights/a", "data/constants/A", "data/constants/B"]
    pickles = scan_pickles(str(build_archive(tmp_path / "a.pt2", {**parts, **dict.fromkeys(names, data)})))
    places = [pickle.where for pickle in pickles if pickle.hazards]
    assert [place.partition(",")[0] for place in places] == ["x/data/constants/A", "x/data/constants/B"]


def test_a_python_object_among_the_constants_of_an_old_program_is_found(tmp_path):
    """Archives of torch 2.7 and older have their constants in `serialized_constants.pt`."""
    path = tmp_path / "a.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_constants.pt", _encode_value({"c": Partial("sum")}))
    pickles = scan_pickles(str(path))
    assert any("may call methods" in hazard.text for pickle in pickles for hazard in pickle.hazards)


def test_programs_of_too_many_values_are_refused(parts, tmp_path, monkeypatch):
    """The limit applies to all programs together, because a packed program has 30 million values in 60 kB."""
    monkeypatch.setattr(json_object, "MAX_VALUES", 3_000)
    program = json.loads(parts[MODEL])
    program["zeros"] = [0] * 2_000
    records = {**parts, MODEL: _json(program)}
    assert read(build_archive(tmp_path / "x.pt2", records)).tensors
    for name in [name for name in records if "model" in name]:
        records[name.replace("model.", "other.").replace("model_", "other_")] = records[name]
    with pytest.raises(UnreadableError, match="more than 3000 values in total"):
        read(build_archive(tmp_path / "y.pt2", records))


def test_error_names_the_unreadable_inner_archive(parts, tmp_path):
    """The error is one line, and names the record: its size is not that of the file."""
    path = build_archive(tmp_path / "y.pt2", {**parts, "data/weights/model.pt": b"PK\3\4nothing"})
    with pytest.raises(UnreadableError) as error:
        read(path)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{path}: record 'x/data/weights/model.pt': file is truncated: its 11 bytes ")


def test_an_error_of_the_system_is_the_cause_of_an_unreadable_record(parts, tmp_path, monkeypatch):
    """git caches a text about a fault of the file, but not about a disk that fails; the cause distinguishes both."""
    failure = OSError(5, "Input/output error")

    def fail(*_):
        raise UnreadableError("cannot be read") from failure

    monkeypatch.setattr(torch_zip, "read_contents", fail)
    path = build_archive(tmp_path / "y.pt2", {**parts, "data/weights/model.pt": b"PK\3\4"})
    with pytest.raises(UnreadableError) as error:
        read(path)
    assert error.value.__cause__.__cause__ is failure


# --- torch.package ---------------------------------------------------------------------------------------------------


def _package_records(mark: Path) -> dict[str, bytes]:
    """Return the records of a torch.package; its pickle names only an OrderedDict, defined in the package."""
    code = f"import os\nos.system('touch {mark}')\nclass OrderedDict(dict): pass\n"
    out = io.BytesIO()
    with torch.package.PackageExporter(out) as exporter:
        exporter.extern("torch.**")
        exporter.save_source_string("collections", code)
        exporter.save_pickle("m", "model.pkl", {"w": torch.ones(2)})
    reader = torch._C.PyTorchFileReader(io.BytesIO(out.getvalue()))
    names = [name for name in reader.get_all_records() if "version" not in name and "serialization_id" not in name]
    return {name: reader.get_record(name) for name in names}


def _records_of(kind: str, parts: dict[str, bytes]) -> dict[str, bytes]:
    """Return the records of an archive of torch.export, torch.jit.save or torch.save."""
    buffer = io.BytesIO()
    if kind == "export":
        return parts
    if kind == "script":
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    else:
        torch.save({"w": torch.ones(2)}, buffer)
    reader = torch._C.PyTorchFileReader(io.BytesIO(buffer.getvalue()))
    return {name: reader.get_record(name) for name in reader.get_all_records()}


@pytest.mark.parametrize(
    ("kind", "renamed"),
    [
        ("export", ()),
        ("script", ()),
        ("save", ()),
        ("export", ("collections.py", "COLLECTIONS.py")),
        ("export", (".data/extern_modules", ".DATA/extern_MODULES")),
    ],
)
def test_a_package_in_another_archive_is_found(kind, renamed, parts, tmp_path, statecli):
    """PackageImporter runs the Python files of any archive of torch with a list of external modules."""
    mark = tmp_path / "ran"
    packaged = {renamed[1] if name in renamed else name: data for name, data in _package_records(mark).items()}
    path = build_archive(tmp_path / "y.pt2", {**packaged, **_records_of(kind, parts)})
    result = statecli("audit", path, "-f", "json")
    assert "unsafe-global" in {finding["rule"] for finding in result.json["findings"]}
    assert result.code == 1
    assert not mark.exists()
    if "COLLECTIONS.py" not in renamed:
        torch.package.PackageImporter(str(path)).load_pickle("m", "model.pkl")
        assert mark.exists()


def test_pickle_in_any_record_of_a_package_is_found(parts, tmp_path):
    """PackageImporter.load_pickle accepts the name of any record."""
    mark = tmp_path / "ran"
    pickle = _in_protocol_0(b"N0", mark).ljust(100_000, b"\xfe")
    path = build_archive(tmp_path / "y.pt2", {**parts, ".data/extern_modules": b"posix\nos\n", "m/notes": pickle})
    assert "unsafe-global" in {rule for rule, _ in findings(path)}
    torch.package.PackageImporter(str(path)).load_pickle("m", "notes")
    assert mark.exists()


@pytest.mark.parametrize("kind", ["export", "script"])
def test_a_record_that_torch_does_not_know_is_reported(kind, parts, tmp_path):
    """Unused records are reported as for an archive of torch.save."""
    path = build_archive(tmp_path / "y.pt2", {**_records_of(kind, parts), "notes/x": b"abc" * 9})
    state = read(path)
    assert [(oddity.name, oddity.message) for oddity in state.oddities] == [
        ("unused-records", "27 bytes belong to records that torch does not read: notes/x")
    ]


def test_configuration_does_not_hide_a_weights_pickle(parts, tmp_path):
    """torch.export.load reads data/weights/model.pt before the configuration."""
    mark = tmp_path / "ran"
    config = json.loads(parts[CONFIG])
    first = next(iter(config["config"].values()))
    config["config"]["x"] = {**first, "path_name": "model.pt"}
    pickle = _in_protocol_0(b"N0", mark).ljust(100_000, b"\xfe")
    _assert_reported_and_loaded(
        build_archive(tmp_path / "y.pt2", {**parts, CONFIG: _json(config), "data/weights/model.pt": pickle}), mark
    )


class _Shifted(torch.nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.operator = operator

    def forward(self, x):
        return self.operator(x, self.w)


def test_diff_reports_another_program_with_equal_weights(statecli, in_tmp_path):
    """x + w and x - w have the same tensors; the source lines of a traced program do not count."""
    for name, operator in (("add", torch.add), ("sub", torch.sub), ("again", lambda x, w: torch.add(x, w))):
        torch.export.save(torch.export.export(_Shifted(operator), (torch.ones(2),)), f"{name}.pt2")
    result = statecli("diff", "add.pt2", "sub.pt2", "-f", "json")
    assert result.code == 1
    assert [change["key"] for change in result.json["metadata"]] == ["program sha256"]
    assert statecli("diff", "add.pt2", "again.pt2").code == 0
