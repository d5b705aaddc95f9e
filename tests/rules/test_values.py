"""Rules about values: wrong or doubtful values are reported, and ordinary checkpoints pass."""

from __future__ import annotations

import copy
import json
import math
import xml.etree.ElementTree
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity
from statecli.rules import values
from statecli.rules.policy_config import Policy


@pytest.fixture
def audit_state(run_rule, tmp_path):
    """Save a state_dict with torch and return the findings of a rule, with values."""

    def run(rule, state, **options):
        torch.save(state, tmp_path / "a.pt")
        return run_rule(rule, tmp_path / "a.pt", values=True, **options)

    return run


@pytest.fixture
def weight():
    return torch.randn(20, 20, generator=torch.Generator().manual_seed(0))


def build_checkpoint():
    """A training checkpoint of a single linear layer after a step of Adam."""
    net = torch.nn.Linear(20, 20)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(3, 20)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


# --- no values, no verdict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", values.RULES, ids=lambda rule: rule.name)
def test_rules_about_values_are_skipped_without_values(tmp_path, weight, rule):
    """The rule is listed as skipped, with the option that switched the values off."""
    torch.save({"w": weight}, tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=(rule.name,), values=False)).targets
    assert not target.ran
    assert "--no-values" in target.skipped[0].reason


def test_nan_is_skipped_for_a_class():
    """The values of a constructor are not the values of a checkpoint, so the rule is skipped for this reason."""
    (target,) = audit(Request(("torch.nn:Linear(2, 2)",), select=("nan",), values=True)).targets
    assert "initial values" in target.skipped[0].reason


# --- NaN and infinities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_nan_finds_a_weight_of_any_type(audit_state, weight, dtype):
    """The message gives the name of the tensor and the number of values: 1 of 400."""
    damaged_weight = weight.clone()
    damaged_weight[3, 4] = math.nan
    (finding,) = audit_state("nan", {"good": weight.to(dtype), "bad": damaged_weight.to(dtype)})
    assert (finding.fqn, finding.severity) == ("bad", Severity.ERROR)
    assert finding.message == "bad: 1 of 400 values is NaN"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("w", [math.nan], "w: the only value is NaN"),
        ("w", [math.nan, math.nan, 1.0], "w: 2 of 3 values are NaN"),
        ("", [math.nan, 1.0], "'': 1 of 2 values is NaN"),
    ],
)
def test_nan_message_fits_any_number_and_name(audit_state, name, values, message):
    """A single value, several values, and an empty name, which is shown in quotes."""
    (finding,) = audit_state("nan", {name: torch.tensor(values)})
    assert finding.message == message


def test_nan_finds_a_moment_of_an_optimizer(audit_state):
    """The weights are still good, the next step makes them NaN."""
    checkpoint = build_checkpoint()
    checkpoint["optimizer"]["state"][0]["exp_avg"][0, 0] = math.nan
    (finding,) = audit_state("nan", checkpoint)
    assert "exp_avg" in finding.fqn
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(("rule", "values"), [("nan", []), ("nan", [1.0]), ("inf", [1.0])])
def test_nan_and_inf_in_a_metric_are_a_note(audit_state, weight, rule, values):
    """An unknown metric or a history of losses does not affect the weights in the same file."""
    metric = torch.tensor([float(rule), *values]) if values else torch.tensor(float(rule))
    (finding,) = audit_state(rule, {"state_dict": {"w": weight}, "best_metric": metric})
    assert (finding.fqn, finding.severity) == ("best_metric", Severity.NOTE)
    assert finding.message.startswith("best_metric: ")
    assert finding.help == "no action is needed if these values are intended"


@pytest.mark.parametrize("rule", ["nan", "inf"])
def test_nan_and_inf_in_a_weight_next_to_a_metric_are_an_error(audit_state, weight, rule):
    """The note about the metric does not lower the severity for the weight."""
    weight[0, 0] = float(rule)
    actual = audit_state(rule, {"state_dict": {"w": weight}, "best_metric": torch.tensor([float(rule), 1.0])})
    assert sorted((tensor.fqn, tensor.severity.value) for tensor in actual) == [("best_metric", "note"), ("w", "error")]


