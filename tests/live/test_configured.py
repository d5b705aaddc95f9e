"""A model is named by a folder with a config.json, a name in a registry, or any usual spelling of a class."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from statecli.core.errors import ModelError, StateError
from statecli.live import hf_auto
from statecli.live.build import build
from statecli.live.spec import parse_spec
from statecli.live.spec_objects import ObjectCall, ObjectName
from statecli.targets.load import find_class_spec

#: Fields of a small BERT.
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}
#: Packages with the functions that statecli calls of the libraries of these names.
STAND_INS = {
    "timm/__init__.py": """
        from torch import nn
        __version__ = "1"
        def is_model(name): return name == "resnet18"
        def list_models(): return ["resnet18", "resnet34"]
        def create_model(name, pretrained=False, num_classes=1000, checkpoint_path="", **arguments):
            assert not pretrained and not checkpoint_path
            model = nn.Sequential(nn.Linear(2, num_classes))
            model.name = name
            return model
    """,
    "torchvision/__init__.py": "",
    "torchvision/models/__init__.py": """
        from torch import nn
        def list_models(): return ["resnet18"]
        def get_model(name, num_classes=1000): return nn.Linear(2, num_classes)
    """,
    "diffusers/__init__.py": """
        from torch import nn
        __version__ = "1"
        class UNet2DModel(nn.Module):
            def __init__(self, width=2):
                super().__init__()
                self.layer = nn.Linear(width, width)
            @classmethod
            def from_config(cls, config):
                return cls(**{key: value for key, value in config.items() if not key.startswith("_")})
        class Scheduler:
            pass
    """,
    "sentence_transformers/__init__.py": "",
    "sentence_transformers/models.py": """
        from torch import nn
        class Transformer(nn.Module):
            def __init__(self): raise AssertionError("loads weights")
        class Dense(nn.Module):
            def __init__(self, in_features, out_features, activation_function):
                super().__init__()
                self.linear = nn.Linear(in_features, out_features)
                self.activation_function = activation_function
    """,
}


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """Create the current folder, and next to it the fake libraries as installed packages."""
    with contextlib.suppress(ImportError):  # before the fake torchvision exists, which transformers would import
        from transformers import BertForMaskedLM, BertModel, PreTrainedModel  # noqa: F401
    for path, source in STAND_INS.items():
        (tmp_path / "installed" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "installed" / path).write_text(textwrap.dedent(source))
    names = {path.partition("/")[0] for path in STAND_INS}
    before = {key: value for key, value in sys.modules.items() if key.partition(".")[0] in names}
    for key in before:
        del sys.modules[key]
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"
    for key in [key for key in sys.modules if key.partition(".")[0] in names]:
        del sys.modules[key]
    sys.modules.update(before)


@pytest.fixture
def installed_transformers(in_tmp_path):
    """Create the current folder, with the installed transformers."""
    return pytest.importorskip("transformers")


def configure(folder: str, **fields: object) -> None:
    """Write the config.json of a folder."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(fields))


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the state_dict of a class."""
    spec = find_class_spec(text)
    assert spec is not None, text
    module = build(spec, init_device=None).module
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


# --- transformers -----------------------------------------------------------------------------------------------------

SPELLINGS = [
    "bert",
    "bert/",
    "./bert",
    "bert/config.json",
    "transformers:BertModel(config='bert')",
    "transformers:BertModel('bert')",
    "transformers:BertModel('bert/config.json')",
    "transformers:BertModel(config='bert/config.json')",
    "transformers:BertModel(config='bert', add_pooling_layer=True)",
    "transformers.models.bert.modeling_bert:BertModel(config='bert')",
    "transformers.models.bert:BertModel('bert')",
    "transformers.BertModel(config='bert')",
    "transformers:AutoModel(config='bert')",
    "transformers:AutoModel.from_config('bert')",
    "transformers.AutoModel.from_config('bert')",
    "transformers:BertModel(config=BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, "
    "intermediate_size=32, vocab_size=50, max_position_embeddings=16))",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_spelling_of_a_class_builds_the_configured_model(installed_transformers, text):
    """The names and shapes are those of the model that transformers builds."""
    configure("bert", **BERT)
    model = installed_transformers.BertModel(
        installed_transformers.BertConfig(**{key: value for key, value in BERT.items() if key != "model_type"})
    )
    assert shapes(text) == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_further_arguments_are_the_constructors_or_the_configurations(installed_transformers):
    """An unknown argument is refused before the model is built."""
    configure("bert", **BERT)
    assert not any(
        "pooler" in name for name in shapes("transformers:BertModel(config='bert', add_pooling_layer=False)")
    )
    assert not any("layer.1" in name for name in shapes("transformers:BertModel('bert', num_hidden_layers=1)"))
    with pytest.raises(ModelError, match="nor its configuration takes sise"):
        shapes("transformers:BertModel('bert', sise=1)")


def test_a_head_is_chosen_by_the_auto_class(installed_transformers):
    """The model_type selects the class; a head that the library does not have is an error."""
    configure("bert", **BERT)
    assert "cls.predictions.bias" in shapes("transformers:AutoModelForMaskedLM('bert')")
    with pytest.raises(
        ModelError, match=r"AutoModelForSpeechSeq2Seq of transformers .* has no class for model_type 'bert'"
    ):
        shapes("transformers:AutoModelForSpeechSeq2Seq('bert')")
    configure("bert", **{**BERT, "model_type": ["bert"]})
    with pytest.raises(ModelError, match=r"AutoModel of transformers .* has no class for"):
        shapes("transformers:AutoModel('bert')")


def test_a_folder_with_weights_stays_a_checkpoint(statecli, installed_transformers):
    """config.json, or --from-config, is needed to build the class instead."""
    configure("bert", **BERT)
    settings = installed_transformers.BertConfig(**{key: value for key, value in BERT.items() if key != "model_type"})
    installed_transformers.BertModel(settings).save_pretrained("full")
    assert statecli("inspect", "full", "-f", "json").json["format"] == "safetensors"
    for words in (["full/config.json"], ["full", "--from-config"]):
        result = statecli("inspect", *words, "-f", "json").json
        assert (result["format"], result["target"]) == ("module", "full/config.json")
    assert statecli("audit", "full", "--model", "full").code == 0
    assert statecli("diff", "full/config.json", "full").code == 0
    refused = statecli("inspect", "full/model.safetensors", "--from-config")
    assert (
        refused.err
        == "statecli: --from-config: full/model.safetensors is not a folder or repository with a config.json\n"
    )


def test_the_model_is_on_meta_unless_a_device_is_given(statecli, installed_transformers):
    """On the cpu, verify proves save and step, also for a folder with weights."""
    configure("bert", **BERT)
    devices = {row["device"] for row in statecli("inspect", "bert", "-f", "json").rows().values()}
    assert devices == {"meta"}
    result = statecli("verify", "bert", "--init-device", "cpu", "-f", "json")
    assert result.code == 0
    verdicts = {check["check"]: check["verdict"] for check in result.json["checks"]}
    assert (verdicts["save"], verdicts["step"]) == ("passed", "passed")


def test_no_code_next_to_a_configuration_runs(installed_transformers, statecli, monkeypatch):
    """Neither the code of auto_map nor a module with the name of a library runs, and nothing is downloaded."""
    configure("bert", **BERT, auto_map={"AutoModel": "mine.Mine"})
    ran = 'open("ran", "w").close()\n'
    for name in ("bert/mine.py", "bert/transformers.py", "transformers.py", "bert/torch.py"):
        Path(name).write_text(ran)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    for target in ("bert", "transformers:BertModel(config='bert')", "transformers:BertModel(config=BertConfig())"):
        assert statecli("inspect", target, "--init-device", "meta").code == 0
    configure("bert", **{**BERT, "architectures": ["Mine"]}, auto_map={"AutoModel": "mine.Mine"})
    refused = statecli("inspect", "bert")
    assert refused.err == (
        "statecli: bert/config.json: Mine is code of the checkpoint (auto_map), which statecli runs only with "
        "--trust-remote-code\n"
    )
    assert not Path("ran").exists()


MINE = """
from transformers import PretrainedConfig, PreTrainedModel
from torch import nn
class MineConfig(PretrainedConfig):
    model_type = "mine"
    def __init__(self, width=3, **rest):
        super().__init__(**rest)
        self.width = width
