"""Folders over http: as four servers list them, and without a listing."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from statecli.core.errors import UnreadableError
from statecli.storage import html_listing, store, unlisted_folder
from statecli.storage.http import Http
from statecli.storage.url import is_folder_url

from ..formats.attacks import Call
from .server import Basic, HangUp, Headers, Redirect, Refuse, Server, Signed, Times, login_page, page

pytest.importorskip("urllib3")
LISTING_STYLES = ["python", "nginx", "apache", "caddy"]
NAMES = ["a b.bin", "ü&;.bin", "100%25.bin", "a#b?c.bin", "<i>.bin", "model.safetensors", "x" * 80]


def write_model(folder):
    """Write a model folder as save_pretrained does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Net"], "hidden_size": 2}))


@pytest.fixture
def model_server(file_server):
    """A server of a model's folder, `net/inner`."""
    write_model(file_server.folder / "net" / "inner")
    return file_server


# --- listed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", LISTING_STYLES)
def test_listing_contains_only_direct_entries(file_server, style):
    """All file and folder names are listed, but not the links for sorting, to the parent, or to another host."""
    inner = file_server.folder / "in" / "ner"
    (inner / "sub dir").mkdir(parents=True)
    (inner / "sub dir" / "deeper.bin").touch()
    for name in NAMES:
        (inner / name).touch()
    file_server.listing = style
    folders = Http().listing(file_server.url("in/ner")).folders
    assert folders == dict(sorted({**dict.fromkeys(NAMES, False), "sub dir": True}.items()))
    assert Http().listing(file_server.url("in/ner/")).folders == folders


@pytest.mark.parametrize("slash", ["", "/"])
def test_folder_is_read_as_on_disk(model_server, slash, statecli):
    """The URL of the folder works with and without a slash at its end."""
    model_server.listing = "nginx"
    url, path = model_server.url("net/inner") + slash, model_server.folder / "net" / "inner"
    local, remote = (statecli("inspect", target, "-f", "json") for target in (f"{path}{slash}", url))
    assert (remote.code, remote.err) == (0, "")
    assert remote.out.replace(url, f"{path}{slash}") == local.out


def test_links_outside_of_the_folder_are_ignored():
    """Absolute, relative and upward links, and links to other hosts. An odd name or a query cannot hide a file."""
    hrefs = [
        "a.bin", "./b.bin", "/d/c.bin", "http://host/d/d.bin", "sub/", "?C=N;O=D", "#top", "../", "/", "..", ".",
        "sub/e.bin", "//other/d/f.bin", "https://host/d/g.bin", "http://host:81/d/h.bin", "/dd/i.bin", "a.bin?x=1",
        "%2e%2e%2fetc", "a%2Fb", "a%5Cb", "a%00b", "javascript:alert(1)", "mailto:me@host", "http://[", "data:,x", "",
        "l.pkl?download=1", "/d/m.pkl?raw#L1", "n.pkl#x", "sub/?C=N", "http://HOST:80/d/o.pkl", "http://me@host/d/p.pkl",
        "http://host:x/d/q.pkl",
        "../d/j.bin", "../other/k.bin",
    ]  # fmt: skip
    text = "".join(f'<a href="{href}">x</a>' for href in hrefs)
    names = html_listing.parse_names(f"<html><body>{text}</body></html>", "http://host/d/")
    unusual_names = dict.fromkeys(["%2e%2e%2fetc", "a%2Fb", "a\\b", "a\0b"], False)
    assert names == {
        **dict.fromkeys([f"{name}.bin" for name in "abcdj"] + [f"{name}.pkl" for name in "lmnop"], False),
        "sub": True,
        **unusual_names,
    }


