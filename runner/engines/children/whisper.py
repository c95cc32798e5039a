"""The process that holds a Whisper model: ``python -m runner.engines.children.whisper PARENT_PID``.

Settings: folder, model_name, key, slots, threads, device, device_index, compute_type, max_upload_bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from aiohttp import web
from multidict import MultiDictProxy

from runner.engines.children import Parent, Settings, import_engine, load_ctranslate2, run_child, unload_ctranslate2
from runner.engines.children.web import Pipe, Refusal, Slots, as_event, make_app, serve, stream_events
from runner.limits import limits
from wire import clock

# ---- requests, their body read into a file that no crash leaves behind ----

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
STREAMED_FORMATS = ("json", "text")
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")


@dataclass(slots=True)
class AudioRequest:
    """What to transcribe, and how. ``file`` has no name on disk; whoever uses it last closes it."""

    file: IO[bytes]
    language: str | None = None
    prompt: str | None = None
    response_format: str = "json"
    temperature: float = 0.0
    granularities: frozenset[str] = frozenset({"segment"})
    stream: bool = False
    vad_filter: bool = False


async def read_request(request: web.Request, *, max_upload_bytes: int, languages: Collection[str]) -> AudioRequest:
    """Read and check a body; ``languages`` are the codes the model knows. Raises Refusal, and leaves no file open then."""
    if not request.content_type.startswith("multipart/"):
        raise Refusal("the body must be multipart/form-data with a file", param="file")
    try:
        form = await request.post()  # files have no name on disk: nothing remains, not even after a kill
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(max_upload_bytes) from None
    except (ValueError, AssertionError) as error:  # what aiohttp raises for a body that is not multipart after all
        raise Refusal("the multipart body cannot be read") from error
    files = [part.file for part in form.values() if isinstance(part, web.FileField)]
    try:
        if not isinstance(form.get("file"), web.FileField):
            raise Refusal("the field file is missing", param="file")
        if len(files) > 1:
            raise Refusal("more than one file", param="file")
        if files[0].seek(0, os.SEEK_END) > max_upload_bytes:
            raise _too_large(max_upload_bytes)
        files[0].seek(0)
        return _check(_read_fields(form), files[0], languages)
    except BaseException:
        for file in files:
            file.close()
        raise


def _read_fields(form: MultiDictProxy[Any]) -> dict[str, list[str]]:  # Any: texts, bytes and files
    bounds, fields = limits().children, dict[str, list[str]]()
    if len(form) > bounds.audio_fields:
        raise Refusal(f"more than {bounds.audio_fields} fields")
    for name, value in form.items():
        if isinstance(value, web.FileField):
            continue
        if len(value) > bounds.audio_field_bytes:
            raise Refusal(f"a field has more than {bounds.audio_field_bytes} bytes", param=name)
        text = value if isinstance(value, str) else value.decode("utf-8", "replace")
        fields.setdefault(name.removesuffix("[]"), []).append(text.strip())
    return fields


def _too_large(max_upload_bytes: int) -> Refusal:
    limit_mb = max_upload_bytes // (1024 * 1024)
    return Refusal(f"the file is larger than {limit_mb} MiB", param="file", code="request_too_large", status=413)


def _check(given: dict[str, list[str]], file: IO[bytes], languages: Collection[str]) -> AudioRequest:
    fields = {name: texts[-1] for name, texts in given.items()}
    language = fields.get("language", "").lower() or None
    if language is not None and language not in languages:
        raise Refusal("the model does not know this language; send a code such as en", param="language")
    shape = fields.get("response_format") or "json"
    if shape not in FORMATS:
        raise Refusal(f"response_format is one of {', '.join(FORMATS)}", param="response_format")
    stream = _flag(fields, "stream")
    if stream and shape not in STREAMED_FORMATS:
        raise Refusal("a streamed answer is json or text", param="response_format")
    granularities = frozenset(given.get("timestamp_granularities", ()))
    if granularities - {"segment", "word"}:
        raise Refusal("timestamp_granularities are segment and word", param="timestamp_granularities")
    if granularities and shape != "verbose_json":
        raise Refusal("timestamp_granularities need response_format verbose_json", param="timestamp_granularities")
    return AudioRequest(
        file=file,
        language=language,
        prompt=fields.get("prompt") or None,
        response_format=shape,
        temperature=_temperature(fields),
        granularities=granularities or frozenset({"segment"}),
        stream=stream,
        vad_filter=_flag(fields, "vad_filter"),
    )


def _flag(fields: dict[str, str], name: str) -> bool:
    value = fields.get(name, "").lower()
    if value not in _TRUE + _FALSE:
        raise Refusal(f"{name} is true or false", param=name)
    return value in _TRUE


def _temperature(fields: dict[str, str]) -> float:
    try:
        value = float(fields.get("temperature") or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refusal("temperature is a number from 0 to 1", param="temperature")
    return value


# ---- answers ----

Segment = dict[str, Any]  # JSON
"""id, seek, start, end, text, tokens, temperature, avg_logprob, compression_ratio, no_speech_prob; perhaps words."""


@dataclass(slots=True)
class Outcome:
    """What is known of a transcription beside its segments. Times in milliseconds; ``language`` is a code."""

    task: str
    language: str = ""
    audio_ms: float = 0.0
    speech_ms: float = 0.0
    decode_ms: float = 0.0
    inference_ms: float = 0.0

    def timings(self) -> dict[str, float]:
        """Return the ``timings`` member: ``speech_ms`` is what the silence filter left of ``audio_ms``."""
        names = ("audio_ms", "speech_ms", "decode_ms", "inference_ms")
        return {name: round(getattr(self, name), 3) for name in names}

    def usage(self) -> dict[str, object]:
        """Return the ``usage`` member: whole seconds of audio, rounded up."""
        return {"type": "duration", "seconds": int(-(-self.audio_ms // 1000))}


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment["text"] for segment in segments).strip()


def as_json(segments: Sequence[Segment], outcome: Outcome) -> dict[str, object]:
    return {"text": text_of(segments), "usage": outcome.usage(), "timings": outcome.timings()}


def as_verbose_json(segments: Sequence[Segment], outcome: Outcome, granularities: Collection[str]) -> dict[str, object]:
    found: dict[str, object] = {
        "task": outcome.task,
        "language": outcome.language,
        "duration": round(outcome.audio_ms / 1000, 3),
        **as_json(segments, outcome),
    }
    if "segment" in granularities:
        found["segments"] = [{name: value for name, value in segment.items() if name != "words"} for segment in segments]
    if "word" in granularities:
        found["words"] = [word for segment in segments for word in segment.get("words") or ()]
    return found


def as_srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{number}\n{_clock(segment['start'], ',')} --> {_clock(segment['end'], ',')}\n{segment['text'].strip()}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def as_vtt(segments: Sequence[Segment]) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_clock(segment['start'], '.')} --> {_clock(segment['end'], '.')}\n{segment['text'].strip()}\n\n"
        for segment in segments
    )


def _clock(seconds: float, mark: str) -> str:
    whole_ms = round(seconds * 1000)
    minutes, ms = divmod(whole_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{ms // 1000:02}{mark}{ms % 1000:03}"


# ---- the server ----

RATE = 16_000


class _ReaderLeftError(Exception):
    """Nobody waits for the transcript any more."""


class _Ask(threading.local):
    is_left: Callable[[], bool] = staticmethod(lambda: False)


_ask = _Ask()


class Transcription:
    """One request on its way through a slot: its segments, and before them an empty one, which says that the file is good."""

    def __init__(self, model: Any, request: AudioRequest, task: str) -> None:  # Any: untyped library
        self._model = model
        self._request = request
        self.segments: Pipe[Segment] = Pipe()
        self.outcome = Outcome(task)

    def work(self) -> None:
        self.segments.run(self._work)

    def _work(self) -> None:
        _ask.is_left = lambda: self.segments.is_left
        with self._request.file as file:
            started = clock.monotonic()
            audio = decode(file, self.segments)
            self.outcome.decode_ms = 1000 * (clock.monotonic() - started)
        if not self.segments.is_left:
            with contextlib.suppress(_ReaderLeftError):
                self._transcribe(audio)

    def _transcribe(self, audio: Any) -> None:  # Any: an array
        request, outcome = self._request, self.outcome
        started = clock.monotonic()
        options: dict[str, Any] = {"temperature": request.temperature} if request.temperature else {}  # Any: keywords
        segments, info = self._model.transcribe(
            audio, language=request.language, task=outcome.task, beam_size=5, initial_prompt=request.prompt,
            word_timestamps="word" in request.granularities, vad_filter=request.vad_filter, **options,
        )  # fmt: skip
        outcome.language, outcome.audio_ms = info.language, 1000 * info.duration
        outcome.speech_ms = 1000 * info.duration_after_vad
        self.segments.put({})
        for number, segment in enumerate(segments):
            outcome.inference_ms = 1000 * (clock.monotonic() - started)
            if not self.segments.put(_as_segment(number, segment)):
                return
        outcome.inference_ms = 1000 * (clock.monotonic() - started)


def decode(file: IO[bytes], pipe: Pipe[Any]) -> Any:  # Any: a numpy array of float32, and what travels in the pipe
    """Return the sound as 16 kHz mono. Raises Refusal when there is none, or too much."""
    import av
    import numpy as np

    pieces, count = [], 0
    try:
        for piece in _samples(av, file):
            pieces.append(piece)
            count += piece.size
            if count > limits().children.audio_s * RATE:
                raise Refusal(f"the recording is longer than {limits().children.audio_s // 3600} hours", param="file")
            if pipe.is_left:
                break
    except (av.error.FFmpegError, ValueError, EOFError) as error:
        words = getattr(error, "strerror", None) or type(error).__name__
        raise Refusal(f"the file cannot be decoded as audio: {words}", param="file", code="invalid_audio") from None
    if not count:
        raise Refusal("the file holds no audio", param="file", code="invalid_audio")
    return np.concatenate(pieces).astype(np.float32) / 32768.0


def _samples(av: Any, file: IO[bytes]) -> Iterator[Any]:  # Any: untyped here, numpy arrays of int16
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    with av.open(file, mode="r", metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise Refusal("the file holds no audio", param="file", code="invalid_audio")
        frames = container.decode(audio=0)
        while True:
            try:
                frame = next(frames)
            except StopIteration:
                break
            except av.error.InvalidDataError:  # a damaged packet in the middle: the rest may still be good
                continue
            frame.pts = None
            yield from (piece.to_ndarray().reshape(-1) for piece in resampler.resample(frame))
        yield from (piece.to_ndarray().reshape(-1) for piece in resampler.resample(None))


def _as_segment(number: int, segment: Any) -> Segment:  # Any: untyped library
    found: Segment = {
        "id": number,
        "seek": segment.seek,
        "start": round(float(segment.start), 3),
        "end": round(float(segment.end), 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": float(segment.temperature),
        "avg_logprob": float(segment.avg_logprob),
        "compression_ratio": float(segment.compression_ratio),
        "no_speech_prob": float(segment.no_speech_prob),
    }
    if segment.words is not None:
        found["words"] = [
            {"word": word.word.strip(), "start": round(float(word.start), 3), "end": round(float(word.end), 3)}
            for word in segment.words
        ]
    return found


class AudioServer:
    def __init__(self, model: Any, settings: Settings) -> None:  # Any: untyped library
        self._model = model
        self._settings = settings
        self._slots = Slots(count=settings["slots"], max_waiting=limits().children.waiting)

    @property
    def info(self) -> dict[str, object]:
        return {"multilingual": bool(self._model.model.is_multilingual)}

    def make(self) -> web.Application:
        fields_bytes = limits().children.audio_fields * limits().children.audio_field_bytes
        app = make_app(key=self._settings["key"], max_body_bytes=self._settings["max_upload_bytes"] + fields_bytes)
        app.router.add_get("/stats", self.stats)
        app.router.add_post("/v1/audio/transcriptions", partial(self._answer, "transcribe"))
        app.router.add_post("/v1/audio/translations", self.translate)
        return app

    async def stats(self, _request: web.Request) -> web.Response:
        return web.json_response({"running": self._slots.running, "waiting": self._slots.waiting})

    async def translate(self, request: web.Request) -> web.StreamResponse:
        if not self._model.model.is_multilingual:
            raise Refusal("this model knows English only, it cannot translate", param="model", code="modality_unsupported")
        return await self._answer("translate", request)

    async def _answer(self, task: str, request: web.Request) -> web.StreamResponse:
        limit = self._settings["max_upload_bytes"]
        asked = await read_request(request, max_upload_bytes=limit, languages=self._model.supported_languages)
        transcription = Transcription(self._model, asked, task)
        try:
            await self._slots.take()
        except BaseException:
            asked.file.close()
            raise
        self._slots.start(transcription.work)
        try:
            await transcription.segments.get()
            if asked.stream:
                return await stream_events(request, _events(transcription), headers=_duration_header(transcription.outcome))
            segments = [segment async for segment in transcription.segments.rest()]
            return _whole(asked, segments, transcription.outcome)
        finally:
            transcription.segments.leave()


def _whole(asked: AudioRequest, segments: list[Segment], outcome: Outcome) -> web.Response:
    headers = _duration_header(outcome) | {"x-gpu-time-ms": f"{outcome.inference_ms:.0f}"}
    match asked.response_format:
        case "verbose_json":
            return web.json_response(as_verbose_json(segments, outcome, asked.granularities), headers=headers)
        case "text":
            return web.Response(text=text_of(segments) + "\n", headers=headers)
        case "srt":
            return web.Response(text=as_srt(segments), content_type="application/x-subrip", charset="utf-8", headers=headers)
        case "vtt":
            return web.Response(text=as_vtt(segments), content_type="text/vtt", charset="utf-8", headers=headers)
        case _:
            return web.json_response(as_json(segments, outcome), headers=headers)


async def _events(transcription: Transcription) -> AsyncIterator[bytes]:
    segments: list[Segment] = []
    async for segment in transcription.segments.rest():
        text = segment["text"] if segments else segment["text"].lstrip()
        yield as_event({"type": "transcript.text.delta", "delta": text})
        segments.append(segment)
    yield as_event({"type": "transcript.text.done", **as_json(segments, transcription.outcome)})


def _duration_header(outcome: Outcome) -> dict[str, str]:
    return {"x-audio-duration-ms": f"{outcome.audio_ms:.0f}"}


def serve_audio(model: Any, settings: Settings, parent: Parent) -> None:  # Any: untyped library
    server = AudioServer(model, settings)
    asyncio.run(serve(server.make(), parent, server.info))


def load(settings: Settings, parent: Parent) -> Any:  # Any: a faster_whisper.WhisperModel
    """Load the model. Raises RuntimeError, ValueError or OSError with a reason for the node's owner."""
    parent.say(stage="starting faster-whisper")
    library = import_engine("faster_whisper", "whisper")

    class Model(library.WhisperModel):  # type: ignore[misc, name-defined]  # an untyped library
        """Asks before each window of 30 seconds: windows of silence yield no segment to stop at."""

        def encode(self, features: Any) -> Any:  # Any: arrays of untyped libraries
            if _ask.is_left():
                raise _ReaderLeftError
            return super().encode(features)

    folder = Path(settings["folder"])
    with load_ctranslate2(parent, folder):
        return Model(
            str(folder), device=settings["device"], device_index=settings["device_index"] or 0,
            compute_type=settings["compute_type"], cpu_threads=max(1, settings["threads"] // settings["slots"]),
            num_workers=settings["slots"], local_files_only=True,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_child(load, serve_audio, lambda model: unload_ctranslate2(model.model)))