class Mine(PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.width, config.width)
        self.post_init()
"""


def test_trusted_code_of_the_folder_is_built(installed_transformers, statecli, monkeypatch, tmp_path):
    """The code runs only with the option, and only from the local disk."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.Mine"}
    configure("mine", architectures=["Mine"], model_type="mine", width=4, auto_map=auto_map)
    Path("mine/mine.py").write_text(MINE)
    assert statecli("inspect", "mine").code == 2
    result = statecli("inspect", "mine", "--trust-remote-code", "-f", "json")
    assert result.code == 0, result.err
    assert result.rows()["layer.weight"]["shape"] == [4, 4]


def test_the_name_of_a_folder_is_never_an_option(installed_transformers, statecli, tmp_path):
    """A stranger's folder that ends like the option runs nothing, and never takes the place of a trusted folder."""
    name, auto_map = "mine --trust-remote-code", {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.Mine"}
    configure(name, architectures=["Mine"], model_type="mine", auto_map=auto_map)
    Path(name, "mine.py").write_text('open("ran", "w").close()\n')
    assert "which statecli runs only with --trust-remote-code" in statecli("inspect", name).err
    configure("mine", architectures=["Mine"], model_type="mine", auto_map=auto_map)
    refused = statecli("inspect", "mine", "--trust-remote-code")
    assert (refused.code, refused.err) == (
        2,
        "statecli: mine: a file or folder is called 'mine --trust-remote-code', like this model with its options; "
        "rename it\n",
    )
    assert not Path("ran").exists()


def test_from_pretrained_call_loads_the_weights_on_cpu(installed_transformers, statecli):
    """A folder with weights is loaded by from_pretrained, as the user typed."""
    settings = installed_transformers.BertConfig(**{key: value for key, value in BERT.items() if key != "model_type"})
    installed_transformers.BertModel(settings).save_pretrained("full")
    result = statecli("inspect", "transformers:AutoModel.from_pretrained('full')", "-f", "json")
    assert result.code == 0, result.err
    assert {row["device"] for row in result.rows().values()} == {"cpu"}


def test_error_about_a_missing_name_says_what_to_type(installed_transformers, statecli):
    """The error line says what to type instead."""
    missing = statecli("inspect", "transformers:BertModel(config='bert-base-uncased')").err
    hub = "for a repository of the Hugging Face hub, write hf://ORGANIZATION/bert-base-uncased"
    default = "for the default configuration, write 'transformers:BertModel(config=BertConfig())'"
    assert missing == f"statecli: bert-base-uncased: no such file or folder; {hub}; {default}\n"
    Path("empty").mkdir()
    assert "has no config.json that names the model class" in statecli("inspect", "transformers:BertModel('empty')").err
    misspelt_error = statecli("inspect", "transformers:BertModl(config='bert')").err
    assert misspelt_error.startswith("statecli: bert: no such file or folder; give a config.json, its folder, or hf://")
    auto = statecli("inspect", "transformers:AutoModel").err
    line = "write 'transformers:AutoModel(config=...)' with the path of a config.json, or of its folder"
    start, _, example = auto.rstrip("\n").partition(", or, for example, ")
    assert start == f"statecli: transformers:AutoModel: needs a configuration; {line}"
    assert statecli("inspect", example.strip("'"), "--init-device", "meta").code == 0
    tokenizer_error = statecli("inspect", "transformers:AutoTokenizer").err
    model = "write, for example, 'transformers:BertModel(config=BertConfig())'\n"
    assert tokenizer_error.endswith(f": the class AutoTokenizer is not an nn.Module; {model}")
    configure("plain", hidden_size=8)
    plain = statecli("inspect", "transformers:AutoModel('plain')").err.rstrip("\n")
    problem, _, example = plain.partition("; for random values, write ")
    assert problem.endswith("has no class for a file without model_type")
    assert statecli("inspect", example.strip("'"), "--init-device", "meta").code == 0
    Path("sd/unet").mkdir(parents=True)
    Path("sd/model_index.json").write_text("{}")
    Path("sd/unet/config.json").write_text("{}")
    assert statecli("inspect", "sd").err.endswith("give one of its components as a model class: sd/unet\n")


# --- other libraries --------------------------------------------------------------------------------------------------


def test_a_model_of_timm_is_built_from_its_configuration(working_folder):
    """The registry of timm builds the model; an argument that loads a file is refused."""
    configure("r18", architecture="resnet18", num_classes=5, pretrained_cfg={"url": "https://x"})
    assert shapes("r18")["0.weight"] == (5, 2)
    for arguments, problem in (
        ({"model_args": {"checkpoint_path": "/x"}}, "model_args has checkpoint_path, which loads other files"),
        ({"architecture": "hf-hub:a/b"}, "architecture is 'hf-hub:a/b', which is not a model of timm 1"),
        ({"model_args": {"num_layers": 10**9}}, "num_layers is 1,000,000,000, larger than in any model"),
    ):
        configure("r18", **{"architecture": "resnet18", **arguments})
        with pytest.raises(ModelError, match=problem):
            shapes("r18")


def test_a_model_of_diffusers_is_built_from_its_configuration(working_folder):
    """The class's own from_config builds the model; a class that is not a module is refused."""
    configure("unet", _class_name="UNet2DModel", _diffusers_version="1", width=3)
    for text in (
        "unet",
        "unet/config.json",
        "diffusers:UNet2DModel(config='unet')",
        "diffusers:UNet2DModel.from_config('unet/config.json')",
        "diffusers.UNet2DModel(config='unet')",
        "diffusers:UNet2DModel(width=3)",
    ):
        assert shapes(text)["layer.weight"] == (3, 3), text
    assert shapes("diffusers:UNet2DModel(config='unet', width=4)")["layer.weight"] == (4, 4)
    with pytest.raises(ModelError, match="UNet2DModel does not take wide; UNet2DModel takes width"):
        shapes("diffusers:UNet2DModel(config='unet', wide=4)")
    with pytest.raises(ModelError, match="names UNet2DModel, not Scheduler"):
        shapes("diffusers:Scheduler(config='unet')")
    configure("bert", **BERT)
    with pytest.raises(ModelError, match="has no _class_name, so it is not a configuration of this class"):
        shapes("diffusers:UNet2DModel(config='bert')")
    configure("unet", _class_name="Scheduler")
    with pytest.raises(ModelError, match="names Scheduler, which is not a model class of diffusers 1; name the class"):
        shapes("unet")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"_class_name": "UNet2DModell"},
            "names UNet2DModell, which is not a model class of diffusers 1",
        ),
        (
            {"architecture": "resnet19"},
            "which is not a model of timm 1; did you mean resnet",
        ),
        ({"architectures": ["BertModl"], "model_type": "brt"}, "has no model class BertModl; name the class: file.py"),
    ],
)
def test_a_configuration_with_an_unknown_name_is_refused(working_folder, statecli, fields, problem):
    """The error has the name in the file."""
    pytest.importorskip("transformers")
    configure("bad", **fields)
    assert problem in statecli("inspect", "bad").err


