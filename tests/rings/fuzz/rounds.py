"""Rounds of a fuzzer against one running gateway: each sends something, looks at every answer, and notes what it cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any  # errors are JSON

import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as fix_seed
from hypothesis import strategies as st
from requests import RequestException
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from conformance.engine import answers
from conformance.engine.script import TEXT_PIECES, Script, Speech
from conformance.engine.server import frame_event
from conformance.exchange import Violation, read_json, read_stream
from conformance.readers.chat import read_chat
from conformance.readers.messages import read_messages, require_end
from conformance.readers.responses import LAST_EVENTS, read_responses
from tests.fakes import request_bodies as bodies
from tests.fakes.http_client import Reply, call
from tests.fakes.lab import Lab
from tests.fakes.request_bodies import (
    CHAT,
    COMPLETIONS,
    COUNT_MESSAGES,
    EMBEDDINGS,
    IMAGES,
    MESSAGES,
    RERANK,
    RESPONSES,
    spoil_answer,
    spoil_body,
    spoil_stream,
)
from tests.fakes.scripted_box import ScriptedBox, Stream
from tests.fakes.stack import Gateway
from tests.fakes.waiting import eventually, turns
from wire.contract import ErrorCode

SETTINGS = {"MUSTER_RATE_LIMIT_RPM": "1000000", "MUSTER_OFFLINE_AFTER_S": "3600"}
"""Of a gateway under fire: nothing is refused for its number, and a node that a busy machine keeps from answering stays."""
THE_ENGINES_OWN = ("the pieces of a tool's input are no JSON", "response.usage must be an object and is null")
"""Faults of translated streams that are passed on: a model's words go out while they come, and no count is invented."""
MOST_CPU_MS = 50.0
"""Of the event loop, for one request: time that its thread has run, so that a busy machine changes nothing."""
MOST_GROWTH_BYTES = 48 * 2**20
"""Of memory, over a round that was run once to warm up; a large body alone comes and goes with as much."""
WITHIN_S = 60.0
"""For an answer that is never to come later than at once: only to tell a slow machine from a gateway that hangs."""
TRIES = 3
"""A collection of garbage or work in the background can fall into any request, but not into the same one each time."""
STREAM = "text/event-stream"
BUG = re.compile(rb'request\.bug|Traceback|session\.bug|"level":"(?:error|critical)"')
STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
OURS = frozenset({400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 502, 503, 504})
CODES = frozenset(code.value for code in ErrorCode)
MOST_ERROR_BYTES = 4096
FRAME_BYTES = 64 * 1024


class Gauge:
    """One process, by its id."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._schedule = Path(f"/proc/{pid}/task/{pid}/schedstat")

    def read_cpu_s(self) -> float:
        """Return seconds that its first thread has run, to the microsecond where the kernel tells."""
        try:
            return int(self._schedule.read_text().split()[0]) / 1e9
        except OSError:
            return next(thread.user_time + thread.system_time for thread in self._process.threads())

    def read_rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)


class Cost:
    """What one request came to. ``cpu_ms``: of the event loop, from the making of this to ``stop``."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge, self._began_s, self.cpu_ms = gauge, gauge.read_cpu_s(), 0.0

    def stop(self) -> Cost:
        self.cpu_ms = (self._gauge.read_cpu_s() - self._began_s) * 1000
        return self


# what is wrong with an answer


def find_fault(path: str, reply: Reply, *, of_engine: int = 0) -> str:
    """Return what is wrong with an answer to anything at all; empty = nothing. The status 0 is a connection that was closed.

    ``of_engine``: the status of an engine whose own words, as far as a client can read them, are passed on.
    """
    if not reply.whole or reply.status == 0:
        return "the connection was closed without an answer"
    if reply.status < 400:
        return ""
    if reply.status not in OURS and reply.status != of_engine:
        return f"the status {reply.status} is none of ours"
    if reply.headers.get("content-type") != "application/json" or len(reply.body) > MOST_ERROR_BYTES:
        return f"an error of {len(reply.body)} bytes of type {reply.headers.get('content-type')}"
    try:
        body = json.loads(reply.body)
        error: dict[str, Any] = body["error"]
        others = [error.get(name) for name in ("type", "code", "param")]
        is_text = isinstance(error["message"], str) and all(one is None or isinstance(one, str) for one in others)
    except (ValueError, KeyError, TypeError) as fault:
        return f"an error that cannot be read ({fault!r}): {reply.body[:200]!r}"
    if not (is_text and error["message"]):
        return f"an error with members of other types: {reply.body[:200]!r}"
    if of_engine >= 400:
        return ""
    if error.get("code") not in CODES:
        return f"the code {error.get('code')!r} is none of ours"
    is_anthropic = body.get("type") == "error" and isinstance(body.get("request_id"), str)
    if is_anthropic != (path in {MESSAGES, COUNT_MESSAGES}) and "x-request-id" in reply.headers:
        return f"an error of the other dialect: {reply.body[:200]!r}"
    return ""


