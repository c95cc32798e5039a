"""The server's half of one worker socket as a protocol without I/O: frames in, effects out; calls in, frames out.

Speaks bridge v1 and muster v1, whichever the node announced, and hides the difference: both give ``HeadArrived``,
``DataArrived`` and ``StreamEnded`` for a stream. A stream is known here by a number that is never used twice in a
session, so frames of a stream that was cancelled, or of another attempt, cannot reach a request they do not belong to.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from core.limits import NodeLimits
from nodes.reports import clean_hub_answer, clean_log, clean_models, clean_register, clean_report, clean_status, clean_telemetry
from wire import bridge, frames
from wire.bridge import BRIDGE_V1, MUSTER_V1, ProtocolError

_SSE_STARTS = ("data:", "event:", "id:", "retry:", ":")
_SSE_START_CHARS = max(map(len, _SSE_STARTS))
_MUSTER_HEADERS = frozenset({"x-cache-mode", "x-cache-tag"})
"""Headers that bridge v1 does not know; its workers would hand them to an engine that does not either."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The node introduced itself; names and models are already sanitized."""

    name: str
    models: tuple[str, ...]
    max_concurrent: int
    protocol: str
    warnings: tuple[str, ...]
    message: bridge.Register


class HeadArrived(msgspec.Struct, frozen=True):
    """Status and headers of a stream's response; at most once, before any data."""

    stream: int
    status: int
    headers: dict[str, str]


class DataArrived(msgspec.Struct, frozen=True, gc=False):
    """Response bytes of a stream, in order."""

    stream: int
    data: bytes


class AnswerArrived(msgspec.Struct, frozen=True):
    """All of a stream at once: its head, its bytes and its end."""

    stream: int
    status: int
    headers: dict[str, str]
    data: bytes
    end: frames.End


class StreamEnded(msgspec.Struct, frozen=True):
    """The last effect of a stream."""

    stream: int
    end: frames.End


@dataclass(frozen=True, slots=True)
class LoadReported:
    """The node said how many requests it runs."""

    load: int


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """The node replaced its model list (sanitized)."""

    models: tuple[str, ...]
    load: int


@dataclass(frozen=True, slots=True)
class TelemetryArrived:
    """The node described itself."""

    telemetry: bridge.Telemetry


