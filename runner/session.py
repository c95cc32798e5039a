"""The node's half of the muster v1 protocol, without I/O: frames in, effects out, and methods that make frames.

One ``ClientSession`` is one WebSocket. It owns the streams of that socket: their attempt number, whether they are
still open, and how many DATA bytes the gateway has granted. Source: ``wire.bridge`` and ``wire.frames``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from runner.errors import StreamClosed
from runner.limits import limits
from wire.bridge import (
    MUSTER_V1,
    Cancel,
    CheckpointOffer,
    GracefulShutdown,
    HubQuery,
    LogQuery,
    Message,
    ModelsRefresh,
    NodeAuthorities,
    NodeCertificate,
    NodeNotice,
    OpCommand,
    OpQuery,
    Ping,
    PolicyOffer,
    ProtocolError,
    Register,
    RegisterAck,
    Request,
    TicketKeys,
    UsageTaken,
    decode_server_message,
    encode_message,
)
from wire.frames import (
    BODY,
    CANCEL,
    CREDIT,
    DATA,
    END,
    FLAG_FIN,
    HEAD,
    OPEN,
    End,
    Frame,
    Head,
    OpenMeta,
    decode_credit,
    decode_frame,
    decode_open,
    encode_frame,
    encode_json,
    encode_reply,
)


class Outlet(Protocol):
    """The socket that a stream came on."""

    @property
    def has_room(self) -> bool:
        """Whether what is posted leaves at once."""

    def post(self, frame: bytes) -> None:
        """Send a frame, after those posted before it."""

    def when_room(self, go_on: Callable[[], None]) -> None:
        """Call back, once, when there is room again."""


class Stream:
    """One request on one session: made by OPEN, gone after its END. ``window`` is in DATA payload bytes.

    ``data_head`` begins a DATA frame: who sends thousands in a second puts it before each and lowers the window itself.
    """

    __slots__ = ("_parts", "_table", "attempt", "data_head", "ident", "is_open", "meta", "received_bytes", "window")

    def __init__(self, table: dict[int, Stream], frame: Frame, meta: OpenMeta) -> None:
        self.ident = frame.stream
        self.attempt = frame.attempt
        self.meta = meta
        self.window = meta.window_bytes
        self.is_open = True
        self._table = table
        self.data_head = encode_frame(DATA, frame.stream, frame.attempt)
        self._parts: list[bytes] | None = []
        self.received_bytes = 0

    def head(self, status: int, headers: dict[str, str]) -> bytes:
        """Return the HEAD frame. Raises StreamClosed."""
        self._require_open()
        return encode_frame(HEAD, self.ident, self.attempt, encode_json(Head(status=status, headers=headers)))

    def data(self, payload: bytes) -> bytes:
        """Return a DATA frame and take its bytes off the window.

        Raises StreamClosed, and ValueError when the payload is larger than the window: the caller must wait for credit.
        """
        if not self.is_open:
            raise StreamClosed
        size = len(payload)
        if size > self.window:
            raise ValueError(f"{size} bytes exceed the window of {self.window}")
        self.window -= size
        return self.data_head + payload

    def end(self, end: End) -> bytes:
        """Close the stream and return its END frame. Raises StreamClosed."""
        self._require_open()
        self.close()
        return encode_frame(END, self.ident, self.attempt, encode_json(end))

    def reply(self, head: Head, body: bytes, end: End) -> bytes:
        """Close the stream and return the one frame of a whole answer. Raises StreamClosed."""
        self._require_open()
        self.close()
        return encode_reply(self.ident, self.attempt, head, body, end)

    def close(self) -> None:
        """Forget the stream; later frames for it are dropped. Does nothing the second time."""
        if self.is_open:
            self.is_open = False
            self._parts = None
            if self._table.get(self.ident) is self:
                del self._table[self.ident]

    def collect(self, part: bytes, *, is_last: bool) -> bytes | None:
        """Add a part of the request body; return the whole body after the last one. Raises ProtocolError."""
        if self._parts is None:
            raise ProtocolError(f"stream {self.ident}: body after its last part")
        self.received_bytes += len(part)
        self._parts.append(part)
        if not is_last:
            return None
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = None
        return body

    def _require_open(self) -> None:
        if not self.is_open:
            raise StreamClosed(f"stream {self.ident} has ended")


@dataclass(frozen=True, slots=True)
class Opened:
    """A request is here in full: serve it."""

    stream: Stream
    body: bytes


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Stop the engine's work on this stream at once; its END is a ``Reply`` of the session."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Credited:
    """The stream may send more."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this frame."""

    frame: bytes


