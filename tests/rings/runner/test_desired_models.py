"""Approved loads that stay: over kills and restarts of a real runner, with one receipt, until an unload is approved."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from runner.errors import EngineError
from runner.ledger import Ledger
from tests.fakes.approvals import Fleet
from tests.fakes.runners.governed import Control, Desk, Ear, desk_of, enrol, options_of
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import ConnectedBox, run_gateway
from tests.fakes.waiting import eventually
from wire import bridge
from wire.optoken.receipt import digest_result, read_receipt

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


@pytest.mark.parametrize("point", ["before outcome", "after outcome"])
async def test_a_load_is_kept_from_the_moment_its_outcome_is_on_disk(tmp_path: Path, point: str) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env={**env, "DIE_AT": point}, program=DYING) as process:
            first = Control(await gateway.accept(), fleet)
            load = first.command("model-load", KEEP)
            await first.box.send(load)
            assert await process.exit_status() == -signal.SIGKILL
        async with run_box(tmp_path, gateway.url, *options, env=env):
            control = Control(await gateway.accept(), fleet)
            found = await control.query(load.op_id)
            if point == "after outcome":
                assert (found.state, found.result["keptLoaded"]) == ("succeeded", True)
                await control.box.declares("a")
            else:
                assert (found.state, control.box.models()) == ("interrupted", [])
                assert replica_of(control.box, "a") is None


async def test_a_kept_model_whose_files_are_gone_is_told_as_failed_and_can_be_unloaded(tmp_path: Path) -> None:
    fleet, (options, env) = Fleet(), options_of(tmp_path)
    await enrol(tmp_path / "data", fleet)
    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, *options, env=env):
            first = Control(await gateway.accept(), fleet)
            assert (await first.carry_out(first.command("model-load", KEEP))).state == "succeeded"
            assert (
                await first.carry_out(first.command("model-load", {"modelId": "b", "keepLoaded": True}))
            ).state == "succeeded"
        (tmp_path / "models" / "a.gguf").unlink()
        async with run_box(tmp_path, gateway.url, *options, env=env):
            control = follow(Control(await gateway.accept(), fleet), first)
            await control.box.declares("b")
            await eventually(
                lambda: (said := replica_of(control.box, "a")) and "attempt 1 of 4 failed" in said.detail, "the reason is told"
            )
            said = replica_of(control.box, "a")
            assert said is not None
            assert (said.state, said.kept) == ("failed", True)
            assert "There is no model 'a'" in said.detail
            gone = await control.carry_out(control.command("model-unload", {"modelId": "a"}))
            assert (gone.state, gone.result["wasLoaded"]) == ("succeeded", False)
            await eventually(lambda: replica_of(control.box, "a") is None, "nobody waits for it any more")


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


async def hear(desk: Desk, operation: str = "model-load", **body: Any) -> bridge.OpStatus:
    ear = Ear()
    desk.commands.take(desk.command(operation, **body), ear)
    return await ear.end()


async def names_in(desk: Desk) -> list[str]:
    return [model.model_id for model in await desk.parts.ledger.read_desired()]


async def test_a_load_that_replaces_a_kept_model_takes_its_place(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        assert (await hear(desk, **KEEP)).state == "succeeded"
        done = await hear(desk, modelId="b", evictModel="a", keepLoaded=True)
        assert (done.state, done.result["evicted"]) == ("succeeded", "a")
        assert await names_in(desk) == ["b"]


@pytest.mark.parametrize(("loads", "left"), [(False, []), (True, ["a"])], ids=["after it was unloaded", "before"])
async def test_a_replacement_that_fails_ends_the_other_only_if_it_was_unloaded(
    tmp_path: Path, loads: bool, left: list[str]
) -> None:
    async with desk_of(tmp_path) as desk:
        assert (await hear(desk, **KEEP)).state == "succeeded"
        if loads:
            desk.bench.engines[0].refuses_unload = desk.bench.engines[0].fails = EngineError("no")
        else:
            desk.bench.prepare = lambda engine: setattr(engine, "fails", EngineError("broken"))
        failed = await hear(desk, modelId="b", evictModel="a", keepLoaded=True)
        assert failed.state == "failed"
        assert await names_in(desk) == left
        desk.bench.engines[0].refuses_unload = None


async def test_a_model_that_is_loaded_already_can_be_kept_from_now_on(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        assert (await hear(desk, modelId="a")).state == "succeeded"
        assert await names_in(desk) == []
        done = await hear(desk, **KEEP)
        assert (done.state, done.result["alreadyLoaded"], done.result["keptLoaded"]) == ("succeeded", True, True)
        assert (await names_in(desk), len(desk.bench.engines)) == (["a"], 1)


async def test_two_approvals_of_one_load_differ_in_whether_it_is_kept(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        desk.hold_loads()
        ears = [Ear(), Ear()]
        desk.commands.take(desk.command(modelId="a"), ears[0])
        await desk.loading()
        desk.commands.take(desk.command(**KEEP), ears[1])
        await ears[1].hear_stage("loading")
        desk.bench.engines[0].may_load.set()
        ends = [await ear.end() for ear in ears]
        assert [end.result.get("keptLoaded") for end in ends] == [None, True]
        assert await names_in(desk) == ["a"]


async def test_what_cannot_be_written_down_is_not_said_to_be_kept(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        await desk.parts.ledger._run(
            lambda db: (
                db.execute(
                    "CREATE TRIGGER full_disk BEFORE INSERT ON desired_models BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
                ).rowcount
            )
        )
        done = await hear(desk, **KEEP)
        assert await names_in(desk) == []
        assert (done.state, "keptLoaded" in done.result) == ("succeeded", False)
        receipt = read_receipt(done.receipt, desk.public_key)
        assert receipt.result_digest == digest_result(done.result)
