"""The edges of a child's HTTP server: loopback, a key, bounded bodies, errors in OpenAI's shape, and the slots behind it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from aiohttp import web

from runner.engines.children import Parent
from runner.limits import limits

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """A request that is not carried out. ``param`` names the field that is at fault; texts never carry prompts."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400,
        details: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.details: dict[str, object] = details or {}

    def render(self) -> dict[str, object]:
        """Return the body of the answer (OpenAI API reference, error object)."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.details}}


def make_app(*, key: str, max_body_bytes: int) -> web.Application:
    """Return an application that asks for ``key`` on every path but ``/health`` and renders refusals."""
    wanted = f"Bearer {key}".encode()

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if request.path != "/health" and not hmac.compare_digest(given, wanted):
                raise Refusal("the key is missing or wrong", code="invalid_api_key", status=401)
            return await handler(request)
        except Refusal as refusal:
            headers = {"Retry-After": "1"} if refusal.status == 503 else None
            return web.json_response(refusal.render(), status=refusal.status, headers=headers)
        except web.HTTPException as error:
            return web.json_response(_name_error(error).render(), status=error.status)

    app = web.Application(middlewares=[edge], client_max_size=max_body_bytes)

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/health", health)
    return app


def as_event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _as_error(refusal: Refusal) -> bytes:
    return as_event(refusal.render())


async def stream_events(
    request: web.Request, events: AsyncIterator[bytes], *, headers: Mapping[str, str] | None = None,
    end_with: Callable[[Refusal], bytes] = _as_error,
) -> web.StreamResponse:  # fmt: skip
    """Answer with events as they come; a Refusal among them ends the answer as ``end_with`` renders it."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **(headers or {})})
    await response.prepare(request)
    try:
        async for event in events:
            await response.write(event)
        await response.write_eof()
    except Refusal as refusal:
        await response.write(end_with(refusal))
    except ConnectionResetError:  # the client has gone
        pass
    return response


def _name_error(error: web.HTTPException) -> Refusal:
    if error.status == 413:
        return Refusal("the body is too large", code="request_too_large", status=413)
    return Refusal(error.reason, code="not_found", status=error.status)


async def serve(app: web.Application, parent: Parent, info: dict[str, object]) -> None:
    """Serve on a free loopback port, tell the parent where, and return when it closes our standard input."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        parent.wait_until_told()
        loop.call_soon_threadsafe(told.set)

    # A handler is cancelled when its client goes: that is what stops a generation nobody reads.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        threading.Thread(target=wait, name="stdin", daemon=True).start()
        parent.say(url=f"http://127.0.0.1:{port}", info=info)
        await told.wait()
    finally:
        await runner.cleanup()


Item = TypeVar("Item")


class Slots:
    """``count`` worker threads and a bounded line of those who wait for one, first come first served. One event loop only."""

    def __init__(self, *, count: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(count)
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="slot")
        self.running = self.waiting = 0

    async def take(self) -> None:
        """Wait for a slot. Raises Refusal (503) when the line is full."""
        if self._free.locked() and self.waiting >= self._max_waiting:
            raise Refusal("the engine has as many requests waiting as it may", code="queue_full", status=503)
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1

    def give_back(self) -> None:
        self.running -= 1
        self._free.release()

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in a thread; the slot taken before is free again when it has really ended, not earlier."""
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)

        def ended(_future: Future[None]) -> None:
            try:
                loop.call_soon_threadsafe(self.give_back)
            except RuntimeError:  # the loop is closed: the process ends
                return

        future.add_done_callback(ended)
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Pipe(Generic[Item]):
    """Results of a worker thread on their way to the event loop: bounded, and either side can end it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item | Refusal | None] = asyncio.Queue()  # bounded by the credits below
        self._poll_s = limits().children.slot_poll_s
        self._credits = threading.Semaphore(limits().children.results_ahead)
        self._left = threading.Event()

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def put(self, item: Item | Refusal) -> bool:
        """From the worker: hand over a result, waiting while the reader is far behind. False = the reader has gone."""
        while not self._credits.acquire(timeout=self._poll_s):
            if self._left.is_set():
                return False
        return self._call(item) and not self._left.is_set()

    def run(self, work: Callable[[], None]) -> None:
        """From the worker: do the work and end the pipe; what is raised meanwhile reaches the reader as a Refusal."""
        try:
            work()
        except Refusal as refusal:
            self.put(refusal)
        except (RuntimeError, ValueError, MemoryError) as error:
            # The library's own text: it sees tokens or sound, no prompts.
            log.warning("request failed: %s", error)
            self.put(Refusal(f"the engine failed: {error}", code="engine_failed", status=500))
        except BaseException:
            self.put(Refusal("the engine failed", code="engine_failed", status=500))
            raise
        finally:
            self._call(None)

    async def get(self) -> Item | None:
        """From the loop: the next result, None at the end. Raises Refusal."""
        item = await self._items.get()
        self._credits.release()
        if isinstance(item, Refusal):
            raise item
        return item

    async def rest(self) -> AsyncIterator[Item]:
        """From the loop: yield results to the end. Raises Refusal."""
        while (item := await self.get()) is not None:
            yield item

    def leave(self) -> None:
        """From the loop: nobody reads any more, so the worker is to stop at its next step."""
        self._left.set()

    def _call(self, item: Item | Refusal | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True
