"""Options of inspect and diff: select tensors by dtype and shape, sort rows and limit their number."""

from __future__ import annotations

import math

import pytest
import torch

from statecli.core.errors import UsageError
from statecli.core.model_state import Kind, ModelState, TensorInfo
from statecli.core.selection import Selection, select

pytestmark = pytest.mark.usefixtures("in_tmp_path")

BOTH = ("before.pt", "after.pt")


def tensor(fqn, dtype, *shape):
    elements = math.prod(shape)
    return TensorInfo(fqn, dtype, shape, elements, elements * 4)


TENSORS = (
    tensor("scalar", "float32"),
    tensor("bias", "bfloat16", 768),
    tensor("wide", "float16", 3072, 768),
    tensor("tall", "float8_e4m3fn", 768, 3072),
)


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"dtype": ("fp16",)}, ["wide"]),
        ({"dtype": ("bf16", "FP32")}, ["scalar", "bias"]),
        ({"dtype": ("float8*",)}, ["tall"]),
        ({"dtype": ("torch.float32",)}, ["scalar"]),
        ({"shape": ("*x768",)}, ["wide"]),
        ({"shape": ("768x3072",)}, ["tall"]),
        ({"shape": ("[768, 3072]",)}, ["tall"]),
        ({"shape": ("(768,)",)}, ["bias"]),
        ({"shape": ("[]", "*")}, ["scalar", "bias"]),
        ({"shape": ("*x*",), "dtype": ("float16",)}, ["wide"]),
        ({"shape": ("*x*",), "exclude": ("w*",)}, ["tall"]),
        ({"shape": ("*x*",), "kind": (Kind.PARAMETER,)}, ["wide", "tall"]),
    ],
)
def test_dtype_and_shape_select_tensors(filters, names):
    """A filter is a union of its values; several filters intersect."""
    state = select(ModelState("a.pt", "torch-zip", TENSORS), Selection(**filters), "a.pt")
    assert [row.fqn for row in state.tensors] == names


@pytest.mark.parametrize("text", ["", "2x", "x", "2x-3", "?x3", "[2", "2x3]", "2 by 3", "1e3", "9" * 30])
def test_a_shape_is_sizes_or_asterisks(text):
    """A misspelt shape is an error, because it would match no tensor."""
    with pytest.raises(UsageError, match="write sizes or"):
        Selection(shape=(text,)).check()


