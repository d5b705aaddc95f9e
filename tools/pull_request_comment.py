"""Write the summary of an audit as one comment of a pull request, and replace it at the next run.

    python -I tools/pull_request_comment.py SUMMARY.md [CHANGES.md]

CHANGES.md is the optional output of `pull_request_changes.py`. The action runs this with the variables of a
runner: GITHUB_EVENT_PATH, GITHUB_REPOSITORY, GITHUB_API_URL, and STATECLI_TOKEN, which needs the permission
`pull-requests: write`. STATECLI_COMMENT_KEY distinguishes the comments of several audits, and STATECLI_PAGE_URL is the
address of the page, if any. A failure to comment is only a warning: the audit decides whether the workflow passes.
"""

from __future__ import annotations

import html
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any

#: GitHub refuses longer comments, counted in characters.
MAX_CHARACTERS = 65_536
#: Number of comments in a response, and largest number of responses that are read to find our comment.
PAGE_SIZE, MAX_PAGES = 100, 30


def main() -> int:
    """Post or update the comment; return 0."""
    try:
        with open(os.environ["GITHUB_EVENT_PATH"], encoding="utf-8") as file:
            number = json.load(file).get("pull_request", {}).get("number")
        if not isinstance(number, int):
            return 0
        marker = build_marker(os.environ.get("STATECLI_COMMENT_KEY", ""))
        body = build_body(read_texts(sys.argv[1:]), marker, os.environ.get("STATECLI_PAGE_URL", ""))
        url = write_comment(number, body)
        sys.stdout.write(f"statecli: {url}\n")
    except (OSError, ValueError, KeyError) as error:
        reason = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
        advice = "give the job `permissions: pull-requests: write`" if reason == "HTTP 403" else "see the job summary"
        sys.stdout.write(f"::warning title=statecli::the comment was not written ({reason}); {advice}\n")
    return 0


def build_marker(key: str) -> str:
    """Return the invisible line by which the next run finds the comment."""
    return f"<!-- statecli audit {html.escape(key).replace('--', '- -')} -->"


def read_texts(paths: list[str]) -> str:
    """Return the summary, and the text of the other files that exist. Raises OSError without a summary."""
    texts = []
    for path in (paths[0], *filter(os.path.exists, paths[1:])):
        with open(path, encoding="utf-8") as file:
            texts.append(file.read())
    return "".join(texts)


def build_body(summary: str, marker: str, page_url: str = "") -> str:
    """Return the text of the comment, shortened to the length that GitHub accepts."""
    if page_url.startswith("https://"):
        marker = f"{marker}\n[Page of the audit]({page_url})\n"
    summary = summary.replace("@", "@\N{ZERO WIDTH SPACE}")  # a tensor called `@team` would notify the team
    note = "\n\nThe summary is longer than a comment may be: the summary of the job has all of it.\n"
    room = MAX_CHARACTERS - len(marker) - 1
    if len(summary) > room:
        kept = summary[: room - len(note) - len("\n</details>")].rpartition("\n")[0]
        is_open = kept.count("<details") > kept.count("</details")
        summary = kept + ("\n</details>" if is_open else "") + note
    return f"{marker}\n{summary}"


def write_comment(number: int, body: str) -> str:
    """Update our comment, or post one; return its address. Raises OSError."""
    repository = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}"
    marker = body.partition("\n")[0]
    for page in range(1, MAX_PAGES + 1):
        comments = call("GET", f"{repository}/issues/{number}/comments?per_page={PAGE_SIZE}&page={page}")
        for comment in comments:
            # The action must not use its rights to replace a user's comment that contains the marker.
            is_bot = comment.get("user", {}).get("type") == "Bot"
            if is_bot and str(comment.get("body", "")).partition("\n")[0].strip() == marker:
                return str(call("PATCH", f"{repository}/issues/comments/{comment['id']}", {"body": body})["html_url"])
        if len(comments) < PAGE_SIZE:
            break
    return str(call("POST", f"{repository}/issues/{number}/comments", {"body": body})["html_url"])


def call(method: str, url: str, document: dict[str, str] | None = None) -> Any:
    """Call the API of GitHub; return the decoded response."""
    request = urllib.request.Request(  # noqa: S310 - GitHub's own address
        url,
        method=method,
        data=None if document is None else json.dumps(document).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['STATECLI_TOKEN']}",
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
        return json.load(answer)


if __name__ == "__main__":
    raise SystemExit(main())
