"""A lock of a folder contains the settings and files that change the results of the same weights."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import companion_files, lock_file, run
from statecli.core.errors import BarePickle
from statecli.core.finding import Severity
from statecli.targets.target_result import TargetStatus

CONFIG = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 2}}
FILES = {
    "tokenizer.json": '{"model": {"vocab": {"a": 0}}}',
    "modeling_own.py": "ACTIVATION = 'gelu'\n",
    "merges.txt": "a b\n",
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "README.md": "words",
    "trainer_state.json": '{"global_step": 5}',
}


@pytest.fixture
def folder(tmp_path):
    """A model folder as `save_pretrained` writes it, with custom code."""
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def sentence_model(folder):
    """A model of sentence-transformers with modules in hidden folders, one of them behind a router."""
    for name in (".2_Dense", "deep/.3_Dense", ".4_Router/.query"):
        (folder / name).mkdir(parents=True)
        save_file({"linear.bias": torch.ones(2)}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text('{"out_features": 2}')
    (folder / ".5_Pooling").mkdir()
    (folder / ".5_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    router = {"types": {".query": "Dense"}, "structure": {"query": [".query"]}}
    (folder / ".4_Router" / "router_config.json").write_text(json.dumps(router))
    paths = ("", "1_Pooling", ".2_Dense", "./deep/.3_Dense/", ".4_Router", ".5_Pooling")
    (folder / "modules.json").write_text(json.dumps([{"idx": n, "path": path} for n, path in enumerate(paths)]))
    return folder


HIDDEN_MODULES = [".2_Dense", "deep/.3_Dense", ".4_Router/.query"]


def test_hidden_folders_of_modules_json_are_locked(sentence_model, tmp_path):
    """sentence-transformers loads these weights and settings, whatever the name of the folder is."""
    locked = lock(sentence_model, lock_file=str(tmp_path / "lock.json"))
    assert not audit_with_lock(sentence_model, locked, tmp_path / "lock.json", values=True).findings
    for name in HIDDEN_MODULES:
        save_file({"linear.bias": torch.full((2,), 666.0)}, sentence_model / name / "model.safetensors")
    for name in (*HIDDEN_MODULES, ".5_Pooling"):
        (sentence_model / name / "config.json").write_text('{"pooling_mode_mean_tokens": false}')
    findings = audit_with_lock(sentence_model, locked, tmp_path / "lock.json", values=True).findings
    assert {(finding.rule, finding.target) for finding in findings} == {
        *(("lock-mismatch", str(sentence_model / name)) for name in HIDDEN_MODULES),
        *(("settings-mismatch", str(sentence_model / name)) for name in HIDDEN_MODULES),
        ("settings-mismatch", str(sentence_model)),
    }


def test_a_pickle_in_a_hidden_folder_of_modules_json_is_audited(sentence_model):
    """Dense loads pytorch_model.bin if there is no safetensors file."""
    torch.save({"linear.bias": BarePickle}, sentence_model / ".2_Dense" / "pytorch_model.bin")
    (sentence_model / ".2_Dense" / "model.safetensors").unlink()
    result = audit(Request((str(sentence_model),)))
    assert "unknown-global" in {finding.rule for finding in result.findings}


@pytest.mark.parametrize("path", ["../other", "/other", "deep/../../other"])
def test_a_module_outside_of_the_folder_fails(sentence_model, path):
    """The audit does not read a module outside of the folder."""
    (sentence_model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": path}]))
    statuses = {result.target: result.status for result in audit(Request((str(sentence_model),))).targets}
    assert statuses[str(sentence_model)] is TargetStatus.FAILED


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"path": 1}]', "[" * 9999, "nothing", '[{"path": "away"}]'])
def test_invalid_modules_json_is_not_an_error(folder, text):
    """The loader reports such a modules.json."""
    (folder / "modules.json").write_text(text)
    assert {result.status for result in audit(Request((str(folder),))).targets} == {
        TargetStatus.AUDITED,
        TargetStatus.SKIPPED,
    }


def lock(*targets, **options):
    """Return the lock of the targets, as bytes."""
    request = run.Request(tuple(map(str, targets)), **options)
    return b"".join(lock_file.encode_lock(run.build_lock(run.read_targets(request), request)))


def audit_with_lock(target, locked, path, **options):
    """Return the audit of `target` against this lock."""
    path.write_bytes(locked)
    return audit(Request((str(target),), lock=lock_file.read_lock(str(path)), lock_file=str(path), **options))


def list_mismatches(result):
    """Return the messages of `settings-mismatch`, and check that each finding is an error with a help text."""
    findings = [finding for finding in result.findings if finding.rule == "settings-mismatch"]
    assert all(finding.severity is Severity.ERROR and finding.help for finding in findings)
    return [finding.message for finding in findings]


def test_an_unchanged_folder_matches_its_lock(folder, tmp_path):
    """Changed documents and training logs do not affect the model; settings are compared key by key, not as bytes."""
    locked = lock(folder)
    (folder / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    (folder / "README.md").write_text("other words")
    (folder / "trainer_state.json").write_text('{"global_step": 6}')
    result = audit_with_lock(folder, locked, tmp_path / "lock.json")
    assert list_mismatches(result) == []
    assert result.targets[0].not_checked == ()
    assert "settings-mismatch" in result.targets[0].ran


def test_files_compared_with_the_lock_do_not_count_as_unchecked(folder, tmp_path):
    """The verdict counts only files without a comparison: a document, a file missing from the lock, or all files."""
    locked = lock(folder)
    unseen = {f"{folder}/{name}" for name in ("README.md", "trainer_state.json", "new.txt")}
    (folder / "new.txt").write_text("x")

    def not_checked(**options):
        result = audit_with_lock(folder, locked, tmp_path / "lock.json", **options)
        return {target.target for target in result.targets if target.not_checked}

    assert not_checked() == unseen
    assert not_checked(weights_only=True) > unseen
    assert not_checked(ignore=("settings-mismatch",)) > unseen


def test_changed_added_and_removed_settings_are_named(folder, tmp_path):
    """No tensor shows the change of `rms_norm_eps` from 1e-06 to 0.1; a new key may change the model too."""
    locked = lock(folder)
    changed = {"rms_norm_eps": 0.1, "rope_scaling": {"factor": 4}, "hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps(changed))
    assert list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json")) == [
        'setting differs from the lock: config.architectures: removed: "LlamaForCausalLM"',
        "setting differs from the lock: config.rms_norm_eps: 1e-06 → 0.1",
        "setting differs from the lock: config.rope_scaling.factor: 2 → 4",
        'setting differs from the lock: config.hidden_act: added: "relu"',
    ]


def test_hidden_files_that_a_configuration_can_name_are_locked(folder):
    """`tokenizer_config.json` may name any file, and code may run any file; tools write and change the other files."""
    hidden = [".chat_template.JINJA", ".modeling_own.py", ".tokenizer.json", "code/.own.py"]
    (folder / "code").mkdir()
    for name in (*hidden, ".gitattributes", ".DS_Store", ".gitignore", ".msc", ".env"):
        (folder / name).write_text("x")
    names = companion_files.find_companion_files(str(folder))
    assert sorted(name for name in names if "/." in f"/{name}") == hidden


def test_changed_files_of_the_model_are_named(folder, tmp_path):
    """Tokenizer, code, vocabulary, and the settings of a stage in a subfolder."""
    locked = lock(folder)
    names = sorted(FILES.keys() - {"README.md", "trainer_state.json"})
    for name in names:
        (folder / name).write_text(FILES[name].replace("true", "false") + " ")
    messages = list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))
    assert [message.partition(": digest ")[0] for message in messages] == [
        f"{name}: content differs from the lock" for name in names
    ]


def test_a_new_and_a_missing_file_are_named(folder, tmp_path):
    """New code since the lock, a removed tokenizer, and removed settings."""
    locked = lock(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    (folder / "hook.py").write_text("import os\n")
    assert list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))[-3:] == [
        "config.json: in the lock but missing",
        "hook.py: not in the lock",
        "tokenizer.json: in the lock but missing",
    ]


def test_weights_only_leaves_settings_out_of_the_lock_and_of_the_comparison(folder, tmp_path):
    """The verdict of an audit against a lock of weights says that only tensors were compared."""
    full, weights = lock(folder), lock(folder, weights_only=True)
    assert b"rms_norm_eps" in full
    assert b"rms_norm_eps" not in weights
    assert b"files" not in weights
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 0.1}))
    assert list_mismatches(audit_with_lock(folder, full, tmp_path / "full.json", weights_only=True)) == []
    (entry,) = audit_with_lock(folder, weights, tmp_path / "weights.json").targets[0].not_checked
    assert "the lock has only tensors" in entry.why


def test_settings_inside_a_checkpoint_are_locked(tmp_path):
    """A .pt file with its configuration next to the state_dict, and no other file."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}, "config": {"eps": 1e-6, "ids": {"0": "cat"}}}, path)
    locked = lock(path)
    torch.save({"model": {"w": torch.ones(2)}, "config": {"eps": 0.1, "ids": {"0": "cat"}}}, path)
    assert list_mismatches(audit_with_lock(path, locked, tmp_path / "lock.json")) == [
        "setting differs from the lock: config.eps: 1e-06 → 0.1"
    ]


