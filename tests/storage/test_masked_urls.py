"""Names of URLs: a name contains no secret, leads back to the typed URL, and differs from the name of any other URL."""

from __future__ import annotations

import os
import string
from urllib.parse import quote

import pytest
from hypothesis import assume, given, strategies as st

from statecli.storage import files, masked_url as names
from statecli.storage.masked_url import mask_url, unmask_url

SECRET = "Zq7Kx9"  # noqa: S105 - it opens nothing; no other part of these URLs contains it
PLAIN = string.ascii_lowercase + string.digits + "._-"

hosts = st.sampled_from(["host", "host:8080", "[::1]", "[::1]:80", "a.b.example", "127.0.0.1"])
schemes = st.sampled_from(["http", "https", "HTTPS", "s3", "gs", "ftp", "simplecache::https"])
steps = st.text(PLAIN, min_size=1, max_size=8).filter(lambda text: text.strip("."))
secrets = st.text(string.ascii_letters + string.digits + "@:/?#=&;%+ é…[](){}'\"|\\,!", max_size=12).map(
    lambda text: SECRET + text
)


@pytest.fixture(autouse=True)
def no_typed_urls(monkeypatch):
    """Forget all typed URLs."""
    names.typed_urls().clear()


@st.composite
def users(draw):
    """A user, a user and a password, or neither; escaped as in a URL, or raw as people type."""
    kind = draw(st.sampled_from(["none", "user", "both", "raw"]))
    if kind == "none":
        return ""
    if kind == "raw":  # not a valid URL: a password typed without escapes
        return f"me:{draw(secrets)}@"
    secret = quote(draw(secrets), safe="")
    return f"{secret}@" if kind == "user" else f"me:{secret}@"


@st.composite
def queries(draw):
    """Harmless parameters, secret parameters, and tokens without a name."""
    if draw(st.booleans()):
        return ""
    parameter = st.one_of(
        st.tuples(st.sampled_from(["token", "X-Amz-Signature", "sig", "a", "version2"]), secrets).map(
            lambda pair: f"{pair[0]}={quote(pair[1], safe='')}"
        ),
        st.sampled_from(["version=3", "rev=main", "download", "path=a/b.pt"]),
        secrets.map(lambda text: quote(text, safe="")),
        secrets.map(lambda text: quote(text, safe="") + "=="),
        secrets.map(lambda text: f"path=x%3Ftoken%3D{quote(text, safe='')}"),
        secrets.map(lambda text: f"version=3;token={quote(text, safe='')}"),
        secrets.map(lambda text: f"path=a?b={quote(text, safe='')}"),
    )
    return "?" + "&".join(draw(st.lists(parameter, min_size=1, max_size=3)))


@st.composite
def urls(draw):
    """A URL of a file, with secrets in every possible place."""
    path_parts = draw(st.lists(steps, min_size=1, max_size=3))
    if draw(st.booleans()):
        path_parts[0] += f";jsessionid={quote(draw(secrets), safe='')}"
    scheme, query = draw(schemes), draw(queries())
    if scheme in ("s3", "gs"):  # any other `?` belongs to a name
        query = query.replace("?", "?versionId=1&" if scheme == "s3" else "?generation=1&", 1)
    return f"{scheme}://{draw(users())}{draw(hosts)}/{'/'.join(path_parts)}{query}"


@given(url=urls())
def test_name_of_a_url_contains_no_secret(url):
    """The name leads back to the URL, and masking the name again changes nothing."""
    names.typed_urls().clear()
    name = mask_url(url)
    assert SECRET not in name, name
    assert unmask_url(name) == url
    assert mask_url(name) == name
    assert (name == url) == (SECRET not in url and "me:" not in url and not hides_part(url))


def hides_part(url):
    """Whether mask_url hides any part of the URL, even a harmless part such as `version2=…`."""
    return "…" in mask_url(url)


@given(typed=st.lists(urls(), min_size=2, max_size=5, unique=True))
def test_different_urls_get_different_names(typed):
    """Names differ however small the difference is, and in any order of typing."""
    names.typed_urls().clear()
    actual = [mask_url(url) for url in typed]
    assert len(set(actual)) == len(typed)
    assert [unmask_url(name) for name in actual] == typed


