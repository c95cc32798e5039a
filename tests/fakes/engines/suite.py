"""What every engine adapter promises, as checks that run on all of them (see test_engine_port.py).

An adapter joins by a module beside this one that exposes ``CASES`` and that test_engine_port.py names.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import psutil
import pytest

from runner.definitions.plan import LoadPlan, Progress
from runner.engines.port import (
    CHAT,
    Call,
    Engine,
    EngineStats,
    FlushRequest,
    FlushResult,
    FlushScope,
    Health,
    Response,
)
from runner.errors import EngineError
from runner.serving.request import ask_to_continue
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.process import is_alive
from tests.fakes.waiting import eventually, turns

WAIT_LIMIT_S = 30.0
"""For what comes soon on a machine that is not busy."""
LEFT_STREAM_LIMIT_S = 1.0
"""The port's own promise: an engine is free again this soon after a client has left."""
LEFT_STREAM_TRIES = 10
"""A machine that stands still for a moment spoils one of them, a defect of the adapter all."""


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """An adapter that is not loaded yet, and what to ask of it.

    ``call`` is answered with 200 within seconds. ``streamed`` is answered with several events and ends. ``long`` is streamed
    too and goes on for several seconds, so that it would still run when it is looked for after it was left. ``broken`` is
    the same adapter over weights that cannot be loaded; its error must match ``broken_words``. ``cached`` reads the reused
    prompt tokens out of an answer to ``call`` (whose prompt should be some dozen tokens long). ``running`` counts the
    requests that the engine itself works on; None = by ``stats().running``. None elsewhere = the adapter has no such
    thing, and the check is skipped.
    """

    engine: Engine
    call: Call
    streamed: Call | None = None
    long: Call | None = None
    broken: Engine | None = None
    broken_words: str = r"\w"
    cached: Callable[[bytes], int] | None = None
    running: Callable[[], int | Awaitable[int]] | None = None
    flushes: frozenset[FlushResult] = frozenset({FlushResult.FLUSHED})
    """What a flush of an idle engine may answer."""
    load_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EngineCase:
    """``open`` gets a fresh folder and a client session; it stops what else it started (contract servers) on leaving."""

    name: str
    open: Callable[[Path, aiohttp.ClientSession], AbstractAsyncContextManager[EngineUnderTest]]
    marks: tuple[pytest.MarkDecorator, ...] = ()


