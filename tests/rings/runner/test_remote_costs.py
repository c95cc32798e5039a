"""A box with a remote model, from the settings file to the ledger: what each way of ending a request costs its tenant."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from runner.config import read_config
from runner.engines.port import CHAT
from runner.errors import RemoteNotAllowed, RequestRefused, SpendingCapReached
from runner.ledger import CostState
from runner.parts import Parts, assemble
from runner.serving.request import Inference
from tests.fakes.engines.cases_remote import KEY_NAME, key_in_environment
from tests.fakes.engines.provider_contract import KEY, NAME, ProviderContract, refuse
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import run_gateway
from tests.fakes.waiting import eventually
from wire import bridge

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

COST = 20 * 2 + 1 * 10
"""Of an answer of the provider that is not streamed: 20 tokens in, 1 out."""
STREAM_COST = 20 * 2 + 8 * 10


def write_settings(folder: Path, url: str, *, cap: float | None = None) -> None:
    """Have a box with this data folder load the model of the provider at ``url``."""
    model = {
        "backend": "openai_compatible", "remote_base_url": url, "remote_api_key_env": KEY_NAME,
        "remote_model": NAME, "enabled": True, "target_inflight": 2,
    }  # fmt: skip
    remote = {
        "currency": "EUR",
        "monthly_cap": {"default": cap},
        "prices": {"cloud-large": {"input_per_million": 2, "output_per_million": 10}},
    }
    (folder / "settings.json").write_text(json.dumps({"engine": {"models": {"cloud-large": model}, "remote": remote}}))


@asynccontextmanager
async def a_box(folder: Path, provider: ProviderContract, *, cap: float | None = None) -> AsyncIterator[Parts]:
    """Yield a box that has loaded the provider's model."""
    async with provider.serve() as served, aiohttp.ClientSession(auto_decompress=False) as client:
        write_settings(folder, served.url, cap=cap)
        config = read_config(["--standalone", "--data", str(folder)], {})
        with key_in_environment():
            async with assemble(config, client, on_change=lambda: None, on_load=lambda: None) as box:
                await box.start_models()

                await eventually(lambda: box.pool.registry.find("cloud-large").is_ready)
                yield box


async def ask(box: Parts, **fields: object) -> tuple[int, bytes]:
    """Send a request as tenant acme; return status and everything that came."""
    body = {"model": "cloud-large", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
    request = Inference(
        "POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode(), "cloud-large", "acme",
        allow_remote=fields.get("allow_remote", True) is True, is_streaming=fields.get("stream") is True,
    )  # fmt: skip
    async with asyncio.timeout(30), box.door.open(request) as answer:
        if answer.body is not None:
            return answer.status, answer.body
        assert answer.chunks is not None
        return answer.status, b"".join([chunk async for chunk in answer.chunks])


async def endings(box: Parts) -> list[tuple[CostState, int]]:
    """Return how requests ended and what they count, oldest first."""
    return [(row.state, row.counted_micros) for row in reversed(await box.ledger.cost_rows(100))]


async def test_answers_are_paid_by_their_usage_streamed_or_not(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract()) as box:
        status, body = await ask(box)
        assert (status, json.loads(body)["model"]) == (200, "cloud-large")
        status, events = await ask(box, stream=True)
        assert (status, b"usage" in events) == (200, False)
        assert await endings(box) == [(CostState.SETTLED, COST), (CostState.SETTLED, STREAM_COST)]
        summary = await box.costs.summary()
        assert [(spent.tenant, spent.spent_micros) for spent in summary.spendings] == [("acme", COST + STREAM_COST)]


async def test_an_answer_without_usage_costs_what_was_set_aside(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract(tells_usage=False)) as box:
        await ask(box)
        ((state, counted),) = await endings(box)
        assert (state, counted > COST) == (CostState.FAILED_USAGE_UNKNOWN, True)


async def test_a_refusal_of_the_provider_costs_nothing(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract(moods=[refuse(400, "no"), refuse(429, "slow down")])) as box:
        assert [(await ask(box))[0] for _ in range(2)] == [400, 429]
        assert await endings(box) == [(CostState.RELEASED, 0)] * 2


async def test_a_stream_that_breaks_off_costs_what_was_set_aside(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract(breaks_after=2)) as box:
        with pytest.raises(RequestRefused):
            await ask(box, stream=True)
        ((state, counted),) = await endings(box)
        assert (state, counted > 0) == (CostState.FAILED_USAGE_UNKNOWN, True)


async def test_a_client_that_leaves_is_charged_once_the_provider_has_its_request(tmp_path: Path) -> None:
    provider = ProviderContract(pause_s=30)
    async with a_box(tmp_path, provider) as box:
        asking = asyncio.create_task(ask(box))

        await eventually(lambda: provider.running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        ((state, counted),) = await endings(box)
        assert (state, counted > COST) == (CostState.FAILED_AFTER_SUBMIT, True)


async def test_nothing_leaves_the_box_without_consent_or_beyond_the_cap(tmp_path: Path) -> None:
    provider = ProviderContract()
    async with a_box(tmp_path, provider, cap=0.0002) as box:
        with pytest.raises(RemoteNotAllowed):
            await ask(box, allow_remote=False)
        assert await endings(box) == []
        await ask(box)
        with pytest.raises(SpendingCapReached) as caught:
            await ask(box, max_tokens=100)
        assert caught.value.details["spent"] == COST / 1e6
        assert provider.tries == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_what_was_paid_for_still_reaches_its_gateway_when_the_box_is_told_to_leave(
    tmp_path: Path, *, is_streamed: bool
) -> None:
    provider = ProviderContract()
    provider.may_answer.clear()
    async with run_gateway() as gateway, provider.serve() as served:
        write_settings(tmp_path, served.url)
        env = {KEY_NAME: KEY, "MODEL_BASE_PATH": str(tmp_path)}
        async with run_box(tmp_path, gateway.url, "--data", str(tmp_path), env=env) as process:
            box = await gateway.accept()
            await eventually(lambda: "cloud-large" in box.models(), "the model is declared")
            body = {"model": "cloud-large", "messages": [], "stream": is_streamed, "allow_remote": True, "max_tokens": 4}
            stream = await box.open(body, model="cloud-large")
            await eventually(lambda: provider.running == 1, "the provider has the request")
            process.signal(signal.SIGTERM)
            await box.expect(bridge.Draining)
            provider.may_answer.set()
            answer = await stream.finish()
            assert (answer.status, answer.end.error) == (200, "")
            assert await process.exit_status() == 0
