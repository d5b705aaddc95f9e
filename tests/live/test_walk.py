"""Test the tensors that the walk reaches, their names, and the objects that the walk does not wake."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from statecli import formats
from statecli.core.model_state import Kind
from statecli.live import walk as walk_module

#: assignment in __init__ -> the names of the unregistered tensors of the assignment
CONTAINERS = {
    "self.t = torch.ones(1)": ["t"],
    "self.t = [torch.ones(1), (torch.ones(2),)]": ["t[0]", "t[1][0]"],
    "self.c = {'cos': torch.ones(1), 3: torch.ones(1), (1, 'a'): torch.ones(1)}": ["c['cos']", "c[3]", "c[(1, 'a')]"],
    "self.b = [None, None, nn.Linear(2, 2, bias=False)]": ["b[2].weight"],
    "self.b = {'x': nn.Linear(2, 2, bias=False)}": ["b['x'].weight"],
    "self.p = [nn.Parameter(torch.ones(2))]": ["p[0]"],
    "self.d = collections.deque([torch.ones(1)])": ["d[0]"],
    "self.s = {torch.ones(1)}": ["s[#0]"],
    "self.o = Point(torch.ones(1), torch.ones(1))": ["o.x", "o.y"],
    "self.o = Data(torch.ones(1))": ["o.t"],
    "self.o = Slotted(); self.o.t = torch.ones(1)": ["o.t"],
    "self.f = functools.partial(print, torch.ones(1), end=torch.ones(2))": ["f.args[0]", "f.keywords['end']"],
    "k = torch.ones(1); self.f = lambda: k": ["f.__closure__['k']"],
    "self.f = lambda x=torch.ones(1): x": ["f.__defaults__[0]"],
    "def f(*, x=torch.ones(1)): return x\n        self.f = f": ["f.__kwdefaults__['x']"],
    "self.f = Slotted(); self.f.t = torch.ones(1); self.f = self.f.call": ["f.__self__.t"],
    "self.f = torch.ones(1).add": ["f.__self__"],
    "k = torch.ones(1); self.register_forward_hook(lambda *a: k)": ["_forward_hooks[#0].__closure__['k']"],
    "self.i = iter([torch.ones(1)])": ["i[#0][0]"],
    "self.i = itertools.cycle([torch.ones(1)])": ["i[#0][#0][0]"],
    "self.n = torch.distributions.Normal(torch.zeros(1), torch.ones(1))": ["n.loc", "n.scale"],
    "self.m = types.MappingProxyType({'a': torch.ones(1)})": ["m[#0]['a']"],
    "self.e = ValueError(); self.e.t = torch.ones(1)": ["e.t"],
    "self.w = torch.ones(1); self.w.tag = torch.ones(1)": ["w", "w.tag"],
    "self.l = L([torch.ones(1)]); self.l.more = torch.ones(1)": ["l[0]", "l.more"],
    "object.__setattr__(self, 'h', torch.ones(1))": ["h"],
    "self.x = types.SimpleNamespace(t=torch.ones(3))": ["x.t"],
    "self.x = collections.defaultdict(functools.partial(print, torch.ones(3)))": ["x.default_factory.args[0]"],
    "self.x = ValueError(torch.ones(3), 'why')": ["x.args[0]"],
    "self.x = slice(0, torch.ones(3), 1)": ["x[#1]"],
    "self.x = staticmethod(functools.partial(print, torch.ones(3)))": ["x[#0].args[0]"],
}
#: assignments without a report: another name of a tensor, or a place that a move need not reach
LINES_WITHOUT_ROWS = [
    "self.w = nn.Parameter(torch.ones(2)); self.l = [self.w]",
    "self.w = nn.Parameter(torch.ones(2)); self.v = self.w.data[0]",
    "self.register_buffer('b', torch.ones(2)); self.v = {'x': self.b[:1]}",
    "self.lin = nn.Linear(1, 1); self.l = [self.lin]; self.me = [self]",
    "self.w = nn.Parameter(torch.ones(2)); self.w.sum().backward()",
    "self.f = uses_global",
    "self.r = weakref.ref(KEPT)",
    "self.c = Slotted; self.m = torch",
    "self.e = Colour.RED",
    "self.log = logging.getLogger('x'); self.log.t = torch.ones(1)",
    "self.w = nn.Parameter(torch.ones(2)); self.opt = torch.optim.SGD([self.w], lr=1.0)",
    "self.w = nn.Parameter(torch.ones(2)); self.g = (self.w * 2).grad_fn",
    "self.op = torch.ops.aten.add.Tensor",
]
HEADER = """
import collections, dataclasses, enum, functools, itertools, logging, operator, types, weakref
KEPT = torch.ones(3)
cached = functools.lru_cache(lambda n: KEPT)
cached(1)
Point = collections.namedtuple("Point", "x y")
def uses_global(): return KEPT
class L(list): pass
class Colour(enum.Enum):
    RED = KEPT