Effect = Opened | Cancelled | Credited | Reply
Instruction = (
    OpCommand | OpQuery | PolicyOffer | CheckpointOffer | TicketKeys | UsageTaken | NodeAuthorities | NodeCertificate
    | LogQuery | HubQuery
)  # fmt: skip
"""What the control plane says about operations, how they are decided, tickets, certificates, the log and the hub."""
Notice = RegisterAck | Ping | ModelsRefresh | GracefulShutdown | NodeNotice | Instruction
"""A message that this session may be sent, to be acted on as it is."""


class ClientSession:
    """State of one session. Every ProtocolError it raises ends the session with close code 1002."""

    def __init__(self) -> None:
        self._limits = limits().connection
        self._streams: dict[int, Stream] = {}
        self.ack: RegisterAck | None = None

    @property
    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def register(self, message: Register) -> str:
        """Return the first frame of the session, always announcing muster v1."""
        message.protocol_version = MUSTER_V1
        return encode_message(message)

    def encode(self, message: Message) -> str:
        """Return the frame of a message."""
        return encode_message(message)

    def receive_text(self, frame: str | bytes) -> Notice:
        """Take a JSON frame; return what it says, as far as the session allows that. Raises ProtocolError."""
        message = decode_server_message(frame)
        if isinstance(message, RegisterAck):
            return self._accept(message)
        if self.ack is None:
            raise ProtocolError("the first frame of the gateway is not register_ack")
        if isinstance(message, Request | Cancel):
            raise ProtocolError("a muster v1 gateway sends requests and cancels as binary frames")
        return message

    def receive_bytes(self, data: bytes) -> list[Effect]:
        """Take a binary frame; return what to do. Frames of streams or attempts that ended are dropped.

        Raises ProtocolError.
        """
        frame = decode_frame(data)
        if self.ack is None:
            raise ProtocolError("binary frame before register_ack")
        if frame.kind == OPEN:
            return self._open(frame)
        if frame.kind not in {BODY, CANCEL, CREDIT}:
            raise ProtocolError(f"frame kind {frame.kind} does not travel to a node")
        stream = self._streams.get(frame.stream)
        if stream is None or stream.attempt != frame.attempt:
            return []
        if frame.kind == CREDIT:
            stream.window += decode_credit(frame.payload)
            return [Credited(stream)]
        if frame.kind == CANCEL:
            return self._cancel(stream, frame.payload.decode("utf-8", "replace"))
        return self._collect(stream, frame.payload, is_last=bool(frame.flags & FLAG_FIN))

    def close(self) -> list[Stream]:
        """End the session: close every stream and return those that were open."""
        lost = self.streams
        for stream in lost:
            stream.close()
        return lost

    def _accept(self, ack: RegisterAck) -> RegisterAck:
        if self.ack is not None:
            raise ProtocolError("second register_ack")
        if ack.protocol_version != MUSTER_V1:
            spoken = ack.protocol_version or "no named version"
            raise ProtocolError(f"the gateway speaks {spoken}, this node {MUSTER_V1}")
        self.ack = ack
        return ack

    def _open(self, frame: Frame) -> list[Effect]:
        meta, first = decode_open(frame.payload)
        effects: list[Effect] = []
        older = self._streams.get(frame.stream)
        if older is not None:
            if frame.attempt <= older.attempt:
                raise ProtocolError(f"stream {frame.stream} opened twice")
            older.close()
            effects.append(Cancelled(older))
        stream = Stream(self._streams, frame, meta)
        if len(self._streams) >= self._limits.streams:
            stream.close()
            end = End(error="busy", message="too many open streams", retryable=True)
            return [*effects, Reply(encode_frame(END, frame.stream, frame.attempt, encode_json(end)))]
        self._streams[frame.stream] = stream
        return effects + self._collect(stream, first, is_last=bool(frame.flags & FLAG_FIN))

    def _collect(self, stream: Stream, part: bytes, *, is_last: bool) -> list[Effect]:
        body = stream.collect(part, is_last=is_last)
        if stream.received_bytes > self._limits.body_bytes:
            message = f"the request body is larger than {self._limits.body_bytes} bytes"
            return [Reply(stream.end(End(error="engine_failed", message=message)))]
        return [] if body is None else [Opened(stream, body)]

    def _cancel(self, stream: Stream, reason: str) -> list[Effect]:
        farewell = stream.end(End(error="cancelled", message=reason[:200]))
        return [Cancelled(stream), Reply(farewell)]
