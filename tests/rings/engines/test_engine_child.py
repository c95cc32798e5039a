"""A child process that does not keep to what was agreed: an error that says so, and no process left."""

from __future__ import annotations

import os
import signal

import pytest

from runner.engines.child import Child
from runner.engines.port import Progress
from runner.errors import EngineError
from tests.fakes.limits import set_runner_limits

pytestmark = pytest.mark.timeout(180)


async def test_a_child_that_prints_something_else_than_its_answer_is_an_engine_error() -> None:
    child = Child("chatty")
    with pytest.raises(EngineError, match="something else than its answer"):
        await child.start_ours("this", {}, lambda _: None, limit_s=60)  # a module that prints a poem
    assert (child.pid, child.is_running) == (None, False)


async def test_a_child_that_is_killed_before_it_has_said_why_is_told_by_how_it_ended() -> None:
    set_runner_limits(engines={"last_words_s": 30.0})  # on a busy machine its end may be told later than that it is mute
    child = Child("silent")

    def kill_it(_progress: Progress) -> None:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(EngineError, match=r"^the engine process died without a word \(killed by SIGKILL\)$"):
        await child.start_ours("tests.fakes.engines.programs.silent_child", {}, kill_it, limit_s=60)
    assert (child.pid, child.is_running) == (None, False)
