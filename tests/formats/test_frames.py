"""Frames of protocol 4 that no pickler writes: the opcodes that CPython's C unpickler reads, and the scan's report."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from statecli.commands.audit.run import Request, audit
from statecli.core.errors import MalformedError
from statecli.core.finding import Severity
from statecli.file_scan import scan
from statecli.pickle_scan.one_pickle import MAX_PICKLE_BYTES
from statecli.pickles.machine import read_pickle
from statecli.targets.target_result import TargetStatus

from ..forked_python import run_python
from .attacks import PROTO, STOP, build, call_function, global_name, number, records, state_dict, tensor, text
from .test_fuzz import parse_or_error, record

#: Runs a command that creates a file, and leaves a value on the stack.
PAYLOAD = call_function(global_name("os", "system"), text("touch PWNED"))
#: DUP and POP: a string with this beginning is not read as a pickle.
NO_PICKLE = b"20"
PROTO_4 = b"\x80\x04"
#: Frames of at least this size are read from a buffered file without a look ahead.
PREFETCH = 131_072


def frame(length: int) -> bytes:
    """Return the opcode FRAME with this length."""
    return b"\x95" + struct.pack("<Q", length)


def hide_in_string(payload: bytes) -> bytes:
    """Return a string whose length crosses the frame's end: empty for C, and over the payload for other unpicklers."""
    return frame(2) + b"B" + bytes([len(payload) + 2]) + bytes(4) + payload + b"00"


def hide_after_number(payload: bytes) -> bytes:
    """Return a number that crosses the frame's end: its last bytes for C begin a string for other unpicklers."""
    return frame(3) + b"G\0\0" + bytes(6) + b"C" + bytes([len(NO_PICKLE + payload)]) + NO_PICKLE + payload + b"00"


def hide_in_nested_frame(payload: bytes) -> bytes:
    """Return a frame that reaches over the end of the frame around: C drops the beginning of a string."""
    payload = NO_PICKLE + payload
    return b"N" + frame(9 + 2) + frame(len(payload)) + b"C" + bytes([len(payload)]) + payload + b"00"


HIDING_FUNCTIONS = (hide_in_string, hide_after_number, hide_in_nested_frame)


def write_zip(folder: Path, hide: Callable[[bytes], bytes]) -> None:
    """Write an archive whose data.pkl hides the payload before an ordinary state_dict."""
    body = state_dict(w=tensor()).removeprefix(PROTO)
    (folder / "model.pt").write_bytes(build(records(PROTO_4 + hide(PAYLOAD) + body)))


def write_legacy(folder: Path, overlong: int) -> None:
    """Write a stream whose pickle number `overlong` has a frame that reaches over its STOP, into the only storage.

    Another pickle at the frame's end runs the payload first, and the pickles that follow come after this pickle.
    """
    count = 40_000
    of_stream = tensor(numel=count, size=(count,)).replace(b"tQ", b"NtQ")
    bodies = [
        *(number(0x1950A86A20F9469CFC6C), number(1001), b"}" + text("little_endian") + b"\x88s"),
        *(b"}" + text("w") + of_stream + b"s", b"]" + text("0") + b"a"),
    ]
    numel, filler = struct.pack("<q", count), bytes(PREFETCH)
    following = b"".join(map(frame_pickle, bodies[overlong + 1 :]))
    first = bodies[overlong] + STOP + following + numel + filler
    skipped = b"".join(map(frame_pickle, bodies[:overlong])) + PROTO_4 + frame(len(first)) + first
    harmful_bodies = [PAYLOAD + b"0" + bodies[overlong + 1], *bodies[overlong + 2 :]]
    storage = (
        filler
        + b"".join(map(frame_pickle, harmful_bodies[:-1]))
        + frame_pickle(harmful_bodies[-1] if overlong == 3 else b"]")
    )
    (folder / "model.pt").write_bytes(skipped + storage[len(filler) :].ljust(4 * count - len(filler), b"\0"))


def frame_pickle(body: bytes) -> bytes:
    """Return a pickle of protocol 4 in a single frame."""
    return PROTO_4 + frame(len(body) + 1) + body + STOP


