"""Files next to a sound model that a torch loader runs, although their first bytes do not show this."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import time
import zipfile
import zlib

import numpy as np
import pytest
import torch
from msgspec import msgpack
from safetensors.torch import save_file

from statecli.pickle_scan.one_pickle import FIRST_WINDOW_BYTES, SECOND_WINDOW_BYTES
from statecli.storage.byte_source import HEAD_BYTES
from statecli.storage.checkpoint_names import LEGACY_MAGIC_NUMBER

HARMFUL_PICKLE = b"\x80\x02}U\x01wcposix\nsystem\nU\x0btouch PWNED\x85Rs."
#: Spellings of the number that torch compares, each a pickle.
SPELLINGS = {
    "a value popped before": b"N0L%dL\n." % LEGACY_MAGIC_NUMBER,
    "hexadecimal": b"L0x%x\n." % LEGACY_MAGIC_NUMBER,
    "INT": b"I%d\n." % LEGACY_MAGIC_NUMBER,
    "a space": b"L %d\n." % LEGACY_MAGIC_NUMBER,
    "LONG4": b"\x80\x02\x8b\x0a\0\0\0" + LEGACY_MAGIC_NUMBER.to_bytes(10, "little") + b".",
}
TORCH_LOAD_CODE = "import torch; torch.load({name!r}, weights_only=False)"


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    return tmp_path


def build_tar(*extended: tuple[bytes, bytes]) -> bytes:
    """Return a tar whose member is named `storages` by extended headers, each a type and its data."""

    def build_member(name: str, kind: bytes, data: bytes) -> bytes:
        header = tarfile.TarInfo(name)
        header.size, header.type = len(data), kind
        return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)

    members = (*(("x", *header) for header in extended), ("z", b"0", b"I1\n." + HARMFUL_PICKLE))
    return b"".join(build_member(*member) for member in members) + bytes(1024)


#: What torch.load runs.
FILES_THAT_TORCH_LOADS = {
    **{f"a legacy file, {name}": magic + b"M\xe9\x03.}." + HARMFUL_PICKLE + b"]." for name, magic in SPELLINGS.items()},
    "a legacy file, text in the place of the object": SPELLINGS["LONG4"]
    + b"I1001\n.}."
    + b"cshutil\nwhich\n(dS'__setstate__'\ncos\nsystem\nsbS'touch PWNED'\nb~",
    "a tar with a long link before a long name": build_tar((b"K", b"foo"), (b"L", b"storages\0")),
    "a tar with a record of another end": build_tar((b"x", b"17 path=storages_")),
}


@pytest.mark.parametrize("kind", FILES_THAT_TORCH_LOADS)
def test_file_whose_code_torch_runs_does_not_pass(kind, folder, statecli, forked_python):
    """The name of the file does not matter. The installed torch runs the code."""
    path = folder / "weights"
    path.write_bytes(FILES_THAT_TORCH_LOADS[kind])
    forked_python(TORCH_LOAD_CODE.format(name="weights"), cwd=folder)
    (folder / "PWNED").unlink()
    certain = 1 if kind.startswith("a legacy file") else 2
    for name, code in (("weights", certain), ("checkpoint.pth.tar", 2), ("model.bin", certain)):
        path = path.rename(folder / name)
        assert statecli("audit", str(folder)).code == code, name


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("model.package", b"#!package\n"),
        ("model.package", b"\x89PNG\r\n\x1a\n"),
        ("model.zip", b"\xff\xff\xff\xff"),
        ("model.zip", b"#!package\n"),
    ],
)
def test_package_archive_after_other_bytes_fails(name, prefix, folder, statecli, forked_python):
    """torch finds an archive from its end; PackageImporter runs the Python files in the archive."""
    path = folder / name
    path.write_bytes(prefix)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr("p/.data/extern_modules", b"")
        archive.writestr("p/.data/version", b"6\n")
        archive.writestr("p/.data/python_version", b"3.11.7")
        archive.writestr("p/model/model.pkl", b"\x80\x02cnet\nmake\n)R.")
        archive.writestr("p/net.py", b"open('PWNED', 'w')\ndef make():\n    return {}\n")
    code = f"from torch.package import PackageImporter as P; P({name!r}).load_pickle('model', 'model.pkl')"
    forked_python(code, cwd=folder)
    assert (folder / "PWNED").exists()
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert f"{name}: has a zip archive after other data" in result.out


def test_program_that_ends_with_a_zip_fails(folder, statecli):
    """An installer may end as a zip; a loader that starts at the end reads the archive under any names."""
    path = folder / "setup.exe"
    path.write_bytes(b"MZ" + bytes(500))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.txt", "install")
        archive.writestr("setup.ini", "")
    assert statecli("audit", str(folder)).code == 2


@pytest.mark.parametrize("separator", ["/", "\\", "//"])
def test_aotinductor_library_below_the_first_record_is_reported(separator, tmp_path, statecli):
    """AOTInductor's loader uses the whole name of the first record as the folder of the archive."""
    array = io.BytesIO()
    np.save(array, np.ones(2, dtype="f4"))
    with zipfile.ZipFile(tmp_path / "model.pt2", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("w.npy", array.getvalue())
        member = separator.join(("w.npy", "data", "aotinductor", "model", "m"))
        archive.writestr(f"{member}_metadata.json", json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
        archive.writestr(f"{member}.so", b"\x7fELF")
    result = statecli("audit", str(tmp_path / "model.pt2"))
    assert result.code == 1
    assert "aotinductor" in result.out


def test_exported_program_after_other_bytes_fails(folder, statecli):
    """torch.export.load finds a plain zip of torch 2.7 from its end; the zip's records are compressed."""
    constants, path = io.BytesIO(), folder / "model.dat"
    torch.save({}, constants)
    path.write_bytes(b"hello\n")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("version", "8.20")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_constants.pt", constants.getvalue())
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert "model.dat: has a zip archive after other data" in result.out


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "compressed"])
def test_the_only_member_of_a_zip_in_a_tensor_is_scanned(method, folder, statecli, forked_python):
    """torch.hub takes a file that ends as a zip with one member for an old checkpoint, and unpickles the member."""
    path = folder / "m.safetensors"
    member = b"N0cposix\nsystem\n(Vtouch PWNED\ntR." + bytes(70_000)

    def build_zip_after(prefix: bytes) -> bytes:
        data = io.BytesIO()
        data.write(prefix)
        with zipfile.ZipFile(data, "a", method) as archive:
            archive.writestr("w", member)
        return data.getvalue()[len(prefix) :]

    size = len(build_zip_after(b""))
    save_file({"w": torch.ones(size, dtype=torch.uint8)}, path)
    head = path.read_bytes()[:-size]
    path.write_bytes(head + build_zip_after(head))
    code = "import torch; torch.hub.load_state_dict_from_url('http://x/m.safetensors', model_dir='.')"
    forked_python(code, cwd=folder)
    assert (folder / "PWNED").exists()
    result = statecli("audit", str(path))
    assert result.code == 1
    assert "posix.system" in result.out