@dataclasses.dataclass
class Data:
    t: object
class Slotted:
    __slots__ = ("t", "empty")
    def call(self): pass
class Net(nn.Module):
    @property
    def loud(self): raise RuntimeError("a property ran")
    def __init__(self):
        super().__init__()
        """


def list_unregistered(state) -> list[str]:
    """Return the names of the unregistered rows."""
    return [t.fqn for t in state.tensors if t.kind is Kind.UNREGISTERED]


@pytest.mark.parametrize("line", CONTAINERS)
def test_tensors_in_containers_have_named_rows(inspect, line):
    """Each container of a tensor gives a row, named as Python reaches the tensor; the tensor stays and is not saved."""
    state = inspect(HEADER + line)
    assert list_unregistered(state) == CONTAINERS[line]
    assert {(t.saved, t.moves) for t in state.tensors} == {(False, False)}


@pytest.mark.parametrize("value", ["operator.methodcaller('add', torch.ones(3))", "cached"])
def test_tensors_in_objects_of_c_are_found(inspect, value):
    """The number in the name depends on the release of Python."""
    (row,) = inspect(HEADER + f"self.x = {value}").tensors
    assert (row.kind, row.shape, row.moves) == (Kind.UNREGISTERED, (3,), False)


@pytest.mark.parametrize("line", LINES_WITHOUT_ROWS)
def test_aliases_gradients_and_globals_have_no_rows(inspect, line):
    """Further names of registered tensors, gradients, globals and classes do not have rows."""
    assert list_unregistered(inspect(HEADER + line)) == []


def test_optimizer_state_is_found(inspect):
    """The state of the model's optimizer is listed without a fix, because an optimizer has its own state_dict."""
    line = "self.w = nn.Parameter(torch.ones(2)); self.opt = torch.optim.Adam([self.w]); self.w.sum().backward()"
    state = inspect(HEADER + line + "; self.opt.step()")
    assert "opt.state[#0]['exp_avg']" in list_unregistered(state)
    assert {t.fix for t in state.tensors} == {None}


def test_class_attributes_are_marked(inspect, rows):
    """A tensor of the class body has its line and a note that it is shared; a shadowed tensor has its own name."""
    source = "class Net(nn.Module):\n    a = torch.ones(1)\n    b = [torch.ones(2)]\n    c = torch.ones(3)\n"
    source += "    def __init__(self):\n        super().__init__()\n        self.c = torch.ones(4)\n"
    actual_rows = rows(inspect(source))
    assert set(actual_rows) == {"a", "b[0]", "c", "__class__.c"}
    assert "class attribute" in actual_rows["a"].note
    assert (actual_rows["a"].origin.line, actual_rows["b[0]"].origin.line) == (4, 5)
    assert actual_rows["c"].note is None


def test_tensor_with_two_references_is_one_row(inspect, rows):
    """A tensor with two references is one row with an alias; a view of the tensor is a tied row."""
    actual_rows = rows(inspect(HEADER + "self.a = torch.ones(2); self.b = [self.a]; self.c = self.a[:1]"))
    assert set(actual_rows) == {"a", "c"}
    assert actual_rows["a"].aliases == ("b[0]",)
    assert actual_rows["c"].tied_to == ("a",)


