"""Print figures about the names, sentences and imports of a tree of Python files, for information only.

    python tools/legibility.py statecli

Next to each figure is the range of ten other code bases, counted by the same rules: pip-audit, httpx, fickling,
sqlite-utils, rich, urllib3, pytest, fsspec, jinja2 and similar ones.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

PARTICIPLE_OR_ADVERB = re.compile(
    r"(?:[a-z]+ed|told|held|made|said|shown|found|kept|cut|given|known|left|written|meant|done|gone|laid|grown|sent|lost"
    r"|taken|drawn|bound|built|seen|hidden|broken|apart|beside|alone|within|between|around|below|above|ahead|elsewhere"
    r"|here|there|anew|together)"
)
VERBS = re.compile(
    r"add|append|apply|assert|build|call|cast|check|classify|clear|close|collect|compare|compute|convert|copy"
    r"|count|create|decode|delete|describe|diff|dispatch|download|emit|encode|ensure|escape|exec|explain"
    r"|expand|extract|fetch|filter|find|flush|fold|format|from|generate|get|group|handle|has|hash|index|init"
    r"|insert|is|iter|join|list|load|locate|lock|log|lookup|make|map|match|measure|merge|move|next|normalize"
    r"|parse|partition|pop|prefetch|prepare|print|process|prove|push|put|quote|raise|read|recompute|refresh"
    r"|register|remove|render|report|request|reset|resolve|restrict|run|save|scan|select|send|set|setup|should"
    r"|show|sign|skip|sniff|sort|split|start|stop|suggest|summarize|test|to|truncate|try|unlock|update|upload"
    r"|use|validate|verify|visit|wait|walk|warn|with|write|yield|can|do"
)
VAGUE_VARIABLES = re.compile(r"one|found|told|asked|known|held|made|several")
FILLERS = re.compile(
    r"it|that|those|these|what|which|who|whoever|whatever|one|ones|such|others|nobody|anybody|somebody"
)
OTHERS = {
    "participle or adverb as function name, %": "0-2.1",
    "function names that start with a verb, %": "33-69",
    "vague variables per 1,000 lines": "0-0.5",
    "it/what/that/who among docstring words, %": "1.0-2.5",
    "median function, lines": "4-13",
}


def main(root: Path) -> None:
    """Print the figures of all Python files below `root`."""
    texts = [path.read_text() for path in sorted(root.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [node.name.strip("_") for node in functions if not node.name.startswith("__")]
    lines = sum(text.count("\n") for text in texts)
    words = [word for node in nodes for word in docstring_words(node)]
    figures = {
        "files": len(texts),
        "lines": lines,
        "longest file, lines": max(text.count("\n") for text in texts),
        "median function, lines": statistics.median(node.end_lineno - node.lineno + 1 for node in functions),
        "participle or adverb as function name, %": percent(map(PARTICIPLE_OR_ADVERB.fullmatch, names), names),
        "function names that start with a verb, %": percent(
            (VERBS.fullmatch(name.split("_")[0]) for name in names), names
        ),
        "vague variables per 1,000 lines": round(
            1000 * sum(map(bool, map(VAGUE_VARIABLES.fullmatch, variables(nodes)))) / lines, 1
        ),
        "it/what/that/who among docstring words, %": percent(map(FILLERS.fullmatch, words), words),
        "own imports inside functions": sum(len(own_imports(tree, root)) for tree in trees),
    }
    for name, value in figures.items():
        print(f"{name:45} {value!s:>12}" + (f"    others {OTHERS[name]}" if name in OTHERS else ""))


def docstring_words(node: ast.AST) -> list[str]:
    """Return the lower-case words of the node's docstring."""
    if not isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    return [word.lower() for word in re.findall(r"[A-Za-z']+", ast.get_docstring(node) or "")]


def variables(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the name of each variable that is assigned and of each parameter."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def own_imports(tree: ast.AST, root: Path) -> set[str]:
    """Return the modules of the package below `root` that functions of a file import."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    imports = {node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    names = [(node.module or "", alias.name) for node in imports for alias in node.names]
    own = [(module, name) for module, name in names if module.split(".")[0] == root.name]
    return {f"{module}.{name}" if is_module(root, f"{module}.{name}") else module for module, name in own}


def is_module(root: Path, name: str) -> bool:
    """Return True for the name of a module or package below `root`."""
    path = root.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def percent(flags, of: list) -> float:
    """Return how many of the flags are true, in percent of the length of `of`."""
    return round(100 * sum(map(bool, flags)) / max(1, len(of)), 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
