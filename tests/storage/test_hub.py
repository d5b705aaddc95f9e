"""The Hugging Face Hub: a single commit per command, bytes by ranges, and the messages for users without access."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.storage import files
from statecli.storage.hub import HubPath, _parse_places

from .hub import SIGNATURE
from .server import After, Headers, Refuse, Times, login_page

pytest.importorskip("huggingface_hub")
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"  # noqa: S105 - of nobody


@pytest.fixture
def net(hub):
    """A hub with a repository and another revision of the repository."""
    write_checkpoint(hub.folder / "org" / "net", torch.ones(4))
    (hub.folder / "org" / "net" / "config.json").write_text('{"architectures": ["Net"]}')
    write_checkpoint(hub.folder / "org" / "net@v1", torch.zeros(4))
    return hub


def write_checkpoint(folder: Path, tensor: torch.Tensor, name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": tensor}, folder / name)


def read_refusal(statecli, url: str) -> str:
    """Return the message for a refused URL: a single line that starts with the URL."""
    result = statecli("inspect", url)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"statecli: {url}: ")
    return result.err.removeprefix(f"statecli: {url}: ").rstrip("\n")


def test_file_takes_a_commit_and_a_range_request(net, statecli):
    """statecli asks the hub for the commit of `main`, and the CDN for the first bytes; without a login, no token is
    sent.
    """
    assert statecli("inspect", "hf://org/net/model.safetensors").code == 0
    commit = net.commit("org/net")
    assert [request.path for request in net.requests] == [
        "api/models/org/net/revision/main",
        f"org/net/resolve/{commit}/model.safetensors",
    ]
    assert [request.range for request in net.cdn.requests] == ["bytes=0-65535"]
    assert all("authorization" not in request.headers for request in net.requests)


def test_all_files_are_read_at_the_same_commit(net, statecli):
    """Files that somebody pushes during a command are read by the next command only."""
    result = statecli("inspect", "hf://org/net")
    assert result.code == 0
    revisions = [request.path for request in net.requests if "/revision/" in request.path]
    assert revisions == ["api/models/org/net/revision/main"]
    rest = [request.path for request in net.requests if "/revision/" not in request.path]
    assert rest
    assert all(net.commit("org/net") in path for path in rest)


def test_audit_of_a_repository_requests_each_file_once(net, statecli):
    """Two calls of the API, and the beginning of each file once: the numbers of docs/explanation/scale.md."""
    for name in ("README.md", "tokenizer.json"):
        (net.folder / "org" / "net" / name).write_text("{}")
    assert statecli("audit", "hf://org/net").code == 0
    paths = [request.path for request in net.requests]
    assert sum(path.startswith("api/") for path in paths) == 2
    files = sorted(path.rpartition("/")[2] for path in paths if not path.startswith("api/"))
    assert files == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("revision", ["v1", "commit"])
def test_revision_is_selected_by_name_or_commit(net, statecli, revision):
    """A revision is selected by its name or its commit; a diff of two revisions reads two commits."""
    revision = net.commit("org/net", "v1") if revision == "commit" else revision
    url = f"hf://org/net@{revision}"
    assert statecli("inspect", f"{url}/model.safetensors", "--stats", "-f", "json").rows()["w"]["stats"]["max"] == 0
    differ = statecli("diff", url, "hf://org/net", "-f", "json").json
    assert [change["values"]["changed"] for change in differ["changes"]] == [4]


def test_dataset_repository_is_read(net, statecli):
    """`hf://datasets/…`: the whole repository, and a single file."""
    write_checkpoint(net.folder / "datasets" / "org" / "data", torch.ones(3))
    for url in ("hf://datasets/org/data", "hf://datasets/org/data@main/model.safetensors"):
        assert statecli("inspect", url, "-f", "json").rows()["w"]["shape"] == [3]


def test_all_pages_of_a_listing_are_read(net, statecli):
    """The hub's Link header leads to the next page of a listing."""
    from .server import Reply

    def page_reply(request, reply):
        if "cursor" not in request.query and reply.status == 200:
            reply.headers["Link"] = f'<{net.url(request.path)}?cursor=2>; rel="next"'
            reply.body = b'[{"type": "file", "path": "model.safetensors", "size": 1}]'
        elif reply.status == 200:
            reply.become(Reply(200, {"Content-Type": "application/json"}, b'[{"type": "directory", "path": "deep"}]'))

    commit = net.commit("org/net")
    net.behave(f"api/models/org/net/tree/{commit}", page_reply)
    result = statecli("audit", "hf://org/net", "-f", "json").json
    assert [target["target"] for target in result["targets"]] == ["hf://org/net", "hf://org/net/deep"]