#: Name of a file -> function that writes the file into a folder as `model.pt`.
LOAD = "torch.load('model.pt', weights_only=False)"
FILES = {
    **{f"data.pkl: {hide.__name__}": partial(write_zip, hide=hide) for hide in HIDING_FUNCTIONS},
    **{f"legacy: pickle {n}": partial(write_legacy, overlong=n) for n in range(4)},
}


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory) -> Path:
    """Folder with a subfolder for each of the files."""
    root = tmp_path_factory.mktemp("hostile")
    for number_, write in enumerate(FILES.values()):
        (root / str(number_)).mkdir()
        write(root / str(number_))
    return root


def find_folder(name: str, root: Path) -> Path:
    return root / str([*FILES].index(name))


@pytest.fixture(scope="module")
def executed_files(hostile_folder) -> set[str]:
    """Names of the files that ran their payload when torch loaded them."""
    program = "import contextlib, os, torch\n" + "\n".join(
        f"os.chdir({str(find_folder(name, hostile_folder))!r})\nwith contextlib.suppress(Exception): {LOAD}"
        for name in FILES
    )
    run_python(["-W", "ignore", "-c", program], check=True, timeout=120)
    return {name for name in FILES if (find_folder(name, hostile_folder) / "PWNED").exists()}


def test_torch_runs_payloads_hidden_by_frames(executed_files):
    """Each of the files runs its payload until CPython refuses frames of this kind."""
    assert executed_files == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_frame_that_no_pickler_writes_is_not_clean(name, hostile_folder):
    """`unscanned-pickle` reports the frame."""
    targets = audit(Request((str(find_folder(name, hostile_folder) / "model.pt"),))).targets
    errors = [finding for target in targets for finding in target.findings if finding.severity is Severity.ERROR]
    assert "unscanned-pickle" in {error.rule for error in errors}


@pytest.mark.parametrize("place", ["bytes", "text"])
def test_a_frame_that_hides_a_payload_is_found_in_a_string_of_a_pickle(place, tmp_path):
    """The string is read as a pickle; without the hidden frame the pickle would import nothing."""
    hidden = PROTO_4 + hide_in_nested_frame(PAYLOAD) + b"N."
    value = b"B" + struct.pack("<I", len(hidden)) + hidden if place == "bytes" else text(hidden.decode("latin-1"))
    (tmp_path / "model.pt").write_bytes(build(records(state_dict(w=tensor(), x=value))))
    (target,) = audit(Request((str(tmp_path / "model.pt"),))).targets
    assert "unscanned-pickle" in {finding.rule for finding in target.findings}


CROSSING_FRAMES = {
    "an instruction runs past the end of its block": frame(2) + b"J" + bytes(4),
    "begins inside the block": frame(20) + frame(1) + bytes(20),
    "the pickle ends before the end of its block": frame(3) + b"N.0",
    "runs past the end of the pickle": frame(3) + b"N.",
}


@pytest.mark.parametrize("name", CROSSING_FRAMES)
def test_a_frame_that_no_pickler_writes_is_refused_in_one_line(name):
    """Unpicklers read different opcodes from the bytes, so that statecli shows neither reading."""
    with pytest.raises(MalformedError, match=name):
        read_pickle(PROTO_4 + CROSSING_FRAMES[name])


def test_a_length_that_crosses_the_end_of_a_frame_is_not_read(tmp_path):
    """Read to its end, the string would be longer than the file; C reads another length."""
    data = PROTO_4 + frame(2) + b"X\xff" + struct.pack("<I", 0) + global_name("os", "system") + b"."
    (tmp_path / "a.pkl").write_bytes(data)
    (scanned,) = scan.scan_pickles(str(tmp_path / "a.pkl"))
    assert "is truncated" in scanned.unread


