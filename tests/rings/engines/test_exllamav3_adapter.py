"""ExLlamaV3's child over a stand-in for the library: settings, turns of tenants, flushes, failures."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner.definitions.plan import LoadPlan
from runner.engines.exllamav3 import ExLlamaV3Engine
from runner.engines.port import CHAT, Call, FlushRequest, FlushResult, FlushScope
from runner.errors import EngineError
from tests.fakes.engines.exllamav3 import QUESTION, exllama_plan, fake_library
from tests.fakes.engines.talk import ask_chat, ask_json, client_session, json_call, loaded, served, text_of_chat
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def library() -> Iterator[None]:
    """Have children find the stand-in."""
    with fake_library():
        yield


with_library = pytest.mark.usefixtures("library")


def question(tenant: str, **fields: object) -> Call:
    messages = [{"role": "user", "content": QUESTION}]
    return dataclasses.replace(json_call(CHAT, messages=messages, **{"max_tokens": 4, **fields}), tenant=tenant)


def cached(answer: tuple[int, dict[str, dict[str, dict[str, int]]]]) -> int:
    status, body = answer
    assert status == 200, body
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@with_library
async def test_progress_is_that_of_the_modules(tmp_path: Path) -> None:
    async with client_session() as client:
        engine = ExLlamaV3Engine(exllama_plan(tmp_path, fake={"modules": 8}), client)
        async with loaded(engine) as reported:
            pass
    assert [progress.fraction for progress in reported if progress.stage == "loading modules"] == [n / 8 for n in range(9)]


@with_library
async def test_an_answer_is_counted_to_the_token(tmp_path: Path) -> None:
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path)) as engine:
        cut = await ask_chat(engine, "Hi", max_tokens=5)
        ended = await ask_chat(engine, "Hi")
        stopped = await ask_chat(engine, "Hi", stop="word4")
    assert text_of_chat(cut) == "word1 word2 word3 word4 word5 "
    assert (cut[1]["choices"][0]["finish_reason"], cut[1]["usage"]["completion_tokens"]) == ("length", 5)
    assert ended[1]["choices"][0]["finish_reason"] == "stop"
    assert text_of_chat(stopped) == "word1 word2 word3 "


@with_library
async def test_requests_of_one_tenant_run_together_and_another_tenant_waits_its_turn(tmp_path: Path) -> None:
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path, slots=4)) as engine:
        endless = {"max_tokens": 50_000, "ignore_eos": True, "stream": True}
        async with engine.stream(question("alpha", **endless)) as one:
            assert await one.content.readany()
            assert await ask_json(engine, question("alpha"))

            async def are_in(count: int) -> bool:
                return (await engine.stats()).running == count

            await eventually(partial(are_in, 1))  # the slot of an answer is free a moment after its end
            other = asyncio.create_task(ask_json(engine, question("beta")))
            await eventually(partial(are_in, 2))
            late = asyncio.create_task(ask_json(engine, question("alpha")))
            await eventually(partial(are_in, 3))
            done, _pending = await asyncio.wait([other, late], timeout=0.3)
            assert not done, "whoever comes after the other tenant does not overtake it"
        assert cached(await asyncio.wait_for(other, 30)) == 0
        assert cached(await asyncio.wait_for(late, 30)) == 0


@with_library
async def test_a_request_that_left_while_it_waited_its_turn_is_never_started(tmp_path: Path) -> None:
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path, slots=3)) as engine:
        endless = {"max_tokens": 50_000, "ignore_eos": True, "stream": True}
        async with engine.stream(question("alpha", **endless)) as running:
            assert await running.content.readany()
            waiting = asyncio.create_task(ask_json(engine, question("beta")))

            async def both_are_in() -> bool:
                return (await engine.stats()).running == 2

            await eventually(both_are_in)
            waiting.cancel()

            async def is_out() -> bool:
                return (await engine.stats()).running == 1

            await eventually(is_out, "its slot is free again")


@with_library
async def test_a_flush_while_something_runs_is_refused_and_does_nothing(tmp_path: Path) -> None:
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path)) as engine:
        async with engine.stream(question("alpha", max_tokens=50_000, ignore_eos=True, stream=True)) as response:
            received = b""
            while received.count(b"data: ") < 3:  # the first event goes out before the generator has the request
                received += await response.content.readany()
            outcome = await engine.flush(FlushRequest(FlushScope.MODEL))
            assert outcome.result is FlushResult.REFUSED_BUSY

        async def is_idle() -> bool:
            return (await engine.stats()).running == 0

        await eventually(is_idle)
        assert cached(await ask_json(engine, question("alpha"))) > 0
        outcome = await engine.flush(FlushRequest(FlushScope.TENANT, tenant="alpha"))
    assert outcome.result is FlushResult.RELOADED
    assert outcome.entries_removed
    assert "wider than the tenant" in outcome.detail


@with_library
async def test_the_numbers_are_those_of_the_page_table(tmp_path: Path) -> None:
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path, exllama_cache_size=4096)) as engine:
        first = await ask_json(engine, question("alpha"))
        again = await ask_json(engine, question("alpha"))
        stats = await engine.stats()
    assert cached(first) == 0 < cached(again)
    assert (stats.kv_total_tokens, stats.kv_used_tokens) == (4096, 0)
    assert stats.cache_hit_tokens == cached(again)
    assert stats.cache_queried_tokens == 2 * first[1]["usage"]["prompt_tokens"]


@with_library
async def test_a_job_that_does_not_fit_the_cache_is_a_context_overflow(tmp_path: Path) -> None:
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path, exllama_cache_size=512)) as engine:
        status, body = await ask_json(engine, question("alpha"))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exllama_cache_size": 1000}, "multiple of 256"),
        ({"exllama_cache_quant": "9,9"}, "exllama_cache_quant"),
        ({"exllama_cache_k_bits": 4}, "go together"),
        ({"exllama_gpu_split": "24,all"}, "exllama_gpu_split"),
        ({"exllama_tensor_parallel": "yes"}, "exllama_tensor_parallel"),
    ],
)
async def test_an_option_that_does_not_do_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    async with client_session() as client:
        engine = ExLlamaV3Engine(exllama_plan(tmp_path, **options), client)
        with pytest.raises(EngineError, match=words):
            await engine.load(lambda _progress: None)
        assert engine.pids == ()


@with_library
async def test_a_quantised_cache_and_a_split_reach_the_library(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exllama_cache_quant": "8,4", "exllama_gpu_split": "24,24", "exllama_tensor_parallel": True}
    async with served(ExLlamaV3Engine, exllama_plan(tmp_path, **options)) as engine:
        assert text_of_chat(await ask_chat(engine, "Hi", max_tokens=2))


async def test_without_the_library_the_owner_is_told_what_to_install(tmp_path: Path) -> None:
    async with client_session() as client:
        engine = ExLlamaV3Engine(exllama_plan(tmp_path), client)
        with pytest.raises(EngineError, match=r"muster\[exllamav3\]"):
            await engine.load(lambda _progress: None)


async def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    async with client_session() as client:
        with pytest.raises(EngineError, match=r"config\.json"):
            await ExLlamaV3Engine(LoadPlan("x", "exllamav3", tmp_path), client).load(lambda _progress: None)