def test_the_modules_of_sentence_transformers_are_built_in_their_order(working_folder):
    """The configuration of transformers builds the first module; no class or function of the files is imported."""
    pytest.importorskip("transformers")
    dense = {"in_features": 16, "out_features": 4, "activation_function": "torch.nn.modules.activation.Tanh"}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    configure("st", **BERT)
    configure("st/2_Dense", **dense)
    Path("st/modules.json").write_text(json.dumps(modules))
    names = shapes("st")
    assert shapes("sentence_transformers:SentenceTransformer('st')") == names
    assert shapes("sentence_transformers.SentenceTransformer('st')") == names
    assert names["0.auto_model.embeddings.word_embeddings.weight"] == (50, 16)
    assert names["1.linear.weight"] == (4, 16)
    configure("st/2_Dense", **{**dense, "activation_function": "os.system"})
    with pytest.raises(ModelError, match=r"activation_function is 'os.system', which is not a class of torch.nn"):
        shapes("st")
    modules[1]["type"] = "mine.Dense"
    Path("st/modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"mine.Dense is code of the checkpoint"):
        shapes("st")
    modules[1]["path"] = "../x"
    Path("st/modules.json").write_text(json.dumps(modules))
    with pytest.raises(StateError, match="entry 1 must have a type, and the path of a folder inside the checkpoint"):
        shapes("st")


@pytest.mark.parametrize("text", ["[]", "{", "{}", "[1]", '[{"type": 1}]', "[" * 100_000])
def test_a_damaged_list_of_modules_is_one_line(working_folder, text):
    """The error names the file and says what to do."""
    Path("st").mkdir()
    Path("st/modules.json").write_text(text)
    with pytest.raises(StateError, match=r"^st/modules.json: [^\n]+\Z"):
        shapes("st")


def test_a_library_that_is_not_installed_is_named(working_folder, monkeypatch):
    """The error has the line to type."""
    configure("r18", architecture="resnet18")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(StateError, match=r"r18/config.json: needs timm, which is not installed: pip install timm"):
        shapes("r18")


# --- registries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "timm:resnet18",
        "timm:resnet18.a1_in1k",
        "timm:timm/resnet18.a1_in1k",
        "timm:resnet18(num_classes=1000)",
        "timm:create_model('resnet18')",
        "timm.create_model('resnet18')",
        "timm.create_model('resnet18', num_classes=1000)",
        "timm.resnet18()",
        "torchvision:resnet18",
        "torchvision:resnet18(num_classes=1000)",
        "torchvision.models:get_model('resnet18')",
        "torchvision.models.get_model('resnet18')",
    ],
)
def test_a_registry_builds_a_model_by_its_name(working_folder, text):
    """Every spelling of the name is accepted."""
    assert next(iter(shapes(text).values())) == (1000, 2)


