"""Files of users: line ends, encodings, packages, git, and files not to be edited."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys

import jsonschema
import pytest
import torch

from statecli.commands.fix import run as fix_run
from statecli.commands.verify import run as verify_run
from statecli.core.output import Output

pytest.importorskip("libcst")

NET = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.ones(4)
"""
FIXED = NET.replace("self.t = torch.ones(4)", 'self.register_buffer("t", torch.ones(4), persistent=False)')
LATIN = "# coding: latin-1\n# é\n".encode("latin-1")
UNUSED = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.skip = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A temporary current folder with net.py."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_last_lines_name_the_command_that_writes_the_fixes(desk, statecli, command):
    """The command repeats the user's target and input, quoted for a shell, and the command works."""
    (desk / "net.py").write_text(
        NET.replace("(self)", "(self, n=4)", 1) + "\n    def forward(self, x):\n        return x\n"
    )
    text = statecli(command, "net.py:Net(n=5)", "--input", "2x4", "-f", "table").out
    words = ["fix", "net.py:Net(n=5)", "--input", "2x4", "--write"]
    line = f"write the fixes: statecli {shlex.join(words)}"
    assert line in text.splitlines()[-2]
    assert statecli(*words).code == 0
    assert "write the fixes" not in statecli(command, "net.py:Net(n=5)", "--input", "2x4", "-f", "table").out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (NET.replace("torch.ones(4)", "{'a': [torch.ones(4)], 'b': nn.Linear(2, 2)}"), 1),  # by hand
        (NET.replace("self.t = torch.ones(4)", "self.register_buffer('t', torch.ones(4))"), 0),
    ],
)
def test_command_without_an_effect_is_not_named(desk, statecli, text, code):
    """`statecli fix` has nothing to write there: the fix is in words, or nothing is wrong."""
    (desk / "net.py").write_text(text)
    for command in ("inspect", "verify"):
        assert "write the fixes" not in statecli(command, "net.py:Net", "-f", "table").out
    assert statecli("fix", "net.py:Net", "--write").code == code
    assert (desk / "net.py").read_text() == text


def test_fix_without_write_leaves_the_file_unchanged(desk, statecli):
    """The status is 1, and `git apply` accepts the unified diff. Without an input, a note says which checks did not
    run.
    """
    result = statecli("fix", "net.py:Net")
    assert result.code == 1
    assert "note[fix]: skipped: step, forward (no input given" in result.out
    assert (desk / "net.py").read_text() == NET
    subprocess.run(["git", "apply"], input=result.out.encode(), cwd=desk, check=True)
    assert (desk / "net.py").read_text() == FIXED


def test_write_applies_the_edits(desk, statecli):
    """The status is 0, the file keeps its mode, no other file is left, and a second run has nothing to fix."""
    (desk / "net.py").chmod(0o750)
    result = statecli("fix", "net.py:Net", "--write")
    assert result.code == 0, result.out + result.err
    assert "1 fix written to net.py" in result.out
    assert (desk / "net.py").read_text() == FIXED
    assert stat.S_IMODE((desk / "net.py").stat().st_mode) == 0o750
    assert os.listdir(desk) == ["net.py"]
    second_result = statecli("fix", "net.py:Net")
    assert (second_result.code, "nothing to fix" in second_result.out) == (0, True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (NET.replace("\n", "\r\n").encode(), FIXED.replace("\n", "\r\n").encode()),
        (NET.replace("    ", "\t").encode(), FIXED.replace("    ", "\t").encode()),
        (b"\xef\xbb\xbf" + NET.encode(), b"\xef\xbb\xbf" + FIXED.encode()),
        (LATIN + NET.encode(), LATIN + FIXED.encode()),
        (NET.encode().rstrip(), FIXED.encode().rstrip()),
        (NET.replace("    ", "  ").encode(), FIXED.replace("    ", "  ").encode()),
        (NET.replace("ones(4)", "ones(4)  # π").encode(), FIXED.replace("False)", "False)  # π").encode()),
    ],
    ids=["crlf", "tabs", "bom", "latin-1", "no-newline-at-the-end", "two-spaces", "comment"],
)
def test_bytes_around_an_edit_are_kept(before, after, desk, statecli):
    """Line ends, indentation and encoding stay the same."""
    (desk / "net.py").write_bytes(before)
    assert statecli("fix", "net.py:Net", "--write", "-q").code == 0
    assert (desk / "net.py").read_bytes() == after


