"""Step counts of hostile files: each file once took minutes to scan and now has a limit of steps.

The tests count steps, because seconds differ between machines. Only one test limits the seconds, for all files
together.
"""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

import statecli.formats
from statecli.commands.audit.run import Request, audit
from statecli.file_scan import scan as _scan
from statecli.pickle_scan import nested_data
from statecli.pickle_scan.step_budget import FLOW_PER_BYTE, FLOW_PER_OPCODE, Budget, OutOfSteps, Steps
from statecli.storage.byte_source import ByteSource
from statecli.targets.target_result import TargetStatus

from .attacks import Member, build, call_function, four, get, global_name, number, put, records, short, stack_global

SHARED, GET = put(0), get(0)
EMPTY_OBJECT = stack_global("argparse", "Namespace") + b")\x81"
DICT = stack_global("builtins", "dict")
PARTIAL = stack_global("functools", "partial")


def build_sharing(shared, user, count):
    """Return a pickle of a list of `count` values; `user` makes each value from the object that `shared` makes."""
    return four(shared + SHARED + b"0](" + user * count + b"e")


def encode_list(count, value=b"K\1"):
    """Return the opcodes of a list."""
    return b"](" + value * count + b"e"


def encode_dict(count):
    """Return the opcodes of a dict."""
    return b"}(" + b"".join(short(f"k{n}") + b"K\1" for n in range(count)) + b"u"


def dtype(code, state):
    """Return the opcodes of a numpy dtype with this code and state."""
    return (
        call_function(stack_global("numpy", "dtype"), short(code), b"\x89", b"\x88") + b"(" + number(3) + state + b"tb"
    )


def doubled_dtypes(levels):
    """Return a numpy dtype with two fields of the previous dtype, which again has two fields, and so on."""
    plain = short("|") + b"NNN" + number(-1) + number(-1) + number(0)
    body = dtype("i1", plain) + put(0) + b"0"
    for level in range(levels):
        field = get(level) + number(0) + b"\x86"
        fields = short("a") + short("b") + b"\x86}(" + short("a") + field + short("b") + field + b"u"
        body += dtype("V1", short("|") + b"N" + fields + number(1) + number(1) + number(16))
        body += put(level + 1) + b"0"
    return four(body + get(levels))


def build_partials(count, size):
    """Return partials that share a list."""
    state = b"(" + DICT + GET + b"\x85}Nt"
    return build_sharing(encode_list(size), PARTIAL + DICT + b"\x85R" + state + b"b", count)


def build_operator_names(count):
    """Return TorchScript that names many operators of other libraries, each in a function of its own."""
    return b"".join(b"def f%d(x):\n  return ops.a%d.b(x)\n" % (n, n) for n in range(count))


def code(text):
    """Return an archive with this TorchScript."""
    return build([*records(), Member("archive/code/__torch__.py", text)])


def count_steps(tmp_path, data):
    """Return the number of steps for a scan of the file, and the findings."""
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with ByteSource(str(path)) as source:
        scan = _scan.FileScan(source)
        findings = scan.scan()
    return scan.steps.counts, findings


def test_code_of_many_short_lines_exceeds_the_budget(tmp_path):
    """26 MB of short lines exceed the budget; a scan of 60 MB, packed to 60 kB, once took minutes."""
    (steps, findings) = count_steps(tmp_path, code(b"f\n" * 13_000_000))
    assert steps[Budget.TEXT] > Budget.TEXT.limit
    assert any("code tokens" in (pickle.unread or "") for pickle in findings)


