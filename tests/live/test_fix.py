"""Each fix, pasted into its source, registers the tensor, and checkpoints of the unfixed model load."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch import nn

from statecli.core.model_state import Kind
from statecli.live.attribute_source import locate_variable
from statecli.live.build import build
from statecli.live.model_reader import read
from statecli.live.spec import parse_spec

HEADER = """
import collections, functools
class Holder: pass
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        n = 3
"""
#: (body of __init__, start of the fix, registered names after the fix)
FIXES = [
    ("self.t = torch.randn(n, n)", 'self.register_buffer("t", torch.randn(n, n))', ["t"]),
    ("self.t: object = torch.ones(\n            n,\n        )", 'self.register_buffer("t", torch.ones(', ["t"]),
    (
        "self.t = u = torch.ones(n)\n        u.add_(1)",
        'self.register_buffer("t", torch.ones(n), persistent=False)',
        ["t"],
    ),
    ("self.t = self.u = torch.ones(n, requires_grad=True)", "self.t = self.u = nn.Parameter(", ["t", "u"]),
    ("self.t, m = torch.ones(n), 2\n        m += 1", "# at the end of __init__:\nself.register_buffer", ["t"]),
    ("if n: self.t = torch.ones(n)", 'if n: self.register_buffer("t", torch.ones(n), persistent=False)', ["t"]),
    ("self.t = torch.ones(n); m = 2; self.m = m", 'self.register_buffer("t", torch.ones(n), per', ["t"]),
    ("if n: m = 1; self.b = [nn.PReLU()]; self.c = m  # both", "if n: m = 1; self.b = nn.Mod", ["b.0.weight"]),
    ("self.t = None\n        self.t = torch.ones(n)", "# at the end of __init__:\nself.register_buffer", ["t"]),
    ("self.t = torch.ones(n)\n        self.t = self.t + 1", "# at the end of __init__:\nself.register", ["t"]),
    ("for _ in range(2): self.t = torch.ones(n)", "# at the end of __init__:\nself.register_buffer", ["t"]),
    ("self.b = {}\n        self.b[3] = nn.PReLU()", "# at the end of __init__:\n# the keys", ["b.3.weight"]),
    ("self.b = {'type': nn.PReLU(), 'keys': nn.PReLU()}", "# the keys", ["b.keys_.weight", "b.type_.weight"]),
    ("self.p = {'type': nn.Parameter(torch.ones(n))}", "# the keys", ["p.type_"]),
    ("self.b = [[nn.PReLU()], [nn.PReLU()]]", "self.b = nn.ModuleList(nn.", ["b.0.0.weight", "b.1.0.weight"]),
    ("self.b = []\n        self.b.append((nn.PReLU(),))", "# at the end of __init__:\nself.b", ["b.0.0.weight"]),
    ("self.b = {'x': [nn.PReLU()]}", "self.b = nn.ModuleDict({key: ", ["b.x.0.weight"]),
    (
        "self.b = [('a', nn.PReLU())]",
        "# and iterate over the items() of the nn.ModuleDict\nself.b = nn.ModuleDict(",
        ["b.a.weight"],
    ),
    ("self.b = [nn.PReLU(), None]", "self.b = nn.ModuleList([nn.PReLU(), None])", ["b.0.weight"]),
    ("self.b = {'a.b': nn.PReLU(), 3: nn.PReLU()}", "# the keys", ["b.3.weight", "b.a_b.weight"]),
    ("self.b = collections.deque([nn.PReLU()])", "self.b = nn.ModuleList(", ["b.0.weight"]),
    ("self.p = [nn.Parameter(torch.ones(n))]", "self.p = nn.ParameterList(", ["p.0"]),
    ("self.a = [torch.ones(i) for i in (1, 2)]", "for i, tensor in enumerate([torch", ["a_0", "a_1"]),
    ("self.a = torch.ones(1), torch.ones(2)", "for i, tensor in enumerate((torch", ["a_0", "a_1"]),
    ("self.a = []\n        self.a.append(torch.ones(1))", "# at the end of __init__:\nfor i, tensor", ["a_0"]),
    ("self.a = {'x': torch.ones(1)}", "for key, tensor in {'x': torch.ones(1)}.items()", ["a_x"]),
    ("self.a = {'x.y': torch.ones(1), 2: torch.ones(1)}", "for key, tensor in {'x.y'", ["a_2", "a_x_y"]),
    ("vars(self)['t'] = torch.ones(1)", "# at the end of __init__:\nself.register_buffer", ["t"]),
    ("exec('self.t = torch.ones(1, requires_grad=True)')", "# at the end of __init__:\nself.t = nn.Parameter", ["t"]),
    # filled, or changed by methods that the new container lacks
    (
        "self.b = collections.defaultdict(list)\n        self.b['x'].append(nn.PReLU())",
        "# at the end",
        ["b.x.0.weight"],
    ),
    (
        "self.b = [0] * 2\n        for i in range(2): self.b[i] = nn.PReLU()",
        "# at the end",
        ["b.0.weight", "b.1.weight"],
    ),
    (
        "self.b = []\n        self.b.append(nn.PReLU())\n        self.b.reverse()",
        "# at the end of __init__",
        ["b.0.weight"],
    ),
    ("self.b = {}\n        self.b.setdefault('x', nn.PReLU())", "# at the end of __init__:\nself.b", ["b.x.weight"]),
    ("b = []\n        self.b = b\n        b.append(nn.PReLU())", "# at the end of __init__:\nself.b", ["b.0.weight"]),
    ("self.a = [torch.ones(i) for i in (1,)]\n        self.a.append(torch.ones(2))", "# at the end", ["a_0", "a_1"]),
    ("self.a = [torch.ones(1)]\n        n = len(self.a)", "# at the end of __init__:\nfor i, tensor", ["a_0"]),
    # a leaf that requires grad refuses to be changed in place
    ("self.t = torch.empty(n)\n        self.t.normal_()\n        self.t.requires_grad_()", "# at the end", ["t"]),
    # parts of one memory without a common element
    ("self.t, _ = torch.arange(5.).split([2, 3])\n        self.u = _", "# at the end of __init__:", ["t", "u"]),
    ("self.t, self.u = torch.ones(2, 2).unbind(-1)", "# at the end of __init__:\nself.register_buffer", ["t", "u"]),
    ("self.a = torch.arange(4.).chunk(2)", "for i, tensor in enumerate(torch.arange(4.).chunk(2)):", ["a_0", "a_1"]),
    # computed from a parameter that nothing registers
    ("self.t = nn.Parameter(torch.ones(n)).double()", "self.t = nn.Parameter(nn.Parameter(", ["t"]),
    ("self.p = [nn.Parameter(torch.ones(n)) * 2]", "self.p = nn.ParameterList([nn.Parameter(", ["p.0"]),
    ("self.__dict__['m'] = nn.PReLU()", "# at the end of __init__:\nself.m = self.__dict__.pop", ["m.weight"]),
]


def _indent_lines(fix: str, indent: str) -> str:
    return "".join(f"{indent}{line}\n" for line in fix.splitlines())


def _apply_fix(source: str, row) -> str:
    """Return `source` with the fix in place of the assignment, or at the end of __init__ if the fix says so."""
    indent = " " * 8
    if row.fix.startswith("# at the end"):
        return source.rstrip() + "\n" + _indent_lines(row.fix, indent)
    lines = source.splitlines(keepends=True)
    statement = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= row.origin.line - 2 <= node.end_lineno
    )
    lines[statement.lineno - 1 : statement.end_lineno] = [_indent_lines(row.fix, indent)]
    return "".join(lines)


def _find_unregistered(state):
    return next((t for t in state.tensors if t.kind is Kind.UNREGISTERED), None)


def _inspect_fixed(inspect, source: str):
    """Return the state of `source` after a fix for each further attribute that is not registered."""
    state = inspect(source)
    for _ in range(2):
        if row := _find_unregistered(state):
            source = _apply_fix(source, row)
            state = inspect(source)
    return state


def test_a_file_that_was_edited_is_read_again(write):
    """In a notebook, a class is edited and loaded again; the fix quotes the current line."""

    def show_fix(value: str) -> str:
        target = write(f"{HEADER}        self.t = {value}\n", name="edited.py")
        built = build(parse_spec(target))
        return read(built, target).tensors[0].fix

    assert "torch.ones(3)" in show_fix("torch.ones(3)")
    assert "torch.zeros(12)" in show_fix("torch.zeros(12)")


def _build(target: str) -> nn.Module:
    spec = parse_spec(target)
    assert spec is not None
    return build(spec).module


#: The last line of a fix that adds keys, and the last lines of a fix that may add keys.
LOADING = (
    r"^# older checkpoints lack (.+); "
    r"load_state_dict\(state, strict=False\) keeps initial values$"
)
IF_SAVED = (
    "# to save the value too, delete persistent=False, and load older checkpoints with\n"
    "# model.load_state_dict(state, strict=False)"
)


def _load_older_checkpoint(fixed: nn.Module, unfixed: nn.Module, fix: str) -> None:
    """Load a checkpoint of the unfixed model, with strict=False if the fix adds keys."""
    lacking = re.search(LOADING, fix, re.M)
    keys = fixed.load_state_dict(unfixed.state_dict(), strict=lacking is None)
    assert not keys.unexpected_keys
    if lacking is not None:
        pattern = re.escape(lacking.group(1)).replace(r"\*", ".*").replace(r",\ ", "|")
        assert keys.missing_keys
        assert all(re.fullmatch(pattern, key) for key in keys.missing_keys)


@pytest.mark.parametrize(("body", "start", "names"), FIXES)
def test_pasted_fix_registers_the_tensor_and_loads_older_checkpoints(inspect, write, body, start, names):
    """After the fix is pasted into the source, all tensors are registered and follow a move.

    A checkpoint of the unfixed model loads strictly, or the fix names the added keys and says how to load without them.
    """
    source = f"{HEADER}        self.other = nn.PReLU()\n        {body}\n"
    row = _find_unregistered(inspect(source))
    assert row.fix.startswith(start)
    fixed_source = _apply_fix(source, row)
    fixed = _inspect_fixed(inspect, fixed_source)
    assert sorted(t.fqn for t in fixed.tensors) == sorted([*names, "other.weight"])
    assert {t.kind for t in fixed.tensors} <= {Kind.PARAMETER, Kind.BUFFER}
    assert {t.moves for t in fixed.tensors} == {True}
    assert not fixed.oddities
    _load_older_checkpoint(_build(write(fixed_source)), _build(write(source)), row.fix)


def test_fix_of_a_random_tensor_is_a_persistent_buffer(inspect):
    """A value that each build draws again is kept in the checkpoint; a value that each build computes is not."""
    body = "self.random = torch.rand(3)\n        self.computed = torch.arange(3)\n"
    fixes = {row.fqn: row.fix for row in inspect(f"{HEADER}        {body}").tensors}
    assert fixes["random"].splitlines() == [
        'self.register_buffer("random", torch.rand(3))',
        "# older checkpoints lack random; load_state_dict(state, strict=False) keeps initial values",
    ]
    assert fixes["computed"] == 'self.register_buffer("computed", torch.arange(3), persistent=False)'


def test_fix_of_a_class_attribute_does_not_claim_a_rebuild(inspect):
    """Two instances share a class attribute, which does not show whether another process rebuilds the value."""
    source = "class Net(nn.Module):\n    t = torch.rand(5)\n    def __init__(self):\n        super().__init__()\n"
    (row,) = inspect(source).tensors
    assert row.fix.endswith(IF_SAVED)


def test_a_table_computed_from_a_large_random_parameter_is_random(inspect):
    """The values of large parameters are not drawn for a listing, but to check whether a computed table is random."""
    source = (
        f"{HEADER}        self.w = nn.Parameter(torch.randn(300, 300))\n        self.t = self.w.detach()[:3].clone()\n"
    )
    row = _find_unregistered(inspect(source))
    assert "persistent=False" not in row.fix


def test_fix_of_a_model_that_builds_only_once_does_not_claim_a_rebuild(inspect):
    """A constructor that fails the second time does not show whether the value is rebuilt."""
    source = (
        "count = []\n"
        + HEADER
        + "        count.append(1)\n        assert len(count) < 2\n        self.t = torch.ones(2)\n"
    )
    (row,) = inspect(source).tensors
    assert row.fix.endswith(IF_SAVED)


def test_a_second_build_prints_nothing(inspect, capfd):
    """The output of a constructor is printed only once."""
    (row,) = inspect(f"{HEADER}        print('built')\n        self.t = torch.ones(2)\n").tensors
    assert row.fix.endswith("persistent=False)")
    assert capfd.readouterr().err.count("built") == 1


def test_a_complex_table_stays_unregistered(inspect):
    """A cast of the model would drop the imaginary part of a complex buffer."""
    (row,) = inspect(f"{HEADER}        self.freqs = torch.polar(torch.ones(2), torch.ones(2))\n").tensors
    assert row.fix.splitlines() == [
        "# leave the tensor unregistered, and move it where forward reads it: freqs = self.freqs.to(x.device)",
        "# do not register a complex tensor: .half() or .to(torch.bfloat16) would drop the imaginary part",
    ]


@pytest.mark.parametrize(
    ("read", "is_moved"),
    [
        ("self.freqs.to(x.device)", True),
        ("self.freqs[: len(x)].to(x.device)", True),
        ("self.freqs", False),
        ("self.freqs.to(x.device) + self.freqs", False),
    ],
)
def test_a_complex_table_that_forward_moves_is_left(inspect, read, is_moved):
    """The tensor can stay unregistered, unless forward reads the table at another place without a move."""
    forward = f"    def forward(self, x):\n        return x * ({read})\n"
    source = f"{HEADER}        self.freqs = torch.polar(torch.ones(2), torch.ones(2))\n{forward}"
    first = inspect(source).tensors[0].fix.splitlines()[0]
    assert (first == "# leave the tensor unregistered: forward() moves it at each call") is is_moved


@pytest.mark.parametrize(
    ("value", "moved"),
    [
        ("[{0}]", "[part.to(x.device) for part in self.freqs]"),
        ("({0}, {0})", "[part.to(x.device) for part in self.freqs]"),
        ("{{'a': {0}}}", "{key: part.to(x.device) for key, part in self.freqs.items()}"),
    ],
)
def test_fix_moves_each_complex_table_of_a_container(inspect, value, moved):
    """A list does not have a .to() method."""
    table = value.format("torch.polar(torch.ones(2), torch.ones(2))")
    row = inspect(f"{HEADER}        self.freqs = {table}\n").tensors[0]
    assert row.fix.splitlines()[0].endswith(f": freqs = {moved}")


def test_fix_quotes_the_line_that_calls_the_setter(inspect):
    """The line to change is never inside a class's own __setattr__."""
    source = HEADER + (
        "        self.t = torch.ones(3)\n"
        "    def __setattr__(self, name, value):\n"
        "        return super().__setattr__(name, value)\n"
    )
    (row,) = inspect(source).tensors
    assert row.fix == 'self.register_buffer("t", torch.ones(3), persistent=False)'


