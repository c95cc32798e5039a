"""A link that is really cut: bytes go no further in either direction, and no socket says so."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit, urlunsplit

from tests.fakes.lab import Lab, unique
from tests.fakes.scripted_box import ScriptedBox

LET_GO_S = 15.0
SLACK_S = 15.0
"""For a machine that is busy; the gateway itself looks twice a second."""


class CutCable:
    """A proxy between a node and a gateway. While it is cut it reads nothing and closes nothing."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        """Return the address to dial instead."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return urlunsplit(self._url._replace(netloc=f"127.0.0.1:{port}"))

    def cut(self) -> None:
        self._is_whole.clear()

    def mend(self) -> None:
        self._is_whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._is_whole.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


async def test_a_cut_link_is_let_go_within_fifteen_seconds_and_what_comes_late_changes_nothing(lab: Lab) -> None:
    model = await lab.model()
    cable = CutCable(lab.gateway.worker_url)
    box = await ScriptedBox.dial(await cable.open(), secret=lab.secret, name=unique("cut"), models=[model], max_concurrent=2)
    lab.workers.append(box)
    try:
        begun = await lab.open(model)
        stream = await box.stream()
        await box.head(stream, content_type="text/event-stream")
        await box.data(stream, b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await begun.until(b'"a"')
        waiting = lab.ask(model)
        unanswered = await box.stream()
        other = await lab.box(model)
        cable.cut()
        cut_at = time.monotonic()
        await box.answer(unanswered, b'{"choices":[],"late":true}')  # on its way when the cable is mended
        moved = await other.stream(within_s=LET_GO_S + SLACK_S)
        assert time.monotonic() - cut_at < LET_GO_S + SLACK_S
        await other.answer(moved, b'{"choices":[],"late":false}')
        reply = await waiting
        assert (reply.status, b'"late":false' in reply.body) == (200, True)
        told = (await begun.finish()).body
        assert told.count(b"REQUEST_INTERRUPTED") == 1
        assert b"[DONE]" not in told
        before = sorted((row["state"], row["attempts"]) for row in await lab.final(model, 2))
        assert before == [("completed", 2), ("interrupted", 1)]
        cable.mend()
        await box.closed()
        assert sorted((row["state"], row["attempts"]) for row in await lab.records(model)) == before
        third = lab.ask(model)
        await other.answer(await other.stream(), b'{"choices":[]}')
        assert (await third).status == 200
    finally:
        await cable.close()
