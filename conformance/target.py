"""The server under test: where it is, what is asked of it, and what is known about it so far."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any  # request bodies are JSON

from conformance.events import Stream, read_stream
from conformance.exchange import Answer, Ask, Connection
from conformance.fields import Field
from conformance.limits import LIMITS
from conformance.verdicts import NotApplicable, Violation

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TRANSCRIPTIONS, IMAGES, MODELS = "/v1/audio/transcriptions", "/v1/images/generations", "/v1/models"
ANTHROPIC_VERSION = "2023-06-01"
ANTHROPIC_PATHS = frozenset({MESSAGES, COUNT_TOKENS})
PROMPT = "Say hello in a few words."


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
        try:
            connection = await Connection.open(self.base_url)
        except (OSError, TimeoutError, ssl.SSLError) as error:
            raise Violation(f"cannot connect: {str(error) or type(error).__name__}") from None
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await connection.exchange(ask, leave=leave)
                if watches_close and not answer.closed:
                    answer.closed = await connection.sees_close()
        except TimeoutError:
            raise Violation(f"{ask.method} {ask.path} was not answered in full within {self.timeout_s:g} s") from None
        finally:
            await connection.close()
        if not answer.status:
            raise Violation(f"{answer.what}: the connection was closed without an answer")
        return answer

    # the dialects' bodies

    def chat_body(self, prompt: str = PROMPT, /, **more: Any) -> dict[str, Any]:
        """Return a chat completion request; ``more`` replaces or adds fields."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": self.model_for(CHAT), "messages": messages, "max_tokens": LIMITS.answer_tokens, **more}

    def completion_body(self, prompt: object = "Once upon a time", /, **more: Any) -> dict[str, Any]:
        """Return a completion request."""
        return {"model": self.model_for(COMPLETIONS), "prompt": prompt, "max_tokens": LIMITS.answer_tokens, **more}

    def messages_body(self, prompt: str = PROMPT, /, **more: Any) -> dict[str, Any]:
        """Return a Messages request."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": self.model_for(MESSAGES), "max_tokens": LIMITS.answer_tokens, "messages": messages, **more}

    def responses_body(self, prompt: object = PROMPT, /, **more: Any) -> dict[str, Any]:
        """Return a Responses request."""
        return {
            "model": self.model_for(RESPONSES),
            "input": prompt,
            "max_output_tokens": LIMITS.answer_tokens,
            "store": False,
            **more,
        }

    async def chat(self, prompt: str = PROMPT, /, **more: Any) -> Answer:
        """Send a chat completion."""
        return await self.send(self.ask_json(CHAT, self.chat_body(prompt, **more)))

    async def messages(self, prompt: str = PROMPT, /, **more: Any) -> Answer:
        """Send a Messages request."""
        return await self.send(self.ask_json(MESSAGES, self.messages_body(prompt, **more)))

    async def responses(self, prompt: object = PROMPT, /, **more: Any) -> Answer:
        """Send a Responses request."""
        return await self.send(self.ask_json(RESPONSES, self.responses_body(prompt, **more)))

    async def completions(self, prompt: object = "Once upon a time", /, **more: Any) -> Answer:
        """Send a completion request."""
        return await self.send(self.ask_json(COMPLETIONS, self.completion_body(prompt, **more)))


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