TRICKY = """
import threading
class Bomb:
    def boom(self, *a, **k): raise RuntimeError("user code ran")
    __eq__ = __hash__ = __len__ = __repr__ = __str__ = __bool__ = __iter__ = __getattr__ = boom
    __getitem__ = __contains__ = __call__ = __fspath__ = __index__ = __float__ = boom
    prop = property(boom)
    def __init__(self): self.t = torch.ones(1)
class Louder(Bomb):
    def __getattribute__(self, name): raise RuntimeError("user code ran")
class Dict(dict):
    def items(self): raise RuntimeError("user code ran")
    __iter__ = keys = values = __getitem__ = __len__ = __contains__ = items
class List(list):
    def __iter__(self): raise RuntimeError("user code ran")
    __len__ = __getitem__ = __iter__
class Meta(type):
    def __eq__(cls, other): raise RuntimeError("user code ran")
    def __hash__(cls): raise RuntimeError("user code ran")
    def __instancecheck__(cls, x): raise RuntimeError("user code ran")
    __subclasscheck__ = __instancecheck__
class Made(metaclass=Meta):
    pass
class Liar:
    @property
    def __class__(self): raise RuntimeError("user code ran")
    @property
    def __dict__(self): raise RuntimeError("user code ran")
class Str(str):
    def __repr__(self): raise RuntimeError("user code ran")
class Net(nn.Module):
    def __getattr__(self, name):
        if name in ("extra", "_parameters_"): raise RuntimeError("user code ran")
        return super().__getattr__(name)
    @property
    def table(self): raise RuntimeError("user code ran")
    def __init__(self):
        super().__init__()
        # past nn.Module.__setattr__, whose isinstance() asks these objects for their class
        vars(self)["bomb"] = Bomb()
        vars(self)["louder"] = Louder()
        vars(self)["dict"] = Dict(a=torch.ones(1))
        vars(self)["list"] = List([torch.ones(1)])
        made = vars(self)["made"] = Made(); made.t = torch.ones(1)
        vars(self)["liar"] = Liar()
        vars(self)["str"] = {Str("k"): torch.ones(1)}
        vars(self)["keys"] = {object: torch.ones(1)}
        self.lock = threading.Lock()
"""


def test_no_user_code_runs_on_the_way(inspect):
    """Objects whose every method raises are searched too."""
    names = list_unregistered(inspect(TRICKY))
    assert names == ["bomb.t", "louder.t", "dict['a']", "list[0]", "made.t", "str['k']", "keys[#0]"]


def test_objects_that_contain_themselves_are_visited_once(inspect):
    """Structures that contain themselves are visited once."""
    line = "self.a = [torch.ones(1)]; self.a.append(self.a); self.d = {'d': self.a}; self.d['e'] = self.d"
    assert list_unregistered(inspect(HEADER + line)) == ["a[0]"]


def test_a_module_that_contains_itself_is_an_oddity(inspect):
    """A registered cycle, for which torch's own state_dict() recurses forever, is listed once with an oddity."""
    state = inspect(HEADER + "self.w = nn.Parameter(torch.ones(1)); self.add_module('me', self)")
    assert [t.fqn for t in state.tensors] == ["w"]
    assert "module-cycle" in {oddity.name for oddity in state.oddities}
    assert state.tensors[0].saved is None


def test_deep_nesting_is_cut_with_an_oddity(inspect):
    """A list nested 100,000 deep causes neither a recursion error nor a silent omission."""
    line = "deep = [torch.ones(1)]\n        for _ in range(100_000): deep = [deep]\n        self.deep = deep"
    state = inspect(HEADER + line + "; self.near = torch.ones(1)")
    assert list_unregistered(state) == ["near"]
    (oddity,) = [o for o in state.oddities if o.name == "not-searched"]
    assert "1,000 levels" in oddity.message
    assert len(oddity.message) < 200


def test_search_ends_at_the_object_limit_with_an_oddity(inspect, monkeypatch):
    """If a model has more objects than the limit, the state says that the search ended."""
    monkeypatch.setattr(walk_module, "MAX_OBJECTS", 1000)
    state = inspect(HEADER + "self.many = [[[]] for _ in range(5000)]")
    assert [o.name for o in state.oddities if o.name == "not-searched"] != []


