"""Parse the text of a spec, and recognise a text that is not a spec."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from statecli.core.errors import UsageError
from statecli.live.spec import ModelSpec, parse_spec

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "module", "is_file", "attribute", "args", "kwargs"),
    [
        ("net.py:Net", "net.py", True, "Net", (), {}),
        ("a b/net.py:Net", "a b/net.py", True, "Net", (), {}),
        ("/x/net.py:Net(32)", "/x/net.py", True, "Net", (32,), {}),
        ('p/net.py:Net(hidden=32, act="gelu")', "p/net.py", True, "Net", (), {"hidden": 32, "act": "gelu"}),
        ("pkg.mod:Net", "pkg.mod", False, "Net", (), {}),
        ("pkg.mod:factory(1, a=[1,2])", "pkg.mod", False, "factory", (1,), {"a": [1, 2]}),
        ("pkg.mod:Outer.Net", "pkg.mod", False, "Outer.Net", (), {}),
        ("net.py:Net(path='s3://a:b')", "net.py", True, "Net", (), {"path": "s3://a:b"}),
        ("net.py:Net(-1, (2,), x={'a': None})", "net.py", True, "Net", (-1, (2,)), {"x": {"a": None}}),
        (r"C:\models\net.py:Net", r"C:\models\net.py", True, "Net", (), {}),
    ],
)
def test_specs_are_read(text, module, is_file, attribute, args, kwargs):
    """Each form of the grammar is parsed into its parts."""
    assert parse_spec(text) == ModelSpec(text, module, is_file, attribute, args, kwargs, "(" in text)


@pytest.mark.parametrize(
    "text",
    [
        "model.pt",
        "folder/",
        "",
        ":",
        "net.py",
        "net.py:",
        ":Net",
        "s3://bucket/key",
        "https://h:80/x",
        "hf://o/r@v/f",
        r"C:\models\net.pt",
        "C:net",
        "train.ckpt#optimizer",
        "dir/net:Net",
        "a-b:Net",
        "net.py:1Net",
        "net.py:a-b",
    ],
)
def test_text_that_is_not_a_spec_gives_none(text):
    """Paths, URLs, drives and sections are not specs."""
    assert parse_spec(text) is None


@pytest.mark.parametrize(
    "arguments",
    [
        "(",
        "(1",
        "(1)(2)",
        "(__import__('os'))",
        "(*[1])",
        "(**{})",
        "(a=1, a=2)",
        "(x for x in y)",
        "(a b)",
        "(" + "[" * 5000 + ")",
        "(\0)",
        "(1).x()",
        "(a := 1)",
        "(f'{1}')",
        "(a=f.g().h())",
        "(a=(lambda: 1)())",
        "(a=[f][0]())",
        "(a=_f())",
        "(a=f._g)",
        "('\\ud800)",
        "(" + "-" * 100_000 + "1)",
        "(" + "1+" * 100_000 + "1)",
    ],
)
def test_bad_arguments_are_one_line(arguments):
    """Arguments that are not literals are a usage error in one line, and no code of the arguments runs."""
    with pytest.raises(UsageError) as caught:
        parse_spec(f"net.py:Net{arguments}")
    assert "\n" not in str(caught.value)


@given(st.lists(LITERALS, max_size=3), st.dictionaries(st.sampled_from("abc"), LITERALS, max_size=3))
def test_any_literals_come_back(args, kwargs):
    """Arguments written with repr are parsed unchanged."""
    arguments = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
    spec = parse_spec(f"net.py:Net({arguments})")
    assert spec is not None
    assert (list(spec.args), spec.kwargs) == (args, kwargs)


@given(st.text(alphabet="net.py:Net()[]{}=,1'\"*\\ \n", max_size=30))
def test_any_text_is_a_spec_or_none_or_a_usage_error(text):
    """The parser raises no other exception for any text."""
    try:
        spec = parse_spec(text)
    except UsageError:
        return
    assert spec is None or isinstance(spec, ModelSpec)
