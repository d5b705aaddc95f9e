"""The inputs of forward: from texts, from functions, and from the model itself."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import statecli
from statecli.commands.verify.inputs import Inputs, _build_from_texts, find_inputs, iter_leaves, map_tensors, use_seed
from statecli.core.errors import ModelError, UsageError
from statecli.core.input_text import InputSpec, parse_input
from statecli.live.assignment_lines import Origins
from statecli.live.build import build
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec, parse_spec as parse_spec

from ..zoo import NOT_SIMILAR_TO_REAL, SMALL, make

INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]
FLOATS = ["float32", "float64", "float16", "bfloat16"]


def wrap_module(module: nn.Module) -> BuiltModel:
    """A built model for an existing module."""
    return BuiltModel(ModelSpec("net", "", False, "net"), module, Origins({}), "cpu", True, lambda *_: module)


def find_text_inputs(*texts: str) -> Inputs:
    actual, why_not = find_inputs(texts, None, wrap_module(nn.Identity()))
    assert actual is not None, why_not
    return actual


# --- --input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "read"), [
    ("2x3", InputSpec(None, "float32", (2, 3), None)),
    ("2×3", InputSpec(None, "float32", (2, 3), None)),
    ("7", InputSpec(None, "float32", (7,), None)),
    ("0x3", InputSpec(None, "float32", (0, 3), None)),
    ("float32:", InputSpec(None, "float32", (), None)),
    ("int64:2x16<30522", InputSpec(None, "int64", (2, 16), 30522)),
    ("2x16<30522", InputSpec(None, "int64", (2, 16), 30522)),
    ("int64:2", InputSpec(None, "int64", (2,), 2)),
    ("bool:4x4", InputSpec(None, "bool", (4, 4), None)),
    ("mask=bool:4x4", InputSpec("mask", "bool", (4, 4), None)),
    ("torch.half:2", InputSpec(None, "float16", (2,), None)),
    ("long:2<9", InputSpec(None, "int64", (2,), 9)),
    ("complex64:2", InputSpec(None, "complex64", (2,), None)),
    ("uint8:3<256", InputSpec(None, "uint8", (3,), 256)),
])  # fmt: skip
def test_input_text_is_parsed(text, read):
    """Examples of the grammar of `--input`."""
    assert parse_input(text) == read


@pytest.mark.parametrize(("text", "message"), [
    ("2,3", "'2,3' is not a shape; write 2x3"),
    ("", "the shape is missing; write 2x3"),
    ("x=", "the shape is missing; write 2x3"),
    ("٢x٣", "'٢x٣' is not a shape"),
    ("int64:2x3<٩", "the bound '٩' is not a positive integer"),
    ("flaot32:2", "'flaot32' is not a dtype; did you mean float32?"),
    ("q:2", "'q' is not a dtype; write one of float32, float16"),
    ("2x8:int64", "'2x8' is not a dtype; write the dtype before the shape, as in int64:2x16"),
    ("float32:2x3<5", "the bound needs an integer dtype, not float32; write int64:2x16<5"),
    ("bool:2<5", "the bound needs an integer dtype, not bool"),
    pytest.param(f"int64:2<{'9' * 5000}", "is too large: the largest int64", id="5,000 digits of a bound"),
    pytest.param(f"{'9' * 5000}x2", "have 2^63 or more elements, more than", id="5,000 digits of a size"),
    ("int64:2<0", "the bound '0' is not a positive integer"),
    ("int64:2<", "the bound '' is not a positive integer"),
    ("int64:2<-3", "the bound '-3' is not a positive integer"),
    ("int8:2<300", "the bound 300 is too large: the largest int8 is 127; write int64 instead of int8"),
    (f"int64:2<{2**63 + 1}", f"is too large: the largest int64 is {2**63 - 1}; write a smaller bound"),
    ("a b=2", "'a b' is not an argument name"),
    ("99999x99999", "the input would have 9,999,800,001 elements"),
])  # fmt: skip
def test_invalid_input_text_is_refused(text, message):
    """The error is a single line with the text, the problem and a valid example."""
    with pytest.raises(UsageError) as error:
        parse_input(text)
    assert message in str(error.value)
    assert str(error.value).startswith(f"--input {text}: ")
    assert "\n" not in str(error.value)


@given(st.sampled_from([*INTEGERS, *FLOATS, "bool", "complex128"]), st.lists(st.integers(0, 4), max_size=3),
       st.integers(1, 127), st.integers(0, 99))  # fmt: skip
def test_tensors_match_the_input_text(dtype, shape, bound, seed):
    """The tensors have the given dtype, shape and bound, and a seed gives the same values in new tensors."""
    limit = f"<{bound}" if dtype in INTEGERS else ""
    inputs_ = find_text_inputs(f"{dtype}:{'x'.join(map(str, shape))}{limit}")
    ((tensor,), kwargs), ((second_tensor,), _) = inputs_.make_call(seed=seed), inputs_.make_call(seed=seed)
    assert (tensor.dtype, list(tensor.shape), kwargs) == (getattr(torch, dtype), shape, {})
    assert tensor is not second_tensor
    assert torch.equal(tensor, second_tensor)
    assert not limit or not tensor.numel() or 0 <= int(tensor.min()) <= int(tensor.max()) < bound


def test_numbers_are_standard_normal_and_ids_reach_the_bound():
    """The mean and the spread of 10,000 numbers, and every id of a small table."""
    ((numbers,), _), ((ids,), _) = find_text_inputs("10000").make_call(), find_text_inputs("int64:1000<7").make_call()
    assert abs(float(numbers.mean())) < 0.05
    assert abs(float(numbers.std()) - 1) < 0.05
    assert set(ids.tolist()) == set(range(7))


def test_inputs_differ_by_seed_and_position():
    """Two positional inputs of the same shape have different values, and so have two seeds."""
    inputs_ = find_text_inputs("4", "4")
    (first, second), _ = inputs_.make_call(seed=0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, inputs_.make_call(seed=1)[0][0])


def test_named_inputs_are_keywords_and_others_keep_their_order():
    """Positional inputs keep their order, wherever named inputs stand among them."""
    inputs_ = find_text_inputs("2", "y=int64:3<5", "4")
    args, kwargs = inputs_.make_call()
    assert [list(arg.shape) for arg in args] == [[2], [4]]
    assert list(kwargs) == ["y"]
    assert inputs_.text == "float32 2, y int64 3 below 5, float32 4"


def test_duplicate_name_is_refused():
    """Python would silently use the last value."""
    with pytest.raises(UsageError, match="the argument x is given twice"):
        find_text_inputs("x=2", "x=3")


def test_making_inputs_keeps_the_global_generator():
    """The state of the global generator is unchanged."""
    before = torch.get_rng_state()
    find_text_inputs("2x3", "int64:2<5").make_call(seed=3)
    assert torch.equal(torch.get_rng_state(), before)


# --- --input-from -----------------------------------------------------------------------------------------------


@pytest.fixture
def find_function_inputs(tmp_path, in_tmp_path):
    """Return a function that finds the inputs of a function `make` with the given body."""

    def find(body: str, spec: str = "mine.py:make") -> Inputs:
        (tmp_path / "mine.py").write_text(f"import torch\nkept = torch.ones(2)\ndef make():\n    {body}\n")
        actual, _ = find_inputs((), spec, wrap_module(nn.Identity()))
        assert actual is not None
        return actual

    return find


@pytest.mark.parametrize(("gives", "shapes", "names", "text"), [
    ("torch.ones(2)", [[2]], {}, "float32 2"),
    ("(torch.ones(2), torch.ones(3))", [[2], [3]], {}, "float32 2, float32 3"),
    ("[torch.ones(2)]", [[2]], {}, "float32 2"),
    ("{'x': torch.ones(2)}", [], {"x": [2]}, "x float32 2"),
    ("((torch.ones(2),), {'y': torch.ones(3)})", [[2]], {"y": [3]}, "float32 2, y float32 3"),
    ("([torch.ones(2)], {})", [[2]], {}, "float32 2"),
])  # fmt: skip
def test_function_may_return_a_tensor_or_a_container(find_function_inputs, gives, shapes, names, text):
    """A tensor, a tuple or list of positional inputs, a dict of named inputs, or both."""
    actual = find_function_inputs(f"return {gives}")
    args, kwargs = actual.make_call()
    assert [list(arg.shape) for arg in args] == shapes
    assert {name: list(tensor.shape) for name, tensor in kwargs.items()} == names
    assert actual.text == text
    assert actual.chosen_by_user


def test_dict_after_a_tensor_is_positional(find_function_inputs):
    """In (tensor, dict), the first item is not a tuple, so both items are positional."""
    args, kwargs = find_function_inputs("return torch.ones(2), {'mask': torch.ones(2)}").make_call()
    assert len(args) == 2
    assert kwargs == {}


def test_function_gets_the_seed_and_gives_new_tensors(find_function_inputs):
    """The same seed gives the same values; a write to the inputs does not change a tensor that the function keeps."""
    drawn = find_function_inputs("return torch.randn(4)")
    assert torch.equal(drawn.make_call(seed=1)[0][0], drawn.make_call(seed=1)[0][0])
    assert not torch.equal(drawn.make_call(seed=1)[0][0], drawn.make_call(seed=2)[0][0])
    function_inputs = find_function_inputs("return kept")
    function_inputs.make_call()[0][0].zero_()
    assert function_inputs.make_call()[0][0].tolist() == [1, 1]


def test_function_may_have_arguments(tmp_path, in_tmp_path):
    """The arguments are literals, as for the model class."""
    (tmp_path / "mine.py").write_text("import torch\ndef make(n):\n    return torch.ones(n)\n")
    actual, _ = find_inputs((), "mine.py:make(3)", wrap_module(nn.Identity()))
    assert list(actual.make_call()[0][0].shape) == [3]


@pytest.mark.parametrize(("body", "message"), [
    ("return None", "mine.py:make: the function returned nothing; expected a tensor"),
    ("return ()", "mine.py:make: the function returned an empty tuple; expected a tensor, a tuple or a dict of "),
    ("return 3", "mine.py:make: the function returned an int, which contains no tensor"),
    ("return {1: torch.ones(2)}", "mine.py:make: 1 is not a keyword argument"),
    ("raise ValueError('no data')", "mine.py:make: calling the function raised ValueError: no data (mine.py:4)"),
])  # fmt: skip
def test_function_without_inputs_is_refused(find_function_inputs, body, message):
    """The error has the function's own message and line."""
    with pytest.raises(ModelError) as error:
        find_function_inputs(body)
    assert message in str(error.value)


