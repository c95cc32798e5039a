"""Client of a Muster gateway that takes its requests to a node itself where it can, and else has the gateway relay them.

    from muster.client import Client, Restart

    with Client("http://127.0.0.1:8080", "mst_…") as client:
        text = ""
        for part in client.chat("qwen3-8b", [{"role": "user", "content": "Hello"}], max_tokens=200):
            text = "" if isinstance(part, Restart) else text + part

``AsyncClient`` is the same with ``async for``. Both need httpx alone. Where the node of a stream is lost, the answer begins
anew at another node or through the gateway, which a ``Restart`` says if some of it had come. docs/fleet.md has the protocol.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self  # bodies and events are JSON

import httpx

CHAT = "/v1/chat/completions"
_DIALECTS = {CHAT: "chat", "/v1/completions": "completions", "/v1/messages": "messages", "/v1/responses": "responses"}
_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete"})
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Interrupted(Exception):
    """The answer broke off, and there is nobody left to ask, or nobody who could do better."""


@dataclass(frozen=True, slots=True)
class Restart:
    """What came so far is void: the answer begins anew. ``reason`` as the gateway said it, or empty."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event of an answer. ``name`` is empty where it has none."""

    name: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long to wait, in seconds, and how often to go to a node. ``quiet_s``: of a silent node the gateway is asked."""

    connect_s: float = 5.0
    read_s: float = 300.0
    quiet_s: float = 10.0
    follow_s: float = 20.0
    moves: int = 3


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request is sent. ``ticket_id`` empty: to the gateway, with the caller's own key.

    ``has_own_ca``: the gateway has the CA that certified the node.
    """

    base_url: str
    key: str
    model: str
    ticket_id: str = ""
    has_own_ca: bool = False


class _Attempt:
    """What came of a request at one place."""

    def __init__(self) -> None:
        self.has_begun = self.is_whole = False
        self.failover: dict[str, Any] | None = None
        self.error = ""
        self.failure: httpx.HTTPError | None = None

    def take(self, event: Event | None) -> bool:
        """Note an event (None = the closing mark of chat); return whether it is the caller's."""
        if event is None:
            self.is_whole = True
            return False
        kind = event.name or str(event.data.get("type", ""))
        if kind == "x_pool_failover":
            self.failover = event.data
            return False
        if kind in ("error", "response.failed") or "error" in event.data:
            self.error = _read_error(event.data)
            return False
        self.has_begun = True
        self.is_whole = self.is_whole or kind in _ENDS
        return True


class _Course:
    """The way of one request: to a node, to another one when that is lost, at last to the gateway."""

    def __init__(self, gateway: str, key: str, path: str, body: Mapping[str, Any], bounds: Bounds) -> None:
        self.gateway, self.path = gateway, path
        self.relay = _Place(f"{gateway}/v1", key, str(body.get("model", "")))
        self.moves = bounds.moves if path in _DIALECTS else 0
        self._body = {**body, "stream": True}

    @property
    def wish(self) -> dict[str, Any]:
        """The body that asks for a ticket."""
        asked = next((self._body[name] for name in _BOUNDS if self._body.get(name) is not None), None)
        prompt = [self._body.get(name) for name in ("messages", "prompt", "input", "system", "instructions", "tools")]
        said: dict[str, Any] = {"model": self.relay.model, "dialects": [_DIALECTS[self.path]]}
        said["prompt_tokens_est"] = len(json.dumps([part for part in prompt if part is not None])) // 4
        options = self._body.get("x_pool_options")
        return said | ({"max_tokens": asked} if asked is not None else {}) | ({"x_pool_options": options} if options else {})

    def make_request(self, place: _Place) -> tuple[str, dict[str, str], dict[str, Any]]:
        """Return the URL, the headers and the body with which a place is asked."""
        body = {**self._body, "model": place.model}
        if place.ticket_id:
            body.pop("x_pool_options", None)
        else:
            body.setdefault("x_pool_options", {})  # whoever sends them hears of a lost node
        return place.base_url + self.path.removeprefix("/v1"), {"authorization": f"Bearer {place.key}"}, body

    def read_ticket(self, answer: httpx.Response) -> _Place:
        """Return where a gateway that was asked for a ticket sends the request. Raises httpx.HTTPStatusError."""
        if answer.status_code == 404 or answer.status_code >= 500:
            return self.relay  # it knows no tickets, or says best itself what is wrong
        answer.raise_for_status()
        return self._read_place(answer.json()) if answer.status_code == 201 else self.relay

    def choose_next(self, place: _Place, attempt: _Attempt) -> _Place | None:
        """Return where to go on after an attempt that did not end well; None = wherever a new ticket says.

        Raises Interrupted, and the failure where it is the caller's or the gateway's own.
        """
        failure, failover = attempt.failure, attempt.failover
        if isinstance(failure, httpx.HTTPStatusError):
            status = failure.response.status_code
            if not place.ticket_id or (400 <= status < 500 and status not in (401, 404, 408, 429)):
                raise failure
        elif failure is not None and not place.ticket_id and not attempt.has_begun:
            raise failure
        is_last = self.moves <= 0
        self.moves -= 1
        if failover is not None and not (is_last and not place.ticket_id):
            return self._read_place(failover) if failover.get("new_ticket") and not is_last else self.relay
        if attempt.error or not place.ticket_id:
            raise Interrupted(attempt.error or str(failure or "the stream ended before its answer did")) from failure
        return self.relay if attempt.has_begun or is_last else None

    def _read_place(self, said: Mapping[str, Any]) -> _Place:
        key = said.get("ticket") or said["new_ticket"]
        place = (str(said["base_url"]).rstrip("/"), str(key), str(said["model"]), str(said["ticket_id"]))
        return _Place(*place, has_own_ca=bool(said.get("ca_url")))


