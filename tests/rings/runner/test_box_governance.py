"""A real node of level L2: enrolment, approved operations with receipts, refusals, kills, and the same on its own HTTP port."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from runner.ledger.ledger import INTERRUPTED, Ledger, RunState
from runner.operations import trust
from runner.operations.keys import OP_KEYS_NAME, OpKeys, load_identity
from runner.operations.trust import FORGOTTEN, WAITING
from tests.fakes.audit_logs import FORK, LOG, checkpoint_of, offer_of
from tests.fakes.ledgers import begin_op, spend
from tests.fakes.policies import Fleet, Issuer
from tests.fakes.runners.governed import Control, enrol, options_of
from tests.fakes.runners.process import ApiBox, run_api_box, run_box
from tests.fakes.scripted_gateway import ConnectedBox, run_gateway
from tests.fakes.waiting import DEADLINE_S, eventually
from wire import bridge
from wire.auditlog import to_bytes, verify_signature
from wire.ids import new_uuid7
from wire.optoken.approval import decode_bytes
from wire.optoken.documents import digest_result, read_receipt
from wire.optoken.op_token import owns_runner_id

pytestmark = pytest.mark.timeout(180)


async def test_a_new_box_is_enrolled_by_a_person_and_then_follows_rotations_keys_and_checkpoints(tmp_path: Path) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    data = str(tmp_path / "data")
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, *options, env=env):
        box = await gateway.accept()
        control = Control(box, fleet)
        told = control.governance
        assert (told.level, told.policy_version, told.witness_size, len(told.op_keys)) == ("L2", 0, 0, 1)
        assert told.reloads_settings
        assert told.runner_id.startswith("box-under-test#")
        assert owns_runner_id(told.runner_id, decode_bytes(told.public_key))
        # Nobody has confirmed anything: neither policy nor token counts.
        await box.send(bridge.PolicyOffer(policies=fleet.links))
        waiting = (await control.report(skip=0)).governance
        assert (waiting.policy_version, waiting.policy_error) == (0, WAITING)
        await box.send(offer_of(LOG[:5]))
        assert (await control.report(skip=1)).witness_signature == ""
        early = await control.carry_out(control.command("model-load", {"modelId": "a"}))
        assert (early.state, early.code, early.receipt) == ("refused", "op_token_refused", "")
        # A person confirms on the node; it notices by itself.
        assert await asyncio.to_thread(trust.main, [fleet.words, "--data", data]) == 0
        pinned = (await control.report(skip=2)).governance
        assert (pinned.policy_version, pinned.policy_sha256, pinned.policy_error) == (1, fleet.policy.ref.sha256, "")
        held = control.command("model-load", {"modelId": "b"})
        fleet.add_policy()
        await box.send(bridge.PolicyOffer(policies=fleet.links[1:]))
        assert (await control.report(skip=3)).governance.policy_version == 2
        assert (await control.carry_out(held)).code == "op_token_refused", "approved under the version before"
        # It witnesses growth and nothing else.
        await box.send(msgspec.structs.replace(offer_of(LOG[:5]), wants_name=True))
        seen = await control.report(skip=4)
        signed = checkpoint_of(LOG[:5]).witness_message(told.runner_id)
        assert verify_signature(decode_bytes(told.public_key), signed, to_bytes(seen.witness_signature))
        await box.send(offer_of(FORK, old=5))
        alarm = await control.report(skip=5)
        assert ("does not extend" in alarm.witness_alarm, alarm.governance.witness_size) == (True, 5)
        # Keys overlap.
        assert await asyncio.to_thread(trust.main, ["--renew-key", "--data", data]) == 0
        renewed = (await control.report(skip=6)).governance
        assert next(iter(renewed.op_keys)) == control.issuer.kid
        assert len(renewed.op_keys) == 2
        assert (await control.carry_out(control.command("cache-flush", {"scope": "all"}))).state == "succeeded"
        fence, control.issuer = control.issuer.fence, Issuer.of(fleet, renewed)
        control.issuer.fence = fence
        assert (await control.carry_out(control.command("cache-flush", {"scope": "all"}))).state == "succeeded"
        # The owner starts anew.
        assert await asyncio.to_thread(trust.main, ["--forget", "--data", data]) == 0
        gone = (await control.report(skip=7)).governance
        assert (gone.policy_version, gone.witness_size, gone.policy_error) == (0, 0, FORGOTTEN)
        assert (await control.carry_out(control.command("cache-flush", {"scope": "all"}))).code == "op_token_refused"


ENDS = {
    "before booking": "unknown", "after booking": "interrupted", "after task": "interrupted", "before outcome": "interrupted",
    "after outcome": "succeeded",
}  # fmt: skip
"""What the node says of an approved load after it was killed there: booked, its task begun, loaded, its outcome recorded."""


@pytest.mark.parametrize("point", list(ENDS))
async def test_a_load_whose_box_is_killed_is_done_once_at_most(tmp_path: Path, point: str) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    dying = {**env, "DIE_AT": point}
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env=dying, program=DYING) as process:
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
            assert process.log_text().count('"repeated":false') == (found.state == "unknown")


@dataclass
class Enrolled:
    """A node that follows the policy of ``issuer``'s fleet."""

    box: ApiBox
    issuer: Issuer
    data: Path


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enrolled]:
    folder, fleet = tmp_path_factory.mktemp("enrolled"), Fleet()
    asyncio.run(enrol(folder / "data", fleet))
    with run_api_box(folder, "--name", "attic", models=("a",), has_op_key=False) as box:
        runner_id = box.client.get("/v1/capabilities").json()["runnerId"]
        ((kid, key),) = OpKeys(folder / "data" / OP_KEYS_NAME).read().items()
        yield Enrolled(box, Issuer(fleet, runner_id, kid, key), folder / "data")