def test_an_unknown_name_has_the_nearest(statecli, working_folder):
    """The error spells the similar name as the user typed the target."""
    assert statecli("inspect", "timm:resnet19").err.startswith(
        "statecli: timm:resnet19: timm has no model called resnet19; did you mean timm:resnet18 or timm:resnet34?"
    )
    assert statecli("inspect", "torchvision:zzz").err.endswith("list the names with torchvision.models.list_models()\n")
    assert "did you mean timm:resnet18 or" in statecli("inspect", "timm.create_model('resnet19')").err
    assert "torchvision has no model called resnet18.x" in statecli("inspect", "torchvision:resnet18.x").err


def test_a_library_that_lacks_another_has_the_line_that_installs_it(working_folder, statecli, monkeypatch):
    """The line installs the missing package, not the library."""
    configure("r18", architecture="resnet18")
    (working_folder.parent / "installed/site-packages").mkdir()
    (working_folder.parent / "installed/site-packages/lacking.py").write_text("import PIL.missing_package\n")
    monkeypatch.syspath_prepend(str(working_folder.parent / "installed/site-packages"))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    Path(working_folder.parent, "installed/timm/__init__.py").write_text("import torchvision\n")
    assert statecli("inspect", "r18").err.endswith("needs timm, which needs torchvision: pip install torchvision\n")
    assert statecli("inspect", "timm:resnet18").err.endswith("; install the package: pip install torchvision\n")
    assert statecli("inspect", "lacking:Net").err.endswith("; install the package: pip install pillow\n")