def test_setting_missing_from_a_lock_without_settings_is_counted(tmp_path):
    """The lock does not record the format of a file without settings, so the format may have changed."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}}, path)
    locked = lock(path)
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, path)
    result = audit_with_lock(path, locked, tmp_path / "lock.json")
    assert list_mismatches(result) == []
    (entry,) = result.targets[0].not_checked
    assert (entry.count, entry.why) == (1, "not compared, because the lock has no settings")


def test_lock_of_a_folder_matches_its_weight_file(folder, tmp_path):
    """The verdict counts the settings and files that a single file cannot have."""
    locked = lock(folder)
    actual = audit_with_lock(folder / "model.safetensors", locked, tmp_path / "lock.json")
    assert list_mismatches(actual) == []
    assert {entry.what for entry in actual.not_checked} == {"setting", "file"}


def test_a_lock_written_before_settings_were_locked_is_read(folder, tmp_path):
    """Only tensors are compared, and the verdict says so."""
    document = json.loads(lock(folder))
    for target in document["targets"]:
        del target["settings"], target["files"]
    result = audit_with_lock(folder, json.dumps(document).encode(), tmp_path / "lock.json")
    assert result.findings == ()
    assert len(result.targets[0].not_checked) == 1


def test_subfolder_with_weights_is_a_separate_target(folder, tmp_path):
    """A Trainer's `checkpoint-5` is a separate target."""
    inner = folder / "checkpoint-5"
    inner.mkdir()
    save_file({"w": torch.zeros(2, 2)}, inner / "model.safetensors")
    (inner / "config.json").write_text(json.dumps(CONFIG))
    locked = lock(folder, lock_file=str(tmp_path / "lock.json"))
    assert b"checkpoint-5/config.json" not in locked
    (inner / "config.json").write_text("{}")
    messages = list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))
    assert messages
    assert all("config" in message for message in messages)


