"""Starting the real runner, and looking at processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.fakes.scripted_gateway import DEADLINE_S, TOKEN
from tests.fakes.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
PATIENT = "tests.fakes.runners.patient_runner"
"""The runner for tests of what its first registration says of its models."""


class RunningBox:
    """A runner process and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def children(self) -> list[psutil.Process]:
        """The engine processes it has now."""
        try:
            return psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@asynccontextmanager
async def run_box(
    tmp_path: Path, gateway: str, *options: str, env: dict[str, str] | None = None, program: str = "runner"
) -> AsyncIterator[RunningBox]:
    """Start ``python -m runner`` against a gateway; kill it at the end if the test has not stopped it."""
    log = tmp_path / f"runner-{time.monotonic_ns()}.log"
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    surroundings |= {"MUSTER_TOKEN": TOKEN, "MUSTER_RECONNECT_MAX_S": "0.5", "PYTHONPATH": str(ROOT)} | (env or {})
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-m", program, "--gateway", gateway, "--name", "box-under-test", *options,
            env=surroundings, stdout=sink, stderr=sink,
        )  # fmt: skip
    box = RunningBox(process, log)
    try:
        yield box
    finally:
        children = box.children()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await eventually(lambda: not any(is_alive(child) for child in children), "the engine process is gone")


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
