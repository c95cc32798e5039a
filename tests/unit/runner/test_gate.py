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

from runner.errors import OperationsDisabled, OpTokenRefused, Unavailable
from runner.ledger import FILE_NAME, Ledger
from runner.operations.gate import REFUSED, Admitted, Gate, GateRules, OperationRunning
from tests.fakes.ledgers import T0, Clock
from tests.fakes.limits import set_runner_limits
from wire.optoken import Binding, Grant, Level, Operation, encode_token, params_digest, sign_jwt, sign_l0, sign_l1

ROOT = Path(__file__).resolve().parents[3]
KEY = b"a key of the tests, 32 bytes long"
OTHER_KEY = b"another key of the tests, as long"
MODEL = "org/model"
NOW = T0 + 10
PARAMS: dict[str, object] = {"modelId": MODEL, "evictModel": "org/other"}


def l0(key: bytes = KEY, **changes: Any) -> dict[str, object]:
    return sign_l0(key, grant(**changes))


def l1(key: bytes = KEY, nonce: str = "nonce-of-l1", **changes: Any) -> dict[str, object]:
    fields: dict[str, Any] = {
        "audience": "box-7", "params_digest": params_digest(PARAMS), "op_id": "op-1", "fence": 7, "expires_at": int(NOW) + 300,
    }  # fmt: skip
    return sign_l1(key, grant(nonce=nonce), Binding(**(fields | changes)))


def grant(**changes: Any) -> Grant:
    fields: dict[str, Any] = {
        "operation": Operation.MODEL_LOAD, "model_id": MODEL, "signers": ["a", "b"], "nonce": "nonce-of-l0",
        "issued_at": int(NOW),
    }  # fmt: skip
    return Grant(**(fields | changes))


def write_key(path: Path, content: bytes = KEY + b"\n", *, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def remove(path: Path) -> None:
    path.unlink()


def lose(data: Path, loss: str) -> None:
    for path in data.glob(f"{FILE_NAME}*"):
        if loss == "deleted":
            path.unlink()
        else:
            path.write_bytes(b"no database at all " * 100)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "model-api.key")


@asynccontextmanager
async def opened(
    key_path: Path | None, data: Path, *, level: Level = Level.L0, min_signers: int = 2, clock: Clock | None = None
) -> AsyncIterator[Gate]:
    """A gate with a ledger that was begun before the tokens were issued."""
    ledger = await Ledger.open(data, clock=Clock(T0 + 0.5))
    try:
        rules = GateRules(key_path=key_path, level=level, min_signers=min_signers, runner_id="box-7")
        yield Gate(rules, ledger=ledger, clock=clock or Clock(NOW))
    finally:
        await ledger.close()


async def admit(gate: Gate, token: object, **changes: Any) -> Admitted:
    request: dict[str, Any] = {"operation": Operation.MODEL_LOAD, "model_id": MODEL, "params": PARAMS}
    return await gate.admit(token, **(request | changes))


async def refused(gate: Gate, token: object, caplog: pytest.LogCaptureFixture, **changes: Any) -> str:
    """Return the reason in the log; outside there is none."""
    caplog.clear()
    with caplog.at_level(logging.INFO), pytest.raises(OpTokenRefused) as caught:
        await admit(gate, token, **changes)
    assert (str(caught.value), caught.value.status, caught.value.details) == (REFUSED, 403, {})
    assert "nonce-of" not in caplog.text
    return caplog.text.rpartition("reason=")[2].partition("\n")[0]


async def test_a_valid_token_is_admitted_in_every_form(key_file: Path, tmp_path: Path) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        admitted = await admit(gate, l0())
        assert (admitted.level, admitted.op_id, admitted.signers, admitted.recorded) == (Level.L0, None, ("a", "b"), None)
        await gate.finish(admitted, {"ok": True})
        assert (await admit(gate, json.dumps(l0(nonce="second-nonce")))).signers == ("a", "b")
        assert (await admit(gate, encode_token(l1()))).op_id == "op-1"


@pytest.mark.parametrize("level", [Level.L0, Level.L1])
async def test_a_token_is_replayed_neither_in_the_same_process_nor_after_a_restart(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, level: Level
) -> None:
    token = l0() if level is Level.L0 else l1()
    async with opened(key_file, tmp_path / "data", level=level) as gate:
        await admit(gate, token)
        assert await refused(gate, token, caplog) == "replayed"
    async with opened(key_file, tmp_path / "data", level=level) as gate:
        assert await refused(gate, token, caplog) == "replayed"