def test_new_files_that_may_change_the_model_are_named(folder, tmp_path):
    """A new file counts whatever its suffix, because loaders accept more suffixes than any list contains."""
    locked = lock(folder)
    names = [
        *("requirements_model.py", "readme.py", "a/b/c/d/e/f.py", "__pycache__/modeling_own.cpython-311.pyc"),
        *("modeling_own.so", "vocab.bin.npy", "kernel.cu", "sentencepiece"),
        *("scheduler.py", "optimizer.py", "sampler_own.py", "scheduler_config.json", "random_states.py"),
    ]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    messages = list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))
    assert sorted(messages) == sorted(f"{name}: not in the lock" for name in names)


@pytest.mark.parametrize(
    "decoy",
    [
        lambda inner: (inner / "x.pt").mkdir(),
        lambda inner: (inner / "x.pt").symlink_to(".."),
        lambda inner: (inner / "scheduler.txt").write_text(""),
        lambda inner: save_file({"w": torch.ones(2, 2)}, inner / "x.safetensors"),
    ],
    ids=["folder", "link", "name", "weights"],
)
def test_decoy_weights_do_not_hide_code_next_to_them(folder, tmp_path, decoy):
    """Only a folder that the audit treats as a separate target is not part of the folder above."""
    locked = lock(folder)
    inner = folder / "custom_generate"
    inner.mkdir()
    (inner / "generate.py").write_text("x")
    decoy(inner)
    mismatches = list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))
    assert "custom_generate/generate.py: not in the lock" in mismatches


