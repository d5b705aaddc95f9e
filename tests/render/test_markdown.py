"""`-f markdown` writes a pull-request comment with the verdict first and the details folded."""

from __future__ import annotations

import html
import re

import pytest

from statecli.commands.diff.result import Field, ScalarChange, Status
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Oddity

from ..audits import finding, render_audit, target
from ..changes import change_metadata, diff, keep_tensor, nudge_tensor, rename_tensor, render_diff, tensor

markdown_it = pytest.importorskip("markdown_it")  # installed with rich

MANY = [nudge_tensor(f"w{chr(97 + n)}") for n in range(21)]


def test_verdict_is_below_the_title():
    """A reader of the pull request sees the verdict without opening a section."""
    title, _, verdict, *_ = render_diff(diff(nudge_tensor("a"), keep_tensor("b")), "markdown").splitlines()
    assert title == "### `a.pt → b.pt`"
    assert verdict == "**1 of 2 parameters changed**"


def test_markdown_folds_long_tables_away():
    """A table longer than a screen is folded under a summary of its content; a short table is not folded."""
    text = render_diff(diff(*MANY), "markdown")
    assert "<details><summary><b>parameters</b>: 21 of 21 changed</summary>\n\n| name" in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert "<details>" not in render_diff(diff(*MANY[:20]), "markdown")


def test_a_problem_with_a_long_name_does_not_fill_the_comment():
    """A message is shortened as in other outputs, so that the comment has room for all problems."""
    long_name = "w" * 70_000
    text = render_audit("markdown", target("a.pt", finding(fqn=long_name), finding("inf", fqn="b")))
    assert "error[nan]: www" in text
    assert "error[inf]: b: is inf" in text
    assert "more line" not in text


def test_each_row_has_a_cell_for_each_column():
    """A bar in a heading or a name does not start a column."""
    text = render_diff(diff(nudge_tensor("a|b"), nudge_tensor("c", nan_after=1)), "markdown")
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_a_summary_in_html_is_escaped():
    """A section's name is text inside the folded heading."""
    changes = [nudge_tensor(f"w{n}", section="<img src=x>") for n in range(15)] + [
        nudge_tensor(f"v{n}") for n in range(15)
    ]
    text = render_diff(diff(*changes), "markdown", unfold=True)
    assert "<img" not in text
    assert "<code>&#60;img src&#61;x&#62;&#58; parameters</code>" in text


HOSTILE = [
    "[x](http://e)",
    "![x](http://e)",
    "http://example.com",
    "www.example.com",
    "~f~ ~~g~~",
    "*a* _b_ __c__",
    "@user #123 closes #1",
    "GH-12 @org/team",
    "`a` ``b`` | c",
    "a\\|b\\",
    "<b>x</b> &amp; &copy;",
    "$x$ :tada:",
    "```",
    "- [ ] item",
    "1. item",
    "# head",
    "  spaces  ",
]


def fill_diff(text):
    """Return a diff with the text in every place for a name or a text."""
    finding = Finding("frozen-changed", Severity.ERROR, f"{text}: expected to be frozen", "b.pt", text)
    note = Oddity("prefix", text)
    setting = ScalarChange(text, Status.CHANGED, text, text + "!")
    tied = change_metadata(text, tensor(text), tensor(text, tied_to=(text,)), Field.TYING)
    changes = (nudge_tensor(text, section=text), rename_tensor(text, text + "2"), tied, keep_tensor("a"))
    return diff(*changes, scalars=(setting,), findings=(finding,), notes=(note,), expected=True)


def list_text_and_tags(tokens):
    """Return the text outside of code in the rendered Markdown, and the tags."""
    texts, tags, in_code = [], [], False
    for token in tokens:
        tags.append(token.type)
        if token.type == "inline":
            inner, more = list_text_and_tags(token.children)
            texts.append(inner)
            tags += more
        elif token.type == "html_block":
            texts.append(re.sub(r"<code>.*?</code>", "", token.content, flags=re.S))
            tags += re.findall(r"</?\w+", token.content)
        elif token.type == "html_inline":
            in_code = token.content == "<code>"
            tags += re.findall(r"</?\w+", token.content)
        elif token.type == "text" and not in_code:
            texts.append(token.content)
    return "\n".join(texts), tags


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("unfold", [False, True])
def test_no_name_is_markup_anywhere(text, unfold):
    """Rows, settings, findings, notes and headings add only our own tags, without links, mentions or issues."""
    parser = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    visible_text, tags = list_text_and_tags(parser.parse(render_diff(fill_diff(text), "markdown", unfold=unfold)))
    _, harmless = list_text_and_tags(parser.parse(render_diff(fill_diff("harmless"), "markdown", unfold=unfold)))
    html_tags = set(tags) - {"code_inline", "html_inline", "<code", "</code"}
    assert html_tags <= set(harmless) | {"<details", "<summary", "<b"}
    assert tags.count("td_open") == harmless.count("td_open")
    assert tags.count("list_item_open") == harmless.count("list_item_open")
    assert not re.search(r"@\w|#\d|GH-\d|://|www\.|~|:\w+:|\$", visible_text)


def test_special_characters_of_a_name_survive_the_table():
    """A pipe, a backtick and a backslash survive the table."""
    parser = markdown_it.MarkdownIt("commonmark").enable("table")
    page = parser.render(render_diff(diff(nudge_tensor("a|b`c\\|d\\")), "markdown"))
    (name,) = re.findall(r"<code>(M .*?)</code>", page)
    assert html.unescape(name) == "M a|b`c\\|d\\"


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("expected", [False, True])
def test_document_fits_into_a_comment(quiet, expected):
    """A comment has at most 65,536 characters and as many findings as fit; the last line counts the rest."""
    changes = [nudge_tensor(f"encoder.{n * 7919:x}zz.weight") for n in range(3000)]
    rule = "frozen-changed" if expected else "changed"
    findings = [Finding(rule, Severity.ERROR, f"{change.fqn}: {rule}", "b.pt", change.fqn) for change in changes]
    actual_diff = diff(*changes, findings=tuple(findings), expected=expected)
    text = render_diff(actual_diff, "markdown", quiet=quiet)
    if expected:  # one violated option is one problem with many tensors as evidence
        assert sum(line.startswith("- `error") for line in text.splitlines()) == 1
        assert len(text) <= 65_536
        return
    shown_count = sum(line.startswith(("| `M", "- `error")) for line in text.splitlines())
    hidden_count = int(re.search(r"… and ([\d,]+) more", text.splitlines()[-1])[1].replace(",", ""))
    assert 50_000 < len(text) <= 65_536
    assert shown_count + hidden_count == 3000
    assert text.count("<details>") == text.count("</details>")


def test_all_shows_every_row():
    """--all is not cut, because a file has room for all rows."""
    text = render_diff(
        diff(*(nudge_tensor(f"encoder.{n * 7919:x}zz.weight") for n in range(3000))), "markdown", unfold=True
    )
    assert sum(line.startswith("| `M") for line in text.splitlines()) == 3000
    assert "more" not in text.splitlines()[-1]
