"""The pickle machine: builds the objects of pickle, runs nothing, and ends every hostile stream with one line."""

from __future__ import annotations

import gc
import io
import pickle
import struct
import sys
import time
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings, strategies as st

from statecli.core.errors import MalformedError
from statecli.pickle_scan.one_pickle import PickleReader
from statecli.pickle_scan.step_budget import Steps
from statecli.pickles import machine
from statecli.pickles.errors import TruncatedPickle
from statecli.pickles.machine import read_pickle
from statecli.pickles.nodes import Global, Key, Obj, Persistent, SetOf

from .attacks import build_pickle, colliding_ints, deep_key, hash_bomb, number, numbers, state_dict, tensor, text

PROTOCOLS = range(6)

scalars = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.none() | st.booleans() | st.integers(-(2**59), 2**59) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=25,
)


def root(body: bytes) -> object:
    """Return the machine's result for the pickle of these opcodes."""
    return read_pickle(build_pickle(body)).root


@given(values, st.sampled_from(PROTOCOLS))
@settings(max_examples=100, deadline=None)
def test_plain_data_equals_pickle_loads(value, protocol):
    """None, numbers, text, bytes, lists, tuples and dicts equal the result of pickle.loads, in every protocol."""
    data = pickle.dumps(value, protocol)
    result = read_pickle(data)
    assert result.end == len(data)
    assume(not result.globals)  # protocols 0 to 2 write bytes as a call
    assert result.root == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_and_cyclic_containers_keep_their_identity(protocol):
    """A list under two names stays the same list, and a list that contains itself still does."""
    shared: list[object] = [1]
    cyclic: list[object] = []
    cyclic.append(cyclic)
    actual_root = read_pickle(pickle.dumps({"a": shared, "b": shared, "c": cyclic}, protocol)).root
    assert actual_root["a"] is actual_root["b"]
    assert actual_root["c"][0] is actual_root["c"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_stay_calls(protocol):
    """An OrderedDict with attributes stays a call of the class, with separate items and state."""
    value = OrderedDict(a=1, b=2)
    value.note = "x"  # type: ignore[attr-defined]
    root = read_pickle(pickle.dumps(value, protocol)).root
    assert type(root) is Obj
    assert root.cls.qualified == "collections.OrderedDict"
    assert root.state == {"note": "x"}
    items = root.items if root.items is not None else dict(root.args[0])
    assert items == {"a": 1, "b": 2}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_are_lists_of_their_elements(protocol):
    """A set is a SetOf, or before protocol 4 a call with a list; the result has no Python set."""
    root = read_pickle(pickle.dumps({"a", "b"}, protocol)).root
    elements = root.elems if type(root) is SetOf else root.args[0]
    assert sorted(elements) == ["a", "b"]
    frozen = read_pickle(pickle.dumps(frozenset("ab"), protocol)).root
    assert sorted(frozen.elems if type(frozen) is SetOf else frozen.args[0]) == ["a", "b"]


class Slots:
    """Object that is pickled with NEWOBJ_EX."""

    def __init__(self, **kwargs: int) -> None:
        self.options = kwargs

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, int]]:
        return (1, 2), {"three": 3}

    def __new__(cls, *args: int, **kwargs: int) -> Slots:
        return super().__new__(cls)


def test_newobj_ex_keeps_both_kinds_of_arguments():
    """Keyword arguments are in `kwargs`, the __dict__ in `state`."""
    root = read_pickle(pickle.dumps(Slots(x=1), 4)).root
    assert (root.how, root.args, root.kwargs, root.state) == ("newobj", (1, 2), {"three": 3}, {"options": {"x": 1}})


def test_call_keeps_items_and_elements_set_later():
    """SETITEMS and APPENDS on the result of a call fill `items` and `elems`."""
    call = read_pickle(pickle.dumps(defaultdict(list, {"a": [1]}), 2)).root
    assert (call.args[0].qualified, call.items) == ("builtins.list", {"a": [1]})
    assert root(b"cm\nL\n)\x81(" + number(1) + number(2) + b"e").elems == [1, 2]


