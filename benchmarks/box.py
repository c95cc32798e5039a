"""A scripted GPU node: dials in as a worker and answers every request with stamped chunks that it makes itself.

    python -m benchmarks.box --gateway ws://127.0.0.1:8080 --model NAME [--protocol muster|bridge] [--endpoint PATH]…

The credential comes from ``MUSTER_BOX_SECRET``. It prints ``registered`` once the server accepted it, then reads lines
``{"chunks":…,"delay_us":…,"first_us":…}`` from stdin, each answered by ``ok``, and lines ``registered?``, each answered by a
``Roll``. With ``--nodes`` one process stands for so many nodes of one model, each with a socket of its own; they dial again
when their gateway has gone, a few at a time. The chunks are those of
``native/mock_upstream.c``, stamps included, so that the load client verifies relayed streams in the same way; making
them here instead of asking the mock keeps a second HTTP hop and its CPU out of the measurement. A request is answered in the
words of the API path that it comes on; ``--endpoint`` names the paths a node declares, which is chat alone unless told.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.answers import CHAT, PROMPT_TOKENS, WHOLE_TOKENS, Voice, find_voice
from benchmarks.errors import BenchmarkError
from benchmarks.upstream import Pace
from benchmarks.websocket import BINARY, TEXT, WebSocketClient
from wire import bridge, frames

MAX_CONCURRENT = 1024
_DEFAULT_HEARTBEAT_S = 5.0
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}
_WHOLE_HEADERS = {"content-type": "application/json"}
_DIAL_S = 30.0
_DIALS = 32
"""So many nodes of one process dial at a time: thousand new connections at once overflow the accept queue of a server."""
_DIAL_AGAIN_S = 0.2


@dataclass(slots=True)
class Stream:
    """A stream under way. ``write`` takes response bytes, ``end`` ends it; ``window`` is what may still be sent.

    ``closing``: what follows the last chunk.
    """

    serial: int
    pace: Pace
    voice: Voice
    closing: bytes
    write: Callable[[bytes], None]
    end: Callable[[], None]
    window: float
    due: float = 0.0
    sent: int = 0
    timer: asyncio.TimerHandle | None = None
    is_waiting: bool = False
    is_over: bool = False


class Player:
    """Plays streams at their pace: one timer per stream, one write per chunk."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.pace = Pace(chunks=100, delay_us=0)
        self._serial = 0
        self.live = 0

    def next_serial(self) -> int:
        """Return the number of a new stream."""
        self._serial += 1
        return self._serial

    def start(
        self,
        path: str,
        body: bytes,
        *,
        write: Callable[[bytes], None],
        end: Callable[[], None],
        window: float = float("inf"),
    ) -> Stream:
        """Answer a request at the present pace. The first chunk leaves at once unless the pace says otherwise."""
        voice = find_voice(path)
        closing = voice.make_end(self.pace.chunks, body)
        stream = Stream(self.next_serial(), self.pace, voice, closing, write, end, window, due=self._loop.time())
        self.live += 1
        if stream.pace.first_us:
            stream.due += stream.pace.first_us / 1e6
            stream.timer = self._loop.call_at(stream.due, self._step, stream)
        else:
            self._step(stream)
        return stream

    def stop(self, stream: Stream) -> None:
        """Send nothing more."""
        if not stream.is_over:
            stream.is_over = True
            self.live -= 1
            if stream.timer is not None:
                stream.timer.cancel()

    def credit(self, stream: Stream, amount: int) -> None:
        """Allow ``amount`` more bytes, and go on if the stream waited for them."""
        stream.window += amount
        if stream.is_waiting and stream.window > 0:
            stream.is_waiting = False
            self._step(stream)

    def _step(self, stream: Stream) -> None:
        if stream.is_over:
            return
        pace = stream.pace
        chunk = stream.voice.make_chunk(stream.serial, stream.sent, pace.chunks)
        if len(chunk) + len(stream.closing) > stream.window:
            stream.is_waiting = True
            return
        stream.window -= len(chunk)
        stream.write(chunk)
        stream.sent += 1
        if stream.sent == pace.chunks:
            self.stop(stream)
            stream.write(stream.closing)
            stream.end()
            return
        stream.due += pace.delay_us / 1e6
        stream.timer = self._loop.call_at(stream.due, self._step, stream)