@pytest.mark.parametrize("level", [Level.L0, Level.L1])
@pytest.mark.parametrize("loss", ["deleted", "damaged"])
async def test_a_token_is_not_replayed_after_the_ledger_was_lost(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, level: Level, loss: str
) -> None:
    token = l0() if level is Level.L0 else l1()
    async with opened(key_file, tmp_path / "data", level=level) as gate:
        await admit(gate, token)
    lose(tmp_path / "data", loss)
    boot = NOW + 1.5
    for _ in range(2):  # The second start finds a ledger again, which remembers nothing from before the first.
        ledger = await Ledger.open(tmp_path / "data", clock=Clock(boot))
        rules = GateRules(key_path=key_file, level=level, min_signers=2, runner_id="box-7")
        gate = Gate(rules, ledger=ledger, clock=Clock(NOW + 20))
        try:
            assert await refused(gate, token, caplog) == "before_ledger"
        finally:
            await ledger.close()
        boot += 5


async def test_only_names_that_the_owner_counts_are_signers(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = await Ledger.open(tmp_path / "data", clock=Clock(T0 + 0.5))
    try:
        for counted, refusal in [({"a", "b"}, ""), ({"a", "c"}, "too_few_signers")]:
            rules = GateRules(key_file, Level.L0, 2, "box-7", counted_signers=frozenset(counted))
            gate, token = Gate(rules, ledger=ledger, clock=Clock(NOW)), l0(nonce=f"nonce-of-{len(refusal)}")
            if refusal:
                assert await refused(gate, token, caplog) == refusal
            else:
                assert (await admit(gate, token)).signers == ("a", "b")
    finally:
        await ledger.close()


async def test_a_token_issued_after_the_ledger_began_is_good(key_file: Path, tmp_path: Path) -> None:
    async with opened(key_file, tmp_path / "data", clock=Clock(T0 + 0.9)) as gate:
        await admit(gate, l0(issued_at=int(T0)))


async def test_two_who_bring_one_token_at_once_do_one_operation(key_file: Path, tmp_path: Path) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        answers = await asyncio.gather(*(admit(gate, l0()) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(answer, Admitted) for answer in answers) == 1
    assert sum(isinstance(answer, OpTokenRefused) for answer in answers) == 19


async def test_a_second_token_from_one_approval_gets_the_first_outcome(key_file: Path, tmp_path: Path) -> None:
    outcome: dict[str, object] = {"status": 202, "body": {"taskId": "load-1"}}
    async with opened(key_file, tmp_path / "data", level=Level.L1) as gate:
        first = await admit(gate, l1())
        assert first.recorded is None
        with pytest.raises(OperationRunning) as running:
            await admit(gate, l1(nonce="second-nonce", fence=8))
        assert (running.value.status, running.value.retryable) == (409, True)
        await gate.finish(first, outcome)
        again = await admit(gate, l1(nonce="third-nonce", fence=9))
        assert again.recorded == outcome
        await gate.finish(again, {"status": 500})
    async with opened(key_file, tmp_path / "data", level=Level.L1) as gate:
        assert (await admit(gate, l1(nonce="fourth-nonce", fence=10))).recorded == outcome


async def test_an_operation_that_was_overtaken_is_refused(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(key_file, tmp_path / "data", level=Level.L1) as gate:
        await admit(gate, l1())
        for fence in (7, 6):
            token = l1(nonce=f"nonce-of-{fence}", op_id=f"op-{fence}-late", fence=fence)
            assert await refused(gate, token, caplog) == "stale_fence"
        await admit(gate, l1(nonce="next-nonce", op_id="op-2", fence=8))


async def test_models_do_not_overtake_each_other(key_file: Path, tmp_path: Path) -> None:
    params = {"modelId": "org/second"}
    second = sign_l1(
        KEY,
        grant(model_id="org/second"),
        Binding(audience="box-7", params_digest=params_digest(params), op_id="op-2", fence=1, expires_at=int(NOW) + 300),
    )
    async with opened(key_file, tmp_path / "data", level=Level.L1) as gate:
        await admit(gate, l1(fence=9))
        await admit(gate, second, model_id="org/second", params=params)


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


async def test_a_full_ledger_refuses(key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    set_runner_limits(ledger={"nonces": 1})
    async with opened(key_file, tmp_path / "data") as gate:
        await admit(gate, l0())
        assert await refused(gate, l0(nonce="second-nonce"), caplog) == "ledger_full"


async def test_without_a_working_ledger_nothing_is_carried_out(key_file: Path, tmp_path: Path) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        await gate._ledger.close()
        with pytest.raises(Unavailable):
            await admit(gate, l0())


async def test_without_a_key_every_operation_is_refused(tmp_path: Path) -> None:
    async with opened(None, tmp_path / "data") as gate:
        for token in (l0(), l1(), None):
            with pytest.raises(OperationsDisabled, match="VERIFIED_OP_TOKEN_KEY_PATH"):
                await admit(gate, token)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"), (b"\n", "is empty"), (b"fifteen bytes..\n", "fewer than 16"), (b"x" * 5000, "more than 4096"),
        (None, "No such"),
    ],
)  # fmt: skip
async def test_a_key_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "model-api.key"
    if content is not None:
        write_key(path, content)
    async with opened(path, tmp_path / "data") as gate:
        with pytest.raises(OperationsDisabled, match=words) as caught:
            await admit(gate, l0())
        assert str(path) in str(caught.value)
        write_key(path)
        await admit(gate, l0())


@pytest.mark.parametrize(("key", "ending"), [(KEY, b""), (KEY, b"\n"), (KEY, b"\r\n"), (KEY + b"\n", b"\n")])
async def test_the_one_newline_that_an_editor_adds_is_no_part_of_the_key(tmp_path: Path, key: bytes, ending: bytes) -> None:
    async with opened(write_key(tmp_path / "key", key + ending), tmp_path / "data") as gate:
        await admit(gate, l0(key))


async def test_a_changed_key_file_is_used_at_once(key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        await admit(gate, l0())
        write_key(key_file, OTHER_KEY)
        assert await refused(gate, l0(nonce="second-nonce"), caplog) == "bad_signature"
        await admit(gate, l0(OTHER_KEY, nonce="third-nonce"))
        remove(key_file)
        with pytest.raises(OperationsDisabled):
            await admit(gate, l0(OTHER_KEY, nonce="fourth-nonce"))


async def test_keys_in_a_folder_rotate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    old = write_key(folder / "2026-10.key", KEY)
    write_key(folder / "notes.txt", b"no key, whatever its length is")
    async with opened(folder, tmp_path / "data", level=Level.L1) as gate:
        await admit(gate, l1(kid="2026-10"))
        new = l1(OTHER_KEY, nonce="second-nonce", kid="2026-11", op_id="op-2", fence=8)
        assert await refused(gate, new, caplog) == "unknown_key"
        write_key(folder / "2026-11.key", OTHER_KEY)
        await admit(gate, new)
        old.unlink()
        assert await refused(gate, l1(nonce="third-nonce", kid="2026-10", op_id="op-3", fence=9), caplog) == "unknown_key"
        assert await refused(gate, l1(nonce="fourth-nonce", kid="notes", op_id="op-3", fence=9), caplog) == "unknown_key"


async def test_a_bad_key_in_a_folder_does_not_disable_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    write_key(folder / "good.key")
    write_key(folder / "short.key", b"short")
    async with opened(folder, tmp_path / "data", level=Level.L1) as gate:
        await admit(gate, l1(kid="good"))
        assert "short.key has fewer than 16 bytes" in caplog.text
        assert await refused(gate, l1(b"short", nonce="second-nonce", kid="short"), caplog) == "unknown_key"
        (folder / "good.key").unlink()
        with pytest.raises(OperationsDisabled, match="no usable"):
            await admit(gate, l1(nonce="third-nonce", kid="good"))


async def test_a_key_that_others_can_read_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_key(tmp_path / "key", mode=0o640)
    async with opened(path, tmp_path / "data") as gate:
        await admit(gate, l0())
        write_key(path, KEY, mode=0o644)
        await admit(gate, l0(nonce="second-nonce"))
    assert caplog.text.count("open to other users") == 1
    assert KEY.decode() not in caplog.text


async def test_a_private_key_file_is_not_warned_of(key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        await admit(gate, l0())
    assert "open to other users" not in caplog.text


@pytest.mark.parametrize("is_jwt_first", [False, True])
async def test_a_token_counts_once_whichever_form_it_comes_in(
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