# Name -> a file, the kind of its steps, the largest number of steps that the scan may take.
LINEAR_FILES = {
    "dtypes that double 22 times": (build(records(doubled_dtypes(22))), Budget.FLOW, 1_000),
    "dtypes that double 60 times": (build(records(doubled_dtypes(60))), Budget.FLOW, 2_500),
    "2,000 partials that share a list of 40,000": (build(records(build_partials(2000, 40_000))), Budget.FLOW, 165_000),
    "4,000 names of operators": (code(build_operator_names(4000)), Budget.TEXT, 33_000),
    "strings without an end": (code(b"\\'''\n" * 20_000), Budget.TEXT, 175_000),
    "quotes behind backslashes": (code(b'\\"' * 20_000), Budget.TEXT, 47_000),
    "comments between names": (code(b"torch #type:" * 20_000), Budget.TEXT, 41_000),
    "empty lines": (code(b"\n" * 100_000 + b"ops.a.b"), Budget.TEXT, 17_000),
    "a long chain of autograd": (code(b"torch" + b".autograd" * 20_000), Budget.TEXT, 31_000),
    "a state that 3,000 objects share": (
        build(records(build_sharing(encode_dict(3000), EMPTY_OBJECT + GET + b"b", 3000))),
        Budget.FLOW,
        45_000,
    ),
    "a function called with itself": (
        build(records(four(stack_global("copyreg", "__newobj__") + SHARED + b"(" + GET * 4000 + b"tR"))),
        Budget.FLOW,
        60_000,
    ),
}


@pytest.mark.parametrize("name", LINEAR_FILES)
def test_a_file_that_once_took_minutes_takes_few_steps(name, tmp_path):
    """No budget is exceeded, and the whole file is read. The parser of torch crashes at the chain of 20,000 names."""
    data, budget, max_steps = LINEAR_FILES[name]
    steps, findings = count_steps(tmp_path, data)
    assert steps[budget] <= max_steps
    unread_reasons = [pickle.unread for pickle in findings if pickle.unread]
    assert [reason.endswith("which crashes torch.jit.load") for reason in unread_reasons] == [True] * (name in _DEEP)


#: Files with a statement that is reported as too deep, within the same number of steps.
_DEEP = frozenset(["a long chain of autograd"])


# Objects that many others share, and that are checked again for each. An honest pickler never writes these files.
SHARED_BY_MANY = {
    "arguments": build_sharing(b"(" + b"N" * 3000 + b"t", stack_global("uuid", "UUID") + GET + b"R", 3000),
    "a list among arguments": build_sharing(encode_list(3000), stack_global("uuid", "UUID") + GET + b"\x85R", 3000),
    "a list in a state": build_sharing(encode_list(3000), EMPTY_OBJECT + b"}" + short("a") + GET + b"sb", 3000),
    "keyword arguments": build_sharing(encode_dict(1200), stack_global("uuid", "UUID") + b")" + GET + b"\x92", 1200),
    "parts of jagged tensors": build_sharing(
        encode_dict(3000), stack_global("torch.nested._internal.nested_tensor", "_rebuild_njt") + GET + b"\x85R", 3000
    ),
    "modules in modules": build_sharing(
        encode_dict(3000),
        stack_global("torch.nn.modules.linear", "Linear") + b")\x81}(" + short("_modules") + GET + b"ub",
        3000,
    ),
    "the characters of a name": build_sharing(global_name("a" * 30_000, "b"), GET + b")R", 6000),
    "arguments of partials": build_partials(3000, 3000).replace(b"K\1" * 3000, EMPTY_OBJECT * 3000),
}


#: Files in which each shared value is followed once.
FILES_FOLLOWED_ONCE = ("a list among arguments", "keyword arguments")


@pytest.mark.parametrize("name", FILES_FOLLOWED_ONCE)
def test_shared_arguments_are_followed_once(name, tmp_path):
    """Arguments that many calls share are followed once, however many calls there are."""
    steps, _ = count_steps(tmp_path, build(records(SHARED_BY_MANY[name])))
    assert steps[Budget.FLOW] < 40_000


@pytest.mark.parametrize("count", [1_000_000, 4_000_000])
def test_short_opcodes_add_fewer_steps_than_long_opcodes(count):
    """An opcode of one byte adds 1.25 values to the limit, and an opcode of a long string adds 4."""
    steps = Steps()
    steps.take(Budget.BYTES, count)
    steps.take(Budget.OPCODES, count)
    assert steps.get_limit(Budget.FLOW) == Budget.FLOW.limit + count * 5 // 4
    steps.take(Budget.BYTES, 50 * count)
    assert steps.get_limit(Budget.FLOW) == Budget.FLOW.limit + count * 4


