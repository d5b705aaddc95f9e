"""The code of TorchScript archives: operators that touch files are found under any spelling that torch compiles."""

from __future__ import annotations

import contextlib
import pickle
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from statecli.commands.audit.run import Request, audit
from statecli.file_scan.scan import scan_pickles
from statecli.pickle_scan import name_lists, program_operators, script_code, script_enumerations, script_nesting
from statecli.pickle_scan.step_budget import OutOfSteps, Steps
from statecli.rules.pickles import RULES

from .torch_archives import build_archive, read_archive, write_archive

FILE = '"HARM", True, 4, dtype=0'
#: Statements that create HARM, a file of four letters, when compiled and run: a later statement fills `t`.
WRITES = {
    "plain": f"t = torch.from_file({FILE})",
    "ops": f"t = ops.aten.from_file({FILE})",
    "autograd": f"t = torch.autograd.from_file({FILE})",
    "another's autograd": f"t = ops.quantized.autograd.autograd.from_file({FILE})",
    "spaces": f"t = torch . from_file({FILE})",
    "a line that goes on": f"t = torch.\\\n      from_file({FILE})",
    "a comment": f"t = (torch.# torch.ones\n      from_file)({FILE})",
    "brackets": f"t = (torch).from_file({FILE})",
    "another name": f"a = torch\n    t = a.from_file({FILE})",
    "another name of ops": f"a = ops.aten\n    t = a.from_file({FILE})",
    "the function's name": f"a = torch.from_file\n    t = a({FILE})",
    "getattr": f't = getattr(torch, "from_file")({FILE})',
    "behind a string": f"x = '\\\\\"'\n    t = torch.from_file({FILE})",
    "behind a long string": f"x = '''\n\"'''\n    t = torch.from_file({FILE})",
    "torch.save": 't = torch.ones([4])\n    torch.save(t, "HARM")',
    "another function": 't = __torch__.tests.formats.test_script_code.made("HARM")',
}
FILE_FUNCTION = "def made(p: str) -> Tensor:\n  return torch.from_file(p, True, 4, dtype=0)\n"
#: Statements that only look alike.
HARMLESS_STATEMENTS = {
    "an attribute": "t = (st)[0]\n    self.w = torch.detach(t)",
    "a text": "t = (st)[0]\n    x = \"torch.from_file('a') torch\"",
    "a text of both quotes": "t = (st)[0]\n    x = 'it \\'s torch.save'",
    "a comment": "t = (st)[0] # torch.save, torch",
    "a name that goes on": "t = (st)[0]\n    torch_from_file = 1",
    "a custom error": 't = (st)[0]\n    if False:\n      ops.prim.RaiseException("torch.save")\n    else:\n      pass',
}


class Net(nn.Module):
    """A model that unpacks its pickled state in its own code."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.w

    @torch.jit.export
    def __getstate__(self):
        return (self.w, self.training)

    @torch.jit.export
    def __setstate__(self, st: tuple[torch.Tensor, bool]):
        self.w = st[0]
        self.training = st[1]


def read_records(path: Path) -> dict[str, bytes]:
    """Return the records by full name, without those for debugging."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith(".debug_pkl")}


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> dict[str, bytes]:
    """Records of an archive by name; `__setstate__` is the last function of its code."""
    path = tmp_path_factory.mktemp("script") / "x.pt"
    torch.jit.save(torch.jit.script(Net()), path)
    return read_records(path)


@pytest.fixture
def archive(records, tmp_path, in_tmp_path):
    """Write the archive with these statements in its `__setstate__`, and with `code_after` after the class."""

    def write_changed(statements: str, code_after: str = "") -> Path:
        code = {
            name: insert_statements(data.decode(), statements, code_after).encode()
            for name, data in records.items()
            if name.endswith(".py")
        }
        return build_archive(tmp_path / "y.pt", {**records, **code}, "")

    return write_changed


def insert_statements(code: str, statements: str, code_after: str) -> str:
    head, _, body = code.partition("  def __setstate__(")
    return f"{head}  def __setstate__({body}".replace("NoneType:\n", f"NoneType:\n    {statements}\n", 1) + code_after


def list_messages(path: Path, *rules: str) -> list[str]:
    result = audit(Request((str(path),), select=rules))
    assert set(rules) <= set(result.targets[0].ran)
    return [finding.message for finding in result.findings]


#: Every rule about pickles and code.
PICKLES = tuple(rule.name for rule in RULES)


@pytest.mark.parametrize("name", WRITES)
def test_code_that_writes_a_file_is_found(name, archive, tmp_path):
    """torch.jit.load compiles and runs the code; the audit names the line, and runs nothing."""
    statements = f"{WRITES[name]}\n    self.w = torch.fill_(t, 65)"
    path = archive(statements, FILE_FUNCTION if "made" in WRITES[name] else "")
    (message, *_) = list_messages(path, "unsafe-global")
    assert not (tmp_path / "HARM").exists()
    assert "code/__torch__" in message
    assert ", line " in message
    torch.jit.load(str(path))
    assert (tmp_path / "HARM").exists()