def test_name_of_both_a_file_and_a_folder_fails(file_server, statecli):
    """A path names either the file or the folder, so the other would be left out silently."""
    listing = page(200, '<title>Index of /</title><a href="x.pkl">x</a><a href="x.pkl/">x</a>')
    file_server.behave("d/", lambda request, reply: reply.become(listing))
    result = statecli("audit", file_server.url("d/"))
    assert (
        result.code,
        "lists 'x.pkl' both as a file and as a folder; give the URLs of the files instead of the URL of the folder"
        in result.err,
    ) == (2, True)


def test_file_of_a_link_with_a_query_is_audited(file_server, statecli):
    """Scripts that download the links of a page follow the link."""
    torch.save({"w": torch.ones(1)}, file_server.folder / "a.pt")
    file_server.behave(
        "", lambda request, reply: reply.become(page(200, '<title>Index of</title><a href="a.pt?raw=1">a</a>'))
    )
    result = statecli("audit", file_server.url(""), "-f", "json")
    assert [(target["target"], target["status"]) for target in result.json["targets"]] == [
        (file_server.url("a.pt"), "audited")
    ]


def test_link_through_a_folder_leads_to_its_files(file_server, statecli):
    """`wget -r` follows such a link, although the page lists no such folder."""
    (file_server.folder / "a b" / "c").mkdir(parents=True)
    save_file({"w": torch.ones(1)}, file_server.folder / "a b" / "c" / "d.safetensors")
    file_server.listing = "python"
    links = page(200, '<title>Index of</title><a href="a%20b/c/d.safetensors">d</a>')
    file_server.behave("", lambda request, reply: reply.become(links))
    result = statecli("audit", file_server.url(""), "-f", "json")
    assert [target["target"] for target in result.json["targets"]] == [file_server.url("a b/c/d.safetensors")]


def test_link_through_a_folder_that_is_not_listed_fails(file_server, statecli):
    """Static pages link to files in folders without a page of their own."""
    save_file({"w": torch.ones(1)}, file_server.folder / "ok.safetensors")
    links = '<title>Index of</title><a href="ok.safetensors">m</a><a href="/files/evil.pt?raw">m</a>'
    file_server.behave("", lambda request, reply: reply.become(page(200, links)))
    result = statecli("audit", file_server.url(""))
    assert (result.code, file_server.url("files") in result.err) == (2, True)


@pytest.mark.parametrize("style", ["python", "nginx", "apache"])
def test_audit_finds_files_with_unusual_names(file_server, statecli, style):
    """A name may contain a backslash or a line break; the audit finds the same files as on disk."""

    file_server.listing = style
    save_file({"w": torch.ones(1)}, file_server.folder / "ok.safetensors")
    for name in ("x\\y.pt", "x\ny.pt", "x\x7fy.pt"):
        torch.save({"w": torch.zeros(1), "x": Call(os.system, "echo pwned")}, file_server.folder / name)
    local, remote = (statecli("audit", where, "-f", "json") for where in (file_server.folder, file_server.url("")))
    assert (local.code, remote.code) == (1, 1)
    assert len(remote.json["findings"]) == len(local.json["findings"]) >= 3


def test_folder_that_lists_itself_fails(file_server, statecli):
    """Each page has a link to another subfolder."""
    file_server.behave(
        "*/", lambda request, reply: reply.become(page(200, '<title>Index of /</title><a href="a/">a/</a>'))
    )
    for target in (file_server.url("d/"), file_server.url("d/**")):
        result = statecli("audit", target)
        assert result.code == 2
        assert "is more than 64 folders deep; " in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize("target", ["", "**", "**/*.pt"])
def test_endless_tree_fails(file_server, statecli, monkeypatch, target):
    """Each folder has many folders, so that the limit of the depth alone is not enough."""
    monkeypatch.setattr(store, "MAX_LISTED_FOLDERS", 30)
    links = "".join(f'<a href="{n}/">{n}</a>' for n in range(5))
    tree = page(200, f"<title>Index of /</title>{links}")
    end = page(200, "<title>Index of /</title>")
    file_server.behave("*/", lambda request, reply: reply.become(end if request.path.count("/") > 6 else tree))
    result = statecli("audit", file_server.url("d/") + target)
    assert result.code == 2
    assert "the server lists more than 30 folders or 200,000 names below" in result.err
    assert "give a deeper folder" in result.err
    assert len(file_server.requests) < 400


