"""Code that loading the pickles of a checkpoint would run."""

from __future__ import annotations

import _codecs
import copy
import datetime
import functools
import io
import operator
import pickle
import random
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity
from statecli.targets.target_result import TargetStatus

from ..formats.attacks import (
    Called,
    Member,
    build,
    build_pickle,
    call_function,
    global_name,
    number,
    records,
    stack_global,
    state_dict,
    tensor,
    text,
)

RANDOM = "numpy.random._pickle"
RULES = ("unsafe-global", "unknown-global", "whole-module-pickle", "nested-pickle", "unscanned-pickle")


def write_archive(path, data=None, *other_records):
    """Write a small good archive with the given pickle and with additional records."""
    path.write_bytes(build([*records(data), *other_records]))
    return path


def audit_target(target, *rules):
    """Result for the single target of an audit with the rules about pickles."""
    (result,) = audit(Request((str(target),), select=rules or RULES)).targets
    return result


def test_unsafe_global_finds_a_call_next_to_the_tensors(run_rule, tmp_path):
    """The message has the name, the harm, and the byte in the pickle. The place is the byte in the file."""
    pickle = state_dict(w=tensor(), x=call_function(global_name("os", "system"), text("true")))
    path = write_archive(tmp_path / "a.pt", pickle)
    (finding,) = run_rule("unsafe-global", path)
    position = pickle.index(b"cos\n")
    assert finding.message == (
        f"loading the file calls os.system, which runs shell commands (record archive/data.pkl, byte {position})"
    )
    assert path.read_bytes()[finding.place.offset :].startswith(b"cos\nsystem")
    assert finding.severity is Severity.ERROR


def test_unsafe_global_spares_calls_that_build_data(run_rule, tmp_path):
    """A text in a dict is not a name, even if the text looks like a name."""
    pickle = state_dict(w=tensor(), x=call_function(global_name("collections", "OrderedDict")), y=text("os.system"))
    assert not run_rule("unsafe-global", write_archive(tmp_path / "a.pt", pickle))


def test_unsafe_global_finds_a_changed_clean_class(tmp_path):
    """Attributes set on a class and items set in the dict of a module affect every user of the class or module."""
    for change in (b"N}" + text("update") + global_name("_codecs", "encode") + b"s\x86b", text("a") + text("b") + b"s"):
        pickle = state_dict(w=tensor(), x=global_name("collections", "OrderedDict") + change)
        (finding,) = audit_target(write_archive(tmp_path / "a.pt", pickle), "unsafe-global").findings
        assert (
            "collections.OrderedDict, which is modified by the pickle; the change affects the whole Python process"
        ) in finding.message


def test_the_classes_of_a_table_of_pandas_are_unknown(run_rule, tmp_path):
    """A pickled table evaluates no expression and reads no file. Other functions of pandas do."""
    tables = [("pandas", "DataFrame"), ("pandas.core.frame", "DataFrame"), ("pandas.core.indexes.base", "_new_Index")]
    harmful = [("pandas", "read_pickle"), ("pandas", "eval"), ("pandas.core.indexes.base", "lib.np.f2py.compile")]
    for rule, names in (("unknown-global", tables), ("unsafe-global", harmful)):
        for module, name in names:
            pickle = state_dict(w=tensor(), x=call_function(stack_global(module, name)))
            (finding,) = run_rule(rule, write_archive(tmp_path / "a.pt", pickle))
            assert finding.about == f"{module}.{name}"


def test_unsafe_global_spares_a_set_under_the_name_of_a_method(run_rule, tmp_path):
    """A CfgNode of yacs, which detectron2 saves, has a set at `__deprecated_keys__`. A partial could be called."""
    for value, is_reported in (({"a"}, False), (frozenset(), False), (functools.partial(torch.nn.Linear), True)):
        torch.save({"w": torch.ones(1), "cfg": {"__deprecated_keys__": value}}, tmp_path / "a.pt")
        assert bool(run_rule("unsafe-global", tmp_path / "a.pt")) is is_reported