def test_too_many_names_are_an_error(inspect, monkeypatch):
    """Modules shared thirty levels deep have 2^30 names: the result is an error in one line, not a hang."""
    from statecli.core.errors import ModelError

    monkeypatch.setattr(walk_module, "MAX_NAMES", 10_000)
    line = "m = nn.Linear(1, 1)\n        for _ in range(30): m = nn.Sequential(m, m)\n        self.m = m"
    with pytest.raises(ModelError, match="more than 10,000 tensor names"):
        inspect(HEADER + line)


def test_large_plain_data_counts_as_one_object(inspect, monkeypatch):
    """A search of each string of a vocabulary would reach the limit."""
    monkeypatch.setattr(walk_module, "MAX_OBJECTS", 1000)
    state = inspect(HEADER + "self.v = {str(i): i for i in range(5000)}; self.t = torch.ones(1)")
    assert list_unregistered(state) == ["t"]
    assert state.oddities == ()


@pytest.mark.parametrize(
    ("build_tensor", "layout", "nbytes"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo", 60),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr", 68),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "strided", 3),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "strided", 16),
        (lambda: torch.ones(2, dtype=torch.float8_e4m3fn), "strided", 2),
        (lambda: torch.empty(0), "strided", 0),
        (lambda: torch.tensor(1.0), "strided", 4),
        (lambda: torch.ones(2, device="meta"), "strided", 8),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_buffers_of_unusual_layouts_and_dtypes_are_read(read_live, rows, build_tensor, layout, nbytes):
    """Sparse, quantized, conjugate, float8, empty, 0-dim and meta buffers are read, move and are saved."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", build_tensor())

    (row,) = read_live(Net).tensors
    assert (row.layout, row.nbytes, row.moves, row.saved) == (layout, nbytes, True, True)
    assert row.shape == tuple(build_tensor().shape)


def test_sparse_tensor_has_the_same_size_live_and_in_a_file(read_live, tmp_path):
    """The size is that of indices and values, not of the dense shape; the saved module has the same bytes."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("coo", torch.eye(3).to_sparse())
            self.register_buffer("csr", torch.eye(3).to_sparse_csr())

    torch.save(Net().state_dict(), tmp_path / "sparse.pt")
    saved = formats.read(str(tmp_path / "sparse.pt")).tensors
    assert [(t.fqn, t.nbytes) for t in read_live(Net).tensors] == [(t.fqn, t.nbytes) for t in saved]


def test_wrapper_subclass_is_one_row(read_live, rows):
    """A subclass that wraps another tensor is one row of the outer shape; the inner tensors have no row."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
            self.t = TwoTensor(torch.ones(3), torch.ones(3))

    actual_rows = rows(read_live(Net))
    assert set(actual_rows) == {"w", "t"}
    assert (actual_rows["w"].kind, actual_rows["t"].kind) == (Kind.PARAMETER, Kind.UNREGISTERED)
    assert (actual_rows["w"].moves, actual_rows["t"].moves) == (True, False)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_have_elements_and_no_shape(read_live):
    """A nested tensor, strided or jagged, shows the elements of its parts, and a note explains the missing shape."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            parts = [torch.ones(2), torch.ones(3)]
            self.register_buffer("n", torch.nested.nested_tensor(parts))
            self.register_buffer("j", torch.nested.nested_tensor(parts, layout=torch.jagged))
            self.t = torch.nested.nested_tensor(parts)

    state = read_live(Net)
    assert {(t.shape, t.elements, t.layout) for t in state.tensors} == {(None, 5, "nested")}
    assert [(t.fqn, t.saved, t.moves) for t in state.tensors] == [
        ("n", True, True),
        ("j", True, True),
        ("t", False, False),
    ]
    assert all("nested" in t.note for t in state.tensors)


def test_note_says_if_a_tensor_is_derived_from_registered_tensors(inspect, rows):
    """A tensor is derived from registered tensors only if all its sources are registered."""
    line = (
        "self.w = nn.Parameter(torch.ones(1)); self.d = self.w * 2; self.e = torch.ones(1, requires_grad=True) * self.w"
    )
    actual_rows = rows(inspect(HEADER + line))
    assert actual_rows["d"].note == "derived from registered tensors (grad_fn MulBackward0)"
    assert actual_rows["e"].note == "derived from other tensors (grad_fn MulBackward0)"


