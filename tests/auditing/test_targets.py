"""Folders and globs: each checkpoint once, in natural order, and all else skipped with its reason."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from statecli.auditing.result import Status
from statecli.auditing.targets import expand


def found(*texts):
    """The targets' paths, and what was skipped or failed."""
    every = list(expand([str(text) for text in texts]))
    return [one for one in every if isinstance(one, str)], [one for one in every if not isinstance(one, str)]


def test_steps_come_in_natural_order(tmp_path):
    """`step-2` before `step-10`."""
    for number in (10, 2, 1):
        torch.save({"w": torch.zeros(1)}, tmp_path / f"step-{number}.pt")
    paths, _ = found(tmp_path)
    assert [path.rpartition("/")[2] for path in paths] == ["step-1.pt", "step-2.pt", "step-10.pt"]


def test_a_model_folder_is_one_target_and_what_lies_beside_it_others(tmp_path):
    """Shards belong to their index; the optimizer, a pickle, is audited by itself."""
    weights = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}
    for name, shard in weights.items():
        save_file({name: torch.zeros(1)}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / "config.json").write_text("{}")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    paths, others = found(tmp_path)
    assert paths == [str(tmp_path), str(tmp_path / "optimizer.pt")]
    assert [(one.status, one.target.rpartition("/")[2]) for one in others] == [(Status.SKIPPED, "config.json")]
    assert "JSON" in others[0].reason


def test_a_checkpoint_is_told_by_its_content_too(tmp_path):
    """Whatever it is called; a text file is skipped, one that is called a checkpoint is not."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.pt").write_text("hello")
    paths, others = found(tmp_path)
    assert [path.rpartition("/")[2] for path in paths] == ["broken.pt", "weights"]
    assert [one.target.rpartition("/")[2] for one in others] == ["notes.txt"]


def test_each_target_comes_once(tmp_path):
    """Named by itself, by a glob and by its folder."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
    paths, _ = found(tmp_path / "a.pt", tmp_path / "*.pt", tmp_path)
    assert len(paths) == 1


def test_a_glob_that_matches_nothing_has_failed(tmp_path):
    """It is no empty success."""
    paths, (one,) = found(tmp_path / "*.pt")
    assert (paths, one.status) == ([], Status.FAILED)
    assert "matches no file" in one.reason


def test_hidden_folders_and_links_to_folders_are_skipped_with_their_reason(tmp_path):
    """Nothing is left out unsaid, and no link is followed in a circle."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    paths, others = found(tmp_path)
    assert not paths
    assert {one.target.rpartition("/")[2]: one.status for one in others} == dict.fromkeys(
        [".git", "loop"], Status.SKIPPED
    )


def test_a_class_is_no_path():
    """Brackets in its arguments are no glob."""
    assert found("net.py:Net(sizes=[1, 2])") == (["net.py:Net(sizes=[1, 2])"], [])