@pytest.mark.parametrize(
    ("number", "between", "root"),
    [
        *((number, "\n    ", "torch") for number in ("1.", "0x1.", ".5", "1.e5", "2.j")),
        ("1.", " # torch\n    ", "torch"),
        ("1.", "\n    ", "ops.aten"),
    ],
    ids=repr,
)
def test_number_before_a_call_does_not_hide_the_call(number, between, root, archive, tmp_path):
    """A function of the archive has the name of the operator, so that a method of this name is not an operator."""
    statements = f't = torch.ones([4])\n    x = {number}{between}{root}.save(t, "HARM")'
    path = archive(statements, "def save(x: Tensor) -> Tensor:\n  return x\n")
    assert any("save" in message for message in list_messages(path, "unsafe-global"))
    with contextlib.suppress(RuntimeError):  # a number that torch does not read
        torch.jit.load(str(path))
        assert (tmp_path / "HARM").exists()


#: Calls whose first word follows another word, for torch's lexer; the archive defines a method of the same name.
JOINED_WORDS = (
    "1 is not{}",
    "1.5 is not{}",
    "1.is not {}",
    "0x1. is not{}",
    "1 not in{}",
    "x not in{}",
    "1or 1 is not{}",
    "(1)is not{}",
)


@pytest.mark.parametrize("expression", JOINED_WORDS)
def test_operator_without_a_space_does_not_hide_a_call(expression):
    """torch's lexer takes `is not` for a single token, whatever follows."""
    call = expression.format('torch.save(y, "HARM")')
    code = f"class N(Module):\n  def save(self, y):\n    return y\n  def f(self, x, y):\n    z = {call}\n    return y\n"
    assert "TorchScript" in [call.module for call in script_code.find_calls(code.encode(), Steps()) if call.why]


def test_numbers_and_names_are_not_words_without_a_space():
    """Exponents, complex numbers, names with digits, and the operators themselves are not reported."""
    code = b"x = 1e-05\ny = 2.5E10\nz = 1.5j\nw = conv2d_1e5x\nif x is not y:\n  u = x not in [1., 2]\nv = _1torch\n"
    assert list(script_code.find_calls(code, Steps())) == []


#: Computed defaults, which torch.jit.load evaluates.
DEFAULTS = (
    'bool=1 is nottorch.save("x", "HARM")',
    "Tensor=torch.ones([4])",
    "int=len(torch.ones([1]))",
    "int=2 ** 31",
    "bool\n    =1. is nottorch.save(x)",
    "bool=len((1,)) == len(torch.ones([1]))",
)


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_default_that_computes_runs_on_load(default, records, tmp_path):
    """torch evaluates the defaults of all parameters when loading the code, called or not."""
    code = next(data for name, data in records.items() if name.endswith(".py")).decode()
    code = code.replace("x: Tensor) -> Tensor:", f"x: Tensor,\n    b: {default}) -> Tensor:", 1)
    assert "b: " in code
    assert [call.on_load for _, call in script_code.find_calls_on_load([code.encode()], Steps())] == [True]


@pytest.mark.parametrize(
    "default", ["float=1.5", "Optional[Tensor]=None", "List[int]=[1, -2]", 'str="torch.save()"', 'float=float("inf")']
)
def test_a_default_that_is_a_value_is_clean(default):
    """torch writes these defaults for constants."""
    parameters = f"self: __torch__.N,\n    x: Tensor,\n    b: {default}"
    code = f"class N(Module):\n  def f({parameters}) -> Tensor:\n    return torch.relu(x)\n"
    assert list(script_code.find_calls_on_load([code.encode()], Steps())) == []


@pytest.mark.parametrize("name", HARMLESS_STATEMENTS)
def test_code_that_only_computes_is_clean(name, archive):
    """The words are in texts and comments, and in longer names; torch compiles all of the code."""
    path = archive(HARMLESS_STATEMENTS[name])
    torch.jit.load(str(path))
    assert list_messages(path, *PICKLES) == []


def test_message_distinguishes_load_from_a_later_call(archive):
    """Loading calls `__setstate__`; other functions run only when called. The place is the byte in the file."""
    path = archive(WRITES["plain"], FILE_FUNCTION)
    message, _ = list_messages(path, "unsafe-global")
    assert message.startswith("loading the file calls torch.from_file, which maps a file into memory")
    path = archive("pass", FILE_FUNCTION)
    (finding,) = audit(Request((str(path),), select=("unsafe-global",))).findings
    assert finding.message.startswith("the code of the file calls torch.from_file")
    assert path.read_bytes()[finding.place.offset :].startswith(b"torch.from_file(p")