@pytest.mark.parametrize(
    ("page", "line"),
    [
        (b"{}", "the hub's listing is not a list of files"),
        (b'{"error": "busy"}', "the hub's listing is not a list of files"),
        (b'["evil.pkl"]', "the hub's listing is not a list of files"),
        (
            b'[{"type": "file", "path": "evil.pkl"}, {"type": "directory", "path": "evil.pkl"}]',
            "lists one name both as a file and as a folder",
        ),
    ],
)
def test_invalid_page_of_a_listing_fails(net, statecli, page, line):
    """An invalid page must not pass for an empty page, which would hide the files on the page."""
    from .server import Reply

    where = f"api/models/org/net/tree/{net.commit('org/net')}"

    def page_reply(request, reply):
        if "cursor" in request.query:
            reply.become(Reply(200, {"Content-Type": "application/json"}, page))
        else:
            reply.headers["Link"] = f'<{net.url(where)}?cursor=2>; rel="next"'

    net.behave(where, page_reply)
    result = statecli("audit", "hf://org/net")
    assert (result.code, line in result.err) == (2, True)


@pytest.mark.parametrize("next_page", ["http://127.0.0.1:9/", "itself"])
def test_listing_with_an_invalid_next_page_is_refused(net, statecli, monkeypatch, next_page):
    """The token would reach the other host, and a circle of pages has no end."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    where = f"api/models/org/net/tree/{net.commit('org/net')}"
    net.behave(where, Headers(Link=f'<{net.url(where) if next_page == "itself" else next_page}>; rel="next"'))
    result = statecli("audit", "hf://org/net")
    assert result.code == 2
    assert "repeats a page or continues on another host" in result.err


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("hf://org/net", [("models", "org/net", "main", ""), ("models", "org", "main", "net")]),
        (
            "hf://org/net/a/b.pt",
            [("models", "org/net", "main", "a/b.pt"), ("models", "org", "main", "net/a/b.pt")],
        ),
        ("hf://gpt2", [("models", "gpt2", "main", "")]),
        ("hf://gpt2@v1/b.pt", [("models", "gpt2", "v1", "b.pt")]),
        ("hf://org/net@v1/b.pt", [("models", "org/net", "v1", "b.pt")]),
        ("hf://org/net@refs/pr/7/b.pt", [("models", "org/net", "refs/pr/7", "b.pt")]),
        ("hf://org/net@a%2Fb/c.pt", [("models", "org/net", "a/b", "c.pt")]),
        ("hf://datasets/org/d@v/x.npz", [("datasets", "org/d", "v", "x.npz")]),
        ("hf://spaces/org/s/x.pt", [("spaces", "org/s", "main", "x.pt"), ("spaces", "org", "main", "s/x.pt")]),
    ],
)
def test_hub_url_is_parsed(url, places):
    """URLs have HfFileSystem's syntax: kinds, revisions with a slash, repositories without an owner."""
    assert [tuple(place) for place in _parse_places(url)] == places
    assert isinstance(_parse_places(url)[0], HubPath)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        (
            "hf://org/none",
            "the repository org/none does not exist, or is private: log in with `hf auth login`, or set",
        ),
        ("hf://datasets/org/none", "the repository datasets/org/none does not exist, or is private: log in"),
        ("hf://org/net@v9", "org/net has no revision v9"),
        ("hf://org/net/none.pt", "does not exist"),
        ("hf://", "does not contain a repository: write hf://org/name[@revision]/path"),
        ("hf://org/../x", "does not contain a repository: write hf://org/name[@revision]/path"),
    ],
)
def test_missing_repository_revision_or_file_is_reported(net, statecli, url, line):
    """A missing repository, revision and file have different messages."""
    assert read_refusal(statecli, url).startswith(line)


def test_private_repository_needs_the_right_token(net, statecli, monkeypatch):
    """Without a token, with a wrong token, and with the right token, which the CDN never receives."""
    net.private["org/net"] = TOKEN
    assert "does not exist, or is private: log in with `hf auth login`" in read_refusal(statecli, "hf://org/net")
    files.forget_command()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert read_refusal(statecli, "hf://org/net").endswith("does not exist, or your token does not give access to it")
    files.forget_command()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = statecli("inspect", "hf://org/net", "--stats", "--debug")
    assert result.code == 0
    assert all("authorization" not in request.headers for request in net.cdn.requests)
    assert TOKEN not in result.out + result.err


def test_gated_repository_needs_the_right_token(net, statecli, monkeypatch):
    """The message contains the page on which the user accepts the repository's conditions."""
    net.gated["org/net"] = TOKEN
    endpoint = net.url().rstrip("/")
    advice = f"is gated: accept its conditions on {endpoint}/org/net"
    assert read_refusal(statecli, "hf://org/net/model.safetensors").startswith(
        f"{advice}, then log in with `hf auth login`"
    )
    files.forget_command()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert read_refusal(statecli, "hf://org/net/model.safetensors") == f"{advice}, with the account of your token"
    files.forget_command()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert statecli("inspect", "hf://org/net/model.safetensors").code == 0


