"""What a node still knows after a kill or a stop: what its ledger confirmed, and approved loads that stay."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.ledger import Ledger, OpAlreadyDone, TaskState, approvals
from tests.fakes.approvals import Fleet
from tests.fakes.runners.governed import Control, enrol, options_of
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import ConnectedBox, run_gateway
from tests.fakes.waiting import DEADLINE_S, eventually
from wire import bridge

pytestmark = pytest.mark.timeout(180)

DYING = "tests.fakes.runners.altered"
KEEP: dict[str, Any] = {"modelId": "a", "keepLoaded": True}


def replica_of(box: ConnectedBox, model: str) -> bridge.ReplicaInfo | None:
    """The newest that the node said of a model."""
    said = [message for message in box.messages if isinstance(message, bridge.Telemetry)]
    replicas = said[-1].replicas if said else box.register.replicas
    return next((replica for replica in replicas if replica.model == model), None)


def follow(control: Control, earlier: Control) -> Control:
    control.issuer.fence = earlier.issuer.fence
    return control


async def test_a_model_that_is_kept_serves_again_after_a_kill_and_after_a_stop_until_it_is_unloaded(tmp_path: Path) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env=env) as process:
            first = Control(await gateway.accept(), fleet)
            assert first.governance.keeps_models
            load = first.command("model-load", KEEP)
            kept = await first.carry_out(load)
            assert (kept.state, kept.result["keptLoaded"]) == ("succeeded", True)
            assert first.read(kept).outcome == "succeeded"
            other = await first.carry_out(first.command("model-load", {"modelId": "b"}))
            assert (other.state, "keptLoaded" in other.result) == ("succeeded", False)
            process.signal(signal.SIGKILL)
            await process.exit_status()
        async with run_box(tmp_path, gateway.url, *options, env=env) as process:
            second = follow(Control(await gateway.accept(), fleet), first)
            await second.box.declares("a")
            assert (
                await (
                    await second.box.open({"model": "a", "messages": [{"role": "user", "content": "x"}]}, model="a")
                ).finish()
            ).status == 200
            await eventually(lambda: (found := replica_of(second.box, "a")) and found.kept, "the node says that it is kept")
            # It was no new run: the operation has its one outcome, its one receipt, and its token is still spent.
            assert await second.query(load.op_id) == kept
            assert await second.carry_out(load) == kept
            assert "repeated=False" not in process.log_text()
            process.signal(signal.SIGTERM)
            assert await process.exit_status() == 0
        async with run_box(tmp_path, gateway.url, *options, env=env):
            third = follow(Control(await gateway.accept(), fleet), second)
            await third.box.declares("a")
            gone = await third.carry_out(third.command("model-unload", {"modelId": "a"}))
            assert gone.state == "succeeded"
        async with run_box(tmp_path, gateway.url, *options, env=env):
            last = Control(await gateway.accept(), fleet)
            assert (last.box.models(), replica_of(last.box, "a")) == ([], None)


@pytest.mark.parametrize("point", ["after booking", "before outcome", "after outcome"])
async def test_an_unload_whose_runner_is_killed_leaves_nothing_that_loads_again(tmp_path: Path, point: str) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env=env):
            first = Control(await gateway.accept(), fleet)
            assert (await first.carry_out(first.command("model-load", KEEP))).state == "succeeded"
        async with run_box(tmp_path, gateway.url, *options, env={**env, "DIE_AT": point}, program=DYING) as process:
            second = follow(Control(await gateway.accept(), fleet), first)
            await second.box.declares("a")
            unload = second.command("model-unload", {"modelId": "a"})
            await second.box.send(unload)
            assert await process.exit_status() == -signal.SIGKILL
        async with run_box(tmp_path, gateway.url, *options, env=env):
            control = follow(Control(await gateway.accept(), fleet), second)
            found = await control.query(unload.op_id)
            assert found.state == ("succeeded" if point == "after outcome" else "interrupted")
            assert (control.box.models(), replica_of(control.box, "a")) == ([], None)
    ledger = await Ledger.open(tmp_path / "data")
    assert await ledger.read_desired() == []
    await ledger.close()


async def test_a_node_reclaimed_on_the_spot_stays_so_over_a_restart_and_loads_when_it_is_lent(tmp_path: Path) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env=env) as process:
            first = Control(await gateway.accept(), fleet)
            assert (await first.carry_out(first.command("model-load", KEEP))).state == "succeeded"
            process.signal(signal.SIGUSR1)
            assert (await first.box.expect(bridge.ModeChange)).mode == "spare_off"
            process.signal(signal.SIGTERM)
            await process.exit_status()
        async with run_box(tmp_path, gateway.url, *options, env=env) as process:
            second = Control(await gateway.accept(), fleet)
            assert (await second.box.expect(bridge.ModeChange)).mode == "spare_off"
            await eventually(
                lambda: (said := replica_of(second.box, "a")) and said.detail.startswith("the owner took the node back"),
                "the node says why it does not load it",
            )
            assert second.box.models() == []
            process.signal(signal.SIGUSR2)
            await second.box.declares("a")


ROOT = Path(__file__).resolve().parents[3]

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


async def test_nothing_that_was_confirmed_is_forgotten_by_a_kill_and_what_was_under_way_is_found(tmp_path: Path) -> None:
    async with spending(tmp_path) as process:
        last = await kill_after(process, 25)
    assert process.returncode == -signal.SIGKILL
    ledger = await Ledger.open(tmp_path)
    try:
        assert not ledger.is_new
        again = [await ledger.spend_nonce(f"n-{number}", expires_at=time.time() + 300) for number in range(last + 1)]
        assert not any(again)
        assert await ledger.spend_nonce(f"n-{last + 2}", expires_at=time.time() + 300)
        (task,) = await ledger.interrupt_tasks(time.time())
        assert (task.task_id, task.state, task.stage) == ("load-1", TaskState.INTERRUPTED, "reading weights")
        begun = await ledger.begin_op("op-1", slot="model:m", fence=8, max_uses=1, expires_at=time.time() + 300)
        assert begun == OpAlreadyDone(approvals.INTERRUPTED)
        assert (await ledger.abandon_costs(), await ledger.spent("t", "2026-11")) == (1, 100)
    finally:
        await ledger.close()
