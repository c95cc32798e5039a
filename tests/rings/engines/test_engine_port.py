"""Every engine adapter keeps the promises of the port, and llama.cpp those of an engine behind a supervisor and in the pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest

from runner.engines.http_engine import HttpEngine
from runner.engines.llama import make_llamacpp
from runner.engines.port import CHAT, MESSAGES, Call
from runner.engines.process import list_left, list_tree
from runner.engines.supervisor import Supervisor
from runner.errors import EngineError, InvalidLoadRequest, RequestRefused
from runner.limits import limits
from runner.pool.models import Model, ModelState
from tests.fakes.engine import FakeEngine
from tests.fakes.engines import cases, comfyui, llama_server, provider, tabbyapi
from tests.fakes.engines.cases import ENDLESS, QUESTION, tiny_plan
from tests.fakes.engines.suite import CHECKS, EngineCase, EngineUnderTest, ask, chat_call, client_session
from tests.fakes.runners import parts as pools
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)


ADAPTERS = (cases, comfyui, llama_server, provider, tabbyapi)
CASES = [pytest.param(case, id=case.name, marks=case.marks) for adapter in ADAPTERS for case in adapter.CASES]


@contextlib.asynccontextmanager
async def opened(case: EngineCase, folder: Path) -> AsyncIterator[EngineUnderTest]:
    """Yield the case's adapter; whatever the check leaves loaded is killed."""
    async with client_session() as client, case.open(folder, client) as subject:
        try:
            yield subject
        finally:
            await subject.engine.unload(gently=False)


@pytest.mark.parametrize("check", [pytest.param(check, id=check.__name__.removeprefix("check_")) for check in CHECKS])
@pytest.mark.parametrize("case", CASES)
async def test_an_engine_keeps_the_promises_of_the_port(case: EngineCase, check: object, tmp_path: Path) -> None:
    assert callable(check)
    async with opened(case, tmp_path) as subject:
        await check(subject)


NAMES = {f"k{number}": 1 for number in range(150_000)}
STUCK = json.dumps({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **NAMES}).encode()
"""The server's thread reads it for minutes: llama.cpp compares each name with all before it."""
CROWDED = "root ::= " + "[a-z]* " * 2000
"""llama.cpp's one loop works on its first letter for minutes, and its server lets go of who asked meanwhile."""


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[Supervisor]:
    """Yield a supervisor whose engine serves."""
    async with client_session() as client:
        supervisor = Supervisor(make_llamacpp(tiny_plan(), client), silent_s=60.0, on_change=lambda: None)
        await supervisor.load(lambda _progress: None)
        try:
            yield supervisor
        finally:
            await supervisor.unload(gently=False)


async def leave(supervisor: Supervisor, call: Call, *, once: Callable[[], bool]) -> None:
    """Ask, and leave as soon as ``once`` is true; the supervisor is told, as by the one who serves."""

    async def wait_for_answer() -> None:
        async with supervisor.engine.stream(call) as response:
            await response.read()

    asking = asyncio.create_task(wait_for_answer())

    async def is_time() -> bool:
        return asking.done() or await asyncio.to_thread(once)

    await eventually(is_time)
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    supervisor.watch_left(len(call.body))


async def has_let_go(supervisor: Supervisor) -> bool:
    return not await asyncio.to_thread(list_left, supervisor.engine.pids)


