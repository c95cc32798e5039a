"""Recordings that are transcribed while the client listens: events pass as they come, and a break is said."""

from __future__ import annotations

import json

from tests.fakes.lab import Lab
from wire import frames

TRANSCRIPTIONS = "/v1/audio/transcriptions"
DELTA = b'data: {"type":"transcript.text.delta","delta":"Good "}\n\n'
DONE = b'data: {"type":"transcript.text.done","text":"Good morning"}\n\n'


def write_form(**fields: str) -> bytes:
    """Return a form with a recording behind its fields."""
    parts = [f'--B\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    file = '--B\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--B--\r\n'
    return "".join([*parts, file]).encode()


async def test_a_streamed_transcript_passes_as_it_comes(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=(TRANSCRIPTIONS,))
    form = write_form(model=model, stream="true", response_format="json")
    headers = lab.headers({"content-type": "multipart/form-data; boundary=B"})
    asked = lab.spawn(lab.post(form, path=TRANSCRIPTIONS, headers=headers))
    stream = await box.stream()
    assert bytes(stream.body) == form
    assert stream.meta.headers["content-type"] == "multipart/form-data; boundary=B"
    await box.head(stream, content_type="text/event-stream")
    await box.data(stream, DELTA)
    await box.data(stream, DONE)
    await box.end(stream)
    reply = await asked
    assert (reply.status, reply.body) == (200, DELTA + DONE)
    assert reply.headers["content-type"].startswith("text/event-stream")
    (row,) = await lab.final(model)
    assert row["status"] == "completed"


async def test_a_streamed_transcript_that_breaks_says_so_and_is_not_done(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=(TRANSCRIPTIONS,))
    headers = lab.headers({"content-type": "multipart/form-data; boundary=B"})
    asked = lab.spawn(lab.post(write_form(stream="true", model=model), path=TRANSCRIPTIONS, headers=headers))
    stream = await box.stream()
    await box.head(stream, content_type="text/event-stream")
    await box.data(stream, DELTA)
    await box.end(stream, frames.End(error="the engine died"))
    reply = await asked
    assert reply.body.startswith(DELTA)
    error = json.loads(reply.events[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "FORWARDED_REQUEST_FAILED")
    assert "[DONE]" not in reply.events


async def test_an_engine_that_does_not_stream_transcripts_is_passed_on_as_it_answers(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=(TRANSCRIPTIONS,))
    headers = lab.headers({"content-type": "multipart/form-data; boundary=B"})
    asked = lab.spawn(lab.post(write_form(model=model, stream="true"), path=TRANSCRIPTIONS, headers=headers))
    stream = await box.stream()
    await box.answer(stream, b'{"text":"Good morning"}')
    reply = await asked
    assert (reply.status, reply.json) == (200, {"text": "Good morning"})
    assert reply.headers["content-type"] == "application/json"
