"""The node's half of bridge v1, the protocol of ModelRelay's servers, without I/O: text in and out, effects as of muster v1.

It stands where ``runner.session.ClientSession`` does. What the relay posts as frames of muster v1 is said as text, and what
bridge v1 has no word for is left unsaid: such a node takes no operations and no tickets, and shows no GPU.
"""

from __future__ import annotations

import codecs
import itertools
import sys
from dataclasses import dataclass, field

import msgspec

from runner.limits import limits
from runner.session import Cancelled, Effect, Notice, Opened, Stream
from wire.bridge import (
    BRIDGE_V1,
    BRIDGE_VERSIONS,
    Cancel,
    Draining,
    GracefulShutdown,
    Message,
    ModeChange,
    ModelsRefresh,
    ModelsUpdate,
    Ping,
    Pong,
    ProtocolError,
    Register,
    RegisterAck,
    Request,
    ResponseChunk,
    ResponseComplete,
    TokenCounts,
    decode_server_message,
    encode_message,
)
from wire.contract import NodeMode
from wire.frames import (
    DATA,
    END,
    FLAG_FIN,
    HEAD,
    OPEN,
    REPLY,
    End,
    Frame,
    Head,
    OpenMeta,
    decode_end,
    decode_frame,
    decode_head,
    split_reply,
)

_JSON = {"content-type": "application/json"}
_STATUSES = {"busy": 503, "timeout": 504}
"""By how a stream of muster v1 ended; every other failure is the engine's, and 502."""