def test_unsafe_global_spares_a_partial_of_clean_names(run_rule, tmp_path):
    """Whole modules defer calls with a partial. A partial of a harmful name is as bad as a call of the name."""
    harmless_partial = call_function(global_name("functools", "partial"), global_name("torch.nn.functional", "gelu"))
    assert not run_rule("unsafe-global", write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=harmless_partial)))
    harmful_partial = call_function(global_name("functools", "partial"), global_name("os", "system"))
    (finding,) = run_rule("unsafe-global", write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=harmful_partial)))
    assert finding.about == "os.system"


class GeneratorAtPosition:
    """A generator of numpy whose state has another position."""

    def __init__(self, kind, key, position):
        self.maker, self.args, (state, self.seed) = kind(1).__reduce__()
        self.state = copy.deepcopy(state)
        (self.state["state"] if key in self.state["state"] else self.state)[key] = position

    def __reduce__(self):
        return self.maker, self.args, (self.state, self.seed)


@pytest.mark.parametrize(
    ("kind", "key", "positions_inside", "positions_outside"),
    [
        (np.random.MT19937, "pos", (0, 624), (-1, 625, 2**31 - 1)),
        (np.random.Philox, "buffer_pos", (0, 4), (-1, 5)),
    ],
)
def test_generator_position_outside_its_table_is_unsafe(
    run_rule, tmp_path, kind, key, positions_inside, positions_outside
):
    """numpy accepts any position, and reads memory at the position for the next random number."""
    for position in (*positions_inside, *positions_outside):
        torch.save({"w": torch.ones(1), "generator": GeneratorAtPosition(kind, key, position)}, tmp_path / "a.pt")
        assert len(run_rule("unsafe-global", tmp_path / "a.pt")) == (position in positions_outside)


TABLE = np.random.RandomState(0).get_state()[1]
RECORD = np.array((TABLE, 2**30), dtype=[("key", "u4", (624,)), ("pos", "i8")])
RANDOM_STATE = np.random._pickle.__randomstate_ctor
SEED = np.random.SeedSequence(3).__reduce__()


@pytest.mark.parametrize(
    ("parts", "is_sound"),
    [
        ((RANDOM_STATE, (), ("MT19937", TABLE, 624, 0, 0.0)), True),
        ((RANDOM_STATE, (), ("MT19937", TABLE, 625, 0, 0.0)), False),
        ((RANDOM_STATE, (), ("MT19937", TABLE, 10**9)), False),
        ((RANDOM_STATE, (), OrderedDict(bit_generator="MT19937", state={"key": TABLE, "pos": 10**9})), False),
        ((RANDOM_STATE, (), {"bit_generator": "MT19937", "state": OrderedDict(key=TABLE, pos=10**9)}), False),
        ((RANDOM_STATE, (), ["MT19937", TABLE, 10**9]), False),
        ((RANDOM_STATE, (), (Called(str, ("MT19937",)), TABLE, 2**30, 0, 0.0)), False),
        ((RANDOM_STATE, (), ("MT19937", TABLE, Called(int, ("624",)), 0, 0.0)), False),
        ((RANDOM_STATE, (), {"bit_generator": "MT19937", "state": RECORD}), False),
        (
            (RANDOM_STATE, (), {"bit_generator": "MT19937", "state": {"key": TABLE, Called(str, ("pos",)): 2**30}}),
            False,
        ),
        ((RANDOM_STATE, (), {"bit_generator": "MT19937", "state": {"key": RECORD, "pos": 3}}), False),
        ((RANDOM_STATE, (), {"bit_generator": "MT19937", "state": {"key": list(range(624)), "pos": 3}}), False),
        ((RANDOM_STATE, (), ({"bit_generator": "MT19937", "state": {"key": TABLE, "pos": 3}}, OrderedDict())), False),
        ((RANDOM_STATE, (), {"bit_generator": "MT19937", "state": {"key": TABLE, "pos": 3}, "has_gauss": 0}), True),
        ((RANDOM_STATE, (), (2, "MT19937", TABLE, 2**30, 0)), False),
        (SEED, True),
        ((*SEED[:2], ({"a": 1}, *SEED[2][1:])), False),
        ((*SEED[:2], (*SEED[2][:3], 10**8, ())), False),
    ],
)
def test_generator_state_that_numpy_does_not_write_is_unsafe(run_rule, tmp_path, parts, is_sound):
    """numpy reads the position from tuples, lists and mappings, and walks through a seed with any pool."""
    torch.save({"w": torch.ones(1), "generator": Called(*parts)}, tmp_path / "a.pt")
    assert (not run_rule("unsafe-global", tmp_path / "a.pt")) == is_sound


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_generators_of_numpy_are_clean(kind, protocol, run_rule, tmp_path):
    """Each class, in each protocol, with its seed and its children, before and after draws."""
    bits = getattr(np.random, kind)(np.random.SeedSequence([5, 6]).spawn(2)[1])
    generators = [np.random.Generator(bits), bits, np.random.RandomState(bits), np.random.SeedSequence(7)]
    generators[2].standard_normal()
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"x": generators, "y": random.Random(3)}, protocol))  # noqa: S311
    assert not run_rule("unsafe-global", tmp_path / "a.pkl")


