"""Completion: commands, options and values of the table, names in files, in each shell; nothing is run or imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from statecli.cli import completion, help_table
from statecli.cli.completion import CandidateKind, complete
from statecli.core.output import Output
from statecli.report.documents.schemas import DOCUMENTS
from statecli.requests.options import COMMANDS, Shell
from statecli.requests.parameters import parameters_of
from statecli.rules.dictionary import DICTIONARY, RULES


def list_candidates(line):
    """Return the words offered at the end of a command line."""
    *words, current = line.split(" ")[1:]
    return [word for word, _ in complete(words, current).candidates]


@pytest.fixture
def hostile_folder(tmp_path, monkeypatch):
    """A folder with a checkpoint of several sections and files of classes. The files must not be imported."""
    weights = {"weight": torch.ones(2)}
    hostile = {"$(touch ran)": weights, "two words": weights, ";ls": weights, "'": weights, "\x1b[31m": weights}
    torch.save({"model": weights, "ema": {"shadow": weights}} | hostile, tmp_path / "train.ckpt")
    (tmp_path / "net.py").write_text(
        "open('ran', 'w')\nfrom torch import nn\nfrom other import Base\n"
        "class Net(nn.Module): ...\nclass Wide(Net): ...\nclass Derived(Base): ...\nclass Config: ...\n"
        "def make(): ...\ndef _hidden(): ...\ndef needs(size): ...\ndef sized(size=2): ...\n"
    )
    (tmp_path / "derived.py").write_text("from other import Base\nclass Derived(Base): ...\nclass Config: ...\n")
    (tmp_path / "broken.py").write_text("class Net(nn.Module:\n")
    (tmp_path / "pkg").mkdir()
    shutil.copy(tmp_path / "derived.py", tmp_path / "pkg" / "mod.py")
    for name in ("epoch=1.ckpt", "my file.pt"):
        shutil.copy(tmp_path / "train.ckpt", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "ran").exists()


# --- from the table ---------------------------------------------------------------------------------------------------


def test_every_command_is_offered():
    """Commands of statecli and of git are offered, also after `help`."""
    commands = list(dict.fromkeys(name.split(" ")[0] for name in COMMANDS))
    assert list_candidates("statecli ") == list_candidates("statecli help ") == [*commands, "help", "version"]
    assert (
        list_candidates("statecli git ")
        == list_candidates("statecli help git ")
        == ["setup", "textconv", "external-diff", "difftool"]
    )
    assert list_candidates("statecli co") == ["config", "completion"]
    assert list_candidates("statecli -") == ["--version", "--help"]
    for line in ("statecli version ", "statecli nope ", "statecli git nope ", "statecli help diff "):
        assert list_candidates(line) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_offered(command):
    """The option is offered with its help; hidden options and old spellings are not offered."""
    completed = complete(command.split(" "), "--")
    listed = [parameter for parameter in parameters_of(COMMANDS[command]) if not parameter.hidden and parameter.flags]
    assert completed.kind is CandidateKind.WORDS
    assert list(completed.candidates) == [
        *((parameter.flags[0], parameter.help) for parameter in listed),
        ("--help", help_table.HELP_OPTION[1]),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_choice_of_an_option_is_offered(command):
    """The choices are offered after each spelling of the option, and after its equals sign."""
    for parameter in parameters_of(COMMANDS[command]):
        for flag in parameter.spellings if parameter.choices else ():
            assert list_candidates(f"statecli {command} {flag} ") == list(parameter.choices)
            if flag.startswith("--"):
                assert list_candidates(f"statecli {command} {flag}=") == [
                    f"{flag}={choice}" for choice in parameter.choices
                ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("statecli inspect -f ma", ["markdown"]),
        ("statecli inspect --to ", ["cuda", "cpu", "meta"]),
        ("statecli inspect --to=m", ["--to=meta"]),
        ("statecli verify --device f", ["fake-cuda"]),
        ("statecli verify --optimizer adam", ["adam", "adamw"]),
        ("statecli diff --executor ", ["threads", "processes", "dask:", "mpi", "ray"]),
        ("statecli diff --ignore d", ["dtype", "device"]),
        ("statecli audit --quiet --qu", []),
        ("statecli audit --select nan --sel", ["--select"]),
        ("statecli audit --color never --col", []),
        ("statecli inspect a.pt --atol ", []),
        ("statecli diff --atol ", []),
        ("statecli inspect -- --", []),
        ("statecli schema ", [*DOCUMENTS]),
        ("statecli schema inspect ", []),
        ("statecli completion ", ["bash", "zsh", "fish", "powershell"]),
        ("statecli config ", []),
        ("statecli rules nan", ["nan"]),
        ("statecli audit --model a", ["auto"]),
    ],
)
def test_values_are_offered(line, words):
    """The values are those of the option at the cursor."""
    assert list_candidates(line) == words


def test_each_command_offers_the_rules_that_it_accepts(statecli):
    """`audit` offers its own rules, `inspect` and `verify` the rules that they report, `rules` all rules."""
    rule_names = {rule.name for rule in RULES}
    assert set(list_candidates("statecli audit --select ")) == rule_names | {rule.group for rule in RULES}
    assert set(list_candidates("statecli audit --ignore ")) == rule_names | {rule.group for rule in RULES}
    assert set(list_candidates("statecli rules ")) == set(DICTIONARY)
    for command in ("inspect", "verify"):
        names = {rule.name for rule in DICTIONARY.values() if command in rule.commands}
        assert names < set(list_candidates(f"statecli {command} --ignore "))
    for name in list_candidates("statecli inspect --ignore non"):
        assert "unknown rule" not in statecli("inspect", "nope.pt", "--ignore", name).err


def test_executors_that_are_offered_exist():
    """Each form."""
    from statecli.workers import executors

    for name in list_candidates("statecli diff --executor "):
        executors.check_executor(f"{name}tcp://127.0.0.1:1" if name.endswith(":") else name, jobs=0)


@pytest.mark.parametrize(
    ("line", "kind", "start"),
    [
        ("statecli inspect ", CandidateKind.FILES, 0),
        ("statecli inspect mod", CandidateKind.FILES, 0),
        ("statecli diff a.pt ", CandidateKind.FILES, 0),
        ("statecli diff a.pt b.pt ", CandidateKind.WORDS, 0),
        ("statecli diff --atol 1 a.pt ", CandidateKind.FILES, 0),
        ("statecli audit a.pt b.pt ", CandidateKind.FILES, 0),
        ("statecli inspect -- --", CandidateKind.FILES, 0),
        ("statecli inspect -o ", CandidateKind.FILES, 0),
        ("statecli inspect --output=", CandidateKind.FILES, 9),
        ("statecli inspect --report ", CandidateKind.STEMS, 0),
        ("statecli inspect --report json=", CandidateKind.FILES, 5),
        ("statecli inspect --report=json=a", CandidateKind.FILES, 14),
        ("statecli merge 1.part ", CandidateKind.FILES, 0),
        ("statecli verify --input-from ", CandidateKind.FILES, 0),
        ("statecli git textconv ", CandidateKind.FILES, 0),
        ("statecli diff --executor da", CandidateKind.STEMS, 0),
        ("statecli inspect s3://bucket/a", CandidateKind.FILES, 0),
    ],
)
def test_files_are_left_to_the_shell(line, kind, start):
    """The name of a file starts at the given character; a word that continues after an equals sign gets no space."""
    *words, current = line.split(" ")[1:]
    completed = complete(words, current)
    assert (completed.kind, completed.file_start) == (kind, start)


def test_every_kind_of_value_is_offered_something_or_known_to_be_free():
    """A new word for a value in the table is completed, or is listed here as free text of the user."""
    parameters = [parameter for options in COMMANDS.values() for parameter in parameters_of(options)]
    uncompleted = {
        parameter.metavar
        for parameter in parameters
        if not (parameter.is_flag or parameter.choices or parameter.suggestions or parameter.names)
    }
    assert uncompleted == {
        "",
        "ARGUMENT",
        "GLOB",
        "I/N",
        "N",
        "SECONDS",
        "SHAPE",
        "TEXT",
        "URL",
        "REGEX=REPLACEMENT",
        "[NAME]",
    }


def test_report_formats_are_offered():
    """Each with its equals sign."""
    assert list_candidates("statecli audit --report ") == [f"{output.value}=" for output in Output]


# --- from files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("statecli inspect net.py:", ["net.py:Net", "net.py:Wide"]),
        ("statecli inspect net.py", ["net.py:Net", "net.py:Wide"]),
        ("statecli inspect ./net.py:W", ["./net.py:Wide"]),
        ("statecli diff a.pt net.py:N", ["net.py:Net"]),
        ("statecli audit --model net.py:N", ["net.py:Net"]),
        ("statecli audit --model=net.py:N", ["--model=net.py:Net"]),
        ("statecli inspect derived.py:", ["derived.py:Derived"]),
        ("statecli inspect pkg.mod:", ["pkg.mod:Derived"]),
        ("statecli inspect broken.py:", []),
        ("statecli inspect none.py:", []),
        ("statecli verify --input-from net.py:", ["net.py:make", "net.py:sized"]),
        ("statecli verify --inputs net.py:m", ["net.py:make"]),
    ],
)
def test_classes_and_functions_of_a_python_file_are_offered(hostile_folder, line, words):
    """Module classes are found in the syntax tree; without them, classes with a base; for inputs, functions."""
    assert list_candidates(line) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("statecli inspect train.ckpt#", ["train.ckpt#model", "train.ckpt#ema", "train.ckpt#ema.shadow"]),
        ("statecli diff a.pt train.ckpt#e", ["train.ckpt#ema", "train.ckpt#ema.shadow"]),
        ("statecli inspect --model x.py:N train.ckpt#m", ["train.ckpt#model"]),
        ("statecli inspect none.ckpt#", []),
    ],
)
def test_sections_of_a_checkpoint_are_offered(hostile_folder, line, words):
    """A name is left out if a shell would interpret it, because names come from the file."""
    assert list_candidates(line) == words


# --- answers to the scripts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "current", "inserted"),
    [
        (["inspect"], "--tre", ["--tree"]),
        (["inspect", "--to", "="], "me", ["meta"]),
        (["inspect", "--to"], "=", ["cuda", "cpu", "meta"]),
        (["inspect", "net.py"], ":", ["Net", "Wide"]),
        (["inspect", "net.py", ":"], "W", ["Wide"]),
        (["inspect"], "net.py:W", ["net.py:Wide"]),
        (["inspect"], '"net.py:W', ['"net.py:Wide']),
        (["inspect"], "my\\ file.pt#e", ["my\\ file.pt#ema", "my\\ file.pt#ema.shadow"]),
        (["inspect", "epoch"], "=", ["1.ckpt"]),
        (["inspect", "epoch", "="], "1", ["1.ckpt"]),
        (["inspect", "--output", "=", "epoch", "="], "1", ["1.ckpt"]),
        (["inspect", "--executor", "dask", ":"], "", []),
    ],
)
def test_bash_candidates_replace_only_the_last_piece(hostile_folder, words, current, inserted):
    """Bash splits the words at `:` and `=`, and replaces the last piece as typed."""
    answer = completion._format_answer("bash", current, words)
    assert [line.split("\t")[0] for line in answer.splitlines()[2:]] == inserted


def test_the_other_shells_get_whole_words(hostile_folder):
    """The words have no quotes, because the shells add quotes."""
    for shell in ("zsh", "fish", "powershell"):
        answer = completion._format_answer(shell, "--to=me", ["inspect"])
        assert answer == "words\n5\n--to=meta\t\n"
        answer = completion._format_answer(shell, "my\\ file.pt#model", ["inspect"])
        assert answer == "words\n0\nmy file.pt#model\t\n"


def test_a_script_is_printed_for_each_shell(statecli):
    """Each shell of the table has a script; the error for another shell names the possible shells."""
    for shell in Shell:
        result = statecli("completion", shell.value)
        assert (result.code, result.err) == (0, "")
        assert f"`statecli completion {shell.value}`" in result.out
        assert f"__complete {shell.value} " in result.out
    wrong = statecli("completion", "tcsh")
    assert wrong.code == 2
    assert "must be bash, zsh, fish or powershell" in wrong.err


# --- in processes -----------------------------------------------------------------------------------------------------


ASK = """
import json, sys
before = set(sys.modules)
from statecli.__main__ import command
command()
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


