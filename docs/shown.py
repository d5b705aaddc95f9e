"""What the documentation shows, made by the program itself when `make docs` runs."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def command(line: str, width: int = 88) -> None:
    """Print a console block: the command, what it writes on a terminal of that width, and its exit code when not 0."""
    print("```console")
    _run(line, width)
    print("```")


def _run(line: str, width: int = 88) -> None:
    import shlex

    from msgspec.structs import replace

    from statecli import render
    from statecli.cli import parser
    from statecli.commands.verify.run import FAKE_CUDA
    from statecli.requests.options import VerifyOptions
    from statecli.requests.run import run

    options = parser.parse(shlex.split(line)[1:])
    assert options is not None, line
    if isinstance(options, VerifyOptions) and options.device is None:
        # As on a machine without a GPU, wherever the documents are made.
        options = replace(options, device=FAKE_CUDA)
    report = run(options).report
    sink = _Text()
    render.write(report, render.Output.TABLE, sink, render.RenderOptions(terminal=True, width=width))
    _print(line, sink.file.getvalue(), 1 if report.has_failed() else 0)


def _print(line: str, said: str, code: int) -> None:
    shown = "\n".join(one.rstrip() for one in said.rstrip().splitlines())
    print("\n".join(filter(None, (f"$ {line}", shown, "$ echo $?\n1" if code else ""))))


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """In an empty folder, which is gone afterwards."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(home)


def finetuned(line: str) -> None:
    """`command`, where the checkpoints of `sample_models/finetune.py` are."""
    import runpy

    with _elsewhere():
        runpy.run_path(str(ROOT / "sample_models" / "finetune.py"))["main"](".")
        command(line)