def test_operators_and_classes_of_other_libraries_are_unknown():
    """Operators of torch are known; operators of its companion libraries are reported if they touch files."""

    def list_calls(code: bytes) -> list[tuple[str, str, bool]]:
        return [(call.module, call.name, call.why is not None) for call in script_code.find_calls(code, Steps())]

    assert list_calls(b"x = ops.mylib.run(1)") == [("torch.ops.mylib", "run", False)]
    assert list_calls(b"x = ops.torchvision.nms(1)\ny = ops.image.decode_jpeg(x)") == []
    assert list_calls(b'x = ops.image.read_file("a")') == [("torch.ops.image", "read_file", True)]
    assert list_calls(b"x = ops.torchaudio.sox_io_save_audio_file(1)")[0][2]
    assert list_calls(b"x = ops.prim.PythonOp(1)") == [("torch.ops.prim", "PythonOp", True)]
    assert list_calls(b"x : __torch__.torch.classes.quantized.LinearPackedParamsBase") == []
    assert list_calls(b"x = __torch__.torch.classes.mine.Thing(1)") == [("torch.classes.mine", "Thing", False)]
    assert list_calls(b"x = __torch__.torch\ny = x.classes") == [("__torch__.torch", "*", True)]


#: Statements that access memory at an offset from the file, far outside of the tensor.
OUT_OF_BOUNDS_STATEMENTS = {
    "reinterpret": "t = torch.fill_(ops.inductor._reinterpret_tensor(st[0], [4], [1], 100000000000), 1)",
    "pool": "t = torch.sum(ops.inductor._alloc_from_pool(st[0], 100000000000, 6, [4], [1]))",
    "strides": "t = torch.sum(torch._reshape_alias(st[0], [4], [100000000000]))",
    "method": "t = torch.sum((st[0])._reshape_alias([4], [100000000000]))",
    "getattr": """t = torch.sum(getattr(st[0], "_reshape" '_alias')([4], [100000000000]))""",
    "sparse": "t = torch._sparse_coo_tensor_unsafe(torch.full([1, 1], 100000000000, dtype=4), torch.ones([1]), [4])"
    "\n    t = t.to_dense()",
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS_STATEMENTS)
def test_an_operator_that_does_not_check_memory_is_unsafe(name, archive, forked_python):
    """torch.jit.load runs the operator and crashes; the audit does not pass the file."""
    path = archive(f"{OUT_OF_BOUNDS_STATEMENTS[name]}\n    self.w = t")
    operator, other_messages = list_messages(path, "unsafe-global")
    assert "__setstate__ runs" not in operator
    assert "__setstate__ runs" in other_messages
    load = f"import torch; torch.jit.load({str(path)!r})"
    assert forked_python(load).returncode < 0


@pytest.mark.parametrize("operator", ["symm_mem::memset32_", "static_runtime::create_owned_ref", "inductor::new"])
def test_an_operator_of_an_internal_namespace_is_unsafe(operator):
    """Bytecode and graphs of torch.export name operators this way; the test above covers code."""
    assert program_operators.describe_harm(operator)


@pytest.mark.parametrize("operator", ["prims::_make_token", "c10d::send", "torchvision::x", "streams::fork", "cuda::x"])
def test_only_the_listed_operators_of_a_namespace_are_clean(operator):
    """No namespace is trusted as a whole: its next operator may read a file."""
    assert program_operators.is_shipped(operator)
    assert not program_operators.is_listed(operator)
    assert not program_operators.describe_harm(operator)


def test_an_unknown_operator_is_a_warning(archive):
    """No harm of the operator is known."""
    (message,) = list_messages(archive("t = ops.mylib.run(1)"), "unknown-global")
    assert (
        "loading the file calls torch.ops.mylib.run, which belongs to a library outside torch, torchvision" in message
    )


def test_attribute_and_parameter_names_are_not_calls():
    """A module may use any names for its attributes and parameters."""
    code = b"class A(Module):\n  ops : Tensor\n  torch : Tensor\n  def f(self: A, torch: int):\n    g(torch=1)\n"
    assert list(script_code.find_calls(code, Steps())) == []
    assert [call.name for call in script_code.find_calls(b"    a = torch\n", Steps())] == ["*"]
    assert [call.name for call in script_code.find_calls(b"    g(torch=torch)\n", Steps())] == ["*"]


@pytest.mark.parametrize(
    "name",
    ["code/__torch__.py", ".data/ts_code/code/a.py", ".data/ts_code/0/code/a/b.py", ".data/ts_code/a/b/code/c.py"],
)
def test_code_is_read_in_each_folder_that_torch_reads(name, tmp_path):
    """Compressed code and code of torch.package are read; another Python file of the archive is not code."""
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "a.pt", "w", method) as file:
            file.writestr("a/data.pkl", b"\x80\x02}.")
            file.writestr("a/" + name, b"t = torch.from_file(1)\n")
            file.writestr("a/model.py", b"torch.save(1)\n")
        (actual,) = [finding for finding in scan_pickles(str(tmp_path / "a.pt")) if finding.doer]
        assert actual.where == f"a/{name}, line 1"
        assert actual.names[0].name == "from_file"


