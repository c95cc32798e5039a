"""Dialects of the API: where each holds text, calls and errors, and the checks that are the same for all of them."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any  # request bodies are JSON

from conformance.engine.script import OTHER_TOOL, REASON, TOOL
from conformance.exchange import LIMITS, Answer, Ask, Field, NotApplicable, Stream, Violation, read_json
from conformance.readers.chat import read_chat, read_completion
from conformance.readers.messages import check_error, read_messages
from conformance.readers.responses import read_responses
from conformance.table import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Check,
    Go,
    Row,
    Surface,
    Target,
    list_goes,
    require_ok,
    require_script_or_skip,
    require_status,
    require_stream,
)

OPENAI_ERROR_KEYS = ("message", "type", "param", "code")
PIXEL_URL = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()


# Even a tiny model can write a call of such a tool, where the engine holds it to the schema.
def _function(name: str, **members: list[str]) -> dict[str, Any]:
    properties = {member: {"type": "string", "enum": values} for member, values in members.items()}
    parameters = {"type": "object", "properties": properties, "required": list(members), "additionalProperties": False}
    return {"name": name, "description": f"{name} for a place", "strict": True, "parameters": parameters}


FUNCTIONS = [
    _function(TOOL, city=["Paris", "Rome"], unit=["celsius", "fahrenheit"]),
    _function(OTHER_TOOL, zone=["Europe/Paris", "Europe/Rome"]),
]
TOOLS: Mapping[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": function} for function in FUNCTIONS],
    MESSAGES: [
        {"input_schema" if name == "parameters" else name: value for name, value in function.items()} for function in FUNCTIONS
    ],
    RESPONSES: [{"type": "function", **function} for function in FUNCTIONS],
}
_ANY_TOOL: Mapping[str, Any] = {CHAT: "required", MESSAGES: {"type": "any"}, RESPONSES: "required"}
_OTHER_TOOL: Mapping[str, Any] = {
    CHAT: {"type": "function", "function": {"name": OTHER_TOOL}},
    MESSAGES: {"type": "tool", "name": OTHER_TOOL},
    RESPONSES: {"type": "function", "name": OTHER_TOOL},
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API that says text. ``text``: of a whole answer; ``stream_text``: of a stream.

    ``failure``: the error that a broken stream says, a Violation when it says none; ``check_error``: of an error's body.
    """

    surface: Surface
    path: str
    text: Callable[[Field], Field]
    stream_text: Callable[[Stream], str]
    failure: Callable[[Stream], Field]
    check_error: Callable[[Field], object]

    def ask(self, target: Target, prompt: str = "", **headers: str) -> Ask:
        """Return a request for a stream; ``prompt`` empty = any."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return target.ask_json(self.path, target.body(self.path, prompt, stream=True), {"accept": "text/event-stream", **named})


def find_blocks(message: Field, kind: str) -> list[Field]:
    """Return the content blocks of one type of a Messages answer."""
    return [block for block in message["content"].items() if block["type"].value == kind]


def find_items(response: Field, kind: str) -> list[Field]:
    """Return the output items of one type of a Responses answer."""
    return [item for item in response["output"].items() if item["type"].value == kind]


def find_parts(response: Field, kind: str) -> list[Field]:
    """Return the content parts of one type, of all messages of a Responses answer."""
    parts = [part for item in find_items(response, "message") for part in item["content"].items()]
    return [part for part in parts if part["type"].value == kind]


def only(found: list[Field], what: str) -> Field:
    """Return the one entry of a list. Raises Violation."""
    if len(found) != 1:
        raise Violation(f"{len(found)} {what}, one is due")
    return found[0]


def _find_text_block(message: Field) -> Field:
    texts = find_blocks(message, "text")
    return Field("".join(block["text"].text() for block in texts), f"{texts[0].path if texts else 'reply.content'}.text")


def _fail_chat(stream: Stream) -> Field:
    said = read_chat(stream)
    if said.failure is None:
        raise Violation(f"the stream ends in silence after {said.chunks} chunks (done: {said.done})")
    return said.failure


def _fail_messages(stream: Stream) -> Field:
    said = read_messages(stream)
    if said.failure is None:
        raise Violation(f"the stream ends without an error event (stopped: {said.stopped})")
    return said.failure


def _fail_responses(stream: Stream) -> Field:
    said = read_responses(stream)
    if said.ending != "response.failed" or said.last is None:
        raise Violation(f"the stream ends with {said.ending or 'nothing'} after {len(said.order)} events")
    return said.last["error"]


def _fail_completion(stream: Stream) -> Field:
    raise Violation(f"the stream says no error: {read_completion(stream).texts}")


def _check_openai(body: Field) -> None:
    body["error"]["message"].word()


DIALECTS: Mapping[str, Dialect] = {
    CHAT: Dialect(
        Surface.CHAT, CHAT, lambda reply: reply["choices"][0]["message"]["content"],
        lambda stream: read_chat(stream).first.content, _fail_chat, _check_openai,
    ),
    COMPLETIONS: Dialect(
        Surface.COMPLETIONS, COMPLETIONS, lambda reply: reply["choices"][0]["text"],
        lambda stream: read_completion(stream).texts.get(0, ""), _fail_completion, _check_openai,
    ),
    RESPONSES: Dialect(
        Surface.RESPONSES, RESPONSES, lambda reply: only(find_parts(reply, "output_text"), "texts")["text"],
        lambda stream: "".join(read_responses(stream).texts("output_text")), _fail_responses, _check_openai,
    ),
    MESSAGES: Dialect(
        Surface.MESSAGES, MESSAGES, _find_text_block,
        lambda stream: "".join(read_messages(stream).texts("text")), _fail_messages, check_error,
    ),
}  # fmt: skip


DialectCheck = Callable[[Dialect, Target], Awaitable[None]]


def each(
    name: str,
    text: str,
    clients: str,
    check: DialectCheck,
    *,
    paths: Iterable[str] = DIALECTS,
    needs_script: bool = False,
    is_slow: bool = False,
) -> Iterator[Row]:
    """Yield one row for each dialect."""
    for dialect in map(DIALECTS.__getitem__, paths):
        row_id, row_text = f"{name}.{dialect.surface}", f"{dialect.surface}: {text}"
        yield Row(row_id, row_text, clients, partial(check, dialect), dialect.surface, needs_script, is_slow)


# Checks of answers


def answers(
    path: str, prompt: object = None, text: str | None = None, places: Mapping[str, object] | None = None, **fields: Any
) -> Check:
    """Return a check of a whole answer: what stands at each place, and its text."""

    async def check(target: Target) -> None:
        reply = require_ok(await target.say(path, prompt, **fields))
        reply.must_fit(places or {})
        if text is not None:
            DIALECTS[path].text(reply).must_be(text)

    return check


async def carried(target: Target, path: str, prompt: object = "[[echo]]", **fields: Any) -> Field:
    """Return the chat request that the engine got. Raises NotApplicable when it speaks another dialect itself."""
    text = DIALECTS[path].text(require_ok(await target.say(path, prompt, **fields))).text()
    got = read_json(text, "what the engine got")
    if path != CHAT and got["path"].value == path:
        raise NotApplicable(f"the engine speaks {DIALECTS[path].surface.capitalize()} itself; nothing is translated")
    got["path"].must_be(CHAT)
    return got["body"]


def carries(path: str, *cases: tuple[Mapping[str, Any], Mapping[str, object]]) -> Check:
    """Return a check of what becomes of the fields of a request: for each case, what the engine has at each place."""

    async def check(target: Target) -> None:
        for fields, places in cases:
            (await carried(target, path, **fields)).must_fit(places)

    return check


def passes_through(path: str) -> Check:
    """Return a check that an engine which speaks the dialect gets the request as it was sent."""

    async def check(target: Target) -> None:
        for stream in (False, True):
            body = target.body(path, "[[echo]]", stream=stream, temperature=0.5, something_of_tomorrow={"a": None})
            answer = await target.send(target.ask_json(path, body))
            require_status(answer, 200)
            dialect = DIALECTS[path]
            text = dialect.stream_text(require_stream(answer)) if stream else dialect.text(require_ok(answer)).text()
            got = read_json(text, "what the engine got")
            if got["path"].value == CHAT:
                raise NotApplicable("the engine speaks chat only; the request is translated")
            got["body"].must_be(body)

    return check


def join_text(content: Any) -> Any:
    """Return a content of nothing but text parts as one text, any other as it is."""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def must_hold(body: Field, role: str, words: str) -> None:
    """Check that a message of a role has the words. Raises Violation."""
    found = [join_text(turn.value.get("content")) for turn in body["messages"].items() if turn["role"].value == role]
    if not any(words in str(one) for one in found):
        raise Violation(f"{words!r} is in none of the engine's {role} messages: {found}")


def find_result(body: Field) -> tuple[Field, Field, Field]:
    """Return the turn with a call, the call, and the turn with its result. Raises Violation."""
    turns = body["messages"].items()
    turn = next((turn for turn in turns if turn.value.get("tool_calls")), None)
    result = next((turn for turn in turns if turn["role"].value == "tool"), None)
    if turn is None or result is None:
        raise Violation(f"the engine's messages are {body['messages'].shown}")
    return turn, turn["tool_calls"][0], result


def find_images(turn: Field) -> list[Field]:
    """Return the addresses of the images in a turn of chat."""
    return [part["image_url"]["url"] for part in turn["content"].items() if part["type"].value == "image_url"]


# Checks of calls


async def ask_for_calls(target: Target, path: str, directive: str, **more: Any) -> AsyncIterator[tuple[Go, Answer]]:
    """Yield answers to requests for a call of a tool, one after the other: a real model may need several to make one."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for go in list_goes(target, directive):
        choice = (_OTHER_TOOL if go.is_named else _ANY_TOOL)[path]
        fields = {"tools": TOOLS[path], "tool_choice": choice, limit: LIMITS.call_tokens, **more}
        answer = await target.say(path, go.prompt, **fields)
        require_script_or_skip(target, answer, "tools")
        yield go, answer


