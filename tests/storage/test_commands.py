"""Every command over URLs: walks, globs, sections, locks, baselines, outputs, configurations; commands without URLs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.core.errors import UnreadableError
from statecli.storage import files, remote

from .server import Times

SECRET = "hunter2-hunter2"  # noqa: S105 - it opens nothing


@pytest.fixture(autouse=True)
def _empty_folder(monkeypatch, tmp_path):
    """Run each test in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def write_run(folder: Path, seed: int = 0, *, spoiled: bool = False) -> None:
    """Write a model's folder, and next to the model a training checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if spoiled:
        state["weight"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors")
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, folder / "train.ckpt")
    (folder / "config.json").write_text('{"architectures": ["Net"]}')


@pytest.fixture
def web(file_server):
    """Two runs behind a web server that lists its folders."""
    file_server.listing = "python"
    write_run(file_server.folder / "run-1")
    write_run(file_server.folder / "run-2", seed=1)
    return file_server


def list_targets(result) -> list[str]:
    return [target["target"] for target in result.json["targets"] if target["status"] != "skipped"]


# --- walks and globs


def test_audit_walks_a_folder(web, statecli):
    """An audit finds the models and the checkpoints next to them, as on disk; config.json is not a target.

    Each listing and each file is requested once.
    """
    root = web.url()
    result = statecli("audit", root, "-f", "json")
    assert result.code == 0
    assert list_targets(result) == [
        f"{root}run-{n}{rest}" for n in (1, 2) for rest in ("", "/train.ckpt")
    ]  # a model is named by its folder
    paths = [request.path for request in web.requests]
    assert sorted(paths) == sorted(set(paths))


def test_glob_matches_listed_names(web, bucket, statecli):
    """Names come from the server's or the bucket's listing, in natural order."""
    web.listing = "nginx"
    assert list_targets(statecli("audit", f"{web.url()}run-*/train.ckpt", "-f", "json")) == [
        f"{web.url()}run-{n}/train.ckpt" for n in (1, 2)
    ]
    for n in (1, 2, 10):
        write_run(web.folder / "runs" / f"step-{n}", seed=n)
    bucket.upload(web.folder / "runs")
    assert list_targets(statecli("audit", "s3://models/step-*/train.ckpt", "-f", "json")) == [
        f"s3://models/step-{n}/train.ckpt" for n in (1, 2, 10)
    ]


def test_glob_with_a_slash_matches_only_folders(web, bucket, statecli):
    """A glob with a slash at its end matches folders and no files, on a web server and in a bucket."""
    bucket.upload(web.folder)
    for root in (web.url(), bucket.url()):
        for glob in ("run-*/", "*[12]/"):
            result = statecli("audit", f"{root}{glob}", "-f", "json")
            assert (result.code, list_targets(result)[::2]) == (0, [f"{root}run-1/", f"{root}run-2/"])
        nothing = f"{root}run-1/model.*/"
        assert statecli("audit", nothing).err == f"statecli: {nothing}: no file matches this glob\n"


def test_glob_without_matches_or_listing_fails(web, statecli):
    """Both globs fail; the second message names a server that lists no folders."""
    nothing = f"{web.url()}none-*/m.pt"
    assert statecli("audit", nothing).err == f"statecli: {nothing}: no file matches this glob\n"
    files.forget_command()
    web.listing = None
    result = statecli("audit", f"{web.url()}run-*/model.safetensors")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "statecli cannot list the names in this folder for the glob" in result.err


def test_glob_of_hosts_is_refused():
    """A glob cannot match hosts, because hosts cannot be listed."""
    with pytest.raises(UnreadableError, match="a glob cannot match a host or a bucket: write the full name"):
        files.match_glob("s3://*/m.pt")


def test_fragment_selects_a_section_of_a_url(web, statecli):
    """`#optimizer` selects a section of a URL as of a file."""
    url = f"{web.url('run-1/train.ckpt')}#optimizer"
    result = statecli("inspect", url, "-f", "json").json
    assert (result["target"], {tensor["section"] for tensor in result["tensors"]}) == (url, {"optimizer"})
    assert "did you mean #optimizer?" in statecli("inspect", url[:-1]).err


# --- locks and references


def test_lock_of_urls_contains_the_urls(web, statecli):
    """A lock contains the URLs, works from any folder, and reports files that are gone from a folder behind a URL."""
    lock = Path("run.lock")
    assert statecli("lock", web.url(), "-o", lock).code == 0
    names = [target["target"] for target in json.loads(lock.read_text())["targets"]]
    assert names == [f"{web.url()}run-{n}{rest}" for n in (1, 2) for rest in ("", "/train.ckpt")]
    Path("deeper").mkdir()
    moved = Path("deeper") / lock
    lock.rename(moved)
    assert statecli("audit", web.url(), "--lock", moved).code == 0
    files.forget_command()
    (web.folder / "run-2" / "train.ckpt").unlink()
    result = statecli("audit", web.url(), "--lock", moved, "-f", "json")
    assert result.code == 1
    assert [(finding["rule"], finding["target"]) for finding in result.json["findings"]] == [
        ("lock-mismatch", f"{web.url()}run-2/train.ckpt")
    ]


def test_file_and_folder_with_the_same_name_are_both_audited(bucket, statecli, tmp_path):
    """A bucket can have a file and a folder with the same name; a disk cannot."""
    import boto3

    save_file({"w": torch.ones(2)}, tmp_path / "good.safetensors")
    save_file({"w": torch.full((2,), torch.nan)}, tmp_path / "bad.safetensors")
    client = boto3.client("s3")
    client.upload_file(str(tmp_path / "good.safetensors"), "models", "amb/m.safetensors")
    client.upload_file(str(tmp_path / "bad.safetensors"), "models", "amb/m.safetensors/model.safetensors")
    for target in ("s3://models/amb", "s3://models/amb/*", "s3://models/amb/**"):
        result = statecli("audit", target, "--values", "-f", "json")
        assert (result.code, {finding["rule"] for finding in result.json["findings"]}) == (1, {"nan"}), target


def test_audit_reads_or_reports_unusual_keys(bucket, statecli, tmp_path):
    """Keys whose folders are called `..` and `.` are audited; keys without a path are reported."""
    import boto3

    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    client = boto3.client("s3")
    for key in ("odd/m.safetensors", "odd/../up.safetensors", "odd/./dot.safetensors"):
        client.upload_file(str(tmp_path / "m.safetensors"), "models", key)
    client.put_object(Bucket="models", Key="odd/")
    result = statecli("audit", "s3://models/odd/", "-f", "json")
    assert result.code == 0
    reasons = {target["target"]: target.get("reason") for target in result.json["targets"]}
    assert reasons == {f"s3://models/odd/{name}.safetensors": None for name in ("m", "../up", "./dot")}
    client.upload_file(str(tmp_path / "m.safetensors"), "models", "odd//y.safetensors")
    result = statecli("audit", "s3://models/odd/")
    assert result.code == 2
    assert (
        "the folder may contain other files: statecli cannot read a file whose key contains two slashes (//)"
        in result.err
    )


def test_unreachable_server_with_a_lock_gives_a_single_line(statecli, tmp_path):
    """An audit prints a single line, although no folder above the target can be read."""
    (tmp_path / "one").mkdir()
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / "one" / f"{name}.safetensors")
    lock_result = statecli(
        "lock", f"{tmp_path}/one/a.safetensors", f"{tmp_path}/one/b.safetensors", "-o", "two.lock.json"
    )
    assert lock_result.code == 0
    result = statecli("audit", "http://127.0.0.1:1/here/net.pt", "--lock", "two.lock.json")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "cannot be reached" in result.err


def test_names_in_a_lock_are_relative_to_its_folder(web, statecli, monkeypatch):
    """The names in a lock are relative to the lock's own folder, even after the folder was copied elsewhere."""
    monkeypatch.chdir(web.folder)
    assert statecli("lock", "run-1", "run-2", "-o", "all.lock").code == 0
    monkeypatch.chdir(web.folder.parent)
    root = web.url()
    assert statecli("audit", f"{root}run-1", f"{root}run-2", "--lock", f"{root}all.lock").code == 0
    files.forget_command()
    write_run(web.folder / "run-2", seed=2)
    result = statecli("audit", f"{root}run-1", f"{root}run-2", "--lock", f"{root}all.lock", "-f", "json")
    assert {finding["target"] for finding in result.json["findings"]} == {f"{root}run-2", f"{root}run-2/train.ckpt"}


