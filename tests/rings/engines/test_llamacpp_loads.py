"""Loading and unloading the real llama.cpp: what it is given, what it says when it cannot, what it leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines.child import gpu_environment
from runner.engines.llamacpp import LlamaCpp, child_settings, weight_files
from runner.engines.llamacpp_log import LoadLog
from runner.engines.port import CHAT, MESSAGES, FlushRequest, FlushResult, FlushScope, Health
from runner.errors import EngineError
from tests.fakes.engines.cases_llamacpp import QUESTION, tiny_plan
from tests.fakes.engines.suite import ask, assert_gone, assert_health, chat_call, process_tree
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(autouse=True)
def patience() -> None:
    """Have time for what a child still has to say: on a busy machine the usual seconds pass too soon."""
    set_runner_limits(engines={"last_words_s": 30.0, "llama_log_s": 30.0})


def ignore(_progress: Progress) -> None:
    """Take progress that is of no interest."""


def our_children() -> list[psutil.Process]:
    """The engine processes of this test's own that still run."""
    return [child for child in psutil.Process().children() if "runner.engines" in " ".join(_words_of(child))]


def _words_of(process: psutil.Process) -> list[str]:
    """The command line; nothing for a process that has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # its subclass ZombieProcess too
        return []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "failed to read magic"),
        (b"this is no model " * 100, "invalid magic"),
        (TINY_MODEL_PATH.read_bytes()[:100], "failed to read key-value pairs"),
        (TINY_MODEL_PATH.read_bytes()[:600_000], "data is not within the file bounds, model is corrupted or incomplete"),
    ],
    ids=["empty", "something else", "cut in its header", "cut in its weights"],
)
async def test_a_file_that_is_no_whole_model_fails_with_the_reason(
    tmp_path: Path, client: aiohttp.ClientSession, content: bytes, words: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    engine = LlamaCpp(tiny_plan(path), client)
    with pytest.raises(EngineError) as caught:
        await engine.load(ignore)
    assert str(caught.value).startswith("broken.gguf could not be loaded: ")
    assert words in str(caught.value)
    assert engine.pids == ()
    assert our_children() == []


async def test_a_file_that_is_not_there_fails_with_the_reason(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine = LlamaCpp(tiny_plan(tmp_path / "gone.gguf"), client)
    with pytest.raises(EngineError, match=r"gone\.gguf could not be loaded: .*No such file"):
        await engine.load(ignore)
    with pytest.raises(EngineError, match="give its path in the settings"):
        await LlamaCpp(dataclasses.replace(tiny_plan(), path=None), client).load(ignore)


def endless_model(folder: Path) -> Path:
    """Return a model whose first part is never there for who opens it, as on a disk that is slow beyond measure."""
    first, second = (folder / f"slow-0000{number}-of-00002.gguf" for number in (1, 2))
    os.mkfifo(first)
    second.touch()
    os.truncate(second, 1 << 30)  # of holes: only its size counts
    return first


async def begin_endless_load(engine: LlamaCpp, *, shares: int) -> tuple[asyncio.Task[None], list[float]]:
    """Return a load that goes on for as long as it is let, and what it has told so far of the share that was read."""
    told: list[float] = []

    def note(progress: Progress) -> None:
        if progress.stage == "reading weights" and progress.fraction is not None:
            told.append(progress.fraction)

    loading = asyncio.create_task(engine.load(note))
    await eventually(lambda: len(told) >= shares or loading.done(), "the child reads")
    return loading, told


async def test_a_child_killed_half_way_is_an_error_and_the_next_load_works(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    path = endless_model(tmp_path)
    engine = LlamaCpp(tiny_plan(path), client)
    loading, _ = await begin_endless_load(engine, shares=1)
    os.kill(engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"slow-00001-of-00002\.gguf could not be loaded: "):
        await asyncio.wait_for(loading, 30)
    assert engine.pids == ()
    assert our_children() == []
    path.unlink()
    shutil.copyfile(TINY_MODEL_PATH, path)
    try:
        await engine.load(ignore)
        await assert_health(engine, Health.OK)
    finally:
        await engine.unload(gently=True)


async def test_a_load_tells_its_stages(client: aiohttp.ClientSession) -> None:
    engine = LlamaCpp(tiny_plan(), client)
    reported: list[Progress] = []
    try:
        await engine.load(reported.append)
    finally:
        await engine.unload(gently=True)
    stages = [stage for stage, _ in itertools.groupby(reported, key=lambda progress: progress.stage)]
    assert stages == ["starting the engine process", "reading weights", "warming up"]


async def test_what_the_log_says_of_a_load_is_heard_although_it_comes_after_the_answer(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCpp, "child_module", "tests.fakes.engines.programs.late_log_child")
    engine = LlamaCpp(tiny_plan(), client)
    reported: list[Progress] = []
    try:
        await engine.load(reported.append)
        assert (await engine.stats()).kv_bytes == 4 * 1024 * 1024
    finally:
        await engine.unload(gently=False)
    assert reported[-1].stage == "warming up"


async def test_a_load_that_is_cancelled_when_its_child_already_serves_leaves_no_process(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCpp, "child_module", "tests.fakes.engines.programs.late_log_child")
    set_runner_limits(engines={"llama_log_s": 3600.0})
    monkeypatch.setattr(LoadLog, "read", lambda _log, _line: None)
    engine = LlamaCpp(tiny_plan(), client)
    loading = asyncio.create_task(engine.load(ignore))
    await eventually(lambda: engine._server.base_url, "the child serves")
    processes = process_tree(engine.pids)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.pids == ()
    await assert_gone(processes)


async def test_a_child_that_reads_for_long_is_seen_reading(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """The share of the files that is in its memory is reported meanwhile."""
    loading, shares = await begin_endless_load(LlamaCpp(tiny_plan(endless_model(tmp_path)), client), shares=4)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert all(0.0 <= share <= 0.99 for share in shares)
    assert max(shares) > 0.0, "the child itself begins with 0, which may come last"


async def test_a_context_of_no_given_length_is_the_models_own_where_that_is_short(client: aiohttp.ClientSession) -> None:
    engine = LlamaCpp(tiny_plan(slots=2, context_tokens=None), client)
    try:
        await engine.load(ignore)
        assert (await engine.stats()).kv_total_tokens == 2 * 2048
    finally:
        await engine.unload(gently=True)


async def test_many_loads_and_unloads_leave_no_process_and_no_file_handle(client: aiohttp.ClientSession) -> None:
    set_runner_limits(engines={"stop_s": 3600.0})  # so that a deadlock of the engine's own is not ended by force
    engine = LlamaCpp(tiny_plan(slots=1), client)
    handles = 0
    for number in range(12):
        await engine.load(ignore)
        processes = process_tree(engine.pids)
        if number % 2:
            await ask(engine, chat_call("tiny", QUESTION, max_tokens=2))
        await asyncio.wait_for(engine.unload(gently=True), 30)
        await assert_gone(processes)
        if number == 1:
            handles = psutil.Process().num_fds()
    # Of a process that has ended, the pipes are closed in a later turn of the loop.
    await eventually(lambda: psutil.Process().num_fds() <= handles, "no file handle is left")


async def test_a_flush_of_what_is_not_loaded_finds_nothing(client: aiohttp.ClientSession) -> None:
    outcome = await LlamaCpp(tiny_plan(), client).flush(FlushRequest(FlushScope.ALL))
    assert (outcome.result, outcome.entries_removed) == (FlushResult.FLUSHED, 0)


async def test_the_child_sees_the_gpus_of_its_plan_alone_and_none_of_our_secrets(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_TOKEN", "secret")
    engine = LlamaCpp(dataclasses.replace(tiny_plan(), gpu_ids=(1, 3)), client)
    try:
        await engine.load(ignore)
        seen = psutil.Process(engine.pids[0]).environ()
    finally:
        await engine.unload(gently=True)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("1,3", "PCI_BUS_ID")
    assert "MUSTER_TOKEN" not in seen
    assert gpu_environment(()) == {}


async def test_options_of_the_plan_reach_the_engine() -> None:
    options: dict[str, object] = {
        "gguf_n_gpu_layers": 7, "gguf_flash_attn": "off", "gguf_type_k": "q8_0", "gguf_type_v": "f32", "gguf_embedding": True,
    }  # fmt: skip
    settings = child_settings(tiny_plan(options=options), TINY_MODEL_PATH, "key")
    told = {name: settings[name] for name in ("gpu_layers", "flash_attn", "type_k", "type_v", "embedding")}
    assert told == {"gpu_layers": 7, "flash_attn": "off", "type_k": "q8_0", "type_v": "f32", "embedding": True}


async def test_a_combination_the_engine_refuses_is_told_in_its_words(client: aiohttp.ClientSession) -> None:
    options: dict[str, object] = {"gguf_flash_attn": "off", "gguf_type_v": "q8_0"}
    engine = LlamaCpp(tiny_plan(options=options), client)
    with pytest.raises(EngineError, match=r"quantized V cache requires flash_attn to be enabled$"):
        await engine.load(ignore)
    assert engine.pids == ()


async def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in [*parts, tmp_path / "big-00001-of-00003.gguf", tmp_path / "other.gguf"]:
        part.write_bytes(b"x")
    assert weight_files(parts[0]) == parts
    assert weight_files(tmp_path / "other.gguf") == [tmp_path / "other.gguf"]
    assert weight_files(tmp_path / "gone.gguf") == []


THINKER = (
    b"{% for message in messages %}{{ message['content'] }}{% endfor %}"
    b"{% if enable_thinking is defined and not enable_thinking %}{{ ' without any thoughts' }}{% endif %}"
)
"""A template that can be told not to think, no longer than the one in the file that it is put into."""


def write_thinker(path: Path) -> Path:
    content = TINY_MODEL_PATH.read_bytes()
    start = content.index(b"{% for message in messages %}")
    length = int.from_bytes(content[start - 8 : start], "little")
    path.write_bytes(content[:start] + THINKER.ljust(length) + content[start + length :])
    return path


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_thinking_is_as_the_settings_say_in_every_dialect_unless_the_request_does(
    client: aiohttp.ClientSession, tmp_path: Path, path: str
) -> None:
    file = write_thinker(tmp_path / "thinker.gguf")
    call = dataclasses.replace(chat_call("tiny", QUESTION, max_tokens=1), path=path, cache_mode="none")
    asked = dataclasses.replace(chat_call("tiny", QUESTION, max_tokens=1, chat_template_kwargs={"enable_thinking": True}))
    counts: dict[object, int] = {}
    for wanted in (True, False):
        engine = LlamaCpp(tiny_plan(file, options={"enable_thinking": wanted}), client)
        try:
            await engine.load(ignore)
            counts[wanted] = prompt_tokens(await ask(engine, call))
            counts["asked", wanted] = prompt_tokens(await ask(engine, asked))
        finally:
            await engine.unload(gently=False)
    assert counts[True] < counts[False]
    assert counts["asked", True] == counts["asked", False] == counts[True]


def prompt_tokens(body: bytes) -> int:
    usage = json.loads(body)["usage"]
    return int(usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"] + usage["cache_read_input_tokens"])


async def test_a_model_on_the_cpu_gets_no_layers_on_a_gpu_and_sees_none() -> None:
    plan = tiny_plan(options={"device": "cpu"})
    assert child_settings(plan, TINY_MODEL_PATH, "key")["gpu_layers"] == 0
    assert gpu_environment((), is_cpu=True)["CUDA_VISIBLE_DEVICES"] == ""