def must_call(calls: Sequence[object], expected: Sequence[object]) -> None:
    """Check that the calls are those that the engine made. Raises Violation."""
    if calls != expected:
        raise Violation(f"the calls are {calls}, the engine made {expected}")


def makes_calls(
    read: Callable[[Target, str], Awaitable[Sequence[object]]], directive: str, expected: Sequence[object]
) -> Check:
    """Return a check that ``read`` finds in a stream the calls that the engine makes at a directive."""

    async def check(target: Target) -> None:
        must_call(await read(target, directive), expected)

    return check


# Checks of failures


async def break_stream(target: Target, path: str, directives: str) -> tuple[Answer, Field]:
    """Return a stream that broke, and the error that it says. Raises Violation when it says none."""
    answer = await target.say(path, f"{directives} hello", stream=True)
    return answer, DIALECTS[path].failure(require_stream(answer))


def must_tell(error: Field) -> None:
    """Check that an error has the words of the engine. Raises Violation."""
    if REASON not in error["message"].text():
        raise Violation(f"the engine's words are lost: {error.shown}")


def breaks(path: str, directive: str, *, tells: bool = False) -> Check:
    """Return a check that a broken stream says an error. ``tells``: with the engine's words."""

    async def check(target: Target) -> None:
        if directive == "garbage":
            await _skip_where_native(target, path)
        _, error = await break_stream(target, path, f"[[{directive}]]")
        if tells:
            must_tell(error)

    return check


