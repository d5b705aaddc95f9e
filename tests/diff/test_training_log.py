"""The log of a Trainer is compared entry by entry, because two hashes explain no difference."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file


def build_entries(count: int, start: float = 2.0) -> list[dict[str, float]]:
    """Return log entries as the Trainer writes them: an evaluation has no `loss`."""
    log = [{"loss": round(start - 0.02 * n, 4), "step": 10 * n} for n in range(1, count + 1)]
    return [*log, {"eval_loss": 9.0, "step": 10 * count}] if count else []


@pytest.fixture
def write_log(tmp_path):
    def write(name: str, log: object) -> str:
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "x"}')
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        return str(folder)

    return write


@pytest.mark.parametrize(
    ("before", "after", "detail"),
    [
        (build_entries(10)[:-1], build_entries(20)[:-1], "+10 entries, the first 10 unchanged; loss 1.8 → 1.6"),
        (build_entries(10), build_entries(10)[:4], "-7 entries, the first 4 unchanged; loss 1.8 → 1.92"),
        (build_entries(3)[:1], build_entries(3)[:2], "+1 entry, the only common entry is unchanged; loss 1.98 → 1.96"),
        (
            build_entries(3),
            [*build_entries(3)[:2], {"loss": 7}],
            "-1 entry, the first difference is in entry 3; loss 1.94 → 7",
        ),
        (
            build_entries(3),
            [*build_entries(3)[:-1], {"step": 1}],
            "the first difference is in entry 4; loss 1.94 → 1.94",
        ),
        ([{"a": 1}], [{"a": 1}, {"loss": "x"}], "+1 entry, the only common entry is unchanged"),
        (build_entries(2), [], None),
        (build_entries(2), {"not": "a list"}, None),
    ],
)
def test_change_of_the_log_is_described(write_log, statecli, before, after, detail):
    result = statecli("diff", write_log("a", before), write_log("b", after), "-f", "json")
    changes = {change["key"]: change for change in json.loads(result.out)["metadata"]}
    change = changes.get("trainer_state.log_history", {"detail": None})
    assert change["detail"] == detail
    assert result.code == 1
