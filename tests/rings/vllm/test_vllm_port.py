"""The promises of the engine port, kept by a real vLLM."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.fakes.engines.suite import CHECKS
from tests.rings.vllm.serving import CASE


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [pytest.param(check, id=check.__name__.removeprefix("check_")) for check in CHECKS])
async def test_vllm_keeps_the_promises_of_the_port(check: object, tmp_path: Path) -> None:
    assert callable(check)
    async with aiohttp.ClientSession() as client, CASE.open(tmp_path, client) as subject:
        try:
            await check(subject)
        finally:
            await subject.engine.unload(gently=False)
