"""Handlers that wait for long, when the box stops."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import Response

from runner.api.lifecycle import Interruptible
from runner.errors import Unavailable, UnknownModel

pytestmark = pytest.mark.asyncio


async def test_a_handler_that_waits_is_interrupted_and_says_why() -> None:
    interruptible, has_begun, was_cancelled = Interruptible(), asyncio.Event(), asyncio.Event()

    async def wait(_request: Request) -> Response:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()
        return Response()

    asked = asyncio.create_task(_call(interruptible, wait))
    await asyncio.wait_for(has_begun.wait(), 30)
    interruptible.close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asked, 30)
    assert was_cancelled.is_set()


async def test_answers_and_refusals_pass_as_they_are() -> None:
    interruptible = Interruptible()

    async def answer(_request: Request) -> Response:
        return Response(status_code=204)

    async def refuse(_request: Request) -> Response:
        raise UnknownModel("no such model")

    assert (await _call(interruptible, answer)).status_code == 204
    with pytest.raises(UnknownModel):
        await _call(interruptible, refuse)
    interruptible.close()


async def _call(interruptible: Interruptible, handler: object) -> Response:
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []})
    return await interruptible.wrap(handler)(request)  # type: ignore[arg-type]  # either of the handlers above
