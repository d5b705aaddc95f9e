"""Proof `forward`: the tensor that mixes devices, and its line."""

from __future__ import annotations

from collections import deque

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from statecli.commands.verify import forward_run  # noqa: E402
from statecli.commands.verify.proofs import forward  # noqa: E402
from statecli.commands.verify.result import Verdict  # noqa: E402
from statecli.core.errors import ModelError  # noqa: E402
from statecli.core.units import format_origin  # noqa: E402
from statecli.live.tensor_sources import How  # noqa: E402

from . import mixes  # noqa: E402
from .mixes import ILLEGAL, LEGAL, NEEDS_CPU_ARGUMENT, VALUE_READS, SingleCall, build_live_subject, build_sample_subject  # noqa: E402

FAKE = "fake-cuda"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, GPU])
ANY_GPU = pytest.mark.parametrize("device", [FAKE, CUDA])


def finding_names(check):
    """Return the tensor names of the findings, which all have the rule device-mismatch."""
    assert {finding.rule for finding in check.findings} <= {"device-mismatch"}
    return [finding.fqn for finding in check.findings]


MIXED = {
    "net:Net": ([(2, 3)], ["table"]),
    "anchors:Head": ([(1, 8, 4, 4)], ["anchors[0]", "anchors[1]", "anchors[2]"]),
    "relative_bias:Attention": ([(1, 4, 4)], ["distance"]),
    "cached_mask:Causal": ([(2, 4, 8)], ["mask"]),
    "plain_lists:Lists": (
        [(2, 4)],
        [f"blocks[{i}].{name}" for i in (0, 1) for name in ("bias", "weight")]
        + ["heads['a'].bias", "heads['a'].weight", "scales[0]", "scales[1]"],
    ),
}


@ANY_GPU
@pytest.mark.parametrize("name", MIXED)
def test_sample_reports_each_tensor_that_mixes_devices(name, device):
    """Every tensor that forward reads on the wrong device is reported, and no other tensor; `tests/test_samples.py` has
    the samples without a mix.
    """
    shapes, names = MIXED[name]
    check = forward.prove(build_sample_subject(name, *shapes), device)
    assert sorted(finding_names(check)) == sorted(names)
    assert check.verdict is Verdict.FAILED
    assert {fqn for fqn, cell in check.columns[0].cells.items() if cell.verdict is Verdict.FAILED} == set(names)


def test_message_has_the_lines_of_use_and_assignment():
    """The message has the tensor, its device, the operator and both lines; the help registers the tensor."""
    (finding,) = forward.prove(build_sample_subject("net:Net", (2, 3)), FAKE).findings
    assert finding.message.startswith("table: on cpu while ")
    assert finding.message.partition(" are on cuda:0, in mm at ")[2].count("net.py:22; assigned at ") == 1
    assert finding.message.endswith("net.py:19")
    assert "register_buffer" in finding.help


def test_message_names_the_other_tensor():
    """The message has a parameter's own name, or the name of a local variable."""
    (finding,) = forward.prove(build_sample_subject("relative_bias:Attention", (1, 4, 4)), FAKE).findings
    assert "while `bias.weight` is on cuda:0, in embedding" in finding.message
    (finding, *_) = forward.prove(build_sample_subject("plain_lists:Lists", (2, 4)), FAKE).findings
    assert "while `x` is on cuda:0, in addmm" in finding.message


def test_help_recommends_to_recreate_a_cache():
    """The cached tensor was assigned in forward, so the help does not suggest a change of the constructor."""
    (finding,) = forward.prove(build_sample_subject("cached_mask:Causal", (2, 4, 8)), FAKE).findings
    advice, _, line = finding.help.partition("; assigned at ")
    assert advice == "create the tensor again in forward when the device changes, or keep one tensor per device"
    assert line.endswith("cached_mask.py:23")


@pytest.mark.parametrize("name", LEGAL | VALUE_READS)
def test_legal_forward_passes(name):
    """The call runs without data, or with data if forward reads values."""
    check = forward.prove(build_live_subject(lambda: SingleCall((LEGAL | VALUE_READS)[name]), (1,)), FAKE)
    assert (check.findings, check.reason) == ((), None), check
    if name in LEGAL:
        assert "shapes only" in check.how