@pytest.mark.parametrize("name", ["linked", "__pycache__"])
def test_model_in_a_skipped_folder_does_not_hide_its_code(folder, tmp_path, name):
    """A walk skips links to folders and folders of tools, so the lock of the model must cover their files."""
    locked = lock(folder)
    inner = tmp_path / "out" if name == "linked" else folder / name
    inner.mkdir()
    save_file({"w": torch.ones(2, 2)}, inner / "model.safetensors")
    (inner / "own.py").write_text("x")
    if name == "linked":
        (folder / name).symlink_to(inner)
    assert list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json")) == [
        f"{name}/own.py: not in the lock"
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"l": ["X"]}', '{"l": "X"}'),
        ('{"l": 1}', '{"l": 1.0}'),
        ('{"l": 0.0}', '{"l": -0.0}'),
        ('{"l": 1, "l": 2}', '{"l": 3, "l": 2}'),
    ],
)
def test_a_setting_of_another_type_is_a_change(folder, tmp_path, before, after):
    """Loaders distinguish a list from its only word, an int from a float, and a repeated key from a single key."""
    (folder / "config.json").write_text(before)
    locked = lock(folder)
    (folder / "config.json").write_text(after)
    assert len(list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))) == 1


class Activated(torch.nn.Module):
    """A model of a weight and an activation; the activation is code."""

    def __init__(self, act):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.act = act

    def forward(self, x):
        """Use both."""
        return self.act(x * self.w)


def test_the_program_of_an_archive_is_locked(tmp_path):
    """TorchScript and torch.export archives: the same weights can belong to any code."""
    example = (torch.ones(2),)
    torch.jit.trace(Activated(torch.nn.ReLU()), example).save(tmp_path / "a.pt")
    torch.export.save(torch.export.export(Activated(torch.nn.ReLU()), example), tmp_path / "a.pt2")
    locks = {name: lock(tmp_path / name) for name in ("a.pt", "a.pt2")}
    assert [list_mismatches(audit_with_lock(tmp_path / name, locks[name], tmp_path / "l.json")) for name in locks] == [
        [],
        [],
    ]
    torch.jit.trace(Activated(torch.nn.Tanh()), example).save(tmp_path / "a.pt")
    torch.export.save(torch.export.export(Activated(torch.nn.Tanh()), example), tmp_path / "a.pt2")
    assert all(list_mismatches(audit_with_lock(tmp_path / name, locks[name], tmp_path / "l.json")) for name in locks)


def test_links_between_folders_are_followed_once(folder, tmp_path):
    """Sixty links to their own folder do not lead to 60 to the power of 16 folders."""
    (folder / "code").mkdir()
    (folder / "code" / "own.py").write_text("x")
    for number in range(60):
        (folder / "code" / f"l{number}").symlink_to(".")
    names = companion_files.find_companion_files(str(folder))
    assert names.count("code/own.py") == 1
    assert len(names) < 10


