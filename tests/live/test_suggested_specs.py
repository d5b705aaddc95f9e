"""For a misspelt model, the error is one line with the correct line to type."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from statecli.core import python_names

torch = pytest.importorskip("torch")

#: Packages with the functions that statecli calls of libraries that may not be installed.
STAND_INS = {
    "adapters/__init__.py": """
        from torch import nn
        class PreTrainedModel(nn.Module): pass
        class LoraConfig:
            def __init__(self, rank=2, names=()): self.rank = rank
        class Adapted(nn.Module):
            def __init__(self, model: nn.Module, config: LoraConfig):
                super().__init__()
                self.model = model
                self.adapter = nn.Linear(config.rank, 2)
        def adapt(model: nn.Module, config: LoraConfig): return Adapted(model, config)
        def change(model: nn.Module, config: LoraConfig): model.changed = True
    """,
    "bodies/__init__.py": """
        from torch import nn
        from bodies.settings import BodyConfig
        class Body(nn.Module):
            def __init__(self, config: BodyConfig):
                super().__init__()
                self.layer = nn.Linear(config.width, 2)
    """,
    "bodies/settings.py": """
        class BodyConfig:
            def __init__(self, width=3): self.width = width
    """,
    "graphs/__init__.py": "import graphs.layers",
    "kornia/__init__.py": "",
    "graphs/wrapped.py": """
        from typing import Literal
        from torch import nn
        class Sized(nn.Module):
            def __init__(self, classes: int = 2): super().__init__()
        class Task(nn.Linear):
            def __init__(self, task: Literal["binary", "multiclass"], size: int = 3): super().__init__(size, 2)
    """,
    "graphs/layers.py": """
        from typing import Callable
        import torch
        class Fetching(torch.nn.Linear):
            def __init__(self, pretrained: bool = True):
                super().__init__(2, 2)
                if pretrained: torch.hub.load_state_dict_from_url("https://example.invalid/net.pt", "nowhere")
        class Around(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.part = Fetching()
        def pack(): return torch.nn.Linear(2, 3), None
        class Conv(torch.nn.Module):
            def __init__(self, nn: Callable, scale: float = 1.0, name: str = "conv"):
                super().__init__()
                self.nn, self.name = nn, name
            def forward(self, x): return self.nn(x)
    """,
}


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """Create the current folder, and the fake libraries as installed packages of another folder; forget them later."""
    for path, source in STAND_INS.items():
        (tmp_path / "installed" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "installed" / path).write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = set(sys.modules)
    yield tmp_path / "here"
    new = {key: sys.modules[key] for key in sys.modules.keys() - before}
    files = {key: getattr(module, "__dict__", {}).get("__file__") for key, module in new.items()}
    names = {key.partition(".")[0] for key, file in files.items() if str(file).startswith(str(tmp_path))}
    for key in [key for key in files if key.partition(".")[0] in names]:
        del sys.modules[key]


@pytest.fixture
def advise(statecli):
    """Type a refused target; return the message and the target that the message suggests, which must work.

    `values` replaces each `...`. Models of transformers are built on meta: with default sizes they fill gigabytes.
    """

    def type_line(*words: str, values: str = "") -> tuple[str, str]:
        refused = statecli("inspect", *words)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1), refused.err
        line = refused.err.rstrip("\n").rpartition("write ")[2]
        for end in (", or set ", ", with a value"):
            line = line.partition(end)[0]
        advised = shlex.split(line.replace("...", values) if values else line)
        device = ("--init-device", "meta") if advised[0].startswith("transformers") else ()
        result = statecli("inspect", *advised, *device, "-f", "json")
        assert result.code == 0, (advised, result.err)
        return refused.err, shlex.join(advised)

    return type_line


# --- classes of other packages in the arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    ["bodies:Body(BodyConfig(4))", "bodies.Body(BodyConfig(4))", "bodies:Body(bodies.settings:BodyConfig(width=4))"],
)
@pytest.mark.parametrize("callee", ["adapt", "Adapted"])
def test_an_argument_is_a_class_of_another_package(working_folder, statecli, callee, model):
    """The class is written with a colon or a dot, and its arguments use the names of its own module."""
    result = statecli("inspect", f"adapters:{callee}({model}, config=LoraConfig(rank=5))", "-f", "json")
    assert result.code == 0, result.err
    shapes = {name: row["shape"] for name, row in result.rows().items()}
    assert (shapes["model.layer.weight"], shapes["adapter.weight"]) == ([2, 4], [2, 5])


def test_only_packages_that_the_line_names_are_imported(working_folder, statecli):
    """A refused line imports no other package."""
    assert statecli("inspect", "adapters:adapt(torch.nn.Linear(2, 3), LoraConfig())").code == 0
    assert statecli("inspect", "adapters:adapt(Body(), LoraConfig())").code == 2
    assert "adapters" in sys.modules
    assert "bodies" not in sys.modules


def test_a_dotted_name_is_of_an_installed_package(working_folder, statecli):
    """A module of the current folder is written with a colon; an installed module of the name is imported first."""
    Path("own.py").write_text(
        "import torch\nclass Own(torch.nn.Linear):\n    def __init__(self): super().__init__(1, 1)\n"
    )
    assert statecli("inspect", "adapters:adapt(own.Own(), LoraConfig())").code == 2
    assert "own" not in sys.modules
    assert statecli("inspect", "adapters:adapt(own:Own(), LoraConfig())").code == 0
    Path("bodies.py").write_text("1 / 0\n")
    assert statecli("inspect", "adapters:adapt(bodies:Body(BodyConfig()), LoraConfig())").code == 0


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("os:system('touch ran')", "os belongs to Python's standard library"),
        ("os.system('touch ran')", "os.system is not defined in adapters; an argument is a number, a string in quotes"),
        ("bodies:os.system('touch ran')", "os.system is not defined in bodies"),
        ("bodies:missing", "missing is not defined in bodies; an argument is a number"),
        ("no_package:Body()", "no module is named no_package; install the package of no_package, or correct the name"),
        ("bodies:_hidden()", "is code, not a literal"),
    ],
)
def test_a_name_of_another_package_runs_no_command(working_folder, statecli, model, problem):
    """The error is one line, and no command runs."""
    result = statecli("inspect", f"adapters:adapt({model}, LoraConfig())")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert problem in result.err
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("adapters:adapt(Linear(2, 3), LoraConfig())", "adapters:adapt(torch.nn.Linear(2, 3), LoraConfig())"),
        (
            "adapters:adapt(Sequential(Linear(2, 3), ReLU()), LoraConfg())",
            "adapters:adapt(torch.nn.Sequential(Linear(2, 3), ReLU()), LoraConfig())",
        ),
        ("adapters:adapt(nn.Liner(2, 3), LoraConfig())", "adapters:adapt(torch.nn.Linear(2, 3), LoraConfig())"),
        ("graphs.layers:Conv", "graphs.layers:Conv(nn=torch.nn.Linear(2, 3))"),
        ("graphs.layers.Conv", "graphs.layers:Conv(nn=torch.nn.Linear(2, 3))"),
        ("graphs.layers:Conv(nn=Linear(2,3))", "graphs.layers:Conv(nn=torch.nn.Linear(2, 3))"),
        ("adapters:Adapted", "adapters:Adapted(model=torch.nn.Linear(2, 3), config=LoraConfig())"),
        (
            "graphs.layers:Conv(torch.nn.Linear(2, out_feature=3))",
            "graphs.layers:Conv(torch.nn.Linear(2, out_features=3))",
        ),
        (
            "graphs.layers:Conv(torch.nn.Linear(2, 3), name=convolution)",
            "graphs.layers:Conv(torch.nn.Linear(2, 3), name='convolution')",
        ),
    ],
)
def test_the_line_for_a_class_of_another_package_works(working_folder, advise, typed, expected_spec):
    """The package is written before the class."""
    assert shlex.split(advise(typed)[1]) == [expected_spec]


def test_the_lines_of_explain_import_the_other_package(working_folder):
    """The lines run in Python."""
    from statecli.commands.explain.model_code import build_model_code
    from statecli.targets.load import find_class_spec

    text = "adapters:Adapted(bodies:Body(bodies.settings.BodyConfig(4)), config=LoraConfig(5))"
    code = build_model_code(find_class_spec(text))
    names: dict[str, object] = {}
    exec("\n".join([*code.imports, f"model = {code.expression}"]), names)  # noqa: S102 - the printed lines
    assert names["model"].adapter.weight.shape == (2, 5)
    assert code.expression == "Adapted(bodies.Body(bodies.settings.BodyConfig(4)), config=LoraConfig(5))"


def test_a_function_with_the_name_of_a_folder_is_called(working_folder, statecli):
    """torchao.quantization has both a function and a folder `quantize_`."""
    package = working_folder.parent / "installed/folders"
    (package / "shrink").mkdir(parents=True)
    (package / "shrink/__init__.py").touch()
    (package / "__init__.py").write_text(
        "import folders.shrink\nfrom torch import nn\ndef shrink(width): return nn.Linear(width, 1)\n"
    )
    assert statecli("inspect", "folders.shrink(3)").code == 0
    assert "is a Python package" in statecli("inspect", "folders.shrink").err


def test_the_end_of_the_name_of_a_file_is_not_a_function(working_folder, statecli):
    """A library of models is imported, and does not define the name."""
    assert statecli("inspect", "kornia.pt").err.startswith("statecli: kornia.pt: cannot be opened: no such file")


# --- an argument without an annotation that takes a configuration -----------------------------------------------------

GUESSED = """
from dataclasses import dataclass
from torch import nn
@dataclass
class NetConfig:
    width: int = 3
class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.layer = nn.Linear(cfg.width, 2)
"""
SECOND = "@dataclass\nclass OptimizerConfig:\n    lr: float = 0.1\n"


def test_the_only_configuration_of_a_file_is_selected(working_folder, advise, statecli):
    """The configuration has a default for each field, so the line works."""
    Path("net.py").write_text(GUESSED)
    assert "'net.py:Net(cfg=NetConfig())'" in statecli("inspect", "net.py").err
    assert shlex.split(advise("net.py:Net")[1]) == ["net.py:Net(cfg=NetConfig())"]
    Path("net.json").write_text('{"width": 7}')
    result = statecli("inspect", "net.py:Net", "--config-json", "net.json", "-f", "json")
    assert [7] in [row["shape"][1:] for row in result.rows().values()]


def test_one_of_two_configurations_is_not_guessed(working_folder, statecli):
    """The advice is a function that builds the model."""
    Path("net.py").write_text(GUESSED + SECOND)
    assert "needs cfg; write a function make() in build.py" in statecli("inspect", "net.py:Net").err
    Path("net.json").write_text('{"width": 3}')
    error = statecli("inspect", "net.py:Net", "--config-json", "net.json").err
    assert "cfg takes a configuration whose class is unknown; write a function make() in build.py" in error


# --- torch.hub --------------------------------------------------------------------------------------------------------

HUB = """
dependencies = ["torch"]
import torch
def old(weights=None, **kwargs):
    return tiny(bool(weights or kwargs.get("pretrained")))
def tiny(pretrained=True, width=3):
    model = torch.nn.Linear(width, 2)
    if pretrained:
        model.load_state_dict(torch.hub.load_state_dict_from_url("https://example.invalid/tiny.pt"))
    return model
"""


@pytest.mark.parametrize(
    "arguments", ["'tiny'", "'tiny', pretrained=True", "'old', pretrained=True", "'tiny', width=4"]
)
def test_a_model_of_torch_hub_has_the_line_without_weights(working_folder, advise, monkeypatch, arguments):
    """The lines of torch about its cache and the download do not come before the error."""
    monkeypatch.setenv("TORCH_HOME", str(working_folder / "torch"))
    (working_folder / "torch/hub/own_repo_main").mkdir(parents=True)
    (working_folder / "torch/hub/own_repo_main/hubconf.py").write_text(HUB)
    message, line = advise(f"torch.hub:load('own/repo:main', {arguments})")
    assert "needs a download from https://example.invalid/tiny.pt" in message
    assert "pretrained=False" in line


# --- lines of libraries -----------------------------------------------------------------------------------------------

LOUD = """
import logging, sys, warnings
print("printed at import")
print("to stderr", file=sys.stderr)
warnings.warn("deprecated", FutureWarning)
logging.getLogger("loud").warning("a missing extension")
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        warnings.warn("deprecated in the constructor", FutureWarning)
        super().__init__(2, 3)
def say(text): print(text, file=sys.stderr)
"""


def test_lines_of_an_installed_library_do_not_come_before_the_result(working_folder, statecli, tmp_path, monkeypatch):
    """Lines at import and in a constructor are hidden; a library function that the user's code calls may print."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/loud.py").write_text(LOUD)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    Path("net.py").write_text("import loud, sys\nloud.say('by the library')\nprint('by me')\nNet = loud.Net\n")
    assert statecli("inspect", "loud:Net").err == ""
    del sys.modules["loud"]
    assert statecli("inspect", "net.py:Net").err == "by the library\nby me\n"


# --- wrong arguments and names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("torch.nn:Linear(in_features=2, out_feature=5)", "torch.nn:Linear(in_features=2, out_features=5)"),
        ("torch.nn:Linear(in_feature=2)", "torch.nn:Linear(in_features=2, out_features=3)"),
        ("torch.nn:Linear(2, zzz=4)", "torch.nn:Linear(2, out_features=3)"),
        ("torch.nn:Conv2d(3)", "torch.nn:Conv2d(3, out_channels=3, kernel_size=3)"),
        ("torch.nn:DataParallel", "torch.nn:DataParallel(module=torch.nn.Linear(2, 3))"),
        ("graphs.wrapped:Task('binary', sise=4)", "graphs.wrapped:Task('binary', size=4)"),
        ("graphs.wrapped:Task(binary)", "graphs.wrapped:Task('binary')"),
        ("bodes:Body(BodyConfig(4))", "bodies:Body(BodyConfig(4))"),
        ("graphs.layer:Conv(torch.nn.Linear(2, 3))", "graphs.layers:Conv(torch.nn.Linear(2, 3))"),
        ("bodies:Body(BodyConfig(widht=4))", "bodies:Body(BodyConfig(width=4))"),
        ("bodies:Body(BodyConfg(width=4))", "bodies:Body(BodyConfig(width=4))"),
        ("graphs.layers:Fetching", "graphs.layers:Fetching(pretrained=False)"),
        ("graphs.layers:Fetching(True)", "graphs.layers:Fetching(False)"),
    ],
)
def test_a_wrong_argument_or_name_has_the_line_to_type(working_folder, advise, typed, expected_spec):
    """The line adds missing arguments, replaces a similar name, and leaves out other names and pretrained weights."""
    assert shlex.split(advise(typed, values="3")[1]) == [expected_spec]


