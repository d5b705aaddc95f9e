"""No written text contains a secret, whatever goes wrong: in output, files, tracebacks or exceptions."""

from __future__ import annotations

import io
import json
import logging
import string
import subprocess
import sys
import traceback

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

import statecli
from statecli.storage import connections, files, redact
from statecli.storage.http import Http
from statecli.workers.executors import dask

from .s3 import S3
from .server import After, Basic, HangUp, Redirect, Refuse, Server, Signed, login_page

pytest.importorskip("urllib3")
USER, PASSWORD, TOKEN, SIGNATURE = "kraken-user-7", "sesame/91@37", "tok3n-5f9c1e", "5igned-by-cdn-8d2"
#: The secrets, the password as escaped in a URL, and user and password as encoded in a header.
HIDDEN = (USER, PASSWORD, "sesame%2F91%4037", TOKEN, SIGNATURE, "a3Jha2VuLXVzZXItN")
OUTPUTS = ["table", "plain", "json", "jsonl", "csv", "markdown", "html"]


def assert_no_secret(*texts):
    """Assert that none of the texts contains a secret."""
    for text in texts:
        for secret in HIDDEN:
            assert secret not in text, text[:2000]


@pytest.fixture
def server(file_server):
    """Two checkpoints behind a password and a token, redirected to signed URLs of a CDN."""
    save_file({"w": torch.arange(4.0), "v": torch.ones(3)}, file_server.folder / "a.safetensors")
    save_file({"w": torch.arange(4.0) + 1, "v": torch.ones(3)}, file_server.folder / "b.safetensors")
    file_server.behave("*", Basic(USER, PASSWORD), Signed("token", TOKEN))
    return file_server


@pytest.fixture
def secret_url(server):
    """Return a function that adds the user, the password and the token to the URL of the server's file."""

    def url(name):
        return server.url(name).replace("://", f"://{USER}:sesame%2F91%4037@") + f"?token={TOKEN}"

    return url


