"""What the documentation shows, made by the program itself when `make docs` runs."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def command(line: str, width: int = 88) -> None:
    """Print a console block: the command, what it writes on a terminal of that width, and its exit code when not 0."""
    import shlex

    from statecli import inspection, proofs, render, shortcut
    from statecli.asked import request, view
    from statecli.comparison.run import compare
    from statecli.options import DiffOptions, VerifyOptions
    from statecli.report import View, diffing, inspecting, verifying

    options = shortcut.parse(shlex.split(line)[1:])
    assert options is not None, line
    if isinstance(options, DiffOptions):
        report = diffing.of_diff(compare(request(options)), view(options))
    elif isinstance(options, VerifyOptions):
        # As on a machine without a GPU, wherever the documents are made.
        wanted = proofs.Request(target=options.target, device=options.device or proofs.FAKE, input=options.input)
        report = verifying.of_verification(proofs.run(wanted), View())
    else:
        found = inspection.inspect(inspection.Request(target=options.target, to=options.to, model=options.model))
        report = inspecting.of_inspection(found, View())
    sink = _Text()
    render.write(report, render.Output.TABLE, sink, render.Look(terminal=True, width=width))
    print(f"```console\n$ {line}\n{sink.file.getvalue().rstrip()}")
    print("$ echo $?\n1\n```" if report.failed() else "```")


def finetuned(line: str) -> None:
    """`command`, where the checkpoints of `sample_models/finetune.py` are."""
    import runpy

    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            runpy.run_path(str(ROOT / "sample_models" / "finetune.py"))["main"](".")
            command(line)
        finally:
            os.chdir(home)


class _Text:
    def __init__(self) -> None:
        self.file = io.StringIO()

    def text(self, text: str) -> None:
        self.file.write(text)

    def utf8(self, raw: bytes) -> None:
        self.file.write(raw.decode())


def options(name: str) -> None:
    """Print the options of a command as a Markdown table."""
    import typer

    from statecli.arguments import app

    command = typer.main.get_command(app).commands[name]
    print("| option | does |\n| --- | --- |")
    for parameter in command.params:
        if parameter.param_type_name == "option":
            names = ", ".join(f"`{opt}`" for opt in sorted(parameter.opts, key=len, reverse=True))
            print(f"| {names} | {parameter.help.replace('|', chr(92) + '|')} |")


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
    """Print a table of the rules of `audit`, then each with its explanation."""
    from statecli.report import ruling

    every = ruling.every()
    print("| rule | severity | what it flags |\n| --- | --- | --- |")
    for one in every:
        print(f"| [`{one.name}`](#{one.name}) | {one.severity.value} | {one.summary.replace('|', chr(92) + '|')} |")
    for about in dict.fromkeys(one.about for one in every):
        print(f"\n## {about}")
        for one in every:
            if one.about == about:
                print(f"\n### {one.name}\n\n{one.severity.value}: {one.explanation}")