def test_a_load_and_an_unload_carry_receipts_and_say_the_same_when_repeated(enrolled: Enrolled) -> None:
    box, issuer = enrolled.box, enrolled.issuer
    public_key = load_identity(enrolled.data, "attic").public_key

    def post(path: str, operation: str, params: dict[str, object], **changes: Any) -> httpx.Response:
        return box.client.post(path, json={**params, "verifiedOpToken": issuer.token(operation, params, **changes)})

    model: dict[str, object] = {"modelId": "a"}
    op_id = new_uuid7().hex
    done = box.finish_load(post("/v1/models/load", "model-load", model, op_id=op_id))
    receipt = str(done.pop("receipt"))
    read = read_receipt(receipt, public_key)
    assert (done["status"], read.outcome, read.result_digest) == ("completed", "succeeded", digest_result(done))
    assert post("/v1/models/load", "model-load", model, op_id=op_id).json() == {**done, "receipt": receipt, "repeated": True}
    gone = post("/v1/models/unload", "model-unload", model).json()
    signed = read_receipt(gone.pop("receipt"), public_key)
    assert signed.result_digest == digest_result(gone)
    answer = post("/v1/cache/flush", "cache-flush", {"scope": "all"}).json()
    assert read_receipt(answer["receipt"], public_key).operation == "cache-flush"


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
            asked = await second.box.open({"model": "a", "messages": [{"role": "user", "content": "x"}]}, model="a")
            assert (await asked.finish()).status == 200
            await eventually(lambda: (found := replica_of(second.box, "a")) and found.kept, "the node says that it is kept")
            # It was no new run: the operation has its one outcome, its one receipt, and its token is still spent.
            assert await second.query(load.op_id) == kept
            assert await second.carry_out(load) == kept
            assert '"repeated":false' not in process.log_text()
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


DYING = "tests.fakes.runners.process"


ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import asyncio, sys, time
from pathlib import Path
from runner.ledger.ledger import Ledger, OpOrder

async def main():
    ledger = await Ledger.open(Path(sys.argv[1]))
    now = time.time()
    load = await ledger.start_load("load-1", run_id=None, model_id="m", stage="waiting")
    await ledger.save_progress(load, "reading weights", 0.5)
    order = OpOrder(op_key="op-1", approval_id="op-1", slot="model:m", fence=7, expires_at=now + 300)
    spent = await ledger.spend_nonce("n-op", expires_at=now + 300)
    await ledger.begin_op(spent.run_id, order)
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
        again = [await spend(ledger, f"n-{number}", expires_at=time.time() + 300) for number in range(last + 1)]
        assert not any(again)
        assert await spend(ledger, f"n-{last + 2}", expires_at=time.time() + 300)
        load = await ledger.find_load("load-1")
        assert load is not None
        assert (load.state, load.stage) == (RunState.INTERRUPTED, "reading weights")
        assert await begin_op(ledger, "op-1", slot="model:m", fence=8, expires_at=time.time() + 300) == INTERRUPTED
        assert not await spend(ledger, "n-op", expires_at=time.time() + 300)
        assert (await ledger.abandon_costs(), await ledger.spent("t", "2026-11")) == (1, 100)
    finally:
        await ledger.close()
