"""The gate: keys from files, tokens against the ledger, one text for every refusal."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.config import OperationsConfig
from runner.errors import OperationLimit, OperationsDisabled, OpTokenRefused, Unavailable
from runner.ledger.database import FILE_NAME
from runner.ledger.ledger import INTERRUPTED, Ledger
from runner.operations.gate import LIMIT_REASON, REFUSED, Admitted, Gate, GateRules, OperationRunning
from runner.operations.keys import OpKeys
from runner.operations.trust import Governance
from tests.fakes.ledgers import T0, Clock
from tests.fakes.limits import set_runner_limits
from tests.fakes.policies import Fleet, Issuer
from tests.fakes.runners.governed import MODEL, NOW, PARAMS, admit, l0, l1, opened, write_key
from tests.fakes.signed_tokens import KEY, OTHER_KEY
from wire.optoken.approval import Policy
from wire.optoken.op_token import encode_token, params_digest, sign_jwt
from wire.optoken.verifier import Level, Operation


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "model-api.key")


async def refused(gate: Gate | Door, token: object, caplog: pytest.LogCaptureFixture, **changes: Any) -> str:
    """Return the reason in the log; outside there is none."""
    caplog.clear()
    with caplog.at_level(logging.INFO), pytest.raises(OpTokenRefused) as caught:
        await (gate.admit(token, **changes) if isinstance(gate, Door) else admit(gate, token, **changes))
    assert (str(caught.value), caught.value.status, caught.value.details) == (REFUSED, 403, {})
    assert "nonce-of" not in caplog.text
    return caplog.text.rpartition("reason=")[2].partition("\n")[0]


async def test_a_valid_token_is_admitted_in_every_form(key_file: Path, tmp_path: Path) -> None:
    async with opened(key_file, tmp_path / "data", clock=Clock(T0 + 0.9)) as gate:
        admitted = await admit(gate, l0(issued_at=int(T0)))
        assert (admitted.level, admitted.op_id, admitted.signers, admitted.recorded) == (Level.L0, None, ("a", "b"), None)
        await gate._ledger.finish_op(admitted.run.run_id, {"state": "succeeded"})
        assert (await admit(gate, json.dumps(l0(nonce="second-nonce")))).signers == ("a", "b")
        assert (await admit(gate, encode_token(l1()))).op_id == "op-1"


@pytest.mark.parametrize("level", [Level.L0, Level.L1])
@pytest.mark.parametrize("loss", ["deleted", "damaged"])
async def test_a_token_is_not_replayed_in_the_process_after_a_restart_or_after_the_ledger_was_lost(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, level: Level, loss: str
) -> None:
    token, data = l0() if level is Level.L0 else l1(), tmp_path / "data"
    async with opened(key_file, data, level=level) as gate:
        await admit(gate, token)
        assert await refused(gate, token, caplog) == "replayed"
    async with opened(key_file, data, level=level) as gate:
        assert await refused(gate, token, caplog) == "replayed"
    for path in data.glob(f"{FILE_NAME}*"):
        path.unlink()
        if loss == "damaged":
            path.write_bytes(b"no database at all " * 100)
    for boot in (NOW + 1.5, NOW + 6.5):  # The second start finds a ledger again, which remembers nothing from before the first.
        async with opened(key_file, data, level=level, clock=Clock(NOW + 20), boot=boot) as gate:
            assert await refused(gate, token, caplog) == "before_ledger"


async def test_only_names_that_are_counted_are_signers(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(key_file, tmp_path / "data", counted=frozenset({"a", "c"})) as gate:
        assert await refused(gate, l0(), caplog) == "too_few_signers"
        assert (await admit(gate, l0(signers=["a", "c"]))).signers == ("a", "c")


async def test_two_who_bring_one_token_at_once_do_one_operation(key_file: Path, tmp_path: Path) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        answers = await asyncio.gather(*(admit(gate, l0()) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(answer, Admitted) for answer in answers) == 1
    assert sum(isinstance(answer, OpTokenRefused) for answer in answers) == 19


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (None, "malformed"), ("", "malformed"), ("A" * 1_000_000, "too_large"),
        ('{"opToken":{"nonce":"a","nonce":"b"},"signature":""}', "duplicate_key"),
        (l0(OTHER_KEY), "bad_signature"), (l0(signers=["a", "a"]), "too_few_signers"),
        (l0(model_id="org/other"), "wrong_model"), (l0(operation=Operation.MODEL_UNLOAD), "wrong_operation"),
        (l0(issued_at=int(NOW) - 301), "expired"), (l0(issued_at=int(NOW) + 301), "not_yet_valid"),
        (l1(audience="box-8"), "wrong_audience"), (l1(kid="retired"), "unknown_key"),
        (l1(params_digest=params_digest({"modelId": MODEL})), "wrong_params"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)  # fmt: skip
async def test_every_refusal_looks_the_same_outside_and_names_its_reason_in_the_log(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, token: object, reason: str
) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        assert await refused(gate, token, caplog) == reason


async def test_a_refused_token_spends_nothing(key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(key_file, tmp_path / "data", level=Level.L1) as gate:
        forged = {**l1(), "signature": "00" * 32}
        assert await refused(gate, forged, caplog) == "bad_signature"
        assert await refused(gate, l1(), caplog, params={"modelId": MODEL}) == "wrong_params"
        assert await refused(gate, l1(), caplog, operation=Operation.MODEL_UNLOAD) == "wrong_operation"
        await admit(gate, l1())


async def test_without_key_or_ledger_nothing_is_done(key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(None, tmp_path / "keyless") as gate:
        for token in (l0(), l1(), None):
            with pytest.raises(OperationsDisabled, match="VERIFIED_OP_TOKEN_KEY_PATH"):
                await admit(gate, token)
    set_runner_limits(ledger={"nonces": 1})
    async with opened(key_file, tmp_path / "data") as gate:
        await admit(gate, l0())
        assert await refused(gate, l0(nonce="second-nonce"), caplog) == "ledger_full"
        await gate._ledger.close()
        with pytest.raises(Unavailable):
            await admit(gate, l0(nonce="third-nonce"))


async def test_a_key_file_is_read_at_each_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model-api.key"
    async with opened(path, tmp_path / "data") as gate:
        for content, words in (
            (None, "No such"), (b"", "is empty"), (b"\n", "is empty"), (b"fifteen bytes..\n", "fewer than 16"),
            (b"x" * 5000, "more than 4096"),
        ):  # fmt: skip
            if content is not None:
                write_key(path, content)
            with pytest.raises(OperationsDisabled, match=words) as caught:
                await admit(gate, l0())
            assert str(path) in str(caught.value)
        # The one newline that an editor adds is no part of the key.
        for number, (key, ending) in enumerate([(KEY, b""), (KEY, b"\n"), (KEY, b"\r\n"), (KEY + b"\n", b"\n")]):
            write_key(path, key + ending)
            await admit(gate, l0(key, nonce=f"nonce-of-{number}"))
        write_key(path, OTHER_KEY)
        assert await refused(gate, l0(nonce="nonce-of-old"), caplog) == "bad_signature"
        await admit(gate, l0(OTHER_KEY, nonce="nonce-of-new"))
        path.unlink()
        with pytest.raises(OperationsDisabled):
            await admit(gate, l0(OTHER_KEY, nonce="nonce-of-none"))


async def test_keys_in_a_folder_rotate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    old = write_key(folder / "2026-10.key", KEY)
    write_key(folder / "notes.txt", b"no key, whatever its length is")
    write_key(folder / "short.key", b"short")
    async with opened(folder, tmp_path / "data", level=Level.L1) as gate:
        await admit(gate, l1(kid="2026-10"))
        assert "short.key has fewer than 16 bytes" in caplog.text
        new = l1(OTHER_KEY, nonce="second-nonce", kid="2026-11", op_id="op-2", fence=8)
        assert await refused(gate, new, caplog) == "unknown_key"
        write_key(folder / "2026-11.key", OTHER_KEY)
        await admit(gate, new)
        old.unlink()
        for kid, key in (("2026-10", KEY), ("notes", KEY), ("short", b"short")):
            token = l1(key, nonce=f"nonce-of-{kid}", kid=kid, op_id="op-3", fence=9)
            assert await refused(gate, token, caplog) == "unknown_key"
        (folder / "2026-11.key").unlink()
        with pytest.raises(OperationsDisabled, match="no usable"):
            await admit(gate, l1(nonce="last-nonce", kid="2026-11"))


@pytest.mark.parametrize("is_jwt_first", [False, True])
async def test_a_token_counts_once(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_jwt_first: bool
) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        token = l0()
        claims = token["opToken"]
        assert isinstance(claims, dict)
        forms: list[object] = [token, sign_jwt(KEY, claims)]
        first, second = reversed(forms) if is_jwt_first else forms
        assert (await admit(gate, first)).level is Level.L0
        assert "replayed" in await refused(gate, second, caplog)


BOX = "attic#abcdefghijklmnopqrstuvwxyz"


class Door:
    """A gate with the control plane that makes tokens for it. ``policy``: what is pinned, None = nothing."""

    def __init__(self, gate: Gate, ledger: Ledger, issuer: Issuer, clock: Clock) -> None:
        self.gate = gate
        self.ledger = ledger
        self.issuer = issuer
        self.clock = clock
        self.policy: Policy | None = issuer.fleet.policy

    def token(self, **changes: Any) -> dict[str, Any]:
        return self.issuer.token("model-load", PARAMS, now=self.clock.now, **changes)

    async def admit(self, token: object, *, params: dict[str, object] | None = None) -> Admitted:
        used = PARAMS if params is None else params
        return await self.gate.admit(token, operation=Operation.MODEL_LOAD, model_id=MODEL, params=used)

    async def finish(self, admitted: Admitted) -> None:
        await self.ledger.finish_op(admitted.run.run_id, {"state": "succeeded"})

    async def begin_and_end(self, **changes: Any) -> None:
        await self.finish(await self.admit(self.token(**changes)))


@asynccontextmanager
async def door_in(tmp_path: Path, *, fleet: Fleet | None = None, **rules: Any) -> AsyncIterator[Door]:
    keys = OpKeys(tmp_path / "op-keys")
    keys.ensure(T0)
    ((kid, key),) = keys.read().items()
    clock = Clock(NOW)
    issuer = Issuer(fleet or Fleet(T0), BOX, kid, key)
    ledger = await Ledger.open(tmp_path / "data", clock=Clock(T0) if not (tmp_path / "data").exists() else clock)
    ledger._clock = clock
    fields: dict[str, Any] = {"key_path": keys.folder, "level": Level.L2, "min_signers": 2, "runner_id": BOX} | rules
    gate = Gate(GateRules(policy=lambda: door.policy, **fields), ledger=ledger, clock=clock)
    door = Door(gate, ledger, issuer, clock)
    try:
        yield door
    finally:
        await ledger.close()


async def test_an_approved_operation_is_admitted_and_booked_with_what_was_signed(tmp_path: Path) -> None:
    async with door_in(tmp_path) as door:
        admitted = await door.admit(door.token(op_id="op-1", checkpoint="audit 12"))
        row = await door.ledger.find_op("op-1", 1)
    assert (admitted.level, admitted.op_id) == (Level.L2, "op-1")
    assert row is not None
    assert (row.op_key, row.operation, row.model_id, row.checkpoint) == ("op-1.1", "model-load", MODEL, "audit 12")
    assert row.statement_digest == admitted.run.statement_digest
    assert len(row.statement_digest) == 64


async def test_what_the_control_plane_makes_alone_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with door_in(tmp_path) as door:
        bare = Issuer(door.issuer.fleet, BOX, door.issuer.kid, door.issuer.key).bare_token("model-load", PARAMS)
        assert await refused(door, bare, caplog) == "level_too_low"
        spec = {"opToken": {k: v for k, v in bare["opToken"].items() if k != "v"}, "signature": "0" * 64}
        assert await refused(door, spec, caplog) == "level_too_low"
        assert await refused(door, door.token(approvers=1), caplog) == "not_approved (too_few_approvers)"
        assert await refused(door, door.token(requested_by="bob"), caplog) == "not_approved (requester_approves)"
        assert await refused(door, door.token(targets=["other#box"]), caplog) == "wrong_target"
        other = {**PARAMS, "evictModel": "org/precious"}
        assert await refused(door, door.token(), caplog, params=other) == "wrong_params"
        stranger = Issuer(Fleet(T0), BOX, door.issuer.kid, door.issuer.key)
        assert (await refused(door, stranger.token("model-load", PARAMS, now=NOW), caplog)).startswith("not_approved")
        assert door.gate.refusals["level_too_low"] == 2
        assert await door.ledger.find_op("op-1", 1) is None


async def test_without_the_pinned_policy_nothing_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with door_in(tmp_path) as door:
        token = door.token()
        door.policy = None
        assert await refused(door, token, caplog) == "no_policy"
        door.issuer.fleet.add_policy()
        door.policy = door.issuer.fleet.policy
        assert await refused(door, token, caplog) == "not_approved (wrong_policy)"
        assert (await door.admit(door.token())).recorded is None
    async with door_in(tmp_path, disabled="start it with --data DIR") as door:
        with pytest.raises(OperationsDisabled, match="--data DIR"):
            await door.admit(door.token())


async def test_a_second_token_of_one_use_gets_the_first_outcome_also_after_a_restart(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    async with door_in(tmp_path, fleet=fleet) as door:
        admitted = await door.admit(door.token(op_id="op-1"))
        with pytest.raises(OperationRunning):
            await door.admit(door.token(op_id="op-1"))
        await door.ledger.finish_op(admitted.run.run_id, {"state": "succeeded", "body": {"a": 1}}, receipt="signed")
        again = await door.admit(door.token(op_id="op-1"))
        assert (again.recorded, again.receipt) == ({"state": "succeeded", "body": {"a": 1}}, "signed")
        used = door.token(op_id="op-2")
        await door.admit(used)
    async with door_in(tmp_path, fleet=fleet) as door:
        door.issuer.fence = 100
        again = await door.admit(door.token(op_id="op-1"))
        assert again.receipt == "signed"
        cut = await door.admit(door.token(op_id="op-2"))
        assert cut.recorded == INTERRUPTED
        with pytest.raises(OpTokenRefused):
            await door.admit(used)


async def test_every_use_of_a_standing_approval_is_its_own_operation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    standing: dict[str, Any] = {"op_id": "op-1", "op_class": "standing", "max_uses": 2}
    async with door_in(tmp_path) as door:
        for use in (1, 2):
            assert (await door.admit(door.token(use=use, **standing))).recorded is None
            with pytest.raises(OperationRunning):
                await door.admit(door.token(use=use, **standing))
        assert await refused(door, door.token(use=3, **standing), caplog) == "not_approved (too_many_uses)"


async def test_a_reload_of_the_settings_is_approved_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reload: dict[str, Any] = {"operation": Operation.SETTINGS_RELOAD, "model_id": None, "params": {}}
    async with door_in(tmp_path) as door:
        flush = door.issuer.token("cache-flush", {"scope": "all"}, now=NOW, fence=5)
        late = door.issuer.token("settings-reload", {}, now=NOW, fence=6)
        one_signer = door.issuer.token("settings-reload", {}, now=NOW, approvers=1)
        other_class = door.issuer.token("settings-reload", {}, now=NOW, op_class="cache-flush")
        with_params = door.issuer.token("settings-reload", {"scope": "all"}, now=NOW)
        for token in (flush, one_signer, other_class, with_params):
            with caplog.at_level(logging.WARNING), pytest.raises(OpTokenRefused):
                await door.gate.admit(token, **reload)
        admitted = await door.gate.admit(door.issuer.token("settings-reload", {}, now=NOW, fence=7), **reload)
        assert (admitted.operation, admitted.signers) == (Operation.SETTINGS_RELOAD, ("ada", "bob"))
        await door.finish(admitted)
        with pytest.raises(OpTokenRefused):
            await door.gate.admit(late, **reload)
        again = door.issuer.token("cache-flush", {"scope": "all"}, now=NOW, fence=5)
        await door.gate.admit(again, operation=Operation.CACHE_FLUSH, model_id=None, params={"scope": "all"})
    assert [line.rpartition("reason=")[2] for line in caplog.messages if "operation refused" in line] == [
        "wrong_operation", "not_approved (too_few_approvers)", "not_approved (unknown_class)", "wrong_params",
        "stale_fence",
    ]  # fmt: skip


async def test_break_glass_opens_as_often_a_day_as_its_class_says_restarts_included(tmp_path: Path) -> None:
    fleet, glass = Fleet(T0), {"op_class": "break-glass", "approvers": 1}
    async with door_in(tmp_path, fleet=fleet) as door:
        await door.begin_and_end(**glass)
        await door.begin_and_end()
        door.clock.now += 3600
        await door.begin_and_end(**glass)
    async with door_in(tmp_path, fleet=fleet) as door:
        door.issuer.fence = 100
        door.clock.now = NOW + 7200
        with pytest.raises(
            OperationLimit, match="2 operations of the class break-glass began on this node within 24 h"
        ) as caught:
            await door.admit(door.token(**glass))
        assert caught.value.retry_after_s == pytest.approx(86_400 - 7200)
        assert door.gate.refusals == {LIMIT_REASON: 1}
        await door.begin_and_end()
        door.clock.now = NOW + 86_400
        await door.begin_and_end(**glass)


async def test_no_more_operations_begin_within_an_hour_than_the_owner_allows(tmp_path: Path) -> None:
    async with door_in(tmp_path, ops_per_hour=2) as door:
        await door.begin_and_end()
        door.clock.now += 60
        await door.begin_and_end()
        for now in (door.clock.now, NOW):  # what began in the future counts after the clock was set back
            door.clock.now = now
            with pytest.raises(OperationLimit, match="2 operations began on this node within 1 h"):
                await door.admit(door.token(op_id="op-late"))
            assert await door.ledger.find_op("op-late", 1) is None
        door.clock.now = NOW + 3600
        assert (await door.admit(door.token(op_id="op-late"))).recorded is None


async def test_an_operation_is_remembered_for_longer_than_its_approval_can_be_used(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    window = {"op_class": "standing", "max_uses": 2, "not_after": int(NOW) + 6 * 86_400}
    async with door_in(tmp_path, fleet=fleet) as door:
        await door.begin_and_end(op_id="op-1", **window)
        door.clock.now = NOW + 6 * 86_400 - 400
        await door.begin_and_end(op_id="op-2")
        again = await door.admit(door.token(op_id="op-1", **{**window, "not_before": int(NOW) - 60}))
        assert again.recorded == {"state": "succeeded"}


@pytest.mark.parametrize("skew", [-400, 400], ids=["behind", "ahead"])
async def test_a_token_outside_its_window_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, skew: int) -> None:
    async with door_in(tmp_path) as door:
        token = door.token()
        door.clock.now += skew
        if skew < 0:
            door.ledger.born_at = 0.0
        assert await refused(door, token, caplog) == ("expired" if skew > 0 else "not_yet_valid")


WEEK_S = 7 * 86_400


LOAD, OTHER = ("model-load", {"modelId": MODEL, "evictModel": "org/other"}), ("model-load", {"modelId": "org/other"})
UNLOAD: tuple[str, dict[str, object]] = ("model-unload", {"modelId": MODEL})


@pytest.mark.parametrize(("late", "newer"), [(UNLOAD, LOAD), (LOAD, OTHER), (OTHER, LOAD)], ids=["unload", "evicts", "evicted"])
async def test_what_was_held_back_is_stale(
    tmp_path: Path, late: tuple[str, dict[str, object]], newer: tuple[str, dict[str, object]]
) -> None:
    async with door_in(tmp_path) as door:
        held_back = door.issuer.token(*late, now=NOW, fence=5)
        await carry_out(door, Operation(newer[0]), newer[1], fence=6)
        with pytest.raises(OpTokenRefused):
            await door.gate.admit(held_back, operation=Operation(late[0]), model_id=str(late[1]["modelId"]), params=late[1])
        assert door.gate.refusals == {"stale_fence": 1}


async def test_an_approval_that_says_it_was_asked_for_later_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with door_in(tmp_path) as door:
        assert await refused(door, door.token(op_id="op-1", requested_at=int(NOW) + 61), caplog) == "not_yet_valid"
        await door.begin_and_end(op_id="op-1", requested_at=int(NOW) + 60)


async def test_no_fence_blocks_a_model_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with door_in(tmp_path) as door:
        for fence in (2**53 - 1, int(NOW + WEEK_S) * 1000 + 1):
            assert await refused(door, door.token(fence=fence), caplog) == "bad_field"
        await carry_out(door, Operation.MODEL_LOAD, {"modelId": MODEL}, fence=int(NOW + WEEK_S) * 1000)


async def carry_out(door: Door, operation: Operation, params: dict[str, object], **changes: Any) -> None:
    model = params.get("modelId")
    assert model is None or isinstance(model, str)
    token = door.issuer.token(operation.value, params, now=door.clock.now, **changes)
    admitted = await door.gate.admit(token, operation=operation, model_id=model, params=params)
    await door.finish(admitted)


async def test_a_clock_that_was_a_year_ahead_for_a_moment_makes_the_box_forget_nothing(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    async with door_in(tmp_path, fleet=fleet) as door:
        await door.begin_and_end(op_id="op-1")
        door.clock.now = NOW + 29 * 86_400
        await door.begin_and_end(op_id="op-2")
        door.ledger._clock = Clock(NOW + 365 * 86_400)
        await door.begin_and_end(op_id="op-3", not_after=int(door.clock.now) + 3600)
        door.ledger._clock, door.clock.now = door.clock, NOW + 60
        again = await door.admit(
            door.token(op_id="op-1", requested_at=int(NOW), not_before=int(NOW) - 60, not_after=int(NOW) + 3600)
        )
    assert again.recorded == {"state": "succeeded"}


WANTED = OperationsConfig(
    key_path=None, level=2, is_level_given=True, min_signers=2, runner_id="", ops_per_hour=99, counted_signers=None
)


@asynccontextmanager
async def started(data: Path, fleet: Fleet, *, true_time: float, ahead_s: float) -> AsyncIterator[Door]:
    """Start a node whose clock is so far ahead; people and control plane go by the true time."""
    clock = Clock(true_time + ahead_s)
    ledger = await Ledger.open(data, clock=clock)
    try:
        node = Governance(WANTED, data=data, name="box-7", ledger=ledger, clock=clock)
        await node.open()
        assert node._own_keys is not None
        kid, key = list(node._own_keys.read().items())[-1]
        rules = GateRules(
            key_path=node.key_path, level=Level.L2, min_signers=2, runner_id=node.runner_id, policy=lambda: fleet.policy
        )
        yield Door(Gate(rules, ledger=ledger, clock=clock), ledger, Issuer(fleet, node.runner_id, kid, key), Clock(true_time))
    finally:
        await ledger.close()


def lose_files(data: Path, *beginnings: str) -> None:
    """Remove the files whose names begin so."""
    for each in data.iterdir():
        if each.is_file() and each.name.startswith(beginnings):
            each.unlink()


@pytest.mark.parametrize("ahead_s", [-60, 0, 60, 62])
async def test_a_new_node_takes_what_was_approved_in_its_first_moment_unless_its_clock_is_too_far_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead_s: float
) -> None:
    async with started(tmp_path, Fleet(T0), true_time=T0 + 10, ahead_s=ahead_s) as door:
        early: dict[str, Any] = {"op_id": "op-1", "requested_at": int(T0) + 10}
        if ahead_s > 60:
            assert await refused(door, door.token(**early), caplog) == "before_ledger"
        else:
            await door.begin_and_end(**early)


@pytest.mark.parametrize("also_key", [False, True], ids=["the ledger alone", "the key too"])
@pytest.mark.parametrize("ahead_s", [0, 30])
async def test_an_approval_is_not_carried_out_again_after_the_memory_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead_s: float, *, also_key: bool
) -> None:
    fleet, moment = Fleet(T0), int(T0) + 10
    async with started(tmp_path, fleet, true_time=moment, ahead_s=ahead_s) as door:
        await door.begin_and_end(op_id="op-1", requested_at=moment)
        first = door.issuer.runner_id
    lose_files(tmp_path, *(["ledger", "identity"] if also_key else ["ledger"]))
    caplog.set_level(logging.INFO)
    async with started(tmp_path, fleet, true_time=moment + 5, ahead_s=ahead_s) as door:
        door.issuer.runner_id = first
        again = door.token(op_id="op-1", requested_at=moment, not_before=moment - 60, not_after=moment + 3600)
        assert await refused(door, again, caplog) == ("wrong_audience" if also_key else "before_ledger")


async def test_the_allowance_outlives_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet, moment = Fleet(T0), int(T0) + 10
    data, key = tmp_path / "data", tmp_path / "data" / "identity.key"
    async with started(data, fleet, true_time=moment, ahead_s=30):
        saved = key.read_bytes()
    async with started(data, fleet, true_time=moment + 5, ahead_s=30) as door:
        await door.begin_and_end(op_id="op-1", requested_at=moment + 1)
    lose_files(data, "")
    async with started(data, fleet, true_time=moment + 8, ahead_s=30):
        key.write_bytes(saved)
    async with started(data, fleet, true_time=moment + 9, ahead_s=30) as door:
        again = door.token(op_id="op-1", requested_at=moment + 1, not_before=moment - 60, not_after=moment + 3600)
        assert await refused(door, again, caplog) == "before_ledger"
