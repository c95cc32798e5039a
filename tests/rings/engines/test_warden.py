"""The warden of servers with workers: whoever dies first, nobody is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.engines.suite import assert_gone
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