def test_config_json_of_a_class_of_diffusers_has_the_line_to_type(working_folder, statecli):
    """The class takes its configuration as an argument."""
    configure("unet", _class_name="UNet2DModel", width=3)
    refused = statecli("inspect", "diffusers:UNet2DModel", "--config-json", "unet/config.json").err
    line = refused.rpartition("write ")[2].strip().strip('"')
    assert line == "diffusers:UNet2DModel(config='unet/config.json')"
    assert statecli("inspect", line).code == 0


def test_a_dotted_call_imports_only_installed_packages(working_folder, statecli):
    """A package of the current folder is written with a colon."""
    Path("timm.py").write_text('open("ran", "w").close()\n')
    Path("own").mkdir()
    Path("own/__init__.py").write_text('open("ran", "w").close()\n')
    assert statecli("inspect", "timm.create_model('resnet18')").code == 0
    assert statecli("inspect", "timm:resnet18").code == 0
    assert statecli("inspect", "own.make(1)").code == 2
    assert not Path("ran").exists()


# --- nested constructors ----------------------------------------------------------------------------------------------

NET = """
import os, subprocess
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
import torch
from torch import nn
@dataclass
class Inner:
    width: int = 3
@dataclass
class Config:
    size: int
    depth: int = 2
    inner: Inner = field(default_factory=Inner)
class Net(nn.Module):
    def __init__(self, cfg: "Config", act=nn.ReLU, dtype=torch.float32):
        super().__init__()
        layers = [nn.Linear(cfg.size, cfg.size, dtype=dtype) for _ in range(cfg.depth)]
        self.layers = nn.Sequential(*layers, act(), nn.Linear(cfg.size, cfg.inner.width))
class Wide(nn.Module):
    def __init__(self, width, options=None, parts=()):
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.parts = nn.ModuleList(parts)
def make_config(): return Config(3)
class Other(nn.Module):
    def __init__(self, thing: nn.Module):
        super().__init__()
        self.thing = thing
"""


@pytest.fixture
def net(in_tmp_path):
    """Create the current folder with a file of classes."""
    Path("net.py").write_text(NET)


def test_names_and_classes_are_read_from_the_syntax():
    """Nothing is evaluated, and the text is printed as the user typed it."""
    spec = parse_spec("net.py:Net(Config(5, inner=Inner(width=2)), act=nn.GELU, parts=[Part(1), None], x={'a': B})")
    assert spec is not None
    assert spec.args == (ObjectCall("Config", (5,), {"inner": ObjectCall("Inner", (), {"width": 2})}),)
    assert spec.kwargs == {
        "act": ObjectName("nn.GELU"),
        "parts": [ObjectCall("Part", (1,)), None],
        "x": {"a": ObjectName("B")},
    }
    assert repr(spec.args[0]) == "Config(5, inner=Inner(width=2))"


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ("cfg=Config(size=4)", (3, 4)),
        ("Config(4)", (3, 4)),
        ("cfg=Config(4, inner=Inner(width=7))", (7, 4)),
        ("Config(size=4), act=nn.GELU", (3, 4)),
        ("Config(size=4), dtype=torch.float64", (3, 4)),
    ],
)
def test_a_nested_constructor_is_called(net, arguments, last):
    """The constructor may use names of the module of the class."""
    assert list(shapes(f"net.py:Net({arguments})").values())[-2] == last


def test_objects_are_built_again_for_each_instance(net):
    """Two builds share no module."""
    spec = find_class_spec("net.py:Wide(3, parts=[nn.Linear(2, 2)])")
    built = build(spec, init_device=None)
    assert built.build_again().parts[0] is not built.module.parts[0]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("os.system('touch ran')", "os.system belongs to Python's standard library, not to net.py"),
        ("subprocess.Popen('touch ran', shell=True)", "subprocess.Popen belongs to Python's standard library"),
        ("partial(os.system, 'touch ran')", "belongs to Python's standard library"),
        (
            "cfg=make_config()",
            "make_config is not a class; write a function make\\(\\) in build.py that builds the model, then give "
            "build.py:make",
        ),
        ("cfg=torch", "torch is not a class or a value in net.py"),
        ("cfg=Confg(3)", r"Confg is not defined in net.py; did you mean Config\?"),
        ("cfg=relu", "relu is not defined in net.py; for a string, write \"net.py:Net\\(cfg='relu'\\)\""),
        (
            "cfg=oz.system",
            "oz.system is not defined in net.py; an argument is a number, a string in quotes, or a call of a class",
        ),
        ("cfg=Config()", "Config: missing a required argument: 'size'; Config takes size, depth, inner"),
        ("cfg=Config(sise=3, size=2)", "Config: got an unexpected keyword argument 'sise'"),
        ("cfg=Config.size.real", "Config.size.real is not a class or a value in net.py"),
    ],
)
def test_invalid_constructor_argument_is_a_one_line_error(net, arguments, problem):
    """No code of the argument runs."""
    with pytest.raises(ModelError, match=problem) as caught:
        shapes(f"net.py:Net({arguments})")
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


