"""OpenAI's ``/v1/images/generations`` on loopback, carried out by a ComfyUI server.

The adapter sends here what comes for the model: so images are answered as every engine answers, and a client that leaves ends
its handler, which withdraws what it had queued.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from aiohttp import web

from runner.engines.children.web import Refusal, make_app
from runner.engines.comfyui.job import open_job
from runner.engines.comfyui.request import (
    ImageRequest,
    read_image_request,
    render_error_event,
    render_image_event,
    render_images,
    render_progress,
)
from runner.engines.comfyui.server import ComfyServer
from runner.engines.comfyui.workflow import Value, Workflow
from runner.engines.port import IMAGES, Priority
from runner.errors import EngineError
from runner.limits import limits

log = logging.getLogger(__name__)

_PRIORITIES: dict[str, Priority] = {"high": "high", "normal": "normal", "low": "low"}

Piece = tuple[int, str] | bytes
"""Percent and stage, or an image."""


class ImageSite:
    """A server on a free loopback port; ``url`` and ``key`` are set once it runs. ``checkpoint`` fills the workflow."""

    def __init__(self, server: ComfyServer, workflow: Workflow, checkpoint: str) -> None:
        self._server = server
        self._workflow = workflow
        self._checkpoint = checkpoint
        self._runner: web.AppRunner | None = None
        self._handlers: set[asyncio.Task[object]] = set()
        self._cleaners: set[asyncio.Task[None]] = set()
        self.url = ""
        self.key = secrets.token_urlsafe(24)

    async def start(self) -> None:
        """Begin to serve."""
        app = make_app(key=self.key, max_body_bytes=limits().comfyui.body_bytes)
        app.router.add_post(IMAGES, self._generate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End what runs, and return when it was withdrawn or that was given up. Fine to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for handler in self._handlers:
                handler.cancel()
            if self._handlers:
                await asyncio.wait(self._handlers, timeout=limits().comfyui.stop_s)
            await runner.cleanup()
        if self._cleaners:
            await asyncio.gather(*self._cleaners)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        if task is not None:
            self._handlers.add(task)
            task.add_done_callback(self._handlers.discard)
        wanted = read_image_request(await request.read(), request.content_type)
        self._refuse_what_it_lacks(wanted)
        priority = _PRIORITIES.get(request.query.get("priority", ""), "normal")
        async with aclosing(self._make(wanted, priority)) as pieces:
            if wanted.is_streaming:
                return await self._stream(request, pieces)
            images = [piece async for piece in pieces if isinstance(piece, bytes)]
        body = await asyncio.to_thread(render_images, wanted, images, has_size="width" in self._workflow.placeholders)
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, pieces: AsyncIterator[Piece]) -> web.StreamResponse:
        """Answer with events. What goes wrong before the first of them is an answer of its own."""
        begun = await anext(pieces)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        index = 0
        try:
            if not isinstance(begun, bytes):
                await response.write(render_progress(*begun))
            async for piece in pieces:
                if isinstance(piece, bytes):
                    await response.write(await asyncio.to_thread(render_image_event, piece, index))
                    index += 1
                else:
                    await response.write(render_progress(*piece))
        except Refusal as refusal:
            await response.write(render_error_event(refusal))
        return response

    async def _make(self, wanted: ImageRequest, priority: Priority) -> AsyncGenerator[Piece, None]:
        """Yield how far it is, and each image. Raises Refusal.

        A workflow that cannot make several images at once is run as often as there are to be.
        """
        has_batch = "batch_size" in self._workflow.placeholders
        runs = 1 if has_batch else wanted.count
        for run in range(runs):
            values = self._values(wanted, run, batch_size=wanted.count if has_batch else 1)
            try:
                job = open_job(self._server, self._workflow.fill(values), priority=priority, cleaners=self._cleaners)
                async with job as opened, aclosing(opened.steps()) as steps:
                    async for step in steps:
                        yield round(100 * (run + step.fraction) / runs), step.stage
                    images = await opened.images()
            except EngineError as error:
                log.warning("images were not made: %s", error)
                raise Refusal("ComfyUI does not answer.", code="engine_failed", status=502) from None
            for image in images[: wanted.count if has_batch else 1]:
                yield image

    def _values(self, wanted: ImageRequest, run: int, *, batch_size: int) -> dict[str, Value]:
        return {
            "prompt": wanted.prompt,
            "negative_prompt": wanted.negative_prompt,
            "width": wanted.width,
            "height": wanted.height,
            "seed": wanted.seed + run,
            "steps": wanted.steps,
            "cfg": wanted.cfg,
            "batch_size": batch_size,
            "checkpoint": self._checkpoint,
        }

    def _refuse_what_it_lacks(self, wanted: ImageRequest) -> None:
        """Raise Refusal for a field that the workflow has no place for: an image of another size is not what was asked."""
        for name in sorted(wanted.given):
            needed = {"width", "height"} if name == "size" else {name}
            if not needed <= self._workflow.placeholders:
                raise Refusal(f"The workflow of this model sets {name} itself; leave it out.", param=name)