def test_inst_and_obj_are_calls():
    """INST and OBJ, which Python 2 wrote, are calls too."""
    inst = root(b"(" + number(7) + b"iold\nClass\n}" + text("k") + number(1) + b"sb")
    assert (inst.how, inst.cls.qualified, inst.args, inst.state) == ("inst", "old.Class", (7,), {"k": 1})
    obj = root(b"(cold\nClass\n" + number(7) + b"o")
    assert (obj.how, obj.cls.qualified, obj.args) == ("obj", "old.Class", (7,))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"I01\n", True),
        (b"I00\n", False),
        (b"I-12\n", -12),
        (b"L12L\n", 12),
        (b"L12\n", 12),
        (b"F1.5\n", 1.5),
        (b"G" + struct.pack(">d", 2.5), 2.5),
        (b"J\xff\xff\xff\xff", -1),
        (b"M\xff\xff", 65535),
        (b"\x8a\0", 0),
        (b"\x8a\1\xff", -1),
        (b"\x8b\1\0\0\0\x80", -128),
        (b"S'a\\x62\\n'\n", "ab\n"),
        (b'S"q"\n', "q"),
        (b"U\2ab", "ab"),
        (b"U\1\xff", b"\xff"),
        (b"T\2\0\0\0ab", "ab"),
        (b"V\\u00e9x\n", "éx"),
        (b"X\3\0\0\0\xed\xa0\x80", "\ud800"),
        (b"\x8c\1a", "a"),
        (b"\x8d" + struct.pack("<Q", 1) + b"a", "a"),
        (b"C\1\xff", b"\xff"),
        (b"B\1\0\0\0\xff", b"\xff"),
        (b"\x8e" + struct.pack("<Q", 1) + b"\xff", b"\xff"),
        (b"\x96" + struct.pack("<Q", 1) + b"\xff", b"\xff"),
        (b"(" + number(1) + b"l", [1]),
        (b"(" + number(1) + number(2) + b"d", {1: 2}),
        (b"](" + number(1) + number(2) + b"e", [1, 2]),
        (b"]" + number(1) + b"a", [1]),
        (number(1) + number(2) + b"0", 1),
        (number(1) + b"(" + number(2) + b"1", 1),
        (number(1) + b"(0", 1),
        (number(1) + b"2\x86", (1, 1)),
        (number(5) + b"p7\n0g7\n", 5),
        (number(5) + b"r\xff\xff\xff\xff0j\xff\xff\xff\xff", 5),
        (number(5) + b"\x940h\0", 5),
        (number(5) + b"r\1\0\0\x00\x940h\1", 5),
        (number(1) + number(2) + number(3) + b"\x87", (1, 2, 3)),
        (b"\x95" + struct.pack("<Q", 3) + b"K\7", 7),
    ],
)
def test_each_opcode_pushes_the_value_of_pickle(body, value):
    """The cases cover each opcode and each way to write a value."""
    actual = root(body)
    assert (actual, type(actual)) == (value, type(value))


def test_memo_entries_may_come_in_any_order_and_be_overwritten():
    """pickle may number memo entries in any order; MEMOIZE takes the current number of entries."""
    body = b"]" + number(1) + b"q\5" + b"a" + number(2) + b"q\0a" + number(3) + b"q\5ah\5ah\0a"
    assert root(body) == [1, 2, 3, 3, 2]


def test_dictionary_keys_that_hash_slowly_are_kept_by_identity():
    """Tuples, floats, nodes, huge integers and long bytes become Keys; other keys do not change."""
    slow = [numbers(1, 2), b"G" + bytes(8), number(2**60), number(-(2**70)), b"cm\nn\n", b"]"]
    slow.append(b"B" + struct.pack("<I", 65_537) + bytes(65_537))
    actual = root(b"}(" + b"".join(key + b"N" for key in slow) + b"u")
    assert [type(key) for key in actual] == [Key] * len(slow)
    quick_keys = [text("a"), b"N", b"\x88", number(2**60 - 1), b"C\1a"]
    assert list(root(b"}(" + b"".join(key + b"N" for key in quick_keys) + b"u")) == ["a", None, True, 2**60 - 1, b"a"]