@pytest.mark.parametrize("name", [name for name in SHARED_BY_MANY if name not in FILES_FOLLOWED_ONCE])
def test_shared_objects_stop_the_scan_at_the_budget(name, tmp_path, monkeypatch):
    """The finding names the budget; the scan takes no more steps than the budget and one more container."""
    monkeypatch.setattr(Budget.FLOW, "limit", 100_000)
    steps, actual = count_steps(tmp_path, build(records(SHARED_BY_MANY[name])))
    limit = Budget.FLOW.limit + int(min(FLOW_PER_OPCODE * steps[Budget.OPCODES], FLOW_PER_BYTE * steps[Budget.BYTES]))
    assert limit < steps[Budget.FLOW] <= limit + 6001, steps
    assert actual[0].unread == f"statecli stopped the scan at its limit of {limit:,} values to check"


@pytest.mark.parametrize(("name", "is_counted"), [("model.pt", True), (".metadata", False)])
def test_calls_end_at_their_budget(name, is_counted, tmp_path, monkeypatch):
    """A call costs as much as 50 opcodes; calls in `.metadata` are not limited, because large models have millions."""
    monkeypatch.setattr(Budget.CALLS, "limit", 1000)
    (tmp_path / name).write_bytes(four(stack_global("builtins", "list") + SHARED + (GET + b")R0") * 1500))
    with ByteSource(str(tmp_path / name)) as source:
        (actual,) = _scan.FileScan(source).scan()
    assert actual.unread == ("statecli stopped the scan at its limit of 1,000 calls" if is_counted else None)


def build_growing_list(user, count):
    """Return a list of `count` values, made by `user` from a list (memo 0) that gets its elements afterwards."""
    return four(b"]" + SHARED + b"](" + user * count + b"e" + GET + b"(" + b"K\1" * count + b"e\x86")


READ_PER_OBJECT = {name: SHARED_BY_MANY[name] for name in ("arguments", "a list among arguments")} | {
    "a state": build_sharing(encode_dict(3000), EMPTY_OBJECT + GET + b"b", 3000),
    "a list that grows": build_growing_list(stack_global("uuid", "UUID") + GET + b"\x85R", 3000),
    "a list in a deque": build_sharing(
        stack_global("collections", "deque") + encode_list(3000) + b"\x85R",
        stack_global("builtins", "list") + GET + b"\x85R",
        3000,
    ),
}


@pytest.mark.parametrize("name", READ_PER_OBJECT)
def test_file_that_shares_objects_too_often_is_refused(name, tmp_path):
    """The reader refuses the file instead of reading the same values again for each object."""
    (tmp_path / "a.pt").write_bytes(build(records(READ_PER_OBJECT[name])))
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=("unscanned-pickle",))).targets
    assert target.status is TargetStatus.FAILED
    assert "the pickle refers to the same objects so often that they stand for" in str(target.reason)


def test_name_built_by_calls_has_a_length_limit(tmp_path):
    """`getattr(getattr(a.b, "x"), "x")` is read as a.b.x.x; names end after about a thousand characters."""
    step = put(2) + b"0" + get(1) + get(2) + short("x") + b"\x86R"
    body = stack_global("builtins", "getattr") + put(1) + b"0" + stack_global("a", "b") + step * 4000
    _, actual = count_steps(tmp_path, build(records(four(body))))
    assert max(len(name.qualified) for name in actual[0].names) <= 1010


def test_nested_settings_have_a_depth_limit(tmp_path):
    """Of 20,000 nested dicts, no more than 10,000 are read; an oddity reports the limit."""
    (tmp_path / "a.pt").write_bytes(build(records(four(b"}" + b"K\1}" * 20_000 + b"s" * 20_000))))
    state = statecli.formats.read(str(tmp_path / "a.pt"))
    assert any("has more than 10,000 nested containers" in oddity.message for oddity in state.oddities)