def find_fault_of_refusal(path: str, reply: Reply, *, statuses: tuple[int, ...], param: str | None) -> str:
    """Return what is wrong with the answer to a malformed request. ``param``: see ``Malformed``."""
    if reply.status not in statuses:
        return f"the status is {reply.status}, due is {statuses}: {reply.body[:200]!r}"
    if fault := find_fault(path, reply):
        return fault
    named = json.loads(reply.body)["error"].get("param")
    return "" if param in {"*", named} else f"param is {named!r}, due is {param!r}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answers."""

    content_type: str
    pieces: Iterable[bytes]
    status: int = 200


def find_fault_of_answer(path: str, reply: Reply, said: Answer, *, is_streaming: bool) -> str:
    """Return what is wrong with an answer of which an engine said ``said``; empty = nothing. Its errors keep their status."""
    if reply.status >= 400:
        return find_fault(path, reply, of_engine=said.status)
    if not reply.whole or path == CHAT:
        return "" if path == CHAT else "the answer was cut"
    if reply.status not in (200, said.status):
        return f"the status is {reply.status}"
    if is_streaming:
        return find_fault_of_stream(path, reply)
    kinds = {read_json(reply.body, "answer").value.get(name) for name in ("type", "object")}
    return "" if kinds & {"message", "response"} else "no answer"


def find_fault_of_stream(path: str, reply: Reply) -> str:
    """Return what is wrong with a stream, by the strict reader of its dialect; empty = nothing."""
    if not reply.headers["content-type"].startswith(STREAM):
        return f"a stream of type {reply.headers['content-type']}"
    try:
        stream = read_stream(reply.body)
        if path == MESSAGES:
            said = read_messages(stream)
            if said.failure is None:
                require_end(said)
        elif path == RESPONSES:
            return "" if read_responses(stream).ending in LAST_EVENTS else "the stream has no end"
        else:
            read_chat(stream)
    except Violation as violation:
        return "" if any(words in str(violation) for words in THE_ENGINES_OWN) else str(violation)
    return ""


# nodes

_SPEECH, _SCRIPT = Speech(pieces=TEXT_PIECES), Script({})
_ASKED = {"model": "m", "prompt": "hi", "input": ["hi"], "documents": ["a"], "stream_options": {"include_usage": True}}
_WHOLE = {
    CHAT: answers.render_chat, COMPLETIONS: answers.render_completion, MESSAGES: answers.render_message,
    RESPONSES: answers.render_response,
}  # fmt: skip
_STREAMED = {
    CHAT: answers.stream_chat, COMPLETIONS: answers.stream_completion, MESSAGES: answers.stream_message,
    RESPONSES: answers.stream_response,
}  # fmt: skip
_AT_ONCE = {EMBEDDINGS: answers.embed, RERANK: answers.rank, IMAGES: answers.draw}


def _say(path: str, *, is_streaming: bool) -> tuple[str, bytes]:
    """Return type and bytes of a good answer; the request is not looked at."""
    if path in _STREAMED and is_streaming:
        is_named = path in {MESSAGES, RESPONSES}
        said = list(_STREAMED[path](_SPEECH, _SCRIPT, _ASKED))
        events = [frame_event(content, _SCRIPT, name=content["type"] if is_named else "") for content in said]
        return STREAM, b"".join(events) + (b"" if is_named else b"data: [DONE]\n\n")
    if path in _WHOLE:
        content = _WHOLE[path](_SPEECH, _SCRIPT, _ASKED)
    else:
        content = _AT_ONCE[path](_ASKED) if path in _AT_ONCE else {"text": answers.TRANSCRIPT}
    return "application/json", json.dumps(content).encode()


