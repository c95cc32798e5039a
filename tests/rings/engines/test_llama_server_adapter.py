"""Somebody else's llama-server: a router by its contract, and a real llama.cpp with one model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines.llama_server import LlamaServer
from runner.engines.port import MESSAGES, RESPONSES, FlushRequest, FlushResult, FlushScope, Health
from runner.errors import EngineError
from tests.fakes.engines import suite
from tests.fakes.engines.llama_server import QUESTION, RouterContract, run_router, server_plan
from tests.fakes.engines.llamacpp import ENDLESS
from tests.fakes.engines.llamacpp import QUESTION as LONG_QUESTION
from tests.fakes.engines.suite import (
    EngineUnderTest,
    ask,
    assert_health,
    chat_call,
    openai_cached_tokens,
)
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


@pytest_asyncio.fixture
async def router() -> AsyncIterator[RouterContract]:
    async with run_router() as contract:
        yield contract


@contextlib.asynccontextmanager
async def plain_server(*, cache_ram_mib: int = 0, slot_save_path: str = "/dev/null/", key: str = "") -> AsyncIterator[str]:
    """Yield the address of a real llama.cpp server."""
    program = str(Path(suite.__file__).with_name("programs") / "plain_llama_server.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, str(TINY_MODEL_PATH), str(cache_ram_mib), slot_save_path, key,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    finally:
        process.kill()
        await process.wait()


def ignore(_progress: Progress) -> None:
    """Take progress that is of no interest."""


# ---- router mode ----


async def test_a_routers_progress_is_passed_on(router: RouterContract, client: aiohttp.ClientSession) -> None:
    router.models["tiny"].needs_listener = True
    reported: list[Progress] = []
    engine = LlamaServer(server_plan(router.url), client)
    await engine.load(reported.append)
    assert Progress("text_model", 0.5) in reported
    assert router.told == ["load tiny"]
    assert engine.capabilities.function_calling
    assert engine.capabilities.vision_input
    assert engine.capabilities.isolates_tenants
    assert MESSAGES not in engine.capabilities.endpoints


async def test_a_model_that_is_loaded_already_is_not_loaded_again(
    router: RouterContract, client: aiohttp.ClientSession
) -> None:
    router.models["tiny"].status = "sleeping"
    engine = LlamaServer(server_plan(router.url), client)
    await engine.load(ignore)
    assert router.told == []
    assert engine.capabilities.version == "b6000-0123abc"
    await assert_health(engine, Health.OK)


@pytest.mark.parametrize("wanted", [True, None])
async def test_dialects_that_the_template_is_told_nothing_in_are_left_to_translation(
    router: RouterContract, client: aiohttp.ClientSession, *, wanted: bool | None
) -> None:
    plan = server_plan(router.url)
    if wanted is not None:
        plan = dataclasses.replace(plan, options={**plan.options, "enable_thinking": wanted})
    engine = LlamaServer(plan, client)
    await engine.load(ignore)
    assert (RESPONSES in engine.capabilities.endpoints) is (wanted is None)
    assert (MESSAGES in engine.capabilities.endpoints) is False, "its slots are pinned"
    await ask(engine, chat_call("tiny", QUESTION))
    assert router.bodies[-1].get("chat_template_kwargs") == (None if wanted is None else {"enable_thinking": wanted})


async def test_requests_reach_the_router_under_its_own_name_for_the_model(
    router: RouterContract, client: aiohttp.ClientSession
) -> None:
    engine = LlamaServer(server_plan(router.url, "house model", server_model="tiny"), client)
    await engine.load(ignore)
    await ask(engine, chat_call("house model", QUESTION))
    assert router.bodies[-1]["model"] == "tiny"
    assert router.bodies[-1]["id_slot"] in {0, 1}


async def test_a_model_the_router_does_not_know_is_an_error_that_names_those_it_does(
    router: RouterContract, client: aiohttp.ClientSession
) -> None:
    with pytest.raises(EngineError, match="does not know nothing; it knows: broken, tiny"):
        await LlamaServer(server_plan(router.url, "nothing"), client).load(ignore)


async def test_a_model_that_is_pushed_out_while_it_loads_is_an_error(
    router: RouterContract, client: aiohttp.ClientSession
) -> None:
    router.models["tiny"].evicted = True
    router.models["tiny"].load_s = 0.5
    with pytest.raises(EngineError, match="unloaded again while it was being loaded"):
        await asyncio.wait_for(LlamaServer(server_plan(router.url), client).load(ignore), 30)


async def test_a_cancelled_load_is_taken_back(router: RouterContract, client: aiohttp.ClientSession) -> None:
    router.models["tiny"].load_s = 30.0
    loading = asyncio.create_task(LlamaServer(server_plan(router.url), client).load(ignore))

    await eventually(lambda: router.models["tiny"].status == "loading")
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert router.models["tiny"].status == "unloaded"


async def test_an_unload_that_the_router_refuses_is_an_error_and_the_model_stays_in_use(
    router: RouterContract, client: aiohttp.ClientSession
) -> None:
    engine = LlamaServer(server_plan(router.url), client)
    await engine.load(ignore)
    router.models["tiny"].refuses_unload = True
    with pytest.raises(EngineError, match="the instance does not react"):
        await engine.unload(gently=True)
    await assert_health(engine, Health.OK)
    router.models["tiny"].refuses_unload = False
    await engine.unload(gently=True)
    assert router.models["tiny"].status == "unloaded"


async def test_a_model_that_somebody_else_unloads_is_noticed(router: RouterContract, client: aiohttp.ClientSession) -> None:
    engine = LlamaServer(server_plan(router.url), client)
    await engine.load(ignore)
    router.models["tiny"].status = "unloaded"
    await assert_health(engine, Health.UNREACHABLE)


# ---- the key and the address ----


async def test_the_key_comes_from_the_named_variable(
    router: RouterContract, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.key = "sk-secret"
    plan = server_plan(router.url, server_api_key_env="THE_KEY")
    with pytest.raises(EngineError, match=r"variable THE_KEY \(server_api_key_env\) is empty"):
        await LlamaServer(plan, client).load(ignore)
    monkeypatch.setenv("THE_KEY", "sk-wrong")
    with pytest.raises(EngineError, match=r"refuses the key \(HTTP 401\)") as caught:
        await LlamaServer(plan, client).load(ignore)
    assert "sk-" not in str(caught.value)
    monkeypatch.setenv("THE_KEY", "sk-secret")
    engine = LlamaServer(plan, client)
    await engine.load(ignore)
    assert await ask(engine, chat_call("tiny", QUESTION))


@pytest.mark.parametrize("url", ["", "localhost:8080", "file:///etc/passwd"])
async def test_an_address_that_is_none_is_an_error(url: str, client: aiohttp.ClientSession) -> None:
    with pytest.raises(EngineError, match="needs server_url"):
        await LlamaServer(server_plan(url), client).load(ignore)


async def test_a_server_that_is_not_there_is_an_error(router: RouterContract, client: aiohttp.ClientSession) -> None:
    with pytest.raises(EngineError, match="was not answered"):
        await LlamaServer(server_plan("http://127.0.0.1:9"), client).load(ignore)


# ---- a real llama.cpp with one model ----

CHECKS_ON_A_PLAIN_SERVER = (
    suite.check_a_load_reports_progress_and_ends_with_an_engine_that_serves,
    suite.check_a_streamed_answer_comes_in_pieces_to_its_end,
    suite.check_leaving_a_stream_early_frees_the_engine,
    suite.check_a_flush_is_honest_about_what_it_did,
    suite.check_what_one_tenant_left_is_reused_by_no_other,
)


@pytest.mark.parametrize("check", CHECKS_ON_A_PLAIN_SERVER, ids=[check.__name__ for check in CHECKS_ON_A_PLAIN_SERVER])
async def test_a_plain_server_keeps_the_promises_of_the_port(check: object, client: aiohttp.ClientSession) -> None:
    assert callable(check)
    async with plain_server() as url:
        subject = EngineUnderTest(
            engine=LlamaServer(server_plan(url), client),
            call=chat_call("tiny", LONG_QUESTION, max_tokens=8),
            streamed=chat_call("tiny", LONG_QUESTION, max_tokens=8, stream=True),
            long=chat_call("tiny", LONG_QUESTION, **ENDLESS),
            cached=openai_cached_tokens,
        )
        await check(subject)


async def test_a_plain_server_is_not_ours_to_stop(client: aiohttp.ClientSession) -> None:
    async with plain_server() as url:
        engine = LlamaServer(server_plan(url), client)
        await engine.load(ignore)
        with pytest.raises(EngineError, match="not ours to stop"):
            await engine.unload(gently=True)
        assert await ask(engine, chat_call("tiny", LONG_QUESTION, max_tokens=4))
        await engine.unload(gently=False)
        await assert_health(engine, Health.UNREACHABLE)
        await engine.unload(gently=True)


async def test_a_plain_server_that_serves_another_model_or_wants_a_key_says_so(client: aiohttp.ClientSession) -> None:
    async with plain_server(key="sk-plain") as url:
        with pytest.raises(EngineError, match=r"refuses the key \(HTTP 401\)"):
            await LlamaServer(server_plan(url), client).load(ignore)
    async with plain_server() as url:
        with pytest.raises(EngineError, match="serves tiny, not other: set server_model"):
            await LlamaServer(server_plan(url, "other"), client).load(ignore)


async def test_a_server_with_a_host_memory_cache_is_found_out_and_nothing_is_promised(client: aiohttp.ClientSession) -> None:
    async with plain_server(cache_ram_mib=256) as url:
        engine = LlamaServer(server_plan(url), client)
        await engine.load(ignore)
        assert not engine.capabilities.isolates_tenants
        assert not engine.capabilities.flushes_cache
        assert MESSAGES in engine.capabilities.endpoints
        outcome = await engine.flush(FlushRequest(FlushScope.ALL))
        assert outcome.result is FlushResult.NOT_SUPPORTED
        assert "--cache-ram 0" in outcome.detail


async def test_a_server_that_does_not_erase_keeps_tenants_apart_and_says_that_it_cannot_flush(
    client: aiohttp.ClientSession,
) -> None:
    async with plain_server(slot_save_path="") as url:
        engine = LlamaServer(server_plan(url), client)
        await engine.load(ignore)
        assert engine.capabilities.isolates_tenants
        outcome = await engine.flush(FlushRequest(FlushScope.ALL))
        assert outcome.result is FlushResult.NOT_SUPPORTED
        assert "--slot-save-path" in outcome.detail


async def test_a_server_that_died_is_noticed(client: aiohttp.ClientSession) -> None:
    async with plain_server() as url:
        engine = LlamaServer(server_plan(url), client)
        await engine.load(ignore)
        await assert_health(engine, Health.OK)
    await assert_health(engine, Health.UNREACHABLE)
    assert (await engine.stats()).running is None
