"""Run `statecli git setup`: set up or remove the drivers of git, in a repository or for all repositories of a user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from statecli.core.errors import UsageError
from statecli.core.version import __version__
from statecli.requests.options import GitSetupOptions
from statecli.requests.outcome import Caller, Outcome
from statecli.storage.checkpoint_names import WEIGHT_BIN_PREFIXES
from statecli.storage.replace_file import replace_file

#: Version of the text. The driver's command line contains it, so that git does not compare texts of two versions.
DRIVER_VERSION = f"{__version__}-blake3-128-norm"
#: Patterns of checkpoints in `.gitattributes`.
PATTERNS = ("*.safetensors", "*.pt", "*.pth", "*.ckpt", *(f"{name}*.bin" for name in WEIGHT_BIN_PREFIXES), "*.pt2")


def run(options: GitSetupOptions, caller: Caller) -> Outcome[list[str]]:  # noqa: ARG001 - every command has the same signature
    """Set up git's drivers for checkpoints, or remove them. The outcome's text describes the changes."""
    lines = (remove if options.remove else set_up)(everywhere=options.everywhere)
    return Outcome(lines, text=lambda _: "".join(f"{line}\n" for line in lines))


def set_up(*, everywhere: bool = False) -> list[str]:
    """Configure the drivers and the patterns of checkpoints in the current repository, or for the user if `everywhere`.

    Returns lines about the changes, and about attributes that override the driver. Existing attributes stay. New
    attributes go to the end, because git uses the last match. Raises UsageError if git or a repository is missing.
    """
    scope = "--global" if everywhere else "--local"
    top = run_git("rev-parse", "--show-toplevel") if not everywhere else ""
    command = _build_command()
    for key, value in (
        # git appends the path, which in the working tree may be `-o.pt`.
        ("diff.statecli.command", f"{command} git external-diff --"),
        ("diff.statecli.textconv", f"{command} git textconv --made-by {DRIVER_VERSION} --"),
        # git writes the cache as a commit: without an identity, git diff would end in "Author identity unknown".
        ("diff.statecli.cachetextconv", "true" if query_git("var", "GIT_COMMITTER_IDENT") else "false"),
        ("diff.statecli.binary", "true"),
        ("difftool.statecli.cmd", f'{command} git difftool -- "$LOCAL" "$REMOTE" "$MERGED"'),
        ("difftool.statecli.trustExitCode", "false"),
    ):
        run_git("config", scope, key, value)
    path = _find_global_attributes() if everywhere else os.path.join(top, ".gitattributes")
    overridden = {} if everywhere else _find_overrides(top)
    added_patterns = _add_patterns(path, overridden)
    location = "your git configuration" if everywhere else ".git/config"
    override_text = "in .git/info/attributes or in the .gitattributes of a folder overrides this setup"
    remaining_overrides = {} if everywhere else _find_overrides(top)
    return [
        f"diff driver and difftool: {location}",
        f"{shorten_path(path)}: {', '.join(added_patterns) if added_patterns else 'nothing to add'}",
        *(
            f"{pattern}: diff={value} {override_text}, so git diff does not show the tensors of these files"
            for pattern, value in remaining_overrides.items()
        ),
        "git diff now shows tables of changed tensors, and git log -p shows a line for each tensor",
    ]


def remove(*, everywhere: bool = False) -> list[str]:
    """Remove everything that `set_up` writes. Return lines about the changes. Raises UsageError as `set_up` does."""
    scope = "--global" if everywhere else "--local"
    top = run_git("rev-parse", "--show-toplevel") if not everywhere else ""
    sections = [section for section in ("diff.statecli", "difftool.statecli") if _has_section(scope, section)]
    for section in sections:
        run_git("config", scope, "--remove-section", section)
    path = _find_global_attributes() if everywhere else os.path.join(top, ".gitattributes")
    removed_patterns = _remove_patterns(path)
    location = "your git configuration" if everywhere else ".git/config"
    return [
        f"{file_name}: " + (f"{', '.join(names)} removed" if names else "nothing to remove")
        for file_name, names in ((location, sections), (shorten_path(path), removed_patterns))
    ]


def _has_section(scope: str, section: str) -> bool:
    return bool(query_git("config", scope, "--get-regexp", rf"^{re.escape(section)}\."))


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file with their line ends, or [] if the file is missing."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _remove_patterns(path: str) -> list[str]:
    """Remove statecli's lines from an attributes file, and delete the file if it is then empty. Return the patterns."""
    lines = _read_lines(path)
    pattern_by_line = {f"{pattern} diff=statecli": pattern for pattern in PATTERNS}
    removed_patterns = [pattern_by_line[line.strip()] for line in lines if line.strip() in pattern_by_line]
    text = "".join(line for line in lines if line.strip() not in pattern_by_line)
    if removed_patterns and not text.strip():
        os.unlink(path)
    elif removed_patterns:
        with replace_file(path) as file:
            file.write(text.encode("utf-8", "surrogateescape"))
    return removed_patterns


