"""Objects of a TorchScript archive are compared with the types declared in its code, which torch does not do."""

# ruff: noqa: UP006, UP007, UP035, UP045
# torch.jit.script reads these annotations, and so they are not texts.
import enum
import re
import zipfile
from typing import Dict, Final, List, NamedTuple, Optional, Tuple, Union

import pytest
import torch
from torch import nn

from statecli.pickle_scan.script_casts import find_unchecked_casts
from statecli.pickle_scan.script_enumerations import POSITIONS, find_invalid_numbers
from statecli.pickle_scan.script_types import read_types
from statecli.pickle_scan.step_budget import Steps

from .torch_archives import read_archive, write_archive

EXPECTED_MESSAGE = (
    "torch.jit.load does not compare the value with the declared type, so the code may read memory outside the value"
)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Word(enum.Enum):
    YES = "yes"


class Point(NamedTuple):
    place: int
    weight: torch.Tensor


@torch.jit.script
class Counter:
    def __init__(self, start: int):
        self.start = start
        self.steps = [start]


@torch.jit.interface
class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.size


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = 1, 2, 3
        self.sizes = (1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.c * self.sizes[2]


class Model(nn.Module):
    """Model with an attribute of each kind."""

    layer: Layer
    number_or_text: Union[int, str]
    maybe: Optional[List[int]]
    pairs: Dict[str, List[Tuple[int, float]]]
    point: Point
    constant: Final[int]
    counters: List[Counter]
    nothing: Tuple[()]

    def __init__(self):
        super().__init__()
        self.layer, self.number_or_text, self.maybe, self.constant = Small(), "a", None, 4
        self.point, self.colour, self.word = Point(1, torch.ones(2)), Colour.RED, Word.YES
        self.counter, self.counters = Counter(3), [Counter(4)]
        self.device, self.dtype, self.complex, self.number = torch.device("cpu"), torch.float32, 1 + 2j, 2.5
        self.tensors, self.names, self.flags = [torch.ones(2)], {1: "a"}, [True]
        self.pairs, self.lists, self.nothing = {"a": [(1, 2.0)]}, [[1], [2, 3]], ()
        self.small, self.large = Small(), Large()
        self.layers = nn.ModuleDict({"1-x": nn.LSTM(3, 3), "list": nn.ModuleList([Large()])})
        self.register_buffer("buffer", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter.start = 5
        red = 1 if self.colour == Colour.RED else 0
        return self.layer.forward(x) * self.counters[0].start + red + self.point.place + len(self.pairs)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The records of an archive of Model."""
    path = tmp_path_factory.mktemp("types") / "model.pt"
    torch.jit.script(Model()).save(path)
    return {name: data for name, data in read_archive(path).items() if name != "byteorder"}


@pytest.fixture
def archive(records, tmp_path):
    """Write an archive of Model with other bytes; return its path."""

    def write(old=b"", new=b"", record="code/"):
        replaced = {name: data.replace(old, new) if record in name else data for name, data in records.items()}
        assert (replaced != records) == bool(old)
        write_archive(replaced, str(tmp_path / "written.pt"))
        return str(tmp_path / "written.pt")

    return write


def test_every_kind_of_attribute_is_passed(archive, statecli):
    path = archive()
    torch.jit.load(path)
    audit = statecli("audit", path, "--select", "pickles")
    assert (audit.code, "unsafe" in audit.out) == (0, False), audit.out
    assert statecli("inspect", path).code == 0


FORGED_DECLARATIONS = {
    "a class with other attributes": (b"  small : __torch__.Small", b"  small : __torch__.Large"),
    "the same in another module": (b"  large : __torch__.Large", b"  large : __torch__.torch.nn.modules.rnn.LSTM"),
    "a longer tuple": (b"Tuple[int, int, int]", b"Tuple[int, int, int, int]"),
    "a tuple inside of containers": (b"List[Tuple[int, float]]", b"List[Tuple[int, float, int, int]]"),
    "a class in a list": (b"  counters : List[__torch__.Counter]", b"  counters : List[__torch__.Large]"),
    "a class that may be None": (b"  counter : __torch__.Counter", b"  counter : Optional[__torch__.Large]"),
    "a named tuple": (b"  weight : Tensor", b"  weight : Tensor\n  more : int"),
    "a module with a name that no identifier has": (
        b'__annotations__["1-x"] = __torch__.torch.nn.modules.rnn.LSTM',
        b'__annotations__["1-x"] = __torch__.torch.nn.modules.container.ModuleList',
    ),
}


@pytest.mark.parametrize(("old", "new"), FORGED_DECLARATIONS.values(), ids=FORGED_DECLARATIONS)
def test_value_that_contradicts_its_declaration_is_found(old, new, archive, statecli):
    old, new = (re.sub(rb"__torch__\.(?!torch)", b"__torch__." + _MODULE + b".", text) for text in (old, new))
    audit = statecli("audit", archive(old, new), "--select", "unsafe-data")
    assert (audit.code, EXPECTED_MESSAGE in audit.out) == (1, True), audit.out


def test_type_recorded_in_a_pickle_is_compared(archive, statecli):
    """A list with a type of its own in the pickle has this type, also where the code declares Any."""
    size = len(b"Dict[str, List[Tuple[int, float]]]")
    old = b"X" + size.to_bytes(4, "little") + b"Dict[str, List[Tuple[int, float]]]"
    new = b"X" + (size + 5).to_bytes(4, "little") + b"Dict[str, List[Tuple[int, float, int]]]"
    audit = statecli("audit", archive(old, new, "data.pkl"), "--select", "unsafe-data")
    assert (audit.code, EXPECTED_MESSAGE in audit.out) == (1, True), audit.out


#: Texts of a class that torch compiles, or may compile, and that torch's printer never writes.
UNUSUAL_CLASS_TEXTS = {
    "spaces before the bracket": "class A (Module):\n  x : int\n",
    "a comment": "class A(Module):  # x\n  x : int\n",
    "another indentation": "class A(Module):\n    x : __torch__.B\n",
    "one space": "class A(Module):\n x : __torch__.B\n",
    "two lines": "class A(Module):\n  x : List[\n__torch__.B]\n",
    "no spaces": "class A(Module):\n  x:__torch__.B\n",
    "a line that goes on": "class A(Module):\n  x : \\\n    __torch__.B\n",
    "a name twice": "class A(Module):\n  x : int\n  x : __torch__.B\n",
    "a class twice": "class A(Module):\n  x : int\nclass A(Module):\n  x : __torch__.B\n",
    "a string like the class": 'class  A(Module):\n  x : __torch__.B\n"""\nclass A(Module):\n  x : int\n"""\n',
    "a string before the line": 'class A(Module):\n  x : int\n  """""" y : __torch__.B\n',
}


@pytest.mark.parametrize("text", UNUSUAL_CLASS_TEXTS.values(), ids=UNUSUAL_CLASS_TEXTS)
def test_code_that_torch_does_not_write_is_not_trusted(text):
    assert read_types([("a/code/__torch__.py", text.encode())], Steps()).unreadable_class is not None


def test_strings_and_functions_declare_no_attribute():
    function = '  def f(self):\n    y = "\\n  z : int"  # z : int\n    t : int = 1\n'
    text = f"class A(Module):\n  __parameters__ = []\n  x : int\n{function}"
    types = read_types([("a/code/__torch__/b.py", text.encode())], Steps())
    assert types.unreadable_class is None
    assert list(types.classes["__torch__.b.A"].attributes) == ["x"]


class Casts(nn.Module):
    """Model with each kind of cast that torch writes: of a parameter, an attribute, a variable, through branches."""

    cache: Optional[Tuple[torch.Tensor, torch.Tensor]]
    counter: Optional[Counter]

    def __init__(self):
        super().__init__()
        self.cache, self.counter, self.cell = None, None, nn.LSTMCell(3, 3)

    def forward(self, x: torch.Tensor, pair: Optional[Tuple[torch.Tensor, int]] = None):
        cache, counter = self.cache, self.counter
        if cache is not None:
            x = x + cache[0]
        if counter is not None:
            x = x * counter.start
        if pair is not None:
            x = x * pair[1]
        sizes: Optional[Tuple[int, int]] = None
        if x.sum() > 0:
            sizes = (1, 2)
        return x if sizes is None else x + sizes[0]


def _find_casts(code: str, function: str = "") -> list[int]:
    codes = [code.encode(), function.encode()]
    types = read_types([("a/code/__torch__.py", text) for text in codes], Steps())
    return [cast.line for cast in find_unchecked_casts(codes, types, Steps())]


def test_casts_that_torch_writes_are_clean(tmp_path, statecli):
    torch.jit.script(Casts()).save(tmp_path / "casts.pt")
    with zipfile.ZipFile(tmp_path / "casts.pt") as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".py"))
    assert code.count(b"unchecked_cast(Tuple") + code.count(b"unchecked_cast(__torch__") > 5
    assert statecli("audit", tmp_path / "casts.pt", "--select", "pickles").code == 0


_CAST = "  a = unchecked_cast(__torch__.A, x)\n"
_OPTIONAL_FUNCTION = "def f(x: Optional[__torch__.A], y: List[Any]) -> int:\n"
#: Functions that read other memory, in the form that torch compiles.
CASTS = {
    "any value": f"def f(x: Any) -> int:\n{_CAST}",
    "a value of the function": "def f(b: __torch__.B) -> int:\n  a = unchecked_cast(__torch__.A, annotate(Any, b))\n",
    "a tuple": "def f(x: Any) -> int:\n  a = unchecked_cast(Tuple[int, int], x)\n",
    "an Optional of another type": f"def f(x: Optional[__torch__.B]) -> int:\n{_CAST}",
    "an attribute of any type": f"def f(b: __torch__.C) -> int:\n  x = b.any\n{_CAST}",
    "a name with two values": f"{_OPTIONAL_FUNCTION}  x = y[0]\n{_CAST}",
    "a target in brackets": f"{_OPTIONAL_FUNCTION}  (x\n  ) = y[0]\n{_CAST}",
    "two targets": f"{_OPTIONAL_FUNCTION}  x, z, = y\n{_CAST}",
    "a loop": f"{_OPTIONAL_FUNCTION}  for x in y:\n  {_CAST}",
    "another name": "def f(x: Any) -> int:\n  cast = unchecked_cast\n  a = cast(__torch__.A, x)\n",
    "a line that goes on": "def f(x: Any) -> int:\n  a = unchecked_cast(\\\n__torch__.A, x)\n",
    "a list of objects": "def f(x: Any) -> int:\n  a = unchecked_cast(List[__torch__.A], x)\n",
}


@pytest.mark.parametrize("function", CASTS.values(), ids=CASTS)
def test_a_cast_without_a_declaration_is_found(function):
    classes = "class A:\n  x : int\n  y : int\nclass B:\n  x : int\nclass C:\n  any : Any\n"
    assert _find_casts(classes, function)


def test_cast_that_runs_on_load_is_an_error(in_tmp_path, tmp_path, statecli):
    """torch.jit.load runs `__setstate__`, with a state of any type."""
    torch.jit.script(Large()).save(tmp_path / "a.pt")
    records = read_archive(tmp_path / "a.pt")
    for name in records:
        if name.startswith("code/") and name.endswith(".py"):
            records[name] += b"class Z:\n  def __setstate__(self: __torch__.Z,\n    state: Any) -> NoneType:\n"
            records[name] += b"    a = unchecked_cast(__torch__.Z, state)\n"
    write_archive({name: data for name, data in records.items() if name != "byteorder"}, "b.pt")
    audit = statecli("audit", "b.pt", "--select", "unsafe-data", "--fail-on", "error")
    assert (audit.code, "of another type, and torch does not check this" in audit.out) == (1, True)


_MODULE = __name__.encode()


class Sparse(nn.Module):
    def __init__(self, indices, layout):
        super().__init__()
        tensor = torch.sparse_coo_tensor(torch.tensor([indices]), torch.ones(2), (4,), check_invariants=False)
        self.table = tensor if layout == "coo" else torch.eye(3).to_sparse_csr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(("indices", "layout", "code"), [([0, 3], "coo", 0), ([0, 40], "coo", 1), ([0, 1], "csr", 0)])
def test_sparse_tensor_of_torch_jit_is_read(indices, layout, code, tmp_path, statecli):
    """The parts of the tensor are arguments of a single call, and the layout is a number."""
    torch.jit.script(Sparse(indices, layout)).save(tmp_path / "a.pt")
    assert torch.jit.load(tmp_path / "a.pt").table.layout == getattr(torch, f"sparse_{layout}")
    audit = statecli("audit", tmp_path / "a.pt")
    assert (audit.code, "outside its shape" in audit.out) == (code, code == 1), audit.out
    assert f"sparse_{layout}" in statecli("inspect", tmp_path / "a.pt", "-f", "json").out


@pytest.fixture
def colour_opcodes(records) -> bytes:
    """The opcodes that call the enumeration for its first member."""
    match = re.search(re.escape(b"c__torch__." + _MODULE + b"\nColour\n") + b"(?:q.)?K\x01R", records["data.pkl"])
    assert match is not None
    return match[0]


@pytest.mark.parametrize("value", [b"K\x09", b"K\x01\x85", b"X\x01\0\0\0a", b"G?\xf0\0\0\0\0\0\0"], ids=repr)
def test_unknown_enum_member_is_reported(value, archive, colour_opcodes, statecli):
    """torch.jit creates no object for the member, so that all later values have another place on its stack."""
    path = archive(colour_opcodes, colour_opcodes.replace(b"K\x01", value), "data.pkl")
    audit = statecli("audit", path, "--select", "pickles")
    assert (audit.code, "torch.jit creates no object" in audit.out) == (1, True), audit.out


def test_state_of_an_enum_member_is_reported(archive, colour_opcodes, statecli):
    """torch.jit takes the state for a call of another import."""
    audit = statecli("audit", archive(colour_opcodes, colour_opcodes + b"}b", "data.pkl"), "--select", "pickles")
    assert (audit.code, "; torch.jit reads this state as a call" in audit.out) == (1, True), audit.out


def test_object_that_does_not_fit_the_interface_is_reported(archive, statecli):
    """The method of the object has the right name and other types."""
    qualified_name = b"__torch__." + _MODULE + b"."
    old = b"  def forward(self: " + qualified_name + b"Small,\n    x: Tensor) -> Tensor:"
    audit = statecli("audit", archive(old, old.replace(b"x: Tensor", b"x: int")), "--select", "pickles")
    assert (audit.code, EXPECTED_MESSAGE in audit.out) == (1, True), audit.out


#: Code in place of `return x` -> whether torch has no dtype, layout or memory format for the number.
NUMBERS = {
    "return torch.to(x, 200)": True,
    "return (x).to(200)": True,
    "return torch.to(x, -1, False, False)": True,
    "return torch.softmax(x, -1, 200)": True,
    "return torch.zeros([2], dtype=(200))": True,
    "d = 200\n    return torch.zeros([2], dtype=d)": True,
    "d = (200)\n    return torch.to(x, d)": True,
    "a = torch.promote_types(200, 6)\n    return x": True,
    "return torch.quantize_per_tensor(x, 0.1, 0, 200)": True,
    "return torch.zeros([2], layout=77)": True,
    "return torch.contiguous(x, memory_format=9)": True,
    "return torch.to(x, 6)": False,
    "return torch.softmax(x, -1, 6)": False,
    "return torch.softmax(x, 200)": False,
    "return torch.view(x, [-1, 200])": False,
    "d = 200\n    return torch.reshape(x, [d, -1])": False,
    "_0 = __torch__.torch.nn.functional.softmax(x, -1, 3000, )\n    return _0": False,
    "return torch.format('torch.to(x, 200)', x)": False,
}


@pytest.mark.parametrize(("code", "is_invalid"), NUMBERS.items(), ids=NUMBERS)
def test_invalid_number_for_a_dtype_is_found(code, is_invalid):
    """torch looks up invalid numbers in other memory; a load computes promote_types of two constants."""
    function = f"def f(x: Tensor) -> Tensor:\n    {code}\n".encode()
    assert bool(list(find_invalid_numbers(function, Steps()))) == is_invalid


def test_positions_cover_the_operator_schemas_of_torch():
    """POSITIONS has each argument of each operator that is a dtype, layout or memory format and may be positional."""
    kinds = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format"}
    expected = {}
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        for position, argument in enumerate(schema.arguments):
            kind = kinds.get(str(argument.real_type).removeprefix("Optional[").removesuffix("]"))
            if kind and not argument.kwarg_only and space in ("aten", "quantized"):
                expected.setdefault(name, {})[position] = kind
    missing_positions = {
        name: places for name, places in expected.items() if not places.items() <= POSITIONS.get(name, {}).items()
    }
    assert missing_positions == {}