def complete_and_list_modules(*arguments):
    """Return the answer to the words, and the imported modules."""
    result = subprocess.run(
        [sys.executable, "-c", ASK, "__complete", *arguments], capture_output=True, text=True, check=True
    )
    return result.stdout, set(json.loads(result.stderr))


def test_completing_imports_the_table_and_no_more(hostile_folder):
    """Readers, renderers and rules are not imported, because the user waits for the imports at each Tab."""
    text, modules = complete_and_list_modules("zsh", "=--t", "inspect")
    assert "--tree\t" in text
    heavy = {"typer", "click", "rich", "jinja2", "torch", "numpy", "pickle", "pydantic", "asyncio", "urllib3", "fsspec"}
    assert not {module.split(".")[0] for module in modules} & heavy
    rooms = {".".join(module.split(".")[:2]) for module in modules if module.startswith("statecli.")}
    assert rooms.isdisjoint({"statecli.formats", "statecli.render", "statecli.report", "statecli.rules"})


@pytest.mark.parametrize("arguments", [("=net.py:", "inspect"), ("=train.ckpt#", "inspect"), ("=", "rules")])
def test_names_from_files_and_rules_need_no_torch(hostile_folder, arguments):
    """Completion imports neither torch nor numpy or rich."""
    text, modules = complete_and_list_modules("zsh", *arguments)
    assert len(text.splitlines()) > 3
    assert not {module.split(".")[0] for module in modules} & {"typer", "torch", "numpy", "rich"}


