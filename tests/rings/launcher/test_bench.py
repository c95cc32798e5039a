"""The measured checks: their scripted box, their load client, their profilers, and what they start ends with them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.answers import CHAT, MESSAGES, RESPONSES, find_voice
from benchmarks.errors import BenchmarkError
from benchmarks.hotspots import read_hotspots
from benchmarks.loadclient import LoadResult, LoadSpec, Target, run_load
from benchmarks.processes import ROOT, Child, core_busy_s, plan_cores
from benchmarks.toolchain import Tools, build_tools, find_compiler
from benchmarks.upstream import MockUpstream, Pace
from controlplane.launcher.processes import find_by_directory
from gateway.dialects import SURFACES
from gateway.dialects.translation import AnswerContext, AnswerTranslator
from tests.fakes.waiting import wait_until
from wire import bridge, frames

pytestmark = pytest.mark.timeout(330)


STAMP = re.compile(rb'"T[0-9a-f]{16}([0-9a-f]{8})([0-9a-f]{6})([0-9a-f]{6})"')
DEADLINE_S = 50


class Session:
    """The server's end of one box."""

    def __init__(self, socket: ServerConnection, register: bridge.Register, box: Child) -> None:
        self.socket = socket
        self.register = register
        self.box = box

    async def next_frame(self) -> frames.Frame:
        """Return the next binary frame, passing over telemetry."""
        while True:
            data = await self.socket.recv()
            if isinstance(data, bytes):
                return frames.decode_frame(data)

    async def next_message(self) -> bridge.WorkerMessage:
        return bridge.decode_worker_message(await self.socket.recv())

    async def set_pace(self, pace: Pace) -> None:
        self.box.send_line(msgspec.json.encode(pace).decode())
        assert await asyncio.to_thread(self.box.read_line, DEADLINE_S) == "ok"

    async def open_stream(
        self, number: int, *, is_streaming: bool, window_bytes: int = 1 << 20, path: str = CHAT, body: bytes = b"{}"
    ) -> None:
        meta = frames.OpenMeta(request_id="r", model="m", path=path, is_streaming=is_streaming, window_bytes=window_bytes)
        for frame in frames.encode_open(number, 3, meta, body):
            await self.socket.send(frame)

    async def read_stream(self) -> bytes:
        """Return the body of the next stream, its head and end left out."""
        assert (await self.next_frame()).kind == frames.HEAD
        body = b""
        while (frame := await self.next_frame()).kind == frames.DATA:
            body += frame.payload
        assert frame.kind == frames.END
        return body


