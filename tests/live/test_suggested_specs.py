"""For a misspelt model, the error is one line with the correct line to type."""

from __future__ import annotations

import io
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

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
    "kornia/feature.py": """
        from torch import nn
        class HardNet(nn.Module):
            def __init__(self, pretrained): super().__init__()
    """,
    "kornia/drawing/__init__.py": "def warp(x) -> 'Tensor': return x",
    "kornia/drawing/tall_net.py": """
        from torch import nn
        class Block(nn.Module):
            def __init__(self, size, name): super().__init__()
        class TallNet(nn.Module):
            def __init__(self, size: int, steps: int = 2):
                super().__init__()
                self.layer = nn.Linear(size, 2)
            @staticmethod
            def load(folder, name): raise OSError
        class Opened(nn.Module):
            def __init__(self, folder):
                super().__init__()
                raise OSError(folder)
        class ShortNet(nn.Module):
            @staticmethod
            def load(folder, kind: 'Kind'): raise OSError
    """,
    "metrics/__init__.py": "from metrics.image import MemorizedFrechetDistance",
    "metrics/parts/broken.py": "class Sharpness: pass\nraise SystemError",
    "metrics/parts/sharp.py": """
        from torch import nn
        class Sharpness(nn.Module): pass
        class MeanPartSharpness(Sharpness): pass
    """,
    "metrics/image.py": """
        from torch import nn
        class FrechetDistance(nn.Module): pass
        class LearnedFrechetDistance(FrechetDistance): pass
        class MemorizedFrechetDistance(FrechetDistance): pass
        class Quality(nn.Module):
            def __init__(self):
                raise ModuleNotFoundError("Either `pip install metrics[image]` or `pip install torch-fidelity`.")
    """,
    "graphs/wrapped.py": """
        import abc
        from typing import List, Literal, Optional, Sequence, Union
        from torch import nn
        class Chain(nn.Module):
            def __init__(self, path: Optional[str] = None, parts: Optional[List[nn.Module]] = None):
                super().__init__()
                self.parts = nn.ModuleList(list(parts))
        class Metric(nn.Module):
            def __init__(self, classes: Optional[int] = None, average: str = "macro", **kwargs):
                super().__init__()
                if kwargs: raise ValueError(f"Unexpected keyword arguments: `{next(iter(kwargs))}`")
                if classes is None: raise ValueError("Argument `classes` can only be `None` for `average='micro'`")
        class Sized(nn.Module):
            def __init__(self, classes: int = 2):
                super().__init__()
                if not isinstance(classes, int): raise ValueError(f"`classes` must be an int, got {type(classes)}")
        def build(**arguments): return Sized(**arguments)
        class Strided(nn.Module):
            def __init__(self, size: int, strides: Sequence[int], kernel: Union[Sequence[int], int] = 3):
                super().__init__()
                self.layer = nn.Linear(size, len(strides))
        def pass_on(init):
            def call(self, *args, **kwargs): init(self, *args, **kwargs)
            call.__qualname__ = init.__qualname__
            return call
        class Decorated(nn.Module):
            def __init__(self, size): super().__init__()
            __init__ = pass_on(__init__)
        class Task(nn.Linear):
            def __init__(self, task: Literal["binary", "multiclass"], size: int = 3): super().__init__(size, 2)
        class Base(nn.Module):
            def __init__(self, mode, input_size, hidden_size, bias):
                super().__init__()
                self.layer = nn.Linear(input_size, hidden_size, bias)
        class Recurrent(Base):
            def __init__(self, *args, **kwargs): super().__init__("r", *args, **kwargs)
        class Part(nn.Module, abc.ABC):
            @abc.abstractmethod
            def part(self): ...
        class Wide(Part):
            def __init__(self, width): super().__init__()
            def part(self): ...
        class Plain(Part):
            def part(self): ...
        class ShapedConfig:
            width = 2
        class Shaped(nn.Linear):
            def __init__(self, *args, **kwargs):
                config = kwargs.pop("config")
                super().__init__(config.width, *args, **kwargs)
        class Grouped(nn.Module):
            def __init__(self, size: int, group: int = 256):
                super().__init__()
                assert size % group == 0, f"need size:{size} % group:{group} == 0"
        class Parts(nn.Module):
            def __init__(self, parts: List[Part]):
                super().__init__()
                self.parts = nn.ModuleList(parts)
        class Loaded(nn.Module):
            def __init__(self, folder):
                super().__init__()
                raise OSError(f"no file named model.safetensors in directory {folder}")
    """,
    "graphs/layers.py": """
        from typing import Callable
        import torch
        class Named(torch.nn.Module):
            def __init__(self, name): super().__init__()
        class Chosen(torch.nn.Module):
            def __init__(self, task):
                super().__init__()
                if task not in ("binary", "multiclass"): raise ValueError("one of 'BINARY', 'MULTICLASS'")
        class Called(torch.nn.Module):
            def __init__(self, name): super(Called, self).__init__(*[] * name.count("."))
        class Held:
            def __init__(self): self.model = torch.nn.Linear(2, 3)
            @staticmethod
            def of(name, kind, size): return torch.nn.Linear(2, 3)
        def hold(size=2): return Held()
        def pack(): return torch.nn.Linear(2, 3), None
        def conv(x) -> torch.Tensor: return x
        def build() -> "torch.Tensor": return torch.zeros(1)
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
        for end in (", or set ", " with a number"):
            line = line.partition(end)[0]
        advised = shlex.split(line.replace("...", values) if values else line)
        device = ("--init-device", "meta") if advised[0].startswith("transformers") else ()
        result = statecli("inspect", *advised, *device, "-f", "json")
        assert result.code == 0, (advised, result.err)
        return refused.err, shlex.join(advised)

    return type_line


@pytest.fixture
def paste(statecli):
    """Type a refused target and paste the function of the message into its file; the function must build a model.

    Return the message, the file and the rows of the model. `values` replaces each `...`.
    """

    def type_line(*words: str, values: str = "...") -> tuple[str, str, list[dict[str, Any]]]:
        refused = statecli("inspect", *words)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1), refused.err
        ((line, file),) = re.findall(r"add the line `(.*?)` to (\S+\.py)\b.*, and give \2:make$", refused.err)
        with Path(file).open("a") as opened:
            opened.write(line.replace("...", values) + "\n")
        result = statecli("inspect", f"{file}:make", "-f", "json")
        assert result.code == 0, result.err
        return refused.err, file, list(result.rows().values())

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


@pytest.mark.parametrize(
    ("typed", "end"),
    [
        ("from torch.nn import Linear", "write 'torch.nn:Linear(in_features=3, out_features=3)'"),
        ("import torch.nn as nn", "give one of its classes or functions, such as 'torch.nn:Linear(2, 3)'"),
        ("sentence_transformers:all-MiniLM-L6-v2", "write hf://sentence-transformers/all-MiniLM-L6-v2"),
        ("transformers:bert-base-uncased", "write hf://google-bert/bert-base-uncased"),
    ],
)
def test_import_statement_or_repository_name_has_the_line_to_type(working_folder, statecli, typed, end):
    result = statecli("inspect", typed)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.endswith(f"{end}\n")


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


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("graphs.nets.Sized(classes=4)", "graphs.wrapped:Sized(classes=4)"),
        ("bodies.bodys.Body(BodyConfig(4))", "bodies:Body(BodyConfig(4))"),
        ("graphs.lost.Recurrent(3, hidden_size=2, bias=True)", "graphs.wrapped:Recurrent(3, hidden_size=2, bias=True)"),
    ],
)
def test_the_class_of_a_wrong_module_comes_before_a_module_of_a_similar_name(
    working_folder, advise, typed, expected_spec
):
    """The line keeps the arguments of the user."""
    Path("../installed/graphs/__init__.py").write_text("import graphs.wrapped\nclass Nest: pass\n")
    assert shlex.split(advise(typed)[1]) == [expected_spec]


@pytest.mark.parametrize(
    ("typed", "expected_ending"),
    [
        ("adapters.adapt(model, LoraConfig(rank=5))", "adapters:adapt(torch.nn.Linear(2, 3), LoraConfig(rank=5))"),
        ("adapters:Adapted(config=LoraConfig(5), model=net)", "config=LoraConfig(5), model=torch.nn.Linear(2, 3))"),
        ("torch.nn.MultiheadAttention(size, 8)", "torch.nn:MultiheadAttention(8, 8)"),
        ("graphs.wrapped.Sized(classes=ten)", "graphs.wrapped:Sized(classes=3)"),
        ("graphs.wrapped:Task(task=multiclass, size=5)", "graphs.wrapped:Task(task='multiclass', size=5)"),
    ],
)
def test_a_value_is_written_for_the_name_of_a_variable(working_folder, advise, typed, expected_ending):
    """The other arguments are the user's; the message mentions a text only if the line has a text."""
    message, line = advise(typed)
    assert shlex.split(line)[0].endswith(expected_ending)
    assert "for a string" not in message


