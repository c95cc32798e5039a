"""Table of requirements: the rows, each with the clients that break without it, and the server that is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any  # request bodies are JSON

from conformance.exchange import LIMITS, Answer, Ask, Connection, Field, NotApplicable, Stream, Violation, read_stream


class Surface(StrEnum):
    """The parts of the API, in the order of the report."""

    FRAMING = "framing"
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    AUDIO = "audio"
    IMAGES = "images"
    ERRORS = "errors"


Check = Callable[["Target"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One requirement; the first word of its id is its surface. ``clients`` break without it.

    ``check`` returns when the requirement is fulfilled and raises Violation or NotApplicable. ``needs``: the surface that must
    be there, where it is not the row's own; ``needs_script``: only the scripted engine can show it; ``is_slow``: it waits for
    a silence of the engine, so it takes no turn from the others.
    """

    id: str
    requirement: str
    clients: str
    check: Check
    needs: Surface | None = None
    needs_script: bool = False
    is_slow: bool = False

    @property
    def surface(self) -> Surface:
        """The part of the API that it belongs to."""
        return Surface(self.id.partition(".")[0])

    @property
    def needed(self) -> Surface | None:
        """The surface without which the row is skipped; None = it asks whatever server there is."""
        anywhere = {Surface.FRAMING, Surface.MODELS, Surface.ERRORS}
        return self.needs or (None if self.surface in anywhere else self.surface)


scripted = partial(Row, needs_script=True)
"""A row that only the scripted engine can show."""


def list_rows(only: Iterable[str] = ()) -> list[Row]:
    """Return the rows by surface; ``only``: surfaces, or beginnings of ids. Raises ValueError for a word that fits no row."""
    # The rows import this module.
    from conformance.rows import EVERY_ROW

    order = list(Surface)
    rows = sorted(EVERY_ROW, key=lambda row: order.index(row.surface))
    words = [word for word in only if word]
    for word in words:
        if not any(row.id.startswith(word) for row in rows):
            raise ValueError(f"no requirement begins with {word!r}; the surfaces are {', '.join(Surface)}")
    return [row for row in rows if not words or any(row.id.startswith(word) for word in words)]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TRANSCRIPTIONS, IMAGES, MODELS = "/v1/audio/transcriptions", "/v1/images/generations", "/v1/models"
ANTHROPIC_VERSION = "2023-06-01"
ANTHROPIC_PATHS = frozenset({MESSAGES, COUNT_TOKENS})
PROMPT, FRAGMENT = "Say hello in a few words.", "Once upon a time"


@dataclass
class Target:
    """A base URL (up to, not including, ``/v1``), a key and a model; ``models``: others for single paths.

    ``scripted``: the model is the scripted engine. ``silence_s``: how long that keeps silent where keep-alives are awaited.
    """

    base_url: str
    api_key: str
    model: str
    scripted: bool = False
    silence_s: float = 11.0
    timeout_s: float = 60.0
    models: Mapping[str, str] = field(default_factory=dict)
    _answers: dict[Ask, asyncio.Task[Answer]] = field(default_factory=dict)

    def model_for(self, path: str) -> str:
        """Return the model to ask on a path."""
        return self.models.get(path, self.model)

    def headers_for(self, path: str) -> dict[str, str]:
        """Return what a client of the path sends: the key as that dialect does, and JSON."""
        if path.partition("?")[0] in ANTHROPIC_PATHS:
            named = {"x-api-key": self.api_key, "anthropic-version": ANTHROPIC_VERSION}
        else:
            named = {"authorization": f"Bearer {self.api_key}"}
        return {**named, "content-type": "application/json", "accept": "application/json"}

    def ask_json(self, path: str, body: Any, headers: Mapping[str, str | None] | None = None) -> Ask:
        """Return a POST of JSON; ``headers`` replace the usual ones, None leaves one out."""
        merged: dict[str, str | None] = {**self.headers_for(path), **(headers or {})}
        kept = tuple((name, value) for name, value in merged.items() if value is not None)
        return Ask("POST", path, kept, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode())

    async def send(self, ask: Ask) -> Answer:
        """Return the answer to a request; the same request is sent once for all rows. Raises Violation."""
        task = self._answers.get(ask)
        if task is None:
            task = self._answers[ask] = asyncio.create_task(self.send_fresh(ask))
        return await asyncio.shield(task)

    async def send_fresh(
        self, ask: Ask, *, leave: Callable[[Answer], bool] | None = None, watches_close: bool = False
    ) -> Answer:
        """Send a request of one's own on a connection of its own. Raises Violation when there is no answer.

        ``leave``: close the connection as soon as it says so; ``watches_close``: see whether the server closes it afterwards.
        """
        async with Connection.opened(self.base_url) as connection:
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await connection.exchange(ask, leave=leave)
                    if watches_close and not answer.closed:
                        answer.closed = await connection.sees_close()
            except TimeoutError:
                raise Violation(f"{ask.method} {ask.path} was not answered in full within {self.timeout_s:g} s") from None
        if not answer.status:
            raise Violation(f"{answer.what}: the connection was closed without an answer")
        return answer

    def body(self, path: str, prompt: object = None, /, **more: Any) -> dict[str, Any]:
        """Return a request of a path that says text; ``more`` replaces or adds fields."""
        asked = prompt or (FRAGMENT if path == COMPLETIONS else PROMPT)
        turns = [{"role": "user", "content": asked}]
        fields: dict[str, dict[str, Any]] = {
            CHAT: {"messages": turns, "max_tokens": LIMITS.answer_tokens},
            COMPLETIONS: {"prompt": asked, "max_tokens": LIMITS.answer_tokens},
            MESSAGES: {"max_tokens": LIMITS.answer_tokens, "messages": turns},
            RESPONSES: {"input": asked, "max_output_tokens": LIMITS.answer_tokens, "store": False},
        }
        return {"model": self.model_for(path), **fields[path], **more}

    async def say(self, path: str, prompt: object = None, /, **more: Any) -> Answer:
        """Send such a request."""
        return await self.send(self.ask_json(path, self.body(path, prompt, **more)))