UNCHECKED_OPERATORS = {
    "indices": "torch.max_pool2d_with_indices_backward(x, x, [2, 2], [2, 2], [0, 0], [1, 1], False, x)",
    "rows": "torch._convert_indices_from_coo_to_csr(x, 2)",
    "a method": "(x)._convert_indices_from_coo_to_csr(2)",
    "a name of a method": 'getattr(x, "_convert_indices" "_from_coo_to_csr")(2)',
    "segments": 'torch.segment_reduce(x, "sum", lengths=x, unsafe=True)',
    "an optimizer": "torch._fused_sgd_([x], [x], [x], weight_decay=0., momentum=0., lr=0.)",
    "offsets": "ops.quantized.embedding_bag_byte_rowwise_offsets(x, x, x)",
}
UNLISTED_OPERATORS = {
    "labels": "torch.ctc_loss(x, x, x, x)",
    "a newer operator": "torch.operator_of_a_newer_torch(x)",
    "a method of a newer torch": "(x).operator_of_a_newer_torch()",
    "indices of a sparse tensor": "(x).indices()",
    "a sparse tensor's own indices": "torch._indices(x)",
    "offsets of a nested tensor": "torch._nested_tensor_storage_offsets(x)",
    "primitives": "ops.prim.FusionGroup(x)",
    "a library's": "ops.mkldnn.data_ptr(x)",
}


@pytest.mark.parametrize("name", UNCHECKED_OPERATORS)
def test_an_operator_that_trusts_its_arguments_is_unsafe(name):
    """The operator is found under any spelling, and does not run on load."""
    (call,) = script_code.find_calls(f"    t = {UNCHECKED_OPERATORS[name]}\n".encode(), Steps())
    assert "torch does not check" in call.why
    assert not call.on_load


@pytest.mark.parametrize(
    "call",
    ["clone(x, memory_format=4)", "to(x, 6, False, True, 4)", "empty_like(x, memory_format = 4)", "sum(x, dtype=-1)"],
)
def test_invalid_dtype_or_format_number_is_unsafe(call, records, tmp_path, forked_python):
    """torch looks up the number in a table; three of the calls crash."""
    (number,) = script_enumerations.find_invalid_numbers(f"    t = torch.{call}\n".encode(), Steps())
    assert number.why == (
        "gets a number that is not a valid dtype, layout or memory format; torch does not check the number, and "
        "may read memory outside its tables"
    )
    if "sum" not in call:
        changed_records = {
            name: data.replace(b"torch.mul(x, w)", f"torch.{call}".encode()) for name, data in records.items()
        }
        build_archive(tmp_path / "a.pt", changed_records, "")
        code = f"import torch; torch.jit.load({str(tmp_path / 'a.pt')!r})(torch.rand(2, 3, 4, 4))"
        assert forked_python(code).returncode < 0


def test_formats_and_dtypes_of_torch_are_clean():
    """The numbers are valid, as printed by torch."""
    calls = ["clone(x, memory_format=3)", "to(x, 6, False, True, None)", "to(x, dtype=45, layout=0)", "to(x, 15, 1, 2)"]
    code = "".join(f"    t = torch.{call}\n" for call in calls).encode()
    assert list(script_code.find_calls(code, Steps())) == []


@pytest.mark.parametrize("name", UNLISTED_OPERATORS)
def test_an_operator_off_the_list_is_unknown(name):
    """The list has the allowed operators: an operator that nobody has checked is not clean."""
    (call,) = script_code.find_calls(f"    t = {UNLISTED_OPERATORS[name]}\n".encode(), Steps())
    assert call.why is None


def test_methods_of_the_archive_are_not_operators(archive):
    """The `def` of the method may be in another text; the name of an operator stays an operator."""
    class_code = b"class A(Module):\n  def scale(self: A, x: Tensor) -> Tensor:\n    return x\n"
    code = b"    t = (self).scale(x, )\n"
    assert [call.name for call in script_code.find_calls(code, Steps())] == ["scale"]
    assert list(script_code.find_calls(code, Steps(), script_code.list_functions([code, class_code]))) == []
    hidden = b"def _cummax_helper(x: Tensor) -> Tensor:\n  return (x)._cummax_helper(x, x, 0)\n"
    assert [call.name for call in script_code.find_calls(hidden, Steps())] == ["_cummax_helper"]


def test_message_names_an_unlisted_operator_of_torch(archive):
    """The message for torch's own operator differs from the message for a library's operator."""
    path = archive("pass", "def f(x: Tensor) -> Tensor:\n  return torch.ctc_loss(x, x, x, x)\n")
    (message,) = list_messages(path, "unknown-global")
    assert (
        "the code of the file calls torch.ctc_loss, which is not on the list of operators that torch writes" in message
    )


@pytest.fixture
def operators(forked_python) -> set[str]:
    """The operators of torch; a process without other libraries lists them."""
    code = "import torch; print(*{schema.name for schema in torch._C._jit_get_all_schemas()})"
    return set(forked_python(code).stdout.split())


def test_listed_operators_exist_in_torch(operators):
    """Each listed operator belongs to the installed torch or an older torch, and has no known harm."""
    older = {
        "chain_matmul",
        "eig",
        "fft",
        "gels",
        "ger",
        "ifft",
        "irfft",
        "lstsq",
        "matrix_rank",
        "rfft",
        "solve",
        "symeig",
    }
    listed_names = name_lists.read_operators("listed")["aten"]
    assert {name for name in listed_names if f"aten::{name}" not in operators} <= older
    assert [name for name in listed_names if program_operators.describe_harm(f"aten::{name}")] == []