def test_token_file_of_the_library_is_used(net, statecli, monkeypatch, tmp_path):
    """`hf auth login` writes the token to a file; HF_HUB_DISABLE_IMPLICIT_TOKEN ignores the file."""
    from huggingface_hub import constants

    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert statecli("inspect", "hf://org/net").code == 0
    assert {request.headers.get("authorization") for request in net.requests} == {f"Bearer {TOKEN}"}
    net.forget()
    files.forget_command()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert statecli("inspect", "hf://org/net").code == 0
    assert {request.headers.get("authorization") for request in net.requests} == {None}


def test_offline_mode_sends_no_request(net, statecli, monkeypatch):
    """HF_HUB_OFFLINE: the command prints a single line and sends no request."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (
        read_refusal(statecli, "hf://org/net")
        == "statecli sent no request to the hub, because HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE"
    )
    assert net.requests == []


def test_signature_of_the_cdn_is_not_shown(net, statecli):
    """The redirect contains the signature; the message about a refusal by the CDN does not, even with --debug."""
    net.cdn.behave("*", Refuse(403))
    result = statecli("inspect", "hf://org/net/model.safetensors", "--debug")
    assert result.code == 2
    assert SIGNATURE not in result.out + result.err


def test_busy_hub_is_requested_again(net, statecli):
    """Both the request for the commit and the requests for bytes are repeated."""
    net.behave("api/models/org/net/revision/main", Times(2, Refuse(503)))
    net.cdn.behave("*", Times(1, Refuse(500)))
    assert statecli("inspect", "hf://org/net/model.safetensors").code == 0


def test_login_page_of_the_hub_is_reported(net, statecli):
    """A login page in place of the hub's answer is not a repository."""
    net.behave("api/*", login_page)
    line = read_refusal(statecli, "hf://org/net/model.safetensors")
    assert "not valid JSON" in line


def test_changed_file_in_the_cdn_is_reported(net, statecli):
    """A commit's file does not change, so an answer with another version is refused."""
    write_checkpoint(net.folder / "org" / "net", torch.ones(1 << 18))
    net.cdn.behave("*", After(1, Headers(ETag='"another"')))
    result = statecli("inspect", "hf://org/net/model.safetensors", "--stats")
    assert result.code == 2
    assert "changed while statecli read it" in result.err


def test_folder_of_a_repository_is_read(net, statecli):
    """`hf://org/net/sub` is a folder, and an audit of the repository includes its files."""
    write_checkpoint(net.folder / "org" / "net" / "sub", torch.ones(2), "other.safetensors")
    assert statecli("inspect", "hf://org/net/sub", "-f", "json").rows()["w"]["shape"] == [2]
    result = statecli("audit", "hf://org/net", "-f", "json").json
    assert [target["target"] for target in result["targets"]] == [
        "hf://org/net",
        "hf://org/net/config.json",
        "hf://org/net/sub/other.safetensors",
    ]


def test_hub_that_does_not_answer_is_named(monkeypatch, statecli):
    """The message names the hub's host, because the URL does not contain the host."""
    from huggingface_hub import constants

    monkeypatch.setenv("STATECLI_RETRIES", "0")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = statecli("inspect", "hf://org/net")
    refused = "the hub, 127.0.0.1:9: the server cannot be reached: connection refused; try again later"
    assert (result.code, result.err) == (2, f"statecli: hf://org/net: {refused}\n")


def test_invalid_endpoint_is_reported(monkeypatch, statecli):
    """urllib3 would warn about the endpoint on stderr."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "nonsense")
    result = statecli("inspect", "hf://org/net")
    assert (result.code, result.err) == (2, "statecli: hf://org/net: HF_ENDPOINT is not a URL: write https://HOST\n")


def test_missing_package_is_named(monkeypatch, statecli):
    """Without huggingface_hub, the message names the package."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = statecli("inspect", "hf://org/net")
    assert (result.code, result.err) == (
        2,
        "statecli: hf:// needs the package huggingface_hub: pip install 'torch-statecli[hf]'\n",
    )


def test_class_of_a_repository_is_built_from_its_configuration(net, statecli):
    """--from-config, config.json, a class's argument, verify and --model use the configuration, never remote code."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 50, **sizes}
    (net.folder / "org" / "net" / "config.json").write_text(json.dumps(config))
    for words in (
        ("inspect", "hf://org/net", "--from-config"),
        ("inspect", "hf://org/net/config.json"),
        ("inspect", "transformers:BertModel(config='hf://org/net')"),
        ("verify", "hf://org/net", "--check", "move"),
    ):
        result = statecli(*words, "-f", "json")
        assert result.code == 0, (words, result.err)
        assert "embeddings.word_embeddings.weight" in result.rows()
    assert statecli("audit", "hf://org/net", "--model", "hf://org/net").code == 1
    refused = statecli("inspect", "hf://org/net/config.json", "--trust-remote-code")
    assert refused.code == 0
    (net.folder / "org" / "net" / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "m.M"}}))
    refused = statecli("inspect", "hf://org/net", "--from-config", "--trust-remote-code")
    assert "--trust-remote-code runs only code on this disk; download the folder first" in refused.err
