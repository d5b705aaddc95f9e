"""TorchScript archives: real archives compared with `torch.jit.load`, and archives that torch never writes."""

from __future__ import annotations

import base64
import re
import zipfile
from pathlib import Path
from typing import Dict, List, Optional, Tuple  # noqa: UP035  # TorchScript of torch 2.4 knows these

import pytest
import torch
from torch import nn

from statecli import formats
from statecli.commands.audit.run import Request, audit
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import Evidence, Kind
from statecli.file_scan.scan import scan_pickles
from statecli.formats import torchscript
from statecli.values.read import read_all_values

from ..forked_python import run_code
from .test_any_bytes import read_or_refuse
from .torch_archives import build_archive, read_archive, write_archive

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Block(nn.Module):
    """A module with a parameter, a non-persistent buffer and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.table = torch.randn(2, 2)

    def forward(self, x):
        return x @ self.w + self.table.sum() + self.steps.sum()


class Net(nn.Module):
    """A module with each kind of container that TorchScript keeps."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.fc.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.views = [torch.arange(12.0).reshape(3, 4).t(), torch.arange(12.0)[3:9]]
        self.names = ["a", "b"]
        self.cache = {"cos": torch.ones(5)}
        self.pair = (torch.ones(1), 3)
        self.maybe = torch.ones(4)
        self.nested = [(torch.zeros(2), 1)]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        tensor = torch.tensor([1.0, 2.0, 3.0])
        total = self.views[0].sum() + self.views[1].sum() + self.cache["cos"].sum() + self.pair[0].sum()
        return self.norm(self.fc(x)) + self.tied(x) + self.frozen.sum() + total + tensor


#: Set outside the class, because TorchScript does not understand annotations that are texts.
Net.__annotations__ = {
    "names": List[str],  # noqa: UP006
    "cache": Dict[str, torch.Tensor],  # noqa: UP006
    "maybe": Optional[torch.Tensor],  # noqa: UP045
    "nested": List[Tuple[torch.Tensor, int]],  # noqa: UP006
}


@pytest.fixture
def net():
    """A module in evaluation mode, as needed for a trace."""
    torch.manual_seed(3)
    return Net().eval()


def save_script(net: nn.Module, path: Path) -> torch.jit.ScriptModule:
    """Script the module and save the result."""
    module = torch.jit.script(net)
    torch.jit.save(module, path)
    return module


def save_trace(net: nn.Module, path: Path) -> None:
    """Trace the module and save the result."""
    torch.jit.save(torch.jit.trace(net, torch.randn(2, 3)), path)


def save_frozen(net: nn.Module, path: Path) -> None:
    """Freeze the module, so that its weights become constants, and save the result."""
    torch.jit.save(torch.jit.freeze(torch.jit.script(net)), path)


def save_lite(net: nn.Module, path: Path) -> None:
    """Save the module for the interpreter of mobile devices."""
    torch.jit.script(net)._save_for_lite_interpreter(str(path))


def save_lite_with_debug_info(net: nn.Module, path: Path) -> None:
    """Save the module for mobile devices, with records for error messages."""
    torch.jit.script(net)._save_for_lite_interpreter(str(path), _save_mobile_debug_info=True)


WRITERS = [save_script, save_trace, save_frozen, save_lite, save_lite_with_debug_info]


def read(path):
    """Return the state of an archive."""
    return formats.read(str(path))


def values(path):
    """Return the values of every tensor by section and name."""
    rows = read(path).tensors
    return {(row.section, row.fqn): read_all_values(row.data).reshape(row.shape) for row in rows}