def is_reading(supervisor: Supervisor) -> Callable[[], bool]:
    """Return what tells whether the engine has begun to work on what comes next."""

    def has_worked() -> bool:
        (process,) = list_tree(supervisor.engine.pids[0])
        return bool(sum(process.cpu_times()[:2]) > began + 0.1)

    (only,) = list_tree(supervisor.engine.pids[0])
    began = sum(only.cpu_times()[:2])
    return has_worked


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(chat_call("tiny", QUESTION, **ENDLESS), id="while it generates"),
        pytest.param(chat_call("tiny", QUESTION, **{**ENDLESS, "stream": False}), id="before it says a word"),
        pytest.param(chat_call("tiny", QUESTION * 10_000), id="while it reads a text of 1 MB"),
    ],
)
async def test_an_engine_that_is_busy_and_lets_go_is_left_alone(call: Call) -> None:
    async with supervised() as supervisor:
        before = supervisor.engine.pids
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(leave(supervisor, call, once=is_reading(supervisor)))
        await eventually(partial(has_let_go, supervisor))
        answer = await ask(supervisor.engine, chat_call("tiny", QUESTION, max_tokens=4))
        assert json.loads(answer)["usage"]["completion_tokens"]
        assert (supervisor.engine.pids, supervisor.restarts) == (before, 0)