def test_library_that_aotinductor_loads_does_not_pass(folder, statecli):
    """AOTInductor's loader accepts any archive with a library among the constants, even after a picture."""
    picture, checkpoint = folder / "logo.png", folder / "saved.pt"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    with zipfile.ZipFile(picture, "a") as archive:
        archive.writestr("x/data/constants/a.so", b"\x7fELF")
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert "logo.png: has a zip archive after other data" in result.out
    picture.unlink()
    torch.save({"w": torch.ones(1)}, checkpoint)
    with zipfile.ZipFile(checkpoint, "a") as archive:
        archive.writestr("saved/data/constants/a.so", b"\x7fELF")
    findings = statecli("audit", str(checkpoint), "-f", "json").json["findings"]
    assert any(finding["rule"] == "unknown-global" and "constants/a.so" in finding["message"] for finding in findings)


#: A pickle that does not begin like a pickle. The first window of the scan ends after a `.` that is an argument.
def build_pickle_with_dot_at(edge: int) -> bytes:
    length = edge - 8
    return (
        b"X" + struct.pack("<I", length) + b" " * length + b"0" + b"K." + b"0" + b"cposix\nsystem\n(Vtouch PWNED\ntR."
    )


@pytest.mark.parametrize("edge", [FIRST_WINDOW_BYTES, SECOND_WINDOW_BYTES])
def test_dot_at_the_end_of_a_window_does_not_end_the_pickle(edge, folder, statecli, forked_python):
    """The pickle is a file, the metadata of a distributed checkpoint, or bytes that a module unpickles."""
    data = build_pickle_with_dot_at(edge)
    assert data[edge - 1 : edge] == b"."
    (folder / "weights").write_bytes(data)
    forked_python(TORCH_LOAD_CODE.format(name="weights"), cwd=folder)
    assert (folder / "PWNED").exists()
    assert statecli("audit", str(folder)).code == 1
    (folder / "weights").rename(folder / ".metadata")
    assert statecli("audit", str(folder)).code == 2
    (folder / ".metadata").unlink()
    save_file({"a._extra_state": torch.frombuffer(bytearray(data), dtype=torch.uint8)}, folder / "model.safetensors")
    assert "posix.system" in statecli("audit", str(folder)).out


def test_dot_at_the_end_of_a_compressed_head_does_not_end_the_pickle(folder, statecli):
    """joblib unpacks a file of any name by its first bytes."""
    (folder / "vocabulary.gz").write_bytes(gzip.compress(build_pickle_with_dot_at(HEAD_BYTES)))
    assert statecli("audit", str(folder)).code == 2