NUMBERS = random.Random(3).getstate()[1]  # noqa: S311


@pytest.mark.parametrize(
    ("state", "is_sound"),
    [
        ((3, NUMBERS, None), True),
        ((3, NUMBERS, 0.5), True),
        ((2, NUMBERS, None), True),
        ((2, ("%8000000000d",), None), False),
        ((3, ("%8000000000d", *NUMBERS[1:]), None), False),
        ((2, range(10**12), None), False),
        ((2, b"x" * 625, None), False),
        ((Called(int, ("2",)), NUMBERS, None), False),
        ([2, ("%8000000000d",), None], False),
        ((2, NUMBERS, "x"), False),
    ],
)
def test_random_state_that_python_does_not_write_is_unsafe(state, is_sound, run_rule, tmp_path):
    """Python computes with a state of version 2: the remainder of a text is the formatted text."""
    torch.save({"w": torch.ones(1), "x": Called(random.Random, (), state)}, tmp_path / "a.pt")
    assert (not run_rule("unsafe-global", tmp_path / "a.pt")) == is_sound
    if state == (2, ("%8000000000d",), None):
        assert (2, ("%80d",), None)[1][0] % 2**32 == "4294967296".rjust(80)


@pytest.mark.parametrize(
    ("parts", "is_sound"),
    [
        ((UnicodeDecodeError, ("utf-8", b"x\xff", 1, 2, "r")), False),
        ((UnicodeDecodeError, ("utf-8", b"x", -(2**40), -(2**40) + 1, "r")), False),
        ((UnicodeDecodeError, ("utf-8", b"x", 2**40, 2**40 + 1, "r")), False),
        ((UnicodeEncodeError, ("ascii", "x", 1, 2, "r")), False),
        ((UnicodeDecodeError, ("utf-8", b"x", Called(int, ("-99999",)), 1, "r")), False),
        ((UnicodeDecodeError, ("utf-8", Called(bytearray, (b"x",)), 0, 1, "r")), False),
        ((UnicodeDecodeError, ("utf-8", b"x", 0, 1, "r"), {"start": -(2**40)}), False),
        ((UnicodeDecodeError, ("utf-8", b"x", 0, 1, "r"), {Called(str, ("start",)): -(2**40)}), False),
        ((ValueError, ("x",), {"args": (1,)}), False),
        ((ValueError, ("x",), {"note": ["n"]}), True),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_error_with_an_unchecked_position_is_unsafe(parts, is_sound, protocol, run_rule, tmp_path):
    """The message of the error reads memory at the position, without regard to the length of the bytes."""
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": 1, "error": Called(*parts)}, protocol))
    assert (not run_rule("unsafe-global", tmp_path / "a.pkl")) == is_sound


@pytest.mark.parametrize(
    ("value", "is_sound"),
    [
        (datetime.date(2026, 11, 26), True),
        (datetime.date.max, True),
        (datetime.datetime(2026, 11, 26, 5, 30, 1, 999_999, fold=1), True),
        (datetime.datetime(2026, 11, 26, tzinfo=datetime.timezone.utc), True),
        (datetime.time(23, 59, 59, 1, fold=1), True),
        (Called(datetime.date, (2026, 11, 26)), True),
        (Called(datetime.date, (b"\0\0\1\0",)), False),
        (Called(datetime.date, (b"\x07\xea\2\x1e",)), False),
        (Called(datetime.date, (Called(bytes, (b"\0\0\1\0",)),)), False),
        (Called(datetime.datetime, (b"\0\0\1\0" + b"\0" * 6,)), False),
        (Called(datetime.datetime, (b"\x07\xea\1\1\x18" + b"\0" * 5,)), False),
        (Called(datetime.time, (b"\x18" + b"\0" * 5,)), False),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_date_from_invalid_bytes_is_unsafe(value, is_sound, protocol, run_rule, tmp_path):
    """Python checks only the month of a pickled date, and the methods of a date read next to their tables."""
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": 1, "when": value}, protocol))
    assert (not run_rule("unsafe-global", tmp_path / "a.pkl")) == is_sound


@pytest.mark.parametrize(
    ("load", "use"),
    [
        (Called(UnicodeDecodeError, ("utf-8", b"x", -(2**40), -(2**40) + 1, "r")), "str(x)"),
        (Called(datetime.date, (b"\0\0\1\0",)), "x.ctime()"),
        (Called(RANDOM_STATE, (), (Called(str, ("MT19937",)), TABLE, 2**30, 0, 0.0)), "x.rand()"),
        (Called(RANDOM_STATE, (), {"bit_generator": "MT19937", "state": RECORD}), "x.rand()"),
    ],
)
def test_use_of_a_position_outside_crashes_python(load, use):
    """The tests above show a finding for each value. Here Python reads memory outside the value."""
    code = f"import pickle, numpy; x = pickle.loads({pickle.dumps(load, 4)!r}); {use}"
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    if sys.version_info < (3, 13) or "str" not in use:  # later ones keep positions within the text
        assert process.returncode < 0


def test_unsafe_global_finds_sparse_tensors_with_unchecked_indices(run_rule, tmp_path, save_checkpoint):
    """torch.save builds sparse tensors from listed tensors. A legacy class and a plain pickle bring other indices."""
    indices, values, size = torch.tensor([[10**9]]), torch.ones(1), torch.Size([4])
    sparse_tensor = torch.sparse_coo_tensor(indices % 4, values, size)
    assert not run_rule("unsafe-global", save_checkpoint({"w": sparse_tensor}, "good.pt"))
    torch.save({"w": Called(torch.sparse.FloatTensor, (indices, values, size))}, tmp_path / "class.pt")
    arguments = (torch.sparse_coo, (indices, values, size, True))
    with (tmp_path / "plain.pkl").open("wb") as file:
        pickle.dump({"w": Called(torch._utils._rebuild_sparse_tensor, arguments)}, file)
    for name in ("class.pt", "plain.pkl"):
        messages = [finding.message for finding in run_rule("unsafe-global", tmp_path / name)]
        assert any("creates a sparse tensor whose indices neither torch" in message for message in messages)


@pytest.mark.parametrize("name", ["keys", "items", "copy", "__len__"])
def test_unsafe_global_finds_a_state_dict_that_hides_its_items(run_rule, tmp_path, save_checkpoint, name):
    """`load_state_dict` would load nothing, and `strict=False` would not report missing keys."""
    state = OrderedDict(weight=torch.ones(2))
    state._metadata = OrderedDict()
    assert not run_rule("unsafe-global", save_checkpoint(state, "good.pt"))
    setattr(state, name, OrderedDict)
    torch.save(state, tmp_path / "bad.pt")
    assert any(
        "is restored from a state that no checkpoint needs" in finding.message
        for finding in run_rule("unsafe-global", tmp_path / "bad.pt")
    )


def test_allocation_bomb_finds_a_pattern_of_many_ranges(run_rule, tmp_path):
    """For a class without regard to case, `re` goes through each range character by character."""
    ranges = "".join(f"{chr(256 + n)}-\ud7ff" for n in range(1000))
    encoded = "".join(f"{chr(256 + n % 64)}-{chr(0x7E00 + n // 64)}" for n in range(1000))
    encoded = f"[{encoded}]".encode("utf-16-le")
    assert encoded.isascii()
    decoded = [Called(kind, (encoded, "utf-16-le")) for kind in (str, np.str_)]
    decoded += [Called(str, (Called(_codecs.encode, (encoded.decode(), "latin1")), "utf-16-le"))]
    for pattern in (f"[{ranges}]", f"[{ranges.encode('unicode_escape').decode()}]", *decoded):
        torch.save({"w": torch.ones(1), "x": Called(re._compile, (pattern, 2))}, tmp_path / "bad.pt")
        (finding,) = run_rule("allocation-bomb", tmp_path / "bad.pt")
        assert "compile regular expressions" in finding.message
    torch.save({"w": torch.ones(1), "x": re.compile("[A-Za-z0-9_-]+" * 20)}, tmp_path / "good.pt")
    assert not run_rule("allocation-bomb", tmp_path / "good.pt")


@pytest.mark.parametrize("args", [(text("MT19937"),), (text("MT19937"), global_name(RANDOM, "__bit_generator_ctor"))])
def test_unsafe_global_spares_a_random_state_of_any_numpy(args, run_rule, tmp_path):
    """numpy 1.24 to 1.26 also write the function for creating the bit generator by name."""
    pickle = state_dict(w=tensor(), x=call_function(global_name(RANDOM, "__randomstate_ctor"), *args))
    assert not run_rule("unsafe-global", write_archive(tmp_path / "a.pt", pickle))


def test_unknown_global_finds_an_unknown_class(run_rule, tmp_path):
    """The pickle calls the name or only mentions the name."""
    pickle = state_dict(w=tensor(), x=call_function(global_name("my.config", "Config")), y=b"cmy.config\nOther\n")
    first, second = run_rule("unknown-global", write_archive(tmp_path / "a.pt", pickle))
    assert first.message.startswith(
        "loading the file calls my.config.Config, which is not on the allow-list of torch and plain-data types"
    )
    assert second.message.startswith("loading the file imports my.config.Other")
    assert first.severity is Severity.WARNING


def test_local_module_finds_a_class_of_a_file_next_to_the_checkpoint(tmp_path):
    """The finding replaces the warning about an unknown name, and asks to read the file."""
    path = write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=call_function(global_name("net", "Config"))))
    (tmp_path / "net.py").write_text("class Config: ...\n")
    (finding,) = audit_target(path, "local-module", "unknown-global", "unsafe-global").findings
    assert (finding.rule, finding.severity) == ("local-module", Severity.ERROR)
    assert "calls net.Config, which Python may import from " in finding.message
    assert finding.help.startswith("read ")


def test_local_module_spares_a_harmful_name_and_a_file_that_no_name_imports(tmp_path):
    """A harmful name stays harmful next to a file of its name; a script that no name imports does not run."""
    path = write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=call_function(global_name("posix", "system"))))
    for file in ("posix.py", "train.py"):
        (tmp_path / file).touch()
    (finding,) = audit_target(path, "local-module", "unknown-global", "unsafe-global").findings
    assert finding.rule == "unsafe-global"