@pytest.mark.parametrize(
    ("typed", "problem", "expected_spec"),
    [
        ("kornia.drawing.tall_net", "is a Python module", "kornia.drawing.tall_net:TallNet(size=3)"),
        ("kornia.drawing.tall_net(size=4)", "is a Python module", "kornia.drawing.tall_net:TallNet(size=4)"),
        ("kornia.drawing.tall_net.ShortNet.load", "needs folder, kind", "kornia.drawing.tall_net:ShortNet"),
    ],
)
def test_a_name_with_dots_has_the_line_of_the_name_with_a_colon(working_folder, advise, typed, problem, expected_spec):
    """The line is not refused again and keeps the arguments."""
    message, line = advise(typed)
    assert problem in message
    assert shlex.split(line) == [expected_spec]


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


def test_an_argument_without_a_known_value_has_another_model_of_the_library(working_folder, advise):
    message, line = advise("kornia.drawing.tall_net:Opened")
    assert "kornia.drawing.tall_net:Opened(folder=...)' with a number" in message
    assert shlex.split(line) == ["kornia.feature:HardNet(pretrained=False)"]


# --- an argument without an annotation that takes a configuration -----------------------------------------------------

GUESSED = """
from dataclasses import dataclass
from torch import nn
@dataclass
class OptimizerConfig:
    lr: float = 0.1
@dataclass
class NetConfig:
    width: int = 3
class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.layer = nn.Linear(cfg.width, 2)
class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.block = Block(cfg)
class Other(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.layer = nn.Linear(cfg.size, cfg.lr)
"""


