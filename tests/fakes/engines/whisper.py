"""faster-whisper in a child process, with a tiny model of made-up weights that says the same for every sound."""

from __future__ import annotations

import contextlib
import io
import shutil
import wave
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.port import TRANSCRIPTIONS, Call, FlushResult
from runner.engines.whisper import WhisperEngine
from tests.fakes.engines.suite import EngineCase, EngineUnderTest
from tests.fakes.models.make import speech_wav, whisper_dir

BORDER = "part-of-a-test"
LONG_S = 1800


def whisper_plan(path: Path | None = None, *, slots: int = 2, threads: int = 2, **options: object) -> LoadPlan:
    return LoadPlan(
        model_id="tiny-whisper", backend="whisper", path=path or whisper_dir(), slots=slots, threads=threads, options=options
    )


def audio_call(audio: bytes | None, *, path: str = TRANSCRIPTIONS, **fields: str | list[str]) -> Call:
    """Return a multipart request with ``audio`` as its file; a list is a field that comes several times, under ``name[]``."""
    body = io.BytesIO()
    for name, value in fields.items():
        for one in [value] if isinstance(value, str) else value:
            title = name if isinstance(value, str) else f"{name}[]"
            head = f'--{BORDER}\r\nContent-Disposition: form-data; name="{title}"\r\n\r\n{one}\r\n'
            body.write(head.encode())
    if audio is not None:
        head = f'--{BORDER}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        body.write(head.encode() + audio + b"\r\n")
    body.write(f"--{BORDER}--\r\n".encode())
    return Call("POST", path, {"content-type": f"multipart/form-data; boundary={BORDER}"}, body.getvalue())


@cache
def long_wav() -> bytes:
    """Return half an hour of sound, four kilobytes a second: dozens of windows of work."""
    with wave.open(str(speech_wav())) as file:
        samples = file.readframes(file.getnframes())
    quarter = bytes((sample + 128) & 0xFF for sample in samples[1::8])  # every fourth sample, its upper byte
    second = quarter[: len(quarter) // 12 * 12]
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(4000)
        file.writeframes(second * (LONG_S * 4000 // len(second)))
    return target.getvalue()


@contextlib.asynccontextmanager
async def open_whisper(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter for the tiny model, and one for half of its weights."""
    broken = folder / "half"
    shutil.copytree(whisper_dir(), broken)
    (broken / "model.bin").write_bytes((whisper_dir() / "model.bin").read_bytes()[:200_000])
    audio = speech_wav().read_bytes()
    yield EngineUnderTest(
        engine=WhisperEngine(whisper_plan(), client), call=audio_call(audio, language="en"),
        streamed=audio_call(audio, language="en", stream="true"), long=audio_call(long_wav(), language="en", stream="true"),
        broken=WhisperEngine(whisper_plan(broken), client), broken_words="^half cannot be loaded: .*invalid payload size",
        flushes=frozenset({FlushResult.NOTHING_KEPT}),
    )  # fmt: skip


CASES = [EngineCase("whisper", open_whisper)]