def test_the_class_body_moves_into_init(inspect):
    """The fix deletes the class attribute and registers the tensor in __init__."""
    source = "class Net(nn.Module):\n    t = torch.arange(5)\n    def __init__(self):\n        super().__init__()\n"
    (row,) = inspect(source).tensors
    comment, line, *_ = row.fix.split("\n")
    assert comment.startswith("# delete t from the class body")
    fixed = source.replace("    t = torch.arange(5)\n", "") + f"        {line}\n"
    (row,) = inspect(fixed).tensors
    assert (row.fqn, row.kind, row.moves) == ("t", Kind.BUFFER, True)


def test_fix_first_deletes_a_class_attribute_of_the_same_name(inspect):
    """register_buffer refuses the name of a class attribute, so the fix says which attribute to delete first."""
    source = "class Net(nn.Module):\n    t = None\n    def __init__(self):\n        super().__init__()\n"
    (row,) = inspect(source + "        self.t = torch.ones(1)\n").tensors
    assert row.fix.startswith("# first delete the class attribute t")


def test_fix_of_a_tensor_before_super_init_goes_after_super_init(inspect):
    """A tensor assigned before super().__init__() can be registered only after super().__init__()."""
    source = (
        "class Net(nn.Module):\n    def __init__(self):\n        self.t = torch.ones(1)\n        super().__init__()\n"
    )
    (row,) = inspect(source).tensors
    assert row.fix.startswith("# after super().__init__():\nself.register_buffer")