def test_harmful_methods_equal_those_of_torch(forked_python):
    """An operator with an argument `self`, at any place, is a method of values."""
    code = "import torch; print(*{schema.name for schema in torch._C._jit_get_all_schemas() "
    code += "if schema.name.startswith('aten::') and any(a.name == 'self' for a in schema.arguments)})"
    methods = {name for name in forked_python(code).stdout.split() if program_operators.describe_harm(name)}
    assert {name.removeprefix("aten::") for name in methods} == program_operators.HARMFUL_METHODS


class Writer(nn.Module):
    """Model that maps a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_file("HARM", False, 4)


def test_harmful_operator_in_bytecode_is_found(tmp_path):
    """The lite interpreter runs the bytecode in place of the code."""
    torch.jit.script(Writer())._save_for_lite_interpreter(str(tmp_path / "a.ptl"))
    places = [finding.where.rpartition("/")[2] for finding in scan_pickles(str(tmp_path / "a.ptl")) if finding.doer]
    assert "bytecode.pkl" in places
    torch.jit.script(nn.Linear(2, 2))._save_for_lite_interpreter(str(tmp_path / "b.ptl"))
    assert not [finding for finding in scan_pickles(str(tmp_path / "b.ptl")) if finding.doer]


def test_bytecode_of_the_lite_interpreter_is_a_warning(tmp_path, statecli, forked_python):
    """The interpreter reads an attribute of any number: torch 2.13 crashes on this file with SIGSEGV."""
    path = tmp_path / "a.ptl"
    torch.jit.script(nn.Sequential(nn.Linear(2, 2)))._save_for_lite_interpreter(str(path))
    records = read_archive(path)
    version, *functions = pickle.loads(records["bytecode.pkl"])
    for name, table, *fields in functions[:1]:
        parts = dict(table)
        first, *other_instructions = parts["instructions"]
        parts["instructions"] = (first, ("LOAD", 1, 0), ("GET_ATTR", 1_000_000_000, 0), *other_instructions)
        functions[0] = (name, tuple(parts.items()), *fields)
    records["bytecode.pkl"] = pickle.dumps((version, *functions), 2)
    write_archive({name: data for name, data in records.items() if name != "byteorder"}, str(path))
    code = "from torch.jit.mobile import _load_for_lite_interpreter as load, torch; load('a.ptl')(torch.ones(1, 2))"
    assert forked_python(code, cwd=tmp_path).returncode < 0
    run = statecli("audit", str(path))
    assert run.code == 1
    assert "a/bytecode.pkl" in run.out
    assert "torch's lite interpreter for mobile devices does not check all numbers in this bytecode" in run.out


@pytest.mark.parametrize("config", [b"", b"[", b"{}{}"], ids=repr)
def test_unreadable_configuration_does_not_hide_bytecode(tmp_path, config, statecli):
    """Then any record of a torch.export archive may be an object; a record of bytecode stays bytecode."""
    torch.jit.script(Writer())._save_for_lite_interpreter(str(tmp_path / "a.ptl"))
    # The lite interpreter does not read the code.
    records = {
        name: b"N.\n" if name.endswith(".py") else data for name, data in read_records(tmp_path / "a.ptl").items()
    }
    other_records = {"a/Archive_format": b"", "a/data/weights/m_weights_config.json": config}
    findings = scan_pickles(str(build_archive(tmp_path / "b.ptl", {**records, **other_records}, "")))
    assert "bytecode.pkl" in [finding.where.rpartition("/")[2] for finding in findings if finding.doer]
    assert any("m_weights_config.json" in finding.unread for finding in findings if finding.unread)
    assert statecli("audit", str(tmp_path / "b.ptl")).code == 2


@pytest.mark.parametrize("opcode", [b"\x8d\x0f\0\0\0\0\0\0\0", b"\x8c\x0f", b"\n"], ids=repr)
def test_bytecode_operator_is_found_under_each_text_opcode(opcode):
    """torch's own unpickler reads texts from several opcodes."""
    data = b"\x80\x02(X\x07\0\0\0forward" + opcode + b"aten::from_file\nt."
    assert [call.name for call in script_code.find_bytecode_calls(data, Steps())] == ["from_file"]
    assert list(script_code.find_bytecode_calls(data.replace(b"from_file", b"cos\0\0\0\0\0\0"), Steps())) == []


def test_unread_code_is_reported(records, tmp_path, monkeypatch):
    """The report covers code beyond the limit, and archives of torch 1.0, which name their code in `model.json`."""
    path = str(build_archive(tmp_path / "a.pt", {**records, "x/model.json": b"{}"}, ""))
    assert ["torch 1.0" in finding.unread for finding in scan_pickles(path) if finding.unread] == [True]
    monkeypatch.setattr("statecli.file_scan.code_scan.MAX_CODE_BYTES", 100)
    assert any("the code has more than 100 bytes" in (finding.unread or "") for finding in scan_pickles(path))


def test_every_torch_operator_has_a_known_namespace(operators):
    """Operators with names about files or Python have a known harm."""
    assert len(operators) > 1000
    assert [
        operator
        for operator in operators
        if not (program_operators.is_shipped(operator) or program_operators.describe_harm(operator))
    ] == []
    touching = [operator for operator in operators if operator.endswith(("_file", "::save", "PythonOp", "load_tensor"))]
    assert len(touching) > 3
    assert [operator for operator in touching if not program_operators.describe_harm(operator)] == []


