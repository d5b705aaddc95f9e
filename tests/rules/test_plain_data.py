"""Plain data that torch.load returns by default and a loader turns into harm. The real loaders run here as well."""

from __future__ import annotations

import copyreg
import io
import random
import struct
import time
import zipfile
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, deque
from pathlib import Path, PosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity
from statecli.file_scan.scan import scan_pickles
from statecli.pickle_scan import texts_as_code
from statecli.pickle_scan.step_budget import Budget
from statecli.targets.target_result import TargetStatus

from ..formats.attacks import Call

TABLE = list(range(624))
#: A state of torch's generator: bytes of a seed, then `left`, `seeded` and `next`.
LEFT_SEEDED_NEXT = struct.Struct("<iiQ")


@pytest.fixture
def messages(run_rule, tmp_path):
    """`messages(data)`: messages of unsafe-data for an archive of the data, which torch.load accepts."""

    def list_unsafe_data(data, *, severity=Severity.ERROR, weights_only=True):
        path = tmp_path / "archive.pt"
        torch.save(data, path)
        torch.load(path, weights_only=weights_only)
        findings = run_rule("unsafe-data", path)
        assert {finding.severity for finding in findings} <= {severity}
        return [finding.message for finding in findings]

    return list_unsafe_data


@pytest.fixture
def list_unsafe_data():
    """`judge(path)`: findings of unsafe-data for a file, even for a failed file with a call as a key."""

    def run(path):
        (target,) = audit(Request((str(path),), select=("unsafe-data",))).targets
        if target.status is TargetStatus.FAILED:
            assert "a dictionary key is the result of calling" in target.reason
        return target.findings

    return run


# Positions in the tables of numpy's generators.

NUMPY_STATES = {
    "far": ("MT19937", TABLE, 2**30, 0, 0.0),
    "negative": ("MT19937", TABLE, -5),
    "just-outside": ["MT19937", TABLE, 625, 0, 0.0],
    "float": ("MT19937", TABLE, 1e9, 0, 0.0),
    "tensor": ("MT19937", TABLE, torch.tensor(2**20), 0, 0.0),
    "dict": {"bit_generator": "MT19937", "state": {"key": TABLE, "pos": 10_000}},
    "ordered-dict": OrderedDict(bit_generator="MT19937", state=OrderedDict(key=TABLE, pos=-1)),
}


@pytest.mark.parametrize("state", NUMPY_STATES.values(), ids=NUMPY_STATES)
def test_unsafe_data_finds_positions_that_numpy_does_not_check(messages, state):
    """numpy accepts the state, and would read memory outside its table with the next draw."""
    (message,) = messages({"w": torch.ones(1), "numpy": state})
    assert message.startswith("['numpy']: the position of a numpy random generator is ")
    assert message.endswith("the next random draw reads memory outside the table (archive/data.pkl)")
    np.random.RandomState(0).set_state(state)


@pytest.mark.parametrize("name", [np.array("MT19937"), np.array(["MT19937"], "U9"), np.array(["MT19937"], object)])
def test_unsafe_data_finds_states_whose_name_is_in_an_array(messages, name):
    """Trainers let torch.load build arrays, and numpy compares the elements of an array with the name."""
    state = (name, TABLE, -1)
    np.random.RandomState(0).set_state(state)
    (message,) = messages({"numpy": state, "data": (np.array(["a", "b"]), TABLE, -1)}, weights_only=False)
    assert message.startswith("['numpy']: the position of a numpy random generator is -1")


def test_unsafe_data_finds_positions_in_a_record(messages):
    """numpy looks up the position in any object with keys."""
    record = np.zeros((), [("key", "u4", 624), ("pos", "i8")])
    record["pos"] = -1
    state = {"bit_generator": "MT19937", "state": record}
    np.random.RandomState(0).set_state(state)
    (message,) = messages({"numpy": state}, weights_only=False)
    assert message.startswith("['numpy']: the state of a numpy random generator is an object, not a dict")


def test_unsafe_data_finds_positions_in_the_buffer_of_philox(messages):
    """Philox reads a number from its buffer for each position below 4, even for a negative position."""
    state = dict(np.random.Philox(1).state, buffer_pos=-3, buffer=[0] * 4, state={"counter": [0] * 4, "key": [0] * 2})
    (message,) = messages({"rng": [state]})
    assert message.startswith("['rng'][0]: the position of a numpy random generator is -3, but its table has 4 numbers")
    np.random.Philox(1).state = state


def test_unsafe_data_finds_a_state_as_the_whole_file(messages):
    """A state saved by itself is not under a key."""
    assert messages(("MT19937", TABLE, -1, 0, 0.0))[0].startswith("the position of a numpy random generator is -1")
    assert messages((2, ("%9d",) * 625, None))[0].startswith("the saved state of Python's random module")


def test_unsafe_data_spares_states_of_generators(messages):
    """States written by the libraries, unchanged and as lists, and values that only look like states."""
    version, numbers, following = random.getstate()
    honest = {
        "numpy": np.random.get_state(),
        "legacy": np.random.get_state(legacy=False),
        "bits": [kind(1).state for kind in (np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64)],
        "position": ("MT19937", TABLE, np.int64(624), 0, 0.0),
        "python": (version, numbers, following),
        "python_list": [version, list(numbers), following],
        "random_state": (2, numbers, 0.5),
        "layers": (2, ("relu", "tanh"), 0.1),
        "words": ("MT19937", "is a generator"),
        "torch": torch.get_rng_state(),
        "cuda": [torch.zeros(16, dtype=torch.uint8)],
    }
    assert not messages(honest, weights_only=False)


# States of Python's generator.

PYTHON_STATES = {
    "text": ("python", (2, ("%5d",) * 625, None)),
    "one-text": ("mine", [2, ["%5d", *[1] * 624], None]),
    "bytes": ("mine", (2.0, (b"%5d",) * 3, None)),
    "bytearrays": ("mine", (2.0, (bytearray(b"%5d"),) * 3, None)),
    "lists": ("random_state", (2, ([1],) * 625, None)),
}


