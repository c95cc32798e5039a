"""What a node costs: CPU of a runner per request and per chunk that it relays from an engine to a gateway.

    ./muster bench node                        # three rounds, about a minute
    ./muster bench node --against DIR          # and the runner of another checkout, in turn

The runner is a real process, dialled in to a scripted gateway in this one, with the mock upstream as its engine over HTTP.
Loads and paces are those of the measures of the same names (``benchmarks.plan``).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import os
import statistics
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop
from websockets.speedups import apply_mask

from benchmarks.answers import CHAT
from benchmarks.errors import BenchmarkError
from benchmarks.plan import FULL_ROUNDS, Measure, Work, plan_work
from benchmarks.processes import ROOT, Child, CorePlan, plan_cores
from benchmarks.toolchain import build_tools
from benchmarks.upstream import MockUpstream
from wire import bridge, frames

_SLOTS = 1000
_START_S = 30.0
_DRAIN_S = 20.0
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_FIN, _TEXT, _BINARY, _PING, _PONG = 0x80, 0x1, 0x2, 0x9, 0xA
_STAMP = b'"content":"T'
_PROMPT = b"benchmark " * 40
_HEADERS = {"content-type": "application/json", "accept": "*/*", "user-agent": "bench"}


class Socket(asyncio.Protocol):
    """The gateway's end of one WebSocket (RFC 6455). ``on_message(is_text, payload)`` gets every frame: none is fragmented."""

    def __init__(self, on_open: Callable[[Socket], None], on_message: Callable[[bool, bytes], None]) -> None:
        self._on_open, self._on_message = on_open, on_message
        self._buffer = b""
        self._is_open = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit from asyncio's classes

    def data_received(self, data: bytes) -> None:
        """Take the upgrade, then frames."""
        buffer = self._buffer + data
        if not self._is_open:
            head, blank, buffer = buffer.partition(b"\r\n\r\n")
            if not blank:
                self._buffer = head
                return
            self._accept(head)
        self._buffer = buffer[self._take_frames(buffer) :]

    def send(self, opcode: int, payload: bytes) -> None:
        """Send one message."""
        size = len(payload)
        if size < 126:
            head = bytes((_FIN | opcode, size))
        else:
            shape, mark = (">BBH", 126) if size < 1 << 16 else (">BBQ", 127)
            head = struct.pack(shape, _FIN | opcode, mark, size)
        assert self._transport is not None
        self._transport.write(head + payload)

    def _accept(self, head: bytes) -> None:
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        key = next(value.strip() for name, _, value in lines if name.lower() == b"sec-websocket-key")
        proof = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + proof + b"\r\n\r\n"
        )  # fmt: skip
        self._is_open = True
        self._on_open(self)

    def _take_frames(self, buffer: bytes) -> int:
        """Serve the whole frames of a buffer; return how many bytes they are."""
        position, have = 0, len(buffer)
        while have - position >= 6:
            opcode, size = buffer[position] & 0x0F, buffer[position + 1] & 0x7F
            start = position + 2
            if size > 125:
                width = 2 if size == 126 else 8
                size = int.from_bytes(buffer[start : start + width], "big")
                start += width
            if have < start + 4 + size:
                break
            payload = apply_mask(buffer[start + 4 : start + 4 + size], buffer[start : start + 4])
            position = start + 4 + size
            if opcode == _PING:
                self.send(_PONG, payload)
            elif opcode in {_TEXT, _BINARY}:
                self._on_message(opcode == _TEXT, payload)
        return position


class Gateway:
    """A gateway that asks the one runner that dials in, keeping so many requests open as a load says."""

    def __init__(self) -> None:
        self.registered = asyncio.Event()
        self.models: list[str] = []
        self.answered = self.chunks = self.frames = 0
        self.problems: list[str] = []
        self._socket: Socket | None = None
        self._number = 0
        self._open: dict[int, int] = {}
        self._idle = asyncio.Event()
        self._is_streaming = False
        self._until = 0.0
        self._expected = 0
        self._loop = asyncio.get_running_loop()

    def make_socket(self) -> Socket:
        """Return the protocol of a new connection."""
        return Socket(self._take_socket, self._take_message)

    async def load(self, work: Work, seconds: float) -> None:
        """Keep the requests of a measure open for so many seconds, then wait for those that run."""
        self.answered = self.chunks = self.frames = 0
        self._is_streaming, self._expected = work.spec.is_streaming, work.pace.chunks if work.spec.is_streaming else 1
        self._until = self._loop.time() + seconds
        self._idle.clear()
        gap_s = work.spec.ramp_ms / 1000 / work.spec.connections
        for _ in range(work.spec.connections):
            self._ask()
            if gap_s:
                await asyncio.sleep(gap_s)
        async with asyncio.timeout(seconds + _DRAIN_S):
            await self._idle.wait()

    def _take_socket(self, socket: Socket) -> None:
        self._socket = socket

    def _take_message(self, is_text: bool, payload: bytes) -> None:
        assert self._socket is not None
        if not is_text:
            self._take_frame(payload)
            return
        message = bridge.decode_worker_message(payload)
        if isinstance(message, bridge.Register):
            ack = bridge.RegisterAck(
                worker_id="w", models=message.models, protocol_version=bridge.MUSTER_V1, node_id="n", heartbeat_interval_s=5.0
            )
            self._socket.send(_TEXT, bridge.encode_message(ack).encode())
            self.models = message.models
        elif isinstance(message, bridge.ModelsUpdate):
            self.models = message.models
        if self.models:
            self.registered.set()

    def _ask(self) -> None:
        assert self._socket is not None
        self._number += 1
        meta = frames.OpenMeta(
            request_id=f"req_{self._number:032x}", model=self.models[0], path=CHAT, headers=_HEADERS,
            is_streaming=self._is_streaming, deadline_ms=600_000, tenant="bench",
        )  # fmt: skip
        body = b'{"model":"%b","messages":[{"role":"user","content":"%b"}],"max_tokens":256,"temperature":0.7,"stream":%b}' % (
            self.models[0].encode(), _PROMPT, b"true" if self._is_streaming else b"false",
        )  # fmt: skip
        self._open[self._number] = 0
        for frame in frames.encode_open(self._number, 1, meta, body):
            self._socket.send(_BINARY, frame)

    def _take_frame(self, payload: bytes) -> None:
        kind, _, number, _ = frames.HEADER.unpack_from(payload)
        if kind == frames.DATA:
            found = payload.count(_STAMP)
            self._open[number] += found
            self.chunks += found
            self.frames += 1
        elif kind == frames.END:
            end = frames.decode_end(payload[frames.HEADER_BYTES :])
            self._finish(number, self._open.pop(number), end.error, end)
        elif kind == frames.REPLY:
            head, body, end = frames.decode_reply(payload[frames.HEADER_BYTES :])
            del self._open[number]
            self._finish(number, body.count(_STAMP), end.error or ("" if head.status == 200 else str(head.status)), end)

    def _finish(self, number: int, chunks: int, error: str, end: frames.End) -> None:
        if error or chunks != self._expected or end.usage is None:
            self.problems.append(f"request {number}: {chunks} of {self._expected} chunks, {end.usage}, {error or 'no error'}")
        self.answered += 1
        if self._loop.time() < self._until:
            self._ask()
        elif not self._open:
            self._idle.set()


