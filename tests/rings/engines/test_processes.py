"""Processes below the runner: children that break what was agreed, wardens, and the memory that trees of them hold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runner.engines.child import Child
from runner.engines.port import Progress
from runner.errors import EngineError
from runner.telemetry import Telemetry, open_telemetry
from runner.telemetry.processes import find_tree, measure_host_bytes
from tests.fakes.engines.suite import assert_gone
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.process import ROOT
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to tell of a parent's death")

SERVER = """
import os, pathlib, signal, subprocess, sys, time
worker = "import time; print('worker', flush=True); time.sleep(600)"
same = subprocess.Popen([sys.executable, "-c", worker])
away = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
def leave(*_):
    pathlib.Path(sys.argv[1], "told").touch()
    os._exit(3)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""
RUNNER = """
import os, subprocess, sys, time
warden = [sys.executable, "-m", "runner.engines.children.warden", str(os.getpid())]
subprocess.Popen([*warden, *sys.argv[1:]], start_new_session=True)
time.sleep(600)
"""


class Family:
    """A runner, its warden, a server and the server's two workers, one of which has left the process group."""

    def __init__(self, runner: asyncio.subprocess.Process, folder: Path) -> None:
        self.runner = runner
        self.told = folder / "told"
        self.tree = psutil.Process(runner.pid).children(recursive=True)

    def find(self, words: str) -> psutil.Process:
        return next(process for process in self.tree if words in " ".join(process.cmdline()))


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Family]:
    command = [sys.executable, "-c", RUNNER, sys.executable, "-c", SERVER, str(tmp_path)]
    runner = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL)
    ready = tmp_path / "ready"
    await eventually(ready.exists, "the server has started its workers")
    found = Family(runner, tmp_path)
    assert len(found.tree) == 4
    try:
        yield found
    finally:
        for process in found.tree:
            if process.is_running():
                process.kill()
        if runner.returncode is None:
            runner.kill()
        await runner.wait()


async def test_the_runner_is_killed(family: Family) -> None:
    family.runner.kill()
    await assert_gone(family.tree)
    assert not family.told.exists()


async def test_the_server_is_killed(family: Family) -> None:
    server = next(
        process
        for process in family.tree
        if str(family.told.parent) in process.cmdline() and "warden" not in str(process.cmdline())
    )
    server.kill()
    await assert_gone(family.tree)


async def test_sigterm_is_for_the_server_and_its_workers_follow(family: Family) -> None:
    os.kill(family.find("runner.engines.children.warden").pid, signal.SIGTERM)
    await assert_gone(family.tree)
    assert family.told.exists()