@pytest.mark.parametrize(("key", "state"), PYTHON_STATES.values(), ids=PYTHON_STATES)
def test_unsafe_data_finds_texts_that_setstate_formats(messages, key, state):
    """Version 2 computes `value % 2**32` before a check of the length and the types of the values."""
    (message,) = messages({key: state})
    assert message.startswith(f"[{key!r}]: the saved state of Python's random module has values that are not integers")
    with pytest.raises((TypeError, ValueError)):
        random.Random(1).setstate(state)  # noqa: S311


def test_python_refuses_invalid_states_of_version_3():
    """A state of version 3 is not a finding, because Python computes only with integers."""
    for numbers in [("%5d",) * 625, (1,) * 624 + (700,), (1,) * 62]:
        with pytest.raises((TypeError, ValueError)):
            random.Random(1).setstate((3, numbers, None))  # noqa: S311


# States of torch's generator.


def build_generator_state(unused_count, next_position, seeded=1):
    """Return the state of a CPU generator with the given numbers."""
    state = bytearray(torch.Generator().get_state().numpy().tobytes())
    LEFT_SEEDED_NEXT.pack_into(state, 8, unused_count, seeded, next_position)
    return torch.frombuffer(state, dtype=torch.uint8).clone()


@pytest.mark.parametrize(
    ("unused_count", "next_position", "seeded"), [(624, 624, 1), (2, 624, 1), (624, 2, 256), (600, 2**32 + 600, 1)]
)
def test_unsafe_data_finds_states_that_torch_overreads(messages, unused_count, next_position, seeded):
    """torch accepts the state: `left` and `next` are checked separately, and only the lower half of `next` is read."""
    state = build_generator_state(unused_count, next_position, seeded)
    torch.Generator().set_state(state)
    (message,) = messages({"cpu": state.reshape(8, -1)})
    assert message.startswith(
        f"cpu: the state of a torch generator claims {unused_count} unused numbers from position "
    )


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625])
def test_unsafe_data_spares_a_generator_after_any_number_of_draws(messages, draws):
    """From the first draw on, the two numbers add up to 625."""
    generator = torch.Generator().manual_seed(5)
    torch.randint(0, 9, (draws,), generator=generator)
    assert not messages({"torch": generator.get_state(), "mask": torch.ones(5056, dtype=torch.uint8)})


def test_torch_refuses_states_that_the_rule_spares():
    """torch refuses a number outside of the table, so the number is not a finding."""
    for unused_count, next_position, seeded in [(0, 5, 1), (-3, 5, 1), (625, 1, 1), (1, 625, 1), (624, 624, 0)]:
        with pytest.raises(RuntimeError, match="Invalid mt19937 state"):
            torch.Generator().set_state(build_generator_state(unused_count, next_position, seeded))


# Metadata of a state_dict.


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("section", [None, "model"])
def test_unsafe_data_finds_a_flag_that_replaces_parameters(messages, section):
    """An optimizer created before the load trains parameters that are no longer in the model."""
    state = build_model().state_dict()
    state._metadata["0"]["assign_to_params_buffers"] = 1
    (message,) = messages(state if section is None else {section: state})
    assert message.startswith("_metadata['0']['assign_to_params_buffers'] is set, so load_state_dict replaces")
    loaded = build_model()
    before = loaded[0].weight
    loaded.load_state_dict(state)
    assert loaded[0].weight is not before


def test_unsafe_data_notes_metadata_that_torch_does_not_write(messages):
    """A module's own code may read the key."""
    state = build_model().state_dict()
    state._metadata["1"]["codec"] = "mine"
    (message,) = messages(state, severity=Severity.NOTE)
    assert message.startswith("the state_dict's _metadata has 'codec', which torch does not write")


def test_unsafe_data_spares_metadata_of_torch(messages):
    """Versions, also of spectral_norm, and the flag as left by DeepSpeed in transformers."""
    state = build_model().state_dict()
    state._metadata["0"]["assign_to_params_buffers"] = False
    assert not messages({"model": state, "_metadata": {"": {"assign_to_params_buffers": True}}})


# Paths of Lightning's ModelCheckpoint.

HARMFUL_PATHS = [
    "http://host/best.ckpt",
    "https://user:word@host/best.ckpt",
    "local:///home/me",
    "LOCAL:///home/me",
    "simplecache::http://host/x",
    "s3::local:///home/me",
    "file:///home/me",
    "../src",
    "checkpoints/../../src",
    "downloads/d::x/victim",
    "~/victim",
    "~me",
    "file:/home/me",
    "local:/home/me",
]
HARMLESS_PATHS = ["", "/runs/best.ckpt", "runs/epoch=1-a..b.ckpt", "C:\\runs\\best.ckpt", "/runs/a:b.ckpt"]


def build_checkpoint(state):
    return {"state_dict": {"w": torch.ones(1)}, "callbacks": {"ModelCheckpoint{'monitor': None}": state}}


@pytest.mark.parametrize(
    ("key", "path"),
    [
        *(("best_model_path", path) for path in HARMFUL_PATHS),
        *(
            (key, path)
            for key in ("last_model_path", "kth_best_model_path", "best_k_models")
            for path in HARMFUL_PATHS[1:3]
        ),
    ],
)
def test_unsafe_data_finds_paths_that_lightning_opens_or_removes(messages, key, path):
    """The message shows no text of a URL, because a URL may contain a password."""
    (message,) = messages(build_checkpoint({key: {path: torch.tensor(1.0)} if key == "best_k_models" else path}))
    assert key in message
    assert "Lightning downloads" in message if path.startswith("http") else "Lightning deletes" in message
    assert "word" not in message


def test_unsafe_data_finds_the_path_of_old_lightning(messages):
    """Lightning moves the path to the state of the callback on load."""
    (message,) = messages({"state_dict": {}, "checkpoint_callback_best_model_path": "http://host/x"})
    assert message.startswith("['checkpoint_callback_best_model_path'] is a URL (http://…)")


@pytest.mark.parametrize("path", HARMLESS_PATHS)
def test_unsafe_data_spares_plain_paths(messages, path):
    """Lightning removes plain paths only in the folder named by the user. URLs in hyperparameters are settings."""
    data = build_checkpoint({"best_model_path": path, "dirpath": "/runs", "best_k_models": {path: torch.tensor(1.0)}})
    assert not messages({**data, "hyper_parameters": {"best_model_path": "http://host/x", "data": "local::x"}})