def test_unknown_global_spares_the_class_of_a_whole_module(run_rule, tmp_path):
    """`whole-module-pickle` reports the class."""
    state = b"}(" + text("_parameters") + b"}" + text("w") + tensor() + b"s" + text("_buffers") + b"}"
    pickle = build_pickle(b"c__main__\nNet\n)\x81" + state + text("_modules") + b"}ub")
    path = write_archive(tmp_path / "a.pt", pickle)
    assert not run_rule("unknown-global", path)
    (finding,) = run_rule("whole-module-pickle", path)
    assert "__main__.Net" in finding.message


def test_whole_module_pickle_finds_a_module(run_rule, save_checkpoint):
    """A file has a single finding, with the classes of the module."""
    (finding,) = run_rule("whole-module-pickle", save_checkpoint(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert "torch.nn.modules.linear.Linear, torch.nn.modules.container.Sequential" in finding.message


def test_whole_module_pickle_spares_its_state_dict(run_rule, tmp_path):
    """The state_dict of the module has the same weights."""
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict(), tmp_path / "a.pt")
    assert not run_rule("whole-module-pickle", tmp_path / "a.pt")


def test_nested_pickle_finds_pickles_in_a_record_and_in_a_string(run_rule, tmp_path):
    """Both pickles are read, and their names are checked like all other names."""
    inner = build_pickle(call_function(global_name("os", "system"), text("true")))
    pickle = state_dict(w=tensor(), x=b"B" + len(inner).to_bytes(4, "little") + inner)
    path = write_archive(tmp_path / "a.pt", pickle, Member("archive/extra/hook", inner))
    assert len(run_rule("nested-pickle", path)) == 2
    assert len(run_rule("unsafe-global", path)) == 2


def test_nested_pickle_spares_bytes_that_begin_like_a_pickle(run_rule, tmp_path):
    """Elements of a tensor may be any bytes."""
    path = tmp_path / "a.pt"
    path.write_bytes(build(records(storages={"0": b"\x80\x02\x7d\xff" * 4})))
    assert not run_rule("nested-pickle", path)
    assert not run_rule("unscanned-pickle", path)


def test_unscanned_pickle_finds_a_truncated_pickle(tmp_path):
    """The pickle runs up to the error. Its call is a finding, and the unread rest is another finding."""
    (tmp_path / "a.pkl").write_bytes(
        build_pickle(call_function(global_name("os", "system"), text("true")))[:-1] + b"\xff"
    )
    result = audit_target(tmp_path / "a.pkl")
    assert result.status is TargetStatus.AUDITED
    assert [finding.rule for finding in result.findings] == ["unsafe-global", "unscanned-pickle"]
    assert "unknown opcode 0xff" in result.findings[1].message


def test_unscanned_pickle_spares_a_complete_pickle(run_rule, tmp_path):
    """The pickle is compressed, but not a bomb."""
    members = records()
    members[0].method = 8
    (tmp_path / "a.pt").write_bytes(build(members))
    assert not run_rule("unscanned-pickle", tmp_path / "a.pt")


def test_unknown_global_lists_a_hundred_of_a_thousand_names(tmp_path):
    """A single message gives the number of the remaining findings."""
    names = b"".join(f"cm{n}\nf\n".encode() for n in range(1000))
    findings = audit_target(
        write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=b"](" + names + b"e")), "unknown-global"
    ).findings
    assert len(findings) == 101
    assert "and 900 more findings of this rule in the file" in {finding.message for finding in findings}