class _Parser:
    """Server-sent events out of lines (WHATWG HTML, section 9.2). Comments and what is no JSON are passed over."""

    def __init__(self) -> None:
        self._name, self._data = "", ""

    def feed(self, line: str) -> Iterator[Event | None]:
        """Yield the event that a line ends; None stands for the closing mark of chat."""
        field, _, value = line.partition(":")
        if field == "event":
            self._name = value.strip()
        elif field == "data":
            self._data += value.removeprefix(" ")
        elif not line and self._data:
            name, data, self._name, self._data = self._name, self._data, "", ""
            if data == "[DONE]":
                yield None
                return
            try:
                said = json.loads(data)
            except ValueError:
                return
            if isinstance(said, dict):
                yield Event(name, said)


class _Settings:
    """What both clients are made of. ``direct``, ``relayed``: how many answers came from nodes, and through the gateway."""

    def __init__(self, base_url: str, api_key: str, bounds: Bounds | None) -> None:
        self.gateway = base_url.rstrip("/").removesuffix("/v1")
        self.bounds = bounds or Bounds()
        self.direct = self.relayed = 0
        self._key = api_key
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(self.bounds.read_s, connect=self.bounds.connect_s)
        self._follow_timeout = httpx.Timeout(self.bounds.follow_s, connect=self.bounds.connect_s)

    @property
    def _ca_url(self) -> str:
        # Not the one that the ticket names: the gateway was verified where the caller reaches it.
        return f"{self.gateway}/v1/ca"

    def _count(self, place: _Place) -> None:
        self.direct += bool(place.ticket_id)
        self.relayed += not place.ticket_id

    def _events_url(self, place: _Place) -> str:
        return f"{self.gateway}/v1/tickets/{place.ticket_id}/events"