def chat_call(model: str, text: str, **fields: object) -> Call:
    """Return a chat completion request; ``fields`` join the body."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return Call("POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode())


def openai_cached_tokens(body: bytes) -> int:
    """Return ``usage.prompt_tokens_details.cached_tokens`` of an answer, 0 where it is not there."""
    details = json.loads(body)["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def chatting(
    kind: Callable[[LoadPlan, aiohttp.ClientSession], Engine], client: aiohttp.ClientSession, plan: LoadPlan, broken: LoadPlan,
    broken_words: str, *, text: str, model: str = "tiny", long: Mapping[str, object] | None = None, **more: Any,
) -> EngineUnderTest:  # fmt: skip
    """Return an adapter for a plan, and one for a broken plan, both asked for chats about ``text``."""
    return EngineUnderTest(
        kind(plan, client), chat_call(model, text, max_tokens=8), chat_call(model, text, max_tokens=8, stream=True),
        chat_call(model, text, **{"max_tokens": 100_000, "stream": True, **(long or {})}), kind(broken, client), broken_words,
        **more,
    )  # fmt: skip


async def wait_until(condition: Callable[[], Awaitable[bool]], limit_s: float = WAIT_LIMIT_S) -> bool:
    """Return whether ``condition`` came true within ``limit_s``."""
    try:
        return await eventually(condition, within_s=limit_s)
    except AssertionError:
        return False


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def process_tree(pids: Iterable[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
    return found


async def assert_gone(processes: Iterable[psutil.Process]) -> None:
    """Fail unless all of them have ended; workers of a killed process get a moment to be collected."""
    watched = list(processes)

    await eventually(lambda: not any(is_alive(process) for process in watched), f"all of these are gone: {watched}")


async def assert_health(engine: Engine, wanted: Health) -> None:
    """Fail unless it is in that health; an answer of a machine that stands still for a moment comes too late to count."""

    async def is_so() -> bool:
        return await engine.health() is wanted

    await eventually(is_so, f"it is {wanted}")


async def load(subject: EngineUnderTest) -> list[Progress]:
    reported: list[Progress] = []
    await asyncio.wait_for(subject.engine.load(reported.append), subject.load_s)
    return reported


async def ask(engine: Engine, call: Call) -> bytes:
    async with asyncio.timeout(WAIT_LIMIT_S), engine.stream(call) as response:
        body = await response.read()
    assert response.status == 200, body[:500]
    return body


async def assert_goes_on(engine: Engine, question: str) -> None:
    """Fail unless the engine goes on with its own answer wherever that was cut, and streams what is new alone."""
    turns, continuation = [{"role": "user", "content": question}], engine.capabilities.continuation
    asked: dict[str, object] = {"model": "tiny", "temperature": 0, "max_tokens": 40, "stream": True}
    whole = await read_pieces(engine, json.dumps({**asked, "messages": turns}).encode())
    assert len(whole) > 4
    assert continuation is not None
    for number in range(1, len(whole) - 1, 3):
        begun = "".join(whole[:number]).rstrip()
        body = {**asked, "messages": [*turns, {"role": "assistant", "content": begun}]}
        rest = await read_pieces(engine, ask_to_continue(json.dumps(body).encode(), continuation))
        assert (begun + "".join(rest)).startswith("".join(whole)), number


async def read_pieces(engine: Engine, body: bytes) -> list[str]:
    data = await ask(engine, Call("POST", CHAT, {"content-type": "application/json"}, body))
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    return [text for chunk in chunks for choice in chunk["choices"] if (text := choice["delta"].get("content"))]


async def count_running(subject: EngineUnderTest) -> int | None:
    if subject.running is not None:
        counted = subject.running()
        return counted if isinstance(counted, int) else await counted
    return (await subject.engine.stats()).running


async def first_bytes(response: Response) -> bytes:
    assert response.status == 200
    return await asyncio.wait_for(response.content.readany(), WAIT_LIMIT_S)


# ---- loading and unloading ----


async def check_a_load_reports_progress_and_ends_with_an_engine_that_serves(subject: EngineUnderTest) -> None:
    reported = await load(subject)
    assert reported, "a load says what it does"
    assert all(progress.stage for progress in reported)
    fractions = [progress.fraction for progress in reported if progress.fraction is not None]
    assert all(0.0 <= fraction <= 1.0 for fraction in fractions), fractions
    await assert_health(subject.engine, Health.OK)
    assert await ask(subject.engine, subject.call)
    assert subject.call.path in subject.engine.capabilities.endpoints


async def check_unload_leaves_no_process_and_it_loads_again(subject: EngineUnderTest) -> None:
    await subject.engine.unload(gently=True)
    for gently in (True, False):
        await load(subject)
        processes = process_tree(subject.engine.pids)
        assert await ask(subject.engine, subject.call)
        await subject.engine.unload(gently=gently)
        await assert_gone(processes)
        assert (subject.engine.pids, await subject.engine.health() is Health.OK) == ((), False)
    for gently in (True, False):
        await subject.engine.unload(gently=gently)


async def check_broken_weights_raise_the_engines_words_and_leave_no_process(subject: EngineUnderTest) -> None:
    if subject.broken is None:
        pytest.skip("nothing that fails to load")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(subject.broken.load(lambda _progress: None), subject.load_s)
    assert re.search(subject.broken_words, str(caught.value)), str(caught.value)
    assert subject.broken.pids == ()
    await assert_gone(set(psutil.Process().children(recursive=True)) - before)
    assert await subject.broken.health() is not Health.OK
    await subject.broken.unload(gently=True)


async def check_a_cancelled_load_leaves_nothing_and_can_be_repeated(subject: EngineUnderTest) -> None:
    started = asyncio.Event()
    before = set(psutil.Process().children(recursive=True))
    loading = asyncio.create_task(subject.engine.load(lambda _progress: started.set()))
    waits = {loading, asyncio.create_task(started.wait())}
    await asyncio.wait(waits, timeout=WAIT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)

    async def has_process_or_is_done() -> bool:
        return loading.done() or bool(subject.engine.pids)

    await wait_until(has_process_or_is_done, 1.0)
    processes = process_tree(subject.engine.pids)
    loading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(asyncio.gather(loading, return_exceptions=True)), WAIT_LIMIT_S)
    if loading.cancelled():
        await assert_gone([*processes, *(set(psutil.Process().children(recursive=True)) - before)])
        assert subject.engine.pids == ()
    await load(subject)
    assert await ask(subject.engine, subject.call)


# ---- requests ----


async def check_a_streamed_answer_comes_in_pieces_to_its_end(subject: EngineUnderTest) -> None:
    if subject.streamed is None:
        pytest.skip("does not stream")
    await load(subject)
    async with asyncio.timeout(WAIT_LIMIT_S), subject.engine.stream(subject.streamed) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        body = await response.read()
    events = [event for event in re.split(rb"\r?\n\r?\n", body) if event.strip()]
    assert len(events) > 2, body
    assert await ask(subject.engine, subject.call)


async def check_leaving_a_stream_early_frees_the_engine(subject: EngineUnderTest) -> None:
    if subject.long is None:
        pytest.skip("no answer that lasts")
    await load(subject)
    await assert_freed_by_leaving(subject, subject.long)
    assert await ask(subject.engine, subject.call)


async def assert_freed_by_leaving(subject: EngineUnderTest, long: Call) -> None:
    """Fail unless a client that leaves in the middle of an answer frees the engine within LEFT_STREAM_LIMIT_S."""
    troubles: list[str] = []
    while trouble := await _leave_early(subject, long):
        troubles.append(trouble)
        assert len(troubles) < LEFT_STREAM_TRIES, troubles


async def _leave_early(subject: EngineUnderTest, long: Call) -> str:
    async with subject.engine.stream(long) as response:
        await first_bytes(response)
        counted = await count_running(subject)
        if counted == 0:
            return "the answer had ended before it was left: make the long call longer"

    async def is_idle() -> bool:
        return await count_running(subject) == 0

    is_told = counted is not None
    return "still working for a client that has left" if is_told and not await wait_until(is_idle, LEFT_STREAM_LIMIT_S) else ""


async def check_unload_ends_while_a_stream_runs(subject: EngineUnderTest) -> None:
    if subject.long is None:
        pytest.skip("no answer that lasts")
    await load(subject)
    processes = process_tree(subject.engine.pids)
    async with subject.engine.stream(subject.long) as response:
        await first_bytes(response)
        await asyncio.wait_for(subject.engine.unload(gently=True), WAIT_LIMIT_S)
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await asyncio.wait_for(response.read(), WAIT_LIMIT_S)
    await assert_gone(processes)


async def check_a_prompt_is_counted_as_its_answer_counts_it(subject: EngineUnderTest) -> None:
    await load(subject)
    engine = subject.engine
    if not engine.capabilities.counts_tokens:
        pytest.skip("does not count tokens")
    fields = msgspec.json.decode(subject.call.body, type=dict[str, msgspec.Raw])
    usage = json.loads(await ask(engine, subject.call))["usage"]
    assert await engine.count_tokens(fields) == usage["prompt_tokens"] > 0


# ---- what it keeps between requests ----


async def check_stats_never_raise(subject: EngineUnderTest) -> None:
    assert isinstance(await subject.engine.stats(), EngineStats)
    await load(subject)
    await ask(subject.engine, subject.call)
    loaded = await subject.engine.stats()
    numbers = [value for value in dataclasses.asdict(loaded).values() if value is not None]
    assert all(value >= 0 for value in numbers), loaded
    if loaded.kv_used_tokens is not None and loaded.kv_total_tokens is not None:
        assert loaded.kv_used_tokens <= loaded.kv_total_tokens
    await subject.engine.unload(gently=True)
    assert isinstance(await subject.engine.stats(), EngineStats)


async def check_a_flush_is_honest_about_what_it_did(subject: EngineUnderTest) -> None:
    await load(subject)
    call = dataclasses.replace(subject.call, tenant="alpha", cache_mode="prefix")
    await ask(subject.engine, call)
    again = await ask(subject.engine, call)
    outcome = await asyncio.wait_for(subject.engine.flush(FlushRequest(FlushScope.MODEL)), WAIT_LIMIT_S)
    assert outcome.result in subject.flushes, outcome
    if outcome.result is FlushResult.NOT_SUPPORTED:
        assert outcome.detail, "why not, and what would do instead"
        assert not subject.engine.capabilities.flushes_cache
    elif outcome.result is FlushResult.NOTHING_KEPT:
        assert subject.engine.capabilities.keeps_nothing
    elif subject.cached is not None:
        assert subject.cached(again) > 0, "the prompt is too short to show reuse"
        assert subject.cached(await ask(subject.engine, call)) == 0
    await assert_health(subject.engine, Health.OK)


async def check_what_one_tenant_left_is_reused_by_no_other(subject: EngineUnderTest) -> None:
    await load(subject)
    if subject.cached is None or not subject.engine.capabilities.isolates_tenants:
        pytest.skip("does not isolate tenants")
    alpha = dataclasses.replace(subject.call, tenant="alpha", cache_mode="prefix")
    await ask(subject.engine, alpha)
    assert subject.cached(await ask(subject.engine, alpha)) > 0
    for tenant in ("beta", "gamma", "delta", "epsilon"):
        call = dataclasses.replace(alpha, tenant=tenant)
        assert subject.cached(await ask(subject.engine, call)) == 0, tenant
    tagged = dataclasses.replace(alpha, tenant="epsilon", cache_tag="other")
    assert subject.cached(await ask(subject.engine, tagged)) == 0
    private = dataclasses.replace(alpha, tenant="epsilon", cache_mode="none")
    assert subject.cached(await ask(subject.engine, private)) == 0


# ---- when it dies or hangs ----


async def check_a_killed_engine_is_noticed_and_loads_again(subject: EngineUnderTest) -> None:
    await load(subject)
    processes = process_tree(subject.engine.pids)
    if not processes:
        pytest.skip("no process of ours")
    gone = asyncio.create_task(subject.engine.wait_gone())
    os.kill(processes[0].pid, signal.SIGKILL)
    await asyncio.wait_for(gone, WAIT_LIMIT_S)
    assert await subject.engine.health() is not Health.OK
    assert isinstance(await subject.engine.stats(), EngineStats)
    with pytest.raises((aiohttp.ClientError, OSError)):
        await ask(subject.engine, subject.call)
    await load(subject)
    await assert_gone(processes)
    assert await ask(subject.engine, subject.call)


async def check_a_hung_engine_is_silent_and_unload_kills_it(subject: EngineUnderTest) -> None:
    await load(subject)
    processes = process_tree(subject.engine.pids)
    if not processes:
        pytest.skip("no process of ours")
    for process in processes:
        process.suspend()
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await subject.engine.health() is not Health.SILENT:
            await turns()  # a signal stops one thread after the other, and one of them may still have answered
    set_runner_limits(engines={"stop_s": 1.0, "server_stop_s": 1.0})
    await asyncio.wait_for(subject.engine.unload(gently=True), WAIT_LIMIT_S)
    await assert_gone(processes)


CHECKS = (
    check_a_load_reports_progress_and_ends_with_an_engine_that_serves, check_unload_leaves_no_process_and_it_loads_again,
    check_broken_weights_raise_the_engines_words_and_leave_no_process,
    check_a_cancelled_load_leaves_nothing_and_can_be_repeated, check_a_streamed_answer_comes_in_pieces_to_its_end,
    check_leaving_a_stream_early_frees_the_engine, check_unload_ends_while_a_stream_runs,
    check_a_prompt_is_counted_as_its_answer_counts_it, check_stats_never_raise, check_a_flush_is_honest_about_what_it_did,
    check_what_one_tenant_left_is_reused_by_no_other, check_a_killed_engine_is_noticed_and_loads_again,
    check_a_hung_engine_is_silent_and_unload_kills_it,
)  # fmt: skip


Answer = tuple[int, dict[str, Any]]  # JSON
AnyEngine = TypeVar("AnyEngine", bound=Engine)


@contextlib.asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        yield client


@contextlib.asynccontextmanager
async def loaded(engine: Engine) -> AsyncIterator[list[Progress]]:
    reported: list[Progress] = []
    try:
        await asyncio.wait_for(engine.load(reported.append), 30)
        yield reported
    finally:
        await engine.unload(gently=False)


@contextlib.asynccontextmanager
async def served(kind: Callable[[LoadPlan, aiohttp.ClientSession], AnyEngine], plan: LoadPlan) -> AsyncIterator[AnyEngine]:
    async with client_session() as client:
        engine = kind(plan, client)
        async with loaded(engine):
            yield engine


def json_call(path: str, **fields: object) -> Call:
    return Call("POST", path, {"content-type": "application/json"}, json.dumps(fields).encode())


async def ask_json(engine: Engine, call: Call) -> Answer:
    async with asyncio.timeout(30), engine.stream(call) as response:
        return response.status, json.loads(await response.read())


async def ask_chat(engine: Engine, text: str, **fields: object) -> Answer:
    messages = [{"role": "user", "content": text}]
    return await ask_json(engine, json_call(CHAT, **{"messages": messages, "temperature": 0, **fields}))


async def read_events(engine: Engine, call: Call) -> list[str]:
    async with asyncio.timeout(30), engine.stream(call) as response:
        body = (await response.read()).decode()
        assert response.status == 200, body
        assert response.headers["Content-Type"].startswith("text/event-stream")
    return [event.removeprefix("data: ") for event in body.split("\n\n") if event]


def text_of_chat(answer: Answer) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])
