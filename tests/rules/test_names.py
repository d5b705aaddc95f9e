"""Names that lose something on the way."""

from __future__ import annotations

import torch


def test_case_collision_finds_two_names_that_a_folding_file_system_takes_for_one(found, tmp_path):
    """The second is named, with the first."""
    torch.save({"head.Weight": torch.zeros(2), "head.weight": torch.ones(2)}, tmp_path / "a.pt")
    (finding,) = found("case-collision", tmp_path / "a.pt")
    assert finding.fqn == "head.weight"
    assert "head.Weight" in finding.message


def test_case_collision_spares_names_of_two_sections(found, tmp_path):
    """Each section is a state_dict of its own."""
    torch.save({"model": {"W": torch.zeros(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    assert not found("case-collision", tmp_path / "a.pt")
