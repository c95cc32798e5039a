"""The server: routes, streams, and the numbers of ``/stats``. One model, one key, until the parent closes standard input."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from runner.engines.children.base import Parent
from runner.engines.children.slots import Slots
from runner.engines.children.textserver.answers import Shape, as_event
from runner.engines.children.textserver.fields import ChatFields, CompletionFields, parse_chat, parse_completion, parse_either
from runner.engines.children.textserver.generation import Generation, Task
from runner.engines.children.textserver.model import TextModel
from runner.engines.children.textserver.templates import ChatTemplate, read_template
from runner.engines.children.web import Refusal, make_app, serve
from runner.limits import limits
from wire import clock

SCOPE_HEADER = "x-prefix-scope"
"""Names what a prompt may share cached prefixes with; the adapter makes it of tenant and tag."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """``slots`` requests at once. ``folder`` may hold a chat template."""

    model_name: str
    key: str
    slots: int
    folder: Path
    enable_thinking: bool | None = None
    """What the template is told where a request does not say; None = nothing."""


class TextServer:
    """The handlers around one model."""

    def __init__(self, model: TextModel, settings: ServerSettings) -> None:
        self._model = model
        self._settings = settings
        self._slots = Slots(count=settings.slots, max_waiting=limits().children.waiting)
        self._counting = Slots(count=1, max_waiting=limits().children.waiting_counts)
        """A thread of its own for those who only want to know how long a prompt is: it waits for no generation."""
        source = read_template(settings.folder)
        self._template = ChatTemplate(source, model.specials, settings.enable_thinking) if source is not None else None

    @property
    def info(self) -> dict[str, object]:
        """What the parent should know: context_tokens, and whether chat works."""
        return {"context_tokens": self._model.context_tokens, "chat": self._template is not None}

    def make(self) -> web.Application:
        """Return the application."""
        app = make_app(key=self._settings.key, max_body_bytes=limits().children.body_bytes)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/stats", self.stats)
        app.router.add_post("/flush", self.flush)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/tokenize", self.tokenize)
        app.on_cleanup.append(self._close)
        return app

    async def models(self, _request: web.Request) -> web.Response:
        """Answer with the one model."""
        entry = {"id": self._settings.model_name, "object": "model", "created": 0, "owned_by": "muster"}
        return web.json_response({"object": "list", "data": [{**entry, "max_model_len": self._model.context_tokens}]})

    async def stats(self, _request: web.Request) -> web.Response:
        """Answer with running, waiting, and what the library counts."""
        return web.json_response({"running": self._slots.running, "waiting": self._slots.waiting, **self._model.stats()})

    async def flush(self, _request: web.Request) -> web.Response:
        """Forget cached prefixes: ``{"entries": tokens}``, or 409 while a generation runs."""
        entries = await asyncio.get_running_loop().run_in_executor(None, self._model.flush)
        if entries is None:
            raise Refusal("a generation is running", code="busy", status=409)
        return web.json_response({"entries": entries})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/v1/chat/completions``."""
        fields = parse_chat(await request.read())
        return await self._answer(request, fields, self._prompt_of(fields), "messages")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/v1/completions``."""
        fields = parse_completion(await request.read())
        return await self._answer(request, fields, self._prompt_of(fields), "prompt")

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer ``/v1/tokenize``: ``{"count", "max_model_len"}`` of what either endpoint would read."""
        prompt = self._prompt_of(parse_either(await request.read()))
        counts: list[int] = []
        await self._counting.take()
        try:
            await asyncio.wrap_future(self._counting.start(lambda: counts.append(self._model.tokenise(prompt()).count)))
        except (RuntimeError, ValueError, MemoryError):
            raise Refusal("the engine failed", code="engine_failed", status=500) from None
        return web.json_response({"count": counts[0], "max_model_len": self._model.context_tokens})

    def _prompt_of(self, fields: ChatFields | CompletionFields) -> Callable[[], str]:
        """Return what makes the prompt; it may take long. Raises Refusal, and so may what it returns."""
        if isinstance(fields, CompletionFields):
            return lambda: fields.text
        template = self._template
        if template is None:
            raise Refusal("this model has no chat template; use /v1/completions", code="modality_unsupported")
        return lambda: template.render(fields)

    async def _answer(
        self, request: web.Request, fields: ChatFields | CompletionFields, text: Callable[[], str], field: str
    ) -> web.StreamResponse:
        scope = request.headers.get(SCOPE_HEADER, "")
        asked = fields.most_tokens
        task = Task(
            text=text,
            sampling=lambda left: fields.sampling(limit=left, asked=asked, scope=scope),
            stops=fields.stops,
            field=field,
        )
        generation = Generation(self._model, self._slots, task)
        shape = Shape(
            chat=isinstance(fields, ChatFields),
            number=uuid.uuid4().hex,
            model=fields.model or self._settings.model_name,
            created=int(clock.unix_s()),
        )
        try:
            await generation.start()
            if fields.stream:
                return await _stream(request, generation, shape, with_usage=fields.wants_usage)
            pieces = []
            while (piece := await generation.read()) is not None:
                pieces.append(piece)
            return web.json_response(shape.whole("".join(pieces), generation.finish, generation.tally))
        finally:
            generation.leave()

    async def _close(self, _app: web.Application) -> None:
        self._slots.close()
        self._counting.close()


async def _stream(request: web.Request, generation: Generation, shape: Shape, *, with_usage: bool) -> web.StreamResponse:
    """Send the answer as it comes; an error after the first byte is one last event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        for event in shape.opening():
            await response.write(event)
        while (piece := await generation.read()) is not None:
            await response.write(shape.piece(piece))
        await response.write(b"".join(shape.closing(generation.finish, generation.tally, with_usage=with_usage)))
        await response.write_eof()
    except Refusal as refusal:
        await response.write(as_event(refusal.render()))
    except ConnectionResetError:  # the client has gone
        pass
    return response


def run(model: TextModel, settings: ServerSettings, parent: Parent) -> None:
    """Serve ``model`` until the parent closes standard input. Raises ValueError when its chat template is broken."""
    server = TextServer(model, settings)
    asyncio.run(serve(server.make(), parent, server.info))