def test_fix_uses_the_name_of_torch_nn_in_the_file(inspect):
    """A file that imports only torch gets torch.nn.Parameter; a file that renames nn gets its own name."""
    source = "import torch.nn as N\nclass Net(N.Module):\n    def __init__(self):\n        super().__init__()\n"
    (row,) = inspect("nn = None\n" + source + "        self.t = torch.ones(1, requires_grad=True)\n").tensors
    assert row.fix.startswith("self.t = nn.Parameter(torch.ones(1, requires_grad=True))\n#")


@pytest.mark.parametrize(
    ("body", "expected_text"),
    [
        ("k = torch.ones(1)\n        self.register_forward_hook(lambda *a: k)", "not from the function"),
        ("self.f = functools.partial(print, torch.ones(1))", "not from the partial"),
        (
            "self.h = Holder()\n        self.h.t = torch.ones(1)",
            "make Holder an nn.Module that registers t as a buffer",
        ),
        ("self.b = collections.namedtuple('Pair', 'x y')(nn.PReLU(), 1)", "a named tuple does not register them"),
        ("self.half = torch.ones(1)", "rename the attribute: Net has a method or a property half"),
        ("self.f = lambda x, s=torch.ones(1): x * s", "read it from the module, not from the function"),
        ("k = torch.ones(1, requires_grad=True)\n        self.f = lambda x: x * k", "in the module as an nn.Parameter"),
        (
            "k = nn.PReLU()\n        self.f = lambda x: k(x)",
            "an attribute of self, and read it there, not from the function",
        ),
        ("k = [torch.ones(1)]\n        self.fs = [lambda x: k]", "read it from the module, not from the list"),
        ("self.cfg = {'n': 4, 'mean': torch.ones(1)}", "read it from the module, not from the dict"),
        ("self.p = nn.PReLU()\n        setattr(self.p, 't', torch.ones(1))", "register t in the class PReLU"),
        ("self.w = nn.PReLU().weight.clone()", "to keep the values fixed, register a buffer"),
        ("self.fc = nn.PReLU()\n        self.w = self.fc.weight * 2", "compute the tensor in forward"),
        ("self.h = Holder()\n        self.h.net = nn.PReLU()", "make Holder an nn.Module"),
        ("self.d = torch.distributions.Normal(torch.zeros(1), 1.0)", "build the distribution in forward"),
        ("self.ps = [nn.Parameter(torch.ones(2)), torch.arange(3)]", "register the others"),
        ("self.x = self.y = torch.ones(3)", "read this name instead of y"),
        (
            "self.a = torch.ones(3)\n        self.b = self.a\n        self.c = self.a[1:]",
            "read this name instead of b, c",
        ),
        ("self.a = [torch.ones(3)] * 2", "read this attribute instead of a[1]"),
        ("self.a = [torch.ones(3, requires_grad=True)] * 2", "read this attribute instead of a[1]"),
        ("self.a = [torch.ones(3)]\n        self.b = self.a[0]", "read this name instead of a[0]"),
        ("self.a = torch.ones(2, 3)\n        self.b = self.a.t()", "instead of b (compute a view from it)"),
        ("self.b = [nn.PReLU(), 'relu']", "# keep the modules of b in an nn.ModuleList"),
        ("self.b = {1: nn.PReLU(), '1': nn.PReLU()}", "whose keys are strings"),
        (
            "self.w = nn.Parameter(torch.ones(1))\n        self.w.tag = torch.ones(1)",
            "does not reach attributes of a tensor",
        ),
    ],
)
def test_tensors_without_a_one_line_fix_get_a_comment(inspect, body, expected_text):
    """For closures, partials, other objects and distributions, a comment says what to change."""
    row = _find_unregistered(inspect(f"{HEADER}        {body}\n"))
    assert expected_text in row.fix
    assert all(line.startswith("#") or ast.parse(line) for line in row.fix.splitlines())