@pytest.mark.parametrize("scheme", ["s3", "gs", "abfs", "hdfs", "memory"])
def test_unsafe_data_notes_paths_in_a_store(messages, scheme):
    """Users keep checkpoints in remote stores, and Lightning removes checkpoints from the stores."""
    (message,) = messages(build_checkpoint({"best_model_path": f"{scheme}://bucket/best.ckpt"}), severity=Severity.NOTE)
    assert f"is a remote path ({scheme})" in message


@pytest.mark.parametrize("path", [*HARMFUL_PATHS, *HARMLESS_PATHS[1:]])
def test_lightning_removes_only_harmful_paths(path, tmp_path, monkeypatch):
    """Lightning's own decision for a callback with the current folder as target and a path from a file."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints" if path.startswith("checkpoints") else tmp_path
    saving = callbacks.ModelCheckpoint(dirpath=folder)
    saving.load_state_dict({"best_model_path": path, "best_model_score": None, "dirpath": None})
    trainer = SimpleNamespace(ckpt_path=None)
    removes = saving._should_remove_checkpoint(trainer, saving.best_model_path, str(folder / "new.ckpt"))
    within = path.startswith(("runs/", "C:"))  # on POSIX, files in the user's own folder
    assert removes is (path in HARMFUL_PATHS or within)


# Paths of MMEngine's CheckpointHook.


def list_runtime_info_findings(run_rule, tmp_path, info):
    torch.save({"state_dict": {}, "message_hub": {"runtime_info": info}}, tmp_path / "epoch_1.pth")
    return [(finding.severity, finding.message) for finding in run_rule("unsafe-data", tmp_path / "epoch_1.pth")]


@pytest.mark.parametrize(
    ("path", "severity"),
    [
        ("/home/me/work/best_acc_epoch_3.pth", Severity.NOTE),
        ("best_acc_epoch_3.pth", Severity.NOTE),
        ("/home/me", Severity.WARNING),
        ("C:\\Users\\me", Severity.WARNING),
        ("s3://bucket/model", Severity.WARNING),
        ("/work/best_x.pth/..", Severity.ERROR),
        ("../best_acc.pth", Severity.ERROR),
    ],
)
def test_unsafe_data_finds_paths_that_mmengine_removes(run_rule, tmp_path, path, severity):
    """A name in the style of MMEngine gives a note, because every checkpoint with a best score has such a name."""
    for key in ("best_ckpt", "best_ckpt_coco/bbox_mAP"):
        ((actual_severity, message),) = list_runtime_info_findings(run_rule, tmp_path, {key: path, "cfg": CONFIG})
        assert actual_severity is severity
        assert "MMEngine deletes this path" in message


def test_unsafe_data_finds_steps_that_mmengine_turns_into_paths(run_rule, tmp_path):
    """MMEngine writes a number into the name of each kept checkpoint."""
    texts = ([3, "/../../victim"], deque(["a/../../b"]), UserList([Path("../x")]))
    objects = ({0: "1.pth/../../victim", 1: 2}, OrderedDict({0: "a/../b"}), [b"a"], [[1]], UserList([1]), "12", 3)
    for steps in (*texts, *objects):
        ((severity, message),) = list_runtime_info_findings(run_rule, tmp_path, {"keep_ckpt_ids": steps})
        assert severity is Severity.ERROR
        assert "MMEngine builds a path from each element and deletes" in message
    for steps in ([1, 2], deque([1], 3), [], (1,), [np.int64(1)], None):
        info = {"keep_ckpt_ids": steps, "best_score": 0.5, "best_ckpt": None, "best_ckpt_epoch": 3}
        assert not list_runtime_info_findings(run_rule, tmp_path, info)


@pytest.mark.parametrize(
    "path", [b"/home/me", np.bytes_(b"/home/me"), bytearray(b"x"), ["/home/me"], {"path": "/home/me"}, UserString("/x")]
)
def test_unsafe_data_finds_paths_that_are_not_texts(run_rule, tmp_path, path):
    """Python removes a folder whose path is bytes, but statecli checks only texts."""
    ((severity, message),) = list_runtime_info_findings(run_rule, tmp_path, {"best_ckpt": path})
    assert severity is Severity.ERROR
    assert "is neither a string nor a path, so statecli cannot check which file MMEngine deletes" in message


@pytest.mark.parametrize(
    ("path", "severity"),
    [
        ("./work_dirs/x/best_bbox_mAP_epoch_12.pth", Severity.NOTE),
        ("/home/me/precious.txt", Severity.WARNING),
        ("/work/../best_mAP.pth", Severity.ERROR),
        (b"/home/me/precious.txt", Severity.ERROR),
    ],
)
@pytest.mark.parametrize("kind", [dict, UserDict, lambda items: [*items.items()]])
def test_unsafe_data_finds_the_path_that_mmcv_removes(run_rule, tmp_path, kind, path, severity):
    """The EvalHook of MMCV 1 deletes the file when a better checkpoint is saved. `dict.update` accepts pairs too."""
    messages = kind({"best_ckpt": path})
    torch.save({"state_dict": {}, "meta": {"epoch": 1, "hook_msgs": messages}}, tmp_path / "epoch_1.pth")
    (finding,) = run_rule("unsafe-data", tmp_path / "epoch_1.pth")
    assert finding.severity is severity
    assert "MMCV deletes" in finding.message
    torch.save({"meta": {"hook_msgs": {"best_score": 0.5, "last_ckpt": path}}}, tmp_path / "epoch_1.pth")
    assert not run_rule("unsafe-data", tmp_path / "epoch_1.pth")


# Objects that loaders take for texts and dicts.

CALLS_CODE = "model = dict(type='os.system')\n"
TEXT_LIKE = {
    "numpy text": lambda text: np.str_(text),
    "object in a scalar": lambda text: Call(np._core.multiarray.scalar, np.dtype("O"), text),
    "text with a version": torch.torch_version.TorchVersion,
    "text of Python": lambda text: Call(str, np.str_(text)),
    "user's text": UserString,
    "reconstructed": lambda text: Call(copyreg._reconstructor, np.str_, str, text),
}
DICT_LIKE = {
    "user's dict": UserDict,
    "user's dict in a user's dict": lambda items: nest_user_dict(items),
    "chain": lambda items: ChainMap({}, UserDict(items)),
    "call of a dict": lambda items: Call(UserDict, items),
    "dict of a dict": lambda items: Call(OrderedDict, Call(UserDict, items)),
    "object in a scalar": lambda items: Call(np._core.multiarray.scalar, np.dtype("O"), items),
}


def nest_user_dict(items):
    """Return a UserDict around a UserDict. Python's constructor would copy the inner dict."""
    outer = UserDict()
    outer.data = UserDict(items)
    return outer