@pytest.fixture
def output_folder(tmp_path, monkeypatch):
    """The current folder, for output files."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    return tmp_path / "desk"


def read_files(output_folder):
    """Return the texts of all files of the folder."""
    return [path.read_text("utf-8") for path in output_folder.rglob("*") if path.is_file()]


# --- outputs and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_contains_no_secret(output, secret_url, output_folder, statecli):
    """The output of any command, on stdout or in a file, contains no secret."""
    for line in (
        ("inspect", secret_url("a.safetensors"), "--stats", "-v"),
        ("diff", secret_url("a.safetensors"), secret_url("b.safetensors"), "-v"),
        ("audit", secret_url("a.safetensors"), "--values", "-v"),
        ("audit", secret_url("a.safetensors"), "--against", secret_url("b.safetensors"), "-v"),
    ):
        result = statecli(*line, "-f", output, "--debug")
        assert result.code == (1 if line[0] == "diff" else 0), result
        assert_no_secret(result.out, result.err)
    statecli(*line, "-f", output, "-o", "output.txt", "--debug")
    assert_no_secret(*read_files(output_folder))


@pytest.mark.parametrize("output", ["sarif", "junit", "github", "gitlab", "json", "markdown", "html", "table"])
def test_output_that_names_the_file_contains_no_secret(output, secret_url, output_folder, statecli):
    """The file of the finding is named by its masked URL, on stdout and in a report."""
    save_file({"w": torch.tensor([float("nan")])}, output_folder.parent / "served" / "nan.safetensors")
    report = ("--report", "sarif=out.txt")
    result = statecli("audit", secret_url("nan.safetensors"), "--values", "-f", output, *report)
    assert result.code == 1, result
    for text in (result.out, *read_files(output_folder)):
        assert "nan.safetensors" in text
    assert_no_secret(result.out, result.err, *read_files(output_folder))


def test_lock_and_baseline_contain_no_secret(secret_url, output_folder, statecli):
    """The lock and the baseline are still valid for their URL."""
    url = secret_url("a.safetensors")
    assert statecli("lock", url, "-o", "lock.json").code == 0
    audited = statecli("audit", url, "--lock", "lock.json")
    assert audited.code == 0, audited
    result = statecli("audit", url, "--write-baseline", "known.json", "--reason", f"as {url} was")
    assert result.code == 0
    assert len(read_files(output_folder)) >= 1
    assert_no_secret(*read_files(output_folder), result.out, result.err, audited.out, audited.err)


def test_part_files_contain_no_secret(secret_url, output_folder, statecli):
    """Neither the output, the part files nor their merge contain a secret."""
    url = secret_url("a.safetensors")
    for number in (1, 2):
        part = statecli("inspect", url, "--stats", "--shard", f"{number}/2", "-o", f"part-{number}.jsonl")
        assert part.code == 0, part
        assert_no_secret(part.out, part.err)
    merged = statecli("merge", "part-1.jsonl", "part-2.jsonl", "--url", url, "--report", "json=merged.json")
    assert merged.code == 0, merged
    assert_no_secret(merged.out, merged.err, *read_files(output_folder))


def test_configuration_shows_no_secret(secret_url, server, output_folder, statecli):
    """The URLs of a configuration are read with their secrets, and shown masked."""
    (output_folder / "statecli.toml").write_text(
        f'[policy]\nreference = "{secret_url("b.safetensors")}"\nmust-not-change = ["v"]\n'
    )
    config_result = statecli("config")
    result = statecli("audit", secret_url("a.safetensors"), "-v")
    assert (config_result.code, result.code in (0, 1)) == (0, True), result
    assert "b.safetensors" in config_result.out
    assert_no_secret(config_result.out, config_result.err, result.out, result.err)
    assert any(request.path == "b.safetensors" and request.status == 206 for request in server.requests)


def test_class_with_a_url_shows_no_secret(output_folder, statecli):
    """The class gets the URL with its secrets; its displayed arguments and its exceptions are masked."""
    (output_folder / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self, url, fail=False):\n"
        "        super().__init__(2, 2)\n        if fail:\n            raise ValueError('no ' + url)\n"
        f"        assert url.endswith({TOKEN!r})\n"
    )
    url = f"https://{USER}:sesame%2F91%4037@host/m.pt?token={TOKEN}"
    result = statecli("inspect", f"net.py:Net('{url}')", "-f", "json")
    assert result.code == 0, result
    assert result.json["target"] == "net.py:Net('https://…@host/m.pt?token=…')"
    failed = statecli("inspect", f"net.py:Net('{url}', fail=True)", "--debug")
    assert failed.code == 2
    assert "ValueError" in failed.err
    assert_no_secret(result.out, result.err, failed.out, failed.err)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behaviour",
    [
        Refuse(403, f"<h1>{PASSWORD} {TOKEN}</h1>", X_Token=TOKEN),
        Refuse(401),
        Refuse(404),
        Refuse(500),
        Refuse(416, Content_Range="bytes */9"),
        HangUp(None),
        HangUp(0),
        login_page,
        Redirect("a.safetensors"),
        Redirect(f"http://127.0.0.1:9/x?Signature={SIGNATURE}"),
        Redirect(f"http://x:{SIGNATURE}@no-such-host.invalid/x?Signature={SIGNATURE}"),
        Redirect(f"gopher://host/x?Signature={SIGNATURE}"),
        Redirect(f"http://[/x?Signature={SIGNATURE}"),
    ],
)
def test_error_and_traceback_contain_no_secret(server, behaviour, secret_url, statecli, monkeypatch):
    """No Python exception or its causes contain a secret; each error is a single line, with exit status 2."""
    monkeypatch.setenv("STATECLI_RETRIES", "1")
    server.behave("a.safetensors", behaviour)
    for line in (
        ("inspect", secret_url("a.safetensors")),
        ("diff", secret_url("b.safetensors"), secret_url("a.safetensors")),
        ("audit", secret_url("a.safetensors")),
        ("lock", secret_url("a.safetensors"), "-o", "-"),
    ):
        plain, debug = statecli(*line), statecli(*line, *(["--debug"] if line[0] != "lock" else []))
        assert plain.code == 2
        assert plain.err.count("\n") == 1, plain.err
        assert_no_secret(plain.out, plain.err, debug.out, debug.err)
    import statecli as api

    with pytest.raises(api.StateError) as caught:
        api.inspect(secret_url("a.safetensors"))
    assert_no_secret(str(caught.value), repr(caught.value), *iter_texts(caught.value))


def iter_texts(error):
    """Yield the traceback and the texts of all chained exceptions, even of exceptions hidden from the traceback."""
    yield "".join(traceback.format_exception(error))
    while error is not None:
        yield f"{error} {error!r} {error.args}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "behaviour",
    [Refuse(403), Refuse(404), HangUp(0), login_page, Redirect(f"http://x:{SIGNATURE}@127.0.0.1:9/x?Sig={SIGNATURE}")],
)
def test_frames_of_an_error_contain_no_secret(server, behaviour, secret_url, monkeypatch):
    """In tracebacks with variables, statecli's frames show neither a typed URL nor the target of a redirect."""
    import statecli as api

    monkeypatch.setenv("STATECLI_RETRIES", "1")
    server.behave("a.safetensors", behaviour)
    for ask in (
        lambda: api.inspect(secret_url("a.safetensors")),
        lambda: api.inspect(secret_url("b.safetensors"), model=secret_url("a.safetensors")),
        lambda: api.diff(secret_url("b.safetensors"), secret_url("a.safetensors")),
        lambda: api.diff(secret_url("a.safetensors"), secret_url("b.safetensors")),
    ):
        with pytest.raises(api.StateError) as caught:
            ask()
        ours = caught.value.__traceback__.tb_next.tb_next
        assert ours is not None
        error = caught.value.with_traceback(ours)
        assert_no_secret("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
        assert error.__context__ is None


@pytest.fixture
def log():
    """The text of all later log records, at any level."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def test_logs_of_libraries_contain_no_secret(server, secret_url, log):
    """Log records about statecli's requests are masked, even in the user's handlers; other records are unchanged."""
    import statecli as api

    def add_malformed_header(request, reply):
        reply.headers["X-Odd\r\nno colon here"] = "1"

    server.behave("a.safetensors", add_malformed_header)
    api.inspect(secret_url("a.safetensors"))
    logging.getLogger("urllib3.connectionpool").warning("GET /other?page=7 %s", "of-the-user-itself")
    logging.getLogger("urllib3.made.later").warning("%d", TOKEN)
    logging.getLogger("mine").warning("of mine: %s", TOKEN)
    text = log.getvalue()
    assert "Failed to parse headers" in text
    assert "a.safetensors?token=…" in text
    assert "of-the-user-itself" in text
    assert "wrong arguments" in text
    assert f"of mine: {TOKEN}" in text
    assert_no_secret(text.replace(f"of mine: {TOKEN}", ""))


def test_logs_of_botocore_contain_no_secret(tmp_path, monkeypatch):
    """botocore logs each header, the text to sign and the signature; the file's credentials are in no variable."""
    pytest.importorskip("s3fs")
    (tmp_path / "bucket").mkdir()
    save_file({"w": torch.arange(4.0)}, tmp_path / "bucket" / "a.safetensors")
    lines = ["[default]", f"aws_access_key_id = AKIA{TOKEN.upper()}", f"aws_secret_access_key = {SIGNATURE}"]
    (tmp_path / "credentials").write_text("\n".join([*lines, f"aws_session_token = {TOKEN}"]))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with S3(tmp_path) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url().rstrip("/"))
        text = run_logged("import statecli; print(len(statecli.inspect('s3://bucket/a.safetensors').state.tensors))")
        signatures = [request.headers["authorization"].rpartition("=")[2] for request in s3.requests]
        assert [request.headers["x-amz-security-token"] for request in s3.requests] == [TOKEN] * len(signatures)
    assert "DEBUG:botocore.auth:CanonicalRequest" in text
    assert signatures
    for secret in (f"AKIA{TOKEN.upper()}", *signatures):
        assert secret not in text
    assert_no_secret(text)


