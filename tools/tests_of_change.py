"""Print the tests of the packages that changed in the working tree, or since a commit.

    python tools/tests_of_change.py [COMMIT]

A room is a package of statecli, or a single module. Its tests are the folder of the same name, or the tests listed
here, and the test file named like the module. In the rooms of SHARED all tests take minutes, so a module with a test
file named like it runs only this file and the shared tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ALWAYS = ("tests/test_house.py", "tests/test_light_start.py", "tests/test_parser.py")
SHARED: dict[str, tuple[str, ...]] = {
    "formats": ("tests/formats/test_any_bytes.py", "tests/formats/test_format_equality.py"),
    "verify": ("tests/verify/test_unchanged_model.py", "tests/test_cli_verify.py"),
    "live": ("tests/live/test_moves.py", "tests/live/test_spec.py"),
}
#: Rooms whose tests are not in the folder of the same name.
TESTS: dict[str, tuple[str, ...]] = {
    "__init__": ("tests/test_api.py", "tests/test_package.py"),
    "__main__": ("tests/test_cli.py", "tests/test_supervisor.py", "tests/test_system_errors.py"),
    "plugin": ("tests/audit/test_plugins.py",),
    "pytest_plugin": ("tests/test_testing.py",),
    "testing": ("tests/test_testing.py", "tests/test_diff_assertions.py"),
    "callbacks": ("tests/test_callbacks.py",),
    "inspect": ("tests/test_cli.py", "tests/test_row_options.py", "tests/report/test_inspect.py"),
    "bisect": ("tests/log/test_bisect.py",),
    "watch": ("tests/log/test_watch.py",),
    "core": (
        "tests/test_parameter_or_buffer.py",
        "tests/test_ties.py",
        "tests/test_sizes.py",
        "tests/test_denormals.py",
    ),
    "pickles": ("tests/formats/test_pickle.py", "tests/formats/test_unpicklers.py"),
    "pickle_scan": ("tests/formats/test_scan.py", "tests/formats/test_steps.py", "tests/rules/test_bypasses.py"),
    "file_scan": ("tests/formats/test_scan.py", "tests/formats/test_frames.py"),
    "targets": ("tests/audit/test_targets.py", "tests/test_location.py"),
    "workers": ("tests/executors", "tests/shards"),
    "requests": (
        *("tests/diff/test_diff_request.py", "tests/test_options.py", "tests/test_api.py"),
        *("tests/test_git.py", "tests/test_samples.py"),
    ),
    "api": ("tests/test_api.py", "tests/test_usage_errors.py", "tests/test_testing.py"),
    "cli": (
        *("tests/test_cli.py", "tests/test_outputs.py"),
        *("tests/test_help.py", "tests/test_completion.py"),
    ),
}


def select_tests(path: str) -> tuple[str, ...]:
    """Return the tests of a changed file, as arguments of pytest."""
    parts = Path(path).parts
    if parts[0] == "tests":
        is_test = parts[-1].startswith("test_") and Path(path).exists()
        return (path,) if is_test else (str(Path(path).parent),) if len(parts) > 2 else ()
    if parts[0] != "statecli":
        return ()
    room = parts[2 if parts[1] == "commands" else 1].removesuffix(".py")
    folder = f"tests/{room}"
    named = [str(test) for test in Path("tests").rglob(f"test_{Path(path).stem}.py")]
    if room in SHARED and any(test.startswith(folder) for test in named):
        return (*named, *SHARED[room])
    tests = TESTS.get(room, (folder,) if Path(folder).exists() else ())
    return (*tests, *(test for test in named if test not in tests and not test.startswith(tests)))


def main(commit: str) -> None:
    """Print the tests of each file that differs from the commit or is not in git yet."""
    commands = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    changed = [
        line
        for words in commands
        for line in subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    print(*dict.fromkeys((*ALWAYS, *(test for path in changed for test in select_tests(path)))))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