def test_archive_with_its_version_in_data_is_audited(records, tmp_path):
    """torch writes the version there if a trace keeps its inputs, and looks there first."""
    moved = {name.replace("/version", "/.data/version"): data for name, data in records.items()}
    path = str(build_archive(tmp_path / "a.pt", moved, ""))
    torch.jit.load(path)
    (target,) = audit(Request((path,))).targets
    assert (target.status.value, target.tensors) == ("audited", 1)


#: Statements of a `__setstate__` that crash the process or never end, though each operator is torch's own.
POOL_ARGUMENTS = (
    "torch.full([1, 1, 1, 1], 1.5), torch.zeros([1, 1, 2, 2]), [2, 2], [2, 2], [0, 0], [1, 1], False,"
    " torch.full([1, 1, 1, 1], 1000000000000, dtype=4)"
)
GRADIENT = POOL_ARGUMENTS[:29]
CRASHES = {
    "an operator": f"self.w = torch.max_pool2d_with_indices_backward({POOL_ARGUMENTS})",
    "another name of it": f"ff = torch.max_pool2d_with_indices_backward\n    self.w = ff({POOL_ARGUMENTS})",
    "a method": "g = torch.zeros([1, 1, 2, 2])\n    self.w = (g).max_pool2d_with_indices_backward("
    f"{GRADIENT}{POOL_ARGUMENTS[56:]})",
    "a name of a function": f"len = torch.max_pool2d_with_indices_backward\n    self.w = len({POOL_ARGUMENTS})",
    "a function": "self.w = __torch__.tests.formats.test_script_code.made()",
    "a function's function": "self.w = __torch__.tests.formats.test_script_code.more()",
}
POOL_FUNCTIONS = (
    f"def made() -> Tensor:\n  return torch.max_pool2d_with_indices_backward({POOL_ARGUMENTS})\n"
    "def more() -> Tensor:\n  return __torch__.tests.formats.test_script_code.made()\n"
    "def max_pool2d_with_indices_backward() -> int:\n  return 1\n"
)


@pytest.mark.parametrize("name", CRASHES)
def test_an_operator_that_loading_runs_is_found_and_crashes(name, archive, forked_python):
    """In a `__setstate__`, and in functions that it may call, only operators that pack weights are exempt."""
    path = archive(CRASHES[name], POOL_FUNCTIONS)
    assert any(
        "max_pool2d_with_indices_backward" in message or "torch.len" in message or "torch.ff" in message
        for message in list_messages(path, "unsafe-global")
    )
    assert forked_python(f"import torch; torch.jit.load({str(path)!r})").returncode < 0


@pytest.mark.parametrize(
    "loop", ["while True:\n      pass", "for n in range(1000000000000):\n      pass", "n = (1 + 2)"]
)
def test_a_loop_that_loading_runs_is_found(loop, archive):
    """Neither the end of the loop nor the size of an operator's result can be predicted."""
    assert any(
        "statecli cannot predict whether this code ends" in message
        for message in list_messages(archive(loop), "unsafe-global")
    )


def test_function_that_load_does_not_run_is_checked_by_operator(archive):
    """No `__setstate__` mentions the function: its loops and calls are not findings, but its operator is."""
    (message,) = list_messages(archive("pass", POOL_FUNCTIONS), "unsafe-global")
    assert message.startswith(
        "the code of the file calls torch.max_pool2d_with_indices_backward, which uses sizes or indices"
    )
    assert (
        list_messages(archive("pass", POOL_FUNCTIONS.replace("max_pool2d_with_indices_backward(", "relu(")), *PICKLES)
        == []
    )


@pytest.mark.parametrize("kind", ["Linear", "Conv1d", "Conv2d", "ConvTranspose2d", "EmbeddingBag"])
def test_quantized_modules_of_torch_are_clean(kind, tmp_path):
    """The modules pack their weights during loading."""
    module_class = getattr(torch.ao.nn.quantized, kind)
    module = module_class(10, 8) if kind in ("Linear", "EmbeddingBag") else module_class(3, 4, 3)
    torch.jit.save(torch.jit.script(module), tmp_path / "x.pt")
    assert list_messages(tmp_path / "x.pt", *PICKLES) == []