@pytest.mark.parametrize("name", ILLEGAL)
def test_message_has_the_line_of_a_tensor_created_in_forward(name):
    """The tensor has no name, so the message has its line, which is the place of the problem too."""
    check = forward.prove(build_live_subject(lambda: SingleCall(ILLEGAL[name]), (1,)), FAKE)
    assert check.verdict is Verdict.FAILED
    assert "shapes only" in check.how
    lines = [format_origin(finding.origin) for finding in check.findings]
    assert all("mixes.py:" in line for line in lines)
    assert all(
        f"created in forward at {line} is" in finding.message
        for line, finding in zip(lines, check.findings, strict=True)
    )


class PlainList(nn.Module):
    """Layers in a plain list. A single line calls both, so the argument of the second layer has no name."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def test_mismatches_of_a_line_share_a_message():
    """The mismatches have the same cause and the same text, so a report can show them in a single line."""
    findings = forward.prove(build_live_subject(PlainList, (2, 4)), FAKE).findings
    assert len(findings) == 4
    (message,) = {finding.message.partition(": ")[2].partition(";")[0] for finding in findings}
    assert "on cpu while the other operands are on cuda:0, in addmm" in message


@ANY_GPU
@pytest.mark.parametrize("name", NEEDS_CPU_ARGUMENT)
def test_gpu_argument_that_must_be_on_the_cpu_is_reported(name, device):
    """torch reads lengths and split positions on the CPU, and does not copy these arguments to the CPU."""
    (finding,) = forward.prove(build_live_subject(lambda: SingleCall(NEEDS_CPU_ARGUMENT[name]), (1,)), device).findings
    assert "' must be on the cpu, but is on cuda:0 at " in finding.message
    assert finding.help == "copy the argument with .cpu() first"


class Plain(nn.Module):
    """A plain tensor and a function that forward calls with the tensor."""

    def __init__(self, use):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.table = torch.ones(3)
        self.use = use

    def forward(self, x):
        """`use` of the table, the input and the parameter."""
        return self.use(self.table, x, self.weight)


USES = {
    "derived": (lambda table, x, weight: x + (table * 2 + 1).exp(), ["table"]),
    "a view": (lambda table, x, weight: x + table[None, :], ["table"]),
    "with values": (lambda table, x, weight: x * x.sum().item() + table, ["table"]),
    "in a branch": (lambda table, x, weight: x + table if x.sum() > 0 else x, ["table"]),
    "the branch not taken": (lambda table, x, weight: x + table if x.sum() < 0 else x, []),
    "copied": (lambda table, x, weight: x + table.to(x.device) + weight, []),
    "not read": (lambda table, x, weight: x + weight, []),
    "by itself": (lambda table, x, weight: x * float(table.sum()) + weight, []),
    "cuda by name": (lambda table, x, weight: x + table.cuda() + torch.ones(3, device="cuda"), []),
}


@pytest.mark.parametrize("name", USES)
def test_result_is_traced_to_its_source_tensor(name):
    """Views and results of the tensor are mismatches; a tensor that forward copies or does not read is not."""
    use, names = USES[name]
    check = forward.prove(build_live_subject(lambda: Plain(use), (3,)), FAKE)
    assert finding_names(check) == names
    assert check.verdict is (Verdict.FAILED if names else Verdict.PASSED)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a view", "table: on cpu"),
        ("derived", "table: forward computes a tensor on cpu from table, and combines this tensor with "),
    ],
)
def test_message_distinguishes_a_view_from_a_result(name, words):
    """A view is reported as the tensor itself; for a result, the message says from which tensor forward computes it."""
    (finding,) = forward.prove(build_live_subject(lambda: Plain(USES[name][0]), (3,)), FAKE).findings
    assert finding.message.startswith(words)


class Unswappable(nn.Module):
    """A parameter that torch cannot swap, because an autograd graph refers to it, and its second name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.same = [self.weight]
        self.graph = self.weight * 2

    def forward(self, x):
        """Use the parameter's second name, then the tensor computed before the move."""
        return x * self.same[0] + self.graph.detach()


def test_parameter_that_cannot_be_swapped_is_not_reported():
    """On CUDA, all names of the parameter would follow; only the tensor computed from the parameter would stay."""
    assert finding_names(forward.prove(build_live_subject(Unswappable, (3,)), FAKE)) == ["graph"]


