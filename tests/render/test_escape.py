"""Text from a file or a user is only text in the outputs for people."""

from __future__ import annotations

import json
import re
import unicodedata

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from statecli import render
from statecli.core.escaping import escape, escape_json, escape_line
from statecli.core.finding import Finding, Severity
from statecli.core.json_text import encode_json, encode_json_lines
from statecli.core.model_state import Oddity, Origin
from statecli.render import Output, RenderOptions
from statecli.report import Group, Line, Page, Problem, Report, ReportColumn, Table, label_help

from ..audits import accept_findings, failed_target, finding, render_audit, skipped_rule, skipped_target, target

OUTPUTS_FOR_PEOPLE = (Output.TABLE, Output.PLAIN, Output.MARKDOWN, Output.HTML)
#: Texts that a terminal or a workflow's runner would act on, and texts that contain them in every place.
CONTROL_SEQUENCES = [
    "\x1b[31m",
    "\n::error::z",
    "\r\n::debug::",
    "::error::x",
    " ::set-output name=a::b",
    "\u2028::x::",
]
CONTROL_SEQUENCES += [
    "##[error]",
    "##vso[task.setvariable]",
    "\x9b0m",
    "\u202e",
    "\ufffe",
    "\U000e0041",
    "\ud800",
    "\x85",
    "\t",
    "\x00",
]
CONTROL_SEQUENCES += ["a.::x::"]
HOSTILE_TEXTS = st.lists(
    st.sampled_from([*CONTROL_SEQUENCES, "model.", "w", " ", "x" * 30]), min_size=1, max_size=6
).map("".join)


def check_harmless(text, output):
    """Raise unless no character acts and no line is a command."""
    acting = {
        character for character in text if unicodedata.category(character) in ("Cc", "Cs", "Cn", "Zl", "Zp", "Cf")
    } - {"\n"}
    assert not acting, acting
    if output is not Output.HTML:
        assert not [line for line in text.split("\n") if line.lstrip().startswith("::")]
    if output in (Output.TABLE, Output.PLAIN):
        assert not re.search(r"##\w*\[", text)


@pytest.mark.parametrize("text", [*CONTROL_SEQUENCES[:1], "::x::", "  ::x::", "##[x]", "\u202e"])
def test_check_harmless_rejects_a_harmful_text(text):
    """`harmless` rejects each of these texts."""
    with pytest.raises(AssertionError):
        check_harmless(f"ok\n{text}\n", Output.PLAIN)


def report(text, outline=False):
    """Return a report with this text in every place of an output."""
    error = Finding(text, Severity.ERROR, text, text, text, text, text)
    place = Origin(text, 7)
    problem = Problem(text, Severity.ERROR, text, text, (error,), (text, text), text, place, text)
    columns = (ReportColumn(text), ReportColumn(text), ReportColumn(text))
    row, group = (text, text, text), Group(text, text, (Line((text, text, text), text), Line((text, "", ""))))
    return Report(
        title=text,
        document=error.__copy__,
        table=lambda: Table(columns, (row, row)),
        page=lambda: Page(text, columns, (group, group), (text, text), (problem,), text, None, group),
        findings=(error,),
        notes=(Oddity(text, text),),
        outline=outline,
        has_several_targets=True,
        problems=lambda: (problem,),
    )


def render_text(output, document, **look):
    return render.format_report(document, output, RenderOptions(terminal=True, **look))


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
@settings(max_examples=25, deadline=None)
@given(HOSTILE_TEXTS, st.booleans(), st.booleans(), st.sampled_from([20, 80, 200]))
def test_control_sequences_of_a_text_have_no_effect(output, text, outline, quiet, width):
    """The text is a title, heading, cell, remark, total, note, fix, verdict, finding, rule or target."""
    check_harmless(render_text(output, report(text, outline), quiet=quiet, width=width), output)


@pytest.mark.parametrize("output", [Output.TABLE, Output.PLAIN, Output.MARKDOWN])
@settings(max_examples=25, deadline=None)
@given(HOSTILE_TEXTS, st.booleans())
def test_line_breaks_of_a_text_add_no_lines(output, text, outline):
    """A text with line breaks takes as many lines as a word; only lines to paste are separate lines."""
    word, escaped = (report(sample, outline) for sample in ("x" * len(text), text.replace(" ", "_")))
    line_counts = [render_text(output, sample, width=10_000).count("\n") for sample in (word, escaped)]
    extra_lines = len(text.splitlines()) - 1 if text.splitlines() else 0
    is_block = output is Output.MARKDOWN and extra_lines and label_help(text.replace(" ", "_")).startswith("fix")
    block = 4 if is_block else 0  # a blank line, two fences, and the label's own line
    assert line_counts[1] - line_counts[0] == extra_lines + block  # of the problem's help


def test_colour_codes_of_a_text_are_escaped():
    """The colour codes around a text are statecli's own, without the codes in the text."""
    text = render_text(Output.PLAIN, report("\x1b[31mred\x1b[0m"), color=True)
    assert "\x1b[1m" in text
    assert "\x1b[31mred" not in text


@pytest.mark.parametrize("output", [*OUTPUTS_FOR_PEOPLE, Output.GITHUB])
@pytest.mark.parametrize("terminal", [False, True])
def test_control_sequences_in_an_audit_have_no_effect(output, terminal):
    """The text is in the reasons of accepted, failed and skipped targets and rules, a format, a name and a remedy."""
    text = "r\x1b[31m\n::error::z"
    problem = finding(message=text, help=text, target=text)
    audit = render_audit(
        output,
        target(text, problem, accepted=accept_findings(text, problem), skipped=(skipped_rule("nan", text),)),
        target(text, problem),
        failed_target(text, text),
        skipped_target(text, text),
        terminal=terminal,
    )
    if output is Output.GITHUB:
        assert "::error::z" not in audit.replace("%0A::error::z", "").split("::", 2)[0]
        assert not [line for line in audit.splitlines() if line.startswith("::error::")]
    else:
        check_harmless(audit, output)
    assert "\x1b" not in audit
    assert "\\x1b[31m" in audit


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("::error::x", r"\x3a:error::x"),
        ("  ::error::x", r"  \x3a:error::x"),
        ("std::vector", "std::vector"),
        (": x", ": x"),
        ("a ##[error]x", r"a #\x23[error]x"),
        ("### x [y]", "### x [y]"),
    ],
)
def test_only_the_start_of_a_command_is_escaped(text, line):
    """Only the start of the command is escaped."""
    assert escape_line(text) == line


@given(st.text(st.characters()))
def test_escape_of_an_escaped_text_changes_nothing(text):
    """Escaping an escaped text does not change it."""
    assert escape(escape(text)) == escape(text)
    assert escape_line(escape_line(text)) == escape_line(text)


@pytest.mark.parametrize("character", ["\x9b", "\ufffe", "\U000e0041", "\ud800"], ids=ascii)
def test_character_in_escaped_json_reads_back(character):
    """A character of any plane reads back as itself."""
    assert escape_json(json.dumps(character, ensure_ascii=False)).isascii()
    assert json.loads(escape_json(json.dumps(character, ensure_ascii=False))) == character


def test_batch_of_rows_is_encoded_like_single_rows():
    """Control characters and lone surrogates in a row of a batch do not change other rows."""
    for values in (["a", "b"], ["a", "\x7f", "é"], ["a\nb", "\udc80", "\x1b[2J"], [{"x": [1, None]}]):
        assert encode_json_lines(values, b",\n") == b",\n".join(map(encode_json, values))