def run_logged(code):
    """Return all log records of a process that runs the code, and check that the process succeeds."""
    logging_code = "import logging; logging.basicConfig(level=logging.DEBUG); "
    result = subprocess.run([sys.executable, "-c", logging_code + code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "typed",
    [
        "https:/me:pa55w@host.invalid/x.pt",
        "https//me:pa55w@host.invalid/x.pt",
        "https:me:pa55w@host.invalid/x.pt",
        "me:pa55w@host.invalid/x.pt",
        "https://me:pa55w",
        "https://me:pa55w/x.pt",
        "https:/me:pa55w@host.invalid/x.pt#model",
        "me:pa5@host.invalid/pa55w@x.pt",
    ],
)
def test_mistyped_url_shows_no_password(typed, output_folder, statecli):
    """Text between the first `:` and the last `@` is not shown, nor an invalid port."""
    import statecli as api

    for line in (
        ("inspect", typed),
        ("diff", typed, typed, "--debug"),
        ("audit", typed),
        ("audit", typed, "-f", "json"),
        ("lock", typed, "-o", "l.json"),
        ("verify", typed),
    ):
        result = statecli(*line)
        assert result.code == 2
        assert "pa5" not in result.out + result.err
        assert "pa5" not in "".join(read_files(output_folder))
    with pytest.raises(api.StateError) as caught:
        api.inspect(typed)
    assert "pa5" not in f"{caught.value} {caught.value!r}"


def test_file_with_an_unusual_name_is_read_and_shown(output_folder, statecli):
    """The file exists, so its name is not masked; an output file keeps the typed name."""
    save_file({"w": torch.ones(2)}, output_folder / "train:a@1.safetensors")
    result = statecli("inspect", "train:a@1.safetensors", "-f", "json", "-o", "out:b@2.json")
    assert (result.code, result.err) == (0, "")
    assert '"target": "train:a@1.safetensors"' in (output_folder / "out:b@2.json").read_text()


def test_failing_cdn_shows_no_signature(server, secret_url, tmp_path, statecli, monkeypatch):
    """The signature comes from another host, and was never typed."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    folder = tmp_path / "cdn"
    folder.mkdir()
    save_file({"w": torch.zeros(100_000)}, folder / "blob")
    with Server(folder) as cdn:
        server.behave("a.safetensors", Redirect(cdn.url("blob") + f"?Signature={SIGNATURE}&Key-Pair-Id=APKA77"))
        cdn.behave("blob", Signed("Signature", SIGNATURE), After(1, HangUp(10)))
        result = statecli("inspect", secret_url("a.safetensors"), "--stats", "--debug")
        assert result.code == 2
        assert "the connection was cut" in result.err
        assert "APKA77" not in result.err
        assert_no_secret(result.out, result.err)
        assert cdn.requests[0].query["Signature"] == SIGNATURE
        assert_no_secret(*(str(request.headers) for request in cdn.requests))


def test_internal_error_shows_no_secret(secret_url, statecli, monkeypatch):
    """Any library may raise an exception with any text: of the URL, of the environment, of headers."""
    monkeypatch.setenv("HF_TOKEN", "hf_notaRealTokenAtAll00")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI-no-output")

    def raise_secrets(url, headers):
        try:
            raise KeyError(f"{url} {headers} hf_notaRealTokenAtAll00")
        except KeyError as inner:
            raise RuntimeError(f"no {headers} wJalrXUtnFEMI-no-output X-Amz-Signature=0badc0ffee") from inner

    monkeypatch.setattr(connections, "send", raise_secrets)
    for options in ((), ("--debug",)):
        result = statecli("inspect", secret_url("a.safetensors"), *options)
        assert result.code == 2
        assert "internal error: RuntimeError" in result.err
        assert ("Traceback" in result.err) == bool(options)
        for text in ("hf_nota", "wJalr", "0badc0ffee"):
            assert text not in result.err
        assert_no_secret(result.err, result.out)


def test_usage_error_shows_no_secret(secret_url, output_folder, statecli):
    """Options without URLs and unknown options: the usage message would repeat the typed text."""
    url = secret_url("a.safetensors")
    for line in (
        ("inspect", url, f"--nonsense={url}"),
        ("inspect", url, url),
        ("inspect", url, "-o", url),
        ("inspect", url, f"-o{url}"),
        ("inspect", url, "--to", url),
        ("inspect", url, "-f", url),
        ("inspect", url, "--model", url),
        (url,),
        ("verify", url),
        ("rules", url),
        ("schema", url),
        ("config", "--config", url),
        ("audit", url, "--lock", url),
        ("audit", url, "--baseline", url),
        ("audit", url, "--select", url),
        ("git", "textconv", url),
        ("git", "difftool", url, url),
        ("audit", url.replace("a.safe", "*.safe")),
    ):
        result = statecli(*line)
        assert_no_secret(result.out, result.err)
    assert_no_secret(*read_files(output_folder))


def test_repr_of_objects_shows_no_secret(secret_url):
    """The text of an object, as in a debugger, contains masked names."""
    name = files.mask_urls(secret_url("a.safetensors"))
    handle, store = files.open_file(name), files.store_for(name)
    assert_no_secret(
        repr(handle),
        repr(store._files),
        repr(files.export_access()),
        str(files.export_access()),
        repr(Http({"A": TOKEN})),
    )


@pytest.mark.parametrize("option", ["executor", "jobs"])
def test_wrong_argument_shows_no_secret(secret_url, option, monkeypatch):
    """Neither the error, its causes, nor the variables of frames show a secret, except in the called function."""
    monkeypatch.setattr(dask, "TIMEOUT_S", 0.3)
    wrong = {option: "x" if option == "jobs" else f"dask:tcp://me:{TOKEN}@127.0.0.1:1"}
    with pytest.raises(statecli.StateError) as raised:
        statecli.diff(secret_url("a.safetensors"), secret_url("b.safetensors"), **wrong)
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next.tb_next)
    assert (error.__cause__, error.__context__) == (None, None)
    assert_no_secret("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))


def test_separate_process_shows_no_secret(secret_url, output_folder):
    """Neither the console script, its workers nor Python's own output at exit show a secret."""
    line = [
        sys.executable,
        "-X",
        "dev",
        "-m",
        "statecli",
        "diff",
        secret_url("a.safetensors"),
        secret_url("no.safetensors"),
    ]
    for options in ([], ["--debug"], ["-f", "json"]):
        process = subprocess.run([*line, *options], capture_output=True, text=True, check=False)
        assert process.returncode == 2
        assert_no_secret(process.stdout, process.stderr)


@pytest.mark.parametrize("executor", ["threads:2", "processes:2"])
def test_worker_shows_no_secret(executor, server, secret_url, statecli, monkeypatch):
    """Errors in another thread or process have the usual masked message; batches do not show their contents."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    save_file({"w": torch.zeros(100_000), "v": torch.zeros(100_000)}, server.folder / "c.safetensors")
    save_file({"w": torch.ones(100_000), "v": torch.zeros(100_000)}, server.folder / "d.safetensors")
    line = ("diff", secret_url("c.safetensors"), secret_url("d.safetensors"), "--executor", executor, "--debug")
    first_result = statecli(*line)
    assert first_result.code == 1, first_result
    server.behave("d.safetensors", After(1, Refuse(403, f"<h1>{TOKEN}</h1>")))
    failed_result = statecli(*line)
    assert failed_result.code == 2, failed_result
    assert "access is refused (HTTP 403)" in failed_result.err
    assert_no_secret(first_result.out, first_result.err, failed_result.out, failed_result.err)


# --- the gate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET https://me:pw@host/m.pt", "GET https://…@host/m.pt"),
        ("url: /m.pt?version=3&token=abc HTTP/1.1", "url: /m.pt?version=…&token=… HTTP/1.1"),
        ("Authorization: Bearer abcdef123", "Authorization: Bearer …"),
        ("{'Authorization': 'Basic bWU6cHc='}", "{'Authorization': 'Basic …'}"),
        ("X-Amz-Signature=0bad; X-Amz-Credential=AKIA/2026", "X-Amz-Signature=…; X-Amz-Credential=…"),
        ('"token": "abc"', '"token": "…"'),
        ("Set-Cookie: session=abc; Path=/", "Set-Cookie: …"),
        ("hf_abcdefghijklmnop is no token", "… is no token"),
        ("https://host/m.pt?token=… is shown", "https://host/m.pt?token=… is shown"),
        ("KeyError: 'model.weight'", "KeyError: 'model.weight'"),
    ],
)
def test_text_like_a_secret_is_masked(text, expected):
    """In text of other programs."""
    assert redact.scrub(text) == expected
    assert redact.scrub(expected) == expected


@given(word=st.text(string.ascii_letters + string.digits + "/@%+=:&? é", min_size=10, max_size=30), around=st.text())
def test_known_secret_is_removed_from_any_text(word, around):
    """A known secret is removed raw, escaped as in a URL, and within any text."""
    from urllib.parse import quote

    vars(redact.secrets()).update(vars(redact.Secrets()))
    redact.hide(word)
    for text in (word, quote(word, safe="")):
        assert word not in redact.remove_secrets(f"{around}{text}{around}").replace(around, "") or word in around


def test_text_without_secrets_is_unchanged():
    """Names of tensors are not secrets, even if they look like secrets."""
    redact.hide("pw", "a", "pytorch")
    redact.hide("safetensors", sure=False)
    text = "a.pw.weight?token=x: pytorch_model.bin and model.safetensors"
    assert redact.remove_secrets(text) == text


def test_json_contains_the_masked_url(secret_url, statecli):
    """The JSON contains the masked name: its reader learns neither user nor token."""
    document = json.loads(statecli("inspect", secret_url("a.safetensors"), "-f", "json").out)
    assert document["target"].endswith("a.safetensors?token=…")
    assert "://…@" in document["target"]
