"""kill -9 at named points of an operation: it is done once at most, and afterwards the box says truly how it ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fakes.approvals import Fleet
from tests.fakes.runners.governed import Control, enrol, options_of
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import run_gateway

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

ENDS = {
    "before booking": "unknown",
    "after booking": "interrupted",
    "after task": "interrupted",
    "before outcome": "interrupted",
    "after outcome": "succeeded",
}
"""What the box says of an approved load after it was killed there: booked, its task begun, loaded, its outcome recorded."""


@pytest.mark.parametrize("point", list(ENDS))
async def test_a_load_whose_box_is_killed_is_done_once_at_most(tmp_path: Path, point: str) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    dying = {**env, "DIE_AT": point}
    program = "tests.fakes.runners.dying_runner"
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env=dying, program=program) as process:
            first = Control(await gateway.accept(), fleet)
            load = first.command("model-load", {"modelId": "a"})
            await first.box.send(load)
            assert await process.exit_status() == -signal.SIGKILL
        async with run_box(tmp_path, gateway.url, *options, env=env) as process:
            control = Control(await gateway.accept(), fleet)
            assert control.governance.runner_id == first.governance.runner_id
            control.issuer.fence = first.issuer.fence
            found = await control.query(load.op_id)
            assert found.state == ENDS[point]
            if found.state == "unknown":
                replayed = await control.carry_out(load)
                assert (replayed.state, replayed.code) == ("refused", "op_token_refused"), "its nonce was spent"
            else:
                receipt = control.read(found)
                assert receipt.started_at <= receipt.ended_at
                assert await control.carry_out(load) == found
            if found.state == "interrupted":
                assert (found.result["state"], found.result["loaded"]) == ("unloaded", [])

            # The same approval under a fresh token: carried out where it never was, told otherwise.
            again = await control.carry_out(control.command("model-load", {"modelId": "a"}, op_id=load.op_id))
            if found.state == "unknown":
                assert again.state == "succeeded"
                assert control.box.models() == ["a"]
            else:
                assert again == found
                assert control.box.models() == []
            assert process.log_text().count("repeated=False") == (found.state == "unknown")
