"""Records whose names differ only in case: torch reads the last record, numpy distinguishes the records."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from statecli.commands.audit.run import Request, audit


def list_rules(path):
    """Names of the rules that report a finding for the file."""
    return {finding.rule for target in audit(Request((str(path),))).targets for finding in target.findings}


def add_upper_case_record(data, suffix):
    """The archive with an additional record whose name differs only in case."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith(suffix))
        folder, _, last = name.rpartition("/")
        archive.writestr(f"{folder}/{last.upper()}", archive.read(name))
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["torch.save", "TorchScript"])
def test_a_second_record_in_another_case_is_reported(name, tmp_path):
    """torch looks names up without regard to case, so statecli shows another record than torch reads."""
    buffer = io.BytesIO()
    if name == "TorchScript":
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    else:
        torch.save({"w": torch.ones(2)}, buffer)
    (tmp_path / "m.pt").write_bytes(add_upper_case_record(buffer.getvalue(), "/data.pkl"))
    assert "unused-bytes" in list_rules(tmp_path / "m.pt")


def test_arrays_named_in_both_cases_are_ordinary(tmp_path):
    """numpy reads both arrays."""
    np.savez(tmp_path / "m.npz", w=np.ones(2, np.float32), W=np.zeros(3, np.float32))
    assert "unused-bytes" not in list_rules(tmp_path / "m.npz")