@pytest.mark.parametrize("best", [math.inf, -math.inf])
def test_inf_spares_a_best_score_without_a_value(audit_state, weight, best):
    """Lightning's `kth_value` is infinite in every first save. An infinite parameter of a single number is an error."""
    callbacks = {"ModelCheckpoint{'monitor': 'loss'}": {"kth_value": torch.tensor(best), "mode": "min"}}
    assert not audit_state("inf", {"state_dict": {"w": weight}, "callbacks": callbacks})
    state = {"w": weight, "scale": torch.tensor([best])}
    assert [finding.severity for finding in audit_state("inf", {"state_dict": state, "callbacks": callbacks})] == [
        Severity.ERROR
    ]


def test_nan_is_reported_once_for_tied_names(audit_state, weight):
    """Tied names share a storage and give a single finding."""
    weight[0, 0] = math.nan
    assert len(audit_state("nan", {"a": weight, "b": weight})) == 1


def test_nan_spares_infinities_and_the_largest_numbers(audit_state):
    """The bits of infinities and of the largest numbers are next to the bits of NaN."""
    assert not audit_state("nan", {"w": torch.tensor([math.inf, -math.inf, torch.finfo(torch.float32).max])})


def test_nan_spares_integers_whose_bits_would_be_nan(audit_state):
    """The bytes of a float's NaN are an ordinary integer."""
    assert not audit_state("nan", {"n": torch.tensor([math.nan] * 4).view(torch.int32)})


def test_inf_finds_a_weight_that_overflowed(audit_state, weight):
    """An infinity is an error in the weight and in the optimizer."""
    weight[0, :2] = 70_000.0
    (finding,) = audit_state("inf", {"w": weight.half()})
    assert (finding.severity, finding.message) == (Severity.ERROR, "w: 2 of 400 values are infinite")
    checkpoint = build_checkpoint()
    checkpoint["optimizer"]["state"][0]["exp_avg_sq"][0, 0] = math.inf
    assert [finding.severity for finding in audit_state("inf", checkpoint)] == [Severity.ERROR]


def test_inf_finds_positive_infinity_among_zeros(audit_state):
    """A mask hides with -inf, so +inf next to zeros is not a mask."""
    assert [finding.severity for finding in audit_state("inf", {"w": torch.tensor([[math.inf, 0.0], [0.0, 0.0]])})] == [
        Severity.ERROR
    ]


def test_inf_warns_of_a_buffer_with_an_infinite_value(audit_state, weight):
    """The finding is a warning: no mask has many values next to -inf, but only the model knows its buffers."""
    stats = torch.tensor([1.0, 2.0, math.inf])
    bn = torch.nn.BatchNorm1d(3).state_dict()
    (finding,) = audit_state("inf", bn | {"running_var": stats})
    assert (finding.fqn, finding.severity) == ("running_var", Severity.WARNING)


@pytest.mark.parametrize(
    "mask",
    [
        torch.full((9, 9), -math.inf).triu(1),
        torch.full((9, 9), -math.inf).triu(1) + torch.ones(9, 9).tril(),
    ],
    ids=["zeros", "ones"],
)
def test_inf_gives_a_note_for_a_mask(audit_state, mask):
    """-inf next to a single other value is a mask and gives a note, for any name and kind."""
    assert [finding.severity for finding in audit_state("inf", {"attn_mask": mask, "w": mask.clone()})] == [
        Severity.NOTE
    ] * 2


def test_inf_gives_a_note_for_an_observer_without_data(audit_state):
    """The smallest value of an observer begins at infinity, and torch's own observers save the infinity."""
    observer = torch.nn.ModuleDict({"obs": torch.ao.quantization.MinMaxObserver()})
    assert [finding.severity for finding in audit_state("inf", observer.state_dict())] == [Severity.NOTE] * 2


def test_inf_spares_nan_and_the_largest_numbers(audit_state):
    """The largest number of each type is finite."""
    types = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)
    state = {str(dtype): torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min]).to(dtype) for dtype in types}
    assert not audit_state("inf", state | {"nan": torch.tensor([math.nan, 1.0])})


# --- zeros and constants -------------------------------------------------------------------------------------------