def test_fix_of_a_view_reads_the_larger_tensor(inspect, rows):
    """Of two tensors in the same memory, the larger is registered and the view is taken from it."""
    actual_rows = rows(inspect(f"{HEADER}        self.a = torch.ones(3)\n        self.v = self.a[1:]\n"))
    assert "read this name instead of v" in actual_rows["a"].fix
    assert "the tensor shares memory with a" in actual_rows["v"].fix
    assert all(line.startswith("#") for row in actual_rows.values() for line in row.fix.splitlines())


def test_fix_works_if_the_parent_class_assigns_the_attribute_first(inspect):
    """If parent and child both assign the attribute, the fix goes to the end of __init__ and takes over the name."""
    source = HEADER + "        self.t = None\nclass Child(Net):\n    def __init__(self):\n        super().__init__()\n"
    source += "        self.t = torch.ones(2)\n"
    (row,) = inspect(source, "Child").tensors
    (fixed,) = inspect(_apply_fix(source, row), "Child").tensors
    assert (fixed.fqn, fixed.kind, fixed.moves) == ("t", Kind.BUFFER, True)


METHODS = """
    def forward(self, x):
        {0}
        return x
    def __init__(self):
        super().__init__()
"""


def _inspect_with_forward(inspect, forward: str, body: str):
    source = "class Net(nn.Module):" + METHODS.format(forward) + f"        {body}\n"
    return source, _find_unregistered(inspect(source))


