"""The command line: codes, streams, options, and every output."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import jsonschema
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from statecli import __version__
from statecli.render import Output

from .forked_python import run_python, start_python

NET = "sample_models/net.py:Net"

pytestmark = pytest.mark.usefixtures("in_project")


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.safetensors"
    save_file({"fc.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)}, path, {"format": "pt"})
    return path


def on_a_terminal(args, columns=80):
    """Return (output, exit code) of the command in a pseudo-terminal of the given width."""
    fd, terminal = pty.openpty()
    _resize(terminal, columns)
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = start_python(["-m", "statecli", *args], env=environment, session="terminal", **streams)
    os.close(terminal)
    out = b""
    while select.select([fd], [], [], 60)[0]:
        try:
            block = os.read(fd, 65536)
        except OSError:
            break
        if not block:
            break
        out += block
    os.close(fd)
    return out.decode().replace("\r\n", "\n"), process.wait(60)


def _resize(fd, columns):
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))


def process(*args, **options):
    return run_python(["-m", "statecli", *args], **options)


def test_inspect_of_a_clean_checkpoint_exits_with_0(statecli, small):
    """Nothing found, nothing on stderr."""
    result = statecli("inspect", small)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("output", [Output.TABLE, Output.PLAIN, Output.MARKDOWN, Output.GITHUB])
def test_quiet_prints_findings_or_nothing(statecli, small, output):
    """-q of a clean target prints no row for people."""
    assert statecli("inspect", small, "-q", "-f", output.value).out == ""
    assert "unregistered-tensor" in statecli("inspect", NET, "--to", "meta", "-q", "-f", output.value).out


def test_json_has_the_documented_keys(statecli):
    """The document's keys, and a row's, as promised."""
    document = statecli("inspect", NET, "-f", "json").json
    assert document["schema"] == "statecli.inspect/1"
    assert document["statecli"] == __version__
    assert list(document)[:8] == [
        "schema",
        "statecli",
        "target",
        "format",
        "sections",
        "summary",
        "tensors",
        "findings",
    ]
    row = next(row for row in document["tensors"] if row["fqn"] == "mybuffer1")
    assert list(row)[:15] == [
        "fqn",
        "section",
        "kind",
        "evidence",
        "persistent",
        "dtype",
        "shape",
        "elements",
        "bytes",
        "device",
        "requires_grad",
        "tied_to",
        "saved",
        "moves",
        "origin",
    ]
    assert (row["kind"], row["evidence"], row["persistent"], row["moves"]) == ("buffer", "registered", True, True)
    assert row["origin"]["file"] == "sample_models/net.py"
    assert list(document["summary"]) == ["parameter", "buffer", "unregistered", "optimizer"]


@pytest.mark.parametrize("options", [(), ("--to", "meta"), ("--stats",)], ids=["plain", "to", "stats"])
def test_json_fits_its_schema(statecli, options):
    """The schema of `schema inspect` fits the output of `inspect`."""
    schema = statecli("schema", "inspect").json
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(statecli("inspect", NET, "-f", "json", *options).json, schema)


def test_error_about_an_unknown_schema_lists_the_schemas(statecli):
    """`schema nope` is a usage error."""
    result = statecli("schema", "nope")
    assert (result.code, result.out) == (2, "")
    assert "inspect" in result.err


def test_json_is_the_same_each_time(statecli):
    """No timestamp, no address, no random value: two runs are equal, with --stats too."""
    once = statecli("inspect", NET, "-f", "json", "--stats").out
    assert once == statecli("inspect", NET, "-f", "json", "--stats").out
    assert os.getcwd() not in once


def test_jsonl_has_a_type_on_each_line(statecli):
    """The types are target, tensor, finding and note: one object a line."""
    lines = [json.loads(line) for line in statecli("inspect", NET, "--to", "meta", "-f", "jsonl").out.splitlines()]
    assert lines[0]["type"] == "target"
    assert {line["type"] for line in lines[1:]} >= {"tensor", "finding"}


def test_csv_has_a_row_for_each_tensor(statecli, small):
    """Python's csv reads the output: one header, one row a tensor."""
    table = list(csv.DictReader(io.StringIO(statecli("inspect", small, "-f", "csv").out)))
    assert [row["fqn"] for row in table] == ["fc.bias", "fc.weight"]
    assert table[1]["shape"] == "[2,3]"


