"""`-f markdown`: a pull-request comment that says the verdict first and folds the rest away."""

from __future__ import annotations

from ..changes import diff, nudged, same, written

MANY = [nudged(f"w{chr(97 + n)}") for n in range(21)]


def test_markdown_says_the_verdict_first():
    """A pull request's reader sees it without opening anything."""
    title, _, verdict, *_ = written(diff(nudged("a"), same("b")), "markdown").splitlines()
    assert title == "### `a.pt → b.pt`"
    assert verdict == "**1 of 2 parameters changed**"


def test_markdown_folds_long_tables_away():
    """More than a screenful is behind a summary that says what is in it; few rows are not."""
    text = written(diff(*MANY), "markdown")
    assert "<details><summary><b>parameters</b>: 21 of 21 changed</summary>\n\n| name" in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert "<details>" not in written(diff(*MANY[:20]), "markdown")


def test_markdown_rows_have_a_cell_a_column():
    """A bar in a heading or a name is no column."""
    text = written(diff(nudged("a|b"), nudged("c", nan_after=1)), "markdown")
    table = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_a_summary_in_html_is_escaped():
    """A section's name is text inside the folded heading."""
    changes = [nudged(f"w{n}", section="<img src=x>") for n in range(15)] + [nudged(f"v{n}") for n in range(15)]
    text = written(diff(*changes), "markdown", unfold=True)
    assert "<img" not in text
    assert "&lt;img src=x&gt;: parameters" in text
