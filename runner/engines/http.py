"""The HTTP half that adapters share: the exchange of a call, short questions with an answer in JSON, a health check."""

from __future__ import annotations

import io
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from yarl import URL

from runner.engines.port import Call, Health
from runner.errors import EngineError, EngineSilent
from runner.limits import limits

NOT_TO_ENGINE = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect", "host", "content-length", "accept-encoding", "authorization", "cookie",
    "x-api-key", "x-worker-secret", "forwarded", "x-conversation-id", "x-tenant-id", "x-priority",
    "x-cache-mode", "x-cache-tag", "x-admin-key", "x-http-method", "x-http-method-override", "x-method-override",
    "x-original-url", "x-rewrite-url",
})  # fmt: skip
"""Hop-by-hop headers (RFC 9110 section 7.6.1), credentials, what the runner itself acts on, what some servers take for another
path or method than those that were checked, and ``x-conversation-id``, which makes llama.cpp go on after its client has left.
"""


class HttpServer:
    """An engine's HTTP server. ``base_url`` ends before ``/v1``; both fields are set once it is known where it listens."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self.base_url = ""
        self.headers: Mapping[str, str] = {}

    @asynccontextmanager
    async def send(
        self, call: Call, *, path: str | None = None, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a call, with another path or body where the adapter had to change them. Raises aiohttp.ClientError, OSError.

        Leaving the context closes the connection unless the answer was read to its end, which is what makes an engine stop.
        """
        kept = {name: value for name, value in call.headers.items() if name.lower() not in NOT_TO_ENGINE}
        response = await self._client.request(
            call.method,
            URL(self.base_url + (path or call.path), encoded=True),
            data=_as_payload(call.body if body is None else body),
            headers={**kept, "Accept-Encoding": "identity", **self.headers},
            allow_redirects=False,
        )
        try:
            yield response
        finally:
            response.close()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Ask something short; return status and body. Raises EngineError when no answer comes or too long a one,
        EngineSilent when it is merely late. ``timeout_s``: longest wait, infinite = none, None = ``question_s``.
        """
        wait_s = limits().engines.question_s if timeout_s is None else timeout_s
        sent = {"Accept": "application/json", **self.headers, **(headers or {})}
        data = None
        if body is not None:
            data, sent["Content-Type"] = _as_payload(msgspec.json.encode(body)), "application/json"
        try:
            async with self._client.request(
                method,
                self.base_url + path,
                data=data,
                headers=sent,
                timeout=aiohttp.ClientTimeout(total=None if math.isinf(wait_s) else wait_s),
                allow_redirects=False,
            ) as response:
                answer = bytearray()
                async for chunk in response.content.iter_chunked(64 * 1024):
                    answer += chunk
                    if len(answer) > limits().engines.answer_bytes:
                        raise EngineError(f"{path} answers with more than {limits().engines.answer_bytes} bytes")
                return response.status, bytes(answer)
        except TimeoutError:
            raise EngineSilent(f"{path} was not answered within {wait_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{path} was not answered: {error}") from None

    async def read_metrics(self) -> str:
        """Return ``/metrics`` as text, empty when it is not answered with 200 in time."""
        try:
            status, text = await self.ask("GET", "/metrics")
        except EngineError:
            return ""
        return text.decode("utf-8", "replace") if status == 200 else ""

    async def check(self, path: str = "/health") -> Health:
        """Ask ``path`` once: 200 is health, another answer or none in time is silence, no connection is unreachable."""
        try:
            async with self._client.get(
                self.base_url + path, headers=self.headers, timeout=aiohttp.ClientTimeout(total=2.0)
            ) as response:
                return Health.OK if response.status == 200 else Health.SILENT
        except TimeoutError:
            return Health.SILENT
        except (aiohttp.ClientError, OSError):
            return Health.UNREACHABLE


def _as_payload(body: bytes) -> io.BytesIO | bytes | None:
    """Return a body as aiohttp is to send it: a large one in pieces, so that it does not hold up the loop in one write."""
    return io.BytesIO(body) if len(body) > limits().engines.piece_bytes else body or None
