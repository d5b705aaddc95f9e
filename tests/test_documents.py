"""The examples of the documents run, everything has its page, and the pictures show the output of the program."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from statecli.cli.help_page import OTHER_COMMAND_NAMES
from statecli.commands.audit import config
from statecli.commands.audit.config import Config, IgnoreEntry
from statecli.commands.audit.import_plugin import import_plugins
from statecli.commands.audit.plugins import PluginRequest
from statecli.core.documentation import DOCUMENTATION_URL, rule_url
from statecli.formats import FORMATS
from statecli.report.documents.schemas import DOCUMENTS
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import parameters_of
from statecli.rules.dictionary import DICTIONARY
from statecli.rules.policy_config import Policy

from .forked_python import run_code

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import pictures  # noqa: E402 - the documents are not a package
import prebuilt  # noqa: E402
import python_signatures  # noqa: E402
import screenshots  # noqa: E402
import shown  # noqa: E402
import site_pages  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
#: Path -> text of the README and of every page of docs/.
PAGES = {"README.md": README} | {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))
}


def blocks(text, language):
    """Return the fenced blocks of a page in this language."""
    return re.findall(rf"^ *```{language}\n(.*?)```", text, re.DOTALL | re.MULTILINE)


RUN = tuple(f"statecli {command}" for command in ("inspect", "diff", "verify", "audit", "lock", "rules", "config"))
#: Examples that need servers, clusters or parts: tests/storage, tests/executors and tests/shards run such examples.
PAGES_NOT_RUN = ("docs/how-to/split-the-work.md", "docs/how-to/one-terabyte.md", "docs/reference/executors.md")
#: Targets that are not tested: the files of explanation/scale.md take too long to write.
REMOTE = re.compile(r"\b(https?|s3|gs|hf)://|\bmoe/|< targets")
LINES = [
    line.strip()
    for name, text in PAGES.items()
    if name not in PAGES_NOT_RUN
    for block in blocks(text, "sh")
    for line in block.splitlines()
    if line.strip().startswith(RUN) and not REMOTE.search(line)
]
#: Files that other examples write -> the command that writes them, because tests run in any order.
WRITTEN = {
    "statecli.lock.json": ("lock", "checkpoints"),
    "known.json": ("audit", "checkpoints", "-q", "--write-baseline", "known.json", "--reason", "as it was"),
}


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory):
    """A folder with every file of the examples."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("net.py", "finetune.py", "train.py"):
        shutil.copy(ROOT / "sample_models" / name, folder / name)
    shutil.copy(ROOT / "sample_plugin" / "acme_rules.py", folder / "acme_rules.py")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "mod.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self, hidden=2):\n"
        "        super().__init__(hidden, hidden)\n\n\ndef build():\n    return Net()\n\n\n"
        "def batch():\n    import torch\n\n    return torch.ones(1, 2)\n\n\n"
        "def fit(**options):\n    from train import fixed\n\n    fixed(**options)\n"
    )
    (folder / "gpt.py").write_text(
        "from dataclasses import dataclass\nfrom torch import nn\n\n\n@dataclass\nclass Config:\n    size: int\n\n\n"
        "class GPT(nn.Linear):\n    def __init__(self, config: Config):\n        super().__init__(config.size, 2)\n"
    )
    (folder / "gpt.json").write_text('{"size": 3}')
    (folder / "bert").mkdir()
    sizes = '"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16'
    (folder / "bert" / "config.json").write_text(
        f'{{"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 9, {sizes}}}'
    )
    state = {"param": torch.ones(3, 3), "mybuffer1": torch.ones(2, 2)}
    save_file(state, folder / "model.safetensors")
    torch.save(state, folder / "net.pt")
    optimizer = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer}, folder / "train.ckpt")
    torch.save(state, folder / "a.pt")
    for name, prefix in (("old.pt", "net."), ("new.pt", "model.")):
        torch.save({prefix + key: value for key, value in state.items()}, folder / name)
    for name in ("epoch1.ckpt", "epoch2.ckpt"):
        torch.save({"model": state, "optimizer": optimizer}, folder / name)
    save_file(state, folder / "b.safetensors")
    for name in ("finetune", "transformed_checkpoints", "training_checkpoints"):
        runpy.run_path(str(ROOT / "sample_models" / f"{name}.py"))["main"](str(folder))
    (folder / "checkpoints").mkdir()
    shutil.copy(folder / "net.pt", folder / "checkpoints" / "net.pt")
    return folder


