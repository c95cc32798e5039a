"""Loading a model that is not on the box: fetched from a hub, recognised, loaded, and there the next time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines.port import TRANSCRIPTIONS
from runner.errors import DownloadFailed, RunnerError, UnknownModel
from runner.parts import Parts
from runner.pool import LoadOrder, LoadResult, Model, ModelState
from tests.fakes.engines.comfyui_contract import ComfyContract
from tests.fakes.engines.hub_server import HubServer, serve_hub
from tests.fakes.models.make import whisper_dir
from tests.fakes.runners.parts import answer, assembled, find, write_models

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


async def load(parts: Parts, model_id: str) -> Model:
    order = await parts.pool.loader.order(model_id, overrides={})
    assert isinstance(order, LoadOrder)
    await parts.pool.loader.carry_out(order, lambda _: None)
    return find(parts, model_id)


@pytest.mark.parametrize("size", ["tiny", "large", "large-v3"])
async def test_a_whisper_model_is_fetched_by_its_size(tmp_path: Path, size: str) -> None:
    files = {path.name: path.read_bytes() for path in whisper_dir().iterdir()}
    repo = f"Systran/faster-whisper-{'large-v3' if size == 'large' else size}"
    hub = HubServer({repo: files}, lfs={"model.bin"})
    async with serve_hub(hub) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
        parts.pool.registry.define(parts.pool.registry.find_or_plan(size).definition)
        model = await load(parts, size)
        assert (model.definition.backend, model.is_ready) == ("whisper", True)
        assert TRANSCRIPTIONS in model.capabilities.endpoints
        fetched = len(server.downloads())
        await parts.pool.unloader.unload(size)
        await parts.discover(at_once=True)
        parts.pool.registry.define(parts.pool.registry.find_or_plan(size).definition)
        assert (await load(parts, size)).is_ready
        assert len(server.downloads()) == fetched, "it is there by now"


async def test_a_model_of_the_owners_is_not_taken_for_a_size(tmp_path: Path) -> None:
    write_models(tmp_path / "models", "tiny")
    async with assembled(tmp_path) as parts:
        assert parts.pool.registry.find_or_plan("tiny").definition.backend == "gguf"


def comfy_settings(data: Path, url: str, **fields: object) -> None:
    data.mkdir(exist_ok=True)
    model = {"backend": "comfyui", "server_url": url, "model_path": "acme/pictures/nice.safetensors", **fields}
    (data / "settings.json").write_text(json.dumps({"engine": {"models": {"painter": model}}}))


async def test_a_checkpoint_is_put_where_comfyui_reads_it_once(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    hub = HubServer({"acme/pictures": {"nice.safetensors": b"weights", "more.safetensors": b"other"}}, lfs={"nice.safetensors"})
    async with serve_hub(hub) as server, ComfyContract(folder=folder).serve() as comfy:
        comfy_settings(tmp_path / "data", comfy.url, comfyui_checkpoints_dir=str(folder))
        async with assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
            parts.pool.registry.define(parts.settings.models["painter"])
            for _ in range(2):
                assert (await load(parts, "painter")).is_ready
                await parts.pool.unloader.unload("painter")
    assert [path.name for path in folder.iterdir()] == ["nice.safetensors"]
    assert (folder / "nice.safetensors").read_bytes() == b"weights"
    assert len(hub.downloads()) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"comfyui_checkpoints_dir": "/nowhere/checkpoints"}, "comfyui_checkpoints_dir: there is no folder"),
        ({"comfyui_checkpoints_dir": ".", "model_path": "acme/pictures/none.safetensors"}, "has no none.safetensors"),
        ({"comfyui_checkpoints_dir": ".", "model_path": "acme/pictures"}, "names no file of a repository"),
        ({"comfyui_checkpoints_dir": ".", "model_path": "other/pictures/x.safetensors"}, "MUSTER_HUB_ALLOW"),
        ({}, "has no checkpoint nice.safetensors"),
    ],
)
async def test_a_checkpoint_that_cannot_be_had_fails_the_load_with_the_reason(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    if fields.get("comfyui_checkpoints_dir") == ".":
        fields = {**fields, "comfyui_checkpoints_dir": str(tmp_path)}
    hub = HubServer({"acme/pictures": {"nice.safetensors": b"weights"}}, lfs={"nice.safetensors"})
    async with serve_hub(hub) as server, ComfyContract().serve() as comfy:
        comfy_settings(tmp_path / "data", comfy.url, **fields)
        async with assembled(tmp_path, HF_ENDPOINT=server.url, MUSTER_HUB_ALLOW="acme/*") as parts:
            parts.pool.registry.define(parts.settings.models["painter"])
            with pytest.raises(RunnerError, match=words):
                await load(parts, "painter")
            assert words in str(find(parts, "painter").last_error)