@pytest.mark.parametrize(
    "arguments",
    [[], ["zsh"], ["tcsh", "=", "inspect"], ["zsh", "=\udce4#", "inspect"], ["zsh", "=old.py:", "inspect"]],
)
def test_invalid_completion_request_prints_nothing_on_stderr(hostile_folder, arguments):
    """A prompt must not show an error, nor Python's warning about an invalid escape."""
    (hostile_folder / "old.py").write_text("class Net(nn.Module):\n    pattern = '\\d'\n")
    result = subprocess.run(
        [sys.executable, "-m", "statecli", "__complete", *arguments], capture_output=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.fixture
def program(tmp_path_factory):
    """A folder with the command `statecli`, as after an installation."""
    folder = tmp_path_factory.mktemp("bin")
    path = folder / "statecli"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m statecli "$@"\n')
    path.chmod(0o755)
    return folder


def run_shell(program, argv):
    """Return the output of a shell that finds this statecli."""
    environment = os.environ | {"PATH": f"{program}{os.pathsep}{os.environ['PATH']}", "HOME": str(program)}
    process = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(hostile_folder, program):
    """The function of the script gets the words as Bash splits them."""
    script = """
source <(statecli completion bash)
complete -p statecli
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _statecli statecli; echo "${COMPREPLY[*]}"; }
ask statecli insp
ask statecli inspect --tre
ask statecli inspect net.py : N
ask statecli inspect 'train.ckpt#ema.'
ask statecli inspect --to =
ask statecli inspect 'my\\ file.pt#mo'
ask statecli inspect my
"""
    assert run_shell(program, ["bash", "--norc", "-c", script]) == [
        "complete -o default -F _statecli statecli",
        *("inspect", "--tree", "Net", "train.ckpt#ema.shadow", "cuda cpu meta", "my\\ file.pt#model", ""),
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(hostile_folder, program):
    """Fish completes as at a prompt."""
    lines = (
        "statecli insp",
        "statecli inspect net.py:N",
        "statecli inspect --to=me",
        "statecli inspect my",
        "statecli inspect --output=my",
        "statecli inspect --report json=my",
        "statecli inspect train.ckpt#mo",
    )
    script = "source (statecli completion fish | psub)\n" + "".join(f"complete -C '{line}'\n" for line in lines)
    actual = [line.split("\t")[0] for line in run_shell(program, ["fish", "--no-config", "-c", script])]
    assert actual == [
        *("inspect", "net.py:Net", "--to=meta", "my file.pt", "--output=my file.pt", "json=my file.pt"),
        "train.ckpt#model",
    ]


ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D'
zpty -w shell 'source <(statecli completion zsh); say() { print -r -- "<$BUFFER>" > $OUT; zle kill-whole-line }'
zpty -w shell "zle -N say; bindkey '^[q' say; print ready > $OUT"
until [[ -s $OUT ]]; do sleep 0.05; done
for line in "$@"; do
    rm $OUT
    zpty -w -n shell "$line"$'\t'$'\x1bq'
    until [[ -s $OUT ]]; do sleep 0.05; done
    cat $OUT
done
zpty -d shell
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(hostile_folder, program, monkeypatch):
    """Zsh completes at a prompt in a terminal of its own."""
    monkeypatch.setenv("OUT", str(program / "out"))
    typed = {
        "statecli insp": "statecli inspect ",
        "statecli inspect net.py:N": "statecli inspect net.py:Net ",
        "statecli inspect --to=me": "statecli inspect --to=meta ",
        "statecli inspect my": "statecli inspect my\\ file.pt ",
        "statecli inspect --output=my": "statecli inspect --output=my\\ file.pt ",
        "statecli inspect train.ckpt#mo": "statecli inspect train.ckpt\\#model ",
        "statecli inspect --report sar": "statecli inspect --report sarif=",
    }
    assert run_shell(program, ["zsh", "-f", "-c", ZSH, "zsh", *typed]) == [f"<{text}>" for text in typed.values()]