async def test_a_flood_of_clients_that_leave_costs_no_engine_that_lets_go_its_model() -> None:
    """llama.cpp's threads see one after another that its client has left, each within a second."""
    body = json.dumps({"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]}).encode()
    call = Call("POST", MESSAGES, {"content-type": "application/json"}, body)
    async with supervised() as supervisor:
        before = supervisor.engine.pids

        async def leave_often() -> None:
            for _ in range(150):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await ask(supervisor.engine, call)
                supervisor.watch_left(len(body))

        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(leave_often())
            await eventually(partial(has_let_go, supervisor), within_s=120)
        assert json.loads(await ask(supervisor.engine, chat_call("tiny", QUESTION, max_tokens=4)))["usage"]["completion_tokens"]
        assert (supervisor.engine.pids, supervisor.restarts) == (before, 0)


async def test_an_engine_that_is_stuck_is_killed_also_while_others_leave_it_all_the_time() -> None:
    async with supervised() as supervisor:
        await leave(supervisor, Call("POST", CHAT, {"content-type": "application/json"}, STUCK), once=is_reading(supervisor))

        async def has_been_killed() -> bool:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, EngineError):
                async with asyncio.timeout(0.05):
                    await ask(supervisor.engine, chat_call("tiny", QUESTION, **ENDLESS))
            supervisor.watch_left(100)
            return supervisor.restarts == 1 and supervisor.is_ready

        await eventually(has_been_killed, within_s=60)


async def test_an_engine_whose_loop_is_stuck_when_its_client_has_left_is_killed_and_serves_again() -> None:
    async with supervised() as supervisor:
        before = supervisor.engine.pids
        assert await ask(supervisor.engine, chat_call("tiny", QUESTION, max_tokens=4))
        await supervisor.engine.stats()  # as a node asks all the time: from here on it is known how fast the engine is
        stuck = chat_call("tiny", QUESTION, max_tokens=100, grammar=CROWDED)
        await leave(supervisor, stuck, once=is_reading(supervisor))
        await eventually(lambda: supervisor.restarts == 1 and supervisor.is_ready, within_s=60)
        assert supervisor.engine.pids != before
        assert await ask(supervisor.engine, chat_call("tiny", QUESTION, max_tokens=4))


class LoopedEngine(FakeEngine):
    """One whose loop answers when a test lets it, and that says of itself how long a step may take."""

    def __init__(self, batch_s: float) -> None:
        super().__init__()
        self.batch_s, self.loop = batch_s, self
        self.asked = 0
        self.may_answer = asyncio.Event()

    async def ask_loop(self) -> None:
        """Return once the gate is open."""
        self.asked += 1
        await self.may_answer.wait()


async def test_an_engine_that_is_as_slow_as_it_has_been_keeps_its_model_and_one_that_was_fast_does_not() -> None:
    slow, fast = LoopedEngine(batch_s=60.0), LoopedEngine(batch_s=0.01)
    supervisors = [Supervisor(engine, silent_s=60, on_change=lambda: None, loop_limit_s=0.25) for engine in (slow, fast)]
    async with asyncio.TaskGroup() as group:
        for supervisor in supervisors:
            group.create_task(supervisor.load(lambda _progress: None))
    for supervisor in supervisors:
        supervisor.watch_left(100)

    await eventually(lambda: supervisors[1].restarts == 1 and supervisors[1].is_ready)
    assert (slow.asked, slow.steps) == (1, ["load"])
    slow.may_answer.set()
    supervisors[0].watch_left(100)  # while the first answer may not have come: asked again, for this client

    await eventually(lambda: slow.asked == 2)
    assert supervisors[0].restarts == 0
    for supervisor in supervisors:
        await supervisor.unload(gently=False)


async def test_a_step_may_take_what_llama_cpp_itself_has_counted_and_much_before_it_has() -> None:
    async with supervised() as supervisor:
        engine = supervisor.engine
        assert isinstance(engine, HttpEngine)
        assert (loop := engine.loop) is not None
        assert loop.batch_s == limits().engines.llama_batch_s
        assert await ask(engine, chat_call("tiny", QUESTION * 25, max_tokens=4))
        await engine.stats()
        seconds = float(re.findall(r"^llamacpp:prompt_seconds_total (\S+)", await engine.read_metrics(), re.MULTILINE)[0])
        assert 0.1 * seconds < loop.batch_s < min(10 * seconds, limits().engines.llama_batch_s)


# in the pool


def pids_of(model: Model) -> list[int]:
    return [pid for replica in model.replicas for pid in replica.supervisor.engine.pids]


async def test_unloading_frees_the_memory_and_the_process_and_can_be_repeated(tmp_path: Path) -> None:
    async with pools.assembled(tmp_path) as parts:
        first = await pools.load(parts, "a")
        assert await pools.answer(parts, "a") == 0
        pids = pids_of(pools.find(parts, "a"))
        result = await parts.pool.unloader.unload("a")
        assert result.before_bytes > 10 * 1024 * 1024
        assert (result.after_bytes, result.was_loaded) == (0, True)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        again = await parts.pool.unloader.unload("a")
        assert (again.before_bytes, again.was_loaded) == (0, False)
        second = await pools.load(parts, "b")
        # Not measured against the second load: shared pages are counted by share, so what that takes moves with what else runs.
        took = max(first.memory_bytes or 0, result.before_bytes)
        assert first.predicted_bytes != took == second.predicted_bytes, "what a load took is the next prediction"


async def test_an_engine_that_dies_is_withdrawn_and_comes_back_and_a_second_one_serves_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    twin = {"backend": "gguf", "model_path": "a.gguf", "replicas": 2, "replica_max": 3}
    (tmp_path / "data" / "settings.json").write_text(json.dumps({"engine": {"models": {"twin": twin}}}))
    async with pools.assembled(tmp_path) as parts:
        await pools.load(parts, "a")
        model, first = pools.find(parts, "a"), pids_of(pools.find(parts, "a"))
        os.kill(first[0], signal.SIGKILL)
        await eventually(lambda: model.state is ModelState.FAILED, "it is withdrawn")
        with pytest.raises(RequestRefused):
            await pools.answer(parts, "a")
        await eventually(lambda: model.state is ModelState.LOADED, "it is back")
        assert (pids_of(model) != first, await pools.answer(parts, "a")) == (True, 0)
        result, model = await pools.load(parts, "twin"), pools.find(parts, "twin")
        assert (result.replicas, len(pids_of(model)), model.slots) == (2, 2, 2)
        one, two = pools.ask("twin", tokens=50), pools.ask("twin", tenant="t2", tokens=50)
        async with parts.serving.open(one), parts.serving.open(two):
            assert [replica.active for replica in model.replicas] == [1, 1]
        os.kill(pids_of(model)[0], signal.SIGKILL)
        await eventually(lambda: model.slots == 1, "one replica is missed")
        assert model.state is ModelState.LOADED
        await pools.answer(parts, "twin")
        with pytest.raises(InvalidLoadRequest) as refused:
            await pools.load(parts, "b", replicas=99)
        assert refused.value.param == "replicas"
