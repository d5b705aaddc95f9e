"""`needs-weights-only-false` fires for a file exactly if `torch.load(path)` refuses the file for an imported name."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import subprocess
import sys

import numpy as np
import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity
from statecli.pickle_scan import scanner_opcodes
from statecli.pickles import safe_globals

from ..formats.attacks import Call, build, call_function, global_name, number, records, state_dict, tensor
from .test_ordinary_pickles import ORDINARY, WHOLE, build_checkpoint

RULE = "needs-weights-only-false"


def list_refusals(path):
    (target,) = audit(Request((str(path),), select=(RULE,))).targets
    return target.findings


@pytest.fixture(autouse=True)
def _reset_safe_globals():
    """Leave out the names that imports in other tests added to the list of torch.load."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    names = {f"{global_.__module__}.{global_.__qualname__}": global_ for global_ in before}
    torch.serialization.add_safe_globals([names[name] for name in safe_globals._ADDED_BY_TORCH])
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def is_refused_by_torch(path):
    """Whether torch refuses the file for a name; None if torch fails before the check of names."""
    try:
        torch.load(path)
    except pickle.UnpicklingError as error:
        return any(text in str(error) for text in ("Unsupported global", "must be imported", "Unsupported operand"))
    except AttributeError:  # torch 2.13 cannot load a complex tensor of a legacy file
        return None
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ORDINARY, *WHOLE])
def test_the_rule_agrees_with_torch_load(name, save_checkpoint):
    """The oracle is the installed torch, for the checkpoints of training libraries and scripts."""
    for writer in ({}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}):
        path = save_checkpoint(build_checkpoint(name), **writer)
        assert is_refused_by_torch(path) in (None, bool(list_refusals(path))), writer


def test_needs_weights_only_false_finds_a_namespace_and_a_numpy_scalar(tmp_path):
    """The finding names both classes, and the help has a replacement for each."""
    torch.save({"w": torch.ones(1), "args": argparse.Namespace(a=1), "loss": np.float64(1)}, tmp_path / "a.pt")
    (finding,) = list_refusals(tmp_path / "a.pt")
    assert finding.severity is Severity.WARNING
    assert "argparse.Namespace, numpy._core.multiarray.scalar" in finding.message
    assert finding.help.startswith("save plain data instead: ")
    assert all(text in finding.help for text in ("vars(namespace)", "value.item()"))


def test_needs_weights_only_false_spares_settings_of_plain_data(tmp_path):
    """The replacements in the rule's help load by default."""
    checkpoint = {"w": torch.ones(1), "args": vars(argparse.Namespace(a=1)), "loss": np.float64(1).item()}
    torch.save(checkpoint, tmp_path / "a.pt")
    assert not list_refusals(tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["args"] == {"a": 1}


#: Name -> the opcodes of a value that torch.load refuses, and a part of the message.
REFUSED_VALUES = {
    "POP": (b"N0N", "has the opcode POP"),
    "POP_MARK": (b"N(1", "has the opcode POP_MARK"),
    "DUP": (b"N2\x86", "has the opcode DUP"),
    "bytes of protocol 3": (b"B\1\0\0\0a", "has the opcode BINBYTES"),
    "text of protocol 0": (b"Va\n", "has the opcode UNICODE"),
    "a memo entry of protocol 0": (b"Np9\n", "has the opcode PUT"),
    "a memo entry of protocol 4": (b"N\x94", "has the opcode MEMOIZE"),
    "a long integer": (b"\x8b\1\0\0\0a", "has the opcode LONG4"),
    "a storage that is called": (
        call_function(global_name("torch", "FloatStorage"), number(1)),
        "calls torch.FloatStorage",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_opcodes_that_torch_save_does_not_write_are_found(name, tmp_path):
    """torch's restricted unpickler knows 33 of the 68 opcodes."""
    body, message = REFUSED_VALUES[name]
    (tmp_path / "a.pt").write_bytes(build(records(state_dict(w=tensor(), x=body))))
    with pytest.raises((pickle.UnpicklingError, TypeError), match=r"Weights only load failed|not callable"):
        torch.load(tmp_path / "a.pt")
    (finding,) = list_refusals(tmp_path / "a.pt")
    assert message in finding.message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", [b"\0", b"m", b"\xff"])
def test_bytes_that_are_not_opcodes_are_found(code, tmp_path):
    """No unpickler knows the bytes."""
    (tmp_path / "a.pt").write_bytes(build(records(state_dict(w=tensor(), x=code))))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "a.pt")
    (finding,) = list_refusals(tmp_path / "a.pt")
    assert f"has the unknown opcode 0x{code.hex()}" in finding.message


def test_known_opcodes_equal_those_of_torch(tmp_path):
    """An opcode without its arguments fails in another way than an opcode unknown to torch."""
    for opcode in pickletools.opcodes:
        (tmp_path / "a.pkl").write_bytes(b"\x80\2N" + opcode.code.encode("latin-1"))
        with open(tmp_path / "a.pkl", "rb") as file:
            try:
                torch._weights_only_unpickler.load(file)
                is_known = True
            except Exception as error:  # noqa: BLE001  # whatever an opcode without its arguments raises
                is_known = "Unsupported operand" not in str(error)
        assert is_known is (ord(opcode.code) in scanner_opcodes.TORCH_OPCODES), opcode.name


@pytest.mark.filterwarnings("ignore")
def test_a_legacy_file_of_a_later_protocol_is_one_finding(tmp_path):
    """The five pickles of the file have a single protocol."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(2)}, path, pickle_protocol=4, _use_new_zipfile_serialization=False)
    (finding,) = audit(Request((str(path),), select=("needs-weights-only-false",))).findings
    assert "is a pickle of protocol 4" in finding.message


def test_needs_weights_only_false_is_skipped_for_torchscript(tmp_path):
    """torch.load passes the archive on to torch.jit.load and refuses weights_only for every TorchScript archive."""
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "a.pt")
    assert not list_refusals(tmp_path / "a.pt")


def test_a_harmful_file_is_not_recommended_for_weights_only_false(save_checkpoint):
    """The help does not describe how to load the file."""

    (finding,) = list_refusals(save_checkpoint({"w": torch.ones(1), "x": Call(print, "x"), "y": subprocess.Popen}))
    assert finding.help.startswith("do not load the file")


def test_a_file_of_a_training_library_by_itself_is_a_note(save_checkpoint):
    """The library's own loader admits the names."""
    (finding,) = list_refusals(save_checkpoint({"numpy": np.random.get_state()}, "rng_state.pth"))
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize("name", ["optimizer_x.pth", "training_args.pt", "rng_state_.pth", "random_states_0.pkl.pt"])
def test_name_that_no_training_library_writes_keeps_the_warning(tmp_path, name):
    """A user can give any file a similar name."""
    torch.save({"numpy": np.random.get_state()}, tmp_path / name)
    (finding,) = list_refusals(tmp_path / name)
    assert finding.severity is Severity.WARNING


def test_list_equals_the_names_that_import_torch_adds():
    """The test starts a new process, because other tests import more of torch and so add names."""
    print_names = "print(*(f'{f.__module__}.{f.__qualname__}' for f in torch.serialization.get_safe_globals()))"
    code = f"import torch; {print_names}; import torch.distributed.tensor; {print_names}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names_of_torch, names_with_dtensor = (set(line.split()) for line in process.stdout.splitlines())
    assert names_of_torch == set(safe_globals._ADDED_BY_TORCH)
    assert names_with_dtensor - names_of_torch == set(safe_globals._ADDED_BY_DTENSOR)
