"""The comment of the action: one for each audit, replaced at the next run. A server answers as GitHub does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "pull_request_comment.py"


class GitHub(BaseHTTPRequestHandler):
    """A server with the comments of pull request 7, in pages; 403 for a read-only token."""

    def answer(self, document, code=200):
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        page = int(re.search(r"[?&]page=(\d+)", self.path).group(1))
        self.answer(self.server.comments[(page - 1) * 100 : page * 100])

    def do_POST(self):
        """Write a comment; PATCH replaces a comment."""
        if self.headers["Authorization"] != "Bearer writer":
            return self.answer({"message": "Resource not accessible by integration"}, 403)
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.command, self.path))
        if self.command == "POST":
            number = len(self.server.comments) + 1
            self.server.comments.append({"id": number, "user": {"type": "Bot"}, **document})
        else:
            number = int(self.path.rpartition("/")[2])
            next(comment for comment in self.server.comments if comment["id"] == number)["body"] = document["body"]
        return self.answer({"html_url": f"https://host/comment/{number}"})

    do_PATCH = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def github():
    server = ThreadingHTTPServer(("127.0.0.1", 0), GitHub)
    server.comments, server.calls = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def comment(github, tmp_path):
    """Return a function that writes a summary as the comment and returns the process."""

    def run(summary, right="writer", key="true", event=None, changes=None, page_url=""):
        (tmp_path / "summary.md").write_text(summary, "utf-8")
        (tmp_path / "event.json").write_text(json.dumps(event or {"pull_request": {"number": 7}}))
        environment = {
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GITHUB_REPOSITORY": "owner/name",
            "GITHUB_API_URL": f"http://127.0.0.1:{github.server_port}",
            "STATECLI_TOKEN": right,
            "STATECLI_COMMENT_KEY": key,
            "STATECLI_PAGE_URL": page_url,
        }
        if changes is not None:
            (tmp_path / "changes.md").write_text(changes, "utf-8")
        line = [sys.executable, "-I", str(SCRIPT), str(tmp_path / "summary.md"), str(tmp_path / "changes.md")]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)

    return run


def test_the_next_run_replaces_the_comment(github, comment):
    """The comment is found after a hundred other comments; another key has a comment of its own."""
    github.comments += [{"id": n, "user": {"type": "User"}, "body": "hello"} for n in range(1, 151)]
    for text in ("first", "second"):
        process = comment(text)
        assert (process.returncode, process.stdout, process.stderr) == (0, "statecli: https://host/comment/151\n", "")
    assert [method for method, _ in github.calls] == ["POST", "PATCH"]
    assert github.comments[-1]["body"].endswith("\nsecond")
    comment("third", key="weights")
    assert len(github.comments) == 152


def test_comment_of_a_person_is_not_replaced(github, comment):
    """A person may copy the invisible line: the action does not replace the comment of the person."""
    comment("first")
    github.comments[0]["user"]["type"] = "User"
    comment("second")
    assert [comment["body"].rpartition("\n")[2] for comment in github.comments] == ["first", "second"]


def test_a_token_that_may_not_write_is_a_warning(comment):
    """The audit decides about the job, not the comment."""
    process = comment("text", right="reader")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == (
        "::warning title=statecli::the comment was not written (HTTP 403); give the job `permissions: "
        "pull-requests: write`\n"
    )


def test_long_summary_is_shortened_and_has_no_mentions(github, comment):
    """The text has at most the length that GitHub accepts, with the details closed; a tensor may be called @team."""
    comment("<details>\n" + "- @team `layer.weight`\n" * 5000 + "</details>\n")
    body = github.comments[0]["body"]
    assert len(body) <= 65_536
    assert "@team" not in body
    assert body.count("<details") == body.count("</details")
    assert body.endswith("the summary of the job has all of it.\n")


def test_event_without_a_pull_request_writes_no_comment(github, comment):
    """A push, for example."""
    assert comment("text", event={"ref": "refs/heads/main"}).stdout == ""
    assert not github.comments


def test_the_comment_links_the_page_and_has_the_changed_checkpoints(github, comment):
    """The page is an artifact of the run; the next run replaces its link."""
    for number in (1, 2):
        comment("summary\n", changes="\n## Changed checkpoints\n", page_url=f"https://host/artifacts/{number}")
    lines = github.comments[0]["body"].splitlines()
    assert len(github.comments) == 1
    assert lines[1] == "[Page of the audit](https://host/artifacts/2)"
    assert lines[3:] == ["summary", "", "## Changed checkpoints"]


def test_only_an_address_of_the_web_is_a_link(github, comment):
    """The output of a skipped step is an empty text."""
    comment("summary", page_url="")
    assert github.comments[0]["body"].endswith("-->\nsummary")