def test_torchscript_flatbuffer_fails(folder, statecli, forked_python):
    """torch.jit.load recognises a flatbuffer by its fifth to eighth byte."""
    code = """
import torch
class M(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return torch.from_file("PWNED", shared=True, size=4, dtype=torch.uint8).fill_(65)
torch.jit.save_jit_module_to_flatbuffer(torch.jit.script(M()), "anything")
torch.jit.load("anything")(torch.zeros(1))
"""
    (folder / "net.py").write_text(code)
    forked_python("import net", cwd=folder)
    (folder / "net.py").unlink()
    assert (folder / "PWNED").read_bytes() == b"AAAA"
    (folder / "PWNED").unlink()
    path = folder / "anything"
    for name in ("anything", "model.ptl", "model.ff"):
        path = path.rename(folder / name)
        result = statecli("audit", str(folder))
        assert result.code == 2
        assert "is a TorchScript flatbuffer, which statecli does not read" in result.out


def test_zip_with_the_mark_of_a_flatbuffer_does_not_pass(tmp_path, statecli):
    """torch.jit.load looks for the mark of a flatbuffer first."""
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[4:8] = b"PTMF"
    (tmp_path / "a.pt").write_bytes(data)
    assert statecli("audit", str(tmp_path)).code == 2


@pytest.mark.parametrize("prefix", [b'{"format": "pt"}\n', b"MZ" + bytes(60), b"#!/bin/sh\n"])
def test_zip_with_one_file_after_other_bytes_fails(prefix, folder, statecli, forked_python):
    """torch.hub and pandas find the zip from its end, and unpickle the file."""
    data = io.BytesIO()
    data.write(prefix)
    with zipfile.ZipFile(data, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("resnet18", HARMFUL_PICKLE)
    (folder / "resnet18-f37072fd").write_bytes(data.getvalue())
    url = "https://example.org/resnet18-f37072fd"
    forked_python(f"import torch; torch.hub.load_state_dict_from_url({url!r}, model_dir='.')", cwd=folder)
    assert (folder / "PWNED").exists()
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert "resnet18-f37072fd: has a zip archive after other data" in result.out


def test_ray_pickle_in_json_fails(folder, statecli):
    """TorchCheckpoint.get_preprocessor unpickles the digits. Metadata without a pickle is skipped like other JSON."""
    path = folder / ".metadata.json"
    path.write_text(json.dumps({"epoch": 1}))
    assert statecli("audit", str(folder)).code == 0
    for text in (json.dumps({"preprocessor_pkl": HARMFUL_PICKLE.hex()}), '{"preprocessor_pk\\u006c": "80"}'):
        path.write_text(text)
        result = statecli("audit", str(folder))
        assert result.code == 2
        assert ".metadata.json: is a text file that can run code: Ray unpickles text from this file" in result.out


ENUM = json.dumps({"components": {"a": {"in_spec": json.dumps({"__enum__": True, "fqn": "ctypes:cdll", "name": "a"})}}})


#: Spellings of a key whose text Ultralytics evaluates.
ACTIVATIONS = [
    "activation: open('PROOF', 'w') and torch.nn.SiLU()\n",
    "'activation': exit()\n",
    '"\\x61ctivation": exit()\n',
    '"activ\\\n  ation": exit()\n',
    "? activation # a key\n# of any kind\n: exit()\n",
    "activation: # the value follows\n  exit()\n",
    "activation: x or\n  exit()\n",
    "activation: |\n  exit()\n",
    "activation: >-\n\n  exit()\n",
    'activation: "\\x65xit\\x28\\x29"\n',
    "activation: !!str &a exit()\n",
    "act: &a exit()\nactivation: *a\n",
    "act: &a activation\n*a : exit()\n",
    "act: &a activation\n*a: exit()\n",
    "m: &m {a: 1, activation: exit()}\n<<: *m\n",
    "m: &m {\n    activation: x or\nexit()}\n<<: *m\n",
    "<<: [activation: x or\nexit()]# a: \n",
    "m: {a'#b: 1, activation:\n exit()}\n",
    "m: {a: 'x\n# y', activation: exit()}\n",
    "activation: open('PROOF')\n",
    "activation: torch.nn.SiLU(exit())\n",
    "activation: torch.nn.ReLU(*exit())\n",
    "activation: torch.hub.load('a')\n",
    "activation: nn.init.Path('a').touch()\n",
    "activation: f'{exit()}'\n",
]
TRUSTS_REMOTE_CODE = '{"model_cfg": {"text_cfg": {"tokenizer_kwargs": {"trust_remote_code" : true}}}}'


@pytest.mark.parametrize(
    ("name", "text", "library"),
    [
        ("experiment_state-2026\n.json", "{}", "Ray"),
        ("experiment_state.json", "{}", "Ray"),
        ("state.json", '{"_type": "CLOUDPICKLE_FALLBACK", "value": "80"}', "Ray"),
        ("export.json", ENUM, "torch.utils._pytree"),
        ("export.json", ENUM.replace("__enum__", "__enu\\\\u006d__"), "torch.utils._pytree"),
        ("predictor.json", '{"__kind__": "instance", "class": "os.system", "args": ["true"]}', "GluonTS"),
        *(("yolov8n.yaml", "nc: 80\n" + text, "Ultralytics") for text in ACTIVATIONS),
        ("yolov8n.yaml", b"a\0ctiva\xfftion: exit()\n", "Ultralytics"),
        ("open_clip_config.json", TRUSTS_REMOTE_CODE, "open_clip"),
        ("open_clip_config.json", TRUSTS_REMOTE_CODE.replace("true", "1"), "open_clip"),
        ("open_clip_config.json", TRUSTS_REMOTE_CODE.replace("trust", r"tr\u0075st"), "open_clip"),
        ("hyperparams.yaml", "a: !apply:builtins.exec [pass]\n", "HyperPyYAML"),
        ("hyperparams.yml", "a: !new:os.system [pass]\n", "HyperPyYAML"),
        ("hyperparams.yaml", "a: !%61pply:builtins.exec [pass]\n", "HyperPyYAML"),
        ("hyperparams.yaml", 'a: !tuple "(\\x21!python/object/apply:os.system [pass],)"\n', "HyperPyYAML"),
        ("hyperparams.yaml", "b: x\na: !ref <b>\n", "HyperPyYAML"),
        ("config.yaml", "a: !!python/tuples [1]\n", "PyYAML"),
        ("config.yaml", "a: !<tag:yaml.org,2002:python/name:os.system>\n", "PyYAML"),
        ("hyperparams.yaml", "a: !%2561pply:builtins.exec [pass]\n", "HyperPyYAML"),
        ("hyperparams.yaml", "a: !include:notes.txt\n", "HyperPyYAML"),
        ("hyperparams.yaml", "\ufeff%TAG !n! !appl\n---\na: !n!y:builtins.exec [pass]\n", "PyYAML"),
        ("hyperparams.yaml", "# c\r%TAG !n! !appl\r---\ra: !n!y:builtins.exec [pass]\r", "PyYAML"),
        ("export.json", ENUM.replace("__enum__", r"\u005c\u005cu005f_enum__"), "torch.utils._pytree"),
        ("config.yaml", "\ufeffa: !!python/object/apply:os.system [pass]\n".encode("utf-16-le"), "PyYAML"),
        ("predictor.json", '{"__kind__": "instance"}'.encode("utf-16-le"), "GluonTS"),
        ("config.yaml", "a: !!python/object/apply:os.system [pass]\n", "PyYAML"),
        ("config.yaml", "a: !!python/object/apply:pathlib.Path\n  -: 1\n  state: {}\n", "PyYAML"),
        ("config.yaml", "a: !!python/object:argparse.Namespace%0Ax.y\n", "PyYAML"),
        ("config.yaml", "a: !!python/object:argparse.Namespaces\n", "PyYAML"),
        ("config.yaml", "a: !!python/name:torch.hub.load ''\n", "PyYAML"),
        ("config.yaml", "a: !!python/name:builtins.eval ''\n", "PyYAML"),
        ("config.yaml", "a: !!python/name:torch.nn.modules.linear.Linear%20''\n", "PyYAML"),
        ("config.yaml", "%TAG ! tag:yaml.org,2002:python/\n---\na: !object/apply:os.system [pass]\n", "PyYAML"),
    ],
)
def test_text_file_that_names_code_to_run_fails(folder, statecli, name, text, library):
    """JSON and YAML of a folder from which a library builds objects by name or unpickles digits."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert f"is a text file that can run code: {library} " in result.out


def test_plain_text_passes_under_names_that_libraries_execute(folder, statecli):
    """The content decides: the names are those of files from which a library builds objects."""
    yaml = dict.fromkeys(("yolov8n.yaml", "hyperparams.yaml", "hyperparams.yml", "config.yaml"), "a: 1\n")
    for name, text in {**yaml, "export.json": "{}", "predictor.json": "[]", "open_clip_config.json": "[]"}.items():
        (folder / name).write_text(text)
    (folder / "state.json").write_text("[]")
    assert statecli("audit", str(folder)).code == 0


def test_index_file_with_a_ray_pickle_does_not_pass(folder, statecli):
    """The file is read as the index of a model, and Ray unpickles its digits."""
    index = {"weight_map": {"w": "model.safetensors"}, "preprocessor_pkl": HARMFUL_PICKLE.hex()}
    (folder / ".metadata.json").write_text(json.dumps(index))
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert "Ray unpickles text from this file" in result.out


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/tuple\n- 1\n- 2\n",  # hparams.yaml of Lightning
        "a: !!python/tuple [!!python/complex 1.5, !!python/str b]\n",
        "a: Hello !name, see https://example.org/!ref-1 and a!tuple\n",
        "rope_theta: !!float 1e6\n",
        "ns: !!python/object:argparse.Namespace\n  lr: 0.1\n",
        "opt: &id001 !!python/name:torch.optim.adamw.AdamW ''\nother: *id001\n",
        "out: !!python/object/apply:pathlib.PosixPath\n- runs\nurl: https://example.org/a%20b\n",  # OmegaConf
        "t: !!python/object/apply:datetime.timedelta\n  - 1\nd: !!python/object/apply:collections.OrderedDict\n- []\n",
    ],
)
def test_yaml_of_plain_values_passes(folder, statecli, text):
    """Ordinary libraries write YAML like this next to a checkpoint."""
    (folder / "hparams.yaml").write_text(text)
    assert statecli("audit", str(folder)).code == 0


@pytest.mark.parametrize(
    "text",
    [
        "activation: torch.nn.ReLU() # (optional) model default activation function\n",
        "activation: nn.LeakyReLU(0.1, inplace=True)\nbackbone:\n  - [-1, 1, Conv, [64, 3, 2]]\n",
        "backbone:\n  - [-1, 1, nn.Upsample, [None, 2, 'nearest']]\nactivation: nn.SiLU()\nhead: [a(b)]\n",
        "activation: relu\nbias: Normal(0, 1)\n",
        "activation: 'gelu'\nother: f(x)\n",
        "activation: ${model.activation}\nother: (x)\n",
        "activation: leaky_relu(0.2)\n",
        "activation:\n  name: gelu\n  text: tanh (approximate)\n",
        "activation:\n- relu\n- f(x)\n",
        "activation: null\nactivation_fn: exit()\nhidden-activation: exit()\n",
        "x: {activation: relu, other: f(x)}\n",
        "# activation: exit()\na: 1 # activation: exit()\n",
        "act: &a relu\nactivation: *a\nother: f(x)\n",
        "layers:\n- activation: relu\n  size: 3\n- activation: f\n- [-1, 1, Conv]\n",
    ],
)
def test_yaml_with_a_plain_activation_passes(folder, statecli, text):
    """A class of torch.nn, or a name: Ultralytics evaluates a text, and other libraries look up a name."""
    (folder / "model.yaml").write_text(text)
    assert statecli("audit", str(folder)).code == 0


@pytest.mark.parametrize("value", ["false", "null", "0", '""'])
def test_json_without_remote_code_passes(folder, statecli, value):
    """Libraries save their arguments in files like this."""
    (folder / "args.json").write_text(TRUSTS_REMOTE_CODE.replace("true", value))
    assert statecli("audit", str(folder)).code == 0


@pytest.mark.parametrize(("file", "code"), [(".cache/program", 1), ("../program", 2), ("program", 1)])
def test_a_program_that_an_export_names_is_audited(folder, statecli, file, code):
    """`ExportedModel.from_pretrained` of transformers loads the named file from any folder."""
    model = folder / "model"
    (model / ".cache").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, model / "model.safetensors")
    with zipfile.ZipFile(model / file, "w") as archive:
        archive.writestr("p/data.pkl", HARMFUL_PICKLE)
        archive.writestr("p/version", "3\n")
    components = {"model": {"file": file, "metadata": {"architecture": "Net"}}}
    (model / "export.json").write_text(json.dumps({"export_format": "dynamo", "components": components}))
    assert statecli("audit", str(model)).code == code


def test_text_with_many_nested_escapes_fails(folder, statecli):
    """The text within the escapes is unknown."""
    (folder / "config.yaml").write_text("a: '%" + "25" * 20 + "61'\n")
    result = statecli("audit", str(folder))
    assert (result.code, "nested escapes on more than" in result.out) == (2, True)


REPETITIVE_TEXTS = {
    "backslashes": ("notes.json", b'{"a": "' + b"\\" * 400_000 + b'"}'),
    "keys in a line": ("a.yaml", b"activation " * 200_000 + b"# activation: x\n"),
    "a path of mmengine": ("last_checkpoint", b"a/" * 200_000),
    "a path of a module": ("modules.json", json.dumps([{"path": "a/" * 200_000}] * 4).encode()),
    "many paths of modules": (
        "modules.json",
        json.dumps([{"path": "a/" * 2000 + f"{n}"} for n in range(100)]).encode(),
    ),
}


@pytest.mark.parametrize("kind", REPETITIVE_TEXTS)
def test_repetitive_text_is_audited_in_three_seconds(kind, folder, statecli):
    """No text is scanned repeatedly."""
    name, content = REPETITIVE_TEXTS[kind]
    (folder / name).write_bytes(content)
    before = time.process_time()
    assert statecli("audit", str(folder)).code == 0
    assert time.process_time() - before < 3


@pytest.mark.parametrize(
    ("link", "file", "code"), [("hyperparams.yaml", "notes.bin", 2), ("state.msgpack", "a.safetensors", 1)]
)
def test_link_with_a_name_that_a_library_loads_does_not_pass(folder, statecli, link, file, code):
    """A library selects the file by the name of the link; under its own name, the file is clean."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode().ljust(0x1DE)
    tensors = len(header).to_bytes(8, "little") + header + bytes(8)
    text = pickle.dumps("\na: !apply:builtins.exec [pass]\n", 0)
    (folder / file).write_bytes(tensors if "safetensors" in file else text)
    assert statecli("audit", str(folder)).code == 0
    (folder / link).symlink_to(folder / file)
    assert statecli("audit", str(folder)).code == code


@pytest.mark.parametrize("before", [b"", b" "])
def test_safetensors_file_named_msgpack_does_not_pass(folder, statecli, before):
    """The header's length is also the start of a msgpack map, and RLlib selects the file by name."""
    header = before + json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    header = header.ljust(0x1DE)
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    assert content[0] == 0xDE
    (folder / "state.safetensors").write_bytes(content)
    assert statecli("audit", str(folder)).code == 0
    (folder / "state.safetensors").rename(folder / "state.msgpack")
    assert statecli("audit", str(folder)).code == 1


def test_rllib_state_with_an_array_of_objects_fails(folder, statecli):
    """Its suffix is `.msgpck`, and msgpack_numpy unpickles an array of objects."""
    kind = b"\x83\xc4\x02nd\xc3\xc4\x04kind\xc4\x01O\xc4\x04data\xc4" + bytes([len(HARMFUL_PICKLE)]) + HARMFUL_PICKLE
    (folder / "algorithm_state.msgpck").write_bytes(kind)
    assert statecli("audit", str(folder)).code == 2


def encode_space(array: bytes) -> str:
    """Return the limits of a space as RLlib encodes them."""
    return base64.b64encode(zlib.compress(array)).decode()


def encode_npy(array: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


LIMITS = {
    "an array of objects": (encode_npy(np.array([None])), 1),
    "an array with objects in it": (encode_npy(np.zeros(1, [("a", "f4"), ("b", "O")])), 1),
    "a pickle": (HARMFUL_PICKLE, 1),
    "numbers": (encode_npy(np.zeros(3, "f4")), 0),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_rllib_space_is_reported_if_numpy_unpickles_its_limits(limits, folder, statecli):
    """RLlib unpacks the text, and numpy unpickles objects."""
    array, code = LIMITS[limits]
    space = {
        "space": "box",
        "low": encode_space(array),
        "high": encode_space(encode_npy(np.zeros(3))),
        "shape": [3],
        "dtype": "<f4",
    }
    (folder / "policy_state.pkl").write_bytes(pickle.dumps({"policy_spec": {"observation_space": {"space": space}}}))
    result = statecli("audit", str(folder))
    assert (result.code, "unsafe-data" in result.out) == (code, bool(code))


@pytest.mark.parametrize(
    "store", [bytes, bytearray, lambda raw: np.frombuffer(raw, np.uint8)], ids=["bytes", "bytearray", "array"]
)
def test_rllib_limits_are_checked_in_any_buffer(store, folder, statecli):
    """base64 takes any buffer; zlib refuses an empty text."""
    limits = store(encode_space(encode_npy(np.array([None]))).encode())
    (folder / "policy_state.pkl").write_bytes(pickle.dumps({"space": "box", "low": limits, "high": ""}))
    (finding,) = [
        f for f in statecli("audit", str(folder), "-f", "json").json["findings"] if f["rule"] == "unsafe-data"
    ]
    assert finding["message"].startswith(
        f"['low'] is {'a string' if isinstance(limits, (bytes, bytearray)) else 'an array'}"
    )


def test_flax_msgpack_with_a_name_that_rllib_reads_fails(folder, statecli):
    """Texts of RLlib's files are unpickled."""
    array = msgpack.encode([[2], "float32", bytes(8)])
    content = msgpack.encode({"weights": {"w": msgpack.Ext(1, array)}, "policy_spec": {}})
    (folder / "a.msgpack").write_bytes(content)
    assert statecli("audit", str(folder)).code == 0
    (folder / "a.msgpack").rename(folder / "policy_state.msgpck")
    assert statecli("audit", str(folder)).code == 2


@pytest.mark.parametrize("kind", ["a folder", "a loop of links", "a NUL byte", "a long text"])
def test_invalid_tracker_does_not_hide_findings(kind, folder, statecli):
    """The other files of the folder are still audited."""
    tracker = folder / "last_checkpoint"
    if kind == "a folder":
        tracker.mkdir()
    elif kind == "a loop of links":
        tracker.symlink_to(tracker)
    else:
        tracker.write_bytes(b"a\0b" if kind == "a NUL byte" else b"a" * 3_000_000)
    assert statecli("audit", str(folder)).code == (2 if kind == "a long text" else 0)
    (folder / "evil.pkl").write_bytes(HARMFUL_PICKLE)
    result = statecli("audit", str(folder))
    assert result.code == (2 if kind == "a long text" else 1)
    assert "posix.system" in result.out


@pytest.mark.parametrize("place", ["http://127.0.0.1/a.pth", "s3://bucket/a.pth", "openmmlab://resnet50", "OUTSIDE"])
def test_mmengine_checkpoint_outside_the_folder_fails(folder, statecli, tmp_path_factory, place):
    """A resumed run loads the path in `last_checkpoint`; a path of another machine does not exist and is not loaded."""
    outside_file = tmp_path_factory.mktemp("other") / "a.pth"
    outside_file.write_bytes(HARMFUL_PICKLE)
    if place == "OUTSIDE":
        for harmless in ("/home/someone/work_dirs/epoch_3.pth", str(folder / "model.safetensors"), "epoch_3.pth"):
            (folder / "last_checkpoint").write_text(harmless)
            assert statecli("audit", str(folder)).code == 0
    (folder / "last_checkpoint").write_text(str(outside_file) if place == "OUTSIDE" else place)
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert "last_checkpoint makes MMEngine load" in result.out


def build_old_tar(first_name: str = "first") -> bytes:
    """Return a file as saved by torch before 0.1.10; loading the file unpickles its member `storages`."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in ((first_name, b""), ("storages", HARMFUL_PICKLE), ("tensors", b"K\0."), ("pickle", b"}.")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def build_tar_that_is_an_array() -> bytes:
    """Return a tar whose first member's name is the header of a numpy array of bytes."""
    tar, header = bytearray(build_old_tar()), b""
    for _ in range(3):  # the header has the number of bytes after it
        shape = len(tar) - 10 - len(header)
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }\n" % shape
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    tar[: len(start)] = start
    tar[148:156] = b" " * 8
    tar[148:156] = b"%06o\0 " % sum(tar[:512])
    assert np.load(io.BytesIO(bytes(tar))).shape == (len(tar) - len(start),)
    return bytes(tar)


LOADS_FROM_HUB = "import torch; torch.hub.load_state_dict_from_url('https://example.org/{name}', model_dir='.')"


class EmptyBlocks:
    """A compressor of zipfile whose output begins with blocks without data."""

    def compress(self, data: bytes) -> bytes:
        blocks = [data[position : position + 60_000] for position in range(0, len(data), 60_000)]
        lengths = [struct.pack("<HH", len(block), len(block) ^ 0xFFFF) for block in blocks]
        return b"\0\0\0\xff\xff" * 40 + b"".join(b"\0" + n + d for n, d in zip(lengths, blocks, strict=True))

    def flush(self) -> bytes:
        return b"\1\0\0\xff\xff"


@pytest.mark.parametrize("method", ["stored", "compressed", "compressed, behind empty blocks"])
def test_npz_array_that_is_also_a_tar_is_scanned(method, tmp_path, statecli, forked_python, monkeypatch):
    """torch.hub passes the only member of a zip to torch.load, and torch.load tries tarfile first."""
    if "empty" in method:
        monkeypatch.setattr(zipfile, "_get_compressor", lambda *_: EmptyBlocks())
    kind = zipfile.ZIP_STORED if method == "stored" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(tmp_path / "weights.pth", "w", kind) as archive:
        archive.writestr("weight.npy", build_tar_that_is_an_array())
    monkeypatch.undo()
    forked_python(LOADS_FROM_HUB.format(name="weights.pth"), cwd=tmp_path)
    assert (tmp_path / "PWNED").exists()
    result = statecli("audit", str(tmp_path / "weights.pth"))
    assert (result.code, "posix.system" in result.out) == (1, True)


def test_a_zip_at_the_end_of_a_tensor_is_reported(folder, statecli, forked_python):
    """Its member is a tar of old torch; the archive itself is reported, whatever its content."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("w", build_old_tar())
    save_file({"w": torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)}, folder / "model.safetensors")
    forked_python(LOADS_FROM_HUB.format(name="model.safetensors"), cwd=folder)
    assert (folder / "PWNED").exists()
    result = statecli("audit", str(folder / "model.safetensors"))
    assert result.code == 1
    assert (
        "the file ends with a zip archive, and torch.hub and pandas read this archive instead of the tensors"
        in result.out
    )


def test_zip64_after_a_program_fails(folder, statecli):
    """torch's archives are zip64; their directory may begin far before the end, behind other entries."""
    data = io.BytesIO(b"#!/bin/sh\n")
    data.seek(0, io.SEEK_END)
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("a/.data/extern_modules", b"")
        for number in range(800):
            archive.writestr(f"a/{number:0100}", b"")
    file = bytearray(data.getvalue())
    end = file.rfind(b"PK\5\6")
    fields = struct.unpack("<4sHHHHIIH", file[end:])
    file[end:end] = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, fields[3], fields[4], fields[5], fields[6]
    ) + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    (folder / "tool").write_bytes(file)
    assert statecli("audit", str(folder)).code == 2


@pytest.mark.parametrize("length", [0x34, 0x1234, 0x1234567])
def test_compiled_artifact_without_a_format_name_fails(length, folder, statecli):
    """`CompiledArtifact.save` of torch 2.7 wrote no name of the format; torch 2.13 reads the file."""
    key = bytes(7) + b"\x20" + b"k" * 32 + length.to_bytes(8, "big")
    (folder / "compiled").write_bytes(b"\1\2\3\4" + key + b"x" * 100)
    result = statecli("audit", str(folder))
    assert result.code == 2
    assert "compiled: is a torch.compile cache" in result.out


def compress_without_container(data: bytes, properties: int = 0x5D) -> bytes:
    """Compress with LZMA and the given properties byte; 0 is a valid byte."""
    shares = {"lc": properties % 9, "lp": properties // 9 % 5, "pb": properties // 45, "dict_size": 1 << 20}
    return lzma.compress(data, lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, **shares}])


