"""The place of a finding: the file of its target, the line of its tensor, or its bytes in a file of torch."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from msgspec import UNSET
from safetensors.torch import save_file

from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Origin, Place, TensorInfo
from statecli.targets import load, location


def finding(fqn="w", section=None, **facts):
    return Finding("x", Severity.ERROR, "w: x", "a.pt", fqn, section=section, **facts)


def tensor(fqn="w", **facts):
    return TensorInfo(fqn, "float32", (2,), 2, 8, **facts)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a.pt", "a.pt"),
        ("a.ckpt#model.ema", "a.ckpt"),
        ("net.py:Net", "net.py"),
        ("./d/net.py:Net(path='x:y#z')", "./d/net.py"),
        ("pkg.mod:Outer.Net(4)", "pkg/mod.py"),
        ("mod:build", "mod.py"),
        ("d/train.py::main", "d/train.py"),
        ("C:a.pt", "C:a.pt"),
        ("folder/", "folder/"),
        ("s3://bucket/a.pt", "s3://bucket/a.pt"),
    ],
)
def test_the_file_of_a_target(text, path):
    """A section, a class and its arguments are not part of the path."""
    assert location.find_file(text) == path


@given(st.text())
def test_any_text_has_a_file(text):
    """The text is never refused here, because the reader of the target refuses wrong texts."""
    assert isinstance(location.find_file(text), str)


def _check_bytes(path, tensor, state):
    (row,) = (row_ for row_ in state.tensors if row_.fqn == tensor[0])
    place = location.find_bytes(row)
    assert place is not None
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        raw = file.read(place.length)
    assert raw == tensor[1].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_bytes_at_the_place_of_a_tensor_are_its_values(tmp_path, form):
    """Bytes read from the place are the tensor; a contiguous view has its own bytes only."""
    base = torch.arange(24, dtype=torch.float32)
    state = {"a": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.int16)}
    if form == "safetensors":
        save_file(state, tmp_path / "m")
    else:
        state["view"] = base[6:12].view(2, 3)
        torch.save({**state, "base": base}, tmp_path / "m", _use_new_zipfile_serialization=form == "zip")
    read = load.read_checkpoint(str(tmp_path / "m"))
    for entry in state.items():
        _check_bytes(tmp_path / "m", entry, read)


def test_view_without_contiguous_bytes_has_the_place_of_its_storage(tmp_path):
    """A column of a matrix has no bytes of its own in a row."""
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    torch.save({"column": base[:, 1]}, tmp_path / "m.pt")
    (row,) = load.read_checkpoint(str(tmp_path / "m.pt")).tensors
    assert location.find_bytes(row).length == 48


def test_a_tensor_in_no_file_has_no_bytes():
    """A tensor on meta, of a class, or a sparse tensor has no bytes in a file."""
    assert location.find_bytes(tensor()) is None


def test_finding_has_the_line_of_its_tensor():
    """The line is where a class assigned the tensor."""
    (place,) = location.add_places([finding()], [tensor(origin=Origin("net.py", 9))])
    assert place.origin == Origin("net.py", 9)
    assert place.place is UNSET


def test_finding_with_a_place_keeps_its_place():
    """The rule knows better."""
    own = finding(place=Place("a.pt", 1, 2))
    assert location.add_places([own], [tensor(origin=Origin("net.py", 9))]) == (own,)


def test_finding_has_the_line_of_the_tensor_in_its_section():
    """Two sections may have tensors of the same name; a finding without a section belongs to the first section."""
    rows = [tensor(section="model", origin=Origin("a.py", 1)), tensor(section="ema", origin=Origin("b.py", 2))]
    places = location.add_places([finding(section="ema"), finding(section="model"), finding()], rows)
    assert [place.origin.file for place in places] == ["b.py", "a.py", "a.py"]


def test_finding_without_a_tensor_has_no_line():
    """A finding without a tensor has no line, also if a tensor has an empty name."""
    (place,) = location.add_places([finding(fqn=None)], [tensor(fqn="", origin=Origin("net.py", 9))])
    assert (place.origin, place.place) == (UNSET, UNSET)


def test_fingerprints_are_counted():
    """Equal fingerprints are numbered."""
    counted = location.number_fingerprints([finding(), finding("v"), finding()])
    assert [(first.fqn, which) for first, _, which in counted] == [("w", 1), ("v", 1), ("w", 2)]


@pytest.mark.parametrize("typed", ["ck/a.pt", "./ck//a.pt", "ck/../ck/a.pt", "{}/ck/a.pt"])
@pytest.mark.parametrize("rest", ["", "#model"])
def test_name_of_a_target_does_not_depend_on_spelling_or_folder(tmp_path, monkeypatch, typed, rest):
    """The name is the path from the folder of the file that names the target."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "a.pt").touch()
    monkeypatch.chdir(tmp_path)
    text = typed.format(tmp_path) + rest
    assert location.make_relative_name(text) == f"ck/a.pt{rest}"
    assert location.make_relative_name(text, "ck") == f"a.pt{rest}"
    monkeypatch.chdir("ck")
    assert location.make_relative_name(f"a.pt{rest}", "..") == f"ck/a.pt{rest}"
    assert location.make_relative_name(f"../ck/a.pt{rest}", str(tmp_path)) == f"ck/a.pt{rest}"


