"""`make check` runs the tests of each changed file of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tests_of_change import ALWAYS, SHARED, TESTS, select_tests

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tests_by_module():
    """The selected tests of each module."""
    modules = sorted(str(path.relative_to(ROOT)) for path in Path(ROOT / "statecli").rglob("*.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {module: select_tests(module) for module in modules}


def test_each_module_has_tests(tests_by_module):
    """A new room without a folder of tests needs a row of `TESTS`."""
    assert tests_by_module
    assert [module for module, tests in tests_by_module.items() if not tests] == []


def test_each_selected_test_exists(tests_by_module, monkeypatch):
    """pytest refuses the whole run if a file does not exist, for example after a rename."""
    monkeypatch.chdir(ROOT)
    selected = {test for tests in tests_by_module.values() for test in tests}
    selected |= {*ALWAYS, *(test for tests in (*TESTS.values(), *SHARED.values()) for test in tests)}
    assert [test for test in sorted(selected) if not Path(test).exists()] == []


def test_rows_are_rooms():
    """A row selects nothing if its room was renamed."""
    rooms = {
        path.name.removesuffix(".py")
        for folder in ("statecli", "statecli/commands")
        for path in (ROOT / folder).iterdir()
    }
    assert {*TESTS, *SHARED} <= rooms


def test_a_module_selects_the_tests_of_its_own_name(monkeypatch):
    """The tests of its room are selected too."""
    monkeypatch.chdir(ROOT)
    assert "tests/test_natural_order.py" in select_tests("statecli/core/natural_order.py")
    assert "tests/test_ties.py" in select_tests("statecli/core/natural_order.py")
    assert select_tests("docs/index.md") == ()