def require_ok(answer: Answer) -> Field:
    """Return the JSON of an answer with status 200. Raises Violation with the server's own words otherwise."""
    require_status(answer, 200)
    if "json" not in answer.header("content-type"):
        raise Violation(f"{answer.what} answers {answer.header('content-type') or 'no content-type'}, JSON is due")
    return answer.json()


def require_stream(answer: Answer) -> Stream:
    """Return the events of a stream that ended in order. Raises Violation."""
    require_status(answer, 200)
    if not answer.whole:
        raise Violation(f"{answer.what}: the stream breaks off after {len(answer.body)} bytes")
    return read_stream(answer.body)


def require_status(answer: Answer, *expected: int) -> None:
    """Raise Violation unless the status is one of those."""
    if answer.status not in expected:
        words = " or ".join(map(str, expected))
        raise Violation(f"{answer.what} answers {answer.status}, {words} is due: {show_body(answer)}")


def show_body(answer: Answer) -> str:
    """Return the beginning of a body for a person."""
    return answer.body[:220].decode(errors="replace").replace("\n", "\\n") or "(no body)"


def require_script_or_skip(target: Target, answer: Answer, what: str) -> None:
    """Skip what a real model or its engine refuses; the scripted engine refuses nothing."""
    if not target.scripted and 400 <= answer.status < 500:
        raise NotApplicable(f"the engine refuses {what}: {show_body(answer)[:120]}")


QUESTION = "What is the weather in Paris?"
_FREE = (QUESTION, "Is it cold in Rome? Use the tool.")
_NAMED = ("What time is it in Paris?", "Call get_time for Rome.", "I fly to Rome now: how late is it there?", "Paris, time.")


@dataclass(frozen=True, slots=True)
class Go:
    """One request for a call. ``is_named``: the client names the tool, the one with the fewest parameters."""

    prompt: str
    is_named: bool = False

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """How a chat completion with the call may end."""
        # OpenAI says ``stop`` where the client named the function.
        return ("tool_calls", "stop") if self.is_named else ("tool_calls",)


def list_goes(target: Target, directive: str) -> list[Go]:
    """Return what to try until there is a call; the scripted engine needs one go, with its directive."""
    if target.scripted:
        return [Go(f"[[{directive}]] {QUESTION}")]
    return [*map(Go, _FREE), *(Go(prompt, is_named=True) for prompt in _NAMED)]


def no_call() -> NotApplicable:
    """Return what to raise when no go brought one."""
    return NotApplicable(f"the model finished no call of a tool in {len(_FREE) + len(_NAMED)} answers")
