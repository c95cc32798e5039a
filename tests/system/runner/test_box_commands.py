"""Commands of gateways over engines that a test holds up: who is told what, how often, and what is done how often."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from runner.definitions.plan import Progress
from runner.errors import EngineError
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.governed import Desk, Ear, desk_of
from tests.fakes.runners.parts import assembled
from tests.fakes.waiting import eventually
from wire.bridge import OpCommand, OpQuery, OpStatus
from wire.ids import new_uuid7
from wire.optoken.approval import read_statement
from wire.optoken.documents import digest_result, read_receipt
from wire.optoken.op_token import read_token

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_of(tmp_path) as made:
        yield made


async def test_every_gateway_that_sent_or_asked_hears_the_end_and_the_engine_loads_once(desk: Desk) -> None:
    desk.hold_loads()
    first, second, third = Ear(), Ear(), Ear()
    command = desk.command(modelId="a")
    desk.commands.take(command, first)
    desk.commands.take(desk.command(op_id=command.op_id, modelId="a"), second)
    await desk.loading()
    desk.commands.query(OpQuery(op_id=command.op_id, use=1), third)
    assert [ear.last.state for ear in (second, third)] == ["running", "running"]
    desk.bench.engines[0].may_load.set()
    done = await first.end()
    assert (done.state, await second.end(), await third.end()) == ("succeeded", done, done)
    assert read_receipt(done.receipt, desk.public_key).outcome == "succeeded"
    assert len(desk.bench.engines) == 1


async def test_the_token_of_a_command_and_its_statement_are_read_once(desk: Desk) -> None:
    read: list[str] = []
    names = {read_token.__code__: "token", read_statement.__code__: "statement"}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in names:
            read.append(names[frame.f_code])

    ear, command = Ear(), desk.command(modelId="a", keepLoaded=True)
    sys.setprofile(note)
    try:
        desk.commands.take(command, ear)
        assert (await ear.end()).state == "succeeded"
    finally:
        sys.setprofile(None)
    assert sorted(read) == ["statement", "token"]


@pytest.mark.parametrize("gap_s", [0.05, 3600.0])
async def test_a_stage_is_told_at_once_and_progress_within_it_after_a_pause(desk: Desk, gap_s: float) -> None:
    set_runner_limits(operations={"status_gap_s": gap_s})
    desk.hold_loads()
    ear, began, steps = Ear(), time.monotonic(), itertools.count(1)
    desk.commands.take(desk.command(modelId="a"), ear)
    await desk.loading()
    await ear.hear_stage("loading")
    report = desk.bench.engines[0].report
    assert report is not None

    def told() -> list[float]:
        report(Progress("loading", next(steps) / 1e6))
        return [at for at, status in ear.heard if status.stage == "loading"]

    if gap_s < 1:
        await eventually(lambda: len(told()) >= 3, "progress is told twice more")
        # Two pauses since the first. A pause counts from before a status is sent, which may come late to the ear.
        assert told()[2] - began >= 2 * gap_s
    for stage in ("warming up", "settling"):
        report(Progress(stage, 0.9))
        await ear.hear_stage(stage)
    desk.bench.engines[0].may_load.set()
    assert (await ear.end()).state == "succeeded"


async def test_following_ends_at_once_also_when_news_and_the_end_come_together(desk: Desk) -> None:
    desk.hold_loads()
    ear = Ear()
    desk.commands.take(desk.command(modelId="a"), ear)
    await desk.loading()
    await eventually(lambda: ear.heard and ear.last.stage == "loading", "the load is followed")
    report = desk.bench.engines[0].report
    assert report is not None
    report(Progress("loading", 0.8))
    async with asyncio.timeout(30):
        await desk.commands.close()


async def test_two_approvals_of_one_load_share_it_each_with_its_receipt_and_whether_it_is_kept(desk: Desk) -> None:
    desk.hold_loads()
    ears = [Ear(), Ear()]
    kept: tuple[dict[str, Any], ...] = ({}, {"keepLoaded": True})
    for ear, keep in zip(ears, kept, strict=True):
        desk.commands.take(desk.command(modelId="a", **keep), ear)
        await ear.hear_stage("loading")
    desk.bench.engines[0].may_load.set()
    ends = [await ear.end() for ear in ears]
    assert [(end.state, end.result.get("keptLoaded")) for end in ends] == [("succeeded", None), ("succeeded", True)]
    assert {read_receipt(end.receipt, desk.public_key).op_id for end in ends} == {end.op_id for end in ends}
    assert (len(desk.bench.engines), await names_in(desk)) == (1, ["a"])


async def test_a_model_that_is_loaded_already_can_be_kept_and_replaced_and_a_failed_load_is_certified(desk: Desk) -> None:
    assert (await hear(desk, modelId="a")).state == "succeeded"
    assert await names_in(desk) == []
    done = await hear(desk, modelId="a", keepLoaded=True)
    assert (done.state, done.result["alreadyLoaded"], done.result["keptLoaded"]) == ("succeeded", True, True)
    assert (await names_in(desk), len(desk.bench.engines)) == (["a"], 1)
    desk.bench.engines[0].refuses_unload = EngineError("it stays")
    assert (await hear(desk, modelId="b", evictModel="a", keepLoaded=True)).state == "failed"
    assert await names_in(desk) == ["a"], "it was not unloaded"
    desk.bench.engines[0].refuses_unload = None
    assert (await hear(desk, modelId="a", keepLoaded=True)).state == "succeeded"
    done = await hear(desk, modelId="b", evictModel="a", keepLoaded=True)
    assert (done.state, done.result["evicted"], await names_in(desk)) == ("succeeded", "a", ["b"])
    desk.bench.prepare = lambda engine: setattr(engine, "fails", EngineError("out of memory"))
    end = await hear(desk, modelId="a", evictModel="b", keepLoaded=True)
    assert (end.state, end.code, "out of memory" in end.message) == ("failed", "model_load_failed", True)
    assert (read_receipt(end.receipt, desk.public_key).outcome, await names_in(desk)) == ("failed", [])


async def test_more_commands_than_can_be_followed_are_refused_until_one_has_ended(desk: Desk) -> None:
    set_runner_limits(operations={"tracked": 1})
    desk.hold_loads()
    first, second = Ear(), Ear()
    desk.commands.take(desk.command(modelId="a"), first)
    late = desk.command(modelId="b")
    desk.commands.take(late, second)
    assert (second.last.state, second.last.code) == ("refused", "unavailable")
    await desk.loading()
    desk.bench.engines[0].may_load.set()
    done = await first.end()
    desk.bench.prepare = lambda _engine: None
    second.heard.clear()
    desk.commands.take(late, second)
    assert (await second.end()).state == "succeeded"
    asked = Ear()
    desk.commands.query(OpQuery(op_id=done.op_id, use=1), asked)
    assert await asked.end() == done, "what is followed no more stands in the ledger"


async def test_a_node_that_leaves_or_cannot_read_its_ledger_refuses_so_that_another_try_is_worth_it(desk: Desk) -> None:
    command, asked = desk.command(modelId="a"), Ear()
    desk.operations.is_stopping = True
    desk.commands.take(command, ear := Ear())
    assert ((await ear.end()).state, ear.last.code) == ("refused", "unavailable")
    assert await desk.parts.ledger.find_op(command.op_id, 1) is None
    await desk.parts.ledger.close()
    desk.commands.query(OpQuery(op_id="op-1", use=1), asked)
    desk.commands.take(desk.command(modelId="a"), ear := Ear())
    assert ((await ear.end()).state, ear.last.code) == ("refused", "unavailable")
    assert (asked.heard, desk.bench.engines) == ([], [])


async def test_a_command_that_was_refused_for_its_token_is_carried_out_with_a_better_one(desk: Desk) -> None:
    command = desk.command(modelId="a")
    desk.commands.take(msgspec.structs.replace(command, token=desk.command("cache-flush", scope="all").token), ear := Ear())
    assert ((await ear.end()).state, ear.last.code) == ("refused", "op_token_refused")
    desk.commands.take(command, ear := Ear())
    assert (await ear.end()).state == "succeeded"


async def test_what_had_begun_when_the_ledger_broke_is_not_told_as_refused(desk: Desk) -> None:
    assert (await hear(desk, modelId="a")).state == "succeeded"
    engine = desk.bench.engines[0]
    engine.refuses_unload = EngineError("it stays")
    engine.may_unload.clear()
    desk.commands.take(desk.command("model-unload", modelId="a"), ear := Ear())
    await eventually(lambda: "unload" in engine.steps, "the unload is at it")
    await desk.parts.ledger.close()
    engine.may_unload.set()
    assert (await ear.end()).state == "failed"


async def test_an_operation_goes_on_when_whoever_brought_it_leaves(desk: Desk) -> None:
    assert (await hear(desk, modelId="a")).state == "succeeded"
    engine = desk.bench.engines[0]
    engine.may_flush.clear()
    command = desk.command("cache-flush", scope="all")
    desk.commands.take(command, Ear())
    await eventually(lambda: "flush" in engine.steps, "the flush is at it")
    await desk.commands.close()
    engine.may_flush.set()

    async def outcome() -> object:
        row = await desk.parts.ledger.find_op(command.op_id, 1)
        return None if row is None or row.outcome is None else row.outcome["state"]

    assert await eventually(outcome, "its end is in the ledger") == "succeeded"


async def test_an_approved_reload_tells_what_may_be_loaded_now_and_never_touches_what_is(desk: Desk, tmp_path: Path) -> None:
    settings = tmp_path / "data" / "settings.json"

    def write(**models: dict[str, object]) -> None:
        settings.write_bytes(msgspec.json.encode({"engine": {"backend": "gguf", "models": models}}))

    async def reload(**body: Any) -> OpStatus:
        desk.commands.take(desk.command("settings-reload", **body), ear := Ear())
        return await ear.end()

    write(one={"model_path": "a"}, two={"model_path": "a"})
    first = await reload()
    assert (first.state, first.result["added_models"]) == ("succeeded", ["one", "two"])
    desk.commands.take(desk.command(modelId="two"), ear := Ear())
    assert (await ear.end()).state == "succeeded"
    write(one={"model_path": "a", "gguf_n_ctx": 512}, two={"model_path": "a"}, three={"model_path": "a"})
    second = await reload()
    assert second.result == {
        "added_models": ["three"], "removed_models": [], "updated_models": ["one"], "unchanged_models": ["two"],
        "service_restart_required": False,
    }  # fmt: skip
    receipt = read_receipt(second.receipt, desk.public_key)
    assert (receipt.operation, receipt.outcome, receipt.result_digest) == (
        "settings-reload", "succeeded", digest_result(second.result),
    )  # fmt: skip
    write(three={"model_path": "a"})
    conflict = await reload()
    assert (conflict.state, conflict.code) == ("failed", "settings_reload_conflict")
    assert "loaded models would change: engine.models.two; unload them first" in conflict.message
    assert read_receipt(conflict.receipt, desk.public_key).outcome == "failed"
    settings.write_text("{ no json", encoding="utf-8")
    assert (await reload()).code == "invalid_settings"
    assert {"one", "two", "three"} <= set(desk.parts.settings.models)
    assert next(model for model in desk.parts.pool.registry.models if model.model_id == "two").is_ready
    named = await reload(modelId="one")
    assert (named.state, named.code, named.receipt) == ("refused", "invalid_request", "")


async def test_a_reload_that_nobody_approved_reads_nothing(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "data" / "settings.json").write_text('{"engine": {"backend": "gguf", "models": {"one": {}}}}')
    for token in (desk.command("cache-flush", scope="all").token, desk.command("settings-reload", scope="all").token, "{}"):
        command = OpCommand(op_id=new_uuid7().hex, use=1, operation="settings-reload", body={}, token=token)
        desk.commands.take(command, ear := Ear())
        assert ((await ear.end()).state, ear.last.code) == ("refused", "op_token_refused")
    assert not desk.parts.settings.models


async def test_of_two_reloads_at_once_the_settings_that_were_read_last_are_in_force(tmp_path: Path) -> None:
    settings, newer = tmp_path / "settings.json", tmp_path / "newer.json"
    settings.write_text("{}")
    newer.write_text('{"engine": {"models": {"new": {"backend": "gguf", "model_path": "a"}}}}')
    async with assembled(tmp_path, LLM_POOL_SETTINGS_PATH=str(settings)) as parts:
        settings.unlink()
        os.mkfifo(settings)
        first = asyncio.create_task(parts.reload_settings())
        writer = await asyncio.to_thread(settings.open, "w")  # the first has the file open from here on
        newer.replace(settings)
        second = asyncio.create_task(parts.reload_settings())
        await asyncio.wait({second}, timeout=0.05)
        writer.write("{}")
        writer.close()
        await asyncio.gather(first, second)
        assert list(parts.settings.models) == ["new"]


async def hear(desk: Desk, operation: str = "model-load", **body: Any) -> OpStatus:
    ear = Ear()
    desk.commands.take(desk.command(operation, **body), ear)
    return await ear.end()


async def names_in(desk: Desk) -> list[str]:
    return [model.model_id for model in await desk.parts.ledger.read_desired()]


async def test_what_cannot_be_written_down_is_not_said_to_be_kept(desk: Desk) -> None:
    await desk.parts.ledger._run(
        lambda db: (
            db.execute(
                "CREATE TRIGGER full_disk BEFORE INSERT ON desired_models BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            ).rowcount
        )
    )
    done = await hear(desk, modelId="a", keepLoaded=True)
    assert await names_in(desk) == []
    assert (done.state, "keptLoaded" in done.result) == ("succeeded", False)
    receipt = read_receipt(done.receipt, desk.public_key)
    assert receipt.result_digest == digest_result(done.result)


async def test_a_load_over_nodes_that_this_node_cannot_take_part_in_spends_no_token(tmp_path: Path) -> None:
    async with desk_of(tmp_path, "--cluster-address", "10.0.0.1:8070") as desk:
        identity = desk.parts.governance.identity
        assert identity is not None
        assert desk.told.cluster_address == "10.0.0.1:8070"
        own = {"node": identity.certified_id, "address": "10.0.0.1:8070", "gpus": [0]}
        other = {"node": "other#key", "address": "10.0.0.2:8070", "gpus": [0]}
        cases: list[tuple[dict[str, Any], str]] = [
            ({"members": [other, {**other, "node": "third#key"}]}, "members does not name this node"),
            ({"members": [own]}, "must name 2 to 16 nodes"), ({"members": [own, other, other]}, "each once"),
            ({"members": [own, {**other, "gpus": [0, 1]}]}, "as many GPUs as the others"),
            ({"members": [{**own, "address": "10.0.0.9:1"}, other]}, "whose cluster address is 10.0.0.1:8070"),
            ({"members": [own, {**other, "address": "nowhere"}]}, "'nowhere' is no HOST:PORT"),
            ({"members": [own, other], "keepLoaded": True}, "cannot go together with keepLoaded"),
            ({"members": [own, other], "gpus": [0]}, "cannot go together with keepLoaded and gpus"),
            ({"members": [{**own, "role": "head"}, other]}, "cannot be used"),
        ]  # fmt: skip
        for body, words in cases:
            ear = Ear()
            desk.commands.take(desk.command(modelId="a", **body), ear)
            end = await ear.end()
            assert (end.state, words in end.message) == ("refused", True), end
        # Let in, since all of it was approved; that it runs on another engine is the node's own word, and signed.
        ear = Ear()
        desk.commands.take(desk.command(modelId="a", members=[own, other]), ear)
        end = await ear.end()
        assert (end.state, "a runs on gguf; only vLLM spreads a replica over nodes" in end.message) == ("failed", True), end
        assert read_receipt(end.receipt, desk.public_key).outcome == "failed"
        assert desk.bench.engines == []


async def test_a_node_without_a_cluster_address_says_so(desk: Desk) -> None:
    identity = desk.parts.governance.identity
    assert identity is not None
    members = [
        {"node": identity.certified_id, "address": "10.0.0.1:1", "gpus": [0]},
        {"node": "o#k", "address": "10.0.0.2:1", "gpus": [0]},
    ]
    ear = Ear()
    desk.commands.take(desk.command(modelId="a", members=members), ear)
    assert "was not given; start it with --cluster-address" in (await ear.end()).message
