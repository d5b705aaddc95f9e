"""The printed lines, each form run in another process: a proved load restores every value that was saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp


def assert_proved_lines_load(document, run_lines, expected):
    """The lines are proved, run without an error, and restore the values."""
    diagnosis = document["diagnosis"]
    assert diagnosis["proved"], diagnosis["proof"]
    loaded = run_lines(diagnosis["code"])
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state},
        lambda state: {"nets": {"generator": state}, "epoch": 3, "note": "text"},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {"module": state, "optimizer": {"step": torch.tensor(1.0)}, "epoch": 3},
    ],
)
def test_a_folder_of_torch_distributed_is_loaded(desk, net, explain, run_lines, wrap):
    """With keys around the state_dict, and with a prefix."""
    state = net["Net"]().state_dict()
    dcp.save(wrap(state), checkpoint_id="saved", no_dist=True)
    assert_proved_lines_load(explain("net.py:Net", "saved"), run_lines, state)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_torch_distributed_with_inner_dicts_is_not_proved(desk, net, explain):
    """The flat names of the folder do not show where the inner dict begins."""
    state = net["Net"]().state_dict()
    dcp.save({"model": {**state, "more": {"x": torch.ones(2)}}}, checkpoint_id="saved", no_dist=True)
    assert not explain("net.py:Net", "saved")["diagnosis"]["proved"]