@pytest.mark.parametrize("name", ["Block", "Net"])
def test_configuration_is_selected_by_the_fields_that_are_read(working_folder, advise, statecli, name):
    """If the constructor reads no fields, the fields that the other classes read select the configuration."""
    Path("net.py").write_text(GUESSED)
    assert f"'net.py:{name}(cfg=NetConfig())'" in statecli("inspect", "net.py").err
    assert shlex.split(advise(f"net.py:{name}")[1]) == [f"net.py:{name}(cfg=NetConfig())"]
    Path("net.json").write_text('{"width": 7}')
    result = statecli("inspect", f"net.py:{name}", "--config-json", "net.json", "-f", "json")
    assert [7] in [row["shape"][1:] for row in result.rows().values()]


def test_a_configuration_that_lacks_a_field_is_not_guessed(working_folder, paste, statecli):
    """The function of the message works after a value replaces the dots."""
    Path("net.py").write_text(GUESSED)
    assert paste("net.py:Other", values="__import__('types').SimpleNamespace(size=3, lr=2)")[1] == "net.py"
    Path("net.json").write_text('{"size": 3, "lr": 2}')
    error = statecli("inspect", "net.py:Other", "--config-json", "net.json").err
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


def test_a_repository_without_trust_has_the_line_that_trusts_it(working_folder, statecli, monkeypatch):
    """The prompt of torch.hub gets no answer, so the line trusts the repository."""
    monkeypatch.setenv("TORCH_HOME", str(working_folder / "torch"))
    error = statecli("inspect", "torch.hub:load('own/repo', 'tiny')").err
    assert "needs a download" in error
    monkeypatch.setattr("sys.stdin", io.StringIO())
    error = statecli("inspect", "torch.hub:load('own/repo:main', 'tiny')").err
    assert error.endswith("write \"torch.hub:load('own/repo:main', 'tiny', trust_repo=True)\"\n")


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


# --- errors of a constructor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("torch.nn:GRU", "torch.nn:GRU(input_size=3, hidden_size=3)"),
        ("torch.nn:LSTM(input_size=2)", "torch.nn:LSTM(input_size=2, hidden_size=3)"),
        ("graphs.wrapped:Recurrent(2)", "graphs.wrapped:Recurrent(2, hidden_size=3, bias=3)"),
        ("graphs.wrapped:Recurrent(2, 5)", "graphs.wrapped:Recurrent(2, 5, bias=3)"),
        ("graphs.wrapped:Decorated", "graphs.wrapped:Decorated(size=3)"),
        ("torch.nn:Linear(in_features=2, out_feature=5)", "torch.nn:Linear(in_features=2, out_features=5)"),
        ("torch.nn:Linear(in_feature=2)", "torch.nn:Linear(in_features=2, out_features=3)"),
        ("graphs.wrapped:Parts", "graphs.wrapped:Parts(parts=[Plain()])"),
        ("torch.nn:DataParallel", "torch.nn:DataParallel(module=torch.nn.Linear(2, 3))"),
        ("graphs.wrapped:Task", "graphs.wrapped:Task(task='binary')"),
        ("graphs.wrapped:Task('binary', sise=4)", "graphs.wrapped:Task('binary', size=4)"),
    ],
)
def test_an_error_of_a_constructor_has_the_line_to_type(working_folder, advise, typed, expected_spec):
    """The line has the arguments of a base class, the arguments in the message, and arguments that take modules.

    It adds a configuration, a number of the message, or the subclass of an abstract class.
    """
    assert shlex.split(advise(typed, values="3")[1]) == [expected_spec]