def test_nested_pickle_spares_the_pickle_of_a_damaged_archive(tmp_path):
    """Without its directory or behind other bytes, `data.pkl` still belongs to the archive."""
    archive = write_archive(tmp_path / "a.pt").read_bytes()
    for damaged in (archive[:-100], b"#!/bin/sh\n" + archive):
        (tmp_path / "a.pt").write_bytes(damaged)
        assert {finding.rule for finding in audit_target(tmp_path / "a.pt").findings} <= {"unscanned-pickle"}


def test_allocation_bomb_finds_a_call_that_allocates_gigabytes(run_rule, tmp_path):
    """The message has the size, the name and the byte of the name."""
    pickle = state_dict(w=tensor(), x=call_function(global_name("builtins", "bytearray"), number(2**36)))
    (finding,) = run_rule("allocation-bomb", write_archive(tmp_path / "a.pt", pickle))
    start = pickle.index(b"cbuiltins")
    assert (
        finding.message
        == f"loading the file allocates 64.0 GiB in calls to builtins.bytearray (record archive/data.pkl, byte {start})"
    )
    assert finding.severity is Severity.ERROR


def test_allocation_bomb_spares_a_tensor_that_repeats_its_storage(run_rule, tmp_path):
    """An expanded tensor has as many bytes as its storage, a range has no bytes, and 8 MiB are not a bomb."""
    large_bytearray = call_function(global_name("builtins", "bytearray"), number(2**23))
    unused = call_function(global_name("builtins", "range"), number(2**40))
    pickle = state_dict(w=tensor(size=(2**40,), stride=(0,)), x=large_bytearray, y=unused)
    assert not run_rule("allocation-bomb", write_archive(tmp_path / "a.pt", pickle))