def test_duplicate_keys_are_reported_and_the_last_value_wins():
    """Duplicates are reported within a batch, across batches, and for a bool that equals an int."""
    body = b"}(" + (text("a") + number(1)) + (text("a") + number(2)) + b"u" + text("a") + number(3) + b"s"
    value = read_pickle(build_pickle(body + b"(" + number(1) + b"N\x88N" + b"u"))
    assert value.root == {"a": 3, 1: None}
    assert value.duplicate_keys == ["a", "a", True]


def test_at_most_a_hundred_duplicates_are_kept():
    """A file with many duplicates does not fill the memory."""
    assert len(read_pickle(build_pickle(b"}(" + (text("a") + b"N") * 1000 + b"u")).duplicate_keys) == 100


def test_globals_are_listed_once_with_the_byte_of_their_first_mention():
    """GLOBAL, STACK_GLOBAL and INST import names; the same name gives the same object."""
    data = build_pickle(b"]" + b"cos\nsystem\na" + text("os") + text("system") + b"\x93a" + b"(iposix\nfork\na")
    value = read_pickle(data)
    assert [(mention.qualified, mention.position) for mention in value.globals] == [
        ("os.system", 3),
        ("posix.fork", data.index(b"iposix")),
    ]
    assert value.root[0] is value.root[1]


def test_persistent_ids_are_listed_in_order():
    """BINPERSID takes any value, PERSID a line of text."""
    value = read_pickle(build_pickle(b"]" + numbers(1) + b"QaPline\na"))
    assert [reference.pid for reference in value.persistent] == [(1,), "line"]
    assert value.root == value.persistent


def test_module_ids_become_classes_only_on_request():
    """Old whole modules have ("module", class, file, source) in place of the class."""
    data = build_pickle(b"(" + text("module") + b"cm\nNet\n" + text("f.py") + text("source") + b"tQ")
    assert type(read_pickle(data).root) is Persistent
    actual_root = read_pickle(data, module_ids=True).root
    assert type(actual_root) is Global
    assert actual_root.qualified == "m.Net"


def test_a_pickle_may_start_and_end_in_the_middle():
    """`start` is the first byte of the pickle, `end` the first byte after the pickle."""
    value = read_pickle(memoryview(b"junk" + build_pickle(number(3)) + b"more"), start=4)
    assert (value.root, value.end) == (3, 9)


RUNNING_PICKLES = {
    "os.system": b"cos\nsystem\n" + text("touch PWNED") + b"\x85R",
    "stack global": text("os") + text("system") + b"\x93" + text("touch PWNED") + b"\x85R",
    "inst": b"(" + text("touch PWNED") + b"ios\nsystem\n",
    "obj": b"(cos\nsystem\n" + text("touch PWNED") + b"o",
    "newobj": b"cos\nsystem\n" + text("touch PWNED") + b"\x85\x81",
    "newobj_ex": b"cos\nsystem\n" + text("touch PWNED") + b"\x85}\x92",
    "build": b"cbuiltins\nobject\n)\x81}" + text("__setstate__") + b"cos\nsystem\nsb" + text("touch PWNED") + b"b",
    "getattr": b"cbuiltins\ngetattr\ncos\n__dict__\n" + text("system") + b"\x86R" + text("touch PWNED") + b"\x85R",
    "a module that does not exist": b"cno_such_module_anywhere\nThing\n)R",
}


@pytest.mark.parametrize("body", RUNNING_PICKLES.values(), ids=RUNNING_PICKLES)
def test_hostile_pickle_is_read_without_imports_or_calls(body, tmp_path, in_tmp_path):
    """A call becomes a graph: no file is written and no module is imported."""
    before = set(sys.modules)
    value = read_pickle(build_pickle(body))
    assert type(value.root) is Obj
    assert value.globals
    assert list(tmp_path.iterdir()) == []
    assert set(sys.modules) == before


