"""faster-whisper behind OpenAI's audio endpoints: shapes, uploads, refusals, and what is left behind."""

from __future__ import annotations

import io
import json
import os
import wave
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from runner.engines.port import TRANSCRIPTIONS, Call, Engine
from runner.engines.whisper import TRANSLATIONS, WhisperEngine
from tests.fakes.engines.talk import client_session, loaded, read_events, served
from tests.fakes.engines.whisper import audio_call, long_wav, whisper_plan
from tests.fakes.models.make import speech_wav, whisper_dir
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

SAID = "the box dials out and serves a model"


def speech() -> bytes:
    return speech_wav().read_bytes()


async def ask(engine: Engine, call: Call) -> tuple[int, str, dict[str, str]]:
    async with engine.stream(call) as response:
        return response.status, (await response.read()).decode(), dict(response.headers)


async def ask_json(engine: Engine, call: Call) -> dict[str, Any]:  # JSON
    status, text, _headers = await ask(engine, call)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


async def refusal(engine: Engine, call: Call) -> tuple[int, str | None, str]:
    """Return status, blamed field and code."""
    status, text, _headers = await ask(engine, call)
    error = json.loads(text)["error"]
    return status, error["param"], error["code"]


async def test_every_shape_of_answer_says_what_was_said() -> None:
    async with served(WhisperEngine, whisper_plan()) as engine:
        plain = await ask_json(engine, audio_call(speech(), language="en"))
        verbose = await ask_json(engine, audio_call(speech(), language="de", response_format="verbose_json"))
        words = await ask_json(
            engine, audio_call(speech(), language="en", response_format="verbose_json", timestamp_granularities=["word"])
        )
        texts = {shape: await ask(engine, audio_call(speech(), response_format=shape)) for shape in ("text", "srt", "vtt")}
    assert plain["text"].startswith(SAID)
    assert plain["usage"] == {"type": "duration", "seconds": 12}
    assert (verbose["language"], verbose["duration"], verbose["task"]) == ("de", 12.0, "transcribe")
    first = verbose["segments"][0]
    assert {"avg_logprob", "no_speech_prob", "compression_ratio", "start", "end", "tokens", "seek"} <= set(first)
    assert first["text"].strip() == SAID
    assert [word["word"] for word in words["words"]][:8] == SAID.split()
    assert all(word["end"] >= word["start"] for word in words["words"])
    assert "segments" not in words
    assert texts["text"][1].startswith(SAID)
    assert texts["srt"][1].startswith("1\n00:00:00,000 --> ")
    assert texts["vtt"][1].startswith("WEBVTT\n\n")
    headers = texts["text"][2]
    assert headers["x-audio-duration-ms"] == "12000"
    assert int(headers["x-gpu-time-ms"]) > 0


