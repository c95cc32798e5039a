"""What the scripted box says can be translated, and the load client follows it on every API path, translated or not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from benchmarks.answers import CHAT, MESSAGES, RESPONSES, find_voice
from benchmarks.loadclient import LoadResult, LoadSpec, Target, run_load
from benchmarks.toolchain import Tools, build_tools, find_compiler
from gateway.dialects import SURFACES
from gateway.dialects.translation import AnswerContext, AnswerTranslator

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the load client is a C program and there is no compiler")

STAMP = re.compile(rb'"T[0-9a-f]{16}[0-9a-f]{8}([0-9a-f]{6})[0-9a-f]{6}"')
CHUNKS = 6
BODIES = {
    MESSAGES: b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hi"}],"stream":true}',
    RESPONSES: b'{"model":"m","input":"hi","stream":true}',
}
SURFACE_PATHS = [CHAT, MESSAGES, RESPONSES]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    return build_tools(tmp_path_factory.mktemp("build"))


def say_stream(path: str, *, left_out: int | None = None, request: bytes = b"") -> list[bytes]:
    """Return a stream of the box as it writes it: chunk by chunk, then its end."""
    voice = find_voice(path)
    chunks = [voice.make_chunk(7, index, CHUNKS) for index in range(CHUNKS) if index != left_out]
    return [*chunks, voice.make_end(CHUNKS, request)]


def open_answer(path: str) -> tuple[AnswerTranslator, bytes]:
    translate = SURFACES[path].translate
    assert translate is not None
    translation = translate(SURFACES[path].parse(BODIES[path], {}))
    return translation.open_answer(AnswerContext(request_id="req_1", model="m", created=1)), translation.body


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_chat_stream_of_the_box_keeps_one_stamp_in_each_event_it_is_translated_to(path: str) -> None:
    translator, body = open_answer(path)
    events = [translator.feed(piece) for piece in say_stream(CHAT, request=body)]
    closing = translator.finish()
    assert translator.failure is None
    assert [[int(index, 16) for index in STAMP.findall(event)] for event in events] == [[n] for n in range(CHUNKS)] + [[]]
    assert not STAMP.findall(closing)
    assert translator.usage is not None
    assert translator.usage.completion_tokens == CHUNKS


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_whole_chat_answer_of_the_box_keeps_its_stamp_and_its_size_in_translation(path: str) -> None:
    translator, _body = open_answer(path)
    whole = find_voice(CHAT).make_whole(7)
    said = translator.translate_whole(whole)
    assert translator.failure is None
    assert len(STAMP.findall(said)) == len(STAMP.findall(whole)) == 1
    assert len(said) > 700
    assert msgspec.json.decode(said)["model"] == "m"


@asynccontextmanager
async def serve_stream(pieces: list[bytes]) -> AsyncIterator[int]:
    """Answer every request on a port with ``pieces``, one write each."""

    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
                writer.write(HEAD)
                for piece in [*pieces, b""]:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*answering)  # their client has gone, and each of them finds that out


async def load(tools: Tools, path: str, pieces: list[bytes]) -> LoadResult:
    async with serve_stream(pieces) as port:
        spec = LoadSpec(connections=1, seconds=0.05, is_streaming=True)
        return await asyncio.to_thread(run_load, tools.load, Target(port, path), spec)


@needs_compiler
@pytest.mark.asyncio
@pytest.mark.parametrize("path", SURFACE_PATHS)
async def test_whole_streams_of_every_api_path_have_no_problems(tools: Tools, path: str) -> None:
    result = await load(tools, path, say_stream(path))
    assert result.find_problems() == []
    assert result.chunks == result.answered * CHUNKS


@needs_compiler
@pytest.mark.asyncio
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_translated_streams_have_no_problems(tools: Tools, path: str) -> None:
    translator, body = open_answer(path)
    pieces = [event for piece in say_stream(CHAT, request=body) if (event := translator.feed(piece))]
    result = await load(tools, path, [*pieces, translator.finish()])
    assert result.find_problems() == []
    assert result.chunks == result.answered * CHUNKS


@needs_compiler
@pytest.mark.asyncio
@pytest.mark.parametrize("path", SURFACE_PATHS)
async def test_a_chunk_left_out_and_an_end_that_never_comes_are_reported_on_every_api_path(tools: Tools, path: str) -> None:
    missing = await load(tools, path, say_stream(path, left_out=3))
    assert missing.lost == missing.answered > 0
    endless = await load(tools, path, say_stream(path)[:-1])
    assert endless.without_done == endless.answered > 0
    assert f"{endless.answered} streams without the event that ends them" in endless.find_problems()