#: Streams without data before the stream with the pickle: Python's lzma reads all streams.
EMPTY_STREAMS = {
    "zeros": bytes(18) + lzma.compress(HARMFUL_PICKLE),
    "megabytes of zeros": bytes(18 * 120_000) + lzma.compress(HARMFUL_PICKLE),
    "a stream, megabytes of zeros": compress_without_container(b"")
    + bytes(18 * 120_000)
    + lzma.compress(HARMFUL_PICKLE),
    "zeros, and properties of zero": bytes(18) + compress_without_container(HARMFUL_PICKLE, 0),
    "a stream, zeros, and properties of zero": lzma.compress(b"")
    + bytes(36)
    + compress_without_container(HARMFUL_PICKLE, 0),
    "lzip of version 0": b"LZIP\0\x10"
    + compress_without_container(b"")[13:]
    + bytes(12)
    + lzma.compress(HARMFUL_PICKLE),
}


@pytest.mark.parametrize("name", EMPTY_STREAMS)
def test_pickle_after_empty_compressed_streams_fails(name, folder, statecli):
    """pandas selects the compression by the file's suffix."""
    (folder / "model.xz").write_bytes(EMPTY_STREAMS[name])
    with lzma.open(folder / "model.xz") as file:
        assert file.read() == HARMFUL_PICKLE
    assert statecli("audit", str(folder)).code == 2