def test_all_zero_finds_a_weight_that_was_never_written(audit_state, weight):
    """The finding is a note, because a residual branch may begin with zeros."""
    (finding,) = audit_state("all-zero", {"a": weight, "b": torch.zeros(16, 16)})
    assert (finding.fqn, finding.severity, finding.message) == ("b", Severity.NOTE, "b: all 256 values are zero")


def test_all_zero_gives_one_finding_for_each_section(audit_state, weight):
    """The message gives the count and the first names. A single tensor of another section has a finding of its own."""
    state = {"model": {"w": weight, **{f"l{n}.w": torch.zeros(16, 16) for n in range(4)}}}
    section_finding, tensor_finding = audit_state(
        "all-zero", {**state, "ema": {"w": weight, "l0.w": torch.zeros(16, 16)}}
    )
    assert section_finding.message == "model: 4 tensors are all zero: model.l0.w, model.l1.w and 2 more"
    assert (section_finding.fqn, section_finding.section, tensor_finding.fqn) == (None, "model", "l0.w")
    assert tensor_finding.message == "ema.l0.w: all 256 values are zero"


def test_all_zero_finds_a_checkpoint_without_any_value(audit_state):
    """No initialization sets all weights to zero, so the finding is a warning."""
    state = {"a": torch.zeros(4, 5), "b": torch.zeros(4, 5, dtype=torch.bfloat16)}
    (finding,) = audit_state("all-zero", state)
    assert (finding.severity, finding.message) == (Severity.WARNING, "model: 2 tensors are all zero: a, b")


def test_all_zero_spares_biases_counters_and_nearly_zero_weights(audit_state, weight):
    """Many good checkpoints have zero biases, counters and small tensors. A nearly zero weight is not zero."""
    nearly = torch.zeros(100, 100)
    nearly[-1, -1] = 1e-30
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.LayerNorm(3)).state_dict()
    assert not audit_state("all-zero", net | {"0.bias": torch.zeros(3), "nearly": nearly, "small": torch.zeros(15, 17)})


NAMES_THAT_BEGIN_AT_ZERO = [
    *("h.0.lora_B.weight", "h.0.lora_B.default.weight", "wte.lora_embedding_A.default", "te_text.lora_up.weight"),
    *("pos_embed", "backbone.pos_embed", "encoder.position_embeddings", "blocks.0.attn.rel_pos_h"),
    *("layers.0.attn.relative_position_bias_table", "controlnet_down_blocks.0.weight", "final_logits_bias"),
]


@pytest.mark.parametrize("name", NAMES_THAT_BEGIN_AT_ZERO)
def test_all_zero_spares_weights_that_begin_at_zero(audit_state, weight, name):
    """Adapters and position tables are spared by name, for any shape. A similar name is reported."""
    assert not audit_state("all-zero", {"w": weight, name: torch.zeros(64, 64)})
    assert audit_state("all-zero", {"w": weight, f"x{name.replace('.', '_')}": torch.zeros(64, 64)})


def test_zeros_and_constants_spare_tensors_of_one_long_dimension(audit_state, weight):
    """Examples are mean and std of an image's channels, a token, and a scale of each output."""
    state = {"mean": torch.zeros(1, 512, 1, 1), "token": torch.zeros(1, 1, 512), "scale": torch.ones(512, 1)}
    assert not audit_state("all-zero", {"w": weight, **state})
    assert not audit_state("constant", {"w": weight, **state})


def test_constant_finds_a_placeholder(audit_state, weight):
    """The message gives the value."""
    (finding,) = audit_state("constant", {"a": weight, "b": torch.full((16, 16), 0.5)})
    assert (finding.fqn, finding.message) == ("b", "b: all 256 values are 0.5")


def test_constant_gives_one_finding_for_several_tensors(audit_state, weight):
    """The message gives the count and the first names."""
    (finding,) = audit_state("constant", {"w": weight, **{name: torch.ones(16, 16) for name in "abc"}})
    assert (finding.fqn, finding.message) == (None, "model: 3 tensors are constant: a, b and 1 more")


