"""A tensor that contradicts its file is named, all other tensors are shown, and the command exits with status 2."""

from __future__ import annotations

import zipfile

import pytest
import torch
from torch import nn

from .attacks import build, build_pickle, records, tensor, text

DAMAGE_MESSAGE = "a: storage 0 has 100 bytes in the file, but the pickle claims 400; copy or download the file again"


@pytest.fixture
def sound_file(tmp_path):
    path = str(tmp_path / "sound.pt")
    torch.save({"a": torch.ones(100), "b": torch.zeros(3), "c": torch.ones(2)}, path)
    return path


@pytest.fixture
def damaged_file(tmp_path, sound_file):
    """A copy of the sound file with 100 bytes in place of the 400 bytes of `a`."""
    return truncate_storage(sound_file, str(tmp_path / "damaged.pt"))


def truncate_storage(sound_file, path):
    with zipfile.ZipFile(sound_file) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info.filename, content[:100] if info.filename.endswith("data/0") else content)
    return path


@pytest.mark.parametrize("options", [(), ("--stats",), ("--to", "cpu"), ("--to", "meta"), ("-i", "a")])
def test_damaged_tensor_is_named_in_one_line(statecli, damaged_file, options):
    """stderr has one line with the file, the tensor and both numbers; the note of the tensor says the same."""
    result = statecli("inspect", damaged_file, *options)
    assert (result.code, result.err) == (2, f"statecli: {damaged_file}: {DAMAGE_MESSAGE}\n")
    rows = statecli("inspect", damaged_file, *options, "-f", "json").rows()
    assert rows["a"]["note"].startswith(f"cannot be read: {DAMAGE_MESSAGE.removeprefix('a: ')}")
    assert (rows["a"]["dtype"], rows["a"]["shape"]) == ("unknown", None)
    assert list(rows) == (["a"] if "-i" in options else ["a", "b", "c"])


def test_storage_without_a_tensor_is_checked(statecli, tmp_path):
    """torch.load reads the storage and refuses the file."""
    dropped_tensor = tensor("1", numel=2_000_000, size=(2_000_000,)) + b"0"
    pickle = build_pickle(dropped_tensor + b"}" + text("w") + tensor() + b"s")
    path = tmp_path / "a.pt"
    path.write_bytes(build(records(pickle, {"0": bytes(16), "1": bytes(4)})))
    message = "data.pkl: storage 1 has 4 bytes in the file, but the pickle claims 8000000"
    result = statecli("audit", str(path))
    assert result.code == 2
    assert message in result.err
    with pytest.raises(RuntimeError, match="does not match"):
        torch.load(path, weights_only=False)


@pytest.mark.parametrize("options", [(), ("--metadata-only",), ("--ignore", "values"), ("--must-not-change", "b")])
@pytest.mark.parametrize("is_swapped", [False, True], ids=["after", "before"])
def test_diff_compares_the_other_tensors(statecli, tmp_path, sound_file, damaged_file, is_swapped, options):
    """Changes of the other tensors are shown; the damaged pair is reported as broken and is not a change."""
    other_path = str(tmp_path / "other.pt")
    torch.save({"a": torch.ones(100), "b": torch.zeros(4), "c": torch.ones(2)}, other_path)
    for compared_file, actual in ((sound_file, []), (other_path, ["b"])):
        result = statecli(
            "diff",
            *((damaged_file, compared_file) if is_swapped else (compared_file, damaged_file)),
            *options,
            "-f",
            "json",
        )
        assert (result.code, result.err) == (2, f"statecli: {damaged_file}: {DAMAGE_MESSAGE}\n")
        assert [change["fqn"] for change in result.json["changes"]] == actual
        assert [finding["message"] for finding in result.json["broken"]] == [f"{damaged_file}: {DAMAGE_MESSAGE}"]


def test_excluding_the_damaged_tensor_gives_status_0(statecli, sound_file, damaged_file):
    """`-x a` excludes the damaged tensor, so that no error is reported; a diff compares only the other two tensors."""
    result = statecli("inspect", damaged_file, "-x", "a")
    assert (result.code, result.err) == (0, "")
    result = statecli("diff", sound_file, damaged_file, "-x", "a")
    assert (result.code, result.out.splitlines()[-1]) == (0, "identical: 2 tensors, 20 B: exit status 0")


def test_damage_of_an_added_tensor_is_reported(statecli, tmp_path, damaged_file):
    """Damage of an added tensor is reported too."""
    other_path = str(tmp_path / "other.pt")
    torch.save({"b": torch.zeros(3), "c": torch.ones(2)}, other_path)
    result = statecli("diff", other_path, damaged_file)
    assert (result.code, result.err) == (2, f"statecli: {damaged_file}: {DAMAGE_MESSAGE}\n")


def test_comparison_with_a_class_exits_with_2(statecli, tmp_path, sound_file):
    """Whether the checkpoint fits the class is unknown, because torch.load already fails on the file."""
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef Net():\n    return nn.Linear(10, 10)\n")
    torch.save(nn.Linear(10, 10).state_dict(), sound_file)
    damaged = truncate_storage(sound_file, str(tmp_path / "damaged.pt"))
    message = f"statecli: {damaged}: weight: {DAMAGE_MESSAGE.removeprefix('a: ')}\n"
    result = statecli("diff", f"{tmp_path / 'net.py'}:Net", damaged)
    assert result.code == 2
    assert message in result.err
    result = statecli("inspect", damaged, "--model", f"{tmp_path / 'net.py'}:Net")
    assert (result.code, result.err) == (2, message)


def test_damaged_optimizer_moment_is_reported(statecli, tmp_path):
    """A damaged moment is reported; the optimizer is matched with its model by the tensors that can be read."""
    net = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    net(torch.ones(10)).sum().backward()
    optimizer.step()
    path = str(tmp_path / "whole.pt")
    torch.save({"optimizer": optimizer.state_dict(), "model": net.state_dict()}, path)
    damaged = truncate_storage(path, str(tmp_path / "damaged.pt"))
    result = statecli("inspect", damaged)
    assert result.code == 2
    assert result.err.startswith(f"statecli: {damaged}: state[0]['momentum_buffer']: storage 0 has ")


def test_tensors_of_one_damaged_storage_share_a_line(statecli, tmp_path):
    """A cause is reported once, with the first affected tensor and the number of further tensors."""
    sound_file = str(tmp_path / "sound.pt")
    torch.save(dict.fromkeys([f"w{n}" for n in range(30)], torch.ones(100)), sound_file)
    damaged = truncate_storage(sound_file, str(tmp_path / "damaged.pt"))
    result = statecli("inspect", damaged)
    message = "storage 0 has 100 bytes in the file, but the pickle claims 400; copy or download the file again"
    assert (result.code, result.err) == (2, f"statecli: {damaged}: w0 and 29 more tensors: {message}\n")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_huge_integer_setting_is_compared(statecli, tmp_path, legacy):
    """A setting of 20,000 bits is compared like every setting; the tensors of the file are read."""
    paths = [str(tmp_path / f"{n}.pt") for n in range(3)]
    for n, path in enumerate(paths):
        checkpoint = {"w": torch.ones(2), "key": 2**20_000 + (n == 2), "minus": -(2**9_000)}
        torch.save(checkpoint, path, _use_new_zipfile_serialization=not legacy)
    assert statecli("diff", *paths[:2]).code == 0
    changed = statecli("diff", *paths[1:], "-f", "json")
    assert (changed.code, [change["key"] for change in changed.json["metadata"]]) == (1, ["key"])
    assert list(statecli("inspect", paths[0], "-f", "json").rows()) == ["w"]