# --- comparison with torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS, ids=lambda function: function.__name__)
def test_archive_agrees_with_torch_jit_load(writer, net, tmp_path):
    """Names and their order, kinds, shapes, dtypes, requires_grad and values agree with the module loaded by torch.

    Every constant has the bits in its record.
    """
    writer(net, tmp_path / "x.pt")
    loaded = torch.jit.load(tmp_path / "x.pt")
    state = read(tmp_path / "x.pt")
    assert state.format == "torchscript"
    rows = [row for row in state.tensors if row.kind is not Kind.UNREGISTERED]
    assert [row.fqn for row in rows] == list(loaded.state_dict())
    parameters = dict(loaded.named_parameters(remove_duplicate=False))
    for row in rows:
        tensor = loaded.state_dict(keep_vars=True)[row.fqn]
        assert (row.kind is Kind.PARAMETER) == (row.fqn in parameters)
        assert (row.evidence, row.persistent, row.saved) == (Evidence.REGISTERED, None, True)
        assert (row.shape, f"torch.{row.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert (row.requires_grad, row.device) == (tensor.requires_grad, "cpu")
    actual_values = values(tmp_path / "x.pt")
    for name, tensor in loaded.state_dict().items():
        assert (actual_values["model", name] == tensor.numpy()).all()
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        raw = [name for name in archive.namelist() if "/constants/" in name]
        assert len(raw) == sum(section == "constants" for section, _ in actual_values)
        for name in raw:
            array, record = actual_values["constants", f"c{name.rpartition('/')[2]}"], archive.read(name)
            # A view is part of its record, and a transposed constant has the bytes in another order.
            assert (
                array.tobytes() in record if array.nbytes < len(record) else sorted(array.tobytes()) == sorted(record)
            )


def test_unregistered_tensors_have_python_names(net, tmp_path):
    """A tensor that the class does not register is unregistered, in any container."""
    loaded = save_script(net, tmp_path / "x.pt")
    actual_values = values(tmp_path / "x.pt")
    rows = [row for row in read(tmp_path / "x.pt").tensors if row.kind is Kind.UNREGISTERED]
    assert {row.fqn for row in rows} == {
        *("views[0]", "views[1]", "cache['cos']", "pair[0]", "maybe", "nested[0][0]"),
        *("blocks.0.table", "blocks.1.table"),
    }
    assert {(row.section, row.evidence, row.saved) for row in rows} == {("model", Evidence.REGISTERED, False)}
    assert (actual_values["model", "views[0]"] == loaded.views[0].numpy()).all()
    assert (actual_values["model", "views[1]"] == loaded.views[1].numpy()).all()
    assert (actual_values["model", "cache['cos']"] == loaded.cache["cos"].numpy()).all()
    # A weight under two names is one storage; strides and offsets are kept as saved.
    rows = {row.fqn: row for row in read(tmp_path / "x.pt").tensors}
    assert rows["tied.weight"].tied_to == ("fc.weight",)
    assert rows["views[0]"].data.strides == (1, 4)
    assert (rows["views[1]"].storage_offset, rows["views[1]"].storage_bytes) == (3, 48)


def test_constants_have_the_names_of_the_code(net, tmp_path):
    """The archive does not record the former attribute of a constant; constants share no storage with the module."""
    save_trace(net, tmp_path / "x.pt")
    state = read(tmp_path / "x.pt")
    rows = [row for row in state.tensors if row.section == "constants"]
    assert state.sections == ("model", "constants")
    assert [row.fqn for row in rows] == [f"c{n}" for n in range(len(rows))]
    assert {(row.kind, row.evidence) for row in rows} == {(Kind.UNREGISTERED, Evidence.ASSUMED)}
    assert all(row.note.startswith("a constant of the code") for row in rows)
    assert not any(row.tied_to for row in rows)


def test_frozen_module_has_only_constants(net, tmp_path):
    """Freezing removes the names; the state_dict of a frozen module is empty."""
    save_frozen(net, tmp_path / "x.pt")
    state = read(tmp_path / "x.pt")
    assert state.sections == ("constants",)
    assert not [oddity for oddity in state.oddities if oddity.name == "no-tensors"]


def test_code_is_noted(net, tmp_path):
    """The number and the size of the code files are settings, and so are attributes without tensors."""
    save_script(net, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        sizes = [member.file_size for member in archive.infolist() if member.filename.endswith(".py")]
    settings = read(tmp_path / "x.pt").metadata.values
    assert (settings["code files"], settings["code bytes"]) == (len(sizes), sum(sizes))
    assert "bytecode bytes" not in settings
    assert (settings["names.0"], settings["names.1"], settings["pair.1"], settings["nested.0.1"]) == ("a", "b", 3, 1)
    save_lite(net, tmp_path / "y.ptl")
    assert read(tmp_path / "y.ptl").metadata.values["bytecode bytes"] > 0


def test_quantized_weights_are_listed(tmp_path):
    """TorchScript packs quantized weights; statecli lists them with scales, under the names of eager torch."""
    import torch.ao.quantization as quantization

    model = quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), dtype=torch.qint8)
    torch.jit.save(torch.jit.script(model), tmp_path / "x.pt")
    rows = {row.fqn: row for row in read(tmp_path / "x.pt").tensors}
    weight, bias = rows["0._packed_params._packed_params[0]"], rows["0._packed_params._packed_params[1]"]
    assert (weight.dtype, weight.shape, weight.layout) == ("qint8", (3, 4), "quantized")
    assert (bias.dtype, bias.shape, bias.kind) == ("float32", (3,), Kind.UNREGISTERED)
    assert weight.data.quantizer.scale == pytest.approx(model[0].weight().q_scale())