@pytest.mark.parametrize(
    ("config", "expected_arguments"),
    [
        ("config={'num_hidden_layers': 1}", "config=BertConfig(num_hidden_layers=1)"),
        ("{'num_hidden_layers': 1}", "BertConfig(num_hidden_layers=1)"),
        ("config=GPT2Config()", "config=BertConfig()"),
        ("BertConfig", "BertConfig()"),
        ("hidden_size=24", "config=BertConfig(hidden_size=24)"),
        ("num_layers='1', add_pooling_layer=False", "config=BertConfig(num_hidden_layers=1), add_pooling_layer=False"),
        ("config=transformers:GPT2Config(n_layer=1)", "config=BertConfig()"),
    ],
)
def test_a_wrong_configuration_of_transformers_has_the_line_to_type(working_folder, advise, config, expected_arguments):
    """The cases are a dict, the configuration of another model, and fields of the configuration as arguments."""
    pytest.importorskip("transformers")
    assert shlex.split(advise(f"transformers:BertModel({config})")[1]) == [
        f"transformers:BertModel({expected_arguments})"
    ]


# --- misspelt names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("torch.nn:Liner(2,3)", "torch.nn:Linear(2, 3)"),
        ("torch.nn:Liner", "torch.nn:Linear(in_features=3, out_features=3)"),
        ("bodies:Bdy", "bodies:Body(config=BodyConfig())"),
        ("bodies:body", "bodies:Body(config=BodyConfig())"),
        ("bodies:bo", "bodies:Body(config=BodyConfig())"),
        ("graphs:conv(torch.nn.Linear(2, 3))", "graphs.layers:Conv(torch.nn.Linear(2, 3))"),
        ("torch.nm:Linear(2, 3)", "torch.nn:Linear(2, 3)"),
        ("torch.nn:Sequential(torch.nn.linear(2, 3))", "torch.nn:Sequential(torch.nn.Linear(2, 3))"),
        ("bodies:Bdy(BodyConfig(4))", "bodies:Body(BodyConfig(4))"),
        ("bodes:Body(BodyConfig(4))", "bodies:Body(BodyConfig(4))"),
        ("graphs.layer:Conv(torch.nn.Linear(2, 3))", "graphs.layers:Conv(torch.nn.Linear(2, 3))"),
        ("bodies:Body(BodyConfig(widht=4))", "bodies:Body(BodyConfig(width=4))"),
        ("bodies:Body(BodyConfg(width=4))", "bodies:Body(BodyConfig(width=4))"),
        ("torch.nn:BN", "torch.nn:BatchNorm1d(num_features=3)"),
        ("metrics:LFD", "metrics.image:LearnedFrechetDistance"),
    ],
)
def test_a_misspelt_name_has_the_line_to_type(working_folder, advise, typed, expected_spec):
    """The line has the most similar name, with the arguments that were typed or are needed."""
    message, line = advise(typed, values="3")
    assert "did you mean" in message
    assert shlex.split(line) == [expected_spec]


def test_a_class_of_a_module_of_the_package_has_the_line_to_type(working_folder, advise):
    """The name is right, and the module is missing or another; a class with a similar name is in the same module."""
    assert advise("graphs.layers:Decorated")[1] == "'graphs.wrapped:Decorated(size=3)'"
    assert advise("metrics.image:MeanPartSharpness")[1] == "metrics.parts.sharp:MeanPartSharpness"
    del sys.modules["metrics.parts.sharp"]  # the search below finds it in a file too
    assert advise("graphs:Conv(torch.nn.Linear(2, 3))")[1] == "'graphs.layers:Conv(torch.nn.Linear(2, 3))'"
    assert advise("graphs:Conv")[1] == "'graphs.layers:Conv(nn=torch.nn.Linear(2, 3))'"
    assert advise("metrics:FrechetDistance")[1] == "metrics.image:FrechetDistance"
    assert advise("metrics:Sharpness")[1] == "metrics.parts.sharp:Sharpness"
    assert advise("metrics:MPS")[1] == "metrics.parts.sharp:MeanPartSharpness"
    assert advise("torch:Zorkmid")[1] == "'torch.nn:Linear(2, 3)'"
    pytest.importorskip("transformers")
    line = advise("transformers:BertEncoder")[1]
    assert line == "'transformers.models.bert.modeling_bert:BertEncoder(config=BertConfig())'"