async def test_the_exit_status_is_that_of_the_server() -> None:
    async def run(*command: str) -> tuple[int, bytes]:
        warden = [sys.executable, "-m", "runner.engines.children.warden", str(os.getpid()), *command]
        process = await asyncio.create_subprocess_exec(*warden, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode is not None
        return process.returncode, errors

    assert await run(sys.executable, "-c", "raise SystemExit(5)") == (5, b"")
    assert await run("no-such-program") == (127, b"cannot start no-such-program: No such file or directory\n")


async def test_a_child_that_prints_something_else_than_its_answer_is_an_engine_error() -> None:
    child = Child("chatty")
    with pytest.raises(EngineError, match="something else than its answer"):
        await child.start_ours("this", {}, lambda _: None, limit_s=60)  # a module that prints a poem
    assert (child.pid, child.is_running) == (None, False)


async def test_a_child_that_is_killed_before_it_has_said_why_is_told_by_how_it_ended() -> None:
    set_runner_limits(engines={"last_words_s": 30.0})  # on a busy machine its end may be told later than that it is mute
    child = Child("silent")

    def kill_it(_progress: Progress) -> None:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(EngineError, match=r"^the engine process died without a word \(killed by SIGKILL\)$"):
        await child.start_ours("tests.fakes.engines.programs.silent_child", {}, kill_it, limit_s=60)
    assert (child.pid, child.is_running) == (None, False)


MIB = 1024 * 1024
HELD_MB = 64

PARENT = f"""
import os, sys
block = bytearray(os.urandom(1024)) * (1024 * {HELD_MB})
child = os.fork()
if child == 0:
    sys.stdin.buffer.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.buffer.read()
os.waitpid(child, 0)
"""
"""Allocates, then forks: parent and child have the same pages."""

ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen(["cat"])
print(child.pid, flush=True)
if sys.argv[1:] == ["exit"]:
    os._exit(0)
child.wait()
"""


Start = Callable[..., tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs that print the id of their child and end, both, when their input does."""
    started: list[tuple[subprocess.Popen[bytes], int]] = []

    def launch(program: str, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        started.append((process, int(process.stdout.readline())))
        return started[-1]

    yield launch
    for process, child in started:
        with process:
            pass  # closes its input and waits for it
        try:
            psutil.Process(child).wait(30)
        except psutil.NoSuchProcess:
            pass


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """The telemetry of this machine."""
    opened = open_telemetry()
    yield opened
    opened.close()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/PID/smaps_rollup")
def test_memory_that_parent_and_child_share_is_counted_once(start: Start, telemetry: Telemetry) -> None:
    process, child = start(PARENT)
    tree = telemetry.measure([process.pid])
    assert set(tree.pids) == {process.pid, child}
    resident_mb = sum(psutil.Process(pid).memory_info().rss for pid in tree.pids) / MIB
    assert HELD_MB <= tree.host_bytes / MIB < HELD_MB + 32
    assert resident_mb > 2 * HELD_MB


def test_several_roots_are_measured_together_and_each_process_once(start: Start, telemetry: Telemetry) -> None:
    first, first_child = start(ORPHAN)
    second, second_child = start(ORPHAN)
    tree = telemetry.measure([first.pid, first_child, second.pid])
    assert set(tree.pids) == {first.pid, first_child, second.pid, second_child}


def test_a_process_that_outlives_its_engine_is_still_found(start: Start, telemetry: Telemetry) -> None:
    process, child = start(ORPHAN, "exit")
    process.wait(30)
    assert telemetry.measure([process.pid]).pids == (child,)


def test_an_engine_that_has_ended_holds_nothing(start: Start, telemetry: Telemetry) -> None:
    process, child = start(ORPHAN)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which nobody has waited for yet
    tree = telemetry.measure([process.pid])
    assert (tree.host_bytes, tree.pids) == (0, ())
    assert find_tree([child]) == ()


def test_a_process_whose_maps_cannot_be_read_counts_with_its_resident_memory(start: Start, tmp_path: Path) -> None:
    process, _ = start(PARENT)
    os.kill(process.pid, signal.SIGSTOP)  # it may still take memory on its way to its input
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        assert measure_host_bytes(process.pid, proc=tmp_path) == psutil.Process(process.pid).memory_info().rss > HELD_MB * MIB
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_process_that_is_gone_holds_nothing() -> None:
    assert measure_host_bytes(2**22 + 1) == 0


def test_the_host_is_read_as_the_kernel_tells(telemetry: Telemetry) -> None:
    give_up_at = time.monotonic() + 30
    while True:
        before = psutil.virtual_memory().available
        reading = telemetry.sample()
        if reading.kind == "gpu":
            pytest.skip("this machine has GPUs, so the reading is not that of its host")
        after = psutil.virtual_memory().available
        assert 0 < reading.total_mb <= psutil.virtual_memory().total // MIB
        assert reading.used_mb + reading.free_mb == reading.total_mb
        if reading.free_mb <= max(before, after) // MIB + 512:
            break
        assert time.monotonic() < give_up_at, "more is free than the kernel says, and not for a moment only"
    assert abs(reading.at - time.time()) < 60.0