@pytest.mark.parametrize(
    ("typed", "end"),
    [
        ("torch.nn:Linear(2, 3, zzz=4)", "its signature is Linear(in_features: int, out_features: int, bias: bool = "),
        ("torch.nn:Linear(2, zzz=4)", "the constructor needs out_features and does not take zzz; write "),
        ("torch.nn:Liner(2, 3)", "torch.nn has no Liner; did you mean Linear or LazyLinear?"),
        ("torch:Linear(2, 3)", "torch has no Linear; did you mean torch.nn:Linear?"),
        ("graphs.layers:Task", "graphs.layers has no Task; did you mean graphs.wrapped:Task?"),
        ("graphs.layers:Zorkmid", "graphs.layers has no Zorkmid; its model classes are Around, Conv, Fetching"),
        (
            "graphs:layers",
            "layers is a Python module, not a model class or a function that returns a model",
        ),
        ("torch:Zorkmid", "torch has no Zorkmid; for example, write 'torch.nn:Linear(2, 3)'"),
        ("torch.nn:transf", "torch.nn has no transf; did you mean Transformer or TransformerDecoder or "),
        (
            "torch.nn:Linear(size, 3)",
            "size is not defined in torch.nn; for a string, write \"torch.nn:Linear('",
        ),
        ("torch.nn:Sequential(models.ReLU())", "models.ReLU is not defined in torch.nn; did you mean torch.nn.ReLU?"),
        ("torch.nn:Linear(2, 3", "the parenthesis after the class name is not closed"),
        ("torch.nn:Linear(2, 3).eval()", "write one pair of parentheses with literal values"),
        (
            "graphs.layers:Around",
            "needs a download from https://example.invalid/net.pt, but statecli",
        ),
        ("graphs.layers:Around", "by default: write pretrained=False, or set STATECLI_DOWNLOADS=1"),
    ],
)
def test_an_error_says_what_the_class_or_the_module_has(working_folder, statecli, typed, end):
    """The error has the signature, similar names, classes of the same name in other modules, or the model classes."""
    Path("../installed/graphs/__init__.py").write_text("import graphs.layers, graphs.wrapped\n")
    result = statecli("inspect", typed)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert end in result.err


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("adapters:adapt(net.py:Net(4), LoraConfig())", "an argument cannot be a class of the file net.py"),
        ("adapters:change(torch.nn.Linear(4, 2), LoraConfig())", "change returned None, not an nn.Module"),
        ("graphs.layers:pack", "pack returned a tuple, not an nn.Module"),
        ("torch:randn(3)", "randn returned a Tensor, not an nn.Module"),
        ("torch.nn:Linear(2, 2 * 2)", "argument 2 is code, not a literal; put a text in quotes; for code"),
        ("torch.nn:Sequential(**{})", "** is not a literal; put a text in quotes; for code"),
    ],
)
def test_a_model_that_no_target_can_name_has_advice_to_write_a_function(working_folder, statecli, typed, problem):
    Path("net.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    error = statecli("inspect", typed).err
    assert re.search(f"{re.escape(problem)}[;,] write a function make\\(\\) in build.py", error)


@pytest.mark.parametrize(
    "typed",
    [
        "torch.nn:Identity;",
        "nn.Identity",
        "nn.Linear(2, 3)",
        "Identity",
        "torch.nn.modules.linear.Identity",
        "graphs.wrapped.Sized(classes=4)",
        "graphs:wrapped.Sized(classes=4)",
    ],
)
def test_a_name_without_a_colon_is_the_model(working_folder, statecli, typed):
    """The package need not import the module of the class."""
    result = statecli("inspect", typed, "-f", "json")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    "typed",
    [
        "model = ",
        "model = torch.nn.Linear(2, 3)",
        "from torch.nn import Linear",
        "python -c 'print(1)'",
        "a = b = (lambda: 1)()",
        "from x",
    ],
)
def test_other_code_is_not_a_model(working_folder, statecli, typed):
    result = statecli("inspect", typed)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


