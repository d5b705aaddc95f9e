"""Write the arguments of the Python functions from the table of options: signatures, literals and sections `Args`.

Type checkers and editors read a module without running it, so its source must contain them. An argument that the
docstring already describes keeps its description; a new argument gets the help of its option.
"""

from __future__ import annotations

import enum
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from statecli.core.compared_fields import Field
from statecli.core.digest_algorithm import Algorithm
from statecli.core.finding import Severity
from statecli.core.model_state import Kind
from statecli.core.proof_names import Name
from statecli.requests.options import COMMANDS, COMMANDS_WITH_FUNCTION, NamedKind, OptionGroup
from statecli.requests.parameters import Parameter, parameters_of

#: Literals with the values of the enumerations.
LITERALS: dict[type[enum.Enum], str] = {
    Name: "CheckName",
    Kind: "KindName",
    Field: "FieldName",
    Severity: "SeverityName",
    Algorithm: "DigestName",
}
WIDTH = 120
BUILT_IN = {"bool", "int", "float", "str", "None"}


class Argument(NamedTuple):
    """Argument: the texts of its type and of its default (None for a required argument), and its description."""

    name: str
    type: str
    default: str | None
    description: str


def list_arguments(command: str) -> list[Argument]:
    """Return the arguments of the function of a command, in the order of the help."""
    parameters = parameters_of(COMMANDS[command])
    fields = {each.field for each in parameters}
    arguments = dict[str, Argument]()  # --input and --input-from share an argument
    for parameter in parameters:
        if _is_argument(parameter, command):
            has_opposite = parameter.is_flag and f"no_{parameter.field}" in fields  # --values and --no-values
            arguments.setdefault(parameter.argument, _build_argument(parameter, has_opposite))
    return list(arguments.values())


def _is_argument(parameter: Parameter, command: str) -> bool:
    is_text = parameter.group in (OptionGroup.ROWS, OptionGroup.OUTPUT)  # Python gets the result as an object
    return not (is_text or parameter.hidden or command in parameter.shell_only)


def _build_argument(parameter: Parameter, has_opposite: bool) -> Argument:
    if has_opposite:
        return Argument(parameter.argument, "bool | None", "None", parameter.help)
    default = getattr(parameter.default, "value", parameter.default)
    text = f'"{default}"' if isinstance(default, str) else "None" if parameter.python_type == "Any" else repr(default)
    return Argument(
        parameter.argument, _format_type(parameter), None if parameter.is_required else text, parameter.help
    )


def _format_type(parameter: Parameter) -> str:
    if parameter.python_type:
        return parameter.python_type
    text, literal = parameter.type.__name__, LITERALS.get(parameter.type)
    if literal:
        text += f" | {literal}"
    if parameter.repeatable:
        return f"Iterable[{text}] | {literal} | None" if literal else f"Iterable[{text}] | None"
    if parameter.names is NamedKind.INPUT:
        text += " | os.PathLike[str]"
    return text if parameter.default is not None else f"{text} | None"


def write_signature(source: str, function: str, arguments: list[Argument]) -> str:
    """Return the source with the arguments in the signature and in the docstring of a function."""
    is_quoted = "from __future__ import annotations" not in source
    lines = [_format_argument(each, is_quoted) for each in arguments]
    required = sum(each.default is None for each in arguments)
    lines.insert(required, "    *,\n")
    head = re.compile(rf"(?<=^def {function}\(\n).*?(?=^\) -> )", re.MULTILINE | re.DOTALL)
    source = head.sub(lambda _: "".join(lines), source, count=1)
    section = re.compile(rf"^def {function}\(.*?^    Args:\n(.*?)\n\n    Returns:", re.MULTILINE | re.DOTALL)
    found = section.search(source)
    assert found is not None, f"{function} has no section Args"
    return source[: found.start(1)] + _describe(arguments, found[1]) + source[found.end(1) :]


def _format_argument(argument: Argument, is_quoted: bool) -> str:
    is_quoted = is_quoted and not BUILT_IN.issuperset(re.findall(r"\w+", argument.type))
    annotation = f'"{argument.type}"' if is_quoted else argument.type
    return f"    {argument.name}: {annotation}" + (f" = {argument.default}" if argument.default else "") + ",\n"


def _describe(arguments: list[Argument], section: str) -> str:
    known = dict(re.findall(r"^        (\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE))
    return "\n".join(
        f"        {each.name}: {known[each.name]}"
        if each.name in known
        else textwrap.fill(
            f"{each.name}: {each.description}", WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12
        )
        for each in arguments
    )


def write_literals(source: str) -> str:
    """Return the source with the values of the enumerations in the literals."""
    for enumeration, name in LITERALS.items():
        words = ", ".join(f'"{member.value}"' for member in enumeration)
        line = f"    {name} = Literal[{words}]"
        text = line if len(line) <= WIDTH else f"    {name} = Literal[\n        {words}\n    ]"
        source = re.sub(
            rf"^    {name} = Literal\[.*?\]", lambda _, text=text: text, source, flags=re.DOTALL | re.MULTILINE
        )
    return source


def build_sources(package: Path) -> dict[Path, str]:
    """Return the text of each module with a function of a command."""
    functions, testing = package / "__init__.py", package / "testing.py"
    text = write_literals(functions.read_text("utf-8"))
    for command in COMMANDS_WITH_FUNCTION:
        text = write_signature(text, command, list_arguments(command))
    gate = Argument("fail_on", "Severity | SeverityName", '"warning"', "Lowest severity that fails.")
    tested = write_signature(testing.read_text("utf-8"), "assert_state_follows", [*list_arguments("verify"), gate])
    return {functions: text, testing: tested}