class _Runs:
    """What an attacker puts into a checkpoint: pickled, it is a call of os.system."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def checkpoints(folder: str) -> None:
    """Write three: one that is as it was trained, one with a NaN, one from elsewhere whose loading runs a command."""
    import torch
    from safetensors.torch import save_file

    state = {"encoder.weight": torch.arange(64.0).reshape(8, 8), "encoder.bias": torch.ones(8)}
    state |= {"head.weight": torch.arange(16.0).reshape(2, 8), "head.bias": torch.ones(2)}
    into = Path(folder)
    into.mkdir()
    save_file(state, into / "step-100.safetensors")
    torch.save({"state_dict": state, "callback": _Runs()}, into / "downloaded.ckpt")
    torch.save(
        state | {"head.weight": state["head.weight"].index_fill(1, torch.tensor(3), torch.nan)}, into / "step-200.pt"
    )


def audited(line: str) -> None:
    """`command`, where the checkpoints are."""
    with _elsewhere():
        checkpoints("checkpoints")
        command(line)


def nudged() -> None:
    """Lock a checkpoint, move one of its weights, and audit it."""
    with _elsewhere():
        checkpoints("checkpoints")
        print("```console")
        line = "statecli lock checkpoints/step-100.safetensors -o statecli.lock.json"
        _print(line, _called(line), 0)
        _nudge("checkpoints/step-100.safetensors")
        print("$ # one weight of head.bias moves from 1 to 1.0000001")
        _run("statecli audit checkpoints/step-100.safetensors --lock statecli.lock.json")
        print("```")


def lock_file() -> None:
    """What `statecli lock` writes."""
    with _elsewhere():
        checkpoints("checkpoints")
        print(f"```json\n{_called('statecli lock checkpoints/step-100.safetensors').rstrip()}\n```")


def accepted() -> None:
    """Write a baseline, and audit again."""
    with _elsewhere():
        checkpoints("checkpoints")
        print("```console")
        line = "statecli audit checkpoints/step-200.pt --values -q --write-baseline accepted.json --reason 'for a test'"
        _print(line, _called(line), 0)
        _run("statecli audit checkpoints/ --values --baseline accepted.json")
        print("```")


def in_git() -> None:
    """What `git diff` shows of a weight that moved."""
    with _elsewhere():
        checkpoints("checkpoints")
        for name in ("downloaded.ckpt", "step-200.pt"):
            (Path("checkpoints") / name).unlink()
        _called("git init --quiet .")
        print("```console")
        _print("statecli git setup", _called("statecli git setup"), 0)
        _called("git add --all")
        _nudge("checkpoints/step-100.safetensors")
        # Which blobs these are says nothing to a reader.
        changes = [one for one in _called("git diff").splitlines() if not one.startswith("index ")]
        _print("git diff", "\n".join(changes), 0)
        print("```")


def _nudge(path: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(path)
    state["head.bias"][0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    save_file(state, path)


def _called(line: str) -> str:
    """What a command of this statecli, or of git with no configuration but the repository's, writes."""
    import shlex
    import subprocess

    words = shlex.split(line)
    words = [sys.executable, "-m", *words] if words[0] == "statecli" else words
    # Not the repository in one of whose hooks this may run.
    alone = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    alone |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONPATH": str(ROOT)}
    # git keeps what its driver made as a note, which has an author.
    alone |= {
        f"GIT_{who}_{what}": "statecli@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    return subprocess.run(words, capture_output=True, text=True, check=True, env=alone).stdout  # noqa: S603


class _Text:
    def __init__(self) -> None:
        self.file = io.StringIO()

    def text(self, text: str) -> None:
        self.file.write(text)

    def utf8(self, raw: bytes) -> None:
        self.file.write(raw.decode())


def options(name: str) -> None:
    """Print the options of a command as a Markdown table."""
    from statecli.requests.options import COMMANDS
    from statecli.requests.parameters import parameters_of

    print("| option | does |\n| --- | --- |")
    for option in parameters_of(COMMANDS[name]):
        if not option.is_target and not option.hidden:
            names = ", ".join(f"`{flag}`" for flag in option.flags)
            print(f"| {names} | {option.help.replace('|', chr(92) + '|')} |")


def inputs() -> None:
    """Print the inputs of the GitHub action."""
    import yaml

    print("| input | is |\n| --- | --- |")
    for name, one in yaml.safe_load((ROOT / "action.yml").read_text())["inputs"].items():
        default = f" Default: `{one['default']}`." if one.get("default") else ""
        print(f"| `{name}` | {one['description']}{default} |")


def rooms() -> None:
    """Print the rooms of the code, highest first, with the first sentence of what each package says of itself."""
    import ast

    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    print("| room | contents |\n| --- | --- |")
    for name in (name for layer in contracts[0]["layers"] for name in layer.split(" : ")):
        path = ROOT / Path(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        print(f"| `{name.removeprefix('statecli.').replace('.', '/')}` | {text} |")


def samples() -> None:
    """Print the sample models with the first line of what each teaches."""
    import ast

    print("| file | lesson |\n| --- | --- |")
    for path in sorted((ROOT / "sample_models").glob("*.py")):
        lesson = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        print(f"| [`{path.name}`](sample_models/{path.name}) | {lesson} |")


def formats() -> None:
    """Print the formats with the first sentence of what each module says of itself."""
    from statecli.formats import FORMATS

    print("| format | what it is |\n| --- | --- |")
    for module in FORMATS:
        print(f"| `{module.NAME}` | {(module.__doc__ or '').splitlines()[0]} |")


def rules() -> None:
    """Print a table of the rules of all commands, then each with its explanation."""
    from statecli.report import rules as ruling

    every = ruling.list_rules()
    print("| rule | severity | reported by | what it flags |\n| --- | --- | --- | --- |")
    for one in every:
        summary = one.summary.replace("|", chr(92) + "|")
        print(f"| [`{one.name}`](#{one.name}) | {one.severity.value} | {', '.join(one.commands)} | {summary} |")
    for about in dict.fromkeys(one.about for one in every):
        print(f"\n## {about}")
        for one in every:
            if one.about == about:
                print(f"\n### {one.name}\n\n{one.severity.value}: {one.explanation}")
                print(f"\nReported by: {', '.join(f'`statecli {command}`' for command in one.commands)}")