def test_a_copied_module_keeps_the_line_of_its_class(inspect, rows):
    """copy.deepcopy calls no setter, so attributes of the copy have the line at which their class assigns them."""
    source = """
    import copy
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = torch.ones(1)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Block()
            self.b = copy.deepcopy(self.a)
    """
    actual_rows = rows(inspect(source))
    assert actual_rows["b.t"].origin == actual_rows["a.t"].origin
    assert actual_rows["b.t"].origin.line == 8


class Plain(nn.Module):
    """Module with tensors where TorchScript keeps them in C++."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.t, self.table, self.pair = torch.ones(2), {"a": torch.ones(3)}, (torch.ones(4), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * 2.5 + self.t


class Script(torch.jit.ScriptModule):
    """Module that is scripted on construction and shows the attributes of an inner module as its own."""

    def __init__(self):
        super().__init__()
        self.w, self.t = nn.Parameter(torch.ones(3)), torch.ones(3)

    @torch.jit.script_method
    def forward(self, x):
        return x * self.w + self.t


def build_trace():
    return torch.jit.trace(Plain(), torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build_module", "unregistered"),
    [
        (lambda: torch.jit.script(Plain()), ["pair[0]", "t", "table['a']"]),
        (lambda: nn.Sequential(torch.jit.script(Plain())), ["0.pair[0]", "0.t", "0.table['a']"]),
        (Script, ["t"]),
    ],
    ids=["script", "below a module", "ScriptModule"],
)
def test_the_attributes_of_a_scripted_module(build_module, unregistered, read_live, rows):
    """The attributes are rows that do not move and are not saved. The oracle is `.double()` and state_dict()."""
    state = read_live(build_module)
    rows_by_name = {name: row for name, row in rows(state).items() if row.kind is Kind.UNREGISTERED}
    assert sorted(rows_by_name) == unregistered
    assert {(row.moves, row.saved) for row in rows_by_name.values()} == {(False, False)}
    assert state.oddities == ()
    module = build_module().double()
    scripted_module = module[0] if isinstance(module, nn.Sequential) else module
    assert (scripted_module.t.dtype, next(scripted_module.parameters()).dtype) == (torch.float32, torch.float64)
    assert not set(unregistered) & set(module.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_oddity_counts_the_constant_tensors_of_a_trace(read_live):
    """A trace turns plain tensors into constants without rows, but an oddity counts them; numbers are not counted."""
    state = read_live(lambda: nn.Sequential(build_trace()))
    assert [t.fqn for t in state.tensors] == ["0.fc.weight", "0.fc.bias"]
    ((name, fqn, message),) = [(o.name, o.fqn, o.message) for o in state.oddities]
    assert (name, fqn) == ("script-module", "0")
    assert "contains 1 constant tensor" in message
    assert len(build_trace().code_with_constants[1].const_mapping) == 2
    assert read_live(lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))).oddities == ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("[nn.ReLU(), nn.PReLU()]", "list"),
        ("(nn.PReLU(),)", "tuple"),
        ("{0: nn.PReLU()}", "dict"),
        ("collections.OrderedDict(a=nn.PReLU())", "OrderedDict"),
        ("collections.deque([nn.PReLU()])", "deque"),
        ("types.SimpleNamespace(part=(nn.PReLU(),))", "tuple"),
        ("types.SimpleNamespace(part=nn.PReLU())", None),
    ],
)
def test_the_container_of_an_unregistered_module_is_recorded(inspect, value, kind):
    """The type is recorded, because a list, a tuple and a dictionary may all have the keys 0 and 1."""
    init = f"    def __init__(self):\n        super().__init__()\n        self.x = {value}\n"
    (row,) = inspect(f"import collections, types\nclass Net(nn.Module):\n{init}").tensors
    assert row.container == kind


def test_a_class_that_was_walked_is_freed(read_live):
    """A process that builds many versions of a class, such as a notebook, keeps no version."""

    class Net(nn.Linear):
        tables = (torch.ones(1),)

        def __init__(self):
            super().__init__(2, 2)
            self.parts = [nn.Linear(2, 2), {"t": torch.ones(1)}]

    read_live(Net)
    reference = weakref.ref(Net)
    del Net
    gc.collect()
    assert reference() is None