def test_constant_spares_norms_zeros_and_nearly_constant_weights(audit_state):
    """Ones of a norm are ordinary, zeros have a rule of their own, and the last of many values is read."""
    nearly = torch.ones(300, 300)
    nearly[-1, -1] = 2
    state = torch.nn.LayerNorm(300).state_dict() | {"small": torch.ones(15, 17)}
    assert not audit_state("constant", state | {"zero": torch.zeros(40, 50), "nearly": nearly, "one": torch.ones(1, 1)})


# --- denormals -------------------------------------------------------------------------------------------------------


def build_table(count, *, value=1e-40, shape=(640, 640)):
    """A float32 weight of 409,600 values, of which `count` are denormal: 4,096 are 1 %."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor.view(-1)[:count] = value
    return tensor


def test_denormal_finds_a_weight_that_decayed(audit_state):
    """1 % of the values of a big weight are denormal."""
    (finding,) = audit_state("denormal", {"w": build_table(4096)})
    assert finding.message == "w: 4,096 of 409,600 values are denormal"
    assert finding.severity is Severity.WARNING


def test_denormal_gives_a_note_for_moments(audit_state):
    """Moments decay in rows without gradients. Decay is ordinary and gives a note."""
    checkpoint = build_checkpoint()
    checkpoint["optimizer"]["state"][0]["exp_avg_sq"] = build_table(4096)
    assert [finding.severity for finding in audit_state("denormal", checkpoint)] == [Severity.NOTE]


def test_denormal_gives_a_note_for_a_decayed_bias(audit_state):
    """A bias is added and not multiplied, so denormal values give a note, whatever their number."""
    (finding,) = audit_state("denormal", {"w": build_table(0), "bias": build_table(5000, shape=(5000,))})
    assert (finding.fqn, finding.severity) == ("bias", Severity.NOTE)


def test_denormal_spares_few_values_normal_values_and_float16(audit_state):
    """Fewer than 1 % or fewer than 4,096 values; the smallest normal number; float16, which torch widens first."""
    few_values, small_table = build_table(4097, shape=(640, 641)), build_table(4095, shape=(64, 64))
    smallest_normal_values = torch.full((640, 640), torch.finfo(torch.float32).smallest_normal)
    half_values = torch.full((640, 640), 1e-7).half()
    assert not audit_state(
        "denormal", {"few": few_values, "small": small_table, "least": smallest_normal_values, "half": half_values}
    )


def test_denormal_gives_only_notes_after_real_training(audit_state):
    """Rows of an embedding without later batches, their moments in AdamW, and a bias without a gradient."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(500, 64), torch.nn.Linear(64, 64), torch.nn.ReLU())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(1200):
        optimizer.zero_grad()
        net(torch.randint(0, 500 if step < 100 else 5, (64,))).sum().backward()
        optimizer.step()
    actual = audit_state("denormal", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    assert {finding.severity for finding in actual} == {Severity.NOTE}
    assert all(tensor.fqn.endswith("['exp_avg']") for tensor in actual)


# --- casts -----------------------------------------------------------------------------------------------------------


TARGETS = {name: getattr(torch, name) for name in values.OVERFLOW_LIMITS if hasattr(torch, name)}


def build_numbers_around(number, count=40):
    """Float32 numbers around `number`: first a bit apart, then wider apart."""
    limit = torch.tensor(min(number, torch.finfo(torch.float32).max))
    numbers = [limit]
    for direction in (math.inf, -math.inf):
        position = limit
        for _ in range(count):
            position = torch.nextafter(position, torch.tensor(direction))
            numbers.append(position)
    all_numbers = torch.stack([*numbers, *(limit * share for share in (0.5, 0.9, 0.99, 1.01, 1.1, 2, 100))])
    return torch.cat([all_numbers, -all_numbers])


@pytest.mark.parametrize("dtype", [name for name in TARGETS if name != "float32"])
def test_value_overflows_exactly_if_torch_overflows(dtype):
    """The values are a bit below and a bit above the limit of each type, with either sign."""
    numbers = build_numbers_around(values.OVERFLOW_LIMITS[dtype][0])
    numbers = numbers[numbers.isfinite()]
    cast = numbers.to(TARGETS[dtype]).to(torch.float32)
    is_lost = ~cast.isfinite()
    if dtype == "float8_e4m3fn":  # newer versions of torch clamp: then it is further away than half a step
        is_lost |= (cast - numbers).abs() > 16
    assert [values.overflows(value, dtype) for value in numbers.tolist()] == is_lost.tolist()


def test_float64_overflows_float32_exactly_if_torch_overflows():
    """The limit is exactly half a step above the largest float32."""
    limit = torch.tensor(values.OVERFLOW_LIMITS["float32"][0], dtype=torch.float64)
    for number in (limit, torch.nextafter(limit, limit * 0), torch.nextafter(limit, limit * 2), -limit):
        assert values.overflows(number.item(), "float32") is not bool(number.to(torch.float32).isfinite())


def test_overflows_dtype_finds_a_value_beyond_float16(audit_state, weight):
    """The message gives the value furthest out and the dtype."""
    weight[0, 0], weight[0, 1] = -81_250.0, 70_000.0
    (finding,) = audit_state("overflows-dtype", {"w": weight}, policy=Policy(dtype=("float16",)))
    assert finding.message == "w: value -81250 overflows float16"
    assert finding.severity is Severity.ERROR


def test_overflows_dtype_spares_values_that_round_down(audit_state, weight):
    """65,519.99 rounds to 65,504, the largest float16. A dtype of the policy is not cast. bfloat16 can hold 1e30."""
    rounding_weight, overflowing_weight = weight.clone(), weight.clone()
    rounding_weight[0, 0], overflowing_weight[0, 0] = 65_519.99, 1e30
    assert torch.isfinite(rounding_weight.half()).all()
    assert not audit_state("overflows-dtype", {"near": rounding_weight}, policy=Policy(dtype=("float16",)))
    assert not audit_state("overflows-dtype", {"far": overflowing_weight}, policy=Policy(dtype=("float16", "float32")))
    assert not audit_state("overflows-dtype", {"far": overflowing_weight}, policy=Policy(dtype=("float16", "bfloat16")))


def test_overflows_dtype_spares_an_optimizer(audit_state):
    """A model is cast, its optimizer's state is not."""
    checkpoint = build_checkpoint()
    checkpoint["optimizer"]["state"][0]["exp_avg_sq"][0, 0] = 1e9
    assert not audit_state("overflows-dtype", checkpoint, policy=Policy(dtype=("float16",)))


def test_overflows_dtype_needs_a_dtype(tmp_path, weight):
    """Without a dtype in the policy, the rule is skipped and the reason names the setting."""
    torch.save({"w": weight}, tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=("overflows-dtype",), values=True)).targets
    assert "policy.dtype" in target.skipped[0].reason


