"""The pytest plugin: the fixture `assert_state_follows` and the option `--statecli`, without imports until used.

`pytest --statecli net.py:Net --statecli-input 2x3` adds a test of this class, as if a test used the fixture.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from statecli.core.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from statecli.commands.verify.result import Verification


@pytest.fixture
def assert_state_follows() -> Callable[..., Verification]:
    """Return `statecli.testing.assert_state_follows`, which fails with a table if a check of the model fails."""

    def verify_model(model: Any, **options: Any) -> Verification:
        __tracebackhide__ = True
        from statecli import testing

        return testing.assert_state_follows(model, **options)

    return verify_model


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of statecli."""
    group = parser.getgroup("statecli", "tests of the state of PyTorch models")
    group.addoption(
        "--statecli",
        action="append",
        default=[],
        metavar="MODEL",
        help="also run statecli verify on a model class: file.py:Class or package.module:Class (repeatable)",
    )
    group.addoption(
        "--statecli-input",
        metavar="SHAPE",
        help="call forward of each tested model with a tensor of this shape, such as 2x3",
    )
    parser.addini("statecli_models", "model classes to test, one per line (as for --statecli)", type="linelist")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each model named by `--statecli` or by `statecli_models` in the configuration."""
    folder = (config.inipath or config.rootpath / "pytest.ini").parent
    target_by_name = {text: _find_file(text, folder) for text in config.getini("statecli_models")}
    target_by_name |= {text: text for text in config.getoption("--statecli")}
    items += [
        ModelItem.from_parent(session, name=f"statecli {name}", target_text=target_text)
        for name, target_text in target_by_name.items()
    ]


def _find_file(text: str, folder: Path) -> str:
    """Return the target with the path of its file, if the path is relative to the folder of the configuration file."""
    file, colon, class_text = text.partition(":")
    path = folder / file
    is_found = path.is_file() or (path.is_dir() and not colon)
    return f"{os.path.relpath(path)}{colon}{class_text}" if is_found and not os.path.isabs(file) else text


class ModelItem(pytest.Item):
    """The test of a model class."""

    def __init__(self, *, target_text: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target_text = target_text

    def runtest(self) -> None:
        """Run the checks of `statecli verify`. Raises AssertionError with the table, StateError without a model."""
        from statecli import testing

        testing.assert_state_follows(self.target_text, inputs=self.config.getoption("--statecli-input"))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the table, or the line of an error, without a traceback through statecli."""
        if isinstance(excinfo.value, (AssertionError, StateError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where the test is, for the summary."""
        return self.config.rootpath, None, self.name