@asynccontextmanager
async def accept_box(tmp_path: Path, *, protocol: str, options: Sequence[str] = ()) -> AsyncIterator[Session]:
    """Run a box against a server that accepts it."""
    arrived: asyncio.Future[tuple[ServerConnection, bridge.Register]] = asyncio.get_running_loop().create_future()

    async def handle(socket: ServerConnection) -> None:
        assert socket.request is not None
        assert socket.request.headers["x-worker-secret"] == "secret"
        register = bridge.decode_worker_message(await socket.recv())
        assert isinstance(register, bridge.Register)
        ack = bridge.RegisterAck(worker_id="w", models=register.models, heartbeat_interval_s=60.0)
        await socket.send(bridge.encode_message(ack))
        arrived.set_result((socket, register))
        await socket.wait_closed()

    async with asyncio.timeout(DEADLINE_S), serve(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        argv = [sys.executable, "-m", "benchmarks.box", "--gateway", f"ws://127.0.0.1:{port}", "--model", "m"]
        env = {**os.environ, "MUSTER_BOX_SECRET": "secret"}
        box = Child("box", [*argv, "--protocol", protocol, *options], log_dir=tmp_path, env=env, talks=True)
        try:
            assert await asyncio.to_thread(box.read_line, DEADLINE_S) == "registered"
            socket, register = await arrived
            yield Session(socket, register, box)
        finally:
            await asyncio.to_thread(box.stop)


def read_indexes(data: bytes) -> list[int]:
    return [int(index, 16) for _stream, index, _total in STAMP.findall(data)]


async def test_a_muster_box_streams_head_numbered_chunks_and_end(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        assert session.register.protocol_version == bridge.MUSTER_V1
        await session.set_pace(Pace(chunks=5, delay_us=100))
        await session.open_stream(7, is_streaming=True)
        head = await session.next_frame()
        assert (head.kind, head.stream, head.attempt) == (frames.HEAD, 7, 3)
        assert frames.decode_head(head.payload).status == 200
        body = b""
        while (frame := await session.next_frame()).kind == frames.DATA:
            body += frame.payload
        assert read_indexes(body) == [0, 1, 2, 3, 4]
        assert body.endswith(b"data: [DONE]\n\n")
        end = frames.decode_end(frame.payload)
        assert end.error == ""
        assert end.usage is not None
        assert end.usage.completion_tokens == 5


async def test_a_muster_box_answers_a_request_that_is_not_streamed(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.open_stream(1, is_streaming=False)
        frame = await session.next_frame()
        assert frame.kind == frames.REPLY
        head, body, end = frames.decode_reply(frame.payload)
        assert (head.status, end.error) == (200, "")
        assert read_indexes(body) == [0]


async def test_a_muster_box_declares_chat_alone_unless_it_is_told_other_paths(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        assert session.register.endpoints == [CHAT]
    options = [f"--endpoint={CHAT}", f"--endpoint={MESSAGES}"]
    async with accept_box(tmp_path, protocol="muster", options=options) as session:
        assert session.register.endpoints == [CHAT, MESSAGES]


@pytest.mark.parametrize(("path", "end"), [(MESSAGES, b'{"type":"message_stop"}'), (RESPONSES, b'"status":"completed"')])
async def test_a_muster_box_answers_in_the_words_of_the_path_it_is_asked_on(tmp_path: Path, path: str, end: bytes) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=3, delay_us=100))
        await session.open_stream(1, is_streaming=True, path=path)
        body = await session.read_stream()
        assert read_indexes(body) == [0, 1, 2]
        assert end in body.rstrip().rpartition(b"\n")[2]
        for line in body.splitlines():
            assert not line.startswith(b"data:") or msgspec.json.decode(line[5:])["type"]
        await session.open_stream(2, is_streaming=False, path=path)
        _head, whole, _end = frames.decode_reply((await session.next_frame()).payload)
        assert read_indexes(whole) == [0]
        assert msgspec.json.decode(whole)["model"] == "mock"


async def test_a_muster_box_counts_tokens_at_the_end_of_a_stream_when_it_is_asked_to(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=3, delay_us=100))
        for number, body in enumerate((b"{}", b'{"stream_options":{"include_usage":true}}'), start=1):
            await session.open_stream(number, is_streaming=True, body=body)
            assert (b'"completion_tokens":3' in await session.read_stream()) is (number == 2)


async def test_a_muster_box_never_sends_beyond_its_window_and_goes_on_with_credit(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=50, delay_us=0))
        await session.open_stream(1, is_streaming=True, window_bytes=1000)
        assert (await session.next_frame()).kind == frames.HEAD
        await session.open_stream(2, is_streaming=False)  # its answer comes after all that the first may send
        first = b""
        while (frame := await session.next_frame()).stream == 1:
            first += frame.payload
        assert 0 < len(first) <= 1000
        await session.socket.send(frames.encode_credit(1, 3, 1 << 20))
        while (frame := await session.next_frame()).kind != frames.END or frame.stream != 1:
            first += frame.payload if frame.stream == 1 else b""
        assert read_indexes(first) == list(range(50))


async def test_a_muster_box_stops_a_cancelled_stream(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=100_000, delay_us=1000))
        await session.open_stream(1, is_streaming=True)
        assert (await session.next_frame()).kind == frames.HEAD
        await session.socket.send(frames.encode_frame(frames.CANCEL, 1, 3, b"client_disconnect"))
        while (frame := await session.next_frame()).kind == frames.DATA:
            pass
        assert frames.decode_end(frame.payload).error == "cancelled"


async def test_a_bridge_box_streams_text_chunks_and_completes_with_an_empty_body(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="bridge") as session:
        assert session.register.protocol_version == bridge.BRIDGE_V1
        await session.set_pace(Pace(chunks=3, delay_us=100))
        request = bridge.Request(
            request_id="request-1", model="m", endpoint_path="/v1/chat/completions", is_streaming=True, body="{}"
        )
        await session.socket.send(bridge.encode_message(request))
        text = ""
        while isinstance(message := await session.next_message(), bridge.ResponseChunk):
            text += message.chunk
        assert read_indexes(text.encode()) == [0, 1, 2]
        assert isinstance(message, bridge.ResponseComplete)
        assert (message.request_id, message.status_code, message.body) == ("request-1", 200, "")


async def test_a_box_answers_pings_of_both_kinds(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="bridge") as session:
        await session.socket.send(bridge.encode_message(bridge.Ping(timestamp_unix_ms=5)))
        assert await session.next_message() == bridge.Pong(current_load=0, timestamp_unix_ms=5)
        await (await session.socket.ping())