@given(url=urls(), sibling=steps)
def test_inner_and_sibling_files_keep_the_credentials(url, sibling):
    """A file in a typed folder, a file next to a typed file, and a file in a folder next to a typed file."""
    names.typed_urls().clear()
    link = names.parse_url(url.removeprefix("simplecache::"))
    # A raw password such as `pw@?` ends the URL before its host, so that the URL has no folder.
    assume(link.path and "@" not in link.path and not (link.user and set(link.user) & set("/?#@")))
    name = mask_url(url)
    query = "" if link.query is None else f"?{link.query}"
    url_without_query = url.removesuffix(query)
    assert unmask_url(files.join(name, sibling)) == f"{url_without_query}/{sibling}{query}"
    assert (
        unmask_url(files.join(files.get_folder(name), sibling))
        == f"{url_without_query.rpartition('/')[0]}/{sibling}{query}"
    )
    inner = files.join(files.get_folder(name), sibling, "x.pt")
    assert unmask_url(inner) == f"{url_without_query.rpartition('/')[0]}/{sibling}/x.pt{query}"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://host/m.pt", "https://host/m.pt"),
        ("https://host/m.pt?version=3", "https://host/m.pt?version=3"),
        ("https://me:pw@host/m.pt", "https://…@host/m.pt"),
        ("https://me@host/m.pt", "https://…@host/m.pt"),
        ("https://@host/m.pt", "https://…@host/m.pt"),
        ("https://me:p@w@host/m.pt", "https://…@host/m.pt"),
        ("https://me:p/w@host/m.pt", "https://…@host/m.pt"),
        ("https://me:p?w@host/m.pt", "https://…@host/m.pt"),
        ("https://m#e:pw@host/m.pt", "https://…@host/m.pt"),
        ("https://host/m.pt?a=1&token=x", "https://host/m.pt?a=…&token=…"),
        ("https://host/m.pt?version=3&sig=x#model", "https://host/m.pt?version=3&sig=…#model"),
        ("https://host/m.pt?sig=x#a.b", "https://host/m.pt?sig=…#a.b"),
        ("https://host/m.pt#section?sig=x", "https://host/m.pt#section?sig=…"),
        ("https://host/m.pt?0123", "https://host/m.pt?…"),
        ("https://host/m.pt?download", "https://host/m.pt?download"),
        ("https://host/m.pt?raw=true&dl=1", "https://host/m.pt?raw=true&dl=1"),
        ("https://host/m.pt?", "https://host/m.pt?"),
        ("https://host/a;jsessionid=5F;v=2/m.pt", "https://host/a;jsessionid=…;v=…/m.pt"),
        ("https://host/a@1.0/m.pt", "https://host/a@1.0/m.pt"),
        ("HTTPS://ME:PW@HOST/M.PT", "HTTPS://…@HOST/M.PT"),
        ("s3://bucket/run-*/m.pt?versionId=3HL4kqt+x", "s3://bucket/run-*/m.pt?versionId=3HL4kqt+x"),
        ("s3://key:secret@bucket/m.pt", "s3://…@bucket/m.pt"),
        ("s3://bucket/d?d/m.pt", "s3://bucket/d?d/m.pt"),
        ("gs://bucket/d?d/m.pt?generation=17", "gs://bucket/d?d/m.pt?generation=17"),
        ("hf://org/net/m?d.pt", "hf://org/net/m?d.pt"),
        ("s3://bucket/m.pt?X-Amz-Signature=a/b&Expires=5", "s3://bucket/m.pt?X-Amz-Signature=…&Expires=…"),
        ("https://host/m.pt#access_token=a/b", "https://host/m.pt#access_token=…"),
        ("https://host/m.pt#access_token=a&sig=b", "https://host/m.pt#access_token=…&sig=…"),
        ("https://host#access_token=a/b", "https://host#access_token=…"),
        ("https://me:pw@host/m.pt#access_token=a", "https://…@host/m.pt#access_token=…"),
        ("hf://gpt2@main/model.safetensors", "hf://gpt2@main/model.safetensors"),
        ("hf://org/net@refs/pr/1/model.safetensors", "hf://org/net@refs/pr/1/model.safetensors"),
        ("abfs://container@account.example/m.pt", "abfs://container@account.example/m.pt"),
        ("zip://m.pt::https://me:pw@host/a.zip?sig=x", "zip://m.pt::https://…@host/a.zip?sig=…"),
        ("simplecache::https://me:pw@host/m.pt", "simplecache::https://…@host/m.pt"),
        ("https://[::1]:8080/m.pt", "https://[::1]:8080/m.pt"),
        ("https://me:pw@[::1]:8080/m.pt", "https://…@[::1]:8080/m.pt"),
    ],
)
def test_url_is_masked(url, name):
    """By example."""
    assert mask_url(url) == name
    assert mask_url(name) == name