ONLY_OBJECTS = "but Python's pickle sets the state only of an object that a call created"
REFUSED_PICKLES = {
    "an extension code": (b"\x82\1", "copyreg extension code"),
    "an extension code of two bytes": (b"\x83\1\0", "copyreg extension code"),
    "an extension code of four bytes": (b"\x84\1\0\0\0", "copyreg extension code"),
    "BUILD on a class": (
        b"cm\nC\nN}" + text("x") + b"Ns\x86b",
        f"the pickle sets the state of the function or class 'm.C', {ONLY_OBJECTS}",
    ),
    "BUILD on an int": (b"K\1}b", f"the pickle sets the state of an int, {ONLY_OBJECTS}"),
    "BUILD on a list": (b"]}b", f"the pickle sets the state of a list, {ONLY_OBJECTS}"),
    "BUILD on a dict": (b"}}b", f"the pickle sets the state of a dict, {ONLY_OBJECTS}"),
    "BUILD on a tuple": (b")}b", f"the pickle sets the state of a tuple, {ONLY_OBJECTS}"),
    "BUILD on a storage": (b"NQ}b", f"the pickle sets the state of a storage, {ONLY_OBJECTS}"),
    "SETITEM on a list": (b"]K\0K\1s", "the pickle sets an item of a list, which is not a dict"),
    "SETITEMS on a class": (
        b"cm\nC\n(K\0K\1u",
        "the pickle sets an item of the function or class 'm.C', which is not a dict",
    ),
    "SETITEM on a tuple": (b")K\0K\1s", "the pickle sets an item of a tuple, which is not a dict"),
    "SETITEMS without a value": (b"}(K\0u", "a dictionary key has no value"),
    "DICT without a value": (b"(K\0d", "a dictionary key has no value"),
    "APPEND on a dict": (b"}K\0a", "the pickle adds elements to a dict, which is not a list"),
    "APPENDS on a string": (text("a") + b"(K\0e", "the pickle adds elements to a string, which is not a list"),
    "APPEND on a set": (b"\x8fK\0a", "the pickle adds elements to a set, which is not a list"),
    "ADDITEMS on a list": (b"](K\0\x90", "the pickle adds elements to a list, which is not a set"),
    "NEWOBJ of an int": (b"K\1)\x81", "expected a function or class to call, found an int"),
    "REDUCE of a string": (text("f") + b")R", "expected a function or class to call, found a string"),
    "REDUCE of a storage": (b"NQ)R", "expected a function or class to call, found a storage"),
    "REDUCE with a list": (b"cm\nf\n]R", "the arguments of a call are a list, not a tuple"),
    "NEWOBJ_EX with a list": (b"cm\nf\n)]\x92", "the keyword arguments of a call are a list, not a dict"),
    "an empty stack": (b"", "an instruction needs more values than the stack has"),
    "TUPLE2 of one": (b"K\1\x86", "an instruction needs more values than the stack has"),
    "TUPLE without a mark": (b"K\1t", "an instruction needs more values than the stack has"),
    "a tuple across a mark": (b"K\1(\x85", "an instruction needs more values than the stack has"),
    "POP of nothing": (b"0", "an instruction needs more values than the stack has"),
    "OBJ of nothing": (b"(o", "an instruction needs more values than the stack has"),
    "a memo entry of nothing": (b"q\0", "an instruction needs more values than the stack has"),
    "an unset memo entry": (b"h\7", "the pickle uses object 7 before storing this object"),
    "an unset memo entry, in text": (b"g7\n", "the pickle uses object 7 before storing this object"),
    "a memo entry below zero": (b"K\1p-1\n", "object number -1 is negative"),
    "an unset memo entry below zero": (b"K\1q\0g-1\n", "the pickle uses object -1 before storing this object"),
    "an unknown opcode": (b"\xff", "unknown opcode 0xff"),
    "protocol 9": (b"\x80\x09N", "pickle protocol 9"),
    "an out-of-band buffer": (b"\x97", "data that is not in the file (an out-of-band buffer"),
    "a million decimal digits": (b"L" + b"1" * 1_000_000 + b"L\n", "an integer has 1000000 digits"),
    "ten thousand decimal digits": (b"I" + b"1" * 10_000 + b"\n", "an integer has 10000 digits"),
    "an integer of negative length": (b"\x8b\xff\xff\xff\xff", "an integer has a negative length (-1 bytes)"),
    "a string of negative length": (b"T\xff\xff\xff\xff", "a string has a negative length (-1 bytes)"),
    "a number that is a word": (b"Ione\n", "an integer literal is not a decimal number"),
    "a number with an underscore": (b"L1_0L\n", "an integer literal is not a decimal number"),
    "a float that is a word": (b"Fone\n", "a float literal is not a number"),
    "a string has no quotes around it": (b"Sab\n", "a string has no quotes around it"),
    "a string of one quote": (b"S'\n", "a string has no quotes around it"),
    "a string has an invalid escape sequence": (b"S'\\x1'\n", "a string has an invalid escape sequence"),
    "unicode with a broken escape": (b"V\\u12\n", "a string has an invalid escape sequence"),
    "invalid UTF-8": (b"X\1\0\0\0\xff", "invalid UTF-8 in a string (byte 7)"),
    "a global that is no UTF-8": (b"c\xff\nx\n", "the name of an imported function or class is not utf-8 text"),
    "a global named by ints": (b"K\1K\2\x93", "the name of an imported function or class is not a string"),
}


