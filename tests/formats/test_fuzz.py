"""Damage of every kind: a reader refuses the file in one line or reads the file, and does nothing else."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError
from statecli.formats import torch_legacy, torch_zip
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickles import machine, machine_state
from statecli.pickles.machine import Machine, read_pickle
from statecli.pickles.nodes import Global, Key, Obj, Persistent, Pickle, SetOf

from .attacks import build, build_pickle, number, put, records, state_dict, tensor, text

#: Number of mutants in the suite. `python -m tests.formats.test_fuzz N` runs N mutants with another seed.
MUTANTS = 500
SEED = 20260


def flatten(result: Pickle) -> tuple[list[object], ...]:
    """Return a graph as a flat list: each node once, references by number. Equal lists are equal graphs."""
    numbers: dict[int, int] = {}
    out: list[object] = []
    todo: list[object] = [result.root, *result.persistent, *result.duplicate_keys]
    alive = []
    while todo:
        node = todo.pop()
        parts = _parts(node)
        if parts is None:
            out.append((type(node).__name__, node))
            continue
        # Equal tuples may be a single object in one graph and two objects in the other, without any difference.
        if type(node) is not tuple:
            if id(node) in numbers:
                out.append(numbers[id(node)])
                continue
            numbers[id(node)] = len(numbers)
            alive.append(node)
        out.append((type(node).__name__, len(parts)))
        todo.extend(reversed(parts))
        if len(out) > 20_000:
            break
    mentions = [(mention.qualified, mention.position) for mention in result.globals]
    return out, mentions, [result.end, len(result.persistent)]


def _parts(node: object) -> list[object] | None:
    if type(node) is Obj:
        return [node.how, node.cls, node.args, node.kwargs, node.state, node.items, node.elems]
    if type(node) is dict:
        return [part for pair in node.items() for part in pair]
    if type(node) in (list, tuple):
        return list(node)
    if type(node) is Global:
        return [node.qualified]
    if type(node) is Key:
        return [node.value]
    if type(node) is Persistent:
        return [node.pid]
    if type(node) is SetOf:
        return list(node.elems)
    if type(node) is float:
        return [repr(node)]
    return None


def format_error(error: Exception) -> str:
    """Return the text of the error, which must be one line."""
    text = str(error)
    assert "\n" not in text
    return text


def generator(seed: int) -> random.Random:
    """Return a generator that gives the same damage in every run."""
    return random.Random(seed)  # noqa: S311 - nothing secret


def parse_or_error(data: bytes, *, fast: bool) -> object:
    """Return the flat graph, or the error line."""
    try:
        return flatten(read_pickle(data, fast=fast))
    except MalformedError as error:
        return format_error(error)


def saved_pickle(value: object, protocol: int = 2) -> bytes:
    """Return the data.pkl that torch.save writes for the value."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


@pytest.fixture(scope="module")
def corpus() -> list[bytes]:
    return corpus_of_torch()