def test_csv_gives_findings_without_a_tensor_a_row(statecli, tmp_path):
    """A tensor missing in the file has no row of its own: its finding gets a row."""
    save_file({"weight": torch.ones(3, 3)}, tmp_path / "net.safetensors")
    out = statecli("inspect", tmp_path / "net.safetensors", "--model", NET, "-f", "csv").out
    missing = [row for row in csv.DictReader(io.StringIO(out)) if "missing-entry" in row["finding"]]
    assert missing
    assert all(row["kind"] == "" for row in missing)


def test_markdown_escapes_markup_in_names(statecli, tmp_path):
    """A pipe, a backtick and a star in a name do not break the table."""
    save_file({"a|b`c*d": torch.ones(1)}, tmp_path / "odd.safetensors")
    output = statecli("inspect", tmp_path / "odd.safetensors", "-f", "markdown").out
    line = next(line for line in output.splitlines() if line.startswith("|") and "float32" in line)
    assert line.count("|") == 5
    assert "<code>a&#124;b&#96;c&#42;d</code>" in line


def test_include_and_exclude_globs_select_tensors(statecli, small):
    """-i and -x match whole names, and combine."""
    assert list(statecli("inspect", small, "-i", "*.weight", "-f", "json").rows()) == ["fc.weight"]
    assert list(statecli("inspect", small, "-i", "fc.*", "-x", "*.weight", "-f", "json").rows()) == ["fc.bias"]


def test_globs_match_names_with_and_without_the_section(statecli, tmp_path):
    """With several sections a glob matches the name, or section and name; printed brackets match themselves."""
    moment = "state[0]['exp_avg']"
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}}
    torch.save(state, tmp_path / "train.ckpt")
    for glob in ("optimizer.*", f"optimizer.{moment}", moment):
        assert list(statecli("inspect", tmp_path / "train.ckpt", "-i", glob, "-f", "json").rows()) == [moment]
        assert list(statecli("inspect", tmp_path / "train.ckpt", "-x", glob, "-f", "json").rows()) == ["w"]


def test_glob_does_not_match_the_name_of_the_only_section(statecli, tmp_path):
    """-x 'model.*' leaves the head of a state_dict next to its module `model`."""
    torch.save({"model.w": torch.ones(2), "head.w": torch.ones(2)}, tmp_path / "net.pt")
    assert list(statecli("inspect", tmp_path / "net.pt", "-x", "model.*", "-f", "json").rows()) == ["head.w"]


def test_a_name_with_brackets_can_be_typed(statecli):
    """`anchors[0]` is its own glob."""
    result = statecli("inspect", "sample_models/anchors.py:Head", "-i", "*[[]0]", "-f", "json")
    name = next(iter(result.rows()))
    assert list(statecli("inspect", result.json["target"], "-i", name, "-f", "json").rows()) == [name]


def test_glob_without_a_match_is_an_error_with_a_hint(inspect_error, small):
    """A glob without a match gives status 2 and a hint."""
    assert "try '*weight*'" in inspect_error(small, "-i", "weight")
    assert "try '*zzz*'" in inspect_error(small, "-i", "zzz*")
    assert "try" not in inspect_error(small, "-i", "*zzz*")


@pytest.mark.parametrize("words", [("inspect", "a.pt"), ("diff", "a.pt", "b.pt")])
def test_a_module_name_gets_the_glob_of_its_tensors(statecli, in_tmp_path, words):
    """The hint is a prefix up to a dot, in the filters of all commands."""
    for name in ("a.pt", "b.pt"):
        torch.save({"layers.0.weight": torch.zeros(2), "layers.10.weight": torch.zeros(2)}, name)
    assert "; did you mean 'layers.0.*'?" in statecli(*words, "-i", "layers.0").err
    assert "did you mean" not in statecli(*words, "-i", "layers.00").err


def test_kind_option_selects_rows_of_the_kind(statecli):
    """--kind unregistered leaves the lesson alone."""
    rows = statecli("inspect", NET, "--kind", "unregistered", "-f", "json").rows()
    assert {row["kind"] for row in rows.values()} == {"unregistered"}


