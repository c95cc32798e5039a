"""Fetching models from a hub, and loading what is not on the node yet."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
from pathlib import Path

import huggingface_hub
import pytest

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines.port import TRANSCRIPTIONS
from runner.errors import DownloadFailed, InvalidRequest, RunnerError, UnknownModel
from runner.fit import read_shape
from runner.library.hub import Hub
from runner.library.library import Library
from runner.parts import Parts
from runner.pool.loads import LoadOrder
from runner.pool.models import Model
from tests.fakes.engines.comfyui import ComfyContract
from tests.fakes.engines.hub_server import COMMIT, HubServer, serve_hub
from tests.fakes.limits import set_runner_limits
from tests.fakes.models.make import whisper_dir
from tests.fakes.runners.parts import answer, assembled, find, write_models
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

REPO, WEIGHTS, FILE = "acme/tiny", "model.safetensors", "tiny-q8_0.gguf"
SECRET = "hf_" + "s" * 20
CONFIG = b'{"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 128}'


def make_tensors(count: int = 64) -> bytes:
    text = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    return len(text).to_bytes(8, "little") + text + b"w" * count


def make_server(files: dict[str, bytes] | None = None, **faults: object) -> HubServer:
    files = files or {
        "config.json": CONFIG, "tokenizer.json": b'{"version": "1.0"}', WEIGHTS: make_tensors(200_000),
        "pytorch_model.bin": b"\x80\x04 pickled", "modeling_tiny.py": b"raise SystemExit", "README.md": b"# tiny",
    }  # fmt: skip
    server = HubServer({REPO: files}, lfs={WEIGHTS, FILE})
    for name, value in faults.items():
        setattr(server, name, value)
    return server


@pytest.fixture(autouse=True)
def quick_pauses() -> None:
    """Have a transfer that breaks go on at once, and be given up after three times; with time for a busy machine."""
    set_runner_limits(models={"hub_connect_s": 30.0, "hub_pause_first_s": 0.01, "hub_tries": 3})


def make_hub(server: HubServer, home: Path, **options: object) -> Hub:
    return Hub(home / "hub", endpoint=server.url, **options)  # type: ignore[arg-type]  # the options by name


def ignore(_: Progress) -> None:
    """A report that nobody reads."""


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def git_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


async def test_weights_and_what_describes_them_are_fetched_of_one_commit_and_the_hubs_library_finds_them(
    tmp_path: Path,
) -> None:
    async with serve_hub(make_server()) as server:
        folder = await make_hub(server, tmp_path).fetch(REPO, revision="v1.0", report=ignore)
    assert (files_below(folder), folder.name) == ({"config.json", "tokenizer.json", WEIGHTS}, COMMIT)
    assert (folder / WEIGHTS).read_bytes() == server.files[REPO][WEIGHTS]
    assert not list((tmp_path / "hub").rglob("*.part"))
    assert (server.seen[0].path, server.seen[0].query) == (f"/api/models/{REPO}/revision/v1.0", "blobs=true")
    assert all(f"/resolve/{COMMIT}/" in seen.path for seen in server.seen[1:] if "/resolve/" in seen.path)
    assert (tmp_path / "hub" / "models--acme--tiny" / "refs" / "v1.0").read_text() == COMMIT
    found = huggingface_hub.try_to_load_from_cache(REPO, "config.json", revision="v1.0", cache_dir=tmp_path / "hub")
    assert found == str(folder / "config.json")
    scanned = huggingface_hub.scan_cache_dir(tmp_path / "hub")
    assert ([(repo.repo_id, repo.nb_files) for repo in scanned.repos], scanned.warnings) == ([(REPO, 3)], [])


async def test_a_token_goes_to_the_hub_and_never_to_where_it_redirects(tmp_path: Path) -> None:
    async with serve_hub(make_server(token=SECRET)) as server:
        await make_hub(server, tmp_path, token=SECRET).fetch(REPO, report=ignore)
    given = {(seen.path.startswith("/cdn/"), seen.authorization) for seen in server.seen}
    assert given == {(True, None), (False, f"Bearer {SECRET}")}


async def test_a_transfer_that_breaks_goes_on_where_it_broke(tmp_path: Path) -> None:
    async with serve_hub(make_server({WEIGHTS: make_tensors(400_000), "config.json": b"{}"})) as server:
        server.break_after = [0, 2]  # the configuration, at its first byte and at its end
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)
        assert (folder / "config.json").read_bytes() == b"{}"
        server.files[REPO][WEIGHTS] = make_tensors(500_000)
        server.commit, server.break_after, server.statuses = "d" * 40, [150_000, 100_000], [503, 429]
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)
    assert (folder / WEIGHTS).read_bytes() == server.files[REPO][WEIGHTS]
    first, second, third = (int((seen.range or "")[6:].partition("-")[0]) for seen in server.downloads()[-3:])
    assert 0 == first < second <= 150_000
    assert second < third <= 250_000


@pytest.mark.parametrize("ignores_range", [False, True])
async def test_after_breaking_often_it_fails_and_the_next_fetch_goes_on_from_there(
    tmp_path: Path, *, ignores_range: bool
) -> None:
    content = make_tensors(300_000)
    async with serve_hub(make_server({WEIGHTS: make_tensors(1), "config.json": b"{}"}, commit="e" * 40)) as server:
        hub = make_hub(server, tmp_path)
        await hub.fetch(REPO, report=ignore)  # so that the faults hit the weights
        server.files[REPO][WEIGHTS], server.commit, server.break_after = content, COMMIT, [120_000, 0, 0]
        with pytest.raises(DownloadFailed, match="broke 3 times in a row"):
            await hub.fetch(REPO, report=ignore)
        (part,) = (tmp_path / "hub").rglob("*.part")
        kept, seen = part.stat().st_size, len(server.seen)
        assert 0 < kept <= 120_000
        server.ignore_range = ignores_range
        reports: list[Progress] = []
        folder = await make_hub(server, tmp_path).fetch(REPO, report=reports.append)
    assert (folder / WEIGHTS).read_bytes() == content
    went_on = next(entry.range for entry in server.seen[seen:] if entry.path.startswith("/cdn/"))
    assert went_on == f"bytes={kept}-{len(content) - 1}"
    fractions = [report.fraction or 0.0 for report in reports if report.stage.startswith("downloading")]
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
async def test_a_file_whose_digest_differs_is_removed_and_nothing_appears(tmp_path: Path, name: str) -> None:
    async with serve_hub(make_server(wrong_bytes={name})) as server:
        with pytest.raises(DownloadFailed, match=f"{name} did not arrive as the hub describes it"):
            await make_hub(server, tmp_path).fetch(REPO, report=ignore)
    content, blobs = server.files[REPO][name], files_below(tmp_path / "hub")
    assert all(path.startswith("models--acme--tiny/blobs/") for path in blobs)
    assert not [path for path in blobs if git_id(content) in path or hashlib.sha256(content).hexdigest() in path]


async def test_a_blob_that_was_damaged_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        hub = make_hub(server, tmp_path)
        folder = await hub.fetch(REPO, report=ignore)
        blob = (folder / WEIGHTS).resolve()
        blob.write_bytes(bytes(blob.stat().st_size))
        before = len(server.downloads())
        await hub.fetch(REPO, report=ignore)
    assert (folder / WEIGHTS).read_bytes() == server.files[REPO][WEIGHTS]
    assert [seen.path for seen in server.downloads()[before:]] == [f"/cdn/{REPO}/{WEIGHTS}"]


async def test_two_fetches_of_the_same_share_one_and_both_hear_of_its_progress(tmp_path: Path) -> None:
    first, second = list[Progress](), list[Progress]()
    async with serve_hub(make_server()) as server:
        hub = make_hub(server, tmp_path)
        results = await asyncio.gather(hub.fetch(REPO, report=first.append), hub.fetch(REPO, report=second.append))
    assert results[0] == results[1]
    assert first == second != []
    paths = [seen.path for seen in server.downloads()]
    assert len(paths) == len(set(paths)) == 3


async def test_who_shares_a_fetch_can_leave_it_and_the_transfer_stops_when_nobody_is_left(tmp_path: Path) -> None:
    async with serve_hub(make_server(hold=asyncio.Event())) as server:
        hub = make_hub(server, tmp_path)
        leaving, staying = (asyncio.create_task(hub.fetch(REPO, report=ignore)) for _ in range(2))
        await eventually(lambda: server.open_bodies == 1, "the server is asked for a file")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert (leaving.cancelled(), server.open_bodies) == (True, 1)
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
        await eventually(lambda: server.open_bodies == 0, "the connection is closed")
        again = [asyncio.create_task(hub.fetch(REPO, report=ignore)) for _ in range(2)]
        await eventually(lambda: server.open_bodies == 1, "the server is asked for a file")
        again.pop().cancel()
        assert server.hold is not None
        server.hold.set()
        assert ((await again[0]) / WEIGHTS).is_file()


async def test_a_file_that_another_program_is_fetching_is_left_to_it(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        blob = f"{hashlib.sha256(server.files[REPO][WEIGHTS]).hexdigest()}.part"
        part = tmp_path / "hub" / "models--acme--tiny" / "blobs" / blob
        part.parent.mkdir(parents=True)
        with part.open("ab") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(DownloadFailed, match="being fetched by another program"):
                await make_hub(server, tmp_path).fetch(REPO, report=ignore)
        assert part.read_bytes() == b""


@pytest.mark.parametrize(
    ("files", "faults", "words"),
    [
        (None, {"gated": {REPO}}, "asks for its terms to be accepted"),
        (None, {"token": SECRET}, "no repository acme/tiny, or it is private: then set HF_TOKEN"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, {}, "only pickle weights"),
        ({"README.md": b"x"}, {}, "no weights that can be used"),
        (None, {"statuses": [404]}, "answers 404 for"),
        ({"../../evil.safetensors": make_tensors()}, {}, "no weights that can be used"),
        ({"config.json": b"{}", "model.bin": b"PK\x03\x04 a zip of pickles"}, {}, "weights of PyTorch"),
        (None, {"commit": "elsewhere"}, "acme/tiny has no revision v9"),
    ],
)
async def test_what_cannot_be_fetched_is_said(
    tmp_path: Path, files: dict[str, bytes] | None, faults: dict[str, object], words: str
) -> None:
    async with serve_hub(make_server(files, **faults)) as server:
        revision = "v9" if "commit" in faults else None
        with pytest.raises(DownloadFailed, match=words) as refusal:
            await make_hub(server, tmp_path).fetch(REPO, revision=revision, report=ignore)
    assert SECRET not in str(refusal.value)
    assert not [
        path for path in files_below(tmp_path) if path.endswith((".safetensors", git_id(b"PK\x03\x04 a zip of pickles")))
    ]


async def test_what_is_off_the_list_too_large_or_no_id_never_has_a_byte_fetched(tmp_path: Path) -> None:
    async with serve_hub(make_server({WEIGHTS: make_tensors(3_000_000), "config.json": b"{}"})) as server:
        with pytest.raises(DownloadFailed, match="MUSTER_HUB_ALLOW"):
            await make_hub(server, tmp_path, allow=["other/*"]).fetch(REPO, report=ignore)
        library = Library(None, tmp_path, make_hub(server, tmp_path), read_shape=read_shape)
        for model_id, revision in (("acme/../tiny", None), (REPO, "../main"), ("tiny", None)):
            with pytest.raises((InvalidRequest, DownloadFailed)):
                await library.fetch(model_id, revision=revision, report=ignore)
        assert server.seen == []
        hub = make_hub(server, tmp_path, free_bytes=lambda _: 66_000_000)
        with pytest.raises(DownloadFailed, match=r"needs 67 MB on the disk .* and 66 MB are free"):
            await hub.fetch(REPO, report=ignore)
        assert not server.downloads()
    with pytest.raises(DownloadFailed, match=r"127\.0\.0\.1:9 cannot be asked .* HF_ENDPOINT"):
        await Hub(tmp_path / "hub", endpoint="http://127.0.0.1:9").fetch(REPO, report=ignore)


async def test_of_a_repository_with_several_quantisations_one_is_fetched_when_it_is_named(tmp_path: Path) -> None:
    content = TINY_MODEL_PATH.read_bytes()
    files = {"Q8_0/tiny-Q8_0.gguf": content, "tiny-Q4_0.gguf": b"GGUF other", "config.json": b"{}"}
    async with serve_hub(make_server(files, lfs={"Q8_0/tiny-Q8_0.gguf"})) as server:
        library = Library(None, tmp_path, make_hub(server, tmp_path), read_shape=read_shape)
        with pytest.raises(
            DownloadFailed, match="several models; ask for one of them: acme/tiny/Q8_0/tiny-Q8_0, acme/tiny/tiny-Q4_0"
        ):
            await library.fetch(REPO, revision=None, report=ignore)
        path = await library.fetch(f"{REPO}/Q8_0/tiny-Q8_0", revision=None, report=ignore)
        with pytest.raises(DownloadFailed, match=r"has no tiny-Q2\.gguf"):
            await library.fetch(f"{REPO}/tiny-Q2", revision=None, report=ignore)
    assert (path.read_bytes(), library.find(f"{REPO}/Q8_0/tiny-Q8_0")) == (content, path)
    assert read_shape(path).quantization == "q8_0"


# loading what is not there yet


async def load(parts: Parts, model_id: str) -> Model:
    order = await parts.pool.loader.order(model_id, overrides={})
    assert isinstance(order, LoadOrder)
    await parts.pool.loader.carry_out(order, lambda _: None)
    return find(parts, model_id)


async def test_a_model_of_the_hub_is_fetched_with_progress_loaded_and_not_fetched_again(tmp_path: Path) -> None:
    model_id, hub = f"{REPO}/{FILE}", make_server({FILE: TINY_MODEL_PATH.read_bytes(), "README.md": b"# tiny"})
    async with serve_hub(hub) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
        heard: list[Progress] = []
        planned = parts.pool.registry.find_or_plan(model_id)
        with pytest.raises(UnknownModel):
            find(parts, model_id)
        parts.pool.registry.define(planned.definition)
        for attempt in range(2):
            order = await parts.pool.loader.order(model_id, overrides={"gguf_n_ctx": 512})
            assert isinstance(order, LoadOrder)
            assert order.must_fetch is (attempt == 0)
            await parts.pool.loader.carry_out(order, heard.append)
            assert await answer(parts, model_id) == 0
            await parts.pool.unloader.unload(model_id)
        assert [progress for progress in heard if progress.stage.startswith("downloading")][-1].fraction == pytest.approx(1.0)


async def test_what_the_owner_does_not_allow_is_simply_unknown_and_what_is_his_is_not_taken_for_a_size(tmp_path: Path) -> None:
    write_models(tmp_path / "models", "tiny")
    async with assembled(tmp_path, MUSTER_HUB_ALLOW="trusted/*") as parts:
        with pytest.raises(UnknownModel):
            parts.pool.registry.find_or_plan(f"{REPO}/{FILE}")
        assert parts.pool.registry.find_or_plan("trusted/model").definition.backend == "vllm"
        assert parts.pool.registry.find_or_plan("tiny").definition.backend == "gguf"


@pytest.mark.parametrize("size", ["tiny", "large"])
async def test_a_whisper_model_is_fetched_by_its_size_once(tmp_path: Path, size: str) -> None:
    files = {path.name: path.read_bytes() for path in whisper_dir().iterdir()}
    hub = HubServer({f"Systran/faster-whisper-{'large-v3' if size == 'large' else size}": files}, lfs={"model.bin"})
    async with serve_hub(hub) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
        fetched: list[int] = []
        for _ in range(2):
            await parts.discover(at_once=True)
            parts.pool.registry.define(parts.pool.registry.find_or_plan(size).definition)
            model = await load(parts, size)
            assert (model.definition.backend, model.is_ready) == ("whisper", True)
            assert TRANSCRIPTIONS in model.capabilities.endpoints
            fetched.append(len(server.downloads()))
            await parts.pool.unloader.unload(size)
        assert fetched[0] == fetched[1] > 0


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
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"nice.safetensors": b"weights"}
    assert len(hub.downloads()) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"comfyui_checkpoints_dir": "/nowhere/checkpoints"}, "comfyui_checkpoints_dir: there is no folder"),
        ({"comfyui_checkpoints_dir": "/tmp", "model_path": "acme/pictures/none.safetensors"}, "has no none.safetensors"),
        ({"comfyui_checkpoints_dir": "/tmp", "model_path": "acme/pictures"}, "names no file of a repository"),
        ({"comfyui_checkpoints_dir": "/tmp", "model_path": "other/pictures/x.safetensors"}, "MUSTER_HUB_ALLOW"),
        ({}, "has no checkpoint nice.safetensors"),
    ],
)
async def test_a_checkpoint_that_cannot_be_had_fails_the_load(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    hub = HubServer({"acme/pictures": {"nice.safetensors": b"weights"}}, lfs={"nice.safetensors"})
    async with serve_hub(hub) as server, ComfyContract().serve() as comfy:
        comfy_settings(tmp_path / "data", comfy.url, **fields)
        async with assembled(tmp_path, HF_ENDPOINT=server.url, MUSTER_HUB_ALLOW="acme/*") as parts:
            parts.pool.registry.define(parts.settings.models["painter"])
            with pytest.raises(RunnerError, match=words):
                await load(parts, "painter")
            assert words in str(find(parts, "painter").last_error)


async def test_a_search_names_what_may_be_fetched_and_the_first_of_parts(tmp_path: Path) -> None:
    server = make_server(gated={"acme/tiny"}, token=SECRET)
    server.files |= {
        "acme/tiny-parts": {f"big-0000{n}-of-00002.gguf": b"" for n in (1, 2)} | {"small.gguf": b"", "README.md": b""},
        "evil/tiny": {"a.gguf": b""},
    }
    async with serve_hub(server):
        found = await make_hub(server, tmp_path, allow=("acme/*",), token=SECRET).search("tiny")
    assert [(one.name, one.is_gated, one.files) for one in found] == [
        ("acme/tiny", True, []), ("acme/tiny-parts", False, ["big-00001-of-00002.gguf", "small.gguf"]),
    ]  # fmt: skip
    assert (found[0].downloads, found[0].task) == (7, "text-generation")
    assert [seen.authorization for seen in server.seen] == [f"Bearer {SECRET}"]


async def test_a_search_that_cannot_be_made_says_why_within_its_time(tmp_path: Path) -> None:
    server = make_server(statuses=[503])
    async with serve_hub(server):
        hub = make_hub(server, tmp_path)
        with pytest.raises(DownloadFailed, match="answers 503 to a search"):
            await hub.search("tiny")
        set_runner_limits(models={"hub_search_bytes": 10})
        with pytest.raises(DownloadFailed, match="search for something narrower"):
            await hub.search("tiny")
        set_runner_limits(models={"hub_search_s": 0.05})
        server.hold = asyncio.Event()
        asked = asyncio.create_task(hub.search("tiny"))
        await eventually(lambda: len(server.seen) == 3)
        with pytest.raises(DownloadFailed, match="still searching for something else"):
            await hub.search("other")
        with pytest.raises(DownloadFailed, match="cannot be searched \\(TimeoutError\\)"):
            await asked
        server.hold.set()
    with pytest.raises(DownloadFailed, match="cannot be searched"):
        await hub.search("tiny")
    with pytest.raises(DownloadFailed, match="switched off"):
        await Library(None, None, None, read_shape=read_shape).search("tiny")