@pytest.mark.parametrize(("spec", "kind", "message"), [
    ("mine.py", UsageError, "must name a function: file.py:make"),
    ("mine.py:mak", ModelError, "mine.py has no mak; did you mean make"),
    ("other.py:make", ModelError, "other.py: no such file"),
    ("mine.py:kept", UsageError, "names an object of type Tensor, not a function that returns inputs"),
])  # fmt: skip
def test_invalid_function_name_is_refused(find_function_inputs, spec, kind, message):
    """The error names the problem and a similar name."""
    with pytest.raises(kind) as error:
        find_function_inputs("return kept", spec)
    assert message in str(error.value)


def test_input_and_input_from_contradict_each_other():
    """The two options contradict each other."""
    with pytest.raises(UsageError, match="--input and --input-from contradict each other: both set"):
        find_inputs(["2x3"], "mine.py:make", wrap_module(nn.Identity()))


def test_inputs_of_another_folder_keep_the_modules_of_the_model(tmp_path):
    """The inputs are in another folder, and the model's sibling modules stay importable for pickle."""
    for folder in ("model", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "layers_beside.py").write_text("from torch import nn\nclass Layer(nn.Linear): pass\n")
    (tmp_path / "model" / "net.py").write_text(
        "import layers_beside\ndef make():\n    return layers_beside.Layer(2, 2)\n"
    )
    (tmp_path / "data" / "mine.py").write_text("import torch\ndef make():\n    return torch.ones(2)\n")
    built = build(parse_spec(f"{tmp_path}/model/net.py:make"))
    find_inputs((), f"{tmp_path}/data/mine.py:make", built)
    assert torch.equal(
        torch.tensor([1.0, 1.0]), find_inputs((), f"{tmp_path}/data/mine.py:make", built)[0].make_call()[0][0]
    )
    assert __import__("sys").modules["layers_beside"].Layer is type(built.module)