def run_git(*words: str, stdin: str = "") -> str:
    """Return the output of a git command. Raises UsageError if git is missing or the status is not 0."""
    process = _call_git(words, stdin)
    if process.returncode:
        message = " ".join(process.stderr.split()) or f"git {words[0]} failed"
        raise UsageError(f"git {' '.join(words[:2])}: {message.removeprefix('fatal: ')}")
    return process.stdout.strip()


def query_git(*words: str) -> str:
    """Return the output of a git command, or "" if its status is not 0. Raises UsageError if git is missing."""
    process = _call_git(words)
    return "" if process.returncode else process.stdout.strip()


def _call_git(words: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - git itself
            # A monitor of files is a program, and another person may have written the settings of the repository.
            ["git", "-c", "core.fsmonitor=false", *words],  # noqa: S607
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError as error:
        raise UsageError("git is not installed, or not on PATH") from error


def _build_command() -> str:
    """Return the command by which git calls statecli: `statecli` if it is on PATH, or else this interpreter.

    The flag keeps the current folder off the interpreter's path, because a json.py of the repository could run.
    """
    from shutil import which

    flag = "-P" if sys.version_info >= (3, 11) else "-I"
    return "statecli" if which("statecli") else f'"{sys.executable}" {flag} -m statecli'


def _find_global_attributes() -> str:
    configured_path = query_git("config", "--global", "core.attributesFile")
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
    path = os.path.expanduser(configured_path or os.path.join(home, "git", "attributes"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _find_overrides(top: str) -> dict[str, str]:
    """Return the patterns for which the attributes choose a driver other than statecli, each with its driver.

    Checks the files in git, and an example name for each pattern.
    """
    names = run_git("-C", top, "ls-files", "-z", "--", *PATTERNS).split("\0")
    names = [*(pattern.replace("*", "x") for pattern in PATTERNS), *filter(None, names)]
    cells = run_git("-C", top, "check-attr", "--stdin", "-z", "diff", stdin="\0".join(names) + "\0").split("\0")
    overrides: dict[str, str] = {}
    for name, value in zip(cells[::3], cells[2::3], strict=False):
        if value != "statecli":
            overrides |= {pattern: value for pattern in PATTERNS if fnmatchcase(os.path.basename(name), pattern)}
    return overrides


def _add_patterns(path: str, overridden: Collection[str]) -> list[str]:
    """Add missing patterns to the file, and move overridden patterns to its end. Return all of these patterns."""
    lines = _read_lines(path)
    existing_patterns = {words[0] for line in lines if (words := line.split()) and "diff=statecli" in words[1:]}
    added_patterns = [pattern for pattern in PATTERNS if pattern not in existing_patterns or pattern in overridden]
    pattern_by_line = {f"{pattern} diff=statecli": pattern for pattern in added_patterns}
    text = "".join(line for line in lines if line.strip() not in pattern_by_line)
    text += "" if not text or text.endswith("\n") else "\n"
    text += "".join(f"{line}\n" for line in pattern_by_line)
    if text == "".join(lines):
        return []
    with replace_file(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    return added_patterns


def shorten_path(path: str) -> str:
    """Return the path relative to the current folder. A path below a hidden entry of the home folder stays absolute."""
    return os.path.relpath(path) if not path.startswith(os.path.expanduser("~/.")) else path