#: Errors for pickles that statecli does not read, although a loader may read them.
UNSUPPORTED_PICKLES = (
    "copyreg extension code",
    "pickle protocol 9",
    "data that is not in the file (an out-of-band buffer",
    "an integer has 1000000 digits",
    "an integer has 10000 digits",
)


@pytest.mark.parametrize("case", REFUSED_PICKLES.values(), ids=REFUSED_PICKLES)
def test_nonsense_is_malformed(case):
    """Each misuse of an opcode has an error line with the byte."""
    body, message = case
    with pytest.raises(MalformedError) as error:
        read_pickle(build_pickle(body))
    line = str(error.value)
    assert message in line
    assert line.startswith("data.pkl: ")
    assert ("the pickle is damaged: " in line) is (message not in UNSUPPORTED_PICKLES)
    assert "\n" not in line
    assert len(line) < 300


LONG = struct.pack("<Q", 2**40)
TRUNCATED_PICKLES = {
    "nothing": b"",
    "no STOP": b"\x80\x02N",
    "a string that runs past the end": b"X\xff\xff\xff\x7fab",
    "8-byte length": b"\x8d" + LONG,
    "bytes of 2**40": b"\x8e" + LONG,
    "a bytearray of 2**40": b"\x96" + LONG,
    "a frame of 2**40": b"\x95" + LONG + b"N.",
    "half a length": b"X\1\0",
    "half a number": b"J\1\0",
    "half a long": b"\x8a\4\1",
    "a line without its end": b"cos\nsyst",
    "INST without newlines": b"(iabc",
}


