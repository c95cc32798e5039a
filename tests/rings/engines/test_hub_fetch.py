"""Fetching models from a hub, and loading what is not on the node yet."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines.port import TRANSCRIPTIONS
from runner.errors import DownloadFailed, InvalidRequest, RunnerError, UnknownModel
from runner.fit import read_shape
from runner.library import Hub, Library, allow_listed
from runner.parts import Parts
from runner.pool import LoadOrder, LoadResult, Model, ModelState
from tests.fakes.engines.comfyui import ComfyContract
from tests.fakes.engines.hub_server import COMMIT, HubServer, serve_hub
from tests.fakes.limits import set_runner_limits
from tests.fakes.models.make import whisper_dir
from tests.fakes.runners.parts import answer, assembled, find, write_models
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

TINY = Path(__file__).resolve().parents[3] / "runner" / "tiny" / "muster-tiny-q8_0.gguf"
REPO = "acme/tiny"
SECRET = "hf_" + "s" * 20


def make_tensors(count: int = 64, fill: bytes = b"w") -> bytes:
    header = {"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + fill * count


def make_repo(**more: bytes) -> dict[str, bytes]:
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 128}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "model.safetensors": make_tensors(200_000),
        "pytorch_model.bin": b"\x80\x04 pickled",
        "modeling_tiny.py": b"raise SystemExit",
        "README.md": b"# tiny",
        "consolidated.safetensors": make_tensors(10),
        **more,
    }


def make_server(files: dict[str, bytes] | None = None, **faults: object) -> HubServer:
    server = HubServer({REPO: files or make_repo()}, lfs={"model.safetensors", "consolidated.safetensors"})
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


async def test_only_weights_and_what_describes_them_are_fetched_and_the_hubs_own_library_finds_them(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)

    assert files_below(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert folder.name == COMMIT
    assert (folder / "model.safetensors").read_bytes() == server.files[REPO]["model.safetensors"]
    assert not list((tmp_path / "hub").rglob("*.part"))
    found = huggingface_hub.try_to_load_from_cache(REPO, "config.json", cache_dir=tmp_path / "hub")
    assert found == str(folder / "config.json")
    scanned = huggingface_hub.scan_cache_dir(tmp_path / "hub")
    assert [(repo.repo_id, repo.nb_files) for repo in scanned.repos] == [(REPO, 3)]
    assert not scanned.warnings


async def test_the_revision_is_pinned_to_a_commit_before_the_first_file_is_asked_for(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        await make_hub(server, tmp_path).fetch(REPO, revision="v1.0", report=ignore)

    assert server.seen[0].path == f"/api/models/{REPO}/revision/v1.0"
    assert server.seen[0].query == "blobs=true"
    assert all(f"/resolve/{COMMIT}/" in seen.path for seen in server.seen[1:] if "/resolve/" in seen.path)
    assert (tmp_path / "hub" / "models--acme--tiny" / "refs" / "v1.0").read_text() == COMMIT


async def test_what_was_fetched_is_found_by_its_id_and_by_the_revision_it_was_pinned_to(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        library = Library(None, tmp_path, make_hub(server, tmp_path), read_shape=read_shape)
        assert library.find(REPO) is None
        folder = await library.fetch(REPO, revision="v1.0", report=ignore)

    assert library.resolve(REPO, revision="v1.0") == folder
    assert library.resolve(REPO, revision=COMMIT) == folder
    assert library.resolve(REPO) == folder  # the only one there is
    assert library.find(REPO, revision="other") is None
    assert [(entry.model_id, entry.backend, entry.problem) for entry in library.discover()] == [(REPO, "vllm", None)]


async def test_a_token_goes_to_the_hub_and_never_to_where_it_redirects(tmp_path: Path) -> None:
    async with serve_hub(make_server(token=SECRET)) as server:
        await make_hub(server, tmp_path, token=SECRET).fetch(REPO, report=ignore)

    to_cdn = [seen for seen in server.seen if seen.path.startswith("/cdn/")]
    to_hub = [seen for seen in server.seen if not seen.path.startswith("/cdn/")]
    assert to_cdn
    assert {seen.authorization for seen in to_cdn} == {None}
    assert {seen.authorization for seen in to_hub} == {f"Bearer {SECRET}"}


async def test_progress_is_counted_in_bytes_and_ends_at_one(tmp_path: Path) -> None:
    reports: list[Progress] = []
    async with serve_hub(make_server()) as server:
        await make_hub(server, tmp_path).fetch(REPO, report=reports.append)

    fractions = [report.fraction for report in reports if report.stage.startswith("downloading")]
    assert fractions
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions, key=lambda value: value or 0.0)
    total = sum(len(server.files[REPO][name]) for name in ("config.json", "tokenizer.json", "model.safetensors"))
    assert f"of {total / 1e6:.1f} MB" in reports[-1].stage


async def test_a_transfer_that_breaks_goes_on_where_it_broke(tmp_path: Path) -> None:
    async with serve_hub(make_server({"model.safetensors": make_tensors(400_000), "config.json": b"{}"})) as server:
        server.break_after = [0, 2]  # the configuration, at its first byte and at its end
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)
        assert (folder / "config.json").read_bytes() == b"{}"

        server.files[REPO]["model.safetensors"] = make_tensors(500_000)
        server.commit = "d" * 40
        server.break_after = [150_000, 100_000]
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)

    assert (folder / "model.safetensors").read_bytes() == server.files[REPO]["model.safetensors"]
    offsets = [int((seen.range or "").removeprefix("bytes=").partition("-")[0]) for seen in server.downloads()[-3:]]
    assert offsets[0] == 0
    assert offsets[0] < offsets[1] <= 150_000
    assert offsets[1] < offsets[2] <= 250_000


async def test_after_breaking_again_and_again_it_fails_and_the_next_fetch_goes_on_from_what_had_come(tmp_path: Path) -> None:
    files = {"model.safetensors": make_tensors(300_000), "config.json": b"{}"}
    async with serve_hub(make_server(files, lfs={"model.safetensors"})) as server:
        hub = make_hub(server, tmp_path)
        await _fetch_config_first(server, hub)
        server.break_after = [120_000, 0, 0]
        with pytest.raises(DownloadFailed, match="broke 3 times in a row"):
            await hub.fetch(REPO, report=ignore)
        parts = list((tmp_path / "hub").rglob("*.part"))
        kept = parts[0].stat().st_size
        assert 0 < kept <= 120_000

        seen = len(server.seen)
        folder = await Hub(tmp_path / "hub", endpoint=server.url).fetch(REPO, report=ignore)

    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    ranges = [entry.range for entry in server.seen[seen:] if entry.path.startswith("/cdn/")]
    assert ranges == [f"bytes={kept}-{len(files['model.safetensors']) - 1}"]


async def _fetch_config_first(server: HubServer, hub: Hub) -> None:
    """Have the configuration as a blob, so that faults hit the weights."""
    weights = server.files[REPO].pop("model.safetensors")
    server.files[REPO]["model.safetensors"] = make_tensors(1)
    server.commit = "e" * 40
    await hub.fetch(REPO, report=ignore)
    server.files[REPO]["model.safetensors"] = weights
    server.commit = COMMIT


async def test_a_server_that_ignores_ranges_is_read_again_from_the_beginning(tmp_path: Path) -> None:
    files = {"model.safetensors": make_tensors(300_000), "config.json": b"{}"}
    async with serve_hub(make_server(files, ignore_range=True)) as server:
        hub = make_hub(server, tmp_path)
        await _fetch_config_first(server, hub)
        server.break_after = [100_000]
        reports: list[Progress] = []
        folder = await hub.fetch(REPO, report=reports.append)

    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert reports[-1].fraction == 1.0


async def test_a_server_that_is_overloaded_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    async with serve_hub(make_server(statuses=[503, 429])) as server:
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)

    assert (folder / "config.json").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
async def test_a_file_whose_digest_differs_is_removed_and_nothing_appears(tmp_path: Path, name: str) -> None:
    async with serve_hub(make_server(wrong_bytes={name})) as server:
        with pytest.raises(DownloadFailed, match=f"{name} did not arrive as the hub describes it"):
            await make_hub(server, tmp_path).fetch(REPO, report=ignore)

    content = server.files[REPO][name]
    blobs = files_below(tmp_path / "hub")
    assert all(path.startswith("models--acme--tiny/blobs/") for path in blobs)
    assert not [path for path in blobs if _git_id(content) in path or hashlib.sha256(content).hexdigest() in path]


async def test_a_blob_that_was_damaged_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        hub = make_hub(server, tmp_path)
        folder = await hub.fetch(REPO, report=ignore)
        blob = (folder / "model.safetensors").resolve()
        blob.write_bytes(bytes(blob.stat().st_size))
        before = len(server.downloads())
        await hub.fetch(REPO, report=ignore)

    assert (folder / "model.safetensors").read_bytes() == server.files[REPO]["model.safetensors"]
    assert [seen.path for seen in server.downloads()[before:]] == [f"/cdn/{REPO}/model.safetensors"]


async def test_without_room_on_the_disk_not_a_byte_is_fetched_and_both_sizes_are_named(tmp_path: Path) -> None:
    async with serve_hub(make_server({"model.safetensors": make_tensors(3_000_000), "config.json": b"{}"})) as server:
        hub = make_hub(server, tmp_path, free_bytes=lambda _: 66_000_000)
        with pytest.raises(DownloadFailed, match=r"needs 67 MB on the disk .* and 66 MB are free"):
            await hub.fetch(REPO, report=ignore)

        assert not server.downloads()


async def test_two_fetches_of_the_same_share_one_and_both_hear_of_its_progress(tmp_path: Path) -> None:
    first: list[Progress] = []
    second: list[Progress] = []
    async with serve_hub(make_server()) as server:
        hub = make_hub(server, tmp_path)
        results = await asyncio.gather(hub.fetch(REPO, report=first.append), hub.fetch(REPO, report=second.append))

    assert results[0] == results[1]
    assert first == second
    assert len(first) > 1
    paths = [seen.path for seen in server.downloads()]
    assert len(paths) == len(set(paths)) == 3


async def _held_fetch(server: HubServer, count: int, home: Path) -> list[asyncio.Task[Path]]:
    """Start fetches that have come half-way through their first file."""
    server.hold = asyncio.Event()
    hub = make_hub(server, home)
    tasks = [asyncio.create_task(hub.fetch(REPO, report=ignore)) for _ in range(count)]
    await eventually(lambda: server.open_bodies == 1, "the server is asked for a file")
    return tasks


async def test_cancelling_stops_the_transfer_at_once(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        (task,) = await _held_fetch(server, 1, tmp_path)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: server.open_bodies == 0, "the connection is closed")

        assert server.hold is not None
        server.hold.set()
        folder = await make_hub(server, tmp_path).fetch(REPO, report=ignore)
        assert (folder / "model.safetensors").is_file()


async def test_one_of_two_that_share_a_fetch_can_leave_and_the_other_gets_it(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        leaving, staying = await _held_fetch(server, 2, tmp_path)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert server.open_bodies == 1
        assert server.hold is not None
        server.hold.set()

        assert (await staying).name == COMMIT


async def test_a_file_that_another_program_is_fetching_is_left_to_it(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        blob = f"{hashlib.sha256(server.files[REPO]['model.safetensors']).hexdigest()}.part"
        part = tmp_path / "hub" / "models--acme--tiny" / "blobs" / blob
        part.parent.mkdir(parents=True)
        with part.open("ab") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(DownloadFailed, match="being fetched by another program"):
                await make_hub(server, tmp_path).fetch(REPO, report=ignore)
        assert part.read_bytes() == b""


def _gate(server: HubServer) -> None:
    server.gated = {REPO}


def _hide(server: HubServer) -> None:
    server.token = SECRET


def _only_pickles(server: HubServer) -> None:
    server.files[REPO] = {"config.json": b"{}", "pytorch_model.bin": b"x"}


def _only_text(server: HubServer) -> None:
    server.files[REPO] = {"README.md": b"x"}


def _take_away(server: HubServer) -> None:
    server.statuses = [404]


def _lead_out(server: HubServer) -> None:
    server.files[REPO] = {"../../evil.safetensors": make_tensors()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_gate, "asks for its terms to be accepted"),
        (_hide, "no repository acme/tiny, or it is private: then set HF_TOKEN"),
        (_only_pickles, "only pickle weights"),
        (_only_text, "no weights that can be used"),
        (_take_away, "answers 404 for"),
        (_lead_out, "no weights that can be used"),
    ],
)
async def test_what_cannot_be_fetched_is_refused_with_the_reason(
    tmp_path: Path, change: Callable[[HubServer], None], words: str
) -> None:
    async with serve_hub(make_server()) as server:
        change(server)
        with pytest.raises(DownloadFailed, match=words) as refusal:
            await make_hub(server, tmp_path).fetch(REPO, report=ignore)
    assert SECRET not in str(refusal.value)
    assert not [path for path in files_below(tmp_path) if path.endswith(".safetensors")]


async def test_a_revision_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        with pytest.raises(DownloadFailed, match="acme/tiny has no revision v9"):
            await make_hub(server, tmp_path).fetch(REPO, revision="v9", report=ignore)


async def test_a_hub_that_does_not_answer_is_named_with_what_to_check(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "hub", endpoint="http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"127\.0\.0\.1:9 cannot be asked .* HF_ENDPOINT"):
        await hub.fetch(REPO, report=ignore)


async def test_a_repository_off_the_list_is_not_even_asked_for(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        hub = make_hub(server, tmp_path, is_allowed=allow_listed(["other/*"]))
        with pytest.raises(DownloadFailed, match="MUSTER_HUB_ALLOW"):
            await hub.fetch(REPO, report=ignore)
    assert not server.seen


async def test_of_a_repository_with_several_quantisations_one_is_fetched_when_it_is_named(tmp_path: Path) -> None:
    content = TINY.read_bytes()
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

    assert path.read_bytes() == content
    assert library.resolve(f"{REPO}/Q8_0/tiny-Q8_0") == path
    assert read_shape(path).quantization == "q8_0"
    assert files_below(tmp_path / "hub" / "models--acme--tiny" / "snapshots") == {
        f"{COMMIT}/Q8_0/tiny-Q8_0.gguf", f"{COMMIT}/config.json"
    }  # fmt: skip


async def test_a_pickle_that_calls_itself_a_ctranslate2_model_is_removed(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.bin": b"PK\x03\x04 a zip of pickles"}
    async with serve_hub(make_server(files)) as server:
        with pytest.raises(DownloadFailed, match="weights of PyTorch"):
            await make_hub(server, tmp_path).fetch(REPO, report=ignore)
    assert files_below(tmp_path / "hub") == {f"models--acme--tiny/blobs/{_git_id(b'{}')}"}


def _git_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


async def test_ids_that_are_no_repository_never_reach_the_hub(tmp_path: Path) -> None:
    async with serve_hub(make_server()) as server:
        library = Library(None, tmp_path, make_hub(server, tmp_path), read_shape=read_shape)
        with pytest.raises(InvalidRequest):
            await library.fetch("acme/../tiny", revision=None, report=ignore)
        with pytest.raises(DownloadFailed, match="no id of a repository"):
            await library.fetch("tiny", revision=None, report=ignore)
        with pytest.raises(InvalidRequest):
            await library.fetch(REPO, revision="../main", report=ignore)
    assert not server.seen


FILE = "tiny-q8_0.gguf"
MODEL = f"{REPO}/{FILE}"


def make_gguf_server() -> HubServer:
    return HubServer({REPO: {FILE: TINY_MODEL_PATH.read_bytes(), "README.md": b"# tiny"}}, lfs={FILE})


async def test_a_model_of_the_hub_is_fetched_with_progress_loaded_and_not_fetched_again(tmp_path: Path) -> None:
    async with serve_hub(make_gguf_server()) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
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
    async with serve_hub(make_gguf_server()) as server, assembled(tmp_path, HF_ENDPOINT=server.url) as parts:
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
