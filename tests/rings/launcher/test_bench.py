"""The measured checks: their load client, their profilers, and what they start ends with them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.answers import CHAT, MESSAGES, RESPONSES, find_voice
from benchmarks.box import Roll
from benchmarks.loadclient import LoadResult, LoadSpec, Target, run_load
from benchmarks.plan import Measure, plan_work
from benchmarks.processes import ROOT, tree_cpu_s, tree_pss_bytes
from benchmarks.toolchain import Tools, build_tools, find_compiler
from benchmarks.upstream import MockUpstream
from controlplane.launcher.processes import find_by_directory
from gateway.dialects.chat import AnswerContext
from gateway.dialects.surface import SURFACES
from tests.fakes.scripted_gateway import TOKEN, run_gateway
from tests.fakes.waiting import eventually, wait_until

pytestmark = pytest.mark.timeout(330)

WITHIN_S, LIMIT_S = 60.0, 300.0
"""LIMIT_S: a check starts nodes and engines one after the other, which a busy machine does in a minute."""
CHUNKS = 6
BODIES = {
    MESSAGES: b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hi"}],"stream":true}',
    RESPONSES: b'{"model":"m","input":"hi","stream":true}',
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    if find_compiler() is None:
        pytest.skip("the tools are C programs and there is no compiler")
    return build_tools(tmp_path_factory.mktemp("build"))


def say_stream(path: str, *, left_out: int | None = None, request: bytes = b"") -> list[bytes]:
    """Return a stream of the node as it writes it: chunk by chunk, then its end."""
    voice = find_voice(path)
    chunks = [voice.make_chunk(7, index, CHUNKS) for index in range(CHUNKS) if index != left_out]
    return [*chunks, voice.make_end(CHUNKS, request)]


def say_translated(path: str) -> list[bytes]:
    """Return what the gateway makes of a chat stream of the node."""
    translate = SURFACES[path].translate
    assert translate is not None
    translation = translate(SURFACES[path].parse(BODIES[path], {}))
    translator = translation.open_answer(AnswerContext(request_id="req_1", model="m", created=1))
    pieces = [translator.feed(piece) for piece in say_stream(CHAT, request=translation.body)]
    assert [len(re.findall(rb'"T[0-9a-f]{36}"', piece)) for piece in pieces] == [1] * CHUNKS + [0], "a stamp in each event"
    return [*(piece for piece in pieces if piece), translator.finish()]


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


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_whole_streams_of_every_path_have_no_problems_and_what_is_left_out_is_reported(tools: Tools, path: str) -> None:
    for pieces in [say_stream(path)] + ([] if path == CHAT else [say_translated(path)]):
        result = await load_surface(tools, path, pieces)
        assert (result.find_problems(), result.chunks) == ([], result.answered * CHUNKS)
    missing = await load_surface(tools, path, say_stream(path, left_out=3))
    assert missing.lost == missing.answered > 0
    endless = await load_surface(tools, path, say_stream(path)[:-1])
    assert endless.without_done == endless.answered > 0
    assert f"{endless.answered} streams without the event that ends them" in endless.find_problems()


@pytest.fixture
def mock(tools: Tools, tmp_path: Path) -> Iterator[MockUpstream]:
    upstream = MockUpstream(tools, log_dir=tmp_path)
    try:
        yield upstream
    finally:
        upstream.stop()


def load_mock(tools: Tools, mock: MockUpstream, measure: Measure, *, seconds: float) -> LoadResult:
    work = plan_work(measure, quick=True)
    mock.set_pace(work.pace)
    result = run_load(tools.load, Target(mock.port), replace(work.spec, seconds=seconds, warmup_ms=0))
    assert result.find_problems() == []
    return result


def test_the_mock_waits_before_the_first_byte_as_an_engine_does(tools: Tools, mock: MockUpstream) -> None:
    waited = load_mock(tools, mock, Measure.ENGINE, seconds=0.05)
    assert waited.ttfb_us.p50 >= 5_000 > waited.transit_us.p50


def test_streams_opened_at_once_come_on_connections_that_are_open(tools: Tools, mock: MockUpstream) -> None:
    work = plan_work(Measure.OPENED, quick=True)
    mock.set_pace(work.pace)
    opened = run_load(tools.load, Target(mock.port), work.spec)
    assert (opened.find_problems(), opened.answered, opened.connects, opened.ttfb_us.count) == ([], 512, 256, 256)


async def test_one_process_stands_for_many_nodes_and_they_dial_again(tmp_path: Path) -> None:
    async with run_gateway() as gateway:
        url = gateway.url.replace("http", "ws")
        program = [
            sys.executable,
            "-m",
            "benchmarks.box",
            "--gateway",
            url,
            "--model",
            "m",
            "--nodes=3",
            "--gpus=4",
            "--slots=8",
        ]
        process = await asyncio.create_subprocess_exec(
            *program, cwd=ROOT, env={**os.environ, "MUSTER_BOX_SECRET": TOKEN},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        stdin, stdout = process.stdin, process.stdout

        async def all_are_registered() -> bool:
            stdin.write(b"registered?\n")
            return msgspec.json.decode(await stdout.readline(), type=Roll).registered == 3

        try:
            nodes = [await gateway.accept() for _ in range(3)]
            assert await asyncio.wait_for(stdout.readline(), WITHIN_S) == b"registered\n"
            assert await all_are_registered()
            assert {node.register.worker_name for node in nodes} == {"bench-m-0", "bench-m-1", "bench-m-2"}
            assert [(len(node.register.gpus), node.register.max_concurrent) for node in nodes] == [(4, 8)] * 3
            answer = await (await nodes[1].open({"messages": []})).finish()
            assert (answer.status, b"chat.completion" in answer.body) == (200, True)
            for node in nodes:
                node.socket.transport.abort()
            again = [await gateway.accept() for _ in range(3)]
            assert {node.register.instance_id for node in again} == {node.register.instance_id for node in nodes}
            await eventually(all_are_registered, "all three are registered again")
            stdin.close()
            assert await asyncio.wait_for(process.wait(), WITHIN_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tree_of_processes_has_the_memory_and_the_time_of_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        alone, both = tree_pss_bytes(child.pid), tree_pss_bytes(os.getpid())
        assert alone is not None
        assert both is not None
        assert both > alone > 0
        before_s = tree_cpu_s(os.getpid())
        assert before_s > tree_cpu_s(child.pid) > 0
        child.communicate(b"\n")
    assert (tree_cpu_s(child.pid), tree_pss_bytes(child.pid)) == (0, 0)


def installation(place: Path) -> list[int]:
    """Return the processes that name a folder on their command line, and those of PostgreSQL beneath it."""
    found = psutil.process_iter(["cmdline"])
    named = [process.pid for process in found if str(place / "data") in " ".join(process.info["cmdline"] or ())]
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
        place, log = Path(name), Path(name) / "up.log"
        program = [sys.executable, "-m", "benchmarks.govcheck", "--only", "refusals", "--data", name]
        with (place / "said").open("wb") as said:
            check = subprocess.Popen(program, cwd=ROOT, stdout=said, stderr=said, env=dict(os.environ))
        try:
            wait_until(lambda: log.exists() and "postgres is ready" in log.read_text(), "it is starting", within_s=WITHIN_S)
            assert installation(place)
            check.send_signal(number)
            assert check.wait(WITHIN_S) == status
            wait_until(lambda: not installation(place), "the installation has ended", within_s=WITHIN_S)
        finally:
            if check.poll() is None:
                check.kill()
                check.wait()
        assert log.read_text().endswith("Stopping\nStopped\n")


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
    assert (process.returncode, "100% (3 of 3)" in text) == (0, True), text
    checks = json.loads(figures.read_bytes())["checks"]
    assert [(name, check["passed"]) for name, check in checks.items()] == [("limits", True), ("cycles", True)]
    assert checks["limits"]["figures"]["rate_limit"]["limit"] == 3
    assert len(checks["cycles"]["figures"]["rss_kb"]) == 3