BURN = """
import subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
    return time.process_time()
if len(sys.argv) > 1:
    print(burn(float(sys.argv[1])), flush=True); sys.stdin.readline()
else:
    child = subprocess.Popen([sys.executable, "-c", CODE, "0.3"], stdin=sys.stdin, stdout=subprocess.PIPE)
    print(float(child.stdout.readline()) + burn(0.3), flush=True); sys.stdin.readline()
"""
"""Says how much processor time both processes have used by then."""


def test_cpu_time_of_a_process_and_its_children_is_counted(tmp_path: Path) -> None:
    code = BURN.replace("CODE", repr(BURN))
    child = Child("burner", [sys.executable, "-c", code], log_dir=tmp_path, talks=True)
    try:
        said_s = float(child.read_line(30))
        assert said_s >= 0.6
        assert said_s - 0.1 <= child.cpu_s() < 1.5 * said_s  # the kernel shows hundredths; each process is counted once
        assert child.rss_bytes() > 2_000_000
    finally:
        child.stop()


def test_an_idle_process_uses_nothing(tmp_path: Path) -> None:
    child = Child("idle", [sys.executable, "-c", "print('up', flush=True); input()"], log_dir=tmp_path, talks=True)
    try:
        child.read_line(30)
        before = child.cpu_s()
        assert child.cpu_s() - before < 0.05
    finally:
        child.stop()


def test_a_child_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    child = Child("broken", [sys.executable, "-c", "import sys; sys.exit('no such database')"], log_dir=tmp_path)
    try:
        with pytest.raises(BenchmarkError, match="no such database"):
            child.wait_until(lambda: False, "it was to come up", 20)
    finally:
        child.stop()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin processes")
def test_the_measured_system_never_shares_a_core_with_the_load() -> None:
    plan = plan_cores(pin=True)
    assert not set(plan.system) & set(plan.around)
    assert not plan_cores(pin=False).is_pinned


def test_a_core_is_busy_no_longer_than_the_clock_runs() -> None:
    began, before = time.monotonic(), core_busy_s([0])
    while time.monotonic() - began < 0.1:
        pass
    assert 0.0 <= core_busy_s([0]) - before <= time.monotonic() - began + 0.1
    assert core_busy_s([]) == 0.0


STAMP_OF_A_SURFACE = re.compile(rb'"T[0-9a-f]{16}[0-9a-f]{8}([0-9a-f]{6})[0-9a-f]{6}"')
CHUNKS_OF_A_SURFACE = 6
BODIES = {
    MESSAGES: b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hi"}],"stream":true}',
    RESPONSES: b'{"model":"m","input":"hi","stream":true}',
}
SURFACE_PATHS = [CHAT, MESSAGES, RESPONSES]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    if find_compiler() is None:
        pytest.skip("the tools are C programs and there is no compiler")
    return build_tools(tmp_path_factory.mktemp("build"))


def say_stream(path: str, *, left_out: int | None = None, request: bytes = b"") -> list[bytes]:
    """Return a stream of the box as it writes it: chunk by chunk, then its end."""
    voice = find_voice(path)
    chunks = [voice.make_chunk(7, index, CHUNKS_OF_A_SURFACE) for index in range(CHUNKS_OF_A_SURFACE) if index != left_out]
    return [*chunks, voice.make_end(CHUNKS_OF_A_SURFACE, request)]


def open_answer(path: str) -> tuple[AnswerTranslator, bytes]:
    translate = SURFACES[path].translate
    assert translate is not None
    translation = translate(SURFACES[path].parse(BODIES[path], {}))
    return translation.open_answer(AnswerContext(request_id="req_1", model="m", created=1)), translation.body


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_chat_stream_of_the_box_keeps_one_stamp_in_each_event_it_is_translated_to(path: str) -> None:
    translator, body = open_answer(path)
    events = [translator.feed(piece) for piece in say_stream(CHAT, request=body)]
    closing = translator.finish()
    assert translator.failure is None
    assert [[int(index, 16) for index in STAMP_OF_A_SURFACE.findall(event)] for event in events] == [
        [n] for n in range(CHUNKS_OF_A_SURFACE)
    ] + [[]]
    assert not STAMP_OF_A_SURFACE.findall(closing)
    assert translator.usage is not None
    assert translator.usage.completion_tokens == CHUNKS_OF_A_SURFACE


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_whole_chat_answer_of_the_box_keeps_its_stamp_and_its_size_in_translation(path: str) -> None:
    translator, _body = open_answer(path)
    whole = find_voice(CHAT).make_whole(7)
    said = translator.translate_whole(whole)
    assert translator.failure is None
    assert len(STAMP_OF_A_SURFACE.findall(said)) == len(STAMP_OF_A_SURFACE.findall(whole)) == 1
    assert len(said) > 700
    assert msgspec.json.decode(said)["model"] == "m"