VALUES = {
    "many small": {f"layer.{n}": [n, float(n), (n, str(n))] for n in range(2500)},
    "large strings": [b"b" * 100_000, "t" * 100_000, "é" * 70_000, b"c" * 65_536, b"d" * 65_535, "short"] * 2,
    "a large string in a dict": {"a": {"b": b"b" * 300_000}, "c": OrderedDict(d=1), "e": bytearray(200_000)},
    "a small value": None,
    "array": np.arange(50_000),
    "names": [OrderedDict, complex(1, 2), frozenset([1]), {2}],
}


@pytest.mark.parametrize("name", VALUES)
def test_frames_that_picklers_write_are_read(name):
    """Frames of 64 KiB, large strings outside of frames, and consecutive pickles are all read to their end."""
    for pickler, protocol in product((pickle.Pickler, pickle._Pickler), (4, 5)):
        file = io.BytesIO()
        writer = pickler(file, protocol)
        writer.dump(VALUES[name])
        end = file.tell()
        writer.clear_memo()
        writer.dump(VALUES[name])
        assert read_pickle(file.getvalue()).end == end
        assert read_pickle(file.getvalue(), start=end).end == file.tell()
        optimized = pickletools.optimize(file.getvalue()[:end])
        assert read_pickle(optimized).end == len(optimized)


def test_frame_may_end_only_between_opcodes():
    """A tensor's record read in one step accepts a frame's end at the boundaries of its opcodes, in both machines."""
    content = record()
    begin = content.index(b"h\2(")
    for end in range(begin, len(content) - 1):
        data = content[:2] + frame(end - 2) + content[2:]
        assert parse_or_error(data, fast=True) == parse_or_error(data, fast=False)
        is_boundary = end in BOUNDARIES
        assert isinstance(parse_or_error(data, fast=True), str) is not is_boundary


BOUNDARIES = {position for _, _, position in pickletools.genops(record()) if position}


def begin_with_overlong_frame(rest: bytes) -> bytes:
    """Return bytes that begin with a frame longer than the file."""
    return frame(2**40) + rest


def test_random_bytes_that_begin_like_a_frame_are_not_a_pickle(tmp_path):
    """The state of a numpy generator and a file of tokens may begin with any byte."""
    (tmp_path / "rng.pkl").write_bytes(pickle.dumps({"numpy": np.random.RandomState(149).get_state()}, 4))
    assert pickle.loads((tmp_path / "rng.pkl").read_bytes())["numpy"][1].tobytes()[:1] == b"\x95"
    tokens = np.random.default_rng(1).integers(0, 50257, 100_000).astype("<u2")
    tokens[0] = 149
    tokens.tofile(tmp_path / "train.bin")
    (tmp_path / "notes.dat").write_bytes(begin_with_overlong_frame(b"\x95" + bytes(range(200, 250))))
    results = {Path(target.target).name: target for target in audit(Request((str(tmp_path),))).targets}
    assert [result.findings for result in results.values()] == [(), (), ()]
    assert results["train.bin"].status is results["notes.dat"].status is TargetStatus.SKIPPED


@pytest.mark.parametrize("opcode", [b"X", b"B", b"T"])
def test_large_file_that_begins_like_a_string_longer_than_the_file_is_not_a_pickle(opcode, tmp_path):
    """No loader reads on, so that the limit on the bytes of a pickle does not apply."""
    with (tmp_path / "train.bin").open("wb") as file:
        file.write(opcode + b"\xff\xff\xff\x7f")
        file.truncate(MAX_PICKLE_BYTES + 1)
    (target,) = audit(Request((str(tmp_path),))).targets
    assert target.status is TargetStatus.SKIPPED


@pytest.mark.parametrize("place", ["file", "string"])
def test_overlong_frame_does_not_hide_an_import(place, tmp_path):
    """The unpickler in C stops at the frame, but the unpickler in Python, which joblib uses, reads on."""
    data = begin_with_overlong_frame(call_function(global_name("os", "system"), text("true")) + STOP)
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        pickle.loads(data)
    assert pickle._loads(data) == 0
    (tmp_path / "x.dat").write_bytes(data if place == "file" else pickle.dumps([data], 4))
    (target,) = audit(Request((str(tmp_path / "x.dat"),))).targets
    assert {finding.rule for finding in target.findings} >= {"unscanned-pickle", "unsafe-global"}
