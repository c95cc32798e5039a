"""Processes below the runner: children that break what was agreed, subreapers, and the memory that trees hold, on GPUs too.

GPUs are those of a driver library of ours, seen through the real bindings in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from runner.definitions.plan import Progress
from runner.engines.process import Child
from runner.errors import EngineError
from runner.telemetry import open_telemetry
from runner.telemetry.memory import find_tree, measure_host_bytes
from tests.fakes.engines.cases import build_driver
from tests.fakes.engines.suite import assert_gone
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.process import ROOT
from tests.fakes.waiting import eventually
from wire.bridge import GpuInfo

pytestmark = [
    pytest.mark.timeout(240), pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to tell of a parent's death"),
]  # fmt: skip
MIB = 1024 * 1024

# children and subreapers

SERVER = """
import os, pathlib, signal, subprocess, sys
worker = "import signal; print('worker', flush=True); signal.alarm(600); signal.pause()"
same = subprocess.Popen([sys.executable, "-c", worker])
away = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
def leave(*_):
    pathlib.Path(sys.argv[1], "told").touch()
    os._exit(3)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(sys.argv[1], "ready").touch()
signal.alarm(600); signal.pause()
"""
RUNNER = """
import os, signal, subprocess, sys
subreaper = [sys.executable, "-m", "runner.engines.children.subreaper", str(os.getpid())]
subprocess.Popen([*subreaper, *sys.argv[1:]], start_new_session=True)
signal.alarm(600); signal.pause()
"""


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[psutil.Process]:
    """A runner with a subreaper, a server and the server's two workers, one of which has left the process group."""
    command = [sys.executable, "-c", RUNNER, sys.executable, "-c", SERVER, str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL)
    await eventually((tmp_path / "ready").exists, "the server has started its workers")
    family = psutil.Process(process.pid)
    tree = family.children(recursive=True)
    try:
        yield family
    finally:
        for each in [*tree, family]:
            if each.is_running():
                each.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("number", "victim", "is_told"),
    [(signal.SIGKILL, -1, False), (signal.SIGKILL, 1, False), (signal.SIGTERM, 0, True)],
    ids=["the runner is killed", "the server is killed", "the subreaper is asked to end"],
)
async def test_nothing_of_a_server_outlives_it(
    runner: psutil.Process, tmp_path: Path, number: signal.Signals, victim: int, is_told: bool
) -> None:
    (subreaper,) = runner.children()
    (server,) = subreaper.children()
    tree = [subreaper, server, *server.children()]
    assert len(tree) == 4
    (runner if victim < 0 else tree[victim]).send_signal(number)
    await assert_gone(tree)
    assert (tmp_path / "told").exists() is is_told


FORKING = """
import os, pathlib, signal, sys
while True:
    if os.fork() == 0:
        signal.alarm(120); signal.pause()
    pathlib.Path(sys.argv[1], "ready").touch()
"""


async def test_workers_that_a_server_starts_while_it_is_killed_do_not_outlive_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER, sys.executable, "-c", FORKING, str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        await eventually((tmp_path / "ready").exists, "the server starts workers")
        (subreaper,) = psutil.Process(process.pid).children()
    finally:
        process.kill()
        await process.wait()
    # It leaves last, when nothing is below it any more.
    await assert_gone([subreaper])
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or ())]