def test_a_loop_is_indented_as_the_file(desk, statecli):
    """The loop is indented with tabs, and so is the property."""
    text = NET.replace("torch.ones(4)", "[torch.ones(4)]").replace("    ", "\t")
    (desk / "net.py").write_text(text)
    assert statecli("fix", "net.py:Net", "--write", "-q").code == 0
    fixed_source = (desk / "net.py").read_text()
    assert '\t\t\tself.register_buffer(f"t_{i}", tensor, persistent=False)\n' in fixed_source
    assert "    " not in fixed_source


@pytest.mark.parametrize("target", ["pkg/sub/net.py:Net", "pkg.sub.net:Net"])
def test_relative_imports_work(target, desk, statecli):
    """The edit is in the file of the base class, which the named file imports from its package."""
    (desk / "pkg" / "sub").mkdir(parents=True)
    for name in ("pkg", "pkg/sub"):
        (desk / name / "__init__.py").touch()
    (desk / "pkg" / "base.py").write_text(NET)
    (desk / "pkg" / "sub" / "net.py").write_text("from ..base import Net as Base\n\n\nclass Net(Base):\n    pass\n")
    assert statecli("fix", target, "--write").code == 0
    assert (desk / "pkg" / "base.py").read_text() == FIXED


def test_imports_from_the_same_folder_work(desk, statecli, monkeypatch):
    """Imports work from another working folder too."""
    folder, other = desk / "models", desk / "elsewhere"
    folder.mkdir()
    other.mkdir()
    (folder / "layers.py").write_text(NET)
    (folder / "model.py").write_text("from layers import Net as Base\n\n\nclass Net(Base):\n    pass\n")
    monkeypatch.chdir(other)
    result = statecli("fix", f"{folder / 'model.py'}:Net", "--write")
    assert result.code == 0, result.out + result.err
    assert (folder / "layers.py").read_text() == FIXED


def test_a_file_in_another_folder_is_named_as_typed(desk, statecli, monkeypatch, tmp_path_factory):
    """The diff does not show the path of the temporary copy."""
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    result = statecli("fix", f"{desk / 'net.py'}:Net")
    assert result.code == 1
    assert f"--- {desk / 'net.py'}\n" in result.out
    assert "statecli-fix-" not in result.out


def test_defect_without_a_tensor_is_described_by_its_problem(desk, statecli):
    """A method `to` that returns None is no tensor. The variable of a file is reported once, with its line."""
    text = NET.replace("self.t = torch.ones(4)", "self.p = nn.Parameter(torch.ones(4))")
    text = text.replace("class", "GT = torch.ones(4)\n\n\nclass", 1)
    text += "\n    def to(self, *args):\n        super().to(*args)\n"
    (desk / "net.py").write_text(f"{text}\n    def forward(self, x):\n        return self.p * GT\n")
    result = statecli("fix", "net.py:Net", "--input", "4", "-f", "json")
    assert [(edit["message"], edit["line"]) for edit in result.json["edits"]] == [
        ("GT of net.py: on cpu while `p` is on cuda:0, in mul at net.py:17", 5),
        ("Net.to returns None, so model = model.to(...) loses the model", 13),
    ]
    assert "warning[not-fixed]: Net.to returns None" in statecli("fix", "net.py:Net", "--input", "4").out


def test_an_installed_class_is_not_edited(statecli):
    """The message is a single line, and the status is 2."""
    result = statecli("fix", "torch.nn:Linear(2, 2)")
    assert result.code == 2
    assert result.err == (
        "statecli: torch.nn:Linear(2, 2): the current folder has no module torch.nn; statecli fix changes only your "
        "own files; name a class such as net.py:Net\n"
    )


@pytest.mark.parametrize("target", ["model.pt", "net.py", "none.py:Net", "net.py:None", "net.py:Net(4)"])
def test_wrong_target_is_an_error_line(target, desk, statecli):
    """The status is 2, and standard output is empty."""
    result = statecli("fix", target)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("statecli: ")
    assert "Traceback" not in result.err


def test_missing_libcst_is_an_error_with_the_install_command(desk, statecli, monkeypatch):
    """The message names the extra `fix`."""
    monkeypatch.setitem(sys.modules, "libcst", None)
    result = statecli("fix", "net.py:Net")
    assert (result.code, result.err) == (
        2,
        "statecli: statecli fix needs the package libcst: pip install 'torch-statecli[fix]'\n",
    )