@pytest.mark.parametrize(
    "forward",
    [
        "self.t = 0.9 * self.t + 0.1 * x.mean()",
        "self.t += 1",
        "self.t.data.mul_(0.9)",
        "torch.batch_norm(x, None, None, self.t, self.t, True, 0.1, 1e-5, False)",
    ],
)
def test_a_value_that_forward_accumulates_is_saved(inspect, write, forward):
    """The constructor rebuilds only the first value of a running mean."""
    source, row = _inspect_with_forward(inspect, forward, "self.t = torch.zeros(3)")
    assert row.fix.startswith('self.register_buffer("t", torch.zeros(3))\n# older checkpoints lack t')
    _load_older_checkpoint(_build(write(_apply_fix(source, row))), _build(write(source)), row.fix)


@pytest.mark.parametrize("forward", ["self.t = torch.ones(4)", "self.t[:2] = x", "self.t.copy_(x)"])
def test_fix_of_a_cache_or_state_shows_both_kinds_of_buffer(inspect, write, forward):
    """An assignment that does not read the old value may be a cache, whose shape changes."""
    source, row = _inspect_with_forward(inspect, forward, "self.t = torch.zeros(3)")
    assert "persistent=False" in row.fix
    assert row.fix.endswith(IF_SAVED)
    _load_older_checkpoint(_build(write(_apply_fix(source, row))), _build(write(source)), row.fix)