def test_folder_with_too_many_names_fails(file_server, statecli, monkeypatch):
    """Each name would take a request."""
    monkeypatch.setattr(store, "MAX_LISTED_NAMES", 10)
    links = "".join(f'<a href="{n}.pt">{n}</a>' for n in range(20))
    file_server.behave("d/", lambda request, reply: reply.become(page(200, f"<title>Index of /</title>{links}")))
    result = statecli("audit", file_server.url("d/"))
    assert (result.code, "1,000 folders or 10 names below" in result.err) == (2, True)
    assert len(file_server.requests) < 10


def test_base_of_a_page_is_applied():
    """Links are relative to the base."""
    names = html_listing.parse_names('<head><base href="/d/"></head><a href="a.bin">a</a>', "http://host/d/")
    assert names == {"a.bin": False}
    assert html_listing.parse_names('<base href="http://evil/d/"><a href="a.bin">a</a>', "http://host/d/") is None


def test_hidden_metadata_file_is_requested(file_server, statecli):
    """nginx and Apache hide `.metadata`, which a folder of torch.distributed.checkpoint needs."""
    from torch.distributed import checkpoint as dcp

    path = file_server.folder / "saved"
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=path)
    file_server.listing = "apache"
    url = file_server.url("saved")
    local, remote = (
        statecli("inspect", path, "-f", "json", "--stats"),
        statecli("inspect", url, "-f", "json", "--stats"),
    )
    assert (remote.code, remote.out.replace(url, str(path))) == (0, local.out)


def test_requests_in_a_folder_keep_password_and_query(model_server, statecli):
    """The listing and each file are requested with the password and the query."""
    model_server.listing = "python"
    model_server.behave("*", Basic("me", "sesame-77"), Signed("token", "abc17"))
    url = model_server.url("net/inner").replace("://", "://me:sesame-77@") + "?token=abc17"
    result = statecli("inspect", url, "-f", "json")
    assert (result.code, result.err) == (0, "")
    assert result.json["target"] == model_server.url("net/inner").replace("://", "://…@") + "?token=…"
    assert {request.status for request in model_server.requests} <= {200, 206, 301, 403, 404}


def test_login_page_is_not_a_listing(model_server, statecli, inspect_error):
    """Neither a login page in place of the folder, nor a login page after a redirect."""
    model_server.behave("*", login_page)
    assert "is an HTML page" in inspect_error(model_server.url("net/inner"))
    model_server.behave("*", Redirect("login"))
    model_server.behave(
        "login", lambda request, reply: reply.become(page(200, '<html><a href="/x.bin">Sign in</a></html>'))
    )
    error = inspect_error(model_server.url("net/inner"))
    assert (
        f"is an HTML page, perhaps a login or an error page (HTTP 200, after a redirect to {model_server.address})"
        in error
    )


def test_message_suggests_the_url_of_the_raw_file():
    """A user who copies a page's address from a browser gets the right URL in the message; no request is sent."""
    from statecli.storage.http_refusals import _suggest_url

    assert _suggest_url("https://huggingface.co/org/net/blob/main/model.safetensors").endswith(
        "; to read the file, write /resolve/ instead of /blob/"
    )
    assert _suggest_url("https://github.com/org/net/blob/main/m.pt").endswith("write /raw/ instead of /blob/")
    assert _suggest_url("https://huggingface.co/org/net") == "; use an hf:// URL instead"
    assert _suggest_url("https://example.com/blob/") == ""


