"""The keys of a checkpoint by their state: files of torch.save, and folders."""

from __future__ import annotations

import pickle
import random

import pytest

torch = pytest.importorskip("torch")
import numpy  # noqa: E402

from statecli.commands.resume_check.result import State  # noqa: E402
from statecli.commands.resume_check.saved_keys import SavedKey, read_keys  # noqa: E402


@pytest.fixture(scope="module")
def objects():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    return {"m": model, "o": optimizer, "s": scheduler, "g": scaler}


def save(path, value):
    torch.save(value, path)
    return read_keys(str(path))


def list_expressions(keys):
    """The first key of each state as Python."""
    return {state: saved[0].expression for state, saved in keys.states.items()}


def test_states_of_torch_are_recognised_by_their_structure(tmp_path, objects):
    """The keys have one letter; only the model has no structure of its own."""
    keys = save(tmp_path / "a.pt", {name: thing.state_dict() for name, thing in objects.items()})
    assert list_expressions(keys) == {
        State.OPTIMIZER: "checkpoint['o']",
        State.SCHEDULER: "checkpoint['s']",
        State.SCALER: "checkpoint['g']",
    }
    assert [key.text for key in keys.others] == ["'m'"]
    assert keys.describe_lack("model", 2) == (
        "the checkpoint of step 2 has no model under a known key (other keys: 'm')"
    )


def test_generators_are_found_at_any_depth(tmp_path):
    """The expression is checked: its value is the state."""
    numbers = {
        "here": (torch.get_rng_state(), random.getstate()),
        "a.b": {"py": numpy.random.get_state(legacy=False), "c": {"gpu": [torch.zeros(16, dtype=torch.uint8)]}},
    }
    keys = save(tmp_path / "a.pt", numbers)
    expected = {
        "torch": numbers["here"][0],
        "random": numbers["here"][1],
        "numpy": numbers["a.b"]["py"],
        "cuda": numbers["a.b"]["c"]["gpu"],
    }
    assert keys.generators.keys() == expected.keys()
    for name, key in keys.generators.items():
        assert eval(key.expression, {"checkpoint": numbers}) is expected[name]  # noqa: S307 - our own text
    assert keys.find_vague_random() is None


def test_a_state_of_a_sampler_is_not_the_random_state(tmp_path):
    """The generator of the sampler has the same number of bytes as the random state."""
    keys = save(tmp_path / "a.pt", {"sampler": torch.get_rng_state(), "step": 3})
    assert keys.generators == {}
    assert keys.find_data(is_order=False) == SavedKey(("sampler",))


def test_a_random_state_in_an_unknown_form_is_named(tmp_path):
    """The name of the key is the only evidence."""
    keys = save(tmp_path / "a.pt", {"rng": torch.get_rng_state(), "random_numbers": "abc"})
    assert keys.find_vague_random() == SavedKey(("random_numbers",))


@pytest.mark.parametrize("name", ["metadata", "schema", "magnet", "options", "batch_size", "seed", "training_args"])
def test_parts_of_words_are_not_states(tmp_path, name):
    """`metadata` is not data, `schema` not an average, `seed` not a random state."""
    assert save(tmp_path / "a.pt", {name: [1], "t": torch.zeros(1)}).states == {}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("optimizer_state_dict", State.OPTIMIZER),
        ("lr_schedulers", State.SCHEDULER),
        ("modelEma", State.AVERAGE),
        ("optG", State.OPTIMIZER),
        ("global_step", State.STEP),
        ("net", State.MODEL),
        ("dataloader", State.DATA),
    ],
)
def test_key_names_a_single_state(tmp_path, name, state):
    """An optimizer is not a model, although its key ends with state_dict."""
    assert [*save(tmp_path / "a.pt", {name: [1], "t": torch.zeros(1)}).states] == [state]


def test_the_key_with_the_name_of_the_variable_is_preferred(tmp_path):
    """Two optimizers of a GAN."""
    keys = save(tmp_path / "a.pt", {"opt_d": [1], "opt_g": [2], "t": torch.zeros(1)})
    assert keys.find(State.OPTIMIZER, "self.opt_g", ["self.opt_d"]) == (SavedKey(("opt_g",)),)


def test_each_key_of_a_state_may_belong_to_an_object_of_another_name(tmp_path):
    """The keys of a GAN are not the names of its variables; a single optimizer has the first key."""
    keys = save(tmp_path / "a.pt", {"optD": [1], "optG": [2], "t": torch.zeros(1)})
    both = SavedKey(("optD",)), SavedKey(("optG",))
    assert keys.find(State.OPTIMIZER, "generator_optimizer", ["critic_optimizer"]) == both
    assert keys.find(State.OPTIMIZER, "optimizer") == both[:1]


def test_a_file_that_is_a_state_dict_has_a_model(tmp_path, objects):
    """The keys of the file are the names of the tensors."""
    keys = save(tmp_path / "a.pt", {**torch.nn.Sequential(objects["m"]).state_dict(), "step": 3})
    (key,) = keys.states[State.MODEL]
    assert (key.text, key.expression) == ("a state_dict", "checkpoint")
    assert keys.others == ()


def test_unreadable_file_makes_a_missing_state_unknown(tmp_path):
    """statecli reads no bare pickle, so the message does not claim a missing state."""
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"rng": random.getstate()}))
    assert read_keys(str(path)).describe_lack("step number", 2) == (
        "statecli cannot read the checkpoint of step 2, and does not know whether the file has the step number"
    )


def test_files_of_a_folder_are_states(tmp_path, objects):
    """A file is known by its name; another file by its keys; a file of random numbers by its values."""
    torch.save(objects["o"].state_dict(), tmp_path / "optimizer.pt")
    torch.save(numpy.random.get_state(), tmp_path / "rng_state.pth")
    torch.save({"s": objects["s"].state_dict(), "odd": [1], "t": torch.zeros(1)}, tmp_path / "rest.pt")
    torch.save({"cpu": torch.get_rng_state(), "python": random.getstate()}, tmp_path / "random_states.pkl")
    (tmp_path / "README.md").write_text("text")
    keys = read_keys(str(tmp_path))
    texts = {state: [key.text for key in saved] for state, saved in keys.states.items()}
    assert texts == {
        State.OPTIMIZER: ["'optimizer.pt'"],
        State.SCHEDULER: ["'s' in rest.pt"],
        State.RANDOM: ["'random_states.pkl'", "'rng_state.pth'"],
    }
    assert [key.text for key in keys.generators.values()] == [
        "'cpu' in random_states.pkl",
        "'python' in random_states.pkl",
        "'rng_state.pth'",
    ]
    assert [key.text for key in keys.others] == ["'t' in rest.pt", "'odd' in rest.pt"]