def test_error_about_an_absent_dtype_lists_the_dtypes_of_the_file(statecli):
    """The error lists the dtypes of the file."""
    torch.save({"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}, "a.pt")
    result = statecli("inspect", "a.pt", "--dtype", "float17")
    assert (result.code, result.err) == (
        2,
        "statecli: a.pt: none of its 2 tensors matches --dtype 'float17'; the target has the dtypes float32, int64\n",
    )


def test_error_about_an_absent_shape_lists_the_shapes_of_the_file(statecli):
    """The error lists the shapes of the file in the spelling of the help; a comma may separate sizes too."""
    torch.save({"w": torch.ones(3, 4), "s": torch.tensor(1.0)}, "a.pt")
    assert statecli("inspect", "a.pt", "--shape", "3,4").code == 0
    result = statecli("inspect", "a.pt", "--shape", "4,3")
    assert (result.code, result.err) == (
        2,
        "statecli: a.pt: none of its 2 tensors matches --shape '4,3'; the target has the shapes 3x4, []\n",
    )


def test_findings_about_tensors_of_another_kind_are_left_out(statecli):
    """With --model, a filter that hides an existing tensor also hides its findings."""
    torch.save({"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2), "old": torch.zeros(2)}, "a.pt")
    with open("net.py", "w", encoding="utf-8") as file:
        file.write("import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n")
        file.write("        self.fc = torch.nn.Linear(2, 2)\n")
    words = ("inspect", "a.pt", "--model", "net.py:Net", "-f", "json")
    assert [finding["fqn"] for finding in statecli(*words).json["findings"]] == ["old"]
    assert statecli(*words, "--kind", "parameter").json["findings"] == []


# --- order and number of rows -----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints():
    """before.pt and after.pt: l.10 changes most, l.2 gets a NaN, `big` changes least, `new` is added."""
    torch.manual_seed(0)
    before = {f"l.{n}.w": torch.randn(4, 4) for n in range(12)} | {"big": torch.randn(64, 64)}
    after = {name: value.clone() for name, value in before.items()}
    after["l.10.w"] += 1
    after["l.3.w"] += 0.01
    after["l.2.w"][0, 0] = math.nan
    after["big"][0, 0] += 1e-3
    after["new"] = torch.zeros(3)
    torch.save(before, "before.pt")
    torch.save(after, "after.pt")


def list_table_names(result):
    """Return the names in a table, without the letters of a diff."""
    rows = [line.split() for line in result.out.splitlines() if line.startswith("  ") and line.strip()]
    return [row[1] if row[0] in ("M", "A", "D", "R") else row[0] for row in rows if row[0] not in ("name", "↳")]


def list_plain_names(result):
    """Return the names in the plain rows of a diff with one section."""
    table = result.out.partition("\n\n")[0]
    return [line.split()[2] for line in table.splitlines()[1:]]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (("--top", "2"), ["l.2.w", "new"]),
        (("--top", "3", "--sort", "size"), ["big", "l.2.w", "l.3.w"]),
        (("--top", "3", "--sort", "name"), ["big", "l.2.w", "l.3.w"]),
        (("-n", "4"), ["l.2.w", "new", "l.10.w", "l.3.w"]),
        (("--sort", "change"), ["l.2.w", "new", "l.10.w", "l.3.w", "big"]),
        (("--sort", "name"), ["big", "l.2.w", "l.3.w", "l.10.w", "new"]),
    ],
)
def test_a_diff_shows_the_most_important_rows(statecli, checkpoints, options, first):
    """A new NaN comes before an added tensor, an added tensor before a changed one; numbers in names are numbers."""
    for output in ("table", "plain"):
        result = statecli("diff", *BOTH, *options, "-f", output)
        assert result.code == 1
        names = list_table_names(result) if output == "table" else list_plain_names(result)
        assert [name for name in names if name in first][: len(first)] == first


def test_hidden_rows_are_counted(statecli, checkpoints):
    """The rows of --top must not look like all rows."""
    table = statecli("diff", *BOTH, "--top", "2", "-f", "table").out
    assert "largest changes  2 of 5 differences" in table
    assert "… and 3 more (--top 2)" in statecli("diff", *BOTH, "--top", "2", "-f", "plain").out
    assert "… and 4 more" in statecli("diff", *BOTH, "-n", "1", "-f", "table").out
    assert (
        "largest tensors  1 of 13 tensors, 16.4 kB of 17.2 kB"
        in statecli("inspect", "before.pt", "--top", "1", "-f", "table").out
    )
    assert "… and 12 more (--top 1)" in statecli("inspect", "before.pt", "--top", "1", "-f", "plain").out


def test_top_lists_the_largest_tensors_of_all_sections(statecli):
    """--top ignores sections and kinds; the rows contain them."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "train.pt")
    result = statecli("inspect", "train.pt", "--top", "3", "-f", "table")
    assert list_table_names(result) == [
        "model.weight",
        "optimizer.state[0]['exp_avg']",
        "optimizer.state[0]['exp_avg_sq']",
    ]
    assert list_table_names(statecli("inspect", "train.pt", "-n", "1", "-f", "table")) == [
        "weight",
        "…",
        "state[0]['exp_avg']",
        "…",
    ]


@pytest.mark.parametrize("command", [("inspect", "before.pt"), ("diff", *BOTH)])
@pytest.mark.parametrize(
    "options",
    [
        ("--top", "0"),
        ("--lines", "-1"),
        ("--top", "2", "-n", "1"),
        ("--tree", "--top", "2"),
        ("--tree", "--sort", "name"),
        ("--sort", "name", "-f", "json"),
        ("--top", "2", "-f", "csv"),
    ],
)
def test_options_that_would_be_ignored_are_refused(statecli, checkpoints, command, options):
    """Outputs for programs have every row."""
    result = statecli(*command, *options)
    assert (result.code, result.out) == (2, "")
    assert options[0] in result.err


@pytest.mark.parametrize("options", [("--top", "2"), ("--sort", "name"), ("-n", "1")])
def test_a_list_of_names_is_refused_with_options_of_rows(statecli, checkpoints, options):
    """--name-only lists every name, in the order of the file."""
    result = statecli("diff", *BOTH, "--name-only", *options)
    assert (result.code, result.out) == (2, "")
    assert f"--name-only and {' '.join(options)} contradict each other" in result.err


#: Names with numbers that Python does not convert (more than 4,300 digits), and that no character counts.
DIGITS = {"thousands": "9" * 5_000, "a million": "1" * 1_200_000}


@pytest.mark.parametrize("digits", DIGITS.values(), ids=DIGITS)
def test_names_with_numbers_of_any_length_are_sorted(statecli, digits):
    """A number is ordered by its digits, never converted."""
    for name, numbers in (("before.pt", ("2", "10", digits)), ("after.pt", ("3", "10", f"{digits}0"))):
        torch.save({f"layers.{n}.w": torch.ones(1) for n in numbers}, name)
    result = statecli("inspect", BOTH[0], "--sort", "name")
    places = [result.out.index(f"layers.{n}.w") for n in ("2", "10")]
    assert (result.code, places) == (0, sorted(places))
    assert statecli("diff", *BOTH).code == statecli("diff", *BOTH, "--sort", "name").code == 1


def test_a_number_after_a_colon_need_not_be_a_line(statecli):
    """A name may look like a place in a file, with a line number that Python does not convert."""
    name = f"assigned at net.py:{'9' * 5_000}"
    torch.save({name: torch.ones(1)}, BOTH[0])
    assert statecli("lock", BOTH[0], "-o", "lock.json").code == 0
    torch.save({name: torch.zeros(1)}, BOTH[0])
    result = statecli("audit", BOTH[0], "--lock", "lock.json")
    assert (result.code, "internal" in result.err) == (1, False)


@pytest.mark.parametrize("words", [("--top", "2"), ()])
def test_the_name_of_a_guessed_parameter_can_be_copied(statecli, words):
    """No question mark is part of a name."""
    torch.save({"first.w": torch.ones(4), "second.w": torch.ones(2)}, BOTH[0])
    result = statecli("inspect", BOTH[0], "-f", "table", *words)
    assert {"first.w", "second.w"} <= set(result.out.split())


@pytest.mark.parametrize("option", ["--top", "-n"])
@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_csv_of_report_has_every_row(statecli, tmp_path, command, option):
    """A file of --report is complete, whatever the table on the screen shows."""
    torch.save({"model": {f"w.{n}": torch.zeros(n + 1) for n in range(4)}, "epoch": 1}, "a.pt")
    torch.save({"model": {f"w.{n}": torch.ones(n + 1) for n in range(4)}, "epoch": 2}, "b.pt")
    files = ["a.pt", "b.pt"] if command == "diff" else ["a.pt"]
    result = statecli(command, *files, option, "1", "-f", "table", "--report", "csv=rows.csv")
    assert "w.0" not in result.out
    assert statecli(command, *files, "-f", "csv").out == (tmp_path / "rows.csv").read_text()