# --- not listed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("status", [403, 404])
def test_usual_names_of_an_unlisted_folder_are_requested(model_server, slash, status, statecli):
    """All names are requested at once; a note says that more files may exist, and lists the requested names."""
    for path in ("net/inner", "net/inner/"):
        model_server.behave(path, Refuse(status))
    url = model_server.url("net/inner") + slash
    result = statecli("inspect", url, "-f", "json", "-v")
    assert result.code == 0, result
    assert list(result.rows()) == ["w"]
    table = statecli("inspect", url).out + statecli("inspect", url).err
    assert "statecli may not have found all files of this folder: the folder cannot be listed (" in table
    for name in ("model.safetensors", "model.safetensors.index.json", ".metadata", "latest", "adapter_config.json"):
        assert name in table
    assert f"(HTTP {status})" in table


def test_audit_of_an_unlisted_folder_fails(model_server, statecli):
    """The audit checks the files that it found, and fails for unlisted files; a glob fails too."""
    torch.save({"w": torch.zeros(1)}, model_server.folder / "net" / "inner" / "other.pt")
    model_server.behave("net/inner/", Refuse(403))
    url = model_server.url("net/inner/")
    result = statecli("audit", url, "-f", "json")
    assert result.code == 2
    assert {target["target"]: target["status"] for target in result.json["targets"]}[f"{url}*"] == "failed"
    assert (
        f"{url}: the folder may contain other files: the folder cannot be listed (access is refused (HTTP 403)"
        in result.err
    )
    globbed = statecli("audit", f"{url}*.safetensors")
    assert globbed.code == 2
    assert "statecli cannot list the names in this folder for the glob: the folder cannot be listed" in globbed.err
    assert statecli("audit", model_server.url("net/inner/model.safetensors")).code == 0


@pytest.mark.parametrize("fault", [Refuse(403), login_page, Refuse(418)], ids=["403", "login", "418"])
def test_refused_usual_name_is_not_taken_for_missing(model_server, statecli, fault):
    """The server reports the other usual names as missing."""
    torch.save({"w": torch.zeros(2, 2)}, model_server.folder / "net" / "inner" / "pytorch_model.bin")
    model_server.behave("net/inner/", Refuse(403))
    model_server.behave("net/inner/model.safetensors", fault)
    url = model_server.url("net/inner/")
    for command in ("inspect", "audit", "lock"):
        result = statecli(command, url, *(("-o", "-") if command == "lock" else ()))
        assert result.code == 2, result
        assert "cannot check whether the folder contains model.safetensors: " in result.err


def test_each_usual_name_is_requested_once(model_server, statecli):
    """Each name is requested once, and missing files are not read."""
    statecli("inspect", model_server.url("net/inner/"))
    paths = [request.path for request in model_server.requests]
    assert sorted(paths) == sorted(
        ["net/inner/", *(f"net/inner/{name}" for name in unlisted_folder.list_usual_names())]
    )


def test_unlisted_folder_without_usual_names_is_reported(file_server, inspect_error):
    """The message says that the folder was not listed, and contains a remedy."""
    (file_server.folder / "net").mkdir()
    url = file_server.url("net/")
    error = inspect_error(url)
    assert error == (
        f"{url}: cannot be listed (access is refused (HTTP 403): statecli sent no user name and no password), and "
        f"this folder has no file with one of the {len(unlisted_folder.list_usual_names())} usual checkpoint names; "
        "give the path of a file"
    )


def test_html_page_for_every_name_counts_as_missing(file_server, inspect_error):
    """Web applications answer every request with 200 and HTML."""
    file_server.behave("*", lambda request, reply: reply.become(page(200, "<!doctype html><title>App</title>")))
    assert "is an HTML page" in inspect_error(file_server.url("net"))
    assert "this folder has no file with one of the" in inspect_error(file_server.url("net/"))


def test_folder_with_a_failed_name_request_is_not_read(model_server, inspect_error):
    """A name whose request failed for another reason than 404 may exist."""
    model_server.behave("net/inner/config.json", HangUp(None))
    assert "the connection was cut" in inspect_error(model_server.url("net/inner/"))


