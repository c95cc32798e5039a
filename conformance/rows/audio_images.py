"""Rows on transcriptions and images."""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import wave

from conformance.engine.media import TRANSCRIPT
from conformance.exchange import Answer
from conformance.fields import Field
from conformance.table import requirement
from conformance.target import IMAGES, TRANSCRIPTIONS, Target, require_ok, require_script_or_skip, require_status
from conformance.verdicts import Violation

_RATE = 16_000
_BOUNDARY = "muster-conformance-7f3a"


def make_sound(seconds: float = 1.0) -> bytes:
    """Return a WAV file with a quiet tone."""
    held = io.BytesIO()
    with wave.open(held, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        frames = (int(3000 * math.sin(2 * math.pi * 440 * number / _RATE)) for number in range(int(_RATE * seconds)))
        out.writeframes(b"".join(struct.pack("<h", frame) for frame in frames))
    return held.getvalue()


def _form(fields: dict[str, str], sound: bytes | None) -> bytes:
    parts = [
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if sound is not None:
        head = f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        parts.append(head.encode() + b"content-type: audio/wav\r\n\r\n" + sound + b"\r\n")
    return b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode()


async def transcribe(target: Target, **fields: str) -> Answer:
    """Send a second of sound."""
    form = _form({"model": target.model_for(TRANSCRIPTIONS), **fields}, make_sound())
    headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
    answer = await target.send(target.ask_json(TRANSCRIPTIONS, form, headers))
    require_script_or_skip(target, answer, fields.get("response_format", "a recording"))
    return answer


@requirement("audio.json", "{text, usage} as JSON", clients="openai SDKs, Open WebUI")
async def _json(target: Target) -> None:
    reply = require_ok(await transcribe(target))
    reply["text"].text()
    if target.scripted:
        reply["text"].must_be(TRANSCRIPT)
        reply["usage"].members()


@requirement("audio.plain", "response_format text, srt and vtt are plain text, not JSON", clients="openai SDKs, subtitle tools")
async def _plain(target: Target) -> None:
    for kind in ("text", "srt", "vtt"):
        answer = await transcribe(target, response_format=kind)
        require_status(answer, 200)
        if "json" in answer.header("content-type") or answer.body.lstrip()[:1] in (b"{", b'"'):
            raise Violation(f"{kind}: {answer.header('content-type')} {answer.body[:60]!r}")
        if kind == "vtt" and not answer.body.startswith(b"WEBVTT"):
            raise Violation(f"vtt begins {answer.body[:30]!r}")


@requirement("audio.verbose", "verbose_json has duration, language and segments", clients="openai SDKs")
async def _verbose(target: Target) -> None:
    reply = require_ok(await transcribe(target, response_format="verbose_json"))
    reply["text"].text()
    reply["language"].text()
    for segment in reply["segments"].items():
        segment["start"].number()
        segment["end"].number()
        segment["text"].text()
    if reply["duration"].is_null:
        raise Violation("duration is null")


@requirement("audio.no_file", "a form without a file: 400 with the field named", clients="openai SDKs")
async def _no_file(target: Target) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
    form = _form({"model": target.model_for(TRANSCRIPTIONS)}, None)
    answer = await target.send(target.ask_json(TRANSCRIPTIONS, form, headers))
    require_status(answer, 400)
    answer.json()["error"]["param"].must_be("file")


async def _draw(target: Target, **more: object) -> Field:
    body = {"model": target.model_for(IMAGES), "prompt": "a llama", "response_format": "b64_json", **more}
    answer = await target.send(target.ask_json(IMAGES, body))
    require_script_or_skip(target, answer, "images")
    return require_ok(answer)


@requirement("images.reply", "{created, data[{b64_json}]}", clients="openai SDKs, Open WebUI")
async def _images(target: Target) -> None:
    reply = await _draw(target)
    reply["created"].count()
    for row in reply["data"].items():
        try:
            base64.b64decode(row["b64_json"].word(), validate=True)
        except binascii.Error as error:
            raise Violation(f"{row.path}.b64_json is no base64: {error}") from None


@requirement("images.no_nulls", "unknown keys are left out, not null", clients="openai SDKs' types")
async def _no_nulls(target: Target) -> None:
    reply = await _draw(target)
    for place in (reply, *reply["data"].items()):
        nulls = [name for name, value in place.members().items() if value is None]
        if nulls:
            raise Violation(f"{place.path}: {', '.join(nulls)} is null")


@requirement("images.n", "n gives as many images", clients="openai SDKs", needs_script=True)
async def _n(target: Target) -> None:
    if len((await _draw(target, n=2))["data"].items()) != 2:
        raise Violation("n: 2 gives another number of images")