def test_lock_of_several_targets_does_not_match_copies(web, bucket, statecli, monkeypatch):
    """A lock of several targets does not match copies elsewhere; the suggested lock of a single target does."""
    bucket.upload(web.folder)
    monkeypatch.chdir(web.folder)
    local_targets, remote_targets = ["run-1", "run-2"], [bucket.url("run-1"), bucket.url("run-2")]
    for locked, audited in ((remote_targets, local_targets), (local_targets, remote_targets)):
        assert statecli("lock", *locked, "-o", "all.lock").code == 0
        result = statecli("audit", *audited, "--lock", "all.lock")
        assert result.code == 2
        expected_targets = [f"{run}{rest}" for run in audited for rest in ("", "/train.ckpt")]
        for line, target in zip(result.err.splitlines(), expected_targets, strict=True):
            assert line.startswith(f"statecli: {target}: is not in the lock, which has {locked[0][:-2]}")
            assert "lock this target alone, because a lock file with one target" in line
            assert "lock this target alone" in line
    bucket._client.upload_file("all.lock", bucket.name, "all.lock")
    assert (
        statecli("audit", *remote_targets, "--lock", bucket.url("all.lock")).code == 0
    )  # locked on disk, stored next to the copies
    assert statecli("lock", "run-1/model.safetensors", "-o", "one.lock").code == 0
    assert statecli("audit", bucket.url("run-1/model.safetensors"), "--lock", "one.lock").code == 0