class MusterDialect:
    """Speaks muster v1: OPEN, CANCEL and CREDIT in, HEAD, DATA and END out, with flow control."""

    version = bridge.MUSTER_V1

    def __init__(self, player: Player) -> None:
        self._player = player
        self._streams: dict[int, Stream] = {}
        self.send_binary: Callable[[bytes], None]

    def take_binary(self, data: bytes) -> None:
        """Serve one frame of the server."""
        frame = frames.decode_frame(data)
        if frame.kind == frames.OPEN:
            self._open(frame)
        elif frame.kind == frames.CREDIT and frame.stream in self._streams:
            self._player.credit(self._streams[frame.stream], frames.decode_credit(frame.payload))
        elif frame.kind == frames.CANCEL and (stream := self._streams.pop(frame.stream, None)) is not None:
            self._player.stop(stream)
            self._send(frames.END, frame.stream, frame.attempt, frames.encode_json(frames.End(error="cancelled")))

    def _open(self, frame: frames.Frame) -> None:
        meta, body = frames.decode_open(frame.payload)
        number, attempt = frame.stream, frame.attempt
        if not meta.is_streaming:
            head = frames.Head(status=200, headers=_WHOLE_HEADERS)
            whole = find_voice(meta.path).make_whole(self._player.next_serial())
            self.send_binary(frames.encode_reply(number, attempt, head, whole, frames.End(usage=_count(WHOLE_TOKENS))))
            return
        data_head = frames.HEADER.pack(frames.DATA, 0, number, attempt)
        chunks = self._player.pace.chunks

        def end() -> None:
            self._streams.pop(number, None)
            self._send_end(number, attempt, chunks)

        self._send_head(number, attempt, _STREAM_HEADERS)
        stream = self._player.start(
            meta.path, body, write=lambda data: self.send_binary(data_head + data), end=end, window=meta.window_bytes
        )
        if not stream.is_over:
            self._streams[number] = stream

    def _send(self, kind: int, number: int, attempt: int, payload: bytes) -> None:
        self.send_binary(frames.encode_frame(kind, number, attempt, payload))

    def _send_head(self, number: int, attempt: int, headers: dict[str, str]) -> None:
        self._send(frames.HEAD, number, attempt, frames.encode_json(frames.Head(status=200, headers=headers)))

    def _send_end(self, number: int, attempt: int, completion_tokens: int) -> None:
        self._send(frames.END, number, attempt, frames.encode_json(frames.End(usage=_count(completion_tokens))))


def _count(completion_tokens: int) -> bridge.TokenCounts:
    return bridge.TokenCounts(
        prompt_tokens=PROMPT_TOKENS, completion_tokens=completion_tokens, total_tokens=PROMPT_TOKENS + completion_tokens
    )


class BridgeDialect:
    """Speaks bridge v1: JSON text both ways, no flow control, nothing said after a cancel."""

    version = bridge.BRIDGE_V1

    def __init__(self, player: Player) -> None:
        self._player = player
        self._streams: dict[str, Stream] = {}
        self.send_message: Callable[[bridge.Message], None]

    def take_request(self, request: bridge.Request) -> None:
        """Answer one request."""
        ident = request.request_id
        if not request.is_streaming:
            body = find_voice(request.endpoint_path).make_whole(self._player.next_serial()).decode()
            self.send_message(bridge.ResponseComplete(request_id=ident, status_code=200, headers=_WHOLE_HEADERS, body=body))
            return

        def end() -> None:
            self._streams.pop(ident, None)
            self.send_message(bridge.ResponseComplete(request_id=ident, status_code=200, headers=_STREAM_HEADERS, body=""))

        stream = self._player.start(
            request.endpoint_path,
            request.body.encode(),
            write=lambda data: self.send_message(bridge.ResponseChunk(request_id=ident, chunk=data.decode())),
            end=end,
        )
        if not stream.is_over:
            self._streams[ident] = stream

    def take_cancel(self, cancel: bridge.Cancel) -> None:
        """Stop a request."""
        stream = self._streams.pop(cancel.request_id, None)
        if stream is not None:
            self._player.stop(stream)


