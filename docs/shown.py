"""What the documentation shows, made by the program itself when `make docs` runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def command(line: str, width: int = 88) -> None:
    """Print a console block: the command, what it writes on a terminal of that width, and its exit code when not 0."""
    import shlex

    from statecli import inspection, render
    from statecli.report import View, inspecting

    words = shlex.split(line)
    assert words[:2] == ["statecli", "inspect"], line
    options = dict(zip(words[3::2], words[4::2], strict=True))
    request = inspection.Request(target=words[2], to=options.pop("--to", None), model=options.pop("--model", None))
    assert not options, line
    report = inspecting.of_inspection(inspection.inspect(request), View())
    sink = _Text()
    render.write(report, render.Output.TABLE, sink, render.Look(terminal=True, width=width))
    print(f"```console\n$ {line}\n{sink.file.getvalue().rstrip()}")
    print("$ echo $?\n1\n```" if report.failed() else "```")


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
            print(f"| {names} | {parameter.help} |")


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
