"""Rows 25 to 35: who may connect, and what a registration is answered."""

from __future__ import annotations

from functools import partial

import pytest
from websockets.exceptions import WebSocketException

from tests.fakes.lab import Lab, unique
from tests.fakes.scripted_worker import PROTOCOL, ScriptedWorker
from tests.fakes.waiting import eventually
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.asyncio

REFUSED = (1008, "worker authentication failed")
BLOCKED = (1008, "worker authentication temporarily rate limited")


def wrong_secret() -> str:
    """Return a well-formed worker credential that no one issued."""
    return mint_credential(CredentialKind.WORKER).text


async def test_worker_can_authenticate_and_receive_a_sanitized_register_ack(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.dial(secret=lab.secret)
    ack = await worker.register([f"  {model} ", model, "", "   "], name=unique("worker"))
    assert list(ack)[:3] == ["type", "worker_id", "models"]
    assert ack["models"] == [model]
    assert ack["worker_id"]
    assert ack["protocol_version"] == PROTOCOL
    assert not ack.get("warnings")
    assert set(ack) <= {"type", "worker_id", "models", "warnings", "protocol_version"}
    reply = lab.ask(model)
    await worker.answer(await worker.job())
    assert (await reply).status == 200


async def test_register_ack_warns_when_worker_name_is_truncated(lab: Lab) -> None:
    worker = await lab.dial(secret=lab.secret)
    name = unique("long") + "x" * 500
    ack = await worker.register([unique("m")], name=name)
    assert any("name" in warning and "truncated" in warning for warning in ack["warnings"]), ack
    reply = await lab.admin("GET", "/admin/workers")
    kept = [row["worker_name"] for row in reply.json["workers"] if row["worker_id"] == ack["worker_id"]]
    assert len(kept) == 1
    assert name.startswith(kept[0])
    assert len(kept[0]) < len(name)


async def test_register_ack_warns_when_model_list_is_truncated_after_sanitization(lab: Lab) -> None:
    worker = await lab.dial(secret=lab.secret)
    models = [f"many-{number}" for number in range(300)]
    ack = await worker.register([*models, *models], name=unique("worker"))
    assert any("model" in warning and "truncated" in warning for warning in ack["warnings"]), ack
    assert 0 < len(ack["models"]) < 300
    assert ack["models"] == models[: len(ack["models"])]


@pytest.mark.parametrize("models", [[], ["", "   "]], ids=["none", "blank"])
async def test_register_ack_warns_when_sanitization_accepts_no_models(lab: Lab, models: list[str]) -> None:
    worker = await lab.dial(secret=lab.secret)
    ack = await worker.register(models, name=unique("worker"))
    assert ack["models"] == []
    assert any("no models" in warning for warning in ack["warnings"]), ack


async def test_register_ack_clamps_zero_max_concurrent_to_one(lab: Lab) -> None:
    model = await lab.model()
    name = unique("zero")
    worker = await lab.worker(model, name=name, max_concurrent=0)
    row = await lab.listed_worker(name)
    assert row is not None
    assert row["max_concurrent"] == 1
    lab.ask(model, "first")
    job = await worker.job()
    second = lab.ask(model, "second")
    await lab.queued(1)
    await worker.answer(job)
    await worker.answer(await worker.job())
    assert (await second).status == 200


async def test_legacy_query_secret_can_authenticate_but_wrong_secret_is_rejected(lab: Lab, second_address: str) -> None:
    good = await lab.dial(secret=None, query_secret=lab.secret)
    assert (await good.register([unique("m")], name=unique("worker")))["worker_id"]
    bad = await lab.dial(secret=None, query_secret=wrong_secret(), local_host=second_address)
    assert await bad.closed() == REFUSED
    # One more success ends the run of failures of that address.
    again = await lab.dial(secret=None, query_secret=lab.secret, local_host=second_address)
    assert (await again.register([unique("m")], name=unique("worker")))["worker_id"]


async def test_header_secret_takes_precedence_over_legacy_query_secret_when_both_are_present(
    lab: Lab, second_address: str
) -> None:
    good = await lab.dial(secret=lab.secret, query_secret=wrong_secret())
    assert (await good.register([unique("m")], name=unique("worker")))["worker_id"]
    bad = await lab.dial(secret=wrong_secret(), query_secret=lab.secret, local_host=second_address)
    assert await bad.closed() == REFUSED


async def is_blocked_after_three_failures(lab: Lab, address: str, secret: str) -> bool:
    """Return whether that secret is turned away after three wrong ones; not if it comes half a second late, after the block."""
    welcome = await register_from(lab, address, lab.secret)  # ends the run of failures of a round before
    if welcome.close_code is not None:
        return False
    for _ in range(3):
        worker = await lab.dial(secret=wrong_secret(), local_host=address)
        assert await worker.closed() == REFUSED
    worker = await register_from(lab, address, secret)
    return (worker.close_code, worker.close_reason) == BLOCKED


async def register_from(lab: Lab, address: str, secret: str) -> ScriptedWorker:
    """Return a worker that has dialled from that address and was acknowledged or turned away."""
    worker = await lab.dial(secret=secret, local_host=address)
    try:
        await worker.register([unique("m")], name=unique("worker"))
    except (AssertionError, WebSocketException):
        await worker.closed()
    return worker


async def test_repeated_failed_auth_attempts_are_rate_limited_by_client_identity(hasty_lab: Lab, second_address: str) -> None:
    lab = hasty_lab
    address = second_address.replace("0.2", "0.3")
    blocked = partial(is_blocked_after_three_failures, lab, address, wrong_secret())
    await eventually(blocked, what="an address that showed three wrong secrets is blocked")
    good = await register_from(lab, address, lab.secret)
    assert good.kinds[0] == "register_ack", "a good secret is let in, whatever others showed from its address"
    elsewhere = await lab.worker(unique("m"))
    assert elsewhere.kinds[0] == "register_ack"  # since when a machine that stood still may have cost it its socket


async def test_failed_auth_rate_limit_entries_expire_and_allow_a_later_valid_connection(
    hasty_lab: Lab, second_address: str
) -> None:
    lab = hasty_lab
    address = second_address.replace("0.2", "0.4")
    blocked = partial(is_blocked_after_three_failures, lab, address, wrong_secret())
    await eventually(blocked, what="an address that showed three wrong secrets is blocked")

    async def accepted() -> bool:
        return (await register_from(lab, address, lab.secret)).close_code is None

    await eventually(accepted, what="the block is over", pause_s=0.1)


async def test_protocol_version_mismatch_is_rejected_before_registration_completes(lab: Lab) -> None:
    worker = await lab.dial(secret=lab.secret)
    with pytest.raises(AssertionError, match="closed 1002"):
        await worker.register([unique("m")], name=unique("worker"), protocol_version="1999-01-bridge-v0")
    assert await worker.closed() == (1002, "worker registration protocol error")
    assert not worker.frames
    silent = await lab.dial(secret=lab.secret)
    ack = await silent.register([unique("m")], name=unique("worker"), protocol_version=None)
    assert ack["worker_id"]


async def test_unknown_or_disabled_providers_are_rejected_before_register(lab: Lab) -> None:
    unknown = await lab.dial(secret=lab.secret, provider=unique("nobody"))
    assert (await unknown.closed())[0] == 1008
    provider = unique("provider")
    lab.operate("nodes.services.create_provider", name=provider)
    _, secret = lab.operate("nodes.services.create_credential", name=unique("c"), provider_name=provider, max_nodes=9)
    worker = await lab.worker(unique("m"), secret=secret, provider=provider)
    assert worker.close_code is None
    stranger = await lab.dial(secret=lab.secret, provider=provider)
    assert (await stranger.closed())[0] == 1008
    lab.operate("nodes.services.disable_provider", name=provider)
    disabled = await lab.dial(secret=secret, provider=provider)
    assert (await disabled.closed())[0] == 1008
    assert not disabled.frames
    lab.operate("nodes.services.enable_provider", name=provider)
    assert (await lab.worker(unique("m"), secret=secret, provider=provider)).close_code is None
