"""The adapter of remote models against a provider on loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.port import FlushResult
from runner.engines.remote import RemoteEngine
from tests.fakes.engines.provider_contract import KEY, NAME, ProviderContract
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call

KEY_NAME = "TEST_PROVIDER_KEY"


@contextlib.contextmanager
def key_in_environment(key: str = KEY) -> Iterator[None]:
    """Set the variable that the plans name."""
    os.environ[KEY_NAME] = key
    try:
        yield
    finally:
        os.environ.pop(KEY_NAME, None)


def remote_plan(url: str, **options: object) -> LoadPlan:
    """Return a plan for the provider's model under a name of ours."""
    named = {"remote_base_url": url, "remote_api_key_env": KEY_NAME, "remote_model": NAME, "remote_timeout_s": 10, **options}
    return LoadPlan(model_id="cloud-large", backend="openai_compatible", slots=4, options=named)


@contextlib.asynccontextmanager
async def open_remote(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter, and one for a model that the provider does not have."""
    async with ProviderContract(token_s=0.005).serve() as provider:

        async def running() -> int:
            return provider.running

        with key_in_environment():
            yield EngineUnderTest(
                engine=RemoteEngine(remote_plan(provider.url, remote_health_check="models"), client),
                call=chat_call("cloud-large", "Explain lambda.", max_tokens=8),
                streamed=chat_call("cloud-large", "Explain lambda.", max_tokens=8, stream=True),
                long=chat_call("cloud-large", "Explain lambda.", max_tokens=100_000, stream=True),
                broken=RemoteEngine(remote_plan(provider.url, remote_health_check="models", remote_model="gone"), client),
                broken_words=f"does not list gone.*{NAME}",
                running=running,
                flushes=frozenset({FlushResult.NOT_SUPPORTED}),
            )


CASES = [EngineCase("remote", open_remote)]
