"""Every engine adapter keeps the promises of the port: each check of engine_suite.py on each registered case."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.engines import suite
from tests.fakes.engines.suite import CHECKS, EngineCase, EngineUnderTest

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]


def _registered_cases() -> list[EngineCase]:
    names = sorted(path.stem for path in Path(suite.__file__).parent.glob("cases_*.py"))
    return [case for name in names for case in importlib.import_module(f"tests.fakes.engines.{name}").CASES]


@contextlib.asynccontextmanager
async def opened(case: EngineCase, folder: Path) -> AsyncIterator[EngineUnderTest]:
    """Yield the case's adapter; whatever the check leaves loaded is killed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client, case.open(folder, client) as subject:
        try:
            yield subject
        finally:
            await subject.engine.unload(gently=False)


@pytest.mark.parametrize("check", [pytest.param(check, id=check.__name__.removeprefix("check_")) for check in CHECKS])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=case.marks) for case in _registered_cases()])
async def test_an_engine_keeps_the_promises_of_the_port(case: EngineCase, check: object, tmp_path: Path) -> None:
    assert callable(check)
    async with opened(case, tmp_path) as subject:
        await check(subject)
