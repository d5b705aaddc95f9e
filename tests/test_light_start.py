"""The cost of a start: torch, numpy and rich are imported only when used."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from statecli.values import compiled_kernel

HEAVY = ("torch", "numpy", "rich", "safetensors", "transformers", "pickle", "jinja2")

CHILD = """
import json, sys
before = set(sys.modules)
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        from statecli.__main__ import main
        main()
    except SystemExit as done:
        heavy = sorted((set(sys.modules) - before) & set({heavy!r}))
        print(json.dumps([done.code, heavy]), file=sys.stderr)
"""


def list_imports_of_commands(lines, heavy=HEAVY):
    """Return (exit code, imported heavy modules) after each of the command lines, in one process."""
    words = json.dumps([[*map(str, line)] for line in lines])
    command = [sys.executable, "-c", CHILD.format(heavy=heavy), words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in result.stderr.splitlines() if line.startswith("[")]


def import_status(*args, heavy=HEAVY):
    """Return (exit code, heavy modules imported by the command line)."""
    (result,) = list_imports_of_commands([args], heavy)
    return result


@pytest.fixture
def files(tmp_path):
    state = {"fc.weight": torch.ones(2, 3)}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    return tmp_path


#: Each format in one output and each output of one format: readers and outputs do not depend on each other.
LISTINGS = [(name, "json") for name in ("a.safetensors", "a.pt", "legacy.pt", "whole.pt")] + [
    ("a.pt", output) for output in ("plain", "csv", "markdown", "jsonl", "sarif", "junit", "github", "gitlab")
]


def test_listing_a_checkpoint_imports_nothing_heavy(files):
    """No torch, no numpy, no rich, and none of the libraries whose formats are read."""
    lines = [("inspect", files / name, "-f", output) for name, output in LISTINGS]
    assert dict(zip(LISTINGS, list_imports_of_commands(lines), strict=True)) == dict.fromkeys(LISTINGS, (0, []))


def test_a_listing_imports_the_reader_and_the_renderer_that_it_uses(files):
    """No module of another format or output, or that builds models or walks folders, and none that msgspec can spare.

    The modules that msgspec does not use take a seventh of the time of a listing.
    """
    readers = [f"statecli.formats.{name}" for name in ("safetensors", "torch_zip", "torch_legacy", "gguf", "deepspeed")]
    renderers = [f"statecli.render.{name}" for name in ("json", "csv", "html", "table", "sarif")]
    others = ["statecli.pickles.machine", "statecli.live.build", "statecli.live.hf_auto", "statecli.targets.expand"]
    heavy = (*readers, *renderers, *others, "textwrap", "platform", "typing_extensions", "tomllib")
    code, modules = import_status("inspect", files / "a.safetensors", "-f", "json", heavy=heavy)
    assert (code, modules) == (0, ["statecli.formats.safetensors", "statecli.render.json"])


def test_stats_import_numpy_and_not_torch(files):
    """Values of a checkpoint need numpy alone."""
    assert import_status("inspect", files / "a.pt", "--stats", "-f", "json", heavy=("torch", "numpy")) == (0, ["numpy"])


def test_small_files_are_locked_and_found_equal_without_numpy(files):
    """The bytes of small files are hashed and compared without conversion."""
    path = files / "a.safetensors"
    lines = [("lock", path, "-o", files / "a.lock"), ("diff", path, path)]
    assert list_imports_of_commands(lines, ("torch", "numpy")) == [(0, []), (0, [])]


@pytest.mark.skipif(compiled_kernel.native is None, reason="no compiled kernel")
def test_two_epochs_of_a_small_model_are_compared_without_numpy(tmp_path):
    """The search for transformations is not imported either: the differences exclude transformations."""
    torch.manual_seed(0)
    before = {"fc.weight": torch.randn(100, 700), "fc.bias": torch.zeros(100), "steps": torch.tensor(5)}
    after = {name: tensor + 1 for name, tensor in before.items()}
    after["fc.weight"] = before["fc.weight"] + 0.01 * torch.randn(100, 700)
    for name, state in (("a", before), ("b", after)):
        torch.save(state, tmp_path / f"{name}.pt")
        save_file(state, tmp_path / f"{name}.safetensors")
    lines = [
        ("diff", *(tmp_path / f"{name}.{suffix}" for name in "ab"), "-f", "json") for suffix in ("safetensors", "pt")
    ]
    heavy = ("torch", "numpy", "statecli.commands.diff.transformations.find")
    assert list_imports_of_commands(lines, heavy) == [(1, []), (1, [])]


def test_a_wrong_input_is_refused_without_torch(files):
    """The import of torch takes seconds."""
    (files / "net.py").write_text("import torch\nclass Net(torch.nn.Module): pass\n")
    lines = [(command, f"{files}/net.py:Net", "--input", "2,16") for command in ("inspect", "verify", "fix")]
    assert list_imports_of_commands(lines, ("torch",)) == [(2, [])] * 3


def test_an_audit_without_plugins_imports_nothing_for_plugins(files):
    """Modules that import a plugin or find installed packages are not imported."""
    heavy = ("statecli.commands.audit.import_plugin", "statecli.commands.audit.plugin_trust", "importlib.metadata")
    assert import_status("audit", files / "a.safetensors", "--no-config", "-f", "json", heavy=heavy) == (0, [])


def test_the_version_imports_nothing_of_the_commands():
    """No msgspec either."""
    heavy = (*HEAVY, "msgspec", "statecli.cli.command_runner", "statecli.requests.options")
    assert list_imports_of_commands([("--version",), ("-V",), ("version",)], heavy) == [(0, [])] * 3


def test_modules_that_msgspec_gets_later_do_the_same():
    """With the stand-ins, each function and each error of msgspec is the same as without them."""
    code = """