def _may_send(stream: Stream, size: int) -> bool:
    return stream.window >= size or stream.cancelled is not None


@asynccontextmanager
async def good_box(lab: Lab, gateway: Gateway, model: str, endpoints: Sequence[str]) -> AsyncIterator[ScriptedBox]:
    """Connect a node that answers ``model`` well on these paths, whatever it is asked."""
    answers = {(path, streamed): _say(path, is_streaming=streamed) for path in endpoints for streamed in (True, False)}

    async def serve(box: ScriptedBox, stream: Stream) -> None:
        content_type, body = answers[stream.meta.path, stream.meta.is_streaming]
        await box.head(stream, content_type=content_type)
        await box.data(stream, body)
        await box.end(stream)

    async with _serving(lab, gateway, model, endpoints, serve) as box:
        yield box


@asynccontextmanager
async def hostile_box(lab: Lab, gateway: Gateway, model: str, choose: Callable[[], Answer]) -> AsyncIterator[ScriptedBox]:
    """Connect a node that answers chat completions with what ``choose`` returns."""

    async def serve(box: ScriptedBox, stream: Stream) -> None:
        said = choose()
        await box.head(stream, status=said.status, content_type=said.content_type)
        for number, piece in enumerate(said.pieces):
            if number % 50 == 0:
                await turns(1)  # a send that need not wait lets nobody else have a turn, pongs included
            for start in range(0, len(piece), FRAME_BYTES):
                part = piece[start : start + FRAME_BYTES]
                await box._wait(partial(_may_send, stream, len(part)), 30.0, "credit, or a cancel")
                if stream.cancelled is not None:
                    return
                await box.data(stream, part)
        await box.end(stream)

    async with _serving(lab, gateway, model, [CHAT], serve) as box:
        yield box


Serve = Callable[[ScriptedBox, Stream], Coroutine[None, None, None]]


@asynccontextmanager
async def _serving(
    lab: Lab, gateway: Gateway, model: str, endpoints: Sequence[str], serve: Serve, remembered: int = 500
) -> AsyncIterator[ScriptedBox]:
    box = await lab.box(model, endpoints=endpoints, max_concurrent=64, gateway=gateway)

    async def serve_all() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(serve(box, await box.stream(within_s=3600.0)))
                if box._taken > 2 * remembered:  # late frames speak of the last few streams at most
                    del box.streams[:remembered]
                    box._taken -= remembered

    serving = asyncio.create_task(serve_all())
    try:
        yield box
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


# the fuzzer


@dataclass(frozen=True, slots=True)
class Unread:
    """A request whose body nobody wants. ``status``: what it has to be answered, however much of it is under way."""

    kind: str
    status: int
    path: str = CHAT
    method: str = "POST"


UNREAD = (
    Unread("a large body without a key", 401),
    Unread("a large body to Anthropic's surface without a key", 401, path="/v1/messages"),
    Unread("a large body to no path", 404, path="/v1/nothing"),
    Unread("a large body to a path that is read", 405, path="/v1/models"),
    Unread("a large body by another method", 405, method="PUT"),
)
SPOILABLE = [
    *bodies.TALKING, *bodies.TRANSLATED, *bodies.NATIVE[4:7], "/v1/messages/count_tokens", "/v1/responses/input_tokens",
]  # fmt: skip