def test_a_line_that_needs_a_package_has_the_command_that_installs_it(fetching_module, statecli):
    """The error has the command instead of a line with values to fill in."""
    assert statecli("inspect", "graphs:Optional").err.endswith("; install the package: pip install more-layers\n")


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("adapters:adapt(net.py:Net(4), LoraConfig())", "an argument cannot be a class of the file net.py"),
        ("adapters:change(torch.nn.Linear(4, 2), LoraConfig())", "change returned None, not an nn.Module"),
        ("graphs.layers:pack", "pack returned a tuple, not an nn.Module"),
        ("torch:randn(3)", "randn returned a Tensor, not an nn.Module"),
        ("torch.nn:Linear(2, 2 * 2)", "argument 2 is code, not a literal; put a text in quotes; for code"),
        ("torch.nn:Sequential(**{})", "** is not a literal; put a text in quotes; for code"),
        ("adapters:change(torch.nn.Linear(2, 3), zqxj)", "zqxj is not defined in adapters"),
    ],
)
def test_a_model_that_no_target_can_name_has_advice_to_write_a_function(working_folder, statecli, typed, problem):
    Path("net.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    error = statecli("inspect", typed).err
    assert re.search(f"{re.escape(problem)}[;,] write a function make\\(\\) in build.py", error)


@pytest.mark.parametrize(
    "typed",
    [
        "model = torch.nn.Linear(2, 3)",
        "model=torch.nn:Linear(2, 3)",
        "torch.nn:Identity;",
        "import torch.nn as nn; nn.Linear(2, 3)",
        "import torch\nmodel = torch.nn.Linear(2, 3)\n",
        "from torch import nn; model = nn.Linear(2, 3)",
        "from torch.nn import Linear as Layer; model = Layer(2, 3)",
        'python -c "import torch; torch.nn.Linear(2, 3)"',
        "nn.Identity",
        "nn.Linear(2, 3)",
        "Identity",
        "torch.nn.modules.linear.Identity",
        "graphs.wrapped.Sized(classes=4)",
        "graphs:wrapped.Sized(classes=4)",
    ],
)
def test_code_that_builds_or_names_a_model_is_the_model(working_folder, statecli, typed):
    """The call is read from the code, and the code is not run; the package need not import the module of the class."""
    result = statecli("inspect", typed, "-f", "json")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    "typed", ["model = ", "model = 3", "import torch; torch", "python -c 'print(1)'", "a = b = (lambda: 1)()", "from x"]
)
def test_other_code_is_not_a_model(working_folder, statecli, typed):
    result = statecli("inspect", typed)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def test_a_module_in_place_of_its_class_has_the_line_to_type(working_folder, advise):
    """The class has the name of the module."""
    installed = working_folder.parent / "installed/graphs"
    source = "from torch import nn\nclass Other(nn.Identity): pass\nclass TinyNet(nn.Linear): pass\n"
    (installed / "tiny_net.py").write_text(source)
    (installed / "__init__.py").write_text("import graphs.tiny_net")
    message, line = advise("graphs:tiny_net")
    assert "tiny_net is a Python module, not a model class" in message
    assert shlex.split(line) == ["graphs.tiny_net:TinyNet(in_features=3, out_features=3)"]


# --- a line that would be refused again -------------------------------------------------------------------------------

FETCHING = '''
from typing import Literal
import torch
from torch import nn
class Fetching(nn.Linear):
    def __init__(self, pretrained: bool = True):
        super().__init__(2, 2)
        if pretrained: torch.hub.load_state_dict_from_url("https://example.invalid/net.pt", "nowhere")
class Sized(nn.Linear):
    def __init__(self, kind: "Literal['big', 'small', 'tiny']" = "big"):
        super().__init__(2, 2)
        if kind == "big": torch.hub.load_state_dict_from_url("https://example.invalid/net.pt", "nowhere")
class Source(nn.Linear):
    def __init__(self, features: str = "disk"):
        super().__init__(2, 2)
        if features is not None: torch.hub.load_state_dict_from_url("https://example.invalid/net.pt", "nowhere")
class Around(nn.Module):
    def __init__(self, sizes: "tuple[int, ...]", rate: float, name: str):
        super().__init__()
        self.part = Fetching()
class Named(nn.Module):
    def __init__(self, sizes: "tuple[int, ...]", rate: float, name: str, flag: bool, heads=2):
        super().__init__()
        assert len(sizes) == 2 and 0 < rate < 1 and flag is False
        self.layer = nn.MultiheadAttention(sizes[0], heads)
class Halves(nn.Module):
    def __init__(self, size):
        super().__init__()
        if size % 2: raise ValueError("size must be even")
        self.layer = nn.Linear(size, size // 2)
class Flagged(Fetching):
    def __init__(self, pretrained: bool): super().__init__(pretrained)
class Reads(nn.Linear):
    def __init__(self, size): super().__init__(size, int(torch.linspace(0, 1, size).sum().item()) + 1)
class Optional(nn.Module):
    def __init__(self, size):
        raise ModuleNotFoundError("Install as `pip install fetching[all]` or `pip install more-layers`.")
class Kinds(nn.Linear):
    def __init__(self, kind: "Literal['even', 'odd']", multi=None):
        super().__init__(2, 2)
        kind.replace("-", "_")
        assert kind in ("even", "odd"), "wrong"
class even_kind: pass
def small(): return nn.Linear(2, 2)
class Documented(nn.Linear):
    """A layer.

    Example:
        >>> from graphs.fetching import Documented
        >>> layer = Documented(
        ...     'b, a', [(Linear(2, 4), 'b'), (Linear(size, 4), 'a'), (lambda x: x, 'a')], **options)
        >>> layer = Documented('b, a', [(Linear(2, 4), 'b'), (Linear(size, 4), 'a'), (lambda x: x, 'a')])
    """
    def __init__(self, names: str, parts: "list[tuple[Callable, str]]", size=2):
        super().__init__(size, 2)
        assert names == "b, a" and len(parts) == 1
class Created(nn.Module):
    def __new__(cls, task: Literal["one", "two"], **kwargs): return nn.Linear(2, 2)
    def __init__(self, *args, **kwargs): super().__init__()
class Impossible(nn.Module):
    def __init__(self, size): raise ValueError("never")
'''


