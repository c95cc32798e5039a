"""A child process that does not keep to what was agreed: an error that says so, and no process left."""

from __future__ import annotations

import pytest

from runner.engines.child import Child
from runner.errors import EngineError

pytestmark = pytest.mark.timeout(30)


async def test_a_child_that_prints_something_else_than_its_answer_is_an_engine_error() -> None:
    child = Child("chatty")
    with pytest.raises(EngineError, match="something else than its answer"):
        await child.start_ours("this", {}, lambda _: None, limit_s=20)  # a module that prints a poem
    assert (child.pid, child.is_running) == (None, False)
