"""TabbyAPI's adapter: one model at a time, loads that go on without a listener, keys from the environment."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from runner.engines.port import CHAT, Health, Progress
from runner.engines.tabbyapi import TabbyApiEngine
from runner.errors import EngineError
from tests.fakes.engines.scripted_server import hold_port
from tests.fakes.engines.tabbyapi import TabbyContract, keys_in_environment, tabby_plan
from tests.fakes.engines.talk import ask_chat, client_session, json_call
from tests.fakes.limits import set_runner_limits


@pytest.fixture
def keys() -> Iterator[None]:
    """Have the variables that the plans name."""
    with keys_in_environment():
        yield


with_keys = pytest.mark.usefixtures("keys")


def ignore(_progress: Progress) -> None:
    """Take no note of progress."""


@with_keys
async def test_progress_is_that_of_the_modules() -> None:
    reported: list[Progress] = []
    async with TabbyContract(modules=4).serve() as server, client_session() as client:
        await TabbyApiEngine(tabby_plan(server.url), client).load(reported.append)
    fractions = [progress.fraction for progress in reported if progress.fraction is not None]
    assert fractions == [0.25, 0.5, 0.75, 1.0, 1.0]


@with_keys
async def test_the_settings_of_the_plan_reach_the_server() -> None:
    options: dict[str, Any] = {"exllama_cache_size": 8192, "exllama_cache_quant": "8"}
    async with TabbyContract().serve() as server, client_session() as client:
        engine = TabbyApiEngine(tabby_plan(server.url, "alias", server_model="tiny", **options), client)
        await engine.load(ignore)
        await ask_chat(engine, "Hi", model="alias")
    assert server.loads == [{"model_name": "tiny", "max_seq_len": 4096, "cache_size": 8192, "cache_mode": "8,8"}]
    assert server.asked[0]["model"] == "tiny"


@with_keys
async def test_a_model_of_somebody_else_is_not_thrown_out() -> None:
    async with TabbyContract(loaded="other").serve() as server, client_session() as client:
        engine = TabbyApiEngine(tabby_plan(server.url), client)
        with pytest.raises(EngineError, match=r"'other'.*evict"):
            await engine.load(ignore)
        await engine.unload(gently=True)
    assert server.loaded == "other"
    assert server.loads == []


@with_keys
async def test_a_model_that_is_already_there_is_taken_as_it_is_unless_its_context_differs() -> None:
    async with TabbyContract(loaded="tiny", loads=[{"max_seq_len": 4096}]).serve() as server, client_session() as client:
        await TabbyApiEngine(tabby_plan(server.url), client).load(ignore)
        with pytest.raises(EngineError, match="context of 4096"):
            await TabbyApiEngine(tabby_plan(server.url, context_tokens=2048), client).load(ignore)
    assert len(server.loads) == 1


@with_keys
async def test_a_load_goes_on_when_the_connection_breaks_and_is_waited_for() -> None:
    async with TabbyContract(cuts_load_stream=True, module_s=0.1).serve() as server, client_session() as client:
        engine = TabbyApiEngine(tabby_plan(server.url), client)
        await asyncio.wait_for(engine.load(ignore), 30)
        assert server.loaded == "tiny"
        assert await engine.health() is Health.OK


@with_keys
async def test_a_cancelled_load_is_undone_when_the_server_has_finished_it() -> None:
    async with TabbyContract(module_s=0.1).serve() as server, client_session() as client:
        begun = asyncio.Event()

        def report(progress: Progress) -> None:
            if progress.fraction is not None:
                begun.set()

        loading = asyncio.create_task(TabbyApiEngine(tabby_plan(server.url), client).load(report))
        await asyncio.wait_for(begun.wait(), 30)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, 30)
    assert len(server.loads) == 1
    assert server.loaded is None


@with_keys
async def test_a_server_that_keeps_the_model_is_an_error() -> None:
    set_runner_limits(engines={"tabby_unload_s": 0.2})
    async with TabbyContract(keeps_model=True).serve() as server, client_session() as client:
        engine = TabbyApiEngine(tabby_plan(server.url), client)
        await engine.load(ignore)
        with pytest.raises(EngineError, match="still holds tiny"):
            await engine.unload(gently=True)
        server.keeps_model = False
        await engine.unload(gently=True)
    assert server.loaded is None


@with_keys
async def test_a_model_put_in_place_of_ours_is_noticed_and_left_alone() -> None:
    async with TabbyContract().serve() as server, client_session() as client:
        engine = TabbyApiEngine(tabby_plan(server.url), client)
        await engine.load(ignore)
        server.loaded = "other"
        assert await engine.health() is Health.SILENT
        await engine.unload(gently=True)
    assert server.loaded == "other"


async def test_a_wrong_key_is_said_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TabbyContract().serve() as server, client_session() as client:
        monkeypatch.setenv("TEST_TABBY_KEY", "a-wrong-key")
        monkeypatch.setenv("TEST_TABBY_ADMIN_KEY", "a-wrong-admin-key")
        with pytest.raises(EngineError, match="server_api_key_env") as caught:
            await TabbyApiEngine(tabby_plan(server.url), client).load(ignore)
        assert "wrong" not in str(caught.value)


async def test_a_variable_that_is_not_set_is_named() -> None:
    async with client_session() as client:
        with pytest.raises(EngineError, match="TEST_TABBY_KEY"):
            await TabbyApiEngine(tabby_plan("http://127.0.0.1:9"), client).load(ignore)


@with_keys
async def test_an_unknown_model_is_the_servers_own_words() -> None:
    async with TabbyContract().serve() as server, client_session() as client:
        with pytest.raises(EngineError, match="Could not find the model path"):
            await TabbyApiEngine(tabby_plan(server.url, "missing"), client).load(ignore)


@with_keys
async def test_a_server_that_is_not_there_is_an_error_and_unreachable() -> None:
    with hold_port() as place:
        async with client_session() as client:
            late = TabbyApiEngine(tabby_plan(f"http://127.0.0.1:{place.getsockname()[1]}"), client)
            with pytest.raises(EngineError):
                await late.load(ignore)
            assert await late.health() is Health.UNREACHABLE


@with_keys
async def test_a_request_carries_the_key_and_not_the_admin_key() -> None:
    async with TabbyContract().serve() as server, client_session() as client:
        engine = TabbyApiEngine(tabby_plan(server.url), client)
        await engine.load(ignore)
        call = json_call(CHAT, messages=[], stream=True, max_tokens=2)
        call = dataclasses.replace(call, headers={**call.headers, "authorization": "Bearer of-the-client"})
        async with engine.stream(call) as response:
            assert response.status == 200
            events = [line for line in (await response.read()).splitlines() if line]
            assert "x-admin-key" not in response.request_info.headers
    assert json.loads(events[0].removeprefix(b"data: "))