@pytest.fixture
def fetching_module(working_folder):
    """Create the module `graphs.fetching`, imported by its package."""
    (working_folder.parent / "installed/graphs/fetching.py").write_text(FETCHING)
    (working_folder.parent / "installed/graphs/__init__.py").write_text("import graphs.layers, graphs.fetching")


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("torch:nn.Linear", "torch:nn.Linear(in_features=3, out_features=3)"),
        ("torch.nn:Conv2d(3)", "torch.nn:Conv2d(3, out_channels=3, kernel_size=3)"),
        ("graphs.fetching:Named", "graphs.fetching:Named(sizes=[2, 2], rate=0.5, name='name', flag=False)"),
        ("graphs:Named", "graphs.fetching:Named(sizes=[2, 2], rate=0.5, name='name', flag=False)"),
        ("graphs:Halves", "graphs.fetching:Halves(size=2)"),
        ("graphs:Reads", "graphs.fetching:Reads(size=3)"),
        ("graphs:Flagged", "graphs.fetching:Flagged(pretrained=False)"),
        ("graphs:Fetching", "graphs.fetching:Fetching(pretrained=False)"),
        ("graphs:fetchin", "graphs.fetching:Fetching(pretrained=False)"),
        ("graphs.fetching:Kinds(evn)", "graphs.fetching:Kinds('even')"),
        ("graphs.fetching:Kinds(odd)", "graphs.fetching:Kinds('odd')"),
        ("graphs.fetching:Kinds(even, mult=odds)", "graphs.fetching:Kinds('even', multi='odds')"),
        ("graphs.fetching:Created", "graphs.fetching:Created(task='one')"),
        ("graphs.fetching:Halves(4, rounds=2)", "graphs.fetching:Halves(4)"),
        ("graphs.layers:Chosen(binary)", "graphs.layers:Chosen('binary')"),
        ("graphs.fetching:Fetching(True)", "graphs.fetching:Fetching(False)"),
        ("graphs.fetching:Sized", "graphs.fetching:Sized(kind='small')"),
        ("graphs.fetching:Sized('big')", "graphs.fetching:Sized('small')"),
        ("graphs.fetching:Source", "graphs.fetching:Source(features=None)"),
        ("graphs.fetching:Source('disk')", "graphs.fetching:Source(None)"),
    ],
)
def test_the_first_line_is_not_refused_again(fetching_module, advise, typed, expected_spec):
    """The line has arguments that the class takes, and no argument that starts a download."""
    assert shlex.split(advise(typed)[1]) == [expected_spec]


def test_the_part_that_downloads_has_a_line(fetching_module, statecli):
    """No argument of the class itself prevents the download."""
    error = statecli("inspect", "graphs.fetching:Around((2, 2), 0.5, 'a')").err
    line = "graphs.fetching:Fetching(pretrained=False)"
    assert f"to build only Fetching, a part of the model, write '{line}', or set STATECLI_DOWNLOADS=1" in error
    assert statecli("inspect", line).code == 0


def test_a_line_without_values_that_work_asks_for_values(fetching_module, statecli):
    """No number works as the argument."""
    error = statecli("inspect", "graphs.fetching:Impossible").err
    end = "write 'graphs.fetching:Impossible(size=...)' with a number, a string or a list in place of each `...`\n"
    assert error.endswith(end)


# --- a function that builds a class -----------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn
class Block(nn.Module): pass
class Deep(nn.Module):
    def __init__(self, block, layers):
        super().__init__()
        self.layer = block(layers[0])