@pytest.fixture
def pipeline(tmp_path):
    """A pipeline as diffusers saves it: the scheduler and the tokenizer have no weights."""
    root = tmp_path / "pipeline"
    for component in ("unet", "vae"):
        (root / component).mkdir(parents=True)
        save_file({"w": torch.ones(2, 2)}, root / component / "diffusion_pytorch_model.safetensors")
        (root / component / "config.json").write_text('{"layers": 2}')
    texts = {
        "model_index.json": '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}',
        "scheduler/scheduler_config.json": '{"beta_start": 0.1}',
        "tokenizer/vocab.json": '{"a": 0}',
        "README.md": "words",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def test_an_unchanged_pipeline_matches_its_lock(pipeline, tmp_path):
    """The only file without a comparison is a document."""
    result = audit_with_lock(pipeline, lock(pipeline, lock_file=str(tmp_path / "lock.json")), tmp_path / "lock.json")
    assert list_mismatches(result) == []
    assert [target.target for target in result.targets if target.not_checked] == [f"{pipeline}/README.md"]


def test_the_command_locks_a_pipeline(pipeline, tmp_path, statecli):
    """The pipeline's folder is a target without a checkpoint, after the targets of its components."""
    lock_path = tmp_path / "lock.json"
    result = statecli("lock", pipeline, "-o", lock_path)
    assert (result.code, result.err) == (0, "")
    assert [len(target["tensors"]) for target in json.loads(lock_path.read_text())["targets"]] == [1, 1, 0]
    assert statecli("audit", pipeline, "--lock", lock_path).code == 0


def test_lock_of_a_pipeline_covers_files_outside_its_components(pipeline, tmp_path):
    """A changed file, a removed file, and a new file next to them."""
    names = ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json")
    locked = lock(pipeline, lock_file=str(tmp_path / "lock.json"))
    for name in names:
        (pipeline / name).write_text("{}")
    messages = list_mismatches(audit_with_lock(pipeline, locked, tmp_path / "lock.json"))
    assert [message.partition(" from the lock")[0] for message in messages] == [
        f"{name}: content differs" for name in names
    ]
    for name in names:
        (pipeline / name).rename(pipeline / f"{name}.py")
    assert sorted(list_mismatches(audit_with_lock(pipeline, locked, tmp_path / "lock.json"))) == sorted(
        message for name in names for message in (f"{name}: in the lock but missing", f"{name}.py: not in the lock")
    )


def test_only_the_pipeline_that_cannot_be_compared_fails(pipeline, tmp_path, monkeypatch):
    """The components are audited all the same."""
    locked = lock(pipeline, lock_file=str(tmp_path / "lock.json"))
    monkeypatch.setattr(companion_files, "MAX_FILES", 1)
    result = audit_with_lock(pipeline, locked, tmp_path / "lock.json")
    failed_targets = [target for target in result.targets if target.status is TargetStatus.FAILED]
    assert len(failed_targets) == 1
    assert "more than 1 files next to its weights" in failed_targets[0].reason
    assert sum(target.status is TargetStatus.AUDITED for target in result.targets) == 2


def test_a_glob_of_pipelines_reaches_their_files(pipeline, tmp_path):
    locked = lock(tmp_path / "pipe*", lock_file=str(tmp_path / "lock.json"))
    (pipeline / "tokenizer" / "vocab.json").write_text('{"a": 1}')
    assert len(list_mismatches(audit_with_lock(tmp_path / "pipe*", locked, tmp_path / "lock.json"))) == 1


def test_named_component_is_compared_without_its_pipeline(pipeline, tmp_path):
    locked = lock(pipeline, lock_file=str(tmp_path / "lock.json"))
    (pipeline / "tokenizer" / "vocab.json").write_text('{"a": 1}')
    assert list_mismatches(audit_with_lock(pipeline / "unet", locked, tmp_path / "lock.json")) == []
    only_weights = audit_with_lock(
        pipeline, lock(pipeline, lock_file=str(tmp_path / "lock.json"), weights_only=True), tmp_path / "lock.json"
    )
    assert list_mismatches(only_weights) == []
    assert list_mismatches(audit_with_lock(pipeline, locked, tmp_path / "lock.json", weights_only=True)) == []


def test_a_second_pipeline_is_not_in_the_lock_of_the_first(pipeline, tmp_path):
    locked = lock(pipeline, lock_file=str(tmp_path / "lock.json"))
    shutil.copytree(pipeline, tmp_path / "other")
    actual = list_mismatches(audit_with_lock(tmp_path, locked, tmp_path / "lock.json"))
    assert len([message for message in actual if message.endswith(": not in the lock")]) >= 3


def test_bare_pickle_is_locked_as_a_file(folder, tmp_path):
    (folder / "vocab.pkl").write_bytes(pickle.dumps({"a": 0}))
    locked = lock(folder)
    assert list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json")) == []
    (folder / "vocab.pkl").write_bytes(pickle.dumps({"a": 1}))
    (message,) = list_mismatches(audit_with_lock(folder, locked, tmp_path / "lock.json"))
    assert message.startswith("vocab.pkl: content differs")
    with pytest.raises(BarePickle, match="is a bare pickle"):
        lock(folder / "vocab.pkl")


def test_lock_in_the_locked_folder_is_not_a_file_of_the_model(statecli, in_tmp_path):
    """A lock is written again, and is compared with nothing."""
    Path("ck").mkdir()
    save_file({"w": torch.ones(2)}, "ck/model.safetensors")
    Path("ck/tokenizer.json").write_text('{"a": 1}')
    for _ in range(2):
        assert statecli("lock", "ck", "-o", "ck/statecli.lock").code == 0
    audited = statecli("audit", "ck", "--lock", "ck/statecli.lock")
    assert (audited.code, "ck/statecli.lock: is the lock of this audit" in audited.out) == (0, True)
    assert "not checked" not in audited.out
    Path("ck/statecli.lock.json").write_text('{"schema": "statecli.lock/1"}')
    assert "statecli.lock.json: not in the lock" in statecli("audit", "ck", "--lock", "ck/statecli.lock").out
