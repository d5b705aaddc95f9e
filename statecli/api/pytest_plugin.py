"""The pytest plugin: the fixture `assert_state_follows`, without imports until a test uses the fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from statecli.commands.verify.result import Verification


@pytest.fixture
def assert_state_follows() -> Callable[..., Verification]:
    """`statecli.testing.assert_state_follows`: fails with a table if a model's state does not follow the model."""

    def verify_model(model: Any, **options: Any) -> Verification:
        __tracebackhide__ = True
        from statecli import testing

        return testing.assert_state_follows(model, **options)

    return verify_model