def save_convolution(folder: Path, *, frozen: bool, groups: int = 1) -> Path:
    """Save a scripted quantized convolution, with its numbers in a state or, frozen, in a tensor; then set `groups`."""
    convolution = torch.ao.nn.quantized.Conv2d(4, 4, 3)
    weight = torch.quantize_per_tensor(torch.ones(4, 4, 3, 3), 1.0, 0, torch.qint8)
    convolution.set_weight_bias(weight, convolution.bias())  # which torch leaves as the memory is
    if not frozen:
        convolution.groups = groups
    scripted = torch.jit.script(nn.Sequential(convolution).eval())
    path = folder / "conv.pt"
    torch.jit.save(torch.jit.freeze(scripted) if frozen else scripted, path)
    if frozen and groups != 1:
        contents = read_records(path)
        numbers = contents["conv/constants/0"]
        contents["conv/constants/0"] = numbers[:-4] + groups.to_bytes(2, "little") + numbers[-2:]
        build_archive(path, contents, "")
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, True])
def test_quantized_convolution_with_0_groups_is_unsafe(frozen, tmp_path, forked_python):
    """torch's own archive is clean. With 0 groups fbgemm divides by zero and ends the process; onednn refuses."""
    assert list_messages(save_convolution(tmp_path, frozen=frozen), "unsafe-global") == []
    path = save_convolution(tmp_path, frozen=frozen, groups=0)
    assert "a state that no checkpoint needs" in list_messages(path, "unsafe-global")[0]
    code = "import torch; torch.backends.quantized.engine = 'fbgemm'; torch.jit.load('conv.pt')"
    assert forked_python(code, cwd=tmp_path).returncode < 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["byteorder", "ByteOrder"])
def test_numbers_of_a_big_endian_archive_are_unknown(name, tmp_path):
    """torch.load swaps the numbers, torch.jit.load does not."""
    path = save_convolution(tmp_path, frozen=True)
    contents = {record: data for record, data in read_records(path).items() if not record.endswith("byteorder")}
    for order, is_known in ((b"little", True), (b"big", False)):
        build_archive(path, {**contents, f"conv/{name}": order}, "")
        mentions = [mention for finding in scan_pickles(str(path)) for mention in finding.names]
        assert any("a state that no checkpoint needs" in (mention.misuse or "") for mention in mentions) != is_known