def test_array_of_numbers_is_not_scanned(tmp_path):
    """Arrays of numbers and arrays with fields are not scanned, even if their bytes are a pickle."""
    import numpy

    inner = numpy.frombuffer(
        build_pickle(call_function(global_name("os", "system"), text("true"))).ljust(64, b"."), "u1"
    )
    for array in (inner, inner.view([("a", "<i4"), ("b", "<f4")])):
        numpy.save(tmp_path / "a.npy", array)
        (tmp_path / "a.pt").write_bytes(build([*records(), Member("archive/a.npy", (tmp_path / "a.npy").read_bytes())]))
        assert not audit_target(tmp_path / "a.pt").findings


def test_each_finding_has_a_help_text(tmp_path):
    """A reader of a log has no page of the rules at hand, so the findings of all five rules have a help text."""
    nested = Member("archive/extra/hook", build_pickle(call_function(global_name("os", "system"), text("true"))))
    pickle = state_dict(
        w=tensor(), x=call_function(global_name("os", "system"), text("true")), y=global_name("my.config", "Config")
    )
    torch.save(torch.nn.Linear(1, 1), tmp_path / "whole.pt")
    (tmp_path / "b.pkl").write_bytes(build_pickle(text("a"))[:-1] + b"\xff")
    targets = write_archive(tmp_path / "a.pt", pickle, nested), tmp_path / "b.pkl", tmp_path / "whole.pt"
    findings = [finding for target in targets for finding in audit_target(target).findings]
    assert {finding.rule for finding in findings} == set(RULES)
    assert all(finding.help for finding in findings)