class Box:
    """The session of one node: registration, telemetry, pongs, and its dialect for everything else."""

    def __init__(
        self,
        *,
        name: str,
        model: str,
        endpoints: Sequence[str],
        slots: int,
        gpus: int,
        dialect: MusterDialect | BridgeDialect,
        player: Player,
    ) -> None:
        self._name = name
        self._model = model
        self._slots = slots
        self._gpus = [_describe_gpu(index) for index in range(gpus)]
        self._instance_id = uuid.uuid4().hex
        self._op_key = secrets.token_urlsafe(32)
        self._endpoints = list(endpoints)
        self._dialect = dialect
        self._player = player
        self._socket: WebSocketClient | None = None
        self.registered: asyncio.Future[bridge.RegisterAck]

    def attach(self, socket: WebSocketClient) -> None:
        """Take an open socket and register on it."""
        self._socket = socket
        self.registered = asyncio.get_running_loop().create_future()
        if isinstance(self._dialect, MusterDialect):
            self._dialect.send_binary = lambda data: socket.send(BINARY, data)
        else:
            self._dialect.send_message = self._send
        is_muster = self._dialect.version == bridge.MUSTER_V1
        self._send(
            bridge.Register(
                worker_name=self._name,
                models=[self._model],
                max_concurrent=self._slots,
                protocol_version=self._dialect.version,
                instance_id=self._instance_id if is_muster else None,
                gpus=self._gpus if is_muster else [],
                endpoints=self._endpoints if is_muster else [],
                replicas=self._list_replicas() if is_muster else [],
                governance=self._describe_governance() if is_muster and self._gpus else None,
            )
        )

    def take_message(self, is_text: bool, payload: bytes) -> None:
        """Serve one message of the server."""
        if not is_text:
            if isinstance(self._dialect, MusterDialect):
                self._dialect.take_binary(payload)
            return
        message = bridge.decode_server_message(payload)
        if isinstance(message, bridge.RegisterAck):
            self.registered.set_result(message)
        elif isinstance(message, bridge.Ping):
            self._send(bridge.Pong(current_load=self._player.live, timestamp_unix_ms=message.timestamp_unix_ms))
        elif isinstance(message, bridge.ModelsRefresh):
            self._send(bridge.ModelsUpdate(models=[self._model], current_load=self._player.live))
        elif isinstance(self._dialect, BridgeDialect) and isinstance(message, bridge.Request):
            self._dialect.take_request(message)
        elif isinstance(self._dialect, BridgeDialect) and isinstance(message, bridge.Cancel):
            self._dialect.take_cancel(message)

    async def send_telemetry(self, interval_s: float) -> None:
        """Report every ``interval_s`` seconds, for ever; a bridge v1 node has nothing to report."""
        while self._dialect.version == bridge.MUSTER_V1:
            self._send(bridge.Telemetry(current_load=self._player.live, gpus=self._gpus, replicas=self._list_replicas()))
            await asyncio.sleep(interval_s)

    def _describe_governance(self) -> bridge.NodeGovernance:
        """Return what a node says that takes operations by tokens which the server alone signs; no operation is sent here."""
        return bridge.NodeGovernance(
            level="L1", runner_id=self._name, public_key="", op_keys={"k1": self._op_key}, clock_ms=time.time_ns() // 1_000_000
        )

    def _list_replicas(self) -> list[bridge.ReplicaInfo]:
        return [
            bridge.ReplicaInfo(model=self._model, state="loaded", engine="bench", slots=self._slots, active=self._player.live)
        ]

    def _send(self, message: bridge.Message) -> None:
        if self._socket is not None:
            self._socket.send(TEXT, bridge.encode_message(message).encode())


def _describe_gpu(index: int) -> bridge.GpuInfo:
    return bridge.GpuInfo(
        index=index, name="none", memory_total_mb=24_576, memory_used_mb=9_000, utilization_percent=7.0, temperature_c=41.0,
        power_w=60.0,
    )  # fmt: skip


class Roll(msgspec.Struct):
    """How many nodes of a process are registered. ``took_s``: from the first socket that a gateway accepted to the last ack."""

    registered: int = 0
    took_s: float = 0.0