def test_a_class_without_its_configuration_has_the_line_to_type(net, statecli):
    """The line has the fields without a default, and works after the user fills them in."""
    line = "write 'net.py:Net(cfg=Config(size=...))', with a value for each `...`, or give --config-json FILE"
    assert statecli("inspect", "net.py:Net").err == f"statecli: net.py:Net: the constructor needs cfg; {line}\n"
    error = statecli("inspect", "net.py:Net(dtype=torch.float16)").err
    assert "write 'net.py:Net(dtype=torch.float16, cfg=Config(size=...))', with a value for each `...`" in error
    listed = statecli("inspect", "net.py").err.splitlines()
    assert listed[1:3] == ["  'net.py:Net(cfg=Config(size=...))'", "  'net.py:Wide(width=...)'"]
    assert listed[3] == "  'net.py:Other(thing=torch.nn.Linear(2, 3))'"
    assert statecli("inspect", "net.py:Other(thing=torch.nn.Linear(2, 3))").code == 0


def test_a_class_with_the_name_of_a_configuration_needs_no_file(working_folder, statecli):
    Path("net.py").write_text(
        "from torch import nn\nclass NeedsArgs(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n"
    )
    assert statecli("inspect", "net.py:NeedsArgs").err.endswith("with a value for each `...`\n")


# --- a configuration from a file --------------------------------------------------------------------------------------


def test_a_configuration_is_built_from_a_file(net, statecli):
    """Dataclasses inside the configuration are built too; the target shows the option, and can be typed as shown."""
    Path("net.json").write_text('{"size": 4, "depth": 1, "inner": {"width": 7}}')
    result = statecli("inspect", "net.py:Net", "--config-json", "net.json", "-f", "json")
    assert result.code == 0, result.err
    assert result.rows()["layers.2.weight"]["shape"] == [7, 4]
    assert result.json["target"] == "net.py:Net --config-json net.json"
    assert statecli("inspect", result.json["target"], "-f", "json").out == result.out
    torch.save({name: torch.ones(shape) for name, shape in shapes(result.json["target"]).items()}, "net.pt")
    for words in (
        ("diff", "net.py:Net", "net.pt"),
        ("audit", "net.pt", "--model", "net.py:Net"),
        ("verify", "net.py:Net", "--check", "save"),
        ("explain", "net.py:Net", "net.pt"),
        ("lock", "net.py:Net", "-o", "net.lock"),
    ):
        result = statecli(*words, "--config-json", "net.json")
        assert result.code == 0, (words, result.err)


@pytest.mark.parametrize(
    ("text", "target", "problem"),
    [
        ('{"sise": 4}', "net.py:Net", "net.json: Config has no field 'sise'; did you mean size?"),
        ("{}", "net.py:Net", "net.json: Config needs size; add the fields to the file"),
        ('{"size": 4, "inner": {"a": 1}}', "net.py:Net", "net.json: Inner has no field 'a'; its fields are width"),
        ("[1]", "net.py:Net", "net.json"),
        ("{", "net.py:Net", "net.json"),
        ("{}", "net.pt", "--config-json net.json: net.pt is not a model class; give a class, such as net.py:Net"),
        ("{}", "bert/config.json", "bert/config.json is built from bert/config.json; leave the option out"),
        ("{}", "net.py:Wide(3)", "no argument of Wide takes a configuration class; write the arguments in parentheses"),
    ],
)
def test_config_file_that_does_not_fit_is_a_one_line_error(net, statecli, text, target, problem):
    """The error names the file and the field, and says what to do."""
    torch.save({}, "net.pt")
    configure("bert", **BERT)
    Path("net.json").write_text(text)
    result = statecli("inspect", target, "--config-json", "net.json")
    assert (result.code, result.out) == (2, "")
    assert problem in result.err
    assert result.err.count("\n") == 1


# --- hostile configurations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "hostile: config.json"),
        ('{"architectures": ["BertModel"], "architectures": ["X"]}', "hostile: config.json"),
        (
            '{"architectures": ["\\u001b[31mEvil"]}',
            r"architectures has '\x1b[31mEvil', which is not the name of a class",
        ),
        ('{"architectures": ["os"]}', "has no model class os"),
        ('{"architectures": ["PreTrainedModel"]}', "has no model class PreTrainedModel"),
        ('{"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "os.system"}', "KeyError: 'os.system'"),
        ('{"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 10000000000000000000}', "hostile"),
        ('{"model_type": "nonsense"}', "architectures does not name a class; name the class: file.py:Class"),
    ],
)
def test_a_hostile_configuration_is_one_line(installed_transformers, statecli, text, problem):
    """The error has the file and the problem, and no code is imported or downloaded."""
    Path("hostile").mkdir()
    Path("hostile/config.json").write_text(text)
    result = statecli("inspect", "hostile")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert problem in result.err