import sys
if {lean}:
    from statecli.cli.import_msgspec import import_msgspec
    import_msgspec()
import msgspec, platform, uuid
class A(msgspec.Struct):
    a: int
print(msgspec.json.schema(A), msgspec.inspect.type_info(A), msgspec.json.schema_components([A]))
print(platform.system(), platform.machine(), msgspec.json.encode(uuid.UUID(int=1)))
print(hasattr(msgspec.yaml, "nothing"), hasattr(msgspec.yaml, "encode"), msgspec.toml.decode(b"a = 1"))
import datetime
class B(msgspec.Struct):
    at: datetime.datetime
    day: datetime.date
one = msgspec.json.decode(b'{"at": "2026-01-02T03:04:05+01:00", "day": "2026-01-02"}', type=B)
print(one, msgspec.json.encode(one), one.at.utcoffset() / datetime.timedelta(minutes=1), one.at.tzinfo)
print(datetime.datetime.strptime("5", "%d").day, datetime.MAXYEAR, type(one.at) is datetime.datetime)
print(datetime.sys is sys, type(one.at) is __import__("datetime").datetime, uuid.uuid4().version)
import msgspec.inspect, typing_extensions
print(msgspec.inspect.type_info, sys.modules["msgspec.inspect"].__file__)
"""
    lean, plain = (
        subprocess.run([sys.executable, "-c", code.replace("{lean}", lean)], capture_output=True, text=True)
        for lean in ("True", "False")
    )
    assert (plain.returncode, plain.stderr, lean.stderr) == (0, "", "")
    assert re.sub("0x[0-9a-f]+", "", lean.stdout) == re.sub("0x[0-9a-f]+", "", plain.stdout)


def test_a_command_leaves_no_file_open(files):
    """Python's development mode has no warning, though nothing is collected at the exit."""
    path = str(files / "a.safetensors")
    for words in (["inspect", path], ["diff", path, path], ["audit", path, "--no-config"], ["rules"], ["--help"]):
        command = [sys.executable, "-X", "dev", "-m", "statecli", *words]
        process = subprocess.run(command, capture_output=True, text=True, cwd=files)
        assert (process.returncode, process.stderr) == (0, "")


ROOMS = """
import json, os, sys
import statecli
package = os.path.dirname(statecli.__file__) + os.sep
files = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(package) and frame.f_code.co_name != "<module>":
        files.add(frame.f_code.co_filename.removeprefix(package))
from statecli.__main__ import command
sys.argv[:] = ["statecli", *sys.argv[1:]]
sys.setprofile(note)
try:
    command()
except SystemExit as done:
    sys.setprofile(None)
    print(json.dumps([done.code, sorted(files)]), file=sys.stderr)
"""


def test_inspect_of_a_file_loads_at_most_twelve_packages(files):
    """A room is a package, the package of a command, or a single module; a reader of this call reads each room."""
    command = [sys.executable, "-c", ROOMS, "inspect", str(files / "a.safetensors")]
    code, entered = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
    rooms = {file.rpartition("/")[0] if file.startswith("commands/") else file.split("/")[0] for file in entered}
    assert code == 0
    assert {"cli", "requests", "commands/inspect", "formats", "report", "render"} <= rooms
    assert len(rooms) <= 12, sorted(rooms)