def test_a_change_that_is_not_committed_is_noted(desk, statecli):
    """As with ruff, the edit is still made."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert "git does not track this file" in statecli("fix", "net.py:Net").out
    subprocess.run([*git, "add", "net.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "net"], check=True)
    assert "uncommitted" not in statecli("fix", "net.py:Net").out
    with open("net.py", "a") as file:
        file.write("# more\n")
    result = statecli("fix", "net.py:Net", "--write")
    assert "net.py: has uncommitted changes" in result.out
    assert result.code == 0


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX: scripts without a suffix")
def test_no_program_of_the_repository_runs_for_the_note(desk, statecli):
    """Another person may have written the settings: a monitor of files, a hook and a filter are programs."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "net.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "net"], check=True)
    for name in ("monitor", ".git/hooks/post-index-change"):
        (desk / name).parent.mkdir(exist_ok=True)
        (desk / name).write_text(f"#!/bin/sh\ntouch {shlex.quote(str(desk / 'MARK'))}\ncat\n")
        (desk / name).chmod(0o755)
    for key, program in (("core.fsmonitor", "monitor"), ("filter.x.clean", "monitor")):
        subprocess.run(["git", "config", key, str(desk / program)], check=True)
    for attributes in ("", "net.py filter=x\n"):
        (desk / ".gitattributes").write_text(attributes)
        with open("net.py", "a") as file:
            file.write("# more\n")
        assert ("has uncommitted changes" in statecli("fix", "net.py:Net").out) is (not attributes)
        assert not (desk / "MARK").exists()


def test_the_document_has_the_proofs_of_each_edit(desk, statecli):
    """File, line, before, after, rule, and the verdicts before and after. The document fits its schema before and after
    the edits are written.
    """
    schema = statecli("schema", "fix").json
    document = statecli("fix", "net.py:Net", "-f", "json").json
    jsonschema.validate(document, schema)
    (edit,) = document["edits"]
    assert (edit["file"], edit["line"], edit["rule"], edit["names"]) == ("net.py", 8, "unregistered-tensor", ["t"])
    assert edit["before"] == "        self.t = torch.ones(4)"
    assert edit["after"] == '        self.register_buffer("t", torch.ones(4), persistent=False)'
    assert {"proof": "move", "before": "failed", "after": "passed"} in edit["proofs"]
    assert edit["kept"] is True
    jsonschema.validate(statecli("fix", "net.py:Net", "-f", "json", "--write").json, schema)


def test_every_output_names_the_edit(desk, statecli, monkeypatch):
    """Every output names the edited file and the tensor, and the status is 1."""
    (desk / "net.py").write_text(NET.replace("self.t", "self.running_scale"))
    fixes = fix_run.run(fix_run.Request(verify_run.Request(target="net.py:Net")))
    monkeypatch.setattr(fix_run, "run", lambda _: fixes)
    for output in Output:
        result = statecli("fix", "net.py:Net", "-f", output.value)
        assert (result.code, result.err) == (1, ""), output
        assert "net.py" in result.out, output
        assert "running_scale" in result.out, output


def test_a_function_that_builds_the_model_may_be_named(desk, statecli):
    """A factory function is accepted as in verify."""
    with open("net.py", "a") as file:
        file.write("\n\ndef make():\n    return nn.Sequential(Net())\n")
    assert statecli("fix", "net.py:make", "--write").code == 0
    assert (desk / "net.py").read_text().startswith(FIXED)


def test_code_that_can_be_imported_once_only_is_refused(desk, statecli):
    """The output names the reason, and the file is unchanged."""
    text = NET + "\nassert not hasattr(torch, '_seen')\ntorch._seen = True\n"
    (desk / "net.py").write_text(text)
    try:
        result = statecli("fix", "net.py:Net", "--write")
    finally:
        vars(torch).pop("_seen", None)
    assert result.code == 1
    assert "no fix: the fixed class cannot be checked: net.py:Net: importing it raised AssertionError" in result.out
    assert (desk / "net.py").read_text() == text


def test_an_unproved_edit_leaves_the_file(desk, statecli):
    """Even with --write, the status is 1, the output names the reason, and the file is unchanged."""
    (desk / "net.py").write_text(UNUSED)
    result = statecli("fix", "net.py:Net", "--input", "2x4", "--write")
    assert result.code == 1
    assert "  no fix: statecli has no fix for the rule no-gradient\n" in result.out
    assert (desk / "net.py").read_text() == UNUSED


def test_a_file_that_changes_meanwhile_is_not_written(desk, statecli):
    """An editor saves the file while the edits are verified: the status is 2, and the saved text stays."""
    text = NET + "\n    def forward(self, x):\n        open('../net.py', 'a').close()\n        return x * self.t\n"
    saved = text + "# saved\n"
    text = text.replace("open('../net.py', 'a').close()", f"open({str(desk / 'net.py')!r}, 'w').write(SAVED)")
    text = text.replace("\n\n\nclass", f"\n\nSAVED = {saved!r}\n\n\nclass")
    (desk / "net.py").write_text(text)
    result = statecli("fix", "net.py:Net", "--input", "4", "--write")
    assert (result.code, (desk / "net.py").read_text()) == (2, saved)


