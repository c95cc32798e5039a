"""One answer of the gateway on its way to a browser: asked for as a client would, passed on as it comes, cut when nobody reads.

The address is the one of the settings and the path one of five; nothing that a browser sends names a host.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import httpx
from django.conf import settings

from controlplane.playground.asks import GatewaySilent, GatewayUnreachable, PlaygroundError, TooManyAnswers
from core.limits import limits

PASSED_HEADERS = (
    "x-request-id",
    "x-muster-node",
    "x-muster-model",
    "x-muster-ignored",
    "x-queue-wait-ms",
    "x-gpu-time-ms",
    "retry-after",
)
PASSED_TYPES = ("text/event-stream", "application/json")
"""What a browser gets with its own type. Anything else is plain text: nothing of a gateway becomes a page of ours."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked. ``headers`` hold the key, so it is never printed."""

    path: str
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the answer, those that a browser may see."""

    status: int
    headers: dict[str, str]


class Relay:
    """One answer. ``head`` waits for its beginning, iterating yields its bytes; the end of either way closes the connection."""

    def __init__(self, call: Call) -> None:
        most = limits().console.playground_answers
        if len(_open) >= most:
            raise TooManyAnswers(f"{most} answers are on their way, which is all this process passes on. Try again.")
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(limits().console.playground_chunks)
        self._head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        # A task of its own, so that the gateway is let go also when the answer is dropped before its first byte.
        self._reading = asyncio.create_task(self._read(call))
        _open.add(self)
        # Not in the task's own ``finally``: a task that is cancelled before its first step never runs.
        self._reading.add_done_callback(self._take_end)

    async def head(self) -> Head:
        """Return the beginning of the answer. Raises GatewayUnreachable, GatewaySilent."""
        try:
            return await self._head
        except BaseException:
            await self.aclose()
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (chunk := await self._chunks.get()) is not None:
                self._room.release()
                yield chunk
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the connection to the gateway, which ends the request there, and wait until it is closed."""
        self._reading.cancel()
        await asyncio.wait({self._reading}, timeout=limits().console.playground_close_s)

    def close(self) -> None:
        # Django calls it from any thread when it is done with the response.
        self._reading.get_loop().call_soon_threadsafe(self._reading.cancel)

    async def _read(self, call: Call) -> None:
        longest_s = limits().gateway.request_s + limits().console.playground_overtime_s
        try:
            async with asyncio.timeout(longest_s), self._open_client(longest_s) as client:
                await self._pass_on(client, call)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            self._fail(error)

    def _take_end(self, reading: asyncio.Task[None]) -> None:
        self._head.cancel()
        self._chunks.put_nowait(None)
        _open.discard(self)

    async def _pass_on(self, client: httpx.AsyncClient, call: Call) -> None:
        url = find_gateway_url() + call.path
        async with client.stream("POST", url, content=call.body, headers=call.headers) as answer:
            if not self._head.done():
                self._head.set_result(Head(answer.status_code, choose_headers(answer.headers)))
            passed = 0
            async for chunk in answer.aiter_raw():
                passed += len(chunk)
                if passed > limits().console.playground_answer_bytes:
                    logger.warning("playground_cut bytes=%d", passed)
                    break
                async with asyncio.timeout(limits().console.playground_take_s):
                    await self._room.acquire()
                self._chunks.put_nowait(chunk)

    def _open_client(self, longest_s: float) -> httpx.AsyncClient:
        timeout = httpx.Timeout(longest_s, connect=limits().console.playground_connect_s)
        # Neither a proxy of the environment nor a redirect may lead anywhere else.
        return httpx.AsyncClient(timeout=timeout, verify=_trust(), trust_env=False, follow_redirects=False)

    def _fail(self, error: Exception) -> None:
        logger.warning("playground_failed error=%s", type(error).__name__)
        # After the head the answer just ends, which the page sees.
        if not self._head.done():
            self._head.set_exception(describe_failure(error))


_open: set[Relay] = set()


def find_gateway_url() -> str:
    return str(settings.PLAYGROUND_GATEWAY_URL).rstrip("/")


def choose_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what a browser gets to see of an answer's headers."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    chosen = {name: headers[name] for name in PASSED_HEADERS if name in headers}
    if kind in PASSED_TYPES:
        return {**chosen, "content-type": kind}
    return {**chosen, "content-type": "text/plain; charset=utf-8"}


def describe_failure(error: Exception) -> PlaygroundError:
    where = find_gateway_url()
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL | httpx.UnsupportedProtocol):
        hint = "Start the gateway, or set MUSTER_PLAYGROUND_GATEWAY_URL of the control plane to where it listens."
        return GatewayUnreachable(f"No gateway answers at {where}. {hint}")
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return GatewaySilent(f"The gateway at {where} took the request and did not answer in time. Look at its log.")
    return GatewayUnreachable(f"The gateway at {where} broke the connection off before it answered. Look at its log.")


@cache
def _trust() -> ssl.SSLContext:
    # Made once, as it takes tens of milliseconds.
    return ssl.create_default_context()