@pytest.mark.parametrize("kind", TEXT_LIKE.values(), ids=TEXT_LIKE)
@pytest.mark.parametrize("place", ["value", "key"])
def test_unsafe_data_reads_subclasses_of_text(list_unsafe_data, tmp_path, kind, place):
    """A loader finds `runtime_info` at an equal key, and writes any subclass of str to a file."""
    key = kind("runtime_info") if place == "key" else "runtime_info"
    value = kind(CALLS_CODE) if place == "value" else CALLS_CODE
    torch.save({"message_hub": {key: {"cfg": value}}}, tmp_path / "a.pth")
    assert any("os.system" in finding.message for finding in list_unsafe_data(tmp_path / "a.pth"))


@pytest.mark.parametrize("kind", DICT_LIKE.values(), ids=DICT_LIKE)
def test_unsafe_data_searches_objects_that_behave_like_dicts(run_rule, tmp_path, kind):
    """The objects are below a key that a loader looks up."""
    for data in (
        {"runtime_info": kind({"cfg": CALLS_CODE})},
        kind({"runtime_info": kind({"cfg": CALLS_CODE})}),
        {"callbacks": kind({"a": kind({"best_model_path": "../x"})})},
        {"milestones": kind({3: 10**9}), "gamma": 2},
    ):
        torch.save(data, tmp_path / "a.pth")
        assert any(finding.severity is Severity.ERROR for finding in run_rule("unsafe-data", tmp_path / "a.pth"))


@pytest.mark.parametrize("place", ["cfg", "path", "class_path", "key"])
def test_unsafe_data_finds_texts_that_the_pickle_computes(list_unsafe_data, save_checkpoint, place):
    """A call in the pickle decodes bytes to a text."""
    text = Call(str, b"../x", "utf-8")
    data = {
        "cfg": {"meta": {"cfg": text}},
        "path": {"callbacks": {"a": {"best_model_path": text}}},
        "class_path": {"hyper_parameters": {"act": {"class_path": text}}},
        "key": {text: 1},
    }
    (finding,) = list_unsafe_data(save_checkpoint(data[place], "a.pth"))
    assert finding.severity is Severity.ERROR
    assert "is a string that the pickle computes during loading" in finding.message


def test_unsafe_data_reads_paths_of_any_spelling(run_rule, tmp_path):
    """Lightning takes the text of a path."""

    class SlotPath(PosixPath):
        def __reduce__(self):
            return PosixPath, (), (None, {"_raw_paths": ["../x"]})

    for path in (PosixPath("../x"), Call(PosixPath, "..", np.str_("x")), SlotPath("x")):
        torch.save(build_checkpoint({"last_model_path": path}), tmp_path / "a.ckpt")
        assert [finding.severity for finding in run_rule("unsafe-data", tmp_path / "a.ckpt")] == [Severity.ERROR]
    for path in (PosixPath("/runs/x"), PosixPath("x/y")):
        torch.save(build_checkpoint({"last_model_path": path, "best_model_path": PosixPath()}), tmp_path / "a.ckpt")
        assert not run_rule("unsafe-data", tmp_path / "a.ckpt")


def test_unsafe_data_spares_objects_with_plain_data(run_rule, tmp_path):
    """Texts of numpy as keys, a UserDict of settings."""
    data = {np.str_("meta"): UserDict(cfg=np.str_(CONFIG)), np.int64(1): np.str_("a"), "v": torch.__version__}
    torch.save({**data, "names": np.array(["a", "b"]), "chain": ChainMap({"a": 1})}, tmp_path / "a.pth")
    assert not run_rule("unsafe-data", tmp_path / "a.pth")


def add_path(value):
    """Return the object with an attribute `path`. fsspec uses the attribute as the path of any object except a text."""
    value.path = "/home/me"
    return value


NOT_PATHS = {
    "dict": OrderedDict([("a::b", 1)]),
    "dict with a path": add_path(OrderedDict([("a::b", 1)])),
    "error with a path": add_path(ValueError("local:///x")),
    "user's text with a path": add_path(UserString("/runs/x")),
    "user's text in a text": Call(UserString, add_path(UserString("/runs/x"))),
    "object in a scalar": Call(np._core.multiarray.scalar, np.dtype("O"), add_path(UserString("/runs/x"))),
    "bytes": b"/home/me",
    "list": ["/home/me"],
    "number": 3,
}


@pytest.mark.parametrize("value", NOT_PATHS.values(), ids=NOT_PATHS)
def test_unsafe_data_finds_objects_as_paths_of_lightning(list_unsafe_data, tmp_path, value):
    """fsspec deletes the attribute `path`, and Lightning looks at the text of the object."""
    states = [{"last_model_path": value}]
    if value.__hash__:
        states.append({"best_k_models": {value: 1.0}})
    for state in states:
        torch.save(build_checkpoint(state), tmp_path / "a.ckpt")
        (finding,) = (finding for finding in list_unsafe_data(tmp_path / "a.ckpt") if "callbacks" in finding.message)
        assert finding.severity is Severity.ERROR
        assert (
            "is neither a string nor a path, so statecli cannot check which file Lightning opens and deletes"
            in finding.message
        )


def test_unsafe_data_reads_paths_that_are_keys(run_rule, tmp_path):
    """The keys are paths of pathlib and texts of numpy."""
    for path, count in ((PosixPath("~/me"), 1), (np.str_("~/me"), 1), (PosixPath("/runs/x"), 0), (np.str_("x"), 0)):
        torch.save(build_checkpoint({"best_k_models": {path: 1.0}, "best_model_path": path}), tmp_path / "a.ckpt")
        assert len(run_rule("unsafe-data", tmp_path / "a.ckpt")) == 2 * count