def test_copied_tensor_has_a_reason_and_unread_tensor_is_skipped():
    """The reason says that forward copies the tensor, with the line, or does not read the tensor."""
    copied_cell = (
        forward.prove(build_live_subject(lambda: Plain(USES["copied"][0]), (3,)), FAKE).columns[0].cells["table"]
    )
    assert "forward copies the tensor at each call at" in copied_cell.reason
    unread_cell = (
        forward.prove(build_live_subject(lambda: Plain(USES["not read"][0]), (3,)), FAKE).columns[0].cells["table"]
    )
    assert (unread_cell.verdict, unread_cell.after) == (Verdict.SKIPPED, "cpu")
    assert unread_cell.reason == "left on cpu; this forward does not read the tensor"


def add_with_fallback(table, x, weight):
    """Try an addition that works only on the CPU, and fall back to the weight."""
    try:
        return x + table
    except RuntimeError:
        return x + weight


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            lambda table, x, weight: x * table.sum(),
            "harmless in forward, because this CUDA operator accepts a tensor on the cpu: mul at ",
        ),
        (
            lambda table, x, weight: weight[table.long() * 0],
            "because this CUDA operator accepts a tensor on the cpu: index at ",
        ),
        (add_with_fallback, "forward catches the device error of add at "),
        (
            lambda table, x, weight: x * float(table.sum()),
            "forward does not combine the tensor with tensors on other devices",
        ),
    ],
    ids=["a number", "indices", "caught", "by itself"],
)
def test_cell_explains_why_a_tensor_on_cpu_is_harmless(use, words):
    """An operator accepts a CPU tensor, forward catches the error, or no other device is involved."""
    cell = forward.prove(build_live_subject(lambda: Plain(use), (3,)), FAKE).columns[0].cells["table"]
    assert (cell.verdict, words in cell.reason) == (Verdict.PASSED, True), cell.reason


FILE_TABLE = torch.ones(3)
FILE_TABLES = {"others": 3, "table": torch.ones(3)}


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda table, x, weight: x + FILE_TABLE, "FILE_TABLE"),
        (lambda table, x, weight: x + FILE_TABLE[None], "FILE_TABLE"),
        (lambda table, x, weight: x + FILE_TABLES["table"], "FILE_TABLES['table']"),
    ],
    ids=["a variable", "a view", "in a dict"],
)
def test_variable_of_the_file_is_named(use, name):
    """The tensor is neither an attribute of the model nor created in forward."""
    (finding,) = forward.prove(build_live_subject(lambda: Plain(use), (3,)), FAKE).findings
    assert finding.message.partition(" of ")[0] == name
    assert "test_forward.py: on cpu while " in finding.message
    assert finding.help == f"register the tensor as a buffer, or use {name}.to(x.device) in forward"


def test_variable_of_an_imported_file_is_named():
    """The message names the file that defines the variable, not the file that reads the variable."""
    (finding,) = forward.prove(
        build_live_subject(lambda: Plain(lambda table, x, weight: x + mixes.TABLE), (3,)), FAKE
    ).findings
    assert finding.message.partition(": ")[0].endswith("mixes.py")
    assert finding.message.startswith("TABLE of ")