def test_error_adds_that_the_folder_cannot_be_listed(file_server, inspect_error):
    """For a folder with companion files only, the message says why there may be more files."""
    (file_server.folder / "net").mkdir()
    (file_server.folder / "net" / "config.json").write_text("{}")
    error = inspect_error(file_server.url("net/"))
    assert "is a folder without a checkpoint" in error
    assert "; the folder cannot be listed (" in error


def test_wrong_password_is_tried_once(model_server, inspect_error):
    """Servers lock accounts after fewer failures."""
    model_server.behave("*", Basic("me", "sesame-77"))
    url = model_server.url("net/inner").replace("://", "://me:wrong-pass@")
    assert inspect_error(url).endswith(
        "the server does not accept the user name and the password of the URL (HTTP 401)"
    )
    assert len(model_server.requests) == 1
    assert "(HTTP 401)" in inspect_error(url + "/")
    assert len(model_server.requests) == 2


def test_missing_file_is_not_tried_as_a_folder(file_server, inspect_error):
    """A missing name with the suffix of a file is requested once, and the usual names below it are not requested."""
    url = file_server.url("net/model.safetensors")
    assert inspect_error(url) == f"{url}: does not exist (HTTP 404)"
    assert len(file_server.requests) == 1


def test_index_keeps_its_shards_credentials(file_server, statecli, tmp_path):
    """Shards are requested with the index's credentials and without a listing; another host gets no credentials."""
    write_model(tmp_path)
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.ones(3)}, file_server.folder / name)
    weights = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    (file_server.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    cdn_folder = tmp_path / "cdn"
    cdn_folder.mkdir()
    with Server(cdn_folder) as cdn:
        shutil.move(file_server.folder / weights["w2"], cdn_folder / "blob")
        file_server.behave(weights["w2"], Basic("me", "sesame-77"), Redirect(cdn.url("blob")))
        file_server.behave(weights["w1"], Basic("me", "sesame-77"))
        url = file_server.url("model.safetensors.index.json").replace("://", "://me:sesame-77@")
        result = statecli("inspect", url, "-f", "json", "--stats")
        assert (result.code, result.err, list(result.rows())) == (0, "", ["w1", "w2"])
        assert not any("authorization" in request.headers for request in cdn.requests)


def test_failed_listing_is_requested_again(model_server, statecli):
    """The request for a listing is repeated like any other request."""
    model_server.listing = "python"
    model_server.behave("net/inner/", Times(3, Refuse(503)))
    assert statecli("inspect", model_server.url("net/inner/")).code == 0


def test_listing_of_another_type_is_refused(model_server):
    """The server sends its listing as text/plain."""
    model_server.listing = "python"
    model_server.behave("net/inner/", Headers(Content_Type="text/plain"))
    with pytest.raises(UnreadableError, match="instead of a list of files"):
        Http().listing(model_server.url("net/inner"))


def test_folder_url_ends_with_a_slash_or_the_host():
    """In a URL with a query, the slash before the `?` counts, and not a slash in the query."""
    assert is_folder_url("https://host")
    assert is_folder_url("https://host/a/?x=…")
    assert not is_folder_url("https://host/a?x=/")


@pytest.mark.parametrize("status", [404, 403])
def test_missing_shard_is_not_tried_as_a_folder(file_server, status, statecli):
    """Whatever the suffix of a shard is, a missing shard is requested once, and no file below the shard."""
    shards = ["one.safetensors?x=y", "two", "three.safetensors", "four.v1"]
    save_file({"w2": torch.ones(2)}, file_server.folder / "three.safetensors")
    (file_server.folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(shards)}})
    )
    for name in shards:
        if name != "three.safetensors":
            file_server.behave(name, Refuse(status))
    result = statecli("inspect", file_server.url("model.safetensors.index.json"))
    assert result.code == 2
    assert sorted(request.path for request in file_server.requests) == sorted(
        ["", "model.safetensors.index.json", *shards]
    )