@pytest.mark.parametrize("shared", [True, False])
def test_long_paths_are_hazards_and_count_as_steps(tmp_path, monkeypatch, shared):
    """A state shared by many callbacks is checked once. Many separate states exceed the budget."""
    state = dict.fromkeys(("last_model_path", "best_model_path", "kth_best_model_path"), "a" * 10_000)
    states = {f"c{index}": state if shared else dict(state) for index in range(100)}
    torch.save({"state_dict": {}, "callbacks": states}, tmp_path / "a.ckpt")
    monkeypatch.setattr(Budget.TEXT, "limit", 100_000)
    (pickle,) = scan_pickles(str(tmp_path / "a.ckpt"))
    assert ("code tokens" in (pickle.unread or "")) is not shared
    if shared:
        assert len(pickle.hazards) == 3
        assert "has 10,000 characters, more than a path can have" in pickle.hazards[0].text


# Archives that torch.hub unpacks.


@pytest.mark.parametrize(
    ("file", "record", "count"),
    [
        ("weights.npz", "arr_0.npy", 0),
        ("weights.npz", "resnet50-0676ba61.pth", 1),
        ("weights.npz", "arr_0.npy.pth", 1),
        ("weights.npz", "resnet.pth\0.npy", 1),
        ("weights.pth", "arr_0.npy", 1),
    ],
)
def test_archive_of_one_record_is_reported_unless_numpy_writes_it(run_rule, tmp_path, file, record, count):
    """torch.hub unpacks the record over a file of the same name, for any name of the archive."""
    entry = zipfile.ZipInfo(record)
    entry.filename, entry.orig_filename = record, record  # zipfile itself writes no NUL
    entry.comment = b".npy"
    array = io.BytesIO()
    np.save(array, np.arange(4.0))
    with zipfile.ZipFile(tmp_path / file, "w") as archive:
        archive.writestr(entry, array.getvalue())
    findings = run_rule("unsafe-data", tmp_path / file)
    assert [record.partition("\0")[0] in finding.message for finding in findings] == [True] * count


# Powers of integers.