class Scripted:
    """A scripted class that is not a module."""

    def __init__(self, t: torch.Tensor):
        self.t = t


def test_tensor_of_a_scripted_object_is_listed(tmp_path):
    """The object is not a module, so its tensor is an unregistered attribute."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.script(Scripted)(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scripted.t

    save_script(Holder(), tmp_path / "x.pt")
    (row,) = read(tmp_path / "x.pt").tensors
    assert (row.fqn, row.kind) == ("scripted.t", Kind.UNREGISTERED)


def test_buffers_of_every_dtype_are_listed(tmp_path):
    """Buffers of each dtype that TorchScript saves are listed with their dtype."""
    integers = ("int64", "int32", "int16", "int8", "uint8", "bool")
    names = ("float64", "float32", "float16", "bfloat16", *integers, "complex64", "complex128")
    model = nn.Module()
    for name in names:
        model.register_buffer(f"a_{name}", torch.ones(2, 3).to(getattr(torch, name)))
    torch.jit.save(torch.jit.script(model), tmp_path / "x.pt")
    assert {row.fqn: row.dtype for row in read(tmp_path / "x.pt").tensors} == {f"a_{name}": name for name in names}


#: Dtypes that torch.save writes as bytes, and for which torch.jit.save has a storage class each.
NEW_DTYPES = [
    *(f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")),
    *("uint16", "uint32", "uint64", "complex32", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "uint1", "uint7", "int1", "int7"),
]


@pytest.mark.parametrize("name", NEW_DTYPES)
def test_dtypes_without_a_python_storage_are_read(name, tmp_path):
    """Tensors of new dtypes are read with their values, and their storages are not foreign names."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("needs a newer torch: dtype")
    tensor = torch.arange(16, dtype=torch.uint8).view(dtype) if "int" not in name[-5:] else None
    tensor = torch.arange(4).to(dtype) if tensor is None and name[-2:].isdigit() else tensor
    tensor = torch.empty(4, dtype=dtype) if tensor is None else tensor
    model = nn.Module()
    model.register_buffer("b", tensor)
    torch.jit.save(torch.jit.script(model), tmp_path / "x.pt")
    try:
        assert torch.jit.load(tmp_path / "x.pt").b.dtype == dtype
    except RuntimeError:
        pytest.skip("TorchScript does not load the dtype")
    state = read(tmp_path / "x.pt")
    (row,) = state.tensors
    assert (f"torch.{row.dtype}", row.shape) == (str(tensor.dtype), tuple(tensor.shape))
    assert not [oddity for oddity in state.oddities if oddity.name in ("foreign-globals", "no-tensors")]
    names = [name for name, _ in state.globals]
    assert names
    assert "Storage" not in str(names)
    storage = row.data.storage
    assert (tmp_path / "x.pt").read_bytes()[storage.offset : storage.offset + storage.length] == bytes(
        tensor.untyped_storage()
    )


