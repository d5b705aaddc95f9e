"""The diff driver and the difftool, with git itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from statecli.cli import parser
from statecli.core.errors import UsageError
from statecli.requests import git_setup, git_textconv
from statecli.requests.run import run
from statecli.storage import checkpoint_names

from .forked_python import write_command

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A new repository with a home of its own, in which `statecli` is run by this interpreter."""
    bin = tmp_path / "bin"
    bin.mkdir()
    write_command(bin / "statecli", "-m", "statecli")
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "statecli")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "statecli@localhost")
    monkeypatch.chdir(folder)
    call("git", "init", "-q", ".")
    return folder


def call(*words):
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def commit(message="one"):
    call("git", "add", "-A")
    call("git", "commit", "-qm", message)


def test_the_lines_name_the_tensor_that_changed(repository):
    """The lines of `git log -p` and `git diff --no-ext-diff`, which git caches, name no unchanged tensor."""
    weights = {"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)}
    save_file(weights, "m.safetensors")
    call("statecli", "git", "setup")
    commit()
    save_file(weights | {"fc.bias": torch.ones(2)}, "m.safetensors")
    output = call("git", "diff", "--no-ext-diff")
    changed = [line for line in output.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert [line.split()[0] for line in changed] == ["-fc.bias", "+fc.bias"]
    assert "float32 [2]" in changed[0]


def test_the_log_of_a_pickled_checkpoint_and_its_conversion(repository):
    """The lines are the same in each format: a conversion shows no other digest."""
    torch.save({"w": torch.ones(3)}, "m.pt")
    save_file({"w": torch.ones(3)}, "m.safetensors")
    assert git_textconv.convert_to_text("m.pt") == git_textconv.convert_to_text("m.safetensors")
    call("statecli", "git", "setup")
    commit()
    assert "+w float32 [3]" in call("git", "log", "-p")


def test_the_text_is_the_outcome_of_the_command(statecli, in_tmp_path):
    """The command checks its options as the others do, and every error is a line with status 0."""
    torch.save({"w": torch.ones(2)}, "m.pt")
    lines = run(parser.parse(["git", "textconv", "--made-by", "1", "m.pt"])).result
    result = statecli("git", "textconv", "m.pt")
    assert (result.code, result.out.splitlines()) == (0, lines)
    empty = statecli("git", "textconv", "")
    assert empty.code == 0
    assert "FILE: is empty; give a value; fix the error, then" in empty.out


def test_driver_exits_with_0_for_any_file(repository):
    """git diff aborts if the driver exits with another status."""
    contents = (b"", b"not a checkpoint", b"PK\x03\x04 broken", b"\x80\x02cos\nsystem\n.")
    for number in range(len(contents)):
        torch.save({"w": torch.ones(3)}, f"m{number}.pt")
    call("statecli", "git", "setup")
    commit()
    for number, content in enumerate(contents):
        (repository / f"m{number}.pt").write_bytes(content)
    assert call("git", "diff", "--no-ext-diff").count("+cannot be read: ") == len(contents)
    lines = call("git", "diff").splitlines()
    assert [line for line in lines if line.startswith("changed: ")] == [f"changed: m{n}.pt" for n in range(4)]


def test_two_unreadable_files_with_different_bytes_differ(repository):
    """A hostile .gitattributes may also give a text to the driver: an edit of code is not hidden."""
    (repository / "a.py").write_text("x = 1\n")
    (repository / "m.pt").write_bytes(b"PK\x03\x04 broken")
    call("statecli", "git", "setup")
    with (repository / ".gitattributes").open("a") as file:
        file.write("*.py diff=statecli\n")
    commit()
    (repository / "a.py").write_text("x = 2\n")
    (repository / "m.pt").write_bytes(b"PK\x03\x04 Broken")
    for name in ("a.py", "m.pt"):
        assert call("git", "diff", "--no-ext-diff", name).count("cannot be read: ") == 2


def test_git_diff_works_with_any_file_name(repository):
    """git gives the driver the name of the file in the working tree."""
    names = ("-o.pt", "--output=x.pt", "--made-by=x.pt", "--.pt", "-#x.pt", "a#b.pt", "it's $(touch x).pt")
    for name in names:
        torch.save({"w": torch.zeros(3)}, f"./{name}")
    call("statecli", "git", "setup")
    commit()
    for name in names:
        torch.save({"w": torch.ones(3)}, f"./{name}")
    assert call("git", "diff", "--no-ext-diff").count("+w float32 [3]") == len(names)
    for words in (("diff",), ("difftool", "--no-prompt", "-t", "statecli")):
        output = call("git", *words)
        assert output.startswith("changed: ")
        assert output.count("changed: ") == output.count("1 of 1 parameters changed") == len(names)


def test_driver_has_a_line_for_code_that_loading_would_run(repository):
    """The files have the same tensors, and loading one of the two runs a shell."""
    torch.save({"w": torch.ones(3)}, "m.pt")
    with zipfile.ZipFile("m.pt") as source, zipfile.ZipFile("n.pt", "w") as copy:
        for name in source.namelist():
            data = source.read(name)
            harm = b"\x80\x02cposix\nsystem\n(S'true'\ntR0"
            copy.writestr(name, harm + data[2:] if name.endswith("data.pkl") else data)
    assert set(git_textconv.convert_to_text("n.pt")) - set(git_textconv.convert_to_text("m.pt")) == {
        "! imports posix.system"
    }


def test_equal_settings_of_different_types_have_different_lines(repository):
    """A number and its text are different settings."""
    lines = []
    for value in (1, "1", True, "True"):
        torch.save({"w": torch.ones(3), "a": value}, "m.pt")
        lines += list(git_textconv.convert_to_text("m.pt"))[1:]
    assert len(set(lines)) == 4


def test_a_checkpoint_with_the_words_of_a_pointer_is_a_checkpoint(repository):
    """A small file may have any text in its metadata; its tensors are shown all the same."""
    conversions = []
    for value in (0.0, 1.0):
        save_file({"w": torch.full((3,), value)}, "m.safetensors", metadata={"words": f"outs: md5: {'c' * 32}"})
        conversions.append(list(git_textconv.convert_to_text("m.safetensors")))
    assert conversions[0] != conversions[1]
    assert conversions[0][0].startswith("w float32 [3]")


def test_pointers_are_named_and_compared_by_their_ids(repository):
    """Pointers of git-lfs, DVC and git-annex are named in the driver and in the difftool."""
    (repository / "m.pt").write_text(POINTER.format("a" * 64))
    call("statecli", "git", "setup")
    commit()
    (repository / "m.pt").write_text(POINTER.format("b" * 64))
    output = call("git", "diff", "--no-ext-diff")
    assert f"-git-lfs pointer: sha256:{'a' * 64}, 123,456 bytes" in output
    assert f"+git-lfs pointer: sha256:{'b' * 64}" in output
    table = call("git", "diff").splitlines()
    assert [line.partition(",")[0] for line in table] == [
        "changed: m.pt",
        *(f"{side}: git-lfs pointer: sha256:{side * 64}" for side in "ab"),
    ]
    (repository / "n.pt").write_text(POINTER.format("a" * 64))
    (repository / "o.pt").write_text(f"outs:\n- md5: {'c' * 32}\n  size: 3\n  path: o.pt\n")
    assert call("statecli", "git", "difftool", "n.pt", "n.pt").startswith("both versions are equal: git-lfs pointer")
    assert f"md5:{'c' * 32}" in call("statecli", "git", "difftool", "n.pt", "o.pt")
    (repository / "p.pt").write_text("/annex/objects/SHA256E-s100--abc.pt\n")
    assert "git-annex pointer: SHA256E-s100--abc.pt; run" in call("statecli", "git", "difftool", "n.pt", "p.pt")


def test_error_of_the_environment_is_not_cached_by_git(repository, monkeypatch):
    """git caches each line of the driver: without numpy two checkpoints would get equal lines, also later."""
    for value in (0.0, 1.0):
        torch.save({"w": torch.full((3,), value)}, "m.pt")
        call("statecli", "git", "setup")
        commit()
    # A newly started process, because the server has imported numpy.
    (repository.parent / "bin" / "statecli").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m statecli "$@"\n')
    (repository.parent / "broken" / "numpy").mkdir(parents=True)
    (repository.parent / "broken" / "numpy" / "__init__.py").write_text('raise ImportError("built for another")\n')
    python_path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{repository.parent / 'broken'}{os.pathsep}{python_path}")
    output = call("git", "diff", "--no-ext-diff", "HEAD~1", "HEAD", "--", "m.pt")
    (line,) = [line for line in output.splitlines() if line.startswith("+cannot be read (attempt ")]
    assert "ImportError: built for another" in line
    monkeypatch.setenv("PYTHONPATH", python_path)
    call(*line.partition("then delete git's cache: ")[2].split())
    assert "+w float32 [3]" in call("git", "diff", "--no-ext-diff", "HEAD~1", "HEAD", "--", "m.pt")


def test_error_of_a_damaged_file_is_the_same_each_time(repository):
    """The text is the same each time: two files with the same damage do not differ."""
    (repository / "m.pt").write_bytes(b"PK\x03\x04 broken")
    words = ("statecli", "git", "textconv", "m.pt")
    assert call(*words) == call(*words)
    assert call(*words).startswith("cannot be read: ")


def test_lines_of_another_version_are_not_mixed_with_these(repository, monkeypatch):
    """git caches lines under the command line of the driver, so the command line has the version and the digest."""
    call("statecli", "git", "setup")
    before = call("git", "config", "diff.statecli.textconv").strip()
    assert before.endswith(f"git textconv --made-by {git_setup.DRIVER_VERSION} --")
    assert git_setup.__version__ in git_setup.DRIVER_VERSION
    monkeypatch.setattr(git_setup, "DRIVER_VERSION", "99-blake4")
    git_setup.set_up()
    assert call("git", "config", "diff.statecli.textconv").strip().endswith(" --made-by 99-blake4 --")


def test_difftool_exits_with_0_for_missing_files(repository):
    """The error is printed on standard output, as git prints its own output, and without escape sequences."""
    assert "no such file" in call("statecli", "git", "difftool", "none\x1b[31m.pt", "none\x1b[31m.pt")
    assert "\x1b" not in call("statecli", "git", "difftool", "none\x1b[31m.pt", "none\x1b[31m.pt")
    assert "No such file" in call("statecli", "git", "difftool", os.devnull, "none.pt")


def test_an_empty_file_of_the_difftool_is_refused(statecli):
    """A variable without a value is one line; only the name in the repository may be empty."""
    result = statecli("git", "difftool", "", "")
    assert (result.code, result.err) == (2, "statecli: LOCAL: is empty; give a value\n")


def test_setting_up_twice_changes_nothing(repository):
    """The former lines of .gitattributes stay."""
    (repository / ".gitattributes").write_text("*.png binary")
    call("statecli", "git", "setup")
    once = (repository / ".gitattributes").read_text(), (repository / ".git" / "config").read_text()
    call("statecli", "git", "setup")
    assert ((repository / ".gitattributes").read_text(), (repository / ".git" / "config").read_text()) == once
    assert once[0].startswith("*.png binary\n*.safetensors diff=statecli\n")


def test_without_an_identity_nothing_is_cached_and_the_difference_is_shown(repository, monkeypatch):
    """git writes its cache as a commit, and stops if it does not know the author."""
    torch.save({"w": torch.ones(3)}, "m.pt")
    commit()
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{name}_NAME")
        monkeypatch.delenv(f"GIT_{name}_EMAIL")
    call("git", "config", "user.useConfigOnly", "true")
    call("statecli", "git", "setup")
    torch.save({"w": torch.zeros(3)}, "m.pt")
    assert "+w float32 [3]" in call("git", "diff", "--no-ext-diff")


def test_setup_outside_a_repository_is_an_error(tmp_path, monkeypatch):
    """The error is one line, and no file is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="not a git repository"):
        git_setup.set_up()


def test_git_without_a_subcommand_lists_the_subcommands(statecli):
    """The subcommands are shown as help, not in the line of an error; the status is 2, because no command ran."""
    result = statecli("git")
    assert result.code == 2
    assert result.err.startswith("Usage: statecli git")
    assert "\n  setup " in result.err


CHECK_ATTRIBUTE = "git check-attr diff -- m.pt"


@pytest.mark.parametrize("line", ["*.pt filter=lfs diff=lfs merge=lfs -text", "*.pt binary", "*.pt -diff", "m* diff=x"])
def test_second_setup_overrides_a_later_line(repository, line):
    """git takes the last matching line: `git lfs track` appends its line, and a later setup appends ours again."""
    call("statecli", "git", "setup")
    (repository / "m.pt").touch()
    call("git", "add", "m.pt")
    with (repository / ".gitattributes").open("a") as file:
        file.write(f"{line}\n")
    assert "diff: statecli" not in call(*CHECK_ATTRIBUTE.split())
    assert "*.pt" in call("statecli", "git", "setup")
    assert "diff: statecli" in call(*CHECK_ATTRIBUTE.split())
    assert line in (repository / ".gitattributes").read_text()
    assert "nothing to add" in call("statecli", "git", "setup")


def test_setup_names_the_file_that_overrides_it(repository):
    """`.git/info/attributes` belongs to the user and overrides `.gitattributes`: setup names the file and remedy."""
    (repository / ".git" / "info" / "attributes").write_text("*.pt diff=other\n")
    output = call("statecli", "git", "setup")
    assert (
        "*.pt: diff=other in .git/info/attributes or in the .gitattributes of a folder overrides this setup" in output
    )
    assert "*.pth: " not in output


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX: scripts without a suffix")
def test_setup_runs_no_monitor_of_the_repository(repository, tmp_path):
    """The monitor of files is a program, which the settings of another person's repository may name."""
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path / 'MARK'}\n")
    monitor.chmod(0o755)
    (repository / "m.pt").touch()
    commit()
    call("git", "config", "core.fsmonitor", str(monitor))
    call("statecli", "git", "setup")
    assert not (tmp_path / "MARK").exists()


def test_git_and_the_hook_use_the_same_names(repository):
    """For files with the suffix `.bin`, git and the hook take the same names."""
    call("statecli", "git", "setup")
    names = [f"x/{begin}-00001.bin" for begin in checkpoint_names.WEIGHT_BIN_PREFIXES]
    attributes = call("git", "check-attr", "diff", "--", *names).splitlines()
    assert attributes == [f"{name}: diff: statecli" for name in names]


def test_the_difftool_names_the_file_of_the_repository(repository):
    """Deleted, added and changed files are named, also in a subfolder; git's temporary files are not named."""
    (repository / "sub").mkdir()
    for name in ("gone.pt", "sub/here.pt"):
        torch.save({"w": torch.zeros(3)}, name)
    call("statecli", "git", "setup")
    commit()
    (repository / "gone.pt").unlink()
    torch.save({"w": torch.ones(3)}, "sub/here.pt")
    torch.save({"w": torch.ones(3)}, "new.pt")
    call("git", "add", "-A")
    output = call("git", "difftool", "--no-prompt", "-t", "statecli", "--cached")
    assert "git-blob" not in output
    assert "/tmp" not in output
    assert "deleted: gone.pt" in output
    assert "added: new.pt" in output
    assert "sub/here.pt" in output
    assert output.count("w float32 [3]") == 2


def test_the_difftool_compares_folders_by_their_files(repository):
    """`git difftool -d` gives two folders of all differing files; files without the name of a checkpoint are listed."""
    (repository / "sub").mkdir()
    for name in ("gone.pt", "sub/here.pt"):
        torch.save({"w": torch.zeros(3)}, name)
    (repository / "notes.txt").write_text("before")
    call("statecli", "git", "setup")
    commit()
    (repository / "gone.pt").unlink()
    torch.save({"w": torch.ones(3)}, "sub/here.pt")
    (repository / "notes.txt").write_text("after")
    output = call("git", "difftool", "-d", "-t", "statecli")
    assert output.startswith("deleted: gone.pt\nw float32 [3]")
    assert "changed: sub/here.pt\n" in output
    assert "changed" in output.partition("sub/here.pt")[2]
    assert output.endswith(
        "notes.txt: not compared, because only files named like checkpoints (such as *.pt) are compared\n"
    )


# --- the table of git diff --------------------------------------------------------------------------------------------


def save_sides(repository, *, setup=("statecli", "git", "setup")):
    """Commit a checkpoint and change a tensor of it in the working tree."""
    weights = {"fc.weight": torch.zeros(2, 2), "fc.bias": torch.ones(2)}
    save_file(weights, "m.safetensors")
    call(*setup)
    commit()
    save_file(weights | {"fc.bias": torch.tensor([1.0, 1.5])}, "m.safetensors")


def test_git_diff_shows_the_table_of_diff(repository):
    """The rows of `statecli diff`, under the file's name in the repository; exit status and `color.diff` are git's."""
    save_sides(repository)
    output = call("git", "diff")
    assert output.startswith("changed: m.safetensors\na/m.safetensors → b/m.safetensors\n1 of 2 parameters changed\n")
    (row,) = [line for line in output.splitlines() if "fc.bias" in line]
    assert row.split()[1:5] == ["fc.bias", "1/2", "0.5", "0.35"]
    assert "exit status" not in output
    assert "git-blob" not in output
    assert "\x1b" not in output
    assert "\x1b[" in call("git", "-c", "color.diff=always", "diff")
    assert "\x1b" not in call("git", "-c", "color.diff=never", "diff")


def test_git_diff_to_a_file_has_no_colours_on_a_terminal(repository):
    """Standard error is a terminal."""
    save_sides(repository)
    terminal, errors = os.openpty()
    output = subprocess.run(["git", "diff"], stdout=subprocess.PIPE, stderr=errors, text=True, check=True).stdout
    os.close(terminal)
    os.close(errors)
    assert "1 of 2 parameters changed" in output
    assert "\x1b" not in output


def test_git_diff_lists_the_tensors_of_added_and_deleted_files(repository):
    """Git gives the null device for the other side."""
    save_sides(repository)
    commit("two")
    assert call("git", "diff", "HEAD~1^{tree}", "HEAD").count("fc.bias") == 1
    call("git", "rm", "-q", "m.safetensors")
    save_file({"w": torch.ones(4)}, "n.safetensors")
    call("git", "add", "-A")
    lines = call("git", "diff", "--cached", "--no-renames").splitlines()
    assert "deleted: m.safetensors" in lines
    assert [line.partition(" parameter")[0] for line in lines[lines.index("added: n.safetensors") + 1 :][:1]] == [
        "w float32 [4]"
    ]


def test_git_diff_names_both_sides_of_a_rename(repository):
    """An unchanged file is not read; the table of a changed file follows."""
    weights = {f"w{number}": torch.rand(64) for number in range(9)}
    save_file(weights, "m.safetensors")
    call("statecli", "git", "setup")
    commit()
    call("git", "mv", "m.safetensors", "n.safetensors")
    assert call("git", "diff", "--cached", "-M") == "renamed: m.safetensors to n.safetensors\n"
    save_file(weights | {"w3": weights["w3"] + 1}, "n.safetensors")
    call("git", "add", "-A")
    lines = call("git", "diff", "--cached", "-M").splitlines()
    assert lines[:2] == ["renamed: m.safetensors to n.safetensors", "changed: n.safetensors"]
    assert "1 of 9 parameters changed" in lines


def test_git_diff_names_an_unmerged_file(repository):
    """During a merge git gives the path alone."""
    save_sides(repository)
    commit("two")
    call("git", "checkout", "-qb", "other", "HEAD~1")
    save_file({"w": torch.zeros(1)}, "m.safetensors")
    commit("three")
    subprocess.run(["git", "merge", "-q", "-"], capture_output=True, check=False)
    assert call("git", "diff", "--cached").startswith("unmerged: m.safetensors\n")


def test_a_file_that_cannot_be_read_does_not_end_git_diff(repository):
    """The next files are shown too, and the error is one line."""
    save_sides(repository)
    save_file({"w": torch.zeros(3)}, "n.safetensors")
    commit("two")
    (repository / "m.safetensors").write_bytes(b"not a checkpoint")
    save_file({"w": torch.ones(3)}, "n.safetensors")
    process = subprocess.run(["git", "diff"], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert "changed: m.safetensors\n" in process.stdout
    assert "m.safetensors: " in process.stdout + process.stderr
    assert process.stdout.partition("changed: n.safetensors\n")[2].count("1 of 1 parameters changed") == 1
    assert "Traceback" not in process.stdout + process.stderr


def test_the_driver_refuses_other_numbers_of_arguments(statecli):
    """Git gives 1, 7 or 9."""
    result = statecli("git", "external-diff", "a", "b")
    assert (result.code, result.out) == (2, "")
    assert "1, 7 or 9 arguments from git, but got 2" in result.err


def test_the_lines_have_the_norm_next_to_the_digest(repository):
    """The norm shows the size of a change; numbers that are not finite are counted."""
    weights = {"w": torch.tensor([3.0, 4.0]), "x": torch.tensor([1.0, float("nan"), float("inf")]), "n": torch.ones(4)}
    save_file(weights, "m.safetensors")
    lines = [line.split() for line in git_textconv.convert_to_text("m.safetensors")]
    assert [line[0] for line in lines] == ["n", "w", "x"]
    assert [" ".join(line[4:-1]) for line in lines] == ["norm 2", "norm 5", "norm 1 NaN 1 Inf 1"]


def test_remove_deletes_only_the_lines_of_the_setup(repository):
    """Lines of the user stay; a second time there is nothing to remove."""
    (repository / ".gitattributes").write_text("*.png binary\n")
    before = (repository / ".git" / "config").read_text()
    call("statecli", "git", "setup")
    call("statecli", "git", "setup", "--remove")
    assert (repository / ".gitattributes").read_text() == "*.png binary\n"
    assert (repository / ".git" / "config").read_text() == before
    assert call("statecli", "git", "setup", "--remove").count("nothing to remove") == 2


def test_remove_deletes_a_file_with_only_our_lines(repository):
    """`--remove` deletes the file of the repository, not the file of all repositories."""
    call("statecli", "git", "setup")
    call("statecli", "git", "setup", "--global")
    assert "git textconv" in call("git", "config", "--global", "diff.statecli.textconv")
    call("statecli", "git", "setup", "--remove")
    assert not (repository / ".gitattributes").exists()
    assert "diff=statecli" in (repository.parent / ".config" / "git" / "attributes").read_text()
    call("statecli", "git", "setup", "--remove", "--global")
    assert "statecli" not in call("git", "config", "--list")


@pytest.mark.parametrize("words", [(), ("--global",), ("--remove",), ("--remove", "--global")])
def test_without_git_the_setup_says_so(repository, statecli, monkeypatch, words):
    monkeypatch.setenv("PATH", str(repository))
    result = statecli("git", "setup", *words)
    assert (result.code, result.err) == (2, "statecli: git is not installed, or not on PATH\n")