@pytest.mark.parametrize("data", TRUNCATED_PICKLES.values(), ids=TRUNCATED_PICKLES)
def test_bytes_that_end_too_soon_are_truncated(data):
    """Nothing is allocated for a length beyond the end of the file."""
    with pytest.raises(TruncatedPickle, match="is truncated: "):
        read_pickle(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_prefix_is_truncated(protocol):
    """A pickle truncated at any byte is reported as truncated."""
    data = pickle.dumps({"a": [1, 2.5, "x", (None, True)], "b": Fraction(1, 3), "c": {1: 2**70}}, protocol)
    for end in range(len(data)):
        with pytest.raises(TruncatedPickle):
            read_pickle(data[:end])


BOMBS = {
    "a key that takes 2**64 steps to hash": hash_bomb(),
    "a key nested 200,000 deep": deep_key(200_000),
    "sixty thousand integers of one hash": colliding_ints(60_000),
    "a memo entry 2**28": build_pickle(b"Nr\0\0\0\x10"),
    "a memo entry 2**31 - 2": build_pickle(b"Nr\xfe\xff\xff\x7f"),
    "lists nested 100,000 deep": build_pickle(b"]" * 100_000 + b"a" * 99_999),
    "dicts nested 100,000 deep": build_pickle(b"}" + b"N}" * 100_000 + b"s" * 100_000),
    "calls nested 100,000 deep": build_pickle(b"cm\nf\n" + b")R" * 100_000),
    "storages nested 100,000 deep": build_pickle(b"N" + b"Q" * 100_000),
    "calls with a state nested 20,000 deep": build_pickle(b"cm\nf\n" + b")R}b" * 20_000),
    "tuples nested 200,000 deep": build_pickle(b")" + b"\x85" * 200_000),
    "sets nested 9,000 deep": build_pickle(b"(" * 9_000 + b"\x91" * 9_000),
    "keys nested 100,000 deep": build_pickle(b"}" * 100_000 + b"Ns" * 99_999),
    "a thousand laughs": build_pickle(b"]q\0" + b"]h\0ah\0aq\0" * 1000),
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_bombs_are_ordinary_graphs(data):
    """Pickles that hang or crash pickle and torch.load are read, and freed without a crash, in a moment."""
    gc.freeze()  # the collection below covers the result of the read, not the libraries
    start_time = time.process_time()
    read_pickle(data)
    gc.collect()
    assert time.process_time() - start_time < 4


BUDGETS = {
    "opcodes": ("MAX_OPCODES", b"N0", "the pickle has more than 60000 instructions, the limit of statecli"),
    "memo entries": (
        "MAX_MEMO_ENTRIES",
        b"N\x940",
        "the pickle memo has more than 60000 objects, the limit of statecli",
    ),
    "objects": ("MAX_OBJECTS", b"]0", "the pickle has more than 60000 objects, the limit of statecli"),
    "stack": (
        "MAX_STACK_VALUES",
        b"N",
        "the pickle has more than 60000 values on its stack, the limit of statecli",
    ),
    "marks": (
        "MAX_OPEN_MARKS",
        b"(",
        "the pickle nests lists and calls more than 60000 levels deep, the limit of statecli",
    ),
}


@pytest.mark.parametrize("case", BUDGETS.values(), ids=BUDGETS)
def test_each_budget_ends_a_bomb(case, monkeypatch):
    """A pickle that only grows is stopped at the limit, and a pickle below the limit is read."""
    limit, body, message = case
    monkeypatch.setattr(machine, limit, 60_000)
    with pytest.raises(MalformedError, match=message):
        read_pickle(build_pickle(body * 120_000))
    if limit != "MAX_OPCODES":
        read_pickle(build_pickle(body * 55_000 + b"N"))


def test_the_budgets_leave_room_for_a_hundred_thousand_tensors():
    """A state_dict takes 32 opcodes, 8 memo entries and 3 objects for each tensor."""
    assert machine.MAX_OPCODES > 32 * 300_000
    assert machine.MAX_MEMO_ENTRIES > 8 * 300_000
    assert machine.MAX_OBJECTS > 3 * 300_000


def test_the_number_of_globals_is_bounded(monkeypatch):
    """The machine keeps each different name, so their number has a limit."""
    monkeypatch.setattr(machine, "MAX_GLOBALS", 10)
    body = b"".join(b"cm\n%d\n0" % n for n in range(machine.BURST_OPCODES))
    with pytest.raises(
        MalformedError, match="the pickle imports more than 10 functions and classes, the limit of statecli"
    ):
        read_pickle(build_pickle(body))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("data", "parse"),
    [(build_pickle(b"N"), nullcontext()), (b"\x80\x02\xff", pytest.raises(MalformedError))],
    ids=["a pickle", "an unknown opcode"],
)
def test_garbage_collector_keeps_its_state(enabled, data, parse):
    """The collector is off only during the parse, also when the parse fails."""
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with parse:
            read_pickle(data)
    finally:
        actual = gc.isenabled()
        (gc.enable if was_enabled else gc.disable)()
    assert actual is enabled


def test_nodes_print_without_walking():
    """A node's repr is short, because a repr of the graph can be exponential."""
    body = state_dict(w=tensor())
    value = read_pickle(body)
    for node in (value, value.root["w"], value.persistent[0], Key(value.root), SetOf([value.root]), value.globals[0]):
        assert len(repr(node)) < 60


class Stub:
    """Stands for any class in the oracle."""

    def __new__(cls, *args: object) -> Stub:
        instance = super().__new__(cls)
        instance.args, instance.state, instance.set = args, None, {}
        return instance

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        self.set[key] = value


class Oracle(pickle.Unpickler):
    """Python's unpickler with every class a stub, as the benign reading of a pickle."""

    def find_class(self, module: str, name: str) -> type:
        return type(name, (Stub,), {"__module__": module})

    def persistent_load(self, pid: object) -> object:
        return ("pid", pid)


def equals_stub(graph: object, stub: object) -> bool:
    """Return whether our graph equals the stubs. For small graphs without cycles."""
    if type(graph) is Persistent:
        return isinstance(stub, tuple) and stub[0] == "pid" and equals_stub(graph.pid, stub[1])
    if type(graph) is Global:
        return isinstance(stub, type) and (stub.__module__, stub.__name__) == (graph.module, graph.name)
    if type(graph) is Obj:
        assert isinstance(stub, Stub)
        equal = (
            equals_stub(graph.args, stub.args),
            equals_stub(graph.state, stub.state),
            equals_stub(graph.items or {}, stub.set),
        )
        return equals_stub(graph.cls, type(stub)) and all(equal)
    if type(graph) is SetOf:
        return isinstance(stub, (set, frozenset)) and sorted(map(repr, graph.elems)) == sorted(map(repr, stub))
    if type(graph) is dict:
        assert isinstance(stub, dict)
        unwrapped = [key.value if type(key) is Key else key for key in graph]
        return unwrapped == list(stub) and all(map(equals_stub, graph.values(), stub.values()))
    if type(graph) in (list, tuple):
        return type(graph) is type(stub) and len(graph) == len(stub) and all(map(equals_stub, graph, stub))
    return type(graph) is type(stub) and graph == stub


def torch_objects() -> dict[str, object]:
    """Return what users save: a state_dict, a module, a training checkpoint, views, odd dtypes, subclasses, sparse."""
    import torch
    from torch import nn

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    sum(p.sum() for p in net.parameters()).backward()
    optimizer.step()
    base = torch.arange(12.0)
    many_tensors = {f"layers.{n}.weight": torch.zeros(n % 5, 3, *[1] * (n % 6)) for n in range(80)}
    return {
        "state_dict": net.state_dict(),
        "module": net,
        "training": {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "lr": 1e-3},
        "parameters": dict(net.named_parameters()),
        "views": [base, base[2:], base.view(3, 4).t(), base.expand(2, 12)],
        "dtypes": [torch.zeros(2, dtype=d) for d in (torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool)],
        "conj": torch.zeros(3, dtype=torch.complex64).conj(),
        "scalars": {f"step{n}": torch.tensor(float(n)) for n in range(60)},
        "many": many_tensors,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(10**5, 10**5, device="meta"),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_real_pickles_agree_with_pickle_itself(protocol, tmp_path):
    """Both machines read a file of torch.save as Python's unpickler with stubs does."""
    import zipfile

    import torch

    for name, value in torch_objects().items():
        torch.save(value, tmp_path / "x.pt", pickle_protocol=protocol)
        with zipfile.ZipFile(tmp_path / "x.pt") as archive:
            data = archive.read("x/data.pkl")
        stub = Oracle(io.BytesIO(data)).load()
        for fast in (True, False):
            assert equals_stub(read_pickle(data, fast=fast).root, stub), (name, fast)


#: An opcode of each form of argument, whose bytes are `.` where they may be.
OPCODES_WITH_DOTS = (
    *(b"K.", b"M..", b"J....", b"G........", b"\x8a\x02..", b"\x8b\x02\0\0\0..", b"X\x02\0\0\0..", b"\x8c\x02.."),
    *(b"\x8d\x02\0\0\0\0\0\0\0..", b"U\x02..", b"T\x02\0\0\0..", b"B\x02\0\0\0..", b"C\x02..", b"Nq.", b"Nr...."),
    *(b"\x8e\x02\0\0\0\0\0\0\0..", b"\x96\x02\0\0\0\0\0\0\0..", b"Np46\n", b"I46\n", b"F1.\n", b"L46L\n", b"S'..'\n"),
    *(b"V..\n", b"ca.b\nc.d\n", b"Nq.h.", b"Nr....j....", b"Np46\ng46\n", b"P..\n", b"\x82.", b"\x83..", b"\x84...\0"),
    *(b"(ia\n..\n", b"\x80\x02", b"\x95.......\0" + 20 * b"."),
)


@pytest.mark.parametrize("piece", OPCODES_WITH_DOTS)
def test_truncated_opcode_is_a_truncated_pickle(piece):
    """A window of the scan may end at any byte, so its last byte may equal STOP."""
    for end in range(1, len(piece) + 1):
        _, error = PickleReader("a.pkl", Steps()).scan(piece[:end], "the file", 2**60)
        assert isinstance(error, TruncatedPickle)
