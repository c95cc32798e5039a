"""Loading a model that is not on the box: fetched from a hub, recognised, loaded, and there the next time."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.errors import DownloadFailed, UnknownModel
from runner.pool import LoadOrder, LoadResult, ModelState
from tests.integration.runner.hub_server import HubServer, serve_hub
from tests.integration.runner.test_pool_lifecycle import answer, assembled, find

pytestmark = pytest.mark.timeout(180)

REPO = "acme/tiny"
FILE = "tiny-q8_0.gguf"
MODEL = f"{REPO}/{FILE}"


def make_server() -> HubServer:
    return HubServer({REPO: {FILE: TINY_MODEL_PATH.read_bytes(), "README.md": b"# tiny"}}, lfs={FILE})


async def test_a_model_of_the_hub_is_fetched_with_progress_loaded_and_not_fetched_again(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
        heard: list[Progress] = []
        planned = parts.pool.registry.find_or_plan(MODEL)
        with pytest.raises(UnknownModel):
            find(parts, MODEL)
        parts.pool.registry.define(planned.definition)
        for attempt in range(2):
            order = await parts.pool.loader.order(MODEL, overrides={"gguf_n_ctx": 512})
            assert isinstance(order, LoadOrder)
            assert order.must_fetch is (attempt == 0)
            result = await parts.pool.loader.carry_out(order, heard.append)
            assert isinstance(result, LoadResult)
            assert await answer(parts, MODEL) == 0
            await parts.pool.unloader.unload(MODEL)
        downloads = [progress for progress in heard if progress.stage.startswith("downloading")]
        assert downloads
        assert downloads[-1].fraction == pytest.approx(1.0)


async def test_a_repository_that_the_hub_does_not_have_fails_the_load_with_the_reason(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
        planned = parts.pool.registry.find_or_plan("acme/missing")
        parts.pool.registry.define(planned.definition)
        order = await parts.pool.loader.order("acme/missing", overrides={})
        assert isinstance(order, LoadOrder)
        with pytest.raises(DownloadFailed):
            await parts.pool.loader.carry_out(order, lambda _: None)
        model = find(parts, "acme/missing")
        assert (model.state, model.reserved_bytes) == (ModelState.FAILED, 0)
        assert model.last_error


async def test_what_the_owner_does_not_allow_is_simply_unknown(tmp_path: Path) -> None:
    async with assembled(tmp_path, MUSTER_HUB_ALLOW="trusted/*") as parts:
        with pytest.raises(UnknownModel):
            parts.pool.registry.find_or_plan(MODEL)
        assert parts.pool.registry.find_or_plan("trusted/model").definition.backend == "vllm"