async def follow_stdin(player: Player, roll: Roll) -> None:
    """Apply every pace that comes on stdin and tell the roll when asked, until stdin ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line == b"registered?\n":
            print(msgspec.json.encode(roll).decode(), flush=True)
            continue
        player.pace = msgspec.json.decode(line, type=Pace)
        print("ok", flush=True)


class Dialler:
    """Dials one gateway for its nodes."""

    def __init__(self, gateway: str, secret: str) -> None:
        self._address = urllib.parse.urlsplit(gateway)
        self._secret = secret

    async def dial(self, box: Box) -> tuple[WebSocketClient, float]:
        """Register a node; return its socket and the seconds between its reports. Raises BenchmarkError and OSError."""
        _transport, socket = await asyncio.get_running_loop().create_connection(
            lambda: WebSocketClient(
                host=self._address.netloc,
                path="/v1/worker/connect?provider=local",
                headers={"x-worker-secret": self._secret},
                on_message=box.take_message,
            ),
            self._address.hostname or "127.0.0.1",
            self._address.port or 80,
        )
        async with asyncio.timeout(_DIAL_S):
            await socket.opened
            box.attach(socket)
            await _wait_first(box.registered, socket.closed)
        if not box.registered.done():
            raise BenchmarkError(f"the node was not accepted: {socket.closed.result()}")
        return socket, box.registered.result().heartbeat_interval_s or _DEFAULT_HEARTBEAT_S


async def run_box(dialler: Dialler, box: Box, player: Player) -> str:
    """Serve until the socket closes or stdin ends; return why."""
    socket, interval_s = await dialler.dial(box)
    print("registered", flush=True)
    tasks = [
        asyncio.create_task(box.send_telemetry(interval_s)), asyncio.create_task(follow_stdin(player, Roll(registered=1)))
    ]  # fmt: skip
    await _wait_first(socket.closed, tasks[1])
    for task in tasks:
        task.cancel()
    return socket.closed.result() if socket.closed.done() else "stdin ended"


async def run_nodes(dialler: Dialler, boxes: Sequence[Box], player: Player) -> str:
    """Keep nodes registered until stdin ends."""
    loop, lanes, roll = asyncio.get_running_loop(), asyncio.Semaphore(_DIALS), Roll()
    began: float | None = None
    is_complete = asyncio.Event()

    async def keep(box: Box) -> None:
        nonlocal began
        while True:
            try:
                async with lanes:
                    if began is None:
                        began = loop.time()
                    socket, interval_s = await dialler.dial(box)
            except (OSError, BenchmarkError) as error:  # a timeout is an OSError
                if isinstance(error, ConnectionRefusedError) and not roll.registered:
                    began = None  # no gateway listens yet
                await asyncio.sleep(_DIAL_AGAIN_S)
                continue
            roll.registered += 1
            roll.took_s = loop.time() - (began if began is not None else loop.time())
            if roll.registered == len(boxes):
                is_complete.set()
            telemetry = asyncio.create_task(box.send_telemetry(interval_s))
            await socket.closed
            telemetry.cancel()
            roll.registered -= 1
            if not roll.registered:
                began = None

    async with asyncio.TaskGroup() as tasks:
        keepers = [tasks.create_task(keep(box)) for box in boxes]
        await is_complete.wait()
        print("registered", flush=True)
        await follow_stdin(player, roll)
        for keeper in keepers:
            keeper.cancel()
    return "stdin ended"


async def _wait_first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def main(argv: list[str] | None = None) -> int:
    """Run one node until it is told to stop; the exit code is 0 only then."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.box", description="A scripted GPU node for benchmarks.")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--protocol", choices=("muster", "bridge"), default="muster")
    parser.add_argument("--endpoint", action="append", metavar="PATH", help=f"an API path to declare (default {CHAT})")
    parser.add_argument("--slots", type=int, default=MAX_CONCURRENT, help="requests at a time (default %(default)s)")
    parser.add_argument("--nodes", type=int, help="so many nodes in this process, which dial again when they are cut off")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs each node reports (default %(default)s)")
    arguments = parser.parse_args(argv)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        reason = runner.run(_run(arguments))
    print(f"node: {reason}", file=sys.stderr)
    return 0 if reason == "stdin ended" else 1


async def _run(arguments: argparse.Namespace) -> str:
    player, names = Player(), [f"bench-{arguments.model}"]
    if arguments.nodes:
        names = [f"{names[0]}-{number}" for number in range(arguments.nodes)]
    boxes = [
        Box(
            name=name,
            model=arguments.model,
            endpoints=arguments.endpoint or [CHAT],
            slots=arguments.slots,
            gpus=arguments.gpus,
            dialect=BridgeDialect(player) if arguments.protocol == "bridge" else MusterDialect(player),
            player=player,
        )
        for name in names
    ]
    dialler = Dialler(arguments.gateway, os.environ.get("MUSTER_BOX_SECRET", ""))
    return await (run_nodes(dialler, boxes, player) if arguments.nodes else run_box(dialler, boxes[0], player))


if __name__ == "__main__":
    sys.exit(main())