@pytest.fixture
def working_folder(example_folder, tmp_path, monkeypatch):
    """A copy of the folder as current folder."""
    shutil.copytree(example_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def test_pattern_finds_at_least_30_examples():
    """The pattern finds them."""
    assert len(LINES) >= 30


@pytest.mark.parametrize("line", LINES)
def test_an_example_runs(statecli, working_folder, line):
    """Each example exits with 0 or 1, or needs CUDA and reports that CUDA is missing."""
    words = shlex.split(re.split(r" #| \|", line)[0])
    if "bert" in line.lower():
        pytest.importorskip("transformers")
    if "timm" in line:
        pytest.importorskip("timm", reason="timm does not import")
    for path, made_by in WRITTEN.items():
        if path in words:
            assert statecli(*made_by, *(() if path in made_by else ("-o", path))).code == 0
    result = statecli(*words[1:])
    if result.code == 2 and not torch.cuda.is_available():
        assert ("--device fake-cuda" if words[1] == "verify" else "--to meta") in result.err
        assert any("cuda" in word for word in words)
    else:
        assert result.code in (0, 1), result


def test_the_remedy_for_a_checkpoint_that_does_not_load_loads_it():
    """The code of the how-to runs where its other examples run."""
    (code,) = blocks(PAGES["docs/how-to/load-state-dict-fails.md"], "python")
    with shown.sample_folder():
        process = run_code(code + "\nassert model.head.weight.equal(state['head.weight'])")
    assert process.returncode == 0, process.stderr


PYTHON_EXAMPLES = [
    (name, call) for name, text in PAGES.items() for call in re.findall(r"cog shown\.python\((.*?)\) \]\]\]", text)
]


@pytest.mark.parametrize(("page", "call"), PYTHON_EXAMPLES)
def test_output_of_each_python_example_is_in_the_page(page, call):
    """The blocks run one after another in a folder with the sample files."""
    pytest.importorskip("torch")
    name, *numbers = [part.strip().strip('"') for part in call.split(",")]
    assert f"docs/{name}" == page
    printed = shown.run_python(name, *map(int, numbers)).rstrip()
    assert f"{call}) ]]]-->\n```text\n{printed}\n```" in PAGES[page].replace("]]] -->", "]]]-->")


def map_field_names(kind):
    return dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


@pytest.fixture
def complete_configuration(tmp_path, monkeypatch):
    """The complete configuration of docs/reference/configuration.md: its text, and the loaded configuration."""
    (text,) = blocks(PAGES["docs/reference/configuration.md"], "toml")
    (tmp_path / "pyproject.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "_load_plugins", with_sample_plugin)
    return text, config.load_config()


def with_sample_plugin(request):
    """Import the sample plugin, as if it was installed, if a configuration names a plugin."""
    typed = (str(ROOT / "sample_plugin" / "acme_rules.py"),)
    return import_plugins(PluginRequest(typed)) if request.configured else ()


def test_the_whole_configuration_has_every_key(complete_configuration):
    """Each existing key has a value other than its default; an unknown key cannot have a value."""
    _, loaded = complete_configuration
    for kind, settings in ((Config, loaded.config), (Policy, loaded.config.policy)):
        same = [
            key for field, key in map_field_names(kind).items() if getattr(settings, field) == getattr(kind(), field)
        ]
        assert not same
    assert all(accepted.rules and accepted.reason for accepted in loaded.config.per_target_ignore.values())


def test_every_key_of_the_whole_configuration_has_a_comment(complete_configuration):
    """Each key is followed by a comment."""
    text, _ = complete_configuration
    commented_lines = [line for line in text.splitlines() if re.search(r"\S  +# \S", line)]
    for key in (
        *map_field_names(Config).values(),
        *map_field_names(Policy).values(),
        *map_field_names(IgnoreEntry).values(),
    ):
        assert [
            line
            for line in commented_lines
            if re.match(rf"({re.escape(key)} =|\[tool\.statecli\.{re.escape(key)}\b)", line)
        ], key


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if blocks(text, "toml")])
def test_every_configuration_of_a_page_can_be_read(page, tmp_path, monkeypatch):
    """No unknown key, no value of another type."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "_load_plugins", with_sample_plugin)
    for text in blocks(PAGES[page], "toml"):
        if "[build-system]" in text:  # of a package, not of a project that uses statecli
            continue
        (tmp_path / "pyproject.toml").write_text(text, "utf-8")
        assert config.load_config().path


def list_mappings(document):
    """Each mapping in a YAML document, however deep."""
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return [document] * isinstance(document, dict) + [use for value in inner for use in list_mappings(value)]


def list_steps(page):
    return [use for text in blocks(PAGES[page], "yaml") for use in list_mappings(yaml.safe_load(text))]


def test_documented_inputs_of_the_integrations_exist():
    """The action and the component have the inputs used by the page, and the hook is named by its id."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    component = next(yaml.safe_load_all((ROOT / "templates" / "audit.yml").read_text()))["spec"]["inputs"]
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    steps = list_steps("docs/how-to/ci.md")
    actions = [step["with"] for step in steps if "statecli" in step.get("uses", "")]
    components = [step["inputs"] for step in steps if "component" in step]
    assert {step["id"] for step in steps if "id" in step and "uses" not in step} == hooks
    assert (len(actions), len(components)) == (1, 1)
    tutorial = [step["with"] for step in list_steps("docs/tutorial/gate-in-ci.md") if "uses" in step]
    assert len(tutorial) == 1
    assert all("targets" in step and set(step) <= set(action) for step in actions + tutorial)
    assert all("targets" in step and set(step) <= set(component) for step in components)


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_is_short():
    """Everything else has a page."""
    assert len(README.splitlines()) <= 200