def test_truncated_archive_with_empty_records_has_one_finding(tmp_path):
    """An empty record and the next one are not an archive in the archive."""
    torch.save({f"w{n}": torch.zeros(0) for n in range(30)}, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-40])
    (finding,) = audit_target(tmp_path / "a.pt").findings
    assert "searching for headers" in finding.message


def test_archive_in_a_truncated_archive_is_scanned(tmp_path):
    """The records of the inner archive have headers of their own."""
    inner = build(records(state_dict(w=tensor(), x=call_function(global_name("os", "system"), text("true")))))
    path = write_archive(tmp_path / "a.pt", None, Member("archive/extra/inner.zip", inner))
    path.write_bytes(path.read_bytes()[:-40])
    assert "unsafe-global" in {finding.rule for finding in audit_target(path).findings}


def test_very_long_name_is_truncated(tmp_path):
    """The message truncates the name of an import and the name of an overwritten attribute."""
    long_name = "n" * 70_000
    hidden = (
        call_function(global_name("argparse", "Namespace"))
        + b"}"
        + text(f"__{long_name}__")
        + global_name("builtins", "dict")
        + b"sb"
    )
    for body in (hidden, global_name("os", long_name), call_function(global_name(long_name, long_name))):
        path = write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=body))
        findings = audit_target(path).findings
        assert findings
        assert max(len(finding.message) for finding in findings) < 1_000


HOOKS = b"ccollections\nOrderedDict\n"