class Broad(Deep): pass
def deep34(*, weights_backbone="DEFAULT"):
    if weights_backbone: torch.hub.load_state_dict_from_url("https://example.invalid/net.pt", "nowhere")
    return Deep(nn.Identity, [3, 3])
def wide_b_16() -> Broad: return Broad(nn.Identity, [3])
def list_models(): return ["deep34", "wide_b_16"]
def get_model(name, **arguments): return globals()[name](**arguments)
"""


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("torchvision:Deep", "torchvision:deep34(weights_backbone=None)"),
        ("torchvision:deep", "torchvision:deep34(weights_backbone=None)"),
        ("torchvision.models.nets:Deep", "torchvision.models.nets:deep34(weights_backbone=None)"),
        ("torchvision.models.nets:Broad", "torchvision.models.nets:wide_b_16"),
    ],
)
def test_a_class_that_takes_parts_has_the_function_that_builds_it(working_folder, advise, typed, expected_spec):
    """The function has the name of the class, or returns the class."""
    folder = working_folder.parent / "installed/torchvision/models"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "nets.py").write_text(MODELS)
    (folder / "__init__.py").write_text("from torchvision.models.nets import get_model, list_models\n")
    assert shlex.split(advise(typed)[1]) == [expected_spec]


def test_the_command_that_a_library_names_is_the_line_to_type(working_folder, statecli):
    """The line is the last command of the message, without extras."""
    end = "; install the package: pip install torch-fidelity\n"
    assert statecli("inspect", "metrics.image:Quality").err.endswith(end)
    assert statecli("inspect", "metrics:Quality").err == f"statecli: metrics has no Quality{end}"


def test_a_package_for_another_torch_has_the_command_that_installs_both(working_folder, statecli):
    """torch does not find the operators of the package."""
    (working_folder.parent / "installed/unfit.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    end = "; torchvision was built for another version of torch: pip install -U torch torchvision\n"
    assert statecli("inspect", "unfit:Net").err.endswith(end)


# --- modules in the arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("torch.nn:Sequential(Linear(in_features=2))", "torch.nn:Sequential(Linear(in_features=2, out_features=3))"),
        ("torch.nn:ModuleDict(a=Linear(2, 3))", "torch.nn:ModuleDict({'a': Linear(2, 3)})"),
        ("torch.nn:ModuleDict(a='relu')", "torch.nn:ModuleDict({'a': torch.nn.Linear(2, 3)})"),
        ("torch.nn:ParameterDict(a=3)", "torch.nn:ParameterDict({'a': 3})"),
        ("torch.nn:Sequential(a=Linear(2, 3))", "torch.nn:Sequential(Linear(2, 3))"),
        ("torch.nn:ModuleList(a=Linear(2, 3))", "torch.nn:ModuleList([Linear(2, 3)])"),
        ("torch.nn:ReLU(zzz=4)", "torch.nn:ReLU()"),
        ("torch.nn:Linear(2, 3, True, None, None, 5)", "torch.nn:Linear(2, 3, True, None, None)"),
        ("torch.nn:Linear(2, zzz=4)", "torch.nn:Linear(2, out_features=3)"),
        ("graphs.layers:Conv(other.Conv(torch.nn.ReLU()))", "graphs.layers:Conv(Conv(torch.nn.ReLU()))"),
    ],
)
def test_modules_have_the_line_to_type(working_folder, advise, typed, expected_spec):
    """The typed argument is a list of modules, a class or text instead of a module, or a module without a list."""
    assert shlex.split(advise(typed)[1])[0].replace("in_features=3, out_features=3", "3, 3") == expected_spec


@pytest.mark.parametrize(
    ("typed", "expected_spec"),
    [
        ("graphs.wrapped:Task.eval()", "graphs.wrapped:Task(task='binary')"),
    ],
)
def test_brackets_and_quotes_and_code_after_the_call_have_the_line_to_type(
    working_folder, advise, typed, expected_spec
):
    """Open brackets are closed, and a method call on the model is removed. The corrected line is tried first."""
    assert shlex.split(advise(typed)[1]) == [expected_spec]


def test_a_class_that_the_package_does_not_export_has_the_line_to_type(working_folder, advise):
    """Its module is loaded only when another class of the module is named."""
    pytest.importorskip("transformers")
    module = "transformers.models.llama.modeling_llama"
    assert shlex.split(advise("transformers:LlamaMLP")[1]) == [f"{module}:LlamaMLP(config=LlamaConfig())"]
    assert advise("transformers:BertForQA")[1].startswith("'transformers:BertFor")
    module_of_qwen = "transformers.models.qwen2.modeling_qwen2"
    line = shlex.split(advise("transformers:Qwen2Attention")[1])
    assert line == [f"{module_of_qwen}:Qwen2Attention(config=Qwen2Config(), layer_idx=3)"]
    line = shlex.split(advise("transformers:LlamaAttention")[1])
    assert line == [f"{module}:LlamaAttention(config=LlamaConfig(), layer_idx=3)"]
    assert shlex.split(advise("transformers:BertLayer")[1]) == ["transformers:BertLayer(config=BertConfig())"]


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


@pytest.mark.parametrize(
    "typed", ["torch.hub:load('own/repo', 'tiny')", "torchhub:own/repo/tiny", "torch.hub:own/repo:tiny"]
)
def test_a_model_of_torch_hub_has_the_line_for_a_copy(working_folder, statecli, monkeypatch, typed):
    """The line builds the model of a folder."""
    monkeypatch.setenv("TORCH_HOME", str(working_folder / "torch"))
    error = statecli("inspect", typed).err
    assert "needs a download from https://github.com/own/repo" in error
    (line,) = re.findall(r'with a copy of the repository in FOLDER, write "(.*)", or set STATECLI_DOWNLOADS=1', error)
    Path("FOLDER").mkdir()
    Path("FOLDER/hubconf.py").write_text("import torch\ndef tiny(): return torch.nn.Linear(2, 3)\n")
    assert statecli("inspect", line).code == 0


def test_a_model_of_torch_hub_has_the_line_of_a_library(working_folder, advise, monkeypatch):
    """An installed library builds a model of the same name."""
    monkeypatch.setenv("TORCH_HOME", str(working_folder / "torch"))
    (working_folder.parent / "installed/timm.py").write_text(
        "import torch\ndef list_models(): return ['tiny']\ndef create_model(name): return torch.nn.Linear(2, 3)\n"
    )
    assert "for random values, write timm:tiny, or set" in advise("torchhub:own/repo/tiny")[0]


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
class Holder:
    size = 3
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
        ("Holder", "Holder()"),
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


def test_a_class_of_a_library_that_is_not_a_module_has_a_model_of_the_library(working_folder, statecli):
    """The class is, for example, the configuration of a model."""
    pytest.importorskip("transformers")
    for config, arguments, model in (("BertConfig", "", "BertModel"), ("GPT2Config", "(n_layer=3)", "GPT2Model")):
        refused = statecli("inspect", f"transformers:{config}{arguments}").err
        line = f"transformers:{model}(config={config}())"
        assert refused.endswith(f"the class {config} is not an nn.Module; write, for example, '{line}'\n")
        assert statecli("inspect", line, "--init-device", "meta").code == 0


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ("pretrained=True", "BertConfig()"),
        ("weights='own/net', hidden_size=24", "BertConfig(hidden_size=24)"),
        ("num_labels=3", "BertConfig(num_labels=3)"),
    ],
)
def test_arguments_of_a_transformers_class_go_to_its_configuration(working_folder, advise, arguments, config):
    """The line does not have an argument for weights."""
    pytest.importorskip("transformers")
    line = advise(f"transformers:BertForSequenceClassification({arguments})")[1]
    name = "" if arguments.startswith("Bert") else "config="
    assert shlex.split(line) == [f"transformers:BertForSequenceClassification({name}{config})"]


TOWER = """from dataclasses import dataclass
from torch import nn