def test_compressed_data_with_zeros_at_its_end_passes(folder, statecli):
    """Tape archives and file systems pad files with zeros to a full block."""
    (folder / "notes.xz").write_bytes(lzma.compress(b"text") + bytes(10_000))
    (folder / "notes.gz").write_bytes(gzip.compress(b"text") + bytes(10_000))
    assert statecli("audit", str(folder)).code == 0


def test_pickle_in_a_ray_experiment_fails(folder, statecli):
    """ExperimentAnalysis unpickles the hexadecimal digits in the file."""
    state = {"_type": "CLOUDPICKLE_FALLBACK", "value": HARMFUL_PICKLE.hex()}
    (folder / "experiment_state-2026.json").write_text(json.dumps({"trial_data": [state]}))
    (folder / "trial_metadata.json").write_text("{}")
    result = statecli("audit", str(folder))
    assert result.code == 2
    for name in ("experiment_state-2026.json", "trial_metadata.json"):
        assert f"{name}: is a text file that can run code: Ray unpickles text" in result.out


@pytest.mark.parametrize(("name", "code"), [("model.pth", 1), ("arrays.npz", 0)])
def test_zip_whose_only_record_replaces_a_file_is_reported(tmp_path, statecli, name, code):
    """torch.hub unpacks the record into its folder before loading. A single array in an `.npz` file passes."""
    array = io.BytesIO()
    np.save(array, np.full(4, 6.0))
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("project/labels.npy", array.getvalue())
    assert statecli("audit", tmp_path / name).code == code
    (tmp_path / "hub" / "project").mkdir(parents=True)
    np.save(tmp_path / "hub" / "project" / "labels.npy", np.arange(4.0))
    with contextlib.suppress(Exception):
        torch.hub.load_state_dict_from_url((tmp_path / name).as_uri(), model_dir=str(tmp_path / "hub"))
    assert np.load(tmp_path / "hub" / "project" / "labels.npy").tolist() == [6.0] * 4


def test_text_shared_by_many_spaces_ends_the_scan_early(folder, statecli):
    """Each space unpacks the text again; the remaining spaces are reported as not scanned."""
    text = "A" * 400_000
    spaces = [{"space": "box", "low": text, "high": text} for _ in range(2_000)]
    torch.save({"w": torch.ones(1), "spaces": spaces}, folder / "a.pt")
    before = time.process_time()
    result = statecli("audit", str(folder))
    assert (result.code, "unscanned-pickle" in result.out) == (1, True)
    assert time.process_time() - before < 10