def test_urls_with_different_secrets_are_numbered():
    """All URLs of the same user have the same mark."""
    assert mask_url("https://a:1@host/m.pt") == "https://…@host/m.pt"
    assert mask_url("https://b:2@host/m.pt") == "https://…2@host/m.pt"
    assert mask_url("https://b:2@host/n.pt") == "https://…2@host/n.pt"
    assert mask_url("https://a:1@host/o.pt") == "https://…@host/o.pt"
    assert mask_url("https://host/m.pt") == "https://host/m.pt"
    assert unmask_url("https://…2@host/config.json") == "https://b:2@host/config.json"
    assert mask_url("https://host/m.pt?sig=1") == "https://host/m.pt?sig=…"
    assert mask_url("https://host/m.pt?sig=2") == "https://host/m.pt?sig=…2"
    assert mask_url("https://host/n.pt?sig=3") == "https://host/n.pt?sig=…"


def test_typed_mask_does_not_lead_to_a_later_url():
    """A name copied from output before any URL was typed means itself, and a URL typed later gets another name."""
    assert mask_url("https://host/m.pt?sig=…") == "https://host/m.pt?sig=…"
    assert mask_url("https://host/m.pt?sig=1") == "https://host/m.pt?sig=…2"
    assert unmask_url("https://host/m.pt?sig=…") == "https://host/m.pt?sig=…"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--against=https://me:pw@host/m.pt", "--against=https://…@host/m.pt"),
        ("-ohttps://me:pw@host/m.json", "-ohttps://…@host/m.json"),
        ('net.py:Net(weights="https://me:pw@host/m.pt?sig=5")', 'net.py:Net(weights="https://…@host/m.pt?sig=…")'),
        ("see https://me:pw@host/m.pt", "see https://…@host/m.pt"),
        ("a//b", "a//b"),
        ("file:///a/b", "/a/b"),
        ("model.pt", "model.pt"),
        (
            "--reason=at https://me:pw@host/, twice: https://me:pw@host/",
            "--reason=at https://…@host/, twice: https://…@host/",
        ),
    ],
)
def test_url_within_text_is_masked(text, expected):
    """A URL may follow an option, or be in a class's arguments or in a sentence."""
    assert files.mask_urls(text) == expected
    assert files.mask_urls(expected) == expected


@pytest.mark.parametrize(
    ("text", "path", "query"),
    [
        ("s3://bucket/d?d/m.pt", "bucket/d?d/m.pt", ""),
        ("s3a://bucket/d?d?versionId=5", "bucket/d?d", "?versionId=5"),
        ("gs://bucket/d?versionId=5", "bucket/d?versionId=5", ""),
        ("gcs://bucket/d?generation=5", "bucket/d", "?generation=5"),
        ("hf://org/net/d?d", "org/net/d?d", ""),
        ("https://host/d?d", "host/d", "?d"),
    ],
)
def test_query_is_split_from_the_path(text, path, query):
    """In a bucket's URL, `?` belongs to the name, except before a version."""
    assert files.split_url(text)[1:] == (path, query)
    assert not files.is_glob(text)


@pytest.mark.parametrize("url", ["file://me:hidden-2@host/m.pt", "FILE://me:hidden-2@host/m.pt"])
def test_password_of_a_file_url_is_hidden(url):
    """No file has a password, so the password belongs to another URL."""
    assert files.remove_secrets(files.mask_urls(url)) == "me:…@host/m.pt"


def test_class_gets_the_unmasked_url():
    """The class gets the URL with its secrets; the displayed arguments are masked."""
    from statecli.live.spec import parse_spec

    typed = "https://me:pw@host/m.pt?sig=5"
    spec = parse_spec(files.mask_urls(f'net.py:Net("{typed}", [("x", "{typed}")], more={{"a": "{typed}"}}, n=3)'))
    assert spec is not None
    assert spec.args == (typed, [("x", typed)])
    assert spec.kwargs == {"more": {"a": typed}, "n": 3}
    assert "pw" not in spec.text


def test_existing_file_named_like_a_url_is_not_masked(in_tmp_path):
    """The name of an existing file is not masked."""
    os.makedirs("a:/me:pw@host")
    assert files.mask_urls("a://me:pw@host") == "a://me:pw@host"


def test_another_process_can_unmask_urls():
    """The message to the other process shows no secret in its text."""
    name = mask_url("https://me:hidden-1@host/m.pt?sig=5")
    access = files.export_access()
    assert "hidden-1" not in f"{access!r} {access}"
    names.typed_urls().clear()
    files.import_access(access)
    assert unmask_url(name) == "https://me:hidden-1@host/m.pt?sig=5"
    files.forget_command()
    assert unmask_url(name) == "https://me:hidden-1@host/m.pt?sig=5"