@dataclass
class Config:
    width: int
    depth: int = 2


class Tower(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(config.width, config.width) for _ in range(config.depth)])
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("width=8", "width is a field of Config; write 'tower.py:Tower(config=Config(width=8))'"),
        ("depth=3", "depth is a field of Config; write 'tower.py:Tower(config=Config(width=..., depth=3))' with"),
        ("width=8, depth=3", "are fields of Config; write 'tower.py:Tower(config=Config(width=8, depth=3))'"),
        ("breadth=8", "missing a required argument: 'config'; its signature is Tower(config: Config)"),
    ],
)
def test_suggested_configuration_has_the_fields_of_the_user(in_tmp_path, statecli, arguments, text):
    """The line to type has the user's value, without the module name that statecli gave to the file."""
    Path("tower.py").write_text(TOWER)
    result = statecli("inspect", f"tower.py:Tower({arguments})")
    assert result.code == 2
    assert text in result.err
    if text.endswith("'"):
        assert statecli("inspect", text.split("'")[-2]).code == 0


def test_a_file_of_numbers_is_not_parsed_for_a_suggestion(tmp_path):
    """A list of 10 MB takes 40 seconds and gigabytes, and an audit of a folder asks for suggestions."""
    (tmp_path / "a.py").write_text("class A(Base): ...\nx = [" + "1," * (1 << 19) + "]\n")
    assert list(python_names.list_classes(str(tmp_path / "a.py"))) == []