@dataclass(slots=True)
class _Answer:
    """What was said so far to one request. ``decoder``: a piece of a stream may end within a character."""

    name: str
    is_streaming: bool
    head: Head | None = None
    passes: bool = False
    """Whether pieces go out as they come."""
    parts: list[bytes] = field(default_factory=list)
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class BridgeSession:
    """State of one session. Every ProtocolError that it raises ends the session with close code 1002."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, _Answer] = {}
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(1)
        self._models: list[str] = []
        self._is_away = False
        """Whether the owner took the node back, or it leaves: it declares no model then, so that nothing new comes."""
        self.ack: RegisterAck | None = None

    @property
    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def register(self, message: Register) -> str:
        """Return the first frame: every field, since a server may want those that have their defaults."""
        self._models = message.models
        said = {
            "type": "register", "worker_name": message.worker_name, "models": message.models,
            "max_concurrent": message.max_concurrent, "protocol_version": BRIDGE_V1, "current_load": message.current_load,
        }  # fmt: skip
        return msgspec.json.encode(said).decode()

    def encode(self, message: Message) -> str:
        """Return what bridge v1 has for a message; empty where it has nothing."""
        match message:
            case Pong():
                said: dict[str, object] = {"type": "pong", "current_load": message.current_load}
                if message.timestamp_unix_ms is not None:
                    said["timestamp_unix_ms"] = message.timestamp_unix_ms
                return msgspec.json.encode(said).decode()
            case ModelsUpdate():
                self._models = message.models
                return self._say_models(message.current_load)
            case ModeChange():
                self._is_away = message.mode == NodeMode.SPARE_OFF.value
            case Draining():
                self._is_away = True
            case _:
                return ""
        return self._say_models(len(self._streams))

    def receive_text(self, frame: str | bytes) -> Notice | list[Effect]:
        """Take a frame; return what it says, or what to do about a request. Raises ProtocolError."""
        message = decode_server_message(frame)
        if isinstance(message, RegisterAck):
            return self._accept(message)
        if self.ack is None:
            raise ProtocolError("the first frame of the server is not register_ack")
        match message:
            case Request():
                return self._open(message)
            case Cancel():
                return self._cancel(message)
            case Ping() | ModelsRefresh() | GracefulShutdown():
                return message
        raise ProtocolError("bridge v1 has no such message")

    def receive_bytes(self, data: bytes) -> list[Effect]:
        """Raise ProtocolError: bridge v1 has no binary frames."""
        raise ProtocolError(f"a binary frame of {len(data)} bytes, which bridge v1 does not have")

    def say_frame(self, data: bytes) -> str:
        """Return what a frame of muster v1 that the relay posts is in bridge v1; empty where nothing is said yet, or ever."""
        frame = decode_frame(data)
        answer = self._answers.get(frame.stream)
        if answer is None:  # it was cancelled, and nobody waits for a word
            return ""
        if frame.kind == HEAD:
            self._take_head(answer, decode_head(frame.payload))
            return ""
        if frame.kind == DATA:
            if not answer.passes:
                answer.parts.append(frame.payload)
                return ""
            text = answer.decoder.decode(frame.payload)
            return encode_message(ResponseChunk(request_id=answer.name, chunk=text)) if text else ""
        if frame.kind == END:
            return self._finish(frame.stream, answer, decode_end(frame.payload))
        if frame.kind == REPLY:
            head, body, end = split_reply(frame.payload)
            self._take_head(answer, decode_head(head))
            answer.passes, answer.parts = False, [body]
            return self._finish(frame.stream, answer, decode_end(end))
        raise ProtocolError(f"frame kind {frame.kind} does not travel from a node")

    def close(self) -> list[Stream]:
        """End the session: close every stream and return those that were open."""
        lost = self.streams
        for stream in lost:
            stream.close()
        self._answers.clear()
        self._numbers.clear()
        return lost

    # inside

    def _accept(self, ack: RegisterAck) -> RegisterAck:
        if self.ack is not None:
            raise ProtocolError("second register_ack")
        if ack.protocol_version is not None and ack.protocol_version not in BRIDGE_VERSIONS:
            raise ProtocolError(f"the server speaks {ack.protocol_version}, this node {BRIDGE_V1}")
        self.ack = ack
        return ack

    def _open(self, request: Request) -> list[Effect]:
        if request.request_id in self._numbers:
            raise ProtocolError("a request came twice")
        if len(self._streams) >= limits().connection.streams:
            raise ProtocolError("too many open requests")
        number, body = next(self._next), request.body.encode()
        meta = OpenMeta(
            request_id=request.request_id,
            model=request.model,
            path=request.endpoint_path,
            headers=request.headers,
            is_streaming=request.is_streaming,
            window_bytes=sys.maxsize,  # bridge v1 knows no credit
        )
        stream = Stream(self._streams, Frame(OPEN, FLAG_FIN, number, 1, b""), meta)
        stream.collect(body, is_last=True)
        self._streams[number] = stream
        self._numbers[request.request_id] = number
        self._answers[number] = _Answer(request.request_id, request.is_streaming)
        return [Opened(stream, body)]

    def _cancel(self, cancel: Cancel) -> list[Effect]:
        number = self._numbers.get(cancel.request_id)
        stream = None if number is None else self._streams.get(number)
        if number is None or stream is None:
            return []
        stream.close()
        self._forget(number)
        return [Cancelled(stream)]

    def _take_head(self, answer: _Answer, head: Head) -> None:
        kind = next((value for name, value in head.headers.items() if name.lower() == "content-type"), "")
        answer.head = head
        answer.passes = answer.is_streaming and head.status < 400 and kind.startswith("text/event-stream")

    def _finish(self, number: int, answer: _Answer, end: End) -> str:
        self._forget(number)
        head, body, usage = answer.head, b"".join(answer.parts), end.usage
        if end.error == "cancelled":
            return ""
        if end.error or head is None:
            message = end.message or "the node failed"
            return self._complete(answer, _STATUSES.get(end.error, 502), message, failed=True)
        try:
            text = body.decode()
        except UnicodeDecodeError:
            return self._complete(answer, 502, "the answer is no text, which bridge v1 cannot carry", failed=True)
        rest = answer.decoder.decode(b"", final=True) if answer.passes else ""
        return self._complete(answer, head.status, text + rest, headers=head.headers, usage=usage)

    def _complete(
        self,
        answer: _Answer,
        status: int,
        body: str,
        *,
        failed: bool = False,
        headers: dict[str, str] | None = None,
        usage: TokenCounts | None = None,
    ) -> str:
        if failed:  # of a stream that began the status alone is heard
            error = {"error": {"message": body, "type": "server_error", "code": None}}
            body = "" if answer.passes else msgspec.json.encode(error).decode()
        said = ResponseComplete(
            request_id=answer.name, status_code=status, headers=headers or _JSON, body=body, token_counts=usage
        )  # fmt: skip
        return encode_message(said)

    def _forget(self, number: int) -> None:
        self._numbers.pop(self._answers.pop(number).name, None)

    def _say_models(self, load: int) -> str:
        models = [] if self._is_away else self._models
        return msgspec.json.encode({"type": "models_update", "models": models, "current_load": load}).decode()