@dataclass
class Fuzzer:
    """One gateway under fire. ``native``, ``translated``: models whose node answers every path, and chat alone."""

    lab: Lab
    gateway: Gateway
    native: str
    translated: str
    hostile: str
    findings: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    """Of all answers, how often each came; 0 = none."""
    _said: Answer | None = None

    def __post_init__(self) -> None:
        assert self.gateway.process is not None
        self.gauge = Gauge(self.gateway.process.pid)

    # requests

    async def send_malformed(self, name: str, path: str, make: bodies.Make, *, repeats: int) -> None:
        """Send one kind of malformed request, and check that it is refused as it has to be."""
        costs: list[float] = []
        asked = make(path, self.translated if path in bodies.TRANSLATED else self.native)
        for _ in range(repeats):
            reply, cpu_ms = await self._post_measured(asked.path, asked.body, asked.headers)
            costs.append(cpu_ms)
            if fault := find_fault_of_refusal(path, reply, statuses=asked.statuses, param=asked.param):
                self._note(f"{name} to {path}", fault)
                break
        if min(costs) > MOST_CPU_MS:
            self._note(f"{name} to {path}", f"it took {min(costs):.0f} ms of the event loop")

    async def send_spoilt(self, seeds: Iterable[int]) -> None:
        """Send bodies that were good once, to nodes that answer every path and to one that answers chat alone."""
        for seed in seeds:
            rng = random.Random(seed)
            path = rng.choice(SPOILABLE)
            body = bodies.make_body(path, self.translated if path in bodies.TRANSLATED and rng.random() < 0.7 else self.native)
            if path in bodies.TALKING and rng.random() < 0.5:
                body["stream"] = True
            data = spoil_body(rng, body)
            reply, cpu_ms = await self._post_measured(path, data, {"content-type": "application/json"})
            fault = find_fault(path, reply)
            if not fault and reply.status >= 500:
                fault = f"the status is {reply.status}: {reply.body[:300]!r}"
            if not fault and cpu_ms > MOST_CPU_MS:
                fault = f"it took {cpu_ms:.0f} ms of the event loop"
            if fault:
                self._note(f"spoilt body {seed} to {path}", f"{fault}\n  {data[:600]!r}")

    async def send_broken(self, name: str) -> None:
        """Send one kind of broken HTTP on a connection of its own."""
        broken = bodies.KINDS[name](self.lab.stack.ready.api_key, self.native)
        answer = await converse(self.gateway, broken.data, leaves=broken.leaves)
        status = read_status(answer)
        self.statuses[status] += 1
        if status not in broken.statuses:
            self._note(name, f"the status is {status}, due is {broken.statuses}: {answer[:300]!r}")

    async def send_large(self, size_bytes: int, *, declared: bool) -> Cost:
        """Send a body that is larger than any may be; without a declared length it has to be cut off at the limit."""
        request = Unread(f"{size_bytes >> 20} MB {'declared' if declared else 'in chunks'}", 413)
        return await self._pour(request, self.lab.headers(), size_bytes, declared=declared)

    async def send_unread(self, size_bytes: int) -> None:
        """Send large bodies with requests that are refused before anybody looks at one."""
        for request in UNREAD:
            await self._pour(request, {}, size_bytes, declared=True)

    async def _pour(self, request: Unread, headers: dict[str, str], size_bytes: int, *, declared: bool) -> Cost:
        cost = Cost(self.gauge)
        status, taken = await pour(self.gateway, request, headers, size_bytes, declared=declared)
        self.statuses[status] += 1
        if status != request.status:
            self._note(f"{request.kind}, {taken >> 20} MB of it taken", f"the status is {status}, due is {request.status}")
        return cost.stop()

    # engines

    async def hear_spoilt(self, seeds: Iterable[int]) -> None:
        """Have a node answer with spoilt streams, and hold what the client gets to the grammar of its dialect."""
        odd = ["application/json", "text/html", "", "text/event-stream;x"]
        for seed in seeds:
            rng = random.Random(seed)
            path, pieces = rng.choice([MESSAGES, RESPONSES]), spoil_stream(rng)
            await self._hear(f"spoilt stream {seed}", path, Answer(STREAM if rng.random() < 0.9 else rng.choice(odd), pieces))

    async def hear_answers(self, seeds: Iterable[int]) -> None:
        """Have a node answer with spoilt answers and errors, whether a stream was asked for or not."""
        for seed in seeds:
            rng = random.Random(seed)
            status, content_type, pieces = spoil_answer(rng)
            path, is_streaming = rng.choice([MESSAGES, RESPONSES, CHAT]), rng.random() < 0.3
            await self._hear(f"spoilt answer {seed}", path, Answer(content_type, pieces, status), is_streaming=is_streaming)

    async def hear_flood(self, name: str, pieces: Iterable[bytes]) -> None:
        """Have a node answer with a flood on each translated surface."""
        for path in bodies.TRANSLATED:
            await self._hear(name, path, Answer(STREAM, pieces))

    async def _hear(self, name: str, path: str, said: Answer, *, is_streaming: bool = True) -> None:
        self._said = said
        body = {**bodies.make_plain(path, self.hostile), "stream": is_streaming}
        reply = await self._post(path, bodies.write(body), {"content-type": "application/json"})
        if fault := find_fault_of_answer(path, reply, said, is_streaming=is_streaming):
            self._note(f"{name} to {path}", f"{fault}\n  {b''.join(said.pieces)[:900]!r}\n  {reply.body[-600:]!r}")

    # both

    async def settle(self, before_bytes: int) -> None:
        """Wait until the gateway holds hardly more memory than it did; what ended gives it back a little later."""

        def grown() -> int:
            return self.gauge.read_rss_bytes() - before_bytes

        what = f"the gateway holds less than {MOST_GROWTH_BYTES >> 20} MB more"
        try:
            await eventually(lambda: grown() < MOST_GROWTH_BYTES, what)
        except AssertionError as fault:
            self._note("memory", f"{fault}; it is {grown() >> 20} MB")

    def read_bugs(self) -> str:
        """Return the first lines of the gateway's log that speak of a fault of ours."""
        assert self.gateway.log is not None
        log = self.gateway.log.read_bytes()
        found = BUG.search(log)
        return "" if found is None else log[max(0, found.start() - 200) : found.start() + 3000].decode(errors="replace")

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        named = {"authorization": f"Bearer {self.lab.stack.ready.api_key}", **headers}
        try:
            reply = await call("POST", self.gateway.url + path, headers=named, body=body, within_s=WITHIN_S)
        except TimeoutError:
            raise AssertionError(f"no answer from {path} within {WITHIN_S:g} s to {body[:600]!r}") from None
        self.statuses[reply.status] += 1
        return reply

    async def _post_measured(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[Reply, float]:
        """Return the answer, and milliseconds of the event loop: the fewest of several tries, if one takes too many."""
        costs: list[float] = []
        while True:
            cost = Cost(self.gauge)
            reply = await self._post(path, body, headers)
            costs.append(cost.stop().cpu_ms)
            if min(costs) < MOST_CPU_MS or len(costs) == TRIES:
                return reply, min(costs)

    def _note(self, what: str, fault: str) -> None:
        self.findings.append(f"{what}: {fault}")


@asynccontextmanager
async def fuzz(lab: Lab, gateway: Gateway) -> AsyncIterator[Fuzzer]:
    """Allow three models, connect a node for each, and hand out the fuzzer."""
    caps = {"max_prompt_chars": 50_000_000, "max_tokens": 1_900_000_000}
    native, spoken, hostile = [await lab.model(gateway, prefix=kind, **caps) for kind in ("native", "spoken", "hostile")]
    fuzzer = Fuzzer(lab, gateway, native, spoken, hostile)

    def choose() -> Answer:
        assert fuzzer._said is not None
        return fuzzer._said

    async with (
        good_box(lab, gateway, fuzzer.native, bodies.NATIVE),
        good_box(lab, gateway, fuzzer.translated, [CHAT]),
        hostile_box(lab, gateway, fuzzer.hostile, choose),
    ):
        yield fuzzer


# connections of their own


def read_status(answer: bytes) -> int:
    """Return the status of an answer; 0 = there is none."""
    found = STATUS.match(answer)
    return int(found.group(1)) if found else 0


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def converse(gateway: Gateway, data: bytes, *, leaves: bool) -> bytes:
    """Send bytes and return the head of what is answered, or what came before the connection was closed.

    ``leaves``: close our half behind the bytes. Raises AssertionError when neither comes in time.
    """
    found = bytearray()
    async with connected(gateway) as (reader, writer):
        try:
            async with asyncio.timeout(WITHIN_S):
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    if leaves:
                        writer.write_eof()
                    while b"\r\n\r\n" not in found and (piece := await reader.read(65_536)):
                        found += piece
        except TimeoutError:
            raise AssertionError(f"neither an answer nor an end within {WITHIN_S:g} s to {data[:600]!r}") from None
    return bytes(found)


async def pour(
    gateway: Gateway, request: Unread, headers: dict[str, str], size_bytes: int, *, declared: bool
) -> tuple[int, int]:
    """Send a body as fast as it is taken until an answer comes; return its status and how much was taken."""
    length = f"content-length: {size_bytes}" if declared else "transfer-encoding: chunked"
    named = [f"{name}: {value}" for name, value in headers.items()]
    piece, status, taken = b"a" * 65_536, 0, 0
    framed = piece if declared else b"%x\r\n%b\r\n" % (len(piece), piece)
    async with connected(gateway) as (reader, writer):
        writer.write(
            "\r\n".join([f"{request.method} {request.path} HTTP/1.1", "host: gateway", length, *named, "", ""]).encode()
        )
        answering = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        try:
            async with asyncio.timeout(WITHIN_S):
                while taken < size_bytes and not answering.done():
                    writer.write(framed)
                    await writer.drain()
                    await turns(1)
                    taken += len(piece)
                status = read_status(await answering)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
    return status, taken


# what the document says

CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance,
]  # fmt: skip
REFUSED_FIELDS = frozenset({"store", "previous_response_id", "source_lang_code", "target_lang_code"})
"""What is right in the document and refused where answers are not kept, or where no node speaks llm-pool's form."""
OF_THE_MODEL = frozenset({ErrorCode.MAX_TOKENS_TOO_LARGE.value})
"""Refusals of what is right in the document, by limits that each model has of its own."""
FRAMING = frozenset({"connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding", "upgrade"})
"""Headers that say where a request ends, not what it asks: a broken one is answered before there is an operation.

tests/fakes/request_bodies.py sends those.
"""