@pytest.mark.parametrize(
    ("method", "is_saved"),
    [
        ("get_extra_state(self): return {'t': self.t}", True),
        ("state_dict(self, *args, **kw): return {**super().state_dict(*args, **kw), 'u': self.t}", True),
        ("get_extra_state(self): return {'shape': tuple(self.t.shape)}", False),
        ("get_extra_state(self): return {'first': self.t[0]}", False),
        (
            "state_dict(self, *args, **kw): assert self.t.isfinite().all(); return super().state_dict(*args, **kw)",
            False,
        ),
    ],
)
def test_a_tensor_is_saved_by_its_class_only_as_a_whole(inspect, method, is_saved):
    """A saved shape or a check in a saving method does not restore random values."""
    (row,) = inspect(f"{HEADER}        self.t = torch.randn(4)\n    def {method}\n").tensors
    assert ("persistent=False" in row.fix) == is_saved


def test_change_in_another_class_does_not_affect_the_fix(inspect):
    """A change to an attribute of the same name in another class does not count."""
    other = "class Other:\n    def step(self):\n        self.t += 1\n        self.b.pop()\n"
    body = "self.t = torch.zeros(3)\n        self.b = [nn.PReLU()]"
    fixes = {t.fqn: t.fix for t in inspect(f"{other}{HEADER}        {body}\n").tensors}
    assert fixes["t"] == 'self.register_buffer("t", torch.zeros(3), persistent=False)'
    assert fixes["b[0].weight"].startswith("self.b = nn.ModuleList([nn.PReLU()])\n# older")