#: Replacements in the code of a quantized convolution, so that the code packs with 0 groups.
NUMBER_REPLACEMENTS = {
    "a number in the call": (", groups)", ", 0)"),
    "a number in the call, computed": (", groups)", ", torch.len([]))"),
    "a number by another name": ("groups = self.groups", "groups = 0"),
    "a name that is set twice": ("groups = self.groups", "groups = self.groups\n      groups = 0"),
    "an attribute that is set to a number": ("self.groups = (state)[8]", "self.groups = 0"),
    "an attribute that is set to another part": ("self.groups = (state)[8]", "self.groups = (state)[13]"),
    "an attribute that is set again": ("self.groups = (state)[8]", "self.groups = (state)[8]\n    self.groups = 0"),
    "a stride of 0": ("stride = self.stride", "stride = (0, 0)"),
    "a module by another name": ("modules.conv", "modules.other"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NUMBER_REPLACEMENTS)
def test_code_that_packs_with_other_numbers_is_found(name, tmp_path):
    """The state is sound, but the code takes other numbers."""
    path = save_convolution(tmp_path, frozen=False)
    old, new = NUMBER_REPLACEMENTS[name]
    changed = {
        record.replace("modules/conv.py", "modules/other.py") if "other" in new else record: (
            data.replace(old.encode(), new.encode()) if record.endswith((".py", "data.pkl")) else data
        )
        for record, data in read_records(path).items()
    }
    build_archive(path, changed, "")
    assert "may get other numbers from __setstate__ than the file saves" in "".join(
        list_messages(path, "unsafe-global")
    )


#: Repeated texts: unfinished lists, paths, calls, words, targets, spaces and comments.
REPEATED_TEXTS = (
    *("s, ", "a.\n", "a . ", "a()\n", "if (", "conv", "conv_", "x(", "(self ", "(self:__torch__.", "self.stride, "),
    *("s = [s, s]\n", "s = ", "s, s =\n", "torch .\n", "torch \\\n", "dtype \n", ". \n", "#\n", "# type: ", '"', "'"),
    *("ops.quantized.conv2d_prepack(", "ops.quantized.conv2d_prepack(a, [b, ", "(state)[1] ", "stride: ", "def a("),
    *("    ", "\\", "aten::", "__setstate__ ", "getattr(a, 'b')", "\\\n", "-", " -", ")(", "a=b=", "class a:\n", "_"),
)


@pytest.mark.parametrize("unit", REPEATED_TEXTS)
def test_repeated_text_is_read_in_linear_time(unit):
    """40 KB of a function that packs a convolution on load: a pass takes 0.01 s, a pass for each word minutes."""
    head = "class Conv2d(Module):\n  def __setstate__(self: __torch__.C, state: int) -> NoneType:\n    "
    pack = "\n    a = ops.quantized.conv2d_prepack(w, b, s, p, s, s)\n    return None\n"
    code = (head + unit * (40_000 // len(unit)) + pack).encode()
    records, steps = ["x/code/__torch__/torch/ao/nn/quantized/modules/conv.py"], Steps()
    begin = time.process_time()
    with contextlib.suppress(OutOfSteps):
        list(script_code.find_calls(code, steps, script_code.list_functions([code])))
        list(script_code.find_calls_on_load([code], steps, records))
    script_nesting.has_deep_statement(code, Steps())
    assert time.process_time() - begin < 0.6


def test_numbers_set_outside_of_convolutions_are_found_in_linear_time():
    """A copy of the text before each number took minutes for 4 MB."""
    code = ("class M(Module):\n  def __setstate__(self, state):\n" + "self.groups=\n" * 300_000).encode()
    begin = time.process_time()
    list(script_code.find_calls_on_load([code], Steps(), ["x/code/__torch__.py"]))
    assert time.process_time() - begin < 10


def test_long_line_of_divisors_is_read_in_linear_time():
    """Each `.stride,` of the line may begin the targets of an assignment."""
    steps = time.process_time()
    for end, count in (("", 0), (" = 1", 1)):
        assert len(script_code._DIVISOR_ASSIGNMENT.findall("x" + ".stride, " * 100_000 + "y" + end)) == count
    assert time.process_time() - steps < 2
    assert script_code._DIVISOR_ASSIGNMENT.search("self.stride, other = 1, 2")
    assert not script_code._DIVISOR_ASSIGNMENT.search("self.stride == 1")


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc", "compressed"])
def test_operators_that_make_sparse_tensors_are_unsafe(kind):
    """torch checks no index unless a program requests the check."""
    assert "whose indices torch does not check" in program_operators.describe_harm(f"aten::sparse_{kind}_tensor")
    assert program_operators.describe_harm("aten::sparse_mask") is None


_DEEP_STATEMENTS = {
    "parentheses": "(" * 30_000 + "x" + ")" * 30_000,
    "signs": "-" * 30_000 + "x",
    "calls": "torch.neg(" * 30_000 + "x" + ")" * 30_000,
    "sums": "x" + " + x" * 30_000,
    "sums on many lines": "(x" + " +\n x" * 30_000 + ")",
    "methods": "x" + ".t()" * 30_000,
    "indices": "x" + "[0]" * 30_000,
    "conditions": "x if True else " * 30_000 + "x",
    "behind a string": "(')', " * 30_000 + "x" + ")" * 30_000,
}


@pytest.mark.parametrize("expression", _DEEP_STATEMENTS.values(), ids=list(_DEEP_STATEMENTS))
def test_a_statement_that_overflows_the_stack_of_the_parser_is_reported(expression):
    """torch.jit.load crashes at each of these statements."""
    code = f"def forward(self, x):\n  y = torch.sin(x)\n  return {expression}\n".encode()
    assert script_nesting.has_deep_statement(code, Steps())


def test_long_programs_and_long_lists_are_not_deep():
    """The code has thousands of statements, and a list of ten thousand negative numbers."""
    numbers = ", ".join(f"-{n}.5e-05" for n in range(10_000))
    statements = "".join(f"  x{n} = torch.add(x, -{n}, alpha=1)\n" for n in range(10_000))
    code = f"def forward(self, x):\n  weights = [{numbers}]\n{statements}  return x\n".encode()
    assert not script_nesting.has_deep_statement(code, Steps())


def test_archive_with_a_deep_statement_fails_the_audit(statecli, in_tmp_path):
    """The scan reports the record, and the audit does not exit with 0."""

    class Wave(torch.nn.Linear):
        def forward(self, x):
            return torch.sin(x)

    torch.jit.trace(Wave(2, 2), torch.ones(2)).save("sin.pt")
    deep_call = b"(" * 30_000 + b"torch.sin(x)" + b")" * 30_000
    records = read_archive("sin.pt")
    write_archive({name: data.replace(b"torch.sin(x)", deep_call) for name, data in records.items()}, "deep.pt")
    assert statecli("audit", "sin.pt", "--select", "pickles").code == 0
    result = statecli("audit", "deep.pt", "--select", "pickles")
    assert result.code == 1
    assert "which crashes torch.jit.load" in result.out


class Pairs(nn.Module):
    """Model with a list whose type is written in the archive."""

    def __init__(self):
        super().__init__()
        self.pairs = [("a", 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self.pairs)


_LIST_OF_PAIRS = b"List[Tuple[str, int]]"


@pytest.mark.parametrize("record", ["data.pkl", "bytecode.pkl"])
def test_type_text_that_overflows_the_stack_fails_the_audit(record, statecli, in_tmp_path, tmp_path, forked_python):
    """torch.jit.load and the lite interpreter parse the text of a type; both crash."""
    module = torch.jit.script(Pairs())
    module.save("pairs.pt") if record == "data.pkl" else module._save_for_lite_interpreter("pairs.pt")
    deep_type = b"List[" * 100_000 + b"int" + b"]" * 100_000
    long_text = b"X" + len(deep_type).to_bytes(4, "little") + deep_type
    records = read_archive("pairs.pt")
    old = _LIST_OF_PAIRS if record == "data.pkl" else b"Tensor"
    begin = b"X" + len(old).to_bytes(4, "little") + old
    assert begin in records[record]
    write_archive({**records, record: records[record].replace(begin, long_text, 1)}, "deep.pt")
    load = "torch.jit.load" if record == "data.pkl" else "torch.jit.mobile._load_for_lite_interpreter"
    assert forked_python(f"import torch, torch.jit.mobile; {load}('deep.pt')", cwd=tmp_path).returncode < 0
    assert "nested brackets" not in statecli("audit", "pairs.pt", "--select", "pickles").out
    result = statecli("audit", "deep.pt", "--select", "pickles")
    assert result.code == 1
    assert "nested brackets, which crashes torch" in result.out