class Attack:
    """Everything that is sent to one gateway for one model, always the same for as long as the document is the same.

    ``statuses``: how often each came. ``findings``: of each operation and kind of data, the first answer that is wrong.
    """

    def __init__(self, document: dict[str, Any], url: str, model: str, key: str, *, examples: int) -> None:
        self._document, self._url, self._model, self._key, self._examples = document, url, model, key, examples
        self.statuses: Counter[int] = Counter()
        self.findings: list[str] = []

    def run(self, paths: Collection[str] = ()) -> None:
        """Send it, blocking; ``paths`` empty = all there are."""
        for found in schemathesis.openapi.from_dict(self._document).get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            if paths and operation.path not in paths:
                continue
            self._send(operation.as_strategy(GenerationMode.POSITIVE), is_good=True)
            if operation.body or operation.query:
                self._send(operation.as_strategy(GenerationMode.NEGATIVE), is_good=False)

    def _send(self, cases: st.SearchStrategy[Any], *, is_good: bool) -> None:
        @fix_seed(7)
        @settings(
            max_examples=self._examples, derandomize=False, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # without shrinking: the first failure says enough  # fmt: skip
        @given(cases)
        def send(case: schemathesis.Case[Any]) -> None:
            if is_good and isinstance(case.body, dict):
                case.body = {**case.body, "model": self._model}
            for name in FRAMING & {name.lower() for name in case.headers or {}}:
                del case.headers[name]
            response = case.call(base_url=self._url, headers={"Authorization": f"Bearer {self._key}"}, timeout=30)
            self.statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)
            if {"node": []} in case.operation.definition.raw.get("security", ()):  # a client's key opens nothing of nodes
                assert response.status_code in {401, 404}, f"{case.path}: {response.text} to {case.body!r}"
                return
            if is_good and case.operation.body and response.status_code >= 400:
                error = response.json()["error"]
                is_due = error["param"] in REFUSED_FIELDS or error["code"] in OF_THE_MODEL
                assert is_due, f"{case.path}: {response.text} to {case.body!r}"

        try:
            send()
        except (AssertionError, FailureGroup, RequestException) as fault:  # the other operations have their turn
            self.findings.append(_describe(fault))


def _describe(fault: BaseException) -> str:
    inner = [_describe(one) for one in fault.exceptions] if isinstance(fault, BaseExceptionGroup) else []
    return f"{fault!s:.3000}\n" + "\n".join(inner)