async def test_the_silence_filter_cuts_pauses_and_keeps_the_clock() -> None:
    async with served(WhisperEngine, whisper_plan()) as engine:
        call = audio_call(speech(), language="en", response_format="verbose_json", vad_filter="true")
        found = await ask_json(engine, call)
        silence = io.BytesIO()
        with wave.open(silence, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(bytes(2 * 16_000 * 3))
        empty = await ask_json(engine, audio_call(silence.getvalue(), language="en", vad_filter="true"))
    assert found["timings"]["speech_ms"] < found["timings"]["audio_ms"] == 12_000
    assert found["segments"][-1]["end"] > 4.0, "times are those of the recording, not of what was left of it"
    assert empty["timings"]["speech_ms"] == 0


async def test_a_stream_brings_each_segment_and_then_the_whole() -> None:
    async with served(WhisperEngine, whisper_plan()) as engine:
        events = [json.loads(event) for event in await read_events(engine, audio_call(speech(), language="en", stream="true"))]
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert "".join(event["delta"] for event in events[:-1]) == events[-1]["text"]


async def test_only_a_model_that_knows_languages_translates() -> None:
    async with client_session() as client:
        many = WhisperEngine(whisper_plan(), client)
        async with loaded(many):
            assert many.capabilities.endpoints == (TRANSCRIPTIONS, TRANSLATIONS)
            call = audio_call(speech(), path=TRANSLATIONS, response_format="verbose_json", language="de")
            assert (await ask_json(many, call))["task"] == "translate"
        english = WhisperEngine(whisper_plan(whisper_dir(multilingual=False)), client)
        async with loaded(english):
            assert english.capabilities.endpoints == (TRANSCRIPTIONS,)
            assert await refusal(english, audio_call(speech(), path=TRANSLATIONS)) == (400, "model", "modality_unsupported")
            assert await refusal(english, audio_call(speech(), language="de")) == (400, "language", "invalid_value")
            assert (await ask_json(english, audio_call(speech())))["text"].startswith(SAID)


async def test_what_cannot_be_transcribed_is_refused_by_name() -> None:
    cases: list[tuple[Call, tuple[int, str | None, str]]] = [
        (audio_call(b"this is no sound " * 50), (400, "file", "invalid_audio")),
        (audio_call(b""), (400, "file", "invalid_audio")),
        (audio_call(speech()[:44]), (400, "file", "invalid_audio")),
        (audio_call(None, language="en"), (400, "file", "invalid_value")),
        (audio_call(speech(), language="klingon"), (400, "language", "invalid_value")),
        (audio_call(speech(), temperature="hot"), (400, "temperature", "invalid_value")),
        (audio_call(speech(), response_format="pdf"), (400, "response_format", "invalid_value")),
        (audio_call(speech(), response_format="srt", stream="true"), (400, "response_format", "invalid_value")),
        (audio_call(speech(), vad_filter="maybe"), (400, "vad_filter", "invalid_value")),
        (audio_call(speech(), timestamp_granularities=["word"]), (400, "timestamp_granularities", "invalid_value")),
        (audio_call(speech(), prompt="x" * 20_000), (400, "prompt", "invalid_value")),
        (Call("POST", TRANSCRIPTIONS, {"content-type": "application/json"}, b"{}"), (400, "file", "invalid_value")),
        (
            Call("POST", TRANSCRIPTIONS, {"content-type": "multipart/form-data; boundary=x"}, b"no"),
            (400, None, "invalid_value"),
        ),
        (Call("POST", TRANSCRIPTIONS, {"content-type": "multipart/form-data"}, b"no"), (400, None, "invalid_value")),
    ]
    async with served(WhisperEngine, whisper_plan()) as engine:
        for number, (call, expected) in enumerate(cases):
            assert await refusal(engine, call) == expected, number
        assert (await engine.stats()).running == 0
        assert (await ask_json(engine, audio_call(speech())))["text"]


async def test_an_upload_over_the_limit_is_cut_off_and_leaves_nothing() -> None:
    async with client_session() as client:
        engine = WhisperEngine(whisper_plan(max_upload_mb=1), client)
        async with loaded(engine):
            child = psutil.Process(engine.pids[0])
            assert (await ask_json(engine, audio_call(speech())))["text"]
            before = child.num_fds()
            assert await refusal(engine, audio_call(bytes(3 * 1024 * 1024))) == (413, "file", "request_too_large")
            # Without a length in front, it is found out while reading.
            server = engine._child.server

            async def pieces() -> Any:  # an async generator
                yield audio_call(bytes(100)).body.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
                for _ in range(40):
                    yield bytes(64 * 1024)

            headers = {**audio_call(None).headers, **server.headers}
            try:
                async with client.post(server.base_url + TRANSCRIPTIONS, data=pieces(), headers=headers) as response:
                    assert response.status == 413
            except aiohttp.ClientError:
                pass  # the server hung up while we were still sending, which is its right

            await eventually(lambda: child.num_fds() <= before)


async def test_no_file_is_left_after_an_answer_or_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with served(WhisperEngine, whisper_plan()) as engine:
        await ask_json(engine, audio_call(speech()))
        assert os.listdir(tmp_path) == []  # noqa: PTH208  # a path object's own call counts as blocking
        async with engine.stream(audio_call(long_wav(), language="en", stream="true")) as response:
            assert response.status == 200
            psutil.Process(engine.pids[0]).kill()
        await engine.wait_gone()
        assert os.listdir(tmp_path) == []  # noqa: PTH208  # a path object's own call counts as blocking


async def test_the_openai_library_transcribes() -> None:
    async with served(WhisperEngine, whisper_plan()) as engine:
        server = engine._child.server
        key = server.headers["Authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=server.base_url + "/v1", api_key=key, max_retries=0) as sdk:
            verbose = await sdk.audio.transcriptions.create(
                model="tiny",
                file=("a.wav", speech()),
                response_format="verbose_json",
                timestamp_granularities=["word", "segment"],
            )
            stream = await sdk.audio.transcriptions.create(model="tiny", file=("a.wav", speech()), stream=True)
            kinds = [event.type async for event in stream]
    assert verbose.words is not None
    assert verbose.segments is not None
    assert len(verbose.words) == 8 * len(verbose.segments)
    assert kinds[-1] == "transcript.text.done"