OUT_OF_SIGHT = deque([torch.ones(3)])
ADVICE = {
    "made": (lambda table, x, weight: x + torch.ones(3), "a tensor created in forward at ", How.MADE),
    "drawn": (
        lambda table, x, weight: x + torch.rand(3, generator=torch.Generator()),
        "a tensor created in forward at ",
        How.DRAWN,
    ),
    "brought": (
        lambda table, x, weight: x.to(torch.device("cpu")) + weight,
        "a tensor is on cpu, because forward copies the tensor to cpu at ",
        How.BROUGHT,
    ),
    "computed": (
        lambda table, x, weight: x + OUT_OF_SIGHT[0] * 2,
        "a tensor that forward computes at ",
        How.COMPUTED,
    ),
    "unknown": (
        lambda table, x, weight: x + OUT_OF_SIGHT[0],
        "a tensor of unknown origin is on cpu",
        How.COMPUTED,
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_help_depends_on_the_origin_of_the_tensor(name):
    """The advice suggests device= only for created tensors, and does not guess an unknown cause."""
    use, words, origin = ADVICE[name]
    (finding,) = forward.prove(build_live_subject(lambda: Plain(use), (3,)), FAKE).findings
    assert finding.message.startswith(words)
    assert finding.help == forward._ADVICE[origin]


def test_numpy_array_of_a_gpu_tensor_is_reported():
    """`.numpy()` works only on the CPU; the message has the line."""
    (finding,) = forward.prove(
        build_live_subject(lambda: Plain(lambda table, x, weight: x.numpy()), (3,)), FAKE
    ).findings
    assert "is read as a numpy array at" in finding.message
    assert finding.fqn is None


def test_cpu_generator_for_a_cuda_tensor_is_reported():
    """CUDA draws only from its own generators; a tensor drawn on the CPU and then copied is correct."""
    generator = torch.Generator()
    drawn = build_live_subject(
        lambda: Plain(lambda table, x, weight: torch.rand(3, generator=generator, device=x.device)), (3,)
    )
    (finding,) = forward.prove(drawn, FAKE).findings
    assert finding.message.startswith("a torch.Generator on cpu draws values for cuda:0, in rand at ")
    copied = build_live_subject(
        lambda: Plain(lambda table, x, weight: x + torch.rand(3, generator=generator).to(x.device)), (3,)
    )
    assert forward.prove(copied, FAKE).findings == ()


class Hidden(nn.Module):
    """An LSTM whose first hidden state is a plain tensor."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 3)
        self.hidden = torch.zeros(1, 1, 3)

    def forward(self, x):
        """Start every call from the same hidden state."""
        return self.rnn(x, (self.hidden, self.hidden))[0]


@ANY_GPU
def test_device_check_of_an_rnn_is_reported(device):
    """An RNN compares devices before any operator runs: the message has the line, and the call stops there."""
    check = forward.prove(build_live_subject(Hidden, (2, 1, 2)), device)
    assert check.verdict is Verdict.FAILED
    assert any(" at " in finding.message for finding in check.findings)
    assert "lazy" not in (check.reason or "")


def test_model_without_tensors_is_skipped():
    """A model without tensors cannot have a tensor on the wrong device."""
    check = forward.prove(build_live_subject(nn.ReLU, (3,)), FAKE)
    assert (check.verdict, check.reason) == (Verdict.SKIPPED, "the model has no tensors")


RAISING = {
    "a layer of another dtype": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()), (2, 3), "dtype"),
    "an index past the table": (lambda: nn.Embedding(3, 4), torch.tensor([1, 40]), "out of range"),
    "a class that there is not": (
        lambda: Plain(lambda _, x, w: nn.functional.cross_entropy(x * w, torch.tensor([9], device=x.device))),
        (1, 3),
        "out of bounds",
    ),
}


@pytest.mark.parametrize("name", RAISING)
def test_error_on_every_device_is_raised(name):
    """A fake CUDA device ignores dtypes and indices, so the model is also called on the CPU."""
    build_module, given, words = RAISING[name]
    with pytest.raises(ModelError, match=words):
        forward.prove(build_live_subject(build_module, given), FAKE)


CPU_ONLY_ERRORS = {
    "asks for CUDA": lambda table, x, weight: x + torch.zeros(3).cuda() + weight,
    "lacks a kernel": lambda table, x, weight: _lack_kernel(x) + weight,
    "meets its own input": lambda table, x, weight: _refuse_cpu(x) + weight,
}


def _lack_kernel(x):
    if x.device.type == "cpu":
        raise RuntimeError("\"erfinv\" not implemented for 'Half'")
    return x


def _refuse_cpu(x):
    if x.device.type == "cpu":
        raise RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu")
    return x


@pytest.mark.parametrize("name", CPU_ONLY_ERRORS)
def test_error_only_on_the_cpu_is_ignored(name):
    """Errors of the CPU alone are ignored: no CUDA device, no kernel on the CPU, or code that expects CUDA tensors."""
    check = forward.prove(build_live_subject(lambda: Plain(CPU_ONLY_ERRORS[name]), (3,)), FAKE)
    assert check.verdict is Verdict.PASSED


def test_forward_that_no_fake_gpu_supports_is_inconclusive():
    """Forward runs on the CPU, but not on either kind of fake CUDA device: the reason names both refusals."""

    def branch_on_fake_type(table, x, weight):
        return (
            x.reshape(1, 3).t_() if x.device.type != "cpu" and type(x).__name__ == "FakeGpuTensor" else float(x.sum())
        )

    check = forward.prove(build_live_subject(lambda: Plain(branch_on_fake_type), (3,)), FAKE)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "which a fake CUDA device does not have" in check.reason
    assert "in place, which a fake CUDA device cannot do" in check.reason


def test_check_without_inputs_is_skipped():
    """The reason says why the model has no inputs."""
    subject = build_sample_subject("net:Net")
    check = forward.prove(subject, FAKE)
    assert (check.verdict, check.reason) == (Verdict.SKIPPED, str(subject.why_no_inputs))


def test_meta_device_is_skipped():
    """Any forward would pass on meta, so the proof is skipped and names fake-cuda."""
    check = forward.prove(build_sample_subject("net:Net", (2, 3)), "meta")
    assert check.verdict is Verdict.SKIPPED
    assert "fake-cuda" in check.reason


def test_cpu_device_passes_with_a_reason():
    """The tensors do not move on the CPU, and the reason says so."""
    check = forward.prove(build_sample_subject("net:Net", (2, 3)), "cpu")
    assert (check.verdict, "device errors cannot appear" in check.reason) == (Verdict.PASSED, True)


def test_mismatch_is_found_in_a_model_on_meta():
    """A mismatch is also found in a model built on meta."""
    check = forward.prove(build_sample_subject("net:Net", (2, 3), init_device="meta"), FAKE)
    assert finding_names(check) == ["table"]
    assert "on cpu while" in check.findings[0].message


MODULES = {
    "Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), [(2, 3, 8), (2, 3, 8)]),
    "LSTM": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), [(3, 2, 4)]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), [(3, 2, 8)] * 3),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), [torch.arange(6), torch.tensor([0, 3])]),
    "BatchNorm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), [(2, 3, 8, 8)]),
    "LazyLinear": (lambda: nn.LazyLinear(2), [(2, 3)]),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), [(2, 3)]),
    "spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), [(2, 3)]),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), [(2, 3)]),
}


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_modules_of_torch_have_no_mismatch(name, device):
    """Modules of torch have no false mismatch on a real GPU; `test_zoo.py` has the fake GPU."""
    build_module, shapes = MODULES[name]
    check = forward.prove(build_live_subject(build_module, *shapes), device)
    assert (check.verdict, check.findings, check.reason) == (Verdict.PASSED, (), None)


TEXT_MODELS = ["BertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "MambaModel", "GPTNeoXModel"]
VISION_MODELS = ["ViTModel", "CLIPVisionModel"]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", TEXT_MODELS + VISION_MODELS)
def test_models_of_transformers_have_no_mismatch(name, device):
    """Small models of transformers have no false mismatch on a real GPU; `test_zoo.py` has the fake GPU."""
    from .. import zoo

    shape = (1, 3, 16, 16) if name in VISION_MODELS else torch.arange(10).view(2, 5)
    check = forward.prove(build_live_subject(lambda: zoo.make(name), shape), device)
    assert (check.verdict, check.findings, check.reason) == (Verdict.PASSED, (), None)


class Branches(Plain):
    """A model whose forward passes the module to `use`, for example to read its mode."""

    def forward(self, x):
        """`use` of the module and the input."""
        return self.use(self, x) + self.weight


def catch_mismatch(module, x):
    """Try the addition, and copy the table to the device after an error."""
    try:
        return x + module.table
    except RuntimeError:
        return x + module.table.to(x.device)


def catch_first_mismatch(module, x):
    """Catch the error of the table, but not the error of the other tensor."""
    return catch_mismatch(module, x) + module.other


def raise_other_error(module, x):
    """Catch the error of the table, and raise another error."""
    try:
        return x + module.table
    except RuntimeError as error:
        raise ValueError("bad table") from error


class TwoPlainTensors(Branches):
    """A model with a second plain tensor."""

    def __init__(self, use):
        super().__init__(use)
        self.other = torch.ones(3)


@pytest.mark.parametrize(
    ("use", "names"), [(catch_mismatch, []), (catch_first_mismatch, ["other"]), (raise_other_error, ["table"])]
)
def test_mismatch_caught_by_the_model_is_not_reported(use, names):
    """A mismatch raises a RuntimeError as on CUDA; only an error that leaves forward is reported."""
    check = forward.prove(build_live_subject(lambda: TwoPlainTensors(use), (3,)), FAKE)
    assert finding_names(check) == names
    if not names:
        assert check.verdict is Verdict.PASSED


def test_every_uncaught_mismatch_is_reported():
    """Each uncaught mismatch is carried over in the next run; a mismatch that forward catches is never reported."""

    def use(module, x):
        for _ in range(9):
            x = x + module.many.pop()
        return catch_mismatch(module, x)

    def build_branches():
        module = Branches(use)
        module.many = [torch.ones(3) for _ in range(9)]
        return module

    assert sorted(finding_names(forward.prove(build_live_subject(build_branches, (3,)), FAKE))) == [
        f"many[{at}]" for at in range(9)
    ]


def test_mismatches_of_a_line_need_a_single_run(monkeypatch):
    """After an uncaught mismatch of a line, later mismatches of the same line need no further run."""
    runs = []
    run_once = forward_run._run_once
    monkeypatch.setattr(forward_run, "_run_once", lambda *args: runs.append(run_once(*args)) or runs[-1])
    monkeypatch.setattr(forward_run, "_CAREFUL_RUNS_S", 1000)

    def use(module, x):
        for table in module.many:
            x = x + table
        try:
            for table in module.more:
                x = x + table
        except RuntimeError:
            pass
        return x

    def build_branches():
        module = Branches(use)
        module.many = [torch.ones(3) for _ in range(40)]
        module.more = [torch.ones(3) for _ in range(3)]
        return module

    check = forward.prove(build_live_subject(build_branches, (3,)), FAKE)
    assert sorted(finding_names(check)) == sorted(f"many[{at}]" for at in range(40))
    assert (
        len(runs) == 4
    )  # a stopped and a complete run in eval mode, then a complete run in train mode and of backward


def test_message_names_train_mode():
    """The message names train mode for a mismatch of train mode, and no mode for a mismatch of eval mode."""
    train = forward.prove(
        build_live_subject(lambda: Branches(lambda m, x: x + m.table if m.training else x), (3,)), FAKE
    )
    (finding,) = train.findings
    assert ", in train mode" in finding.message
    assert train.columns[0].cells["table"].verdict is Verdict.FAILED
    assert train.how.startswith("eval mode, train mode, backward on a fake CUDA device, shapes only")
    (finding,) = forward.prove(
        build_live_subject(lambda: Branches(lambda m, x: x if m.training else x + m.table), (3,)), FAKE
    ).findings
    assert "train mode" not in finding.message


def test_only_eval_mode_runs_if_train_mode_raises():
    """BatchNorm needs more than 1 value in train mode: only eval mode is checked, and `how` says so."""
    check = forward.prove(build_live_subject(lambda: nn.BatchNorm1d(3), (1, 3)), FAKE)
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert check.how.endswith(", in eval mode (train mode raises an error on the cpu too)")


class PlainTensors(nn.Module):
    """Plain tensors `a`, `b`, a number and an index, which a function reads."""

    def __init__(self, use):
        super().__init__()
        self.lin, self.use = nn.Linear(3, 3), use
        self.a, self.b, self.number, self.index = torch.ones(3, 3), torch.ones(3), torch.tensor(2.0), torch.arange(3)

    def forward(self, x):
        return self.use(self, self.lin(x))


def write_in_place(m, x):
    """Write into a copy of `a` in place, then combine the copy with a tensor on the device."""
    return x + m.a.clone().add_(m.b)


def write_row(m, x):
    """Write into a row of a copy of `a`."""
    copy = m.a.clone()
    copy[0] += m.b
    return x + copy


COMBINATIONS = {
    "written in part": (write_row, ["a", "b"]),
    "added": (lambda m, x: x + (m.a + m.b), ["a", "b"]),
    "added to what was": (lambda m, x: x + (m.a * 2 + 1 + m.b.exp() + m.a), ["a", "b"]),
    "chosen": (lambda m, x: x + torch.where(m.a > 0, m.a, m.b), ["a", "b"]),
    "stacked": (lambda m, x: x + torch.cat([m.a, m.b[None]])[:3], ["a", "b"]),
    "written": (write_in_place, ["a", "b"]),
    "a number": (lambda m, x: x + m.a * m.number, ["a"]),
    "an index": (lambda m, x: x + m.a[m.index], ["a"]),
    "copied in": (lambda m, x: x + torch.empty(3).copy_(m.b), [None]),
    "made in forward": (lambda m, x: x + (torch.ones(3) + m.b), ["b", None]),
    "moved together": (lambda m, x: x + (m.a + m.b).to(x.device), []),
}


@ANY_GPU
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combined_cpu_tensors_are_each_reported(name, device):
    """Each tensor that has to move is reported; a number or an index that CUDA accepts from the CPU is not."""
    use, names = COMBINATIONS[name]
    check = forward.prove(build_live_subject(lambda: PlainTensors(use), (3,)), device)
    assert sorted(finding_names(check), key=str) == sorted(names, key=str)
    failed = {fqn for fqn, cell in check.columns[0].cells.items() if cell.verdict is Verdict.FAILED}
    assert failed == set(filter(None, names))


def test_partial_write_is_reported_with_data():
    """If forward branches on values, the tensors have data on the CPU and report a CUDA device."""
    check = forward.prove(
        build_live_subject(lambda: PlainTensors(lambda m, x: write_row(m, x * float(x.sum() > 9))), (3,)), FAKE
    )
    assert "with data on the cpu" in check.how
    assert sorted(finding_names(check)) == ["a", "b"]


@pytest.mark.parametrize("name", [name for name, (_, names) in COMBINATIONS.items() if None not in names])
def test_registering_all_reported_tensors_leaves_no_finding(name):
    """If all reported tensors are registered, there is no finding; if one is not, only this tensor is reported."""
    use, names = COMBINATIONS[name]
    for unregistered in [None, *names]:
        module = PlainTensors(use)
        for fqn in set(names) - {unregistered}:
            tensor = getattr(module, fqn)
            delattr(module, fqn)
            module.register_buffer(fqn, tensor)
        assert finding_names(forward.prove(build_live_subject(lambda module=module: module, (3,)), FAKE)) == [
            unregistered
        ] * (unregistered is not None)


def call_cuda(module, x):
    """Call `.cuda()`, as code that was written for a single GPU does."""
    return x + (module.table.cuda() if x.is_cuda else module.table)


DEVICE_READS = {
    "is_cuda, copied": (call_cuda, []),
    "is_cuda, not copied": (lambda module, x: x + module.table if x.is_cuda else x, ["table"]),
    "type": (lambda module, x: x + module.table if x.device.type == "cuda" else x, ["table"]),
    "another type": (lambda module, x: x + module.table if x.device.type not in ("cpu", "cuda") else x, []),
    "device": (lambda module, x: x + module.table if x.device == torch.device("cuda:0") else x, ["table"]),
    "of a parameter": (lambda module, x: x + module.table if module.weight.is_cuda else x, ["table"]),
    "with data": (lambda module, x: x * x.sum().item() + module.table if x.is_cuda else x, ["table"]),
    "a factory": (lambda module, x: x + torch.ones(3, device=str(x.device)) + torch.ones(3).to(x.device), []),
    "under torch.device": (lambda module, x: x + create_under_device(x.device), []),
    "autocast": (lambda module, x: torch.autocast(x.device.type)(lambda: x * 2)(), []),
    "the table is not": (lambda module, x: x + module.table if module.table.is_cuda else x, []),
}


def create_under_device(device):
    """Create a tensor in a torch.device context."""
    with torch.device(device):
        return torch.zeros(3)


@pytest.mark.parametrize("name", DEVICE_READS)
def test_model_reads_a_cuda_device(name):
    """The model's code reads the `.is_cuda` and `.device` of a GPU, with and without data."""
    use, names = DEVICE_READS[name]
    check = forward.prove(build_live_subject(lambda: Branches(use), (3,)), FAKE)
    assert (finding_names(check), check.reason) == (names, None)


def test_code_for_a_real_gpu_is_inconclusive():
    """A call of torch.cuda.is_available() and types that only a CUDA build of torch has make the check inconclusive."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    asks = forward.prove(
        build_live_subject(lambda: Branches(lambda m, x: x + 1 if torch.cuda.is_available() else x), (3,)), FAKE
    )
    assert (asks.verdict, asks.findings) == (Verdict.INCONCLUSIVE, ())
    assert "torch.cuda.is_available() at " in asks.reason
    assert "returns False on this machine, so code that the model runs only with CUDA was not checked" in asks.reason
    assert {cell.verdict for cell in asks.columns[0].cells.values()} == {Verdict.INCONCLUSIVE}
    old = Branches(lambda m, x: x + torch.cuda.FloatTensor(3).zero_() if x.is_cuda else x)
    check = forward.prove(build_live_subject(lambda: old, (3,)), FAKE)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "torch.cuda.FloatTensor not available" in check.reason