# --- packages ---------------------------------------------------------------------------------------------------------


def test_a_package_for_another_torch_has_the_command_that_installs_both(working_folder, statecli):
    """torch does not find the operators of the package."""
    (working_folder.parent / "installed/unfit.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    end = "; torchvision was built for another version of torch: pip install -U torch torchvision\n"
    assert statecli("inspect", "unfit:Net").err.endswith(end)


def test_the_name_of_a_configuration_has_the_line_to_type(working_folder, advise):
    """No file has this name."""
    pytest.importorskip("transformers")
    for config in ("config='BertConfig'", "'BertConfig'"):
        line = "transformers:BertModel(config=BertConfig())"
        assert shlex.split(advise(f"transformers:BertModel({config})")[1]) == [line]
    for typed in ("AutoModel('bert')", "AutoModel('bert-base-uncased')"):
        message, line = advise(f"transformers:{typed}")
        assert "for the default configuration, write" in message
        assert shlex.split(line) == ["transformers:BertModel(config=BertConfig())"]


# --- a model without its download ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected_call"),
    [
        ("BertModel.from_pretrained('no/such')", "BertModel(config=BertConfig())"),
        ("AutoModel.from_pretrained('bert-base-uncased')", "BertModel(config=BertConfig())"),
        ("AutoModelForCausalLM.from_pretrained('no/tiny-gpt2_x')", "GPT2LMHeadModel(config=GPT2Config())"),
        ("AutoModel.from_pretrained('no/distilbert-base')", "DistilBertModel(config=DistilBertConfig())"),
    ],
)
def test_a_pretrained_model_has_the_line_with_random_values(
    working_folder, statecli, monkeypatch, typed, expected_call
):
    """Its class is known from the call, or from the name of the repository."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HOME", str(working_folder / "empty"))
    line = f"transformers:{expected_call}"
    error = statecli("inspect", f"transformers:{typed}").err
    assert f"for random values, write '{line}', or set STATECLI_DOWNLOADS=1 to allow the download" in error
    assert statecli("inspect", line, "--init-device", "meta").code == 0


def test_a_repository_of_an_unknown_model_is_read_in_place(working_folder, statecli):
    """No type of model has the name."""
    pytest.importorskip("transformers")
    error = statecli("inspect", "transformers:AutoModel.from_pretrained('no/zzz')").err
    assert "to list the tensors of the repository, write hf://no/zzz, or set STATECLI_DOWNLOADS=1" in error


# --- names without a colon --------------------------------------------------------------------------------------------


def test_class_of_a_file_is_suggested_before_a_layer_of_torch(working_folder, statecli):
    """The file is in the current folder."""
    Path("net.py").write_text("from torch import nn\nclass Identity(nn.Linear): pass\n")
    assert "net.py:Identity" in statecli("inspect", "Identity").err


@pytest.mark.parametrize("typed", ["torch-geometric:Own", "torch-geometric.Own"])
def test_the_name_of_a_package_on_the_index_names_its_module(working_folder, statecli, typed):
    """The name has a hyphen in place of the underscore."""
    (working_folder.parent / "installed/torch_geometric.py").write_text("from torch.nn import Identity as Own\n")
    assert statecli("inspect", typed).code == 0


# --- arguments that are classes of the same file ----------------------------------------------------------------------

PARTS = """
from typing import Callable, List, Optional, Type
from torch import nn
class Small(nn.Module):
    def __init__(self, size: int = 3):
        super().__init__()
        self.layer = nn.Linear(size, 2)
