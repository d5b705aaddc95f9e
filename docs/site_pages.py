"""The pages of the site as Markdown.

The pages of docs/ are copied, and a page is added for each rule and each schema. The page of a command or format has
the text of docs/reference/, if any, and the help of the command or the facts of the format.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

#: Files outside of docs/ that the site has too, and their pages.
COPIED = {
    "CONTRIBUTING.md": "contributing/contributing.md",
    "CHANGELOG.md": "contributing/changes.md",
    "SECURITY.md": "contributing/security-reports.md",
    "benchmarks/README.md": "contributing/benchmarks.md",
    "docs/architecture.md": "contributing/architecture.md",
    "docs/dependencies.md": "contributing/dependencies.md",
}
#: Links to other files lead to the page that shows or describes the file.
SAMPLES_PAGE = "reference/sample-models.md"
REDIRECTED = {
    "README.md": "index.md",
    "docs/reference": "reference/commands/index.md",
    "sample_models": SAMPLES_PAGE,
    "docs/reference/commands": "reference/commands/index.md",
    "docs/reference/formats": "reference/formats/index.md",
}

#: A name in backticks that is not yet the text of a link.
_RULE = re.compile(r"(?<![`\[\w/-])`([a-z]+(?:-[a-z0-9]+)+)`(?![`\]\w])")
#: A relative link of the README, also to a picture.
_README_LINK = re.compile(r'(\]\(|src="|srcset=")(?!https?:)([^)"\s]+)')
_LICENSE_URL = "https://www.apache.org/licenses/LICENSE-2.0"
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s]+)", re.MULTILINE)


def build_pages() -> dict[str, str]:
    """Return the text of every page by its path in the site."""
    sources = {f"docs/{path.relative_to(ROOT / 'docs').as_posix()}": path for path in (ROOT / "docs").rglob("*.md")}
    sources |= {name: ROOT / name for name in COPIED}
    pages = {
        find_page(name): convert_links(remove_markers(path.read_text("utf-8")), name)
        for name, path in sorted(sources.items())
    }
    for name, text in (*list_commands(pages), *list_formats(pages), *list_rules(), *list_schemas(), list_samples()):
        pages[name] = text
    return pages


def find_page(name: str) -> str:
    """Return the page that shows a file of the repository."""
    if name.startswith("sample_models/"):
        return f"{SAMPLES_PAGE}#{Path(name).stem}"
    return COPIED.get(name) or REDIRECTED.get(name) or name.removeprefix("docs/")


def remove_markers(text: str) -> str:
    """Return the text of a page without the code that cog runs."""
    return re.sub(r"<!-- \[\[\[.*?\]\]\] -->\n", "", text, flags=re.DOTALL)


def convert_links(text: str, source: str) -> str:
    """Return the text of a file with relative links that lead to pages of the site.

    The name of a rule becomes a link, because only the site has a page for each rule.
    """
    from statecli.rules.dictionary import DICTIONARY

    folder = posixpath.dirname(find_page(source)) or "."

    def convert(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or "://" in target:
            return match[0]
        page = find_page(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        page, _, page_anchor = page.partition("#")
        link = posixpath.relpath(page, folder)
        return match[1] + link + (f"#{anchor or page_anchor}" if anchor or page_anchor else "")

    def link_rule(match: re.Match[str]) -> str:
        page = posixpath.relpath(f"reference/rules/{match[1]}.md", folder)
        return f"[{match[0]}]({page})" if match[1] in DICTIONARY else match[0]

    return "".join(
        part if part.startswith("```") else _LINK.sub(convert, _RULE.sub(link_rule, part))
        for part in re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    )


def build_description() -> str:
    """Return README.md for the page of the package index: each relative link leads to the site."""
    from statecli.core.documentation import DOCUMENTATION_URL

    def convert(match: re.Match[str]) -> str:
        name, mark, anchor = match[2].partition("#")
        page = re.sub(r"\.md$", ".html", find_page(name.rstrip("/")))
        address = _LICENSE_URL if name == "LICENSE" else DOCUMENTATION_URL + page
        return match[1] + address + mark + anchor

    return _README_LINK.sub(convert, (ROOT / "README.md").read_text("utf-8"))


def escape(text: str) -> str:
    """Return plain text as Markdown, also for a cell of a table; spans of code stay."""
    return re.sub(r"([\\*_<|\[\]])", r"\\\1", text) if "`" not in text else text.replace("|", r"\|")


def format_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown."""
    head = tuple(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code_cell(text: str) -> str:
    """Return text as a code span for a cell of a table; the site does not need an escape for `|` in code."""
    return f"`{text}`"


def capitalize(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


# --- a page for each command ------------------------------------------------------------------------------------------


def list_commands(pages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the page of each command: docs/reference/commands/NAME.md if there is one, then its help."""
    from statecli.cli import help_table
    from statecli.requests.options import COMMANDS

    rows = []
    for name in COMMANDS:
        page = help_table.build_page(name)
        path = f"reference/commands/{name.replace(' ', '-')}.md"
        rows.append((f"[`{page.name}`]({posixpath.basename(path)})", escape(help_table.summarize(COMMANDS[name]))))
        yield path, f"{pages.get(path, f'# {page.name}').rstrip()}\n\n{format_help(page)}"
    rows += [(f"`statecli {name}`", text) for name, text in help_table.OTHER_COMMANDS.items()]
    yield "reference/commands/index.md", f"# Commands\n\n{format_table(('command', 'purpose'), rows)}\n"


def format_help(page: object) -> str:
    """Return the help of a command as Markdown."""
    parts = [f"## Usage\n\n```text\n{page.usage}\n```\n\n{escape(page.summary)}"]
    for section in (page.operands, *page.options):
        if section:
            rows = ((code_cell(term), escape(text)) for term, text in section.lines)
            kind = "option" if section in page.options else "argument"
            title = section.title.capitalize() if section.title.isupper() else section.title
            parts.append(f"### {title}\n\n{format_table((kind, 'meaning'), rows)}")
    examples = "\n\n".join(
        f"{escape(purpose).removesuffix('.')}:\n\n```sh\n{line}\n```" for line, purpose in page.examples
    )
    statuses = format_table(("status", "when"), ((status, escape(text)) for status, text in page.statuses))
    return "\n\n".join([*parts, f"## Examples\n\n{examples}", f"## Exit status\n\n{statuses}"]) + "\n"


# --- a page for each format -------------------------------------------------------------------------------------------

#: Traits of a format that matter to a user, each with the sentence if the format has the trait, and if not.
TRAITS = {
    "keeps_order": ("Tensors are in the order in which they were saved.", "The order of the tensors is not kept."),
    "settings_are_text": ("Every setting is text, also numbers.", ""),
    "drops_tied_names": ("A tied tensor is stored under one of its names.", ""),
    "is_program": ("The file is a program: it can store tensors that are not registered.", ""),
    "may_hold_settings_alone": ("A file with settings and without tensors is complete.", ""),
    "has_own_loader": ("A library loads the pickles, not `torch.load`.", ""),
    "has_collections": ("The collections of a model are separate sections.", ""),
}


def list_formats(pages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the page of each format, and the list of formats.

    The first line of a page of docs/reference/formats names the readers: `<!-- formats: torch-zip, torch-legacy -->`.
    """
    from statecli.formats.registry import FORMATS

    modules = {format.name: format.reader for format in FORMATS}
    rows = {}
    for path in sorted(path for path in pages if path.startswith("reference/formats/")):
        listed = re.match(r"<!-- formats: (.*) -->\n", pages[path])
        names = listed[1].split(", ") if listed else []
        rows |= {name: posixpath.basename(path) for name in names}
        facts = "\n".join(describe_format(modules[name]) for name in names)
        yield path, pages[path] + (f"\n## Facts\n\n{facts}" if facts else "")
    table = format_table(
        ("format", "contents"), ((f"[`{name}`]({rows[name]})", first_line(modules[name])) for name in modules)
    )
    others = "[Adapters](adapters.md) and [packed checkpoints](packed-checkpoints.md) have pages too."
    head = "statecli detects a format by content, never by name, and lists it without a library of the format."
    yield "reference/formats/index.md", f"# Formats\n\n{head}\n\n{table}\n\n{others}\n"


def first_line(module: object) -> str:
    """Return the first line of the docstring of a module."""
    return (module.__doc__ or "").splitlines()[0]


def describe_format(module: object) -> str:
    """Return a list of the facts of a format that the program uses."""
    facts = [text[not getattr(module.TRAITS, trait)] for trait, text in TRAITS.items()]
    facts += [f"{text}." for text in (module.TRAITS.mixed_dtypes, module.TRAITS.never_mapped) if text]
    lines = "".join(f"- {fact}\n" for fact in facts if fact)
    name = f"`statecli inspect -f json` calls the format `{module.NAME}`."
    return f"### {module.NAME}\n\n{name} {first_line(module)}\n\n{lines}"


# --- a page for each rule ---------------------------------------------------------------------------------------------


def list_rules() -> Iterator[tuple[str, str]]:
    """Yield the page of each rule, and the list of rules by group."""
    from statecli.rules.dictionary import DICTIONARY

    groups: dict[str, list[object]] = {}
    for rule in DICTIONARY.values():
        groups.setdefault(rule.group, []).append(rule)
        yield f"reference/rules/{rule.name}.md", format_rule(rule)
    parts = []
    for group, rules in groups.items():
        rows = (
            (f"[`{rule.name}`]({rule.name}.md)", rule.severity.value, ", ".join(rule.commands), cell(rule.summary))
            for rule in rules
        )
        parts.append(f"## {group}\n\n{format_table(('rule', 'severity', 'reported by', 'meaning'), rows)}")
    head = (
        "A finding has the name of its rule. `statecli rules` lists the rules, and `statecli rules NAME` explains one. "
        "`--select` and `--ignore` take the name of a rule or of a group. "
        "Severities: **note** (informational), **warning** (may be intentional), **error** (wrong)."
    )
    yield "reference/rules/index.md", f"# Rules\n\n{head}\n\n" + "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    """Return Markdown for a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def format_rule(rule: object) -> str:
    """Return the page of a rule."""
    commands = ", ".join(f"[`statecli {name}`](../commands/{name}.md)" for name in rule.commands)
    group = f"[{rule.group}](index.md#{slug(rule.group)})"
    facts = format_table(("severity", "group", "reported by"), [(rule.severity.value, group, commands)])
    texts = {"Why": rule.why, "Example": rule.example, "Fix": rule.fix}
    parts = [
        f"# {rule.name}",
        rule.summary,
        facts,
        *(f"## {title}\n\n{capitalize(text)}" for title, text in texts.items()),
    ]
    parts.append(format_acceptance(rule))
    return "\n\n".join(parts) + "\n"


def format_acceptance(rule: object) -> str:
    """Return how to accept the findings of a rule of audit, with the configuration; a pointer for other rules."""
    if "audit" not in rule.commands:
        return "See [severities and exit status](../exit-status.md) for the effect on the exit status."
    return (
        "## Accept a finding\n\nAccept the rule for some targets, with the reason, in "
        f'[the configuration](../configuration.md):\n\n```toml\n[tool.statecli.per-target-ignore."vendor/*.pt"]\n'
        f'rules = ["{rule.name}"]\nreason = "why these files may have it"\n```\n\n'
        "A [baseline](../baseline.md) accepts all present findings."
    )


def slug(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w-]+", "-", title.lower()).strip("-")


# --- schemas and sample models ----------------------------------------------------------------------------------------


def list_schemas() -> Iterator[tuple[str, str]]:
    """Yield the page of each schema, and the list of schemas."""
    from statecli.report.documents.schemas import DOCUMENTS, encode_schema

    for name in DOCUMENTS:
        made_by = "`statecli lock`" if name == "lock" else f"`statecli {name} -f json`"
        head = f"The JSON Schema of {made_by}; `statecli schema {name}` prints it."
        yield f"reference/schemas/{name}.md", f"# Schema of {name}\n\n{head}\n\n{describe_schema(name)}"
        assert encode_schema(name)
    rows = ((f"[{name}]({name}.md)", f"[`statecli {name}`](../commands/{name}.md)") for name in DOCUMENTS)
    head = (
        "Every JSON document names its schema in the key `schema`, such as `statecli.audit/1`. "
        "The number changes if a key is removed or changes its meaning; new keys do not change it. "
        "The schema itself has an address, `$id`, which does not change."
    )
    yield "reference/schemas/index.md", f"# Schemas\n\n{head}\n\n{format_table(('schema', 'command'), rows)}\n"


def describe_schema(name: str) -> str:
    """Return each type of a schema as a table of its keys, and the schema itself."""
    from statecli.report.documents.schemas import encode_schema

    raw = encode_schema(name).decode()
    schema = json.loads(raw)
    parts = []
    for title, kind in schema["$defs"].items():
        about = kind.get("description", "").replace("\n\n", "\n").split("\nAttributes:")[0]
        if "properties" in kind:
            rows = (
                (code_cell(key), code_cell(describe_type(value)), "yes" if key in kind.get("required", ()) else "")
                for key, value in kind["properties"].items()
            )
            body = format_table(("key", "type", "always there"), rows)
        else:
            body = f"Values: {', '.join(code_cell(str(value)) for value in kind.get('enum', ()))}"
        parts.append(f"## {title}\n\n{' '.join(about.split())}\n\n{body}")
    return "\n\n".join(parts) + f"\n\n## The schema itself\n\n```json\n{raw.rstrip()}\n```\n"


def describe_type(value: dict[str, object]) -> str:
    """Return a type of a schema in one line."""
    if "anyOf" in value:
        return " or ".join(describe_type(option) for option in value["anyOf"])
    if "$ref" in value:
        return posixpath.basename(value["$ref"])
    if "enum" in value:
        return " or ".join(json.dumps(option) for option in value["enum"])
    if value.get("type") == "array":
        return f"array of {describe_type(value['items'])}" if value.get("items") else "array"
    return str(value.get("type", "any"))


def list_samples() -> tuple[str, str]:
    """Return the page of the sample models: the docstring and the code of each."""
    import ast

    parts = []
    for path in sorted((ROOT / "sample_models").glob("*.py")):
        text = path.read_text("utf-8")
        first = ast.parse(text).body[0]
        lesson, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
        code = "\n".join(text.splitlines()[first.end_lineno :]).strip()
        about = re.sub(r"(?m)^Try: +(.*(?:\n {8}.*)*)", lambda match: format_lines(match[1]), rest.strip())
        about = re.sub(r"(?m)^Shows: +(.)", lambda match: match[1].upper(), about)
        parts.append(f"## {path.stem}\n\n{lesson}\n\n{re.sub(r'(?m)^ +', '', about)}\n\n```python\n{code}\n```")
    head = (
        "The folder `sample_models` has small models with one mistake each. The model of the same name with `_fixed` "
        "has the remedy. `python sample_models/make_checkpoints.py OUT` writes small checkpoints of each model."
    )
    return SAMPLES_PAGE, f"# Sample models\n\n{head}\n\n" + "\n\n".join(parts) + "\n"


def format_lines(lines: str) -> str:
    """Return command lines as a block."""
    return "```sh\n" + "\n".join(line.strip() for line in lines.splitlines()) + "\n```"
