"""CTranslate2 behind the text server: what clients of the two endpoints get, beyond the promises of every engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import psutil
import pytest

from runner.engines.ct2 import Ct2Engine
from runner.engines.port import CHAT, COMPLETIONS, TOKENIZE
from runner.errors import EngineError
from tests.fakes.engines.ct2 import ct2_plan
from tests.fakes.engines.talk import (
    ask_chat,
    ask_json,
    client_session,
    json_call,
    loaded,
    read_events,
    served,
    text_of_chat,
)
from tests.fakes.models.make import ct2_model_dir
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

QUESTION = "What is Muster?"


async def test_a_whole_answer_counts_its_tokens_and_its_time() -> None:
    async with served(Ct2Engine, ct2_plan()) as engine:
        status, body = await ask_chat(engine, QUESTION)
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    timings = body["timings"]
    assert (timings["prompt_n"], timings["cache_n"]) == (body["usage"]["prompt_tokens"], 0)
    assert timings["predicted_n"] == body["usage"]["completion_tokens"] > 5
    assert timings["predicted_ms"] > 0 < timings["prompt_ms"]


async def test_a_stream_follows_the_grammar_and_says_what_the_whole_answer_says() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    call = json_call(CHAT, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True})
    async with served(Ct2Engine, ct2_plan()) as engine:
        whole = text_of_chat(await ask_chat(engine, QUESTION))
        events = await read_events(engine, call)
        bare = await read_events(engine, json_call(CHAT, messages=messages, temperature=0, stream=True))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == chunks[-1]["timings"]["predicted_n"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == whole
    assert not any("usage" in json.loads(event) for event in bare[:-1])
    assert "timings" in json.loads(bare[-2])


async def test_stop_strings_and_limits_end_an_answer_where_they_say() -> None:
    async with served(Ct2Engine, ct2_plan()) as engine:
        whole = text_of_chat(await ask_chat(engine, QUESTION))
        stop = whole[8:14]
        stopped = await ask_chat(engine, QUESTION, stop=[stop])
        short = await ask_json(engine, json_call(COMPLETIONS, prompt="The with statement", max_tokens=3, temperature=0))
    assert text_of_chat(stopped) == whole.partition(stop)[0]
    assert stopped[1]["choices"][0]["finish_reason"] == "stop"
    assert short[1]["choices"][0]["finish_reason"] == "length"
    assert short[1]["usage"]["completion_tokens"] == 3


async def test_sampling_settings_reach_the_library() -> None:
    async with served(Ct2Engine, ct2_plan(slots=1)) as engine:
        varied = {text_of_chat(await ask_chat(engine, "Hi", temperature=1.5, max_tokens=30)) for _ in range(4)}
        greedy = {text_of_chat(await ask_chat(engine, QUESTION, temperature=1.5, top_k=1)) for _ in range(3)}
        beams = await ask_chat(engine, QUESTION, beam_size=3)
        penalised = text_of_chat(await ask_chat(engine, QUESTION, repetition_penalty=5.0))
    assert len(varied) > 1
    assert len(greedy) == 1
    assert text_of_chat(beams)
    assert beams[1]["usage"]["completion_tokens"] > 5
    assert penalised not in greedy


async def test_a_prompt_longer_than_the_context_is_refused_as_openai_refuses_it() -> None:
    async with served(Ct2Engine, ct2_plan(context_tokens=64)) as engine:
        status, body = await ask_chat(engine, "word " * 200)
        full = await ask_chat(engine, "word " * 10, ignore_eos=True)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert body["error"]["n_ctx"] == 64
    assert full[1]["usage"]["total_tokens"] == 64


async def test_the_key_guards_everything_but_health() -> None:
    async with client_session() as client:
        engine = Ct2Engine(ct2_plan(), client)
        async with loaded(engine):
            base = engine._child.server.base_url
            for method, path in (("GET", "/stats"), ("GET", "/v1/models"), ("POST", CHAT), ("POST", "/flush")):
                async with client.request(method, base + path, headers={"Authorization": "Bearer wrong"}) as response:
                    assert response.status == 401, path
            async with client.get(base + "/health") as response:
                assert response.status == 200


async def test_more_requests_than_slots_wait_in_a_line_and_all_are_answered() -> None:
    async with served(Ct2Engine, ct2_plan(slots=2, context_tokens=100_000)) as engine:
        long = json_call(CHAT, messages=[{"role": "user", "content": "x"}], ignore_eos=True, stream=True)
        async with engine.stream(long) as one, engine.stream(long) as two:
            assert await one.content.readany()
            assert await two.content.readany()
            waiting = [asyncio.create_task(ask_chat(engine, QUESTION, max_tokens=4)) for _ in range(3)]

            async def three_wait() -> bool:
                stats = await engine.stats()
                return (stats.running, stats.waiting) == (2, 3)

            await eventually(three_wait)
            waiting.pop().cancel()

            async def two_wait() -> bool:
                return (await engine.stats()).waiting == 2

            await eventually(two_wait)
        answers = await asyncio.gather(*waiting)
    assert [status for status, _body in answers] == [200, 200]


async def test_a_full_line_is_told_at_once() -> None:
    async with served(Ct2Engine, ct2_plan(slots=1, context_tokens=100_000)) as engine:
        long = json_call(CHAT, messages=[{"role": "user", "content": "x"}], ignore_eos=True, stream=True)
        async with engine.stream(long) as running:
            assert await running.content.readany()
            waiting = [asyncio.create_task(ask_chat(engine, "x")) for _ in range(64)]

            async def is_full() -> bool:
                return (await engine.stats()).waiting == 64

            await eventually(is_full)
            status, body = await ask_chat(engine, "x")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    assert (status, body["error"]["code"]) == (503, "queue_full")


async def test_a_model_without_a_template_offers_completions_only(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(ct2_model_dir(), bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    async with served(Ct2Engine, ct2_plan(bare)) as engine:
        assert engine.capabilities.endpoints == (COMPLETIONS, TOKENIZE)
        status, body = await ask_chat(engine, "Hi")
        plain, _ = await ask_json(engine, json_call(COMPLETIONS, prompt="Hi"))
    assert (status, body["error"]["code"], plain) == (400, "modality_unsupported", 200)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "model.bin").unlink(), r"model\.bin"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}'),
            "end token|chat template",
        ),
    ],
)
async def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, spoil: object, words: str) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(ct2_model_dir(), folder)
    assert callable(spoil)
    spoil(folder)
    if words.startswith("end token"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "eos_token": ""}), encoding="utf-8")
    async with client_session() as client:
        engine = Ct2Engine(ct2_plan(folder), client)
        with pytest.raises(EngineError, match=words):
            await engine.load(lambda _progress: None)
        assert engine.pids == ()


async def test_the_child_weighs_what_the_library_weighs() -> None:
    async with served(Ct2Engine, ct2_plan()) as engine:
        text_of_chat(await ask_chat(engine, QUESTION))
        child = psutil.Process(engine.pids[0])
        assert child.memory_info().rss < 120 * 1024 * 1024
        assert child.num_threads() < 16
