"""What the log of a node says while its gateway cannot be reached."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast  # Any: a host that is never asked

import aiohttp
import pytest

from runner.connection import GatewayLink
from tests.fakes.limits import set_runner_limits
from tests.unit.closed_port import closed_port


async def log_of_a_link(caplog: pytest.LogCaptureFixture, *, say_again_s: float, at_least: int) -> list[str]:
    """Return what a link logs that dials a closed port until ``at_least`` lines are there, at most for two seconds."""
    set_runner_limits(connection={"reconnect_first_s": 0.01, "reconnect_max_s": 0.02, "say_again_s": say_again_s})
    nobody = cast("Any", None)
    caplog.set_level(logging.ERROR, "runner.connection")
    with closed_port() as port:
        async with aiohttp.ClientSession() as client:
            link = GatewayLink(f"ws://127.0.0.1:{port}", host=nobody, client=client, token="msw_x", provider="local")
            dialling = asyncio.create_task(link.run(give_up_s=2.0))
            while not dialling.done() and len(caplog.messages) < at_least:
                await asyncio.sleep(0.01)
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)
    return caplog.messages


async def test_a_gateway_that_cannot_be_reached_is_said_at_once_and_again_while_it_stays_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = await log_of_a_link(caplog, say_again_s=0.1, at_least=3)
    assert len(said) >= 3
    assert "reason=cannot connect" in said[0]
    assert said[0].endswith("; retrying at least every 0.02 s")
    assert set(said) == {said[0]}


async def test_it_is_not_said_at_every_attempt(caplog: pytest.LogCaptureFixture) -> None:
    assert len(await log_of_a_link(caplog, say_again_s=60.0, at_least=2)) == 1