# --- saved twice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_duplicate_values_finds_a_clone(audit_state, weight, dtype):
    """Two names in two storages have the same content; the message has the bytes of the copy."""
    table = (weight * 100).to(dtype).repeat(2, 2)
    (finding,) = audit_state("duplicate-values", {"a": table, "b": table.clone(), "c": table + 1})
    assert finding.fqn == "a"
    assert f"the same values as b: {table.nbytes / 1000:g} kB saved more than once" in finding.message, table.nbytes


def test_duplicate_values_gives_one_finding_for_three_copies(audit_state, weight):
    """A group of equal tensors is a single finding."""
    (finding,) = audit_state("duplicate-values", {name: weight.clone() for name in "abc"})
    assert "b, c: 3.2 kB saved more than once" in finding.message


def test_duplicate_values_gives_one_finding_for_several_groups(audit_state, weight):
    """The message gives the additional bytes and the first groups by name."""
    state = {name: weight + n for n, names in enumerate(["abc", "de", "fg"]) for name in names}
    (finding,) = audit_state("duplicate-values", state)
    groups = "b duplicates a, e duplicates d and 1 more"
    message = f"model: 4 tensors duplicate the values of others, 6.4 kB saved more than once: {groups}"
    assert (finding.fqn, finding.message) == (None, message)


def test_duplicate_values_finds_a_copy_with_other_strides(audit_state, weight):
    """Strides describe the layout, not the values."""
    assert len(audit_state("duplicate-values", {"a": weight, "b": weight.t().contiguous().t()})) == 1