# --- inputs of the model itself -----------------------------------------------------------------------------

AUDIO_INPUTS = {"WhisperModel": "input_features", "Wav2Vec2Model": "input_values"}


@pytest.mark.parametrize("name", [*NOT_SIMILAR_TO_REAL, *AUDIO_INPUTS])
def test_real_classes_accept_the_inputs_found_for_them(name):
    """Forward accepts the inputs that statecli finds; for audio models statecli does not invent inputs."""
    built = wrap_module(make(name).eval())
    actual, why_not = find_inputs((), None, built)
    if name in AUDIO_INPUTS:
        assert actual is None
        assert str(why_not).endswith(f"forward needs the argument {AUDIO_INPUTS[name]}")
        return
    args, kwargs = actual.make_call()
    built.module(*args, **kwargs)
    assert not actual.chosen_by_user


def test_dummy_ids_fit_a_small_vocabulary():
    """transformers' own dummy inputs go up to 7; a table of five rows gets ids below 5."""
    import transformers

    config = transformers.BertConfig(**{**SMALL["BertModel"][1], "vocab_size": 5})
    actual, _ = find_inputs((), None, wrap_module(transformers.BertModel(config)))
    assert actual.text == "input_ids int64 2×8 below 5 (from its config)"


def test_model_of_text_and_images_gets_both_inputs():
    """CLIP inherits dummy ids from its base class, but forward also needs images."""
    import transformers

    vision = {**SMALL["CLIPVisionModel"][1]}
    text = {**SMALL["BertModel"][1], "eos_token_id": 63, "bos_token_id": 1, "pad_token_id": 0}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    actual, _ = find_inputs((), None, wrap_module(model.eval()))
    assert sorted(actual.make_call()[1]) == ["input_ids", "pixel_values"]
    model(**actual.make_call()[1])