def test_a_section_can_be_named(statecli, tmp_path):
    """train.ckpt#optimizer selects only this section; the error about a wrong section names a similar section."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    state = {
        "state": {0: {"momentum_buffer": torch.ones(2)}},
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    torch.save({"model": nn.Linear(2, 2).state_dict(), "optimizer": state}, tmp_path / "train.ckpt")
    result = statecli("inspect", f"{tmp_path}/train.ckpt#optimizer", "-f", "json")
    assert {row["section"] for row in result.json["tensors"]} == {"optimizer"}
    assert "did you mean #model?" in statecli("inspect", f"{tmp_path}/train.ckpt#modle").err


def test_cuda_without_cuda_names_the_check_that_works(inspect_error):
    """Without a GPU, the error of --cuda recommends --to meta."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert "--to meta" in inspect_error(NET, "--cuda")
    assert "--to meta" in inspect_error(NET, "--to", "cuda:7")


def test_cuda_and_another_device_contradict(inspect_error):
    """--cuda --to meta is refused, not resolved by order."""
    assert "contradict" in inspect_error(NET, "--cuda", "--to", "meta")


def test_internal_error_is_one_line_and_exits_with_2(statecli, small, monkeypatch):
    """A crash is never 1 and never a traceback, unless --debug asks."""
    from statecli.cli import command_runner

    monkeypatch.setattr(command_runner, "run", lambda *_: 1 / 0)
    result = statecli("inspect", small)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "ZeroDivisionError" in result.err
    assert "Traceback" in statecli("inspect", small, "--debug").err


def test_failed_command_exits_with_2_in_each_of_eight_runs(tmp_path):
    """No process crashes at its end: with a thread that was still starting, Python 3.11.2 crashed in about one run of
    six.
    """
    line = [sys.executable, "-X", "dev", "-m", "statecli", "inspect", str(tmp_path / "none.safetensors")]
    assert [subprocess.run(line, capture_output=True, check=False).returncode for _ in range(8)] == [2] * 8