def test_fix_edits_only_the_named_class(desk, statecli):
    """The other class keeps its lines."""
    (desk / "net.py").write_text(NET + NET.partition("\n\n\n")[2].join(("\n\n", "")).replace("Net", "Other"))
    assert statecli("fix", "net.py:Other", "--write").code == 0
    assert (desk / "net.py").read_text().count("self.t = torch.ones(4)") == 1


def test_model_that_ends_the_process_leaves_the_file(desk, statecli):
    """A forward with os._exit is an error of the model, not an edit; the checks without a forward find the edit."""
    text = NET + "\n    def forward(self, x):\n        import os\n        os._exit(0)\n"
    (desk / "net.py").write_text(text)
    result = statecli("fix", "net.py:Net", "--input", "2x4")
    assert (desk / "net.py").read_text() == text
    assert result.code == 1
    assert "1 fix found; add --write to write the fix\n" in result.out
    assert "net.py:Net: inconclusive: forward (calling the model raised SystemExit: 0 (net.py:12))\n" in result.err


def test_inconclusive_proof_exits_with_2(desk, statecli):
    """An input of a wrong shape is status 2, with the path of the user's file and the shape to type."""
    (desk / "net.py").write_text(UNUSED)
    result = statecli("fix", "net.py:Net", "--input", "2x3")
    assert result.code == 2
    assert "nothing found to fix, but not all checks have a result" in result.out
    assert "net.py:Net: inconclusive: step (" in result.err
    table = statecli("fix", "net.py:Net", "--input", "2x3", "-f", "table").out
    assert table.index("note: inconclusive: step (") < table.index(": exit status 2")
    assert "(net.py:12); the first layer takes 4 values in the last dimension: --input 2x4" in result.err
    assert "statecli-fix-" not in result.err + result.out
    document = statecli("fix", "net.py:Net", "--input", "2x3", "-f", "json").json
    assert [line.partition(" (")[0] for line in document["inconclusive"]] == [
        "inconclusive: step",
        "inconclusive: forward",
    ]


def test_edit_that_completes_a_proof_exits_with_0(desk, statecli):
    """Without the edit, training calls backward twice through the same graph; with it, every proof has a result."""
    text = NET.replace("torch.ones(4)", "self.w.norm(dim=1, keepdim=True)  # row norms")
    text = text.replace("        self.t", "        self.w = nn.Parameter(torch.randn(4, 4))\n        self.t")
    (desk / "net.py").write_text(text + "\n    def forward(self, x):\n        return x @ (self.w / self.t)\n")
    result = statecli("fix", "net.py:Net", "--input", "2x4", "--write")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("note[") == 1
    assert statecli("verify", "net.py:Net", "--input", "2x4").code == 0


def test_same_tensor_of_repeated_layers_is_shown_by_its_name(desk, statecli):
    """Two tensors of each block are two defects, and the output names the tensor of each."""
    lines = [
        "import torch\nfrom torch import nn\n\n",
        "class Block(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.mask = torch.ones(2)",
        "        self.rope = torch.ones(3)\n\n",
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.blocks = nn.ModuleList([Block() for _ in range(4)])\n",
    ]
    (desk / "net.py").write_text("\n".join(lines))
    output = statecli("fix", "net.py:Net", "-f", "table").out
    assert "blocks.{0..3}.mask (4 tensors): " in output
    assert "blocks.{0..3}.rope (4 tensors): " in output


def test_many_tensors_of_a_list_are_shown_as_one_name(desk, statecli):
    """The output shows `layers.*` and the number of tensors, as in verify, also for older checkpoints."""
    lines = [
        "from torch import nn\n\n",
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.layers = [nn.Linear(2, 2) for _ in range(12)]\n",
    ]
    (desk / "net.py").write_text("\n".join(lines))
    output = " ".join(statecli("fix", "net.py:Net", "-f", "table").out.split())
    assert "warning[proposed-fix]: layers.* (24 tensors): " in output
    assert "older checkpoints lack layers.* (24 tensors); load" in output
    (desk / "net.py").write_text((desk / "net.py").read_text().replace("range(12)", "range(1)"))
    assert "layers[0].weight and layers[0].bias" in statecli("fix", "net.py:Net", "-f", "table").out.replace(
        ",", " and"
    )