@dataclass(frozen=True, slots=True)
class ModeRequested:
    """The owner, at the node, lends it or takes it back."""

    mode: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The node finishes what runs and wants nothing new."""

    reason: str


@dataclass(frozen=True, slots=True)
class OperationReported:
    """The node said where an operation stands (cut to size)."""

    status: bridge.OpStatus


@dataclass(frozen=True, slots=True)
class GovernanceChanged:
    """The node said how it decides about operations now (cut to size)."""

    report: bridge.GovernanceReport


@dataclass(frozen=True, slots=True)
class UsageReported:
    """The node said what became of requests that came with tickets."""

    reports: tuple[bridge.TicketUsage, ...]


@dataclass(frozen=True, slots=True)
class CertificateAsked:
    """The node said whether clients can verify its port, and may want a certificate for it."""

    message: bridge.CertificateRequest


@dataclass(frozen=True, slots=True)
class LogTold:
    """The node told the last lines of its log (cut to size), whether it was asked or not."""

    tail: bridge.LogTail


@dataclass(frozen=True, slots=True)
class HubAnswered:
    """The node says what its hub has (cut to size), whether it was asked or not."""

    answer: bridge.HubAnswer


class FrameDropped(msgspec.Struct, frozen=True, gc=False):
    """A late frame of a stream that is over; counted, never delivered."""

    stream: int


Effect = (
    Registered
    | HeadArrived
    | DataArrived
    | AnswerArrived
    | StreamEnded
    | LoadReported
    | ModelsChanged
    | TelemetryArrived
    | ModeRequested
    | NodeLeaving
    | OperationReported
    | GovernanceChanged
    | UsageReported
    | CertificateAsked
    | LogTold
    | HubAnswered
    | FrameDropped
)


class OpenRequest(msgspec.Struct, frozen=True):
    """What a link needs to start one attempt of one request. ``attempt`` counts from 1; ``deadline_ms`` is what remains.

    ``priority``: high, low or empty for normal. ``is_last``: no other node gets the request when this attempt is lost.
    """

    request_id: str
    attempt: int
    model: str
    path: str
    body: bytes
    headers: dict[str, str]
    is_streaming: bool
    deadline_ms: int
    tenant: str
    priority: str = ""
    is_last: bool = False


@dataclass(slots=True)
class _BridgeStream:
    """A stream on a bridge v1 session. ``start``: the first characters of what is ``held``."""

    name: str
    is_streaming: bool
    head_sent: bool = False
    start: str = ""
    held: list[str] = field(default_factory=list)
    held_chars: int = 0


class ServerSession:
    """One session with one node, from its ``register`` on. Raises ProtocolError where the socket must close with 1002."""

    def __init__(self, policy: NodeLimits) -> None:
        self.policy = policy
        self.protocol: str | None = None
        self.dropped_frames = 0
        self._next_stream = 1
        self._attempts: dict[int, int] = {}
        self.data_streams: dict[bytes, int] = {}
        """Streams that had their HEAD, by the header with which their DATA comes: a frame that begins with one is legal."""
        self._bridge: dict[int, _BridgeStream] = {}
        self._by_name: dict[str, int] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._heads: dict[bytes, tuple[int, dict[str, str]]] = {}
        """What HEAD payloads say that came of late. Nodes send them again, and what was made of the same object is known."""

    @property
    def speaks_muster(self) -> bool:
        """Whether the node negotiated muster v1."""
        return self.protocol == MUSTER_V1

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self._attempts)

    # frames in

    def receive_text(self, frame: str) -> list[Effect]:
        """Take one text frame. Raises ProtocolError."""
        if self.speaks_muster and len(frame) > self.policy.control_frame_chars:
            raise ProtocolError(f"a text frame longer than {self.policy.control_frame_chars} characters")
        message = bridge.decode_worker_message(frame)
        if isinstance(message, bridge.ResponseChunk):
            return self._take_chunk(message)
        if self.protocol is None:
            if not isinstance(message, bridge.Register):
                raise ProtocolError("the first frame must be register")
            return [self._take_register(message)]
        return self._take_control(message)

    def receive_bytes(self, data: bytes) -> list[Effect]:
        """Take one binary frame. Raises ProtocolError."""
        if self.protocol != MUSTER_V1:
            raise ProtocolError("binary frames need muster v1")
        kind, _flags, stream, attempt, payload = frames.decode_frame(data)
        if self._attempts.get(stream) != attempt:
            return self._drop(stream)
        data_header = frames.encode_frame(frames.DATA, stream, attempt)
        if kind == frames.DATA:
            if data_header not in self.data_streams:
                raise ProtocolError("DATA came before its HEAD")
            return [DataArrived(stream, payload)]
        if kind in (frames.HEAD, frames.REPLY) and data_header in self.data_streams:
            raise ProtocolError("a stream has one HEAD")
        if kind == frames.HEAD:
            status, headers = self._read_head(payload)
            self.data_streams[data_header] = stream
            return [HeadArrived(stream, status, headers)]
        if kind == frames.END:
            end = frames.decode_end(payload)
            self._forget(stream)
            return [StreamEnded(stream, end)]
        if kind == frames.REPLY:
            first, body, last = frames.split_reply(payload)
            (status, headers), end = self._read_head(first), frames.decode_end(last)
            self._forget(stream)
            return [AnswerArrived(stream, status, headers, body, end)]
        raise ProtocolError(f"frame kind {kind} is not for the server")

    def _read_head(self, payload: bytes) -> tuple[int, dict[str, str]]:
        known = self._heads.get(payload)
        if known is None:
            head = frames.decode_head(payload)
            known = head.status, _lower_names(head.headers)
            if len(payload) <= self.policy.http_kept_head_bytes:
                if len(self._heads) >= self.policy.http_kept_heads:
                    del self._heads[next(iter(self._heads))]
                self._heads[payload] = known
        return known

    # calls in, frames out

    def open_stream(self, request: OpenRequest) -> tuple[int, list[str | bytes]]:
        """Start a stream; return its number and the frames to send, in order. Raises UnicodeDecodeError on bridge v1."""
        body = "" if self.speaks_muster else request.body.decode()
        stream = self._next_stream
        self._next_stream += 1
        self._attempts[stream] = request.attempt
        if self.speaks_muster:
            meta = frames.OpenMeta(
                request_id=request.request_id,
                model=request.model,
                path=request.path,
                headers=request.headers,
                is_streaming=request.is_streaming,
                deadline_ms=request.deadline_ms,
                tenant=request.tenant,
                priority=request.priority,
            )
            return stream, list(frames.encode_open(stream, request.attempt, meta, request.body))
        name = request.request_id if request.attempt == 1 else f"{request.request_id}.{request.attempt}"
        self._bridge[stream] = _BridgeStream(name=name, is_streaming=request.is_streaming)
        self._by_name[name] = stream
        message = bridge.Request(
            request_id=name,
            model=request.model,
            endpoint_path=request.path,
            is_streaming=request.is_streaming,
            body=body,
            headers={name: value for name, value in request.headers.items() if name not in _MUSTER_HEADERS},
        )
        return stream, [bridge.encode_message(message)]

    def cancel_stream(self, stream: int, reason: str) -> list[str | bytes]:
        """Give a stream up; return the frames to send (none when it is over already)."""
        attempt = self._attempts.get(stream)
        if attempt is None:
            return []
        held = self._bridge.get(stream)
        self._forget(stream)
        if held is None:
            return [frames.encode_frame(frames.CANCEL, stream, attempt, reason.encode())]
        return [bridge.encode_message(bridge.Cancel(request_id=held.name, reason=reason))]

    def grant_credit(self, stream: int, amount: int) -> list[str | bytes]:
        """Let the node send ``amount`` more bytes on a stream; nothing to send on bridge v1."""
        attempt = self._attempts.get(stream)
        if attempt is None or not self.speaks_muster:
            return []
        return [frames.encode_credit(stream, attempt, amount)]

    # inside

    def _take_register(self, message: bridge.Register) -> Registered:
        version = message.protocol_version
        is_bridge = version is None or version in bridge.BRIDGE_VERSIONS
        if not is_bridge and version != MUSTER_V1:
            raise ProtocolError(f"protocol version {version!r} is not spoken here")
        warnings: list[str] = []
        clean_register(message)
        name = message.worker_name.strip() or "worker"
        if len(name) > self.policy.max_name_chars:
            name = name[: self.policy.max_name_chars]
            warnings.append(f"worker_name truncated to {self.policy.max_name_chars} characters")
        models, refused = clean_models(message.models, self.policy)
        warnings += refused
        concurrency = message.max_concurrent
        if concurrency < 1:
            concurrency = 1
            warnings.append("max_concurrent raised to 1")
        elif concurrency > self.policy.max_concurrent_cap:
            concurrency = self.policy.max_concurrent_cap
            warnings.append(f"max_concurrent lowered to {concurrency}")
        self.protocol = BRIDGE_V1 if is_bridge else MUSTER_V1
        return Registered(name, models, concurrency, self.protocol, tuple(warnings), message)

    def _take_control(self, message: bridge.WorkerMessage) -> list[Effect]:
        match message:
            case bridge.ResponseComplete():
                return self._take_complete(message)
            case bridge.Pong():
                return [LoadReported(max(0, message.current_load))]
            case bridge.ModelsUpdate():
                return [ModelsChanged(clean_models(message.models, self.policy)[0], max(0, message.current_load))]
            case bridge.WorkerError():
                return self._take_error(message)
        if not self.speaks_muster:
            raise ProtocolError("message not allowed here")
        return [self._take_report(message)]

    def _take_report(self, message: bridge.WorkerMessage) -> Effect:
        match message:
            case bridge.Telemetry():
                clean_telemetry(message)
                return TelemetryArrived(message)
            case bridge.ModeChange():
                return ModeRequested(message.mode, message.reason)
            case bridge.Draining():
                return NodeLeaving(message.reason)
            case bridge.OpStatus():
                clean_status(message)
                return OperationReported(message)
            case bridge.GovernanceReport():
                clean_report(message)
                return GovernanceChanged(message)
            case bridge.UsageReport():
                return UsageReported(tuple(message.reports))
            case bridge.CertificateRequest():
                return CertificateAsked(message)
            case bridge.LogTail():
                clean_log(message)
                return LogTold(message)
            case bridge.HubAnswer():
                clean_hub_answer(message)
                return HubAnswered(message)
        raise ProtocolError("message not allowed here")

    def _take_error(self, message: bridge.WorkerError) -> list[Effect]:
        if message.request_id is None:
            return []
        stream = self._find_bridge(message.request_id)
        if stream is None:
            return self._drop(message.request_id)
        sent = self._bridge[stream].head_sent
        self._forget(stream)
        return [StreamEnded(stream, frames.End(error="engine_failed", message=message.message, retryable=not sent))]

    def _take_chunk(self, message: bridge.ResponseChunk) -> list[Effect]:
        stream = self._find_bridge(message.request_id)
        if stream is None:
            return self._drop(message.request_id)
        state = self._bridge[stream]
        if state.head_sent:
            return [DataArrived(stream, message.chunk.encode())]
        state.held.append(message.chunk)
        state.held_chars += len(message.chunk)
        if len(state.start) < _SSE_START_CHARS:
            state.start = (state.start + message.chunk).lstrip()[:_SSE_START_CHARS]
        # Bridge v1 tells the status at the end: what is no event stream may yet be the body of an error.
        if not state.start.startswith(_SSE_STARTS) and state.held_chars < self.policy.bridge_held_chars:
            return []
        text = "".join(state.held)
        state.head_sent = True
        state.held.clear()
        return [HeadArrived(stream, 200, {"content-type": "text/event-stream"}), DataArrived(stream, text.encode())]

    def _take_complete(self, message: bridge.ResponseComplete) -> list[Effect]:
        stream = self._find_bridge(message.request_id)
        if stream is None:
            return self._drop(message.request_id)
        state = self._bridge[stream]
        self._forget(stream)
        effects: list[Effect] = []
        if not state.head_sent:
            if not 200 <= message.status_code <= 599:
                end = frames.End(error="engine_failed", message="the worker answered with an impossible status")
                return [StreamEnded(stream, end)]
            effects.append(HeadArrived(stream, message.status_code, _lower_names(message.headers)))
            body = "".join(state.held) or message.body or ""
            if body:
                effects.append(DataArrived(stream, body.encode()))
        elif message.status_code >= 400:
            end = frames.End(error="engine_failed", message=f"the engine ended the stream with {message.status_code}")
            return [StreamEnded(stream, end)]
        effects.append(StreamEnded(stream, frames.End(usage=message.token_counts)))
        return effects

    def _find_bridge(self, name: str) -> int | None:
        stream = self._by_name.get(name)
        if stream is None and name not in self._over:
            raise ProtocolError("frame for a request that was never sent to this worker")
        return stream

    def _drop(self, stream: str | int) -> list[Effect]:
        known = 0 < stream < self._next_stream if isinstance(stream, int) else stream in self._over
        if not known or stream in self._attempts:
            raise ProtocolError("frame for a stream or an attempt that was never opened")
        self.dropped_frames += 1
        return [FrameDropped(stream if isinstance(stream, int) else 0)]

    def _forget(self, stream: int) -> None:
        attempt = self._attempts.pop(stream, None)
        if attempt is not None:
            self.data_streams.pop(frames.encode_frame(frames.DATA, stream, attempt), None)
        state = self._bridge.pop(stream, None)
        if state is not None:
            self._by_name.pop(state.name, None)
            self._over[state.name] = None
        while len(self._over) > self.policy.bridge_forgotten_streams:
            self._over.popitem(last=False)


def _lower_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