class Client(_Settings):
    """``http``: an ``httpx.Client`` of the caller's own, which stays open, and verifies nodes too."""

    def __init__(self, base_url: str, api_key: str, *, http: httpx.Client | None = None, bounds: Bounds | None = None) -> None:
        super().__init__(base_url, api_key, bounds)
        self._is_own, self._http = http is None, http or httpx.Client()
        self._of_nodes: httpx.Client | None = None
        """Trusts the CA of the gateway as well; for nodes alone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._is_own:
            self._http.close()
        if self._of_nodes is not None:
            self._of_nodes.close()

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[str | Restart]:
        """Yield the text of an answer as it comes. Raises what ``stream`` does."""
        for event in self.stream({"model": model, "messages": messages, **fields}):
            yield from [event] if isinstance(event, Restart) else _list_texts(event)

    def stream(self, body: Mapping[str, Any], *, path: str = CHAT) -> Iterator[Event | Restart]:
        """Yield the events of an answer as they come. Raises Interrupted, httpx.HTTPError."""
        course = _Course(self.gateway, self._key, path, body, self.bounds)
        place = self._find_place(course)
        while True:
            attempt = _Attempt()
            yield from self._attempt(course, place, attempt)
            if attempt.is_whole:
                self._count(place)
                return
            if place.ticket_id and attempt.failover is None and not isinstance(attempt.failure, httpx.HTTPStatusError):
                attempt.failover = self._follow(place)
            reason = str((attempt.failover or {}).get("reason", ""))
            place = course.choose_next(place, attempt) or self._find_place(course)
            if attempt.has_begun:
                yield Restart(reason)

    def _find_place(self, course: _Course) -> _Place:
        if course.moves <= 0:
            return course.relay
        asked = self._http.post(f"{self.gateway}/v1/tickets", json=course.wish, headers=self._headers, timeout=self._timeout)
        return course.read_ticket(asked)

    def _attempt(self, course: _Course, place: _Place, attempt: _Attempt) -> Iterator[Event]:
        url, headers, body = course.make_request(place)
        parser, watch = _Parser(), _Watch(lambda: self._follow(place), attempt, quiet_s=self.bounds.quiet_s)
        try:
            http = self._choose_http(place)
            with http.stream("POST", url, json=body, headers=headers, timeout=self._timeout) as answer:
                if answer.is_error:
                    answer.read()
                answer.raise_for_status()
                with watch.watch(answer, is_direct=bool(place.ticket_id)):
                    for line in answer.iter_lines():
                        watch.seen_at = time.monotonic()
                        for event in parser.feed(line):
                            if attempt.take(event) and event is not None:
                                yield event
                        if attempt.is_whole:
                            return
        except httpx.HTTPError as failure:
            attempt.failure = failure
            if isinstance(failure, httpx.ConnectError):
                self._of_nodes = None  # the CA may be another one by now

    def _choose_http(self, place: _Place) -> httpx.Client:
        """Return what asks a place. Raises httpx.HTTPError."""
        if not place.has_own_ca or not self._is_own:
            return self._http
        if self._of_nodes is None:
            self._of_nodes = httpx.Client(verify=_trust(self._http.get(self._ca_url, timeout=self._timeout)))
        return self._of_nodes

    def _follow(self, place: _Place) -> dict[str, Any] | None:
        """Return what the gateway says of the node of a ticket once that is lost; None = nothing, in ``follow_s``."""
        parser, attempt, until = _Parser(), _Attempt(), time.monotonic() + self.bounds.follow_s
        try:
            with self._http.stream(
                "GET", self._events_url(place), headers=self._headers, timeout=self._follow_timeout
            ) as answer:
                for line in answer.iter_lines() if answer.is_success else ():
                    for event in parser.feed(line):
                        attempt.take(event)
                    if attempt.failover is not None or time.monotonic() > until:
                        break
        except httpx.HTTPError:
            return None
        return attempt.failover


class _Watch:
    """Asks the gateway about a silent node beside whoever reads its stream, and cuts the stream of a lost one."""

    def __init__(self, follow: Callable[[], dict[str, Any] | None], attempt: _Attempt, *, quiet_s: float) -> None:
        self.seen_at = time.monotonic()
        self._follow, self._attempt, self._quiet_s = follow, attempt, quiet_s
        self._is_over = threading.Event()

    @contextmanager
    def watch(self, answer: httpx.Response, *, is_direct: bool) -> Iterator[None]:
        if is_direct:
            threading.Thread(target=self._run, args=[answer], daemon=True).start()
        try:
            yield
        finally:
            self._is_over.set()

    def _run(self, answer: httpx.Response) -> None:
        while not self._is_over.wait(self._quiet_s / 4):
            if time.monotonic() - self.seen_at < self._quiet_s:
                continue
            failover = self._follow()
            if failover is not None and not self._is_over.is_set():
                self._attempt.failover = failover
                stream = answer.extensions["network_stream"]
                with suppress(OSError):
                    stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # whoever reads it sees its end
                return


class AsyncClient(_Settings):
    """``Client`` for asyncio. ``http``: an ``httpx.AsyncClient`` of the caller's own, which stays open."""

    def __init__(
        self, base_url: str, api_key: str, *, http: httpx.AsyncClient | None = None, bounds: Bounds | None = None
    ) -> None:
        super().__init__(base_url, api_key, bounds)
        self._is_own, self._http = http is None, http or httpx.AsyncClient()
        self._of_nodes: httpx.AsyncClient | None = None
        """As of ``Client``."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._is_own:
            await self._http.aclose()
        if self._of_nodes is not None:
            await self._of_nodes.aclose()

    async def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncIterator[str | Restart]:
        """Yield the text of an answer as it comes. Raises what ``stream`` does."""
        async for event in self.stream({"model": model, "messages": messages, **fields}):
            for part in [event] if isinstance(event, Restart) else _list_texts(event):
                yield part

    async def stream(self, body: Mapping[str, Any], *, path: str = CHAT) -> AsyncIterator[Event | Restart]:
        """Yield the events of an answer as they come. Raises Interrupted, httpx.HTTPError."""
        course = _Course(self.gateway, self._key, path, body, self.bounds)
        place = await self._find_place(course)
        while True:
            attempt = _Attempt()
            async with aclosing(self._attempt(course, place, attempt)) as events:
                async for event in events:
                    yield event
            if attempt.is_whole:
                self._count(place)
                return
            if place.ticket_id and attempt.failover is None and not isinstance(attempt.failure, httpx.HTTPStatusError):
                attempt.failover = await self._follow(place)
            reason = str((attempt.failover or {}).get("reason", ""))
            place = course.choose_next(place, attempt) or await self._find_place(course)
            if attempt.has_begun:
                yield Restart(reason)

    async def _find_place(self, course: _Course) -> _Place:
        if course.moves <= 0:
            return course.relay
        url = f"{self.gateway}/v1/tickets"
        return course.read_ticket(await self._http.post(url, json=course.wish, headers=self._headers, timeout=self._timeout))

    async def _attempt(self, course: _Course, place: _Place, attempt: _Attempt) -> AsyncGenerator[Event]:
        url, headers, body = course.make_request(place)
        parser = _Parser()
        try:
            http = await self._choose_http(place)
            async with http.stream("POST", url, json=body, headers=headers, timeout=self._timeout) as answer:
                if answer.is_error:
                    await answer.aread()
                answer.raise_for_status()
                lines = answer.aiter_lines()
                while (line := await self._read_line(lines, place, attempt)) is not None:
                    for event in parser.feed(line):
                        if attempt.take(event) and event is not None:
                            yield event
                    if attempt.is_whole:
                        return
        except httpx.HTTPError as failure:
            attempt.failure = failure
            if isinstance(failure, httpx.ConnectError):
                self._of_nodes = None

    async def _choose_http(self, place: _Place) -> httpx.AsyncClient:
        if not place.has_own_ca or not self._is_own:
            return self._http
        if self._of_nodes is None:
            self._of_nodes = httpx.AsyncClient(verify=_trust(await self._http.get(self._ca_url, timeout=self._timeout)))
        return self._of_nodes

    async def _read_line(self, lines: AsyncIterator[str], place: _Place, attempt: _Attempt) -> str | None:
        """Return the next line; None at the end, or when the gateway says of a silent node that it is lost."""
        reading = asyncio.ensure_future(anext(lines, None))
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=self.bounds.quiet_s if place.ticket_id else None)
                if done:
                    return reading.result()
                following = asyncio.ensure_future(self._follow(place))
                try:
                    await asyncio.wait({reading, following}, return_when=asyncio.FIRST_COMPLETED)
                    if following.done() and (failover := following.result()) is not None and not reading.done():
                        attempt.failover = failover
                        return None
                finally:
                    following.cancel()
        finally:
            reading.cancel()

    async def _follow(self, place: _Place) -> dict[str, Any] | None:
        """Return what the gateway says of the node of a ticket once that is lost; None = nothing, in ``follow_s``."""
        parser, attempt = _Parser(), _Attempt()
        try:
            async with (
                asyncio.timeout(self.bounds.follow_s),
                self._http.stream(
                    "GET", self._events_url(place), headers=self._headers, timeout=self._follow_timeout
                ) as answer,
            ):
                async for line in answer.aiter_lines():
                    for event in parser.feed(line) if answer.is_success else ():
                        attempt.take(event)
                    if attempt.failover is not None:
                        break
        except (httpx.HTTPError, TimeoutError):
            return None
        return attempt.failover


def _trust(answer: httpx.Response) -> ssl.SSLContext:
    """Return what nodes are verified with: the CAs that everybody trusts, and those of the gateway. Raises httpx.HTTPError."""
    answer.raise_for_status()
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cadata=answer.text)
    except (ssl.SSLError, ValueError):
        raise httpx.DecodingError("the CA of the gateway cannot be read", request=answer.request) from None
    return context


def _list_texts(event: Event) -> list[str]:
    choices = event.data.get("choices") or ()
    texts = [(choice.get("delta") or {}).get("content") or choice.get("text") for choice in choices]
    return [text for text in texts if text]


def _read_error(data: Mapping[str, Any]) -> str:
    error = data.get("error") or (data.get("response") or {}).get("error") or data
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