@dataclass(frozen=True, slots=True)
class Cost:
    """One run of a measure: microseconds of the runner's CPU per request or chunk, and how many of those came per frame."""

    each_us: float
    units: int
    per_frame: float
    busy: float


def start_runner(root: Path, mock_url: str, port: int, work_dir: Path, cores: CorePlan) -> Child:
    """Start the runner of a checkout."""
    argv = [
        sys.executable, "-P", "-m", "runner", "--gateway", f"ws://127.0.0.1:{port}", "--token", "msw_bench",
        "--backend", mock_url, "--max-concurrent", str(_SLOTS), "--name", "bench", "--log-level", "warning",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    return Child(f"runner-{root.name}", argv, log_dir=work_dir, cores=cores.system, env=env)


async def measure_runner(
    root: Path, measure: Measure, mock: MockUpstream, work_dir: Path, cores: CorePlan, *, seconds: float
) -> Cost:
    """Start a runner, put a load on it and account for it. Raises BenchmarkError when an answer was not whole."""
    gateway, loop, work = Gateway(), asyncio.get_running_loop(), plan_work(measure, quick=False)
    server = await loop.create_server(gateway.make_socket, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    child = start_runner(root, mock.url, port, work_dir, cores)
    try:
        async with asyncio.timeout(_START_S):
            await gateway.registered.wait()
        await asyncio.to_thread(mock.set_pace, work.pace)
        await gateway.load(work, 0.7)  # warm
        before_s, began = child.cpu_s(), loop.time()
        await gateway.load(work, seconds)
        cpu_s, took_s = child.cpu_s() - before_s, loop.time() - began
        child.require_alive()
    finally:
        await asyncio.to_thread(child.stop)
        server.close()
    if gateway.problems:
        raise BenchmarkError(f"{len(gateway.problems)} answers were not whole: {gateway.problems[0]}")
    units = gateway.chunks if work.spec.is_streaming else gateway.answered
    return Cost(cpu_s * 1e6 / units, units, gateway.chunks / max(1, gateway.frames), cpu_s / took_s)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit code is 2 when the benchmark itself could not run."""
    parser = argparse.ArgumentParser(prog="muster bench node", description=__doc__)
    parser.add_argument("--rounds", type=int, default=FULL_ROUNDS)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", choices=(Measure.REQUESTS, Measure.CHUNKS), help="one measure")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, whose runner is measured in turn")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args(argv)
    roots = [ROOT, *([arguments.against.resolve()] if arguments.against else [])]
    measures = [Measure(arguments.only)] if arguments.only else [Measure.REQUESTS, Measure.CHUNKS]
    cores = plan_cores(pin=arguments.pin)
    costs: dict[tuple[Path, Measure], list[Cost]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder, asyncio.Runner(loop_factory=uvloop.Loop) as loop:
            work_dir = Path(folder)
            mock = MockUpstream(build_tools(), log_dir=work_dir, cores=cores.around)
            if cores.is_pinned:
                os.sched_setaffinity(0, cores.around)
            try:
                for number in range(arguments.rounds):
                    for measure in measures:
                        for root in roots:
                            cost = loop.run(measure_runner(root, measure, mock, work_dir, cores, seconds=arguments.seconds))
                            costs.setdefault((root, measure), []).append(cost)
                            print(
                                f"round {number + 1} {measure} {root}: {cost.each_us:.1f} µs, {cost.units} units,"
                                f" {cost.per_frame:.2f} chunks per frame, {cost.busy:.0%} busy",
                                file=sys.stderr, flush=True,
                            )  # fmt: skip
            finally:
                mock.stop()
    except BenchmarkError as error:
        print(f"muster bench node: {error}", file=sys.stderr)
        return 2
    for (root, measure), found in costs.items():
        print(f"{measure:10} {statistics.median(cost.each_us for cost in found):8.1f} µs  {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