class Wrap(nn.Module):
    def __init__(self, inner: {}):
        super().__init__()
        self.inner = nn.ModuleList(inner) if isinstance(inner, list) else inner
def make(): return Small()
"""


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("Small", "Small()"),
        ("Optional[Small]", "Small()"),
        ("'Small | None'", "Small()"),
        ("List[Small]", "[Small()]"),
        ("list[Small]", "[Small()]"),
        ("Type[Small]", "Small"),
        ("nn.Module", "torch.nn.Linear(2, 3)"),
        ("list[nn.Module]", "[torch.nn.Linear(2, 3)]"),
        ("Callable[..., nn.Module]", "torch.nn.Identity"),
    ],
)
def test_a_class_that_takes_classes_of_its_file_is_listed_with_them(
    working_folder, statecli, advise, annotation, value
):
    """The line has the class as an argument, instead of a function to add."""
    Path("net.py").write_text(PARTS.format(annotation))
    target = f"net.py:Wrap(inner={value})"
    assert f"  '{target}'" in statecli("inspect", "net.py").err.splitlines()
    assert shlex.split(advise("net.py:Wrap")[1]) == [target]


def test_the_configuration_of_a_transformers_class_has_the_line_to_type(working_folder, advise, statecli):
    """The class of the configuration is known, and the line has no argument that the class does not take."""
    pytest.importorskip("transformers")
    for arguments in ("", "(pretrained=True)", "(hidden_size=24)"):
        line = advise(f"transformers:BertForSequenceClassification{arguments}")[1]
        assert shlex.split(line) == ["transformers:BertForSequenceClassification(config=BertConfig())"]
    end = "is not an nn.Module; write, for example, 'transformers:BertModel(config=BertConfig())'\n"
    assert statecli("inspect", "transformers:BertConfig").err.endswith(end)


def test_a_file_of_numbers_is_not_parsed_for_a_suggestion(tmp_path):
    """A list of 10 MB takes 40 seconds and gigabytes, and an audit of a folder asks for suggestions."""
    (tmp_path / "a.py").write_text("class A(Base): ...\nx = [" + "1," * (1 << 19) + "]\n")
    assert list(python_names.list_classes(str(tmp_path / "a.py"))) == []