def test_duplicate_values_finds_cloned_ties_of_safetensors(run_rule, tmp_path, weight):
    """Tied tensors were cloned for the save."""
    save_file({"embed.weight": weight, "lm_head.weight": weight.clone()}, tmp_path / "a.safetensors")
    assert len(run_rule("duplicate-values", tmp_path / "a.safetensors", values=True)) == 1


def test_duplicate_values_spares_ties_constants_sections_and_one_bit(audit_state, weight):
    """A tie is saved once, zeros are equal everywhere, an average begins as a copy, and a bit is a difference."""
    nearly = weight.clone()
    nearly.view(torch.int32)[-1, -1] ^= 1
    state = {"a": weight, "tied": weight, "nearly": nearly, "z": torch.zeros(20, 20), "y": torch.zeros(20, 20)}
    assert not audit_state("duplicate-values", state)
    assert not audit_state("duplicate-values", {"model": {"a": weight}, "ema": {"a": weight.clone()}})
    assert not audit_state("duplicate-values", {"a": weight, "b": weight.clone().view(10, 40)})


def test_duplicate_values_spares_equal_tables_of_layers(audit_state, weight):
    """Mamba computes A from its shape, and buffers are tables created by each layer."""
    layers = [torch.nn.BatchNorm1d(512) for _ in range(2)]
    for layer in layers:
        layer.running_var.copy_(torch.arange(512))
    state = torch.nn.Sequential(*layers).state_dict()
    state |= {f"layers.{n}.mixer.A_log": weight.clone() for n in range(2)}
    assert not audit_state("duplicate-values", state)


# --- unread values ---------------------------------------------------------------------------------------------------


@pytest.fixture
def truncated_checkpoint(tmp_path, weight):
    """`bad` has a NaN. The storages of `cut` and `other` are truncated."""
    weight[0, 0] = math.nan
    torch.save({"bad": weight, "cut": weight + 1, "other": weight + 2}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as before, zipfile.ZipFile(tmp_path / "b.pt", "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, content[:100] if name.endswith(("data/1", "data/2")) else content)
    return tmp_path / "b.pt"


@pytest.mark.parametrize("select", ["nan", "inf", "duplicate-values", "unread-values", "checksum-mismatch", "values"])
def test_truncated_storage_fails_its_target_under_any_selection(truncated_checkpoint, statecli, select):
    """The failure cannot be ignored. Rules check the other tensor, but no rule without a finding has run."""
    result = statecli("audit", truncated_checkpoint, "--values", "--select", select, "-f", "json")
    nan = select in ("nan", "values")
    assert (result.code, result.json["passed"], result.json["ran"]) == (2, False, ["nan"] * nan)
    assert [(finding["rule"], finding["fqn"]) for finding in result.json["findings"]] == [("nan", "bad")] * nan
    assert result.json["targets"][0]["status"] == "failed"
    assert result.err.startswith(f"statecli: {truncated_checkpoint}: cut and 1 more tensor: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("options", [("--ignore", "unread-values"), ("--ignore", "unread-values", "--select", "inf")])
def test_unreadable_values_are_never_accepted(truncated_checkpoint, statecli, tmp_path, options):
    """The failure remains if the rule is ignored, and a baseline does not record unread values."""
    baseline = tmp_path / "b.json"
    first = statecli(
        "audit", truncated_checkpoint, "--values", *options, "--write-baseline", baseline, "--reason", "a test"
    )
    assert "unread" not in baseline.read_text()
    repeated = statecli("audit", truncated_checkpoint, "--values", *options, "--baseline", baseline)
    assert (first.code, repeated.code) == (2, 2)
    assert "clean" not in first.out + repeated.out
    assert statecli("audit", truncated_checkpoint, "--values", *options, "--fail-on", "error").code == 2


def test_rule_without_all_values_is_skipped_in_reports(truncated_checkpoint, statecli, tmp_path):
    """JUnit reports the rule as skipped; SARIF and GitHub report the target as an error. -v names each tensor."""
    reports = [f"--report={name}={tmp_path / name}" for name in ("junit", "sarif", "github")]
    result = statecli("audit", truncated_checkpoint, "--values", "--select", "inf", "-v", *reports)
    suite = xml.etree.ElementTree.parse(tmp_path / "junit").getroot()[0]  # noqa: S314 - our own
    assert [(case.get("name"), [inner.tag for inner in case]) for case in suite] == [
        ("audit", ["error"]),
        ("inf", ["skipped"]),
    ]
    (run,) = json.loads((tmp_path / "sarif").read_text())["runs"]
    assert not run["invocations"][0]["executionSuccessful"]
    assert (tmp_path / "github").read_text().startswith("::error ")
    assert [
        f"note[unread]: {truncated_checkpoint}: {name}: " in result.out + result.err for name in ("cut", "other")
    ] == [True, True]


def test_unread_values_finds_dtypes_without_numbers(audit_state, weight):
    """bits8 gives a warning. A tensor on meta has no values by design and gives a note."""
    state = {
        "w": weight,
        "bits": torch.zeros(8, dtype=torch.uint8).view(torch.bits8),
        "m": torch.empty(3, device="meta"),
    }
    findings = audit_state("unread-values", state)
    assert {finding.fqn: finding.severity for finding in findings} == {"bits": Severity.WARNING, "m": Severity.NOTE}


def test_unread_values_spares_every_type_that_torch_computes_with(audit_state, weight):
    """Sparse, quantized, complex, bool and 8-bit float tensors are all read."""
    state = {
        "sparse": weight.to_sparse(),
        "csr": weight.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "complex": weight.to(torch.complex64),
        "bool": weight > 0,
        "float8": weight.to(torch.float8_e5m2),
        "empty": torch.empty(0, 4),
    }
    assert not audit_state("unread-values", state)


# --- ordinary checkpoints --------------------------------------------------------------------------------------------


def build_transformer():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64)
    return torch.nn.TransformerEncoder(layer, 3).state_dict()


def build_zero_convolution():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 3, 1))
    torch.nn.init.zeros_(net[2].weight)
    return net.state_dict()


