"""A transcription request: the multipart body read into a file that no crash leaves behind, and its checked fields."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import IO

from aiohttp import BodyPartReader, web

from runner.engines.children.web import Refusal
from runner.limits import limits

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


@dataclass(slots=True)
class _Parts:
    """Fields by name; the names of lists end in ``[]``."""

    fields: dict[str, str] = field(default_factory=dict)
    granularities: set[str] = field(default_factory=set)
    has_file: bool = False


async def read_request(request: web.Request, *, max_upload_bytes: int, languages: Collection[str]) -> AudioRequest:
    """Read and check a body; ``languages`` are the codes the model knows. Raises Refusal, and leaves no file open then."""
    if not request.content_type.startswith("multipart/"):
        raise Refusal("the body must be multipart/form-data with a file", param="file")
    # Unlinked at once where the system can: nothing remains, not even after a kill.
    file = tempfile.TemporaryFile(prefix="muster-audio-")  # noqa: SIM115  # outlives this function on success
    try:
        parts = await _read_parts(request, file, max_upload_bytes)
        checked = _check(parts, file, languages)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return checked


async def _read_parts(request: web.Request, file: IO[bytes], max_upload_bytes: int) -> _Parts:
    if (request.content_length or 0) > max_upload_bytes + limits().children.audio_fields * limits().children.audio_field_bytes:
        raise _too_large(max_upload_bytes)
    parts = _Parts()
    try:
        reader = await request.multipart()
        for _ in range(limits().children.audio_fields):
            part = await reader.next()
            if part is None:
                return parts
            if not isinstance(part, BodyPartReader):
                raise Refusal("nested multipart bodies are not read")
            await _read_part(part, parts, file, max_upload_bytes)
    except (ValueError, AssertionError) as error:  # what aiohttp raises for a body that is not multipart after all
        raise Refusal("the multipart body cannot be read") from error
    raise Refusal(f"more than {limits().children.audio_fields} fields")


async def _read_part(part: BodyPartReader, parts: _Parts, file: IO[bytes], max_upload_bytes: int) -> None:
    if part.name == "file":
        size = 0
        while chunk := await part.read_chunk(limits().children.audio_chunk_bytes):
            size += len(chunk)
            if size > max_upload_bytes:
                raise _too_large(max_upload_bytes)
            file.write(chunk)
        parts.has_file = True
        return
    value = bytearray()
    while chunk := await part.read_chunk(limits().children.audio_field_bytes):
        value += chunk
        if len(value) > limits().children.audio_field_bytes:
            raise Refusal(f"a field has more than {limits().children.audio_field_bytes} bytes", param=part.name)
    text = value.decode("utf-8", "replace").strip()
    name = (part.name or "").removesuffix("[]")
    if name == "timestamp_granularities":
        parts.granularities.add(text)
    else:
        parts.fields[name] = text


def _too_large(max_upload_bytes: int) -> Refusal:
    limit_mb = max_upload_bytes // (1024 * 1024)
    return Refusal(f"the file is larger than {limit_mb} MiB", param="file", code="request_too_large", status=413)


def _check(parts: _Parts, file: IO[bytes], languages: Collection[str]) -> AudioRequest:
    fields = parts.fields
    if not parts.has_file:
        raise Refusal("the field file is missing", param="file")
    language = fields.get("language", "").lower() or None
    if language is not None and language not in languages:
        raise Refusal("the model does not know this language; send a code such as en", param="language")
    shape = fields.get("response_format") or "json"
    if shape not in FORMATS:
        raise Refusal(f"response_format is one of {', '.join(FORMATS)}", param="response_format")
    stream = _flag(fields, "stream")
    if stream and shape not in STREAMED_FORMATS:
        raise Refusal("a streamed answer is json or text", param="response_format")
    if parts.granularities - {"segment", "word"}:
        raise Refusal("timestamp_granularities are segment and word", param="timestamp_granularities")
    if parts.granularities and shape != "verbose_json":
        raise Refusal("timestamp_granularities need response_format verbose_json", param="timestamp_granularities")
    return AudioRequest(
        file=file,
        language=language,
        prompt=fields.get("prompt") or None,
        response_format=shape,
        temperature=_temperature(fields),
        granularities=frozenset(parts.granularities or {"segment"}),
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