async def break_late(target: Target, path: str) -> tuple[Answer, Field]:
    """Return a stream that the engine refuses after a silence with keep-alives, and the error that it says."""
    return await break_stream(target, path, f"[[slow:{target.silence_s:g}]] [[error_400]]")


def breaks_late(path: str) -> Check:
    """Return a check that the engine's words reach a client whose stream has only had keep-alives."""

    async def check(target: Target) -> None:
        _, error = await break_late(target, path)
        must_tell(error)

    return check


def closes(path: str) -> Check:
    """Return a check that the connection is closed after an error in a stream."""

    async def check(target: Target) -> None:
        ask = target.ask_json(path, target.body(path, "[[cut]] hello", stream=True))
        answer = await target.send_fresh(ask, watches_close=True)
        require_status(answer, 200)
        if not answer.closed:
            raise Violation("the connection stays open for the next request")

    return check


def fails_whole(path: str, directive: str) -> Check:
    """Return a check that an unstreamed answer which breaks off, or is none, is an HTTP error."""

    async def check(target: Target) -> None:
        if directive == "garbage":
            await _skip_where_native(target, path)
        answer = await target.say(path, f"[[{directive}]] hello")
        if answer.status < 500:
            raise Violation(f"status {answer.status} with {len(answer.body)} bytes")
        DIALECTS[path].check_error(answer.json())

    return check


async def _skip_where_native(target: Target, path: str) -> None:
    answer = await target.say(path, "[[echo]]")
    require_ok(answer)
    # The echo is JSON inside a JSON string. Its bytes tell the path also where the answer around it has faults.
    if f'\\"path\\": \\"{path}\\"'.encode() in answer.body:
        raise NotApplicable(f"the engine speaks {path} itself: what it says passes through as it is")


# Checks of clients that leave


def leaves_unanswered(path: str, directives: str = "", **more: Any) -> Check:
    """Return a check that the engine hears of a client that leaves before anything of the answer has come."""

    async def check(target: Target) -> None:
        key = uuid.uuid4().hex
        ask = target.ask_json(path, target.body(path, f"{directives}[[endless:{key}]] go on", **more))
        waiting = asyncio.create_task(target.send_fresh(ask))
        try:
            await _wait_for(target, key, "here")
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await _must_hear(target, key)

    return check


def leaves_stream(path: str) -> Check:
    """Return a check that the engine hears of a client that leaves a stream after its first words."""

    async def check(target: Target) -> None:
        key = uuid.uuid4().hex
        ask = target.ask_json(path, target.body(path, f"[[endless:{key}]] go on", stream=True))
        answer = await target.send_fresh(ask, leave=lambda so_far: b'"on "' in so_far.body)
        require_status(answer, 200)
        await _must_hear(target, key)

    return check


async def _must_hear(target: Target, key: str) -> None:
    if not await _wait_for(target, key, "left"):
        raise Violation(f"the engine still works {LIMITS.heard_s:g} s after its client has left")


async def _wait_for(target: Target, key: str, state: str) -> bool:
    deadline = asyncio.get_running_loop().time() + LIMITS.heard_s
    while asyncio.get_running_loop().time() < deadline:
        # send() shares the answer to an equal request: this one must be sent each time.
        answer = await target.send_fresh(target.ask_json(CHAT, target.body(CHAT, f"[[gone:{key}]]")))
        if DIALECTS[CHAT].text(require_ok(answer)).value == state:
            return True
        await asyncio.sleep(0.05)
    return False
