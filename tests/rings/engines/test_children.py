"""Engines in children of ours beyond the promises of every engine: CTranslate2, ExLlamaV3 over a stand-in, faster-whisper."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import shutil
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from runner.engines.library import TRANSLATIONS, make_ct2, make_exllamav3, make_whisper
from runner.engines.port import CHAT, COMPLETIONS, TOKENIZE, TRANSCRIPTIONS, Call, Engine, FlushRequest, FlushResult, FlushScope
from runner.errors import EngineError
from tests.fakes.engines.cases import PAGES_QUESTION as LONG_QUESTION
from tests.fakes.engines.cases import audio_call, ct2_plan, exllama_plan, fake_library, long_wav, whisper_plan
from tests.fakes.engines.suite import (
    ask_chat,
    ask_json,
    assert_goes_on,
    client_session,
    json_call,
    read_events,
    served,
    text_of_chat,
)  # fmt: skip
from tests.fakes.models.make import ct2_model_dir, speech_wav, whisper_dir
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

QUESTION = "What is Muster?"
ENDLESS: dict[str, Any] = {"max_tokens": 50_000, "ignore_eos": True, "stream": True}


async def are_in(engine: Engine, running: int, waiting: int | None = None) -> bool:
    stats = await engine.stats()
    return stats.running == running and waiting in {None, stats.waiting}


# CTranslate2


async def test_a_stream_follows_the_grammar_and_says_what_the_whole_answer_says() -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    async with served(make_ct2, ct2_plan()) as engine:
        answer = await ask_chat(engine, QUESTION)
        *events, done = await read_events(engine, json_call(CHAT, **asked, stream_options={"include_usage": True}))
        bare = [json.loads(event) for event in (await read_events(engine, json_call(CHAT, **asked)))[:-1]]
        whole = text_of_chat(answer)
        stopped = await ask_chat(engine, QUESTION, stop=[whole[8:14]])
        short = await ask_json(engine, json_call(COMPLETIONS, prompt="The with statement", max_tokens=3, temperature=0))
    usage, timings = answer[1]["usage"], answer[1]["timings"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (timings["prompt_n"], timings["cache_n"]) == (usage["prompt_tokens"], 0)
    assert timings["predicted_n"] == usage["completion_tokens"] > 5
    chunks = [json.loads(event) for event in events]
    assert (done, len({chunk["id"] for chunk in chunks})) == ("[DONE]", 1)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], chunks[-1]["timings"]["predicted_n"])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == whole
    assert (any("usage" in chunk for chunk in bare), "timings" in bare[-1]) == (False, True)
    assert text_of_chat(stopped) == whole.partition(whole[8:14])[0]
    assert stopped[1]["choices"][0]["finish_reason"] == "stop"
    assert (short[1]["choices"][0]["finish_reason"], short[1]["usage"]["completion_tokens"]) == ("length", 3)


async def test_it_goes_on_with_an_answer_that_began_elsewhere() -> None:
    async with served(make_ct2, ct2_plan()) as engine:
        await assert_goes_on(engine, QUESTION)


async def test_a_prompt_longer_than_the_context_is_refused_as_openai_refuses_it() -> None:
    async with served(make_ct2, ct2_plan(context_tokens=64)) as engine:
        status, body = await ask_chat(engine, "word " * 200)
        full = await ask_chat(engine, "word " * 10, ignore_eos=True)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert (body["error"]["n_ctx"], full[1]["usage"]["total_tokens"]) == (64, 64)


async def test_the_key_guards_everything_but_health() -> None:
    async with served(make_ct2, ct2_plan()) as engine, client_session() as client:
        base = engine.server.base_url
        for method, path, status in (
            ("GET", "/stats", 401), ("POST", "/flush", 401), ("GET", "/health", 200), ("POST", CHAT, 401),
        ):  # fmt: skip
            async with client.request(method, base + path, headers={"Authorization": "Bearer wrong"}) as response:
                assert response.status == status, path


async def test_more_requests_than_slots_wait_in_a_line_that_has_an_end() -> None:
    async with served(make_ct2, ct2_plan(slots=1, context_tokens=100_000)) as engine:
        async with engine.stream(json_call(CHAT, messages=[{"role": "user", "content": "x"}], **ENDLESS)) as running:
            assert await running.content.readany()
            waiting = [asyncio.create_task(ask_chat(engine, QUESTION, max_tokens=4)) for _ in range(64)]
            await eventually(partial(are_in, engine, 1, 64))
            status, body = await ask_chat(engine, "x")
            assert (status, body["error"]["code"]) == (503, "queue_full")
            leaving, waiting = waiting[2:], waiting[:2]
            for task in leaving:
                task.cancel()
            await eventually(partial(are_in, engine, 1, 2))
        assert [status for status, _body in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_model_without_a_template_offers_completions_only(tmp_path: Path) -> None:
    bare = spoilt(tmp_path / "bare", lambda folder: change(folder / "tokenizer_config.json", chat_template=None))
    async with served(make_ct2, ct2_plan(bare)) as engine:
        assert engine.capabilities.endpoints == (COMPLETIONS, TOKENIZE)
        status, body = await ask_chat(engine, "Hi")
        plain, _ = await ask_json(engine, json_call(COMPLETIONS, prompt="Hi"))
    assert (status, body["error"]["code"], plain) == (400, "modality_unsupported", 200)


def change(path: Path, **members: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **members}), encoding="utf-8")


def spoilt(folder: Path, spoil: Callable[[Path], object]) -> Path:
    shutil.copytree(ct2_model_dir(), folder)
    spoil(folder)
    return folder


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "model.bin").unlink(), r"model\.bin"),
        (lambda folder: change(folder / "tokenizer_config.json", chat_template="{% if %}"), "chat template"),
    ],
)
async def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    async with client_session() as client:
        engine = make_ct2(ct2_plan(spoilt(tmp_path / "spoilt", spoil)), client)
        with pytest.raises(EngineError, match=words):
            await engine.load(lambda _progress: None)
        assert engine.pids == ()


# ExLlamaV3


@pytest.fixture
def library() -> Iterator[None]:
    """Have children find the stand-in."""
    with fake_library():
        yield


with_library = pytest.mark.usefixtures("library")


def question(tenant: str, **fields: object) -> Call:
    messages = [{"role": "user", "content": LONG_QUESTION}]
    return dataclasses.replace(json_call(CHAT, messages=messages, **{"max_tokens": 4, **fields}), tenant=tenant)


def cached(answer: tuple[int, dict[str, dict[str, dict[str, int]]]]) -> int:
    status, body = answer
    assert status == 200, body
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@with_library
async def test_an_answer_is_counted_to_the_token_and_the_numbers_are_those_of_the_page_table(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exllama_cache_quant": "8,4", "exllama_gpu_split": "24,24", "exllama_tensor_parallel": True}
    async with served(make_exllamav3, exllama_plan(tmp_path, exllama_cache_size=4096, **options)) as engine:
        first, again = [await ask_json(engine, question("alpha")) for _ in range(2)]
        stats = await engine.stats()
        cut = await ask_chat(engine, "Hi", max_tokens=5)
        stopped = await ask_chat(engine, "Hi", stop="word4")
    async with served(make_exllamav3, exllama_plan(tmp_path, exllama_cache_size=512)) as engine:
        status, body = await ask_json(engine, question("alpha"))
    assert cached(first) == 0 < cached(again)
    assert (stats.kv_total_tokens, stats.kv_used_tokens) == (4096, 0)
    assert (text_of_chat(cut), text_of_chat(stopped)) == ("word1 word2 word3 word4 word5 ", "word1 word2 word3 ")
    assert (cut[1]["choices"][0]["finish_reason"], cut[1]["usage"]["completion_tokens"]) == ("length", 5)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), "a job that does not fit the cache"


@with_library
async def test_requests_of_one_tenant_run_together_and_another_tenant_waits_its_turn(tmp_path: Path) -> None:
    async with served(make_exllamav3, exllama_plan(tmp_path, slots=4)) as engine:
        async with engine.stream(question("alpha", **ENDLESS)) as one:
            assert await one.content.readany()
            assert await ask_json(engine, question("alpha"))
            await eventually(partial(are_in, engine, 1))  # the slot of an answer is free a moment after its end
            given_up = asyncio.create_task(ask_json(engine, question("beta")))
            await eventually(partial(are_in, engine, 2))
            given_up.cancel()
            await eventually(partial(are_in, engine, 1), "who has left while it waited its turn has no slot")
            other = asyncio.create_task(ask_json(engine, question("beta")))
            await eventually(partial(are_in, engine, 2))
            late = asyncio.create_task(ask_json(engine, question("alpha")))
            await eventually(partial(are_in, engine, 3))
            done, _pending = await asyncio.wait([other, late], timeout=0.3)
            assert not done, "whoever comes after the other tenant does not overtake it"
        assert [cached(await asyncio.wait_for(task, 30)) for task in (other, late)] == [0, 0]


@with_library
async def test_a_flush_while_something_runs_is_refused_and_does_nothing(tmp_path: Path) -> None:
    async with served(make_exllamav3, exllama_plan(tmp_path)) as engine:
        async with engine.stream(question("alpha", **ENDLESS)) as response:
            received = b""
            while received.count(b"data: ") < 3:  # the first event goes out before the generator has the request
                received += await response.content.readany()
            assert (await engine.flush(FlushRequest(FlushScope.MODEL))).result is FlushResult.REFUSED_BUSY
        await eventually(partial(are_in, engine, 0))
        assert cached(await ask_json(engine, question("alpha"))) > 0
        outcome = await engine.flush(FlushRequest(FlushScope.TENANT, tenant="alpha"))
    assert (outcome.result, "wider than the tenant" in outcome.detail) == (FlushResult.RELOADED, True)
    assert outcome.entries_removed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exllama_cache_size": 1000}, "multiple of 256"), ({"exllama_cache_quant": "9,9"}, "exllama_cache_quant"),
        ({"exllama_cache_k_bits": 4}, "go together"), ({"exllama_gpu_split": "24,all"}, "exllama_gpu_split"),
        ({"exllama_tensor_parallel": "yes"}, "exllama_tensor_parallel"), ({}, r"muster\[exllamav3\]"),
    ],
)  # fmt: skip
async def test_a_bad_option_or_a_missing_library_is_said_at_once(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    async with client_session() as client:
        engine = make_exllamav3(exllama_plan(tmp_path, **options), client)
        with pytest.raises(EngineError, match=words):
            await engine.load(lambda _progress: None)
        assert engine.pids == ()


# faster-whisper

SAID = "the box dials out and serves a model"


async def transcribe(engine: Engine, audio: bytes | None = None, **fields: Any) -> dict[str, Any]:  # JSON
    status, found = await ask_json(engine, audio_call(audio or speech_wav().read_bytes(), **fields))
    assert status == 200, found
    return found


async def refusal(engine: Engine, call: Call) -> tuple[int, str | None, str]:
    """Return status, blamed field and code."""
    status, body = await ask_json(engine, call)
    return status, body["error"]["param"], body["error"]["code"]


async def test_every_shape_of_answer_says_what_was_said() -> None:
    audio = speech_wav().read_bytes()
    async with served(make_whisper, whisper_plan()) as engine:
        plain = await transcribe(engine, language="en")
        verbose = await transcribe(engine, language="de", response_format="verbose_json")
        words = await transcribe(engine, language="en", response_format="verbose_json", timestamp_granularities=["word"])
        texts = {}
        for shape in ("text", "srt", "vtt"):
            async with engine.stream(audio_call(audio, response_format=shape)) as response:
                texts[shape] = (await response.read()).decode()
                assert response.headers["x-audio-duration-ms"] == "12000"
                assert int(response.headers["x-gpu-time-ms"]) > 0
        streamed = [json.loads(event) for event in await read_events(engine, audio_call(audio, language="en", stream="true"))]
    assert (plain["text"].startswith(SAID), plain["usage"]) == (True, {"type": "duration", "seconds": 12})
    assert (verbose["language"], verbose["duration"], verbose["task"]) == ("de", 12.0, "transcribe")
    first = verbose["segments"][0]
    assert first.keys() >= {"avg_logprob", "no_speech_prob", "compression_ratio", "start", "end", "tokens", "seek"}
    assert first["text"].strip() == SAID
    assert ([word["word"] for word in words["words"]][:8], "segments" in words) == (SAID.split(), False)
    assert all(word["end"] >= word["start"] for word in words["words"])
    for shape, start in (("text", SAID), ("srt", "1\n00:00:00,000 --> "), ("vtt", "WEBVTT\n\n")):
        assert texts[shape].startswith(start)
    assert [event["type"] for event in streamed] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert "".join(event["delta"] for event in streamed[:-1]) == streamed[-1]["text"]


async def test_the_silence_filter_cuts_pauses_and_keeps_the_clock() -> None:
    silence = io.BytesIO()
    with wave.open(silence, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(2 * 16_000 * 3))
    async with served(make_whisper, whisper_plan()) as engine:
        found = await transcribe(engine, language="en", response_format="verbose_json", vad_filter="true")
        empty = await transcribe(engine, silence.getvalue(), language="en", vad_filter="true")
    assert found["timings"]["speech_ms"] < found["timings"]["audio_ms"] == 12_000
    assert found["segments"][-1]["end"] > 4.0, "times are those of the recording, not of what was left of it"
    assert empty["timings"]["speech_ms"] == 0


async def test_only_a_model_that_knows_languages_translates() -> None:
    audio = speech_wav().read_bytes()
    async with served(make_whisper, whisper_plan()) as many:
        assert many.capabilities.endpoints == (TRANSCRIPTIONS, TRANSLATIONS)
        translated = await transcribe(many, path=TRANSLATIONS, response_format="verbose_json", language="de")
        assert translated["task"] == "translate"
    async with served(make_whisper, whisper_plan(whisper_dir(multilingual=False))) as english:
        assert english.capabilities.endpoints == (TRANSCRIPTIONS,)
        assert await refusal(english, audio_call(audio, path=TRANSLATIONS)) == (400, "model", "modality_unsupported")
        assert await refusal(english, audio_call(audio, language="de")) == (400, "language", "invalid_value")
        assert (await transcribe(english))["text"].startswith(SAID)


async def test_what_cannot_be_transcribed_is_refused_by_name() -> None:
    audio, post = speech_wav().read_bytes(), partial(Call, "POST", TRANSCRIPTIONS)
    cases: list[tuple[Call, str | None, str]] = [
        *((audio_call(sound), "file", "invalid_audio") for sound in (b"this is no sound " * 50, b"", audio[:44])),
        (audio_call(None, language="en"), "file", "invalid_value"),
        (audio_call(audio, language="klingon"), "language", "invalid_value"),
        (audio_call(audio, temperature="hot"), "temperature", "invalid_value"),
        (audio_call(audio, response_format="pdf"), "response_format", "invalid_value"),
        (audio_call(audio, response_format="srt", stream="true"), "response_format", "invalid_value"),
        (audio_call(audio, vad_filter="maybe"), "vad_filter", "invalid_value"),
        (audio_call(audio, timestamp_granularities=["word"]), "timestamp_granularities", "invalid_value"),
        (audio_call(audio, prompt="x" * 20_000), "prompt", "invalid_value"),
        (post({"content-type": "application/json"}, b"{}"), "file", "invalid_value"),
        (post({"content-type": "multipart/form-data; boundary=x"}, b"no"), None, "invalid_value"),
        (post({"content-type": "multipart/form-data"}, b"no"), None, "invalid_value"),
    ]
    async with served(make_whisper, whisper_plan()) as engine:
        for number, (call, param, code) in enumerate(cases):
            assert await refusal(engine, call) == (400, param, code), number
        assert await are_in(engine, 0)
        server = engine.server
        key = server.headers["Authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=server.base_url + "/v1", api_key=key, max_retries=0) as sdk:
            assert (await sdk.audio.transcriptions.create(model="tiny", file=("a.wav", audio))).text.startswith(SAID)


async def test_an_upload_over_the_limit_is_cut_off_and_leaves_nothing() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield audio_call(bytes(100)).body.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        for _ in range(40):
            yield bytes(64 * 1024)

    async with served(make_whisper, whisper_plan(max_upload_mb=1)) as engine, client_session() as client:
        child, server = psutil.Process(engine.pids[0]), engine.server
        assert (await transcribe(engine))["text"]
        before = child.num_fds()
        assert await refusal(engine, audio_call(bytes(3 * 1024 * 1024))) == (413, "file", "request_too_large")
        # Without a length in front, it is found out while reading.
        headers = {**audio_call(None).headers, **server.headers}
        try:
            async with client.post(server.base_url + TRANSCRIPTIONS, data=pieces(), headers=headers) as response:
                assert response.status == 413
        except aiohttp.ClientError:
            pass  # the server hung up while we were still sending, which is its right
        await eventually(lambda: child.num_fds() <= before)


async def test_no_file_is_left_after_an_answer_or_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with served(make_whisper, whisper_plan()) as engine:
        await transcribe(engine)
        assert os.listdir(tmp_path) == []  # noqa: PTH208  # a path object's own call counts as blocking
        async with engine.stream(audio_call(long_wav(), language="en", stream="true")) as response:
            assert response.status == 200
            psutil.Process(engine.pids[0]).kill()
        await engine.wait_gone()
        assert os.listdir(tmp_path) == []  # noqa: PTH208  # a path object's own call counts as blocking