def corpus_of_torch() -> list[bytes]:
    """Return pickles whose records take the fast path, and some that nearly do."""
    import torch
    from torch import nn

    wide_tensors = {
        f"l{n}.w": torch.zeros([1] * (n % 7), dtype=torch.float16 if n % 3 else torch.float32) for n in range(70)
    }
    big_tensors = {f"l{n}.w": torch.zeros(300 * (n % 2), 5)[:, n % 3 :] for n in range(60)}
    net = nn.Sequential(nn.Linear(3, 300), nn.BatchNorm1d(300), nn.LSTM(3, 2, num_layers=3))
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = [
        wide_tensors,
        big_tensors,
        net,
        {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
        [nn.Parameter(parameter.detach().clone()) for parameter in [*net.parameters()] * 9],
    ]
    return [saved_pickle(value) for value in values] + [saved_pickle(wide_tensors, protocol=4)]


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Return a pickle with a few bytes changed, cut out or inserted, some from another pickle."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        position = rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[position] = rng.randrange(256)
        elif kind == 1:
            data[position] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[position : position + rng.randrange(1, 9)]
        elif kind == 3:
            data[position:position] = bytes(rng.choice(OPCODES) for _ in range(rng.randrange(1, 4)))
        elif kind == 4:
            seed = rng.choice(seeds)
            start = rng.randrange(len(seed))
            data[position:position] = seed[start : start + rng.randrange(1, 200)]
        elif kind == 5:
            data[position] = rng.choice(OPCODES)
        else:
            data[position] = (data[position] + rng.choice((1, 255))) % 256
        data = data or bytearray(b".")
    return bytes(data)


OPCODES = (
    b"().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8f\x90\x91\x92\x93\x94\x95"
)


def compare_machines(count: int, seed: int, seeds: list[bytes]) -> tuple[int, int]:
    """Run `count` mutants through both machines; return the number of mutants read, and `count`."""
    rng = generator(seed)
    read_count = 0
    for _ in range(count):
        data = mutate(rng, seeds)
        plain_graph, fast_graph = parse_or_error(data, fast=False), parse_or_error(data, fast=True)
        assert plain_graph == fast_graph, data
        with mock.patch.object(machine, "native", None):
            assert plain_graph == parse_or_error(data, fast=True), data
        read_count += not isinstance(plain_graph, str)
    return read_count, count


def test_fast_path_agrees_with_the_plain_machine(corpus):
    """Hundreds of mutants of torch's pickles give the same graph or the same line. Some mutants are still read."""
    read_count, count = compare_machines(MUTANTS, SEED, corpus)
    assert count // 50 < read_count < count


needs_compiled_records = pytest.mark.skipif(machine.native is None, reason="no compiled kernel")


def scan_report(data: bytes) -> list[object]:
    """Return the report of a scan of the pickle, and its counters."""
    scanner = Scanner(data, "data.pkl")
    error = ""
    try:
        scanner.run(0)
    except MalformedError as raised:
        error = str(raised)
    counts = [scanner.opcodes, scanner.object_count, scanner.call_count, scanner.change_count, scanner.held_values]
    lengths = [len(scanner.memo), len(scanner.stack), len(scanner.persistent), len(scanner.flow.calls)]
    reports = [scanner.nested_data, list(scanner.iter_mentions()), scanner.find_bombs(1000), scanner.find_hazards()]
    return [error, scanner.end, scanner.refused_opcode, counts, lengths, reports, dict(scanner.flow.steps.counts)]


@needs_compiled_records
def test_a_scan_reports_the_same_with_and_without_the_compiled_reader(corpus):
    """Names, hazards, nested pickles and all counts agree for mutants of torch's pickles."""
    rng = generator(SEED + 1)
    without_strides = state_dict(w=tensor(size=(2, 2), stride=()))
    mutants = (mutate(rng, corpus) for _ in range(MUTANTS // 2))
    for data in (*corpus, *NEAR_RECORDS.values(), without_strides, *mutants):
        compiled = scan_report(data)
        with mock.patch.object(machine, "native", None):
            assert scan_report(data) == compiled, data


@needs_compiled_records
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 50, 101])
def test_bursts_end_at_the_same_opcodes(corpus, monkeypatch, budget):
    """Budgets are checked after the same number of opcodes with and without the compiled reader."""
    monkeypatch.setattr(machine_state, "BURST_OPCODES", 40)
    monkeypatch.setattr(machine, "BURST_OPCODES", 40)
    monkeypatch.setattr(machine, "MAX_OPCODES", 40 * budget)
    compiled = [parse_or_error(data, fast=True) for data in corpus]
    monkeypatch.setattr(machine, "native", None)
    assert [parse_or_error(data, fast=True) for data in corpus] == compiled


@needs_compiled_records
def test_unusual_names_agree_in_both_readers(monkeypatch):
    """The names have characters that names of tensors do not have; a scan looks for pickles in them."""
    names = ["a.b-c_9", "", "x" * 70_000, "a b", "a\n", "\u00e9", "PK\3\4", "cos\nsystem\n", "\x80\2", "a/b", "a:b"]
    import torch

    fill = {f"l{n}": torch.zeros(n) for n in range(50)}
    data = saved_pickle({**fill, **{name: torch.zeros(2) for name in names}, **{f"m{n}": fill["l9"] for n in range(3)}})
    compiled, plain = parse_or_error(data, fast=True), parse_or_error(data, fast=False)
    assert compiled == plain
    scans = [scan_report(data)]
    monkeypatch.setattr(machine, "native", None)
    assert scans == [scan_report(data)]


@needs_compiled_records
@pytest.mark.parametrize(("position", "end"), [(-1, 4), (5, 9), (3, 2), (0, -1), (3, -(2**63))])
def test_the_compiled_reader_refuses_bytes_outside_the_data(position, end):
    """An end before the position would give an address before the data."""
    with pytest.raises(ValueError, match=f"bytes {position} to {end} are outside the data"):
        machine.native.take_records(b"Xabc", position, end, 1, [], [], [], {}, Obj, Persistent, None, None)


@needs_compiled_records
def test_the_compiled_reader_is_used(corpus):
    """Without the compiled reader the comparisons above would compare nothing."""
    take_records, record_counts = machine.native.take_records, []
    with mock.patch.object(machine, "native") as native:
        native.take_records = lambda *args: record_counts.append(take_records(*args)) or record_counts[-1]
        for data in corpus[:2]:
            record_counts.clear()
            read_pickle(data)
            assert sum(count for _, count in record_counts) > 20


def test_the_fast_path_is_taken(corpus, monkeypatch):
    """Without the fast path the comparison above would compare nothing."""
    matches: list[bool] = []
    monkeypatch.setattr(machine, "native", None)
    original = Machine.take_record
    monkeypatch.setattr(
        Machine, "take_record", lambda self, match: matches.append(original(self, match)) or matches[-1]
    )
    for data in corpus[:5]:
        matches.clear()
        read_pickle(data, fast=False)
        assert not matches
        read_pickle(data)
        assert sum(matches) > 2
    matches.clear()
    assert not isinstance(parse_or_error(NEAR_RECORDS["exactly"], fast=True), str)
    assert matches == [True]


def record(
    *,
    n: int = 1,
    first: int = 300,
    get: bytes = b"h\0",
    location: bytes = b"h\0",
    hooks: bytes = b"h\2",
    shape: bytes = b"K\2K\3\x86",
    last: int = 306,
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """Return a record as torch writes a record after 300 memo entries, with one field changed."""
    fill = b"".join(number(0) + put(entry) + b"0" for entry in range(3, 300))
    start = text("storage") + b"q\0" + b"0cm\nn\nq\1" + b"0cm\nf\nq\0020" + fill + before
    key = b"X" + n.to_bytes(4, "little") + b"7" + put(first)
    pid = b"(" + get + b"h\1" + key + location + b"K\6t" + put(first + 1) + b"Q"
    geometry = b"K\0" + shape + put(first + 2) + shape + put(first + 3) + b"\x89"
    end = hooks + b")R" + put(first + 4) + b"t" + put(first + 5) + b"R" + put(last)
    return build_pickle(start + b"h\2(" + pid + geometry + end + after)


NEAR_RECORDS = {
    "exactly": record(),
    "a key of another length": record(n=2),
    "a memo entry skipped": record(first=301, last=307, after=b"j\x2c\1\0\0\x86"),
    "the last memo entry another": record(last=5, after=b"h\5\x86"),
    "a memo entry that is not yet there": record(get=b"j\x2c\1\0\0"),
    "a memo entry of a far place": record(get=b"j\xff\xff\xff\xff"),
    "a location that is not yet there": record(location=b"j\x2c\1\0\0"),
    "hooks that are not yet there": record(hooks=b"j\x2c\1\0\0"),
    "hooks that nobody wrote": record(hooks=b"j\xff\xff\0\0"),
    "a location that nobody wrote": record(location=b"j\xff\xff\0\0"),
    "an entry of its own before it": record(
        before=b"N" + put(303) + b"0", after=b"(N\x94N\x94j\x33\1\0\0j\x34\1\0\0t\x86"
    ),
    "the entries it wrote": record(after=b"(" + b"".join(b"j" + put(n)[1:] for n in range(300, 307)) + b"t\x86"),
    "one number and TUPLE2": record(shape=b"K\2\x86"),
    "four numbers": record(shape=b"(K\1K\2K\3K\4t"),
    "two numbers between MARK and TUPLE": record(shape=b"(K\1K\2t"),
    "a negative number": record(shape=b"J\xff\xff\xff\xffM\1\0\x86"),
    "a bool for a number": record(shape=b"\x88K\1\x86"),
    "calls of a string": record().replace(b"h\2(", b"h\0("),
    "hooks that are called on a string": record().replace(b"h\2)R", b"h\0)R"),
    "no function": record().replace(b"h\2(", b"(", 1),
}


@pytest.mark.parametrize("data", NEAR_RECORDS.values(), ids=NEAR_RECORDS)
def test_near_records_agree_in_both_machines(data):
    """Each case breaks a condition of the fast path."""
    assert parse_or_error(data, fast=True) == parse_or_error(data, fast=False)


@pytest.mark.parametrize(
    "data", [NEAR_RECORDS["exactly"], record(shape=b")").replace(b")" + put(302), b")").replace(b")" + put(303), b")")]
)
def test_record_has_the_same_count_in_both_machines(data):
    """A call, an OrderedDict and a storage count the same in both machines."""
    counts = []
    for fast in (True, False):
        reader = Machine(data, "data.pkl", fast=fast, module_ids=False)
        with contextlib.suppress(MalformedError):
            reader.run(0)
        counts.append(reader.object_count)
    assert counts == [3, 3]


def test_random_opcodes_agree_in_both_machines():
    """Random opcodes give a graph or an error line, the same in both machines."""

    @given(
        st.lists(st.sampled_from([bytes([op]) for op in OPCODES] + [b"cm\nf\n", b"K\1", b"h\0", b"q\0"]), max_size=60)
    )
    @settings(max_examples=100, deadline=None)
    def run(ops: list[bytes]) -> None:
        data = build_pickle(b"".join(ops))
        assert parse_or_error(data, fast=True) == parse_or_error(data, fast=False)

    run()


def list_or_error(reader, path) -> object:
    """Return the tensors that a reader lists, or the class of its error."""
    try:
        state = reader.read(str(path))
    except UnreadableError as error:
        format_error(error)
        return type(error)
    return state.tensors


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """Bytes of an archive and of an old stream with the same two tensors."""
    import torch

    value = {"weight": torch.ones(2, 3), "bias": torch.zeros(2, dtype=torch.bfloat16)}
    folder = tmp_path_factory.mktemp("small")
    torch.save(value, folder / "zip.pt")
    torch.save(value, folder / "old.pt", _use_new_zipfile_serialization=False)
    return {torch_zip: (folder / "zip.pt").read_bytes(), torch_legacy: (folder / "old.pt").read_bytes()}


def names(tensors) -> object:
    return (
        [(tensor.fqn, tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        if isinstance(tensors, tuple)
        else tensors
    )


def test_every_flipped_byte_of_an_archive_is_refused_or_changes_nothing(small_files, tmp_path):
    """The listed facts are under data.pkl's checksum; a flip elsewhere is tensor data, padding, or a contradiction."""
    data = small_files[torch_zip]
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    expected_names = names(list_or_error(torch_zip, path))
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
        assert names(list_or_error(torch_zip, path)) in (
            expected_names,
            UnreadableError,
            MalformedError,
            ChecksumMismatch,
        ), position


def test_mutants_with_valid_checksums_are_listed_or_refused(tmp_path):
    """Damaged pickles under a right checksum: the graph's reader lists the tensors or refuses the file in one line."""
    rng = generator(SEED)
    seeds = [state_dict(w=tensor()), saved_pickle({"a": __import__("torch").ones(3)})]
    path = tmp_path / "x.pt"
    for _ in range(600):
        path.write_bytes(build(records(mutate(rng, seeds))))
        list_or_error(torch_zip, path)


if __name__ == "__main__":
    import sys

    print(compare_machines(int(sys.argv[1]), int(sys.argv[2]), corpus_of_torch()))