def test_checkpoint_can_be_checked_against_a_url(web, statecli):
    """A checkpoint on disk is checked against a checkpoint behind a URL, and the other way round."""
    local = str(web.folder / "run-2" / "model.safetensors")
    url = web.url("run-1/model.safetensors")
    for args in ((local, "--against", url), (url, "--against", local)):
        assert statecli("audit", *args).code == 0


def test_url_is_compared_with_a_class(web, statecli):
    """A diff with a class, `--model` and the class of a config.json behind the URL."""
    Path("net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
    )
    url = web.url("run-1/model.safetensors")
    assert statecli("diff", url, "net.py:Net").code == 0
    assert statecli("audit", url, "--model", "net.py:Net").code == 0
    assert {
        row["evidence"] for row in statecli("inspect", url, "--model", "net.py:Net", "-f", "json").json["tensors"]
    } == {"registered"}


def test_model_auto_reads_the_configuration_of_a_url(web, statecli):
    """`--model auto` reads the config.json next to the weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 11,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    model.save_pretrained(web.folder / "bert")
    result = statecli("inspect", web.url("bert"), "--model", "auto", "-f", "json")
    assert result.code == 0
    assert {row["evidence"] for row in result.json["tensors"]} == {"registered"}
    missing = statecli("inspect", web.url("run-2/train.ckpt"), "--model", "auto")
    assert missing.code == 2
    assert missing.err.count("\n") == 1


# --- outputs and baselines


@pytest.fixture
def spoiled_url(file_server):
    """A checkpoint with a NaN, behind a signed URL."""
    write_run(file_server.folder / "run", spoiled=True)
    return file_server.url("run/model.safetensors") + f"?sig={SECRET}"


def test_github_annotates_no_file_for_a_url(spoiled_url, file_server, statecli):
    """GitHub cannot attach an annotation to a URL, so the message starts with the URL, which appears once."""
    masked_url = f"{file_server.url('run/model.safetensors')}?sig=…"
    out = statecli("audit", spoiled_url, "--values", "-f", "github").out
    assert "file=" not in out
    assert f"::error title=statecli nan::{masked_url}: weight: " in out
    missing_url = file_server.url("none.pt")
    assert (
        f"::error title=statecli cannot-read::{missing_url}: does not exist (HTTP 404)\n"
        in statecli("audit", missing_url, "-f", "github").out
    )


def test_sarif_has_the_url_as_its_location(spoiled_url, statecli):
    """The location has a URI and the byte range of the tensor."""
    run = statecli("audit", spoiled_url, "--values", "-f", "sarif").json["runs"][0]
    physical = run["results"][0]["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"]["uri"].startswith(spoiled_url.partition("?")[0])
    assert physical["artifactLocation"]["uri"].isascii()
    assert physical["region"]["byteLength"] == 24


def test_baseline_accepts_findings_of_a_url(spoiled_url, file_server, statecli):
    """A baseline names the masked URL; a fixed finding is reported, and a missing file is reported as missing."""
    args = ("audit", spoiled_url, "--values")
    assert statecli(*args, "--write-baseline", "known.json", "--reason", "known").code == 0
    baseline_text = Path("known.json").read_text()
    assert SECRET not in baseline_text
    assert json.loads(baseline_text)["findings"][0]["target"].startswith(spoiled_url.partition("?")[0])
    assert statecli(*args, "--baseline", "known.json").code == 0
    files.forget_command()
    write_run(file_server.folder / "run")
    assert "no longer has this finding; remove the entry" in statecli(*args, "--baseline", "known.json").err
    files.forget_command()
    (file_server.folder / "run" / "model.safetensors").unlink()
    missing = statecli(*args, "--baseline", "known.json")
    target = spoiled_url.replace(SECRET, "…")
    assert (missing.code, missing.err) == (2, f"statecli: {target}: does not exist (HTTP 404)\n")


@pytest.mark.parametrize(
    "option",
    [("-o", "{}"), ("--report", "json={}")],
)
@pytest.mark.parametrize("command", ["inspect", "audit"])
def test_url_as_output_is_refused(web, statecli, command, option):
    """A URL as the output of a command, or of a new lock or baseline, is refused in a single line before a request."""
    url = f"{web.url('out.json')}?sig={SECRET}"
    web.forget()
    lines = [
        statecli(command, web.url("run-1"), option[0], option[1].format(url)),
        statecli("lock", web.url("run-1"), "-o", url),
        statecli("audit", web.url("run-1"), "--write-baseline", url, "--reason", "x"),
    ]
    for result in lines:
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "statecli cannot write to a URL; write a local file and upload it" in result.err
        assert SECRET not in result.err
    assert not (web.folder / "out.json").exists()
    assert not web.requests


# --- configurations


def test_configuration_may_name_urls(web, statecli):
    """A lock, a reference and globs of targets may be URLs: none is resolved against the folder, and secrets are
    masked.
    """
    root = web.url()
    assert statecli("lock", f"{root}run-1", "-o", web.folder / "run.lock").code == 0
    Path("statecli.toml").write_text(
        f'lock = "{root}run.lock?sig={SECRET}"\n'
        f'[policy]\nreference = "{root}run-1/model.safetensors?sig={SECRET}"\n'
        f'[per-target-ignore."{root}run-1/*"]\nrules = ["pickles"]\nreason = "known"\n'
        '[per-target-ignore."s3://none/*"]\nrules = ["pickles"]\nreason = "known"\n'
    )
    result = statecli("audit", f"{root}run-1", "-f", "json")
    assert result.code == 0
    assert "per-target-ignore.s3://none/*: has no effect, because no target or file matches" in result.out + result.err
    assert f"per-target-ignore.{root}run-1/*: matches no target" not in result.out + result.err
    config_result = statecli("config", "-f", "json")
    assert SECRET not in result.out + result.err + config_result.out + config_result.err


def test_url_of_a_configuration_is_refused(web, statecli):
    """--config accepts no URL."""
    result = statecli("audit", web.url("run-1"), "--config", web.url("statecli.toml"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "copy the configuration to a local file" in result.err


def test_verify_refuses_a_checkpoint_of_a_url(web, statecli):
    """`verify` reports that the target is a checkpoint, behind a URL as on disk."""
    path, url = web.folder / "run-1" / "train.ckpt", web.url("run-1/train.ckpt")
    local_result, remote_result = (statecli("verify", target) for target in (path, url))
    assert (local_result.code, remote_result.code) == (2, 2)
    assert all("is a checkpoint; verify needs a model class" in run.err for run in (local_result, remote_result))


def test_typed_urls_are_requested_together(web, statecli):
    """Typed URLs are requested together, like the files of a walk: no target waits for an earlier target."""
    import threading

    together = threading.Barrier(3)
    for n in range(3):
        write_run(web.folder / f"typed-{n}", seed=n)

    def meet(request, reply):
        together.wait(30)

    web.behave("typed-*/model.safetensors", Times(3, meet))
    urls = [web.url(f"typed-{n}/model.safetensors") for n in range(3)]
    assert list_targets(statecli("audit", *urls, "-f", "json")) == urls


def test_only_the_last_files_stay_in_memory(web, monkeypatch, statecli):
    """A folder may contain a million files, so only the bytes of the last files stay in memory."""
    monkeypatch.setattr(remote, "MAX_KEPT_FILES", 2)
    for n in range(6):
        write_run(web.folder / f"many-{n}", seed=n)
    result = statecli("audit", *(web.url(f"many-{n}/model.safetensors") for n in range(6)), "-f", "json")
    assert result.code == 0
    kept_files = [file for file in remote.remote_store()._files.values() if file._cached_bytes]
    assert len(kept_files) <= 2
