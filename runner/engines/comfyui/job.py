"""One prompt on a ComfyUI server: queued, followed to its end, its images fetched, and withdrawn when nobody wants it any more.

The WebSocket says how far it is; whether it has ended is asked of the history, which also tells when the socket is gone.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from runner.engines.children.web import Refusal
from runner.engines.comfyui.images import strip_texts
from runner.engines.comfyui.server import ComfyServer, Outcome
from runner.engines.comfyui.workflow import Graph
from runner.engines.port import Priority
from runner.errors import EngineError
from runner.limits import limits
from wire import clock

log = logging.getLogger(__name__)


class _Data(msgspec.Struct):
    prompt_id: str | None = None
    node: object = ""
    """None = no node any more: the prompt has ended."""
    value: float = 0.0
    max: float = 0.0


class _Message(msgspec.Struct):
    """A text frame of the WebSocket."""

    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


_message_decoder = msgspec.json.Decoder(_Message)
_data_decoder = msgspec.json.Decoder(_Data)


@dataclass(frozen=True, slots=True)
class Step:
    """Where a prompt stands: waiting or working, and the share of its longest node that is done, 0.0 to 1.0."""

    stage: str
    fraction: float


@dataclass(slots=True)
class Job:
    """One queued prompt. ``steps`` first, to its end, then ``images``."""

    server: ComfyServer
    socket: aiohttp.ClientWebSocketResponse | None
    prompt_id: str
    outcome: Outcome | None = None
    _stage: str = "waiting"
    _fraction: float = 0.0
    _ending_at: float | None = None
    _answered_at: float = field(default_factory=clock.monotonic)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield at every change and every few seconds until the prompt has ended well. Raises Refusal for any other end."""
        deadline = clock.monotonic() + limits().comfyui.job_s
        yield Step(self._stage, self._fraction)
        while self.outcome is None:
            if clock.monotonic() > deadline:
                raise Refusal(
                    f"The image was not made within {limits().comfyui.job_s:.0f} s.", code="engine_timeout", status=504
                )
            message = await self._next_message()
            if message is None:
                await self._look()
            elif not self._take(message):
                continue
            yield Step(self._stage, self._fraction)
        if self.outcome.error:
            raise _refuse(self.outcome)

    async def images(self) -> list[bytes]:
        """Return the files that were made, without the workflow in them. Raises Refusal when there are none, EngineError."""
        made = self.outcome.images if self.outcome is not None else ()
        if not made:
            raise Refusal("The workflow has made no image.", code="no_image", status=422)
        return [strip_texts(await self.server.view(image)) for image in made]

    async def _next_message(self) -> _Message | None:
        """Return what comes next on the socket; None when it is time to look at the history."""
        if self._ending_at is not None or self.socket is None:
            await asyncio.sleep(
                limits().comfyui.look_without_socket_s if self._ending_at is None else limits().comfyui.look_at_end_s
            )
            return None
        try:
            frame = await self.socket.receive(timeout=limits().comfyui.look_s)
        except TimeoutError:
            return None
        if frame.type is aiohttp.WSMsgType.TEXT:
            try:
                return _message_decoder.decode(frame.data)
            except msgspec.DecodeError:
                return _Message("unknown")
        if frame.type is aiohttp.WSMsgType.BINARY:  # a preview
            return _Message("preview")
        self.socket = None
        return None

    def _take(self, message: _Message) -> bool:
        """Note a message; return whether anything has changed."""
        try:
            data = _data_decoder.decode(message.data)
        except msgspec.DecodeError:
            return False
        if data.prompt_id not in {None, self.prompt_id}:
            return False
        before = (self._stage, self._fraction, self._ending_at)
        match message.type:
            case "execution_start" | "execution_cached":
                self._stage = "working"
            case "progress" if data.max > 1:
                self._stage = "working"
                self._fraction = max(self._fraction, min(1.0, data.value / data.max))
            case "execution_success" | "execution_error" | "execution_interrupted" if data.prompt_id:
                self._ending_at = clock.monotonic()
            case "executing" if data.node is None and data.prompt_id:
                self._ending_at = clock.monotonic()
        return before != (self._stage, self._fraction, self._ending_at)

    async def _look(self) -> None:
        """Ask the server whether it has ended. Raises Refusal when the server has lost it, or is lost itself."""
        try:
            self.outcome = await self.server.outcome(self.prompt_id)
            if self.outcome is None and self._ending_at is None:
                known = await self.server.waiting()
                if self.prompt_id in known.running:
                    self._stage = "working"
                elif self.prompt_id not in known.pending:
                    self._ending_at = clock.monotonic()
        except EngineError as error:
            if clock.monotonic() - self._answered_at > limits().comfyui.silent_s:
                log.warning("image server is silent: %s", error)
                raise Refusal("ComfyUI no longer answers.", code="engine_failed", status=502) from None
            return
        self._answered_at = clock.monotonic()
        if (
            self.outcome is None
            and self._ending_at is not None
            and self._answered_at - self._ending_at > limits().comfyui.lost_s
        ):
            raise Refusal("ComfyUI has lost the request: it may have been restarted.", code="engine_failed", status=502)


@asynccontextmanager
async def open_job(
    server: ComfyServer, graph: Graph, *, priority: Priority, cleaners: set[asyncio.Task[None]]
) -> AsyncIterator[Job]:
    """Queue a graph. Leaving the context before its end takes it out of the queue or interrupts it, and only it.

    What is left behind on the server is cleared by a task in ``cleaners``, since the caller may be cancelled meanwhile.
    Raises Refusal with the node's words, EngineError.
    """
    client_id, prompt_id = uuid.uuid4().hex, str(uuid.uuid4())
    socket = await server.listen(client_id)
    submitting = asyncio.create_task(server.submit(graph, client_id=client_id, prompt_id=prompt_id, priority=priority))
    try:
        # Not cancelled with us: a request that the server has half read is queued all the same, and must be found then.
        yield Job(server, socket, await asyncio.shield(submitting))
    finally:
        if not submitting.done() or submitting.exception() is None:
            cleaner = asyncio.create_task(_clear(server, submitting, client_id, prompt_id))
            cleaners.add(cleaner)
            cleaner.add_done_callback(cleaners.discard)
            await asyncio.shield(cleaner)
        if socket is not None:
            await socket.close()


async def _clear(server: ComfyServer, submitting: asyncio.Task[str], client_id: str, prompt_id: str) -> None:
    """Withdraw what a client has on the server, and have its history forget it. Never raises."""
    try:
        async with asyncio.timeout(limits().comfyui.withdraw_s):
            try:
                prompt_id = await submitting
            except (Refusal, EngineError):
                return
            told: set[str] = set()
            while (left := await server.waiting(client_id)).running or left.pending:
                if left.pending:
                    await server.remove(left.pending)
                # Once: an old server would stop the next one, whosever that is.
                for running in {*left.running} - told:
                    await server.interrupt(running)
                    told.add(running)
                await asyncio.sleep(limits().comfyui.withdraw_poll_s)
            await server.forget((prompt_id,))
    except (EngineError, TimeoutError) as error:
        log.warning("image request was not withdrawn server=%s: %s", server.url, error)


def _refuse(outcome: Outcome) -> Refusal:
    code, status = ("engine_failed", 503) if outcome.may_pass else ("workflow_failed", 422)
    return Refusal(f"ComfyUI could not make the image: {outcome.error}", code=code, status=status)