class HasExampleInput(nn.Linear):
    """A model with an example input as in Lightning."""

    def __init__(self, example):
        super().__init__(2, 2)
        self.example_input_array = example


@pytest.mark.parametrize(("example", "args", "kwargs"), [
    (torch.ones(3, 2), 1, 0), ((torch.ones(3, 2),), 1, 0), ({"input": torch.ones(3, 2)}, 0, 1),
])  # fmt: skip
def test_example_input_array_is_used(example, args, kwargs):
    """The example is a tensor, a tuple or a dict; it counts as chosen by the user, because an author set it."""
    inputs_, _ = find_inputs((), None, wrap_module(HasExampleInput(example)))
    values = inputs_.make_call()
    assert (len(values[0]), len(values[1])) == (args, kwargs)
    assert inputs_.chosen_by_user
    assert inputs_.text.endswith("float32 3×2 (its example_input_array)")


def test_example_that_forward_refuses_is_skipped():
    """Proofs that need the example and were not requested are skipped; the reason names the example."""

    class Wrong(HasExampleInput):
        def __init__(self):
            super().__init__(torch.ones(3, 9))

    verification = statecli.verify(Wrong())
    checks = {check.check.value: check for check in verification.checks}
    assert {name: check.verdict.value for name, check in checks.items() if name in ("step", "forward")} == {
        "step": "skipped",
        "forward": "skipped",
    }
    assert "forward does not accept float32 3×9 (its example_input_array)" in checks["step"].reason


@pytest.mark.parametrize("example", [None, (torch.ones(2), torch.ones(2), torch.ones(2))])
def test_example_that_does_not_fit_is_ignored(example):
    """Lightning's default is None; three examples do not fit a forward with a single argument."""
    actual, why_not = find_inputs((), None, wrap_module(HasExampleInput(example)))
    assert (actual, str(why_not)) == (None, "no input given: --input 2x2 or --input-from FILE.PY:MAKE")