def build_record_pickle():
    """A pickle by torch. The values before the tensor already contain all names of the tensor."""
    named_before = [OrderedDict, torch._utils._rebuild_tensor_v2, torch.FloatStorage, "storage", "cpu"]
    torch.save({"before": named_before, "w": torch.zeros(2)}, buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as archive:
        pickle = archive.read("archive/data.pkl")
    assert pickle.count(HOOKS) == 1
    return pickle


@pytest.mark.parametrize("name", ["transformers.training_args\nTrainingArguments", "accelerate.state\nPartialState"])
def test_call_of_a_tensor_is_found_if_its_name_is_in_the_memo(name, tmp_path):
    """pickle calls the class of the tensor's hooks, so another class in the same place is called as well."""
    path = write_archive(tmp_path / "a.pt", build_record_pickle().replace(HOOKS, f"c{name}\n".encode()))
    assert name.replace("\n", ".") in {finding.about for finding in audit_target(path, "unsafe-global").findings}
    assert not audit_target(write_archive(tmp_path / "a.pt", build_record_pickle()), "unsafe-global").findings


def test_torchscript_class_is_clean_only_in_torchscript(tmp_path):
    """Next to constants the class is TorchScript. In other files and in unread records, Python imports the class."""
    net = global_name("__torch__.evil", "Net") + b")\x81"
    path, constants = tmp_path / "a.pt", Member("archive/constants.pkl", build_pickle(b")"))
    assert not audit_target(write_archive(path, state_dict(w=tensor(), x=net), constants), "unsafe-global").findings
    (finding,) = audit_target(write_archive(path, state_dict(w=tensor(), x=net)), "unsafe-global").findings
    assert finding.message.startswith(
        "loading the file calls __torch__.evil.Net, which is a TorchScript class, but the file has no TorchScript"
    )
    hidden = Member("archive/extra/hook.pkl", build_pickle(net))
    (finding,) = audit_target(write_archive(path, state_dict(w=tensor()), constants, hidden), "unsafe-global").findings
    assert finding.about == "__torch__.evil.Net"


def test_builtin_is_reported_under_its_current_name(tmp_path):
    """Pickles of the first protocols contain `__builtin__`, an old name of `builtins`."""
    for module in ("__builtin__", "builtins"):
        path = write_archive(
            tmp_path / "a.pt", state_dict(w=tensor(), x=call_function(global_name(module, "len"), text("a")))
        )
        (finding,) = audit_target(path, "unsafe-global").findings
        assert finding.message.startswith(
            "loading the file calls builtins.len, which gives access to Python's built-in functions"
        )


def test_a_configuration_may_name_the_types_of_its_values(tmp_path):
    """Configurations of omegaconf name types next to each of their dicts and lists."""
    types = text("ref_type") + global_name("typing", "Any") + text("object_type") + global_name("builtins", "dict")
    metadata = global_name("omegaconf.base", "ContainerMetadata") + b")\x81}(" + types + b"ub"
    config = global_name("omegaconf.dictconfig", "DictConfig") + b")\x81}" + text("_metadata") + metadata + b"sb"
    assert not audit_target(write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=config))).findings


@pytest.mark.parametrize("name", ["signal.SIG_DFL", "socket.AF_INET"])
def test_a_member_of_an_enumeration_is_data_by_its_own_name(name, tmp_path):
    """Older Pythons pickled a member by its name. No pickler changes a member."""
    member = global_name(*name.split("."))
    assert not audit_target(write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=member))).findings
    changed = state_dict(w=tensor(), x=member + b"}" + text("a") + b"Nsb")
    assert audit_target(write_archive(tmp_path / "a.pt", changed), "unsafe-global").findings


def test_itemgetter_is_unknown_unless_it_is_called(tmp_path):
    """`operator.itemgetter(1)` is kept, but not called."""
    torch.save({"w": torch.zeros(1), "by": operator.itemgetter(1)}, tmp_path / "a.pt")
    (finding,) = audit_target(tmp_path / "a.pt").findings
    assert (finding.rule, finding.severity) == ("unknown-global", Severity.WARNING)
    called_next = call_function(call_function(global_name("operator", "itemgetter"), text("a")), b"}")
    assert "unsafe-global" in {
        finding.rule
        for finding in audit_target(write_archive(tmp_path / "a.pt", state_dict(w=tensor(), x=called_next))).findings
    }