def build_lora():
    return {"q.lora_A.weight": torch.randn(4, 64), "q.lora_B.weight": torch.zeros(64, 4), "alpha": torch.tensor(8.0)}


def build_average():
    net = torch.nn.Linear(32, 32)
    return {"model": net.state_dict(), "ema": copy.deepcopy(net).state_dict(), "epoch": 0}


def build_masks():
    mask = torch.full((16, 16), -math.inf).triu(1)
    return {"blocks.0.attn.mask": mask, "blocks.1.attn.mask": mask.clone(), "w": torch.randn(16, 16)}


def build_tables():
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 1024, 2) / 1024)
    return {f"layers.{n}.rotary_emb.inv_freq": inv_freq.clone() for n in range(4)} | {"w": torch.randn(16, 16)}


@pytest.mark.parametrize(
    "build",
    [build_transformer, build_zero_convolution, build_lora, build_average, build_masks, build_tables, build_checkpoint],
)
def test_an_ordinary_checkpoint_is_clean(tmp_path, build):
    """No rule about values reports more than a note."""
    torch.save(build(), tmp_path / "a.pt")
    rule_names = tuple(rule.name for rule in values.RULES)
    policy = Policy(dtype=("float32", "bfloat16"))
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=rule_names, values=True, policy=policy)).targets
    assert target.ran == rule_names
    assert [finding.message for finding in target.findings if finding.severity is not Severity.NOTE] == []


# --- sparse tensors --------------------------------------------------------------------------------------------------


def _build_sparse(layout, *parts, shape=(4, 4)):
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts, shape, is_coalesced=True, check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=False)