class Stack(nn.Sequential):
    """Layers in sequence, after a parameter `mask` of the model itself."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.mask = nn.Parameter(torch.ones(1))


class TwoInputs(nn.Linear):
    def forward(self, first, second):
        return super().forward(first + second)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(16, 2), "2x16"),
        (Stack(nn.ReLU(), nn.Linear(7, 2), nn.Linear(2, 5)), "2x7"),
        (Stack(nn.Embedding(100, 8), nn.Linear(8, 2)), "'int64:2x16<100'"),
        (Stack(nn.Conv1d(4, 2, 3)), "2x4xL"),
        (Stack(nn.Conv2d(3, 2, 3)), "2x3xHxW"),
        (Stack(nn.Conv3d(3, 2, 3)), "2x3xDxHxW"),
        (nn.GRU(5, 2), "2x8x5"),
        (Stack(nn.BatchNorm1d(6), nn.Linear(6, 2)), "SHAPE"),
        (nn.Linear(3, 2, dtype=torch.float64), "float64:2x3"),
        (nn.LazyLinear(2), "SHAPE"),
        (TwoInputs(3, 2), "SHAPE"),
        (Stack(), "SHAPE"),
    ],
)
def test_message_suggests_the_input_shape_of_the_first_layer(model, shape):
    """A valid shape, with letters for sizes that the layer leaves open; SHAPE if the first layer is unknown."""
    actual, why_not = find_inputs((), None, wrap_module(model))
    assert (actual, str(why_not)) == (None, f"no input given: --input {shape} or --input-from FILE.PY:MAKE")
    if shape != "SHAPE" and shape[-1] not in "LW":
        with torch.no_grad():
            model(*_build_from_texts([shape.strip("'")]).make_call()[0])


def test_error_of_the_example_is_reported(tmp_path):
    """The reason has the error of the property, and its line."""
    source = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
    source += "    @property\n    def dummy_inputs(self):\n        raise OSError('no such data')\n"
    (tmp_path / "net.py").write_text(source)
    actual, why_not = find_inputs((), None, build(parse_spec(f"{tmp_path}/net.py:Net")))
    assert actual is None
    assert "reading the example inputs of the model raised OSError: no such data" in str(why_not)
    assert "net.py:7" in why_not.remark


# --- containers ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    n: int


Pair = collections.namedtuple("Pair", "a b")


def test_tensors_are_mapped_through_containers():
    """Lists, tuples, named tuples, dicts of any class and dataclasses keep their class and their order."""
    array = torch.ones(2)
    value = [array, (array, 3), Pair(array, "b"), collections.OrderedDict(x=array), Batch(array, 5), None]
    tensors = map_tensors(value, lambda tensor: tensor.to("meta"))
    assert [type(item) for item in tensors] == [type(item) for item in value]
    leaves = [leaf for leaf in iter_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    assert len(leaves) == 5
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    assert [leaf for leaf in iter_leaves(tensors) if not isinstance(leaf, torch.Tensor)] == [3, "b", 5, None]
    assert array.device.type == "cpu"


def test_batch_of_transformers_is_mapped():
    """BatchEncoding is not a dict, and ModelOutput is both a dict and a dataclass."""
    import transformers
    from transformers.modeling_outputs import BaseModelOutput

    batch = transformers.BatchEncoding({"input_ids": torch.ones(2)})
    output = BaseModelOutput(last_hidden_state=torch.ones(2))
    for value in (batch, output):
        tensors = map_tensors(value, lambda tensor: tensor.to("meta"))
        assert type(tensors) is type(value)
        assert [leaf.device.type for leaf in iter_leaves(tensors) if leaf is not None] == ["meta"]


def test_recursive_container_is_traversed_once():
    """An output may contain itself, because outputs are arbitrary."""
    circle: list = [torch.ones(1)]
    circle.append(circle)
    assert len(list(iter_leaves(circle))) == 1


def test_use_seed_repeats_numbers_and_restores_generators():
    """The generators of torch and Python give the same numbers in the block, and are restored even after an error."""
    before = torch.get_rng_state(), random.getstate()
    drawn = []

    def fail():
        with use_seed(5):
            drawn.append((torch.rand(1).item(), random.random()))  # noqa: S311 - what is drawn is the test
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