def train_optimizer(kind, **options):
    """An optimizer after a step."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = kind([weight], **options)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options", "change"),
    [
        (torch.optim.AdamW, {}, {"betas": (0.9, 7)}),
        (torch.optim.NAdam, {}, {"betas": [7, 7]}),
        (torch.optim.ASGD, {}, {"alpha": 10**9, "lambd": 1, "lr": 1}),
    ],
)
def test_unsafe_data_finds_integers_that_an_optimizer_raises_to_a_power(messages, kind, options, change):
    """load_state_dict takes the numbers; a step would compute 7**step exactly."""
    optimizer = train_optimizer(kind, **options)
    state = optimizer.state_dict()
    state["param_groups"][0].update(change)
    optimizer.load_state_dict(state)
    actual_messages = messages({"optimizer": state})
    assert actual_messages[0].startswith("['optimizer']['param_groups'][0]['")
    assert "may compute a power with this number for hours" in actual_messages[0]


def test_unsafe_data_finds_milestones_that_a_scheduler_raises_to_a_power(messages):
    """A step at the milestone would compute 7**(10**9)."""
    scheduler = torch.optim.lr_scheduler.MultiStepLR(train_optimizer(torch.optim.SGD), [5])
    state = {**scheduler.state_dict(), "gamma": 7, "milestones": {5: 10**9}}
    scheduler.load_state_dict(state)
    (message,) = messages({"lr_schedulers": [state]})
    assert message.startswith("['lr_schedulers'][0]['milestones']: a count is above 1000")


def test_unsafe_data_spares_optimizers_and_schedulers(messages):
    """Floats, betas of 0 and 1 (accepted by older releases of torch), and a milestone named twice."""
    kinds = (torch.optim.Adam, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.RAdam)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(train_optimizer(torch.optim.SGD), [5, 5, 9], gamma=2)
    states = [train_optimizer(kind).state_dict() for kind in kinds]
    states[0]["param_groups"][0]["betas"] = (0, 1)
    data = {"optimizers": states, "scheduler": scheduler.state_dict(), "config": {"betas": (7, 7), "alpha": 2048}}
    assert not messages(data, weights_only=False)


# The walk.


def test_shared_and_cyclic_containers_are_checked_once(messages):
    """Each container is checked once, under its first path, even if the container contains itself."""
    state = ("MT19937", TABLE, -1)
    cyclic = [state, state]
    cyclic.append(cyclic)
    assert len(messages({"a": cyclic, "b": cyclic}, weights_only=False)) == 1


REFERENCE_COUNT = 400
SHARED = dict.fromkeys(map(str, range(REFERENCE_COUNT)), 1)
SHARED_LIST = list(SHARED)
SHARING = {
    "callbacks": lambda: {"callbacks": SHARED},
    "best_k_models": lambda: {"callbacks": {"a": {"best_k_models": SHARED}}},
    "betas": lambda: {"params": 1, "betas": SHARED_LIST},
    "milestones": lambda: {"milestones": SHARED},
}


@pytest.mark.parametrize("build_container", SHARING.values(), ids=SHARING)
def test_shared_container_ends_the_scan_at_the_budget(tmp_path, monkeypatch, build_container):
    """A shared container is walked once for each reference, so the work must end at the budget."""
    torch.save([build_container() for _ in range(REFERENCE_COUNT)], tmp_path / "a.pt")
    monkeypatch.setattr(Budget.FLOW, "limit", 100_000)
    (pickle,) = scan_pickles(str(tmp_path / "a.pt"))
    assert "values to check" in pickle.unread


def test_messages_are_printable_and_truncated(messages):
    """Keys and paths come from the file: messages escape them and truncate long texts."""
    state, long_text = ("MT19937", TABLE, -1), "k" * 400
    data = {
        ".\x1b[31m": [state],
        long_text: {long_text: state},
        (long_text,): [state],
        "callbacks": {long_text: {"best_model_path": ""}},
    }
    data["callbacks"][long_text]["last_model_path"] = f"{long_text}://\x1b"
    actual_messages = messages(data)
    assert len(actual_messages) == 2  # a state in three places, and a path
    assert all(message.isprintable() and len(message) < 700 for message in actual_messages)
    (message,) = messages({".\x1b[31m": [state]})
    assert message.startswith("['.\\x1b[31m'][0]: the position of a numpy random generator")


def test_states_in_attributes_and_arguments_are_found(messages):
    """The message gives the path of the value."""
    data = OrderedDict(a=1)
    data.state = [("MT19937", TABLE, -1)]
    assert messages({"x": data}, weights_only=False)[0].startswith("['x'].__state__['state'][0]: the position")


def test_plain_data_in_a_separate_pickle_is_checked(run_rule, tmp_path, save_checkpoint):
    """The pickle is a file of its own, or a string in another pickle."""
    import pickle

    inner = pickle.dumps({"numpy": ("MT19937", TABLE, -1)}, 2)
    (tmp_path / "a.pkl").write_bytes(inner)
    (finding,) = run_rule("unsafe-data", tmp_path / "a.pkl")
    assert finding.message.startswith("['numpy']: the position of a numpy random generator is -1")
    (finding,) = run_rule("unsafe-data", save_checkpoint({"w": torch.ones(1), "extra": inner}))
    assert "the string at byte" in finding.message


def test_legacy_files_are_checked(run_rule, save_checkpoint):
    """The same data in the format of torch.save before 1.6."""
    path = save_checkpoint({"numpy": ("MT19937", TABLE, -1)}, _use_new_zipfile_serialization=False)
    assert len(run_rule("unsafe-data", path)) == 1


# Texts that a loader imports, calls or runs.

INSTANTIATED_CLASS = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"act": INSTANTIATED_CLASS},
        {"a": [{"b": (INSTANTIATED_CLASS,)}]},
        {"act.class_path": "os.system"},
        {"_class_path": "subprocess.run"},
        {"_instantiator": "os.system"},
    ],
    ids=["plain", "deep", "dotted", "its own class", "instantiator"],
)
def test_unsafe_data_finds_classes_that_lightning_calls(hyperparameters, messages):
    """jsonargparse calls the name of an argument without a type; Lightning before 2.6.6 any instantiator."""
    (message,) = messages({"state_dict": {}, "hyper_parameters": hyperparameters})
    assert "import" in message
    assert " and calls" in message


def test_unsafe_data_finds_hyperparameters_under_two_keys(messages):
    """The walk reaches a shared dict by another key first."""
    shared = {"act": INSTANTIATED_CLASS}
    (message,) = messages({"hyper_parameters": shared, "a": shared, "z": [shared]})
    assert message.startswith("['hyper_parameters']…['class_path'] is os.system, which LightningCLI imports and calls")


def test_unsafe_data_warns_of_unknown_classes(messages):
    """Classes of a user give a warning. Layers and optimizers of torch only compute."""
    harmless = {"class_path": "torch.nn.ReLU"}, {"class_path": "torch.optim.lr_scheduler.StepLR"}
    instantiator = "lightning.pytorch.cli.instantiate_module"
    assert messages({"hyper_parameters": {"_instantiator": instantiator, "a": harmless}}) == []
    unknown = {"hyper_parameters": {"net": {"class_path": "mine.Net"}}}
    (message,) = messages(unknown, severity=Severity.WARNING)
    assert (
        "is mine.Net, which LightningCLI imports and calls; statecli does not know whether this name is safe"
    ) in message
    assert messages({"other": INSTANTIATED_CLASS}) == []


INSTANTIATED = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "torch.nn.ReLU"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("downloads.encoder.Encoder", "is downloads.encoder.Encoder, which LightningCLI imports and calls"),
        ("[downloads.encoder.Encoder, torch.nn.ReLU]", "is downloads.encoder.Encoder, which LightningCLI imports"),
        ("- downloads.encoder.Encoder\n", "is downloads.encoder.Encoder, which LightningCLI imports"),
        ('["downloads.encoder\\x2eEncoder"]', "may be hidden by backslash escapes"),
    ],
)
def test_unsafe_data_warns_of_texts_that_lightning_may_call(messages, text, reason):
    """jsonargparse imports a text for an argument that takes an object, in the hyperparameters of LightningCLI."""
    for value in (text, [text], {"a": text}, np.str_(text)):
        hyperparameters = {**INSTANTIATED, "encoder": value}
        (message,) = messages({"hyper_parameters": hyperparameters}, severity=Severity.WARNING, weights_only=False)
        assert reason in message
    assert not messages({"hyper_parameters": {"encoder": text}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "downloads/encoder.yaml",
            "is 'downloads/encoder.yaml', the path of a configuration file; LightningCLI may import",
        ),
        ("[encoder.YML]", "is 'encoder.YML', the path of a configuration file; LightningCLI may import"),
        ("encoder.json", "is 'encoder.json', the path of a configuration file; LightningCLI may import"),
        ("train.csv", "is train.csv, which LightningCLI imports and calls for an argument that takes an object"),
    ],
)
def test_unsafe_data_notes_files_that_lightning_may_read(messages, text, reason):
    """Honest hyperparameters have texts of this form, so the finding does not fail a gate."""
    hyperparameters = {**INSTANTIATED, "data": text}
    (message,) = messages({"hyper_parameters": hyperparameters}, severity=Severity.NOTE, weights_only=False)
    assert reason in message
    assert not messages({"hyper_parameters": {"data": text}})


def test_unsafe_data_finds_a_harmful_text_that_lightning_may_call(messages):
    """A known harmful name is an error, and so is a text that statecli cannot read."""
    (message,) = messages({"hyper_parameters": {**INSTANTIATED, "act": "os.system"}})
    assert "is os.system, which LightningCLI imports and calls for an argument that takes an object" in message
    computed = {"hyper_parameters": {**INSTANTIATED, "act": Call(str, b"a.b", "utf-8")}}
    (message,) = messages(computed, weights_only=False)
    assert message.startswith("['hyper_parameters']…['act'] is a string that the pickle computes during loading")


def test_tuple_of_arguments_is_checked_as_a_hyperparameter(run_rule, tmp_path):
    """The walk reaches the tuple by the call first or last."""
    arguments = ("downloads.encoder.Encoder",)
    call = Call(np.str_)
    call.call = np.str_, arguments
    for order in ({"a": call, "b": arguments}, {"b": arguments, "a": call}):
        torch.save({"hyper_parameters": {**INSTANTIATED, **order}}, tmp_path / "a.ckpt")
        assert any(
            "['hyper_parameters']…[0] is" in finding.message for finding in run_rule("unsafe-data", tmp_path / "a.ckpt")
        )


def test_unsafe_data_spares_texts_that_lightning_does_not_import(messages):
    """Classes and dtypes of torch, versions, numbers, paths and prose pass."""
    texts = ["torch.nn.ReLU", "torch.optim.Adam", "torch.bfloat16", "2.6.6", "1e-3", "cuda:0", "/data/x.tar", "relu"]
    texts += ["A net. It has 3 layers: see the paper.", "[1, 2.5]", "https://host/a.b", "a.b-c", "", ".", "..x"]
    assert not messages({"hyper_parameters": {**INSTANTIATED, "texts": texts}})


def test_shared_hyperparameters_are_read_once(tmp_path, monkeypatch):
    """Shared hyperparameters are read once. Many separate hyperparameters exceed the budget."""
    text = "a" * 10_000
    for shared in (True, False):
        hyperparameters = {"a": text}
        data = [{"hparams": hyperparameters if shared else dict(hyperparameters)} for _ in range(100)]
        torch.save(data, tmp_path / "a.pt")
        monkeypatch.setattr(Budget.TEXT, "limit", 100_000)
        (pickle,) = scan_pickles(str(tmp_path / "a.pt"))
        assert ("code tokens" in (pickle.unread or "")) is not shared


CONFIG = "model = dict(type='X', layers=[1, -2, 3.5e-05], norm=None)\ndefault_scope = 'mmengine'\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__import__('os').system('touch PWNED')\n" + CONFIG, "has code other than assignments of plain values"),
        ("a = (lambda: 0)()", "has code other than assignments of plain values"),
        ("dict = exec\na = dict('1')", "has code other than assignments of plain values"),
        ("_base_ = ['/tmp/evil.py']", "has code other than assignments of plain values"),
        ("custom_imports = dict(imports=['antigravity'])", "has code other than assignments of plain values"),
        ("a = '{{$X:\\'}}'", "cannot check"),
        ("a" + "\u0315\u0300" * 10_000 + " = 1", "cannot check"),
        ("a = ", "is not valid Python code"),
        ("(" * 1000, "is not valid Python code"),
    ],
)
def test_unsafe_data_finds_configurations_that_mmengine_runs(text, reason, messages):
    """Each text has code, or statecli cannot check the text."""
    (message,) = messages({"state_dict": {}, "meta": {"cfg": text}})
    assert reason in message
    assert message.partition(" (archive")[0].endswith("MMEngine runs the string as Python code")


def test_unsafe_data_finds_configurations_under_each_key_of_mmengine(messages):
    """MMEngine reads configurations from three places. A configuration of plain values passes."""
    for text, count in (("a = (lambda: 0)()", 1), (CONFIG, 0)):
        places = {"message_hub": {"runtime_info": {"cfg": text}}}, {"meta": {"cfg": text}}, {"meta": {"config": text}}
        assert [len(messages({"state_dict": {}, **place})) for place in places] == [count] * 3


def test_unsafe_data_finds_a_dtype_that_hqq_evaluates(run_rule, tmp_path):
    """The file has no pickle: the letters are a tensor."""
    for letters, count in (("torch.float32", 0), ("__import__('os').system('id') or torch.float32", 1), ("x" * 100, 1)):
        for dtype in (torch.uint8, torch.int64):
            numbers = torch.tensor([*map(ord, letters)], dtype=dtype)
            state = {"0.W_q": torch.ones(2), "0.compute_dtype": numbers, "0.dtype": numbers.clone()}
            save_file(state, tmp_path / "model.safetensors")
            assert len(run_rule("unsafe-data", tmp_path / "model.safetensors")) == count


SPREAD_OUT = {
    "sparse": lambda letters: letters.to_sparse(),
    "nested": lambda letters: torch.nested.nested_tensor([*letters.split(1)]),
    "jagged": lambda letters: torch.nested.nested_tensor([*letters.split(1)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("spread", SPREAD_OUT.values(), ids=SPREAD_OUT)
def test_unsafe_data_finds_a_dtype_in_a_tensor_that_is_not_dense(spread, run_rule, tmp_path, save_checkpoint):
    """HQQ iterates over any tensor, but statecli reads the letters only of a dense tensor. Floats have no letters."""
    letters = spread(torch.tensor([*b"__import__('os').system('id')"], dtype=torch.uint8))
    torch.save({"0.W_q": torch.ones(2), "0.compute_dtype": letters, "0.bias": letters}, tmp_path / "a.pt")
    (finding,) = run_rule("unsafe-data", tmp_path / "a.pt")
    assert finding.severity is Severity.ERROR
    assert finding.message.startswith("0.compute_dtype stores a string as character codes, which statecli cannot read")
    assert not run_rule("unsafe-data", save_checkpoint({"0.compute_dtype": torch.ones(3)}))


def test_unsafe_data_finds_a_text_with_a_class_path(messages):
    """jsonargparse parses texts as YAML. Lightning reads module_arguments of its first releases."""
    text = '{"class_path": "os.system", "init_args": {"command": "touch PWNED"}}'
    for hyperparameters in ({"act": text}, {"acts": [text]}):
        (message,) = messages({"hyper_parameters": hyperparameters})
        assert message.startswith(
            "['hyper_parameters'] is a string with a class_path, and LightningCLI imports and calls the class"
        )
    (message,) = messages({"hyper_parameters": {"act": text.replace("class", "\\x63lass")}})
    assert message.startswith(
        "['hyper_parameters'] is a string with backslash escapes (such as \\x63), which may hide a class_path that "
        "LightningCLI imports"
    )
    (message,) = messages({"module_arguments": {"act": INSTANTIATED_CLASS}})
    assert "is os.system" in message


@pytest.mark.parametrize(
    "name", ["torch.nn.parallel.distributed.logging.FileHandler", "torch.optim.adam.torch.hub.load", "torch.nn.Path"]
)
def test_unsafe_data_allows_only_listed_classes(name, run_rule, save_checkpoint):
    """A module has all its imports as attributes."""
    (finding,) = run_rule("unsafe-data", save_checkpoint({"hyper_parameters": {"a": {"class_path": name}}}, "a.ckpt"))
    assert finding.severity in (Severity.ERROR, Severity.WARNING)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("model = dict(type='subprocess.check_call', args=['id'])", Severity.ERROR),
        ("model = {'type': 'os.system'}", Severity.ERROR),
        ("model = dict(backbone=[dict(type='mine.Net')])", Severity.WARNING),
        ("model = dict(type='mmengine.utils.package_utils.call_command')", Severity.WARNING),
        ("model = dict(type='mmap.mmap')", Severity.ERROR),
        ("model = dict(type='mmap.Net')", Severity.ERROR),
        ("model = dict(type='mmengine.MMLogger', log_file='/home/me/x')", Severity.WARNING),
        ("model = dict(type='mmengine.MemcachedBackend', sys_path='downloads')", Severity.WARNING),
        ("model = dict(type='mmcv.FileClient', backend='memcached')", Severity.WARNING),
        ("model = dict(type='mmlib.Net')", Severity.WARNING),
        ("model = dict(type='antigravity')", Severity.WARNING),
        ("default_scope = 'downloads'", Severity.WARNING),
        ("default_scope = x = 'downloads'", Severity.WARNING),
        ("model = dict(type='ResNet', _scope_='downloads')", Severity.WARNING),
        ("t = 'os.system'\nmodel = dict(type=t)", Severity.WARNING),
        ("model = dict([('type', 'os.system')])", Severity.ERROR),
        ("k = 'type'\nmodel = {k: 'os.system'}", Severity.ERROR),
        ("model = dict(**{'type': 'os.system'})", Severity.ERROR),
    ],
)
def test_unsafe_data_finds_modules_that_mmengine_looks_up(text, severity, run_rule, save_checkpoint):
    """MMEngine looks up the name at `type` as a module if no registry has the name."""
    (finding,) = run_rule("unsafe-data", save_checkpoint({"meta": {"cfg": text}}, "a.pth"))
    assert finding.severity is severity


def test_unsafe_data_spares_names_in_registries_of_openmmlab(messages):
    """Names of MMEngine, MMCV and MMDetection, and a name without a module."""
    for name in ("mmdet.ResNet", "mmengine.SGD", "mmengine.CheckpointHook", "mmcv.LoadImageFromFile", "nms"):
        cfg = f"a = dict(type='{name}', act=dict(type='ReLU', _scope_='mmdet'))\ndefault_scope = None\n"
        assert not messages({"meta": {"cfg": cfg}})


def test_names_inside_a_list_are_checked(run_rule, tmp_path):
    """In a list, the name of a dtype (evaluated by HQQ) or of a state (unpickled by modules) ends in a subscript."""
    letters = torch.tensor([*b"__import__('os').system('id')"], dtype=torch.uint8)
    torch.save({"net": [{"0.W_q": torch.ones(2), "0.compute_dtype": letters}]}, tmp_path / "a.pt")
    assert len(run_rule("unsafe-data", tmp_path / "a.pt")) == 1
    state = torch.tensor([*b"N0cposix\nsystem\n(Vid\ntR."], dtype=torch.uint8)
    torch.save({"net": [{"l.weight": torch.ones(2), "l._extra_state": state}]}, tmp_path / "b.pt")
    assert [finding.rule for finding in run_rule("unsafe-global", tmp_path / "b.pt")] == ["unsafe-global"]


@pytest.mark.parametrize(
    "kind", [list, tuple, bytes, bytearray, torch.Size, dict.fromkeys, OrderedDict.fromkeys, Counter]
)
def test_a_dtype_that_hqq_evaluates_may_be_numbers(kind, messages):
    """HQQ joins the elements of any value, not only of a tensor."""
    letters = b"__import__('os').system('id') or torch.float32"
    (message,) = messages({"net": {"0.compute_dtype": kind(letters)}}, weights_only=kind is not bytes)
    assert message.startswith("['net']['0.compute_dtype'] is not the name of a dtype; HQQ evaluates the value")
    assert messages({"0.compute_dtype": kind(b"torch.float16"), "dtype": kind(letters)}, weights_only=False) == []
    assert messages({"compute_dtype": {"a": 1}}) == []


LETTERS = torch.tensor([*b"__import__('os').system('id')"], dtype=torch.uint8)
#: Ways in which a loader gets the letters as the value of `compute_dtype`.
HIDDEN_PAIRS = {
    "a pair that is a dict": Call(OrderedDict, [("w", 1), {"0.compute_dtype": 0, LETTERS: 0}]),
    "a pair that is an OrderedDict": Call(OrderedDict, [("w", 1), OrderedDict([("0.compute_dtype", 0), (LETTERS, 0)])]),
    "a pair that is a Counter": Call(OrderedDict, [("w", 1), Counter({"0.compute_dtype": 1, LETTERS: 1})]),
    "a pair of a tuple": Call(OrderedDict, [("w", 1), {"0.compute_dtype": 0, tuple(LETTERS.tolist()): 0}]),
    "a pair that is a set": Call(OrderedDict, [{"0.compute_dtype", tuple(LETTERS.tolist())}]),
    "a set of pairs": Call(OrderedDict, {("0.compute_dtype", "a"), ("0.compute_dtype", tuple(LETTERS.tolist()))}),
    "tensors as keys": {"0.compute_dtype": dict.fromkeys(LETTERS, 0)},
    "a storage": {"0.compute_dtype": LETTERS.untyped_storage()},
    "a set": {"0.compute_dtype": {1, 2}},
}


@pytest.mark.parametrize("name", HIDDEN_PAIRS)
def test_pairs_hidden_in_the_argument_of_a_dict_do_not_pass(name, save_checkpoint, statecli):
    """A dict takes keys of dicts and elements of sets for pairs; HQQ reads keys and storages as letters."""
    result = statecli("audit", save_checkpoint(HIDDEN_PAIRS[name]), "--no-config")
    assert result.code == 1, result.out
    assert ("HQQ" if name in ("tensors as keys", "a storage", "a set") else "cannot") in result.out


def test_dtypes_pass(messages):
    """Libraries save a dtype, its name, a dtype of numpy, None, or options by name."""
    for value in (torch.float16, "float16", np.dtype("float32"), None, {"a": 1}, torch.tensor([*b"torch.half"])):
        assert not messages({"compute_dtype": value}, weights_only=False), value


@pytest.mark.parametrize("unit", [":", "{", "\\", "\\a"])
def test_a_long_text_in_hyperparameters_is_read_once(unit):
    """A search from each character to the end of the text would take minutes."""
    begin = time.process_time()
    texts_as_code.check_text("text", unit * 300_000)
    assert time.process_time() - begin < 2