async def test_the_exit_status_is_that_of_the_server() -> None:
    async def run(*command: str) -> tuple[int | None, bytes]:
        subreaper = [sys.executable, "-m", "runner.engines.children.subreaper", str(os.getpid()), *command]
        process = await asyncio.create_subprocess_exec(*subreaper, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        return process.returncode, errors

    assert await run(sys.executable, "-c", "raise SystemExit(5)") == (5, b"")
    assert await run("no-such-program") == (127, b"cannot start no-such-program: No such file or directory\n")


async def test_a_child_that_says_something_else_or_is_killed_before_it_has_said_why_is_an_engine_error() -> None:
    set_runner_limits(engines={"last_words_s": 30.0})  # on a busy machine its end may be told later than that it is mute
    child = Child("chatty")
    with pytest.raises(EngineError, match="something else than its answer"):
        await child.start_ours("this", {}, lambda _: None, limit_s=60)  # a module that prints a poem
    assert (child.pid, child.is_running) == (None, False)

    def kill_it(_progress: Progress) -> None:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(EngineError, match=r"^the engine process died without a word \(killed by SIGKILL\)$"):
        await child.start_ours("tests.fakes.engines.programs.silent_child", {}, kill_it, limit_s=60)
    assert (child.pid, child.is_running) == (None, False)


# memory of the host

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
Start = Callable[..., tuple[psutil.Popen, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs that print the id of their child and end, both, when their input does."""
    started: list[tuple[psutil.Popen, int]] = []

    def launch(program: str, *arguments: str) -> tuple[psutil.Popen, int]:
        argv = [sys.executable, "-c", program, *arguments]
        process = psutil.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        started.append((process, int(process.stdout.readline())))
        return started[-1]

    yield launch
    for process, child in started:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
        try:
            psutil.Process(child).wait(30)
        except psutil.NoSuchProcess:
            pass


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/PID/smaps_rollup")
def test_memory_that_parent_and_child_share_is_counted_once_and_as_resident_without_maps(start: Start, tmp_path: Path) -> None:
    process, child = start(PARENT)
    tree = open_telemetry().measure([process.pid, child])
    assert set(tree.pids) == {process.pid, child}
    assert HELD_MB <= tree.host_bytes / MIB < HELD_MB + 32
    assert sum(psutil.Process(pid).memory_info().rss for pid in tree.pids) / MIB > 2 * HELD_MB
    os.kill(process.pid, signal.SIGSTOP)  # it may still take memory on its way to its input
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        assert measure_host_bytes(process.pid, proc=tmp_path) == psutil.Process(process.pid).memory_info().rss > HELD_MB * MIB
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_process_that_outlives_its_engine_is_still_found_and_one_that_has_ended_holds_nothing(start: Start) -> None:
    telemetry = open_telemetry()
    process, child = start(ORPHAN, "exit")
    process.wait(30)
    assert telemetry.measure([process.pid]).pids == (child,)
    process, child = start(ORPHAN)
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which nobody has waited for yet
    tree = telemetry.measure([process.pid])
    assert (tree.host_bytes, tree.pids, find_tree([child]), measure_host_bytes(2**22 + 1)) == (0, (), (), 0)


# memory of GPUs

WHOLE = ("WITH_V3", "WITH_V2", "WITH_V1")
GPU_IDS = ("GPU-aaaa1111-0000", "GPU-bbbb2222-0000")
PROGRAM = """
import os, sys
import msgspec
from pathlib import Path
from runner.telemetry import open_telemetry

telemetry = open_telemetry(sysfs=Path(os.devnull))
reading, tree = telemetry.sample(), telemetry.measure([int(text) for text in sys.argv[1:]])
telemetry.close()
after = telemetry.sample()
sys.stdout.buffer.write(msgspec.json.encode({"reading": reading, "tree": tree, "after": after}))
"""


class Reading(msgspec.Struct):
    gpus: list[GpuInfo]
    kind: str
    total_mb: int
    used_mb: int
    free_mb: int


class Tree(msgspec.Struct):
    gpu_bytes: int | None
    pids: list[int]


class Printed(msgspec.Struct):
    """What a process prints that looks through a driver."""

    reading: Reading
    tree: Tree
    after: Reading
    log: str = ""


Look = Callable[..., Printed]


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """Return what tells what telemetry says of processes, with a driver library that is built with some definitions."""
    place = tmp_path_factory.mktemp("drivers")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build a driver library")

    def run(defines: tuple[str, ...], *roots: int, **env: str) -> Printed:
        folder = place / "-".join(defines)
        if not (folder / "libnvidia-ml.so.1").exists():
            folder.mkdir()
            build_driver(folder, *defines)
        surroundings = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        surroundings |= {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)} | env
        command = [sys.executable, "-W", "error", "-c", PROGRAM, *map(str, roots)]
        done = subprocess.run(command, env=surroundings, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
        printed = msgspec.json.decode(done.stdout, type=Printed)
        printed.log = done.stderr.decode()
        return printed

    return run


def test_two_gpus_are_reported_and_their_memory_summed(look: Look) -> None:
    printed = look(WHOLE)
    reading = printed.reading
    assert reading.gpus == [
        GpuInfo(
            index=index, name="Fake GPU 24GB", memory_total_mb=24_576, memory_used_mb=4096 * (index + 1),
            utilization_percent=10.0 * (index + 1), temperature_c=55.0, power_w=120.5, gpu_id=GPU_IDS[index], vendor="nvidia",
        )
        for index in (0, 1)
    ]  # fmt: skip
    assert (reading.kind, reading.total_mb, reading.used_mb, reading.free_mb) == ("gpu", 49_152, 12_288, 36_864)
    assert printed.log == ""
    # Once the driver is let go, the node does not turn into one without GPUs whose models are judged by host memory.
    assert (printed.after.gpus, printed.after.kind, printed.after.free_mb) == ([], "gpu", 0)


@pytest.mark.parametrize(
    ("visible", "indexes", "log"),
    [
        ("1,0", [0, 1], ""), ("GPU-bbbb2222-0000", [1], ""), ("GPU-aaaa", [0], ""), ("0,7,1", [0], ""), ("", [], ""),
        ("-1", [], ""), ("0,0", [], "CUDA_VISIBLE_DEVICES selects no whole GPU"),
        ("MIG-1234", [], "CUDA_VISIBLE_DEVICES selects no whole GPU"),
    ],
)  # fmt: skip
def test_the_environment_narrows_which_gpus_count(look: Look, visible: str, indexes: list[int], log: str) -> None:
    printed = look(WHOLE, CUDA_VISIBLE_DEVICES=visible)
    reading = printed.reading
    assert [gpu.index for gpu in reading.gpus] == indexes
    assert (reading.kind, log in printed.log, bool(log) == bool(printed.log)) == ("gpu" if indexes else "host", True, True)
    if indexes:
        assert (reading.total_mb, reading.used_mb) == (24_576 * len(indexes), sum(4096 * (index + 1) for index in indexes))
    assert reading.total_mb > 0


@pytest.mark.parametrize("defines", [("WITH_V3",), ("WITH_V2",), ("WITH_V1",), WHOLE])
def test_gpu_memory_of_a_tree_is_found_whatever_lists_the_driver_has(
    look: Look, start: Start, defines: tuple[str, ...]
) -> None:
    engine, child = start(ORPHAN)
    # The engine uses both GPUs, its child one of them for computing and drawing, which is one amount and not two.
    listed = f"0:c:{engine.pid}:1000,1:c:{engine.pid}:500,1:c:{child}:200,1:g:{child}:200,0:c:{os.getpid()}:4000"
    tree = look(defines, engine.pid, FAKE_NVML_PROCESSES=listed).tree
    assert (set(tree.pids), tree.gpu_bytes) == ({engine.pid, child}, 1700 * MIB)
    assert look(defines, engine.pid, FAKE_NVML_PROCESSES=f"0:c:{engine.pid}:-1").tree.gpu_bytes is None, "it does not tell"


def test_a_driver_that_refuses_everything_or_does_not_start_leaves_the_host_to_judge_by(look: Look) -> None:
    printed = look(("BARE",), os.getpid())
    assert printed.reading.gpus == [
        GpuInfo(index=index, name=f"GPU {index}", gpu_id=GPU_IDS[index], vendor="nvidia") for index in (0, 1)
    ]
    assert (printed.reading.kind, printed.tree.gpu_bytes) == ("host", None)
    printed = look(("WITH_V3",), os.getpid(), FAKE_NVML_BROKEN="1")
    assert (printed.reading.gpus, printed.reading.kind, printed.tree.gpu_bytes) == ([], "host", None)