@asynccontextmanager
async def serve_stream(pieces: list[bytes]) -> AsyncIterator[int]:
    """Answer every request on a port with ``pieces``, one write each."""

    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(re.findall(rb"(?i)content-length: (\d+)", head)[0]))
                writer.write(HEAD)
                for piece in [*pieces, b""]:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*answering)  # their client has gone, and each of them finds that out


async def load_surface(tools: Tools, path: str, pieces: list[bytes]) -> LoadResult:
    async with serve_stream(pieces) as port:
        spec = LoadSpec(connections=1, seconds=0.05, is_streaming=True)
        return await asyncio.to_thread(run_load, tools.load, Target(port, path), spec)


@pytest.mark.parametrize("path", SURFACE_PATHS)
async def test_whole_streams_of_every_api_path_have_no_problems(tools: Tools, path: str) -> None:
    result = await load_surface(tools, path, say_stream(path))
    assert result.find_problems() == []
    assert result.chunks == result.answered * CHUNKS_OF_A_SURFACE


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_translated_streams_have_no_problems(tools: Tools, path: str) -> None:
    translator, body = open_answer(path)
    pieces = [event for piece in say_stream(CHAT, request=body) if (event := translator.feed(piece))]
    result = await load_surface(tools, path, [*pieces, translator.finish()])
    assert result.find_problems() == []
    assert result.chunks == result.answered * CHUNKS_OF_A_SURFACE


@pytest.mark.parametrize("path", SURFACE_PATHS)
async def test_a_chunk_left_out_and_an_end_that_never_comes_are_reported_on_every_api_path(tools: Tools, path: str) -> None:
    missing = await load_surface(tools, path, say_stream(path, left_out=3))
    assert missing.lost == missing.answered > 0
    endless = await load_surface(tools, path, say_stream(path)[:-1])
    assert endless.without_done == endless.answered > 0
    assert f"{endless.answered} streams without the event that ends them" in endless.find_problems()


CHUNKS = 10
STREAMS = LoadSpec(connections=4, seconds=0.1, is_streaming=True)


@pytest.fixture
def mock(tools: Tools, tmp_path: Path) -> Iterator[MockUpstream]:
    upstream = MockUpstream(tools, log_dir=tmp_path)
    upstream.set_pace(Pace(chunks=CHUNKS, delay_us=100))
    yield upstream
    upstream.stop()


def load(tools: Tools, mock: MockUpstream, spec: LoadSpec = STREAMS) -> LoadResult:
    return run_load(tools.load, Target(mock.port), spec)


def test_whole_streams_are_counted_and_have_no_problems(tools: Tools, mock: MockUpstream) -> None:
    result = load(tools, mock)
    assert result.answered > 0
    assert result.chunks == result.answered * CHUNKS == mock.read_counters()["chunks"]
    assert result.find_problems() == []
    assert 0 < result.ttfb_us.p50 <= result.latency_us.p50


def test_whole_answers_are_verified_too(tools: Tools, mock: MockUpstream) -> None:
    result = load(tools, mock, LoadSpec(connections=2, seconds=0.1, is_streaming=False))
    assert result.answered > 0
    assert result.chunks == result.answered == mock.read_counters()["requests"]
    assert result.find_problems() == []


@pytest.mark.parametrize(
    ("fault", "field", "word"),
    [
        ("lose", "lost", "chunks lost"),
        ("duplicate", "duplicated", "chunks duplicated"),
        ("swap", "reordered", "chunks reordered"),
        ("foreign", "foreign", "chunks of another stream"),
    ],
)
def test_one_bad_chunk_in_each_stream_is_reported(tools: Tools, mock: MockUpstream, fault: str, field: str, word: str) -> None:
    mock.set_fault(fault)
    result = load(tools, mock)
    assert result.answered > 0
    assert getattr(result, field) == result.answered
    assert f"{result.answered} {word}" in result.find_problems()
    others = {"lost", "duplicated", "reordered", "foreign"} - {field}
    if fault == "foreign":  # what went to another stream is missing from its own
        others.discard("lost")
    assert all(getattr(result, other) == 0 for other in others)