def test_a_scan_over_its_budget_is_an_unscanned_pickle(tmp_path, monkeypatch):
    """The finding names the budget, whichever it is, and names that were read before are still reported."""
    harmful_call = call_function(global_name("os", "system"), short("true"))
    code = Member("archive/code/__torch__.py", b"def forward(self):\n  return 1\n")
    (tmp_path / "a.pt").write_bytes(build([*records(four(harmful_call + EMPTY_OBJECT + b"}b\x86")), code]))
    request = Request((str(tmp_path / "a.pt"),), select=("unsafe-global", "unscanned-pickle"))
    for budget in Budget:
        with monkeypatch.context() as patch:
            patch.setattr(budget, "limit", -10_000)
            (target,) = audit(request).targets
        is_read_before = budget not in (Budget.TEXT, Budget.BYTES, Budget.PIECES)
        rules = {"unscanned-pickle", "unsafe-global"} if is_read_before else {"unscanned-pickle"}
        assert {finding.rule for finding in target.findings} == rules
        assert budget.noun in target.findings[-1].message


@pytest.mark.parametrize("budget", Budget, ids=lambda budget: budget.name.lower())
def test_error_names_the_exceeded_budget(budget):
    """The error describes the exceeded budget with a noun and its limit."""
    steps = Steps()
    steps.take(budget, budget.limit)
    with pytest.raises(
        OutOfSteps, match=rf"statecli stopped the scan at its limit of {steps.get_limit(budget):,} {budget.noun}"
    ):
        steps.take(budget)


def test_opcodes_of_small_pickles_are_all_counted(tmp_path):
    """The opcodes of many small pickles are all counted. The same pickle in two records is read once."""
    small_members = [Member(f"archive/{n}.pkl", four(b"N0" * n + b"N")) for n in range(50)]
    steps, _ = count_steps(tmp_path, build([*records(four(b"N")), *small_members]))
    assert steps[Budget.OPCODES] == sum(3 + 2 * n for n in range(50))


def test_compressed_storages_are_not_inflated_to_be_scanned(tmp_path):
    """Three compressed storages of 10 MB that do not begin like a pickle cost almost no bytes."""
    storages = [Member(f"archive/data/{n}", b"\1" * 10_000_000, method=8) for n in range(1, 4)]
    steps, findings = count_steps(tmp_path, build([*records(), *storages]))
    assert steps[Budget.BYTES] < 1000
    assert not [pickle.unread for pickle in findings if pickle.unread]


LIMITED_SCAN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from statecli.file_scan.scan import scan_pickles
for path in sys.argv[1:]:
    scan_pickles(path)
"""


LONG_WORDS = {
    "bytes": b"\x80\x03B" + struct.pack("<I", 1_000_000) + b"c" * 1_000_000 + b".",
    "text of several lines": b"\x80\x03X" + struct.pack("<I", 1_000_001) + b"c" * 1_000_000 + b"\n.",
    "a name without its second line": b"\x80\x03B" + struct.pack("<I", 1_000_002) + b"ci" * 500_000 + b"\n0.",
}


def test_all_hostile_files_are_scanned_in_seconds(tmp_path):
    """A separate process with limited time and memory scans all files, as a check of the step counts.

    Strings of a megabyte, of opcodes and letters, are searched for names in linear time.
    """
    files = [*(data for data, _, _ in LINEAR_FILES.values()), build(records(SHARED_BY_MANY["arguments"]))]
    paths = [tmp_path / f"{number_of_file}.pt" for number_of_file in range(len(files))]
    paths += [tmp_path / f"{name}.pkl" for name in LONG_WORDS]
    for path, data in zip(paths, (*files, *LONG_WORDS.values()), strict=True):
        path.write_bytes(data)
    subprocess.run([sys.executable, "-c", LIMITED_SCAN, *map(str, paths)], check=True, timeout=300)


@pytest.mark.parametrize("word", [b"N0cos", b"(" + b"a" * 70_000 + b"ios", b"N0c" + b"o" * 70_000])
def test_a_name_after_a_long_word_is_found(word):
    """An opcode that imports a name is found at any place of a word of any length."""
    assert nested_data.may_be_nested_data(word + b"\nsystem\n(S'true'\ntR.")
    assert not nested_data.may_be_nested_data(word + b"\n0system\n")