ONE_VALUE = torch.ones(1)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (_build_sparse(torch.sparse_coo, torch.tensor([[3], [3]]), ONE_VALUE), None),
        (torch.eye(4).to_sparse_csr(), None),
        (torch.eye(4).to_sparse_bsr((2, 2)), None),
        (torch.sparse_coo_tensor(size=(4, 4)), None),
        (
            _build_sparse(torch.sparse_coo, torch.tensor([[3], [4]]), ONE_VALUE),
            "stores indices outside its shape [4, 4]",
        ),
        (
            _build_sparse(torch.sparse_coo, torch.tensor([[-1], [0]]), ONE_VALUE),
            "stores indices outside its shape [4, 4]",
        ),
        (
            _build_sparse(torch.sparse_csr, torch.tensor([0, 1, 1, 1, 1]), torch.tensor([10**9]), ONE_VALUE),
            "outside its shape",
        ),
        (
            _build_sparse(torch.sparse_csc, torch.tensor([0, 1, 0, 1, 1]), torch.tensor([1]), ONE_VALUE),
            "do not rise from 0 to",
        ),
        (
            _build_sparse(torch.sparse_csr, torch.tensor([0, 9, 9, 9, 9]), torch.tensor([1]), ONE_VALUE),
            "do not rise from 0 to",
        ),
    ],
    ids=["coo", "csr", "bsr", "empty", "behind", "before", "a column", "falling rows", "more than stored"],
)
def test_sparse_indices_finds_indices_outside_the_shape(run_rule, save_checkpoint, tensor, message):
    """torch loads the indices by default, and the next operator reads or writes outside the shape."""
    findings = run_rule("sparse-indices", save_checkpoint({"w": torch.ones(2), "m": tensor}), values=True)
    assert [message in finding.message for finding in findings] == ([True] if message else [])


@pytest.mark.parametrize(("options", "count"), [({"values": False}, 2), ({"values": True}, 0)], ids=["without", "with"])
def test_unchecked_indices_finds_sparse_tensors_without_values(tmp_path, options, count):
    """Unread indices were not checked, so the result is not a pass."""
    torch.save(
        {"w": torch.ones(2), "m": torch.eye(4).to_sparse(), "n": torch.eye(4).to_sparse_csr()}, tmp_path / "a.pt"
    )
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=("unchecked-indices", "nan"), **options)).targets
    assert [(finding.rule, finding.severity) for finding in target.findings] == [
        ("unchecked-indices", Severity.WARNING)
    ] * count


def test_sparse_indices_spares_the_last_place_and_duplicates(run_rule, save_checkpoint):
    """The largest index is the size minus 1, and values with the same index are summed."""
    twice = torch.sparse_coo_tensor(torch.tensor([[3, 3], [3, 3]]), torch.ones(2), (4, 4))
    assert not run_rule("sparse-indices", save_checkpoint({"w": torch.ones(2), "m": twice}), values=True)


class Indirect:
    """A tensor built by another function."""

    def __init__(self, tensor):
        self.rebuild, self.args = tensor.__reduce_ex__(2)

    def __reduce__(self):
        return torch._tensor._rebuild_from_type_v2, (self.rebuild, torch.Tensor, self.args, {})


@pytest.mark.parametrize("place", ["an attribute", "a key", "example inputs", "an unlisted twin", "a call"])
def test_unchecked_indices_finds_unlisted_tensors(tmp_path, place):
    """torch builds unlisted tensors too, and no rule checks their indices."""
    path, sparse = str(tmp_path / "a.pt"), torch.eye(4).to_sparse()
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.mask = sparse
    if place == "an attribute":
        torch.save({"w": weight}, path)
    elif place == "a key":
        torch.save({"w": torch.ones(2), "names": {sparse: "mask"}}, path)
    elif place == "a call":
        weight.mask = Indirect(sparse)
        torch.save({"w": weight}, path)
    elif place == "an unlisted twin":
        torch.save({"w": weight, "m": torch.ones(4, 4).to_sparse(), "n": torch.eye(4).to_sparse_csr()}, path)
    else:
        path = str(tmp_path / "a.pt2")
        program = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(4, 4),))
        program.example_inputs = ((sparse,), {})
        torch.export.save(program, path)
    (target,) = audit(Request((path,), select=("unchecked-indices",), values=True)).targets
    assert ["1 sparse tensor in the pickles is not listed" in finding.message for finding in target.findings] == [True]


def test_unchecked_indices_spares_listed_tensors(tmp_path):
    """The file may have a tensor under two names, or as a parameter."""
    sparse = torch.eye(4).to_sparse()
    state = {"m": sparse, "again": sparse, "p": torch.nn.Parameter(torch.ones(4, 4).to_sparse_csr())}
    torch.save(state, tmp_path / "a.pt")
    request = Request((str(tmp_path / "a.pt"),), select=("unchecked-indices", "sparse-indices"), values=True)
    assert not audit(request).targets[0].findings