# --- the lines of explain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "bert",
        "transformers:BertModel(config='bert', add_pooling_layer=False, num_hidden_layers=1)",
        "transformers:AutoModelForMaskedLM(config='bert')",
        "unet",
        "diffusers:UNet2DModel(config='unet', width=4)",
        "r18",
    ],
)
def test_the_lines_of_explain_build_the_same_model(working_folder, text):
    """The lines run in Python."""
    pytest.importorskip("transformers")
    from statecli.commands.explain.model_code import build_model_code

    configure("bert", **BERT)
    configure("unet", _class_name="UNet2DModel", width=3)
    sys.modules["diffusers"] = __import__("diffusers")
    sys.modules["diffusers"].UNet2DModel.load_config = staticmethod(
        lambda path: json.loads(Path(path, "config.json").read_text())
    )
    original = sys.modules["diffusers"].UNet2DModel.from_config
    sys.modules["diffusers"].UNet2DModel.from_config = staticmethod(
        lambda config, **arguments: original({**config, **arguments})
    )
    configure("r18", architecture="resnet18", num_classes=5)
    code = build_model_code(find_class_spec(text))
    names: dict[str, object] = {}
    exec("\n".join([*code.imports, f"model = {code.expression}"]), names)  # noqa: S102 - the printed lines
    actual = {name: tuple(tensor.shape) for name, tensor in names["model"].state_dict().items()}
    assert actual == shapes(text)


def test_the_function_of_inputs_takes_names_too(net, statecli):
    """A name is passed as an object, not as a text."""
    Path("batch.py").write_text("import torch\ndef make(dtype): return torch.ones(2, 3).to(dtype)\n")
    words = ("net.py:Wide(3)", "--check", "move", "--input-from", "batch.py:make(torch.float64)")
    assert statecli("verify", *words).code == 0


# --- --config-json with a configuration of transformers ------------------------------------------------------------


