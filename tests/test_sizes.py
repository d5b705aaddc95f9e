"""The size of a checkpoint is the same in every command: tensors with a shared storage count once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import statecli as api  # noqa: E402
from statecli.core import sizes  # noqa: E402

whole = torch.zeros(8, 4)
CASES = {
    "tied": ({"a": whole, "b": whole, "c": torch.zeros(3)}, 128 + 12),
    "views of one storage": ({"a": whole[:4], "b": whole[4:], "all": whole}, 128),
    "expanded": ({"a": torch.zeros(1).expand(1000)}, 4),
    "nothing shared": ({"a": torch.zeros(2), "b": torch.zeros(2)}, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_inspect_and_audit_say_the_same_size(case, statecli, in_tmp_path):
    """The bytes of an audited target equal the sum of inspect."""
    state_dict, size = CASES[case]
    torch.save(state_dict, "model.pt")
    assert sizes.sum_bytes(api.inspect("model.pt").state.tensors) == size
    assert statecli("audit", "model.pt", "-f", "json").json["targets"][0]["bytes"] == size


def test_kinds_that_share_a_storage_count_it_once_together():
    """An old spectral_norm's weight lies in its parameter until the first forward."""
    state = api.inspect(torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3))).state
    totals = sizes.sum_by_kind(state.tensors)
    assert sizes.sum_bytes(state.tensors) == totals["parameter"].bytes + totals["buffer"].bytes