def test_a_stream_that_is_cut_off_is_an_error_and_its_rest_is_lost(tools: Tools, mock: MockUpstream) -> None:
    mock.set_fault("cut")
    result = load(tools, mock)
    assert result.answered == 0
    assert result.errors > 0
    assert result.lost == result.errors * (CHUNKS - CHUNKS // 2)
    assert "no answer at all" in result.find_problems()


def test_a_bad_status_is_reported_with_the_body(tools: Tools, tmp_path: Path, mock: MockUpstream) -> None:
    from benchmarks.nginx import Nginx, find_nginx

    binary = find_nginx()
    if binary is None:
        pytest.skip("nginx is not installed")
    tmp_path.chmod(0o755)
    peer = Nginx(binary, upstream_port=mock.port, work_dir=tmp_path)
    try:
        refused = run_load(tools.load, Target(peer.port, key="wrong"), STREAMS)
    finally:
        peer.stop()
    assert refused.last_bad_status == 401
    assert refused.answered == 0
    assert any("status 401" in problem for problem in refused.find_problems())


def test_a_server_that_is_gone_is_an_error_and_not_a_hang(tools: Tools, mock: MockUpstream) -> None:
    mock.stop()
    result = load(tools, mock)
    assert result.answered == 0
    assert result.errors > 0


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.errors import BenchmarkError

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BenchmarkError, match="no C compiler found"):
        build_tools(tmp_path / "build")


PROGRAM = """
import sys, time
def idle_part():
    pass
def busy_part():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        idle_part()
print("up", flush=True)
while sys.stdin.readline():
    busy_part()
    print("burnt", flush=True)
"""


@pytest.mark.parametrize(("how", "suffix"), [("samples", ".stacks"), ("calls", ".pstats")])
def test_a_profile_names_what_burns_the_time(tmp_path: Path, how: str, suffix: str) -> None:
    (tmp_path / "burning.py").write_text(PROGRAM)
    path = tmp_path / f"profile{suffix}"
    argv = [sys.executable, "-m", "benchmarks.profiled", "--how", how, "--to", str(path), "burning"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = Child("profiled", argv, log_dir=tmp_path, env=env, talks=True)
    try:
        assert child.read_line(30) == "up"
        os.kill(child.popen.pid, signal.SIGUSR1)
        child.send_line("go")
        assert child.read_line(30) == "burnt"
        os.kill(child.popen.pid, signal.SIGUSR2)
        # The program waits in a system call; its handler runs as soon as that returns.
        child.send_line("go")
        child.wait_until(path.exists, "it was to write the profile", 30)
    finally:
        child.stop()
    by_total = sorted(read_hotspots(path, units=1), key=lambda spot: spot.total_share, reverse=True)
    assert any("busy_part" in spot.name and spot.total_share > 0.5 for spot in by_total[:4])


WITHIN_S = 60.0


def _installation(place: Path) -> list[int]:
    """Return the processes that name a folder on their command line, and those of PostgreSQL beneath it."""
    named = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(place / "data") in " ".join(process.info["cmdline"] or ())
    ]
    return [*named, *find_by_directory(place / "data" / "postgres" / "data")]


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal")),
    ],
)
def test_the_installation_ends_with_the_program_that_started_it(number: signal.Signals, status: int) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-govcheck-test-", dir="/tmp") as name:
        place = Path(name)
        program = [sys.executable, "-m", "benchmarks.govcheck", "--only", "refusals", "--data", name]
        with (place / "said").open("wb") as said:
            check = subprocess.Popen(program, cwd=ROOT, stdout=said, stderr=said, env=dict(os.environ))
        try:
            log = place / "up.log"
            wait_until(
                lambda: log.exists() and "postgres is ready" in log.read_text(),
                "the installation is starting",
                within_s=WITHIN_S,
            )
            assert _installation(place)
            check.send_signal(number)
            assert check.wait(WITHIN_S) == status
            wait_until(lambda: not _installation(place), "the installation has ended", within_s=WITHIN_S)
        finally:
            if check.poll() is None:
                check.kill()
                check.wait()
        assert log.read_text().endswith("Stopping\nStopped\n")


LIMIT_S = 300.0
"""It starts boxes and engines one after the other, which a busy machine does in a minute."""


async def test_limits_and_cycles_pass_and_write_their_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks", "box", "--only", "limits,cycles", "--cycles", "3", "--json", str(figures),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    assert "100% (3 of 3)" in text
    checks = json.loads(figures.read_bytes())["checks"]
    assert list(checks) == ["limits", "cycles"]
    assert all(check["passed"] for check in checks.values())
    assert checks["limits"]["figures"]["rate_limit"]["limit"] == 3
    assert len(checks["cycles"]["figures"]["rss_kb"]) == 3