def test_interrupted_command_exits_with_130(tmp_path):
    """Ctrl-C while a constructor runs."""
    (tmp_path / "slow.py").write_text("import time\nprint('up', flush=True)\ndef make():\n    time.sleep(60)\n")
    words = ["-m", "statecli", "inspect", f"{tmp_path}/slow.py:make"]
    running = start_python(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert running.stderr.readline().strip() == b"up"
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert b"Traceback" not in err


def test_closed_pipe_exits_with_141_silently(tmp_path):
    """`| head` ends without a word."""
    names = [f"layer.{n}.{'x' * 500}" for n in range(1000)]  # more than a pipe holds
    save_file({name: torch.ones(1) for name in names}, tmp_path / "big.safetensors")
    words = ["-m", "statecli", "inspect", tmp_path / "big.safetensors"]
    running = start_python(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.readline()
    running.stdout.close()
    assert running.wait(30) == 141
    assert running.stderr.read() == b""


def test_off_a_terminal_the_table_is_plain(statecli, small):
    """One tensor a line: no folding, colour or truncation."""
    assert statecli("inspect", small, "--color", "never").out == statecli("inspect", small, "-f", "plain").out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns):
    """Names move to a line of their own rather than being cut, and nothing wraps by itself."""
    output, code = on_a_terminal(["inspect", NET, "--to", "meta"], columns)
    assert code == 1
    from rich.cells import cell_len

    fix = {line for line in output.splitlines() if "register_buffer" in line or "statecli fix" in line}  # to paste
    assert max(cell_len(line) for line in output.splitlines() if line not in fix) <= columns
    assert "table" in output


def test_table_folds_layers_and_all_lists_each(statecli, tmp_path):
    """Repeated layers are one line on a terminal, and one line each with --all."""
    path = tmp_path / "deep.safetensors"
    save_file({f"layers.{n}.fc.weight": torch.ones(2) for n in range(50)}, path)
    assert "layers.{0..49}.fc.weight" in statecli("inspect", path, "-f", "table").out
    assert "layers.17.fc.weight" in statecli("inspect", path, "--all", "-f", "table").out


def test_the_tree_sums_modules(statecli, tmp_path):
    """--tree: the line of a module has the sum of its tensors."""
    path = tmp_path / "tree.safetensors"
    save_file({"enc.a.w": torch.ones(10), "enc.b.w": torch.ones(5), "dec.w": torch.ones(1)}, path)
    output = statecli("inspect", path, "--tree", "-f", "table").out
    line = next(line for line in output.splitlines() if line.strip().startswith("enc"))
    assert "60 B" in line


#: Names, and their spellings in outputs for people.
HOSTILE_NAMES = {
    "a\x1b[31mred": "\\x1b[31mred",
    "two\nlines": "two\\nlines",
    "bidi\u202egpj": "bidi\\u202egpj",
    "c1\x9bx": "c1\\x9bx",
    "[bold]markup[/bold]": "[bold]markup[/bold]",
}


@pytest.mark.parametrize("output", list(Output))
def test_names_are_escaped_in_every_output(statecli, tmp_path, output):
    """No control character of a file reaches a terminal; JSON still parses back to the names."""
    save_file({name: torch.ones(1) for name in HOSTILE_NAMES}, tmp_path / "odd.safetensors")
    out = statecli("inspect", tmp_path / "odd.safetensors", "-f", output.value).out
    assert not any((ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160 or char == "\u202e" for char in out)
    if output is Output.JSON:
        assert {row["fqn"] for row in json.loads(out)["tensors"]} == set(HOSTILE_NAMES)
    elif output in (Output.TABLE, Output.PLAIN, Output.CSV, Output.HTML):
        assert all(escaped_name in out for escaped_name in HOSTILE_NAMES.values())


def test_a_lone_surrogate_is_escaped_in_json(statecli, tmp_path):
    """UTF-8 cannot encode a lone surrogate; the JSON escape can."""
    torch.save({"s\udc80": torch.ones(1)}, tmp_path / "odd.pt")
    result = statecli("inspect", tmp_path / "odd.pt", "-f", "json")
    assert result.json["tensors"][0]["fqn"] == "s\udc80"
    assert statecli("inspect", tmp_path / "odd.pt").out.count("s\\udc80") == 1


def test_an_ascii_stdout_gets_escapes(small):
    """A stream without a character causes no crash: an arrow has an ASCII form, other characters are escaped."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = process("inspect", NET, "--to", "meta", "-f", "markdown", env=env)
    assert result.returncode == 1
    assert "cpu -> meta +" in result.stdout


def test_colour_follows_its_variables(monkeypatch):
    """--color, then NO_COLOR, then FORCE_COLOR, then the terminal."""
    from statecli.cli import streams

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert streams.use_color("auto", is_terminal=True)
    assert not streams.use_color("auto", is_terminal=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert streams.use_color("auto", is_terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not streams.use_color("auto", is_terminal=True)
    assert streams.use_color("always", is_terminal=False)
    assert not streams.use_color("never", is_terminal=True)


def test_stats_are_in_table_and_json(statecli, small):
    """--stats reads the values: torch's own numbers."""
    stats = statecli("inspect", small, "--stats", "-f", "json").rows()["fc.weight"]["stats"]
    assert (stats["min"], stats["max"], stats["mean"], stats["std"]) == (1.0, 1.0, 1.0, 0.0)
    assert "mean" in statecli("inspect", small, "--stats").out.splitlines()[0]


def test_checkpoint_can_be_moved_to_a_device(statecli, small):
    """--to cpu loads each tensor and compares its bytes."""
    result = statecli("inspect", small, "--to", "cpu", "-f", "json")
    assert result.code == 0
    assert {row["after"]["followed"] for row in result.json["tensors"]} == {True}
    assert result.json["to"] == "cpu"


def test_prints_of_user_code_stay_off_stdout(statecli, tmp_path):
    """A chatty module does not break the JSON."""
    (tmp_path / "chatty.py").write_text(
        "from torch import nn\nprint('hello')\nclass Net(nn.Linear):\n"
        "    def __init__(self):\n        print('building')\n        super().__init__(1, 1)\n"
    )
    result = process("inspect", f"{tmp_path}/chatty.py:Net", "-f", "json")
    assert json.loads(result.stdout)["format"] == "module"
    assert "hello" in result.stderr


@pytest.mark.parametrize("line", ["inspect {} >&-", "inspect nope.pt >&- 2>&-", "--help >&-", "inspect {} > /dev/full"])
def test_closed_or_full_stdout_exits_with_2(small, line):
    """A closed or full stdout causes neither a finding nor a traceback."""
    command = f"{sys.executable} -m statecli {line.format(small)}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode in (0, 2) if "--help" in line else result.returncode == 2
    assert "Traceback" not in result.stderr


def test_message_about_a_very_long_name_is_short(inspect_error, tmp_path):
    """The one line of an error has a limited length."""
    torch.save({"k" * 1_000_000: torch.ones(1), "d": {"w": 1}}, tmp_path / "long.pt")
    assert len(inspect_error(tmp_path / "long.pt", "-i", "x" * 100_000)) < 3000


def test_output_dash_writes_to_stdout(statecli, small):
    """-o - writes where no -o writes."""
    assert statecli("inspect", small, "-o", "-").out == statecli("inspect", small).out


def test_colour_can_be_forced_through_a_pipe(statecli, small):
    """--color always colours the plain output too; without the option a pipe gets no escape code."""
    assert "\x1b[1m" in statecli("inspect", small, "--color", "always").out
    assert "\x1b" not in statecli("inspect", small).out


def test_many_sections_take_no_quadratic_time(statecli, tmp_path):
    """Five thousand sections are as quick as five thousand tensors."""
    torch.save({f"model{n}": {"fc.weight": torch.ones(1)} for n in range(5000)}, tmp_path / "sections.pt")
    start = time.process_time()
    for options in ((), ("--tree",), ("-f", "markdown")):
        assert statecli("inspect", tmp_path / "sections.pt", *options).code == 0
    assert time.process_time() - start < 10


def test_name_wider_than_the_terminal_is_broken_over_lines(statecli, tmp_path, monkeypatch):
    """The name is broken over lines, not truncated."""
    name = ".".join(f"block{n}" for n in range(12))
    save_file({name: torch.ones(1)}, tmp_path / "long.safetensors")
    monkeypatch.setenv("COLUMNS", "40")
    output = statecli("inspect", tmp_path / "long.safetensors", "-f", "table").out
    assert name in "".join(line.strip() for line in output.splitlines())


def test_a_tensor_that_is_a_prefix_of_others_is_in_the_tree(statecli, tmp_path):
    """`fc.weight` next to `fc.weight.absmax`: both are there with their own facts."""
    save_file({"fc.weight": torch.ones(6), "fc.weight.absmax": torch.ones(1)}, tmp_path / "bnb.safetensors")
    output = statecli("inspect", tmp_path / "bnb.safetensors", "--tree", "-f", "table").out
    assert "[6]" in output
    assert "[1]" in output


def test_the_tree_goes_through_a_pipe(statecli, small):
    """--tree also works without a terminal."""
    out = statecli("inspect", small, "--tree").out
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["module", "model", "fc", "bias", "weight"]


def test_a_class_of_torch_has_no_line_of_the_users(statecli):
    """Nobody's own source assigned its parameters, and ours did not either."""
    rows = statecli("inspect", "torch.nn:LSTM(2,3)", "-f", "json").rows()
    assert {str(row["origin"]) for row in rows.values()} == {"None"}


def test_two_tensors_of_one_line_have_a_fix_each(statecli, tmp_path):
    """`self.a, self.b = …` is one problem that needs two fixes."""
    source = "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
    source += "        super().__init__()\n        self.a, self.b = torch.ones(2), torch.ones(3)\n"
    (tmp_path / "pair.py").write_text(source)
    out = statecli("inspect", tmp_path / "pair.py:Net").out
    assert out.count("warning[unregistered-tensor]") == 1
    assert 'self.register_buffer("a", ' in out
    assert 'self.register_buffer("b", ' in out
    assert out.count("register_buffer") == 2


def test_findings_of_a_class_name_their_section(statecli):
    """A class has the section `model`, in its tensors and its findings."""
    result = statecli("inspect", NET, "--to", "meta", "-f", "json").json
    assert (
        {finding["section"] for finding in result["findings"]} == {"model"} == {t["section"] for t in result["tensors"]}
    )


def test_a_device_of_any_length_is_refused(statecli, tmp_path):
    """Every row repeats the device: with 5,000 characters a small file would become a large document."""
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / "long.pt", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "long.pt").read_bytes()
    short, long = b"X\x03\x00\x00\x00cpu", b"X\x88\x13\x00\x00" + b"d" * 5000
    assert raw.count(short) == 1
    (tmp_path / "long.pt").write_bytes(raw.replace(short, long))
    result = statecli("inspect", tmp_path / "long.pt")
    assert result.code == 2
    assert (
        result.err
        == f"statecli: {tmp_path / 'long.pt'}: w: its device name has 5,000 characters, more than statecli's limit "
        "of 64\n"
    )
    assert len(result.out) < 1000


@pytest.mark.parametrize(
    ("line", "expected_text"),
    [
        (
            "diff a.pt",
            "diff needs AFTER: the checkpoint or class to compare with, in any format; see statecli diff --help",
        ),
        ("help dif", "No such command 'dif'; did you mean 'diff'?"),
        ("diff a.pt b.pt c.pt", "unexpected argument c.pt: diff takes only BEFORE and AFTER; see statecli diff --help"),
        (
            "report a.pt b.pt",
            "unexpected argument b.pt: report takes only TARGET; "
            "to compare two checkpoints, run: statecli diff a.pt b.pt -f html -o diff.html",
        ),
        ("git setup x", "unexpected argument x: git setup takes no arguments; see statecli git setup --help"),
        ("inspect a.pt --rtol 1", "inspect has no option --rtol, but diff has this option; see statecli diff --help"),
        (
            "inspect a.pt --jobs 1",
            "inspect has no option --jobs, but diff, audit, lock and merge have this option; see statecli --help",
        ),
        ("inspect a.pt --debugg", "inspect has no option --debugg; did you mean --debug?"),
        ("inspect a.pt --josn", "inspect has no option --josn; did you mean -f json?"),
        ("diff a.pt b.pt --markdown", "diff has no option --markdown; did you mean -f markdown?"),
        ("audit a.pt --reason --josn", "--reason: works only with --write-baseline FILE; give both"),
        ("inspect a.pt --to", "--to: needs a value (DEVICE); see statecli inspect --help"),
        ("inspect a.pt --all=3", "--all: takes no value; see statecli inspect --help"),
        ("inspect a.pt --top x", "--top x: must be a whole number (N); see statecli inspect --help"),
        ("diff a.pt b.pt --atol=x", "--atol x: must be a number"),
        (
            "inspect a.pt -f jsn",
            "-f jsn: must be table, plain, json, jsonl, csv, markdown, html, sarif, junit, github or ",
        ),
        ("diff a.pt b.pt --ignore dtyp", "values; did you mean dtype?"),
        ("git textconv", "git textconv needs FILE; see statecli git textconv --help"),
        ("completion zs", "SHELL: must be bash, zsh, fish or powershell"),
        ("show a.pt", "No such command 'show'; did you mean 'inspect'?"),
        ("nope", "No such command 'nope'; see statecli --help"),
        ("--nope", "No such option: --nope; see statecli --help"),
    ],
)
def test_usage_error_is_one_line(statecli, line, expected_text):
    """The line has only the mistake and the command for help; the status is 2."""
    result = statecli(*line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert expected_text in result.err


def test_a_device_to_build_on_is_for_classes(inspect_error, small):
    """A checkpoint is not built: the option would be ignored."""
    assert inspect_error(small, "--init-device", "meta").startswith("--init-device meta: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_unwritable_stderr_does_not_change_the_exit_status(small, stderr):
    """A full disk or a closed stderr turns neither an error into a finding nor a good run into an error."""
    for line, code in ((f"inspect {small}.not", 2), (f"diff {small} {small} --bogus", 2), (f"diff {small} {small}", 0)):
        command = ["sh", "-c", f"exec {sys.executable} -m statecli {line} {stderr}"]
        # Python itself exits with 120 if it cannot write the rest of its output.
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        for environment in (buffered, {**buffered, "PYTHONUNBUFFERED": "1"}):
            result = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=environment)
            assert result.returncode == code, line
