"""What the ledger has confirmed is still there after kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runner.ledger import Ledger, OpAlreadyDone, TaskState, approvals

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 30.0
PROGRAM = """
import asyncio, sys, time
from pathlib import Path
from runner.ledger import Ledger, TaskRow, TaskState

async def main():
    ledger = await Ledger.open(Path(sys.argv[1]))
    now = time.time()
    await ledger.save_task(TaskRow("load-1", "m", TaskState.LOADING, "reading weights", 0.5, now))
    await ledger.begin_op("op-1", slot="model:m", fence=7, max_uses=1, expires_at=now + 300)
    await ledger.reserve_cost(tenant="t", model_id="m", month="2026-11", amount_micros=100, cap_micros=None)
    number = 0
    while await ledger.spend_nonce(f"n-{number}", expires_at=now + 300):
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        number += 1

asyncio.run(main())
"""


@asynccontextmanager
async def spending(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that spends nonce after nonce and names each once the ledger has confirmed it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PROGRAM, str(directory),
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def kill_after(process: asyncio.subprocess.Process, confirmed: int) -> int:
    """Kill the process when it has confirmed so many nonces; return the number of the last confirmed one."""
    assert process.stdout is not None
    for _ in range(confirmed):
        await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    process.send_signal(signal.SIGKILL)
    rest = await asyncio.wait_for(process.stdout.read(), DEADLINE_S)
    await process.wait()
    # The last line may have been cut by the kill.
    return confirmed - 1 + rest.count(b"\n")


async def test_nothing_that_was_confirmed_is_forgotten_by_a_kill(tmp_path: Path) -> None:
    async with spending(tmp_path) as process:
        last = await kill_after(process, 25)
    assert process.returncode == -signal.SIGKILL
    ledger = await Ledger.open(tmp_path)
    try:
        assert not ledger.is_new
        again = [await ledger.spend_nonce(f"n-{number}", expires_at=time.time() + 300) for number in range(last + 1)]
        assert not any(again)
        assert await ledger.spend_nonce(f"n-{last + 2}", expires_at=time.time() + 300)
    finally:
        await ledger.close()


async def test_a_start_after_a_kill_finds_what_was_under_way(tmp_path: Path) -> None:
    async with spending(tmp_path) as process:
        await kill_after(process, 1)
    ledger = await Ledger.open(tmp_path)
    try:
        (task,) = await ledger.interrupt_tasks(time.time())
        assert (task.task_id, task.state, task.stage) == ("load-1", TaskState.INTERRUPTED, "reading weights")
        begun = await ledger.begin_op("op-1", slot="model:m", fence=8, max_uses=1, expires_at=time.time() + 300)
        assert begun == OpAlreadyDone(approvals.INTERRUPTED)
        assert await ledger.abandon_costs() == 1
        assert await ledger.spent("t", "2026-11") == 100
    finally:
        await ledger.close()
