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
from runner.operations.gate import REFUSED, Admitted, Gate, GateRules
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
    key_path: Path | None,
    data: Path,
    *,
    level: Level = Level.L0,
    clock: Clock | None = None,
    boot: float = T0 + 0.5,
    counted: frozenset[str] | None = None,
) -> AsyncIterator[Gate]:
    """A gate with a ledger that was begun before the tokens were issued."""
    ledger = await Ledger.open(data, clock=Clock(boot))
    try:
        rules = GateRules(key_path=key_path, level=level, min_signers=2, runner_id="box-7", counted_signers=counted)
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
    async with opened(key_file, tmp_path / "data", clock=Clock(T0 + 0.9)) as gate:
        admitted = await admit(gate, l0(issued_at=int(T0)))
        assert (admitted.level, admitted.op_id, admitted.signers, admitted.recorded) == (Level.L0, None, ("a", "b"), None)
        await gate.finish(admitted, {"ok": True})
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
    lose(data, loss)
    for boot in (NOW + 1.5, NOW + 6.5):  # The second start finds a ledger again, which remembers nothing from before the first.
        async with opened(key_file, data, level=level, clock=Clock(NOW + 20), boot=boot) as gate:
            assert await refused(gate, token, caplog) == "before_ledger"


async def test_only_names_that_the_owner_counts_are_signers(
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


async def test_without_a_key_or_with_a_full_or_broken_ledger_nothing_is_carried_out(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_a_key_file_is_read_at_each_use_and_named_when_it_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_keys_in_a_folder_rotate_and_a_bad_one_does_not_disable_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_a_key_that_others_can_read_is_warned_of_once(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(key_file, tmp_path / "data") as gate:
        await admit(gate, l0())
        assert "open to other users" not in caplog.text
        for number in range(2):
            write_key(key_file, KEY, mode=0o644)
            await admit(gate, l0(nonce=f"nonce-of-{number}"))
    assert caplog.text.count("open to other users") == 1
    assert KEY.decode() not in caplog.text


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
