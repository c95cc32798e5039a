"""Asking a box how many tokens a prompt has: a short exchange that takes no slot, and that nothing depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec

from core.limits import limits
from nodes.links import EndKind, Link, LinkCondition, LinkEnd, LinkRegistry, Sink
from nodes.session import OpenRequest
from nodes.states import TOKENIZE
from wire.bridge import CANCEL_TIMEOUT

_HEADERS = {"content-type": "application/json"}


class _Counted(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=0, le=10**9)]


_decoder = msgspec.json.Decoder(_Counted)


class Reply(Sink):
    """The sink of one exchange. ``whole`` is done with status and body, or with None when it broke."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[tuple[int, bytes] | None] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Take the status."""
        del headers
        self._status = status

    def on_data(self, data: bytes) -> None:
        """Take a piece of the body; one that is too long for a count breaks it."""
        self._body += data
        if len(self._body) > limits().gateway.count_answer_bytes:
            self._body.clear()
            self._finish(None)

    def on_end(self, end: LinkEnd) -> None:
        """Take the end."""
        self._finish((self._status, bytes(self._body)) if end.kind is EndKind.COMPLETE else None)

    def _finish(self, found: tuple[int, bytes] | None) -> None:
        if not self.whole.done():
            self.whole.set_result(found)


def find_counting(registry: LinkRegistry, model: str) -> Sequence[Link]:
    """Return the links whose boxes say that they count for the model and can be asked now, the least loaded first."""
    able = [
        link
        for link in registry.links_for(model)
        if TOKENIZE in link.endpoints.get(model, ()) and link.has_clear_line and link.condition() is LinkCondition.READY
    ]
    return sorted(able, key=lambda link: link.load)


async def exchange(link: Link, request: OpenRequest) -> tuple[int, bytes] | None:
    """Return status and body of a box's answer, None when it breaks. Raises TimeoutError after the request's deadline."""
    reply = Reply()
    stream = link.open_stream(request, reply)
    try:
        async with asyncio.timeout(request.deadline_ms / 1000):
            return await reply.whole
    finally:
        stream.cancel(CANCEL_TIMEOUT)  # harmless when it is over


async def ask_box(link: Link, *, model: str, body: bytes, tenant: str, request_id: str, deadline_ms: int) -> int | None:
    """Return the count of a box, None when it has none. Raises TimeoutError."""
    answer = await exchange(
        link,
        OpenRequest(
            request_id=request_id,
            attempt=1,
            model=model,
            path=TOKENIZE,
            body=body,
            headers=_HEADERS,
            is_streaming=False,
            deadline_ms=deadline_ms,
            tenant=tenant,
        ),
    )
    if answer is None or answer[0] != 200:
        return None
    try:
        return _decoder.decode(answer[1]).count
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