def test_the_readme_counts_the_formats():
    """The README has the number of formats."""
    assert f"[{len(FORMATS)} formats]" in README


LINKED = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md"]


@pytest.mark.parametrize(
    "document", [*LINKED, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
)
def test_every_link_of_a_document_leads_somewhere(document):
    """Links within the repository lead to files of a clone. The links of the site are checked by `make site`."""
    path = ROOT / document
    for link in re.findall(r"(?:\]\(|src(?:set)?=\")([^)\s\"]+)", path.read_text("utf-8")):
        if "://" not in link:
            assert (path.parent / link.partition("#")[0]).exists(), link


def test_generated_files_of_the_package_are_up_to_date():
    """`make docs` writes them."""
    for path, text in prebuilt.build_files().items():
        assert path.read_text("utf-8") == text, path


def test_a_new_option_becomes_an_argument():
    """With the help of the option as its description; another function of the module stays."""
    source = """def other(
    a: int,
) -> None: ...


def inspect(
    target: "Target",
    *,
    gone: bool = False,
    stats: bool = False,
) -> "Inspection":
    \"\"\"List tensors.

    Args:
        target: A path,
            or a URL.
        gone: No longer there.
        stats: Read values.

    Returns:
        The state.
    \"\"\"
"""
    arguments = [
        python_signatures.Argument("target", "Target", None, "A target."),
        python_signatures.Argument("new", "int", "0", "Count the new things."),
        python_signatures.Argument("stats", "bool", "False", "Also read values."),
    ]
    assert python_signatures.write_signature(source, "inspect", arguments) == source.replace(
        "    gone: bool = False,\n", "    new: int = 0,\n"
    ).replace("        gone: No longer there.\n", "        new: Count the new things.\n")


@pytest.mark.parametrize("theme", pictures.THEMES)
@pytest.mark.parametrize("name", pictures.COMMANDS)
def test_a_picture_shows_the_output_of_the_program(name, theme, monkeypatch):
    """Letter by letter, and loads nothing from the network."""
    monkeypatch.chdir(ROOT)
    svg = (pictures.FOLDER / f"{name}-{theme}.svg").read_text("utf-8")
    line = pictures.COMMANDS[name]
    output = [f"$ {line}", *pictures.run(line).splitlines()]
    lines = [re.sub(r"\s", "", text) for text in output if text.strip()]
    assert pictures.read_text(svg) == ["statecli", *lines]
    assert not re.findall(r"url\((?!#)|href=|@import|@font-face", svg)


@pytest.mark.parametrize("theme", pictures.THEMES)
def test_the_picture_of_browse_shows_its_screen(theme):
    """After `make pictures`."""
    pytest.importorskip("textual")
    svg = (pictures.FOLDER / f"browse-{theme}.svg").read_text("utf-8")
    with screenshots.model_folder():
        assert pictures.read_text(svg) == pictures.read_text(screenshots.draw_browse(theme))
    assert not re.findall(r"url\((?!#)|href=|@import|@font-face", svg)


def test_the_pictures_of_the_page_are_small_webp():
    """A reader of the README loads the picture of one theme."""
    for theme in pictures.THEMES:
        data = (pictures.FOLDER / f"page-{theme}.webp").read_bytes()
        assert (data[:4], data[8:12]) == (b"RIFF", b"WEBP")
        assert len(data) < 50_000


# --- the pages of the site --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages():
    return site_pages.build_pages()


def test_every_rule_has_the_page_that_its_address_names(pages):
    """The page of each rule has its summary, reason, example and fix."""
    for name, rule in DICTIONARY.items():
        path = rule_url(name).removeprefix(DOCUMENTATION_URL).replace(".html", ".md")
        assert all(text[1:] in pages[path] for text in (rule.summary, rule.why, rule.example, rule.fix))


def test_every_schema_has_a_page(pages):
    """The pages are named as `statecli schema` lists the schemas."""
    assert {f"reference/schemas/{name}.md" for name in DOCUMENTS} <= set(pages)


def test_every_format_has_a_page(pages):
    """The list of formats fails for a reader without a page; the page of each format names the format."""
    text = "".join(text for path, text in pages.items() if path.startswith("reference/formats/"))
    assert all(f"\n### {format.name}\n" in text for format in FORMATS)


def test_every_command_and_option_is_documented(pages):
    """The page of the command names each option; the page about CI names the option of the hook, hidden in the help."""
    ci = pages["how-to/ci.md"]
    assert all(f"`statecli {name}`" in pages["reference/commands/index.md"] for name in OTHER_COMMAND_NAMES)
    for name, options in COMMANDS.items():
        page = pages[f"reference/commands/{name.replace(' ', '-')}.md"]
        for parameter in parameters_of(options):
            named = {*re.findall(r"[^\s`,|()]+", page + ci)}
            assert parameter.is_target or {*parameter.flags} & named, (name, parameter.field)


def test_the_code_of_cog_is_not_on_the_site(pages):
    assert not [path for path, text in pages.items() if "[[[cog" in text and "contributing" not in path]


@pytest.mark.parametrize(
    ("source", "text", "converted"),
    [
        ("docs/how-to/x.md", "[a](../reference/b.md#c)", "[a](../reference/b.md#c)"),
        ("docs/x.md", "[a](../CONTRIBUTING.md)", "[a](contributing/contributing.md)"),
        ("CONTRIBUTING.md", "[a](docs/explanation/security.md)", "[a](../explanation/security.md)"),
        ("docs/reference/x.md", "[a](../../sample_models/net.py)", "[a](sample-models.md#net)"),
        ("docs/x.md", "[a](https://b.example/c)", "[a](https://b.example/c)"),
        ("docs/x.md", "```\n[a](../CONTRIBUTING.md)\n```", "```\n[a](../CONTRIBUTING.md)\n```"),
        ("docs/how-to/x.md", "[a](../reference/formats/)", "[a](../reference/formats/index.md)"),
        ("docs/tutorial/x.md", "[a](../../sample_models/)", "[a](../reference/sample-models.md)"),
        ("docs/how-to/x.md", "by `unsafe-data`.", "by [`unsafe-data`](../reference/rules/unsafe-data.md)."),
        ("docs/how-to/x.md", "[`unsafe-data`](a.md) `no-rule`", "[`unsafe-data`](a.md) `no-rule`"),
    ],
)
def test_a_link_to_a_file_becomes_a_link_to_its_page(source, text, converted):
    assert site_pages.convert_links(text, source) == converted