@pytest.fixture
def bert(installed_transformers):
    """Create a folder with a config.json that transformers wrote."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    config = installed_transformers.BertConfig(**sizes, vocab_size=9, architectures=["BertModel"], dtype="float32")
    config.save_pretrained("bert")


def test_a_class_of_transformers_takes_its_own_file_as_config_json(bert, statecli):
    """A file of save_pretrained has model_type, architectures and more entries, which are not fields of the class."""
    result = statecli("inspect", "transformers:BertModel", "--config-json", "bert/config.json", "-f", "json")
    assert result.code == 0, result.err
    expected = statecli("inspect", "transformers:BertModel('bert/config.json')", "-f", "json")
    assert names_and_shapes(result.json) == names_and_shapes(expected.json)


def names_and_shapes(document):
    return [(row["fqn"], row["shape"]) for row in document["tensors"]]


def test_a_class_of_the_user_takes_a_configuration_of_transformers(bert, statecli):
    """The annotation of the argument selects the class of the configuration."""
    Path("net.py").write_text(
        "from torch import nn\nfrom transformers import BertConfig\n"
        "class Net(nn.Module):\n    def __init__(self, config: BertConfig):\n        super().__init__()\n"
        "        self.fc = nn.Linear(config.hidden_size, len(config.architectures))\n"
    )
    result = statecli("inspect", "net.py:Net", "--config-json", "bert/config.json", "-f", "json")
    assert result.code == 0, result.err
    size = json.loads(Path("bert/config.json").read_text())["hidden_size"]
    assert {row["fqn"]: row["shape"] for row in result.json["tensors"]}["fc.weight"] == [1, size]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', but BertConfig needs 'bert'"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"hidden_size": "x"}, "hidden_size"),
    ],
)
def test_a_wrong_file_for_config_json_is_one_line(bert, statecli, fields, message):
    """The file is for another model, has a size larger than in any model, or has a text in place of a number."""
    document = json.loads(Path("bert/config.json").read_text()) | fields
    Path("wrong.json").write_text(json.dumps(document))
    result = statecli("inspect", "transformers:BertModel", "--config-json", "wrong.json")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert message in result.err


# --- the line to type -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "wrong",
            "wrong/config.json: transformers {} has no model class BertForNothing; for this model_type, "
            "write \"transformers:BertModel('wrong/config.json')\"",
        ),
        (
            "unknown",
            "unknown/config.json: transformers {} has no model class FooModel; name the class: file.py:Class",
        ),
        (
            "transformers:BertModl('bert')",
            "bert/config.json: transformers {} has no model class BertModl; for this model_type, write "
            "\"transformers:BertModel('bert/config.json')\"",
        ),
        (
            "transformers:LlamaModel(config='bert')",
            "bert/config.json: model_type is 'bert', but LlamaModel needs 'llama'; for this model_type, write "
            "\"transformers:BertModel('bert/config.json')\"",
        ),
        (
            "transformers:BertModel(BertConfig(hidden_siz=24))",
            "transformers:BertModel(BertConfig(hidden_siz=24)): BertConfig: got an unexpected keyword argument "
            "'hidden_siz'; did you mean hidden_size? write 'transformers:BertModel(BertConfig(hidden_size=24))'",
        ),
    ],
)
def test_error_about_a_wrong_name_has_the_right_name(bert, installed_transformers, statecli, target, message):
    """The error describes only the names in the file."""
    configure("wrong", architectures=["BertForNothing"], model_type="bert")
    configure("unknown", architectures=["FooModel"], model_type="foo")
    assert statecli("inspect", target).err == f"statecli: {message.format(installed_transformers.__version__)}\n"


def test_the_line_to_type_for_a_wrong_class_works(bert, statecli):
    """The line in the message builds a model."""
    configure("wrong", **json.loads(Path("bert/config.json").read_text()) | {"architectures": ["BertForNothing"]})
    line = statecli("inspect", "wrong").err.partition('write "')[2].removesuffix('"\n')
    assert statecli("inspect", line).code == 0


def test_a_model_of_timm_has_the_nearest_name(working_folder):
    """A name in a configuration gets the most similar name too."""
    configure("r18", architecture="resnet1")
    with pytest.raises(ModelError, match=r"r18/config.json: architecture is 'resnet1', .*; did you mean .*resnet18"):
        shapes("r18")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "transformers:AutoModel.from_pretrained('bert')",
            "transformers:AutoModel.from_pretrained('bert'): bert has no weights; to build the class from its "
            "config.json, write \"transformers:AutoModel('bert')\"",
        ),
        (
            "transformers.BertModel.from_pretrained('bert')",
            "transformers:BertModel.from_pretrained('bert'): bert has no weights; to build the class from its "
            "config.json, write \"transformers:BertModel('bert')\"",
        ),
        (
            "AutoModel.from_pretrained('bert')",
            "transformers:AutoModel.from_pretrained('bert'): bert has no weights; to build the class from its "
            "config.json, write \"transformers:AutoModel('bert')\"",
        ),
    ],
)
def test_from_pretrained_without_weights_has_the_line_to_type(bert, statecli, target, message):
    """The line to type works."""
    assert statecli("inspect", target).err == f"statecli: {message}\n"
    assert statecli("inspect", message.partition('write "')[2].removesuffix('"')).code == 0


def test_from_pretrained_with_weights_is_accepted(bert, installed_transformers, statecli):
    """from_pretrained loads the weights: the statistics are of the saved values."""
    model = installed_transformers.BertModel(installed_transformers.BertConfig.from_pretrained("bert"))
    model.pooler.dense.bias.data.fill_(3)
    model.save_pretrained("bert")
    result = statecli("inspect", "transformers:AutoModel.from_pretrained('bert')", "--stats", "-f", "json")
    assert result.code == 0
    stats = result.rows()["pooler.dense.bias"]["stats"]
    assert (stats["min"], stats["max"]) == (3, 3)


def test_error_about_a_model_name_lists_the_libraries(working_folder, statecli):
    """timm and torchvision are installed; nothing is imported for the message."""
    line = "for a model of that name in a library, write timm:resnet50 or torchvision:resnet50\n"
    assert statecli("inspect", "resnet50").err.endswith(line)
    assert "timm" not in statecli("inspect", "weights").err


def test_a_configuration_without_a_model_class_is_named(installed_transformers, statecli):
    """A folder with only such a file is neither a checkpoint nor a class."""
    configure("nomodel", hello=1)
    end = "*.index.json file, and its config.json does not name a model class; "
    end += "name the class too, for example \"transformers:BertModel(config='nomodel')\"\n"
    assert statecli("inspect", "nomodel").err.endswith(end)
    end = "name the class too, for example \"transformers:BertModel(config='nomodel/config.json')\"\n"
    assert statecli("inspect", "nomodel/config.json").err.endswith(f"does not name a model class; {end}")
    assert statecli("inspect", "transformers:BertModel(config='nomodel/config.json')").code == 0


def test_log_of_a_library_is_hidden_while_advice_is_built(statecli, monkeypatch):
    """An Auto class imports the class of its example, and the libraries of the example."""
    pytest.importorskip("transformers")
    code = "import logging\ndef find_example(auto_class):\n    logging.getLogger('noisy').warning('failed to load')\n"
    library = {}
    exec(compile(code, "/usr/lib/python3/site-packages/noisy/__init__.py", "exec"), library)  # noqa: S102
    monkeypatch.setattr(hf_auto, "find_example", library["find_example"])
    refused = statecli("inspect", "transformers:AutoModelForCausalLM")
    assert (refused.code, refused.err.count("\n"), "failed to load" in refused.err) == (2, 1, False)