@pytest.mark.parametrize(
    ("forward", "body", "expected_text"),
    [
        ("self.b.get('x')", "self.b = {'x': nn.PReLU()}", "# and replace .get() in forward()"),
        ("self.b.pop()", "self.b = [nn.PReLU()]", "# and replace .pop() without an index in forward()"),
        (
            "[x] + self.b",
            "self.b = [nn.PReLU()]",
            "write list + list(b) instead of list + b, because list + nn.ModuleList raises TypeError",
        ),
        (
            "torch.stack(self.b)",
            "self.b = [nn.Parameter(torch.ones(3))]",
            "write torch.stack(list(b)) in forward(), because torch refuses an nn.ParameterList",
        ),
        (
            "self.b + [x]",
            "self.b = [nn.Parameter(torch.ones(3))]",
            "write list(b) + list instead of b + list, because nn.ParameterList does not support +",
        ),
        ("self.b[3]", "self.b = {3: nn.PReLU()}", "read self.b['3'] instead of self.b[3]"),
        (
            "self.t = self.t * 2",
            "self.t = torch.ones(3, requires_grad=True)",
            "because an nn.Parameter refuses a new tensor",
        ),
        ("self.t = 2", "self.t = torch.ones(3)", "a registered t refuses"),
    ],
)
def test_fix_says_what_to_change_in_forward(inspect, forward, body, expected_text):
    """nn.ModuleList is not a list, and a registered name takes no other type."""
    _, row = _inspect_with_forward(inspect, forward, body)
    assert expected_text in row.fix
    assert all(line.startswith("#") or ast.parse(line) for line in row.fix.splitlines())


@pytest.mark.parametrize(
    ("call", "is_refused"),
    [
        ("nn.utils.clip_grad_norm_(self.b, 1.0)", False),
        ("torch.nn.utils.parameters_to_vector(self.b)", False),
        ("torch.optim.SGD(self.b, 0.1)", False),
        ("torch.save(self.b, 'b.pt')", False),
        ("from torch.optim import SGD; SGD(self.b, 0.1)", False),
        ("torch.linalg.multi_dot(self.b)", True),
        ("from torch import stack; stack(self.b)", True),
    ],
)
def test_only_functions_of_torch_itself_refuse_a_parameter_list(inspect, call, is_refused):
    """An optimizer, or a function of torch.nn.utils, takes any iterable."""
    _, row = _inspect_with_forward(inspect, call, "self.b = [nn.Parameter(torch.ones(3))]")
    assert ("because torch refuses an nn.ParameterList" in row.fix) == is_refused


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ("self.m.t = torch.randn(3)", "m.t"),
        ("self.m.t = torch.ones(3, requires_grad=True)", "m.t"),
        ("self.m[0].t = [nn.Linear(2, 2)]", "m.0.t.*"),
        ("for i in range(1): self.m[i].t = torch.randn(3)", "its key"),
        ("self.m[-1].t = torch.randn(3)", "its key"),
        ("self.m[-1].t = torch.ones(3, requires_grad=True)", "its key"),
        ("self.m[-1].t = [nn.Linear(2, 2)]", "its keys"),
    ],
)
def test_new_key_of_a_submodule_has_its_name(inspect, body, keys):
    """The key in the state_dict begins with the attribute that holds the submodule."""
    _, row = _inspect_with_forward(inspect, "return x", f"self.m = nn.Sequential(nn.ReLU())\n        {body}")
    assert f"# older checkpoints lack {keys};" in row.fix