def test_name_keeps_links_and_the_arguments_of_a_class(tmp_path, monkeypatch):
    """`latest` is a name of its own; a dotted module name is not changed."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "a.pt").touch()
    (tmp_path / "latest").symlink_to("step-1")
    (tmp_path / "net.py").touch()
    monkeypatch.chdir(tmp_path)
    assert location.make_relative_name("latest/a.pt") == "latest/a.pt"
    assert location.make_relative_name("./net.py:Net(path='./x#y')", str(tmp_path)) == "net.py:Net(path='./x#y')"
    assert location.make_relative_name("pkg.mod:Net", "step-1") == "pkg.mod:Net"
    assert location.make_relative_name("none.pt", "step-1") == "../none.pt"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a.pt", "ckpts/a.pt"),
        ("./a.pt", "ckpts/a.pt"),
        ("../ckpts/a.pt", "ckpts/a.pt"),
        ("../other/a.pt", "other/a.pt"),
        ("../../a.pt", "../a.pt"),
        (".", "ckpts"),
        ("..", "."),
        ("a.pt#model", "ckpts/a.pt#model"),
        ("gone.pt", "ckpts/gone.pt"),
        ("./net.py:Net(path='x/../y.py:z')", "ckpts/net.py:Net(path='x/../y.py:z')"),
        ("pkg.mod:Net(4)", "pkg.mod:Net(4)"),
    ],
)
def test_name_is_the_path_from_the_file_that_contains_the_name(tmp_path, monkeypatch, text, name):
    """The name is the same from any folder, and resolves to the target. A class is named by its file, or by dots."""
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / "a.pt").touch()
    monkeypatch.chdir(tmp_path / "ckpts")
    assert location.make_relative_name(text, "..") == name
    assert location.make_relative_name(text, str(tmp_path)) == name
    assert location.make_relative_name(location.resolve_name(name, ".."), "..") == name


def test_an_absolute_path_has_the_same_name(tmp_path, monkeypatch):
    """The name is the same if the folder is reached by a link, as `/tmp` is on some systems."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.pt").touch()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    for folder in ("real", "link"):
        assert location.make_relative_name(str(tmp_path / folder / "a.pt")) == "a.pt"
        assert location.make_relative_name("a.pt", str(tmp_path / folder)) == "a.pt"


@given(st.text(), st.sampled_from([".", "..", "/", "no/such"]))
def test_any_text_has_a_name(text, folder):
    """A baseline may contain any text; a resolved name gets the same name again."""
    name = location.make_relative_name(text, folder)
    assert location.make_relative_name(location.resolve_name(name, folder), folder) == name


def test_fingerprint_does_not_depend_on_the_current_folder(tmp_path, monkeypatch):
    """Within one repository the fingerprint is the same; files of the same name in two folders differ."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "ckpts").mkdir()
    prints = []
    for folder, text in ((".", "ckpts/a.pt"), (".", "./ckpts/a.pt"), ("ckpts", "a.pt"), (".", "a.pt")):
        monkeypatch.chdir(tmp_path / folder)
        prints.append(location.compute_fingerprint(Finding("x", Severity.ERROR, "w: x", text, "w")))
    assert len(set(prints[:3])) == 1
    assert prints[3] != prints[0]