def test_new_storage_class_in_torch_save_is_damage(parts, tmp_path):
    """torch.load does not know the new storage classes, so their names in an archive of torch.save are damage."""
    torch.save({"w": torch.ones(2, dtype=torch.int16)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    records["data.pkl"] = records["data.pkl"].replace(b"ShortStorage", b"UInt16Storage")
    (row,) = read(build_archive(tmp_path / "y.pt", records)).tensors
    assert "its storage is not recorded in the form that torch writes ('torch.UInt16Storage')" in row.damage


def test_lazy_conjugates_and_negatives_are_undone(tmp_path, statecli):
    """TorchScript wraps the flags in a call with their type."""
    model, base = nn.Module(), torch.randn(3, dtype=torch.complex64)
    model.register_buffer("plain", base.clone())
    model.register_buffer("conj", base.clone().conj())
    model.register_buffer("neg", torch._neg_view(torch.randn(3)))
    model.register_buffer("both", torch._neg_view(base.clone().conj()))
    torch.jit.save(torch.jit.script(model), tmp_path / "x.pt")
    loaded = torch.jit.load(tmp_path / "x.pt").state_dict()
    actual_values = values(tmp_path / "x.pt")
    for name, tensor in loaded.items():
        assert (actual_values["model", name] == tensor.resolve_conj().resolve_neg().numpy()).all(), name
    torch.save(model.state_dict(), tmp_path / "sd.pt")
    result = statecli("diff", tmp_path / "sd.pt", tmp_path / "x.pt")
    assert result.code == 0, result.out
    result = statecli("audit", tmp_path / "x.pt", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, [])


def test_audit_finds_only_unknown_storage_classes(tmp_path, statecli):
    """Storage classes of TorchScript alone are not foreign names, but an invented storage class is."""
    model = nn.Module()
    for name in ("uint16", "float8_e4m3fn", "bits8"):
        model.register_buffer(name, torch.arange(4, dtype=torch.uint8).view(getattr(torch, name)))
    torch.jit.save(torch.jit.script(model), tmp_path / "x.pt")
    result = statecli("audit", tmp_path / "x.pt", "--no-values", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, []), result.out
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    records["data.pkl"] = records["data.pkl"].replace(b"UInt16Storage", b"UInt61Storage")
    findings = statecli("audit", build_archive(tmp_path / "y.pt", records), "-f", "json").json["findings"]
    assert any("torch.UInt61Storage" in finding["message"] for finding in findings)


def test_archive_equals_its_state_dict(net, tmp_path, statecli):
    """An archive and its state_dict do not differ, and either passes the lock of the other."""
    path, state_dict_path = tmp_path / "x.pt", tmp_path / "sd.pt"
    for writer in (save_script, save_trace):
        writer(net, path)
        torch.save(torch.jit.load(path).state_dict(), state_dict_path)
        assert statecli("diff", path, state_dict_path).code == 0
        for locked, audited in ((path, state_dict_path), (state_dict_path, path)):
            assert statecli("lock", locked, "-o", tmp_path / f"{locked.name}.json").code == 0
            result = statecli("audit", audited, "--lock", tmp_path / f"{locked.name}.json", "--select", "lock")
            assert result.code == 0, result


def test_audit_of_ordinary_archives_finds_only_lite_bytecode(tmp_path, statecli):
    """The only finding about ordinary archives concerns the bytecode of the lite interpreter."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    for writer in WRITERS:
        path = tmp_path / f"{writer.__name__}.pt"
        writer(model, path)
        result = statecli("audit", path, "--values", "-f", "json")
        findings = [finding["message"].partition(" (")[0] for finding in result.json["findings"]]
        trusted = "torch's lite interpreter for mobile devices does not check all numbers in this bytecode"
        expected = [trusted] if writer in (save_lite, save_lite_with_debug_info) else []
        assert (result.code, [finding.partition(";")[0] for finding in findings]) == (len(expected), expected), writer


def test_attribute_that_is_not_a_buffer_is_found(net, tmp_path, statecli):
    """`.to` leaves a plain tensor unchanged, and no state_dict contains the tensor."""
    loaded = save_script(net, tmp_path / "x.pt")
    assert loaded.to(torch.float64).cache["cos"].dtype == torch.float32
    result = statecli("audit", tmp_path / "x.pt", "-f", "json", "--select", "unregistered-tensor")
    findings = result.json["findings"]
    assert "blocks.0.table" in {tensor["fqn"] for tensor in findings}
    assert "not in state_dict()" in findings[0]["message"]
    assert {(finding["severity"], finding["help"].partition(" if")[0]) for finding in findings} == {
        ("note", "no action is needed")
    }
    assert result.code == 0


# --- archives that torch never writes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The records of a small archive, by name without the folder.

    TorchScript mangles the name of the second class with the same name in a process; the fixture removes the mangling.
    """
    path = tmp_path_factory.mktemp("parts") / "x.pt"
    torch.jit.save(torch.jit.script(nn.Linear(3, 2)), path)
    with zipfile.ZipFile(path) as archive:
        contents = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    plain = {re.sub(r"/___torch_mangle_\d+", "", name): data for name, data in contents.items()}
    return {name: re.sub(rb"\.___torch_mangle_\d+", b"", data) for name, data in plain.items()}


CODE = "code/__torch__/torch/nn/modules/linear.py"


def test_an_archive_built_by_hand_is_read(parts, tmp_path):
    """The archive from which the tests below build damaged archives is valid."""
    rows = read(build_archive(tmp_path / "y.pt", parts)).tensors
    assert [(row.fqn, row.shape) for row in rows] == [("weight", (2, 3)), ("bias", (2,))]


def test_missing_record_or_class_is_named(parts, tmp_path, line):
    """The error names a missing or invalid record, or a missing class."""
    remaining_parts = {name: data for name, data in parts.items() if name != "data.pkl"}
    assert line(build_archive(tmp_path / "a.pt", remaining_parts)) == (
        "is an incomplete TorchScript archive without data.pkl; save the program again"
    )
    remaining_parts = {name: data for name, data in parts.items() if name != CODE}
    assert line(build_archive(tmp_path / "b.pt", remaining_parts)) == (
        "contains an object of class __torch__.torch.nn.modules.linear.Linear, but its code does not define this class"
    )
    remaining_parts = {name: data for name, data in parts.items() if name != "version"}
    assert line(build_archive(tmp_path / "c.pt", remaining_parts)).startswith("contains no version record")
    assert line(build_archive(tmp_path / "d.pt", {**parts, "data.pkl": b"\x80\x02}."})) == (
        "its data.pkl does not contain a TorchScript module"
    )
    assert line(build_archive(tmp_path / "e.pt", {**parts, "version": b"11"})).startswith(
        "the version record says 11: a newer torch"
    )


def test_a_big_endian_archive_is_refused(parts, tmp_path, line):
    """torch.jit.load ignores the byteorder record and does not swap bytes."""
    path = build_archive(tmp_path / "y.pt", {**parts, "byteorder": b"big"}, folder="y/")
    loaded = torch.jit.load(build_archive(tmp_path / "x.pt", parts, folder="x/"))
    assert torch.equal(torch.jit.load(path).weight, loaded.weight)
    assert line(path).startswith(
        "the byteorder record is 'big', but torch.jit.load and torch.export.load ignore this record"
    )


def test_missing_storage_spoils_only_its_tensor(parts, tmp_path, inspect):
    """Other tensors are listed, and the exit status is 2."""
    weight = next(name for name in parts if name.startswith("data/") and len(parts[name]) == 24)
    path = build_archive(tmp_path / "y.pt", {name: data for name, data in parts.items() if name != weight})
    code, out, err = inspect(path, "-f", "plain")
    assert code == 2
    assert "bias" in out
    assert (
        f"weight: storage {weight.removeprefix('data/')!r} is not in the file; "
        "copy the file again, or save the checkpoint again"
    ) in err


def test_code_of_absurd_size_is_refused(parts, tmp_path, line, monkeypatch):
    """The code of classes has a size limit of its own."""
    monkeypatch.setattr(torchscript, "MAX_CODE_BYTES", 100)
    assert line(build_archive(tmp_path / "y.pt", parts)) == "its code has more than 100 bytes, the limit of statecli"


def test_tensors_of_archives_before_torch_1_6_are_buffers(parts, tmp_path):
    """Before torch 1.6, each tensor except parameters was a buffer."""
    text = parts[CODE].replace(b"  __buffers__ = []\n", b"").replace(b'"weight", "bias", ', b'"weight", ')
    rows = {row.fqn: row for row in read(build_archive(tmp_path / "y.pt", {**parts, CODE: text})).tensors}
    assert rows["weight"].kind is Kind.PARAMETER
    assert (rows["bias"].kind, rows["bias"].persistent) == (Kind.BUFFER, None)


def test_a_function_cannot_forge_the_lines_of_a_class(parts, tmp_path):
    """Only lines at the top of a class count; the functions of the code are indented further."""
    forged = parts[CODE] + b'    __parameters__ = []\n    __buffers__ = ["weight", ]\n'
    rows = {row.fqn: row for row in read(build_archive(tmp_path / "y.pt", {**parts, CODE: forged})).tensors}
    assert rows["weight"].kind is Kind.PARAMETER


def module_pickle(body: bytes) -> bytes:
    """Return a data.pkl whose root is a Linear with the items in `body`."""
    return b"\x80\x02c__torch__.torch.nn.modules.linear\nLinear\n)\x81}(" + body + b"ub."


def test_call_in_a_record_is_reported_and_not_run(parts, tmp_path, statecli):
    """statecli runs none of the pickles, and an audit reports the call in each."""
    mark = tmp_path / "ran"
    call = b"cos\nsystem\nX" + len(f"touch {mark}").to_bytes(4, "little") + f"touch {mark}".encode() + b"\x85R"
    for name, data in (
        ("data.pkl", module_pickle(b"X\1\0\0\0a" + call)),
        ("constants.pkl", b"\x80\x02(" + call + b"t."),
        ("extra/x", b"\x80\x02" + call + b"."),
        (f"{CODE}.debug_pkl", b"\x80\x02" + call + b"."),
    ):
        path = build_archive(tmp_path / "y.pt", {**parts, name: data})
        read(path)
        assert "os.system" in {mention.qualified for finding in scan_pickles(str(path)) for mention in finding.names}
        result = statecli("audit", path, "-f", "json")
        assert result.code == 1
        assert "unsafe-global" in {finding["rule"] for finding in result.json["findings"]}
    assert not mark.exists()


def test_too_many_constants_in_one_tuple_are_refused(net, tmp_path, monkeypatch):
    """The limit counts the tensors, wherever they lie."""
    save_frozen(net, tmp_path / "x.pt")
    records = read_archive(tmp_path / "x.pt")
    nested = records["constants.pkl"].removesuffix(b".") + b"\x85."
    path = build_archive(tmp_path / "y.pt", {**records, "version": b"3\n", "constants.pkl": nested})
    assert len(read(path).tensors) > 2
    monkeypatch.setattr(torchscript, "MAX_ROWS", 1)
    with pytest.raises(MalformedError, match="more than 1 tensors"):
        read(path)


@pytest.mark.parametrize("name", [f"{CODE}.debug_pkl", "code/data/x.py.debug_pkl", "code/x.py.debug_pkl\0x"])
@pytest.mark.parametrize("padding", [0, 70_000])
def test_debug_pickle_with_any_start_is_found(parts, tmp_path, name, padding):
    """`torch.utils.model_dump` unpickles a `.debug_pkl` record."""
    pickled = b"N0cposix\nsystem\n(S'true'\ntR0]." + b"\n" * padding
    path = build_archive(tmp_path / "y.pt", {**parts, name: pickled})
    assert "posix.system" in {mention.qualified for finding in scan_pickles(str(path)) for mention in finding.names}


@pytest.mark.parametrize("folder", ["x/code", "x/CODE", "x/Code", "X/code"])
def test_code_is_found_in_a_folder_of_any_case(folder, tmp_path):
    """torch's zip reader ignores case, so torch.jit.load compiles and runs the code."""

    class Net(nn.Module):
        def forward(self, name: str):
            return torch.from_file(name, True, 4)

    torch.jit.script(Net()).save(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, zipfile.ZipFile(tmp_path / "y.pt", "w") as changed_archive:
        for name in archive.namelist():
            changed_archive.writestr(name.replace("x/code/", f"{folder}/"), archive.read(name))
    torch.jit.load(tmp_path / "y.pt")(str(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
    names = {
        (finding.doer, mention.qualified)
        for finding in scan_pickles(str(tmp_path / "y.pt"))
        for mention in finding.names
    }
    assert ("the code of the file", "torch.from_file") in names


def test_foreign_names_are_noted(parts, tmp_path):
    """TorchScript's own classes do not come from Python modules, and are not noted."""
    assert not read(build_archive(tmp_path / "x.pt", parts)).globals[0][0].startswith("__torch__")
    assert not read(build_archive(tmp_path / "x.pt", parts)).oddities
    path = build_archive(tmp_path / "y.pt", {**parts, "data.pkl": module_pickle(b"X\1\0\0\0acos\nsystem\n)R")})
    assert [oddity.name for oddity in read(path).oddities if oddity.name == "foreign-globals"]


def test_cycle_of_modules_is_walked_once(parts, tmp_path, monkeypatch):
    """A cycle of modules is walked once, and 2^60 paths to a module are refused."""
    linear = b"c__torch__.torch.nn.modules.linear\nLinear\n"
    cycle = b"\x80\x02" + linear + b")\x81q\0}(X\1\0\0\0ah\0ub."
    assert read(_write_crafted(tmp_path, parts, cycle)).tensors == ()
    monkeypatch.setattr("statecli.formats.torch.whole_module.MAX_ROWS", 10_000)
    pickle = (
        b"\x80\x02"
        + linear
        + b"q\0)\x81q\1"
        + b"".join(b"h\0)\x81q%c}(X\1\0\0\0ah%cX\1\0\0\0bh%cub" % (n + 1, n, n) for n in range(1, 60))
    )
    with pytest.raises(UnreadableError, match="many modules share their submodules, so the modules have more than"):
        read(_write_crafted(tmp_path, parts, pickle + b"."))


def _write_crafted(folder: Path, parts: dict[str, bytes], pickle: bytes) -> Path:
    return build_archive(folder / "crafted.pt", {**parts, "data.pkl": pickle})


_OPAQUE = b"c__torch__.torch.classes.aten\nOpaqueObject\n"


@pytest.mark.parametrize("form", ["number", "reduce", "build", "skipped"])
def test_a_cpp_class_that_unpickles_its_state_is_found(form, parts, tmp_path, statecli):
    """torch.jit (the oracle) takes a number for the place of an import, and arguments for a state."""
    mark = tmp_path / "ran"
    inner = base64.b64encode(b"cbuiltins\nopen\n(V%b\nVw\ntR." % str(mark).encode())
    text = b"X" + len(inner).to_bytes(4, "little") + inner
    crafted = {"number": _OPAQUE + b"q\1K\0" + text + b"R\x86", "reduce": _OPAQUE + text + b"R"}
    # After _rebuild_from_type_v2 torch.jit takes the second import for the first.
    skipped_import = b"ctorch._tensor\n_rebuild_from_type_v2\n" + _OPAQUE + b"c__torch__\nM\n)\x81" + text + b"b"
    crafted["skipped"] = skipped_import
    body = crafted.get(form, _OPAQUE + b")\x81" + text + b"b")
    path = build_archive(tmp_path / "crafted.pt", {**parts, "constants.pkl": b"\x80\2(" + body + b"t."})
    scanned = scan_pickles(str(path))
    names = {mention.qualified: mention for finding in scanned for mention in finding.names}
    opaque = names["__torch__.torch.classes.aten.OpaqueObject"]
    assert opaque.called == (form in ("reduce", "build"))
    hazards = [hazard.text for finding in scanned for hazard in finding.hazards]
    assert any("_rebuild_from_type_v2" in text for text in hazards) == (form == "skipped")
    misused_names = [name for name, mention in names.items() if mention.misuse]
    assert misused_names == (["pickle.Unpickler.load_reduce"] if form == "number" else [])
    assert statecli("audit", path, "-q").code == (2 if form == "number" else 1)
    run_code(f"import torch; torch.jit.load({str(path)!r})", cwd=tmp_path)
    assert mark.exists()


def test_unknown_cpp_class_is_an_unknown_global(parts, tmp_path):
    """A library may have registered the class; torch's own classes of packed weights are known."""
    for name, rules in (("mine\nThing", {"unknown-global"}), ("rnn\nCellParamsBase", set())):
        pickle = f"\x80\2(c__torch__.torch.classes.{name}\n)\x81)bt.".encode("latin-1")
        path = build_archive(tmp_path / "crafted.pt", {**parts, "constants.pkl": pickle})
        findings = audit(Request((str(path),))).targets[0].findings
        assert {finding.rule for finding in findings} & {"unknown-global", "unsafe-global"} == rules


def test_cyclic_attributes_do_not_loop(parts, tmp_path):
    """A list in itself, a C++ object as its own state, and nested tags do not make the reader loop."""
    itself = b"]q\5h\5a"
    cpp = b"c__torch__.torch.classes.x\nY\n)\x81q\6h\6b"
    tags = b"ctorch.jit._pickle\nrestore_type_tag\n" * 50 + b"]" + b"X\1\0\0\0T\x86R" * 50
    body = b"X\1\0\0\0a" + itself + b"X\1\0\0\0b" + cpp + b"X\1\0\0\0c" + tags
    assert read(_write_crafted(tmp_path, parts, module_pickle(body))).tensors == ()


def test_every_beginning_is_refused_or_read(parts, tmp_path):
    """A pickle or code cut at any byte is read or refused."""
    for name in ("data.pkl", "constants.pkl", CODE):
        for end in range(len(parts[name])):
            read_or_refuse(build_archive(tmp_path / "z.pt", {**parts, name: parts[name][:end]}))


def test_format_does_not_depend_on_the_suffix(parts, tmp_path):
    """Neither the suffix of the file nor the name of the archive's folder decides the format."""
    assert read(build_archive(tmp_path / "model.safetensors", parts, "some name/")).format == "torchscript"


def test_settings_common_to_all_modules_are_listed_once(tmp_path):
    """The mode of the whole module is a setting, and so is a different mode of a submodule."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.ReLU()).eval()
    net[1].train()
    torch.jit.save(torch.jit.script(net), tmp_path / "net.pt")
    settings = formats.read(str(tmp_path / "net.pt")).metadata.values
    assert settings["training"] is False
    assert {key for key in settings if key.endswith((".training", "hook"))} == {"_modules.1.training"}


def test_diff_reports_another_program_of_equal_length(statecli, in_tmp_path):
    """sin and cos take the same number of bytes."""

    class Wave(torch.nn.Linear):
        def forward(self, x):
            return torch.sin(x)

    torch.jit.trace(Wave(2, 2), torch.ones(2)).save("sin.pt")
    records = read_archive("sin.pt")
    write_archive({name: data.replace(b"torch.sin", b"torch.cos") for name, data in records.items()}, "cos.pt")
    result = statecli("diff", "sin.pt", "cos.pt", "-f", "json")
    assert [change["key"] for change in result.json["metadata"]] == ["code sha256"]
    assert result.code == 1
    assert torch.jit.load("cos.pt")(torch.zeros(1)) == 1
    assert statecli("diff", "sin.pt", "sin.pt").code == 0