def test_a_file_that_imports_neither_torch_nor_nn_gets_the_import(tmp_path, in_tmp_path):
    """`torch.nn.Parameter` would raise NameError in a file with `from torch.nn import Module`."""
    source = "from torch import ones\nfrom torch.nn import Module\nclass Net(Module):\n    def __init__(self):\n"
    source += "        super().__init__()\n        self.t = ones(1, requires_grad=True)\n"
    (tmp_path / "net.py").write_text(source, "utf-8")
    spec = parse_spec("net.py:Net")
    assert spec is not None
    (row,) = read(build(spec), "net.py:Net").tensors
    assert row.fix.endswith("# and import torch.nn at the top of the file: from torch import nn")


def test_a_list_with_a_registered_buffer_is_not_registered_twice(inspect, rows):
    """The buffer would be in the memory twice, and a move would separate the two."""
    body = "self.register_buffer('t', torch.ones(2))\n        self.a = [self.t, torch.ones(3)]"
    actual_rows = rows(inspect(f"{HEADER}        {body}\n"))
    assert (
        actual_rows["a[1]"].fix == "# read the registered buffers in a under their own names, and register the others"
    )


def test_fix_uses_the_name_of_self_in_the_constructor(inspect):
    """A fix away from the assignment uses `this` if the constructor does."""
    source = "class Net(nn.Module):\n    def __init__(this):\n        super().__init__()\n"
    (row,) = inspect(source + "        setattr(this, 't', torch.ones(1))\n").tensors
    assert row.fix == ('# at the end of __init__:\nthis.register_buffer("t", this.__dict__.pop("t"), persistent=False)')


def test_a_constructor_that_returns_early_gets_the_fix_before(inspect):
    """The end of such a constructor may not be reached."""
    body = "self.t, n = torch.ones(1), 2\n        if n: return\n        n = 3"
    (row,) = inspect(f"{HEADER}        {body}\n").tensors
    assert row.fix.startswith('# after its last assignment:\nself.register_buffer("t", self.__dict__.pop("t")')


@pytest.mark.parametrize("call", ["def fill(): self.t[0] = 1\n        fill()", "self.fill()"])
def test_a_change_that_the_constructor_makes_is_rebuilt(inspect, call):
    """A function that `__init__` calls is part of the constructor."""
    source = f"{HEADER}        self.t = torch.zeros(3)\n        {call}\n    def fill(self): self.t[0] = 1\n"
    (row,) = inspect(source).tensors
    assert row.fix == 'self.register_buffer("t", torch.zeros(3), persistent=False)'


def test_a_module_that_saves_nothing_adds_no_key(statecli, in_tmp_path):
    """A metric adds no keys, so older checkpoints load unchanged, and the fix has no line about loading."""
    pytest.importorskip("torchmetrics")
    Path("met.py").write_text(
        "import torchmetrics\nfrom torch import nn\n\n\nclass N(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.l = nn.Linear(4, 4)\n"
        "        self.acc = [torchmetrics.MeanSquaredError()]\n"
    )
    text = statecli("inspect", "met.py:N").out
    assert "fix: self.acc = nn.ModuleList([torchmetrics.MeanSquaredError()])" in text
    assert "older checkpoints" not in text


def test_variable_of_a_file_is_at_its_last_assignment(tmp_path):
    """`GT = None` above does not create the tensor, and a tuple of names may."""
    path = tmp_path / "net.py"
    path.write_text("GT = None\nGT, HT = 1, 2\nGT[0] = 3\nHT: int\n", "utf-8")
    assert locate_variable(str(path), "GT") == locate_variable(str(path), "HT") == 2
    assert locate_variable(str(path), "IT") is None


def test_tensor_in_a_slot_is_registered_without_the_slot(inspect):
    """The name of a slot is not free: register_buffer refuses the name until the slot is gone."""
    init = "super().__init__()\n        self.t = torch.ones(1)"
    state = inspect(f"class Net(nn.Module):\n    __slots__ = ('t',)\n    def __init__(self):\n        {init}\n")
    (row,) = state.tensors
    assert row.fix == "# delete t from __slots__ of Net, and register the tensor with self.register_buffer"
